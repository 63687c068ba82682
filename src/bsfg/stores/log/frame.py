"""The bytes of a segment file: a header, then frames of facts, each bound to the one before it.

```
segment: "BSFGSEG2" | header length, CRC32C | log_id | base offset | previous base | chain before | time before | schema
frame:   "FRM1" | header CRC32C | payload length | base offset | count | form | appended at | log_id
         | SHA-256 of the frame before | payload CRC32C | payload | padding to 16
```

The payload is an Arrow record batch message (form 0) or, in frames of a few facts, rows (form 1, see `rowform`).
Segments that begin with "BSFGSEG1" are of versions that knew the first form only.

Numbers are little-endian. The chain starts with the digest of the log's id, so a frame belongs to one place of one log.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import crc32c
import pyarrow as pa

from bsfg.errors import FormatUnsupported
from bsfg.rows import Row
from bsfg.schema import AT, FACT_SCHEMA, STORED_SCHEMA
from bsfg.stores.log.files import Bytes
from bsfg.stores.log.rowform import NotRows, form_of

SEGMENT_MAGICS = {1: b"BSFGSEG1", 2: b"BSFGSEG2"}
VERSION = max(SEGMENT_MAGICS)
COLUMNS, ROWS = 0, 1
"""The forms of a payload."""
FRAME_MAGIC = b"FRM1"
ALIGN = 16

_SEGMENT = struct.Struct("<8sII16sQq32sqI")
FRAME_FIELDS = struct.Struct("<4sIQQIIq16s32sII")
FRAME_HEADER_BYTES = FRAME_FIELDS.size
FRAME_CRC_BEGUN = crc32c.crc32c(FRAME_MAGIC + bytes(4))
"""The checksum of a header up to and with its own place, which counts as zeros."""
MAX_PAYLOAD_BYTES = 1 << 32
MAX_OFFSET = 1 << 62
MAX_NAMED_OFFSET = 1 << 61
"""Files may be called anything: above what a name can say there is room for a log to go on."""
NOT_KNOWN = -2
_CHECKED_WHOLE_FACTS = 1_024
_ALWAYS = ("from_zone", "message_id", "digest")
"""Without these nothing is a fact: nobody could tell whether it is there already, or whether it is whole."""
_always = itemgetter(*(AT[name] for name in _ALWAYS))
_ZONE, _ID = AT["from_zone"], AT["message_id"]
_LACKING = "the frame cannot be decoded: a fact lacks its key or its digest"


class Torn(Exception):
    """The bytes end before the frame does, or no frame begins here."""


class Damaged(Exception):
    """The bytes are complete but fail a check."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself and of its predecessor."""

    log_id: bytes
    base: int
    previous_base: int
    chain_before: bytes
    time_before_unix_ms: int
    schema: pa.Schema
    size_bytes: int = 0
    version: int = VERSION

    @property
    def is_made_up(self) -> bool:
        """Whether it stands in for one that is damaged."""
        return self.previous_base == NOT_KNOWN


@dataclass(slots=True)
class FrameHeader:
    """Where a frame stands, how much it holds, and what it is chained to.

    Not frozen, as that would take most of the time of reading it.
    """

    payload_bytes: int
    base: int
    count: int
    appended_at_unix_ms: int
    log_id: bytes
    chain_before: bytes
    payload_crc: int
    form: int = COLUMNS

    @classmethod
    def of(cls, fields: tuple[Any, ...]) -> FrameHeader:
        """Make it of the fields as they stand in a file."""
        _, _, length, base, count, form, appended_at, log_id, chain, payload_crc, _ = fields
        return cls(length, base, count, appended_at, log_id, chain, payload_crc, form)

    @property
    def frame_bytes(self) -> int:
        """The size of the whole frame, padding included."""
        return padded(FRAME_HEADER_BYTES + self.payload_bytes)

    @property
    def end(self) -> int:
        """The offset after the last entry of the frame."""
        return self.base + self.count


def padded(size_bytes: int) -> int:
    """Round up to the alignment of frames."""
    return (size_bytes + ALIGN - 1) // ALIGN * ALIGN


