"""DataFrames become facts: in order, once, and whole, whatever happens to Spark's tasks on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.functions import col, concat, expr, lit, struct, to_json
from tests.spark.nodes import SparkZone, facts, ids

from bsfg.errors import FrameInvalid, SpoolNotShared
from bsfg.ports import Buffer
from bsfg.spark.lane import WriteSums
from bsfg.spark.options import WRITE, parse
from bsfg.spark.sink import FactsWriter, WrittenPart
from bsfg.testing.facts import altered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK_ERRORS = (PySparkException, Py4JJavaError)
PUT = {"mode": "put", "link": "from-plant-a"}


def readings(spark: SparkSession, count: int, partitions: int = 1) -> DataFrame:
    """Make a DataFrame of facts as a job would compute them."""
    numbers = spark.range(0, count, 1, partitions)
    return numbers.select(
        concat(lit("r-"), col("id")).alias("message_id"),
        lit("plant-a").alias("from_zone"),
        lit("enterprise").alias("to_zone"),
        expr("timestamp_millis(1700000000000 + id)").alias("produced_at"),
        lit("machine:press-1").alias("subject"),
        lit("temperature_measured").alias("predicate"),
        to_json(struct(col("id").alias("value"))).alias("object_text"),
        expr("map('shift', 'night', 'line', cast(id as string))").alias("labels"),
    )


def results(path: Path) -> list[dict[str, Any]]:
    """Read the sums that commits wrote."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_facts_are_appended_in_order_and_once(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Facts of several partitions get their offsets in order; the same again changes nothing."""
    told = tmp_path / "results.jsonl"
    frame = readings(spark, 1_000, 4)
    plant.writer(frame, results=told, spool=tmp_path / "spool").save()
    stored = plant.messages(Buffer.STORE)
    assert ids(stored) == [f"r-{number}" for number in range(1_000)]
    assert stored[7].envelope.labels == {"line": "7", "shift": "night"}
    assert stored[7].envelope.produced_at_unix_ms == 1_700_000_000_007
    assert stored[7].fact.object == b'{"value":7}'
    plant.writer(frame, results=told, spool=tmp_path / "spool").save()
    assert plant.end(Buffer.STORE) == 1_000
    first, second = results(told)
    assert (first["facts"], first["inserted"], first["repeated"]) == (1_000, 1_000, 0)
    assert (second["facts"], second["inserted"], second["repeated"]) == (1_000, 0, 1_000)
    assert list((tmp_path / "spool").iterdir()) == []


