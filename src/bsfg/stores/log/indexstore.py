"""Keeping the key index on disk: runs are written as they fill, merged in the background, and never synced.

All of it is derived. A run that is missing, torn, of another log or ahead of it is thrown away and rebuilt from the
log and the key segments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np

from bsfg.stores.log.files import Files
from bsfg.stores.log.index import KeyIndex, Run, decode_run, encode_run, merged

Source = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""Gives the sorted hashes of the keys of a range of offsets, both ends included, and the offsets beside them."""

_MERGES = threading.BoundedSemaphore(4)
"""How many logs of this process merge at once; the next one tries again when more keys come."""


class IndexStore:
    """The key index of one log with its files."""

    def __init__(self, files: Files, folder: str, owner: bytes, memory_bytes: int, run_keys: int) -> None:
        self._files = files
        self._folder = f"{folder}/index"
        self._owner = owner
        self._memory_bytes = memory_bytes
        self._run_keys = run_keys
        self.keys = KeyIndex(run_keys)
        self.covered = 0
        self._chains: dict[int, bytes] = {}
        self._merging: Future[tuple[list[Run], Run]] | None = None
        self._due: list[Run] = []
        self._may_merge = True
        self._serial = 0
        self.source: Source | None = None
        """Where keys come from that a file of the index cannot give any more."""
        self._unsaved: list[Run] = []

    def load(self, start: int, end: int, trusted_before: int, chain_at: dict[int, bytes]) -> int:
        """Take over the runs on disk that fit the log; give the offset from which keys must be added again.

        Keys from ``start`` on must be covered: runs that begin later are of no use. Runs that end below
        ``trusted_before`` lie in sealed segments; one that reaches further must agree with the chain value of the
        log at its end.
        """
        found: list[tuple[Run, str]] = []
        for name in self._files.list(self._folder):
            decoded = None
            if name.endswith(".run") and name.split("-")[0].isdigit():
                decoded = self._read(f"{self._folder}/{name}")
            if decoded is None or not self._fits(decoded, end, trusted_before, chain_at):
                self._discard(f"{self._folder}/{name}")
                continue
            run, chain = decoded
            run.name = name
            self._chains[run.last] = chain
            found.append((run, name))
            self._serial = max(self._serial, int(name.split("-")[0]) + 1)
        self.covered = self._take_contiguous(found, start)
        return self.covered

    def _read(self, path: str) -> tuple[Run, bytes] | None:
        """Read a run and the chain value it is bound to; None when it is not usable, for whatever reason."""
        try:
            return decode_run(self._files.read(path), self._owner)
        except OSError:
            return None

    def _discard(self, path: str) -> None:
        """Remove a file that is of no use; what cannot be removed is passed over at the next start, too."""
        with suppress(OSError):
            self._files.remove(path)

    def _fits(self, decoded: tuple[Run, bytes], end: int, trusted_before: int, chain_at: dict[int, bytes]) -> bool:
        run, chain = decoded
        if run.last >= end:
            return False
        return run.last + 1 <= trusted_before or chain_at.get(run.last + 1) == chain

    def _take_contiguous(self, found: list[tuple[Run, str]], start: int) -> int:
        """Keep the widest runs that cover the log from ``start`` on without hole or overlap; drop the rest."""
        found.sort(key=lambda item: (item[0].first, -item[0].last))
        at: int | None = None
        for run, name in found:
            if run.first == at or (at is None and run.first <= start):
                self.keys.runs.insert(0, self._placed(run))
                at = run.last + 1
            else:
                self._discard(f"{self._folder}/{name}")
        return start if at is None else max(at, start)

    def _placed(self, run: Run) -> Run:
        """Bring a run into memory while the limit allows it; older ones are read from disk as they are needed."""
        used = sum(item.nbytes for item in self.keys.runs)
        # Copies, so that the bytes of the whole file can go.
        if run.filter is not None:
            run.filter.table = run.filter.table.copy()
        if used + run.nbytes <= self._memory_bytes:
            run.hashes, run.offsets = run.hashes.copy(), run.offsets.copy()
        else:
            run.live_on_disk(self._files, f"{self._folder}/{run.name}", self._mended)
        return run

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
        self.covered = end
        if self.keys.recent_keys >= self._run_keys:
            run = self.keys.take_recent()
            assert run is not None
            self._chains[run.last] = chain
            self._save(run)
        if self._unsaved:
            self._save_mended()
        # The entries are durable: that some file of the derived index cannot be read or removed is nobody's error.
        with contextlib.suppress(OSError):
            self._merge()

    def _save(self, run: Run) -> None:
        """Write a run; when that fails the run simply stays in memory."""
        run.name = f"{self._serial:010d}-{run.first}-{run.last}.run"
        self._serial += 1
        path = f"{self._folder}/{run.name}"
        try:
            self._files.make_folder(self._folder)
            file = self._files.create(path)
            try:
                file.write(encode_run(run, self._owner, self._chains[run.last]))
            finally:
                file.close()
            self._spill()
        except OSError:
            run.name = ""

    def _spill(self) -> None:
        """Let the oldest runs live on disk alone when memory is full."""
        used = sum(run.nbytes for run in self.keys.runs)
        for run in reversed(self.keys.runs):
            if used <= self._memory_bytes:
                return
            # A merge that is under way reads its runs in another thread.
            if run.in_memory and run.name and run not in self._due:
                used -= run.nbytes
                run.live_on_disk(self._files, f"{self._folder}/{run.name}", self._mended)
                used += run.nbytes

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
            self._finish_merge(self._merging)
        due = self.keys.mergeable() if self._may_merge else []
        if due and _MERGES.acquire(blocking=False):
            self._due, self._merging = due, Future()
            work = threading.Thread(target=_merge_in, args=(self._merging, due, self.keys.floor), daemon=True)
            work.name = "bsfg-index"
            try:
                work.start()
            except RuntimeError:  # the process has no thread left: later, perhaps
                self._due, self._merging = [], None
                _MERGES.release()

    def _finish_merge(self, merging: Future[tuple[list[Run], Run]]) -> None:
        """Put the result of a merge that is done in the place of its parts."""
        failure = merging.exception()
        self._merging, self._due = None, []
        if failure is not None:
            # A run on disk cannot be read. More runs cost time and nothing else; the next start makes new ones.
            self._may_merge = False
            return
        old, new = merging.result()
        self._save(new)
        self.keys.replace(old, new)
        for run in old:
            if run.last != new.last:
                self._chains.pop(run.last, None)
            if run.name:
                self._discard(f"{self._folder}/{run.name}")
        self.forget_before(self.keys.floor)
        self._spill()

    def forget_before(self, offset: int) -> None:
        """Forget the keys of offsets below this one, and drop the runs that hold no others."""
        with self.keys.lock:
            # Runs that are being merged stay until that is done: nobody waits for it, and they are no candidates.
            for run in self.keys.forget_before(offset, keep=self._due):
                if run.name:
                    self._discard(f"{self._folder}/{run.name}")

    def close(self) -> None:
        """Wait for the background thread; what it was merging is simply not used."""
        if self._merging is not None:
            self._merging.exception()


def _merge_in(merging: Future[tuple[list[Run], Run]], due: list[Run], floor: int) -> None:
    """Merge runs in a thread that ends with it, so that an idle log has none."""
    try:
        merging.set_result((due, merged(due, with_filter=True, floor=floor)))
    except BaseException as error:
        merging.set_exception(error)
    finally:
        _MERGES.release()
