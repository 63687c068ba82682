"""Real nodes: another zone gets what it is served and nothing else, and nothing at all while its gate is held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import calm
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.zones import Zone, certificates, link_to, peer, serve, settled

from bsfg.errors import ArtifactMissing, GateHeld, PermissionRefused
from bsfg.fact import ArtifactRef
from bsfg.ports import Buffer, Confirmation
from bsfg.testing.facts import batch
from bsfg.wire.client import BoundaryClient

STREAMS = "[streams.operational]\n[streams.secret]\n"


def zones_of(root: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Make a plant that serves one of its streams to the enterprise, and pulls from a lab that it serves nothing."""
    certs = certificates(root, "plant-a", "enterprise", "lab")
    plant, enterprise = (Zone(name, root, certs, streams=STREAMS) for name in ("plant-a", "enterprise"))
    lab = Zone("lab", root, certs)
    plant.identities = peer("enterprise") + peer("lab")
    plant.serve, plant.links = serve("enterprise", 'streams = ["operational"]'), link_to(lab)
    enterprise.identities = peer("plant-a")
    enterprise.links = link_to(plant, more='streams = ["operational"]')
    for zone in (plant, enterprise):
        zone.write()
        cleanup.zone(zone).start()
    return plant, enterprise


async def say(plant: Zone, stream: str, content: bytes, message_id: str) -> ArtifactRef:
    """Upload content and append a fact that names it."""
    named = replace(reference(content), key=message_id)
    async with plant.client() as producer:
        await upload(producer, content, named)
        await producer.append_fact(stream, naming(named, message_id))
    return named


async def read(client: BoundaryClient, stream: str) -> int:
    """Read a store buffer by offsets and count what comes."""
    frames = [frame async for frame in client.read_offsets(stream, 0, buffer=Buffer.STORE)]
    return sum(len(frame.entries) for frame in frames if frame.entries is not None)


async def test_a_link_brings_what_it_is_served_and_its_owner_reads_no_more(tmp_path: Path, cleanup: Cleanup) -> None:
    """Facts and artifacts of the served stream arrive; the other stream, and everything for the lab, is refused."""
    plant, enterprise = zones_of(tmp_path, cleanup)
    shared = await say(plant, "operational", Random(1).randbytes(300_000), "shared")
    hidden = await say(plant, "secret", Random(2).randbytes(300_000), "hidden")
    await settled(plant, enterprise)
    assert await download(enterprise, shared) == Random(1).randbytes(300_000)
    async with plant.client("enterprise-bsfg") as client:
        assert await read(client, "operational") == 1
        with pytest.raises(PermissionRefused, match=r"\[serve.enterprise\]"):
            await read(client, "secret")
        with pytest.raises(ArtifactMissing):
            await client.get_object("", "", digest=hidden.digest)
        with pytest.raises(ArtifactMissing):
            await client.get_object(hidden.bucket or "", hidden.key or "")
    await plant.seen("request_refused", rule="artifact_named_by_readable_fact", identity="enterprise-bsfg")
    async with plant.client("lab-bsfg") as client:
        with pytest.raises(PermissionRefused, match=r"\[serve.lab\]"):
            await read(client, "operational")
        with pytest.raises(ArtifactMissing):
            await client.get_object("", "", digest=shared.digest)
    plant.kill()
    plant.start()
    async with plant.client("enterprise-bsfg") as client:
        info, pieces = await client.get_object("", "", digest=shared.digest)
        assert len(b"".join([piece async for piece in pieces])) == info.size_bytes
        with pytest.raises(ArtifactMissing):
            await client.get_object("", "", digest=hidden.digest)


async def test_a_link_waits_at_a_held_gate_and_catches_up(tmp_path: Path, cleanup: Cleanup) -> None:
    """No fact, artifact or confirmation passes while the sender holds; then all arrives, once and in order."""
    plant, enterprise = zones_of(tmp_path, cleanup)
    async with plant.client() as producer:
        await producer.append("operational", batch(20, from_zone="plant-a"))
    await settled(plant, enterprise)
    async with plant.admin() as operator:
        await operator.hold_gate("enterprise", "works on the firewall", side="sender")
    content = Random(3).randbytes(300_000)
    named = await say(plant, "operational", content, "held-back")
    await enterprise.seen("fetch_failed", code="gate_held")
    async with plant.client("enterprise-bsfg") as client:
        with pytest.raises(GateHeld):
            await client.get_object("", "", digest=named.digest)
        with pytest.raises(GateHeld):
            await client.confirm("enterprise.operational", Confirmation(through=20))
    assert enterprise.end(Buffer.FORWARD) == 20
    async with plant.admin() as operator:
        await operator.release_gate("enterprise", "works are done", side="sender")
    await calm(plant, enterprise)
    assert await download(enterprise, named) == content
    assert not enterprise.events("link_held")
