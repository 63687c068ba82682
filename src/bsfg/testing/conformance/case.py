"""What every contract stands on: how a storage under test is made and reopened, and how a test runs on it."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from bsfg.batch import FactBatch
from bsfg.digest import Hasher
from bsfg.fact import Entry, Message
from bsfg.ports import (
    Buffer,
    BufferStats,
    Checkpoint,
    Clock,
    Confirmation,
    ConsumerSpec,
    ForwardBuffer,
    Frame,
    GapRecord,
    OriginSpan,
    Receipt,
    Storage,
    StoreBuffer,
)
from bsfg.retention import Policy
from bsfg.testing.clock import START_UNIX_MS, FakeClock
from bsfg.testing.facts import SHA256, sealed

STREAM = "operational"
READER = "reader"
SENDER = "field"


class StorageCase(ABC):
    """The base of all contracts. A backend's tests supply `make` and `reopen`.

    ``kind`` is the buffer that the tests shared by both buffers write to.
    """

    kind: ClassVar[Buffer] = Buffer.STORE

    @abstractmethod
    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        """Make a new, empty storage; ``tmp_path`` is a folder of its own."""

    @abstractmethod
    async def reopen(self, storage: Storage) -> Storage:
        """Give a storage over what the old one kept, as after a stop or a crash.

        The clock and the hasher stay the same. The old storage may be open, closed, or have closed itself.
        """


class BufferUnderTest:
    """A buffer under test with one way to write to it, whichever of the two it is."""

    def __init__(self, storage: Storage, buffer: StoreBuffer | ForwardBuffer) -> None:
        self.storage = storage
        self.buffer = buffer

    @property
    def store(self) -> StoreBuffer:
        """The buffer as a store buffer."""
        assert self.buffer.buffer == Buffer.STORE
        return cast(StoreBuffer, self.buffer)

    @property
    def forward(self) -> ForwardBuffer:
        """The buffer as a forward buffer."""
        assert self.buffer.buffer == Buffer.FORWARD
        return cast(ForwardBuffer, self.buffer)

    async def write(self, batch: FactBatch, *, origin_first: int = 0) -> Receipt:
        """Append to a store buffer, put into a forward buffer."""
        if self.buffer.buffer == Buffer.STORE:
            return await self.store.append(batch)
        return await self.forward.put_if_absent(batch, origin(len(batch), first=origin_first))

    async def write_messages(self, facts: Sequence[Message], *, hasher: Hasher = SHA256) -> Receipt:
        """Seal and write messages."""
        return await self.write(sealed(facts, hasher=hasher))

    async def frames(self, start: int = 0, *, end: int | None = None, max_facts: int = 10_000) -> list[Frame]:
        """Replay a range, checking that its frames have no hole and no overlap."""
        before = (await self.stats()).end
        frames = [frame async for frame in self.buffer.replay(start, end=end, max_facts=max_facts)]
        after = (await self.stats()).end
        stop = check_cover(frames, start)
        assert (before <= stop <= after) if end is None else stop == max(start, min(end, after))
        return frames

    async def entries(self, start: int = 0) -> list[Entry]:
        """Give the retained entries from an offset on."""
        return entries_of(await self.frames(start))

    async def messages(self) -> list[Message]:
        """Give what the retained entries say."""
        return [entry.message for entry in await self.entries()]

    async def stats(self) -> BufferStats:
        """Describe the buffer."""
        return await self.buffer.stats()

    async def gaps(self) -> list[GapRecord]:
        """List the gap records."""
        return await self.buffer.gaps()

    async def create_reader(self, name: str = READER, *, required: bool = True) -> None:
        """Create a consumer of this buffer that begins at the earliest entry."""
        spec = ConsumerSpec(name, self.buffer.stream, self.buffer.buffer, required=required)
        await self.storage.cursors.create(spec)

    async def confirm(self, through: int | None = None, *, name: str = READER) -> Checkpoint:
        """Confirm up to an offset, by default everything."""
        if through is None:
            through = (await self.stats()).end - 1
        return await self.storage.cursors.commit(name, Confirmation(through=through))


class Rig:
    """One storage under test with a clock that the test moves."""

    def __init__(self, case: StorageCase, tmp_path: Path) -> None:
        self.case = case
        self.clock = FakeClock()
        self._tmp_path = tmp_path
        self._storage: Storage | None = None
        self._made = 0

    @property
    def storage(self) -> Storage:
        """The storage that was opened last."""
        assert self._storage is not None, "open a storage first"
        return self._storage

    async def open(self, *, hasher: Hasher = SHA256) -> Storage:
        """Make a new storage in a folder of its own."""
        await self.close()
        folder = self._tmp_path / f"storage-{self._made}"
        folder.mkdir()
        self._made += 1
        self._storage = await self.case.make(folder, clock=self.clock, hasher=hasher)
        return self._storage

    async def reopen(self) -> Storage:
        """Open what the storage kept, as after a stop or a crash."""
        self._storage = await self.case.reopen(self.storage)
        return self._storage

    async def close(self) -> None:
        """Close the storage, if there is one."""
        if self._storage is not None:
            await self._storage.close()

    async def lane(
        self, policy: Policy | None = None, *, kind: Buffer | None = None, stream: str = STREAM
    ) -> BufferUnderTest:
        """Open the buffer under test, in a new storage when there is none yet."""
        storage = self._storage or await self.open()
        if (kind or self.case.kind) == Buffer.STORE:
            return BufferUnderTest(storage, await storage.store(stream, policy))
        return BufferUnderTest(storage, await storage.forward(stream, policy))

    async def reopened(self, policy: Policy | None = None) -> BufferUnderTest:
        """Reopen the storage and give the buffer under test again."""
        await self.reopen()
        return await self.lane(policy)

    async def across_restart(self, policy: Policy | None = None) -> AsyncIterator[BufferUnderTest]:
        """Give the buffer under test as it is, and then once more after a restart."""
        yield await self.lane(policy)
        yield await self.reopened(policy)


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a pytest method of a coroutine that gets a `Rig` as ``rig``, its opened buffer as ``lane``, or both.

    Further arguments are parameters of the test.
    """
    return running(test, Rig, "lane", Rig.lane)


