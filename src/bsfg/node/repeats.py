"""Lines that repeat themselves: a few are written as they come, the rest of a minute is only counted.

A caller decides how often he is refused; he must not decide how fast the log grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bsfg.ports import Clock

FREE = 5
"""So many lines of one kind are written in a minute."""

QUIET_MS = 60_000
KINDS_MAX = 128
"""So many kinds are told apart; the rest is one kind."""

OTHERS = ("others",)


@dataclass(slots=True)
class _Kind:
    """A kind of line: since when it is counted, and how many came."""

    since_ms: int
    count: int = 0


class Repeats:
    """Decides which lines are written, and how many were not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def tell(self, kind: tuple[str, ...], write: Callable[[int], None]) -> None:
        """Write a line of a kind, or only count it; ``write`` is given how many were left out before it."""
        now_ms = self._clock.monotonic_ms()
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._forget(now_ms)
            kind = kind if len(self._kinds) < KINDS_MAX else OTHERS
        found = self._kinds.get(kind)
        left_out = 0
        if found is None or now_ms - found.since_ms >= QUIET_MS:
            left_out = max(0, found.count - FREE) if found is not None else 0
            found = self._kinds[kind] = _Kind(now_ms)
        found.count += 1
        if found.count <= FREE:
            write(left_out)

    def _forget(self, now_ms: int) -> None:
        """Forget kinds of which nothing is left to tell."""
        for kind, found in list(self._kinds.items()):
            if now_ms - found.since_ms >= QUIET_MS and found.count <= FREE:
                del self._kinds[kind]
