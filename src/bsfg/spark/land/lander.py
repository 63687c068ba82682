"""The driver of a landing: it plans batches, has Spark stage them, commits them and confirms them to the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bsfg.errors import BsfgError, ForeignLog, InvalidArgument, SparkFailed
from bsfg.retry import Backoff, Retry
from bsfg.spark.calls import BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, BufferSource
from bsfg.spark.cluster import is_local
from bsfg.spark.land.columns import Inference, joined
from bsfg.spark.land.folder import Batch, LandingFolder, Staged
from bsfg.spark.land.places import LocalDisk
from bsfg.spark.land.staging import (
    Merge,
    StagedRange,
    StagingWork,
    gap_reason,
    grouped,
    merge_all,
    stage_all,
    staged_so_far,
)
from bsfg.spark.land.state import (
    PARTITION_BY,
    By,
    Landed,
    LandedOrigin,
    LandedState,
    LandSettings,
    TableFormat,
    folder_of,
)
from bsfg.spark.land.upkeep import Compactor, LatestTable
from bsfg.spark.options import EARLIEST, Position
from bsfg.spark.session import end, has_ended, started, without_tracebacks
from bsfg.spark.session import settings as session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.journey.link import Fetched


class SparkWhenNeeded:
    """A Spark session that is started when it is first asked for: a landing with nothing to do needs none."""

    def __init__(self, app: str, master: str, conf: dict[str, str], log: Path | None = None) -> None:
        _ = session_settings(master, conf)  # which raises what would keep it from starting, whenever that will be
        self._given = app, master, conf, log
        self._session: SparkSession | None = None
        self.is_starting = False

    @property
    def is_started(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Tell whether Spark runs in a process of its own and that has ended, or ends within some time."""
        return self._session is not None and has_ended(self._session, within_seconds)

    def __call__(self) -> SparkSession:
        """Give the session."""
        if self._session is None:
            self.is_starting = True
            without_tracebacks()
            try:
                self._session = started(*self._given, brief=True)
            finally:
                self.is_starting = False
        return self._session

    def __enter__(self) -> SparkWhenNeeded:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._session is not None:
            end(self._session)


HINT = (
    "The node was replaced, or restored from an older copy. Its facts need a folder of their own: give another --out."
)


def first_origin(source: BufferSource, settings: LandSettings) -> tuple[LandedOrigin, int]:
    """Give whose facts a new folder will hold, and from which offset on."""
    head = _start(source, settings)
    start = head.start
    if settings.starting is not None and settings.starting.offset is not None:
        start = settings.starting.offset
        if start > head.end:
            raise InvalidArgument(f"the buffer ends at offset {head.end}, and {start} is to be the first")
    origin = LandedOrigin(
        settings.stream,
        settings.buffer,
        head.log_id,
        str(settings.by or By.APPENDED_AT),
        str(settings.format or TableFormat.PARQUET),
        settings.partition_by or PARTITION_BY,
        tuple(map(str, settings.columns)),
    )
    return origin, start


def _start(source: BufferSource, settings: LandSettings) -> Fetched:
    wanted = settings.starting
    if wanted is None and settings.consumer is not None:
        return source.consumer_head(settings.consumer)
    wanted = wanted or Position(word=EARLIEST)
    if wanted.unix_ms is not None or wanted.word == EARLIEST:
        return source.head(unix_ms=max(0, wanted.unix_ms or 0))
    head = source.head()
    return replace(head, start=head.end)


def check_history(source: BufferSource, settings: LandSettings, state: LandedState, head: Fetched) -> None:
    """Refuse a folder that holds other facts than those the node has, or that was made in another way."""
    origin = state.origin
    for name in ("stream", "buffer", "by", "format", "partition_by"):
        made, given = getattr(origin, name), getattr(settings, name)
        if given is not None and made != given:
            words = [",".join(each) if isinstance(each, tuple) else each for each in (made, given)]
            raise InvalidArgument(
                f"{settings.out} was made with --{name.replace('_', '-')} {words[0]}, not {words[1]}",
                hint="What is in a folder cannot be changed afterwards: give another --out.",
            )
    if head.log_id != origin.log_id:
        raise ForeignLog(
            f"{settings.out} holds facts of the log {origin.log_id}, the node's is {head.log_id}", hint=HINT
        )
    if head.end < state.next:
        raise ForeignLog(f"the node's log ends at offset {head.end}, facts up to {state.next} are landed", hint=HINT)
    if state.tail_offset is None:
        return
    for frame in source.frames(state.tail_offset, state.tail_offset + 1, origin.log_id):
        digests = [] if frame.entries is None else frame.entries.digests()
        if digests and digests[0].hex() != state.tail_digest:
            raise ForeignLog(f"the fact at offset {state.tail_offset} is another one than was landed", hint=HINT)


