"""The boundary of a zone as a service: who may, which step of the journey, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import structlog

from bsfg.batch import EntryBatch, FactBatch
from bsfg.config.access import Identity
from bsfg.config.kinds import Action
from bsfg.digest import LogHistory
from bsfg.errors import (
    BsfgError,
    BufferFull,
    FactNotFound,
    ForeignLog,
    InvalidArgument,
    UnknownConsumer,
    ZoneNotAllowed,
)
from bsfg.fact import Entry, Key
from bsfg.filters import FactFilter
from bsfg.journey.append import AppendRules, commit, prepare
from bsfg.journey.confirm import confirm_receipt
from bsfg.journey.link import AppendOutcome, Carriage, Carriages, Fetched, FetchRequest, PeerPosition, Refusal
from bsfg.journey.receive import LinkRules, PullProgress, receive
from bsfg.journey.serve import GivenGaps, serve, serve_range
from bsfg.node.ages import offsets_of_span
from bsfg.node.authorize import Request, is_peer, speaker_of, speaks_for
from bsfg.node.objects import Objects
from bsfg.node.parts import NodeContext
from bsfg.offload import by_size
from bsfg.ports import (
    Buffer,
    BufferStats,
    Confirmation,
    ConsumerState,
    ForwardBuffer,
    Frame,
    GapRecord,
    GapSet,
    Receipt,
    StoreBuffer,
)
from bsfg.retention import GapReason
from bsfg.sealing import IdStrategy
from bsfg.signatures import SIGNATURE_WEIGHT_BYTES, TrustedKeys
from bsfg.wire.convert import LogEvidence
from bsfg.wire.service import Caller, ObjectInfo, PutCall, PutOutcome

log = structlog.get_logger("bsfg.node")


class Putting:
    """Puts what a pipeline brings of a link by the rules of that link, as the native engine does what it fetched.

    What may be confirmed is told to the pipeline, which tells the sender.
    """

    def __init__(self, parts: NodeContext) -> None:
        self._parts = parts
        self._objects = Objects(parts)

    async def put(self, caller: Caller, call: PutCall) -> PutOutcome:
        """Put one frame; what holds the link is part of the outcome, a full buffer an error."""
        parts = self._parts
        parts.guard.check(caller, Request(Action.PUT, call.stream, Buffer.FORWARD, link=call.link))
        lane = parts.settings.stream(call.stream)
        parts.links.leases.check(call.link, call.lease)
        parts.links.check_open(call.link)
        parts.links.spoke(call.link)
        history = await self._foreign(call)
        if history is not None:
            return PutOutcome(call.first - 1, held_code=ForeignLog.code, held_detail=history)
        entries = None
        if call.entries:
            entries = await by_size(len(call.entries), EntryBatch.from_ipc, call.entries, lane.link_limits)
        frame = Frame(call.first, call.last, entries, call.gap, call.skips)
        refused = self._zones_refused(call, frame.entries)
        if refused is not None:
            return PutOutcome(call.first - 1, held_code=ZoneNotAllowed.code, held_detail=refused)
        progress = await receive(
            _brought(call, frame),
            PeerPosition(log_id=call.log_id),
            self._rules(call, frame.entries),
            self._peer_zone(call.link),
            await parts.forward(call.stream),
            clock=parts.steady,
            clock_trusted=parts.steady.trusted,
            before_put=self._objects.claim,
        )
        return self._outcome(call, progress)

    async def _foreign(self, call: PutCall) -> str | None:
        """Say that these facts are of another log than the one that is known of the sender."""
        known = await self._parts.memory(call.link, call.stream).recall()
        if known.log_id in (None, call.log_id):
            return None
        if known.released is not None and known.released.covers(ForeignLog.code, call.log_id):
            return None
        return f"the sender's log is {call.log_id}, it was {known.log_id}"

    def _outcome(self, call: PutCall, progress: PullProgress) -> PutOutcome:
        if isinstance(progress.paused, BufferFull):
            raise progress.paused
        if progress.held is not None:
            return PutOutcome(call.first - 1, held_code=progress.held.code, held_detail=progress.held.detail)
        if progress.refused:
            refusals = [str(refusal) for refusal in progress.refused[:10]]
            log.warning("facts_refused", link=call.link, stream=call.stream, refusals=refusals)
        metrics = self._parts.metrics
        metrics.put(call.stream, Buffer.FORWARD, inserted=progress.inserted, repeated=progress.repeated)
        return PutOutcome(
            through=progress.through if progress.through is not None else call.first - 1,
            inserted=progress.inserted,
            repeated=progress.repeated,
            refusals=progress.refused,
            chain_head=progress.chain_head if progress.moved else b"",
            refetch_at=progress.refetch_at,
        )

    def _peer_zone(self, link: str) -> str:
        matrix = self._parts.guard.matrix
        return matrix.identities[matrix.link_servers[link]].zone

    def _zones_refused(self, call: PutCall, entries: EntryBatch | None) -> str | None:
        """Say which zone the link's peer may not bring, None when it may bring all."""
        parts = self._parts
        from_zones = _zones(call, entries) - {parts.settings.zone}
        to_zones = frozenset(entries.distinct("to_zone")) if entries is not None else frozenset()
        decision = parts.guard.matrix.decide_link(
            call.link, call.stream, from_zones, to_zones, parts.clock.now_unix_ms()
        )
        if decision.error is None:
            return None
        parts.guard.audit(decision, Caller(address=f"link {call.link}"))
        return decision.error.message

    def _rules(self, call: PutCall, entries: EntryBatch | None) -> LinkRules:
        parts, lane = self._parts, self._parts.settings.stream(call.stream)
        max_age_seconds = lane.expires_after_seconds
        link = parts.settings.links.get(call.link)
        if max_age_seconds is not None and link is not None and link.max_age_seconds is not None:
            max_age_seconds = link.max_age_seconds
        # These were allowed one by one before; the step itself only needs to know them.
        zones = _zones(call, entries) | {self._peer_zone(call.link)}
        name, signing, stream = parts.settings.zone, parts.settings.signing, call.stream
        return LinkRules(name, zones, max_age_seconds, limits=lane.link_limits, signing=signing, stream=stream)


