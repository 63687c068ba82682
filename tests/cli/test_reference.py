"""The reference page of the command line cannot drift from the commands."""

from pathlib import Path

import pytest

from bsfg.cli import COMMANDS
from bsfg.cli.reference import commands, page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_reference_is_up_to_date() -> None:
    """docs/reference/cli.md is what `make reference` writes."""
    assert REFERENCE.read_text(encoding="utf-8") == page(), "run `make reference`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    """Every command and sub-command has a section in the reference, with all its options."""
    text = REFERENCE.read_text(encoding="utf-8")
    for path, command in commands(name):
        assert f"# `{path}`\n" in text
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:
                assert param.opts[0] in text, f"{path} {param.opts[0]}"
