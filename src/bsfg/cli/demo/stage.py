"""What can be seen of the demo while it runs: zones, links, the steps of the story, and the counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bsfg.cli.demo.site import DemoLink, DemoNode, DemoSite, DemoZone
from bsfg.errors import BsfgError, TimedOut
from bsfg.gate import Mode
from bsfg.ports import Buffer
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.connection import Connection

WAIT_SECONDS = 300.0
"""How long something that must happen may take, on a very busy machine, before the demo gives up."""

LAGS_SHOWN = 150


class StepProgress(StrEnum):
    """Where a step of the story stands."""

    AHEAD = "ahead"
    NOW = "now"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class DemoStep:
    """One step of the story; the detail tells how it went."""

    key: str
    title: str
    progress: StepProgress = StepProgress.AHEAD
    detail: str = ""


@dataclass(slots=True)
class NodeSeen:
    """A node as it shows itself: ``serves`` is whether it is active or stands by, None while it does not answer."""

    node: DemoNode
    pid: int = 0
    paused: bool = False
    serves: bool | None = None

    @property
    def state(self) -> str:
        """What it is, in a word or two."""
        if not self.pid:
            return "DOWN"
        if self.paused:
            return "paused"
        return {True: "active", False: "stands by", None: "silent"}[self.serves]


@dataclass(slots=True)
class ZoneSeen:
    """A zone as its active node describes it; the counts stay as they were while that is away."""

    zone: DemoZone
    alive: bool = False
    seen: bool = False
    appended: int = 0
    forwarded: int = 0
    backlog: int = 0
    received: int = 0
    artifacts: int = 0
    nodes: list[NodeSeen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = [NodeSeen(node) for node in self.zone.nodes]

    @property
    def runs(self) -> bool:
        """Whether a process of a node is there."""
        return any(node.pid for node in self.nodes)


@dataclass(slots=True)
class LinkSeen:
    """A link as both its ends describe it."""

    link: DemoLink
    mode: str = "autonomous"
    sender_mode: str = "autonomous"
    backlog: int = 0
    lag_ms: float | None = None
    lags_ms: deque[float | None] = field(default_factory=lambda: deque(maxlen=LAGS_SHOWN))


@dataclass(slots=True)
class Producing:
    """What one producer has reported."""

    sent: int = 0
    answered: int = 0
    told: dict[str, int] = field(default_factory=dict)
    append_ms: list[float] = field(default_factory=list)
    answer_ms_max: float = 0.0
    silent: bool = False


@dataclass(slots=True)
class DemoStage:
    """The whole picture; ``on_step`` is told when a step begins and when it is over."""

    site: DemoSite
    steps: list[DemoStep]
    on_step: Callable[[DemoStep], None] = lambda step: None
    zones: dict[str, ZoneSeen] = field(default_factory=dict)
    links: dict[str, LinkSeen] = field(default_factory=dict)
    producing: dict[str, Producing] = field(default_factory=dict)
    is_cut: bool = False
    note: str = ""
    started: float = field(default_factory=time.monotonic)
    failure: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def node(self, node: DemoNode) -> NodeSeen:
        """Give what is seen of a node."""
        return next(each for zone in self.zones.values() for each in zone.nodes if each.node is node)

    def __post_init__(self) -> None:
        self.zones = {zone.name: ZoneSeen(zone) for zone in self.site.zones}
        self.links = {link.key: LinkSeen(link) for link in self.site.links}
        self.producing = {zone.name: Producing() for zone in (self.site.plant, self.site.enterprise)}

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.started

    @property
    def sent(self) -> int:
        """How many facts were sent by now."""
        return sum(each.sent for each in self.producing.values())

    @property
    def received(self) -> int:
        """How many facts have arrived where they are meant for."""
        return sum(self.zones[zone.name].received for zone in (self.site.plant, self.site.enterprise))

    @property
    def append_ms_max(self) -> float:
        """How long the longest append took by now, until the fact was on disk."""
        return max((value for each in self.producing.values() for value in each.append_ms), default=0.0)

    @contextmanager
    def step(self, key: str) -> Iterator[DemoStep]:
        """Run a step of the story; what the block writes into its detail is shown when it is over."""
        step = next(each for each in self.steps if each.key == key)
        step.progress = StepProgress.NOW
        self.on_step(step)
        try:
            yield step
            step.progress = StepProgress.DONE
        except BaseException:
            step.progress = StepProgress.FAILED
            raise
        finally:
            self.note = ""
            if step.progress == StepProgress.DONE:
                self.on_step(step)

    # Waiting.

    def tell(self) -> None:
        """Wake whoever waits for something to change."""
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Have whoever waits fail, because what he waits for will never come."""
        self.failure = self.failure or error
        self._news.set()

    async def until(self, condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until something holds, and say what is waited for."""
        ends = time.monotonic() + seconds
        self.note = what
        while not condition():
            if self.failure is not None:
                raise self.failure
            left_seconds = ends - time.monotonic()
            if left_seconds <= 0:
                raise TimedOut(
                    f"the demo waited {seconds:.0f} s in vain for {what}",
                    hint="Is this machine very busy? Try again, or try a smaller one: --quick --engine native.",
                )
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left_seconds)
            except TimeoutError:
                continue
        self.note = ""

    async def during(self, seconds: float) -> None:
        """Let time pass, unless something fails."""
        ends = time.monotonic() + seconds
        while (left_seconds := ends - time.monotonic()) > 0:
            if self.failure is not None:
                raise self.failure
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left_seconds)
            except TimeoutError:
                return


LOOK_SECONDS = 0.4
CALL_SECONDS = 5.0
HEALTH_SECONDS = 1.0

Document = dict[str, Any]


class StageWatch:
    """Keeps a stage up to date from what the nodes say of themselves."""

    def __init__(self, site: DemoSite, stage: DemoStage) -> None:
        self._site, self._stage = site, stage
        self._connections: dict[str, Connection] = {}
        self._documents: dict[str, Document] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        self._connections = {zone.name: zone.endpoint("viewer").connect().connection for zone in self._site.zones}
        several = [zone for zone in self._stage.zones.values() if len(zone.nodes) > 1]
        watching = [asyncio.create_task(self._ask(zone.zone, node)) for zone in several for node in zone.nodes]
        try:
            while True:
                await asyncio.gather(*(self._look(zone) for zone in self._site.zones))
                for link in self._site.links:
                    self._take_link(link)
                self._stage.tell()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for connection in self._connections.values():
                with contextlib.suppress(Exception):
                    await connection.close()

    async def _ask(self, zone: DemoZone, seen: NodeSeen) -> None:
        """Ask one node of several again and again whether it is active."""
        while True:
            try:
                async with asyncio.timeout(HEALTH_SECONDS), zone.endpoint("viewer", seen.node).connect() as client:
                    seen.serves = await client.connection.check_health()
            except (BsfgError, TimeoutError):
                seen.serves = None
            self._stage.tell()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, zone: DemoZone) -> None:
        connection, seen = self._connections[zone.name], self._stage.zones[zone.name]
        if not seen.runs:
            seen.alive = False
            return
        try:
            found = await asyncio.wait_for(AdminClient(connection).status(), CALL_SECONDS)
        except (BsfgError, TimeoutError):
            connection.reconnect()
            seen.alive = False
            return
        self._documents[zone.name] = found
        seen.alive = seen.seen = seen.runs
        mine = [link for link in self._site.links if link.sender is zone]
        seen.appended = sum(each["end"] for each in found["buffers"] if each["buffer"] == Buffer.STORE)
        seen.received = sum(each["end"] for each in found["buffers"] if each["buffer"] == Buffer.FORWARD)
        seen.backlog = sum(_consumer(found, link).get("backlog", 0) for link in mine)
        seen.forwarded = sum(_consumer(found, link).get("committed", -1) + 1 for link in mine)
        seen.artifacts = (found["artifacts"] or {}).get("artifacts", 0)

    def _take_link(self, link: DemoLink) -> None:
        seen = self._stage.links[link.key]
        sender, receiver = self._documents.get(link.sender.name), self._documents.get(link.receiver.name)
        if receiver is not None:
            seen.mode = _gate(receiver, link.name, "receiver").get("mode", seen.mode)
        if sender is not None:
            seen.sender_mode = _gate(sender, link.receiver.name, "sender").get("mode", seen.sender_mode)
            seen.backlog = _consumer(sender, link).get("backlog", 0)
        seen.lag_ms = self._lag_ms(link, seen.mode)
        seen.lags_ms.append(seen.lag_ms)

    def _lag_ms(self, link: DemoLink, mode: str) -> float | None:
        """Give how far behind a link is: what the last fact took, or how long the oldest has waited already."""
        sender, receiver = self._documents.get(link.sender.name), self._documents.get(link.receiver.name)
        if mode != Mode.NORMAL and sender is not None:
            for buffer in sender["buffers"]:
                if (buffer["stream"], buffer["buffer"]) == (link.stream, link.buffer):
                    waited = buffer["oldest_unconfirmed_seconds"]
                    return None if waited is None else 1000 * float(waited)
        reports = _gate(receiver, link.name, "receiver").get("reports", []) if receiver is not None else []
        lags = [each["lag_seconds"] for each in reports if each["stream"] == link.stream]
        return 1000 * float(lags[0]) if lags and lags[0] is not None else None


def _gate(document: Document, link: str, side: str) -> Document:
    found: list[Document] = [each for each in document["links"] if (each["link"], each["side"]) == (link, side)]
    return found[0] if found else {}


def _consumer(document: Document, link: DemoLink) -> Document:
    found: list[Document] = [each for each in document["consumers"] if each["name"] == link.consumer]
    return found[0] if found else {}
