"""`bsfg pipeline ingest`: files become facts of a zone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bsfg.cli.complete import streams as known_streams
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.groups import Json
from bsfg.cli.output import count_text, examples, progress_bar
from bsfg.cli.pipeline import ingested
from bsfg.cli.pipeline.running import Conf, Master, ends_on_signals, settings_of, spark_session
from bsfg.errors import BsfgError, InvalidArgument

if TYPE_CHECKING:
    from bsfg.spark.ingest.files import Source, Sources
    from bsfg.spark.ingest.plan import Plan
    from bsfg.spark.ingest.run import Settings, Watch
    from bsfg.spark.ingest.work import Counts, Work
    from bsfg.wire.connection import Connection

EXIT_REJECTED = 3
CONFLICTS = ("reject", "fail")
SOME_ZONE = "this-zone"
"""Stands for the zone where a dry run is not told it."""

LOOK_ROWS = 100_000
ROWS, CSV, RUN = "What becomes what", "How CSV is written", "How it runs"

app = typer.Typer(
    epilog=examples(
        (
            "bsfg pipeline ingest readings.csv --stream operational --to-zone enterprise "
            "--map 'subject=asset:PlantA/{machine}' --set predicate=temperature_measured "
            "--map produced_at=ts --object value,unit --type value=number --dry-run",
            "see what would happen: the first facts, and the rows that would be rejected",
        ),
        ("… the same without --dry-run", "do it; whatever stops it, the same command goes on where it was"),
        ("bsfg pipeline ingest 'export/*.parquet' --mapping readings.toml", "with the mapping in a file"),
        ("bsfg pipeline ingest export --mapping readings.toml --id '{machine}/{sequence}'", "ids from columns"),
        ("bsfg pipeline ingest old.csv --mapping m.toml --delimiter ';' --decimal , --encoding cp1252", "an old sheet"),
    )
)


def _option(*names: str, says: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=says, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


@app.command()
@connects("producer", "pipeline", unless="dry_run")
def ingest(
    node: Target | None,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files, folders or patterns in quotes. Folders are searched for .csv, .tsv, .jsonl, .ndjson, .json, "
            ".parquet and .pq.",
            show_default=False,
        ),
    ],
    *,
    stream: Annotated[
        str | None, _option("--stream", metavar="S", says="The stream.", autocompletion=known_streams)
    ] = None,
    mapping: Annotated[
        Path | None, _option("--mapping", metavar="FILE", says="A mapping in TOML; options go before it.", panel=ROWS)
    ] = None,
    map: Annotated[
        list[str] | None,
        _option(
            "--map",
            metavar="FIELD=COLUMN",
            says="A field from a column, or from a template such as subject=asset:PlantA/{machine}. Fields: subject, "
            "predicate, produced_at, to_zone, correlation_id, causation_id, object_schema, label.NAME, and object for "
            "one column that is the whole object. Repeatable.",
            panel=ROWS,
        ),
    ] = None,
    set: Annotated[
        list[str] | None,
        _option("--set", metavar="FIELD=TEXT", says="A field that is the same in all rows. Repeatable.", panel=ROWS),
    ] = None,
    object: Annotated[
        str | None,
        _option(
            "--object",
            metavar="COLUMNS",
            says="The columns that the object is made of as JSON, such as value,unit or temp=T1,unit. Default: *, all.",
            panel=ROWS,
        ),
    ] = None,
    type: Annotated[
        list[str] | None,
        _option(
            "--type",
            metavar="COLUMN=TYPE",
            says="What the texts of a column are in the object: text (default), number, boolean or json. Repeatable.",
            panel=ROWS,
        ),
    ] = None,
    id: Annotated[
        str | None,
        _option(
            "--id",
            metavar="TEMPLATE",
            says="Where message ids come from: a column or a template such as '{machine}/{sequence}'; file (default): "
            "the file's SHA-256 and the row number; content: the SHA-256 of the fact; none: the zone derives them.",
            panel=ROWS,
        ),
    ] = None,
    from_zone: Annotated[
        str | None, _option(metavar="Z", says="from_zone. Default: the configuration's zone.", panel=ROWS)
    ] = None,
    to_zone: Annotated[str | None, _option(metavar="Z", says="to_zone.", panel=ROWS)] = None,
    time_format: Annotated[
        str | None,
        _option(
            metavar="FORMAT",
            says="How produced_at is written: iso (default), unix_s, unix_ms, unix_us, unix_ns, or a pattern such as "
            "'%d.%m.%Y %H:%M:%S'.",
            panel=ROWS,
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        _option(metavar="ZONE", says="The zone of times that name none, such as UTC or Europe/Berlin.", panel=ROWS),
    ] = None,
    format: Annotated[
        str | None, _option(metavar="F", says="csv, jsonl or parquet. Default: what the name of the file says.")
    ] = None,
    delimiter: Annotated[
        str | None, _option(metavar="C", says="What stands between fields; tab for a tab. Default: a comma.", panel=CSV)
    ] = None,
    encoding: Annotated[str | None, _option(metavar="E", says="utf-8 (default), latin-1 or cp1252.", panel=CSV)] = None,
    decimal: Annotated[str | None, _option(metavar="C", says="The decimal mark of numbers, . or ,", panel=CSV)] = None,
    columns: Annotated[
        str | None, _option(metavar="NAMES", says="The columns, when files have no header: a,b,c", panel=CSV)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing: show the first facts and what would be rejected.")
    ] = False,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many rows --dry-run looks at; 0 for all.")
    ] = LOOK_ROWS,
    work: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Remembers files, progress and rejected rows; a cluster must share it.",
            rich_help_panel=RUN,
        ),
    ] = Path("bsfg-ingest"),
    rejects: Annotated[
        Path | None, _option(metavar="FILE", says="Where to copy the rejected rows to in the end.", panel=RUN)
    ] = None,
    conflicts: Annotated[
        str,
        typer.Option(
            metavar="reject|fail", help="What to do with a row whose id is taken by another body.", rich_help_panel=RUN
        ),
    ] = "reject",
    changed: Annotated[
        str,
        typer.Option(
            metavar="fail|again|skip",
            help="What to do about a file that changed since it was taken up: fail, take all its rows again, or leave "
            "out what is left of it.",
            rich_help_panel=RUN,
        ),
    ] = "fail",
    again: Annotated[
        bool,
        typer.Option("--again", help="Forget what earlier runs did, and send everything again.", rich_help_panel=RUN),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="How long to wait for a node that is away or full.", rich_help_panel=RUN
        ),
    ] = 300.0,
    tasks: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Tasks that read side by side; facts are still sent in order.", rich_help_panel=RUN
        ),
    ] = 1,
    step: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="How much is read between two notes of progress, at least 4MiB.", rich_help_panel=RUN
        ),
    ] = "64MiB",
    max_object: Annotated[
        str | None,
        _option(
            metavar="SIZE", says="The stream's max_object, if it is not 1MiB; larger rows are rejected.", panel=RUN
        ),
    ] = None,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Make facts of the rows of Parquet, JSON Lines and CSV files, in the order of files and rows.

    Every row becomes a fact or stands in the reject file with its place and the reason; nothing is dropped. The exit
    code is 0 when all rows are stored, 3 when some were rejected, 1 when something stopped it. The same command again
    goes on where it was, takes up files that are new, and stores nothing twice: a row has the same id each time.

    By default the id is made of the file's SHA-256 and the number of the row. When a file may come again with more or
    with corrected rows, make the id of columns (--id), or all its rows would be new.

    A mapping file says the same as the options: stream, to_zone, id and object at the top, and tables [map], [set],
    [types], [time] (format, zone) and [csv] (delimiter, encoding, decimal, columns).
    """
    from bsfg.spark.ingest.asked import Asked, from_file, pairs
    from bsfg.spark.ingest.files import find
    from bsfg.spark.ingest.work import CHANGED, Work

    given = Asked(
        stream=stream,
        from_zone=from_zone,
        to_zone=to_zone,
        format=format,
        id=id,
        object=object,
        map=pairs(map, "--map", "--map produced_at=ts"),
        set=pairs(set, "--set", "--set predicate=temperature_measured"),
        types=pairs(type, "--type", "--type value=number"),
        time_format=time_format,
        time_zone=timezone,
        delimiter=delimiter,
        encoding=encoding,
        decimal=decimal,
        columns=columns.split(",") if columns is not None else None,
        max_object_bytes=_size(max_object, "--max-object"),
    )
    if mapping is not None:
        given = given.over(from_file(mapping))
    given.from_zone = given.from_zone or (node.zone if node is not None else SOME_ZONE)
    plan, sources = given.plan(), find(files, given.format)
    if node is None:
        raise typer.Exit(EXIT_REJECTED if _look(sources, plan, limit or None, json) else 0)
    if conflicts not in CONFLICTS or changed not in CHANGED:
        raise InvalidArgument(f"--conflicts is {' or '.join(CONFLICTS)}, --changed is {' or '.join(CHANGED)}")
    settings = replace(
        _settings(node, master),
        wait_seconds=wait,
        conflicts_fail=conflicts == "fail",
        tasks=tasks,
        step_bytes=_size(step, "--step") or 0,
    )
    folder = work.absolute() / f"{plan.stream}-{plan.fingerprint(settings.access.address)[:12]}"
    with ends_on_signals(), Work.opened(folder, plan, again=again) as job:
        seconds = _run(node, job, plan, settings, job.new_sources(sources.files, changed), (master, settings_of(conf)))
        counts = ingested.report(job, sources, plan.stream, seconds, json)
    if rejects is not None and job.rejects.exists():
        shutil.copyfile(job.rejects, rejects)
    raise typer.Exit(EXIT_REJECTED if counts.rejected else 0)


