"""What every call of the gRPC services has in common: who calls, room, waits, and answers nobody takes."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import grpc
import structlog
from grpc._cython import cygrpc

from bsfg.errors import BsfgError, InvalidArgument, MessageTooLarge, Overloaded, TimedOut
from bsfg.offload import THREAD_BYTES, LoopTurns, by_size
from bsfg.wire.connections import host_port, plain_address
from bsfg.wire.limits import STRANGERS, Admission, WireLimits
from bsfg.wire.messages import COUNTED_BYTES, Method, count_fields, read_at_once, read_counted
from bsfg.wire.operations import Asks, Terms, terms_of
from bsfg.wire.peer import names_in_auth_context
from bsfg.wire.service import Caller
from bsfg.wire.status import ERROR_METADATA, encoded, grpc_status

Result = TypeVar("Result")

SPARE_MAX = 256
"""How many timers are kept for the calls to come."""


class IdleTimer:
    """Ends a wait that lasts too long with `TimeoutError`, as `asyncio.timeout` does; one wait at a time.

    A stream waits for every frame, and hardly ever for long. So the timer is not set and taken back each time: it
    stays, and looks when it rings whether the wait of that moment is an old one. ``age_seconds`` is how long there may
    be waits at all, from the first one on: between two requests a stream can end without harm to anybody.
    """

    def __init__(self, seconds: float, age_seconds: float = math.inf) -> None:
        self._seconds, self._age_seconds = seconds, age_seconds
        self._ends = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._since = 0.0
        self._rang = self.is_shut = False

    async def wait(self, awaitable: Awaitable[Result]) -> Result:
        """Wait for something."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        now = loop.time()
        if self._ends == math.inf:
            self._ends = now + self._age_seconds
        if self.is_shut or now >= self._ends:
            # Nobody will wait for it, of which Python would complain.
            getattr(awaitable, "close", lambda: None)()
            raise TimeoutError
        self._waiting, self._since, self._rang = task, now, False
        cancelling = task.cancelling()
        if self._timer is None:
            self._timer = loop.call_at(min(now + self._seconds, self._ends), self._look)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._rang and task.uncancel() <= cancelling:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None

    def shut(self) -> None:
        """End the wait of this moment, and every later one, as if it had lasted too long."""
        self.is_shut = True
        if self._waiting is not None:
            self._ring(self._waiting)

    def close(self) -> None:
        """Take the timer back; whoever waits again sets it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._waiting is None:
            return
        loop, due = asyncio.get_running_loop(), min(self._since + self._seconds, self._ends)
        if loop.time() < due:
            self._timer = loop.call_at(due, self._look)
        else:
            self._ring(self._waiting)

    def _ring(self, waiting: asyncio.Task[object]) -> None:
        self._rang = True
        waiting.cancel()


class IdleTimers:
    """The timers of all streams that wait for what their callers say next; when a node stops, it listens no more."""

    def __init__(self, seconds: float, age_seconds: float = math.inf) -> None:
        self._seconds, self._age_seconds = seconds, age_seconds
        self._timers: WeakSet[IdleTimer] = WeakSet()
        self._spare: list[IdleTimer] = []
        self._is_shut = False

    def new(self) -> IdleTimer:
        """Give a timer for one stream."""
        timer = IdleTimer(self._seconds, self._age_seconds)
        self._timers.add(timer)
        if self._is_shut:
            timer.shut()
        return timer

    @contextmanager
    def lent(self) -> Iterator[IdleTimer]:
        """Lend a timer for one call; the next one has it again, so that most calls set none."""
        timer = self._spare.pop() if self._spare else IdleTimer(self._seconds)
        try:
            yield timer
        finally:
            if timer.is_shut or len(self._spare) >= SPARE_MAX:
                timer.close()
            else:
                self._spare.append(timer)

    def shut(self) -> None:
        """End the waits of all of them."""
        self._is_shut = True
        for timer in list(self._timers):
            timer.shut()


DESCRIPTORS = "/dev/fd"
LOOKS = 4
"""How often it is looked for old ones in the time that a caller has."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A call that was answered: when, for whom, to where, and what is given back when he has it."""

    since: float
    owner: str | None
    address: str
    release: Callable[[], None]


