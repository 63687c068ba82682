"""The service `bsfg.v1.Boundary`: requests become calls of the node, and its answers messages."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any

from bsfg.errors import BsfgError, FrameInvalid, InvalidArgument, NotReady, Overloaded, TimedOut
from bsfg.fact import SHA256_NAME, Entry, Key
from bsfg.journey.link import AppendOutcome, Fetched, FetchRequest, Refusal
from bsfg.journey.serve import SUM_STEP_BYTES, sum_up
from bsfg.journey.sums import Summation
from bsfg.node.service import NodeService, Reading
from bsfg.offload import STEP_FACTS, THREAD_BYTES, Step, by_size, step_of
from bsfg.ports import Buffer, Confirmation, Frame, Result
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import (
    buffer_of,
    confirmation_of,
    entry_message,
    evidence_pieces,
    filter_of,
    gap_message,
    gap_of,
    gap_sets_of,
    heads_of,
    refusal_message,
    refusal_of,
    single_fact,
    sum_call_of,
    sums_response,
)
from bsfg.wire.frames import (
    CHUNK_BYTES,
    Pipelined,
    ack_message,
    check_hashers,
    description_message,
    frame_messages,
    frames_response,
    given,
    head_message,
    object_info,
    packed,
    schema_for,
)
from bsfg.wire.grpc_calls import GrpcHandlers, IncomingRequests, Stream, Unary
from bsfg.wire.lanes import Laned
from bsfg.wire.messages import BOUNDARY, BOUNDARY_SERVICE, snake
from bsfg.wire.service import Caller, PutCall, PutOutcome
from bsfg.wire.status import error_message

FACTS_DEFAULT = 100
FETCH_BYTES_DEFAULT = 1 << 20
FRAMES_FACTS_DEFAULT = 10_000
FRAMES_BYTES_DEFAULT = 8 << 20
LANES = 8
"""How many times as many frames as in one lane may be under way in a call with many."""

BROKEN_LANES_MAX = 10_000
"""How many lanes a call remembers to refuse; who has as many under way breaks his own order alone."""


Frames = AsyncIterator[pb.FetchFrame | bytes]


class BoundaryServicer:
    """Answers the methods of the boundary."""

    def __init__(self, service: NodeService, calls: GrpcHandlers) -> None:
        self._service, self._calls = service, calls
        self._limits = calls.limits

    def handlers(self) -> tuple[str, dict[str, Any]]:
        """Give the name of the service and the handlers to be added to a gRPC server."""
        behaviours: Mapping[str, Unary | Stream] = {name: getattr(self, snake(name)) for name in BOUNDARY}
        return self._calls.handlers(BOUNDARY_SERVICE, BOUNDARY, behaviours)

    async def append_fact(self, request: pb.AppendRequest, caller: Caller) -> pb.AppendResponse:
        """Append one fact."""
        async with self._calls.timeout():
            prepared = await self._service.prepare(caller, request.stream, single_fact(request))
            outcome = await self._service.commit(prepared)
        return append_response(outcome)

    def append_facts(self, requests: IncomingRequests, caller: Caller) -> AsyncIterator[pb.AppendAck]:
        """Append batches, many in flight."""

        async def begin(frame: pb.AppendFrame) -> Awaitable[pb.AppendAck]:
            try:
                prepared = await self._service.prepare(caller, frame.stream, frame.facts)
            except BsfgError as error:
                # The answer comes when the next frame is read: who is told earlier may mend what was wrong in between,
                # and the frames behind this one, which are on their way, would be taken before it.
                delay_seconds = self._calls.admission.delay_seconds(str(caller), error)
                requests.pause(delay_seconds)
                return _later(delay_seconds, pb.AppendAck(sequence=frame.sequence, error=error_message(error)))
            try:
                outcome = self._service.commit(prepared)
            except BsfgError as error:
                # The caller did nothing that it may not do: its clock or this zone's room is the matter.
                return given(pb.AppendAck(sequence=frame.sequence, error=error_message(error)))
            return _committed(frame.sequence, outcome, ids_derived=prepared.ids_derived)

        return Pipelined(begin, window_frames=self._limits.window_frames).answers(requests)

    async def fetch_facts(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Give the next facts of a consumer as messages, or as frames when it asks for those."""
        if request.frames:
            return await self._frames_at_once(request, caller)
        wanted = FetchRequest(
            max_facts=request.limit or FACTS_DEFAULT,
            max_bytes=min(request.max_bytes or FETCH_BYTES_DEFAULT, self._limits.frame_bytes),
            wait_seconds=self._wait_seconds(request.wait_ms),
            gaps_after=request.gaps_after or None,
            filter=filter_of(request),
        )
        async with self._calls.timeout(wanted.wait_seconds):
            fetched = await self._service.fetch(caller, request.consumer, wanted, _zones(request.carry_only))
        return await self._calls.admission.written(fetched, fetch_response(fetched), str(caller))

    async def _frames_at_once(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        wanted = FetchRequest(
            max_facts=request.limit or FRAMES_FACTS_DEFAULT,
            max_bytes=min(request.max_bytes or FRAMES_BYTES_DEFAULT, self._limits.frame_bytes),
            wait_seconds=self._wait_seconds(request.wait_ms),
            gaps_after=request.gaps_after,
            after=request.after if request.HasField("after") else None,
            sets=request.sets,
            instance=request.instance,
            filter=filter_of(request),
        )
        async with self._calls.timeout(wanted.wait_seconds):
            fetched = await self._service.fetch(caller, request.consumer, wanted, _zones(request.carry_only))
        check_hashers(fetched.frames, request)
        schema = schema_for(ages=request.ages)

        def response() -> bytes:
            plain = frames_response(fetched, schema)
            return packed(plain) if request.packed else plain

        if fetched.weight_bytes < THREAD_BYTES:
            return response()
        async with self._calls.admission.answering.take(fetched.weight_bytes, str(caller)):
            return await by_size(fetched.weight_bytes, response)

    def follow_facts(self, requests: AsyncIterator[pb.FetchRequest], caller: Caller) -> AsyncIterator[Any]:
        """Answer one fetch after the other."""
        return self._calls.one_by_one("FetchFacts", self.fetch_facts, requests, caller)

    async def fetch_frames(self, request: pb.FetchFramesRequest, caller: Caller) -> Frames:
        """Give facts as frames: a consumer's next ones, a range of offsets, or a span of time."""
        selection = request.WhichOneof("selection")
        if selection == "consumer":
            reading, max_bytes = await self._consumer_reading(request, caller), self._limits.frame_bytes
        elif selection in ("offsets", "times"):
            reading = await self._range_reading(request, caller)
            max_bytes = min(request.max_bytes or self._limits.frame_bytes, self._limits.frame_bytes)
        else:
            raise InvalidArgument("name a consumer, a range of offsets or a span of time")
        schema = schema_for(request.columns, ages=request.ages)
        yield head_message(reading.head)
        async for frame in reading.frames if selection == "consumer" else self._in_room(reading.frames, caller):
            check_hashers([frame], request)
            async for message in frame_messages(frame, max_bytes, schema):
                yield message

    async def _in_room(self, frames: AsyncIterator[Frame], caller: Caller) -> AsyncIterator[Frame]:
        """Give frames that are read one by one when there is room for the next; how large that is, nobody knows."""
        room, size_bytes = caller.room, 0
        while True:
            if room is not None:
                await room.take(max(size_bytes, self._limits.frame_bytes))
            frame = await anext(frames, None)
            if frame is None:
                return
            size_bytes = frame.entries.weight_bytes if frame.entries is not None else 0
            if room is not None:
                room.keep(size_bytes)
            yield frame

    async def _consumer_reading(self, request: pb.FetchFramesRequest, caller: Caller) -> Reading:
        wanted = FetchRequest(
            max_facts=request.max_facts or FRAMES_FACTS_DEFAULT,
            max_bytes=min(request.max_bytes or FRAMES_BYTES_DEFAULT, self._limits.sending_bytes // 2),
            wait_seconds=self._wait_seconds(request.consumer.wait_ms),
            gaps_after=request.consumer.gaps_after,
            after=request.consumer.after if request.consumer.HasField("after") else None,
            sets=request.consumer.sets,
            instance=request.instance,
            filter=filter_of(request),
        )
        zones = _zones(request.carry_only)
        async with self._calls.timeout(wanted.wait_seconds):
            return await self._service.fetch_frames(caller, request.consumer.consumer, wanted, zones)

    async def _range_reading(self, request: pb.FetchFramesRequest, caller: Caller) -> Reading:
        max_facts = min(request.max_facts or FRAMES_FACTS_DEFAULT, FRAMES_FACTS_DEFAULT)
        wanted = FetchRequest(max_facts=max_facts, sets=request.sets, filter=filter_of(request))
        zones = _zones(request.carry_only)
        async with self._calls.timeout():
            if request.WhichOneof("selection") == "offsets":
                range_ = request.offsets
                buffer, end = buffer_of(range_.buffer, Buffer.STORE), range_.end if range_.HasField("end") else None
                return await self._service.read_offsets(caller, range_.stream, buffer, range_.first, end, wanted, zones)
            span = request.times
            buffer = buffer_of(span.buffer, Buffer.FORWARD)
            return await self._service.read_times(
                caller, span.stream, buffer, span.start_unix_ms, span.end_unix_ms, wanted, zones
            )

    async def get_fact(self, request: pb.GetFactRequest, caller: Caller) -> pb.GetFactResponse:
        """Give the fact of a key."""
        key, buffer = Key(request.from_zone, request.message_id), buffer_of(request.buffer, Buffer.FORWARD)
        async with self._calls.timeout():
            entry = await self._service.get(caller, request.stream, key, buffer)
        return pb.GetFactResponse(entry=entry_message(entry))

    async def get_evidence(self, request: pb.GetEvidenceRequest, caller: Caller) -> bytes:
        """Tell what a log shows of itself."""
        buffer, heads = buffer_of(request.buffer, Buffer.STORE), heads_of(request)
        async with self._calls.timeout():
            found = await self._service.evidence(caller, request.stream, buffer, heads)
            return b"".join(await self._calls.admission.turns.of(evidence_pieces(found, sets=request.sets)))

    async def sum_facts(self, request: pb.SumFactsRequest, caller: Caller) -> bytes:
        """Sum up a range of a log, which is read as it would be for the caller himself."""
        call = sum_call_of(request)
        wanted = FetchRequest(max_facts=FRAMES_FACTS_DEFAULT, sets=True)
        async with self._calls.timeout():
            reading = await self._service.read_offsets(caller, call.stream, call.buffer, call.first, call.end, wanted)
            summation = Summation(call.side, call.first, call.end, call.scope)
            if caller.room is not None:
                # Frames wait here until they are a step, and the last of them may be as large again.
                await caller.room.take(SUM_STEP_BYTES + self._limits.frame_bytes)
            await sum_up(reading.frames, summation)
        answer = await by_size(THREAD_BYTES, sums_response, reading.head, summation)
        if caller.room is not None:
            caller.room.keep(len(answer))
        return answer

    async def confirm_receipt(self, request: pb.ConfirmRequest, caller: Caller) -> pb.ConfirmResponse:
        """Record a confirmation."""
        confirmation, refusals = await by_size(request.ByteSize(), _confirmed, request)
        async with self._calls.timeout():
            advanced_to = await self._service.confirm(caller, request.consumer, confirmation, refusals)
        return pb.ConfirmResponse(cursor_advanced_to=advanced_to)

    def confirm_receipts(self, requests: AsyncIterator[pb.ConfirmRequest], caller: Caller) -> AsyncIterator[Any]:
        """Record one confirmation after the other."""
        return self._calls.one_by_one("ConfirmReceipt", self.confirm_receipt, requests, caller)

    def put_facts(self, requests: IncomingRequests, caller: Caller) -> AsyncIterator[pb.PutAck]:
        """Put what a link brought, frame by frame: order matters here more than overlap.

        After a frame that was not taken whole the rest of the call is refused: its frames are on their way already,
        and would come into the buffer before what is missing.
        """
        broken = False

        async def begin(frame: pb.PutFrame) -> Awaitable[pb.PutAck]:
            nonlocal broken
            ack, is_taken, delay_seconds = await self._put(caller, frame, refused=broken)
            broken = not is_taken
            requests.pause(delay_seconds)
            return given(ack)

        return Pipelined(begin, window_frames=self._limits.window_frames).answers(requests)

    def put_lanes(self, requests: IncomingRequests, caller: Caller) -> AsyncIterator[pb.PutAck]:
        """Put what many links brought, each lane by itself: what is wrong with one link delays no other."""
        broken: OrderedDict[int, None] = OrderedDict()

        async def put(frame: pb.PutFrame) -> pb.PutAck:
            ack, is_taken, delay_seconds = await self._put(caller, frame, refused=frame.lane in broken)
            if not is_taken:
                broken[frame.lane] = None
                if len(broken) > BROKEN_LANES_MAX:
                    broken.popitem(last=False)
                await asyncio.sleep(delay_seconds)
            return ack

        window_frames = LANES * self._limits.window_frames
        return Laned(put, window_frames=window_frames).answers(requests)

    async def _put(self, caller: Caller, frame: pb.PutFrame, *, refused: bool) -> tuple[pb.PutAck, bool, float]:
        """Put one frame, or refuse it; give its ack, whether it was taken whole, and how long its sender is to wait."""
        try:
            if refused:
                raise NotReady("a frame before this one was not taken", hint="Send both again in a new call.")
            # The batch stays as it is until the node has looked whose it is; the rest takes time by its bytes.
            beside = frame.ByteSize() - len(frame.entries)
            outcome = await self._service.put(caller, await by_size(beside, put_call, frame))
        except BsfgError as error:
            delay_seconds = self._calls.admission.delay_seconds(str(caller), error)
            ack = pb.PutAck(sequence=frame.sequence, through=max(-1, frame.first - 1), error=error_message(error))
            return ack, False, delay_seconds
        return put_ack(frame.sequence, outcome), outcome.through == frame.last, 0.0

    async def put_object(self, requests: IncomingRequests, caller: Caller) -> pb.PutObjectResponse:
        """Take an upload; a caller that falls silent in the middle gets `timed_out`, and nothing is stored."""

        async def next_part() -> pb.PutObjectRequest | None:
            part: pb.PutObjectRequest | None = await anext(requests, None)
            if part is None and requests.fell_silent:
                if requests.is_given_up:
                    raise Overloaded("too many messages are on their way to the node", limit="awaited_messages")
                raise TimedOut("the upload fell silent before its end")
            return part

        async def chunks() -> AsyncIterator[bytes]:
            while (part := await next_part()) is not None:
                if part.WhichOneof("part") != "chunk":
                    raise InvalidArgument("an upload has one description, then chunks")
                yield part.chunk

        first = await next_part()
        if first is None or first.WhichOneof("part") != "description":
            raise InvalidArgument("an upload begins with its description")
        stored = await self._service.put_object(caller, object_info(first.description), chunks())
        return pb.PutObjectResponse(
            digest=stored.digest or "", size_bytes=stored.size_bytes or 0, already_exists=stored.already_exists
        )

    async def get_object(self, request: pb.GetObjectRequest, caller: Caller) -> AsyncIterator[pb.GetObjectResponse]:
        """Give an artifact: its description, then its bytes."""
        digest = request.digest if request.HasField("digest") else None
        info, data = await self._service.get_object(caller, request.bucket, request.key, digest, request.offset)
        yield pb.GetObjectResponse(description=description_message(info), offset=request.offset)
        async for piece in data:
            for start in range(0, len(piece), CHUNK_BYTES):
                yield pb.GetObjectResponse(chunk=piece[start : start + CHUNK_BYTES])

    def _wait_seconds(self, wait_ms: int) -> float:
        return min(wait_ms / 1000, self._limits.fetch_wait_max_seconds)


async def _later(delay_seconds: float, ack: pb.AppendAck) -> pb.AppendAck:
    await asyncio.sleep(delay_seconds)
    return ack


async def _committed(sequence: int, outcome: Awaitable[AppendOutcome], *, ids_derived: bool) -> pb.AppendAck:
    try:
        return ack_message(sequence, await outcome, ids_derived=ids_derived)
    except BsfgError as error:
        return pb.AppendAck(sequence=sequence, error=error_message(error))


def fetch_response(fetched: Fetched) -> Iterator[Step]:
    """Write an answer fact by fact, in pieces: messages one after the other are one message with the lists of all."""
    yield pb.FetchResponse(
        start=fetched.start,
        next_offset=fetched.frames[-1].last + 1 if fetched.frames else fetched.start,
        log_id=fetched.log_id,
        end=fetched.end,
        chain_head=fetched.chain_head,
        gaps=[gap_message(gap) for gap in fetched.gaps],
        gaps_token=fetched.gaps_token,
    ).SerializeToString()
    for frame in fetched.frames:
        if frame.entries is not None:
            for size_bytes, entries in frame.entries.in_steps(STEP_FACTS, THREAD_BYTES):
                yield step_of(size_bytes, _entries_response, entries)
        elif frame.gap is not None:
            yield pb.FetchResponse(gaps=[gap_message(frame.gap)]).SerializeToString()


def _entries_response(entries: Sequence[Entry]) -> bytes:
    response: bytes = pb.FetchResponse(entries=map(entry_message, entries)).SerializeToString()
    return response


def append_response(outcome: AppendOutcome) -> pb.AppendResponse:
    """Write the answer to a single fact; a conflict is an error."""
    [appended] = outcome.results()
    if appended.result == Result.CONFLICT:
        raise outcome.conflicts()[0]
    return pb.AppendResponse(
        offset=appended.offset,
        result=int(appended.result),  # type: ignore[arg-type]
        digest=appended.digest,
        chain_head=outcome.chain_head,
        appended_at_unix_ms=outcome.receipt.appended_at_unix_ms,
        message_id=appended.message_id,
        hasher=None if appended.hasher == SHA256_NAME else appended.hasher,
    )


def _confirmed(request: pb.ConfirmRequest) -> tuple[Confirmation, list[Refusal]]:
    return confirmation_of(request), [refusal_of(each) for each in request.refusals]


def put_call(frame: pb.PutFrame) -> PutCall:
    """Read a frame of a pipeline."""
    gap = gap_of(frame.gap) if frame.HasField("gap") else None
    gaps_alone = bool(frame.gaps or frame.gap_sets) and frame.last == frame.first - 1
    has_facts = bool(frame.entries) or bool(frame.skips)
    if (gap is not None and has_facts) or (gap is None and not has_facts and not gaps_alone):
        raise FrameInvalid("a frame holds either entries or a gap record")
    return PutCall(
        link=frame.link,
        stream=frame.stream,
        log_id=frame.log_id,
        first=frame.first,
        last=frame.last,
        entries=frame.entries,
        gap=gap,
        gaps=[*(gap_of(each) for each in frame.gaps), *gap_sets_of(frame.gap_sets)],
        skips=gap_sets_of(frame.skips),
        lease=frame.lease if frame.HasField("lease") else None,
        served_at_unix_ms=frame.served_at_unix_ms if frame.HasField("served_at_unix_ms") else None,
    )


def put_ack(sequence: int, outcome: PutOutcome) -> pb.PutAck:
    """Write the answer to a frame of a pipeline."""
    held = None
    if outcome.held_code:
        held = pb.Error(code=outcome.held_code, message=outcome.held_detail)
    return pb.PutAck(
        sequence=sequence,
        inserted=outcome.inserted,
        repeated=outcome.repeated,
        refusals=[refusal_message(each) for each in outcome.refusals],
        through=outcome.through,
        chain_head=outcome.chain_head,
        refetch_at=outcome.refetch_at,
        error=held,
        held=bool(outcome.held_code),
    )


def _zones(names: Any) -> frozenset[str] | None:
    return frozenset(names) or None
