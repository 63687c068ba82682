"""What a link carries: all of its stream, or only facts for some zones; what it leaves out is a reported range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import constant_value
from bsfg.batch import EntryBatch
from bsfg.ports import Frame, GapSet
from bsfg.ranges import RangeSet
from bsfg.retention import GapReason

_CARRIED, _OTHER_ZONE, _RETURNING = 0, 1, 2

NOT_CARRIED = "to_zone is not carried by this link"
RETURNING = "returns to its from_zone"
_DETAIL = {_OTHER_ZONE: NOT_CARRIED, _RETURNING: RETURNING}


@dataclass(frozen=True, slots=True)
class Carriage:
    """What a link carries: facts for some zones or (None) for all, and none that return to the receiver's zone."""

    to_zones: frozenset[str] | None = None
    receiver_zone: str | None = None

    def split(self, frame: Frame) -> Iterator[Frame]:
        """Give a frame as runs of entries that the link carries and gap records for those it leaves out."""
        yield from apart(self.chosen(frame))

    def chosen(self, frame: Frame) -> Frame:
        """Give a frame with the entries that the link carries, and what it leaves out among them as sets."""
        entries = frame.entries
        if entries is None or (self.to_zones is None and self.receiver_zone is None):
            return frame
        if entries.has_rows and self._carries_all(entries):
            return frame
        verdicts = self._verdicts(entries)
        if not verdicts.any():
            return frame
        # The time of the last fact, not of this answer: a repeated answer is then the same.
        at_unix_ms = int(entries.column("appended_at_unix_ms")[-1].as_py())
        skips = []
        for verdict, detail in _DETAIL.items():
            ranges = RangeSet.where(verdicts == verdict, frame.first, at_unix_ms)
            if len(ranges):
                skips.append(GapSet(GapReason.SKIPPED, ranges, detail, None, at_unix_ms))
        carried = np.flatnonzero(verdicts == _CARRIED)
        return Frame(frame.first, frame.last, entries.take(carried) if len(carried) else None, skips=tuple(skips))

    def _carries_all(self, entries: EntryBatch) -> bool:
        if self.receiver_zone is not None and self.receiver_zone in entries.values("from_zone"):
            return False
        return self.to_zones is None or self.to_zones.issuperset(entries.values("to_zone"))

    def _verdicts(self, entries: EntryBatch) -> np.ndarray:
        verdicts = np.full(len(entries), _CARRIED, dtype=np.int8)
        if self.to_zones is not None:
            verdicts[~_is_in(entries.column("to_zone"), self.to_zones)] = _OTHER_ZONE
        if self.receiver_zone is not None:
            verdicts[_is_in(entries.column("from_zone"), frozenset({self.receiver_zone}))] = _RETURNING
        return verdicts


EVERYTHING = Carriage()


def apart(frame: Frame) -> Iterator[Frame]:
    """Give a frame as runs of entries and a gap record for each skipped range, for those who know no sets."""
    if not frame.skips:
        yield frame
        return
    gaps = sorted((gap for each in frame.skips for gap in each.records()), key=lambda gap: gap.first)
    at, row = frame.first, 0
    for gap in gaps:
        if gap.first > at:
            yield _run(frame, at, gap.first - 1, row)
            row += gap.first - at
        yield Frame(gap.first, gap.last, gap=gap)
        at = gap.last + 1
    if at <= frame.last:
        yield _run(frame, at, frame.last, row)


def _run(frame: Frame, first: int, last: int, row: int) -> Frame:
    assert frame.entries is not None
    return Frame(first, last, frame.entries.slice(row, last - first + 1))


def _is_in(column: pa.Array, zones: frozenset[str]) -> np.ndarray:
    single = constant_value(column)
    if single is not None:
        return np.full(len(column), single in zones)
    return np.asarray(pc.is_in(column, value_set=pa.array(sorted(zones), pa.string())).to_numpy(zero_copy_only=False))
