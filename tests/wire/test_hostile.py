"""Callers that vanish, dawdle, lie or flood: they hurt themselves and nobody else."""

import asyncio
import gzip
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from tests.wire.conftest import Sites
from tests.wire.entries import fetch_entries
from tests.wire.rawhttp2 import DATA, GOAWAY, HEADERS, RST_STREAM, Raw, prefixed
from tests.wire.site import STREAM, Site, until

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, FrameInvalid, MessageTooLarge, Overloaded, PeerUnreachable, TimedOut
from bsfg.fact import Key
from bsfg.journey.link import FetchRequest
from bsfg.ports import Buffer, Result
from bsfg.testing.facts import message, messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import BoundaryClient

APPEND = "/bsfg.v1.Boundary/AppendFacts"


def facts(count: int, **options: Any) -> FactBatch:
    """Make facts as a producer has them."""
    return FactBatch.from_messages(messages(count, **options))


async def quiet(site: Site) -> None:
    """Wait until the site serves nobody and holds no bytes."""
    await until(lambda: site.listeners.admission.serving == 0 and site.listeners.admission.budget.used == 0)


async def works(site: Site, id: str) -> None:
    """Check that a polite caller is served."""
    assert (await site.client().append_fact(STREAM, message(id))).result == Result.INSERTED


