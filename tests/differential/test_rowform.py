"""Rows of small frames are read as a plain model reads them and as Arrow holds them, whatever the bytes are."""

import re
import struct
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.differential import campaign, drawing, rowmodel
from tests.differential.arrowmodel import rows_of

from bsfg.columns import FACT_SCHEMA, STORED_SCHEMA
from bsfg.rows import Row, record_batch_of
from bsfg.stores.shared.frame import (
    FACT_ROWS,
    ROWS,
    STORED_ROWS,
    Damaged,
    FrameHeader,
    NotRows,
    RowForm,
    decode_keys,
    decode_payload,
    decode_rows,
    entries_of,
    entry_rows,
)

FORMS = (FACT_ROWS, STORED_ROWS)
ALWAYS = [FACT_SCHEMA.get_field_index(name) for name in ("from_zone", "message_id", "digest")]


def places_in(data: bytes, form: RowForm) -> list[int]:
    """Give where bits and lengths stand in rows that can be read."""
    places, at = list[int](), 0
    for row in form.read(data):
        varying = [value for value in row if isinstance(value, str | bytes)]
        count = 1 + len(varying) - sum(isinstance(value, bytes) and len(value) == 32 for value in row[15:16])
        places += range(at, at + 4 * count)
        at += len(form.write([row]))
    return places


def keys_are_those_of(rows: list[Row] | None, form: RowForm, header: FrameHeader, data: bytes) -> None:
    """Read keys alone: they are those of the rows, and are refused, in the same words, where rows are."""
    whole = rows is not None and not any(row[at] is None for row in rows for at in ALWAYS)
    assert form.keys(memoryview(data)) == ([(row[1], row[0]) for row in rows or []] if whole else None)
    try:
        decoded = decode_rows(header, data, form.schema)
    except Damaged as damage:
        with pytest.raises(Damaged, match=f"^{re.escape(str(damage))}$"):
            decode_keys(header, data, form.schema)
    else:
        assert decode_keys(header, data, form.schema) == [(row[1], row[0]) for row in decoded]


def read_as_the_model_does(random: Random) -> str:
    """Damage rows: what is read is what the model reads, what Arrow takes, and the only form of these rows."""
    form = random.choice(FORMS)
    rows = drawing.rows(random, form.schema)
    written = form.write(rows)
    data = campaign.mutated(random, written, places_in(written, form)) if random.random() < 0.9 else written
    header = FrameHeader(len(data), 0, len(rows), 0, b"", b"", 0, ROWS)
    expected = rowmodel.rows_in(data, form.schema)
    keys_are_those_of(expected, form, header, data)
    if expected is None:
        with pytest.raises(NotRows):
            form.read(data)
        with pytest.raises(Damaged):
            decode_payload(header, data, form.schema)
        return "refused"
    found = form.read(memoryview(data))
    assert found == expected
    assert form.write(found) == data
    batch = form.record_batch(found) if found else record_batch_of(found, form.schema)
    batch.validate(full=True)
    assert rows_of(batch) == found
    if len(found) != len(rows):
        with pytest.raises(Damaged):
            decode_rows(header, data, form.schema)
        return "another count"
    if any(row[at] is None for row in found for at in ALWAYS):
        with pytest.raises(Damaged, match="lacks"):
            decode_payload(header, data, form.schema)
        return "no fact"
    assert rows_of(decode_payload(header, data, form.schema)) == found
    return "sound" if data == written else "altered and read"


@pytest.mark.soak
def test_damaged_rows_are_read_as_the_model_reads_them() -> None:
    """Bits, lengths, texts and ends may lie: what is no form of rows is refused, and nothing else is."""
    seen = ("sound", "altered and read", "refused", "no fact")
    campaign.run(read_as_the_model_does, short=4_000, must_see=seen)


@given(st.data())
def test_rows_of_any_values_are_given_back(data: st.DataObject) -> None:
    """Values that are sought for being difficult come back as they were, as rows, columns and entries."""
    form = data.draw(st.sampled_from(FORMS))
    columns = st.tuples(*(st.none() | _values(field.type) for field in form.schema))
    rows = data.draw(st.lists(columns, min_size=1, max_size=12))
    written = form.write(rows)
    assert form.read(written) == rowmodel.rows_in(written, form.schema) == rows
    count = data.draw(st.sampled_from([len(rows), len(rows) + 1]))
    keys_are_those_of(rows, form, FrameHeader(len(written), 0, count, 0, b"", b"", 0, ROWS), written)
    assert rows_of(form.record_batch(rows)) == rows_of(record_batch_of(rows, form.schema)) == rows
    entries = entries_of(entry_rows(rows, 7, 9))
    assert entries.offsets.tolist() == list(range(7, 7 + len(rows)))
    assert [row[:16] for row in entries.rows()] == [row[:16] for row in rows]
    origins = [row[16:] or (None,) * 4 for row in rows]
    assert [row[16:] for row in entries.rows()] == [(7 + at, 9, *origin) for at, origin in enumerate(origins)]


def _values(type_: pa.DataType) -> st.SearchStrategy[object]:
    if pa.types.is_int64(type_):
        return st.integers(-(1 << 63), (1 << 63) - 1)
    if pa.types.is_fixed_size_binary(type_):
        return st.binary(min_size=type_.byte_width, max_size=type_.byte_width)
    return st.text(st.characters(codec="utf-8"), max_size=12) if pa.types.is_string(type_) else st.binary(max_size=20)


@pytest.mark.parametrize("schema", [FACT_SCHEMA.remove(0), STORED_SCHEMA.append(pa.field("more", pa.string()))])
def test_rows_of_another_schema_are_damage(schema: pa.Schema) -> None:
    """A frame that claims rows in a segment of other columns, or a form that is not known, is damage and no crash."""
    data = struct.pack("<I", 0)
    with pytest.raises(Damaged, match="form 1"):
        decode_payload(FrameHeader(4, 0, 1, 0, b"", b"", 0, ROWS), data, schema)
    with pytest.raises(Damaged, match="form 1"):
        decode_keys(FrameHeader(4, 0, 1, 0, b"", b"", 0, ROWS), data, schema)
    with pytest.raises(Damaged, match="form 2"):
        decode_payload(FrameHeader(4, 0, 1, 0, b"", b"", 0, 2), data, FACT_SCHEMA)
