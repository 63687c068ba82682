"""Both listeners under mutual TLS: the certificate decides who a caller is, and nobody comes in without one."""

import asyncio
import json
import shutil
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, certificates, files_of

from bsfg.batch import FactBatch
from bsfg.config.access import Identity
from bsfg.errors import (
    BsfgError,
    CertificateInvalid,
    IdentityRevoked,
    IdentityUnknown,
    PeerUnreachable,
    PermissionRefused,
    ServerIdentityMismatch,
)
from bsfg.journey.link import FetchRequest
from bsfg.node.authorize import Guard
from bsfg.ports import Confirmation
from bsfg.testing.facts import message, messages
from bsfg.wire import connection
from bsfg.wire.certs import issue
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import TlsFiles, Watched, client_context

BODY = json.dumps(
    {
        "envelope": {"message_id": "http", "to_zone": "enterprise", "produced_at_unix_ms": 1},
        "fact": {"subject": "a:b", "predicate": "c", "object": 1},
    }
)
FACTS = f"/v1/streams/{STREAM}/facts"


async def test_the_certificate_is_the_identity_on_both_listeners(sites: Sites) -> None:
    """The same table decides for gRPC and HTTP, by the name in the certificate, and records every refusal."""
    site = await sites(tls=True)
    assert (await site.client("app").append_fact(STREAM, message("grpc"))).offset == 0
    assert (await site.http("POST", FACTS, BODY, name="app")).status == 200
    refused: list[tuple[str, type[BsfgError], int]] = [
        ("viewer", PermissionRefused, 403),
        ("narrow", PermissionRefused, 403),
        ("gone", IdentityRevoked, 401),
        ("stranger", IdentityUnknown, 401),
        ("plant-bsfg", IdentityUnknown, 401),
    ]
    for name, error, status in refused:
        with pytest.raises(error):
            await site.client(name).append_fact(STREAM, message(name))
        answer = await site.http("POST", FACTS, BODY, name=name)
        assert (answer.status, answer.json()["code"]) == (status, error.code)
    assert [decision.identity for decision, _ in site.refusals] == [name for name, _, _ in refused for _ in range(2)]
    assert all(caller.address for _, caller in site.refusals)
    assert (await site.http("GET", "/healthz", name="stranger")).status == 200


async def test_a_peer_pulls_as_itself(sites: Sites) -> None:
    """Another zone's node fetches and confirms its own consumer and no other, and may not append."""
    site = await sites(tls=True, storage="log")
    await site.client("app").append(STREAM, FactBatch.from_messages(messages(100)))
    for name in ("enterprise.operational", "lab.operational"):
        await site.consumer(name)
    peer = site.client("enterprise-bsfg")
    fetched = await peer.fetch("enterprise.operational", FetchRequest())
    assert fetched.frames[-1].last == 99
    assert await peer.confirm("enterprise.operational", Confirmation(through=99)) == 99
    with pytest.raises(PermissionRefused, match="not its own"):
        await peer.fetch("lab.operational", FetchRequest())
    with pytest.raises(PermissionRefused, match="not its own"):
        await peer.confirm("lab.operational", Confirmation(through=99))
    with pytest.raises(PermissionRefused):
        await peer.append_fact(STREAM, message("x", from_zone="enterprise"))


async def test_a_server_must_be_who_it_should_be(sites: Sites) -> None:
    """A client refuses a server with another name or of another authority, and says which of the two."""
    site = await sites(tls=True)
    foreign = _authority(site.folder / "foreign")

    def client(files: TlsFiles, server_name: str) -> BoundaryClient:
        return BoundaryClient(Connection(site.grpc_address, watched=Watched(files), server_name=server_name))

    cases: list[tuple[BoundaryClient, type[BsfgError]]] = [
        (client(files_of(site.folder, "app"), "enterprise-bsfg"), ServerIdentityMismatch),
        (client(files_of(foreign, "app"), "plant-bsfg"), CertificateInvalid),
        (
            client(TlsFiles(site.folder / "ca.crt", foreign / "app.crt", foreign / "app.key"), "plant-bsfg"),
            PeerUnreachable,
        ),
        (BoundaryClient(Connection(site.grpc_address)), PeerUnreachable),
    ]
    for caller, error in cases:
        async with caller:
            with pytest.raises(error):
                await caller.append_fact(STREAM, message("x"))
            with pytest.raises(error):
                await caller.append(STREAM, FactBatch.from_messages(messages(2)))
            with pytest.raises(error):
                await caller.fetch("historian", FetchRequest())
    assert (await (await site.parts.store(STREAM)).stats()).end == 0


