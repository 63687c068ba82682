"""The driver: starts the live queries, switches links to replay for backlogs, and stops without loss."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.errors import BsfgError, InvalidArgument, LeaseHeld, LeaseLost, SparkFailed, WorkersUnfit
from bsfg.gate import Mode
from bsfg.journey.link import FetchRequest
from bsfg.spark.calls import NodeAccess, calls
from bsfg.spark.replicate import FORMAT, LiveSource
from bsfg.spark.replicate.plan import LEASE_TTL_MS, LinkTaskPlan, StreamTaskPlan, spread
from bsfg.spark.replicate.replay import asked, ended, live_failure, start_replay
from bsfg.spark.session import activate, failed, hush, own_format
from bsfg.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.service import LeaseView


PAIR = ("a", "b")
LOOK_SECONDS, LOOK_SECONDS_MOST = 0.25, 2.0
LOOK_PART = 40
"""How many times as long as a look at the node takes there is none: with hundreds of links it tells of each of them."""

ASK_SECONDS = 5.0
"""How long a sender may take to say where its buffers end, before it counts as away."""

ONE_FACT = FetchRequest(max_facts=1, max_bytes=1)
RENEW_SECONDS = 1.5
STOP_SECONDS = 4.0
LEASE_SECONDS = 10.0
REPLAYS = 2
"""How many backlogs are replayed side by side, where nobody says else and there are slots for so many."""

REPLAY_SHARE_SECONDS = 60.0
"""How long a replay goes on, and then to the end of its micro-batch, while other links wait for its place."""

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

ALONE_SECONDS = 5.0
"""How long the first live query is alone at most, as when another run holds the leases."""

LAST_PLAN = 1 << 62
"""The number of the plan of a run that ends: every task goes by an older one."""

LIVE_TASK_ATTEMPTS = 50
"""A task that is killed is simply started again; one that cannot work at all ends its query, which is mended. On a
cluster Spark's own `spark.task.maxFailures` counts."""


class MovingEngine(StrEnum):
    """What moves a link at the moment."""

    LIVE = "live"
    REPLAY = "replay"


@dataclass(slots=True)
class LiveQuery:
    """One of the two live queries, and when it may start again after a failure."""

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
    engine: MovingEngine = MovingEngine.LIVE
    board_mode: str = str(Mode.AUTONOMOUS)
    reason: str = ""
    lease: str | None = None
    vacant_since: float | None = None
    ours_at: float = float("-inf")
    streams: list[dict[str, Any]] = field(default_factory=list)
    replays: int = 0
    replayed_at: float = float("-inf")
    is_removed: bool = False
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


