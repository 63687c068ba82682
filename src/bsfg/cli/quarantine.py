"""`bsfg quarantine`: facts that were refused for good and kept aside: look, try again, take them out, give them up."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from bsfg.cli.common import (
    Json,
    ListsByDefault,
    Reason,
    Yes,
    argument,
    ask_first,
    checked_reason,
    flag,
    option,
    streams,
    suggestion,
)
from bsfg.cli.connection import Target, admin_of, connects
from bsfg.cli.output import console, count_text, examples, fitting, json_line, pairs, print_json, table, time_text
from bsfg.errors import InvalidArgument, UnknownStream
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.service import QuarantinedView, QuarantinePage

app = typer.Typer(
    cls=ListsByDefault,
    help="See, retry, export and drop facts that were refused for good and kept aside.",
    epilog=examples(
        ("bsfg quarantine", "what is in quarantine, and why"),
        ("bsfg quarantine show operational/forward/3", "one of them with its fact"),
        ("bsfg quarantine retry 3 --reason 'the other copy was dropped'", "put it again"),
        ("bsfg quarantine export > quarantine.jsonl", "all of them as JSON Lines, for whoever must decide"),
        ("bsfg quarantine drop 3 --reason 'agreed with plant-a, ticket 815'", "give it up, which is recorded"),
    ),
)

_NOTHING = "Nothing is in quarantine."

Id = Annotated[str, argument("ID", "As listed: stream/buffer/number; the number if it is clear.")]
Ids = Annotated[list[str] | None, argument("ID...", "As listed; the number alone if it is clear.")]
All = Annotated[bool, flag("--all", "All of them, or all of --stream.")]
Limit = Annotated[int, option("N", "At most this many.", min=1, max=1_000)]
After = Annotated[str, option("ID", "Only what follows this id, as the page before says.", show_default=False)]
StreamOption = Annotated[str | None, option("S", "Only this stream.", autocompletion=streams, show_default=False)]


@app.command("list")
@connects("viewer", "operator")
def list_quarantine(
    node: Target, stream: StreamOption = None, limit: Limit = 100, after: After = "", json: Json = False
) -> None:
    """List what is in quarantine: which fact, why it was refused, and where the one stands that was there first."""
    page = node.run(lambda connection: _page(admin_of(connection), stream, after, limit))
    if json:
        print_json([as_dict(view) for view in page.views])
        return
    shown = fitting(partial(_table, page.views), (True, False), prose=("fact",)) if page.views else _NOTHING
    console().print(shown)
    if page.following:
        console().print(
            f"{counted(page.total, 'fact')} in all; the next ones: bsfg quarantine list --after {page.following}"
        )


@app.command("show")
@connects("viewer", "operator")
def show(node: Target, id: Id, json: Json = False) -> None:
    """Show one quarantined fact with its content, and the reason it was refused for."""

    async def call(connection: Connection) -> QuarantinedView:
        admin = admin_of(connection)
        [listed] = await _chosen(admin, [id], stream=None, everything=False)
        return await _whole(admin, listed)

    view = node.run(call)
    if json:
        print_json({**as_dict(view), "facts": _messages(view)})
    else:
        _show(view)


@app.command("retry")
@connects("operator")
def retry(
    node: Target,
    reason: Reason,
    ids: Ids = None,
    everything: All = False,
    stream: StreamOption = None,
    json: Json = False,
) -> None:
    """Put quarantined facts again; what is taken now, or is there already, leaves quarantine.

    A fact whose id is taken by another one conflicts again and stays. So does one whose stored copy cannot be read.
    Ends with 1 if any stays.
    """
    why = checked_reason(reason)

    async def settle(admin: AdminClient, view: QuarantinedView) -> dict[str, Any]:
        settled, result = await admin.retry_quarantined(view.stream, view.quarantined.id, why, view.buffer)
        return {"id": name_of(view), "settled": settled, "result": result.name.lower()}

    done = _settle(node, ids or [], stream, everything, settle)
    words = {
        ("inserted", True): "is stored now",
        ("already_exists", True): "was stored already",
        ("already_exists", False): "is known, but what is stored cannot be read: it stays",
        ("conflict", False): "conflicts again: it stays",
    }
    _report(done, json, lambda row: words[row["result"], row["settled"]])
    if not all(row["settled"] for row in done):
        raise typer.Exit(1)


@app.command("drop")
@connects("operator")
def drop(
    node: Target,
    reason: Reason,
    ids: Ids = None,
    everything: All = False,
    stream: StreamOption = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give quarantined facts up for good; who did it and why stays on record. Export them first if in doubt."""
    why = checked_reason(reason)

    async def settle(admin: AdminClient, view: QuarantinedView) -> dict[str, Any]:
        await admin.drop_quarantined(view.stream, view.quarantined.id, why, view.buffer)
        return {"id": name_of(view), "settled": True}

    def asked(chosen: list[QuarantinedView]) -> None:
        what = name_of(chosen[0]) if len(chosen) == 1 else counted(len(chosen), "fact")
        ask_first(f"{what} in quarantine will be given up.", yes)

    _report(_settle(node, ids or [], stream, everything, settle, asked), json, lambda row: "is dropped")


