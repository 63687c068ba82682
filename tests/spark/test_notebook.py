"""The notebook page runs as it stands, against a real node, and prints what it says."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.nodes import SparkZone

pytestmark = pytest.mark.campaign

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "notebook.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def cells() -> list[tuple[str, str]]:
    """Give the cells of the page, each with what it should print."""
    found: list[tuple[str, str]] = []
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            found.append((text, ""))
        else:
            found[-1] = (found[-1][0], text)
    return found


def lines(text: str) -> list[str]:
    """Give the lines of a text without what no reader sees."""
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_page_prints_what_it_says(
    spark: SparkSession, plant: SparkZone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cells, in order, in one place of names, as in a notebook."""
    options = plant.options()
    for name, option in {
        "ADDRESS": "address",
        "CA": "ca",
        "CERT": "cert",
        "KEY": "key",
        "SERVER_NAME": "serverName",
    }.items():
        monkeypatch.setenv(f"BSFG_{name}", options[option])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = []
    found = cells()
    for code, _ in found:
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(code, str(PAGE), "exec"), names)
        printed.append(out.getvalue())
    assert [lines(text) for text in printed] == [lines(expected) for _, expected in found]
    assert sum(1 for text in printed if text) >= 5
