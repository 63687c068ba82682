"""What `bsfg bench pipeline` measures: the same facts moved by the node, by Spark in bulk, and live."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bsfg.cli.bench.measure import sha256_per_second
from bsfg.cli.bench.node_client import measured
from bsfg.cli.bench.node_measure import LOOK_SECONDS, WARM_UP_SECONDS, BufferWatch, Rate, job_of
from bsfg.cli.bench.node_zones import PRODUCER, STREAM, BenchZone, wait_until
from bsfg.cli.bench.workload import BATCH_FACTS, FROM_ZONE, OBJECT_BYTES, TO_ZONE, batch_of
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.tls import TlsFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.spark.replicate.driver import Replication


LAKE = "lake"
LINK = f"from-{FROM_ZONE}"

_COMMON = """
[zone]
name = "{zone}"
[listen]
grpc = "127.0.0.1:{port}"
http_enabled = false
[tls]
ca = "{certs}/ca.crt"
certificate = "{certs}/{zone}-bsfg.crt"
key = "{certs}/{zone}-bsfg.key"
[log]
level = "warning"
[streams.{stream}]
store_capacity = "100GiB"
forward_capacity = "100GiB"
[identities.{zone}-pipeline]
zone = "{zone}"
roles = ["pipeline"]
streams = ["*"]
"""
_PEER = """
[identities.{other}-bsfg]
zone = "{other}"
roles = ["peer"]
streams = ["*"]
"""
_SERVE = """
[serve.{other}]
"""
_LINK = """
[links.{link}]
zone = "{other}"
address = "127.0.0.1:{other_port}"
engine = "{engine}"
"""


@dataclass(slots=True)
class PipelineSite:
    """The sender and its two receivers under one certificate authority."""

    root: Path
    sender: BenchZone = field(init=False)
    native: BenchZone = field(init=False)
    lake: BenchZone = field(init=False)

    def __post_init__(self) -> None:
        self.sender, self.native, self.lake = (BenchZone(name, self.root / name) for name in (FROM_ZONE, TO_ZONE, LAKE))
        now = datetime.now(UTC)
        create_authority(self.certs, name="bsfg bench", days=2, now=now)
        for zone in (self.sender, self.native, self.lake):
            zone.folder.mkdir()
            issue(self.certs, f"{zone.name}-bsfg", days=1, now=now)
            issue(self.certs, f"{zone.name}-pipeline", days=1, now=now, serves=False)
        issue(self.certs, PRODUCER, days=1, now=now, serves=False)

    @property
    def certs(self) -> Path:
        """Where the certificates are."""
        return (self.root / "certs").absolute()

    def start_sender(self) -> None:
        """Start the zone that producers append to."""
        rest = "".join((_PEER + _SERVE).format(other=zone.name) for zone in (self.native, self.lake))
        rest += f'[identities.{PRODUCER}]\nzone = "{self.sender.name}"\nroles = ["producer"]\nstreams = ["*"]\n'
        self._write(self.sender, rest)
        self.sender.start()

    def start(self, receiver: BenchZone) -> None:
        """Start a zone that pulls from the sender."""
        engine = "native" if receiver is self.native else "spark"
        rest = (_PEER + _LINK).format(other=self.sender.name, link=LINK, other_port=self.sender.port, engine=engine)
        self._write(receiver, rest)
        receiver.start()
        # Whoever reads the configuration later finds the node by it.
        self._write(receiver, rest, receiver.port)

    def access(self, zone: BenchZone) -> NodeAccess:
        """Give the way of a zone's own pipeline to its node."""
        name = f"{zone.name}-pipeline"
        files = TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")
        return NodeAccess.of(f"127.0.0.1:{zone.port}", files, f"{zone.name}-bsfg")

    def stop(self) -> None:
        """End all nodes."""
        for zone in (self.lake, self.native, self.sender):
            zone.stop()

    def _write(self, zone: BenchZone, rest: str, port: int = 0) -> None:
        common = _COMMON.format(zone=zone.name, certs=self.certs, stream=STREAM, port=port)
        (zone.folder / "zone.toml").write_text(common + rest, encoding="utf-8")


SECONDS_MAX = 3_600.0
WARM_FACTS = 200_000
"""Moved before anything is measured: the JVM compiles what it runs often."""

