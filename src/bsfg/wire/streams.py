"""A caller's streams: frames with an answer to each in order, and questions over a call that stays open."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import grpc
import numpy as np

from bsfg.batch import FactBatch
from bsfg.clock import SystemClock
from bsfg.errors import BsfgError, FrameInvalid, PeerUnreachable, RemoteError, TimedOut
from bsfg.fact import SHA256_NAME
from bsfg.offload import by_size
from bsfg.ports import Frame, Gap, GapRecord, GapSet, Receipt
from bsfg.retry import Backoff
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.connection import CALLS_IN_VAIN, Connection, unreadable
from bsfg.wire.convert import gap_message, gap_set_message, refusal_of
from bsfg.wire.frames import read_ack, with_batch
from bsfg.wire.service import PutOutcome
from bsfg.wire.status import error_of, was_not_sent

Ack = TypeVar("Ack")

STREAM_SECONDS = 300.0
"""How long a caller sends over one call: nodes end their connections after a while, and would cut one that lasts."""

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.01, 1.0
"""How long a caller waits between two calls in a row that took nothing, at first and at the most."""


class FrameStream(Generic[Ack]):
    """Frames one way and acks the other, in one call after another.

    A node that has waited for long, or needs the room for somebody else, ends a call in peace: it has answered all that
    it read. Frames that were on their way then are sent again in another call, in their order; without any, the next
    frame opens one. When a call breaks, every frame without an ack fails with the same error: whether it was stored is
    not known, and it is to be sent again with the same ids, on a new stream. Acks come in the order of the frames,
    unless they are not ``in_order``.
    """

    def __init__(
        self,
        connection: Connection,
        method: str,
        read: Callable[[Any], Ack],
        *,
        window_frames: int = 16,
        in_order: bool = True,
    ) -> None:
        self._connection, self._method, self._read_ack = connection, method, read
        self._in_order = in_order
        self._window = asyncio.Semaphore(window_frames)
        self._writing = asyncio.Lock()
        self._waiting: dict[int, tuple[asyncio.Future[Ack], Any]] = {}
        self._numbers = itertools.count()
        self._failure: BsfgError | None = None
        self._in_vain = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self._is_closing = False
        self._resending: asyncio.Task[None] | None = None
        self._call = connection.stream(method)
        self._reader = asyncio.create_task(self._read())
        self._ends = time.monotonic() + STREAM_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether frames should be sent; one that has grown old still takes them, but a new one is to be preferred."""
        return self._failure is None and time.monotonic() < self._ends

    @property
    def request_timeout_seconds(self) -> float:
        """How long the node may take to answer."""
        return self._connection.request_timeout_seconds

    def number(self) -> int:
        """Give a number for a frame, to be found again in its ack."""
        return next(self._numbers)

    async def _send(self, number: int, frame: Any) -> asyncio.Future[Ack]:
        """Send a frame and give the future of its ack; wait while as many as the window allows are on their way."""
        await self._window.acquire()
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._settled)
        try:
            async with self._writing:
                if self._failure is not None:
                    raise self._failure
                self._call_anew_if_ended()
                self._waiting[number] = future, frame
                # When the call has ended, the reader learns the reason: the frame goes into another one, or fails.
                with self._unless_ended():
                    await self._call.write(frame)
        except BaseException:
            future.cancel()
            raise
        return future

    def _call_anew_if_ended(self) -> None:
        """Begin another call when a node has ended the last one while nothing was on its way."""
        if self._reader.done():
            self._call = self._connection.stream(self._method)
            self._reader = asyncio.create_task(self._read())

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
        self._in_vain.failures = CALLS_IN_VAIN + 1
        self._call.cancel()
        if self._reader.done():
            self._fail(self._failure or self._closed())

    async def __aenter__(self) -> Self:
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
                error = await self._read_call()
                if error is None and not await self._reopen():
                    break
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

    async def _read_call(self) -> BsfgError | None:
        """Take the answers of a call; give what ended it, in words that tell whether trying again can help."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message is None:
                    raise unreadable(self._connection)
                self._take(message)
        except grpc.aio.AioRpcError as failure:
            return None if was_not_sent(failure) else self._connection.translated(failure)
        return await self._connection.ended_with(self._call)

    async def _reopen(self) -> bool:
        """Open another call for the frames that the last one did not take; False when there are none."""
        await self._writing.acquire()
        try:
            if not self._waiting:
                self._writing.release()
                return False
            pause_seconds = self._in_vain.next_seconds()
            if 1 < self._in_vain.failures <= CALLS_IN_VAIN:
                # Where many lose their calls to each other at once, those who come back later find room.
                await asyncio.sleep(pause_seconds)
            if self._in_vain.failures > CALLS_IN_VAIN:
                raise PeerUnreachable(f"{self._connection.address} ended the stream")
            self._call = self._connection.stream(self._method)
        except BaseException:
            self._writing.release()
            raise
        # Answers are read meanwhile: a node that cannot give them takes no more frames.
        self._resending = resending = asyncio.create_task(self._resend([frame for _, frame in self._waiting.values()]))
        resending.add_done_callback(lambda _: self._writing.release())
        return True

    async def _resend(self, frames: list[Any]) -> None:
        with self._unless_ended():
            for frame in frames:
                await self._call.write(frame)
        if self._is_closing:
            await self._done_writing()

    async def _done_writing(self) -> None:
        with self._unless_ended():
            await self._call.done_writing()

    @contextmanager
    def _unless_ended(self) -> Iterator[None]:
        """Leave out the rest of a block when its call has ended, also by a connection that was closed here."""
        with suppress(BsfgError, asyncio.InvalidStateError), self._connection.telling(), self._connection.waiting():
            yield

    def _take(self, message: Any) -> None:
        number = message.sequence
        if number not in self._waiting or (self._in_order and number != next(iter(self._waiting))):
            raise FrameInvalid(f"{self._connection.address} acknowledged a frame that was not sent")
        future, _ = self._waiting.pop(number)
        self._in_vain.reset()
        if future.done():
            return
        try:
            future.set_result(self._read_ack(message))
        except BsfgError as error:
            self._connection.doubt(error)
            future.set_exception(error)

    def _closed(self) -> BsfgError:
        return PeerUnreachable(f"the connection to {self._connection.address} was closed here")

    def _fail(self, error: BsfgError) -> None:
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of the facts of a frame; everything it names is durable.

    ``digests`` has a row of 32 bytes per fact, all made by the function ``hasher``. ``message_ids`` is None where the
    ids are those that were sent.
    """

    receipt: Receipt
    digests: np.ndarray
    message_ids: list[str] | None = None
    hasher: str = SHA256_NAME

    def __len__(self) -> int:
        return len(self.receipt.offsets)


