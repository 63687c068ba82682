"""Step 2, serve: a sender answers a receiver that asks for what comes next.

The sender is passive: it looks up what this consumer has confirmed, gives what follows, and changes nothing durable
until a confirmation arrives. An answer that gets lost is therefore given again, from the same place.

What a link leaves out is part of the answer, with reason ``skipped``: as sets that come with the entries around them,
or, for a receiver that knows no sets, as a gap record in the place of every range that the link does not carry. Either
way the receiver sees one sequence of offsets without holes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from bsfg.batch import EntryBatch
from bsfg.errors import ForeignLog, InvalidArgument
from bsfg.gaps import grouped
from bsfg.journey.link import (
    EVERYTHING,
    RETURNING,
    Carriage,
    Carriages,
    Fetched,
    FetchRequest,
    Room,
    apart,
    carriage_now,
    check_consumer,
)
from bsfg.journey.sums import Summation
from bsfg.offload import THREAD_BYTES, by_size
from bsfg.ports import Buffer, Clock, CursorTracker, Frame, GapSet, Replayable
from bsfg.retention import GapReason

SCANNED_PER_FACT = 16
"""A link that carries little looks at this many facts per fact asked for, then answers with what it has."""

SCANNED_MAX = 100_000
"""Nor does it look at more before it answers: each fact may be a range to tell of, and receivers bound those."""

SUM_FACTS, SUM_BYTES, SUM_SECONDS = 65_536, 16 << 20, 1.0
"""Who has a log summed up gets an answer when so much is looked at, and asks for the rest."""

SUM_STEP_BYTES = 4 << 20
"""So much is summed up at once, which takes some 20 milliseconds; then others have their turn in the thread."""

EVEN_TRIES = 4
"""So often is the place of a cut guessed from the average row, before what is left is halved."""


@dataclass(slots=True)
class _Given:
    """What one consumer was given last, with facts through which offset, and the last record that it confirmed."""

    token: str = ""
    through: int = -1
    confirmed: str = ""


@dataclass(slots=True)
class GivenGaps:
    """Which gap records of other zones were given to consumers that do not keep count themselves.

    A record is given with every answer until the consumer confirms what it was given with, as facts are, but only the
    first time does it end a wait. This is memory: after a restart of the node all records are given once more.
    """

    _given: dict[str, _Given] = field(default_factory=dict)

    def confirmed_by(self, consumer: str) -> str:
        """Give the token of the last record that a consumer has confirmed."""
        return self._given.get(consumer, _Given()).confirmed

    def is_news(self, consumer: str, token: str) -> bool:
        """Tell whether the record of a token was not yet given to a consumer."""
        return token != self._given.get(consumer, _Given()).token

    def give(self, consumer: str, token: str, through: int) -> None:
        """Note an answer that ends with the record of a token, and with the facts through an offset."""
        given = self._given.setdefault(consumer, _Given())
        given.token, given.through = token, through

    def confirm(self, consumer: str, committed: int) -> None:
        """Note that a consumer has confirmed everything through an offset."""
        given = self._given.get(consumer)
        if given is not None and committed >= given.through:
            given.confirmed = given.token


def _check_start(consumer: str, start: int, end: int) -> None:
    """Raise `ForeignLog` when a consumer has more than the log."""
    if start > end:
        raise ForeignLog(f"{consumer} has offset {start - 1}, but this log ends before {end}")


async def serve(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    request: FetchRequest,
    *,
    carriage: Carriage | Carriages = EVERYTHING,
    given: GivenGaps | None = None,
    clock: Clock | None = None,
    room: Room | None = None,
) -> Fetched:
    """Answer one fetch of a named durable consumer: what follows the last offset it confirmed without a gap.

    A consumer that asks ahead of its confirmations (``request.after``) gets what follows that offset. When there is
    nothing yet, wait for it as long as the request says; then the answer may have no frames. Ranges that the link
    leaves out are not worth an answer of their own while there is time to wait; gap records of other zones are, the
    first time. ``given`` counts them for those who do not (``request.gaps_after`` is None). The answer tells what the
    ``clock``, by which the buffer's entries have their times, says when it leaves. ``room`` is taken when there is
    something to read: who waits for facts takes none. What the link carries is asked for anew after every wait: a right
    may have been taken away meanwhile. Raises `UnknownConsumer`, `ConsumerRetired`, and `ForeignLog` when the
    consumer's position is not one of this buffer.
    """
    check_request(request)
    state = await cursors.consumer(consumer)
    check_consumer(state, buffer)
    start = max(state.checkpoint.committed, -1 if request.after is None else request.after) + 1
    counted = (given or GivenGaps()) if request.gaps_after is None else None
    after = counted.confirmed_by(consumer) if counted else request.gaps_after or ""
    gaps, token = await relayed_gaps(buffer, after, carriage_now(carriage).receiver_zone)
    news = bool(gaps) and (counted is None or counted.is_news(consumer, token))
    collector = _Collector(request, start)
    if request.wait_seconds:
        # Before it is waited for: a log that was put back could grow past it, and what lies between is not known there.
        _check_start(consumer, start, (await buffer.stats()).end)
    deadline = _now_seconds() + (0 if news else request.wait_seconds)
    more = True
    while more:
        there = await buffer.wait_for(collector.next_offset, max(0.0, deadline - _now_seconds()))
        stats = await buffer.stats()
        _check_start(consumer, start, stats.end)
        if room is not None and collector.next_offset < stats.end:
            await room.take(request.max_bytes)
        wants_more = await collector.gather(buffer, carriage_now(carriage), stats.end)
        more = there and wants_more and not collector.is_worth_an_answer and _now_seconds() < deadline
    frames = collector.frames()
    if room is not None:
        room.keep(sum(frame.entries.weight_bytes for frame in frames if frame.entries is not None))
    if frames:
        await cursors.sent(consumer, frames[-1].last + 1)
    if counted is not None and gaps:
        counted.give(consumer, token, frames[-1].last if frames else start - 1)
    answer = Fetched(
        buffer.log_id,
        start,
        stats.end,
        stats.chain_head,
        frames,
        gaps_token=token,
        served_at_unix_ms=None if clock is None else clock.now_unix_ms(),
    )
    if request.sets:
        return replace(answer, gap_sets=gaps)
    pieces = [piece for frame in frames for piece in apart(frame)]
    return replace(answer, frames=pieces, gaps=[record for each in gaps for record in each.records()])


async def serve_range(
    buffer: Replayable,
    first: int,
    end: int,
    *,
    max_facts: int = 10_000,
    carriage: Carriage | Carriages = EVERYTHING,
    sets: bool = False,
) -> AsyncIterator[Frame]:
    """Give a range of offsets (``end`` exclusive); asked again, it gives the same while the entries are retained.

    No cursor moves: this is for re-reads, for fetching in parallel, and for auditors. ``sets`` is as in a fetch. What
    the link carries is asked for with every frame, however slowly they are taken.
    """
    async for frame in buffer.replay(first, end=end, max_facts=max_facts):
        chosen = await carried(carriage_now(carriage), frame)
        for piece in (chosen,) if sets else apart(chosen):
            yield piece


async def sum_up(frames: AsyncIterator[Frame], summation: Summation) -> None:
    """Sum up frames in place of giving them, as many as one answer may take, and at least one."""
    deadline, read_bytes = _now_seconds() + SUM_SECONDS, 0
    pending, pending_bytes = list[EntryBatch](), 0
    async for frame in frames:
        summation.passed(frame)
        if frame.entries is not None:
            pending.append(frame.entries)
            pending_bytes += frame.entries.weight_bytes
        if pending_bytes >= SUM_STEP_BYTES:
            await _add(pending, pending_bytes, summation)
            read_bytes, pending, pending_bytes = read_bytes + pending_bytes, [], 0
        if summation.scanned >= SUM_FACTS or read_bytes >= SUM_BYTES or _now_seconds() >= deadline:
            break
    if pending:
        await _add(pending, pending_bytes, summation)


async def _add(batches: Sequence[EntryBatch], weight_bytes: int, summation: Summation) -> None:
    """Sum up entries in steps, small batches together; always in a thread, since few take nearly as long as many."""
    work_bytes = max(weight_bytes, THREAD_BYTES)
    entries = await by_size(work_bytes, EntryBatch.concat, batches) if len(batches) > 1 else batches[0]
    step = max(1, len(entries) * SUM_STEP_BYTES // max(weight_bytes, 1))
    for at in range(0, len(entries), step):
        await by_size(work_bytes, summation.add, entries.slice(at, step))


async def carried(carriage: Carriage, frame: Frame) -> Frame:
    """Give what a link carries of a frame; patterns are tried on many facts beside the event loop."""
    if frame.entries is None or not (carriage.served or carriage.asked):
        return carriage.chosen(frame)
    return await by_size(frame.entries.weight_bytes, carriage.chosen, frame)


def check_request(request: FetchRequest) -> None:
    """Raise `InvalidArgument` for a request that asks for nothing."""
    if request.max_facts < 1 or request.max_bytes < 1 or request.wait_seconds < 0:
        raise InvalidArgument("a fetch asks for at least one fact and one byte, and waits no negative time")


async def relayed_gaps(buffer: Replayable, after: str, receiver_zone: str | None) -> tuple[list[GapSet], str]:
    """Choose the gap records of other zones that came after those the receiver stored last, and give the next token.

    What merely returned to this zone is nobody else's concern.
    """
    if buffer.buffer != Buffer.FORWARD:
        return [], after
    while True:
        told, token = await buffer.gaps_told(after)
        wanted = [
            each
            for each in told
            if each.origin_zone not in (None, receiver_zone)
            and not (each.reason == GapReason.SKIPPED and each.detail.startswith(RETURNING))
        ]
        if wanted or not told:
            return wanted, token
        after = token


def _now_seconds() -> float:
    """Give the event loop's time, by which the buffers wait."""
    return asyncio.get_running_loop().time()


