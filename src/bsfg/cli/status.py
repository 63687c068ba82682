"""`bsfg status`: how a node is doing, at one look or all the time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bsfg.cli.common import flag, option
from bsfg.cli.connection import CONNECTION_ERRORS, Target, connects
from bsfg.cli.output import CellLines, console, examples, fitting, json_line, print_json, table
from bsfg.errors import BsfgError, RemoteError
from bsfg.node.status import (
    AUTONOMY_WARNING_HOURS,
    Document,
    HealthFinding,
    HealthLevel,
    as_json,
    autonomy,
    backlog_level,
    findings,
    link_now,
    mode_level,
    pipeline_level,
    worst,
)
from bsfg.ports import Buffer
from bsfg.retry import Retry
from bsfg.wording import (
    count_text,
    duration_text,
    hours_text,
    offset_text,
    one_line,
    percent_text,
    rate_text,
    size_text,
    time_text,
)

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection


STYLES = {HealthLevel.OK: "green", HealthLevel.WARNING: "yellow", HealthLevel.ALERT: "bold red"}
WORDS = {HealthLevel.OK: "healthy", HealthLevel.WARNING: "warning", HealthLevel.ALERT: "ALERT"}
_FILL_LEVELS = {"healthy": HealthLevel.OK, "warning": HealthLevel.WARNING}
_CAPACITY_BAR, _NARROW_BAR = 20, 8
_ALL, _SOME, _LEAST = _ROOMS = 2, 1, 0
_NO_BARS = -1


def render(document: Document, *, width: int | None = None) -> RenderableType:
    """Draw a status document for a terminal of a width; unimportant columns go first."""
    columns = console().width if width is None else width
    found = findings(document)
    parts: list[RenderableType] = [_head(document, found)]
    if found:
        parts += [_findings(found)]
    parts += [Text(), Text("Streams", "bold"), fitting(partial(_buffers, document), (*_ROOMS, _NO_BARS), width=columns)]
    if document["consumers"]:
        parts += [Text("Consumers", "bold"), fitting(partial(_consumers, document), _ROOMS, width=columns)]
    if document["links"]:
        parts += [Text("Links", "bold"), fitting(partial(_links, document), _ROOMS, width=columns)]
    # Nodes of earlier versions know no pipelines.
    if document.get("pipelines"):
        parts += [Text("Pipelines", "bold"), fitting(partial(_pipelines, document), _ROOMS, width=columns)]
    return Group(*parts)


def mode_text(mode: str) -> Text:
    """Write the mode of a gate as a coloured word."""
    return Text(mode, STYLES[mode_level(mode)])


def bar(percent: float, width: int, style: str) -> Text:
    """Draw how full something is; from half a percent on it shows at least one block."""
    full = min(width, max(1 if percent >= 0.5 else 0, round(percent * width / 100)))
    return Text.assemble(("█" * full, style), ("░" * (width - full), "dim"))


def _head(document: Document, found: list[HealthFinding]) -> Text:
    level, soonest = worst(found), autonomy(document)
    up_seconds = (document["now_unix_ms"] - document["started_unix_ms"]) / 1000
    head = Text.assemble((str(document["zone"]), "bold"), "  ", (f"● {WORDS[level]}", STYLES[level]))
    head.append(f"  {time_text(document['now_unix_ms'])}\n", "dim")
    head.append(f"bsfg {document['version']}, up {duration_text(up_seconds)}; ")
    # Nodes of earlier versions do not say it; they know the log alone.
    storage = document.get("storage") or {"backend": "log", "durable": True}
    if storage["backend"] != "log":
        head.append(f"storage: {storage['backend']}{'' if storage['durable'] else ', which a restart empties'}; ")
    if nodes := document.get("nodes"):
        named = [
            [one_line(each["name"]) for each in nodes if each["active"] == is_active] for is_active in (True, False)
        ]
        head.append(f"active: {', '.join(named[0])}; stands by: {', '.join(named[1]) or 'nobody'}; ")
    configuration = document.get("configuration") or {}
    if waiting := configuration.get("waiting_for_restart"):
        head.append("waits for a restart: ")
        head.append(", ".join(waiting), "yellow")
        head.append("; ")
    if soonest is None:
        stores = [each for each in document["buffers"] if each["buffer"] == Buffer.STORE]
        is_known = all(each["facts_per_second"] is not None for each in stores)
        head.append(f"autonomy: {'no store buffer grew in the last minute' if is_known else 'not known yet'}")
    else:
        stream, hours = soonest
        style = "yellow" if hours < AUTONOMY_WARNING_HOURS else "green"
        head.append("autonomy: ")
        head.append(hours_text(hours), style)
        head.append(f" at the rate of the last minute ({stream})")
    return head


def _findings(found: list[HealthFinding]) -> RenderableType:
    lines = [
        # What is longer than a line goes on below its beginning.
        Padding(
            Text.assemble((WORDS[each.level], STYLES[each.level]), f" {one_line(f'{each.alert}: {each.says}')}"),
            (0, 0, 0, 2),
            expand=False,
        )
        for each in found
    ]
    return Group(Text(), *lines)


def _buffers(document: Document, room: int) -> RenderableType:
    extra = ("offsets", "waits", "gaps", "aside") if room >= _SOME else ()
    right = ("", "rate", "full in", "waits", "gaps", "aside")
    fill = ("fill",) if room == _NO_BARS else ("fill", "")
    result = table("stream", *fill, "rate", "full in", *extra, right=right)
    for buffer in document["buffers"]:
        style = STYLES[_FILL_LEVELS.get(buffer["fill"], HealthLevel.ALERT)]
        hours = buffer["hours_left"]
        row: list[str | Text] = [
            f"{buffer['stream']}/{buffer['buffer']}",
            bar(buffer["fill_percent"], _CAPACITY_BAR if room == _ALL else _NARROW_BAR, style),
            Text(_fill_text(buffer, room), style),
            "unknown" if buffer["facts_per_second"] is None else rate_text(buffer["facts_per_second"]),
            "–" if hours is None else hours_text(hours),
        ]
        if room == _NO_BARS:
            del row[1]
        if room >= _SOME:
            row += [_offsets(buffer), _waits(buffer), _some(buffer["gaps"]), _some(buffer["quarantined"])]
        result.add_row(*row)
    return result


def _fill_text(buffer: Document, room: int) -> str:
    percent = percent_text(buffer["fill_percent"])
    return f"{percent} of {size_text(buffer['capacity_bytes'])}" if room == _ALL else percent


def _offsets(buffer: Document) -> str:
    return f"{buffer['start']}–{buffer['end'] - 1}" if buffer["end"] > buffer["start"] else "–"


def _waits(buffer: Document) -> Text:
    """Write how long the oldest unconfirmed fact has waited, and of how long it may."""
    age_seconds, most_seconds = buffer.get("oldest_unconfirmed_seconds"), buffer.get("max_age_seconds")
    if age_seconds is None:
        return Text("–", "dim")
    level = HealthLevel.ALERT if buffer.get("expiry_near") else HealthLevel.OK
    of = "" if most_seconds is None else f" of {duration_text(most_seconds)}"
    return Text(f"{duration_text(age_seconds)}{of}", STYLES[level])


def _some(count: int) -> Text:
    return Text(count_text(count), "yellow" if count else "dim")


def _consumers(document: Document, room: int) -> RenderableType:
    wide = room == _ALL
    columns: tuple[str, ...] = ("consumer", "frontier", "backlog")
    if wide:
        columns = ("consumer", "of", "frontier", "backlog", "kind", "fetched")
    result = table(*columns, right=("frontier", "backlog", "fetched"))
    for consumer in document["consumers"]:
        name, where = consumer["name"], f"{consumer['stream']}/{consumer['buffer']}"
        row: list[str | Text] = [name, where] if wide else [CellLines(name, f"  {where}")]
        row.append(offset_text(consumer["committed"]))
        if consumer["retired_reason"] is not None:
            row += [Text("retired", "dim"), Text(str(consumer["retired_reason"]), "dim"), ""]
        else:
            row += _active(consumer, document)
        result.add_row(*row[: len(result.columns)])
    return result


def _active(consumer: Document, document: Document) -> list[str | Text]:
    backlog = Text(count_text(consumer["backlog"]), STYLES[backlog_level(consumer["backlog"])])
    return [backlog, "required" if consumer["required"] else "optional", _ago(consumer, document)]


def _ago(consumer: Document, document: Document) -> str:
    last = consumer["last_fetch_unix_ms"]
    return "–" if last is None else f"{duration_text(max(0, document['now_unix_ms'] - last) / 1000)} ago"


def _links(document: Document, room: int) -> RenderableType:
    wide = room == _ALL
    columns = ("link", "side", "mode", "lag", "backlog", "moved by") if wide else ("link", "mode", "lag", "backlog")
    result = table(*columns, right=("lag", "backlog"))
    leases = []
    for link in document["links"]:
        name, receives = link["link"], link["side"] == "receiver"
        row: list[str | Text] = [name, link["side"]] if wide else [f"{'from' if receives else 'to'}: {name}"]
        row += [mode_text(link["mode"]), *(_now(link, document) if receives else ("–", "–"))]
        lease = link["lease"] or ("nobody" if receives else "–")
        result.add_row(*row, *([lease] if wide else []))
        if receives and not wide:
            leases.append(Text(one_line(f"  {name} is moved by {lease}")))
    return Group(result, *leases)


def _now(link: Document, document: Document) -> tuple[Text, Text]:
    """Write lag and backlog of a link that is pulled."""
    now = link_now(link, document)
    if now.to_come is None:
        return Text("unknown", "dim"), Text("unknown", "dim")
    lag = Text("–", "dim") if now.lag is None else Text(duration_text(now.lag_seconds or 0), STYLES[now.lag])
    return lag, Text(count_text(now.to_come))


def _pipelines(document: Document, room: int) -> RenderableType:
    wide = room == _ALL
    columns = ("pipeline", "state", *(("runs", "failed", "facts", "next") if wide else ("next",)))
    result = table(*columns, right=("runs", "failed", "facts"))
    said = []
    for each in document["pipelines"]:
        name, kind, level = each["pipeline"], each["kind"], pipeline_level(each["state"])
        row: list[str | Text] = [f"{name} ({kind})", Text(each["state"], STYLES[level])]
        row += [count_text(each[name]) for name in ("runs", "failures", "facts")] if wide else []
        due = each["next_unix_ms"]
        result.add_row(*row, time_text(due) if due else "–")
        words = each["last_error"] if level != HealthLevel.OK else each["progress"]
        if words:
            said.append(Text(one_line(f"  {name}: {words}"), "" if level == HealthLevel.OK else STYLES[level]))
    return Group(result, *said)


app = typer.Typer()

EPILOG = examples(
    ("bsfg status --config plant/zone.toml", "streams, fill, frontiers, lag, links and what needs attention"),
    ("bsfg status --wait 30", "the same as soon as the node answers; after its start"),
    ("bsfg status --watch", "the same all the time, until Ctrl-C"),
    ("bsfg status --json | jq .autonomy_hours", "one value for a program"),
    ("bsfg status > /dev/null || echo look at the gateway", "the exit code for a script"),
)

WAIT_SECONDS = 0.2


@app.command(epilog=EPILOG)
@connects("viewer", "operator")
def status(
    node: Target,
    watch: Annotated[bool, flag("--watch", "Show it again and again, until Ctrl-C.", "-w")] = False,
    interval: Annotated[float, option("SECONDS", "How long --watch waits between two looks.", min=0.1)] = 2.0,
    wait: Annotated[float, option("SECONDS", "How long to wait for a node that does not answer yet.", min=0)] = 0.0,
    json: Annotated[bool, flag("--json", "Print the status as JSON; with --watch one document a line.")] = False,
) -> None:
    """Show how a node is doing: streams and fill, frontiers and backlogs, the mode and lag of every link, alerts.

    Autonomy is the time until the first store buffer is full if facts keep coming as they do and none leaves. The
    exit code is 0 when nothing is in alert, 1 when something is, or when the node cannot be asked. Warnings do not
    count.
    """
    if watch:
        code = _watch(node, interval, _json_line if json else _screen())
    else:
        retry = Retry(WAIT_SECONDS, WAIT_SECONDS, wait)
        document = node.run(lambda connection: retry.insist(lambda: _status(connection)))
        code = _exit_code(document)
        if json:
            print_json(as_json(document))
        else:
            console().print(render(document))
    if code:
        raise typer.Exit(code)


async def _status(connection: Connection) -> Document:
    from bsfg.wire.adminclient import AdminClient

    document = await AdminClient(connection).status()
    try:
        as_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError(f"the status of {connection.address} is in a form not known here: {error!r}") from None
    return document


def _exit_code(document: Document) -> int:
    return int(worst(findings(document)) == HealthLevel.ALERT)


def _watch(node: Target, interval: float, show: Callable[[Document | BsfgError], None]) -> int:
    """Show the status until Ctrl-C and give the exit code of the last one; a node that is away is shown as that."""
    code = 1

    async def look(connection: Connection) -> None:
        nonlocal code
        while True:
            try:
                seen: Document | BsfgError = await _status(connection)
                code = _exit_code(seen)  # type: ignore[arg-type]
            except CONNECTION_ERRORS as error:
                seen, code = await asyncio.to_thread(node.explained, error), 1
            show(seen)
            await asyncio.sleep(interval)

    try:
        node.run(look)
    except KeyboardInterrupt:
        pass
    finally:
        getattr(show, "close", lambda: None)()
    return code


def _json_line(seen: Document | BsfgError) -> None:
    document = {"error": seen.to_dict()} if isinstance(seen, BsfgError) else as_json(seen)
    sys.stdout.buffer.write(json_line(document))
    sys.stdout.buffer.flush()


def _screen() -> Callable[[Document | BsfgError], None]:
    """Give what shows a status: in place on a terminal, one after the other elsewhere."""
    out = console()
    return _LiveScreen() if out.is_terminal else lambda seen: out.print(_rendered(seen))


class _LiveScreen:
    """A terminal whose content is replaced by each new status."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(console=console(), screen=True, auto_refresh=False)
        self._live.start()

    def __call__(self, seen: Document | BsfgError) -> None:
        self._live.update(_rendered(seen), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _rendered(seen: Document | BsfgError) -> RenderableType:
    if isinstance(seen, BsfgError):
        return Text.assemble((f"{seen.code}: ", "bold red"), seen.message, f"\n{seen.hint}")
    return render(seen)
