"""The frames of one buffer in its tables: found, read and decoded; what cannot be decoded is damage, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from psycopg.types.numeric import Int8

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import FACT_SCHEMA, STORED_SCHEMA
from bsfg.fact import Entry, Key
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.postgres.database import Connection, Int8Array
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
    genesis,
)
from bsfg.stores.shared.judging import KEY_SCHEMA, Fetch, as_facts, key_rows

PAGE_BYTES = 4 << 20
PAGE_FRAMES = 512
ABSENT = frozenset({GapReason.EVICTED, GapReason.EXPIRED, GapReason.DAMAGED, GapReason.LOST})
"""The records that say why entries of a buffer are not there."""

OnDamage = Callable[[int, int, str, GapReason], GapRecord]
"""Is told of a range that cannot be read, and gives the record of it."""

_PAGE = """
SELECT base, count, appended_at_unix_ms, chain_before, content FROM (
    SELECT *, sum(size_bytes) OVER (ORDER BY base) - size_bytes AS before_bytes FROM (
        SELECT base, count, appended_at_unix_ms, chain_before, size_bytes, content FROM frame
        WHERE buffer_id = %(buffer)s AND base < %(until)s AND base >= coalesce(
            (SELECT max(base) FROM frame WHERE buffer_id = %(buffer)s AND base <= %(at)s), %(at)s)
        ORDER BY base LIMIT %(most)s) AS following
) AS page WHERE before_bytes < %(bytes)s ORDER BY base
"""
_HOLDING = """
SELECT DISTINCT f.base, f.size_bytes FROM unnest(%s::bigint[]) AS wanted(at),
LATERAL (SELECT base, count, size_bytes FROM frame WHERE buffer_id = %s AND base <= wanted.at
         ORDER BY base DESC LIMIT 1) AS f
WHERE wanted.at < f.base + f.count ORDER BY f.base
"""
_CONTENT = """
SELECT base, count, appended_at_unix_ms, chain_before, content FROM frame WHERE buffer_id = %s AND base = ANY(%s)
"""
_KEYS = """
SELECT keys FROM departed WHERE buffer_id = %(buffer)s AND keys IS NOT NULL AND first IN (
    SELECT d.first FROM unnest(%(offsets)s::bigint[]) AS wanted(at),
    LATERAL (SELECT first, last FROM departed WHERE buffer_id = %(buffer)s AND first <= wanted.at
             ORDER BY first DESC LIMIT 1) AS d
    WHERE wanted.at <= d.last) ORDER BY first
