"""Writes the table of the options of ``format("bsfg")`` into the guide, from their declarations."""

from __future__ import annotations

from bsfg.spark.options import ALL_USES, OPTIONS, default_text

BEGINS, ENDS = "<!-- options: written by `make reference` -->", "<!-- end of options -->"


def page(guide: str) -> str:
    """Give the guide with the table of today in its place."""
    before, rest = guide.split(BEGINS)
    return f"{before}{BEGINS}\n{table()}\n{ENDS}{rest.split(ENDS)[1]}"


def table() -> str:
    """Describe all options as a table in Markdown."""
    lines = ["| Option | For | Default | |", "|---|---|---|---|"]
    for option in OPTIONS:
        uses = "all" if option.uses == ALL_USES else ", ".join(sorted(option.uses))
        default = (
            "required" if option.required else "" if option.default is None else f"`{default_text(option.default)}`"
        )
        lines.append(f"| `{option.name}` | {uses} | {default} | {option.says} |")
    return "\n".join(lines)
