"""What a storage has promised: the record that a campaign keeps of every answer, and holds against the storage later.

A call that was answered is *acknowledged*; one that is under way, or ended in an error that says nothing, is *in
doubt*: it may have happened as a whole or not at all. What was read counts as acknowledged, because nothing is visible
before it is durable.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import pyarrow as pa

from bsfg.batch import FACT_SCHEMA, ORIGIN_FIELDS, EntryBatch, FactBatch
from bsfg.fact import Key
from bsfg.frontier import Frontier
from bsfg.ports import (
    UNREADABLE,
    Buffer,
    ConsumerSpec,
    ConsumerState,
    Frame,
    GapRecord,
    OriginSpan,
    Receipt,
    Replayable,
    Result,
)
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


EVERYTHING = 1 << 62

Place = tuple[str, Buffer]
"""A stream and one of its buffers."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A batch of which nobody knows whether it is stored, and the keys that were new when it was sent."""

    rows: tuple[Row, ...]
    fresh: frozenset[Key]


@dataclass(slots=True)
class BufferLedger:
    """What one buffer has promised."""

    name: str
    buffer: Buffer
    log_id: str = ""
    start: int = 0
    end: int = 0
    stored: dict[int, tuple[int, Row]] = field(default_factory=dict)
    offsets: dict[Key, int] = field(default_factory=dict)
    rows: dict[Key, Row] = field(default_factory=dict)
    inserted: set[Key] = field(default_factory=set)
    doubts: dict[int, Doubt] = field(default_factory=dict)
    gaps: set[GapIdentity] = field(default_factory=set)
    quarantined: set[Refused] = field(default_factory=set)
    released: set[Refused] = field(default_factory=set)
    may_truncate_before: int = 0
    confirmed_before: int = -1
    """What was confirmed when a consumer was retired since the last check: it could leave until then."""
    may_evict: bool = False
    damaged: bool = False
    shown: set[int] = field(default_factory=set)
    cut_off: set[int] = field(default_factory=set)
    notes_lost: bool = False
    _tokens: int = 0

    def copy(self) -> BufferLedger:
        """Give an independent copy."""
        return _copied(self)

    # Writing.

    def begin(self, rows: tuple[Row, ...]) -> int:
        """Take note of a batch that is about to be stored."""
        self._tokens += 1
        self.doubts[self._tokens] = Doubt(rows, frozenset(row.key for row in rows if row.key not in self.rows))
        return self._tokens

    def refuse(self, token: int) -> None:
        """Take note that nothing of a batch was stored."""
        del self.doubts[token]

    def acknowledge(self, token: int, receipt: Receipt) -> None:
        """Hold a receipt against what is known, and remember it."""
        rows = self.doubts[token].rows
        results = [Result(result) for result in receipt.results.tolist()]
        offsets = receipt.offsets.tolist()
        expect(len(results) == len(rows) == len(offsets), f"{self.name}: a receipt has another length than its batch")
        fresh = [offset for offset, result in zip(offsets, results, strict=True) if result == Result.INSERTED]
        expect(
            fresh == list(range(fresh[0], fresh[0] + len(fresh))) if fresh else True,
            f"{self.name}: the offsets {fresh} of one batch are not consecutive",
        )
        for row, offset, result in zip(rows, offsets, results, strict=True):
            self._take_answer(row, offset, result, receipt.appended_at_unix_ms)
        del self.doubts[token]

    def _take_answer(self, row: Row, offset: int, result: Result, at_unix_ms: int) -> None:
        what = f"{self.name}: {row.key.message_id} was answered {result.name} at {offset}"
        if self.damaged and self._excused(row.key, result):
            return
        if result == Result.INSERTED:
            expect(row.key not in self.inserted, f"{what}, but it was stored before at {self.offsets.get(row.key)}")
            self._remember(offset, at_unix_ms, row)
            self.inserted.add(row.key)
            return
        first = self._first_of(row.key, offset)
        expect(first is not None, f"{what}, but nothing with this key was ever stored")
        assert first is not None
        expect(self.offsets[row.key] == offset, f"{what}, but it is at {self.offsets[row.key]}")
        same = first.digest == row.digest
        if result == Result.ALREADY_EXISTS and not same:
            # A medium that fails may keep a storage from comparing the two; then it must have kept this one aside.
            self.quarantined.add((row.key, row.digest))
            return
        expect(
            same == (result == Result.ALREADY_EXISTS), f"{what}, but the bodies are {'equal' if same else 'different'}"
        )
        if result == Result.CONFLICT and self.buffer == Buffer.FORWARD:
            self.quarantined.add((row.key, row.digest))

    def _excused(self, key: Key, result: Result) -> bool:
        """Tell whether damage explains an answer: keys whose bytes had left may be lost, lost bytes' keys may not."""
        if result != Result.INSERTED:
            return key not in self.rows
        if key in self.offsets and self.offsets[key] not in self.shown:
            self.notes_lost = True
            self.forget(key)
        return False

    def _first_of(self, key: Key, offset: int) -> Row | None:
        """Give the row that was first under a key; an answer may be the first sign that a batch in doubt is there."""
        if key in self.rows:
            return self.rows[key]
        for doubt in self.doubts.values():
            for row in doubt.rows:
                if row.key == key and offset not in self.stored:
                    self.rows[key], self.offsets[key] = row, offset
                    self.end = max(self.end, offset + 1)
                    return row
        return None

    def _remember(self, offset: int, at_unix_ms: int, row: Row) -> None:
        known = self.stored.get(offset)
        what = f"{self.name}: {row.key.message_id} at {offset}"
        expect(known is None or known[1] == row, f"{what} takes an offset that another entry has")
        there = self.offsets.get(row.key, offset)
        expect(there == offset, f"{what} is there twice, first at {there}")
        above = self.damaged or known is not None or offset >= self.start
        expect(above, f"{what} lies below the start {self.start}")
        if row.key in self.rows:
            expect(self.rows[row.key].digest == row.digest, f"{what} has another body than the one acknowledged")
        self.stored[offset] = at_unix_ms, row
        self.shown.add(offset)
        self.offsets[row.key], self.rows[row.key] = offset, row
        self.end = max(self.end, offset + 1)

    # Checking.

    def check(self, seen: Observation, *, confirmed_through: int) -> None:
        """Hold what was read, while no call was under way, against what was promised."""
        other = self.log_id not in ("", seen.log_id)
        expect(self.damaged or not other, f"{self.name}: another log_id than before")
        self.log_id, self.notes_lost = seen.log_id, self.notes_lost or other
        self._check_ends(seen)
        self.take_seen(seen.entries)
        self.shown = set(seen.entries)
        self._check_missing(seen, max(confirmed_through, self.confirmed_before))
        self._check_doubts(seen)
        self._check_notes(seen)
        self.start, self.end, self.may_truncate_before, self.confirmed_before = seen.start, seen.end, 0, -1

    def take_seen(self, entries: dict[int, tuple[int, Row]]) -> None:
        """Hold entries that were read against what was stored; from now on they must stay."""
        in_doubt = {row for doubt in self.doubts.values() for row in doubt.rows}
        for offset, (at_unix_ms, row) in entries.items():
            what = f"{self.name}: {row.key.message_id} at {offset}"
            if offset not in self.stored:
                expect(row in in_doubt or self.rows.get(row.key) == row, f"{what} comes from nowhere")
                self._remember(offset, at_unix_ms, row)
            expect(self.stored[offset] == (at_unix_ms, row), f"{what} is not what was stored: {self.stored[offset]}")

    def _check_ends(self, seen: Observation) -> None:
        if self.damaged:
            return
        expect(seen.start >= self.start, f"{self.name}: the start went back from {self.start} to {seen.start}")
        expect(seen.end >= self.end, f"{self.name}: the end went back from {self.end} to {seen.end}")
        broken = [part for part in seen.absent if part[2] in BROKEN]
        expect(not broken, f"{self.name}: damage is reported where there is none: {broken}")

    def _check_missing(self, seen: Observation, confirmed_through: int) -> None:
        for offset in sorted(self.stored.keys() - seen.entries.keys()):
            if offset < self.start or offset < min(seen.start, self.may_truncate_before):
                continue
            left = self.may_evict and offset < seen.start
            if left and (offset <= confirmed_through or seen.absent_because(offset, LEFT)):
                continue
            row = self.stored[offset][1]
            what = f"{self.name}: {row.key.message_id} at {offset} is gone (found {seen.start} to {seen.end})"
            expect(self.damaged, what)
            if not seen.absent_because(offset, CUT):
                expect(offset >= seen.end, f"{what}, and no gap record says so")
                self.cut_off.add(offset)
            self.forget(row.key)

    def _check_doubts(self, seen: Observation) -> None:
        """A batch in doubt is there as a whole or not at all; from now on it is decided."""
        there = {row.key for _, row in seen.entries.values()}
        shared = Counter(key for doubt in self.doubts.values() for key in doubt.fresh)
        for doubt in self.doubts.values():
            own = {key for key in doubt.fresh - self.inserted if shared[key] == 1}
            missing = {key for key in own - there if self.offsets.get(key, seen.start) >= seen.start}
            expect(
                not missing or not own & there,
                f"{self.name}: half of a batch: {sorted(own & there)} are there, {sorted(missing)} are not",
            )
        self.doubts.clear()

    def _check_notes(self, seen: Observation) -> None:
        found = Counter(identity(gap) for gap in seen.gaps)
        twice = [gap for gap, count in found.items() if count > 1]
        expect(not twice, f"{self.name}: gap records are there twice: {twice}")
        missing = {gap for gap in self.gaps if gap not in found and not _covered(gap, found)}
        expect(self.damaged or not missing, f"{self.name}: gap records are gone: {sorted(missing, key=str)}")
        refused = set(seen.quarantined)
        expect(len(refused) == len(seen.quarantined), f"{self.name}: a fact is quarantined twice")
        gone = self.quarantined - refused - self.released
        # A medium that fails may keep one from being read, and then it is shown as that.
        expect(self.damaged or len(gone) <= seen.unreadable, f"{self.name}: quarantined facts are gone: {sorted(gone)}")
        self.notes_lost |= bool(missing or gone)
        self.gaps, self.quarantined, self.released = set(found), refused, self.released - refused

    def forget(self, key: Key) -> None:
        """Drop a fact that damage has taken, so that it may be stored again."""
        offset = self.offsets.pop(key, None)
        self.rows.pop(key, None)
        self.inserted.discard(key)
        if offset is not None:
            self.stored.pop(offset, None)


