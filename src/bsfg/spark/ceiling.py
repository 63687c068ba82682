"""A source and a sink without any input or output: as fast as Spark itself carries frames of facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from bsfg.spark.mapping import FRAME_SCHEMA, frame_to_spark

FORMAT = "bsfg-ceiling"


@dataclass(frozen=True)
class EqualFrames(InputPartition):
    """So many frames of the same size."""

    count: int
    facts: int
    size_bytes: int


@cache
def _frame(size_bytes: int) -> bytes:
    return bytes(size_bytes)


class CeilingReader(DataSourceReader):
    """Makes frames that hold nothing, of the size that real ones have."""

    def __init__(self, frames: EqualFrames) -> None:
        self._frames = frames

    def partitions(self) -> list[InputPartition]:
        """Give all frames to one task, as a replay does."""
        return [self._frames]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give frame after frame."""
        assert isinstance(partition, EqualFrames)
        for number in range(partition.count):
            first = number * partition.facts
            yield frame_to_spark(first, first + partition.facts - 1, _frame(partition.size_bytes), None, "0" * 32)


class CeilingWriter(DataSourceArrowWriter):
    """Looks at nothing and keeps nothing."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take all frames."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


class CeilingSource(DataSource):
    """The source and the sink; options ``frames``, ``facts`` and ``bytes`` say how many of which size."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Give the columns of frames."""
        return from_arrow_schema(FRAME_SCHEMA)

    def reader(self, schema: StructType) -> CeilingReader:
        """Give the reader."""
        options = self.options
        return CeilingReader(EqualFrames(int(options["frames"]), int(options["facts"]), int(options["bytes"])))

    def writer(self, schema: StructType, overwrite: bool) -> CeilingWriter:
        """Give the writer."""
        return CeilingWriter()
