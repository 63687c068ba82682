"""The arrays of an index run that live on disk alone: read page by page as they are needed, never mapped.

A page that cannot be read is an error with a code; under a memory map it would be the end of the process.
"""

from __future__ import annotations

import errno

import numpy as np

from bsfg.stores.log.damage import patiently
from bsfg.stores.log.files import Files

PAGE_KEYS = 128
"""One page of hashes is 1 KiB; the first hash of each page stays in memory."""
_WORTH_READING_PAGES = 4
"""So many pages between two that are wanted are read with them."""
_PROBES_AT_ONCE = 128
"""Pages are read for so many hashes at a time, so that a large batch needs no more memory than a small one."""


class StoredRun:
    """Sorted hashes and the offsets beside them, in a file."""

    def __init__(self, files: Files, path: str, hashes_at: int, count: int, first_of_page: np.ndarray) -> None:
        self._files, self._path, self._at = files, path, hashes_at
        self.count = count
        self._first_of_page = first_of_page

    @property
    def nbytes(self) -> int:
        """The bytes that it still occupies in memory."""
        return int(self._first_of_page.nbytes)

    def arrays(self, first: int = 0, end: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Read a stretch of it, or all."""
        part = [(first, self.count if end is None else min(end, self.count))]
        hashes = self._sorted(self._values(np.uint64, self._at, part))
        return hashes, self._values(np.int64, self._at + 8 * self.count, part)

    def candidates(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give (position in ``wanted``, offset) for every match; ``wanted`` are sorted."""
        if len(wanted) <= _PROBES_AT_ONCE:
            return self._some_candidates(wanted)
        starts = range(0, len(wanted), _PROBES_AT_ONCE)
        found = [self._some_candidates(wanted[at : at + _PROBES_AT_ONCE]) for at in starts]
        rows = np.concatenate([rows + at for at, (rows, _) in zip(starts, found, strict=True)])
        return rows, np.concatenate([offsets for _, offsets in found])

    def _some_candidates(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stretches = self._stretches(wanted)
        hashes = self._checked(self._values(np.uint64, self._at, stretches), stretches)
        left = np.searchsorted(hashes, wanted, side="left")
        counts = np.searchsorted(hashes, wanted, side="right") - left
        matched = np.flatnonzero(counts)
        if not len(matched):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        left, counts = left[matched], counts[matched]
        places = np.repeat(left, counts) + np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = self._values(np.int64, self._at + 8 * self.count, stretches)
        return np.repeat(matched, counts), offsets[places]

    def _checked(self, hashes: np.ndarray, stretches: list[tuple[int, int]]) -> np.ndarray:
        """Give hashes that were read, if they can be those that were written.

        The pages of a sorted array, one after the other, are sorted, and the first hash of each is known. A page that
        is not what it was would hide keys: it counts as one that cannot be read.
        """
        pages = [page for first, end in stretches for page in range(first // PAGE_KEYS, -(-end // PAGE_KEYS))]
        starts = np.cumsum([0, *(min(PAGE_KEYS, self.count - PAGE_KEYS * page) for page in pages[:-1])])
        return self._sorted(hashes, sound=bool((hashes[starts] == self._first_of_page[pages]).all()))

    def _sorted(self, hashes: np.ndarray, *, sound: bool = True) -> np.ndarray:
        if not sound or (hashes[1:] < hashes[:-1]).any():
            raise OSError(errno.EIO, "a page of the key index is damaged", self._path)
        return hashes

    def _stretches(self, wanted: np.ndarray) -> list[tuple[int, int]]:
        """Give the stretches of the arrays, in whole pages, that hold what is wanted if anything does."""
        # Equal hashes may begin on the page before the one that starts with them.
        low = np.maximum(np.searchsorted(self._first_of_page, wanted, side="left") - 1, 0)
        high = np.maximum(np.searchsorted(self._first_of_page, wanted, side="right") - 1, 0)
        result: list[tuple[int, int]] = []
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            if result and first <= result[-1][1] + _WORTH_READING_PAGES:
                result[-1] = (result[-1][0], max(result[-1][1], last + 1))
            else:
                result.append((first, last + 1))
        return [(first * PAGE_KEYS, min(end * PAGE_KEYS, self.count)) for first, end in result]

    def _values(self, kind: type, at: int, stretches: list[tuple[int, int]]) -> np.ndarray:
        wanted = [(at + 8 * first, 8 * (end - first)) for first, end in stretches]
        parts = patiently(lambda: self._files.read_parts(self._path, wanted))
        for part, (start, count) in zip(parts, wanted, strict=True):
            if len(part) < count:
                raise OSError(errno.EIO, f"the file ends before byte {start + count}", self._path)
        return np.frombuffer(b"".join(parts), dtype=kind)
