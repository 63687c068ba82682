"""What the tests of the command line share: calling it inside this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from bsfg.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return orjson.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """What it printed, as JSON Lines."""
        return [orjson.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Give what runs a command as a user would type it, with the width of his terminal."""
    for name in ("CONFIG", "IDENTITY", "ADDRESS", "CA", "CERT", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"BSFG_{name}", raising=False)

    def call(*args: object, columns: int = 120, stdin: bytes = b"") -> Outcome:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
