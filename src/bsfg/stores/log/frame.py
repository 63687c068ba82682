"""The bytes of a segment file: a header, then frames of facts, each bound to the one before it.

```
segment: "BSFGSEG1" | header length, CRC32C | log_id | base offset | previous base | chain before | time before | schema
frame:   "FRM1" | header CRC32C | payload length | base offset | count | flags | appended at | log_id
         | SHA-256 of the frame before | payload CRC32C | an Arrow record batch message | padding to 16
```

Numbers are little-endian. The chain starts with the digest of the log's id, so a frame belongs to one place of one log.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import crc32c
import pyarrow as pa

from bsfg.errors import FormatUnsupported
from bsfg.schema import FACT_SCHEMA
from bsfg.stores.log.files import Bytes

SEGMENT_MAGIC = b"BSFGSEG1"
FRAME_MAGIC = b"FRM1"
ALIGN = 16

_SEGMENT = struct.Struct("<8sII16sQq32sqI")
_FRAME = struct.Struct("<4sIQQIIq16s32sII")
FRAME_HEADER_BYTES = _FRAME.size
MAX_PAYLOAD_BYTES = 1 << 32
MAX_OFFSET = 1 << 62
MAX_NAMED_OFFSET = 1 << 61
"""Files may be called anything: above what a name can say there is room for a log to go on."""
NOT_KNOWN = -2
_CHECKED_WHOLE_FACTS = 1_024


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

    @property
    def is_made_up(self) -> bool:
        """Whether it stands in for one that is damaged."""
        return self.previous_base == NOT_KNOWN


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Where a frame stands, how much it holds, and what it is chained to."""

    payload_bytes: int
    base: int
    count: int
    appended_at_unix_ms: int
    log_id: bytes
    chain_before: bytes
    payload_crc: int

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
            SEGMENT_MAGIC,
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
    body = bytearray(data[: max(size, _SEGMENT.size)])
    body[: len(SEGMENT_MAGIC)] = SEGMENT_MAGIC
    struct.pack_into("<I", body, 12, 0)
    is_ours = crc32c.crc32c(bytes(body)) == crc
    if magic != SEGMENT_MAGIC:
        if bytes(magic[:7]) == SEGMENT_MAGIC[:7] and not is_ours:
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
    if base > MAX_OFFSET or any(field not in schema for field in FACT_SCHEMA):
        raise Damaged("the segment header is not plausible: its schema is not that of facts, or its base no offset")
    return SegmentHeader(log_id, base, previous, chain, time_before, schema, size)


def encode_frame(
    payload: Bytes, *, base: int, count: int, appended_at_unix_ms: int, log_id: bytes, chain_before: bytes
) -> tuple[list[Bytes], bytes]:
    """Write a frame: give its parts, ready to be written one after the other, and the chain value after it."""
    payload_crc = crc32c.crc32c(payload)

    def fields(crc: int) -> bytes:
        return _FRAME.pack(
            FRAME_MAGIC,
            crc,
            len(payload),
            base,
            count,
            0,
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
    raw = bytes(data[at : at + FRAME_HEADER_BYTES])
    magic, crc, length, base, count, _, appended_at, log_id, chain, payload_crc, _ = _FRAME.unpack(raw)
    if magic != FRAME_MAGIC:
        raise Damaged("no frame begins here")
    if crc32c.crc32c(raw[:4] + b"\0\0\0\0" + raw[8:]) != crc:
        raise Damaged("the frame header fails its CRC")
    if length > MAX_PAYLOAD_BYTES or count == 0 or base > MAX_OFFSET:
        raise Damaged("the frame header is not plausible")
    return FrameHeader(length, base, count, appended_at, log_id, chain, payload_crc)


def check_payload(header: FrameHeader, payload: Bytes) -> None:
    """Raise `Torn` or `Damaged` when a payload is not the one its header describes."""
    if len(payload) < header.payload_bytes:
        raise Torn("the frame is incomplete")
    if crc32c.crc32c(payload) != header.payload_crc:
        raise Damaged("the frame fails its CRC")


def decode_payload(header: FrameHeader, payload: Bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Read the facts of a frame; raises `Damaged`, and nothing else, when they are not what the header says.

    This is the one place where stored bytes become columns. A checksum says that they are what was written, not that
    a version which accepted less strictly wrote something sound. Small frames, which come from hand-made readers, are
    checked to the last offset and text; of large ones, which Arrow checked at the door, the extent of every column.
    """
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate(full=batch.num_rows <= _CHECKED_WHOLE_FACTS)
    except MemoryError:
        raise
    except Exception as error:
        raise Damaged(f"the frame cannot be decoded: {error}") from None
    if batch.num_rows != header.count:
        raise Damaged(f"the frame holds {batch.num_rows} facts, its header says {header.count}")
    return batch
