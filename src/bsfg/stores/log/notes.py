"""What a log remembers besides entries: where it begins, gap records, quarantine, anchors of removed segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import pyarrow as pa

from bsfg.batch import FACT_SCHEMA, FactBatch
from bsfg.errors import InvalidArgument
from bsfg.fact import Key, Origin
from bsfg.gaps import Gap, GapBook, GapRecord, GapSet, listed
from bsfg.ports import Quarantined
from bsfg.ranges import RangeSet
from bsfg.retention import GapReason
from bsfg.sealing import bodies
from bsfg.stores.log.files import Files
from bsfg.stores.log.journal import Journal, Record, read_journal


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
        self.start = 0
        self.keys_start = 0
        self.book = GapBook()
        self.anchors: list[Anchor] = []
        self.quarantined: dict[int, Quarantined] = {}
        self.released: list[dict[str, Any]] = []
        self.next_quarantine_id = 1

    @property
    def gaps(self) -> list[GapRecord]:
        """All gap records, one per range, oldest first."""
        return listed(self.book.sets())

    @property
    def problems(self) -> list[str]:
        """What was wrong with the journal when it was opened."""
        return self._journal.problems

    def open(self, *, expected: bool = False, not_empty: bool = False) -> bool:
        """Read the notes for writing; tell whether any that were there are lost.

        ``expected`` says that the file must be there, because others were made after it; ``not_empty`` that it must
        say something, because otherwise the log would begin at 0.
        """
        records = self._journal.open(expected=expected)
        if not_empty and not records and not self._journal.is_damaged:
            self.problems.append("empty, though it must say where the log begins")
            self._journal.is_damaged = True
        for record in records:
            if not self._take(record):
                self.problems.append(f"a record of the kind {record.head.get('kind')!r} cannot be read; it is kept")
        return self._journal.is_damaged

    def read(self) -> list[str]:
        """Read the notes without writing; give what is wrong with them."""
        records, _, problems = read_journal(self._files, self.path)
        unread = [record for record in records if not self._take(record)]
        return [*problems, *(f"a record of the kind {record.head.get('kind')!r} cannot be read" for record in unread)]

    def move_start(self, start: int, anchors: list[Anchor], gaps: list[GapRecord]) -> None:
        """Record durably that the log now begins at ``start``, and what is known of what went."""
        records = [Record({"kind": "anchor", **_anchor_head(anchor)}) for anchor in anchors]
        records += [_gaps(each) for each in self.book.missing(gaps)]
        self._write([*records, Record({"kind": "start", "start": start})])

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps durably; those already known are left out."""
        fresh = [_gaps(each) for each in self.book.missing(gaps)]
        if fresh:
            self._write(fresh)

    def add_quarantined(self, items: list[Quarantined]) -> None:
        """Keep refused facts durably."""
        known = {_identity(item) for item in self.quarantined.values()}
        fresh: list[Quarantined] = []
        for item in items:
            identity = _identity(item)
            if identity not in known:
                known.add(identity)
                fresh.append(replace(item, id=self.next_quarantine_id + len(fresh)))
        if fresh:
            self._write([_quarantine(item) for item in fresh])

    def release(self, id_: int, reason: str, now_unix_ms: int) -> None:
        """Drop a quarantined fact, leaving a durable note of it."""
        if not reason.strip():
            raise InvalidArgument("dropping a quarantined fact needs a reason")
        if id_ not in self.quarantined:
            raise InvalidArgument(f"nothing is quarantined under id {id_}", id=id_)
        self._write([Record({"kind": "released", "id": id_, "reason": reason, "at_unix_ms": now_unix_ms})])

    def keys_beyond(self, unix_ms: int) -> int:
        """Give the offset below which all keys are older than a time, as far as they are not forgotten yet."""
        old = [anchor.last + 1 for anchor in self.anchors if anchor.newest_unix_ms < unix_ms]
        return max(old, default=0)

    def forget_keys_before(self, offset: int) -> None:
        """Record durably that the keys below an offset are beyond the horizon; the anchors stay."""
        self._write([Record({"kind": "keys_start", "start": offset})])

    def close(self) -> None:
        """Release the journal."""
        self._journal.close()

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
            for gap in self.book.missing([_gap_set(head, record.blob)]):
                self.book.add(gap)
        elif kind == "quarantined":
            item = _quarantined(head, record.blob)
            self.quarantined[item.id] = item
            self.next_quarantine_id = max(self.next_quarantine_id, item.id + 1)
        elif kind == "released":
            self.quarantined.pop(head["id"], None)
            self.released.append(head)
            self.next_quarantine_id = max(self.next_quarantine_id, head["id"] + 1)

    def snapshot(self) -> Iterator[Record]:
        """Give the records from which the present notes can be read again."""
        for anchor in self.anchors:
            yield Record({"kind": "anchor", **_anchor_head(anchor)})
        for gap in self.book.sets():
            yield _gaps(gap)
        for item in self.quarantined.values():
            yield _quarantine(item)
        for head in self.released:
            yield Record({"kind": "released", **head})
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


def _identity(item: Quarantined) -> tuple[str, Key, bytes]:
    """What makes two refused facts the same one: a fact that is sent again is not kept twice."""
    return item.reason, item.key, bodies(item.facts)[0]


def _quarantine(item: Quarantined) -> Record:
    head = {
        "kind": "quarantined",
        "id": item.id,
        "at_unix_ms": item.at_unix_ms,
        "reason": item.reason,
        "from_zone": item.key.from_zone,
        "message_id": item.key.message_id,
        "existing_offset": item.existing_offset,
        "detail": item.detail,
        "origin": list(astuple(item.origin)) if item.origin is not None else None,
    }
    return Record(head, item.facts.record_batch.serialize().to_pybytes())


def _quarantined(head: dict[str, Any], blob: bytes) -> Quarantined:
    facts = FactBatch(pa.ipc.read_record_batch(pa.py_buffer(blob), FACT_SCHEMA), sealed=True)
    return Quarantined(
        id=head["id"],
        at_unix_ms=head["at_unix_ms"],
        reason=head["reason"],
        key=Key(head["from_zone"], head["message_id"]),
        existing_offset=head["existing_offset"],
        facts=facts,
        detail=head["detail"],
        # Notes of versions before 0.2 do not say it.
        origin=Origin(*origin) if (origin := head.get("origin")) else None,
    )
