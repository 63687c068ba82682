"""What the tests of the command line share: running it as a user would, and a data folder to run it on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
import pytest
from tests.cli import folders

from bsfg.cli import main

TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed, which is never a traceback."""

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        assert "Traceback" not in self.out + self.err, self.err
        assert "error[internal]" not in self.err, self.err

    def json(self) -> Any:
        """Read what it printed as one JSON document."""
        return orjson.loads(self.out)


class Run(Protocol):
    """Runs `bsfg`, where it must be with a launcher that sets limits first and then becomes the command."""

    def __call__(self, *args: object, env: Mapping[str, str] | None = None, launcher: Sequence[str] = ()) -> Outcome:
        """Run one command."""
        ...


def launcher(code: str) -> tuple[str, ...]:
    """Give what runs some Python and then becomes the command behind it.

    That is safer than running it between fork and exec: this process has threads, whose locks nobody gives back there.
    """
    return (sys.executable, "-c", f"import ctypes, os, resource, sys; {code}; os.execv(sys.argv[1], sys.argv[1:])")


def environment(**more: str) -> dict[str, str]:
    """Give an environment in which nothing but ``more`` decides about width, colour and debugging."""
    ours = ("BSFG_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_", "PY_COLORS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PYTHONWARNINGS": "error", "BSFG_JAVA_ARCHIVE": "no"} | more


@pytest.fixture
def bsfg(tmp_path: Path) -> Run:
    """Give what runs a command in a process of its own, in a folder of its own."""

    def run(*args: object, env: Mapping[str, str] | None = None, launcher: Sequence[str] = ()) -> Outcome:
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "bsfg", *map(str, args)],
            cwd=tmp_path,
            env=environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def quick(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give what runs a command in this process, for the many cases that need no process of their own."""

    def run(*args: object, env: Mapping[str, str] | None = None, launcher: Sequence[str] = ()) -> Outcome:
        assert not launcher
        for name in set(os.environ) - set(environment()):
            monkeypatch.delenv(name)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a data folder with everything in it, which no test may change."""
    folder = tmp_path_factory.mktemp("pattern") / "data"
    folders.make(folder)
    return folder


@pytest.fixture
def data(pattern: Path, tmp_path: Path) -> Path:
    """Give a data folder of the test's own."""
    return Path(shutil.copytree(pattern, tmp_path / "data"))
