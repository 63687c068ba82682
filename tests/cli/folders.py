"""Data folders for the tests of the command line: a sound one, and ways to harm it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import crc32c
import numpy as np

from bsfg.ports import Buffer, Confirmation, ConsumerSpec, OriginSpan
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import altered, batch, messages, sealed

STREAM = "operational"
FACTS = 2_000
PER_BATCH = 50
TRUNCATED = 650
CONFIRMED = 700
OPTIONS = LogOptions(segment_bytes=65_536, index_run_keys=500)


def make(folder: Path) -> None:
    """Write a folder with everything in it: segments, key segments, index, consumers, a gap and quarantine."""
    asyncio.run(_make(folder))


async def _make(folder: Path) -> None:
    storage = await LogStorage.open(folder, options=OPTIONS)
    store = await storage.store(STREAM)
    for first in range(0, FACTS, PER_BATCH):
        await store.append(batch(PER_BATCH, first=first))
    forward = await storage.forward("audit")
    times = np.full(300, 1_700_000_000_000)
    await forward.put_if_absent(batch(300, seed=5), OriginSpan("plant", np.arange(300), times))
    await forward.put_if_absent(
        sealed(altered(messages(2, seed=5, first=3))), OriginSpan("plant", np.arange(300, 302), times[:2])
    )
    await storage.cursors.create(ConsumerSpec("enterprise", STREAM))
    await storage.cursors.create(ConsumerSpec("old", STREAM, required=False))
    await storage.cursors.create(ConsumerSpec("historian", "audit", Buffer.FORWARD, required=False))
    await storage.cursors.commit("enterprise", Confirmation(through=CONFIRMED, ranges=[(900, 950), (1000, 1000)]))
    await storage.cursors.commit("old", Confirmation(through=1989))
    await storage.cursors.retire("old", "replaced")
    await store.truncate_before(TRUNCATED)
    await storage.close()


async def append_more(folder: Path, facts: int = 500) -> None:
    """Open a folder and go on writing."""
    storage = await LogStorage.open(folder, options=OPTIONS)
    store = await storage.store(STREAM)
    for first in range(0, facts, PER_BATCH):
        await store.append(batch(PER_BATCH, seed=9, first=first))
    await storage.close()


def log_path(folder: Path) -> Path:
    """Give the folder of the store buffer."""
    return folder / "streams" / STREAM / "store"


def segments(folder: Path) -> list[Path]:
    """List the segment files of the store buffer."""
    return sorted(log_path(folder).glob("*.seg"))


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def half_a_frame(folder: Path) -> None:
    """Leave half a frame at the tail, as a power loss does."""
    last = segments(folder)[-1]
    data = last.read_bytes()
    with last.open("ab") as file:
        file.write(data[data.index(b"FRM1") :][:300])


def flipped_bit(folder: Path) -> None:
    """Flip a bit in the middle of a sealed segment."""
    path = segments(folder)[2]
    flip(path, path.stat().st_size // 2)


def missing_segment(folder: Path) -> None:
    """Remove a segment that nobody truncated."""
    segments(folder)[3].unlink()


def missing_key_segment(folder: Path) -> None:
    """Remove the keys of a truncated segment."""
    sorted((log_path(folder) / "keys").iterdir())[1].unlink()


def flipped_key_segment(folder: Path) -> None:
    """Flip a bit in the keys of a truncated segment."""
    flip(sorted((log_path(folder) / "keys").iterdir())[0], 60)


def older_index(folder: Path) -> None:
    """Bring back the index of an earlier time."""
    kept = folder.parent / "older-index"
    shutil.copytree(log_path(folder) / "index", kept)
    asyncio.run(append_more(folder))
    shutil.rmtree(log_path(folder) / "index")
    kept.rename(log_path(folder) / "index")


def newer_index(folder: Path) -> None:
    """Bring back the log of an earlier time, but not its index."""
    kept = folder.parent / "older-folder"
    shutil.copytree(folder, kept)
    asyncio.run(append_more(folder, 1_000))
    shutil.rmtree(log_path(kept) / "index")
    (log_path(folder) / "index").rename(log_path(kept) / "index")
    shutil.rmtree(folder)
    kept.rename(folder)


def damaged_index(folder: Path) -> None:
    """Flip a bit in the index."""
    flip(next((log_path(folder) / "index").iterdir()), -20)


def foreign_segment(folder: Path) -> None:
    """Copy a segment of another folder into this one."""
    other = folder.parent / "other"
    make(other)
    shutil.copy(segments(other)[-1], segments(folder)[-1])


def foreign_identity(folder: Path) -> None:
    """Put the identity of another log into this folder."""
    other = folder.parent / "other"
    make(other)
    shutil.copy(log_path(other) / "log.json", log_path(folder) / "log.json")


def future_segment(folder: Path) -> None:
    """Mark a segment as written in a later format."""
    path = segments(folder)[2]
    data = bytearray(path.read_bytes().replace(b"BSFGSEG2", b"BSFGSEG3", 1))
    # Its checksum covers its own mark: one that still fits the old mark would show a flipped bit in the mark.
    size = int.from_bytes(data[8:12], "little")
    data[12:16] = bytes(4)
    data[12:16] = crc32c.crc32c(bytes(data[:size])).to_bytes(4, "little")
    path.write_bytes(bytes(data))


def damaged_notes(folder: Path) -> None:
    """Flip a bit in the middle of the notes."""
    flip(log_path(folder) / "notes.journal", 60)


def damaged_cursors(folder: Path) -> None:
    """Flip a bit in the middle of the cursors."""
    flip(folder / "cursors" / "cursors.journal", 60)


Harm = Callable[[Path], None]
