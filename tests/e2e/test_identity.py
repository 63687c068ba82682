"""Who may call, and whom a link may call: certificates, the table of identities and roles, on both sides."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection
from pathlib import Path
from shutil import copy

import grpc
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, certificates, pair

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable
from bsfg.journey.link import FetchRequest
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.testing.facts import batch, message
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.certs import issue
from bsfg.wire.client import BoundaryClient
from bsfg.wire.tls import client_context

FACT = message("a", from_zone="plant-a")
MORE = """
[identities.plant-a-gone]
zone = "plant-a"
roles = ["producer"]
streams = ["*"]
revoked = true
reason = "laptop lost"
[identities.plant-a-old]
zone = "plant-a"
roles = ["producer"]
streams = ["*"]
expires = 2020-01-01
[identities.plant-a-narrow]
zone = "plant-a"
roles = ["producer"]
streams = ["audit"]
"""


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give one zone that runs, and certificates of all kinds."""
    plant, _ = pair(tmp_path)
    now = datetime.now(UTC)
    for name in ("plant-a-gone", "plant-a-old", "plant-a-narrow", "stranger"):
        issue(plant.certs, name, days=60, now=now, serves=False)
    issue(plant.certs, "plant-a-late", days=1, now=now - timedelta(days=30), serves=False)
    other = certificates(tmp_path, "plant-a", folder="other")
    for suffix in ("crt", "key"):
        copy(other / f"plant-a-producer.{suffix}", plant.certs / f"impostor.{suffix}")
    plant.identities += MORE
    plant.streams += "[streams.audit]\n"
    plant.write()
    cleanup.zone(plant).start()
    return plant


async def append(client: BoundaryClient) -> None:
    await client.append_fact("operational", FACT)


async def append_as_another_zone(client: BoundaryClient) -> None:
    await client.append_fact("operational", message("b", from_zone="enterprise"))


async def append_batch_as_another_zone(client: BoundaryClient) -> None:
    await client.append("operational", batch(5, from_zone="enterprise"))


async def fetch_as_enterprise(client: BoundaryClient) -> None:
    await client.fetch("enterprise.operational", FetchRequest())


async def fetch_as_nobody(client: BoundaryClient) -> None:
    await client.fetch("there-is-no-such-consumer", FetchRequest())


async def confirm_as_enterprise(client: BoundaryClient) -> None:
    await client.confirm("enterprise.operational", Confirmation(through=0))


async def read_forward(client: BoundaryClient) -> None:
    async for _ in client.read_offsets("operational", 0, buffer=Buffer.FORWARD):
        pass


async def hold(client: BoundaryClient) -> None:
    await AdminClient(client.connection).hold_gate("from-enterprise", "because I can")


async def create(client: BoundaryClient) -> None:
    await AdminClient(client.connection).create_consumer(ConsumerSpec("app-x", "operational", Buffer.FORWARD))


async def retire(client: BoundaryClient) -> None:
    await AdminClient(client.connection).retire_consumer("enterprise.operational", "because I can")


async def look(client: BoundaryClient) -> None:
    await AdminClient(client.connection).status()


REFUSALS: list[tuple[str, Callable[[BoundaryClient], Awaitable[None]], str, str]] = [
    ("plant-a-gone", append, "identity_revoked", "not_revoked"),
    ("plant-a-old", append, "identity_revoked", "not_expired"),
    ("stranger", append, "identity_unknown", "identity_in_table"),
    ("stranger", look, "identity_unknown", "identity_in_table"),
    ("stranger", fetch_as_nobody, "identity_unknown", "identity_in_table"),
    ("stranger", fetch_as_enterprise, "identity_unknown", "identity_in_table"),
    ("enterprise-producer", append, "identity_unknown", "identity_in_table"),
    ("enterprise-bsfg", append, "permission_denied", "role_allows_action"),
    ("enterprise-bsfg", read_forward, "permission_denied", "served_to_zone"),
    ("plant-a-producer", append_as_another_zone, "permission_denied", "from_zone_in_row"),
    ("plant-a-producer", append_batch_as_another_zone, "permission_denied", "from_zone_in_row"),
    ("plant-a-producer", fetch_as_enterprise, "permission_denied", "role_allows_action"),
    ("plant-a-producer", fetch_as_nobody, "permission_denied", "role_allows_action"),
    ("plant-a-consumer", fetch_as_enterprise, "permission_denied", "consumer_is_its_own"),
    ("plant-a-consumer", confirm_as_enterprise, "permission_denied", "consumer_is_its_own"),
    ("plant-a-narrow", append, "permission_denied", "stream_in_row"),
    ("plant-a-viewer", hold, "permission_denied", "role_allows_action"),
    ("plant-a-viewer", create, "permission_denied", "role_allows_action"),
    ("plant-a-viewer", retire, "permission_denied", "role_allows_action"),
    ("plant-a-viewer", append, "permission_denied", "role_allows_action"),
    ("plant-a-viewer", confirm_as_enterprise, "permission_denied", "role_allows_action"),
    ("plant-a-operator", append, "permission_denied", "role_allows_action"),
]


