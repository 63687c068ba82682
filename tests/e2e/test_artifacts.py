"""Artifacts between zones: there before their facts, whole, and never more than once on their way."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.liar import Liar, entries_of, frame, head
from tests.e2e.nursery import rss_bytes
from tests.e2e.producing import calm
from tests.e2e.proxy import Proxy
from tests.e2e.zones import Zone, link_to, pair, settled, until

from bsfg import AsyncArtifactClient, Endpoint, LocalReader
from bsfg.errors import ArtifactConflict, ArtifactMissing, BsfgError, DigestMismatch
from bsfg.fact import ArtifactRef, Message
from bsfg.ports import Buffer
from bsfg.testing.facts import batch, message, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import BoundaryClient
from bsfg.wire.service import ObjectInfo

LINK = "from-plant-a"
MEDIA_TYPE = "application/pdf"


def reference(content: bytes, key: str = "batch-7.pdf", **changed: object) -> ArtifactRef:
    """Give the reference of some content, perhaps a wrong one."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return replace(ArtifactRef("reports", key, digest, len(content), MEDIA_TYPE), **changed)  # type: ignore[arg-type]


def naming(artifact: ArtifactRef, message_id: str = "with-artifact") -> Message:
    """Make a fact that names an artifact."""
    plain = message(message_id, from_zone="plant-a")
    return replace(plain, fact=replace(plain.fact, artifact=artifact))


async def upload(client: BoundaryClient, content: bytes, artifact: ArtifactRef | None = None) -> ObjectInfo:
    """Upload content under the name of a reference, in pieces."""
    named = artifact or reference(content)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1 << 20):
            yield content[start : start + (1 << 20)]

    assert named.bucket is not None and named.key is not None
    info = ObjectInfo(named.bucket, named.key, MEDIA_TYPE, None, named.digest, named.size_bytes)
    return await client.put_object(info, pieces())


async def download(zone: Zone, artifact: ArtifactRef) -> bytes:
    """Download an artifact by digest, as an application of the zone."""
    async with zone.client("consumer") as client:
        _, chunks = await client.get_object("", "", digest=artifact.digest)
        return b"".join([chunk async for chunk in chunks])


async def test_facts_wait_for_their_artifacts(zones: tuple[Zone, Zone]) -> None:
    """A producer must upload first, under the name and with the digest that its fact gives; then both arrive."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    content, other = Random(1).randbytes(300_000), Random(2).randbytes(300_000)
    named = reference(content)
    async with plant.client() as producer:
        with pytest.raises(ArtifactMissing):
            await producer.append_fact("operational", naming(named))
        with pytest.raises(ArtifactMissing):
            await producer.append("operational", sealed([naming(named)]))
        with pytest.raises(DigestMismatch):
            await upload(producer, content, replace(named, digest=reference(other).digest))
        await upload(producer, content)
        assert (await upload(producer, content)).already_exists
        with pytest.raises(ArtifactConflict):
            await upload(producer, other)
        with pytest.raises(DigestMismatch):
            await producer.append_fact("operational", naming(reference(other)))
        with pytest.raises(DigestMismatch):
            await producer.append_fact("operational", naming(replace(named, size_bytes=5)))
        assert plant.end(Buffer.STORE) == 0
        await producer.append_fact("operational", naming(named))
    await until(lambda: enterprise.end(Buffer.FORWARD))
    # No waiting here: where the fact is, its artifact is.
    assert await download(enterprise, named) == content
    assert enterprise.messages(Buffer.FORWARD) == [naming(named)]
    await calm(plant, enterprise)


async def test_a_foreign_fact_leads_to_its_own_artifact(zones: tuple[Zone, Zone], tmp_path: Path) -> None:
    """Where the receiving zone calls something else by that name, a fact's artifact is still the one of its digest."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    content, own = Random(5).randbytes(300_000), b"the enterprise's own report"
    async with enterprise.client() as producer:
        await upload(producer, own, replace(reference(own), bucket="reports"))
        said = message("own", from_zone="enterprise", to_zone="enterprise")
        own_fact = replace(said, fact=replace(said.fact, artifact=ArtifactRef(digest=reference(own).digest)))
        await producer.append_fact("operational", own_fact)
    async with plant.client() as producer:
        await upload(producer, content)
        await producer.append_fact("operational", naming(reference(content)))
        await producer.append_fact("operational", naming(ArtifactRef(digest=reference(content).digest), "bare"))
    await settled(plant, enterprise)
    files = enterprise.files("enterprise-consumer")
    endpoint = Endpoint(f"127.0.0.1:{enterprise.port}", files.ca, files.certificate, files.key, "enterprise-bsfg")
    local = LocalReader(enterprise.data)
    entries = list(local.entries("operational"))
    assert len(entries) == 2
    async with AsyncArtifactClient(endpoint) as artifacts:
        for entry in entries:
            assert await artifacts.read(entry) == content
            assert local.artifacts.read(entry) == content
    async with enterprise.client("consumer") as client:
        _, chunks = await client.get_object("reports", "batch-7.pdf")
        assert b"".join([chunk async for chunk in chunks]) == own
    await calm(plant, enterprise)


