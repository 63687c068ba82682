"""What another zone reads is exactly what it is served, in whatever way it asks, and nothing while its gate is held."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest
from tests.journey.zones import origin_span
from tests.wire import entries
from tests.wire.conftest import Sites
from tests.wire.site import Answer, Site, until

from bsfg.batch import FactBatch
from bsfg.errors import ArtifactMissing, BsfgError, GateHeld, InvalidArgument, PermissionRefused, UnknownLink
from bsfg.fact import ArtifactRef, Envelope, Fact, Key, Message
from bsfg.journey.link import FetchRequest, PeerPosition
from bsfg.journey.sums import RECEIVER, SENDER, AuditScope
from bsfg.node.authorize import Rule
from bsfg.ports import Buffer, Confirmation
from bsfg.sealing import seal
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import BoundaryClient
from bsfg.wire.convert import SumCall
from bsfg.wire.service import Caller, LinkReport, ObjectInfo, PeerMemo

OPEN, SECRET = "operational", "secret"

MORE = """
[streams.secret]

[identities.north-bsfg]
zone = "north"
roles = ["peer"]
streams = ["*"]
[serve.north]
streams = ["operational"]

[identities.west-bsfg]
zone = "west"
roles = ["peer"]
streams = ["*"]
[serve.west]
streams = ["operational", "secret"]
buffers = ["forward"]

[identities.lab-bsfg]
zone = "lab"
roles = ["peer"]
streams = ["*"]
[links.from-lab]
zone = "lab"
address = "127.0.0.1:9"
streams = ["operational", "secret"]

[identities.reader]
zone = "plant"
roles = ["consumer"]
streams = ["operational"]
consumers = ["reader-*"]

[identities.eyes]
zone = "plant"
roles = ["viewer"]
streams = ["operational"]
[identities.keeper]
zone = "plant"
roles = ["operator"]
streams = ["operational"]
[identities.mover]
zone = "plant"
roles = ["pipeline"]
streams = ["audit"]
"""


def content(stream: str, buffer: Buffer) -> bytes:
    """Give the artifact that the fact of a buffer names."""
    return f"{stream} {buffer}".encode() * 1_000


def digest(stream: str, buffer: Buffer) -> str:
    """Give its digest."""
    return "sha256:" + hashlib.sha256(content(stream, buffer)).hexdigest()


def fact(stream: str, buffer: Buffer) -> Message:
    """Make the one fact of a buffer; it names an artifact."""
    reference = ArtifactRef(f"files-{stream}", str(buffer), digest(stream, buffer))
    zone = "plant" if buffer == Buffer.STORE else "enterprise"
    envelope = Envelope(zone, "anywhere", 1, f"{stream}-{buffer}")
    return Message(envelope, Fact("machine:7", "reported", b"{}", reference))


async def furnished(sites: Sites, **settings: object) -> Site:
    """Open a site with a fact and its artifact in both buffers of two streams, and consumers of all for everybody."""
    site = await sites(more=MORE, **settings)
    assert site.parts.artifacts is not None
    for stream in (OPEN, SECRET):
        for buffer in Buffer:
            data = content(stream, buffer)
            await site.parts.artifacts.put(f"files-{stream}", str(buffer), pieces(data))
            facts = seal(FactBatch.from_messages([fact(stream, buffer)]))
            if buffer == Buffer.STORE:
                await (await site.parts.store(stream)).append(facts)
            else:
                await (await site.parts.forward(stream)).put_if_absent(facts, origin_span("enterprise", 0, 1))
            for owner in ("north", "west", "lab", "reader-"):
                await site.consumer(consumer(owner, stream, buffer), buffer, stream)
    return site


def consumer(owner: str, stream: str, buffer: Buffer) -> str:
    """Name somebody's consumer of a buffer."""
    tail = ".forward" if buffer == Buffer.FORWARD else ""
    return f"{owner}{'' if owner.endswith('-') else '.'}{stream}{tail}"


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """Give bytes in one piece."""
    yield data


