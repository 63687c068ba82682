"""The wall clock, held against the monotonic one: a jump forward must not make everything look old, nor be stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from bsfg.clock import Clock
from bsfg.retention import ClockGuard


@dataclass(slots=True)
class SteadyClock:
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
    def begun(clock: Clock) -> SteadyClock:
        """Make one that takes the present time for right."""
        steady = SteadyClock(clock)
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
