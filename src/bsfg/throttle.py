"""How fast a link takes bytes from its sender: a bound that may depend on the time of day, and who goes first.

Whoever is bounded waits before it asks for more. So nothing that has come is held up, no call runs out of time, and a
sender is never asked for more than a link can have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

MINUTE_MS = 60_000
DAY_MINUTES = 24 * 60

BURST_SECONDS = 1.0
"""A link that was idle may take what it did not take in this time at once."""

ANSWER_SECONDS = 0.5
ANSWER_BYTES_MIN = 4 << 10
"""An answer is asked for that takes about so long, and never less: each has costs of its own."""

TURN_SECONDS = 0.1
"""Of those who have waited the next one asks so long after the last: how much comes is known when it is here."""

STANDS_BACK = 9
URGENT_SECONDS = 2.0
"""While urgent facts wait, and so long after, others let nine times as many bytes pass as they take together."""


@dataclass(frozen=True, slots=True)
class BandwidthSpan:
    """Most bytes per second from one minute of the day in UTC to another, which is not in it and may be earlier."""

    first: int
    end: int
    bytes_per_second: int

    def holds(self, minute: int) -> bool:
        """Tell whether a minute of the day is in it."""
        return (minute - self.first) % DAY_MINUTES < ((self.end - self.first) % DAY_MINUTES or DAY_MINUTES)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Most bytes per second at each time of the day; where no span is, there is no bound."""

    spans: tuple[BandwidthSpan, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.spans)

    def at(self, unix_ms: int) -> int | None:
        """Give the bound at a moment, None when there is none."""
        minute = unix_ms // MINUTE_MS % DAY_MINUTES
        return next((span.bytes_per_second for span in self.spans if span.holds(minute)), None)


class Throttle:
    """The bytes that the streams of one link have taken together, and how long whoever asks for more is to wait."""

    def __init__(self, bandwidth: Bandwidth, now_unix_ms: Callable[[], int], urgent: Collection[str] = ()) -> None:
        self._bandwidth, self._now_unix_ms, self._urgent = bandwidth, now_unix_ms, frozenset(urgent)
        self._rate: int | None = None
        self._free_at = self._turn_at = self._others_at = self._urgent_until = 0.0
        self._turns, self._others = asyncio.Lock(), asyncio.Lock()

    def most(self, size_bytes: int) -> int:
        """Give how much of so many bytes to ask for at once."""
        rate = self._bandwidth.at(self._now_unix_ms())
        return size_bytes if rate is None else min(size_bytes, max(ANSWER_BYTES_MIN, int(rate * ANSWER_SECONDS)))

    def took(self, size_bytes: int, by: str | None = None) -> None:
        """Note bytes that have come; ``by`` the consumer that they are for, None for what may be anybody's."""
        rate = self._rate_now()
        if rate is None or size_bytes <= 0:
            return
        now, seconds = asyncio.get_running_loop().time(), size_bytes / rate
        self._free_at = max(self._free_at, now - BURST_SECONDS) + seconds
        if by in self._urgent:
            if self._free_at > now:
                self._urgent_until = self._free_at + URGENT_SECONDS
        elif by is not None and now < self._urgent_until:
            self._others_at = max(self._others_at, now) + (1 + STANDS_BACK) * seconds

    async def wait(self, by: str | None = None) -> None:
        """Wait until more may be asked for, in turn with all who do."""
        if self._rate_now() is None:
            return
        if by in self._urgent or (by is None and self._urgent):
            await self._turn()
            return
        # Of the others one at a time waits among the urgent ones, however many they are.
        waits = self._others.locked()
        async with self._others:
            waits |= await self._until(lambda: min(self._others_at, self._urgent_until))
            await self._turn(waits=waits)

    async def _turn(self, *, waits: bool = False) -> None:
        waits |= self._turns.locked()
        async with self._turns:
            if await self._until(lambda: max(self._free_at, self._turn_at)) or waits:
                self._turn_at = asyncio.get_running_loop().time() + TURN_SECONDS

    async def _until(self, moment: Callable[[], float]) -> bool:
        """Wait for a moment, which may move, or for a time of the day without a bound; tell whether that took time."""
        loop, waited = asyncio.get_running_loop(), False
        while self._rate_now() is not None and (left_seconds := moment() - loop.time()) > 0:
            waited = True
            await asyncio.sleep(min(left_seconds, (MINUTE_MS - self._now_unix_ms() % MINUTE_MS) / 1000))
        return waited

    def _rate_now(self) -> int | None:
        """Give the bound of this moment; nobody waits longer for what was taken before than he would by it."""
        rate, before = self._bandwidth.at(self._now_unix_ms()), self._rate
        if rate != before:
            now, self._rate = asyncio.get_running_loop().time(), rate
            part = min(1.0, before / rate) if before and rate else 0.0
            times = (self._free_at, self._others_at)
            self._free_at, self._others_at = (now + (at - now) * part if at > now else at for at in times)
        return rate
