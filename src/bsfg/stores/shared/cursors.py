"""The durable positions of consumers: what may be created, confirmed and retired, whatever keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bsfg.errors import (
    BsfgError,
    ConsumerExists,
    ConsumerRetired,
    ForeignLog,
    InvalidArgument,
    OffsetOutOfRange,
    StorageClosed,
    UnknownConsumer,
)
from bsfg.fact import Key
from bsfg.frontier import NOTHING, Frontier
from bsfg.ports import Buffer, Checkpoint, Clock, Confirmation, ConsumerSpec, ConsumerState, GapRecord, StartAt
from bsfg.retention import GapReason
from bsfg.rules import check_name
from bsfg.stores.shared.committer import Committer, MakeWorkers, Workers
from bsfg.wording import check_reason


class Positions(Protocol):
    """What the tracker must know of a buffer: its history, its extent, and what is where."""

    log_id: str

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""

    async def offset_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""

    async def key_at(self, offset: int) -> Key | None:
        """Give the key of an entry, or None when it is not retained."""

    async def record_gaps(self, gaps: Sequence[GapRecord]) -> None:
        """Make gap records durable."""


Resolve = Callable[[str, Buffer], Awaitable[Positions]]


@dataclass(slots=True)
class ConsumerCursor:
    """One consumer in memory."""

    spec: ConsumerSpec
    frontier: Frontier
    log_id: str
    created_unix_ms: int
    retired_reason: str | None = None
    peer_head: bytes | None = None
    next_to_send: int = 0

    def state(self) -> ConsumerState:
        """Give the public form."""
        return ConsumerState(
            self.spec,
            self.checkpoint(),
            tuple(self.frontier.ranges),
            self.log_id,
            self.created_unix_ms,
            self.retired_reason,
            self.peer_head,
        )

    def checkpoint(self) -> Checkpoint:
        """Give where it stands."""
        return Checkpoint(max(self.next_to_send, self.frontier.committed + 1), self.frontier.committed)


def as_document(cursor: ConsumerCursor) -> dict[str, Any]:
    """Give the values from which a cursor can be read again, all of a kind that JSON has."""
    spec, frontier = cursor.spec, cursor.frontier
    return {
        "name": spec.name,
        "stream": spec.stream,
        "buffer": spec.buffer,
        "start": spec.start,
        "start_value": spec.start_value,
        "required": spec.required,
        "committed": frontier.committed,
        "ranges": frontier.ranges,
        "log_id": cursor.log_id,
        "created_unix_ms": cursor.created_unix_ms,
        "retired_reason": cursor.retired_reason,
        "peer_head": cursor.peer_head.hex() if cursor.peer_head else None,
    }


def from_document(said: Mapping[str, Any]) -> ConsumerCursor:
    """Read a cursor."""
    buffer, start = Buffer(said["buffer"]), StartAt(said["start"])
    spec = ConsumerSpec(said["name"], said["stream"], buffer, start, said["start_value"], said["required"])
    frontier = Frontier(said["committed"], [(first, last) for first, last in said["ranges"]])
    head = bytes.fromhex(said["peer_head"]) if said["peer_head"] else None
    made, retired = said["created_unix_ms"], said["retired_reason"]
    return ConsumerCursor(spec, frontier, said["log_id"], made, retired, head, frontier.committed + 1)


@dataclass(slots=True)
class CursorChange:
    """A change that waits to be made durable: it is applied to a copy, and the copy shows only after the sync."""

    name: str
    apply: Callable[[ConsumerCursor | None], ConsumerCursor]
    result: ConsumerCursor | None = field(default=None)


class Cursors(ABC):
    """The positions of all consumers in memory, and in front of what keeps them; concurrent commits share a write.

    A backend supplies `keep`, and calls `begin` with what it found.
    """

    def __init__(self, clock: Clock, resolve: Resolve, workers: MakeWorkers = Workers) -> None:
        self._clock = clock
        self._make_workers = workers
        self._resolve = resolve
        # It is exchanged as a whole when a consumer is added, and only ever changed by the committer's thread.
        self._cursors: dict[str, ConsumerCursor] = {}
        # A thread of its own: nobody who confirms waits for the facts of others.
        self._workers: Workers | None = None
        self._committer: Committer[CursorChange, ConsumerCursor] | None = None
        self.are_lost = False
        """Whether consumers or their confirmations may have been lost: nobody knows then what they still need."""

    @abstractmethod
    def keep(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make cursors durable, all of them or none; runs in the thread of the committer."""

    def kept(self) -> None:  # noqa: B027 - a backend may have nothing to do then
        """Do what is due behind a write."""

    def begin(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Take what was found, and begin to accept changes."""
        self._cursors = {cursor.spec.name: cursor for cursor in cursors}
        self._workers = self._make_workers("bsfg-cursors", 1)
        self._committer = Committer(self._workers, self._write)

    async def end(self) -> bool:
        """Finish what is under way; tell whether there was anything to end."""
        if self._committer is None or self._workers is None:
            return False
        committer, self._committer = self._committer, None
        await committer.close()
        self._workers.close()
        return True

    def listed(self) -> list[ConsumerCursor]:
        """Give all consumers by name, retired ones included."""
        return [self._cursors[name] for name in sorted(self._cursors)]

    def bound_to(self, stream: str, buffer: Buffer) -> list[ConsumerCursor]:
        """Give the consumers of one buffer that are not retired."""
        return [
            cursor
            for cursor in self._cursors.values()
            if cursor.spec.stream == stream and cursor.spec.buffer == buffer and cursor.retired_reason is None
        ]

    def floor(self, stream: str, buffer: Buffer) -> int:
        """Give the offset after the highest one that any consumer of a buffer, retired or not, has confirmed."""
        result = 0
        for cursor in self._cursors.values():
            if cursor.spec.stream == stream and cursor.spec.buffer == buffer:
                last = cursor.frontier.ranges[-1][1] if cursor.frontier.ranges else cursor.frontier.committed
                result = max(result, last + 1)
        return result

    def required_frontier(self, stream: str, buffer: Buffer) -> int | None:
        """Give the lowest frontier of the required consumers, None when there is none.

        While it is not known who was lost, a buffer without a required consumer keeps everything.
        """
        frontiers = [cursor.frontier.committed for cursor in self.bound_to(stream, buffer) if cursor.spec.required]
        return min(frontiers, default=NOTHING if self.are_lost else None)

    async def create(self, spec: ConsumerSpec) -> ConsumerState:
        """Create a consumer durably, or give the identical one that exists."""
        check_name("consumer", spec.name, r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
        existing = self._cursors.get(spec.name)
        if existing is None:
            buffer = await self._resolve(spec.stream, spec.buffer)
            first = await _first_offset(spec, buffer)
            fresh = ConsumerCursor(
                spec, Frontier(first - 1), buffer.log_id, self._clock.now_unix_ms(), next_to_send=first
            )
            existing = await self._submit(CursorChange(spec.name, lambda there: there or fresh))
        if existing.retired_reason is not None:
            raise ConsumerRetired(f"consumer {spec.name} was retired: {existing.retired_reason}")
        if existing.spec != spec:
            raise ConsumerExists(f"consumer {spec.name} exists with other settings: {existing.spec}")
        return existing.state()

    async def retire(self, name: str, reason: str) -> list[GapRecord]:
        """End a consumer; what it had not confirmed is recorded as gaps."""
        check_reason(reason, "retiring a consumer")
        cursor = self._known(name)
        buffer = await self._resolve(cursor.spec.stream, cursor.spec.buffer)
        now = self._clock.now_unix_ms()
        detail = f"{name}: {reason}"
        gaps = [
            GapRecord(first, last, GapReason.RETIRED, now, detail)
            for first, last in cursor.frontier.missing(buffer.end)
        ]
        await buffer.record_gaps(gaps)
        await self._submit(CursorChange(name, lambda there: replace(_there(there), retired_reason=reason)))
        return gaps

    async def commit(self, name: str, confirmation: Confirmation) -> Checkpoint:
        """Record durably what is confirmed."""
        cursor = self._known(name)
        buffer = await self._resolve(cursor.spec.stream, cursor.spec.buffer)
        if confirmation.log_id is not None and confirmation.log_id != buffer.log_id:
            raise ForeignLog(
                f"consumer {name} confirms a position of log {confirmation.log_id}, this is log {buffer.log_id}"
            )
        if cursor.log_id != buffer.log_id:
            raise ForeignLog(f"consumer {name} belongs to log {cursor.log_id}, this is log {buffer.log_id}")
        highest = max([confirmation.through or 0, *(last for _, last in confirmation.ranges)])
        if highest >= buffer.end and (confirmation.through is not None or confirmation.ranges):
            raise OffsetOutOfRange(f"offset {highest} is beyond the end {buffer.end}", end=buffer.end)
        confirmed = await self._submit(CursorChange(name, lambda there: _confirmed(_there(there), confirmation)))
        return confirmed.checkpoint()

    async def commit_one(self, name: str, offset: int, key: Key) -> Checkpoint:
        """Confirm one entry, naming its key."""
        cursor = self._known(name)
        buffer = await self._resolve(cursor.spec.stream, cursor.spec.buffer)
        if not 0 <= offset < buffer.end:
            raise OffsetOutOfRange(f"offset {offset} is not in 0 to {buffer.end - 1}", end=buffer.end)
        stored = await buffer.key_at(offset)
        if stored is not None and stored != key:
            raise InvalidArgument(f"the entry at offset {offset} has another key", offset=offset)
        return await self.commit(name, Confirmation(ranges=[(offset, offset)]))

    async def sent(self, name: str, next_to_send: int) -> None:
        """Note how far the consumer has been served."""
        cursor = self._known(name)
        buffer = await self._resolve(cursor.spec.stream, cursor.spec.buffer)
        if not 0 <= next_to_send <= buffer.end:
            raise OffsetOutOfRange(f"offset {next_to_send} is not in 0 to {buffer.end}", end=buffer.end)
        cursor.next_to_send = next_to_send

    async def checkpoint(self, name: str) -> Checkpoint:
        """Give where a consumer stands."""
        return self._known(name).checkpoint()

    async def consumer(self, name: str) -> ConsumerState:
        """Describe one consumer."""
        if self._committer is None:
            raise StorageClosed("the storage is closed")
        if name not in self._cursors:
            raise UnknownConsumer(f"no consumer is called {name}", consumer=name)
        return self._cursors[name].state()

    async def consumers(self) -> list[ConsumerState]:
        """Describe all consumers by name."""
        if self._committer is None:
            raise StorageClosed("the storage is closed")
        cursors = self._cursors
        return [cursors[name].state() for name in sorted(cursors)]

    def _known(self, name: str) -> ConsumerCursor:
        if self._committer is None:
            raise StorageClosed("the storage is closed")
        cursor = self._cursors.get(name)
        if cursor is None:
            raise UnknownConsumer(f"no consumer is called {name}", consumer=name)
        if cursor.retired_reason is not None:
            raise ConsumerRetired(f"consumer {name} was retired: {cursor.retired_reason}", consumer=name)
        return cursor

    async def _submit(self, change: CursorChange) -> ConsumerCursor:
        if self._committer is None:
            raise StorageClosed("the storage is closed")
        return await self._committer.submit(change)

    def _write(self, changes: Sequence[CursorChange]) -> list[ConsumerCursor | BaseException]:
        """Apply changes to copies, make the copies durable, then show them; each caller gets what became of its own."""
        fresh: dict[str, ConsumerCursor] = {}
        outcomes: list[ConsumerCursor | BaseException] = []
        for change in changes:
            there = fresh.get(change.name, self._cursors.get(change.name))
            try:
                changed = change.apply(there)
            except BsfgError as refusal:
                outcomes.append(refusal)
                continue
            if changed is not there:
                fresh[change.name] = changed
            outcomes.append(changed)
        if fresh:
            self.keep(list(fresh.values()))
            for name, cursor in fresh.items():
                if name in self._cursors:
                    cursor.next_to_send = self._cursors[name].next_to_send
            if fresh.keys() <= self._cursors.keys():
                self._cursors.update(fresh)
            else:
                # Logs look through all consumers in threads of their own: these never see a mapping grow.
                self._cursors = {**self._cursors, **fresh}
        self.kept()
        return outcomes


def _there(cursor: ConsumerCursor | None) -> ConsumerCursor:
    if cursor is None:
        raise UnknownConsumer("the consumer is gone")
    if cursor.retired_reason is not None:
        raise ConsumerRetired(f"consumer {cursor.spec.name} was retired: {cursor.retired_reason}")
    return cursor


def _confirmed(cursor: ConsumerCursor, confirmation: Confirmation) -> ConsumerCursor:
    frontier = cursor.frontier.copy()
    changed = False
    if confirmation.through is not None:
        changed = frontier.confirm_through(confirmation.through)
    if confirmation.ranges:
        changed = frontier.confirm(confirmation.ranges) or changed
    head = confirmation.peer_head
    if not changed and (head is None or head == cursor.peer_head):
        return cursor
    return replace(cursor, frontier=frontier, peer_head=head or cursor.peer_head)


async def _first_offset(spec: ConsumerSpec, buffer: Positions) -> int:
    if spec.start == StartAt.EARLIEST:
        return buffer.start
    if spec.start == StartAt.LATEST:
        return buffer.end
    if spec.start == StartAt.TIME:
        return await buffer.offset_at_time(spec.start_value)
    if not 0 <= spec.start_value <= buffer.end:
        raise OffsetOutOfRange(f"start {spec.start_value} is not in 0 to {buffer.end}", end=buffer.end)
    return spec.start_value
