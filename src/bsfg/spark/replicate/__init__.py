"""The handoff of a zone's inbound links on Spark.

*Live*: for each link two streaming queries whose tasks live for many seconds and take turns. A task fetches, puts and
confirms by itself, and gives Spark only receipts, so that a fact takes milliseconds (`shift`, `carrying`).
*Replay*: a DataFrame from the sender's buffer into this zone's, for backlogs (`replay`).

`driver` starts both, and decides which one runs; the lease of the link keeps them apart. What is known of the sender
and what was confirmed is in the nodes alone, so a checkpoint that is lost or stale changes nothing.

A worker that dies: its open `RenewLease` breaks, and the node ends the lease within a third of a second
(`bsfg.node.links.Leases.keep`). The task of the link's other query takes it, recalls the position from the node, and
fetches from the sender's cursor; what was put and not confirmed comes again and is known by its key. Spark starts the
dead task again, and `driver` a query that ended.

Here is the source of live queries alone. Spark starts two processes for every query before there is a task, one to
learn of the columns and one that counts the shifts; they import this and none of what a task needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "bsfg-live"
COLUMNS = "link string, stream string, inserted long, repeated long, refused long, backlog long, seconds double"


@dataclass(frozen=True)
class Shift(InputPartition):
    """One shift of one bundle, whose plan only the task unpacks."""

    bundle: bytes


class LiveReader(DataSourceStreamReader):
    """Counts shifts."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan

    def initialOffset(self) -> dict[str, Any]:
        """Begin to count."""
        return {"turn": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:
        """There is always one more shift."""
        return {"turn": int(start["turn"]) + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task for each bundle of the plan as it is now, however many shifts a restarted query has missed."""
        return [Shift(bundle) for bundle in pickle.loads(self._plan.read_bytes())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Take the shift and give its receipts."""
        from bsfg.spark.replicate.shift import receipts_of

        assert isinstance(partition, Shift)
        yield receipts_of(pickle.loads(partition.bundle))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it."""


class LiveSource(DataSource):
    """The source; its option ``plan`` names the file with the plan of the run, which this user's own driver wrote."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Give the columns of receipts."""
        return COLUMNS

    def streamReader(self, schema: Any) -> LiveReader:
        """Give the reader."""
        return LiveReader(Path(self.options["plan"]))
