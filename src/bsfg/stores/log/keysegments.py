"""Key segments: the keys and digests of entries whose bytes are gone.

Before a segment is removed its keys are made durable here, so that a repeat is recognised for as long as the key
horizon says, however long ago the bytes were truncated.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import crc32c
import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch, LatestEntries
from bsfg.digest import RangeDigest
from bsfg.stores.log.damage import is_damage, patiently
from bsfg.stores.log.files import Files, write_aside
from bsfg.stores.log.notes import Anchor
from bsfg.stores.log.segments import Hole, SegmentFile, joined
from bsfg.stores.log.view import LogView
from bsfg.stores.shared.frame import MAX_NAMED_OFFSET, Damaged, Torn
from bsfg.stores.shared.judging import KEY_SCHEMA, Fetch, as_facts, key_rows

STAGED = ".new"
MAGIC = b"BSFGKEY1"


@dataclass(frozen=True, slots=True)
class KeySegmentName:
    """The range that a key segment covers, as its file name says it."""

    first: int
    last: int

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.first:020d}-{self.last:020d}.keys"


def listed(files: Files, folder: str) -> list[KeySegmentName]:
    """List the key segments of a log, in order; what is not called like one is none."""
    result = []
    for name in files.list(f"{folder}/keys"):
        first, _, last = name.removesuffix(".keys").partition("-")
        if name.isascii() and first.isdigit() and last.isdigit():
            found = KeySegmentName(int(first), int(last))
            if found.file_name == name and found.first <= found.last <= MAX_NAMED_OFFSET:
                result.append(found)
    return sorted(result, key=lambda item: item.first)


def keys_of(
    segment: SegmentFile, look: Callable[[EntryBatch], None] = lambda _: None
) -> tuple[pa.RecordBatch, str, list[Hole]]:
    """Collect the keys of a segment, the digest over its entries, and the damage, which has neither.

    ``look`` sees all entries, in order.
    """
    parts, digest, frames = [], RangeDigest(), segment.frames
    lacking = list(segment.holes)
    for entries in segment.parts(frames):
        if isinstance(entries, Hole):
            lacking.append(entries)
            continue
        digest.add(entries)
        look(entries)
        parts.append(entries.record_batch.select(KEY_SCHEMA.names))
    empty = pa.RecordBatch.from_pylist([], schema=KEY_SCHEMA)
    return pa.concat_batches([empty, *parts]), digest.hexdigest(), joined(lacking)


def read(files: Files, folder: str, name: KeySegmentName) -> pa.RecordBatch | None:
    """Read a key segment; None when it is missing or damaged."""
    try:
        data = bytes(patiently(lambda: files.read(f"{folder}/keys/{name.file_name}")))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        return None
    if data[:8] != MAGIC or crc32c.crc32c(data[16:]) != int.from_bytes(data[8:12], "little"):
        return None
    try:
        keys = pa.ipc.read_record_batch(pa.py_buffer(data[16:]), KEY_SCHEMA)
        keys.validate(full=True)
    except MemoryError:
        raise
    except Exception:
        return None
    return keys


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """A segment that may leave: its keys are durable, staged beside their place, and nothing else has changed yet."""

    segment: SegmentFile
    anchor: Anchor
    lacking: Sequence[Hole]
    staged: tuple[KeySegmentName, str] | None
    latest: EntryBatch
    """The newest entry of each of its subjects and predicates, where a buffer keeps those."""


def gathered(keys: KeySegments, segment: SegmentFile, following: SegmentFile, latest_most: int) -> Departure:
    """Read a full segment, whose file changes no more, and stage its keys."""
    latest = LatestEntries(EntryBatch.empty(), latest_most)
    table, digest, lacking = keys_of(segment, latest.add) if latest_most else keys_of(segment)
    staged = None
    if following.base > segment.base:
        name = KeySegmentName(segment.base, following.base - 1)
        staged = name, keys.stage(name, table)
    anchor = Anchor(
        segment.base,
        following.base - 1,
        segment.header.chain_before.hex(),
        following.header.chain_before.hex(),
        digest,
        following.header.time_before_unix_ms,
    )
    # How far damage at its end reaches a segment does not know by itself.
    last = following.base - 1
    lacking = [replace(hole, last=last) if hole.last < hole.first <= last else hole for hole in lacking]
    return Departure(segment, anchor, lacking, staged, latest.result())


class KeySegments:
    """The key segments of one log, read when a candidate points into them."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.names = listed(files, folder)
        self._cache: dict[KeySegmentName, pa.RecordBatch | None] = {}
        self._serial = itertools.count()

    def stage(self, name: KeySegmentName, keys: pa.RecordBatch) -> str:
        """Make the content of a key segment durable beside its place, in any thread; give the path it waits under."""
        payload = keys.serialize()
        head = MAGIC + crc32c.crc32c(payload).to_bytes(4, "little") + bytes(4)
        # Every try has a name of its own: the same segment may be prepared twice at once.
        staged = f"{self._folder}/keys/{name.file_name}.{next(self._serial)}{STAGED}"
        try:
            write_aside(self._files, staged, head + payload.to_pybytes())
        except OSError:
            self.unstage(staged)
            raise
        return staged

    def unstage(self, staged: str) -> None:
        """Remove what is not needed after all; what cannot be removed goes at the next opening."""
        with suppress(OSError):
            self._files.remove(staged)

    def add(self, staged: Sequence[tuple[KeySegmentName, str]]) -> None:
        """Put staged key segments in their places durably and know them; one that is there is replaced by its like."""
        for name, path in staged:
            self._files.rename(path, f"{self._folder}/keys/{name.file_name}")
            # One after the other: after a power loss those that are there have no hole between them.
            self._files.sync_folder(f"{self._folder}/keys")
        self.names = sorted({*self.names, *(name for name, _ in staged)}, key=lambda item: item.first)

    def clear_staged(self) -> None:
        """Remove what was staged when the process last ended."""
        for name in self._files.list(f"{self._folder}/keys"):
            if name.endswith(STAGED):
                self.unstage(f"{self._folder}/keys/{name}")

    def drop_before(self, offset: int) -> int:
        """Remove the key segments that lie wholly below an offset; give the first offset still known."""
        gone = [name for name in self.names if name.last < offset]
        for name in gone:
            self._files.remove(f"{self._folder}/keys/{name.file_name}")
            self._cache.pop(name, None)
        if gone:
            self._files.sync_folder(f"{self._folder}/keys")
        self.names = [name for name in self.names if name.last >= offset]
        return self.names[0].first if self.names else offset

    def table(self, name: KeySegmentName) -> pa.RecordBatch | None:
        """Give the keys of one key segment, or None when it is missing or damaged."""
        if name not in self._cache:
            if len(self._cache) >= 8:
                self._cache.pop(next(iter(self._cache)))
            self._cache[name] = read(self._files, self._folder, name)
        return self._cache[name]

    def covering(self, offset: int) -> KeySegmentName | None:
        """Find the key segment that covers an offset."""
        at = bisect_right(self.names, offset, key=lambda item: item.first) - 1
        return self.names[at] if at >= 0 and self.names[at].last >= offset else None

    def rows(self, name: KeySegmentName, offsets: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray] | None:
        """Give the key rows at some offsets, and which of the offsets were found."""
        table = self.table(name)
        if table is None:
            return None
        return key_rows(table, offsets)


