"""The system's clocks behind the `Clock` port."""

from __future__ import annotations

import time

_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Wall and monotonic time of this machine."""

    def now_unix_ms(self) -> int:
        """Give the wall clock in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Give the monotonic clock in milliseconds; it counts the time that the machine was suspended, too."""
        return time.clock_gettime_ns(_MONOTONIC) // 1_000_000
