"""gRPC's server, made such that no caller can end it: every method is taken by its name, and what has none is refused.

gRPC for Python takes the path of a call as text, in the loop that takes all calls. Bytes that are none end that loop,
and with it the listener, whoever sent them. A method that is *registered* is recognised below Python, by its bytes; so
all of ours are, and what is left is unknown, whatever it is called. Registered methods also wait in queues of their own
until they are taken: a flood of one method costs no caller of another his place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

Unknown = Callable[[Any], Awaitable[None]]
"""Answers a call of a method that there is not; it is given the context of the call."""


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes the calls of registered methods as gRPC does, and gives all others to somebody else."""

    unknown: Unknown

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Give what waits for the next call of a method; of those without one, it never ends."""
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._take_unknown())

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
            await self.unknown(context)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        except (cygrpc.AbortError, cygrpc.ExecuteBatchError):
            pass  # he was told, or is gone


class Server(_server.Server):  # type: ignore[misc]
    """A server of registered methods alone."""

    def __init__(self, options: Sequence[tuple[str, int]], calls_at_once: int, unknown: Unknown) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), (), tuple(options), calls_at_once)
        self._server.unknown = unknown
