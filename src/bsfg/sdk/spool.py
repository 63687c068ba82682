"""A durable queue in a folder: what is put in survives a crash and comes out in its order, at least once.

The outbox of a producer and the inbox of a consumer are spools. Records lie in segment files, each with its own
checksum; a put returns when the disk has them. How far the reader is done is written now and then: after a crash some
records come again, which both uses can bear. One process at a time has a spool open.

A spool never appends to a file that it found: what an earlier process wrote last may be torn, or may never have reached
the disk although it can be read. A torn end was never acknowledged and is passed over. What was acknowledged and cannot
be read any more is passed over, too, but said so in the log of the program, and its file is kept.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from bsfg.errors import (
    BsfgError,
    BufferFull,
    FactTooLarge,
    FormatUnsupported,
    InvalidArgument,
    NotAFolder,
    OutcomeUnknown,
    StorageClosed,
)
from bsfg.stores.log.files import DiskFiles, Files, OpenFile, is_refusal, translated, write_whole
from bsfg.stores.log.journal import Record, decode_all, encode

log = logging.getLogger("bsfg.spool")

MARK = "spool.json"
POSITION = "position.json"
FORMAT = 1
_SUFFIX = ".spool"
_SEGMENT_BYTES = 8 << 20
_MIN_SEGMENT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Spooled:
    """A record with its number: numbers count up from 0 and are never used twice."""

    number: int
    head: dict[str, Any]
    blob: bytes


def segment_size(capacity_bytes: int) -> int:
    """Give the size of segments that suits a capacity: what is done leaves a segment at a time."""
    return max(_MIN_SEGMENT_BYTES, min(_SEGMENT_BYTES, capacity_bytes // 8))


class Spool:
    """An opened spool; its methods block, and may be called from several threads."""

    def __init__(
        self, files: Files, release: Callable[[], None], *, where: str, capacity_bytes: int, segment_bytes: int
    ) -> None:
        self._files, self._release, self._where = files, release, where
        self._capacity_bytes, self._segment_bytes = capacity_bytes, segment_bytes
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}
        self._cache: tuple[int, int, list[Spooled]] | None = None
        self._file: OpenFile | None = None
        self._failure: BsfgError | None = None
        self._closed = False
        self.problems: list[str] = []
        self._damaged: set[int] = set()
        self.done = 0
        self.end = 0
        self.note: dict[str, Any] = {}

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str] | Files,
        kind: str,
        *,
        capacity_bytes: int = 1 << 34,
        segment_bytes: int | None = None,
    ) -> Spool:
        """Open a spool as its one user, making the folder when it is empty or missing."""
        files: Files = DiskFiles(where) if isinstance(where, str | os.PathLike) else where
        try:
            files.make_folder("")
            release = files.lock("LOCK")
        except OSError as error:
            raise translated(error, f"opening {where}") from None
        segment_bytes = segment_bytes or segment_size(capacity_bytes)
        spool = cls(files, release, where=str(where), capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
        try:
            _check_mark(files, kind, str(where))
            spool._recover()
        except OSError as error:
            release()
            raise translated(error, f"opening {where}") from None
        except BaseException:
            release()
            raise
        return spool

    # Putting in.

    def put(self, records: Sequence[Record]) -> int:
        """Make records durable, all of them or an error, and give the number of the first."""
        with self._lock:
            self._check_open()
            first = self.end
            parts = [encode(Record({**record.head, "n": first + at}, record.blob)) for at, record in enumerate(records)]
            size = sum(map(len, parts))
            if size > self._capacity_bytes:
                raise FactTooLarge(
                    f"{size} bytes can never fit into a spool of {self._capacity_bytes}", hint="Allow a larger one."
                )
            if self.used_bytes + size > self._capacity_bytes:
                raise BufferFull(
                    f"the spool holds {self.used_bytes} of {self._capacity_bytes} bytes",
                    used_bytes=self.used_bytes,
                    capacity_bytes=self._capacity_bytes,
                )
            self._write(parts, size)
            self.end = first + len(records)
            return first

    def _write(self, parts: list[bytes], size: int) -> None:
        base = self._writable()
        assert self._file is not None
        try:
            self._file.write(parts)
        except OSError as error:
            failure = translated(error, "writing the spool")
            try:
                self._file.truncate(self._sizes[base])
            except OSError as second:
                self._failure = translated(second, "undoing a failed write")
            if not is_refusal(failure):
                self._failure = failure
            raise failure from None
        try:
            self._file.sync()
        except OSError as error:
            self._failure = translated(error, "syncing the spool")
            raise OutcomeUnknown(f"{self._failure.message}; the spool is closed until it is opened again") from None
        self._sizes[base] += size

    def _writable(self) -> int:
        """Give the segment to write to, a new one when there is none or it is large enough."""
        base = max(self._sizes, default=-1)
        if self._file is not None and self._sizes[base] < self._segment_bytes:
            return base
        path = _name(self.end)
        try:
            file = self._files.create(path)
            try:
                self._files.sync_folder("")
            except OSError:
                file.close()
                self._files.remove(path)
                raise
        except OSError as error:
            raise translated(error, f"creating {path}") from None
        if self._file is not None:
            self._file.close()
        self._file = file
        self._sizes[self.end] = 0
        return self.end

    @property
    def used_bytes(self) -> int:
        """The size of all segments."""
        return sum(self._sizes.values())

    # Taking out.

    def read(self, number: int, *, max_bytes: int = 4 << 20) -> list[Spooled]:
        """Give records from a number on: at least one when there is one, and about so many bytes at most."""
        with self._lock:
            self._check_open()
            number = max(number, self.done)
            while number < self.end:
                base = max((each for each in self._sizes if each <= number), default=None)
                if base is None:
                    number = min(self._sizes, default=self.end)
                    continue
                records = self._records(base)
                at = bisect_left(records, number, key=lambda each: each.number)
                if at < len(records):
                    # Give the records from a place on that fit into a number of bytes, at least one.
                    total, end = 0, at
                    while end < len(records) and (end == at or total + len(records[end].blob) <= max_bytes):
                        total += len(records[end].blob)
                        end += 1
                    return records[at:end]
                number = min((each for each in self._sizes if each > base), default=self.end)
            return []

    def _records(self, base: int) -> list[Spooled]:
        """Read a segment, as far as it was made durable; what was read last is kept."""
        size = self._sizes[base]
        at, known = 0, list[Spooled]()
        if self._cache is not None and self._cache[0] == base:
            _, at, known = self._cache
            if at == size:
                return known
        try:
            data = self._files.read_at(_name(base), at, size - at)
        except OSError as error:
            raise translated(error, f"reading {_name(base)}") from None
        records, sound, problems = decode_all(data)
        for text in problems:
            self._is_damaged(base, text)
        if sound < len(data):
            text = f"{_name(base)}: the last {len(data) - sound} bytes were torn by a crash and never acknowledged"
            self.problems += [text] if text not in self.problems else []
        known += [
            Spooled(record.head["n"], {key: value for key, value in record.head.items() if key != "n"}, record.blob)
            for record in records
        ]
        self._cache = (base, size, known)
        return known

    def _is_damaged(self, base: int, says: str) -> None:
        """Say once that something of a segment is lost, and have its file kept."""
        self._damaged.add(base)
        text = f"{_name(base)}: {says}"
        if text not in self.problems:
            self.problems.append(text)
            log.error("%s: %s; what it held is passed over, and the file is kept", self._where, text)

    def advance(self, done: int, note: dict[str, Any] | None = None, *, durably: bool = False) -> None:
        """Note that everything below a number is done; files that are no longer needed go.

        ``note`` is kept with the position. Unless it is asked to be durable, both may be found older after a crash.
        """
        with self._lock:
            self._check_open()
            if done > self.end:
                raise InvalidArgument(f"{done} is beyond the end {self.end} of the spool")
            moved, self.done = done > self.done, max(self.done, done)
            self.note = self.note if note is None else note
            gone = [base for base, following in self._neighbours() if following <= self.done]
            if gone or durably:
                self._write_position()
            for base in gone:
                if base in self._damaged:
                    self._files.rename(_name(base), f"{_name(base)}.damaged")
                else:
                    self._files.remove(_name(base))
                del self._sizes[base]
            if moved and self._cache is not None and self._cache[0] not in self._sizes:
                self._cache = None

    def _neighbours(self) -> list[tuple[int, int]]:
        """Give each segment that is not written any more, with the number that follows its last record."""
        bases = sorted(self._sizes)
        pairs = list(pairwise(bases))
        if bases and self._file is None:
            pairs.append((bases[-1], self.end))
        return pairs

    def _write_position(self) -> None:
        position = {"done": self.done, "end": self.end, "note": self.note}
        try:
            write_whole(self._files, POSITION, orjson.dumps(position))
        except OSError as error:
            raise translated(error, f"writing {POSITION}") from None

    # Opening and closing.

    def _recover(self) -> None:
        position = _read_position(self._files)
        self.done, self.note = int(position.get("done", 0)), dict(position.get("note", {}))
        said, found = int(position.get("end", 0)), self.done
        for name in self._files.list(""):
            if name.endswith(_SUFFIX) and name[: -len(_SUFFIX)].isdigit():
                self._sizes[int(name[: -len(_SUFFIX)])] = self._files.size(name)
        self.end = max(self.done, said, max(self._sizes, default=0))
        while self._sizes:
            base = max(self._sizes)
            if records := self._records(base):
                found = max(found, records[-1].number + 1)
                self.end = max(self.end, found)
                break
            # Nothing in it can be read. Its name will be used again, so what is there is kept under another.
            self._files.rename(_name(base), f"{_name(base)}.torn")
            del self._sizes[base]
            self._cache = None
        if found < said:
            # Whoever closed the spool had them: this is no end that a crash has torn.
            self._is_damaged(max(self._sizes, default=found), f"the records {found} to {said - 1} are gone")
        self.advance(self.done)

    def close(self) -> None:
        """Write the position and give the folder back; repeats are harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._failure is None:
                    self._write_position()
            finally:
                if self._file is not None:
                    self._file.close()
                self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the spool is closed")
        if self._failure is not None:
            raise StorageClosed(f"the spool closed itself: {self._failure.message}")


