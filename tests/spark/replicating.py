"""`bsfg pipeline replicate` or `run` as a process, and what it must have achieved."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tests.e2e.zones import Zone

WAIT_SECONDS = 240.0
"""How long something that must happen may take before a test gives up; it is never what is measured."""


@dataclass
class Pipeline:
    """One run of the command."""

    zone: Zone
    arguments: Sequence[str] = ()
    job: str = "replicate"
    process: subprocess.Popen[bytes] = field(init=False)
    states: list[dict[str, Any]] = field(default_factory=list)
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "bsfg.cli", "pipeline", self.job, "--json"]
        command += ["-c", str(self.zone.folder / "zone.toml"), *self.arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log_path(self) -> Path:
        """Where its stderr goes."""
        return self.zone.folder / "pipeline.log"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, contextlib.suppress(orjson.JSONDecodeError):
            for line in lines:
                self.states.append(orjson.loads(line))

    @property
    def link(self) -> dict[str, Any]:
        """The last state of its link, empty before it has told one."""
        return self.states[-1]["links"][0] if self.states else {}

    @property
    def links(self) -> dict[str, dict[str, Any]]:
        """The last states of all its links by their names."""
        return {each["link"]: each for each in self.states[-1]["links"]} if self.states else {}

    @property
    def pipelines(self) -> dict[str, dict[str, Any]]:
        """The last states of all pipelines of a `run` by their names."""
        return {each["name"]: each for each in self.states[-1]["pipelines"]} if self.states else {}

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until something holds while the pipeline runs."""
        wait_until(condition, what or f"{self.states[-1:]}", lambda: self.process.poll() is None, self.log_path)

    def until_moving(self) -> None:
        """Wait until it has the leases of all its links."""
        self.until(lambda: self.links and all(each["ours"] for each in self.links.values()), "the leases")

    def stop(self) -> int:
        """End it as an operator would, and give its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        return code

    def processes(self) -> list[int]:
        """List its processes: the command, Spark's JVM, the daemon of the workers, and the workers."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == self.process.pid]

    def kill(self) -> None:
        """Kill the command and whatever it started, at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self._reader.join()

    def workers(self) -> list[int]:
        """List the Python processes that run tasks, the one that they are forked from first."""
        return self.pids("-m\0bsfg.spark.daemon")

    def pids(self, word: str) -> list[int]:
        """List those of its processes whose command line holds a word, the newest last."""
        return sorted(pid for pid in self.processes() if word.encode() in _command(pid))


def wait_until(
    condition: Callable[[], object], what: str, alive: Callable[[], bool] = lambda: True, log: Path | None = None
) -> None:
    """Wait until a condition holds."""

    def said() -> str:
        return log.read_text()[-3000:] if log is not None and log.exists() else ""

    deadline = time.monotonic() + WAIT_SECONDS
    asked = time.thread_time()
    while not condition():
        assert alive(), f"the pipeline ended while {what} was waited for: {said()}"
        assert time.monotonic() < deadline, f"waited in vain for {what}: {said()}"
        # Who asks costly questions asks less often: the pipeline that is waited for needs the processor, too.
        time.sleep(max(0.05, 4 * (time.thread_time() - asked)))
        asked = time.thread_time()


def _session(pid: int) -> int:
    """Give the session of a process, -1 when it is gone; what only waits to be buried is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return -1 if state == "Z" else os.getsid(pid)
    except (OSError, IndexError):
        return -1


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
