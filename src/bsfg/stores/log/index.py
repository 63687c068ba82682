"""The key index: from the hash of a key to the offsets that may hold it, in memory and in runs on disk."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import crc32c
import numpy as np

from bsfg.stores.log.damage import is_damage, patiently
from bsfg.stores.log.files import Bytes, Files

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


FANOUT = 8
HEADER = struct.Struct("<8sIIQqq16s32s")
_MAGIC = b"BSFGRUN1"
_SCALAR_BELOW = 9
_NEWEST_KEYS = 1024
_PIECE_BYTES = 1 << 14
_EMPTY_ROWS = np.empty(0, dtype=np.int64)
_NO_HASHES = np.empty(0, dtype=np.uint64)


class Filter:
    """Two bits in one byte per key, about two bytes per key: wrong for one absent key in forty or so."""

    def __init__(self, keys: int, bits: Bytes | None = None) -> None:
        self.shift = filter_shift(keys)
        self.table = (
            np.zeros(filter_bytes(keys), dtype=np.uint8) if bits is None else np.frombuffer(bits, dtype=np.uint8)
        )

    def add(self, hashes: np.ndarray) -> None:
        """Add sorted hashes."""
        if not len(hashes):
            return
        _mark(self.table, (hashes >> np.uint64(self.shift)).astype(np.int64), _masks(hashes))

    def maybe(self, hashes: np.ndarray) -> np.ndarray:
        """Give the positions of the hashes that may be there."""
        masks = _masks(hashes)
        found = self.table[(hashes >> np.uint64(self.shift)).astype(np.int64)]
        return np.flatnonzero((found & masks) == masks)

    def maybe_one(self, hash_: int) -> bool:
        """Answer for one hash, without the cost of array operations."""
        mask = (1 << (hash_ & 7)) | (1 << ((hash_ >> 3) & 7))
        return int(self.table[hash_ >> self.shift]) & mask == mask


def filter_bytes(keys: int) -> int:
    """Give the size of the filter of so many keys."""
    return 1 << max(10, (2 * keys - 1).bit_length())


def filter_shift(keys: int) -> int:
    """Give how far a hash is shifted to become its place in the filter of so many keys."""
    return 64 - filter_bytes(keys).bit_length() + 1


def filter_pieces(chunks: Iterable[np.ndarray], keys: int) -> Iterator[np.ndarray]:
    """Make the filter of so many sorted hashes piece by piece: they mark it from its beginning to its end."""
    size = filter_bytes(keys)
    shift, base, wide = np.uint64(filter_shift(keys)), 0, min(size, _PIECE_BYTES)
    piece = np.zeros(wide, dtype=np.uint8)
    for hashes in chunks:
        places, masks = (hashes >> shift).astype(np.int64), _masks(hashes)
        while len(places):
            inside = int(np.searchsorted(places, base + wide))
            if inside:
                _mark(piece, places[:inside] - base, masks[:inside])
            places, masks = places[inside:], masks[inside:]
            if len(places):
                yield piece
                piece, base = np.zeros(wide, dtype=np.uint8), base + wide
    yield piece
    for _ in range(base + wide, size, wide):
        yield np.zeros(wide, dtype=np.uint8)


def _mark(table: np.ndarray, places: np.ndarray, masks: np.ndarray) -> None:
    # The places are sorted, so equal ones are neighbours and one pass combines them.
    starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    table[places[starts]] |= np.bitwise_or.reduceat(masks, starts)


def _masks(hashes: np.ndarray) -> np.ndarray:
    low = (hashes & np.uint64(63)).astype(np.uint8)
    return np.asarray((np.uint8(1) << (low & np.uint8(7))) | (np.uint8(1) << (low >> np.uint8(3))), dtype=np.uint8)


Mend = Callable[["Run"], tuple[np.ndarray, np.ndarray] | None]
"""Gives hashes and offsets of a run whose file cannot be read any more; None when nothing else has them."""


@dataclass(slots=True, eq=False)
class Run:
    """Sorted hashes with their offsets, covering the offsets from ``first`` to ``last``.

    The arrays of a run that lives on disk are empty here; ``stored`` reads them. It may have no filter in memory, and
    is then asked by its pages.
    """

    hashes: np.ndarray
    offsets: np.ndarray
    first: int
    last: int
    filter: Filter | None = None
    name: str = ""
    stored: StoredRun | None = None
    _mend: Mend | None = None

    @property
    def count(self) -> int:
        """How many keys it has."""
        return self.stored.count if self.stored is not None else len(self.hashes)

    @property
    def in_memory(self) -> bool:
        """Whether its arrays are in memory."""
        return self.stored is None

    @property
    def nbytes(self) -> int:
        """The bytes it occupies in memory."""
        table = self.filter.table.nbytes if self.filter else 0
        arrays = self.hashes.nbytes + self.offsets.nbytes if self.stored is None else self.stored.nbytes
        return int(arrays + table)

    def arrays(self, first: int = 0, end: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Give hashes and offsets, or a stretch of them, from disk when they are there."""
        # The run may begin to live on disk at this moment, in another thread.
        stored, hashes, offsets = self.stored, self.hashes, self.offsets
        if stored is None and self.stored is None:
            return hashes[first:end], offsets[first:end]
        return self.arrays(first, end) if stored is None else stored.arrays(first, end)

    def live_on_disk(self, files: Files, path: str, mend: Mend | None = None) -> None:
        """Let the arrays go; the file that was written from them has them, and ``mend`` makes them anew without it."""
        self._mend = mend
        self.stored = StoredRun(files, path, HEADER.size, len(self.hashes), self.hashes[::PAGE_KEYS].copy())
        self.hashes, self.offsets = _NO_HASHES, _EMPTY_ROWS

    def live_in_memory(self, whole: Run) -> None:
        """Take what was read from the file."""
        self.hashes, self.offsets, self.filter, self.stored = whole.hashes, whole.offsets, whole.filter, None

    def mended_by(self, mend: Mend) -> None:
        """Name who makes the arrays anew when the file cannot be read."""
        self._mend = mend

    def _found_on_disk(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Look into the file; None when it cannot be read, after which the arrays are in memory again."""
        assert self.stored is not None
        try:
            rows, offsets = self.stored.candidates(wanted)
            if ((offsets < self.first) | (offsets > self.last)).any():
                raise OSError(errno.EIO, "the key index names offsets that it does not cover", self.name)
            return rows, offsets
        except OSError as error:
            lost = is_damage(error) or isinstance(error, FileNotFoundError)
            arrays = self._mend(self) if lost and self._mend is not None else None
            if arrays is None:
                raise
            self.hashes, self.offsets = arrays
            self.stored = None
            return None

    def holds(self, hash_: int) -> bool:
        """Tell whether a hash is among these."""
        return bool(self.offsets_of(hash_))

    def offsets_of(self, hash_: int) -> list[int]:
        """Give the offsets beside one hash."""
        if self.stored is not None:
            found = self._found_on_disk(np.array([hash_], dtype=np.uint64))
            if found is not None:
                return [int(offset) for offset in found[1]]
        at, result = int(np.searchsorted(self.hashes, np.uint64(hash_))), []
        while at < len(self.hashes) and int(self.hashes[at]) == hash_:
            result.append(int(self.offsets[at]))
            at += 1
        return result

    def candidates(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give (position in ``hashes``, offset) for every match; ``hashes`` are sorted."""
        positions = self.filter.maybe(hashes) if self.filter else np.arange(len(hashes))
        if not len(positions):
            return _EMPTY_ROWS, _EMPTY_ROWS
        wanted = hashes[positions]
        if self.stored is not None:
            found = self._found_on_disk(wanted)
            if found is not None:
                return positions[found[0]], found[1]
        left = np.searchsorted(self.hashes, wanted, side="left")
        inside = left < len(self.hashes)
        inside[inside] = self.hashes[left[inside]] == wanted[inside]
        if not inside.any():
            return _EMPTY_ROWS, _EMPTY_ROWS
        positions, left, wanted = positions[inside], left[inside], wanted[inside]
        counts = np.searchsorted(self.hashes, wanted, side="right") - left
        if int(counts.max()) == 1:
            return positions, self.offsets[left]
        spread = np.repeat(left, counts) + np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(positions, counts), self.offsets[spread]


def merged(runs: list[Run], *, with_filter: bool, floor: int = 0) -> Run:
    """Merge runs into one, without the keys of offsets below ``floor``."""
    parts = [run.arrays() for run in runs]
    hashes, offsets = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    if floor > min(run.first for run in runs):
        kept = offsets >= floor
        hashes, offsets = hashes[kept], offsets[kept]
    # A stable sort finds the sorted stretches and merges them.
    order = np.argsort(hashes, kind="stable")
    hashes, offsets = hashes[order], offsets[order]
    table = None
    if with_filter:
        table = Filter(len(hashes))
        table.add(hashes)
    return Run(hashes, offsets, min(run.first for run in runs), max(run.last for run in runs), table)


class KeyIndex:
    """All runs of one log, newest first, and the recent keys in memory.

    The writer changes it and readers look keys up in it, which may sort the newest ones: every look and every change
    holds ``lock``, which is never held during a sync. ``floor`` is where the key horizon stands: keys of offsets below
    it are forgotten and are no candidates, in whatever run they still lie.
    """

    def __init__(self, run_keys: int) -> None:
        self._run_keys = run_keys
        self.lock = threading.RLock()
        self.floor = 0
        self.recent: list[Run] = []
        self.recent_keys = 0
        self._newest: dict[int, list[int]] = {}
        self._newest_first: int | None = None
        self._recent_filter = Filter(run_keys)
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return self.recent_keys + sum(run.count for run in self.runs)

    @property
    def nbytes(self) -> int:
        """The bytes of all runs in memory; of those on disk that is the filter."""
        recent = self._recent_filter.table.nbytes + sum(run.nbytes for run in self.recent)
        return int(recent + sum(run.nbytes for run in self.runs))

    def add(self, hashes: np.ndarray, offsets: np.ndarray, first: int, last: int) -> None:
        """Add the keys of the offsets from ``first`` to ``last``; hashes are sorted, offsets stand beside them."""
        if not len(hashes):
            return
        if len(hashes) < _SCALAR_BELOW:
            self.add_few(hashes.tolist(), offsets.tolist(), first)
            return
        self.recent_keys += len(hashes)
        self._sort_newest()
        self._add_sorted(Run(hashes, offsets, first, last))

    def add_few(self, hashes: Iterable[int], offsets: Iterable[int], first: int) -> None:
        """Add a few keys; ``first`` is the offset from which on there are none yet."""
        for value, offset in zip(hashes, offsets, strict=True):
            self._newest.setdefault(value, []).append(offset)
            self.recent_keys += 1
        self._newest_first = first if self._newest_first is None else self._newest_first
        if len(self._newest) >= _NEWEST_KEYS:
            self._sort_newest()

    def may_hold(self, hash_: int) -> bool:
        """Tell whether a key may be there: one has this hash, forgotten ones included."""
        with self.lock:
            if hash_ in self._newest:
                return True
            if self._recent_filter.maybe_one(hash_) and any(run.holds(hash_) for run in self.recent):
                return True
            return any((run.filter is None or run.filter.maybe_one(hash_)) and run.holds(hash_) for run in self.runs)

    def _sort_newest(self) -> None:
        """Turn the newest keys, which came one by one, into a sorted array like the others."""
        if self._newest_first is None:
            return
        pairs = sorted((value, offset) for value, offsets in self._newest.items() for offset in offsets)
        hashes = np.array([value for value, _ in pairs], dtype=np.uint64)
        offsets = np.array([offset for _, offset in pairs], dtype=np.int64)
        first, self._newest, self._newest_first = self._newest_first, {}, None
        self._add_sorted(Run(hashes, offsets, first, int(offsets.max())))

    def _add_sorted(self, run: Run) -> None:
        self._recent_filter.add(run.hashes)
        self.recent.append(run)
        while len(self.recent) > 1 and 2 * len(self.recent[-1].hashes) >= len(self.recent[-2].hashes):
            newer, older = self.recent.pop(), self.recent.pop()
            self.recent.append(merged([older, newer], with_filter=False))

    def candidates(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give (position in ``hashes``, offset) for every entry that may have one of the sorted hashes."""
        with self.lock:
            rows, offsets = self._found(hashes)
            if self.floor and len(offsets):
                known = offsets >= self.floor
                return rows[known], offsets[known]
            return rows, offsets

    def _found(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(hashes) < _SCALAR_BELOW:
            return self._candidates_few(hashes)
        self._sort_newest()
        found = list(self._matches(hashes))
        if not found:
            return _EMPTY_ROWS, _EMPTY_ROWS
        return np.concatenate([rows for rows, _ in found]), np.concatenate([offsets for _, offsets in found])

    def _matches(self, hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        maybe = self._recent_filter.maybe(hashes)
        if len(maybe):
            wanted = hashes[maybe]
            for run in self.recent:
                rows, offsets = run.candidates(wanted)
                if len(rows):
                    yield maybe[rows], offsets
        for run in self.runs:
            rows, offsets = run.candidates(hashes)
            if len(rows):
                yield rows, offsets

    def _candidates_few(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows: list[int] = []
        offsets: list[int] = []
        for row, value in enumerate(hashes.tolist()):
            newest = self._newest.get(value, ())
            rows.extend([row] * len(newest))
            offsets.extend(newest)
            where = [run for run in self.runs if run.filter is None or run.filter.maybe_one(value)]
            if self._recent_filter.maybe_one(value):
                where = [*self.recent, *where]
            for run in where:
                found = run.offsets_of(value)
                rows.extend([row] * len(found))
                offsets.extend(found)
        return np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)

    def take_recent(self) -> Run | None:
        """Turn the recent keys into a run of their own, when there are any."""
        if not self.recent_keys:
            return None
        self._sort_newest()
        run = merged(self.recent, with_filter=True)
        self.drop_recent()
        self.runs.insert(0, run)
        return run

    def drop_recent(self) -> None:
        """Forget the recent keys."""
        self.recent, self.recent_keys, self._recent_filter = [], 0, Filter(self._run_keys)
        self._newest, self._newest_first = {}, None

    def take_back(self, run: Run) -> None:
        """Turn the newest run into the recent keys, of which there are none yet."""
        hashes, offsets = run.arrays()
        self.runs.remove(run)
        self.recent_keys = len(hashes)
        self._add_sorted(Run(hashes, offsets, run.first, run.last))

    def recent_as_one(self) -> Run:
        """Give the recent keys, of which there are some, as a run of their own that is not one yet."""
        self._sort_newest()
        if len(self.recent) > 1:
            self.recent = [merged(self.recent, with_filter=False)]
        [run] = self.recent
        return Run(run.hashes, run.offsets, run.first, run.last)

    def mergeable(self) -> list[Run]:
        """Give the oldest stretch of neighbouring runs of like size that should become one, or none."""
        sizes = [run.count for run in self.runs]
        for start in range(len(sizes) - FANOUT, -1, -1):
            stretch = sizes[start : start + FANOUT]
            if max(stretch) < FANOUT * max(1, min(stretch)):
                return self.runs[start : start + FANOUT]
        return []

    def replace(self, old: list[Run], new: Run) -> None:
        """Put a merged run in the place of its parts."""
        at = self.runs.index(old[0])
        self.runs[at : at + len(old)] = [new]

    def forget_before(self, offset: int, keep: Sequence[Run] = ()) -> list[Run]:
        """Forget the keys of offsets below this one; give the runs that lie wholly below it, which are dropped.

        Those to ``keep`` stay where they are, though their keys below it are forgotten, too.
        """
        self.floor = max(self.floor, offset)
        gone = [run for run in self.runs if run.last < offset and run not in keep]
        self.runs = [run for run in self.runs if run not in gone]
        return gone


class Head(NamedTuple):
    """The head of a run's file: what it covers, and what it is bound to."""

    crc: int
    shift: int
    keys: int
    first: int
    last: int
    owner: bytes
    chain: bytes

    def encoded(self, crc: int) -> bytes:
        """Write it with a checksum; with 0 it is the beginning of what the checksum covers."""
        return HEADER.pack(_MAGIC, crc, *self[1:])


def decode_head(data: Bytes, file_bytes: int, owner: bytes) -> Head | None:
    """Read the head of a file of this owner; None when it is none, or the file has not the size that it tells."""
    if len(data) < HEADER.size:
        return None
    magic, *fields = HEADER.unpack_from(data)
    head = Head(*fields)
    sound = magic == _MAGIC and head.owner == owner and head.shift == filter_shift(head.keys)
    return head if sound and file_bytes == HEADER.size + 16 * head.keys + filter_bytes(head.keys) else None


def encode_run(run: Run, owner: bytes, chain_after_last: bytes) -> list[Bytes]:
    """Write a run, bound to its log's secret and to the chain value at its end."""
    assert run.filter is not None
    parts = [part.view(np.uint8).data for part in (run.hashes, run.offsets, run.filter.table)]
    head = Head(0, run.filter.shift, len(run.hashes), run.first, run.last, owner, chain_after_last)
    crc = crc32c.crc32c(head.encoded(0))
    for part in parts:
        crc = crc32c.crc32c(part, crc)
    return [head.encoded(crc), *parts]


def decode_run(data: Bytes, owner: bytes) -> tuple[Run, bytes] | None:
    """Read a run of this owner and the chain value it is bound to; None when it is not usable."""
    head = decode_head(data, len(data), owner)
    if head is None or crc32c.crc32c(data[HEADER.size :], crc32c.crc32c(head.encoded(0))) != head.crc:
        return None
    body = memoryview(data)[HEADER.size :]
    hashes = np.frombuffer(body, dtype=np.uint64, count=head.keys)
    offsets = np.frombuffer(body, dtype=np.int64, count=head.keys, offset=8 * head.keys)
    return Run(hashes, offsets, head.first, head.last, Filter(head.keys, body[16 * head.keys :])), head.chain
