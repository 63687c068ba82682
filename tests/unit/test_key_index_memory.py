"""The key index keeps to its memory limit, also while runs are merged, opened and rebuilt."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bsfg.stores.log.files import Bytes, DiskFile, DiskFiles
from bsfg.stores.log.index import HEADER, PAGE_KEYS, Filter, Run, decode_run, encode_run, filter_pieces, merged
from bsfg.stores.log.indexstore import (
    WORKING_BYTES_PER_KEY,
    IndexStore,
    RunWriter,
    merged_stretches,
    read_head,
    read_run,
)

OWNER = b"o" * 16
KEYS = 700_000
RUN_KEYS = 8_192
LIMIT = 2 << 20
BATCH = 2_000


class Peak:
    """The most bytes that were allocated at one time, beyond those at the beginning."""

    nbytes = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure what is allocated inside, NumPy's arrays included."""
    gc.collect()
    result = Peak()
    tracemalloc.start()
    try:
        yield result
        result.nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def opened(folder: Path, *, memory_bytes: int, run_keys: int = RUN_KEYS, end: int = 0) -> IndexStore:
    """Open the index in a folder for a log that ends at ``end``."""
    store = IndexStore(DiskFiles(folder), ".", OWNER, memory_bytes, run_keys)
    store.load(0, end, end, dict[int, bytes]().get)
    return store


def settle(store: IndexStore) -> None:
    """Let background merges end."""
    while store._merging is not None:
        store._merging.result()
        with store.keys.lock:
            store._merge()


