"""`MemoryStorage`: all buffers and cursors of one zone in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bsfg.clock import JumpGuardedClock, SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import HasherMismatch, OutcomeUnknown, StorageClosed
from bsfg.frontier import MAX_OPEN_RANGES
from bsfg.ports import Buffer, Capabilities, Clock, CursorTracker, Storage
from bsfg.retention import Policy
from bsfg.rules import check_name
from bsfg.stores.memory.buffers import MemoryCursors, MemoryForwardBuffer, MemoryStoreBuffer
from bsfg.stores.memory.state import BufferState, Medium

SYSTEM_CLOCK = SystemClock()
SHA256 = Sha256()

Write = Callable[[Callable[[], None]], Awaitable[None]]
"""Makes a change of the retained state durable and visible, or raises."""


class MemoryStorage:
    """All buffers and cursors of one zone in memory.

    Give the ``medium`` of another storage to open what that one kept; the other is closed by it.
    """

    capabilities = Capabilities("memory", durable=False)

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        hasher: Hasher = SHA256,
        max_ranges: int = MAX_OPEN_RANGES,
        medium: Medium | None = None,
    ) -> None:
        self.clock = clock
        self.hasher = hasher
        self.max_ranges = max_ranges
        self.medium = medium or Medium()
        if self.medium.hasher_name not in (None, hasher.name):
            raise HasherMismatch(f"written with {self.medium.hasher_name}, opened with {hasher.name}")
        self.medium.hasher_name = hasher.name
        self.steady = JumpGuardedClock.begun(clock)
        self.cursors: CursorTracker = MemoryCursors(self)
        self._stores: dict[str, MemoryStoreBuffer] = {}
        self._forwards: dict[str, MemoryForwardBuffer] = {}
        self._lock = asyncio.Lock()
        self._closed = False
        self.medium.take_over(self)

    async def store(self, stream: str, policy: Policy | None = None) -> MemoryStoreBuffer:
        """Open (or create) the store buffer of a stream."""
        checked = (policy or Policy()).checked()
        state = await self.state(stream, Buffer.STORE)
        if stream not in self._stores:
            self._stores[stream] = MemoryStoreBuffer(self, state, checked)
        return self._stores[stream]

    async def forward(self, stream: str, policy: Policy | None = None) -> MemoryForwardBuffer:
        """Open (or create) the forward buffer of a stream."""
        checked = (policy or Policy()).checked()
        state = await self.state(stream, Buffer.FORWARD)
        if stream not in self._forwards:
            self._forwards[stream] = MemoryForwardBuffer(self, state, checked)
        return self._forwards[stream]

    async def streams(self) -> list[tuple[str, Buffer]]:
        """List the buffers that exist."""
        self.check_open()
        return sorted(self.medium.buffers)

    async def close(self) -> None:
        """Finish what is under way and refuse everything from then on."""
        async with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Refuse everything from now on and wake those who wait."""
        self._closed = True
        for buffer in (*self._stores.values(), *self._forwards.values()):
            buffer.wake()

    def check_open(self) -> None:
        """Raise `StorageClosed` when the storage is closed."""
        if self._closed:
            raise StorageClosed("the storage is closed")

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Write]:
        """Be the one writer for a while; close the storage when it is no longer known what the medium holds."""
        self.check_open()
        async with self._lock:
            self.check_open()
            try:
                yield self._write
            except OutcomeUnknown:
                self.abandon()
                raise

    async def state(self, stream: str, buffer: Buffer) -> BufferState:
        """Give what is kept of a buffer, making it durably when it is new."""
        check_name("stream", stream)
        self.check_open()
        if (stream, buffer) not in self.medium.buffers:
            async with self.writing() as write:
                await write(lambda: self._create(stream, buffer))
        return self.medium.buffers[stream, buffer]

    def required_frontier(self, stream: str, buffer: Buffer) -> int | None:
        """Give the lowest ``committed`` of the required consumers of a buffer, None when there is none."""
        required = [
            record.frontier.committed
            for record in self.medium.consumers.values()
            if record.spec.required
            and record.retired_reason is None
            and (record.spec.stream, record.spec.buffer) == (stream, buffer)
        ]
        return min(required, default=None)

    def _create(self, stream: str, buffer: Buffer) -> None:
        if (stream, buffer) not in self.medium.buffers:
            self.medium.buffers[stream, buffer] = BufferState(stream, buffer, self.medium.new_log_id())

    async def _write(self, change: Callable[[], None]) -> None:
        await self.medium.write(self, change)


_PORT: type[Storage] = MemoryStorage
