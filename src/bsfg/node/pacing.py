"""The pace of a link: how much it asks for, how often it tries, and how fast it may go."""

from __future__ import annotations

import asyncio
import random

APPETITE_BYTES_MIN = 16 << 10
GROWS_AFTER = 8


class Appetite:
    """How much to ask for at once: much less after an answer that ran out of time, more again after some that came.

    Over a slow link a whole answer may never arrive in time; asked for again as it was, it would never end.
    """

    def __init__(self, most_bytes: int) -> None:
        self.max_bytes = self._most_bytes = most_bytes
        self._came = 0

    def ran_out_of_time(self) -> None:
        """Ask for a quarter."""
        self.max_bytes = min(self._most_bytes, max(APPETITE_BYTES_MIN, self.max_bytes // 4))
        self._came = 0

    def came(self) -> None:
        """Ask for twice as much when several answers have come in time."""
        self._came += 1
        if self._came >= GROWS_AFTER and self.max_bytes < self._most_bytes:
            self.max_bytes = min(self._most_bytes, 2 * self.max_bytes)
            self._came = 0


class RateLimit:
    """A budget of facts per second that the streams of a link share; it never lets a burst exceed one second."""

    def __init__(self, facts_per_second: int) -> None:
        self._rate = facts_per_second
        self._free_at = 0.0

    def batch(self, most: int) -> int:
        """Give the largest batch to ask for, so that a turn costs about a tenth of a second of the budget."""
        return most if not self._rate else max(1, min(most, self._rate // 10))

    async def spend(self, facts: int) -> None:
        """Wait until so many facts more are within the rate."""
        if not self._rate or not facts:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - 1.0) + facts / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class Backoff:
    """Pauses that double, with jitter, so that many links do not come back at the same moment."""

    def __init__(self, first_seconds: float, max_seconds: float, rng: random.Random) -> None:
        self._first, self._max, self._rng = first_seconds, max_seconds, rng
        self.failures = 0

    def reset(self) -> None:
        """Begin again after a success."""
        self.failures = 0

    def next_seconds(self) -> float:
        """Give the next pause: between half of and the whole of the doubled one."""
        whole = min(self._max, self._first * float(2 ** min(self.failures, 30)))
        self.failures += 1
        return whole * self._rng.uniform(0.5, 1.0)
