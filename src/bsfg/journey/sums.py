"""Sums of a log: what one end of a link holds of each range of offsets, as a count and two sums of keyed hashes.

Whoever reads a log makes the same numbers of it: a node of its own, an auditor of what a node gives him or of a folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.columns import DIGEST_BYTES, byte_lengths, constant_value, fixed_rows, is_in
from bsfg.digest import ENVELOPE, KeyHash
from bsfg.errors import FrameInvalid
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.ports import Frame, GapRecord, GapSet
from bsfg.sealing import digest_mismatches

SENDER, RECEIVER = "sender", "receiver"
RANGE_FACTS = 65_536
"""How many offsets of the sender are compared as one range."""

NO_END = 1 << 62
"""The end of a window that is open: receivers may hold offsets that the sender does not have."""

RETURNING, NOT_CARRIED, NOT_ASKED_FOR, NOT_SERVED = "returning", "not_carried", "not_asked_for", "not_served"
"""Why a sender leaves a fact out: it was said by the receiver's own zone, is for zones that the link leaves out, is
none that the link's filter names, or none that the sender serves to the receiver at all."""


@dataclass(frozen=True, slots=True)
class AuditScope:
    """One stream of a link: whose facts, which of the sender's offsets (``end`` exclusive), and how to compare them.

    ``zone`` is the sender's, which stands as origin in the receiver's forward buffer. ``relayed`` says that the link
    pulls the sender's forward buffer, and ``shared`` that another link brings the sender's other buffer, whose
    offsets look the same at the receiver.
    """

    zone: str
    secret: bytes
    first: int = 0
    end: int = NO_END
    receiver_zone: str | None = None
    carry_only: frozenset[str] = frozenset()
    relayed: bool = False
    shared: bool = False
    range_facts: int = RANGE_FACTS
    deep: bool = True
    asked: FactFilter = EVERY_FACT

    def bounds(self, number: int) -> tuple[int, int]:
        """Give the first offset of a range and the one after its last, inside the window."""
        first = number * self.range_facts
        return max(first, self.first), min(first + self.range_facts, self.end)


