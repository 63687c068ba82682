"""How long a log takes to come back after its writer was killed, and what facts cost that come one by one.

Run as a module it is the child that is killed: `append FOLDER FIRST` writes until then, `open FOLDER FIRST COUNT` opens
the folder and appends facts again that were acknowledged last, `trickle FOLDER COUNT` writes so many facts, each a
frame of its own, and kills itself. What is measured of those depends on the frames alone, so that nothing is synced
meanwhile, which would take minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bsfg.batch import FactBatch
from bsfg.cli.bench.measure import STREAM
from bsfg.cli.bench.workload import BATCH_FACTS, OBJECT_BYTES, batch_of, batches_of
from bsfg.errors import StorageFailed
from bsfg.ports import Result
from bsfg.retention import ConsumerStanding
from bsfg.sealing import seal
from bsfg.stores.log.files import DiskFile, DiskFiles
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.shared.judging import AppendItem

ACKNOWLEDGED_BATCHES = 50
FIRST = 3 * 10**13
TRICKLED_FACTS = 200_000


def reopen_seconds(folder: Path) -> float:
    """Kill a writer in mid-stream and measure, in a fresh process, how long it takes until an append is answered."""
    acknowledged = 0
    child = subprocess.Popen(
        _command("append", folder, FIRST),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        for _ in child.stdout:
            acknowledged += 1
            if acknowledged == ACKNOWLEDGED_BATCHES:
                break
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if acknowledged < ACKNOWLEDGED_BATCHES:
        raise StorageFailed(f"the writing process ended by itself with code {child.returncode}")
    return opened_seconds(folder, FIRST + (acknowledged - 1) * BATCH_FACTS)


def opened_seconds(folder: Path, first: int, count: int = BATCH_FACTS) -> float:
    """Open a folder in a fresh process; give the seconds until an append of facts that it has is answered."""
    command = [*_command("open", folder, first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise StorageFailed(f"the folder could not be opened again: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def trickled(folder: Path, facts: int) -> tuple[float, float]:
    """Fill a folder one by one; give the bytes per fact beyond its object, and the seconds until it is open again.

    It is opened after a kill and after a clean end, and the longer time counts.
    """
    count = min(facts, TRICKLED_FACTS)
    done = subprocess.run(
        _command("trickle", folder, count), capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode != -signal.SIGKILL:
        raise StorageFailed(f"the writing process ended by itself with code {done.returncode}: {done.stderr[-200:]}")
    first = (count - 1) // BATCH_FACTS * BATCH_FACTS
    seconds = [opened_seconds(folder, first, count - first) for _ in range(2)]
    size_bytes = sum(path.stat().st_size for path in (folder / "streams").rglob("*") if path.is_file())
    return size_bytes / count - OBJECT_BYTES, max(seconds)


def _command(what: str, folder: Path, number: int) -> list[str]:
    return [sys.executable, "-m", "bsfg.cli.bench.reopen", what, str(folder), str(number)]


async def append_forever(folder: str, first: int) -> None:
    """Append batches and say so after each, until killed."""
    store = await (await LogStorage.open(folder)).store(STREAM)
    while True:
        await store.append(seal(batch_of(first)))
        print(first, flush=True)
        first += BATCH_FACTS


async def open_again(folder: str, first: int, count: int) -> None:
    """Open the folder and append an acknowledged batch again; print the seconds until it is recognised."""
    batch = seal(batch_of(first, count))
    started = time.perf_counter()
    storage = await LogStorage.open(folder)
    receipt = await (await storage.store(STREAM)).append(batch)
    seconds = time.perf_counter() - started
    await storage.close()
    if receipt.count(Result.ALREADY_EXISTS) != len(batch):
        sys.exit("acknowledged facts were not there")
    print(seconds)


class _UnsyncedFile(DiskFile):
    def sync(self) -> None:
        """Leave it to the system."""
        self.rest()


class _UnsyncedFiles(DiskFiles):
    def create(self, path: str) -> DiskFile:
        """Make a new file that is never synced."""
        made = super().create(path)
        made.__class__ = _UnsyncedFile
        return made


async def append_and_die(folder: str, count: int) -> None:
    """Append facts, each with a frame of its own, and end without any farewell."""
    store = await (await LogStorage.open(_UnsyncedFiles(folder))).store(STREAM)
    for batch in batches_of(0, count):
        for row in seal(batch).rows():
            store._writer.append_group([AppendItem(FactBatch.of_rows([row], sealed=True))], ConsumerStanding)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    child: Any = {"append": append_forever, "open": open_again, "trickle": append_and_die}[sys.argv[1]]
    asyncio.run(child(sys.argv[2], *map(int, sys.argv[3:])))
