"""Two zones, both directions, a network that drops, repeats and reorders, and processes that die at any step.

Everything is drawn from one seed, so a failing campaign can be run again by its number alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.journey.consuming import consume_once
from tests.journey.zones import STREAM, Backend, Zone, append

from bsfg.errors import BsfgError, PeerUnreachable, StorageClosed
from bsfg.fact import Entry, Message
from bsfg.gate import Mode
from bsfg.journey.confirm import confirm_receipt
from bsfg.journey.link import Carriage, Fetched, FetchRequest, Refusal, SessionMemory
from bsfg.journey.pull import Flow
from bsfg.journey.receive import LinkRules, PullProgress
from bsfg.journey.recover import recover
from bsfg.journey.serve import serve
from bsfg.journey.truncate import truncate
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Result
from bsfg.retention import DAY_SECONDS, Policy
from bsfg.testing.facts import altered, messages

T = TypeVar("T")

ZONES = ("plant", "enterprise")
APP = "app"
LEAVES_AT_ONCE = Policy(retention_seconds=0, max_age_seconds=365 * DAY_SECONDS, key_horizon_seconds=365 * DAY_SECONDS)


class DiedError(Exception):
    """The process of a zone died at this step."""


class Fragile:
    """Stands for an object whose process may die right before or right after any of its methods."""

    def __init__(self, target: object, random: Random, chance: float) -> None:
        self._target, self._random, self._chance = target, random, chance

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._wrapped(value) if inspect.iscoroutinefunction(value) else value

    def _wrapped(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self._perhaps_die()
            result = await method(*arguments, **named)
            self._perhaps_die()
            return result

        return call

    def _perhaps_die(self) -> None:
        if self._random.random() < self._chance:
            raise DiedError


@dataclass
class Weather:
    """How bad things are; all zero when the campaign heals."""

    dies: float = 0.02
    lost: float = 0.1
    repeated: float = 0.1
    late: float = 0.1
    handler_fails: float = 0.1


CALM = Weather(0, 0, 0, 0, 0)


@dataclass
class Direction:
    """Facts of one zone on their way to the other, with the application that reads them there."""

    campaign: Campaign
    sender: Zone
    receiver: Zone
    acknowledged: dict[int, str] = field(default_factory=dict)
    waiting: list[Message] = field(default_factory=list)
    produced: int = 0
    handled: list[tuple[int, str]] = field(default_factory=list)
    memory: SessionMemory = field(default_factory=SessionMemory)
    past: list[Confirmation] = field(default_factory=list)
    flow: Flow | None = None

    @property
    def zone(self) -> str:
        """The sender's zone."""
        return self.sender.name

    @property
    def consumer(self) -> str:
        """The receiver's name at the sender."""
        return f"{self.receiver.name}-receiver"

    async def prepare(self) -> None:
        """Create the consumers."""
        await self.sender.store()
        await (await self.sender.storage()).cursors.create(ConsumerSpec(self.consumer, STREAM))
        await self.receiver.forward()
        await (await self.receiver.storage()).cursors.create(ConsumerSpec(APP, STREAM, Buffer.FORWARD))

    async def produce(self) -> None:
        """Append new facts with some repeats and impostors among them, until the zone acknowledges them."""
        random = self.campaign.random
        if not self.waiting:
            count = random.randrange(1, 12)
            self.waiting = messages(count, first=self.produced, from_zone=self.zone, seed=len(self.zone))
            self.produced += count
        again = messages(2, first=random.randrange(self.produced), from_zone=self.zone, seed=len(self.zone))
        old = [fact for fact in again if fact.envelope.message_id in set(self.acknowledged.values())]
        batch = [*self.waiting, *old, *altered(old)]
        store = self.campaign.fragile(await self.sender.store())
        outcome = await append(store, batch, clock=self.sender.clock)
        for each in outcome.results()[: len(self.waiting)]:
            assert each.result in (Result.INSERTED, Result.ALREADY_EXISTS)
            assert self.acknowledged.setdefault(each.offset, each.message_id) == each.message_id
        assert outcome.receipt.results[len(self.waiting) + len(old) :].tolist() == [Result.CONFLICT] * len(old)
        self.waiting = []

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Carry a fetch over the network; it may be served twice."""
        await self._deliver_late()

        async def call() -> Fetched:
            store = self.campaign.fragile(await self.sender.store())
            cursors = self.campaign.fragile((await self.sender.storage()).cursors)
            carriage = Carriage(receiver_zone=self.receiver.name)
            return await serve(store, cursors, self.consumer, request, carriage=carriage, clock=self.sender.clock)

        return await self._over_network(call)

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Carry a confirmation over the network; an old one may arrive again after newer ones."""
        await self._deliver_late()
        self.past.append(confirmation)
        return await self._over_network(lambda: self._confirm(confirmation, refusals))

    async def pull(self) -> None:
        """Make one turn of the receiver."""
        random = self.campaign.random
        request = FetchRequest(max_facts=random.randrange(1, 30), max_bytes=random.randrange(1, 20_000))
        progress = await self._turn(self.campaign.fragile(await self.receiver.forward()), request)
        assert progress.held is None, progress.held
        assert progress.refetch_at is None
        assert progress.refused == ()

    async def _turn(self, forward: Any, request: FetchRequest) -> PullProgress:
        memory, clock = self.campaign.fragile(self.memory), self.receiver.clock
        rules = LinkRules(self.receiver.name, frozenset({self.zone}))
        if self.flow is None:
            self.flow = Flow(self, memory, rules, clock=clock, confirm_every_seconds=0.0)
        try:
            progress = await self.flow.turn(forward, request)
            settles = not self.campaign.flowing or self.campaign.random.random() < 0.2
            if self.flow is not None and (settles or self.campaign.weather is CALM):
                await self.flow.confirmed()
        except asyncio.CancelledError:
            raise PeerUnreachable("this process died meanwhile, because another of its tasks did") from None
        finally:
            if not self.campaign.flowing:
                self.died()
        return progress

    def died(self) -> None:
        """Let go what the receiver's process had under way."""
        if self.flow is not None:
            self.flow.reset()
            self.flow = None

    async def consume(self) -> None:
        """Let the application take what arrived; it remembers everything, also what it was given twice."""
        random, weather = self.campaign.random, self.campaign.weather

        async def handle(entry: Entry) -> None:
            if random.random() < weather.handler_fails:
                raise RuntimeError("the application cannot take this now")
            self.handled.append((entry.offset, entry.message.envelope.message_id or ""))

        cursors = self.campaign.fragile((await self.receiver.storage()).cursors)
        forward = self.campaign.fragile(await self.receiver.forward())
        await consume_once(forward, cursors, APP, handle, max_facts=random.randrange(1, 40))

    async def let_go(self) -> None:
        """Truncate at both ends, the link open or not."""
        mode = self.campaign.random.choice(list(Mode))
        store = await self.sender.store()
        await truncate(store, (await self.sender.storage()).cursors, {self.consumer: mode})
        await truncate(await self.receiver.forward(), (await self.receiver.storage()).cursors, {})
        start = (await store.stats()).start
        assert start <= await store.frontier() + 1
        seen_or_there = {id for _, id in self.handled} | set(await self.receiver.received_ids())
        assert {id for offset, id in self.acknowledged.items() if offset < start} <= seen_or_there

    async def check(self) -> None:
        """Hold what the application saw against what the producer was told: nothing lost, twice or out of order."""
        said = [id for _, id in sorted(self.acknowledged.items())]
        assert sorted(self.acknowledged) == list(range(len(said)))
        first_sight = dict(self.handled)
        assert [id for _, id in sorted(first_sight.items())] == said
        assert len(set(self.handled)) == len(first_sight) == len(said), "one offset showed two facts"
        order = list(dict.fromkeys(offset for offset, _ in self.handled))
        assert order == sorted(order), "an entry was overtaken"
        assert await self.sender.committed(self.consumer) == len(said) - 1
        assert (await (await self.receiver.forward()).stats()).end == len(said)
        assert await self.receiver.forward_gaps() == []
        assert await (await self.receiver.forward()).quarantine() == []

    async def _confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        store = self.campaign.fragile(await self.sender.store())
        cursors = self.campaign.fragile((await self.sender.storage()).cursors)
        return await confirm_receipt(
            store, cursors, self.consumer, confirmation, refusals, clock=self.sender.clock, peer=self.receiver.name
        )

    async def _over_network(self, call: Callable[[], Awaitable[T]]) -> T:
        random, weather = self.campaign.random, self.campaign.weather
        if random.random() < weather.lost:
            raise PeerUnreachable("the call got lost")
        try:
            result = await call()
            if random.random() < weather.repeated:
                result = await call()
        except DiedError:
            await self.campaign.restart(self.sender)
            raise PeerUnreachable("the sender died") from None
        except StorageClosed:
            raise PeerUnreachable("the sender died meanwhile") from None
        if random.random() < weather.lost:
            raise PeerUnreachable("the answer got lost")
        return result

    async def _deliver_late(self) -> None:
        if self.past and self.campaign.random.random() < self.campaign.weather.late:
            late = self.campaign.random.choice(self.past)
            try:
                await self._confirm(late)
            except DiedError:
                await self.campaign.restart(self.sender)


