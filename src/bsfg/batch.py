"""`FactBatch`: facts as one Arrow record batch, the single shape of log, wire and pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa

from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message, Origin
from bsfg.hashing import DIGEST_BYTES
from bsfg.jsonform import artifact_to_dict

FACT_SCHEMA = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("from_zone", pa.string()),
        pa.field("to_zone", pa.string()),
        pa.field("produced_at_unix_ms", pa.int64()),
        pa.field("correlation_id", pa.string()),
        pa.field("causation_id", pa.string()),
        pa.field("labels", pa.string()),
        pa.field("object_media_type", pa.string()),
        pa.field("object_schema", pa.string()),
        pa.field("signature", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("predicate", pa.string()),
        pa.field("object", pa.binary()),
        pa.field("artifact", pa.string()),
        pa.field("artifact_digest", pa.string()),
        pa.field("digest", pa.binary(DIGEST_BYTES)),
    ]
)
"""Labels and artifact reference are canonical JSON texts, null when absent; the digest is null until sealed."""

ORIGIN_FIELDS = [
    pa.field("origin_zone", pa.string()),
    pa.field("origin_offset", pa.int64()),
    pa.field("origin_appended_at_unix_ms", pa.int64()),
]

ENTRY_SCHEMA = pa.schema(
    [
        *FACT_SCHEMA,
        pa.field("offset", pa.int64()),
        pa.field("appended_at_unix_ms", pa.int64()),
        *ORIGIN_FIELDS,
    ]
)
"""What a stored fact adds: its offset, when it became durable, and where it was pulled from."""

_REQUIRED = (
    "from_zone",
    "to_zone",
    "produced_at_unix_ms",
    "object_media_type",
    "subject",
    "predicate",
    "object",
)
REQUIRED_FIELDS = frozenset(_REQUIRED)


class FactBatch:
    """Facts as columns.

    ``sealed`` says that the rows were validated, canonicalised and digested by `bsfg.sealing.seal`; buffers accept
    only sealed batches. A batch is immutable.
    """

    schema = FACT_SCHEMA
    __slots__ = ("record_batch", "sealed")

    def __init__(self, record_batch: pa.RecordBatch, *, sealed: bool = False) -> None:
        if not record_batch.schema.equals(self.schema):
            record_batch = record_batch.select(self.schema.names).cast(self.schema)
        self.record_batch = record_batch
        self.sealed = sealed

    def __len__(self) -> int:
        return int(self.record_batch.num_rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FactBatch) and bool(self.record_batch.equals(other.record_batch))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} facts, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """The bytes that the rows of this batch occupy."""
        return int(self.record_batch.nbytes)

    def column(self, name: str) -> pa.Array:
        """Give one column."""
        return self.record_batch.column(self.schema.get_field_index(name))

    def slice(self, start: int, count: int | None = None) -> Self:
        """Give consecutive rows without copying them."""
        return type(self)(self.record_batch.slice(start, count), sealed=self.sealed)

    def take(self, rows: np.ndarray | Sequence[int]) -> Self:
        """Give the named rows, in that order."""
        indices = pa.array(np.asarray(rows, dtype=np.int64))
        return type(self)(self.record_batch.take(indices), sealed=self.sealed)

    def with_columns(self, **columns: pa.Array) -> Self:
        """Give a batch with some columns replaced; it counts as unsealed."""
        arrays = [columns.get(name, self.column(name)) for name in self.schema.names]
        return type(self)(pa.RecordBatch.from_arrays(arrays, schema=self.schema))

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Put batches one after the other."""
        if len(batches) == 1:
            return batches[0]
        joined = pa.concat_batches([batch.record_batch for batch in batches])
        return cls(joined, sealed=all(batch.sealed for batch in batches))

    @classmethod
    def empty(cls) -> Self:
        """Give a batch without rows."""
        arrays = [pa.array([], type=field.type) for field in cls.schema]
        return cls(pa.RecordBatch.from_arrays(arrays, schema=cls.schema), sealed=True)

    @classmethod
    def from_messages(cls, messages: Iterable[Message]) -> FactBatch:
        """Make an unsealed batch of Python messages."""
        rows = [_row(message) for message in messages]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(FACT_SCHEMA)
        arrays = [_array(values, field) for values, field in zip(columns, FACT_SCHEMA, strict=True)]
        return FactBatch(pa.RecordBatch.from_arrays(arrays, schema=FACT_SCHEMA))

    def to_messages(self) -> list[Message]:
        """Make Python messages of the rows."""
        return [_message(row) for row in self.record_batch.select(FACT_SCHEMA.names).to_pylist()]

    def digests(self) -> list[bytes]:
        """Give the digests as Python bytes."""
        result: list[bytes] = self.column("digest").to_pylist()
        return result


