"""The driver of a landing: it plans batches, has Spark stage them, commits them and confirms them to the node."""

from __future__ import annotations

import subprocess
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
from bsfg.spark.land.folder import Batch, LandingFolder, LocalDisk, Staged
from bsfg.spark.land.staging import Merge, StagedRange, StagingWork, gap_reason, partitions, plan, small_files
from bsfg.spark.land.state import Landed, LandedOrigin, LandedState, LandSettings, folder_of
from bsfg.spark.land.tasks import grouped, merge_all, stage_all, staged_so_far
from bsfg.spark.options import EARLIEST, Position
from bsfg.spark.session import end, is_local, started, without_tracebacks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bsfg.journey.link import Fetched


class SparkWhenNeeded:
    """A Spark session that is started when it is first asked for: a landing with nothing to do needs none."""

    def __init__(self, app: str, master: str, conf: dict[str, str], log: Path | None = None) -> None:
        self._given = app, master, conf, log
        self._session: SparkSession | None = None
        self.is_starting = False

    @property
    def is_started(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Tell whether Spark runs in a process of its own and that has ended, or ends within some time."""
        if self._session is None:
            return False
        gateway: Any = self._session.sparkContext._gateway
        process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
        if process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_seconds)
        return process.poll() is not None

    def __call__(self) -> SparkSession:
        """Give the session."""
        if self._session is None:
            self.is_starting = True
            without_tracebacks()
            try:
                self._session = started(*self._given)
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
    return LandedOrigin(settings.stream, settings.buffer, head.log_id, str(settings.by)), start


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
    for name, given in (("stream", settings.stream), ("buffer", settings.buffer), ("by", str(settings.by))):
        if getattr(origin, name) != given:
            raise InvalidArgument(
                f"{settings.out} was made with --{name} {getattr(origin, name)}, not {given}",
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


MergeAll = Callable[[list[Merge]], list[Staged | str]]
"""Merges files, and gives in the place of a result the name of a file that is not ours."""

MERGES_AT_ONCE = 32


class Compactor:
    """Merges small files, of the partitions that were touched or of all; ``done`` is told what it did."""

    def __init__(self, merge_all: MergeAll, folder: LandingFolder, file_size_bytes: int, done: Landed) -> None:
        self.touched: set[str] = set()
        self._merge_all, self._folder = merge_all, folder
        self._file_size_bytes, self._done = file_size_bytes, done
        self._looked_at_all = False
        self._not_ours: set[str] = set()

    def run(self, *, thorough: bool = False) -> None:
        """Merge what is worth it; the first time all partitions are looked at, later those that were touched."""
        if not self._looked_at_all or thorough:
            self.touched.update(partitions(self._folder.disk))
            self._looked_at_all = True
        began = time.monotonic()
        merges = [merge for partition in sorted(self.touched) for merge in self._plan(partition, thorough)]
        for start in range(0, len(merges), MERGES_AT_ONCE):
            self._merge(merges[start : start + MERGES_AT_ONCE])
        self.touched.clear()
        self._done.merging_seconds += time.monotonic() - began

    def _plan(self, partition: str, thorough: bool) -> list[Merge]:
        files = small_files(self._folder.disk, partition, self._file_size_bytes)
        ours = [small for small in files if f"{partition}/{small.name}" not in self._not_ours]
        return plan(partition, ours, self._file_size_bytes, thorough=thorough)

    def _merge(self, merges: list[Merge]) -> None:
        results = self._merge_all(merges)
        for merge, result in zip(merges, results, strict=True):
            if isinstance(result, Staged):
                self._folder.replace(merge.partition, [result], merge.names)
                self._done.merged_files += len(merge.names)
                self._done.merged_into += 1
            else:
                self._not_ours.add(f"{merge.partition}/{result}")
        self._folder.discard_staged()


T = TypeVar("T")
Spark = Callable[[], "SparkSession"]

FACTS_PER_TASK = 250_000
"""Fewer facts than this are not worth a task of their own: every task makes files of its own."""

POLL_SECONDS = 0.5
WAIT_MAX_SECONDS = 15.0
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
        self._spark, self._group = spark, f"bsfg-{folder.run.rpartition('/')[2]}"
        self._session: SparkSession | None = None
        self._source = BufferSource(settings.access, settings.stream, settings.buffer, 0.0)
        self._ending = threading.Event()
        self._on_problem = on_problem
        self._confirmed = -1
        self._buffer_end = 0
        self.has_joined = False
        self._compactor = Compactor(self._merged, folder, settings.file_size_bytes, self.done)

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
        if self.settings.consumer is not None:
            self._patiently(lambda: check_consumer(self._source, self.settings, head), for_ever=for_ever)
        self._noted()
        self.has_joined = True

    def land_available(self) -> None:
        """Land everything that is there now."""
        target = self._patiently(self._look).end
        while self.folder.state.next < target:
            self._batch(min(target, self.folder.state.next + self.settings.max_facts_per_batch))
            self._patiently(self._confirm)
        self._patiently(self._confirm)
        if self.settings.compact:
            self._stoppable(self._compactor.run)

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
                    self._batch(self.folder.state.next + min(waiting, self.settings.max_facts_per_batch))
                    postponed += 1
                    if self.settings.compact and (not full or postponed >= POSTPONED_MAX):
                        self._stoppable(self._compactor.run)
                        postponed = 0
                else:
                    self._ending.wait(POLL_SECONDS)
                self._confirm()
                backoff.reset()
            except BsfgError as error:
                if not error.retryable:
                    raise
                if not backoff.failures:
                    self._on_problem(error)
                self._ending.wait(backoff.next_seconds())

    def compact(self) -> None:
        """Merge all small files that could be one; needs no node."""
        self._stoppable(lambda: self._compactor.run(thorough=True))

    def _batch(self, end: int) -> None:
        """Land everything up to an offset, which is left out."""
        began, first = time.monotonic(), self.folder.state.next
        receipts = self._stoppable(lambda: self._staged(first, end))
        self._commit(first, end, receipts)
        self.folder.discard_staged()
        self.done.seconds += time.monotonic() - began
        self._noted()

    def _staged(self, first: int, end: int) -> list[StagedRange]:
        spark = self._started()
        with grouped(spark, self._group):
            return stage_all(spark, self._work(), self._cuts(first, end))

    def _merged(self, merges: list[Merge]) -> list[Staged | str]:
        spark = self._started()
        with grouped(spark, self._group):
            return merge_all(spark, str(self.settings.out), self.folder.run, merges)

    def _commit(self, first: int, end: int, receipts: list[StagedRange]) -> None:
        state = self.folder.state
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
        self.folder.commit(Batch(first, end, files, gaps, missing, tails[-1] if tails else None, token))
        self.done.facts += sum(file.facts for file in files)
        self.done.missing += missing
        self.done.batches += 1
        self.done.files += len(files)
        self.done.size_bytes += sum(file.size_bytes for file in files)
        self._compactor.touched.update(file.partition for file in files)

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

    def _work(self) -> StagingWork:
        settings, origin = self.settings, self.folder.state.origin
        # Other machines do not have the certificate's files; read again each time, they may have been renewed.
        here = is_local(self._started().sparkContext.master or "")
        access = settings.access if here else settings.access.with_contents()
        source = BufferSource(access, settings.stream, settings.buffer, settings.retry_seconds)
        return StagingWork(
            source, origin.log_id, settings.by, str(settings.out), self.folder.run, settings.file_size_bytes
        )

    def _cuts(self, first: int, end: int) -> list[int]:
        """Cut a range into as many parts as there are cores, unless they would be small."""
        count = end - first
        parts = max(1, min(count // FACTS_PER_TASK, self._started().sparkContext.defaultParallelism))
        return [first + count * part // parts for part in range(parts + 1)]

    def _started(self) -> SparkSession:
        if self._session is None:
            self._session = self._spark()
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