def default_bundles(cores: int | None = None) -> int:
    """Give how many bundles fit a machine: one for every two cores."""
    return max(1, (cores or os.cpu_count() or 1) // 2)


def slots_for(bundles: int, replays: int = 1) -> int:
    """Give how many tasks must be able to run at once: two for each bundle, and one for each replay."""
    return 2 * bundles + replays


def local_master(bundles: int, replays: int = REPLAYS) -> str:
    """Give the master that fits so many bundles and replays on this machine."""
    return f"local[{slots_for(bundles, replays)},{LIVE_TASK_ATTEMPTS}]"


LOCAL_SLOTS = re.compile(r"local(?:\[\s*(\*|\d+)\s*(?:,\s*\d+\s*)?\])?")
EXECUTORS_SECONDS = 15.0
"""How long the machines of a cluster have to come, where nobody has said how many bundles there are to be."""


def slots_of(spark: SparkSession, master: str, enough: int) -> int:
    """Give how many tasks Spark runs at once; on a cluster as soon as there are ``enough``, or after a while."""
    found = LOCAL_SLOTS.fullmatch(master)
    if found is not None:
        return (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)
    ends = time.monotonic() + EXECUTORS_SECONDS
    while (slots := int(spark.sparkContext.defaultParallelism)) < enough and time.monotonic() < ends:
        time.sleep(LOOK_SECONDS)
    return slots


@dataclass(frozen=True, slots=True)
class Layout:
    """Over how many bundles links are spread, and how many backlogs are replayed side by side."""

    bundles: int = 1
    replays: int = REPLAYS

    @staticmethod
    def fitting(slots: int, links: int, asked: int | None = None, replays: int = REPLAYS) -> Layout:
        """Give what fits so many slots, or raise `InvalidArgument` when what was ``asked`` for does not."""
        bundles = max(1, (slots - 1) // 2) if asked is None else asked
        bundles = max(1, min(bundles, links))
        if slots < slots_for(bundles, 0):
            raise InvalidArgument(
                f"Spark runs {slots} tasks at once here, {counted(bundles, 'bundle')} of links need "
                f"{slots_for(bundles)}: two live tasks each, and one for a replay",
                hint="Give it more slots, such as --master local[N], or fewer --bundles.",
                slots=slots,
                needed=slots_for(bundles),
            )
        return Layout(bundles, max(0, min(replays, slots - 2 * bundles)))


class Replication:
    """The handoff of some links of one zone, on one Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        own: NodeAccess,
        plans: Sequence[LinkTaskPlan],
        work: Path,
        replay_backlog: int,
        layout: Layout | None = None,
    ) -> None:
        self._spark, self._own, self._replay_backlog = spark, own, replay_backlog
        self._work, self._layout = work, layout or Layout()
        self._holder = plans[0].holder if plans else holder_name()
        self.links = [LinkState(plan, work / plan.name) for plan in plans]
        # Tasks call this zone's node as their links do: elsewhere there are no files of this machine.
        self._plan = spread(plans, self._layout.bundles, plans[0].own if plans else own, self._holder)
        self._queries: dict[str, LiveQuery] = {}
        self.restarts = 0
        self._stopping = threading.Event()
        self._replays_wait = False
        self._leaving: list[LinkState] = []
        self._told_plan, self.replayed_facts = 1, 0
        self.node_away = ""

    def start(self) -> None:
        """Start the first of the two live queries, which carry all links; the second follows when it is needed."""
        self._plan.write(self._plan_file)
        self._start_live(PAIR[0])

    @property
    def _plan_file(self) -> Path:
        return (self._work / "plan").absolute()

    def run(self, look: Callable[[Replication], bool]) -> None:
        """Work until ``look``, which is called several times a second, gives False."""
        while not self._stopping.is_set():
            began = time.monotonic()
            self._observe()
            took = time.monotonic() - began
            self._complete()
            self._mend()
            self._replay_some()
            if not look(self):
                return
            time.sleep(min(LOOK_SECONDS_MOST, max(LOOK_SECONDS, LOOK_PART * took)))

    def stop(self) -> None:
        """Stop everything: what is under way is finished or left to the next run, and no lease is kept."""
        self._stopping.set()
        hush(self._spark)
        for link in [*self.links, *self._leaving]:
            if link.thread is not None:
                link.thread.join(STOP_SECONDS)
        self._tell_tasks(LAST_PLAN)
        tokens = calls().run(self._take_all())
        for live in self._queries.values():
            with suppress(Exception):
                live.query.stop()
        for link, token in zip(self.links, tokens, strict=True):
            if token is not None:
                self._give_back(link, token)

    def replan(self, plans: Sequence[LinkTaskPlan]) -> list[str]:
        """Go on with other links, or other settings of them, from the next shift on; give what changes, in words."""
        known, wanted = {link.plan.name: link for link in self.links}, {plan.name: plan for plan in plans}
        said = [f"{name}: no longer moved" for name in known if name not in wanted]
        for name, link in known.items():
            link.is_removed = name not in wanted
        for name, plan in wanted.items():
            if name not in known:
                said.append(f"{name}: new")
                known[name] = LinkState(plan, self._work / name)
            elif known[name].plan != plan:
                said.append(f"{name}: changed")
                known[name].plan = plan
        if said:
            self._leaving += [link for link in known.values() if link.is_removed]
            self.links = [known[name] for name in wanted]
            number, places = self._plan.number + 1, self._plan.places
            own = plans[0].own if plans else self._plan.bundles[0].own
            self._plan = spread(plans, self._layout.bundles, own, self._holder, number, places)
            self._plan.write(self._plan_file)
            self._tell_tasks(number)
        return said

    def _tell_tasks(self, plan: int) -> None:
        """Have the tasks that go by an older plan end their shifts soon, as soon as the node can be told."""
        admin = self._admin()
        try:
            calls().run(admin.acquire_leases([], self._holder, LEASE_TTL_MS, plan=plan))
            self._told_plan = plan
        except BsfgError:
            self._told_plan = 0

    async def _take_all(self) -> list[str | None]:
        """Take the leases of all links from the live tasks, as far as they can be had."""

        async def take(link: LinkState) -> str | None:
            with suppress(BsfgError):
                return (await self._taken(link, STOP_SECONDS)).token
            return None

        return list(await asyncio.gather(*(take(link) for link in self.links)))

    # What the node says.

    def _observe(self) -> None:
        try:
            status = calls().run(self._admin().status())
        except BsfgError as error:
            self.node_away = f"{error.code}: {error.message}"
            for link in self.links:
                link.look_in_vain(time.monotonic())
            return
        if self.node_away or self._told_plan < self._plan.number:
            # A node that was away may be another process, which has not heard of it.
            self._tell_tasks(self._plan.number)
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

    # Live.

    def _start_live(self, half: str) -> None:
        try:
            query = self._live_query(half)
        except Exception as error:
            # Spark runs the Python source once here already, to learn of its columns.
            raise live_failure(error) from None
        live, now = self._queries.get(half), time.monotonic()
        self._queries[half] = live.restarted(query, now) if live else LiveQuery(query, now)

    def _complete(self) -> None:
        """Start the second query when the first one moves links: beside each other both would start more slowly."""
        first, *others = PAIR
        live = self._queries[first]
        if live.failures or any(link.was_ours for link in self.links) or time.monotonic() - live.began > ALONE_SECONDS:
            for half in others:
                if half not in self._queries:
                    self._start_live(half)

    def _live_query(self, half: str) -> StreamingQuery:
        writing = (
            self._spark.readStream.format(own_format(self._spark, LiveSource, f"{FORMAT}-{half}"))
            .option("plan", str(self._plan_file))
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(self._work / f"live-{half}-{self.restarts}"))
            .queryName(f"links as facts come, {half} of two")
        )
        return writing.start()

    def _mend(self) -> None:
        """Start a live query that failed again, after a pause.

        Raises `SparkFailed` when Spark itself is gone, and when a query fails time after time: nothing can be mended.
        """
        for half, live in list(self._queries.items()):
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
                self._failed(live, failure)
            elif time.monotonic() >= live.again:
                self.restarts += 1
                self._start_live(half)

    def _failed(self, live: LiveQuery, failure: object) -> None:
        now, error = time.monotonic(), live_failure(failure)
        for link in self.links:
            link.problem = error.message
        worked = any(link.ours_at >= live.began for link in self.links) or now - live.began > WORKED_SECONDS
        live.fail(now, worked=worked)
        if live.failures >= FAILURES_MAX or isinstance(error, WorkersUnfit):
            times = f"{live.failures} times in a row" if live.failures > 1 else "at once"
            raise type(error)(f"the live tasks failed {times}: {error.message}", hint=error.hint)

    # Replay.

    def _replay_some(self) -> None:
        """Begin to replay the backlogs that there are places for, those first that were replayed the longest ago."""
        wanting = [link for link in self.links if self._wants_replay(link)]
        self._leaving = [link for link in self._leaving if link.engine == MovingEngine.REPLAY]
        busy = sum(link.engine == MovingEngine.REPLAY for link in [*self.links, *self._leaving])
        for link in sorted(wanting, key=lambda each: each.replayed_at)[: max(0, self._layout.replays - busy)]:
            link.engine = MovingEngine.REPLAY
            link.thread = threading.Thread(target=self.replay, args=(link,), daemon=True)
            link.thread.start()
        self._replays_wait = len(wanting) > self._layout.replays - busy

    def _wants_replay(self, link: LinkState) -> bool:
        # A link with a bound has nothing to gain from bulk, which keeps none.
        limited = link.plan.link.rate_limit > 0 or bool(link.plan.link.bandwidth)
        if link.engine == MovingEngine.REPLAY or link.mode != Mode.RECONCILIATION or self.node_away or limited:
            return False
        ours = link.lease == link.plan.holder
        return ours and (link.backlog or 0) >= self._replay_backlog and time.monotonic() >= link.no_replay_before

    def replay(self, link: LinkState) -> None:
        """Take the lease from the live tasks and move in bulk what the sender has left."""
        link.engine, plan = MovingEngine.REPLAY, link.plan
        activate(self._spark)
        try:
            lease = self._take(link, LEASE_SECONDS)
            try:
                for each in plan.streams:
                    self._replay_stream(link, plan, each, lease)
                    if not self._is_replayed(link, plan):
                        break
                link.problem = ""
            finally:
                self._give_back(link, lease.token)
        except Exception as error:
            what = error.code if isinstance(error, BsfgError) else type(error).__name__
            link.problem = f"{what}: {error.message if isinstance(error, BsfgError) else error}"[:300]
            link.no_replay_before = time.monotonic() + REPLAY_AGAIN_SECONDS
        finally:
            link.replayed_at = time.monotonic()
            link.engine = MovingEngine.LIVE

    def _is_replayed(self, link: LinkState, plan: LinkTaskPlan) -> bool:
        """Tell whether a replay by some plan goes on: not that of a link which is removed, or has another plan now."""
        return not self._stopping.is_set() and not link.is_removed and link.plan is plan

    def _replay_stream(self, link: LinkState, plan: LinkTaskPlan, of: StreamTaskPlan, lease: LeaseView) -> None:
        replay = start_replay(self._spark, plan, of, lease.token, link.folder / f"replay-{of.stream}")
        if replay is None:
            return
        link.replays += 1
        began, batches = time.monotonic(), 0
        try:
            while not ended(replay.query, RENEW_SECONDS):
                self._renew(link, lease.token)
                self._report_backlog(plan, of, lease.token)
                before, batches = batches, replay.batches
                if not self._is_replayed(link, plan):
                    return
                # What is left comes in its turn; what the stop interrupts is known by its keys.
                if self._replays_wait and batches > before and time.monotonic() - began > REPLAY_SHARE_SECONDS:
                    return
        finally:
            with suppress(Exception):
                replay.query.stop()
            with suppress(Exception):
                self.replayed_facts += replay.facts

    def _report_backlog(self, plan: LinkTaskPlan, of: StreamTaskPlan, token: str) -> None:
        """Tell the board how far the replay is: what the sender has left is what it has not confirmed yet."""
        from bsfg.wire.service import LinkReport

        async def work() -> None:
            fetched = await asked(plan, of, ONE_FACT, plan.link.carry_only)
            backlog = fetched.end - fetched.start
            await self._admin().report_link(LinkReport(plan.name, of.stream, backlog=backlog, lease=token))

        with suppress(BsfgError):
            calls().run(work())

    def _admin(self) -> AdminClient:
        """Give the way to this zone's node."""
        from bsfg.wire.adminclient import AdminClient

        return AdminClient(calls().connection(self._own))

    # The lease.

    def _take(self, link: LinkState, seconds: float) -> LeaseView:
        """Take the lease from the live tasks, which give it up at once."""
        return calls().run(self._taken(link, seconds))

    async def _taken(self, link: LinkState, seconds: float) -> LeaseView:
        admin, plan, deadline = self._admin(), link.plan, time.monotonic() + seconds
        while True:
            try:
                return await admin.acquire_lease(
                    plan.name, plan.holder, LEASE_TTL_MS, wait_seconds=seconds, urgent=True
                )
            except LeaseHeld as held:
                if held.details.get("holder") != plan.holder or time.monotonic() > deadline:
                    raise

    def _renew(self, link: LinkState, token: str) -> None:
        try:
            lease = calls().run(self._admin().renew_lease(link.plan.name, token, LEASE_TTL_MS))
        except LeaseLost:
            raise
        except BsfgError:
            return  # the node is away; what is put meanwhile waits for it, too
        if lease.mode == Mode.HELD:
            raise SparkFailed("the gate of the link is held")

    def _give_back(self, link: LinkState, token: str) -> None:
        with suppress(BsfgError):
            calls().run(self._admin().release_lease(link.plan.name, token))
