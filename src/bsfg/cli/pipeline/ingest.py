"""`bsfg pipeline ingest`: files become facts of a zone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from bsfg.cli.common import Json, argument, flag, option
from bsfg.cli.common import streams as known_streams
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.output import console, count_text, examples, print_json, progress_bar
from bsfg.cli.pipeline.running import (
    AllowClearRpc,
    Conf,
    Master,
    Pack,
    SecretFile,
    ends_on_signals,
    settings_of,
    size_of,
    spark_session,
)
from bsfg.errors import BsfgError, InvalidArgument
from bsfg.wording import counted

if TYPE_CHECKING:
    from bsfg.spark.ingest.mapped import Look
    from bsfg.spark.ingest.plan import IngestPlan
    from bsfg.spark.ingest.run import IngestSettings, IngestWatch
    from bsfg.spark.ingest.survey import SourceFile, Sources
    from bsfg.spark.ingest.work import Counts, IngestWork
    from bsfg.wire.connection import Connection


SHOWN_REJECTS, SHOWN_FILES = 5, 5


def report(job: IngestWork, sources: Sources, stream: str, seconds: float | None, json: bool) -> Counts:
    """Tell what became of the files since the last report, and note that it was told."""
    counts, files = job.progress.counts, job.open_files()
    first = list(islice(_rejects(job.rejects, job.progress.reported_bytes), SHOWN_REJECTS))
    if json:
        print_json({**_document(job, sources, stream), "seconds": None if seconds is None else round(seconds, 1)})
    else:
        known = len(sources.files) - len(files)
        _tell(job, counts, known, first)
        _tell_left_out(sources)
    job.report()
    return counts


def tell_stopped(job: IngestWork) -> None:
    """Tell how far it came when something stops it."""
    done, left = job.progress.counts.rows, sum(chunk.rows for _, _, chunk in job.ahead())
    text = (
        f"Stopped: {count_text(done)} of {count_text(done + left)} rows are done. The same command goes on from there."
    )
    console(stderr=True).print(Text(text), soft_wrap=True)


def _document(job: IngestWork, sources: Sources, stream: str) -> dict[str, Any]:
    progress = job.progress
    counts = {name: getattr(progress.counts, name) for name in progress.counts.__slots__}
    files = [
        {
            "path": each.path,
            "rows": each.rows,
            "rejected": progress.rejected.get(each.path, 0),
            "digest": f"sha256:{each.digest}" if each.digest else None,
            "problem": each.problem,
        }
        for each in job.open_files()
    ]
    known = max(0, len(sources.files) - len(files))
    kept = {"work": str(job.folder), "rejects": str(job.rejects) if counts["rejected"] else None}
    return {"stream": stream, **counts, **kept, "known_files": known, "left_out": sources.left_out, "files": files}


def _tell(job: IngestWork, counts: Counts, known: int, first: list[dict[str, Any]]) -> None:
    files = job.open_files()
    if not files:
        say(f"Nothing new: {counted(known, 'file')} known, all ingested before. --again sends them again.")
        return
    parts = [f"{count_text(counts.inserted)} stored"]
    parts += [f"{count_text(counts.already_exists)} were there already"] if counts.already_exists else []
    parts += [f"{count_text(counts.rejected)} rejected"] if counts.rejected else []
    among = f", {count_text(counts.conflicts)} of them because their id is taken" if counts.conflicts else ""
    say(f"{counted(len(files), 'file')}, {count_text(counts.rows)} rows: {', '.join(parts)}{among}.")
    if known > 0:
        say(f"{counted(known, 'file')} were ingested before.")
    if counts.rejected:
        for reject in first:
            say(f"  {reject_line(reject)}")
        more = counts.rejected - sum(reject.get("rows", 1) for reject in first)
        others = f"And {count_text(more)} more. " if more > 0 else ""
        say(f"{others}All rejected rows, with reasons: {_near(job.rejects)}")


def _tell_left_out(sources: Sources) -> None:
    left = sources.left_out
    if left:
        names = ", ".join(_near(Path(path)) for path in left[:SHOWN_FILES])
        more = f" and {len(left) - SHOWN_FILES} more" if len(left) > SHOWN_FILES else ""
        say(f"Left out, because no format fits their names: {names}{more}.")


def reject_line(reject: dict[str, Any]) -> str:
    """Give a reject in one line."""
    place = _near(Path(reject["file"]))
    place += f":{reject['line']}" if "line" in reject else f" row {reject['row']}" if "row" in reject else ""
    field = f"{reject['field']}: " if "field" in reject else ""
    rows = f"{count_text(reject['rows'])} rows: " if "rows" in reject else ""
    return f"{place}  {reject['code']}  {rows}{field}{reject['reason']}"


def show_look(seen: Look, sources: Sources, plan: IngestPlan, json: bool) -> None:
    """Tell what a dry run saw."""
    rejects = [reject.to_dict() for reject in seen.first_rejects]
    if json:
        repeated = {"count": seen.repeated_ids, "first": seen.first_repeated} if seen.repeated_ids else None
        print_json(
            {
                "dry_run": True,
                "stream": plan.stream,
                "whole": seen.whole,
                "rows": seen.rows,
                "facts": seen.facts,
                "rejected": seen.rejected,
                "first_facts": seen.first_facts,
                "first_rejects": rejects,
                "repeated_ids": repeated,
                "left_out": sources.left_out,
            }
        )
        return
    for fact in seen.first_facts[:1]:
        say(orjson.dumps(fact, option=orjson.OPT_INDENT_2).decode())
    for fact in seen.first_facts[1:]:
        say(orjson.dumps(fact).decode())
    looked = "" if seen.whole else "the first "
    say(f"Of {looked}{count_text(seen.rows)} rows {count_text(seen.facts)} would become facts of {plan.stream}.")
    if seen.rejected:
        say(f"{count_text(seen.rejected)} would be rejected:")
        for reject in rejects:
            say(f"  {reject_line(reject)}")
    if seen.first_repeated is not None:
        id, before, after = seen.first_repeated
        say(
            f"{count_text(seen.repeated_ids)} rows have an id that an earlier row has, the first is {id!r} in {before} "
            f"and {after}: such a row is not stored again, and rejected if it says something else."
        )
    _tell_left_out(sources)
    say("Nothing was sent." if seen.whole else "Nothing was sent. --limit 0 looks at all rows.")


def say(text: str) -> None:
    """Print a line as it is."""
    console().print(Text(text), soft_wrap=True)


def _rejects(path: Path, start: int) -> Any:
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            yield orjson.loads(line)


def _near(path: Path) -> str:
    """Give a path as it is seen from here, when that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


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


