"""The audit trail on disk: journals of chained records in the folder ``audit``, which only its owner may read.

::

    audit/00000000000000000001.trail   records from number 1 on; when it is large enough the next file begins
    audit/head                         number and digest of the last record that is durable, replaced in place
    audit/told/                        what commands beside the node have to say; whoever writes the trail takes it in

The chain goes over the files. When old files leave, a record says so first, with the digest that the rest begins at.
The head is stored after the records are durable, so that a trail that ends before its head has lost its end.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import crc32c
import orjson

from bsfg.errors import BsfgError, OutcomeUnknown
from bsfg.stores.log.damage import TORN_CUT, is_damage, make_folder, put_aside, readable
from bsfg.stores.log.files import Files, Slot, translated, write_whole
from bsfg.stores.log.journal import Journal, Record, apart, record_at, sound_after
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.storage import has_begun, remember_begun
from bsfg.trail import BEGINNING, NODE, OF_COMMANDS, USER, TrailEvent, TrailQuery, TrailRecord, digest_of, record_from

FOLDER = "audit"
HEAD = f"{FOLDER}/head"
TOLD = f"{FOLDER}/told"
SUFFIX = ".trail"
FILE_BYTES = 4 << 20
FILES_BY_AGE = 8
"""In so many files at least the time is cut for which records are kept."""

TOLD_BYTES_MAX = 16 << 10
TOLD_AT_ONCE = 100

_HEAD = struct.Struct("<4sIQ32s")
_MAGIC = b"TRL1"


def file_name(number: int) -> str:
    """Give the path of the file that begins with a record."""
    return f"{FOLDER}/{number:020d}{SUFFIX}"


def file_numbers(files: Files) -> list[int]:
    """List the files of a trail by the number that each begins with."""
    try:
        names = files.list(FOLDER)
    except NotADirectoryError:
        return []
    stems = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(int(stem) for stem in stems if len(stem) == 20 and stem.isdecimal())


# Reading.


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """One thing in a file: a record as it stands there, or, with ``head`` None, bytes that are no record."""

    position: int
    size_bytes: int
    head: dict[str, Any] | None = None
    is_end: bool = False
    """Whether nothing sound follows: a write that a crash broke off, or the last record was damaged."""

    @property
    def record(self) -> TrailRecord | None:
        """The record, None when it is none of ours."""
        return None if self.head is None else record_from(self.head)


def walk(data: bytes) -> Iterator[FoundRecord]:
    """Go through the bytes of a file."""
    at = 0
    while at < len(data):
        step = record_at(data, at)
        if step is not None:
            whole, size = step
            yield from _heads(whole, at, size)
            at += size
            continue
        following = sound_after(data, at + 1)
        yield FoundRecord(at, (following or len(data)) - at, is_end=following is None)
        at = following or len(data)


def _heads(whole: Record, at: int, size: int) -> Iterator[FoundRecord]:
    """Give what was written together; a checksum says nothing of who wrote it."""
    try:
        heads = [each.head for each in apart(whole)]
    except (KeyError, TypeError, ValueError):
        heads = [{}]
    yield from (FoundRecord(at, size, head if isinstance(head, dict) else {}) for head in heads)


def records_in(files: Files, number: int) -> list[TrailRecord]:
    """Read the records of one file; one that left meanwhile has none."""
    try:
        data, _ = readable(files, file_name(number))
    except FileNotFoundError:
        return []
    return [record for found in walk(data) if (record := found.record) is not None]


def read_head(files: Files) -> tuple[int, str] | None:
    """Give number and digest of the last durable record, None when a power loss has left nothing usable."""
    try:
        data = files.read_at(HEAD, 0, _HEAD.size)
    except FileNotFoundError:
        return None
    if len(data) < _HEAD.size:
        return None
    magic, crc, number, digest = _HEAD.unpack(data)
    if magic != _MAGIC or crc32c.crc32c(_HEAD.pack(magic, 0, number, digest)) != crc:
        return None
    return number, digest.hex()


def _head_bytes(number: int, digest: str) -> bytes:
    raw = bytes.fromhex(digest)
    return _HEAD.pack(_MAGIC, crc32c.crc32c(_HEAD.pack(_MAGIC, 0, number, raw)), number, raw)


def oldest_first(files: Files, query: TrailQuery, after: int = 0) -> Iterator[TrailRecord]:
    """Give the records behind a number that a query wants."""
    numbers = file_numbers(files)
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following is not None and following <= after + 1:
            continue
        for record in records_in(files, number):
            if record.number > after and query.wants(record.event):
                yield record


def newest_first(files: Files, query: TrailQuery) -> Iterator[TrailRecord]:
    """Give the records that a query wants, the last first."""
    for number in reversed(file_numbers(files)):
        yield from (record for record in reversed(records_in(files, number)) if query.wants(record.event))


# What commands beside the node have to say.


def tell(files: Files, event: TrailEvent) -> bool:
    """Leave an event for whoever writes the trail; where that cannot be, as on a read-only disk, it stays unsaid."""
    document = TrailRecord(1, "", event.bounded()).head()
    try:
        if not files.exists(FOLDER):
            files.make_folder(FOLDER)
            files.sync_folder("")
        files.make_folder(TOLD)
        files.sync_folder(FOLDER)
        name = f"{event.at_unix_ms:015d}-{secrets.token_hex(8)}.json"
        write_whole(files, f"{TOLD}/{name}", orjson.dumps(document))
    except OSError:
        return False
    return True


def told(files: Files) -> list[tuple[str, TrailEvent | None]]:
    """Give what was left and not taken in yet, by the names of its files; None for what is no word of a command."""
    try:
        names = [name for name in files.list(TOLD) if name.endswith(".json")][:TOLD_AT_ONCE]
    except OSError:
        return []
    return [(name, event) for name in names if (event := _told(files, name)) is not _GONE]


_GONE = TrailEvent("", "")


def _told(files: Files, name: str) -> TrailEvent | None:
    try:
        head = orjson.loads(files.read_at(f"{TOLD}/{name}", 0, TOLD_BYTES_MAX))
    except FileNotFoundError:
        return _GONE
    except (OSError, orjson.JSONDecodeError):
        return None
    record = record_from(head) if isinstance(head, dict) else None
    return record.event.bounded() if record is not None and is_of_command(record.event) else None


def is_of_command(event: TrailEvent) -> bool:
    """Tell whether a command beside the node may say so: not what the node does, nor what others did over the wire."""
    return event.action in OF_COMMANDS and event.identity.startswith(USER)


# Writing.


@dataclass(frozen=True, slots=True)
class Keeping:
    """How much of a trail is kept: files whose records are all older leave, and the oldest when all are too large."""

    retention_seconds: float = 400 * 86_400.0
    max_bytes: int = 1 << 30
    file_bytes: int = FILE_BYTES


@dataclass(slots=True)
class _File:
    number: int
    size_bytes: int
    begun_unix_ms: int | None
    before: str = ""


class TrailWriter:
    """The one writer of a trail. It is used by one thread at a time, and opens itself again after a failure."""

    def __init__(self, files: Files, keeping: Keeping, reserve: Reserve | None = None) -> None:
        self.files = self._files = files
        self._keeping, self._reserve = keeping, reserve
        self._journal: Journal | None = None
        self._slot: Slot | None = None
        self._kept: list[_File] = []
        self._next, self._before = 1, BEGINNING
        self._doubtful: list[TrailRecord] = []
        self._taken: set[str] = set()
        self.problems: list[str] = []

    @property
    def head(self) -> tuple[int, str]:
        """Number and digest of the last record."""
        return self._next - 1, self._before

    def open(self, *, urgent: bool = False) -> None:
        """Find the end, cut what a crash broke off, and be ready to append; raises `BsfgError` when that fails."""
        try:
            if urgent and self._reserve is not None:
                self._reserve.with_room(self._open)
            else:
                self._open()
        except OSError as error:
            raise translated(error, "opening the audit trail") from None

    def _open(self) -> None:
        files = self._files
        self.close()
        if kept := make_folder(files, FOLDER):
            self.problems.append(f"its folder was none, and is kept as {kept}")
        files.sync_folder("")
        head = read_head(files)
        self._slot = files.slot(HEAD, _HEAD.size)
        numbers = file_numbers(files)
        if not numbers and has_begun(files, FOLDER):
            self.problems.append("the whole trail is gone")
        self._kept = [self._described(number) for number in numbers]
        last = self._last_record(numbers)
        self._next, self._before = (1, BEGINNING) if last is None else (last[0].number + 1, last[1])
        if head is not None and head[0] >= self._next:
            self.problems.append(f"the records {self._next} to {head[0]} are missing at its end")
            self._next, self._before = head[0] + 1, head[1]
        if numbers and self._is_whole(numbers[-1]):
            path = file_name(numbers[-1])
            self._journal = Journal(self._files, path, tuple, begins=True)
            self._journal.open()
            self.problems += [f"{path}: {text}" for text in self._journal.problems if TORN_CUT not in text]
            self._kept[-1].size_bytes = self._journal.size_bytes
        else:
            self._begin_file()
        remember_begun(files, FOLDER)

    def _last_record(self, numbers: Sequence[int]) -> tuple[TrailRecord, str] | None:
        for number in reversed(numbers):
            data, bad = readable(self._files, file_name(number))
            found = [each for each in walk(data) if each.record is not None]
            self.problems += [f"{file_name(number)}: {text}" for text in bad]
            self._taken |= {str(each.head["details"]["told"]) for each in found if each.head and _is_told(each.head)}
            if found:
                record, raw = found[-1].record, found[-1].head
                assert record is not None
                assert raw is not None
                return record, digest_of(raw)
        return None

    def _is_whole(self, number: int) -> bool:
        """Tell whether a file may be continued; one with damage in its middle stays as it is found."""
        path = file_name(number)
        try:
            data, bad = readable(self._files, path)
        except OSError as error:
            if not is_damage(error):
                raise
            return False
        found = list(walk(data))
        damage = [each for each in found if each.record is None and not each.is_end]
        self.problems += [f"{path}: {each.size_bytes} damaged bytes at {each.position}" for each in damage]
        records = [record for each in found if (record := each.record) is not None]
        skipped = bool(records) and records[-1].number + 1 != self._next
        return not bad and not damage and not skipped and data[:4] in (b"", b"JRN1")

    def _begin_file(self) -> None:
        path = file_name(self._next)
        if self._files.exists(path) and not self._is_whole(self._next):
            self.problems.append(f"{path} is damaged, and kept as {put_aside(self._files, path)}")
        self._kept = [each for each in self._kept if each.number != self._next]
        journal = Journal(self._files, path, tuple, begins=True)
        journal.open()
        if self._journal is not None:
            self._journal.close()
        self._journal = journal
        self._kept.append(_File(self._next, journal.size_bytes, None))

    def _described(self, number: int) -> _File:
        with suppress(OSError):
            size = self._files.size(file_name(number))
            for found in walk(self._files.read_at(file_name(number), 0, 64 << 10)):
                if (record := found.record) is not None:
                    return _File(number, size, record.event.at_unix_ms, record.before)
            return _File(number, size, None)
        return _File(number, 0, None)

    def append(self, events: Sequence[TrailEvent], *, urgent: bool = False) -> None:
        """Write events, all of them or none, and return when they are durable.

        Raises what a journal raises; the next call opens the trail again where that is needed. Events that are
        ``urgent`` may spend the reserve of a full disk, as all may by which an operator makes room.
        """
        if self._journal is None or self._journal.failure is not None:
            self.open()
            if self._was_written(events):
                return
        if not events:
            return
        if self._is_full(events[-1].at_unix_ms):
            # Begin the next file; where there is no room for it the old one goes on.
            assert self._journal is not None
            before = list(self._kept)
            try:
                self._begin_file()
            except OSError:
                self._kept = before
        records = self._chained(events)
        self._write(records, urgent)

    def _chained(self, events: Sequence[TrailEvent]) -> list[TrailRecord]:
        records, number, before = [], self._next, self._before
        if number == 1:
            begun = TrailEvent("trail_begun", NODE, details={"trail": secrets.token_hex(16)})
            events = [begun.at(events[0].at_unix_ms), *events]
        for event in events:
            records.append(TrailRecord(number, before, event.bounded()))
            number, before = number + 1, records[-1].digest
        return records

    def _write(self, records: list[TrailRecord], urgent: bool) -> None:
        assert self._journal is not None
        journal, stored = self._journal, [Record(each.head()) for each in records]

        def work() -> None:
            journal.append(stored)

        try:
            if urgent and self._reserve is not None:
                self._reserve.with_room(work)
            else:
                work()
        except OutcomeUnknown:
            self._doubtful = records
            raise
        self._advanced(records)

    def _advanced(self, records: list[TrailRecord]) -> None:
        assert self._journal is not None
        file = self._kept[-1]
        if file.begun_unix_ms is None:
            file.begun_unix_ms, file.before = records[0].event.at_unix_ms, records[0].before
        file.size_bytes = self._journal.size_bytes
        self._next, self._before, self._doubtful = records[-1].number + 1, records[-1].digest, []
        self._store_head()

    def _store_head(self) -> None:
        if self._slot is not None:
            # Only who looks for a missing end needs it; the records themselves are durable.
            with suppress(OSError):
                self._slot.store(_head_bytes(self._next - 1, self._before))

    def _was_written(self, events: Sequence[TrailEvent]) -> bool:
        """Tell whether a write whose end nobody knew is there after all, now that what was found is durable."""
        doubtful, self._doubtful = self._doubtful, []
        same = [each.event for each in doubtful][-len(events) :] == [event.bounded() for event in events]
        written = bool(doubtful) and same and (doubtful[-1].number, doubtful[-1].digest) == self.head
        if written:
            self._store_head()
        return written

    def _is_full(self, now_unix_ms: int) -> bool:
        """Tell whether the next file should begin: this one is large, or so old that its age would keep the newest."""
        file, keeping = self._kept[-1], self._keeping
        age_ms = now_unix_ms - (file.begun_unix_ms or now_unix_ms)
        return file.size_bytes >= keeping.file_bytes or age_ms >= 1000 * keeping.retention_seconds / FILES_BY_AGE

    # What leaves.

    @property
    def is_too_large(self) -> bool:
        """Whether the oldest files must leave before their time."""
        return sum(file.size_bytes for file in self._kept) > self._keeping.max_bytes

    def trim(self, now_unix_ms: int | None) -> int:
        """Let old files go and give how many did; without a time only what is too much for its size."""
        gone, why = self._leaving(now_unix_ms)
        if not gone:
            return 0
        rest = self._kept[len(gone)]
        details = {"records_before": rest.number, "digest": rest.before, "files": len(gone), "because": why}
        at = now_unix_ms or max(file.begun_unix_ms or 0 for file in self._kept)
        self.append([TrailEvent("trail_trimmed", NODE, about=FOLDER, details=details, at_unix_ms=at)])
        self._kept = self._kept[len(gone) :]
        try:
            for file in gone:
                self._files.remove(file_name(file.number))
            self._files.sync_folder(FOLDER)
        except OSError as error:
            raise translated(error, "removing old files of the audit trail") from None
        return len(gone)

    def _leaving(self, now_unix_ms: int | None) -> tuple[list[_File], str]:
        """Give the files that may go, oldest first; never the last one."""
        total, gone, why = sum(file.size_bytes for file in self._kept), 0, ""
        aged = None if now_unix_ms is None else now_unix_ms - 1000 * self._keeping.retention_seconds
        for file, following in zip(self._kept, self._kept[1:], strict=False):
            is_old = aged is not None and following.begun_unix_ms is not None and following.begun_unix_ms < aged
            if following.begun_unix_ms is None or not (is_old or total > self._keeping.max_bytes):
                break
            why = "age" if is_old else "size"
            gone, total = gone + 1, total - file.size_bytes
        return self._kept[:gone], why

    # What was told.

    def take_in(self, now_unix_ms: int = 0) -> int:
        """Take in what commands beside the node have left, each once; give how much it was."""
        found = told(self._files)
        fresh = [(name, event) for name, event in found if event is not None and name not in self._taken]
        for name, event in fresh:
            self.append([TrailEvent(**{**_fields(event), "details": {**event.details, "told": name}})])
            self._taken.add(name)
        if foreign := [name for name, event in found if event is None and name not in self._taken]:
            # Torn by a power loss, or put there by somebody who wants to be believed.
            reason = f"{len(foreign)} files in {TOLD} were no words of a command and are left out: {foreign[0][:100]}"
            self.append([TrailEvent("trail_damaged", NODE, about=FOLDER, reason=reason, at_unix_ms=now_unix_ms)])
            self._taken.update(foreign)
        with suppress(OSError):
            for name, _ in found:
                self._files.remove(f"{TOLD}/{name}")
            if found:
                self._files.sync_folder(TOLD)
        return len(fresh)

    def close(self) -> None:
        """Release the files."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._slot is not None:
            self._slot.close()
            self._slot = None


