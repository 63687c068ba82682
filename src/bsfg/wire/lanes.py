"""Frames of many links in one call, each link in a lane of its own: the pipeline's side, and the node's.

Small frames of many lanes share a message, and so do their acks: with a hundred links that have a few facts a second
each, most of the work would be that of messages. Order is kept inside a lane, and only there.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from bsfg.errors import BsfgError, NotReady
from bsfg.ports import Frame, Gap
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.connection import Connection
from bsfg.wire.frames import IncomingFrames, Release, varint
from bsfg.wire.service import PutOutcome
from bsfg.wire.streams import FrameStream, batched, put_frame, put_outcome

LANES_WINDOW_FRAMES = 256
"""How many frames of all lanes together may be without an ack; each link has its own bound below it."""

MORE_FRAMES, MORE_BYTES = 32, 32 << 10
"""How many frames share a message, and how large they are together at the most; a larger one goes alone."""


class LaneFrames(FrameStream[PutOutcome]):
    """Frames of many lanes in one call after another.

    Of a lane with a frame that was not taken whole nothing is sent again: the next call would not know of it.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, "PutLanes", put_outcome, window_frames=LANES_WINDOW_FRAMES, in_order=False)
        self._lanes: dict[int, tuple[int, int]] = {}
        self._unsent: dict[int, tuple[asyncio.Future[PutOutcome], Any]] = {}
        self._sending: asyncio.Task[None] | None = None
        self._dropped: set[int] = set()
        self._over: set[int] = set()
        """The lanes of which nothing more is sent: a call that knows nothing of what was refused would take it."""

    async def send_in(self, lane: int, last: int, number: int, message: Any) -> asyncio.Future[PutOutcome]:
        """Send a frame of a lane, in one message with those of other lanes that come while the line is busy."""
        await self._window.acquire()
        future: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._settled)
        if self._failure is not None:
            future.cancel()
            raise self._failure
        if lane in self._over:
            future.cancel()
            raise NotReady("a frame before this one was not taken")
        self._lanes[number] = lane, last
        self._unsent[number] = future, message
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return future

    async def _send_all(self) -> None:
        """Send what waits, as many frames in a message as fit."""
        try:
            async with self._writing:
                while self._unsent:
                    self._call_anew_if_ended()
                    with self._unless_ended():
                        await self._call.write(with_more(self._next_frames()))
        except BsfgError as error:
            self._fail(error)  # no call could be begun: nobody else would tell those who wait

    def _next_frames(self) -> list[Any]:
        taken, size_bytes = list[Any](), 0
        while self._unsent and len(taken) < MORE_FRAMES:
            number, found = next(iter(self._unsent.items()))
            message = found[1]
            size_bytes += len(message) if isinstance(message, bytes) else message.ByteSize()
            if taken and size_bytes > MORE_BYTES:
                break
            self._waiting[number] = self._unsent.pop(number)
            taken.append(message)
        return taken

    def drop(self, lane: int) -> None:
        """Wait for no frame of a lane any more, and send none of them again."""
        self._over.add(lane)
        for number, (its, _) in list(self._lanes.items()):
            if its != lane:
                continue
            found = self._waiting.pop(number, None)
            if found is not None:
                self._dropped.add(number)
            elif (found := self._unsent.pop(number, None)) is not None:
                del self._lanes[number]
            if found is not None and not found[0].done():
                found[0].set_exception(NotReady("a frame before this one was not taken"))

    def _take(self, message: Any) -> None:
        for ack in (message, *message.more):
            self._take_one(ack)

    def _take_one(self, ack: pb.PutAck) -> None:
        lane, last = self._lanes.pop(ack.sequence, (0, -1))
        if ack.sequence in self._dropped:
            self._dropped.discard(ack.sequence)
            return
        super()._take(ack)
        if ack.HasField("error") or ack.through != last:
            self.drop(lane)

    def _fail(self, error: BsfgError) -> None:
        self._waiting |= self._unsent
        self._unsent.clear()
        super()._fail(error)

    async def _reopen(self) -> bool:
        # What was dropped is on its way to nobody.
        for number in self._dropped:
            self._lanes.pop(number, None)
        self._dropped.clear()
        return await super()._reopen()


