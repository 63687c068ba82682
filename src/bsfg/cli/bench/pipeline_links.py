"""What `bsfg bench pipeline --links N` measures: one hub whose many links Spark moves, and what they cost.

The hub is real: its node and its pipeline are processes of their own, with TLS, on the disk that is measured. The
senders are real nodes, too, but all of them in one process and with their facts in memory, as if each had a machine of
its own; what they use is not counted. Run as a module, this is that process: it starts the nodes, and appends when it
is told.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.cli.bench.node_client import BenchProcess
from bsfg.cli.bench.node_measure import STREAM, BenchZone, BufferWatch, about_process, cpu_seconds
from bsfg.cli.bench.store import Aim, percentile, steps
from bsfg.cli.bench.workload import batch_of
from bsfg.cli.zones import certificates, wait_until
from bsfg.errors import PeerUnreachable
from bsfg.ports import Buffer
from bsfg.sealing import seal
from bsfg.spark.calls import NodeAccess, calls

HUB = "hub"
MEMORY = Path("/dev/shm")
"""Where the senders have their files, if there is such a place."""

RATE = 1_000
RATES = {RATE: "", 10_000: "_at_10000"}
"""Facts per second in total while the lag is measured, and what the names of the numbers end with."""

APPENDS_PER_SECOND = 1_000
STEP_SECONDS = 0.002
WARM_UP_SECONDS = 3.0
IDLE_SECONDS = 30.0
MOVING_SECONDS_MAX = 600.0
SETTLE_SECONDS = 5.0
UPKEEP_SECONDS = 15.0
"""How often a sender looks after its buffers, gates and connections."""

_PER_SENDER = 10**9

_STREAM = f"""
[log]
level = "warning"
[streams.{STREAM}]
store_capacity = "1GiB"
forward_capacity = "100GiB"
"""
_MEMORY = """
[storage]
backend = "memory"
"""
_PEER = """
[identities.{zone}-bsfg]
zone = "{zone}"
roles = ["peer"]
streams = ["*"]
"""
_LINK = """
[links.from-{zone}]
zone = "{zone}"
address = "127.0.0.1:{port}"
"""

PHASES = 6


class Senders(BenchProcess):
    """The process with the nodes of all senders."""

    def __init__(self, root: Path, zones: list[str]) -> None:
        for zone in zones:
            (root / zone).mkdir()
            BenchZone(zone, root / zone).write(f"{_MEMORY}{_STREAM}{_PEER.format(zone=HUB)}[serve.{HUB}]\n")
        super().__init__("bsfg.cli.bench.pipeline_links", str(root), *zones)
        self.ports: list[int] = self.answer()

    def append(self, rate: float, facts: int) -> list[list[float]]:
        """Append so many facts at a steady rate, sender after sender; give when each was durable, by sender."""
        self.tell([rate, facts])
        times: list[list[float]] = self.answer()
        return times


class Hub:
    """The zone whose links are moved: its node, and its pipeline."""

    def __init__(self, zone: BenchZone, links: list[str]) -> None:
        self.zone, self._links = zone, links
        self._access = NodeAccess.of(zone.address, zone.files("pipeline"), f"{zone.name}-bsfg")
        self._pipeline: subprocess.Popen[bytes] | None = None

    def start_pipeline(self) -> None:
        """Start to move all links."""
        command = [sys.executable, "-m", "bsfg.cli.zones", "pipeline", "replicate", "-c", "zone.toml"]
        with (self.zone.folder / "pipeline.log").open("wb") as log:
            self._pipeline = subprocess.Popen(
                command, cwd=self.zone.folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def is_moving(self) -> bool:
        """Tell whether every link is normal, and held by somebody; raises when nobody ever will."""
        from bsfg.wire.adminclient import AdminClient

        if self._pipeline is None or self._pipeline.poll() is not None:
            said = (self.zone.folder / "pipeline.log").read_text(encoding="utf-8", errors="replace")[-1000:]
            raise PeerUnreachable("the pipeline ended by itself", hint=f"The end of its log: {said}")
        status = calls().run(AdminClient(calls().connection(self._access)).status())
        found = [each for each in status["links"] if each["side"] == "receiver"]
        return len(found) == len(self._links) and all(each["lease"] and each["mode"] == "normal" for each in found)

    def stop(self) -> None:
        """End the pipeline and everything that it started."""
        if self._pipeline is not None:
            assert self._pipeline.stdin is not None
            self._pipeline.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._pipeline.wait(30)
            for pid in self.processes()[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._pipeline.wait()

    def processes(self) -> list[int]:
        """List the node's process and those of the pipeline."""
        assert self._pipeline is not None
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [self.zone.pid, *(pid for pid in pids if _session_of(pid) == self._pipeline.pid)]

    def workers(self) -> list[int]:
        """List the processes of tasks, the one that has worked most first."""

        def is_daemon(pid: int) -> bool:
            return b"-m\0bsfg.spark.daemon" in about_process(pid, "cmdline")

        forked = [pid for pid in self.processes() if is_daemon(pid) and is_daemon(_parent(pid))]
        return sorted(forked, key=cpu_seconds, reverse=True)

    def cpu_seconds(self) -> float:
        """Give the processor time of all its processes."""
        return sum(map(cpu_seconds, self.processes()))

    def memory_mb(self) -> float:
        """Give the memory of all its processes, what they share counted once."""
        return sum(map(_proportional_kb, self.processes())) / 1e3

    def origins(self, first: int) -> list[tuple[str, int]]:
        """Give the zone and the offset there of every fact that has come, from an offset of the hub on."""
        from bsfg.wire.client import BoundaryClient

        async def work() -> list[tuple[str, int]]:
            found: list[tuple[str, int]] = []
            client = BoundaryClient(calls().connection(self._access))
            async for frame in client.read_offsets(STREAM, first, buffer=Buffer.FORWARD):
                if frame.entries is not None:
                    zones, offsets = (frame.entries.values(name) for name in ("origin_zone", "origin_offset"))
                    found += zip(zones, offsets, strict=True)
            return found

        return calls().run(work())


