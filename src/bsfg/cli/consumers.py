"""`bsfg consumers`: list, add and retire the named durable consumers of a node."""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

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
    suggestion,
)
from bsfg.cli.common import consumers as known_consumers
from bsfg.cli.common import streams as known_streams
from bsfg.cli.connection import Target, admin_of, connects
from bsfg.cli.output import CellLines, console, count_text, examples, fitting, print_json, range_text, table, time_text
from bsfg.errors import ConsumerExists, InvalidArgument, UnknownConsumer, UnknownStream
from bsfg.ports import Buffer, ConsumerSpec, StartAt
from bsfg.wording import counted, offset_text

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.service import ConsumerView

app = typer.Typer(
    cls=ListsByDefault,
    help="List, add and retire the named durable consumers of a node.",
    epilog=examples(
        ("bsfg consumers", "who reads what, how far, and what each has left"),
        ("bsfg consumers add historian --stream operational", "an application that reads what other zones sent"),
        ("bsfg consumers add replay --stream audit --start time:2026-03-01T06:00:00Z --optional", "from a moment on"),
        ("bsfg consumers retire historian --reason 'replaced by historian-2'", "end one that never comes back"),
    ),
)


START_FORMS = "earliest, latest, offset:N or time:2026-03-01T06:00:00Z"


@app.command("list")
@connects("viewer", "operator")
def list_consumers(node: Target, json: Json = False) -> None:
    """List all consumers, retired ones included: position, backlog, and whether facts are kept for them."""
    found = node.run(lambda connection: admin_of(connection).consumers())
    if json:
        print_json([as_dict(view) for view in found])
    elif found:
        console().print(fitting(partial(_table, found), (True, False), prose=("kind",)))
    else:
        console().print("No consumer yet; make one with `bsfg consumers add NAME --stream STREAM`.")


@app.command("add")
@connects("operator")
def add(
    node: Target,
    name: Annotated[str, argument("NAME", "Its name, which stays taken even when it is retired.")],
    stream: Annotated[str, option("S", "The stream it reads.", autocompletion=known_streams, show_default=False)],
    buffer: Annotated[
        Buffer, typer.Option(help="forward: what other zones sent. store: what this zone produced.")
    ] = Buffer.FORWARD,
    start: Annotated[str, option("WHERE", f"Where it begins: {START_FORMS}.")] = "earliest",
    required: Annotated[
        bool, flag("--required/--optional", "Whether facts are kept until it has confirmed them.")
    ] = True,
    json: Json = False,
) -> None:
    """Create a durable consumer; the same again changes nothing.

    A required consumer keeps facts in the buffer until it has confirmed them, however long that takes: retire it when
    it will not come back. An optional one may find that facts have left, and is told which.
    """
    at, value = parse_start(start)
    spec = ConsumerSpec(name, stream, buffer, at, value, required)

    async def call(connection: Connection) -> tuple[ConsumerView, bool]:
        admin = admin_of(connection)
        known = {view.state.spec.name for view in await admin.consumers()}
        return await _create(admin, spec), name in known

    view, there = node.run(call)
    if json:
        print_json({**as_dict(view), "already_there": there})
        return
    what = "was there already, and is as you say" if there else "is there now"
    where = f"{view.state.spec.stream}/{view.state.spec.buffer}"
    text = f"Consumer {name} of {where} {what}; next offset {view.state.checkpoint.next_to_send}"
    console().print(Text(f"{text}, backlog {count_text(view.backlog)}."), soft_wrap=True)


