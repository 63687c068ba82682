"""The book of gap records: sets that grow, what it gives to whoever looks, and what it tells to the next zone."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg import gapbook
from bsfg.errors import GapsFull, InvalidArgument
from bsfg.gapbook import DETAILS_MAX, MANY, GapBook
from bsfg.gaps import (
    RELAYED_RANGES_MAX,
    GapRecord,
    GapSet,
    RangeSet,
    check_gaps,
    grouped,
    listed,
)
from bsfg.retention import GapReason

KINDS = [
    (GapReason.EVICTED, "", None),
    (GapReason.SKIPPED, "returns", "plant"),
    (GapReason.SKIPPED, "not carried", "plant"),
    (GapReason.EVICTED, "", "plant"),
]
RECORDS = st.lists(
    st.builds(
        lambda first, length, kind, at: GapRecord(first, first + length, KINDS[kind][0], at, *KINDS[kind][1:]),
        st.integers(0, 200),
        st.integers(0, 9),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=30,
)
Held = set[tuple[object, int]]


def held(sets: list[GapSet]) -> Held:
    """List kind and offset of everything in sets."""
    return {
        (each.kind, offset)
        for each in sets
        for first, last, _ in each.ranges.rows()
        for offset in range(first, last + 1)
    }


def add(book: GapBook, gaps: list[GapRecord]) -> None:
    """Add what is missing, as a storage does."""
    for gap in book.missing(gaps):
        book.add(gap)


@given(RECORDS, st.integers(1, 5), st.sampled_from([1, 2, 5, 10_000]))
def test_a_book_holds_what_was_added(records: list[GapRecord], step: int, block_ranges: int) -> None:
    """However records come, one by one or together, the book holds their offsets, each kind in fewest ranges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gapbook, "_BLOCK_RANGES", block_ranges)
        book = GapBook()
        for at in range(0, len(records), step):
            add(book, records[at : at + step])
    expected = {
        ((gap.reason, gap.detail, gap.origin_zone), offset)
        for gap in records
        for offset in range(gap.first, gap.last + 1)
    }
    assert held(book.sets()) == held(grouped(records)) == expected
    assert len(book) == len(listed(book.sets())) == sum(len(each.ranges) for each in grouped(records))
    assert book.missing(records) == []
    assert all(gap.origin_zone is None for gap in book.own())
    assert {gap.first for gap in book.own()} == {gap.first for gap in listed(book.sets()) if not gap.origin_zone}


@pytest.mark.parametrize("at_once", [1, 100, 10_000])
@pytest.mark.parametrize("origin_zone", [None, "plant"])
def test_the_words_of_others_make_no_sets_without_end(origin_zone: str | None, at_once: int) -> None:
    """Whoever gives every gap another detail has some of them kept apart, and the others together; none is lost."""
    book, count = GapBook(), 3 * DETAILS_MAX
    records = [GapRecord(at % 7, at % 7, GapReason.QUARANTINED, 1, f"peer: {at}", origin_zone) for at in range(count)]
    for at in range(0, count, at_once):
        add(book, records[at : at + at_once])
    sets = book.sets()
    assert len(sets) == DETAILS_MAX + 1
    assert sets[-1].detail == (MANY if origin_zone else f"peer: {MANY}")
    assert sets[-1].ranges.offsets == 7
    assert book.missing(records) == []
    # Somebody else has as many of his own, and so has this node, whose details tell where something is damaged.
    other = GapRecord(1, 1, GapReason.QUARANTINED, 1, "other: x", origin_zone and "field")
    own = [GapRecord(at, at, GapReason.DAMAGED, 1, f"segment {at}: torn") for at in range(0, 2 * count, 2)]
    add(book, [other, *own])
    assert len(book.sets()) == len(sets) + 1 + count
    again = GapBook()
    for each in sets:
        add(again, list(each.records()))
    assert held(again.sets()) == held(sets)


