"""The key index answers like a dict, whatever mixture of single keys, batches, merges and restarts made it."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from bsfg.stores.log import indexstore
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.index import Filter, decode_run, encode_run, merged
from bsfg.stores.log.indexstore import IndexStore

OWNER = b"o" * 16
RUN_KEYS = 64


def opened(folder: Path, *, memory_bytes: int = 1 << 20, end: int = 0) -> IndexStore:
    """Open the index in a folder for a log that ends at ``end``."""
    (folder / "index").mkdir(exist_ok=True)
    store = IndexStore(DiskFiles(folder), ".", OWNER, memory_bytes, RUN_KEYS)
    store.load(0, end, end, dict[int, bytes]().get)
    return store


def settle(store: IndexStore) -> None:
    """Let background merges end."""
    while store._merging is not None:
        store._merging.result()
        with store.keys.lock:
            store._merge()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_index_agrees_with_a_dict(tmp_path: Path, seed: int, memory_bytes: int) -> None:
    """Every key that was added is found with all its offsets, and no key that was not is ever claimed."""
    rng = np.random.default_rng(seed)
    store = opened(tmp_path, memory_bytes=memory_bytes)
    model: dict[int, set[int]] = defaultdict(set)
    end = 0
    for step in range(120):
        count = int(rng.choice([1, 2, 5, 9, 30, 200]))
        # A narrow range of hashes makes equal hashes with different offsets, which stand for collisions.
        hashes = np.sort(rng.integers(0, 5_000, size=count).astype(np.uint64) << np.uint64(51))
        offsets = rng.permutation(count) + end
        end += count
        store.add(hashes, offsets, end, bytes(32))
        for value, offset in zip(hashes.tolist(), offsets.tolist(), strict=True):
            model[value].add(offset)
        if step % 10 == 0:
            settle(store)
            check(store, model, rng)
    assert len(store.keys) == end
    assert len(store.keys.runs) < end / RUN_KEYS
    store.close()


def check(store: IndexStore, model: dict[int, set[int]], rng: np.random.Generator) -> None:
    """Ask for keys that are there and keys that are not, few and many at a time, and for the newest one by one."""
    some = [np.sort(rng.integers(0, 6_000, size=count).astype(np.uint64) << np.uint64(51)) for count in (1, 8, 9, 300)]
    newest = sorted(model, key=lambda value: max(model[value]))[-RUN_KEYS:]
    for asked in [*some, *(np.array([value], dtype=np.uint64) for value in newest)]:
        rows, offsets = store.keys.candidates(asked)
        found: dict[int, set[int]] = defaultdict(set)
        for row, offset in zip(rows.tolist(), offsets.tolist(), strict=True):
            found[row].add(offset)
        for row, value in enumerate(asked.tolist()):
            assert found[row] == model.get(value, set())


def test_runs_are_taken_over_by_the_next_opening(tmp_path: Path) -> None:
    """What was written is found again after a restart, and only the rest must be added."""
    store = opened(tmp_path)
    hashes = np.sort(np.random.default_rng(1).integers(0, 2**64, size=1_000, dtype=np.uint64))
    for at in range(0, 1_000, 20):
        store.add(hashes[at : at + 20], np.arange(at, at + 20), at + 20, bytes(32))
        settle(store)
    store.close()
    again = opened(tmp_path, end=1_000)
    assert 900 <= again.covered <= 1_000
    rows, offsets = again.keys.candidates(hashes)
    assert sorted(offsets.tolist()) == list(range(again.covered))
    assert len(rows) == again.covered
    again.close()


def test_a_run_ahead_of_the_log_is_refused(tmp_path: Path) -> None:
    """A run that names entries behind the end of the log, or disagrees with its chain, is removed."""
    store = opened(tmp_path)
    hashes = np.arange(RUN_KEYS, dtype=np.uint64) << np.uint64(50)
    store.add(hashes, np.arange(RUN_KEYS), RUN_KEYS, b"a" * 32)
    store.close()
    behind = IndexStore(DiskFiles(tmp_path), ".", OWNER, 1 << 20, RUN_KEYS)
    assert behind.load(0, RUN_KEYS, 0, {RUN_KEYS: b"b" * 32}.get) == 0
    assert not list((tmp_path / "index").iterdir())


def test_what_lies_behind_a_hole_is_added_again(tmp_path: Path) -> None:
    """Where a run is missing the index ends: what follows it is of no use, and none of its keys counts as covered."""
    store = opened(tmp_path)
    filled(store, 3 * RUN_KEYS)
    store.close()
    next((tmp_path / "index").glob(f"*-{RUN_KEYS}-*.run")).unlink()
    again = reopened(tmp_path, 3 * RUN_KEYS)
    assert again.covered == RUN_KEYS
    assert run_files(tmp_path) == [f"0-{RUN_KEYS - 1}.run"]
    filled(again, 2 * RUN_KEYS, RUN_KEYS)
    assert all(again.keys.may_hold(offset << 40) for offset in range(3 * RUN_KEYS))
    again.close()


def test_a_run_survives_its_encoding() -> None:
    """A run that is written and read is the same; one with a flipped bit or another owner is refused."""
    store_hashes = np.sort(np.random.default_rng(3).integers(0, 2**64, size=500, dtype=np.uint64))
    from bsfg.stores.log.index import Run

    table = Filter(500)
    table.add(store_hashes)
    run = Run(store_hashes, np.arange(500), 0, 499, table)
    data = b"".join(bytes(part) for part in encode_run(run, OWNER, b"c" * 32))
    decoded = decode_run(data, OWNER)
    assert decoded is not None
    assert decoded[1] == b"c" * 32
    assert (decoded[0].hashes == store_hashes).all()
    assert (decoded[0].first, decoded[0].last) == (0, 499)
    assert decode_run(data, b"x" * 16) is None
    for at in [*range(100), *range(100, len(data), 97)]:
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert decode_run(bytes(damaged), OWNER) is None


@pytest.mark.parametrize("distinct", [2**64 - 1, 400, 3])
def test_a_run_on_disk_answers_like_one_in_memory(tmp_path: Path, distinct: int) -> None:
    """Reading page by page finds every offset of every key, also of keys that fill pages, and nothing else."""
    from bsfg.stores.log.index import Run

    rng = np.random.default_rng(distinct % 1000)
    hashes = np.sort(rng.integers(0, distinct, size=5_000, dtype=np.uint64))
    table = Filter(len(hashes))
    table.add(hashes)
    there, stored = (Run(hashes, rng.permutation(5_000), 0, 4_999, table) for _ in range(2))
    stored.offsets = there.offsets
    path = tmp_path / "a.run"
    path.write_bytes(b"".join(bytes(part) for part in encode_run(there, OWNER, bytes(32))))
    stored.live_on_disk(DiskFiles(tmp_path), "a.run")
    assert stored.nbytes < there.nbytes / 4
    asked = np.sort(np.concatenate([hashes[::7], rng.integers(0, 2**64, size=500, dtype=np.uint64)]))
    expected, found = there.candidates(asked), stored.candidates(asked)
    assert sorted(zip(*map(np.ndarray.tolist, found), strict=True)) == sorted(
        zip(*map(np.ndarray.tolist, expected), strict=True)
    )
    for value in asked[::50].tolist():
        assert sorted(stored.offsets_of(value)) == sorted(there.offsets_of(value))
    assert (stored.arrays()[0] == hashes).all()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)
    with pytest.raises(OSError, match="ends before"):
        stored.arrays()


def test_filter_never_denies_what_is_there() -> None:
    """A filter may claim too much, and here does so seldom, but never forgets a key."""
    rng = np.random.default_rng(5)
    present = np.sort(rng.integers(0, 2**64, size=10_000, dtype=np.uint64))
    absent = rng.integers(0, 2**64, size=10_000, dtype=np.uint64)
    table = Filter(10_000)
    table.add(present)
    assert len(table.maybe(present)) == len(present)
    assert all(table.maybe_one(value) for value in present[:100].tolist())
    assert len(table.maybe(absent)) < 0.06 * len(absent)


def test_merging_keeps_the_order_of_equal_hashes() -> None:
    """Merged runs are sorted and hold every pair of their parts."""
    from bsfg.stores.log.index import Run

    first = Run(np.array([1, 5, 5], dtype=np.uint64), np.array([0, 1, 2]), 0, 2)
    second = Run(np.array([0, 5, 9], dtype=np.uint64), np.array([3, 4, 5]), 3, 5)
    both = merged([first, second], with_filter=True)
    assert both.hashes.tolist() == [0, 1, 5, 5, 5, 9]
    assert both.offsets.tolist() == [3, 0, 1, 2, 4, 5]
    assert (both.first, both.last) == (0, 5)


def test_a_key_is_never_missed_while_others_are_looked_up(tmp_path: Path) -> None:
    """A key that is there is found at every moment, also while another thread sorts the newest keys for its batch."""
    store = opened(tmp_path)
    batch = np.arange(1_000, 1_000 + 64, dtype=np.uint64) << np.uint64(48)
    missed: list[int] = []
    known: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for value in known[-3:]:
                if not len(store.keys.candidates(np.array([value], dtype=np.uint64))[0]):
                    missed.append(value)
                if not store.keys.may_hold(value):
                    missed.append(value)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=look)
    try:
        reader.start()
        for end in range(1, 3_000):
            store.add_few([end << 20], end, bytes(32))
            known.append(end << 20)
            if end % 8 == 0:
                store.keys.candidates(batch)
    finally:
        ended.set()
        reader.join()
        sys.setswitchinterval(interval)
        store.close()
    assert not missed


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_keys_below_the_floor_are_gone(tmp_path: Path, memory_bytes: int) -> None:
    """What was forgotten is no candidate any more: not from memory, from runs, after merges or after a restart."""
    store = opened(tmp_path, memory_bytes=memory_bytes)
    hashes = np.arange(1, 2_001, dtype=np.uint64) << np.uint64(48)
    for at in range(0, 1_000, 20):
        store.add(hashes[at : at + 20], np.arange(at, at + 20), at + 20, bytes(32))
    for floor in (13, 500, 990):
        store.forget_before(floor)
        assert sorted(store.keys.candidates(hashes)[1].tolist()) == list(range(floor, 1_000))
        assert sorted(store.keys.candidates(hashes[floor - 5 : floor + 3])[1].tolist()) == [*range(floor, floor + 3)]
    for at in range(1_000, 2_000, 20):
        store.add(hashes[at : at + 20], np.arange(at, at + 20), at + 20, bytes(32))
        settle(store)
    assert sorted(store.keys.candidates(hashes)[1].tolist()) == list(range(990, 2_000))
    store.close()


def test_keys_are_forgotten_while_merges_follow_each_other(tmp_path: Path) -> None:
    """Dropping the runs that a merge would go on with does not fail an append, whose facts are durable by then."""
    rng = np.random.default_rng(1)
    store = opened(tmp_path)
    end = 0

    def add() -> None:
        nonlocal end
        hashes = np.sort(rng.integers(0, 1 << 62, size=RUN_KEYS).astype(np.uint64))
        end += RUN_KEYS
        store.add(hashes, np.arange(end - RUN_KEYS, end), end, bytes(32))

    while [run.count for run in store.keys.runs] != [RUN_KEYS] * 7 + [8 * RUN_KEYS] * 7:
        add()
        settle(store)
    add()
    assert store._merging is not None  # by whose end eight larger runs are due, all of them below the horizon
    store.forget_before(end)
    for _ in range(3):
        add()
        settle(store)
    assert [run.count for run in store.keys.runs] == [RUN_KEYS] * 3
    store.close()


def filled(store: IndexStore, count: int, first: int = 0) -> None:
    """Add so many keys one by one; the chain value at an offset is that offset."""
    for offset in range(first, first + count):
        store.add_few([offset << 40], offset + 1, (offset + 1).to_bytes(32, "little"))


def run_files(folder: Path) -> list[str]:
    """Name the files of an index without their serial numbers."""
    return sorted(path.name.partition("-")[2] for path in (folder / "index").iterdir())


def reopened(folder: Path, end: int) -> IndexStore:
    """Open the index of a log that was all in its last segment, where a run must agree with the chain."""
    store = IndexStore(DiskFiles(folder), ".", OWNER, 1 << 20, RUN_KEYS)
    store.load(0, end, 0, lambda at: at.to_bytes(32, "little"))
    return store


def test_a_closed_index_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fill a run is written at the end, taken back at the start, and grows into a run of its own."""
    monkeypatch.setattr(indexstore, "_CLOSED_KEYS", 5)
    store = opened(tmp_path)
    filled(store, RUN_KEYS + 10)
    store.close()
    assert run_files(tmp_path) == ["0-63.run", "64-73.run"]
    store = reopened(tmp_path, RUN_KEYS + 10)
    assert (store.covered, store.keys.recent_keys) == (RUN_KEYS + 10, 10)
    assert len(store.keys) == RUN_KEYS + 10
    assert all(store.keys.may_hold(offset << 40) for offset in range(RUN_KEYS + 10))
    filled(store, 3, RUN_KEYS + 10)
    store.close()
    assert run_files(tmp_path) == ["0-63.run", "64-73.run"]  # three more keys are not worth a file
    store = reopened(tmp_path, RUN_KEYS + 13)
    assert store.covered == RUN_KEYS + 10
    filled(store, RUN_KEYS - 10, RUN_KEYS + 10)
    assert run_files(tmp_path) == ["0-63.run", "64-127.run"]
    store.close()


