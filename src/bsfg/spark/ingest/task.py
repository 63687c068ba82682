"""What Spark's tasks do: look through files, make facts of their chunks, and append them one by one where need be.

Rejected rows leave a task as a file in the work folder, which driver and tasks share. A task that is repeated writes
the same file again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.errors import OF_ONE_FACT, BsfgError, ConflictingDuplicate, InvalidArgument
from bsfg.ports import Result
from bsfg.spark.calls import CallRetry, NodeAccess, calls
from bsfg.spark.errors import told
from bsfg.spark.ingest.mapped import Mapped, to_mapped
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.reading import Reject, read_chunk
from bsfg.spark.ingest.survey import Chunk, FileSurvey, survey
from bsfg.spark.ingest.work import Counts
from bsfg.spark.mapping import to_facts

Batches = Iterator[pa.RecordBatch]
Step = Callable[[Batches], Batches]

SURVEY_SCHEMA = pa.schema([pa.field("survey", pa.binary())])

NEXT_FACTS = 256
REFUSED_MAX = 1_000
"""So many rows a node may refuse for rules of its own before it is plain that the rule is meant for all of them."""

OF_ITS_ZONE = frozenset({"permission_denied", "zone_not_allowed"})
"""What it refuses because of a zone that a fact names: of one row when zones come from columns, else of all."""


def surveying(sources: Sequence[tuple[str, str]], plan: IngestPlan) -> Step:
    """Give the step that looks through the files whose numbers it gets."""

    @told
    def work(batches: Batches) -> Batches:
        for number in _numbers(batches):
            found = survey(*sources[number], plan)
            yield pa.RecordBatch.from_arrays([pa.array([orjson.dumps(found.to_dict())])], schema=SURVEY_SCHEMA)

    return work


@dataclass(frozen=True, slots=True)
class IngestJob:
    """The chunks of a step, with the files that they are of, the plan, and where what is found is left."""

    chunks: Sequence[tuple[FileSurvey, Chunk]]
    plan: IngestPlan
    folder: str


def mapping(job: IngestJob) -> Step:
    """Give the step that makes facts of the chunks whose numbers it gets, and leaves the rejects in a file."""

    @told
    def work(batches: Batches) -> Batches:
        left = Leaving(job.folder)
        for number in _numbers(batches):
            for mapped in _mapped(job, number):
                left.take(mapped)
                if mapped.facts.num_rows:
                    yield mapped.facts
        left.finish()

    return work


def appending(job: IngestJob, access: NodeAccess, retry_seconds: float, conflicts_fail: bool) -> Step:
    """Give the step that appends by itself, batch by batch and in order, and finds out which rows a node refuses."""

    @told
    def work(batches: Batches) -> Batches:
        left = Leaving(job.folder)
        one_by_one = _Appending(access, job.plan, retry_seconds, conflicts_fail)
        for number in _numbers(batches):
            for mapped in _mapped(job, number):
                rejects = one_by_one.append(mapped, left.counts)
                left.take(mapped, rejects)
        left.finish()
        yield pa.RecordBatch.from_arrays([pa.array([b"done"])], schema=SURVEY_SCHEMA)

    return work


def _numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _mapped(job: IngestJob, number: int) -> Iterator[Mapped]:
    file, chunk = job.chunks[number]
    for rows in read_chunk(file, chunk, job.plan):
        yield to_mapped(rows, job.plan)


# What a task leaves for the driver.


@dataclass(slots=True)
class Leaving:
    """Collects rejects and counts of one task, and leaves them in the work folder when the task is done."""

    folder: str
    counts: Counts = field(default_factory=Counts)
    refused: int = 0
    by_file: dict[str, int] = field(default_factory=dict)
    _lines: list[bytes] = field(default_factory=list)

    def take(self, mapped: Mapped, refused: Sequence[Reject] = ()) -> None:
        """Add what became of some rows; ``refused`` are those that the node did not take."""
        rejects = sorted([*mapped.rejects, *refused], key=lambda reject: reject.row or 0)
        for reject in rejects:
            self._lines.append(orjson.dumps(reject.to_dict(), option=orjson.OPT_APPEND_NEWLINE))
            self.by_file[reject.file] = self.by_file.get(reject.file, 0) + reject.rows
        rejected = sum(reject.rows for reject in rejects)
        self.refused += len(refused)
        self.counts.rejected += rejected
        self.counts.facts += mapped.facts.num_rows - len(refused)
        self.counts.rows += mapped.facts.num_rows - len(refused) + rejected

    def finish(self) -> None:
        """Leave it all where the driver finds it."""
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        folder = Path(self.folder)
        _leave(folder / f"{partition}.rejects", b"".join(self._lines))
        # The counts come last: they say that the rejects are whole.
        found = {"counts": asdict(self.counts), "by_file": self.by_file, "refused": self.refused}
        _leave(folder / f"{partition}.json", orjson.dumps(found))


def _leave(path: Path, data: bytes) -> None:
    """Write a file under its name only when it is whole."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    fresh.write_bytes(data)
    os.replace(fresh, path)


