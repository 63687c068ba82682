"""What `bsfg bench pipeline` measures: the same facts moved by the node, by Spark in bulk, and live."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
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
from bsfg.cli.bench.store import Aim, steps
from bsfg.cli.bench.workload import BATCH_FACTS, FROM_ZONE, TO_ZONE, batch_of
from bsfg.cli.pipeline.running import spark_session
from bsfg.cli.zones import wait_until
from bsfg.errors import SparkFailed
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land.lander import land_available
from bsfg.spark.land.state import LandSettings
from bsfg.spark.replicate.driver import local_master
from bsfg.spark.session import java_in_use

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.spark.replicate.driver import Replication

LAKE = "lake"
LINK = f"from-{FROM_ZONE}"
ROOM = 'store_capacity = "100GiB"\nforward_capacity = "100GiB"\n'


def _access(zone: BenchZone) -> NodeAccess:
    """Give the way of a zone's own pipeline to its node."""
    return NodeAccess.of(zone.address, zone.files("pipeline"), f"{zone.name}-bsfg")


WARM_FACTS = 200_000
"""Moved before anything is measured: the JVM compiles what it runs often."""

FRAME_FACTS = 10_000
PHASES = 8

Step = Callable[[str], None]


def run(place: Path, plan: BenchPlan) -> BenchSamples:
    """Measure everything: a sender and its two receivers, one that pulls by itself and one for which Spark does."""
    site = BenchSite(place, BenchZone, FROM_ZONE, {TO_ZONE: "native", LAKE: "spark"}, REST + ROOM)
    session = spark_session("bsfg bench", local_master(1), {}, place / "spark.log")
    with steps(PHASES, "starting Spark") as step, session as spark:
        try:
            return _run(site, spark, plan, step)
        finally:
            site.stop()


def _run(site: BenchSite, spark: SparkSession, plan: BenchPlan, step: Step) -> BenchSamples:
    samples = BenchSamples(plan)
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
    settings = LandSettings(site.root / "landed", _access(lake), STREAM, "forward", compact=False)
    landed = land_available(spark, settings)
    samples.rates["land"] = Rate(landed.facts, landed.seconds, {})
    step("auditing the link")
    _audit(lake, spark, samples)
    return samples


def _ceiling(spark: SparkSession, samples: BenchSamples) -> None:
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


def _replay(site: BenchSite, lake: BenchZone, spark: SparkSession, samples: BenchSamples) -> None:
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
    samples.more["replay_us_per_fact_by_tenth"] = [1e6 * (b - a) / tenth for a, b in itertools.pairwise(marks)]


def _live(site: BenchSite, lake: BenchZone, spark: SparkSession, samples: BenchSamples) -> None:
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


def _audit(lake: BenchZone, spark: SparkSession, samples: BenchSamples) -> None:
    from bsfg.config import load
    from bsfg.errors import FactsMissing
    from bsfg.spark.audit import audit
    from bsfg.spark.audit.case import Wish, plan_link

    plan = plan_link(load(lake.folder / "zone.toml"), LINK, _access(lake), Wish())
    verdict = audit(spark, plan)
    if not verdict.clean:
        raise FactsMissing(f"the audit found {len(verdict.findings)} differences after a benchmark without faults")
    samples.rates["audit"] = Rate(verdict.facts, verdict.seconds, {})
    ends = [end for stream in verdict.streams for end in (stream.sender, stream.receiver)]
    samples.more["audit_bytes_received"] = sum(end.bytes_received for end in ends)


def _note_rss(samples: BenchSamples, when: str) -> None:
    samples.more[f"driver_rss_mb_{when}"] = _rss_mb(b"/bin/java\0")
    samples.more[f"worker_rss_mb_{when}"] = _rss_mb(b"-m\0bsfg.spark.daemon")


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


# How long commands take of which Java's start is the most: from the start of the process to the first fact at the
# receiver, or to the end of the command. A bare session of PySpark that counts one row is started in the same rounds.

LANDED_FACTS = 1_000
INGESTED_ROWS = 5
LONE_FACTS_FROM = 10**9
COMMAND_SECONDS_MAX = 600.0
AIM_SECONDS = 12.0
STARTS = ("first_fact", "audit", "ingest", "land")

