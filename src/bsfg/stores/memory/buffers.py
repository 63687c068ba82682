"""Store buffer, forward buffer and the positions of consumers, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bsfg.batch import FACT_SCHEMA, ORIGIN_FIELDS, EntryBatch, FactBatch
from bsfg.errors import (
    BufferFull,
    ConsumerExists,
    ConsumerRetired,
    ForeignLog,
    InvalidArgument,
    OffsetOutOfRange,
    UnknownConsumer,
)
from bsfg.fact import Entry, Key
from bsfg.frontier import Frontier
from bsfg.gaps import RELAYED_RANGES_MAX, check_gaps, listed
from bsfg.ports import (
    QUARANTINE_PAGE,
    Buffer,
    BufferStats,
    Checkpoint,
    Confirmation,
    ConsumerSpec,
    ConsumerState,
    Frame,
    Gap,
    GapRecord,
    GapSet,
    OriginSpan,
    Quarantined,
    Receipt,
    StartAt,
)
from bsfg.retention import (
    Age,
    ConsumerStanding,
    GapReason,
    Policy,
    Removal,
    make_room,
    ordered_before,
    removable_before,
)
from bsfg.retention import Gap as RemovedRange
from bsfg.rules import ZONE, check_name
from bsfg.stores.memory.state import (
    KEY_OVERHEAD_BYTES,
    BufferState,
    ConsumerRecord,
    WritePlan,
    WrittenBlock,
    key_columns,
    not_yet_aside,
    plan,
    row_sizes_bytes,
)

if TYPE_CHECKING:
    from bsfg.stores.memory.storage import MemoryStorage


NO_OFFSET = -1


class MemoryBuffer:
    """What both buffers have in common."""

    quarantines_conflicts = False

    def __init__(self, storage: MemoryStorage, state: BufferState, policy: Policy) -> None:
        self.stream = state.stream
        self.buffer = state.buffer
        self.log_id = state.log_id
        self._storage = storage
        self._state = state
        self._policy = policy
        self._changed = asyncio.Event()

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``, removed ranges as gap records."""
        self._storage.check_open()
        if start < 0 or max_facts < 1 or (end is not None and end < start):
            raise InvalidArgument(f"cannot replay from {start} to {end} in steps of {max_facts}")
        if start > self._state.end:
            raise OffsetOutOfRange(f"offset {start} lies beyond the end {self._state.end}", end=self._state.end)
        stop = self._state.end if end is None else min(end, self._state.end)
        at = start
        while at < stop:
            self._storage.check_open()
            frame = self._state.frame(at, stop, max_facts)
            yield frame
            at = frame.last + 1

    async def get(self, key: Key) -> Entry | None:
        """Give the entry of a key, if it is retained."""
        self._storage.check_open()
        known = self._state.keys.get(key)
        block = self._state.block_at(known.offset) if known else None
        if known is None or block is None:
            return None
        return block.entries.slice(known.offset - block.first, 1).to_entries()[0]

    async def wait_for(self, offset: int, timeout_seconds: float) -> bool:
        """Wait until an offset is durable."""
        self._storage.check_open()
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative")
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._state.end <= offset:
                    await self._changed.wait()
                    self._storage.check_open()
        except TimeoutError:
            pass
        return self._state.end > offset

    def wake(self) -> None:
        """Make everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def truncate_before(self, offset: int) -> None:
        """Remove every entry below an offset, if the required consumers have confirmed them."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative")
        async with self._storage.writing() as write:
            state = self._state
            removal = ordered_before(offset, self._policy, self._standing(), start=state.start, end=state.end)
            now_unix_ms = self._storage.clock.now_unix_ms()
            if removal.before > state.start:
                await write(lambda: self._remove(removal, now_unix_ms))

    async def gaps(self) -> list[GapRecord]:
        """List all gap records."""
        self._storage.check_open()
        return listed(self._state.book.sets())

    async def gap_sets(self) -> list[GapSet]:
        """Give all gap records as sets."""
        self._storage.check_open()
        return self._state.book.sets()

    async def gaps_told(self, after: str = "", max_ranges: int = RELAYED_RANGES_MAX) -> tuple[list[GapSet], str]:
        """Give what other zones told after a token."""
        self._storage.check_open()
        return self._state.book.told_since(after, max_ranges)

    async def record_gap(self, gap: GapRecord) -> None:
        """Keep a gap record once."""
        await self.record_gaps([gap])

    async def record_gaps(self, gaps: Sequence[Gap]) -> None:
        """Keep gap records once."""
        async with self._storage.writing() as write:
            check_gaps(gaps, self._state.end)
            if self._state.book.missing(gaps):
                await write(lambda: self._state.add_gaps(gaps))

    async def quarantine(
        self, after: int | None = None, limit: int = QUARANTINE_PAGE, *, newest_first: bool = False
    ) -> list[Quarantined]:
        """List what was refused for good."""
        self._storage.check_open()
        ids = sorted(self._state.quarantined, reverse=newest_first)
        if after is not None:
            ids = [id for id in ids if (id < after if newest_first else id > after)]
        return [self._state.quarantined[id] for id in ids[:limit]]

    async def quarantined(self, id: int) -> Quarantined | None:
        """Give one refused fact."""
        self._storage.check_open()
        return self._state.quarantined.get(id)

    async def release_quarantined(self, id: int, reason: str) -> None:
        """Drop one quarantined fact and remember why."""
        async with self._storage.writing() as write:
            if id not in self._state.quarantined:
                raise InvalidArgument(f"nothing is quarantined under the id {id}")
            await write(lambda: self._state.release(id, reason))

    async def set_aside(
        self, facts: FactBatch, reason: str, detail: str = "", origin: OriginSpan | None = None
    ) -> None:
        """Quarantine facts that were never put."""
        _check_sealed(facts)
        async with self._storage.writing() as write:
            now_unix_ms = self._storage.clock.now_unix_ms()
            plain = _plain(facts)
            refused = [
                Quarantined(0, now_unix_ms, reason, Key(*key), NO_OFFSET, plain.slice(row, 1), detail, came_from)
                for row, key in enumerate(zip(*key_columns(facts), strict=True))
                for came_from in [origin.at(row) if origin else None]
            ]
            if new := not_yet_aside(self._state, refused, self._policy.quarantine_bytes):
                await write(lambda: self._state.set_aside(new))

    async def enforce_retention(self, *, link_open: bool, keys_as_of_unix_ms: int | None = None) -> None:
        """Remove what age allows, and forget keys beyond their horizon."""
        clock = self._storage.clock
        async with self._storage.writing() as write:
            now_unix_ms = clock.now_unix_ms()
            trusted = self._storage.steady.trusted
            removal = removable_before(
                self._state.pieces(),
                self._policy,
                self._standing(),
                Age(now_unix_ms, link_open=link_open, clock_trusted=trusted),
            )

            def change() -> None:
                self._remove(removal, now_unix_ms)
                if trusted:
                    as_of = now_unix_ms if keys_as_of_unix_ms is None else min(now_unix_ms, keys_as_of_unix_ms)
                    self._state.forget_keys(as_of - self._policy.key_horizon_seconds * 1000)

            await write(change)

    async def stats(self) -> BufferStats:
        """Describe the buffer at this moment."""
        self._storage.check_open()
        state = self._state
        percent, fill = self._policy.fill(state.used_bytes)
        return BufferStats(
            stream=self.stream,
            buffer=self.buffer,
            log_id=self.log_id,
            start=state.start,
            end=state.end,
            used_bytes=state.used_bytes,
            capacity_bytes=self._policy.capacity_bytes,
            fill_percent=percent,
            fill=fill,
            oldest_unix_ms=state.blocks[0].appended_at_unix_ms if state.blocks else None,
            newest_unix_ms=state.blocks[-1].appended_at_unix_ms if state.blocks else None,
            segments=len(state.blocks),
            keys=len(state.keys),
            index_bytes=len(state.keys) * KEY_OVERHEAD_BYTES,
            gaps=len(state.book),
            quarantined=len(state.quarantined),
            chain_head=state.chain_head,
            quarantine_bytes=state.quarantine_bytes,
            quarantine_capacity_bytes=self._policy.quarantine_bytes,
            quarantine_full=state.quarantine_full,
        )

    def _standing(self) -> ConsumerStanding:
        """Tell how far the required consumers are."""
        of = ConsumerStanding.of_store if self.buffer == Buffer.STORE else ConsumerStanding.of_forward
        return of(self._storage.required_frontier(self.stream, self.buffer))

    async def _write(self, facts: FactBatch, origin: OriginSpan | None = None) -> Receipt:
        _check_sealed(facts)
        facts = _plain(facts)
        async with self._storage.writing() as write:
            state = self._state
            now_unix_ms = self._storage.clock.now_unix_ms()
            appended_at_unix_ms = max(self._storage.steady.now_unix_ms(), state.newest_unix_ms)
            found = plan(state, facts, origin, now_unix_ms, quarantine_conflicts=self.quarantines_conflicts)
            found.refused = not_yet_aside(state, found.refused, self._policy.quarantine_bytes)
            block = _block(state.end, facts, found, origin, appended_at_unix_ms)
            removal = self._room_for(block)

            def change() -> None:
                self._remove(removal, now_unix_ms)
                if block is not None:
                    state.insert(block)
                state.set_aside(found.refused)

            if block is not None or found.refused:
                await write(change)
                self.wake()
            return Receipt(found.offsets, found.results, state.chain_head, appended_at_unix_ms)

    def _room_for(self, block: WrittenBlock | None) -> Removal:
        state, policy = self._state, self._policy
        incoming_bytes = sum(block.sizes_bytes) if block else 0
        if block is None or state.used_bytes + incoming_bytes <= policy.capacity_bytes:
            return Removal(state.start)
        removal = make_room(
            state.pieces(),
            policy,
            self._standing(),
            used_bytes=state.used_bytes,
            incoming_bytes=incoming_bytes,
        )
        if removal is None:
            raise BufferFull(
                f"{incoming_bytes} bytes do not fit: {state.used_bytes} of {policy.capacity_bytes} bytes are used"
            )
        return removal

    def _remove(self, removal: Removal, now_unix_ms: int) -> None:
        self._state.add_gaps(_records(removal.gaps, now_unix_ms))
        if self._policy.keep_latest and self.buffer == Buffer.FORWARD and removal.before > self._state.start:
            self._state.keep_latest(removal.before, self._policy.latest_most)
        self._state.remove_before(removal.before, now_unix_ms)


