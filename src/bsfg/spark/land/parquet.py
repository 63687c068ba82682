"""Writes Parquet files that nobody is to see yet: under names that readers pass over, synced when they are whole."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bsfg.spark.land.columns import LANDED_SCHEMA, REPEATING
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.layout import STAGED_SUFFIX, Partition

COMPRESSION = "zstd"
ROW_GROUP_BYTES = 128 << 20
"""How much a row group holds before it is compressed, about."""

METADATA = "bsfg"
"""The key in a file's metadata under which it tells what it is, wherever it is taken."""


class StagedFile:
    """One Parquet file in the making; rows come in batches, and leave in row groups."""

    def __init__(self, root: Path, run: str, partition: Partition) -> None:
        self.partition = partition
        self._run, self._root = run, root
        self._name = f"{uuid.uuid4().hex}{STAGED_SUFFIX}"
        self._path = root / run / self._name
        self._writer: pq.ParquetWriter | None = None
        self._sink: pa.OSFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self.waiting_bytes = 0
        self._facts, self._first, self._last = 0, -1, -1

    @property
    def is_open(self) -> bool:
        """Whether something of it is on the disk."""
        return self._writer is not None

    @property
    def size_bytes(self) -> int:
        """How much of it is on the disk."""
        return int(self._sink.tell()) if self._sink is not None else 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows, which stay in memory until `flush`."""
        self._waiting.append(batch)
        self.waiting_bytes += batch.nbytes
        self._facts += batch.num_rows
        ends = pc.min_max(batch.column("offset"))
        first, last = ends["min"].as_py(), ends["max"].as_py()
        self._first = first if self._first < 0 else min(self._first, first)
        self._last = max(self._last, last)

    def flush(self) -> None:
        """Write what waits as a row group."""
        if not self._waiting:
            return
        if self._writer is None:
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pq.ParquetWriter(
                self._sink, LANDED_SCHEMA, compression=COMPRESSION, use_dictionary=list(REPEATING)
            )
        table = pa.Table.from_batches(self._waiting)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self.waiting_bytes = [], 0

    def finish(self) -> Staged:
        """Write what is left, and sync the file."""
        self.flush()
        assert self._writer is not None
        assert self._sink is not None
        about = {**self.partition._asdict(), "first": self._first, "last": self._last, "facts": self._facts}
        self._writer.add_key_value_metadata({METADATA: orjson.dumps(about).decode()})
        self._writer.close()
        self._sink.close()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            size_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        path = f"{self._run}/{self._name}"
        return Staged(path, self.partition.path, self._first, self._last, self._facts, size_bytes)


def partition_of(file: pq.ParquetFile) -> Partition | None:
    """Give the partition that a file says it belongs to, or None when it is not one of ours."""
    metadata = (file.metadata.metadata or {}).get(METADATA.encode())
    if metadata is None or not file.schema_arrow.remove_metadata().equals(LANDED_SCHEMA):
        return None
    about = orjson.loads(metadata)
    return Partition(about["date"], about["predicate"])
