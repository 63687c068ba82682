"""What stands around all requests of the HTTP listener: certificates, names, headers, room, and errors as documents."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import h11
import orjson
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from bsfg.errors import BsfgError, HostUnknown, InvalidArgument, PermissionRefused
from bsfg.ports import Buffer
from bsfg.wire.connections import (
    HandshakePace,
    Handshakes,
    Listening,
    ObservedTls,
    PacedConnection,
    connections_allowed,
    listening_on,
)
from bsfg.wire.grpc_calls import told_to_caller
from bsfg.wire.limits import Admission, WireLimits
from bsfg.wire.operations import PAGES, PROBLEM, Asks, Terms
from bsfg.wire.peer import names_in_pem, names_in_ssl_object
from bsfg.wire.service import Caller
from bsfg.wire.status import http_status
from bsfg.wire.tls import Watched
from bsfg.wording import one_line

RETRY_AFTER_SECONDS = "1"
SAFE_METHODS = ("GET", "HEAD")

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
Refused = Callable[[Request, BsfgError], Response]


def caller_of(request: Request) -> Caller:
    """Give who is at the other end; the listener's protocol put the certificate's names into the state."""
    client = request.client
    address = f"{client.host}:{client.port}" if client else ""
    return Caller(request.scope.get("state", {}).get("peer"), address)


def problem(error: BsfgError, status: int | None = None) -> Response:
    """Write an error as a problem document (RFC 9457) with BSFG's own fields beside the standard ones."""
    status = status or http_status(error)
    found = error.to_dict()
    body = {"type": "about:blank", "title": error.code.replace("_", " "), "status": status, "detail": error.message}
    body |= {name: value for name, value in found.items() if name != "message"}
    headers = {"retry-after": RETRY_AFTER_SECONDS} if error.retryable else None
    return Response(orjson.dumps(body, default=str), status, headers, media_type=PROBLEM)


def endpoint(
    admission: Admission,
    terms: Terms,
    handler: Handler,
    who: Callable[[Request], Caller] = caller_of,
    *,
    admit: Callable[[Request, Caller], str | None],
    refused: Refused = lambda request, error: problem(error),
) -> Endpoint:
    """Give what answers the requests of one operation: ``who`` tells or refuses the caller, ``refused`` writes errors.

    ``admit`` gives under whose name a caller is served, or refuses him, before anything of his body is read; None is
    somebody without a name. What is open and takes nothing is answered however many others are served.
    """
    placeless = terms.asks in (Asks.NOTHING, Asks.CERTIFICATE) and not terms.message_bytes

    async def answer(request: Request) -> Response:
        check_site(request)
        caller = who(request)
        owner = admit(request, caller)
        request.state.owner = owner or "strangers"
        if placeless:
            return await handler(request, caller)
        with admission.enter(owner) if owner is not None else admission.enter_stranger(_host(request)):
            return await handler(request, caller)

    async def call(request: Request) -> Response:
        started = time.perf_counter()

        def answered(code: str | None) -> None:
            if not placeless or code is not None:
                name = f"dashboard_{terms.name}" if terms.service == PAGES else terms.name
                admission.answered(f"http_{name}", time.perf_counter() - started, code)

        try:
            response = await answer(request)
            if placeless and request.state.owner == "strangers":
                await admission.slow_down(f"{bucket_of(request)} asks {terms.name}")
            answered(None)
            return response
        except ClientDisconnect:
            answered(None)
            return Response(status_code=499)
        except Exception as error:
            told = told_to_caller(terms.name, error)
        # His place and his bytes are given back by now, and nothing of his request is left to wait with him.
        await admission.hold_back(bucket_of(request), told)
        answered(told.code)
        return refused(request, told)

    return call


def check_site(request: Request) -> None:
    """Refuse what the page of another site has a browser ask for: the browser would add its user's certificate."""
    if request.method in SAFE_METHODS:
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}".lower()
    # Old browsers say only where the page is from, and programs say neither.
    if site not in (None, "same-origin", "none") or (origin is not None and origin.lower() != own):
        raise PermissionRefused("the page of another site asks for this", hint="Use the node's own pages.")


