"""Step 2, serve: a sender answers a receiver that asks for what comes next.

The sender is passive: it looks up what this consumer has confirmed, gives what follows, and changes nothing durable
until a confirmation arrives. An answer that gets lost is therefore given again, from the same place.

What a link leaves out is part of the answer: a gap record with reason ``skipped`` stands in the place of every range
that the link does not carry, so that the receiver sees one sequence of offsets without holes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from bsfg.batch import EntryBatch
from bsfg.errors import ForeignLog, InvalidArgument
from bsfg.journey.carriage import EVERYTHING, RETURNING, Carriage
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.journey.position import check_consumer
from bsfg.ports import Buffer, CursorTracker, ForwardBuffer, Frame, GapRecord, Replayable
from bsfg.retention import GapReason

SCANNED_PER_FACT = 16
"""A link that carries little looks at this many facts per fact asked for, then answers with what it has."""

RELAYED_GAPS_MAX = 1_000


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


async def serve(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    request: FetchRequest,
    *,
    carriage: Carriage = EVERYTHING,
    given: GivenGaps | None = None,
) -> Fetched:
    """Answer one fetch of a named durable consumer: what follows the last offset it confirmed without a gap.

    A consumer that asks ahead of its confirmations (``request.after``) gets what follows that offset. When there is
    nothing yet, wait for it as long as the request says; then the answer may have no frames. Ranges that the link
    leaves out are not worth an answer of their own while there is time to wait; gap records of other zones are, the
    first time. ``given`` counts them for those who do not (``request.gaps_after`` is None). Raises `UnknownConsumer`,
    `ConsumerRetired`, and `ForeignLog` when the consumer's position is not one of this buffer.
    """
    check_request(request)
    state = await cursors.consumer(consumer)
    check_consumer(state, buffer)
    start = max(state.checkpoint.committed, -1 if request.after is None else request.after) + 1
    counted = (given or GivenGaps()) if request.gaps_after is None else None
    after = counted.confirmed_by(consumer) if counted else request.gaps_after or ""
    gaps = relayed_gaps(await _gaps(buffer), after, carriage.receiver_zone)
    token = gap_token(gaps[-1]) if gaps else after
    news = bool(gaps) and (counted is None or counted.is_news(consumer, token))
    collector = _Collector(request, start)
    deadline = _now_seconds() + (0 if news else request.wait_seconds)
    more = True
    while more:
        there = await buffer.wait_for(collector.next_offset, max(0.0, deadline - _now_seconds()))
        stats = await buffer.stats()
        if start > stats.end:
            raise ForeignLog(f"{consumer} has offset {start - 1}, but this log ends before {stats.end}")
        wants_more = await collector.gather(buffer, carriage, stats.end)
        more = there and wants_more and not collector.is_worth_an_answer and _now_seconds() < deadline
    frames = collector.frames()
    if frames:
        await cursors.sent(consumer, frames[-1].last + 1)
    if counted is not None and gaps:
        counted.give(consumer, token, frames[-1].last if frames else start - 1)
    return Fetched(buffer.log_id, start, stats.end, stats.chain_head, frames, gaps, token)


async def serve_range(
    buffer: Replayable, first: int, end: int, *, max_facts: int = 10_000, carriage: Carriage = EVERYTHING
) -> AsyncIterator[Frame]:
    """Give a range of offsets (``end`` exclusive); asked again, it gives the same while the entries are retained.

    No cursor moves: this is for re-reads, for fetching in parallel, and for auditors.
    """
    async for frame in buffer.replay(first, end=end, max_facts=max_facts):
        for piece in carriage.split(frame):
            yield piece


async def serve_time_range(
    buffer: ForwardBuffer, start_unix_ms: int, end_unix_ms: int, *, carriage: Carriage = EVERYTHING
) -> AsyncIterator[Frame]:
    """Give what became durable here in a span of time (its end exclusive), in the order of offsets."""
    async for frame in buffer.query_by_time_range(start_unix_ms, end_unix_ms):
        for piece in carriage.split(frame):
            yield piece


def check_request(request: FetchRequest) -> None:
    """Raise `InvalidArgument` for a request that asks for nothing."""
    if request.max_facts < 1 or request.max_bytes < 1 or request.wait_seconds < 0:
        raise InvalidArgument("a fetch asks for at least one fact and one byte, and waits no negative time")


def relayed_gaps(gaps: Sequence[GapRecord], after: str, receiver_zone: str | None) -> list[GapRecord]:
    """Choose the gap records of other zones that follow the one the receiver stored last.

    A token that is not found, because the list was restored or shortened, gives all of them again: storing one twice
    does no harm, leaving one out would. What merely returned to this zone is nobody else's concern.
    """
    foreign = [
        gap for gap in gaps if gap.origin_zone not in (None, receiver_zone) and not gap.detail.startswith(RETURNING)
    ]
    known = next((at + 1 for at in range(len(foreign) - 1, -1, -1) if gap_token(foreign[at]) == after), 0)
    return foreign[known : known + RELAYED_GAPS_MAX]


def gap_token(gap: GapRecord) -> str:
    """Name a gap record by what makes it the same one: origin, range and reason."""
    return f"{gap.origin_zone}:{gap.first}-{gap.last}:{gap.reason}"


async def _gaps(buffer: Replayable) -> list[GapRecord]:
    """List the gap records that may be of other zones; a store buffer has none."""
    return await buffer.gaps() if buffer.buffer == Buffer.FORWARD else []


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
        self._scanned = request.max_facts * SCANNED_PER_FACT
        self._frames: list[Frame] = []
        self._pending: list[EntryBatch] = []

    async def gather(self, buffer: Replayable, carriage: Carriage, end: int) -> bool:
        """Take what the buffer has up to an end; tell whether more would be taken."""
        async for frame in buffer.replay(self.next_offset, end=end, max_facts=self._max_facts):
            if not self._take(carriage.split(frame)):
                return False
        return True

    def _take(self, pieces: Iterator[Frame]) -> bool:
        """Take frames in order, the last one perhaps in part; tell whether more are wanted."""
        for piece in pieces:
            if piece.entries is not None:
                if not self._take_entries(piece.entries):
                    return False
            else:
                self._take_gap(piece)
        return self._facts > 0 and self._bytes > 0 and self._scanned > 0

    def frames(self) -> list[Frame]:
        """Give what was gathered."""
        if self._pending:
            entries = EntryBatch.concat(self._pending)
            self._frames.append(Frame(self.next_offset - len(entries), self.next_offset - 1, entries))
            self._pending = []
        return self._frames

    def _take_entries(self, entries: EntryBatch) -> bool:
        count = _count_within(entries, self._bytes, min(len(entries), self._facts))
        if count == 0 and not self._pending and not self._frames:
            count = 1
        if count:
            taken = entries.slice(0, count)
            self._pending.append(taken)
            self._bytes -= taken.size_bytes
            self.is_worth_an_answer = True
        self._facts -= count
        self._scanned -= count
        self.next_offset += count
        return count == len(entries) and self._facts > 0

    def _take_gap(self, piece: Frame) -> None:
        assert piece.gap is not None
        frames = self.frames()
        self.next_offset = piece.last + 1
        if piece.gap.reason == GapReason.SKIPPED:
            self._scanned -= piece.last - piece.first + 1
        else:
            self.is_worth_an_answer = True
        if frames and (joined := _joined(frames[-1], piece)):
            frames[-1] = joined
        else:
            frames.append(piece)


def _joined(one: Frame, next_one: Frame) -> Frame | None:
    """Join two neighbouring skipped ranges of one kind, or give None."""
    a, b = one.gap, next_one.gap
    if a is None or b is None or a.reason != GapReason.SKIPPED or (a.reason, a.detail) != (b.reason, b.detail):
        return None
    gap = GapRecord(a.first, b.last, a.reason, b.at_unix_ms, a.detail)
    return Frame(one.first, next_one.last, gap=gap)


def _count_within(entries: EntryBatch, max_bytes: int, max_facts: int) -> int:
    """Count the leading rows that fit into a number of bytes, by halving."""
    if max_facts <= 0 or max_bytes <= 0:
        return 0
    if entries.slice(0, max_facts).size_bytes <= max_bytes:
        return max_facts
    fits, too_many = 0, max_facts
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if entries.slice(0, middle).nbytes <= max_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
