"""Who asks for some facts or columns gets those alone, is told what was left out, and saves the bytes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site

from bsfg.batch import FactBatch
from bsfg.columns import AGELESS_ENTRY_SCHEMA, ENTRY_SCHEMA
from bsfg.errors import ArtifactMissing, InvalidArgument
from bsfg.fact import ArtifactRef, Key
from bsfg.filters import FactFilter
from bsfg.journey.link import NOT_ASKED_FOR, NOT_SERVED, FetchRequest
from bsfg.node import server
from bsfg.ports import Buffer, Frame
from bsfg.spark.calls import BufferSource, NodeAccess
from bsfg.testing.facts import message
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import ClientLink
from bsfg.wire.service import ObjectInfo

ALARMS = FactFilter(predicates=("alarm_*",))
SERVED = 'subjects = ["asset:press-*"]\n'


async def filled(site: Site, count: int = 100) -> None:
    """Append facts, every fourth of them an alarm, of two assets in turn."""
    facts = [
        message(
            f"m-{number:04}",
            "x" * 400,
            subject=f"asset:{'press' if number % 2 else 'oven'}-{number % 3}",
            predicate="alarm_raised" if number % 4 == 0 else "temperature_measured",
        )
        for number in range(count)
    ]
    await site.client().append(STREAM, FactBatch.from_messages(facts))


def brought(frames: list[Frame]) -> list[int]:
    """Give the offsets of the entries in frames."""
    return [offset for frame in frames if frame.entries is not None for offset in frame.entries.offsets.tolist()]


def left_out(frames: list[Frame], detail: str) -> list[int]:
    """Give the offsets that were left out for a reason."""
    gaps = [gap for frame in frames for each in frame.skips for gap in each.records()]
    gaps += [frame.gap for frame in frames if frame.gap is not None]
    return sorted(at for gap in gaps if gap.detail == detail for at in range(gap.first, gap.last + 1))


ALARMING = list(range(0, 100, 4))
OTHERS = [number for number in range(100) if number % 4]


@pytest.mark.parametrize("sets", [True, False])
async def test_a_consumer_gets_what_it_asks_for(sites: Sites, sets: bool) -> None:
    """The rest is told as ranges among what comes, in both ways of telling; both together are all offsets."""
    site = await sites()
    await filled(site)
    await site.consumer()
    link = ClientLink("plant", "historian", site.client(), filter=ALARMS)
    frames = list((await link.fetch(FetchRequest(sets=sets))).frames)
    assert brought(frames) == ALARMING
    assert left_out(frames, NOT_ASKED_FOR) == OTHERS
    assert (frames[0].first, frames[-1].last) == (0, 99)
    assert len(frames) == 1 if sets else len(frames) == 50


async def test_a_range_is_read_with_a_filter(sites: Sites) -> None:
    """Whoever reads offsets may ask likewise."""
    site = await sites()
    await filled(site)
    frames = [frame async for frame in site.client().read_offsets(STREAM, 10, 90, filter=ALARMS)]
    assert brought(frames) == [at for at in ALARMING if 10 <= at < 90]
    assert left_out(frames, NOT_ASKED_FOR) == [at for at in OTHERS if 10 <= at < 90]


async def measured(site: Site, **wanted: Any) -> tuple[int, list[Frame]]:
    """Read everything as Spark's tasks do, and count the bytes of the frames on the wire."""
    sizes: list[int] = []

    class Counting(BufferSource):
        async def _chosen(self, message: Any) -> Frame:
            sizes.append(message.ByteSize())
            return await super()._chosen(message)

    source = Counting(NodeAccess(site.grpc_address), STREAM, "store", 5.0, **wanted)
    frames = await asyncio.to_thread(lambda: list(source.frames(0, 100, source.head().log_id)))
    return sum(sizes), frames


async def test_columns_and_filters_save_bytes(sites: Sites) -> None:
    """What is not asked for does not cross the wire: frames are smaller by what it has."""
    site = await sites()
    await filled(site)
    whole, frames = await measured(site)
    few, narrow = await measured(site, columns=("subject", "offset"))
    some, chosen = await measured(site, filter=ALARMS)
    least, both = await measured(site, filter=ALARMS, columns=("offset",))
    assert few * 8 < whole
    assert some * 3 < whole
    assert least * 30 < whole
    [frame], [other] = frames, narrow
    assert frame.entries is not None and other.entries is not None
    assert other.entries.column("subject") == frame.entries.column("subject")
    assert other.entries.column("object").null_count == 100
    assert brought(chosen) == brought(both) == ALARMING
    assert left_out(chosen, NOT_ASKED_FOR) == left_out(both, NOT_ASKED_FOR) == OTHERS


