"""A whole storage over a keeper of frames: buffers and cursors behind the ports."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import ClassVar, Self, TypeVar

from bsfg.digest import Hasher
from bsfg.errors import StorageClosed
from bsfg.ports import Buffer, Capabilities, Clock, Frame, Storage
from bsfg.retention import Policy, Removal
from bsfg.rules import check_name
from bsfg.stores.shared.buffer import SharedBuffer, SharedForwardBuffer, SharedStoreBuffer, WriterStep
from bsfg.stores.shared.committer import MakeWorkers, Workers
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, Resolve
from bsfg.stores.shared.frame import genesis
from bsfg.stores.shared.framed import FramedWriter
from bsfg.stores.shared.keeper import BufferKeeper, NewBuffer, ZoneKeeper

WORKERS_MAX = 8
"""How many buffers are written at once; a keeper may need a connection for each."""

Found = TypeVar("Found")


class FramedBuffer(SharedBuffer[FramedWriter]):
    """One buffer of frames; `FramedStoreBuffer` and `FramedForwardBuffer` add what differs."""

    reads_block = True

    async def _look(self, look: Callable[[], Found]) -> Found:
        found = await asyncio.to_thread(look) if self.reads_block else look()
        if self._writer.has_seen:
            await self._submit(WriterStep(self._writer.record_seen))
        return found

    def _step(self, run: Callable[[], object]) -> object:
        def settled() -> object:
            self._writer.settle()
            return run()

        return super()._step(settled)

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``; see `bsfg.ports.Replayable`."""
        stop, at = self._stop_of(start, end, max_facts, self.end), start
        while at < stop:
            for frame in await self._page(at, stop, max_facts):
                self._check_open()
                yield frame
                at = frame.last + 1

    async def _page(self, at: int, stop: int, max_facts: int) -> Sequence[Frame]:
        writer = self._writer
        found = await self._look(partial(writer.page, at, stop, max_facts))
        if found is not None:
            return found

        def turn() -> Sequence[Frame]:
            sure = writer.page(at, stop, max_facts, in_turn=True)
            writer.record_seen()
            return sure or ()

        steps: Sequence[Frame] = await self._submit(WriterStep(turn))
        return steps

    async def _remove(self, decide: Callable[[], Removal]) -> None:
        writer = self._writer

        def turn() -> bool:
            before = writer.start
            # What was judged is the oldest part of it: when all of that left, the next may, too.
            return writer.depart(decide()) or writer.start > before

        while await self._submit(WriterStep(turn)):
            pass


class FramedStoreBuffer(FramedBuffer, SharedStoreBuffer[FramedWriter]):
    """What this zone produced, in frames."""


class FramedForwardBuffer(FramedBuffer, SharedForwardBuffer[FramedWriter]):
    """The idempotent copy of what other zones sent, in frames."""


class FramedCursors(Cursors):
    """The cursor tracker of a zone over its keeper; concurrent commits share a write."""

    def __init__(self, keeper: ZoneKeeper, clock: Clock, resolve: Resolve, workers: MakeWorkers) -> None:
        super().__init__(clock, resolve, workers)
        self._keeper = keeper

    def open(self) -> None:
        """Read all positions and begin to accept changes."""
        self.begin(self._keeper.consumers())

    def keep(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make cursors durable together."""
        self._keeper.keep_consumers(cursors)


class FramedStorage:
    """The storage of a zone over its keeper; open it with `FramedStorage.opened`."""

    capabilities: Capabilities = Capabilities("frames", hash_chain=True)
    reads_block: ClassVar[bool] = True
    """Whether its keeper may keep a reader waiting, so that it is asked in another thread."""

    def __init__(self, keeper: ZoneKeeper, clock: Clock, hasher: Hasher, workers: MakeWorkers = Workers) -> None:
        self._keeper, self.clock, self.hasher = keeper, clock, hasher
        self.cursors = FramedCursors(keeper, clock, self._resolve, workers)
        self._buffers: dict[tuple[str, Buffer], FramedStoreBuffer | FramedForwardBuffer] = {}
        self._names: set[tuple[str, Buffer]] = set()
        self._opening = asyncio.Lock()
        self._workers = workers("bsfg-writer", WORKERS_MAX)
        self._closed = False

    async def begin(self, zone: str) -> Self:
        """Claim the zone, and read where its consumers are."""
        try:
            self._names.update(await asyncio.to_thread(self._keeper.claim, zone, self.hasher.name))
            await asyncio.to_thread(self.cursors.open)
        except BaseException:
            self._workers.close()
            self._keeper.close()
            raise
        return self

    async def store(self, stream: str, policy: Policy | None = None) -> FramedStoreBuffer:
        """Open the store buffer of a stream."""
        buffer = await self._open(stream, Buffer.STORE, policy)
        assert isinstance(buffer, FramedStoreBuffer)
        return buffer

    async def forward(self, stream: str, policy: Policy | None = None) -> FramedForwardBuffer:
        """Open the forward buffer of a stream."""
        buffer = await self._open(stream, Buffer.FORWARD, policy)
        assert isinstance(buffer, FramedForwardBuffer)
        return buffer

    async def streams(self) -> list[tuple[str, Buffer]]:
        """List the buffers that exist."""
        self._check_open()
        return sorted(self._names)

    async def close(self) -> None:
        """Finish what is under way and give the zone back."""
        if self._closed:
            return
        self._closed = True
        for buffer in self._buffers.values():
            await buffer.close()
        self._workers.close()
        await self.cursors.end()
        await asyncio.to_thread(self._keeper.close)

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer | None = None) -> BufferKeeper:
        """Give what keeps a buffer, made of ``new`` when there is none, to whoever carries its history."""
        self._check_open()
        made = new or _new_buffer()
        return await asyncio.to_thread(self._keeper.buffer, stream, buffer, made)

    async def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make the consumers of a history durable; they are known when the storage is opened again."""
        await asyncio.to_thread(self._keeper.keep_consumers, cursors)

    async def _resolve(self, stream: str, buffer: Buffer) -> FramedStoreBuffer | FramedForwardBuffer:
        return await self._open(stream, buffer, None)

    async def _open(
        self, stream: str, buffer: Buffer, policy: Policy | None
    ) -> FramedStoreBuffer | FramedForwardBuffer:
        self._check_open()
        if (known := self._buffers.get((stream, buffer))) is not None:
            return known
        check_name("stream", stream)
        chosen = (policy or Policy()).checked()
        async with self._opening:
            known = self._buffers.get((stream, buffer))
            if known is None:
                write = partial(self._written, stream, buffer, chosen)
                writer = await asyncio.to_thread(write) if self.reads_block else write()
                frontier = lambda: self.cursors.required_frontier(stream, buffer)  # noqa: E731
                kind = FramedStoreBuffer if buffer == Buffer.STORE else FramedForwardBuffer
                known = self._buffers[stream, buffer] = kind(writer, frontier, self._workers)
                known.reads_block = self.reads_block
                self._names.add((stream, buffer))
            return known

    def _written(self, stream: str, kind: Buffer, policy: Policy) -> FramedWriter:
        keeper = self._keeper.buffer(stream, kind, _new_buffer())
        return FramedWriter(keeper, stream, kind, policy, self.clock)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the storage is closed")


def _new_buffer() -> NewBuffer:
    log_id = secrets.token_bytes(16)
    return NewBuffer(log_id, secrets.token_bytes(32), genesis(log_id))


_PORT: type[Storage] = FramedStorage
