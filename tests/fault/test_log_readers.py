"""Readers in other processes and the writer: whatever the writer does between two looks, readers see one history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bsfg.ports import Confirmation, ConsumerSpec
from bsfg.retention import GapReason, Policy
from bsfg.stores.log.files import Bytes, DiskFiles
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.index import Filter, Run, decode_run, encode_run
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import Report, verify
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import batch

STREAM = "operational"
PER_BATCH = 50
SMALL = LogOptions(segment_bytes=65_536)
FORGETFUL = Policy(retention_seconds=150, max_age_seconds=150, key_horizon_seconds=150)
"""With a step of the writer every minute, keys are forgotten soon after their entries have left."""


class Interrupted(DiskFiles):
    """A folder in whose every reading operation somebody else may do something first."""

    def __init__(self, root: Path, between: Callable[[int], None]) -> None:
        super().__init__(root)
        self._between = between
        self.operations = 0

    def _step(self) -> None:
        self._between(self.operations)
        self.operations += 1

    def read(self, path: str) -> Bytes:
        """Read after a step of the writer."""
        self._step()
        return super().read(path)

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Read after a step of the writer."""
        self._step()
        return super().read_at(path, start, count)

    def size(self, path: str) -> int:
        """Look after a step of the writer."""
        self._step()
        return super().size(path)

    def list(self, path: str) -> list[str]:
        """Look after a step of the writer."""
        self._step()
        return super().list(path)


class Busy:
    """A writer that appends, rolls, confirms, truncates and forgets old keys, one step at a time."""

    def __init__(self, storage: LogStorage, store: Any, clock: FakeClock, loop: asyncio.AbstractEventLoop) -> None:
        self._storage, self._store, self._clock, self._loop = storage, store, clock, loop

    async def step(self) -> None:
        """Append a segment's worth, confirm it, truncate all but the last two segments, and forget their keys."""
        for _ in range(5):
            await self._store.append(batch(PER_BATCH, first=self._store.end))
        await self._storage.cursors.commit("erp", Confirmation(through=self._store.end - 1))
        await self._store.truncate_before(max(0, self._store.end - 8 * PER_BATCH))
        self._clock.advance(60)
        await self._store.enforce_retention(link_open=True)

    def step_from_outside(self) -> None:
        """Make a step from a reader's thread."""
        asyncio.run_coroutine_threadsafe(self.step(), self._loop).result()


async def at_every_moment(folder: Path, read: Callable[[DiskFiles], None]) -> int:
    """Let the writer step in before each single operation of a reader, one run for each; give how many there were."""
    clock = FakeClock()
    storage = await LogStorage.open(folder, options=SMALL, clock=clock)
    store = await storage.store(STREAM, FORGETFUL)
    await storage.cursors.create(ConsumerSpec("erp", STREAM))
    busy = Busy(storage, store, clock, asyncio.get_running_loop())
    for _ in range(3):
        await busy.step()
    calm = Interrupted(folder, lambda _: None)
    await asyncio.to_thread(read, calm)
    for moment in range(calm.operations):

        def between(operation: int, moment: int = moment) -> None:
            if operation == moment:
                busy.step_from_outside()

        await asyncio.to_thread(read, Interrupted(folder, between))
    await storage.close()
    return calm.operations


def check_frames(files: DiskFiles) -> None:
    """Read everything: no hole, no overlap, nothing lost, and every entry in its place."""
    [log] = open_folder(files)
    at = None
    for frame in log.frames():
        assert at is None or frame.first == at
        at = frame.last + 1
        if frame.gap is not None:
            assert frame.gap.reason == GapReason.TRUNCATED, frame.gap
            continue
        assert frame.entries is not None
        assert frame.entries.offsets.tolist() == list(range(frame.first, frame.last + 1))
        expected = batch(frame.last - frame.first + 1, first=frame.first)
        assert frame.entries.values("message_id") == expected.values("message_id")
    assert at is not None


def check_report(report: Report) -> None:
    """Expect nothing that would frighten an operator."""
    assert [(item.code, item.detail) for item in report.problems] == []
    assert [item.code for item in report.notes if item.code != "torn_tail"] == []


def test_a_reader_sees_one_history_whatever_the_writer_does(tmp_path: Path) -> None:
    """Appending, rolling and truncating between any two operations of a reader neither hides nor invents a loss."""
    assert asyncio.run(at_every_moment(tmp_path, check_frames)) > 10


def test_verify_finds_nothing_wrong_beside_a_busy_writer(tmp_path: Path) -> None:
    """Verifying while the writer appends, rolls, truncates and forgets keys reports no damage and does not fail."""
    assert asyncio.run(at_every_moment(tmp_path, lambda files: check_report(verify(files)))) > 10