def _zones(call: PutCall, entries: EntryBatch | None) -> frozenset[str]:
    """Give the zones that a call brings facts or gap records of."""
    relayed = frozenset(gap.origin_zone for gap in call.gaps if gap.origin_zone is not None)
    return relayed | (frozenset(entries.distinct("from_zone")) if entries is not None else frozenset())


def _brought(call: PutCall, frame: Frame) -> Fetched:
    frames = [frame] if call.last >= call.first else []
    return Fetched(
        call.log_id,
        call.first,
        call.last + 1,
        b"",
        frames,
        [gap for gap in call.gaps if isinstance(gap, GapRecord)],
        served_at_unix_ms=call.served_at_unix_ms,
        gap_sets=[gap for gap in call.gaps if isinstance(gap, GapSet)],
    )


@runtime_checkable
class Historical(Protocol):
    """A buffer with a hash chain, which can show its past; a storage need not have one."""

    async def history(self, heads: Sequence[bytes] = ()) -> LogHistory:
        """Give what was kept of what was removed, and where the log had some chain heads."""


async def gather(parts: NodeContext, row: Identity, stream: str, buffer: Buffer, heads: Sequence[bytes]) -> LogEvidence:
    """Gather the evidence of one log for one caller."""
    cursors = [
        state
        for state in await parts.storage.cursors.consumers()
        if (state.spec.stream, state.spec.buffer) == (stream, buffer)
        and row.owns_consumer(state.spec.name, stream, buffer)
    ]
    found = await parts.buffer(stream, buffer)
    is_ours = row.zone == parts.settings.zone
    gaps = [gap for gap in await found.gap_sets() if is_ours or _concerns(gap, row, stream, buffer)]
    history = await found.history(heads) if isinstance(found, Historical) else LogHistory()
    stats = await found.stats()
    return LogEvidence(stats.log_id, stats.start, stats.end, stats.chain_head, gaps, history, cursors)


def _concerns(gap: GapSet, row: Identity, stream: str, buffer: Buffer) -> bool:
    whose = gap.detail.partition(":")[0]
    if gap.reason == GapReason.RETIRED:
        return row.owns_consumer(whose, stream, buffer)
    return gap.reason != GapReason.QUARANTINED or whose == speaker_of(row)


