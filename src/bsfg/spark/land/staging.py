"""What a task does: it reads a range of a buffer and stages Parquet files that nobody sees yet.

Each task of Spark gets a number, does what it stands for, and answers with a line of JSON. Facts never go through the
JVM. A task fetches, sorts and writes them itself; only receipts come back. An error of ours is an answer too, so that
the driver knows its code and Spark does not print a traceback. What is not an answer, such as a killed worker, Spark
tries again.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, SparkFailed, SpoolNotShared
from bsfg.ports import Frame, GapRecord
from bsfg.spark.calls import BufferSource
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.places import Disk
from bsfg.spark.land.state import MAX_FILES_PER_BATCH, STAGED_SUFFIX, Partition, Shape, chosen_rows, file_range
from bsfg.spark.mapping import EntryPlace
from bsfg.spark.session import failed
from bsfg.stores.log.files import translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPRESSION = "zstd"
ROW_GROUP_BYTES = 128 << 20
"""How much a row group holds before it is compressed, about."""

METADATA = "bsfg"
"""The key in a file's metadata under which it tells what it is, wherever it is taken."""


class StagedFile:
    """One Parquet file in the making; rows come in batches, and leave in row groups.

    ``below`` is the folder of the table that the file is for, where that is not the landing folder itself.
    """

    def __init__(self, root: Path, run: str, shape: Shape, partition: Partition, below: str = "") -> None:
        self.partition = partition
        self._shape, self._below = shape, below
        self._run = run
        self._name = f"{uuid.uuid4().hex}{STAGED_SUFFIX}"
        self._path = root / run / self._name
        self._writer: pq.ParquetWriter | None = None
        self._sink: pa.OSFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self.waiting_bytes = 0
        self._facts, self._first, self._last = 0, -1, -1

    @property
    def is_open(self) -> bool:
        """Whether something of it is on the disk."""
        return self._writer is not None

    @property
    def size_bytes(self) -> int:
        """How much of it is on the disk."""
        return int(self._sink.tell()) if self._sink is not None else 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows, which stay in memory until `flush`."""
        self._waiting.append(batch)
        self.waiting_bytes += batch.nbytes
        self._facts += batch.num_rows
        ends = pc.min_max(batch.column("offset"))
        first, last = ends["min"].as_py(), ends["max"].as_py()
        self._first = first if self._first < 0 else min(self._first, first)
        self._last = max(self._last, last)

    def flush(self) -> None:
        """Write what waits as a row group."""
        if not self._waiting:
            return
        if self._writer is None:
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pq.ParquetWriter(
                self._sink, self._shape.schema, compression=COMPRESSION, use_dictionary=self._shape.repeating
            )
        table = pa.Table.from_batches(self._waiting)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self.waiting_bytes = [], 0

    def finish(self) -> Staged:
        """Write what is left, and sync the file."""
        self.flush()
        assert self._writer is not None
        assert self._sink is not None
        values = dict(self.partition.values)
        about = {**values, "first": self._first, "last": self._last, "facts": self._facts}
        self._writer.add_key_value_metadata({METADATA: orjson.dumps(about).decode()})
        self._writer.close()
        self._sink.close()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            size_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        path, partition = f"{self._run}/{self._name}", f"{self._below}{self.partition.path}"
        return Staged(path, partition, self._first, self._last, self._facts, size_bytes, values)


def partition_of(file: pq.ParquetFile, shape: Shape) -> Partition | None:
    """Give the partition that a file says it belongs to, or None when it is not one of ours."""
    metadata = (file.metadata.metadata or {}).get(METADATA.encode())
    if metadata is None or not shape.holds(file.schema_arrow.remove_metadata()):
        return None
    about = orjson.loads(metadata)
    return Partition(tuple((name, about.get(name, "")) for name in shape.partition_by))


MEMORY_BYTES = 256 << 20
"""How much a task keeps in memory, over all partitions, before it writes."""

OPEN_FILES_MAX = 64


@dataclass(frozen=True, slots=True)
class StagingWork:
    """What all tasks of a batch need to know; picklable."""

    source: BufferSource
    log_id: str
    shape: Shape
    root: str
    run: str
    file_size_bytes: int
    max_files: int = MAX_FILES_PER_BATCH
    memory_bytes: int = MEMORY_BYTES
    row_group_bytes: int = ROW_GROUP_BYTES

    def check_shared(self) -> None:
        """Raise `SpoolNotShared` when the landing folder is not there, as on another machine."""
        if not (Path(self.root) / self.run).is_dir():
            hint = "On a cluster all machines must have the folder --out under the same path."
            raise SpoolNotShared(f"{self.root}/{self.run} is not there", hint=hint)


@dataclass(slots=True)
class Stager:
    """Sorts facts into files by partition, with a bound on what it keeps in memory."""

    work: StagingWork
    done: list[Staged] = field(default_factory=list)
    _files: dict[Partition, StagedFile] = field(default_factory=dict)
    _waiting_bytes: int = 0

    def add(self, entries: EntryBatch) -> None:
        """Take facts."""
        work = self.work
        rows = work.shape.landed(entries, EntryPlace(work.source.stream, work.source.buffer, work.log_id))
        for partition, chosen in work.shape.partitions(entries):
            self._add(partition, rows if chosen is None else chosen_rows(rows, chosen))
        if self._waiting_bytes > work.memory_bytes:
            self._make_room()

    def fitting(self, entries: EntryBatch) -> EntryBatch:
        """Give the first of some entries, as many as do not make more files than there may be."""
        room = self.work.max_files - len(self.done)
        while len(entries):
            coming = {partition for partition, _ in self.work.shape.partitions(entries)}
            # The first entry of all is always taken, so that a landing goes on whatever it is told.
            if len(coming | set(self._files)) <= room or (len(entries) == 1 and not self._files and not self.done):
                break
            entries = entries.slice(0, len(entries) // 2)
        return entries

    def finish(self) -> list[Staged]:
        """Finish all files and give them."""
        for file in list(self._files.values()):
            self._finish(file)
        return self.done

    def _make_room(self) -> None:
        """Write the largest parts until half of the memory is free."""
        for file in sorted(self._files.values(), key=lambda file: -file.waiting_bytes):
            if self._waiting_bytes <= self.work.memory_bytes // 2:
                return
            if file.partition in self._files:
                self._flush(file)

    def _add(self, partition: Partition, rows: pa.RecordBatch) -> None:
        file = self._files.get(partition)
        if file is None:
            file = StagedFile(Path(self.work.root), self.work.run, self.work.shape, partition)
            self._files[partition] = file
        before = file.waiting_bytes
        file.add(rows)
        self._waiting_bytes += file.waiting_bytes - before
        if file.waiting_bytes >= self.work.row_group_bytes:
            self._flush(file)

    def _flush(self, file: StagedFile) -> None:
        self._waiting_bytes -= file.waiting_bytes
        file.flush()
        if file.size_bytes >= self.work.file_size_bytes:
            self._finish(file)
            return
        opened = [each for each in self._files.values() if each.is_open]
        if len(opened) > OPEN_FILES_MAX:
            self._finish(max(opened, key=lambda each: each.size_bytes))

    def _finish(self, file: StagedFile) -> None:
        self._waiting_bytes -= file.waiting_bytes
        self.done.append(file.finish())
        del self._files[file.partition]


@dataclass(frozen=True, slots=True)
class StagedRange:
    """What one task staged of its range: all up to ``next``, which is before its end when there are many partitions."""

    first: int
    next: int
    files: list[Staged]
    gaps: list[dict[str, Any]]
    missing: int
    tail: tuple[int, str] | None


def stage(work: StagingWork, first: int, end: int, note: Callable[[int], None]) -> StagedRange:
    """Stage a range of offsets (``end`` exclusive); ``note`` is told how many of them are done."""
    stager, missing = Stager(work), 0
    gaps: list[dict[str, Any]] = []
    tail: tuple[int, str] | None = None
    for frame in work.source.frames(first, end, work.log_id):
        if frame.entries is not None and len(frame.entries):
            entries = stager.fitting(frame.entries)
            if len(entries):
                stager.add(entries)
                tail = int(entries.offsets[-1]), entries.column("digest")[-1].as_py().hex()
            if len(entries) < len(frame.entries):
                end = int(frame.entries.offsets[len(entries)])
                break
        elif frame.gap is not None:
            gaps.append(gap_line(frame, work))
            missing += frame.last - frame.first + 1
        note(frame.last + 1 - first)
    return StagedRange(first, end, stager.finish(), gaps, missing, tail)


def gap_line(frame: Frame, work: StagingWork) -> dict[str, Any]:
    """Describe a range of facts that are missing, for the list of gaps."""
    assert frame.gap is not None
    return {
        "first": frame.first,
        "last": frame.last,
        **gap_reason(frame.gap, frame.last - frame.first + 1),
        **_place(work),
    }


def gap_reason(gap: GapRecord, count: int) -> dict[str, Any]:
    """Tell how many facts are missing, and why."""
    return {"count": count, "reason": str(gap.reason), "at_unix_ms": gap.at_unix_ms, "detail": gap.detail}


def _place(work: StagingWork) -> dict[str, Any]:
    return {"stream": work.source.stream, "buffer": work.source.buffer, "log_id": work.log_id}


MANY_FILES = 8
"""So many files of about the same size are merged although they do not fill a file yet."""

SMALLEST_BYTES = 64 << 10
MERGED_FILES_MAX = 1_000
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Small:
    """A landed file that may be merged with others."""

    name: str
    first: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one partition that are to become one; ``partition`` is its folder."""

    partition: str
    names: Sequence[str]
    size_bytes: int


