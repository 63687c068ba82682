"""The operators' guide cannot drift from the commands and limits it describes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bsfg.cli.app import app
from bsfg.cli.doctor import _checks
from bsfg.errors import BsfgError
from bsfg.node import status

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "operating.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)).replace("\\\n", " ")
TYPED = [found for line in BLOCKS.splitlines() for found in re.findall(r"\bbsfg [^|#>)]*", line.split("  #")[0])]


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """Find the command that a line means, and the words that are left for it."""
    command: Any = get_command(app)
    while words and hasattr(command, "list_commands"):
        found = command.get_command(None, words[0])
        if found is None:
            break
        command, words = found, words[1:]
    if getattr(command, "commands", None) and "list" in command.commands:
        command = command.commands["list"]
    return command, words


@pytest.mark.parametrize("line", TYPED)
def test_what_the_guide_types_exists(line: str) -> None:
    """Every command of the guide is one, with options that it has."""
    command, words = resolved(shlex.split(line)[1:])
    known = {option for param in command.params for option in param.opts + param.secondary_opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert command.params, line


def test_the_guide_names_every_check_of_the_doctor() -> None:
    """The table of checks has a row for each, in their order."""
    rows = re.findall(r"^\| (\w+) \| ", GUIDE.partition("| Check |")[2].partition("\n\n")[0], re.MULTILINE)
    assert rows == ["software", *(name for name, _ in _checks())]


def test_the_guide_states_the_limits_of_health() -> None:
    """Lag, backlog and autonomy are judged by the numbers of the guide."""
    assert f"from {1000 * status.LAG_WARNING_SECONDS:.0f} ms | above {status.LAG_ALERT_SECONDS:.0f} s" in GUIDE
    assert f"above {status.BACKLOG_WARNING} | above {status.BACKLOG_ALERT:,}" in GUIDE
    assert f"under {status.AUTONOMY_WARNING_HOURS:.0f} h" in GUIDE


def test_the_guide_speaks_of_errors_that_exist() -> None:
    """Every code in the table of troubles is the code of an error."""
    codes = re.findall(r"^\| `(\w+)` \|", GUIDE.partition("| You see |")[2], re.MULTILINE)
    assert len(codes) > 5
    assert set(codes) <= set(BsfgError.registry)
