"""Zones in one process: a storage that can crash and come back, and links that call the other side directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import PeerUnreachable
from bsfg.fact import SHA256_NAME, Entry, Message
from bsfg.journey.append import AppendRules, Plausibility, commit, prepare
from bsfg.journey.confirm import confirm_receipt
from bsfg.journey.link import (
    EVERYTHING,
    AppendOutcome,
    Carriage,
    Fetched,
    FetchRequest,
    PeerMemory,
    Refusal,
    SessionMemory,
)
from bsfg.journey.pull import Flow
from bsfg.journey.receive import BeforePut, LinkRules, PullProgress
from bsfg.journey.serve import serve
from bsfg.ports import (
    Buffer,
    Clock,
    Confirmation,
    ConsumerSpec,
    ForwardBuffer,
    GapRecord,
    OriginSpan,
    Storage,
    StoreBuffer,
)
from bsfg.retention import Policy, Removal
from bsfg.sealing import functions_of
from bsfg.stores.log.buffer import LogForwardBuffer, LogStoreBuffer
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.memory import Medium, MemoryStorage
from bsfg.stores.shared.buffer import WriterStep
from bsfg.testing.clock import START_UNIX_MS, FakeClock

STREAM = "operational"

Opener = Callable[[Clock], Awaitable[Storage]]
Backend = Callable[[Path], Opener]


async def append(
    store: StoreBuffer,
    facts: FactBatch | Sequence[Message],
    *,
    clock: Clock,
    rules: AppendRules | None = None,
    window: Plausibility | None = None,
) -> AppendOutcome:
    """Append facts as a node does, which looks for rights, signatures and artifacts between the two halves."""
    batch = facts if isinstance(facts, FactBatch) else FactBatch.from_messages(facts)
    sealed = await prepare(batch, rules or AppendRules())
    hasher = functions_of(sealed)[0] if len(sealed) else SHA256_NAME
    return AppendOutcome(sealed, await commit(store, sealed, clock=clock, window=window), hasher)


def memory_backend(path: Path) -> Opener:
    """Open a storage in memory; what was durable is still there the next time."""
    del path
    medium = Medium()

    async def open_storage(clock: Clock) -> Storage:
        return MemoryStorage(clock=clock, medium=medium)

    return open_storage


def log_backend(path: Path) -> Opener:
    """Open a storage in a folder."""

    async def open_storage(clock: Clock) -> Storage:
        return await LogStorage.open(path, clock=clock)

    return open_storage


def origin_span(zone: str, first: int, count: int) -> OriginSpan:
    """Say that facts come from a zone, at consecutive offsets."""
    return OriginSpan(zone, np.arange(first, first + count), np.full(count, START_UNIX_MS))


async def spoil_keys(buffer: StoreBuffer | ForwardBuffer) -> None:
    """Let everything leave a log in a folder in good order, and the keys that stay of it rot."""
    assert isinstance(buffer, LogStoreBuffer | LogForwardBuffer)
    writer = buffer._writer
    assert isinstance(writer.files, DiskFiles)

    def leave() -> None:
        writer._roll()
        writer.depart(Removal(writer.end), [writer.gather(*pair) for pair in writer._leaving_before(writer.end)])

    await buffer._submit(WriterStep(leave))
    for path in (writer.files.root / writer.folder / "keys").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    writer.keys._cache.clear()


BACKENDS: dict[str, Backend] = {"log": log_backend, "memory": memory_backend}


class Zone:
    """One zone: a name, a clock and a storage with the stream ``operational``."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.name = name
        self.clock = FakeClock()
        self.store_policy: Policy | None = None
        self.forward_policy: Policy | None = None
        self._opener = opener
        self._opening = asyncio.Lock()
        self._storage: Storage | None = None

    async def storage(self) -> Storage:
        """Give the storage, opened when it is not."""
        async with self._opening:
            if self._storage is None:
                self._storage = await self._opener(self.clock)
            return self._storage

    async def store(self) -> StoreBuffer:
        """Give the store buffer."""
        return await (await self.storage()).store(STREAM, self.store_policy)

    async def forward(self) -> ForwardBuffer:
        """Give the forward buffer."""
        return await (await self.storage()).forward(STREAM, self.forward_policy)

    async def restart(self) -> None:
        """Close the storage; the next use opens it again with what was durable."""
        async with self._opening:
            if self._storage is not None:
                await self._storage.close()
            self._storage = None

    async def append(self, messages: Sequence[Message]) -> AppendOutcome:
        """Append messages to the store buffer."""
        return await append(await self.store(), messages, clock=self.clock)

    async def received(self) -> list[Entry]:
        """List the entries of the forward buffer."""
        forward = await self.forward()
        return [e async for frame in forward.replay(0) if frame.entries for e in frame.entries.to_entries()]

    async def received_ids(self) -> list[str | None]:
        """List the message ids in the forward buffer."""
        return [entry.message.envelope.message_id for entry in await self.received()]

    async def forward_gaps(self) -> list[GapRecord]:
        """List the gap records of the forward buffer."""
        return await (await self.forward()).gaps()

    async def committed(self, consumer: str) -> int:
        """Give the frontier of a consumer."""
        return (await (await self.storage()).cursors.checkpoint(consumer)).committed


