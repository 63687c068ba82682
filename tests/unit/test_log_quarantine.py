"""Quarantine of the embedded log: what it costs in memory, on disk and in work, and what it survives."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import InvalidArgument
from bsfg.fact import Key, Origin
from bsfg.ports import UNREADABLE, Quarantined
from bsfg.stores.log import quarantine
from bsfg.stores.log.files import Bytes, DiskFile, DiskFiles
from bsfg.stores.log.journal import Record, encode
from bsfg.stores.log.notes import Notes
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch

FOLDER = "streams/operational/forward"
PLENTY = 1 << 40


class CountedFiles(DiskFiles):
    """Files that count what is read of them and how many bytes are written."""

    reads = written = 0

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Count, then read."""
        self.reads += 1
        return super().read_at(path, start, count)

    def open_append(self, path: str) -> DiskFile:
        """Open a file whose writes are counted."""
        counted, file = self, super().open_append(path)
        write = file.write

        def write_counted(parts: Sequence[Bytes]) -> None:
            counted.written += sum(map(len, parts))
            write(parts)

        file.write = write_counted  # type: ignore[method-assign]
        return file


def opened(path: Path) -> tuple[Notes, CountedFiles]:
    """Open the notes of one log."""
    files = CountedFiles(path)
    for at in range(1, 4):
        files.make_folder("/".join(FOLDER.split("/")[:at]))
    notes = Notes(files, FOLDER)
    notes.open()
    return notes, files


def items(facts: FactBatch, reason: str = "conflict") -> list[Quarantined]:
    """Give facts as they are set aside."""
    keys = map(Key, facts.values("from_zone"), facts.values("message_id"))
    return [
        Quarantined(0, 1_000, reason, key, 7, facts.slice(row, 1), "why", Origin("plant", row, 900))
        for row, key in enumerate(keys)
    ]


def files_in(path: Path) -> list[Path]:
    """List the files of quarantine."""
    return sorted((path / FOLDER / "quarantine").glob("*.journal"))


def test_a_fact_costs_a_few_hundred_bytes_of_memory(tmp_path: Path) -> None:
    """What stays in memory of a refused fact is where it is, not what it says."""
    notes, _ = opened(tmp_path)
    chosen = items(batch(4_000))
    tracemalloc.start()
    notes.add_quarantined(chosen, PLENTY)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    notes.close()
    assert grown < 600 * len(chosen)


def test_the_work_for_a_fact_does_not_grow(tmp_path: Path) -> None:
    """Whether ten or thousands are there: adding reads nothing, and writes the fact alone."""
    notes, files = opened(tmp_path)
    notes.add_quarantined(items(batch(10)), PLENTY)
    costs = []
    for first, more in ((10, 3_000), (3_011, 0)):
        before = files.reads, files.written
        notes.add_quarantined(items(batch(1, first=first)), PLENTY)
        costs.append((files.reads - before[0], files.written - before[1]))
        if more:
            notes.add_quarantined(items(batch(more, first=first + 1)), PLENTY)
    notes.close()
    assert costs[0][0] == costs[1][0] == 0
    assert abs(costs[0][1] - costs[1][1]) < 100


def test_a_repeat_reads_one_fact(tmp_path: Path) -> None:
    """A fact that is there already is recognised by reading it alone, and writes nothing."""
    notes, files = opened(tmp_path)
    notes.add_quarantined(items(batch(500)), PLENTY)
    before = files.reads, files.written
    notes.add_quarantined(items(batch(1, first=250)), PLENTY)
    notes.close()
    assert (files.reads - before[0], files.written - before[1]) == (1, 0)


