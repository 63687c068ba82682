"""Copying a data folder while its writer goes on, and making a restored copy a history of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from bsfg.errors import LogDamaged, StorageFailed
from bsfg.frontier import Frontier
from bsfg.ports import Buffer
from bsfg.stores.log import keysegments
from bsfg.stores.log.damage import readable
from bsfg.stores.log.files import Files, translated, write_whole
from bsfg.stores.log.identity import LogIdentity, read_identity, write_identity
from bsfg.stores.log.journal import decode_all, encode, read_journal
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.quarantine import Quarantine, copy_quarantine
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.segments import SegmentFile, scan_segment, segment_bases, segment_name
from bsfg.stores.log.storage import CURSORS, MARK, STREAMS, cursor_from, listed_logs, read_mark, write_cursors
from bsfg.stores.log.trailfile import copy_trail, trail_bytes
from bsfg.stores.log.view import LogView, read_latest, write_latest
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA
from bsfg.stores.shared.cursors import ConsumerCursor
from bsfg.stores.shared.frame import Damaged, SegmentHeader, encode_segment_header, genesis

NODE = "node"
CHUNK_BYTES = 4 << 20
_PASSES, _PATIENCE = 100, 20

Reuse = Callable[[str, int], bool]
"""Puts a file of this path and size that never changes again into the copy without copying it; False if it cannot."""

Copied = Callable[[int], None]
"""Told the number of bytes that were just copied."""

Lacks = Callable[[str, str], None]
"""Told of something that was damaged and is not in the copy: in which log, and what with its file and place."""


@dataclass(frozen=True, slots=True)
class CopiedLog:
    """One log as it is in the copy: entries from ``start`` up to ``end`` (exclusive)."""

    stream: str
    buffer: str
    log_id: str
    start: int
    end: int


def copy_folder(
    source: Files,
    target: Files,
    *,
    reuse: Reuse = lambda path, size: False,
    copied: Copied = lambda size: None,
    lacks: Lacks = lambda where, what: None,
) -> list[CopiedLog]:
    """Copy a data folder, written meanwhile or not, into an empty one; give what is in the copy."""
    read_mark(source)
    try:
        for name in (STREAMS, CURSORS.partition("/")[0], NODE):
            target.make_folder(name)
        _copy_journals(source, target, NODE, lacks)
        logs = [_LogCopy(LogFolder(source, *log), target, reuse, copied, lacks) for log in listed_logs(source)]
        result = [found for log in logs if (found := log.run()) is not None]
        _copy_cursors(source, target, {(log.stream, log.buffer): log.end for log in result}, lacks)
        copy_trail(source, target, copied)
        write_whole(target, MARK, source.read(MARK))
    except OSError as error:
        raise translated(error, "copying the folder") from None
    return result


def size_of(source: Files) -> int:
    """Give about how many bytes `copy_folder` will copy."""
    total = trail_bytes(source)
    for stream, buffer in listed_logs(source):
        folder = LogFolder(source, stream, buffer).path
        names = [segment_name(base) for base in segment_bases(source, folder)]
        names += [f"keys/{name.file_name}" for name in keysegments.listed(source, folder)]
        for name in names:
            try:
                total += source.size(f"{folder}/{name}")
            except FileNotFoundError:
                continue
    return total


class _LogCopy:
    """The copying of one log, in passes: each copies what the ones before it did not."""

    def __init__(self, source: LogFolder, target: Files, reuse: Reuse, copied: Copied, lacks: Lacks) -> None:
        self._source, self._target, self._reuse, self._copied = source, target, reuse, copied
        self._lacks = lacks
        self._sizes: dict[str, int] = {}

    def run(self) -> CopiedLog | None:
        """Copy the log; None when nothing was ever stored in it."""
        source, path = self._source, self._source.path
        if not source.files.exists(f"{path}/log.json") and not segment_bases(source.files, path):
            return None
        for name in ("", "/keys", "/aside"):
            self._target.make_folder(path + name)
        view, notes = self._passes()
        self._notes(notes, view.end)
        # Copy the newest of what had left by the time of the notes; a damaged file has nothing to give.
        try:
            kept = read_latest(self._source.files, self._source.path)
            if len(kept):
                write_latest(self._target, self._source.path, kept.take(np.flatnonzero(kept.offsets < view.end)))
        except Damaged as damage:
            self._lacks(self._source.path, str(damage))
        self._rest()
        for folder in (f"{path}/keys", f"{path}/aside", path, path.rpartition("/")[0], STREAMS):
            self._target.sync_folder(folder)
        identity = read_identity(source.files, path)
        log_id = identity.log_id.hex() if identity is not None else ""
        return CopiedLog(source.stream, str(source.buffer), log_id, notes.start, view.end)

    def _passes(self) -> tuple[LogView, Notes]:
        """Copy until entries, keys and notes fit together; give view and notes as they were then."""
        for number in range(_PASSES):
            view = self._source.view()
            reached = self._segments(view)
            notes = self._source.notes()
            self._keys(view.end)
            whole = reached >= view.end and self._has_keys(notes)
            # What a source still lacks after many looks it will not get: it is damaged, and so is the copy.
            if notes.start <= view.end and (whole or number >= _PATIENCE):
                return view, notes
        path = self._source.path
        raise StorageFailed(f"{path} loses its beginning faster than it can be copied", hint="Try again later.")

    def _segments(self, view: LogView) -> int:
        """Copy the segments up to the durable end and give the end that was reached; only the last ever changes."""
        reached = -1
        last = view.segments[-1] if view.segments else None
        for base in segment_bases(self._source.files, self._source.path):
            path = f"{self._source.path}/{segment_name(base)}"
            if last is not None and base == last.base:
                with suppress(FileNotFoundError):  # it left just now, as the notes will say
                    size_bytes, until = _durable_part(last, view.end)
                    if self._copy(path, size_bytes, final=False):
                        reached = until
            elif base < view.end:
                # One whose header cannot be read is copied as it is: its frames may be sound.
                self._copy(path, None, final=True)
        return reached

    def _keys(self, end: int) -> None:
        """Copy the key segments of entries that the copy has or had; one that reaches further would claim more."""
        files, path = self._source.files, self._source.path
        for name in keysegments.listed(files, path):
            if name.last < end:
                self._copy(f"{path}/keys/{name.file_name}", None, final=True)

    def _has_keys(self, notes: Notes) -> bool:
        expected = [each for each in notes.anchors if each.first >= notes.keys_start and each.last >= each.first]
        names = [keysegments.KeySegmentName(each.first, each.last).file_name for each in expected]
        return all(f"{self._source.path}/keys/{name}" in self._sizes for name in names)

    def _notes(self, notes: Notes, end: int) -> None:
        """Write the notes as far as they speak of what was copied."""
        for what in notes.wrong:
            self._lacks(f"{self._source.path}/notes.journal", what)
        notes.book = notes.book.before(end)
        unreadable = copy_quarantine(notes.quarantine, self._target, self._source.path, end)
        if unreadable:
            raise StorageFailed(f"{len(unreadable)} facts in quarantine cannot be read, the first is {unreadable[0]}")
        # What an earlier version kept with the notes is now among the rest.
        notes.quarantine = Quarantine(self._target, self._source.path)
        data = b"".join(encode(record) for record in notes.snapshot())
        write_whole(self._target, f"{self._source.path}/notes.journal", data)

    def _rest(self) -> None:
        """Copy the identity, and bytes that were set aside."""
        files, path = self._source.files, self._source.path
        names = [f"aside/{name}" for name in files.list(f"{path}/aside") if not name.endswith(".new")]
        for name in ["log.json", *names]:
            if files.exists(f"{path}/{name}"):
                self._copy(f"{path}/{name}", None, final=True)

    def _copy(self, path: str, size_bytes: int | None, *, final: bool) -> bool:
        """Copy a file up to a size, going on where an earlier pass stopped; tell whether it is there.

        One that leaves meanwhile is left out. A ``final`` file never changes again; its own size counts if none is
        given.
        """
        files, have = self._source.files, self._sizes.get(path, 0)
        try:
            size = files.size(path) if size_bytes is None else size_bytes
            if path in self._sizes and have >= size:
                return True
            if not have and final and self._reuse(path, size):
                self._copied(size)
            else:
                self._copy_bytes(path, have, size)
        except FileNotFoundError:
            self._target.remove(path)
            self._sizes.pop(path, None)
            return False
        self._sizes[path] = size
        return True

    def _copy_bytes(self, path: str, have: int, size: int) -> None:
        file = self._target.open_append(path) if have else self._target.create(path)
        try:
            for at in range(have, size, CHUNK_BYTES):
                data = self._source.files.read_at(path, at, min(CHUNK_BYTES, size - at))
                file.write([data])
                self._copied(len(data))
            file.sync()
        finally:
            file.close()


def _durable_part(segment: SegmentFile, end: int) -> tuple[int, int]:
    """Give how many bytes of the segment that is being written belong to entries below an offset, and their end."""
    parts = [(ref.position + ref.header.frame_bytes, ref.end) for ref in segment.frames]
    parts += [(hole.position + hole.size_bytes, hole.last + 1) for hole in segment.holes]
    return max([(segment.header.size_bytes, segment.base), *(part for part in parts if part[1] <= end)])


def _copy_journals(source: Files, target: Files, folder: str, lacks: Lacks) -> None:
    """Copy the journals of a folder as far as they are whole."""
    for name in source.list(folder):
        if name.endswith(".journal"):
            data = bytes(source.read(f"{folder}/{name}"))
            for what in decode_all(data)[2]:
                lacks(f"{folder}/{name}", what)
            write_whole(target, f"{folder}/{name}", data[: decode_all(data)[1]])


def _copy_cursors(source: Files, target: Files, ends: dict[tuple[str, str], int], lacks: Lacks) -> None:
    records, _, problems = read_journal(source, CURSORS)
    for what in problems:
        lacks(CURSORS, what)
    cursors = [cursor_from(record) for record in records]
    latest = {cursor.spec.name: cursor for cursor in cursors}
    found = [(cursor, ends.get((cursor.spec.stream, str(cursor.spec.buffer)))) for cursor in latest.values()]
    write_cursors(target, [_cut(cursor, end) for cursor, end in found if end is not None])


def _cut(cursor: ConsumerCursor, end: int) -> ConsumerCursor:
    frontier = cursor.frontier
    ranges = [(first, min(last, end - 1)) for first, last in frontier.ranges if first < end]
    return replace(cursor, frontier=Frontier(min(frontier.committed, end - 1), ranges))


@dataclass(frozen=True, slots=True)
class RestoredLog:
    """A log that goes on under a new id; ``newest_unix_ms`` is when its last entry became durable."""

    stream: str
    buffer: str
    log_id: str
    was_log_id: str
    start: int
    end: int
    newest_unix_ms: int | None


def begin_new_histories(files: Files, now_unix_ms: int) -> list[RestoredLog]:
    """Give every log of a copy that nobody has opened a new id, and its consumers with it."""
    try:
        restored = [_restore(folder, now_unix_ms) for folder in open_folder(files)]
        # Bind the consumers to the new histories: what they confirmed of the old ones is the same in these.
        new_ids = {each.was_log_id: each.log_id for each in restored}
        latest = {record.head["name"]: record for record in read_journal(files, CURSORS)[0]}
        cursors = [cursor_from(record) for record in latest.values()]
        moved = (replace(cursor, log_id=new_ids.get(cursor.log_id, cursor.log_id)) for cursor in cursors)
        write_cursors(files, moved)
    except OSError as error:
        raise translated(error, "restoring the folder") from None
    return restored


def _restore(folder: LogFolder, now_unix_ms: int) -> RestoredLog:
    old = read_identity(folder.files, folder.path)
    if old is None:
        raise LogDamaged(f"{folder.path}/log.json is missing or damaged")
    view = folder.view()
    new = old.restored(view.end, now_unix_ms)
    header = _next_header(folder, new, view.end)
    path = f"{folder.path}/{segment_name(view.end)}"
    write_whole(folder.files, path, encode_segment_header(header))
    write_identity(folder.files, folder.path, new)
    return RestoredLog(
        folder.stream,
        str(folder.buffer),
        new.log_id.hex(),
        old.log_id.hex(),
        view.start,
        view.end,
        header.time_before_unix_ms or None,
    )


def _next_header(folder: LogFolder, identity: LogIdentity, end: int) -> SegmentHeader:
    """Give the header of the first segment of the new history; an empty one of the old is replaced by it."""
    segments = folder.view().segments
    schema = STORE_SCHEMA if folder.buffer == Buffer.STORE else FORWARD_SCHEMA
    if not segments:
        return SegmentHeader(identity.log_id, end, -1, genesis(identity.log_id), 0, schema)
    last = segments[-1]
    if last.base == end:
        return replace(last.header, log_id=identity.log_id)
    scan = scan_segment(readable(folder.files, last.path)[0], last.header, tail_may_be_torn=True)
    newest = max([last.header.time_before_unix_ms, *(ref.header.appended_at_unix_ms for ref in scan.frames[-1:])])
    return SegmentHeader(identity.log_id, end, last.base, scan.chain or last.header.chain_before, newest, schema)
