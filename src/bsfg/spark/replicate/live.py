"""The source of a live query: a micro-batch is a turn of the link, and its rows are receipts.

Facts never pass through Spark here. What makes that safe is that the offsets of this source mean nothing: where a
link stands is known to the sender, and what has arrived to the receiver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from bsfg.spark.replicate.plan import LinkPlan
from bsfg.spark.replicate.turn import take_turn

FORMAT = "bsfg-live"

RECEIPTS = pa.schema(
    [
        ("link", pa.string()),
        ("stream", pa.string()),
        ("inserted", pa.int64()),
        ("repeated", pa.int64()),
        ("refused", pa.int64()),
        ("backlog", pa.int64()),
        ("seconds", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Turn(InputPartition):
    """One turn of one link."""

    plan: LinkPlan


class LiveReader(DataSourceStreamReader):
    """Counts turns."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan

    def initialOffset(self) -> dict[str, Any]:
        """Begin to count."""
        return {"turn": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:
        """There is always one more turn."""
        return {"turn": int(start["turn"]) + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task has the turn, however many turns a restarted query believes it has missed."""
        return [Turn(LinkPlan.read(self._plan))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Take the turn and give its receipts."""
        assert isinstance(partition, Turn)
        receipts = take_turn(partition.plan)
        yield pa.RecordBatch.from_pylist([asdict(receipt) for receipt in receipts], RECEIPTS)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it."""


class LiveSource(DataSource):
    """The source of live queries; its option ``plan`` names the file with the plan of the link."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Give the columns of receipts."""
        return from_arrow_schema(RECEIPTS)

    def streamReader(self, schema: StructType) -> LiveReader:
        """Give the reader."""
        return LiveReader(Path(self.options["plan"]))
