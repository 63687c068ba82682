"""Replay: a backlog crosses as a DataFrame, from the sender's buffer into this zone's, in large micro-batches."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bsfg.clock import SystemClock
from bsfg.errors import BsfgError, FrameInvalid
from bsfg.journey.link import FetchRequest, PeerPosition
from bsfg.journey.receive import check_history
from bsfg.spark.calls import calls
from bsfg.spark.errors import told_by_spark
from bsfg.spark.pack import NO_PYTHON
from bsfg.spark.replicate.plan import LinkTaskPlan, StreamTaskPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from bsfg.journey.link import Fetched

BATCH_FACTS_MAX = 1_500_000
"""A micro-batch costs up to a second of its own; a killed one begins anew. Two at least are half as large."""

RETRY_SECONDS = 20.0

UNFIT = (
    r"No module named '?bsfg[\w.]*'?",
    r"No module named '?(?:pyspark|pyarrow|grpc)[\w.]*'?",
    r"ImportError: [^\n]*",
    r'Cannot run program "[^"]*"',
    rf"{NO_PYTHON} [^\n]*",
)
"""What Spark reports of an interpreter that is not there or lacks what tasks need."""


@dataclass(slots=True)
class Replay:
    """One replay of one stream: what was there when Spark looked."""

    plan: LinkTaskPlan
    of: StreamTaskPlan
    lease: str
    start: int
    query: StreamingQuery

    @property
    def facts(self) -> int:
        """How many facts it has moved."""
        progress = self.query.lastProgress
        if progress is None:
            return 0
        end = progress["sources"][0]["endOffset"]
        return int((orjson.loads(end) if isinstance(end, str) else end)["offset"]) - self.start

    @property
    def batches(self) -> int:
        """How many micro-batches are done."""
        progress = self.query.lastProgress
        return 0 if progress is None else int(progress["batchId"]) + 1


def start_replay(
    spark: SparkSession, plan: LinkTaskPlan, of: StreamTaskPlan, lease: str, folder: Path
) -> Replay | None:
    """Begin to move what the sender has left of a stream, None when there is nothing.

    Raises what the link's own history forbids, as the live engine would.
    """
    from bsfg.spark.session import own_format
    from bsfg.spark.source import FactsSource

    head = calls().run(_head(plan, of))
    if head.start >= head.end:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    name = own_format(spark, FactsSource, f"bsfg-replay-{plan.name}-{of.stream}")
    reading = (
        spark.readStream.format(name)
        .options(**plan.peer.options())
        .option("stream", of.stream)
        .option("buffer", str(plan.buffer))
        .option("rows", "frames")
        .option("gaps", "rows")
        .option("startingOffsets", str(head.start))
        .option("maxFactsPerBatch", str(BATCH_FACTS_MAX))
        .option("partitionFacts", str(BATCH_FACTS_MAX))
        .option("retrySeconds", str(RETRY_SECONDS))
    )
    if plan.link.carry_only:
        reading = reading.option("carryOnly", ",".join(plan.link.carry_only))
    for option, patterns in (("subjects", plan.link.subjects), ("predicates", plan.link.predicates)):
        if patterns:
            reading = reading.option(option, orjson.dumps(patterns).decode())
    writing = (
        reading.load()
        .writeStream.format(name)
        .options(**plan.own.options())
        .options(**plan.peer.options("confirm"))
        .option("stream", of.stream)
        .option("mode", "put")
        .option("link", plan.name)
        .option("lease", lease)
        .option("confirmConsumer", of.consumer)
        .option("retrySeconds", str(RETRY_SECONDS))
        .option("checkpointLocation", str(folder))
        .queryName(f"replay {plan.name} {of.stream}")
        .trigger(availableNow=True)
    )
    if head.served_at_unix_ms is not None:
        # A sender's facts are as old as its own clock says, whatever the clocks of here say.
        writing = writing.option("senderAheadMs", str(head.served_at_unix_ms - SystemClock().now_unix_ms()))
    return Replay(plan, of, lease, head.start, writing.start())


async def asked(
    plan: LinkTaskPlan, of: StreamTaskPlan, request: FetchRequest, carry_only: Sequence[str] = ()
) -> Fetched:
    """Ask a sender once. No call is left open: a connection has room for few, and others share it."""
    from bsfg.wire.client import BoundaryClient

    peer = BoundaryClient(calls().connection(plan.peer))
    try:
        return await peer.fetch(of.consumer, request, carry_only)
    finally:
        peer.hang_up()


async def _head(plan: LinkTaskPlan, of: StreamTaskPlan) -> Fetched:
    """Ask the sender where it goes on, and refuse a history that is not the one that is known."""
    from bsfg.wire.adminclient import AdminClient

    known: PeerPosition = await AdminClient(calls().connection(plan.own)).recall_peer(plan.name, of.stream)
    fetched = await asked(plan, of, FetchRequest(max_facts=1, gaps_after=known.gaps_token))
    check_history(fetched, known)
    if known.latest_start is not None and fetched.start > known.latest_start:
        raise FrameInvalid(f"the sender starts at {fetched.start}, {known.latest_start} is expected next")
    return fetched


def ended(query: StreamingQuery, timeout_seconds: float) -> bool:
    """Wait a while for a query; True when it has ended. Raises what it failed with, as one of our own errors."""
    try:
        return bool(query.awaitTermination(timeout_seconds))  # type: ignore[arg-type]
    except Exception as error:
        raise told_by_spark(error, "the replay of a backlog ended on Spark") from None


def live_failure(failure: Any) -> BsfgError:
    """Say in a sentence why a live query ended: first what makes every further try useless."""
    from bsfg.errors import WorkersUnfit
    from bsfg.spark.session import failed

    text = str(failure or "a query ended")
    for pattern in UNFIT:
        found = re.search(pattern, text)
        if found is not None:
            return WorkersUnfit(f"Spark's Python processes say: {found[0]}"[:300])
    return failed("a live query ended on Spark", text)
