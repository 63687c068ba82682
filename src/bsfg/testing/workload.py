"""Work for a storage: a script that touches everything once, and random steps by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from bsfg.batch import FactBatch
from bsfg.ports import ConsumerSpec, GapRecord
from bsfg.retention import GapReason
from bsfg.testing.driver import CROWDED, RECEIVED, SENT, Driver, contradicting
from bsfg.testing.ledger import CursorLedger, Place
from bsfg.testing.observed import batch_of

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
