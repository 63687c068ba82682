"""The light client's way to a node: JSON over HTTP with what Python brings along, and orjson.

Nothing here needs Arrow, NumPy or gRPC, so that ``pip install bsfg`` alone is enough for a producer or a consumer of
single facts. Whoever moves many thousands a second takes `bsfg.Producer` and `bsfg.Consumer` of ``bsfg[node]``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import orjson

from bsfg.artifacts import Begun, check_digest
from bsfg.errors import BsfgError, CertificateInvalid, DigestMismatch, InvalidArgument, PeerUnreachable, TimedOut
from bsfg.retry import Backoff

JSON, JSON_LINES = "application/json", "application/x-ndjson"
BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS = 0.1, 5.0
_PIECE_BYTES = 256 << 10
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

T = TypeVar("T")
Body = bytes | Callable[[], Iterator[bytes]]
"""What a request carries: bytes, or what gives them anew for each attempt."""


@dataclass(frozen=True, slots=True)
class LightNode:
    """Where the HTTP port of a node is (``host:port``, 9080 unless configured otherwise), and who calls it.

    With ``ca``, ``certificate`` and ``key`` (paths of PEM files) the connection is mutual TLS 1.3; the files are read
    for every new connection. Without them it is plaintext, which is allowed on loopback only. ``server_name`` is the
    name that the node's certificate must carry; it defaults to the host. Several nodes of a zone, of which one is
    active, are written with commas between.
    """

    address: str
    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        files = (self.ca, self.certificate, self.key)
        if any(files) and not all(files):
            raise InvalidArgument("TLS needs all three files: ca, certificate and key")
        for host, _ in self.places:
            if not any(files) and host not in _LOOPBACK:
                raise InvalidArgument(f"{host} is not on loopback, so it needs TLS", hint="Give ca, certificate, key.")

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and port of each node."""
        return [_place(each) for each in self.address.split(",")]

    def context(self) -> ssl.SSLContext | None:
        """Read the certificates; None for plaintext."""
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        for path in (self.ca, self.certificate, self.key):
            if not Path(path).is_file():
                raise CertificateInvalid(f"there is no {os.fspath(path)}")
        try:
            context = ssl.create_default_context(cafile=os.fspath(self.ca))
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(os.fspath(self.certificate), os.fspath(self.key))
        except (ssl.SSLError, OSError) as error:
            raise CertificateInvalid(f"{os.fspath(self.certificate)} cannot be used: {error}") from None
        return context


def _place(text: str) -> tuple[str, int]:
    try:
        found = urlsplit(f"//{text.strip()}")
        host, port = found.hostname, found.port
    except ValueError:
        host, port = None, None
    if not host or not port or found.path:
        raise InvalidArgument(f"address {text[:80]!r} must be host:port", hint="Name the node's HTTP port: host:9080.")
    return host, port


class _TlsConnection(http.client.HTTPConnection):
    """A connection whose server must carry a name of its own, whatever host was dialled."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, name: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._tls, self._name = context, name

    def connect(self) -> None:
        """Connect, and insist on the name."""
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


class LightCalls:
    """One connection to a node, opened when it is needed and again when it broke; for several threads.

    Every operation bears to be repeated, so that one whose answer was lost is asked again.
    """

    def __init__(self, node: LightNode) -> None:
        self.node = node
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._turn = 0

    def json(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        media_type: str = JSON,
        wait_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Ask, and give the body of the answer; raises what the node said, or why it could not be asked."""
        with self._lock, self._asked(method, path, body, media_type, wait_seconds, headers) as answer:
            return answer.read()

    def content(self, path: str, offset: int) -> Generator[bytes, None, None]:
        """Download what follows an offset, piece by piece, not verified."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self._lock, self._asked("GET", path, None, JSON, 0.0, headers) as answer:
            left = offset if answer.status != http.client.PARTIAL_CONTENT else 0
            while piece := answer.read(_PIECE_BYTES):
                piece, left = piece[left:], max(0, left - len(piece))
                if piece:
                    yield piece
            if answer.length:
                raise PeerUnreachable("the node broke off in the middle of an artifact")

    @contextlib.contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        body: Body | None,
        media_type: str,
        wait_seconds: float,
        headers: Mapping[str, str] | None,
    ) -> Iterator[http.client.HTTPResponse]:
        sent = {**(headers or {}), **({"Content-Type": media_type} if body is not None else {})}
        try:
            answer = self._answer(method, path, body, sent, wait_seconds)
            if answer.status >= 400:
                raise _problem(answer.status, answer.read())
            yield answer
            if not answer.isclosed():
                self._drop()
        except BsfgError as error:
            if error.code in ("standing_by", "storage_taken", "peer_unreachable"):
                self._turn += 1
                self._drop()
            raise
        except TimeoutError:
            self._drop()
            raise TimedOut(f"{self.node.address} did not answer in time") from None
        except ssl.SSLError as error:
            self._drop()
            raise _tls_failed(error, self.node.address) from None
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            self._turn += 1
            raise PeerUnreachable(f"{self.node.address} cannot be reached: {error}") from None
        except GeneratorExit:
            self._drop()
            raise

    def _answer(
        self, method: str, path: str, body: Body | None, headers: Mapping[str, str], wait_seconds: float
    ) -> http.client.HTTPResponse:
        while True:
            connection, is_used = self._open()
            # The node waits so long for facts before it answers.
            connection.timeout = self.node.timeout_seconds + wait_seconds
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            try:
                content = body() if callable(body) else body
                connection.request(method, path, content, dict(headers), encode_chunked=False)
                return connection.getresponse()
            except (ConnectionError, http.client.CannotSendRequest, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                self._drop()
                # A node ends connections that nobody used for a while; that is no failure of it.
                if not is_used:
                    raise

    def _open(self) -> tuple[http.client.HTTPConnection, bool]:
        if self._connection is not None:
            return self._connection, True
        places, context = self.node.places, self.node.context()
        host, port = places[self._turn % len(places)]
        timeout = self.node.timeout_seconds
        if context is None:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            name = self.node.server_name or host
            self._connection = _TlsConnection(host, port, context, name, timeout)
        return self._connection, False

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def hang_up(self) -> None:
        """Break off what another thread waits for."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._drop()


