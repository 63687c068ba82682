"""Runs the steps of an audit: as tasks of Spark, or one after the other in this process."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from bsfg.errors import BsfgError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how many steps of it are done, and how many there are."""

RESULT, KEYS, REPEATED = 0, 1, 2
_COLUMNS = "bucket int, kind int, payload binary"
_SCHEMA = pa.schema([("bucket", pa.int32()), ("kind", pa.int32()), ("payload", pa.binary())])
_BUCKET_KEYS = 4_000_000
_POLL_SECONDS = 0.2
_ASKED_AT_ONCE = 4
"""How many steps nodes are asked for at once: two for each end, so that none waits for a question."""


class KeyedStep(Protocol):
    """A step that gives hashed keys beside its result; it is picklable."""

    def __call__(self) -> tuple[Any, np.ndarray]:
        """Do it."""

    def asked(self) -> tuple[Any, np.ndarray] | None:
        """Have a node do it; None when it cannot."""


class LocalRunner:
    """Runs steps here, one after the other; a step is a picklable object without arguments."""

    def each(self, title: str, steps: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all steps."""
        return [step() for step in steps]

    def each_with_keys(self, title: str, steps: Sequence[KeyedStep], keys: int) -> tuple[list[Any], np.ndarray]:
        """Run all steps and look at their keys."""
        results = [step() for step in steps]
        found = [keys for _, keys in results]
        return [result for result, _ in results], repeated(np.concatenate([np.empty(0, dtype=np.uint64), *found]))


class SparkRunner:
    """Runs every step as a task of Spark; what the steps read never passes through the JVM."""

    def __init__(self, spark: SparkSession, progress: Progress = lambda title, done, total: None) -> None:
        self._spark, self._progress = spark, progress

    def each(self, title: str, steps: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all steps."""
        if not steps:
            return []
        rows = self._collect(title, self._tasks(_Task(tuple(steps))), len(steps))
        return _in_order(rows, len(steps))

    def each_with_keys(self, title: str, steps: Sequence[KeyedStep], keys: int) -> tuple[list[Any], np.ndarray]:
        """Run all steps; keys are brought together by a shuffle, so that no process holds too many of them.

        Where nodes do the steps themselves and the keys are few, this process asks them: a task would only wait.
        """
        if not steps:
            return [], np.empty(0, dtype=np.uint64)
        buckets = 1 + keys // _BUCKET_KEYS
        if buckets == 1 and (asked := self._asked(title, steps)) is not None:
            return [result for result, _ in asked], repeated(np.concatenate([found for _, found in asked]))
        tasks = self._tasks(_Task(tuple(steps), buckets))
        together = tasks.repartition(buckets, "bucket").mapInArrow(_repeated_in_bucket, _COLUMNS)
        rows = self._collect(title, together, len(steps) + buckets)
        repeats = [np.frombuffer(payload, dtype=np.uint64) for _, kind, payload in rows if kind == REPEATED]
        return _in_order(rows, len(steps)), np.concatenate([np.empty(0, dtype=np.uint64), *repeats])

    def _asked(self, title: str, steps: Sequence[KeyedStep]) -> list[tuple[Any, np.ndarray]] | None:
        """Have all steps done by nodes, None as soon as one of them cannot be."""
        found: list[tuple[Any, np.ndarray]] = []
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
            waiting = deque(threads.submit(step.asked) for step in steps)
            try:
                while waiting and (result := waiting.popleft().result()) is not None:
                    found.append(result)
                    self._progress(title, len(found), len(steps))
            finally:
                for each in waiting:
                    each.cancel()
        return found if len(found) == len(steps) else None

    def _tasks(self, task: _Task) -> Any:
        count = len(task.steps)
        return self._spark.range(0, count, 1, count).mapInArrow(task, _COLUMNS)

    def _collect(self, title: str, frame: Any, total: int) -> list[tuple[int, int, bytes]]:
        ended, group = threading.Event(), self._named(title)
        watch = threading.Thread(target=self._watch, args=(title, total, ended, group), daemon=True)
        watch.start()
        try:
            rows = [(row["bucket"], row["kind"], bytes(row["payload"])) for row in frame.collect()]
        finally:
            ended.set()
            watch.join()
        self._progress(title, total, total)
        return rows

    def _named(self, title: str) -> str | None:
        """Name the next job in Spark's user interface; give the group of this thread's jobs, if they have one."""
        with suppress(Exception):  # Spark Connect has no jobs
            context = self._spark.sparkContext
            context.setLocalProperty("spark.job.description", f"audit: {title}")
            return context.getLocalProperty("spark.jobGroup.id")
        return None

    def _watch(self, title: str, total: int, ended: threading.Event, group: str | None) -> None:
        """Tell how many tasks are done, as far as Spark says; other jobs of the session are none of ours."""
        try:
            tracker = self._spark.sparkContext.statusTracker()
        except Exception:  # Spark Connect has none
            return
        done: dict[int, int] = {}
        before = set(tracker.getJobIdsForGroup(group))
        while not ended.wait(_POLL_SECONDS):
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group) if job not in before]
            for stage in [stage for job in jobs if job is not None for stage in job.stageIds]:
                info = tracker.getStageInfo(stage)
                if info is not None:
                    done[stage] = info.numCompletedTasks
            self._progress(title, min(sum(done.values()), total), total)


Runner = LocalRunner | SparkRunner
"""What runs steps: `each` gives their results, in order; `each_with_keys` also which of their hashed keys repeat."""


class _Task:
    """What runs in a task: the steps whose numbers it is given; errors of ours come back as results."""

    def __init__(self, steps: tuple[Callable[[], Any], ...], buckets: int = 0) -> None:
        self.steps, self._buckets = steps, buckets

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._run(number)

    def _run(self, number: int) -> Iterator[pa.RecordBatch]:
        try:
            result = self.steps[number]()
        except BsfgError as error:
            yield _row(0, RESULT, pickle.dumps((number, None, error.to_dict())))
            return
        if self._buckets:
            result, keys = result
            yield from self._key_rows(keys)
        yield _row(0, RESULT, pickle.dumps((number, result, None)))

    def _key_rows(self, keys: np.ndarray) -> Iterator[pa.RecordBatch]:
        if not len(keys):
            return
        buckets = keys % np.uint64(self._buckets)
        for bucket in range(self._buckets):
            chosen = keys[buckets == bucket]
            if len(chosen):
                yield _row(bucket, KEYS, chosen.tobytes())


def _repeated_in_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass results on, and replace all keys by those that are there more than once."""
    keys = [np.empty(0, dtype=np.uint64)]
    for batch in batches:
        for bucket, kind, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if kind == KEYS:
                keys.append(np.frombuffer(payload, dtype=np.uint64))
            else:
                yield _row(bucket, kind, payload)
    found = repeated(np.concatenate(keys))
    if len(found):
        yield _row(0, REPEATED, found.tobytes())


def repeated(keys: np.ndarray) -> np.ndarray:
    """Give the numbers that are there more than once."""
    ordered = np.sort(keys)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _row(bucket: int, kind: int, payload: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"bucket": bucket, "kind": kind, "payload": payload}], schema=_SCHEMA)


def _in_order(rows: list[tuple[int, int, bytes]], count: int) -> list[Any]:
    results: list[Any] = [None] * count
    for _, kind, payload in rows:
        if kind == RESULT:
            number, result, error = pickle.loads(payload)
            if error is not None:
                raise BsfgError.from_dict(error)
            results[number] = result
    return results
