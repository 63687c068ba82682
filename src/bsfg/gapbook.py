"""The gap records of one buffer in memory: sets that grow, bounded where others tell of them, and told on in order."""

from __future__ import annotations

import hashlib
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.errors import GapsFull
from bsfg.gaps import RELAYED_RANGES_MAX, Gap, GapRecord, GapSet, Kind, RangeSet, grouped
from bsfg.retention import GapReason

DETAILS_MAX = 256
"""How many details of one speaker's gaps of one reason are kept apart; what comes under others is one more set."""

TOLD_RANGES_MAX, REFUSED_RANGES_MAX = 16_000_000, 200_000
"""How many ranges of other zones, and of what receivers refused here, the book of one buffer holds."""

SKIPPED_RANGES_MAX = 2_000_000
"""How many ranges of what links left out a book holds, beside those; with more, the older half of them is folded."""

FOLD_SHIFT = 20
"""Ranges that begin in the same 2 ** so many offsets are folded into one; in more where they are far apart."""

MANY = "for more reasons than are kept apart"

_STEPS_KEPT = 1_024
_BLOCK_RANGES = 16_384


class _Growing:
    """A set that grows, mostly at its end: the end as columns, and before it blocks in the compact form.

    A range takes 24 bytes in a column, and a bit to a few bytes in a block.
    """

    def __init__(self, gap: GapSet) -> None:
        self.head = replace(gap, ranges=RangeSet.empty())
        self._blocks: list[bytes] = []
        self._firsts, self._lasts, self._counts = array("q"), array("q"), array("q")
        self._columns = [array("q") for _ in range(4)]
        self.add(gap)

    def __len__(self) -> int:
        return sum(self._counts) + len(self._columns[0])

    def missing(self, ranges: RangeSet) -> RangeSet:
        """Leave out the ranges that are covered already."""
        lasts = self._columns[1]
        if not len(ranges) or not lasts or int(ranges.firsts[0]) > lasts[-1]:
            return ranges
        start, stop = self._touched(int(ranges.firsts[0]), int(ranges.lasts[-1]))
        there = RangeSet.in_order([*map(RangeSet.decode, self._blocks[start:stop]), self._tail()])
        return there.news(ranges)

    def add(self, gap: GapSet) -> None:
        """Add ranges of the same kind."""
        self.head = replace(self.head, since_unix_ms=min(self.head.since_unix_ms, gap.since_unix_ms))
        lasts, ranges = self._columns[1], gap.ranges
        if lasts and len(ranges) and int(ranges.firsts[0]) <= lasts[-1] + 1:
            if int(ranges.firsts[0]) == lasts[-1] + 1:
                # The most frequent case, a run that goes on, must not copy what is there.
                first, *_, count = (column.pop() for column in self._columns)
                ranges = ranges.beginning_at(first, count)
            else:
                ranges = self._among(ranges)
        values_of = ranges.firsts, ranges.lasts, ranges.times_unix_ms, ranges.held
        for column, values in zip(self._columns, values_of, strict=True):
            column.frombytes(np.ascontiguousarray(values, dtype=np.int64).tobytes())
        while len(self._columns[0]) >= 2 * _BLOCK_RANGES:
            self._pack(_BLOCK_RANGES)

    def _pack(self, count: int) -> None:
        """Put the first ranges of the end into blocks."""
        self._put(len(self._blocks), len(self._blocks), self._tail().slice(0, count))
        for column in self._columns:
            del column[:count]

    def fold(self) -> bool:
        """Fold the older half of the ranges, so that it becomes half as many; tell whether any were left to fold."""
        half = len(self) // 2
        if half > (packed := sum(self._counts)):
            self._pack(half - packed)
        stop, before = 0, 0
        while before < half:
            stop, before = stop + 1, before + self._counts[stop]
        if not stop:
            return False
        folded = RangeSet.in_order([RangeSet.decode(block).fold(FOLD_SHIFT) for block in self._blocks[:stop]])
        shift = FOLD_SHIFT
        # What was folded in two blocks may begin in the same place; what is far apart is folded more coarsely.
        while len(folded := folded.fold(shift)) > max(1, before // 2):
            shift += 2
        self._put(0, stop, folded)
        return len(folded) < before

    def _among(self, ranges: RangeSet) -> RangeSet:
        """Put ranges among the blocks that they touch; give the new end of the set where they reach that."""
        first, last = int(ranges.firsts[0]), int(ranges.lasts[-1])
        start, stop = self._touched(first - 1, last + 1)
        if start == stop:
            # Between two blocks: with one of them, lest they become many small ones.
            start, stop = max(0, start - 1), max(stop, min(1, len(self._blocks)))
        union = RangeSet.union([*map(RangeSet.decode, self._blocks[start:stop]), ranges])
        if start < stop and last + 1 < self._columns[0][0]:
            self._put(start, stop, union)
            return RangeSet.empty()
        union = RangeSet.union([union, self._tail()])
        self._put(start, stop, RangeSet.empty())
        self._columns = [array("q") for _ in range(4)]
        return union

    def _touched(self, first: int, last: int) -> tuple[int, int]:
        """Tell which blocks a range of offsets touches."""
        return bisect_left(self._lasts, first), bisect_right(self._firsts, last)

    def _put(self, start: int, stop: int, ranges: RangeSet) -> None:
        """Put ranges in the place of some blocks, as blocks of about the same size."""
        if self.head.reason == GapReason.SKIPPED and len(ranges):
            ranges = replace(ranges, times_unix_ms=np.full(len(ranges), ranges.times_unix_ms.max()))
        size = -(-len(ranges) // max(1, -(-len(ranges) // _BLOCK_RANGES)))
        parts = [ranges.slice(at, at + size) for at in range(0, len(ranges), max(1, size))]
        self._blocks[start:stop] = [part.encode() for part in parts]
        self._firsts[start:stop] = array("q", [int(part.firsts[0]) for part in parts])
        self._lasts[start:stop] = array("q", [int(part.lasts[-1]) for part in parts])
        self._counts[start:stop] = array("q", [len(part) for part in parts])

    def _tail(self) -> RangeSet:
        return RangeSet.counted_in(*(np.array(column, dtype=np.int64) for column in self._columns))

    def seen(self) -> GapSet:
        """Give the set as it stands."""
        ranges = RangeSet.in_order([*map(RangeSet.decode, self._blocks), self._tail()])
        if self.head.reason == GapReason.SKIPPED and len(ranges):
            # Nothing is missing where a link left out what it does not carry: one time for all is enough.
            ranges = replace(ranges, times_unix_ms=np.full(len(ranges), ranges.times_unix_ms.max()))
        return replace(self.head, ranges=ranges)


@dataclass(slots=True)
class _Told:
    """What other zones told, in the order in which it came, each step under a token that names all before it too.

    A step is its kind and, in the compact form, its ranges: they are looked at once for each receiver.
    """

    steps: list[tuple[GapSet, bytes, int]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)

    def add(self, gap: GapSet) -> None:
        head = replace(gap, ranges=RangeSet.empty())
        for piece in gap.pieces(RELAYED_RANGES_MAX):
            before = self.tokens[-1] if self.tokens else ""
            ranges = piece.ranges.encode()
            said = f"{before}|{piece.reason}|{piece.detail}|{piece.origin_zone}|".encode() + ranges
            token = hashlib.sha256(said).hexdigest()[:32]
            self.steps.append((head, ranges, len(piece.ranges)))
            self.tokens.append(token)
            self.at[token] = len(self.steps)

    def since(self, token: str, max_ranges: int) -> tuple[list[GapSet], str]:
        start = stop = self.at.get(token, 0)
        ranges = 0
        while stop < len(self.steps) and (stop == start or ranges + self.steps[stop][2] <= max_ranges):
            ranges += self.steps[stop][2]
            stop += 1
        told = [replace(head, ranges=RangeSet.decode(data)) for head, data, _ in self.steps[start:stop]]
        return told, self.tokens[stop - 1] if stop > start else token


_Speaker = tuple[GapReason, str, str | None]


def _speaker_of(gap: Gap) -> _Speaker | None:
    """Tell whose words the detail of a gap is; None for this node's own, which are few, or the place of a damage."""
    if gap.origin_zone is not None:
        return gap.reason, "", gap.origin_zone
    # What a receiver refused is recorded under his name.
    return (gap.reason, gap.detail.partition(":")[0], None) if gap.reason == GapReason.QUARANTINED else None


def _is_foldable(gap: Gap) -> bool:
    """Tell whether ranges may be folded: nothing is missing where a link left out what it does not carry."""
    return gap.reason == GapReason.SKIPPED and gap.origin_zone is not None


def _is_bounded(gap: Gap, with_origin: bool) -> bool:
    """Tell whether a gap counts among those of which others may tell so many, of their offsets or of this node's."""
    return _speaker_of(gap) is not None and (gap.origin_zone is not None) == with_origin and not _is_foldable(gap)


class GapBook:
    """The gap records of one buffer, in memory; one thread adds, any may look.

    Each kind is a set for good, and others choose the details of theirs: of those only ``details_max`` are kept apart.
    """

    def __init__(self, details_max: int = DETAILS_MAX) -> None:
        self._details_max = details_max
        self.full = False
        """Whether what others told last was turned away."""
        self._details: Counter[_Speaker] = Counter()
        self._sets: dict[Kind, _Growing] = {}
        self._told = _Told()
        self._lock = threading.Lock()
        self._own: tuple[GapRecord, ...] | None = None

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._sets.values()))

    @property
    def kinds(self) -> int:
        """How many sets there are."""
        with self._lock:
            return len(self._sets)

    def missing(self, gaps: Iterable[Gap]) -> list[GapSet]:
        """Give what is not recorded yet; a range that is covered by those of its kind is not recorded again."""
        result = []
        for gap in grouped(self._kept_apart(gaps)):
            with self._lock:
                known = self._sets.get(gap.kind)
                fresh = known.missing(gap.ranges) if known is not None else gap.ranges
            if len(fresh):
                result.append(replace(gap, ranges=fresh))
        return result

    def taken(self, gaps: Iterable[Gap]) -> list[GapSet]:
        """Give what is not recorded yet; raises `GapsFull` when others tell of more than there is room for.

        What this node found out itself always has room, and what links left out is folded when it becomes too much.
        """
        fresh = self.missing(gaps)
        for origin, most in ((True, TOLD_RANGES_MAX), (False, REFUSED_RANGES_MAX)):
            coming = sum(len(each.ranges) for each in fresh if _is_bounded(each, origin))
            if not coming:
                continue
            there = self._told_by_others(origin)
            self.full = there + coming > most
            if self.full:
                raise GapsFull(
                    f"{coming} more ranges do not fit into the gap records of others, which hold {there} of {most}",
                    used_ranges=there,
                    capacity_ranges=most,
                )
        return fresh

    def _told_by_others(self, with_origin: bool) -> int:
        with self._lock:
            return sum(len(each) for each in self._sets.values() if _is_bounded(each.head, with_origin))

    def _kept_apart(self, gaps: Iterable[Gap]) -> list[Gap]:
        """Give gaps under their own details as far as those may be kept apart, and all others under one."""
        found, fresh = list[Gap](), dict[_Speaker, set[str]]()
        for gap in gaps:
            speaker = _speaker_of(gap)
            if speaker is not None and (gap.reason, gap.detail, gap.origin_zone) not in self._sets:
                details = fresh.setdefault(speaker, set())
                if gap.detail not in details and len(details) + self._details[speaker] >= self._details_max:
                    gap = replace(gap, detail=f"{speaker[1]}: {MANY}" if speaker[1] else MANY)
                else:
                    details.add(gap.detail)
            found.append(gap)
        return found

    def add(self, gap: GapSet) -> None:
        """Take ranges in."""
        with self._lock:
            known = self._sets.get(gap.kind)
            if known is None:
                self._sets[gap.kind] = _Growing(gap)
                speaker = _speaker_of(gap)
                if speaker is not None:
                    self._details[speaker] += 1
            else:
                known.add(gap)
            if gap.origin_zone is None:
                self._own = None
                return
            self._told.add(gap)
            if (_is_foldable(gap) and self._fold()) or len(self._told.steps) > _STEPS_KEPT + 2 * self._full_steps():
                self._tell_anew()

    def take_in(self, *gaps: Gap) -> None:
        """Take in what is on record, each as far as it is not here yet."""
        for each in gaps:
            for gap in self.missing([each]):
                self.add(gap)

    def _fold(self) -> bool:
        """Fold what links left out while that is too much, where there is most of it; tell whether it was."""
        sets = [each for each in self._sets.values() if _is_foldable(each.head)]
        if sum(map(len, sets)) <= SKIPPED_RANGES_MAX:
            return False
        while sum(map(len, sets)) > SKIPPED_RANGES_MAX * 3 // 4:
            if not max(sets, key=len).fold():
                break
        return True

    def sets(self) -> list[GapSet]:
        """Give all sets as they stand, in the order in which their kinds first came."""
        with self._lock:
            return [each.seen() for each in self._sets.values()]

    def own(self) -> tuple[GapRecord, ...]:
        """Give the ranges of this buffer's own offsets one by one, by offset; they are few and often asked for."""
        with self._lock:
            if self._own is None:
                own = [each.seen() for kind, each in self._sets.items() if kind[2] is None]
                records = [record for each in own for record in each.records()]
                self._own = tuple(sorted(records, key=lambda record: record.first))
            return self._own

    def told_since(self, token: str, max_ranges: int) -> tuple[list[GapSet], str]:
        """Give what other zones told after a token, and the token that follows.

        A token that is not known, because it is of another life of this book, begins anew: hearing of a range twice
        does no harm, never hearing of it would.
        """
        with self._lock:
            return self._told.since(token, max_ranges)

    def before(self, end: int) -> GapBook:
        """Give a book that knows nothing of this buffer's own offsets from ``end`` on."""
        result = GapBook(self._details_max)
        for each in self.sets():
            kept = each if each.origin_zone is not None else each.within(0, end - 1)
            if len(kept.ranges):
                result.add(kept)
        return result

    def _full_steps(self) -> int:
        return sum(1 + len(each) // RELAYED_RANGES_MAX for kind, each in self._sets.items() if kind[2] is not None)

    def _tell_anew(self) -> None:
        """Begin the telling again from the sets themselves, lest many small steps outgrow them."""
        self._told = _Told()
        for kind, each in self._sets.items():
            if kind[2] is not None:
                self._told.add(each.seen())
