"""Artifacts over both listeners: streamed up and down, immutable, and named by facts only when they are there."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, until

from bsfg.batch import EntryBatch
from bsfg.errors import (
    ArtifactConflict,
    ArtifactMissing,
    DigestMismatch,
    GateHeld,
    InvalidArgument,
    Overloaded,
    PermissionRefused,
    TimedOut,
)
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.ports import Result
from bsfg.spark.replicate.carrying import ArtifactCourier
from bsfg.testing.facts import batch, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.service import ObjectInfo

CONTENT = bytes(range(256)) * 4_000
LINK = "from-enterprise"
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
INFO = ObjectInfo("batch-files", "B1042/report.pdf", "application/pdf")


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    """Give bytes piece by piece."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def joined(data: AsyncIterator[bytes]) -> bytes:
    """Put pieces together."""
    return b"".join([piece async for piece in data])


def naming(digest: str, size_bytes: int = len(CONTENT)) -> Message:
    """Make a fact that names the artifact."""
    reference = ArtifactRef(INFO.bucket, INFO.key, digest, size_bytes, INFO.media_type)
    return Message(Envelope("plant", "enterprise", 1, "a"), Fact("batch:B1042", "report_written", b"{}", reference))


def entries(message: Message) -> EntryBatch:
    """Give a fact as a link brings it."""
    return EntryBatch.of(sealed([message]).record_batch, np.arange(1), 1)


async def test_an_artifact_is_uploaded_and_downloaded(sites: Sites) -> None:
    """What a fact names comes back bit by bit, by name and by digest; the same again is no error, other content is."""
    site = await sites()
    client = site.client()
    stored = await client.put_object(INFO, pieces(CONTENT))
    assert (stored.digest, stored.size_bytes, stored.already_exists) == (DIGEST, len(CONTENT), False)
    assert (await client.put_object(INFO, pieces(CONTENT))).already_exists
    with pytest.raises(ArtifactMissing, match="that 'app' may read"):
        await client.get_object(INFO.bucket, INFO.key)
    await client.append_fact(STREAM, naming(DIGEST))
    info, data = await client.get_object(INFO.bucket, INFO.key)
    assert (info.digest, info.size_bytes, info.media_type) == (DIGEST, len(CONTENT), "application/pdf")
    assert await joined(data) == CONTENT
    info, data = await client.get_object("", "", digest=DIGEST)
    assert await joined(data) == CONTENT
    with pytest.raises(ArtifactConflict):
        await client.put_object(INFO, pieces(b"other"))
    with pytest.raises(ArtifactMissing):
        await client.get_object(INFO.bucket, "nothing")


async def test_an_upload_must_be_what_was_announced(sites: Sites) -> None:
    """Another digest, another size or a bad name store nothing."""
    site = await sites()
    client = site.client()
    with pytest.raises(DigestMismatch):
        await client.put_object(ObjectInfo("b", "k", digest="sha256:" + 64 * "0"), pieces(CONTENT))
    with pytest.raises(DigestMismatch):
        await client.put_object(ObjectInfo("b", "k", size_bytes=7), pieces(CONTENT))
    with pytest.raises(InvalidArgument):
        await client.put_object(ObjectInfo("b", "../k"), pieces(CONTENT))
    with pytest.raises(ArtifactMissing):
        await client.get_object("b", "k")


async def test_uploads_that_are_none_are_refused(sites: Sites) -> None:
    """An upload without a description, or with a second one, is refused; a silent one ends with `timed_out`."""
    site = await sites(idle_timeout_seconds=0.2)
    method = site.client().connection

    async def parts(*messages: pb.PutObjectRequest, silent: bool = False) -> AsyncIterator[pb.PutObjectRequest]:
        for message in messages:
            yield message
        if silent:
            await asyncio.Event().wait()

    description = pb.PutObjectRequest(description=pb.ObjectDescription(bucket="b", key="k"))
    with pytest.raises(InvalidArgument, match="begins with its description"):
        await method.call("PutObject", parts(pb.PutObjectRequest(chunk=b"x")))
    with pytest.raises(InvalidArgument, match="one description"):
        await method.call("PutObject", parts(description, description))
    with pytest.raises(TimedOut, match="silent"):
        await method.call("PutObject", parts(description, pb.PutObjectRequest(chunk=b"x"), silent=True))
    await until(lambda: site.listeners.admission.serving == 0)


