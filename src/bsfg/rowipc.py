"""Arrow's record batch messages of a few rows, written without making arrays first.

To make sixteen arrays of one value each costs more than everything else that is done for a fact. But such a message is
only a header of fixed shape and the bytes of the values, so for a few rows it is put together here: Arrow writes one
message as a pattern, and each time the numbers in it are exchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pyarrow as pa

from bsfg.ipc import Table
from bsfg.schema import FACT_SCHEMA

_ALIGN = 8
_PREFIX_BYTES = 8
_PADDING = [bytes(count) for count in range(_ALIGN)]
_ZEROS = bytes(64)
_ENDS_OF_ONE = struct.Struct("<ii").pack

Column = tuple[int, tuple[int, ...], bytes]
"""How many values of a column are null, the sizes of its buffers, and the buffers, each padded to the alignment."""


class RowMessages:
    """Writes rows of one schema; the rows must hold exactly its types (see `bsfg.rows.is_plain`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns = [_column_writer(field.type) for field in schema]
        self._widths = [_width(field.type) for field in schema]
        pattern = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema).serialize()
        self._head = pattern.to_pybytes()[: _PREFIX_BYTES + int.from_bytes(pattern[4:8], "little")]
        message = Table.root(self._head[_PREFIX_BYTES:])
        batch = message.table(2)
        # Where the numbers stand: the size of the body, the count of rows, then those of columns and of buffers, which
        # are vectors: their length comes first.
        places = (message.where(3), batch.where(0), batch.target(1) + 4, batch.target(2) + 4)
        self._size_at, self._count_at, self._nodes_at, self._buffers_at = (_PREFIX_BYTES + (at or 0) for at in places)

    def record_batch(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Make a record batch of rows."""
        return pa.ipc.read_record_batch(pa.py_buffer(self.write(rows)), self._schema)

    def write(self, rows: Sequence[Sequence[Any]]) -> bytes:
        """Write rows as one message."""
        if len(rows) == 1:
            return self._write_one(rows[0])
        count = len(rows)
        nodes: list[int] = []
        buffers: list[int] = []
        body: list[bytes] = []
        at = 0
        for write, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            nulls, sizes, data = write(values)
            nodes += (count, nulls)
            for size in sizes:
                buffers += (at, size)
                at += size + -size % _ALIGN
            body.append(data)
        return b"".join((self._header(at, count, nodes, buffers), *body))

    def _write_one(self, row: Sequence[Any]) -> bytes:
        """Write one row, as most messages of a few rows have one; the same, four times as fast."""
        nodes: list[int] = []
        buffers: list[int] = []
        body: list[bytes] = []
        at = 0
        for width, value in zip(self._widths, row, strict=True):
            if value is None:
                nodes += (1, 1)
                # The bitmap, then zeros as the value or as its offsets.
                buffers += (at, 1, at + 8, width) if width else (at, 1, at + 8, 8, at + 16, 0)
                body.append(_ZEROS[: 8 + (width or 8)])
                at += 8 + (width or 8)
                continue
            nodes += (1, 0)
            if width:
                buffers += (at, 0, at, width)
                body.append(_int64(value) if type(value) is int else value)
                at += width
            else:
                data = value if type(value) is bytes else value.encode()
                size = len(data)
                buffers += (at, 0, at, 8, at + 8, size)
                body += (_ENDS_OF_ONE(0, size), data, _PADDING[-size % _ALIGN])
                at += 8 + size + -size % _ALIGN
        return b"".join((self._header(at, 1, nodes, buffers), *body))

    def _header(self, body_bytes: int, count: int, nodes: list[int], buffers: list[int]) -> bytearray:
        head = bytearray(self._head)
        struct.pack_into("<q", head, self._size_at, body_bytes)
        struct.pack_into("<q", head, self._count_at, count)
        struct.pack_into(f"<{len(nodes)}q", head, self._nodes_at, *nodes)
        struct.pack_into(f"<{len(buffers)}q", head, self._buffers_at, *buffers)
        return head


def _width(type_: pa.DataType) -> int:
    """Give the bytes of each value of a type, 0 when they differ."""
    return type_.bit_width // 8 if pa.types.is_int64(type_) or pa.types.is_fixed_size_binary(type_) else 0


def _column_writer(type_: pa.DataType) -> Callable[[Sequence[Any]], Column]:
    if pa.types.is_int64(type_):
        return lambda values: _fixed(values, 8, _int64)
    if pa.types.is_fixed_size_binary(type_):
        return lambda values: _fixed(values, type_.byte_width, bytes)
    return _texts


def _int64(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _fixed(values: Sequence[Any], width: int, encode: Callable[[Any], bytes]) -> Column:
    bitmap, nulls = _validity(values)
    empty = bytes(width)
    data = b"".join([empty if value is None else encode(value) for value in values])
    return nulls, (len(bitmap), len(data)), _padded(bitmap) + _padded(data)


def _texts(values: Sequence[Any]) -> Column:
    if values[0] is None and values.count(None) == len(values):
        return _no_texts(len(values))
    bitmap, nulls = _validity(values)
    pieces = [b"" if value is None else value.encode() if type(value) is str else value for value in values]
    data, ends = b"".join(pieces), accumulate(map(len, pieces))
    offsets = struct.pack(f"<{len(pieces) + 1}i", 0, *ends)
    return nulls, (len(bitmap), len(offsets), len(data)), _padded(bitmap) + _padded(offsets) + _padded(data)


@cache
def _no_texts(count: int) -> Column:
    bitmap, offsets = bytes((count + 7) // 8), bytes(4 * (count + 1))
    return count, (len(bitmap), len(offsets), 0), _padded(bitmap) + _padded(offsets)


def _validity(values: Sequence[Any]) -> tuple[bytes, int]:
    """Give the bitmap of the values that are there, nothing when all are, and how many are not."""
    if None not in values:
        return b"", 0
    bits = sum(1 << at for at, value in enumerate(values) if value is not None)
    return bits.to_bytes((len(values) + 7) // 8, "little"), values.count(None)


def _padded(data: bytes) -> bytes:
    return data + _PADDING[-len(data) % _ALIGN]


FACT_MESSAGES = RowMessages(FACT_SCHEMA)
