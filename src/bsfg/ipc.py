"""Arrow streams from somebody who is not trusted: read what the bytes claim before Arrow acts on it.

Messages of a few rows are written and read without making arrays; what Arrow refuses is refused here too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from operator import gt
from typing import Any

import pyarrow as pa

from bsfg.columns import ENTRY_SCHEMA, FACT_SCHEMA, STORED_SCHEMA
from bsfg.errors import FactTooLarge, FrameInvalid
from bsfg.model import DEFAULT_LIMITS, Limits

Data = bytes | memoryview

_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _RECORD_BATCH = 1, 3
_MAX_HEADER_BYTES = 1 << 20
_END = b"\xff\xff\xff\xff\0\0\0\0"
_HEADS: list[tuple[pa.Schema, bytes]] = []
_HEADS_MAX = 8
_HINT = "Send an Arrow IPC stream of the schema of facts, uncompressed and without dictionaries."


def encoded_parts(message: bytes | pa.Buffer, schema: pa.Schema) -> tuple[bytes, bytes | pa.Buffer, bytes]:
    """Give the parts of the stream of one record batch message, which alone depends on the rows."""
    return _head_bytes(schema), message, _END


def message_in(data: bytes, schema: pa.Schema) -> bytes | None:
    """Give what stands between the beginning and the end of a stream as `encoded_parts` makes them; None for others."""
    head = _head_bytes(schema)
    return data[len(head) : -len(_END)] if data.startswith(head) and data.endswith(_END) else None


def begins_as(data: bytes | memoryview | pa.Buffer, schema: pa.Schema) -> bool:
    """Tell whether a stream begins as this package writes one of that schema."""
    head = _head_bytes(schema)
    return memoryview(data)[: len(head)] == head


def decode(data: bytes | memoryview | pa.Buffer, schema: pa.Schema, limits: Limits = DEFAULT_LIMITS) -> pa.RecordBatch:
    """Read an Arrow IPC stream from anybody; what it gives is safe to look at, cell by cell.

    Raises `FactTooLarge` when it has more bytes or rows than the limits allow, and `FrameInvalid` for everything
    else: garbage, another schema, dictionaries, compression, offsets that point outside, text that is not UTF-8.
    """
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    if buffer.size > limits.max_batch_bytes:
        raise _too_large(f"the stream has {buffer.size} bytes, the limit is {limits.max_batch_bytes}")
    if buffer.address % 8:
        buffer = pa.py_buffer(buffer.to_pybytes())
    view, head = memoryview(buffer), _head_bytes(schema)
    known_bytes = len(head) if view[: len(head)].tobytes() == head else 0
    batches = _check_claims(view, limits, known_bytes)
    try:
        if known_bytes and batches == 1:
            return _read_one(buffer.slice(known_bytes), schema)
        return _read(buffer, schema)
    except (pa.ArrowException, OSError, MemoryError, OverflowError, ValueError) as error:
        raise _invalid(f"not a readable Arrow stream: {error}") from None


def _head_bytes(schema: pa.Schema) -> bytes:
    """Give how a stream of a schema begins when it was written by `encode`, as nearly all are."""
    for known, bytes_ in _HEADS:
        if known is schema:
            return bytes_
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    head: bytes = sink.getvalue().to_pybytes()[: -len(_END)]
    if len(_HEADS) < _HEADS_MAX:
        _HEADS.append((schema, head))
    return head


def _read_one(buffer: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Read the one record batch behind a schema that is known."""
    batch = pa.ipc.read_record_batch(buffer, schema)
    batch.validate(full=True)
    return batch


def _read(buffer: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    with pa.ipc.open_stream(buffer) as reader:
        found = [(field.name, field.type) for field in reader.schema]
        if found != [(field.name, field.type) for field in schema]:
            names = ", ".join(f"{name}: {type_}" for name, type_ in found[:40])
            raise _invalid(f"the stream has another schema: {names[:500]}")
        batches = list(reader)
    for batch in batches:
        batch.validate(full=True)
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=schema)


def _check_claims(data: memoryview, limits: Limits, known_bytes: int) -> int:
    """Refuse a stream whose headers promise anything but plain record batches within the limits; count those."""
    rows = 0
    kinds = [_SCHEMA] if known_bytes else []
    try:
        for header in _headers(data[known_bytes:]):
            kinds.append(header.kind)
            rows += header.rows
            if header.kind not in (_SCHEMA, _RECORD_BATCH):
                raise _invalid("the stream holds dictionaries or other messages that facts do not have")
            if header.compressed:
                raise _invalid("the stream is compressed")
            if header.rows < 0:
                raise _invalid("a record batch claims a negative number of rows")
    except struct.error as error:
        raise _invalid(f"not an Arrow stream: {error}") from None
    if kinds[:1] != [_SCHEMA] or kinds.count(_SCHEMA) > 1:
        raise _invalid("an Arrow stream begins with its schema, once")
    if rows > limits.max_batch_facts:
        raise _too_large(f"the stream claims {rows} facts, the limit is {limits.max_batch_facts}")
    return kinds.count(_RECORD_BATCH)


