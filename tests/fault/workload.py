"""Work for a storage: calls that go into a ledger, a script that touches everything once, and random steps by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from tests.fault.ledger import (
    BufferLedger,
    CursorLedger,
    Ledger,
    Place,
    Row,
    batch_of,
    expect,
    identity,
    observe,
    rows_of,
    shown,
)

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
from bsfg.retention import GapReason, Overflow, Policy
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import altered, messages, sealed

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
        place = cursor.spec.stream, cursor.spec.buffer
        book = self.ledger.book(place)
        with self.ledger.lock:
            book.confirmed_before = max(book.confirmed_before, self.ledger.confirmed_through(place))
            cursor.may_be_retired = True
        with self._unless_full(), self._medium():
            gaps = await self.storage.cursors.retire(name, "gone for good")
            with self.ledger.lock:
                cursor.retired_reason, cursor.may_be_retired = "gone for good", False
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
            await self.buffer(place).record_gaps([gap])
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


PLACES: tuple[Place, ...] = (SENT, RECEIVED, CROWDED)
BIG_OBJECT_BYTES = 12_000

Step = Callable[[Driver, Random], Awaitable[None]]


def consumer(name: str, place: Place, *, required: bool = True) -> ConsumerSpec:
    """Describe a consumer of a buffer from its beginning."""
    return ConsumerSpec(name, place[0], place[1], required=required)


async def script(driver: Driver) -> None:
    """Touch everything once, in an order that leaves something to lose at each point."""
    random = Random(7)
    await driver.open_buffers()
    await driver.create(consumer("enterprise", SENT))
    await driver.create(consumer("historian", RECEIVED, required=False))
    for place in PLACES:
        first = driver.fresh(3)
        await driver.write(place, first)
        await driver.write(place, FactBatch.concat([first.slice(1, 1), driver.fresh(2), first.slice(0, 1)]))
        await driver.write(place, contradicting(list(driver.ledger.book(place).rows.values())[:2]))
    twin = driver.fresh(1)
    await driver.write(SENT, FactBatch.concat([twin, driver.fresh(1), twin]))
    await driver.commit("enterprise", through=1)
    await driver.commit("enterprise", ranges=[(3, 3), (5, 6)])
    await driver.record_gap(RECEIVED, GapRecord(2, 3, GapReason.SKIPPED, 1, "left out", "plant"))
    for _ in range(3):
        await driver.write(SENT, driver.fresh(2, object_bytes=BIG_OBJECT_BYTES))
        await driver.write(CROWDED, driver.fresh(3, object_bytes=BIG_OBJECT_BYTES))
    await driver.check()
    await together(driver, random)
    await driver.commit("enterprise", ranges=[(2, 2), (4, 4)])
    await driver.truncate(SENT, 5)
    await driver.write(SENT, driver.fresh(4, object_bytes=BIG_OBJECT_BYTES))
    await driver.commit("enterprise", through=driver.ledger.book(SENT).end - 1)
    await driver.truncate(SENT, driver.ledger.book(SENT).end - 2)
    await driver.write(SENT, driver.repeated(SENT, random, 4))
    await driver.retain(RECEIVED, 120)
    await driver.retain(CROWDED, 4_000)
    await driver.create(consumer("auditor", CROWDED))
    await driver.write(CROWDED, driver.fresh(2))
    await driver.retire("auditor")
    await driver.release(RECEIVED, random)
    await driver.write(RECEIVED, driver.fresh(2))
    await driver.check()


async def work(driver: Driver, random: Random, steps: int, *, alone: bool = False) -> None:
    """Do some random steps, most of them writes; ``alone`` means one call at a time."""
    kinds, weights = zip(*((step, weight) for step, weight in STEPS if not (alone and step is together)), strict=True)
    for step in random.choices(kinds, weights, k=steps):
        driver.clock.advance(random.choice((0, 0.001, 1)))
        await step(driver, random)


async def write_some(driver: Driver, random: Random) -> None:
    """Write a batch: new facts, known ones, contradictions, and repeats inside the batch."""
    place = random.choice(PLACES)
    await driver.write(place, some_facts(driver, place, random))


def some_facts(driver: Driver, place: Place, random: Random) -> FactBatch:
    """Make a batch of a few new facts, in which known ones may be mixed."""
    object_bytes = BIG_OBJECT_BYTES if random.random() < 0.25 else random.choice((60, 300, 700))
    parts = [driver.fresh(random.choice((1, 1, 2, 5)), object_bytes=object_bytes)]
    if random.random() < 0.3:
        parts.append(driver.repeated(place, random, 2))
    if random.random() < 0.2:
        parts.append(parts[0].slice(0, 1))
    known = list(driver.ledger.book(place).rows.values())
    if known and random.random() < 0.2:
        parts.append(contradicting([random.choice(known)]))
    whole = FactBatch.concat(parts)
    return whole.take(random.sample(range(len(whole)), len(whole))) if random.random() < 0.3 else whole


async def write_many(driver: Driver, random: Random) -> None:
    """Write a batch of very many small facts."""
    await driver.write(random.choice(PLACES), driver.fresh(200, object_bytes=40))


async def together(driver: Driver, random: Random) -> None:
    """Let several callers write, read and confirm at the same time, two of them the same facts."""
    place = random.choice(PLACES)
    same = driver.fresh(2)
    calls: list[Awaitable[object]] = [
        driver.write(place, same),
        driver.write(place, FactBatch.concat([driver.fresh(1), same])),
        driver.write(random.choice(PLACES), driver.fresh(1)),
        driver.glimpse(place, random),
        driver.write(place, driver.fresh(3)),
        driver.glimpse(place, random),
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def confirm_some(driver: Driver, random: Random) -> None:
    """Confirm for one consumer, in order or out of order."""
    open_cursors = [cursor for cursor in driver.ledger.cursors.values() if cursor.created and not cursor.retired_reason]
    if not open_cursors:
        await create_one(driver, random)
        return
    cursor = random.choice(open_cursors)
    end = driver.ledger.book(_place(cursor)).end
    first = cursor.lower.committed + 1
    if first >= end:
        return
    if random.random() < 0.5:
        await driver.commit(cursor.spec.name, through=random.randrange(first, end))
        return
    starts = sorted(random.choices(range(first, end), k=3))
    ranges = [(start, min(end - 1, start + random.randrange(3))) for start in starts]
    await driver.commit(cursor.spec.name, ranges=ranges)


def _place(cursor: CursorLedger) -> Place:
    return cursor.spec.stream, cursor.spec.buffer


async def create_one(driver: Driver, random: Random) -> None:
    """Create a consumer, or ask again for one that exists."""
    name = random.choice("abcde")
    known = driver.ledger.cursors.get(name)
    if known is None:
        await driver.create(consumer(name, random.choice(PLACES), required=random.random() < 0.6))
    elif not known.retired_reason:
        await driver.create(known.spec)


async def retire_one(driver: Driver, random: Random) -> None:
    """Retire a consumer now and then."""
    names = [name for name, cursor in driver.ledger.cursors.items() if cursor.created and not cursor.retired_reason]
    if len(names) > 2:
        await driver.retire(random.choice(names))


async def truncate_some(driver: Driver, random: Random) -> None:
    """Truncate as far as is allowed, or less, or a little too far."""
    place = random.choice(PLACES)
    limit = min(driver.ledger.confirmed_through(place) + 1, driver.ledger.book(place).end)
    if limit > 0:
        await driver.truncate(place, random.choice((limit, random.randint(0, limit))))


async def retain_some(driver: Driver, random: Random) -> None:
    """Enforce retention after a while."""
    await driver.retain(random.choice(PLACES), random.choice((1, 61, 61, 5_000)))


async def note_gap(driver: Driver, random: Random) -> None:
    """Record a gap of another zone's offsets, or one of the buffer's own."""
    place = random.choice(PLACES)
    end = driver.ledger.book(place).end
    first = random.randrange(max(1, end))
    if end and random.random() < 0.5:
        await driver.record_gap(place, GapRecord(first, first, GapReason.SKIPPED, 1, "not wanted"))
    else:
        await driver.record_gap(place, GapRecord(first, first + 2, GapReason.QUARANTINED, 1, "refused", "plant"))


async def release_one(driver: Driver, random: Random) -> None:
    """Release one quarantined fact."""
    await driver.release(RECEIVED, random)


async def read_some(driver: Driver, random: Random) -> None:
    """Read a part of a buffer."""
    await driver.glimpse(random.choice(PLACES), random)


async def check_all(driver: Driver, random: Random) -> None:
    """Hold everything against the ledger."""
    del random
    await driver.check()


async def resend(driver: Driver, random: Random) -> None:
    """Send a whole batch of known facts again."""
    place = random.choice(PLACES)
    known = list(driver.ledger.book(place).rows.values())
    if known:
        await driver.write(place, batch_of(random.sample(known, min(len(known), 10))))


STEPS: tuple[tuple[Step, int], ...] = (
    (write_some, 40),
    (write_many, 2),
    (together, 6),
    (confirm_some, 14),
    (create_one, 5),
    (retire_one, 1),
    (truncate_some, 6),
    (retain_some, 4),
    (note_gap, 4),
    (release_one, 2),
    (read_some, 6),
    (check_all, 4),
    (resend, 4),
)