def genesis(log_id: bytes) -> bytes:
    """Give the chain value before the first frame of a log."""
    return hashlib.sha256(b"bsfg log " + log_id).digest()


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Write a segment header."""
    schema = header.schema.serialize().to_pybytes()
    size = padded(_SEGMENT.size + len(schema))

    def fields(crc: int) -> bytes:
        return _SEGMENT.pack(
            SEGMENT_MAGICS[header.version],
            size,
            crc,
            header.log_id,
            header.base,
            header.previous_base,
            header.chain_before,
            header.time_before_unix_ms,
            len(schema),
        )

    body = (fields(0) + schema).ljust(size, b"\0")
    return bytes(fields(crc32c.crc32c(body)) + body[_SEGMENT.size :])


def decode_segment_header(data: Bytes) -> SegmentHeader:
    """Read a segment header; raises `Torn` when it is incomplete and `Damaged` when it is wrong."""
    if len(data) < _SEGMENT.size:
        raise Torn("the segment header is incomplete")
    magic, size, crc, log_id, base, previous, chain, time_before, schema_bytes = _SEGMENT.unpack_from(data)
    version = next((number for number, known in SEGMENT_MAGICS.items() if known == magic), None)
    body = bytearray(data[: max(size, _SEGMENT.size)])
    struct.pack_into("<I", body, 12, 0)
    marks = SEGMENT_MAGICS.values() if version is None else [magic]
    is_ours = any(crc32c.crc32c(mark + bytes(body[len(mark) :])) == crc for mark in marks)
    if version is None:
        if magic[:7] == SEGMENT_MAGICS[VERSION][:7] and not is_ours:
            raise FormatUnsupported(f"segment format {magic[7:].decode(errors='replace')!r} is not known")
        raise Damaged("the segment does not begin with its mark")
    if len(data) < size or size < _SEGMENT.size + schema_bytes:
        raise Torn("the segment header is incomplete")
    if not is_ours:
        raise Damaged("the segment header fails its CRC")
    start = _SEGMENT.size
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(bytes(data[start : start + schema_bytes])))
    except Exception as error:
        raise Damaged(f"the segment header holds no schema: {error}") from None
    schema = next((known for known in (FACT_SCHEMA, STORED_SCHEMA) if schema.equals(known)), schema)
    if base > MAX_OFFSET or any(field not in schema for field in FACT_SCHEMA):
        raise Damaged("the segment header is not plausible: its schema is not that of facts, or its base no offset")
    return SegmentHeader(log_id, base, previous, chain, time_before, schema, size, version)


def encode_frame(
    payload: Bytes,
    *,
    base: int,
    count: int,
    appended_at_unix_ms: int,
    log_id: bytes,
    chain_before: bytes,
    form: int = COLUMNS,
) -> tuple[list[Bytes], bytes]:
    """Write a frame: give its parts, ready to be written one after the other, and the chain value after it."""
    payload_crc = crc32c.crc32c(payload)

    def fields(crc: int) -> bytes:
        return FRAME_FIELDS.pack(
            FRAME_MAGIC,
            crc,
            len(payload),
            base,
            count,
            form,
            appended_at_unix_ms,
            log_id,
            chain_before,
            payload_crc,
            0,
        )

    header = fields(crc32c.crc32c(fields(0)))
    padding = bytes(padded(FRAME_HEADER_BYTES + len(payload)) - FRAME_HEADER_BYTES - len(payload))
    return [header, payload, padding], chain_after(header, payload)


def chain_after(header: Bytes, payload: Bytes) -> bytes:
    """Give the chain value after a frame: the SHA-256 of its header and payload."""
    digest = hashlib.sha256(header)
    digest.update(payload)
    return digest.digest()


def decode_frame_header(data: Bytes, at: int = 0) -> FrameHeader:
    """Read a frame header; raises `Torn` or `Damaged`."""
    if len(data) - at < FRAME_HEADER_BYTES:
        raise Torn("the frame header is incomplete")
    fields = FRAME_FIELDS.unpack_from(data, at)
    if fields[0] != FRAME_MAGIC:
        raise Damaged("no frame begins here")
    if crc32c.crc32c(data[at + 8 : at + FRAME_HEADER_BYTES], FRAME_CRC_BEGUN) != fields[1]:
        raise Damaged("the frame header fails its CRC")
    header = FrameHeader.of(fields)
    if header.payload_bytes > MAX_PAYLOAD_BYTES or header.count == 0 or header.base > MAX_OFFSET:
        raise Damaged("the frame header is not plausible")
    return header


def check_payload(header: FrameHeader, payload: Bytes) -> None:
    """Raise `Torn` or `Damaged` when a payload is not the one its header describes."""
    if len(payload) < header.payload_bytes:
        raise Torn("the frame is incomplete")
    if crc32c.crc32c(payload) != header.payload_crc:
        raise Damaged("the frame fails its CRC")


def decode_payload(header: FrameHeader, payload: Bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Read the facts of a frame; raises `Damaged`, and nothing else, when they are not what the header says.

    Here and in `decode_rows` stored bytes become facts, and nowhere else. A checksum says that they are what was
    written, not that a version which accepted less strictly wrote something sound. Small frames, which come from
    hand-made readers, are checked to the last offset and text; of large ones, which Arrow checked at the door, the
    extent of every column.
    """
    if header.form != COLUMNS:
        return rows_batch(decode_rows(header, payload, schema), schema)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate(full=batch.num_rows <= _CHECKED_WHOLE_FACTS)
    except MemoryError:
        raise
    except Exception as error:
        raise Damaged(f"the frame cannot be decoded: {error}") from None
    if batch.num_rows != header.count:
        raise Damaged(f"the frame holds {batch.num_rows} facts, its header says {header.count}")
    if any(batch.column(name).null_count for name in _ALWAYS):
        raise Damaged(_LACKING)
    return batch


def decode_rows(header: FrameHeader, payload: Bytes, schema: pa.Schema) -> list[Row]:
    """Read the facts of a frame that holds rows; raises `Damaged`, and nothing else, as `decode_payload` does."""
    form = form_of(schema)
    if header.form != ROWS or form is None:
        raise Damaged(f"the frame has the form {header.form}, which is not known for its columns")
    try:
        rows = form.read(payload)
    except NotRows as error:
        raise Damaged(f"the frame cannot be decoded: {error}") from None
    if len(rows) != header.count:
        raise Damaged(f"the frame holds {len(rows)} facts, its header says {header.count}")
    if any(None in _always(row) for row in rows):
        raise Damaged(_LACKING)
    return rows


def decode_keys(header: FrameHeader, payload: Bytes, schema: pa.Schema) -> list[Row]:
    """Read zone and id of each fact of a frame that holds rows; raises `Damaged` wherever `decode_rows` does."""
    form = form_of(schema)
    keys = form.keys(payload) if header.form == ROWS and form is not None else None
    if keys is None or len(keys) != header.count:
        return [(row[_ZONE], row[_ID]) for row in decode_rows(header, payload, schema)]
    return keys


def rows_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Make columns of what `decode_rows` has given."""
    form = form_of(schema)
    assert form is not None
    return form.record_batch(rows)
