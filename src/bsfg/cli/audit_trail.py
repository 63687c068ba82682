"""`bsfg audit-trail`: who did what at a node, or was kept from it, read from its data folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import Json, ListsByDefault, checked_folder, config_or_data, flag, moment, option, suggestion
from bsfg.cli.output import CellLines, console, count_text, examples, print_json, size_text, table, time_text
from bsfg.errors import InvalidArgument
from bsfg.wording import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from bsfg.stores.log.files import DiskFiles
    from bsfg.trail import TrailEvent, TrailQuery, TrailRecord

app = typer.Typer(
    cls=ListsByDefault,
    help="See who did what at a node, or was kept from it: refusals, sign-ins, acts of operators, starts, backups.",
    epilog=examples(
        ("bsfg audit-trail --config plant-a/zone.toml", "the newest records; the node may run or not"),
        ("bsfg audit-trail --since 24h --action request_refused", "who was refused since yesterday"),
        ("bsfg audit-trail --identity plant-a-operator --json", "what one identity did, for a program"),
        ("bsfg audit-trail export --jsonl > trail.jsonl", "everything, oldest first, to keep elsewhere"),
        ("bsfg verify data", "check that nothing in it was altered, removed or moved"),
    ),
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The zone's file. Default: zone.toml.", envvar="BSFG_CONFIG")
]
DataOption = Annotated[Path | None, option("DIR", "A data folder, without a zone's file.", "--data")]
SinceOption = Annotated[str | None, option("TIME", "From here on: 24h, 7d …, or 2026-06-30T12:00:00Z.")]
UntilOption = Annotated[str | None, option("TIME", "Only before this: written as --since.")]
IdentityOption = Annotated[str | None, option("NAME", "Only this identity; `node` is the node.")]
ActionOption = Annotated[str | None, option("NAME", "Only this action, such as gate_held.")]

COUNT_MAX = 100
WIDE_COLUMNS = 110
SHOWN_ELSEWHERE = ("name", "addresses", "count", "code", "told")


@app.command("list")
def list_records(
    *,
    config: ConfigOption = None,
    data: DataOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    identity: IdentityOption = None,
    action: ActionOption = None,
    limit: Annotated[int, option("N", "The newest so many.", min=1)] = COUNT_MAX,
    json: Json = False,
) -> None:
    """List the newest records, the last at the end.

    It reads the data folder and only reads, beside a node that runs or after its end. Whoever runs it must be the owner
    of the folder: the trail is closed for others. What comes again and again is one record a minute with a count.
    """
    from bsfg.stores.log.trailfile import newest_first, read_head, told

    files, query = _files(config, data), _query(since, until, identity, action)
    with _reading(files):
        found = list(islice(newest_first(files, query), limit + 1))
        records, more = found[:limit][::-1], len(found) > limit
        waiting = [event for _, event in told(files) if event is not None and query.wants(event)]
        head = read_head(files)
    if json:
        listed = [record.document() for record in records]
        shown_head = None if head is None else {"number": head[0], "digest": head[1]}
        print_json(
            {"records": listed, "more": more, "waiting": [_waiting(event) for event in waiting], "head": shown_head}
        )
        return
    _show(records, waiting, more=more)


@app.command("export")
def export(
    *,
    config: ConfigOption = None,
    data: DataOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    identity: IdentityOption = None,
    action: ActionOption = None,
    jsonl: Annotated[bool, flag("--jsonl", "As JSON Lines, which is the one form there is.")] = True,
) -> None:
    """Write records to standard output as JSON Lines, oldest first, each with its digest and that of the one before."""
    import orjson

    from bsfg.stores.log.trailfile import oldest_first

    files, query = _files(config, data), _query(since, until, identity, action)
    with _reading(files):
        for record in oldest_first(files, query):
            sys.stdout.write(orjson.dumps(record.document()).decode() + "\n")


def _files(config: Path | None, data: Path | None) -> DiskFiles:
    from bsfg.stores.log.files import DiskFiles

    path = config_or_data(config, data, "which trail to read")
    if data is not None:
        return DiskFiles(checked_folder(data))
    from bsfg.config import load

    return DiskFiles(checked_folder(load(path).data_folder))


@contextmanager
def _reading(files: DiskFiles) -> Iterator[None]:
    from bsfg.stores.log.files import translated

    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = translated(error, f"reading the audit trail in {files.root}")
        failure.hint = "Run it as the user whose node writes the folder; the trail is closed for others."
        raise failure from None


def _query(since: str | None, until: str | None, identity: str | None, action: str | None) -> TrailQuery:
    from bsfg.trail import ACTIONS, TrailQuery

    if action is not None and action not in ACTIONS:
        raise InvalidArgument(f"there is no action {action!r}", hint=suggestion(action, ACTIONS, "action"))
    return TrailQuery(moment("--since", since), moment("--until", until), identity or "", action or "")


def _waiting(event: TrailEvent) -> dict[str, Any]:
    from bsfg.trail import TrailRecord

    document = TrailRecord(0, "", event).document()
    return {name: value for name, value in document.items() if name not in ("number", "before", "digest")}


def _show(records: list[TrailRecord], waiting: list[TrailEvent], *, more: bool) -> None:
    out = console()
    if not records and not waiting:
        out.print("There is no record of that kind.")
        return
    numbered = [(count_text(record.number), record.event) for record in records]
    out.print(_table([*numbered, *(("–", event) for event in waiting)], wide=out.width >= WIDE_COLUMNS))
    if waiting:
        out.print("Records without a number wait for the node to take them in.")
    if more:
        out.print(f"These are the newest {count_text(len(records))}; --limit or --since shows more.")


def _table(rows: list[tuple[str, TrailEvent]], *, wide: bool) -> Table:
    """Make a table: what happened beside who did it where there is room, and above it where there is not."""
    result = table("record", "when", "who", "what", right=("record",)) if wide else table("when", "what")
    result.columns[int(wide)].no_wrap = True
    for number, event in rows:
        when = time_text(event.at_unix_ms)
        if wide:
            who = _lines(Text(event.identity), *_where(event))
            result.add_row(number, when, who, _lines(_what(event), *_why(event)))
        else:
            by = "  ".join((event.identity, *_where(event)))
            result.add_row(_lines(Text(when), f"record {number}"), _lines(_what(event), by, *_why(event)))
    return result


def _lines(first: Text, *rest: str) -> Text:
    result = CellLines(first.plain, *rest)
    end = len(one_line(first.plain))
    for start, until, style in [(0, len(first), first.style), *first.spans]:
        result.stylize(style, start, min(until, end))
    result.stylize("dim", end)
    return result


def _where(event: TrailEvent) -> list[str]:
    """Say by what other name somebody came, and from where."""
    name, addresses = event.details.get("name"), event.details.get("addresses")
    other = [name] if isinstance(name, str) and name != event.identity else []
    listed = ", ".join(map(str, addresses)) if isinstance(addresses, list) and addresses else event.address
    return [*other, *([listed] if listed else [])]


def _what(event: TrailEvent) -> Text:
    text = Text(event.action, {"refused": "yellow", "failed": "red"}.get(event.outcome, "bold"))
    count = event.details.get("count")
    if isinstance(count, int):
        text.append(f" ×{count_text(count)}", "bold")
    return text.append(f" {event.about}", "") if event.about else text


def _why(event: TrailEvent) -> list[str]:
    """Say how it ended, why it was done, and the rest of what is known."""
    ended = (
        f"{event.outcome} by the rule {event.rule}" if event.outcome == "refused" else f"{event.outcome}: {event.rule}"
    )
    details = [_detail(*item) for item in event.details.items() if item[0] not in SHOWN_ELSEWHERE]
    return [line for line in (ended if event.rule else "", event.reason, ", ".join(details)) if line]


def _detail(name: str, value: object) -> str:
    """Write a detail; of a digest the beginning is enough to look at."""
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"not {name.replace('_', ' ')}"
    if name.endswith("_unix_ms") and isinstance(value, int):
        return f"{name.removesuffix('_unix_ms')} {time_text(value)}"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{name.removesuffix('_bytes')} {size_text(value)}"
    text = str(value)
    return f"{name.replace('_', ' ')} {text[:16] + '…' if len(text) in (32, 64) and text.isalnum() else text}"