@pytest.mark.parametrize("listener", ["grpc", "http"])
async def test_nobody_comes_in_without_a_good_certificate(sites: Sites, listener: str) -> None:
    """No certificate, one of another authority, an expired one, TLS 1.2 and plain text are all turned away."""
    site = await sites(tls=True)
    foreign = _authority(site.folder / "foreign")
    issue(site.folder, "late", days=1, now=datetime(2024, 1, 1, tzinfo=UTC), force=True)
    port = getattr(site.listeners, listener).port

    def bare() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(site.folder / "ca.crt"))
        context.check_hostname = False
        return context

    def old() -> ssl.SSLContext:
        context = client_context(files_of(site.folder, "app"))
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    def other() -> ssl.SSLContext:
        return client_context(TlsFiles(site.folder / "ca.crt", foreign / "app.crt", foreign / "app.key"))

    attempts: dict[str, Callable[[], ssl.SSLContext | None]] = {
        "without": bare,
        "foreign": other,
        "expired": lambda: client_context(files_of(site.folder, "late")),
        "tls 1.2": old,
        "plaintext": lambda: None,
    }
    for name, make in attempts.items():
        assert await _answered(port, listener, make()) is False, name
    assert await _answered(port, listener, client_context(files_of(site.folder, "app"))) is True


@pytest.mark.parametrize("listener", ["grpc", "http"])
async def test_handshakes_that_never_end_are_given_up(sites: Sites, listener: str) -> None:
    """A connection that says nothing, or half a hello, is closed; the next caller is served."""
    site = await sites(tls=True, handshake_timeout_seconds=0.3)
    port = getattr(site.listeners, listener).port
    for hello in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello)
        try:
            while await reader.read(1_000):
                pass
        except ConnectionError:
            pass
        writer.close()
    assert await _answered(port, listener, client_context(files_of(site.folder, "app"))) is True


async def test_one_look_at_the_files_does_for_many_calls(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller does not look at its certificate files before each call, but does when it is to connect again."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 3_600.0)
    site = await sites(tls=True)
    client = site.client("app")
    assert client.connection._watched is not None
    looks: list[int] = []
    refresh = client.connection._watched.refresh

    def looked() -> int:
        looks.append(1)
        return refresh()

    monkeypatch.setattr(client.connection._watched, "refresh", looked)
    for number in range(5):
        await client.append_fact(STREAM, message(f"look-{number}"))
    assert len(looks) == 1
    client.connection.reconnect()
    await client.append_fact(STREAM, message("again"))
    assert len(looks) == 2


async def test_new_certificates_are_used_without_a_restart(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the files are replaced, new connections get the new certificate and the client shows its own new one."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.0)
    site = await sites(tls=True)
    client = site.client("app")
    await client.append_fact(STREAM, message("before"))
    now = datetime.now(UTC)
    for name in ("plant-bsfg", "app"):
        issue(site.folder, name, days=4, now=now, force=True)
    await client.append_fact(STREAM, message("after"))
    assert client.connection._version == 2
    fresh = site.client("app")
    assert (await fresh.append_fact(STREAM, message("fresh"))).offset == 2
    assert (await site.http("POST", FACTS, BODY, name="app")).status == 200


async def test_a_revoked_caller_is_cut_off_in_mid_stream(sites: Sites) -> None:
    """A row that is withdrawn counts from the next frame on, also on a connection that was open before."""
    site = await sites(tls=True)
    async with site.client("app").append_stream(STREAM) as stream:
        assert len(await stream.append(FactBatch.from_messages(messages(3)))) == 3
        rows = dict(site.parts.guard.matrix.identities)
        del rows["app"]
        site.parts.guard = _with_rows(site, rows)
        with pytest.raises(IdentityUnknown):
            await stream.append(FactBatch.from_messages(messages(3, first=3)))


def _with_rows(site: Site, rows: dict[str, Identity]) -> Guard:
    return replace(site.parts.guard, matrix=replace(site.parts.guard.matrix, identities=rows))


def _authority(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    certificates(folder)
    return folder


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def _answered(port: int, listener: str, context: ssl.SSLContext | None) -> bool:
    """Tell whether a listener answers a caller at all in its own protocol."""
    hello = PREFACE if listener == "grpc" else b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    if context is not None and listener == "grpc":
        context.set_alpn_protocols(["h2"])
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(hello)
        answer = await reader.read(9)
        writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return answer.startswith(b"HTTP/1.1 ") if listener == "http" else answer[3:4] == b"\x04"
