"""Sets of ranges of offsets, and gap records: what was not or is no longer there, and why."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bsfg.errors import FrameInvalid, InvalidArgument, OffsetOutOfRange
from bsfg.retention import GapReason
from bsfg.retention import GapRecord as GapRecord  # noqa: PLC0414 (given on, beside the sets of them)

_CHUNK_RANGES = 1_024
OFFSETS_END = 1 << 62
"""No offset reaches this; sums of two still fit into 64 bits."""
_HEAD = struct.Struct("<HBqI")
_RUNS = struct.Struct("<H")
_RUN = np.dtype([("time", "<i8"), ("count", "<u2")])
_WIDTHS = (1, 2, 4, 8)
_FOLDED = 16
"""In the form of a chunk: behind the distances stands for how many offsets each range stands."""


@dataclass(frozen=True, slots=True, eq=False)
class RangeSet:
    """Ranges in ascending order, apart from each other, each with the time it was last added to.

    A *folded* range stands for some of its offsets: how many is known, which ones no longer. ``counts`` says for how
    many each range stands, and is None when all stand for all of theirs.
    """

    firsts: np.ndarray
    lasts: np.ndarray
    times_unix_ms: np.ndarray
    counts: np.ndarray | None = None

    @staticmethod
    def empty() -> RangeSet:
        """Give a set without ranges."""
        none = np.empty(0, dtype=np.int64)
        return RangeSet(none, none, none)

    @staticmethod
    def of(ranges: Sequence[tuple[int, int]], at_unix_ms: int) -> RangeSet:
        """Make a set of some ranges, in any order, of one time."""
        columns = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return RangeSet.normal(columns[:, 0], columns[:, 1], np.full(len(columns), at_unix_ms, dtype=np.int64))

    @staticmethod
    def where(mask: np.ndarray, base: int, at_unix_ms: int) -> RangeSet:
        """Make a set of the offsets, counted from a base, at which a mask is true."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
        firsts, lasts = edges[0::2] + base, edges[1::2] + base - 1
        return RangeSet(firsts, lasts, np.full(len(firsts), at_unix_ms, dtype=np.int64))

    @staticmethod
    def of_offsets(offsets: np.ndarray, at_unix_ms: int) -> RangeSet:
        """Make a set of ascending offsets."""
        edges = np.flatnonzero(np.diff(offsets) != 1)
        firsts = offsets[np.concatenate(([0], edges + 1))] if len(offsets) else offsets
        lasts = offsets[np.concatenate((edges, [len(offsets) - 1]))] if len(offsets) else offsets
        return RangeSet(firsts, lasts, np.full(len(firsts), at_unix_ms, dtype=np.int64))

    @staticmethod
    def counted_in(
        firsts: np.ndarray, lasts: np.ndarray, times_unix_ms: np.ndarray, counts: np.ndarray | None
    ) -> RangeSet:
        """Make a set of ranges in order, of which each stands for so many offsets."""
        if counts is not None and np.array_equal(counts, lasts - firsts + 1):
            counts = None
        return RangeSet(firsts, lasts, times_unix_ms, counts)

    @staticmethod
    def normal(
        firsts: np.ndarray, lasts: np.ndarray, times_unix_ms: np.ndarray, counts: np.ndarray | None = None
    ) -> RangeSet:
        """Make a set of ranges in any order, which may overlap."""
        if len(firsts) < 2:
            return RangeSet.counted_in(firsts, lasts, times_unix_ms, counts)
        order = np.argsort(firsts, kind="stable")
        firsts, lasts, times_unix_ms = firsts[order], lasts[order], times_unix_ms[order]
        counts = counts[order] if counts is not None else None
        reach = np.maximum.accumulate(lasts)
        starts = np.flatnonzero(np.concatenate(([True], firsts[1:] > reach[:-1] + 1)))
        if len(starts) == len(firsts):
            return RangeSet.counted_in(firsts, lasts, times_unix_ms, counts)
        times_unix_ms = np.maximum.reduceat(times_unix_ms, starts)
        together = firsts[starts], np.maximum.reduceat(lasts, starts), times_unix_ms
        if counts is not None:
            counts = _together_counts(firsts, lasts, counts, starts)
        return RangeSet.counted_in(*together, counts)

    @staticmethod
    def union(sets: Sequence[RangeSet]) -> RangeSet:
        """Make one set of several."""
        if len(sets) == 1:
            return sets[0]
        return RangeSet.normal(*_columns(sets))

    @staticmethod
    def in_order(parts: Sequence[RangeSet]) -> RangeSet:
        """Make one set of several that follow each other."""
        return parts[0] if len(parts) == 1 else RangeSet.counted_in(*_columns(parts))

    def __len__(self) -> int:
        return len(self.firsts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and all(
            np.array_equal(mine, others)
            for mine, others in (
                (self.firsts, other.firsts),
                (self.lasts, other.lasts),
                (self.times_unix_ms, other.times_unix_ms),
                (self.held, other.held),
            )
        )

    def __hash__(self) -> int:
        return hash(self.encode())

    @property
    def held(self) -> np.ndarray:
        """For how many offsets each range stands."""
        return self.lasts - self.firsts + 1 if self.counts is None else self.counts

    @property
    def folded(self) -> np.ndarray:
        """Tell of each range whether it is folded."""
        return np.asarray(self.held != self.lasts - self.firsts + 1)

    @property
    def offsets(self) -> int:
        """For how many offsets the ranges stand."""
        return int(self.held.sum())

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Give first, last and time of each range."""
        return zip(self.firsts.tolist(), self.lasts.tolist(), self.times_unix_ms.tolist(), strict=True)

    def slice(self, start: int, stop: int) -> RangeSet:
        """Give some neighbouring ranges."""
        counts = self.counts[start:stop] if self.counts is not None else None
        return RangeSet.counted_in(
            self.firsts[start:stop], self.lasts[start:stop], self.times_unix_ms[start:stop], counts
        )

    def take(self, rows: np.ndarray) -> RangeSet:
        """Give the ranges that a mask or an ascending list of rows names."""
        counts = self.counts[rows] if self.counts is not None else None
        return RangeSet.counted_in(self.firsts[rows], self.lasts[rows], self.times_unix_ms[rows], counts)

    def within(self, first: int, last: int) -> RangeSet:
        """Give what lies inside a range of offsets; of a folded range that is cut as much as may lie there."""
        start = int(np.searchsorted(self.lasts, first))
        stop = int(np.searchsorted(self.firsts, last, side="right"))
        cut = self.slice(start, max(start, stop))
        firsts, lasts = np.maximum(cut.firsts, first), np.minimum(cut.lasts, last)
        counts = np.minimum(cut.counts, lasts - firsts + 1) if cut.counts is not None else None
        return RangeSet.counted_in(firsts, lasts, cut.times_unix_ms, counts)

    def beginning_at(self, first: int, count: int) -> RangeSet:
        """Give the same ranges, the first of them beginning earlier and standing for so many offsets more."""
        firsts, counts = self.firsts.copy(), self.held.copy()
        firsts[0], counts[0] = first, counts[0] + count
        return RangeSet.counted_in(firsts, self.lasts, self.times_unix_ms, counts)

    def fold(self, shift: int) -> RangeSet:
        """Make one range of all that begin in the same 2 ** ``shift`` offsets; for how many it stands stays exact."""
        if not len(self):
            return self
        places = self.firsts >> shift
        starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        lasts = self.lasts[np.append(starts[1:], len(self)) - 1]
        times_unix_ms = np.maximum.reduceat(self.times_unix_ms, starts)
        return RangeSet.counted_in(self.firsts[starts], lasts, times_unix_ms, np.add.reduceat(self.held, starts))

    def cover(self, others: RangeSet) -> np.ndarray:
        """Tell for each range of another set whether one of this set holds all of it."""
        if not len(self):
            return np.zeros(len(others), dtype=bool)
        at = np.searchsorted(self.firsts, others.firsts, side="right") - 1
        return (at >= 0) & (self.lasts[np.maximum(at, 0)] >= others.lasts)

    def news(self, others: RangeSet) -> RangeSet:
        """Give what this set does not know of another one, which is most often all or nothing of each range.

        What lies in a folded range is known: every offset there was judged when it was folded. A folded range is news
        when it stands for more offsets than are known inside it.
        """
        fresh = others.take(~self.cover(others))
        if not len(fresh) or (self.counts is None and fresh.counts is None):
            return fresh
        folds, exact = self.take(self.folded), ~fresh.folded
        firsts, lasts = fresh.firsts.copy(), fresh.lasts.copy()
        if len(folds):
            before = np.searchsorted(folds.firsts, firsts, side="right") - 1
            reach = np.where(before >= 0, folds.lasts[np.maximum(before, 0)], -1)
            firsts = np.where(exact & (reach >= firsts), reach + 1, firsts)
            behind = np.searchsorted(folds.firsts, lasts, side="right") - 1
            cut = exact & (behind >= 0) & (folds.lasts[np.maximum(behind, 0)] > lasts)
            lasts = np.where(cut, folds.firsts[np.maximum(behind, 0)] - 1, lasts)
        sums = np.concatenate(([0], np.cumsum(self.held)))
        start = np.searchsorted(self.lasts, firsts)
        known = sums[np.maximum(start, np.searchsorted(self.firsts, lasts, side="right"))] - sums[start]
        counts = np.where(exact, lasts - firsts + 1, fresh.held)
        wanted = (firsts <= lasts) & (exact | (known < counts))
        return RangeSet.counted_in(firsts, lasts, fresh.times_unix_ms, counts).take(wanted)

    # The stored and sent form.

    def encode(self) -> bytes:
        """Write the set in its compact form."""
        return b"".join(_chunk(self.slice(at, at + _CHUNK_RANGES)) for at in range(0, len(self), _CHUNK_RANGES))

    @staticmethod
    def counted(data: bytes) -> int:
        """Count the ranges of a set as it says itself, without making them; raises `FrameInvalid` if it is cut off."""
        count = at = 0
        try:
            while at < len(data):
                here, _, _, size = _HEAD.unpack_from(data, at)
                (runs,) = _RUNS.unpack_from(data, at + _HEAD.size + size)
                at += _HEAD.size + size + _RUNS.size + runs * _RUN.itemsize
                count += here
        except struct.error as error:
            raise FrameInvalid(f"a set of ranges is malformed: {error}") from None
        return count

    @staticmethod
    def decode(data: bytes) -> RangeSet:
        """Read a set; raises `FrameInvalid` unless it is one."""
        parts, at = [], 0
        try:
            while at < len(data):
                part, at = _read_chunk(data, at)
                parts.append(part)
        except (struct.error, ValueError, OverflowError) as error:
            raise FrameInvalid(f"a set of ranges is malformed: {error}") from None
        if not parts:
            return RangeSet.empty()
        found = RangeSet.in_order(parts)
        if bool((found.firsts[1:] <= found.lasts[:-1] + 1).any()):
            raise FrameInvalid("the ranges of a set are not in order, or not apart")
        return found


def _columns(sets: Sequence[RangeSet]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Put the columns of sets one after the other."""
    counts = None if all(each.counts is None for each in sets) else np.concatenate([each.held for each in sets])
    return (
        np.concatenate([each.firsts for each in sets]),
        np.concatenate([each.lasts for each in sets]),
        np.concatenate([each.times_unix_ms for each in sets]),
        counts,
    )


def _together_counts(firsts: np.ndarray, lasts: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Tell for how many offsets ranges stand that become one; ``starts`` says where each of them begins."""
    found = np.add.reduceat(counts, starts)
    stops = np.append(starts[1:], len(firsts))
    reach = np.maximum.accumulate(lasts)
    overlaps = np.concatenate(([False], firsts[1:] <= reach[:-1]))
    for number in np.flatnonzero(np.logical_or.reduceat(overlaps, starts)).tolist():
        part = slice(int(starts[number]), int(stops[number]))
        found[number] = _certain(firsts[part], lasts[part], counts[part])
    return found


def _certain(firsts: np.ndarray, lasts: np.ndarray, counts: np.ndarray) -> int:
    """Count the offsets that ranges stand for at least which overlap, and of which some do not tell where."""
    spans = lasts - firsts + 1
    longest = int(np.argmax(spans))
    first, last = int(firsts[longest]), int(lasts[longest])
    exact = counts == spans
    known = RangeSet.normal(firsts[exact], lasts[exact], firsts[exact])
    inside = known.within(first, last).offsets
    apart = counts[~exact & ((lasts < first) | (firsts > last))].sum()
    least = max(int(counts[longest]), inside) + known.offsets - inside + int(apart)
    return min(int(lasts.max() - firsts.min()) + 1, least)


def _chunk(ranges: RangeSet) -> bytes:
    first, last = int(ranges.firsts[0]), int(ranges.lasts[-1])
    steps = np.empty(2 * len(ranges), dtype=np.uint64)
    steps[0], steps[2::2] = 0, ranges.firsts[1:] - ranges.lasts[:-1]
    steps[1::2] = ranges.lasts - ranges.firsts
    width = next(width for width in _WIDTHS if int(steps.max()) < 1 << 8 * width)
    if ranges.counts is not None:
        form, payload = _FOLDED | width, steps.astype(f"<u{width}").tobytes() + ranges.counts.astype("<u8").tobytes()
    elif (last - first + 8) // 8 < width * len(steps):
        form, payload = 0, np.packbits(_bits(ranges, first, last), bitorder="little").tobytes()
    else:
        form, payload = width, steps.astype(f"<u{width}").tobytes()
    times = ranges.times_unix_ms
    starts = np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))
    runs = np.empty(len(starts), dtype=_RUN)
    runs["time"], runs["count"] = times[starts], np.diff(np.append(starts, len(times)))
    head = _HEAD.pack(len(ranges), form, first, len(payload))
    return b"".join((head, payload, _RUNS.pack(len(runs)), runs.tobytes()))


def _bits(ranges: RangeSet, first: int, last: int) -> np.ndarray:
    """Give a byte per offset, 1 where a range holds it."""
    edges = np.zeros(last - first + 2, dtype=np.int8)
    edges[ranges.firsts - first] = 1
    edges[ranges.lasts - first + 1] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).astype(np.uint8)


def _read_chunk(data: bytes, at: int) -> tuple[RangeSet, int]:
    count, form, first, size = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    payload = data[at : at + size]
    at += size
    (runs,) = _RUNS.unpack_from(data, at)
    at += _RUNS.size
    table = np.frombuffer(data[at : at + runs * _RUN.itemsize], dtype=_RUN)
    at += runs * _RUN.itemsize
    if not 0 < count <= _CHUNK_RANGES or not 0 <= first < OFFSETS_END or len(table) != runs:
        raise ValueError("a chunk has an impossible count or beginning, or is cut off")
    if len(payload) != size or int(table["count"].sum()) != count:
        raise ValueError("a chunk is cut off, or its times are not those of its ranges")
    steps, counts = payload, None
    if form & _FOLDED:
        steps, told = payload[: -8 * count], payload[-8 * count :]
        counts = np.frombuffer(told, dtype="<u8").astype(np.int64)
    firsts, lasts = _from_bits(steps, first) if form == 0 else _from_steps(steps, form & ~_FOLDED, first)
    if len(firsts) != count or int(lasts[-1]) >= OFFSETS_END:
        raise ValueError("a chunk does not hold the ranges it counts")
    if counts is not None and (len(counts) != count or bool(((counts < 1) | (counts > lasts - firsts + 1)).any())):
        raise ValueError("a folded range stands for more offsets than it has, or for none")
    times_unix_ms = np.repeat(table["time"].astype(np.int64), table["count"])
    return RangeSet.counted_in(firsts, lasts, times_unix_ms, counts), at


def _from_bits(payload: bytes, first: int) -> tuple[np.ndarray, np.ndarray]:
    # A chunk's ranges fit into so many bytes as steps, so no sound bitmap is longer than that.
    if len(payload) > 16 * _CHUNK_RANGES:
        raise ValueError("a bitmap is longer than the ranges it stands for")
    found = RangeSet.where(np.unpackbits(np.frombuffer(payload, dtype=np.uint8), bitorder="little") > 0, first, 0)
    return found.firsts, found.lasts


def _from_steps(payload: bytes, width: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    if width not in _WIDTHS or len(payload) % (2 * width):
        raise ValueError(f"there is no form {width} of so many bytes")
    steps = np.frombuffer(payload, dtype=f"<u{width}").astype(np.uint64)
    if float(steps.sum(dtype=np.float64)) >= OFFSETS_END:
        raise ValueError("a range lies beyond all offsets")
    edges = first + np.cumsum(steps.astype(np.int64))
    return edges[0::2], edges[1::2]


Kind = tuple[GapReason, str, str | None]
"""What the ranges of one set have in common: reason, detail and origin zone."""

RELAYED_RANGES_MAX = 1_000
"""How many ranges of one set are told to the next zone at once."""

RANGES_TOLD_MAX = 250_000
"""How many ranges of all sets anybody may tell in one answer or message; who scans for an answer stops well before."""


@dataclass(frozen=True, slots=True)
class GapSet:
    """All ranges of one reason, detail and origin, each with the time it was last added to.

    ``since_unix_ms`` is when the first of them was recorded. With an ``origin_zone`` the ranges count that zone's
    offsets.
    """

    reason: GapReason
    ranges: RangeSet
    detail: str = ""
    origin_zone: str | None = None
    since_unix_ms: int = 0

    @staticmethod
    def of(gap: GapRecord) -> GapSet:
        """Give a single record as a set."""
        ranges = _ranges_of([gap])
        return GapSet(gap.reason, ranges, gap.detail, gap.origin_zone, gap.at_unix_ms)

    @property
    def kind(self) -> Kind:
        """What the ranges have in common."""
        return self.reason, self.detail, self.origin_zone

    @property
    def at_unix_ms(self) -> int:
        """When the set was last added to."""
        return int(self.ranges.times_unix_ms.max()) if len(self.ranges) else self.since_unix_ms

    def records(self) -> Iterator[GapRecord]:
        """Give the ranges one by one."""
        for (first, last, at_unix_ms), count in zip(self.ranges.rows(), _told_counts(self.ranges), strict=True):
            yield GapRecord(first, last, self.reason, at_unix_ms, self.detail, self.origin_zone, count)

    def pieces(self, max_ranges: int) -> Iterator[GapSet]:
        """Give the set in pieces of so many ranges at most."""
        if len(self.ranges) <= max_ranges:
            yield self
            return
        for start in range(0, len(self.ranges), max_ranges):
            yield replace(self, ranges=self.ranges.slice(start, start + max_ranges))

    def newest(self, count: int) -> GapSet:
        """Give so many of the ranges that were added to last."""
        if len(self.ranges) <= count:
            return self
        rows = np.sort(np.argsort(self.ranges.times_unix_ms, kind="stable")[-count:])
        return replace(self, ranges=self.ranges.take(rows))

    def within(self, first: int, last: int) -> GapSet:
        """Give what lies inside a range of offsets."""
        return replace(self, ranges=self.ranges.within(first, last))


Gap = GapRecord | GapSet


def grouped(gaps: Iterable[Gap]) -> list[GapSet]:
    """Bring records and sets of one kind together, in the order in which the kinds first came."""
    kinds: dict[Kind, list[GapSet]] = {}
    singles: dict[Kind, list[GapRecord]] = {}
    for gap in gaps:
        if isinstance(gap, GapSet):
            kinds.setdefault(gap.kind, []).append(gap)
        else:
            kind = gap.reason, gap.detail, gap.origin_zone
            kinds.setdefault(kind, [])
            singles.setdefault(kind, []).append(gap)
    return [_together(kind, sets, singles.get(kind, [])) for kind, sets in kinds.items()]


def _together(kind: Kind, sets: Sequence[GapSet], singles: Sequence[GapRecord]) -> GapSet:
    if len(sets) == 1 and not singles:
        return sets[0]
    parts = [each.ranges for each in sets]
    if singles:
        parts.append(_ranges_of(singles))
    since_unix_ms = min([*(each.since_unix_ms for each in sets), *(gap.at_unix_ms for gap in singles)])
    return GapSet(kind[0], RangeSet.union(parts), kind[1], kind[2], since_unix_ms)


def _ranges_of(gaps: Sequence[GapRecord]) -> RangeSet:
    columns = np.array([(gap.first, gap.last, gap.at_unix_ms, gap.offsets) for gap in gaps], dtype=np.int64)
    counts = None if all(gap.count is None for gap in gaps) else columns[:, 3]
    return RangeSet.normal(columns[:, 0], columns[:, 1], columns[:, 2], counts)


def _told_counts(ranges: RangeSet) -> Sequence[int | None]:
    """Give what records say of how many offsets they stand for."""
    if ranges.counts is None:
        return [None] * len(ranges)
    pairs = zip(ranges.counts.tolist(), ranges.folded.tolist(), strict=True)
    return [count if folded else None for count, folded in pairs]


def check_gaps(gaps: Iterable[Gap], end: int) -> None:
    """Raise unless all are ranges of offsets, and those of a buffer's own lie below its end."""
    for gap in gaps:
        if isinstance(gap, GapRecord):
            first, last, in_order = gap.first, gap.last, gap.first <= gap.last
        elif len(gap.ranges):
            first, last = int(gap.ranges.firsts[0]), int(gap.ranges.lasts[-1])
            in_order = first <= last and not bool((gap.ranges.lasts < gap.ranges.firsts).any())
        else:
            continue
        if first < 0 or last >= OFFSETS_END or not in_order:
            raise InvalidArgument(f"{first}..{last} is not a range of offsets")
        if isinstance(gap, GapRecord) and not 1 <= gap.offsets <= last - first + 1:
            raise InvalidArgument(f"{first}..{last} cannot stand for {gap.count} offsets")
        if gap.origin_zone is None and last >= end:
            raise OffsetOutOfRange(f"a gap up to {last} reaches beyond the end {end}", end=end)


def listed(sets: Iterable[GapSet]) -> list[GapRecord]:
    """List the ranges of sets one by one, by the time they were recorded; for those who look at few of them."""
    return [record for some in listed_in_steps(list(sets), _CHUNK_RANGES) for record in some]


def listed_in_steps(sets: Sequence[GapSet], step_ranges: int) -> Iterator[list[GapRecord]]:
    """List them some at a time: there may be very many, and others to be served between two steps."""
    if not sets:
        return
    of = np.repeat(np.arange(len(sets)), [len(each.ranges) for each in sets])
    names = ("firsts", "lasts", "times_unix_ms", "held")
    columns = [np.concatenate([getattr(each.ranges, name) for each in sets]) for name in names]
    order = np.argsort(columns[2], kind="stable")
    for at in range(0, len(order), step_ranges):
        rows = order[at : at + step_ranges]
        found = zip(of[rows].tolist(), *(column[rows].tolist() for column in columns), strict=True)
        yield [
            GapRecord(
                first,
                last,
                sets[each].reason,
                time,
                sets[each].detail,
                sets[each].origin_zone,
                None if count == last - first + 1 else count,
            )
            for each, first, last, time, count in found
        ]
