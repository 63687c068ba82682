"""Looking at a buffer without taking anything from it: the newest facts that fit, those since a moment, those to come.

Nobody is remembered for it: no cursor moves, nothing is kept for whoever looks, and what leaves the buffer meanwhile is
a gap to him as to everybody. `bsfg tail` looks so over the wire, the node for those who watch over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from bsfg.batch import EntryBatch
from bsfg.filters import fitting
from bsfg.offload import by_size
from bsfg.ports import Frame

FRAME_FACTS = 2_000
"""How many facts are looked at in one piece."""

_STEP, _STEP_MAX = 1_000, 64_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FactChoice:
    """Which facts are wanted: patterns in which `*` stands for any text; None fits all."""

    subject: str | None = None
    predicate: str | None = None
    from_zone: str | None = None

    def fitting(self, entries: EntryBatch) -> EntryBatch:
        """Give the entries that fit."""
        for name in ("subject", "predicate", "from_zone"):
            entries = _matching(entries, name, getattr(self, name))
        return entries


def _matching(entries: EntryBatch, name: str, pattern: str | None) -> EntryBatch:
    if pattern is None:
        return entries
    return entries.take(np.flatnonzero(fitting(entries.column(name), (pattern,))))


class LookedAt(Protocol):
    """A buffer that somebody may read."""

    log_id: str
    """The history that it had when its end was last asked for."""

    async def end(self) -> int:
        """Give the offset behind its last entry."""

    def offsets(self, first: int, end: int) -> AsyncIterator[Frame]:
        """Give a range of offsets (``end`` exclusive)."""

    def times(self, since_unix_ms: int) -> AsyncIterator[Frame]:
        """Give what became durable from a moment on."""


@dataclass(slots=True)
class WatchedBuffer:
    """A buffer that somebody looks at; ``at`` is the offset of what was not shown yet."""

    buffer: LookedAt
    choice: FactChoice
    at: int
    unsearched: int = 0
    """Below this offset nobody has looked for the newest that fit, although fewer were found than wanted."""
    restored: int = field(default=0, init=False)
    """How often the buffer turned out to be another than what had been shown, and was gone on with from its end."""
    _log_id: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._log_id = self.buffer.log_id

    async def newest(self, count: int, reach: int | None = None) -> AsyncIterator[Frame]:
        """Give frames with the newest so many entries that fit, looked for ``reach`` offsets back, or from the start.

        They are counted first and then read again: however many are looked through, only one frame is held.
        """
        end = first = self.at
        step, left, least = max(_STEP, count), count, 0 if reach is None else max(0, end - reach)
        while left > 0 and first > least:
            upto, first = first, max(least, first - step)
            step = min(2 * step, _STEP_MAX)
            async for frame in self._frames(first, upto):
                left -= len(frame.entries) if frame.entries is not None else 0
        self.unsearched = first if left > 0 else 0
        over = max(0, -left)
        async for frame in self._frames(first, end):
            if frame.entries is None:
                if not over:
                    yield frame
                continue
            skipped = min(over, len(frame.entries))
            over -= skipped
            if skipped < len(frame.entries):
                yield replace(frame, entries=frame.entries.slice(skipped))

    async def since(self, unix_ms: int) -> AsyncIterator[Frame]:
        """Give what became durable from a moment on."""
        async for frame in self.buffer.times(unix_ms):
            self.at = max(self.at, frame.last + 1)
            yield await self._fitting(frame)

    async def news(self, end: int | None = None) -> AsyncIterator[Frame]:
        """Give what came since the last look, up to an offset or to the end."""
        end = await self.end() if end is None else end
        async for frame in self._frames(self.at, end):
            self.at = frame.last + 1
            yield frame

    async def end(self) -> int:
        """Give where the buffer ends now; one that ends before what was shown was restored, and goes on there.

        So does one with another history: it may have grown past what was shown before anybody looked again.
        """
        end = await self.buffer.end()
        if end < self.at or self.buffer.log_id != self._log_id:
            self.restored, self.at, self._log_id = self.restored + 1, end, self.buffer.log_id
        return end

    async def _frames(self, first: int, end: int) -> AsyncIterator[Frame]:
        if first < end:
            async for frame in self.buffer.offsets(first, end):
                yield await self._fitting(frame)

    async def _fitting(self, frame: Frame) -> Frame:
        """Give what fits of a frame; patterns are tried on many facts beside the event loop."""
        if frame.entries is None or self.choice == FactChoice():
            return frame
        entries = await by_size(frame.entries.weight_bytes, self.choice.fitting, frame.entries)
        return replace(frame, entries=entries)
