"""How old the oldest fact is that somebody still has to confirm, held against the age at which it expires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bsfg.ports import Buffer, BufferStats, ConsumerState

if TYPE_CHECKING:
    from bsfg.node.parts import Parts

NEAR_SHARE = 0.8
"""The share of the maximal age from which an unconfirmed fact counts as near its end."""

LOOK_AGAIN_MS = 5_000
"""A frontier that moves all the time is followed at this pace: each look reads an entry."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """The oldest entry of a buffer that is not confirmed; both ages are None where there is none, or no end."""

    offset: int | None = None
    age_seconds: float | None = None
    max_age_seconds: float | None = None

    @property
    def near(self) -> bool:
        """Whether it expires soon, which would lose it to whoever has not confirmed it."""
        if self.age_seconds is None or self.max_age_seconds is None:
            return False
        return self.age_seconds >= NEAR_SHARE * self.max_age_seconds

    def alert(self, about: str) -> str | None:
        """Give what an operator should hear, None when there is time enough."""
        if self.age_seconds is None or self.max_age_seconds is None or not self.near:
            return None
        age, most = _span(self.age_seconds), _span(self.max_age_seconds)
        return f"the oldest unconfirmed fact of {about} is {age} old and expires at {most}"


def _span(seconds: float) -> str:
    return f"{seconds / 86_400:.3g} days" if seconds >= 172_800 else f"{seconds / 3_600:.3g} hours"


@dataclass(slots=True)
class Oldest:
    """Finds the oldest unconfirmed entries, and remembers their times."""

    parts: Parts
    _seen: dict[tuple[str, Buffer], tuple[int, int, int]] = field(default_factory=dict)

    async def of(self, stats: BufferStats, states: Sequence[ConsumerState]) -> Unconfirmed:
        """Look at one buffer and its consumers."""
        max_age_seconds = self.parts.settings.lane(stats.stream).max_age_seconds
        first = first_unconfirmed(stats, states)
        if first is None:
            self._seen.pop((stats.stream, stats.buffer), None)
            return Unconfirmed(max_age_seconds=max_age_seconds)
        appended_at = stats.oldest_unix_ms if first == stats.start else await self._time_of(stats, first)
        if appended_at is None:
            return Unconfirmed(first, max_age_seconds=max_age_seconds)
        age_seconds = max(0.0, (self.parts.steady.now_unix_ms() - appended_at) / 1000)
        return Unconfirmed(first, age_seconds, max_age_seconds)

    async def _time_of(self, stats: BufferStats, offset: int) -> int | None:
        name, now_ms = (stats.stream, stats.buffer), self.parts.clock.monotonic_ms()
        known = self._seen.get(name)
        if known is not None and (known[0] == offset or now_ms - known[2] < LOOK_AGAIN_MS):
            return known[1]
        buffer = await self.parts.buffer(*name)
        async for frame in buffer.replay(offset, end=offset + 1, max_facts=1):
            if frame.entries is not None:
                appended_at = int(frame.entries.to_entries()[0].appended_at_unix_ms)
                self._seen[name] = (offset, appended_at, now_ms)
                return appended_at
        return None


def first_unconfirmed(stats: BufferStats, states: Sequence[ConsumerState]) -> int | None:
    """Give the first retained offset that a required consumer has not confirmed, None when there is none.

    What nobody is required to confirm counts as unconfirmed in a store buffer and as confirmed in a forward buffer,
    as everywhere in retention.
    """
    frontiers = [
        state.checkpoint.committed
        for state in states
        if (state.spec.stream, state.spec.buffer) == (stats.stream, stats.buffer)
        and state.spec.required
        and state.retired_reason is None
    ]
    committed = min(frontiers, default=-1 if stats.buffer == Buffer.STORE else stats.end - 1)
    first = max(committed + 1, stats.start)
    return first if first < stats.end else None
