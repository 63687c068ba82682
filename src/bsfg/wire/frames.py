"""Frames on the wire: batches as Arrow streams of bounded size with an answer each, and artifacts in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import AGELESS_ENTRY_SCHEMA, DIGEST_BYTES, ENTRY_SCHEMA, entry_schema, fixed_rows
from bsfg.digest import known_hashers
from bsfg.errors import FrameInvalid, HasherUnknown, TimedOut
from bsfg.fact import SHA256_NAME
from bsfg.journey.link import AppendOutcome, Fetched
from bsfg.model import DEFAULT_LIMITS, Limits
from bsfg.offload import by_size
from bsfg.ports import Frame, Receipt, Result
from bsfg.sealing import functions_of
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import as_message, as_value, gap_message, gap_of, gap_set_message, gap_sets_of
from bsfg.wire.service import ObjectInfo

_INT64 = np.dtype("<i8")

_KEPT = {"log_id": 80, "gaps_token": 80, "chain_head": 64}
"""How long what a receiver keeps of a head may be: of all its links together, and written anew as they move."""


def encode(batch: FactBatch) -> bytes:
    """Write a batch as the bytes of a message field."""
    return b"".join(batch.to_ipc_parts())


def with_batch(message: Any, field: str, batch: FactBatch, schema: pa.Schema = ENTRY_SCHEMA) -> bytes:
    """Serialise a message with a batch as one of its fields, copying the batch's bytes once instead of four times.

    The fields of a message may come in any order, so the last one can simply be written behind the others. Of entries
    the columns of a ``schema`` are written.
    """
    return b"".join(_parts_with_batch(message, field, batch, schema))


def schema_for(columns: Sequence[str] = (), *, ages: bool = True) -> pa.Schema:
    """Give the schema of entries for a caller: the columns it asks for, without ages as versions before 0.2 expect."""
    whole = ENTRY_SCHEMA if ages else AGELESS_ENTRY_SCHEMA
    return entry_schema(tuple(columns)) if columns else whole


def _parts_with_batch(message: Any, field: str, batch: FactBatch, schema: pa.Schema = ENTRY_SCHEMA) -> list[Any]:
    parts = batch.to_ipc_parts(schema) if isinstance(batch, EntryBatch) else batch.to_ipc_parts()
    tag = message.DESCRIPTOR.fields_by_name[field].number << 3 | 2
    return [message.SerializeToString(), varint(tag), varint(sum(map(len, parts))), *parts]


def hashers_here() -> list[str]:
    """Name the digest functions that this process can check beside SHA-256, as a request for frames says them."""
    return [hasher.name for hasher in known_hashers() if hasher.name != SHA256_NAME]


def check_hashers(frames: Sequence[Frame], request: pb.FetchRequest | pb.FetchFramesRequest) -> None:
    """Raise `HasherUnknown` for frames with digests that the caller of a request did not say it can check."""
    for frame in frames:
        for name in functions_of(frame.entries) if frame.entries is not None else ():
            if name != SHA256_NAME and name not in request.hashers:
                raise HasherUnknown(
                    f"the facts from offset {frame.first} on have digests by {name}, which the caller does not know",
                    hasher=name,
                    offset=frame.first,
                )


def frames_response(fetched: Fetched, schema: pa.Schema = ENTRY_SCHEMA) -> bytes:
    """Serialise a response that holds a whole answer as frames."""
    tag = varint(pb.FetchResponse.DESCRIPTOR.fields_by_name["frames"].number << 3 | 2)
    response: list[Any] = []
    for parts in (
        [head_message(fetched).SerializeToString()],
        *(_frame_parts(frame, schema) for frame in fetched.frames),
    ):
        response += [tag, varint(sum(map(len, parts))), *parts]
    return b"".join(response)


PACKED_BYTES_MIN = 1 << 10
"""Less than this is not worth the packing."""

_ZSTD = pa.Codec("zstd", compression_level=1)


def packed(response: bytes) -> bytes:
    """Compress a response, unless it is too small or does not become smaller."""
    if len(response) < PACKED_BYTES_MIN:
        return response
    small = _ZSTD.compress(response, asbytes=True)
    if len(small) >= len(response):
        return response
    message = pb.FetchResponse(packed=small, unpacked_bytes=len(response))
    return bytes(message.SerializeToString())


def unpacked(message: pb.FetchResponse, most_bytes: int) -> bytes:
    """Give the response that came compressed; raises `FrameInvalid` when it is none, or larger than allowed."""
    if message.unpacked_bytes > most_bytes:
        raise FrameInvalid("the answer brings far more than was asked for")
    try:
        return bytes(_ZSTD.decompress(message.packed, message.unpacked_bytes, asbytes=True))
    except OSError:
        raise FrameInvalid("the answer cannot be unpacked") from None


def _frame_parts(frame: Frame, schema: pa.Schema) -> list[Any]:
    message = _without_entries(frame)
    if frame.entries is None:
        return [message.SerializeToString()]
    return _parts_with_batch(message, "entries", frame.entries, schema)


def _without_entries(frame: Frame) -> pb.FetchFrame:
    gap = gap_message(frame.gap) if frame.gap is not None else None
    skips = [gap_set_message(each) for each in frame.skips]
    return pb.FetchFrame(first=frame.first, last=frame.last, gap=gap, skips=skips)


def varint(number: int) -> bytes:
    """Write a number as protobuf does, without a sign."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def pieces(entries: EntryBatch, max_bytes: int) -> Iterator[EntryBatch]:
    """Give entries in pieces of about a size at most, each of at least one."""
    size = entries.size_bytes
    if size <= max_bytes or len(entries) == 1:
        yield entries
        return
    step = max(1, len(entries) * max_bytes // size)
    if step >= len(entries):
        step = len(entries) // 2
    for start in range(0, len(entries), step):
        # One fact may be far larger than the others, so each piece is looked at again.
        yield from pieces(entries.slice(start, min(step, len(entries) - start)), max_bytes)


def head_message(fetched: Fetched) -> pb.FetchFrame:
    """Write what the frames of an answer belong to."""
    head = pb.FetchHead(
        log_id=fetched.log_id,
        start=fetched.start,
        end=fetched.end,
        chain_head=fetched.chain_head,
        gaps=[gap_message(gap) for gap in fetched.gaps],
        gaps_token=fetched.gaps_token,
        served_at_unix_ms=fetched.served_at_unix_ms,
        gap_sets=[gap_set_message(each) for each in fetched.gap_sets],
        stream=fetched.stream,
    )
    return pb.FetchFrame(first=fetched.start, last=fetched.start - 1, head=head)


async def frame_messages(
    frame: Frame, max_bytes: int, schema: pa.Schema = ENTRY_SCHEMA
) -> AsyncIterator[pb.FetchFrame | bytes]:
    """Write one frame as one message, or as several when it is large."""
    if frame.entries is None:
        yield _without_entries(frame)
        return
    first = frame.first
    for piece in pieces(frame.entries, max_bytes):
        # What is left out behind the last entry belongs to the last piece.
        end = int(piece.offsets[-1])
        last = frame.last if end == int(frame.entries.offsets[-1]) else end
        skips = [each.within(first, last) for each in frame.skips]
        message = _without_entries(Frame(first, last, skips=[each for each in skips if len(each.ranges)]))
        yield await by_size(piece.weight_bytes, with_batch, message, "entries", piece, schema)
        first = last + 1


def read_frame(
    message: pb.FetchFrame, limits: Limits = DEFAULT_LIMITS, schema: pa.Schema = AGELESS_ENTRY_SCHEMA
) -> Frame:
    """Read a frame that a server sent, perhaps with the columns of a schema; raises `FrameInvalid` unless it is one."""
    content = message.WhichOneof("content")
    if content == "gap":
        return Frame(message.first, message.last, gap=gap_of(message.gap))
    skips = tuple(gap_sets_of(message.skips))
    if content != "entries":
        if not skips or content is not None:
            raise FrameInvalid("a frame holds neither entries nor a gap record")
        return Frame(message.first, message.last, skips=skips)
    return Frame(message.first, message.last, EntryBatch.from_ipc(message.entries, limits, schema), skips=skips)


def read_head(message: pb.FetchFrame, frames: Sequence[Frame] = ()) -> Fetched:
    """Read the head that an answer begins with."""
    if message.WhichOneof("content") != "head":
        raise FrameInvalid("an answer begins with its head")
    head = message.head
    for name, most in _KEPT.items():
        if (length := len(getattr(head, name))) > most:
            raise FrameInvalid(f"the {name} of an answer has a length of {length}, the limit is {most}")
    gaps, sets = [gap_of(gap) for gap in head.gaps], tuple(gap_sets_of(head.gap_sets))
    served_at = head.served_at_unix_ms if head.HasField("served_at_unix_ms") else None
    return Fetched(
        head.log_id,
        head.start,
        head.end,
        head.chain_head,
        frames,
        gaps,
        head.gaps_token,
        served_at_unix_ms=served_at,
        gap_sets=sets,
        stream=head.stream if head.HasField("stream") else None,
    )


def ack_message(sequence: int, outcome: AppendOutcome, *, ids_derived: bool = False) -> pb.AppendAck:
    """Write the answer to a frame: columns where facts differ, one number where they do not."""
    receipt, facts = outcome.receipt, outcome.facts
    count = len(facts)
    ack = pb.AppendAck(
        sequence=sequence,
        count=count,
        chain_head=receipt.chain_head,
        appended_at_unix_ms=receipt.appended_at_unix_ms,
    )
    if count == 0:
        return ack
    offsets = receipt.offsets
    ack.first_offset = int(offsets[0])
    if receipt.results.any():
        ack.results = receipt.results.astype(np.uint8).tobytes()
        ack.offsets = offsets.astype(_INT64).tobytes()
    elif int(offsets[-1]) - ack.first_offset != count - 1:
        ack.offsets = offsets.astype(_INT64).tobytes()
    ack.digests = _packed_digests(facts)
    if (hasher := outcome.hasher) != SHA256_NAME:
        ack.hasher = hasher
    if ids_derived:
        ack.message_ids.extend(facts.values("message_id"))
    return ack


def _packed_digests(facts: FactBatch) -> bytes:
    if facts.has_rows:
        return b"".join(facts.digests())
    return fixed_rows(facts.column("digest")).tobytes()


def read_ack(ack: pb.AppendAck) -> tuple[Receipt, np.ndarray]:
    """Read the answer to a frame: its receipt, and the digests as rows of bytes."""
    count = ack.count
    if len(ack.digests) != count * DIGEST_BYTES or len(ack.results) not in (0, count):
        raise FrameInvalid("an ack does not hold a result and a digest per fact")
    if ack.offsets:
        if len(ack.offsets) != count * _INT64.itemsize:
            raise FrameInvalid("an ack does not hold an offset per fact")
        offsets = np.frombuffer(ack.offsets, dtype=_INT64)
    else:
        offsets = np.arange(ack.first_offset, ack.first_offset + count, dtype=np.int64)
    results = np.frombuffer(ack.results, dtype=np.uint8) if ack.results else np.zeros(count, dtype=np.uint8)
    if len(results) and int(results.max()) > Result.CONFLICT:
        raise FrameInvalid("an ack holds an unknown result")
    digests = np.frombuffer(ack.digests, dtype=np.uint8).reshape(count, DIGEST_BYTES)
    return Receipt(offsets, results, ack.chain_head, ack.appended_at_unix_ms), digests


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


class IncomingFrames(Protocol[Frame_co]):
    """The frames of a stream; the bytes of the last one are held until somebody takes them over and releases them."""

    async def __anext__(self) -> Frame_co:
        """Give the next frame."""

    def take_over(self) -> Release:
        """Leave the bytes of the last frame to the caller of this."""


class Pipelined(Generic[Request, Answer]):
    """Answers the frames of one stream."""

    def __init__(self, begin: Begin[Request, Answer], *, window_frames: int) -> None:
        self._begin = begin
        self._queue: asyncio.Queue[tuple[Awaitable[Answer], Release] | None] = asyncio.Queue(window_frames)
        self._failure: Exception | None = None

    async def answers(self, requests: IncomingFrames[Request]) -> AsyncIterator[Answer]:
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

    async def _read(self, requests: IncomingFrames[Request]) -> None:
        try:
            await self._read_all(requests)
        except Exception as error:
            self._failure = error
        await self._queue.put(None)

    async def _read_all(self, requests: IncomingFrames[Request]) -> None:
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


CHUNK_BYTES = 256 << 10


def description_message(info: ObjectInfo) -> pb.ObjectDescription:
    """Write the description of an artifact."""
    return as_message(pb.ObjectDescription, info)


def object_info(found: pb.ObjectDescription) -> ObjectInfo:
    """Read the description of an artifact."""
    return as_value(found, ObjectInfo, media_type=found.media_type or DEFAULT_MEDIA_TYPE)


async def read_download(
    answers: AsyncGenerator[pb.GetObjectResponse, None], idle_timeout_seconds: float
) -> tuple[ObjectInfo, int, AsyncGenerator[bytes, None]]:
    """Give the description of a download, where its bytes begin, and those; who falls silent gets `timed_out`."""

    async def next_part() -> pb.GetObjectResponse | None:
        try:
            async with asyncio.timeout(idle_timeout_seconds):
                return await anext(answers, None)
        except TimeoutError:
            raise TimedOut(f"an artifact did not go on within {idle_timeout_seconds:g} s") from None

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with aclosing(answers):
            while (part := await next_part()) is not None:
                yield part.chunk

    first = await next_part()
    if first is None or first.WhichOneof("part") != "description":
        raise FrameInvalid("a download begins with its description")
    return object_info(first.description), first.offset, chunks()