@dataclass(slots=True)
class Left:
    """What the tasks of a step left: the sums, the rejects in order, how many rows of which file were rejected.

    ``refused`` counts the rejects that only the node found out.
    """

    counts: Counts
    rejects: list[bytes]
    by_file: dict[str, int]
    refused: int = 0


def collect(folder: Path, tasks: int) -> Left | None:
    """Read what the tasks left; None when something is not there, as on machines that do not share the folder."""
    whole = Left(Counts(), [], {})
    for partition in range(tasks):
        try:
            found: dict[str, Any] = orjson.loads((folder / f"{partition}.json").read_bytes())
            whole.rejects.append((folder / f"{partition}.rejects").read_bytes())
        except FileNotFoundError:
            return None
        whole.counts.add(Counts(**found["counts"]))
        whole.refused += found["refused"]
        for path, rejected in found["by_file"].items():
            whole.by_file[path] = whole.by_file.get(path, 0) + rejected
    return whole


# Appending with a look at every answer.


class _Appending:
    """Appends facts in order, one batch at a time, and splits off those that the node refuses."""

    def __init__(self, access: NodeAccess, plan: IngestPlan, retry_seconds: float, conflicts_fail: bool) -> None:
        self._access, self._stream, self._conflicts_fail = access, plan.stream, conflicts_fail
        self._patience = CallRetry(retry_seconds)
        self._refused = 0
        fixed = all(plan.fields[name].value is not None for name in ("from_zone", "to_zone"))
        self._bearable = OF_ONE_FACT if fixed else OF_ONE_FACT | OF_ITS_ZONE

    def append(self, mapped: Mapped, counts: Counts) -> list[Reject]:
        """Append facts, count what became of them, and give a reject for each that was refused."""
        refused: dict[int, BsfgError] = {}
        at = 0
        for piece in to_facts(mapped.facts).pieces():
            self._send(piece, at, counts, refused)
            at += len(piece)
        return [
            mapped.rows.reject(int(mapped.at[row]), error.code, _says(error), error.details.get("field"))
            for row, error in refused.items()
        ]

    def _send(self, facts: FactBatch, first: int, counts: Counts, refused: dict[int, BsfgError]) -> None:
        """Send facts until each is stored or refused; a batch that is refused for one of them is sent without it."""
        waiting = [(first, facts)]
        while waiting:
            at, batch = waiting.pop(0)
            try:
                appended = self._patience.made(partial(self._call, batch))
            except BsfgError as error:
                if error.code not in self._bearable:
                    raise
                waiting[:0] = self._parted(at, batch, error, refused)
                continue
            results = appended.receipt.results
            counts.inserted += int(np.count_nonzero(results == Result.INSERTED))
            counts.already_exists += int(np.count_nonzero(results == Result.ALREADY_EXISTS))
            for row in np.flatnonzero(results == Result.CONFLICT).tolist():
                refused[at + row] = self._conflict(batch, row, int(appended.receipt.offsets[row]))
                counts.conflicts += 1

    async def _call(self, batch: FactBatch) -> Any:
        from bsfg.wire.client import BoundaryClient

        stream = BoundaryClient(calls().connection(self._access)).append_stream(self._stream, window_frames=1)
        try:
            return await stream.append(batch)
        finally:
            await stream.close()

    def _parted(
        self, at: int, batch: FactBatch, error: BsfgError, refused: dict[int, BsfgError]
    ) -> list[tuple[int, FactBatch]]:
        """Part a refused batch at the row that is at fault, or in the middle when that is not known."""
        _check_ids(error)
        row = error.details.get("row")
        if len(batch) == 1:
            row = 0
        if not isinstance(row, int) or not 0 <= row < len(batch):
            middle = len(batch) // 2
            return [(at, batch.slice(0, middle)), (at + middle, batch.slice(middle))]
        refused[at + row] = error
        self._refused += 1
        if self._refused > REFUSED_MAX:
            raise type(error)(f"the node refuses row after row, the last one so: {error.message}", hint=error.hint)
        # Behind a bad row there is often another one: a few rows go first, so that little is sent in vain.
        edges = [0, row, row + 1, min(row + 1 + NEXT_FACTS, len(batch)), len(batch)]
        parts = [(at + a, batch.slice(a, b - a)) for a, b in pairwise(edges) if a != row]
        return [(first, part) for first, part in parts if len(part)]

    def _conflict(self, batch: FactBatch, row: int, offset: int) -> BsfgError:
        id = batch.column("message_id")[row].as_py()
        error = ConflictingDuplicate(
            f"message_id {id!r} is taken by another body, the fact at offset {offset}",
            field="message_id",
            message_id=id,
            existing_offset=offset,
        )
        if self._conflicts_fail:
            raise error
        return error


def _check_ids(error: BsfgError) -> None:
    """Raise what is wrong with all ids and not with one: the zone derives them, or the other way round."""
    if error.details.get("field") == "message_id":
        hint = "Use --id none where the zone derives ids (message_ids in its zone.toml), and another --id elsewhere."
        raise InvalidArgument(f"message_id {error.details.get('rule', error.message)}", hint=hint)


def _says(error: BsfgError) -> str:
    """Give what is wrong, without the number of the row in a batch that nobody knows."""
    rule = error.details.get("rule")
    return f"{rule} (so says the node)" if isinstance(rule, str) else error.message