def rss_bytes() -> int:
    """Give the memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_a_client_that_vanishes_in_mid_stream(sites: Sites) -> None:
    """What a vanished client had sent is stored whole or not at all, and the node is free for others."""
    site = await sites(storage="log")
    for attempt in range(5):
        client = BoundaryClient(site.connection())
        stream = client.append_stream(STREAM)
        sent = [await stream.send(facts(50, first=500 * attempt + 50 * number)) for number in range(10)]
        await asyncio.wait([sent[attempt]])
        await client.connection.close()
        done = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(each, PeerUnreachable) or len(each.receipt.offsets) == 50 for each in done)  # type: ignore[union-attr]
    await quiet(site)
    assert (await (await site.parts.store(STREAM)).stats()).end % 50 == 0
    await works(site, "after")
    again = await site.client().append(STREAM, facts(2_500))
    assert again.receipt.count(Result.CONFLICT) == 0
    assert (await (await site.parts.store(STREAM)).stats()).end == 2_501


async def test_a_client_that_vanishes_while_it_waits(sites: Sites) -> None:
    """A long poll of somebody who is gone is given up."""
    site = await sites()
    await site.consumer()
    client = BoundaryClient(site.connection())
    waiting = asyncio.create_task(client.fetch("historian", FetchRequest(wait_seconds=60)))
    await until(lambda: site.listeners.admission.serving == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await quiet(site)
    await client.close()


async def test_messages_that_are_too_large(sites: Sites) -> None:
    """A message beyond the limit is refused by its length, as a call of its own and inside a stream."""
    site = await sites(message_bytes=100_000)
    client = site.client()
    with pytest.raises(MessageTooLarge):
        await client.append_fact(STREAM, message("a", "x" * 200_000))
    with pytest.raises(MessageTooLarge):
        await client.append(STREAM, facts(1_000))
    await works(site, "after")
    assert len(await client.append(STREAM, facts(10))) == 10


async def test_a_length_of_four_gibibytes(sites: Sites) -> None:
    """A message that claims to have 4 GiB is refused when its length is read; nothing is allocated for it."""
    site = await sites()
    before = rss_bytes()
    for number in range(20):
        raw = await Raw.connect(site.listeners.grpc.port)
        raw.call(APPEND, 1, prefixed(bytes(1_000), length=0xFFFFFFFF))
        found = await raw.frames(HEADERS, RST_STREAM, GOAWAY)
        trailers = b"".join(payload for kind, payload in found if kind == HEADERS)
        assert b"8" in trailers or any(kind in (RST_STREAM, GOAWAY) for kind, _ in found), number
        raw.close()
    await quiet(site)
    assert rss_bytes() - before < 64 << 20
    await works(site, "after")


async def test_garbage_on_the_wire(sites: Sites) -> None:
    """Random bytes, half a greeting and frames of nonsense end their own connection and nothing else."""
    site = await sites()
    chance = random.Random(7)
    for port in (site.listeners.grpc.port, site.listeners.http.port):
        for _ in range(25):
            raw = await Raw.connect(port, greet=False)
            raw.writer.write(chance.randbytes(chance.randrange(1, 3_000)) + b"\r\n\r\n")
            ended = asyncio.create_task(raw.ended())
            await asyncio.wait([ended], timeout=0.05)
            raw.close()
            await ended
    raw = await Raw.connect(site.listeners.grpc.port)
    raw.writer.write(chance.randbytes(50_000))
    await raw.ended()
    await quiet(site)
    await works(site, "after")


async def test_paths_and_headers_that_are_no_text(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    """A call of a path that is no text is an unknown method like others; headers may hold any bytes."""
    site = await sites()
    for path in (b"/\xff\xfe\x80", b"\xff", b"/bsfg.v1.Boundary/AppendFact\xc3", b"/bsfg.v1.Boundary/\xed\xa0\x80"):
        raw = await Raw.connect(site.listeners.grpc.port)
        raw.call(path, 1, end=True)
        found = await raw.frames(HEADERS, RST_STREAM, GOAWAY)
        assert any(b"grpc-status\x0212" in payload for kind, payload in found if kind == HEADERS), found
        raw.close()
        await works(site, f"after {path!r}")
    assert not caplog.records
    raw = await Raw.connect(site.listeners.grpc.port)
    raw.call("/grpc.health.v1.Health/Check", 1, prefixed(b""), end=True, name=b"\xff\xfe\x80")
    assert [kind for kind, _ in await raw.frames(HEADERS)][-1] == HEADERS
    raw.close()


async def test_messages_that_are_none(sites: Sites) -> None:
    """A message that does not parse, and an unknown method, are errors of the call; the connection goes on."""
    site = await sites()
    channel = grpc.aio.insecure_channel(site.grpc_address)
    raw = channel.unary_unary("/bsfg.v1.Boundary/AppendFact", lambda data: data, lambda data: data)
    for data in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", os.urandom(200)):
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/bsfg.v1.Boundary/Delete", lambda data: data, lambda data: data)(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await channel.close()
    await works(site, "after")


@pytest.mark.parametrize("kind", ["garbage", "cut", "flipped", "compressed", "other schema", "many rows"])
async def test_frames_that_are_no_arrow(sites: Sites, kind: str) -> None:
    """Facts that are no facts are refused frame by frame, and the stream goes on."""
    import pyarrow as pa

    site = await sites()
    good: bytes = facts(100).to_ipc().to_pybytes()
    chance = random.Random(3)

    def bad() -> bytes:
        if kind == "garbage":
            return chance.randbytes(500)
        if kind == "cut":
            return good[: chance.randrange(len(good))]
        if kind == "flipped":
            at = chance.randrange(len(good) // 4)
            return good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :]
        batch = facts(100).record_batch if kind != "other schema" else pa.record_batch({"x": [1, 2, 3]})
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            for _ in range(3 if kind == "many rows" else 1):
                writer.write_batch(batch)
        return bytes(sink.getvalue())

    method = site.client().connection.method("AppendFacts")
    frames = [pb.AppendFrame(stream=STREAM, facts=bad(), sequence=number) for number in range(20)]
    frames.append(pb.AppendFrame(stream=STREAM, facts=good, sequence=99))

    async def requests() -> AsyncIterator[pb.AppendFrame]:
        for frame in frames:
            yield frame

    acks = [ack async for ack in method(requests())]
    assert [ack.sequence for ack in acks] == [*range(20), 99]
    codes = {ack.error.code for ack in acks[:-1] if ack.HasField("error")}
    assert codes <= {"frame_invalid", "invalid_fact", "fact_too_large"}
    assert codes or kind in ("flipped", "many rows")
    assert not acks[-1].HasField("error")


async def test_compressed_calls_are_not_taken(sites: Sites) -> None:
    """A caller cannot make the node expand his bytes: compressed messages are refused."""
    site = await sites()
    bomb = gzip.compress(bytes(200 << 20))
    before = rss_bytes()
    raw = await Raw.connect(site.listeners.grpc.port)
    raw.call(APPEND, 1, prefixed(bomb, compressed=True))
    found = await raw.frames(HEADERS, RST_STREAM, GOAWAY)
    assert DATA not in {kind for kind, _ in found}
    raw.close()
    await quiet(site)
    assert rss_bytes() - before < 100 << 20
    channel = grpc.aio.insecure_channel(site.grpc_address, compression=grpc.Compression.Gzip)
    append = channel.unary_unary("/bsfg.v1.Boundary/AppendFact", lambda data: data, lambda data: data)
    with pytest.raises(grpc.aio.AioRpcError):
        await append(bytes(10_000))
    await channel.close()
    await works(site, "after")


async def test_slow_heads_are_given_up(sites: Sites) -> None:
    """An HTTP connection that says nothing, or trickles its request, is ended; a trickled body too."""
    site = await sites(handshake_timeout_seconds=0.2, idle_timeout_seconds=0.2)
    port = site.listeners.http.port
    silent = await Raw.connect(port, greet=False)
    assert await silent.ended()
    slow = await Raw.connect(port, greet=False)
    ended = asyncio.create_task(slow.ended())
    slow.writer.write(b"GET /healthz HTTP/1.1\r\n")
    while not ended.done():
        slow.writer.write(b"x-more: 1\r\n")
        await asyncio.wait([ended], timeout=0.02)
    body = await Raw.connect(port, greet=False)
    body.writer.write(f"POST /v1/streams/{STREAM}/facts HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
    answer = await body.rest()
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b'"code":"timed_out"' in answer
    await quiet(site)
    assert (await site.http("GET", "/healthz")).status == 200


async def test_an_early_answer_ends_an_endless_body(sites: Sites) -> None:
    """Who is refused cannot go on sending: the connection ends with the answer."""
    site = await sites()
    site.act_as("viewer")
    raw = await Raw.connect(site.listeners.http.port, greet=False)
    raw.writer.write(b"PUT /v1/objects/b/k HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 403 ")


async def test_too_many_connections_are_not_taken(sites: Sites) -> None:
    """Beyond the limit a connection is closed at once, in all and from one address, and places come back."""
    site = await sites(connections=4, handshake_timeout_seconds=60)
    port = site.listeners.http.port
    connections = site.listeners.http._server.server_state.connections
    held = [await Raw.connect(port, greet=False) for _ in range(2)]
    await until(lambda: len(connections) == 2)
    extra = await Raw.connect(port, greet=False)
    assert await extra.ended(), "one address has half of all"
    held += [await Raw.connect(port, greet=False, host="127.0.0.2") for _ in range(2)]
    await until(lambda: len(connections) == 4)
    extra = await Raw.connect(port, greet=False, host="127.0.0.3")
    assert await extra.ended(), "there is no place for anybody"
    for raw in held:
        raw.close()
    await until(lambda: not connections)
    assert (await site.http("GET", "/healthz")).status == 200


async def test_silent_calls_and_connections_end(sites: Sites) -> None:
    """A gRPC stream without frames ends well; a connection that never shakes hands is closed."""
    site = await sites(idle_timeout_seconds=0.2, handshake_timeout_seconds=0.3)
    stream = site.client().append_stream(STREAM)
    assert len(await stream.append(facts(2))) == 2
    await until(stream._reader.done)
    await quiet(site)
    raw = await Raw.connect(site.listeners.grpc.port, greet=False)
    assert await raw.ended()
    assert len(await site.client().append(STREAM, facts(3))) == 3


async def test_calls_without_a_request_hold_no_place(sites: Sites) -> None:
    """A call that never sends its request, or stops in the middle of it, counts against its caller and ends."""
    site = await sites(idle_timeout_seconds=0.5, concurrent_per_identity=5)
    raw = await Raw.connect(site.listeners.grpc.port)
    for number in range(4):
        raw.call("/bsfg.v1.Boundary/AppendFact", 2 * number + 1, prefixed(bytes(900), length=1_000)[: 100 * number])
    await until(lambda: site.listeners.admission.serving == 4)
    await quiet(site)
    raw.call("/bsfg.v1.Boundary/AppendFact", 11, end=True)
    await raw.frames(HEADERS)
    raw.close()
    await works(site, "after")


async def test_answers_that_nobody_reads_hold_no_place(sites: Sites) -> None:
    """A caller that stops reading loses his place after a while."""
    site = await sites(storage="log", idle_timeout_seconds=3.0)
    client = site.client()
    for number in range(10):
        await client.append(STREAM, facts(500, first=500 * number, object_bytes=2_000))
    method = site.client().connection.method("FetchFrames")
    call = method(pb.FetchFramesRequest(offsets=pb.OffsetSelection(stream=STREAM, first=0), max_facts=100))
    await call.read()
    await quiet(site)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_who_reads_nothing_has_so_much_and_no_more(sites: Sites) -> None:
    """Answers count until they are taken: further calls wait, others are served, and his connection ends."""
    site = await sites(storage="log", message_bytes=1 << 16, memory_ceiling_bytes=1 << 20, idle_timeout_seconds=2.0)
    await site.consumer()
    client = site.client()
    for number in range(10):
        await client.append_fact(STREAM, message(f"fact-{number}", "x" * 20_000))
    admission, untaken = site.listeners.admission, site.listeners.grpc._calls.untaken
    untaken._seconds = 5.0
    request = prefixed(pb.FetchRequest(consumer="historian", limit=100).SerializeToString())
    raw = await Raw.connect(site.listeners.grpc.port, window=0)
    for number in range(50):
        raw.call("/bsfg.v1.Boundary/FetchFacts", 2 * number + 1, request, end=True)
    await until(lambda: untaken.of("app") > 0 and admission.serving > 0)
    assert admission.sending.used <= admission.sending._owner_bytes
    assert untaken.of("app") <= 4
    await works(site, "meanwhile")
    await raw.ended()
    await quiet(site)
    await until(lambda: admission.sending.used == 0 and untaken.of("app") == 0)
    assert (await client.fetch("historian", FetchRequest())).facts


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Check", "/bsfg.v1.Boundary/FetchFacts"])
async def test_small_answers_that_nobody_takes_are_counted_too(sites: Sites, path: str) -> None:
    """However small an answer is, its call is not over until it is taken, and there are only so many of them."""
    site = await sites(concurrent_per_identity=10)
    await site.consumer()
    request = b"" if "Check" in path else pb.FetchRequest(consumer="historian").SerializeToString()
    untaken = site.listeners.grpc._calls.untaken
    # Of one connection gRPC takes as many calls at once as an identity may make.
    connections = [await Raw.connect(site.listeners.grpc.port, window=0) for _ in range(3)]
    for number in range(21):
        connections[number // 10].call(path, 2 * number + 1, prefixed(request), end=True)
        await until(lambda number=number: untaken.of("app") == min(number + 1, 20))  # type: ignore[misc]
    await until(lambda: site.listeners.admission.refused > 0)
    assert untaken.of("app") == 20
    for each in connections:
        each.close()
    await until(lambda: untaken.of("app") == 0)
    await works(site, "after")


async def test_a_stream_that_ended_in_silence_is_opened_again(sites: Sites) -> None:
    """The client's own stream of batches survives the node ending it for silence."""
    site = await sites(idle_timeout_seconds=0.1)
    client = site.client()
    for number in range(3):
        assert len(await client.append(STREAM, facts(5, first=5 * number))) == 5
        await until(client._appending[STREAM]._reader.done)


