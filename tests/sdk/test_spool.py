"""Spools: what was put in survives crashes and comes out in order; what a crash tore never counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import (
    BufferFull,
    DiskFull,
    FactTooLarge,
    FolderLocked,
    FormatUnsupported,
    NotAFolder,
    OutcomeUnknown,
    StorageClosed,
)
from bsfg.sdk.spool import Spool
from bsfg.stores.log.journal import Record
from bsfg.testing.disk import PowerLoss, SimulatedDisk

SMALL = 200
"""A segment size that makes a few records fill a segment."""


def records(first: int, count: int, size: int = 20) -> list[Record]:
    """Give records that say their number."""
    return [Record({"k": number}, bytes([number % 256]) * size) for number in range(first, first + count)]


def drained(spool: Spool, start: int | None = None) -> list[tuple[int, int]]:
    """Read everything from a number on: pairs of number and content."""
    at, found = spool.done if start is None else start, []
    while batch := spool.read(at, max_bytes=64):
        found += [(record.number, record.head["k"]) for record in batch]
        assert all(record.blob == bytes([record.head["k"] % 256]) * len(record.blob) for record in batch)
        at = batch[-1].number + 1
    return found


def straight(first: int, end: int) -> list[tuple[int, int]]:
    """Give what a spool without losses gives."""
    return [(number, number) for number in range(first, end)]


def open_small(where: Path | SimulatedDisk) -> Spool:
    """Open a spool with tiny segments."""
    return Spool.open(where, "outbox", segment_bytes=SMALL)


def test_records_come_out_in_their_order(tmp_path: Path) -> None:
    """What is put in is read back in order, over segments, before and after it is opened again."""
    spool = open_small(tmp_path)
    assert spool.put(records(0, 3)) == 0
    assert spool.put(records(3, 30)) == 3
    assert spool.put(records(33, 1)) == 33
    assert drained(spool) == straight(0, 34)
    spool.close()
    spool.close()
    again = open_small(tmp_path)
    assert drained(again) == straight(0, 34)
    assert again.put(records(34, 1)) == 34
    assert drained(again) == straight(0, 35)
    again.close()
    with pytest.raises(StorageClosed):
        again.read(0)


def test_what_is_done_does_not_come_again(tmp_path: Path) -> None:
    """Files leave when all in them is done, the position survives, and numbers are never used twice."""
    spool = open_small(tmp_path)
    for number in range(20):
        spool.put(records(number, 1))
    before = spool.used_bytes
    spool.advance(13, {"note": 1})
    assert spool.used_bytes < before
    assert drained(spool) == straight(13, 20)
    spool.advance(20, durably=True)
    spool.close()
    again = open_small(tmp_path)
    assert (again.done, again.end, again.note) == (20, 20, {"note": 1})
    assert drained(again) == []
    assert again.put(records(20, 1)) == 20
    assert drained(again) == straight(20, 21)
    again.close()


def test_a_full_spool_refuses(tmp_path: Path) -> None:
    """Nothing is put in beyond the capacity; when something is done there is room again."""
    spool = Spool.open(tmp_path, "outbox", capacity_bytes=1000, segment_bytes=SMALL)
    count = 0
    with pytest.raises(BufferFull) as full:
        while True:
            spool.put(records(count, 1))
            count += 1
    assert full.value.details["capacity_bytes"] == 1000
    with pytest.raises(FactTooLarge, match="never fit"):
        spool.put(records(0, 1, size=2000))
    assert drained(spool) == straight(0, count)
    spool.advance(count)
    spool.put(records(count, 1))
    assert drained(spool) == straight(count, count + 1)
    spool.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second user of the folder is refused while the first has it; a dead one holds nothing."""
    code = """
import os, sys
from bsfg.sdk.spool import Spool
Spool.open(sys.argv[1], "outbox")
print(flush=True)
os.read(0, 1)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    with pytest.raises(FolderLocked, match=str(first.pid)):
        Spool.open(tmp_path, "outbox")
    first.kill()
    first.communicate()
    Spool.open(tmp_path, "outbox").close()


def test_other_folders_are_not_taken(tmp_path: Path) -> None:
    """A folder with other files, a spool of another kind, and one of a newer version are refused untouched."""
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(NotAFolder, match=r"photo\.jpg"):
        Spool.open(tmp_path, "outbox")
    box = tmp_path / "box"
    Spool.open(box, "outbox").close()
    with pytest.raises(NotAFolder, match="an outbox, not an inbox"):
        Spool.open(box, "inbox")
    (box / "spool.json").write_text('{"kind": "outbox", "format": 99}')
    with pytest.raises(FormatUnsupported):
        Spool.open(box, "outbox")
    (box / "spool.json").write_text("{")
    with pytest.raises(NotAFolder, match="damaged"):
        Spool.open(box, "outbox")


def test_a_torn_end_is_passed_over(tmp_path: Path) -> None:
    """Wherever a crash tore the last write, what was whole before comes out, and the spool goes on."""
    spool = Spool.open(tmp_path / "pattern", "outbox")
    spool.put(records(0, 2))
    spool.close()
    (segment,) = (tmp_path / "pattern").glob("*.spool")
    whole = segment.read_bytes()
    record_bytes = len(whole) // 2
    for size in range(len(whole)):
        folder = tmp_path / str(size)
        Spool.open(folder, "outbox").close()
        (folder / segment.name).write_bytes(whole[:size])
        torn = Spool.open(folder, "outbox")
        kept = size // record_bytes
        assert drained(torn) == straight(0, kept)
        assert bool(torn.problems) == (size % record_bytes != 0)
        assert torn.put(records(kept, 1)) == kept
        assert drained(torn) == straight(0, kept + 1)
        torn.close()


def test_damage_in_the_middle_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged record is named as a problem and in the log; all others come out, and the file is kept."""
    spool = Spool.open(tmp_path, "outbox")
    spool.put(records(0, 5))
    spool.close()
    (segment,) = tmp_path.glob("*.spool")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    again = Spool.open(tmp_path, "outbox")
    assert drained(again) == [(0, 0), (1, 1), (3, 3), (4, 4)]
    assert "damaged" in again.problems[0]
    assert [(each.levelname, str(tmp_path) in each.message) for each in caplog.records] == [("ERROR", True)]
    again.advance(5)
    again.close()
    assert [path.name for path in tmp_path.glob("*.spool*")] == [f"{segment.name}.damaged"]
    assert (tmp_path / f"{segment.name}.damaged").read_bytes() == data
    third = Spool.open(tmp_path, "outbox")
    assert third.put(records(5, 1)) == 5
    assert drained(third) == [(5, 5)]
    third.close()


