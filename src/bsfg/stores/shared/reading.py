"""The frames of one buffer as their keeper gives them: found, read and decoded; what cannot be decoded is damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import FACT_SCHEMA, STORED_SCHEMA
from bsfg.fact import Entry, Key
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.shared.frame import (
    FRAME_HEADER_BYTES,
    ROWS,
    Damaged,
    Torn,
    chain_after,
    check_payload,
    decode_frame_header,
    decode_payload,
    decode_rows,
    entries_of,
    entry_rows,
)
from bsfg.stores.shared.judging import KEY_SCHEMA, as_facts, key_rows
from bsfg.stores.shared.keeper import BufferKeeper, FrameRow

PAGE_FRAMES = 512
ABSENT = frozenset({GapReason.EVICTED, GapReason.EXPIRED, GapReason.DAMAGED, GapReason.LOST, GapReason.TORN})
"""The records that say why entries of a buffer are not there."""

OnDamage = Callable[[int, int, str, GapReason], GapRecord]
"""Is told of a range that cannot be read, and gives the record of it."""


def entries_in(frame: FrameRow, log_id: bytes, kind: Buffer) -> EntryBatch:
    """Read the entries of a frame; raises `Damaged` when the bytes are not what was written here."""
    try:
        header = decode_frame_header(frame.content)
        payload = memoryview(frame.content)[FRAME_HEADER_BYTES:]
        check_payload(header, payload)
        said = (header.base, header.count, header.log_id, header.chain_before)
        if said != (frame.base, frame.count, log_id, frame.chain_before):
            raise Damaged("the frame belongs to another place")
        schema = STORED_SCHEMA if kind == Buffer.FORWARD else FACT_SCHEMA
        if header.form == ROWS:
            rows = decode_rows(header, payload, schema)
            return entries_of(entry_rows(rows, frame.base, header.appended_at_unix_ms))
        facts = decode_payload(header, payload, schema)
    except Torn as torn:
        raise Damaged(str(torn)) from None
    return EntryBatch.of(facts, np.arange(frame.base, frame.end), header.appended_at_unix_ms)


def chain_behind(frame: FrameRow) -> bytes:
    """Give the chain value after a frame."""
    return chain_after(frame.content[:FRAME_HEADER_BYTES], frame.content[FRAME_HEADER_BYTES:])


def has_hole(frames: Sequence[FrameRow], at: int) -> bool:
    """Tell whether frames leave out entries that follow an offset; a page without frames does."""
    ends = (at, *(frame.end for frame in frames))
    return not frames or any(frame.base > end for frame, end in zip(frames, ends, strict=False))


def read_keys(data: bytes) -> pa.RecordBatch:
    """Read the keys of what left."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), KEY_SCHEMA)


