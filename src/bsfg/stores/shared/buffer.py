"""What every buffer does in front of its writer: queue, wait, check, remove in turns, and tell of itself."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bsfg.batch import EntryBatch, FactBatch
from bsfg.clock import JumpGuardedClock
from bsfg.digest import LogHistory
from bsfg.errors import BsfgError, BufferFull, InvalidArgument, OffsetOutOfRange, StorageClosed
from bsfg.fact import Entry, Key
from bsfg.gapbook import GapBook
from bsfg.gaps import RELAYED_RANGES_MAX, check_gaps, listed
from bsfg.offload import by_size
from bsfg.ports import (
    QUARANTINE_PAGE,
    Buffer,
    BufferStats,
    Clock,
    Frame,
    Gap,
    GapRecord,
    GapSet,
    OriginSpan,
    Quarantined,
    Receipt,
)
from bsfg.retention import Age, ConsumerStanding, Piece, Policy, Removal, ordered_before, removable_before
from bsfg.stores.shared.committer import Committer, Waiters, Workers, settle
from bsfg.stores.shared.judging import AppendItem

MAX_GROUP_BYTES = 8 << 20
MAX_GROUP_FACTS = 65_536
_RANGE_BYTES = 24


class RefusedFacts(Protocol):
    """The quarantine of a buffer, as it is listed and counted."""

    full: bool

    @property
    def used_bytes(self) -> int:
        """How large the facts in it are."""

    def __len__(self) -> int: ...

    def page(self, after: int | None, limit: int, newest_first: bool = False) -> list[Quarantined]:
        """Read the facts that follow an id, in the order in which they came or the other way round."""

    def get(self, id: int, /) -> Quarantined | None:
        """Read one fact; None when it is not there."""


class BufferWriter(Protocol):
    """What writes one buffer; one thread at a time takes its steps, any may read what it knows."""

    stream: str
    buffer: Buffer
    log_id: bytes
    policy: Policy
    clock: Clock
    steady: JumpGuardedClock
    problems: list[str]

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""

    @property
    def used_bytes(self) -> int:
        """How large the entries are."""

    @property
    def newest_unix_ms(self) -> int:
        """The time of the last entry, 0 when there was none."""

    @property
    def chain(self) -> bytes:
        """The digest of the last frame."""

    @property
    def book(self) -> GapBook:
        """The gap records."""

    @property
    def quarantine(self) -> RefusedFacts:
        """The refused facts."""

    def counts(self) -> tuple[int, int, int]:
        """Give how many segments and keys there are, and how large the index of keys is."""

    def first_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""

    def time_at(self, offset: int) -> int | None:
        """Give the time of the entry at an offset."""

    def entry_at(self, offset: int) -> Entry | None:
        """Read one entry while it is retained."""

    def find(self, key: Key) -> Entry | None:
        """Read the entry of a key while it is retained."""

    def kept_latest(self) -> EntryBatch:
        """Read the newest entries of what has left."""

    def history(self, heads: Sequence[bytes]) -> LogHistory:
        """Give what was kept of what was removed, and where the buffer had some chain heads."""

    def append_group(self, items: Sequence[AppendItem], standing: Callable[[], ConsumerStanding]) -> list[Receipt]:
        """Store the batches of several callers together; ``standing`` is asked if room is short."""

    def oldest(self, now_unix_ms: int) -> list[Piece]:
        """List what may leave by age, oldest first; more is judged when all of it has left."""

    def forget_keys(self, as_of_unix_ms: int) -> bool:
        """Forget some keys that were beyond their horizon at a time; tell whether there may be more."""

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps durably; those already known are left out."""

    def set_aside(self, items: Sequence[Quarantined]) -> None:
        """Keep refused facts durably, those already there left out."""

    def release(self, id: int, reason: str) -> None:
        """Drop a refused fact, leaving a durable note of it."""


Writer = TypeVar("Writer", bound=BufferWriter)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class WriterStep:
    """Something other than an append that the writer does in its turn."""

    run: Callable[[], Any]


