"""Two machines with a production node each, and the network between them, all of it simulated below the node.

A machine has a disk that forgets what was not synced, a clock of its own, and processes that end at any moment. The
node on it is `bsfg.node.node.Node` with everything it starts, except what needs sockets and threads: its listeners,
its dashboard and its audit trail. Calls between nodes go by `Network`, which loses, delays and repeats them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from tests.simulated.clockwork import LIFE, Incarnation, LoopWorkers, VirtualClock, VirtualLoop

from bsfg.config import Link, parse
from bsfg.errors import BsfgError, PeerUnreachable
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.node.administration import Administration
from bsfg.node.metrics import Metrics
from bsfg.node.node import Node
from bsfg.node.service import NodeService
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, Frame, Storage
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.disk import PowerLoss, SimulatedArtifactDisk, SimulatedDisk
from bsfg.wire.peer import PeerNames
from bsfg.wire.service import Caller

T = TypeVar("T")
STREAM = "operational"
ZONES = ("plant", "enterprise")
REQUEST_SECONDS = 15.0
SEGMENT_BYTES, RESERVE_BYTES = 16_384, 32_768

CONFIG = """
[zone]
name = "{zone}"
[listen]
grpc = "127.0.0.1:0"
http = "127.0.0.1:0"
plaintext = true
plaintext_identity = "app"
[tls]
ca = "ca.crt"
certificate = "{zone}-bsfg.crt"
key = "{zone}-bsfg.key"
[storage]
scrub = false
[streams.operational]
retention = "{retention}"
max_age = "{max_age}"
key_horizon = "{key_horizon}"
forward_capacity = "{forward_capacity}"
[identities.app]
zone = "{zone}"
roles = ["producer", "consumer"]
streams = ["*"]
consumers = ["historian"]
[identities.pipeline]
zone = "{zone}"
roles = ["pipeline"]
streams = ["*"]
[identities.operator]
zone = "{zone}"
roles = ["operator"]
streams = ["*"]
[identities.{peer}-bsfg]
zone = "{peer}"
roles = ["peer"]
streams = ["*"]
[links.from-{peer}]
zone = "{peer}"
address = "{peer}.example:9443"
engine = "native"
[serve.{peer}]
"""


def caller(name: str) -> Caller:
    """Somebody with a certificate of this name."""
    return Caller(PeerNames((name,)), address=name)


@dataclass
class Weather:
    """How bad the network is: seconds of delay at most, and the chances of a call to get lost or to come twice."""

    delay_seconds: float = 0.05
    lost: float = 0.0
    repeated: float = 0.0


class Network:
    """Carries calls from machine to machine; ``cut`` are the ways that are interrupted."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.weather = Weather()
        self.cut: set[tuple[str, str]] = set()
        self.surprises: list[str] = []

    async def call(
        self, source: str, target: Machine, work: Callable[[SimulatedNode], Awaitable[T]], *, repeats: bool = True
    ) -> T:
        """Have a node do something, and bring its answer; what fails may have happened all the same."""
        rng, weather = self.rng, self.weather
        await self._travel(source, target.name)
        answer = self._begin(target, work)
        if repeats and rng.random() < weather.repeated:
            # The second copy takes its time, and comes after whatever was sent since.
            asyncio.get_running_loop().call_later(
                rng.uniform(0, 40), lambda: target.alive and self._begin(target, work)
            )
        try:
            done, _ = await asyncio.wait({answer}, timeout=REQUEST_SECONDS + rng.random())
        except asyncio.CancelledError:
            if rng.random() < 0.5:
                answer.cancel()
            raise
        if not done or answer.cancelled():
            answer.cancel()
            raise PeerUnreachable(f"{target.name} does not answer")
        error = answer.exception()
        if error is not None and not isinstance(error, BsfgError):
            raise PeerUnreachable(f"{target.name} broke the call off")
        await self._travel(target.name, source)
        return answer.result()

    def _begin(self, target: Machine, work: Callable[[SimulatedNode], Awaitable[T]]) -> asyncio.Task[T]:
        """Begin a call at its target; how it ends is looked at also when nobody waits for it."""

        def ended(answer: asyncio.Task[T]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if error is not None and not isinstance(error, BsfgError | PowerLoss):
                self.surprises.append(f"a call at {target.name} ended with {type(error).__name__}: {error}")

        answer = target.begin(work)
        answer.add_done_callback(ended)
        return answer

    async def _travel(self, source: str, target: str) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.weather.delay_seconds))
        if (source, target) in self.cut or self.rng.random() < self.weather.lost:
            await asyncio.sleep(self.rng.uniform(0, 5))
            raise PeerUnreachable(f"{target} cannot be reached from {source}")


