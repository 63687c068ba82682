"""What sums and evidence say: which ranges differ, why a fact need not be there, and what else is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.journey import link
from bsfg.journey.sums import (
    NO_END,
    NOT_ASKED_FOR,
    NOT_CARRIED,
    NOT_SERVED,
    RECEIVER,
    RETURNING,
    SENDER,
    AuditScope,
    Descent,
    Named,
    RangeSum,
    RangeSums,
    merge_sum,
)
from bsfg.ports import GapRecord, StartAt
from bsfg.retention import GapReason
from bsfg.spark.audit.scope import Evidence, Sibling
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind, FoldedAbsence

IN_FLIGHT = "in_flight"
BEFORE_THE_LINK = "before_the_link"
OTHER_PATH = "other_path"
PUT_AGAIN = "put_again"
RECEIVER_TRUNCATED = "receiver_truncated"
GIVEN_BACK = "given_back"
"""Reasons beside those of gap records and of what a link leaves out."""

NONE = -1


class Excuses:
    """Why facts may be absent, in the order of weight; for each offset the first absence that covers it counts."""

    def __init__(self, excuses: Iterable[Absence]) -> None:
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


def for_absent(scope: AuditScope, sender: Evidence, receiver: Evidence, frontier: int, lowest: int | None) -> Excuses:
    """Give what excuses that the receiver lacks something that the sender has.

    ``lowest`` is the lowest offset that the receiver still has of the link: what it let go was in order, too.
    """
    told = sorted(told_gaps(scope, receiver), key=lambda gap: gap.reason != GapReason.QUARANTINED)
    excuses = [Absence.of_gap(gap, RECEIVER) for gap in told if gap.count is None and _counts(gap, scope)]
    begin = _begin(sender, lowest)
    if begin > 0:
        detail = "the receiver's consumer was created later"
        excuses.append(Absence(BEFORE_THE_LINK, SENDER, 0, begin - 1, detail=detail))
    if receiver.start > 0:
        gone = frontier if lowest is None else lowest - 1
        detail = f"the receiver's buffer begins at {receiver.start}{_removed(receiver)}"
        excuses.append(Absence(RECEIVER_TRUNCATED, RECEIVER, 0, gone, detail=detail))
    excuses.append(Absence(IN_FLIGHT, SENDER, frontier + 1, NO_END, detail="not confirmed yet"))
    if not scope.carry_only and not scope.asked:
        excuses += folded(scope, receiver)
    return Excuses(excuses)


def told_gaps(scope: AuditScope, receiver: Evidence) -> list[GapRecord]:
    """Give what a receiver has on record of the sender's offsets."""
    return [gap for gap in receiver.gaps if gap.origin_zone == scope.zone]


def returning(scope: AuditScope, receiver: Evidence) -> list[Absence]:
    """Give what returns to the receiver's zone as it is on record, for those who cannot see it from the facts."""
    told = [gap for gap in told_gaps(scope, receiver) if gap.detail.startswith(link.RETURNING)]
    return [Absence.of_gap(gap, RECEIVER) if gap.count is None else _folded(gap) for gap in told]


def folded(scope: AuditScope, receiver: Evidence) -> list[Absence]:
    """Give what folded records excuse, for those who cannot see by themselves what the link left out.

    They come after all others, because they do not tell which offsets they are for.
    """
    gaps = [gap for gap in told_gaps(scope, receiver) if gap.count is not None]
    return [_folded(gap) for gap in gaps if _counts(gap, scope)]


def _folded(gap: GapRecord) -> FoldedAbsence:
    detail = f"{gap.detail}: {gap.count:,} of {gap.first} to {gap.last}, which ones is no longer kept"
    at_most = gap.offsets
    return FoldedAbsence(str(gap.reason), RECEIVER, gap.first, gap.last, 0, detail, gap.at_unix_ms, at_most)


