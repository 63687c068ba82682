"""The pages that are written from the code: `python -m tools.pages` renews them all, and a test holds them in step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.pages import commands, configuration, decisions, errors, observability, spark_options, wire, words

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guides" / "spark.md"

PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "cli.md": commands.page,
    DOCS / "reference" / "configuration.md": configuration.page,
    DOCS / "reference" / "errors.md": errors.page,
    DOCS / "reference" / "observability.md": observability.page,
    DOCS / "reference" / "wire.md": wire.page,
    DOCS / "reference" / "words.md": words.page,
    DOCS / "adr" / "README.md": lambda: decisions.page(DOCS / "adr" / "README.md"),
    GUIDE: lambda: spark_options.page(GUIDE.read_text(encoding="utf-8")),
}
"""What each page has to be."""


def write() -> None:
    """Renew every page."""
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