@given(st.permutations(range(24)), st.integers(1, 4), st.integers(1, 4))
def test_ranges_that_come_out_of_order_stay_apart(order: list[int], step: int, block_ranges: int) -> None:
    """Wherever among the others a range belongs, the set stays in order, and nothing of it is asked for again."""
    book, known = GapBook(), list[GapRecord]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gapbook, "_BLOCK_RANGES", block_ranges)
        for at in range(0, len(order), step):
            known += [GapRecord(3 * n, 3 * n, GapReason.EVICTED, 1, "", "plant") for n in order[at : at + step]]
            add(book, known)
            assert [gap.first for gap in book.sets()[0].records()] == sorted(gap.first for gap in known)
            assert len(book) == len(known) and book.missing(known) == []


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        (GapRecord(0, 0, GapReason.SKIPPED, 1, "", "plant"), "TOLD_RANGES_MAX"),
        (GapRecord(0, 0, GapReason.QUARANTINED, 1, "lab: expired"), "REFUSED_RANGES_MAX"),
    ],
)
def test_what_others_tell_is_bounded(told: GapRecord, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are told that there is no more room; what is known is no news, and what the node itself found has room."""
    monkeypatch.setattr(gapbook, limit, 10)
    book = GapBook()
    told_all = [replace(told, first=at, last=at) for at in range(0, 20, 2)]
    for gap in book.taken(told_all):
        book.add(gap)
    with pytest.raises(GapsFull) as refused:
        book.taken([replace(told, first=50, last=50)])
    assert refused.value.details["capacity_ranges"] == 10 and book.full
    assert book.taken(told_all) == []
    own = [GapRecord(at, at, GapReason.DAMAGED, 1, "torn") for at in range(0, 40, 2)]
    assert sum(len(each.ranges) for each in book.taken(own)) == 20


@given(RECORDS, st.integers(0, 220))
def test_a_book_before_an_end_knows_nothing_of_own_offsets_beyond(records: list[GapRecord], end: int) -> None:
    """A copy of a shorter log keeps other zones' records, and of its own only what lies below its end."""
    book = GapBook()
    add(book, records)
    kept = {each for each in held(book.sets()) if each[0][2] is not None or each[1] < end}  # type: ignore[index]
    assert held(book.before(end).sets()) == kept


@given(RECORDS, st.randoms(use_true_random=False))
def test_everything_is_told_once_in_order(records: list[GapRecord], random: Random) -> None:
    """Whoever follows the tokens hears of everything that other zones told, and of nothing twice."""
    book, token, heard = GapBook(), "", []
    for record in records:
        add(book, [record])
        if random.random() < 0.5:
            told, token = book.told_since(token, random.randint(1, 5))
            heard += told
    while True:
        told, token = book.told_since(token, 3)
        if not told:
            break
        heard += told
    assert held(heard) == {each for each in held(book.sets()) if each[0][2] is not None}  # type: ignore[index]


def test_the_telling_does_not_outgrow_the_sets() -> None:
    """A run that grows by one offset at a time is told in few steps again, to whoever has lost its place."""
    book, token = GapBook(), ""
    for offset in range(5_000):
        book.add(GapSet.of(GapRecord(offset, offset, GapReason.SKIPPED, offset, "", "plant")))
        token = book.told_since(token, RELAYED_RANGES_MAX)[1]
    assert len(book) == 1
    steps = 0
    while (answer := book.told_since("unknown" if not steps else token, RELAYED_RANGES_MAX))[0]:
        steps, token = steps + 1, answer[1]
    assert steps <= 3


def test_large_sets_are_told_in_pieces() -> None:
    """A set of many ranges is told a bounded part at a time."""
    book = GapBook()
    ranges = RangeSet.of([(offset, offset) for offset in range(0, 10_000, 2)], 1)
    book.add(GapSet(GapReason.SKIPPED, ranges, "", "plant", 1))
    first, token = book.told_since("", RELAYED_RANGES_MAX)
    assert [len(each.ranges) for each in first] == [RELAYED_RANGES_MAX]
    assert next(book.told_since(token, RELAYED_RANGES_MAX)[0][0].records()).first == 2 * RELAYED_RANGES_MAX


def test_a_range_beyond_all_offsets_is_refused() -> None:
    """What could not be read back must not be written."""
    for gap in (GapRecord(0, 1 << 62, GapReason.LOST, 1, "", "plant"), GapRecord(1 << 62, 1 << 62, GapReason.LOST, 1)):
        with pytest.raises(InvalidArgument):
            check_gaps([gap], 1 << 63)


def test_what_is_told_anew_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """When many small steps were told, the telling begins again: whoever asks then hears of everything, once."""
    monkeypatch.setattr(gapbook, "_STEPS_KEPT", 2)
    book, steps = GapBook(), 40
    for number in range(steps):
        book.add(GapSet.of(GapRecord(3 * number, 3 * number, GapReason.EVICTED, number, "", "plant")))
    told, token = book.told_since("", RELAYED_RANGES_MAX)
    assert len(told) < steps
    assert {offset for _, offset in held(told)} == {3 * number for number in range(steps)}
    assert book.told_since(token, RELAYED_RANGES_MAX) == ([], token)
    assert book.told_since("a token of another life", RELAYED_RANGES_MAX)[0] == told
