"""Checking an audit trail: every record in its place, chained to the one before it, from the first to the head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bsfg.stores.log.damage import DamageFinding, readable
from bsfg.stores.log.files import Files, translated
from bsfg.stores.log.storage import has_begun
from bsfg.stores.log.trailfile import FOLDER, HEAD, FoundRecord, file_name, file_numbers, read_head, walk
from bsfg.trail import BEGINNING, NODE, TrailRecord, digest_of

ALTERED, MISSING, REORDERED = "trail_altered", "trail_missing", "trail_reordered"
TORN, UNKNOWN_HEAD, DAMAGED_BEFORE = "torn_tail", "trail_head_unknown", "trail_damaged"


@dataclass(slots=True)
class TrailReport:
    """What a check has found; ``head`` is the digest of the last record, to be compared with one kept elsewhere."""

    records: int = 0
    first: int = 0
    last: int = 0
    files: int = 0
    head: str = ""
    problems: list[DamageFinding] = field(default_factory=list)
    notes: list[DamageFinding] = field(default_factory=list)


def check_trail(files: Files) -> TrailReport:
    """Check the trail of a data folder, written meanwhile or not."""
    # The head is read before the records, so that a writer at work cannot make it look ahead of them.
    known = _Head.of(files)
    check = _Check(known)
    numbers = file_numbers(files)
    for number in numbers:
        try:
            data, bad = readable(files, file_name(number))
        except FileNotFoundError:
            check.left(number)
            continue
        except OSError as error:
            check.problem(ALTERED, file_name(number), translated(error, "reading").message)
            continue
        for text in bad:
            check.problem(ALTERED, file_name(number), text)
        if number == numbers[-1] and any(found.is_end for found in walk(data)):
            data, _ = readable(files, file_name(number))  # a writer may have been in the middle of it
        check.file(file_name(number), data, is_last=number == numbers[-1])
    check.end()
    if not numbers and has_begun(files, FOLDER):
        check.problem(MISSING, FOLDER, "the whole trail is gone")
    return check.report


@dataclass(frozen=True, slots=True)
class _Head:
    """What the head says: None for what is not known, and whether it is there at all."""

    value: tuple[int, str] | None
    is_there: bool

    @staticmethod
    def of(files: Files) -> _Head:
        try:
            return _Head(read_head(files), files.exists(HEAD))
        except OSError:
            return _Head(None, True)


class _Check:
    """The walk through all records of a trail."""

    def __init__(self, head: _Head) -> None:
        self.report = TrailReport()
        self._head = head
        self._last: TrailRecord | None = None
        self._digest = ""
        self._seen: set[int] = set()
        self._hole: tuple[str, FoundRecord] | None = None
        self._trimmed = 1, BEGINNING
        self._first: TrailRecord | None = None
        self._at_head = ""
        self._absent: list[tuple[str, int, int]] = []
        self._where = FOLDER
        self._skips_start = False

    def problem(self, code: str, where: str, detail: str, first: int | None = None, last: int | None = None) -> None:
        """Report something that is not as it was written."""
        self.report.problems.append(DamageFinding(code, where, detail, first, last))

    def left(self, number: int) -> None:
        """Take note of a file that left while others were read; only at the beginning may that be."""
        self._skips_start = self._skips_start or self._last is None

    def file(self, where: str, data: bytes, *, is_last: bool) -> None:
        """Go through one file."""
        self.report.files += 1
        self._where = where
        for found in walk(data):
            record = found.record
            if record is not None:
                assert found.head is not None
                self._record(where, record, found.head)
            elif found.is_end and is_last:
                detail = f"the last {found.size_bytes} bytes are no record: torn by a crash, or the last was damaged"
                self.report.notes.append(DamageFinding(TORN, where, detail))
            else:
                self._hole = self._hole or (where, found)

    def _record(self, where: str, record: TrailRecord, head: dict[str, Any]) -> None:
        before, self._hole, hole = self._last, None, self._hole
        self.report.records += 1
        if record.number in self._seen:
            self.problem(REORDERED, where, f"record {record.number} is there a second time", *[record.number] * 2)
            return
        self._seen.add(record.number)
        if before is None:
            self._first = record
            if hole is not None:
                self._damaged(hole, None, record)
        elif record.number < before.number:
            detail = f"record {record.number} stands behind record {before.number}"
            self.problem(REORDERED, where, detail, record.number, record.number)
            return
        else:
            self._follows(where, before, record, hole)
        if record.event.action == "trail_trimmed" and record.event.identity == NODE:
            start, digest = (record.event.details.get(name) for name in ("records_before", "digest"))
            if type(start) is int and isinstance(digest, str):
                self._trimmed = start, digest
        elif record.event.action == DAMAGED_BEFORE:
            detail = f"record {record.number} says: {record.event.reason}"
            self.report.notes.append(DamageFinding(DAMAGED_BEFORE, where, detail, record.number, record.number))
        self._last, self._digest = record, digest_of(head)
        if self._head.value is not None and record.number == self._head.value[0]:
            self._at_head = self._digest

    def _follows(
        self, where: str, before: TrailRecord, record: TrailRecord, hole: tuple[str, FoundRecord] | None
    ) -> None:
        """Check that a record follows the one before it in the file."""
        number = record.number
        if hole is not None:
            self._damaged(hole, before, record)
        elif number > before.number + 1:
            self._absent.append((where, before.number + 1, number - 1))
        elif record.before != self._digest:
            detail = f"record {number} does not follow record {before.number} as it stands: one of them was altered"
            self.problem(ALTERED, where, detail, before.number, number)

    def _damaged(self, hole: tuple[str, FoundRecord], before: TrailRecord | None, after: TrailRecord) -> None:
        where, found = hole
        place = f"{found.size_bytes} bytes at {found.position}"
        first, last = (before.number + 1 if before else None), after.number - 1
        if first is not None and first <= last:
            self.problem(ALTERED, where, f"{_records(first, last)} not readable: {place} were altered", first, last)
        else:
            self.problem(ALTERED, where, f"{place} belong to no record")

    def end(self) -> None:
        """Check beginning and end when all records are known."""
        report, last = self.report, self._last
        for place, *missing in self._absent:
            if not self._stands_elsewhere(*missing):
                self.problem(MISSING, place, f"{_records(*missing)} missing", *missing)
        if self._hole is not None:
            where, found = self._hole
            self.problem(ALTERED, where, f"{found.size_bytes} bytes at {found.position} belong to no record")
        if last is not None and self._first is not None:
            report.first, report.last, report.head = self._first.number, last.number, self._digest
            if not self._skips_start:
                self._beginning(self._first)
        self._ending(last.number if last is not None else 0)

    def _stands_elsewhere(self, first: int, last: int) -> bool:
        """Tell whether records that lack in their place were found in another, which is reported already."""
        return last - first < len(self._seen) and all(number in self._seen for number in range(first, last + 1))

    def _beginning(self, first: TrailRecord) -> None:
        start, digest = self._trimmed
        if first.number > start:
            self.problem(
                MISSING,
                FOLDER,
                f"{_records(start, first.number - 1)} missing at the beginning",
                start,
                first.number - 1,
            )
        elif first.number == start and first.before != digest:
            self.problem(ALTERED, FOLDER, f"record {start} is not the one that the trail began with", start, start)

    def _ending(self, last: int) -> None:
        if self._head.value is None:
            if not self._head.is_there and last:
                self.problem(
                    MISSING, HEAD, "it is gone, so that nobody can tell whether records are missing at the end"
                )
            elif last:
                detail = "a power loss has left no head; whether records are missing at the end cannot be told"
                self.report.notes.append(DamageFinding(UNKNOWN_HEAD, HEAD, detail))
            return
        number, digest = self._head.value
        if number > last:
            self.problem(MISSING, self._where, f"{_records(last + 1, number)} missing at the end", last + 1, number)
        elif self._at_head and self._at_head != digest:
            detail = f"record {number} is not the one that was written last: it was altered"
            self.problem(ALTERED, self._where, detail, number, number)


def _records(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"the records {first} to {last} are"
