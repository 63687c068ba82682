"""Certificates: making and reading them, bundles for one zone, who signed one, and whether it is still in force."""

from __future__ import annotations

import io
import ipaddress
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bsfg.disk import replace_file
from bsfg.errors import CertificateInvalid, FileExists, IdentityRevoked, InvalidArgument, StorageReadOnly
from bsfg.rules import ZONE, check_name
from bsfg.wire.peer import LOCALHOST, Shown, check_end, looks_like, shown
from bsfg.wire.tls import TlsFiles

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
    check_certificate_name(name, folder)
    if not (folder / f"{CA_NAME}.key").exists():
        hint = f"Make one with `bsfg certs init-ca {folder}`, or name the folder that has ca.crt and ca.key."
        raise CertificateInvalid(f"there is no authority in {folder}", hint=hint)
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


def renew(folder: Path, name: str, *, days: int, now: datetime) -> Issued:
    """Make a certificate anew with the names and purposes that it has, and a key of its own.

    The old one stays valid until its end, so whoever still shows it is not turned away meanwhile.
    """
    path = folder / f"{name}.crt"
    old, authority = load_certificates(path)[0], load_certificates(folder / f"{CA_NAME}.crt")
    if issuer_of(old, authority) is None:
        hint = f"Ask {old.issuer.rfc4514_string()}, or make one of this authority with `bsfg certs issue`."
        raise CertificateInvalid(f"{path} was not signed by the authority in {folder}", hint=hint)
    purposes = old.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    serves = ExtendedKeyUsageOID.SERVER_AUTH in purposes
    return issue(
        folder, name, days=days, now=now, hosts=[host for host in hosts if host != name], serves=serves, force=True
    )


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


