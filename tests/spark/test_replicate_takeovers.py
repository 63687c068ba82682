"""A link that Spark moves between two zones of two nodes each, on PostgreSQL, whose active nodes come and go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.homes import InDatabase
from tests.e2e.producing import seed_of_run
from tests.e2e.twins import Twins
from tests.e2e.zones import until
from tests.spark.nodes import ids, zone_pair
from tests.spark.replicating import WAIT_SECONDS, Pipeline
from tests.spark.test_replicate import CONSUMER, SETTINGS, arrived, sent

from bsfg.ports import Buffer
from bsfg.sdk.producer import AsyncProducer
from bsfg.testing.facts import messages

pytestmark = [pytest.mark.campaign, pytest.mark.soak, pytest.mark.xdist_group("replicate-kills")]

KINDS = ("kill", "pause", "cut")
PAUSE_SECONDS = 0.05
BURST = 2_000
"""Facts that are sent at once before each takeover: more than are on their way in one answer."""


class Producing:
    """A producer at whichever node of the sender is active, which never stops until it is told."""

    def __init__(self, plant: Twins) -> None:
        self._plant, self.sent, self._stopping, self.burst = plant, 0, False, 0

    async def run(self) -> None:
        """Produce, and insist in the end that each fact is where the one before it says it must be."""
        async with AsyncProducer(self._plant.endpoint("producer"), stream="operational") as producer:
            futures = []
            while not self._stopping:
                count, self.burst = 1 + self.burst, 0
                for message in messages(count, first=self.sent, from_zone=self._plant.name):
                    futures.append(await producer.send(message))
                self.sent += count
                await asyncio.sleep(PAUSE_SECONDS)
            assert [(await future).offset for future in futures] == list(range(self.sent))

    def stop(self) -> None:
        """Produce nothing new."""
        self._stopping = True


@pytest.mark.timeout(0)
def test_takeovers_of_both_ends(tmp_path: Path, cleanup: Cleanup, soak_size: Callable[[int, int], int]) -> None:
    """Sender and receiver lose their active nodes to a kill, a pause and a cut: each fact arrives once and in order."""
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    plain = zone_pair(tmp_path)
    plain[1].links += SETTINGS
    plant, enterprise = (Twins.of(zone, cleanup, InDatabase()) for zone in plain)
    for node in enterprise.nodes:
        plant.pulled_by(node, plain[0])
    story = list(zip((plant, enterprise, plant, enterprise), itertools.cycle(KINDS), strict=False))
    story += [(random.choice((plant, enterprise)), random.choice(KINDS)) for _ in range(soak_size(0, 96))]
    asyncio.run(_played(plant, enterprise, story))
    print(plant.told(), enterprise.told(), sep="\n")


async def _played(plant: Twins, enterprise: Twins, story: list[tuple[Twins, str]]) -> None:
    await asyncio.gather(plant.start(), enterprise.start())
    pipeline = Pipeline(enterprise.active, ["--address", enterprise.address, "--replay-backlog", "1000"])
    producing = Producing(plant)
    try:
        await asyncio.to_thread(pipeline.until_moving)
        running = asyncio.create_task(producing.run())
        for zone, how in story:
            await _flows(producing, enterprise)
            producing.burst = BURST
            await zone.disturb(how)
        await _flows(producing, enterprise)
        producing.stop()
        await running
        await _confirmed(plant, producing.sent)
        assert [each[1] for each in sent(plant.active)] == ids(messages(producing.sent, from_zone=plant.name))
        assert arrived(enterprise.active) == sent(plant.active)
        assert await asyncio.to_thread(pipeline.stop) == 0
    finally:
        await asyncio.to_thread(pipeline.kill)


async def _flows(producing: Producing, enterprise: Twins) -> None:
    """Wait until what is produced from now on has arrived."""
    before = producing.sent
    arriving = f"more than {before} facts to arrive"
    await until(lambda: enterprise.active.end(Buffer.FORWARD) > before, arriving, timeout_seconds=WAIT_SECONDS)


async def _confirmed(plant: Twins, count: int) -> None:
    """Wait until the sender knows that everything has arrived."""
    async with plant.admin() as admin:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                found = {view.state.spec.name: view.state for view in await admin.consumers()}
                if found[CONSUMER].checkpoint.committed == count - 1:
                    return
                await asyncio.sleep(0.1)
