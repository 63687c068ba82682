"""Small questions about batches and buffers that the ports leave to their users."""

from __future__ import annotations

import pyarrow.compute as pc

from bsfg.arrays import constant_value
from bsfg.batch import FactBatch
from bsfg.ports import Replayable


def zones_of(batch: FactBatch, column: str) -> frozenset[str]:
    """Give the zones that a batch names in a column; most batches name one."""
    if batch.has_rows:
        return frozenset(batch.values(column))
    single = constant_value(batch.column(column))
    if single is not None:
        return frozenset({single})
    return frozenset(pc.unique(batch.column(column)).to_pylist())


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
