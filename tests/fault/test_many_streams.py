"""A thousand streams in one process, with the descriptors and threads that a process has by default."""

import json
import subprocess
import sys
from pathlib import Path

STREAMS = 1_000
DESCRIPTORS, THREADS = 1_024, 300

WORK = """
import asyncio, json, os, resource, sys

folder, streams, descriptors, turn = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

import numpy as np

from bsfg.ports import Buffer, Confirmation, ConsumerSpec, OriginSpan
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import messages, sealed

facts, origin = sealed(messages(2)), lambda at: OriginSpan("far", np.array([at]), np.array([0]))
most = {"descriptors": 0, "threads": 0}


def look():
    most["descriptors"] = max(most["descriptors"], len(os.listdir("/proc/self/fd")))
    most["threads"] = max(most["threads"], len(os.listdir("/proc/self/task")))


async def work(storage, name):
    store, forward = await storage.store(name), await storage.forward(name)
    fact = facts.slice(turn, 1)
    receipts = await store.append(fact), await forward.put_if_absent(fact, origin(turn))
    assert [int(receipt.offsets[0]) for receipt in receipts] == [turn, turn], (name, receipts)
    for buffer, log in ((Buffer.STORE, store), (Buffer.FORWARD, forward)):
        consumer = f"{name}-{buffer}"
        await storage.cursors.create(ConsumerSpec(consumer, name, buffer))
        read = [frame.last async for frame in log.replay(0)]
        checkpoint = await storage.cursors.commit(consumer, Confirmation(turn))
        assert (read[-1], checkpoint.committed, log.problems) == (turn, turn, []), (consumer, read, log.problems)
    look()


async def run():
    storage = await LogStorage.open(folder)
    names = [f"s{at:04}" for at in range(streams)]
    # All are opened, and then all are at work together.
    for name in names:
        await storage.store(name), await storage.forward(name)
    look()
    for at in range(0, streams, 100):
        await asyncio.gather(*(work(storage, name) for name in names[at : at + 100]))
    assert len(await storage.streams()) == 2 * streams
    await storage.close()


asyncio.run(run())
print(json.dumps(most))
"""


def one_turn(folder: Path, turn: int) -> dict[str, int]:
    """Open every stream in a process of its own, use it, close it, and give what that took at most."""
    work = [sys.executable, "-c", WORK, str(folder), *map(str, (STREAMS, DESCRIPTORS, turn))]
    done = subprocess.run(work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    most: dict[str, int] = json.loads(done.stdout)
    return most


def test_a_thousand_streams_need_few_descriptors_and_threads(tmp_path: Path) -> None:
    """All streams of a large node are appended to, read and confirmed, and again after a restart."""
    for turn in (0, 1):
        most = one_turn(tmp_path / "data", turn)
        assert most["descriptors"] < DESCRIPTORS - 24, most
        assert most["threads"] < THREADS, most
