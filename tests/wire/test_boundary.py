"""Producers, consumers and peers over gRPC: every operation of the boundary against a real server."""

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.wire.conftest import Sites
from tests.wire.entries import fetch_entries
from tests.wire.site import STREAM, until

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import AGELESS_ENTRY_SCHEMA
from bsfg.errors import (
    BsfgError,
    BufferFull,
    ConflictingDuplicate,
    ForeignLog,
    FrameInvalid,
    GateHeld,
    IdentityRevoked,
    InvalidArgument,
    InvalidFact,
    OffsetOutOfRange,
    PermissionRefused,
    RemoteError,
    UnknownConsumer,
    UnknownStream,
)
from bsfg.fact import Key
from bsfg.journey.link import FetchRequest, Refusal
from bsfg.ports import Buffer, Confirmation, OriginSpan, Result
from bsfg.retention import GapReason
from bsfg.testing.facts import altered, batch, message, messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import ClientLink

BACKENDS = ["memory", "log"]


def facts(count: int, **options: Any) -> FactBatch:
    """Make facts as a producer has them: not yet sealed."""
    return FactBatch.from_messages(messages(count, **options))


@pytest.mark.parametrize("storage", BACKENDS)
async def test_one_fact_is_appended_once(sites: Sites, storage: str) -> None:
    """A fact gets an offset; the same again is answered with the same offset, another body is refused."""
    site = await sites(storage=storage)
    client = site.client()
    first = await client.append_fact(STREAM, message("a", 1))
    again = await client.append_fact(STREAM, message("a", 1))
    second = await client.append_fact(STREAM, message("b", 1))
    assert (first.result, first.offset, first.message_id) == (Result.INSERTED, 0, "a")
    assert (again.result, again.offset, again.digest) == (Result.ALREADY_EXISTS, 0, first.digest)
    assert (second.offset, second.digest) == (1, first.digest)
    with pytest.raises(ConflictingDuplicate, match="'a' of plant") as caught:
        await client.append_fact(STREAM, message("a", 2))
    assert caught.value.details["existing_offset"] == 0


@pytest.mark.parametrize("storage", BACKENDS)
async def test_batches_are_appended_with_an_answer_per_fact(sites: Sites, storage: str) -> None:
    """A batch has an offset, a result and a digest per fact, repeats and conflicts among them included."""
    site = await sites(storage=storage)
    client = site.client()
    new = await client.append(STREAM, facts(300))
    assert new.receipt.offsets.tolist() == list(range(300))
    assert new.receipt.count(Result.INSERTED) == 300
    assert [row.tobytes() for row in new.digests] == batch(300).digests()
    assert new.message_ids is None
    mixed = FactBatch.from_messages([*messages(2), *altered(messages(2, first=2)), *messages(2, first=300)])
    answer = await client.append(STREAM, mixed)
    assert answer.receipt.offsets.tolist() == [0, 1, 2, 3, 300, 301]
    assert answer.receipt.results.tolist() == [1, 1, 2, 2, 0, 0]
    assert answer.receipt.chain_head == (await (await site.parts.store(STREAM)).stats()).chain_head


async def test_frames_are_pipelined_in_order(sites: Sites) -> None:
    """Many frames are on their way at once and keep their order; one that is refused does not end the stream."""
    site = await sites(storage="log")
    async with site.client().append_stream(STREAM) as stream:
        answers = []
        for number in range(40):
            wrong = number == 20
            frame = altered(messages(5)) if wrong else messages(5, first=5 * number)
            frame = [*frame, message("bad", subject="no subject")] if wrong else frame
            answers.append(await stream.send(FactBatch.from_messages(frame)))
        done = await asyncio.gather(*answers, return_exceptions=True)
    refused = done.pop(20)
    assert isinstance(refused, InvalidFact)
    assert refused.details["row"] == 5
    offsets = np.concatenate([answer.receipt.offsets for answer in done])  # type: ignore[union-attr]
    assert offsets.tolist() == list(range(195))


@pytest.mark.parametrize("storage", BACKENDS)
async def test_a_small_frame_does_not_overtake_a_large_one(sites: Sites, storage: str) -> None:
    """Frames of one call are stored in the order in which they were sent, whatever their sizes."""
    site = await sites(storage=storage)
    sizes = [2000, 3, 400, 1, 70, 2000, 300, 2] * 3
    async with site.client().append_stream(STREAM) as stream:
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        answers = [await stream.send(facts(size, first=at)) for size, at in zip(sizes, firsts, strict=True)]
        assert [int((await answer).receipt.offsets[0]) for answer in answers] == firsts


