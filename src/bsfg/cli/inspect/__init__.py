"""`bsfg inspect`: what is in a data folder, from the overview down to single entries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bsfg.cli.common import argument, checked_folder, flag, option
from bsfg.cli.output import advance, examples, print_json, progress_bar
from bsfg.errors import InvalidArgument
from bsfg.ports import Buffer

app = typer.Typer()

EPILOG = examples(
    ("bsfg inspect data", "streams, segments, consumers and their lag, gaps, quarantine"),
    ("bsfg inspect data --json | jq '.consumers[] | {name, lag}'", "the same for a program"),
    ("bsfg inspect data --stream operational --from 100 --to 120", "look at some entries"),
    ("bsfg inspect data --stream audit --buffer forward --export > audit.jsonl", "write all entries as JSON Lines"),
    ("bsfg inspect data --stream operational --subject 'urn:line-7:*' --export", "only some subjects"),
    (
        "bsfg inspect data --stream operational --buffer forward --from-zone plant-a --export --facts > facts.jsonl",
        "what a zone has said, for `bsfg append` to give it back after it was restored",
    ),
)


@app.command(epilog=EPILOG)
def inspect(
    folder: Annotated[
        Path, argument("DIR", "The data folder of a zone: the one with bsfg.json in it.", readable=False)
    ],
    *,
    stream: Annotated[str | None, option("S", "Only this stream.")] = None,
    buffer: Annotated[Buffer | None, typer.Option(help="Only this buffer.")] = None,
    first: Annotated[int | None, option("N", "Show entries from this offset on.", "--from", min=0)] = None,
    last: Annotated[int | None, option("M", "Show entries up to this offset, inclusive.", "--to", min=0)] = None,
    subject: Annotated[str | None, option("TEXT", "Show entries of this subject; * stands for any text.")] = None,
    predicate: Annotated[str | None, option("TEXT", "Show entries with this predicate; * stands for any text.")] = None,
    from_zone: Annotated[str | None, option("Z", "Show entries that this zone said.")] = None,
    export: Annotated[
        bool, flag("--export", "Write the entries to stdout as JSON Lines, gap records included.")
    ] = False,
    facts: Annotated[bool, flag("--facts", "With --export: leave gap records out, for `bsfg append` to read.")] = False,
    json: Annotated[bool, flag("--json", "Print everything as one JSON document.")] = False,
) -> None:
    """Show what is in a data folder: streams, segments, offsets, sizes, consumers, gaps, quarantine, key index.

    It only reads and needs no node: the writer may be alive, dead or on another machine. A range or a filter shows
    entries instead of the overview; --export writes them all, one JSON object a line. A range that is not there is a
    line {"gap": …} that says why, never silence.
    """
    from bsfg.cli.inspect import view
    from bsfg.cli.inspect.gather import gather
    from bsfg.cli.inspect.view import show
    from bsfg.stores.log.reader import open_folder

    checked_folder(folder)
    choice = view.EntryChoice(first=first, last=last, subject=subject, predicate=predicate, from_zone=from_zone)
    if facts and not export:
        raise InvalidArgument("--facts says how to export", hint="Add --export.")
    if export or choice:
        log = view.the_log(open_folder(folder), stream, buffer)
        if export:
            view.export(log, choice, with_gaps=not facts)
        elif json:
            print_json(view.as_dicts(log, choice))
        else:
            view.show_entries(log, choice)
        return
    with progress_bar("reading") as bar:
        info = gather(folder, stream, buffer, progress=lambda done, total: advance(bar, done, total))
    if not info.logs and (stream or buffer):
        raise InvalidArgument(
            f"there is no log {stream or '*'}/{buffer or '*'} in {folder}", hint="Leave it out to see all."
        )
    if json:
        print_json(info)
    else:
        show(info)
    if any(log.error for log in info.logs):
        raise typer.Exit(1)
