"""Takes the blocks of a page and runs them as a reader would: one after the other, in one terminal, in one folder.

A block of ``sh`` or ``python`` runs. One that cannot says so in the line above it: ``<!-- not run: why -->``. What a
reader of the page has, and no page makes, is made by ``<!-- given: a line of shell -->``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bsfg.testing.ports import free_port

ROOT = Path(__file__).parents[2]
RUN = ("sh", "python")
SHOWN = ("text", "toml", "ini", "json", "csv")
LIMIT_SECONDS = 600.0
PORTS = (9443, 9444)
"""The ports of the pages; a test has others, because many may run at once."""
FROM_GRPC_TO_HTTP = 363

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- (not run|given): ([^\n]*) -->\n *\Z")

PYTHON = """
import pathlib, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    block = pathlib.Path(line.strip())
    exec(compile(block.read_text(), str(block), "exec"), names)
    block.with_suffix(".done").touch()
"""


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    language: str
    text: str
    line: int
    given: str = ""
    not_run: str = ""

    @property
    def runs(self) -> bool:
        """Tell whether it is to run."""
        return self.language in RUN and not self.not_run


def blocks(page: Path) -> Iterator[Block]:
    """Give all blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        indent, language, body = found.groups()
        body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        marks, before = {}, text[: found.start()]
        while mark := MARK.search(before):
            marks[mark[1]] = mark[2]
            before = before[: mark.start()]
        line = text[: found.start()].count("\n") + 1
        yield Block(language, body, line, marks.get("given", ""), marks.get("not run", ""))


def free_ports() -> dict[str, str]:
    """Give what the ports of the pages are in this run; the second of each pair is as far away as in the product."""
    given: dict[str, str] = {}
    while len(given) < 2 * len(PORTS):
        port = free_port()
        if _is_free(port - FROM_GRPC_TO_HTTP):
            name = PORTS[len(given) // 2]
            given[str(name)] = str(port)
            given[str(name - FROM_GRPC_TO_HTTP)] = str(port - FROM_GRPC_TO_HTTP)
    return given


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def placed(text: str, ports: dict[str, str]) -> str:
    """Give a text with the ports of this run."""
    return re.sub(r"\b(9443|9444|9080|9081)\b", lambda found: ports[found[0]], text)


@dataclass
class Terminal:
    """A shell, and beside it one Python for the blocks of Python; both live as long as the page is read."""

    folder: Path
    ports: dict[str, str] = field(default_factory=free_ports)
    _children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _number: int = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *problem: object) -> None:
        for child in self._children.values():
            _end(child)

    def run(self, block: Block, page: str) -> None:
        """Run a block and insist that every line of it succeeds."""
        if block.given:
            self._run("sh", block.given, f"{page}:{block.line} (given)")
        self._run(block.language, block.text, f"{page}:{block.line}")

    def printed(self) -> str:
        """Give what was printed so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.parent.glob("*.out")))

    def _run(self, language: str, text: str, where: str) -> None:
        self._number += 1
        # Beside the folder, not in it: pages begin in an empty one.
        path = self.folder.parent / f"block-{self._number}.{language}"
        path.write_text(placed(text, self.ports), encoding="utf-8")
        done = path.with_suffix(".done")
        if language not in self._children:
            self._children[language] = self._begin(language)
        child = self._children[language]
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(f". {path}; touch {done}\n" if language == "sh" else f"{path}\n")
            child.stdin.flush()
        deadline = time.monotonic() + LIMIT_SECONDS
        # The shell leaves at the first line that fails.
        while not done.exists():
            gone = child.poll() is not None and not done.exists()
            assert not gone, f"{where} failed:\n{text}\n{self.printed()[-6000:]}"
            assert time.monotonic() < deadline, f"{where} does not end:\n{text}\n{self.printed()[-6000:]}"
            time.sleep(0.02)

    def _begin(self, language: str) -> subprocess.Popen[str]:
        ours = ("BSFG_", "PYTHONPATH", "COLUMNS", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        programs = {"sh": ["bash", "-eu", "-o", "pipefail"], "python": [sys.executable, "-c", PYTHON]}
        with (self.folder.parent / f"{language}.out").open("ab") as out:
            return subprocess.Popen(
                programs[language],
                cwd=self.folder,
                env=kept
                | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "BSFG_JAVA_ARCHIVE": "no"},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


def _end(child: subprocess.Popen[str]) -> None:
    """End a child and all that it has started, with a little time to do so in order."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while _group_lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=30)


def _group_lives(child: subprocess.Popen[str]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True