@dataclass(frozen=True)
class Ask:
    """One question about a buffer: who asks, over what, and which buffer is meant."""

    site: Site
    client: BoundaryClient
    owner: str
    stream: str
    buffer: Buffer

    @property
    def consumer(self) -> str:
        """The asker's own consumer of the buffer."""
        return consumer(self.owner, self.stream, self.buffer)

    @property
    def key(self) -> Key:
        """The key of the buffer's fact."""
        envelope = fact(self.stream, self.buffer).envelope
        assert envelope.message_id is not None
        return Key(envelope.from_zone, envelope.message_id)

    @property
    def path(self) -> str:
        """The end of the paths that lead to the fact."""
        return f"{self.key.from_zone}/{self.key.message_id}?buffer={self.buffer}"


async def fetch_entries(ask: Ask) -> object:
    return (await entries.fetch_entries(ask.client, ask.consumer)).entries


async def fetch_whole(ask: Ask) -> object:
    return (await ask.client.fetch(ask.consumer, FetchRequest())).frames


async def fetch_unary(ask: Ask) -> object:
    request = pb.FetchRequest(consumer=ask.consumer, frames=True)
    return (await ask.client.connection.call("FetchFacts", request)).frames


async def fetch_streamed(ask: Ask) -> object:
    ask.client._gives_whole_answers = False
    return (await ask.client.fetch(ask.consumer, FetchRequest())).frames


async def read_offsets(ask: Ask) -> object:
    return [frame async for frame in ask.client.read_offsets(ask.stream, 0, buffer=ask.buffer)]


async def read_times(ask: Ask) -> object:
    return [frame async for frame in ask.client.read_times(ask.stream, 0, 1 << 50, buffer=ask.buffer)]


async def get_fact(ask: Ask) -> object:
    return await ask.client.get_fact(ask.stream, ask.key, buffer=ask.buffer)


async def evidence(ask: Ask) -> object:
    return await ask.client.evidence(ask.stream, ask.buffer)


async def sum_facts(ask: Ask) -> object:
    scope = AuditScope("enterprise", bytes(32))
    side = SENDER if ask.buffer == Buffer.STORE else RECEIVER
    return (await ask.client.sum_facts(SumCall(ask.stream, ask.buffer, side, 0, 1, scope))).found.read


async def confirm(ask: Ask) -> object:
    return await ask.client.confirm(ask.consumer, Confirmation(through=0)) + 1


async def object_by_digest(ask: Ask) -> object:
    _, data = await ask.client.get_object("", "", digest=digest(ask.stream, ask.buffer))
    return b"".join([piece async for piece in data])


async def object_by_name(ask: Ask) -> object:
    _, data = await ask.client.get_object(f"files-{ask.stream}", str(ask.buffer))
    return b"".join([piece async for piece in data])


async def object_in_the_bucket_of_digests(ask: Ask) -> object:
    _, data = await ask.client.get_object("sha256", digest(ask.stream, ask.buffer)[7:])
    return b"".join([piece async for piece in data])


def over_http(method: str, path: Callable[[Ask], str], body: str | None = None) -> Callable[[Ask], Awaitable[object]]:
    """Make a question over HTTP."""

    async def ask_over_http(ask: Ask) -> object:
        return _given(await ask.site.http(method, path(ask), body))

    return ask_over_http


def _given(answer: Answer) -> object:
    if answer.status >= 400:
        kinds: dict[str, type[BsfgError]] = {"artifact_missing": ArtifactMissing, "gate_held": GateHeld}
        code = answer.json()["code"] if answer.body else {404: "artifact_missing", 409: "gate_held"}[answer.status]
        raise kinds.get(code, BsfgError)(code)
    return answer.body or answer.headers