async def test_a_stream_of_frames_reports_each_refusal_by_itself(sites: Sites) -> None:
    """Frames for an unknown stream, with garbage or beyond the capacity fail alone, each with its own error."""
    site = await sites(stream='store_capacity = "256KiB"\nmax_batch = "256KiB"\nmax_object = "16KiB"')
    client = site.client()
    with pytest.raises(UnknownStream):
        await client.append("nowhere", facts(1))
    with pytest.raises(BufferFull) as caught:
        for number in range(100):
            await client.append(STREAM, facts(50, first=50 * number))
    assert caught.value.retryable
    assert (await client.append("audit", facts(1))).receipt.offsets.tolist() == [0]


async def test_ids_are_given_back_where_the_zone_derives_them(sites: Sites) -> None:
    """A zone with derived ids answers with the ids it derived."""
    site = await sites(zone_lines='message_ids = "payload"')
    client = site.client()
    rows = [message(None, value) for value in (1, 2, 1)]  # type: ignore[arg-type]
    answer = await client.append(STREAM, FactBatch.from_messages(rows))
    assert answer.message_ids == [row.tobytes().hex() for row in answer.digests]
    assert answer.receipt.results.tolist() == [Result.INSERTED, Result.INSERTED, Result.ALREADY_EXISTS]
    one = await client.append_fact(STREAM, rows[0])
    assert (one.result, one.message_id) == (Result.ALREADY_EXISTS, answer.message_ids[0])


@pytest.mark.parametrize("storage", BACKENDS)
async def test_a_consumer_fetches_and_confirms(sites: Sites, storage: str) -> None:
    """Fetching starts after what is confirmed, gives the same until then, and ends at the end."""
    site = await sites(storage=storage)
    client = site.client()
    await client.append(STREAM, facts(10))
    await site.consumer()
    fetched = await fetch_entries(client, "historian", limit=4)
    assert [entry.offset for entry in fetched.entries] == [0, 1, 2, 3]
    assert [entry.message for entry in fetched.entries] == messages(4)
    assert (fetched.start, fetched.next_offset, fetched.end) == (0, 4, 10)
    assert (await fetch_entries(client, "historian", limit=4)).entries == fetched.entries
    assert await client.confirm("historian", Confirmation(through=3, log_id=fetched.log_id)) == 3
    assert [entry.offset for entry in (await fetch_entries(client, "historian")).entries] == [4, 5, 6, 7, 8, 9]
    assert await client.confirm("historian", Confirmation(ranges=[(6, 9)])) == 3
    assert await client.confirm("historian", Confirmation(ranges=[(4, 5)])) == 9
    nothing = await fetch_entries(client, "historian")
    assert (nothing.entries, nothing.start, nothing.next_offset) == ([], 10, 10)


@pytest.mark.parametrize("storage", BACKENDS)
async def test_a_fetch_waits_for_facts(sites: Sites, storage: str) -> None:
    """A long poll is answered when a fact becomes durable, not when its time is over."""
    site = await sites(storage=storage)
    client = site.client()
    await site.consumer()
    waiting = asyncio.create_task(fetch_entries(client, "historian", wait_seconds=50))
    frames = asyncio.create_task(client.fetch("historian", FetchRequest(wait_seconds=50)))
    await until(lambda: site.listeners.admission.serving == 2)
    await client.append_fact(STREAM, message("a"))
    assert [entry.offset for entry in (await waiting).entries] == [0]
    assert [(frame.first, frame.last) for frame in (await frames).frames] == [(0, 0)]


@pytest.mark.parametrize("storage", BACKENDS)
async def test_frames_are_fetched_as_they_are_stored(sites: Sites, storage: str) -> None:
    """The frames of a consumer and of a range hold the entries bit by bit, with the log they belong to."""
    site = await sites(storage=storage)
    client = site.client()
    await client.append(STREAM, facts(500))
    await site.consumer()
    fetched = await client.fetch("historian", FetchRequest(max_facts=200))
    store = await site.parts.store(STREAM)
    stats = await store.stats()
    assert (fetched.log_id, fetched.start, fetched.end) == (store.log_id, 0, 500)
    assert fetched.chain_head == stats.chain_head
    [stored] = [frame async for frame in store.replay(0, end=200)]
    [frame] = fetched.frames
    assert frame.entries == stored.entries
    ranged = [frame async for frame in client.read_offsets(STREAM, 100, 400, max_facts=150)]
    assert [(frame.first, frame.last) for frame in ranged] == [(100, 249), (250, 399)]
    again = [frame async for frame in client.read_offsets(STREAM, 100, 400, max_facts=150)]
    assert [frame.entries for frame in again] == [frame.entries for frame in ranged]


