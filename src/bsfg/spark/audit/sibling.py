"""Another link from the same zone: what it brought has the same origin and may have the same offsets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bsfg.spark.audit.evidence import End
from bsfg.spark.audit.scope import Rows, sender_rows
from bsfg.spark.audit.sums import Named


@dataclass(frozen=True, slots=True)
class Sibling:
    """The sender's other buffer, which another link pulls; only a key tells which link brought an entry."""

    log: End
    log_id: str
    end: int

    def has(self, entry: Named) -> bool:
        """Tell whether an entry of the receiver is the one that this buffer has at its offset."""
        if not 0 <= entry.offset < self.end:
            return False
        rows = self.rows(entry.offset, entry.offset + 1)
        keys = zip(rows.entries.values("from_zone"), rows.entries.values("message_id"), strict=True)
        return (entry.from_zone, entry.message_id) in keys

    def rows(self, first: int, end: int) -> Rows:
        """Read a range of offsets."""
        end = min(end, self.end)
        frames = self.log.frames(first, end, self.log_id) if first < end else iter(())
        return Rows.concat([sender_rows(frame.entries) for frame in frames if frame.entries is not None])


def same_keys(offsets: np.ndarray, keys: np.ndarray, known_offsets: np.ndarray, known_keys: np.ndarray) -> np.ndarray:
    """Mark the rows whose key is the one that some sorted offsets are known to have."""
    at = np.searchsorted(known_offsets, offsets)
    result = np.zeros(len(offsets), dtype=bool)
    inside = np.flatnonzero(at < len(known_offsets))
    found = at[inside]
    result[inside] = (known_offsets[found] == offsets[inside]) & (known_keys[found] == keys[inside])
    return result
