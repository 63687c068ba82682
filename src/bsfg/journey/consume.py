"""Step 5, consume: an application reads its zone's forward buffer through a named durable consumer.

This is apart from replication: the facts are here already, whether or not the other zone can be reached. The handler
must be idempotent, because a fact that was handled but not yet confirmed comes again after a crash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bsfg.fact import Entry
from bsfg.journey.link import check_consumer
from bsfg.ports import Confirmation, CursorTracker, Frame, GapRecord, Replayable

Handler = Callable[[Entry], Awaitable[None]]
GapHandler = Callable[[GapRecord], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one turn of a consumer did: how many entries were handled, and where and why it stopped.

    ``committed`` is the consumer's frontier afterwards. ``failure`` is what the handler raised for the entry at
    ``failed_offset``; that entry comes first in the next turn.
    """

    handled: int
    committed: int
    failed_offset: int | None = None
    failure: Exception | None = None


async def consume_once(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    handler: Handler,
    *,
    max_facts: int = 1_000,
    wait_seconds: float = 0.0,
    on_gap: GapHandler | None = None,
) -> Consumed:
    """Hand the next entries to the handler one by one, stop at the first failure, confirm what succeeded.

    Gap records go to ``on_gap`` in their place among the entries; without one they are passed over, since they stay
    listed in the buffer. Nothing is confirmed when the turn is cancelled: the same entries come again.
    """
    state = await cursors.consumer(consumer)
    check_consumer(state, buffer)
    turn = _Turn(state.checkpoint.committed, handler, on_gap)
    start = turn.committed + 1
    if await buffer.wait_for(start, wait_seconds):
        async for frame in buffer.replay(start, max_facts=max_facts):
            await turn.take(frame, max_facts)
            if turn.failure is not None or turn.handled >= max_facts:
                break
    if turn.committed >= start:
        await cursors.sent(consumer, turn.committed + 1)
        await cursors.commit(consumer, Confirmation(through=turn.committed, log_id=buffer.log_id))
    failed_offset = None if turn.failure is None else turn.committed + 1
    return Consumed(turn.handled, turn.committed, failed_offset, turn.failure)


@dataclass(slots=True)
class _Turn:
    """How far one turn has come."""

    committed: int
    handler: Handler
    on_gap: GapHandler | None
    handled: int = 0
    failure: Exception | None = None

    async def take(self, frame: Frame, max_facts: int) -> None:
        """Handle a frame entry by entry until one fails or the turn is full."""
        try:
            if frame.gap is not None and self.on_gap is not None:
                await self.on_gap(frame.gap)
            if frame.entries is None:
                self.committed = frame.last
                return
            for entry in frame.entries.slice(0, max_facts - self.handled).to_entries():
                await self.handler(entry)
                self.committed = entry.offset
                self.handled += 1
        except Exception as error:
            self.failure = error