class MemoryStoreBuffer(MemoryBuffer):
    """What this zone produced, in memory."""

    async def append(self, batch: FactBatch) -> Receipt:
        """Store a sealed batch."""
        return await self._write(batch)

    async def frontier(self) -> int:
        """Give the lowest ``committed`` of the required consumers."""
        self._storage.check_open()
        return self._standing().committed


class MemoryForwardBuffer(MemoryBuffer):
    """What other zones sent, in memory."""

    quarantines_conflicts = True

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Insert each fact whose key is not there yet."""
        origin.check(len(batch))
        return await self._write(batch, origin)

    async def kept_latest(self) -> EntryBatch:
        """Give the newest entries that were kept when they left."""
        self._storage.check_open()
        return EntryBatch.empty() if self._state.latest is None else self._state.latest

    async def query_by_time_range(self, start_unix_ms: int, end_unix_ms: int) -> AsyncIterator[Frame]:
        """Give the retained entries of a time range."""
        self._storage.check_open()
        if end_unix_ms < start_unix_ms:
            raise InvalidArgument("the end of a time range lies before its start")
        first, stop = self._state.offset_at(start_unix_ms), self._state.offset_at(end_unix_ms)
        async for frame in self.replay(first, end=stop):
            if frame.entries is not None:
                yield frame


def _check_sealed(batch: FactBatch) -> None:
    if not batch.sealed:
        raise InvalidArgument("the batch is not sealed", hint="Seal it with bsfg.sealing.seal (or reseal) first.")


def _plain(batch: FactBatch) -> FactBatch:
    return batch.facts if isinstance(batch, EntryBatch) else batch


def _block(
    first: int, facts: FactBatch, found: WritePlan, origin: OriginSpan | None, at_unix_ms: int
) -> WrittenBlock | None:
    if not found.new_rows:
        return None
    rows = np.asarray(found.new_rows, dtype=np.int64)
    new = facts.take(rows)
    columns, fields = list(new.record_batch.columns), list(FACT_SCHEMA)
    if origin is not None:
        fields += ORIGIN_FIELDS
        columns.append(pa.array([origin.zone] * len(rows), type=pa.string()))
        columns.append(pa.array(np.asarray(origin.offsets)[rows], type=pa.int64()))
        columns.append(pa.array(np.asarray(origin.appended_at_unix_ms)[rows], type=pa.int64()))
        ages = pa.nulls(len(rows), pa.int64()) if origin.ages_ms is None else np.asarray(origin.ages_ms)[rows]
        columns.append(pa.array(ages, type=pa.int64()))
    stored = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
    entries = EntryBatch.of(stored, np.arange(first, first + len(rows)), at_unix_ms)
    return WrittenBlock(first, entries, found.new_bodies, row_sizes_bytes(new), at_unix_ms)


def _records(gaps: Sequence[RemovedRange], now_unix_ms: int) -> list[GapRecord]:
    return [GapRecord(gap.first, gap.last, gap.reason, now_unix_ms) for gap in gaps]


class MemoryCursors:
    """All consumers of a storage in memory; what was sent is known until the storage is closed."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage
        self._next_to_send: dict[str, int] = {}

    async def create(self, spec: ConsumerSpec) -> ConsumerState:
        """Create a consumer, or give the one that is there."""
        check_name("consumer", spec.name, ZONE)
        buffer = await self._storage.state(spec.stream, spec.buffer)
        async with self._storage.writing() as write:
            there = self._storage.medium.consumers.get(spec.name)
            if there is None:
                there = self._new(spec, buffer)
                await write(lambda: self._keep(there))
            elif there.retired_reason is not None:
                raise _retired(there)
            elif there.spec != spec:
                raise ConsumerExists(f"consumer {spec.name!r} exists with other settings", existing=str(there.spec))
            return self._describe(there)

    async def retire(self, name: str, reason: str) -> list[GapRecord]:
        """End a consumer and record what it had not confirmed."""
        async with self._storage.writing() as write:
            record = self._active(name)
            buffer = self._buffer(record)
            now_unix_ms = self._storage.clock.now_unix_ms()
            gaps = [
                GapRecord(first, last, GapReason.RETIRED, now_unix_ms, f"{name}: {reason}")
                for first, last in record.frontier.missing(buffer.end)
            ]

            def change() -> None:
                buffer.add_gaps(gaps)
                record.retired_reason = reason

            await write(change)
            return gaps

    async def commit(self, name: str, confirmation: Confirmation) -> Checkpoint:
        """Record what is confirmed, all of it or nothing."""
        async with self._storage.writing() as write:
            record = self._active(name)
            if confirmation.log_id is not None and confirmation.log_id != record.log_id:
                raise ForeignLog(
                    f"consumer {name!r} stands in log {record.log_id}, the confirmation in {confirmation.log_id}"
                )
            _check_below_end(confirmation, self._buffer(record).end)
            frontier = record.frontier.copy()
            changed = confirmation.through is not None and frontier.confirm_through(confirmation.through)
            changed = frontier.confirm(confirmation.ranges) or changed
            peer_head = confirmation.peer_head if confirmation.peer_head is not None else record.peer_head

            def change() -> None:
                record.frontier, record.peer_head = frontier, peer_head

            if changed or peer_head != record.peer_head:
                await write(change)
            return self._checkpoint(record)

    async def commit_one(self, name: str, offset: int, key: Key) -> Checkpoint:
        """Record that one entry is confirmed, if it has this key."""
        self._storage.check_open()
        buffer = self._buffer(self._active(name))
        if offset < buffer.end and offset >= 0:
            known = buffer.keys.get(key)
            if known is None or known.offset != offset:
                raise InvalidArgument(f"the entry at offset {offset} does not have the key {tuple(key)}")
        return await self.commit(name, Confirmation(ranges=[(offset, offset)]))

    async def sent(self, name: str, next_to_send: int) -> None:
        """Note how far the consumer has been served."""
        self._storage.check_open()
        record = self._active(name)
        if next_to_send < 0:
            raise InvalidArgument(f"offset {next_to_send} is negative")
        if next_to_send > self._buffer(record).end:
            raise OffsetOutOfRange(f"offset {next_to_send} lies beyond the end {self._buffer(record).end}")
        self._next_to_send[name] = next_to_send

    async def checkpoint(self, name: str) -> Checkpoint:
        """Give where a consumer stands."""
        self._storage.check_open()
        return self._checkpoint(self._known(name))

    async def consumer(self, name: str) -> ConsumerState:
        """Describe one consumer."""
        self._storage.check_open()
        return self._describe(self._known(name))

    async def consumers(self) -> list[ConsumerState]:
        """Describe all consumers by name."""
        self._storage.check_open()
        return [self._describe(record) for _, record in sorted(self._storage.medium.consumers.items())]

    def _new(self, spec: ConsumerSpec, buffer: BufferState) -> ConsumerRecord:
        begin = _begin(spec, buffer)
        frontier = Frontier(begin - 1, max_ranges=self._storage.max_ranges)
        return ConsumerRecord(spec, frontier, buffer.log_id, self._storage.clock.now_unix_ms())

    def _keep(self, record: ConsumerRecord) -> None:
        self._storage.medium.consumers[record.spec.name] = record

    def _known(self, name: str) -> ConsumerRecord:
        record = self._storage.medium.consumers.get(name)
        if record is None:
            raise UnknownConsumer(f"there is no consumer {name!r}", consumer=name)
        return record

    def _active(self, name: str) -> ConsumerRecord:
        record = self._known(name)
        if record.retired_reason is not None:
            raise _retired(record)
        return record

    def _buffer(self, record: ConsumerRecord) -> BufferState:
        return self._storage.medium.buffers[record.spec.stream, record.spec.buffer]

    def _checkpoint(self, record: ConsumerRecord) -> Checkpoint:
        committed = record.frontier.committed
        return Checkpoint(max(self._next_to_send.get(record.spec.name, 0), committed + 1), committed)

    def _describe(self, record: ConsumerRecord) -> ConsumerState:
        return ConsumerState(
            record.spec,
            self._checkpoint(record),
            tuple(record.frontier.ranges),
            record.log_id,
            record.created_unix_ms,
            record.retired_reason,
            record.peer_head,
        )


def _begin(spec: ConsumerSpec, buffer: BufferState) -> int:
    """Give the first offset that a new consumer gets."""
    if spec.start == StartAt.EARLIEST:
        return buffer.start
    if spec.start == StartAt.LATEST:
        return buffer.end
    if spec.start == StartAt.TIME:
        return buffer.offset_at(spec.start_value)
    if spec.start_value < 0:
        raise InvalidArgument(f"offset {spec.start_value} is negative")
    if spec.start_value > buffer.end:
        raise OffsetOutOfRange(f"offset {spec.start_value} lies beyond the end {buffer.end}", end=buffer.end)
    return spec.start_value


def _check_below_end(confirmation: Confirmation, end: int) -> None:
    through = -1 if confirmation.through is None else confirmation.through
    highest = max([through, *(last for _, last in confirmation.ranges)])
    if highest >= end:
        raise OffsetOutOfRange(f"offset {highest} is confirmed, but the end is {end}", end=end)


def _retired(record: ConsumerRecord) -> ConsumerRetired:
    return ConsumerRetired(f"consumer {record.spec.name!r} was retired: {record.retired_reason}")
