"""Store and forward buffers in PostgreSQL: the ports in front, one writer behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bsfg.batch import EntryBatch, FactBatch
from bsfg.digest import LogHistory
from bsfg.errors import BsfgError, BufferFull, InvalidArgument, OffsetOutOfRange, StorageClosed
from bsfg.fact import Entry, Key
from bsfg.gaps import RELAYED_RANGES_MAX, check_gaps, listed
from bsfg.ports import (
    QUARANTINE_PAGE,
    Buffer,
    BufferStats,
    Frame,
    Gap,
    GapRecord,
    GapSet,
    OriginSpan,
    Quarantined,
    Receipt,
)
from bsfg.retention import Age, ConsumerStanding, Removal, ordered_before, removable_before
from bsfg.stores.postgres.database import Connection, Database
from bsfg.stores.postgres.frames import PAGE_FRAMES, absent
from bsfg.stores.postgres.writer import PostgresWriter
from bsfg.stores.shared.committer import Committer, Waiters, Workers, settle
from bsfg.stores.shared.judging import AppendItem

MAX_GROUP_BYTES = 8 << 20
MAX_GROUP_FACTS = 65_536
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class BufferStep:
    """Something other than an append that the writer does in its turn."""

    run: Callable[[], Any]


class PostgresBuffer:
    """One buffer behind the ports; `PostgresStoreBuffer` and `PostgresForwardBuffer` add what differs."""

    def __init__(
        self,
        database: Database,
        writer: PostgresWriter,
        required_frontier: Callable[[], int | None],
        workers: Workers,
    ) -> None:
        self._database, self._writer, self._required_frontier = database, writer, required_frontier
        self.stream, self.buffer, self.log_id = writer.stream, writer.kind, writer.log_id.hex()
        self._waiters = Waiters()
        self._closed = False
        self._oldest: tuple[int, int | None] | None = None
        self._committer: Committer[AppendItem | BufferStep, Any] = Committer(
            workers,
            self._process,
            weight=_weight,
            max_weight=MAX_GROUP_BYTES,
            others=lambda: self._waiters.ready(writer.head.end),
        )

    # Positions.

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""
        return self._writer.head.start

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""
        return self._writer.head.end

    @property
    def problems(self) -> list[str]:
        """What was found wrong with the tables."""
        return list(self._writer.problems)

    async def offset_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""
        reader, start, end = self._writer.reader, self.start, self.end
        return await self._look(lambda connection: max(start, reader.first_at_time(connection, unix_ms, start, end)))

    async def key_at(self, offset: int) -> Key | None:
        """Give the key of the entry at an offset, or None when it is not retained."""
        if offset < self.start:
            return None
        entry = await self._look(lambda connection: self._writer.reader.entry_at(connection, offset))
        return entry.key if entry is not None else None

    async def get(self, key: Key) -> Entry | None:
        """Give the entry of a key."""
        self._check_open()
        hashed, start = self._writer.hash_of(*key), self.start
        return await self._look(lambda connection: self._writer.reader.entry_of(connection, hashed, key, start))

    async def _look(self, look: Callable[[Connection], Found]) -> Found:
        """Read in another thread; damage that was come across is recorded."""
        doing = f"reading {self.stream}/{self.buffer}"
        found = await asyncio.to_thread(self._database.run, doing, lambda connection, again: look(connection))
        if self._writer.has_seen:
            await self._submit(BufferStep(self._writer.record_seen))
        return found

    # Writing.

    def _submit(self, item: AppendItem | BufferStep) -> asyncio.Future[Any]:
        self._check_open()
        return self._committer.submit(item)

    def _append(self, batch: FactBatch, origin: OriginSpan | None = None) -> asyncio.Future[Receipt]:
        if not batch.sealed:
            raise InvalidArgument("a buffer takes sealed batches only; see bsfg.sealing.seal")
        return self._submit(AppendItem(batch.facts if isinstance(batch, EntryBatch) else batch, origin))

    def _process(self, items: Sequence[AppendItem | BufferStep]) -> list[Any]:
        outcomes: list[Any] = []
        group: list[AppendItem] = []
        for item in items:
            if isinstance(item, AppendItem):
                group.append(item)
                continue
            outcomes += self._append_all(group)
            group = []
            outcomes.append(_attempt(item.run))
        return outcomes + self._append_all(group)

    def _append_all(self, group: list[AppendItem]) -> list[Any]:
        if not group:
            return []
        outcome = _attempt(lambda: self._writer.append_group(group, self._standing))
        if isinstance(outcome, BufferFull) and len(group) > 1:
            # Together they do not fit; alone some of them may.
            return [self._append_all([item])[0] for item in group]
        return list(outcome) if isinstance(outcome, list) else [outcome] * len(group)

    def _standing(self) -> ConsumerStanding:
        of = ConsumerStanding.of_store if self.buffer == Buffer.STORE else ConsumerStanding.of_forward
        return of(self._required_frontier())

    # Reading.

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``; see `bsfg.ports.Replayable`."""
        self._check_open()
        if start < 0 or max_facts < 1 or (end is not None and end < start):
            raise InvalidArgument(f"cannot replay from {start} to {end} in steps of {max_facts}")
        if start > self.end:
            raise OffsetOutOfRange(f"offset {start} is beyond the end {self.end}", end=self.end)
        stop, at = self.end if end is None else min(end, self.end), start
        while at < stop:
            for frame in await self._page(at, stop, max_facts):
                self._check_open()
                yield frame
                at = frame.last + 1

    async def _page(self, at: int, stop: int, max_facts: int) -> list[Frame]:
        """Give the next steps of a replay: what left, or what one look into the table shows."""
        reader, start = self._writer.reader, self.start
        if at < start:
            return list(absent(at, min(start, stop), self._writer.book.own(), 0))
        most = min(PAGE_FRAMES, max_facts, stop - at)

        def look(connection: Connection) -> list[Frame]:
            frames = reader.page(connection, at, stop, most)
            if not frames and self.start > at:
                return []  # it left while we looked
            return list(reader.steps(frames, at, stop, max_facts))

        return await self._look(look)

    async def wait_for(self, offset: int, timeout_seconds: float) -> bool:
        """Wait until the entry at ``offset`` is durable."""
        self._check_open()
        if self.end > offset:
            return True
        future = self._waiters.add(offset)
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

        def turn() -> bool:
            removal = ordered_before(
                offset, writer.policy, self._standing(), start=writer.head.start, end=writer.head.end
            )
            return writer.depart(removal)

        while await self._submit(BufferStep(turn)):
            pass

    async def enforce_retention(self, *, link_open: bool, keys_as_of_unix_ms: int | None = None) -> None:
        """Remove what age allows and record what expired unconfirmed."""
        while await self._submit(BufferStep(lambda: self._age_out(link_open))):
            pass
        while await self._submit(BufferStep(lambda: self._forget_keys(keys_as_of_unix_ms))):
            pass

    def _age_out(self, link_open: bool) -> bool:
        """Let go of the oldest frames what age allows; tell whether younger ones are to be judged."""
        writer, steady = self._writer, self._writer.steady
        trusted, now = steady.trusted, steady.now_unix_ms()
        pieces = writer.oldest()
        age = Age(now, link_open=link_open, clock_trusted=trusted)
        removal: Removal = removable_before(pieces, writer.policy, self._standing(), age)
        more = writer.depart(removal)
        return more or bool(pieces and removal.before > pieces[-1].last and removal.before < writer.head.end)

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
        return listed(self._writer.book.sets())

    async def gap_sets(self) -> list[GapSet]:
        """Give all gap records as sets."""
        self._check_open()
        return self._writer.book.sets()

    async def gaps_told(self, after: str = "", max_ranges: int = RELAYED_RANGES_MAX) -> tuple[list[GapSet], str]:
        """Give what other zones told after a token."""
        self._check_open()
        return self._writer.book.told_since(after, max_ranges)

    async def record_gap(self, gap: GapRecord) -> None:
        """Make a gap record durable."""
        await self.record_gaps([gap])

    async def record_gaps(self, gaps: Sequence[Gap]) -> None:
        """Make gap records durable in one transaction."""
        self._check_open()
        check_gaps(gaps, self.end)
        if gaps:
            await self._submit(BufferStep(lambda: self._writer.add_gaps(list(gaps))))

    async def quarantine(
        self, after: int | None = None, limit: int = QUARANTINE_PAGE, *, newest_first: bool = False
    ) -> list[Quarantined]:
        """List what was refused for good."""
        self._check_open()
        return await asyncio.to_thread(self._writer.quarantine.page, after, limit, newest_first)

    async def quarantined(self, id: int) -> Quarantined | None:
        """Give one refused fact."""
        self._check_open()
        return await asyncio.to_thread(self._writer.quarantine.get, id)

    async def set_aside(
        self, facts: FactBatch, reason: str, detail: str = "", origin: OriginSpan | None = None
    ) -> None:
        """Quarantine facts that were never put."""
        if not facts.sealed:
            raise InvalidArgument("a buffer takes sealed batches only; see bsfg.sealing.seal")
        plain, now = facts.facts if isinstance(facts, EntryBatch) else facts, self._writer.clock.now_unix_ms()
        keys = map(Key, plain.values("from_zone"), plain.values("message_id"))
        items = [
            Quarantined(0, now, reason, key, -1, plain.slice(row, 1), detail, origin.at(row) if origin else None)
            for row, key in enumerate(keys)
        ]
        await self._submit(BufferStep(lambda: self._writer.quarantine.add(items)))

    async def release_quarantined(self, id: int, reason: str) -> None:
        """Drop one quarantined fact by an operator's decision."""
        await self._submit(BufferStep(lambda: self._writer.quarantine.release(id, reason)))

    async def stats(self) -> BufferStats:
        """Describe the buffer at this moment."""
        self._check_open()
        writer, head = self._writer, self._writer.head
        percent, fill = writer.policy.fill(head.used_bytes)
        oldest = await self._oldest_unix_ms(head.start) if head.end > head.start else None
        return BufferStats(
            stream=self.stream,
            buffer=self.buffer,
            log_id=self.log_id,
            start=head.start,
            end=head.end,
            used_bytes=head.used_bytes,
            capacity_bytes=writer.policy.capacity_bytes,
            fill_percent=percent,
            fill=fill,
            oldest_unix_ms=oldest,
            newest_unix_ms=head.newest_unix_ms or None,
            segments=1,
            keys=head.keys,
            index_bytes=0,
            gaps=len(writer.book),
            quarantined=len(writer.quarantine),
            chain_head=head.chain,
            quarantine_bytes=writer.quarantine.used_bytes,
            quarantine_capacity_bytes=writer.policy.quarantine_bytes,
            quarantine_full=writer.quarantine.full,
        )

    async def _oldest_unix_ms(self, start: int) -> int | None:
        """Give the time of the first entry, which is read once for every start of the buffer."""
        if self._oldest is None or self._oldest[0] != start:
            asked = (
                "SELECT appended_at_unix_ms FROM frame WHERE buffer_id = %s AND base <= %s ORDER BY base DESC LIMIT 1"
            )
            rows = await asyncio.to_thread(self._writer.rows, asked, (self._writer.id, start))
            self._oldest = start, rows[0][0] if rows else None
        return self._oldest[1]

    async def history(self, heads: Sequence[bytes] = ()) -> LogHistory:
        """Give what was kept of what was removed, and where the buffer had some chain heads."""
        self._check_open()
        writer, asked = (
            self._writer,
            "SELECT chain_before, base FROM frame WHERE buffer_id = %s AND chain_before = ANY(%s)",
        )
        kept = await asyncio.to_thread(writer.kept_ranges)
        known = {each.chain_before: each.first for each in kept} | {each.chain_after: each.last + 1 for each in kept}
        known[writer.head.chain] = writer.head.end
        if heads:
            known |= dict(await asyncio.to_thread(writer.rows, asked, (writer.id, list(heads))))
        return LogHistory(tuple(kept), {head: known.get(head) for head in heads})

    async def close(self) -> None:
        """Finish what is queued."""
        if self._closed:
            return
        self._closed = True
        await self._committer.close()
        self._waiters.close(StorageClosed(f"{self.stream}/{self.buffer} is closed"))

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.stream}/{self.buffer} is closed")


