"""Says whether certificates are fit for use: chain, dates, key, names and usage, each with what to do about it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from bsfg.errors import BsfgError, CertificateInvalid
from bsfg.wire.certs import is_authority, issuer_of, key_of, load_certificates
from bsfg.wire.peer import PeerNames, names_of
from bsfg.wire.tls import TlsFiles, Watched, client_context, failure_of, server_context
from bsfg.wording import CheckFinding, CheckLevel, Says, counted

DAY_SECONDS = 86_400
WARNING_SECONDS = 30 * DAY_SECONDS


class Expiry(StrEnum):
    """Where a moment lies in the life of a certificate."""

    OK = "ok"
    WARNING = "warning"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How a certificate stands at one moment; ``left_seconds`` is negative once it has expired."""

    expiry: Expiry
    left_seconds: float

    @property
    def left_days(self) -> int:
        """Give the whole days that are left, rounded down."""
        return int(self.left_seconds // DAY_SECONDS)


def lifetime(certificate: x509.Certificate, now: datetime, warning_seconds: float = WARNING_SECONDS) -> Lifetime:
    """Tell whether a certificate is in force, will expire soon, has expired or has not begun."""
    left = (certificate.not_valid_after_utc - now).total_seconds()
    if left < 0:
        return Lifetime(Expiry.EXPIRED, left)
    if now < certificate.not_valid_before_utc:
        return Lifetime(Expiry.NOT_YET_VALID, left)
    return Lifetime(Expiry.WARNING if left < warning_seconds else Expiry.OK, left)


def describe(certificate: x509.Certificate, now: datetime) -> dict[str, Any]:
    """Give what a person or a script wants to know of a certificate."""
    names, life = names_of(certificate), lifetime(certificate, now)
    return {
        "common_name": ", ".join(names.common_names),
        "alternative_names": _all_alternative_names(certificate),
        "issuer": certificate.issuer.rfc4514_string(),
        "serial": f"{certificate.serial_number:x}",
        "not_before": _iso(certificate.not_valid_before_utc),
        "not_after": _iso(certificate.not_valid_after_utc),
        "days_left": life.left_days,
        "expiry": str(life.expiry),
        "key": key_kind(certificate),
        "public_key": key_of(certificate),
        "usage": sorted(_usages(certificate)),
        "is_authority": is_authority(certificate),
        "sha256": certificate.fingerprint(hashes.SHA256()).hex(),
    }


def says_of(check: str) -> Says:
    """Give what makes the findings of a check of certificates."""
    return Says(check, CheckLevel.ERROR)


def check_files(files: TlsFiles, now: datetime, warning_seconds: float = WARNING_SECONDS) -> list[CheckFinding]:
    """Check the three files of a node; the last word is a handshake of the node with itself."""
    try:
        authorities, chain = load_certificates(files.ca), load_certificates(files.certificate)
        files.load()
    except BsfgError as error:
        return [says_of("files").problem(error.message, error.hint)]
    findings = [says_of("files").ok("authority, certificate and key can be read, and the key fits")]
    findings += _key_rights(files.key)
    findings += _dates("certificate", chain[0], now, warning_seconds)
    for number, authority in enumerate(authorities, 1):
        what = f"authority (number {number} of its file)" if len(authorities) > 1 else "authority"
        findings += _dates(what, authority, now, warning_seconds)
    findings += _chain(chain, authorities)
    findings += _usage_findings(chain[0])
    findings += _names(chain[0])
    if all(finding.level != CheckLevel.ERROR for finding in findings):
        findings += _handshake(files)
    return findings


def check_signed(files: TlsFiles) -> None:
    """Raise `CertificateInvalid` unless an authority of the files signed their certificate: nobody would trust it."""
    for finding in _chain(load_certificates(files.certificate), load_certificates(files.ca)):
        if finding.level == CheckLevel.ERROR:
            raise CertificateInvalid(f"{files.certificate}: {finding.says}", hint=finding.do)


def _key_rights(path: Path) -> Iterator[CheckFinding]:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        says = f"{path} can be read by others (mode {mode:04o})"
        yield says_of("key_rights").warning(says, f"chmod 600 {path}")
    else:
        yield says_of("key_rights").ok("only its owner can read the key")


def _dates(what: str, certificate: x509.Certificate, now: datetime, warning_seconds: float) -> Iterator[CheckFinding]:
    life, check = lifetime(certificate, now, warning_seconds), f"{what.split(maxsplit=1)[0]}_dates"
    if life.expiry == Expiry.EXPIRED:
        says = f"the {what} expired on {_iso(certificate.not_valid_after_utc)}"
        yield says_of(check).problem(
            says, "Make a new one with `bsfg certs renew`, or ask who signed it; the node takes the file up by itself."
        )
    elif life.expiry == Expiry.NOT_YET_VALID:
        says = f"the {what} is valid only from {_iso(certificate.not_valid_before_utc)}"
        yield says_of(check).problem(says, f"Check this machine's clock, which says {_iso(now)}.")
    elif life.expiry == Expiry.WARNING:
        says = f"the {what} expires in {counted(life.left_days, 'day')}, on {_iso(certificate.not_valid_after_utc)}"
        yield says_of(check).warning(
            says, "Renew it with `bsfg certs renew`, or by who signed it; the node takes the new file up by itself."
        )
    else:
        yield says_of(check).ok(f"the {what} is valid for another {counted(life.left_days, 'day')}")


def _chain(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> Iterator[CheckFinding]:
    """Walk from the certificate over the intermediates of its file to a trusted authority."""
    current, left, above = chain[0], list(chain[1:]), 0
    while True:
        if trusted := issuer_of(current, authorities, above):
            says = f"signed by {trusted.subject.rfc4514_string()}"
            yield says_of("chain").ok(says)
            return
        step = issuer_of(current, left, above)
        if step is None:
            subject, issuer = current.subject.rfc4514_string(), current.issuer.rfc4514_string()
            says = f"no authority of the file signed {subject} (issuer {issuer})"
            do = "Put the authority that signed it into the file of [tls] ca, or intermediates after the certificate."
            yield says_of("chain").problem(says, do)
            return
        left.remove(step)
        current, above = step, above + 1


def _usage_findings(certificate: x509.Certificate) -> Iterator[CheckFinding]:
    missing = {"server", "client"} - _usages(certificate)
    if missing:
        says = f"the certificate is not for use as {' and '.join(sorted(missing))}"
        yield says_of("usage").problem(says, "Issue one for both: a node is called by others and calls them.")
    else:
        yield says_of("usage").ok("the certificate is for servers and clients")
    if is_authority(certificate):
        do = "Issue a certificate of its own for the node."
        yield says_of("usage").problem("the certificate is that of an authority", do)


def _names(certificate: x509.Certificate) -> Iterator[CheckFinding]:
    names = names_of(certificate)
    if len(names.common_names) != 1:
        says = f"the certificate has {len(names.common_names)} common names"
        yield says_of("names").problem(says, "Issue one with the single common name <zone>-bsfg.")
    elif names.common_names[0] not in names.alternative_names:
        says = f"the common name {names.common_names[0]!r} is not among the DNS names"
        do = "Add it as a DNS name, so that callers can insist on it; `bsfg certs issue` does."
        yield says_of("names").warning(says, do)
    else:
        yield says_of("names").ok(f"common name and DNS name are {names.common_names[0]}")


def _handshake(files: TlsFiles) -> Iterator[CheckFinding]:
    try:
        version = handshake_with_itself(files)
    except (ssl.SSLError, BsfgError) as error:
        why = failure_of(error) if isinstance(error, ssl.SSLError) else error.message
        says = f"a handshake of the node with itself fails: {why}"
        yield says_of("handshake").problem(says, "Compare with a certificate of `bsfg certs issue`.")
    else:
        yield says_of("handshake").ok(f"a {version} handshake of the node with itself succeeds")


def handshake_with_itself(files: TlsFiles) -> str:
    """Let a server and a client with the same files shake hands in memory; give the TLS version."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(files).wrap_bio(to_client, to_server, server_hostname="localhost")
    server = server_context(Watched(files)).wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.version() or ""


def key_kind(certificate: x509.Certificate) -> str:
    """Name the kind of key of a certificate."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"ECDSA {key.curve.name}"
    if isinstance(key, rsa.RSAPublicKey):
        return f"RSA {key.key_size}"
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return type(key).__name__.removesuffix("PublicKey").lstrip("_")
    return type(key).__name__


def _usages(certificate: x509.Certificate) -> set[str]:
    """Give what a certificate is for; one that does not say is for everything."""
    words = {ExtendedKeyUsageOID.SERVER_AUTH: "server", ExtendedKeyUsageOID.CLIENT_AUTH: "client"}
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return set(words.values())
    if ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in purposes:
        return set(words.values())
    return {words[purpose] for purpose in purposes if purpose in words}


def _all_alternative_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def names_in_file(path: Path) -> PeerNames:
    """Read the names of the first certificate of a file."""
    return names_of(load_certificates(path)[0])
