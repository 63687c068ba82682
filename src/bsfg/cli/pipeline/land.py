"""`bsfg pipeline land`: a node's buffer as Parquet files or as a table of Delta Lake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bsfg.cli.common import consumers as known_consumers
from bsfg.cli.common import flag, option, streams
from bsfg.cli.connection import Target, connects
from bsfg.cli.output import console, count_text, examples, print_json, say, size_text
from bsfg.cli.pipeline.running import (
    AllowClearRpc,
    Conf,
    Master,
    Pack,
    SecretFile,
    WorkProgress,
    ends_on_signals,
    passing_log,
    settings_of,
    size_of,
    watched,
)
from bsfg.errors import BsfgError, CertificateInvalid, InvalidArgument, PeerUnreachable, SparkFailed
from bsfg.ports import Buffer
from bsfg.wording import counted

if TYPE_CHECKING:
    from bsfg.spark.land.lander import Lander, SparkWhenNeeded
    from bsfg.spark.land.state import Landed, LandSettings


GONE_SECONDS = 2.0
"""How long a JVM that does not answer any more may take until it is known to have ended."""


def landed(lander: Lander, spark: SparkWhenNeeded, work: Callable[[], None], *, shown: bool) -> bool:
    """Do the work of a landing in a thread of its own; tell whether a signal ended it."""
    from bsfg.spark.land.lander import Interrupted

    def run() -> None:
        with suppress(Interrupted):
            work()

    progress = WorkProgress("landed")
    asked, failure = watched(run, lander.end, lambda: _text(lander, spark, progress), spark.has_ended, shown=shown)
    if asked:
        return True
    if spark.has_ended(GONE_SECONDS if isinstance(failure, SparkFailed) else 0.0):
        from bsfg.spark.session import failed

        raise failed("the Java of Spark has ended")
    if failure is not None:
        raise failure
    return False


def told(error: BsfgError) -> None:
    """Tell on stderr what is waited for."""
    say(f"waiting: {error.message}")


def _text(lander: Lander, spark: SparkWhenNeeded, progress: WorkProgress) -> str:
    if spark.is_starting:
        return "Starting Spark …"
    if not lander.has_joined:
        return "Merging small files …" if spark.is_started else "Looking at the node …"
    under_way = lander.under_way()
    return progress.text(lander.done.facts + under_way, max(0, lander.done.backlog - under_way))


FILES = "Files"
GAPS = "_gaps.jsonl"
LATEST = "_latest"
FACTS_FOR_A_RATE = 100_000
"""Fewer facts take as long as Spark needs to begin, whatever their number."""

app = typer.Typer(
    epilog=examples(
        ("bsfg pipeline land --stream operational --out lake", "land facts as they come, until it is stopped"),
        ("bsfg pipeline land --stream operational --out lake --once", "land what is there now, then leave"),
        ("bsfg pipeline land --stream audit --out lake/audit --consumer lake", "confirm to the node what is landed"),
        (
            "bsfg pipeline land --stream operational --out table --format delta --latest",
            "a Delta table, and its newest",
        ),
        ("bsfg pipeline land --stream operational --out lake --columns 'value double, unit string'", "typed columns"),
        ("bsfg pipeline land --out lake --compact-only", "merge the small files of a folder; needs no node"),
        ("python -c \"import pandas; print(pandas.read_parquet('lake'))\"", "read it with whatever you like"),
    )
)


Out = Annotated[Path, option("DIR", "The folder to land in; it is made if need be.", "--out", "-o")]
Stream = Annotated[str | None, option("NAME", "The stream.", autocompletion=streams, show_default=False)]
BufferName = Annotated[Buffer, option("BUFFER", "store (facts of this zone) or forward (those that others sent it).")]
Once = Annotated[bool, flag("--once", "Land what is there now and leave.")]
Every = Annotated[float, option("SECONDS", "Without --once: how long facts may gather first.", min=0)]
ConsumerName = Annotated[
    str | None,
    option(
        "NAME",
        "A durable consumer of the buffer; what is landed is confirmed for it, so the node may let it go.",
        autocompletion=known_consumers,
        show_default=False,
    ),
]
From = Annotated[
    str | None,
    option(
        "POSITION",
        "Where a new folder starts: earliest, latest, an offset or a time such as 2026-03-01T06:00:00Z. "
        "Default: where the consumer stands, or the earliest fact that is kept.",
        "--from",
        show_default=False,
    ),
]
FormatName = Annotated[
    str | None,
    option(
        "FORMAT",
        "parquet (files in folders) or delta (a table of Delta Lake; needs the extra delta). Default: as the folder "
        "was made, parquet for a new one.",
        "--format",
        panel=FILES,
        show_default=False,
    ),
]
ByTime = Annotated[
    str | None,
    option(
        "TIME",
        "Which time gives a fact its date, in UTC: appended_at (when it became durable in this buffer) or produced_at "
        "(when it happened). Default: as the folder was made, appended_at for a new one.",
        panel=FILES,
        show_default=False,
    ),
]
PartitionBy = Annotated[
    str | None,
    option(
        "NAMES",
        "What files are partitioned by, some of month, date, hour, predicate, subject, from_zone, to_zone and "
        "origin_zone. Default: as the folder was made, date,predicate for a new one.",
        panel=FILES,
        show_default=False,
    ),
]
ColumnsText = Annotated[
    str | None,
    option(
        "COLUMNS",
        "Fields of JSON objects as columns of their own, such as 'value double, unit string', @FILE with such text, or "
        "infer to find them out. They can be added later. What does not fit is in the column rescued.",
        "--columns",
        panel=FILES,
        show_default=False,
    ),
]
Latest = Annotated[
    bool,
    flag("--latest", "Keep the newest fact of each subject and predicate in DIR/_latest, a table too.", panel=FILES),
]
MaxFiles = Annotated[int, option("N", "About so many files are made at once at most.", min=1, panel=FILES)]
VacuumHours = Annotated[
    float,
    option(
        "HOURS", "Of a delta table: how long files are kept that merges have replaced, for readers.", min=0, panel=FILES
    ),
]
FileSize = Annotated[str, option("SIZE", "How large files should be; those under half of it are merged.", panel=FILES)]
MaxFacts = Annotated[int, option("N", "At most so many facts are landed at once.", min=1, panel=FILES)]
Compact = Annotated[bool, flag("--compact/--no-compact", "Merge small files along the way.", panel=FILES)]
CompactOnly = Annotated[
    bool, flag("--compact-only", "Merge all small files of the folder and land nothing.", panel=FILES)
]
Json = Annotated[bool, flag("--json", "Print what was done as JSON.")]


@app.command()
@connects("consumer", "pipeline", unless="compact_only")
def land(
    node: Target | None,
    *,
    out: Out,
    stream: Stream = None,
    buffer: BufferName = Buffer.STORE,
    once: Once = False,
    every: Every = 10.0,
    consumer: ConsumerName = None,
    starting: From = None,
    format: FormatName = None,
    by: ByTime = None,
    partition_by: PartitionBy = None,
    columns: ColumnsText = None,
    latest: Latest = False,
    file_size: FileSize = "128MB",
    max_facts_per_batch: MaxFacts = 4_000_000,
    max_files_per_batch: MaxFiles = 1_000,
    vacuum_hours: VacuumHours = 168.0,
    compact: Compact = True,
    compact_only: CompactOnly = False,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = None,
    pack: Pack = None,
    secret_file: SecretFile = None,
    allow_clear_rpc: AllowClearRpc = False,
) -> None:
    """Land a node's buffer as a table: Parquet files partitioned by date and predicate, plain or of Delta Lake.

    Files stand in DIR/date=2026-03-01/predicate=temperature_measured/ and are visible only when they are whole: any
    tool can read the folder at any time, and finds every fact once. DIR itself knows how far it has come, so the
    command can be killed and started again, here or on another machine. Facts that left the buffer before they could be
    landed are listed in DIR/_gaps.jsonl.

    Without --once it follows the buffer until it is stopped, and waits for a node that is away.
    """
    given = dict(locals())
    from bsfg.spark.land.lander import SparkWhenNeeded, landing

    if compact_only and not (out / "_bsfg" / "state.json").is_file():
        raise InvalidArgument(
            f"nothing was landed in {out}", hint="Give the folder that --out named when it was landed."
        )
    settings = landing_settings(**given)
    with (
        ends_on_signals(),
        passing_log("bsfg-land") as log,
        SparkWhenNeeded("bsfg-land", master, settings_of(conf, pack, secret_file, allow_clear_rpc), log) as spark,
        landing(spark, settings, told) as lander,
    ):
        ended = _work(lander, spark, node, once, compact_only, shown=not json)
        _told(lander.done, settings, json=json, landed=node is not None)
    if ended and (once or compact_only):
        raise KeyboardInterrupt


def landing_settings(
    *,
    node: Target | None,
    out: Path,
    stream: str | None,
    buffer: Buffer,
    every: float,
    consumer: str | None,
    starting: str | None,
    format: str | None,
    by: str | None,
    partition_by: str | None,
    columns: str | None,
    latest: bool,
    file_size: str,
    max_facts_per_batch: int,
    max_files_per_batch: int,
    vacuum_hours: float,
    compact: bool,
    compact_only: bool,
    **others: object,
) -> LandSettings:
    """Give what the options of this command mean, on its line or in a table of the zone's file."""
    from bsfg.spark.land.state import place_of

    return replace(
        _settings(node, stream, buffer, starting, consumer, compact_only),
        out=place_of(out),
        **_shape(format, by, partition_by, columns),
        latest=latest,
        max_facts_per_batch=max_facts_per_batch,
        max_files_per_batch=max_files_per_batch,
        vacuum_hours=vacuum_hours,
        file_size_bytes=size_of(file_size, "--file-size"),
        every_seconds=every,
        compact=compact,
    )