@dataclass(frozen=True, slots=True)
class LinkRows:
    """Entries of the link: their offsets and times at the sender, and their places in the log they were read from."""

    entries: EntryBatch
    offsets: np.ndarray
    times: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: np.ndarray) -> LinkRows:
        """Give some of the rows, in that order."""
        return LinkRows(self.entries.take(rows), self.offsets[rows], self.times[rows], self.places[rows])

    @staticmethod
    def concat(parts: list[LinkRows]) -> LinkRows:
        """Put rows one after the other."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, dtype=np.int64)
        names = ("offsets", "times", "places")
        columns = [np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in names]
        return LinkRows(EntryBatch.concat([part.entries for part in parts]), *columns)


@dataclass(frozen=True, slots=True)
class Named:
    """An entry by name: its place in the log it was read from, its offset at the sender, and its key."""

    place: int
    offset: int
    from_zone: str | None
    message_id: str | None

    @property
    def key(self) -> tuple[str | None, str | None]:
        """Its key."""
        return self.from_zone, self.message_id


def named(rows: LinkRows, chosen: np.ndarray | Sequence[int]) -> list[Named]:
    """Name some of the rows."""
    if not len(chosen):
        return []
    part = rows.take(np.asarray(chosen))
    keys = part.entries.values("from_zone"), part.entries.values("message_id")
    return list(map(Named, part.places.tolist(), part.offsets.tolist(), *keys))


def sent(entries: EntryBatch, scope: AuditScope) -> tuple[LinkRows, dict[str, int]]:
    """Give what a sender sends of some entries, and count by reason what it leaves out."""
    left_out: dict[str, int] = {}
    if scope.carry_only:
        carried = is_in(entries.column("to_zone"), scope.carry_only)
        entries = _kept(entries, carried, NOT_CARRIED, left_out)
    if scope.asked:
        entries = _kept(entries, scope.asked.wanted(entries), NOT_ASKED_FOR, left_out)
    if scope.receiver_zone is not None:
        others = ~is_in(entries.column("from_zone"), frozenset({scope.receiver_zone}))
        entries = _kept(entries, others, RETURNING, left_out)
    return sender_rows(entries), left_out


def sender_rows(entries: EntryBatch) -> LinkRows:
    """Give entries of a sender with their own offsets and times."""
    return LinkRows(entries, entries.offsets, _numbers(entries.column("appended_at_unix_ms")), entries.offsets)


def received(entries: EntryBatch, scope: AuditScope) -> LinkRows:
    """Give those entries of a forward buffer that the link brought, by the offsets they have at the sender."""
    offsets = _numbers(entries.column("origin_offset"))
    mine = is_in(entries.column("origin_zone"), frozenset({scope.zone}))
    mine &= (offsets >= scope.first) & (offsets < scope.end)
    if scope.shared:
        own = is_in(entries.column("from_zone"), frozenset({scope.zone}))
        mine &= ~own if scope.relayed else own
    times = _numbers(entries.column("origin_appended_at_unix_ms"))
    rows = LinkRows(entries, offsets, times, entries.offsets)
    return rows if mine.all() else rows.take(np.flatnonzero(mine))


def _kept(entries: EntryBatch, mask: np.ndarray, reason: str, left_out: dict[str, int]) -> EntryBatch:
    if mask.all():
        return entries
    left_out[reason] = int(np.count_nonzero(~mask))
    return entries.take(np.flatnonzero(mask))


def _numbers(column: pa.Array) -> np.ndarray:
    """Give a column of whole numbers, -1 where there is none."""
    return np.asarray(pc.fill_null(column, -1) if column.null_count else column)


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
    """What was found in one stretch of one log, from ``first`` up to ``end``.

    ``wire_bytes`` is what it took on the wire where the log's own node found it, None where the log was read.
    """

    side: str
    first: int
    end: int
    ranges: dict[int, RangeSum] = field(default_factory=dict)
    read: int = 0
    size_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    gaps: list[GapRecord] = field(default_factory=list)
    gap_sets: list[GapSet] = field(default_factory=list)
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
    wire_bytes: int | None = None

    def all_gaps(self) -> list[GapRecord]:
        """Give the ranges that hold no entries one by one, as the log itself explained them."""
        told = [gap for each in self.gap_sets for gap in each.records()]
        return sorted([*self.gaps, *told], key=lambda gap: gap.first) if told else self.gaps


class Summation:
    """Sums up a log from an offset on, piece by piece, in whichever process that is.

    ``next_offset`` is how far it came, ``scanned`` how many entries that took, also those that were left out, and gaps.
    """

    def __init__(self, side: str, first: int, end: int, scope: AuditScope) -> None:
        self.found, self._scope = RangeSums(side, first, end), scope
        self._hasher, self._keys = EntryHash(scope.secret), [np.empty(0, dtype=np.uint64)]
        self.next_offset, self.scanned = first, 0

    @property
    def keys(self) -> np.ndarray:
        """The hashed keys of all entries of a receiver, to look for repeats."""
        return np.concatenate(self._keys)

    def take(self, frame: Frame) -> None:
        """Add a frame; raises `FrameInvalid` unless it follows the last one."""
        self.passed(frame)
        if frame.entries is not None:
            self.add(frame.entries)

    def passed(self, frame: Frame) -> None:
        """Note a frame whose entries are added: what is not there of it, and why."""
        if frame.first != self.next_offset or frame.last < frame.first:
            expected = f"{self.next_offset} is expected next"
            raise FrameInvalid(f"a frame has offsets {frame.first}..{frame.last}, {expected}")
        if frame.gap is not None:
            add_gap(self.found.gaps, frame.first, frame.last, frame.gap)
        self.scanned += 1 if frame.gap is not None else frame.last - frame.first + 1
        self.found.gap_sets += frame.skips
        self.next_offset = frame.last + 1

    def add(self, entries: EntryBatch) -> None:
        """Add entries; of a sender those that it sends, of a receiver those that the link brought."""
        found, scope = self.found, self._scope
        found.read += len(entries)
        found.size_bytes += entries.size_bytes
        if found.side == SENDER:
            rows, left_out = sent(entries, scope)
            for reason, count in left_out.items():
                found.left_out[reason] = found.left_out.get(reason, 0) + count
        else:
            found.paths |= _paths(entries)
            rows = received(entries, scope)
            self._keys.append(self._hasher.keys(entries))
        if not len(rows):
            return
        if scope.deep:
            wrong = digest_mismatches(rows.entries)
            found.altered_count += len(wrong)
            found.altered += named(rows, wrong[: max(0, NAMED_MAX - len(found.altered))])
        if found.side == RECEIVER:
            _check_order(rows, found)
        add_up(found.ranges, rows, self._hasher.of(rows.entries, rows.offsets, rows.times), scope.range_facts)


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
