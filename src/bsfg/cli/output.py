"""How every command speaks: tables for people, JSON for programs, errors and progress on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import orjson
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bsfg import wording
from bsfg.wording import one_line, printable, printable_json

count_text, size_text, time_text = wording.count_text, wording.size_text, wording.time_text

PIPE_COLUMNS = 200
"""The width of tables that no terminal limits: wide, so that lines stay whole for grep."""

_ANY_WIDTH, _PROSE_WIDTH = 1_000, 24


Room = TypeVar("Room")


class CleanConsole(Console):
    """A console that leaves out control characters: names, reasons and messages come from other zones, too.

    It also reads no markup: a name in brackets is a name.
    """

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        clean = (each if each.control else Segment(printable(each.text), each.style) for each in buffer)
        return super()._render_buffer(clean)

    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to the frame around the commands, which knows the right exit code."""
        raise BrokenPipeError


@cache
def console(stderr: bool = False) -> Console:
    """Give the console of stdout or stderr; colours, NO_COLOR and COLUMNS are as the user has them."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_COLUMNS
    return CleanConsole(stderr=stderr, highlight=False, emoji=False, markup=False, width=width)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    document = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)
    sys.stdout.write(printable_json(document).decode() + "\n")


def json_line(value: Any) -> bytes:
    """Write a value as one line of JSON, for commands that write many."""
    return printable_json(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE, default=str))


def say(text: str) -> None:
    """Tell something on stderr, as one line."""
    console(stderr=True).print(Text(one_line(text)), soft_wrap=True)


def print_failure(error: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Tell what went wrong, on stderr in two lines and, when JSON was asked for, in one on stdout as well.

    There it is a document by itself, and one line more of a command that has written lines before it failed.
    """
    if as_json:
        sys.stdout.write(json_line(dict(error)).decode())
    text = Text.assemble((f"error[{error['code']}]:", "bold red"), f" {error['message']}")
    console(stderr=True).print(text, soft_wrap=True)
    if error.get("hint"):
        console(stderr=True).print(Text.assemble(("hint:", "bold"), f" {error['hint']}"), soft_wrap=True)


def hush() -> None:
    """Send stdout nowhere, because nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class CellLines(Text):
    """A cell of several lines."""

    def __init__(self, *parts: str) -> None:
        super().__init__("\n".join(one_line(part) for part in parts))


class _Table(Table):
    """A table in which every cell is one line, unless it is made of `CellLines`: others' words cannot forge a row."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row; what is in a cell is taken as it is, not as markup."""
        super().add_row(*(_cell(each) for each in cells), **options)


def _cell(cell: Any) -> Any:
    if isinstance(cell, str):
        return Text(one_line(cell))
    if type(cell) is Text and one_line(cell.plain) != cell.plain:
        return Text(one_line(cell.plain), cell.style)
    return cell


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Make a table in the house style; the columns named in ``right`` hold numbers."""
    result = _Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return result


def fitting(
    draw: Callable[[Room], RenderableType],
    rooms: Sequence[Room],
    *,
    prose: tuple[str, ...] = (),
    width: int | None = None,
) -> RenderableType:
    """Draw a table with as much in it as fits without a word being broken: ``rooms`` is tried from the first on.

    The columns named in ``prose`` hold whole sentences, and go over several lines instead.
    """
    columns, options = width or console().width, console().options.update(max_width=_ANY_WIDTH)
    for room in rooms[:-1]:
        drawn = draw(room)
        parts = drawn.columns if isinstance(drawn, Table) else ()
        wrapped = [part for part in parts if part.header in prose]
        for part in parts:
            part.no_wrap = part not in wrapped
        for part in wrapped:
            part.max_width = _PROSE_WIDTH
        fits = Measurement.get(console(), options, drawn).maximum <= columns
        for part in wrapped:
            part.max_width = None
        if fits:
            return drawn
    return draw(rooms[-1])


def pairs(title: str, rows: Mapping[str, str]) -> Group:
    """Make a table of names and values with its title, which may be longer than it is wide."""
    result = _Table(box=None, show_header=False, pad_edge=False)
    result.add_column(style="cyan", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows.items():
        result.add_row(name, value)
    return Group(Text(one_line(title), "bold", overflow="fold"), result)


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


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of one step after the other; give what is told the step, how much is done and how much is."""
    with progress_bar("") as bar:
        tasks: dict[str, TaskID] = {}

        def progress(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing, total=total)
            bar.update(tasks[doing], completed=done, total=total)

        yield progress


def advance(bar: Progress, done: int, total: int) -> None:
    """Move the one task of a bar."""
    bar.update(bar.task_ids[0], completed=done, total=total)


def range_text(first: int | None, last: int | None) -> str:
    """Write a range of offsets, both ends inclusive; one that ends before it begins is empty."""
    if first is None or last is None:
        return ""
    if last < first:
        return "–"
    return str(first) if first == last else f"{first}–{last}"
