"""The names in the certificate of whoever is at the other end of a connection."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509


@dataclass(frozen=True, slots=True)
class PeerNames:
    """What a verified certificate says about its holder; alternative names are DNS names and URIs."""

    common_names: tuple[str, ...] = ()
    alternative_names: tuple[str, ...] = ()

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
    )