FACTS = {
    "fetch_entries": fetch_entries,
    "fetch_whole": fetch_whole,
    "fetch_unary": fetch_unary,
    "fetch_streamed": fetch_streamed,
    "read_offsets": read_offsets,
    "read_times": read_times,
    "get_fact": get_fact,
    "evidence": evidence,
    "sum_facts": sum_facts,
    "http_fetch": over_http("GET", lambda ask: f"/v1/consumers/{ask.consumer}/facts"),
    "http_get": over_http("GET", lambda ask: f"/v1/streams/{ask.stream}/facts/{ask.path}"),
    "http_tail": over_http("GET", lambda ask: f"/v1/streams/{ask.stream}/tail?buffer={ask.buffer}&follow=false"),
    "http_artifact_of_a_fact": over_http("GET", lambda ask: f"/v1/streams/{ask.stream}/artifacts/{ask.path}"),
    "http_confirm": over_http("POST", lambda ask: f"/v1/consumers/{ask.consumer}/confirm", '{"through": 0}'),
    "confirm": confirm,
}
ARTIFACTS = {
    "object_by_digest": object_by_digest,
    "object_by_name": object_by_name,
    "object_in_the_bucket_of_digests": object_in_the_bucket_of_digests,
    "http_artifact": over_http("GET", lambda ask: f"/v1/artifacts/{digest(ask.stream, ask.buffer)}"),
    "http_artifact_head": over_http("HEAD", lambda ask: f"/v1/artifacts/{digest(ask.stream, ask.buffer)}"),
    "http_object": over_http("GET", lambda ask: f"/v1/objects/files-{ask.stream}/{ask.buffer}"),
    "http_object_with_digest": over_http(
        "GET", lambda ask: f"/v1/objects/any/name?digest={digest(ask.stream, ask.buffer)}"
    ),
}
WAYS = FACTS | ARTIFACTS

BOTH = {(stream, buffer) for stream in (OPEN, SECRET) for buffer in Buffer}
MAY_READ = {
    "north-bsfg": ("north", {(OPEN, Buffer.STORE)}),
    "west-bsfg": ("west", {(OPEN, Buffer.FORWARD), (SECRET, Buffer.FORWARD)}),
    "lab-bsfg": ("lab", set[tuple[str, Buffer]]()),
    "reader": ("reader-", {(OPEN, Buffer.STORE), (OPEN, Buffer.FORWARD)}),
}


@pytest.mark.parametrize("who", MAY_READ)
@pytest.mark.parametrize("way", WAYS)
async def test_everybody_reads_what_is_given_to_him_and_nothing_else(sites: Sites, way: str, who: str) -> None:
    """Each way to read gives a buffer to those who are given it, and refuses all others alike."""
    site = await furnished(sites)
    site.act_as(who)
    owner, readable = MAY_READ[who]
    for stream, buffer in sorted(BOTH):
        ask = Ask(site, site.client(), owner, stream, buffer)
        if (stream, buffer) in readable:
            assert await WAYS[way](ask), (stream, buffer)
            continue
        with pytest.raises(BsfgError) as caught:
            await WAYS[way](ask)
        says = caught.value.code if caught.value.code != "internal" else caught.value.message
        assert says == ("artifact_missing" if way in ARTIFACTS else "permission_denied"), (stream, buffer)
        assert site.refusals, "a refusal leaves a record"
        site.refusals.clear()


@pytest.mark.parametrize("way", WAYS)
async def test_a_held_gate_stops_everything_of_its_link(sites: Sites, way: str) -> None:
    """While the gate to a zone is held nothing passes in any way; others do not notice, and a release lets it go on."""
    site = await furnished(sites)
    site.act_as("north-bsfg")
    ask = Ask(site, site.client(), "north", OPEN, Buffer.STORE)
    site.parts.links.hold("north", "sender", by="operator", reason="works on the firewall")
    with pytest.raises(BsfgError) as caught:
        await WAYS[way](ask)
    assert "gate_held" in (caught.value.code, caught.value.message)
    state = await site.parts.storage.cursors.consumer(ask.consumer)
    assert state.checkpoint.committed == -1
    site.act_as("reader")
    assert await WAYS[way](Ask(site, site.client(), "reader-", OPEN, Buffer.STORE))
    site.act_as("north-bsfg")
    site.parts.links.release("north", "sender", by="operator", reason="done")
    assert await WAYS[way](ask)


async def test_a_download_under_way_ends_with_its_gate(sites: Sites) -> None:
    """The next piece of an artifact is not given once the gate is held."""
    site = await furnished(sites)
    assert site.parts.artifacts is not None
    data = bytes(4 << 20)
    stored = await site.parts.artifacts.put("large", "file", pieces(data))
    reference = ArtifactRef("large", "file", stored.digest)
    large = Message(Envelope("plant", "anywhere", 1, "large"), Fact("machine:7", "reported", b"{}", reference))
    await (await site.parts.store(OPEN)).append(seal(FactBatch.from_messages([large])))
    site.act_as("north-bsfg")
    info, content = await site.boundary.get_object(Caller(), "large", "file")
    first = await anext(content)
    assert info.size_bytes == len(data) > len(first)
    site.parts.links.hold("north", "sender", by="operator", reason="works on the firewall")
    with pytest.raises(GateHeld, match="works on the firewall"):
        await anext(content)


