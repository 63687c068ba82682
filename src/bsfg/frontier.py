"""The contiguous frontier: how far everything is confirmed, and the islands of confirmation beyond it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from bsfg.errors import InvalidArgument, TooManyRanges

Range = tuple[int, int]
"""First and last offset, both inclusive."""

NOTHING = -1
"""The value of ``committed`` when nothing is confirmed."""

MAX_OPEN_RANGES = 1024


@dataclass(slots=True)
class Frontier:
    """What one consumer has confirmed.

    ``committed`` is the highest offset below which nothing is missing (inclusive, -1 when nothing is confirmed);
    ``ranges`` are the confirmed islands beyond it, sorted, disjoint and never adjacent. The frontier never moves
    back, and it never passes an offset that was not confirmed.
    """

    committed: int = NOTHING
    ranges: list[Range] = field(default_factory=list)
    max_ranges: int = MAX_OPEN_RANGES

    def confirm_through(self, offset: int) -> bool:
        """Confirm everything up to and including an offset; tell whether that changed anything."""
        if offset < NOTHING:
            raise InvalidArgument(f"offset {offset} is negative")
        if offset <= self.committed:
            return False
        self.committed, self.ranges = _swept(offset, self.ranges)
        return True

    def confirm(self, ranges: Iterable[Range]) -> bool:
        """Confirm ranges in any order; the frontier advances when the first gap closes.

        Either all ranges are taken or, when too many islands would stay open, none is.
        """
        new = list(ranges)
        for first, last in new:
            if first < 0 or last < first:
                raise InvalidArgument(f"range {first}..{last} is not a range of offsets")
        committed, islands = _swept(self.committed, self.ranges + new)
        if len(islands) > self.max_ranges:
            raise TooManyRanges(
                f"{len(islands)} open ranges beyond offset {committed}, the limit is {self.max_ranges}",
                first_missing=committed + 1,
            )
        changed = committed != self.committed or islands != self.ranges
        self.committed, self.ranges = committed, islands
        return changed

    def is_confirmed(self, offset: int) -> bool:
        """Tell whether an offset is confirmed, in the prefix or in an island."""
        return self.covers(offset, offset)

    def covers(self, first: int, last: int) -> bool:
        """Tell whether every offset from ``first`` through ``last`` is confirmed, by halving the islands."""
        if last <= self.committed:
            return True
        # Islands are never adjacent, to each other or to the prefix: a range is covered by one of them or by none.
        at = bisect_left(self.ranges, (first + 1,)) - 1
        return at >= 0 and self.ranges[at][1] >= last

    def missing(self, end: int) -> list[Range]:
        """List what is not confirmed below ``end`` (exclusive)."""
        result: list[Range] = []
        at = self.committed + 1
        for first, last in self.ranges:
            if at >= end:
                return result
            result.append((at, min(first, end) - 1))
            at = last + 1
        if at < end:
            result.append((at, end - 1))
        return result

    def copy(self) -> Frontier:
        """Give an independent copy."""
        return Frontier(self.committed, list(self.ranges), self.max_ranges)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Give ranges in order, those that overlap or touch as one."""
    islands: list[Range] = []
    for first, last in sorted(ranges):
        if islands and first <= islands[-1][1] + 1:
            islands[-1] = (islands[-1][0], max(islands[-1][1], last))
        else:
            islands.append((first, last))
    return islands


def _swept(committed: int, ranges: Iterable[Range]) -> tuple[int, list[Range]]:
    """Extend a frontier over ranges, and give what stays as islands beyond it."""
    islands = joined(ranges)
    reached = bisect_left(islands, (committed + 2,))
    if reached:
        # Of those that begin within reach only the last can end beyond it.
        committed = max(committed, islands[reached - 1][1])
    return committed, islands[reached:]
