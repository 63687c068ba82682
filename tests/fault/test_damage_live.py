"""Damage that is met while a log is in use is recorded and told, and takes nothing with it that it need not take."""

from __future__ import annotations

import asyncio
import errno
import shutil
import struct
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsfg.errors import StorageFailed, StreamUnavailable
from bsfg.fact import Key
from bsfg.journey.artifacts import References
from bsfg.node.administration import _put_again
from bsfg.ports import UNREADABLE, Buffer, Confirmation, ConsumerSpec, Result
from bsfg.retention import GapReason
from bsfg.stores.log import segments
from bsfg.stores.log.buffer import LogStoreBuffer
from bsfg.stores.log.damage import READS
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.index import HEADER
from bsfg.stores.log.quarantine import copy_quarantine
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, decode_frame_header, decode_segment_header
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch

STREAM = "operational"
STORE = f"streams/{STREAM}/store"
BATCHES, PER_BATCH = 40, 50
END = BATCHES * PER_BATCH
OPTIONS = LogOptions(segment_bytes=65_536, index_run_keys=500, index_memory_bytes=0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one coroutine to its end."""
    return asyncio.run(work)


async def opened(where: SimulatedDisk | Path) -> tuple[LogStorage, LogStoreBuffer]:
    """Open a storage whose index lives on disk alone, with some facts."""
    storage = await LogStorage.open(where, options=OPTIONS)
    store = await storage.store(STREAM)
    for number in range(store.end // PER_BATCH, BATCHES):
        await store.append(batch(PER_BATCH, first=number * PER_BATCH))
    return storage, store


def second_frame(data: bytes) -> tuple[int, int]:
    """Give position and base of the second frame of a segment."""
    first = decode_segment_header(data).size_bytes
    at = first + decode_frame_header(data, first).frame_bytes
    return at, decode_frame_header(data, at).base


def frames_of(data: bytes | bytearray) -> list[int]:
    """Give the positions of all frames of a segment."""
    at, found = decode_segment_header(bytes(data)).size_bytes, []
    while at < len(data):
        found.append(at)
        at += decode_frame_header(data, at).frame_bytes
    return found


def key_of(offset: int) -> Key:
    """Give the key of the fact that was stored at an offset."""
    return Key(str(batch(1).values("from_zone")[0]), f"0-{offset:06d}")


@pytest.mark.parametrize("by", ["replay", "get", "append"])
def test_damage_that_somebody_meets_is_recorded_whoever_it_is(by: str) -> None:
    """A frame that rots under an open log is a gap record and a problem, also when only one fact was asked for."""

    async def work() -> None:
        disk = SimulatedDisk()
        storage, store = await opened(disk)
        path = min(name for name in disk.content() if name.startswith(STORE) and name.endswith(".seg"))
        at, base = second_frame(disk.content()[path])
        disk.spoil(path, at + FRAME_HEADER_BYTES, 100)
        assert not store.problems
        if by == "replay":
            assert [frame.gap.reason async for frame in store.replay(0) if frame.gap] == [GapReason.DAMAGED]
        elif by == "get":
            assert await store.get(key_of(base)) is None
        else:
            # The medium may give the frame again: what came is kept aside, and nothing is stored twice.
            for _ in range(2):
                again = await store.append(batch(PER_BATCH, first=base))
                assert set(again.results.tolist()) == {Result.ALREADY_EXISTS}
            assert {item.reason for item in await store.quarantine()} == {"undecided"}
            assert (await store.stats()).quarantined == PER_BATCH
        [gap] = await store.gaps()
        assert (gap.first, gap.last, gap.reason) == (base, base + PER_BATCH - 1, GapReason.DAMAGED)
        [problem] = store.problems
        assert f"{path} at byte {at}" in problem
        async for _ in store.replay(0):
            pass
        assert len(await store.gaps()) == len(store.problems) == 1
        await storage.close()
        # After a start with the loss on record, what is lost can be sent again.
        storage, store = await opened(disk)
        again = await store.append(batch(PER_BATCH, first=base))
        assert again.offsets.tolist() == list(range(END, END + PER_BATCH))
        await storage.close()

    run(work())


@pytest.mark.parametrize("known", [True, False], ids=["read before", "never read"])
@pytest.mark.parametrize("by", ["replay", "get", "append", "truncate"])
def test_a_segment_that_somebody_removes_takes_nothing_else_with_it(tmp_path: Path, by: str, known: bool) -> None:
    """A file that is missing under an open log is damage: its entries are recorded, and the log goes on."""

    async def work() -> None:
        storage, store = await opened(tmp_path)
        if not known:
            await storage.close()
            storage, store = await opened(tmp_path)
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.cursors.commit("peer", Confirmation(through=END - 1))
        paths = sorted((tmp_path / STORE).glob("*.seg"))
        first, after = int(paths[1].stem), int(paths[2].stem)
        paths[1].unlink()
        if by == "replay":
            there = [offset async for frame in store.replay(0) if frame.entries for offset in frame.entries.offsets]
            assert there == [*range(first), *range(after, END)]
        elif by == "get":
            assert await store.get(key_of(first)) is None
            assert await store.get(key_of(after)) is not None
        elif by == "append":
            for result in (Result.INSERTED, Result.ALREADY_EXISTS):
                again = await store.append(batch(PER_BATCH, first=first))
                assert set(again.results.tolist()) == {result}
        else:
            await store.truncate_before(END)
            assert store.start == END
        end = store.end
        assert (await store.append(batch(1, first=END))).offsets.tolist() == [end]
        await store.stats()
        [gap] = await store.gaps()
        assert (gap.first, gap.last) == (first, after - 1)
        assert gap.reason in (GapReason.LOST, GapReason.DAMAGED)
        assert paths[1].name in store.problems[0]
        await storage.close()

    run(work())


@pytest.mark.parametrize("by", ["replay", "truncate", "index"])
def test_a_stretch_that_cannot_be_read_is_one_record(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of damage grows with its places and not with the frames that lie there."""
    monkeypatch.setattr(segments, "_LOOKING_SECONDS", 3_600.0)
    monkeypatch.setattr(segments, "PAUSE_SECONDS", 0.0)

    async def work() -> None:
        storage = await LogStorage.open(tmp_path, options=LogOptions(segment_bytes=1 << 20))
        store = await storage.store(STREAM)
        for number in range(300):
            await store.append(batch(1, first=number))
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.cursors.commit("peer", Confirmation(through=299))
        await storage.close()
        storage = await LogStorage.open(tmp_path, options=OPTIONS)
        store = await storage.store(STREAM)
        await store.append(batch(PER_BATCH, first=300))
        path = min((tmp_path / STORE).glob("*.seg"))
        if by == "index":
            await storage.close()
            shutil.rmtree(tmp_path / STORE / "index")
        data = bytearray(path.read_bytes())
        for at in frames_of(data)[10:290]:
            data[at + FRAME_HEADER_BYTES + 8] ^= 1
        path.write_bytes(data)
        if by == "index":
            storage = await LogStorage.open(tmp_path, options=OPTIONS)
            store = await storage.store(STREAM)
        elif by == "replay":
            there = [offset async for frame in store.replay(0) if frame.entries for offset in frame.entries.offsets]
            assert there == [*range(10), *range(290, 300 + PER_BATCH)]
        else:
            await store.truncate_before(300)
        [gap] = await store.gaps()
        assert (gap.first, gap.last, gap.reason) == (10, 289, GapReason.DAMAGED)
        assert len(store.problems) == 1
        await storage.close()

    run(work())


def test_damage_at_the_end_of_a_segment_that_leaves_is_recorded(tmp_path: Path) -> None:
    """Also when no header tells any more what was there, the entries that leave without their keys are named."""

    async def work() -> None:
        storage, store = await opened(tmp_path)
        await storage.close()
        paths = sorted((tmp_path / STORE).glob("*.seg"))
        data = bytearray(paths[0].read_bytes())
        data[frames_of(data)[-1]] ^= 1
        paths[0].write_bytes(data)
        storage, store = await opened(tmp_path)
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.cursors.commit("peer", Confirmation(through=END - 1))
        await store.truncate_before(END)
        last = int(paths[1].stem) - 1
        [gap] = await store.gaps()
        assert (gap.first, gap.last, gap.reason) == (last + 1 - PER_BATCH, last, GapReason.DAMAGED)
        await storage.close()

    run(work())


def test_bytes_that_cannot_be_read_for_a_moment_are_no_damage() -> None:
    """Entries whose first reading fails and whose second does not are served, and nothing is recorded."""

    async def work() -> None:
        disk = SimulatedDisk()
        storage, store = await opened(disk)
        await storage.close()
        storage, store = await opened(disk)
        disk.fail("read", times=2)
        there = [offset async for frame in store.replay(0) if frame.entries for offset in frame.entries.offsets]
        assert there == list(range(END))
        disk.fail("read", times=2)
        assert await store.get(key_of(10)) is not None
        assert not await store.gaps()
        assert not store.problems
        await storage.close()

    run(work())


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("harm", ["unreadable", "gone", "cut", "hashes", "offsets"])
def test_an_index_that_cannot_be_read_is_made_anew_from_the_log(tmp_path: Path, harm: str, truncated: bool) -> None:
    """A lookup that meets a bad page takes the keys from the log; the log stays open and nothing is stored twice."""

    async def work() -> None:
        disk: SimulatedDisk | DiskFiles = SimulatedDisk() if harm == "unreadable" else DiskFiles(tmp_path)
        where: Any = disk if harm == "unreadable" else tmp_path
        storage, store = await opened(where)
        if truncated:
            await storage.cursors.create(ConsumerSpec("peer", STREAM))
            await storage.cursors.commit("peer", Confirmation(through=END // 2))
            await store.truncate_before(END // 2)
        runs = [f"{STORE}/index/{name}" for name in disk.list(f"{STORE}/index")]
        assert runs
        for path in runs:
            if isinstance(disk, SimulatedDisk):
                disk.spoil(path, 0, disk.size(path))
            elif harm == "gone":
                disk.remove(path)
            elif harm in ("hashes", "offsets"):
                rot(tmp_path / path, harm)
            else:
                (tmp_path / path).write_bytes(b"")
        for first in range(0, END, PER_BATCH):
            again = await store.append(batch(PER_BATCH, first=first))
            assert set(again.results.tolist()) == {Result.ALREADY_EXISTS}
        assert (await store.append(batch(3, first=10))).results.tolist() == [Result.ALREADY_EXISTS] * 3
        assert await store.get(key_of(END - 1)) is not None
        assert not store.problems
        fresh = await store.append(batch(1_000, seed=5))
        assert set(fresh.results.tolist()) == {Result.INSERTED}
        assert disk.list(f"{STORE}/index"), "the index has files again"
        await storage.close()
        storage, store = await opened(where)
        assert set((await store.append(batch(1_000, seed=5))).results.tolist()) == {Result.ALREADY_EXISTS}
        await storage.close()

    run(work())


def rot(path: Path, what: str) -> None:
    """Turn round the order of the hashes of a run, or give all its offsets another place."""
    data = bytearray(path.read_bytes())
    [keys] = struct.unpack_from("<Q", data, 16)
    size = 8 * keys
    at = HEADER.size if what == "hashes" else HEADER.size + size
    values = np.frombuffer(data[at : at + size], dtype=np.int64)
    data[at : at + size] = (values[::-1] if what == "hashes" else values + 10**9).tobytes()
    path.write_bytes(data)


class Counting(DiskFiles):
    """A folder that counts how often something is looked for in a log."""

    looks = 0

    def make_folder(self, path: str) -> None:
        """Count, and make it."""
        self.looks += path.startswith(STORE)
        super().make_folder(path)


def test_a_consumer_of_a_stream_that_cannot_open_is_told_so_without_another_attempt(tmp_path: Path) -> None:
    """Calls of its consumers are refused as those of its producers are, and do not read the log again and again."""

    async def work() -> None:
        storage, _ = await opened(tmp_path)
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.close()
        (tmp_path / STORE).rename(tmp_path / "kept")
        (tmp_path / STORE).write_bytes(b"no folder")
        files = Counting(tmp_path)
        storage = await LogStorage.open(files, options=OPTIONS)
        for call in (
            lambda: storage.cursors.commit("peer", Confirmation(through=3)),
            lambda: storage.cursors.create(ConsumerSpec("other", STREAM)),
            lambda: storage.cursors.sent("peer", 3),
            lambda: storage.cursors.retire("peer", "no reason"),
        ):
            with pytest.raises(StreamUnavailable) as refused:
                await call()
            assert refused.value.retryable
            assert f"{STREAM}/{Buffer.STORE}" in refused.value.message
        assert files.looks == 1
        (tmp_path / STORE).unlink()
        (tmp_path / "kept").rename(tmp_path / STORE)
        await storage.store(STREAM)
        assert (await storage.cursors.commit("peer", Confirmation(through=3))).committed == 3
        await storage.close()

    run(work())


def test_a_shortage_while_a_consumer_asks_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for a moment is no reason to refuse until somebody opens the stream again."""

    async def work() -> None:
        storage, _ = await opened(tmp_path)
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.close()
        storage = await LogStorage.open(tmp_path, options=OPTIONS)

        def short(path: str) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(storage.files, "make_folder", short)
            with pytest.raises(Exception, match="too many open files"):
                await storage.cursors.commit("peer", Confirmation(through=3))
        assert (await storage.cursors.commit("peer", Confirmation(through=3))).committed == 3
        await storage.close()

    run(work())


def test_what_is_in_quarantine_and_cannot_be_read_is_told_of() -> None:
    """A medium that fails for a moment hides nothing; one that fails for good leaves number and place of the fact.

    Nobody takes such a fact for one that is not there: no artifact that it may name is an orphan, and whoever copies
    the folder learns of it.
    """

    async def work() -> None:
        disk = SimulatedDisk()
        storage, store = await opened(disk)
        await store.set_aside(batch(1, first=END), "conflict", "for a test")
        [path] = [name for name in disk.content() if "/quarantine/" in name]
        disk.fail("read", times=READS - 1)
        [item] = await store.quarantine()
        assert (item.reason, item.key) == ("conflict", key_of(END))
        disk.spoil(path, 40, 1)
        [item] = await store.quarantine()
        assert (item.reason, len(item.facts)) == (UNREADABLE, 0) and path in item.detail
        assert await store.quarantined(item.id) == item
        with pytest.raises(StorageFailed, match="names is not known"):
            await References().scan([store])
        with pytest.raises(StorageFailed, match="cannot be read"):
            await _put_again(store, item, 0)
        notes = store._writer.notes
        assert copy_quarantine(notes.quarantine, SimulatedDisk(), "copy", END) == [item.detail]
        await store.release_quarantined(item.id, "it cannot be read")
        assert await store.quarantine() == [] and (await store.stats()).quarantined == 0
        await storage.close()

    run(work())
