"""One campaign: producers, applications and operators at two nodes, and whatever can happen to them, from one seed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import structlog
from tests.journey.consuming import Enough, LocalConsumer
from tests.simulated.checks import Witness, expect
from tests.simulated.clockwork import VirtualClock, VirtualLoop
from tests.simulated.pipeline import Pipeline
from tests.simulated.world import CONFIG, STREAM, ZONES, Machine, Network, SimulatedNode, Weather, caller

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, PeerUnreachable
from bsfg.fact import Entry, Message
from bsfg.gate import RECEIVER, SENDER, Mode
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.node import upkeep
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Result
from bsfg.spark.replicate import carrying, group, shift
from bsfg.testing.disk import PowerLoss
from bsfg.testing.facts import altered, messages

T = TypeVar("T")
APP = "historian"
HOUR = 3600.0
LOOK_SECONDS = 5.0
"""How often a node looks after itself here: five times as rarely as it does, for the sake of speed."""

CALM = Weather()
SETTLED_WITHIN_SECONDS = HOUR


@dataclass
class Feed:
    """What the SDK's consumer reads from: a node, over the network inside its zone."""

    machine: Machine
    consumer: str = APP

    async def open(self) -> None:
        """Begin."""

    def rewind(self) -> None:
        """Nothing is needed: serving begins at the first unconfirmed entry."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Fetch."""
        return await self._call(lambda node: node.service.fetch(caller("app"), self.consumer, request))

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Confirm."""
        await self._call(lambda node: node.service.confirm(caller("app"), self.consumer, confirmation, refusals))

    async def close(self) -> None:
        """End."""

    async def _call(self, work: Callable[[SimulatedNode], Awaitable[T]]) -> T:
        return await self.machine.network.call(f"app of {self.machine.name}", self.machine, work)


@dataclass
class Producer:
    """Appends facts at one machine until it is told that they are stored, with repeats and impostors among them."""

    machine: Machine
    witness: Witness
    rng: Random
    waiting: list[Message] = field(default_factory=list)
    produced: int = 0

    async def produce(self) -> None:
        """Append some facts, those first that nobody answered for."""
        rng, zone = self.rng, self.machine.name
        if not self.waiting:
            count = rng.randrange(1, 12)
            self.waiting = self._facts(count, self.produced)
            self.produced += count
        known = set(self.witness.acknowledged.values())
        again = self._facts(2, rng.randrange(self.produced))
        old = [fact for fact in again if fact.envelope.message_id in known]
        batch = FactBatch.from_messages([*self.waiting, *old, *altered(old)])

        async def append(node: SimulatedNode) -> Any:
            return await node.service.commit(await node.service.prepare(caller("app"), STREAM, batch))

        outcome = await self.machine.network.call(f"app of {zone}", self.machine, append)
        results = outcome.results()
        for each in results[: len(self.waiting)]:
            expect(each.result in (Result.INSERTED, Result.ALREADY_EXISTS), f"{each.message_id} was {each.result!r}")
            self.witness.told(each.offset, each.message_id)
        self.waiting = []

    def _facts(self, count: int, first: int) -> list[Message]:
        return messages(count, first=first, from_zone=self.machine.name, seed=len(self.machine.name))


class Campaign:
    """Everything of one seed."""

    def __init__(self, seed: int, hours: float, *, pipelines: bool = True) -> None:
        self.seed, self.hours, self.pipelines = seed, hours, pipelines
        self.rng = Random(f"campaign/{seed}")
        self.loop = VirtualLoop(Random(f"threads/{seed}"))
        self.network = Network(Random(f"network/{seed}"))
        self.happened: list[str] = []
        self.over = self.over_and_done = False
        self.loop.set_exception_handler(self._lost)

    # The course of things.

    def run(self) -> Campaign:
        """Let it happen; raises `BrokenError` with the first promise that was broken."""
        with self._surroundings():
            try:
                self.loop.run_until_complete(self._run())
            finally:
                self._end()
        return self

    async def _run(self) -> None:
        self._build()
        for machine in self.machines.values():
            await self._boot(machine)
        jobs = [
            *(self._producing(each) for each in self.producers),
            *(self._consuming(each) for each in self.witnesses),
            *(self._watching(each) for each in self.witnesses),
            *(self._piping(each) for each in self.witnesses if self.pipelines),
            self._trouble(),
        ]
        chores = {asyncio.create_task(job) for job in jobs}
        ending = asyncio.create_task(self._ending())
        while not ending.done():
            done, _ = await asyncio.wait({*chores, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            chores -= done

    async def _ending(self) -> None:
        """Let the weather clear after its time, wait until everything has settled, and check it all."""
        await asyncio.sleep(self.hours * HOUR)
        self.over = True
        self._tell("the weather clears")
        await asyncio.sleep(10 * 60)
        self.network.weather, self.network.cut = CALM, set()
        deadline = self.loop.time() + SETTLED_WITHIN_SECONDS
        while not await self._settled():
            expect(self.loop.time() < deadline, f"not everything arrived within an hour: {await self._standing()}")
            await asyncio.sleep(10)
        for witness in self.witnesses:
            await self._look(witness)
            witness.check_all()
        expect(not self.network.surprises, "; ".join(self.network.surprises[:3]))

    async def _settled(self) -> bool:
        if any(producer.waiting for producer in self.producers) or not all(m.alive for m in self.machines.values()):
            return False
        gates = [view.gate.mode for m in self.machines.values() if m.node for view in m.node.parts.links.gates()]
        return all([await each.is_settled() for each in self.witnesses]) and set(gates) == {Mode.NORMAL}

    async def _standing(self) -> str:
        nodes = [machine.node for machine in self.machines.values() if machine.node is not None]
        gates = [f"{v.link}/{v.side} {v.gate.mode} {v.gate.reason}" for n in nodes for v in n.parts.links.gates()]
        settled = [await each.is_settled() for each in self.witnesses]
        return f"{gates}, settled {settled}, waiting {[len(each.waiting) for each in self.producers]}"

    # Who is there.

    def _build(self) -> None:
        rng = self.rng
        retention, max_age = rng.choice([("2m", "3d"), ("10m", "3d"), ("5m", "20m")])
        self.expires = max_age == "20m"
        self.machines = {}
        for zone, peer in (ZONES, ZONES[::-1]):
            text = CONFIG.format(
                zone=zone,
                peer=peer,
                retention=retention,
                max_age=max_age,
                key_horizon="4d",
                forward_capacity=rng.choice(["1GiB", "1GiB", "60KiB"]),
            )
            clock = VirtualClock(self.loop, rng.uniform(-600, 600))
            self.machines[zone] = Machine(zone, text, self.network, clock, Random(f"{zone}/{self.seed}"))
        for machine in self.machines.values():
            machine.others = self.machines
        one, other = self.machines.values()
        self.witnesses = [Witness(one, other), Witness(other, one)]
        self.producers = [Producer(each.sender, each, Random(f"facts/{self.seed}")) for each in self.witnesses]

    async def _boot(self, machine: Machine) -> None:
        while not machine.alive:
            booting = machine.boot()
            await asyncio.wait({booting})
            if booting.cancelled() or isinstance(booting.exception(), PowerLoss):
                machine.crash(power=True)
                continue
            booting.result()
        spec = ConsumerSpec(APP, STREAM, Buffer.FORWARD)
        with contextlib.suppress(PeerUnreachable):
            creating = machine.begin(lambda node: node.parts.storage.cursors.create(spec))
            await asyncio.wait({creating})

    # What they do.

    async def _producing(self, producer: Producer) -> None:
        busy = self.rng.choice([20.0, 60.0, 240.0])
        while not self.over or producer.waiting:
            await asyncio.sleep(self.rng.expovariate(1 / busy))
            with contextlib.suppress(BsfgError):
                await producer.produce()

    async def _consuming(self, witness: Witness) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(1, 30))
            left = self.rng.randrange(1, 60)

            async def handle(entry: Entry, most: int = left, first: int = len(witness.handled)) -> None:
                if len(witness.handled) - first >= most:
                    raise Enough
                witness.took(entry)

            application = LocalConsumer(Feed(witness.receiver), lambda gap: None)  # type: ignore[arg-type]
            await application.start()
            try:
                await application.run(handle, idle_seconds=0)
            except (BsfgError, Enough):
                pass
            finally:
                with contextlib.suppress(BsfgError):
                    await application.close()

    async def _watching(self, witness: Witness) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(5, 25))
            await self._look(witness)

    async def _look(self, witness: Witness) -> None:
        for machine, look in (
            (witness.sender, witness.look_at_sender),
            (witness.receiver, witness.look_at_receiver),
        ):
            with contextlib.suppress(PeerUnreachable):
                looking = machine.begin(look)
                await asyncio.wait({looking})
                if not looking.cancelled() and not isinstance(looking.exception(), PowerLoss):
                    looking.result()

    async def _piping(self, witness: Witness) -> None:
        """Have a task of the Spark engine take the link now and then, until it is told to end, or dies."""
        machine, peer = witness.receiver, witness.sender.name
        while not self.over:
            await asyncio.sleep(self.rng.expovariate(1 / 300))
            pipeline = Pipeline(machine, peer, self.rng)
            task = pipeline.start()
            self._tell(f"a pipeline begins at {machine.name}")
            await asyncio.wait({task}, timeout=self.rng.uniform(5, 400))
            if self.rng.random() < 0.5:
                pipeline.life.kill()
            pipeline.gone = True
            await asyncio.wait({task}, timeout=60)
            expect(task.done() or not pipeline.life.alive, "a pipeline that is told to end goes on")
            if task.done() and not task.cancelled():
                task.result()
            self._tell(f"the pipeline at {machine.name} {'has ended' if pipeline.life.alive else 'was killed'}")

    # What happens to them.

    async def _trouble(self) -> None:
        troubles = [self._cut, self._storm, self._crash, self._crash, self._hold]
        while not self.over:
            await asyncio.sleep(self.rng.expovariate(1 / 150))
            if not self.over:
                await self.rng.choice(troubles)()

    async def _cut(self) -> None:
        one, other = self.rng.sample(ZONES, 2)
        cut = self.rng.choice([{(one, other)}, {(one, other), (other, one)}])
        seconds = self.rng.choice([5.0, 60.0, 600.0, 2400.0]) * self.rng.random()
        self._tell(f"no way from {' and '.join(' to '.join(each) for each in sorted(cut))} for {seconds:.0f} s")
        self.network.cut = cut
        self.loop.call_later(seconds, lambda: setattr(self.network, "cut", set()))

    async def _storm(self) -> None:
        weather = Weather(self.rng.choice([0.2, 3.0, 14.0]), self.rng.uniform(0, 0.4), self.rng.uniform(0, 0.3))
        seconds = self.rng.uniform(10, 900)
        self._tell(f"{weather} for {seconds:.0f} s")
        self.network.weather = weather
        self.loop.call_later(seconds, lambda: setattr(self.network, "weather", CALM))

    async def _crash(self) -> None:
        """Kill a process or cut its power, now or in the middle of one of its next writes."""
        machine, power = self.machines[self.rng.choice(ZONES)], self.rng.random() < 0.7
        if not machine.alive:
            return
        if self.rng.random() < 0.7:
            disk, life = machine.disk, machine.life
            disk.crash_at(disk.operations + self.rng.randrange(1, 40))
            for _ in range(600):
                if disk.powerless or machine.life is not life:
                    break
                await asyncio.sleep(0.1)
        self._tell(f"{machine.name} {'loses power' if power else 'is killed'}")
        machine.crash(power=power)
        await asyncio.sleep(self.rng.choice([0.1, 10.0, 300.0]) * self.rng.random())
        await self._boot(machine)
        self._tell(f"{machine.name} is back")

    async def _hold(self) -> None:
        """An operator holds a gate for a while."""
        machine = self.machines[self.rng.choice(ZONES)]
        peer = next(name for name in ZONES if name != machine.name)
        link, side = self.rng.choice([(f"from-{peer}", RECEIVER), (peer, SENDER)])
        until_unix_ms = machine.clock.now_unix_ms() + self.rng.randrange(5_000, 400_000)
        self._tell(f"an operator holds {link}/{side} at {machine.name}")
        with contextlib.suppress(BsfgError):
            await self.network.call(
                f"operator of {machine.name}",
                machine,
                lambda node: node.administration.hold_gate(caller("operator"), link, side, "work", until_unix_ms),
            )

    # What surrounds it.

    def _tell(self, text: str) -> None:
        self.happened.append(f"{self.loop.time():10.3f} {text}")

    def _lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what nobody asked after; only what dies with its disk may end so."""
        error = context.get("exception")
        if not self.over_and_done and not isinstance(error, PowerLoss):
            self.network.surprises.append(f"{context['message']}: {error!r}")

    def _end(self) -> None:
        self.over_and_done = True
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(BaseException):
            self.loop.run_until_complete(asyncio.sleep(0.1))
        self.loop.close()

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Keep the logs of the nodes among what happened, and let them look after themselves a little less often."""

        def kept(logger: object, method: str, event: MutableMapping[str, Any]) -> Any:
            self._tell(f"  {event.pop('event')} {event}"[:300])
            raise structlog.DropEvent

        before, look_seconds, time, clock = (
            structlog.get_config(),
            upkeep.LOOK_SECONDS,
            shift.time,
            carrying.SystemClock,
        )
        structlog.configure(processors=[kept], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
        upkeep.LOOK_SECONDS = LOOK_SECONDS
        shift.time = group.time = SimpleNamespace(monotonic=self.loop.time)  # type: ignore[assignment]
        carrying.SystemClock = lambda: VirtualClock(self.loop)  # type: ignore[assignment, return-value]
        try:
            yield
        finally:
            upkeep.LOOK_SECONDS, carrying.SystemClock = look_seconds, clock
            shift.time = group.time = time
            structlog.configure(**before)

    @property
    def virtual_hours(self) -> float:
        """How long it lasted, by its own clock."""
        return self.loop.time() / HOUR

    @property
    def facts(self) -> int:
        """How many facts were acknowledged."""
        return sum(len(each.acknowledged) for each in self.witnesses)

    @property
    def crashes(self) -> int:
        """How often a process ended."""
        return sum(machine.crashes for machine in self.machines.values())