"""


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """One row of the table of frames."""

    base: int
    count: int
    appended_at_unix_ms: int
    chain_before: bytes
    content: bytes

    @property
    def end(self) -> int:
        """The offset after its last entry."""
        return self.base + self.count

    @property
    def chain_after(self) -> bytes:
        """The chain value after this frame."""
        return chain_after(self.content[:FRAME_HEADER_BYTES], self.content[FRAME_HEADER_BYTES:])

    def entries(self, log_id: bytes, kind: Buffer) -> EntryBatch:
        """Read the entries; raises `Damaged` when the bytes are not what was written here."""
        try:
            header = decode_frame_header(self.content)
            payload = memoryview(self.content)[FRAME_HEADER_BYTES:]
            check_payload(header, payload)
            said = (header.base, header.count, header.log_id, header.chain_before)
            if said != (self.base, self.count, log_id, self.chain_before):
                raise Damaged("the frame belongs to another place")
            schema = STORED_SCHEMA if kind == Buffer.FORWARD else FACT_SCHEMA
            if header.form == ROWS:
                rows = decode_rows(header, payload, schema)
                return entries_of(entry_rows(rows, self.base, header.appended_at_unix_ms))
            facts = decode_payload(header, payload, schema)
        except Torn as torn:
            raise Damaged(str(torn)) from None
        return EntryBatch.of(facts, np.arange(self.base, self.end), header.appended_at_unix_ms)


class FrameReader:
    """Reads one buffer on a connection that it is given."""

    def __init__(self, buffer_id: int, log_id: bytes, kind: Buffer, on_damage: OnDamage) -> None:
        self._id, self._log_id, self._kind, self._on_damage = buffer_id, log_id, kind, on_damage

    def page(self, connection: Connection, at: int, until: int, most: int = PAGE_FRAMES) -> list[StoredFrame]:
        """Give the frame that holds an offset and those that follow, up to a bound of bytes; one at least."""
        asked = {"buffer": self._id, "at": at, "until": until, "most": most, "bytes": PAGE_BYTES}
        found = [StoredFrame(*row) for row in connection.execute(_PAGE, asked, binary=True)]
        return [frame for frame in found if frame.end > at]

    def decoded(self, frame: StoredFrame) -> EntryBatch | None:
        """Read a frame; None, and told, when it is damaged."""
        try:
            return frame.entries(self._log_id, self._kind)
        except Damaged as damage:
            self._on_damage(frame.base, frame.end - 1, f"the frame at {frame.base}: {damage}", GapReason.DAMAGED)
            return None

    def steps(self, frames: Sequence[StoredFrame], at: int, stop: int, max_facts: int) -> Iterator[Frame]:
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
                parts.append(frame.entries(self._log_id, self._kind).slice(at - frame.base, last - at))
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

    def first_at_time(self, connection: Connection, unix_ms: int, start: int, end: int) -> int:
        """Give the first offset of a range that became durable at a time or later, its end when there is none.

        Times never decrease, so that the range is halved: an index over them would cost every append more.
        """
        asked = (
            "SELECT base, base + count, appended_at_unix_ms FROM frame WHERE buffer_id = %s AND base <= %s "
            "ORDER BY base DESC LIMIT 1"
        )
        while start < end:
            middle = (start + end) // 2
            base, after, at = connection.execute(asked, (self._id, Int8(middle))).fetchone() or (0, 0, unix_ms - 1)
            if at < unix_ms:
                start = max(middle + 1, after)
            else:
                end = base
        return max(start, end)

    # Single facts.

    def holding(self, connection: Connection, offsets: np.ndarray) -> Iterator[StoredFrame]:
        """Give the frames that hold some offsets, a bounded number of bytes at a time."""
        rows = connection.execute(_HOLDING, (Int8Array(offsets), self._id)).fetchall()
        group: list[int] = []
        size = 0
        for base, size_bytes in [*rows, (None, 0)]:
            if base is None or (group and size + size_bytes > PAGE_BYTES):
                wanted = Int8Array(np.array(group, dtype=np.int64))
                found = connection.execute(_CONTENT, (self._id, wanted), binary=True).fetchall()
                yield from sorted((StoredFrame(*row) for row in found), key=lambda frame: frame.base)
                group, size = [], 0
            if base is not None:
                group.append(base)
                size += size_bytes

    def entry_at(self, connection: Connection, offset: int) -> Entry | None:
        """Read the one entry at an offset."""
        for frame in self.holding(connection, np.array([offset], dtype=np.int64)):
            entries = self.decoded(frame)
            if entries is not None:
                return entries.slice(offset - frame.base, 1).to_entries()[0]
        return None

    def entry_of(self, connection: Connection, hashed: int, key: Key, start: int) -> Entry | None:
        """Read the entry of a key while it is retained."""
        asked = "SELECT at FROM key WHERE buffer_id = %s AND hash = %s AND at >= %s"
        for (offset,) in connection.execute(asked, (self._id, hashed, start)).fetchall():
            entry = self.entry_at(connection, offset)
            if entry is not None and entry.key == key:
                return entry
        return None

    def fetch(self, connection: Connection) -> Fetch:
        """Give what finds the facts at sorted offsets, in frames and among the keys of what left."""

        def found_at(offsets: np.ndarray) -> tuple[FactBatch, np.ndarray, np.ndarray]:
            found, kept = np.zeros(len(offsets), dtype=bool), np.zeros(len(offsets), dtype=bool)
            parts: list[tuple[int, FactBatch]] = []
            for frame in self.holding(connection, offsets):
                entries = self.decoded(frame)
                rows = slice(*np.searchsorted(offsets, [frame.base, frame.end]).tolist())
                if entries is not None:
                    parts.append((rows.start, entries.facts.take(offsets[rows] - frame.base)))
                    found[rows] = kept[rows] = True
            for first, facts, mask in self._departed(connection, offsets):
                parts.append((first, facts))
                found[first : first + len(mask)] |= mask
            if not parts:
                return FactBatch.empty(), found, np.zeros(0, dtype=bool)
            return FactBatch.concat([facts for _, facts in sorted(parts, key=lambda part: part[0])]), found, kept[found]

        return found_at

    def _departed(self, connection: Connection, offsets: np.ndarray) -> Iterator[tuple[int, FactBatch, np.ndarray]]:
        """Give keys of what left: the place of their first offset among those asked for, the keys, and which it has."""
        with connection.cursor(binary=True) as cursor:
            for (data,) in cursor.stream(_KEYS, {"buffer": self._id, "offsets": Int8Array(offsets)}):
                keys = read_keys(data)
                bounds = keys.column("offset").to_numpy()
                rows = slice(*np.searchsorted(offsets, [bounds[0], bounds[-1] + 1]).tolist()) if len(bounds) else None
                if rows is not None and rows.stop > rows.start:
                    table, mask = key_rows(keys, offsets[rows])
                    yield rows.start, as_facts(table), mask


def read_keys(data: bytes) -> pa.RecordBatch:
    """Read the keys of what left."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), KEY_SCHEMA)


