"""The pipelines that `bsfg pipeline run` keeps alive, each made of the same options object as its own command.

A table of the zone's file is turned into the words of the command's line and read by the command's own parser. So what
an option means, what it may be and what it is when left out is said in one place, and a new one counts in both.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from bsfg.cli.connection import NodeChoice, Target, resolve
from bsfg.cli.output import count_text
from bsfg.cli.pipeline import app_of
from bsfg.cli.pipeline.audit import audited_link, write_report
from bsfg.cli.pipeline.ingest import IngestWish, ingest_wish
from bsfg.cli.pipeline.land import landing_settings
from bsfg.cli.pipeline.replicate import ConfiguredLinks, replicating
from bsfg.cli.pipeline.sinks import sql_sink, webhook_sink
from bsfg.config import PipelineKind, PipelineTable, ZoneConfig
from bsfg.config.kinds import nearest
from bsfg.errors import BsfgError, InvalidArgument
from bsfg.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.sinks.flow import Sink
    from bsfg.spark.ingest.work import Counts
    from bsfg.spark.land.lander import Lander
    from bsfg.spark.replicate.driver import Layout, Replication
    from bsfg.spark.supervise import Diary, KeptPipeline

OF_THE_RUN = (
    *("config", "identity", "address", "ca", "cert", "key", "server_name", "json"),
    *("master", "conf", "pack", "secret_file", "allow_clear_rpc"),
)
"""Options that are the same for all pipelines of a run: `bsfg pipeline run` has them, or the table itself."""

OF_ONE_RUN: Mapping[PipelineKind, tuple[str, ...]] = {
    PipelineKind.REPLICATE: ("until_caught_up", "patience", "work"),
    PipelineKind.LAND: ("once", "compact_only"),
    PipelineKind.INGEST: ("dry_run", "limit", "again"),
    PipelineKind.AUDIT: (),
    PipelineKind.SQL: ("once",),
    PipelineKind.WEBHOOK: ("once",),
}
"""Options that make sense for a command that somebody looks at."""

ROLES: Mapping[PipelineKind, tuple[str, ...]] = {
    PipelineKind.REPLICATE: ("pipeline",),
    PipelineKind.LAND: ("consumer", "pipeline"),
    PipelineKind.INGEST: ("producer", "pipeline"),
    PipelineKind.AUDIT: ("pipeline",),
    PipelineKind.SQL: ("consumer",),
    PipelineKind.WEBHOOK: ("consumer",),
}
"""Whose certificate is meant when a table names no identity."""


def options_of(config: ZoneConfig, row: PipelineTable) -> dict[str, Any]:
    """Read the options of a table as the command reads its line; paths start from the folder of the file."""
    where = f"[pipelines.{row.name}] {row.kind}"
    command: Any = get_command(app_of(row.kind))
    known = {name: param for param in command.params for name in _names(param)}
    refused = (*OF_THE_RUN, *OF_ONE_RUN[row.kind])
    allowed = [name for name in known if name not in refused and not name.endswith("_completion")]
    for key in row.options:
        if key not in allowed:
            why = "is not for a pipeline that is kept alive" if key in known else "is no option of its command"
            hint = f"There are {', '.join(allowed)}."
            raise InvalidArgument(f"{where}: {key} {why}{nearest(key, allowed)}", hint=hint)
    # What is given without a name comes last, whatever it begins with.
    given = sorted(row.options.items(), key=lambda item: _is_argument(known[item[0]]))
    words = [word for key, value in given for word in _words(where, key, value, known[key])]
    try:
        with command.make_context(str(row.kind), words) as context:
            found: dict[str, Any] = dict(context.params)
    except Exception as error:
        says = error.format_message() if hasattr(error, "format_message") else str(error)
        raise InvalidArgument(f"{where}: {says}", hint=f"See `bsfg pipeline {row.kind} --help`.") from None
    return {name: _placed(config, value) for name, value in found.items()}


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _names(param: Any) -> list[str]:
    if _is_argument(param):
        return [param.name]
    return [name.removeprefix("--").replace("-", "_") for name in param.opts if name.startswith("--")]


def _words(where: str, key: str, value: object, param: Any) -> Iterator[str]:
    """Write a key of a table as it would stand on the command's line."""
    if _is_argument(param):
        yield "--"
        yield from (_text(where, key, each) for each in (value if isinstance(value, list) else [value]))
        return
    option = next(name for name in param.opts if name.startswith("--"))
    if param.is_flag:
        if not isinstance(value, bool):
            raise InvalidArgument(f"{where}: {key} must be true or false, not {value!r}")
        yield from [option] if value else param.secondary_opts[:1]
    elif isinstance(value, list) and param.multiple:
        yield from (f"{option}={_text(where, key, each)}" for each in value)
    elif isinstance(value, dict) and param.multiple:
        yield from (f"{option}={name}={_text(where, f'{key}.{name}', each)}" for name, each in value.items())
    else:
        yield f"{option}={_text(where, key, value)}"


