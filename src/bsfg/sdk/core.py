"""The engine of a producer, in one event loop: intake, senders, the outbox, and how they start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, InvalidArgument, StorageClosed, StorageUnreadable, unforeseen
from bsfg.fact import SHA256_NAME, ArtifactRef
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.futures import Outcome
from bsfg.sdk.intake import BatchLimits, OpenBatch, Packed, Packer, ProducerIntake, StreamIntake
from bsfg.sdk.outbox import OnRefused, Outbox, OutboxLane
from bsfg.sdk.sender import NodeLink, Sender, SendOptions, Shipment
from bsfg.sdk.signing import Signer
from bsfg.sealing import EXPLICIT, MessageIds
from bsfg.wire.service import ObjectInfo

GROUP_BATCHES, GROUP_BYTES = 64, 4 << 20
"""At most so much shares a sync of the outbox."""

_FULL_PAUSE_SECONDS = 0.25


class Straight:
    """A source of shipments that takes them from the intake; nothing is kept on disk."""

    def __init__(self, intake: ProducerIntake, lane: StreamIntake, packer: Packer) -> None:
        self._intake, self._lane, self._packer = intake, lane, packer

    async def next(self) -> Shipment | None:
        """Give the next shipment that has any fact in it."""
        while (gathering := await self._intake.next(self._lane)) is not None:
            packed = await packed_or_failed(self._packer, gathering, self._lane.stream)
            if packed is None:
                self._intake.finish(gathering.outcome, gathering.size_bytes)
                continue
            shipment = packed.shipment(self._lane.stream)
            shipment.on_over = partial(self._over, packed)
            return shipment
        return None

    def _over(self, packed: Packed, _: Shipment) -> None:
        self._intake.finish(packed.outcome, packed.size_bytes)

    def expire(self, error: BsfgError) -> None:
        """Give up what waited too long without ever being sent."""
        self._intake.expire(self._lane, error)


class Keeper:
    """Moves facts from the intake into the outbox; many batches share a sync."""

    def __init__(
        self,
        intake: ProducerIntake,
        lane: StreamIntake,
        packer: Packer,
        outbox: OutboxLane,
        on_problem: Callable[[BsfgError], None],
    ) -> None:
        self._intake, self._lane, self._packer, self._outbox = intake, lane, packer, outbox
        self._on_problem = on_problem

    async def run(self) -> None:
        """Keep until the producer is closed and everything is in the outbox."""
        while (gathering := await self._intake.next(self._lane)) is not None:
            group, size_bytes = [gathering], gathering.size_bytes
            while len(group) < GROUP_BATCHES and size_bytes < GROUP_BYTES:
                more, _ = self._intake.take(self._lane)
                if more is None:
                    break
                group.append(more)
                size_bytes += more.size_bytes
            packed = [await packed_or_failed(self._packer, each, self._lane.stream) for each in group]
            whole = [each for each in packed if each is not None]
            if whole:
                await self._keep(whole)
            for each in group:
                self._intake.finish(each.outcome, each.size_bytes)

    async def _keep(self, group: list[Packed]) -> None:
        """Keep a group; while the disk or the outbox is full, try again for as long as the facts have time."""
        while group:
            try:
                await self._outbox.keep(group)
            except BsfgError as error:
                self._on_problem(error)
                if error.code not in ("buffer_full", "quarantine_full", "disk_full"):
                    _fail(group, error)
                    return
                now = time.monotonic()
                _fail([each for each in group if each.ends is not None and each.ends <= now], error)
                group = [each for each in group if each.ends is None or each.ends > now]
                await asyncio.sleep(_FULL_PAUSE_SECONDS)
            except Exception as error:
                _fail(group, unforeseen(error, "keeping the facts"))
                return
            else:
                return


def _fail(group: list[Packed], error: BsfgError) -> None:
    for each in group:
        each.outcome.fail(error)


async def packed_or_failed(packer: Packer, gathering: OpenBatch, stream: str) -> Packed | None:
    """Pack a gathering; None when nothing of it can be sent, and its futures have failed."""
    try:
        packed = await packer.pack(gathering, stream)
    except Exception as error:
        # Also what nobody foresaw: the facts must not wait for ever because of it.
        gathering.outcome.fail(unforeseen(error, "packing the facts"))
        return None
    return packed if len(packed.facts) else None


log = logging.getLogger("bsfg.producer")

DEADLINE_SECONDS = 60.0

_CHUNK_BYTES = 1 << 20
_OUTBOX_BATCH_BYTES = 4 << 20
_CLOSE_GRACE_SECONDS = 1.0

Content = bytes | str | os.PathLike[str] | AsyncIterable[bytes]
"""What can be uploaded: bytes, the path of a file, or chunks as they come."""


class ProducerSettings(TypedDict, total=False):
    """The keyword arguments of a producer that `ProducerOptions` describes."""

    linger_ms: float
    max_batch_facts: int
    max_batch_bytes: int
    max_queued_bytes: int
    max_in_flight: int
    deadline_seconds: float | None
    outbox: str | os.PathLike[str] | None
    outbox_capacity_bytes: int
    signer: Signer | None
    ids: MessageIds
    hasher: str
    on_refused: OnRefused | None
    on_problem: Callable[[BsfgError], None] | None


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Everything that can be set on a producer beside where it sends.

    - ``linger_ms``, ``max_batch_facts``, ``max_batch_bytes``: when a batch goes. Waiting for a future sends at once.
    - ``max_queued_bytes``: how much may wait in memory; then ``send`` waits.
    - ``max_in_flight``: batches that are sent before the first is answered. With 1, facts never change their order, not
      even when a full node refuses one batch and takes the next.
    - ``deadline_seconds``: how long a fact is tried before its future fails. Left out, it is 60 without an outbox and
      for ever (``math.inf``) with one. What is in an outbox has no deadline; there it bounds the wait for a full disk.
    - ``outbox``: a folder; facts are durable there before they count as accepted, and survive this process.
    - ``outbox_capacity_bytes``: how large the outbox may grow; then ``send`` waits.
    - ``signer``: signs each fact. It needs the ids and the digests, so a zone that derives ids is described by ``ids``,
      and one that does not seal with SHA-256 by ``hasher``.
    - ``on_refused``: is told what the node refused for good out of the outbox, also what an earlier process had sent.
    - ``on_problem``: is told why facts cannot be sent at the moment, each time that is tried.
    """

    linger_ms: float = 5.0
    max_batch_facts: int = 2_000
    max_batch_bytes: int = 1 << 20
    max_queued_bytes: int = 64 << 20
    max_in_flight: int = 8
    deadline_seconds: float | None = None
    outbox: str | os.PathLike[str] | None = None
    outbox_capacity_bytes: int = 1 << 34
    signer: Signer | None = None
    ids: MessageIds = EXPLICIT
    hasher: str = SHA256_NAME
    on_refused: OnRefused | None = None
    on_problem: Callable[[BsfgError], None] | None = None

    def __post_init__(self) -> None:
        if self.outbox_capacity_bytes < 8 * max(self.max_batch_bytes, _OUTBOX_BATCH_BYTES):
            raise InvalidArgument("an outbox must have room for some batches: allow at least 32 MiB")

    @property
    def deadline(self) -> float | None:
        """How long a fact is tried; None for ever."""
        if self.deadline_seconds is None:
            return DEADLINE_SECONDS if self.outbox is None else None
        return None if self.deadline_seconds == math.inf else self.deadline_seconds

    @property
    def limits(self) -> BatchLimits:
        """When a batch goes, in the form of the intake."""
        return BatchLimits(self.max_batch_facts, self.max_batch_bytes, self.linger_ms / 1000, self.max_queued_bytes)