def _joined(parts: list[EntryBatch], first: int, max_facts: int) -> Iterator[Frame]:
    if not parts:
        return
    entries = EntryBatch.concat(parts)
    for at in range(0, len(entries), max_facts):
        step = entries.slice(at, max_facts)
        yield Frame(first + at, first + at + len(step) - 1, entries=step)


def absent(first: int, end: int, gaps: Sequence[GapRecord], removed_unix_ms: int) -> Iterator[Frame]:
    """Explain a range that has left by the records that cover it, and the rest as truncated."""
    at = first
    for gap in gaps:
        if gap.last < at or gap.reason not in ABSENT:
            continue
        if gap.first >= end:
            break
        if gap.first > at:
            yield Frame(at, gap.first - 1, gap=GapRecord(at, gap.first - 1, GapReason.TRUNCATED, removed_unix_ms))
            at = gap.first
        last = min(gap.last, end - 1)
        yield Frame(at, last, gap=GapRecord(at, last, gap.reason, gap.at_unix_ms, gap.detail))
        at = last + 1
    if at < end:
        yield Frame(at, end - 1, gap=GapRecord(at, end - 1, GapReason.TRUNCATED, removed_unix_ms))


def chain_breaks(connection: Connection) -> Iterator[str]:
    """Read every frame of a zone, and say where one is not what was written, or does not follow the one before it."""
    asked = "SELECT id, stream, kind, log_id, chain, end_offset FROM buffer ORDER BY stream, kind"
    for id_, stream, kind, log_id, head, end in connection.execute(asked, binary=True).fetchall():
        before = connection.execute(
            "SELECT last + 1, chain_after FROM departed WHERE buffer_id = %s ORDER BY first DESC LIMIT 1", (id_,)
        ).fetchone()
        at, chain = (int(before[0]), bytes(before[1])) if before is not None else (0, genesis(log_id))
        reader = FrameReader(id_, log_id, Buffer(kind), _not_recorded)
        while frames := reader.page(connection, at, end):
            for frame in frames:
                if (frame.base, frame.chain_before) != (at, chain):
                    yield f"{stream}/{kind}: the frame at {frame.base} does not follow what is before offset {at}"
                try:
                    frame.entries(log_id, Buffer(kind))
                except Damaged as damage:
                    yield f"{stream}/{kind}: the frame at {frame.base}: {damage}"
                at, chain = frame.end, frame.chain_after
        if (at, chain) != (end, head):
            yield f"{stream}/{kind}: the last frame is not the one that the row of the buffer names"


def _not_recorded(first: int, last: int, why: str, reason: GapReason) -> GapRecord:
    return GapRecord(first, last, reason, 0, why)
