"""What people who write Spark expect of any source: views in SQL, joins, batches of a stream, errors in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition, LessThan
from tests.spark.nodes import SparkZone, facts
from tests.spark.test_read import SPARK_ERRORS

from bsfg.spark.errors import told_by_spark
from bsfg.testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession


def test_a_view_in_sql(spark: SparkSession, plant: SparkZone) -> None:
    """Facts are a view of SQL, and join with other tables."""
    plant.produce(facts(25))
    plant.reader(spark, columns="offset,subject,object_text").load().createOrReplaceTempView("plant_facts")
    spark.createDataFrame([(3, "three"), (24, "last")], "at bigint, name string").createOrReplaceTempView("names")
    joined = spark.sql("SELECT name FROM plant_facts JOIN names ON offset = at ORDER BY name").collect()
    assert [row["name"] for row in joined] == ["last", "three"]


def test_batches_of_a_stream(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """`foreachBatch` gets every micro-batch as a DataFrame: what is there in even parts, none larger than told."""
    plant.produce(facts(25))
    seen: dict[int, list[int]] = {}

    def take(batch: DataFrame, number: int) -> None:
        seen[number] = [row["offset"] for row in batch.select("offset").collect()]

    query = (
        plant.stream_reader(spark, maxFactsPerBatch=10, numPartitions=2)
        .load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert list(map(len, seen.values())) == [9, 8, 8]
    assert [offset for offsets in seen.values() for offset in offsets] == list(range(25))


def wrong(plant: SparkZone, what: str) -> dict[str, str]:
    """Give options with one thing wrong."""
    options = plant.options() | {"retrySeconds": "0"}
    if what == "away":
        return options | {"address": f"127.0.0.1:{free_port()}"}
    if what == "name":
        return options | {"serverName": "somebody-else"}
    return options | {"stream": "nosuch"}


@pytest.mark.parametrize(
    ("what", "code"), [("away", "peer_unreachable"), ("name", "server_identity_mismatch"), ("stream", "unknown_stream")]
)
def test_errors_are_a_sentence(spark: SparkSession, plant: SparkZone, what: str, code: str) -> None:
    """A node that is away, a wrong name and an unknown stream are told with code and hint, however Spark wraps them."""
    with pytest.raises(SPARK_ERRORS) as caught:
        spark.read.format("bsfg").options(**wrong(plant, what)).load().collect()
    error = told_by_spark(caught.value)
    assert error.code == code
    assert f"{code}: {error.hint}" in str(caught.value)


class _Part(InputPartition):
    def __init__(self, below: int) -> None:
        self.below = below


class _Counting(DataSourceReader):
    below = 10

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for each in filters:
            if isinstance(each, LessThan):
                self.below = min(self.below, each.value)
            yield each

    def partitions(self) -> list[_Part]:
        return [_Part(self.below)]

    def read(self, partition: _Part) -> Iterator[tuple[int]]:  # type: ignore[override]
        return ((number,) for number in range(partition.below))


class _CountingSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bsfg-pins-pushdown"

    def schema(self) -> str:
        return "number int"

    def reader(self, schema: Any) -> _Counting:
        return _Counting()


def test_why_filters_are_not_pushed_down(spark: SparkSession) -> None:
    """Spark 4.3 reads the range that was narrowed for one query again for the next. Should this fail, take filters."""
    spark.dataSource.register(_CountingSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("bsfg-pins-pushdown").load()
        assert frame.where("number < 3").count() == 3
        assert frame.count() == 3, "Spark reads all ten: filters on offset and time can be pushed down now"
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
