"""gRPC's server, made such that no caller can end it: every method is taken by its name, and what has none is refused.

gRPC for Python takes the path of a call as text, in the loop that takes all calls. Bytes that are none end that loop,
and with it the listener, whoever sent them. A method that is *registered* is recognised below Python, by its bytes; so
all of ours are, and what is left is unknown, whatever it is called. Registered methods also wait in queues of their own
until they are taken: a flood of one method costs no caller of another his place.

gRPC would wait for the next call of all methods together, and pay for each method at every call. Here a task of its own
takes the calls of each, which costs a call what it did without registered methods.
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