_Rows = tuple[FactBatch, np.ndarray]
"""Facts, and which of the offsets that were asked for they belong to."""


def stored_facts(view: LogView, keys: KeySegments) -> Fetch:
    """Give the function that fetches facts at sorted offsets."""

    def fetch(offsets: np.ndarray) -> tuple[FactBatch, np.ndarray, np.ndarray]:
        found = np.zeros(len(offsets), dtype=bool)
        parts: list[FactBatch] = []
        retained: list[np.ndarray] = []
        at = 0
        while at < len(offsets):
            rows, count, kept = _fetch_from(view, keys, offsets, at)
            if rows is not None:
                facts, mask = rows
                found[at : at + count] = mask
                parts.append(facts)
                retained.append(np.full(len(facts), kept))
            at += count
        if not parts:
            return FactBatch.empty(), found, np.zeros(0, dtype=bool)
        return FactBatch.concat(parts), found, np.concatenate(retained)

    return fetch


def _fetch_from(view: LogView, keys: KeySegments, offsets: np.ndarray, at: int) -> tuple[_Rows | None, int, bool]:
    """Fetch all offsets that lie in the same frame or key segment as the one at ``at``."""
    offset = int(offsets[at])
    name = keys.covering(offset)
    if name is not None:
        count = int(np.searchsorted(offsets, name.last, side="right")) - at
        rows = keys.rows(name, offsets[at : at + count])
        return ((as_facts(rows[0]), rows[1]) if rows else None), count, False
    is_above_keys = not keys.names or offset > keys.names[-1].last
    small = view.small_frames_at(offsets[at:]) if is_above_keys else None
    if small is not None:
        return (small, np.ones(len(small), dtype=bool)), len(small), True
    frame = view.frame_at(offset)
    if frame is None:
        return None, 1, False
    facts, base, end = frame
    count = int(np.searchsorted(offsets, end, side="left")) - at
    return (facts.take(offsets[at : at + count] - base), np.ones(count, dtype=bool)), count, True


def keys_between(
    view: LogView, files: Files, folder: str, names: Sequence[KeySegmentName], first: int, last: int
) -> Iterator[tuple[FactBatch, np.ndarray]]:
    """Give the facts of a range of offsets, both ends included, with the offsets; what cannot be read is left out."""
    for name in names:
        table = read(files, folder, name) if name.first <= last and name.last >= first else None
        if table is not None:
            offsets = table.column("offset").to_numpy()
            inside = np.flatnonzero((offsets >= first) & (offsets <= last))
            yield as_facts(table).take(inside), offsets[inside]
    for segment in view.segments:
        if segment.base > last:
            break
        for ref in segment.frames:
            if ref.end <= first or ref.base > last:
                continue
            try:
                facts = segment.entries(ref).facts
            except (Torn, Damaged):
                continue
            start, stop = max(first, ref.base), min(last + 1, ref.end)
            yield facts.slice(start - ref.base, stop - start), np.arange(start, stop)
