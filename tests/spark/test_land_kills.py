"""Landing under SIGKILL: the driver, Spark's JVM, its Python workers and the node, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import orjson
import pyarrow as pa
import pytest
from tests.cli.conftest import environment
from tests.spark.landing import check_latest, check_same, gap_offsets, seen_offsets, table
from tests.spark.landing_process import is_missing
from tests.spark.nodes import SparkZone, facts

from bsfg.ports import Buffer
from bsfg.spark.land.state import STATE

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
SETTLE_SECONDS = 280.0
JVM = "org.apache.spark.deploy.SparkSubmit"


# Without Spark: the folder alone, many kills.


def start(out: Path, end: int, seed: object, format: str) -> subprocess.Popen[bytes]:
    """Start a process that lands."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.landing_process", str(out), str(end), str(seed), format],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )


class Reader:
    """A plain reader of the folder, again and again; what it saw that it should not have seen."""

    def __init__(self, out: Path, format: str) -> None:
        self.out, self.format, self.reads, self.lost_files = out, format, 0, 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        least = 0
        while not self._stop.is_set():
            try:
                offsets = seen_offsets(self.out, self.format)
            except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
                # The list of files was made before a partition was exchanged. That is an error, never a wrong answer.
                assert "No such file" in str(error) or "not found" in str(error).lower(), error
                self.lost_files += 1
                continue
            self.reads += 1
            twice = [offset for offset, count in Counter(offsets).items() if count > 1]
            if twice or len(offsets) < least:
                self.wrong.append(f"{twice[:3]} twice, {len(offsets)} of {least}")
            least = len(offsets)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read while a block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


@pytest.mark.soak
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_landing_that_is_killed_again_and_again(
    tmp_path: Path, soak_size: Callable[[int, int], int], format: str
) -> None:
    """However often the process is killed, every fact is landed once, and a reader sees none twice and none vanish."""
    out, random = tmp_path / "lake", Random(11)
    kills, end = soak_size(5, 300), soak_size(5, 300) * 400
    out.mkdir()
    reader = Reader(out, format)
    with reader.reading():
        for kill in range(kills):
            process = start(out, end, kill, format)
            assert process.stdout is not None
            for _ in range(random.randrange(1, 6)):
                process.stdout.readline()
            threading.Event().wait(random.uniform(0, 0.08))
            process.kill()
            process.wait()
            process.stdout.close()
        last = start(out, end, "last", format)
        assert last.communicate()[0] is not None
        assert last.returncode == 0
    expected = [offset for offset in range(end) if not is_missing(offset)]
    assert seen_offsets(out, format) == expected
    assert gap_offsets(out) == [offset for offset in range(end) if is_missing(offset)]
    check_latest(out, format)
    assert not reader.wrong
    assert reader.reads > 3
    assert sorted(path.name for path in (out / "_bsfg").iterdir() if path.name != ".swap") == [
        "lock",
        "staging",
        "state.json",
    ]


# The command itself, with Spark and a node.


class Command:
    """`bsfg pipeline land` as a process, following a buffer."""

    def __init__(self, plant: SparkZone, out: Path) -> None:
        self.plant, self.out = plant, out
        self.log = out.parent / "land.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        given = self.plant.options()
        arguments = ["--stream", "operational", "--out", str(self.out), "--consumer", "app-lake", "--every", "0"]
        arguments += ["--max-facts-per-batch", "40", "--master", "local[2]", "--server-name", given["serverName"]]
        arguments += [part for name in ("address", "ca", "cert", "key") for part in (f"--{name}", given[name])]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bsfg", "pipeline", "land", *arguments],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def family(self, name: str) -> list[int]:
        """Give the processes below the command whose command line has a word in it, the youngest last."""
        assert self.process is not None
        return [pid for pid in _below(self.process.pid) if name in _command_line(pid)]

    def until_landed(self, offset: int) -> None:
        """Wait until everything before an offset is landed and confirmed."""
        self.until(lambda: self._next() >= offset and self.plant.committed("app-lake") >= offset - 1)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds while the command runs."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def _next(self) -> int:
        with suppress(FileNotFoundError):
            found: int = orjson.loads((self.out / STATE).read_bytes())["next"]
            return found
        return -1


def _below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        tasks = [int(child) for each in Path(f"/proc/{pid}/task").iterdir() for child in _children(each)]
    except FileNotFoundError:
        return []
    found = sorted({*map(int, children), *tasks})
    return found + [below for child in found for below in _below(child)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:
        return []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_process_may_be_killed(plant: SparkZone, tmp_path: Path, soak_size: Callable[[int, int], int]) -> None:
    """Worker, node, JVM and driver are killed while facts come in; each fact is there once, and SIGTERM ends it."""
    plant.create_consumer("app-lake")
    command, random = Command(plant, tmp_path / "lake"), Random(5)
    produced = 0

    def produce(count: int) -> None:
        nonlocal produced
        plant.produce(facts(count, first=produced))
        produced += count

    produce(200)
    command.start()
    command.until_landed(200)
    for _ in range(soak_size(1, 20)):
        for _ in range(3):
            produce(120)
            threading.Event().wait(random.uniform(0, 0.3))
            for worker in command.family("-m bsfg.spark.daemon")[1:]:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        produce(120)
        threading.Event().wait(random.uniform(0, 0.5))
        plant.kill()
        plant.start()
        produce(120)
        command.until_landed(produced)
        for victim in (JVM, "the driver"):
            produce(300)
            threading.Event().wait(random.uniform(0, 0.5))
            assert command.process is not None
            [pid, *_] = command.family(JVM) if victim == JVM else [command.process.pid]
            os.kill(pid, signal.SIGKILL)
            produce(10)
            assert command.process.wait(60) != 0
            command.start()
            command.until_landed(produced)
    check_same(table(tmp_path / "lake").to_pylist(), plant.entries(Buffer.STORE), by="appended_at")
    assert gap_offsets(tmp_path / "lake") == []
    _ends_well(command)


def _ends_well(command: Command) -> None:
    """End the command as a service manager would: it tells what it did and leaves no process behind."""
    assert command.process is not None
    family = _below(command.process.pid)
    assert any(JVM in _command_line(pid) for pid in family)
    command.process.send_signal(signal.SIGTERM)
    # A machine that is too busy to end it in order within nine seconds sees it end at once, which harms nothing.
    assert command.process.wait(60) in (0, 128 + signal.SIGTERM), command.log.read_text()[-3000:]
    deadline = time.monotonic() + SETTLE_SECONDS
    while any(_command_line(pid) for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)
