"""Keeps the pipelines of a zone alive in one Spark session: each in a thread, begun again after a pause when it fails.

What a pipeline does is its own affair: it is anything with a `run` that works until it is done or told to end. The
`Supervisor` gives each a name in Spark's own user interface and a fair share of its slots, plans its next run, and
tells the node every two seconds how all of them do. When Spark itself ends, so does the supervisor: whatever started
the process starts it again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from bsfg.disk import replace_file
from bsfg.errors import BsfgError, SparkFailed
from bsfg.retry import Backoff
from bsfg.spark.calls import NodeAccess, calls
from bsfg.spark.errors import told_by_spark
from bsfg.spark.session import activate, failed, has_ended
from bsfg.wire.service import PipelineReport, PipelineState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TELL_SECONDS = 2.0
"""How often the node is told; it takes what is five times as old for dead."""

ANSWER_SECONDS = 3.0
END_SECONDS = 9.0
"""How long pipelines that are told to end have for it; what is left then harms nothing."""

TEXT_MAX = 500


def now_unix_ms() -> int:
    """Give the time of day."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Diary:
    """What a pipeline tells of itself while it runs; others read it at any time.

    ``problem`` is what it waits for by itself, as a landing does for a disk that is full; None while it gets on.
    """

    progress: str = ""
    facts: int = 0
    backlog: int | None = None
    batches: int = 0
    batch_seconds: float = 0.0
    finding: str = ""
    problem: BsfgError | None = None
    last_good_unix_ms: int = 0

    def good(self) -> None:
        """Note that the pipeline does what it should."""
        self.last_good_unix_ms = now_unix_ms()
        self.problem = None

    def batch(self, seconds: float) -> None:
        """Note that a micro-batch or job of Spark is done."""
        self.batches += 1
        self.batch_seconds = seconds


@contextmanager
def listening(spark: SparkSession, diary: Diary) -> Iterator[None]:
    """Write down every micro-batch that Spark's streaming queries tell of, while a block runs."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class BatchListener(StreamingQueryListener):
        """Counts micro-batches."""

        def onQueryStarted(self, event: Any) -> None:
            """A query begins."""

        def onQueryProgress(self, event: Any) -> None:
            """A micro-batch is done."""
            diary.batch(event.progress.durationMs.get("triggerExecution", 0) / 1000)

        def onQueryIdle(self, event: Any) -> None:
            """A query has nothing to do."""

        def onQueryTerminated(self, event: Any) -> None:
            """A query has ended; who started it sees that by itself."""

    listener = BatchListener()
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        with suppress(Exception):  # Spark may have ended.
            spark.streams.removeListener(listener)


class KeptPipeline(Protocol):
    """One pipeline: what `Supervisor` needs to keep it alive."""

    @property
    def title(self) -> str:
        """What it does, in words for whoever looks at Spark's user interface."""
        ...

    def run(self, spark: SparkSession, diary: Diary, ending: threading.Event) -> None:
        """Work until it is done, or until it is to end; raises what went wrong."""
        ...

    def look(self, diary: Diary) -> None:
        """Write down how far it is; called by another thread now and then while it runs."""
        ...

    def end(self) -> None:
        """Have a run end soon, beside the event that says so; called by another thread."""
        ...


@dataclass(frozen=True, slots=True)
class KeptTerms:
    """When a pipeline runs: ``every_seconds`` after its last run, or without an end when that is None.

    ``fingerprint`` stands for all that its table says; with another one it is another pipeline.
    """

    every_seconds: float | None = None
    restart_after_seconds: float = 5.0
    restart_max_seconds: float = 300.0
    fingerprint: str = ""


