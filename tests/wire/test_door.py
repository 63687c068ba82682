"""Identity first: whoever may not call an operation at all is told so before anything of his request is read."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, files_of, until

from bsfg.config.kinds import ROLE_ACTIONS, Role
from bsfg.errors import FrameInvalid, InvalidArgument, MessageTooLarge, Overloaded
from bsfg.fact import Key
from bsfg.ports import Result
from bsfg.testing.facts import message
from bsfg.wire import admin_pb2 as admin_pb
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire import limits
from bsfg.wire.connection import _StatusKept
from bsfg.wire.limits import STRANGERS, Awaited
from bsfg.wire.messages import ADMIN, BOUNDARY
from bsfg.wire.operations import HEALTH_SERVICE, HTTP, PAGES, REFLECTION_SERVICE, ROUTES, TERMS, Asks, Terms
from bsfg.wire.service import ObjectInfo
from bsfg.wire.status import ERROR_METADATA, decoded, from_rpc_error
from bsfg.wire.tls import client_context, grpc_channel_credentials, grpc_channel_options

GARBAGE = b"\xff\xff\xff\xff"
"""No message of any type."""

LARGE_BYTES = 2 << 20

ROLES: dict[str, tuple[Role, ...]] = {
    "app": (Role.PRODUCER, Role.CONSUMER),
    "enterprise-bsfg": (Role.PEER,),
    "pipeline": (Role.PIPELINE,),
    "operator": (Role.OPERATOR,),
    "viewer": (Role.VIEWER,),
}
REFUSED = {"gone": "identity_revoked", "late": "identity_revoked", "stranger": "identity_unknown"}
CALLS = [each for each in TERMS.values() if each.service not in (HTTP, PAGES)]


def expected(name: str, terms: Terms) -> str | None:
    """Give the code with which the door refuses somebody, None when he passes."""
    if terms.asks in (Asks.CERTIFICATE, Asks.NOTHING):
        return None
    if name in REFUSED:
        return REFUSED[name]
    allowed = {str(action) for role in ROLES[name] for action in ROLE_ACTIONS[role]}
    return None if terms.asks == Asks.ROW or allowed.intersection(terms.actions) else "permission_denied"


@pytest.fixture(autouse=True)
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer at once, however many wrong requests a test makes."""
    monkeypatch.setattr(limits, "FREE_FAULTS", 1e9)


def channel(site: Site, name: str) -> grpc.aio.Channel:
    """Open a connection of one identity, without anything of ours in between."""
    connection = site.connection(name)
    watched = connection._watched
    assert watched is not None
    watched.refresh()
    options = grpc_channel_options("plant-bsfg")
    return grpc.aio.secure_channel(site.grpc_address, grpc_channel_credentials(watched.material), options)


async def sent(opened: grpc.aio.Channel, path: str, data: bytes) -> str:
    """Send bytes as a request and give the code of the error that is the answer."""
    call = opened.stream_stream(path)()
    call._cython_call = _StatusKept(call._cython_call)
    try:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # Whoever is refused hears of it while he is still sending.
            await call.write(data)
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        found = [value for name, value in error.trailing_metadata() or () if name == ERROR_METADATA]
        return decoded(found[0]).code if found else f"{error.code()}: {error.details()}"
    return "answered"


def test_every_operation_has_its_terms() -> None:
    """The table names exactly the methods of the protocol files and the routes that there are."""
    methods = {(each.service, each.name) for each in (*BOUNDARY.values(), *ADMIN.values())}
    routes = {(HTTP, each.name) for each in ROUTES}
    tools = {each for each in TERMS if each[0] in (HEALTH_SERVICE, REFLECTION_SERVICE)}
    pages = {each for each in TERMS if each[0] == PAGES}
    assert methods | routes | tools | pages == set(TERMS)
    assert {name for _, name in tools} == {"Check", "List", "Watch", "ServerReflectionInfo"}
    known = {str(action) for actions in ROLE_ACTIONS.values() for action in actions}
    assert all(set(each.actions) <= known for each in TERMS.values())
    assert all(each.actions for each in TERMS.values() if each.asks == Asks.ROLE)


