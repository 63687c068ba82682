"""Makes and reads certificates: a small authority for development, and one certificate per zone or application.

A zone's certificate carries the name ``<zone>-bsfg`` twice, as common name and as DNS name. The common name is what
the table of identities knows. The DNS name lets TLS itself check that a server is the one that was meant, whatever
address it is reached at. It also carries names of hosts, those of the own machine at least, for curl and browsers,
which look for nothing else; nobody is known by them. Keys are ECDSA on P-256.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bsfg.errors import CertificateInvalid, FileExists, InvalidArgument, StorageReadOnly
from bsfg.wire.peer import LOCALHOST, looks_like

CA_NAME = "ca"
NODE_SUFFIX = "-bsfg"
CLOCK_SKEW = timedelta(minutes=5)
"""How far back a new certificate begins, so that a zone whose clock is behind accepts it."""

OWN_MACHINE = (LOCALHOST, "127.0.0.1", "::1")
"""What a node is called on its own machine, and nobody is known by anywhere."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was made, and where it and its key lie."""

    certificate: x509.Certificate
    certificate_path: Path
    key_path: Path


def create_authority(folder: Path, *, name: str, days: int, now: datetime, force: bool = False) -> Issued:
    """Make a certificate authority of its own in a folder: ``ca.crt`` and ``ca.key``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _common_name(name))])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(subject, subject, key.public_key(), now, _end(now, days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(identifier, critical=False)
    return _write(folder, CA_NAME, builder.sign(key, hashes.SHA256()), key, force=force)


def issue(
    folder: Path,
    name: str,
    *,
    days: int,
    now: datetime,
    hosts: Sequence[str] = (),
    serves: bool = True,
    force: bool = False,
) -> Issued:
    """Make a certificate signed by the authority of a folder: ``NAME.crt`` and ``NAME.key``.

    ``serves`` is for nodes, which are called, on their own machine also as localhost, and call others; applications
    only call. The certificate never outlives its authority.
    """
    check_name(name, folder)
    authority = load_certificates(folder / f"{CA_NAME}.crt")[0]
    authority_key = load_key(folder / f"{CA_NAME}.key")
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise CertificateInvalid(f"{folder / CA_NAME}.key is not an ECDSA key", hint="Make an authority with init-ca.")
    end = min(_end(now, days), authority.not_valid_after_utc)
    if end <= now:
        raise CertificateInvalid(f"the authority in {folder} has expired", hint="Make a new one with init-ca.")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    # Names of hosts have no case, and a dot at their end says nothing.
    wanted = dict.fromkeys(host.lower().rstrip(".") for host in (*hosts, *(OWN_MACHINE if serves else ())))
    names = [x509.DNSName(name), *(_host(host) for host in wanted if host != name)]
    builder = _builder(subject, authority.subject, key.public_key(), now, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return _write(folder, name, builder.sign(authority_key, hashes.SHA256()), key, force=force)


def load_certificates(path: Path) -> list[x509.Certificate]:
    """Read every certificate of a PEM file, at least one."""
    try:
        return x509.load_pem_x509_certificates(read_file(path))
    except ValueError:
        hint = "Give a PEM file: text that begins with -----BEGIN CERTIFICATE-----."
        raise CertificateInvalid(f"{path} holds no readable certificate", hint=hint) from None


def load_key(path: Path) -> PrivateKeyTypes:
    """Read a private key from a PEM file; it must not need a password, because a node starts unattended."""
    try:
        return serialization.load_pem_private_key(read_file(path), password=None)
    except TypeError:
        hint = "Store the key without a password and protect the file instead (owner only, mode 0600)."
        raise CertificateInvalid(f"{path} needs a password", hint=hint) from None
    except (ValueError, UnsupportedAlgorithm):
        hint = "Give a PEM file: text that begins with -----BEGIN PRIVATE KEY-----."
        raise CertificateInvalid(f"{path} holds no readable private key", hint=hint) from None


def read_file(path: Path) -> bytes:
    """Read a file of [tls], or raise `CertificateInvalid` with what to do."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        hint = "Correct the path in [tls], or make the file with `bsfg certs init-ca` and `bsfg certs issue`."
        raise CertificateInvalid(f"there is no file {path}", hint=hint) from None
    except OSError as error:
        hint = "Let the user that runs the node read the file."
        raise CertificateInvalid(f"{path} cannot be read: {error.strerror}", hint=hint) from None


def _common_name(name: str) -> str:
    if not 1 <= len(name) <= 64:
        raise InvalidArgument("the name of an authority has 1 to 64 characters")
    return name


def _end(now: datetime, days: int) -> datetime:
    if not 1 <= days <= 36_500:
        raise InvalidArgument("a certificate lasts from 1 to 36500 days", days=days)
    return (now + timedelta(days=days)).astimezone(UTC).replace(microsecond=0)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(end)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def check_name(name: str, folder: Path) -> None:
    """Refuse a name that TLS or a person would take for another one: hosts have no case and may end with a dot."""
    if not _NAME.fullmatch(name) or looks_like(name) == CA_NAME or name.endswith("."):
        raise InvalidArgument(f"{name!r} cannot name a certificate: use letters, digits, '.', '_', '-', at most 64")
    if looks_like(name).endswith(NODE_SUFFIX) and not name.endswith(NODE_SUFFIX):
        raise InvalidArgument(f"{name!r} would be taken for a zone's node: the names of nodes end with {NODE_SUFFIX}")
    for known in (path.stem for path in folder.glob("*.crt")):
        if known != name and looks_like(known) == looks_like(name):
            raise InvalidArgument(f"{name!r} would be taken for {known!r}, which has a certificate in {folder}")


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if host.endswith(NODE_SUFFIX):
        raise InvalidArgument(
            f"{host!r} is the name of a zone's node, not of a host: with it one zone could pose as another"
        )
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]{0,252})", host):
        raise InvalidArgument(f"{host!r} is neither a host name nor an address")
    return x509.DNSName(host)


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, *, force: bool
) -> Issued:
    issued = Issued(certificate, folder / f"{name}.crt", folder / f"{name}.key")
    for path in (issued.certificate_path, issued.key_path):
        if path.exists() and not force:
            raise FileExists(f"{path} is already there", path=str(path))
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(issued.key_path, encoded, 0o600)
        _replace(issued.certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise StorageReadOnly(f"{folder} cannot be written: {error.strerror}", hint="Choose another folder.") from None
    return issued


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file that nobody else can read even for a moment, and that is never seen half written."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
