"""Clears up behind a demo, however that ended.

Run by its file name, as `python janitor.py FOLDER RUN`. It waits until its standard input closes, which also happens
when the demo is killed. Then it ends what still carries the mark of the run, and removes the folder. It needs nothing
but Python, so that it starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "BSFG_DEMO_RUN"
"""The environment variable that all processes of a run have."""

TRIES, TRY_SECONDS = 200, 0.05


def marked(run: str) -> list[int]:
    """List the processes of a run that are alive."""
    mark, found = f"{MARK}={run}".encode(), []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []  # a system without /proc: the processes end by themselves when the demo does
    for name in names:
        try:
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def clear(folder: Path, run: str) -> None:
    """End the processes of a run and remove its folder."""
    for _ in range(TRIES):
        alive = marked(run)
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not alive:
            break
        time.sleep(TRY_SECONDS)
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(TRY_SECONDS)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    clear(Path(sys.argv[1]), sys.argv[2])
