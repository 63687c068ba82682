"""Where in the receiver's log a window of the sender's offsets lies, found by halving instead of reading all of it.

The receiver holds facts in the order of the sender, so a few looks tell. What stands in the wrong place is not found
there; it is then missing from the window, and found by the search for what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bsfg.spark.audit.evidence import End, Evidence
from bsfg.spark.audit.scope import NO_END, Scope, received

_LOOK_FACTS = 1_000


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the receiver's log to be read (``end`` exclusive), and the lowest offset that the log has at all."""

    first: int
    end: int
    lowest: int | None = None


def window_of(log: End, evidence: Evidence, scope: Scope) -> Window:
    """Find the part of a receiver's log that holds the window of a scope."""
    if scope.first == 0 and scope.end == NO_END:
        return Window(evidence.start, evidence.end)
    looking = _Looking(log, evidence, replace(scope, first=0, end=NO_END))
    begin = looking.first_from(evidence.start)
    first = looking.place_of(scope.first)
    end = evidence.end if scope.end == NO_END else looking.place_of(scope.end)
    return Window(first, end, begin[1] if begin is not None else None)


@dataclass(frozen=True, slots=True)
class _Looking:
    log: End
    evidence: Evidence
    scope: Scope

    def place_of(self, offset: int) -> int:
        """Give the first place from which on no entry of the link has a lower offset."""
        low, high = self.evidence.start, self.evidence.end
        while low < high:
            middle = (low + high) // 2
            found = self.first_from(middle)
            if found is None or found[1] >= offset:
                high = middle
            else:
                low = found[0] + 1
        return low

    def first_from(self, place: int) -> tuple[int, int] | None:
        """Give place and offset of the first entry of the link at a place or after it."""
        size = _LOOK_FACTS
        while place < self.evidence.end:
            stop = min(place + size, self.evidence.end)
            for frame in self.log.frames(place, stop, self.evidence.log_id):
                if frame.entries is not None:
                    rows = received(frame.entries, self.scope)
                    if len(rows):
                        return int(rows.places[0]), int(rows.offsets[0])
            place, size = stop, 2 * size
        return None
