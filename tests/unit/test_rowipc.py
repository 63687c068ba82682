"""Small batches keep the message they came as; that it is read as Arrow reads it is proven in tests/differential."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import AT, ENTRY_SCHEMA, FACT_SCHEMA
from bsfg.errors import FactTooLarge, FrameInvalid
from bsfg.ipc import ENTRY_MESSAGES, FACT_MESSAGES
from bsfg.model import Limits
from bsfg.rows import Row
from bsfg.sealing import seal
from bsfg.testing.facts import messages, sealed

TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)


def values_of(type_: pa.DataType) -> st.SearchStrategy[object]:
    """Draw values of a type, null among them."""
    if pa.types.is_int64(type_):
        some: st.SearchStrategy[object] = st.integers(-(1 << 63), (1 << 63) - 1)
    elif pa.types.is_fixed_size_binary(type_):
        some = st.binary(min_size=type_.byte_width, max_size=type_.byte_width)
    else:
        some = TEXT if pa.types.is_string(type_) else st.binary(max_size=20)
    return st.none() | some


def rows_of(schema: pa.Schema, *, max_size: int = 20) -> st.SearchStrategy[list[Row]]:
    """Draw rows of a schema."""
    return st.lists(st.tuples(*(values_of(field.type) for field in schema)), min_size=1, max_size=max_size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows_of(ENTRY_SCHEMA))
def test_spliced_messages_are_those_that_would_be_written(rows: list[Row]) -> None:
    """Columns that are taken over from another message and columns that are added make the message of such rows."""
    facts = len(FACT_SCHEMA)
    message = ENTRY_MESSAGES.write(rows)
    without = FACT_MESSAGES.spliced(message, ENTRY_MESSAGES, facts, ())
    assert without == FACT_MESSAGES.write([row[:facts] for row in rows])
    added = list(zip(*(row[facts:] for row in rows), strict=True))
    assert ENTRY_MESSAGES.spliced(without, FACT_MESSAGES, facts, added) == message
    digests = [bytes([number]) * 32 for number in range(len(rows))]
    digested = FACT_MESSAGES.spliced(without, FACT_MESSAGES, AT["digest"], [digests])
    expected = [(*row[: AT["digest"]], digest) for row, digest in zip(rows, digests, strict=True)]
    assert digested == FACT_MESSAGES.write(expected)


@pytest.mark.parametrize("count", [1, 2, 33, 64])
def test_a_small_stream_stays_rows_and_keeps_its_message(count: int) -> None:
    """A small batch from the wire has rows at hand, is written again byte for byte, and equals what Arrow reads."""
    stream = sealed(messages(count)).to_ipc().to_pybytes()
    by_hand, by_arrow = FactBatch.from_ipc(stream), FactBatch.from_ipc(memoryview(stream))
    assert by_hand.has_rows
    assert not by_arrow.has_rows
    assert by_hand.to_ipc().to_pybytes() == stream
    assert by_hand == by_arrow
    assert by_hand.rows() == by_arrow.rows()


def test_limits_hold_for_small_streams_too() -> None:
    """A small stream of more facts or bytes than the limits allow is refused as a large one is."""
    stream = sealed(messages(3)).to_ipc().to_pybytes()
    with pytest.raises(FactTooLarge):
        FactBatch.from_ipc(stream, Limits(max_batch_facts=2))
    with pytest.raises(FactTooLarge):
        FactBatch.from_ipc(stream, Limits(max_batch_bytes=len(stream) - 1))
    with pytest.raises(FrameInvalid):
        FactBatch.from_ipc(stream[:-8] + stream[-16:])


@pytest.mark.parametrize("count", [1, 9, 40])
def test_sealing_by_rows_and_by_columns_gives_the_same_message(count: int) -> None:
    """What is sealed from rows, its message spliced, is byte for byte what is sealed from columns."""
    stream = FactBatch.from_messages(messages(count)).to_ipc().to_pybytes()
    from_rows = seal(FactBatch.from_ipc(stream))
    from_columns = seal(FactBatch(FactBatch.from_ipc(memoryview(stream)).record_batch, wellformed=True))
    assert bytes(from_rows.to_message()) == bytes(memoryview(from_columns.record_batch.serialize()))


def test_entries_as_rows_do_what_entries_as_columns_do() -> None:
    """Slices, joins, facts, numbers and entries are the same from either form."""
    facts = sealed(messages(5))
    columns = EntryBatch.of(facts.record_batch, np.arange(7, 12), 99)
    rows = EntryBatch.from_ipc(columns.to_ipc().to_pybytes())
    assert rows.has_rows
    assert rows.slice(1, 3) == columns.slice(1, 3)
    assert EntryBatch.concat([rows.slice(0, 2), rows.slice(2)]) == columns
    assert EntryBatch.concat([rows] * 20) == EntryBatch.concat([columns] * 20)
    assert rows.facts == columns.facts
    assert rows.offsets.tolist() == columns.offsets.tolist()
    assert rows.to_entries() == columns.to_entries()
    assert rows.as_sealed().sealed
    assert isinstance(rows.as_sealed(), EntryBatch)
