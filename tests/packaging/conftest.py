"""What the tests of the installed package share: the wheel, and environments that have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.packaging.environments import ROOT, TIMEOUT_SECONDS, Environment, make, once


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """The wheel, built from the source as it is."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)

    [built] = once(shared / "wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="session")
def core(shared: Path, wheel: Path) -> Environment:
    """An environment after `pip install bsfg`."""
    return Environment(once(shared / "core", lambda folder: _make(folder, wheel, "")) / "env")


@pytest.fixture(scope="session")
def local(shared: Path, wheel: Path) -> Environment:
    """An environment after `pip install 'bsfg[log]'`."""
    return Environment(once(shared / "local", lambda folder: _make(folder, wheel, "log")) / "env")


@pytest.fixture(scope="session")
def full(shared: Path, wheel: Path) -> Environment:
    """An environment after `pip install 'bsfg[spark]'`."""
    return Environment(once(shared / "full", lambda folder: _make(folder, wheel, "spark")) / "env")


def _make(folder: Path, wheel: Path, extras: str) -> None:
    make(folder / "env", wheel, extras)
