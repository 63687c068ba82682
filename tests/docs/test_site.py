"""The documentation builds as a web site without a warning, and what it names exists."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import expect
from tests.dashboard.stage import browsing, opened

ROOT = Path(__file__).parents[2]
WIDER = "(all) => all.map((each) => each.scrollWidth > each.clientWidth)"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; every link leads somewhere, every page is in the navigation, every anchor is there."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.xdist_group("site")
def test_the_site_needs_no_other_one(site: Path) -> None:
    """Scripts, styles and pictures come with it, so that it can be read in a zone without a network."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text("utf-8"))
        assert loaded == [], page


@pytest.mark.xdist_group("site")
def test_the_site_is_read_from_disk(site: Path) -> None:
    """Opened as a file, links lead to pages, the search finds, and no page is wider than a screen or a telephone."""
    asyncio.run(_read(site, sorted(site.rglob("*.html"))))


async def _read(site: Path, pages: list[Path]) -> None:
    async with browsing() as browser:
        page = await opened(browser, (site / "index.html").as_uri())
        await page.get_by_role("link", name="quickstart", exact=True).first.click()
        await expect(page).to_have_url((site / "quickstart.html").as_uri())
        await page.locator("input[name=query]").fill("gate_held")
        await expect(page.locator(".md-search-result__item").first).to_contain_text("gate_held", ignore_case=True)
        for found in pages:
            await page.set_viewport_size({"width": 1280, "height": 900})
            await page.goto(found.as_uri())
            assert await page.evaluate("document.documentElement.scrollWidth") <= 1280, found
            await page.set_viewport_size({"width": 390, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, found
            wide = await page.locator(".md-typeset__scrollwrap").evaluate_all(WIDER)
            assert not any(wide), f"a table is read without moving it aside: {found}"


@pytest.mark.xdist_group("site")
def test_what_is_code_looks_like_code(site: Path) -> None:
    """No fence is left in a page as text, also within a list; an option is not torn, a bar not escaped."""
    for page in site.rglob("*.html"):
        assert "```" not in page.read_text("utf-8"), page
    assert "<code>--engine &lt;spark|native&gt;</code>" in (site / "reference/cli.html").read_text("utf-8")
    assert '<code class="whole">--json</code>' in (site / "guides/operating.html").read_text("utf-8")


@pytest.mark.xdist_group("site")
def test_a_cell_says_what_it_is(site: Path) -> None:
    """Where columns are not beside each other, a cell has the name of its own; the first needs none."""
    text = (site / "reference/configuration.html").read_text("utf-8")
    assert '<td data-label="Default"><code>"data"</code></td>' in text and 'data-label="Key"' not in text
    assert "data-label" not in (site / "glossary.html").read_text("utf-8"), "two columns explain themselves"


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
