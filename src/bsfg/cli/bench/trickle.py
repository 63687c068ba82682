"""What facts cost that come one by one: bytes on disk, and the time to open a log that is full of them.

Run as a module it is the child that appends: `FOLDER COUNT` writes so many facts, each a frame of its own, and kills
itself. What is measured depends on the frames alone, so that nothing is synced meanwhile, which would take minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from bsfg.batch import FactBatch
from bsfg.cli.bench.measure import STREAM
from bsfg.cli.bench.reopen import opened_seconds
from bsfg.cli.bench.workload import BATCH_FACTS, OBJECT_BYTES, batches_of
from bsfg.errors import StorageFailed
from bsfg.retention import ConsumerStanding
from bsfg.sealing import seal
from bsfg.stores.log.files import DiskFile, DiskFiles
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.shared.judging import AppendItem

TRICKLED_FACTS = 200_000


def trickled(folder: Path, facts: int) -> tuple[float, float]:
    """Fill a folder one by one; give the bytes per fact beyond its object, and the seconds until it is open again.

    It is opened after a kill and after a clean end, and the longer time counts.
    """
    count = min(facts, TRICKLED_FACTS)
    command = [sys.executable, "-m", "bsfg.cli.bench.trickle", str(folder), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != -signal.SIGKILL:
        raise StorageFailed(f"the writing process ended by itself with code {done.returncode}: {done.stderr[-200:]}")
    first = (count - 1) // BATCH_FACTS * BATCH_FACTS
    seconds = [opened_seconds(folder, first, count - first) for _ in range(2)]
    size_bytes = sum(path.stat().st_size for path in (folder / "streams").rglob("*") if path.is_file())
    return size_bytes / count - OBJECT_BYTES, max(seconds)


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
    asyncio.run(append_and_die(sys.argv[1], int(sys.argv[2])))
