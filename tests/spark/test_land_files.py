"""The files of a landing: partitions that every reader understands, sizes that are kept, merges that change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.landing import check_same, seen_offsets, table

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import InvalidArgument, SpoolNotShared
from bsfg.fact import Envelope, Fact, Message
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark.calls import BufferSource, NodeAccess
from bsfg.spark.land.folder import Batch, LandingFolder, Replacement, Staged
from bsfg.spark.land.places import LocalDisk
from bsfg.spark.land.staging import (
    MANY_FILES,
    OPEN_FILES_MAX,
    Merge,
    NotOurs,
    Small,
    Stager,
    StagingWork,
    merge,
    plan,
    small_files,
    stage,
)
from bsfg.spark.land.state import EMPTY, By, LandedOrigin, Partition, Shape, escaped, file_name, file_range, folder_of
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.facts import messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_ID = "ab" * 16
DAY_MS = 86_400_000
PRODUCED = Shape(By.PRODUCED_AT)
HOSTILE = [
    "../../etc/passwd",
    "a/b",
    "a=b",
    "100%",
    "%2F",
    "with space",
    "nul\x00inside",
    "line\nbreak",
    "ümlaut_温度",
    ".hidden",
    "_hidden",
    "12",
    "2026-03-01",
    "NaN",
    "x" * 300,
    "%" * 120,
    "温" * 90,
]


@dataclass(frozen=True)
class Facts(BufferSource):
    """A source that has its facts at hand."""

    entries: EntryBatch | None = None
    gaps: tuple[GapRecord, ...] = ()
    frame_facts: int = 1_000

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give the frames of a range; offsets in a gap have no entries."""
        assert self.entries is not None
        at = first
        for gap in self.gaps:
            yield from self._entries(at, gap.first)
            yield Frame(gap.first, gap.last, gap=gap)
            at = gap.last + 1
        yield from self._entries(at, end)

    def _entries(self, first: int, end: int) -> Iterator[Frame]:
        assert self.entries is not None
        for start in range(first, end, self.frame_facts):
            stop = min(end, start + self.frame_facts)
            yield Frame(start, stop - 1, self.entries.slice(start, stop - start))


def entries_of(facts: list[Message]) -> EntryBatch:
    """Give facts offsets and times, without asking whether a node would take them."""
    batch = FactBatch.from_messages(facts).record_batch
    digests = pa.array([bytes(32)] * len(facts), pa.binary(32))
    batch = batch.set_column(batch.schema.names.index("digest"), "digest", digests)
    return EntryBatch.of(batch, np.arange(len(facts)), START_UNIX_MS + 5 * DAY_MS)


def predicates(*names: str, count: int = 1, days: int = 1) -> list[Message]:
    """Make facts of some predicates, on some days."""
    found = []
    for number, message in enumerate(messages(count * len(names))):
        fact = replace(message.fact, predicate=names[number % len(names)])
        at = START_UNIX_MS + (number % days) * DAY_MS
        found.append(replace(message, fact=fact, envelope=replace(message.envelope, produced_at_unix_ms=at)))
    return found


def work(root: Path, facts: list[Message], **more: Any) -> StagingWork:
    """Give the work of a task on facts that are at hand, into a folder that is there."""
    source = Facts(NodeAccess("localhost:1"), "operational", "store", 0.0, entries=entries_of(facts))
    run = "_bsfg/staging/run"
    (root / run).mkdir(parents=True, exist_ok=True)
    return replace(StagingWork(source, LOG_ID, PRODUCED, str(root), run, 1 << 40), **more)


def place(root: Path, files: list[Staged], sequence: int = 1) -> None:
    """Put staged files in their places."""
    for file in files:
        target = root / file.partition / file_name(file.first, file.last, sequence)
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / file.path).rename(target)