FETCH_FACTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """Facts that were checked and sealed for one caller and wait to be made durable in a buffer."""

    stream: str
    facts: FactBatch
    store: StoreBuffer
    hasher: str
    ids_derived: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read frame by frame: what it belongs to, and its frames; a gate that is held ends them."""

    head: Fetched
    frames: AsyncIterator[Frame]


class NodeService:
    """The operations of producers, consumers, peers and pipelines, whatever carries the requests.

    Every call names its caller; whether he may is decided here, and only `bsfg.errors.BsfgError` is raised.
    """

    def __init__(self, parts: NodeContext) -> None:
        self._parts = parts
        self._putting = Putting(parts)
        self._objects = Objects(parts)
        self._given = GivenGaps()

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Give the name of a caller who may do one of these things at all."""
        return self._parts.guard.admit(caller, actions)

    def known(self, caller: Caller) -> str | None:
        """Give the name of a caller whose row is in force."""
        return self._parts.guard.known(caller)

    # Append.

    async def prepare(self, caller: Caller, stream: str, facts: FactBatch | bytes) -> Prepared:
        """Decide whether the caller may append these facts, and seal them."""
        metrics, settings = self._parts.metrics, self._parts.settings
        try:
            # The role first: a stranger learns nothing of streams and costs no decoding.
            row = self._check(caller, Request(Action.APPEND, stream))
            lane = settings.stream(stream)
            metrics.append_asked(stream)
            rules = AppendRules(ids=settings.ids, hasher=settings.hasher, limits=lane.fact_limits)
            sealed = await prepare(facts, rules)
            from_zones, to_zones = (frozenset(sealed.distinct(name)) for name in ("from_zone", "to_zone"))
            # The rest of the question was answered above; it is asked again only to say what is wrong.
            if not speaks_for(row, from_zones, to_zones):
                self._check(caller, Request(Action.APPEND, stream, from_zones=from_zones, to_zones=to_zones))
            keys = settings.signing
            if keys.concern(from_zones):
                await self._verify(keys, sealed, stream)
            if sealed.names_artifacts:
                sealed = await self._objects.require(sealed)
            # The first append opens the buffer; it must not be in the commit, where a later frame could pass by.
            store = await self._parts.store(stream)
        except BsfgError as error:
            self._append_failed(stream, error)
            raise
        return Prepared(stream, sealed, store, settings.hasher.name, settings.ids.strategy != IdStrategy.EXPLICIT)

    async def _verify(self, keys: TrustedKeys, facts: FactBatch, stream: str) -> None:
        await by_size(len(facts) * SIGNATURE_WEIGHT_BYTES, keys.check, facts, stream)

    def commit(self, prepared: Prepared) -> Awaitable[AppendOutcome]:
        """Make prepared facts durable."""
        started = time.perf_counter()
        parts, stream = self._parts, prepared.stream
        try:
            window = parts.settings.stream(stream).plausibility
            # The embedded log gives a future; where it is a coroutine this makes a task of it.
            receipt = asyncio.ensure_future(commit(prepared.store, prepared.facts, clock=parts.clock, window=window))
        except BsfgError as error:
            self._append_failed(stream, error)
            raise
        # Counted by itself: it is stored also when nobody waits for the answer any more.
        receipt.add_done_callback(partial(self._append_done, stream, started))
        return _Outcome(prepared, receipt)

    def _append_done(self, stream: str, started: float, done: asyncio.Future[Receipt]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._parts.metrics.appended(stream, done.result(), time.perf_counter() - started)
        elif isinstance(error, BsfgError):
            self._append_failed(stream, error)

    def _append_failed(self, stream: str, error: BsfgError) -> None:
        known = stream if stream in self._parts.settings.streams else "unknown"
        self._parts.metrics.append_failures.labels(known, error.code).inc()

    # Fetch and read.

    async def fetch(
        self, caller: Caller, consumer: str, request: FetchRequest, carry_only: frozenset[str] | None = None
    ) -> Fetched:
        """Give what follows the last confirmed offset of a durable consumer."""
        return (await self._fetched(caller, consumer, request, carry_only))[1]

    async def fetch_frames(
        self, caller: Caller, consumer: str, request: FetchRequest, carry_only: frozenset[str] | None = None
    ) -> Reading:
        """Fetch, and give the frames one by one."""
        row, fetched = await self._fetched(caller, consumer, request, carry_only)
        return Reading(fetched, self._while_open(row, _each(fetched.frames)))

    async def _fetched(
        self, caller: Caller, consumer: str, request: FetchRequest, carry_only: frozenset[str] | None
    ) -> tuple[Identity, Fetched]:
        parts = self._parts
        row, state, buffer = await self._consumer(caller, Action.FETCH, consumer)
        spec = state.spec
        asked = Request(Action.FETCH, spec.stream, spec.buffer, consumer=consumer)
        carriage = self._carriages(caller, asked, carry_only, request.filter)
        wanted = replace(
            request,
            max_facts=min(request.max_facts, FETCH_FACTS_MAX),
            wait_seconds=min(request.wait_seconds, parts.settings.limits.fetch_wait_max_seconds),
        )
        parts.links.instances.came(consumer, request.instance, caller.address, parts.clock.monotonic_ms())
        with parts.links.fetching(consumer):
            fetched = await serve(
                buffer,
                parts.storage.cursors,
                consumer,
                wanted,
                carriage=carriage,
                given=self._given,
                clock=parts.steady,
                room=caller.room,
            )
        # The gate may have been closed, or the right taken away, while this one waited.
        carriage()
        facts = sum(len(frame.entries) for frame in fetched.frames if frame.entries is not None)
        parts.metrics.served(spec.stream, spec.buffer, facts)
        parts.links.fetched(consumer, fetched.end - fetched.start)
        return row, replace(fetched, stream=spec.stream)

    async def read_offsets(
        self,
        caller: Caller,
        stream: str,
        buffer: Buffer,
        first: int,
        end: int | None,
        request: FetchRequest,
        carry_only: frozenset[str] | None = None,
    ) -> Reading:
        """Read a range of offsets; of the request count the most facts in a frame, the filter and the sets."""
        row = self._reader(caller, stream, buffer)
        found = await self._parts.buffer(stream, buffer)
        stats = await found.stats()
        end = stats.end if end is None else min(end, stats.end)
        if first < 0 or end < first:
            raise InvalidArgument(f"{first} to {end} is not a range below the end {stats.end}", end=stats.end)
        carriage = self._carriages(caller, Request(Action.READ, stream, buffer), carry_only, request.filter)
        frames = serve_range(found, first, end, max_facts=request.max_facts, carriage=carriage, sets=request.sets)
        return Reading(self._head(stream, stats, first), self._while_open(row, frames))

    async def read_times(
        self,
        caller: Caller,
        stream: str,
        buffer: Buffer,
        start_unix_ms: int,
        end_unix_ms: int,
        request: FetchRequest,
        carry_only: frozenset[str] | None = None,
    ) -> Reading:
        """Read what became durable in a span of time, likewise."""
        row = self._reader(caller, stream, buffer)
        found = await self._parts.buffer(stream, buffer)
        if start_unix_ms < 0 or end_unix_ms < start_unix_ms:
            raise InvalidArgument(f"{start_unix_ms} to {end_unix_ms} is not a span of time")
        stats = await found.stats()
        first, end = await offsets_of_span(found, start_unix_ms, end_unix_ms)
        carriage = self._carriages(caller, Request(Action.READ, stream, buffer), carry_only, request.filter)
        frames = serve_range(found, first, end, max_facts=request.max_facts, carriage=carriage, sets=request.sets)
        return Reading(self._head(stream, stats, first), self._while_open(row, frames))

    def _head(self, stream: str, stats: BufferStats, first: int) -> Fetched:
        now_unix_ms = self._parts.steady.now_unix_ms()
        history = (stats.log_id, first, stats.end, stats.chain_head)
        return Fetched(*history, served_at_unix_ms=now_unix_ms, stream=stream)

    async def get(self, caller: Caller, stream: str, key: Key, buffer: Buffer) -> Entry:
        """Give the entry of a key."""
        row = self._reader(caller, stream, buffer)
        entry = await (await self._parts.buffer(stream, buffer)).get(key)
        served = self._parts.served(row)
        if entry is None or (served and not served.fits(entry.message)):
            raise FactNotFound(f"{key.message_id!r} of {key.from_zone!r} is not retained in {stream}")
        return entry

    async def evidence(self, caller: Caller, stream: str, buffer: Buffer, heads: Sequence[bytes]) -> LogEvidence:
        """Tell what a log shows of itself."""
        row = self._reader(caller, stream, buffer)
        return await gather(self._parts, row, stream, buffer, heads)

    # Confirm.

    async def confirm(
        self, caller: Caller, consumer: str, confirmation: Confirmation, refusals: Sequence[Refusal] = ()
    ) -> int:
        """Record a confirmation."""
        parts = self._parts
        row, state, buffer = await self._consumer(caller, Action.CONFIRM, consumer)
        clock, peer = parts.clock, speaker_of(row)
        advanced_to = await confirm_receipt(
            buffer, parts.storage.cursors, consumer, confirmation, refusals, clock=clock, peer=peer
        )
        self._given.confirm(consumer, advanced_to)
        parts.metrics.confirmed(state.spec.stream, state.spec.buffer, consumer, advanced_to)
        return advanced_to

    # What the zone's own pipeline brings, and artifacts.

    async def put(self, caller: Caller, call: PutCall) -> PutOutcome:
        """Put what a link brought into the forward buffer."""
        return await self._putting.put(caller, call)

    async def put_object(self, caller: Caller, info: ObjectInfo, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Store an artifact."""
        return await self._objects.put(caller, info, chunks)

    async def get_object(
        self, caller: Caller, bucket: str, key: str, digest: str | None = None, offset: int = 0
    ) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
        """Give an artifact and its bytes, those from an offset on."""
        return await self._objects.get(caller, bucket, key, digest, offset)

    # What the operations share.

    def _check(self, caller: Caller, request: Request) -> Identity:
        return self._parts.guard.check(caller, request)

    def _reader(self, caller: Caller, stream: str, buffer: Buffer) -> Identity:
        """Give the identity of a caller who may read a buffer and to whose zone no gate is held."""
        row = self._check(caller, Request(Action.READ, stream, buffer))
        self._parts.links.check_serving(row.zone)
        return row

    async def _while_open(self, row: Identity, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
        """Give frames until an operator holds the gate to who takes them, however slowly he does."""
        async for frame in frames:
            self._parts.links.check_serving(row.zone)
            yield frame

    async def _consumer(
        self, caller: Caller, action: Action, consumer: str
    ) -> tuple[Identity, ConsumerState, StoreBuffer | ForwardBuffer]:
        """Give a consumer and its buffer to a caller who may act as it, and to whose zone no gate is held."""
        try:
            state = await self._parts.storage.cursors.consumer(consumer)
        except UnknownConsumer:
            # Refuse whoever could not act as this consumer if it were there: its absence is none of his business.
            guard, streams = self._parts.guard, self._parts.settings.streams
            requests = [Request(action, stream, buffer, consumer=consumer) for stream in streams for buffer in Buffer]
            if not any(guard.allows(caller, request) for request in requests):
                guard.check(caller, requests[0])
            raise
        spec = state.spec
        row = self._check(caller, Request(action, spec.stream, spec.buffer, consumer=consumer))
        self._parts.links.check_serving(row.zone)
        return row, state, await self._parts.buffer(spec.stream, spec.buffer)

    def _carriages(
        self, caller: Caller, request: Request, carry_only: frozenset[str] | None, asked: FactFilter
    ) -> Carriages:
        """Give what tells what a caller is served at each moment, as long as he may ask for it.

        A peer never gets back what its own zone said, and no zone gets what is not for it. Somebody may wait or read
        for long, and another configuration counts for him, too.
        """

        def carriage() -> Carriage:
            row = self._check(caller, request)
            self._parts.links.check_serving(row.zone)
            return Carriage(carry_only, row.zone if is_peer(row) else None, self._parts.served(row), asked)

        return carriage


async def _each(frames: Sequence[Frame]) -> AsyncIterator[Frame]:
    for frame in frames:
        yield frame


class _Outcome:
    """The outcome of an append that is under way; it may be left alone, as a coroutine may not."""

    __slots__ = ("_prepared", "_receipt")

    def __init__(self, prepared: Prepared, receipt: asyncio.Future[Receipt]) -> None:
        self._prepared, self._receipt = prepared, receipt

    def __await__(self) -> Generator[Any, None, AppendOutcome]:
        # A task must not end with who waits for it; a future of the log is only a question.
        receipt = asyncio.shield(self._receipt) if isinstance(self._receipt, asyncio.Task) else self._receipt
        prepared = self._prepared
        return AppendOutcome(prepared.facts, (yield from receipt.__await__()), prepared.hasher)