def running(
    test: Callable[..., Coroutine[Any, Any, None]],
    rig_of: Callable[..., Any],
    opened: str,
    open_: Callable[..., Coroutine[Any, Any, object]],
) -> Callable[..., None]:
    """Make a pytest method of a coroutine that gets a rig as ``rig``, what is opened on it by that name, or both."""
    wanted = inspect.signature(test).parameters

    def run(case: object, tmp_path: Path, **given: Any) -> None:
        async def whole() -> None:
            rig = rig_of(case, tmp_path)
            try:
                if opened in wanted:
                    given[opened] = await open_(rig)
                if "rig" in wanted:
                    given["rig"] = rig
                await test(case, **given)
            finally:
                await rig.close()

        asyncio.run(whole())

    # Pytest reads names of fixtures and parameters from the signature; `functools.wraps` would show it the rig's.
    itself, *others = (each for name, each in wanted.items() if name not in ("rig", opened))
    fixture = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([itself, fixture, *others])  # type: ignore[attr-defined]
    run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
    run.__module__ = test.__module__
    return run


def origin(count: int, *, first: int = 0, zone: str = SENDER) -> OriginSpan:
    """Say where the rows of a put come from: consecutive offsets, one a second, each a minute old."""
    offsets = np.arange(first, first + count, dtype=np.int64)
    ages_ms = np.full(count, 60_000, dtype=np.int64)
    return OriginSpan(zone, offsets, START_UNIX_MS - 60_000 + offsets * 1000, ages_ms)


def check_cover(frames: Sequence[Frame], start: int) -> int:
    """Fail unless frames follow each other from ``start`` on without hole or overlap; give where they end."""
    at = start
    for frame in frames:
        assert frame.first == at, f"a frame begins at {frame.first}, the one before ended at {at - 1}"
        assert frame.last >= frame.first
        assert (frame.entries is None) != (frame.gap is None), "a frame has either entries or a gap record"
        if frame.entries is not None:
            assert frame.entries.offsets.tolist() == list(range(frame.first, frame.last + 1))
        elif frame.gap is not None:
            assert frame.gap.first <= frame.first <= frame.last <= frame.gap.last
        at = frame.last + 1
    return at


def entries_of(frames: Sequence[Frame]) -> list[Entry]:
    """Give the entries of frames as Python objects."""
    return [entry for frame in frames if frame.entries is not None for entry in frame.entries.to_entries()]


async def drain(frames: AsyncIterator[Frame]) -> list[Frame]:
    """Read a replay to its end."""
    return [frame async for frame in frames]