async def test_large_answers_come_in_small_messages(sites: Sites) -> None:
    """A fetch of many bytes is cut into frames that fit the wire, without hole or overlap."""
    site = await sites(message_bytes=64 << 10)
    client = site.client(message_bytes=64 << 10)
    client._gives_whole_answers = False
    for number in range(8):
        await client.append(STREAM, facts(20, first=20 * number, object_bytes=2_000))
    await site.consumer()
    fetched = await client.fetch("historian", FetchRequest())
    assert len(fetched.frames) > 8
    assert [frame.first for frame in fetched.frames[1:]] == [frame.last + 1 for frame in fetched.frames[:-1]]
    assert (fetched.frames[0].first, fetched.frames[-1].last) == (0, 159)
    ids = [id for frame in fetched.frames if frame.entries for id in frame.entries.values("message_id")]
    assert ids == [each.envelope.message_id for each in messages(160)]


async def test_an_answer_as_a_whole_is_the_streamed_one(sites: Sites) -> None:
    """The same frames come in one response or in a stream, and a response is never larger than half a message."""
    site = await sites(message_bytes=128 << 10)
    client, streaming = site.client(message_bytes=128 << 10), site.client()
    streaming._gives_whole_answers = False
    for number in range(8):
        await client.append(STREAM, facts(20, first=20 * number, object_bytes=2_000))
    await site.consumer()
    for request in (FetchRequest(max_facts=1), FetchRequest(max_facts=25), FetchRequest(max_facts=7, after=11)):
        whole, streamed = await client.fetch("historian", request), await streaming.fetch("historian", request)
        assert [(frame.first, frame.last, frame.entries) for frame in whole.frames] == [
            (frame.first, frame.last, frame.entries) for frame in streamed.frames
        ]
        assert (whole.start, whole.end, whole.log_id) == (streamed.start, streamed.end, streamed.log_id)
    bounded = await client.fetch("historian", FetchRequest())
    assert 20 <= bounded.frames[-1].last < 40
    assert client._gives_whole_answers


@pytest.mark.parametrize("refusal", ["unimplemented", "entries instead"])
async def test_a_node_without_whole_answers_is_asked_for_a_stream(sites: Sites, refusal: str) -> None:
    """A client of this version gets its frames from a node that knows only streams of them."""
    site = await sites()
    client = site.client()
    await client.append(STREAM, facts(10))
    await site.consumer()
    call = client.connection.call

    async def older(name: str, request: Any, **options: Any) -> Any:
        if refusal == "unimplemented":
            raise RemoteError("what is that?", remote_code="unimplemented")
        request.frames = False
        return await call(name, request, **options)

    client.connection.call = older  # type: ignore[method-assign]
    client._followed._is_known = False
    assert (await client.fetch("historian", FetchRequest())).frames[-1].last == 9
    assert not client._gives_whole_answers


@pytest.mark.parametrize("count", [2, 200])
async def test_ages_are_told_to_those_who_know_them(sites: Sites, count: int) -> None:
    """Entries carry their age to a caller that asks for it, and look as before to one that does not."""
    site = await sites(storage="log")
    forward = await site.parts.forward(STREAM)
    span = OriginSpan("enterprise", np.arange(count), np.arange(count), np.full(count, 77))
    await forward.put_if_absent(batch(count, from_zone="enterprise"), span)
    await site.consumer("app-1", buffer=Buffer.FORWARD)
    before = site.parts.clock.now_unix_ms()
    fetched = await site.client().fetch("app-1", FetchRequest())
    assert fetched.served_at_unix_ms is not None and fetched.served_at_unix_ms >= before
    entries = EntryBatch.concat([frame.entries for frame in fetched.frames if frame.entries is not None])
    assert entries.column("origin_age_ms").to_pylist() == [77] * count
    connection = site.client().connection
    asked = pb.FetchRequest(consumer="app-1", frames=True, limit=1_000)
    selection = pb.OffsetSelection(stream=STREAM, buffer=pb.BUFFER_FORWARD, first=0)
    answers = [
        list((await connection.call("FetchFacts", asked)).frames),
        [each async for each in connection.method("FetchFrames")(pb.FetchFramesRequest(offsets=selection))],
    ]
    for _, *frames in answers:
        read = [pa.ipc.open_stream(frame.entries).read_all() for frame in frames]
        assert {tuple(table.schema.names) for table in read} == {tuple(AGELESS_ENTRY_SCHEMA.names)}
        again = EntryBatch.concat([EntryBatch.from_ipc(frame.entries) for frame in frames])
        assert again.column("origin_age_ms").null_count == count
        assert again.facts == entries.facts


