"""The embedded log as a history that is carried from and to other storages; see `bsfg.stores.shared.history`.

Frames have the same bytes in a segment as elsewhere, so a log gives and takes them as they are. What is written here is
complete when it is finished, and only then: a log that is being made is no log yet, and lies where nobody opens it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import orjson

from bsfg.batch import EntryBatch
from bsfg.digest import KeptRange
from bsfg.errors import StorageFailed, StorageUnable
from bsfg.gapbook import GapBook
from bsfg.gaps import GapSet
from bsfg.ports import Buffer
from bsfg.stores.log import keysegments
from bsfg.stores.log.files import Files, OpenFile, write_whole
from bsfg.stores.log.frames import FrameRef
from bsfg.stores.log.identity import LogIdentity, read_identity, write_identity
from bsfg.stores.log.journal import Record, encode
from bsfg.stores.log.keysegments import KeySegmentName, KeySegments
from bsfg.stores.log.notes import Anchor, Notes
from bsfg.stores.log.quarantine import write_records
from bsfg.stores.log.segments import SegmentFile, read_segment_header, scan_segment, segment_bases, segment_name
from bsfg.stores.log.storage import CURSORS, STREAMS, LogStorage, log_folder, write_cursors
from bsfg.stores.log.view import kept_ranges, read_latest, write_latest
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA, LogOptions, LogWriter
from bsfg.stores.shared.cursors import ConsumerCursor
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, Damaged, SegmentHeader, Torn, encode_segment_header, padded
from bsfg.stores.shared.framed import departed_of
from bsfg.stores.shared.judging import identity_hash, identity_of, told
from bsfg.stores.shared.keeper import (
    PAGE_BYTES,
    AsideRow,
    BufferFound,
    BufferHead,
    BufferHistory,
    Change,
    DepartedRange,
    FrameRow,
    KeptKeys,
    NewBuffer,
    touched,
)
from bsfg.stores.shared.reading import entries_in, read_keys

_HINT = (
    "Let retention take these entries away, or make one history of it with `bsfg salvage`, which peers notice; then "
    "migrate."
)


class LogExport(BufferHistory):
    """A log that is open, as its history is read."""

    def __init__(self, files: Files, writer: LogWriter) -> None:
        self._files, self._writer = files, writer
        self._place = f"{writer.stream}/{writer.buffer}"
        self._schema = STORE_SCHEMA if writer.buffer == Buffer.STORE else FORWARD_SCHEMA
        identity = read_identity(files, writer.folder)
        if identity is None:
            raise StorageFailed(f"{writer.folder}/log.json cannot be read")
        self._identity = identity
        self._check()
        self._truncated = [left for segment in writer.segments if (left := self._left_in(segment)) is not None]

    def _check(self) -> None:
        """Refuse what has no place in another storage: the ids of earlier histories, columns of earlier versions."""
        writer = self._writer
        if self._identity.lineage:
            says = f"{self._place} was restored from a backup: it has entries, or digests of some, of an earlier log_id"
            raise StorageUnable(says, hint=_HINT)
        for segment in writer.segments:
            if len(segment.frames) and not segment.header.schema.equals(self._schema):
                says = f"{self._place}: entries from {segment.base} on were written by an earlier version"
                raise StorageUnable(f"{says}, with other columns", hint=_HINT)
        kept = {(each.first, each.last) for each in writer.notes.anchors}
        for name in writer.keys.names:
            if (name.first, name.last) not in kept:
                says = f"{self._place}: what was noted of the removed entries {name.first} to {name.last} is lost"
                raise StorageUnable(says, hint=_HINT)

    def _left_in(self, segment: SegmentFile) -> DepartedRange | None:
        """Give the frames of a segment that were truncated, and wait for the rest of it to leave, as if they had left.

        A log lets a file go as a whole. Elsewhere frames go by themselves, and nobody would look for these.
        """
        start = self._writer.start
        refs = [ref for ref in segment.frames if ref.end <= start] if segment.base < start else []
        rows = self._rows(segment, refs)
        try:
            entries = [entries_in(row, self._writer.log_id, self._writer.buffer) for row in rows]
        except Damaged as damage:
            raise StorageFailed(f"{self._place}: {damage}") from None
        return departed_of(rows, entries) if rows else None

    def found(self) -> BufferFound:
        """Give what is there."""
        writer, aside = self._writer, self._writer.quarantine
        head = BufferHead(writer.start, writer.end, writer.used_bytes, 0, writer.newest_unix_ms, writer.chain)
        kept = len(aside), aside.used_bytes, aside.next_id - 1
        return BufferFound(writer.log_id, self._identity.secret, head, writer.book.sets(), *kept)

    def commit(self, change: Change) -> bool:
        """Refuse: this is only read."""
        raise StorageUnable(f"{self._place} is only read here")

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Read frames that follow each other, as they stand in their segment; what is damaged is left out."""
        segments = self._writer.segments
        ends = [*(segment.base for segment in segments[1:]), self._writer.end]
        for segment, end in zip(segments, ends, strict=True):
            while at < min(end, until) and (chosen := _page(segment, at, until, most)):
                if rows := self._rows(segment, chosen):
                    return rows
                at = chosen[-1].end
        return []

    def _rows(self, segment: SegmentFile, refs: Sequence[FrameRef]) -> list[FrameRow]:
        rows: list[FrameRow] = []
        for ref, payload in segment.payloads(refs):
            if isinstance(payload, Exception):
                continue
            header = self._files.read_at(segment.path, ref.position, FRAME_HEADER_BYTES)
            time, before = ref.header.appended_at_unix_ms, ref.header.chain_before
            rows.append(FrameRow(ref.base, ref.count, time, before, header + bytes(payload)))
        return rows

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Read the keys of ranges that left; raises `StorageFailed` when some are not there that must be."""
        keys, found = self._writer.keys, []
        for offset in offsets.tolist():
            if offset < self._writer.notes.keys_start:
                continue
            truncated = next((each for each in self._truncated if each.kept.first <= offset <= each.kept.last), None)
            if truncated is not None:
                found.append(KeptKeys(truncated.kept.first, truncated.kept.last, truncated.keys))
                continue
            name = keys.covering(offset)
            table = keys.table(name) if name is not None else None
            if name is None or table is None:
                raise StorageFailed(f"{self._place}: the keys of what left at offset {offset} are missing or damaged")
            found.append(KeptKeys(name.first, name.last, table.serialize().to_pybytes()))
        return found

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Give what was kept of what was removed; where chain values are nobody asks here."""
        kept = [each for each in kept_ranges(self._writer.notes) if each.last >= each.first]
        return [*sorted(kept, key=lambda each: each.first), *(each.kept for each in self._truncated)], {}

    def latest(self) -> bytes | None:
        """Read the newest entries of what left."""
        try:
            entries = read_latest(self._files, self._writer.folder)
        except Damaged as damage:
            raise StorageFailed(str(damage)) from None
        return bytes(entries.to_ipc()) if len(entries) else None

    def aside(self, after: int | None, limit: int) -> list[AsideRow]:
        """Read refused facts."""
        rows = []
        for item in self._writer.quarantine.page(after, limit):
            if not len(item.facts):
                raise StorageFailed(f"{self._place}: the fact {item.id} in quarantine cannot be read: {item.detail}")
            same = identity_hash(identity_of(item))
            head, fact = told(item, same)
            rows.append(AsideRow(item.id, same - (1 << 64) if same >> 63 else same, orjson.dumps(head).decode(), fact))
        return rows


