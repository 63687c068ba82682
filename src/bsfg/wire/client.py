"""The caller's side of the boundary: typed methods over batches and frames, errors as `BsfgError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bsfg.artifacts import Begun, skipped, verified
from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, DigestMismatch, FactNotFound, FrameInvalid, RemoteError
from bsfg.fact import SHA256_NAME, Entry, Key, Message
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.journey.link import AppendedFact, Carriage, Fetched, FetchRequest, Refusal, apart
from bsfg.model import Limits
from bsfg.offload import by_size
from bsfg.ports import Buffer, Confirmation, Frame, Result
from bsfg.throttle import Throttle
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.connection import MESSAGE_BYTES, Connection
from bsfg.wire.convert import (
    LogEvidence,
    SumCall,
    SumOutcome,
    buffer_number,
    check_ranges,
    confirm_request,
    entry_of,
    envelope_message,
    evidence_of,
    fact_message,
    filter_message,
    ranges_in,
    refusal_message,
    sum_request,
    sums_of,
)
from bsfg.wire.frames import (
    CHUNK_BYTES,
    description_message,
    hashers_here,
    read_download,
    read_frame,
    read_head,
    unpacked,
)
from bsfg.wire.lanes import PutLane, PutLanes
from bsfg.wire.messages import read_of_peer
from bsfg.wire.service import ObjectInfo
from bsfg.wire.streams import Appended, AppendStream, Conversations, PutStream, is_unimplemented

WAIT_MARGIN_SECONDS = 5.0
"""How much longer than the wait that it asks for a fetch may take."""

REFUSALS_AT_ONCE = 5_000

ANSWER_PARTS = 10_000
"""How many gap records an answer may hold beside what its facts need."""

EVIDENCE_RANGES_MAX = 4_000_000
"""How many ranges without entries a log may tell of: whoever looks at them lists them one by one."""

RECEIVED = Limits(max_object_bytes=1 << 30)
"""What a node may send in one frame; the link's own rules judge it more strictly."""


