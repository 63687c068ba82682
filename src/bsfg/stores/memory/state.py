"""What a buffer in memory consists of, what it would do with a batch, and the medium that tests can hold or break."""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol
from uuid import uuid4

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import byte_lengths
from bsfg.digest import is_digest_of
from bsfg.errors import DiskFull, OutcomeUnknown, QuarantineFull, StorageClosed, StorageFailed
from bsfg.fact import Key
from bsfg.frontier import Frontier
from bsfg.gaps import Gap, GapBook
from bsfg.latest import joined, newest
from bsfg.ports import Buffer, ConsumerSpec, Frame, GapRecord, OriginSpan, Quarantined, Result
from bsfg.retention import GapReason, Piece
from bsfg.sealing import bodies

ROW_OVERHEAD_BYTES = 64
KEY_OVERHEAD_BYTES = 200
REMOVAL_REASONS = frozenset({GapReason.EVICTED, GapReason.EXPIRED, GapReason.DAMAGED, GapReason.LOST})
"""The records that say why entries of this buffer are no longer there."""


AsideIdentity = tuple[Key, str, bytes]
"""What makes two refused facts the same one: key, reason and body."""


class KnownKey(NamedTuple):
    """What stays of a fact when its bytes are gone."""

    offset: int
    digest: bytes
    appended_at_unix_ms: int


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """The entries of one write."""

    first: int
    entries: EntryBatch
    bodies: list[bytes]
    sizes_bytes: list[int]
    appended_at_unix_ms: int

    @property
    def last(self) -> int:
        """The offset of the last entry, inclusive."""
        return self.first + len(self.bodies) - 1

    def since(self, offset: int) -> WrittenBlock:
        """Give what remains when everything below an offset is removed."""
        row = offset - self.first
        return WrittenBlock(
            offset, self.entries.slice(row), self.bodies[row:], self.sizes_bytes[row:], self.appended_at_unix_ms
        )


@dataclass(slots=True)
class WritePlan:
    """What a batch would do: a result and an offset per row, the rows to insert and those to set aside."""

    results: np.ndarray
    offsets: np.ndarray
    new_rows: list[int]
    new_bodies: list[bytes]
    refused: list[Quarantined]


