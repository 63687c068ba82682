"""How every command speaks: tables for people, JSON for programs, errors and progress on stderr."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 200
"""The width of tables that no terminal limits: wide, so that lines stay whole for grep."""

WIDE_COLUMNS = 76
"""Tables leave out their less important columns on a terminal narrower than this."""


_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What moves a cursor or turns a text round: others' words must not do that to whoever reads them."""


class CleanConsole(Console):
    """A console that leaves out control characters: names, reasons and messages come from other zones, too."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        clean = (each if each.control else Segment(_UNPRINTABLE.sub("", each.text), each.style) for each in buffer)
        return super()._render_buffer(clean)

    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to the frame around the commands, which knows the right exit code."""
        raise BrokenPipeError


@cache
def console(stderr: bool = False) -> Console:
    """Give the console of stdout or stderr; colours, NO_COLOR and COLUMNS are as the user has them."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_COLUMNS
    return CleanConsole(stderr=stderr, highlight=False, emoji=False, width=width)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")


def print_failure(error: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Tell what went wrong, on stderr in two lines and, when JSON was asked for, on stdout as well."""
    if as_json:
        print_json(dict(error))
    text = Text.assemble((f"error[{error['code']}]:", "bold red"), f" {error['message']}")
    console(stderr=True).print(text, soft_wrap=True)
    if error.get("hint"):
        console(stderr=True).print(Text.assemble(("hint:", "bold"), f" {error['hint']}"), soft_wrap=True)


def hush() -> None:
    """Send stdout nowhere, because nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Make a table in the house style; the columns named in ``right`` hold numbers."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return result


def pairs(title: str, rows: Mapping[str, str]) -> Table:
    """Make a table of names and values."""
    result = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    result.add_column(style="cyan", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def examples(*rows: tuple[str, str]) -> str:
    """Write the examples at the end of a command's help: what to type, and what it is for."""
    lines = [f"  [cyan]{escape(command)}[/cyan]\n      [dim]{escape(meaning)}[/dim]" for command, meaning in rows]
    return "[bold]Examples[/bold]\n" + "\n".join(lines)


@contextmanager
def progress_bar(text: str, *, shown: bool = True) -> Iterator[Progress]:
    """Show progress on stderr while a block runs, when somebody is watching."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        console=console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
    with bar:
        if text:
            bar.add_task(text, total=None)
        yield bar


def count_text(number: int) -> str:
    """Write a whole number with thin groups of three, as tables show it."""
    return f"{number:,}"


def size_text(size_bytes: float) -> str:
    """Write a size in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def range_text(first: int | None, last: int | None) -> str:
    """Write a range of offsets, both ends inclusive."""
    if first is None or last is None:
        return ""
    return str(first) if first == last else f"{first}–{last}"


def time_text(unix_ms: int | None) -> str:
    """Write a time in UTC to the second."""
    if not unix_ms:
        return "–"
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{unix_ms} ms"
