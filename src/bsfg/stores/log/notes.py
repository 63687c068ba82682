"""What a log remembers besides entries: where it begins, gap records, anchors, and how far it is durable."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c

from bsfg.errors import InvalidArgument
from bsfg.frontier import Frontier
from bsfg.gapbook import GapBook
from bsfg.gaps import Gap, GapRecord, GapSet, RangeSet, listed
from bsfg.ports import Quarantined
from bsfg.retention import GapReason
from bsfg.stores.log.damage import is_damage
from bsfg.stores.log.files import Files
from bsfg.stores.log.journal import Journal, Record, read_journal
from bsfg.stores.log.quarantine import Quarantine
from bsfg.wording import check_reason


@dataclass(frozen=True, slots=True)
class Anchor:
    """What stays of a removed segment: its range, its chain values and the digest over its entries."""

    first: int
    last: int
    chain_before: str
    chain_after: str
    range_digest: str
    newest_unix_ms: int


class Notes:
    """The notes of one log, kept in a journal and in memory."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self.path = f"{folder}/notes.journal"
        self._journal = Journal(files, self.path, self.snapshot)
        self._unread: list[Record] = []
        self.wrong: list[str] = []
        """What was wrong with notes and quarantine when they were read without writing."""
        self.start = 0
        self.keys_start = 0
        self.book = GapBook()
        self.anchors: list[Anchor] = []
        self.quarantine = Quarantine(files, folder)
        # Operators give the reasons, and each is kept.
        self.released = GapBook(sys.maxsize)
        self._old: dict[int, Record] = {}

    @property
    def gaps(self) -> list[GapRecord]:
        """All gap records, one per range, oldest first."""
        return listed(self.book.sets())

    @property
    def problems(self) -> list[str]:
        """What was wrong with the journal when it was opened."""
        return [*self._journal.problems, *self.quarantine.problems]

    def open(self, *, expected: bool = False, not_empty: bool = False) -> bool:
        """Read the notes for writing; tell whether any that were there are lost.

        ``expected`` says that the file must be there, because others were made after it; ``not_empty`` that it must
        say something, because otherwise the log would begin at 0.
        """
        records = self._journal.open(expected=expected)
        if not_empty and not records and not self._journal.is_damaged:
            self._journal.problems.append("empty, though it must say where the log begins")
            self._journal.is_damaged = True
        for record in records:
            if not self._take(record):
                self._journal.problems.append(
                    f"a record of the kind {record.head.get('kind')!r} cannot be read; it is kept"
                )
        self.quarantine.open()
        self._find_quarantined()
        self.quarantine.remove_empty()
        return self._journal.is_damaged

    def read(self) -> list[str]:
        """Read the notes without writing; give what is wrong with them."""
        records, _, problems = read_journal(self._files, self.path)
        unread = [record for record in records if not self._take(record)]
        self._find_quarantined()
        problems += [f"a record of the kind {record.head.get('kind')!r} cannot be read" for record in unread]
        self.wrong = [*problems, *self.quarantine.problems]
        return self.wrong

    def drop_unread(self) -> None:
        """Leave behind the records that could not be read."""
        self._unread = []

    def _find_quarantined(self) -> None:
        released = RangeSet.union([each.ranges for each in self.released.sets()] or [RangeSet.empty()])
        known = Frontier(-1, [(first, last) for first, last, _ in released.rows()])
        self.quarantine.load(known.is_confirmed, self._old)
        if len(released):
            self.quarantine.next_id = max(self.quarantine.next_id, int(released.lasts[-1]) + 1)
        self._old = {}

    def move_start(self, start: int, anchors: list[Anchor], gaps: list[GapRecord]) -> None:
        """Record durably that the log now begins at ``start``, and what is known of what went."""
        records = [Record({"kind": "anchor", **_anchor_head(anchor)}) for anchor in anchors]
        records += [_gaps(each) for each in self.book.missing(gaps)]
        self._write([*records, Record({"kind": "start", "start": start})])

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps durably; those already known are left out."""
        fresh = [_gaps(each) for each in self.book.taken(gaps)]
        if fresh:
            self._write(fresh)

    def add_quarantined(self, items: Sequence[Quarantined], capacity_bytes: int) -> None:
        """Keep refused facts durably."""
        self.quarantine.add(items, capacity_bytes)

    def release(self, id_: int, reason: str, now_unix_ms: int) -> None:
        """Drop a quarantined fact, leaving a durable note of it."""
        check_reason(reason, "dropping a quarantined fact")
        if id_ not in self.quarantine:
            raise InvalidArgument(f"nothing is quarantined under id {id_}", id=id_)
        self._write([_released(_release(id_, reason, now_unix_ms))])
        self.quarantine.forget(id_)

    def let_ids_end_at(self, id_: int) -> None:
        """Know that a refused fact had an id and was released, so that no other gets it; for notes not written yet."""
        self.released.add(_release(id_, "released before the migration", 0))

    def keys_beyond(self, unix_ms: int) -> int:
        """Give the offset below which all keys are older than a time, as far as they are not forgotten yet."""
        old = [anchor.last + 1 for anchor in self.anchors if anchor.newest_unix_ms < unix_ms]
        return max(old, default=0)

    def forget_keys_before(self, offset: int) -> None:
        """Record durably that the keys below an offset are beyond the horizon; the anchors stay."""
        self._write([Record({"kind": "keys_start", "start": offset})])

    def close(self) -> None:
        """Release the journals."""
        self._journal.close()
        self.quarantine.close()

    def _write(self, records: list[Record]) -> None:
        self._journal.append(records)
        for record in records:
            self._apply(record)
        if self._journal.wants_compaction:
            self._journal.compact()

    def _take(self, record: Record) -> bool:
        """Apply what was read; what cannot be understood is kept as it is."""
        try:
            self._apply(record)
        except MemoryError:
            raise
        except Exception:
            self._unread.append(record)
            return False
        return True

    def _apply(self, record: Record) -> None:
        head = dict(record.head)
        kind = head.pop("kind")
        if kind == "start":
            self.start = max(self.start, head["start"])
        elif kind == "keys_start":
            self.keys_start = max(self.keys_start, head["start"])
        elif kind == "anchor":
            anchor = Anchor(**head)
            if anchor not in self.anchors[-8:]:
                self.anchors.append(anchor)
        elif kind in ("gap", "gaps"):
            self.book.take_in(_gap_set(head, record.blob))
        elif kind == "quarantined":
            # Versions before 0.2 kept refused facts here; they stay until they are released.
            self._old[head["id"]] = Record(head, record.blob)
        elif kind == "released":
            self.released.take_in(_release_set(head, record.blob))

    def snapshot(self) -> Iterator[Record]:
        """Give the records from which the present notes can be read again."""
        for anchor in self.anchors:
            yield Record({"kind": "anchor", **_anchor_head(anchor)})
        for gap in self.book.sets():
            yield _gaps(gap)
        for record in self.quarantine.old_records():
            yield Record({"kind": "quarantined", **record.head}, record.blob)
        for each in self.released.sets():
            yield _released(each)
        yield from self._unread
        yield Record({"kind": "keys_start", "start": self.keys_start})
        yield Record({"kind": "start", "start": self.start})


def _anchor_head(anchor: Anchor) -> dict[str, Any]:
    return {name: getattr(anchor, name) for name in Anchor.__dataclass_fields__}


def _gaps(gap: GapSet) -> Record:
    head = {"kind": "gaps", "reason": str(gap.reason), "since_unix_ms": gap.since_unix_ms}
    if gap.detail:
        head["detail"] = gap.detail
    if gap.origin_zone is not None:
        head["origin_zone"] = gap.origin_zone
    return Record(head, gap.ranges.encode())


def _gap_set(head: dict[str, Any], blob: bytes) -> GapSet:
    reason = GapReason(head["reason"])
    if "first" in head:
        # Written by versions that kept a record for every range.
        return GapSet.of(GapRecord(**{**head, "reason": reason}))
    ranges, zone = RangeSet.decode(blob), head.get("origin_zone")
    return GapSet(reason, ranges, head.get("detail", ""), zone, head["since_unix_ms"])


def _release(id_: int, reason: str, at_unix_ms: int) -> GapSet:
    """Give a release in the form of a set: ids of one reason that follow each other cost no more than one."""
    return GapSet.of(GapRecord(id_, id_, GapReason.QUARANTINED, at_unix_ms, reason))


def _released(each: GapSet) -> Record:
    head = {"kind": "released", "reason": each.detail, "since_unix_ms": each.since_unix_ms}
    return Record(head, each.ranges.encode())


def _release_set(head: dict[str, Any], blob: bytes) -> GapSet:
    if "id" in head:
        # Written by versions that kept a record for every release.
        return _release(head["id"], head["reason"], head["at_unix_ms"])
    return GapSet(GapReason.QUARANTINED, RangeSet.decode(blob), head["reason"], None, head["since_unix_ms"])


WATERMARK = struct.Struct("<16sqqI")
"""The boot, the end of the log, the size of its active segment, and a checksum."""

_WATERMARK_LOOKS = 100
"""A watermark that fails its check is being written just now, unless it fails every time."""


def boot_id() -> bytes:
    """Identify this boot of the machine: after another boot nothing is in the page cache any more."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def read_watermark(files: Files, folder: str) -> tuple[bytes, int, int] | None:
    """Read how far the writer last said the log is durable: boot, end and size of the active segment."""
    for _ in range(_WATERMARK_LOOKS):
        try:
            data = files.read_at(f"{folder}/durable", 0, WATERMARK.size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if not is_damage(error):
                raise
            return None
        if len(data) < WATERMARK.size:
            return None
        boot, end, size, crc = WATERMARK.unpack(data)
        if crc32c.crc32c(data[:-4]) == crc:
            return boot, end, size
    return None


class Watermark:
    """The place where a writer says how far its log is durable; never synced, because a power loss ends its meaning."""

    def __init__(self, files: Files, folder: str) -> None:
        self._boot_id = boot_id()
        self._slot = files.slot(f"{folder}/durable", WATERMARK.size)

    def publish(self, end: int, size_bytes: int) -> None:
        """Say that everything before ``end`` is durable, in that many bytes of the active segment."""
        body = WATERMARK.pack(self._boot_id, end, size_bytes, 0)[:-4]
        self._slot.store(body + crc32c.crc32c(body).to_bytes(4, "little"))

    def close(self) -> None:
        """Release it."""
        self._slot.close()
