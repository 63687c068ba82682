"""Every range of a stream: equal, excused as a whole, or compared entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.ports import GapRecord
from bsfg.spark.audit import judging
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.compare import Detail, Known, compare
from bsfg.spark.audit.evidence import End
from bsfg.spark.audit.excuses import RECEIVER_TRUNCATED, Excuse, Excuses, for_gaps, of_gaps
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import RECEIVER, SENDER, Rows, Scope, received, sender_rows, sent
from bsfg.spark.audit.verdict import Absence

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparing:
    """Reads a range that differs at both ends and compares it entry by entry."""

    number: int
    sender: End
    sender_log: str
    receiver: End
    receiver_log: str
    spans: tuple[Span, ...]
    scope: Scope
    known: Known

    def __call__(self) -> Detail:
        """Do it, in whichever process this is."""
        first, end = self.scope.bounds(self.number)
        ours, left_out, gaps = [], [np.empty(0, dtype=bool)], list[GapRecord]()
        # A sender that was restored may end before what the receiver has of it.
        last = min(end, self.known.end)
        for frame in self.sender.frames(first, last, self.sender_log) if first < last else ():
            if frame.entries is not None:
                rows = sender_rows(frame.entries)
                ours.append(rows)
                left_out.append(~np.isin(rows.offsets, sent(frame.entries, self.scope)[0].offsets))
            elif frame.gap is not None:
                gaps.append(replace(frame.gap, first=frame.first, last=frame.last))
        theirs, let_go = self._received(first, end)
        known = self._known_now(first, end, gaps, let_go)
        return compare(self.number, Rows.concat(ours), np.concatenate(left_out), theirs, self.scope, known)

    def _received(self, first: int, end: int) -> tuple[Rows, bool]:
        """Give the receiver's entries of the range, and whether some of what was there has been let go since."""
        # What shares its offsets with another link is told apart by key, which needs the rows of both.
        scope, parts, gaps = replace(self.scope, shared=False), [], list[GapRecord]()
        for start, last in self.spans:
            for frame in self.receiver.frames(start, last + 1, self.receiver_log):
                if frame.entries is not None:
                    rows = received(frame.entries, scope)
                    parts.append(rows.take(np.flatnonzero((rows.offsets >= first) & (rows.offsets < end))))
                elif frame.gap is not None:
                    gaps.append(frame.gap)
        return Rows.concat(parts), judging.let_go_before(gaps) > 0

    def _known_now(self, first: int, end: int, gaps: Sequence[GapRecord], let_go: bool) -> Known:
        """Add to what is known what has changed since the first pass: both ends may let go what is being read."""
        known = replace(self.known, gaps=Excuses([*self.known.gaps.all, *of_gaps(gaps).all]))
        if not let_go:
            return known
        excuse = Excuse(first, end - 1, RECEIVER_TRUNCATED, RECEIVER, "let go while it was read")
        return replace(known, absent=Excuses([*known.absent.all, excuse]))


@dataclass(slots=True)
class Compared:
    """What came of all ranges: what the sums said of each, the details of those that differ, and the numbers."""

    states: dict[int, str] = field(default_factory=dict)
    details: list[Detail] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    compared: int = 0


def compare_ranges(case: Case, runner: Runner) -> Compared:
    """Compare all ranges, reading again only those that differ."""
    gaps = judging.own_gaps(case.totals.side(SENDER))
    unrecorded = _unrecorded(case, gaps)
    altered = {entry.offset // case.scope.range_facts for stretch in case.totals.stretches for entry in stretch.altered}
    found = Compared()
    chosen = sorted(_judged(case, found, unrecorded.keys() | altered))
    excuses = of_gaps(gaps)
    steps = [_comparing(case, number, excuses, unrecorded.get(number, ())) for number in chosen]
    found.details = runner.each(f"{case.plan.stream}: comparing what differs", steps)
    for detail in found.details:
        found.compared += detail.compared
        found.absences += detail.absences
    found.absences += judging.gap_absences(gaps, case.totals.side(SENDER))
    return found


def _unrecorded(case: Case, gaps: Sequence[GapRecord]) -> dict[int, list[Span]]:
    if not case.receiver.knows_gaps:
        return {}
    recorded = for_gaps(case.scope, case.receiver, case.excuses)
    return judging.by_range(judging.unrecorded(gaps, recorded, case.frontier), case.scope)


def _judged(case: Case, found: Compared, suspect: set[int]) -> set[int]:
    """Take note of what the sums say of every range, and give those that must be read again."""
    chosen = set(suspect)
    for number in sorted({*case.totals.sender, *case.totals.receiver}):
        state, excuse = judging.state_of(number, case.totals, case.scope, case.sender, case.excuses)
        found.states[number] = state if excuse is None else excuse.reason
        if state == judging.DIFFERS:
            chosen.add(number)
        elif number in suspect:
            continue
        elif state == judging.EQUAL:
            found.compared += case.totals.sender[number].count
        elif excuse is not None:
            first, end = case.scope.bounds(number)
            count = case.totals.sender[number].count
            found.absences.append(excuse.absence(first, min(end, case.end) - 1, count))
    return chosen


def _comparing(case: Case, number: int, gaps: Excuses, unrecorded: Sequence[Span]) -> Comparing:
    first, end = case.scope.bounds(number)
    excuses = case.excuses.within(first, end), gaps.within(first, end)
    known = Known(*excuses, tuple(unrecorded), case.sender.end, case.sibling, tuple(case.sender.restores))
    return Comparing(
        number,
        case.plan.sender,
        case.sender.log_id,
        case.plan.receiver,
        case.receiver.log_id,
        tuple(case.totals.spans.get(number, ())),
        case.scope,
        known,
    )