def measure(place: Path, links: int, seconds: float) -> dict[str, Any]:
    """Measure everything, and give every number by its stable name."""
    numbers, zones = dict[str, Any](links=links), [f"site-{number:04}" for number in range(links)]
    with ExitStack() as ending:
        step = ending.enter_context(steps(PHASES))
        step(f"starting {links} senders")
        root = ending.enter_context(_in_memory(place))
        certificates(root / "certs", [HUB, *zones], ("producer", "pipeline"))
        senders = Senders(root, zones)
        ending.callback(senders.close)
        hub = _hub(place, root, zones, senders.ports)
        ending.callback(hub.zone.stop)
        ending.callback(hub.stop)
        step("until all links move")
        began = time.monotonic()
        hub.start_pipeline()
        wait_until(hub.is_moving, MOVING_SECONDS_MAX, 0.2)
        numbers["all_moving_seconds"] = time.monotonic() - began
        for rate, suffix in RATES.items():
            step(f"lag at {rate:,} facts/s in total")
            lag_ms = _lag_ms(hub, senders, rate, seconds)
            numbers |= {f"lag_ms_p{percent}{suffix}": percentile(lag_ms, percent) for percent in (50, 99)}
        step(f"at rest for {IDLE_SECONDS:g} s")
        time.sleep(SETTLE_SECONDS)
        before = hub.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        numbers["idle_cpu_percent"] = 100 * (hub.cpu_seconds() - before) / IDLE_SECONDS
        numbers |= {"processes": len(hub.processes()), "memory_mb": hub.memory_mb()}
        step("a task is killed")
        numbers["after_kill_seconds"] = _after_kill(hub, senders, links)
    return numbers