def check_consumer(source: BufferSource, settings: LandSettings, head: Fetched) -> None:
    """Refuse a consumer of another buffer, and one that is not there or not ours, before anything is landed."""
    assert settings.consumer is not None
    if source.consumer_head(settings.consumer).log_id != head.log_id:
        raise InvalidArgument(
            f"the consumer {settings.consumer} reads another buffer than {settings.stream}/{settings.buffer}",
            hint="`bsfg consumers list` shows what each reads.",
        )


def received_gaps(
    source: BufferSource, settings: LandSettings, log_id: str, token: str
) -> tuple[list[dict[str, Any]], str]:
    """Give the gap records that came from other zones since the last commit, and the token for the next."""
    assert settings.consumer is not None
    head = source.consumer_head(settings.consumer, gaps_after=token)
    place = {"stream": settings.stream, "buffer": settings.buffer, "log_id": log_id}
    lines = [
        {"first": gap.first, "last": gap.last, **gap_reason(gap, gap.offsets), "origin_zone": gap.origin_zone, **place}
        for gap in head.gaps
    ]
    return lines, head.gaps_token


T = TypeVar("T")
Spark = Callable[[], "SparkSession"]

FACTS_PER_TASK = 250_000
"""Fewer facts than this are not worth a task of their own: every task makes files of its own."""

POLL_SECONDS = 0.5
WAIT_MAX_SECONDS = 15.0
SAMPLE_FACTS = 10_000
"""From so many facts columns are found out."""

VACUUM_EVERY_SECONDS = 3600.0
POSTPONED_MAX = 16
"""So many batches in a row may put compaction off while there is a backlog."""


class Interrupted(Exception):
    """Somebody asked the landing to end; what was not committed is as if it had never begun."""


