"""Files of index runs that never are in memory as a whole: merged, written and read a stretch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import crc32c
import numpy as np

from bsfg.stores.log.files import Bytes, Files
from bsfg.stores.log.index import (
    HEADER,
    PAGE_KEYS,
    Filter,
    Head,
    Run,
    StoredRun,
    decode_head,
    filter_bytes,
    filter_pieces,
    filter_shift,
)

PART = ".part"
"""What ends the name of a file that is not a run yet; a crash may leave it, and the next start removes it."""
_COPIED_BYTES = 1 << 15
_NO_HASHES = np.empty(0, dtype=np.uint64)
_NO_OFFSETS = np.empty(0, dtype=np.int64)


class _Cursor:
    """Where a merge stands in one run, and the stretch that was read there."""

    def __init__(self, run: Run, floor: int, keys_at_once: int) -> None:
        self._run, self._floor, self._step, self._at = run, floor, keys_at_once, 0
        self.hashes, self.offsets = _NO_HASHES, _NO_OFFSETS

    def filled(self) -> bool:
        """Read on when nothing is left of what was read; tell whether there is anything."""
        while not len(self.hashes) and self._at < self._run.count:
            hashes, offsets = self._run.arrays(self._at, self._at + self._step)
            # Copies: a run that leaves memory meanwhile is not held here.
            self.hashes, self.offsets = hashes.copy(), offsets.copy()
            self._at += self._step
            if self._run.first < self._floor:
                kept = self.offsets >= self._floor
                self.hashes, self.offsets = self.hashes[kept], self.offsets[kept]
        return bool(len(self.hashes))

    def take(self, bound: np.uint64) -> tuple[np.ndarray, np.ndarray]:
        """Take what was read up to a hash."""
        end = int(np.searchsorted(self.hashes, bound, side="right"))
        taken = self.hashes[:end], self.offsets[:end]
        self.hashes, self.offsets = self.hashes[end:], self.offsets[end:]
        return taken


def merged_stretches(runs: Sequence[Run], *, floor: int, keys_at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Merge runs, ``keys_at_once`` of each at a time, without the keys of offsets below ``floor``."""
    cursors = [_Cursor(run, floor, keys_at_once) for run in runs]
    while cursors := [cursor for cursor in cursors if cursor.filled()]:
        # Up to the first of the last hashes that were read nothing can come any more that is smaller.
        bound = min(cursor.hashes[-1] for cursor in cursors)
        parts = [cursor.take(bound) for cursor in cursors]
        hashes, offsets = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        order = np.argsort(hashes, kind="stable")
        yield hashes[order], offsets[order]


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes merged runs into a folder as they come out, bound to the secret of their log."""

    files: Files
    folder: str
    owner: bytes
    keys_at_once: int
    ended: Callable[[], bool]

    def merge(self, runs: Sequence[Run], name: str, chain: bytes, *, floor: int, with_filter: bool) -> Run:
        """Merge runs into a file that has its name only when it is whole; ``with_filter`` keeps its filter in memory.

        Hashes and offsets are gathered in files of their own, because a run has all hashes before all offsets, and its
        checksum before both.
        """
        path = f"{self.folder}/{name}"
        parts = [f"{path}{kind}{PART}" for kind in (".hashes", ".offsets", "")]
        try:
            count, pages = self._gather(parts[0], parts[1], runs, floor)
            table = Filter(count) if with_filter else None
            first, last = min(run.first for run in runs), max(run.last for run in runs)
            head = Head(0, filter_shift(count), count, first, last, self.owner, chain)
            self._assemble(parts, head, table)
            self.files.rename(parts[2], path)
        finally:
            for part in parts:
                with suppress(OSError):
                    self.files.remove(part)
        stored = StoredRun(self.files, path, HEADER.size, count, pages)
        return Run(_NO_HASHES, _NO_OFFSETS, first, last, table, name, stored)

    def _gather(self, hashes_path: str, offsets_path: str, runs: Sequence[Run], floor: int) -> tuple[int, np.ndarray]:
        """Write the merged hashes and offsets; give how many there are, and the first hash of every page."""
        count, pages = 0, [_NO_HASHES]
        hashes_file = self.files.create(hashes_path)
        try:
            offsets_file = self.files.create(offsets_path)
            try:
                for hashes, offsets in merged_stretches(runs, floor=floor, keys_at_once=self.keys_at_once):
                    if self.ended():
                        raise InterruptedError("the index is being closed")
                    hashes_file.write([hashes.tobytes()])
                    offsets_file.write([offsets.tobytes()])
                    pages.append(hashes[-count % PAGE_KEYS :: PAGE_KEYS].copy())
                    count += len(hashes)
            finally:
                offsets_file.close()
        finally:
            hashes_file.close()
        return count, np.concatenate(pages)

    def _assemble(self, parts: Sequence[str], head: Head, table: Filter | None) -> None:
        """Write the run from its parts, and fill its filter."""

        def body() -> Iterator[Bytes]:
            for path in parts[:2]:
                yield from pieces(self.files, path, 0, 8 * head.keys)
            hashes = (np.frombuffer(piece, dtype=np.uint64) for piece in pieces(self.files, parts[0], 0, 8 * head.keys))
            at = 0
            for piece in filter_pieces(hashes, head.keys):
                if table is not None:
                    table.table[at : at + len(piece)] = piece
                at += len(piece)
                yield piece.tobytes()

        crc = crc32c.crc32c(head.encoded(0))
        for piece in body():
            crc = crc32c.crc32c(piece, crc)
        file = self.files.create(parts[2])
        try:
            file.write([head.encoded(crc)])
            for piece in body():
                if self.ended():
                    raise InterruptedError("the index is being closed")
                file.write([piece])
        finally:
            file.close()


def pieces(files: Files, path: str, start: int, end: int) -> Iterator[bytes]:
    """Read a stretch of a file in pieces of whole pages; it is shorter when the file is."""
    for at in range(start, end, _COPIED_BYTES):
        yield files.read_at(path, at, min(_COPIED_BYTES, end - at))


def read_head(files: Files, path: str, owner: bytes) -> Head | None:
    """Read the head of a run's file; None when it is not one of this owner."""
    return decode_head(files.read_at(path, 0, HEADER.size), files.size(path), owner)