BARE_SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
assert spark.range(1).count() == 1
spark.stop()
"""
MAPPING = f"""
stream = "{STREAM}"
to_zone = "{LAKE}"
map = {{ subject = "machine:{{machine}}" }}
set = {{ predicate = "measured", produced_at = "2026-03-01T06:00:00Z" }}
"""

StartTimes = dict[str, list[float]]


def measure_starts(place: Path, rounds: int) -> StartTimes:
    """Measure everything, so many times."""
    from bsfg.spark.archive import __name__ as archive

    site = BenchSite(place, BenchZone, FROM_ZONE, {LAKE: "spark"}, REST)
    found: StartTimes = {name: [] for name in ("bare", *STARTS)}
    with ExitStack() as ending:
        step = ending.enter_context(steps(rounds + 1))
        ending.callback(site.stop)
        step("preparing what a second start finds")
        _timed([sys.executable, "-c", f"from {archive} import main; main()"], place)
        for zone in site.zones:
            site.start(zone)
        for number in range(rounds):
            step(f"round {number + 1} of {rounds}")
            found["bare"].append(_bare(place))
            found["first_fact"].append(_first_fact(site, number))
            found["audit"].append(_job(site.receivers[0], "audit"))
            found["ingest"].append(_ingest(site.sender, number))
            _appended(site, (number + 1) * LANDED_FACTS, LANDED_FACTS)
            land = ["--stream", STREAM, "--once", "--out", f"landed-{number}", "--from", str(_end(site) - LANDED_FACTS)]
            found["land"].append(_job(site.sender, "land", *land))
    return found


def _appended(site: BenchSite, first: int, count: int) -> None:
    measured([job_of(site, BenchPlan(count), "batches", first, count)])


def _end(site: BenchSite) -> int:
    return site.sender.end(Buffer.STORE)


def _bare(place: Path) -> float:
    with java_in_use():
        return _timed([sys.executable, "-W", "ignore", "-c", BARE_SESSION], place)


def _first_fact(site: BenchSite, number: int) -> float:
    """Append a fact, start to replicate, and tell when the fact is durable at the receiver."""
    _appended(site, LONE_FACTS_FROM + number, 1)
    [lake], wanted, began = site.receivers, _end(site), time.monotonic()
    with _started(lake, "replicate"):
        return lake.reached(wanted) - began


def _ingest(zone: BenchZone, number: int) -> float:
    rows = "".join(f"press-{row},{number}\n" for row in range(INGESTED_ROWS))
    (zone.folder / "mapping.toml").write_text(MAPPING, encoding="utf-8")
    (zone.folder / f"rows-{number}.csv").write_text(f"machine,number\n{rows}", encoding="utf-8")
    return _job(zone, "ingest", f"rows-{number}.csv", "--mapping", "mapping.toml")


def _job(zone: BenchZone, *arguments: str) -> float:
    return _timed([sys.executable, "-m", "bsfg", "pipeline", *arguments, "-c", "zone.toml"], zone.folder)


@contextmanager
def _started(zone: BenchZone, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "bsfg.cli.zones", "pipeline", *arguments, "-c", "zone.toml"]
    with (zone.folder / "pipeline.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=zone.folder, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.communicate(timeout=COMMAND_SECONDS_MAX)


def _timed(command: list[str], folder: Path) -> float:
    """Run a command, and give how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False
    )
    if done.returncode:
        raise SparkFailed(f"{' '.join(command[1:5])} ended with exit code {done.returncode}", hint=done.stderr[-1000:])
    return time.monotonic() - began


def numbers_of_starts(starts: StartTimes) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    middle = {name: median(times) for name, times in starts.items()}
    numbers: dict[str, Any] = {"rounds": len(starts["bare"])}
    numbers |= {f"{name}_seconds": value for name, value in middle.items()}
    return numbers | {f"{name}_of_bare": middle[name] / middle["bare"] for name in STARTS}


def aims_of_starts(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    return [Aim(f"{name}_seconds", numbers[f"{name}_seconds"], AIM_SECONDS, "s", False) for name in STARTS]