class Lander:
    """Lands one buffer in one folder. It is used by one thread; `end` and the progress are for others.

    ``spark`` gives the session when there is work for it, so that it need not be started for nothing. ``on_problem``
    is told of what is waited for, once each time.
    """

    def __init__(
        self,
        spark: Spark,
        settings: LandSettings,
        folder: LandingFolder,
        on_problem: Callable[[BsfgError], None] = lambda error: None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.done = Landed()
        self.problem: BsfgError | None = None
        self.turns = 0
        """How often it has asked for facts and done what there was to do."""
        self._spark, self._group = spark, f"bsfg-{folder.run.rpartition('/')[2]}"
        self._said = f"{settings.stream}/{settings.buffer} in {settings.out.name}"
        self._session: SparkSession | None = None
        self._source = BufferSource(settings.access, settings.stream, settings.buffer, 0.0)
        self._ending = threading.Event()
        self._on_problem = on_problem
        self._confirmed = -1
        self._buffer_end = 0
        self.has_joined = False
        self._compactor = Compactor(self._merged, folder, settings.file_size_bytes, self.done)
        self._latest = LatestTable(Path(settings.out), folder)
        self._to_infer = settings.infer
        self._most_facts = settings.max_facts_per_batch
        self._vacuumed = float("-inf")

    # For other threads.

    def end(self) -> None:
        """Have the landing end soon; call it again until it has."""
        self._ending.set()
        if self._session is not None:
            with suppress(Exception):  # Spark may have ended already.
                self._session.sparkContext.cancelJobGroup(self._group)

    def under_way(self) -> int:
        """Count the facts of the present batch that are staged."""
        return staged_so_far(Path(self.settings.out) / self.folder.run)

    # The landing itself.

    def join(self, *, for_ever: bool = False) -> None:
        """Find out where the folder stands, and check that the node still has the same history.

        A node that is away is waited for, for a while or for ever.
        """
        head = self._patiently(self._look, for_ever=for_ever)
        if self.folder.is_new:
            origin, start = self._patiently(lambda: first_origin(self._source, self.settings), for_ever=for_ever)
            self.folder.begin(origin, start)
        state = self.folder.state
        self._patiently(lambda: check_history(self._source, self.settings, state, head), for_ever=for_ever)
        self._add_columns()
        if self.settings.consumer is not None:
            self._patiently(lambda: check_consumer(self._source, self.settings, head), for_ever=for_ever)
        self._remove_old()
        self._noted()
        self.has_joined = True

    def land_available(self) -> None:
        """Land everything that is there now."""
        target = self._patiently(self._look).end
        while self.folder.state.next < target:
            self._batch(min(target, self.folder.state.next + self._most_facts))
            self._patiently(self._confirm)
        self._patiently(self._confirm)
        self._keep_latest()
        if self.settings.compact:
            self._stoppable(self._compactor.run)
        self._vacuum()

    def follow(self) -> None:
        """Land facts as they come, until `end` is called; a node or a disk that fails for a while is waited for."""
        last, postponed = -self.settings.every_seconds, 0
        backoff = Backoff(POLL_SECONDS, WAIT_MAX_SECONDS)
        while not self._ending.is_set():
            try:
                if backoff.failures:
                    self.folder.recover()
                waiting = self._look().end - self.folder.state.next
                full = waiting >= self.settings.max_facts_per_batch
                if full or (waiting and time.monotonic() - last >= self.settings.every_seconds):
                    last = time.monotonic()
                    self._batch(self.folder.state.next + min(waiting, self._most_facts))
                    postponed += 1
                    if self.settings.compact and (not full or postponed >= POSTPONED_MAX):
                        self._stoppable(self._compactor.run)
                        postponed = 0
                    self._vacuum()
                else:
                    self._keep_latest()
                    self._ending.wait(POLL_SECONDS)
                self._confirm()
                backoff.reset()
                self.problem = None
                self.turns += 1
            except BsfgError as error:
                if not error.retryable:
                    raise
                if not backoff.failures:
                    self._on_problem(error)
                self.problem = error
                self._ending.wait(backoff.next_seconds())

    def compact(self) -> None:
        """Merge all small files that could be one, and remove what that replaced long ago; needs no node."""
        self._remove_old()
        self._stoppable(lambda: self._compactor.run(thorough=True))
        self._vacuum()

    def _batch(self, end: int) -> None:
        """Land everything up to an offset, which is left out, or less when that would be too many files."""
        began, first = time.monotonic(), self.folder.state.next
        self._infer(first, end)
        receipts = self._stoppable(lambda: self._staged(first, end))
        landed = self._commit(first, receipts)
        self.folder.discard_staged()
        # Where partitions are many, what the tasks behind the first would stage is not wanted yet.
        self._most_facts = min(self.settings.max_facts_per_batch, landed if first + landed < end else 2 * landed)
        self._keep_latest()
        self.done.seconds += time.monotonic() - began
        self._noted()

    def _add_columns(self) -> None:
        """Give the table the columns that were asked for and that it does not have yet."""
        known = self.folder.state.origin.shape.columns
        columns = joined(known, self.settings.columns)
        if columns != known:
            self.folder.evolve([str(column) for column in columns])

    def _infer(self, first: int, end: int) -> None:
        """Find out columns from the facts that are to be landed, once."""
        if not self._to_infer:
            return
        origin = self.folder.state.origin

        def look() -> Inference:
            found = Inference()
            for frame in self._source.frames(first, min(end, first + SAMPLE_FACTS), origin.log_id):
                if frame.entries is not None:
                    found.add(frame.entries)
            return found

        found = self._patiently(look)
        columns = found.columns(origin.shape.columns)
        if columns != origin.shape.columns:
            self.folder.evolve([str(column) for column in columns])
        self.done.columns = found.report(columns)
        self._to_infer = False

    def _keep_latest(self) -> None:
        if self.settings.latest:
            self.done.latest += self._latest.run(set(self._compactor.touched))

    def _vacuum(self) -> None:
        """Remove now and then what merges have replaced."""
        if time.monotonic() - self._vacuumed >= VACUUM_EVERY_SECONDS:
            self._remove_old()
            self._vacuumed = time.monotonic()

    def _remove_old(self) -> None:
        """Remove what merges have replaced long ago; also before the first commit, whose checkpoint may forget it."""
        self.done.removed_files += self.folder.vacuum(self.settings.vacuum_hours)

    def _staged(self, first: int, end: int) -> list[StagedRange]:
        spark = self._started()
        with grouped(spark, self._group, f"land {self._said}: offsets {first} to {end - 1}"):
            cuts = self._cuts(first, end)
            return stage_all(spark, self._work(len(cuts) - 1), cuts)

    def _merged(self, merges: list[Merge]) -> list[Staged | str | None]:
        spark = self._started()
        with grouped(spark, self._group, f"land {self._said}: merge {len(merges)} sets of small files"):
            shape = self.folder.state.origin.shape
            return merge_all(spark, str(self.settings.out), self.folder.run, shape, merges)

    def _commit(self, first: int, receipts: list[StagedRange]) -> int:
        """Commit what was staged up to the first task that did not stage all of its range; count the offsets."""
        state = self.folder.state
        starts = [receipt.first for receipt in receipts[1:]]
        whole = [receipt.next == start for receipt, start in zip(receipts, starts, strict=False)]
        receipts = receipts[: next((at + 1 for at, is_whole in enumerate(whole) if not is_whole), len(receipts))]
        end = receipts[-1].next
        gaps = [gap for receipt in receipts for gap in receipt.gaps]
        token = state.gaps_token
        if self.settings.consumer is not None:
            received, token = self._patiently(
                lambda: received_gaps(self._source, self.settings, state.origin.log_id, state.gaps_token)
            )
            gaps += received
        files = [file for receipt in receipts for file in receipt.files]
        missing = sum(receipt.missing for receipt in receipts)
        tails = [receipt.tail for receipt in receipts if receipt.tail is not None]
        # A commit that fails may happen all the same, when the folder is opened again.
        self._compactor.touched.update(file.partition for file in files)
        self.folder.commit(Batch(first, end, files, gaps, missing, tails[-1] if tails else None, token))
        self.done.facts += sum(file.facts for file in files)
        self.done.missing += missing
        self.done.batches += 1
        self.done.files += len(files)
        self.done.size_bytes += sum(file.size_bytes for file in files)
        return end - first

    def _confirm(self) -> None:
        """Confirm for the consumer, if there is one, what is landed."""
        state = self.folder.state
        through = state.next - 1
        if self.settings.consumer is not None and through > self._confirmed and state.next > state.start:
            self._source.confirm(self.settings.consumer, through, state.origin.log_id)
            self._confirmed = through

    def _look(self) -> Fetched:
        """Ask the node where the buffer ends."""
        head = self._source.head()
        self._buffer_end = head.end
        if not self.folder.is_new:
            self._noted()
        return head

    def _noted(self) -> None:
        self.done.next = self.folder.state.next
        self.done.backlog = max(0, self._buffer_end - self.done.next)

    def _work(self, parts: int) -> StagingWork:
        settings, origin = self.settings, self.folder.state.origin
        # Other machines do not have the certificate's files; read again each time, they may have been renewed.
        here = is_local(self._started().sparkContext.master or "")
        access = settings.access if here else settings.access.with_contents()
        source = BufferSource(access, settings.stream, settings.buffer, settings.retry_seconds)
        return StagingWork(
            source,
            origin.log_id,
            origin.shape,
            str(settings.out),
            self.folder.run,
            settings.file_size_bytes,
            max(1, settings.max_files_per_batch // parts),
        )

    def _cuts(self, first: int, end: int) -> list[int]:
        """Cut a range into as many parts as there are cores, unless they would be small."""
        count = end - first
        parts = max(1, min(count // FACTS_PER_TASK, self._started().sparkContext.defaultParallelism))
        return [first + count * part // parts for part in range(parts + 1)]

    def _started(self) -> SparkSession:
        if self._session is None:
            self._session = self._spark()
            self._group = self._session.sparkContext.getLocalProperty("spark.jobGroup.id") or self._group
        if self._ending.is_set():
            raise Interrupted
        return self._session

    def _stoppable(self, work: Callable[[], T]) -> T:
        """Do something with Spark; raises `Interrupted` when it failed because the landing is to end."""
        try:
            return work()
        except SparkFailed:
            if self._ending.is_set():
                raise Interrupted from None
            raise

    def _patiently(self, work: Callable[[], T], *, for_ever: bool = False) -> T:
        """Ask the node until it answers, for a while; raises `Interrupted` when the landing is to end meanwhile."""
        retry = Retry(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, None if for_ever else self.settings.retry_seconds)
        while True:
            try:
                return work()
            except BsfgError as error:
                is_news, pause_seconds = not retry.failures, retry.pause_after(error)
                if is_news:
                    self._on_problem(error)
            if self._ending.wait(pause_seconds):
                raise Interrupted


@contextmanager
def landing(
    spark: Spark, settings: LandSettings, on_problem: Callable[[BsfgError], None] = lambda error: None
) -> Iterator[Lander]:
    """Open a landing folder for a block; it is the folder's one writer."""
    folder = LandingFolder.open(LocalDisk(folder_of(settings.out)))
    try:
        yield Lander(spark, settings, folder, on_problem)
    finally:
        folder.close()


def land_available(spark: SparkSession, settings: LandSettings) -> Landed:
    """Land everything that a buffer holds now, and tell what was done."""
    with landing(lambda: spark, settings) as lander:
        lander.join()
        lander.land_available()
    return lander.done