class Untaken:
    """The calls of one listener whose answers are on their way."""

    def __init__(self, seconds: float, port: Callable[[], int]) -> None:
        self._seconds, self._port = seconds, port
        self._calls: dict[Any, _Answered] = {}
        self._by_owner: Counter[str | None] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def of(self, owner: str) -> int:
        """Give how many answers somebody has not taken."""
        return self._by_owner[owner]

    def add(self, context: Any, owner: str | None, address: str, release: Callable[[], None] = lambda: None) -> None:
        """Take note of a call that was answered; ``release`` is called when it is over, whichever way."""
        if context in self._calls:
            return
        loop = asyncio.get_running_loop()
        self._calls[context] = _Answered(loop.time(), owner, address, release)
        self._by_owner[owner] += 1
        context.add_done_callback(self._over)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds / LOOKS, self._look)

    def _over(self, context: Any) -> None:
        found = self._calls.pop(context)
        self._by_owner[found.owner] -= 1
        if not self._by_owner[found.owner]:
            del self._by_owner[found.owner]
        found.release()

    def _look(self) -> None:
        self._timer = None
        if not self._calls:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds / LOOKS, self._look)
        old = {each.address for each in self._calls.values() if loop.time() - each.since >= self._seconds}
        if old and (self._ending is None or self._ending.done()):
            self._ending = loop.create_task(asyncio.to_thread(end_connections, self._port(), old))


def end_connections(port: int, peers: set[str]) -> None:
    """End the connections of this process to a port that come from some addresses, as gRPC writes those."""
    wanted = {plain_address(each) for each in peers}
    for connection in _connections():
        with connection:
            try:
                if connection.getsockname()[1] == port and host_port(connection.getpeername()) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                continue  # it listens, is gone by itself, or is of another kind


def _connections() -> Iterator[socket.socket]:
    """Give every socket of this process, each by a descriptor of its own."""
    for name in os.listdir(DESCRIPTORS):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()


Release = Callable[[], None]


class MessageReader:
    """Makes messages of one operation out of bytes, within its terms."""

    def __init__(self, message_type: Any, terms: Terms, limits: WireLimits, turns: LoopTurns) -> None:
        self._type, self._terms, self._turns = message_type, terms, turns
        self._limit_bytes = terms.limit_bytes(limits.message_bytes)
        self._most = tuple(terms.most.items())
        self._takes_more = bool(terms.most.get("more"))

    async def read(self, data: bytes) -> Any:
        """Read a message; raises `MessageTooLarge`, `FrameInvalid` or `InvalidArgument` when it is not as agreed."""
        size = len(data)
        if size > self._limit_bytes:
            name = self._terms.name
            raise MessageTooLarge(
                f"a request of {name} has {size} bytes, the limit is {self._limit_bytes}", limit=self._limit_bytes
            )
        message: Any = read_at_once(self._type, data) if size >= THREAD_BYTES else None
        if message is None:
            if size > COUNTED_BYTES:
                await self._turns.of(count_fields(self._type, data, self._terms.fields, self._terms.most))
            message = await by_size(size, read_counted, self._type, data)
        for field, most in self._most:
            check_most(field, getattr(message, field), most)
        for inner in message.more if self._takes_more else ():
            for field, most in self._most:
                check_most(field, getattr(inner, field), most if field != "more" else 0)
        return message


def check_most(field: str, value: Any, most: int) -> None:
    """Raise `InvalidArgument` when a list or text is longer than it may be."""
    if len(value) > most:
        raise InvalidArgument(f"{field} has a length of {len(value)}, the limit is {most}", field=field, limit=most)