def test_a_damaged_end_that_was_acknowledged_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever closed the spool had these records: what is missing at its end is not what a crash tore."""
    spool = Spool.open(tmp_path, "outbox")
    spool.put(records(0, 5))
    spool.close()
    (segment,) = tmp_path.glob("*.spool")
    segment.write_bytes(segment.read_bytes()[:-30])
    again = Spool.open(tmp_path, "outbox")
    assert drained(again) == straight(0, 4)
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    assert "the records 4 to 4 are gone" in caplog.records[0].message
    again.close()


def test_a_damaged_position_brings_everything_again(tmp_path: Path) -> None:
    """Without a readable position what is still there comes again: late is better than never."""
    spool = open_small(tmp_path)
    for number in range(20):
        spool.put(records(number, 1))
    spool.advance(12)
    spool.close()
    (tmp_path / "position.json").write_text("not json")
    again = open_small(tmp_path)
    found = drained(again)
    assert found[-1] == (19, 19)
    assert found[0][0] <= 12
    assert found == straight(found[0][0], 20)
    again.close()


def test_a_full_disk_changes_nothing() -> None:
    """When the disk is full nothing of the put is there, and it can be tried again."""
    disk = SimulatedDisk()
    spool = open_small(disk)
    spool.put(records(0, 3))
    disk.fill_up(10)
    with pytest.raises(DiskFull):
        spool.put(records(3, 5, size=200))
    assert drained(spool) == straight(0, 3)
    disk.repair()
    assert spool.put(records(3, 5)) == 3
    assert drained(spool) == straight(0, 8)


def test_a_failed_sync_closes_the_spool() -> None:
    """After a failed sync nobody knows what is on disk: the outcome is unknown, and nothing more is taken."""
    disk = SimulatedDisk()
    spool = open_small(disk)
    spool.put(records(0, 1))
    disk.fail("sync")
    with pytest.raises(OutcomeUnknown):
        spool.put(records(1, 1))
    with pytest.raises(StorageClosed, match="closed itself"):
        spool.put(records(1, 1))
    spool.close()


@pytest.mark.parametrize("seed", range(12))
def test_power_loss_loses_nothing_that_was_acknowledged(seed: int) -> None:
    """The power is cut at every operation of a busy spool: what was acknowledged and not done is there, in order."""
    operations = _busy(SimulatedDisk(seed), [], Random(seed))
    for cut in range(1, operations + 1, 3):
        disk = SimulatedDisk(f"{seed}/{cut}")
        disk.crash_at(cut)
        story: list[int] = [0, 0]
        with pytest.raises(PowerLoss):
            _busy(disk, story, Random(seed))
        found = open_small(disk.crash(Random(cut)))
        acknowledged, done = story
        numbers = [number for number, _ in drained(found)]
        assert found.done <= done
        assert set(range(done, acknowledged)) <= set(numbers)
        assert numbers == sorted(set(numbers))
        assert all(number == content for number, content in drained(found))
        following = found.put(records(found.end, 2))
        assert following >= acknowledged
        assert drained(found)[-2:] == straight(following, following + 2)
        found.close()


def _busy(disk: SimulatedDisk, story: list[int], random: Random) -> int:
    """Put in and take out for a while, noting in ``story`` what was acknowledged and what is done."""
    spool = open_small(disk)
    for _ in range(14):
        count = random.randint(1, 4)
        spool.put(records(spool.end, count))
        story[:1] = [spool.end]
        if random.random() < 0.5:
            done = random.randint(spool.done, spool.end)
            story[1:] = [done]
            spool.advance(done, durably=random.random() < 0.3)
        if random.random() < 0.2:
            spool.close()
            spool = open_small(disk)
    return disk.operations


@given(st.lists(st.tuples(st.sampled_from(["put", "advance", "reopen", "read"]), st.integers(0, 9)), max_size=25))
def test_a_spool_behaves_like_a_list(steps: list[tuple[str, int]]) -> None:
    """Any history of puts, reads, advances and reopenings gives what a list with an index would give."""
    disk = SimulatedDisk()
    spool = open_small(disk)
    end = done = 0
    for step, size in steps:
        if step == "put":
            assert spool.put(records(end, size)) == end
            end += size
        elif step == "advance":
            done = min(end, done + size)
            spool.advance(done)
        elif step == "reopen":
            spool.close()
            spool = open_small(disk)
        else:
            assert drained(spool, done + size) == straight(done + size, end)
        assert (spool.done, spool.end) == (done, end)
        assert drained(spool) == straight(done, end)
