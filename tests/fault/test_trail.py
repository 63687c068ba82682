"""The audit trail keeps what it acknowledged through power loss and failed syncs, and whoever changes it is found."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown
from bsfg.stores.log.backup import copy_folder
from bsfg.stores.log.files import DiskFiles, Files
from bsfg.stores.log.journal import Record, encode
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.trailcheck import TrailReport, check_trail
from bsfg.stores.log.trailfile import (
    HEAD,
    Keeping,
    TrailWriter,
    file_name,
    file_numbers,
    newest_first,
    oldest_first,
    tell,
    told,
    walk,
)
from bsfg.testing.disk import PowerLoss, SimulatedDisk
from bsfg.trail import TrailEvent, TrailQuery, TrailRecord, record_from

ALL = TrailQuery()
SMALL = Keeping(retention_seconds=10**9, max_bytes=1 << 30, file_bytes=1_500)


def event(at: int, action: str = "gate_held", identity: str = "plant-a-operator") -> TrailEvent:
    """Make an event that can be told from others."""
    return TrailEvent(action, identity, "127.0.0.1:1", f"link {at}", reason="works", at_unix_ms=1_000 + at)


def opened(files: Files, keeping: Keeping = SMALL) -> TrailWriter:
    """Open a trail for writing."""
    writer = TrailWriter(files, keeping)
    writer.open()
    return writer


def written(files: Files, count: int, keeping: Keeping = SMALL) -> None:
    """Write some events one by one."""
    writer = opened(files, keeping)
    for at in range(count):
        writer.append([event(at)])
    writer.close()


def abouts(files: Files) -> list[str]:
    """Give what the records are about, leaving out those of the trail itself."""
    return [each.event.about for each in oldest_first(files, ALL) if each.event.about.startswith("link ")]


def codes(report: TrailReport) -> list[tuple[str, int | None, int | None]]:
    """Give the problems by code and numbers."""
    return [(each.code, each.first, each.last) for each in report.problems]


def test_records_are_chained_over_files(tmp_path: Path) -> None:
    """Records go over several files, each chained to the one before, and a check finds everything in its place."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    assert len(file_numbers(files)) > 3
    assert abouts(files) == [f"link {at}" for at in range(40)]
    report = check_trail(files)
    assert (report.records, report.first, report.last, report.problems, report.notes) == (41, 1, 41, [], [])
    records = list(oldest_first(files, ALL))
    assert [each.before for each in records[1:]] == [each.digest for each in records[:-1]]
    assert report.head == records[-1].digest
    assert [each.number for each in newest_first(files, ALL)] == list(range(41, 0, -1))
    assert [each.number for each in oldest_first(files, ALL, after=39)] == [40, 41]


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    """Folder and files are closed for others, whatever the rest of the data folder is."""
    files = DiskFiles(tmp_path)
    written(files, 2)
    tell(files, event(3, "backup_made", "user:ann"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "audit").rglob("*")}
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700
    assert {mode for name, mode in modes.items() if name != "told"} == {0o600}
    assert modes["told"] == 0o700


def rewrite(files: DiskFiles, number: int, change: Callable[[list[Record]], list[Record]]) -> None:
    """Change the records of a file as somebody would who knows its format: every checksum is right."""
    path = files.root / file_name(number)
    records = [Record(found.head) for found in walk(path.read_bytes()) if found.head is not None]
    path.write_bytes(b"".join(map(encode, change(records))))


def altered(records: list[Record]) -> list[Record]:
    """Let another have done it."""
    return [*records[:2], Record({**records[2].head, "identity": "somebody-else"}), *records[3:]]


def without(records: list[Record]) -> list[Record]:
    """Take a record out."""
    return [*records[:2], *records[3:]]


def swapped(records: list[Record]) -> list[Record]:
    """Let two records change places."""
    return [*records[:1], records[2], records[1], *records[3:]]


def doubled(records: list[Record]) -> list[Record]:
    """Put a record there twice."""
    return [*records[:2], records[1], *records[2:]]


def added_to(records: list[Record]) -> list[Record]:
    """Add something that readers do not look at."""
    return [*records[:2], Record({**records[2].head, "more": 1}), *records[3:]]


