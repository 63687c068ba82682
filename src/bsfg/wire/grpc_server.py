"""The gRPC listener: a server of registered methods that no caller can end, with health and reflection beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from bsfg.errors import PortUnavailable, UnknownService
from bsfg.wire import grpc_calls
from bsfg.wire.connections import connections_allowed, listening_on
from bsfg.wire.grpc_calls import CallerDoor, GrpcHandlers, IncomingRequests
from bsfg.wire.limits import SLEEPERS_MAX, STRANGERS, Admission, WireLimits
from bsfg.wire.messages import ADMIN_SERVICE, BOUNDARY_SERVICE, methods_of
from bsfg.wire.operations import HEALTH_SERVICE, REFLECTION_SERVICE
from bsfg.wire.service import Caller

Unknown = Callable[[Any], Awaitable[None]]
"""Answers a call of a method that there is not; it is given the context of the call."""


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes the calls of registered methods as gRPC does, and gives all others to somebody else."""

    def __init__(self, loop: Any, options: tuple[tuple[str, int], ...], calls_at_once: int, unknown: Unknown) -> None:
        super().__init__(loop, None, (), (), options, None)
        self._calls_at_once, self._unknown = calls_at_once, unknown
        self._handlers: dict[str, Any] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        """Take methods by their full names."""
        super().add_registered_method_handlers(method_handlers)
        self._handlers |= method_handlers

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Give what takes all calls of a method, or of those without one; it ends with the server."""
        taking = self._take_unknown() if method is None else self._take(method)
        return asyncio.get_running_loop().create_task(taking)

    async def _take(self, method: bytes) -> None:
        loop, name, under_way = asyncio.get_running_loop(), method.decode(), self._under_way
        resolver = cygrpc._MethodResolver([], self._handlers)
        while True:
            state = await self._request_registered_call(method)
            too_many = len(under_way) >= self._calls_at_once
            answering = cygrpc._handle_rpc(name, resolver, (), state, loop, too_many)
            # Whether the caller goes meanwhile is watched by gRPC.
            task = loop.create_task(cygrpc._schedule_rpc_coro(answering, state, loop, name))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    async def _take_unknown(self) -> None:
        answering: set[asyncio.Task[None]] = set()
        while True:
            state = await self._request_call()
            context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
            task = asyncio.create_task(self._refuse(context))
            answering.add(task)
            task.add_done_callback(answering.discard)

    async def _refuse(self, context: Any) -> None:
        try:
            await self._unknown(context)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        except (cygrpc.AbortError, cygrpc.ExecuteBatchError):
            pass  # he was told, or is gone


class Server(_server.Server):  # type: ignore[misc]
    """A server of registered methods alone."""

    def __init__(self, options: Sequence[tuple[str, int]], calls_at_once: int, unknown: Unknown) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, tuple(options), calls_at_once, unknown)


_HEALTH = methods_of(health_pb2.DESCRIPTOR, "Health")
_REFLECTION = methods_of(reflection_pb2.DESCRIPTOR, "ServerReflection")
_STATUS = health_pb2.HealthCheckResponse


class Health:
    """Tells whether the node serves, once or whenever that changes."""

    def __init__(self) -> None:
        self._statuses = dict.fromkeys(("", BOUNDARY_SERVICE, ADMIN_SERVICE), _STATUS.SERVING)
        self._changed = asyncio.Event()
        self._is_ending = False

    def handlers(self, calls: GrpcHandlers) -> tuple[str, dict[str, Any]]:
        """Give the name of the service and the handlers to be added to a gRPC server."""
        return calls.handlers(HEALTH_SERVICE, _HEALTH, {"Check": self._check, "List": self._list, "Watch": self._watch})

    def set(self, ready: bool) -> None:
        """Tell everybody whether the node is ready; after `end` it is not."""
        status = _STATUS.SERVING if ready and not self._is_ending else _STATUS.NOT_SERVING
        self._statuses = dict.fromkeys(self._statuses, status)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def end(self) -> None:
        """Tell everybody that the node stops."""
        self._is_ending = True
        self.set(False)

    async def _check(self, request: Any, caller: Caller) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService(f"there is no service {request.service[:80]!r} here")
        return _STATUS(status=status)

    async def _list(self, request: Any, caller: Caller) -> Any:
        return health_pb2.HealthListResponse(
            statuses={name: _STATUS(status=each) for name, each in self._statuses.items()}
        )

    async def _watch(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        told = None
        while not self._is_ending or told != _STATUS.NOT_SERVING:
            changed, status = self._changed, self._statuses.get(request.service, _STATUS.SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield _STATUS(status=status)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(grpc_calls.JUDGED_SECONDS):
                    await changed.wait()
            yield None  # so that who watches is judged again


class Reflection:
    """Gives tools the protocol files."""

    def __init__(self) -> None:
        self._servicer = ReflectionServicer((BOUNDARY_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE))

    def handlers(self, calls: GrpcHandlers) -> tuple[str, dict[str, Any]]:
        """Give the name of the service and the handlers to be added to a gRPC server."""
        return calls.handlers(REFLECTION_SERVICE, _REFLECTION, {"ServerReflectionInfo": self._info})

    def _info(self, requests: IncomingRequests, caller: Caller) -> AsyncIterator[Any]:
        answers: AsyncIterator[Any] = self._servicer.ServerReflectionInfo(requests, None)
        return answers


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


Services = Callable[[GrpcHandlers], Iterable[tuple[str, dict[str, Any]]]]
"""Gives the name of each service and its handlers, to be added to a server."""


class GrpcListener:
    """A gRPC server that is started once and stopped once."""

    def __init__(
        self,
        door: CallerDoor,
        services: Services,
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
        self._calls = calls = GrpcHandlers(limits, self.admission, door, called, lambda: self.port)
        self._server = Server(server_options(limits), calls_at_once, calls.unknown)
        self._health = Health()
        for service, handlers in (*services(calls), self._health.handlers(calls), Reflection().handlers(calls)):
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
