"""Which of the ranges that an end has let go can be held against the digests that were kept of them."""

from __future__ import annotations

from collections.abc import Iterator

from bsfg.rangedigest import KeptRange
from bsfg.retention import GapReason
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.excuses import Excuses, of_gaps
from bsfg.spark.audit.judging import own_gaps
from bsfg.spark.audit.kept import KeptDetail, ReceiverKept, SenderKept, both_kept
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import RECEIVER, SENDER


def check_let_go(case: Case, runner: Runner) -> list[KeptDetail]:
    """Check all ranges of which one end, or both, kept no more than a digest."""
    steps: list[SenderKept | ReceiverKept] = [*_sender_kept(case), *_receiver_kept(case)]
    found: list[KeptDetail] = runner.each(f"{case.plan.stream}: what was let go", steps)
    shift = _shift(case)
    if shift is not None:
        seen = {(each.first, each.last) for each in found}
        pairs = both_kept(case.sender.kept, case.receiver.kept, shift)
        found += [each for each in pairs if (each.first, each.last) not in seen]
    return found


def _sender_kept(case: Case) -> Iterator[SenderKept]:
    zone, paths, lowest = case.scope.zone, case.totals.paths, case.lowest
    brought = {source for origin, source in paths if origin == zone}
    other_paths = any(origin != zone and source in brought for origin, source in paths)
    for kept in case.sender.kept:
        inside = case.scope.first <= kept.first <= kept.last < min(case.end, case.sender.start)
        reached = case.receiver.start == 0 or (lowest is not None and lowest <= kept.first)
        if inside and reached:
            yield SenderKept(
                kept,
                case.plan.sender,
                case.plan.receiver,
                case.receiver.log_id,
                _spans(case, kept.first, kept.last),
                case.scope,
                _excuses(case, kept),
                other_paths,
            )


def _excuses(case: Case, kept: KeptRange) -> Excuses:
    """Give why the receiver may lack something of a range: also that the sender dropped it before it was sent."""
    gaps = [gap for gap in own_gaps(case.totals.side(SENDER)) if gap.reason != GapReason.TRUNCATED]
    return Excuses([*case.excuses.all, *of_gaps(gaps).all]).within(kept.first, kept.last + 1)


def _spans(case: Case, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Give where the receiver has what lies in some ranges, overlaps joined."""
    size = case.scope.range_facts
    numbers = range(first // size, last // size + 1)
    joined: list[tuple[int, int]] = []
    for span in sorted(span for number in numbers for span in case.totals.spans.get(number, ())):
        if joined and span[0] <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(span[1], joined[-1][1])
        else:
            joined.append(span)
    return tuple(joined)


def _receiver_kept(case: Case) -> Iterator[ReceiverKept]:
    shift = _shift(case)
    if shift is None:
        return
    for kept in case.receiver.kept:
        first, last = kept.first + shift, kept.last + shift
        if max(case.sender.start, case.scope.first) <= first <= last < case.end:
            yield ReceiverKept(kept, case.plan.sender, case.sender.log_id, shift, case.scope)


def _shift(case: Case) -> int | None:
    """Give how much higher the sender's offsets are than the receiver's, None when they do not run side by side.

    In what the receiver has let go they did, if it holds nothing but this link's facts and nothing was left out.
    """
    first = next((each.first_entry for each in case.totals.side(RECEIVER) if each.first_entry is not None), None)
    told = any(gap.origin_zone is not None for gap in case.receiver.gaps)
    left_out = any(each.left_out for each in case.totals.stretches)
    alone = {origin for origin, _ in case.totals.paths} == {case.scope.zone}
    if first is None or told or left_out or not alone or case.scope.first > 0:
        return None
    return first.offset - first.place


def let_go_by_sender(case: Case) -> int:
    """Count the offsets of the window that the sender has let go."""
    return max(0, min(case.sender.start, case.end) - case.scope.first)


def let_go_by_receiver(case: Case) -> int:
    """Count about how many facts of the window the receiver alone has let go."""
    lowest = case.lowest
    if case.receiver.start == 0:
        return 0
    gone = case.frontier + 1 if lowest is None else lowest
    return max(0, min(gone, case.end) - max(case.sender.start, case.scope.first))