def _text(where: str, key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidArgument(f"{where}: {key} must be a text or a number, not {value!r}")
    return str(value)


def _placed(config: ZoneConfig, value: Any) -> Any:
    return config.path(value).absolute() if isinstance(value, Path) else value


def _placed_file(config: ZoneConfig, text: str | None) -> str | None:
    """Give a text that is @FILE with the whole path."""
    return f"@{config.path(Path(text[1:])).absolute()}" if text is not None and text.startswith("@") else text


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What all pipelines of a run share: the zone's file, where its node is, where Spark runs, and where to work."""

    config: Path
    address: str | None
    identity: str | None
    master: str
    work: Path
    layout: Layout

    def target(self, row: PipelineTable) -> Target:
        """Give the node, and the certificate that a pipeline calls it with."""
        identity = row.identity or (self.identity if ROLES[row.kind] == ("pipeline",) else None)
        return resolve(NodeChoice(self.config, identity, self.address), ROLES[row.kind])


def made(zone: ZoneConfig, row: PipelineTable, place: RunPlace) -> KeptPipeline:
    """Make the pipeline of a table, or raise what is wrong with it."""
    options, node = options_of(zone, row), place.target(row)
    given = {**options, "config": place.config, "address": place.address, "master": place.master, "node": node}
    match row.kind:
        case PipelineKind.REPLICATE:
            links = ConfiguredLinks(place.config, list(options["link"]) or None, node.access())
            links.ship_to(place.master)
            links.read()
            return KeptLinks(row.name, links, place, options["replay_backlog"])
        case PipelineKind.LAND:
            return KeptLanding({**given, "columns": _placed_file(zone, options["columns"])})
        case PipelineKind.INGEST:
            given["files"] = [str(place.config.absolute().parent / each) for each in options["files"]]
            return KeptIngest(ingest_wish(**given), row.settled_seconds, options["rejects"])
        case PipelineKind.AUDIT:
            audited_link(**{**given, "identity": row.identity or place.identity})
            return KeptAudit({**given, "identity": row.identity or place.identity})
        case PipelineKind.SQL:
            return KeptSink(partial(sql_sink, **given), f"write {options['consumer']} to {options['schema']}")
        case PipelineKind.WEBHOOK:
            given["folder"] = place.config.absolute().parent
            where = options["url"].partition("?")[0]
            return KeptSink(partial(webhook_sink, **given), f"post {options['consumer']} to {where}")


@dataclass(slots=True)
class KeptLinks:
    """Moves inbound links, as `bsfg pipeline replicate` does."""

    name: str
    links: ConfiguredLinks
    place: RunPlace
    replay_backlog: int
    _replayed: int = 0

    @property
    def title(self) -> str:
        """What it does."""
        return f"move the links of {self.links.zone}"

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Move them until it is to end."""
        from bsfg.spark.supervise import listening

        # Every try has a folder of its own: what another left there belongs to queries that are gone, or soon will be.
        self._replayed = 0
        folder = Path(mkdtemp(prefix=f"{self.name}-", dir=self.place.work))

        def look(found: Replication) -> bool:
            self.links.follow(found)
            self._note(found, diary)
            return not ending.is_set()

        with (
            listening(spark, diary),
            replicating(spark, self.links, folder, self.replay_backlog, self.place.layout) as replication,
        ):
            replication.run(look)

    def _note(self, found: Replication, diary: Diary) -> None:
        modes: dict[str, int] = {}
        for link in found.links:
            word = link.mode if link.lease == link.plan.holder else "not ours" if link.lease else "not moved"
            modes[word] = modes.get(word, 0) + 1
        backlogs = [link.backlog for link in found.links]
        diary.backlog = None if None in backlogs else sum(each or 0 for each in backlogs)
        diary.facts, self._replayed = diary.facts + found.replayed_facts - self._replayed, found.replayed_facts
        listed = ", ".join(f"{count} {word}" for word, count in sorted(modes.items()))
        diary.progress = f"{counted(len(found.links), 'link')}: {listed}"
        if found.node_away:
            diary.progress = f"the node is away: {found.node_away}"
        elif any(link.lease == link.plan.holder for link in found.links) or not found.links:
            diary.good()

    def look(self, diary: Diary) -> None:
        """It writes by itself."""

    def end(self) -> None:
        """It looks at the event by itself."""


@dataclass(slots=True)
class KeptLanding:
    """Lands a buffer as its facts come, as `bsfg pipeline land` does."""

    given: Mapping[str, Any]
    _lander: Lander | None = None
    _before: tuple[int, int] = (0, 0)
    _turns: int = 0
    _timed: tuple[int, float] = (0, 0.0)

    def __post_init__(self) -> None:
        landing_settings(**self.given)

    @property
    def title(self) -> str:
        """What it does."""
        return f"land {self.given['stream']}/{self.given['buffer']} in {self.given['out']}"

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Land until it is to end."""
        from bsfg.spark.land.lander import Interrupted, landing

        def waits(error: BsfgError) -> None:
            diary.problem = error

        with landing(lambda: spark, landing_settings(**self.given), waits) as lander, suppress(Interrupted):
            self._before, self._turns, self._timed = (diary.facts, diary.batches), 0, (0, 0.0)
            self._lander = lander
            if ending.is_set():
                return
            try:
                lander.join(for_ever=True)
                # What it waited for is there. That it works it has not shown yet.
                diary.problem = None
                lander.follow()
            finally:
                self.look(diary)
                self._lander = None

    def look(self, diary: Diary) -> None:
        """Write down how far it is."""
        lander = self._lander
        if lander is None or not lander.has_joined:
            return
        done, problem = lander.done, lander.problem
        batches, seconds = done.batches - self._timed[0], done.seconds - self._timed[1]
        if batches and seconds:
            diary.batch_seconds, self._timed = seconds / batches, (done.batches, done.seconds)
        diary.facts, diary.batches = self._before[0] + done.facts, self._before[1] + done.batches
        diary.backlog = done.backlog
        diary.progress = f"{counted(done.facts, 'fact')} landed since the start, up to offset {count_text(done.next)}"
        if problem is not None:
            diary.problem = problem
        elif lander.turns > self._turns:
            # Only what was done since the last look is good: a landing that hangs has no problem to tell of.
            self._turns = lander.turns
            diary.good()

    def end(self) -> None:
        """Have the landing end; what is not committed is as if it had never begun."""
        if self._lander is not None:
            self._lander.end()


@dataclass(slots=True)
class KeptIngest:
    """Makes facts of the files of a folder and of those that come, as `bsfg pipeline ingest` does."""

    wish: IngestWish
    settled_seconds: float
    rejects: Path | None = None

    @property
    def title(self) -> str:
        """What it does."""
        return f"ingest {', '.join(self.wish.files)} into {self.wish.plan.stream}"

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Ingest what is there now and was not before."""
        from bsfg.spark.ingest.run import Ingest, IngestWatch

        sources = self.wish.found(may_be_none=True)
        settled = [each for each in sources.files if self._is_settled(each.path)]
        with self.wish.opened() as job:
            fresh = job.new_sources(settled, self.wish.changed)
            diary.backlog = sum(chunk.rows for _, _, chunk in job.ahead())
            if not fresh and not diary.backlog:
                if not diary.progress or diary.last_good_unix_ms == 0:
                    diary.progress = f"nothing new among {counted(len(sources.files), 'file')}"
                return
            began = time.monotonic()

            def planned(rows: int) -> None:
                diary.backlog, diary.progress = rows, f"{count_text(rows)} rows to ingest"

            def done(counts: Counts) -> None:
                nonlocal began
                diary.batch(time.monotonic() - began)
                began = time.monotonic()
                diary.facts += counts.inserted
                diary.backlog = max(0, (diary.backlog or 0) - counts.rows)
                diary.good()
                self._check(ending)

            def waiting(error: BsfgError) -> None:
                diary.problem = error
                self._check(ending)

            assert self.wish.settings is not None
            ingest = Ingest(spark, job, self.wish.plan, self.wish.settings, IngestWatch(planned, done, waiting))
            ingest.survey(fresh)
            ingest.run()
            counts = job.progress.counts
            said = (
                f"{counted(len(fresh), 'file')}, {count_text(counts.rows)} rows: {count_text(counts.inserted)} stored"
            )
            rejected = f", {count_text(counts.rejected)} rejected, see {job.rejects}" if counts.rejected else ""
            diary.backlog, diary.progress = 0, said + rejected
            job.report()
            if self.rejects is not None and job.rejects.exists():
                shutil.copyfile(job.rejects, self.rejects)

    def _is_settled(self, path: str) -> bool:
        """Tell whether nobody has written to a file for a while."""
        try:
            return time.time() - os.stat(path).st_mtime >= self.settled_seconds
        except OSError:
            return False

    def _check(self, ending: threading.Event) -> None:
        """End between two steps; the next run goes on from there."""
        if ending.is_set():
            raise InvalidArgument("the run was ended")

    def look(self, diary: Diary) -> None:
        """It writes by itself."""

    def end(self) -> None:
        """Its jobs are cancelled; what is under way begins again with the next run."""


@dataclass(slots=True)
class KeptAudit:
    """Compares both ends of a link, as `bsfg pipeline audit` does."""

    given: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What it does."""
        return f"audit {self.given['link'] or 'the link'}"

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Compare them once."""
        from bsfg.spark.audit import audit

        began = time.monotonic()

        def progress(title: str, done: int, total: int) -> None:
            nonlocal began
            diary.progress = f"{title}: {done} of {total}"
            if done == total:
                diary.batch(time.monotonic() - began)
                began = time.monotonic()

        verdict = audit(spark, audited_link(**self.given), progress=progress)
        if self.given["report"] is not None:
            write_report(self.given["report"], verdict)
        diary.facts += verdict.facts
        kinds = ", ".join(f"{kind} ×{count_text(count)}" for kind, count in sorted(verdict.counts.items()))
        facts = counted(verdict.facts, "fact")
        diary.finding = "" if verdict.clean else f"{kinds or 'a check failed'} among {facts} of {verdict.link}"
        diary.progress = f"clean: {facts}, the same at both ends" if verdict.clean else f"not clean: {diary.finding}"

    def look(self, diary: Diary) -> None:
        """It writes by itself."""

    def end(self) -> None:
        """Its jobs are cancelled; nothing was written at either end."""


@dataclass(slots=True)
class KeptSink:
    """Gives the facts of a consumer on, as `bsfg pipeline sql` and `webhook` do; no task of Spark takes part."""

    make: Callable[[], Sink]
    title: str
    _sink: Sink | None = None
    _before: tuple[int, int] = (0, 0)
    _batches: int = 0

    def __post_init__(self) -> None:
        self.make()

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Give them on until it is to end."""
        self._before, self._batches, self._sink = (diary.facts, diary.batches), 0, (sink := self.make())
        try:
            if not ending.is_set():
                sink.run()
        finally:
            self.look(diary)
            self._sink = None

    def look(self, diary: Diary) -> None:
        """Write down how far it is."""
        sink = self._sink
        if sink is None:
            return
        done = sink.done
        diary.facts, diary.batches = self._before[0] + done.facts, self._before[1] + done.batches
        if done.batches:
            diary.batch_seconds, diary.backlog = done.batch_seconds, done.backlog
        noted = "".join(f", {count_text(count)} {name}" for name, count in sink.target.noted().items() if count)
        diary.progress = f"{counted(done.facts, 'fact')} since the start{noted}"
        diary.problem = sink.problem
        # That it began is nothing good: one that is refused each time fails, and one that hangs has no problem to tell.
        if diary.problem is None and (done.batches > self._batches or sink.has_caught_up):
            self._batches = done.batches
            diary.good()

    def end(self) -> None:
        """Have it end; what the target has not taken comes again."""
        if self._sink is not None:
            self._sink.end()