class AppendStream(FrameStream[Appended]):
    """Appends batches to one stream of a node, many in flight."""

    def __init__(self, connection: Connection, stream: str, *, window_frames: int = 16) -> None:
        super().__init__(connection, "AppendFacts", _appended, window_frames=window_frames)
        self._stream = stream

    async def send(self, facts: FactBatch) -> asyncio.Future[Appended]:
        """Send a batch and give the future of its answer; an error of the batch alone is the future's."""
        number = self.number()
        message = pb.AppendFrame(stream=self._stream, sequence=number)
        return await self._send(number, await batched(message, "facts", facts))

    async def append(self, facts: FactBatch) -> Appended:
        """Send a batch and wait for its answer."""
        return await (await self.send(facts))


class PutStream(FrameStream[PutOutcome]):
    """Puts what a link brought into the forward buffer of the zone's own node; for pipelines.

    See `bsfg.wire.lanes` for many links that share one call.
    """

    def __init__(
        self,
        connection: Connection,
        link: str,
        stream: str,
        log_id: str,
        *,
        lease: str | None = None,
        window_frames: int = 4,
        sender_ahead_ms: int | None = None,
    ) -> None:
        super().__init__(connection, "PutFacts", put_outcome, window_frames=window_frames)
        self._fixed: dict[str, Any] = {"link": link, "stream": stream, "log_id": log_id, "lease": lease}
        self._sender_ahead_ms = sender_ahead_ms

    async def send(
        self, frame: Frame, gaps: Sequence[Gap] = (), *, served_at_unix_ms: int | None = None
    ) -> asyncio.Future[PutOutcome]:
        """Send a frame as it was fetched, and give the future of its outcome.

        ``served_at_unix_ms`` is what the sender's clock said when it gave the frame; when it is not given, it follows
        from how far that clock is ahead of the one of here, if that is known.
        """
        if served_at_unix_ms is None and self._sender_ahead_ms is not None:
            served_at_unix_ms = SystemClock().now_unix_ms() + self._sender_ahead_ms
        number = self.number()
        message = put_frame(frame, gaps, sequence=number, served_at_unix_ms=served_at_unix_ms, **self._fixed)
        if frame.entries is None:
            return await self._send(number, message)
        return await self._send(number, await batched(message, "entries", frame.entries))

    async def put(self, frame: Frame, gaps: Sequence[Gap] = ()) -> PutOutcome:
        """Send a frame and wait for its outcome."""
        return await (await self.send(frame, gaps))


def put_frame(frame: Frame, gaps: Sequence[Gap], **fixed: Any) -> pb.PutFrame:
    """Write all of a frame but its entries."""
    return pb.PutFrame(
        first=frame.first,
        last=frame.last,
        gap=gap_message(frame.gap) if frame.gap is not None else None,
        gaps=[gap_message(each) for each in gaps if isinstance(each, GapRecord)],
        gap_sets=[gap_set_message(each) for each in gaps if isinstance(each, GapSet)],
        skips=[gap_set_message(each) for each in frame.skips],
        **fixed,
    )


