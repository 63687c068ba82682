"""A caller's stream of frames: many on their way, an answer to each in order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc

from bsfg.errors import BsfgError, FrameInvalid, PeerUnreachable
from bsfg.wire.connection import Connection, unreadable

Ack = TypeVar("Ack")

STREAM_SECONDS = 300.0
"""How long a caller sends over one call: nodes end their connections after a while, and would cut one that lasts."""

CALLS_IN_VAIN = 8
"""How many calls in a row a node may end in peace without having taken a frame of them."""


class FrameStream(Generic[Ack]):
    """Frames one way and acks the other, in one call after another.

    A node that has waited for long, or needs the room for somebody else, ends a call in peace: it has answered all that
    it read. Frames that were on their way then are sent again in another call, in their order; without any, the next
    frame opens one. When a call breaks, every frame without an ack fails with the same error: whether it was stored is
    not known, and it is to be sent again with the same ids, on a new stream.
    """

    def __init__(
        self, connection: Connection, method: str, read: Callable[[Any], Ack], *, window_frames: int = 16
    ) -> None:
        self._connection, self._method, self._read_ack = connection, method, read
        self._window = asyncio.Semaphore(window_frames)
        self._writing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[Ack], Any]] = deque()
        self._numbers = itertools.count()
        self._failure: BsfgError | None = None
        self._in_vain = 0
        self._is_closing = False
        self._resending: asyncio.Task[None] | None = None
        self._call = connection.stream(method)
        self._reader = asyncio.create_task(self._read())
        self._ends = time.monotonic() + STREAM_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether frames should be sent; one that has grown old still takes them, but a new one is to be preferred."""
        return self._failure is None and time.monotonic() < self._ends

    def number(self) -> int:
        """Give a number for a frame, to be found again in its ack."""
        return next(self._numbers)

    async def send(self, number: int, frame: Any) -> asyncio.Future[Ack]:
        """Send a frame and give the future of its ack; wait while as many as the window allows are on their way."""
        await self._window.acquire()
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._settled)
        try:
            async with self._writing:
                if self._failure is not None:
                    raise self._failure
                if self._reader.done():
                    self._call = self._connection.stream(self._method)
                    self._reader = asyncio.create_task(self._read())
                self._waiting.append((number, future, frame))
                # When the call has ended, the reader learns the reason: the frame goes into another one, or fails.
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(frame)
        except BaseException:
            future.cancel()
            raise
        return future

    async def close(self) -> None:
        """Send no more, wait for the acks of what was sent, and end the call."""
        if self._failure is None:
            async with self._writing:
                self._is_closing = True
                await self._done_writing()
            await asyncio.wait([self._reader], timeout=self._connection.request_timeout_seconds)
        self.abandon()
        await asyncio.wait([self._reader])

    def abandon(self) -> None:
        """End the call at once; frames without an ack fail."""
        self._in_vain = CALLS_IN_VAIN
        self._call.cancel()
        if self._reader.done():
            self._fail(self._failure or self._closed())

    async def __aenter__(self) -> FrameStream[Ack]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _settled(self, future: asyncio.Future[Ack]) -> None:
        self._window.release()
        if not future.cancelled():
            future.exception()  # a caller that does not ask is not reminded

    async def _read(self) -> None:
        error: BsfgError | None = None
        try:
            while error is None:
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    if message is None:
                        raise unreadable(self._connection)
                    self._take(message)
                # The node's own words tell a caller whether trying again can help.
                error = await self._connection.ended_with(self._call)
                if error is None and not await self._reopen():
                    break
        except grpc.aio.AioRpcError as failure:
            error = self._connection.translated(failure)
        except BsfgError as failure:
            error = failure
            self._call.cancel()
        except asyncio.CancelledError:
            error = self._closed()
        finally:
            if error is not None:
                if self._resending is not None:
                    self._resending.cancel()
                self._fail(error)

    async def _reopen(self) -> bool:
        """Open another call for the frames that the last one did not take; False when there are none."""
        await self._writing.acquire()
        if not self._waiting:
            self._writing.release()
            return False
        self._in_vain += 1
        if self._in_vain > CALLS_IN_VAIN:
            self._writing.release()
            raise PeerUnreachable(f"{self._connection.address} ended the stream")
        self._call = self._connection.stream(self._method)
        # Answers are read meanwhile: a node that cannot give them takes no more frames.
        self._resending = resending = asyncio.create_task(self._resend([frame for _, _, frame in self._waiting]))
        resending.add_done_callback(lambda _: self._writing.release())
        return True

    async def _resend(self, frames: list[Any]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await self._call.write(frame)
        if self._is_closing:
            await self._done_writing()

    async def _done_writing(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    def _take(self, message: Any) -> None:
        if not self._waiting or self._waiting[0][0] != message.sequence:
            raise FrameInvalid(f"{self._connection.address} acknowledged a frame that was not sent")
        _, future, _ = self._waiting.popleft()
        self._in_vain = 0
        if future.done():
            return
        try:
            future.set_result(self._read_ack(message))
        except BsfgError as error:
            future.set_exception(error)

    def _closed(self) -> BsfgError:
        return PeerUnreachable(f"the connection to {self._connection.address} was closed here")

    def _fail(self, error: BsfgError) -> None:
        self._failure = error
        while self._waiting:
            _, future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
