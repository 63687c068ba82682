"""Looks at the node all the time: keeps its last hour, and tells all who watch what is so now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson
import structlog

from bsfg.errors import BsfgError
from bsfg.node.dashboard.feed import Feed, event
from bsfg.node.dashboard.history import EVERY_SECONDS, History, Series, values_of
from bsfg.node.health import as_json
from bsfg.node.parts import Parts
from bsfg.node.seen import EVERYTHING, Scope

log = structlog.get_logger("bsfg.node")

LOOK_SECONDS = 1.0

Look = Callable[[], Awaitable[dict[str, Any]]]


class Watch:
    """One task that looks once a second while somebody watches, and every few seconds when nobody does."""

    def __init__(self, look: Look, feed: Feed, parts: Parts) -> None:
        self._look, self._feed, self._parts, self._clock = look, feed, parts, parts.clock
        self.history = History()
        self._noted_ms: int | None = None
        self._stopping = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it, and with it the events of all who watch."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._feed.close()

    def wake(self) -> None:
        """Look now, because something was changed."""
        self._wake.set()

    async def greeting(self, scope: Scope = EVERYTHING) -> bytes:
        """Give the first event of somebody new: the last hour, and what is so now, as far as he may see it."""
        state = self._seen(await self._state(), scope)
        history = self.history.to_dict()
        if "trouble" in state:
            history["series"] = history["series"] if scope == EVERYTHING else []
        else:
            history["series"] = [each for each in history["series"] if scope.series(tuple(each["of"]), state)]
        return event("hello", orjson.dumps({"history": history, "state": state}))

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self._turn()
            except Exception as error:
                # Whatever it was, it must not end the watch; the upkeep raises the alerts.
                log.warning("dashboard_failed", code=BsfgError.code, exc_info=error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
            self._wake.clear()

    async def _turn(self) -> None:
        now_ms = self._clock.monotonic_ms()
        due = self._noted_ms is None or now_ms - self._noted_ms >= 1000 * EVERY_SECONDS
        if not due and not len(self._feed):
            return
        state = await self._state()
        point = None
        if due and "trouble" not in state:
            self._noted_ms = now_ms
            point = self._note(state)
        for scope in self._feed.scopes():
            seen, noted = self._seen(state, scope), point
            if point is not None:
                values = [each for each in point["values"] if scope.series(tuple(each["of"]), seen)]
                noted = {**point, "values": values}
            self._feed.publish(event("state", orjson.dumps({"state": seen, "point": noted})), scope)

    def _note(self, state: dict[str, Any]) -> dict[str, Any]:
        values: dict[Series, float] = values_of(state, self._parts.metrics.take_worst_lags())
        self.history.add(state["now_unix_ms"], values)
        return {
            "time": state["now_unix_ms"],
            "values": [{"of": list(series), "value": value} for series, value in values.items()],
        }

    def _seen(self, state: dict[str, Any], scope: Scope) -> dict[str, Any]:
        """Give what somebody may see of a state, with what that means."""
        return state if "trouble" in state else as_json(scope.document(state, self._parts.guard.matrix))

    async def _state(self) -> dict[str, Any]:
        try:
            return await self._look()
        except BsfgError as error:
            return {"trouble": error.to_dict(), "now_unix_ms": self._clock.now_unix_ms()}
