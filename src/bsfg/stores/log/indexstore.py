"""Keeping the key index on disk: runs are written as they fill, merged in the background, and never synced.

The keys that do not fill a run yet are written from time to time, too, and when the log is closed: whoever opens it
then has few frames to read. Such a file is replaced by the next one, until the run is full.

All of it is derived. A run that is missing, torn, of another log or ahead of it is thrown away and rebuilt from the
log and the key segments.

The memory limit holds at every moment: while keys are added, runs are merged, an index is opened or rebuilt. It counts
the runs in memory, the filters, the first hash of each page of a run on disk, and `WORKING_BYTES_PER_KEY` for each key
that becomes a run, in which the recent keys live and the sorting and merging is done. Filters that do not fit are left
on disk, the oldest first. What can exceed the limit is the working memory, when the limit is smaller than that, the
first hashes (a sixteenth of a byte per key, when even they do not fit), and runs that a full disk refuses.

A run need never be in memory as a whole: it is merged, written and read a stretch at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import crc32c
import numpy as np

from bsfg.stores.log.files import Bytes, Files
from bsfg.stores.log.index import (
    FANOUT,
    HEADER,
    PAGE_KEYS,
    Filter,
    Head,
    KeyIndex,
    Run,
    StoredRun,
    decode_head,
    encode_run,
    filter_bytes,
    filter_pieces,
    filter_shift,
    merged,
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


WORKING_BYTES_PER_KEY = 160
"""So much memory, for each of the ``run_keys`` keys of a run, is left to the recent keys, sorting and merging."""
_SAVED_KEYS, _SAVED_SECONDS = 4_096, 10.0
"""Recent keys are written when so many are not, and so much time has passed; a run of them is at most some 2 MB."""
_CLOSED_KEYS = 1_024
"""At the end fewer are worth a file. Up to so many are soon read from the log, and take no room on a full disk."""
_SORTING_BYTES_PER_KEY = 48
"""What a merge in memory needs beside the runs themselves."""

Source = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""Gives the sorted hashes of the keys of a range of offsets, both ends included, and the offsets beside them."""

ChainAt = Callable[[int], bytes | None]
"""Gives the chain value of the log before an offset, None where no frame begins."""

_MERGES = threading.BoundedSemaphore(4)
"""How many logs of this process merge at once; the next one tries again when more keys come."""


