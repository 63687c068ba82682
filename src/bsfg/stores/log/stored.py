"""Looking up stored facts by offset: in the log while their bytes are there, in the key segments afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bsfg.batch import FactBatch
from bsfg.stores.log.dedupe import Fetch
from bsfg.stores.log.files import Files
from bsfg.stores.log.frame import Damaged, Torn
from bsfg.stores.log.keysegments import KeySegmentName, KeySegments, as_facts, read
from bsfg.stores.log.view import LogView

_Rows = tuple[FactBatch, np.ndarray]
"""Facts, and which of the offsets that were asked for they belong to."""


def stored_facts(view: LogView, keys: KeySegments) -> Fetch:
    """Give the function that fetches facts at sorted offsets."""

    def fetch(offsets: np.ndarray) -> tuple[FactBatch, np.ndarray, np.ndarray]:
        found = np.zeros(len(offsets), dtype=bool)
        parts: list[FactBatch] = []
        retained: list[np.ndarray] = []
        at = 0
        while at < len(offsets):
            rows, count, kept = _fetch_from(view, keys, offsets, at)
            if rows is not None:
                facts, mask = rows
                found[at : at + count] = mask
                parts.append(facts)
                retained.append(np.full(len(facts), kept))
            at += count
        if not parts:
            return FactBatch.empty(), found, np.zeros(0, dtype=bool)
        return FactBatch.concat(parts), found, np.concatenate(retained)

    return fetch


def _fetch_from(view: LogView, keys: KeySegments, offsets: np.ndarray, at: int) -> tuple[_Rows | None, int, bool]:
    """Fetch all offsets that lie in the same frame or key segment as the one at ``at``."""
    offset = int(offsets[at])
    name = keys.covering(offset)
    if name is not None:
        count = int(np.searchsorted(offsets, name.last, side="right")) - at
        rows = keys.rows(name, offsets[at : at + count])
        return ((as_facts(rows[0]), rows[1]) if rows else None), count, False
    frame = view.frame_at(offset)
    if frame is None:
        return None, 1, False
    facts, base, end = frame
    count = int(np.searchsorted(offsets, end, side="left")) - at
    return (facts.take(offsets[at : at + count] - base), np.ones(count, dtype=bool)), count, True


def keys_between(
    view: LogView, files: Files, folder: str, names: Sequence[KeySegmentName], first: int, last: int
) -> Iterator[tuple[FactBatch, np.ndarray]]:
    """Give the facts of a range of offsets, both ends included, with the offsets; what cannot be read is left out."""
    for name in names:
        table = read(files, folder, name) if name.first <= last and name.last >= first else None
        if table is not None:
            offsets = table.column("offset").to_numpy()
            inside = np.flatnonzero((offsets >= first) & (offsets <= last))
            yield as_facts(table).take(inside), offsets[inside]
    for segment in view.segments:
        if segment.base > last:
            break
        for ref in segment.frames:
            if ref.end <= first or ref.base > last:
                continue
            try:
                facts = segment.entries(ref).facts
            except (Torn, Damaged):
                continue
            start, stop = max(first, ref.base), min(last + 1, ref.end)
            yield facts.slice(start - ref.base, stop - start), np.arange(start, stop)
