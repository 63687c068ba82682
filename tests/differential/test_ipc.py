"""Arrow streams of anybody: what is read is what Arrow reads and finds sound, by whichever path it comes in."""

from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.differential import arrowmodel, campaign, drawing
from tests.differential.arrowmodel import rows_in, rows_of

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import ENTRY_SCHEMA, FACT_SCHEMA
from bsfg.errors import FactTooLarge, FrameInvalid
from bsfg.ipc import FACT_MESSAGES, decode
from bsfg.rows import Row, record_batch_of


def stream(random: Random, schema: pa.Schema) -> bytes:
    """Write a stream as ours or as others write them: one batch or several, sometimes with more about the schema."""
    described = schema.with_metadata({"by": "others"}) if random.random() < 0.1 else schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, described) as writer:
        for _ in range(random.choice((1, 1, 1, 1, 0, 2))):
            writer.write_batch(
                record_batch_of(drawing.rows(random, schema), schema).replace_schema_metadata(described.metadata)
            )
    data: bytes = sink.getvalue().to_pybytes()
    return data if random.random() < 0.9 else data[:-8]


def read_as_arrow_does(random: Random) -> str:
    """Read a damaged stream by hand, with our own checks first, and by Arrow alone."""
    kind, schema = random.choice(((FactBatch, FACT_SCHEMA), (EntryBatch, ENTRY_SCHEMA)))
    data = stream(random, schema)
    if random.random() < 0.95:
        data = arrowmodel.damaged(random, data)
    try:
        checked: list[Row] | None = rows_of(decode(data, schema))
    except (FrameInvalid, FactTooLarge):
        checked = None
    try:
        found: list[Row] | None = kind.from_ipc(data).rows()
    except (FrameInvalid, FactTooLarge):
        found = None
    assert found == checked
    if found is None:
        return "refused"
    assert found == rows_in(data, schema)
    return "read"


@pytest.mark.soak
def test_damaged_streams_are_read_as_arrow_reads_them() -> None:
    """By hand or by columns, a stream gives the rows that Arrow finds sound, or it is refused by both."""
    campaign.run(read_as_arrow_does, short=3_000, must_see=("read", "refused"))


@given(st.data())
def test_edited_streams_are_read_as_arrow_reads_them(data: st.DataObject) -> None:
    """The same with edits that are sought for being difficult, on a stream of a few odd rows."""
    rows = drawing.rows(Random(data.draw(st.integers(0, 50))), FACT_SCHEMA, data.draw(st.sampled_from([1, 2, 9, 33])))
    good = FactBatch.of_rows(rows).to_ipc().to_pybytes()
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(len(good) - len(FACT_MESSAGES.write(rows)) - 8, len(good) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    try:
        found = FactBatch.from_ipc(bytes(changed)).rows()
    except (FrameInvalid, FactTooLarge):
        return
    assert found == rows_in(bytes(changed), FACT_SCHEMA)
