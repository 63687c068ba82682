"""Writes the page of the words that are classes, from the classes themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path(__file__).resolve().parents[2] / "src/bsfg"

_INTRODUCTION = """\
# Words of the source

A class whose name is one word makes a word of this product. Those of its users are in the [glossary](../glossary.md);
this page has all of them, for whoever reads the source: what each is for, and the file to find it in.
"""


def page() -> str:
    """Give the whole page."""
    rows = sorted(set(words()))
    lines = [f"| {name} | {meaning} | `{file}` |" for name, meaning, file in rows]
    return "\n".join([_INTRODUCTION, "| Word | What it is for | Where |", "|---|---|---|", *lines]) + "\n"


def words() -> Iterator[tuple[str, str, str]]:
    """Give every class that is one word: its name, the first sentence about it, its file."""
    for file in sorted(PRODUCT.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name[1:].islower():
                said = (ast.get_docstring(node) or "").split("\n\n")[0]
                yield node.name, " ".join(said.split()).replace("|", "\\|"), file.relative_to(PRODUCT).as_posix()
