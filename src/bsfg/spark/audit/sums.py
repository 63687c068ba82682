"""The first pass: both logs are read once, and every range of offsets becomes a count and two sums.

A range that has the same three numbers at both ends holds the same facts there. The order of entries, the bodies
against their digests and the keys are looked at on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from bsfg.arrays import constant_value
from bsfg.batch import EntryBatch
from bsfg.errors import FrameInvalid
from bsfg.ports import GapRecord
from bsfg.sealing import digest_mismatches
from bsfg.spark.audit.ends import End
from bsfg.spark.audit.entryhash import EntryHash, lanes
from bsfg.spark.audit.scope import RECEIVER, SENDER, Rows, Scope, received, sent

NAMED_MAX = 1_000
"""How many entries of one kind a task names; more are counted."""


@dataclass(slots=True)
class RangeSum:
    """What one log holds of a range: how many entries, two sums of their hashes, and between which places they lie."""

    count: int = 0
    first_lane: int = 0
    second_lane: int = 0
    first_place: int = -1
    last_place: int = -1

    def holds_the_same(self, other: RangeSum) -> bool:
        """Tell whether two ends hold the same entries."""
        mine = (self.count, self.first_lane, self.second_lane)
        return mine == (other.count, other.first_lane, other.second_lane)


@dataclass(frozen=True, slots=True)
class Named:
    """An entry by name: its place in the log it was read from, its offset at the sender, and its key."""

    place: int
    offset: int
    from_zone: str | None
    message_id: str | None


@dataclass(frozen=True, slots=True)
class Descent:
    """An entry that stands behind another one with a higher offset, or its own."""

    entry: Named
    behind: Named


@dataclass(slots=True)
class Sums:
    """What was found in one stretch of one log, from ``first`` up to ``end``."""

    side: str
    first: int
    end: int
    ranges: dict[int, RangeSum] = field(default_factory=dict)
    read: int = 0
    taken: int = 0
    size_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    gaps: list[GapRecord] = field(default_factory=list)
    altered: list[Named] = field(default_factory=list)
    altered_count: int = 0
    descents: list[Descent] = field(default_factory=list)
    descents_count: int = 0
    lowest: int | None = None
    highest: int | None = None
    first_entry: Named | None = None
    last_entry: Named | None = None
    paths: set[tuple[str | None, str | None]] = field(default_factory=set)
    unreadable: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Summing:
    """Reads one stretch of a log and sums it up; the keys of a receiver are given beside, to look for repeats."""

    side: str
    log: End
    log_id: str
    first: int
    end: int
    scope: Scope

    def __call__(self) -> tuple[Sums, np.ndarray]:
        """Do it, in whichever process this is."""
        return _Reading(self).run()


class _Reading:
    """One stretch while it is read."""

    def __init__(self, item: Summing) -> None:
        self._item, self._scope = item, item.scope
        self._hash = EntryHash(item.scope.secret)
        self._found = Sums(item.side, item.first, item.end)
        self._keys: list[np.ndarray] = [np.empty(0, dtype=np.uint64)]

    def run(self) -> tuple[Sums, np.ndarray]:
        item, found, at = self._item, self._found, self._item.first
        try:
            for frame in item.log.frames(item.first, item.end, item.log_id):
                if frame.entries is not None:
                    self._take(frame.entries)
                elif frame.gap is not None:
                    add_gap(found.gaps, frame.first, frame.last, frame.gap)
                at = frame.last + 1
        except FrameInvalid as error:
            found.unreadable.append((at, item.end - 1, error.message))
        return found, np.concatenate(self._keys)

    def _take(self, entries: EntryBatch) -> None:
        found = self._found
        found.read += len(entries)
        found.size_bytes += entries.size_bytes
        if found.side == SENDER:
            rows, left_out = sent(entries, self._scope)
            for reason, count in left_out.items():
                found.left_out[reason] = found.left_out.get(reason, 0) + count
        else:
            self._keys.append(self._hash.keys(entries))
            found.paths |= _paths(entries)
            rows = received(entries, self._scope)
        if len(rows):
            found.taken += len(rows)
            self._check(rows)
            add_up(found.ranges, rows, self._hash.of(rows.entries, rows.offsets, rows.times), self._scope.range_facts)

    def _check(self, rows: Rows) -> None:
        found = self._found
        if self._scope.deep:
            wrong = digest_mismatches(rows.entries)
            found.altered_count += len(wrong)
            found.altered += named(rows, wrong[: max(0, NAMED_MAX - len(found.altered))])
        if found.side == RECEIVER:
            self._check_order(rows)

    def _check_order(self, rows: Rows) -> None:
        found, offsets = self._found, rows.offsets
        first, last = named(rows, np.array([0, len(rows) - 1]))
        if found.last_entry is not None and first.offset <= found.last_entry.offset:
            found.descents.append(Descent(first, found.last_entry))
            found.descents_count += 1
        wrong = np.flatnonzero(np.diff(offsets) <= 0)
        found.descents_count += len(wrong)
        chosen = wrong[: max(0, NAMED_MAX - len(found.descents))]
        found.descents += map(Descent, named(rows, chosen + 1), named(rows, chosen))
        found.first_entry, found.last_entry = found.first_entry or first, last
        low, high = int(offsets.min()), int(offsets.max())
        found.lowest = low if found.lowest is None else min(low, found.lowest)
        found.highest = high if found.highest is None else max(high, found.highest)


def named(rows: Rows, chosen: np.ndarray) -> list[Named]:
    """Name some of the rows."""
    if not len(chosen):
        return []
    part = rows.take(chosen)
    keys = zip(part.entries.values("from_zone"), part.entries.values("message_id"), strict=True)
    places = zip(part.places.tolist(), part.offsets.tolist(), strict=True)
    return [Named(place, offset, *key) for (place, offset), key in zip(places, keys, strict=True)]


def add_up(ranges: dict[int, RangeSum], rows: Rows, hashes: np.ndarray, range_facts: int) -> None:
    """Add rows to the sums of their ranges."""
    numbers = rows.offsets // range_facts
    if len(numbers) > 1 and (np.diff(numbers) < 0).any():
        order = np.argsort(numbers, kind="stable")
        numbers, hashes, places = numbers[order], hashes[order], rows.places[order]
    else:
        places = rows.places
    edges = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    first, second = (np.add.reduceat(lane, edges) for lane in lanes(hashes))
    ends = np.append(edges[1:], len(numbers))
    for at, (start, stop) in enumerate(zip(edges.tolist(), ends.tolist(), strict=True)):
        found = ranges.setdefault(int(numbers[start]), RangeSum())
        part = RangeSum(
            stop - start, int(first[at]), int(second[at]), int(places[start:stop].min()), int(places[start:stop].max())
        )
        merge_sum(found, part)


def merge_sum(into: RangeSum, part: RangeSum) -> None:
    """Add what another stretch holds of the same range."""
    lane_end = 1 << 64
    into.first_place = part.first_place if into.count == 0 else min(into.first_place, part.first_place)
    into.last_place = max(into.last_place, part.last_place)
    into.count += part.count
    into.first_lane = (into.first_lane + part.first_lane) % lane_end
    into.second_lane = (into.second_lane + part.second_lane) % lane_end


def add_gap(gaps: list[GapRecord], first: int, last: int, gap: GapRecord) -> None:
    """Note a range without entries, joined to the one before when it goes on."""
    before = gaps[-1] if gaps else None
    if before is not None and before.last + 1 == first and (before.reason, before.detail) == (gap.reason, gap.detail):
        gaps.pop()
        first = before.first
    gaps.append(GapRecord(first, last, gap.reason, gap.at_unix_ms, gap.detail, gap.origin_zone))


def _paths(entries: EntryBatch) -> set[tuple[str | None, str | None]]:
    """Give by which zones facts of which zones came here."""
    columns = [entries.column("origin_zone"), entries.column("from_zone")]
    single = tuple(constant_value(column) for column in columns)
    if None not in single:
        return {(single[0], single[1])}
    pairs = pa.table(columns, names=["origin", "source"]).group_by(["origin", "source"]).aggregate([])
    return set(zip(*(pairs.column(name).to_pylist() for name in ("origin", "source")), strict=True))
