"""The port through which time comes, and the system's clocks behind it."""

from __future__ import annotations

import time
from typing import Protocol

_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Where time comes from."""

    def now_unix_ms(self) -> int:
        """Give the wall clock."""
        ...

    def monotonic_ms(self) -> int:
        """Give a clock that never jumps."""
        ...


class SystemClock:
    """Wall and monotonic time of this machine."""

    def now_unix_ms(self) -> int:
        """Give the wall clock in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Give the monotonic clock in milliseconds; it counts the time that the machine was suspended, too."""
        return time.clock_gettime_ns(_MONOTONIC) // 1_000_000