class SharedBuffer(ABC, Generic[Writer]):
    """One buffer behind the ports; a backend says how it reads, replays and removes."""

    def __init__(
        self,
        writer: Writer,
        required_frontier: Callable[[], int | None],
        workers: Workers,
        *,
        max_group_bytes: int = MAX_GROUP_BYTES,
        max_group_facts: int = MAX_GROUP_FACTS,
    ) -> None:
        self._writer, self._required_frontier = writer, required_frontier
        self.stream, self.buffer, self.log_id = writer.stream, writer.buffer, writer.log_id.hex()
        self._waiters = Waiters()
        self._closed = False
        self._oldest: tuple[int, int | None] | None = None

        def weight(item: AppendItem | WriterStep) -> int:
            """Count an item in bytes, a fact for no fewer than its part of the largest number in one group."""
            if isinstance(item, WriterStep):
                return 1
            return max(len(item.batch) * max_group_bytes // max_group_facts, item.batch.weight_bytes)

        self._committer: Committer[AppendItem | WriterStep, Any] = Committer(
            workers,
            self._process,
            weight=weight,
            max_weight=max_group_bytes,
            others=lambda: self._waiters.ready(writer.end),
        )

    # What a backend says.

    @abstractmethod
    async def _look(self, look: Callable[[], Found]) -> Found:
        """Read where the event loop need not wait for it; damage that was come across is recorded."""

    @abstractmethod
    def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``; see `bsfg.ports.Replayable`."""

    @abstractmethod
    async def _remove(self, decide: Callable[[], Removal]) -> None:
        """Let go what a decision allows, in turns; it is asked in each, because consumers come and go between them."""

    def _step(self, run: Callable[[], Any]) -> Any:
        """Run a step of the writer and give its result or its error."""
        try:
            return run()
        except BsfgError as error:
            return error

    def _append_group(self, group: Sequence[AppendItem]) -> Any:
        """Append a group as one step."""
        return self._step(lambda: self._writer.append_group(group, self._standing))

    async def _end(self) -> None:
        """Release what the writer holds, when nothing is queued any more."""

    @property
    def writer(self) -> Writer:
        """What writes it, for whoever carries its history elsewhere while nobody writes."""
        return self._writer

    # Positions.

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""
        return self._writer.start

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""
        return self._writer.end

    @property
    def problems(self) -> list[str]:
        """What was found wrong with what is stored."""
        return list(self._writer.problems)

    async def offset_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""
        return await self._look(lambda: self._writer.first_at_time(unix_ms))

    async def key_at(self, offset: int) -> Key | None:
        """Give the key of the entry at an offset, or None when it is not retained."""
        entry = await self._look(lambda: self._writer.entry_at(offset))
        return entry.key if entry is not None else None

    async def get(self, key: Key) -> Entry | None:
        """Give the entry of a key."""
        self._check_open()
        return await self._look(lambda: self._writer.find(key))

    # Writing.

    def _submit(self, item: AppendItem | WriterStep) -> asyncio.Future[Any]:
        if self._closed:
            raise StorageClosed(f"{self.stream}/{self.buffer} is closed")
        return self._committer.submit(item)

    def _append(self, batch: FactBatch, origin: OriginSpan | None = None) -> asyncio.Future[Receipt]:
        return self._submit(AppendItem(_plain(batch), origin))

    def _process(self, items: Sequence[AppendItem | WriterStep]) -> list[Any]:
        outcomes: list[Any] = []
        group: list[AppendItem] = []
        for item in items:
            if isinstance(item, AppendItem):
                group.append(item)
                continue
            outcomes += self._append_all(group)
            group = []
            outcomes.append(self._step(item.run))
        return outcomes + self._append_all(group)

    def _append_all(self, group: list[AppendItem]) -> list[Any]:
        if not group:
            return []
        outcome = self._append_group(group)
        if isinstance(outcome, BufferFull) and len(group) > 1:
            # Together they do not fit; alone some of them may.
            return [self._append_all([item])[0] for item in group]
        return list(outcome) if isinstance(outcome, list) else [outcome] * len(group)

    def _standing(self) -> ConsumerStanding:
        of = ConsumerStanding.of_store if self.buffer == Buffer.STORE else ConsumerStanding.of_forward
        return of(self._required_frontier())

    # Reading.

    def _stop_of(self, start: int, end: int | None, max_facts: int, there: int) -> int:
        """Give where a replay ends that begins in a buffer of this end, or say why there can be none."""
        self._check_open()
        if start < 0 or max_facts < 1 or (end is not None and end < start):
            raise InvalidArgument(f"cannot replay from {start} to {end} in steps of {max_facts}")
        if start > there:
            raise OffsetOutOfRange(f"offset {start} is beyond the end {there}", end=there)
        return there if end is None else min(end, there)

    async def wait_for(self, offset: int, timeout_seconds: float) -> bool:
        """Wait until the entry at ``offset`` is durable."""
        self._check_open()
        if self.end > offset:
            return True
        future = self._waiters.add(offset)
        # The future itself becomes false in time: one timer, where waiting with a timeout takes a task's detour.
        timer = asyncio.get_running_loop().call_later(timeout_seconds, settle, future, False)
        try:
            # What became durable between the two looks has woken nobody.
            if self.end <= offset and not await future:
                self._check_open()
                return False
            return True
        finally:
            timer.cancel()
            self._waiters.drop(future)

    # Leaving.

    async def truncate_before(self, offset: int) -> None:
        """Remove every entry below ``offset`` once the required consumers have confirmed them."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative")
        writer = self._writer
        await self._remove(
            lambda: ordered_before(offset, writer.policy, self._standing(), start=writer.start, end=writer.end)
        )

    async def enforce_retention(self, *, link_open: bool, keys_as_of_unix_ms: int | None = None) -> None:
        """Remove what age allows and record what expired unconfirmed."""
        await self._remove(lambda: self._aged(link_open))
        while await self._submit(WriterStep(lambda: self._forget_keys(keys_as_of_unix_ms))):
            pass

    def _aged(self, link_open: bool) -> Removal:
        # One judge of the clock for the times of entries and for their age: two could differ about the same jump.
        writer, steady = self._writer, self._writer.steady
        trusted, now = steady.trusted, steady.now_unix_ms()
        age = Age(now, link_open=link_open, clock_trusted=trusted)
        return removable_before(writer.oldest(now), writer.policy, self._standing(), age)

    def _forget_keys(self, as_of_unix_ms: int | None) -> bool:
        steady = self._writer.steady
        if not steady.trusted:
            return False
        now = steady.now_unix_ms()
        return self._writer.forget_keys(now if as_of_unix_ms is None else min(now, as_of_unix_ms))

    # Records.

    async def gaps(self) -> list[GapRecord]:
        """List all gap records."""
        self._check_open()
        return listed(await self.gap_sets())

    async def gap_sets(self) -> list[GapSet]:
        """Give all gap records as sets."""
        self._check_open()
        book = self._writer.book
        return await by_size(_RANGE_BYTES * len(book), book.sets)

    async def gaps_told(self, after: str = "", max_ranges: int = RELAYED_RANGES_MAX) -> tuple[list[GapSet], str]:
        """Give what other zones told after a token."""
        self._check_open()
        return self._writer.book.told_since(after, max_ranges)

    async def record_gaps(self, gaps: Sequence[Gap]) -> None:
        """Make gap records durable together."""
        self._check_open()
        check_gaps(gaps, self.end)
        if gaps:
            await self._submit(WriterStep(lambda: self._writer.add_gaps(list(gaps))))

    async def quarantine(
        self, after: int | None = None, limit: int = QUARANTINE_PAGE, *, newest_first: bool = False
    ) -> list[Quarantined]:
        """List what was refused for good."""
        self._check_open()
        return await self._look(lambda: self._writer.quarantine.page(after, limit, newest_first))

    async def quarantined(self, id: int) -> Quarantined | None:
        """Give one refused fact."""
        self._check_open()
        return await self._look(lambda: self._writer.quarantine.get(id))

    async def set_aside(
        self, facts: FactBatch, reason: str, detail: str = "", origin: OriginSpan | None = None
    ) -> None:
        """Quarantine facts that were never put."""
        plain, now = _plain(facts), self._writer.clock.now_unix_ms()
        keys = map(Key, plain.values("from_zone"), plain.values("message_id"))
        items = [
            Quarantined(0, now, reason, key, -1, plain.slice(row, 1), detail, origin.at(row) if origin else None)
            for row, key in enumerate(keys)
        ]
        await self._submit(WriterStep(lambda: self._writer.set_aside(items)))

    async def release_quarantined(self, id: int, reason: str) -> None:
        """Drop one quarantined fact by an operator's decision."""
        await self._submit(WriterStep(lambda: self._writer.release(id, reason)))

    async def stats(self) -> BufferStats:
        """Describe the buffer at this moment."""
        self._check_open()
        writer = self._writer
        start, end, used_bytes, newest_unix_ms = writer.start, writer.end, writer.used_bytes, writer.newest_unix_ms
        percent, fill = writer.policy.fill(used_bytes)
        segments, keys, index_bytes = writer.counts()
        chain, aside = writer.chain, writer.quarantine
        if end > start and (self._oldest is None or self._oldest[0] != start):
            # It is read once for every start of the buffer.
            self._oldest = start, await self._look(lambda: writer.time_at(start))
        return BufferStats(
            stream=self.stream,
            buffer=self.buffer,
            log_id=self.log_id,
            start=start,
            end=end,
            used_bytes=used_bytes,
            capacity_bytes=writer.policy.capacity_bytes,
            fill_percent=percent,
            fill=fill,
            oldest_unix_ms=self._oldest[1] if end > start and self._oldest is not None else None,
            newest_unix_ms=newest_unix_ms or None,
            segments=segments,
            keys=keys,
            index_bytes=index_bytes,
            gaps=len(writer.book),
            quarantined=len(aside),
            chain_head=chain,
            quarantine_bytes=aside.used_bytes,
            quarantine_capacity_bytes=writer.policy.quarantine_bytes,
            quarantine_full=aside.full,
            gaps_full=writer.book.full,
        )

    async def history(self, heads: Sequence[bytes] = ()) -> LogHistory:
        """Give what was kept of what was removed, and where the buffer had some chain heads."""
        self._check_open()
        return await self._look(lambda: self._writer.history(heads))

    async def close(self) -> None:
        """Finish what is queued, and release what is held."""
        if self._closed:
            return
        self._closed = True
        await self._committer.close()
        await self._end()
        self._waiters.close(StorageClosed(f"{self.stream}/{self.buffer} is closed"))

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.stream}/{self.buffer} is closed")


