"""`bsfg streams`: where the buffers of a node begin and end, how far they are confirmed, and truncation by hand."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import Json, ListsByDefault, Reason, Yes, argument, ask_first, checked_reason, option, suggestion
from bsfg.cli.common import streams as known_streams
from bsfg.cli.connection import Target, admin_of, connects
from bsfg.cli.output import CellLines, console, examples, fitting, print_json, table
from bsfg.errors import UnknownStream
from bsfg.ports import Buffer
from bsfg.wording import counted, offset_text

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection
    from bsfg.wire.service import FrontierView

app = typer.Typer(
    cls=ListsByDefault,
    help="Show how far the buffers of a node are confirmed, and truncate them by hand.",
    epilog=examples(
        ("bsfg streams", "where each buffer begins and ends, and what everybody has confirmed"),
        ("bsfg streams truncate operational --before 120000 --reason 'disk is needed'", "let go what is confirmed"),
    ),
)


@app.command("list")
@connects("viewer", "operator")
def list_streams(node: Target, json: Json = False) -> None:
    """List all buffers with their frontier: the last offset that every required consumer has confirmed."""
    found = node.run(_frontiers)
    if json:
        print_json([as_dict(view) for view in found])
    else:
        console().print(fitting(partial(_table, found), (True, False)))


@app.command("truncate")
@connects("operator")
def truncate(
    node: Target,
    stream: Annotated[str, argument("STREAM", "Which one.", autocompletion=known_streams)],
    before: Annotated[int, option("N", "The first offset that stays.", min=0, show_default=False)],
    reason: Reason,
    buffer: Annotated[
        Buffer, typer.Option(help="store: what this zone produced. forward: what other zones sent.")
    ] = Buffer.STORE,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove everything below an offset at once, whatever its age; keys stay for the key horizon.

    Refused beyond the frontier, and while the link of a required consumer stands still. This cannot be undone.
    """
    why = checked_reason(reason)
    ask_first(f"What {stream}/{buffer} holds below {before} leaves at once.", yes)

    async def call(connection: Connection) -> FrontierView:
        admin = admin_of(connection)
        try:
            return await admin.truncate_before(stream, before, why, buffer=buffer)
        except UnknownStream as error:
            names = [each["stream"] for each in (await admin.status())["buffers"]]
            raise UnknownStream(error.message, hint=suggestion(stream, names, "stream")) from None

    view = node.run(call)
    if json:
        print_json(as_dict(view))
        return
    held = counted(view.end - view.start, "fact")
    console().print(Text(f"{view.stream}/{view.buffer} begins at {view.start} now and holds {held}."))


def as_dict(view: FrontierView) -> dict[str, Any]:
    """Give the JSON form of a frontier."""
    return {**asdict(view), "buffer": str(view.buffer)}


async def _frontiers(connection: Connection) -> list[FrontierView]:
    admin = admin_of(connection)
    buffers = (await admin.status())["buffers"]
    return [await admin.frontier(each["stream"], Buffer(each["buffer"])) for each in buffers]


def _table(views: list[FrontierView], wide: bool) -> Any:
    numbers = ("begins", "frontier", "ends")
    result = table("buffer", *numbers, *(("waits for",) if wide else ()), right=numbers)
    for view in views:
        names = [f"{name} (link)" if name in view.held_by else name for name in view.slowest]
        names += [f"{name} (link)" for name in view.held_by if name not in view.slowest]
        waits = ", ".join(names) or "nobody"
        frontier = offset_text(view.frontier) if names else "–"
        name = f"{view.stream}/{view.buffer}"
        shown = name if wide else CellLines(name, "  waits for", *(f"  {each}" for each in names or ["nobody"]))
        result.add_row(shown, str(view.start), frontier, str(view.end), *([waits] if wide else ()))
    return result
