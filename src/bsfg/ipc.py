"""Arrow streams from somebody who is not trusted: read what the bytes claim before Arrow acts on it.

Arrow checks that a stream is well formed, but it also does what a well-formed one asks for: expand compressed buffers
of any size, take dictionaries, allocate. So the few numbers that decide about memory are read here first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

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
    message = Table.root(data)
    kind, body_bytes = message.scalar(1, "<B"), message.scalar(3, "<q")
    if kind != _RECORD_BATCH:
        return _Header(kind, 0, False), body_bytes
    batch = message.table(2)
    return _Header(kind, batch.scalar(0, "<q"), batch.where(3) is not None), body_bytes


class Table:
    """A table of a flatbuffer: fields by number, each perhaps absent."""

    def __init__(self, data: Data, at: int) -> None:
        self._data, self._at = data, at
        self._slots = at - number("<i", data, at)
        self._slots_bytes = number("<H", data, self._slots)

    @staticmethod
    def root(data: Data) -> Table:
        """Give the table that a flatbuffer begins with."""
        return Table(data, number("<I", data, 0))

    def table(self, field: int) -> Table:
        """Give the table that a field refers to."""
        return Table(self._data, self.target(field))

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
