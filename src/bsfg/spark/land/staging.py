"""What a task does: it reads a range of a buffer and stages one Parquet file, or several, for each partition in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from bsfg.batch import EntryBatch
from bsfg.errors import SpoolNotShared
from bsfg.ports import Frame, GapRecord
from bsfg.spark.fetching import Source
from bsfg.spark.land.columns import By, by_partition, chosen_rows, landed
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.layout import Partition
from bsfg.spark.land.parquet import ROW_GROUP_BYTES, StagedFile
from bsfg.spark.mapping import Place

MEMORY_BYTES = 256 << 20
"""How much a task keeps in memory, over all partitions, before it writes."""

OPEN_FILES_MAX = 64


@dataclass(frozen=True, slots=True)
class Work:
    """What all tasks of a batch need to know; picklable."""

    source: Source
    log_id: str
    by: By
    root: str
    run: str
    file_size_bytes: int
    memory_bytes: int = MEMORY_BYTES
    row_group_bytes: int = ROW_GROUP_BYTES

    def check_shared(self) -> None:
        """Raise `SpoolNotShared` when the landing folder is not there, as on another machine."""
        if not (Path(self.root) / self.run).is_dir():
            hint = "On a cluster all machines must have the folder --out under the same path."
            raise SpoolNotShared(f"{self.root}/{self.run} is not there", hint=hint)


@dataclass(slots=True)
class Stager:
    """Sorts facts into files by partition, with a bound on what it keeps in memory."""

    work: Work
    done: list[Staged] = field(default_factory=list)
    _files: dict[Partition, StagedFile] = field(default_factory=dict)
    _waiting_bytes: int = 0

    def add(self, entries: EntryBatch) -> None:
        """Take facts."""
        work = self.work
        rows = landed(entries, Place(work.source.stream, work.source.buffer, work.log_id))
        for partition, chosen in by_partition(entries, work.by):
            self._add(partition, rows if chosen is None else chosen_rows(rows, chosen))
        if self._waiting_bytes > work.memory_bytes:
            self._make_room()

    def finish(self) -> list[Staged]:
        """Finish all files and give them."""
        for file in list(self._files.values()):
            self._finish(file)
        return self.done

    def _make_room(self) -> None:
        """Write the largest parts until half of the memory is free."""
        for file in sorted(self._files.values(), key=lambda file: -file.waiting_bytes):
            if self._waiting_bytes <= self.work.memory_bytes // 2:
                return
            if file.partition in self._files:
                self._flush(file)

    def _add(self, partition: Partition, rows: pa.RecordBatch) -> None:
        file = self._files.get(partition)
        if file is None:
            file = self._files[partition] = StagedFile(Path(self.work.root), self.work.run, partition)
        before = file.waiting_bytes
        file.add(rows)
        self._waiting_bytes += file.waiting_bytes - before
        if file.waiting_bytes >= self.work.row_group_bytes:
            self._flush(file)

    def _flush(self, file: StagedFile) -> None:
        self._waiting_bytes -= file.waiting_bytes
        file.flush()
        if file.size_bytes >= self.work.file_size_bytes:
            self._finish(file)
            return
        opened = [each for each in self._files.values() if each.is_open]
        if len(opened) > OPEN_FILES_MAX:
            self._finish(max(opened, key=lambda each: each.size_bytes))

    def _finish(self, file: StagedFile) -> None:
        self._waiting_bytes -= file.waiting_bytes
        self.done.append(file.finish())
        del self._files[file.partition]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one task staged of its range."""

    first: int
    next: int
    files: list[Staged]
    gaps: list[dict[str, Any]]
    missing: int
    tail: tuple[int, str] | None


def stage(work: Work, first: int, end: int, note: Callable[[int], None]) -> Receipt:
    """Stage a range of offsets (``end`` exclusive); ``note`` is told how many of them are done."""
    stager, missing = Stager(work), 0
    gaps: list[dict[str, Any]] = []
    tail: tuple[int, str] | None = None
    for frame in work.source.frames(first, end, work.log_id):
        if frame.entries is not None and len(frame.entries):
            stager.add(frame.entries)
            tail = frame.last, frame.entries.column("digest")[-1].as_py().hex()
        elif frame.gap is not None:
            gaps.append(gap_line(frame, work))
            missing += frame.last - frame.first + 1
        note(frame.last + 1 - first)
    return Receipt(first, end, stager.finish(), gaps, missing, tail)


def gap_line(frame: Frame, work: Work) -> dict[str, Any]:
    """Describe a range of facts that are missing, for the list of gaps."""
    assert frame.gap is not None
    return {"first": frame.first, "last": frame.last, **gap_reason(frame.gap), **_place(work)}


def gap_reason(gap: GapRecord) -> dict[str, Any]:
    """Tell why facts are missing."""
    return {"reason": str(gap.reason), "at_unix_ms": gap.at_unix_ms, "detail": gap.detail}


def _place(work: Work) -> dict[str, Any]:
    return {"stream": work.source.stream, "buffer": work.source.buffer, "log_id": work.log_id}
