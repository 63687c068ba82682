"""The driver: starts the live queries of every link, switches to replay for backlogs, and stops without loss."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bsfg.errors import BsfgError, LeaseHeld, LeaseLost, SparkFailed, WorkersUnfit
from bsfg.gate import Mode
from bsfg.journey.link import FetchRequest
from bsfg.spark.calls import NodeAccess, calls
from bsfg.spark.replicate.plan import LEASE_TTL_MS, LinkTaskPlan
from bsfg.spark.replicate.replay import asked, ended, live_failure, start_replay
from bsfg.spark.replicate.shift import FORMAT, LiveSource
from bsfg.spark.session import activate, failed, hush

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from bsfg.wire.service import LeaseView


RUNS, LOCK = "runs", "lock"


@contextmanager
def run_folder(work: Path) -> Iterator[Path]:
    """Give a new folder under ``work`` to a block, and remove it afterwards, with those of runs that are dead."""
    runs = work / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    # Nobody looks for dead runs while one is being born: its folder is there before its lock is.
    with (runs / LOCK).open("ab") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        remove_dead(runs)
        folder = runs / f"{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir()
        lock = _locked(folder)
    assert lock is not None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_dead(runs: Path) -> None:
    """Remove the folders of runs whose process is gone."""
    for folder in runs.iterdir():
        if folder.is_dir():
            with suppress(OSError):
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """Lock a folder, None when another process has it."""
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


PAIR = ("a", "b")
LOOK_SECONDS = 0.25
ASK_SECONDS = 5.0
"""How long a sender may take to say where its buffers end, before it counts as away."""

ONE_FACT = FetchRequest(max_facts=1, max_bytes=1)
RENEW_SECONDS = 1.5
STOP_SECONDS = 4.0
LEASE_SECONDS = 10.0
REPLAY_AGAIN_SECONDS = 15.0
"""How long the live tasks have a link to themselves after a replay that failed."""

MEND_SECONDS, MEND_SECONDS_MOST = 0.5, 15.0
"""How long a live query that failed stays away: twice as long each time, unless it had worked."""

FAILURES_MAX = 10
"""How often in a row a live query may fail without having worked before that is the end: two minutes of pauses."""

WORKED_SECONDS = 300.0
"""A query that waited so long for its turn has worked, too."""

VACANT_SECONDS = 5.0
"""For how long nobody may hold the lease of a link before it counts as moved by nobody; tasks change in less."""

LIVE_TASK_ATTEMPTS = 50
"""A task that is killed is simply started again; one that cannot work at all ends its query, which is mended. On a
cluster Spark's own `spark.task.maxFailures` counts."""


class MovingEngine(StrEnum):
    """What moves a link at the moment."""

    LIVE = "live"
    REPLAY = "replay"


@dataclass(slots=True)
class LiveQuery:
    """One of the two live queries of a link, and when it may start again after a failure."""

    query: StreamingQuery
    began: float
    pause: float = MEND_SECONDS / 2
    failures: int = 0
    again: float | None = None

    def fail(self, now: float, *, worked: bool) -> None:
        """Plan the next start; a query that fails without having worked waits longer each time."""
        self.failures = 1 if worked else self.failures + 1
        self.pause = MEND_SECONDS if worked else min(2 * self.pause, MEND_SECONDS_MOST)
        self.again = now + self.pause

    def restarted(self, query: StreamingQuery, now: float) -> LiveQuery:
        """Give the query that takes the place of this one."""
        return LiveQuery(query, now, self.pause, self.failures)


@dataclass(slots=True)
class LinkState:
    """One link as the driver sees it."""

    plan: LinkTaskPlan
    folder: Path
    queries: dict[str, LiveQuery] = field(default_factory=dict)
    engine: MovingEngine = MovingEngine.LIVE
    board_mode: str = str(Mode.AUTONOMOUS)
    reason: str = ""
    lease: str | None = None
    vacant_since: float | None = None
    ours_at: float = float("-inf")
    streams: list[dict[str, Any]] = field(default_factory=list)
    replays: int = 0
    restarts: int = 0
    problem: str = ""
    no_replay_before: float = 0.0
    thread: threading.Thread | None = None

    @property
    def is_moved(self) -> bool:
        """Whether anybody moves the link: who does holds its lease."""
        return self.vacant_since is None or time.monotonic() - self.vacant_since < VACANT_SECONDS

    @property
    def was_ours(self) -> bool:
        """Whether a task of this run has held the lease."""
        return self.ours_at > float("-inf")

    @property
    def mode(self) -> str:
        """The mode of the gate; a link that nobody moves is autonomous, whatever was said of it last."""
        return self.board_mode if self.is_moved or self.board_mode == Mode.HELD else str(Mode.AUTONOMOUS)

    @property
    def backlog(self) -> int | None:
        """How many facts the sender has left, None when nobody knows."""
        if not self.streams or not self.is_moved:
            return None
        return sum(int(each["backlog"]) for each in self.streams)

    def own_reports(self) -> dict[str, dict[str, Any]]:
        """Give what tasks of this run have told last, by stream."""
        return {each["stream"]: each for each in self.streams if each.get("holder") == self.plan.holder}

    def look(self, gate: Mapping[str, Any], now: float) -> None:
        """Take what the node says of the link."""
        self.board_mode, self.reason = gate["mode"], gate["reason"]
        self.lease, self.streams = gate["lease"], gate["reports"]
        if self.lease == self.plan.holder:
            self.ours_at = now
        self._vacant(now, vacant=self.lease is None)

    def look_in_vain(self, now: float) -> None:
        """Take it that nothing is known of the link, since the node is away."""
        self._vacant(now, vacant=True)

    def _vacant(self, now: float, *, vacant: bool) -> None:
        self.vacant_since = None if not vacant else now if self.vacant_since is None else self.vacant_since