@pytest.mark.parametrize(
    ("change", "code", "at"),
    [
        (altered, "trail_altered", 2),
        (without, "trail_missing", 2),
        (swapped, "trail_reordered", 1),
        (doubled, "trail_reordered", 1),
        (added_to, "trail_altered", 2),
    ],
)
def test_what_somebody_changes_is_found_and_named(
    tmp_path: Path, change: Callable[[list[Record]], list[Record]], code: str, at: int
) -> None:
    """Altered, removed, moved and doubled records are found although every checksum is right, and named by number."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    first = file_numbers(files)[1]
    rewrite(files, first, change)
    found = codes(check_trail(files))
    assert [each[0] for each in found] == [code]
    assert found[0][1] == first + at


def test_removed_files_are_found(tmp_path: Path) -> None:
    """A file that is gone from the beginning, the middle or the end leaves a hole that is named."""
    for which in (0, 2, -1):
        files = DiskFiles(tmp_path / str(which))
        written(files, 40)
        numbers = [*file_numbers(files), 42]
        (files.root / file_name(numbers[which if which >= 0 else -2])).unlink()
        at = which if which >= 0 else len(numbers) - 2
        assert codes(check_trail(files)) == [("trail_missing", numbers[at], numbers[at + 1] - 1)]


def test_a_cut_end_is_found_and_stays_so(tmp_path: Path) -> None:
    """Records that are cut off at a boundary are missed, also after the node has gone on behind them."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    last = file_numbers(files)[-1]
    rewrite(files, last, lambda records: records[:-1])
    assert codes(check_trail(files)) == [("trail_missing", 41, 41)]
    writer = opened(files)
    assert writer.problems == ["the records 41 to 41 are missing at its end"]
    writer.append([event(50)])
    assert codes(check_trail(files)) == [("trail_missing", 41, 41)]


def test_an_altered_last_record_is_found(tmp_path: Path) -> None:
    """Nothing follows the last record, but its digest stands in the head."""
    files = DiskFiles(tmp_path)
    written(files, 3)
    rewrite(files, 1, lambda records: [*records[:-1], Record({**records[-1].head, "reason": "no reason"})])
    assert codes(check_trail(files)) == [("trail_altered", 4, 4)]
    (tmp_path / HEAD).unlink()
    assert codes(check_trail(files)) == [("trail_missing", None, None)]


async def data_folder(path: Path) -> None:
    """Make a data folder."""
    await (await LogStorage.open(path)).close()


def test_a_trail_that_is_gone_is_missed(tmp_path: Path) -> None:
    """The mark of the folder remembers that there was a trail."""
    asyncio.run(data_folder(tmp_path))
    written(DiskFiles(tmp_path), 3)
    for path in sorted((tmp_path / "audit").iterdir()):
        path.unlink()
    (tmp_path / "audit").rmdir()
    assert codes(check_trail(DiskFiles(tmp_path))) == [("trail_missing", None, None)]
    assert opened(DiskFiles(tmp_path)).problems == ["the whole trail is gone"]