@app.command()
@connects("producer", "pipeline", unless="dry_run")
def ingest(
    node: Target | None,
    files: Annotated[
        list[str],
        argument(
            "FILE",
            "Files, folders or patterns in quotes. Folders are searched for .csv, .tsv, .jsonl, .ndjson, .json, "
            ".parquet and .pq.",
            show_default=False,
        ),
    ],
    *,
    stream: Annotated[str | None, option("S", "The stream.", autocompletion=known_streams)] = None,
    mapping: Annotated[Path | None, option("FILE", "A mapping in TOML; options go before it.", panel=ROWS)] = None,
    map: Annotated[
        list[str] | None,
        option(
            "FIELD=COLUMN",
            "A field from a column, or from a template such as subject=asset:PlantA/{machine}. Fields: subject, "
            "predicate, produced_at, to_zone, correlation_id, causation_id, object_schema, label.NAME, and object for "
            "one column that is the whole object. Repeatable.",
            panel=ROWS,
        ),
    ] = None,
    set: Annotated[
        list[str] | None, option("FIELD=TEXT", "A field that is the same in all rows. Repeatable.", panel=ROWS)
    ] = None,
    object: Annotated[
        str | None,
        option(
            "COLUMNS",
            "The columns that the object is made of as JSON, such as value,unit or temp=T1,unit. Default: *, all.",
            panel=ROWS,
        ),
    ] = None,
    type: Annotated[
        list[str] | None,
        option(
            "COLUMN=TYPE",
            "What the texts of a column are in the object: text (default), number, boolean or json. Repeatable.",
            panel=ROWS,
        ),
    ] = None,
    id: Annotated[
        str | None,
        option(
            "TEMPLATE",
            "Where message ids come from: a column or a template such as '{machine}/{sequence}'; file (default): "
            "the file's SHA-256 and the row number; content: the SHA-256 of the fact; none: the zone derives them.",
            panel=ROWS,
        ),
    ] = None,
    from_zone: Annotated[str | None, option("Z", "from_zone. Default: the configuration's zone.", panel=ROWS)] = None,
    to_zone: Annotated[str | None, option("Z", "to_zone.", panel=ROWS)] = None,
    time_format: Annotated[
        str | None,
        option(
            "FORMAT",
            "How produced_at is written: iso (default), unix_s, unix_ms, unix_us, unix_ns, or a pattern such as "
            "'%d.%m.%Y %H:%M:%S'.",
            panel=ROWS,
        ),
    ] = None,
    timezone: Annotated[
        str | None, option("ZONE", "The zone of times that name none, such as UTC or Europe/Berlin.", panel=ROWS)
    ] = None,
    format: Annotated[
        str | None, option("F", "csv, jsonl or parquet. Default: what the name of the file says.")
    ] = None,
    delimiter: Annotated[
        str | None, option("C", "What stands between fields; tab for a tab. Default: a comma.", panel=CSV)
    ] = None,
    encoding: Annotated[str | None, option("E", "utf-8 (default), latin-1 or cp1252.", panel=CSV)] = None,
    decimal: Annotated[str | None, option("C", "The decimal mark of numbers, . or ,", panel=CSV)] = None,
    columns: Annotated[str | None, option("NAMES", "The columns, when files have no header: a,b,c", panel=CSV)] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Send nothing: show the first facts and what would be rejected.")
    ] = False,
    limit: Annotated[int, option("N", "How many rows --dry-run looks at; 0 for all.", min=0)] = LOOK_ROWS,
    work: Annotated[
        Path, option("DIR", "Remembers files, progress and rejected rows; a cluster must share it.", panel=RUN)
    ] = Path("bsfg-ingest"),
    rejects: Annotated[Path | None, option("FILE", "Where to copy the rejected rows to in the end.", panel=RUN)] = None,
    conflicts: Annotated[
        str, option("reject|fail", "What to do with a row whose id is taken by another body.", panel=RUN)
    ] = "reject",
    changed: Annotated[
        str,
        option(
            "fail|again|skip",
            "What to do about a file that changed since it was taken up: fail, take all its rows again, or leave "
            "out what is left of it.",
            panel=RUN,
        ),
    ] = "fail",
    again: Annotated[
        bool, flag("--again", "Forget what earlier runs did, and send everything again.", panel=RUN)
    ] = False,
    wait: Annotated[
        float, option("SECONDS", "How long to wait for a node that is away or full.", min=0, panel=RUN)
    ] = 300.0,
    tasks: Annotated[
        int, option("N", "Tasks that read side by side; facts are still sent in order.", min=1, panel=RUN)
    ] = 1,
    step: Annotated[
        str, option("SIZE", "How much is read between two notes of progress, at least 4MiB.", panel=RUN)
    ] = "64MiB",
    max_object: Annotated[
        str | None, option("SIZE", "The stream's max_object, if it is not 1MiB; larger rows are rejected.", panel=RUN)
    ] = None,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = None,
    pack: Pack = None,
    secret_file: SecretFile = None,
    allow_clear_rpc: AllowClearRpc = False,
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
    wish = ingest_wish(**locals())
    sources = wish.found()
    if wish.settings is None:
        raise typer.Exit(EXIT_REJECTED if _look(sources, wish.plan, limit or None, json) else 0)
    assert node is not None
    with ends_on_signals(), wish.opened() as job:
        session = (master, settings_of(conf, pack, secret_file, allow_clear_rpc))
        fresh = job.new_sources(sources.files, changed)
        seconds = _run(node, job, wish.plan, wish.settings, fresh, session)
        counts = report(job, sources, wish.plan.stream, seconds, json)
    if rejects is not None and job.rejects.exists():
        shutil.copyfile(job.rejects, rejects)
    raise typer.Exit(EXIT_REJECTED if counts.rejected else 0)


