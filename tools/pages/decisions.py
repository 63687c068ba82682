"""Writes the list at the end of the page about the decision records, from the records themselves."""

from __future__ import annotations

from pathlib import Path

_HEADING = "\n## All of them\n\n"


def page(about: Path) -> str:
    """Give the whole page: what is said about the records, then each with its title."""
    said = about.read_text(encoding="utf-8").split(_HEADING)[0]
    records = sorted(about.parent.glob("[0-9]*.md"))
    titles = [
        (record.name, record.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")) for record in records
    ]
    return said + _HEADING + "".join(f"- [{title}]({name})\n" for name, title in titles)
