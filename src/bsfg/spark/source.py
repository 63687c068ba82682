"""The data source ``bsfg``: facts of a node as a Spark DataFrame, and DataFrames as facts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bsfg.errors import BsfgError, FactsMissing, FrameInvalid, InvalidArgument
from bsfg.journey.link import NOT_ASKED_FOR, Fetched, apart
from bsfg.ports import GapRecord
from bsfg.retention import GapReason
from bsfg.retry import Backoff, Retry
from bsfg.spark.calls import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    BufferSource,
    CallRetry,
    RawFrame,
    calls,
    check_log,
)
from bsfg.spark.errors import told
from bsfg.spark.fanin import (
    AWAY,
    FactsOrigin,
    OriginRange,
    Origins,
    SourceOffsets,
    SourceQuestions,
    asked_position,
    check_apart,
    confirm_offsets,
    cut,
    of_source,
    pieces_of,
    shared_out,
)
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
    wire_columns,
)
from bsfg.spark.options import (
    EARLIEST,
    LATEST,
    READ,
    READ_STREAM,
    WRITE,
    WRITE_STREAM,
    Position,
    SourceOptions,
    SourcePositions,
    documentation,
    parse,
)
from bsfg.spark.sink import FactsStreamWriter, FactsWriter

IDLE_FIRST_SECONDS, IDLE_MAX_SECONDS = 0.005, 0.1
"""How long a stream without news waits before it asks again, so that an idle one costs next to nothing."""

IDLE_SECONDS_PER_SOURCE = 0.002
"""How much longer the longest wait is with every source that has to be asked."""


@dataclass(frozen=True)
class FactsPartition(InputPartition):
    """A range of offsets of one log (``end`` exclusive): what one task reads."""

    log_id: str
    first: int
    end: int


@dataclass(frozen=True)
class OriginsPartition(InputPartition):
    """Ranges of several sources: what one task reads of them."""

    ranges: tuple[OriginRange, ...]


def split(log_id: str, first: int, end: int, partition_facts: int, pieces: int | None = None) -> list[FactsPartition]:
    """Cut a range into partitions of nearly the same size, perhaps so many; the same range is always cut alike."""
    count = -(-(end - first) // partition_facts) if pieces is None else min(pieces, end - first)
    cuts = [first + (end - first) * piece // count for piece in range(count)] if count else []
    return [FactsPartition(log_id, at, to) for at, to in zip(cuts, [*cuts[1:], end], strict=True)] if cuts else []


class FactsOfRanges:
    """What all readers have in common: some columns, and how a range of a buffer is read."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self.options, self.columns = options, tuple(columns)
        self.wire_columns = () if options["rows"] == "frames" else wire_columns(columns)

    def facts(self, source: BufferSource, place: EntryPlace, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Read a range as rows of facts; what was not asked for is no row, what is not there one or an error."""
        for frame in source.frames(first, end, place.log_id):
            if frame.entries is not None:
                yield to_spark(frame.entries, place, self.columns)
            gaps = [record for each in frame.skips for record in each.records()]
            for gap in gaps if frame.gap is None else [replace(frame.gap, first=frame.first, last=frame.last)]:
                if gap.reason == GapReason.SKIPPED and gap.detail == NOT_ASKED_FOR:
                    continue
                self.check_gap(gap, place)
                yield gap_to_spark(gap.first, gap.last, gap, place, self.columns)

    def frames(self, source: BufferSource, place: EntryPlace, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Read a range as rows of whole frames, with all that was left out as gap records."""
        for frame in self._whole_frames(source, first, end, place.log_id):
            if frame.gap is not None:
                self.check_gap(replace(frame.gap, first=frame.first, last=frame.last), place)
            row = frame_to_spark(frame.first, frame.last, frame.data, frame.gap, place.log_id)
            yield row.select(self.columns)

    def _whole_frames(self, source: BufferSource, first: int, end: int, log_id: str) -> Iterator[RawFrame]:
        if not source.filter:
            yield from source.raw_frames(first, end, log_id)
            return
        for frame in source.frames(first, end, log_id):
            for piece in apart(frame):
                data = b"" if piece.entries is None else b"".join(piece.entries.to_ipc_parts())
                yield RawFrame(piece.first, piece.last, data, piece.gap)

    def check_gap(self, gap: GapRecord, place: EntryPlace) -> None:
        """Raise `FactsMissing` unless gap records are asked for."""
        if self.options["gaps"] == "rows":
            return
        where, why = place.source or f"{place.stream}/{place.buffer}", f"{gap.reason} {gap.detail}".strip()
        says = f"the facts {gap.first}..{gap.last} of {where} are not there: {why}"
        raise FactsMissing(says, first=gap.first, last=gap.last)


class RangeReader(FactsOfRanges):
    """What both readers of one source have in common: its buffer, and how a partition of it is read."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.source = BufferSource(
            options.access,
            options["stream"],
            options["buffer"],
            options["retrySeconds"],
            options["carryOnly"],
            options.filter,
            self.wire_columns,
        )

    def batches(self, partition: FactsPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition as Arrow batches."""
        read = self.frames if self.options["rows"] == "frames" else self.facts
        place = EntryPlace(self.source.stream, self.source.buffer, partition.log_id)
        return read(self.source, place, partition.first, partition.end)

    def resolve(self, wanted: Position) -> tuple[str, int]:
        """Give the log and the offset that a position means now."""
        return CallRetry(self.source.retry_seconds).made(lambda: asked_position(self.source, wanted))

    def split(self, log_id: str, first: int, end: int) -> list[FactsPartition]:
        """Cut a range as the options say."""
        return split(log_id, first, end, self.options["partitionFacts"], self.options["numPartitions"])


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
        found = self.split(log_id, first, max(first, end))
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
        return _offset(log_id, at + _allowed(end - at, limit, evenly=self._target is not None))

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
        return self.split(log_id, first, last)

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


class OriginsReading(FactsOfRanges):
    """What both readers of several sources have in common."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.origins = Origins(options)

    def positions(self, name: str, otherwise: str) -> SourcePositions:
        """Give where an option says that each source starts or ends."""
        given = self.options.values.get(name) or Position(word=otherwise)
        if not isinstance(given, SourcePositions):
            return SourcePositions(given)
        unknown = [key for key in given.by_key if key not in self.origins.by_key]
        if unknown and self.options["config"] is None:
            hint = f"There are {', '.join(self.origins.by_key)[:300]}."
            raise InvalidArgument(f"option {name}: there is no source {unknown[0]!r}", hint=hint)
        return given

    def cut(self, ranges: Sequence[OriginRange]) -> list[OriginsPartition]:
        """Cut the ranges of all sources into what tasks read."""
        return [OriginsPartition(part) for part in cut(ranges, pieces_of(ranges, self.options))]

    @told
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, one range after the other."""
        assert isinstance(partition, OriginsPartition)
        for each in partition.ranges:
            origin = each.origin
            place = EntryPlace(origin.stream, origin.buffer, each.log_id, origin.key)
            try:
                yield from self.facts(self.origins.source(origin, self.wire_columns), place, each.first, each.end)
            except BsfgError as error:
                raise error if origin.key in error.message else of_source(origin.key, error) from None


class OriginsReader(OriginsReading, DataSourceReader):
    """Reads a range of each of several sources at once; all of them must be there."""

    @told
    def partitions(self) -> list[OriginsPartition]:
        """Find out which offsets are meant, and share them out."""
        starts, ends = self.positions("startingOffsets", EARLIEST), self.positions("endingOffsets", LATEST)

        async def asked(key: str, origin: FactsOrigin) -> OriginRange:
            source = self.origins.source(origin)
            patience = Retry(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, source.retry_seconds)
            try:
                log_id, first = await patience.insist(lambda: asked_position(source, starts.of(key)))
                other, end = await patience.insist(lambda: asked_position(source, ends.of(key)))
            except BsfgError as error:
                raise of_source(key, error) from None
            if other != log_id:
                raise FrameInvalid(f"{key}: the log of the node was exchanged while it was asked")
            return OriginRange(origin, log_id, first, max(first, end))

        async def all_of_them() -> list[OriginRange]:
            return list(await asyncio.gather(*(asked(*item) for item in self.origins.by_key.items())))

        ranges = calls().run(all_of_them())
        check_apart({each.origin.key: each.log_id for each in ranges})
        # Spark reads a list without partitions as one partition of its own making.
        return self.cut(ranges) or [OriginsPartition(())]


class OriginsStreamReader(OriginsReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads several sources as one stream.

    Its offsets are ``{"plant-a:9443/operational": the next one, …, "log_ids": {…}}``. A source that is away, or that is
    another log than it was, stands still and holds up nobody, unless no other is left; one that is new begins with the
    next micro-batch where `startingOffsets` says.
    """

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.starts = self.positions("startingOffsets", EARLIEST)
        self._targets: dict[str, int] | None = None
        self._questions = SourceQuestions()
        self._confirmed: dict[str, int] = {}
        self._reported: dict[str, tuple[str, int]] = {}
        idle_max_seconds = max(IDLE_MAX_SECONDS, len(self.origins.by_key) * IDLE_SECONDS_PER_SOURCE)
        self._idle = Backoff(IDLE_FIRST_SECONDS, idle_max_seconds)

    @told
    def initialOffset(self) -> dict[str, Any]:
        """Give where a new query starts."""
        is_needed = self.options["missingSources"] == "fail"
        found, ends = self._begun(self.origins.by_key.values()), time.monotonic() + self.options["retrySeconds"]
        while is_needed and self._questions.away and not self._questions.hopeless and time.monotonic() < ends:
            time.sleep(BACKOFF_FIRST_SECONDS)
            found |= self._begun(origin for key, origin in self.origins.by_key.items() if key not in found)
        for key, error in self._questions.hopeless.items():
            raise of_source(key, error)
        for key, error in self._questions.away.items() if is_needed else ():
            hint = f'{error.hint} With missingSources = "wait" the stream begins without it.'
            raise BsfgError.from_dict({**of_source(key, error).to_dict(), "hint": hint})
        check_apart({key: log_id for key, (log_id, _) in found.items()})
        return SourceOffsets(found).to_json()

    def _begun(self, origins: Iterable[FactsOrigin]) -> dict[str, tuple[str, int]]:
        """Ask new sources where they start."""

        def question(origin: FactsOrigin) -> Callable[[], Coroutine[Any, Any, tuple[str, int]]]:
            source = self.origins.source(origin)
            if origin.consumer is None or self.options["startingOffsets"] is not None:
                return lambda: asked_position(source, self.starts.of(origin.key))
            return lambda: _asked_consumer(source, str(origin.consumer))

        return self._questions.ask("start", {origin.key: question(origin) for origin in origins})

    def getDefaultReadLimit(self) -> ReadLimit:
        """Give how much a micro-batch may have of all sources together."""
        return ReadMaxRows(self.options["maxFactsPerBatch"])

    @told
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Give where the next micro-batch ends: a fair share of the limit for every source that has something."""
        self.origins.refresh()
        at = SourceOffsets.of(start).by_key
        new = self._begun(origin for key, origin in self.origins.by_key.items() if key not in at)
        if new:  # what a checkpoint says of the others is judged when they are asked
            check_apart({key: log_id for key, (log_id, _) in {**at, **new}.items() if key in self.origins.by_key})
        ends = self._ends(at)
        if not new and self._targets is None and all(ends[key] == at[key][1] for key in ends):
            time.sleep(self._idle.next_seconds())
            ends = self._ends(at)
        backlogs = {key: end - at[key][1] for key, end in ends.items()}
        if any(backlogs.values()):
            self._idle.reset()
        shares = shared_out(backlogs, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        moved = {key: (log_id, offset + shares.get(key, 0)) for key, (log_id, offset) in at.items()}
        return SourceOffsets({**moved, **new}).to_json()

    def _ends(self, at: Mapping[str, tuple[str, int]]) -> dict[str, int]:
        """Ask the sources that are there how far they may be read; each must be the log that it was."""
        known = {key: of for key, of in at.items() if key in self.origins.by_key}
        heads = self._heads(known)
        hopeless = self._questions.hopeless
        if not heads and hopeless and hopeless.keys() >= known.keys():
            key = next(iter(hopeless))
            raise of_source(key, hopeless[key])
        self._reported |= {key: (head.log_id, head.end) for key, head in heads.items()}
        ends = {key: head.end for key, head in heads.items()}
        if self._targets is not None:
            ends = {key: min(end, self._targets.get(key, at[key][1])) for key, end in ends.items()}
        return {key: max(at[key][1], end) for key, end in ends.items()}

    def _heads(self, at: Mapping[str, tuple[str, int]], what: str = "head") -> dict[str, Fetched]:
        """Ask sources for their heads; one that is another log than it was cannot be read."""

        async def asked(source: BufferSource, log_id: str, offset: int) -> Fetched:
            head = await source.asked_head()
            check_log(head, log_id or head.log_id, offset)
            return head

        sources = {key: (self.origins.source(self.origins.by_key[key]), *of) for key, of in at.items()}
        return self._questions.ask(what, {key: partial(asked, *of) for key, of in sources.items()})

    @told
    def reportLatestOffset(self) -> dict[str, Any]:
        """Give where the sources ended when they were last asked, and which are away and why, for the progress."""
        away = {key: f"{error.code}: {error.message}" for key, error in sorted(self._questions.away.items())}
        ends = SourceOffsets(self._reported).to_json()
        return {**ends, AWAY: away} if away else ends

    @told
    def prepareForTriggerAvailableNow(self) -> None:
        """Take note of where the sources end now: a query with this trigger goes no further, and awaits nobody."""
        self.origins.refresh()
        heads = self._heads(dict.fromkeys(self.origins.by_key, ("", 0)), "target")
        self._targets = {key: head.end for key, head in heads.items()}

    @told
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OriginsPartition]:
        """Cut a micro-batch into partitions; a source that is new in it has no facts in it."""
        before, after = SourceOffsets.of(start).by_key, SourceOffsets.of(end).by_key
        moved = {key: (log_id, before[key][1], last) for key, (log_id, last) in after.items() if key in before}
        lacking = [key for key, (_, first, last) in moved.items() if last > first and key not in self.origins.by_key]
        if lacking:
            raise InvalidArgument(
                f"the micro-batch has facts of {lacking[0]}, which is no source any more",
                hint="Name it again until the stream has gone on; the offsets of what is left out stay where they are.",
            )
        by_key = self.origins.by_key
        return self.cut([OriginRange(by_key[key], *of) for key, of in sorted(moved.items()) if of[2] > of[1]])

    @told
    def commit(self, end: dict[str, Any]) -> None:
        """Confirm for the consumer of each source, if there is one, what Spark has processed."""
        confirm_offsets(self.origins, end, self._questions, self._confirmed)


async def _asked_consumer(source: BufferSource, consumer: str) -> tuple[str, int]:
    head = await source.asked_consumer_head(consumer)
    return head.log_id, head.start


def _allowed(available: int, limit: ReadLimit, *, evenly: bool) -> int:
    if not available or not isinstance(limit, ReadMaxRows):
        return available
    # A small last part would cost as much as a full one.
    return -(-available // -(-available // limit.max_rows)) if evenly else min(available, limit.max_rows)


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

    ``node`` holds ``address`` and, for TLS, ``ca``, ``cert``, ``key`` and ``serverName``. One query over many plants:

    >>> facts = spark.readStream.format("bsfg").option("config", "hub/zone.toml").option("subjects", "asset:*").load()

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
    def reader(self, schema: StructType) -> FactsReader | OriginsReader:
        """Give what reads a range at once."""
        options = parse(self.options, READ)
        kind = OriginsReader if options.several else FactsReader
        return kind(options, _columns(schema, options))

    @told
    def streamReader(self, schema: StructType) -> FactsStreamReader | OriginsStreamReader:
        """Give what reads a stream."""
        options = parse(self.options, READ_STREAM)
        kind = OriginsStreamReader if options.several else FactsStreamReader
        return kind(options, _columns(schema, options))

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
    put_columns: Sequence[str] = FRAME_COLUMNS if "entries" in names else WHOLE
    needed = put_columns if options["mode"] == "put" else REQUIRED
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
