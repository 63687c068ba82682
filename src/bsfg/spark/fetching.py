"""Asks a node for ranges of a buffer: where it starts and ends, and the frames between two offsets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bsfg.errors import BsfgError, ForeignLog, FrameInvalid
from bsfg.offload import by_size
from bsfg.ports import Buffer, Confirmation, Frame, GapRecord
from bsfg.spark.calls import Access, Patience, calls

if TYPE_CHECKING:
    from bsfg.journey.link import Fetched

F = TypeVar("F", "Frame", "RawFrame")


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame as it travels: entries in Arrow's IPC form, or a gap record."""

    first: int
    last: int
    data: bytes = b""
    gap: GapRecord | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One buffer of one stream at one node, as often as it is asked; picklable, connects in the process that asks."""

    access: Access
    stream: str
    buffer: str
    retry_seconds: float
    carry_only: tuple[str, ...] = ()

    def head(self, *, unix_ms: int | None = None) -> Fetched:
        """Describe the buffer: its log, its end, and as ``start`` the first fact that is kept from a time on."""
        from bsfg.wire import boundary_pb2 as pb

        if unix_ms is None:
            request = pb.FetchFramesRequest(offsets=self._offsets(0, 0))
        else:
            times = pb.TimeSelection(
                stream=self.stream, buffer=self._number, start_unix_ms=unix_ms, end_unix_ms=unix_ms
            )
            request = pb.FetchFramesRequest(times=times)
        return self._head(request)

    def consumer_head(self, consumer: str, *, gaps_after: str = "") -> Fetched:
        """Describe the buffer of a durable consumer; ``start`` is what it has not confirmed yet.

        ``gaps`` are the gap records that came from other zones after those of the token ``gaps_after``.
        """
        from bsfg.wire import boundary_pb2 as pb

        selection = pb.ConsumerSelection(consumer=consumer, gaps_after=gaps_after)
        return self._head(pb.FetchFramesRequest(consumer=selection, max_facts=1))

    def confirm(self, consumer: str, through: int, log_id: str) -> None:
        """Confirm for a durable consumer everything through an offset."""
        from bsfg.wire.client import BoundaryClient

        async def work() -> None:
            client = BoundaryClient(calls().connection(self.access))
            await client.confirm(consumer, Confirmation(through=through, log_id=log_id))

        Patience(self.retry_seconds).insist(lambda: calls().run(work()))

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give the frames of a range (``end`` exclusive), without hole or overlap, whatever happens to the connection.

        Raises `ForeignLog` when the buffer is another one, or an older copy, than the one that is meant.
        """
        return self._range(first, end, log_id, _decoded)

    def raw_frames(self, first: int, end: int, log_id: str) -> Iterator[RawFrame]:
        """Give the frames of a range likewise, as they travel."""
        return self._range(first, end, log_id, _raw)

    def _range(self, first: int, end: int, log_id: str, read: Callable[[Any], Awaitable[F]]) -> Iterator[F]:
        from bsfg.wire import boundary_pb2 as pb
        from bsfg.wire.frames import hashers_here

        patience, at = Patience(self.retry_seconds), first
        while at < end:
            request = pb.FetchFramesRequest(
                offsets=self._offsets(at, end), carry_only=self.carry_only, ages=True, hashers=hashers_here()
            )
            try:
                for item in calls().iterate(_messages(self.access, request, read)):
                    if not isinstance(item, (Frame, RawFrame)):
                        check_log(item, log_id, end)
                        continue
                    if item.first != at:
                        raise FrameInvalid(f"a frame has offsets {item.first}..{item.last}, {at} is expected next")
                    at = item.last + 1
                    yield item
                    patience.succeeded()
                if at < end:
                    raise FrameInvalid(f"the node gave nothing from offset {at} on, {end} is its end")
            except BsfgError as error:
                patience.bear(error)

    @property
    def _number(self) -> Any:
        from bsfg.wire.convert import buffer_number

        return buffer_number(Buffer(self.buffer))

    def _offsets(self, first: int, end: int) -> Any:
        from bsfg.wire import boundary_pb2 as pb

        return pb.OffsetSelection(stream=self.stream, buffer=self._number, first=first, end=end)

    def _head(self, request: Any) -> Fetched:
        async def work() -> Fetched:
            messages = _messages(self.access, request, _raw)
            try:
                async for item in messages:
                    if not isinstance(item, RawFrame):
                        return item
            finally:
                await messages.aclose()  # type: ignore[attr-defined]
            raise FrameInvalid("an answer begins with its head")

        return Patience(self.retry_seconds).insist(lambda: calls().run(work()))


def check_log(head: Fetched, log_id: str, end: int) -> None:
    """Raise `ForeignLog` unless a buffer is the log that is meant, and at least as long as it was."""
    hint = "The node was replaced or restored from a copy. Start with a new checkpoint when that is meant."
    if head.log_id != log_id:
        raise ForeignLog(f"the log of the node is {head.log_id}, it was {log_id}", hint=hint)
    if head.end < end:
        raise ForeignLog(f"the log of the node ends at {head.end}, it had reached {end}", hint=hint)


async def _messages(access: Access, request: Any, read: Callable[[Any], Awaitable[F]]) -> AsyncIterator[Fetched | F]:
    """Give the answer to a request: its head, then its frames."""
    from bsfg.wire.frames import read_head

    connection = calls().connection(access)
    call, head = connection.method("FetchFrames")(request), True
    try:
        with connection.telling():
            async for message in call:
                if head:
                    yield read_head(message)
                    head = False
                else:
                    yield await read(message)
    finally:
        call.cancel()


async def _decoded(message: Any) -> Frame:
    from bsfg.wire.client import RECEIVED
    from bsfg.wire.frames import read_frame

    return await by_size(len(message.entries), read_frame, message, RECEIVED)


async def _raw(message: Any) -> RawFrame:
    from bsfg.wire.convert import gap_of

    content = message.WhichOneof("content")
    if content == "gap":
        return RawFrame(message.first, message.last, gap=gap_of(message.gap))
    if content != "entries":
        raise FrameInvalid("a frame holds neither entries nor a gap record")
    return RawFrame(message.first, message.last, message.entries)
