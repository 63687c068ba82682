"""Consumers of a zone's node: slow ones, and those that confirm in any order."""

from __future__ import annotations

import asyncio

import pytest
from tests.e2e.producing import Insistent, calm, expected
from tests.e2e.zones import Zone, until
from tests.wire.entries import fetch_entries

from bsfg.errors import BsfgError
from bsfg.fact import Message
from bsfg.frontier import MAX_OPEN_RANGES
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.testing.facts import batch


async def test_slow_consumer(zones: tuple[Zone, Zone]) -> None:
    """An application that is far behind delays nobody, is shown with its backlog, and gets everything in order."""
    plant, enterprise = zones
    enterprise.start()
    async with enterprise.admin() as operator:
        await operator.create_consumer(ConsumerSpec("app-slow", "operational", Buffer.FORWARD))
    plant.start()
    producer = Insistent(plant, 3)
    producing = asyncio.create_task(producer.run())
    read: list[Message] = []
    async with enterprise.client("consumer") as consumer, enterprise.admin("viewer") as viewer:
        while producer.count < 3_000:
            fetched = await fetch_entries(consumer, "app-slow", limit=7, wait_seconds=5)
            read += [entry.message for entry in fetched.entries]
            await asyncio.sleep(0.05)
            await consumer.confirm("app-slow", Confirmation(through=fetched.next_offset - 1))
        producer.stop()
        await producing
        await calm(plant, enterprise)
        assert len(read) < producer.count
        [shown] = [each for each in (await viewer.status())["consumers"] if each["name"] == "app-slow"]
        assert shown["backlog"] == producer.count - len(read)
        enterprise.kill()
        enterprise.start()
        while len(read) < producer.count:
            fetched = await fetch_entries(consumer, "app-slow", limit=1_000, wait_seconds=5)
            read += [entry.message for entry in fetched.entries]
            await consumer.confirm("app-slow", Confirmation(through=fetched.next_offset - 1))
    assert [message.envelope.message_id for message in read] == [id for _, id, _ in expected(producer)]


async def test_confirmations_in_any_order(zones: tuple[Zone, Zone]) -> None:
    """The frontier stops at the first gap, remembers what lies beyond it over a kill, and closes it when it can."""
    plant, _ = zones
    plant.start()
    async with plant.client() as producer:
        await producer.append("operational", batch(100, from_zone="plant-a"))
    async with plant.client("enterprise-bsfg") as peer:

        async def confirm(*ranges: tuple[int, int]) -> int:
            return await peer.confirm("enterprise.operational", Confirmation(ranges=ranges))

        assert await confirm((20, 29), (50, 59)) == -1
        assert await confirm((0, 9)) == 9
        assert await confirm((40, 45), (30, 35)) == 9
        plant.kill()
        plant.start()
        assert await confirm((10, 15)) == 15
        assert await confirm((16, 19)) == 35
        assert await confirm((0, 5)) == 35
        fetched = await fetch_entries(peer, "enterprise.operational", limit=1)
        assert fetched.entries[0].offset == 36
        assert await confirm((36, 39), (46, 49)) == 59
        await refused(peer.confirm("enterprise.operational", Confirmation(ranges=[(99, 100)])), "offset_out_of_range")
        await refused(peer.confirm("enterprise.operational", Confirmation(through=60, log_id="ab" * 16)), "foreign_log")
        assert await confirm((98, 99)) == 59
    assert plant.end(Buffer.STORE) == 100


async def test_too_many_open_ranges(zones: tuple[Zone, Zone]) -> None:
    """A consumer that leaves too many holes is told so, and nothing of that confirmation counts."""
    plant, _ = zones
    plant.start()
    count = 2 * MAX_OPEN_RANGES + 10
    async with plant.client() as producer:
        await producer.append("operational", batch(count, from_zone="plant-a"))
    islands = [(offset, offset) for offset in range(1, count, 2)]
    async with plant.client("enterprise-bsfg") as peer:
        await refused(peer.confirm("enterprise.operational", Confirmation(ranges=islands)), "too_many_ranges")
        assert await peer.confirm("enterprise.operational", Confirmation(ranges=[(0, 0)])) == 0
        assert await peer.confirm("enterprise.operational", Confirmation(ranges=islands[:1000])) == 1


async def refused(call: object, code: str) -> None:
    """Insist that a call is refused with a code."""
    with pytest.raises(BsfgError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code == code


async def test_retired_consumer(zones: tuple[Zone, Zone]) -> None:
    """A peer that an operator has retired holds its link; what it missed is listed where it was said."""
    plant, enterprise = zones
    plant.start()
    async with plant.client() as producer:
        await producer.append("operational", batch(50, from_zone="plant-a"))
    async with plant.admin() as operator:
        [missed] = await operator.retire_consumer("enterprise.operational", "the line was sold")
    assert (missed.first, missed.last, missed.reason) == (0, 49, "consumer_retired")
    enterprise.start()
    held = await enterprise.seen("link_held")
    assert held["code"] == "consumer_retired" and "the line was sold" in held["detail"]
    await until(lambda: plant.events("consumer_retired", reason="the line was sold"))
