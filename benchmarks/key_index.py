"""Compare ways to keep the key index: put-if-absent of unique keys in batches of 2,000, by the million.

Run with ``python benchmarks/key_index.py [millions]``; LMDB and RocksDB take part when the packages ``lmdb`` and
``rocksdict`` are installed. Each line gives the rate per million and the memory or disk per key. The yardstick is
SHA-256 over 200-byte objects in the same run, because machines differ.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.indexstore import IndexStore

BATCH = 2_000
Insert = Callable[[np.ndarray, int], int]
"""Insert the keys of a batch that begins at an offset; give how many were new."""


def runs(folder: Path) -> tuple[Insert, Callable[[], int]]:
    """Sorted runs with filters: what the embedded log uses."""
    (folder / "index").mkdir()
    store = IndexStore(DiskFiles(folder), "", b"owner".ljust(16), 256 << 20, 131_072)

    def insert(hashes: np.ndarray, base: int) -> int:
        order = np.argsort(hashes, kind="stable")
        ranked = hashes[order]
        found, _ = store.keys.candidates(ranked)
        store.add(ranked, order + base, base + len(hashes), bytes(32))
        return len(hashes) - len(found)

    return insert, lambda: store.keys.nbytes


def plain_dict(folder: Path) -> tuple[Insert, Callable[[], int]]:
    """A Python dict from hash to offset."""
    known: dict[int, int] = {}

    def insert(hashes: np.ndarray, base: int) -> int:
        keys = hashes.tolist()
        fresh = [key for key in keys if key not in known]
        known.update(zip(keys, range(base, base + len(keys)), strict=True))
        return len(fresh)

    return insert, lambda: sys.getsizeof(known) + 68 * len(known)


def sqlite(folder: Path) -> tuple[Insert, Callable[[], int]]:
    """SQLite with its journal off: an upper bound for it."""
    path = folder / "keys.db"
    db = sqlite3.connect(path)
    db.executescript("pragma journal_mode=off; pragma synchronous=off; pragma cache_size=-262144;")
    db.execute("create table keys (hash integer primary key, at integer) without rowid")

    def insert(hashes: np.ndarray, base: int) -> int:
        rows = zip(hashes.view(np.int64).tolist(), range(base, base + len(hashes)), strict=True)
        count = db.executemany("insert or ignore into keys values (?, ?)", rows).rowcount
        db.commit()
        return count

    return insert, lambda: path.stat().st_size


def lmdb_store(folder: Path) -> tuple[Insert, Callable[[], int]]:
    """LMDB without syncing."""
    import lmdb  # type: ignore[import-not-found]

    env = lmdb.open(str(folder / "lmdb"), map_size=8 << 30, sync=False, writemap=True)

    def insert(hashes: np.ndarray, base: int) -> int:
        rows = [(key.to_bytes(8, "big"), at.to_bytes(8, "big")) for at, key in enumerate(hashes.tolist(), base)]
        with env.begin(write=True) as txn, txn.cursor() as cursor:
            _, added = cursor.putmulti(rows, overwrite=False)
        return int(added)

    return insert, lambda: (folder / "lmdb" / "data.mdb").stat().st_blocks * 512


def rocksdb(folder: Path) -> tuple[Insert, Callable[[], int]]:
    """RocksDB with its write-ahead log off."""
    from rocksdict import Options, Rdict, WriteBatch, WriteOptions  # type: ignore[import-not-found]

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    db = Rdict(str(folder / "rocks"), options)
    write = WriteOptions()
    write.disable_wal = True

    def insert(hashes: np.ndarray, base: int) -> int:
        keys = [key.to_bytes(8, "big") for key in hashes.tolist()]
        found = db.get(keys)
        batch = WriteBatch(raw_mode=True)
        for at, key in enumerate(keys, base):
            batch.put(key, at.to_bytes(8, "big"))
        db.write(batch, write)
        return sum(value is None for value in found)

    return insert, lambda: sum(f.stat().st_size for f in (folder / "rocks").iterdir())


def measure(name: str, make: Callable[[Path], tuple[Insert, Callable[[], int]]], millions: int, yard: float) -> None:
    """Insert millions of unique random keys and print the rate of each."""
    rng = np.random.default_rng(7)
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        insert, size = make(Path(folder))
        base = 0
        for _ in range(millions):
            keys = rng.integers(0, 2**64, size=1_000_000, dtype=np.uint64)
            start = time.perf_counter()
            for at in range(0, len(keys), BATCH):
                insert(keys[at : at + BATCH], base)
                base += BATCH
            rates.append(1_000_000 / (time.perf_counter() - start))
        print(
            f"{name:8} "
            + " ".join(f"{rate / 1000:6.0f}k" for rate in rates)
            + f"  last/yardstick {rates[-1] / yard:.2f}, {size() / base:.1f} bytes/key",
            flush=True,
        )


def main() -> None:
    """Measure all that are installed."""
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    objects = [os.urandom(200) for _ in range(200_000)]
    start = time.perf_counter()
    for item in objects:
        hashlib.sha256(item).digest()
    yard = len(objects) / (time.perf_counter() - start)
    print(f"sha256   {yard / 1000:6.0f}k  (the yardstick)")
    measure("runs", runs, millions, yard)
    measure("dict", plain_dict, millions, yard)
    measure("sqlite", sqlite, millions, yard)
    if importlib.util.find_spec("lmdb"):
        measure("lmdb", lmdb_store, millions, yard)
    if importlib.util.find_spec("rocksdict"):
        measure("rocksdb", rocksdb, millions, yard)


if __name__ == "__main__":
    main()