def _appended(ack: pb.AppendAck) -> Appended:
    if ack.HasField("error"):
        raise error_of(ack.error)
    receipt, digests = read_ack(ack)
    hasher = ack.hasher if ack.HasField("hasher") else SHA256_NAME
    return Appended(receipt, digests, list(ack.message_ids) or None, hasher)


def put_outcome(ack: pb.PutAck) -> PutOutcome:
    """Read what became of a frame that was put."""
    if ack.HasField("error") and not ack.held:
        raise error_of(ack.error)
    return PutOutcome(
        through=ack.through,
        inserted=ack.inserted,
        repeated=ack.repeated,
        refusals=[refusal_of(each) for each in ack.refusals],
        chain_head=ack.chain_head,
        refetch_at=ack.refetch_at if ack.HasField("refetch_at") else None,
        held_code=ack.error.code if ack.held else "",
        held_detail=ack.error.message if ack.held else "",
    )


async def batched(message: Any, field: str, batch: FactBatch) -> bytes:
    """Write a message with a batch, in a thread when that is large."""
    return await by_size(batch.weight_bytes, with_batch, message, field, batch)


class Conversations:
    """The conversations with a node about one matter, one for each topic: ``method`` over and over, in one call.

    Where the node does not know the method, and for a question that comes while another one is being answered, there
    is ``single``, which takes the same question in a call of its own.
    """

    def __init__(self, connection: Connection, method: str, single: str) -> None:
        self._connection, self._method, self._single = connection, method, single
        self._open: dict[str, Conversation] = {}
        self._is_known = True

    async def ask(self, topic: str, question: Any, *, timeout_seconds: float | None = None) -> Any:
        """Ask and give the answer; raises only `BsfgError`."""
        conversation = self._open.setdefault(topic, Conversation(self._connection, self._method))
        if self._is_known and not conversation.is_busy:
            try:
                return await conversation.ask(question, timeout_seconds=timeout_seconds)
            except RemoteError as error:
                if not is_unimplemented(error):
                    raise
                self._is_known = False
        return await self._connection.call(self._single, question, timeout_seconds=timeout_seconds)

    def end(self) -> None:
        """End all calls; a question that comes later opens its own."""
        for conversation in self._open.values():
            conversation.hang_up()


class Conversation:
    """One call with questions one way and answers the other, one at a time."""

    def __init__(self, connection: Connection, method: str) -> None:
        self._connection, self._method = connection, method
        self._call: Any = None
        self._made_by: Any = None
        self._ends = 0.0
        self.is_busy = False

    async def ask(self, question: Any, *, timeout_seconds: float | None = None) -> Any:
        """Ask and give the answer."""
        timeout = self._connection.request_timeout_seconds if timeout_seconds is None else timeout_seconds
        self.is_busy = True
        try:
            async with asyncio.timeout(timeout):
                return await self._asked(question)
        except TimeoutError:
            raise TimedOut(f"{self._connection.address} did not answer within {timeout:g} s") from None
        finally:
            self.is_busy = False

    async def _asked(self, question: Any) -> Any:
        if self._is_open():
            # The node may have ended the silence just now, or may be another one since it was last asked.
            with suppress(PeerUnreachable):
                answer = await self._exchange(question)
                if answer is not grpc.aio.EOF:
                    return answer
        for _ in range(CALLS_IN_VAIN):
            self._call, self._ends = self._connection.stream(self._method), time.monotonic() + STREAM_SECONDS
            answer = await self._exchange(question)
            if answer is not grpc.aio.EOF:
                return answer
        raise PeerUnreachable(f"{self._connection.address} ended the call")

    def _is_open(self) -> bool:
        """Tell whether the call can go on; not when the connection was made anew meanwhile."""
        made_by, self._made_by = self._made_by, self._connection.method(self._method)
        if self._call is None or self._call.done():
            return False
        if made_by is not self._made_by or time.monotonic() >= self._ends:
            self.hang_up()
            return False
        return True

    async def _exchange(self, question: Any) -> Any:
        """Send a question and wait for its answer; EOF when the node has ended the call in peace."""
        call, ended = self._call, None
        try:
            with self._connection.telling(), self._connection.waiting():
                try:
                    await call.write(question)
                    answer = await call.read()
                except asyncio.InvalidStateError:
                    answer = grpc.aio.EOF
                except grpc.aio.AioRpcError as failure:
                    if not was_not_sent(failure):
                        raise
                    answer = grpc.aio.EOF
                if answer is grpc.aio.EOF:
                    ended = await self._connection.ended_with(call)
        except BaseException:
            # Its answer may still come, and would be taken for that of the next question.
            self.hang_up()
            raise
        if answer is grpc.aio.EOF or answer is None:
            self.hang_up()
        if answer is None:
            raise unreadable(self._connection)
        if ended is not None:
            raise ended
        return answer

    def hang_up(self) -> None:
        """End the call."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def is_unimplemented(error: BsfgError) -> bool:
    """Tell whether a node does not know a method: it is of an older version."""
    return error.details.get("remote_code") == "unimplemented"
