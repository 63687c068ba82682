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

_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _RECORD_BATCH = 1, 3
_MAX_HEADER_BYTES = 1 << 20
_HINT = "Send an Arrow IPC stream of the schema of facts, uncompressed and without dictionaries."


def encode(record_batch: pa.RecordBatch) -> pa.Buffer:
    """Write a record batch as an Arrow IPC stream of its own."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, record_batch.schema) as writer:
        writer.write_batch(record_batch)
    return sink.getvalue()


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
    _check_claims(memoryview(buffer), limits)
    try:
        return _read(buffer, schema)
    except (pa.ArrowException, OSError, MemoryError, OverflowError, ValueError) as error:
        raise _invalid(f"not a readable Arrow stream: {error}") from None


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


def _check_claims(data: memoryview, limits: Limits) -> None:
    """Refuse a stream whose headers promise anything but plain record batches within the limits."""
    rows = 0
    kinds = []
    try:
        for header in _headers(data):
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
    message = _Table(data, _number("<I", data, 0))
    kind, body_bytes = message.scalar(1, "<B"), message.scalar(3, "<q")
    if kind != _RECORD_BATCH:
        return _Header(kind, 0, False), body_bytes
    at = message.where(2)
    if at is None:
        raise _invalid("a message has no header")
    batch = _Table(data, at + _number("<I", data, at))
    return _Header(kind, batch.scalar(0, "<q"), batch.where(3) is not None), body_bytes


class _Table:
    """A table of a flatbuffer: fields by number, each perhaps absent."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._slots = at - _number("<i", data, at)
        self._slots_bytes = _number("<H", data, self._slots)

    def where(self, field: int) -> int | None:
        """Give the place of a field's value."""
        slot = 4 + 2 * field
        if slot + 2 > self._slots_bytes:
            return None
        offset = _number("<H", self._data, self._slots + slot)
        return self._at + offset if offset else None

    def scalar(self, field: int, form: str) -> int:
        """Give a field's number, 0 when it is absent."""
        at = self.where(field)
        return 0 if at is None else _number(form, self._data, at)


def _number(form: str, data: memoryview, at: int) -> int:
    if at < 0:
        raise _invalid("not an Arrow stream: an offset points before its beginning")
    value: int = struct.unpack_from(form, data, at)[0]
    return value


def _invalid(message: str) -> FrameInvalid:
    return FrameInvalid(message, hint=_HINT)


def _too_large(message: str) -> FactTooLarge:
    return FactTooLarge(message, hint="Split the batch.")
