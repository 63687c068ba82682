"""What a fact says survives the way into Spark's columns and back, and means there what it should."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import ENTRY_SCHEMA
from bsfg.digest import Blake3, Hasher, Sha256
from bsfg.errors import FrameInvalid, InvalidFact
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.model import LATEST_UNIX_MS
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.rows import entry_of
from bsfg.sealing import digest_mismatches, seal
from bsfg.spark.mapping import (
    COLUMNS,
    FRAME_SCHEMA,
    LABELS,
    SPARK_SCHEMA,
    EntryPlace,
    frame_to_spark,
    gap_to_spark,
    map_to_labels,
    missing_columns,
    schema_of,
    to_entries,
    to_facts,
    to_frames,
    to_spark,
)
from bsfg.testing.facts import batch, messages, sealed

PLACE = EntryPlace("operational", "store", "0123")
ALL = (*COLUMNS, "gap")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=8)
times = st.integers(0, LATEST_UNIX_MS)
labels = st.dictionaries(st.sampled_from(["a", "b", "c.d", "z"]), texts | st.sampled_from(['"', "\\", "ü"]), max_size=3)
artifacts = st.builds(
    ArtifactRef,
    bucket=st.just("drawings"),
    key=texts,
    digest=st.sampled_from(["sha256:" + "0" * 64, "sha256:" + "f" * 64]),
    size_bytes=st.integers(0, 2**62),
    media_type=st.just("application/pdf"),
    file_name=st.none() | texts,
)


@st.composite
def some_messages(draw: st.DrawFn) -> list[Message]:
    """Draw messages of all kinds: with and without labels, artifacts and ids, JSON and bytes that are no text."""
    result = []
    for number in range(draw(st.integers(0, 6))):
        envelope = Envelope(
            from_zone=draw(st.sampled_from(["plant", "lab"])),
            to_zone="enterprise",
            produced_at_unix_ms=draw(times),
            message_id=f"m-{number}",
            correlation_id=draw(st.none() | texts),
            causation_id=draw(st.none() | texts),
            labels=draw(labels),
            object_media_type=draw(st.sampled_from(["application/octet-stream", "text/plain"])),
            object_schema=draw(st.none() | texts),
            signature=draw(st.none() | texts),
        )
        body = draw(st.binary(max_size=8) | texts.map(str.encode))
        result.append(Message(envelope, Fact("machine:m", "seen", body, draw(st.none() | artifacts))))
    return result


def entries_of(found: list[Message], first: int = 0, *, relayed: bool = False, at: int = 1_000) -> EntryBatch:
    """Make entries of messages; relayed ones have an origin."""
    batch = sealed(found).record_batch
    entries = EntryBatch.of(batch, np.arange(first, first + len(found)), at)
    if not relayed:
        return entries
    count = len(found)
    origin = {"origin_zone": ["lab"] * count, "origin_offset": list(range(count))}
    times_ms = {"origin_appended_at_unix_ms": [at - 5] * count}
    columns = {name: pa.array(values, ENTRY_SCHEMA.field(name).type) for name, values in (origin | times_ms).items()}
    return EntryBatch(entries.with_columns(**columns).record_batch)


def test_the_columns_are_sparks_own() -> None:
    """Both schemas are exactly what Spark expects of the types they stand for."""
    for schema in (SPARK_SCHEMA, FRAME_SCHEMA):
        assert to_arrow_schema(from_arrow_schema(schema), timezone="UTC").equals(schema)


@given(some_messages(), st.booleans(), st.integers(0, 2**60), times)
def test_entries_survive_the_way_to_spark_and_back(found: list[Message], relayed: bool, first: int, at: int) -> None:
    """All of an entry comes back as it went, envelope, body, place and origin."""
    entries = entries_of(found, first, relayed=relayed, at=max(at, 5))
    columns = to_spark(entries, PLACE)
    assert columns.schema.equals(schema_of(COLUMNS))
    columns.validate(full=True)
    assert to_entries(columns) == EntryBatch(entries.record_batch)


@given(some_messages(), st.sampled_from([Blake3(), Sha256()]))
def test_a_digest_keeps_its_function(found: list[Message], hasher: Hasher) -> None:
    """Entries of a zone with another digest function come back as they went; written as facts they are sealed anew."""
    entries = EntryBatch.of(sealed(found, hasher=hasher).record_batch, np.arange(len(found)), 1)
    columns = to_spark(entries, PLACE)
    back = to_entries(columns)
    assert [entry.hasher for entry in back.to_entries()] == [hasher.name] * len(found)
    assert len(digest_mismatches(back)) == 0
    assert seal(to_facts(columns)) == sealed(found)


@given(some_messages())
def test_columns_mean_what_the_fact_says(found: list[Message]) -> None:
    """Row by row, each column holds what the entry has under that name."""
    entries = entries_of(found, 7)
    rows = to_spark(entries, PLACE, ALL).to_pylist(maps_as_pydicts="strict")
    for row, entry in zip(rows, map(entry_of, entries.record_batch.to_pylist()), strict=True):
        assert row == expected(entry)


def expected(entry: Any) -> dict[str, Any]:
    """Lay one entry out as a row, the slow way."""
    envelope, fact = entry.message.envelope, entry.message.fact
    artifact = fact.artifact
    try:
        text = fact.object.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "offset": entry.offset,
        "appended_at": EPOCH + timedelta(milliseconds=entry.appended_at_unix_ms),
        "produced_at": EPOCH + timedelta(milliseconds=envelope.produced_at_unix_ms),
        **{name: getattr(envelope, name) for name in ("message_id", "from_zone", "to_zone", "correlation_id")},
        **{name: getattr(envelope, name) for name in ("causation_id", "object_media_type", "object_schema")},
        "signature": envelope.signature,
        "labels": dict(envelope.labels) or None,
        "subject": fact.subject,
        "predicate": fact.predicate,
        "object": fact.object,
        "object_text": text,
        "artifact": {name: getattr(artifact, name) for name in ArtifactRef.__dataclass_fields__} if artifact else None,
        "digest": entry.digest,
        **dict.fromkeys(("origin_zone", "origin_offset", "origin_appended_at", "gap")),
        "stream": "operational",
        "buffer": "store",
        "log_id": "0123",
    }


@given(some_messages(), st.data())
def test_facts_can_be_made_of_any_slice(found: list[Message], data: st.DataObject) -> None:
    """Batches that Spark cut elsewhere give the same facts; digests are left to whoever appends them."""
    start = data.draw(st.integers(0, len(found)))
    columns = to_spark(entries_of(found), PLACE).slice(start)
    facts = to_facts(columns)
    assert facts.to_messages() == found[start:]
    assert facts.column("digest").null_count == len(facts)


@given(st.lists(st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3), max_size=6))
def test_maps_become_canonical_labels(maps: list[dict[str, str] | None]) -> None:
    """Whatever a map holds, its text is the canonical JSON of it; no entries are no labels."""
    pairs = [None if each is None else list(each.items()) for each in maps]
    found = map_to_labels(pa.array([None, *pairs], type=LABELS).slice(1))
    assert found.to_pylist() == [
        orjson.dumps(each, option=orjson.OPT_SORT_KEYS).decode() if each else None for each in maps
    ]


def test_a_label_without_a_value_is_refused() -> None:
    """A null in the map names its row."""
    with pytest.raises(InvalidFact, match=r"row 1, labels: label 'b' has no value"):
        map_to_labels(pa.array([[("a", "1")], [("b", None)]], type=LABELS))


def test_a_few_columns_are_enough_for_a_fact() -> None:
    """The object may be text, the media type is JSON unless told, microseconds are rounded down."""
    moment = EPOCH + timedelta(microseconds=1_999)
    row = {
        "from_zone": "a",
        "to_zone": "b",
        "produced_at": moment,
        "subject": "m:1",
        "predicate": "p",
        "object_text": "1",
    }
    schema = schema_of(tuple(row))
    [message] = to_facts(pa.RecordBatch.from_pylist([row], schema=schema)).to_messages()
    assert message.envelope.produced_at_unix_ms == 1
    assert (message.fact.object, message.envelope.object_media_type) == (b"1", "application/json")
    assert message.envelope.message_id is None
    assert missing_columns(row) == []
    assert missing_columns(["from_zone", "to_zone", "subject"]) == ["produced_at", "predicate", "object or object_text"]


def test_a_column_of_another_type_is_refused() -> None:
    """What cannot be taken for a time is named."""
    batch = pa.RecordBatch.from_pylist([{"produced_at": [1]}])
    with pytest.raises(InvalidFact, match="produced_at: must be timestamp"):
        to_facts(batch)


def gap(first: int, last: int) -> GapRecord:
    """Make a gap record."""
    return GapRecord(first, last, GapReason.EXPIRED, 1_700_000_000_123, "too old")


def test_frames_and_gap_records_come_back_in_order() -> None:
    """Entries before, between and after gap records become frames of their own."""
    found = messages(5)
    parts = [
        to_spark(entries_of(found[:2], 0), PLACE, ALL),
        gap_to_spark(2, 6, gap(0, 9), PLACE, ALL),
        gap_to_spark(7, 7, gap(7, 7), PLACE, ALL),
        to_spark(entries_of(found[2:], 8), PLACE, ALL),
    ]
    frames = list(to_frames(pa.concat_batches(parts)))
    assert [(frame.first, frame.last) for frame in frames] == [(0, 1), (2, 6), (7, 7), (8, 10)]
    assert frames[1].gap == gap(2, 6)
    assert [frame.entries is None for frame in frames] == [False, True, True, False]
    assert FactBatch.concat([frame.entries.facts for frame in frames if frame.entries]).to_messages() == found


def test_a_frame_is_let_go_with_its_row() -> None:
    """Frames are views of what came over the wire; a row that kept one would keep a backlog in memory."""
    data = bytearray(batch(3).to_ipc().to_pybytes())
    view = memoryview(data)
    row = frame_to_spark(0, 2, view, None, "0123")
    assert row.column("entries")[0].as_py() == data
    del row
    view.release()
    data.clear()  # which fails while anybody looks at it


def test_whole_frames_come_back() -> None:
    """A row that is a frame holds the same entries, and a gap record is one too."""
    entries = entries_of(messages(3), 4)
    rows = pa.concat_batches(
        [
            frame_to_spark(4, 6, entries.to_ipc().to_pybytes(), None, "0123"),
            frame_to_spark(7, 9, b"", gap(7, 9), "0123"),
        ]
    )
    first, second = to_frames(rows)
    assert (first.first, first.last, first.entries) == (4, 6, EntryBatch(entries.record_batch))
    assert second == Frame(7, 9, gap=gap(7, 9))


@pytest.mark.parametrize("rows", [[0, 2], [1, 0], [0, 0, 1]])
def test_rows_that_do_not_follow_each_other_are_refused(rows: list[int]) -> None:
    """A filtered, sorted or repeated part of a link is no frame."""
    columns = to_spark(entries_of(messages(3)), PLACE).take(pa.array(rows))
    with pytest.raises(FrameInvalid, match="must be whole and in order"):
        list(to_frames(columns))
