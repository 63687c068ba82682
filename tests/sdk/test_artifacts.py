"""Reading artifacts with the SDK: by digest or by fact, streamed and verified, whatever names this zone uses."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterator
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
from bsfg.artifacts import Begun
from bsfg.errors import (
    ArtifactMissing,
    ArtifactTooLarge,
    DigestMismatch,
    FileExists,
    InvalidArgument,
    PeerUnreachable,
    StorageReadOnly,
)
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


async def test_a_download_goes_on_where_it_broke_off(sites: Sites, tmp_path: Path) -> None:
    """What came stays, and only what follows is fetched; a beginning that is not right is noticed and dropped."""
    site = await sites()
    entry = await received(site)
    begun, path = CONTENT[:1_200_000], tmp_path / "B1.pdf"
    part = tmp_path / f"B1.pdf.{DIGEST[7:19]}.part"
    asked = list[int]()
    async with AsyncArtifactClient(site.grpc_address) as artifacts:
        part.write_bytes(begun)
        get = artifacts._get

        async def counted(digest: str, begun: Begun | None) -> AsyncGenerator[bytes, None]:
            asked.append(0)
            async for piece in get(digest, begun):
                asked[-1] += len(piece)
                yield piece

        artifacts._get = counted
        assert (await artifacts.download(entry, path, resume=True)).read_bytes() == CONTENT
        assert asked == [len(CONTENT) - len(begun)]
        assert not part.exists()
        # All of it came, and the program ended before it was given its name.
        part.write_bytes(CONTENT)
        assert (await artifacts.download(entry, path, resume=True, overwrite=True)).read_bytes() == CONTENT
        assert asked[1:] == [0]
        for wrong in (b"x" * 100, CONTENT + b"x"):
            part.write_bytes(wrong)
            with pytest.raises(DigestMismatch):
                await artifacts.download(entry, path, resume=True, overwrite=True)
            assert not part.exists()
            assert path.read_bytes() == CONTENT
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(b"kept")
        part.symlink_to(elsewhere)
        with pytest.raises(StorageReadOnly):
            await artifacts.download(entry, path, resume=True, overwrite=True)
        assert elsewhere.read_bytes() == b"kept"


def test_a_download_outlives_the_node(zone: Zone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is killed in the middle and started again: the download goes on by itself; without patience it ends."""
    with Producer(endpoint(zone), **ADDRESSED) as producer:  # type: ignore[arg-type]
        reference = producer.upload("reports", "B1.pdf", CONTENT)
        producer.append(Fact("batch:B1", "reported", b"{}", reference), message_id="a")
    with ArtifactClient(endpoint(zone, "consumer")) as artifacts:
        fetched = list[int]()
        get = artifacts._get

        def breaking(digest: str, begun: Begun | None) -> Iterator[bytes]:
            fetched.append(0)
            for piece in get(digest, begun):
                if len(fetched) == 1 and fetched[0] > 500_000:
                    zone.kill()
                    zone.start()
                    raise PeerUnreachable("the node was killed")
                fetched[-1] += len(piece)
                yield piece

        artifacts._get = breaking
        path = artifacts.download(DIGEST, tmp_path / "a", resume=True)
        assert path.read_bytes() == CONTENT
        assert sum(fetched) == len(CONTENT) and len(fetched) > 1
        zone.kill()
        monkeypatch.setattr("bsfg.sdk.artifacts.PATIENCE_SECONDS", 0.2)
        with pytest.raises(PeerUnreachable):
            artifacts.download(DIGEST, tmp_path / "b", resume=True)
        assert not list(tmp_path.glob("b*"))
        (tmp_path / f"b.{DIGEST[7:19]}.part").write_bytes(CONTENT[:10])
        with pytest.raises(PeerUnreachable):
            artifacts.download(DIGEST, tmp_path / "b", resume=True)
        assert [each.name for each in tmp_path.glob("b*")] == [f"b.{DIGEST[7:19]}.part"]


def test_a_copy_from_a_folder_goes_on(zone: Zone, tmp_path: Path) -> None:
    """A local reader resumes as well, and sees when what was begun is something else."""
    with Producer(endpoint(zone), **ADDRESSED) as producer:  # type: ignore[arg-type]
        producer.upload("reports", "B1.pdf", CONTENT)
    reader, part = LocalReader(zone.data, buffer=Buffer.STORE), tmp_path / f"copy.{DIGEST[7:19]}.part"
    part.write_bytes(CONTENT[:1_500_000])
    assert reader.artifacts.download(DIGEST, tmp_path / "copy", resume=True).read_bytes() == CONTENT
    for wrong in (b"x" * 100, b"x" * 1_500_000, CONTENT + b"x"):
        part.write_bytes(wrong)
        with pytest.raises(DigestMismatch):
            reader.artifacts.download(DIGEST, tmp_path / "copy", resume=True, overwrite=True)
        assert not part.exists()


async def test_the_artifacts_of_a_stream_are_listed(sites: Sites, tmp_path: Path) -> None:
    """Facts that refer to an artifact are listed in their order and lead to their content; others are not."""
    site = await sites()
    await received(site)
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:  # type: ignore[arg-type]
        await producer.append(Fact("batch:B2", "started"), message_id="b")
        own = await producer.upload("reports", "B2.pdf", OWN)
        await producer.append(Fact("batch:B2", "reported", b"{}", own), message_id="c")
    async with AsyncArtifactClient(site.grpc_address) as artifacts:
        listed = [entry async for entry in artifacts.list("operational", buffer=Buffer.STORE)]
        assert [(entry.offset, entry.key.message_id) for entry in listed] == [(0, "a"), (2, "c")]
        assert [await artifacts.read(entry) for entry in listed] == [CONTENT, OWN]
        assert [entry async for entry in artifacts.list("operational")] == []
    with ArtifactClient(site.grpc_address) as blocking:
        found = await asyncio.to_thread(lambda: list(blocking.list("operational", buffer=Buffer.STORE)))
        assert found == listed
