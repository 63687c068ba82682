"""Chooses the small files of a landing folder, has them merged, and puts the results in their place."""

from __future__ import annotations

import time
from collections.abc import Callable

from bsfg.spark.land.compaction import Merge, partitions, plan, small_files
from bsfg.spark.land.folder import LandingFolder, Staged
from bsfg.spark.land.settings import Landed

MergeAll = Callable[[list[Merge]], list[Staged | str]]
"""Merges files, and gives in the place of a result the name of a file that is not ours."""

MERGES_AT_ONCE = 32


class Compactor:
    """Merges small files, of the partitions that were touched or of all; ``done`` is told what it did."""

    def __init__(self, merge_all: MergeAll, folder: LandingFolder, file_size_bytes: int, done: Landed) -> None:
        self.touched: set[str] = set()
        self._merge_all, self._folder = merge_all, folder
        self._file_size_bytes, self._done = file_size_bytes, done
        self._looked_at_all = False
        self._not_ours: set[str] = set()

    def run(self, *, thorough: bool = False) -> None:
        """Merge what is worth it; the first time all partitions are looked at, later those that were touched."""
        if not self._looked_at_all or thorough:
            self.touched.update(partitions(self._folder.disk))
            self._looked_at_all = True
        began = time.monotonic()
        merges = [merge for partition in sorted(self.touched) for merge in self._plan(partition, thorough)]
        for start in range(0, len(merges), MERGES_AT_ONCE):
            self._merge(merges[start : start + MERGES_AT_ONCE])
        self.touched.clear()
        self._done.merging_seconds += time.monotonic() - began

    def _plan(self, partition: str, thorough: bool) -> list[Merge]:
        files = small_files(self._folder.disk, partition, self._file_size_bytes)
        ours = [small for small in files if f"{partition}/{small.name}" not in self._not_ours]
        return plan(partition, ours, self._file_size_bytes, thorough=thorough)

    def _merge(self, merges: list[Merge]) -> None:
        results = self._merge_all(merges)
        for merge, result in zip(merges, results, strict=True):
            if isinstance(result, Staged):
                self._folder.replace(merge.partition, [result], merge.names)
                self._done.merged_files += len(merge.names)
                self._done.merged_into += 1
            else:
                self._not_ours.add(f"{merge.partition}/{result}")
        self._folder.discard_staged()
