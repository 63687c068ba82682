"""A landing folder after kills, power losses and broken disks: every fact once, nothing half to be seen."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random

import orjson
import pytest
from tests.spark.landing import SimulatedLandingDisk

from bsfg.errors import (
    BsfgError,
    DiskFull,
    FolderLocked,
    FormatUnsupported,
    FrameInvalid,
    InvalidArgument,
    LandingDamaged,
    OutcomeUnknown,
    StorageFailed,
)
from bsfg.spark.land.folder import Batch, LandingFolder, Replacement, Staged
from bsfg.spark.land.staging import Merge, plan, small_files
from bsfg.spark.land.state import GAPS, STATE, LandedOrigin, Partition, file_range
from bsfg.testing.disk import PowerLoss, SimulatedDisk

ORIGIN = LandedOrigin("operational", "store", "ab" * 16, "produced_at")
FILE_SIZE_BYTES = 160
HOT, COLD = (
    Partition.of({"date": date, "predicate": predicate}).path
    for date, predicate in (("2026-03-01", "temperature_measured"), ("2026-03-02", "door_opened"))
)


def stage(folder: LandingFolder, partition: str, offsets: list[int], name: str) -> Staged:
    """Stage a file that holds offsets, as a task would; its content stands for a Parquet file."""
    path = f"{folder.run}/{name}.staged"
    data = orjson.dumps(offsets)
    file = folder.disk.create(path)
    file.write([data])
    file.sync()
    file.close()
    return Staged(path, partition, offsets[0], offsets[-1], len(offsets), len(data))


def land(folder: LandingFolder, batch: int) -> None:
    """Land the offsets of a batch, 20 of them, over two partitions; every third batch has a gap too."""
    first = folder.state.next
    assert first == 20 * batch
    gap = list(range(first, first + 4)) if batch % 3 == 2 else []
    offsets = [offset for offset in range(first, first + 20) if offset not in gap]
    files = [stage(folder, HOT, [offset for offset in offsets if offset % 4], f"hot-{batch}")]
    files += [stage(folder, COLD, [offset for offset in offsets if not offset % 4], f"cold-{batch}")]
    gaps = [{"first": gap[0], "last": gap[-1], "reason": "evicted"}] if gap else []
    stage(folder, HOT, offsets, f"failed-attempt-{batch}")
    folder.commit(Batch(first, first + 20, files, gaps, len(gap), (first + 19, "cd"), "token"))
    folder.discard_staged()


def merge(folder: LandingFolder, work: Merge) -> None:
    """Merge files as a task and the driver would."""
    offsets = sorted(
        offset for name in work.names for offset in orjson.loads(bytes(folder.disk.read(f"{work.partition}/{name}")))
    )
    merged = stage(folder, work.partition, offsets, f"merged-{folder.state.sequence}")
    folder.replace([Replacement(merged, work.names)])


def compact(folder: LandingFolder, *, thorough: bool) -> None:
    """Merge what is worth it."""
    for partition in folder.places.partitions():
        found = small_files(folder.disk, partition, folder.places.names(partition), FILE_SIZE_BYTES)
        for work in plan(partition, found, FILE_SIZE_BYTES, thorough=thorough):
            merge(folder, work)


def opened(disk: SimulatedLandingDisk) -> LandingFolder:
    """Open a folder as every run does."""
    folder = LandingFolder.open(disk)
    if folder.is_new:
        folder.begin(ORIGIN, 0)
    return folder


def script(disk: SimulatedLandingDisk, batches: int = 5) -> None:
    """Land some batches with compaction in between, from wherever the folder stands."""
    folder = opened(disk)
    try:
        while folder.state.next < 20 * batches:
            land(folder, folder.state.next // 20)
            if folder.state.sequence % 2:
                compact(folder, thorough=True)
        compact(folder, thorough=True)
    finally:
        if not disk.powerless:
            folder.close()


def visible(disk: SimulatedDisk) -> Counter[int]:
    """Count the offsets that a reader of the folder sees, who passes over hidden names, and check every file."""
    seen: Counter[int] = Counter()
    for path, data in disk.content().items():
        if path.startswith(("_", ".")):
            continue
        offsets = orjson.loads(data)
        bounds = file_range(path.rpartition("/")[2])
        assert bounds == (min(offsets), max(offsets))
        seen.update(offsets)
    return seen


def gaps(disk: SimulatedLandingDisk) -> list[tuple[int, int]]:
    """Read the list of gaps."""
    lines = disk.content().get(GAPS, b"").splitlines()
    return [(line["first"], line["last"]) for line in map(orjson.loads, lines)]


def check(disk: SimulatedLandingDisk) -> None:
    """Open the folder, and hold what a reader sees against the state: every fact once, gaps listed once."""
    folder = opened(disk)
    reached = folder.state.next
    expected_gaps = [(20 * batch, 20 * batch + 3) for batch in range(reached // 20) if batch % 3 == 2]
    missing = {offset for first, last in expected_gaps for offset in range(first, last + 1)}
    assert visible(disk) == Counter(offset for offset in range(reached) if offset not in missing)
    assert gaps(disk) == expected_gaps
    assert (folder.state.facts, folder.state.missing) == (reached - len(missing), len(missing))
    folder.close()
    hidden = [path for path in disk.content() if path.startswith("_bsfg/")]
    assert sorted(hidden) == ["_bsfg/lock", "_bsfg/state.json"]


def crashed(operation: int, *, exchanges: bool) -> tuple[SimulatedLandingDisk, bool]:
    """Run the script with the power cut at an operation; tell whether it came to that."""
    disk = SimulatedLandingDisk(operation, exchanges=exchanges)
    disk.crash_at(operation)
    try:
        script(disk)
    except PowerLoss:
        return disk, True
    return disk, False


@pytest.mark.parametrize("exchanges", [True, False])
def test_power_loss_and_kill_at_every_step(exchanges: bool, soak_size: Callable[[int, int], int]) -> None:
    """Wherever it ends, the next run finds every landed fact once, and lands the rest once."""
    operation, cut = 0, True
    while cut:
        operation += 1
        disk, cut = crashed(operation, exchanges=exchanges)
        found = [disk.after_kill()]
        found += [disk.after_power_loss(Random(seed)) for seed in range(soak_size(2, 40))]
        for each in found:
            check(each)
            script(each)
            check(each)
            assert sum(visible(each).values()) == 96
    assert operation > 100


@pytest.mark.parametrize("exchanges", [True, False])
def test_recovery_itself_may_be_cut_off(exchanges: bool, soak_size: Callable[[int, int], int]) -> None:
    """Any number of interrupted recoveries ends where one that was left alone ends."""
    for seed in range(soak_size(200, 20_000)):
        random = Random(seed)
        disk, _ = crashed(random.randrange(1, 300), exchanges=exchanges)
        for _ in range(random.randrange(1, 5)):
            disk = _ended(disk, random)
            disk.crash_at(random.randrange(1, 40))
            with suppress(PowerLoss):
                script(disk)
        disk = _ended(disk, random)
        check(disk)
        script(disk)
        check(disk)


def _ended(disk: SimulatedLandingDisk, random: Random) -> SimulatedLandingDisk:
    return disk.after_kill() if random.random() < 0.5 else disk.after_power_loss(random)


def test_a_reader_never_misses_a_fact_while_files_are_replaced() -> None:
    """At every step of a compaction a reader sees each fact: once with exchanged folders, at least once without."""
    for exchanges in (True, False):
        disk = SimulatedLandingDisk(exchanges=exchanges)
        folder = opened(disk)
        for batch in range(2):
            land(folder, batch)
        seen: list[Counter[int]] = []
        disk.hook = lambda disk, number, kind, path, seen=seen: seen.append(visible(disk))
        compact(folder, thorough=True)
        assert len(seen) > 20
        assert all(set(each) == set(range(40)) for each in seen)
        assert (max(max(each.values()) for each in seen) == 1) == exchanges


def test_a_reader_never_sees_a_fact_twice_while_a_batch_is_landed() -> None:
    """While files are moved into place a reader sees some of them, whole, and nothing of a failed attempt."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    seen: list[Counter[int]] = []
    disk.hook = lambda disk, number, kind, path: seen.append(visible(disk))
    for batch in range(3):
        land(folder, batch)
    assert all(max(each.values(), default=1) == 1 for each in seen)
    assert {len(each) for each in seen} == {0, 15, 20, 35, 40, 52, 56}


