"""Reading a log: turning segments, their holes and the gap records into frames without hole or overlap.

What a log can show of its past, and the newest entry of each subject and predicate that has left it, are read here too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import crc32c
import numpy as np
import pyarrow as pa

from bsfg.batch import FACT_SCHEMA, EntryBatch, FactBatch, LatestEntries
from bsfg.columns import ENTRY_SCHEMA
from bsfg.digest import KeptRange, LogHistory, Restore
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.rows import Row
from bsfg.stores.log.damage import ABSENT, is_damage, patiently, put_aside, uncovered
from bsfg.stores.log.files import Files, write_whole
from bsfg.stores.log.frames import FrameRef
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.segments import SegmentFile
from bsfg.stores.shared.frame import ROWS, Damaged, Torn, Unreadable, decode_rows, rows_batch
from bsfg.stores.shared.reading import absent

_WORTH_A_STEP = 1_000
_WORTH_A_STEP_BYTES = 1 << 20
_SMALL_AT_ONCE = 4_096


@dataclass(frozen=True, slots=True)
class LogView:
    """A log as it stands at one moment: entries from ``start`` up to ``end`` (exclusive) in its segments."""

    segments: Sequence[SegmentFile]
    start: int
    end: int
    gaps: Sequence[GapRecord]
    on_damage: Callable[[int, int, str, GapReason], GapRecord]
    refused: set[int] = field(default_factory=set)
    """Offsets whose frames were looked up and not given by the medium; it may give them later."""

    def frames(self, first: int, end: int, max_facts: int) -> Iterator[Frame]:
        """Cover the range from ``first`` up to ``end`` with entries and gap records."""
        at = first
        if at < self.start:
            before = min(self.start, end)
            yield from self._absent(at, before, GapReason.TRUNCATED)
            at = before
        while at < end:
            step = self._step(at, end, max_facts)
            yield step
            at = step.last + 1

    def is_at_hand(self, offset: int) -> bool:
        """Tell whether what follows an offset can be given without reading a file."""
        if not self.segments or not self.segments[-1].base <= offset < self.end or offset < self.start:
            return False
        segment = self.segments[-1]
        index = segment.frame_index(offset)
        return index >= 0 and segment.has_at_hand(segment.frames[index])

    def _step(self, at: int, end: int, max_facts: int) -> Frame:
        found = self._locate(at)
        if found is None or found[1] is None:
            until = min(end, self._next_base(at))
            return self._lacking(found[0] if found is not None else None, at, until)
        segment, index = found[0], found[1]
        return self._collect(segment, index, at, end, max_facts)

    def _lacking(self, segment: SegmentFile | None, at: int, until: int) -> Frame:
        """Explain what no frame holds: a hole in its segment, a file that ends too early, or one that is missing."""
        hole = segment.hole_at(at) if segment is not None else None
        if segment is None or (hole is None and not self._is_followed(segment)):
            return next(self._absent(at, until, GapReason.LOST))
        if hole is None:
            return self._damaged(segment, at, until - 1, segment.size_bytes, "the file ends before these entries")
        last = hole.last if at <= hole.last < until else until - 1
        return self._damaged(segment, at, last, hole.position, hole.why)

    def _is_followed(self, segment: SegmentFile) -> bool:
        """Tell whether the next file continues a segment, so that what is missing between them was in this one."""
        following = [each.header for each in self.segments if each.base > segment.base][:1]
        return not following or following[0].is_made_up or following[0].previous_base == segment.base

    def _collect(self, segment: SegmentFile, index: int, at: int, end: int, max_facts: int) -> Frame:
        """Read one frame, and the small ones after it, into one batch of at most ``max_facts`` entries.

        Joining copies, so it stops once there is enough to be worth a step, in entries or in bytes: who asked for many
        facts may want but a few that are large, and keeps in memory all that was read for him.
        """
        refs = self._together(segment, index, at, end, max_facts)
        parts: list[EntryBatch] = []
        try:
            parts.extend(segment.entries_of(refs))
        except (Torn, Damaged) as damage:
            if not parts:
                # Explain a frame that cannot be read, and those behind it that cannot either.
                hole = segment.unreadable_from(index, str(damage))
                # The whole of it, also when only a part was asked for: damage is one record, however it is read.
                self._see(segment, hole.first, hole.last, hole.position, hole.why)
                return self._damaged(segment, at, min(hole.last, end - 1), hole.position, hole.why)
        parts[0] = parts[0].slice(at - refs[0].base)
        count = min(sum(map(len, parts)), end - at, max_facts)
        return Frame(at, at + count - 1, EntryBatch.concat(parts).slice(0, count))

    def _together(self, segment: SegmentFile, index: int, at: int, end: int, max_facts: int) -> list[FrameRef]:
        """Give the frame that holds an offset, and those after it that belong into one step with it."""
        enough = min(max_facts, _WORTH_A_STEP)
        frames = segment.frames
        refs = [frames[index]]
        size_bytes = refs[0].header.payload_bytes
        # One by one: of a step of large frames the first is all.
        for number in range(index + 1, min(index + enough, len(frames))):
            ref, before = frames[number], refs[-1].end
            size_bytes += ref.header.payload_bytes
            if ref.base > before or before >= end or before - at >= enough or ref.end - at > max_facts:
                break
            if size_bytes > _WORTH_A_STEP_BYTES:
                break
            refs.append(ref)
        return refs

    def _damaged(self, segment: SegmentFile, first: int, last: int, position: int, why: str) -> Frame:
        """Explain a range that cannot be read by what is recorded of it, and the rest by the damage."""
        recorded = next(self._absent(first, last + 1, GapReason.DAMAGED))
        if recorded.gap is not None and recorded.gap.at_unix_ms:
            return recorded
        return _gap_frame(first, recorded.last, self._see(segment, first, recorded.last, position, why))

    def _locate(self, offset: int) -> tuple[SegmentFile, int | None] | None:
        """Find the segment and the frame that hold an offset; the frame is None when it lies in a hole."""
        at = bisect_right(self.segments, offset, key=lambda segment: segment.base) - 1
        if at < 0:
            return None
        segment = self.segments[at]
        index = segment.frame_index(offset)
        if index < 0 or segment.frames[index].end <= offset:
            return segment, None
        return segment, index

    def _next_base(self, offset: int) -> int:
        """Give the offset of the first frame above an offset, or the end of the log."""
        at = max(0, bisect_right(self.segments, offset, key=lambda segment: segment.base) - 1)
        for segment in self.segments[at:]:
            index = segment.frame_index(offset) + 1
            if index < len(segment.frames):
                return segment.frames[index].base
        return self.end

    def _absent(self, first: int, end: int, reason: GapReason) -> Iterator[Frame]:
        """Explain a range without entries by the gap records that cover it, and the rest by ``reason``."""
        recorded = (gap for gap in self.gaps if gap.origin_zone is None and gap.reason in ABSENT)
        return absent(first, end, recorded, reason)

    def rows_at(self, offset: int) -> EntryBatch | None:
        """Read the one entry at an offset, or None when it is not there or damaged."""
        found = self._frame_of(offset) if self.start <= offset < self.end else None
        if found is None:
            return None
        segment, index = found
        ref = segment.frames[index]
        try:
            return segment.entries(ref).slice(offset - ref.base, 1)
        except (Torn, Damaged) as damage:
            self._met(segment, index, str(damage))
            return None

    def time_at(self, offset: int) -> int | None:
        """Give when the entry at an offset was appended; the rest of its segment is looked at only where it is harmed.

        Every start asks this of the oldest entry, and a list of a whole segment's frames would be most of its time.
        """
        at = bisect_right(self.segments, offset, key=lambda segment: segment.base) - 1
        ref = self.segments[at].frame_holding(offset) if at >= 0 else None
        try:
            rows = self.segments[at].entries(ref).slice(offset - ref.base, 1) if ref is not None else None
        except (Torn, Damaged):
            rows = None
        rows = rows or self.rows_at(offset)
        return int(rows.column("appended_at_unix_ms")[0].as_py()) if rows is not None else None

    def frame_at(self, offset: int) -> tuple[FactBatch, int, int] | None:
        """Give the facts of the frame that holds an offset, with its base and end; None when it cannot be read."""
        found = self._frame_of(offset)
        if found is None:
            return None
        ref = found[0].frames[found[1]]
        try:
            facts = found[0].read(ref)
        except (Torn, Damaged) as damage:
            if isinstance(damage, Unreadable):
                self.refused.update(range(ref.base, ref.end))
            self._met(found[0], found[1], str(damage))
            return None
        return FactBatch(facts.select(FACT_SCHEMA.names), sealed=True), ref.base, ref.end

    def small_frames_at(self, offsets: np.ndarray) -> FactBatch | None:
        """Give the facts at the first of some sorted offsets, as many as lie in small frames and can be read together.

        Who sends again what came one by one asks for thousands of frames with a fact each. None when there is nothing
        to be gained by it, or when the first cannot be read, which `frame_at` tells about.
        """
        found = self._locate(int(offsets[0]))
        if found is None or found[1] is None:
            return None
        segment, places, refs = found[0], list[tuple[int, int]](), list[FrameRef]()
        for offset in offsets[:_SMALL_AT_ONCE].tolist():
            ref = segment.frames[segment.frame_index(offset)]
            if ref.end <= offset or ref.header.form != ROWS:
                break
            if not refs or refs[-1].base != ref.base:
                refs.append(ref)
            places.append((ref.base, offset - ref.base))
        if len(refs) < 2:
            return None
        frames = _small_frames(segment, refs)
        rows = [frames[base][at] for base, at in places if base in frames]
        if not rows:
            return None
        return FactBatch(rows_batch(rows, segment.header.schema).select(FACT_SCHEMA.names), sealed=True)

    def _frame_of(self, offset: int) -> tuple[SegmentFile, int] | None:
        """Find the frame that holds an offset; where one should be and is none, that is told, unless it is known.

        What was truncated inside a segment still has its frame there, and nowhere else: repeats are judged by it.
        """
        found = self._locate(offset)
        if found is not None and found[1] is not None:
            return found[0], found[1]
        if not self.start <= offset < self.end:
            return None
        gap = self._step(offset, self.end, 1).gap
        if gap is not None and not gap.at_unix_ms:
            self.on_damage(gap.first, gap.last, gap.detail, gap.reason)
        return None

    def _met(self, segment: SegmentFile, index: int, why: str) -> None:
        """Tell of a frame that cannot be read, unless that is known."""
        ref = segment.frames[index]
        if any(uncovered(ref.base, ref.end - 1, self.gaps)):
            hole = segment.unreadable_from(index, why)
            self._see(segment, hole.first, hole.last, hole.position, hole.why)

    def _see(self, segment: SegmentFile, first: int, last: int, position: int, why: str) -> GapRecord:
        """Tell of damage to whoever records it."""
        reason = GapReason.LOST if segment.is_missing else GapReason.DAMAGED
        return self.on_damage(first, last, f"{segment.where(position)}: {why}", reason)

    def first_at_time(self, unix_ms: int) -> int:
        """Give the first offset whose entry became durable at a time or later; the end when there is none."""
        times = [segment.header.time_before_unix_ms for segment in self.segments]
        at = max(0, bisect_right(times, unix_ms - 1) - 1)
        for segment in self.segments[at:]:
            for ref in segment.frames:
                if ref.header.appended_at_unix_ms >= unix_ms:
                    return max(self.start, ref.base)
        return self.end


def _small_frames(segment: SegmentFile, refs: Sequence[FrameRef]) -> dict[int, list[Row]]:
    """Read the rows of small frames by their bases, up to the first that cannot be read."""
    found: dict[int, list[Row]] = {}
    for ref, payload in segment.payloads(refs):
        try:
            if isinstance(payload, Exception):
                break
            found[ref.base] = decode_rows(ref.header, payload, segment.header.schema)
        except Damaged:
            break
    return found


def _gap_frame(first: int, last: int, gap: GapRecord) -> Frame:
    return Frame(first, last, gap=GapRecord(first, last, gap.reason, gap.at_unix_ms, gap.detail, gap.origin_zone))


def history_of(view: LogView, notes: Notes, chain: bytes, heads: Sequence[bytes] = ()) -> LogHistory:
    """Describe the past of a log whose chain now ends with ``chain``; heads are searched from the end."""
    kept = tuple(kept_ranges(notes))
    found: dict[bytes, int | None] = dict.fromkeys(heads)
    missing = set(heads)
    for value, offset in _values(view, kept, chain) if missing else ():
        if value in missing:
            found[value] = offset
            missing.discard(value)
            if not missing:
                break
    return LogHistory(kept, found)


def restores_of(files: Files, folder: str) -> tuple[Restore, ...]:
    """Give the restores that a log has behind it."""
    identity = read_identity(files, folder)
    lineage = identity.lineage if identity is not None else ()
    return tuple(Restore(each.end, each.restored_unix_ms, each.log_id.hex()) for each in lineage)


def kept_ranges(notes: Notes) -> Iterator[KeptRange]:
    """Give what was kept of removed segments."""
    for anchor in notes.anchors:
        chain = bytes.fromhex(anchor.chain_before), bytes.fromhex(anchor.chain_after)
        yield KeptRange(anchor.first, anchor.last, anchor.range_digest, *chain)


def _values(view: LogView, kept: Sequence[KeptRange], chain: bytes) -> Iterator[tuple[bytes, int]]:
    """Give the chain values of a log from its end to its beginning, each with the offset that follows it."""
    yield chain, view.end
    for segment in reversed(view.segments):
        for ref in reversed(segment.frames):
            yield ref.header.chain_before, ref.base
        yield segment.header.chain_before, segment.base
    for each in reversed(kept):
        yield each.chain_after, each.last + 1
        yield each.chain_before, each.first


NAME = "latest.entries"
_MAGIC = b"BSFGLAT1"
_HEAD_BYTES = 16


def read_latest(files: Files, folder: str) -> EntryBatch:
    """Read what was kept, none when nothing was; raises `Damaged`, or `OSError` for what may pass."""
    path = f"{folder}/{NAME}"
    if not files.exists(path):
        return EntryBatch.empty()
    try:
        data = bytes(patiently(lambda: files.read(path)))
    except OSError as error:
        if not is_damage(error):
            raise
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    payload = data[_HEAD_BYTES:]
    if data[:8] != _MAGIC or crc32c.crc32c(payload) != int.from_bytes(data[8:12], "little"):
        raise Damaged(f"{path} fails its checksum")
    try:
        found = pa.ipc.read_record_batch(pa.py_buffer(payload), ENTRY_SCHEMA)
        found.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise Damaged(f"{path} cannot be decoded: {error}") from None
    return EntryBatch(found, sealed=True)


def write_latest(files: Files, folder: str, entries: EntryBatch) -> None:
    """Make these entries durable in the place of those that were kept."""
    payload = entries.record_batch.serialize()
    head = _MAGIC + crc32c.crc32c(payload).to_bytes(4, "little") + bytes(4)
    write_whole(files, f"{folder}/{NAME}", head + payload.to_pybytes())


def keep_latest(
    files: Files, folder: str, view: LogView, before: int, most: int, found: Mapping[int, EntryBatch]
) -> None:
    """Make the newest entries below an offset durable, together with those that were kept before.

    ``found`` gives the newest ones of segments that were read already, by the base of these.
    """
    try:
        known = read_latest(files, folder)
    except Damaged:
        # What cannot be read is kept aside, where the damage can be looked at, and does not keep the rest from staying.
        put_aside(files, f"{folder}/{NAME}")
        known = EntryBatch.empty()
    gathering, changed = LatestEntries(known, most), False
    for segment in view.segments:
        if segment.base in found:
            gathering.add(found[segment.base])
            changed = True
            continue
        for ref in segment.frames if segment.base < before else ():
            if ref.end <= view.start or ref.base >= before:
                continue
            try:
                entries = segment.entries(ref)
            except (Torn, Damaged):
                continue
            first = max(0, view.start - ref.base)
            gathering.add(entries.slice(first, min(ref.end, before) - ref.base - first))
            changed = True
    if changed:
        write_latest(files, folder, gathering.result())
