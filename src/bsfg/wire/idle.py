"""A bound on each wait of a stream, at the price of one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

Result = TypeVar("Result")

SPARE_MAX = 256
"""How many timers are kept for the calls to come."""


class IdleTimer:
    """Ends a wait that lasts too long with `TimeoutError`, as `asyncio.timeout` does; one wait at a time.

    A stream waits for every frame, and hardly ever for long. So the timer is not set and taken back each time: it
    stays, and looks when it rings whether the wait of that moment is an old one. ``age_seconds`` is how long there may
    be waits at all, from the first one on: between two requests a stream can end without harm to anybody.
    """

    def __init__(self, seconds: float, age_seconds: float = math.inf) -> None:
        self._seconds, self._age_seconds = seconds, age_seconds
        self._ends = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._since = 0.0
        self._rang = self.is_shut = False

    async def wait(self, awaitable: Awaitable[Result]) -> Result:
        """Wait for something."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        now = loop.time()
        if self._ends == math.inf:
            self._ends = now + self._age_seconds
        if self.is_shut or now >= self._ends:
            # Nobody will wait for it, of which Python would complain.
            getattr(awaitable, "close", lambda: None)()
            raise TimeoutError
        self._waiting, self._since, self._rang = task, now, False
        cancelling = task.cancelling()
        if self._timer is None:
            self._timer = loop.call_at(min(now + self._seconds, self._ends), self._look)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._rang and task.uncancel() <= cancelling:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None

    def shut(self) -> None:
        """End the wait of this moment, and every later one, as if it had lasted too long."""
        self.is_shut = True
        if self._waiting is not None:
            self._ring(self._waiting)

    def close(self) -> None:
        """Take the timer back; whoever waits again sets it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._waiting is None:
            return
        loop, due = asyncio.get_running_loop(), min(self._since + self._seconds, self._ends)
        if loop.time() < due:
            self._timer = loop.call_at(due, self._look)
        else:
            self._ring(self._waiting)

    def _ring(self, waiting: asyncio.Task[object]) -> None:
        self._rang = True
        waiting.cancel()


class IdleTimers:
    """The timers of all streams that wait for what their callers say next; when a node stops, it listens no more."""

    def __init__(self, seconds: float, age_seconds: float = math.inf) -> None:
        self._seconds, self._age_seconds = seconds, age_seconds
        self._timers: WeakSet[IdleTimer] = WeakSet()
        self._spare: list[IdleTimer] = []
        self._is_shut = False

    def new(self) -> IdleTimer:
        """Give a timer for one stream."""
        timer = IdleTimer(self._seconds, self._age_seconds)
        self._timers.add(timer)
        if self._is_shut:
            timer.shut()
        return timer

    @contextmanager
    def lent(self) -> Iterator[IdleTimer]:
        """Lend a timer for one call; the next one has it again, so that most calls set none."""
        timer = self._spare.pop() if self._spare else IdleTimer(self._seconds)
        try:
            yield timer
        finally:
            if timer.is_shut or len(self._spare) >= SPARE_MAX:
                timer.close()
            else:
                self._spare.append(timer)

    def shut(self) -> None:
        """End the waits of all of them."""
        self._is_shut = True
        for timer in list(self._timers):
            timer.shut()