@dataclass(frozen=True, slots=True)
class _Header:
    """What one message of a stream claims."""

    kind: int
    rows: int
    compressed: bool


def _headers(data: memoryview) -> Iterator[_Header]:
    """Walk over the messages of a stream, which must fill it exactly."""
    at = 0
    while at < len(data):
        mark, size = struct.unpack_from("<Ii", data, at)
        at += 8
        if mark != _CONTINUATION or not 0 <= size <= min(_MAX_HEADER_BYTES, len(data) - at):
            raise _invalid("not an Arrow stream")
        if size == 0:
            if at != len(data):
                raise _invalid("bytes follow the end of the stream")
            return
        header, body_bytes = _header(data[at : at + size])
        at += size + body_bytes
        if body_bytes < 0 or at > len(data):
            raise _invalid("a message claims more bytes than there are")
        yield header


def _header(data: memoryview) -> tuple[_Header, int]:
    """Read a message's flatbuffer: Message {version, kind, header, body bytes}, RecordBatch {rows, …, compression}."""
    message = FlatTable.root(data)
    kind, body_bytes = message.scalar(1, "<B"), message.scalar(3, "<q")
    if kind != _RECORD_BATCH:
        return _Header(kind, 0, False), body_bytes
    batch = message.table(2)
    return _Header(kind, batch.scalar(0, "<q"), batch.where(3) is not None), body_bytes


class FlatTable:
    """A table of a flatbuffer: fields by number, each perhaps absent."""

    def __init__(self, data: Data, at: int) -> None:
        self._data, self._at = data, at
        self._slots = at - number("<i", data, at)
        self._slots_bytes = number("<H", data, self._slots)

    @staticmethod
    def root(data: Data) -> FlatTable:
        """Give the table that a flatbuffer begins with."""
        return FlatTable(data, number("<I", data, 0))

    def table(self, field: int) -> FlatTable:
        """Give the table that a field refers to."""
        return FlatTable(self._data, self.target(field))

    def target(self, field: int) -> int:
        """Give the place that a field refers to."""
        at = self.where(field)
        if at is None:
            raise _invalid("a message lacks a part")
        return at + number("<I", self._data, at)

    def where(self, field: int) -> int | None:
        """Give the place of a field's value."""
        slot = 4 + 2 * field
        if slot + 2 > self._slots_bytes:
            return None
        offset = number("<H", self._data, self._slots + slot)
        return self._at + offset if offset else None

    def scalar(self, field: int, form: str) -> int:
        """Give a field's number, 0 when it is absent."""
        at = self.where(field)
        return 0 if at is None else number(form, self._data, at)


def number(form: str, data: Data, at: int) -> int:
    """Read a number of a flatbuffer; a place before its beginning is no place."""
    if at < 0:
        raise _invalid("not an Arrow stream: an offset points before its beginning")
    value: int = struct.unpack_from(form, data, at)[0]
    return value


def _invalid(message: str) -> FrameInvalid:
    return FrameInvalid(message, hint=_HINT)


def _too_large(message: str) -> FactTooLarge:
    return FactTooLarge(message, hint="Split the batch.")


_ALIGN = 8
_PREFIX_BYTES = 8
_PADDING = [bytes(count) for count in range(_ALIGN)]
_ZEROS = bytes(64)
_ENDS_OF_ONE = struct.Struct("<ii").pack
TEXT, BYTES, INT = "text", "bytes", "int"

Column = tuple[int, tuple[int, ...], bytes]
"""How many values of a column are null, the sizes of its buffers, and the buffers, each padded to the alignment."""