def test_facts_are_landed_as_they_are(tmp_path: Path) -> None:
    """All fields of a fact are there, its object as text or as bytes, its predicate and its date in the path."""
    facts = predicates("temperature_measured", "door_opened", count=50, days=3)
    picture = Message(Envelope("plant", "enterprise", START_UNIX_MS, "p", object_media_type="image/png"), facts[0].fact)
    facts.append(replace(picture, fact=replace(facts[0].fact, object=b"\x89PNG\xff")))
    given = work(tmp_path, facts)
    receipt = stage(given, 0, len(facts), lambda done: None)
    assert seen_offsets(tmp_path) == []
    place(tmp_path, receipt.files)
    found = table(tmp_path)
    entries = entries_of(facts)
    check_same(found.to_pylist(), entries.to_entries())
    assert found.column("object").null_count == len(facts) - 1
    assert set(found.column("log_id").to_pylist()) == {LOG_ID}
    assert receipt.tail == (len(facts) - 1, bytes(32).hex())
    assert sum(file.facts for file in receipt.files) == len(facts)
    assert [column for column in found.schema.names if column not in PRODUCED.schema.names] == ["date", "predicate"]


def test_the_other_time_can_give_the_date(tmp_path: Path) -> None:
    """By appended_at, the date is the one on which the fact became durable."""
    facts = predicates("door_opened", count=20, days=4)
    receipt = stage(work(tmp_path, facts, shape=Shape()), 0, 20, lambda done: None)
    place(tmp_path, receipt.files)
    assert len(receipt.files) == 1
    check_same(table(tmp_path).to_pylist(), entries_of(facts).to_entries(), by="appended_at")


def test_hostile_predicates_stay_in_the_folder(tmp_path: Path, spark: SparkSession) -> None:
    """Whatever a predicate looks like, it is one name below its date, and readers get it back as it was."""
    root = tmp_path / "lake"
    receipt = stage(work(root, predicates(*HOSTILE)), 0, len(HOSTILE), lambda done: None)
    place(root, receipt.files)
    parts = [path.relative_to(root).parts for path in root.rglob("*.parquet")]
    assert sorted({len(each) for each in parts}) == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake"]
    short = {predicate for predicate in HOSTILE if len(escaped(predicate).encode()) == len(_plain(predicate).encode())}
    assert len(short) == len(HOSTILE) - 3
    arrow = ds.dataset(root, partitioning=ds.partitioning(flavor="hive", schema=_TEXTS)).to_table()
    assert set(arrow.column("predicate").to_pylist()) >= short
    rows = spark.read.option("mergeSchema", "false").parquet(str(root)).select("offset", "predicate").collect()
    by_spark = {row["offset"]: row["predicate"] for row in rows}
    by_arrow = dict(zip(arrow.column("offset").to_pylist(), arrow.column("predicate").to_pylist(), strict=True))
    assert by_spark == by_arrow
    assert {HOSTILE[offset] for offset in by_spark if by_spark[offset] == HOSTILE[offset]} >= short
    told = [pq.read_metadata(path).metadata[b"bsfg"] for path in root.rglob("*.parquet")]
    assert len(set(told)) == len(HOSTILE)


_TEXTS = pa.schema([pa.field("date", pa.string()), pa.field("predicate", pa.string())])


