"""`FactBatch`: facts as one Arrow record batch, the single shape of log, wire and pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa

from bsfg.columns import (
    AGELESS_ENTRY_SCHEMA,
    AT,
    ENTRY_SCHEMA,
    FACT_SCHEMA,
    ORIGIN_FIELDS,
    STORED_SCHEMA,
    constant_value,
    int64_array,
    nulls,
)
from bsfg.errors import InvalidFact
from bsfg.fact import Entry, Message
from bsfg.ipc import ENTRY_MESSAGES, FACT_MESSAGES, begins_as, decode, encoded_parts, message_in
from bsfg.model import DEFAULT_LIMITS, Limits
from bsfg.rows import Row, entry_of, is_plain, message_of, record_batch_of, row_of, weight_of

__all__ = ["ENTRY_SCHEMA", "FACT_SCHEMA", "ORIGIN_FIELDS", "SMALL_BATCH_FACTS", "EntryBatch", "FactBatch"]

SMALL_BATCH_FACTS = 64
"""Up to this many facts are cheaper to handle as Python rows than as columns."""

PIECE_BYTES = 2 << 20
"""How large the pieces are in which batches travel: well below what a node takes in one message."""

BY_HAND_FACTS = 32
"""Up to this many rows are cheaper to write by hand than by Arrow."""

SMALL_BATCH_BYTES = 65_536
_VALUES_AT_ONCE = 512
_LATEST_ROWS = 16_384
_ARTIFACT, _ARTIFACT_DIGEST = AT["artifact"], AT["artifact_digest"]
_OLDEST_MS = 1 << 60
_UNKNOWN = -(1 << 63)


class FactBatch:
    """Facts as columns.

    ``sealed`` says that the rows were validated, canonicalised and digested by `bsfg.sealing.seal`; buffers accept
    only sealed batches. A batch is immutable. ``wellformed`` says that Arrow itself has checked every offset and text.

    A small batch that was made of Python objects, or came as a message, stays Python rows until somebody asks for its
    columns: a caller that appends one fact then never pays for sixteen arrays. While such rows are those of a message
    the message is kept, since it can be written to log and wire as it stands.
    """

    schema = FACT_SCHEMA
    messages = FACT_MESSAGES
    __slots__ = ("_message", "_nbytes", "_record_batch", "_rows", "sealed", "wellformed")

    def __init__(self, record_batch: pa.RecordBatch, *, sealed: bool = False, wellformed: bool = False) -> None:
        if not record_batch.schema.equals(self.schema):
            record_batch = _fitted(record_batch, self.schema)
        self._record_batch: pa.RecordBatch | None = record_batch
        self._rows: list[Row] | None = None
        self._message: bytes | None = None
        self._nbytes: int | None = None
        self.sealed, self.wellformed = sealed, wellformed

    @classmethod
    def of_rows(cls, rows: list[Row], *, sealed: bool = False, message: bytes | None = None) -> Self:
        """Make a batch of rows that hold exactly the types of the schema (see `bsfg.rows.is_plain`).

        ``message`` holds the same rows as `messages` writes or reads them, if there is one.
        """
        batch = cls.__new__(cls)
        small = len(rows) <= SMALL_BATCH_FACTS
        batch._rows = rows if small else None
        batch._record_batch = None if small else record_batch_of(rows, cls.schema)
        batch._message, batch._nbytes = message, None
        batch.sealed, batch.wellformed = sealed, True
        return batch

    @property
    def record_batch(self) -> pa.RecordBatch:
        """The rows as an Arrow record batch."""
        if self._record_batch is None:
            rows = self._rows or []
            if self.is_by_hand:
                self._record_batch = pa.ipc.read_record_batch(pa.py_buffer(self.to_message()), self.schema)
            else:
                self._record_batch = record_batch_of(rows, self.schema)
        return self._record_batch

    @property
    def has_rows(self) -> bool:
        """Whether the batch has its rows at hand as Python tuples."""
        return self._rows is not None

    @property
    def message_bytes(self) -> int | None:
        """The size of the message that the rows came as, or were written as; None while there is none."""
        return None if self._message is None else len(self._message)

    @property
    def is_by_hand(self) -> bool:
        """Whether the message of the batch is written, or was read, by hand."""
        return self._message is not None or (self._record_batch is None and 0 < len(self) <= BY_HAND_FACTS)

    def rows(self) -> list[Row]:
        """Give the rows as tuples in the order of the schema; do not change the list."""
        if self._rows is None:
            columns = [column.to_pylist() for column in self.record_batch.columns]
            rows = list(zip(*columns, strict=True))
            if len(rows) > SMALL_BATCH_FACTS:
                return rows
            self._rows = rows
        return self._rows

    def __len__(self) -> int:
        return int(self._record_batch.num_rows) if self._record_batch is not None else len(self._rows or ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FactBatch) and bool(self.record_batch.equals(other.record_batch))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} facts, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """The bytes that the rows of this batch occupy."""
        if self._nbytes is None:
            # Arrow adds up every buffer of every column, which takes longer than most that is done to a batch.
            self._nbytes = int(self.record_batch.nbytes)
        return self._nbytes

    @property
    def size_bytes(self) -> int:
        """About the bytes of this batch: as `nbytes`, but without counting exactly where that is not worth it."""
        if self._record_batch is None:
            return self.weight_bytes
        size = int(self._record_batch.get_total_buffer_size())
        return size if size <= SMALL_BATCH_BYTES else self.nbytes

    @property
    def weight_bytes(self) -> int:
        """About the bytes of this batch, told at once: rows are added up and never written for it."""
        if self._record_batch is not None:
            return self.size_bytes
        if self._message is not None:
            return len(self._message)
        return sum(weight_of(row) for row in self._rows or ())

    def column(self, name: str) -> pa.Array:
        """Give one column."""
        return self.record_batch.column(AT[name])

    def values(self, name: str) -> list[Any]:
        """Give one column as Python values; the cheapest look at a small batch."""
        if self._rows is not None:
            at = AT[name]
            return [row[at] for row in self._rows]
        result: list[Any] = self.column(name).to_pylist()
        return result

    def distinct(self, name: str) -> list[Any]:
        """Give the values of a column of texts, each once; most batches have one zone and one predicate."""
        if self._rows is not None:
            return list(dict.fromkeys(self.values(name)))
        single = constant_value(self.column(name))
        return [single] if single is not None else list(self.column(name).unique().to_pylist())

    def numbers(self, name: str) -> np.ndarray:
        """Give one column of whole numbers without nulls as an array."""
        if self._record_batch is None:
            return np.array(self.values(name), dtype=np.int64)
        return np.asarray(self.column(name).to_numpy())

    @property
    def names_artifacts(self) -> bool:
        """Whether any of these facts refers to an artifact."""
        if self._rows is not None:
            return any(row[_ARTIFACT] is not None or row[_ARTIFACT_DIGEST] is not None for row in self._rows)
        return any(self.column(name).null_count < len(self) for name in ("artifact", "artifact_digest"))

    def first_null(self, name: str) -> int | None:
        """Give the first row without a value in a column, or None when all have one."""
        if self._rows is None and self.column(name).null_count == 0:
            return None
        return next((row for row, value in enumerate(self.values(name)) if value is None), None)

    def as_sealed(self) -> FactBatch:
        """Give the same facts marked as sealed; only `bsfg.sealing` may say so."""
        if self._record_batch is None:
            return type(self).of_rows(self._rows or [], sealed=True, message=self._message)
        return type(self)(self._record_batch, sealed=True)

    def slice(self, start: int, count: int | None = None) -> Self:
        """Give consecutive rows without copying them."""
        if start == 0 and (count is None or count >= len(self)):
            return self
        if self._record_batch is None:
            rows = (self._rows or [])[start : None if count is None else start + count]
            return type(self).of_rows(rows, sealed=self.sealed)
        return type(self)(self.record_batch.slice(start, count), sealed=self.sealed)

    def pieces(self, max_bytes: int = PIECE_BYTES) -> list[Self]:
        """Cut it into pieces of about a size at most, each of at least one row; an empty batch has none."""
        if self.nbytes <= max_bytes or len(self) <= 1:
            return [self] if len(self) else []
        middle = len(self) // 2
        return self.slice(0, middle).pieces(max_bytes) + self.slice(middle).pieces(max_bytes)

    def take(self, rows: np.ndarray | Sequence[int]) -> Self:
        """Give the named rows, in that order."""
        indices = pa.array(np.asarray(rows, dtype=np.int64))
        return type(self)(self.record_batch.take(indices), sealed=self.sealed)

    def with_columns(self, **columns: pa.Array) -> Self:
        """Give a batch with some columns replaced; it counts as unsealed."""
        batch = self.record_batch
        for name, column in columns.items():
            batch = batch.set_column(AT[name], self.schema.field(AT[name]), column)
        return type(self)(batch)

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Put batches one after the other."""
        if not batches:
            return cls.empty()
        if len(batches) == 1:
            return batches[0]
        sealed = all(batch.sealed for batch in batches)
        if all(batch._record_batch is None for batch in batches):
            small = sum(map(len, batches)) <= SMALL_BATCH_FACTS
            # Many messages are sooner joined by Arrow.
            if small or any(batch._message is None for batch in batches):
                return cls.of_rows([row for batch in batches for row in batch._rows or ()], sealed=sealed)
        return cls(pa.concat_batches([batch.record_batch for batch in batches]), sealed=sealed)

    @classmethod
    def empty(cls) -> Self:
        """Give a batch without rows."""
        arrays = [nulls(0, field.type) for field in cls.schema]
        return cls(pa.RecordBatch.from_arrays(arrays, schema=cls.schema), sealed=True)

    @classmethod
    def from_messages(cls, messages: Iterable[Message]) -> FactBatch:
        """Make an unsealed batch of Python messages."""
        rows = [row_of(message, number) for number, message in enumerate(messages)]
        if len(rows) <= SMALL_BATCH_FACTS and all(map(is_plain, rows)):
            return FactBatch.of_rows(rows)
        return FactBatch(record_batch_of(rows))

    @classmethod
    def from_ipc(cls, data: bytes | memoryview | pa.Buffer, limits: Limits = DEFAULT_LIMITS) -> Self:
        """Read a batch from an Arrow IPC stream of anybody; it is safe to look at, and unsealed.

        Raises `FrameInvalid` or `FactTooLarge` when the bytes are not exactly that (see `bsfg.ipc.decode`).
        """
        if type(data) is bytes and len(data) <= min(SMALL_BATCH_BYTES, limits.max_batch_bytes):
            message = message_in(data, cls.schema)
            if message is not None:
                rows = cls.messages.read(message, min(SMALL_BATCH_FACTS, limits.max_batch_facts))
                if rows is not None:
                    return cls.of_rows(rows, message=message)
        return cls(decode(data, cls.schema, limits), wellformed=True)

    def to_ipc(self) -> pa.Buffer:
        """Write the batch as an Arrow IPC stream."""
        return pa.py_buffer(b"".join(self.to_ipc_parts()))

    def to_ipc_parts(self) -> tuple[bytes, bytes | pa.Buffer, bytes]:
        """Give the Arrow IPC stream in parts, for who puts it into something larger."""
        return encoded_parts(self.to_message(), self.schema)

    def to_message(self) -> bytes | pa.Buffer:
        """Write the rows as one record batch message of Arrow: a stream without its beginning and its end."""
        if not self.is_by_hand:
            return self.record_batch.serialize()
        if self._message is None:
            self._message = self.messages.write(self._rows or [])
        return self._message

    def message_with_digests(self, digests: Sequence[bytes]) -> bytes | None:
        """Write the message of the same rows with other digests, if this batch has one to begin with."""
        if self._message is None:
            return None
        return self.messages.spliced(self._message, self.messages, AT["digest"], [digests])

    def to_messages(self) -> list[Message]:
        """Make Python messages of the rows."""
        return [message_of(row) for row in self.record_batch.select(FACT_SCHEMA.names).to_pylist()]

    def digests(self) -> list[bytes]:
        """Give the digests as Python bytes."""
        return self.values("digest")