def overused(excuses: Iterable[Absence], absences: Iterable[Absence]) -> list[AuditFinding]:
    """Report what is absent beyond the number that a folded record stands for."""
    used: Counter[str] = Counter()
    for each in absences:
        used[each.detail] += each.count
    return [
        AuditFinding(
            FindingKind.MISSING,
            RECEIVER,
            excuse.first,
            excuse.last,
            detail=f"{used[excuse.detail]:,} are absent, and on record are {excuse.detail}",
            count=used[excuse.detail] - excuse.at_most,
        )
        for excuse in excuses
        if isinstance(excuse, FoldedAbsence) and used[excuse.detail] > excuse.at_most
    ]


def _removed(receiver: Evidence) -> str:
    """Say what the receiver's own records tell of what is gone below its start; plain retention leaves none."""
    removed: dict[str, int] = {}
    for gap in receiver.gaps:
        if gap.origin_zone is None and gap.first < receiver.start:
            gone = min(gap.last + 1, receiver.start) - gap.first
            removed[str(gap.reason)] = removed.get(str(gap.reason), 0) + gone
    told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(removed.items()))
    return f", on record: {told}" if told else ""


def of_gaps(gaps: Iterable[GapRecord]) -> Excuses:
    """Give the gaps of a sender's log as excuses for entries that the receiver alone has."""
    return Excuses(Absence.of_gap(gap, SENDER) for gap in gaps)


def _counts(gap: GapRecord, scope: AuditScope) -> bool:
    """One record may stand for several stretches that return; who knows the receiver's zone sees that by itself."""
    quarantined = gap.reason == GapReason.QUARANTINED
    return quarantined or scope.receiver_zone is None or not gap.detail.startswith(link.RETURNING)


def _begin(sender: Evidence, lowest: int | None) -> int:
    """Give the first offset that the receiver was to get."""
    cursor = sender.cursor
    if cursor is None or cursor.spec.start == StartAt.EARLIEST:
        return 0
    if cursor.spec.start == StartAt.OFFSET:
        return cursor.spec.start_value
    return cursor.checkpoint.committed + 1 if lowest is None else lowest


EQUAL, DIFFERS, EXCUSED, TRUNCATED, EMPTY = "equal", "differs", "excused", "truncated", "empty"
"""What the sums say of a range."""

Span = tuple[int, int]


@dataclass(slots=True)
class Totals:
    """The stretches of both logs put together."""

    sender: dict[int, RangeSum] = field(default_factory=dict)
    receiver: dict[int, RangeSum] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    stretches: list[RangeSums] = field(default_factory=list)

    def side(self, side: str) -> list[RangeSums]:
        """Give the stretches of one log, in order."""
        return [each for each in self.stretches if each.side == side]

    def gaps(self, side: str) -> list[GapRecord]:
        """Give the ranges of one log that hold no entries, as the log itself explained them."""
        return [gap for stretch in self.side(side) for gap in stretch.all_gaps()]

    @property
    def lowest(self) -> int | None:
        """The lowest of the sender's offsets that the receiver has."""
        return min((each.lowest for each in self.stretches if each.lowest is not None), default=None)

    @property
    def highest(self) -> int | None:
        """The highest of the sender's offsets that the receiver has."""
        return max((each.highest for each in self.stretches if each.highest is not None), default=None)

    @property
    def paths(self) -> set[tuple[str | None, str | None]]:
        """By which zones facts of which zones came to the receiver."""
        return set().union(*(each.paths for each in self.stretches)) if self.stretches else set()


def totals(stretches: Iterable[RangeSums]) -> Totals:
    """Put stretches together."""
    result = Totals(stretches=sorted(stretches, key=lambda each: (each.side, each.first)))
    for stretch in result.stretches:
        into = result.sender if stretch.side == SENDER else result.receiver
        for number, part in stretch.ranges.items():
            merge_sum(into.setdefault(number, RangeSum()), part)
            if stretch.side == RECEIVER:
                result.spans.setdefault(number, []).append((part.first_place, part.last_place))
    return result


