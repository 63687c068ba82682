"""What groups of commands share: `bsfg gate` alone lists, names get suggestions, a decision needs a reason.

What cannot be undone is told and asked for first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bsfg.cli.output import say
from bsfg.errors import InvalidArgument

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Reason = Annotated[
    str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; it is recorded with your name.", show_default=False)
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking; needed where nobody can be asked.")]


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
