"""The archive for plants without internet, the units of systemd and the recipe of the container."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from tests.packaging.environments import ROOT, Environment, clean_environment, repacked, required
from tools.bundle import EXTRAS, SUMS, pack

import bsfg
from bsfg.config.access import Listen

UNITS = sorted((ROOT / "examples" / "systemd").glob("*.service"))
CONTAINER = (ROOT / "examples" / "container" / "Containerfile").read_text()
NOBODY = {f"{name}_PROXY": "http://127.0.0.1:9" for name in ("HTTP", "HTTPS", "ALL")}


@pytest.mark.campaign
def test_a_bundle_installs_without_a_network(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, its script makes an environment that works; nobody is asked, and a damaged bundle is refused."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    shutil.copy(wheel, wheels)
    for there in required(wheel, ("node",)).values():
        repacked(there, wheels)
    archive = pack(wheels, tmp_path / "dist", ("node",))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / archive.stem
    assert {path.name for path in folder.iterdir()} == {"LICENSE", SUMS, "install.sh", "systemd", "wheels"}
    env = clean_environment(tmp_path) | NOBODY

    def install(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(folder / "install.sh"), str(tmp_path / "env")]
        return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=300, check=False)

    done = install()
    assert (done.returncode, done.stdout) == (0, f"bsfg {bsfg.__version__}\n"), done
    made = Environment(tmp_path / "env")
    assert made.run("bsfg", "init", "lab", "--zone", "lab", cwd=tmp_path).code == 0
    code = "import bsfg.node.node, grpc, pyarrow; from bsfg import Producer, LightProducer"
    outcome = made.run("python", "-c", code, cwd=tmp_path)
    assert outcome.code == 0, outcome

    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho cp27-cp27mu_win32\n")
    other.chmod(0o755)
    refused = install(PYTHON=str(other))
    assert refused.returncode == 1 and "is cp27-cp27mu_win32" in refused.stderr
    with next((folder / "wheels").glob("orjson*")).open("r+b") as file:
        file.write(b"damage")
    refused = install()
    assert refused.returncode == 1 and "damaged" in refused.stderr


def test_a_bundle_has_every_extra_of_users() -> None:
    """What users can install is in the bundle, but for what only those who work on the project need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) | {"log", "dev"} >= set(project["optional-dependencies"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    """systemd knows every line of the units, and they start commands that there are."""
    text = unit.read_text()
    [command] = re.findall(r"^ExecStart=/opt/bsfg/bin/bsfg (.*)$", text, re.MULTILINE)
    helped = subprocess.run(
        [
            sys.executable,
            "-m",
            "bsfg",
            *command.split()[:-2],
            "--help",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--config" in helped.stdout
    program = tmp_path / "bsfg"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for other in UNITS:
        (tmp_path / other.name).write_text(other.read_text().replace("/opt/bsfg/bin/bsfg", str(program)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in verified.stderr.splitlines() if unit.stem in line]
    assert (verified.returncode, ours) == (0, []), verified


def test_a_unit_with_a_mistake_is_noticed(tmp_path: Path) -> None:
    """The check can fail: a key that systemd does not know, and a program that is not there."""
    unit = tmp_path / "bad.service"
    unit.write_text("[Service]\nExecStart=/nowhere/bsfg\nRestartSeconds=2\n")
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert verified.returncode != 0 or "RestartSeconds" in verified.stderr


def test_the_pages_show_the_units() -> None:
    """What the documentation prints is what lies under examples."""
    pages = "\n".join((ROOT / "docs" / name).read_text() for name in ("deployment.md", "guides/replicating.md"))
    for unit in UNITS:
        assert f"```ini\n{unit.read_text()}```" in pages


def test_the_recipe_of_the_container() -> None:
    """It runs as nobody special, installs extras that there are, and opens the ports that a node has by itself."""
    steps = [
        (line.split(" ", 1)[0], line.split(" ", 1)[1])
        for line in CONTAINER.splitlines()
        if line and not line.startswith("#")
    ]
    kinds = [kind for kind, _ in steps]
    known = {"FROM", "RUN", "COPY", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert kinds[0] == "FROM" and set(kinds) <= known
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert dict(steps)["USER"] not in ("root", "0")
    [extras] = re.findall(r"/src\[([a-z0-9,]+)\]", CONTAINER)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    version = re.search(r"python:(\d+\.\d+)", CONTAINER)
    assert version is not None and f"Programming Language :: Python :: {version.group(1)}" in project["classifiers"]
    listen = Listen()
    assert set(dict(steps)["EXPOSE"].split()) == {str(listen.grpc.port), str(listen.http.port)}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", ".git", "build"} <= set(ignored)
