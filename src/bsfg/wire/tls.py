"""TLS for both listeners and for callers: one set of files, read again whenever they change.

Both sides always show a certificate and check the other's. Only TLS 1.3 is spoken. A caller names the server it means:
gRPC's target name is set to that name, so that TLS refuses a server whose certificate does not carry it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from bsfg.errors import BsfgError, CertificateInvalid
from bsfg.wire import require_hardened

_REFUSALS = {
    7: "its signature does not fit",
    9: "it is not valid yet",
    10: "it has expired",
    18: "it has signed itself, and is not known",
    19: "its authority is not known",
    20: "no authority that is known has signed it",
    21: "no authority that is known has signed it",
    22: "the chain of its authorities is too long",
    23: "it was revoked",
    24: "what signed it is no authority",
    25: "its authority may not have authorities below it",
    26: "it is not for this use",
    79: "what signed it is no authority",
}
"""Why OpenSSL refuses a certificate, by the number that it gives."""


def refusal_of(error: ssl.SSLCertVerificationError) -> str:
    """Say in our own words why a certificate was refused."""
    return _REFUSALS.get(error.verify_code, f"it cannot be verified (reason {error.verify_code} of OpenSSL)")


_FAILURES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate was shown",
    "HTTP_REQUEST": "it did not speak TLS",
    "WRONG_VERSION_NUMBER": "it did not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it did not offer TLS 1.3",
    "UNEXPECTED_MESSAGE": "it did not keep to TLS",
    "EE_KEY_TOO_SMALL": "the key of the certificate is too short",
    "CA_KEY_TOO_SMALL": "the key of the authority is too short",
    "CA_MD_TOO_WEAK": "the certificate is signed in a way that is too weak",
    "NO_SUITABLE_SIGNATURE_ALGORITHM": "TLS 1.3 has no use for this kind of key",
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "ALERT_BAD_CERTIFICATE": "the other side does not accept the certificate that it was shown",
    "ALERT_CERTIFICATE_UNKNOWN": "the other side does not accept the certificate that it was shown",
    "ALERT_UNKNOWN_CA": "the other side does not know the authority of the certificate that it was shown",
    "ALERT_CERTIFICATE_EXPIRED": "the other side says that the certificate which it was shown has expired",
    "ALERT_CERTIFICATE_REVOKED": "the other side says that the certificate which it was shown is revoked",
    "ALERT_CERTIFICATE_REQUIRED": "the other side asks for a certificate",
    "ALERT_PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
}
"""Why OpenSSL gives up, by the name that it has for it."""


def failure_of(error: ssl.SSLError) -> str:
    """Say in a few words, none of them the other side's, why TLS failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {refusal_of(error)}"
    # The name of an alert begins with the version of TLS that had it first, which says nothing about this connection.
    name = re.sub(r"^(SSLV3|TLSV1|TLSV13)_(?=ALERT)", "", (error.reason or "").replace(" ", "_").upper())
    return _FAILURES.get(name, f"TLS failed: {name.replace('_', ' ').lower() or 'no reason'}")


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the three files, as PEM; certificate and key belong together."""

    ca: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the authority, the certificate and its key lie."""

    ca: Path
    certificate: Path
    key: Path

    def stamp(self) -> tuple[object, ...]:
        """Give something that changes whenever a file is replaced or rewritten; cheap enough for every handshake."""
        return tuple(file_stamp(path) for path in (self.ca, self.certificate, self.key))

    def load(self) -> Material:
        """Read the files and check that they can be used together, or raise `CertificateInvalid`."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        from bsfg.wire.certs import load_certificates, load_key

        load_certificates(self.ca)
        leaf, key = load_certificates(self.certificate)[0], load_key(self.key)
        spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if leaf.public_key().public_bytes(*spki) != key.public_key().public_bytes(*spki):
            hint = "Use the key the certificate was made with, or issue a new certificate."
            raise CertificateInvalid(f"{self.key} is not the key of {self.certificate}", hint=hint)
        return Material(self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes())


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Give something that changes whenever a file is replaced or rewritten; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Watched:
    """The current material of a set of files, renewed when they change.

    New files that cannot be used (half copied, key of another certificate) do not interrupt anything: the old material
    stays in use and ``on_problem`` is told, once per change. ``on_reload`` is told about every renewal.
    """

    def __init__(
        self,
        files: TlsFiles,
        on_problem: Callable[[BsfgError], None] | None = None,
        on_reload: Callable[[Material], None] | None = None,
    ) -> None:
        self.files = files
        self._on_problem = on_problem or (lambda error: None)
        self._on_reload = on_reload or (lambda material: None)
        self._lock = Lock()
        self._stamp = files.stamp()
        self.material = files.load()
        self.version = 1

    def refresh(self) -> int:
        """Look at the files and give the version of the material, which counts the renewals."""
        with self._lock:
            stamp = self.files.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self.version

    def _reload(self) -> None:
        try:
            material = self.files.load()
        except BsfgError as error:
            self._on_problem(error)
            return
        except OSError as error:
            self._on_problem(CertificateInvalid(f"a certificate file cannot be read: {error.strerror}"))
            return
        if material != self.material:
            self.material = material
            self.version += 1
            self._on_reload(material)


def grpc_server_credentials(watched: Watched, begin: Callable[[], None] = lambda: None) -> Any:
    """Give gRPC server credentials that demand a client certificate and follow the files.

    ``begin`` is called before every handshake, in a thread of gRPC.
    """
    require_hardened()
    import grpc

    def configuration() -> Any:
        material = watched.material
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)

    served = watched.refresh()

    def fetch() -> Any:
        # gRPC asks before every handshake; None means that nothing has changed.
        nonlocal served
        begin()
        if (version := watched.refresh()) == served:
            return None
        served = version
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)


def grpc_channel_credentials(material: Material, server_certificate: bytes | None = None) -> Any:
    """Give gRPC credentials for a caller; a channel keeps them, so a new version of the files needs a new channel.

    With ``server_certificate`` they accept a server that has that very certificate, and no other.
    """
    require_hardened()
    import grpc

    return grpc.ssl_channel_credentials(server_certificate or material.ca, material.key, material.certificate)


def grpc_channel_options(server_name: str) -> list[tuple[str, str]]:
    """Give the channel option that makes TLS insist on a server whose certificate carries this DNS name."""
    return [("grpc.ssl_target_name_override", server_name)]


def server_context(watched: Watched, *, certificates_optional: bool = False) -> ssl.SSLContext:
    """Give a context for the HTTP listener that demands a client certificate and follows the files.

    The certificate and the trusted authorities are exchanged together at the start of each handshake. Sessions are
    never resumed: a resumed one would skip the check of the client's certificate. Where certificates are optional a
    wrong one is refused all the same, and whoever serves the requests decides what may be done without any.
    """
    wanted = ssl.CERT_OPTIONAL if certificates_optional else ssl.CERT_REQUIRED
    outer = inner = _server_context(watched.files, wanted)
    version = watched.refresh()

    def on_hello(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal inner, version
        if (current := watched.refresh()) != version:
            # A file that changes at this very moment is looked at again by the next handshake.
            with suppress(CertificateInvalid):
                inner, version = _server_context(watched.files, wanted), current
        connection.context = inner

    outer.sni_callback = on_hello
    return outer


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Give a context for a caller; whom it has reached is checked by name afterwards (see `bsfg.wire.probe`)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _prepared(context, files)


def _server_context(files: TlsFiles, wanted: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return _prepared(context, files, wanted)


def _prepared(context: ssl.SSLContext, files: TlsFiles, wanted: ssl.VerifyMode = ssl.CERT_REQUIRED) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = wanted
    try:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.certificate, files.key)
    except (ssl.SSLError, OSError) as error:
        why = failure_of(error) if isinstance(error, ssl.SSLError) else error.strerror
        raise CertificateInvalid(f"the files of {files.certificate.parent} cannot be used for TLS: {why}") from None
    return context