class ProducerCore:
    """What `Producer` and `AsyncProducer` share; all methods belong to one event loop."""

    def __init__(self, endpoint: Endpoint, options: ProducerOptions) -> None:
        self._options = options
        self._link = NodeLink(endpoint)
        self.intake = ProducerIntake(options.limits, asyncio.get_running_loop(), deadline_seconds=options.deadline)
        self._packer = Packer(options.signer, options.ids, options.hasher)
        self._send = SendOptions(max_in_flight=options.max_in_flight, hold=options.outbox is not None)
        self._outbox: Outbox | None = None
        self._outbox_lanes: dict[str, OutboxLane] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._problem: BsfgError | None = None
        self._closed = False

    async def start(self) -> None:
        """Open the outbox and begin to send what an earlier producer left in it."""
        options = self._options
        self.intake.on_new_lane = self._begin
        if options.outbox is None:
            return
        folder, capacity_bytes = options.outbox, options.outbox_capacity_bytes
        self._outbox = await asyncio.to_thread(lambda: Outbox(folder, capacity_bytes=capacity_bytes))
        try:
            for stream in self._outbox.streams():
                self._start_sender(await self._outbox_lane(stream))
        except BaseException:
            self._outbox.close()
            raise

    # Lanes.

    def _begin(self, lane: StreamIntake) -> None:
        if self._outbox is None:
            source = Straight(self.intake, lane, self._packer)
            sender = Sender(self._link, lane.stream, source, self._send, self._note)
            self._senders[lane.stream] = asyncio.create_task(sender.run())
        else:
            self._keepers.append(asyncio.create_task(self._keep(lane)))

    async def _keep(self, lane: StreamIntake) -> None:
        try:
            outbox = await self._outbox_lane(lane.stream)
        except BsfgError as error:
            # Let everything fail that is sent to a stream whose outbox cannot be opened.
            while (gathering := await self.intake.next(lane)) is not None:
                gathering.outcome.fail(error)
                self.intake.finish(gathering.outcome, gathering.size_bytes)
            return
        self._start_sender(outbox)
        await Keeper(self.intake, lane, self._packer, outbox, self._note).run()

    async def _outbox_lane(self, stream: str) -> OutboxLane:
        outbox, on_refused = self._outbox, self._options.on_refused
        assert outbox is not None
        found = self._outbox_lanes.get(stream)
        if found is None:
            found = await asyncio.to_thread(outbox.lane, stream, on_refused)
            self._outbox_lanes[stream] = found
        return found

    def _start_sender(self, lane: OutboxLane) -> None:
        if lane.stream not in self._senders:
            sender = Sender(self._link, lane.stream, lane, self._send, self._note)
            self._senders[lane.stream] = asyncio.create_task(sender.run())

    def _note(self, error: BsfgError) -> None:
        self._problem = error
        if self._options.on_problem is not None:
            try:
                self._options.on_problem(error)
            except Exception:
                log.exception("the producer's on_problem failed")

    @property
    def problem(self) -> BsfgError | None:
        """What last kept facts from being sent."""
        return self._problem

    # Sending.

    def add_batch(self, stream: str, facts: FactBatch) -> list[Outcome]:
        """Queue a caller's batch."""
        return self.intake.add_batch(stream, facts.pieces()) if len(facts) else []

    async def flush(self) -> None:
        """Send everything now and wait until it is safe: at the node, or in the outbox when there is one."""
        self.intake.hurry_all()
        for outcome in self.intake.live():
            await outcome.until(outcome.is_safe)

    async def drain(self) -> None:
        """Send everything now and wait until the node has answered for all of it, the outbox included."""
        await self.flush()
        for lane in list(self._outbox_lanes.values()):
            await lane.emptied()

    async def upload(
        self, bucket: str, key: str, content: Content, media_type: str = DEFAULT_MEDIA_TYPE
    ) -> ArtifactRef:
        """Upload an artifact and give the reference that a fact needs to name it."""
        file_name = os.path.basename(os.fspath(content)) if isinstance(content, str | os.PathLike) else None
        info = ObjectInfo(bucket, key, media_type, file_name)
        stored = await self._link.client.put_object(info, _chunks(content))
        assert stored.digest is not None
        assert stored.size_bytes is not None
        return ArtifactRef(bucket, key, stored.digest, stored.size_bytes, media_type, file_name)

    # Ending.

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Take nothing more, send what is there, and stop; repeats are harmless."""
        if self._closed:
            return
        self._closed = True
        self.intake.close()
        await _ended(self._keepers, timeout_seconds)
        for lane in self._outbox_lanes.values():
            lane.stop()
        await _ended(self._senders.values(), timeout_seconds if self._outbox is None else _CLOSE_GRACE_SECONDS)
        error = StorageClosed(
            "the producer was closed before the node answered",
            hint="It is unknown whether the fact was stored: send it again with the same id.",
        )
        for lane in self._outbox_lanes.values():
            lane.abandon()
        for outcome in self.intake.live():
            outcome.fail(error)
        await self._link.close()
        if self._outbox is not None:
            await asyncio.to_thread(self._outbox.close)


async def _ended(tasks: Iterable[asyncio.Task[None]], timeout_seconds: float | None) -> None:
    """Wait for tasks, and end those that take too long."""
    running = list(tasks)
    if not running:
        return
    _, late = await asyncio.wait(running, timeout=timeout_seconds)
    for task in late:
        task.cancel()
    for task in late:
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _chunks(content: Content) -> AsyncIterator[bytes]:
    """Give the content of an upload piece by piece."""
    if isinstance(content, bytes):
        yield content
    elif isinstance(content, str | os.PathLike):
        try:
            file = await asyncio.to_thread(Path(content).open, "rb")
            with file:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise StorageUnreadable(f"the content cannot be read: {error.strerror}", hint="Check the path.") from None
    else:
        async for chunk in content:
            yield chunk