class EntryBatch(FactBatch):
    """Stored facts as columns: a `FactBatch` with offsets, times and origins."""

    schema = ENTRY_SCHEMA
    __slots__ = ()

    @property
    def offsets(self) -> np.ndarray:
        """The offsets of the rows."""
        return np.asarray(self.column("offset").to_numpy())

    @property
    def facts(self) -> FactBatch:
        """The same rows without what the buffer added."""
        return FactBatch(self.record_batch.select(FACT_SCHEMA.names), sealed=True)

    @staticmethod
    def of(facts: pa.RecordBatch, offsets: np.ndarray, appended_at_unix_ms: np.ndarray | int) -> EntryBatch:
        """Put offsets and times to stored columns; columns that the storage left out become null."""
        count = facts.num_rows
        times = np.broadcast_to(np.asarray(appended_at_unix_ms, dtype=np.int64), (count,))
        added = {
            "offset": pa.array(np.ascontiguousarray(offsets, dtype=np.int64)),
            "appended_at_unix_ms": pa.array(np.ascontiguousarray(times)),
        }
        present = set(facts.schema.names)
        arrays = []
        for field in ENTRY_SCHEMA:
            if field.name in added:
                arrays.append(added[field.name])
            elif field.name in present:
                arrays.append(facts.column(field.name))
            else:
                arrays.append(pa.nulls(count, field.type))
        return EntryBatch(pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA), sealed=True)

    def to_entries(self) -> list[Entry]:
        """Make Python entries of the rows."""
        return [_entry(row) for row in self.record_batch.to_pylist()]


def _row(message: Message) -> tuple[Any, ...]:
    envelope, fact = message.envelope, message.fact
    artifact = fact.artifact
    return (
        envelope.message_id,
        envelope.from_zone,
        envelope.to_zone,
        envelope.produced_at_unix_ms,
        envelope.correlation_id,
        envelope.causation_id,
        orjson.dumps(dict(envelope.labels), option=orjson.OPT_SORT_KEYS).decode() if envelope.labels else None,
        envelope.object_media_type,
        envelope.object_schema,
        envelope.signature,
        fact.subject,
        fact.predicate,
        fact.object,
        orjson.dumps(artifact_to_dict(artifact), option=orjson.OPT_SORT_KEYS).decode() if artifact else None,
        artifact.digest if artifact else None,
        None,
    )


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    from bsfg.errors import InvalidFact

    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        row = next((i for i, value in enumerate(values) if not _fits(value, field)), 0)
        raise InvalidFact(
            f"row {row}, {field.name}: {error}", row=row, field=field.name, rule=f"must be a {field.type}"
        ) from None


def _fits(value: Any, field: pa.Field) -> bool:
    try:
        pa.array([value], type=field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
        return False
    return True


def _message(row: dict[str, Any]) -> Message:
    artifact = orjson.loads(row["artifact"]) if row["artifact"] else None
    envelope = Envelope(
        from_zone=row["from_zone"],
        to_zone=row["to_zone"],
        produced_at_unix_ms=row["produced_at_unix_ms"],
        message_id=row["message_id"],
        correlation_id=row["correlation_id"],
        causation_id=row["causation_id"],
        labels=orjson.loads(row["labels"]) if row["labels"] else {},
        object_media_type=row["object_media_type"],
        object_schema=row["object_schema"],
        signature=row["signature"],
    )
    fact = Fact(row["subject"], row["predicate"], row["object"], ArtifactRef(**artifact) if artifact else None)
    return Message(envelope, fact)


def _entry(row: dict[str, Any]) -> Entry:
    origin = None
    if row["origin_zone"] is not None:
        origin = Origin(row["origin_zone"], row["origin_offset"], row["origin_appended_at_unix_ms"])
    return Entry(row["offset"], row["appended_at_unix_ms"], _message(row), row["digest"], origin)
