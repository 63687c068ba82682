"""The row form of small frames: a fact that comes alone is stored in little more than its own bytes.

Arrow describes every column of a record batch, whether it holds two thousand values or one. For one fact that is 1,300
bytes beside those of the fact. So a frame of a few facts holds rows:

```
row:  bit set of the columns that have a value | length of each text and byte string among them | their values
```

Bits and lengths are 32-bit numbers. Columns come in the order of the schema, and whole numbers have 64 bits. Every list
of rows has exactly one form, and every form that can be read is that of its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa

from bsfg.batch import BY_HAND_FACTS, EntryBatch
from bsfg.rowipc import BYTES, FACT_MESSAGES, INT, STORED_MESSAGES, TEXT, RowMessages, kind_of, width_of
from bsfg.rows import Row, record_batch_of
from bsfg.schema import FACT_SCHEMA, ORIGIN_FIELDS, STORED_SCHEMA
from bsfg.stores.log.files import Bytes

FEW_FACTS = BY_HAND_FACTS
"""Frames of so many facts or fewer hold rows, larger ones columns."""

_BITS = struct.Struct("<I")
_INT64 = struct.Struct("<q")
_FACTS = len(FACT_SCHEMA)
_ALWAYS = sum(1 << FACT_SCHEMA.get_field_index(name) for name in ("message_id", "from_zone", "digest"))
_NO_ORIGIN = (None,) * len(ORIGIN_FIELDS)


class NotRows(Exception):
    """The bytes are no rows of the schema."""


class _Layout(NamedTuple):
    """How a row with values in certain columns is laid out."""

    head: struct.Struct
    columns: tuple[tuple[int, str, int], ...]
    """Index, kind, and width of each column that has a value; 0 when values differ in width."""


class _Texts(NamedTuple):
    """Where the texts of a row stand: those side by side are one stretch, from one length to another."""

    head: struct.Struct
    stretches: list[tuple[int, int, int]]
    """The lengths before a stretch, those before its end, and the bytes of values before it that need no length."""
    width: int
    """The bytes of all values that need no length."""


class RowForm:
    """Writes and reads rows of one schema."""

    def __init__(self, schema: pa.Schema, messages: RowMessages) -> None:
        self.schema, self._messages = schema, messages
        self._widths = [width_of(field.type) for field in schema]
        self._kinds = [kind_of(field.type) for field in schema]
        self._layout = lru_cache(maxsize=1024)(self._laid_out)
        self._stretches = lru_cache(maxsize=1024)(self._side_by_side)

    def _laid_out(self, bits: int) -> _Layout:
        if bits >> len(self._kinds):
            raise NotRows("a row has values in columns that there are not")
        present = [at for at in range(len(self._kinds)) if bits >> at & 1]
        columns = tuple((at, self._kinds[at], self._widths[at]) for at in present)
        return _Layout(struct.Struct(f"<{1 + sum(not width for _, _, width in columns)}I"), columns)

    def _side_by_side(self, bits: int) -> _Texts | None:
        """Lay out the texts of a row; None when it lacks its key or its digest."""
        if bits & _ALWAYS != _ALWAYS:
            return None
        head, columns = self._layout(bits)
        stretches: list[tuple[int, int, int]] = []
        lengths = fixed = 0
        for _, kind, width in columns:
            if kind is TEXT:
                joins = stretches and stretches[-1][1:] == (lengths, fixed)
                stretches.append((stretches.pop()[0] if joins else lengths, lengths + 1, fixed))
            lengths, fixed = lengths + (not width), fixed + width
        return _Texts(head, stretches, fixed)

    def write(self, rows: Sequence[Row]) -> bytes:
        """Write rows that hold exactly the types of the schema (see `bsfg.rows.is_plain`)."""
        parts: list[bytes] = []
        for row in rows:
            bits, bit = 0, 1
            lengths: list[int] = []
            values: list[bytes] = []
            for kind, width, value in zip(self._kinds, self._widths, row, strict=True):
                if value is not None:
                    bits |= bit
                    data = _INT64.pack(value) if kind is INT else value if type(value) is bytes else value.encode()
                    values.append(data)
                    if not width:
                        lengths.append(len(data))
                bit <<= 1
            parts.append(self._layout(bits).head.pack(bits, *lengths))
            parts += values
        return b"".join(parts)

    def read(self, payload: Bytes) -> list[Row]:
        """Read rows; raises `NotRows` when the bytes are not exactly that."""
        data = bytes(payload)
        size, at, nothing = len(data), 0, [None] * len(self._kinds)
        rows: list[Row] = []
        try:
            while at < size:
                head, columns = self._layout(_BITS.unpack_from(data, at)[0])
                lengths = iter(head.unpack_from(data, at))
                next(lengths)
                at += head.size
                row: list[Any] = nothing.copy()
                for column, kind, width in columns:
                    end = at + (width or next(lengths))
                    value = data[at:end]
                    row[column] = (
                        value.decode() if kind is TEXT else value if kind is BYTES else _INT64.unpack(value)[0]
                    )
                    at = end
                rows.append(tuple(row))
        except (struct.error, UnicodeDecodeError) as error:
            raise NotRows(f"the row at byte {at} cannot be read: {error}") from None
        if at != size:
            raise NotRows(f"the last row has {at - size} bytes more than there are")
        return rows

    def keys(self, payload: Bytes) -> list[Row] | None:
        """Give zone and id of each row as `read` finds them, in less time.

        None when it takes `read` to say what is wrong: these are no rows, or one lacks its key or its digest.
        """
        data = bytes(payload)
        size, at = len(data), 0
        keys: list[Row] = []
        try:
            while at < size:
                found = self._stretches(_BITS.unpack_from(data, at)[0])
                if found is None:
                    return None
                head, stretches, fixed = found
                _, *lengths = head.unpack_from(data, at)
                at += head.size
                ends = list(accumulate(lengths, initial=at))
                for first, end, before in stretches:
                    if not data[ends[first] + before : ends[end] + before].isascii():
                        for number in range(first, end):
                            data[ends[number] + before : ends[number + 1] + before].decode()
                keys.append((data[ends[1] : ends[2]].decode(), data[at : ends[1]].decode()))
                at = ends[-1] + fixed
        except (struct.error, UnicodeDecodeError, NotRows):
            return None
        return keys if at == size else None

    def record_batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        """Make columns of rows."""
        return self._messages.record_batch(rows) if len(rows) <= FEW_FACTS else record_batch_of(rows, self.schema)


FACT_ROWS = RowForm(FACT_SCHEMA, FACT_MESSAGES)
STORED_ROWS = RowForm(STORED_SCHEMA, STORED_MESSAGES)


def form_of(schema: pa.Schema) -> RowForm | None:
    """Give the form of the rows of a schema, if that is one of ours itself: to compare it takes longer than to read."""
    return FACT_ROWS if schema is FACT_SCHEMA else STORED_ROWS if schema is STORED_SCHEMA else None


def entry_rows(rows: Sequence[Row], base: int, appended_at_unix_ms: int) -> list[Row]:
    """Put offsets and a time to rows of facts, or of facts with their origins."""
    at = appended_at_unix_ms
    return [(*row[:_FACTS], number, at, *(row[_FACTS:] or _NO_ORIGIN)) for number, row in enumerate(rows, base)]


def entries_of(rows: list[Row]) -> EntryBatch:
    """Make a batch of rows of entries."""
    return EntryBatch.of_rows(rows, sealed=True)