async def test_every_method_for_every_role(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is called garbage to those who may call the method; everybody else learns only that he may not."""
    site = await sites(tls=True)
    read_of: set[str] = set()
    is_begun = Awaited.is_begun

    def noted(awaited: Awaited, owner: str, *rest: Any) -> bool:
        read_of.add(owner)
        return is_begun(awaited, owner, *rest)

    monkeypatch.setattr(Awaited, "is_begun", noted)
    found: dict[tuple[str, str], str] = {}
    for name in (*ROLES, *REFUSED):
        async with channel(site, name) as opened:
            for terms in CALLS:
                read_of.clear()
                path = f"/{terms.service}/{terms.name}"
                found[name, path] = await sent(opened, path, GARBAGE)
                code = expected(name, terms)
                assert found[name, path] == (code or "frame_invalid"), (name, path)
                assert bool(read_of) == (code is None), (name, path)
    assert len(found) == len(CALLS) * (len(ROLES) + len(REFUSED))


async def test_every_route_for_every_role(sites: Sites) -> None:
    """The same over HTTP: the door refuses by row and role, and whoever passes is judged by what he asks for."""
    site = await sites(tls=True)
    for name in (*ROLES, *REFUSED):
        for operation in ROUTES:
            terms = TERMS[HTTP, operation.name]
            site.refusals.clear()
            path = operation.template.format(
                stream="nowhere", consumer="nobody", bucket="b", key="k", from_zone="x", message_id="a", digest="none"
            )
            answer = await site.http(operation.method, path, GARBAGE if operation.bodies else None, name=name)
            at_the_door = [refusal.error for refusal, _ in site.refusals if refusal.request.at_the_door]
            code = expected(name, terms)
            assert [each.code for each in at_the_door if each] == ([code] if code else []), (name, operation.name)
            if code is not None:
                assert answer.json()["code"] == code
            assert answer.status != 500


async def test_without_a_certificate_there_is_no_call(sites: Sites) -> None:
    """The gRPC listener asks for a certificate in the handshake, whatever is called."""
    site = await sites(tls=True)
    credentials = grpc.ssl_channel_credentials((site.folder / "ca.crt").read_bytes())
    options = grpc_channel_options("plant-bsfg")
    async with grpc.aio.secure_channel(site.grpc_address, credentials, options) as opened:
        for path in ("/grpc.health.v1.Health/Check", "/bsfg.v1.Boundary/AppendFact"):
            assert (await sent(opened, path, b"")).startswith("StatusCode.UNAVAILABLE")
    assert not site.refusals


async def test_a_refusal_does_not_wait_for_the_body(sites: Sites) -> None:
    """A stranger who announces a body and sends nothing is answered at once, on both listeners."""
    site = await sites(tls=True)
    async with channel(site, "stranger") as opened:
        call = opened.stream_stream("/bsfg.v1.Boundary/AppendFacts")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).code == "identity_unknown"
    context = client_context(files_of(site.folder, "stranger"))
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port, ssl=context)
    head = f"POST /v1/streams/{STREAM}/facts HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode())
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_a_delay_holds_nothing(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is slowed down waits without a place and without bytes, on both listeners."""
    site = await sites(tls=True)
    admission = site.listeners.admission
    monkeypatch.setattr(limits, "FREE_FAULTS", -1e9)
    asleep: list[float] = []
    awake = asyncio.Event()

    async def sleep(delay_seconds: float) -> None:
        asleep.append(delay_seconds)
        await awake.wait()

    monkeypatch.setattr(admission, "_sleep", sleep)
    large = GARBAGE * (LARGE_BYTES // len(GARBAGE))
    async with channel(site, "app") as opened:
        tracemalloc.start()
        asked = [
            asyncio.create_task(sent(opened, "/bsfg.v1.Boundary/AppendFact", large)),
            asyncio.create_task(sent(opened, "/bsfg.v1.Boundary/ConfirmReceipts", large)),
            asyncio.create_task(sent(opened, "/bsfg.v1.Admin/Status", large)),
            asyncio.create_task(in_vain(site, large)),
        ]
        try:
            await until(lambda: len(asleep) == len(asked))
            # An error that is kept keeps its frames, and those what they were called with: for as long as they sleep.
            # A thread that has just given its result lets go of its work a moment later.
            await until(lambda: not large_blocks())
        finally:
            tracemalloc.stop()
        assert all(asleep)
        assert (admission.serving, admission.budget.used, admission.awaited.count) == (0, 0, 0)
        awake.set()
        await asyncio.gather(*asked)


def large_blocks() -> list[tuple[int, str]]:
    """List the blocks of a message's size that somebody holds."""
    traces = tracemalloc.take_snapshot().traces
    return [(each.size, str(each.traceback)) for each in traces if each.size >= LARGE_BYTES // 2]


async def in_vain(site: Site, data: bytes) -> None:
    """Send a body that is no fact over HTTP, and wait for the answer."""
    context = client_context(files_of(site.folder, "app"))
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port, ssl=context)
    try:
        head = f"POST /v1/streams/{STREAM}/facts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode())
        writer.write(data)
        await reader.readline()
    finally:
        writer.transport.abort()


async def test_a_stranger_may_ask_for_health_and_nothing_else(sites: Sites) -> None:
    """Check answers whoever has a certificate, within the places of strangers; Watch wants an identity."""
    site = await sites(tls=True)
    async with channel(site, "stranger") as opened:
        assert await sent(opened, "/grpc.health.v1.Health/Check", b"") == "answered"
        assert await sent(opened, "/grpc.health.v1.Health/Watch", b"") == "identity_unknown"
        assert not site.listeners.admission.serving
        with all_places_of_strangers(site):
            assert await sent(opened, "/grpc.health.v1.Health/Check", b"") == "overloaded"
            async with channel(site, "viewer") as known:
                assert await sent(known, "/grpc.health.v1.Health/Check", b"") == "answered"


def all_places_of_strangers(site: Site) -> Any:
    """Take all places of strangers."""
    stack = ExitStack()
    for number in range(STRANGERS):
        stack.enter_context(site.listeners.admission.enter_stranger(str(number)))
    return stack


async def test_a_message_has_the_size_of_its_method(sites: Sites) -> None:
    """What is a good size for a frame of facts is too large for a question."""
    site = await sites()
    for path, request in (
        ("GetFact", pb.GetFactRequest(stream=STREAM, message_id="x" * 100_000)),
        ("FetchFacts", pb.FetchRequest(consumer="x" * 100_000)),
    ):
        with pytest.raises(MessageTooLarge):
            await site.connection().call(path, request)
    site.act_as("operator")
    with pytest.raises(MessageTooLarge):
        await site.connection().call("HoldGate", admin_pb.HoldGateRequest(link="from-enterprise", reason="x" * 100_000))
    with pytest.raises(InvalidArgument, match="reason"):
        await site.connection().call("HoldGate", admin_pb.HoldGateRequest(link="from-enterprise", reason="x" * 1_001))


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("FetchFacts", pb.FetchRequest(consumer="historian", carry_only=["z"] * 1_001)),
        ("GetEvidence", pb.GetEvidenceRequest(stream=STREAM, heads=[b"h"] * 17)),
        ("ConfirmReceipt", pb.ConfirmRequest(consumer="historian", ranges=[pb.Range(first=1, last=1)] * 10_001)),
        ("ConfirmReceipt", pb.ConfirmRequest(consumer="historian", refusals=[pb.Refusal(first=1)] * 20_001)),
    ],
)
async def test_lists_are_bounded(sites: Sites, method: str, request_: Any) -> None:
    """A list that is too long is refused with its name and the limit, before anything in it is looked at."""
    site = await sites()
    with pytest.raises(InvalidArgument) as caught:
        await site.connection().call(method, request_)
    assert caught.value.details["limit"] and caught.value.details["field"] in (
        "carry_only",
        "heads",
        "ranges",
        "refusals",
    )