class _Collector:
    """Gathers frames until a request is satisfied, joining neighbours so that small ones travel together."""

    def __init__(self, request: FetchRequest, start: int) -> None:
        self.next_offset = start
        self.is_worth_an_answer = False
        self._max_facts = self._facts = request.max_facts
        self._bytes = request.max_bytes
        self._scanned = min(request.max_facts * SCANNED_PER_FACT, SCANNED_MAX)
        self._frames: list[Frame] = []
        self._pending: list[Frame] = []

    async def gather(self, buffer: Replayable, carriage: Carriage, end: int) -> bool:
        """Take what the buffer has up to an end; tell whether more would be taken."""
        async for frame in buffer.replay(self.next_offset, end=end, max_facts=self._max_facts):
            if not self._take(await carried(carriage, frame)):
                return False
        return True

    def frames(self) -> list[Frame]:
        """Give what was gathered."""
        if self._pending:
            self._frames.append(_joined(self._pending))
            self._pending = []
        return self._frames

    def _take(self, frame: Frame) -> bool:
        """Take a frame, perhaps in part; tell whether more are wanted."""
        taken = frame if frame.entries is None else self._fitting(frame, frame.entries)
        if taken is None:
            return False
        if frame.gap is not None:
            self.frames().append(frame)
            self.is_worth_an_answer = True
        else:
            self._pending.append(taken)
            self._scanned -= taken.last - taken.first + 1
        self.next_offset = taken.last + 1
        return taken.last == frame.last and self._facts > 0 and self._bytes > 0 and self._scanned > 0

    def _fitting(self, frame: Frame, entries: EntryBatch) -> Frame | None:
        """Give as much of a frame as there is room for, None when there is none."""
        count = _count_within(entries, self._bytes, min(len(entries), self._facts))
        if count == 0 and not self.is_worth_an_answer:
            count = 1
        if count:
            self.is_worth_an_answer = True
            self._facts -= count
            self._bytes -= entries.slice(0, count).size_bytes
        if count == len(entries):
            return frame
        # What is left out before the next entry belongs to this answer, too.
        last = int(entries.slice(count, 1).offsets[0]) - 1
        if last < frame.first:
            return None
        skips = [each.within(frame.first, last) for each in frame.skips]
        kept = entries.slice(0, count) if count else None
        return Frame(frame.first, last, kept, skips=tuple(each for each in skips if len(each.ranges)))