def _size(text: str | None, option: str) -> int | None:
    from bsfg.config.kinds import SIZE, WrongValue

    try:
        return SIZE.read(text) if text is not None else None
    except WrongValue as problem:
        raise InvalidArgument(f"{option} {problem}") from None


def _look(sources: Sources, plan: Plan, rows_max: int | None, json: bool) -> int:
    """Show what would happen, and tell how many rows would be rejected."""
    from bsfg.spark.ingest.dryrun import look

    with progress_bar("looking") as bar:
        seen = look(sources.files, plan, rows_max, lambda rows: bar.update(bar.task_ids[0], advance=rows))
    ingested.show_look(seen, sources, plan, json)
    return seen.rejected


def _settings(node: Target, master: str) -> Settings:
    from bsfg.spark.calls import Access
    from bsfg.spark.ingest.run import Settings
    from bsfg.spark.session import is_local

    access = Access.of(node.address, node.files, node.server_name)
    return Settings(access if is_local(master) else access.with_contents())


def _run(
    node: Target, job: Work, plan: Plan, settings: Settings, fresh: list[Source], session: tuple[str, dict[str, str]]
) -> float | None:
    """Ingest what is new or unfinished, and tell how long that took; Spark is started only when there is something."""
    if not fresh and not job.ahead():
        return None
    _knock(node, plan.stream)
    from bsfg.spark.ingest.run import Ingest

    log = job.folder / "spark.log" if os.environ.get("BSFG_DEBUG") != "1" else None
    with spark_session("bsfg-ingest", *session, log=log) as spark, _shown() as watch:
        run = Ingest(spark, job, plan, settings, watch)
        run.survey(fresh)
        try:
            run.run()
        except (BsfgError, KeyboardInterrupt):
            ingested.tell_stopped(job)
            raise
        return run.seconds


def _knock(node: Target, stream: str) -> None:
    """Ask the node whether it would take facts at all, before anything that takes long."""
    from bsfg.batch import FactBatch

    async def call(connection: Connection) -> None:
        from bsfg.wire.client import BoundaryClient

        await BoundaryClient(connection).append(stream, FactBatch.empty())

    node.run(call)


@contextmanager
def _shown() -> Iterator[Watch]:
    """Show how far it is, while a block runs."""
    from bsfg.spark.ingest.run import Watch

    with progress_bar("") as bar:
        task = bar.add_task("looking through the files", total=None)

        def planned(rows: int) -> None:
            bar.reset(task, total=rows, description="ingesting")

        def done(counts: Counts) -> None:
            speed = bar.tasks[0].speed
            rate = f", {count_text(int(speed))} rows/s" if speed else ""
            bar.update(task, advance=counts.rows, description=f"ingesting{rate}")

        tell = told_once()

        def waiting(error: BsfgError) -> None:
            bar.update(task, description=f"waiting: {error.code}")
            tell(error)

        yield Watch(planned, done, waiting)