def state_of(
    number: int, found: Totals, scope: AuditScope, sender: Evidence, excuses: Excuses
) -> tuple[str, Absence | None]:
    """Say what the sums tell of a range, and by which one excuse all of it may be absent."""
    ours, theirs = found.sender.get(number), found.receiver.get(number)
    first, end = scope.bounds(number)
    if ours is None:
        if theirs is None:
            return EMPTY, None
        return (TRUNCATED if end <= sender.start else DIFFERS), None
    if theirs is not None:
        return (EQUAL if ours.holds_the_same(theirs) else DIFFERS), None
    owners = excuses.of_bounds(first, end - 1)
    if len(owners) == 1 and NONE not in owners:
        return EXCUSED, excuses.all[owners.pop()]
    return DIFFERS, None


def let_go_before(gaps: Sequence[GapRecord]) -> int:
    """Give before which place a log has let go what it had, perhaps while it was read."""
    gone = (GapReason.TRUNCATED, GapReason.EVICTED, GapReason.EXPIRED)
    return max((gap.last + 1 for gap in gaps if gap.reason in gone), default=0)


def is_left_out(gap: GapRecord) -> bool:
    """Tell whether a range was left out by the sender because the link does not carry it."""
    return gap.reason == GapReason.SKIPPED


def unrecorded(gaps: Sequence[GapRecord], recorded: Excuses, frontier: int) -> list[Span]:
    """Give the parts of a sender's gaps, up to the frontier, of which the receiver has no record."""
    result = []
    for gap in gaps:
        if gap.reason != GapReason.TRUNCATED and not is_left_out(gap) and gap.first <= frontier:
            result += recorded.uncovered(gap.first, min(gap.last, frontier))
    return result


