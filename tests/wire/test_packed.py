"""Answers that come compressed: the same facts in fewer bytes, and nobody is made to unpack more than was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site

from bsfg.artifacts import Begun
from bsfg.errors import FrameInvalid
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.testing.facts import batch
from bsfg.throttle import Bandwidth, Throttle
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import BoundaryClient
from bsfg.wire.frames import PACKED_BYTES_MIN, packed, unpacked
from bsfg.wire.messages import read_of_peer

ZSTD = pa.Codec("zstd")
MOST_BYTES = 1 << 20


def asking(site: Site, answers: list[Any], **options: Any) -> BoundaryClient:
    """Give a client whose answers are noted as they come."""
    client = BoundaryClient(site.connection(), **options)
    ask = client._followed.ask

    async def noted(*arguments: Any, **more: Any) -> Any:
        answers.append(await ask(*arguments, **more))
        return answers[-1]

    client._followed.ask = noted  # type: ignore[method-assign]
    return client


def told(fetched: Fetched) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """Give what an answer brought."""
    return [
        (each.first, each.last, [] if each.entries is None else each.entries.record_batch.to_pylist())
        for each in fetched.frames
    ]


@pytest.mark.parametrize("count", [1, 30, 3_000])
async def test_packed_answers_bring_the_same(sites: Sites, count: int) -> None:
    """Facts, offsets and the head are those of a plain answer, and many facts take less than half of its bytes."""
    site, answers = await sites(), []  # type: ignore[var-annotated]
    await site.client().append(STREAM, batch(count))
    await site.consumer()
    plain, small = asking(site, answers), asking(site, answers, packs=True)
    try:
        found = [await each.fetch("historian", FetchRequest()) for each in (plain, small)]
    finally:
        await plain.close()
        await small.close()
    assert told(found[0]) == told(found[1])
    assert found[0].log_id == found[1].log_id and found[0].chain_head == found[1].chain_head
    unpacked_bytes = sum(frame.ByteSize() for frame in answers[0].frames)
    packed_bytes = len(getattr(answers[1], "packed", b""))
    assert count == 1 or 0 < packed_bytes < unpacked_bytes / 2


@given(st.binary(max_size=4 * PACKED_BYTES_MIN) | st.integers(0, 200_000).map(bytes))
def test_what_is_packed_is_unpacked(data: bytes) -> None:
    """Whatever it is; what does not become smaller goes as it is."""
    small = packed(data)
    assert len(small) <= len(data) + 16
    if small != data:
        assert unpacked(pb.FetchResponse.FromString(small), len(data)) == data


HOSTILE = {
    "no Zstandard": (b"garbage", 100),
    "more than it says": (ZSTD.compress(bytes(10_000), asbytes=True), 9_999),
    "less than it says": (ZSTD.compress(bytes(10_000), asbytes=True), 10_001),
    "cut": (ZSTD.compress(bytes(10_000), asbytes=True)[:-2], 10_000),
    "more than was asked for": (ZSTD.compress(bytes(MOST_BYTES + 1), asbytes=True), MOST_BYTES + 1),
    "a lie about everything": (b"x", (1 << 64) - 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_refused(name: str) -> None:
    """Before anything is unpacked where its size says so, and without a word of the library."""
    content, size_bytes = HOSTILE[name]
    with pytest.raises(FrameInvalid, match=r"far more|cannot be unpacked"):
        unpacked(pb.FetchResponse(packed=content, unpacked_bytes=size_bytes), MOST_BYTES)


@pytest.mark.parametrize("inside", [b"", b"\xff\xff", b"again"])
async def test_what_is_packed_must_be_an_answer(sites: Sites, inside: bytes) -> None:
    """Neither nothing, nor what protobuf refuses, nor something that is packed once more."""
    if inside == b"again":
        inside = packed(pb.FetchResponse(log_id="x" * 5_000).SerializeToString())
    site = await sites()
    await site.consumer()
    client = BoundaryClient(site.connection(), packs=True)
    answer = pb.FetchResponse(packed=ZSTD.compress(inside, asbytes=True), unpacked_bytes=len(inside))

    async def lies(*arguments: Any, **more: Any) -> Any:
        return read_of_peer(pb.FetchResponse)(answer.SerializeToString())

    client._followed.ask = lies  # type: ignore[method-assign]
    try:
        with pytest.raises(FrameInvalid):
            await client.fetch("historian", FetchRequest())
    finally:
        await client.close()


class Counted(Throttle):
    """Counts what was taken."""

    bytes = 0

    def took(self, size_bytes: int, by: str | None = None) -> None:
        """Count it."""
        self.bytes += size_bytes


@pytest.mark.parametrize("kind", ["packed", "frames"])
async def test_what_is_refused_has_come_all_the_same(sites: Sites, kind: str) -> None:
    """A link with a bound counts the bytes of answers that are none, or bring far more than was asked for."""
    site = await sites()
    throttle = Counted(Bandwidth(), lambda: 0)
    client = BoundaryClient(site.connection(), packs=True, throttle=throttle)
    frames = [pb.FetchFrame(entries=bytes(1 << 20)) for _ in range(80)] if kind == "frames" else []
    answer = pb.FetchResponse(packed=b"" if frames else bytes(1 << 20), unpacked_bytes=5, frames=frames)

    async def lies(*arguments: Any, **more: Any) -> Any:
        return answer

    client._followed.ask = lies  # type: ignore[method-assign]
    try:
        with pytest.raises(FrameInvalid):
            await client.fetch("historian", FetchRequest(max_bytes=1))
    finally:
        await client.close()
    assert throttle.bytes >= (80 << 20 if frames else 1 << 20)


async def test_what_an_old_node_sends_again_counts(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows of no downloads that go on, and sends an artifact from its beginning; the line has all of it."""
    content, throttle, begun = bytes(range(250)) * 1_000, Counted(Bandwidth(), lambda: 0), Begun()
    begun.add(content[:200_000])
    client = BoundaryClient((await sites()).connection(), throttle=throttle)

    async def old(*arguments: Any) -> AsyncGenerator[pb.GetObjectResponse, None]:
        yield pb.GetObjectResponse(description=pb.ObjectDescription())
        for at in range(0, len(content), 50_000):
            yield pb.GetObjectResponse(chunk=content[at : at + 50_000])

    monkeypatch.setattr(client.connection, "answers", old)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    try:
        _, rest = await client.get_object("", "", digest=digest, begun=begun)
        assert b"".join([piece async for piece in rest]) == content[200_000:]
    finally:
        await client.close()
    assert throttle.bytes == len(content)


def test_a_large_packed_answer_passes_the_door() -> None:
    """It is one field, however many bytes it has; as much of anything else beside another field is refused."""
    read = read_of_peer(pb.FetchResponse)
    content = bytes(5 << 20)
    found = read(pb.FetchResponse(packed=content, unpacked_bytes=5).SerializeToString())
    assert found is not None and found.packed == content
    assert read(pb.FetchResponse(chain_head=content, gaps_token="x").SerializeToString()) is None