def unescaped(name: str) -> str:
    """Read the value of a partition from its name, as Spark and Hive do."""
    return "" if name == EMPTY else re.sub(r"%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), name)


def _plain(predicate: str) -> str:
    return escaped(predicate) if unescaped(escaped(predicate)) == predicate else ""


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_escaping_can_be_undone(value: str) -> None:
    """A value and its name belong to each other, and the name is one safe name."""
    name = escaped(value)
    assert "/" not in name
    assert "\0" not in name
    assert 0 < len(name.encode()) <= 200
    if len(value) < 40:
        assert unescaped(name) == value


def test_files_are_cut_at_their_size(tmp_path: Path) -> None:
    """A file that has reached its size is finished, and the next facts go to another."""
    facts = predicates("door_opened", count=4_000)
    given = work(tmp_path, facts, file_size_bytes=20_000, row_group_bytes=50_000)
    assert isinstance(given.source, Facts)
    given = replace(given, source=replace(given.source, frame_facts=100))
    receipt = stage(given, 0, 4_000, lambda done: None)
    assert len(receipt.files) > 3
    assert all(20_000 <= file.size_bytes < 50_000 for file in receipt.files[:-1])
    place(tmp_path, receipt.files)
    assert seen_offsets(tmp_path) == list(range(4_000))
    bounds = sorted((file.first, file.last) for file in receipt.files)
    assert all(last < first for (_, last), (first, _) in pairwise(bounds))


def test_many_partitions_need_little_memory(tmp_path: Path) -> None:
    """Hundreds of partitions are written with a bound on memory and on open files."""
    names = [f"predicate_{number}" for number in range(150)]
    facts = predicates(*names, count=40, days=2)
    given = work(tmp_path, facts, memory_bytes=200_000, row_group_bytes=50_000)
    stager, most_bytes, most_open = Stager(given), 0, 0
    for frame in given.source.frames(0, len(facts), LOG_ID):
        assert frame.entries is not None
        stager.add(frame.entries)
        most_bytes = max(most_bytes, sum(file.waiting_bytes for file in stager._files.values()))
        most_open = max(most_open, sum(file.is_open for file in stager._files.values()))
    assert most_bytes <= 200_000
    assert most_open <= OPEN_FILES_MAX
    place(tmp_path, stager.finish())
    assert seen_offsets(tmp_path) == list(range(len(facts)))


def test_gaps_are_counted_and_told(tmp_path: Path) -> None:
    """A range that is not there is a line for the list of gaps, and the task says how far it is."""
    facts = predicates("door_opened", count=100)
    given = work(tmp_path, facts)
    gap = GapRecord(20, 39, GapReason.EVICTED, 77, "full")
    noted: list[int] = []
    assert isinstance(given.source, Facts)
    receipt = stage(replace(given, source=replace(given.source, gaps=(gap,))), 0, 100, noted.append)
    assert receipt.missing == 20
    [line] = receipt.gaps
    assert (line["first"], line["last"], line["reason"], line["at_unix_ms"]) == (20, 39, "evicted", 77)
    assert (line["detail"], line["stream"], line["buffer"], line["log_id"]) == ("full", "operational", "store", LOG_ID)
    assert noted == [20, 40, 100]
    place(tmp_path, receipt.files)
    assert seen_offsets(tmp_path) == [*range(20), *range(40, 100)]


def test_a_task_on_another_machine_is_told(tmp_path: Path) -> None:
    """Where the landing folder is not there, a task says that it must be shared."""
    with pytest.raises(SpoolNotShared) as caught:
        replace(work(tmp_path, messages(1)), run="_bsfg/staging/elsewhere").check_shared()
    assert "--out" in caught.value.hint


@pytest.mark.parametrize("out", ["s3://bucket/lake", "hdfs://host/lake", "abfss:/container/lake"])
def test_object_stores_are_refused(out: str) -> None:
    """An address is no folder, however it was cleaned up on the way here."""
    with pytest.raises(InvalidArgument, match="is not a folder"):
        folder_of(Path(out))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """Landing in a file, or below one, is refused."""
    (tmp_path / "file").write_bytes(b"")
    for out in (tmp_path / "file", tmp_path / "file" / "lake"):
        with pytest.raises(InvalidArgument):
            folder_of(out)


# Compaction.


def landed(tmp_path: Path, facts: list[Message], batches: int) -> LandingFolder:
    """Land facts in so many batches, as the driver would."""
    folder = LandingFolder.open(LocalDisk(tmp_path))
    folder.begin(LandedOrigin("operational", "store", LOG_ID, "produced_at"), 0)
    for batch in range(batches):
        first, end = (len(facts) * number // batches for number in (batch, batch + 1))
        receipt = stage(work(tmp_path, facts, run=folder.run), first, end, lambda done: None)
        folder.commit(Batch(first, end, receipt.files, receipt.gaps, receipt.missing, receipt.tail))
    return folder


def compact(folder: LandingFolder, root: Path, file_size_bytes: int) -> int:
    """Merge everything that could be one file, and tell how many merges that took."""
    merges = [
        each
        for partition in folder.places.partitions()
        for each in plan(
            partition,
            small_files(folder.disk, partition, folder.places.names(partition), file_size_bytes),
            file_size_bytes,
            thorough=True,
        )
    ]
    for each in merges:
        folder.replace([Replacement(merge(root, folder.run, folder.state.origin.shape, each), each.names)])
    return len(merges)


def test_merging_changes_no_fact(tmp_path: Path) -> None:
    """After a merge the same facts are there, in fewer files, and a second merge finds nothing to do."""
    facts = predicates("door_opened", "temperature_measured", count=100, days=2)
    folder = landed(tmp_path, facts, 10)
    before, files = table(tmp_path), len(list(tmp_path.rglob("*.parquet")))
    assert files == 20
    assert compact(folder, tmp_path, 1 << 30) == 2
    assert table(tmp_path).equals(before)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    assert compact(folder, tmp_path, 1 << 30) == 0
    assert not list((tmp_path / "_bsfg" / ".swap").iterdir())
    folder.close()
    merged = list(tmp_path.rglob("*.parquet"))
    assert {file_range(each.name) for each in merged} == {(0, 198), (1, 199)}
    assert [pq.read_metadata(each).num_row_groups for each in merged] == [1, 1]


def test_what_is_not_ours_is_not_merged(tmp_path: Path) -> None:
    """A file that only looks like a landed one is found out before anything is replaced."""
    folder = landed(tmp_path, predicates("door_opened", count=100), 4)
    [partition] = folder.places.partitions()
    stranger = file_name(0, 1, 99)
    pq.write_table(pa.table({"offset": [0, 1]}), tmp_path / partition / stranger)
    names = [small.name for small in small_files(folder.disk, partition, folder.places.names(partition), 1 << 30)]
    assert stranger in names
    with pytest.raises(NotOurs, match=stranger):
        merge(tmp_path, folder.run, PRODUCED, Merge(partition, names, 1))
    moved = Partition.of({"date": "2020-01-01", "predicate": "door_opened"}).path
    (tmp_path / moved).mkdir(parents=True)
    (tmp_path / partition / names[1]).rename(tmp_path / moved / names[1])
    with pytest.raises(NotOurs):
        merge(tmp_path, folder.run, PRODUCED, Merge(moved, [names[1]], 1))
    folder.close()


sizes = st.lists(st.integers(1, 200_000_000), max_size=60)


@settings(max_examples=200)
@given(sizes, st.booleans())
def test_a_plan_merges_what_is_worth_it(found: list[int], thorough: bool) -> None:
    """Groups do not overlap, fit into a file, and a thorough plan leaves no two neighbours that would fit into one."""
    target = 128_000_000
    files = [Small(f"f{number}", number, size) for number, size in enumerate(found) if size < target // 2]
    merges = plan("p", files, target, thorough=thorough)
    named = [name for each in merges for name in each.names]
    assert len(named) == len(set(named))
    by_name = {small.name: small.size_bytes for small in files}
    for each in merges:
        assert len(each.names) > 1
        assert each.size_bytes == sum(by_name[name] for name in each.names) <= target
        assert thorough or each.size_bytes >= target // 2 or len(each.names) >= MANY_FILES
    if thorough and len(files) > 1 and sum(by_name.values()) <= target:
        assert [sorted(each.names) for each in merges] == [sorted(by_name)]


def test_a_steady_trickle_is_rewritten_few_times() -> None:
    """Small files that keep coming are merged in tiers: each byte is written a handful of times on its way up."""
    target, step = 128_000_000, 100_000
    files: list[Small] = []
    written = 0
    for number in range(3_000):
        files.append(Small(f"f{number}", number, step))
        for each in plan("p", [small for small in files if small.size_bytes < target // 2], target, thorough=False):
            gone = [small for small in files if small.name in set(each.names)]
            files = [small for small in files if small not in gone]
            files.append(Small(f"m{number}-{each.names[0]}", gone[0].first, each.size_bytes))
            written += each.size_bytes
        files.sort(key=lambda small: small.first)
    assert len([small for small in files if small.size_bytes < target // 2]) < 4 * MANY_FILES
    assert written < 6 * 3_000 * step
    assert sum(small.size_bytes for small in files) == 3_000 * step


def test_facts_without_objects_that_are_text(tmp_path: Path) -> None:
    """A batch of bytes alone is landed as bytes, and an empty object as an empty text."""
    fact = Fact("machine:m", "door_opened", b"\xff\x00")
    one = Message(Envelope("plant", "enterprise", START_UNIX_MS, "1"), fact)
    two = Message(Envelope("plant", "enterprise", START_UNIX_MS, "2"), replace(fact, object=b""))
    place(tmp_path, stage(work(tmp_path, [one, two]), 0, 2, lambda done: None).files)
    found = table(tmp_path)
    assert found.column("object").to_pylist() == [b"\xff\x00", None]
    assert found.column("object_text").to_pylist() == [None, ""]