class EntryBatch(FactBatch):
    """Stored facts as columns: a `FactBatch` with offsets, times and origins."""

    schema = ENTRY_SCHEMA
    messages = ENTRY_MESSAGES
    __slots__ = ()

    @property
    def offsets(self) -> np.ndarray:
        """The offsets of the rows."""
        return self.numbers("offset")

    @property
    def facts(self) -> FactBatch:
        """The same rows without what the buffer added."""
        if self._record_batch is None:
            rows = [row[: len(FACT_SCHEMA)] for row in self._rows or ()]
            message = None
            if self._message is not None:
                message = FACT_MESSAGES.spliced(self._message, ENTRY_MESSAGES, len(FACT_SCHEMA), ())
            return FactBatch.of_rows(rows, sealed=True, message=message)
        return FactBatch(self.record_batch.select(FACT_SCHEMA.names), sealed=True, wellformed=self.wellformed)

    @staticmethod
    def of_few(facts: FactBatch, base: int, appended_at_unix_ms: int) -> EntryBatch:
        """Put offsets and a time to a few facts of a store buffer, which have no origins; see `is_by_hand`."""
        count, nothing = len(facts), [None] * len(facts)
        added = (range(base, base + count), [appended_at_unix_ms] * count, *[nothing] * len(ORIGIN_FIELDS))
        rows = [(*row, *more) for row, more in zip(facts.rows(), zip(*added, strict=True), strict=True)]
        message = ENTRY_MESSAGES.spliced(bytes(facts.to_message()), FACT_MESSAGES, len(FACT_SCHEMA), added)
        return EntryBatch.of_rows(rows, sealed=True, message=message)

    @staticmethod
    def of(facts: pa.RecordBatch, offsets: np.ndarray, appended_at_unix_ms: np.ndarray | int) -> EntryBatch:
        """Put offsets and times to stored columns; columns that the storage left out become null."""
        count = facts.num_rows
        times = np.broadcast_to(np.asarray(appended_at_unix_ms, dtype=np.int64), (count,))
        added = (int64_array(offsets), int64_array(times))
        if facts.schema.equals(FACT_SCHEMA):
            arrays = [*facts.columns, *added, *(nulls(count, field.type) for field in ORIGIN_FIELDS)]
        elif facts.schema.equals(STORED_SCHEMA):
            columns = facts.columns
            arrays = [*columns[: len(FACT_SCHEMA)], *added, *columns[len(FACT_SCHEMA) :]]
        else:
            # Lay out stored columns of any number and order as those of entries.
            known = {name: facts.column(name) for name in facts.schema.names}
            known["offset"], known["appended_at_unix_ms"] = added
            arrays = [known[f.name] if f.name in known else nulls(facts.num_rows, f.type) for f in ENTRY_SCHEMA]
        return EntryBatch(pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA), sealed=True)

    @classmethod
    def from_ipc(
        cls,
        data: bytes | memoryview | pa.Buffer,
        limits: Limits = DEFAULT_LIMITS,
        schema: pa.Schema = AGELESS_ENTRY_SCHEMA,
    ) -> Self:
        """Read entries from an Arrow IPC stream of anybody, also of a node that knows no ages.

        The stream may have the columns of a ``schema`` alone; the others are null then.
        """
        older = () if schema is AGELESS_ENTRY_SCHEMA else (AGELESS_ENTRY_SCHEMA,)
        for known in (schema, *older):
            if begins_as(data, known):
                found = decode(data, known, limits)
                there = dict(zip(known.names, found.columns, strict=True))
                arrays = [
                    there[field.name] if field.name in there else nulls(found.num_rows, field.type)
                    for field in ENTRY_SCHEMA
                ]
                return cls(pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA), wellformed=True)
        return super().from_ipc(data, limits)

    def to_ipc_parts(self, schema: pa.Schema = ENTRY_SCHEMA) -> tuple[bytes, bytes | pa.Buffer, bytes]:
        """Give the Arrow IPC stream in parts, with the columns of a schema alone."""
        if schema is ENTRY_SCHEMA:
            return super().to_ipc_parts()
        return encoded_parts(self.record_batch.select(schema.names).serialize(), schema)

    def ages_ms(self, now_unix_ms: int) -> np.ndarray:
        """Count how old each fact is at a moment, told by the clock of the zone whose entries these are.

        The count begins with the first append in any zone. Entries of versions before 0.2 came without an age; theirs
        is told by the clock of the zone that they were pulled from.
        """
        # A sender may claim any time or age; what is beyond all reason must not wrap around, and counts as old.
        here = now_unix_ms - self.numbers("appended_at_unix_ms").clip(-_OLDEST_MS, _OLDEST_MS)
        if not self._have("origin_age_ms") and not self._have("origin_appended_at_unix_ms"):
            return np.asarray(here.clip(0, _OLDEST_MS))
        pulled = self._filled("origin_appended_at_unix_ms", _UNKNOWN)
        before = self._filled("origin_age_ms", _UNKNOWN)
        told = np.where(pulled == _UNKNOWN, here, now_unix_ms - pulled.clip(-_OLDEST_MS, _OLDEST_MS))
        ages = np.where(before == _UNKNOWN, told, here + before.clip(0, _OLDEST_MS))
        return np.asarray(ages.clip(0, _OLDEST_MS))

    def _have(self, name: str) -> bool:
        """Tell whether any row has a value in a column."""
        if self._rows is not None:
            return any(value is not None for value in self.values(name))
        return bool(self.column(name).null_count < len(self))

    def _filled(self, name: str, absent: int) -> np.ndarray:
        """Give a column of whole numbers with another number where there is none."""
        if self._rows is not None:
            return np.array([absent if value is None else value for value in self.values(name)], dtype=np.int64)
        return np.asarray(self.column(name).fill_null(absent).to_numpy())

    def to_entries(self) -> list[Entry]:
        """Make Python entries of the rows."""
        return list(self._entries())

    def in_steps(self, rows: int, max_bytes: int) -> Iterator[tuple[int, list[Entry]]]:
        """Make Python entries of so many rows and bytes at a time, told with the bytes; one alone may have more."""
        for first in range(0, len(self), _VALUES_AT_ONCE):
            step, size_bytes = list[Entry](), 0
            for entry in self.slice(first, _VALUES_AT_ONCE)._entries():
                its_bytes = len(entry.message.fact.object)
                if step and (len(step) == rows or size_bytes + its_bytes >= max_bytes):
                    yield size_bytes, step
                    step, size_bytes = [], 0
                step.append(entry)
                size_bytes += its_bytes
            yield size_bytes, step

    def _entries(self) -> Iterator[Entry]:
        names = ENTRY_SCHEMA.names
        rows = self._rows if self._rows is not None else zip(*map(_values, self.record_batch.columns), strict=True)
        return (entry_of(dict(zip(names, row, strict=True))) for row in rows)