class PutLanes:
    """The call that many links of a task share: each puts its frames in lanes of its own.

    A node waits for the next message of every call that is open, and for so many at once and no more. A hundred links
    with a call each would take turns at being waited for.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: LaneFrames | None = None
        self._numbers = itertools.count(1)

    def lane(self, link: str, stream: str, log_id: str, *, lease: str | None) -> PutLane:
        """Begin a lane."""
        fixed = {"link": link, "stream": stream, "log_id": log_id, "lease": lease, "lane": next(self._numbers)}
        return PutLane(self._open(), fixed)

    def _open(self) -> LaneFrames:
        if self._frames is None or not self._frames.is_open:
            # One that has grown old ends by itself when its node has waited for long; it may have answers to give.
            self._frames = LaneFrames(self._connection)
        return self._frames

    def hang_up(self) -> None:
        """End the call at once."""
        if self._frames is not None:
            self._frames.abandon()
            self._frames = None


class PutLane:
    """The frames of one link's stream that follow each other; used as a `PutStream` is."""

    def __init__(self, frames: LaneFrames, fixed: dict[str, Any]) -> None:
        self._frames, self._fixed = frames, fixed
        self._under_way: set[asyncio.Future[PutOutcome]] = set()
        self._is_ended = False

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._frames.is_open and not self._is_ended

    async def send(
        self, frame: Frame, gaps: Sequence[Gap] = (), *, served_at_unix_ms: int | None = None
    ) -> asyncio.Future[PutOutcome]:
        """Send a frame as it was fetched, and give the future of its outcome; see `PutStream.send`."""
        number = self._frames.number()
        message: Any = put_frame(frame, gaps, sequence=number, served_at_unix_ms=served_at_unix_ms, **self._fixed)
        if frame.entries is not None:
            message = await batched(message, "entries", frame.entries)
        outcome = await self._frames.send_in(self._fixed["lane"], frame.last, number, message)
        self._under_way.add(outcome)
        outcome.add_done_callback(self._under_way.discard)
        return outcome

    async def close(self) -> None:
        """Wait for the answers to what was sent, and end the lane."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=self._frames.request_timeout_seconds)
        self.abandon()

    def abandon(self) -> None:
        """Send no more; what is on its way is put or refused without anybody waiting for it."""
        self._is_ended = True
        self._frames.drop(self._fixed["lane"])


def with_more(messages: Sequence[Any]) -> bytes:
    """Serialise frames of lanes as one message: the first, which has all others as its ``more``."""
    first, *more = (each if isinstance(each, bytes) else each.SerializeToString() for each in messages)
    tag = varint(pb.PutFrame.DESCRIPTOR.fields_by_name["more"].number << 3 | 2)
    return b"".join((first, *(part for each in more for part in (tag, varint(len(each)), each))))


# The node's side.

ACKS_AT_ONCE, UNREAD_ACKS = 256, 1024
"""How many acks share a message, and how many may wait to be written before no further frame is read."""


class Laned:
    """Answers the frames of one stream lane by lane: in each one after the other, each answer when it is ready.

    A message may bring several frames, of many lanes. Whoever sends such messages is given answers in such, too.
    """

    def __init__(self, work: Callable[[pb.PutFrame], Awaitable[pb.PutAck]], *, window_frames: int) -> None:
        self._work = work
        self._window = asyncio.Semaphore(window_frames)
        self._answers: asyncio.Queue[pb.PutAck | None] = asyncio.Queue()
        self._last: dict[int, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._takes_more = self._is_over = False
        self._unread, self._fits = 0, asyncio.Event()

    async def answers(self, requests: IncomingFrames[pb.PutFrame]) -> AsyncIterator[pb.PutAck]:
        """Give the answers as they come, until the requests end or fall silent, or one of them fails."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                is_last = False
                while self._takes_more and len(answer.more) < ACKS_AT_ONCE and not self._answers.empty():
                    beside = self._answers.get_nowait()
                    if beside is None:
                        is_last = True
                        break
                    answer.more.append(beside)
                self._unread -= 1 + len(answer.more)
                self._fits.set()
                yield answer
                if is_last:
                    break
            if self._failure is not None:
                raise self._failure
        finally:
            # What was begun is finished also when nobody waits for the answer any more; what was not is not begun.
            self._is_over = True
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: IncomingFrames[pb.PutFrame]) -> None:
        try:
            while True:
                while self._unread >= UNREAD_ACKS:
                    # Who takes no acks is read no further.
                    self._fits.clear()
                    await self._fits.wait()
                await self._window.acquire()
                try:
                    request = await requests.__anext__()
                except StopAsyncIteration:
                    break
                await self._begin(request, requests.take_over())
            await asyncio.gather(*self._last.values())
        except Exception as error:
            self._failure = error
        self._answers.put_nowait(None)

    async def _begin(self, request: pb.PutFrame, release: Release) -> None:
        """Begin with the frames of a message; what it holds is released with the last of them."""
        frames = [request, *request.more]
        self._takes_more |= len(frames) > 1
        left = len(frames)

        def done(count: int = 1) -> None:
            nonlocal left
            left -= count
            if not left:
                release()

        begun = 0
        try:
            for frame in frames:
                if begun:
                    await self._window.acquire()
                lane = frame.lane
                task = asyncio.create_task(self._answered(self._last.get(lane), frame, done))
                self._last[lane] = task
                task.add_done_callback(functools.partial(self._done, lane))
                begun += 1
        finally:
            if begun < len(frames):
                done(len(frames) - begun)

    async def _answered(self, before: asyncio.Task[None] | None, frame: pb.PutFrame, release: Release) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            if not self._is_over:
                self._answers.put_nowait(await self._work(frame))
                self._unread += 1
        except Exception as error:
            # Whoever waits for it would wait for ever.
            self._failure, self._is_over = error, True
            self._answers.put_nowait(None)
        finally:
            release()
            self._window.release()

    def _done(self, lane: int, task: asyncio.Task[None]) -> None:
        if self._last.get(lane) is task:
            del self._last[lane]
