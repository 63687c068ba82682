"""The first pass: both logs are read once, and every range of offsets becomes a count and two sums."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.columns import DIGEST_BYTES, byte_lengths, constant_value, fixed_rows
from bsfg.digest import ENVELOPE, KeyHash
from bsfg.errors import FrameInvalid
from bsfg.ports import GapRecord
from bsfg.sealing import digest_mismatches
from bsfg.spark.audit.scope import (
    RECEIVER,
    SENDER,
    AuditScope,
    End,
    LinkRows,
    Named,
    named,
    received,
    sender_rows,
    sent,
)

TEXTS = tuple(name for name in ENVELOPE if name != "produced_at_unix_ms")
"""The columns of the envelope that hold text; the body is covered by its digest."""

_LONG_BYTES = 256
_NUMBER_WORDS = 2
_NULL = np.uint64(0x9E3779B97F4A7C15)
_LANES = (np.uint64(0), np.uint64(0xC2B2AE3D27D4EB4F))


class EntryHash:
    """The keyed hash of entries and of their keys; the same secret gives the same numbers everywhere."""

    def __init__(self, secret: bytes) -> None:
        self._texts = {name: KeyHash(_derived(secret, name)) for name in TEXTS}
        self._keys = KeyHash(_derived(secret, "key"))
        words = DIGEST_BYTES // 4 + 3 * _NUMBER_WORDS
        raw = b"".join(_derived(secret, f"number {at}")[:16] for at in range(words + 1))
        self._coefficients = np.frombuffer(raw, dtype="<u8").reshape(-1, 2)

    def of(self, entries: EntryBatch, offsets: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Hash entries with the offsets and times that they have at the sender."""
        result = self._numbers(entries, offsets, times)
        for name, hasher in self._texts.items():
            result ^= _text_terms(hasher, entries.column(name))
        return mixed(result)

    def keys(self, entries: EntryBatch) -> np.ndarray:
        """Hash the keys of entries."""
        return self.keys_of(entries.column("from_zone"), entries.column("message_id"))

    def keys_of(self, from_zone: pa.Array, message_id: pa.Array) -> np.ndarray:
        """Hash keys that stand in two columns."""
        return np.asarray(self._keys.of(_filled(from_zone), _filled(message_id)))

    def _numbers(self, entries: EntryBatch, offsets: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Hash what has a fixed width: offset, both times and the digest."""
        produced, missing = _whole_numbers(entries.column("produced_at_unix_ms"))
        digests, unsealed = _digest_words(entries.column("digest"))
        words = np.empty((len(entries), len(self._coefficients)), dtype=np.uint64)
        words[:, 0] = 1
        for at, column in enumerate((offsets, times, produced)):
            split = np.ascontiguousarray(column, dtype=np.int64).view(np.uint32).reshape(-1, _NUMBER_WORDS)
            words[:, 1 + at * _NUMBER_WORDS : 1 + (at + 1) * _NUMBER_WORDS] = split
        words[:, 1 + 3 * _NUMBER_WORDS :] = digests
        sums = words @ self._coefficients
        high = np.uint64(0xFFFFFFFF00000000)
        result = np.asarray((sums[:, 0] & high) | (sums[:, 1] >> np.uint64(32)))
        for absent, place in ((missing, 1), (unsealed, 2)):
            if absent is not None:
                result[absent] ^= _NULL * np.uint64(2 * place + 1)
        return result


def mixed(values: np.ndarray) -> np.ndarray:
    """Spread numbers so that sums tell them apart: else exchanging a field between two entries would not show."""
    result = values.astype(np.uint64, copy=True)
    result ^= result >> np.uint64(33)
    result *= np.uint64(0xFF51AFD7ED558CCD)
    result ^= result >> np.uint64(33)
    result *= np.uint64(0xC4CEB9FE1A85EC53)
    result ^= result >> np.uint64(33)
    return result


def lanes(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give two independent numbers per hash, to be summed up side by side."""
    first, second = (mixed(hashes ^ lane) for lane in _LANES)
    return first, second


def _derived(secret: bytes, what: str) -> bytes:
    return hashlib.blake2b(what.encode(), digest_size=32, key=secret, person=b"audit").digest()


def _text_terms(hasher: KeyHash, column: pa.Array) -> np.ndarray | np.uint64:
    """Hash a column of texts; a null is not the empty text."""
    if column.null_count == len(column):
        return _NULL
    single = constant_value(column)
    if single is not None:
        return np.uint64(hasher.of_one("", _short(single)))
    texts = _short_all(_filled(column))
    terms = np.asarray(hasher.of(pa.repeat(pa.scalar("", pa.string()), len(texts)), texts))
    if column.null_count:
        terms = np.where(np.asarray(column.is_valid()), terms, _NULL)
    return terms


def _filled(column: pa.Array) -> pa.Array:
    return pc.fill_null(column, "") if column.null_count else column


def _short(text: str) -> str:
    data = text.encode()
    return text if len(data) <= _LONG_BYTES else f"\x01{hashlib.sha256(data).hexdigest()}"


def _short_all(texts: pa.Array) -> pa.Array:
    """Replace long texts by their digests: the hash lays all rows out as wide as the widest."""
    long = np.flatnonzero(byte_lengths(texts) > _LONG_BYTES)
    if not len(long):
        return texts
    values = texts.to_pylist()
    for row in long.tolist():
        values[row] = _short(values[row])
    return pa.array(values, type=pa.string())


def _whole_numbers(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Give a column of numbers, and which of them are missing if any are."""
    if not column.null_count:
        return np.asarray(column), None
    return np.asarray(pc.fill_null(column, 0)), np.asarray(column.is_null())


def _digest_words(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    missing = None
    if column.null_count:
        missing = np.asarray(column.is_null())
        column = pc.fill_null(column, bytes(DIGEST_BYTES))
    return np.ascontiguousarray(fixed_rows(column)).view("<u4"), missing


NAMED_MAX = 1_000
"""How many entries of one kind a task names; more are counted."""


@dataclass(slots=True)
class RangeSum:
    """What one log holds of a range: how many entries, two sums of their hashes, and between which places they lie."""

    count: int = 0
    first_lane: int = 0
    second_lane: int = 0
    first_place: int = -1
    last_place: int = -1

    def holds_the_same(self, other: RangeSum) -> bool:
        """Tell whether two ends hold the same entries."""
        mine = (self.count, self.first_lane, self.second_lane)
        return mine == (other.count, other.first_lane, other.second_lane)


@dataclass(frozen=True, slots=True)
class Descent:
    """An entry that stands behind another one with a higher offset, or its own."""

    entry: Named
    behind: Named


@dataclass(slots=True)
class RangeSums:
    """What was found in one stretch of one log, from ``first`` up to ``end``."""

    side: str
    first: int
    end: int
    ranges: dict[int, RangeSum] = field(default_factory=dict)
    read: int = 0
    size_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    gaps: list[GapRecord] = field(default_factory=list)
    altered: list[Named] = field(default_factory=list)
    altered_count: int = 0
    descents: list[Descent] = field(default_factory=list)
    descents_count: int = 0
    lowest: int | None = None
    highest: int | None = None
    first_entry: Named | None = None
    last_entry: Named | None = None
    paths: set[tuple[str | None, str | None]] = field(default_factory=set)
    unreadable: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Summing:
    """Reads one stretch of a log and sums it up; the keys of a receiver are given beside, to look for repeats."""

    side: str
    log: End
    log_id: str
    first: int
    end: int
    scope: AuditScope

    def __call__(self) -> tuple[RangeSums, np.ndarray]:
        """Do it, in whichever process this is."""
        found, hasher = RangeSums(self.side, self.first, self.end), EntryHash(self.scope.secret)
        keys, at = [np.empty(0, dtype=np.uint64)], self.first
        try:
            for frame in self.log.frames(self.first, self.end, self.log_id):
                if frame.entries is not None:
                    self._take(frame.entries, found, hasher)
                    if self.side == RECEIVER:
                        keys.append(hasher.keys(frame.entries))
                elif frame.gap is not None:
                    add_gap(found.gaps, frame.first, frame.last, frame.gap)
                at = frame.last + 1
        except FrameInvalid as error:
            found.unreadable.append((at, self.end - 1, error.message))
        return found, np.concatenate(keys)

    def _take(self, entries: EntryBatch, found: RangeSums, hasher: EntryHash) -> None:
        found.read += len(entries)
        found.size_bytes += entries.size_bytes
        if self.side == SENDER:
            rows, left_out = sent(entries, self.scope)
            for reason, count in left_out.items():
                found.left_out[reason] = found.left_out.get(reason, 0) + count
        else:
            found.paths |= _paths(entries)
            rows = received(entries, self.scope)
        if not len(rows):
            return
        if self.scope.deep:
            wrong = digest_mismatches(rows.entries)
            found.altered_count += len(wrong)
            found.altered += named(rows, wrong[: max(0, NAMED_MAX - len(found.altered))])
        if self.side == RECEIVER:
            _check_order(rows, found)
        add_up(found.ranges, rows, hasher.of(rows.entries, rows.offsets, rows.times), self.scope.range_facts)


def _check_order(rows: LinkRows, found: RangeSums) -> None:
    offsets = rows.offsets
    first, last = named(rows, [0, len(rows) - 1])
    if found.last_entry is not None and first.offset <= found.last_entry.offset:
        found.descents.append(Descent(first, found.last_entry))
        found.descents_count += 1
    wrong = np.flatnonzero(np.diff(offsets) <= 0)
    found.descents_count += len(wrong)
    chosen = wrong[: max(0, NAMED_MAX - len(found.descents))]
    found.descents += map(Descent, named(rows, chosen + 1), named(rows, chosen))
    found.first_entry, found.last_entry = found.first_entry or first, last
    low, high = int(offsets.min()), int(offsets.max())
    found.lowest = low if found.lowest is None else min(low, found.lowest)
    found.highest = high if found.highest is None else max(high, found.highest)


def add_up(ranges: dict[int, RangeSum], rows: LinkRows, hashes: np.ndarray, range_facts: int) -> None:
    """Add rows to the sums of their ranges."""
    numbers = rows.offsets // range_facts
    if len(numbers) > 1 and (np.diff(numbers) < 0).any():
        order = np.argsort(numbers, kind="stable")
        numbers, hashes, places = numbers[order], hashes[order], rows.places[order]
    else:
        places = rows.places
    edges = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    first, second = (np.add.reduceat(lane, edges) for lane in lanes(hashes))
    ends = np.append(edges[1:], len(numbers))
    for at, (start, stop) in enumerate(zip(edges.tolist(), ends.tolist(), strict=True)):
        found = ranges.setdefault(int(numbers[start]), RangeSum())
        part = RangeSum(
            stop - start, int(first[at]), int(second[at]), int(places[start:stop].min()), int(places[start:stop].max())
        )
        merge_sum(found, part)


def merge_sum(into: RangeSum, part: RangeSum) -> None:
    """Add what another stretch holds of the same range."""
    lane_end = 1 << 64
    into.first_place = part.first_place if into.count == 0 else min(into.first_place, part.first_place)
    into.last_place = max(into.last_place, part.last_place)
    into.count += part.count
    into.first_lane = (into.first_lane + part.first_lane) % lane_end
    into.second_lane = (into.second_lane + part.second_lane) % lane_end


def add_gap(gaps: list[GapRecord], first: int, last: int, gap: GapRecord) -> None:
    """Note a range without entries, joined to the one before when it goes on."""
    before = gaps[-1] if gaps else None
    if before is not None and before.last + 1 == first and (before.reason, before.detail) == (gap.reason, gap.detail):
        gaps.pop()
        first = before.first
    gaps.append(GapRecord(first, last, gap.reason, gap.at_unix_ms, gap.detail, gap.origin_zone))


def _paths(entries: EntryBatch) -> set[tuple[str | None, str | None]]:
    """Give by which zones facts of which zones came here."""
    columns = [entries.column("origin_zone"), entries.column("from_zone")]
    single = tuple(constant_value(column) for column in columns)
    if None not in single:
        return {(single[0], single[1])}
    pairs = pa.table(columns, names=["origin", "source"]).group_by(["origin", "source"]).aggregate([])
    return set(zip(*(pairs.column(name).to_pylist() for name in ("origin", "source")), strict=True))


@dataclass(frozen=True, slots=True)
class Sibling:
    """The sender's other buffer, which another link pulls; only a key tells which link brought an entry."""

    log: End
    log_id: str
    end: int

    def has(self, entry: Named) -> bool:
        """Tell whether an entry of the receiver is the one that this buffer has at its offset."""
        if not 0 <= entry.offset < self.end:
            return False
        rows = self.rows(entry.offset, entry.offset + 1)
        return any(each.key == entry.key for each in named(rows, range(len(rows))))

    def rows(self, first: int, end: int) -> LinkRows:
        """Read a range of offsets."""
        end = min(end, self.end)
        frames = self.log.frames(first, end, self.log_id) if first < end else iter(())
        return LinkRows.concat([sender_rows(frame.entries) for frame in frames if frame.entries is not None])


def same_keys(offsets: np.ndarray, keys: np.ndarray, known_offsets: np.ndarray, known_keys: np.ndarray) -> np.ndarray:
    """Mark the rows whose key is the one that some sorted offsets are known to have."""
    at = np.searchsorted(known_offsets, offsets)
    result = np.zeros(len(offsets), dtype=bool)
    inside = np.flatnonzero(at < len(known_offsets))
    found = at[inside]
    result[inside] = (known_offsets[found] == offsets[inside]) & (known_keys[found] == keys[inside])
    return result
