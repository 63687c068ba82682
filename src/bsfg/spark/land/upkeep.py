"""What is done beside landing: small files are merged, and a table of the newest facts is kept in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bsfg.spark.land.folder import LandingFolder, Replacement, Staged, telling
from bsfg.spark.land.staging import ROWS_AT_ONCE, Merge, StagedFile, partition_of, plan, small_files
from bsfg.spark.land.state import LATEST, Landed, Partition, Shape, TableFormat, file_range

MergeAll = Callable[[list[Merge]], list[Staged | str | None]]
"""Merges files; in the place of a result is the name of a file that is not ours, None when one was not there."""

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
            self.touched.update(self._folder.places.partitions())
            self._looked_at_all = True
        began = time.monotonic()
        merges = [merge for partition in sorted(self.touched) for merge in self._plan(partition, thorough)]
        for start in range(0, len(merges), MERGES_AT_ONCE):
            self._merge(merges[start : start + MERGES_AT_ONCE])
        self.touched.clear()
        self._done.merging_seconds += time.monotonic() - began

    def _plan(self, partition: str, thorough: bool) -> list[Merge]:
        folder = self._folder
        files = small_files(folder.disk, partition, folder.places.names(partition), self._file_size_bytes)
        ours = [small for small in files if f"{partition}/{small.name}" not in self._not_ours]
        return plan(partition, ours, self._file_size_bytes, thorough=thorough)

    def _merge(self, merges: list[Merge]) -> None:
        replacements = []
        for merge, result in zip(merges, self._merge_all(merges), strict=True):
            if isinstance(result, str):
                self._not_ours.add(f"{merge.partition}/{result}")
            # What somebody deleted meanwhile is not to come back.
            elif result is not None and {*merge.names} <= {*self._folder.places.names(merge.partition)}:
                replacements.append(Replacement(result, merge.names))
        if replacements:
            self._folder.replace(replacements)
        self._done.merged_files += sum(len(each.removes) for each in replacements)
        self._done.merged_into += len(replacements)
        self._folder.discard_staged()


_ENOUGH_ROWS = 200_000
_KEY = ["subject", "predicate"]


class LatestTable:
    """Keeps the newest fact of each subject and predicate, as a table beside the landed facts.

    Taking facts in twice changes nothing, because an older fact never replaces a newer one. So this table needs no care
    of its own: after a kill, the facts since its last commit are read again from the files that were landed.
    """

    def __init__(self, root: Path, folder: LandingFolder) -> None:
        self._root, self._folder = root, folder
        self._looked_at_all = False

    def run(self, touched: Iterable[str]) -> int:
        """Take in what was landed since the last time, and count the keys that have a newer fact.

        The first time all partitions are looked at, and when somebody has removed the table; later those that were
        touched.
        """
        state = self._folder.state
        known = state.latest if (self._root / LATEST).is_dir() else None
        since = state.start if known is None else known
        if since == state.next:
            return 0
        shape = state.origin.shape
        goes_on = self._looked_at_all and known is not None
        partitions = touched if goes_on else self._folder.places.partitions()
        with telling("keeping the newest facts"):
            found = newest(self._facts(sorted(partitions), shape, since))
            split = () if found is None else _split(found)
            replacements = [self._replacement(shape.of_latest, *each) for each in split]
        self._folder.replace(replacements, latest=state.next)
        self._folder.discard_staged()
        self._looked_at_all = True
        return 0 if found is None else len(found)

    def _facts(self, partitions: Iterable[str], shape: Shape, since: int) -> Iterator[pa.Table]:
        """Give the facts from an offset on, with the values of their partitions as columns."""
        for partition in partitions:
            for name in self._folder.places.names(partition):
                offsets = file_range(name)
                # What others have merged of a table of Delta Lake has a name of theirs, and tells no offsets.
                if offsets is None or offsets[1] >= since:
                    try:
                        yield from self._read(partition, name, shape, since)
                    except FileNotFoundError:
                        # Plain files may be deleted at any time; what a table's log names must be there.
                        if self._folder.state.origin.format != TableFormat.PARQUET:
                            raise

    def _read(self, folder: str, file: str, shape: Shape, since: int) -> Iterator[pa.Table]:
        with pq.ParquetFile(self._root / folder / file) as source:
            partition = partition_of(source, shape) or Partition.at(folder)
            for batch in source.iter_batches(ROWS_AT_ONCE, use_threads=False):
                rows = shape.conformed(batch)
                for name, value in partition.values:
                    column = pa.repeat(pa.scalar(value or None, pa.string()), len(rows))
                    rows = rows.append_column(name, column)
                yield rows.filter(pc.greater_equal(rows.column("offset"), since))

    def _replacement(self, shape: Shape, predicate: str, rows: pa.Table) -> Replacement:
        """Stage the newest facts of a predicate, those that are known and those that are new."""
        partition = Partition((("predicate", predicate),))
        folder = f"{LATEST}/{partition.path}"
        names = self._folder.places.names(folder)
        known = [shape.conformed(pq.ParquetFile(self._root / folder / name).read()) for name in names]
        file = StagedFile(self._root, self._folder.run, shape, partition, f"{LATEST}/")
        whole = _newest(pa.concat_tables([*known, shape.conformed(rows)]), ["subject"])
        for batch in whole.combine_chunks().to_batches():
            file.add(batch)
        return Replacement(file.finish(), names)


def newest(parts: Iterable[pa.Table]) -> pa.Table | None:
    """Give the newest fact of each subject and predicate; None when there are no facts."""
    waiting: list[pa.Table] = []
    for part in parts:
        waiting.append(_newest(part, _KEY))
        if sum(map(len, waiting)) > _ENOUGH_ROWS:
            waiting = [_newest(pa.concat_tables(waiting), _KEY)]
    found = _newest(pa.concat_tables(waiting), _KEY) if waiting else None
    return found if found is not None and len(found) else None


def _newest(rows: pa.Table, key: list[str]) -> pa.Table:
    if len(rows) < 2:
        return rows
    last = rows.select([*key, "offset"]).group_by(key, use_threads=False).aggregate([("offset", "max")])
    # A fact that is taken in again stands there twice.
    offsets, places = np.unique(rows.column("offset").to_numpy(), return_index=True)
    chosen = places[np.searchsorted(offsets, last.column("offset_max").to_numpy())]
    return rows if len(chosen) == len(rows) else rows.take(pa.array(np.sort(chosen)))


def _split(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Give the rows of each predicate."""
    predicates = pc.fill_null(rows.column("predicate"), "")
    for predicate in pc.unique(predicates).to_pylist():
        yield predicate, rows.filter(pc.equal(predicates, predicate))
