"""Each run of the pipeline works in a folder of its own: a second one on the same machine never meets the first.

A run locks its folder for as long as it lives; the lock goes with the process, however that ends. What dead runs have
left is removed by the next one. A folder whose owner lives is never touched, nor one of which that cannot be told.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

RUNS, LOCK = "runs", "lock"


@contextmanager
def run_folder(work: Path) -> Iterator[Path]:
    """Give a new folder under ``work`` to a block, and remove it afterwards, with those of runs that are dead."""
    runs = work / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    # Nobody looks for dead runs while one is being born: its folder is there before its lock is.
    with (runs / LOCK).open("ab") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        remove_dead(runs)
        folder = runs / f"{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir()
        lock = _locked(folder)
    assert lock is not None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_dead(runs: Path) -> None:
    """Remove the folders of runs whose process is gone."""
    for folder in runs.iterdir():
        if folder.is_dir():
            with suppress(OSError):
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """Lock a folder, None when another process has it."""
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file
