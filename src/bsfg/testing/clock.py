"""A clock that a test moves by hand."""

from __future__ import annotations

START_UNIX_MS = 1_700_000_000_000


class FakeClock:
    """Wall and monotonic time that stand still until they are moved.

    `advance` lets time pass for both; `jump` moves the wall clock alone, as a wrong time server does.
    """

    def __init__(self, start_unix_ms: int = START_UNIX_MS) -> None:
        self._wall_unix_ms = start_unix_ms
        self._monotonic_ms = 0

    def now_unix_ms(self) -> int:
        """Give the wall clock in milliseconds."""
        return self._wall_unix_ms

    def monotonic_ms(self) -> int:
        """Give the monotonic clock in milliseconds."""
        return self._monotonic_ms

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError("time does not pass backwards; use jump for a wrong clock")
        self._wall_unix_ms += round(seconds * 1000)
        self._monotonic_ms += round(seconds * 1000)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back when negative, while no time passes."""
        self._wall_unix_ms += round(seconds * 1000)