def check_certificate_name(name: str, folder: Path) -> None:
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
        replace_file(issued.key_path, encoded, 0o600)
        replace_file(issued.certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise StorageReadOnly(f"{folder} cannot be written: {error.strerror}", hint="Choose another folder.") from None
    return issued


TOP = "certs"
"""The folder in an archive: beside zone.toml, as `bsfg init` writes it."""


def make_bundle(folder: Path, zone: str, target: Path, roles: Sequence[str] = ()) -> list[str]:
    """Write the files of one zone into a new folder, or a new archive that ends with ``.tar``; give their names."""
    content = _content(folder, check_name("zone", zone, ZONE), roles)
    check_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_archive(target, content) if target.suffix == ".tar" else _write_folder(target, content)
    except OSError as error:
        raise StorageReadOnly(f"{target} cannot be written: {error.strerror}", hint="Choose another place.") from None
    return list(content)


def check_target(target: Path) -> None:
    """Refuse to write over anything."""
    if os.path.lexists(target):
        raise FileExists(f"{target} is already there", hint="Choose a new name; a bundle never overwrites anything.")


def _content(folder: Path, zone: str, roles: Sequence[str]) -> dict[str, bytes]:
    """Read the files; the node's must be there, and every key must be that of its certificate."""
    authority = folder / f"{CA_NAME}.crt"
    load_certificates(authority)
    content = {authority.name: authority.read_bytes()}
    names = [f"{zone}{NODE_SUFFIX}", *(f"{zone}-{role}" for role in roles)]
    for name in names:
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        if name != names[0] and not certificate.exists() and not key.exists():
            continue
        if load_certificates(certificate)[0].public_key() != load_key(key).public_key():
            raise CertificateInvalid(f"{key} is not the key of {certificate}", hint="Issue the certificate again.")
        content |= {path.name: path.read_bytes() for path in (certificate, key)}
    return content


def _write_folder(target: Path, content: dict[str, bytes]) -> None:
    target.mkdir(mode=0o700)
    for name, data in content.items():
        _write_private(target / name, data)


def _write_archive(target: Path, content: dict[str, bytes]) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        top = tarfile.TarInfo(TOP)
        top.type, top.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(top)
        for name, data in content.items():
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    _write_private(target, made.getvalue())


def _write_private(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


REMEMBERED_MAX = 4_096
FORMER_MAX = 64
_CRL = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class IssuingAuthority:
    """An authority: what it is called, and its public key, by which it is known."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"{self.name} (key {self.key})"


@dataclass(frozen=True, slots=True)
class Judged:
    """What the signatures and lists say of a certificate: its authorities, the nearest first, and why it is void."""

    path: tuple[IssuingAuthority, ...]
    revoked: str | None = None


class Trust:
    """The authorities of a zone with their revocation lists, as they were in the files at one moment."""

    def __init__(
        self,
        authorities: Sequence[x509.Certificate],
        own_chain: Sequence[x509.Certificate] = (),
        lists: Sequence[x509.CertificateRevocationList] = (),
        before: Trust | None = None,
    ) -> None:
        self.authorities = list(authorities)
        # Connections that they opened may still be there.
        left = [*before.authorities, *before.former] if before is not None else []
        self.former: list[x509.Certificate] = [each for each in left if each not in self.authorities][:FORMER_MAX]
        # Intermediates that the node itself shows are known; gRPC does not tell those that a caller shows.
        self._candidates = [*authorities, *(each for each in own_chain[1:] if is_authority(each))]
        self._lists = self._newest(lists)
        self._judged: dict[str, Judged] = {}
        self._tops = {key_of(each): key_of(self._above(each)[-1]) for each in authorities}
        self.roots = set(self._tops.values())
        self.signers = tuple({key_of(each): signer(each) for each in authorities}.values())
        home = self.judge(shown(own_chain[0])).path if own_chain else ()
        self.home: IssuingAuthority | None = home[-1] if home else None

    def top(self, key: str) -> str:
        """Give the key of the authority at the top of another one, which may be the same."""
        return self._tops.get(key, key)

    def judge(self, certificate: Shown) -> Judged:
        """Tell who signed a certificate that TLS accepted, and whether it was withdrawn."""
        found = self._judged.get(certificate.fingerprint)
        if found is None:
            if len(self._judged) >= REMEMBERED_MAX:
                self._judged.clear()
            found = self._judged[certificate.fingerprint] = self._judge(certificate)
        return found

    def check(self, certificate: Shown, now_unix_ms: int) -> None:
        """Raise `CertificateInvalid` for a certificate past its end, `IdentityRevoked` for one that was withdrawn."""
        check_end(certificate, now_unix_ms)
        reason = self.judge(certificate).revoked
        if reason is not None:
            raise IdentityRevoked(reason, hint="Issue a new certificate for the same name.")

    def stale(self, now: datetime) -> list[str]:
        """List the authorities whose revocation list should have been followed by another one."""
        return [
            f"{name_of(self._signer_of_list(each))} since {each.next_update_utc:%Y-%m-%d %H:%M} UTC"
            for newest in self._lists.values()
            for each in newest
            if each.next_update_utc is not None and each.next_update_utc < now
        ]

    def _judge(self, certificate: Shown) -> Judged:
        leaf = x509.load_der_x509_certificate(certificate.der)
        above = self._above(leaf)[1:]
        if not above and (gone := issuer_of(leaf, self.former)) is not None:
            return Judged((signer(gone),), f"{name_of(gone)}, which signed {name_of(leaf)}, is no longer trusted")
        if not above and len(self.roots) == 1:
            # By an intermediate that nobody here knows; TLS has followed it to the one authority there is.
            above = self._above(self.authorities[0])
        return Judged(tuple(signer(each) for each in above), self._withdrawn([leaf, *above]))

    def _above(self, certificate: x509.Certificate) -> list[x509.Certificate]:
        """Give a certificate and those above it, as far as they are known."""
        path, current = [certificate], certificate
        while (found := issuer_of(current, self._candidates)) is not None and found not in path:
            path.append(found)
            current = found
        return path

    def _withdrawn(self, path: Sequence[x509.Certificate]) -> str | None:
        for below, above in pairwise(path):
            for revocations in self._lists.get(key_of(above), ()):
                entry = revocations.get_revoked_certificate_by_serial_number(below.serial_number)
                if entry is not None:
                    what, since = f"{name_of(below)} (serial {below.serial_number:x})", entry.revocation_date_utc
                    return f"{what} was revoked by {name_of(above)} on {since:%Y-%m-%d}"
        return None

    def _newest(
        self, lists: Sequence[x509.CertificateRevocationList]
    ) -> dict[str, list[x509.CertificateRevocationList]]:
        """Give the lists that count by the keys that signed them: the newest of those that are about the same.

        By the key, and not by the name: an authority that was given a new key has both lists for a while.
        """
        newest: dict[tuple[str, bytes], x509.CertificateRevocationList] = {}
        for each in lists:
            about = key_of(self._signer_of_list(each)), _scope_of(each)
            known = newest.get(about)
            if known is None or known.last_update_utc < each.last_update_utc:
                newest[about] = each
        found: dict[str, list[x509.CertificateRevocationList]] = {}
        for (key, _), each in newest.items():
            found.setdefault(key, []).append(each)
        return found

    def _signer_of_list(self, revocations: x509.CertificateRevocationList) -> x509.Certificate:
        for candidate in self._candidates:
            if candidate.subject == revocations.issuer and _signed(revocations, candidate):
                return candidate
        says = f"the revocation list of {revocations.issuer.rfc4514_string()} is not signed by an authority of [tls] ca"
        raise CertificateInvalid(says, hint="Get the list from the authority, or add the authority to [tls] ca.")


def load_trust(files: TlsFiles, crl: Path | None = None, before: Trust | None = None) -> Trust:
    """Read authorities and revocation lists and check them against each other, or raise `CertificateInvalid`."""
    lists = load_lists(crl) if crl is not None else ()
    return Trust(load_certificates(files.ca), load_certificates(files.certificate), lists, before)


def load_lists(path: Path) -> list[x509.CertificateRevocationList]:
    """Read every revocation list of a PEM file."""
    found: list[x509.CertificateRevocationList] = []
    try:
        for block in _CRL.findall(read_file(path)):
            found.append(x509.load_pem_x509_crl(block))
            if _is_partial(found[-1]):
                raise CertificateInvalid(f"{path} holds a partial revocation list", hint="Give whole lists.")
    except ValueError:
        found.clear()
    if not found:
        hint = "Give a PEM file: text that begins with -----BEGIN X509 CRL-----."
        raise CertificateInvalid(f"{path} holds no readable revocation list", hint=hint)
    return found


def issuer_of(
    certificate: x509.Certificate, candidates: Sequence[x509.Certificate], above: int = 0
) -> x509.Certificate | None:
    """Find who signed a certificate, among authorities that may have ``above`` authorities below them."""
    for candidate in candidates:
        length = path_length(candidate) if is_authority(candidate) else -1
        if length is not None and length < above:
            continue
        try:
            certificate.verify_directly_issued_by(candidate)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return candidate
    return None


def is_authority(certificate: x509.Certificate) -> bool:
    """Tell whether a certificate may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def path_length(certificate: x509.Certificate) -> int | None:
    """Give how many authorities may stand below one; None when it does not say."""
    return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length


def signer(certificate: x509.Certificate) -> IssuingAuthority:
    """Give an authority by its name and key."""
    return IssuingAuthority(name_of(certificate), key_of(certificate))


def key_of(certificate: x509.Certificate) -> str:
    """Give the hash of a certificate's public key, as it stands in the configuration."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return "sha256:" + digest.finalize().hex()


def name_of(certificate: x509.Certificate) -> str:
    """Give the subject of a certificate for people."""
    return certificate.subject.rfc4514_string() or "an authority without a name"


def _is_partial(revocations: x509.CertificateRevocationList) -> bool:
    """Tell whether a list names only what changed, some reasons, or certificates of other authorities."""
    for extension in revocations.extensions:
        value = extension.value
        if isinstance(value, x509.DeltaCRLIndicator):
            return True
        if isinstance(value, x509.IssuingDistributionPoint):
            return value.indirect_crl or value.only_some_reasons is not None
    return False


def _scope_of(revocations: x509.CertificateRevocationList) -> bytes:
    """Tell which certificates of its authority a list is about, such as those of users alone; empty for all."""
    try:
        return revocations.extensions.get_extension_for_class(x509.IssuingDistributionPoint).value.public_bytes()
    except x509.ExtensionNotFound:
        return b""


def _signed(revocations: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    try:
        return revocations.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, TypeError, InvalidSignature):
        return False