def hashes_of(first: int, end: int) -> np.ndarray:
    """Give hashes for some offsets: spread, and all different, because the multiplier is odd."""
    return np.arange(first, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def fill(store: IndexStore, first: int, end: int) -> None:
    """Add the keys of some offsets in batches."""
    for at in range(first, end, BATCH):
        until = min(at + BATCH, end)
        hashes = hashes_of(at, until)
        order = np.argsort(hashes)
        store.add(hashes[order], order + at, until, bytes(32))


def test_the_memory_limit_holds(tmp_path: Path) -> None:
    """Seven hundred thousand keys at two megabytes: while they are added, merged, opened and looked up."""
    assert WORKING_BYTES_PER_KEY * RUN_KEYS < LIMIT
    # Now and then the interpreter makes its table of strings larger, which is counted here and is not ours.
    tries = (_peaks(tmp_path / str(number)) for number in range(3))
    assert any(max(peaks) <= LIMIT for peaks in tries)


def _peaks(folder: Path) -> tuple[int, int, int]:
    """Fill an index, open it again and look into it; give the most bytes that each of them took."""
    with peak() as adding:
        store = opened(folder, memory_bytes=LIMIT)
        fill(store, 0, KEYS)
        settle(store)
        assert store.keys.nbytes <= LIMIT
        store.close()
        del store
    assert max(path.stat().st_size for path in (folder / "index").iterdir()) > 2 * LIMIT
    with peak() as opening:
        store = opened(folder, memory_bytes=LIMIT, end=KEYS)
        covered = store.covered
    with peak() as looking:
        for at in range(0, KEYS, KEYS // 10):
            asked = np.sort(np.concatenate([hashes_of(at, at + 1_000), hashes_of(KEYS + at, KEYS + at + 1_000)]))
            assert sorted(store.keys.candidates(asked)[1].tolist()) == list(range(at, at + 1_000))
    store.close()
    assert KEYS - RUN_KEYS - BATCH <= covered <= KEYS
    return adding.nbytes, opening.nbytes, looking.nbytes + store.keys.nbytes


def test_the_newest_runs_are_those_in_memory(tmp_path: Path) -> None:
    """What an opening brings into memory are the newest runs, as far as the limit allows, and filters after them."""
    store = opened(tmp_path, memory_bytes=0)
    fill(store, 0, 7 * (RUN_KEYS // BATCH + 1) * BATCH)
    settle(store)
    store.close()
    one = store.keys.runs[0].count * 20
    again = opened(tmp_path, memory_bytes=WORKING_BYTES_PER_KEY * RUN_KEYS + 5 * one // 2, end=store.covered)
    assert [run.in_memory for run in again.keys.runs] == [True, True, *[False] * 5]
    assert all(run.filter is not None for run in again.keys.runs[:3])
    assert again.keys.nbytes <= WORKING_BYTES_PER_KEY * RUN_KEYS + 5 * one // 2
    none = opened(tmp_path, memory_bytes=0, end=store.covered)
    assert not any(run.in_memory or run.filter for run in none.keys.runs)
    assert none.covered == again.covered == store.covered


def test_a_merged_run_returns_to_memory_when_there_is_room(tmp_path: Path) -> None:
    """Runs that can be in memory, but not merged there, are merged on disk and then read."""
    room = 17 * 2 * RUN_KEYS * 20
    store = opened(tmp_path, memory_bytes=WORKING_BYTES_PER_KEY * RUN_KEYS + room)
    fill(store, 0, 16 * 10_000)
    settle(store)
    assert max(run.count for run in store.keys.runs) == 80_000
    assert all(run.in_memory and run.filter is not None for run in store.keys.runs)
    assert len(store.keys.candidates(np.sort(hashes_of(0, 160_000)))[1]) == 160_000
    store.close()


def made(sizes: list[int], distinct: int) -> list[Run]:
    """Make runs, the newest first, of so many keys."""
    rng = np.random.default_rng(len(sizes) + sum(sizes))
    result: list[Run] = []
    at = 0
    for size in sizes:
        hashes = np.sort(rng.integers(0, distinct, size=size, dtype=np.uint64))
        table = Filter(size)
        table.add(hashes)
        result.insert(0, Run(hashes, at + rng.permutation(size), at, at + max(size, 1) - 1, table))
        at += max(size, 1)
    return result


def pairs(run: Run) -> list[tuple[int, int]]:
    """Give everything in a run."""
    hashes, offsets = run.arrays()
    return sorted(zip(hashes.tolist(), offsets.tolist(), strict=True))


SIZES = [
    [0, 0],
    [1, 0],
    [PAGE_KEYS, PAGE_KEYS],
    [PAGE_KEYS - 1, PAGE_KEYS + 1, 1],
    [2 * PAGE_KEYS, 1, 3 * PAGE_KEYS + 1],
    [700, 0, 1_500, 3, 64, 65],
    [9_000, 300],
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("distinct", [2**64 - 1, 400, 1], ids=["all different", "duplicates", "all the same"])
@pytest.mark.parametrize("floor", [0, 100, 1 << 40], ids=["all kept", "some forgotten", "all forgotten"])
def test_merging_on_disk_is_merging_in_memory(tmp_path: Path, sizes: list[int], distinct: int, floor: int) -> None:
    """Whatever the sizes around the borders of pages, and however many keys are equal, both ways make the same run."""
    files, runs = DiskFiles(tmp_path), made(sizes, distinct)
    expected = merged(runs, with_filter=True, floor=floor)
    for number, run in enumerate(runs[::2]):
        (tmp_path / f"{number}").write_bytes(b"".join(bytes(part) for part in encode_run(run, OWNER, bytes(32))))
        run.live_on_disk(files, str(number))
    for step in (5, PAGE_KEYS) if sum(sizes) < 5_000 else (PAGE_KEYS + 1, 4_096):
        writer = RunWriter(files, ".", OWNER, step, lambda: False)
        new = writer.merge(runs, "new.run", b"c" * 32, floor=floor, with_filter=True)
        stretches = list(merged_stretches(runs, floor=floor, keys_at_once=step))
        assert all(len(hashes) <= step * len(runs) for hashes, _ in stretches)
        assert pairs(new) == pairs(expected)
        assert (new.first, new.last, new.count) == (expected.first, expected.last, expected.count)
        assert new.filter is not None
        assert expected.filter is not None
        assert (new.filter.table == expected.filter.table).all()
        decoded = decode_run((tmp_path / "new.run").read_bytes(), OWNER)
        assert decoded is not None
        assert decoded[1] == b"c" * 32
        assert (decoded[0].hashes[:-1] <= decoded[0].hashes[1:]).all()
        asked = np.unique(expected.hashes)
        assert sorted(new.candidates(asked)[1].tolist()) == sorted(expected.offsets.tolist())
        assert not list(tmp_path.glob("*.part"))
        (tmp_path / "new.run").unlink()


@pytest.mark.parametrize("room", [0, 2_000, 1 << 20], ids=["nothing", "its filter", "all"])
def test_a_file_is_checked_whatever_there_is_room_for(tmp_path: Path, room: int) -> None:
    """A run answers the same however much of it was read, and one with a flipped bit is refused."""
    files, [run] = DiskFiles(tmp_path), made([500], 2**64 - 1)
    data = b"".join(bytes(part) for part in encode_run(run, OWNER, bytes(32)))
    path = tmp_path / "a.run"
    path.write_bytes(data)
    head = read_head(files, "a.run", OWNER)
    assert head is not None
    found = read_run(files, "a.run", head, room)
    assert found is not None
    assert (found.in_memory, found.filter is not None) == (room > 2_000, room > 0)
    assert pairs(found) == pairs(run)
    assert found.nbytes <= max(room, 8 * -(-500 // PAGE_KEYS))
    for at in range(0, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        head = read_head(files, "a.run", OWNER)
        assert head is None or read_run(files, "a.run", head, room) is None
    path.write_bytes(data[:-1])
    assert read_head(files, "a.run", OWNER) is None


def test_a_filter_in_pieces_is_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are cut at their borders, and stretches without any key are there, too."""
    monkeypatch.setattr("bsfg.stores.log.index._PIECE_BYTES", 64)
    for run in made([3_000, 700, 1], 2**64 - 1) + made([3_000], 10) + made([0], 1):
        assert run.filter is not None
        chunks = [run.hashes[at : at + 100] for at in range(0, run.count, 100)]
        assert np.concatenate(list(filter_pieces(chunks, run.count))).tolist() == run.filter.table.tolist()


class FullDisk(DiskFiles):
    """A disk that becomes full."""

    room = 1 << 40

    def create(self, path: str) -> DiskFile:
        """Make a file that shares the room."""
        file, disk = super().create(path), self
        write = file.write

        def write_if_room(parts: list[Bytes]) -> None:
            disk.room -= sum(len(part) for part in parts)
            if disk.room < 0:
                raise OSError(28, "No space left on device")
            write(parts)

        file.write = write_if_room  # type: ignore[method-assign, assignment]
        return file


def test_a_merge_that_breaks_off_leaves_the_old_runs(tmp_path: Path) -> None:
    """When the disk is full in the middle, the old runs answer, at once and after a restart; later it is merged."""
    files = FullDisk(tmp_path)
    (tmp_path / "index").mkdir()
    store = IndexStore(files, ".", OWNER, 0, 64)
    writer = store._writer
    fill_small(store, 0, 7)
    names = sorted(path.name for path in (tmp_path / "index").iterdir())
    for room in (0, 1_000, 8 * 64 * 8, 8 * 64 * 8 + 4_000, 8 * 64 * 16 + 10, 8 * 64 * 24 + 500):
        files.room = room
        with pytest.raises(OSError, match="No space"):
            writer.merge(store.keys.runs, "x.run", bytes(32), floor=0, with_filter=True)
        assert sorted(path.name for path in (tmp_path / "index").iterdir()) == names
    files.room = 4_000
    fill_small(store, 7, 8)
    assert store._merging is not None
    assert isinstance(store._merging.exception(), OSError)
    store.add_few([1], 513, bytes(32))
    assert len(store.keys.runs) == 8
    assert sorted(store.keys.candidates(np.sort(hashes_of(0, 512)))[1].tolist()) == list(range(512))
    files.room = 1 << 40
    (tmp_path / "index" / f"{99:010d}-0-511.run.part").write_bytes(b"left by a crash")
    again = opened(tmp_path, memory_bytes=0, run_keys=64, end=513)
    assert again.covered == 512
    assert not list((tmp_path / "index").glob("*.part"))
    fill_small(store, 8, 9)
    settle(store)
    assert len(store.keys.runs) < 8
    store.close()


def test_a_merge_of_what_was_mended_meanwhile_is_not_used(tmp_path: Path) -> None:
    """A run is spoilt so that a merge takes it as it is; whoever asks it notices, and then the merge must not count."""
    (tmp_path / "index").mkdir()
    store = IndexStore(DiskFiles(tmp_path), ".", OWNER, 0, 64)

    def source(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(hashes_of(first, last + 1))
        return hashes_of(first, last + 1)[order], order + first

    store.source = source
    fill_small(store, 0, 7)
    spoilt = store.keys.runs[3]
    with (tmp_path / "index" / spoilt.name).open("r+b") as file:
        file.seek(HEADER.size)
        file.write(b"\0")  # the lowest byte of the smallest hash: they stay sorted
    fill_small(store, 7, 8)
    assert store._merging is not None
    store._merging.result()
    everything = np.sort(hashes_of(0, 512))
    assert sorted(store.keys.candidates(everything)[1].tolist()) == list(range(512))
    settle(store)
    fill_small(store, 8, 9)
    settle(store)
    assert sorted(store.keys.candidates(everything)[1].tolist()) == list(range(512))
    store.close()


def fill_small(store: IndexStore, first: int, end: int) -> None:
    """Add runs of 64 keys."""
    for at in range(first * 64, end * 64, 64):
        hashes = hashes_of(at, at + 64)
        order = np.argsort(hashes)
        store.add(hashes[order], order + at, at + 64, bytes(32))