@dataclass(frozen=True, slots=True)
class IngestWish:
    """What is to be ingested, and how; without settings it is only looked at."""

    files: list[str]
    format: str | None
    plan: IngestPlan
    settings: IngestSettings | None
    work: Path
    changed: str
    again: bool

    def found(self, *, may_be_none: bool = False) -> Sources:
        """Find the files that are there now."""
        from bsfg.spark.ingest.survey import find

        return find(self.files, self.format, may_be_none=may_be_none)

    def opened(self) -> AbstractContextManager[IngestWork]:
        """Open what is remembered of earlier runs; it has one user at a time."""
        from bsfg.spark.ingest.work import IngestWork

        assert self.settings is not None
        tag = self.plan.fingerprint(self.settings.access.address)[:12]
        return IngestWork.opened(self.work.absolute() / f"{self.plan.stream}-{tag}", self.plan, again=self.again)


def ingest_wish(
    *,
    node: Target | None,
    files: list[str],
    stream: str | None,
    mapping: Path | None,
    map: list[str] | None,
    set: list[str] | None,
    object: str | None,
    type: list[str] | None,
    id: str | None,
    from_zone: str | None,
    to_zone: str | None,
    time_format: str | None,
    timezone: str | None,
    format: str | None,
    delimiter: str | None,
    encoding: str | None,
    decimal: str | None,
    columns: str | None,
    work: Path,
    conflicts: str,
    changed: str,
    again: bool,
    wait: float,
    tasks: int,
    step: str,
    max_object: str | None,
    master: str,
    **others: Any,
) -> IngestWish:
    """Give what the options of this command mean, on its line or in a table of the zone's file."""
    from bsfg.spark.ingest.options import Asked, from_file, pairs
    from bsfg.spark.ingest.work import CHANGED

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
        max_object_bytes=None if max_object is None else size_of(max_object, "--max-object"),
    )
    if mapping is not None:
        given = given.over(from_file(mapping))
    given.from_zone = given.from_zone or (node.zone if node is not None else SOME_ZONE)
    plan, settings = given.plan(), None
    if conflicts not in CONFLICTS or changed not in CHANGED:
        raise InvalidArgument(f"--conflicts is {' or '.join(CONFLICTS)}, --changed is {' or '.join(CHANGED)}")
    if node is not None:
        settings = replace(
            _settings(node, master),
            wait_seconds=wait,
            conflicts_fail=conflicts == "fail",
            tasks=tasks,
            step_bytes=size_of(step, "--step"),
        )
    return IngestWish(list(files), given.format, plan, settings, work, changed, again)


