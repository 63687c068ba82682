"""`bsfg pipeline run`: keep all pipelines of a zone alive, in one process and one Spark session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import flag, handled, option
from bsfg.cli.connection import DEFAULT_CONFIG, NodeChoice, resolve
from bsfg.cli.output import console, count_text, examples, print_json, say, table
from bsfg.cli.pipeline.running import (
    AllowClearRpc,
    AsIdentity,
    AtAddress,
    Conf,
    FollowedFiles,
    Pack,
    SecretFile,
    SparkMaster,
    Stopped,
    ZoneFile,
    ends_on_signals,
    json_lines,
    run_folder,
    settings_of,
    spark_session,
    staying,
)
from bsfg.config import PipelineKind, PipelineTable, ZoneConfig, load
from bsfg.config.kinds import nearest
from bsfg.errors import BsfgError, InvalidArgument
from bsfg.wording import duration_text, one_line, time_text

if TYPE_CHECKING:
    from rich.table import Table

    from bsfg.cli.pipeline.kept import RunPlace
    from bsfg.spark.replicate.driver import Layout
    from bsfg.spark.supervise import KeptPipeline, KeptTerms, Supervisor
    from bsfg.wire.service import PipelineReport

LOOK_SECONDS = 0.5
FAIR = {"spark.scheduler.mode": "FAIR"}
"""Every pipeline has a pool of its own, so that the tasks of none stand behind all those of another."""

app = typer.Typer()

EPILOG = examples(
    ("bsfg pipeline run --config zone.toml", "all [pipelines.*] of the zone, until it is stopped"),
    ("bsfg pipeline run -c zone.toml --check", "read the tables, and say what would run"),
    ("bsfg pipeline run -c zone.toml --only lake --only links", "some of them"),
    ("bsfg pipeline run -c zone.toml --conf spark.ui.enabled=true", "with Spark's own user interface"),
)


@dataclass(slots=True)
class ZonePipelines:
    """The tables of a zone's file, read again when they change."""

    config: Path
    only: Sequence[str]
    files: FollowedFiles

    def rows(self) -> tuple[ZoneConfig, dict[str, PipelineTable]]:
        """Give the tables that are to run; raises `InvalidArgument` when there is none, or not one that was named."""
        zone, wanted = self._read()
        for name in self.only:
            if name not in zone.pipelines:
                hint = f"There are {', '.join(zone.pipelines) or 'none'}."
                raise InvalidArgument(
                    f"{self.config} has no [pipelines.{name}]{nearest(name, zone.pipelines)}", hint=hint
                )
        if not wanted:
            raise InvalidArgument(
                f"{self.config} has no [pipelines.…] table that is enabled",
                hint='Add one, such as [pipelines.links] with replicate = {}; see the guide "One process per zone".',
            )
        return zone, wanted

    def _read(self) -> tuple[ZoneConfig, dict[str, PipelineTable]]:
        zone = load(self.config)
        named = self.only or tuple(zone.pipelines)
        return zone, {name: row for name, row in zone.pipelines.items() if row.enabled and name in named}

    def follow(self, supervisor: Supervisor, place: RunPlace) -> None:
        """Go on by a file that has changed; one with a mistake changes nothing."""
        if self.files.have_changed():
            try:
                for said in self.keep(supervisor, place):
                    say(said)
            except BsfgError as error:
                say(f"{self.config} is not taken up: {error.code}: {error.message}")

    def keep(self, supervisor: Supervisor, place: RunPlace) -> list[str]:
        """Have a supervisor keep what the tables say; when the last of them is taken out, nothing until one is back."""
        from bsfg.cli.pipeline.kept import made

        zone, wanted = self._read()

        def make(name: str) -> KeptPipeline:
            return made(zone, wanted[name], place)

        return supervisor.keep({name: terms_of(row) for name, row in wanted.items()}, make)