@dataclass
class DirectLink:
    """A `PeerLink` that calls the sender's steps in the same process; ``up`` tells whether the network works."""

    sender: Zone
    consumer: str
    carriage: Carriage = EVERYTHING
    buffer: Buffer = Buffer.STORE
    up: bool = True
    loses_confirmations: bool = False
    fetches: int = 0
    confirmations: list[Confirmation] = field(default_factory=list)

    @property
    def zone(self) -> str:
        """The sender's zone."""
        return self.sender.name

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Let the sender serve."""
        self._check_up()
        self.fetches += 1
        storage = await self.sender.storage()
        return await serve(
            await self._buffer(),
            storage.cursors,
            self.consumer,
            request,
            carriage=self.carriage,
            clock=self.sender.clock,
        )

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Let the sender take a confirmation."""
        self._check_up()
        if self.loses_confirmations:
            raise PeerUnreachable(f"{self.sender.name} does not answer")
        self.confirmations.append(confirmation)
        storage, clock = await self.sender.storage(), self.sender.clock
        return await confirm_receipt(
            await self._buffer(), storage.cursors, self.consumer, confirmation, refusals, clock=clock
        )

    async def _buffer(self) -> StoreBuffer | ForwardBuffer:
        return await (self.sender.store() if self.buffer == Buffer.STORE else self.sender.forward())

    def _check_up(self) -> None:
        if not self.up:
            raise PeerUnreachable(f"{self.sender.name} does not answer")


@dataclass
class Inbound:
    """The receiving end of a link: who receives, by which rules, and what it remembers."""

    receiver: Zone
    link: DirectLink
    rules: LinkRules
    memory: PeerMemory = field(default_factory=SessionMemory)
    request: FetchRequest = field(default_factory=FetchRequest)
    before_put: BeforePut | None = None
    _flow: Flow | None = None
    _made_for: tuple[object, ...] = ()

    async def pull(self, *, clock_trusted: bool = True) -> PullProgress:
        """Make one turn as the native engine does, and wait until the sender has heard of it."""
        flow, forward = self.flow(), await self.receiver.forward()
        progress = await flow.turn(forward, self.request, clock_trusted=clock_trusted)
        try:
            await flow.confirmed()
        except BaseException:
            flow.reset()
            raise
        return replace(progress, acknowledged=flow.acknowledged) if progress.moved else progress

    def begin_anew(self) -> None:
        """Forget everything but what is remembered, as after a call that failed."""
        self.flow().reset()

    def flow(self) -> Flow:
        """Give the turns of this link; who changes what it is made of, or what it asks for, begins anew."""
        made_for = (self.link, self.memory, self.rules, self.before_put, self.request)
        if self._flow is None or self._made_for != made_for:
            if self._flow is not None:
                self._flow.reset()
            clock = self.receiver.clock
            self._flow = Flow(
                self.link,
                self.memory,
                self.rules,
                clock=clock,
                before_put=self.before_put,
                confirm_every_seconds=0.0,
            )
            self._made_for = made_for
        return self._flow

    async def pull_all(self) -> list[PullProgress]:
        """Make turns until nothing is left or the link stands still."""
        turns = [await self.pull()]
        while turns[-1].moved and turns[-1].backlog:
            turns.append(await self.pull())
        return turns


async def connect(
    sender: Zone,
    receiver: Zone,
    *,
    relayed: Sequence[str] = (),
    carriage: Carriage | None = None,
    buffer: Buffer = Buffer.STORE,
    max_age_seconds: float | None = None,
) -> Inbound:
    """Create the consumer at the sender and give the receiver's end of the link."""
    consumer = f"{receiver.name}-receiver-{buffer}"
    await (sender.store() if buffer == Buffer.STORE else sender.forward())
    await (await sender.storage()).cursors.create(ConsumerSpec(consumer, STREAM, buffer))
    carriage = carriage or Carriage(receiver_zone=receiver.name)
    rules = LinkRules(receiver.name, frozenset({sender.name, *relayed}), max_age_seconds)
    return Inbound(receiver, DirectLink(sender, consumer, carriage, buffer), rules)
