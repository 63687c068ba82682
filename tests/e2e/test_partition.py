"""The network between two zones is cut, stalls, crawls or breaks in the middle of a frame; the zones go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import Insistent, calm, check_sound, expected, history, seed_of_run
from tests.e2e.proxy import Proxy
from tests.e2e.zones import Zone, link_to, pair, settled, until

from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages

QUICK = """
request_timeout = "1s"
lost_after_failures = 1
batch_facts = 200
"""
ROUND = ["normal", "autonomous", "reconciliation", "normal"]


class Divided:
    """Two zones with a network between them that does what the test wants."""

    def __init__(
        self, root: Path, cleanup: Cleanup, more: str = QUICK, streams: str = "[streams.operational]\n"
    ) -> None:
        plant, enterprise = map(cleanup.zone, pair(root, streams=streams))
        self.plant, self.enterprise = plant, enterprise
        self.to_plant = cleanup.closing(Proxy(plant.port))
        self.to_enterprise = cleanup.closing(Proxy(enterprise.port))
        plant.links = link_to(enterprise, port=self.to_enterprise.port, more=more)
        enterprise.links = link_to(plant, port=self.to_plant.port, more=more)
        for zone in (plant, enterprise):
            zone.write()
            zone.start()

    @property
    def proxies(self) -> tuple[Proxy, Proxy]:
        """Both directions of the network."""
        return self.to_plant, self.to_enterprise

    def gates(self) -> list[tuple[Zone, str, str]]:
        """All four gates: each zone as receiver of the other, and as its sender."""
        plant, enterprise = self.plant, self.enterprise
        return [
            (plant, "from-enterprise", "receiver"),
            (plant, "enterprise", "sender"),
            (enterprise, "from-plant-a", "receiver"),
            (enterprise, "plant-a", "sender"),
        ]

    async def all_in(self, mode: str) -> None:
        """Wait until all four gates are in a mode."""
        await asyncio.gather(*(zone.mode(link, mode, side) for zone, link, side in self.gates()))

    async def committed(self) -> tuple[int, int]:
        """Give how far each zone's facts are confirmed by the other."""
        found = []
        for zone, other in ((self.plant, self.enterprise), (self.enterprise, self.plant)):
            async with zone.admin("viewer") as admin:
                [view] = await admin.consumers()
            assert view.state.spec.name == f"{other.name}.operational"
            found.append(view.state.checkpoint.committed)
        return found[0], found[1]


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_gates_turn_and_appends_go_on(how: str, tmp_path: Path, cleanup: Cleanup) -> None:
    """Both sides of both links notice a partition, freeze, and come back through reconciliation to normal."""
    divided = Divided(tmp_path, cleanup)
    plant, enterprise = divided.plant, divided.enterprise
    async with plant.client() as at_plant, enterprise.client() as at_enterprise:
        await at_plant.append("operational", batch(400, from_zone="plant-a"))
        await at_enterprise.append("operational", batch(300, seed=1, from_zone="enterprise"))
        await asyncio.gather(settled(plant, enterprise), settled(enterprise, plant))
        await divided.all_in("normal")
        await until(lambda: divided.to_plant.accepted and divided.to_enterprise.accepted)
        for proxy in divided.proxies:
            getattr(proxy, how)()
        await divided.all_in("autonomous")
        frozen = await divided.committed()
        # Nobody who appends notices anything.
        await at_plant.append("operational", batch(800, first=400, from_zone="plant-a"))
        await at_enterprise.append("operational", batch(500, seed=1, first=300, from_zone="enterprise"))
        assert await divided.committed() == frozen == (399, 299)
        assert (plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)) == (300, 400)
        for proxy in divided.proxies:
            proxy.mend()
        await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
        await divided.all_in("normal")
    for zone, link, side in divided.gates():
        assert zone.modes(link, side)[-4:] == ROUND, (zone.name, link, side, zone.modes(link, side))
    plant.stop()
    enterprise.stop()
    assert enterprise.messages(Buffer.FORWARD) == messages(1200, from_zone="plant-a")
    assert plant.messages(Buffer.FORWARD) == messages(800, seed=1, from_zone="enterprise")


class Weather:
    """A network that misbehaves in a new way every moment."""

    def __init__(self, divided: Divided, random: Random) -> None:
        self._divided, self._random = divided, random
        self.seen: list[str] = []

    async def run(self, spells: int) -> None:
        """Let so many spells of bad weather pass."""
        for _ in range(spells):
            await asyncio.sleep(self._random.uniform(0, 0.3))
            proxy = self._random.choice(self._divided.proxies)
            how = self._random.choice(("cut", "stall", "throttle", "reset"))
            self.seen.append(how)
            if how == "throttle":
                proxy.throttle(self._random.choice((20_000, 200_000)))
            elif how == "reset":
                proxy.reset_after(self._random.randint(1, 60_000))
            else:
                getattr(proxy, how)()
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
            proxy.mend()


@pytest.mark.campaign
@pytest.mark.soak
async def test_bad_network(tmp_path: Path, cleanup: Cleanup, soak_size: Callable[[int, int], int]) -> None:
    """Whatever the network does in whatever order, both sides end up equal, in order and sound."""
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    divided = Divided(tmp_path, cleanup)
    plant, enterprise = divided.plant, divided.enterprise
    producers = Insistent(plant, seed), Insistent(enterprise, seed + 1)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    weather = Weather(divided, Random(seed))
    await weather.run(soak_size(10, 1_000))
    for producer in producers:
        producer.stop()
    await asyncio.gather(*tasks)
    assert not any(producer.repeated for producer in producers), "appends go on whatever the network does"
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    plant.stop()
    enterprise.stop()
    check_sound(plant, enterprise)
    assert history(plant, Buffer.STORE) == history(enterprise, Buffer.FORWARD) == expected(producers[0])
    assert history(enterprise, Buffer.STORE) == history(plant, Buffer.FORWARD) == expected(producers[1])
    print(f"{weather.seen}, {sum(each.count for each in producers)} facts")


async def test_connection_that_the_network_forgot(tmp_path: Path, cleanup: Cleanup) -> None:
    """A connection that swallows everything is given up as soon as a call runs out of time and a new one works."""
    divided = Divided(tmp_path, cleanup)
    plant, enterprise = divided.plant, divided.enterprise
    await divided.all_in("normal")
    for proxy in divided.proxies:
        proxy.forget()
    async with plant.client() as at_plant, enterprise.client() as at_enterprise:
        await at_plant.append("operational", batch(10, from_zone="plant-a"))
        await at_enterprise.append("operational", batch(10, seed=1, from_zone="enterprise"))
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    # One call ran out of time; the next one went over a new connection.
    for zone in (plant, enterprise):
        assert [event["code"] for event in zone.events("fetch_failed")[-1:]] == ["timed_out"]


async def test_crawling_link(tmp_path: Path, cleanup: Cleanup) -> None:
    """Over a link that cannot carry a whole answer in time, less is asked for, and the backlog arrives."""
    divided = Divided(tmp_path, cleanup, 'request_timeout = "1s"', '[streams.operational]\nforward_capacity = "16MiB"')
    plant, enterprise = divided.plant, divided.enterprise
    await divided.all_in("normal")
    divided.to_plant.throttle(110_000)
    async with plant.client() as producer:
        await producer.append("operational", batch(4_000, from_zone="plant-a"))
    await enterprise.seen("fetch_failed", code="timed_out")
    await settled(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(4_000, from_zone="plant-a")
