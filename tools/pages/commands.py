"""The command line's reference page, written from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text
from typer.main import get_command

from bsfg.cli import COMMANDS
from bsfg.cli.app import app, load

INTRODUCTION = """\
# Command line

This page is written from the commands themselves by `make reference`; `bsfg COMMAND --help` says the same.

| Exit code | Meaning |
|---|---|
| 0 | done; nothing is wrong |
| 1 | an error, named by its code, or a finding: damage, a loss, a failed check |
| 2 | the command line itself is wrong |
| 3 | `pipeline ingest`: done, but rows were rejected |
| 130, 143 | interrupted by Ctrl-C, ended by SIGTERM |
| 141 | the reader of the output had seen enough (`\\| head`) |

An error is two lines on stderr, `error[code]: what happened` and `hint: what to do`. With `--json` it is also a JSON
object on stdout with `code`, `message`, `retryable`, `hint` and perhaps `details`. The codes are stable, and the same
in Python and on the wire.

Colours follow the terminal and `NO_COLOR`; the width follows the terminal and `COLUMNS`. Progress is shown on stderr,
and only to a terminal. `BSFG_DEBUG=1` adds where in the source an error arose.
"""


def page() -> str:
    """Write the whole page."""
    root = typer.Context(get_command(app), info_name="bsfg")
    listed = "\n".join(f"- [`bsfg {name}`](#bsfg-{name}): {_first_sentence(load(name))}" for name in COMMANDS)
    sections = [section for name in COMMANDS for section in _sections(load(name), name, root)]
    return "\n".join([INTRODUCTION, listed, "", *sections])


def commands(name: str) -> Iterator[tuple[str, Any]]:
    """Give a command and its sub-commands with their full names."""
    return _with_children(load(name), f"bsfg {name}")


def _with_children(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _with_children(child, f"{path} {name}")


def _first_sentence(command: Any) -> str:
    return str(command.help or "").split("\n\n")[0]


def _sections(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=name, parent=parent)
    level = "##" if parent.parent is None else "###"
    yield f"{level} `{context.command_path}`\n"
    if command.help:
        yield command.help + "\n"
    children = getattr(command, "commands", {})
    if not children:
        yield _usage(command, context)
    yield from _parameters(command, context)
    if command.epilog:
        yield _examples(command.epilog)
    for child_name, child in children.items():
        if not child.hidden:
            yield from _sections(child, child_name, context)


def _usage(command: Any, context: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    names = [_argument(param) if param.required else f"[{_argument(param)}]" for param in arguments]
    return "\n".join(["```", " ".join([context.command_path, *names, "[OPTIONS]"]), "```", ""])


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return f"{name}..." if param.nargs != 1 and not name.endswith("...") else str(name)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    rows = []
    for param in command.params:
        record = param.get_help_record(context)
        if record is None or getattr(param, "hidden", False):
            continue
        name = _argument(param) if param.param_type_name == "argument" else record[0]
        meaning = " ".join(record[1].split())
        rows.append(f"| `{_cell(name)}` | {_cell(meaning)} |")
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _examples(epilog: str) -> str:
    """Write the examples as a block that can be copied: a comment, then what to type."""
    lines = Text.from_markup(epilog).plain.splitlines()[1:]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    body = [line for command, meaning in pairs for line in (f"# {meaning.strip()}", command.strip())]
    return "\n".join(["```sh", *body, "```", ""])