def bomb(number: int, size_bytes: int) -> bytes:
    """Give a message that is nothing but empty fields of one number."""
    return bytes([number << 3 | 2, 0]) * (size_bytes // 2)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("AppendFact", b"\x12" + b"\x80\x80\xc0\x01" + bomb(7, 3 << 20)),
        ("AppendFacts", bomb(1, 3 << 20)),
        ("AppendFacts", b"\x08\x00" * (3 << 19)),
        ("ConfirmReceipt", bomb(3, 1 << 20)),
        ("PutFacts", bomb(9, 3 << 20)),
    ],
    ids=["fact", "frames", "numbers", "confirmation", "records"],
)
async def test_field_bombs_are_refused_unread(sites: Sites, method: str, data: bytes) -> None:
    """Millions of empty fields in a few megabytes are counted before they become objects."""
    site = await sites(tls=True)
    name = "pipeline" if method == "PutFacts" else "app"
    async with channel(site, name) as opened:
        # A list that is too long is called so by its name, as soon as that is seen.
        assert await sent(opened, f"/bsfg.v1.Boundary/{method}", data) in (FrameInvalid.code, InvalidArgument.code)
        code = await sent(opened, f"/bsfg.v1.Boundary/{method}", GARBAGE)
        assert code == FrameInvalid.code