class IndexStore:
    """The key index of one log with its files."""

    def __init__(self, files: Files, folder: str, owner: bytes, memory_bytes: int, run_keys: int) -> None:
        self._files = files
        self._folder = f"{folder}/index"
        self._owner = owner
        self._room = max(0, memory_bytes - WORKING_BYTES_PER_KEY * run_keys)
        self._run_keys = run_keys
        self.keys = KeyIndex(run_keys)
        self.covered = 0
        self._chains: dict[int, bytes] = {}
        self._merging: Future[Callable[[], None]] | None = None
        self._due: list[Run] = []
        self._held: list[Run] = []
        self._reserved = 0
        self._may_merge = True
        self._ended = threading.Event()
        # Half of the recent keys' number is merged at a time, of however many runs.
        step = max(1, run_keys // (2 * FANOUT))
        self._writer = RunWriter(files, self._folder, owner, step, self._ended.is_set)
        self._serial = 0
        self.source: Source | None = None
        """Where keys come from that a file of the index cannot give any more."""
        self._unsaved: list[Run] = []
        self.has_room: Callable[[], bool] = lambda: True
        """Tells whether there is so much room that recent keys may be written; a full run is written anyway."""
        self._recent_name, self._recent_saved, self._saved_at = "", 0, float("-inf")
        self._chain = b""

    def load(self, start: int, end: int, trusted_before: int, chain_at: ChainAt) -> int:
        """Take over the runs on disk that fit the log; give the offset from which keys must be added again.

        Keys from ``start`` on must be covered: runs that begin later are of no use. Runs that end below
        ``trusted_before`` lie in sealed segments; one that reaches further must agree with the chain value of the
        log at its end.
        """
        heads: list[tuple[Head, str]] = []
        for name in self._files.list(self._folder):
            head = self._head(name)
            if head is None or not self._fits(head, end, trusted_before, chain_at):
                self._discard(f"{self._folder}/{name}")
            else:
                heads.append((head, name))
        # The newest are the first to have a place in memory, and of two that end together the wider one.
        heads.sort(key=lambda item: (-item[0].last, item[0].first))
        found: list[Run] = []
        for head, name in heads:
            run = self._read(name, head)
            if run is None:
                self._discard(f"{self._folder}/{name}")
                continue
            run.name = name
            run.mended_by(self._mended)
            self._chains[run.last] = head.chain
            self._reserved += run.nbytes
            found.append(run)
            self._serial = max(self._serial, int(name.split("-")[0]) + 1)
        self._reserved = 0
        self.covered = self._take_contiguous(found, start)
        self._take_recent_back()
        return self.covered

    def _take_recent_back(self) -> None:
        """Let the newest run, if it is not full, be the recent keys again: there is never more than one such."""
        if not self.keys.runs or self.keys.runs[0].count >= self._run_keys:
            return
        run = self.keys.runs[0]
        try:
            self.keys.take_back(run)
        except OSError:
            return  # it lives on disk, and is a run like the others
        self._chain = self._chains.pop(run.last)
        self._recent_name, self._recent_saved = run.name, run.count

    def _head(self, name: str) -> Head | None:
        """Read what a file says of itself; None when it is no run of this log or cannot be read."""
        if not name.endswith(".run") or not name.partition("-")[0].isdigit():
            return None
        try:
            return read_head(self._files, f"{self._folder}/{name}", self._owner)
        except OSError:
            return None

    def _read(self, name: str, head: Head) -> Run | None:
        """Read of a run what there is room for; None when it is not usable, for whatever reason."""
        try:
            return read_run(self._files, f"{self._folder}/{name}", head, self._room - self._reserved)
        except OSError:
            return None

    def _discard(self, path: str) -> None:
        """Remove a file that is of no use; what cannot be removed is passed over at the next start, too."""
        with suppress(OSError):
            self._files.remove(path)

    def _fits(self, head: Head, end: int, trusted_before: int, chain_at: ChainAt) -> bool:
        if head.last >= end:
            return False
        return head.last + 1 <= trusted_before or chain_at(head.last + 1) == head.chain

    def _take_contiguous(self, found: list[Run], start: int) -> int:
        """Keep the widest runs that cover the log from ``start`` on without hole or overlap; drop the rest."""
        at: int | None = None
        for run in sorted(found, key=lambda run: (run.first, -run.last)):
            if run.first == at or (at is None and run.first <= start):
                self.keys.runs.insert(0, run)
                at = run.last + 1
            else:
                self._discard(f"{self._folder}/{run.name}")
        return start if at is None else max(at, start)

    def add(self, hashes: np.ndarray, offsets: np.ndarray, end: int, chain: bytes) -> None:
        """Add the sorted keys of entries up to ``end``, which are durable; ``chain`` is the chain value there."""
        with self.keys.lock:
            self.keys.add(hashes, offsets, self.covered, end - 1)
            self._added(end, chain)

    def add_few(self, hashes: Sequence[int], end: int, chain: bytes) -> None:
        """Add the keys of the last entries before ``end``, in their order."""
        with self.keys.lock:
            self.keys.add_few(hashes, range(end - len(hashes), end), self.covered)
            self._added(end, chain)

    def _added(self, end: int, chain: bytes) -> None:
        self.covered, self._chain = end, chain
        if self.keys.recent_keys >= self._run_keys:
            run = self.keys.take_recent()
            assert run is not None
            self._chains[run.last] = chain
            self._save(run)
            self._replace_recent("", 0)
            self._spill()
            self._may_merge = True
        elif self.source is not None and self.keys.recent_keys >= self._recent_saved + _SAVED_KEYS:
            # Write the recent keys now and then, the first time soon after the log was opened.
            now = time.monotonic()
            if now >= self._saved_at + _SAVED_SECONDS:
                self._saved_at = now
                self._save_recent()
        if self._unsaved:
            self._save_mended()
        # The entries are durable: that some file of the derived index cannot be read or removed is nobody's error.
        with contextlib.suppress(OSError):
            self._merge()

    def _save_recent(self) -> None:
        """Write the keys that do not fill a run yet."""
        if not self.has_room():
            return
        run = self.keys.recent_as_one()
        self._chains[run.last] = self._chain
        self._save(run)
        if run.name:
            self._replace_recent(run.name, run.count)
        del self._chains[run.last]

    def _replace_recent(self, name: str, keys: int) -> None:
        """Take note of the file that has the recent keys now, and remove the one that had them before."""
        if self._recent_name:
            self._discard(f"{self._folder}/{self._recent_name}")
        self._recent_name, self._recent_saved = name, keys

    def _new_name(self, first: int, last: int) -> str:
        self._serial += 1
        return f"{self._serial - 1:010d}-{first}-{last}.run"

    def _save(self, run: Run) -> None:
        """Write a run; when that fails the run simply stays in memory."""
        run.name = self._new_name(run.first, run.last)
        if run.filter is None:
            run.filter = Filter(run.count)
            run.filter.add(run.hashes)
        try:
            self._files.make_folder(self._folder)
            file = self._files.create(f"{self._folder}/{run.name}")
            try:
                file.write(encode_run(run, self._owner, self._chains[run.last]))
            finally:
                file.close()
        except OSError:
            self._discard(f"{self._folder}/{run.name}")
            run.name = ""

    def _used(self) -> int:
        return self._reserved + sum(run.nbytes for run in self.keys.runs)

    def _spill(self) -> None:
        """Let the oldest runs live on disk alone when memory is full, and then without their filters."""
        over = self._used() - self._room
        for run in reversed(self.keys.runs):
            if over > 0 and run.in_memory and run not in self._held:
                if not run.name:
                    self._save(run)
                if run.name:
                    over -= run.nbytes
                    run.live_on_disk(self._files, f"{self._folder}/{run.name}", self._mended)
                    over += run.nbytes
        for run in reversed(self.keys.runs):
            if over > 0 and not run.in_memory and run.filter is not None:
                over -= run.filter.table.nbytes
                run.filter = None

    def _mended(self, run: Run) -> tuple[np.ndarray, np.ndarray] | None:
        """Take the keys of a run from the log, as its file cannot be read; it gets a new one with the next keys."""
        if self.source is None:
            return None
        arrays = self.source(run.first, run.last)
        self._discard(f"{self._folder}/{run.name}")
        run.name = ""
        self._unsaved.append(run)
        return arrays

    def _save_mended(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        for run in unsaved:
            if run in self.keys.runs and run not in self._due:
                self._save(run)

    def _merge(self) -> None:
        """Finish a merge that is done, and begin one that is due; sorting releases the interpreter."""
        if self._merging is not None:
            if not self._merging.done():
                return
            merging, self._merging = self._merging, None
            self._due, self._held, self._reserved = [], [], 0
            if merging.exception() is not None:
                # A run on disk cannot be read, or there is no room for another. More runs cost time and nothing else;
                # it is tried again when there is one more.
                self._may_merge = False
                return
            merging.result()()
        due = self.keys.mergeable() if self._may_merge and self._merging is None else []
        if due:
            self._begin_merge(due)

    def _begin_merge(self, due: list[Run]) -> None:
        """Merge in memory when there is room to do so, and otherwise from disk to disk."""
        self._due, floor = due, self.keys.floor
        count = sum(run.count for run in due)
        table_bytes, free = filter_bytes(count), self._room - self._used()
        if all(run.in_memory for run in due) and _SORTING_BYTES_PER_KEY * count + table_bytes <= free:
            self._held, self._reserved = due, _SORTING_BYTES_PER_KEY * count + table_bytes

            def in_memory() -> Callable[[], None]:
                new = merged(due, with_filter=True, floor=floor)
                return lambda: self._merged_in_memory(due, new)

            self._start(in_memory)
            return
        with_filter = table_bytes + count // 16 <= free
        self._reserved = table_bytes if with_filter else 0
        name = self._new_name(min(run.first for run in due), max(run.last for run in due))
        chain, names = self._chains[max(run.last for run in due)], [run.name for run in due]

        def on_disk() -> Callable[[], None]:
            new = self._writer.merge(due, name, chain, floor=floor, with_filter=with_filter)
            return lambda: self._merged_on_disk(due, names, new)

        self._start(on_disk)

    def _start(self, work: Callable[[], Callable[[], None]]) -> None:
        """Do it in a thread; when there is none to be had now, it is tried again with the next keys."""
        if not _MERGES.acquire(blocking=False):
            self._due, self._held, self._reserved = [], [], 0
            return
        self._merging = Future()
        try:
            threading.Thread(target=_do, args=(work, self._merging), name="bsfg-index", daemon=True).start()
        except RuntimeError:
            self._due, self._held, self._reserved, self._merging = [], [], 0, None
            _MERGES.release()

    def _merged_in_memory(self, old: list[Run], new: Run) -> None:
        self._save(new)
        self._replace(old, new)

    def _merged_on_disk(self, old: list[Run], names: list[str], new: Run) -> None:
        if [run.name for run in old] != names:
            # One of them was made anew while it was read: what was merged may lack keys of it.
            self._discard(f"{self._folder}/{new.name}")
            return
        new.mended_by(self._mended)
        self._replace(old, new)
        # Its parts have left memory: there may be room for it now.
        needed = 16 * new.count + filter_bytes(new.count)
        if needed > self._room - self._used():
            return
        self._due, self._reserved = [new], needed
        path = f"{self._folder}/{new.name}"

        def read() -> Callable[[], None]:
            head = read_head(self._files, path, self._owner)
            whole = read_run(self._files, path, head, needed) if head is not None else None
            return lambda: new.live_in_memory(whole) if whole is not None else None

        self._start(read)

    def _replace(self, old: list[Run], new: Run) -> None:
        self.keys.replace(old, new)
        for run in old:
            if run.last != new.last:
                self._chains.pop(run.last, None)
            if run.name:
                self._discard(f"{self._folder}/{run.name}")
        self._forget(self.keys.floor)
        self._spill()

    def forget_before(self, offset: int) -> None:
        """Forget the keys of offsets below this one, and drop the runs that hold no others."""
        with self.keys.lock:
            self._forget(offset)

    def _forget(self, offset: int) -> None:
        # Runs that are being merged are kept until they are; that may take long, and nobody should wait for it.
        for run in self.keys.forget_before(offset, self._due):
            if run.name:
                self._discard(f"{self._folder}/{run.name}")

    def close(self) -> None:
        """Write what is not written, and wait for the background thread; what it was merging is simply not used."""
        with self.keys.lock:
            if self.keys.recent_keys >= self._recent_saved + _CLOSED_KEYS:
                self._save_recent()
        self._ended.set()
        if self._merging is not None:
            self._merging.exception()


def _do(work: Callable[[], Callable[[], None]], merging: Future[Callable[[], None]]) -> None:
    """Merge in a thread that ends with it, so that an idle log has none."""
    try:
        merging.set_result(work())
    except BaseException as error:
        merging.set_exception(error)
    finally:
        _MERGES.release()
