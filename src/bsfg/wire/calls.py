"""What every call of the gRPC services has in common: who calls, whether there is room, time limits and errors.

The order is fixed. Who calls is known from the connection, whether he may call this at all from the table of
operations; then he gets a place; then his bytes are read, counted and measured; then they become a message. Whoever may
not call costs the node a status and nothing else, and waits for it without holding anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, aclosing, closing
from dataclasses import replace
from typing import Any

import structlog
from grpc._cython import cygrpc

from bsfg.errors import BsfgError, Overloaded, TimedOut
from bsfg.wire.idle import IdleTimer, IdleTimers
from bsfg.wire.incoming import Incoming, Reader
from bsfg.wire.limits import STRANGERS, Admission, WireLimits
from bsfg.wire.methods import Method
from bsfg.wire.operations import Asks, Terms, terms_of
from bsfg.wire.peer import names_in_auth_context
from bsfg.wire.service import BoundaryService, Caller
from bsfg.wire.status import ERROR_METADATA, encoded, grpc_status
from bsfg.wire.untaken import Untaken

log = structlog.get_logger("bsfg.wire")

JUDGED_SECONDS = 5.0
"""How long an answer in many pieces goes on before its caller is judged again."""

Context = Any
Unary = Callable[[Any, Caller], Awaitable[Any]]
Stream = Callable[[Any, Caller], AsyncIterator[Any]]


def caller_of(context: Context) -> Caller:
    """Give who is at the other end of a call."""
    return Caller(names_in_auth_context(context.auth_context()), context.peer())


class Calls:
    """Wraps the behaviours of a service into gRPC handlers."""

    def __init__(
        self,
        limits: WireLimits,
        admission: Admission,
        door: BoundaryService,
        called: Callable[[str], None] | None = None,
        port: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limits, self.admission, self._door = limits, admission, door
        self.untaken = Untaken(limits.request_timeout_seconds + limits.idle_timeout_seconds, port)
        self._called = called or (lambda address: None)
        self.listening = IdleTimers(limits.idle_timeout_seconds, limits.connection_age_seconds)

    def handlers(
        self, service: str, methods: Mapping[str, Method], behaviours: Mapping[str, Unary | Stream]
    ) -> tuple[str, dict[str, Any]]:
        """Give one service's name and its handlers; every method has its behaviour and its terms."""
        return service, {
            name: method.handler(self._handler(method, terms_of(service, name), behaviours[name]))
            for name, method in methods.items()
        }

    async def unknown(self, context: Context) -> None:
        """Let somebody wait who calls methods that there are not again and again."""
        await self.admission.slow_down(f"{caller_of(context)} calls unknown methods")

    def _handler(self, method: Method, terms: Terms, behaviour: Any) -> Callable[[Any, Context], Awaitable[Any]]:
        """Give a coroutine that answers one call.

        It writes streams by itself instead of being a generator: gRPC leaves a generator hanging, with all it holds,
        when the caller goes while an answer is being sent.
        """
        reader = Reader(method.request_type, terms, self.limits, self.admission.turns)

        async def call(requests: Any, context: Context) -> Any:
            started, caller = time.perf_counter(), None
            try:
                caller = caller_of(context)
                self._called(caller.address)
                owner, answer, release = await self._serve(method, terms, behaviour, reader, caller, context)
                if terms.asks == Asks.CERTIFICATE and self._door.known(caller) is None:
                    await self.admission.slow_down(f"{caller} calls {terms.name}")
                self.untaken.add(context, owner, caller.address, release)
                self.admission.answered(method.name, time.perf_counter() - started)
                return answer
            except cygrpc.ExecuteBatchError:
                return None  # the caller is gone
            except Exception as error:
                told = told_to_caller(method.name, error)
            # His place and his bytes are given back by now, and nothing of his request is left to wait with him.
            if caller is not None:
                await self.admission.hold_back(str(caller), told)
            if method.response_streams:
                # The word comes behind what he was given before, which he may not have read.
                self.untaken.add(context, None, context.peer())
            self.admission.answered(method.name, time.perf_counter() - started, told.code)
            await context.abort(grpc_status(told), told.message[:200], ((ERROR_METADATA, encoded(told)),))

        return call

    def _timer(self, method: Method) -> AbstractContextManager[IdleTimer]:
        return closing(self.listening.new()) if method.request_streams else self.listening.lent()

    async def _serve(
        self, method: Method, terms: Terms, behaviour: Any, reader: Reader, caller: Caller, context: Context
    ) -> tuple[str, Any, Callable[[], None]]:
        """Answer one call of somebody who may make it; give his name, his answer, and what ends with it."""
        owner, place = self._place(terms, caller)
        answered = self._written if method.response_streams else self._returned
        with place, self._timer(method) as idle, ExitStack() as held:
            if "fetch" in terms.actions:
                room = self.admission.room(owner)
                held.callback(room.close)
                caller = replace(caller, room=room)
            incoming = Incoming(context, reader, self.admission, owner, idle)
            try:
                request = incoming if method.request_streams else await incoming.only()
                answer = await answered(behaviour(request, caller), context, lambda: self._place(terms, caller))
            finally:
                incoming.close()
            return owner, answer, held.pop_all().close

    def _place(self, terms: Terms, caller: Caller) -> tuple[str, AbstractContextManager[None]]:
        """Judge a caller by the terms of what he calls, and give under whose name he is served, and where."""
        if terms.asks != Asks.CERTIFICATE:
            owner: str | None = self._door.admit(caller, terms.actions)
        else:
            owner = self._door.known(caller)
        if owner is None:
            self._check_untaken("strangers", STRANGERS)
            return "strangers", self.admission.enter_stranger(str(caller))
        self._check_untaken(owner, self.limits.concurrent_per_identity)
        return owner, self.admission.enter(owner)

    def _check_untaken(self, owner: str, most: int) -> None:
        """Refuse who has called so often without taking his answers that twice as many as he may have are left."""
        untaken = self.untaken.of(owner)
        if untaken >= 2 * most:
            self.admission.refused += 1
            raise Overloaded(f"{owner} has {untaken} answers that were not taken", limit="concurrent_per_identity")

    async def _returned(self, answer: Awaitable[Any], context: Context, again: Callable[[], object]) -> Any:
        return await answer

    async def _written(self, answers: Any, context: Context, again: Callable[[], object]) -> None:
        """Write answers as they come; who reads for long is judged ``again`` from time to time."""
        # A caller that reads nothing more must not hold his place for ever.
        idle = IdleTimer(self.limits.idle_timeout_seconds)
        judged = time.monotonic()
        try:
            async with aclosing(answers):
                async for answer in answers:
                    if time.monotonic() - judged >= JUDGED_SECONDS:
                        again()
                        judged = time.monotonic()
                    await idle.wait(context.write(answer))
        finally:
            idle.close()

    async def one_by_one(
        self, name: str, behaviour: Unary, requests: AsyncIterator[Any], caller: Caller
    ) -> AsyncIterator[Any]:
        """Answer the requests of a stream as if each were a call of the named method, until they end or fall silent."""
        async for request in requests:
            started = time.perf_counter()
            answer = await behaviour(request, caller)
            self.admission.answered(name, time.perf_counter() - started)
            yield answer
            if caller.room is not None:
                caller.room.close()

    def timeout(self, extra_seconds: float = 0.0) -> asyncio.Timeout:
        """Bound the time of what is inside; running out of it is answered as `timed_out`."""
        return asyncio.timeout(self.limits.request_timeout_seconds + extra_seconds)


def told_to_caller(name: str, error: Exception) -> BsfgError:
    """Give what a caller is told: the error itself, or ``internal`` for what nobody expected.

    It comes without the frames it was raised in, which hold what they were called with: whole messages, for as long as
    the answer is held back.
    """
    if isinstance(error, BsfgError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    if isinstance(error, TimeoutError):
        return TimedOut("the node did not finish in time")
    log.error("request_failed", method=name, exc_info=error)
    return BsfgError("the node failed to answer; its log has the details")
