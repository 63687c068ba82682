"""`bsfg pipeline land`: a node's buffer as Parquet files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.complete import consumers as known_consumers
from bsfg.cli.complete import streams
from bsfg.cli.connection import Target, connects
from bsfg.cli.output import console, count_text, examples, print_json, say, size_text
from bsfg.cli.pipeline.landing import told, watched
from bsfg.cli.pipeline.running import Conf, Master, ends_on_signals, passing_log, settings_of
from bsfg.errors import CertificateInvalid, InvalidArgument, PeerUnreachable
from bsfg.ports import Buffer
from bsfg.printable import counted

if TYPE_CHECKING:
    from bsfg.spark.land.lander import Lander
    from bsfg.spark.land.needed import SparkWhenNeeded
    from bsfg.spark.land.settings import Landed, Settings

FILES = "Files"
GAPS = "_gaps.jsonl"
FACTS_FOR_A_RATE = 100_000
"""Fewer facts take as long as Spark needs to begin, whatever their number."""

app = typer.Typer(
    epilog=examples(
        ("bsfg pipeline land --stream operational --out lake", "land facts as they come, until it is stopped"),
        ("bsfg pipeline land --stream operational --out lake --once", "land what is there now, then leave"),
        ("bsfg pipeline land --stream audit --out lake/audit --consumer lake", "confirm to the node what is landed"),
        ("bsfg pipeline land --out lake --compact-only", "merge the small files of a folder; needs no node"),
        ("python -c \"import pandas; print(pandas.read_parquet('lake'))\"", "read it with whatever you like"),
    )
)


Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to land in; it is made if need be.")]
Stream = Annotated[
    str | None, typer.Option(metavar="NAME", help="The stream.", autocompletion=streams, show_default=False)
]
BufferName = Annotated[
    Buffer,
    typer.Option(metavar="BUFFER", help="store (facts of this zone) or forward (those that others sent it)."),
]
Once = Annotated[bool, typer.Option("--once", help="Land what is there now and leave.")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Without --once: how long facts may gather first.")
]
ConsumerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A durable consumer of the buffer; what is landed is confirmed for it, so the node may let it go.",
        autocompletion=known_consumers,
        show_default=False,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="POSITION",
        help="Where a new folder starts: earliest, latest, an offset or a time such as 2026-03-01T06:00:00Z. "
        "Default: where the consumer stands, or the earliest fact that is kept.",
        show_default=False,
    ),
]
ByTime = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Which time gives a fact its date, in UTC: produced_at (when it happened) or appended_at (when it "
        "became durable in this buffer).",
        rich_help_panel=FILES,
    ),
]
FileSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="How large files should be; those under half of it are merged.", rich_help_panel=FILES
    ),
]
MaxFacts = Annotated[
    int, typer.Option(metavar="N", min=1, help="At most so many facts are landed at once.", rich_help_panel=FILES)
]
Compact = Annotated[
    bool, typer.Option("--compact/--no-compact", help="Merge small files along the way.", rich_help_panel=FILES)
]
CompactOnly = Annotated[
    bool,
    typer.Option("--compact-only", help="Merge all small files of the folder and land nothing.", rich_help_panel=FILES),
]
Json = Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")]


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
    by: ByTime = "produced_at",
    file_size: FileSize = "128MB",
    max_facts_per_batch: MaxFacts = 4_000_000,
    compact: Compact = True,
    compact_only: CompactOnly = False,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Land a node's buffer as Parquet files, partitioned by date and predicate, every fact once.

    Files stand in DIR/date=2026-03-01/predicate=temperature_measured/ and are visible only when they are whole: any
    tool can read the folder at any time. DIR itself knows how far it has come, so the command can be killed and started
    again, here or on another machine, without losing or doubling a fact. Facts that left the buffer before they could
    be landed are listed in DIR/_gaps.jsonl.

    Without --once it follows the buffer until it is stopped, and waits for a node that is away.
    """
    from bsfg.spark.land.lander import landing
    from bsfg.spark.land.needed import SparkWhenNeeded
    from bsfg.spark.land.settings import folder_of

    if compact_only and not (out / "_bsfg" / "state.json").is_file():
        raise InvalidArgument(
            f"nothing was landed in {out}", hint="Give the folder that --out named when it was landed."
        )
    settings = replace(
        _settings(node, stream, buffer, by, starting, consumer, compact_only),
        out=folder_of(out),
        max_facts_per_batch=max_facts_per_batch,
        file_size_bytes=_size(file_size),
        every_seconds=every,
        compact=compact,
    )
    with (
        ends_on_signals(),
        passing_log("bsfg-land") as log,
        SparkWhenNeeded("bsfg-land", master, settings_of(conf), log) as spark,
        landing(spark, settings, told) as lander,
    ):
        ended = _work(lander, spark, node, once, compact_only, shown=not json)
        _told(lander.done, settings, json=json, landed=node is not None)
    if ended and (once or compact_only):
        raise KeyboardInterrupt


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
        return watched(lander, spark, work, shown=shown)
    except (PeerUnreachable, CertificateInvalid) as error:
        raise (node.explained(error) if node is not None else error) from None


def _settings(
    node: Target | None,
    stream: str | None,
    buffer: Buffer,
    by: str,
    starting: str | None,
    consumer: str | None,
    compact_only: bool,
) -> Settings:
    """Check what was said of the buffer and of how it is landed."""
    from bsfg.model import check_name
    from bsfg.spark.calls import Access
    from bsfg.spark.land.columns import By
    from bsfg.spark.land.settings import Settings
    from bsfg.spark.options import position

    if by not in list(By):
        raise InvalidArgument(f"--by {by!r} is not a time of facts", hint=f"There are {' and '.join(By)}.")
    if compact_only or node is None:
        return Settings(Path(), Access("localhost:0"), "")
    if stream is None:
        raise InvalidArgument("which stream is not said", hint="Give --stream; `bsfg status` lists them.")
    try:
        wanted = None if starting is None else position(starting)
    except ValueError as problem:
        raise InvalidArgument(f"--from {starting!r} {problem}") from None
    access = Access.of(node.address, node.files, node.server_name)
    return Settings(Path(), access, check_name("stream", stream), str(buffer), By(by), consumer, wanted)


def _size(text: str) -> int:
    from bsfg.config.kinds import SIZE, WrongValue

    try:
        return SIZE.read(text)
    except WrongValue as problem:
        raise InvalidArgument(f"--file-size {problem}") from None


def _told(done: Landed, settings: Settings, *, json: bool, landed: bool) -> None:
    """Tell what was done."""
    if json:
        print_json({"out": str(settings.out), **done.to_dict()})
    else:
        for line in _lines(done, settings, landed=landed):
            console().print(line, soft_wrap=True)
    if done.missing:
        gone = f"{counted(done.missing, 'fact')} {'was' if done.missing == 1 else 'were'} gone before landing"
        say(f"warning: {gone}; {settings.out / GAPS} says why.")


def _lines(done: Landed, settings: Settings, *, landed: bool) -> list[str]:
    lines = []
    if landed:
        rate = f", {count_text(round(done.facts_per_second))} facts/s" if done.facts >= FACTS_FOR_A_RATE else ""
        files = f" in {counted(done.files, 'file')} ({size_text(done.size_bytes)}{rate})" if done.facts else ""
        lines.append(f"Landed {counted(done.facts, 'fact')}{files} in {settings.out}, up to offset {done.next}.")
    if done.merged_files or not landed:
        lines.append(f"Merged {count_text(done.merged_files)} small files into {count_text(done.merged_into)}.")
    return lines
