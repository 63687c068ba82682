"""How much callers may ask for at once: requests in all, requests of one caller, and bytes under way."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from bsfg.errors import Overloaded
from bsfg.wire.patience import Patience


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The limits of both listeners; the names are those of [limits] in the configuration."""

    message_bytes: int = 16 << 20
    concurrent_requests: int = 512
    concurrent_per_identity: int = 256
    connections: int = 1_000
    request_timeout_seconds: float = 60.0
    idle_timeout_seconds: float = 60.0
    fetch_wait_max_seconds: float = 60.0
    handshake_timeout_seconds: float = 10.0
    connection_age_seconds: float = 3_600.0
    in_flight_bytes: int = 64 << 20
    window_frames: int = 16

    @property
    def frame_bytes(self) -> int:
        """How large the frames are that a server makes itself: well below what a message may have."""
        return max(1, min(4 << 20, self.message_bytes // 2))


class Observer(Protocol):
    """Who wants to know how requests go."""

    def answered(self, operation: str, seconds: float, code: str | None) -> None:
        """Take note of an answer: how long it took, and the code of the error that it was, if it was one."""
        ...

    def watch(self, admission: Admission) -> None:
        """Learn where the requests under way are counted."""
        ...


class Admission:
    """Counts the requests that are being served and refuses those that are too many."""

    def __init__(self, limits: WireLimits, observer: Observer | None = None) -> None:
        self._limits, self._observer = limits, observer
        self._patience = Patience()
        if observer is not None:
            observer.watch(self)
        self._by_caller: Counter[str] = Counter()
        self.serving = 0
        self.refused = 0

    def answered(self, operation: str, seconds: float, code: str | None = None) -> None:
        """Pass on how a request went."""
        if self._observer is not None:
            self._observer.answered(operation, seconds, code)

    async def hold_back(self, caller: str, error: Exception) -> None:
        """Let the answer wait when its caller has made many wrong requests; he keeps his place meanwhile."""
        delay_seconds = self._patience.delay_seconds(caller, error)
        if delay_seconds > 0:
            await asyncio.sleep(delay_seconds)

    @contextmanager
    def enter(self, caller: str) -> Iterator[None]:
        """Serve one request inside, or raise `Overloaded`."""
        if self.serving >= self._limits.concurrent_requests:
            self.refused += 1
            raise Overloaded(f"the node serves {self.serving} requests at once", limit="concurrent_requests")
        if self._by_caller[caller] >= self._limits.concurrent_per_identity:
            self.refused += 1
            raise Overloaded(
                f"{caller} has {self._by_caller[caller]} requests under way", limit="concurrent_per_identity"
            )
        self.serving += 1
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self.serving -= 1
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


class ByteBudget:
    """Room for bytes that were received and are not yet dealt with; who finds none waits, first come first served."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold room for some bytes inside."""
        held = await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(held)

    async def acquire(self, size_bytes: int) -> int:
        """Take room and give how much was taken: more than all there is counts as all there is."""
        size = min(size_bytes, self._capacity)
        if not self._waiting and self.used + size <= self._capacity:
            self.used += size
            return size
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size)
            else:
                self._waiting = deque(each for each in self._waiting if each[1] is not future)
            raise
        return size

    def release(self, size_bytes: int) -> None:
        """Give room back."""
        self.used -= size_bytes
        while self._waiting:
            size, future = self._waiting[0]
            if self.used + size > self._capacity:
                return
            self._waiting.popleft()
            if not future.done():
                self.used += size
                future.set_result(None)