def terms_of(row: PipelineTable) -> KeptTerms:
    """Give when the pipeline of a table runs."""
    from bsfg.spark.supervise import KeptTerms

    fingerprint = sha256(repr((row.kind, row.options, row.identity, row.settled_seconds)).encode()).hexdigest()[:16]
    return KeptTerms(row.pause_seconds, row.restart_after_seconds, row.restart_max_seconds, fingerprint)


@app.command(epilog=EPILOG)
def run(
    *,
    config: ZoneFile = DEFAULT_CONFIG,
    only: Annotated[
        list[str] | None, option("NAME", "One of the tables; all that are enabled when left out. Repeatable.")
    ] = None,
    check: Annotated[bool, flag("--check", "Read the tables, say what would run, and leave.")] = False,
    identity: AsIdentity = None,
    address: AtAddress = None,
    work: Annotated[
        Path | None,
        option(
            "DIR",
            "Where the run keeps checkpoints and when audits are due; nothing depends on them. Default: pipeline "
            "beside the configuration, or a folder for passing things where that cannot be written.",
        ),
    ] = None,
    json: Annotated[bool, flag("--json", "Print a line of JSON every second; with --check one document.")] = False,
    master: SparkMaster = None,
    conf: Conf = None,
    pack: Pack = None,
    secret_file: SecretFile = None,
    allow_clear_rpc: AllowClearRpc = False,
) -> None:
    """Keep all pipelines of a zone alive in one Spark session: links, landings, ingests, audits and sinks.

    Each table [pipelines.NAME] of the zone's file is one pipeline, with the options of its own command. What fails is
    begun again after a pause that doubles; the others do not notice. `bsfg status`, the dashboard and the metrics of
    the node show each of them, and the node raises an alert when one keeps failing, when an audit is not clean, and
    when this process is gone. A file that changes is taken up without a restart.

    The command ends with an error when Spark itself ends; let a service manager start it again.
    """
    from bsfg.cli.pipeline.kept import RunPlace
    from bsfg.cli.pipeline.replicate import LOG, usable, work_folder
    from bsfg.spark.replicate.driver import holder_name
    from bsfg.spark.supervise import Schedule, Supervisor

    pipelines = ZonePipelines(config, only or (), FollowedFiles(config))
    pipelines.files.take()
    zone, rows = pipelines.rows()
    slots = SlotPlan.of(zone, rows, master)
    place = RunPlace(config, address, identity, slots.master, Path(), slots.layout)
    checked(zone, rows, place)
    if check:
        _tell(rows, json=json)
        return
    own = resolve(NodeChoice(config=config, identity=identity, address=address), ("pipeline",)).access()
    folder = usable(work or work_folder(config.absolute().parent)).absolute()
    settings = {**FAIR, **settings_of(conf, pack, secret_file, allow_clear_rpc)}
    with (
        ends_on_signals(),
        suppress(Stopped, KeyboardInterrupt),
        spark_session("bsfg", slots.master, settings, folder / LOG) as spark,
        run_folder(folder) as passing,
    ):
        layout = slots.fitting(spark)
        place = RunPlace(config, address, identity, slots.master, passing, layout)
        supervisor = Supervisor(spark, own, holder_name(), Schedule(folder / "schedule.json"))
        try:
            pipelines.keep(supervisor, place)
            lines = json_lines(partial(_document, zone.zone.name))
            with nullcontext(lines) if json else staying(_table, _lines()) as show:
                while True:
                    show(supervisor.look(), supervisor)
                    pipelines.follow(supervisor, place)
                    time.sleep(LOOK_SECONDS)
        finally:
            # It finishes although more signals come.
            with handled(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT):
                supervisor.stop()


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How many tasks run at once: those of the links, and some for everything else."""

    master: str
    layout: Layout
    others: int
    bundles: int | None
    links: int

    @staticmethod
    def of(zone: ZoneConfig, rows: Mapping[str, PipelineTable], master: str | None) -> SlotPlan:
        """Plan them for the tables of a zone."""
        from bsfg.cli.pipeline.kept import options_of
        from bsfg.spark.replicate.driver import REPLAYS, Layout, default_bundles, slots_for

        tasks = (PipelineKind.LAND, PipelineKind.INGEST, PipelineKind.AUDIT)
        others = min(sum(row.kind in tasks for row in rows.values()), os.cpu_count() or 1)
        moving = next((row for row in rows.values() if row.kind == PipelineKind.REPLICATE), None)
        if moving is None:
            return SlotPlan(master or f"local[{max(2, others)}]", Layout(), others, None, 0)
        options = options_of(zone, moving)
        links = len(options["link"]) or len(zone.links) or 1
        bundles = options["bundles"] or min(default_bundles(), links)
        needed = slots_for(bundles, REPLAYS) + others
        return SlotPlan(master or f"local[{needed}]", Layout(bundles), others, options["bundles"], links)

    def fitting(self, spark: Any) -> Layout:
        """Give the layout of the links that fits what Spark really has."""
        from bsfg.spark.replicate.driver import Layout, slots_of

        if not self.links:
            return self.layout
        slots = slots_of(spark, self.master, 3 + self.others)
        return Layout.fitting(max(slots - self.others, 2), self.links, self.bundles)


def checked(zone: ZoneConfig, rows: Mapping[str, PipelineTable], place: RunPlace) -> None:
    """Make every pipeline once, so that mistakes are known before Spark is started."""
    from bsfg.cli.pipeline.kept import made

    for row in rows.values():
        try:
            made(zone, row, place)
        except BsfgError as error:
            if not error.message.startswith("[pipelines."):
                error = type(error)(f"[pipelines.{row.name}]: {error.message}", hint=error.hint, **error.details)
            raise error from None


def _tell(rows: Mapping[str, PipelineTable], *, json: bool) -> None:
    found = [
        {"pipeline": row.name, "kind": str(row.kind), "every_seconds": row.pause_seconds, "options": dict(row.options)}
        for row in rows.values()
    ]
    if json:
        print_json({"pipelines": found})
        return
    shown = table("pipeline", "kind", "runs")
    for row in rows.values():
        pause = row.pause_seconds
        shown.add_row(row.name, str(row.kind), "all the time" if pause is None else f"every {duration_text(pause)}")
    console().print(shown)


Show = Callable[[Sequence["PipelineReport"], "Supervisor"], None]


def _document(zone: str, reports: Sequence[PipelineReport], supervisor: Supervisor) -> dict[str, Any]:
    document = {"zone": zone, "node_away": supervisor.node_away or None, "unknown": supervisor.unknown}
    return {**document, "pipelines": [asdict(each) for each in reports]}


def _lines() -> Show:
    """Write a line to stderr whenever a pipeline changes its state, has another error, or the node does not know it."""
    last: dict[str, tuple[object, ...]] = {}

    def show(reports: Sequence[PipelineReport], supervisor: Supervisor) -> None:
        for each in reports:
            strange = each.name in supervisor.unknown
            now = (each.state, each.last_error, each.finding, strange)
            if last.get(each.name) != now:
                last[each.name] = now
                why = (
                    f": {each.last_error}" if each.state == "failed" else f": {each.progress}" if each.progress else ""
                )
                say(one_line(f"{each.name}: {each.state}{why}"))
                if strange:
                    say(f"{each.name}: the node's own file does not have it; it is not shown there")
        if last.get("") != (supervisor.node_away,):
            last[""] = (supervisor.node_away,)
            if supervisor.node_away:
                say(one_line(f"the node is away: {supervisor.node_away}"))

    return show


def _table(reports: Sequence[PipelineReport], supervisor: Supervisor) -> Table:
    result = table("pipeline", "state", "runs", "failed", "facts", "next", "", right=("runs", "failed", "facts"))
    for each in reports:
        said = each.last_error if each.state == "failed" else each.progress
        due = time_text(each.next_unix_ms) if each.next_unix_ms else ""
        counts = (count_text(each.runs), count_text(each.failures), count_text(each.facts))
        result.add_row(each.name, str(each.state), *counts, due, Text(one_line(said)))
    if supervisor.node_away:
        result.caption = Text(one_line(f"the node is away: {supervisor.node_away}"))
    return result
