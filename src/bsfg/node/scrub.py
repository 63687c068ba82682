"""The scrub: the node re-reads what is sealed, so that rot is found while somebody else still has the facts.

It goes through everything once in a period, in a thread of its own, a little at a time, and never faster than it may.
What it finds is an alert with file and byte, and is read as anybody would read it, so that the buffer records the gap.
How far it is survives a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from bsfg.errors import BsfgError
from bsfg.node.alerts import AlertBoard, Note
from bsfg.node.state import NodeState
from bsfg.ports import Clock
from bsfg.stores.log.files import Files
from bsfg.stores.log.scrub import CHUNK_BYTES, Log, Rot, ScrubStep, sealed_bytes, walk

TURN_SECONDS = 1.0
SLOWEST_BYTES_PER_SECOND = 16 << 10
KEEP_SECONDS = 300.0
LISTED = 20

Read = Callable[[Log, int, int], AsyncIterator[Any]]
"""Reads entries of a log as a consumer would."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to read: everything within a period, but never above a rate."""

    period_seconds: float
    rate_bytes_per_second: float

    def bytes_per_second(self, total_bytes: int) -> float:
        """Give the rate for so many bytes in all; a little is read faster than needed, and then nothing for long."""
        wanted = max(SLOWEST_BYTES_PER_SECOND, total_bytes / self.period_seconds)
        return min(wanted, self.rate_bytes_per_second)

    def turn_bytes(self, total_bytes: int) -> int:
        """Give how many bytes may be read without a pause."""
        return max(1, min(CHUNK_BYTES, int(TURN_SECONDS * self.bytes_per_second(total_bytes))))

    def pause_seconds(self, total_bytes: int, done_bytes: int, elapsed_seconds: float) -> float:
        """Give how long to wait after so many bytes in so much time."""
        return max(0.0, done_bytes / self.bytes_per_second(total_bytes) - elapsed_seconds)

    def rest_seconds(self, since_begin_seconds: float) -> float:
        """Give how long to wait after the end of a pass until the next one begins."""
        return max(TURN_SECONDS, min(self.period_seconds, self.period_seconds - since_begin_seconds))


class Scrub:
    """The scrub of one node."""

    def __init__(
        self,
        where: tuple[Files, Files],
        pace: Pace,
        state: NodeState,
        clock: Clock,
        alerts: AlertBoard,
        note: Note,
        read: Read,
    ) -> None:
        self._files, self._artifacts = where
        self._pace, self._state, self._clock, self._alerts, self._note, self._read = (
            pace, state, clock, alerts, note, read,
        )  # fmt: skip
        self._kept: dict[str, Any] = {"after": "", "begun_unix_ms": None, "ended_unix_ms": None, **self._recalled()}
        kept = self._kept.pop("rot", {})
        self._rot = {path: tuple(Rot(**each) for each in found) for path, found in kept.items()}
        self._total = self._done = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bsfg-scrub")
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def _recalled(self) -> dict[str, Any]:
        return dict(self._state.get("scrub", "pass") or {})

    def start(self) -> None:
        """Begin to read, after telling what was found before a restart and may not be read again for long."""
        for path in self._rot:
            self._tell(path)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it, and remember how far it was."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def status(self) -> dict[str, Any]:
        """Tell how far this pass is, when the last one ended, and what is damaged."""
        found = [rot for each in self._rot.values() for rot in each]
        return {
            "begun_unix_ms": self._kept["begun_unix_ms"],
            "ended_unix_ms": self._kept["ended_unix_ms"],
            "done_bytes": self._done,
            "total_bytes": self._total,
            "damaged": len(found),
            "damage": [rot.text for rot in found[:LISTED]],
        }

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._pass()
                since = self._clock.now_unix_ms() - (self._kept["begun_unix_ms"] or 0)
                await self._wait(self._pace.rest_seconds(since / 1000))
            except (BsfgError, OSError) as error:
                text = error.message if isinstance(error, BsfgError) else str(error)
                self._note("scrub_failed", problem=text)
                await self._wait(60 * TURN_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _pass(self) -> None:
        """Go once through everything, or through the rest of it after a restart."""
        clock, pace = self._clock, self._pace
        if not self._kept["after"]:
            self._kept["begun_unix_ms"] = clock.now_unix_ms()
        self._total = await self._in_thread(sealed_bytes, self._files, self._artifacts)
        steps = walk(self._files, self._artifacts, self._kept["after"])
        begun_ms = kept_ms = clock.monotonic_ms()
        self._done, seen, whole = 0, set[str](), not self._kept["after"]
        while not self._stopping.is_set():
            taken, more = await self._in_thread(_take, steps, pace.turn_bytes(self._total))
            for step in taken:
                self._done += step.size_bytes
                if step.rot is not None:
                    seen.add(step.path)
                    await self._checked(step)
            now_ms = clock.monotonic_ms()
            if not more:
                self._kept.update(after="", ended_unix_ms=clock.now_unix_ms())
                if whole:
                    self._forget(seen)
                break
            if now_ms - kept_ms >= 1000 * KEEP_SECONDS:
                kept_ms = now_ms
                await self._keep()
            await self._wait(pace.pause_seconds(self._total, self._done, (now_ms - begun_ms) / 1000))
        await self._keep()

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _keep(self) -> None:
        rot = {path: [asdict(each) for each in found[:1]] for path, found in list(self._rot.items())[:LISTED]}
        await self._in_thread(self._state.put, "scrub", "pass", {**self._kept, "rot": rot})

    async def _checked(self, step: ScrubStep) -> None:
        """Take note of a file that was read to its end."""
        assert step.rot is not None
        self._kept["after"] = step.path
        before = self._rot.pop(step.path, ())
        if step.rot:
            self._rot[step.path] = step.rot
        if step.rot or before:
            self._tell(step.path)
        for rot in step.rot:
            if step.log is not None and rot.first is not None and not rot.known:
                await self._record(step.log, rot)

    def _tell(self, path: str) -> None:
        """Raise an alert about a file, or clear it; entries that are on record as lost are no news."""
        news = [rot for rot in self._rot.get(path, ()) if not rot.known]
        more = f" (and {len(news) - 1} more in this file)" if len(news) > 1 else ""
        self._alerts.update("scrub_damage", path, f"{news[0].text}{more}" if news else None)

    async def _record(self, log: Log, rot: Rot) -> None:
        """Read what is damaged as anybody would, so that its buffer finds and records it."""
        assert rot.first is not None and rot.last is not None
        with suppress(BsfgError):
            async for _ in self._read(log, rot.first, max(rot.first, rot.last) + 1):
                pass

    def _forget(self, seen: set[str]) -> None:
        """Clear the alerts of files that have left since."""
        for path in [path for path in self._rot if path not in seen]:
            del self._rot[path]
            self._tell(path)


def _take(steps: Iterator[ScrubStep], max_bytes: int) -> tuple[list[ScrubStep], bool]:
    """Take steps up to a number of bytes; tell whether there may be more."""
    taken: list[ScrubStep] = []
    size = 0
    for step in steps:
        taken.append(step)
        size += step.size_bytes
        if size >= max_bytes or step.rot:
            return taken, True
    return taken, False
