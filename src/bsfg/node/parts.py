"""What the services of one node share: its storage, its settings, its door, and the counters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from bsfg.clock import JumpGuardedClock
from bsfg.config import Link, PipelineTable, Serve, Stream, ZoneConfig
from bsfg.config.access import Identity
from bsfg.digest import SHA256, Hasher, hasher_named
from bsfg.errors import StorageClosed, StorageUnavailable, StreamUnavailable, UnknownStream
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.journey.artifacts import References
from bsfg.journey.link import PeerMemory, SessionMemory
from bsfg.node.ages import Oldest
from bsfg.node.authorize import Guard
from bsfg.node.links import LinkRegistry
from bsfg.node.metrics import Metrics
from bsfg.node.pipelines import PipelineBoard
from bsfg.node.trail import AuditTrail
from bsfg.ports import ArtifactStore, Buffer, Clock, ForwardBuffer, Storage, StoreBuffer
from bsfg.sealing import EXPLICIT, MessageIds
from bsfg.signatures import NO_KEYS, TrustedKeys
from bsfg.wire.limits import WireLimits

FACT_ROOM_BYTES = 1 << 20
"""What a message may have beside the object of its fact."""


def _message_bytes(stream: Stream) -> int:
    """Give what a message with the largest fact of a stream may have; in JSON bytes take a third more."""
    return stream.max_object_bytes * 3 // 2 + FACT_ROOM_BYTES


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the services go by."""

    zone: str
    streams: Mapping[str, Stream]
    ids: MessageIds = EXPLICIT
    hasher: Hasher = SHA256
    links: Mapping[str, Link] = field(default_factory=dict)
    serve: Mapping[str, Serve] = field(default_factory=dict)
    pipelines: Mapping[str, PipelineTable] = field(default_factory=dict)
    limits: WireLimits = field(default_factory=WireLimits)
    signing: TrustedKeys = NO_KEYS

    @staticmethod
    def of(config: ZoneConfig) -> NodeSettings:
        """Derive the settings from a configuration."""
        limits = config.limits
        message_bytes = max([limits.message_bytes, *map(_message_bytes, config.streams.values())])
        return NodeSettings(
            zone=config.zone.name,
            streams=config.streams,
            ids=config.zone.ids,
            hasher=hasher_named(config.zone.hasher),
            links=config.links,
            serve=config.serve,
            pipelines=config.pipelines,
            signing=config.trusted_keys,
            limits=WireLimits(**{**asdict(limits), "message_bytes": message_bytes}),
        )

    def stream(self, stream: str) -> Stream:
        """Give the settings of a stream, or raise `UnknownStream`."""
        found = self.streams.get(stream)
        if found is None:
            raise UnknownStream(f"there is no stream {stream[:80]!r} here", stream=stream[:80])
        return found


Opened = TypeVar("Opened")
Memories = Callable[[str, str], PeerMemory]
"""Gives the memory of a stream of a link."""


@dataclass(slots=True)
class NodeContext:
    """The parts of a running node."""

    storage: Storage
    settings: NodeSettings
    guard: Guard
    clock: Clock
    links: LinkRegistry
    metrics: Metrics = field(default_factory=Metrics)
    artifacts: ArtifactStore | None = None
    memory: Memories = lambda link, stream: SessionMemory()
    trail: AuditTrail = field(default_factory=AuditTrail)
    steady: JumpGuardedClock = field(init=False)
    oldest: Oldest = field(init=False)
    pipelines: PipelineBoard = field(init=False)
    references: References = field(init=False)
    """Which artifacts the facts of each buffer name: who may read those may read these."""
    scrub: Callable[[], Mapping[str, Any]] | None = None
    """Tells how far the scrub is; None when there is none."""
    configuration: Callable[[], Mapping[str, Any]] | None = None
    """Tells which configuration counts; None when nobody follows its file."""
    reload: Callable[[str], Awaitable[list[str]]] | None = None
    """Takes up what has changed of it, by somebody's wish, and gives the tables that changed."""
    _buffers: dict[tuple[str, Buffer], Any] = field(default_factory=dict)
    """The buffers that are open; one that closed itself stays so, and says it to whoever uses it."""
    unavailable: dict[tuple[str, Buffer], StreamUnavailable] = field(default_factory=dict)
    """The buffers that could not be opened or closed themselves; they are tried again when taken out of here."""

    served_references: dict[FactFilter, References] = field(init=False, default_factory=dict)
    """Likewise, of the facts that a zone may have of them, where it may not have all."""

    def __post_init__(self) -> None:
        self.steady = JumpGuardedClock.begun(self.clock)
        self.oldest = Oldest(self)
        self.pipelines = PipelineBoard(self.clock, self.metrics, self.settings.pipelines)
        self.references = References(getattr(self.artifacts, "references", None))

    def served(self, row: Identity) -> FactFilter:
        """Give which facts somebody may have at all: another zone those that it is served, whoever asks for it."""
        serve = self.settings.serve.get(row.zone)
        return EVERY_FACT if serve is None or row.zone == self.settings.zone else serve.filter

    def references_for(self, row: Identity) -> References:
        """Give which artifacts are named by facts that somebody may have."""
        served = self.served(row)
        return self.served_references.setdefault(served, References(wanted=served)) if served else self.references

    async def store(self, stream: str) -> StoreBuffer:
        """Give the store buffer of a stream."""
        policy = self.settings.stream(stream).store_policy
        return await self._opened(stream, Buffer.STORE, lambda: self.storage.store(stream, policy))

    async def forward(self, stream: str) -> ForwardBuffer:
        """Give the forward buffer of a stream."""
        policy = self.settings.stream(stream).forward_policy
        return await self._opened(stream, Buffer.FORWARD, lambda: self.storage.forward(stream, policy))

    async def _opened(self, stream: str, buffer: Buffer, opening: Callable[[], Awaitable[Opened]]) -> Opened:
        """Open a buffer; one that cannot be opened is alone out of service, whatever the reason."""
        if (known := self.unavailable.get((stream, buffer))) is not None:
            raise StreamUnavailable(known.message, **known.details)
        opened: Opened | None = self._buffers.get((stream, buffer))
        if opened is not None:
            return opened
        try:
            opened = self._buffers[stream, buffer] = await opening()
        except StorageClosed:
            raise
        except Exception as error:
            failure = self.unavailable[stream, buffer] = StreamUnavailable.because(stream, buffer, error)
            raise failure from error
        return opened

    def out_of_service(self, stream: str, buffer: Buffer, closed: StorageClosed) -> None:
        """Take note of a buffer that closed itself; until the node is restarted the others work without it."""
        if isinstance(closed, StorageUnavailable):
            return  # the server is away for all of them, and they go on by themselves
        failure = StreamUnavailable(closed.message, stream=stream, cause=closed.code)
        self.unavailable.setdefault((stream, buffer), failure)

    async def buffer(self, stream: str, buffer: Buffer) -> StoreBuffer | ForwardBuffer:
        """Give one of the two buffers of a stream."""
        return await (self.store(stream) if buffer == Buffer.STORE else self.forward(stream))
