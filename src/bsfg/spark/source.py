"""The data source ``bsfg``: facts of a node as a Spark DataFrame, and DataFrames as facts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bsfg.errors import FactsMissing, FrameInvalid, InvalidArgument
from bsfg.ports import GapRecord
from bsfg.retry import Backoff
from bsfg.spark.calls import BufferSource, check_log
from bsfg.spark.errors import told
from bsfg.spark.mapping import (
    FRAME_SCHEMA,
    REQUIRED,
    SPARK_SCHEMA,
    WHOLE,
    EntryPlace,
    frame_to_spark,
    gap_to_spark,
    missing_columns,
    schema_of,
    to_spark,
)
from bsfg.spark.options import (
    EARLIEST,
    READ,
    READ_STREAM,
    WRITE,
    WRITE_STREAM,
    Position,
    SourceOptions,
    documentation,
    parse,
)
from bsfg.spark.sink import FactsStreamWriter, FactsWriter

IDLE_FIRST_SECONDS, IDLE_MAX_SECONDS = 0.005, 0.1
"""How long a stream without news waits before it asks again, so that an idle one costs next to nothing."""


@dataclass(frozen=True)
class FactsPartition(InputPartition):
    """A range of offsets of one log (``end`` exclusive): what one task reads."""

    log_id: str
    first: int
    end: int


def split(log_id: str, first: int, end: int, partition_facts: int) -> list[FactsPartition]:
    """Cut a range into partitions of nearly the same size; the same range is always cut alike."""
    count = -(-(end - first) // partition_facts)
    cuts = [first + (end - first) * piece // count for piece in range(count)] if count else []
    return [FactsPartition(log_id, at, to) for at, to in zip(cuts, [*cuts[1:], end], strict=True)] if cuts else []


class RangeReader:
    """What both readers have in common: one buffer, some columns, and how a partition of it is read."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self.options, self.columns = options, tuple(columns)
        self.source = BufferSource(
            options.access, options["stream"], options["buffer"], options["retrySeconds"], options["carryOnly"]
        )

    def batches(self, partition: FactsPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition as Arrow batches."""
        return self._frames(partition) if self.options["rows"] == "frames" else self._facts(partition)

    def _facts(self, partition: FactsPartition) -> Iterator[pa.RecordBatch]:
        place = EntryPlace(self.source.stream, self.source.buffer, partition.log_id)
        for frame in self.source.frames(partition.first, partition.end, partition.log_id):
            if frame.entries is not None:
                yield to_spark(frame.entries, place, self.columns)
            elif frame.gap is not None:
                self._check_gap(frame.first, frame.last, frame.gap)
                yield gap_to_spark(frame.first, frame.last, frame.gap, place, self.columns)

    def _frames(self, partition: FactsPartition) -> Iterator[pa.RecordBatch]:
        for frame in self.source.raw_frames(partition.first, partition.end, partition.log_id):
            if frame.gap is not None:
                self._check_gap(frame.first, frame.last, frame.gap)
            row = frame_to_spark(frame.first, frame.last, frame.data, frame.gap, partition.log_id)
            yield row.select(self.columns)

    def _check_gap(self, first: int, last: int, gap: GapRecord) -> None:
        """Raise `FactsMissing` unless gap records are asked for."""
        if self.options["gaps"] == "rows":
            return
        where, why = f"{self.source.stream}/{self.source.buffer}", f"{gap.reason} {gap.detail}".strip()
        raise FactsMissing(f"the facts {first}..{last} of {where} are not there: {why}", first=first, last=last)

    def resolve(self, wanted: Position) -> tuple[str, int]:
        """Give the log and the offset that a position means now."""
        if wanted.offset is not None:
            head = self.source.head()
            check_log(head, head.log_id, wanted.offset)
            return head.log_id, wanted.offset
        if wanted.unix_ms is not None or wanted.word == EARLIEST:
            head = self.source.head(unix_ms=max(0, wanted.unix_ms or 0))
            return head.log_id, head.start
        head = self.source.head()
        return head.log_id, head.end


class FactsReader(RangeReader, DataSourceReader):
    """Reads a range of a buffer at once.

    It takes no filters from Spark, although it could narrow its range by them: Spark 4.3 keeps the partitions that it
    got for the filters of one query, and reads them again for the next query of the same DataFrame, without its rows
    outside. Options say which range is meant.
    """

    @told
    def partitions(self) -> list[FactsPartition]:
        """Find out which offsets are meant, and cut them into partitions."""
        log_id, first = self.resolve(self.options["startingOffsets"] or Position(word=EARLIEST))
        other, end = self.resolve(self.options["endingOffsets"])
        if other != log_id:
            raise FrameInvalid("the log of the node was exchanged while it was asked")
        found = split(log_id, first, max(first, end), self.options["partitionFacts"])
        # Spark reads a list without partitions as one partition of its own making.
        return found or [FactsPartition(log_id, first, first)]

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition."""
        assert isinstance(partition, FactsPartition)
        return self.batches(partition)


class FactsStreamReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a buffer as a stream; its offsets are ``{"log_id": …, "offset": the next one}``."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._target: int | None = None
        self._idle = Backoff(IDLE_FIRST_SECONDS, IDLE_MAX_SECONDS)

    @told
    def initialOffset(self) -> dict[str, Any]:
        """Give where a new query starts."""
        starting, consumer = self.options["startingOffsets"], self.options["consumer"]
        if starting is None and consumer is not None:
            head = self.source.consumer_head(consumer)
            return _offset(head.log_id, head.start)
        return _offset(*self.resolve(starting or Position(word=EARLIEST)))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Give how much a micro-batch may have."""
        return ReadMaxRows(self.options["maxFactsPerBatch"])

    @told
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Give where the next micro-batch ends: at the end of the buffer, or as far as the limit allows."""
        log_id, at = _read_offset(start)
        end = self._end(log_id, at)
        if end == at and self._target is None:
            time.sleep(self._idle.next_seconds())
            end = self._end(log_id, at)
        if end > at:
            self._idle.reset()
        return _offset(log_id, at + _allowed(end - at, limit))

    def _end(self, log_id: str, at: int) -> int:
        head = self.source.head()
        check_log(head, log_id, at)
        return head.end if self._target is None else max(at, min(head.end, self._target))

    @told
    def reportLatestOffset(self) -> dict[str, Any]:
        """Give where the buffer ends, for the progress of the query."""
        head = self.source.head()
        return _offset(head.log_id, head.end)

    @told
    def prepareForTriggerAvailableNow(self) -> None:
        """Take note of where the buffer ends now: a query with this trigger goes no further."""
        self._target = self.source.head().end

    @told
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[FactsPartition]:
        """Cut a micro-batch into partitions."""
        (log_id, first), (_, last) = _read_offset(start), _read_offset(end)
        return split(log_id, first, last, self.options["partitionFacts"])

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition."""
        assert isinstance(partition, FactsPartition)
        return self.batches(partition)

    @told
    def commit(self, end: dict[str, Any]) -> None:
        """Confirm for the consumer, if there is one, what Spark has processed."""
        log_id, offset = _read_offset(end)
        if self.options["consumer"] is not None and offset > 0:
            self.source.confirm(self.options["consumer"], offset - 1, log_id)


def _allowed(available: int, limit: ReadLimit) -> int:
    if isinstance(limit, ReadAllAvailable):
        return available
    return min(available, limit.max_rows) if isinstance(limit, ReadMaxRows) else available


def _offset(log_id: str, offset: int) -> dict[str, Any]:
    return {"log_id": log_id, "offset": offset}


def _read_offset(value: dict[str, Any]) -> tuple[str, int]:
    log_id, offset = value.get("log_id"), value.get("offset")
    if not isinstance(log_id, str) or not isinstance(offset, int):
        raise FrameInvalid(f"the checkpoint holds {value!r}, which is no offset of a buffer")
    return log_id, offset


FRAME_COLUMNS = ("first", "last", "entries", "gap")


class FactsSource(DataSource):
    """Facts of a node, found by Spark as ``format("bsfg")`` without registration.

    >>> facts = spark.read.format("bsfg").options(**node).option("stream", "operational").load()
    >>> facts.where("predicate = 'temperature_measured'").select("subject", "object_text").show()

    A stream of what is appended, each fact once per checkpoint:

    >>> facts = spark.readStream.format("bsfg").options(**node).option("stream", "operational").load()
    >>> facts.writeStream.format("parquet").option("checkpointLocation", "...").start("facts")

    ``node`` holds ``address`` and, for TLS, ``ca``, ``cert``, ``key`` and ``serverName``.

    Options:

    """

    __doc__ += documentation()

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "bsfg"

    @told
    def schema(self) -> StructType:
        """Give the columns: all of them, or those that the options name."""
        options = parse(self.options, READ, READ_STREAM)
        return from_arrow_schema(FRAME_SCHEMA if options["rows"] == "frames" else schema_of(options.columns))

    @told
    def reader(self, schema: StructType) -> FactsReader:
        """Give what reads a range at once."""
        options = parse(self.options, READ)
        return FactsReader(options, _columns(schema, options))

    @told
    def streamReader(self, schema: StructType) -> FactsStreamReader:
        """Give what reads a stream."""
        options = parse(self.options, READ_STREAM)
        return FactsStreamReader(options, _columns(schema, options))

    @told
    def writer(self, schema: StructType, overwrite: bool) -> FactsWriter:
        """Give what writes a DataFrame once."""
        return FactsWriter(_writing(self.options, schema, WRITE, overwrite))

    @told
    def streamWriter(self, schema: StructType, overwrite: bool) -> FactsStreamWriter:
        """Give what writes a stream."""
        return FactsStreamWriter(_writing(self.options, schema, WRITE_STREAM, overwrite))


def _writing(given: Mapping[str, str], schema: StructType, use: str, overwrite: bool) -> SourceOptions:
    """Check what is to be written, and how."""
    options = parse(given, use)
    if overwrite:
        raise InvalidArgument("facts are never overwritten", hint='Write with mode("append").')
    names = schema.fieldNames()
    needed: Sequence[str] = REQUIRED
    if options["mode"] == "put":
        needed = FRAME_COLUMNS if "entries" in names else WHOLE
    missing = missing_columns(names, needed)
    if missing:
        raise InvalidArgument(f"the column {missing[0]} is missing", hint=f"Needed are {', '.join(needed)}.")
    _check_types(schema, FRAME_SCHEMA if needed is FRAME_COLUMNS else SPARK_SCHEMA)
    if options["mode"] == "put" and "log_id" not in names and options["logId"] is None:
        raise InvalidArgument("put needs the column log_id, or the option logId")
    return options


def _columns(schema: StructType, options: SourceOptions) -> list[str]:
    """Give the columns of a schema, or raise `InvalidArgument` when it asks for something that there is not."""
    frames = options["rows"] == "frames"
    _check_types(schema, FRAME_SCHEMA if frames else SPARK_SCHEMA)
    names: list[str] = schema.fieldNames()
    if "gap" in names and options["gaps"] != "rows" and not frames:
        raise InvalidArgument('the column gap needs the option gaps = "rows"')
    return names


def _check_types(schema: StructType, kind: pa.Schema) -> None:
    """Raise `InvalidArgument` unless every column is one that there is, with its type."""
    known = kind.names
    for field in schema:
        if field.name not in known:
            raise InvalidArgument(f"there is no column {field.name!r}", hint=f"There are {', '.join(known)}.")
        wanted, found = _spark_type(kind.field(field.name)), field.dataType.simpleString()
        if found != wanted:
            raise InvalidArgument(f"the column {field.name} must be of type {wanted}, not {found}")


def _spark_type(field: pa.Field) -> str:
    found: StructType = from_arrow_schema(pa.schema([field]))
    return str(found[0].dataType.simpleString())
