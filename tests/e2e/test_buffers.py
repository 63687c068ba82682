"""Buffers that fill up: what is refused, what is dropped with a record, who is told, and when it goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import calm, check_sound
from tests.e2e.zones import Zone, link_to, pair, until
from tests.wire.entries import fetch_entries

from bsfg.batch import FactBatch
from bsfg.errors import BufferFull
from bsfg.fact import Message
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, messages
from bsfg.wire.client import BoundaryClient

TINY = """
[streams.operational]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
"""
FACTS = 100
"""In a batch of about 40 kB."""


def facts(number: int) -> FactBatch:
    """Give batch number so and so."""
    return batch(FACTS, first=FACTS * number, from_zone="plant-a", object_bytes=200)


def all_messages(batches: int) -> list[Message]:
    """Give the messages of so many batches."""
    return messages(FACTS * batches, from_zone="plant-a", object_bytes=200)


class Filling:
    """A producer that fills a store buffer batch by batch."""

    def __init__(self, plant: Zone, client: BoundaryClient) -> None:
        self._plant, self._client = plant, client
        self.taken = 0

    async def append(self) -> None:
        """Append the next batch."""
        await self._client.append("operational", facts(self.taken))
        self.taken += 1

    async def to(self, percent: float) -> None:
        """Append until the buffer is so full."""
        while await self.fill_percent() <= percent:
            await self.append()

    async def fill_percent(self) -> float:
        """Ask how full the buffer is."""
        async with self._plant.admin("viewer") as viewer:
            [buffer] = [each for each in (await viewer.status())["buffers"] if each["buffer"] == "store"]
        return float(buffer["fill_percent"])

    async def to_the_brim(self) -> None:
        """Append until a batch is refused."""
        with pytest.raises(BufferFull):
            while self.taken < 50:
                await self.append()

    async def insist(self) -> None:
        """Append the next batch, again and again until there is room."""
        while True:
            with suppress(BufferFull):
                return await self.append()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("safety", ["", 'safety = "sil"\n'], ids=["reject_new", "sil"])
async def test_full_store_buffer_rejects(safety: str, tmp_path: Path, cleanup: Cleanup) -> None:
    """A full buffer warns at 50 %, alerts at 80 %, refuses at 100 %, and takes facts again once they are confirmed."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=TINY + safety))
    plant.start()
    async with plant.client() as producer:
        filling = Filling(plant, producer)
        for percent, severity in ((50, "warning"), (80, "alert")):
            assert not plant.events("alert_raised", alert="buffer_fill", severity=severity)
            await filling.to(percent)
            await plant.seen("alert_raised", alert="buffer_fill", about="operational/store", severity=severity)
        await filling.to_the_brim()
        assert plant.end(Buffer.STORE) == FACTS * filling.taken
        assert not plant.gaps(Buffer.STORE)
        enterprise.start()
        for _ in range(30):
            await filling.insist()
        await calm(plant, enterprise)
    assert not plant.gaps(Buffer.STORE) and not enterprise.gaps(Buffer.FORWARD)
    assert enterprise.messages(Buffer.FORWARD) == all_messages(filling.taken)


async def test_full_store_buffer_drops_the_oldest(tmp_path: Path, cleanup: Cleanup) -> None:
    """With drop_oldest nothing is refused; what went is a counted gap record on both sides, and the rest arrives."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=TINY + 'overflow = "drop_oldest"\n'))
    plant.start()
    async with plant.client() as producer:
        for number in range(40):
            await producer.append("operational", facts(number))
    dropped = plant.log(Buffer.STORE).view().start
    assert 0 < dropped < 40 * FACTS
    assert {gap.reason for gap in plant.gaps(Buffer.STORE)} == {GapReason.EVICTED}
    await plant.seen("alert_raised", alert="buffer_fill")
    enterprise.start()
    await until(lambda: enterprise.end(Buffer.FORWARD) == 40 * FACTS - dropped)
    # What an answer brought is stored first, then what it said is missing, and only then is either confirmed.
    await until(lambda: sum(gap.last - gap.first + 1 for gap in enterprise.gaps(Buffer.FORWARD)) == dropped)
    assert enterprise.messages(Buffer.FORWARD) == all_messages(40)[dropped:]
    plant.stop()
    enterprise.stop()
    check_sound(plant, enterprise)


def test_sil_forbids_drop_oldest(tmp_path: Path) -> None:
    """A node whose safety stream would drop facts does not start, and says which line is wrong."""
    plant, _ = pair(tmp_path, streams=TINY + 'safety = "sil"\noverflow = "drop_oldest"\n')
    command = [sys.executable, "-m", "bsfg.cli", "node", "-c", "zone.toml"]
    done = subprocess.run(command, cwd=plant.folder, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"streams.operational.overflow" in done.stderr and b"reject_new" in done.stderr


async def test_full_forward_buffer_pauses_pulling(tmp_path: Path, cleanup: Cleanup) -> None:
    """Facts that nobody has read are never dropped: pulling pauses, and goes on as soon as they are read."""
    small = TINY.replace("store_capacity", "forward_capacity").replace('max_batch = "500kB"', "")
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=small))
    enterprise.links = link_to(plant, more="batch_facts = 50")
    enterprise.write()
    enterprise.start()
    async with enterprise.admin() as operator:
        await operator.create_consumer(ConsumerSpec("app-historian", "operational", Buffer.FORWARD))
    plant.start()
    async with plant.client() as producer:
        for number in range(40):
            await producer.append("operational", facts(number))
    paused = await enterprise.seen("link_paused", link="from-plant-a")
    assert paused["code"] == "buffer_full"
    await enterprise.seen("alert_raised", alert="buffer_fill", about="operational/forward", severity="alert")
    held = enterprise.end(Buffer.FORWARD)
    assert 0 < held < 40 * FACTS
    assert enterprise.log(Buffer.FORWARD).view().start == 0
    assert not enterprise.events("link_held")
    read: list[Message] = []
    async with enterprise.client("consumer") as consumer:
        while len(read) < 40 * FACTS:
            fetched = await fetch_entries(consumer, "app-historian", limit=150, wait_seconds=1)
            read += [entry.message for entry in fetched.entries]
            await consumer.confirm("app-historian", Confirmation(through=fetched.next_offset - 1))
    assert read == all_messages(40)
    await calm(plant, enterprise)
    assert not enterprise.gaps(Buffer.FORWARD)
