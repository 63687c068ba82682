"""A process from which nodes are forked: it has loaded everything already, so that a start costs milliseconds.

A node that is forked here is a process of its own like one that `bsfg node` starts, and is killed like one. Tests that
kill dozens of nodes would otherwise spend their time loading libraries.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

STARTED, ENDED = "pid", "code"


class Nursery:
    """The caller's side: starts nodes and tells how they ended. One per test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(self.close)

    def start(self, folder: Path, log: Path, ready: str, changed: Mapping[str, float]) -> int:
        """Fork a node for the configuration in a folder and give its process id.

        With ``changed``, as in {"bsfg.wire.limits.DELAY_SECONDS_MAX": 0.01}, some constants are others for it.
        """
        asked = {"do": "start", "folder": str(folder), "log": str(log), "ready": ready, "changed": dict(changed)}
        return self._ask(asked)[STARTED]

    def wait(self, pid: int, timeout_seconds: float = 30.0) -> int:
        """Wait until a node has ended and give its exit code, negative for a signal."""
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], timeout_seconds)[0], f"node {pid} did not end"
        finally:
            os.close(descriptor)
        return self._ask({"do": "reap", "pid": pid})[ENDED]

    def close(self) -> None:
        """End the nursery; nodes that still run are killed with it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(10)

    def _ask(self, request: Mapping[str, object]) -> dict[str, int]:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, int] = json.loads(self._process.stdout.readline())
            return answer


_nursery: Nursery | None = None


def nursery() -> Nursery:
    """Give the nursery of this test process."""
    global _nursery  # noqa: PLW0603 - it takes seconds to make one
    if _nursery is None:
        _nursery = Nursery()
    return _nursery


def serve() -> None:
    """Fork nodes as asked on standard input, until it ends; nodes that still run then are killed."""
    # Everything that a node loads, without starting any thread: only then may a process be forked safely.
    import bsfg.cli.node
    import bsfg.config
    import bsfg.node.logs
    import bsfg.node.running  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "reap":
            _, status = os.waitpid(request["pid"], 0)
            _answer({ENDED: os.waitstatus_to_exitcode(status)})
            continue
        own = os.getpid()
        child = os.fork()
        if child == 0:
            _die_with(own)
            _become_node(request["folder"], request["log"], request["ready"], request["changed"])
        _answer({STARTED: child})


def _answer(answer: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _become_node(folder: str, log: str, ready: str, changed: Mapping[str, float]) -> None:
    code = 1
    try:
        os.chdir(folder)
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (sink, 1), (sink, 2)):
            os.dup2(source, target)
        for name, value in changed.items():
            module, _, constant = name.rpartition(".")
            assert type(getattr(sys.modules[module], constant)) is type(value), name
            setattr(sys.modules[module], constant, value)
        from bsfg.cli.node import node

        node(config=Path("zone.toml"), ready_file=Path(ready))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, so that no test leaves a node behind."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def alive(pid: int) -> bool:
    """Tell whether a process runs and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def rss_bytes(pid: int) -> int:
    """Give the memory that a process has resident, without what it shares with its nursery."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Clean:", "Private_Dirty:"))
    )


if __name__ == "__main__":
    serve()
