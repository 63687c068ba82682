"""Shells complete commands, options, and the names in the zone's file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.operating.conftest import Cli
from tests.e2e.zones import pair

from bsfg.cli import COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a zone with a link, a stream and identities."""
    return pair(tmp_path_factory.mktemp("completion"))[0].folder


def completed(folder: Path, line: str, **environment: str) -> list[str]:
    """Give what bash would offer at the end of a line."""
    words = line.split(" ")
    asked = {"_BSFG_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "bsfg"],
        env={**os.environ, **asked, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_every_command_is_offered(folder: Path) -> None:
    """At the first word all commands are offered, or those that begin alike."""
    assert completed(folder, "bsfg ") == list(COMMANDS)
    assert completed(folder, "bsfg qua") == ["quarantine"]


def test_subcommands_and_options_are_offered(folder: Path) -> None:
    """Inside a group its commands are offered, and their options."""
    assert completed(folder, "bsfg gate ") == ["list", "hold", "release"]
    assert {"--reason", "--for", "--side", "--config"} <= set(completed(folder, "bsfg gate hold from-enterprise --"))


def test_names_of_the_zone_are_offered(folder: Path, tmp_path: Path) -> None:
    """Links, streams, consumers and identities come from zone.toml here, from BSFG_CONFIG or from --config."""
    assert completed(folder, "bsfg gate hold ") == ["from-enterprise", "enterprise"]
    assert completed(folder, "bsfg consumers retire e") == ["enterprise.operational"]
    file = str(folder / "zone.toml")
    assert completed(tmp_path, "bsfg consumers add x --stream o", BSFG_CONFIG=file) == ["operational"]
    assert completed(tmp_path, f"bsfg gate --config {file} --identity plant-a-v") == ["plant-a-viewer"]


def test_completion_never_fails(folder: Path, tmp_path: Path) -> None:
    """Without a file, or with one that is wrong, nothing is offered and nothing is said."""
    assert completed(tmp_path, "bsfg gate hold ") == []
    (tmp_path / "zone.toml").write_text("not toml [")
    assert completed(tmp_path, "bsfg gate hold ") == []


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef bsfg"), ("fish", "complete ")])
def test_scripts_for_shells(cli: Cli, shell: str, words: str) -> None:
    """Each shell gets a script of its own, whatever shell asks."""
    done = cli("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert words in done.out and "_BSFG_COMPLETE" in done.out


def test_an_unknown_shell_is_wrong_usage(cli: Cli) -> None:
    """The shells that are known are named."""
    done = cli("completion", "tcsh")
    assert done.code == 2
    assert "zsh" in done.err


def test_bash_takes_the_script() -> None:
    """The script defines a completion in a real bash."""
    bash = shutil.which("bash")
    assert bash is not None
    line = f'eval "$({sys.executable} -m bsfg completion bash)" && complete -p bsfg'
    done = subprocess.run([bash, "--norc", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert "_bsfg_completion" in done.stdout
