"""What the dashboard shows: the last hour in numbers, and server-sent events for a bounded number of browsers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

import numpy as np
import orjson
import structlog

from bsfg.errors import BsfgError, Overloaded
from bsfg.node.parts import NodeContext
from bsfg.node.status import EVERYTHING, VisibleStreams, as_json
from bsfg.node.tail import EVENT_HEADERS, gone

POINTS = 720
EVERY_SECONDS = 5
SERIES_MAX = 500

Series = tuple[str, ...]


class SeriesHistory:
    """A ring of points in time with the values of many series."""

    def __init__(self, points: int = POINTS, series_max: int = SERIES_MAX) -> None:
        self._points, self._series_max = points, series_max
        self._times = np.zeros(points, dtype=np.int64)
        self._values: dict[Series, np.ndarray] = {}
        self._count = 0

    def add(self, at_unix_ms: int, values: Mapping[Series, float]) -> None:
        """Note the values of one moment; the oldest moment leaves when the ring is full."""
        place = self._count % self._points
        self._times[place] = at_unix_ms
        for known in self._values.values():
            known[place] = np.nan
        self._forget_empty()
        for series, value in values.items():
            if series not in self._values:
                if len(self._values) >= self._series_max:
                    continue
                self._values[series] = np.full(self._points, np.nan)
            self._values[series][place] = value
        self._count += 1

    def to_dict(self) -> dict[str, Any]:
        """Give all points, the oldest first; a value that was not known is None."""
        order = self._order()
        return {
            "times": self._times[order].tolist(),
            "series": [
                {"of": list(series), "values": _plain(values[order])} for series, values in self._values.items()
            ],
        }

    def _order(self) -> np.ndarray:
        if self._count <= self._points:
            return np.arange(self._count)
        return (np.arange(self._points) + self._count) % self._points

    def _forget_empty(self) -> None:
        for series in [series for series, values in self._values.items() if np.isnan(values).all()]:
            del self._values[series]


def _plain(values: np.ndarray) -> list[float | None]:
    """Write values for JSON: whole numbers without a point, others with six digits, unknown ones as None."""
    return [_number(value) if isfinite(value) else None for value in values.tolist()]


def _number(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def values_of(document: Mapping[str, Any], lags: Mapping[tuple[str, str], float]) -> dict[Series, float]:
    """Take from a status document what is kept; ``lags`` are the worst since the last look, by link and stream."""
    values: dict[Series, float] = {}
    for buffer in document["buffers"]:
        of = (str(buffer["stream"]), str(buffer["buffer"]))
        values["end", *of] = buffer["end"]
        values["fill", *of] = buffer["fill_percent"]
    for consumer in document["consumers"]:
        if consumer["retired_reason"] is None:
            values["frontier", str(consumer["name"])] = consumer["committed"]
            values["backlog", str(consumer["name"])] = consumer["backlog"]
    for link in document["links"]:
        for report in link["reports"]:
            values["left", str(link["link"]), str(report["stream"])] = report["backlog"]
    for (name, stream), seconds in lags.items():
        values["lag", name, stream] = seconds
    return values


WAITING_MAX = 8
"""Events that may wait for one browser: it is behind by as many seconds, and is let go."""

Send = Callable[[Any], Any]


def event(name: str, data: bytes) -> bytes:
    """Write one event; ``data`` is JSON, which has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class Watcher:
    """One browser that watches; ``allowed`` is asked before each event whether it may go on."""

    def __init__(self, allowed: Callable[[], bool], abort: Callable[[], None], scope: VisibleStreams) -> None:
        self._allowed, self.abort, self.scope = allowed, abort, scope
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_MAX)
        self.slow = False

    def offer(self, data: bytes) -> bool:
        """Put an event into the queue, or cut the connection of one who does not read; tell which it was."""
        try:
            self._waiting.put_nowait(data)
        except asyncio.QueueFull:
            self.slow = True
            self.abort()
            return False
        return True

    def finish(self) -> None:
        """End the events after those that wait."""
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait(None)

    async def pump(self, send: Send) -> None:
        """Send what comes until the end, or until the browser may not watch any longer."""
        while True:
            data = await self._waiting.get()
            ended = data is None
            if data is not None and not self._allowed():
                data, ended = event("ended", b"{}"), True
            await send({"type": "http.response.body", "body": data or b"", "more_body": not ended})
            if ended:
                return


class BrowserFeed:
    """All browsers that watch."""

    def __init__(self, watchers_max: int) -> None:
        self._max = watchers_max
        self._watchers: set[Watcher] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def scopes(self) -> set[VisibleStreams]:
        """Give what those who watch may see, each once."""
        return {watcher.scope for watcher in self._watchers}

    def join(
        self, allowed: Callable[[], bool], abort: Callable[[], None], scope: VisibleStreams = EVERYTHING
    ) -> Watcher:
        """Take one more browser in that may see so much, or raise `Overloaded`."""
        if self._closed or len(self._watchers) >= self._max:
            hint = "Close another window, or raise `watchers` in [dashboard]."
            raise Overloaded(f"{len(self._watchers)} browsers watch already", hint=hint, limit="watchers")
        watcher = Watcher(allowed, abort, scope)
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Let one go."""
        self._watchers.discard(watcher)

    def publish(self, data: bytes, scope: VisibleStreams = EVERYTHING) -> None:
        """Give an event to all who may see just that; who is too far behind is let go."""
        for watcher in list(self._watchers):
            if watcher.scope == scope and not watcher.offer(data):
                self._watchers.discard(watcher)

    def close(self) -> None:
        """End all, and take nobody in any more."""
        self._closed = True
        for watcher in self._watchers:
            watcher.finish()
        self._watchers.clear()


class EventStream:
    """The answer to a browser that watches, as an ASGI application."""

    def __init__(self, feed: BrowserFeed, watcher: Watcher) -> None:
        self._feed, self._watcher = feed, watcher

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Send events until either side ends it."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        pumping = asyncio.create_task(self._watcher.pump(send))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave(self._watcher)
            for task in (pumping, leaving):
                task.cancel()
            ended, _ = await asyncio.gather(pumping, leaving, return_exceptions=True)
            if ended is not None:
                self._watcher.abort()


log = structlog.get_logger("bsfg.node")

LOOK_SECONDS = 1.0

Look = Callable[[], Awaitable[dict[str, Any]]]


class NodeWatch:
    """One task that looks once a second while somebody watches, and every few seconds when nobody does."""

    def __init__(self, look: Look, feed: BrowserFeed, parts: NodeContext) -> None:
        self._look, self._feed, self._parts, self._clock = look, feed, parts, parts.clock
        self.history = SeriesHistory()
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

    async def greeting(self, scope: VisibleStreams = EVERYTHING) -> bytes:
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

    def _seen(self, state: dict[str, Any], scope: VisibleStreams) -> dict[str, Any]:
        """Give what somebody may see of a state, with what that means."""
        return state if "trouble" in state else as_json(scope.document(state, self._parts.guard.matrix))

    async def _state(self) -> dict[str, Any]:
        try:
            return await self._look()
        except BsfgError as error:
            return {"trouble": error.to_dict(), "now_unix_ms": self._clock.now_unix_ms()}