def small_files(disk: Disk, partition: str, names: Sequence[str], file_size_bytes: int) -> list[Small]:
    """Give those files of a partition that are smaller than half of what they should be, in the order of offsets."""
    found = []
    for name in names:
        offsets = file_range(name)
        if offsets is None:
            continue
        try:
            size = disk.size(f"{partition}/{name}")
        except FileNotFoundError:  # Somebody else has merged and removed it meanwhile.
            continue
        if size < file_size_bytes // 2:
            found.append(Small(name, offsets[0], size))
    return sorted(found, key=lambda small: (small.first, small.name))


def plan(partition: str, files: Sequence[Small], file_size_bytes: int, *, thorough: bool) -> list[Merge]:
    """Choose what is merged; a thorough plan leaves no two small files that could be one."""
    merges = []
    for group in _groups(files, file_size_bytes):
        fills = sum(small.size_bytes for small in group) >= file_size_bytes // 2
        chosen = group if thorough or fills else _many_alike(group)
        if len(chosen) > 1:
            total = sum(small.size_bytes for small in chosen)
            merges.append(Merge(partition, [small.name for small in chosen], total))
    return merges


def _groups(files: Sequence[Small], file_size_bytes: int) -> Iterator[list[Small]]:
    """Cut files into runs that fill a file each; the last run may be smaller."""
    group: list[Small] = []
    total = 0
    for small in files:
        if group and (total + small.size_bytes > file_size_bytes or len(group) >= MERGED_FILES_MAX):
            yield group
            group, total = [], 0
        group.append(small)
        total += small.size_bytes
    if group:
        yield group


