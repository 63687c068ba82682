"""Connections end after a while, so that hands are shaken again; those who call as they should do not notice."""

import asyncio
import http.client
import socket
import ssl
import struct
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc.aio import Metadata
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.wire.conftest import Sites
from tests.wire.rawhttp2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, headers
from tests.wire.site import STREAM, Site, files_of, until
from tests.wire.test_authorities import _Later, revoke, trust_again

from bsfg.batch import FactBatch
from bsfg.errors import IdentityRevoked, PeerUnreachable
from bsfg.journey.link import FetchRequest
from bsfg.ports import Confirmation
from bsfg.testing.facts import message, messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire import grpc_calls, streams
from bsfg.wire.connection import CALLS_IN_VAIN, Connection
from bsfg.wire.convert import envelope_message, fact_message
from bsfg.wire.tls import client_context


async def test_callers_ride_over_the_end_of_connections(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single facts, batches in streams, and questions of a link go on over new connections without one error."""
    monkeypatch.setattr(streams, "STREAM_SECONDS", 0.05)
    site = await sites(tls=True, connection_age_seconds=0.5)
    await site.consumer("historian")
    client = site.client("app")
    seen: set[str] = set()
    _watch_callers(site, seen)
    sent = 0
    while len(seen) < 4:
        await client.append_fact(STREAM, message(f"single-{sent}"))
        facts = FactBatch.from_messages(messages(5, first=5 * sent))
        await asyncio.gather(client.append(STREAM, facts), client.append(STREAM, facts))
        fetched = await client.fetch("historian", FetchRequest())
        if fetched.frames:
            await client.confirm("historian", Confirmation(through=fetched.frames[-1].last))
        sent += 1
    assert (await (await site.parts.store(STREAM)).stats()).end == 6 * sent
    assert site.refusals == []


@pytest.mark.parametrize("times", [1, CALLS_IN_VAIN + 1])
async def test_what_came_too_late_for_its_connection_goes_over_the_next(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A call that gRPC could not send any more is made again; for a node that hangs up on every one, not for ever."""
    site = await sites()
    await site.consumer("historian")
    client = site.client()
    late = _Late(client.connection)
    monkeypatch.setattr(client.connection, "method", late.method)

    async def everything() -> None:
        await client.append(STREAM, FactBatch.from_messages(messages(2)))
        assert (await client.fetch("historian", FetchRequest())).end == 2
        assert await client.confirm("historian", Confirmation(through=1), again_and_again=True) == 1
        assert [frame.last async for frame in client.read_offsets(STREAM, 0, 2)] == [1]

    late.left = dict.fromkeys(("AppendFacts", "FollowFacts", "ConfirmReceipts", "FetchFrames"), times)
    if times == 1:
        await everything()
        assert not any(late.left.values())
        return
    for name in list(late.left):
        with pytest.raises(PeerUnreachable):
            await everything()
        late.left[name] = 0
    client.hang_up()
    await everything()


async def test_an_answer_that_has_begun_was_sent(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may say that it never was; what came of it already is not given a second time."""
    site = await sites()
    client = site.client()
    await client.append(STREAM, FactBatch.from_messages(messages(2)))
    calls: list[str] = []

    def begun(name: str) -> Any:
        calls.append(name)
        return lambda request, **options: _Unsent(pb.FetchFrame(first=0, last=-1, head=pb.FetchHead(log_id="x")))

    monkeypatch.setattr(client.connection, "method", begun)
    with pytest.raises(PeerUnreachable):
        _ = [frame async for frame in client.read_offsets(STREAM, 0, 2)]
    assert calls == ["FetchFrames"]


async def test_a_long_answer_ends_with_its_reader(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is revoked while he reads gets no more of an answer that was begun before."""
    monkeypatch.setattr(grpc_calls, "JUDGED_SECONDS", 0.0)
    site = await sites(tls=True)
    client = site.client("app")
    for number in range(6):
        await client.append(STREAM, FactBatch.from_messages(messages(150, first=150 * number, object_bytes=20_000)))
    reading = client.read_offsets(STREAM, 0, 900)
    await anext(reading)
    trust_again(site, crl=revoke(site.folder, "app"))
    with pytest.raises(IdentityRevoked):
        async for _ in reading:
            pass


async def test_who_watches_in_silence_is_judged_too(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is revoked while he watches the health of a node, which says nothing, does not keep his place for ever."""
    monkeypatch.setattr(grpc_calls, "JUDGED_SECONDS", 0.1)
    site = await sites(tls=True)
    client = site.client("app")
    await client.connection.check_health()
    watching = health_pb2_grpc.HealthStub(client.connection._channel).Watch(health_pb2.HealthCheckRequest())
    await watching.read()
    trust_again(site, crl=revoke(site.folder, "app"))
    async with asyncio.timeout(30):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await watching.read()
    assert isinstance(client.connection.translated(ended.value), IdentityRevoked)


async def test_a_stream_without_end_is_ended_between_two_frames(sites: Sites) -> None:
    """Who sends over one stream for ever does so in one call after the other, and loses nothing."""
    site = await sites(tls=True, connection_age_seconds=0.3)
    stream = site.client("app").append_stream(STREAM)
    await stream.append(FactBatch.from_messages(messages(3)))
    await until(stream._reader.done)
    await stream.append(FactBatch.from_messages(messages(3, first=3)))
    await stream.close()
    assert (await (await site.parts.store(STREAM)).stats()).end == 6


async def test_an_http_connection_ends_with_an_answer(sites: Sites) -> None:
    """When it is old the answer says that it is the last one; before, a connection is used again and again."""
    site = await sites(tls=True, connection_age_seconds=0.5)
    context = client_context(files_of(site.folder, "app"))

    def ask() -> list[str | None]:
        connection = http.client.HTTPSConnection("127.0.0.1", site.listeners.http.port, context=context)
        said: list[str | None] = []
        while not said or said[-1] is None:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
            said.append(answer.headers.get("connection"))
        connection.close()
        return said

    assert (await asyncio.to_thread(ask))[-1] == "close"


@pytest.mark.parametrize("end", ["expired", "revoked"])
async def test_a_resumed_session_brings_nothing_back(sites: Sites, end: str) -> None:
    """gRPC resumes TLS sessions without looking at dates again; the call over one is refused all the same."""
    site = await sites(tls=True)
    context = client_context(files_of(site.folder, "app"))
    context.set_alpn_protocols(["h2"])
    session, _ = await asyncio.to_thread(_call, site, context)
    assert (await asyncio.to_thread(_call, site, context, session))[1], "sessions are not resumed any more"
    assert site.refusals == []
    assert (await (await site.parts.store(STREAM)).stats()).end == 1
    if end == "expired":
        site.parts.guard = replace(site.parts.guard, clock=_Later())
    else:
        trust_again(site, crl=revoke(site.folder, "app"))
    assert (await asyncio.to_thread(_call, site, context, session))[1]
    decision, _ = site.refusals[-1]
    assert decision.error is not None
    assert decision.error.code == ("certificate_invalid" if end == "expired" else "identity_revoked")


async def test_http_gives_no_session_to_resume(sites: Sites) -> None:
    """The HTTP listener gives no tickets, so that every connection shows its certificate."""
    site = await sites(tls=True)
    context = client_context(files_of(site.folder, "app"))

    def ask(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        address = ("127.0.0.1", site.listeners.http.port)
        with (
            socket.create_connection(address) as plain,
            context.wrap_socket(plain, session=session) as secured,
        ):
            secured.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while secured.recv(1_000):
                pass
            return secured.session, secured.session_reused

    session, _ = await asyncio.to_thread(ask, None)
    assert (await asyncio.to_thread(ask, session))[1] is False


def _watch_callers(site: Site, seen: set[str]) -> None:
    """Take note of the addresses that callers of an append come from: each is a connection of its own."""
    prepare = site.boundary.prepare

    async def watched(caller: Any, stream: str, facts: Any) -> Any:
        seen.add(caller.address)
        return await prepare(caller, stream, facts)

    site.boundary.prepare = watched  # type: ignore[method-assign]


def _call(
    site: Site, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """Append a fact over a connection of its own; give its TLS session, and whether it was an earlier one."""
    sent = message("resumed")
    request = pb.AppendRequest(stream=STREAM, envelope=envelope_message(sent.envelope), fact=fact_message(sent.fact))
    body = request.SerializeToString()
    call = frame(HEADERS, END_HEADERS, 1, headers("/bsfg.v1.Boundary/AppendFact"))
    call += frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(body)) + body)
    address = ("127.0.0.1", site.listeners.grpc.port)
    with socket.create_connection(address) as plain, context.wrap_socket(plain, session=session) as secured:
        secured.sendall(PREFACE + frame(SETTINGS) + call)
        stream = secured.makefile("rb")
        while True:
            head = stream.read(9)
            assert len(head) == 9, "the connection ended without an answer"
            stream.read(int.from_bytes(head[:3], "big"))
            if head[3] == HEADERS and head[4] & END_STREAM:
                return secured.session, bool(secured.session_reused)


class _Late:
    """Ends the first calls of some methods as gRPC ends those that come while a connection takes no more."""

    def __init__(self, connection: Connection) -> None:
        self._method = connection.method
        self.left: dict[str, int] = {}

    def method(self, name: str) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            call = self._method(name)(*arguments, **options)
            if self.left.get(name, 0):
                self.left[name] -= 1
                call.cancel()
                return _Unsent()
            return call

        return called


class _Unsent:
    _cython_call = None

    def __init__(self, *given: Any) -> None:
        self._given = list(given)

    def cancel(self) -> None:
        pass

    def done(self) -> bool:
        return False

    async def write(self, message: object) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> object:
        if self._given:
            return self._given.pop(0)
        raise grpc.aio.AioRpcError(await self.code(), Metadata(), Metadata(), await self.details())

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "Stream removed (GOAWAY received; Error code: 0; Debug Text: max_age)"

    async def initial_metadata(self) -> Metadata:
        return Metadata()

    trailing_metadata = initial_metadata
    __anext__ = read

    def __aiter__(self) -> Any:
        return self
