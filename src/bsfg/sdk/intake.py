"""The entrance of a producer: facts become rows of an open batch, in bounded memory, from any thread.

The work per fact is kept tiny on purpose; everything else is done once per batch, later, by the producer's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, InvalidArgument, StorageClosed, TimedOut
from bsfg.rows import Row
from bsfg.sdk.futures import FactFuture, Outcome

ROW_BYTES = 512
"""What a queued fact costs beside its object."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is complete: how many facts and bytes at most, and how long it waits for more."""

    max_facts: int = 2_000
    max_bytes: int = 1 << 20
    linger_seconds: float = 0.005
    max_queued_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.max_facts < 1 or self.max_bytes < 1 or self.linger_seconds < 0 or self.max_queued_bytes < 1:
            raise InvalidArgument("a batch holds at least one fact and one byte, and lingers no negative time")


class Gathering:
    """A batch that is being gathered: rows of single facts, or one batch that a caller made himself."""

    __slots__ = ("due", "ends", "facts", "outcome", "rows", "size_bytes", "stream")

    def __init__(self, stream: str, outcome: Outcome, due: float, ends: float | None) -> None:
        self.stream, self.outcome, self.due, self.ends = stream, outcome, due, ends
        self.rows: list[Row] = []
        self.facts: FactBatch | None = None
        self.size_bytes = 0

    def complete(self) -> Gathering:
        """Note that nothing is added any more."""
        if self.facts is None:
            self.outcome.close([row[0] for row in self.rows])
        else:
            self.outcome.close(_Ids(self.facts))
        return self


class _Ids(Sequence[str | None]):
    """The ids of a batch, looked up when somebody asks: nearly nobody does."""

    __slots__ = ("_facts",)

    def __init__(self, facts: FactBatch) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, row: Any) -> Any:
        return self._facts.column("message_id")[row].as_py()


