"""Whom a link calls: a server that is not the right one is never believed, and the link says what is wrong with it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copy

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.e2e.cleanup import Cleanup
from tests.e2e.liar import Liar, entries_of, frame, head
from tests.e2e.zones import Zone, certificates, pair, settled

from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages
from bsfg.wire.certs import issue, load_certificates, load_key

LINK = "from-plant-a"


@pytest.fixture
def zones(tmp_path: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Give a receiver that runs, its sender that does not, and certificates that the sender should not have."""
    plant, enterprise = pair(tmp_path)
    certs, now = plant.certs, datetime.now(UTC)
    issue(certs, "idmz-bsfg", days=60, now=now, hosts=["127.0.0.1"])
    issue(certs, "expired", days=1, now=now - timedelta(days=30), hosts=["127.0.0.1"])
    other = certificates(tmp_path, "plant-a", folder="other")
    for suffix in ("crt", "key"):
        copy(other / f"plant-a-bsfg.{suffix}", certs / f"impostor.{suffix}")
    cleanup.zone(plant)
    cleanup.zone(enterprise).start()
    return plant, enterprise


async def believed(plant: Zone, enterprise: Zone) -> None:
    """Insist that the right server in the place of the wrong one is pulled from, with all it has."""
    plant.start()
    async with plant.client() as producer:
        await producer.append("operational", batch(20, from_zone="plant-a"))
    await settled(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(20, from_zone="plant-a")


async def test_node_of_another_zone(zones: tuple[Zone, Zone]) -> None:
    """The certificate of another node, good as it is, holds the link until an operator has looked."""
    plant, enterprise = zones
    async with Liar(plant, "idmz-bsfg") as liar:
        liar.answer = lambda request: [head("ab" * 16), frame(entries_of(messages(10, from_zone="plant-a")))]
        held = await enterprise.seen("link_held")
        assert (held["link"], held["code"]) == (LINK, "server_identity_mismatch")
        assert "idmz-bsfg" in held["detail"]
        assert liar.fetches == 0
    await enterprise.seen("alert_raised", alert="gate_held")
    assert enterprise.end(Buffer.FORWARD) == 0
    async with enterprise.admin() as operator:
        await operator.release_gate(LINK, "the address was wrong")
    await believed(plant, enterprise)


@pytest.mark.parametrize("server", ["another identity with our DNS name", "our identity by another authority"])
async def test_a_name_is_not_an_identity(zones: tuple[Zone, Zone], server: str) -> None:
    """The DNS name that gRPC compares is not enough: the identity and its authority must be the ones that are meant."""
    plant, enterprise = zones
    if server == "our identity by another authority":
        foreign = (plant.root / "other" / "ca.crt").read_bytes()
        (plant.certs / "ca.crt").write_bytes((plant.certs / "ca.crt").read_bytes() + foreign)
        await enterprise.seen("alert_raised", alert="authority_unbound")
        certificate, says = "impostor", "which does not speak for the zone 'plant-a'"
    else:
        corporate(plant.certs, "evilhost", "plant-a-bsfg")
        certificate, says = "evilhost", "is evilhost, not plant-a-bsfg"
    async with Liar(plant, certificate) as liar:
        liar.answer = lambda request: [head("ab" * 16), frame(entries_of(messages(10, from_zone="plant-a")))]
        held = await enterprise.seen("link_held")
        assert (held["link"], held["code"]) == (LINK, "server_identity_mismatch")
        assert says in held["detail"]
        assert liar.fetches == 0
    assert enterprise.end(Buffer.FORWARD) == 0
    async with enterprise.admin() as operator:
        await operator.release_gate(LINK, "the impostor is gone")
    await believed(plant, enterprise)


async def test_a_renewed_certificate_is_found_again(zones: tuple[Zone, Zone]) -> None:
    """A sender that renews its certificate while its link is open is looked at again and pulled from as before."""
    plant, enterprise = zones
    await believed(plant, enterprise)
    issue(plant.certs, "plant-a-bsfg", days=30, now=datetime.now(UTC), hosts=["127.0.0.1"], force=True)
    plant.restart()
    async with plant.client() as producer:
        await producer.append("operational", batch(5, first=20, from_zone="plant-a"))
    await settled(plant, enterprise)
    assert not enterprise.events("link_held")


@asynccontextmanager
async def listening(plant: Zone, context: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Listen where the sender should, with some other kind of TLS or none; what it refuses it refuses in words."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not ended.is_set():
            with suppress(OSError), listener.accept()[0] as plain:
                if context is None:
                    plain.recv(1000)
                    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                else:
                    context.wrap_socket(plain, server_side=True).close()

    with socket.create_server(("127.0.0.1", plant.port)) as listener:
        listener.settimeout(0.1)
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        try:
            yield
        finally:
            ended.set()
            await serving


def old_tls(plant: Zone) -> ssl.SSLContext:
    """Speak TLS 1.2 at most, with the right certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(plant.files().certificate, plant.files().key)
    return context


@pytest.mark.parametrize("server", ["impostor", "expired", "TLS 1.2", "plaintext"])
async def test_certificate_that_is_not_accepted(zones: tuple[Zone, Zone], server: str) -> None:
    """A server that cannot prove who it is keeps the link closed with an alert; the right one opens it by itself."""
    plant, enterprise = zones
    context = old_tls(plant) if server == "TLS 1.2" else None
    wrong = Liar(plant, server) if server in ("impostor", "expired") else listening(plant, context)
    async with wrong:
        await enterprise.seen("fetch_failed", link=LINK, code="certificate_invalid", count=3)
        alert = await enterprise.seen("alert_raised", alert="peer_certificate", about=LINK)
        assert "certificate_invalid" in alert["text"]
        assert not enterprise.events("link_held")
    assert enterprise.end(Buffer.FORWARD) == 0
    await believed(plant, enterprise)
    await enterprise.seen("alert_cleared", alert="peer_certificate")


async def test_caller_that_the_peer_has_revoked(zones: tuple[Zone, Zone]) -> None:
    """A receiver that its peer refuses holds its link with that code; after both operators acted it goes on."""
    plant, enterprise = zones
    plant.identities += 'revoked = true\nreason = "contract ended"\n'
    plant.write()
    plant.start()
    held = await enterprise.seen("link_held")
    assert held["code"] == "identity_revoked"
    assert "contract ended" in held["detail"]
    refused = plant.events("request_refused")
    assert [(each["identity"], each["action"]) for each in refused] == [("enterprise-bsfg", "fetch")]
    plant.stop()
    plant.identities = plant.identities.replace("revoked = true", "revoked = false")
    plant.write()
    async with enterprise.admin() as operator:
        await operator.release_gate(LINK, "the contract goes on")
    await believed(plant, enterprise)


async def test_identity_in_the_common_name_alone(zones: tuple[Zone, Zone]) -> None:
    """A server whose authority put its identity into the common name only is the right one all the same."""
    plant, enterprise = zones
    corporate(plant.certs, "plant-a-bsfg", "plant.example")
    plant.start()
    async with enterprise.client("producer") as producer:
        await producer.append("operational", batch(5, seed=2, from_zone="enterprise"))
    await enterprise.mode(LINK, "normal")
    await settled(enterprise, plant)


def corporate(certs: Path, common_name: str, host: str) -> None:
    """Make a certificate as other authorities do: the identity is the common name, the DNS name is the host's."""
    authority, authority_key = load_certificates(certs / "ca.crt")[0], load_key(certs / "ca.key")
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=50))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    (certs / f"{common_name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (certs / f"{common_name}.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
