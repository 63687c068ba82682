"""The turns of a stream whose facts are put into the forward buffer of a node elsewhere.

The order and the history of an answer are judged here, since only here it is known where it starts; everything else
is judged by the node that puts it, which takes nobody's word for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bsfg.artifacts import BY_DIGEST, DEFAULT_MEDIA_TYPE, check_digest, own_name
from bsfg.batch import EntryBatch
from bsfg.clock import SystemClock
from bsfg.errors import ArtifactConflict, ArtifactMissing, BsfgError, DigestMismatch, FrameInvalid, InvalidArgument
from bsfg.fact import ArtifactRef
from bsfg.journey.artifacts import named_artifacts
from bsfg.journey.backfill import make_good
from bsfg.journey.link import Fetched, FetchRequest, PeerLink, PeerPosition, Release
from bsfg.journey.pull import HOLDING, LinkTurns
from bsfg.journey.receive import Decision, LinkHeld, PullProgress, Put, StoredAnswer, check_history, check_order
from bsfg.ports import Frame, Gap, GapSet
from bsfg.spark.replicate.plan import LinkTaskPlan, StreamTaskPlan

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.lanes import PutLane
    from bsfg.wire.service import PeerMemo, PutOutcome
    from bsfg.wire.streams import PutStream

WINDOW_FRAMES = 8
LANE_BYTES = 256 << 10
"""Answers that are larger go by a call of their own: those of other links would have to wait behind their bytes."""

GAP_BYTES, RANGE_BYTES = 64, 24

CONFIRM_EVERY_SECONDS = 0.1
"""A confirmation takes three calls from here to two nodes, where the native engine needs one."""

_HOLDING: dict[str, type[BsfgError]] = {each.code: each for each in HOLDING}


@dataclass(slots=True)
class Carried(Put):
    """An answer that is passed on frame by frame."""

    log_id: str = ""
    frames: Sequence[Frame] = ()
    relayed: Sequence[Gap] = ()


class CourierFlow(LinkTurns["Courier"]):
    """The turns of one stream, its facts given to a courier."""

    stores_at_once = 3

    async def judge(self, fetched: Fetched, position: PeerPosition) -> Decision:
        """Check the history and the order of an answer."""
        try:
            check_history(fetched, position)
            check_order(fetched, position)
        except BsfgError as error:
            return LinkHeld(error.code, error.message, fetched.log_id)
        return Carried(
            through=fetched.frames[-1].last if fetched.frames else fetched.start - 1,
            entries=[frame.entries for frame in fetched.frames if frame.entries is not None],
            gaps=[
                *(frame.gap for frame in fetched.frames if frame.gap is not None),
                *(each for frame in fetched.frames for each in frame.skips),
            ],
            served_at_unix_ms=fetched.served_at_unix_ms,
            log_id=fetched.log_id,
            frames=fetched.frames,
            relayed=[*fetched.gaps, *fetched.gap_sets],
        )

    async def hand_over(self, put: Put, target: Courier, clock_trusted: bool) -> Coroutine[Any, Any, StoredAnswer]:
        """Send every frame to the node, which puts them in order."""
        assert isinstance(put, Carried)
        at, served_at = put.through + 1, put.served_at_unix_ms
        return await target.send(put.log_id, put.frames, put.relayed, at=at, served_at_unix_ms=served_at)

    def waits_its_turn(self, put: Put) -> bool:
        """An answer with artifacts may take long to bring; what is stored before it is to be confirmed meanwhile."""
        return any(len(entries) > entries.column("artifact_digest").null_count for entries in put.entries)


Bring = Callable[[EntryBatch], Awaitable[None]]
"""Brings the artifacts that facts name, before they are put."""


class Courier:
    """Puts frames of one stream of a link, over a call that all links of a task share or, for many bytes, its own."""

    def __init__(self, client: BoundaryClient, link: str, stream: str, lease: str | None, bring: Bring) -> None:
        self._client, self._link, self._stream, self._lease = client, link, stream, lease
        self._bring = bring
        self._open: tuple[str, bool, PutStream | PutLane] | None = None

    async def carry(self, log_id: str, frames: Sequence[Frame], served_at_unix_ms: int | None) -> StoredAnswer:
        """Put frames and tell what became of them."""
        return await (await self.send(log_id, frames, served_at_unix_ms=served_at_unix_ms))

    async def send(
        self,
        log_id: str,
        frames: Sequence[Frame],
        relayed: Sequence[Gap] = (),
        *,
        at: int = 0,
        served_at_unix_ms: int | None = None,
    ) -> Coroutine[Any, Any, StoredAnswer]:
        """Send frames, and with the first one the gap records that the sender relays; give the wait for the outcome."""
        for frame in frames:
            if frame.entries is not None:
                await self._bring(frame.entries)
        size_bytes = _gaps_bytes(relayed) + sum(_gaps_bytes(frame.skips) for frame in frames)
        size_bytes += sum(frame.entries.weight_bytes for frame in frames if frame.entries is not None)
        calls = await self._stream_of(log_id, size_bytes <= LANE_BYTES)
        answers: list[tuple[Frame, asyncio.Future[PutOutcome]]] = []
        try:
            if relayed and not frames:
                alone = Frame(at, at - 1)
                answers.append((alone, await calls.send(alone, relayed)))
            for frame in frames:
                more = relayed if frame is frames[0] else ()
                answers.append((frame, await calls.send(frame, more, served_at_unix_ms=served_at_unix_ms)))
        except BaseException:
            self._abandon(calls)
            raise
        return self._outcome(calls, answers, log_id)

    async def _outcome(
        self, calls: PutStream | PutLane, answers: Sequence[tuple[Frame, asyncio.Future[PutOutcome]]], log_id: str
    ) -> StoredAnswer:
        stored = StoredAnswer()
        try:
            for frame, answer in answers:
                _add(stored, frame, await answer, log_id)
        except BaseException:
            self._abandon(calls)
            raise
        return stored

    async def close(self) -> None:
        """Wait for what the node has begun, and end the call."""
        if self._open is not None:
            _, _, calls = self._open
            self._open = None
            await calls.close()

    async def _stream_of(self, log_id: str, is_small: bool) -> PutStream | PutLane:
        if self._open is not None and self._open[:2] == (log_id, is_small) and self._open[2].is_open:
            return self._open[2]
        # What was sent before is stored before: the two ways know nothing of each other's order.
        await self.close()
        calls: PutStream | PutLane
        if is_small:
            calls = self._client.put_lane(self._link, self._stream, log_id, lease=self._lease)
        else:
            calls = self._client.put_stream(
                self._link, self._stream, log_id, lease=self._lease, window_frames=WINDOW_FRAMES
            )
        self._open = log_id, is_small, calls
        return calls

    def _abandon(self, calls: PutStream | PutLane) -> None:
        """Begin anew after a frame that was not taken: the node refuses the rest of that call, or lane."""
        calls.abandon()
        if self._open is not None and self._open[2] is calls:
            self._open = None


def _gaps_bytes(gaps: Sequence[Gap]) -> int:
    """About the bytes of gap records: too many of them would end the call that all links share."""
    ranges = sum(len(gap.ranges) for gap in gaps if isinstance(gap, GapSet))
    return GAP_BYTES * len(gaps) + RANGE_BYTES * ranges + sum(len(gap.detail) for gap in gaps)


def _add(stored: StoredAnswer, frame: Frame, outcome: PutOutcome, log_id: str) -> None:
    if outcome.held_code:
        kind = _HOLDING.get(outcome.held_code, FrameInvalid)
        raise kind(outcome.held_detail, log_id=log_id)
    if outcome.refetch_at is not None or outcome.through != frame.last:
        at = outcome.through + 1 if outcome.refetch_at is None else outcome.refetch_at
        raise DigestMismatch(f"the fact at offset {at} did not arrive as it was sent", offset=at)
    stored.inserted += outcome.inserted
    stored.repeated += outcome.repeated
    stored.refusals += outcome.refusals
    stored.chain_head = outcome.chain_head or stored.chain_head


class ArtifactCourier:
    """Copies artifacts of a link from the sender's node to this zone's; ``came`` is called for every piece."""

    def __init__(
        self, source: BoundaryClient, target: BoundaryClient, link: str, came: Callable[[], None] = lambda: None
    ) -> None:
        self._source, self._target, self._link, self._came = source, target, link, came

    async def bring(self, entries: EntryBatch) -> None:
        """Bring what facts name and the node lacks."""
        references = {named.reference.digest: named.reference for named in named_artifacts(entries)}
        for reference in references.values():
            if not await self._is_there(reference.digest):
                await self._copy(reference)

    async def _is_there(self, digest: str) -> bool:
        try:
            _, chunks = await self._target.get_object("", "", digest=digest)
        except (ArtifactMissing, DigestMismatch):
            # What is known to be damaged here is healed by what the sender has.
            return False
        await chunks.aclose()
        return True

    async def _copy(self, reference: ArtifactRef) -> None:
        from bsfg.wire.service import ObjectInfo

        digest, media_type = reference.digest, reference.media_type or DEFAULT_MEDIA_TYPE
        unnamed = ObjectInfo(
            BY_DIGEST, check_digest(digest), media_type, None, digest, reference.size_bytes, link=self._link
        )
        name = own_name(reference)
        if name is not None:
            info = replace(unnamed, bucket=name[0], key=name[1], file_name=reference.file_name)
            try:
                await self._target.put_object(info, self._content(digest))
                return
            except (ArtifactConflict, InvalidArgument):
                pass  # the name stands for something else here, or is none; facts get at it by digest
        await self._target.put_object(unnamed, self._content(digest))

    async def _content(self, digest: str) -> AsyncIterator[bytes]:
        _, chunks = await self._source.get_object("", "", digest=digest)
        async for chunk in chunks:
            self._came()
            yield chunk


@dataclass(slots=True)
class RemoteMemory:
    """What is known of the sender, kept by this zone's node for every engine."""

    admin: AdminClient
    link: str
    stream: str
    lease: str | None
    keep: Callable[[PeerMemo], Awaitable[None]] | None = None
    """By which call it is kept; None for one of its own."""

    async def recall(self) -> PeerPosition:
        """Give the position."""
        return await self.admin.recall_peer(self.link, self.stream)

    async def remember(self, position: PeerPosition, settles: Release | None = None) -> None:
        """Keep the position."""
        from bsfg.wire.service import PeerMemo

        keep = self.keep or self.admin.remember_peer
        await keep(PeerMemo(self.link, self.stream, position, self.lease, settles))