def _values(column: pa.Array) -> list[Any]:
    """Give a column as Python values, as `to_pylist` does in three times the time."""
    if column.null_count == len(column):
        return [None] * len(column)
    values: list[Any] = column.to_pylist() if column.null_count else column.to_numpy(zero_copy_only=False).tolist()
    return values


def _fitted(record_batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Bring a record batch of another schema into ours: other columns are left out, like types are converted."""
    missing = [name for name in schema.names if record_batch.schema.names.count(name) != 1]
    if missing:
        raise InvalidFact(f"{missing[0]}: the batch must have this column once", field=missing[0], rule="is required")
    try:
        return record_batch.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise InvalidFact(f"the batch does not fit the schema of facts: {error}", rule=str(schema)) from None


# The last known state.


def newest(entries: EntryBatch, most: int | None = None) -> EntryBatch:
    """Give the last row of each subject and predicate, in the order of the rows; of more than ``most`` the latest."""
    if len(entries) < 2:
        return entries
    columns = {name: entries.column(name) for name in ("subject", "predicate")}
    rows = pa.table({**columns, "row": pa.array(np.arange(len(entries)))})
    last = rows.group_by(["subject", "predicate"], use_threads=False).aggregate([("row", "max")])
    chosen = np.sort(last.column("row_max").to_numpy())
    if most is not None and len(chosen) > most:
        chosen = chosen[-most:]
    return entries if len(chosen) == len(entries) else entries.take(chosen)


class LatestEntries:
    """Collects entries in the order of their offsets and keeps the newest of each subject and predicate."""

    def __init__(self, known: EntryBatch, most: int) -> None:
        self._most = most
        self._parts, self._rows = [known], 0

    def add(self, entries: EntryBatch) -> None:
        """Take in the entries that follow."""
        self._parts.append(entries)
        self._rows += len(entries)
        if self._rows > _LATEST_ROWS:
            self._parts, self._rows = [self._newest()], 0

    def result(self) -> EntryBatch:
        """Give what is left, in the order of offsets."""
        return self._newest()

    def _newest(self) -> EntryBatch:
        return newest(EntryBatch.concat([part for part in self._parts if len(part)]), self._most)
