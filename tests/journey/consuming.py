"""The SDK's consumer on the buffers of a zone in this process: its own turns, over the steps that a node would run."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bsfg.clock import SystemClock
from bsfg.errors import BsfgError
from bsfg.fact import Entry
from bsfg.journey.confirm import confirm_receipt
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.journey.serve import serve
from bsfg.ports import Confirmation, CursorTracker, GapRecord, Replayable
from bsfg.sdk.consumer import AsyncConsumer
from bsfg.sdk.consuming import ConsumerCore, ConsumerOptions


class Enough(Exception):
    """The application stops here, of its own accord."""


@dataclass
class BufferFeed:
    """A feed without a node: it serves and confirms in this process."""

    buffer: Replayable
    cursors: CursorTracker
    consumer: str

    async def open(self) -> None:
        """Begin."""

    def rewind(self) -> None:
        """Nothing is needed: serving begins at the first unconfirmed entry."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Serve what follows."""
        return await serve(self.buffer, self.cursors, self.consumer, request)

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Record what is finished."""
        await confirm_receipt(self.buffer, self.cursors, self.consumer, confirmation, refusals, clock=SystemClock())

    async def close(self) -> None:
        """End."""


class LocalConsumer(AsyncConsumer):
    """A consumer whose engine reads from a feed of this process."""

    def __init__(self, feed: BufferFeed, on_gap: Callable[[GapRecord], None] | None = None) -> None:
        super().__init__(feed.consumer, "localhost:9", on_gap=on_gap)
        self.feed = feed

    async def start(self) -> None:
        """Begin with the feed in place of a connection."""
        self.core = self._core = ConsumerCore(self.feed, ConsumerOptions())
        await self.core.open()


@dataclass(frozen=True)
class Consumed:
    """What one turn of an application did, and where and why it stopped."""

    handled: int
    committed: int
    failed_offset: int | None = None
    failure: Exception | None = None


async def consume_once(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    handler: Callable[[Entry], Awaitable[None]],
    *,
    max_facts: int = 1_000,
    wait_seconds: float = 0.0,
    on_gap: Callable[[GapRecord], None] = lambda gap: None,
) -> Consumed:
    """Run a consumer until there is nothing more, its handler fails, or it has taken enough."""
    handled, failure = 0, None

    async def counted(entry: Entry) -> None:
        nonlocal handled
        if handled == max_facts:
            raise Enough
        await handler(entry)
        handled += 1

    application = LocalConsumer(BufferFeed(buffer, cursors, consumer), on_gap)
    await application.start()
    try:
        await application.run(counted, idle_seconds=wait_seconds)
    except BsfgError:
        raise
    except Exception as error:
        failure = None if isinstance(error, Enough) else error
    finally:
        with contextlib.suppress(BsfgError):
            await application.close()
    committed = (await cursors.consumer(consumer)).checkpoint.committed
    return Consumed(handled, committed, None if failure is None else committed + 1, failure)
