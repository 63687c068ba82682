"""Salvaging a data folder: everything of it that can be read, written into another one as a new history.

The rule is one for all kinds of harm. Whatever a log once held, from its start to the furthest offset that anything
speaks of, is in the end a sound frame, or is accounted for by a gap record that was there, or gets one. Offsets stay
what they were; the frames are chained anew under a new id, so that peers notice it. The source is only read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bsfg.digest import Sha256
from bsfg.errors import BsfgError, FormatUnsupported, InvalidArgument, NotAFolder
from bsfg.ports import Buffer, GapRecord
from bsfg.retention import GapReason
from bsfg.rules import check_name
from bsfg.stores.log import keysegments
from bsfg.stores.log.damage import is_damage, readable, uncovered
from bsfg.stores.log.files import Bytes, Files, OpenFile, write_whole
from bsfg.stores.log.frames import FrameRef
from bsfg.stores.log.identity import FORMAT, LogIdentity, checked, read_identity, write_identity
from bsfg.stores.log.journal import BEGINNING, Record, encode, read_journal
from bsfg.stores.log.notes import Notes, read_watermark
from bsfg.stores.log.quarantine import Quarantine, copy_quarantine
from bsfg.stores.log.segments import read_segment_header, scan_segment, segment_bases, segment_name, stand_in
from bsfg.stores.log.storage import (
    CURSORS,
    MARK,
    STREAMS,
    cursor_from,
    listed_logs,
    log_folder,
    read_mark,
    write_cursors,
)
from bsfg.stores.log.trailcheck import check_trail
from bsfg.stores.log.trailfile import copy_trail
from bsfg.stores.log.view import read_latest, write_latest
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA
from bsfg.stores.shared.cursors import ConsumerCursor
from bsfg.stores.shared.frame import (
    FRAME_HEADER_BYTES,
    MAX_OFFSET,
    Damaged,
    SegmentHeader,
    Torn,
    decode_payload,
    encode_frame,
    encode_segment_header,
    genesis,
)

NODE = "node"

Copied = Callable[[int], None]
"""Told the number of bytes that were just dealt with."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that could not be saved: where it was, why, and which entries it was, if it was entries."""

    where: str
    detail: str
    first: int | None = None
    last: int | None = None


@dataclass(slots=True)
class SalvagedLog:
    """One log in the new folder; ``lost`` counts entries that were in the old one and are not in this."""

    stream: str
    buffer: str
    log_id: str = ""
    was_log_id: str = ""
    start: int = 0
    end: int = 0
    facts: int = 0
    lost: int = 0
    quarantined: int = 0


@dataclass(slots=True)
class SalvagedData:
    """What became of a data folder; ``notes`` are repairs that cost nothing that was acknowledged."""

    logs: list[SalvagedLog] = field(default_factory=list)
    consumers: int = 0
    missing: list[Missing] = field(default_factory=list)
    notes: list[Missing] = field(default_factory=list)

    def miss(self, where: str, detail: str, first: int | None = None, last: int | None = None) -> None:
        """Say that something is missing."""
        self.missing.append(Missing(where, detail, first, last))