def _work(
    lander: Lander, spark: SparkWhenNeeded, node: Target | None, once: bool, compact_only: bool, *, shown: bool
) -> bool:
    """Do what was asked for; tell whether a signal ended it."""

    def work() -> None:
        if compact_only:
            lander.compact()
            return
        lander.join(for_ever=not once)
        if once:
            lander.land_available()
        else:
            lander.follow()

    try:
        return landed(lander, spark, work, shown=shown)
    except (PeerUnreachable, CertificateInvalid) as error:
        raise (node.explained(error) if node is not None else error) from None


def _shape(format: str | None, by: str | None, partition_by: str | None, columns: str | None) -> dict[str, Any]:
    """Check what was said of how facts are laid out; what is None was not said."""
    from bsfg.spark.land.columns import INFER, read_columns
    from bsfg.spark.land.state import By, TableFormat, read_partition_by

    if by is not None and by not in list(By):
        raise InvalidArgument(f"--by {by!r} is not a time of facts", hint=f"There are {' and '.join(By)}.")
    if format is not None and format not in list(TableFormat):
        raise InvalidArgument(f"--format {format!r} is not known", hint=f"There are {' and '.join(TableFormat)}.")
    infer = columns is not None and columns.strip().lower() == INFER
    return {
        "format": None if format is None else TableFormat(format),
        "by": None if by is None else By(by),
        "partition_by": None if partition_by is None else read_partition_by(partition_by),
        "columns": () if columns is None or infer else read_columns(columns),
        "infer": infer,
    }


