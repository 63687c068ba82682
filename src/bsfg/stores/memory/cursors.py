"""The positions of consumers, in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bsfg.errors import (
    ConsumerExists,
    ConsumerRetired,
    ForeignLog,
    InvalidArgument,
    OffsetOutOfRange,
    UnknownConsumer,
)
from bsfg.fact import Key
from bsfg.frontier import Frontier
from bsfg.ports import Checkpoint, Confirmation, ConsumerSpec, ConsumerState, GapRecord, StartAt
from bsfg.retention import GapReason
from bsfg.rules import ZONE, check_name
from bsfg.stores.memory.medium import ConsumerRecord
from bsfg.stores.memory.state import BufferState

if TYPE_CHECKING:
    from bsfg.stores.memory.storage import MemoryStorage


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
