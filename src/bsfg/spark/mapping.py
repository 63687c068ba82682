"""The two-way mapping between batches of facts and Spark's columns, one Arrow batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import ENTRY_SCHEMA, FACT_SCHEMA
from bsfg.errors import FrameInvalid, InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason

LABELS = pa.map_(pa.string(), pa.string())
ARTIFACT = pa.struct(
    [
        pa.field("bucket", pa.string()),
        pa.field("key", pa.string()),
        pa.field("digest", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("media_type", pa.string()),
        pa.field("file_name", pa.string()),
    ]
)
_STRING = pa.string()
_ESCAPED = r'["\\\x00-\x1f]'
"""What JSON cannot hold as it is."""


def _parsed(texts: pa.Array, type_: pa.DataType, make: Callable[[list[Any]], pa.Array]) -> pa.Array:
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), type_)
    encoded = texts.dictionary_encode()
    return make([orjson.loads(text) for text in encoded.dictionary.to_pylist()]).take(encoded.indices)


def _maps(values: list[dict[str, str]]) -> pa.Array:
    names: list[str] = []
    texts: list[str] = []
    offsets = [0]
    for value in values:
        names.extend(value)
        texts.extend(value.values())
        offsets.append(len(names))
    return pa.MapArray.from_arrays(
        pa.array(offsets, type=pa.int32()), pa.array(names, _STRING), pa.array(texts, _STRING)
    )


def map_to_labels(maps: pa.Array) -> pa.Array:
    """Make canonical JSON texts of maps; a map without entries is no text. Raises `InvalidFact` for a null label."""
    if maps.null_count == len(maps):
        return pa.nulls(len(maps), _STRING)
    offsets = np.asarray(maps.offsets)
    names, values = maps.keys, maps.items
    if not _is_plain(names, values, offsets):
        return pa.array([_labels_text(row, pairs) for row, pairs in enumerate(maps.to_pylist())], type=_STRING)
    pairs = pc.binary_join_element_wise('"', names, '":"', values, '"', "")
    joined = pc.binary_join(pa.ListArray.from_arrays(maps.offsets, pairs), ",")
    texts = pc.binary_join_element_wise("{", joined, "}", "")
    absent = np.diff(offsets) == 0
    if maps.null_count:
        absent |= np.asarray(maps.is_null())
    return pc.if_else(pa.array(absent), pa.scalar(None, _STRING), texts)


def _is_plain(names: pa.Array, values: pa.Array, offsets: np.ndarray) -> bool:
    """Tell whether maps can be written as they stand: nothing to escape, names in order, no nulls."""
    first, end = int(offsets[0]), int(offsets[-1])
    names, values = names.slice(first, end - first), values.slice(first, end - first)
    if values.null_count or any(pc.any(pc.match_substring_regex(each, _ESCAPED)).as_py() for each in (names, values)):
        return False
    if len(names) < 2:
        return True
    rising = np.asarray(pc.less(names.slice(0, len(names) - 1), names.slice(1)).to_numpy(zero_copy_only=False))
    starts = offsets[1:-1] - first - 1
    # Between two maps the order of names does not matter.
    rising[starts[(starts >= 0) & (starts < len(rising))]] = True
    return bool(rising.all())


def _labels_text(row: int, pairs: list[tuple[str, str | None]] | None) -> str | None:
    if not pairs:
        return None
    for name, value in pairs:
        if value is None:
            rule = f"label {name!r} has no value"
            raise InvalidFact(f"row {row}, labels: {rule}", row=row, field="labels", rule=rule)
    return orjson.dumps(dict(pairs), option=orjson.OPT_SORT_KEYS).decode()


def struct_to_artifact(structs: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Make canonical JSON texts of artifact references, and give the column of their digests."""
    if structs.null_count == len(structs):
        return pa.nulls(len(structs), _STRING), pa.nulls(len(structs), _STRING)
    rows: list[dict[str, Any] | None] = structs.to_pylist()
    texts = [None if row is None else _artifact_text(row) for row in rows]
    digests = [None if row is None else row["digest"] for row in rows]
    return pa.array(texts, type=_STRING), pa.array(digests, type=_STRING)