def _look(sources: Sources, plan: IngestPlan, rows_max: int | None, json: bool) -> int:
    """Show what would happen, and tell how many rows would be rejected."""
    from bsfg.spark.ingest.mapped import look

    with progress_bar("looking") as bar:
        seen = look(sources.files, plan, rows_max, lambda rows: bar.update(bar.task_ids[0], advance=rows))
    show_look(seen, sources, plan, json)
    return seen.rejected


def _settings(node: Target, master: str) -> IngestSettings:
    from bsfg.spark.cluster import is_local
    from bsfg.spark.ingest.run import IngestSettings

    return IngestSettings(node.access(), ships=not is_local(master))


def _run(
    node: Target,
    job: IngestWork,
    plan: IngestPlan,
    settings: IngestSettings,
    fresh: list[SourceFile],
    session: tuple[str, dict[str, str]],
) -> float | None:
    """Ingest what is new or unfinished, and tell how long that took; Spark is started only when there is something."""
    if not fresh and not job.ahead():
        return None
    _knock(node, plan.stream)
    from bsfg.spark.ingest.run import Ingest

    log = job.folder / "spark.log" if os.environ.get("BSFG_DEBUG") != "1" else None
    with spark_session("bsfg-ingest", *session, log=log, brief=True) as spark, _shown() as watch:
        run = Ingest(spark, job, plan, settings, watch)
        run.survey(fresh)
        try:
            run.run()
        except (BsfgError, KeyboardInterrupt):
            tell_stopped(job)
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
def _shown() -> Iterator[IngestWatch]:
    """Show how far it is, while a block runs."""
    from bsfg.spark.ingest.run import IngestWatch

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

        yield IngestWatch(planned, done, waiting)
