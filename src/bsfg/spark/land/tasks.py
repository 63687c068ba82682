"""Runs work as tasks of Spark: each gets a number, does what it stands for, and answers with a line of JSON.

Facts never go through the JVM. A task fetches, sorts and writes them itself; only receipts come back. An error of ours
is an answer too, so that the driver knows its code and Spark does not print a traceback. What is not an answer, such
as a killed worker, Spark tries again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bsfg.errors import BsfgError, SparkFailed
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.staging import Merge, NotOurs, StagedRange, StagingWork, merge, stage
from bsfg.spark.land.state import Shape
from bsfg.spark.session import failed
from bsfg.stores.log.files import translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTE_SUFFIX = ".note"
_COUNT = struct.Struct("<q")


@contextmanager
def grouped(spark: SparkSession, group: str, says: str = "landing facts") -> Iterator[None]:
    """Have the jobs of a block belong to a group, which `cancelJobGroup` ends and nothing else.

    `interruptTag` is not used: it can leave the thread that waits for the job hanging for ever.
    """
    context = spark.sparkContext
    before = context.getLocalProperty("spark.jobGroup.id")
    context.setJobGroup(group, says)
    try:
        yield
    finally:
        with suppress(Exception):  # Spark may have ended.
            context.setLocalProperty("spark.jobGroup.id", before)  # type: ignore[arg-type]


def stage_all(spark: SparkSession, work: StagingWork, cuts: Sequence[int]) -> list[StagedRange]:
    """Stage the ranges between the cuts, side by side, and give their receipts in order."""
    ranges = list(pairwise(cuts))

    def one(number: int) -> dict[str, Any]:
        work.check_shared()
        with _noting(work, number) as note:
            return asdict(stage(work, *ranges[number], note))

    return [_receipt(answer) for answer in _run(spark, len(ranges), one)]


def merge_all(
    spark: SparkSession, root: str, run: str, shape: Shape, merges: Sequence[Merge]
) -> list[Staged | str | None]:
    """Merge files, side by side; what stands in the place of a result is told by `MergeAll`."""

    def one(number: int) -> dict[str, Any]:
        try:
            return asdict(merge(Path(root), run, shape, merges[number]))
        except NotOurs as error:
            return {"left": str(error)}
        except FileNotFoundError:
            return {"left": None}

    answers = _run(spark, len(merges), one)
    return [answer["left"] if "left" in answer else Staged(**answer) for answer in answers]


def staged_so_far(folder: Path) -> int:
    """Add up what the tasks that are under way have noted."""
    total = 0
    for path in folder.glob(f"*{NOTE_SUFFIX}"):
        with suppress(OSError, struct.error):
            total += _COUNT.unpack(path.read_bytes())[0]
    return total


def _run(spark: SparkSession, count: int, one: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Do ``count`` pieces of work as tasks, and give their answers in order."""

    def task(numbers: Iterable[int]) -> list[str]:
        return [_answer(one, number) for number in numbers]

    try:
        # The first job of a DataFrame costs Spark several seconds more than that of plain tasks.
        found = spark.sparkContext.parallelize(range(count), count).mapPartitions(task).collect()
    except Exception as error:
        raise failed("tasks of the landing failed on Spark", error) from error
    answers = sorted(map(orjson.loads, found), key=lambda answer: answer["number"])
    for answer in answers:
        if "error" in answer:
            raise BsfgError.from_dict(answer["error"])
    if [answer["number"] for answer in answers] != list(range(count)):
        raise SparkFailed(f"{len(answers)} of {count} tasks have answered")
    return [answer["result"] for answer in answers]


def _answer(one: Callable[[int], dict[str, Any]], number: int) -> str:
    """Do one piece of work and write down its result, or an error that is of no use to try again at once."""
    try:
        answer: dict[str, Any] = {"number": number, "result": one(number)}
    except BsfgError as error:
        answer = {"number": number, "error": error.to_dict()}
    except OSError as error:
        answer = {"number": number, "error": translated(error, f"staging {error.filename or ''}".strip()).to_dict()}
    return orjson.dumps(answer).decode()


def _receipt(form: dict[str, Any]) -> StagedRange:
    tail = form["tail"]
    files = [Staged(**file) for file in form["files"]]
    return StagedRange(**{**form, "files": files, "tail": None if tail is None else (tail[0], tail[1])})


@contextmanager
def _noting(work: StagingWork, number: int) -> Iterator[Callable[[int], None]]:
    """Give what notes how far a task is, in a file that the driver reads for its progress."""
    path = Path(work.root) / work.run / f"{number}{NOTE_SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        yield lambda done: _note(descriptor, done)
    finally:
        os.close(descriptor)


def _note(descriptor: int, done: int) -> None:
    os.pwrite(descriptor, _COUNT.pack(done), 0)