@dataclass(slots=True)
class BufferState:
    """Everything that one buffer retains."""

    stream: str
    buffer: Buffer
    log_id: str
    start: int = 0
    end: int = 0
    used_bytes: int = 0
    chain_head: bytes = bytes(32)
    newest_unix_ms: int = 0
    removed_unix_ms: int = 0
    blocks: list[WrittenBlock] = field(default_factory=list)
    keys: dict[Key, KnownKey] = field(default_factory=dict)
    book: GapBook = field(default_factory=GapBook)
    quarantined: dict[int, Quarantined] = field(default_factory=dict)
    identities: dict[AsideIdentity, int] = field(default_factory=dict)
    quarantine_bytes: int = 0
    quarantine_full: bool = False
    released: list[tuple[Quarantined, str]] = field(default_factory=list)
    next_quarantine_id: int = 0
    latest: EntryBatch | None = None

    def block_at(self, offset: int) -> WrittenBlock | None:
        """Give the block that holds an offset, if it is retained."""
        if not self.start <= offset < self.end:
            return None
        return self.blocks[bisect_right(self.blocks, offset, key=lambda block: block.first) - 1]

    def body_at(self, offset: int) -> bytes | None:
        """Give the body of an entry, if it is retained."""
        block = self.block_at(offset)
        return block.bodies[offset - block.first] if block else None

    def offset_at(self, unix_ms: int) -> int:
        """Give the first retained offset whose time is not before ``unix_ms``, the end when there is none."""
        at = bisect_left(self.blocks, unix_ms, key=lambda block: block.appended_at_unix_ms)
        return self.blocks[at].first if at < len(self.blocks) else self.end

    def pieces(self) -> list[Piece]:
        """List the entries as retention sees them: each may leave by itself."""
        return [
            Piece(block.first + row, block.first + row, size, block.appended_at_unix_ms)
            for block in self.blocks
            for row, size in enumerate(block.sizes_bytes)
        ]

    def insert(self, block: WrittenBlock) -> None:
        """Add entries at the end."""
        digests = block.entries.digests()
        names = zip(*key_columns(block.entries), digests, strict=True)
        for row, (zone, message_id, digest) in enumerate(names):
            self.keys[Key(zone, message_id)] = KnownKey(block.first + row, digest, block.appended_at_unix_ms)
        chained = self.chain_head + self.log_id.encode() + block.first.to_bytes(8, "big") + b"".join(digests)
        self.chain_head = hashlib.sha256(chained).digest()
        self.blocks.append(block)
        self.end = block.last + 1
        self.newest_unix_ms = block.appended_at_unix_ms
        self.used_bytes += sum(block.sizes_bytes)

    def keep_latest(self, offset: int, most: int) -> None:
        """Keep the newest entries below an offset, which are about to leave."""
        parts = [self.latest] if self.latest is not None else []
        for block in self.blocks:
            if block.first < offset:
                parts.append(block.entries.slice(0, offset - block.first))
        self.latest = newest(joined(parts), most)

    def remove_before(self, offset: int, now_unix_ms: int) -> None:
        """Remove the bytes below an offset; keys stay."""
        if offset <= self.start:
            return
        gone = bisect_right(self.blocks, offset, key=lambda block: block.last + 1)
        removed = self.blocks[:gone]
        del self.blocks[:gone]
        if self.blocks and self.blocks[0].first < offset:
            removed.append(self.blocks[0])
            self.blocks[0] = self.blocks[0].since(offset)
            self.used_bytes += sum(self.blocks[0].sizes_bytes)
        self.used_bytes -= sum(sum(block.sizes_bytes) for block in removed)
        self.start, self.removed_unix_ms = offset, now_unix_ms

    def forget_keys(self, before_unix_ms: int) -> None:
        """Drop the keys of removed entries that are older than the key horizon."""
        old = [
            key
            for key, known in self.keys.items()
            if known.offset < self.start and known.appended_at_unix_ms < before_unix_ms
        ]
        for key in old:
            del self.keys[key]

    def add_gaps(self, gaps: Iterable[Gap]) -> None:
        """Add the gap records that are not there yet."""
        for gap in self.book.missing(gaps):
            self.book.add(gap)

    def set_aside(self, facts: Iterable[Quarantined]) -> None:
        """Put refused facts into quarantine under their ids."""
        for fact in facts:
            self.quarantined[fact.id] = fact
            self.identities[_aside_identity(fact)] = fact.id
            self.quarantine_bytes += _aside_bytes(fact)
            self.next_quarantine_id = fact.id + 1

    def release(self, id: int, reason: str) -> None:
        """Let a fact leave quarantine, and remember why."""
        fact = self.quarantined.pop(id)
        del self.identities[_aside_identity(fact)]
        self.quarantine_bytes -= _aside_bytes(fact)
        self.quarantine_full = False
        self.released.append((fact, reason))

    def frame(self, at: int, stop: int, max_facts: int) -> Frame:
        """Give the step of a replay that begins at ``at`` and ends before ``stop``."""
        if at < self.start:
            return self._gap_frame(at, min(stop, self.start))
        parts: list[EntryBatch] = []
        position, stop = at, min(stop, at + max_facts)
        while position < stop and (block := self.block_at(position)):
            part = block.entries.slice(position - block.first, stop - position)
            parts.append(part)
            position += len(part)
        return Frame(at, position - 1, entries=EntryBatch.concat(parts))

    def _gap_frame(self, at: int, stop: int) -> Frame:
        reasons = [gap for gap in self.book.own() if gap.reason in REMOVAL_REASONS]
        for gap in reasons:
            if gap.first <= at <= gap.last:
                return Frame(at, min(gap.last + 1, stop) - 1, gap=gap)
        last = min([stop, *(gap.first for gap in reasons if gap.first > at)]) - 1
        return Frame(at, last, gap=GapRecord(at, last, GapReason.TRUNCATED, self.removed_unix_ms))


def key_columns(facts: FactBatch) -> tuple[list[str], list[str]]:
    """Give zones and message ids of all rows."""
    return facts.column("from_zone").to_pylist(), facts.column("message_id").to_pylist()


def plan(
    state: BufferState, facts: FactBatch, origin: OriginSpan | None, now_unix_ms: int, *, quarantine_conflicts: bool
) -> WritePlan:
    """Hold each row against what is there, earlier rows of the same batch included."""
    count = len(facts)
    result = WritePlan(np.empty(count, dtype=np.int8), np.empty(count, dtype=np.int64), [], [], [])
    fresh: dict[Key, tuple[int, bytes, bytes | None]] = {}
    rows = zip(*key_columns(facts), facts.digests(), bodies(facts), strict=True)
    for row, (zone, message_id, digest, body) in enumerate(rows):
        key = Key(zone, message_id)
        known = fresh.get(key) or _known(state, key)
        if known is None:
            known = fresh[key] = (state.end + len(result.new_rows), digest, body)
            result.new_rows.append(row)
            result.new_bodies.append(body)
            result.results[row] = Result.INSERTED
        else:
            reason = _objection(known, digest, body)
            result.results[row] = Result.CONFLICT if reason else Result.ALREADY_EXISTS
            if reason == "hash_collision" or (reason and quarantine_conflicts):
                came_from = origin.at(row) if origin else None
                aside = Quarantined(0, now_unix_ms, reason, key, known[0], facts.slice(row, 1), origin=came_from)
                result.refused.append(aside)
        result.offsets[row] = known[0]
    return result


