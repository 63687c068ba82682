"""An identity is a name and the authority behind it; a certificate counts until its end or its revocation."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from tests.wire.conftest import Sites
from tests.wire.site import NAMES, STREAM, Site, files_of

from bsfg.batch import FactBatch
from bsfg.clock import SystemClock
from bsfg.config.access import Authority
from bsfg.errors import CertificateInvalid, IdentityRevoked, IdentityUnknown
from bsfg.journey.link import FetchRequest
from bsfg.testing.facts import message, messages
from bsfg.wire.certs import Trust, create_authority, issue, key_of, load_certificates, load_key, load_trust
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import Connection
from bsfg.wire.peer import shown
from bsfg.wire.tls import TlsFiles, Watched

FACTS = f"/v1/streams/{STREAM}/facts"
NOW = datetime.now(UTC)


def other_authority(site: Site, name: str = "other authority") -> Path:
    """Make a second authority that has signed the same names, and let the site trust it besides its own."""
    folder = site.folder / "other"
    create_authority(folder, name=name, days=9, now=NOW)
    for each in NAMES:
        issue(folder, each, days=5, now=NOW)
    both = (site.folder / "ca.crt").read_bytes() + (folder / "ca.crt").read_bytes()
    (site.folder / "ca.crt").write_bytes(both)
    return folder


def revoke(folder: Path, *names: str, next_update: timedelta = timedelta(days=1)) -> Path:
    """Write the revocation list of the authority of a folder."""
    authority, key = load_certificates(folder / "ca.crt")[0], load_key(folder / "ca.key")
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(NOW - timedelta(days=2)).next_update(NOW + next_update)
    for name in names:
        serial = load_certificates(folder / f"{name}.crt")[0].serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW - timedelta(days=1))
        builder = builder.add_revoked_certificate(entry.build())
    path = folder / "ca.crl"
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    return path


def trust_again(site: Site, crl: Path | None = None, authorities: dict[str, Authority] | None = None) -> None:
    """Let the site go by its files as they are now."""
    trust = load_trust(files_of(site.folder, "plant-bsfg"), crl, site.parts.guard.matrix.vouching.trust)
    vouching = replace(site.parts.guard.matrix.vouching, trust=trust, authorities=authorities or {})
    site.parts.guard = replace(site.parts.guard, matrix=replace(site.parts.guard.matrix, vouching=vouching))


def client_of(site: Site, folder: Path, name: str) -> BoundaryClient:
    """Make a client with the certificate of an authority's folder; it is closed with the site."""
    files = TlsFiles(site.folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")
    client = BoundaryClient(Connection(site.grpc_address, watched=Watched(files), server_name="plant-bsfg"))
    site._clients.append(client)
    return client


async def test_another_authority_cannot_sign_our_names(sites: Sites) -> None:
    """With two authorities and no binding, only that of the node's own certificate gives names; the other is named."""
    site = await sites(tls=True)
    other = other_authority(site)
    trust_again(site)
    assert (await site.client("app").append_fact(STREAM, message("ours"))).offset == 0
    with pytest.raises(IdentityUnknown, match="CN=other authority") as refused:
        await client_of(site, other, "app").append_fact(STREAM, message("theirs"))
    assert key_of(load_certificates(other / "ca.crt")[0]) in refused.value.message
    decision, _ = site.refusals[-1]
    assert (decision.identity, str(decision.rule)) == ("app", "authority_speaks_for_zone")
    assert "CN=other authority" in (site.parts.guard.matrix.vouching.unbound() or "")


async def test_an_authority_speaks_for_the_zones_it_is_bound_to(sites: Sites) -> None:
    """One authority per zone: neither can name anybody of the other's, on both listeners."""
    site = await sites(tls=True)
    other = other_authority(site)
    ours, theirs = (key_of(load_certificates(folder / "ca.crt")[0]) for folder in (site.folder, other))
    rows = {
        "plant": Authority(name="plant", key=ours, zones=("plant",)),
        "office": Authority(name="office", key=theirs, zones=("enterprise",)),
    }
    trust_again(site, authorities=rows)
    await site.consumer("enterprise.operational")
    assert (await site.client("app").append_fact(STREAM, message("ours"))).offset == 0
    reads: list[tuple[BoundaryClient, bool]] = [
        (client_of(site, other, "enterprise-bsfg"), True),
        (site.client("enterprise-bsfg"), False),
    ]
    for client, allowed in reads:
        assert await _reads(client) is allowed
    with pytest.raises(IdentityUnknown, match="does not speak for the zone 'plant'"):
        await client_of(site, other, "app").append_fact(STREAM, message("theirs"))
    assert site.parts.guard.matrix.vouching.unbound() is None
    answer = await site.http("GET", "/v1/status", name="operator")
    assert answer.status == 200


async def test_a_row_can_be_bound_to_one_authority(sites: Sites) -> None:
    """Where two authorities speak for a zone, a row may name the one that must have signed."""
    site = await sites(tls=True)
    other = other_authority(site)
    keys = [key_of(load_certificates(folder / "ca.crt")[0]) for folder in (site.folder, other)]
    rows = {name: Authority(name=name, key=key, zones=("*",)) for name, key in zip(("a", "b"), keys, strict=True)}
    trust_again(site, authorities=rows)
    assert (await client_of(site, other, "app").append_fact(STREAM, message("b"))).offset == 0
    matrix = site.parts.guard.matrix
    bound = {**matrix.identities, "app": replace(matrix.identities["app"], authority="a")}
    site.parts.guard = replace(site.parts.guard, matrix=replace(matrix, identities=bound))
    with pytest.raises(IdentityUnknown):
        await client_of(site, other, "app").append_fact(STREAM, message("b2"))
    assert (await site.client("app").append_fact(STREAM, message("a"))).offset == 1


async def test_a_certificate_that_ends_is_refused_on_its_open_connection(sites: Sites) -> None:
    """Its end counts from the next call on, within open streams too, and on both listeners."""
    site = await sites(tls=True)
    client = site.client("app")
    await client.append_fact(STREAM, message("before"))
    async with client.append_stream(STREAM) as stream:
        await stream.append(FactBatch.from_messages(messages(3)))
        site.parts.guard = replace(site.parts.guard, clock=_Later())
        with pytest.raises(CertificateInvalid, match="expired on"):
            await stream.append(FactBatch.from_messages(messages(3, first=3)))
    with pytest.raises(CertificateInvalid, match="expired on"):
        await client.append_fact(STREAM, message("after"))
    answer = await site.http("GET", "/v1/status", name="operator")
    assert (answer.status, answer.json()["code"]) == (401, "certificate_invalid")
    assert {str(decision.rule) for decision, _ in site.refusals} == {"certificate_in_force"}


async def test_a_revoked_certificate_is_refused_on_its_open_connection(sites: Sites) -> None:
    """A revocation list counts as soon as it is read, for connections that were open before, and names one alone."""
    site = await sites(tls=True)
    client = site.client("app")
    await client.append_fact(STREAM, message("before"))
    trust_again(site, crl=revoke(site.folder, "app", "operator"))
    with pytest.raises(IdentityRevoked, match=r"serial .* was revoked by CN=test authority"):
        await client.append_fact(STREAM, message("after"))
    answer = await site.http("GET", "/v1/status", name="operator")
    assert (answer.status, answer.json()["code"]) == (401, "identity_revoked")
    assert (await site.http("GET", "/v1/status", name="viewer")).status == 200
    issue(site.folder, "app", days=2, now=NOW, force=True)
    assert (await site.client("app").append_fact(STREAM, message("renewed"))).offset == 1


async def test_an_authority_that_is_no_longer_trusted_ends_its_connections(sites: Sites) -> None:
    """Taking an authority out of the file counts for connections that its certificates opened."""
    site = await sites(tls=True)
    own = (site.folder / "ca.crt").read_bytes()
    other = other_authority(site)
    keys = [key_of(load_certificates(folder / "ca.crt")[0]) for folder in (site.folder, other)]
    rows = {name: Authority(name=name, key=key, zones=("*",)) for name, key in zip(("a", "b"), keys, strict=True)}
    trust_again(site, authorities=rows)
    client = client_of(site, other, "app")
    await client.append_fact(STREAM, message("while"))
    (site.folder / "ca.crt").write_bytes(own)
    trust_again(site)
    with pytest.raises((IdentityRevoked, IdentityUnknown), match="other authority"):
        await client.append_fact(STREAM, message("after"))
    trust_again(site)
    with pytest.raises((IdentityRevoked, IdentityUnknown), match="other authority"):
        await client.append_fact(STREAM, message("and after another look"))


def test_lists_are_checked(tmp_path: Path) -> None:
    """A list of a stranger, a partial one, and what is no list are refused; an old one counts and is told of."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        create_authority(folder, name=folder.name, days=9, now=NOW)
        issue(folder, "plant-bsfg", days=5, now=NOW)
    files = files_of(ours, "plant-bsfg")
    bad: list[tuple[Callable[[], Path], str]] = [
        (lambda: revoke(theirs, "plant-bsfg"), "not signed by an authority"),
        (lambda: ours / "ca.crt", "no readable revocation list"),
        (lambda: ours / "absent.crl", "there is no file"),
        (lambda: _delta(ours), "partial"),
    ]
    for make, says in bad:
        with pytest.raises(CertificateInvalid, match=says):
            load_trust(files, make())
    stale = load_trust(files, revoke(ours, "plant-bsfg", next_update=timedelta(hours=-1)))
    assert "CN=ours since" in stale.stale(NOW)[0]
    own = shown(load_certificates(ours / "plant-bsfg.crt")[0])
    with pytest.raises(IdentityRevoked):
        stale.check(own, SystemClock().now_unix_ms())
    lists = revoke(theirs).read_bytes() + revoke(ours).read_bytes()
    (ours / "all.crl").write_bytes(lists)
    (ours / "ca.crt").write_bytes((ours / "ca.crt").read_bytes() + (theirs / "ca.crt").read_bytes())
    load_trust(files, ours / "all.crl").check(own, SystemClock().now_unix_ms())


def test_two_keys_of_one_name_have_two_lists(tmp_path: Path) -> None:
    """An authority that was given a new key keeps its name: what either of its lists says counts, in any order."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        create_authority(folder, name="plant authority", days=9, now=NOW)
        issue(folder, "plant-bsfg", days=5, now=NOW)
    (old / "all.crt").write_bytes((old / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes())
    files = TlsFiles(old / "all.crt", old / "plant-bsfg.crt", old / "plant-bsfg.key")
    both = [revoke(old, "plant-bsfg").read_bytes(), revoke(new).read_bytes()]
    for lists in (both, both[::-1]):
        (old / "all.crl").write_bytes(b"".join(lists))
        trust = load_trust(files, old / "all.crl")
        with pytest.raises(IdentityRevoked):
            trust.check(shown(load_certificates(old / "plant-bsfg.crt")[0]), SystemClock().now_unix_ms())
        trust.check(shown(load_certificates(new / "plant-bsfg.crt")[0]), SystemClock().now_unix_ms())


def test_lists_about_different_certificates_count_together(tmp_path: Path) -> None:
    """Of an authority that has a list for users and one for authorities both count; of one kind the newest does."""
    create_authority(tmp_path, name="ours", days=9, now=NOW)
    issue(tmp_path, "plant-bsfg", days=5, now=NOW)
    authority, key = load_certificates(tmp_path / "ca.crt")[0], load_key(tmp_path / "ca.key")
    own = load_certificates(tmp_path / "plant-bsfg.crt")[0]

    def made(age: timedelta, *, users: bool, revoked: bool) -> bytes:
        about = x509.IssuingDistributionPoint(None, None, users, not users, None, False, False)
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject).last_update(NOW - age)
        builder = builder.next_update(NOW + timedelta(days=1)).add_extension(about, critical=True)
        if revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(own.serial_number).revocation_date(NOW)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]

    users, authorities = (
        made(timedelta(days=2), users=True, revoked=True),
        made(timedelta(1), users=False, revoked=False),
    )
    lifted = made(timedelta(hours=1), users=True, revoked=False)
    files, now = files_of(tmp_path, "plant-bsfg"), SystemClock().now_unix_ms()
    for lists, is_revoked in (([users, authorities], True), ([authorities, users], True), ([lifted, users], False)):
        (tmp_path / "all.crl").write_bytes(b"".join(lists))
        trust = load_trust(files, tmp_path / "all.crl")
        with pytest.raises(IdentityRevoked) if is_revoked else nullcontext():
            trust.check(shown(own), now)


