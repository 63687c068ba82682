"""Who signed a certificate, and whether it is still in force: asked with every call, not only when hands are shaken.

A name is worth as much as the authority behind it. TLS only says that one of the trusted authorities has signed; which
one is found here, by the signatures. The answers are remembered per certificate, so that a call costs a look into a
table. What an authority has withdrawn is known from its revocation lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bsfg.errors import CertificateInvalid, IdentityRevoked
from bsfg.wire.certs import load_certificates, read_file
from bsfg.wire.peer import Shown, check_end, shown
from bsfg.wire.tls import TlsFiles

REMEMBERED_MAX = 4_096
FORMER_MAX = 64
_CRL = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Signer:
    """An authority: what it is called, and its public key, by which it is known."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"{self.name} (key {self.key})"


@dataclass(frozen=True, slots=True)
class Judged:
    """What the signatures and lists say of a certificate: its authorities, the nearest first, and why it is void."""

    path: tuple[Signer, ...]
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
        self._lists = {key_of(self._signer_of_list(each)): each for each in lists}
        self._judged: dict[str, Judged] = {}
        self._tops = {key_of(each): key_of(self._above(each)[-1]) for each in authorities}
        self.roots = set(self._tops.values())
        self.signers = tuple({key_of(each): signer(each) for each in authorities}.values())
        home = self.judge(shown(own_chain[0])).path if own_chain else ()
        self.home: Signer | None = home[-1] if home else None

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
            for each in self._lists.values()
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
            revocations = self._lists.get(key_of(above))
            entry = revocations and revocations.get_revoked_certificate_by_serial_number(below.serial_number)
            if entry:
                since = f"{entry.revocation_date_utc:%Y-%m-%d}"
                return f"{name_of(below)} (serial {below.serial_number:x}) was revoked by {name_of(above)} on {since}"
        return None

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
    """Read every revocation list of a PEM file; of several by one authority the newest counts."""
    found: dict[bytes, x509.CertificateRevocationList] = {}
    try:
        for block in _CRL.findall(read_file(path)):
            each = x509.load_pem_x509_crl(block)
            known = found.get(each.issuer.public_bytes())
            if known is None or known.last_update_utc < each.last_update_utc:
                found[each.issuer.public_bytes()] = each
            if _is_partial(each):
                raise CertificateInvalid(f"{path} holds a partial revocation list", hint="Give whole lists.")
    except ValueError:
        found.clear()
    if not found:
        hint = "Give a PEM file: text that begins with -----BEGIN X509 CRL-----."
        raise CertificateInvalid(f"{path} holds no readable revocation list", hint=hint)
    return list(found.values())


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


def signer(certificate: x509.Certificate) -> Signer:
    """Give an authority by its name and key."""
    return Signer(name_of(certificate), key_of(certificate))


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


def _signed(revocations: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    try:
        return revocations.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, TypeError, InvalidSignature):
        return False
