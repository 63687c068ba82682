"""`bsfg bench node` measures two real nodes, tells the truth about them, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Run, environment

from bsfg.cli.bench import workload
from bsfg.cli.bench.node import OBJECT_BYTES, OBJECT_BYTES_MIN, aims_of
from bsfg.cli.bench.node_measure import STREAM, BenchZone, BufferWatch
from bsfg.ports import Buffer
from bsfg.sealing import seal
from bsfg.stores.log.storage import LogStorage

SMALL = ("bench", "node", "--facts", "2001", "--seconds", "1", "--rate", "100", "--clients", "2", "--size", "64")
NUMBERS = (
    "sha256_per_second",
    "append_batches_per_second",
    "append_facts_per_second",
    "append_ms_p50",
    "append_ms_p99",
    "rpc_floor_ms_p50",
    "fdatasync_ms_p50",
    "handoff_per_second",
    "lag_ms_p50",
    "lag_ms_p99",
    "bystander_ms_p50",
    "bystander_ms_p99",
    "bystander_large_facts",
    "bystander_confirmations",
    "bystander_removed_facts",
    "append_batches_ratio",
    "append_facts_ratio",
    "handoff_ratio",
    "append_limit_ms",
    "append_batches_node_cpu_us_per_fact",
    "handoff_receiver_cpu_us_per_fact",
)


def nodes_in(folder: Path) -> list[int]:
    """Find the processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


@pytest.mark.campaign
def test_every_number_is_given_and_nothing_is_left_behind(bsfg: Run, tmp_path: Path) -> None:
    """A run prints all numbers as JSON and removes its folder."""
    place = tmp_path / "place"
    place.mkdir()
    done = bsfg(*SMALL, "--json", "--dir", place)
    assert done.code == 0, done
    numbers = done.json()
    measured = {name: numbers[name] for name in NUMBERS}
    assert all(value > 0 for name, value in measured.items() if "cpu" not in name and "lag" not in name), measured
    assert numbers["lag_ms_p99"] >= numbers["lag_ms_p50"] >= 0
    assert (numbers["facts"], numbers["clients"], numbers["object_bytes"]) == (2001, 2, 64)
    assert {aim["name"]: aim["met"] for aim in numbers["aims"]} == {aim.name: aim.met for aim in aims_of(numbers)}
    assert list(place.iterdir()) == []


@pytest.mark.campaign
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGKILL))],
)
def test_an_interrupted_run_stops_its_nodes(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM remove nodes and folder; even a killed benchmark leaves no node running."""
    arguments = [sys.executable, "-m", "bsfg", *SMALL, "--seconds", "600", "--dir", str(tmp_path)]
    with subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), start_new_session=True
    ) as running:
        ends = time.monotonic() + 120
        while len(nodes_in(tmp_path)) < 2:
            assert running.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    # One that was being started at that very moment ends by its leash, a little later.
    while nodes_in(tmp_path):
        assert time.monotonic() < ends, "a node went on without its benchmark"
        time.sleep(0.05)
    assert b"Traceback" not in errors
    if number != signal.SIGKILL:
        assert running.returncode == 128 + number
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("object_bytes", [64, 65, 199, 200, 201, 5_000])
def test_facts_of_any_size_are_canonical(object_bytes: int) -> None:
    """Objects have exactly the size that was asked for, and sealing leaves them as they are."""
    batch = workload.batch_of(7, 200, object_bytes)
    assert {len(data) for data in batch.values("object")} == {object_bytes}
    assert seal(batch).values("object") == batch.values("object")
    assert len(set(batch.values("object"))) == 200


def test_sizes_on_the_command_line_are_those_of_the_facts() -> None:
    """The limits that the command line states are the ones of the workload."""
    assert (OBJECT_BYTES, OBJECT_BYTES_MIN) == (workload.OBJECT_BYTES, workload.OBJECT_BYTES_MIN)


def test_a_watch_tells_when_each_offset_was_durable() -> None:
    """Every offset has the time of the first look that saw it, in each of the buffers that are watched."""
    watch = BufferWatch(lambda: 10, lambda: 0)
    watch._seen[0] += [(12, 1e9), (20, 2e9)]
    watch._seen[1] += [(20, 3e9)]
    assert watch.times(0, np.array([10, 11, 12, 19])).tolist() == [1e9, 1e9, 2e9, 2e9]
    assert watch.times(1, np.array([10, 19])).tolist() == [3e9, 3e9]


def test_a_watch_sees_what_grew_until_its_end() -> None:
    """What became durable between the last look and the end is seen too."""
    ends = [0]
    with BufferWatch(lambda: ends[0]) as watch:
        ends[0] = 5
    assert len(watch.times(0, np.arange(5))) == 5


def test_what_a_writer_publishes_is_seen_from_outside(tmp_path: Path) -> None:
    """The quick look at a buffer gives how far its writer says that it is durable."""

    async def look() -> None:
        storage = await LogStorage.open(tmp_path / "zone" / "data")
        store = await storage.store(STREAM)
        with BenchZone("zone", tmp_path / "zone").published_end(Buffer.STORE) as end:
            assert end() == 0
            await store.append(seal(workload.batch_of(0, 7)))
            assert end() == 7
        await storage.close()

    asyncio.run(look())