def test_an_intermediate_leads_to_its_authority(tmp_path: Path) -> None:
    """The path goes over intermediates that are known, and ends where they end."""
    root, stranger = trustme.CA(), trustme.CA()
    below = root.create_child_ca()
    leaf = below.issue_cert("app", common_name="app")
    certificate = shown(x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()))
    top, middle, other = (x509.load_pem_x509_certificate(each.cert_pem.bytes()) for each in (root, below, stranger))

    def path(*known: x509.Certificate) -> list[str]:
        return [each.key for each in Trust(known).judge(certificate).path]

    assert path(top, middle, other) == path(other, middle, top) == [key_of(middle), key_of(top)]
    assert path(top) == [key_of(top)]
    assert path(top, other) == []
    assert path(other, middle) == [key_of(middle)]


class _Later(SystemClock):
    """A clock that is a month ahead."""

    def now_unix_ms(self) -> int:
        return super().now_unix_ms() + 30 * 86_400_000


def _delta(folder: Path) -> Path:
    authority, key = load_certificates(folder / "ca.crt")[0], load_key(folder / "ca.key")
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(NOW).next_update(NOW + timedelta(days=1))
    builder = builder.add_extension(x509.DeltaCRLIndicator(1), critical=True)
    path = folder / "delta.crl"
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    return path


async def _reads(client: BoundaryClient) -> bool:
    try:
        async with asyncio.timeout(60):
            await client.fetch("enterprise.operational", FetchRequest())
    except IdentityUnknown:
        return False
    return True