async def test_a_reader_that_does_not_read(sites: Sites) -> None:
    """A download that nobody takes waits in the log and not in the node's memory, and ends when he goes."""
    site = await sites(storage="log")
    client = site.client()
    for number in range(30):
        await client.append(STREAM, facts(500, first=500 * number, object_bytes=2_000))
    await client.close()
    before = rss_bytes()
    method = site.client().connection.method("FetchFrames")
    selection = pb.OffsetSelection(stream=STREAM, first=0)
    calls = [method(pb.FetchFramesRequest(offsets=selection, max_facts=100)) for _ in range(10)]
    for call in calls:
        await call.read()
    await asyncio.sleep(0.3)
    assert rss_bytes() - before < 150 << 20
    for call in calls:
        call.cancel()
    await quiet(site)


async def test_more_calls_than_are_served_are_refused_with_a_hint(sites: Sites) -> None:
    """A caller with too many calls is told to wait, and others are served meanwhile."""
    site = await sites(concurrent_per_identity=5, concurrent_requests=50)
    await site.consumer()
    client = site.client()
    waiting = [asyncio.create_task(client.fetch("historian", FetchRequest(wait_seconds=60))) for _ in range(4)]
    waiting.append(asyncio.create_task(fetch_entries(client, "historian", wait_seconds=60)))  # type: ignore[arg-type]
    await until(lambda: site.listeners.admission.serving == 5)
    site.listeners.admission._by_caller["app"] = 5
    with pytest.raises((Overloaded, TimedOut)) as caught:
        await fetch_entries(BoundaryClient(site.connection()), "historian")
    assert caught.value.retryable
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_operation_that_takes_too_long_is_ended(sites: Sites) -> None:
    """What does not finish in time is answered with `timed_out`, on both listeners."""
    site = await sites(request_timeout_seconds=0.1)

    class Stuck:
        """A buffer that never answers."""

        async def get(self, key: Key) -> None:
            await asyncio.Event().wait()

    async def stuck(stream: str) -> Any:
        return Stuck()

    type(site.parts).forward, kept = (lambda self, stream: stuck(stream)), type(site.parts).forward  # type: ignore[method-assign]
    try:
        with pytest.raises(TimedOut):
            await site.client().get_fact(STREAM, Key("enterprise", "x"), buffer=Buffer.FORWARD)
        answer = await site.http("GET", f"/v1/streams/{STREAM}/facts/enterprise/x")
        assert (answer.status, answer.json()["code"]) == (504, "timed_out")
    finally:
        type(site.parts).forward = kept  # type: ignore[method-assign]


