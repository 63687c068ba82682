"""The frame around all commands: loading them, and turning whatever goes wrong into an exit code and a sentence."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

import bsfg
from bsfg.cli import COMMANDS, SUMMARIES
from bsfg.cli.output import console, examples, hush, print_failure
from bsfg.errors import BsfgError, ExtraMissing, StorageUnreadable

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

FORESEEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""What may happen to every command that opens a file."""

_VALUES = (
    (r"Input should be a valid number\b.*", "it must be a number"),
    (r"Input should be a valid integer\b.*", "it must be a whole number"),
    (r"Input should be greater than or equal to ", "it must be at least "),
    (r"Input should be less than or equal to ", "it must be at most "),
    (r"Input should be (greater|less) than ", r"it must be \1 than "),
    (r"Value error, ", ""),
)
"""What the library that reads values says of them, and what we say."""

EPILOG = examples(
    ("bsfg demo", "watch nothing get lost while the network is cut and a node is killed"),
    ("bsfg verify data", "check every byte of a data folder"),
    ("bsfg inspect data", "see what is in it"),
    ("bsfg COMMAND --help", "learn one command, with examples"),
)


class LazyGroup(TyperGroup):
    """The group of all commands; a command's module is imported when the command is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands in the order of the table."""
        return list(COMMANDS)

    _is_listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List all commands without loading one."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load a command, or give what is known of it without."""
        if self._is_listing:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _escaped(load(cmd_name))
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was asked for, or suggest one that is spelt alike."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            like = get_close_matches(args[0], COMMANDS)
            meant = f"Did you mean {' or '.join(map(repr, like))}?" if like else f"There are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a reader of our output that has seen enough (`| head`) ends it quietly."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        return result


def load(name: str) -> Any:
    """Import the module of a command and build the command."""
    # Here, because what commands share takes a fifth of the time in which `bsfg --help` is there.
    from bsfg.cli.common import command_of

    command = command_of(import_module(COMMANDS[name]).app, name)
    _reflow_help(command)
    return command


def _reflow_help(command: Any) -> None:
    """Join the lines of each paragraph, so that the width of the terminal decides where they break."""
    if command.help:
        paragraphs = re.split(r"\n\s*\n", command.help.strip())
        command.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    for child in getattr(command, "commands", {}).values():
        _reflow_help(child)


def _escaped(command: Any) -> Any:
    """Keep square brackets in help texts, which would be taken for markup: a section [identities] is no style."""
    command.help = escape(command.help) if command.help else None
    for param in command.params:
        if getattr(param, "help", None):
            param.help = escape(param.help)
    for child in getattr(command, "commands", {}).values():
        _escaped(child)
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"bsfg {bsfg.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """BSFG, a bidirectional store-and-forward gateway: facts cross zones durably, once per key, and nobody blocks."""


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; whatever happens, the user sees a sentence and never a traceback."""
    given = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in given
    console.cache_clear()
    TyperOption.display_type_rich = _value_shown  # type: ignore[method-assign, assignment]
    if {"-h", "--help"} & set(given):
        _fold_names()
    try:
        outcome = get_command(app).main(given, prog_name="bsfg", standalone_mode=False)
        code = outcome if isinstance(outcome, int) else 0
    except typer.TyperException as problem:
        code = _usage(problem, as_json)
    except BsfgError as error:
        code = _failed(error, as_json)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except ImportError as error:
        missing = ExtraMissing.behind(error, _command(given))
        code = _unexpected(error, as_json) if missing is None else _failed(missing, as_json)
    except OSError as error:
        code = _system(error, as_json)
    except Exception as error:
        code = _unexpected(error, as_json)
    return _flushed(code)


_VALUE_OF_TYPER = TyperOption.display_type_rich


def _value_shown(option: TyperOption, ctx: Any) -> str | None:
    """Show the kind of an option's value, and none where it takes none: `--json <bool>` would ask for a word."""
    return None if option.is_flag else _VALUE_OF_TYPER(option, ctx)


def _fold_names() -> None:
    """Have long names of options and in what is said of them go on in the next line of a narrow window, uncut."""
    from rich.columns import Columns
    from typer import rich_utils

    def folded(items: list[Any]) -> Columns:
        return Columns([_uncut(item) for item in items])

    rich_utils.Columns = folded  # type: ignore[attr-defined, assignment]
    rich_utils.highlighter = partial(_folded, rich_utils.OptionHighlighter())  # type: ignore[assignment]
    rich_utils.negative_highlighter = partial(_folded, rich_utils.NegativeOptionHighlighter())  # type: ignore[assignment]


def _uncut(item: Any) -> Any:
    from rich.text import Text

    if isinstance(item, Text):
        item.overflow = "fold"
    return item


def _folded(highlighter: Any, text: Any) -> Any:
    from rich.text import Text

    return highlighter(Text(text, overflow="fold") if isinstance(text, str) else text)


def _command(given: Sequence[str]) -> str:
    """Name the command that was given."""
    words = [word for word in given[:1] if word in COMMANDS]
    return " ".join(("bsfg", *words))


def _usage(problem: Any, as_json: bool) -> int:
    """Say what is wrong with the command line and where its help is; no arguments at all just show the help."""
    message = problem.format_message()
    for theirs, ours in _VALUES:
        message = re.sub(theirs, ours, message)
    if closed := re.search(r"path '(.*)' is not readable", message, re.IGNORECASE | re.DOTALL):
        return _failed(StorageUnreadable(f"{closed[1]} cannot be read: Permission denied"), as_json)
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "bsfg"
    if message:
        hint = f"Run `{path} --help` to see what it takes, with examples."
        print_failure({"code": "usage", "message": message, "retryable": False, "hint": hint}, as_json=as_json)
    return EXIT_USAGE


def _failed(error: BsfgError, as_json: bool) -> int:
    if os.environ.get("BSFG_DEBUG") == "1":
        traceback.print_exc()
    print_failure(error.to_dict(), as_json=as_json)
    return EXIT_ERROR


def _system(error: OSError, as_json: bool) -> int:
    """Say what the system did not allow or had no room for; anything else of it is as unexpected as the rest."""
    if error.filename is None or error.errno not in FORESEEN:
        return _unexpected(error, as_json)
    from bsfg.disk import translated

    return _failed(translated(error, f"working on {error.filename}"), as_json)


def _unexpected(error: Exception, as_json: bool) -> int:
    hint = f"{BsfgError.default_hint} BSFG_DEBUG=1 shows where it happened."
    return _failed(BsfgError(f"{type(error).__name__}: {error}", hint=hint), as_json)


def _flushed(code: int) -> int:
    """Bring out what is still buffered, so that a closed pipe is noticed here and not by the interpreter."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = EXIT_BROKEN_PIPE
    if code == EXIT_BROKEN_PIPE:
        hush()
    return code
