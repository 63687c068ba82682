"""The director of the demo: starts producers and a writer, kills the writer in mid-stream, and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from bsfg.cli.demo.storage import referee
from bsfg.errors import StorageFailed

STALLED_SECONDS = 60
"""Without an acknowledgement for this long, something is wrong with the machine or with us."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How big the demo is; ``facts`` counts those of each producer."""

    producers: int
    facts: int
    kills: int
    seed: int

    @property
    def total(self) -> int:
        """All facts together."""
        return self.producers * self.facts


class Event(NamedTuple):
    """Something that happened, and when."""

    seconds: float
    text: str
    style: str


@dataclass(slots=True)
class Stage:
    """What can be seen while the demo runs."""

    plan: Plan
    on_event: Callable[[Event], None]
    sent_by: list[int] = field(default_factory=list)
    acknowledged_by: list[int] = field(default_factory=list)
    retried_by: list[int] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=dict)
    repeats: int = 0
    longest_ms: float = 0.0
    writer_pid: int | None = None
    deaths: int = 0
    started: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counts in (self.sent_by, self.acknowledged_by, self.retried_by):
            counts += [0] * self.plan.producers

    def tell(self, text: str, style: str = "") -> None:
        """Add an event to the story."""
        self.events.append(Event(time.monotonic() - self.started, text, style))
        self.on_event(self.events[-1])


class Director:
    """One performance."""

    def __init__(self, stage: Stage, folder: Path, backstage: Path) -> None:
        self.stage = stage
        self._folder = folder
        self._socket = str(backstage / "writer.socket")
        self._complaints = backstage / "stderr"
        self._random = random.Random(stage.plan.seed)
        self._writer: Process | None = None
        self._producers: list[Process] = []
        self._listeners: list[asyncio.Task[None]] = []
        self._progress = asyncio.Event()
        self._failure: StorageFailed | None = None

    async def play(self) -> None:
        """Play the whole piece; whatever happens, no process is left behind."""
        plan = self.stage.plan
        try:
            await self._start_writer()
            self._listeners = [asyncio.create_task(self._listen(number)) for number in range(plan.producers)]
            for threshold in self._thresholds():
                await self._until(threshold)
                await asyncio.sleep(self._random.uniform(0, 0.03))
                await self._kill_writer()
                await self._start_writer()
            await self._until(plan.total)
            await asyncio.gather(*self._listeners)
            self.stage.tell(f"all {plan.total:,} facts are acknowledged; the writer is killed a last time", "bold")
        finally:
            await self._clear()

    def _thresholds(self) -> list[int]:
        """Choose after how many acknowledgements the writer dies: anywhere, but always in mid-stream."""
        plan = self.stage.plan
        low, high = plan.total // 20, max(plan.total // 20 + 1, plan.total * 9 // 10)
        return sorted(self._random.randrange(low, high) for _ in range(plan.kills))

    async def _until(self, acknowledged: int) -> None:
        """Wait for acknowledgements, and notice when there will be no more."""
        idle_seconds = 0
        while len(self.stage.acknowledged) < acknowledged:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), 1)
                idle_seconds = 0
            except TimeoutError:
                idle_seconds += 1
            if self._failure is not None:
                raise self._failure
            if self._writer is not None and self._writer.returncode is not None:
                raise StorageFailed(f"the writer ended by itself{self._last_words()}")
            if idle_seconds >= STALLED_SECONDS:
                raise StorageFailed(f"nothing happened for {STALLED_SECONDS} s{self._last_words()}")

    async def _start_writer(self) -> None:
        self._writer = await self._start("writer", str(self._folder), self._socket)
        assert self._writer.stdout is not None
        line = await self._writer.stdout.readline()
        if not line:
            raise StorageFailed(f"the writer did not start{self._last_words()}")
        ready = orjson.loads(line)
        self.stage.writer_pid = self._writer.pid
        self.stage.tell(
            f"writer {self._writer.pid} opened the folder in {ready['opened_ms']:.0f} ms "
            f"and goes on at offset {ready['end']:,}",
            "green",
        )

    async def _kill_writer(self) -> None:
        """Kill the writer, and read the folder without it: everything acknowledged must be there at once."""
        assert self._writer is not None
        pid = self._writer.pid
        await _killed(self._writer)
        self.stage.writer_pid, self.stage.deaths = None, self.stage.deaths + 1
        acknowledged = dict(self.stage.acknowledged)
        self.stage.tell(f"writer {pid} killed (SIGKILL) with {len(acknowledged):,} facts acknowledged", "red")
        stored = await asyncio.to_thread(referee.read, self._folder)
        absent = referee.missing(stored, acknowledged)
        self.stage.tell(
            f"read without a writer: {len(acknowledged) - len(absent):,} of {len(acknowledged):,} are there",
            "red" if absent else "",
        )

    async def _listen(self, number: int) -> None:
        """Follow what one producer reports."""
        facts = self.stage.plan.facts
        process = await self._start("producer", self._socket, str(number + 1), str(facts))
        self._producers.append(process)
        assert process.stdout is not None
        async for line in process.stdout:
            self._take(number, orjson.loads(line))
        if await process.wait() or self.stage.acknowledged_by[number] < facts:
            self._failure = StorageFailed(f"producer {number + 1} ended early{self._last_words()}")
            self._progress.set()

    def _take(self, number: int, report: dict[str, Any]) -> None:
        stage = self.stage
        stage.sent_by[number] = report["sent"]
        stage.retried_by[number] = report["retried"]
        stage.longest_ms = max(stage.longest_ms, report["longest_ms"])
        for id_, offset, result in report["acknowledged"]:
            stage.acknowledged[id_] = offset
            stage.repeats += result == "already_exists"
        stage.acknowledged_by[number] += len(report["acknowledged"])
        self._progress.set()

    async def _start(self, role: str, *args: str) -> Process:
        complaints = os.open(self._complaints, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # In a session of its own Ctrl-C reaches only us, and we end the others in order.
            return await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", f"bsfg.cli.demo.storage.{role}", *args],
                stdin=PIPE,
                stdout=PIPE,
                stderr=complaints,
                limit=1 << 22,
                start_new_session=True,
            )
        finally:
            os.close(complaints)

    def _last_words(self) -> str:
        """Give the last line that any of the processes complained with."""
        try:
            lines = self._complaints.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {lines[-1]}" if lines else ""

    async def _clear(self) -> None:
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for process in [*self._producers, self._writer]:
            if process is not None:
                await _killed(process)
        self.stage.writer_pid = None


async def _killed(process: Process) -> None:
    """Kill a process that may have ended already, and wait for its end.

    `Process.kill` would fetch the exit code itself and leave asyncio, which waits for it too, with a complaint.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
