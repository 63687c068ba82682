"""What can be seen of the demo while it runs: zones, links, the steps of the story, and the counts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from bsfg.cli.demo.site import Link, Site, Zone
from bsfg.errors import TimedOut

WAIT_SECONDS = 300.0
"""How long something that must happen may take, on a very busy machine, before the demo gives up."""

LAGS_SHOWN = 150


class Progress(StrEnum):
    """Where a step of the story stands."""

    AHEAD = "ahead"
    NOW = "now"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Step:
    """One step of the story; the detail tells how it went."""

    key: str
    title: str
    progress: Progress = Progress.AHEAD
    detail: str = ""
    began: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class ZoneSeen:
    """A zone as its node describes it; the counts stay as they were while the node is away."""

    zone: Zone
    alive: bool = False
    seen: bool = False
    appended: int = 0
    forwarded: int = 0
    backlog: int = 0
    received: int = 0
    artifacts: int = 0
    pid: int = 0


@dataclass(slots=True)
class LinkSeen:
    """A link as both its ends describe it."""

    link: Link
    mode: str = "autonomous"
    sender_mode: str = "autonomous"
    backlog: int = 0
    lag_ms: float | None = None
    moved_by: str | None = None
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
class Stage:
    """The whole picture; ``on_step`` is told when a step begins and when it is over."""

    site: Site
    steps: list[Step]
    on_step: Callable[[Step], None] = lambda step: None
    zones: dict[str, ZoneSeen] = field(default_factory=dict)
    links: dict[str, LinkSeen] = field(default_factory=dict)
    producing: dict[str, Producing] = field(default_factory=dict)
    is_cut: bool = False
    note: str = ""
    started: float = field(default_factory=time.monotonic)
    failure: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

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
    def step(self, key: str) -> Iterator[Step]:
        """Run a step of the story; what the block writes into its detail is shown when it is over."""
        step = next(each for each in self.steps if each.key == key)
        step.progress, step.began = Progress.NOW, time.monotonic()
        self.on_step(step)
        try:
            yield step
            step.progress = Progress.DONE
        except BaseException:
            step.progress = Progress.FAILED
            raise
        finally:
            step.seconds, self.note = time.monotonic() - step.began, ""
            if step.progress == Progress.DONE:
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