async def test_refusals_leave_audit_records(plant: Zone) -> None:
    """Whoever asks for what it may not is refused by the right rule, and a record says who, what and why."""
    for number, (identity, action, code, rule) in enumerate(REFUSALS):
        case = (identity, action.__name__)
        async with plant.client(identity) as client:
            with pytest.raises(BsfgError) as caught:
                await action(client)
        assert caught.value.code == code, case
        records = plant.events("request_refused")
        assert len(records) == number + 1, case
        record = records[-1]
        assert (record["identity"], record["code"], record["rule"]) == (identity, code, rule), case
        assert record["caller"].startswith("ipv4:127.0.0.1:"), case
    assert plant.end(Buffer.STORE) == 0
    assert plant.modes("from-enterprise") == []
    async with plant.client() as client:
        await append(client)
    async with plant.admin("viewer") as viewer:
        assert [view.state.retired_reason for view in await viewer.consumers()] == [None, None]


@pytest.mark.parametrize("identity", ["impostor", "plant-a-late"])
async def test_certificates_that_no_handshake_survives(plant: Zone, identity: str) -> None:
    """A certificate of another authority or past its end gets no request through."""
    async with plant.client(identity) as client:
        with pytest.raises((PeerUnreachable, CertificateInvalid)):
            await append(client)
    assert _https(plant, identity) is None
    assert plant.end(Buffer.STORE) == 0
    assert _https(plant, "plant-a-viewer") == ssl.TLSVersion.TLSv1_3.name.replace("_", ".")


async def test_plaintext_and_old_tls(plant: Zone) -> None:
    """Neither listener answers anything below TLS 1.3, nor without a certificate."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plant.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/bsfg.v1.Boundary/AppendFact")(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    for port in (plant.port, plant.http_port):
        assert b"200" not in _plain(port)
        assert _version(plant, port, most=ssl.TLSVersion.TLSv1_2) is None
        assert _version(plant, port, identity=None) is None
        assert _version(plant, port) == "TLSv1.3"


def _plain(port: int) -> bytes:
    """Send an HTTP request without TLS and give what comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        try:
            return raw.recv(1000)
        except ConnectionError:
            return b""


def _version(
    plant: Zone, port: int, *, most: ssl.TLSVersion | None = None, identity: str | None = "plant-a-viewer"
) -> str | None:
    """Shake hands and give the version of TLS, None when the server will not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(plant.certs / "ca.crt")
    context.set_alpn_protocols(["h2"] if port == plant.port else ["http/1.1"])
    if most is not None:
        context.maximum_version = most
    if identity is not None:
        files = plant.files(identity)
        context.load_cert_chain(files.certificate, files.key)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as raw,
            context.wrap_socket(raw) as secured,
        ):
            # With TLS 1.3 a client learns only from an answer that its certificate is accepted.
            secured.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
                if port == plant.port
                else b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            return secured.version() if secured.recv(1) else None
    except OSError:
        return None


def _https(plant: Zone, identity: str) -> str | None:
    return _version(plant, plant.http_port, identity=identity)


async def test_strangers_at_the_door_are_told_of(plant: Zone) -> None:
    """Who does not get through the handshake is told with where he came from, and counted, on both ports."""
    context = ssl.create_default_context(cafile=str(plant.certs / "ca.crt"))
    context.check_hostname = False
    for port in (plant.http_port, plant.port):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            address = f"127.0.0.1:{plain.getsockname()[1]}"
            with suppress(ssl.SSLError, ConnectionError), context.wrap_socket(plain) as secured:
                while secured.recv(100):
                    pass
        if port == plant.http_port:
            told = await plant.seen("alert_raised", alert="handshake_refused", about="127.0.0.1")
            assert f"{address} on the http port: no certificate was shown" in told["text"]
    async with plant.admin("viewer") as viewer:
        await viewer.status()
    sample = 'bsfg_tls_handshakes_total{listener="grpc",outcome="refused"} 1.0'
    while sample not in await metrics(plant):  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.05)


async def metrics(plant: Zone) -> str:
    """Give the metrics as a viewer sees them."""

    def ask() -> str:
        files = plant.files("plant-a-viewer")
        with closing(HTTPSConnection("127.0.0.1", plant.http_port, context=client_context(files))) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    return await asyncio.to_thread(ask)
