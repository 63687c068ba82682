"""Arrow streams from a hostile peer are refused with a stable error, and what passes is safe to read."""

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, message, messages

from bsfg.batch import FACT_SCHEMA, EntryBatch, FactBatch
from bsfg.errors import BsfgError, FactTooLarge, FrameInvalid
from bsfg.model import Limits
from bsfg.sealing import seal


def stream(*batches: pa.RecordBatch, schema: pa.Schema = FACT_SCHEMA, **options: Any) -> bytes:
    """Write an Arrow stream with the given options."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


RICH = FactBatch.from_messages(
    [message(number, ARTIFACT if number % 2 else None, labels={"silo": "A"}, correlation_id="c") for number in range(9)]
)
GOOD = stream(RICH.record_batch)


def refused(data: bytes, limits: Limits | None = None) -> str:
    """Give the message with which bytes are refused."""
    with pytest.raises(FrameInvalid) as caught:
        FactBatch.from_ipc(data, limits or Limits())
    assert caught.value.code == "frame_invalid"
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_round_trip(count: int) -> None:
    """What was written comes back, from bytes, a view or a buffer, aligned or not, and counts as unsealed."""
    batch = seal(FactBatch.from_messages(messages(count)))
    written = batch.to_ipc()
    shifted = memoryview(b"x" + written.to_pybytes())[1:]
    for data in (written, written.to_pybytes(), memoryview(written), shifted):
        read = FactBatch.from_ipc(data)
        assert read == batch
        assert not read.sealed


def test_several_batches_are_joined() -> None:
    """A stream may hold any number of record batches, none included."""
    part = RICH.record_batch
    assert len(FactBatch.from_ipc(stream(part, part.slice(2)))) == 2 * len(RICH) - 2
    assert len(FactBatch.from_ipc(stream())) == 0
    assert len(EntryBatch.from_ipc(EntryBatch.empty().to_ipc())) == 0


@pytest.mark.parametrize("batch", [RICH, RICH.slice(2, 5), FactBatch.empty(), seal(RICH), EntryBatch.empty()])
def test_streams_are_those_of_arrow(batch: FactBatch) -> None:
    """What is written in parts is byte for byte what Arrow's own writer gives, so that every Arrow can read it."""
    assert batch.to_ipc().to_pybytes() == stream(batch.record_batch, schema=batch.schema)
    assert b"".join(batch.to_ipc_parts()) == batch.to_ipc().to_pybytes()


def test_a_schema_in_other_words_is_read_too() -> None:
    """A stream whose schema says the same with other bytes gives the same facts."""
    described = FACT_SCHEMA.with_metadata({"written by": "somebody else"})
    batch = RICH.record_batch.replace_schema_metadata(described.metadata)
    assert FactBatch.from_ipc(stream(batch, schema=described)) == RICH


