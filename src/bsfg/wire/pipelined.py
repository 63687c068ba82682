"""A stream of frames with one answer each, in order, while later frames are already being read.

The ordered part of a frame's work (checking, sealing, queueing) is done frame by frame; the waiting part (for the
disk) overlaps. The window bounds how many frames and bytes may be between the two, so a sender that is too fast
feels it in its connection and not in the node's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Generic, Protocol, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")

Frame_co = TypeVar("Frame_co", covariant=True)
Release = Callable[[], None]

Begin = Callable[[Request], Awaitable[Awaitable[Answer]]]
"""Does the ordered part of a frame's work and gives what is to be waited for, which is under way; neither may raise.

A future is left alone when nobody waits any more. A coroutine is where only the waiting is left to be done: it runs
when its turn to be answered comes, without a task of its own, and is dropped when nobody waits.
"""


def given(answer: Answer) -> asyncio.Future[Answer]:
    """Give what need not be waited for; a finished future costs the loop nothing, a coroutine would be a task."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future


class Frames(Protocol[Frame_co]):
    """The frames of a stream; the bytes of the last one are held until somebody takes them over and releases them."""

    async def __anext__(self) -> Frame_co:
        """Give the next frame."""
        ...

    def take_over(self) -> Release:
        """Leave the bytes of the last frame to the caller of this."""
        ...


class Pipelined(Generic[Request, Answer]):
    """Answers the frames of one stream."""

    def __init__(self, begin: Begin[Request, Answer], *, window_frames: int) -> None:
        self._begin = begin
        self._queue: asyncio.Queue[tuple[Awaitable[Answer], Release] | None] = asyncio.Queue(window_frames)
        self._failure: Exception | None = None

    async def answers(self, requests: Frames[Request]) -> AsyncIterator[Answer]:
        """Give the answers in the order of the requests, until those end or fall silent."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while (item := await self._queue.get()) is not None:
                work, release = item
                try:
                    answer = await _waited(work)
                finally:
                    release()
                yield answer
            if self._failure is not None:
                raise self._failure
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._discard()

    async def _read(self, requests: Frames[Request]) -> None:
        try:
            await self._read_all(requests)
        except Exception as error:
            self._failure = error
        await self._queue.put(None)

    async def _read_all(self, requests: Frames[Request]) -> None:
        while True:
            try:
                request = await requests.__anext__()
            except StopAsyncIteration:
                return
            release = requests.take_over()
            try:
                work = await self._begin(request)
            except BaseException:
                release()
                raise
            await self._put(work, release)

    async def _put(self, work: Awaitable[Answer], release: Release) -> None:
        try:
            await self._queue.put((work, release))
        except asyncio.CancelledError:
            release()
            _forget(work)
            raise

    def _discard(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is not None:
                _forget(item[0])
                item[1]()


async def _waited(work: Awaitable[Answer]) -> Answer:
    if not isinstance(work, asyncio.Future):
        return await work
    # What was begun is finished also when nobody waits for the answer any more.
    return work.result() if work.done() else await asyncio.shield(work)


def _forget(work: Awaitable[Answer]) -> None:
    """Let work end on its own; what becomes of it nobody needs to know."""
    if isinstance(work, asyncio.Future):
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
    elif isinstance(work, Coroutine):
        work.close()