def _joined(pending: Sequence[Frame]) -> Frame:
    """Make one frame of neighbours, a plain gap record when they are one skipped range."""
    first, last = pending[0].first, pending[-1].last
    batches = [frame.entries for frame in pending if frame.entries is not None]
    skips = grouped(each for frame in pending for each in frame.skips)
    if not batches and len(skips) == 1 and len(skips[0].ranges) == 1:
        return Frame(first, last, gap=next(skips[0].records()))
    return Frame(first, last, EntryBatch.concat(batches) if batches else None, skips=tuple(skips))


def _count_within(entries: EntryBatch, max_bytes: int, max_facts: int) -> int:
    """Count the leading rows that fit into a number of bytes.

    Most rows are about as large as their neighbours, so it is tried first where it would be if all were; each size
    that is asked for costs more than a whole row does elsewhere. When that does not help, by halving.
    """
    if max_facts <= 0 or max_bytes <= 0:
        return 0
    if (size_bytes := entries.slice(0, max_facts).size_bytes) <= max_bytes:
        return max_facts
    fits, fit_bytes, too_many, too_many_bytes, tries = 0, 0, max_facts, size_bytes, 0
    while too_many - fits > 1:
        tries += 1
        at = fits + (too_many - fits) * (max_bytes - fit_bytes) // max(1, too_many_bytes - fit_bytes)
        middle = (fits + too_many) // 2 if tries > EVEN_TRIES else min(max(at, fits + 1), too_many - 1)
        part = entries.slice(0, middle)
        # Rows are added up: to count them exactly they would have to be written.
        found_bytes = part.weight_bytes if part.has_rows else part.nbytes
        if found_bytes <= max_bytes:
            fits, fit_bytes = middle, found_bytes
        else:
            too_many, too_many_bytes = middle, found_bytes
    return fits