@pytest.mark.campaign
async def test_kills_while_a_large_artifact_is_on_its_way(tmp_path: Path, cleanup: Cleanup) -> None:
    """50 MB arrive whole although both nodes are killed meanwhile, and the fact is confirmed only after them."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    proxy = cleanup.closing(Proxy(plant.port))
    enterprise.links = link_to(plant, port=proxy.port)
    enterprise.write()
    plant.start()
    enterprise.start()
    content = Random(3).randbytes(50_000_000)
    named = reference(content)
    async with plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))
        await settled(plant, enterprise)
        await upload(producer, content)
        proxy.throttle(25_000_000)
        await producer.append_fact("operational", naming(named))
        await producer.append("operational", batch(10, first=10, from_zone="plant-a"))
    peak_bytes = 0
    for victim in (enterprise, plant, enterprise):
        before = proxy.carried_bytes
        await until(lambda: proxy.carried_bytes > before + 10_000_000)  # noqa: B023
        assert enterprise.end(Buffer.FORWARD) == 10
        assert await committed(plant) == 9
        peak_bytes = max(peak_bytes, *(rss_bytes(zone.pid or 0) for zone in (plant, enterprise)))
        victim.kill()
        victim.start()
    proxy.mend()
    await calm(plant, enterprise)
    assert enterprise.end(Buffer.FORWARD) == 21
    assert await download(enterprise, named) == content
    # Neither a second copy nor half of one is left over.
    kept = sum(file.stat().st_size for file in (enterprise.data / "artifacts").rglob("*") if file.is_file())
    assert len(content) <= kept < len(content) + 100_000
    assert peak_bytes < 150 << 20
    print(f"peak {peak_bytes >> 20} MiB")


async def committed(plant: Zone) -> int:
    async with plant.admin("viewer") as admin:
        [view] = await admin.consumers()
        return view.state.checkpoint.committed


async def test_artifact_that_was_altered_at_rest(zones: tuple[Zone, Zone]) -> None:
    """What was changed in the sender's folder holds the link; put right, it arrives after the operator's release."""
    plant, enterprise = zones
    plant.start()
    content = Random(4).randbytes(200_000)
    async with plant.client() as producer:
        await upload(producer, content)
        await producer.append_fact("operational", naming(reference(content)))
    [stored] = [file for file in (plant.data / "artifacts").rglob("*") if file.stat().st_size == len(content)]
    stored.chmod(0o644)
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    enterprise.start()
    held = await enterprise.seen("link_held")
    assert held["code"] == "digest_mismatch"
    await enterprise.seen("alert_raised", alert="gate_held")
    assert enterprise.end(Buffer.FORWARD) == 0
    stored.write_bytes(content)
    async with enterprise.admin() as operator:
        await operator.release_gate(LINK, "the file was restored")
    await settled(plant, enterprise)
    assert await download(enterprise, reference(content)) == content


def described(digest: str) -> pb.GetObjectResponse:
    """Begin a download."""
    return pb.GetObjectResponse(description=pb.ObjectDescription(bucket="", key="", digest=digest))


def other_bytes(request: pb.GetObjectRequest) -> Iterable[pb.GetObjectResponse]:
    """Send other content of the same size."""
    return [described(request.digest), pb.GetObjectResponse(chunk=bytes(1000))]


def too_few(request: pb.GetObjectRequest) -> Iterable[pb.GetObjectResponse]:
    """Stop in the middle as if that were all."""
    return [described(request.digest), pb.GetObjectResponse(chunk=bytes(10))]


def without_end(request: pb.GetObjectRequest) -> Iterator[pb.GetObjectResponse]:
    """Never stop."""
    yield described(request.digest)
    while True:
        yield pb.GetObjectResponse(chunk=bytes(250_000))


LIES: dict[str, tuple[Callable[[pb.GetObjectRequest], Iterable[pb.GetObjectResponse]], str]] = {
    "other bytes": (other_bytes, "digest_mismatch"),
    "too few": (too_few, "digest_mismatch"),
    "without end": (without_end, "digest_mismatch"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_peer_that_lies_about_an_artifact(lie: str, zones: tuple[Zone, Zone]) -> None:
    """Content that is not what its fact says holds the link after a few tries; neither it nor the fact is stored."""
    plant, enterprise = zones
    enterprise.start()
    answer, code = LIES[lie]
    content = Random(5).randbytes(1000)
    async with Liar(plant) as liar:
        liar.answer = lambda request: [head("ab" * 16, end=1), frame(entries_of([naming(reference(content))]))]
        liar.object = answer
        assert (await enterprise.seen("link_held"))["code"] == code
        assert not liar.confirmed
    assert enterprise.end(Buffer.FORWARD) == 0
    with pytest.raises(BsfgError) as caught:
        await download(enterprise, reference(content))
    assert caught.value.code == "artifact_missing"
    assert rss_bytes(enterprise.pid or 0) < 150 << 20


async def test_peer_that_falls_silent_in_an_artifact(tmp_path: Path, cleanup: Cleanup) -> None:
    """A download that stops without ending is given up in time, and tried again."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = link_to(plant, more='request_timeout = "1s"')
    enterprise.write()
    enterprise.start()
    content = Random(6).randbytes(1000)
    async with Liar(plant) as liar:
        liar.answer = lambda request: [head("ab" * 16, end=1), frame(entries_of([naming(reference(content))]))]
        liar.object = None
        failed = await enterprise.seen("fetch_failed", code="timed_out", count=2)
        assert failed["stream"] == "operational"
        liar.object = lambda request: [described(request.digest), pb.GetObjectResponse(chunk=content)]
        await until(lambda: liar.confirmed == [0])
    assert await download(enterprise, reference(content)) == content