def test_order_can_be_given_up(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Tasks that append side by side store every fact once, without files to wait in."""
    plant.writer(readings(spark, 400, 4), ordered="false", spool=tmp_path / "spool").save()
    assert sorted(map(str, ids(plant.messages(Buffer.STORE)))) == sorted(f"r-{number}" for number in range(400))
    assert not (tmp_path / "spool").exists()


def test_conflicts_are_not_overlooked(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """An id that is taken by another body fails the write, or is counted when that is asked for."""
    plant.writer(readings(spark, 3)).save()
    other = readings(spark, 5).withColumn(
        "object_text", concat(lit('{"other":'), col("message_id").substr(3, 9), lit("}"))
    )
    with pytest.raises(SPARK_ERRORS, match="3 of 5 facts have ids that are taken by other bodies, the first is 'r-0'"):
        plant.writer(other).save()
    told = tmp_path / "results.jsonl"
    plant.writer(other, conflicts="count", results=told).save()
    [found] = results(told)
    assert (found["conflicts"], found["repeated"], found["inserted"]) == (3, 2, 0)
    assert plant.end(Buffer.STORE) == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda frame: frame.drop("subject"), "the column subject is missing"),
        (lambda frame: frame.drop("object_text"), "the column object or object_text is missing"),
        (lambda frame: frame.withColumn("speed", lit(1)), "there is no column 'speed'"),
        (lambda frame: frame.withColumn("produced_at", lit(1)), "produced_at must be of type timestamp, not int"),
        (lambda frame: frame.withColumn("subject", lit("no subject")), "subject: must be kind:id"),
        (lambda frame: frame.withColumn("from_zone", lit("lab")), "may not bring from_zone 'lab'"),
    ],
)
def test_what_is_no_fact_is_refused(spark: SparkSession, plant: SparkZone, change: Any, says: str) -> None:
    """A wrong column or value is named, and nothing is stored."""
    with pytest.raises(SPARK_ERRORS) as caught:
        plant.writer(change(readings(spark, 3))).save()
    assert says in str(caught.value)
    assert plant.end(Buffer.STORE) == 0


def test_facts_are_never_overwritten(spark: SparkSession, plant: SparkZone) -> None:
    """Spark's overwrite mode is refused."""
    with pytest.raises(SPARK_ERRORS, match="facts are never overwritten"):
        plant.writer(readings(spark, 1)).mode("overwrite").save()


@pytest.mark.parametrize("rows", ["facts", "frames"])
def test_a_link_is_put_in_order_and_once(
    spark: SparkSession, zones: tuple[SparkZone, SparkZone], rows: str, tmp_path: Path
) -> None:
    """What was read of one zone is put into the forward buffer of the other, with its origin, and confirmed there."""
    plant, enterprise = zones
    plant.produce(facts(300))
    told = tmp_path / "results.jsonl"
    frame = plant.reader(spark, rows=rows, partitionFacts=100).load()
    confirm = {
        "confirmAddress": f"127.0.0.1:{plant.port}",
        "confirmServerName": "plant-a-bsfg",
        "confirmConsumer": "enterprise.operational",
    }
    enterprise.writer(frame, **PUT, **confirm, results=told).save()
    enterprise.writer(frame, **PUT, results=told).save()
    sent, received = plant.entries(Buffer.STORE), enterprise.entries(Buffer.FORWARD)
    assert [entry.message for entry in received] == [entry.message for entry in sent]
    assert [entry.digest for entry in received] == [entry.digest for entry in sent]
    assert [(entry.origin.zone, entry.origin.offset) for entry in received if entry.origin] == [
        ("plant-a", number) for number in range(300)
    ]
    first, second = results(told)
    assert (first["inserted"], first["repeated"], first["first"], first["last"]) == (300, 0, 0, 299)
    assert (second["inserted"], second["repeated"]) == (0, 300)
    assert plant.committed("enterprise.operational") == 299


def test_gap_records_are_put_with_the_facts(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """What the sender has lost is recorded at the receiver, in the place where it would have come."""
    plant, enterprise = zones
    for first in range(0, 4_000, 500):
        plant.produce(facts(500, first=first), "lossy")
    gaps = plant.gaps(Buffer.STORE, "lossy")
    assert gaps
    for rows in ("facts", "frames"):
        frame = plant.reader(spark, "lossy", rows=rows, gaps="rows", startingOffsets=0).load()
        enterprise.writer(frame, "lossy", **PUT).save()
    stored = enterprise.gaps(Buffer.FORWARD, "lossy")
    assert [(gap.first, gap.last, gap.reason, gap.origin_zone) for gap in stored] == [
        (gap.first, gap.last, gap.reason, "plant-a") for gap in gaps
    ]
    assert enterprise.messages(Buffer.FORWARD, "lossy") == plant.messages(Buffer.STORE, "lossy")


def test_only_whole_links_are_put(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """A DataFrame that lost rows or columns on the way is refused."""
    plant, enterprise = zones
    plant.produce(facts(50))
    frame = plant.reader(spark).load()
    for wrong, says in (
        (frame.where("offset != 7"), "offset 8 follows 6: what a link brings must be whole and in order"),
        (frame.drop("signature"), "the column signature is missing"),
        (frame.drop("log_id"), "put needs the column log_id, or the option logId"),
    ):
        with pytest.raises(SPARK_ERRORS, match=says):
            enterprise.writer(wrong, **PUT).save()
    assert enterprise.end(Buffer.FORWARD) == 0


def fail_once(folder: str, partition: int) -> Any:
    """Make a step that kills the task of a partition in the middle of its rows, the first time it is tried."""

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if context.partitionId() == partition and number == 2:
                try:
                    Path(folder, f"failed-{partition}").touch(exist_ok=False)
                except FileExistsError:
                    pass
                else:
                    raise RuntimeError("this task fails in the middle")
            yield batch

    return step


@pytest.mark.parametrize("partition", [0, 1])
def test_a_task_that_fails_in_the_middle_is_repeated(
    spark: SparkSession, plant: SparkZone, tmp_path: Path, partition: int
) -> None:
    """Facts that a failed task had sent are known when it is tried again: nothing is lost, twice or out of order."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    told = tmp_path / "results.jsonl"
    try:
        frame = readings(spark, 600, 2)
        frame = frame.mapInArrow(fail_once(str(tmp_path), partition), frame.schema)
        plant.writer(frame, results=told, spool=tmp_path / "spool").save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / f"failed-{partition}").exists()
    assert ids(plant.messages(Buffer.STORE)) == [f"r-{number}" for number in range(600)]
    [found] = results(told)
    assert found["facts"] == found["inserted"] + found["repeated"] == 600
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_failed_write_leaves_no_files(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """When the job fails, the parts of the tasks that had succeeded are removed."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 2:
            raise RuntimeError("this task always fails")

    frame = readings(spark, 300, 3)
    with pytest.raises(SPARK_ERRORS, match="this task always fails"):
        plant.writer(frame.mapInArrow(fail, frame.schema), spool=tmp_path / "spool").save()
    assert list((tmp_path / "spool").iterdir()) == []


def test_streams_are_handed_over_once(spark: SparkSession, zones: tuple[SparkZone, SparkZone], tmp_path: Path) -> None:
    """A stream between nodes, run again on its checkpoint and then without one, hands over each fact once."""
    plant, enterprise = zones
    told = tmp_path / "results.jsonl"

    def hand_over(checkpoint: str) -> None:
        found = plant.stream_reader(spark, rows="frames", gaps="rows", maxFactsPerBatch=40).load()
        query = (
            found.writeStream.format("bsfg")
            .options(**enterprise.options(), **PUT, results=str(told))
            .option("confirmAddress", f"127.0.0.1:{plant.port}")
            .option("confirmServerName", "plant-a-bsfg")
            .option("confirmConsumer", "enterprise.operational")
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    plant.produce(facts(100))
    hand_over("one")
    assert [each["batch_id"] for each in results(told)] == [0, 1, 2]
    plant.produce(facts(20, first=100))
    hand_over("one")
    assert enterprise.messages(Buffer.FORWARD) == plant.messages(Buffer.STORE)
    assert plant.committed("enterprise.operational") == 119
    hand_over("two")
    assert enterprise.end(Buffer.FORWARD) == 120
    assert sum(each["inserted"] for each in results(told)) == 120
    assert sum(each["repeated"] for each in results(told)) == 120


def test_a_lease_is_respected(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """Only the holder of a link's lease may put for it."""
    plant, enterprise = zones
    plant.produce(facts(5))

    async def acquire() -> str:
        async with enterprise.admin("enterprise-pipeline") as admin:
            return (await admin.acquire_lease("from-plant-a", "a test", 60_000)).token

    token = asyncio.run(acquire())
    frame = plant.reader(spark, rows="frames").load()
    with pytest.raises(SPARK_ERRORS, match="lease_lost"):
        enterprise.writer(frame, **PUT, lease="somebody-else").save()
    assert enterprise.end(Buffer.FORWARD) == 0
    enterprise.writer(frame, **PUT, lease=token).save()
    assert enterprise.end(Buffer.FORWARD) == 5


def test_quarantined_facts_are_told_to_the_sender(
    spark: SparkSession, zones: tuple[SparkZone, SparkZone], tmp_path: Path
) -> None:
    """A fact whose id is taken at the receiver passes, is counted, and becomes a gap record at the sender."""
    plant, enterprise = zones
    plant.produce(facts(10))
    frame = plant.reader(spark, rows="frames").load()
    enterprise.writer(frame, **PUT).save()
    plant.stop()
    other = type(plant)(**{**vars(plant), "root": plant.root / "other", "pid": None})
    other.write()
    other.start()
    try:
        other.produce([*altered(facts(2)), *facts(4, first=2)])
        told = tmp_path / "results.jsonl"
        again = other.reader(spark, rows="frames").load()
        confirm = {"confirmAddress": f"127.0.0.1:{other.port}", "confirmServerName": "plant-a-bsfg"}
        enterprise.writer(again, **PUT, **confirm, confirmConsumer="enterprise.operational", results=told).save()
        [found] = results(told)
        assert (found["repeated"], found["refusals"]) == (
            4,
            [{"first": 0, "last": 1, "reason": "conflict", "detail": ""}],
        )
        assert [(gap.first, gap.last) for gap in other.gaps(Buffer.STORE)] == [(0, 1)]
        assert other.committed("enterprise.operational") == 5
    finally:
        other.kill()


def test_parts_must_follow_each_other(tmp_path: Path) -> None:
    """A commit refuses parts with a hole between them, of two logs, or that lie on another machine."""
    options = {"address": "127.0.0.1:1", "stream": "operational", **PUT, "retrySeconds": "0"}
    writer = FactsWriter(parse(options, WRITE))
    whole = WrittenPart(0, WriteSums(first=0, last=9, log_id="a"))
    nowhere = str(tmp_path / "nowhere.part")
    with pytest.raises(FrameInvalid, match="offset 11 follows 9"):
        writer.commit([WrittenPart(1, WriteSums(first=11, last=12, log_id="a"), nowhere), None, whole])
    with pytest.raises(FrameInvalid, match="2 logs"):
        writer.commit([whole, WrittenPart(1, WriteSums(first=10, last=12, log_id="b"), nowhere)])
    with pytest.raises(SpoolNotShared):
        writer.commit([whole, WrittenPart(1, WriteSums(first=10, last=12, log_id="a"), nowhere)])
