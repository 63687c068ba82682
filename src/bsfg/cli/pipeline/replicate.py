"""`bsfg pipeline replicate`: move the facts of a zone's inbound links."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from errno import EACCES
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import flag, handled, option
from bsfg.cli.connection import DEFAULT_CONFIG, NodeChoice, resolve
from bsfg.cli.output import count_text, examples, say, table
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
from bsfg.errors import (
    BsfgError,
    GateHeld,
    InvalidArgument,
    LeaseHeld,
    PeerUnreachable,
    SparkFailed,
    StorageReadOnly,
    TimedOut,
)
from bsfg.gate import Mode
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.table import Table

    from bsfg.spark.calls import NodeAccess
    from bsfg.spark.replicate.driver import Layout, LinkState, Replication
    from bsfg.spark.replicate.plan import LinkTaskPlan


START_SECONDS = 180.0
"""How long Spark may take to start its first task, beside the patience that was asked for."""


@dataclass(slots=True)
class _Course:
    """How far one link has come."""

    goals: dict[str, int] = field(default_factory=dict)
    stood: tuple[int, ...] = ()
    since: float = 0.0
    done: bool = False
    failure: BsfgError | None = None


class CaughtUp:
    """Watches the links of a run; ``patience_seconds`` is how long one may stand still."""

    def __init__(self, patience_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._patience_seconds, self._now = patience_seconds, now
        self._courses: dict[str, _Course] = {}

    def goes_on(self, replication: Replication) -> bool:
        """Tell whether there is more to do; raises what kept a link from being done when the others are."""
        for link in replication.links:
            course = self._courses.setdefault(link.plan.name, _Course(since=self._now()))
            course.failure = self._failed(replication, link, course)
        if all(course.failure or course.done for course in self._courses.values()):
            self._raise()
            return False
        return True

    def _failed(self, replication: Replication, link: LinkState, course: _Course) -> BsfgError | None:
        if course.done:
            return None
        # Who has told nothing of a stream in this run may not have reached its sender.
        told = link.own_reports()
        spans = replication.spans(link) if all(each.stream in told for each in link.plan.streams) else {}
        for stream, (_, end) in spans.items():
            course.goals.setdefault(stream, end)
        course.done = bool(spans) and all(start >= course.goals[stream] for stream, (start, _) in spans.items())
        stood = _standing(replication, link, spans)
        if course.done or stood != course.stood:
            course.stood, course.since = stood, self._now()
        if course.done:
            return None
        if link.mode == Mode.HELD and not replication.node_away:
            return GateHeld(f"the gate of {link.plan.name} is held: {link.reason}", link=link.plan.name)
        seconds = self._patience_seconds + (START_SECONDS if _starts(replication, link) else 0.0)
        return _reason(replication, link, seconds) if self._now() - course.since >= seconds else None

    def _raise(self) -> None:
        failures = [course.failure for course in self._courses.values() if course.failure is not None]
        if len(failures) > 1:
            message = "; ".join(each.message for each in failures)
            raise type(failures[0])(message, hint=failures[0].hint, **failures[0].details)
        if failures:
            raise failures[0]


def _starts(replication: Replication, link: LinkState) -> bool:
    """Tell whether nothing but Spark's own start is waited for."""
    return not (link.was_ours or link.lease or link.problem or replication.node_away)