class Lane:
    """What is gathered for one stream, oldest first; the last one may still be open."""

    __slots__ = ("changed", "closed", "hurried", "open", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.open: Gathering | None = None
        self.closed: deque[Gathering] = deque()
        self.hurried = False
        self.changed = asyncio.Event()


class Intake:
    """All lanes of one producer, and the memory they share."""

    def __init__(self, limits: BatchLimits, loop: asyncio.AbstractEventLoop, *, deadline_seconds: float | None) -> None:
        self.limits, self._loop, self._deadline_seconds = limits, loop, deadline_seconds
        # Looked at for every fact, hence so near at hand.
        self._max_facts, self._max_bytes, self.max_queued_bytes = (
            limits.max_facts,
            limits.max_bytes,
            limits.max_queued_bytes,
        )
        self.lanes: dict[str, Lane] = {}
        self.queued_bytes = 0
        self.closing = False
        self.on_new_lane: Callable[[Lane], None] = lambda lane: None
        self._live: dict[Outcome, int] = {}
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._room_waiters: deque[asyncio.Future[None]] = deque()

    # Coming in, from any thread.

    def add(self, stream: str, row: Row) -> FactFuture:
        """Queue one fact."""
        size_bytes = ROW_BYTES + len(row[12])
        with self._lock:
            lane = self.lanes.get(stream) or self._new_lane(stream)
            gathering = lane.open
            wake = gathering is None
            if gathering is None:
                gathering = lane.open = self._opened(lane)
            rows = gathering.rows
            at = len(rows)
            rows.append(row)
            total_bytes = gathering.size_bytes = gathering.size_bytes + size_bytes
            self.queued_bytes += size_bytes
            if at + 1 >= self._max_facts or total_bytes >= self._max_bytes:
                self._close(lane)
                wake = True
        if wake:
            self._wake(lane)
        return FactFuture(gathering.outcome, at)

    def add_batch(self, stream: str, pieces: Sequence[FactBatch]) -> list[Outcome]:
        """Queue a caller's batch, in pieces that fit a message, behind what is already there."""
        with self._lock:
            lane = self.lanes.get(stream) or self._new_lane(stream)
            self._close(lane)
            outcomes = []
            for facts in pieces:
                gathering = self._opened(lane)
                gathering.facts, gathering.size_bytes = facts, facts.nbytes
                self.queued_bytes += gathering.size_bytes
                lane.closed.append(gathering.complete())
                outcomes.append(gathering.outcome)
        self._wake(lane)
        return outcomes

    @property
    def is_full(self) -> bool:
        """Whether a sender must wait for room."""
        return self.queued_bytes >= self.max_queued_bytes

    def wait_for_room(self, timeout_seconds: float | None) -> None:
        """Block a thread until there is room, or raise `TimedOut`."""
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._room:
            while self.is_full and not self.closing:
                left = None if ends is None else ends - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(
                        f"the producer's queue of {self.limits.max_queued_bytes} bytes is full",
                        hint="The node takes less than is sent: slow down, allow more memory, or use an outbox.",
                    )
                self._room.wait(left)

    async def room(self) -> None:
        """Wait in the producer's loop until there is room."""
        while self.is_full and not self.closing:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room_waiters.append(waiter)
            await waiter

    def _new_lane(self, stream: str) -> Lane:
        if self.closing:
            raise StorageClosed("the producer is closed", hint="Make a new producer.")
        lane = self.lanes[stream] = Lane(stream)
        self._call_in_loop(self.on_new_lane, lane)
        return lane

    def _opened(self, lane: Lane) -> Gathering:
        if self.closing:
            raise StorageClosed("the producer is closed", hint="Make a new producer.")
        now = time.monotonic()
        ends = None if self._deadline_seconds is None else now + self._deadline_seconds
        outcome = Outcome(self._loop, lambda: self._hurry(lane))
        self._live[outcome] = 0
        return Gathering(lane.stream, outcome, now + self.limits.linger_seconds, ends)

    def _close(self, lane: Lane) -> None:
        if lane.open is not None:
            lane.closed.append(lane.open.complete())
            lane.open = None

    def _hurry(self, lane: Lane) -> None:
        if not lane.hurried:
            lane.hurried = True
            self._wake(lane)

    def _wake(self, lane: Lane) -> None:
        self._call_in_loop(_set, lane.changed)

    def _call_in_loop(self, call: Callable[..., None], *args: object) -> None:
        try:
            if asyncio.get_running_loop() is self._loop:
                call(*args)
                return
        except RuntimeError:
            pass
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop has ended: the producer was closed meanwhile, and what was queued has failed with it.
            if not self._loop.is_closed():
                raise

    # Going out, in the producer's loop.

    async def next(self, lane: Lane) -> Gathering | None:
        """Give the next batch of a lane once it is complete or has lingered; None when the producer is closing."""
        while True:
            lane.changed.clear()
            gathering, due = self.take(lane)
            if gathering is not None:
                return gathering
            if self.closing and due is None:
                return None
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await lane.changed.wait()
            except TimeoutError:
                continue

    def take(self, lane: Lane) -> tuple[Gathering | None, float | None]:
        """Give the next batch of a lane if one is ready, else when it will be; None when there is none at all."""
        with self._lock:
            if lane.closed:
                return lane.closed.popleft(), None
            gathering = lane.open
            if gathering is None:
                lane.hurried = False
                return None, None
            if lane.hurried or self.closing or time.monotonic() >= gathering.due:
                lane.open, lane.hurried = None, False
                return gathering.complete(), None
            return None, gathering.due

    def expire(self, lane: Lane, error: BsfgError) -> None:
        """Give up what has waited too long to be sent at all."""
        now = time.monotonic()
        with self._lock:
            expired = []
            while lane.closed and lane.closed[0].ends is not None and lane.closed[0].ends <= now:
                expired.append(lane.closed.popleft())
            if not lane.closed and lane.open is not None and lane.open.ends is not None and lane.open.ends <= now:
                expired.append(lane.open.complete())
                lane.open = None
        for gathering in expired:
            gathering.outcome.fail(error)
            self.finish(gathering.outcome, gathering.size_bytes)

    def finish(self, outcome: Outcome, size_bytes: int) -> None:
        """Note that facts are safe or given up: their memory is free again."""
        with self._lock:
            if self._live.pop(outcome, None) is None:
                return
            self.queued_bytes -= size_bytes
            self._room.notify_all()
        while self._room_waiters and not self.is_full:
            _resolve(self._room_waiters.popleft())

    # All of it.

    def hurry_all(self) -> None:
        """Let every open batch go now."""
        for lane in list(self.lanes.values()):
            lane.hurried = True
            _set(lane.changed)

    def live(self) -> list[Outcome]:
        """List the outcomes of everything that is not safe yet."""
        with self._lock:
            return list(self._live)

    def close(self) -> None:
        """Take nothing more; what is there is still given out."""
        with self._lock:
            self.closing = True
            for lane in self.lanes.values():
                self._close(lane)
            self._room.notify_all()
        for waiter in self._room_waiters:
            _resolve(waiter)
        for lane in self.lanes.values():
            _set(lane.changed)


def _set(event: asyncio.Event) -> None:
    event.set()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
