"""The requests of one gRPC call: bytes that are read when there is room, counted, measured, and only then a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from bsfg.errors import InvalidArgument, MessageTooLarge, Overloaded
from bsfg.offload import THREAD_BYTES, Turns, by_size
from bsfg.wire.idle import IdleTimer
from bsfg.wire.large import COUNTED_BYTES, count_fields, read_at_once, read_counted
from bsfg.wire.limits import Admission, WireLimits
from bsfg.wire.operations import Terms

Release = Callable[[], None]


class Reader:
    """Makes messages of one operation out of bytes, within its terms."""

    def __init__(self, message_type: Any, terms: Terms, limits: WireLimits, turns: Turns) -> None:
        self._type, self._terms, self._turns = message_type, terms, turns
        self._limit_bytes = terms.limit_bytes(limits.message_bytes)
        self._most = tuple(terms.most.items())

    async def read(self, data: bytes) -> Any:
        """Read a message; raises `MessageTooLarge`, `FrameInvalid` or `InvalidArgument` when it is not as agreed."""
        size = len(data)
        if size > self._limit_bytes:
            name = self._terms.name
            raise MessageTooLarge(
                f"a request of {name} has {size} bytes, the limit is {self._limit_bytes}", limit=self._limit_bytes
            )
        message = read_at_once(self._type, data) if size >= THREAD_BYTES else None
        if message is None:
            if size > COUNTED_BYTES:
                await self._turns.of(count_fields(self._type, data, self._terms.fields, self._terms.most))
            message = await by_size(size, read_counted, self._type, data)
        for field, most in self._most:
            check_most(field, getattr(message, field), most)
        return message


def check_most(field: str, value: Any, most: int) -> None:
    """Raise `InvalidArgument` when a list or text is longer than it may be."""
    if len(value) > most:
        raise InvalidArgument(f"{field} has a length of {len(value)}, the limit is {most}", field=field, limit=most)


class Incoming:
    """The requests of a call, one after the other; an async iterator that ends with them, or with a long silence.

    The bytes of a request count until the next one is asked for, or `take_over` leaves them to somebody else.
    """

    def __init__(self, context: Any, reader: Reader, admission: Admission, owner: str, idle: IdleTimer) -> None:
        self._context, self._reader, self._admission, self._owner = context, reader, admission, owner
        self._idle = idle
        self._held = 0
        self._pause_seconds = 0.0
        self.fell_silent = False

    def __aiter__(self) -> Incoming:
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