def bucket_of(request: Request) -> str:
    """Give under which name a caller's faults are counted: somebody unknown by where he calls from."""
    caller = caller_of(request)
    if caller.names is None and request.url.scheme == "https":
        return f"anybody at {_host(request)}"
    return str(caller)


def _host(request: Request) -> str:
    return request.client.host if request.client else "nowhere"


OPEN_PATHS = ("/healthz", "/readyz")
"""Monitors and load balancers ask these by whatever name or address they like; they tell nothing."""

NOSNIFF = ("x-content-type-options", "nosniff")
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
DATA_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": DATA_POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


class Hosts:
    """The names by which this node may be called: its own, those of its certificate, and those that were configured.

    With TLS an address is good, too: nobody can make an address lead elsewhere. Without TLS only this machine calls.
    """

    def __init__(self, names: Iterable[str], watched: Watched | None = None) -> None:
        self._names = frozenset(_plain(name) for name in names if name)
        self._watched = watched

    def knows(self, host_header: str) -> bool:
        """Tell whether a request with this ``Host`` is meant for this node; its port does not matter."""
        try:
            host = _plain(urlsplit(f"//{host_header}").hostname or "")
        except ValueError:
            return False
        if not host or "@" in host_header:
            return False
        try:
            return ipaddress.ip_address(host).is_loopback or self._watched is not None or host in self._names
        except ValueError:
            return host == "localhost" or any(_fits(host, name) for name in (*self._names, *self._certified()))

    def _certified(self) -> Iterable[str]:
        """Give the names in the certificate that is in use now."""
        if self._watched is None:
            return ()
        self._watched.refresh()
        found = _PEM.search(self._watched.material.certificate)
        return map(_plain, names_in_pem(found[0]).alternative_names) if found else ()


class Fence:
    """The ASGI application around all others."""

    def __init__(self, app: Any, hosts: Hosts | None, admission: Admission) -> None:
        self._app, self._hosts, self._admission = app, hosts, admission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request that is meant for this node, and complete the headers of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in DATA_HEADERS.items()]
                headers = [*message["headers"], *(pair for pair in more if pair[0] not in given)]
                message = {**message, "headers": headers}
            await send(message)

        app = self._app if self._is_meant(scope) else await self._misdirected(scope)
        await app(scope, receive, send_safely)

    def _is_meant(self, scope: Any) -> bool:
        return self._hosts is None or scope["path"] in OPEN_PATHS or self._hosts.knows(_host_in(scope))

    async def _misdirected(self, scope: Any) -> Any:
        self._admission.answered("http_host", 0.0, HostUnknown.code)
        await self._admission.slow_down(f"{bucket_of(Request(scope))} asks for another host")
        return problem(HostUnknown(f"this node is not called {one_line(_host_in(scope))[:100]!r}"))


DIGITS_MAX = 20


def integer_in_query(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Give a whole number from the query of a request, or raise `InvalidArgument`."""
    text = request.query_params.get(name, str(default))
    if len(text) > DIGITS_MAX or not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise InvalidArgument(f"{name} must be a number from {least} to {most}")
    return int(text)


def buffer_in_query(request: Request) -> Buffer:
    """Give the buffer that the query of a request names; the forward buffer without one."""
    try:
        return Buffer(request.query_params.get("buffer", Buffer.FORWARD))
    except ValueError:
        raise InvalidArgument("buffer must be store or forward") from None


def attachment(name: str) -> str:
    """Give the ``Content-Disposition`` of content that somebody else made: it is kept as a file, never shown."""
    own = re.split(r"[/\\]", one_line(name))[-1].strip(". ")[:200] or "content"
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", own)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(own, safe='')}"


def _host_in(scope: Any) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")


def _plain(name: str) -> str:
    return name.strip().rstrip(".").lower()


def _fits(host: str, name: str) -> bool:
    """Compare with a name; a star at its beginning stands for one label."""
    if name.startswith("*."):
        label, _, rest = host.partition(".")
        return bool(label) and rest == name[2:]
    return host == name


BACKLOG = 1_024
TICK_SECONDS = 1.0
LEAVING_SECONDS = 0.01
"""How often a server that ends looks whether the last answers are given."""


class BoundedProtocol(H11Protocol):
    """A connection that tells who calls, and ends when the head of a request takes too long."""

    limits: ClassVar[WireLimits] = WireLimits()
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read the caller's certificate and start to wait for his first request."""
        super().connection_made(transport)
        names = names_in_ssl_object(transport.get_extra_info("ssl_object"))
        ends = self.loop.time() + self.limits.connection_age_seconds
        self.app_state = {**self.app_state, "peer": names, "abort": transport.abort, "ends": ends}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and see whether the head of a request is complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_watching()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """End the connection when a request is answered before all of it was read: the rest may have no end."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, with the header that every other answer has."""
        kind = (b"content-type", b"text/plain; charset=utf-8")
        headers = [kind, tuple(part.encode() for part in NOSNIFF), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),  # type: ignore[arg-type]
            h11.Data(data=msg.encode("ascii", "replace")),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.handshake_timeout_seconds, self._give_up)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        # Between two requests the keep-alive timer of uvicorn decides; this one is for a head that never ends.
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self.transport.abort()


