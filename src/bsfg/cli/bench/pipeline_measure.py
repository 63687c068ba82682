"""What `bsfg bench pipeline` measures: the same facts moved by the node, by Spark in bulk, and live."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.cli.bench.node_client import measured
from bsfg.cli.bench.node_measure import (
    REST,
    STREAM,
    BenchPlan,
    BenchSamples,
    BenchSite,
    BenchZone,
    Rate,
    handoff,
    job_of,
    live,
)
from bsfg.cli.bench.workload import BATCH_FACTS, FROM_ZONE, TO_ZONE, batch_of
from bsfg.cli.zones import wait_until
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.spark.replicate.driver import Replication

LAKE = "lake"
LINK = f"from-{FROM_ZONE}"
ROOM = 'store_capacity = "100GiB"\nforward_capacity = "100GiB"\n'


def pipeline_site(root: Path) -> BenchSite:
    """Give a sender and its two receivers, one that pulls by itself and one for which Spark does."""
    return BenchSite(root, BenchZone, FROM_ZONE, {TO_ZONE: "native", LAKE: "spark"}, REST + ROOM)


def _access(zone: BenchZone) -> NodeAccess:
    """Give the way of a zone's own pipeline to its node."""
    return NodeAccess.of(zone.address, zone.files("pipeline"), f"{zone.name}-bsfg")


WARM_FACTS = 200_000
"""Moved before anything is measured: the JVM compiles what it runs often."""

FRAME_FACTS = 10_000

Step = Callable[[str], None]


@dataclass(slots=True)
class PipelineSamples(BenchSamples):
    """What was measured, with what only Spark shows."""

    rss_mb: dict[str, float] = field(default_factory=dict)
    replay_us_by_part: list[float] = field(default_factory=list)


def run(site: BenchSite, spark: SparkSession, plan: BenchPlan, step: Step) -> PipelineSamples:
    """Measure everything; whoever calls stops Spark and the nodes."""
    samples = PipelineSamples(plan)
    step("appending the backlog")
    _, native, lake = site.zones
    site.start(site.sender)
    measured([job_of(site, plan, "batches", 0, plan.facts + WARM_FACTS)])
    samples.yardstick()
    step("the node's own handoff")
    samples.rates["native_handoff"] = handoff(site, native, WARM_FACTS)
    native.stop()  # what follows must not share the machine with it
    samples.yardstick()
    step("what Spark alone can carry")
    _ceiling(spark, samples)
    step("replay on Spark")
    site.start(lake)
    _replay(site, lake, spark, samples)
    samples.yardstick()
    step(f"lag at {plan.rate:g} facts/s for {plan.seconds:g} s")
    _live(site, lake, spark, samples)
    step("landing as Parquet")
    from bsfg.spark.land.lander import land_available
    from bsfg.spark.land.state import LandSettings

    settings = LandSettings(site.root / "landed", _access(lake), STREAM, "forward", compact=False)
    landed = land_available(spark, settings)
    samples.rates["land"] = Rate(landed.facts, landed.seconds, {})
    step("auditing the link")
    _audit(lake, spark, samples)
    return samples


def _ceiling(spark: SparkSession, samples: PipelineSamples) -> None:
    from bsfg.spark.ceiling import FORMAT, CeilingSource

    spark.dataSource.register(CeilingSource)
    frame_bytes = batch_of(0, BATCH_FACTS, samples.plan.object_bytes).nbytes * FRAME_FACTS // BATCH_FACTS
    for facts in (WARM_FACTS, samples.plan.facts):
        options = {"frames": -(-facts // FRAME_FACTS), "facts": FRAME_FACTS, "bytes": frame_bytes}
        began = time.monotonic()
        spark.read.format(FORMAT).options(**options).load().write.format(FORMAT).mode("append").save()
        samples.rates["spark_ceiling"] = Rate(facts, time.monotonic() - began, {})


def _replication(site: BenchSite, lake: BenchZone, spark: SparkSession, folder: str) -> Replication:
    from bsfg.config import load
    from bsfg.spark.replicate.driver import Replication, holder_name
    from bsfg.spark.replicate.plan import plan_of

    own = _access(lake)
    plan = plan_of(load(lake.folder / "zone.toml"), LINK, own, holder_name())
    return Replication(spark, own, [plan], site.root / folder, 1)


def _replay(site: BenchSite, lake: BenchZone, spark: SparkSession, samples: PipelineSamples) -> None:
    """Replay the whole backlog; the first facts warm everything up and do not count."""
    total = site.sender.end(Buffer.STORE)
    replication = _replication(site, lake, spark, "replay")
    link = replication.links[0]
    thread = threading.Thread(target=replication.replay, args=(link,), daemon=True)
    thread.start()
    marks = [lake.reached(WARM_FACTS)]
    first = lake.end(Buffer.FORWARD)
    _note_rss(samples, "start")
    tenth = (total - first) // 10
    for number in range(1, 10):
        marks.append(lake.reached(first + number * tenth))
    marks.append(lake.reached(total))
    thread.join()
    _note_rss(samples, "end")
    samples.rates["replay"] = Rate(total - first, marks[-1] - marks[0], {})
    samples.replay_us_by_part = [1e6 * (b - a) / tenth for a, b in itertools.pairwise(marks)]


def _live(site: BenchSite, lake: BenchZone, spark: SparkSession, samples: PipelineSamples) -> None:
    """Append at a steady rate while live tasks move the link, several changes of the task included."""
    replication = _replication(site, lake, spark, "live")
    replication.start()
    running = threading.Event()
    watcher = threading.Thread(target=replication.run, args=(lambda found: not running.is_set(),), daemon=True)
    watcher.start()
    try:
        wait_until(lambda: replication.links[0].mode == "normal", 120.0, 0.1)
        live(site, lake, samples)
    finally:
        running.set()
        watcher.join()
        replication.stop()


def _audit(lake: BenchZone, spark: SparkSession, samples: PipelineSamples) -> None:
    from bsfg.config import load
    from bsfg.errors import FactsMissing
    from bsfg.spark.audit import audit
    from bsfg.spark.audit.case import Wish, plan_link

    plan = plan_link(load(lake.folder / "zone.toml"), LINK, _access(lake), Wish())
    verdict = audit(spark, plan)
    if not verdict.clean:
        raise FactsMissing(f"the audit found {len(verdict.findings)} differences after a benchmark without faults")
    samples.rates["audit"] = Rate(verdict.facts, verdict.seconds, {})


def _note_rss(samples: PipelineSamples, when: str) -> None:
    samples.rss_mb[f"driver_rss_mb_{when}"] = _rss_mb(b"/bin/java\0")
    samples.rss_mb[f"worker_rss_mb_{when}"] = _rss_mb(b"-m\0bsfg.spark.daemon")


def _rss_mb(word: bytes) -> float:
    """Add up the memory of those processes below this one whose command line holds a word."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc") / pid
        try:
            if word in (folder / "cmdline").read_bytes() and os.getsid(int(pid)) == os.getsid(0):
                total += int((folder / "statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def numbers_of(samples: PipelineSamples) -> dict[str, Any]:
    """Give the rates and sizes by their stable names."""
    rates = {f"{name}_per_second": rate.per_second for name, rate in samples.rates.items()}
    return {**rates, **samples.rss_mb, "replay_us_per_fact_by_tenth": samples.replay_us_by_part}
