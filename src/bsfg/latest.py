"""The last known state: the newest entry of each subject and predicate, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch

_ENOUGH_ROWS = 16_384


def newest(entries: EntryBatch, most: int | None = None) -> EntryBatch:
    """Give the last row of each subject and predicate, in the order of the rows; of more than ``most`` the latest."""
    if len(entries) < 2:
        return entries
    columns = {name: entries.column(name) for name in ("subject", "predicate")}
    rows = pa.table({**columns, "row": pa.array(np.arange(len(entries)))})
    last = rows.group_by(["subject", "predicate"], use_threads=False).aggregate([("row", "max")])
    chosen = np.sort(last.column("row_max").to_numpy())
    if most is not None and len(chosen) > most:
        chosen = chosen[-most:]
    return entries if len(chosen) == len(entries) else entries.take(chosen)


class LatestEntries:
    """Collects entries in the order of their offsets and keeps the newest of each subject and predicate."""

    def __init__(self, known: EntryBatch, most: int) -> None:
        self._most = most
        self._parts, self._rows = [known], 0

    def add(self, entries: EntryBatch) -> None:
        """Take in the entries that follow."""
        self._parts.append(entries)
        self._rows += len(entries)
        if self._rows > _ENOUGH_ROWS:
            self._parts, self._rows = [self._newest()], 0

    def result(self) -> EntryBatch:
        """Give what is left, in the order of offsets."""
        return self._newest()

    def _newest(self) -> EntryBatch:
        return newest(joined(self._parts), self._most)


def joined(parts: Sequence[EntryBatch]) -> EntryBatch:
    """Put batches of entries behind each other."""
    return EntryBatch.concat([part for part in parts if len(part)] or [EntryBatch.empty()])