@app.command("export")
@connects("viewer", "operator")
def export(
    node: Target,
    ids: Ids = None,
    stream: StreamOption = None,
    facts: Annotated[bool, flag("--facts", "Only the facts, in the form that `bsfg append` reads.")] = False,
) -> None:
    """Write quarantined facts to stdout as JSON Lines, one object a fact, with what is known of its refusal."""

    async def call(connection: Connection) -> None:
        admin = admin_of(connection)
        for listed in await _chosen(admin, ids or [], stream, everything=not ids):
            view = await _whole(admin, listed)
            messages = _messages(view)
            if not facts:
                # One that cannot be read has no fact to show, and is told of all the same.
                messages = [{"quarantined": as_dict(view), **message} for message in messages or ({},)]
            for message in messages:
                sys.stdout.buffer.write(json_line(message))
        sys.stdout.buffer.flush()

    node.run(call)


def name_of(view: QuarantinedView) -> str:
    """Give the full name of a quarantined fact; numbers count per buffer."""
    return f"{view.stream}/{view.buffer}/{view.quarantined.id}"


def as_dict(view: QuarantinedView) -> dict[str, Any]:
    """Give the JSON form of a quarantined fact, without its content."""
    return {"id": name_of(view), "number": view.quarantined.id, **view.to_dict()}


async def _page(admin: AdminClient, stream: str | None, after: str, limit: int) -> QuarantinePage:
    page = await admin.quarantine_page(stream, after, limit)
    if not page.views:
        await _check_stream(admin, stream)
    return page


async def _listed(admin: AdminClient, stream: str | None) -> list[QuarantinedView]:
    """List all that is in quarantine."""
    views = await admin.quarantine(stream)
    if not views:
        await _check_stream(admin, stream)
    return views


async def _check_stream(admin: AdminClient, stream: str | None) -> None:
    """Nothing at all may also mean that the stream's name is wrong."""
    if stream is not None:
        names = {buffer["stream"] for buffer in (await admin.status())["buffers"]}
        if stream not in names:
            raise UnknownStream(f"there is no stream {stream!r} here", hint=suggestion(stream, names, "stream"))


async def _whole(admin: AdminClient, listed: QuarantinedView) -> QuarantinedView:
    return await admin.quarantined(listed.stream, listed.quarantined.id, listed.buffer)


def _settle(
    node: Target,
    ids: list[str],
    stream: str | None,
    everything: bool,
    settle: Callable[[AdminClient, QuarantinedView], Awaitable[dict[str, Any]]],
    asked: Callable[[list[QuarantinedView]], None] = lambda chosen: None,
) -> list[dict[str, Any]]:
    if not ids and not everything:
        raise InvalidArgument(
            "which one is not said", hint="Give one or more ids, or --all; `bsfg quarantine` lists them."
        )

    chosen = node.run(lambda connection: _chosen(admin_of(connection), ids, stream, everything))
    if chosen:
        asked(chosen)

    async def call(connection: Connection) -> list[dict[str, Any]]:
        admin = admin_of(connection)
        return [await settle(admin, view) for view in chosen]

    return node.run(call)


async def _chosen(admin: AdminClient, ids: list[str], stream: str | None, everything: bool) -> list[QuarantinedView]:
    """Find what ids mean; a number alone means the one fact that has it."""
    views = await _listed(admin, stream)
    if everything and not ids:
        return views
    found = []
    called: dict[str, list[QuarantinedView]] = {}
    for view in views:
        for name in (name_of(view), str(view.quarantined.id)):
            called.setdefault(name, []).append(view)
    for id in dict.fromkeys(ids):
        fits = called.get(id, [])
        if not fits:
            hint = suggestion(id, [name_of(view) for view in views], "fact in quarantine")
            raise InvalidArgument(f"nothing in quarantine is called {id!r}", hint=hint)
        if len(fits) > 1:
            hint = f"Give the whole id: {' or '.join(name_of(view) for view in fits)}."
            raise InvalidArgument(f"{id!r} could be several facts in quarantine", hint=hint)
        found += fits
    return found


def _messages(view: QuarantinedView) -> list[dict[str, Any]]:
    from bsfg.jsonform import message_to_dict

    return [message_to_dict(message) for message in view.quarantined.facts.to_messages()]


def _report(done: list[dict[str, Any]], json: bool, words: Callable[[dict[str, Any]], str]) -> None:
    if json:
        print_json(done)
        return
    for row in done:
        style = "green" if row["settled"] else "yellow"
        console().print(Text.assemble(f"{row['id']} ", (one_line(words(row)), style)), soft_wrap=True)
    if not done:
        console().print("Nothing is in quarantine.")


def _show(view: QuarantinedView) -> None:
    found = as_dict(view)
    there = found["existing_offset"]
    rows = {
        "refused": f"{time_text(found['at_unix_ms'])}, {found['reason']}",
        "fact": f"{found['from_zone']} {found['message_id']}",
        "there first": "–" if there is None else f"offset {there} of {view.stream}/{view.buffer}",
        "detail": found["detail"] or "–",
    }
    out = console()
    out.print(pairs(name_of(view), rows))
    for message in _messages(view):
        text = orjson.dumps(message, option=orjson.OPT_INDENT_2).decode()
        out.print(Text(text), soft_wrap=True)


def _table(views: Sequence[QuarantinedView], wide: bool) -> Any:
    extra = ("refused", "there first") if wide else ()
    result = table("id", "reason", "fact", *extra, right=("there first",))
    for view in views:
        found = as_dict(view)
        row = [name_of(view), found["reason"], Text(f"{found['from_zone']} {found['message_id']}")]
        there = "–" if found["existing_offset"] is None else count_text(found["existing_offset"])
        result.add_row(*row, *((time_text(found["at_unix_ms"]), there) if wide else ()))
    return result