@dataclass(slots=True)
class TaskPull:
    """The turns of one stream, as the loops of a handoff take them."""

    plan: LinkTaskPlan
    of: StreamTaskPlan
    peer: BoundaryClient
    own: BoundaryClient
    admin: AdminClient
    lease: str | None
    came: Callable[[], None] = lambda: None
    confirm_every_seconds: float = CONFIRM_EVERY_SECONDS
    keep: Callable[[PeerMemo], Awaitable[None]] | None = None
    _source: PeerLink = field(init=False)
    _turns: CourierFlow = field(init=False)
    _courier: Courier = field(init=False)
    _memory: RemoteMemory = field(init=False)

    def __post_init__(self) -> None:
        from bsfg.wire.client import ClientLink

        link = self.plan.link
        self._source = ClientLink(link.zone, self.of.consumer, self.peer, link.carry_only, link.filter)
        self._memory = RemoteMemory(self.admin, link.name, self.stream, self.lease, self.keep)
        self._turns = CourierFlow(
            self._source, self._memory, clock=SystemClock(), confirm_every_seconds=self.confirm_every_seconds
        )
        bring = ArtifactCourier(self.peer, self.own, link.name, self.came).bring
        self._courier = Courier(self.own, link.name, self.stream, self.lease, bring)

    @property
    def stream(self) -> str:
        """The stream."""
        return self.of.stream

    @property
    def capacity_bytes(self) -> int:
        """How much the forward buffer holds in all."""
        return self.of.capacity_bytes

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Make one turn."""
        return await self._turns.turn(self._courier, request)

    async def make_good(self) -> PullProgress | None:
        """Act upon an operator's release."""

        def read(first: int, end: int) -> AsyncIterator[Frame]:
            link = self.plan.link
            choice: dict[str, Any] = {"carry_only": link.carry_only, "filter": link.filter}
            return self.peer.read_offsets(self.stream, first, end, buffer=link.buffer, **choice)

        async def put(frame: Frame, fetched: Fetched) -> PullProgress:
            stored = await self._courier.carry(fetched.log_id, [frame], fetched.served_at_unix_ms)
            return PullProgress(inserted=stored.inserted, repeated=stored.repeated)

        return await make_good(self._source, self._memory, read, put)

    def reset(self) -> None:
        """Let go of what is under way."""
        self._turns.reset()

    async def settle(self) -> None:
        """Wait until the sender has heard of what was put."""
        await self._turns.confirmed()

    async def close(self) -> None:
        """Let go of everything, and wait for what the node has begun."""
        self._turns.reset()
        await self._courier.close()
