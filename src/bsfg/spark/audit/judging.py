"""What the sums of the first pass and the evidence of both ends say: which ranges differ, and what else is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bsfg.journey import carriage
from bsfg.ports import GapRecord
from bsfg.retention import GapReason
from bsfg.spark.audit.evidence import Evidence
from bsfg.spark.audit.excuses import NONE, Excuse, Excuses, of_gaps
from bsfg.spark.audit.scope import NOT_CARRIED, RECEIVER, RETURNING, SENDER, Scope
from bsfg.spark.audit.sibling import Sibling
from bsfg.spark.audit.sums import Descent, Named, RangeSum, Sums, merge_sum
from bsfg.spark.audit.verdict import Absence, Finding, Kind

EQUAL, DIFFERS, EXCUSED, TRUNCATED, EMPTY = "equal", "differs", "excused", "truncated", "empty"
"""What the sums say of a range."""

Span = tuple[int, int]


@dataclass(slots=True)
class Totals:
    """The stretches of both logs put together."""

    sender: dict[int, RangeSum] = field(default_factory=dict)
    receiver: dict[int, RangeSum] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    stretches: list[Sums] = field(default_factory=list)

    def side(self, side: str) -> list[Sums]:
        """Give the stretches of one log, in order."""
        return [each for each in self.stretches if each.side == side]

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


def totals(stretches: Iterable[Sums]) -> Totals:
    """Put stretches together."""
    result = Totals(stretches=sorted(stretches, key=lambda each: (each.side, each.first)))
    for stretch in result.stretches:
        into = result.sender if stretch.side == SENDER else result.receiver
        for number, part in stretch.ranges.items():
            merge_sum(into.setdefault(number, RangeSum()), part)
            if stretch.side == RECEIVER:
                result.spans.setdefault(number, []).append((part.first_place, part.last_place))
    return result


def state_of(number: int, found: Totals, scope: Scope, sender: Evidence, excuses: Excuses) -> tuple[str, Excuse | None]:
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


def own_gaps(stretches: Sequence[Sums]) -> list[GapRecord]:
    """Give the ranges of a log that hold no entries, as the log itself explained them."""
    return [gap for stretch in stretches for gap in stretch.gaps]


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


def by_range(spans: Iterable[Span], scope: Scope) -> dict[int, list[Span]]:
    """Cut spans of offsets at the borders of ranges."""
    result: dict[int, list[Span]] = {}
    for first, last in spans:
        for number in range(first // scope.range_facts, last // scope.range_facts + 1):
            start, end = scope.bounds(number)
            if max(first, start) <= min(last, end - 1):
                result.setdefault(number, []).append((max(first, start), min(last, end - 1)))
    return result


def gap_absences(gaps: Sequence[GapRecord], stretches: Sequence[Sums]) -> list[Absence]:
    """List what a sender does not have or leaves out, one line per gap record and per reason to leave out."""
    result = [
        Absence(
            str(gap.reason), SENDER, gap.first, gap.last, gap.last - gap.first + 1, gap.detail, gap.at_unix_ms or None
        )
        for gap in gaps
        if not is_left_out(gap)
    ]
    details = {RETURNING: carriage.RETURNING, NOT_CARRIED: carriage.NOT_CARRIED}
    for reason, detail in details.items():
        skipped = [gap for gap in gaps if is_left_out(gap) and gap.detail == detail]
        count = sum(gap.last - gap.first + 1 for gap in skipped) + sum(
            each.left_out.get(reason, 0) for each in stretches
        )
        if count:
            first, last = min(each.first for each in stretches), max(each.end for each in stretches) - 1
            result.append(Absence(reason, SENDER, first, last, count, detail))
    return result


def damage(side: str, evidence: Evidence, gaps: Sequence[GapRecord]) -> list[Finding]:
    """Report ranges of a log that are damaged or lost without a record of it."""
    if not evidence.knows_gaps:
        return []
    recorded = of_gaps([gap for gap in evidence.gaps if gap.origin_zone is None])
    found = []
    for gap in gaps:
        if gap.reason in (GapReason.DAMAGED, GapReason.LOST):
            for first, last in recorded.uncovered(gap.first, gap.last):
                found.append(_damaged(side, first, last, f"{gap.reason}: {gap.detail}".removesuffix(": ")))
    return found


def _damaged(side: str, first: int, last: int, detail: str) -> Finding:
    count = last - first + 1
    if side == SENDER:
        return Finding(Kind.LOG_DAMAGED, side, first, last, detail=detail, count=count)
    return Finding(Kind.LOG_DAMAGED, side, receiver_offset=first, detail=f"{first} to {last}: {detail}", count=count)


def descents(stretches: Sequence[Sums]) -> tuple[list[Descent], int]:
    """Give the entries of the receiver that stand behind a higher offset, and how many more there are."""
    named: list[Descent] = []
    count, before = 0, None  # type: int, Named | None
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
    stretches: Sequence[Sums], excuses: Excuses, known: set[int | None], sibling: Sibling | None
) -> list[Finding]:
    """Report what is out of order, unless it was taken out of quarantine, is of another link or reported already."""
    named, more = descents(stretches)
    quarantined = Excuses(each for each in excuses.all if each.reason == GapReason.QUARANTINED)
    found = []
    for descent in named:
        entry = descent.entry
        other = sibling is not None and (sibling.has(entry) or sibling.has(descent.behind))
        if entry.place not in known and not other and not quarantined.covers(entry.offset):
            detail = f"it stands behind the offset {descent.behind.offset}"
            found.append(_of_entry(Kind.OUT_OF_ORDER, RECEIVER, entry, detail=detail))
    if more:
        found.append(Finding(Kind.OUT_OF_ORDER, RECEIVER, detail="more facts, which are not named", count=more))
    return found


def body_findings(stretches: Sequence[Sums], known: set[tuple[str, int]]) -> list[Finding]:
    """Report altered bodies that no comparison has named; ``known`` are side and place."""
    found = []
    for stretch in stretches:
        for entry in stretch.altered:
            if (stretch.side, entry.place) not in known:
                found.append(_of_entry(Kind.BODY_ALTERED, stretch.side, entry, ("body",)))
        more = stretch.altered_count - len(stretch.altered)
        if more:
            detail = f"more facts between {stretch.first} and {stretch.end - 1}, which are not named"
            found.append(Finding(Kind.BODY_ALTERED, stretch.side, detail=detail, count=more))
    return found


def unreadable(stretches: Sequence[Sums]) -> list[Finding]:
    """Report stretches that could not be read to their end."""
    found = []
    for stretch in stretches:
        for first, last, why in stretch.unreadable:
            detail, count = f"{first} to {last}: {why}", last - first + 1
            if stretch.side == SENDER:
                found.append(Finding(Kind.UNREADABLE, SENDER, first, last, detail=detail, count=count))
            else:
                found.append(Finding(Kind.UNREADABLE, RECEIVER, receiver_offset=first, detail=detail, count=count))
    return found


def _of_entry(kind: Kind, side: str, entry: Named, fields: tuple[str, ...] = (), detail: str = "") -> Finding:
    place = entry.place if side == RECEIVER else None
    return Finding(kind, side, entry.offset, None, place, entry.from_zone, entry.message_id, fields, detail)


def reports(scope: Scope, sender: Evidence, receiver: Evidence, frontier: int) -> list[Finding]:
    """Report what the receiver refused and the sender does not know to be refused."""
    if not sender.knows_gaps:
        return []
    told = of_gaps([gap for gap in sender.gaps if gap.reason == GapReason.QUARANTINED])
    found = []
    for gap in receiver.gaps:
        if gap.origin_zone == scope.zone and gap.reason == GapReason.QUARANTINED and gap.first <= frontier:
            for first, last in told.uncovered(gap.first, min(gap.last, frontier)):
                if scope.first <= first and last < scope.end and first >= sender.start:
                    count = last - first + 1
                    found.append(Finding(Kind.UNREPORTED, SENDER, first, last, detail=gap.detail, count=count))
    return found


def histories(sender: Evidence, receiver: Evidence) -> list[Finding]:
    """Report a sender's log that is not the one, or not as long, as the receiver remembers."""
    position = receiver.position
    if position is None or position.log_id is None:
        return []
    if position.log_id != sender.log_id:
        return [Finding(Kind.FOREIGN_LOG, SENDER, detail=f"the receiver knows the log {position.log_id}")]
    if position.end > sender.end:
        detail = f"it ends before {sender.end}, and ended before {position.end} when the receiver last asked"
        return [Finding(Kind.FOREIGN_LOG, SENDER, detail=detail)]
    return []
