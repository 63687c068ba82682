"""A DataFrame of a buffer: all of its facts with all that they say, or the part that was asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from tests.e2e.cleanup import Cleanup
from tests.spark.nodes import SparkZone, facts, ids, zone_pair

from bsfg.errors import BsfgError
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.ports import Buffer
from bsfg.spark.calls import BufferSource, CallRetry
from bsfg.spark.mapping import COLUMNS
from bsfg.spark.options import READ, parse
from bsfg.spark.source import split
from bsfg.stores.log.storage import LogStorage
from bsfg.wire.service import ObjectInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SPARK_ERRORS = (PySparkException, Py4JJavaError)
"""In which form an error of the source reaches the user depends on where in Spark it was met."""


def offsets(frame: DataFrame) -> list[int]:
    """Give the offsets of a DataFrame in the order of its rows."""
    return [row["offset"] for row in frame.select("offset").collect()]


def test_a_buffer_is_a_dataframe_without_registration(spark: SparkSession, plant: SparkZone) -> None:
    """All facts come with all that they say, in order, over several partitions, and nothing had to be registered."""
    special = Message(
        Envelope("plant-a", "enterprise", 1_700_000_000_123, "special", labels={"b": "2", "a": "ü"}),
        Fact("machine:m/1", "seen", b'{"x":1.10}'),
    )
    raw = Message(
        Envelope("plant-a", "enterprise", 0, "raw", object_media_type="application/octet-stream"),
        Fact("machine:m", "seen", b"\xff\x00"),
    )
    plant.produce([*facts(50), special, raw])
    frame = plant.reader(spark, partitionFacts=20).load()
    assert frame.columns == list(COLUMNS)
    assert frame.rdd.getNumPartitions() == 3
    rows = frame.collect()
    stored = plant.entries(Buffer.STORE)
    assert [row["offset"] for row in rows] == list(range(52))
    assert [row["message_id"] for row in rows] == [entry.message.envelope.message_id for entry in stored]
    assert [bytes(row["digest"]) for row in rows] == [entry.digest for entry in stored]
    assert [bytes(row["object"]) for row in rows] == [entry.message.fact.object for entry in stored]
    last, unreadable = rows[50], rows[51]
    assert (last["labels"], last["object_text"]) == ({"a": "ü", "b": "2"}, '{"x":1.10}')
    assert last["produced_at"].astimezone(UTC) == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert (unreadable["object_text"], bytes(unreadable["object"])) == (None, b"\xff\x00")
    assert {(row["stream"], row["buffer"], len(row["log_id"])) for row in rows} == {("operational", "store", 32)}


def test_columns_can_be_chosen(spark: SparkSession, plant: SparkZone) -> None:
    """An option or a schema names the columns that are read; what there is not is refused."""
    plant.produce(facts(3))
    assert plant.reader(spark, columns="subject, offset").load().columns == ["subject", "offset"]
    chosen = plant.reader(spark).schema("offset bigint, labels map<string,string>").load()
    assert chosen.columns == ["offset", "labels"]
    assert offsets(chosen) == [0, 1, 2]
    with pytest.raises(SPARK_ERRORS, match="must be of type bigint, not string"):
        plant.reader(spark).schema("offset string").load().collect()


def test_ranges_of_offsets_and_times(spark: SparkSession, plant: SparkZone) -> None:
    """Offsets and times bound what is read, the end left out, and an empty range is an empty DataFrame."""
    for first in range(0, 30, 10):
        plant.produce(facts(10, first=first))
    times = [entry.appended_at_unix_ms for entry in plant.entries(Buffer.STORE)]
    middle = datetime.fromtimestamp(times[10] / 1000, UTC).isoformat()
    assert offsets(plant.reader(spark, startingOffsets=5, endingOffsets=12).load()) == list(range(5, 12))
    assert offsets(plant.reader(spark, startingOffsets=middle).load()) == list(range(times.index(times[10]), 30))
    assert offsets(plant.reader(spark, endingOffsets=middle).load()) == list(range(times.index(times[10])))
    assert offsets(plant.reader(spark, startingOffsets="latest").load()) == []
    assert offsets(plant.reader(spark, startingOffsets=7, endingOffsets=7).load()) == []


@pytest.mark.parametrize("pushdown", ["false", "true"])
def test_a_dataframe_can_be_used_again(spark: SparkSession, plant: SparkZone, pushdown: str) -> None:
    """Filters of one query do not narrow the next one of the same DataFrame, whether Spark pushes them down or not."""
    plant.produce(facts(40))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    try:
        frame = plant.reader(spark, partitionFacts=10).load()
        few = frame.where("offset < 3")
        assert offsets(few) == [0, 1, 2]
        assert offsets(frame) == list(range(40))
        assert offsets(few.union(frame.where("offset = 39 or offset = 20"))) == [0, 1, 2, 20, 39]
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_missing_facts_are_never_skipped(spark: SparkSession, plant: SparkZone) -> None:
    """What was evicted fails the read with its range and reason, or is a row of its own when that is asked for."""
    for first in range(0, 4_000, 500):
        plant.produce(facts(500, first=first), "lossy")
    gaps = plant.gaps(Buffer.STORE, "lossy")
    kept = gaps[-1].last + 1
    with pytest.raises(SPARK_ERRORS) as caught:
        plant.reader(spark, "lossy", startingOffsets=0).load().collect()
    assert f"FactsMissing: the facts 0..{gaps[0].last} of lossy/store are not there: evicted" in str(caught.value)
    assert 'facts_missing: Read on with .option("gaps", "rows")' in str(caught.value)
    rows = plant.reader(spark, "lossy", startingOffsets=0, gaps="rows", partitionFacts=100_000).load().collect()
    missing, present = rows[: len(gaps)], rows[len(gaps) :]
    assert [(row["gap"]["first"], row["gap"]["last"], row["gap"]["reason"]) for row in missing] == [
        (gap.first, gap.last, "evicted") for gap in gaps
    ]
    assert {(row["subject"], row["offset"] - row["gap"]["first"]) for row in missing} == {(None, 0)}
    assert [row["offset"] for row in present] == list(range(kept, 4_000))
    assert {row["gap"] for row in present} == {None}
    assert offsets(plant.reader(spark, "lossy").load()) == list(range(kept, 4_000))


def test_truncated_facts_are_never_skipped(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """A forward buffer that was truncated says so, cut at the borders of the partitions that read it."""
    plant, enterprise = zones
    plant.produce(facts(30))
    put(spark, plant, enterprise)

    async def truncate(storage: LogStorage) -> None:
        await (await storage.forward("operational")).truncate_before(12)

    enterprise.offline(truncate)
    forward: dict[str, Any] = {"buffer": "forward", "startingOffsets": 0}
    with pytest.raises(SPARK_ERRORS, match="are not there: truncated"):
        enterprise.reader(spark, **forward).load().collect()
    frame = enterprise.reader(spark, **forward, gaps="rows", partitionFacts=10).load()
    rows = frame.select("offset", "gap.first", "gap.last", "gap.reason", "origin_zone").collect()
    gaps = [tuple(row)[1:4] for row in rows if row["first"] is not None]
    assert gaps == [(0, 9, "truncated"), (10, 11, "truncated")]
    assert [(row["offset"], row["origin_zone"]) for row in rows[2:]] == [(at, "plant-a") for at in range(12, 30)]


def put(spark: SparkSession, plant: SparkZone, enterprise: SparkZone) -> None:
    """Hand all facts of the plant over to the enterprise."""
    found = plant.reader(spark, rows="frames").load()
    enterprise.writer(found, mode="put", link="from-plant-a").save()


def test_errors_of_the_node_reach_the_user(spark: SparkSession, plant: SparkZone) -> None:
    """A stream that there is not and an option that there is not are named, with what to do."""
    with pytest.raises(SPARK_ERRORS, match="unknown_stream"):
        plant.reader(spark, "nosuch").load().collect()
    with pytest.raises(SPARK_ERRORS) as caught:
        plant.reader(spark, startOffsets=1).load()
    assert "did you mean startingOffsets?" in str(caught.value)
    assert "The options of read and readStream are address, sources," in str(caught.value)


def test_a_node_that_restarts_is_waited_for(spark: SparkSession, plant: SparkZone) -> None:
    """A read that begins while the node is away goes on when it is back."""
    plant.produce(facts(10))
    frame = plant.reader(spark).load()
    plant.kill()
    back = threading.Timer(1.0, plant.start)
    back.start()
    try:
        assert offsets(frame) == list(range(10))
    finally:
        back.join()


def test_secrets_stay_secret(spark: SparkSession, plant: SparkZone) -> None:
    """Certificates can be given as text, and neither plans nor errors show them."""
    plant.produce(facts(2))
    secret = plant.options(as_text=True)
    frame = spark.read.format("bsfg").options(**secret).load()
    assert offsets(frame) == [0, 1]
    plans = frame.where("offset > 0")._jdf.queryExecution()
    shown = plans.toString() + plans.logical().toString() + str(plans.stringWithStats())
    with pytest.raises(SPARK_ERRORS) as caught:
        spark.read.format("bsfg").options(**secret, nosuch="1").load()
    for text in (shown, str(caught.value)):
        assert "BEGIN" not in text
        assert secret["key"].splitlines()[1] not in text


@pytest.mark.parametrize(
    ("first", "end", "size"), [(0, 0, 5), (3, 3, 1), (0, 10, 3), (5, 6, 100), (0, 1_000_003, 10**5)]
)
def test_ranges_are_cut_evenly(first: int, end: int, size: int) -> None:
    """Partitions follow each other without hole or overlap, none is larger than asked for."""
    parts = split("log", first, end, size)
    assert [at for part in parts for at in (part.first, part.end)][1:-1] == [
        at for part in parts[1:] for at in (part.first, part.first)
    ]
    assert all(0 < part.end - part.first <= size for part in parts)
    assert (parts[0].first, parts[-1].end) == (first, end) if parts else first == end


def test_artifacts_are_structs(spark: SparkSession, plant: SparkZone) -> None:
    """The reference to an artifact can be looked into by name."""

    async def upload() -> str:
        async def content() -> Any:
            yield b"drawing"

        async with plant.client("producer") as client:
            info = ObjectInfo("drawings", "press.pdf", "application/pdf", "press 1.pdf")
            return (await client.put_object(info, content())).digest or ""

    digest = asyncio.run(upload())
    reference = ArtifactRef("drawings", "press.pdf", digest, 7, "application/pdf", "press 1.pdf")
    envelope = Envelope("plant-a", "enterprise", 0, "with-artifact")
    plant.produce([Message(envelope, Fact("machine:m", "drawn", b"{}", reference)), *facts(1)])
    rows = plant.reader(spark).load().select("artifact.key", "artifact.size_bytes", "artifact.digest").collect()
    assert [tuple(row) for row in rows] == [("press.pdf", 7, digest), (None, None, None)]
    assert ids(plant.messages(Buffer.STORE)) == ["with-artifact", "0-000000"]


def test_a_slow_reader_is_not_cut_short(tmp_path: Path, cleanup: Cleanup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node ends an answer that nobody reads; the reader asks again from where it was, and gets everything once."""
    plant, _ = zone_pair(tmp_path)
    plant.more = '[limits]\nidle_timeout = "1s"\n'
    plant.write()
    cleanup.zone(plant).start()
    for number in range(60):
        body = Fact("machine:m", "seen", bytes([number]) * 700_000)
        envelope = Envelope("plant-a", "enterprise", 0, f"{number}", object_media_type="application/octet-stream")
        plant.produce([Message(envelope, body)])
    options = parse(plant.options(), READ)
    source = BufferSource(options.access, "operational", "store", 20.0)
    head = source.head()
    found: list[int] = []
    borne: list[BsfgError] = []
    bear = CallRetry.bear

    def noted(self: CallRetry, error: BsfgError) -> None:
        borne.append(error)
        bear(self, error)

    monkeypatch.setattr(CallRetry, "bear", noted)
    for number, frame in enumerate(source.frames(0, 60, head.log_id)):
        assert frame.entries is not None
        found += frame.entries.offsets.tolist()
        if number == 1:
            # Longer than the node waits for a reader; what is on its way by then cannot be all.
            time.sleep(4)
    assert found == list(range(60))
    assert borne
