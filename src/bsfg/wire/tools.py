"""What tools expect beside the services, behind the same door: health checks and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from bsfg.errors import UnknownService
from bsfg.wire.calls import Calls
from bsfg.wire.incoming import Incoming
from bsfg.wire.methods import ADMIN_SERVICE, BOUNDARY_SERVICE, methods_of
from bsfg.wire.operations import HEALTH_SERVICE, REFLECTION_SERVICE
from bsfg.wire.service import Caller

_HEALTH = methods_of(health_pb2.DESCRIPTOR, "Health")
_REFLECTION = methods_of(reflection_pb2.DESCRIPTOR, "ServerReflection")
_STATUS = health_pb2.HealthCheckResponse


class Health:
    """Tells whether the node serves, once or whenever that changes."""

    def __init__(self) -> None:
        self._statuses = dict.fromkeys(("", BOUNDARY_SERVICE, ADMIN_SERVICE), _STATUS.SERVING)
        self._changed = asyncio.Event()
        self._is_ending = False

    def handlers(self, calls: Calls) -> tuple[str, dict[str, Any]]:
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
            await changed.wait()


class Reflection:
    """Gives tools the protocol files."""

    def __init__(self) -> None:
        self._servicer = ReflectionServicer((BOUNDARY_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE))

    def handlers(self, calls: Calls) -> tuple[str, dict[str, Any]]:
        """Give the name of the service and the handlers to be added to a gRPC server."""
        return calls.handlers(REFLECTION_SERVICE, _REFLECTION, {"ServerReflectionInfo": self._info})

    def _info(self, requests: Incoming, caller: Caller) -> AsyncIterator[Any]:
        answers: AsyncIterator[Any] = self._servicer.ServerReflectionInfo(requests, None)
        return answers