def test_what_others_put_into_a_partition_stays() -> None:
    """A file that appears while folders are exchanged is moved along, and one of another kind is left alone."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    for batch in range(2):
        land(folder, batch)
    disk.create(f"{HOT}/_notes.txt").write([b"ours"])

    def stray(disk: SimulatedLandingDisk, number: int, kind: str, path: str) -> None:
        if kind == "copy" or (kind == "link" and "merged" in path):
            disk.hook = None
            disk.create(f"{HOT}/late.txt").write([b"late"])

    disk.hook = stray  # type: ignore[assignment]
    compact(folder, thorough=True)
    names = [name for name in disk.list(HOT) if not name.startswith("part-")]
    assert names == ["_notes.txt", "late.txt"]
    assert len(disk.list(HOT)) == 3


def test_a_partition_with_folders_in_it_is_compacted_too() -> None:
    """Folders cannot be linked, so such a partition is changed file by file."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    for batch in range(2):
        land(folder, batch)
    disk.make_folder(f"{HOT}/mine")
    compact(folder, thorough=True)
    assert len(disk.list(HOT)) == 2
    folder.close()
    check(disk)


@pytest.mark.parametrize("kind", ["rename", "write", "sync", "sync_folder", "create", "make_folder", "remove"])
def test_an_error_of_the_disk_leaves_nothing_in_doubt(kind: str) -> None:
    """After any failed step, recovering tells what is true, and the landing goes on from there."""
    for after in range(12):
        disk = SimulatedLandingDisk()
        folder = opened(disk)
        land(folder, 0)
        disk.fail(kind, after=after)
        for _ in range(4):
            try:
                land(folder, folder.state.next // 20)
                compact(folder, thorough=True)
            except (BsfgError, OSError):
                folder.recover()
        disk.repair()
        folder.close()
        check(disk)


def test_a_full_disk_is_told_as_such() -> None:
    """No space is an error that may pass, and a broken disk one that does not."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    land(folder, 0)
    disk.fail("rename", error=errno.ENOSPC)
    with pytest.raises(DiskFull, match="landing a batch"):
        land(folder, 1)
    folder.recover()
    disk.fail("rename", error=errno.EIO)
    with pytest.raises(StorageFailed):
        land(folder, folder.state.next // 20)
    folder.recover()
    disk.fail("sync_folder", error=errno.EIO)
    with pytest.raises(OutcomeUnknown):
        land(folder, folder.state.next // 20)


def test_one_folder_has_one_writer() -> None:
    """A second writer is told who holds the folder."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    with pytest.raises(FolderLocked) as caught:
        LandingFolder.open(disk)
    assert "land into another folder" in caught.value.hint
    folder.close()
    LandingFolder.open(disk).close()


def test_a_folder_of_somebody_else_is_refused() -> None:
    """A folder with files that landing did not make is not landed in."""
    disk = SimulatedLandingDisk()
    disk.create("facts.csv")
    with pytest.raises(InvalidArgument, match=r"it holds facts\.csv"):
        LandingFolder.open(disk)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", LandingDamaged),
        (b"[]", LandingDamaged),
        (b'{"format": 1}', LandingDamaged),
        (b'{"format": 1, "pending": null, "origin": {}, "start": 0}', LandingDamaged),
        (b'{"format": 3}', FormatUnsupported),
    ],
)
def test_a_state_that_is_none_is_refused(content: bytes, error: type[BsfgError]) -> None:
    """A damaged or newer state stops the landing instead of starting it over."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    folder.close()
    disk.remove(STATE)
    disk.create(STATE).write([content])
    with pytest.raises(error):
        LandingFolder.open(disk)


def test_a_committed_file_that_is_gone_is_reported() -> None:
    """When a file was committed and is nowhere, the landing stops and names it."""
    operation = 0
    while True:
        operation += 1
        disk, _ = crashed(operation, exchanges=True)
        left = disk.after_kill()
        state = left.content().get(STATE, b"")
        if b'"pending": {' in state and any(path.endswith("hot-0.staged") for path in left.content()):
            break
    for path in left.content():
        if path.endswith("hot-0.staged"):
            left.remove(path)
    with pytest.raises(LandingDamaged, match=r"temperature_measured/part-0+1-0+19-00000001.parquet was committed"):
        LandingFolder.open(left)


def test_a_batch_must_be_whole_and_follow() -> None:
    """Too few facts, or a batch from elsewhere, are never committed."""
    disk = SimulatedLandingDisk()
    folder = opened(disk)
    file = stage(folder, HOT, list(range(10)), "a")
    with pytest.raises(FrameInvalid, match="10 facts and 1 missing ones were staged"):
        folder.commit(Batch(0, 12, [file], [], 1))
    with pytest.raises(FrameInvalid, match="a batch from offset 5 on"):
        folder.commit(Batch(5, 15, [file]))
    assert folder.state.next == 0
    folder.commit(Batch(0, 10, [file]))
    assert visible(disk) == Counter(range(10))
    folder.commit(Batch(10, 12, [], [{"first": 10, "last": 11}], 2))
    assert gaps(disk) == [(10, 11)]