class BoundaryClient:
    """What producers, consumers, peers and pipelines call on a node.

    Every method raises only `bsfg.errors.BsfgError`: the node's own error, or `PeerUnreachable` and `TimedOut`.
    ``instance`` tells which process asks for frames, ``throttle`` bounds what it asks for, ``packs`` compresses it.
    """

    def __init__(
        self, connection: Connection, *, instance: str = "", throttle: Throttle | None = None, packs: bool = False
    ) -> None:
        self.connection, self._instance, self._throttle, self._packs = connection, instance, throttle, packs
        self._appending: dict[str, AppendStream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._gives_whole_answers = True
        self._followed = Conversations(connection, "FollowFacts", "FetchFacts")
        self._confirmed = Conversations(connection, "ConfirmReceipts", "ConfirmReceipt")
        self._put_lanes = PutLanes(connection)

    async def append_fact(self, stream: str, message: Message) -> AppendedFact:
        """Append one fact; raises `ConflictingDuplicate` when its id is taken by another body."""
        request = pb.AppendRequest(
            stream=stream, envelope=envelope_message(message.envelope), fact=fact_message(message.fact)
        )
        answer = await self.connection.call("AppendFact", request)
        hasher = answer.hasher if answer.HasField("hasher") else SHA256_NAME
        return AppendedFact(Result(answer.result), answer.offset, answer.message_id, answer.digest, hasher)

    async def append(self, stream: str, facts: FactBatch) -> Appended:
        """Append a batch over a stream that is kept open for the next one; concurrent calls are pipelined."""
        appending = self._appending.get(stream)
        if appending is None or not appending.is_open:
            if appending is not None:
                # It may still have answers to give.
                ending = asyncio.create_task(appending.close())
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            appending = self._appending[stream] = self.append_stream(stream)
        return await appending.append(facts)

    def append_stream(self, stream: str, *, window_frames: int = 16) -> AppendStream:
        """Open a stream of batches of its own."""
        return AppendStream(self.connection, stream, window_frames=window_frames)

    async def fetch(self, consumer: str, request: FetchRequest, carry_only: Sequence[str] = ()) -> Fetched:
        """Fetch the next facts of a consumer as frames; for links and pipelines."""
        throttle = self._throttle
        if throttle is None:
            return await self._fetched(consumer, request, carry_only, _Room(request))
        await throttle.wait(consumer)
        request = replace(request, max_bytes=throttle.most(request.max_bytes))
        room = _Room(request)
        try:
            return await self._fetched(consumer, request, carry_only, room)
        finally:
            throttle.took(room.taken_bytes, consumer)

    async def _fetched(self, consumer: str, request: FetchRequest, carry_only: Sequence[str], room: _Room) -> Fetched:
        answers = await self._whole_answer(consumer, request, carry_only, room) if self._gives_whole_answers else []
        if not answers:
            # A node that knows no answers as a whole gives them message by message.
            self._gives_whole_answers = False
            return await self._streamed_answer(consumer, request, carry_only, room)
        room.take(*answers)
        return read_head(answers[0], [await _decoded(answer) for answer in answers[1:]])

    async def _whole_answer(
        self, consumer: str, request: FetchRequest, carry_only: Sequence[str], room: _Room
    ) -> Sequence[Any]:
        message = pb.FetchRequest(
            consumer=consumer,
            limit=request.max_facts,
            max_bytes=request.max_bytes,
            wait_ms=int(request.wait_seconds * 1000),
            carry_only=carry_only,
            frames=True,
            gaps_after=request.gaps_after,
            after=request.after,
            ages=True,
            sets=request.sets,
            hashers=hashers_here(),
            instance=self._instance,
            packed=self._packs,
            filter=filter_message(request.filter),
        )
        try:
            answer = await self._followed.ask(consumer, message, timeout_seconds=self._timeout(request.wait_seconds))
        except RemoteError as error:
            if not is_unimplemented(error):
                raise
            return []
        if self._packs and isinstance(answer, pb.FetchResponse) and answer.packed:
            answer = await room.unpacked(answer)
        frames: Sequence[Any] = answer.frames
        return frames

    async def _streamed_answer(
        self, consumer: str, request: FetchRequest, carry_only: Sequence[str], room: _Room
    ) -> Fetched:
        message = pb.FetchFramesRequest(
            consumer=pb.ConsumerSelection(
                consumer=consumer,
                wait_ms=int(request.wait_seconds * 1000),
                gaps_after=request.gaps_after,
                after=request.after,
                sets=request.sets,
            ),
            max_facts=request.max_facts,
            max_bytes=request.max_bytes,
            carry_only=carry_only,
            ages=True,
            hashers=hashers_here(),
            instance=self._instance,
            filter=filter_message(request.filter),
        )
        head: pb.FetchFrame | None = None
        frames: list[Frame] = []
        async for answer in self.connection.answers(
            "FetchFrames", message, timeout_seconds=self._timeout(request.wait_seconds)
        ):
            room.take(answer)
            if head is None:
                head = answer
            else:
                frames.append(await _decoded(answer))
        if head is None:
            raise FrameInvalid("an answer begins with its head")
        return read_head(head, frames)

    async def head(self, stream: str, buffer: Buffer) -> Fetched:
        """Ask which log a buffer is, and where it ends."""
        selection = pb.OffsetSelection(stream=stream, buffer=buffer_number(buffer), first=0, end=0)
        request = _frames_request(1, (), EVERY_FACT, offsets=selection)
        async for answer in self.connection.answers("FetchFrames", request, timeout_seconds=self._timeout(0)):
            return read_head(answer)
        raise FrameInvalid("an answer begins with its head")

    async def read_offsets(
        self,
        stream: str,
        first: int,
        end: int | None = None,
        *,
        buffer: Buffer = Buffer.STORE,
        max_facts: int = 0,
        carry_only: Sequence[str] = (),
        filter: FactFilter = EVERY_FACT,
    ) -> AsyncIterator[Frame]:
        """Read a range of offsets (``end`` exclusive), moving no cursor."""
        selection = pb.OffsetSelection(
            stream=stream,
            buffer=buffer_number(buffer),
            first=first,
            end=end,
        )
        request = _frames_request(max_facts, carry_only, filter, offsets=selection)
        async for frame in self._frames(request):
            # A node of an older version leaves nothing out.
            for piece in apart(asked_for(frame, filter)):
                yield piece

    async def read_times(
        self,
        stream: str,
        start_unix_ms: int,
        end_unix_ms: int,
        *,
        buffer: Buffer = Buffer.FORWARD,
        max_facts: int = 0,
        carry_only: Sequence[str] = (),
    ) -> AsyncIterator[Frame]:
        """Read what became durable in a span of time (its end exclusive), moving no cursor."""
        selection = pb.TimeSelection(
            stream=stream,
            buffer=buffer_number(buffer),
            start_unix_ms=start_unix_ms,
            end_unix_ms=end_unix_ms,
        )
        request = _frames_request(max_facts, carry_only, EVERY_FACT, times=selection)
        async for frame in self._frames(request):
            yield frame

    async def get_fact(self, stream: str, key: Key, *, buffer: Buffer = Buffer.FORWARD) -> Entry | None:
        """Give the fact of a key, None when it is not retained."""
        request = pb.GetFactRequest(
            stream=stream,
            from_zone=key.from_zone,
            message_id=key.message_id,
            buffer=buffer_number(buffer),
        )
        try:
            return entry_of((await self.connection.call("GetFact", request)).entry)
        except FactNotFound:
            return None

    async def evidence(self, stream: str, buffer: Buffer, heads: Sequence[bytes] = ()) -> LogEvidence:
        """Ask what a log shows of itself: gaps, what it kept of removed ranges, and whether it had some chain heads."""
        request = pb.GetEvidenceRequest(stream=stream, buffer=buffer_number(buffer), heads=heads, sets=True)
        answer = await self.connection.call("GetEvidence", request)
        if (count := ranges_in(answer.gap_sets)) > EVIDENCE_RANGES_MAX:
            raise FrameInvalid(f"{count} ranges are told at once, the limit is {EVIDENCE_RANGES_MAX}")
        return evidence_of(answer, stream, buffer)

    async def sum_facts(self, call: SumCall) -> SumOutcome:
        """Have a range of a log summed up by its node, as much of it as the node does at once."""
        return sums_of(await self.connection.call("SumFacts", sum_request(call)), call)

    async def confirm(
        self,
        consumer: str,
        confirmation: Confirmation,
        refusals: Sequence[Refusal] = (),
        *,
        again_and_again: bool = False,
    ) -> int:
        """Confirm what is durable here; give the offset through which the node counts it.

        Who does it ``again_and_again`` keeps a call open for it, which takes one of his places at the node meanwhile.
        """
        while len(refusals) > REFUSALS_AT_ONCE and confirmation.through is not None:
            # What is confirmed up to a refusal may be told before the rest; a node takes so many at once.
            refusals = sorted(refusals, key=lambda each: each.first)
            part, refusals = refusals[:REFUSALS_AT_ONCE], refusals[REFUSALS_AT_ONCE:]
            before = replace(confirmation, through=min(confirmation.through, part[-1].last), ranges=(), peer_head=None)
            await self.confirm(consumer, before, part, again_and_again=again_and_again)
        request = confirm_request(consumer, confirmation)
        request.refusals.extend(refusal_message(refusal) for refusal in refusals)
        if again_and_again:
            answer = await self._confirmed.ask(consumer, request)
        else:
            answer = await self.connection.call("ConfirmReceipt", request)
        return int(answer.cursor_advanced_to)

    def put_stream(self, link: str, stream: str, log_id: str, **options: Any) -> PutStream:
        """Open a stream of frames that a link brought; the options are those of `PutStream`."""
        return PutStream(self.connection, link, stream, log_id, **options)

    def put_lane(self, link: str, stream: str, log_id: str, *, lease: str | None = None) -> PutLane:
        """Open a stream of small frames in the call that all links of this client share."""
        return self._put_lanes.lane(link, stream, log_id, lease=lease)

    async def put_object(self, info: ObjectInfo, content: AsyncIterable[bytes]) -> ObjectInfo:
        """Upload an artifact; it is durable and can be named by facts when this returns.

        What the content raises is raised here, too.
        """
        failures: list[Exception] = []

        async def parts() -> AsyncIterator[pb.PutObjectRequest]:
            yield pb.PutObjectRequest(description=description_message(info))
            try:
                async for piece in content:
                    for start in range(0, len(piece), CHUNK_BYTES):
                        yield pb.PutObjectRequest(chunk=piece[start : start + CHUNK_BYTES])
            except Exception as error:
                # gRPC only cancels the call then.
                failures.append(error)
                raise

        try:
            with self.connection.telling():
                answer = await self.connection.stream("PutObject", parts())
        except BsfgError:
            if failures:
                raise failures[0] from None
            raise
        stored = {"digest": answer.digest, "size_bytes": answer.size_bytes, "already_exists": answer.already_exists}
        return replace(info, **stored, link=None)

    async def get_object(
        self, bucket: str, key: str, *, digest: str | None = None, begun: Begun | None = None
    ) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
        """Download an artifact by name, or by digest alone: its description, and its bytes as they come.

        They are verified: the last piece is given only when the whole has the digest that was asked for, or that the
        description says. A node that falls silent in the middle is given up in time. ``begun`` is what an earlier
        download brought; what follows it is given.
        """
        offset = 0 if begun is None else begun.size_bytes
        request = pb.GetObjectRequest(bucket=bucket, key=key, digest=digest, offset=offset)
        answers = self.connection.answers("GetObject", request)
        info, begins, pieces = await read_download(answers, self.connection.request_timeout_seconds)
        if self._throttle is not None:
            pieces = _throttled(pieces, self._throttle)
        if offset != begins:
            # A node of an earlier version always sends everything.
            pieces = skipped(pieces, offset)
        expected = digest or info.digest
        if expected is None or info.digest not in (None, expected):
            raise DigestMismatch(f"the node describes content with the digest {info.digest}, not {digest}")
        return replace(info, digest=expected), verified(pieces, expected, begun)

    def hang_up(self) -> None:
        """End the calls that are kept open for the next question, and leave the connection to others who use it."""
        self._followed.end()
        self._confirmed.end()
        self._put_lanes.hang_up()

    async def close(self) -> None:
        """End open streams and the connection."""
        self.hang_up()
        ending = [each.close() for each in self._appending.values()]
        await asyncio.gather(*ending, *self._ending, return_exceptions=True)
        await self.connection.close()

    async def __aenter__(self) -> BoundaryClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _frames(self, request: pb.FetchFramesRequest) -> AsyncIterator[Frame]:
        head = None
        async for answer in self.connection.answers("FetchFrames", request):
            if self._throttle is not None:
                self._throttle.took(answer.ByteSize())
            if head is None:
                head = read_head(answer)
            else:
                yield await _decoded(answer)
                if self._throttle is not None:
                    await self._throttle.wait()

    def _timeout(self, wait_seconds: float) -> float:
        return self.connection.request_timeout_seconds + wait_seconds + WAIT_MARGIN_SECONDS


@dataclass(slots=True)
class ClientLink:
    """A `bsfg.journey.link.PeerLink` that was dialled from here: one consumer at one node.

    ``zone`` is the zone of the node that was meant; TLS has proved that it is that node.
    """

    zone: str
    consumer: str
    client: BoundaryClient
    carry_only: tuple[str, ...] = ()
    filter: FactFilter = EVERY_FACT

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Ask for what comes next."""
        if not self.filter:
            return await self.client.fetch(self.consumer, request, self.carry_only)
        request = replace(request, filter=self.filter)
        fetched = await self.client.fetch(self.consumer, request, self.carry_only)
        # A node of an older version leaves nothing out.
        weighed = [(0 if frame.entries is None else frame.entries.weight_bytes, frame) for frame in fetched.frames]
        chosen = [await by_size(size_bytes, asked_for, frame, self.filter) for size_bytes, frame in weighed]
        frames = chosen if request.sets else [piece for frame in chosen for piece in apart(frame)]
        return replace(fetched, frames=frames)

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Tell what is durable here and what was refused."""
        return await self.client.confirm(self.consumer, confirmation, refusals, again_and_again=True)


def asked_for(frame: Frame, filter: FactFilter) -> Frame:
    """Leave out of a frame what was not asked for, in case its sender did not; what is no frame is left to others."""
    entries = frame.entries
    if entries is None or not filter:
        return frame
    if any(entries.first_null(name) is not None for name in ("offset", "appended_at_unix_ms", "produced_at_unix_ms")):
        return frame
    return frame if (np.diff(entries.offsets) < 1).any() else Carriage(asked=filter).chosen(frame)


class _Room:
    """Bounds what one answer may bring: a sender that does not stop would fill the memory.

    Beside the bytes that were asked for there is room for one fact that is larger, and for what each frame costs.
    """

    def __init__(self, request: FetchRequest) -> None:
        self._bytes = 4 * request.max_bytes + MESSAGE_BYTES
        self._parts = 4 * request.max_facts + ANSWER_PARTS
        self._ranges = self.taken_bytes = 0

    async def unpacked(self, answer: pb.FetchResponse) -> Any:
        """Give the answer that came compressed, as one is read that a peer sent; raises `FrameInvalid` for others."""
        self.taken_bytes += len(answer.packed)
        data = await by_size(max(len(answer.packed), answer.unpacked_bytes), unpacked, answer, self._bytes)
        found = await by_size(len(data), read_of_peer(pb.FetchResponse), data)
        if found is None or not found.frames:
            raise FrameInvalid("what came packed is no answer")
        # They are counted once more when they are taken.
        self.taken_bytes -= len(data)
        return found

    def take(self, *answers: pb.FetchFrame) -> None:
        """Count messages, which have come whether there is room for them or not; raises `FrameInvalid` if not."""
        sizes = [answer.ByteSize() for answer in answers]
        self.taken_bytes += sum(sizes)
        for size_bytes, answer in zip(sizes, answers, strict=True):
            self._bytes -= size_bytes
            self._parts -= 1 + len(answer.head.gaps)
            if self._bytes < 0 or self._parts < 0:
                raise FrameInvalid("the answer brings far more than was asked for")
            self._ranges += ranges_in(answer.head.gap_sets) + ranges_in(answer.skips)
            check_ranges(self._ranges)


def _frames_request(
    max_facts: int, carry_only: Sequence[str], filter: FactFilter, **selection: Any
) -> pb.FetchFramesRequest:
    options: dict[str, Any] = {"max_facts": max_facts, "carry_only": carry_only, "ages": True}
    return pb.FetchFramesRequest(**selection, **options, hashers=hashers_here(), filter=filter_message(filter))


async def _throttled(pieces: AsyncGenerator[bytes, None], throttle: Throttle) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            throttle.took(len(piece))
            yield piece
            await throttle.wait()


async def _decoded(message: pb.FetchFrame) -> Frame:
    return await by_size(len(message.entries), read_frame, message, RECEIVED)