async def test_more_awaited_messages_than_fit_give_up_the_oldest_of_the_busiest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller who opens many calls and sends nothing loses the oldest; others keep theirs."""
    monkeypatch.setattr(limits, "MOMENT_SECONDS", 0.0)
    awaited, ended = Awaited(4), list[str]()
    for name in ("honest", "evil-1", "evil-2", "evil-3", "evil-4", "evil-5"):
        await awaited.begin(name.split("-")[0], name, lambda name=name: ended.append(name))  # type: ignore[misc]
    assert ended == ["evil-1", "evil-2"]
    awaited.done("evil", "evil-1")
    assert awaited.count == 4
    for name in ("honest", "evil-3", "evil-4", "evil-5"):
        awaited.done(name.split("-")[0], name)
    assert awaited.count == 0


async def test_who_waits_for_the_most_gives_his_own_messages_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """His next call is read when one of his messages is here; another caller has room at once, and gets it from him."""
    monkeypatch.setattr(limits, "MOMENT_SECONDS", 60.0)
    awaited, ended = Awaited(2), list[str]()

    def begin(owner: str, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(awaited.begin(owner, name, lambda: ended.append(name)))

    await asyncio.gather(begin("busy", "one"), begin("busy", "two"))
    three, four = begin("busy", "three"), begin("busy", "four")
    await asyncio.sleep(0)
    assert not three.done() and not ended
    await begin("other", "first")
    assert ended == ["one"] and awaited.count == 2
    four.cancel()
    awaited.done("busy", "two")
    await three
    for owner, name in (("busy", "three"), ("other", "first")):
        awaited.done(owner, name)
    assert (awaited.count, ended) == (0, ["one"])
    assert len(awaited._queue) == 0


async def test_many_messages_of_one_caller_at_once_all_come(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls of one caller with a message on its way are read in turn; none is told that it is too many."""
    monkeypatch.setattr(limits, "MOMENT_SECONDS", 60.0)
    site = await sites(storage="log", message_bytes=1 << 20, memory_ceiling_bytes=1 << 20)
    client = site.client()
    facts = [message(f"fact-{number}", "x" * 200_000) for number in range(60)]
    answers = await asyncio.gather(*(client.append_fact(STREAM, each) for each in facts))
    assert {answer.result for answer in answers} == {Result.INSERTED}

    async def chunks(number: int) -> AsyncIterator[bytes]:
        for piece in range(4):
            yield bytes([number, piece]) * 50_000

    uploads = (client.put_object(ObjectInfo("files", f"file-{number}"), chunks(number)) for number in range(60))
    assert len({stored.digest for stored in await asyncio.gather(*uploads)}) == 60
    assert site.listeners.admission.awaited.count == 0


async def test_silent_calls_give_way(sites: Sites) -> None:
    """Calls whose request never comes end with `overloaded` when others need the room, streams in peace."""
    site = await sites(message_bytes=1 << 20, memory_ceiling_bytes=1 << 20)
    async with grpc.aio.insecure_channel(site.grpc_address) as opened:
        path = "/bsfg.v1.Boundary/AppendFact"
        awaited = site.listeners.admission.awaited
        silent = [opened.stream_stream(path)() for _ in range(16)]
        await until(lambda: awaited.count == 16)
        streams = [opened.stream_stream(f"{path}s")() for _ in range(16)]
        for call in silent:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(from_rpc_error(caught.value), Overloaded)
        # The question of somebody else takes the room of one of them, which ends as if it had been silent for long.
        assert await site.client().get_fact(STREAM, Key("x", "y")) is None
        ended, _ = await asyncio.wait(
            [asyncio.create_task(each.code()) for each in streams], return_when="FIRST_COMPLETED"
        )
        assert [each.result() for each in ended] == [grpc.StatusCode.OK]