def _name(base: int) -> str:
    return f"{base:020d}{_SUFFIX}"


def _check_mark(files: Files, kind: str, where: str) -> None:
    """Make sure that the folder is a spool of this kind; an empty one becomes it."""
    if not files.exists(MARK):
        others = [name for name in files.list("") if name not in ("LOCK", MARK + ".new")]
        if others:
            hint = f"Give an empty folder for the {kind}, or the one it already has."
            raise NotAFolder(f"{where} holds other files, such as {others[0]}", hint=hint)
        write_whole(files, MARK, orjson.dumps({"format": FORMAT, "kind": kind}))
    try:
        mark = orjson.loads(bytes(files.read(MARK)))
        found, format = mark["kind"], int(mark["format"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise NotAFolder(f"{where}/{MARK} is damaged", hint="Restore it from another spool of this kind.") from None
    if found != kind:
        raise NotAFolder(f"{where} is an {found}, not an {kind}", hint=f"Give the folder of the {kind}.")
    if format > FORMAT:
        raise FormatUnsupported(f"{where} has format {format}, this version reads up to {FORMAT}")


def _read_position(files: Files) -> dict[str, Any]:
    """Read the position; a missing or damaged one means that everything comes again."""
    if not files.exists(POSITION):
        return {}
    try:
        found = orjson.loads(bytes(files.read(POSITION)))
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
