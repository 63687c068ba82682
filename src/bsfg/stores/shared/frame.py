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
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import crc32c
import pyarrow as pa

from bsfg.batch import BY_HAND_FACTS, EntryBatch
from bsfg.columns import AT, FACT_SCHEMA, ORIGIN_FIELDS, STORED_SCHEMA
from bsfg.errors import FormatUnsupported
from bsfg.ipc import BYTES, FACT_MESSAGES, INT, STORED_MESSAGES, TEXT, RowMessages, kind_of, width_of
from bsfg.rows import Row, record_batch_of

Bytes = bytes | bytearray | memoryview

FEW_FACTS = BY_HAND_FACTS
"""Frames of so many facts or fewer hold rows, larger ones columns."""

_BITS = struct.Struct("<I")
_INT64 = struct.Struct("<q")
_FACTS = len(FACT_SCHEMA)
_IN_EVERY_ROW = sum(1 << FACT_SCHEMA.get_field_index(name) for name in ("message_id", "from_zone", "digest"))
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
        if bits & _IN_EVERY_ROW != _IN_EVERY_ROW:
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


class Unreadable(Damaged):
    """The medium does not give the bytes; it may do so again, where the path to it was away for a while."""


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