def holder_name() -> str:
    """Name this run in words that an operator understands, and that no other run has."""
    return f"spark {socket.gethostname()} {os.getpid()} {os.urandom(3).hex()}"


def local_master(links: int) -> str:
    """Give the master that fits so many links on this machine: two live tasks each, and two for replays."""
    return f"local[{2 * links + 2},{LIVE_TASK_ATTEMPTS}]"


class Replication:
    """The handoff of some links of one zone, on one Spark session."""

    def __init__(
        self, spark: SparkSession, own: NodeAccess, plans: Sequence[LinkTaskPlan], work: Path, replay_backlog: int
    ) -> None:
        self._spark, self._own, self._replay_backlog = spark, own, replay_backlog
        self.links = [LinkState(plan, work / plan.name) for plan in plans]
        self._stopping = threading.Event()
        self.node_away = ""

    def start(self) -> None:
        """Start the live queries of every link."""
        self._spark.dataSource.register(LiveSource)
        for link in self.links:
            link.plan.write(link.folder / "plan")
            for half in PAIR:
                self._start_live(link, half)

    def run(self, look: Callable[[Replication], bool]) -> None:
        """Work until ``look``, which is called several times a second, gives False."""
        while not self._stopping.is_set():
            self._observe()
            for link in self.links:
                self._mend(link)
                if self._wants_replay(link):
                    link.thread = threading.Thread(target=self.replay, args=(link,), daemon=True)
                    link.thread.start()
            if not look(self):
                return
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Stop everything: what is under way is finished or left to the next run, and no lease is kept."""
        self._stopping.set()
        hush(self._spark)
        for link in self.links:
            self._stop_link(link)

    # What the node says.

    def _observe(self) -> None:
        from bsfg.wire.adminclient import AdminClient

        try:
            status = calls().run(AdminClient(calls().connection(self._own)).status())
        except BsfgError as error:
            self.node_away = f"{error.code}: {error.message}"
            for link in self.links:
                link.look_in_vain(time.monotonic())
            return
        self.node_away = ""
        gates = {each["link"]: each for each in status["links"] if each["side"] == "receiver"}
        for link in self.links:
            gate = gates.get(link.plan.name)
            if gate is not None:
                link.look(gate, time.monotonic())

    def spans(self, link: LinkState) -> dict[str, tuple[int, int]]:
        """Ask the sender of a link what it has: the first offset that is not confirmed, and the end, by stream.

        Nothing is given while the sender does not answer.
        """

        async def work() -> dict[str, tuple[int, int]]:
            found = {}
            async with asyncio.timeout(ASK_SECONDS):
                for each in link.plan.streams:
                    fetched = await asked(link.plan, each, ONE_FACT, link.plan.link.carry_only)
                    found[each.stream] = (fetched.start, fetched.end)
            return found

        try:
            return calls().run(work())
        except (BsfgError, TimeoutError):
            return {}

    def _wants_replay(self, link: LinkState) -> bool:
        # A link with a rate limit has nothing to gain from bulk.
        limited = link.plan.link.rate_limit > 0
        if link.engine == MovingEngine.REPLAY or link.mode != Mode.RECONCILIATION or self.node_away or limited:
            return False
        ours = link.lease == link.plan.holder
        return ours and (link.backlog or 0) >= self._replay_backlog and time.monotonic() >= link.no_replay_before

    # Live.

    def _start_live(self, link: LinkState, half: str) -> None:
        try:
            query = self._live_query(link, half)
        except Exception as error:
            # Spark runs the Python source once here already, to learn of its columns.
            raise live_failure(error) from None
        live, now = link.queries.get(half), time.monotonic()
        link.queries[half] = live.restarted(query, now) if live else LiveQuery(query, now)

    def _live_query(self, link: LinkState, half: str) -> StreamingQuery:
        writing = (
            self._spark.readStream.format(FORMAT)
            .option("plan", str((link.folder / "plan").absolute()))
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(link.folder / f"live-{half}-{link.restarts}"))
            .queryName(f"live {link.plan.name} {half}")
        )
        return writing.start()

    def _mend(self, link: LinkState) -> None:
        """Start a live query that failed again, after a pause.

        Raises `SparkFailed` when Spark itself is gone, and when a query fails time after time: nothing can be mended.
        """
        for half, live in list(link.queries.items()):
            try:
                active = live.query.isActive
                failure = None if active else live.query.exception()
            except Exception as error:
                raise failed("Spark has ended", f"{type(error).__name__}: {error}") from None
            if active or self._stopping.is_set():
                continue
            if self._spark.sparkContext._jsc.sc().isStopped():
                raise failed("Spark has ended")
            if live.again is None:
                self._failed(link, live, failure)
            elif time.monotonic() >= live.again:
                link.restarts += 1
                self._start_live(link, half)

    def _failed(self, link: LinkState, live: LiveQuery, failure: object) -> None:
        now, error = time.monotonic(), live_failure(failure)
        link.problem = error.message
        live.fail(now, worked=link.ours_at >= live.began or now - live.began > WORKED_SECONDS)
        if live.failures >= FAILURES_MAX or isinstance(error, WorkersUnfit):
            times = f"{live.failures} times in a row" if live.failures > 1 else "at once"
            message = f"the tasks of {link.plan.name} failed {times}: {error.message}"
            raise type(error)(message, hint=error.hint, link=link.plan.name)

    # Replay.

    def replay(self, link: LinkState) -> None:
        """Take the lease from the live tasks and move in bulk what the sender has left."""
        link.engine = MovingEngine.REPLAY
        activate(self._spark)
        try:
            lease = self._take(link, LEASE_SECONDS)
            try:
                for each in link.plan.streams:
                    self._replay_stream(link, each, lease)
                link.problem = ""
            finally:
                self._give_back(link, lease.token)
        except BsfgError as error:
            link.problem = f"{error.code}: {error.message}"[:300]
            link.no_replay_before = time.monotonic() + REPLAY_AGAIN_SECONDS
        except Exception as error:
            link.problem = f"{type(error).__name__}: {error}"[:300]
            link.no_replay_before = time.monotonic() + REPLAY_AGAIN_SECONDS
        finally:
            link.engine = MovingEngine.LIVE

    def _replay_stream(self, link: LinkState, of: Any, lease: LeaseView) -> None:
        replay = start_replay(self._spark, link.plan, of, lease.token, link.folder / f"replay-{of.stream}")
        if replay is None:
            return
        link.replays += 1
        try:
            while not ended(replay.query, RENEW_SECONDS):
                self._renew(link, lease.token)
                self._report_backlog(link, of.stream, lease.token)
                if self._stopping.is_set():
                    return
        finally:
            with suppress(Exception):
                replay.query.stop()

    def _report_backlog(self, link: LinkState, stream: str, token: str) -> None:
        """Tell the board how far the replay is: what the sender has left is what it has not confirmed yet."""
        from bsfg.wire.adminclient import AdminClient
        from bsfg.wire.service import LinkReport

        of = next(each for each in link.plan.streams if each.stream == stream)

        async def work() -> None:
            fetched = await asked(link.plan, of, ONE_FACT, link.plan.link.carry_only)
            admin = AdminClient(calls().connection(self._own))
            backlog = fetched.end - fetched.start
            await admin.report_link(LinkReport(link.plan.name, stream, backlog=backlog, lease=token))

        with suppress(BsfgError):
            calls().run(work())

    # The lease.

    def _take(self, link: LinkState, seconds: float) -> LeaseView:
        """Take the lease from the live tasks, which give it up at once."""
        from bsfg.wire.adminclient import AdminClient

        admin = AdminClient(calls().connection(self._own))
        plan = link.plan
        deadline = time.monotonic() + seconds
        while True:
            try:
                return calls().run(
                    admin.acquire_lease(plan.name, plan.holder, LEASE_TTL_MS, wait_seconds=seconds, urgent=True)
                )
            except LeaseHeld as held:
                if held.details.get("holder") != plan.holder or time.monotonic() > deadline:
                    raise

    def _renew(self, link: LinkState, token: str) -> None:
        from bsfg.wire.adminclient import AdminClient

        admin = AdminClient(calls().connection(self._own))
        try:
            lease = calls().run(admin.renew_lease(link.plan.name, token, LEASE_TTL_MS))
        except LeaseLost:
            raise
        except BsfgError:
            return  # the node is away; what is put meanwhile waits for it, too
        if lease.mode == Mode.HELD:
            raise SparkFailed("the gate of the link is held")

    def _give_back(self, link: LinkState, token: str) -> None:
        from bsfg.wire.adminclient import AdminClient

        with suppress(BsfgError):
            calls().run(AdminClient(calls().connection(self._own)).release_lease(link.plan.name, token))

    def _stop_link(self, link: LinkState) -> None:
        if link.thread is not None:
            link.thread.join(STOP_SECONDS)
        token = None
        with suppress(BsfgError):
            token = self._take(link, STOP_SECONDS).token
        for live in link.queries.values():
            with suppress(Exception):
                live.query.stop()
        if token is not None:
            self._give_back(link, token)
