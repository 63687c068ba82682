"""What `bsfg bench node` measures: phase after phase, first one node alone, then two."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import crc32c
import numpy as np

from bsfg.cli.bench.measure import sha256_per_second
from bsfg.cli.bench.node_client import BenchJob, measured
from bsfg.cli.bench.store import steps
from bsfg.cli.bench.workload import FROM_ZONE, OBJECT_BYTES, TO_ZONE
from bsfg.cli.zones import LoopbackSite, LoopbackZone, wait_until
from bsfg.ports import Buffer
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.notes import WATERMARK, read_watermark
from bsfg.stores.log.storage import log_folder

STREAM = "bench"
REST = f"""
[log]
level = "warning"
[streams.{STREAM}]
"""
SINGLES = 400
PHASES = 7
REACHED_SECONDS_MAX = 3_600.0
LOOK_SECONDS = 0.0005
WARM_UP_SECONDS = 1.0
"""The first part of the live phase, which does not count: gates open, connections are made, caches fill."""

BYSTANDER_SECONDS = 6.0
BYSTANDER_RATE_MAX = 250
"""How long one producer is watched beside others, and how many facts it appends in a second at most."""

_SINGLES_FROM, _FACTS_FROM, _LIVE_FROM, _BESIDE_FROM = 10**13, 2 * 10**13, 3 * 10**13, 4 * 10**13
_PER_CLIENT = 10**12
"""Numbers of the facts, so that no two phases and no two clients have one in common."""

Step = Callable[[str], None]
"""Told which phase begins."""


@dataclass(slots=True)
class BenchZone(LoopbackZone):
    """A zone of which one can see, without asking its node, how far it is and what it costs."""

    def end(self, buffer: Buffer) -> int:
        """Give how far a buffer is durable, read from its folder."""
        watermark = read_watermark(DiskFiles(self.folder / "data"), log_folder(STREAM, buffer))
        return watermark[1] if watermark is not None else 0

    @contextmanager
    def published_end(self, buffer: Buffer) -> Iterator[Callable[[], int]]:
        """Open what the writer of a buffer publishes, and give a quick look at how far it is durable."""
        path = self.folder / "data" / log_folder(STREAM, buffer) / "durable"
        with path.open("rb", buffering=0) as published:
            last = 0

            def end() -> int:
                nonlocal last
                data = os.pread(published.fileno(), WATERMARK.size, 0)
                # While it is being written the checksum is wrong; then what was seen before still holds.
                if crc32c.crc32c(data[:-4]) == WATERMARK.unpack(data)[3]:
                    last = WATERMARK.unpack(data)[1]
                return last

            yield end

    def reached(self, count: int) -> float:
        """Wait until its forward buffer holds so many facts, and give the time."""
        wait_until(lambda: self.end(Buffer.FORWARD) >= count, REACHED_SECONDS_MAX, 0.001)
        return time.monotonic()

    def cpu_seconds(self) -> float:
        """Give the processor time that the node has used so far."""
        return cpu_seconds(self.pid)


def cpu_seconds(pid: int) -> float:
    """Give the processor time that a process has used so far; none of one that is gone."""
    fields = about_process(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def about_process(pid: int, name: str) -> bytes:
    """Give what the system tells of a process under a name, nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


BenchSite = LoopbackSite[BenchZone]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """How much is to be measured."""

    facts: int
    seconds: float = 20.0
    rate: float = 1_000.0
    clients: int = 1
    object_bytes: int = OBJECT_BYTES


@dataclass(slots=True)
class Rate:
    """How fast something went, and what it cost in processor time."""

    facts: int
    seconds: float
    cpu_seconds: dict[str, float]

    @property
    def per_second(self) -> float:
        """Facts per second."""
        return self.facts / self.seconds

    def cpu_us_per_fact(self, who: str) -> float:
        """Give the processor time that a process spent on each fact."""
        return 1e6 * self.cpu_seconds[who] / self.facts


@dataclass(slots=True)
class BenchSamples:
    """What was measured, before it is summed up."""

    plan: BenchPlan
    sha256_rates: list[float] = field(default_factory=list)
    rates: dict[str, Rate] = field(default_factory=dict)
    lag_ms: list[float] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """What only one benchmark measures, by its stable name where it is a number already."""

    def yardstick(self) -> None:
        """Measure what everything is held against, twice."""
        self.sha256_rates += [sha256_per_second(self.plan.object_bytes) for _ in range(2)]


def run(place: Path, plan: BenchPlan) -> BenchSamples:
    """Measure everything on two zones."""
    site = BenchSite(place, BenchZone, FROM_ZONE, {TO_ZONE: "native"}, REST)
    with steps(PHASES) as step:
        try:
            return _run(site, plan, step)
        finally:
            site.stop()