async def test_a_fact_needs_its_artifact(sites: Sites) -> None:
    """A fact that names a missing artifact, or one of another size, is refused; after the upload it is taken."""
    site = await sites()
    client = site.client()
    with pytest.raises(ArtifactMissing):
        await client.append_fact(STREAM, naming(DIGEST))
    await client.put_object(INFO, pieces(CONTENT))
    with pytest.raises(DigestMismatch):
        await client.append_fact(STREAM, naming(DIGEST, 5))
    assert (await client.append_fact(STREAM, naming(DIGEST))).result == Result.INSERTED


async def test_a_fact_may_say_the_digest_alone(sites: Sites) -> None:
    """Over gRPC and HTTP a reference may be the digest alone; what is stored has all that peers of any age expect."""
    site = await sites()
    client = site.client()
    bare = replace(naming(DIGEST), fact=Fact("batch:B1042", "report_written", b"{}", ArtifactRef(digest=DIGEST)))
    with pytest.raises(ArtifactMissing):
        await client.append_fact(STREAM, bare)
    await client.put_object(INFO, pieces(CONTENT))
    assert (await client.append_fact(STREAM, bare)).result == Result.INSERTED
    assert (await client.append_fact(STREAM, bare)).result == Result.ALREADY_EXISTS
    envelope = {"message_id": "b", "to_zone": "enterprise", "produced_at_unix_ms": 1}
    form: dict[str, dict[str, Any]] = {
        "envelope": {**envelope, "object_media_type": "application/pdf"},
        "fact": {"subject": "batch:B1042", "predicate": "report_written", "object_json": "{}"},
    }
    form["fact"]["artifact_digest"] = DIGEST
    answer = await site.http("POST", f"/v1/streams/{STREAM}/facts", json.dumps(form))
    assert answer.status == 200
    frames = [frame async for frame in (await site.parts.store(STREAM)).replay(0)]
    texts = [text for frame in frames if frame.entries for text in frame.entries.values("artifact")]
    expected = {"bucket": "sha256", "key": DIGEST[7:], "digest": DIGEST, "size_bytes": len(CONTENT)}
    assert list(map(json.loads, texts)) == [
        expected | {"media_type": "application/octet-stream"},
        expected | {"media_type": "application/pdf"},
    ]
    assert await joined((await client.get_object("sha256", DIGEST[7:]))[1]) == CONTENT


async def test_the_bucket_of_digests_holds_nothing_else(sites: Sites) -> None:
    """Nobody can take the name that content has by its digest: a key there is the digest of what is uploaded."""
    site = await sites()
    client = site.client()
    unnamed = ObjectInfo("sha256", DIGEST[7:])
    with pytest.raises(DigestMismatch):
        await client.put_object(unnamed, pieces(b"other"))
    for wrong in (ObjectInfo("sha256", "report.pdf"), replace(unnamed, digest="sha256:" + 64 * "0")):
        with pytest.raises(InvalidArgument):
            await client.put_object(wrong, pieces(CONTENT))
    assert not (await client.put_object(unnamed, pieces(CONTENT))).already_exists
    assert (await client.put_object(unnamed, pieces(CONTENT))).already_exists
    await client.append_fact(
        STREAM, replace(naming(DIGEST), fact=Fact("batch:1", "b", b"{}", ArtifactRef(digest=DIGEST)))
    )
    assert await joined((await client.get_object("", "", digest=DIGEST))[1]) == CONTENT


async def test_roles_decide_about_artifacts(sites: Sites) -> None:
    """A viewer may neither upload nor download, a peer may only download."""
    site = await sites()
    client = site.client()
    await client.put_object(INFO, pieces(CONTENT))
    await client.append_fact(STREAM, naming(DIGEST))
    site.act_as("enterprise-bsfg")
    with pytest.raises(PermissionRefused):
        await client.put_object(INFO, pieces(CONTENT))
    assert await joined((await client.get_object(INFO.bucket, INFO.key))[1]) == CONTENT
    site.act_as("viewer")
    with pytest.raises(PermissionRefused):
        await client.get_object(INFO.bucket, INFO.key)


