"""A process that lands numbered facts on a real disk, to be killed.

`python -m tests.spark.landing_process DIR END SEED FORMAT`

It does what the driver and its tasks do, without Spark and without a node, and writes a line for every commit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from bsfg.batch import EntryBatch
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark.calls import BufferSource, NodeAccess
from bsfg.spark.land.folder import Batch, LandingFolder, Replacement
from bsfg.spark.land.places import LocalDisk
from bsfg.spark.land.staging import StagingWork, merge, plan, small_files, stage
from bsfg.spark.land.state import LandedOrigin
from bsfg.spark.land.upkeep import LatestTable
from bsfg.testing.facts import batch

LOG_ID = "cd" * 16
BATCH_FACTS = 60
FILE_SIZE_BYTES = 60_000


@dataclass(frozen=True)
class Numbered(BufferSource):
    """A source of numbered facts; every seventh hundred of them is a gap."""

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give the frames of a range, a few facts each."""
        at = first
        while at < end:
            stop = min(end, at - at % 20 + 20)
            if is_missing(at):
                yield Frame(at, stop - 1, gap=GapRecord(at, stop - 1, GapReason.EVICTED, 1))
            else:
                facts = batch(stop - at, first=at).record_batch
                yield Frame(at, stop - 1, EntryBatch.of(facts, np.arange(at, stop), 1_772_344_800_000 + at * 3_600_000))
            at = stop


def is_missing(offset: int) -> bool:
    """Tell whether an offset is in a gap."""
    return offset // 100 % 7 == 3


def main(out: Path, end: int, seed: str, format: str) -> None:
    """Land batches, with compaction, a new column, the newest facts and vacuuming now and then, up to an offset."""
    random = Random(seed)
    folder = LandingFolder.open(LocalDisk(out))
    if folder.is_new:
        folder.begin(LandedOrigin("operational", "store", LOG_ID, "appended_at", format), 0)
    source = Numbered(NodeAccess("localhost:1"), "operational", "store", 0.0)
    while (first := folder.state.next) < end:
        shape = folder.state.origin.shape
        work = StagingWork(source, LOG_ID, shape, str(out), folder.run, FILE_SIZE_BYTES)
        receipt = stage(work, first, min(end, first + BATCH_FACTS), lambda done: None)
        folder.commit(Batch(first, receipt.next, receipt.files, receipt.gaps, receipt.missing, receipt.tail))
        folder.discard_staged()
        print(folder.state.next, flush=True)
        if random.random() < 0.4:
            compact(folder, out, thorough=random.random() < 0.5)
        if random.random() < 0.3:
            LatestTable(out, folder).run(())
        if random.random() < 0.1 and not shape.columns:
            folder.evolve(["value double"])
        if random.random() < 0.1:
            folder.vacuum(0)
    LatestTable(out, folder).run(())
    folder.close()


def compact(folder: LandingFolder, out: Path, *, thorough: bool) -> None:
    """Merge small files."""
    for partition in list(folder.places.partitions()):
        found = small_files(folder.disk, partition, folder.places.names(partition), FILE_SIZE_BYTES)
        for each in plan(partition, found, FILE_SIZE_BYTES, thorough=thorough):
            merged = merge(out, folder.run, folder.state.origin.shape, each)
            folder.replace([Replacement(merged, each.names)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