def _many_alike(group: Sequence[Small]) -> list[Small]:
    """Give the smallest files of a group when there are many of about one size; larger ones are left alone."""
    tiers = [max(small.size_bytes // SMALLEST_BYTES, 1).bit_length() // 3 for small in group]
    for tier in sorted(set(tiers)):
        if tiers.count(tier) >= MANY_FILES:
            return [small for small, each in zip(group, tiers, strict=True) if each <= tier]
    return []


class NotOurs(Exception):
    """A file has the name of a landed one, and another content."""


def merge(root: Path, run: str, shape: Shape, work: Merge) -> Staged:
    """Stage one file with the facts of several; raises `NotOurs` with the name of one that is not of our making."""
    target: StagedFile | None = None
    for name in work.names:
        with pq.ParquetFile(root / work.partition / name) as source:
            partition = partition_of(source, shape)
            if partition is None or partition.path != work.partition:
                raise NotOurs(name)
            target = target or StagedFile(root, run, shape, partition)
            for batch in source.iter_batches(ROWS_AT_ONCE, use_threads=False):
                for rows in shape.conformed(batch).to_batches():
                    target.add(rows)
                if target.waiting_bytes >= ROW_GROUP_BYTES:
                    target.flush()
    assert target is not None
    return target.finish()


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