def _artifact_text(reference: dict[str, Any]) -> str:
    given = {name: value for name, value in reference.items() if value is not None}
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode()


TIME = pa.timestamp("us", tz="UTC")
GAP = pa.struct(
    [
        pa.field("first", pa.int64()),
        pa.field("last", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("at", TIME),
        pa.field("detail", pa.string()),
    ]
)

SPARK_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("appended_at", TIME),
        pa.field("message_id", pa.string()),
        pa.field("from_zone", pa.string()),
        pa.field("to_zone", pa.string()),
        pa.field("produced_at", TIME),
        pa.field("correlation_id", pa.string()),
        pa.field("causation_id", pa.string()),
        pa.field("labels", LABELS),
        pa.field("object_media_type", pa.string()),
        pa.field("object_schema", pa.string()),
        pa.field("signature", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("predicate", pa.string()),
        pa.field("object", pa.binary()),
        pa.field("object_text", pa.string()),
        pa.field("artifact", ARTIFACT),
        pa.field("digest", pa.binary()),
        pa.field("origin_zone", pa.string()),
        pa.field("origin_offset", pa.int64()),
        pa.field("origin_appended_at", TIME),
        pa.field("stream", pa.string()),
        pa.field("buffer", pa.string()),
        pa.field("log_id", pa.string()),
        pa.field("source", pa.string()),
        pa.field("gap", GAP),
    ]
)
"""Every column that facts can have in Spark, in Spark's own Arrow types."""

FRAME_SCHEMA = pa.schema(
    [
        pa.field("first", pa.int64()),
        pa.field("last", pa.int64()),
        pa.field("entries", pa.binary()),
        pa.field("log_id", pa.string()),
        pa.field("gap", GAP),
    ]
)
"""The columns of whole frames: the entries ``first`` to ``last`` in Arrow's IPC form, or a gap record of that range."""

COLUMNS: tuple[str, ...] = tuple(name for name in SPARK_SCHEMA.names if name not in ("source", "gap"))
"""The columns of facts; ``source`` joins them where there are several, ``gap`` where gap records are read as rows."""

_TIMES = {
    "appended_at": "appended_at_unix_ms",
    "produced_at": "produced_at_unix_ms",
    "origin_appended_at": "origin_appended_at_unix_ms",
}
REQUIRED = ("from_zone", "to_zone", "produced_at", "subject", "predicate")
"""What a fact cannot do without, besides ``object`` or ``object_text``."""

PLACED = ("stream", "buffer", "log_id", "source")
"""The columns that tell where a fact was read."""

WHOLE = tuple(name for name in COLUMNS if name not in ("object_text", *PLACED))
"""The columns that together hold all of an entry."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Where entries were read: the stream, which of its buffers, the log, and which of several sources it is."""

    stream: str
    buffer: str
    log_id: str
    source: str | None = None


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Give the Arrow schema of some columns, in their order."""
    return pa.schema([SPARK_SCHEMA.field(name) for name in columns])


def wire_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Give the columns of entries that some columns of Spark are made of; none when all are needed."""
    if set(columns).issuperset(COLUMNS):
        return ()
    named = {"object_text": "object", **_TIMES}
    needed = {named.get(name, name) for name in columns} | {"offset"}
    return tuple(name for name in ENTRY_SCHEMA.names if name in needed)


# From facts to Spark.


def to_spark(entries: EntryBatch, place: EntryPlace, columns: Sequence[str] = COLUMNS) -> pa.RecordBatch:
    """Lay entries out in Spark's columns."""
    arrays = [_spark_column(name, entries, place) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(columns))


def gap_to_spark(first: int, last: int, gap: GapRecord, place: EntryPlace, columns: Sequence[str]) -> pa.RecordBatch:
    """Make one row of a gap record: its range in ``gap``, its first offset in ``offset``, no fact."""
    row = {
        "offset": first,
        "stream": place.stream,
        "buffer": place.buffer,
        "log_id": place.log_id,
        "source": place.source,
        "gap": _gap_value(first, last, gap),
    }
    return pa.RecordBatch.from_pylist([{name: row.get(name) for name in columns}], schema=schema_of(columns))