class PostgresStoreBuffer(PostgresBuffer):
    """What this zone produced."""

    def append(self, batch: FactBatch) -> asyncio.Future[Receipt]:
        """Store a sealed batch and answer when it is durable; it is queued at once, also if nobody waits."""
        return self._append(batch)

    async def frontier(self) -> int:
        """Give the lowest frontier of the required consumers, -1 when there is none."""
        self._check_open()
        return self._standing().committed


class PostgresForwardBuffer(PostgresBuffer):
    """The idempotent copy of what other zones sent."""

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Insert each fact whose key is not there yet."""
        origin.check(len(batch))
        return await self._append(batch, origin)

    async def kept_latest(self) -> EntryBatch:
        """Give the newest entries that were kept when they left."""
        self._check_open()
        return await asyncio.to_thread(self._writer.kept_latest)

    async def query_by_time_range(self, start_unix_ms: int, end_unix_ms: int) -> AsyncIterator[Frame]:
        """Give the entries that became durable in a span of time."""
        self._check_open()
        if end_unix_ms < start_unix_ms:
            raise InvalidArgument("the end of a time range lies before its start")
        first = await self.offset_at_time(start_unix_ms)
        last = await self.offset_at_time(end_unix_ms)
        async for frame in self.replay(first, end=max(first, last)):
            yield frame


def _weight(item: AppendItem | BufferStep) -> int:
    """Count an item in bytes, a fact for no fewer than its part of the largest number in one group."""
    if isinstance(item, BufferStep):
        return 1
    return max(len(item.batch) * MAX_GROUP_BYTES // MAX_GROUP_FACTS, item.batch.weight_bytes)


def _attempt(run: Callable[[], Any]) -> Any:
    """Run a step of the writer and give its result or its error."""
    try:
        return run()
    except BsfgError as error:
        return error