@dataclass(slots=True)
class CursorLedger:
    """What is promised about one consumer: at least ``lower`` is confirmed, and no more than ``upper``."""

    spec: ConsumerSpec
    created: bool = False
    lower: Frontier = field(default_factory=Frontier)
    upper: Frontier = field(default_factory=Frontier)
    may_be_retired: bool = False
    retired_reason: str | None = None

    def copy(self) -> CursorLedger:
        """Give an independent copy."""
        return replace(self, lower=self.lower.copy(), upper=self.upper.copy())

    def check(self, state: ConsumerState | None, *, damaged: bool) -> bool:
        """Hold a consumer's state against what was promised; tell whether damage has set it back."""
        name = self.spec.name
        if state is None:
            expect(damaged or not self.created, f"consumer {name} is gone")
            return self.created
        expect(state.spec == self.spec, f"consumer {name} has other settings than it was created with")
        found = Frontier(state.checkpoint.committed, list(state.ranges))
        if not self.created:
            self.lower, self.upper = found.copy(), found.copy()
        less = not _covers(found, self.lower)
        expect(damaged or not less, f"consumer {name} went back: {self.lower} was acknowledged, {found} is there")
        expect(_covers(self.upper, found), f"consumer {name} was sent only {self.upper}, but {found} is there")
        retired = state.retired_reason == self.retired_reason or self.may_be_retired
        expect(damaged or retired, f"consumer {name}: retired {self.retired_reason!r}, found {state.retired_reason!r}")
        self.created, self.retired_reason, self.may_be_retired = True, state.retired_reason, False
        self.lower, self.upper = found, found.copy()
        return less


