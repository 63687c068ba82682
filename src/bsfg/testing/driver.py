"""Calls to a storage, each of which goes into a ledger: what is asked before, what is answered after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import (
    BsfgError,
    BufferFull,
    DiskFull,
    ForeignLog,
    OutcomeUnknown,
    StorageBusy,
    StorageClosed,
    StorageFailed,
    StorageReadOnly,
    TruncateRefused,
)
from bsfg.fact import Key
from bsfg.frontier import Frontier, Range
from bsfg.ports import (
    UNREADABLE,
    Buffer,
    Confirmation,
    ConsumerSpec,
    ForwardBuffer,
    GapRecord,
    OriginSpan,
    Receipt,
    Storage,
    StoreBuffer,
)
from bsfg.retention import Overflow, Policy
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import altered, messages, sealed
from bsfg.testing.ledger import BufferLedger, CursorLedger, Ledger, Place
from bsfg.testing.observed import Row, batch_of, expect, identity, observe, rows_of, shown

UNCERTAIN = (OutcomeUnknown, StorageClosed, StorageFailed, StorageReadOnly)

SENT: Place = ("operational", Buffer.STORE)
RECEIVED: Place = ("operational", Buffer.FORWARD)
CROWDED: Place = ("audit", Buffer.STORE)
"""A buffer that is so small that it evicts."""

KEYS_FOREVER_SECONDS = 10**9
CROWDED_BYTES = 100_000
ROOMY_BYTES = 1 << 40


def default_policies() -> dict[Place, Policy]:
    """Give the buffers that a campaign uses: plenty of room, the receiving side, and one that evicts."""
    usual = Policy(
        capacity_bytes=ROOMY_BYTES,
        retention_seconds=60,
        max_age_seconds=3_600,
        key_horizon_seconds=KEYS_FOREVER_SECONDS,
    )
    crowded = replace(usual, capacity_bytes=CROWDED_BYTES, overflow=Overflow.DROP_OLDEST)
    return {SENT: usual, RECEIVED: usual, CROWDED: crowded}


class MediumFailed(Exception):
    """The storage reported that its medium failed; it must be opened again."""


class RefusedToOpen(Exception):
    """The storage reported damage by not opening."""


@dataclass(slots=True)
class Driver:
    """Calls a storage and keeps the ledger: what is about to be asked first, then what was answered.

    With ``faulty`` the disk may fail, and errors that say so are taken as answers; otherwise they break a promise.
    """

    storage: Storage
    ledger: Ledger
    clock: FakeClock
    policies: dict[Place, Policy] = field(default_factory=default_policies)
    faulty: bool = False
    seed: int = 0
    stores: dict[Place, StoreBuffer] = field(default_factory=dict)
    forwards: dict[Place, ForwardBuffer] = field(default_factory=dict)

    # Buffers.

    async def open_buffers(self) -> None:
        """Open every buffer, which makes those that are not there yet."""
        with self._medium():
            await self._open_buffers()

    async def _open_buffers(self) -> None:
        for place, policy in self.policies.items():
            if place[1] == Buffer.STORE:
                self.stores[place] = await self.storage.store(place[0], policy)
            else:
                self.forwards[place] = await self.storage.forward(place[0], policy)
            with self.ledger.lock:
                self.ledger.opened.add(place)
                # On a full disk, too, what is confirmed may leave.
                self.ledger.book(place).may_evict |= self.faulty or policy.capacity_bytes < ROOMY_BYTES

    async def open_damaged(self) -> None:
        """Open every buffer of a damaged disk; an error reports the damage, which is all that is asked."""
        try:
            await self._open_buffers()
        except BsfgError as error:
            raise RefusedToOpen(str(error)) from error

    def buffer(self, place: Place) -> StoreBuffer | ForwardBuffer:
        """Give an open buffer."""
        return self.stores[place] if place in self.stores else self.forwards[place]

    # Facts.

    def fresh(self, count: int, *, object_bytes: int = 60) -> FactBatch:
        """Make facts that were never sent before."""
        with self.ledger.lock:
            first, self.ledger.numbers = self.ledger.numbers, self.ledger.numbers + count
        return sealed(messages(count, seed=self.seed, first=first, object_bytes=object_bytes))

    def repeated(self, place: Place, random: Random, count: int) -> FactBatch:
        """Choose facts that the buffer knows, or fresh ones when it knows none."""
        known = list(self.ledger.book(place).rows.values())
        return batch_of(random.choices(known, k=count)) if known else self.fresh(count)

    async def write(self, place: Place, batch: FactBatch) -> Receipt | None:
        """Append to a store buffer or put into a forward buffer; None when it was rejected."""
        book = self.ledger.book(place)
        origin = None if place in self.stores else self._origin(len(batch))
        with self.ledger.lock:
            token = book.begin(rows_of(batch, origin))
        try:
            with self._medium():
                if origin is None:
                    receipt = await self.stores[place].append(batch)
                else:
                    receipt = await self.forwards[place].put_if_absent(batch, origin)
        except (BufferFull, DiskFull, StorageBusy):
            with self.ledger.lock:
                book.refuse(token)
            return None
        with self.ledger.lock:
            book.acknowledge(token, receipt)
        return receipt

    def _origin(self, count: int) -> OriginSpan:
        offsets = np.arange(count, dtype=np.int64) + self.ledger.numbers
        times = np.full(count, self.clock.now_unix_ms(), dtype=np.int64)
        # Some senders tell how old their facts are, and some do not.
        return OriginSpan("plant", offsets, times, offsets % 1000 if self.ledger.numbers % 3 else None)

    async def glimpse(self, place: Place, random: Random) -> None:
        """Read some of a buffer while others may be writing; what is seen must stay."""
        start = random.randint(0, self.ledger.book(place).end)
        with self._medium():
            async for frame in self.buffer(place).replay(start, max_facts=random.choice((1, 5, 100))):
                rows = shown(frame, str(place))
                with self.ledger.lock:
                    self.ledger.book(place).take_seen({offset: (at, row) for offset, at, row in rows})

    # Consumers.

    async def create(self, spec: ConsumerSpec) -> None:
        """Create a consumer."""
        cursor = self.ledger.cursors.get(spec.name) or CursorLedger(spec)
        with self.ledger.lock:
            self.ledger.cursors[spec.name] = cursor
        with self._unless_full(), self._medium():
            state = await self.storage.cursors.create(spec)
            with self.ledger.lock:
                cursor.check(state, damaged=False)

    async def commit(self, name: str, through: int | None = None, ranges: Sequence[Range] = ()) -> None:
        """Confirm offsets for a consumer."""
        cursor = self.ledger.cursors[name]
        before = cursor.upper.copy()
        with self.ledger.lock:
            _confirm(cursor.upper, through, ranges)
        try:
            with self._medium():
                checkpoint = await self.storage.cursors.commit(name, Confirmation(through, ranges))
        except (DiskFull, StorageBusy):
            with self.ledger.lock:
                cursor.upper = before
            return
        with self.ledger.lock:
            _confirm(cursor.lower, through, ranges)
            expect(checkpoint.committed >= cursor.lower.committed, f"{name} stands at {checkpoint}, not {cursor.lower}")

    async def retire(self, name: str) -> None:
        """Retire a consumer."""
        cursor = self.ledger.cursors[name]
        with self.ledger.lock:
            cursor.may_be_retired = True
        with self._unless_full(), self._medium():
            gaps = await self.storage.cursors.retire(name, "gone for good")
            with self.ledger.lock:
                cursor.retired_reason, cursor.may_be_retired = "gone for good", False
                book = self.ledger.book((cursor.spec.stream, cursor.spec.buffer))
                book.gaps |= {identity(gap) for gap in gaps}

    # Space and notes.

    async def truncate(self, place: Place, before: int) -> None:
        """Remove what lies below an offset, where that is allowed."""
        book = self.ledger.book(place)
        with self.ledger.lock:
            allowed, book.may_truncate_before = book.may_truncate_before, max(book.may_truncate_before, before)
        try:
            with self._medium():
                await self.buffer(place).truncate_before(before)
        except (TruncateRefused, DiskFull, StorageBusy):
            with self.ledger.lock:
                book.may_truncate_before = allowed
            return
        with self.ledger.lock:
            book.start = max(book.start, before)

    async def retain(self, place: Place, seconds: float) -> None:
        """Let time pass and enforce retention."""
        self.clock.advance(seconds)
        with self.ledger.lock:
            self.ledger.book(place).may_evict = True
        with self._unless_full(), self._medium():
            await self.buffer(place).enforce_retention(link_open=True)

    async def record_gap(self, place: Place, gap: GapRecord) -> None:
        """Record a gap."""
        with self._unless_full(), self._medium():
            await self.buffer(place).record_gap(gap)
            with self.ledger.lock:
                self.ledger.book(place).gaps.add(identity(gap))

    async def release(self, place: Place, random: Random) -> None:
        """Release one quarantined fact, if there is any."""
        with self._unless_full(), self._medium():
            kept = [each for each in await self.buffer(place).quarantine() if each.reason != UNREADABLE]
            if not kept:
                return
            item = random.choice(kept)
            with self.ledger.lock:
                self.ledger.book(place).released |= {(row.key, row.digest) for row in rows_of(item.facts)}
            await self.buffer(place).release_quarantined(item.id, "seen by an operator")

    # Checking.

    async def check(self) -> None:
        """Read everything and hold it against the ledger; no other call may be under way."""
        with self._medium():
            states = {state.spec.name: state for state in await self.storage.cursors.consumers()}
            missing = self.ledger.opened - set(await self.storage.streams())
            seen = {place: await observe(self.buffer(place), str(place)) for place in self.policies}
        damaged = any(book.damaged for book in self.ledger.buffers.values())
        expect(damaged or not missing, f"the buffers {missing} are gone")
        expect(states.keys() <= self.ledger.cursors.keys(), f"consumers {set(states)} were never created")
        with self.ledger.lock:
            before = {place: self.ledger.confirmed_through(place) for place in seen}
            for name, cursor in list(self.ledger.cursors.items()):
                if cursor.check(states.get(name), damaged=damaged):
                    self.ledger.set_back.add(name)
                if name not in states:
                    del self.ledger.cursors[name]
            for place, observation in seen.items():
                confirmed = before[place] if damaged else self.ledger.confirmed_through(place)
                self.ledger.book(place).check(observation, confirmed_through=confirmed)

    async def probe(self, random: Random) -> None:
        """Repeat and contradict known facts, also those whose bytes are gone, and look some up."""
        for place in self.policies:
            book = self.ledger.book(place)
            known = list(book.rows.values())
            repeats = random.sample(known, min(40, len(known)))
            if repeats:
                await self.write(place, batch_of(repeats))
                await self.write(place, contradicting(repeats[:2]))
            for row in repeats[:3]:
                await self._look_up(book, place, row.key)

    async def _look_up(self, book: BufferLedger, place: Place, key: Key) -> None:
        with self._medium():
            entry = await self.buffer(place).get(key)
        offset = book.offsets.get(key)
        if offset is None or offset < book.start or (entry is None and book.damaged):
            return
        expect(entry is not None and entry.offset == offset, f"{key} at {offset} cannot be looked up: {entry}")

    async def retry(self, doubts: Sequence[tuple[Place, Sequence[Row]]]) -> None:
        """Send batches again that were in doubt, as their senders will."""
        for place, rows in doubts:
            await self.write(place, batch_of(rows))

    @contextmanager
    def _medium(self) -> Iterator[None]:
        try:
            yield
        except BsfgError as error:
            if not isinstance(error, UNCERTAIN):
                allowed = self._usual_errors()
                expect(isinstance(error, allowed), f"an unexpected error: {error.code}: {error}")
                raise
            expect(self.faulty, f"an error although the disk is sound: {error.code}: {error}")
            raise MediumFailed(str(error)) from error

    def _usual_errors(self) -> tuple[type[BsfgError], ...]:
        """Give the errors that are answers: refusals, and what faults and damage explain."""
        damaged = any(book.damaged for book in self.ledger.buffers.values())
        extra = [DiskFull, StorageBusy] * self.faulty + [ForeignLog] * damaged
        return (BufferFull, TruncateRefused, *extra)

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except (DiskFull, StorageBusy):
            return


def contradicting(rows: Sequence[Row]) -> FactBatch:
    """Give facts with the keys of others and other bodies."""
    return sealed(altered(batch_of(rows).to_messages()))


def _confirm(frontier: Frontier, through: int | None, ranges: Sequence[Range]) -> None:
    if through is not None:
        frontier.confirm_through(through)
    frontier.confirm(ranges)