def _tls_failed(error: ssl.SSLError, address: str) -> BsfgError:
    """Tell a certificate that one side does not take, which stays so, from a connection that was merely cut."""
    # The reason alone: what else there is are the other side's words.
    why = f"TLS with {address} failed: {(error.reason or 'it was cut').replace('_', ' ').lower()}"
    is_refusal = isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or "")
    return CertificateInvalid(why) if is_refusal else PeerUnreachable(why)


def _problem(status: int, body: bytes) -> BsfgError:
    """Give the error that a problem document tells."""
    try:
        found = orjson.loads(body)
        return BsfgError.from_dict({**found, "message": found.get("detail", "")})
    except (orjson.JSONDecodeError, TypeError, AttributeError):
        return PeerUnreachable(f"what answered with status {status} is no node", hint="Check the address and port.")


def insist(work: Callable[[], T], stopped: threading.Event, deadline: float) -> T:
    """Do something until it succeeds, is refused for good, or time is over (`time.monotonic`)."""
    backoff = Backoff(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS)
    while True:
        try:
            return work()
        except BsfgError as error:
            left = deadline - time.monotonic()
            if not error.retryable or left <= 0 or stopped.wait(min(left, backoff.next_seconds())):
                raise


def path_of(*parts: str, **query: object) -> str:
    """Write the path of an operation; ids and keys may hold anything, slashes too."""
    path = "/v1/" + "/".join(quote(part, safe="/" if at == len(parts) - 1 else "") for at, part in enumerate(parts))
    asked = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(asked)}" if asked else path


def artifact_pieces(node: LightNode, digest: str, begun: Begun | None = None) -> Iterator[bytes]:
    """Give the content of a digest, what follows that which was begun; the last piece when the whole is right.

    Each download has a connection of its own: who stops in the middle of one keeps nobody from the next.
    """
    check_digest(digest)
    total, held = Begun(), b""
    if begun is not None:
        total.size_bytes, total.sha256 = begun.size_bytes, begun.sha256.copy()
    try:
        with (
            contextlib.closing(LightCalls(node)) as calls,
            contextlib.closing(calls.content(path_of("artifacts", digest), total.size_bytes)) as pieces,
        ):
            for piece in pieces:
                total.add(piece)
                if held:
                    yield held
                held = piece
    except InvalidArgument:
        # Nothing follows: all of it was there, or what was there is something else.
        if begun is None or not begun.size_bytes:
            raise
    if (found := f"sha256:{total.sha256.hexdigest()}") != digest:
        raise DigestMismatch(f"content with the digest {found} came for {digest}", digest=found, announced=digest)
    if held:
        yield held


def loaded(data: bytes, *names: str) -> Any:
    """Read the JSON of an answer, which has some fields; what is no node's counts as no answer."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(name in found for name in names):
        raise PeerUnreachable("what answered is no node", hint="Check the address and port.")
    return found
