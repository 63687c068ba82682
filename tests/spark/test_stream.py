"""A stream of a buffer: each fact once per checkpoint, in batches as large as allowed, the same when read again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.spark.nodes import SparkZone, facts

from bsfg.errors import FactsMissing, ForeignLog, FrameInvalid
from bsfg.ports import Buffer, Confirmation
from bsfg.spark.mapping import COLUMNS
from bsfg.spark.options import READ_STREAM, parse
from bsfg.spark.source import FactsPartition, FactsStreamReader
from bsfg.stores.log.storage import LogStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def reader(zone: SparkZone, stream: str = "operational", **options: object) -> FactsStreamReader:
    """Give a reader as Spark makes it, without Spark."""
    given = zone.options(stream) | {name: str(value) for name, value in options.items()}
    return FactsStreamReader(parse(given, READ_STREAM), COLUMNS)


def rows_of(found: FactsStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, str]]:
    """Read everything between two offsets."""
    batches = [batch for part in found.partitions(start, end) for batch in found.read(part)]
    columns = [batch.select(["offset", "message_id"]).to_pylist() for batch in batches]
    return [(row["offset"], row["message_id"]) for rows in columns for row in rows]


class Landed:
    """A query that lands a stream in Parquet files, as often as it is run."""

    def __init__(self, spark: SparkSession, zone: SparkZone, folder: Path, **options: Any) -> None:
        self.spark, self.zone, self.folder, self.options = spark, zone, folder, options

    def run(self) -> StreamingQuery:
        """Land everything that is there now."""
        found = self.zone.stream_reader(self.spark, **self.options).load()
        query = (
            found.writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.folder / "facts"))
        )
        query.awaitTermination()
        return query

    def offsets(self) -> list[int]:
        """Give the offsets that were landed, sorted."""
        found = self.spark.read.parquet(str(self.folder / "facts"))
        return sorted(row["offset"] for row in found.select("offset").collect())


def test_each_fact_is_landed_once(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Runs on one checkpoint, a restart of the node between them, give every fact once, in few and even batches."""
    plant.create_consumer("app-lake")
    landed = Landed(spark, plant, tmp_path, maxFactsPerBatch=30, partitionFacts=20, consumer="app-lake")
    plant.produce(facts(70))
    query = landed.run()
    sizes = [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
    assert sizes == [24, 23, 23]
    assert landed.offsets() == list(range(70))
    # What Spark has processed is confirmed with the next batch, so the last one is not confirmed yet.
    assert plant.committed("app-lake") == 46
    plant.restart()
    plant.produce(facts(25, first=70))
    landed.run()
    landed.run()
    assert landed.offsets() == list(range(95))
    assert plant.committed("app-lake") == 69
    last = orjson.loads(sorted((tmp_path / "checkpoint" / "offsets").iterdir())[-1].read_bytes().splitlines()[-1])
    assert last == {"log_id": last["log_id"], "offset": 95}


def test_a_running_query_follows_the_buffer(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Facts that are appended while a query runs arrive, also after the node was killed and started again."""
    landed = Landed(spark, plant, tmp_path, startingOffsets="latest")
    plant.produce(facts(5))
    query = (
        plant.stream_reader(spark, startingOffsets="latest")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "facts"))
    )
    try:
        query.processAllAvailable()
        plant.produce(facts(5, first=5))
        query.processAllAvailable()
        plant.kill()
        plant.start()
        plant.produce(facts(5, first=10))
        query.processAllAvailable()
    finally:
        query.stop()
    assert landed.offsets() == list(range(5, 15))


def test_reading_again_gives_the_same(plant: SparkZone) -> None:
    """Between two offsets the facts and their partitions are the same, whatever was appended since."""
    plant.produce(facts(50))
    one = reader(plant, partitionFacts=7)
    start = one.initialOffset()
    end = one.latestOffset(start, ReadMaxRows(20))
    assert end == {"log_id": start["log_id"], "offset": 20}
    before = rows_of(one, start, end)
    plant.produce(facts(10, first=50))
    other = reader(plant, partitionFacts=7)
    assert rows_of(other, start, end) == before == [(number, f"0-{number:06}") for number in range(20)]
    assert other.partitions(start, end) == one.partitions(start, end)
    assert other.partitions(end, end) == []
    assert other.reportLatestOffset()["offset"] == 60


def test_limits_are_kept(plant: SparkZone) -> None:
    """A batch has as many facts as the limit says, all of them when there is none, and never facts from the future."""
    plant.produce(facts(50))
    found = reader(plant, maxFactsPerBatch=15)
    start = found.initialOffset()
    assert found.getDefaultReadLimit() == ReadMaxRows(15)
    assert found.latestOffset(start, found.getDefaultReadLimit())["offset"] == 15
    assert found.latestOffset(start, ReadAllAvailable())["offset"] == 50
    found.prepareForTriggerAvailableNow()
    plant.produce(facts(10, first=50))
    assert found.latestOffset(start, ReadAllAvailable())["offset"] == 50
    assert found.latestOffset({**start, "offset": 50}, ReadAllAvailable())["offset"] == 50


@pytest.mark.parametrize(
    ("starting", "expected"), [("earliest", 0), ("latest", 8), ("3", 3), ("2020-01-01T00:00:00Z", 0), ("2200-01-01", 8)]
)
def test_a_query_starts_where_it_is_told(plant: SparkZone, starting: str, expected: int) -> None:
    """A position is a word, an offset or a time."""
    plant.produce(facts(8))
    told = starting if "-" not in starting or "T" in starting else f"{starting}T00:00:00Z"
    assert reader(plant, startingOffsets=told).initialOffset()["offset"] == expected


def test_a_consumer_tells_where_to_start(plant: SparkZone) -> None:
    """With a lost checkpoint a query goes on where its durable consumer stands; without one it starts at the oldest."""
    plant.produce(facts(20))
    plant.create_consumer("app-lake")
    found = reader(plant, consumer="app-lake")
    start = found.initialOffset()
    assert start["offset"] == 0
    found.commit({**start, "offset": 0})
    found.commit({**start, "offset": 12})
    assert reader(plant, consumer="app-lake").initialOffset() == {**start, "offset": 12}
    assert plant.committed("app-lake") == 11
    assert reader(plant, consumer="app-lake", startingOffsets=5).initialOffset()["offset"] == 5
    assert reader(plant).initialOffset()["offset"] == 0


def test_another_log_is_refused(plant: SparkZone) -> None:
    """A checkpoint of another node, or of one that was restored from an old copy, is not read on."""
    plant.produce(facts(5))
    found = reader(plant, retrySeconds=0)
    start = found.initialOffset()
    foreign = {**start, "log_id": "f" * 32}
    with pytest.raises(ForeignLog, match="it was ffff"):
        found.latestOffset(foreign, ReadAllAvailable())
    with pytest.raises(ForeignLog):
        list(found.read(FactsPartition("f" * 32, 0, 5)))
    with pytest.raises(ForeignLog, match="it had reached 9"):
        found.latestOffset({**start, "offset": 9}, ReadAllAvailable())
    with pytest.raises(ForeignLog) as caught:
        found.latestOffset({**start, "offset": 9}, ReadAllAvailable())
    assert any("foreign_log: " in note for note in caught.value.__notes__)
    with pytest.raises(FrameInvalid, match="no offset of a buffer"):
        found.partitions({"index": 3}, {"index": 4})


def test_missing_facts_stop_a_query(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """A stream whose next facts were evicted ends with an error, and goes on with gap records when told to."""
    for first in range(0, 2_500, 500):
        plant.produce(facts(500, first=first), "lossy")
    gaps = plant.gaps(Buffer.STORE, "lossy")
    with pytest.raises(FactsMissing):
        list(reader(plant, "lossy").read(FactsPartition(reader(plant, "lossy").initialOffset()["log_id"], 0, 2_500)))
    found = plant.stream_reader(spark, "lossy", startingOffsets=0).load()
    target = str(tmp_path / "facts")
    query = found.writeStream.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start(target)
    with pytest.raises(StreamingQueryException, match="are not there: evicted"):
        query.awaitTermination()
    found = plant.stream_reader(spark, "lossy", startingOffsets=0, gaps="rows").load()
    query = found.writeStream.option("checkpointLocation", str(tmp_path / "d")).trigger(availableNow=True).start(target)
    query.awaitTermination()
    rows = spark.read.parquet(target).orderBy("offset").select("offset", "gap.first", "gap.last").collect()
    assert [tuple(row)[1:] for row in rows if row["first"] is not None] == [(gap.first, gap.last) for gap in gaps]
    assert [row["offset"] for row in rows if row["first"] is None] == list(range(gaps[-1].last + 1, 2_500))


def test_truncation_between_two_reads_is_noticed(zones: tuple[SparkZone, SparkZone], tmp_path: Path) -> None:
    """Facts that leave between planning and reading fail the read: it can no longer give the same."""
    plant, _ = zones
    plant.produce(facts(10))
    found = reader(plant)
    start = found.initialOffset()
    end = found.latestOffset(start, ReadAllAvailable())
    [part] = found.partitions(start, end)

    async def truncate(storage: LogStorage) -> None:
        await storage.cursors.commit("enterprise.operational", Confirmation(through=9))
        await (await storage.store("operational")).truncate_before(4)

    plant.offline(truncate)
    with pytest.raises(FactsMissing, match=r"the facts 0..3 of operational/store are not there: truncated"):
        list(found.read(part))
    assert reader(plant).initialOffset()["offset"] == 4
