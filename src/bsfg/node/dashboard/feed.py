"""The feed: server-sent events for a bounded number of browsers, none of which can hold up the others or the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bsfg.errors import Overloaded
from bsfg.node.seen import EVERYTHING, Scope

WAITING_MAX = 8
"""Events that may wait for one browser: it is behind by as many seconds, and is let go."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    # A proxy in between must pass events on as they come.
    (b"x-accel-buffering", b"no"),
]

Send = Callable[[Any], Any]


def event(name: str, data: bytes) -> bytes:
    """Write one event; ``data`` is JSON, which has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class Watcher:
    """One browser that watches; ``allowed`` is asked before each event whether it may go on."""

    def __init__(self, allowed: Callable[[], bool], abort: Callable[[], None], scope: Scope) -> None:
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


class Feed:
    """All browsers that watch."""

    def __init__(self, watchers_max: int) -> None:
        self._max = watchers_max
        self._watchers: set[Watcher] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def scopes(self) -> set[Scope]:
        """Give what those who watch may see, each once."""
        return {watcher.scope for watcher in self._watchers}

    def join(self, allowed: Callable[[], bool], abort: Callable[[], None], scope: Scope = EVERYTHING) -> Watcher:
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

    def publish(self, data: bytes, scope: Scope = EVERYTHING) -> None:
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

    def __init__(self, feed: Feed, watcher: Watcher) -> None:
        self._feed, self._watcher = feed, watcher

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Send events until either side ends it."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        pumping = asyncio.create_task(self._watcher.pump(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave(self._watcher)
            for task in (pumping, leaving):
                task.cancel()
            ended, _ = await asyncio.gather(pumping, leaving, return_exceptions=True)
            if ended is not None:
                self._watcher.abort()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
