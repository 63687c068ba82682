"""A small append-only file of records, each with its own checksum: cursors, gap records, quarantine.

A record is a JSON head and optional bytes. Appending syncs; records that are appended together are there together or
not at all. A torn end is cut at the next open. The file is rewritten through a rename when most of it is history.

One rule for all who keep a journal: when nobody can know any more what is on the disk (a sync failed, whatever its
error number; a failed write could not be undone), the journal is closed. It writes nothing more, refuses everything,
and its next opening writes anew what it finds. A failed write is cut back to the end of the last record that was
synced.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import crc32c
import orjson

from bsfg.errors import BsfgError, OutcomeUnknown, StorageClosed
from bsfg.stores.log.damage import TORN_CUT, is_damage, is_folder, keep_aside, put_aside, readable
from bsfg.stores.log.files import Files, NotBegun, OpenFile, is_refusal, translated, write_whole

_HEAD = struct.Struct("<4sIII")
_MAGIC = b"JRN1"
_COMPACT_ABOVE_BYTES = 1 << 20


class Record(NamedTuple):
    """One record: what it says, and the bytes it keeps."""

    head: dict[str, Any]
    blob: bytes = b""


def encode(record: Record) -> bytes:
    """Write one record."""
    head = orjson.dumps(record.head)
    body = head + record.blob
    fields = _HEAD.pack(_MAGIC, 0, len(head), len(record.blob))
    crc = crc32c.crc32c(body, crc32c.crc32c(fields))
    return _HEAD.pack(_MAGIC, crc, len(head), len(record.blob)) + body


def encode_together(records: Sequence[Record]) -> bytes:
    """Write records under one checksum, so that a torn write leaves all of them or none."""
    if len(records) == 1:
        return encode(records[0])
    head = {"together": [record.head for record in records], "sizes": [len(record.blob) for record in records]}
    return encode(Record(head, b"".join(record.blob for record in records)))


def apart(record: Record) -> list[Record]:
    """Give the records that were written together as one."""
    if "together" not in record.head:
        return [record]
    result, at = [], 0
    for head, size in zip(record.head["together"], record.head["sizes"], strict=True):
        result.append(Record(head, record.blob[at : at + size]))
        at += size
    return result


def decode_all(data: bytes) -> tuple[list[Record], int, list[str]]:
    """Read all records; give them, how many bytes are sound, and what is wrong.

    A record that fails in the middle is reported and passed over by searching for the next sound one; one that fails
    at the end is a torn write of something never acknowledged, and is cut.
    """
    records: list[Record] = []
    problems: list[str] = []
    at = sound = 0
    while at < len(data):
        step = record_at(data, at)
        if step is not None:
            record, size = step
            records += apart(record)
            at += size
            sound = at
            continue
        following = sound_after(data, at + 1)
        if following is None:
            break
        problems.append(f"{following - at} damaged bytes at {at}")
        at = following
    return records, sound, problems


def record_at(data: bytes, at: int) -> tuple[Record, int] | None:
    """Read the record at a position, as it was written, and give its size; None when there is no sound one."""
    if len(data) - at < _HEAD.size:
        return None
    magic, crc, head_bytes, blob_bytes = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + head_bytes + blob_bytes
    if magic != _MAGIC or end > len(data):
        return None
    body = data[at + _HEAD.size : end]
    if crc32c.crc32c(body, crc32c.crc32c(_HEAD.pack(_MAGIC, 0, head_bytes, blob_bytes))) != crc:
        return None
    try:
        head = orjson.loads(body[:head_bytes])
    except orjson.JSONDecodeError:
        return None
    return (Record(head, body[head_bytes:]), end - at) if isinstance(head, dict) else None


def sound_after(data: bytes, start: int) -> int | None:
    """Find the next sound record."""
    at = data.find(_MAGIC, start)
    while at >= 0:
        if record_at(data, at) is not None:
            return at
        at = data.find(_MAGIC, at + 1)
    return None


def read_journal(files: Files, path: str) -> tuple[list[Record], int, list[str]]:
    """Read a journal without opening it for writing; a missing one is empty."""
    try:
        data, bad = readable(files, path)
    except FileNotFoundError:
        return [], 0, []
    records, sound, problems = decode_all(data)
    return records, sound, [*bad, *problems]


BEGINNING = encode_together([])
"""No record at all, in a form that every version reads: a journal that begins with it is never empty again."""


class Journal:
    """A journal opened for writing; one that ``begins`` is never empty, and so differs from one cut to nothing."""

    def __init__(
        self, files: Files, path: str, snapshot: Callable[[], Iterable[Record]], *, begins: bool = False
    ) -> None:
        self._beginning = BEGINNING if begins else b""
        self._files = files
        self._path = path
        self._folder = path.rpartition("/")[0]
        self._snapshot = snapshot
        self._file: OpenFile | None = None
        self._size = 0
        self._compact_at = _COMPACT_ABOVE_BYTES
        self.problems: list[str] = []
        self.failure: BsfgError | None = None
        self.is_damaged = False
        """Whether records that were there are lost, beyond a torn end, which was never acknowledged."""

    def open(self, *, expected: bool = False, begun: bool = False) -> list[Record]:
        """Read what is there, cut a torn end, and be ready to append.

        ``expected`` says that there must be a journal, so that a missing one is damage and not a beginning; ``begun``
        that it had its beginning, so that one without any sound record is.
        """
        data, bad = self._read(expected)
        records, sound, wrong = decode_all(data)
        self.is_damaged = self.is_damaged or bool(bad or wrong) or data[:4] not in (_MAGIC[: len(data)], _MAGIC)
        self.problems += [*bad, *wrong]
        if data and data[:4] not in (_MAGIC[: len(data)], _MAGIC):
            self.problems.append("its beginning is damaged")
        if begun and not sound and not self.is_damaged:
            self.is_damaged = True
            self.problems.append("empty; what it held is not known any more")
        if sound < len(data):
            self.problems.append(f"{len(data) - sound} {TORN_CUT} at {sound}")
            keep_aside(self._files, self._path, sound, data[sound:], "torn")
        if self.is_damaged and data:
            keep_aside(self._files, self._path, 0, data, f"{crc32c.crc32c(data):08x}.damaged")
            data = b"".join(map(encode, records))
            sound = len(data)
        # What was read may be in the page cache alone and must be durable before anyone acts on it. Syncing is not
        # enough: after a sync that failed in another process the system takes it for written.
        content = data[:sound] or self._beginning
        write_whole(self._files, self._path, content)
        self._file = self._files.open_append(self._path)
        self._size = sound = len(content)
        self._compact_at = max(_COMPACT_ABOVE_BYTES, 4 * sound)
        return records

    def _read(self, expected: bool) -> tuple[bytes, list[str]]:
        try:
            self._files.read_at(self._path, 0, 1)
            return readable(self._files, self._path)
        except FileNotFoundError:
            self.is_damaged = expected
            if expected:
                self.problems.append("missing; what it held is not known any more")
            return b"", []
        except OSError as error:
            if not is_damage(error):
                raise
            if not is_folder(error):
                return readable(self._files, self._path)
            self.is_damaged = True
            self.problems.append(f"no file; kept as {put_aside(self._files, self._path)}")
            return b"", []

    def append(self, records: Sequence[Record]) -> None:
        """Write records, all of them or none, and return when they are durable.

        Raises `DiskFull` or `StorageBusy` when nothing has happened, `OutcomeUnknown` when the journal had to close,
        and `StorageClosed` ever after.
        """
        if self.failure is not None:
            raise StorageClosed(f"{self._path} closed itself: {self.failure.message}")
        assert self._file is not None
        data = encode_together(records)
        try:
            self._file.write([data])
        except OSError as error:
            raise self._undone(error) from None
        try:
            self._file.sync()
        except OSError as error:
            raise self._closed(error, "syncing") from None
        self._size += len(data)

    def _undone(self, failed: OSError) -> BsfgError:
        """Cut back what a failed write left behind the last record that was synced."""
        assert self._file is not None
        try:
            if not isinstance(failed, NotBegun):
                self._file.truncate(self._size)
                self._file.sync()
        except OSError as error:
            return self._closed(error, "undoing a failed write to")
        failure = translated(failed, f"writing {self._path}")
        return failure if is_refusal(failure) else self._closed(failed, "writing")

    def _closed(self, error: OSError, doing: str) -> OutcomeUnknown:
        """Close for good: nobody can know what of the last write is on the disk."""
        text = f"{doing} {self._path}: {error.strerror or error}"
        self.failure = OutcomeUnknown(f"{text}; it is closed until it is opened again")
        return self.failure

    @property
    def size_bytes(self) -> int:
        """How much of the file is written and synced."""
        return self._size

    @property
    def wants_compaction(self) -> bool:
        """Whether the file has grown enough since it was last rewritten."""
        return self._size > self._compact_at

    def compact(self) -> None:
        """Replace the file by one that holds only the present state, or leave it when that cannot be done.

        What was appended is in both files, so whoever waits has his answer. But when the new name cannot be made
        durable a power loss may bring the old file back, so that nothing more may be appended to the new one.
        """
        new = self._path + ".new"
        parts = [encode(record) for record in self._snapshot()] or [self._beginning]
        fresh: OpenFile | None = None
        try:
            self._files.remove(new)
            fresh = self._files.create(new)
            fresh.write(parts)
            fresh.sync()
        except OSError:
            self._leave(fresh)
            return
        try:
            self._files.rename(new, self._path)
        except OSError as error:
            self._leave(fresh)
            if not self._is_there(new):
                self._closed(error, "replacing")
            return
        fresh.renamed(self._path)
        if self._file is not None:
            self._file.close()
        self._file, self._size = fresh, sum(map(len, parts))
        self._compact_at = max(_COMPACT_ABOVE_BYTES, 4 * self._size)
        try:
            self._files.sync_folder(self._folder)
        except OSError as error:
            self._closed(error, "replacing")

    def _leave(self, fresh: OpenFile | None) -> None:
        """Stay with the old file, which is whole and the one that counts; try again when it has grown."""
        if fresh is not None:
            fresh.close()
        self._compact_at = 2 * self._size

    def _is_there(self, path: str) -> bool:
        try:
            return self._files.exists(path)
        except OSError:
            return False

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
