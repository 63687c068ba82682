"""A caller's stream of frames: many on their way, an answer to each in order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from bsfg.errors import BsfgError, FrameInvalid, PeerUnreachable
from bsfg.wire.connection import Connection, unreadable

Ack = TypeVar("Ack")

STREAM_SECONDS = 300.0
"""How long a caller sends over one call: nodes end their connections after a while, and would cut one that lasts."""


class FrameStream(Generic[Ack]):
    """One call with frames one way and acks the other.

    When it breaks, every frame without an ack fails with the same error: whether it was stored is not known, and it
    is to be sent again with the same ids, on a new stream. A node ends a stream that was silent for long; then
    ``is_open`` is false and nothing is lost.
    """

    def __init__(
        self, connection: Connection, method: str, read: Callable[[Any], Ack], *, window_frames: int = 16
    ) -> None:
        self._connection, self._read_ack = connection, read
        self._window = asyncio.Semaphore(window_frames)
        self._writing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[Ack]]] = deque()
        self._numbers = itertools.count()
        self._failure: BsfgError | None = None
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
                self._waiting.append((number, future))
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader learns the reason; a write only learns that the call has ended.
            await asyncio.wait([self._reader])
            future.cancel()
            raise self._failure or PeerUnreachable(f"{self._connection.address} ended the call") from error
        except BaseException:
            future.cancel()
            raise
        return future

    async def close(self) -> None:
        """Send no more, wait for the acks of what was sent, and end the call."""
        if self._failure is None:
            try:
                async with self._writing:
                    await self._call.done_writing()
                await asyncio.wait([self._reader], timeout=self._connection.request_timeout_seconds)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
        self.abandon()
        await asyncio.wait([self._reader])

    def abandon(self) -> None:
        """End the call at once; frames without an ack fail."""
        self._call.cancel()

    async def __aenter__(self) -> FrameStream[Ack]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _settled(self, future: asyncio.Future[Ack]) -> None:
        self._window.release()
        if not future.cancelled():
            future.exception()  # a caller that does not ask is not reminded

    async def _read(self) -> None:
        error: BsfgError = PeerUnreachable(f"{self._connection.address} ended the stream")
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message is None:
                    raise unreadable(self._connection)
                self._take(message)
            # The node's own words tell a caller whether trying again can help.
            error = await self._connection.ended_with(self._call) or error
        except grpc.aio.AioRpcError as failure:
            error = self._connection.translated(failure)
        except BsfgError as failure:
            error = failure
            self._call.cancel()
        except asyncio.CancelledError:
            error = PeerUnreachable(f"the connection to {self._connection.address} was closed here")
        finally:
            self._fail(error)

    def _take(self, message: Any) -> None:
        if not self._waiting or self._waiting[0][0] != message.sequence:
            raise FrameInvalid(f"{self._connection.address} acknowledged a frame that was not sent")
        _, future = self._waiting.popleft()
        if future.done():
            return
        try:
            future.set_result(self._read_ack(message))
        except BsfgError as error:
            future.set_exception(error)

    def _fail(self, error: BsfgError) -> None:
        self._failure = error
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
