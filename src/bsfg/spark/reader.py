"""Reads a buffer into Spark: a range at once, or as a stream of micro-batches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from bsfg.errors import FactsMissing, FrameInvalid
from bsfg.ports import Frame
from bsfg.spark.fetching import Source, check_log
from bsfg.spark.mapping import Place, gap_to_spark, to_spark
from bsfg.spark.options import EARLIEST, Options, Position, ceil_unix_ms
from bsfg.spark.told import told

PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
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

    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        self.options, self.columns = options, tuple(columns)
        self.source = Source(options.access, options["stream"], options["buffer"], options["retrySeconds"])

    def batches(self, partition: FactsPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition as Arrow batches."""
        place = Place(self.source.stream, self.source.buffer, partition.log_id)
        for frame in self.source.frames(partition.first, partition.end, partition.log_id):
            if frame.entries is not None:
                yield to_spark(frame.entries, place, self.columns)
            elif self.options["gaps"] == "rows":
                yield gap_to_spark(frame, place, self.columns)
            else:
                raise self._missing(frame)

    def _missing(self, frame: Frame) -> FactsMissing:
        gap = frame.gap
        why = f"{gap.reason}{f' ({gap.detail})' if gap.detail else ''}" if gap is not None else "no reason given"
        return FactsMissing(
            f"the facts {frame.first}..{frame.last} of {self.source.stream}/{self.source.buffer} are not there: {why}",
            first=frame.first,
            last=frame.last,
        )

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
    """Reads a range of a buffer at once."""

    @told
    def partitions(self) -> list[FactsPartition]:
        """Find out which offsets are meant, and cut them into partitions."""
        log_id, first = self.resolve(self.options["startingOffsets"] or Position(word=EARLIEST))
        other, end = self.resolve(self.options["endingOffsets"])
        if other != log_id:
            raise FrameInvalid("the log of the node was exchanged while it was asked")
        first, end = self.narrowed(first, end)
        found = split(log_id, first, max(first, end), self.options["partitionFacts"])
        # Spark reads a list without partitions as one partition of its own making.
        return found or [FactsPartition(log_id, first, first)]

    def narrowed(self, first: int, end: int) -> tuple[int, int]:
        """Give the part of a range that is asked for."""
        return first, end

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition."""
        assert isinstance(partition, FactsPartition)
        return self.batches(partition)


class FilteredFactsReader(FactsReader):
    """A reader that also narrows its range by the filters of a query; Spark still applies every filter itself."""

    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._from_offset, self._before_offset = 0, sys.maxsize
        self._from_unix_ms, self._before_unix_ms = 0, sys.maxsize

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take note of comparisons of offset and appended_at with a value."""
        for each in filters:
            if isinstance(each, (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)):
                if each.attribute == ("offset",) and isinstance(each.value, int):
                    self._note_offset(each, each.value)
                elif each.attribute == ("appended_at",) and isinstance(each.value, datetime):
                    self._note_time(each, each.value)
        return filters

    def _note_offset(self, each: Filter, value: int) -> None:
        if isinstance(each, (EqualTo, GreaterThan, GreaterThanOrEqual)):
            self._from_offset = max(self._from_offset, value + isinstance(each, GreaterThan))
        if isinstance(each, (EqualTo, LessThan, LessThanOrEqual)):
            self._before_offset = min(self._before_offset, value + (not isinstance(each, LessThan)))

    def _note_time(self, each: Filter, value: datetime) -> None:
        # A bound that is a little too wide does no harm, so "after" is taken for "from".
        moment = value if value.tzinfo is not None else value.astimezone()
        unix_ms = ceil_unix_ms(moment)
        if isinstance(each, (EqualTo, GreaterThan, GreaterThanOrEqual)):
            self._from_unix_ms = max(self._from_unix_ms, unix_ms)
        if isinstance(each, (EqualTo, LessThan, LessThanOrEqual)):
            self._before_unix_ms = min(self._before_unix_ms, unix_ms + (not isinstance(each, LessThan)))

    def narrowed(self, first: int, end: int) -> tuple[int, int]:
        """Give the part of a range that the filters ask for."""
        first, end = max(first, self._from_offset), min(end, self._before_offset)
        if self._from_unix_ms > 0:
            first = max(first, self.source.head(unix_ms=self._from_unix_ms).start)
        if self._before_unix_ms < sys.maxsize:
            end = min(end, self.source.head(unix_ms=max(0, self._before_unix_ms)).start)
        return first, end


def batch_reader(options: Options, columns: Sequence[str]) -> FactsReader:
    """Give the reader that the calling process can use.

    Spark refuses a reader that takes filters where it is not set to give any, and does not tell its setting. But it
    asks for filters in a process that has loaded the module for it.
    """
    kind = FilteredFactsReader if PUSHDOWN_WORKER in sys.modules else FactsReader
    return kind(options, columns)


class FactsStreamReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a buffer as a stream; its offsets are ``{"log_id": …, "offset": the next one}``."""

    def __init__(self, options: Options, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._target: int | None = None
        self._pause = IDLE_FIRST_SECONDS

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
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, IDLE_MAX_SECONDS)
            end = self._end(log_id, at)
        if end > at:
            self._pause = IDLE_FIRST_SECONDS
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
