"""What commands share: groups and names, what a shell completes, data folders, and ending in order when asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from bsfg.cli.output import say
from bsfg.errors import InvalidArgument, NotAFolder, StorageUnreadable

Result = TypeVar("Result")
EXIT_TERMINATED = 128 + signal.SIGTERM


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Have signals do something else while a block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, usual in before:
            signal.signal(number, usual)


def orderly_end() -> AbstractContextManager[None]:
    """Let SIGTERM end a block by an exception, with the exit code that a shell expects."""
    return handled(_end, signal.SIGTERM)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine inside `orderly_end`; SIGTERM cancels it, so that it is not torn apart in mid-step."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(EXIT_TERMINATED)
    finally:
        # The loop gave the signal back to the system when it closed.
        signal.signal(signal.SIGTERM, _end)


MARK = "bsfg.json"


def checked_folder(path: Path) -> Path:
    """Give the path of a data folder, or raise `NotAFolder` with the folder that was probably meant."""
    try:
        if (path / MARK).is_file():
            return path
        if not path.exists():
            raise NotAFolder(f"there is no folder {path}")
        if not path.is_dir():
            raise NotAFolder(f"{path} is a file, not a folder")
        empty = not os.listdir(path)
    except OSError as error:
        raise StorageUnreadable(f"{path} cannot be read: {error.strerror}") from None
    # List the folders around a path: those that a user is likely to mix up with it.
    near = next((folder for folder in [path / "data", *path.parents[:4]] if (folder / MARK).is_file()), None)
    hint = f"Did you mean {near}?" if near is not None else None
    raise NotAFolder(f"{path} is empty" if empty else f"there is no {MARK} in {path}", hint=hint)


def config_or_data(config: Path | None, data: Path | None, what: str) -> Path:
    """Give the zone's file that a command means unless it is given a data folder alone; both at once contradict."""
    if data is not None and config is not None:
        raise InvalidArgument(f"--config and --data both say {what}", hint="Choose one.")
    path = config or Path("zone.toml")
    if data is None and config is None and not path.is_file():
        hint = "Give --config zone.toml, or --data with a data folder."
        raise InvalidArgument("which zone is not said, and there is no zone.toml here", hint=hint)
    return path


def option(metavar: str, says: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option with a value: how the value is shown, what it is for, and its names unless the usual one."""
    return typer.Option(*names, metavar=metavar, help=says, rich_help_panel=panel, **more)


def argument(metavar: str, says: str, **more: Any) -> Any:
    """Declare an argument likewise."""
    return typer.Argument(metavar=metavar, help=says, **more)


def flag(name: str, says: str, *names: str, panel: str | None = None) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, *names, help=says, rich_help_panel=panel)


Json = Annotated[bool, flag("--json", "Print the result as JSON.")]
Reason = Annotated[str, option("TEXT", "Why; it is recorded with your name.", "--reason", "-r", show_default=False)]
Yes = Annotated[bool, flag("--yes", "Do it without asking; needed where nobody can be asked.", "-y")]


def moment(option: str, text: str | None) -> int | None:
    """Read a moment: a time as such, or how long ago."""
    from bsfg.clock import SystemClock
    from bsfg.config.kinds import DURATION, WrongValue

    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return int(1000 * (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        pass
    try:
        return SystemClock().now_unix_ms() - int(1000 * DURATION.read(text))
    except WrongValue:
        hint = "Write 30m, 24h or 7d for so long ago, or a time such as 2026-06-30T12:00:00Z."
        raise InvalidArgument(f"{option} {text!r} is neither a time nor a duration", hint=hint) from None


def command_of(app: typer.Typer, name: str) -> Any:
    """Build a command of its application, without the options by which a shell installs its completion."""
    command = get_command(app)
    command.name = name
    if not command.epilog and isinstance(app.info.epilog, str):
        command.epilog = app.info.epilog
    command.params = [param for param in command.params if not (param.name or "").endswith("_completion")]
    return command


class ListsByDefault(TyperGroup):
    """A group that lists when it is given no command: `bsfg gate --json` is `bsfg gate list --json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command ``list`` where there is none."""
        only_options = bool(args) and args[0].startswith("-") and not {"--help", "-h"} & set(args)
        # A shell that asks what can follow wants to hear the commands, so that nothing at all means nothing to it.
        if only_options or not (args or ctx.resilient_parsing):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def checked_reason(reason: str) -> str:
    """Give a reason, or say that one is needed."""
    if not reason.strip():
        raise InvalidArgument(
            "--reason is empty", hint="Say in a few words why; whoever looks at the record later will ask."
        )
    return reason.strip()


def ask_first(what: str, yes: bool) -> None:
    """Tell what is going to happen and cannot be undone, and go on only if that is wanted."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidArgument(f"{what} This cannot be undone", hint="Add --yes to do it without being asked.")
    if not typer.confirm(f"{what} This cannot be undone. Go on?", err=True):
        say("Nothing was done.")
        raise typer.Exit(1)


def suggestion(word: str, known: Iterable[str], what: str) -> str:
    """Give a hint for a name that is not there: the one that was probably meant, and all there are if they are few."""
    from bsfg.config.kinds import nearest

    names = sorted(set(known))
    if not names:
        return f"There is no {what} here."
    meant = nearest(word, names).removeprefix("; ").capitalize()
    listed = f"There are {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}."
    if len(names) == 1:
        listed = "" if meant else f"There is only {names[0]}."
    return f"{meant} {listed}".strip()


Complete = Callable[[typer.Context, str], list[str]]
Tables = dict[str, Any]


def _from_config(names: Callable[[Tables], Iterable[str]]) -> Complete:
    """Complete names that stand in the zone's file, without asking the node.

    Completion must never fail or wait: whatever goes wrong completes nothing, and the file is only read, not checked.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(Exception):
            given = ctx.params.get("config") or os.environ.get("BSFG_CONFIG") or "zone.toml"
            tables = tomllib.loads(Path(given).read_text(encoding="utf-8"))
            return [name for name in names(tables) if name.startswith(incomplete)]
        return []

    return complete


def _names(*kinds: str) -> Complete:
    return _from_config(lambda tables: [name for kind in kinds for name in tables.get(kind, {})])


def _peer_consumers(tables: Tables) -> list[str]:
    from bsfg.config import consumer_name
    from bsfg.ports import Buffer

    return [
        consumer_name(zone, stream, Buffer(buffer))
        for zone, row in tables.get("serve", {}).items()
        for stream in (tables["streams"] if "*" in row.get("streams", "*") else row["streams"])
        for buffer in row.get("buffers", ["store"])
    ]


gates = _names("links", "serve")
identities = _names("identities")
streams = _names("streams")
consumers = _from_config(_peer_consumers)
