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