@contextmanager
def _in_memory(place: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bsfg-bench-", dir=MEMORY if os.access(MEMORY, os.W_OK) else place))
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def _hub(place: Path, root: Path, zones: list[str], ports: list[int]) -> Hub:
    (place / "certs").symlink_to(root / "certs")
    zone = BenchZone(HUB, place / HUB)
    zone.folder.mkdir()
    peers = "".join(_PEER.format(zone=name) for name in zones)
    links = "".join(_LINK.format(zone=name, port=port) for name, port in zip(zones, ports, strict=True))
    zone.write(_STREAM + peers + links)
    zone.start()
    zone.write(_STREAM + peers + links)  # whoever reads it later finds the node by it
    return Hub(zone, zones)


def _lag_ms(hub: Hub, senders: Senders, rate: float, seconds: float) -> list[float]:
    """Append at a steady rate, and give how long each fact took from durable there to durable here."""
    facts = int(rate * (seconds + WARM_UP_SECONDS))
    first = hub.zone.end(Buffer.FORWARD)
    with hub.zone.published_end(Buffer.FORWARD) as end, BufferWatch(end) as watch:
        sent = senders.append(rate, facts)
        hub.zone.reached(first + facts)
    origins = hub.origins(first)
    arrived = watch.times(0, np.arange(first, first + len(origins)))
    starts: dict[str, int] = {}
    for zone, offset in origins:
        starts[zone] = min(offset, starts.get(zone, offset))
    names = {f"site-{number:04}": times for number, times in enumerate(sent)}
    begun = min(times[0] for times in sent if times) + WARM_UP_SECONDS
    left = ((names[zone][offset - starts[zone]], at) for (zone, offset), at in zip(origins, arrived, strict=True))
    return [max(0.0, 1000 * (at - durable)) for durable, at in left if durable >= begun]


def _after_kill(hub: Hub, senders: Senders, links: int) -> float:
    """Kill the task that moves the links, have every sender append a fact, and wait until all have come."""
    first = hub.zone.end(Buffer.FORWARD)
    began = time.monotonic()
    os.kill(hub.workers()[0], signal.SIGKILL)
    senders.append(APPENDS_PER_SECOND, links)
    return hub.zone.reached(first + links) - began


def _proportional_kb(pid: int) -> int:
    """Give the memory of a process, what it shares with others only in its part."""
    for line in about_process(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return 0


def _parent(pid: int) -> int:
    fields = about_process(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for with a hundred links."""
    return [
        Aim("memory_mb", numbers["memory_mb"], 2_500, "MB", False),
        Aim("processes", numbers["processes"], 10, "in all", False),
        Aim("idle_cpu_percent", numbers["idle_cpu_percent"], 15, "% of a core", False),
        Aim("lag_ms_p99", numbers["lag_ms_p99"], 60, f"ms at {RATE:,} facts/s", False),
        Aim("all_moving_seconds", numbers["all_moving_seconds"], 40, "s", False),
        Aim("after_kill_seconds", numbers["after_kill_seconds"], 5, "s", False),
    ]


# The process of the senders.


class _Sender:
    """One node, and its facts."""

    def __init__(self, number: int, zone: str, store: Any) -> None:
        self._number, self._zone, self._store, self._next = number, zone, store, 0

    def prepared(self, count: int) -> FactBatch:
        """Make the next facts, sealed: while lag is measured the processor is for those who move them."""
        facts = batch_of(_PER_SENDER * self._number + self._next, count)
        self._next += count
        zones = {name: pa.array([zone] * count) for name, zone in (("from_zone", self._zone), ("to_zone", HUB))}
        return seal(facts.with_columns(**zones))

    async def append(self, facts: FactBatch, times: list[float]) -> None:
        """Append facts, and note when they were durable."""
        await self._store.append(facts)
        times += [time.monotonic()] * len(facts)


async def _serve(root: Path, zones: list[str]) -> None:
    from bsfg.config import load
    from bsfg.node import upkeep
    from bsfg.node.logs import configure
    from bsfg.node.node import Node
    from bsfg.wire import connections

    configure("warning")
    # A hundred nodes that look after themselves, and at the machine's table of connections, every second would keep
    # each other waiting, as none with a machine of its own does.
    upkeep.LOOK_SECONDS = connections.LOOK_SECONDS = connections.READ_SECONDS = UPKEEP_SECONDS
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(Node(load(root / zone / "zone.toml"))) for zone in zones]
        stores = [await node.parts.store(STREAM) for node in nodes]
        senders = [_Sender(number, *each) for number, each in enumerate(zip(zones, stores, strict=True))]
        gc.disable()  # one collection would stop a hundred nodes, for as long as all of them together need
        _answer([node.grpc_port for node in nodes])
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            _answer(await _append(senders, *orjson.loads(line)))


async def _append(senders: list[_Sender], rate: float, facts: int) -> list[list[float]]:
    """Append facts at a steady rate, sender after sender, late ones at once.

    All senders share one process, which can append a thousand times in a second: at higher rates several facts at once.
    """
    times: list[list[float]] = [[] for _ in senders]
    # The facts of one sender one after the other, as its offsets are.
    lanes = [asyncio.Lock() for _ in senders]
    size = max(1, int(rate) // APPENDS_PER_SECOND)
    sizes = [min(size, facts - first) for first in range(0, facts, size)]
    made = [sender.prepared(sum(sizes[at :: len(senders)])) for at, sender in enumerate(senders)]
    batches = [made[at % len(made)].slice(at // len(made) * size, count) for at, count in enumerate(sizes)]
    if size == 1:
        # As a node has what it is given one by one: it need not be looked for in Arrow's columns.
        batches = [FactBatch.of_rows(batch.rows(), sealed=batch.sealed) for batch in batches]
    work, begun, sent = set[asyncio.Task[None]](), time.monotonic(), 0

    async def one(number: int) -> None:
        at = number % len(senders)
        async with lanes[at]:
            await senders[at].append(batches[number], times[at])

    while sent < len(batches):
        due = min(len(batches), int((time.monotonic() - begun) * rate / size) + 1)
        for number in range(sent, due):
            task = asyncio.create_task(one(number))
            work.add(task)
            task.add_done_callback(work.discard)
        sent = due
        await asyncio.sleep(STEP_SECONDS)
    await asyncio.gather(*work)
    return times


def _answer(document: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2:]))