@pytest.mark.parametrize("schema", [ENTRY_SCHEMA, AGELESS_ENTRY_SCHEMA], ids=["with ages", "without"])
async def test_a_node_that_knows_neither_is_no_matter(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, schema: pa.Schema
) -> None:
    """An older node gives everything; the one who asked leaves out what it did not ask for."""
    monkeypatch.setattr(server, "filter_of", lambda request: FactFilter())
    monkeypatch.setattr(server, "schema_for", lambda columns=(), *, ages=True: schema)
    site = await sites()
    await filled(site)
    await site.consumer()
    _, frames = await measured(site, filter=ALARMS, columns=("offset", "message_id"))
    assert brought(frames) == ALARMING
    assert left_out(frames, NOT_ASKED_FOR) == OTHERS
    link = ClientLink("plant", "historian", site.client(), filter=ALARMS)
    assert brought(list((await link.fetch(FetchRequest(sets=True))).frames)) == ALARMING


async def test_what_is_too_much_is_refused(sites: Sites) -> None:
    """A column that there is not and more patterns than may be tried are refused."""
    site = await sites()
    await filled(site, 1)
    selection = pb.OffsetSelection(stream=STREAM, first=0)
    connection = site.client().connection

    async def ask(request: pb.FetchFramesRequest) -> None:
        with connection.telling():
            async for _ in connection.method("FetchFrames")(request):
                pass

    with pytest.raises(InvalidArgument, match="entries have no column 'nosuch'"):
        await ask(pb.FetchFramesRequest(offsets=selection, columns=["nosuch"]))
    with pytest.raises(InvalidArgument, match="columns has a length of 33"):
        await ask(pb.FetchFramesRequest(offsets=selection, columns=["subject"] * 33))
    with pytest.raises(InvalidArgument, match="subjects has 101 patterns"):
        await ask(pb.FetchFramesRequest(offsets=selection, filter=pb.FactFilter(subjects=["a"] * 101)))


async def test_a_peer_gets_no_more_than_is_served(sites: Sites) -> None:
    """A filter in [serve] holds for every way to read: by consumer, by range and by key, whatever is asked for."""
    site = await sites(more=SERVED)
    await filled(site)
    await site.consumer("enterprise.operational")
    pressed = [number for number in range(100) if number % 2]
    site.act_as("enterprise-bsfg")
    client = site.client()
    fetched = list((await client.fetch("enterprise.operational", FetchRequest(sets=True))).frames)
    ranged = [frame async for frame in client.read_offsets(STREAM, 0, 100)]
    for frames in (fetched, ranged):
        assert brought(frames) == pressed
        assert left_out(frames, NOT_SERVED) == [number for number in range(100) if number % 2 == 0]
    narrowed = ClientLink("plant", "enterprise.operational", client, filter=FactFilter(subjects=("asset:press-1",)))
    frames = list((await narrowed.fetch(FetchRequest(sets=True))).frames)
    assert brought(frames) == [number for number in pressed if number % 3 == 1]
    assert left_out(frames, NOT_SERVED) == [number for number in range(100) if number % 2 == 0]
    assert await client.get_fact(STREAM, Key("plant", "m-0001"), buffer=Buffer.STORE) is not None
    assert await client.get_fact(STREAM, Key("plant", "m-0002"), buffer=Buffer.STORE) is None
    site.act_as("app")
    assert brought([frame async for frame in site.client().read_offsets(STREAM, 0, 100)]) == list(range(100))


async def test_a_peer_who_looks_on_sees_no_more_than_is_served(sites: Sites) -> None:
    """What is not for a zone is told as left out, and with a pattern of its own it sees no more either."""
    site = await sites(more=SERVED)
    await filled(site)
    site.act_as("enterprise-bsfg")
    for pattern in ("", "&subject=asset:*", "&predicate=alarm_*"):
        path = f"/v1/streams/{STREAM}/tail?buffer=store&last=1000&follow=false{pattern}"
        seen = (await site.http("GET", path)).body
        assert seen.count(b"event: fact") == (0 if "alarm" in pattern else 50)
        assert b"oven" not in seen and NOT_SERVED.encode() in seen
    refused = await site.http("GET", f"/v1/streams/{STREAM}/tail?buffer=store&subject={'a*' * 9}")
    assert refused.status == 400


async def test_an_artifact_that_no_served_fact_names_is_not_given(sites: Sites) -> None:
    """Neither by its digest nor by its name; as soon as a fact that is served names it, it is."""
    site = await sites(more=SERVED)
    client = site.client()
    content = b"recipe of the oven"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    async def told(asset: str) -> None:
        fact = message(asset, subject=asset, predicate="recipe_set")
        naming = replace(fact.fact, artifact=ArtifactRef(digest=digest))
        await site.client().append_fact(STREAM, replace(fact, fact=naming))

    await client.put_object(ObjectInfo("recipes", "oven"), pieces())
    await told("asset:oven-1")
    site.act_as("enterprise-bsfg")
    for name, asked in ((("", ""), digest), (("recipes", "oven"), None)):
        with pytest.raises(ArtifactMissing, match="may read"):
            await site.client().get_object(*name, digest=asked)
    assert (await site.http("GET", f"/v1/artifacts/{digest}")).status == 404
    site.act_as("app")
    await told("asset:press-1")
    site.act_as("enterprise-bsfg")
    assert (await site.http("GET", f"/v1/artifacts/{digest}")).body == content
