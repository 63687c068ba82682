"""Plant, IDMZ and enterprise: facts travel over a relay, and beside it directly, and are everywhere once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import Insistent, check_sound, expected, history
from tests.e2e.zones import Zone, certificates, link_to, pair, peer, serve, until

from bsfg.journey.link import NOT_ASKED_FOR, NOT_CARRIED, NOT_SERVED, RETURNING
from bsfg.ports import Buffer, GapRecord
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, message, sealed

STREAMS = """
[streams.operational]
[streams.lossy]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
overflow = "drop_oldest"
"""
RELAYED = 'buffer = "forward"'
BOTH = 'buffers = ["store", "forward"]'


class Chain:
    """Three zones in a row; with ``direct``, the outer two also pull from each other."""

    def __init__(self, root: Path, cleanup: Cleanup, *, direct: bool = False) -> None:
        certs = certificates(root, "plant-a", "idmz", "enterprise")
        zones = [Zone(name, root, certs, streams=STREAMS) for name in ("plant-a", "idmz", "enterprise")]
        self.plant, self.idmz, self.enterprise = plant, idmz, enterprise = zones
        idmz.links = link_to(plant) + link_to(enterprise)
        idmz.identities = peer("plant-a") + peer("enterprise")
        idmz.serve = serve("plant-a", BOTH) + serve("enterprise", BOTH)
        for zone, other in ((plant, enterprise), (enterprise, plant)):
            zone.links = link_to(idmz, name="over-idmz", more=RELAYED)
            zone.identities = peer("idmz", f'relay_for = ["{other.name}"]')
            zone.serve = serve("idmz")
            if direct:
                zone.links += link_to(other)
                zone.identities += peer(other.name)
                zone.serve += serve(other.name)
        for zone in zones:
            zone.write()
            cleanup.zone(zone).start()

    @property
    def zones(self) -> tuple[Zone, Zone, Zone]:
        """All three."""
        return self.plant, self.idmz, self.enterprise


def of(found: list[tuple[str, str, bytes]], zone: str) -> list[tuple[str, str, bytes]]:
    """Give the part of a history that one zone said."""
    return [row for row in found if row[0] == zone]


def covered(gaps: list[GapRecord]) -> set[int]:
    """Give every offset that gap records name."""
    return {offset for gap in gaps for offset in range(gap.first, gap.last + 1)}


@pytest.mark.parametrize("direct", [False, True], ids=["relay alone", "relay and direct path"])
async def test_facts_are_everywhere_once(direct: bool, tmp_path: Path, cleanup: Cleanup) -> None:
    """Each zone's facts reach the other two once, in order, with zone, id and digest as they were said."""
    chain = Chain(tmp_path, cleanup, direct=direct)
    plant, idmz, enterprise = chain.zones
    producers = Insistent(plant, 1), Insistent(enterprise, 2)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    for victim in chain.zones:
        before = enterprise.end(Buffer.FORWARD), plant.end(Buffer.FORWARD)
        await until(lambda: (enterprise.end(Buffer.FORWARD), plant.end(Buffer.FORWARD)) > before)  # noqa: B023
        victim.kill()
        await asyncio.to_thread(victim.start)
    for producer in producers:
        producer.stop()
    await asyncio.gather(*tasks)
    said = {producer.zone.name: expected(producer) for producer in producers}
    await until(lambda: len(of(history(enterprise, Buffer.FORWARD), "plant-a")) == len(said["plant-a"]))
    await until(lambda: len(of(history(plant, Buffer.FORWARD), "enterprise")) == len(said["enterprise"]))
    await until(lambda: idmz.end(Buffer.FORWARD) == sum(map(len, said.values())))
    for zone in chain.zones:
        zone.stop()
    check_sound(*chain.zones)
    at_idmz = history(idmz, Buffer.FORWARD)
    assert of(at_idmz, "plant-a") == said["plant-a"]
    assert of(at_idmz, "enterprise") == said["enterprise"]
    assert history(enterprise, Buffer.FORWARD) == said["plant-a"]
    assert history(plant, Buffer.FORWARD) == said["enterprise"]
    for zone in (plant, enterprise):
        returned = [gap for gap in zone.gaps(Buffer.FORWARD) if gap.detail.startswith(RETURNING)]
        assert returned and {(gap.reason, gap.origin_zone) for gap in returned} == {(GapReason.SKIPPED, "idmz")}
        origins = {entry.origin.zone for entry in zone.entries(Buffer.FORWARD) if entry.origin}
        assert origins <= ({"idmz", "plant-a", "enterprise"} if direct else {"idmz"})


