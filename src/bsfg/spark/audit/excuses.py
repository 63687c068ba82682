"""Why a fact need not be there: records, positions and settings as ranges of offsets, the most telling one first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bsfg.journey import carriage
from bsfg.ports import GapRecord
from bsfg.retention import GapReason
from bsfg.spark.audit.evidence import Evidence
from bsfg.spark.audit.scope import NO_END, RECEIVER, SENDER, Scope
from bsfg.spark.audit.verdict import Absence

IN_FLIGHT = "in_flight"
BEFORE_THE_LINK = "before_the_link"
OTHER_PATH = "other_path"
PUT_AGAIN = "put_again"
RECEIVER_TRUNCATED = "receiver_truncated"
GIVEN_BACK = "given_back"
"""Reasons beside those of gap records and of what a link leaves out."""

NONE = -1


@dataclass(frozen=True, slots=True)
class Excuse:
    """A range of the sender's offsets (both ends inclusive) that need not be there, and why."""

    first: int
    last: int
    reason: str
    side: str
    detail: str = ""
    at_unix_ms: int | None = None

    def absence(self, first: int, last: int, count: int) -> Absence:
        """Give the part of it that was used."""
        return Absence(self.reason, self.side, first, last, count, self.detail, self.at_unix_ms)


class Excuses:
    """Excuses in the order of their weight; for each offset the first one that covers it counts."""

    def __init__(self, excuses: Iterable[Excuse]) -> None:
        self.all = [excuse for excuse in excuses if excuse.first <= excuse.last]
        edges = {edge for excuse in self.all for edge in (excuse.first, excuse.last + 1)}
        self._edges = np.array(sorted(edges), dtype=np.int64)
        self._owners = np.full(len(edges), NONE, dtype=np.int64)
        for number in range(len(self.all) - 1, -1, -1):
            start, stop = np.searchsorted(self._edges, (self.all[number].first, self.all[number].last + 1))
            self._owners[start:stop] = number

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """Give the number of the excuse of each offset, -1 where there is none."""
        if not len(self._edges):
            return np.full(len(offsets), NONE, dtype=np.int64)
        at = np.searchsorted(self._edges, offsets, side="right") - 1
        return np.where(at >= 0, self._owners[np.maximum(at, 0)], NONE)

    def of_bounds(self, first: int, last: int) -> set[int]:
        """Give the numbers of all excuses that a range (both ends inclusive) has, -1 for parts without."""
        inner = self._edges[(self._edges > first) & (self._edges <= last)]
        return set(self.of(np.concatenate([[first], inner])).tolist())

    def covers(self, offset: int) -> bool:
        """Tell whether an offset is excused."""
        return self.of_bounds(offset, offset) != {NONE}

    def within(self, first: int, end: int) -> Excuses:
        """Give those that say something about a range (``end`` exclusive)."""
        return Excuses(excuse for excuse in self.all if excuse.first < end and excuse.last >= first)

    def uncovered(self, first: int, last: int) -> list[tuple[int, int]]:
        """Give the parts of a range (both ends inclusive) that no excuse covers."""
        inner = self._edges[(self._edges > first) & (self._edges <= last)]
        starts = np.concatenate([[first], inner])
        owners = self.of(starts)
        ends = np.append(starts[1:] - 1, last)
        return [(int(a), int(b)) for a, b, owner in zip(starts, ends, owners, strict=True) if owner == NONE]


def for_absent(scope: Scope, sender: Evidence, receiver: Evidence, frontier: int, lowest: int | None) -> Excuses:
    """Give what excuses that the receiver lacks something that the sender has.

    ``lowest`` is the lowest offset that the receiver still has of the link: what it let go was in order, too.
    """
    told = [gap for gap in receiver.gaps if gap.origin_zone == scope.zone]
    excuses = [_recorded(gap) for gap in told if gap.reason == GapReason.QUARANTINED]
    excuses += [_recorded(gap) for gap in told if gap.reason != GapReason.QUARANTINED and _counts(gap, scope)]
    begin = _begin(sender, lowest)
    if begin > 0:
        excuses.append(Excuse(0, begin - 1, BEFORE_THE_LINK, SENDER, "the receiver's consumer was created later"))
    if receiver.start > 0:
        gone = frontier if lowest is None else lowest - 1
        detail = f"the receiver's buffer begins at {receiver.start}{_removed(receiver)}"
        excuses.append(Excuse(0, gone, RECEIVER_TRUNCATED, RECEIVER, detail))
    excuses.append(Excuse(frontier + 1, NO_END, IN_FLIGHT, SENDER, "not confirmed yet"))
    return Excuses(excuses)


def _removed(receiver: Evidence) -> str:
    """Say what the receiver's own records tell of what is gone below its start; plain retention leaves none."""
    removed: dict[str, int] = {}
    for gap in receiver.gaps:
        if gap.origin_zone is None and gap.first < receiver.start:
            gone = min(gap.last + 1, receiver.start) - gap.first
            removed[str(gap.reason)] = removed.get(str(gap.reason), 0) + gone
    told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(removed.items()))
    return f", on record: {told}" if told else ""


def for_gaps(scope: Scope, receiver: Evidence, others: Excuses) -> Excuses:
    """Give what excuses that the receiver has neither a fact nor, of its absence at the sender, any other record."""
    told = [_recorded(gap) for gap in receiver.gaps if gap.origin_zone == scope.zone]
    return Excuses([*told, *others.all])


def of_gaps(gaps: Sequence[GapRecord]) -> Excuses:
    """Give the gaps of a sender's log as excuses for entries that the receiver alone has."""
    return Excuses(
        Excuse(gap.first, gap.last, str(gap.reason), SENDER, gap.detail, gap.at_unix_ms or None) for gap in gaps
    )


def _recorded(gap: GapRecord) -> Excuse:
    return Excuse(gap.first, gap.last, str(gap.reason), RECEIVER, gap.detail, gap.at_unix_ms)


def _counts(gap: GapRecord, scope: Scope) -> bool:
    """One record may stand for several stretches that return; who knows the receiver's zone sees that by itself."""
    return scope.receiver_zone is None or not gap.detail.startswith(carriage.RETURNING)


def _begin(sender: Evidence, lowest: int | None) -> int:
    """Give the first offset that the receiver was to get."""
    cursor = sender.cursor
    if cursor is None or cursor.start == "earliest":
        return 0
    if cursor.start == "offset":
        return cursor.start_value
    return cursor.committed + 1 if lowest is None else lowest
