"""A run of `bsfg pipeline ingest` that is killed goes on where it was: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from tests.cli.conftest import environment
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import until
from tests.spark.nodes import SparkZone, ids

from bsfg.ports import Buffer
from bsfg.spark.ingest.survey import digest_of

pytestmark = pytest.mark.campaign

ROWS, FILES = 12_000, 2
PADDING = "x" * 1_000
PATIENCE_SECONDS = 400.0
KILL, TERM = signal.SIGKILL, signal.SIGTERM
SHORT = [(KILL, False), (TERM, False)]
DISTURBANCES = SHORT if os.environ.get("BSFG_SOAK") != "long" else [*SHORT, (KILL, True), (TERM, True), *SHORT]
"""What is sent to the command, and whether Spark and its workers get it too."""


def is_bad(number: int) -> bool:
    """Tell whether a row is one that must be rejected."""
    return number % 1_000 == 7


def written(folder: Path) -> list[Path]:
    """Write files of several chunks each, with bad rows among the good ones."""
    folder.mkdir()
    paths = [folder / f"{number}.csv" for number in range(FILES)]
    for path in paths:
        with path.open("w") as file:
            file.write("machine,ts,n,note\n")
            for n in range(1, ROWS + 1):
                file.write(f"{'' if is_bad(n) else f'press-{n % 9}'},2026-03-01T06:00:00Z,{path.stem}/{n},{PADDING}\n")
    return paths


class Command:
    """`bsfg pipeline ingest` in a process and session of its own."""

    def __init__(self, plant: SparkZone, folder: Path) -> None:
        self._plant, self._folder = plant, folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        mapping = ["--map", "subject=asset:{machine}", "--map", "produced_at=ts", "--set", "predicate=value_read"]
        where = ["--config", str(self._plant.folder / "zone.toml"), "--work", "work", "--step", "4MiB"]
        command = ["in", "--stream", "operational", "--to-zone", "enterprise", *mapping, *where, "--master", "local[2]"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bsfg", "pipeline", "ingest", *command, "--json"],
            cwd=self._folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    async def stored(self, least: int) -> None:
        """Wait until the node has stored so many facts; to look is not cheap, so it is not done all the time."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._plant.end(Buffer.STORE) < least:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"waited in vain for {least} facts"
            await asyncio.sleep(0.25)

    async def end(self, how: signal.Signals, *, all_of_it: bool = False) -> int:
        """Send a signal to the command, or to Spark and the workers as well, and wait until all of them are gone."""
        assert self.process is not None
        session = self.process.pid
        os.killpg(session, how) if all_of_it else os.kill(session, how)
        self.process.communicate(timeout=60)
        await until(lambda: not members(session), "Spark to end", timeout_seconds=60)
        return self.process.returncode

    def close(self) -> None:
        """Leave nothing behind, however the test ends."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def finish(self) -> tuple[int, bytes, bytes]:
        """Wait for its end, and give the exit code and what it printed."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, err


def members(session: int) -> list[int]:
    """Name the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_killed_run_goes_on(plant: SparkZone, tmp_path: Path, cleanup: Cleanup) -> None:
    """After SIGKILL and SIGTERM, with Spark or without, each row is stored once and in order, or rejected once."""
    paths = written(tmp_path / "in")
    good = [n for n in range(1, ROWS + 1) if not is_bad(n)]
    command = Command(plant, tmp_path)
    cleanup.closing(command)

    async def disturb() -> None:
        for how, all_of_it in DISTURBANCES:
            command.start()
            await command.stored(plant.end(Buffer.STORE) + 1)
            code = await command.end(how, all_of_it=all_of_it)
            assert code in ((-how,) if how == signal.SIGKILL else (130, 143))

    asyncio.run(disturb())
    command.start()
    code, out, err = command.finish()
    assert code == 3, err
    report = orjson.loads(out)
    assert (report["rows"], report["rejected"]) == (ROWS * FILES, (ROWS - len(good)) * FILES)
    assert report["inserted"] + report["already_exists"] == report["facts"] == len(good) * FILES
    expected = [f"{digest[:32]}-{n}" for digest in map(digest_of, paths) for n in good]
    assert ids(plant.messages(Buffer.STORE)) == expected
    rejects = [orjson.loads(line) for line in Path(report["rejects"]).read_bytes().splitlines()]
    assert [(each["file"], each["row"]) for each in rejects] == [
        (str(path), n) for path in paths for n in range(1, ROWS + 1) if is_bad(n)
    ]