@dataclass
class SimulatedClient:
    """What a link calls its sender with, in place of `bsfg.wire.client.BoundaryClient`."""

    network: Network
    source: str
    target: Machine

    async def fetch(self, consumer: str, request: FetchRequest, carry_only: Sequence[str] = ()) -> Fetched:
        """Fetch."""
        only = frozenset(carry_only) or None
        return await self._call(lambda node: node.service.fetch(self._me, consumer, request, only))

    async def confirm(
        self,
        consumer: str,
        confirmation: Confirmation,
        refusals: Sequence[Refusal] = (),
        *,
        again_and_again: bool = False,
    ) -> int:
        """Confirm."""
        return await self._call(lambda node: node.service.confirm(self._me, consumer, confirmation, refusals))

    async def read_offsets(
        self,
        stream: str,
        first: int,
        end: int,
        *,
        buffer: Buffer,
        carry_only: Sequence[str] = (),
        filter: FactFilter = EVERY_FACT,
    ) -> AsyncIterator[Frame]:
        """Read a range, all of it in one answer."""

        async def read(node: SimulatedNode) -> list[Frame]:
            only = frozenset(carry_only) or None
            wanted = FetchRequest(max_facts=1_000, filter=filter)
            reading = await node.service.read_offsets(self._me, stream, buffer, first, end, wanted, only)
            return [frame async for frame in reading.frames]

        for frame in await self._call(read):
            yield frame

    @property
    def _me(self) -> Caller:
        return caller(f"{self.source}-bsfg")

    async def _call(self, work: Callable[[SimulatedNode], Awaitable[T]]) -> T:
        return await self.network.call(self.source, self.target, work)


class SimulatedNode(Node):
    """A node on a simulated machine."""

    def __init__(self, machine: Machine) -> None:
        config = parse(machine.config)
        super().__init__(config, clock=machine.clock, rng=machine.rng)
        self._machine = machine
        self.service: NodeService
        self.administration: Administration

    async def _open_storage(self, metrics: Metrics) -> LogStorage:
        options = LogOptions(reserve_bytes=RESERVE_BYTES, segment_bytes=SEGMENT_BYTES)
        return await LogStorage.open(self._machine.disk, clock=self.clock, options=options, workers=LoopWorkers)

    def _open_state(self, storage: Storage) -> NodeState:
        assert isinstance(storage, LogStorage)
        return NodeState(self._machine.disk, storage.reserve)

    async def _open_artifacts(self, storage: Storage) -> ArtifactFolder:
        return await ArtifactFolder.open(self._machine.artifacts, clock=self.clock)

    def _open_trail(self, reserve: Reserve) -> list[str]:
        return []

    async def _listen(self, watched: object) -> None:
        self.service = NodeService(self.parts)
        self.administration = Administration(self.parts, self._rates, self.alerts.active, list)

    def _follow_files(self, watched: object, begun: object) -> None:
        pass

    def _connect(self, link: Link, watched: object, held: object) -> tuple[Any, None]:
        machine = self._machine
        return SimulatedClient(machine.network, machine.name, machine.others[link.zone]), None


@dataclass
class Machine:
    """A machine: what outlives its processes, and the process that runs on it."""

    name: str
    config: str
    network: Network
    clock: VirtualClock
    rng: Random
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    artifacts: SimulatedArtifactDisk = field(default_factory=SimulatedArtifactDisk)
    others: dict[str, Machine] = field(default_factory=dict)
    life: Incarnation | None = None
    node: SimulatedNode | None = None
    crashes: int = 0

    @property
    def alive(self) -> bool:
        """Whether its node answers."""
        return self.node is not None

    def boot(self) -> asyncio.Task[None]:
        """Start the node in a new process."""
        self.life = Incarnation(f"{self.name}/{self.crashes}")
        return self._loop.create_task(self._boot(self.life), context=self._context(self.life))

    async def _boot(self, life: Incarnation) -> None:
        node = SimulatedNode(self)
        await node.start()
        if life.alive:
            self.node = node

    def begin(self, work: Callable[[SimulatedNode], Awaitable[T]]) -> asyncio.Task[T]:
        """Begin something in the process of the node, or raise `PeerUnreachable`."""
        node, life = self.node, self.life
        if node is None or life is None:
            raise PeerUnreachable(f"{self.name} is down")

        async def run() -> T:
            return await work(node)

        return self._loop.create_task(run(), context=self._context(life))

    def crash(self, *, power: bool) -> None:
        """End the process, by a kill or with the power; the disk is what the next one finds."""
        self.crashes += 1
        self.disk.cut_power()
        self.artifacts.cut_power()
        if self.life is not None:
            self.life.kill()
        self.node = self.life = None
        self.disk = self.disk.crash(self.rng) if power else self.disk.killed()
        self.artifacts = self.artifacts.after_power_loss(self.rng) if power else self.artifacts.after_kill()

    @property
    def _loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop

    def _context(self, life: Incarnation) -> Context:
        context = copy_context()
        context.run(LIFE.set, life)
        return context