async def test_entries_are_read_by_time(sites: Sites) -> None:
    """A span of time gives what became durable in it, in the store buffer and in the forward buffer."""
    site = await sites(storage="log")
    client = site.client()
    times = []
    for number in range(4):
        answer = await client.append(STREAM, facts(3, first=3 * number))
        times.append(answer.receipt.appended_at_unix_ms)
        await until(lambda: site.parts.clock.now_unix_ms() > times[-1])
    frames = [frame async for frame in client.read_times(STREAM, times[1], times[3], buffer=Buffer.STORE)]
    assert (frames[0].first, frames[-1].last) == (3, 8)
    everything = client.read_times(STREAM, 0, times[3] + 1_000, buffer=Buffer.STORE)
    assert [(frame.first, frame.last) async for frame in everything][-1][1] == 11
    assert [frame async for frame in client.read_times(STREAM, 0, 1, buffer=Buffer.STORE)] == []
    forward = await site.parts.forward(STREAM)
    receipt = await forward.put_if_absent(
        batch(2, seed=5, from_zone="enterprise"), OriginSpan("enterprise", np.arange(2), np.full(2, times[0]))
    )
    at = receipt.appended_at_unix_ms
    assert [frame.last async for frame in client.read_times(STREAM, at, at + 1)] == [1]
    with pytest.raises(InvalidArgument):
        _ = [frame async for frame in client.read_times(STREAM, 5, 4)]


async def test_a_fact_is_found_by_its_key(sites: Sites) -> None:
    """A fact of either buffer is given by its key, by default of the forward one; an unknown key gives nothing."""
    site = await sites(storage="log")
    forward = await site.parts.forward(STREAM)
    origin = OriginSpan("enterprise", np.arange(7, 9), np.full(2, 1_700_000_000_000))
    await forward.put_if_absent(batch(2, from_zone="enterprise"), origin)
    client = site.client()
    entry = await client.get_fact(STREAM, Key("enterprise", "0-000001"))
    assert entry is not None
    assert entry.message == messages(2, from_zone="enterprise")[1]
    assert (entry.offset, entry.origin and entry.origin.offset) == (1, 8)
    assert await client.get_fact(STREAM, Key("enterprise", "unknown")) is None
    await client.append(STREAM, facts(3))
    own = await client.get_fact(STREAM, Key("plant", "0-000002"), buffer=Buffer.STORE)
    assert own is not None and own.offset == 2 and own.origin is None
    assert await client.get_fact(STREAM, Key("plant", "0-000002")) is None


async def test_what_was_refused_is_recorded_by_the_sender(sites: Sites) -> None:
    """A confirmation with refusals leaves a gap record that names the receiver and the reason."""
    site = await sites()
    client = site.client()
    await client.append(STREAM, facts(5))
    site.act_as("enterprise-bsfg")
    await site.consumer("enterprise.operational")
    refusals = [Refusal(1, 2, "conflict", "as it was")]
    assert await client.confirm("enterprise.operational", Confirmation(through=4), refusals) == 4
    [gap] = await (await site.parts.store(STREAM)).gaps()
    assert (gap.first, gap.last, gap.reason) == (1, 2, GapReason.QUARANTINED)
    assert gap.detail == "enterprise: conflict: as it was"