def test_flipped_bits_are_found_wherever_they_are(tmp_path: Path) -> None:
    """Whatever single byte of a trail is changed, the check says so; and the trail goes on without touching it."""
    files = DiskFiles(tmp_path)
    written(files, 24)
    random = Random(1)
    paths = [files.root / file_name(number) for number in file_numbers(files)]
    for _ in range(300):
        path = random.choice(paths)
        whole = path.read_bytes()
        at = random.randrange(len(whole))
        changed = bytearray(whole)
        changed[at] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        report = check_trail(files)
        assert report.problems, (path.name, at)
        path.write_bytes(whole)
    damaged = bytearray(paths[1].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    paths[1].write_bytes(damaged)
    opened(files).append([event(99)])
    assert paths[1].read_bytes() == damaged
    assert abouts(files)[-1] == "link 99"


def test_a_damaged_last_file_is_left_as_it_is(tmp_path: Path) -> None:
    """What was changed in the middle of the last file stays there for whoever looks; a new file goes on behind it."""
    files = DiskFiles(tmp_path)
    written(files, 5, Keeping())
    path = files.root / file_name(1)
    damaged = bytearray(path.read_bytes())
    damaged[1_000] ^= 1
    path.write_bytes(damaged)
    writer = opened(files, Keeping())
    assert any("damaged bytes" in text for text in writer.problems)
    writer.append([event(9)])
    assert path.read_bytes() == damaged
    assert file_numbers(files) == [1, 7]
    assert [each.code for each in check_trail(files).problems] == ["trail_altered"]


def test_old_files_leave_and_are_accounted_for(tmp_path: Path) -> None:
    """Files beyond the time or the size leave; the trail says up to where, and a check knows it from removal."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    before = file_numbers(files)
    writer = opened(files, Keeping(retention_seconds=1, max_bytes=1 << 30, file_bytes=1_500))
    assert writer.trim(None) == 0
    assert writer.trim(2_000 + 20) > 0
    left = file_numbers(files)
    assert left[0] > before[0]
    assert next(newest_first(files, ALL)).event.action == "trail_trimmed"
    report = check_trail(files)
    assert (report.first, report.problems) == (left[0], [])
    writer.close()
    smaller = opened(files, Keeping(retention_seconds=10**9, max_bytes=4_000, file_bytes=1_500))
    assert smaller.trim(None) > 0
    assert sum((files.root / file_name(number)).stat().st_size for number in file_numbers(files)) <= 4_000 + 500
    assert check_trail(files).problems == []
    (files.root / file_name(file_numbers(files)[0])).unlink()
    assert [each.code for each in check_trail(files).problems] == ["trail_missing"]


def test_a_quiet_trail_ages_too(tmp_path: Path) -> None:
    """A trail of few records begins a new file in time, so that old records leave although the first file is small."""
    files = DiskFiles(tmp_path)
    writer = opened(files, Keeping(retention_seconds=80, file_bytes=1 << 20))
    for day in range(40):
        writer.append([TrailEvent("signed_in", "x", about=f"link {day}", at_unix_ms=10**6 + 10_000 * day)])
        writer.trim(10**6 + 10_000 * day)
    kept = [int(text.split()[1]) for text in abouts(files)]
    assert kept[-1] == 39
    assert 30 >= kept[0] >= 25
    assert check_trail(files).problems == []


@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_survives_a_power_loss(seed: int) -> None:
    """At whatever operation the power goes, every acknowledged record is there, in order, and the chain is sound."""
    points = 0
    for crash in range(1, 400):
        disk, acknowledged = SimulatedDisk(seed), []
        disk.make_folder("")
        disk.crash_at(disk.operations + crash)
        keeping = Keeping(retention_seconds=0.02, max_bytes=1 << 30, file_bytes=900)
        try:
            for start in range(2):
                writer = opened(disk, keeping)
                for at in range(8):
                    number = 8 * start + at
                    writer.append([event(number), event(1_000 + number)])
                    acknowledged.append(f"link {number}")
                    if at % 3 == 2:
                        writer.trim(1_000 + number)
                writer.close()
            break
        except PowerLoss:
            points += 1
        found = disk.crash(Random(crash))
        report = check_trail(found)
        assert report.problems == [], (seed, crash, report.problems)
        writer = opened(found, keeping)
        writer.append([event(77)])
        assert writer.problems == [], (seed, crash, writer.problems)
        after = check_trail(found)
        assert after.problems == [], (seed, crash, after.problems)
        names = [about for about in abouts(found) if int(about.split()[1]) < 1_000]
        kept = [about for about in names if about != "link 77"]
        oldest = int(kept[0].split()[1]) if kept else 0
        wanted = [about for about in acknowledged if int(about.split()[1]) >= oldest]
        assert kept[: len(wanted)] == wanted, (seed, crash)
    assert 100 < points < 399


@pytest.mark.parametrize("call", ["write", "sync", "sync_folder", "create", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_repeated_and_never_doubled(call: str, error: int) -> None:
    """After a failure the same events are given again: they are there once, before and after a power loss."""
    for failing in range(1, 12):
        disk = SimulatedDisk(failing)
        disk.make_folder("")
        writer = opened(disk, Keeping(file_bytes=700))
        for at in range(6):
            if at == failing % 6:
                disk.fail(call, error=error)
            for _ in range(5):
                try:
                    writer.append([event(at), event(100 + at)])
                    break
                except BsfgError:
                    continue
            else:
                raise AssertionError("it never came back")
        wanted = [f"link {number}" for at in range(6) for number in (at, 100 + at)]
        assert abouts(disk) == wanted
        assert check_trail(disk).problems == []
        found = disk.crash(Random(failing))
        assert abouts(found) == wanted
        assert check_trail(found).problems == []


def test_a_full_disk_refuses_and_goes_on(tmp_path: Path) -> None:
    """A full disk is an error that changes nothing; when there is room again the trail goes on where it was."""
    disk = SimulatedDisk()
    disk.make_folder("")
    writer = opened(disk)
    writer.append([event(0)])
    disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        writer.append([event(1)])
    writer.append([event(2)])
    assert abouts(disk) == ["link 0", "link 2"]
    disk.fail("sync", error=errno.EIO)
    with pytest.raises(OutcomeUnknown):
        writer.append([event(3)])
    writer.append([event(3)])
    assert abouts(disk) == ["link 0", "link 2", "link 3"]
    assert check_trail(disk).problems == []


def test_what_commands_tell_is_taken_in_once(tmp_path: Path) -> None:
    """What was left beside a trail becomes part of it, once, also when the taking is interrupted before its end."""
    files = DiskFiles(tmp_path)
    writer = opened(files)
    assert tell(files, event(5, "backup_made", "user:ann"))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "audit/told").iterdir()}
    (tmp_path / "audit/told/rubbish.json").write_bytes(b"{")
    assert writer.take_in() == 1
    assert told(files) == []
    writer.close()
    for name, data in kept.items():
        (tmp_path / "audit/told" / name).write_bytes(data)
    again = opened(files)
    assert again.take_in() == 0
    actions = ["trail_begun", "backup_made", "trail_damaged"]
    assert [each.event.action for each in oldest_first(files, ALL)] == actions
    assert told(files) == []


@pytest.mark.parametrize(
    ("action", "identity"),
    [("trail_trimmed", "node"), ("trail_trimmed", "user:eve"), ("gate_released", "user:eve"), ("backup_made", "ann")],
)
def test_nobody_speaks_for_the_node_or_for_others(tmp_path: Path, action: str, identity: str) -> None:
    """What lies beside a trail is the word of a command: whoever removes files cannot have the trail account for it."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    first, second = file_numbers(files)[:2]
    before = next(record.before for record in oldest_first(files, ALL) if record.number == second)
    details = {"records_before": second, "digest": before, "files": 1, "because": "age"}
    (files.root / file_name(first)).unlink()
    assert tell(files, TrailEvent(action, identity, details=details, at_unix_ms=2_000))
    writer = opened(files)
    assert writer.take_in() == 0
    assert codes(check_trail(files)) == [("trail_missing", first, second - 1)]
    last = next(newest_first(files, ALL)).event
    assert (last.action, last.identity) == ("trail_damaged", "node") and "audit/told" in last.reason
    assert told(files) == []


@pytest.mark.parametrize("details", [{"records_before": "x"}, {"records_before": None, "digest": 5}, {"digest": []}])
def test_a_trimming_that_says_nonsense_accounts_for_nothing(tmp_path: Path, details: dict[str, Any]) -> None:
    """Whatever stands in a record, a check goes on, and what is missing is missing."""
    files = DiskFiles(tmp_path)
    written(files, 40)
    writer = opened(files)
    writer.append([TrailEvent("trail_trimmed", "node", details=details, at_unix_ms=3_000)])
    first, second = file_numbers(files)[:2]
    (files.root / file_name(first)).unlink()
    assert codes(check_trail(files)) == [("trail_missing", first, second - 1)]


def test_a_read_only_folder_is_not_told(tmp_path: Path) -> None:
    """Where nothing can be written a command goes on without having told."""
    disk = SimulatedDisk()
    disk.make_folder("")
    disk.fail("make_folder", error=errno.EROFS)
    assert not tell(disk, event(1))


def test_a_copy_has_the_trail_and_is_sound(tmp_path: Path) -> None:
    """A copy of the data folder holds the trail with its head, closed for others, and checks as sound."""
    source, target = tmp_path / "data", tmp_path / "copy"
    asyncio.run(data_folder(source))
    written(DiskFiles(source), 30)
    tell(DiskFiles(source), event(3, "backup_made", "user:ann"))
    with (source / file_name(file_numbers(DiskFiles(source))[-1])).open("ab") as file:
        file.write(b"JRN1 the beginning of a record that is being written")
    target.mkdir()
    copy_folder(DiskFiles(source), DiskFiles(target))
    assert abouts(DiskFiles(target)) == abouts(DiskFiles(source))
    report = check_trail(DiskFiles(target))
    assert (report.problems, report.notes) == ([], [])
    assert len(told(DiskFiles(target))) == 1
    assert {path.stat().st_mode & 0o077 for path in (target / "audit").rglob("*")} == {0}


def test_records_that_are_none_are_reported(tmp_path: Path) -> None:
    """Sound checksums around something else are no record, and no reader fails on them."""
    files = DiskFiles(tmp_path)
    written(files, 3)
    path = tmp_path / file_name(1)
    strange: list[dict[str, Any]] = [
        {"n": "x"},
        {"together": [1], "sizes": [0]},
        {"together": [{}], "sizes": []},
        {"n": 2, "at": 1},
    ]
    data = path.read_bytes()
    for head in strange:
        path.write_bytes(data + encode(Record(head)))
        assert codes(check_trail(files))
        assert len(list(newest_first(files, ALL))) == 4
        assert record_from(head) is None


def test_a_record_is_the_same_after_reading() -> None:
    """What is read back has the digest it was written with, whatever characters are in it."""
    words = "\x1b[31m ünï\u202e\x00"
    record = TrailRecord(7, "ab" * 32, TrailEvent("signed_in", words, details={"count": 3}, at_unix_ms=5))
    again = record_from(orjson.loads(orjson.dumps(record.head())))
    assert again == record
    assert again is not None
    assert again.digest == record.digest