@pytest.mark.parametrize("how", ["consumer", "offsets", "times"])
async def test_frames_under_way_end_with_their_gate(sites: Sites, how: str) -> None:
    """The next frame of an answer is not given once the gate is held, however the frames were asked for."""
    site = await furnished(sites, storage="log")
    store = await site.parts.store(OPEN)
    first, last = (await store.stats()).end, 0
    for number in range(3):
        one = Message(Envelope("plant", "anywhere", 1, f"more-{number}"), Fact("machine:7", "ran", b"{}"))
        await store.append(seal(FactBatch.from_messages([one])))
    last = (await store.stats()).end
    site.act_as("north-bsfg")
    boundary, caller = site.boundary, Caller()
    if how == "consumer":
        await site.parts.storage.cursors.commit("north.operational", Confirmation(through=first - 1))
        request = FetchRequest(max_facts=2, sets=False)
        carried = frozenset({"anywhere"})
        reading = await boundary.fetch_frames(caller, "north.operational", request, carried)
        assert reading.head.frames
    elif how == "offsets":
        reading = await boundary.read_offsets(
            caller, OPEN, Buffer.STORE, first, last, request=FetchRequest(max_facts=1)
        )
    else:
        reading = await boundary.read_times(caller, OPEN, Buffer.STORE, 0, 1 << 50, request=FetchRequest(max_facts=1))
    if how != "consumer":
        assert await anext(reading.frames)
    site.parts.links.hold("north", "sender", by="operator", reason="works on the firewall")
    with pytest.raises(GateHeld, match="works on the firewall"):
        await anext(reading.frames)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_fetch_that_waits_gets_nothing_after_a_hold(sites: Sites, whole: bool) -> None:
    """Who was let in before the hold and waited for news is told that the gate is held, not the news."""
    site = await furnished(sites)
    site.act_as("north-bsfg")
    client, name = site.client(), "north.operational"
    client._gives_whole_answers = whole
    await client.confirm(name, Confirmation(through=0))
    waiting = asyncio.create_task(client.fetch(name, FetchRequest(wait_seconds=50)))
    await until(lambda: site.parts.links._waiting[name] > 0)
    site.parts.links.hold("north", "sender", by="operator", reason="works on the firewall")
    news = Message(Envelope("plant", "anywhere", 1, "news"), Fact("machine:7", "ran", b"{}"))
    await (await site.parts.store(OPEN)).append(seal(FactBatch.from_messages([news])))
    with pytest.raises(GateHeld):
        await waiting
    site.parts.links.release("north", "sender", by="operator", reason="done")
    assert (await client.fetch(name, FetchRequest())).start == 1


async def test_an_uploader_does_not_read_what_it_uploaded(sites: Sites) -> None:
    """Content that no fact names is nobody's, and looks to everybody as if it were not there."""
    site = await furnished(sites)
    client = site.client()
    stored = await client.put_object(ObjectInfo("b", "k"), pieces(b"not named yet"))
    assert stored.digest is not None
    for bucket, key, digest_of_it in (("b", "k", None), ("", "", stored.digest)):
        with pytest.raises(ArtifactMissing) as caught:
            await client.get_object(bucket, key, digest=digest_of_it)
        assert [decision.rule for decision, _ in site.refusals] == [Rule.NAMED]
        site.refusals.clear()
        with pytest.raises(ArtifactMissing) as absent:
            nowhere = digest_of_it and "sha256:" + 64 * "0"
            await client.get_object(bucket, key and "l", digest=nowhere)
        assert _without_names(caught.value.message) == _without_names(absent.value.message)
    fact_of_it = Fact("machine:7", "reported", b"{}", ArtifactRef(digest=stored.digest))
    await client.append_fact(OPEN, Message(Envelope("plant", "anywhere", 1, "names-it"), fact_of_it))
    assert (await client.get_object("b", "k"))[0].digest == stored.digest


def _without_names(text: str) -> list[str]:
    return [word for word in text.split() if "/" not in word and ":" not in word]