def test_slices_are_written_alone() -> None:
    """A slice of a batch is written without the rows around it."""
    assert FactBatch.from_ipc(RICH.slice(3, 2).to_ipc()) == RICH.slice(3, 2)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 64, b"hello, world", b"\xff" * 64, b"ARROW1\0\0" + GOOD, b"[]"])
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes that never were an Arrow stream are refused."""
    assert "Arrow stream" in refused(data)


def test_every_truncation_is_refused_or_whole() -> None:
    """A stream cut anywhere is refused, unless only whole messages and the end mark are missing."""
    for size in range(len(GOOD) - 1):
        try:
            read = FactBatch.from_ipc(GOOD[:size])
        except FrameInvalid:
            continue
        assert read in (RICH, FactBatch.empty())


def test_bytes_after_the_end_are_refused() -> None:
    """Nothing may follow the end of the stream."""
    assert "follow the end" in refused(GOOD + b"\0" * 8)
    refused(GOOD + GOOD)


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("a", pa.int64())]),
        pa.schema(list(reversed(FACT_SCHEMA))),
        FACT_SCHEMA.set(0, pa.field("message_id", pa.binary())),
        FACT_SCHEMA.set(0, pa.field("message_id", pa.large_string())),
        FACT_SCHEMA.append(pa.field("more", pa.string())),
    ],
)
def test_other_schemas_are_refused(schema: pa.Schema) -> None:
    """A stream of another schema is refused, naming what it has."""
    assert "another schema" in refused(stream(schema=schema))


def test_nested_schemas_are_refused() -> None:
    """A type nested a hundred deep ends in a refusal, not in a crash."""
    type_ = pa.int8()
    for _ in range(100):
        type_ = pa.list_(type_)
    refused(stream(schema=pa.schema([("a", type_)])))


def test_dictionaries_are_refused() -> None:
    """Dictionary batches are refused before they are read."""
    encoded = pa.array(["plant-a"] * 9).dictionary_encode()
    batch = RICH.record_batch.set_column(1, "from_zone", encoded)
    assert "dictionaries" in refused(stream(batch, schema=batch.schema))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression_is_refused(codec: str) -> None:
    """A compressed stream is refused unopened: a few bytes of it may claim to be terabytes."""
    assert "compressed" in refused(stream(RICH.record_batch, compression=codec))


def test_a_compressed_bomb_is_refused() -> None:
    """A buffer that claims to expand to petabytes is never expanded."""
    bomb = bytearray(stream(FactBatch.from_messages(messages(2_000)).record_batch, compression="zstd"))
    size = struct.pack("<q", len(b"".join(FactBatch.from_messages(messages(2_000)).values("object"))))
    at = bytes(bomb).rfind(size)
    assert at > 0
    bomb[at : at + 8] = struct.pack("<q", 1 << 50)
    assert "compressed" in refused(bytes(bomb))


def test_absurd_lengths_are_refused() -> None:
    """Row and null counts beyond all measure, or below zero, are refused, unless -1 only says that nobody counted."""
    count = struct.pack("<q", len(RICH))
    places = [at for at in range(0, len(GOOD) - 8, 8) if GOOD[at : at + 8] == count]
    assert len(places) > 16
    for at in places:
        for claim in (1 << 31, 1 << 40, (1 << 63) - 1, -1, -(1 << 63)):
            try:
                read = FactBatch.from_ipc(GOOD[:at] + struct.pack("<q", claim) + GOOD[at + 8 :])
            except (FrameInvalid, FactTooLarge):
                continue
            assert claim == -1
            assert read == RICH


def test_lying_offsets_are_refused() -> None:
    """Offsets that point outside their data or run backwards are refused before anybody follows them."""
    offsets = RICH.column("object").buffers()[1].to_pybytes()[: 4 * (len(RICH) + 1)]
    at = GOOD.find(offsets)
    assert at > 0
    for index in range(len(RICH) + 1):
        for value in (-1, 1 << 30, (1 << 31) - 1, -(1 << 31)):
            refused(GOOD[: at + 4 * index] + struct.pack("<i", value) + GOOD[at + 4 * index + 4 :])


def test_invalid_utf8_is_refused() -> None:
    """Text columns that do not hold UTF-8 are refused."""
    assert GOOD.count(b"lineA/B000003") == 1
    refused(GOOD.replace(b"lineA/B000003", b"lineA/B0000\xff\xff"))


def test_limits_hold_before_anything_is_read() -> None:
    """Too many bytes or rows are refused as too large, with the hint to split."""
    for limits in (Limits(max_batch_bytes=len(GOOD) - 1), Limits(max_batch_facts=len(RICH) - 1)):
        with pytest.raises(FactTooLarge) as caught:
            FactBatch.from_ipc(GOOD, limits)
        assert caught.value.hint == "Split the batch."
    assert FactBatch.from_ipc(GOOD, Limits(max_batch_bytes=len(GOOD), max_batch_facts=len(RICH))) == RICH


EDITS = st.lists(
    st.tuples(
        st.integers(0, len(GOOD) - 1),
        st.sampled_from([b"", b"\0", b"\xff", b"\xff" * 4, b"\0" * 8, b"\xff" * 8, struct.pack("<q", 1 << 40)])
        | st.binary(min_size=1, max_size=8),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=500)
@given(EDITS)
@example([(len(GOOD) // 2, b"", False)])
def test_damaged_streams_are_refused_or_safe(edits: list[tuple[int, bytes, bool]]) -> None:
    """However a stream is damaged, it is refused with an error of ours, or every cell of it can be read and judged."""
    data = bytearray(GOOD)
    for at, piece, replace in edits:
        data[at : at + (len(piece) if replace else 0)] = piece
    try:
        batch = FactBatch.from_ipc(bytes(data))
        batch.record_batch.to_pylist()
        seal(FactBatch(batch.record_batch))
        seal(FactBatch.concat([batch] * 20))
    except BsfgError as error:
        assert error.code in ("frame_invalid", "fact_too_large", "invalid_fact")