def test_files_go_with_their_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is mostly released is written anew, an empty one goes; the disk holds little more than the rest."""
    monkeypatch.setattr(quarantine, "SEGMENT_BYTES", 100_000)
    monkeypatch.setattr(quarantine, "_REWRITE_ABOVE_BYTES", 10_000)
    notes, _ = opened(tmp_path)
    notes.add_quarantined(items(batch(1_000)), PLENTY)
    full_bytes, used_bytes = sum(path.stat().st_size for path in files_in(tmp_path)), notes.quarantine.used_bytes
    assert len(files_in(tmp_path)) > 5
    assert used_bytes <= full_bytes < 1.1 * used_bytes
    ids = [item.id for item in notes.quarantine.all()]
    kept = set(Random(1).sample(ids, 50))
    for id in ids:
        if id not in kept:
            notes.release(id, "dropped by an operator", 2_000)
    assert sum(path.stat().st_size for path in files_in(tmp_path)) < full_bytes // 3
    notes.close()
    notes, _ = opened(tmp_path)
    assert {item.id for item in notes.quarantine.all()} == kept
    assert [item.facts.to_messages()[0].envelope.message_id for item in notes.quarantine.all()] == [
        f"0-{id - 1:06}" for id in sorted(kept)
    ]
    for id in kept:
        notes.release(id, "dropped by an operator", 2_000)
    with pytest.raises(InvalidArgument):
        notes.release(ids[0], "again", 3_000)
    notes.add_quarantined(items(batch(1)), PLENTY)
    assert [item.id for item in notes.quarantine.all()] == [1_001]
    notes.close()
    assert len(files_in(tmp_path)) <= 2
    assert (tmp_path / FOLDER / "notes.journal").stat().st_size < 300_000


def test_what_earlier_versions_kept_with_the_notes_is_there(tmp_path: Path) -> None:
    """Facts that stand in the notes themselves are listed, recognised, released, and never come back."""
    (old, other) = items(batch(2))
    head = {
        "kind": "quarantined",
        "at_unix_ms": 1_000,
        "reason": "conflict",
        "from_zone": "plant",
        "existing_offset": 7,
        "detail": "why",
        "origin": ["plant", 0, 900],
    }
    records = [
        Record({**head, "id": id, "message_id": item.key.message_id}, item.facts.record_batch.serialize().to_pybytes())
        for id, item in ((3, old), (4, other))
    ]
    records.append(Record({"kind": "released", "id": 5, "reason": "seen", "at_unix_ms": 1_500}))
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    (folder / "notes.journal").write_bytes(b"".join(map(encode, records)))
    notes, _ = opened(tmp_path)
    assert [(item.id, item.key, item.origin) for item in notes.quarantine.all()] == [
        (3, old.key, Origin("plant", 0, 900)),
        (4, other.key, Origin("plant", 0, 900)),
    ]
    notes.add_quarantined([old, *items(batch(1, first=9))], PLENTY)
    notes.release(3, "seen", 2_000)
    for _ in range(2):
        assert [item.id for item in notes.quarantine.all()] == [4, 6]
        notes.close()
        notes, _ = opened(tmp_path)
    notes.close()


def test_a_damaged_file_costs_what_was_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is reported with file and place, the facts of other files stay, and new ones are taken."""
    monkeypatch.setattr(quarantine, "SEGMENT_BYTES", 50_000)
    notes, _ = opened(tmp_path)
    notes.add_quarantined(items(batch(200)), PLENTY)
    notes.close()
    first, *others = files_in(tmp_path)
    assert others
    data = bytearray(first.read_bytes())
    data[1_000] ^= 0xFF
    first.write_bytes(data)
    notes, _ = opened(tmp_path)
    assert any(first.name in problem for problem in notes.problems)
    left = len(list(notes.quarantine.all()))
    assert 0 < left < 200
    notes.add_quarantined(items(batch(1, first=500)), PLENTY)
    assert len(list(notes.quarantine.all())) == left + 1
    notes.close()


def test_readers_see_the_same_without_writing(tmp_path: Path) -> None:
    """Whoever only reads the folder sees all that is in quarantine."""
    notes, files = opened(tmp_path)
    notes.add_quarantined(items(batch(20)), PLENTY)
    notes.release(4, "seen", 2_000)
    reading = Notes(files, FOLDER)
    assert reading.read() == []
    assert [item.id for item in reading.quarantine.all()] == [id for id in range(1, 21) if id != 4]
    notes.close()


def spoilt(monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedDisk, str]:
    """Give a disk with forty refused facts in several files, the first of them with a sector that cannot be read."""
    monkeypatch.setattr(quarantine, "SEGMENT_BYTES", 16_000)
    disk = SimulatedDisk(1)
    disk.make_folder(FOLDER)
    notes = Notes(disk, FOLDER)
    notes.open()
    for first in range(0, 40, 10):
        notes.add_quarantined(items(batch(10, first=first)), PLENTY)
    notes.close()
    first_file = f"{FOLDER}/quarantine/00000001.journal"
    assert len(disk.list(f"{FOLDER}/quarantine")) > 1
    disk.spoil(first_file, disk.size(first_file) - 100, 10)
    return disk, first_file


def test_a_bad_sector_costs_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found, listed page by page and released, and the place is named."""
    disk, first_file = spoilt(monkeypatch)
    disk.create(f"{FOLDER}/quarantine/copy of 00000001.journal")
    notes = Notes(disk, FOLDER)
    notes.open()
    assert any(problem.startswith(f"{first_file}: bytes ") for problem in notes.problems)
    found = [item.id for item in notes.quarantine.all()]
    assert 20 <= len(found) < 40 and found[-1] == 40
    assert [item.id for item in notes.quarantine.page(None, len(found))] == found
    for id in found:
        notes.release(id, "seen", 1_000)
    assert not list(notes.quarantine.all())
    notes.close()


def test_a_sector_that_goes_bad_later_hides_no_other_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is listed as that among the others, and a file is not written anew without it."""
    monkeypatch.setattr(quarantine, "_REWRITE_ABOVE_BYTES", 100)
    disk, first_file = spoilt(monkeypatch)
    sound = disk.killed()
    notes = Notes(sound, FOLDER)
    notes.open()
    sound.spoil(first_file, sound.size(first_file) - 100, 10)
    found = notes.quarantine.page(None, 40)
    assert [item.id for item in found] == list(range(1, 41))
    assert [item.id for item in notes.quarantine.page(None, 40, newest_first=True)] == list(range(40, 0, -1))
    assert sum(item.reason == UNREADABLE for item in found) == 1
    for item in found:
        if item.reason != UNREADABLE:
            notes.release(item.id, "seen", 1_000)
    assert len(notes.quarantine) == 1
    assert sound.exists(first_file)
    notes.close()
