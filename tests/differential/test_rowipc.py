"""Messages of a few rows are read and written by hand as Arrow reads and writes them, whatever the bytes are."""

import struct
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.differential import campaign, drawing
from tests.differential.arrowmodel import rows_of

from bsfg.columns import AT, ENTRY_SCHEMA, FACT_SCHEMA, STORED_SCHEMA
from bsfg.ipc import ENTRY_MESSAGES, FACT_MESSAGES, STORED_MESSAGES, RowMessages
from bsfg.rows import Row, record_batch_of

SHAPES = ((FACT_MESSAGES, FACT_SCHEMA), (STORED_MESSAGES, STORED_SCHEMA), (ENTRY_MESSAGES, ENTRY_SCHEMA))
FACTS = len(FACT_SCHEMA)


def by_arrow(message: bytes, schema: pa.Schema) -> list[Row]:
    """Read a message with Arrow, everything checked."""
    return rows_of(pa.ipc.read_record_batch(pa.py_buffer(message), schema))


def damaged(random: Random, shape: RowMessages, message: bytes) -> bytes:
    """Damage a message anywhere, or make one number of its header lie: rows, nulls, and where buffers lie."""
    if random.random() < 0.4:
        return campaign.mutated(random, message)
    changed = bytearray(message)
    nodes = range(shape._nodes_at, shape._nodes_at + shape._nodes_form.size, 8)
    buffers = range(shape._buffers_at, shape._buffers_at + shape._buffers_form.size, 8)
    for _ in range(random.choice((1, 1, 2))):
        at = random.choice(random.choice((nodes, buffers, buffers)))
        [word] = struct.unpack_from("<q", changed, at)
        lie = word + random.choice((-64, -8, -1, -1, 1, 1, 2, 8, 64)) if random.random() < 0.8 else -word
        struct.pack_into("<q", changed, at, lie)
    return bytes(changed)


def read_as_arrow_does(random: Random) -> str:
    """Damage a message: whatever is read by hand, Arrow reads too, fully checked, with the same values."""
    shape, schema = random.choice(SHAPES)
    rows = drawing.rows(random, schema)
    message = shape.write(rows) if random.random() < 0.7 else record_batch_of(rows, schema).serialize().to_pybytes()
    given = damaged(random, shape, message) if random.random() < 0.9 else message
    found = shape.read(given, 64)
    if found is None:
        assert given != message
        return "left to Arrow"
    assert found == by_arrow(given, schema)
    if given == message:
        assert found == rows
        return "sound"
    if shape is not FACT_MESSAGES:
        check_splice(random, shape, given, found)
    return "altered and read"


def check_splice(random: Random, shape: RowMessages, message: bytes, rows: list[Row]) -> None:
    """Take a message that was read apart and put another together of it: Arrow reads that as well."""
    facts = FACT_MESSAGES.spliced(message, shape, FACTS, ())
    assert by_arrow(facts, FACT_SCHEMA) == [row[:FACTS] for row in rows]
    digests = [random.randbytes(32) for _ in rows]
    digested = FACT_MESSAGES.spliced(facts, FACT_MESSAGES, AT["digest"], [digests])
    expected = [(*row[: FACTS - 1], digest) for row, digest in zip(rows, digests, strict=True)]
    assert by_arrow(digested, FACT_SCHEMA) == expected
    added = list(zip(*(row[FACTS:] for row in rows), strict=True))
    again = shape.spliced(facts, FACT_MESSAGES, FACTS, added)
    assert by_arrow(again, dict(SHAPES)[shape]) == rows


@pytest.mark.soak
def test_damaged_messages_are_read_as_arrow_reads_them() -> None:
    """Lengths, null counts, bitmaps, offsets and texts may lie: what Arrow refuses is not read by hand."""
    campaign.run(read_as_arrow_does, short=4_000, must_see=("sound", "altered and read", "left to Arrow"))


def written_as_arrow_does(random: Random) -> str:
    """Write rows by hand and by Arrow."""
    shape, schema = random.choice(SHAPES)
    rows = drawing.rows(random, schema)
    written = shape.write(rows)
    assert written == record_batch_of(rows, schema).serialize().to_pybytes()
    assert shape.read(written, 64) == by_arrow(written, schema) == rows
    return "agreed"


@pytest.mark.soak
def test_rows_are_written_as_arrow_writes_them() -> None:
    """A message written by hand has the very bytes of Arrow's, for any rows."""
    campaign.run(written_as_arrow_does, short=1_000)


@given(st.data())
def test_rows_of_any_values_are_written_and_read_as_by_arrow(data: st.DataObject) -> None:
    """The same with values that are sought for being difficult."""
    shape, schema = data.draw(st.sampled_from(SHAPES))
    columns = st.tuples(*(st.none() | _values(field.type) for field in schema))
    rows = data.draw(st.lists(columns, min_size=1, max_size=12))
    written = shape.write(rows)
    assert written == record_batch_of(rows, schema).serialize().to_pybytes()
    assert shape.read(written, 64) == by_arrow(written, schema) == rows


def _values(type_: pa.DataType) -> st.SearchStrategy[object]:
    if pa.types.is_int64(type_):
        return st.integers(-(1 << 63), (1 << 63) - 1)
    if pa.types.is_fixed_size_binary(type_):
        return st.binary(min_size=type_.byte_width, max_size=type_.byte_width)
    return st.text(st.characters(codec="utf-8"), max_size=12) if pa.types.is_string(type_) else st.binary(max_size=20)


@pytest.mark.parametrize("count", [9, 16, 17, 33, 64])
def test_a_bitmap_one_byte_short_is_left_to_arrow(count: int) -> None:
    """A column without values whose bitmap says to be shorter than its rows is none that is read by hand."""
    message = bytearray(FACT_MESSAGES.write([(None,) * FACTS] * count))
    size_at = FACT_MESSAGES._buffers_at + 8
    assert message[size_at] == (count + 7) // 8
    message[size_at] -= 1
    with pytest.raises(pa.ArrowInvalid):
        by_arrow(bytes(message), FACT_SCHEMA)
    assert FACT_MESSAGES.read(bytes(message), 64) is None
