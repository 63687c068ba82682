"""The age of the last known state: which subjects have not been heard of for longer than they should."""

from __future__ import annotations

from dataclasses import dataclass, field

from bsfg.batch import EntryBatch
from bsfg.latest import newest
from bsfg.ports import ForwardBuffer
from bsfg.retention import Policy

FRAMES_AT_ONCE = 10
"""How many frames of a buffer are looked at in one turn, so that a long one does not keep other alarms waiting."""

SUBJECTS_MAX = Policy().latest_most

Subject = tuple[str, str]


@dataclass(slots=True)
class LatestWatch:
    """Follows one forward buffer and knows when each subject and predicate was last heard of."""

    max_age_seconds: float
    _at: int | None = None
    _heard_unix_ms: dict[Subject, int] = field(default_factory=dict)

    async def look(self, buffer: ForwardBuffer) -> None:
        """Take in what became durable since the last time, and at first what was kept of what has left."""
        stats = await buffer.stats()
        if self._at is None or self._at < stats.start:
            self._absorb(await buffer.kept_latest())
            self._at = max(self._at or 0, stats.start)
        if self._at >= stats.end:
            return
        left = FRAMES_AT_ONCE
        async for frame in buffer.replay(self._at):
            if frame.entries is not None:
                self._absorb(frame.entries)
            self._at, left = frame.last + 1, left - 1
            if not left:
                return

    def alert(self, now_unix_ms: int) -> str | None:
        """Say of how many nothing new has come for too long, and of which one the longest; None when of none."""
        limit = now_unix_ms - 1000 * self.max_age_seconds
        stale = [(heard, subject) for subject, heard in self._heard_unix_ms.items() if heard < limit]
        if not stale:
            return None
        heard, (subject, predicate) = min(stale)
        hours = (now_unix_ms - heard) / 3_600_000
        most = f"nothing of {subject} {predicate} for {hours:.1f} h"
        return f"{len(stale)} of {len(self._heard_unix_ms)} last known states are older than allowed: {most}"

    def _absorb(self, entries: EntryBatch) -> None:
        found = newest(entries)
        times = found.values("appended_at_unix_ms")
        for subject, predicate, time_unix_ms in zip(
            found.values("subject"), found.values("predicate"), times, strict=True
        ):
            known = self._heard_unix_ms.pop((subject, predicate), 0)
            self._heard_unix_ms[subject, predicate] = max(known, int(time_unix_ms))
        while len(self._heard_unix_ms) > SUBJECTS_MAX:
            self._heard_unix_ms.pop(next(iter(self._heard_unix_ms)))