def test_a_watermark_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that meets half a watermark looks again, and does not show what is not durable yet."""

    async def check() -> None:
        storage = await LogStorage.open(tmp_path, options=SMALL)
        store = await storage.store(STREAM)
        await store.append(batch(PER_BATCH))
        path = f"streams/{STREAM}/store/durable"
        looks: list[bytes] = []

        class Torn(DiskFiles):
            def read_at(self, path_: str, start: int, count: int) -> bytes:
                data = super().read_at(path_, start, count)
                if path_ != path:
                    return data
                looks.append(data)
                return data[:-1] + bytes([data[-1] ^ 1]) if len(looks) == 1 else data

        writer = store._writer
        file = writer._file
        assert file is not None
        seen: list[int] = []
        sync = file.sync

        def watched() -> None:
            [log] = open_folder(Torn(tmp_path))
            seen.append(log.view().end)
            sync()

        monkeypatch.setattr(file, "sync", watched)
        await store.append(batch(PER_BATCH, first=PER_BATCH))
        assert seen == [PER_BATCH]
        assert len(looks) == 2
        await storage.close()

    asyncio.run(check())


def closed_folder(folder: Path) -> Path:
    """Write a few frames, close the log, and give its last segment file."""

    async def write() -> None:
        storage = await LogStorage.open(folder, options=SMALL)
        store = await storage.store(STREAM)
        for number in range(8):
            await store.append(batch(PER_BATCH, first=number * PER_BATCH))
        await storage.close()

    asyncio.run(write())
    return sorted((folder / "streams" / STREAM / "store").glob("*.seg"))[-1]


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file; a negative place counts from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "last"), [(-100, 8 * PER_BATCH - 1), (20, None)], ids=["last frame", "header of the last segment"]
)
def test_damage_at_the_very_end_is_a_problem(tmp_path: Path, at: int, last: int | None) -> None:
    """What the writer declared durable and cannot be read any more is damage, also where a torn write could be."""
    flip(closed_folder(tmp_path), at)
    report = verify(tmp_path)
    assert [(item.code, item.last) for item in report.problems] == [("log_damaged", last)]


def test_bytes_behind_the_end_are_a_note(tmp_path: Path) -> None:
    """Half a frame behind the last durable entry is named, and is no damage."""
    last = closed_folder(tmp_path)
    whole = last.read_bytes()
    with last.open("ab") as file:
        file.write(whole[whole.index(b"FRM1") :][:200])
    report = verify(tmp_path)
    assert report.ok
    assert [item.code for item in report.notes] == ["torn_tail"]


@pytest.mark.parametrize("path", ["cursors/cursors.journal", f"streams/{STREAM}/store/notes.journal"])
def test_a_journal_with_a_bad_end_is_named(tmp_path: Path, path: str) -> None:
    """A last record that fails its check may be torn or damaged: verify says so instead of passing over it."""

    async def write() -> None:
        storage = await LogStorage.open(tmp_path, options=SMALL)
        store = await storage.store(STREAM)
        await store.append(batch(PER_BATCH))
        await storage.cursors.create(ConsumerSpec("erp", STREAM))
        await storage.cursors.retire("erp", "gone")
        await storage.close()

    asyncio.run(write())
    flip(tmp_path / path, -3)
    assert [(item.code, item.where) for item in verify(tmp_path).notes] == [("torn_tail", path)]


def test_an_index_that_lacks_a_key_is_a_problem(tmp_path: Path) -> None:
    """A run that is whole but misses a key it claims to cover would let a repeat in, so it is damage."""

    async def write() -> None:
        options = LogOptions(segment_bytes=65_536, index_run_keys=200)
        storage = await LogStorage.open(tmp_path, options=options)
        store = await storage.store(STREAM)
        for first in range(0, 400, PER_BATCH):
            await store.append(batch(PER_BATCH, first=first))
        await storage.close()

    asyncio.run(write())
    assert verify(tmp_path).ok
    [log] = open_folder(tmp_path)
    identity = read_identity(log.files, log.path)
    assert identity is not None
    path = sorted((tmp_path / log.path / "index").iterdir())[0]
    decoded = decode_run(path.read_bytes(), identity.index_owner)
    assert decoded is not None
    run, chain = decoded
    fewer = Run(run.hashes[1:], run.offsets[1:], run.first, run.last, Filter(len(run.hashes) - 1))
    assert fewer.filter is not None
    fewer.filter.add(fewer.hashes)
    path.write_bytes(b"".join(bytes(part) for part in encode_run(fewer, identity.index_owner, chain)))
    assert [item.code for item in verify(tmp_path).problems] == ["index_damaged"]