_LIVE_FROM = 3 * 10**13
FRAME_FACTS = 10_000

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How much is to be measured."""

    facts: int
    seconds: float = 180.0
    rate: float = 1_000.0
    object_bytes: int = OBJECT_BYTES


@dataclass(slots=True)
class PipelineSamples:
    """What was measured, before it is summed up."""

    plan: PipelinePlan
    sha256_rates: list[float] = field(default_factory=list)
    rates: dict[str, Rate] = field(default_factory=dict)
    lag_ms: list[float] = field(default_factory=list)
    rss_mb: dict[str, float] = field(default_factory=dict)
    replay_us_by_part: list[float] = field(default_factory=list)


def run(site: PipelineSite, spark: SparkSession, plan: PipelinePlan, step: Step) -> PipelineSamples:
    """Measure everything; whoever calls stops Spark and the nodes."""
    samples = PipelineSamples(plan)
    step("appending the backlog")
    site.start_sender()
    measured([job_of(site, plan, "batches", 0, plan.facts + WARM_FACTS)])
    _yardstick(samples)
    step("the node's own handoff")
    _native(site, samples)
    _yardstick(samples)
    step("what Spark alone can carry")
    _ceiling(spark, samples)
    step("replay on Spark")
    site.start(site.lake)
    _replay(site, spark, samples)
    _yardstick(samples)
    step(f"lag at {plan.rate:g} facts/s for {plan.seconds:g} s")
    _live(site, spark, samples)
    step("landing as Parquet")
    _land(site, spark, samples)
    step("auditing the link")
    _audit(site, spark, samples)
    return samples


def _yardstick(samples: PipelineSamples) -> None:
    samples.sha256_rates += [sha256_per_second(samples.plan.object_bytes) for _ in range(2)]


def _native(site: PipelineSite, samples: PipelineSamples) -> None:
    """Let the node pull everything by itself, then stop it: what follows must not share the machine with it."""
    total = site.sender.end(Buffer.STORE)
    site.start(site.native)
    began = _reached(site.native, WARM_FACTS)
    left = total - site.native.end(Buffer.FORWARD)
    seconds = max(LOOK_SECONDS, _reached(site.native, total) - began)
    samples.rates["native_handoff"] = Rate(left or total, seconds, {})
    site.native.stop()


def _reached(zone: BenchZone, count: int) -> float:
    wait_until(lambda: zone.end(Buffer.FORWARD) >= count, SECONDS_MAX, 0.001)
    return time.monotonic()


def _ceiling(spark: SparkSession, samples: PipelineSamples) -> None:
    from bsfg.spark.ceiling import FORMAT, CeilingSource

    spark.dataSource.register(CeilingSource)
    frame_bytes = batch_of(0, BATCH_FACTS, samples.plan.object_bytes).nbytes * FRAME_FACTS // BATCH_FACTS
    for facts in (WARM_FACTS, samples.plan.facts):
        options = {"frames": -(-facts // FRAME_FACTS), "facts": FRAME_FACTS, "bytes": frame_bytes}
        began = time.monotonic()
        spark.read.format(FORMAT).options(**options).load().write.format(FORMAT).mode("append").save()
        samples.rates["spark_ceiling"] = Rate(facts, time.monotonic() - began, {})


def _replication(site: PipelineSite, spark: SparkSession, folder: str) -> Replication:
    from bsfg.config import load
    from bsfg.spark.replicate.driver import Replication, holder_name
    from bsfg.spark.replicate.plan import plan_of

    own = site.access(site.lake)
    plan = plan_of(load(site.lake.folder / "zone.toml"), LINK, own, holder_name())
    return Replication(spark, own, [plan], site.root / folder, 1)


def _replay(site: PipelineSite, spark: SparkSession, samples: PipelineSamples) -> None:
    """Replay the whole backlog; the first facts warm everything up and do not count."""
    total = site.sender.end(Buffer.STORE)
    replication = _replication(site, spark, "replay")
    link = replication.links[0]
    thread = threading.Thread(target=replication.replay, args=(link,), daemon=True)
    thread.start()
    marks = [_reached(site.lake, WARM_FACTS)]
    first = site.lake.end(Buffer.FORWARD)
    _note_rss(samples, "start")
    tenth = (total - first) // 10
    for number in range(1, 10):
        marks.append(_reached(site.lake, first + number * tenth))
    marks.append(_reached(site.lake, total))
    thread.join()
    _note_rss(samples, "end")
    samples.rates["replay"] = Rate(total - first, marks[-1] - marks[0], {})
    samples.replay_us_by_part = [1e6 * (b - a) / tenth for a, b in itertools.pairwise(marks)]


def _live(site: PipelineSite, spark: SparkSession, samples: PipelineSamples) -> None:
    """Append at a steady rate while live tasks move the link, several changes of the task included."""
    plan = samples.plan
    replication = _replication(site, spark, "live")
    replication.start()
    running = threading.Event()
    watcher = threading.Thread(target=replication.run, args=(lambda found: not running.is_set(),), daemon=True)
    watcher.start()
    try:
        wait_until(lambda: replication.links[0].mode == "normal", 120.0, 0.1)
        count = max(1, int(plan.rate * (plan.seconds + WARM_UP_SECONDS)))
        first = site.sender.end(Buffer.STORE)
        with (
            site.sender.published_end(Buffer.STORE) as end_here,
            site.lake.published_end(Buffer.FORWARD) as end_there,
            BufferWatch(end_here, end_there) as watch,
        ):
            measured([job_of(site, plan, "live", _LIVE_FROM, count)])
            _reached(site.lake, site.sender.end(Buffer.STORE))
        offsets = np.arange(first + min(count - 1, int(plan.rate * WARM_UP_SECONDS)), first + count)
        samples.lag_ms = (1000 * np.maximum(0.0, watch.times(1, offsets) - watch.times(0, offsets))).tolist()
    finally:
        running.set()
        watcher.join()
        replication.stop()


def _land(site: PipelineSite, spark: SparkSession, samples: PipelineSamples) -> None:
    from bsfg.spark.land.lander import land_available
    from bsfg.spark.land.state import LandSettings

    settings = LandSettings(site.root / "landed", site.access(site.lake), STREAM, "forward", compact=False)
    landed = land_available(spark, settings)
    samples.rates["land"] = Rate(landed.facts, landed.seconds, {})


def _audit(site: PipelineSite, spark: SparkSession, samples: PipelineSamples) -> None:
    from bsfg.config import load
    from bsfg.errors import FactsMissing
    from bsfg.spark.audit import audit
    from bsfg.spark.audit.case import Wish, plan_link

    plan = plan_link(load(site.lake.folder / "zone.toml"), LINK, site.access(site.lake), Wish())
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