class SharedStoreBuffer(SharedBuffer[Writer]):
    """What this zone produced."""

    def append(self, batch: FactBatch) -> asyncio.Future[Receipt]:
        """Store a sealed batch and answer when it is durable; it is queued at once, also if nobody waits."""
        return self._append(batch)

    async def frontier(self) -> int:
        """Give the lowest frontier of the required consumers, -1 when there is none."""
        self._check_open()
        return self._standing().committed


class SharedForwardBuffer(SharedBuffer[Writer]):
    """The idempotent copy of what other zones sent."""

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Insert each fact whose key is not there yet."""
        origin.check(len(batch))
        return await self._append(batch, origin)

    async def kept_latest(self) -> EntryBatch:
        """Give the newest entries that were kept when they left."""
        self._check_open()
        return await self._look(self._writer.kept_latest)

    async def query_by_time_range(self, start_unix_ms: int, end_unix_ms: int) -> AsyncIterator[Frame]:
        """Give the entries that became durable in a span of time."""
        self._check_open()
        if end_unix_ms < start_unix_ms:
            raise InvalidArgument("the end of a time range lies before its start")
        first = await self.offset_at_time(start_unix_ms)
        last = await self.offset_at_time(end_unix_ms)
        async for frame in self.replay(first, end=max(first, last)):
            yield frame


def _plain(batch: FactBatch) -> FactBatch:
    """Give sealed facts without the columns of entries."""
    if not batch.sealed:
        raise InvalidArgument("a buffer takes sealed batches only; see bsfg.sealing.seal")
    return batch.facts if isinstance(batch, EntryBatch) else batch