def frame_to_spark(
    first: int, last: int, data: bytes | memoryview, gap: GapRecord | None, log_id: str
) -> pa.RecordBatch:
    """Make one row of a whole frame, as it travels."""
    value = _gap_value(first, last, gap) if gap is not None else None
    row = {"first": first, "last": last, "log_id": log_id, "gap": value}
    columns = [
        _one_value(data, field.type) if field.name == "entries" else pa.array([row[field.name]], field.type)
        for field in FRAME_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=FRAME_SCHEMA)


def _one_value(data: bytes | memoryview, type: pa.DataType) -> pa.Array:
    """Give bytes as the only value of an array, where they lie; PyArrow never lets go of a view that it copies from."""
    if not data:
        return pa.nulls(1, type)
    buffer = pa.py_buffer(data)
    offsets = pa.array([0, buffer.size], pa.int32())
    return pa.Array.from_buffers(type, 1, [None, offsets.buffers()[1], buffer])


def _gap_value(first: int, last: int, gap: GapRecord) -> dict[str, object]:
    at = gap.at_unix_ms * 1000
    return {"first": first, "last": last, "reason": str(gap.reason), "at": at, "detail": gap.detail}


def _spark_column(name: str, entries: EntryBatch, place: EntryPlace) -> pa.Array:
    if name in _TIMES:
        return entries.column(_TIMES[name]).cast(pa.timestamp("ms", tz="UTC")).cast(TIME)
    if name in _MADE:
        return _MADE[name](entries)
    if name in PLACED:
        return pa.repeat(pa.scalar(getattr(place, name), pa.string()), len(entries))
    if name == "gap":
        return pa.nulls(len(entries), GAP)
    return entries.column(name)


def text_of(objects: pa.Array) -> pa.Array:
    """Give objects as text, null where they are not UTF-8."""
    try:
        return objects.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_decoded(data) for data in objects.to_pylist()], type=pa.string())


def _decoded(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


_MADE: dict[str, Callable[[EntryBatch], pa.Array]] = {
    "labels": lambda entries: _parsed(entries.column("labels"), LABELS, _maps),
    "object_text": lambda entries: text_of(entries.column("object")),
    "artifact": lambda entries: _parsed(
        entries.column("artifact"), ARTIFACT, lambda values: pa.array(values, type=ARTIFACT)
    ),
    "digest": lambda entries: entries.column("digest").cast(pa.binary()),
}


# From Spark to facts.


def missing_columns(columns: Iterable[str], needed: Sequence[str] = REQUIRED) -> list[str]:
    """Name the columns that facts need and that are not there; one kind of object is enough."""
    present = set(columns)
    missing = [name for name in needed if name not in present]
    if "subject" in needed and "object" not in needed and not present & {"object", "object_text"}:
        missing.append("object or object_text")
    return missing


def to_facts(batch: pa.RecordBatch) -> FactBatch:
    """Take facts out of Spark's columns, unsealed: their digests are computed where they are appended."""
    return FactBatch(
        pa.RecordBatch.from_arrays([_fact_column(field, batch) for field in FACT_SCHEMA], schema=FACT_SCHEMA)
    )


def to_entries(batch: pa.RecordBatch) -> EntryBatch:
    """Take whole entries out of Spark's columns; all of `WHOLE` must be there."""
    arrays = [_fact_column(field, batch, digests=True) for field in ENTRY_SCHEMA]
    return EntryBatch(pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA))


def to_frames(batch: pa.RecordBatch) -> Iterator[Frame]:
    """Take entries and gap records out of Spark's columns, in the order of the rows.

    Raises `FrameInvalid` when offsets are missing between two rows of the batch.
    """
    if "entries" in batch.schema.names:
        yield from _whole_frames(batch)
        return
    gaps = _column("gap", batch, GAP)
    if gaps.null_count == len(gaps):
        yield from _entry_frames(batch)
        return
    at = 0
    for row in np.flatnonzero(np.asarray(gaps.is_valid())).tolist():
        yield from _entry_frames(batch.slice(at, row - at))
        yield gap_frame(gaps[row].as_py())
        at = row + 1
    yield from _entry_frames(batch.slice(at))


