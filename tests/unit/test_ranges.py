"""Sets of ranges against plain Python sets, and their compact form against damage."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import FrameInvalid
from bsfg.gaps import RangeSet

Ranges = list[tuple[int, int, int]]

RANGES = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 12), st.integers(0, 3)).map(lambda r: (r[0], r[0] + r[1], r[2])),
    max_size=40,
)
FAR = st.lists(
    st.tuples(st.integers(0, 1 << 61), st.integers(0, 1 << 40), st.integers(-(1 << 40), 1 << 62)).map(
        lambda r: (r[0], r[0] + r[1], r[2])
    ),
    max_size=20,
)


def made(ranges: Ranges) -> RangeSet:
    """Make a set of ranges with times."""
    columns = np.array(ranges, dtype=np.int64).reshape(-1, 3)
    return RangeSet.normal(columns[:, 0], columns[:, 1], columns[:, 2])


def offsets(ranges: RangeSet) -> set[int]:
    """List every offset of a set."""
    return {offset for first, last, _ in ranges.rows() for offset in range(first, last + 1)}


def is_normal(ranges: RangeSet) -> bool:
    """Tell whether ranges are in order and apart from each other."""
    rows = list(ranges.rows())
    return all(first <= last for first, last, _ in rows) and all(
        one[1] + 1 < next_one[0] for one, next_one in pairwise(rows)
    )


@given(RANGES, RANGES)
def test_a_union_holds_what_either_holds(one: Ranges, other: Ranges) -> None:
    """A union holds exactly the offsets of both, in as few ranges as there can be, the latest time of each."""
    a, b = made(one), made(other)
    both = RangeSet.union([a, b])
    assert is_normal(a)
    assert is_normal(both)
    assert offsets(both) == offsets(a) | offsets(b)
    assert both.offsets == len(offsets(both))
    for first, last, at_unix_ms in both.rows():
        assert at_unix_ms == max(time for f, t, time in [*one, *other] if first <= f and t <= last)


@given(RANGES, RANGES, st.integers(0, 420), st.integers(0, 420))
def test_cover_and_within_agree_with_sets(one: Ranges, other: Ranges, first: int, last: int) -> None:
    """A range is covered when all its offsets are there; what lies within a range is what both have."""
    a, b = made(one), made(other)
    there = offsets(a)
    expected = [set(range(f, t + 1)) <= there for f, t, _ in b.rows()]
    assert a.cover(b).tolist() == expected
    assert offsets(a.within(first, last)) == there & set(range(first, last + 1))


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 1000))
def test_a_mask_and_a_list_of_offsets_make_the_same_set(mask: list[bool], base: int) -> None:
    """The true places of a mask, and the same offsets listed, are one set."""
    listed = [base + at for at, held in enumerate(mask) if held]
    by_mask = RangeSet.where(np.array(mask, dtype=bool), base, 7)
    assert offsets(by_mask) == set(listed)
    assert is_normal(by_mask)
    assert by_mask == RangeSet.of_offsets(np.array(listed, dtype=np.int64), 7)


@given(st.one_of(RANGES, FAR))
def test_the_compact_form_gives_the_same_set_back(ranges: Ranges) -> None:
    """Whatever the ranges and their times, they are read as they were written."""
    found = made(ranges)
    assert RangeSet.decode(found.encode()) == found


@given(st.one_of(RANGES, FAR), st.lists(st.integers(0, 61), min_size=1, max_size=3))
def test_folded_ranges_stand_for_as_many_offsets(ranges: Ranges, shifts: list[int]) -> None:
    """However often and coarsely a set is folded, it stands for as many offsets, reaches as far, and keeps its form."""
    found = exact = made(ranges)
    for shift in sorted(shifts):
        found = found.fold(shift)
        assert is_normal(found) and found.offsets == exact.offsets
        assert len({int(first) >> shift for first in found.firsts}) == len(found) <= len(exact)
        assert RangeSet.decode(found.encode()) == found
        assert found.cover(exact).all() and not len(found.news(exact)) and not len(exact.news(found))
        assert RangeSet.union([found, found]).offsets == RangeSet.union([exact, found]).offsets == exact.offsets


@given(RANGES, RANGES, st.integers(0, 9))
def test_what_is_news_beside_folded_ranges(known: Ranges, told: Ranges, shift: int) -> None:
    """Of what is told all counts that lies outside of folded ranges, and nothing that lies inside."""
    folded, exact = made(known).fold(shift), made(told)
    inside = offsets(folded.take(folded.folded))
    both = RangeSet.union([folded, folded.news(exact)])
    assert is_normal(both)
    plain = offsets(folded.take(~folded.folded))
    spanned = {offset for first, last, _ in exact.rows() for offset in range(first, last + 1)}
    outside = (spanned | plain) - inside
    assert both.offsets >= folded.take(folded.folded).offsets + len(outside)
    assert offsets(both) == offsets(folded) | spanned


@given(st.one_of(RANGES, FAR), st.sampled_from([None, 4, 30]), st.data())
def test_damaged_bytes_are_refused_or_a_set(ranges: Ranges, shift: int | None, data: st.DataObject) -> None:
    """Altered or cut bytes raise `FrameInvalid` or give a set that keeps the rules; never anything else."""
    whole = made([*ranges, (5, 9, 1)])
    good = bytearray((whole if shift is None else whole.fold(shift)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        found = RangeSet.decode(cut)
    except FrameInvalid:
        return
    assert is_normal(found)
    assert all(0 <= first <= last < 1 << 62 for first, last, _ in found.rows())
    assert all(1 <= held <= last - first + 1 for (first, last, _), held in zip(found.rows(), found.held, strict=True))


@pytest.mark.parametrize("outlier", [False, True])
def test_a_set_that_alternates_with_facts_costs_a_bit_per_fact(outlier: bool) -> None:
    """50,000 ranges of one offset each take some 15 kB, and one far away costs no more than its chunk again."""
    firsts = [(offset, offset) for offset in range(0, 100_000, 2)]
    found = RangeSet.of([*firsts, (1 << 40, 1 << 50)] if outlier else firsts, 1_000)
    assert len(found.encode()) < (33_000 if outlier else 16_500)
    assert RangeSet.decode(found.encode()) == found


def test_many_chunks_are_one_set() -> None:
    """Ranges that adjoin where two chunks meet are refused: a writer would have made them one."""
    one, other = RangeSet.of([(0, 4)], 1).encode(), RangeSet.of([(5, 6)], 1).encode()
    with pytest.raises(FrameInvalid):
        RangeSet.decode(one + other)
    apart = RangeSet.of([(6, 6)], 1).encode()
    assert list(RangeSet.decode(one + apart).rows()) == [(0, 4, 1), (6, 6, 1)]