def _standing(replication: Replication, link: LinkState, spans: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """Give numbers that change whenever the link gets on."""
    own = [int(report["backlog"]) for report in link.own_reports().values()]
    return (_starts(replication, link), len(own), sum(own), sum(start for start, _ in spans.values()))


def _reason(replication: Replication, link: LinkState, seconds: float) -> BsfgError:
    name = link.plan.name
    stood = f"{name} did not get on for {seconds:g} s"
    if replication.node_away:
        return PeerUnreachable(f"{stood}: this zone's node is away: {replication.node_away}", link=name)
    if link.lease not in (None, link.plan.holder):
        return LeaseHeld(f"{stood}: {link.lease} moves it", link=name, holder=link.lease)
    if link.problem:
        return SparkFailed(f"{stood}: {link.problem}", link=name)
    if link.mode == Mode.AUTONOMOUS:
        return PeerUnreachable(f"{stood}: {link.reason or 'its sender does not answer'}", link=name)
    return TimedOut(f"{stood}: {counted(link.backlog or 0, 'fact')} left", link=name)


app = typer.Typer()

REPLAY_BACKLOG = 200_000
PATIENCE_SECONDS = 120.0
LOG = "spark.log"
"""What Spark and its workers print, in the work folder."""

EPILOG = examples(
    ("bsfg pipeline replicate --config zone.toml", "all links of the zone, until it is stopped"),
    ("bsfg pipeline replicate -c zone.toml --link from-plant-a", "one link"),
    ("bsfg pipeline replicate -c zone.toml --until-caught-up", "what there is now, then leave"),
    ("bsfg pipeline replicate -c zone.toml --master spark://host:7077 --bundles 4", "on a cluster"),
)


@app.command(epilog=EPILOG)
def replicate(
    *,
    config: ZoneFile = DEFAULT_CONFIG,
    link: Annotated[list[str] | None, option("NAME", "A link to move; all with engine = spark when left out.")] = None,
    identity: AsIdentity = None,
    address: AtAddress = None,
    until_caught_up: Annotated[
        bool,
        flag(
            "--until-caught-up",
            "Move what the senders have now, then leave; a link that is held or cannot get on is an error.",
        ),
    ] = False,
    patience: Annotated[
        float,
        option(
            "SECONDS",
            "With --until-caught-up: how long a link may stand still, as without its sender, until it is an "
            "error. Spark's own start does not count, for 3 minutes at most.",
            min=1,
        ),
    ] = PATIENCE_SECONDS,
    replay_backlog: Annotated[
        int, option("N", "A link in reconciliation with so many facts left is replayed in bulk.", min=1)
    ] = REPLAY_BACKLOG,
    bundles: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Over how many bundles the links are spread; each is carried by one task, with another one beside it. "
            "Default: one for every two cores, on a cluster as many as have two slots and leave one for a replay.",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        option(
            "DIR",
            "Where each run keeps its checkpoints, in a folder of its own; nothing depends on them. Default: "
            "pipeline beside the configuration, or a folder for passing things where that cannot be written.",
        ),
    ] = None,
    json: Annotated[bool, flag("--json", "Print a line of JSON every second.")] = False,
    master: SparkMaster = None,
    conf: Conf = None,
    pack: Pack = None,
    secret_file: SecretFile = None,
    allow_clear_rpc: AllowClearRpc = False,
) -> None:
    """Move the facts of a zone's inbound links: pull, put, confirm.

    While a link is normal its facts cross as they come, in milliseconds. After an outage, when much has gathered, they
    cross as a DataFrame in large batches. The gate of the link decides, and an operator can hold it. Where a link
    stands is known to the two nodes, so this command can be killed and started again at any moment. A second one for
    the same link waits until the first is gone.
    """
    from bsfg.spark.replicate.driver import Layout, default_bundles, local_master, slots_of

    own = resolve(NodeChoice(config=config, identity=identity, address=address), ("pipeline",)).access()
    links = ConfiguredLinks(config, link, own)
    plans = links.read()
    chosen = master or local_master(bundles or min(default_bundles(), len(plans)))
    links.ship_to(chosen)
    folder = usable(work or work_folder(config.absolute().parent)).absolute()
    with (
        ends_on_signals(),
        suppress(Stopped, KeyboardInterrupt),
        spark_session("bsfg", chosen, settings_of(conf, pack, secret_file, allow_clear_rpc), folder / LOG) as spark,
        run_folder(folder) as run,
    ):
        slots = slots_of(spark, chosen, 3 if bundles is None else 2 * bundles + 1)
        layout = Layout.fitting(slots, len(plans), bundles)
        if not layout.replays:
            say(f"Spark runs {slots} tasks at once, {slots + 1} are needed to replay backlogs: they are moved live")
        lines = json_lines(partial(_document, links.zone))
        with (
            replicating(spark, links, run, replay_backlog, layout) as replication,
            nullcontext(lines) if json else staying(partial(_table, _Rates()), _Lines()) as show,
        ):
            watch = CaughtUp(patience) if until_caught_up else None

            def look(found: Replication) -> bool:
                links.follow(found)
                show(found)
                return watch is None or watch.goes_on(found)

            replication.run(look)


@contextmanager
def replicating(
    spark: SparkSession, links: ConfiguredLinks, run: Path, replay_backlog: int, layout: Layout
) -> Iterator[Replication]:
    """Have the links of a zone moved while a block runs."""
    from bsfg.spark.replicate.driver import Replication

    replication = Replication(spark, links.own, links.read(), run, replay_backlog, layout)
    try:
        replication.start()
        yield replication
    finally:
        # It finishes although more signals come.
        with handled(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT):
            replication.stop()


class ConfiguredLinks:
    """The links of a zone's configuration that a run moves, and what becomes of them when the file changes."""

    def __init__(self, config: Path, names: Sequence[str] | None, own: NodeAccess) -> None:
        from bsfg.spark.replicate.driver import holder_name

        self._config, self._names, self.own = config, names, own
        self._holder, self._is_shipped = holder_name(), False
        self.zone = ""
        self._files = FollowedFiles(config)

    def ship_to(self, master: str) -> None:
        """Have the certificates travel with the plans, unless the tasks run on this machine."""
        from bsfg.spark.cluster import is_local

        self._is_shipped = not is_local(master)

    def read(self) -> list[LinkTaskPlan]:
        """Read the configuration; raises `InvalidArgument` when it has none of the links."""
        self._files.take()
        self._moved = False
        plans = self._plans()
        self._moved = True
        if not plans:
            raise InvalidArgument(
                f'{self._config} has no link with engine = "spark"',
                hint="Add a [links.…] table, or name a link with --link.",
            )
        return plans

    def _plans(self) -> list[LinkTaskPlan]:
        from bsfg.config import Engine, load
        from bsfg.spark.replicate.plan import plan_of

        zone = load(self._config)
        self.zone = zone.zone.name
        names = self._names or [each.name for each in zone.links.values() if each.engine == Engine.SPARK]
        if self._moved:
            # What was named and is no longer there is no longer moved.
            names = [name for name in names if name in zone.links]
        plans = [plan_of(zone, name, self.own, self._holder) for name in names]
        if not self._is_shipped:
            return plans
        parts = {part for plan in plans for of in (plan.own, plan.peer) for part in (of.ca, of.certificate, of.key)}
        paths = [self._config, *sorted(Path(part) for part in parts if part is not None)]
        if paths != self._files.paths:
            # They are taken before they are read: what changes from here on is a change.
            self._files.paths = paths
            self._files.take()
            return self._plans()
        return [plan.shipped() for plan in plans]

    def follow(self, replication: Replication) -> None:
        """Look now and then whether the file has changed, and go on by it; one with a mistake changes nothing."""
        if not self._files.have_changed():
            return
        try:
            for changed in replication.replan(self._plans()):
                say(changed)
        except BsfgError as error:
            say(f"{self._config} is not taken up: {error.code}: {error.message}")