async def test_what_was_just_served_can_be_asked_for_although_its_fact_has_left(sites: Sites) -> None:
    """A fact that leaves the buffer between serving it and asking for its artifact does not take the right along."""
    site = await furnished(sites, storage="log")
    site.act_as("north-bsfg")
    ask = Ask(site, site.client(), "north", OPEN, Buffer.STORE)
    assert await object_by_digest(ask)
    for owner in ("north", "west", "lab", "reader-"):
        await site.parts.storage.cursors.commit(consumer(owner, OPEN, Buffer.STORE), Confirmation(through=0))
    await (await site.parts.store(OPEN)).truncate_before(1)
    assert (await (await site.parts.store(OPEN)).stats()).start == 1
    assert await object_by_digest(ask)


@pytest.mark.parametrize("who", ["eyes", "keeper"])
async def test_whose_row_names_a_stream_sees_that_stream(sites: Sites, who: str) -> None:
    """Status, metrics, consumers and gates are those of the row's streams, over both listeners."""
    site = await furnished(sites)
    site.act_as(who)
    admin = site.admin_client()
    over_grpc, by_http = await admin.status(), (await site.http("GET", "/v1/status")).json()
    for document in (over_grpc, by_http):
        assert {each["stream"] for each in document["buffers"]} == {OPEN}
        assert {each["stream"] for each in document["consumers"]} == {OPEN}
        assert SECRET not in str(document)
    assert SECRET not in (await site.http("GET", "/metrics")).body.decode()
    assert {view.state.spec.stream for view in await admin.consumers()} == {OPEN}
    assert {view.link for view in await admin.gates()} == {"enterprise", "from-enterprise", "from-lab", "north", "west"}
    site.act_as("narrow")
    assert {view.link for view in await admin.gates()} == {"enterprise", "from-enterprise"}
    site.act_as("viewer")
    assert {each["stream"] for each in (await admin.status())["buffers"]} == {OPEN, SECRET, "audit"}


async def test_an_operator_acts_upon_gates_of_his_streams_alone(sites: Sites) -> None:
    """A gate concerns every stream that passes it, so it takes a row with all of them to hold or release it."""
    site = await furnished(sites)
    site.act_as("keeper")
    admin = site.admin_client()
    assert (await admin.hold_gate("north", "drill", side="sender")).gate.mode == "held"
    assert (await admin.release_gate("north", "drill", side="sender")).gate.mode == "autonomous"
    for gate, side in (("west", "sender"), ("from-lab", "receiver")):
        for act in (admin.hold_gate, admin.release_gate):
            with pytest.raises(PermissionRefused, match="'secret'"):
                await act(gate, "drill", side=side)
    with pytest.raises(UnknownLink):
        await admin.hold_gate("nowhere", "drill", side="sender")


async def test_a_pipeline_moves_links_of_its_streams_alone(sites: Sites) -> None:
    """Whoever may move no stream of a link cannot take its lease, which would stop it."""
    site = await furnished(sites)
    site.act_as("mover")
    admin = site.admin_client()
    with pytest.raises(PermissionRefused, match="may not use the stream"):
        await admin.acquire_lease("from-lab", "mover", 1_000)
    with pytest.raises(PermissionRefused, match="may not use the stream"):
        await admin.recall_peer("from-lab", OPEN)
    assert (await admin.acquire_lease("from-enterprise", "mover", 1_000)).holder == "mover"


async def test_a_pipeline_reports_about_links_of_its_streams_alone(sites: Sites) -> None:
    """A stream of one's own is no key to a link that does not carry it: neither to its gate, nor to what it knows."""
    site = await furnished(sites)
    site.act_as("mover")
    admin = site.admin_client()
    foreign = LinkReport("from-lab", "audit", hold_code="evil", hold_stream=OPEN, lease=None)
    for refused in (
        admin.report_link(foreign),
        admin.recall_peer("from-lab", "audit"),
        admin.remember_peer(PeerMemo("from-lab", "audit", PeerPosition(log_id="x"))),
    ):
        with pytest.raises(InvalidArgument, match="does not carry"):
            await refused
    assert site.parts.links.gate("from-lab").gate.mode == "autonomous"
    assert list(site.parts.links.reports()) == []
    await admin.report_link(replace(foreign, link="from-enterprise"))
    assert site.parts.links.gate("from-enterprise").gate.mode == "held"
