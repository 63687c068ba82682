"""How long a log takes to come back after its writer was killed: one child appends, another opens.

Run as a module it is the child: `append FOLDER FIRST` writes until it is killed, `open FOLDER FIRST COUNT` opens the
folder and appends facts again that the first one had acknowledged last.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from bsfg.cli.bench.measure import STREAM
from bsfg.cli.bench.workload import BATCH_FACTS, batch_of
from bsfg.errors import StorageFailed
from bsfg.ports import Result
from bsfg.sealing import seal
from bsfg.stores.log.storage import LogStorage

ACKNOWLEDGED_BATCHES = 50
FIRST = 3 * 10**13


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


def _command(what: str, folder: Path, first: int) -> list[str]:
    return [sys.executable, "-m", "bsfg.cli.bench.reopen", what, str(folder), str(first)]


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


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:]]
    asyncio.run(append_forever(sys.argv[2], *numbers) if sys.argv[1] == "append" else open_again(sys.argv[2], *numbers))