def read_run(files: Files, path: str, head: Head, room_bytes: int) -> Run | None:
    """Check a run's file and read as much of it as there is room for: all, the filter, or nothing; None if damaged."""
    offsets_at, table_at = HEADER.size + 8 * head.keys, HEADER.size + 16 * head.keys
    table_bytes = filter_bytes(head.keys)
    crc = crc32c.crc32c(head.encoded(0))
    if 16 * head.keys + table_bytes <= room_bytes:
        wanted = [(HEADER.size, 8 * head.keys), (offsets_at, 8 * head.keys), (table_at, table_bytes)]
        parts = files.read_parts(path, wanted)
        for part in parts:
            crc = crc32c.crc32c(part, crc)
        if crc != head.crc:
            return None
        hashes, offsets = np.frombuffer(parts[0], dtype=np.uint64), np.frombuffer(parts[1], dtype=np.int64)
        return Run(hashes, offsets, head.first, head.last, Filter(head.keys, parts[2]))
    pages = [_NO_HASHES]
    for piece in pieces(files, path, HEADER.size, offsets_at):
        crc = crc32c.crc32c(piece, crc)
        pages.append(np.frombuffer(piece[: len(piece) & -8], dtype=np.uint64)[::PAGE_KEYS].copy())
    stored = StoredRun(files, path, HEADER.size, head.keys, np.concatenate(pages))
    for piece in pieces(files, path, offsets_at, table_at):
        crc = crc32c.crc32c(piece, crc)
    table = None
    if stored.nbytes + table_bytes <= room_bytes:
        data = files.read_at(path, table_at, table_bytes)
        crc, table = crc32c.crc32c(data, crc), Filter(head.keys, data)
    else:
        for piece in pieces(files, path, table_at, table_at + table_bytes):
            crc = crc32c.crc32c(piece, crc)
    if crc != head.crc:
        return None
    return Run(_NO_HASHES, _NO_OFFSETS, head.first, head.last, table, stored=stored)