def _whole_frames(batch: pa.RecordBatch) -> Iterator[Frame]:
    for row in range(batch.num_rows):
        first, last = (batch.column(name)[row].as_py() for name in ("first", "last"))
        gap, data = batch.column("gap")[row].as_py(), batch.column("entries")[row]
        if gap is not None:
            yield gap_frame(gap)
        elif data.is_valid:
            yield Frame(first, last, EntryBatch.from_ipc(data.as_buffer()))
        else:
            raise FrameInvalid(f"frame {first}..{last} holds neither entries nor a gap record")


def gap_frame(gap: dict[str, object]) -> Frame:
    """Make the frame of one gap record from the value of its column."""
    first, last, at = gap["first"], gap["last"], gap["at"]
    if not isinstance(first, int) or not isinstance(last, int) or last < first or at is None:
        raise FrameInvalid(f"a gap record has the range {first}..{last} and the time {at}")
    at_unix_ms = pa.scalar(at, TIME).cast(pa.int64()).as_py() // 1000
    return Frame(
        first, last, gap=GapRecord(first, last, GapReason(str(gap["reason"])), at_unix_ms, str(gap["detail"] or ""))
    )


def _entry_frames(batch: pa.RecordBatch) -> Iterator[Frame]:
    if not batch.num_rows:
        return
    entries = to_entries(batch)
    if entries.column("offset").null_count:
        raise FrameInvalid("a row has neither an offset nor a gap record")
    offsets = entries.offsets
    first, last = int(offsets[0]), int(offsets[-1])
    steps = np.flatnonzero(np.diff(offsets) != 1)
    if len(steps):
        before, after = int(offsets[steps[0]]), int(offsets[steps[0] + 1])
        raise FrameInvalid(
            f"offset {after} follows {before}: what a link brings must be whole and in order",
            hint="Write all rows that were read, in the order they were read in.",
        )
    yield Frame(first, last, entries)


def _fact_column(field: pa.Field, batch: pa.RecordBatch, *, digests: bool = False) -> pa.Array:
    name, type_ = field.name, field.type
    if name.endswith("_unix_ms"):
        return _milliseconds(_column(name.removesuffix("_unix_ms"), batch, TIME))
    if name == "digest":
        return _column(name, batch, pa.binary()).cast(type_) if digests else pa.nulls(batch.num_rows, type_)
    if name == "labels":
        return map_to_labels(_column(name, batch, LABELS))
    if name in ("artifact", "artifact_digest"):
        return struct_to_artifact(_column("artifact", batch, ARTIFACT))[name == "artifact_digest"]
    if name == "object":
        objects = _column("object", batch, pa.binary())
        if objects.null_count and "object_text" in batch.schema.names:
            return pc.coalesce(objects, _column("object_text", batch, pa.string()).cast(pa.binary()))
        return objects
    if name == "object_media_type":
        return pc.fill_null(_column(name, batch, type_), JSON_MEDIA_TYPE)
    return _column(name, batch, type_)


def _milliseconds(times: pa.Array) -> pa.Array:
    """Give times in milliseconds; Spark's microseconds are rounded down."""
    if times.null_count == len(times):
        return pa.nulls(len(times), pa.int64())
    microseconds = times.cast(pa.int64())
    mask = np.asarray(times.is_null()) if times.null_count else None
    return pa.array(np.asarray(pc.fill_null(microseconds, 0)) // 1000, mask=mask)


def _column(name: str, batch: pa.RecordBatch, type_: pa.DataType) -> pa.Array:
    """Give a column in the type it must have, all nulls when it is not there."""
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, type_)
    column = batch.column(name)
    if column.type == type_:
        return column
    try:
        return column.cast(type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        rule = f"must be {type_}, not {column.type}"
        raise InvalidFact(f"{name}: {rule}", field=name, rule=rule) from None