@app.command("retire")
@connects("operator")
def retire(
    node: Target,
    name: Annotated[str, argument("NAME", "Which one.", autocompletion=known_consumers)],
    reason: Reason,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """End a consumer for good: it holds nothing back any longer, and what it had not confirmed is on record.

    This cannot be undone, and the name cannot be used again.
    """
    why = checked_reason(reason)

    async def backlog(connection: Connection) -> int:
        views = {view.state.spec.name: view for view in await admin_of(connection).consumers()}
        if name not in views:
            raise UnknownConsumer(f"there is no consumer {name!r}", hint=suggestion(name, views, "consumer"))
        return views[name].backlog

    left = node.run(backlog)
    told = (
        f"has not confirmed {counted(left, 'fact')}, of which gap records stay" if left else "has confirmed everything"
    )
    ask_first(f"{name} {told}, and its name cannot be used again.", yes)
    gaps = node.run(lambda connection: admin_of(connection).retire_consumer(name, why))
    missed = sum(gap.last - gap.first + 1 for gap in gaps)
    if json:
        print_json({"name": name, "missed": missed, "gaps": gaps})
        return
    had = f"It had not confirmed {counted(missed, 'fact')}: " if missed else "It had confirmed everything."
    ranges = ", ".join(range_text(gap.first, gap.last) for gap in gaps)
    console().print(Text(f"Consumer {name} is retired. {had}{ranges}{', recorded as gaps.' if missed else ''}"))


def parse_start(text: str) -> tuple[StartAt, int]:
    """Read a start position: ``earliest``, ``latest``, ``offset:42`` or ``time:2026-03-01T06:00:00Z``."""
    word, colon, value = text.partition(":")
    if not colon and word in (StartAt.EARLIEST, StartAt.LATEST):
        return StartAt(word), 0
    if word == StartAt.OFFSET and value.isascii() and value.isdigit():
        return StartAt.OFFSET, int(value)
    if word == StartAt.TIME and colon:
        return StartAt.TIME, _unix_ms(value)
    raise InvalidArgument(f"--start {text!r} is none of {START_FORMS}")


def _unix_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"--start: {text!r} is not a time such as 2026-03-01T06:00:00Z") from None
    if moment.tzinfo is None:
        if text != date.isoformat(moment.date()):
            hint = "Add Z for UTC, or an offset such as +01:00."
            raise InvalidArgument(f"--start: the time {text!r} needs a time zone", hint=hint)
        moment = moment.replace(tzinfo=UTC)
    return max(0, int(moment.timestamp() * 1000))


def as_dict(view: ConsumerView) -> dict[str, Any]:
    """Give the JSON form of a consumer."""
    state = view.state
    spec = state.spec
    return {
        "name": spec.name,
        "stream": spec.stream,
        "buffer": str(spec.buffer),
        "required": spec.required,
        "start": str(spec.start),
        "start_value": spec.start_value,
        "committed": state.checkpoint.committed,
        "next_to_send": state.checkpoint.next_to_send,
        "ranges": state.ranges,
        "backlog": view.backlog,
        "log_id": state.log_id,
        "created_unix_ms": state.created_unix_ms,
        "retired_reason": state.retired_reason,
    }


async def _create(admin: AdminClient, spec: ConsumerSpec) -> ConsumerView:
    try:
        return await admin.create_consumer(spec)
    except ConsumerExists as error:
        there = [view.state.spec for view in await admin.consumers() if view.state.spec.name == spec.name]
        raise ConsumerExists(f"consumer {spec.name} exists as {_settings(there[0])}", hint=error.hint) from None
    except UnknownStream as error:
        names = [buffer["stream"] for buffer in (await admin.status())["buffers"]]
        raise UnknownStream(error.message, hint=suggestion(spec.stream, names, "stream")) from None


def _settings(spec: ConsumerSpec) -> str:
    kind = "required" if spec.required else "optional"
    return f"a consumer of {spec.stream}/{spec.buffer} from {_start_text(spec)}, {kind}"


def _start_text(spec: ConsumerSpec) -> str:
    if spec.start == "offset":
        return f"offset:{spec.start_value}"
    return f"time:{time_text(spec.start_value)}" if spec.start == "time" else str(spec.start)


def _table(views: list[ConsumerView], wide: bool) -> Any:
    from bsfg.cli.status import STYLES
    from bsfg.node.status import backlog_level

    columns: tuple[str, ...] = ("consumer", "confirmed", "backlog", "kind")
    if wide:
        columns = ("consumer", "of", "confirmed", "backlog", "kind", "start", "created")
    result = table(*columns, right=("confirmed", "backlog"))
    for view in views:
        state, spec = view.state, view.state.spec
        backlog = Text(count_text(view.backlog), STYLES[backlog_level(view.backlog)])
        kind = Text("required" if spec.required else "optional")
        if state.retired_reason is not None:
            backlog, kind = Text("–", "dim"), Text(f"retired: {state.retired_reason}" if wide else "retired", "dim")
        where = f"{spec.stream}/{spec.buffer}"
        row: list[str | Text] = [spec.name, where] if wide else [CellLines(spec.name, f"  {where}")]
        row += [offset_text(state.checkpoint.committed), backlog, kind]
        result.add_row(*row, *((_start_text(spec), time_text(state.created_unix_ms)) if wide else ()))
    return result
