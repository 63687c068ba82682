"""Writes the declarations down for people: the commented file of a new zone."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from bsfg.config.declare import ConfigTable, dotted, tables_of, toml
from bsfg.config.settings import ZoneConfig

WIDTH = 110


def commented_file(preamble: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Give a configuration file that explains itself.

    ``values`` holds what is known, by table; for a named table, by row and then by key. Every other key stands there
    as a comment with its default. Of a named table the first row explains its keys and the others are brief.
    """
    lines = [*_comment(preamble)]
    for table in tables_of(ZoneConfig):
        lines += ["", "", *_comment(table.says)]
        given = values.get(table.name, {})
        if table.named is None:
            lines += _block(table, None, given, explained=True)
        elif not given:
            lines += _example_block(table)
        for number, (name, row) in enumerate(given.items() if table.named else ()):
            lines += [""] * bool(number)
            lines += _block(table, name, row, explained=number == 0)
    return "\n".join(lines) + "\n"


def _header(table: ConfigTable, name: str | None) -> str:
    return dotted((*table.path, name) if name else table.path)


def _block(table: ConfigTable, name: str | None, values: Mapping[str, Any], *, explained: bool) -> Iterator[str]:
    yield f"[{_header(table, name)}]"
    for item in table.settings():
        if item.name in values:
            if explained:
                yield from _comment(item.says)
            yield f"{item.name} = {toml(values[item.name])}"
        elif explained:
            yield from _comment(item.says)
            yield f"# {item.name} = {toml(item.example if item.default is None else item.default)}"


def _example_block(table: ConfigTable) -> Iterator[str]:
    """A row that is only an example, wholly in comments."""
    yield f"# [{_header(table, table.example_name)}]"
    for item in table.settings():
        if item.required or item.example is not None:
            yield f"# {item.name} = {toml(item.example)}"


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.splitlines() or [""]
        for line in textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False) or [""]
    ]