class Schedule:
    """Remembers in a file when each pipeline last ended well and what it found, so that a restart changes neither.

    Nothing depends on it: without the file everything is due at once.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, Any] = {}
        with suppress(OSError, orjson.JSONDecodeError):
            found = orjson.loads(path.read_bytes())
            self._known = found if isinstance(found, dict) else {}

    def last(self, name: str, fingerprint: str) -> tuple[int, str]:
        """Give when a pipeline last ended well, 0 when it did not, and what it found."""
        known = self._known.get(name)
        if not isinstance(known, dict) or known.get("fingerprint") != fingerprint:
            return 0, ""
        ended, finding = known.get("ended_unix_ms"), known.get("finding")
        return (ended, finding) if isinstance(ended, int) and isinstance(finding, str) else (0, "")

    def ended(self, name: str, fingerprint: str, diary: Diary) -> None:
        """Note that a run has ended well."""
        with self._lock, suppress(OSError):
            self._known[name] = {
                "fingerprint": fingerprint,
                "ended_unix_ms": diary.last_good_unix_ms,
                "finding": diary.finding,
            }
            replace_file(self._path, orjson.dumps(self._known))


@dataclass(slots=True)
class PipelineKeeper:
    """The thread of one pipeline, and what is known of it."""

    name: str
    pipeline: KeptPipeline
    terms: KeptTerms
    spark: SparkSession
    schedule: Schedule
    state: PipelineState = PipelineState.STARTING
    runs: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    last_error: str = ""
    last_error_unix_ms: int = 0
    next_unix_ms: int = 0
    diary: Diary = field(default_factory=Diary)
    ending: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.diary.last_good_unix_ms, self.diary.finding = self.schedule.last(self.name, self.terms.fingerprint)
        self.thread = threading.Thread(target=self._keep, name=f"bsfg-{self.name}", daemon=True)

    @property
    def group(self) -> str:
        """The group of its jobs in Spark."""
        return f"bsfg {self.name}"

    def end(self) -> None:
        """Have it end soon; called again until it has."""
        self.ending.set()
        self.pipeline.end()
        with suppress(Exception):  # Spark may have ended.
            self.spark.sparkContext.cancelJobGroup(self.group)

    def report(self) -> PipelineReport:
        """Describe the pipeline at this moment; one that waits for what keeps it from working is one that fails."""
        diary, problem = self.diary, self.diary.problem
        waits = problem is not None and self.state == PipelineState.RUNNING
        return PipelineReport(
            self.name,
            PipelineState.FAILED if waits else self.state,
            diary.progress[:TEXT_MAX],
            self.runs,
            self.failures,
            max(self.failures_in_a_row, int(waits)),
            diary.facts,
            diary.backlog,
            diary.batches,
            diary.batch_seconds,
            _text(problem) if problem is not None and waits else self.last_error,
            self.last_error_unix_ms,
            diary.last_good_unix_ms,
            self.next_unix_ms,
            diary.finding[:TEXT_MAX],
        )

    def _keep(self) -> None:
        """Run it, again and again."""
        terms, backoff = self.terms, Backoff(self.terms.restart_after_seconds, self.terms.restart_max_seconds)
        self._enter()
        if terms.every_seconds is not None and self.diary.last_good_unix_ms:
            due_seconds = terms.every_seconds - (now_unix_ms() - self.diary.last_good_unix_ms) / 1000
            self._wait(PipelineState.WAITING, min(terms.every_seconds, due_seconds))
        while not self.ending.is_set():
            error, at_unix_ms = self._once(), now_unix_ms()
            if self.ending.is_set():
                break
            if error is None and terms.every_seconds is not None:
                backoff.reset()
                self.failures_in_a_row = 0
                self.schedule.ended(self.name, terms.fingerprint, self.diary)
                self._wait(PipelineState.WAITING, terms.every_seconds)
                continue
            self._failed(error or SparkFailed("it has ended by itself"), at_unix_ms)
            if self.failures_in_a_row == 1:
                backoff.reset()
            self._wait(PipelineState.FAILED, backoff.next_seconds())
        self.state, self.next_unix_ms = PipelineState.ENDED, 0

    def _enter(self) -> None:
        """Give the jobs of this thread a name, and a pool of their own: no pipeline waits for all tasks of another."""
        with suppress(Exception):  # Spark may have ended; the first run says so.
            activate(self.spark)
            context = self.spark.sparkContext
            context.setJobGroup(self.group, self.pipeline.title)
            context.setLocalProperty("spark.scheduler.pool", self.name)

    def _once(self) -> BsfgError | None:
        """Run it once; give what it failed with."""
        self.runs += 1
        self.state, self.next_unix_ms = PipelineState.RUNNING, 0
        good_before = self.diary.last_good_unix_ms
        try:
            self.pipeline.run(self.spark, self.diary, self.ending)
        except (Exception, SystemExit) as error:  # a program of the user's that exits would end the thread unseen
            if self.diary.last_good_unix_ms > good_before:
                self.failures_in_a_row = 0
            return told_by_spark(error, f"the pipeline {self.name} failed on Spark")
        self.diary.good()
        return None

    def _failed(self, error: BsfgError, at_unix_ms: int) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        self.last_error, self.last_error_unix_ms = _text(error), at_unix_ms
        self.diary.progress, self.diary.problem = "", None

    def _wait(self, state: PipelineState, seconds: float) -> None:
        self.next_unix_ms = now_unix_ms() + int(1000 * max(0.0, seconds))
        self.state = state
        self.ending.wait(max(0.0, seconds))


def _text(error: BsfgError) -> str:
    return f"{error.code}: {error.message}"[:TEXT_MAX]


class Supervisor:
    """Keeps some pipelines alive, and tells the node of them."""

    def __init__(self, spark: SparkSession, own: NodeAccess, holder: str, schedule: Schedule) -> None:
        self._spark, self._own, self._holder, self._schedule = spark, own, holder, schedule
        self.keepers: dict[str, PipelineKeeper] = {}
        self._leaving: list[PipelineKeeper] = []
        self._tell_at = 0.0
        self.node_away = ""
        self.unknown: list[str] = []

    def keep(self, wanted: Mapping[str, KeptTerms], make: Callable[[str], KeptPipeline]) -> list[str]:
        """Go on with these pipelines: begin what is new, end what is gone, begin again what is changed.

        Gives what changes, in words. All are made before one is ended, so that a mistake in a table changes nothing.
        """
        gone = [name for name in self.keepers if name not in wanted]
        changed = [name for name, terms in wanted.items() if name in self.keepers and self.keepers[name].terms != terms]
        new = [name for name in wanted if name not in self.keepers]
        made = {name: make(name) for name in (*changed, *new)}
        words = {"ended": gone, "changed": changed, "new": new}
        said = [f"{name}: {word}" for word, names in words.items() for name in names]
        for name in (*gone, *changed):
            keeper = self.keepers.pop(name)
            keeper.end()
            self._leaving.append(keeper)
        ends = time.monotonic() + END_SECONDS
        for keeper in self._leaving:
            # Two of one name would meet in one folder. Nobody is told of the others meanwhile, so all have one time.
            keeper.thread.join(max(0.0, ends - time.monotonic()))
        for name, pipeline in made.items():
            self.keepers[name] = PipelineKeeper(name, pipeline, wanted[name], self._spark, self._schedule)
            self.keepers[name].thread.start()
        self._leaving = [keeper for keeper in self._leaving if keeper.thread.is_alive()]
        self._tell_at = 0.0
        return said

    def look(self) -> list[PipelineReport]:
        """Describe all pipelines, and tell the node; raises `SparkFailed` when Spark itself has ended."""
        if has_ended(self._spark):
            raise failed("Spark has ended")
        for keeper in self.keepers.values():
            if keeper.state == PipelineState.RUNNING:
                keeper.pipeline.look(keeper.diary)
        reports = [keeper.report() for keeper in self.keepers.values()]
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_SECONDS
            self._tell(reports)
        return reports

    def stop(self) -> None:
        """End all pipelines, and say so to the node."""
        keepers, ends = [*self.keepers.values(), *self._leaving], time.monotonic() + END_SECONDS
        while time.monotonic() < ends and any(keeper.thread.is_alive() for keeper in keepers):
            for keeper in keepers:
                if keeper.thread.is_alive():
                    keeper.end()
            for keeper in keepers:
                keeper.thread.join(0.25 / len(keepers))
        self._tell([keeper.report() for keeper in self.keepers.values()], last=True)

    def _tell(self, reports: Sequence[PipelineReport], *, last: bool = False) -> None:
        from bsfg.wire.adminclient import AdminClient

        admin = AdminClient(calls().connection(self._own))

        async def told() -> list[str]:
            # Pipelines are looked after, and end, whether the node answers or not.
            async with asyncio.timeout(ANSWER_SECONDS):
                return await admin.report_pipelines(self._holder, reports, last=last)

        try:
            self.unknown = calls().run(told())
            self.node_away = ""
        except TimeoutError:
            self.node_away = f"it has not answered for {ANSWER_SECONDS:g} s"
        except BsfgError as error:
            self.node_away = f"{error.code}: {error.message}"
