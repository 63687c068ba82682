"""Trying again: pauses that double, and how long errors that may pass are borne."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bsfg.errors import BsfgError

T = TypeVar("T")


class Backoff:
    """Pauses that double, with jitter, so that many callers do not come back at the same moment."""

    def __init__(self, first_seconds: float, max_seconds: float, rng: random.Random | None = None) -> None:
        self._first, self._max, self._rng = first_seconds, max_seconds, rng or random.Random()
        self.failures = 0

    def reset(self) -> None:
        """Begin again after a success."""
        self.failures = 0

    def next_seconds(self) -> float:
        """Give the next pause: between half of and the whole of the doubled one."""
        whole = min(self._max, self._first * float(2 ** min(self.failures, 30)))
        self.failures += 1
        return whole * self._rng.uniform(0.5, 1.0)


class Retry(Backoff):
    """Bears errors that may pass, ``seconds`` long or for ever; every success starts the time anew."""

    def __init__(self, first_seconds: float, max_seconds: float, seconds: float | None) -> None:
        super().__init__(first_seconds, max_seconds)
        self._seconds, self._ends = math.inf if seconds is None else seconds, 0.0

    def pause_after(self, error: BsfgError) -> float:
        """Give how long to wait before the next try, or raise the error when it will not pass or lasts too long."""
        now = time.monotonic()
        if not self.failures:
            self._ends = now + self._seconds
        if not error.retryable or now >= self._ends:
            raise error
        return min(self.next_seconds(), self._ends - now)

    async def insist(
        self, work: Callable[[], Awaitable[T]], tell: Callable[[BsfgError], None] = lambda error: None
    ) -> T:
        """Do something until it succeeds or patience ends; ``tell`` hears of every failure."""
        # Here: programs without an event loop have no use for it, and it takes a third of the time to import theirs.
        import asyncio

        while True:
            try:
                result = await work()
            except BsfgError as error:
                tell(error)
                await asyncio.sleep(self.pause_after(error))
            else:
                self.reset()
                return result
