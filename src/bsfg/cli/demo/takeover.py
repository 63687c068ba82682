"""The director of `bsfg demo --ha`: a zone of two nodes, of which the active one is killed, then paused and resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

import orjson

from bsfg.cli.demo import referee
from bsfg.cli.demo.crew import Crew, killed
from bsfg.cli.demo.director import CLOCK, DemoDirector
from bsfg.cli.demo.referee import STORED, LateFacts, Takeover
from bsfg.cli.demo.server import DemoServer
from bsfg.cli.demo.site import EVENTS, DemoSite
from bsfg.cli.demo.stage import DemoStage, DemoStep, NodeSeen
from bsfg.errors import BsfgError, StorageUnavailable
from bsfg.fact import Envelope, Fact, Message
from bsfg.ports import Buffer
from bsfg.wire.client import BoundaryClient
from bsfg.wording import counted

LATE_FACTS = 5
"""How many facts a paused node is handed, each in a call of its own."""

LATE_ID = "handed-to-a-paused-node/{}"
LATE_SECONDS = 120.0
BETWEEN_SHARE, AFTER_SHARE = 0.2, 0.3


def steps_of(site: DemoSite) -> list[DemoStep]:
    """Give the story, step by step."""
    joined = "A Spark pipeline in each zone begins to pull" if site.spark else "The nodes begin to pull"
    return [
        DemoStep("start", "Two zones start; Plant A has two nodes on one storage server"),
        DemoStep("join", joined),
        DemoStep("normal", "Normal: facts cross as they come"),
        DemoStep("kill", "The active node of Plant A is killed (SIGKILL)"),
        DemoStep("restart", "It is started again"),
        DemoStep("pause", "The active node is paused (SIGSTOP), with facts on their way to it"),
        DemoStep("resume", "It is resumed, and takes itself for active"),
        DemoStep("after", "Normal again"),
        DemoStep("settle", "The producers pause, the last facts arrive"),
        DemoStep("audit", "Audit: both ends of every link, fact by fact"),
    ]


class TakeoverDirector(DemoDirector):
    """One performance with a zone of two nodes."""

    def __init__(self, site: DemoSite, stage: DemoStage, crew: Crew, seconds: float) -> None:
        super().__init__(site, stage, crew, seconds)
        self._takeovers: list[Takeover] = []
        self._late: LateFacts | None = None

    async def _prepare(self) -> None:
        await super()._prepare()
        self.stage.note = "the storage server"
        process = await self.crew.start("server", "bsfg.cli.demo.server")
        assert process.stdout is not None
        told = await process.stdout.readline()
        if not told:
            raise StorageUnavailable(f"the storage server does not start: {self.crew.last_words('server')}")
        self.site.plant.server = DemoServer(**orjson.loads(told))

    async def _start_nodes(self) -> None:
        # The first one that opens the storage is active.
        await asyncio.gather(*(self.start_node(zone.nodes[0]) for zone in self.site.zones))
        await self.launch_node(self._nodes_seen[1].node)

    async def _disturb(self) -> None:
        plant = self.stage.zones[self.site.plant.name]
        await self.stage.until(lambda: self._roles() == [False, True], "one node to be active, the other to stand by")
        self._times.cut = CLOCK.now_unix_ms()
        await self._kill()
        await self.stage.during(BETWEEN_SHARE * self.seconds)
        await self._pause()
        await self.stage.until(lambda: plant.alive and self._is_normal(), "every gate to be normal")
        self._times.after_from = CLOCK.now_unix_ms()
        with self.stage.step("after") as step:
            await self._cross(AFTER_SHARE * self.seconds, step)

    # The two takeovers.

    async def _kill(self) -> None:
        plant, producing = self.site.plant, self.stage.producing[self.site.plant.name]
        with self.stage.step("kill") as step:
            old, new = self._pair()
            process = self._nodes.pop(old.node.name)
            old.pid, began = 0, time.monotonic()
            await killed(process)
            told = dict(producing.told)
            await self._taken_over("killed", new, began, step)
            absent = await asyncio.to_thread(referee.missing, plant, EVENTS, told)
            step.detail += f"; {len(told) - absent:,} of {len(told):,} acknowledged facts are there"
        with self.stage.step("restart") as step:
            await self.launch_node(old.node)
            await self.stage.until(lambda: old.serves is False, "it to stand by")
            step.detail = f"it stands by; {new.node.title} stays active"

    async def _pause(self) -> None:
        old, new = self._pair()
        process = self._nodes[old.node.name]
        endpoint = replace(self.site.plant.endpoint("producer", old.node), request_timeout_seconds=LATE_SECONDS)
        async with endpoint.connect() as client:
            with self.stage.step("pause") as step:
                # What it is handed must lie in its connection when it goes on: one that is open before.
                await client.connection.check_health()
                os.kill(process.pid, signal.SIGSTOP)
                old.paused, began = True, time.monotonic()
                handed = [asyncio.create_task(self._hand(client, number)) for number in range(LATE_FACTS)]
                await self._taken_over("paused", new, began, step)
            with self.stage.step("resume") as step:
                old.paused = False
                os.kill(process.pid, signal.SIGCONT)
                answers = await asyncio.gather(*handed)
                await self.stage.until(lambda: old.serves is False, "it to notice, and to stand by")
                self._late = LateFacts(answers, await asyncio.to_thread(self._late_stored))
                step.detail = _late_text(self._late)

    async def _hand(self, client: BoundaryClient, number: int) -> str:
        """Give a fact to a node that stands still; say what became of it when it goes on."""
        zones = self.site.plant.name, self.site.enterprise.name
        envelope = Envelope(*zones, CLOCK.now_unix_ms(), LATE_ID.format(number))
        fact = Fact.of("asset:PlantA/FILLER-07", "cycle_completed", {"late": number})
        try:
            await client.append_fact(EVENTS, Message(envelope, fact))
        except BsfgError as error:
            return error.code
        return STORED

    def _late_stored(self) -> int:
        held = referee.read(self.site.plant, EVENTS, Buffer.STORE, self.site.plant.name)
        return len({LATE_ID.format(number) for number in range(LATE_FACTS)} & set(held.ids))

    async def _taken_over(self, how: str, new: NodeSeen, began: float, step: DemoStep) -> None:
        """Wait until the other node serves, and until a producer who waited was answered."""
        producing = self.stage.producing[self.site.plant.name]
        await self.stage.until(lambda: new.serves, f"{new.node.title} to take over")
        took = time.monotonic() - began
        self._takeovers.append(Takeover(how, new.node.name, round(took, 2)))
        waiting, target = producing.sent - producing.answered, producing.sent
        await self.stage.until(lambda: producing.answered >= target, "the producer's outbox to empty")
        step.detail = f"{new.node.title} is active after {took:.1f} s; {counted(waiting, 'fact')} had waited"

    # Who is active.

    @property
    def _nodes_seen(self) -> list[NodeSeen]:
        return self.stage.zones[self.site.plant.name].nodes

    def _roles(self) -> list[bool]:
        return sorted(each.serves for each in self._nodes_seen if each.serves is not None)

    def _pair(self) -> tuple[NodeSeen, NodeSeen]:
        """Give the active node, and the other one."""
        old, new = sorted(self._nodes_seen, key=lambda each: not each.serves)
        return old, new

    def _span(self) -> tuple[int, int]:
        # Spark takes longer to start than any takeover.
        return self._times.cut - referee.SPAN_MARGIN_MS, CLOCK.now_unix_ms()

    def _more(self) -> dict[str, Any]:
        return {"takeovers": self._takeovers, "late": self._late}


def _late_text(late: LateFacts) -> str:
    if not late.ok:
        return f"IT WROTE {late.stored} OF {len(late.answers)} FACTS"
    codes = ", ".join(sorted(set(late.answers)))
    return f"it could write none of {len(late.answers)} facts it had been handed ({codes}), and stands by"
