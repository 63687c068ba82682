"""Reading artifacts with the SDK: by digest or by fact, streamed and verified, whatever names this zone uses."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.wire.conftest import Sites
from tests.wire.site import Site

from bsfg import (
    ArtifactClient,
    ArtifactRef,
    AsyncArtifactClient,
    AsyncConsumer,
    AsyncProducer,
    Buffer,
    Consumer,
    Entry,
    Fact,
    LocalReader,
    Message,
    Producer,
)
from bsfg.errors import ArtifactMissing, ArtifactTooLarge, DigestMismatch, FileExists, InvalidArgument, StorageReadOnly
from bsfg.ports import ConsumerSpec
from bsfg.sdk.artifacts import PartFile, Wanted
from bsfg.testing.facts import message

CONTENT = os.urandom(3_000_000)
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
OWN = b"what this zone calls by the same name"
ADDRESSED = {"stream": "operational", "from_zone": "plant", "to_zone": "enterprise"}


def damage(folder: Path) -> None:
    """Change one byte of the stored content."""
    path = folder / "artifacts" / "content" / DIGEST[7:9] / DIGEST[7:]
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([CONTENT[-1] ^ 1]))


async def received(site: Site) -> Entry:
    """Give an entry whose fact names, in its own zone, what this zone uses for something else."""
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:  # type: ignore[arg-type]
        await producer.upload("sha256", DIGEST[7:], CONTENT)
        await producer.upload("reports", "B1.pdf", OWN)
        await producer.append(Fact("batch:B1", "reported", b"{}", ArtifactRef(digest=DIGEST)), message_id="a")
    reference = ArtifactRef("reports", "B1.pdf", DIGEST, len(CONTENT), "application/pdf")
    plain = message("a")
    return Entry(0, 1, Message(plain.envelope, Fact("batch:B1", "reported", b"{}", reference)), bytes(32))


async def test_a_fact_leads_to_its_own_artifact(sites: Sites, tmp_path: Path) -> None:
    """By entry, message, fact, reference or digest, the content is that of the digest and never that of the name."""
    site = await sites()
    entry = await received(site)
    wanted: list[Wanted] = [entry, entry.message, entry.message.fact, DIGEST]
    assert entry.message.fact.artifact is not None
    wanted.append(entry.message.fact.artifact)
    async with AsyncArtifactClient(site.grpc_address) as artifacts:
        for each in wanted:
            assert await artifacts.read(each) == CONTENT
        sizes = [len(piece) async for piece in artifacts.pieces(entry)]
        assert len(sizes) > 1
        assert sum(sizes) == len(CONTENT)
        path = await artifacts.download(entry, tmp_path / "B1.pdf")
        assert path.read_bytes() == CONTENT
        with pytest.raises(FileExists):
            await artifacts.download(entry, path)
        assert await artifacts.download(entry, path, overwrite=True) == path
        with pytest.raises(ArtifactTooLarge):
            await artifacts.read(entry, max_bytes=1000)
        with pytest.raises(StorageReadOnly):
            await artifacts.download(entry, tmp_path / "nowhere" / "x")


async def test_what_cannot_be_given_is_said(sites: Sites, tmp_path: Path) -> None:
    """A fact without an artifact, content that is not here, and what is no digest; no file is left behind."""
    site = await sites()
    async with AsyncArtifactClient(site.grpc_address) as artifacts:
        with pytest.raises(ArtifactMissing, match="refers to no artifact"):
            await artifacts.read(message("a"))
        with pytest.raises(ArtifactMissing, match="there is no artifact sha256:"):
            await artifacts.download(DIGEST, tmp_path / "x")
        with pytest.raises(InvalidArgument):
            await artifacts.read("reports/B1.pdf")
    assert not any(name.startswith("x") for name in os.listdir(tmp_path))


async def test_altered_content_is_an_error(sites: Sites, tmp_path: Path) -> None:
    """Content that was changed on the node's disk is never complete: the last piece does not come."""
    site = await sites()
    entry = await received(site)
    damage(site.folder)
    async with AsyncArtifactClient(site.grpc_address) as artifacts:
        size = 0
        with pytest.raises(DigestMismatch):
            async for piece in artifacts.pieces(entry):
                size += len(piece)
        assert size < len(CONTENT)
        with pytest.raises(DigestMismatch):
            await artifacts.download(entry, tmp_path / "x")
    assert not any(name.startswith("x") for name in os.listdir(tmp_path))


async def test_a_consumer_reads_what_its_entries_refer_to(sites: Sites) -> None:
    """From the entry that a consumer was given to its artifact in one call."""
    site = await sites()
    await received(site)
    await site.parts.storage.cursors.create(ConsumerSpec("historian", "operational", Buffer.STORE))
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        async for entry in consumer.entries(idle_seconds=5):
            assert await consumer.artifacts.read(entry) == CONTENT
            break


def test_ordinary_programs_read_artifacts(zone: Zone, tmp_path: Path) -> None:
    """The blocking client, a consumer and a local reader give the same, the reader also when the node is dead."""
    with Producer(endpoint(zone), **ADDRESSED) as producer:  # type: ignore[arg-type]
        reference = producer.upload("reports", "B1.pdf", CONTENT, media_type="application/pdf")
        producer.append(Fact("batch:B1", "reported", b"{}", ArtifactRef(digest=reference.digest)), message_id="a")
    with ArtifactClient(endpoint(zone, "consumer")) as artifacts:
        assert artifacts.read(DIGEST) == CONTENT
        assert artifacts.download(reference, tmp_path / "a").read_bytes() == CONTENT
        pieces = artifacts.pieces(DIGEST)
        assert CONTENT.startswith(next(pieces))
        del pieces
    artifacts.close()
    asyncio.run(_consumer(zone))
    with Consumer("app-mes", endpoint(zone, "consumer")) as consumer:
        entry = next(iter(consumer))
        assert consumer.artifacts.read(entry) == CONTENT
    zone.kill()
    reader = LocalReader(zone.data, buffer=Buffer.STORE)
    found = reader.latest("batch:B1", "reported")
    assert found is not None
    assert reader.artifacts.read(found) == CONTENT
    assert reader.artifacts.download(found, tmp_path / "b").read_bytes() == CONTENT
    elsewhere = LocalReader(zone.data, buffer=Buffer.STORE, artifacts=tmp_path)
    with pytest.raises(ArtifactMissing):
        elsewhere.artifacts.read(found)
    damage(zone.data)
    with pytest.raises(DigestMismatch):
        reader.artifacts.read(found)


async def _consumer(zone: Zone) -> None:
    async with zone.admin() as operator:
        await operator.create_consumer(ConsumerSpec("app-mes", "operational", Buffer.STORE))


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """What is broken off leaves neither the file nor a part of it, and what was there before stays."""
    path = tmp_path / "report.pdf"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), PartFile(path, overwrite=True) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"report.pdf": b"before"}
