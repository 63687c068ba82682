"""The gRPC listener: both services, health and reflection behind one port, with a limit on everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bsfg.errors import PortUnavailable
from bsfg.wire.admin import AdminServicer
from bsfg.wire.calls import Calls
from bsfg.wire.connections import connections_allowed, listening_on
from bsfg.wire.grpcserver import Server
from bsfg.wire.limits import SLEEPERS_MAX, STRANGERS, Admission, WireLimits
from bsfg.wire.server import BoundaryServicer
from bsfg.wire.service import AdminService, BoundaryService
from bsfg.wire.tools import Health, Reflection

METADATA_BYTES_MAX = 8 << 10
WINDOW_BYTES = 256 << 10
PENDING_MAX = 4_096


def server_options(limits: WireLimits) -> list[tuple[str, int]]:
    """Give the channel options of a server.

    Compression is off, because a few compressed bytes can become very many; ports are not shared, because two nodes on
    one port would answer in turns.
    """
    idle_ms = int(limits.idle_timeout_seconds * 1000)
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", limits.concurrent_per_identity),
        ("grpc.max_allowed_incoming_connections", connections_allowed(limits)),
        # Calls of one method that nobody has taken yet; beyond this, gRPC drops any of them, an honest one as well.
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
        # A call whose messages are not read takes so much and no more, however fast its line is.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_timeout_seconds * 1000)),
        ("grpc.max_connection_idle_ms", 5 * idle_ms),
        # Calls that are under way go on; callers make new ones over a new connection, with a new handshake.
        ("grpc.max_connection_age_ms", max(1, int(limits.connection_age_seconds * 1000))),
        ("grpc.keepalive_time_ms", idle_ms),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 5),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.so_reuseport", 0),
    ]


class GrpcListener:
    """A gRPC server that is started once and stopped once."""

    def __init__(
        self,
        boundary: BoundaryService,
        admin: AdminService,
        limits: WireLimits,
        *,
        admission: Admission | None = None,
        credentials: Any = None,
        called: Callable[[str], None] | None = None,
    ) -> None:
        self.admission = admission or Admission(limits)
        self._credentials = credentials
        # The server's own limit is only the last resort: it refuses without a word, the admission with a hint. Those
        # whose answers are held back, and those who are refused, must not use it up.
        calls_at_once = 2 * limits.concurrent_requests + SLEEPERS_MAX + STRANGERS
        self._calls = calls = Calls(limits, self.admission, boundary, called, lambda: self.port)
        self._server = Server(server_options(limits), calls_at_once, calls.unknown)
        self._health = Health()
        for service, handlers in (
            BoundaryServicer(boundary, calls).handlers(),
            AdminServicer(admin, calls).handlers(),
            self._health.handlers(calls),
            Reflection().handlers(calls),
        ):
            self._server.add_registered_method_handlers(service, handlers)
        self.port = 0

    async def start(self, address: str) -> int:
        """Listen on ``host:port`` and give the port, which is a free one for port 0."""
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            # gRPC does not say why; the system does.
            host, _, port = address.rpartition(":")
            listening_on(host.strip("[]"), int(port)).close()
            raise PortUnavailable(f"cannot listen on {address}") from error
        await self._server.start()
        await self.serving(True)
        return self.port

    async def serving(self, ready: bool) -> None:
        """Tell health checks whether the node is ready."""
        self._health.set(ready)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Refuse new calls, let those under way finish for a while, and close."""
        self._health.end()
        stopping = asyncio.ensure_future(self._server.stop(grace_seconds))
        # First no new calls, then no more requests within the open ones: their callers would only call again.
        await asyncio.sleep(0)
        self._calls.listening.shut()
        await asyncio.shield(stopping)