class RowMessages:
    """Writes rows of one schema; the rows must hold exactly its types (see `bsfg.rows.is_plain`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns = [_column_writer(field.type) for field in schema]
        self._widths = [width_of(field.type) for field in schema]
        self._kinds = [kind_of(field.type) for field in schema]
        pattern = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema).serialize()
        self._head = pattern.to_pybytes()[: _PREFIX_BYTES + int.from_bytes(pattern[4:8], "little")]
        message = FlatTable.root(self._head[_PREFIX_BYTES:])
        batch = message.table(2)
        # Where the numbers stand: the size of the body, the count of rows, then those of columns and of buffers, which
        # are vectors: their length comes first.
        places = (message.where(3), batch.where(0), batch.target(1) + 4, batch.target(2) + 4)
        self._size_at, self._count_at, self._nodes_at, self._buffers_at = (_PREFIX_BYTES + (at or 0) for at in places)
        self._buffers_before = list(accumulate((2 if width else 3 for width in self._widths), initial=0))
        self._nodes_form = struct.Struct(f"<{2 * len(schema)}q")
        self._buffers_form = struct.Struct(f"<{2 * self._buffers_before[-1]}q")
        self._fixed = self._fixed_parts()

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
        self._nodes_form.pack_into(head, self._nodes_at, *nodes)
        self._buffers_form.pack_into(head, self._buffers_at, *buffers)
        return head

    def _fixed_parts(self) -> list[tuple[int, int, bytes]]:
        """Give the parts of the header between its numbers: from, to, and the bytes there."""
        numbers = sorted(
            [
                (self._size_at, 8),
                (self._count_at, 8),
                (self._nodes_at, self._nodes_form.size),
                (self._buffers_at, self._buffers_form.size),
            ]
        )
        parts, start = [], 0
        for at, size in [*numbers, (len(self._head), 0)]:
            parts.append((start, at, self._head[start:at]))
            start = at + size
        return parts

    def read(self, message: bytes, max_rows: int) -> list[tuple[Any, ...]] | None:
        """Read a message of anybody as rows, if it is laid out exactly as `write` would do it.

        None stands for all others, wrong ones among them: Arrow can read more, and knows what to say.
        """
        for start, end, fixed in self._fixed:
            if message[start:end] != fixed:
                return None
        body = message[len(self._head) :]
        [count] = struct.unpack_from("<q", message, self._count_at)
        [size] = struct.unpack_from("<q", message, self._size_at)
        if size != len(body) or not 0 < count <= max_rows:
            return None
        nodes = self._nodes_form.unpack_from(message, self._nodes_at)
        buffers = self._buffers_form.unpack_from(message, self._buffers_at)
        if nodes[::2] != (count,) * len(self._kinds) or not _follow_each_other(buffers, size):
            return None
        try:
            return [self._read_one(body, nodes, buffers)] if count == 1 else self._read_few(body, nodes, buffers)
        except (_OtherLayout, UnicodeDecodeError):
            return None

    def _read_few(self, body: bytes, nodes: tuple[int, ...], buffers: tuple[int, ...]) -> list[tuple[Any, ...]]:
        reader = _reader(nodes[0])
        columns, at = [], 0
        for kind, width, nulls in zip(self._kinds, self._widths, nodes[1::2], strict=True):
            if width:
                columns.append(reader.fixed(kind, width, body, nulls, buffers[at : at + 4]))
                at += 4
            else:
                columns.append(reader.texts(kind, body, nulls, buffers[at : at + 6]))
                at += 6
        return list(zip(*columns, strict=True))

    def _read_one(self, body: bytes, nodes: tuple[int, ...], buffers: tuple[int, ...]) -> tuple[Any, ...]:
        """Read one row; the same, twice as fast."""
        row: list[Any] = []
        next_buffer = iter(zip(buffers[::2], buffers[1::2], strict=True)).__next__
        for kind, width, nulls in zip(self._kinds, self._widths, nodes[1::2], strict=True):
            bits_at, bits = next_buffer()
            at, size = next_buffer()
            if nulls:
                # As `write` does it: an empty bitmap, and zeros as the value or as its offsets.
                used = 0 if width else next_buffer()[1]
                if (nulls, bits, size, used) != (1, 1, width or 8, 0) or body[bits_at : at + size] != _ZEROS[
                    : 8 + size
                ]:
                    raise _OtherLayout
                row.append(None)
                continue
            data_at, used = (at, size) if width else next_buffer()
            if bits or (size != width if width else body[at : at + size] != _ENDS_OF_ONE(0, used)):
                raise _OtherLayout
            data = body[data_at : data_at + used]
            row.append(
                data.decode() if kind is TEXT else int.from_bytes(data, "little", signed=True) if kind is INT else data
            )
        return tuple(row)

    def spliced(self, message: bytes, of: RowMessages, keep: int, columns: Sequence[Sequence[Any]]) -> bytes:
        """Write a message whose first columns are those of a message that `of` wrote or read, followed by new ones.

        Their bytes are copied as they stand: no value of them becomes an object again.
        """
        [count] = struct.unpack_from("<q", message, of._count_at)
        kept = 2 * of._buffers_before[keep]
        nodes = list(of._nodes_form.unpack_from(message, of._nodes_at)[: 2 * keep])
        buffers = list(of._buffers_form.unpack_from(message, of._buffers_at)[:kept])
        at = buffers[-2] + buffers[-1] + -buffers[-1] % _ALIGN
        body = [message[len(of._head) : len(of._head) + at]]
        for write, values in zip(self._columns[keep:], columns, strict=True):
            nulls, sizes, data = write(values)
            nodes += (count, nulls)
            for size in sizes:
                buffers += (at, size)
                at += size + -size % _ALIGN
            body.append(data)
        return b"".join((self._header(at, count, nodes, buffers), *body))


class _OtherLayout(Exception):
    """A column is not laid out as it would be here."""


def _follow_each_other(buffers: tuple[int, ...], body_bytes: int) -> bool:
    """Tell whether each buffer begins where the one before it ends, and the last one ends the body."""
    expected = 0
    for at, size in zip(buffers[::2], buffers[1::2], strict=True):
        if at != expected or size < 0:
            return False
        expected += size + -size % _ALIGN
    return expected == body_bytes


class _ColumnReader:
    """Reads columns of so many rows; everything that is used of the bytes is checked first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._bits_bytes, self._ends_bytes = (count + 7) // 8, 4 * count + 4
        self._nothing = (None,) * count
        # Bitmap and offsets of a column without values, from the beginning of the one to the end of the other.
        self._no_bytes = bytes(self._bits_bytes + -self._bits_bytes % _ALIGN + self._ends_bytes)
        self._ends = struct.Struct(f"<{count + 1}i").unpack_from
        self._numbers = struct.Struct(f"<{count}q").unpack_from

    def fixed(self, kind: str, width: int, body: bytes, nulls: int, buffers: tuple[int, ...]) -> Sequence[Any]:
        """Read a column of values of one size."""
        bits_at, bits, at, size = buffers
        if size != width * self._count:
            raise _OtherLayout
        if kind is INT:
            return self._with_nulls(self._numbers(body, at), body, nulls, bits_at, bits)
        values = [body[start : start + width] for start in range(at, at + size, width)]
        return self._with_nulls(values, body, nulls, bits_at, bits)

    def texts(self, kind: str, body: bytes, nulls: int, buffers: tuple[int, ...]) -> Sequence[Any]:
        """Read a column of texts or bytes."""
        bits_at, bits, ends_at, size, at, used = buffers
        # Padding would hide a bitmap that is too short for its rows, which no Arrow reads.
        if size != self._ends_bytes or bits != (self._bits_bytes if nulls else 0):
            raise _OtherLayout
        if nulls == self._count and not used and body[bits_at : ends_at + size] == self._no_bytes:
            return self._nothing
        ends = self._ends(body, ends_at)
        if ends[0] != 0 or ends[-1] != used or (self._count > 1 and any(map(gt, ends, ends[1:]))):
            raise _OtherLayout
        data: Any = body[at : at + used]
        if kind is BYTES:
            values = [data[start:end] for start, end in pairwise(ends)]
        elif data.isascii():
            # Then a character is a byte, and one decoding does for all.
            data = data.decode()
            values = [data[start:end] for start, end in pairwise(ends)]
        else:
            values = [data[start:end].decode() for start, end in pairwise(ends)]
        return self._with_nulls(values, body, nulls, bits_at, bits)

    def _with_nulls(self, values: Sequence[Any], body: bytes, nulls: int, at: int, size: int) -> Sequence[Any]:
        if size != (self._bits_bytes if nulls else 0):
            raise _OtherLayout
        if not nulls:
            return values
        bits = int.from_bytes(body[at : at + size], "little")
        if bits >> self._count or bits.bit_count() != self._count - nulls:
            raise _OtherLayout
        return [value if bits >> row & 1 else None for row, value in enumerate(values)]


@lru_cache(maxsize=256)
def _reader(count: int) -> _ColumnReader:
    return _ColumnReader(count)


def width_of(type_: pa.DataType) -> int:
    """Give the bytes of each value of a type, 0 when they differ."""
    return type_.bit_width // 8 if pa.types.is_int64(type_) or pa.types.is_fixed_size_binary(type_) else 0


def kind_of(type_: pa.DataType) -> str:
    """Give of which kind the values of a type are."""
    return INT if pa.types.is_int64(type_) else TEXT if pa.types.is_string(type_) else BYTES


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
STORED_MESSAGES = RowMessages(STORED_SCHEMA)
ENTRY_MESSAGES = RowMessages(ENTRY_SCHEMA)
