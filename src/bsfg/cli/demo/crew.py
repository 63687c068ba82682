"""The processes of a demo: how they start, what their last words were, and that none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from types import TracebackType

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


LINE_BYTES = 1 << 22
CLEAR_SECONDS = 20.0
WORDS_CHARACTERS = 600

_NOT_INHERITED = ("BSFG_", "SPARK_", "PYSPARK_")
"""What somebody has set for his own nodes and his own Spark must not lead those of the demo astray."""

_INHERITED = ("BSFG_DEBUG",)


class Crew:
    """All processes of one run; leaving the context ends them and removes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, secrets.token_hex(16)
        self._janitor: Process | None = None
        self._processes: list[Process] = []
        (folder / "tmp").mkdir()

    async def __aenter__(self) -> Crew:
        self._janitor = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", __file__, str(self.folder), self.run],
            stdin=PIPE,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            await killed(process)
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._janitor.wait(), CLEAR_SECONDS)

    @property
    def temporary(self) -> Path:
        """Where its processes put what they need for a moment."""
        return self.folder / "tmp"

    async def start(self, name: str, module: str, *args: str, folder: Path | None = None) -> Process:
        """Start a module of ours; what it complains of goes into a file that `last_words` reads."""
        words = os.open(self._words(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # In a session of its own Ctrl-C reaches only us, and we end the others.
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", module, *args],
                stdin=PIPE,
                stdout=PIPE,
                stderr=words,
                limit=LINE_BYTES,
                start_new_session=True,
                cwd=folder or self.folder,
                env=self._environment(),
            )
        finally:
            os.close(words)
        self._processes.append(process)
        return process

    def last_words(self, name: str) -> str:
        """Give the end of what a process complained of."""
        try:
            text = self._words(name).read_text(errors="replace").strip()
        except OSError:
            return ""
        return text[-WORDS_CHARACTERS:]

    def _words(self, name: str) -> Path:
        return self.folder / f"{name}.stderr"

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or not name.startswith(_NOT_INHERITED)
        }
        # What Spark would prepare for later starts does not get ready in the time of a demo.
        passing = {"TMPDIR": str(self.temporary), "GRPC_VERBOSITY": "NONE", "BSFG_JAVA_ARCHIVE": "no"}
        return kept | {MARK: self.run, **passing}


async def killed(process: Process) -> None:
    """Kill a process that may have ended already, and wait for its end.

    `Process.kill` would fetch the exit code itself and leave asyncio, which waits for it too, with a complaint.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
