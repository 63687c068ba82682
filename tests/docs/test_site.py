"""The documentation builds as a web site without a warning, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Every link leads somewhere, every page is in the navigation, every anchor is there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    """A test, example or source file that a page names exists."""
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"`((?:tests|examples|src|benchmarks)/[\w./-]+)`", text)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_promise_names_its_test() -> None:
    """Each row of the guarantees and of the threats names at least one test."""
    for name, heading in (("guarantees.md", "Promise"), ("security.md", "Threat")):
        lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
        rows = [line for line in lines[start + 2 :] if line.startswith("| **")]
        assert len(rows) > 8
        for row in rows:
            assert re.search(r"`tests/|conformance kit", row), row