async def test_a_defect_is_answered_without_its_insides(sites: Sites, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody expected is logged with its traceback and answered as ``internal`` without a word of it."""
    site = await sites()
    await site.consumer()

    async def broken(*arguments: object) -> None:
        raise RuntimeError("secret insides")

    site.boundary.confirm = broken  # type: ignore[method-assign, assignment]
    from bsfg.ports import Confirmation

    with pytest.raises(BsfgError) as caught:
        await site.client().confirm("historian", Confirmation(through=0))
    answer = await site.http("POST", "/v1/consumers/historian/confirm", '{"through": 0}')
    assert (answer.status, answer.json()["code"]) == (500, "internal")
    assert "secret" not in str(caught.value.to_dict()) + answer.body.decode()
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("secret insides") >= 2


@pytest.mark.parametrize("tls", [False, True])
async def test_two_hundred_clients_at_once(sites: Sites, tls: bool) -> None:
    """Two hundred clients with connections of their own append at once; every fact is there exactly once.

    A busy machine may take longer for two hundred handshakes than gRPC waits for one: who is told so tries again.
    """
    site = await sites(storage="log", tls=tls)
    clients = [BoundaryClient(site.connection()) for _ in range(200)]

    async def work(number: int, client: BoundaryClient) -> None:
        for _ in range(10):
            with suppress(PeerUnreachable):
                await client.append_fact(STREAM, message(f"{number}-0", 0))
                break
        for at in range(3):
            await client.append_fact(STREAM, message(f"{number}-{at}", at))
        answer = await client.append(STREAM, facts(20, seed=number))
        assert answer.receipt.count(Result.INSERTED) == 20

    await asyncio.gather(*(work(number, client) for number, client in enumerate(clients)))
    await asyncio.gather(*(client.close() for client in clients))
    await quiet(site)
    frames = [frame async for frame in (await site.parts.store(STREAM)).replay(0)]
    ids = [id for frame in frames if frame.entries for id in frame.entries.values("message_id")]
    assert len(ids) == len(set(ids)) == 200 * 23


async def test_a_flood_of_invalid_requests(sites: Sites) -> None:
    """While others send nothing but nonsense, a good producer's facts all arrive and memory stays bounded."""
    site = await sites(storage="log")
    stop = asyncio.Event()

    async def nonsense(client: BoundaryClient, chance: random.Random) -> int:
        count = 0
        while not stop.is_set():
            count += 1
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: client.append_fact(STREAM, message("x", subject="nonsense")),
                lambda: client.append_fact("nowhere", message("x")),
                lambda: client.append_fact(STREAM, message("x", from_zone="lab")),
                lambda: fetch_entries(client, "nobody"),
            ]
            with pytest.raises(BsfgError):
                await chance.choice(calls)()
        return count

    await works(site, "before")
    before = rss_bytes()
    floods = [asyncio.create_task(nonsense(site.client(), random.Random(seed))) for seed in range(20)]
    good = site.client()
    for number in range(50):
        assert (await good.append_fact(STREAM, message(f"good-{number}"))).result == Result.INSERTED
        assert len(await good.append(STREAM, facts(20, first=20 * number))) == 20
    stop.set()
    assert sum(await asyncio.gather(*floods)) > 20
    await good.close()
    await quiet(site)
    assert rss_bytes() - before < 200 << 20
    assert (await (await site.parts.store(STREAM)).stats()).end == 1 + 50 + 1_000


async def test_a_peer_whose_acks_lie(sites: Sites) -> None:
    """A client does not believe acks for frames that it did not send, or that hold less than they claim."""
    site = await sites()
    stream = site.client().append_stream(STREAM)
    frames = stream
    future = await stream.send(facts(5))
    await future
    waiting: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    frames._waiting[77] = waiting, b""  # type: ignore[assignment]
    with pytest.raises(FrameInvalid):
        frames._take(pb.AppendAck(sequence=78))
    frames._take(pb.AppendAck(sequence=77, count=9))
    with pytest.raises(FrameInvalid):
        await waiting
