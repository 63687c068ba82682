"""The HTTP listener: uvicorn with the caller's certificate in each request, and no patience for those who dawdle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bsfg.wire.connections import Listening, connections_allowed, listening_on
from bsfg.wire.fence import NOSNIFF
from bsfg.wire.handshakes import Handshakes, ObservedTls, Pace, Paced
from bsfg.wire.limits import WireLimits
from bsfg.wire.peer import names_in_ssl_object

BACKLOG = 1_024


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
        self._pace = Pace(limits.handshake_timeout_seconds)
        self.open = asyncio.Event()

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

        def paced() -> Paced:
            return Paced(self._pace, tls, self._handshakes)

        made = create if self._context is None else paced
        self.servers = [await loop.create_server(made, sock=each, backlog=BACKLOG) for each in sockets or ()]
        self.started = True
        self.open.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pace.close()
        await super().shutdown(sockets)


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
        self._server.should_exit = True
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
