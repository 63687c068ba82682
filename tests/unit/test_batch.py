"""`FactBatch`: the same facts as messages, rows and columns, whichever way they are cut and joined."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, columns, field, message, messages, row

from bsfg.batch import ENTRY_SCHEMA, FACT_SCHEMA, SMALL_BATCH_FACTS, EntryBatch, FactBatch
from bsfg.columns import byte_lengths, constant_value, fixed_binary, fixed_rows, used_bytes
from bsfg.errors import InvalidFact
from bsfg.fact import Envelope, Fact, Key, Message, Origin
from bsfg.rows import is_plain, row_of
from bsfg.sealing import seal

COUNTS = [0, 1, 3, SMALL_BATCH_FACTS, SMALL_BATCH_FACTS + 1, 200]
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
MAYBE = st.none() | TEXT
MESSAGES = st.builds(
    Message,
    st.builds(
        Envelope,
        TEXT,
        TEXT,
        st.integers(-(1 << 63), (1 << 63) - 1),
        MAYBE,
        MAYBE,
        MAYBE,
        st.dictionaries(TEXT, TEXT, max_size=3),
        TEXT,
        MAYBE,
        MAYBE,
    ),
    st.builds(Fact, TEXT, TEXT, st.binary(max_size=5), st.sampled_from([None, ARTIFACT])),
)


@given(st.lists(MESSAGES, max_size=5))
def test_messages_survive_the_round_trip(given_messages: list[Message]) -> None:
    """Messages of any content come back as they went in, from rows and from columns."""
    batch = FactBatch.from_messages(given_messages)
    assert batch.to_messages() == given_messages
    assert FactBatch(batch.record_batch).rows() == [row_of(each) for each in given_messages]
    assert len(batch) == len(given_messages)


@pytest.mark.parametrize("count", COUNTS)
def test_rows_and_columns_hold_the_same(count: int) -> None:
    """A batch gives the same values whether it began as rows or as columns."""
    made = FactBatch.from_messages(messages(count))
    cut = columns([row(number) for number in range(count)])
    assert made.values("subject") == cut.values("subject") == made.column("subject").to_pylist()
    assert made.rows() == cut.rows()
    assert made == cut
    assert made.nbytes == cut.nbytes
    assert made.record_batch.schema.equals(FACT_SCHEMA)


@given(st.lists(st.integers(0, 70), max_size=6), st.booleans())
def test_concat_keeps_order(sizes: list[int], as_columns: bool) -> None:
    """Batches of any sizes, rows and columns mixed, are joined in order."""
    parts, start = [], 0
    for size in sizes:
        rows = [row(number) for number in range(start, start + size)]
        parts.append(columns(rows) if as_columns and size % 2 else FactBatch.of_rows(rows))
        start += size
    joined = FactBatch.concat(parts)
    assert joined.values("message_id") == [f"evt-{number:06d}" for number in range(start)]
    assert joined.rows() == [row(number) for number in range(start)]


def test_concat_is_sealed_only_if_all_are() -> None:
    """One unsealed part makes the whole unsealed."""
    sealed = [seal(FactBatch.from_messages([message(number)])) for number in range(3)]
    assert FactBatch.concat(sealed).sealed
    assert not FactBatch.concat([*sealed, FactBatch.from_messages([message(9)])]).sealed


@pytest.mark.parametrize("count", [3, 200])
def test_slice_and_take(count: int) -> None:
    """Rows can be cut out and picked, and what was sealed stays sealed."""
    batch = seal(FactBatch.from_messages(messages(count)))
    assert batch.slice(1, 2).values("message_id") == ["evt-000001", "evt-000002"]
    assert batch.slice(1).rows() == batch.rows()[1:]
    picked = batch.take(np.array([2, 0]))
    assert picked.values("message_id") == ["evt-000002", "evt-000000"]
    assert picked.sealed
    assert not batch.with_columns(digest=batch.column("digest")).sealed


def test_first_null() -> None:
    """The first row without a value is found in rows and in columns, also when sliced."""
    rows = [row(0), row(1, message_id=None), row(2, message_id=None)]
    assert FactBatch.of_rows(rows).first_null("message_id") == columns(rows).first_null("message_id") == 1
    assert columns(rows).slice(1).first_null("message_id") == 0
    assert columns(rows).first_null("subject") is None


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"produced_at_unix_ms": "soon"}, "produced_at_unix_ms"),
        ({"produced_at_unix_ms": 1 << 63}, "produced_at_unix_ms"),
        ({"message_id": 5}, "message_id"),
        ({"message_id": "\ud800"}, "message_id"),
        ({"correlation_id": ["a"]}, "correlation_id"),
        ({"labels": {1: "a"}}, "labels"),
        ({"labels": {"a": "\ud800"}}, "labels"),
        ({"labels": "ab"}, "labels"),
        ({"artifact": "a.pdf"}, "artifact"),
        ({"artifact": replace(ARTIFACT, key="\ud800")}, "artifact"),
    ],
)
@pytest.mark.parametrize("count", [2, 100])
def test_wrong_types_are_named(changes: dict[str, Any], blamed: str, count: int) -> None:
    """A value that does not fit its column is refused at once, by row and field, not as an Arrow error."""
    given_messages = [*messages(count), message(count, **changes)]
    with pytest.raises(InvalidFact) as caught:
        FactBatch.from_messages(given_messages)
    assert (caught.value.details["row"], caught.value.details["field"]) == (count, blamed)


def test_an_object_must_be_bytes() -> None:
    """An object that is neither bytes nor text is refused by name."""
    with pytest.raises(InvalidFact, match="object"):
        FactBatch.from_messages([Message(message().envelope, Fact("a:b", "c", {"a": 1}))])  # type: ignore[arg-type]


def test_bytes_like_objects_are_taken() -> None:
    """A bytearray serves as an object as well as bytes do."""
    batch = FactBatch.from_messages([Message(message().envelope, Fact("a:b", "c", bytearray(b"{}")))])  # type: ignore[arg-type]
    assert batch.values("object") == [b"{}"]


@pytest.mark.parametrize("bad", [{"message_id": 1}, {"object": "text"}, {"subject": "\ud800"}, {"digest": "x"}])
def test_only_exact_types_are_plain(bad: dict[str, Any]) -> None:
    """Rows are kept as rows only when Arrow would take them without change."""
    assert is_plain(row())
    assert not is_plain(row(**bad))


def test_other_schemas_are_fitted_or_refused() -> None:
    """A record batch with more columns, another order or like types is fitted; one that lacks a column is refused."""
    good = columns([row(number) for number in range(3)]).record_batch
    wide = good.append_column("extra", pa.array([1, 2, 3]))
    assert FactBatch(wide.select(list(reversed(wide.schema.names)))).record_batch.equals(good)
    large = good.set_column(0, "message_id", good.column(0).cast(pa.large_string()))
    assert FactBatch(large).record_batch.equals(good)
    with pytest.raises(InvalidFact, match="subject"):
        FactBatch(good.drop_columns(["subject"]))
    with pytest.raises(InvalidFact, match="predicate"):
        FactBatch(good.append_column("predicate", good.column("predicate")))
    with pytest.raises(InvalidFact, match="schema"):
        FactBatch(good.set_column(3, "produced_at_unix_ms", pa.array([["a"]] * 3)))


def test_entries_add_what_the_buffer_knows() -> None:
    """Entries have offsets and times, an origin where they were pulled, and their facts within."""
    facts = seal(FactBatch.from_messages(messages(3)))
    entries = EntryBatch.of(facts.record_batch, np.array([7, 8, 9]), 1_000)
    assert entries.record_batch.schema.equals(ENTRY_SCHEMA)
    assert entries.offsets.tolist() == [7, 8, 9]
    assert entries.facts == facts
    first = entries.to_entries()[0]
    assert (first.offset, first.appended_at_unix_ms, first.origin) == (7, 1_000, None)
    assert first.key == Key("plant-a", "evt-000000")
    assert first.digest == facts.digests()[0]
    pulled = entries.with_columns(
        origin_zone=pa.array(["plant-b"] * 3),
        origin_offset=pa.array([1, 2, 3]),
        origin_appended_at_unix_ms=pa.array([5, 6, 7]),
    )
    assert pulled.to_entries()[2].origin == Origin("plant-b", 3, 7)
    assert EntryBatch.concat([entries.slice(0, 1), entries.slice(1)]) == entries
    assert len(EntryBatch.concat([])) == len(FactBatch.concat([])) == 0


def test_batches_compare_by_content_and_describe_themselves() -> None:
    """Equality is that of the facts; the text form counts them."""
    batch = FactBatch.from_messages(messages(2))
    assert batch == FactBatch(batch.record_batch)
    assert batch != FactBatch.from_messages(messages(3))
    assert batch != "batch"
    assert repr(batch).startswith("<FactBatch of 2 facts")


STRINGS = st.lists(TEXT | st.sampled_from(["", "a", "plant"]), max_size=12)


@given(STRINGS, st.integers(0, 4), st.integers(0, 12), st.booleans())
def test_arrays_are_looked_into_whatever_slice_they_are(values: list[str], start: int, count: int, nulls: bool) -> None:
    """Lengths, bytes and the constant value of a slice are those of its rows, empty texts included."""
    chosen: list[str | None] = [None if nulls and len(value) == 1 else value for value in values]
    array = pa.array(chosen, pa.string()).slice(start, count)
    rows = chosen[start : start + count]
    encoded = [(value or "").encode() for value in rows]
    assert byte_lengths(array).tolist() == [len(value) for value in encoded]
    assert used_bytes(array).tobytes() == b"".join(encoded)
    constant = rows[0] if rows and len(set(rows)) == 1 else None
    assert constant_value(array) == constant


def test_arrays_with_odd_buffers() -> None:
    """Offsets in a buffer that is longer than they need are read as well."""
    offsets = pa.py_buffer(np.array([0, 1, 2], dtype=np.int32).tobytes() + b"\xff\xff\xff")
    array = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    assert byte_lengths(array).tolist() == [1, 1]


def test_fixed_binary_rows() -> None:
    """Rows laid end to end become a fixed-size column, and a slice of it a matrix."""
    array = fixed_binary(b"aabbcc", 2)
    assert array.to_pylist() == [b"aa", b"bb", b"cc"]
    assert fixed_rows(array.slice(1)).tobytes() == b"bbcc"
    assert fixed_rows(fixed_binary(b"", 2)).shape == (0, 2)


def test_samples_are_good() -> None:
    """The facts that tests start from break no rule."""
    assert field(row(3), "message_id") == "evt-000003"
    assert seal(FactBatch.from_messages([message(artifact=ARTIFACT, labels={"a": "b"})])).sealed