def test_recent_keys_are_written_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file has the recent keys; the next takes its place. When a crash leaves both, the wider one is used."""
    monkeypatch.setattr(indexstore, "_SAVED_KEYS", 8)
    store = opened(tmp_path)
    filled(store, 20)
    assert run_files(tmp_path) == []  # the log is only being opened
    store.source = lambda first, last: (np.empty(0), np.empty(0))
    store.has_room = lambda: False
    filled(store, 1, 20)
    assert run_files(tmp_path) == []  # there is no room
    store.has_room = lambda: True
    filled(store, 1, 21)
    assert run_files(tmp_path) == []  # the time has not come again
    monkeypatch.setattr(indexstore, "_SAVED_SECONDS", 0.0)
    filled(store, 1, 22)
    assert run_files(tmp_path) == ["0-22.run"]
    filled(store, 7, 23)
    assert run_files(tmp_path) == ["0-22.run"]  # so few are not worth it
    earlier = next((tmp_path / "index").iterdir())
    kept = earlier.read_bytes()
    filled(store, 1, 30)
    assert run_files(tmp_path) == ["0-30.run"]
    earlier.write_bytes(kept)
    assert reopened(tmp_path, 31).covered == 31
    assert run_files(tmp_path) == ["0-30.run"]
    assert reopened(tmp_path, 25).covered == 0  # ahead of the log
    assert run_files(tmp_path) == []
