"""The pages that are written from the code cannot drift from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.pages import DOCS, PAGES
from tools.pages.commands import commands
from tools.pages.wire import page as wire_page

from bsfg.cli import COMMANDS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_is_what_the_code_says_today(path: Path) -> None:
    """Each page is what `make reference` writes."""
    assert path.read_text(encoding="utf-8") == PAGES[path](), "run `make reference`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    """Every command and sub-command has a section in the reference, with all its options."""
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for path, command in commands(name):
        assert f"# `{path}`\n" in text
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:
                assert param.opts[0] in text, f"{path} {param.opts[0]}"


def test_the_comment_of_a_method_is_its_meaning() -> None:
    """What stands above a method in the protocol file stands beside it on the page."""
    assert "| `AppendFacts` | stream of AppendFrame | stream of AppendAck | Append" in wire_page()
