"""Facts as Python tuples in the order of the schema: what applications give and get, and what small batches keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

from bsfg.columns import FACT_SCHEMA, nulls
from bsfg.errors import InvalidFact
from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message, Origin, function_in, own_labels
from bsfg.jsonform import artifact_to_dict

Row = tuple[Any, ...]
"""The values of one fact in the order of `FACT_SCHEMA`, None where a value is absent."""

_ROW_BYTES = 64
_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError)


def row_of(message: Message, number: int = 0) -> Row:
    """Lay one message out as a row without a digest; ``number`` is how an error calls it."""
    envelope, fact = message.envelope, message.fact
    artifact = fact.artifact
    return (
        envelope.message_id,
        envelope.from_zone,
        envelope.to_zone,
        envelope.produced_at_unix_ms,
        envelope.correlation_id,
        envelope.causation_id,
        _text_of(number, "labels", dict, envelope.labels) if envelope.labels else None,
        envelope.object_media_type,
        envelope.object_schema,
        envelope.signature,
        fact.subject,
        fact.predicate,
        fact.object,
        _text_of(number, "artifact", artifact_to_dict, artifact) if artifact else None,
        artifact.digest if artifact else None,
        None,
    )


def _text_of(number: int, name: str, to_dict: Callable[[Any], dict[str, Any]], value: Any) -> str:
    try:
        return orjson.dumps(to_dict(value), option=orjson.OPT_SORT_KEYS).decode()
    except (TypeError, ValueError, AttributeError) as error:
        rule = f"cannot be written as JSON: {error}"
        raise InvalidFact(f"row {number}, {name}: {rule}", row=number, field=name, rule=rule) from None


def weight_of(row: Row) -> int:
    """Give about the bytes of a row, whatever its values are."""
    return _ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))


def is_plain(row: Row) -> bool:
    """Tell whether a row holds exactly the types of the schema, so that it becomes Arrow without change or error."""
    for value, kind in zip(row, _KINDS, strict=True):
        if value is None:
            continue
        if type(value) is not kind:
            return False
        if kind is str:
            if not value.isascii() and not _encodable(value):
                return False
        elif kind is int and not -(1 << 63) <= value < 1 << 63:
            return False
    return True


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(type_: pa.DataType) -> type:
    if pa.types.is_int64(type_):
        return int
    return str if pa.types.is_string(type_) else bytes


_KINDS: tuple[Any, ...] = tuple(_kind(field.type) for field in FACT_SCHEMA)


def record_batch_of(rows: Sequence[Row], schema: pa.Schema = FACT_SCHEMA) -> pa.RecordBatch:
    """Make columns of rows; raises `InvalidFact` naming the row and the field that do not fit."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [_array(values, field) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if values and values[0] is None and values.count(None) == len(values):
        return nulls(len(values), field.type)
    try:
        return pa.array(values, type=field.type)
    except _REFUSED as error:
        row = next((i for i, value in enumerate(values) if not _fits(value, field)), 0)
        raise InvalidFact(
            f"row {row}, {field.name}: {error}", row=row, field=field.name, rule=f"must be a {field.type}"
        ) from None


def _fits(value: Any, field: pa.Field) -> bool:
    try:
        pa.array([value], type=field.type)
    except _REFUSED:
        return False
    return True


def message_of(row: Mapping[str, Any]) -> Message:
    """Make a message of a row's values by name."""
    artifact = orjson.loads(row["artifact"]) if row["artifact"] else None
    envelope = Envelope(
        from_zone=row["from_zone"],
        to_zone=row["to_zone"],
        produced_at_unix_ms=row["produced_at_unix_ms"],
        message_id=row["message_id"],
        correlation_id=row["correlation_id"],
        causation_id=row["causation_id"],
        labels=own_labels(orjson.loads(row["labels"])) if row["labels"] else {},
        object_media_type=row["object_media_type"],
        object_schema=row["object_schema"],
        signature=row["signature"],
    )
    fact = Fact(row["subject"], row["predicate"], row["object"], ArtifactRef(**artifact) if artifact else None)
    return Message(envelope, fact)


def entry_of(row: Mapping[str, Any]) -> Entry:
    """Make an entry of a stored row's values by name."""
    origin = None
    if row["origin_zone"] is not None:
        origin = Origin(
            row["origin_zone"], row["origin_offset"], row["origin_appended_at_unix_ms"], row["origin_age_ms"]
        )
    hasher = function_in(row["labels"])
    return Entry(row["offset"], row["appended_at_unix_ms"], message_of(row), row["digest"], origin, hasher)