async def test_a_refusal_reaches_a_caller_who_is_still_sending(sites: Sites) -> None:
    """Who is refused in the middle of an upload or a stream of frames learns the node's own reason, each time."""
    site = await sites()
    client = site.client()
    site.act_as("viewer")
    for _ in range(15):
        with pytest.raises(PermissionRefused):
            await client.put_object(INFO, pieces(CONTENT))
    site.act_as("app")
    site.listeners.admission._by_caller["app"] = 1_000_000
    for _ in range(15):
        stream = client.append_stream(STREAM)
        with pytest.raises(Overloaded):
            for _ in range(20):
                await stream.send(batch(200))
        await stream.close()
    site.listeners.admission._by_caller.clear()


async def test_an_upload_fails_as_its_content_does(sites: Sites) -> None:
    """What keeps the content from being read is what the caller is told: gRPC itself would only cancel him."""
    site = await sites()

    async def broken() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        raise ArtifactMissing("the sender has lost it")

    with pytest.raises(ArtifactMissing, match="has lost it"):
        await site.client().put_object(INFO, broken())
    assert (await site.client().put_object(INFO, pieces(CONTENT))).digest == DIGEST


async def test_a_pipeline_brings_what_is_damaged_here(sites: Sites) -> None:
    """Where this zone's copy is known to have decayed the sender's heals it, and the link goes on."""
    plant, enterprise = await sites(), await sites()
    for site in (plant, enterprise):
        await site.client().put_object(INFO, pieces(CONTENT))
        await site.client().append_fact(STREAM, naming(DIGEST))
    [path] = [each for each in enterprise.folder.rglob("artifacts/content/*/*") if each.is_file()]
    path.write_bytes(CONTENT[:-1] + b"?")
    client = enterprise.client()
    with pytest.raises(DigestMismatch):
        await joined((await client.get_object("", "", digest=DIGEST))[1])
    await ArtifactCourier(plant.client(), client, LINK).bring(entries(naming(DIGEST)))
    assert await joined((await client.get_object("", "", digest=DIGEST))[1]) == CONTENT


async def test_a_pipeline_tells_what_a_sender_has_lost_or_altered(sites: Sites) -> None:
    """The reason reaches the link, which is held for it; it does not end the loop that moves the link."""
    plant, enterprise = await sites(), await sites()
    carried = ArtifactCourier(plant.client(), enterprise.client(), LINK)
    with pytest.raises(ArtifactMissing):
        await carried.bring(entries(naming(DIGEST)))
    await plant.client().put_object(INFO, pieces(CONTENT))
    await plant.client().append_fact(STREAM, naming(DIGEST))
    [path] = [each for each in plant.folder.rglob("artifacts/content/*/*") if each.is_file()]
    path.write_bytes(CONTENT[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(DigestMismatch):
            await carried.bring(entries(naming(DIGEST)))


async def test_a_held_gate_lets_no_artifact_of_its_link_in(sites: Sites) -> None:
    """Neither a new one nor the rest of one that has begun; asking what is here already is no offence of a pipeline."""
    site = await sites()
    site.act_as("pipeline")
    brought = replace(INFO, link=LINK)

    async def held_meanwhile() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        site.parts.links.hold(LINK, "receiver", by="operator", reason="works on the firewall")
        yield CONTENT[1000:]

    with pytest.raises(InvalidArgument, match="must name its link"):
        await site.client().put_object(INFO, pieces(CONTENT))
    for content in (held_meanwhile(), pieces(CONTENT)):
        with pytest.raises(GateHeld, match="works on the firewall"):
            await site.client().put_object(brought, content)
    assert not [each for each in site.folder.rglob("artifacts/content/*/*") if each.is_file()]
    site.parts.links.release(LINK, "receiver", by="operator", reason="done")
    assert (await site.client().put_object(brought, pieces(CONTENT))).digest == DIGEST
    with pytest.raises(ArtifactMissing):
        await site.client().get_object("", "", digest=DIGEST)
    assert not site.refusals