def _covered(gap: GapIdentity, found: Iterable[GapIdentity]) -> bool:
    """Tell whether a range is part of a larger one of its kind: neighbours become one."""
    first, last, *kind = gap
    return any(other[0] <= first and last <= other[1] and list(other[2:]) == kind for other in found)


def _covers(large: Frontier, small: Frontier) -> bool:
    inner = [(0, small.committed), *small.ranges] if small.committed >= 0 else small.ranges
    outer = [(0, large.committed), *large.ranges]
    return all(any(first <= a and b <= last for first, last in outer) for a, b in inner)


@dataclass(slots=True)
class Ledger:
    """Everything that a storage has promised; written by one task, copied from any thread."""

    buffers: dict[Place, BufferLedger] = field(default_factory=dict)
    opened: set[Place] = field(default_factory=set)
    cursors: dict[str, CursorLedger] = field(default_factory=dict)
    numbers: int = 0
    set_back: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def copy(self) -> Ledger:
        """Give an independent copy as of this moment."""
        with self.lock:
            return Ledger(
                {place: book.copy() for place, book in self.buffers.items()},
                set(self.opened),
                {name: cursor.copy() for name, cursor in self.cursors.items()},
                self.numbers,
                set(self.set_back),
            )

    def book(self, place: Place) -> BufferLedger:
        """Give the record of one buffer."""
        if place not in self.buffers:
            self.buffers[place] = BufferLedger(f"{place[0]}/{place[1].value}", place[1])
        return self.buffers[place]

    def unanswered(self) -> list[tuple[Place, tuple[Row, ...]]]:
        """Give the batches in doubt, which their senders will send again."""
        return [(place, doubt.rows) for place, book in self.buffers.items() for doubt in book.doubts.values()]

    def confirmed_through(self, place: Place) -> int:
        """Give the highest offset that all required consumers of a buffer may have confirmed.

        Without any, nothing in a store buffer counts as confirmed, and everything in a forward buffer does.
        """
        required = [
            cursor.upper.committed
            for cursor in self.cursors.values()
            if (cursor.spec.stream, cursor.spec.buffer) == place
            and cursor.spec.required
            and not (cursor.retired_reason or cursor.may_be_retired)
        ]
        return min(required, default=-1 if place[1] == Buffer.STORE else EVERYTHING)


def _copied(book: BufferLedger) -> BufferLedger:
    result = replace(book)
    for name in book.__dataclass_fields__:
        value = getattr(book, name)
        if isinstance(value, dict | set):
            setattr(result, name, type(value)(value))
    return result
