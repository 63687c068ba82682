"""What a storage shows: a buffer read from its first offset to its end, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import pyarrow as pa

from bsfg.batch import FACT_SCHEMA, ORIGIN_FIELDS, EntryBatch, FactBatch
from bsfg.fact import Key
from bsfg.ports import UNREADABLE, Frame, GapRecord, OriginSpan, Replayable
from bsfg.retention import GapReason
from bsfg.sealing import digest_mismatches

LEFT = (GapReason.EVICTED, GapReason.EXPIRED)
BROKEN = (GapReason.DAMAGED, GapReason.LOST)
CUT = (*BROKEN, GapReason.TORN)

GapIdentity = tuple[int, int, GapReason, str, str | None]
Refused = tuple[Key, bytes]
"""A quarantined fact: its key and digest."""


class BrokenPromise(AssertionError):
    """A storage did not keep what it had promised."""


def expect(holds: bool, message: str) -> None:
    """Raise `BrokenPromise` unless a condition holds."""
    if not holds:
        raise BrokenPromise(message)


@dataclass(frozen=True, slots=True)
class Row:
    """One fact with all its columns, as it was given to a buffer or as it came back."""

    key: Key
    digest: bytes
    fact: tuple[Any, ...]
    origin: tuple[str, int, int, int | None] | None = None

    def batch(self) -> FactBatch:
        """Give the fact as a sealed batch of one."""
        return batch_of([self])


def batch_of(rows: Iterable[Row]) -> FactBatch:
    """Give rows as a sealed batch."""
    listed = [dict(zip(FACT_SCHEMA.names, row.fact, strict=True)) for row in rows]
    return FactBatch(pa.RecordBatch.from_pylist(listed, schema=FACT_SCHEMA), sealed=True)


def rows_of(batch: FactBatch, origin: OriginSpan | None = None) -> tuple[Row, ...]:
    """Take the rows of a batch as it is given to a buffer."""
    rows = _plain_rows(batch.record_batch)
    if origin is None:
        return tuple(rows)
    return tuple(replace(row, origin=astuple(origin.at(at))) for at, row in enumerate(rows))


def stored_rows(entries: EntryBatch) -> list[tuple[int, int, Row]]:
    """Take offset, time and row of entries as a buffer gave them."""
    record_batch = entries.record_batch
    origins = zip(*(record_batch.column(part.name).to_pylist() for part in ORIGIN_FIELDS), strict=True)
    rows = [
        row if origin[0] is None else replace(row, origin=origin)
        for row, origin in zip(_plain_rows(record_batch), origins, strict=True)
    ]
    times = entries.column("appended_at_unix_ms").to_pylist()
    return list(zip(entries.offsets.tolist(), times, rows, strict=True))


def _plain_rows(record_batch: pa.RecordBatch) -> list[Row]:
    columns = {name: record_batch.column(name).to_pylist() for name in FACT_SCHEMA.names}
    keys = [Key(*pair) for pair in zip(columns["from_zone"], columns["message_id"], strict=True)]
    facts = zip(*columns.values(), strict=True)
    return [Row(*parts) for parts in zip(keys, columns["digest"], facts, strict=True)]


@dataclass(frozen=True, slots=True)
class Observation:
    """A buffer as it was read from its first offset to its end."""

    start: int
    end: int
    log_id: str
    entries: dict[int, tuple[int, Row]]
    absent: Sequence[tuple[int, int, GapReason]]
    gaps: Sequence[GapRecord]
    quarantined: Sequence[Refused]
    unreadable: int
    """How many of those in quarantine cannot be read at the moment."""

    def absent_because(self, offset: int, reasons: Sequence[GapReason]) -> bool:
        """Tell whether a gap record or a replayed gap names an offset with one of some reasons."""
        ranges = [*self.absent, *((gap.first, gap.last, gap.reason) for gap in self.gaps if gap.origin_zone is None)]
        return any(first <= offset <= last and reason in reasons for first, last, reason in ranges)


def identity(gap: GapRecord) -> GapIdentity:
    """Give what makes two gap records the same."""
    return gap.first, gap.last, gap.reason, gap.detail, gap.origin_zone


async def observe(buffer: Replayable, name: str) -> Observation:
    """Read everything a buffer shows; no other call may be under way."""
    stats = await buffer.stats()
    entries: dict[int, tuple[int, Row]] = {}
    absent: list[tuple[int, int, GapReason]] = []
    at = 0
    async for frame in buffer.replay(0, max_facts=7):
        expect(frame.first == at and frame.last >= at, f"{name}: the replay has a hole or an overlap at {at}")
        at = frame.last + 1
        if frame.gap is not None:
            absent.append((frame.first, frame.last, frame.gap.reason))
        for offset, at_unix_ms, row in shown(frame, name):
            entries[offset] = at_unix_ms, row
    expect(at == stats.end, f"{name}: the replay ends at {at}, the buffer at {stats.end}")
    kept = await buffer.quarantine()
    expect(len({item.id for item in kept}) == len(kept), f"{name}: quarantined facts share an id")
    refused = [(row.key, row.digest) for item in kept for row in rows_of(item.facts)]
    unreadable = sum(item.reason == UNREADABLE for item in kept)
    gaps = await buffer.gaps()
    return Observation(stats.start, stats.end, stats.log_id, entries, absent, gaps, refused, unreadable)


def shown(frame: Frame, name: str) -> list[tuple[int, int, Row]]:
    """Take the entries of a replayed frame, which must be sound and in their places."""
    if frame.entries is None:
        return []
    wrong = digest_mismatches(frame.entries.facts)
    expect(not len(wrong), f"{name}: entries {frame.first} + {wrong.tolist()} do not have their digests")
    rows = stored_rows(frame.entries)
    in_place = [offset for offset, _, _ in rows] == list(range(frame.first, frame.last + 1))
    expect(in_place, f"{name}: the entries of frame {frame.first} to {frame.last} have other offsets")
    return rows
