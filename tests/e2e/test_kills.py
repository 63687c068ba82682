"""Nodes are killed at random moments while producers append on both sides; nothing is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import Insistent, calm, check_sound, expected, history, seed_of_run
from tests.e2e.zones import Zone, pair, until

from bsfg.ports import Buffer

pytestmark = pytest.mark.campaign

SMALL = """
[streams.operational]
store_capacity = "300kB"
max_batch = "200kB"
max_object = "100kB"
"""


class Killer:
    """Kills one node or both, again and again, each time in the middle of a handoff."""

    def __init__(self, plant: Zone, enterprise: Zone, random: Random) -> None:
        self.plant, self.enterprise, self._random = plant, enterprise, random
        self.kills = 0

    async def run(self, kills: int) -> None:
        """Kill until so many nodes were killed."""
        while self.kills < kills:
            victims = self._random.choice(([self.plant], [self.enterprise], [self.plant, self.enterprise]))
            await self._handoff_seen()
            await asyncio.sleep(self._random.uniform(0, 0.1))
            for victim in victims:
                victim.kill()
                self.kills += 1
            await asyncio.sleep(self._random.choice((0, self._random.uniform(0, 0.2))))
            for victim in victims:
                await asyncio.to_thread(victim.start)

    async def _handoff_seen(self) -> None:
        """Wait until facts arrive on one of the sides: only then is there something to interrupt."""
        before = self._ends()
        await until(lambda: self._ends() != before, "any facts to arrive")

    def _ends(self) -> tuple[int, int]:
        return self.plant.end(Buffer.FORWARD), self.enterprise.end(Buffer.FORWARD)


async def campaign(plant: Zone, enterprise: Zone, seed: int, kills: int) -> tuple[Insistent, Insistent]:
    """Kill nodes while producers append on both sides; give the producers when everything has calmed down."""
    print(f"BSFG_SEED={seed}")
    plant.start()
    enterprise.start()
    producers = Insistent(plant, seed), Insistent(enterprise, seed + 1)
    killer = Killer(plant, enterprise, Random(seed))
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    killing = asyncio.create_task(killer.run(kills))
    done, _ = await asyncio.wait([killing, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()
    for producer in producers:
        producer.stop()
    await asyncio.gather(*tasks)
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    facts, repeats = (sum(getattr(each, name) for each in producers) for name in ("count", "repeated"))
    print(f"{killer.kills} kills, {facts} facts, {repeats} repeats")
    plant.stop()
    enterprise.stop()
    check_sound(plant, enterprise)
    return producers


def check_received(receiver: Zone, producer: Insistent) -> None:
    """Insist that a receiver has what the other side's producer said, once, in order and whole."""
    assert history(receiver, Buffer.FORWARD) == expected(producer)
    origins = [entry.origin.offset for entry in receiver.entries(Buffer.FORWARD) if entry.origin]
    assert origins == list(range(producer.count))


@pytest.mark.soak
async def test_kills_at_random_moments(zones: tuple[Zone, Zone], soak_size: Callable[[int, int], int]) -> None:
    """Sender, receiver or both are killed in mid-batch; afterwards both sides are equal, in order and sound."""
    plant, enterprise = zones
    at_plant, at_enterprise = await campaign(plant, enterprise, seed_of_run(), soak_size(30, 1_000))
    assert history(plant, Buffer.STORE) == expected(at_plant)
    assert history(enterprise, Buffer.STORE) == expected(at_enterprise)
    check_received(enterprise, at_plant)
    check_received(plant, at_enterprise)


@pytest.mark.soak
async def test_kills_while_confirmed_facts_leave(
    tmp_path: Path, cleanup: Cleanup, soak_size: Callable[[int, int], int]
) -> None:
    """With store buffers so small that they live from what is confirmed, still nothing is lost and nothing doubled."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=SMALL))
    at_plant, at_enterprise = await campaign(plant, enterprise, seed_of_run() + 100, soak_size(14, 500))
    for zone in (plant, enterprise):
        assert zone.log(Buffer.STORE).view().start > 0, "confirmed facts have left"
        assert not zone.gaps(Buffer.STORE)
    check_received(enterprise, at_plant)
    check_received(plant, at_enterprise)
