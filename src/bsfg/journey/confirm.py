"""Step 5, confirm: a sender learns what is durable on the other side, and its frontier advances.

The frontier is contiguous: a confirmation beyond a hole is kept as an open range and counts once the hole closes.
What the receiver refused for good passes the frontier too, but first leaves a gap record here, so that the zone which
said it can list what was not taken, and why.
"""

from __future__ import annotations

from collections.abc import Sequence

from bsfg.errors import ForeignLog, InvalidArgument, OffsetOutOfRange
from bsfg.frontier import Frontier
from bsfg.journey.link import Refusal, check_consumer, merged_refusals, words_of
from bsfg.ports import Clock, Confirmation, ConsumerState, CursorTracker, GapRecord, Replayable
from bsfg.retention import GapReason

REFUSALS_MAX = 100_000


async def confirm_receipt(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    confirmation: Confirmation,
    refusals: Sequence[Refusal] = (),
    *,
    clock: Clock,
    peer: str = "",
) -> int:
    """Record a confirmation durably and give ``cursor_advanced_to``, the offset through which nothing is missing.

    Refused as a whole and without effect: offsets this buffer does not have yet (`OffsetOutOfRange`), another history
    (`ForeignLog`), a refusal of something that is not confirmed with it (`InvalidArgument`), and whatever
    `CursorTracker.commit` refuses. Repeats are harmless. ``peer`` names the receiver in the gap records.
    """
    state = await cursors.consumer(consumer)
    check_consumer(state, buffer)
    check_history(buffer, confirmation)
    await _check_range(buffer, confirmation, refusals)
    check_refusals(_after(state, confirmation), refusals)
    # Before the commit: once the frontier has passed, nobody would ask for the reasons again.
    await _record_refusals(buffer, refusals, peer or consumer, clock.now_unix_ms())
    checkpoint = await cursors.commit(consumer, confirmation)
    return checkpoint.committed


def check_history(buffer: Replayable, confirmation: Confirmation) -> None:
    """Raise `ForeignLog` when the confirmation speaks of another log than this one."""
    if confirmation.log_id is not None and confirmation.log_id != buffer.log_id:
        raise ForeignLog(f"the confirmation is for log {confirmation.log_id}, this is {buffer.log_id}")


def check_refusals(confirmed: Frontier, refusals: Sequence[Refusal]) -> None:
    """Raise `InvalidArgument` unless every refused range is confirmed, now or before."""
    if len(refusals) > REFUSALS_MAX:
        raise InvalidArgument(f"{len(refusals)} refusals in one confirmation, the limit is {REFUSALS_MAX}")
    for refusal in refusals:
        if refusal.first < 0 or refusal.last < refusal.first:
            raise InvalidArgument(f"refusal {refusal.first}..{refusal.last} is not a range of offsets")
        if not confirmed.covers(refusal.first, refusal.last):
            raise InvalidArgument(f"offsets {refusal.first}..{refusal.last} are refused but not confirmed")


def _after(state: ConsumerState, confirmation: Confirmation) -> Frontier:
    """Give the frontier as the confirmation would leave it, raising what `CursorTracker.commit` would raise then.

    Refusals are recorded before the commit, so whatever it may refuse has to be known before them.
    """
    confirmed = Frontier(state.checkpoint.committed, list(state.ranges))
    if confirmation.through is not None:
        confirmed.confirm_through(confirmation.through)
    confirmed.confirm(confirmation.ranges)
    return confirmed


async def _check_range(buffer: Replayable, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
    """Raise `OffsetOutOfRange` when anything is confirmed or refused that was never sent."""
    highest = max(
        [
            -1 if confirmation.through is None else confirmation.through,
            *(last for _, last in confirmation.ranges),
            *(refusal.last for refusal in refusals),
        ]
    )
    if highest < 0:
        return
    end = (await buffer.stats()).end
    if highest >= end:
        raise OffsetOutOfRange(f"offset {highest} is confirmed, but the log ends before {end}", offset=highest, end=end)


async def _record_refusals(buffer: Replayable, refusals: Sequence[Refusal], peer: str, now_unix_ms: int) -> None:
    gaps = []
    for refusal in merged_refusals(refusals):
        detail = f"{peer}: {refusal.reason}" + (f": {refusal.detail}" if refusal.detail else "")
        gaps.append(GapRecord(refusal.first, refusal.last, GapReason.QUARANTINED, now_unix_ms, words_of(detail)))
    if gaps:
        await buffer.record_gaps(gaps)