def _is_told(head: dict[str, Any]) -> bool:
    details = head.get("details")
    return isinstance(details, dict) and "told" in details


def _fields(event: TrailEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in TrailEvent.__dataclass_fields__}


# Copying.


def trail_bytes(files: Files) -> int:
    """Give about how large a trail is."""
    total = 0
    for number in file_numbers(files):
        with suppress(OSError):
            total += files.size(file_name(number))
    return total


def copy_trail(source: Files, target: Files, copied: Callable[[int], None] = lambda size: None) -> None:
    """Copy a trail, written meanwhile or not: the head first, so that the copy never ends before its head."""
    head = read_head(source)
    numbers = file_numbers(source)
    if not numbers:
        return
    target.make_folder(FOLDER)
    target.sync_folder("")
    for number in numbers:
        try:
            data, _ = readable(source, file_name(number))
        except FileNotFoundError:
            continue
        ends = [each.position for each in walk(data) if each.is_end]
        whole = data[: ends[0]] if ends and number == numbers[-1] else data
        write_whole(target, file_name(number), whole)
        copied(len(whole))
    if head is not None:
        write_whole(target, HEAD, _head_bytes(*head))
    for name, event in told(source):
        if event is not None:
            target.make_folder(TOLD)
            write_whole(target, f"{TOLD}/{name}", bytes(source.read_at(f"{TOLD}/{name}", 0, TOLD_BYTES_MAX)))


def trail_failure(error: Exception) -> str:
    """Say in a line why a trail could not be written."""
    return f"{error.code}: {error.message}" if isinstance(error, BsfgError) else f"{type(error).__name__}: {error}"
