"""What a link carries: all of its stream, or only facts for some zones; what it leaves out is a reported range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import constant_value
from bsfg.batch import EntryBatch
from bsfg.ports import Frame, GapRecord
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
        if frame.entries is None or (self.to_zones is None and self.receiver_zone is None):
            yield frame
            return
        if frame.entries.has_rows and self._carries_all(frame.entries):
            yield frame
            return
        verdicts = self._verdicts(frame.entries)
        edges = np.flatnonzero(np.diff(verdicts)) + 1
        for start, stop in zip([0, *edges], [*edges, len(verdicts)], strict=True):
            yield _run(frame, int(start), int(stop), int(verdicts[start]))

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


def _run(frame: Frame, start: int, stop: int, verdict: int) -> Frame:
    """Give the rows from ``start`` to ``stop`` as entries, or as the gap record for leaving them out."""
    assert frame.entries is not None
    rows = frame.entries.slice(start, stop - start)
    first, last = int(rows.offsets[0]), int(rows.offsets[-1])
    if verdict == _CARRIED:
        return Frame(first, last, rows)
    # The time of the last fact, not of this answer: a repeated answer is then the same.
    at_unix_ms = int(rows.column("appended_at_unix_ms")[-1].as_py())
    return Frame(first, last, gap=GapRecord(first, last, GapReason.SKIPPED, at_unix_ms, _DETAIL[verdict]))


def _is_in(column: pa.Array, zones: frozenset[str]) -> np.ndarray:
    single = constant_value(column)
    if single is not None:
        return np.full(len(column), single in zones)
    return np.asarray(pc.is_in(column, value_set=pa.array(sorted(zones), pa.string())).to_numpy(zero_copy_only=False))