class Campaign:
    """One run: zones, directions, and a random sequence of what happens to them."""

    def __init__(self, seed: int, backend: Backend, path: Path, *, flowing: bool = False) -> None:
        self.random = Random(seed)
        self.flowing = flowing
        self._restarting = asyncio.Lock()
        self._restarts: list[asyncio.Future[None]] = []
        self.weather = Weather()
        self.deaths = 0
        self._memory_survives = self.random.random() < 0.5
        self.zones = [Zone(name, backend(path / name)) for name in ZONES]
        for zone in self.zones:
            capacity_bytes = self.random.choice([60_000, 1 << 40])
            zone.store_policy = LEAVES_AT_ONCE
            zone.forward_policy = replace(LEAVES_AT_ONCE, capacity_bytes=capacity_bytes)
        one, other = self.zones
        self.directions = [Direction(self, one, other), Direction(self, other, one)]

    def fragile(self, target: Any) -> Any:
        """Give the object with the chance to die that the weather has."""
        return Fragile(target, self.random, self.weather.dies)

    async def restart(self, zone: Zone) -> None:
        """Bring a zone's process back, one zone at a time; who is cancelled meanwhile does not stop that."""
        restart = asyncio.ensure_future(self._restart(zone))
        self._restarts.append(restart)
        await asyncio.shield(restart)

    async def _restart(self, zone: Zone) -> None:
        """Bring a zone back: it knows what was durable, and perhaps what it remembered of its peers."""
        async with self._restarting:
            self.deaths += 1
            for direction in self.directions:
                if direction.receiver is zone:
                    direction.died()
            await zone.restart()
            for direction in self.directions:
                if direction.receiver is zone and not self._memory_survives:
                    direction.memory = SessionMemory()
            assert (await recover(await zone.storage(), self._policies(zone))).problems == ()

    async def run(self, steps: int) -> None:
        """Let things happen, then heal, drain and check."""
        for direction in self.directions:
            await direction.prepare()
        for _ in range(steps):
            await self._step()
        self.weather = CALM
        for direction in self.directions:
            direction.died()
        await asyncio.gather(*self._restarts)
        for direction in self.directions:
            await self._drain(direction)
            await direction.check()
            direction.died()
        for zone in self.zones:
            await zone.restart()

    async def _step(self) -> None:
        direction = self.random.choice(self.directions)
        for zone in self.zones:
            zone.clock.advance(self.random.random())
        actions = {
            direction.produce: (4, direction.sender),
            direction.pull: (6, direction.receiver),
            direction.consume: (4, direction.receiver),
            direction.let_go: (1, direction.receiver),
        }
        (action,) = self.random.choices(list(actions), [weight for weight, _ in actions.values()])
        try:
            await action()
        except DiedError:
            await self.restart(actions[action][1])
        except StorageClosed:
            assert self.flowing, "only where several things go on at once can a process die in the middle of this"
        except BsfgError as error:
            assert error.retryable, error

    async def _drain(self, direction: Direction) -> None:
        if direction.waiting:
            await direction.produce()
        while await direction.sender.committed(direction.consumer) < len(direction.acknowledged) - 1:
            await direction.pull()
            await direction.consume()
            await truncate(await direction.receiver.forward(), (await direction.receiver.storage()).cursors, {})
        while await direction.receiver.committed(APP) < len(direction.acknowledged) - 1:
            await direction.consume()

    def _policies(self, zone: Zone) -> dict[tuple[str, Buffer], Policy]:
        assert zone.store_policy is not None
        assert zone.forward_policy is not None
        return {(STREAM, Buffer.STORE): zone.store_policy, (STREAM, Buffer.FORWARD): zone.forward_policy}
