"""Alerts: what an operator must hear of, as a log record, a metric and, where configured, a webhook or a command.

An alert is raised when its condition begins, repeated while it lasts, and cleared when it ends. What only happens is an
event: told at once, and when it happens again and again, once a minute with how often. Delivery never delays the node:
it happens in tasks of its own, and a failed one is itself a log record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from bsfg.config import Alerts
from bsfg.gate import Mode
from bsfg.node.metrics import Metrics
from bsfg.ports import Clock
from bsfg.wire.posting import Posting
from bsfg.wire.service import GateView

Note = Callable[..., None]

EVENT_QUIET_MS = 60_000
"""After an event was told, others of its kind about the same thing are only counted for so long."""

EVENT_KINDS_MAX = 256
"""So many different things can be told of within that time; a caller may choose his own name, but not flood the log."""

OTHERS = "others"

HISTORY_MAX = 1_000
"""So many things that happened are remembered for whoever looks."""


@dataclass(slots=True)
class Raised:
    """An alert that lasts."""

    name: str
    about: str
    severity: str
    text: str
    since_unix_ms: int
    sent_ms: int

    def to_dict(self) -> dict[str, Any]:
        """Give the form that is delivered and shown."""
        return {
            "alert": self.name,
            "about": self.about,
            "severity": self.severity,
            "text": self.text,
            "since_unix_ms": self.since_unix_ms,
        }


@dataclass(slots=True)
class _Repeated:
    """An event that was told lately: when, how often it happened since, and what was said of it last."""

    told_ms: int
    count: int = 0
    text: str = ""


class AlertBoard:
    """All alerts of a node that last at this moment."""

    def __init__(self, zone: str, settings: Alerts, metrics: Metrics, clock: Clock, note: Note) -> None:
        self._zone, self._settings, self._metrics = zone, settings, metrics
        self._clock, self._note = clock, note
        self._raised: dict[tuple[str, str], Raised] = {}
        self._told: dict[tuple[str, str], _Repeated] = {}
        self._deliveries: dict[tuple[str, str], asyncio.Task[None]] = {}
        """The last delivery of each alert; those before it end first."""
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)

    def active(self) -> list[dict[str, Any]]:
        """List what lasts, the oldest first."""
        return [each.to_dict() for each in sorted(self._raised.values(), key=lambda each: each.since_unix_ms)]

    def history(self) -> list[dict[str, Any]]:
        """List what happened since the start, the newest first."""
        return list(reversed(self._history))

    def take(self, settings: Alerts) -> None:
        """Go by other settings from now on."""
        self._settings = settings

    def forget(self, about: str) -> None:
        """Clear everything about a thing that is no more."""
        for name, whose in [key for key in self._raised if key[1] == about or key[1].startswith(f"{about}/")]:
            self.update(name, whose, None)

    def remember(self, what: str, name: str, about: str, text: str, severity: str = "") -> None:
        """Take note of something for those who look later."""
        at = self._clock.now_unix_ms()
        self._history.append(
            {"at_unix_ms": at, "what": what, "alert": name, "about": about, "severity": severity, "text": text}
        )

    def update(self, name: str, about: str, text: str | None, *, severity: str = "alert") -> None:
        """Say whether a condition holds: ``text`` describes it, None means that it does not hold."""
        key = (name, about)
        lasting = self._raised.get(key)
        if text is None:
            if lasting is not None:
                del self._raised[key]
                self._note("alert_cleared", alert=name, about=about)
                self.remember("cleared", name, about, lasting.text, lasting.severity)
                self._deliver({**lasting.to_dict(), "cleared": True})
            return
        now_ms = self._clock.monotonic_ms()
        if lasting is None or lasting.severity != severity:
            since = lasting.since_unix_ms if lasting else self._clock.now_unix_ms()
            self._raised[key] = lasting = Raised(name, about, severity, text, since, now_ms)
            self._metrics.alerts.labels(name).inc()
            self.remember("raised", name, about, text, severity)
            self._send(lasting)
            return
        lasting.text = text
        if now_ms - lasting.sent_ms >= 1000 * self._settings.repeat_every_seconds:
            lasting.sent_ms = now_ms
            self._send(lasting)

    def event(self, name: str, about: str, text: str) -> None:
        """Report something that happened, such as a refused identity; what repeats is told once a minute, counted."""
        self._metrics.alerts.labels(name).inc()
        now_ms = self._clock.monotonic_ms()
        if (name, about) not in self._told and len(self._told) >= EVENT_KINDS_MAX:
            about = OTHERS
        told = self._told.get((name, about))
        if told is not None and now_ms - told.told_ms < EVENT_QUIET_MS:
            told.count, told.text = told.count + 1, text
            return
        self._tell(name, about, text, told, now_ms)

    def tick(self) -> None:
        """Tell what happened again since it was told, and forget what did not."""
        now_ms = self._clock.monotonic_ms()
        for (name, about), told in list(self._told.items()):
            if now_ms - told.told_ms < EVENT_QUIET_MS:
                continue
            if told.count:
                self._tell(name, about, told.text, told, now_ms)
            else:
                del self._told[name, about]

    def _tell(self, name: str, about: str, text: str, before: _Repeated | None, now_ms: int) -> None:
        if before is not None and before.count:
            text = f"{text} ({before.count} times since it was last told)"
        self._told[name, about] = _Repeated(now_ms)
        self.remember("happened", name, about, text, "alert")
        self._send(Raised(name, about, "alert", text, self._clock.now_unix_ms(), now_ms))

    async def close(self) -> None:
        """Wait for deliveries that are under way, as long as they may take."""
        if self._deliveries:
            await asyncio.wait(self._deliveries.values(), timeout=self._settings.timeout_seconds)

    def _send(self, raised: Raised) -> None:
        self._note("alert_raised", **raised.to_dict())
        self._deliver(raised.to_dict())

    def _deliver(self, document: dict[str, Any]) -> None:
        if self._settings.webhook is None and self._settings.command is None:
            return
        key = (document["alert"], document["about"])
        task = asyncio.create_task(self._deliver_after(self._deliveries.get(key), {"zone": self._zone, **document}))
        self._deliveries[key] = task
        task.add_done_callback(partial(self._delivered, key))

    def _delivered(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._deliveries.get(key) is task:
            del self._deliveries[key]

    async def _deliver_after(self, before: asyncio.Task[None] | None, document: dict[str, Any]) -> None:
        """Deliver to webhook and command, neither of which waits for the other, in the order of what is told."""
        if before is not None:
            await asyncio.wait([before])
        data, settings = orjson.dumps(document), self._settings
        ways: list[Awaitable[None]] = []
        if settings.webhook is not None:
            ways.append(asyncio.to_thread(_posted, settings.webhook, data, settings.timeout_seconds))
        if settings.command is not None:
            ways.append(asyncio.wait_for(_run(settings.command, data), settings.timeout_seconds))
        for error in await asyncio.gather(*ways, return_exceptions=True):
            if error is not None:
                problem = f"{type(error).__name__}: {error}"[:300]
                self._note("alert_not_delivered", alert=document["alert"], problem=problem)


def alert_gate(alerts: AlertBoard, view: GateView) -> None:
    """Raise an alert as long as a gate is held, by an operator or by the node itself."""
    held = view.gate.mode == Mode.HELD
    text = f"{view.link} is held by {view.gate.held_by}: {view.gate.reason}" if held else None
    alerts.update("gate_held", f"{view.link}/{view.side}", text)


def _posted(url: str, data: bytes, timeout_seconds: float) -> None:
    """Deliver over HTTP, or raise why not."""
    answer = Posting(timeout_seconds).post(url, data)
    if not answer.is_good:
        raise OSError(f"it was answered with {answer.status}")


async def _run(command: tuple[str, ...], data: bytes) -> None:
    """Run a command with the alert as JSON on its standard input."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await process.communicate(data)
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"the command ended with {process.returncode}")