def work_folder(beside: Path) -> Path:
    """Give where a run works: beside the configuration, or where that cannot be written in a folder for passing things.

    Nothing in it needs to be kept. The folder is this user's alone, whoever else can write there.
    """
    usual = beside / "pipeline"
    if os.access(usual if usual.exists() else beside, os.W_OK | os.X_OK):
        return usual
    tag = sha256(str(beside.absolute()).encode()).hexdigest()[:12]
    passing = Path(os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or gettempdir())
    folder = passing / f"bsfg-pipeline-{os.geteuid()}-{tag}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
        raise StorageReadOnly(f"{folder} is not this user's alone", hint="Remove it, or name a folder with --work.")
    say(f"{beside} cannot be written; working in {folder}")
    return folder


def usable(folder: Path) -> Path:
    """Make a folder to work in, before Spark fails for want of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        hint = "Name a folder that this user can write with --work."
        raise StorageReadOnly(f"{folder} cannot be written: {error.strerror}", hint=hint) from None
    return folder


class _Rates:
    """How many facts per second crossed lately, from what the sender had left and what the node says arrived."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._rate: dict[str, float] = {}

    def of(self, link: LinkState) -> float:
        """Give the rate at which the backlog shrinks."""
        now, before, backlog = time.monotonic(), self._seen.get(link.plan.name), link.backlog or 0
        if before is None or now - before[0] >= 1.0:
            if before is not None:
                self._rate[link.plan.name] = max(0.0, (before[1] - backlog) / (now - before[0]))
            self._seen[link.plan.name] = (now, backlog)
        return self._rate.get(link.plan.name, 0.0)


def _table(rates: _Rates, replication: Replication) -> Table:
    result = table("link", "mode", "engine", "lag", "backlog", "left", right=("lag", "backlog", "left"))
    for link in replication.links:
        rate = rates.of(link)
        lags = [each["lag_seconds"] for each in link.streams if each["lag_seconds"] is not None]
        left = f"{link.backlog / rate:.0f} s" if rate > 0 and link.backlog else ""
        lag = f"{max(lags) * 1000:.0f} ms" if lags else ""
        backlog = "–" if link.backlog is None else count_text(link.backlog)
        result.add_row(link.plan.name, link.mode, _mover(link), lag, backlog, left)
    if replication.node_away:
        result.caption = Text(one_line(f"the node is away: {replication.node_away}"))
    return result


def _mover(link: LinkState) -> str:
    """Say what moves a link: this run, live or in a replay, another one, or nobody."""
    if link.lease == link.plan.holder:
        return str(link.engine)
    return f"waits for {link.lease}" if link.lease else "starts" if link.is_moved else "nobody moves it"


class _Lines:
    """Writes a line to stderr whenever a link changes its mode, its engine or its problem."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, ...]] = {}

    def __call__(self, replication: Replication) -> None:
        for link in replication.links:
            now = (link.mode, _mover(link), link.problem)
            if self._last.get(link.plan.name) != now:
                self._last[link.plan.name] = now
                backlog = "unknown" if link.backlog is None else str(link.backlog)
                problem = f" ({link.problem})" if link.problem else ""
                text = f"{link.plan.name}: {link.mode}, {_mover(link)}, backlog {backlog}{problem}"
                say(text)


def _document(zone: str, replication: Replication) -> dict[str, Any]:
    """Give the state of all links."""
    links = [_state(link, replication.restarts) for link in replication.links]
    return {"zone": zone, "node_away": replication.node_away or None, "links": links}


def _state(link: LinkState, restarts: int) -> dict[str, Any]:
    return {
        "link": link.plan.name,
        "mode": link.mode,
        "engine": str(link.engine),
        "holder": link.lease,
        "ours": link.lease == link.plan.holder,
        "moved": link.is_moved,
        "backlog": link.backlog,
        "replays": link.replays,
        "restarts": restarts,
        "problem": link.problem or None,
        "streams": link.streams,
    }
