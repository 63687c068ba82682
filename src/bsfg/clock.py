"""The port through which time comes, the system's clocks, and one that does not follow a jump."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from bsfg.retention import ClockGuard

_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Where time comes from."""

    def now_unix_ms(self) -> int:
        """Give the wall clock."""

    def monotonic_ms(self) -> int:
        """Give a clock that never jumps."""


class SystemClock:
    """Wall and monotonic time of this machine."""

    def now_unix_ms(self) -> int:
        """Give the wall clock in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Give the monotonic clock in milliseconds; it counts the time that the machine was suspended, too."""
        return time.clock_gettime_ns(_MONOTONIC) // 1_000_000


@dataclass(slots=True)
class JumpGuardedClock:
    """Tells the wall clock, or while that has jumped forward, where it would be without the jump.

    What is judged by age, and what becomes the time of an entry, asks this clock, and asks it again each time: a jump
    may come between two looks. One wild reading would otherwise stand in a log for good, since times in it never
    decrease: everything behind it would have that time until the clock has caught up.
    """

    clock: Clock
    guard: ClockGuard = field(default_factory=ClockGuard)
    _wall_unix_ms: int = 0
    _monotonic_ms: int = 0

    @staticmethod
    def begun(clock: Clock) -> JumpGuardedClock:
        """Make one that takes the present time for right."""
        steady = JumpGuardedClock(clock)
        _ = steady.trusted
        return steady

    @property
    def trusted(self) -> bool:
        """Whether the wall clock is where it should be; if not, nothing expires until it is, or the node restarts."""
        wall_unix_ms, monotonic_ms = self.clock.now_unix_ms(), self.clock.monotonic_ms()
        if self.guard.observe(wall_unix_ms, monotonic_ms):
            self._wall_unix_ms, self._monotonic_ms = wall_unix_ms, monotonic_ms
        return self.guard.trusted

    def now_unix_ms(self) -> int:
        """Give the time."""
        if self.trusted:
            return self.clock.now_unix_ms()
        return self._wall_unix_ms + self.clock.monotonic_ms() - self._monotonic_ms

    def monotonic_ms(self) -> int:
        """Give a clock that never jumps."""
        return self.clock.monotonic_ms()
