"""Leads the ingestion: survey new files, then step by step read, map and append their chunks, and remember each step.

A step goes to the node through the data source ``bsfg``. When the node takes all of it, that was it. When it refuses
rows, for an id that is taken or for a rule of its own, the step is repeated by a task that looks at every answer: what
was stored is recognised, and the refused rows become rejects. A step is done when its facts are durable at the node and
its rejects on this disk; whatever cuts it off, it is repeated from its beginning.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pyspark.sql.pandas.types import from_arrow_schema

from bsfg.errors import OF_ONE_FACT, BsfgError, InvalidArgument, SpoolNotShared
from bsfg.retry import Retry
from bsfg.spark.calls import NodeAccess
from bsfg.spark.errors import told_by_spark
from bsfg.spark.ingest.mapped import fact_schema
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.survey import Chunk, FileSurvey, SourceFile
from bsfg.spark.ingest.task import (
    OF_ITS_ZONE,
    SURVEY_SCHEMA,
    IngestJob,
    Left,
    Step,
    appending,
    collect,
    mapping,
    surveying,
)
from bsfg.spark.ingest.work import Counts, IngestWork

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SURVEY_TASKS_MAX = 32
STEP_BYTES = 64 << 20
"""How much of the files is done between two notes of progress."""

TRY_SECONDS = 2.0
"""How long a task itself waits for a node; then the driver hears of it, tells it, and tries the step again."""

Piece = tuple[int, int, Chunk]


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """How to run: where the node is, how long to wait for it, and what to do about taken ids."""

    access: NodeAccess
    wait_seconds: float = 300.0
    conflicts_fail: bool = False
    tasks: int = 1
    step_bytes: int = STEP_BYTES
    try_seconds: float = TRY_SECONDS
    ships: bool = False

    @property
    def task_access(self) -> NodeAccess:
        """The way to the node for a task: elsewhere with the certificates themselves, as they are now."""
        return self.access.with_contents() if self.ships else self.access


@dataclass(slots=True)
class IngestWatch:
    """Who is told how it goes."""

    planned: Callable[[int], None] = lambda rows: None
    done: Callable[[Counts], None] = lambda counts: None
    waiting: Callable[[BsfgError], None] = lambda error: None


class Ingest:
    """One run of a job."""

    def __init__(
        self, spark: SparkSession, work: IngestWork, plan: IngestPlan, settings: IngestSettings, watch: IngestWatch
    ) -> None:
        self._spark, self._work, self._plan = spark, work, plan
        self._settings, self._watch = settings, watch
        self._careful = False
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the run has worked so far."""
        return time.monotonic() - self._began

    def survey(self, sources: Sequence[SourceFile]) -> None:
        """Look through new files and take them up; raises `InvalidArgument` when the plan fits none of them."""
        if not sources:
            self._work.take_up([])
            return
        tasks = min(len(sources), SURVEY_TASKS_MAX)
        step = surveying([(source.path, source.format) for source in sources], self._plan)
        rows = self._told(lambda: self._over(len(sources), tasks, step, SURVEY_SCHEMA).collect())
        surveys = [FileSurvey.from_dict(orjson.loads(bytes(row[0]))) for row in rows]
        problems = [each.problem for each in surveys]
        if all(problem is not None and " column " in problem for problem in problems):
            hint = "Try it with --dry-run; for a text that is the same in all rows use --set instead of --map."
            raise InvalidArgument(f"{surveys[0].path} {problems[0]}", hint=hint)
        self._work.take_up(surveys)

    def run(self) -> None:
        """Do what is left, step by step."""
        ahead = self._work.ahead()
        self._watch.planned(sum(chunk.rows for _, _, chunk in ahead))
        for step in steps(ahead, self._settings.step_bytes):
            left = self._insist(step)
            if left.counts.rows != sum(chunk.rows for _, _, chunk in step):
                raise BsfgError(f"a step counted {left.counts.rows} rows that has others")
            file, chunk, _ = step[-1]
            self._work.advance(file, chunk, left.counts, left.rejects, left.by_file)
            self._watch.done(left.counts)

    def _insist(self, step: Sequence[Piece]) -> Left:
        """Do a step, again and again while the node is away or full, as long as the user wants to wait."""
        retry = Retry(1.0, 1.0, self._settings.wait_seconds)
        while True:
            try:
                return self._do(step)
            except BsfgError as error:
                pause_seconds = retry.pause_after(error)
                self._watch.waiting(error)
                time.sleep(pause_seconds)

    def _do(self, step: Sequence[Piece]) -> Left:
        """Do a step the quick way, and where the node refuses rows of it the careful one."""
        stored = 0
        if not self._careful:
            try:
                left = self._written(step)
            except BsfgError as error:
                if error.code not in OF_ONE_FACT | OF_ITS_ZONE:
                    raise
            else:
                if not left.counts.conflicts:
                    return left
                stored = left.counts.inserted
        # Append a step in one task that looks at every answer.
        job, _ = self._job(step)
        settings = self._settings
        work = appending(job, settings.task_access, settings.try_seconds, settings.conflicts_fail)
        self._told(lambda: self._over(len(step), 1, work, SURVEY_SCHEMA).collect())
        left = self._collected(job, 1)
        left.counts.inserted += stored
        left.counts.already_exists -= stored
        # Where one row was refused others are likely to be; the quick way would be in vain again.
        self._careful = left.refused > 0
        return left

    def _written(self, step: Sequence[Piece]) -> Left:
        """Write a step through the data source."""
        job, tasks = self._job(step)
        results = Path(job.folder) / "results.jsonl"
        frame = self._over(len(step), tasks, mapping(job), fact_schema(self._plan))
        writer = frame.write.format("bsfg").mode("append").options(**self._options(str(results)))
        self._told(writer.save)
        left = self._collected(job, tasks)
        found: dict[str, Any] = orjson.loads(results.read_bytes())
        if found["facts"] != left.counts.facts:
            raise BsfgError(f"{left.counts.facts} facts were made and {found['facts']} written")
        left.counts.inserted, left.counts.already_exists = found["inserted"], found["repeated"]
        left.counts.conflicts = found["conflicts"]
        return left

    def _job(self, step: Sequence[Piece]) -> tuple[IngestJob, int]:
        # A folder of its own for each try: a task of an earlier one may still run and must not interfere.
        shutil.rmtree(self._work.parts, ignore_errors=True)
        folder = self._work.parts / uuid.uuid4().hex
        folder.mkdir(parents=True)
        # Give a file without its chunks, which tasks need not know.
        chunks = [(replace(self._work.files[file], chunks=[]), chunk) for file, _, chunk in step]
        return IngestJob(chunks, self._plan, str(folder)), min(self._settings.tasks, len(step))

    def _collected(self, job: IngestJob, tasks: int) -> Left:
        left = collect(Path(job.folder), tasks)
        if left is None:
            hint = "Name a folder that all machines share with --work; the files themselves must be seen by all too."
            raise SpoolNotShared(f"what the tasks wrote to {job.folder} is not there", hint=hint)
        return left

    def _over(self, count: int, tasks: int, step: Step, schema: Any) -> DataFrame:
        """Run a step over the numbers below ``count``, in order."""
        return self._spark.range(0, count, 1, tasks).mapInArrow(step, from_arrow_schema(schema))

    def _options(self, results: str) -> dict[str, str]:
        settings = self._settings
        return {
            **settings.task_access.options(),
            "stream": self._plan.stream,
            "retrySeconds": f"{settings.try_seconds:g}",
            "conflicts": "fail" if settings.conflicts_fail else "count",
            "spool": str(self._work.folder / "spool"),
            "results": results,
        }

    def _told(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            raise told_by_spark(error) from error


def steps(ahead: Sequence[Piece], step_bytes: int) -> list[list[Piece]]:
    """Put chunks that follow each other into steps of about a size, each of at least one chunk."""
    result: list[list[Piece]] = []
    size = 0
    for piece in ahead:
        if not result or size + piece[2].size_bytes > step_bytes:
            result.append([])
            size = 0
        result[-1].append(piece)
        size += piece[2].size_bytes
    return result