class IncomingRequests:
    """The requests of a call, one after the other; an async iterator that ends with them, or with a long silence.

    The bytes of a request count until the next one is asked for, or `take_over` leaves them to somebody else.
    """

    def __init__(self, context: Any, reader: MessageReader, admission: Admission, owner: str, idle: IdleTimer) -> None:
        self._context, self._reader, self._admission, self._owner = context, reader, admission, owner
        self._idle = idle
        self._held = 0
        self._pause_seconds = 0.0
        self.fell_silent = False

    def __aiter__(self) -> IncomingRequests:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._next()
        except TimeoutError:
            self.fell_silent = True
            raise StopAsyncIteration from None

    async def only(self) -> Any:
        """Read the one request of a call."""
        try:
            return await self._next()
        except StopAsyncIteration:
            raise InvalidArgument("the call ended without a request") from None
        except TimeoutError:
            if self._idle.is_shut:
                raise Overloaded("too many messages are on their way to the node", limit="awaited_messages") from None
            raise

    async def _next(self) -> Any:
        self.close()
        if self._pause_seconds:
            pause, self._pause_seconds = self._pause_seconds, 0.0
            await asyncio.sleep(pause)
        try:
            data = await self._idle.wait(self._received())
        finally:
            self._admission.awaited.done(self._owner, self)
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return await self._reader.read(data)

    async def _received(self) -> Any:
        awaited, give_up = self._admission.awaited, self._idle.shut
        if not awaited.is_begun(self._owner, self, give_up):
            await awaited.begin(self._owner, self, give_up)
        data = await self._context.read()
        if data is not grpc.aio.EOF:
            self._held = await self._admission.budget.acquire(len(data), self._owner)
        return data

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more is read because others need the room, or the node stops."""
        return self._idle.is_shut

    def pause(self, seconds: float) -> None:
        """Wait before the next request is read, because of what was wrong with this one."""
        self._pause_seconds = seconds

    def take_over(self) -> Release:
        """Leave the bytes of the last request to the caller of this, who is to release them once."""
        held, self._held, owner, budget = self._held, 0, self._owner, self._admission.budget
        return lambda: budget.release(held, owner)

    def close(self) -> None:
        """Release what is held."""
        if self._held:
            held, self._held = self._held, 0
            self._admission.budget.release(held, self._owner)


log = structlog.get_logger("bsfg.wire")

_READING = frozenset({"fetch", "read"})
JUDGED_SECONDS = 5.0
"""How long an answer in many pieces goes on before its caller is judged again."""

Context = Any
Unary = Callable[[Any, Caller], Awaitable[Any]]
Stream = Callable[[Any, Caller], AsyncIterator[Any]]


def caller_of(context: Context) -> Caller:
    """Give who is at the other end of a call."""
    return Caller(names_in_auth_context(context.auth_context()), context.peer())


class CallerDoor(Protocol):
    """Who says whether somebody may call at all."""

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Give the name of a caller whose row is in force and allows one of the actions, whatever it is about.

        Without actions only the row is asked for. Raises `IdentityUnknown`, `IdentityRevoked` or `PermissionRefused`
        before anything of a request was looked at; the refusal is recorded.
        """

    def known(self, caller: Caller) -> str | None:
        """Give the name of a caller whose row is in force, None for anybody else; nothing is recorded."""


class GrpcHandlers:
    """Wraps the behaviours of a service into gRPC handlers."""

    def __init__(
        self,
        limits: WireLimits,
        admission: Admission,
        door: CallerDoor,
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
        reader = MessageReader(method.request_type, terms, self.limits, self.admission.turns)

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
        self, method: Method, terms: Terms, behaviour: Any, reader: MessageReader, caller: Caller, context: Context
    ) -> tuple[str, Any, Callable[[], None]]:
        """Answer one call of somebody who may make it; give his name, his answer, and what ends with it."""
        owner, place = self._place(terms, caller)
        answered = self._written if method.response_streams else self._returned
        with place, self._timer(method) as idle, ExitStack() as held:
            if not _READING.isdisjoint(terms.actions):
                room = self.admission.room(owner)
                held.callback(room.close)
                caller = replace(caller, room=room)
            incoming = IncomingRequests(context, reader, self.admission, owner, idle)
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
        """Write answers as they come; who reads for long is judged ``again`` from time to time, also between them.

        An answer that is None is none: it only gives the occasion.
        """
        # A caller that reads nothing more must not hold his place for ever.
        idle = IdleTimer(self.limits.idle_timeout_seconds)
        judged = time.monotonic()
        try:
            async with aclosing(answers):
                async for answer in answers:
                    if time.monotonic() - judged >= JUDGED_SECONDS:
                        again()
                        judged = time.monotonic()
                    if answer is not None:
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