async def test_gap_records_over_two_hops(tmp_path: Path, cleanup: Cleanup) -> None:
    """What a plant had to drop while nobody pulled is known in the enterprise, with the plant's own offsets."""
    chain = Chain(tmp_path, cleanup)
    plant, idmz, enterprise = chain.zones
    idmz.kill()
    async with plant.client() as producer:
        for number in range(60):
            await producer.append("lossy", batch(100, first=100 * number, from_zone="plant-a", object_bytes=200))
    evicted = covered(plant.gaps(Buffer.STORE, "lossy"))
    assert evicted and evicted == set(range(len(evicted)))
    idmz.start()
    await until(lambda: enterprise.end(Buffer.FORWARD, "lossy") == 6000 - len(evicted))
    for zone in (idmz, enterprise):
        await until(lambda: covered(zone.gaps(Buffer.FORWARD, "lossy")) == evicted)  # noqa: B023
        kinds = {(gap.reason, gap.origin_zone) for gap in zone.gaps(Buffer.FORWARD, "lossy")}
        assert kinds == {(GapReason.EVICTED, "plant-a")}
    kept = [id for _, id, _ in history(plant, Buffer.STORE, "lossy")]
    assert [id for _, id, _ in history(enterprise, Buffer.FORWARD, "lossy")] == kept


async def test_link_that_carries_some_zones_only(tmp_path: Path, cleanup: Cleanup) -> None:
    """Facts for other zones are left out of a link, and what was left out is a reported range; the frontier passes."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = link_to(plant, more='carry_only = ["enterprise"]')
    enterprise.write()
    plant.start()
    enterprise.start()
    zones = ("enterprise", "lab", "lab", "enterprise", "enterprise", "lab")
    facts = [message(f"m-{n}", n, from_zone="plant-a", to_zone=zones[n % 6]) for n in range(60)]
    async with plant.client() as producer:
        for start in range(0, 60, 7):
            await producer.append("operational", sealed(facts[start : start + 7]))
    carried = [fact for fact in facts if fact.envelope.to_zone == "enterprise"]
    await until(lambda: enterprise.messages(Buffer.FORWARD) == carried)
    left_out = {offset for offset, fact in enumerate(facts) if fact.envelope.to_zone == "lab"}
    await until(lambda: left_out <= covered(enterprise.gaps(Buffer.FORWARD)))
    kinds = {(gap.reason, gap.detail, gap.origin_zone) for gap in enterprise.gaps(Buffer.FORWARD)}
    assert kinds == {(GapReason.SKIPPED, NOT_CARRIED, "plant-a")}
    async with plant.admin("viewer") as viewer:
        while (await viewer.consumers())[0].state.checkpoint.committed < 59:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)  # confirmations follow what is stored


async def test_link_that_carries_some_facts_only(tmp_path: Path, cleanup: Cleanup) -> None:
    """What the receiver does not ask for and what the sender does not serve are left out, each with its reason."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = link_to(plant, more='subjects = ["asset:press-*"]')
    plant.serve = serve("enterprise", 'predicates = ["alarm_*"]')
    for zone in (plant, enterprise):
        zone.write()
        zone.start()
    said = [
        message(
            f"m-{n}",
            n,
            from_zone="plant-a",
            subject=f"asset:{'press' if n % 3 else 'oven'}-{n % 2}",
            predicate="alarm_raised" if n % 2 else "temperature_measured",
        )
        for n in range(60)
    ]
    async with plant.client() as producer:
        for start in range(0, 60, 7):
            await producer.append("operational", sealed(said[start : start + 7]))
    await until(lambda: enterprise.messages(Buffer.FORWARD) == [each for n, each in enumerate(said) if n % 3 and n % 2])
    expected_out = {NOT_SERVED: set(range(0, 60, 2)), NOT_ASKED_FOR: {n for n in range(60) if n % 2 and not n % 3}}

    def left_out() -> dict[str, set[int]]:
        gaps = enterprise.gaps(Buffer.FORWARD)
        return {detail: covered([gap for gap in gaps if gap.detail == detail]) for detail in expected_out}

    await until(lambda: left_out() == expected_out)
    kinds = {(gap.reason, gap.origin_zone) for gap in enterprise.gaps(Buffer.FORWARD)}
    assert kinds == {(GapReason.SKIPPED, "plant-a")}
    async with plant.admin("viewer") as viewer:
        while (await viewer.consumers())[0].state.checkpoint.committed < 59:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)  # confirmations follow what is stored