def _run(site: BenchSite, plan: BenchPlan, step: Step) -> BenchSamples:
    samples = BenchSamples(plan)
    step("starting a node")
    site.start(site.sender)
    samples.yardstick()
    step("single appends")
    [found] = measured([job_of(site, samples.plan, "singles", _SINGLES_FROM, SINGLES)])
    samples.more |= {name: found[name] for name in ("append_ms", "floor_ms", "fdatasync_ms")}
    step("facts through the producer")
    _append(site, samples, "facts", _FACTS_FROM, max(1, plan.facts // 2))
    samples.yardstick()
    step("batches")
    _append(site, samples, "batches", 0, plan.facts)
    samples.yardstick()
    step("handoff of the backlog")
    samples.rates["handoff"] = handoff(site, site.receivers[0], 1)
    samples.yardstick()
    step(f"lag at {plan.rate:g} facts/s")
    samples.rates["live"] = live(site, site.receivers[0], samples)
    step("a bystander of others' work")
    _bystander(site, samples)
    return samples


def job_of(site: BenchSite, plan: BenchPlan, kind: str, first: int, count: int) -> BenchJob:
    """Give the job of a producer of the sender."""
    return BenchJob(
        kind=kind,
        address=site.sender.address,
        certs=str(site.sender.certs),
        identity=f"{site.sender.name}-producer",
        server_name=f"{site.sender.name}-bsfg",
        stream=STREAM,
        first=first,
        count=count,
        object_bytes=plan.object_bytes,
        rate=plan.rate,
    )


def _append(site: BenchSite, samples: BenchSamples, kind: str, first: int, count: int) -> None:
    """Let all clients append at the same time, each its share."""
    clients = samples.plan.clients
    share = -(-count // clients)
    jobs = [job_of(site, samples.plan, kind, first + _PER_CLIENT * number, share) for number in range(clients)]
    before = site.sender.cpu_seconds()
    found = measured(jobs)
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    cpu_seconds = {
        "node": site.sender.cpu_seconds() - before,
        "client": sum(each["cpu_seconds"] for each in found),
    }
    samples.rates[f"append_{kind}"] = Rate(share * clients, seconds, cpu_seconds)


def handoff(site: BenchSite, receiver: BenchZone, first: int) -> Rate:
    """Start a receiver and watch its forward buffer fill with what the sender has, from its first facts on."""
    total = site.sender.end(Buffer.STORE)
    site.start(receiver)
    began, before = receiver.reached(first), _cpu_seconds(site.sender, receiver)
    # What came by the first look took as long as the connection did, and is not counted, unless it was everything.
    left = total - receiver.end(Buffer.FORWARD)
    seconds = max(LOOK_SECONDS, receiver.reached(total) - began)
    return Rate(left or total, seconds, _cpu_seconds(site.sender, receiver, before))


def _cpu_seconds(sender: BenchZone, receiver: BenchZone, before: dict[str, float] | None = None) -> dict[str, float]:
    """Give the processor time of both nodes, or what was added to it."""
    now = {"sender": sender.cpu_seconds(), "receiver": receiver.cpu_seconds()}
    return now if before is None else {name: after - before[name] for name, after in now.items()}


def live(site: BenchSite, receiver: BenchZone, samples: BenchSamples) -> Rate:
    """Append at a steady rate and see when each fact is durable here and there."""
    plan = samples.plan
    count = max(1, int(plan.rate * (plan.seconds + WARM_UP_SECONDS)))
    first = site.sender.end(Buffer.STORE)
    before = _cpu_seconds(site.sender, receiver)
    with (
        site.sender.published_end(Buffer.STORE) as end_here,
        receiver.published_end(Buffer.FORWARD) as end_there,
        BufferWatch(end_here, end_there) as watch,
    ):
        [found] = measured([job_of(site, plan, "live", _LIVE_FROM, count)])
        receiver.reached(site.sender.end(Buffer.STORE))
    offsets = np.arange(first + min(count - 1, int(plan.rate * WARM_UP_SECONDS)), first + count)
    samples.lag_ms = (1000 * np.maximum(0.0, watch.times(1, offsets) - watch.times(0, offsets))).tolist()
    return Rate(count, found["ended"] - found["started"], _cpu_seconds(site.sender, receiver, before))


def _bystander(site: BenchSite, samples: BenchSamples) -> None:
    """Let one producer append single facts while others send large ones, confirm many ranges, and remove all before."""
    plan = samples.plan
    seconds = min(plan.seconds, BYSTANDER_SECONDS)
    singles = job_of(site, plan, "beside", _BESIDE_FROM, int(seconds * BYSTANDER_RATE_MAX))
    others = job_of(site, plan, "crowd", _BESIDE_FROM + _PER_CLIENT, site.sender.end(Buffer.STORE))
    jobs = [replace(singles, seconds=seconds), replace(others, seconds=seconds, identity=f"{site.sender.name}-crowd")]
    found, crowd = measured(jobs)
    samples.more |= {"bystander_ms": found["append_ms"], "crowd": {**crowd, "removed": others.count}}


class BufferWatch:
    """Notes when buffers grow, by looking at what their writers publish all the time; no node is asked."""

    def __init__(self, *ends: Callable[[], int]) -> None:
        self._ends = ends
        self._seen: list[list[tuple[int, float]]] = [[(end(), time.monotonic())] for end in ends]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def times(self, number: int, offsets: np.ndarray) -> np.ndarray:
        """Give when each offset of a buffer was first seen to be durable."""
        ends, times = (np.array(column) for column in zip(*self._seen[number], strict=True))
        return np.asarray(times[np.searchsorted(ends, offsets, side="right")])

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        for end_of, seen in zip(self._ends, self._seen, strict=True):
            end, now = end_of(), time.monotonic()
            if end > seen[-1][0]:
                seen.append((end, now))

    def __enter__(self) -> BufferWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