class FrameReader:
    """Reads one buffer."""

    def __init__(self, keeper: BufferKeeper, log_id: bytes, kind: Buffer, on_damage: OnDamage) -> None:
        self._keeper, self._log_id, self._kind, self._on_damage = keeper, log_id, kind, on_damage

    def decoded(self, frame: FrameRow) -> EntryBatch | None:
        """Read a frame; None, and told, when it is damaged."""
        try:
            return entries_in(frame, self._log_id, self._kind)
        except Damaged as damage:
            self._on_damage(frame.base, frame.end - 1, f"the frame at {frame.base}: {damage}", GapReason.DAMAGED)
            return None

    def steps(self, frames: Sequence[FrameRow], at: int, stop: int, max_facts: int) -> Iterator[Frame]:
        """Cover a range with what a page has of it: joined entries, and records of what cannot be read or is missing.

        Whatever follows the last frame of the page is for the next one to say; a page without frames is a hole.
        """
        parts: list[EntryBatch] = []
        begun = at
        for frame in frames:
            if frame.base > at:
                yield from _joined(parts, begun, max_facts)
                yield self._hole(at, min(frame.base, stop) - 1, "no frame holds these entries", GapReason.LOST)
                at = begun = min(frame.base, stop)
                parts = []
            if at >= stop:
                break
            last = min(frame.end, stop)
            try:
                parts.append(entries_in(frame, self._log_id, self._kind).slice(at - frame.base, last - at))
            except Damaged as damage:
                yield from _joined(parts, begun, max_facts)
                yield self._hole(at, last - 1, f"the frame at {frame.base}: {damage}", GapReason.DAMAGED)
                parts, begun = [], last
            at = last
        yield from _joined(parts, begun, max_facts)
        if not frames:
            yield self._hole(at, stop - 1, "no frame holds these entries", GapReason.LOST)

    def _hole(self, first: int, last: int, why: str, reason: GapReason) -> Frame:
        gap = self._on_damage(first, last, why, reason)
        return Frame(first, last, gap=GapRecord(first, last, gap.reason, gap.at_unix_ms, gap.detail))

    def first_at_time(self, unix_ms: int, start: int, end: int) -> int:
        """Give the first offset of a range that became durable at a time or later, its end when there is none.

        Times never decrease, so that the range is halved: an index over them would cost every append more.
        """
        found = end
        while start < end:
            middle = (start + end) // 2
            (frame,) = self._keeper.infos(middle, 1) or (None,)
            if frame is None or frame.appended_at_unix_ms >= unix_ms:
                end = min(middle, frame.base) if frame is not None else middle
                found = frame.base if frame is not None else found
            else:
                start = max(middle + 1, frame.end)
        return found

    # Single facts.

    def _holding(self, offsets: np.ndarray) -> Iterator[FrameRow]:
        """Give the frames that hold some ascending offsets."""
        while len(offsets) and (frames := self._keeper.holding(offsets)):
            yield from frames
            offsets = offsets[offsets >= frames[-1].end]

    def entry_at(self, offset: int) -> Entry | None:
        """Read the one entry at an offset."""
        for frame in self._holding(np.array([offset], dtype=np.int64)):
            entries = self.decoded(frame)
            if entries is not None:
                return entries.slice(offset - frame.base, 1).to_entries()[0]
        return None

    def entry_of(self, hashed: int, key: Key, start: int) -> Entry | None:
        """Read the entry of a key while it is retained."""
        for offset in self._keeper.known(np.array([hashed], dtype=np.int64))[:, 1].tolist():
            entry = self.entry_at(offset) if offset >= start else None
            if entry is not None and entry.key == key:
                return entry
        return None

    def fetch(self, offsets: np.ndarray) -> tuple[FactBatch, np.ndarray, np.ndarray]:
        """Find the facts at ascending offsets, in frames and among the keys of what left; see `judging.Fetch`."""
        found, kept = np.zeros(len(offsets), dtype=bool), np.zeros(len(offsets), dtype=bool)
        parts: list[tuple[int, FactBatch]] = []
        for frame in self._holding(offsets):
            entries = self.decoded(frame)
            rows = slice(*np.searchsorted(offsets, [frame.base, frame.end]).tolist())
            if entries is not None:
                parts.append((rows.start, entries.facts.take(offsets[rows] - frame.base)))
                found[rows] = kept[rows] = True
        for first, facts, mask in self._departed(offsets):
            parts.append((first, facts))
            found[first : first + len(mask)] |= mask
        if not parts:
            return FactBatch.empty(), found, np.zeros(0, dtype=bool)
        return FactBatch.concat([facts for _, facts in sorted(parts, key=lambda part: part[0])]), found, kept[found]

    def _departed(self, offsets: np.ndarray) -> Iterator[tuple[int, FactBatch, np.ndarray]]:
        """Give keys of what left: the place of their first offset among those asked for, the keys, and which it has."""
        left = offsets
        while len(left) and (ranges := self._keeper.keys_holding(left)):
            for each in ranges:
                keys = read_keys(each.keys)
                bounds = keys.column("offset").to_numpy()
                rows = slice(*np.searchsorted(offsets, [bounds[0], bounds[-1] + 1]).tolist()) if len(bounds) else None
                if rows is not None and rows.stop > rows.start:
                    table, mask = key_rows(keys, offsets[rows])
                    yield rows.start, as_facts(table), mask
            left = left[left > ranges[-1].last]


def _joined(parts: list[EntryBatch], first: int, max_facts: int) -> Iterator[Frame]:
    if not parts:
        return
    entries = EntryBatch.concat(parts)
    for at in range(0, len(entries), max_facts):
        step = entries.slice(at, max_facts)
        yield Frame(first + at, first + at + len(step) - 1, entries=step)


def absent(first: int, end: int, gaps: Iterable[GapRecord], reason: GapReason) -> Iterator[Frame]:
    """Explain a range without entries by the records of own offsets that cover it, and the rest by a reason."""
    at = first
    for gap in gaps:
        if gap.last < at:
            continue
        if gap.first >= end:
            break
        if gap.first > at:
            yield Frame(at, gap.first - 1, gap=GapRecord(at, gap.first - 1, reason, 0))
            at = gap.first
        last = min(gap.last, end - 1)
        yield Frame(at, last, gap=GapRecord(at, last, gap.reason, gap.at_unix_ms, gap.detail))
        at = last + 1
    if at < end:
        yield Frame(at, end - 1, gap=GapRecord(at, end - 1, reason, 0))