def by_range(spans: Iterable[Span], scope: AuditScope) -> dict[int, list[Span]]:
    """Cut spans of offsets at the borders of ranges."""
    result: dict[int, list[Span]] = {}
    for first, last in spans:
        for number in range(first // scope.range_facts, last // scope.range_facts + 1):
            start, end = scope.bounds(number)
            if max(first, start) <= min(last, end - 1):
                result.setdefault(number, []).append((max(first, start), min(last, end - 1)))
    return result


LEFT_OUT = {
    RETURNING: link.RETURNING,
    NOT_CARRIED: link.NOT_CARRIED,
    NOT_ASKED_FOR: link.NOT_ASKED_FOR,
    NOT_SERVED: link.NOT_SERVED,
}
"""How a sender tells why it leaves facts out."""


def gap_absences(gaps: Sequence[GapRecord], stretches: Sequence[RangeSums]) -> list[Absence]:
    """List what a sender does not have or leaves out, one line per gap record and per reason to leave out."""
    result = [Absence.of_gap(gap, SENDER) for gap in gaps if not is_left_out(gap)]
    for reason, detail in LEFT_OUT.items():
        count = sum(gap.last - gap.first + 1 for gap in gaps if is_left_out(gap) and gap.detail == detail)
        count += sum(each.left_out.get(reason, 0) for each in stretches)
        if count:
            first, last = min(each.first for each in stretches), max(each.end for each in stretches) - 1
            result.append(Absence(reason, SENDER, first, last, count, detail))
    return result


def damage(side: str, evidence: Evidence, gaps: Sequence[GapRecord]) -> Iterator[AuditFinding]:
    """Report ranges of a log that are damaged or lost without a record of it."""
    recorded = of_gaps(gap for gap in evidence.gaps if gap.origin_zone is None)
    for gap in gaps:
        if gap.reason in (GapReason.DAMAGED, GapReason.LOST):
            detail = f"{gap.reason}: {gap.detail}".removesuffix(": ")
            for first, last in recorded.uncovered(gap.first, gap.last):
                yield AuditFinding.within(FindingKind.LOG_DAMAGED, side, first, last, detail, last - first + 1)


def descents(stretches: Sequence[RangeSums]) -> tuple[list[Descent], int]:
    """Give the entries of the receiver that stand behind a higher offset, and how many more there are."""
    named: list[Descent] = []
    count = 0
    before: Named | None = None
    for stretch in stretches:
        if stretch.first_entry is None:
            continue
        if before is not None and stretch.first_entry.offset <= before.offset:
            named.append(Descent(stretch.first_entry, before))
            count += 1
        named += stretch.descents
        count += stretch.descents_count
        before = stretch.last_entry
    return named, count - len(named)


def order_findings(
    stretches: Sequence[RangeSums], excuses: Excuses, known: set[int | None], sibling: Sibling | None
) -> Iterator[AuditFinding]:
    """Report what is out of order, unless it was taken out of quarantine, is of another link or reported already."""
    named, more = descents(stretches)
    quarantined = Excuses(each for each in excuses.all if each.reason == GapReason.QUARANTINED)
    for descent in named:
        entry = descent.entry
        other = sibling is not None and (sibling.has(entry) or sibling.has(descent.behind))
        if entry.place not in known and not other and not quarantined.covers(entry.offset):
            detail = f"it stands behind the offset {descent.behind.offset}"
            yield AuditFinding.of(FindingKind.OUT_OF_ORDER, RECEIVER, entry, detail=detail)
    if more:
        yield AuditFinding(FindingKind.OUT_OF_ORDER, RECEIVER, detail="more facts, which are not named", count=more)


def body_findings(stretches: Sequence[RangeSums], known: set[tuple[str, int]]) -> Iterator[AuditFinding]:
    """Report altered bodies that no comparison has named; ``known`` are side and place."""
    for stretch in stretches:
        for entry in stretch.altered:
            if (stretch.side, entry.place) not in known:
                found = AuditFinding.of(FindingKind.BODY_ALTERED, stretch.side, entry, ("body",))
                yield found if stretch.side == RECEIVER else replace(found, receiver_offset=None)
        more = stretch.altered_count - len(stretch.altered)
        if more:
            detail = f"more facts between {stretch.first} and {stretch.end - 1}, which are not named"
            yield AuditFinding(FindingKind.BODY_ALTERED, stretch.side, detail=detail, count=more)


def unreadable(stretches: Sequence[RangeSums]) -> Iterator[AuditFinding]:
    """Report stretches that could not be read to their end."""
    for stretch in stretches:
        for first, last, why in stretch.unreadable:
            yield AuditFinding.within(FindingKind.UNREADABLE, stretch.side, first, last, why, last - first + 1)


def reports(scope: AuditScope, sender: Evidence, receiver: Evidence, frontier: int) -> Iterator[AuditFinding]:
    """Report what the receiver refused and the sender does not know to be refused."""
    told = of_gaps(gap for gap in sender.gaps if gap.reason == GapReason.QUARANTINED)
    for gap in told_gaps(scope, receiver):
        if gap.reason == GapReason.QUARANTINED and gap.first <= frontier:
            for first, last in told.uncovered(gap.first, min(gap.last, frontier)):
                if max(scope.first, sender.start) <= first and last < scope.end:
                    count = last - first + 1
                    yield AuditFinding(FindingKind.UNREPORTED, SENDER, first, last, detail=gap.detail, count=count)


def histories(sender: Evidence, receiver: Evidence) -> list[AuditFinding]:
    """Report a sender's log that is not the one, or not as long, as the receiver remembers."""
    position = receiver.position
    if position is None or position.log_id is None:
        return []
    if position.log_id != sender.log_id:
        return [AuditFinding(FindingKind.FOREIGN_LOG, SENDER, detail=f"the receiver knows the log {position.log_id}")]
    if position.end > sender.end:
        detail = f"it ends before {sender.end}, and ended before {position.end} when the receiver last asked"
        return [AuditFinding(FindingKind.FOREIGN_LOG, SENDER, detail=detail)]
    return []