class _Server(uvicorn.Server):
    """A uvicorn server inside somebody else's process: it leaves signals alone and bounds TLS handshakes."""

    def __init__(
        self, config: uvicorn.Config, context: ssl.SSLContext | None, limits: WireLimits, handshakes: Handshakes
    ) -> None:
        super().__init__(config)
        self._context, self._limits, self._handshakes = context, limits, handshakes
        self._pace = HandshakePace(limits.handshake_timeout_seconds)
        self.open, self._leaving = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """Take no more requests, and end when those under way have."""
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()

        def create() -> Any:
            make: Any = self.config.http_protocol_class
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop)

        def tls() -> ObservedTls:
            # Its own TLS in place of the loop's, which tells nobody of a handshake that it refused.
            context, timeout_seconds = self._context, self._limits.handshake_timeout_seconds
            assert context is not None
            return ObservedTls(loop, create(), context, self._handshakes, timeout_seconds)

        def paced() -> PacedConnection:
            return PacedConnection(self._pace, tls, self._handshakes)

        made = create if self._context is None else paced
        self.servers = [await loop.create_server(made, sock=each, backlog=BACKLOG) for each in sockets or ()]
        self.started = True
        self.open.set()

    async def main_loop(self) -> None:
        # A tick renews the date in answers. Uvicorn's own loop wakes ten times a second to see whether it is to end.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pace.close()
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        open_ones, answering = self.server_state.connections, self.server_state.tasks
        for connection in list(open_ones):
            connection.shutdown()
        await asyncio.sleep(0)  # what was idle is gone now
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while open_ones or answering:  # noqa: ASYNC110 - sets of uvicorn, which tell nobody
                    await asyncio.sleep(LEAVING_SECONDS)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in answering:
                task.cancel()


class HttpListener:
    """An HTTP server that is started once and stopped once."""

    def __init__(
        self,
        app: Any,
        limits: WireLimits,
        *,
        context: ssl.SSLContext | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        config = uvicorn.Config(
            _patient(app, limits.idle_timeout_seconds),
            http=type("Protocol", (BoundedProtocol,), {"limits": limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[NOSNIFF],
            proxy_headers=False,
            timeout_keep_alive=max(1, int(min(limits.idle_timeout_seconds, 75))),
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, context, limits, handshakes or Handshakes())
        self._limits = limits
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listen and give the port, which is a free one for port 0."""
        listening = Listening(listening_on(host, port, backlog=BACKLOG), connections_allowed(self._limits))
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listening]))
        await self._server.open.wait()
        return self.port

    async def stop(self) -> None:
        """Take no more requests, let those under way finish for a while, and close."""
        self._server.leave()
        if self._task is not None:
            await self._task


def _patient(app: Any, idle_timeout_seconds: float) -> Any:
    """Bound how long a caller may take to accept a piece of an answer, and tell him when his connection is to end."""

    async def bounded(scope: Any, receive: Any, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            if message["type"] == "http.response.start" and asyncio.get_running_loop().time() >= scope["state"]["ends"]:
                # It ends with this answer: a caller who has more to ask shakes hands again.
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            async with asyncio.timeout(idle_timeout_seconds):
                await send(message)

        await app(scope, receive, send_in_time)

    return bounded