def _page(segment: SegmentFile, at: int, until: int, most: int) -> list[FrameRef]:
    """Give the frames of a segment that end after an offset and begin before another, no more than a page."""
    chosen: list[FrameRef] = []
    size = 0
    for ref in segment.frames.since(at):
        if ref.end <= at:
            continue
        if ref.base >= until or len(chosen) >= most or (chosen and size + ref.header.frame_bytes > PAGE_BYTES):
            break
        chosen.append(ref)
        size += ref.header.frame_bytes
    return chosen


async def exported(storage: LogStorage, stream: str, buffer: Buffer) -> LogExport:
    """Give the history of a log of a storage that is open."""
    opened = await (storage.store(stream) if buffer == Buffer.STORE else storage.forward(stream))
    return await asyncio.to_thread(LogExport, storage.files, opened.writer)


class LogImport(BufferHistory):
    """A log that is being made of another storage's history; what an earlier attempt has written is not written again.

    Where the history stands is not read from what is there: whoever carries it begins at its beginning, and a frame
    that is there already is passed over.
    """

    def __init__(self, files: Files, stream: str, kind: Buffer, new: NewBuffer, segment_bytes: int) -> None:
        self._files, self._new, self._segment_bytes = files, new, segment_bytes
        self._place, self._folder = f"{stream}/{kind}", log_folder(stream, kind)
        self._schema = STORE_SCHEMA if kind == Buffer.STORE else FORWARD_SCHEMA
        self._head = BufferHead(0, 0, 0, 0, 0, new.chain)
        self._anchors: list[Anchor] = []
        self._keys_start = 0
        self._gaps: Sequence[GapSet] = ()
        self._aside: dict[int, AsideRow] = {}
        self._last_aside_id = 0
        self._latest: bytes | None = None
        for name in ("", "/keys", "/aside", "/index"):
            files.make_folder(self._folder + name)
        self._keys = KeySegments(files, self._folder)
        self._keys.clear_staged()
        self._bases: list[int] = []
        self._there: dict[int, bytes] = {}
        self._there_end = 0
        self._file: OpenFile | None = None
        self._size = 0
        self._has_begun = False
        self._find_written()

    def _find_written(self) -> None:
        """Find the segments that an earlier attempt has left; whatever is odd about them, they are made anew."""
        bases = segment_bases(self._files, self._folder)
        for base in bases:
            path = self._path(base)
            data = bytes(self._files.read(path))
            try:
                header = read_segment_header(self._files, path)
            except (Torn, Damaged):
                self._drop()
                return
            scan = scan_segment(data, header, tail_may_be_torn=base == bases[-1])
            if scan.holes or scan.unchained or header.log_id != self._new.log_id:
                self._drop()
                return
            if not len(scan.frames):
                self._files.remove(path)
                continue
            self._bases.append(base)
            self._there.update({ref.base: ref.header.chain_before for ref in scan.frames})
            self._there_end, self._size = scan.end, padded(scan.sound_bytes)
            if self._size != len(data):
                # The rest was torn when the attempt ended, at most the padding of the last frame is missing.
                write_whole(self._files, path, data[: scan.sound_bytes].ljust(self._size, b"\0"))

    def _drop(self) -> None:
        self._close()
        for base in segment_bases(self._files, self._folder):
            self._files.remove(self._path(base))
        self._files.sync_folder(self._folder)
        self._bases, self._there, self._there_end, self._size = [], {}, 0, 0

    def _path(self, base: int) -> str:
        return f"{self._folder}/{segment_name(base)}"

    # The port, as far as a history is carried by it.

    def found(self) -> BufferFound:
        """Give what is known."""
        size = sum(row.size_bytes for row in self._aside.values())
        aside = len(self._aside), size, self._last_aside_id
        return BufferFound(self._new.log_id, self._new.secret, self._head, self._gaps, *aside)

    def commit(self, change: Change) -> bool:
        """Take a change; what it brings is durable when the log is finished."""
        if change.before != self._head:
            raise touched(self._place, self._head, change.before)
        if change.frame is not None and change.frame.row.content:
            self._append(change.frame.row)
        if change.departed is not None:
            self._depart(change.departed, keys=change.forgotten is None)
        for row in change.aside:
            self._aside[row.id], self._last_aside_id = row, max(self._last_aside_id, row.id)
        if change.released is not None:
            self._aside.pop(change.released.id, None)
        if change.gaps or change.gaps_anew:
            self._gaps = [*(() if change.gaps_anew else self._gaps), *change.gaps]
        if change.latest is not None:
            self._latest = change.latest
        self._head = change.after
        return True

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Give none: whoever brings them has them."""
        return []

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Give none."""
        return []

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Give none."""
        return [], {}

    def latest(self) -> bytes | None:
        """Give what was brought."""
        return self._latest

    def aside(self, after: int | None, limit: int) -> list[AsideRow]:
        """Give none."""
        return []

    # Segments.

    def _append(self, frame: FrameRow) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._there and min(self._there) != frame.base:
                self._drop()  # the source has let go of some that were there
        if frame.base < self._there_end:
            if self._there.get(frame.base) != frame.chain_before:
                raise StorageFailed(f"{self._folder} holds something else at offset {frame.base}")
            return
        size = padded(len(frame.content))
        follows = bool(self._bases) and frame.base == self._there_end
        if not follows or self._size + size > self._segment_bytes:
            self._begin(frame.base, frame.chain_before)
        elif self._file is None:
            self._file = self._files.open_append(self._path(self._bases[-1]))
        assert self._file is not None
        self._file.write([frame.content, bytes(size - len(frame.content))])
        self._size += size
        self._there_end = frame.end

    def _begin(self, base: int, chain: bytes) -> None:
        """Begin a segment: when one is full, and behind entries that are lost, which no segment can have inside it."""
        self._close()
        previous = self._bases[-1] if self._bases else -1
        time = self._head.newest_unix_ms
        header = encode_segment_header(SegmentHeader(self._new.log_id, base, previous, chain, time, self._schema))
        self._file = self._files.create(self._path(base))
        self._file.write([header])
        self._bases.append(base)
        self._size = len(header)

    def _close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None

    # What left.

    def _depart(self, left: DepartedRange, *, keys: bool) -> None:
        kept = left.kept
        self._anchors.append(
            Anchor(
                kept.first,
                kept.last,
                kept.chain_before.hex(),
                kept.chain_after.hex(),
                kept.range_digest,
                left.newest_unix_ms,
            )
        )
        if not keys:
            self._keys_start = kept.last + 1
            return
        name = KeySegmentName(kept.first, kept.last)
        if name not in self._keys.names or keysegments.read(self._files, self._folder, name) is None:
            self._keys.add([(name, self._keys.stage(name, read_keys(left.keys)))])

    # The end.

    def finish(self) -> None:
        """Make all of it durable, so that a node can open it."""
        files, folder, head = self._files, self._folder, self._head
        if not self._has_begun and self._there:
            self._drop()
        if self._there_end > head.end:
            raise StorageFailed(f"{folder} holds more than there is, up to {self._there_end}")
        if not self._bases or self._there_end != head.end:
            self._begin(head.end, head.chain)
        self._close()
        wanted = {(each.first, each.last) for each in self._anchors if each.first >= self._keys_start}
        for name in self._keys.names:
            if (name.first, name.last) not in wanted:
                files.remove(f"{folder}/keys/{name.file_name}")
        if self._latest is not None:
            write_latest(files, folder, EntryBatch(EntryBatch.from_ipc(self._latest).record_batch, sealed=True))
        records = [Record(orjson.loads(row.head), row.fact) for _, row in sorted(self._aside.items())]
        write_records(files, folder, records)
        write_whole(files, f"{folder}/notes.journal", self._notes())
        write_identity(files, folder, LogIdentity(self._new.log_id, self._new.secret))
        for path in (f"{folder}/keys", folder, folder.rpartition("/")[0], STREAMS):
            files.sync_folder(path)

    def _notes(self) -> bytes:
        notes = Notes(self._files, self._folder)
        notes.start, notes.keys_start, notes.anchors = self._head.start, self._keys_start, self._anchors
        notes.book = GapBook()
        notes.book.take_in(*self._gaps)
        if self._last_aside_id > max(self._aside, default=0):
            notes.let_ids_end_at(self._last_aside_id)
        return b"".join(encode(record) for record in notes.snapshot())


class LogZoneImport:
    """The data folder of a zone that is being made: its logs, and the positions of its consumers."""

    def __init__(self, files: Files, segment_bytes: Callable[[str, Buffer], int]) -> None:
        self._files, self._segment_bytes = files, segment_bytes
        self._logs: list[LogImport] = []
        for name in (STREAMS, CURSORS.partition("/")[0]):
            files.make_folder(name)

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer) -> LogImport:
        """Give a log, empty or as an earlier attempt has left it."""
        most = min(LogOptions().segment_bytes, self._segment_bytes(stream, buffer))
        log = LogImport(self._files, stream, buffer, new, most)
        self._logs.append(log)
        return log

    async def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write the positions of all consumers."""
        write_cursors(self._files, cursors)

    def finish(self) -> None:
        """Make all of it durable."""
        for log in self._logs:
            log.finish()
        for name in (CURSORS.partition("/")[0], STREAMS, ""):
            self._files.sync_folder(name)
