"""The certificate of whoever is at the other end of a connection: its names, and what tells it from any other."""

from __future__ import annotations

import hashlib
import ssl
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from bsfg.errors import CertificateInvalid

if TYPE_CHECKING:
    from cryptography import x509


LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True)
class Shown:
    """A certificate that was shown: until when it is valid, and what it is, for those who ask who signed it."""

    der: bytes = field(repr=False)
    fingerprint: str
    not_after_unix_ms: int


@dataclass(frozen=True, slots=True)
class PeerNames:
    """What a verified certificate says about its holder; alternative names are DNS names and URIs.

    Two are equal when their names are: whether they are of the same certificate is asked by ``certificate``.
    """

    common_names: tuple[str, ...] = ()
    alternative_names: tuple[str, ...] = ()
    certificate: Shown | None = field(default=None, compare=False)

    @property
    def telling_names(self) -> tuple[str, ...]:
        """The alternative names that can say who somebody is; every machine is localhost to itself."""
        return tuple(name for name in self.alternative_names if looks_like(name) != LOCALHOST)

    def __str__(self) -> str:
        return ", ".join(self.common_names or self.alternative_names) or "a certificate without a name"


def names_in_auth_context(context: Mapping[str, Iterable[bytes]]) -> PeerNames | None:
    """Read the caller's certificate from what gRPC gives a servicer; None on a connection without TLS."""
    for pem in context.get("x509_pem_cert", ()):
        return names_in_pem(bytes(pem))
    return None


def names_in_ssl_object(connection: ssl.SSLObject | ssl.SSLSocket | None) -> PeerNames | None:
    """Read the other side's certificate from a connection of the standard library; None without TLS."""
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    return None if der is None else names_in_der(der)


@lru_cache(maxsize=4096)
def names_in_pem(pem: bytes) -> PeerNames:
    """Read the names of a certificate in PEM form."""
    return names_in_der(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))


@lru_cache(maxsize=4096)
def names_in_der(der: bytes) -> PeerNames:
    """Read the names of a certificate in DER form."""
    from cryptography import x509

    return names_of(x509.load_der_x509_certificate(der))


def names_of(certificate: x509.Certificate) -> PeerNames:
    """Read the names of a parsed certificate."""
    from cryptography import x509

    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    return PeerNames(
        tuple(str(attribute.value) for attribute in common),
        (*names.get_values_for_type(x509.DNSName), *names.get_values_for_type(x509.UniformResourceIdentifier)),
        shown(certificate),
    )


def shown(certificate: x509.Certificate) -> Shown:
    """Give a parsed certificate in the form in which it is asked about."""
    from cryptography.hazmat.primitives.serialization import Encoding

    der = certificate.public_bytes(Encoding.DER)
    ends_unix_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
    return Shown(der, hashlib.sha256(der).hexdigest(), ends_unix_ms)


def check_end(certificate: Shown, now_unix_ms: int) -> None:
    """Raise `CertificateInvalid` for a certificate past its end: the connection it opened may be older."""
    if now_unix_ms > certificate.not_after_unix_ms:
        ended = datetime.fromtimestamp(certificate.not_after_unix_ms / 1000, UTC)
        hint = "Issue a new one and replace the file; the next connection uses it."
        raise CertificateInvalid(f"the certificate shown expired on {ended:%Y-%m-%d %H:%M:%S} UTC", hint=hint)


def looks_like(name: str) -> str:
    """Give a form of a name that it shares with every name a person, or a resolver of hosts, could take it for.

    Names are compared exactly wherever they give a right. This is for the places that make names and rows, which
    refuse a second one that differs in case, dots at the end, spaces or compatible characters alone.
    """
    folded = unicodedata.normalize("NFKC", name).casefold()
    return unicodedata.normalize("NFKC", "".join(folded.split())).rstrip(".")
