"""The guides to backups and upgrades cannot drift from the commands that they describe."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.cli.operating.test_guide import resolved

from bsfg.errors import BsfgError

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = (DOCS / "guides" / "backup.md", DOCS / "upgrading.md")
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in GUIDES)
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))
TYPED = [found for line in BLOCKS.splitlines() for found in re.findall(r"\bbsfg [a-z][^|#>&]*", line.split("  #")[0])]


@pytest.mark.parametrize("line", TYPED)
def test_what_the_guides_type_exists(line: str) -> None:
    """Every command of the guides is one, with options that it has."""
    command, words = resolved(shlex.split(line)[1:])
    known = {option for param in command.params for option in param.opts + param.secondary_opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert command.params, line


def test_the_guides_speak_of_errors_that_exist() -> None:
    """Every code that the guides name as an error is one."""
    named = {"foreign_log", "frame_invalid", "artifact_missing", "format_unsupported"}
    assert named <= set(BsfgError.registry) and all(f"`{code}`" in TEXT for code in named)


def test_the_guides_lead_somewhere() -> None:
    """Every relative link of the guides leads to a file that is there."""
    for path in GUIDES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).resolve().exists(), target
