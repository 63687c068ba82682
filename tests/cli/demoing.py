"""`bsfg demo` as a process, and what it must not leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.conftest import environment

WAIT_SECONDS = 280.0
"""How long something that must happen may take before a test gives up; it is never what is measured."""

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def place() -> Iterator[Path]:
    """Give a temporary folder for a demo, with a short name, as people have; insist that nothing is left in it."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        yield Path(name)
        gone(Path(name))


def processes_of(place: Path) -> list[str]:
    """List the processes that a demo in a place has started, by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(place).encode() + b"/bsfg-demo-" in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def gone(place: Path) -> None:
    """Wait until neither a process nor a file of a demo is left."""
    deadline = time.monotonic() + WAIT_SECONDS
    while processes_of(place) or any(place.glob("bsfg-demo-*")):
        assert time.monotonic() < deadline, (processes_of(place), list(place.rglob("*"))[:20])
        time.sleep(0.05)
    assert list(place.iterdir()) == []


def started(place: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    """Start a demo whose output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, "-m", "bsfg", "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(place), PYTHONUNBUFFERED="1", **env),
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read what a demo prints up to a line with some words."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    raise AssertionError((read, process.communicate()))