class Around:
    """A folder that is read around whatever its medium cannot give; it cannot be written."""

    def __init__(self, files: Files, found: SalvagedData) -> None:
        self._files, self._found = files, found
        self._said: set[str] = set()

    def __getattr__(self, name: str) -> object:
        if name in ("size", "exists"):
            return getattr(self._files, name)
        raise AttributeError(name)  # whoever wants to write to the source is wrong

    def read(self, path: str) -> Bytes:
        """Read a file; what cannot be read is zeros, and is named once."""
        data, bad = readable(self._files, path)
        if path not in self._said:
            self._said.add(path)
            self._found.missing += [Missing(path, text) for text in bad]
        return data

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Read a part of a file likewise."""
        try:
            return self._files.read_at(path, start, count)
        except OSError as error:
            if not is_damage(error):
                raise
            return bytes(self.read(path))[start : start + count]

    def list(self, path: str) -> list[str]:
        """List a folder; one that is none, or cannot be read, has nothing in it."""
        try:
            return self._files.list(path)
        except OSError as error:
            if not is_damage(error):
                raise
            self._found.miss(path, f"no folder, or one that cannot be read: {error.strerror}")
            return []


def salvage_data(source: Files, target: Files, now_unix_ms: int, copied: Copied) -> SalvagedData:
    """Write everything readable of a data folder into an empty one; the mark of the new one comes last."""
    found = SalvagedData()
    around: Files = Around(source, found)  # type: ignore[assignment]  # the half of the port that reads
    mark = _mark(around, found)
    for name in (STREAMS, CURSORS.partition("/")[0], NODE):
        target.make_folder(name)
    for name in around.list(NODE):
        if name.endswith(".journal"):
            _copy_journal(around, target, f"{NODE}/{name}", found)
    cursors = _cursors(around, found)
    for stream, buffer in _logs(around, cursors, found):
        log = SalvagedLog(stream, str(buffer))
        at = [cursor.frontier for cursor in cursors if (cursor.spec.stream, cursor.spec.buffer) == (stream, buffer)]
        confirmed = [last + 1 for each in at for last in (each.committed, *(last for _, last in each.ranges))]
        _LogSalvage(around, target, log, found, now_unix_ms, copied).run(max(confirmed, default=0))
        found.logs.append(log)
    _write_cursors(target, cursors, found)
    # The audit trail comes along byte for byte: what is wrong with it is evidence.
    copy_trail(around, target, copied)
    for finding in check_trail(around).problems:
        found.miss(finding.where, finding.detail)
    write_whole(target, MARK, mark)
    target.sync_folder("")
    return found


def _mark(files: Files, found: SalvagedData) -> bytes:
    """Give the mark of the new folder: that of the old one, or a new one if there is something to save."""
    try:
        read_mark(files)
        return bytes(files.read(MARK))
    except NotAFolder as error:
        if not files.list(STREAMS):
            raise
        found.notes.append(Missing(MARK, f"{error.message}; it is written anew"))
        return checked({"format": FORMAT, "hasher": Sha256.name})


def _copy_journal(files: Files, target: Files, path: str, found: SalvagedData) -> None:
    """Copy the sound records of a journal; a torn end was never acknowledged."""
    records, _, problems = read_journal(files, path)
    for text in problems:
        found.miss(path, text)
    write_whole(target, path, b"".join(map(encode, records)) or BEGINNING)


def _cursors(files: Files, found: SalvagedData) -> list[ConsumerCursor]:
    records, _, problems = read_journal(files, CURSORS)
    if not files.exists(CURSORS):
        found.miss(CURSORS, "missing: consumers and what they confirmed are not known any more")
    for text in problems:
        found.miss(CURSORS, f"{text}: consumers, or what they confirmed, may be missing")
    latest: dict[str, ConsumerCursor] = {}
    for record in records:
        cursor = _cursor(record)
        if cursor is None:
            found.miss(CURSORS, f"a record of {str(record.head.get('name'))[:80]!r} cannot be read")
        else:
            latest[cursor.spec.name] = cursor
    return list(latest.values())


def _cursor(record: Record) -> ConsumerCursor | None:
    try:
        return cursor_from(record)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _logs(files: Files, cursors: Sequence[ConsumerCursor], found: SalvagedData) -> list[tuple[str, Buffer]]:
    """List the logs: those that are there, and those whose folder is gone but of which a consumer confirmed entries."""
    logs = dict.fromkeys(listed_logs(files))
    logs.update(dict.fromkeys((cursor.spec.stream, cursor.spec.buffer) for cursor in cursors))
    result = []
    for stream, buffer in logs:
        try:
            check_name("stream", stream)
        except InvalidArgument as error:
            found.notes.append(Missing(f"{STREAMS}/{stream}", f"not a stream: {error.message}"))
            continue
        result.append((stream, buffer))
    return result


def _write_cursors(target: Files, cursors: Sequence[ConsumerCursor], found: SalvagedData) -> None:
    """Bind the consumers to the new histories, in which their offsets mean the same."""
    ids = {(log.stream, log.buffer): log.log_id for log in found.logs}
    kept = [
        replace(cursor, log_id=ids[cursor.spec.stream, str(cursor.spec.buffer)])
        for cursor in cursors
        if (cursor.spec.stream, str(cursor.spec.buffer)) in ids
    ]
    found.consumers = len(kept)
    write_cursors(target, kept)


class _LogSalvage:
    """One log being saved: frames from the old segments, one after the other, into new ones."""

    def __init__(
        self, files: Files, target: Files, log: SalvagedLog, found: SalvagedData, now_unix_ms: int, copied: Copied
    ) -> None:
        self._files, self._log, self._found = files, log, found
        self._now_unix_ms, self._copied = now_unix_ms, copied
        self._folder = log_folder(log.stream, Buffer(log.buffer))
        self._schema = STORE_SCHEMA if log.buffer == Buffer.STORE else FORWARD_SCHEMA
        self._identity = LogIdentity(secrets.token_bytes(16), secrets.token_bytes(32))
        self._new = _NewSegments(target, self._folder, self._identity.log_id)
        self._target = target
        self._harm: list[str] = []
        self._gaps: list[GapRecord] = []

    def run(self, confirmed: int) -> None:
        """Save the log, of which entries below ``confirmed`` are known to have been there."""
        files, folder, log = self._files, self._folder, self._log
        for name in ("", "/keys", "/aside"):
            self._target.make_folder(folder + name)
        old = read_identity(files, folder)
        if old is None:
            self._found.notes.append(
                Missing(f"{folder}/log.json", "the identity is missing or damaged; it has a new one")
            )
        notes = Notes(files, folder)
        at = self._start(notes)
        log.start = notes.start
        for base in segment_bases(files, folder):
            at = self._segment(base, at, old, notes)
        end = self._end(at, confirmed, notes)
        self._lose(at, end - 1, notes, "acknowledged before, but not in the log")
        self._new.finish(end, self._schema)
        log.end, log.log_id = end, self._identity.log_id.hex()
        log.was_log_id = old.log_id.hex() if old is not None else log.was_log_id
        self._keys(notes, end)
        self._latest(end)
        self._write_notes(notes, end)
        write_identity(self._target, folder, self._identity)
        for name in (f"{folder}/keys", folder, folder.rpartition("/")[0], STREAMS):
            self._target.sync_folder(name)

    def _start(self, notes: Notes) -> int:
        """Read the notes and find out where the log begins; without notes, what key segments tell of had left."""
        files, folder = self._files, self._folder
        problems = notes.read()
        bases = segment_bases(files, folder)
        if not files.exists(notes.path) and bases:
            problems.append("missing: gap records and what was noted of removed entries are not known any more")
        for text in problems:
            self._found.miss(notes.path, text)
        notes.drop_unread()
        names = keysegments.listed(files, folder)
        if problems and bases:
            removed = [name for name in names if name.last < bases[0]]
            at = min((name.first for name in removed), default=0)
            for name in removed:
                at = name.last + 1 if name.first <= at else at
            notes.start = max(notes.start, at)
        return notes.start

    def _segment(self, base: int, at: int, old: LogIdentity | None, notes: Notes) -> int:
        """Save what is sound in one segment file; give the offset after it."""
        path = f"{self._folder}/{segment_name(base)}"
        data = bytes(self._files.read(path))
        self._copied(len(data))
        header = self._header(path, data, base)
        if header is None:
            return at
        if old is not None and header.log_id != old.owner_at(base):
            self._harm.append(f"{path} belongs to the log {header.log_id.hex()}")
            return at
        self._log.was_log_id = header.log_id.hex()
        is_last = base == segment_bases(self._files, self._folder)[-1]
        scan = scan_segment(data, header, tail_may_be_torn=is_last)
        self._new.begin(header.schema)
        harm = [(hole.position, f"{path} at byte {hole.position}: {hole.why}") for hole in scan.holes]
        for ref in scan.frames:
            self._harm += [text for position, text in harm if position < ref.position]
            harm = [each for each in harm if each[0] > ref.position]
            at = self._frame(ref, data, path, header, at, notes)
        self._harm += [text for _, text in harm]
        if scan.torn:
            self._harm.append(f"{path} at byte {scan.sound_bytes}: {scan.torn}")
        return at

    def _header(self, path: str, data: bytes, base: int) -> SegmentHeader | None:
        try:
            return read_segment_header(self._files, path)
        except (Torn, Damaged, FormatUnsupported) as error:
            why = error.message if isinstance(error, BsfgError) else str(error)
        if len(data):
            self._harm.append(f"{path} at byte 0: {why}")
        return stand_in(data, base, self._schema)

    def _frame(self, ref: FrameRef, data: bytes, path: str, header: SegmentHeader, at: int, notes: Notes) -> int:
        """Save one frame if it can be decoded and has its place; give the offset after what was saved."""
        if ref.end <= at:
            self._harm.clear()  # it has left, and so has what was damaged before it
            return at
        start = ref.position + FRAME_HEADER_BYTES
        payload = memoryview(data)[start : start + ref.header.payload_bytes]
        try:
            decode_payload(ref.header, payload, header.schema).validate(full=True)
            if ref.base < at and self._new.end is not None:
                raise Damaged("the frame overlaps the one before it")
        except (Torn, Damaged, ValueError) as error:
            self._harm.append(f"{path} at byte {ref.position}: {error}")
            return at
        self._lose(at, ref.base - 1, notes, "the segment file is missing")
        self._harm.clear()
        self._new.add(ref, payload)
        self._log.facts += ref.end - max(at, ref.base)
        return ref.end

    def _lose(self, first: int, last: int, notes: Notes, otherwise: str) -> None:
        """Record what is not there, as far as no record accounts for it."""
        why = "; ".join(dict.fromkeys(self._harm[:5])) or otherwise
        reason = GapReason.DAMAGED if self._harm else GapReason.LOST
        for start, end in list(uncovered(first, last, notes.book.own())):
            self._gaps.append(GapRecord(start, end, reason, self._now_unix_ms, why))
            self._found.miss(self._folder, why, start, end)
            self._log.lost += end - start + 1

    def _end(self, at: int, confirmed: int, notes: Notes) -> int:
        """Give the offset behind everything that anything in the folder speaks of: none is ever given twice."""
        watermark = read_watermark(self._files, self._folder)
        told = [gap.last + 1 for gap in notes.book.own() if gap.origin_zone is None]
        told += [name.last + 1 for name in keysegments.listed(self._files, self._folder)]
        told += [*segment_bases(self._files, self._folder), watermark[1] if watermark else 0]
        end = max(at, confirmed, *(offset for offset in (0, *told) if offset <= MAX_OFFSET))
        if end == at and self._harm:
            self._found.notes += [Missing(self._folder, f"{text}; it holds no known entry") for text in self._harm]
        return end

    def _keys(self, notes: Notes, end: int) -> None:
        """Copy the keys of entries that have left; where they cannot be read, a repeat may be taken as new."""
        files, folder = self._files, self._folder
        kept = set()
        for name in keysegments.listed(files, folder):
            if name.last >= end or name.first > name.last:
                continue
            path = f"{folder}/keys/{name.file_name}"
            if keysegments.read(files, folder, name) is None:
                self._found.miss(path, f"the keys of entries {name.first} to {name.last} are damaged")
                continue
            data = bytes(files.read(path))
            self._copied(len(data))
            write_whole(self._target, path, data)
            kept.add((name.first, name.last))
        for anchor in notes.anchors:
            known = (anchor.first, anchor.last) in kept
            if not known and anchor.first >= notes.keys_start and anchor.last >= anchor.first:
                detail = f"the keys of entries {anchor.first} to {anchor.last} are missing or damaged"
                self._found.miss(f"{folder}/keys", detail)
        notes.anchors = [
            each
            for each in notes.anchors
            if (each.first, each.last) in kept or each.first < notes.keys_start or each.last < each.first
        ]

    def _latest(self, end: int) -> None:
        try:
            kept = read_latest(self._files, self._folder)
        except Damaged as damage:
            self._found.miss(self._folder, f"the newest facts that were kept beyond retention: {damage}")
            return
        if len(kept):
            write_latest(self._target, self._folder, kept)

    def _write_notes(self, notes: Notes, end: int) -> None:
        for gap in notes.book.missing(self._gaps):
            notes.book.add(gap)
        unreadable = copy_quarantine(notes.quarantine, self._target, self._folder, end)
        for where in unreadable:
            self._found.miss(self._folder, f"a fact in quarantine: {where}")
        self._log.quarantined = len(notes.quarantine) - len(unreadable)
        notes.quarantine = Quarantine(self._target, self._folder)
        data = b"".join(encode(record) for record in notes.snapshot())
        write_whole(self._target, f"{self._folder}/notes.journal", data)


class _NewSegments:
    """The segments of a new log: a file for every segment of the old one, and another behind every hole."""

    def __init__(self, target: Files, folder: str, log_id: bytes) -> None:
        self._target, self._folder, self._log_id = target, folder, log_id
        self._chain, self._newest_unix_ms, self._previous = genesis(log_id), 0, -1
        self._schema = STORE_SCHEMA
        self._file: OpenFile | None = None
        self.end: int | None = None
        """The offset after the last frame; None when there is none."""

    def begin(self, schema: object) -> None:
        """Let the next frame begin a file; its entries have this schema."""
        self._close()
        self._schema = schema

    def add(self, ref: FrameRef, payload: Bytes) -> None:
        """Write a frame under the new id, chained to the one before it."""
        if self._file is None or ref.base != self.end:
            self._open(ref.base)
        assert self._file is not None
        at_unix_ms = ref.header.appended_at_unix_ms
        parts, self._chain = encode_frame(
            payload,
            base=ref.base,
            count=ref.count,
            appended_at_unix_ms=at_unix_ms,
            log_id=self._log_id,
            chain_before=self._chain,
            form=ref.header.form,
        )
        self._file.write(parts)
        self._newest_unix_ms = max(self._newest_unix_ms, at_unix_ms)
        self.end = ref.end

    def finish(self, end: int, schema: object) -> None:
        """Make all of it durable, and let the log go on at an offset."""
        if self._file is None or self.end != end:
            self.begin(schema)
            self._open(end)
        self._close()

    def _open(self, base: int) -> None:
        self._close()
        self._file = self._target.create(f"{self._folder}/{segment_name(base)}")
        header = SegmentHeader(self._log_id, base, self._previous, self._chain, self._newest_unix_ms, self._schema)
        self._file.write([encode_segment_header(header)])
        self._previous = base

    def _close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None