async def test_positions_that_cannot_be_are_refused(sites: Sites) -> None:
    """Offsets beyond the end, another log, unknown consumers and empty requests have their own errors."""
    site = await sites()
    client = site.client()
    await client.append(STREAM, facts(5))
    await site.consumer()
    failures: list[tuple[type[BsfgError], Confirmation]] = [
        (OffsetOutOfRange, Confirmation(through=5)),
        (ForeignLog, Confirmation(through=1, log_id="another")),
        (InvalidArgument, Confirmation(ranges=[(3, 1)])),
        (InvalidArgument, Confirmation(through=1, peer_head=bytes(65))),
    ]
    for error, confirmation in failures:
        with pytest.raises(error):
            await client.confirm("historian", confirmation)
    with pytest.raises(UnknownConsumer):
        await fetch_entries(client, "app-unknown")
    with pytest.raises(InvalidArgument):
        _ = [frame async for frame in client.read_offsets(STREAM, 9)]
    assert (await fetch_entries(client, "historian")).start == 0


async def test_a_link_pulls_over_the_wire(sites: Sites) -> None:
    """A `ClientLink` serves the handoff: it skips what returns to its zone and what it does not carry."""
    site = await sites(storage="log")
    rows = [
        message("1"),
        message("2", from_zone="plant", to_zone="lab"),
        message("3", from_zone="plant"),
    ]
    await site.client().append(STREAM, FactBatch.from_messages(rows))
    await site.consumer("enterprise.operational")
    site.act_as("enterprise-bsfg")
    link = ClientLink("plant", "enterprise.operational", site.client(), ("enterprise",))
    fetched = await link.fetch(FetchRequest())
    assert [(frame.first, frame.last, frame.gap is None) for frame in fetched.frames] == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, True),
    ]
    assert await link.confirm(Confirmation(through=2, log_id=fetched.log_id, peer_head=b"head")) == 2
    state = await site.parts.storage.cursors.consumer("enterprise.operational")
    assert state.peer_head == b"head"


async def test_a_held_gate_serves_nothing(sites: Sites) -> None:
    """While an operator holds the gate to a zone, its fetches are refused and say why."""
    site = await sites()
    await site.consumer("enterprise.operational")
    site.act_as("enterprise-bsfg")
    client = site.client()
    site.parts.links.hold("enterprise", "sender", by="operator", reason="works on the firewall")
    with pytest.raises(GateHeld, match="works on the firewall") as caught:
        await client.fetch("enterprise.operational", FetchRequest())
    assert caught.value.retryable
    site.parts.links.release("enterprise", "sender", by="operator", reason="done")
    assert (await client.fetch("enterprise.operational", FetchRequest())).frames == []


async def test_nobody_does_what_his_role_does_not_allow(sites: Sites) -> None:
    """Each refusal names its rule, changes nothing and is recorded."""
    site = await sites()
    await site.consumer()
    client = site.client()
    site.act_as("viewer")
    with pytest.raises(PermissionRefused, match="roles are viewer"):
        await client.append_fact(STREAM, message("a"))
    with pytest.raises(PermissionRefused):
        await client.append(STREAM, facts(3))
    with pytest.raises(PermissionRefused):
        await fetch_entries(client, "historian")
    with pytest.raises(PermissionRefused):
        await client.confirm("historian", Confirmation(through=0))
    site.act_as("gone")
    with pytest.raises(IdentityRevoked, match="laptop lost"):
        await client.append_fact(STREAM, message("a"))
    site.act_as("app")
    with pytest.raises(PermissionRefused, match="from_zone 'lab'"):
        await client.append_fact(STREAM, message("a", from_zone="lab"))
    assert (await (await site.parts.store(STREAM)).stats()).end == 0
    rules = [str(decision.rule) for decision, _ in site.refusals]
    assert rules == ["role_allows_action"] * 4 + ["not_revoked", "from_zone_in_row"]


async def test_an_answer_that_is_no_answer_is_refused(sites: Sites) -> None:
    """A client takes nothing from a stream that does not begin with its head."""
    site = await sites()

    async def headless(*arguments: object, **options: object):  # type: ignore[no-untyped-def]
        return
        yield

    client = site.client()
    client._gives_whole_answers = False
    client.connection.answers = headless  # type: ignore[method-assign]
    with pytest.raises(FrameInvalid):
        await client.fetch("historian", FetchRequest())


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_call_goes_where_its_address_says(sites: Sites, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also on a machine with a proxy for web pages, which knows nothing of this zone."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    site = await sites()
    assert (await site.client().append_fact(STREAM, message("m-1"))).result == Result.INSERTED