def _settings(
    node: Target | None,
    stream: str | None,
    buffer: Buffer,
    starting: str | None,
    consumer: str | None,
    compact_only: bool,
) -> LandSettings:
    """Check what was said of the buffer and of how it is landed."""
    from bsfg.model import check_name
    from bsfg.spark.calls import NodeAccess
    from bsfg.spark.land.state import LandSettings
    from bsfg.spark.options import position

    if compact_only or node is None:
        return LandSettings(Path(), NodeAccess("localhost:0"), "")
    if stream is None:
        raise InvalidArgument("which stream is not said", hint="Give --stream; `bsfg status` lists them.")
    try:
        wanted = None if starting is None else position(starting)
    except ValueError as problem:
        raise InvalidArgument(f"--from {starting!r} {problem}") from None
    return LandSettings(
        Path(), node.access(), check_name("stream", stream), str(buffer), consumer=consumer, starting=wanted
    )


def _told(done: Landed, settings: LandSettings, *, json: bool, landed: bool) -> None:
    """Tell what was done."""
    if json:
        print_json({"out": str(settings.out), **done.to_dict()})
    else:
        for line in _lines(done, settings, landed=landed):
            console().print(line, soft_wrap=True)
    if done.missing:
        gone = f"{counted(done.missing, 'fact')} {'was' if done.missing == 1 else 'were'} gone before landing"
        say(f"warning: {gone}; {settings.out / GAPS} says why.")


def _lines(done: Landed, settings: LandSettings, *, landed: bool) -> list[str]:
    lines = []
    if landed:
        rate = f", {count_text(round(done.facts_per_second))} facts/s" if done.facts >= FACTS_FOR_A_RATE else ""
        files = f" in {counted(done.files, 'file')} ({size_text(done.size_bytes)}{rate})" if done.facts else ""
        lines.append(f"Landed {counted(done.facts, 'fact')}{files} in {settings.out}, up to offset {done.next}.")
    if done.merged_files or not landed:
        lines.append(f"Merged {count_text(done.merged_files)} small files into {count_text(done.merged_into)}.")
    if done.removed_files:
        lines.append(f"Removed {counted(done.removed_files, 'file')} that merges had replaced.")
    if settings.latest and landed:
        lines.append(f"Brought {counted(done.latest, 'newest fact')} up to date in {settings.out / LATEST}.")
    for each in done.columns:
        taken = f"'{each.column} {each.type}'" if each.column else "no column"
        seen = f"in {count_text(each.having)} of {counted(each.facts, 'fact')}"
        lines.append(f"Column of {each.predicate}: {each.field} {seen}, {taken} fits {count_text(each.fitting)}.")
    return lines
