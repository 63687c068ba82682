"""Finds out who a server is, by a handshake of its own, and says precisely what is wrong if it is not the right one.

gRPC reports a wrong certificate, a wrong name and an absent server alike as unavailable. A link must tell them apart:
an absent server makes it wait, a wrong one must hold it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, ServerIdentityMismatch, TimedOut
from bsfg.wire.peer import PeerNames, names_in_der
from bsfg.wire.status import reason_of
from bsfg.wire.tls import TlsFiles, Watched, client_context, refusal_of

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(*texts: str) -> bytes:
    """Write a header without a table: a name and its value."""
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in texts)


_HEADERS = (
    _literal(":method", "POST")
    + _literal(":scheme", "https")
    + _literal(":path", "/grpc.health.v1.Health/Check")
    + _literal(":authority", "localhost")
    + _literal("content-type", "application/grpc")
    + _literal("te", "trailers")
)
_HTTP2_HELLO = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0) + _frame(1, 4, 1, _HEADERS) + _frame(0, 1, 1, bytes(5))
)
"""What an HTTP/2 client says first, and a question of health: a server that accepts us answers with its own settings.

The question is there for its sake: a connection without a call looks to it like a handshake that failed.
"""

_FRAME_HEAD_BYTES = 9
_ANSWER_BYTES_MAX = 64 << 10

_LAST_WORDS = (1, 3, 7)
"""Frames after which nothing that matters comes: the head of an answer, the end of a stream or of the connection."""


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """A server that showed a certificate of a trusted authority."""

    names: PeerNames
    certificate_der: bytes


def probe(host: str, port: int, files: TlsFiles, timeout_seconds: float = 5.0) -> ServerSeen:
    """Shake hands with a server and give what its certificate says.

    Raises `PeerUnreachable` when nobody answers and `CertificateInvalid` when the other side's certificate, or ours in
    its eyes, is not acceptable.
    """
    context = client_context(files)
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_seconds) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return _seen(secured, timeout_seconds)
    except ssl.SSLCertVerificationError as error:
        hint = "Look at the other side with `bsfg certs check` there, and at the authorities in [tls] ca here."
        raise CertificateInvalid(
            f"the certificate of {host}:{port} is refused: {refusal_of(error)}", hint=hint
        ) from None
    except ssl.SSLEOFError:
        # Whoever refuses a handshake says so. One that only ends went down, or stands behind something that lost it.
        hint = "It may be about to stop, stand behind something that lost it, or speak no TLS 1.3."
        raise PeerUnreachable(f"{host}:{port} ended the connection before a handshake came about", hint=hint) from None
    except ssl.SSLError as error:
        hint = "It may not speak TLS 1.3, or not TLS at all, or refuse our certificate."
        raise CertificateInvalid(f"no TLS 1.3 handshake with {host}:{port} comes about", hint=hint) from error
    except OSError as error:
        raise PeerUnreachable(f"{host}:{port} cannot be reached: {reason_of(error)}") from None


def _seen(secured: ssl.SSLSocket, timeout_seconds: float) -> ServerSeen:
    der = secured.getpeercert(binary_form=True) or b""
    seen = ServerSeen(names_in_der(der), der)
    # In TLS 1.3 a client is done before the server has looked at its certificate: only an answer shows acceptance.
    if secured.selected_alpn_protocol() == "h2" and not _answered(secured, timeout_seconds):
        hint = "Its log says why; compare the authority, the dates and the usage of our certificate."
        raise CertificateInvalid("the server ended the connection when it saw our certificate", hint=hint)
    return seen


def _answered(secured: ssl.SSLSocket, timeout_seconds: float) -> bool:
    """Ask for health, wait for the answer, and tell whether anything was said at all.

    Who it is is not known yet: one that talks without end, or ever so slowly, is listened to no longer.
    """
    said, deadline = b"", time.monotonic() + timeout_seconds
    try:
        secured.sendall(_HTTP2_HELLO)
        while not _is_over(said) and (left := deadline - time.monotonic()) > 0:
            secured.settimeout(left)
            part = secured.recv(_ANSWER_BYTES_MAX)
            if not part:
                break
            said += part
    except (ssl.SSLError, OSError):
        pass
    return len(said) >= _FRAME_HEAD_BYTES


def _is_over(said: bytes) -> bool:
    """Tell whether the frames of an answer have come to its last words, or are more than an answer has."""
    at = 0
    while at + _FRAME_HEAD_BYTES <= len(said):
        if said[at + 3] in _LAST_WORDS:
            return True
        at += _FRAME_HEAD_BYTES + int.from_bytes(said[at : at + 3], "big")
    return len(said) >= _ANSWER_BYTES_MAX


@dataclass(frozen=True, slots=True)
class ServerVerified:
    """A server that is the one that is meant: the DNS name and the certificate that gRPC is to insist on."""

    name: str
    names: PeerNames
    certificate: bytes


def verify_server(
    host: str,
    port: int,
    files: TlsFiles,
    expected: str,
    *,
    by_alternative_name: bool = False,
    vouch: Callable[[PeerNames], None] = lambda names: None,
    timeout_seconds: float = 5.0,
) -> ServerVerified:
    """Check that a server is the one that is meant, and give what gRPC must insist on.

    The identity is the common name, or one of the alternative names where the zone is configured so; ``vouch`` raises
    if the authority behind it does not count. The name given is ``expected`` whenever the certificate carries it as an
    alternative name, as those of `bsfg certs` do. Another authority may put the identity into the common name only;
    then the first alternative name is given, to which that authority has tied the identity.
    """
    seen = probe(host, port, files, timeout_seconds)
    found = seen.names.telling_names if by_alternative_name else seen.names.common_names
    if expected not in found or (len(found) != 1 and not by_alternative_name):
        shown = ", ".join(found) or "nobody"
        raise ServerIdentityMismatch(
            f"{host}:{port} is {shown}, not {expected}", expected=expected, found=list(found), address=f"{host}:{port}"
        )
    vouch(seen.names)
    tied = expected in seen.names.alternative_names or not seen.names.alternative_names
    name = expected if tied else seen.names.alternative_names[0]
    return ServerVerified(name, seen.names, ssl.DER_cert_to_PEM_cert(seen.certificate_der).encode())


PROBE_SECONDS = 3.0


class ConnectionDiagnosis:
    """Looks at the server of one link before anything is asked of it, and after a call has failed.

    gRPC compares the DNS name of a server and no more. So before anything is asked of it, a handshake of its own
    looks at all of the certificate: the identity and the authority behind it. From then on gRPC accepts that very
    certificate and no other, until it is renewed. The same handshake tells an absent server, which is waited for,
    from one that shows the certificate of another node, which must hold the link. And where calls run out of time
    although a new connection is answered, the network has lost the old one without saying so.
    """

    def __init__(
        self,
        expected: str,
        watched: Watched | None,
        connection: Connection,
        *,
        by_alternative_name: bool = False,
        vouch: Callable[[PeerNames], None] = lambda names: None,
    ) -> None:
        self._expected, self._watched = expected, watched
        self._connection, self._by_alternative_name, self._vouch = connection, by_alternative_name, vouch
        self._verified: ServerVerified | None = None
        self._verified_at = ""
        self._looked = asyncio.Lock()
        self._found: BsfgError | None = None
        # A thread of its own: an address that swallows everything must not keep one from those who seal and encode.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reach")
        self._looking = False

    async def ready(self) -> None:
        """Insist on the right server before anything is asked of it; once it is known, this is a look at its dates."""
        if self._watched is None or self._stands():
            return
        async with self._looked:
            if not self._stands():
                try:
                    self._insist(await self._look(self._watched))
                except BsfgError as error:
                    self._found = error
                    raise

    async def explained(self, error: BsfgError) -> BsfgError:
        """Give the error that says what is really wrong; the same one when the server is merely not there."""
        unclear = isinstance(error, PeerUnreachable | CertificateInvalid | ServerIdentityMismatch | TimedOut)
        if self._watched is None or not unclear or self._looking or error is self._found:
            return error
        self._looking = True
        try:
            verified = await self._look(self._watched)
        except PeerUnreachable:
            return error
        except BsfgError as found:
            return found
        finally:
            self._looking = False
        # The right server: its certificate may be a new one, or tied to another name than the identity.
        self._insist(verified)
        if isinstance(error, TimedOut):
            self._connection.reconnect()
        if isinstance(error, ServerIdentityMismatch | CertificateInvalid):
            return PeerUnreachable(
                f"{self._connection.address} is {self._expected}, by another certificate than before"
            )
        return error

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stands(self) -> bool:
        """Tell whether the certificate that was seen still counts: it may have ended, or its authority have gone.

        Another node that answers in the place of the first has to show its own.
        """
        if self._verified is None or self._verified_at != self._connection.address:
            return False
        try:
            self._vouch(self._verified.names)
        except BsfgError:
            self._verified = None
            self._connection.reconnect()
            return False
        return True

    def _insist(self, verified: ServerVerified) -> None:
        self._verified, self._verified_at = verified, self._connection.address
        self._connection.insist_on(verified.name, verified.certificate)

    async def _look(self, watched: Watched) -> ServerVerified:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._verify, watched)

    def _verify(self, watched: Watched) -> ServerVerified:
        host, _, port = self._connection.address.rpartition(":")
        return verify_server(
            host.strip("[]"),
            int(port),
            watched.files,
            self._expected,
            by_alternative_name=self._by_alternative_name,
            vouch=self._vouch,
            timeout_seconds=PROBE_SECONDS,
        )