def not_yet_aside(state: BufferState, refused: Iterable[Quarantined], capacity_bytes: int) -> list[Quarantined]:
    """Leave out what is in quarantine already, and give the rest their ids; `QuarantineFull` when it does not fit."""
    result: list[Quarantined] = []
    seen: set[AsideIdentity] = set()
    for aside in refused:
        identity = _aside_identity(aside)
        if identity in seen or identity in state.identities:
            continue
        seen.add(identity)
        result.append(replace(aside, id=state.next_quarantine_id + len(result)))
    incoming_bytes = sum(map(_aside_bytes, result))
    state.quarantine_full = bool(result) and state.quarantine_bytes + incoming_bytes > capacity_bytes
    if state.quarantine_full:
        raise QuarantineFull(
            f"{len(result)} refused facts do not fit: {state.quarantine_bytes} of {capacity_bytes} bytes are used"
        )
    return result


def _aside_identity(aside: Quarantined) -> AsideIdentity:
    return aside.key, aside.reason, bodies(aside.facts)[0]


def _aside_bytes(aside: Quarantined) -> int:
    return sum(row_sizes_bytes(aside.facts)) + len(aside.detail)


def _known(state: BufferState, key: Key) -> tuple[int, bytes, bytes | None] | None:
    known = state.keys.get(key)
    return (known.offset, known.digest, state.body_at(known.offset)) if known else None


def _objection(known: tuple[int, bytes, bytes | None], digest: bytes, body: bytes) -> str | None:
    """Say why a fact cannot be the one that is there, or None when it is."""
    _, known_digest, known_body = known
    # A zone that changed its function may have sealed the same fact twice, each time by another one.
    if digest != known_digest and not is_digest_of(known_digest, body):
        return "conflict"
    return "hash_collision" if known_body is not None and known_body != body else None


def row_sizes_bytes(facts: FactBatch) -> list[int]:
    """Give what each row occupies."""
    total = np.full(len(facts), ROW_OVERHEAD_BYTES, dtype=np.int64)
    for column in facts.record_batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            total += byte_lengths(column)
    result: list[int] = total.tolist()
    return result


class Fault(StrEnum):
    """How a medium can fail."""

    NO_SPACE = "no_space"
    SYNC_FAILS = "sync_fails"
    IO_ERROR = "io_error"


@dataclass(slots=True)
class ConsumerRecord:
    """What is kept of a consumer."""

    spec: ConsumerSpec
    frontier: Frontier
    log_id: str
    created_unix_ms: int
    retired_reason: str | None = None
    peer_head: bytes | None = None


class Writer(Protocol):
    """A storage that writes to a medium."""

    def abandon(self) -> None:
        """Stop, because another storage writes now."""
        ...


class Medium:
    """The retained state of a storage, as a disk is: it stays when the storage is closed or abandoned.

    One storage writes to it at a time; a new one takes it over, as after a crash. Every change goes through `write`,
    so that nothing can be seen before it is kept.
    """

    def __init__(self, *, new_log_id: Callable[[], str] = lambda: uuid4().hex) -> None:
        self.new_log_id = new_log_id
        self.hasher_name: str | None = None
        self.buffers: dict[tuple[str, Buffer], BufferState] = {}
        self.consumers: dict[str, ConsumerRecord] = {}
        self._writer: Writer | None = None
        self._fault: Fault | None = None
        self._kept = False
        self._released: asyncio.Event | None = None

    def take_over(self, writer: Writer) -> None:
        """Make a storage the one writer, in place of the one before."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer = writer

    def fail_next(self, fault: Fault | str, *, kept: bool = False) -> None:
        """Make the next write fail; after a failed sync ``kept`` decides whether the change is there all the same."""
        self._fault, self._kept = Fault(fault), kept

    def hold(self) -> Callable[[], None]:
        """Make writes wait until the function that this gives is called."""
        self._released = released = asyncio.Event()

        def release() -> None:
            self._released = None
            released.set()

        return release

    async def write(self, writer: Writer, change: Callable[[], None]) -> None:
        """Make a change, or raise what the medium fails with."""
        while self._released is not None:
            await self._released.wait()
        if self._writer is not writer:
            raise StorageClosed("the storage was opened anew")
        fault, self._fault = self._fault, None
        if fault == Fault.NO_SPACE:
            raise DiskFull("the medium has no space left")
        if fault == Fault.IO_ERROR:
            raise StorageFailed("the medium reported an input/output error")
        if fault == Fault.SYNC_FAILS:
            if self._kept:
                change()
            raise OutcomeUnknown("syncing failed; the change may or may not be there")
        change()
