"""Two zones as real processes under mutual TLS, pulling from each other with the native engine."""

from __future__ import annotations

import asyncio

from tests.e2e.zones import Zone, settled

from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages


async def test_partition_and_reconciliation(zones: tuple[Zone, Zone]) -> None:
    """Both sides go on while the other is away, and end up equal and in order when it is back."""
    plant, enterprise = zones
    plant.start(by_command=True)
    enterprise.start()
    async with plant.client() as at_plant, enterprise.client() as at_enterprise:
        await at_plant.append("operational", batch(500, from_zone="plant-a"))
        await at_enterprise.append("operational", batch(300, seed=1, from_zone="enterprise"))
        await asyncio.gather(settled(plant, enterprise), settled(enterprise, plant))
        enterprise.kill()
        await at_plant.append("operational", batch(700, first=500, from_zone="plant-a"))
        enterprise.start()
        await settled(plant, enterprise)
    async with enterprise.client() as at_enterprise:
        assert "pandas" not in plant.mapped(), "half a second of every start"
        plant.kill()
        await at_enterprise.append("operational", batch(400, seed=1, first=300, from_zone="enterprise"))
        plant.start()
        await settled(enterprise, plant)
    plant.stop()
    enterprise.stop()
    assert enterprise.messages(Buffer.FORWARD) == messages(1200, from_zone="plant-a")
    assert plant.messages(Buffer.FORWARD) == messages(700, seed=1, from_zone="enterprise")
    assert "normal" in enterprise.modes("from-plant-a")
