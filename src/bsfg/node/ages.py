"""Ages: of the oldest fact that somebody must confirm, and of the last known state of each subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bsfg.batch import EntryBatch, newest
from bsfg.ports import Buffer, BufferStats, ConsumerState, ForwardBuffer, Replayable
from bsfg.retention import Policy

if TYPE_CHECKING:
    from bsfg.node.parts import NodeContext


async def offsets_of_span(buffer: Replayable, start_unix_ms: int, end_unix_ms: int) -> tuple[int, int]:
    """Give the first offset that became durable in a span of time, and the first one after it."""
    first = await first_offset_at(buffer, start_unix_ms)
    return first, max(first, await first_offset_at(buffer, end_unix_ms))


async def first_offset_at(buffer: Replayable, unix_ms: int) -> int:
    """Find the oldest retained entry that became durable at a time or later, by halving; the end if there is none.

    Inside a buffer times never decrease, whatever the clock does, so halving is right.
    """
    stats = await buffer.stats()
    low, high = stats.start, stats.end
    while low < high:
        middle = (low + high) // 2
        offset, time_unix_ms = await _entry_at_or_after(buffer, middle, high)
        if time_unix_ms is None or time_unix_ms >= unix_ms:
            high = middle
        else:
            low = offset + 1
    return low


async def _entry_at_or_after(buffer: Replayable, offset: int, end: int) -> tuple[int, int | None]:
    """Give the first entry from an offset on, and its time; None when there is only a gap."""
    async for frame in buffer.replay(offset, end=end, max_facts=1):
        if frame.entries is not None:
            return frame.first, int(frame.entries.column("appended_at_unix_ms")[0].as_py())
    return end, None


FRAMES_AT_ONCE = 10
"""How many frames of a buffer are looked at in one turn, so that a long one does not keep other alarms waiting."""

SUBJECTS_MAX = Policy().latest_most

Subject = tuple[str, str]


@dataclass(slots=True)
class LatestWatch:
    """Follows one forward buffer and knows since when the newest fact of each subject and predicate is known anywhere.

    A fact that came late is as old as it is, and not as new as its arrival.
    """

    max_age_seconds: float
    _at: int | None = None
    _newest: dict[Subject, tuple[int, int]] = field(default_factory=dict)
    """By subject and predicate, the offset of the newest entry and when its fact was first appended, by our clock."""

    async def look(self, buffer: ForwardBuffer, now_unix_ms: int) -> None:
        """Take in what became durable since the last time, and at first what was kept of what has left."""
        stats = await buffer.stats()
        if self._at is None or self._at < stats.start:
            self._absorb(await buffer.kept_latest(), now_unix_ms)
            self._at = max(self._at or 0, stats.start)
        if self._at >= stats.end:
            return
        left = FRAMES_AT_ONCE
        async for frame in buffer.replay(self._at):
            if frame.entries is not None:
                self._absorb(frame.entries, now_unix_ms)
            self._at, left = frame.last + 1, left - 1
            if not left:
                return

    def alert(self, now_unix_ms: int) -> str | None:
        """Say of how many nothing new has come for too long, and of which one the longest; None when of none."""
        limit = now_unix_ms - 1000 * self.max_age_seconds
        stale = [(since, subject) for subject, (_, since) in self._newest.items() if since < limit]
        if not stale:
            return None
        since, (subject, predicate) = min(stale)
        hours = (now_unix_ms - since) / 3_600_000
        most = f"that of {subject} {predicate} is {hours:.1f} h old"
        return f"{len(stale)} of {len(self._newest)} last known states are older than allowed: {most}"

    def _absorb(self, entries: EntryBatch, now_unix_ms: int) -> None:
        found = newest(entries)
        columns = (found.values(name) for name in ("subject", "predicate"))
        since_unix_ms = now_unix_ms - found.ages_ms(now_unix_ms)
        for subject, predicate, offset, since in zip(*columns, found.offsets, since_unix_ms, strict=True):
            known = self._newest.pop((subject, predicate), (-1, 0))
            self._newest[subject, predicate] = max(known, (int(offset), int(since)))
        while len(self._newest) > SUBJECTS_MAX:
            self._newest.pop(next(iter(self._newest)))


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

    parts: NodeContext
    _seen: dict[tuple[str, Buffer], tuple[int, int, int]] = field(default_factory=dict)

    async def of(self, stats: BufferStats, states: Sequence[ConsumerState]) -> Unconfirmed:
        """Look at one buffer and its consumers."""
        max_age_seconds = self.parts.settings.stream(stats.stream).expires_after_seconds
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
