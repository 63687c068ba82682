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
        (GapRecord(0, 0, GapReason.EVICTED, 1, "", "plant"), "TOLD_RANGES_MAX"),
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
    monkeypatch.setattr(gapbook, limit, 11)
    assert book.taken([replace(told, first=50, last=50)]) and not book.full
    monkeypatch.setattr(gapbook, limit, 10)
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


def left_out(book: GapBook, first: int, last: int, step: int = 2) -> None:
    """Let a link leave out every so manieth fact of a stretch, an answer at a time."""
    for at in range(first, last, 50 * step):
        pairs = [(offset, offset) for offset in range(at, min(at + 50 * step, last), step)]
        for gap in book.taken([GapSet(GapReason.SKIPPED, RangeSet.of(pairs, at), "not carried", "plant", at)]):
            book.add(gap)


@pytest.mark.parametrize("block_ranges", [3, 64, 10_000])
def test_a_link_that_leaves_out_every_other_fact_goes_on_for_ever(
    block_ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records stay bounded and exact where they are new; of the older ones it stays known how many there are."""
    monkeypatch.setattr(gapbook, "SKIPPED_RANGES_MAX", 1_000)
    monkeypatch.setattr(gapbook, "TOLD_RANGES_MAX", 1_000)
    monkeypatch.setattr(gapbook, "FOLD_SHIFT", 6)
    monkeypatch.setattr(gapbook, "_BLOCK_RANGES", block_ranges)
    book, end = GapBook(), 100_000
    for first in range(0, end, 1_000):
        left_out(book, first, first + 1_000)
        (found,) = book.sets()
        assert len(book) == len(found.ranges) <= 1_000
        assert found.ranges.offsets == (first + 1_000) // 2
        assert not found.ranges.within(first + 500, first + 999).folded.any()
    (found,) = book.sets()
    assert found.ranges.folded.any() and not book.full
    # Told again, nothing of it is news, whether it was folded or not, and whoever hears of it hears of as many.
    left_out(book, 0, end)
    assert book.sets() == [found] and book.missing([found]) == []
    told, _ = book.told_since("", 1 << 30)
    assert sum(each.ranges.offsets for each in told) == end // 2
    again = GapBook()
    for each in told:
        for gap in again.missing([each]):
            again.add(gap)
    assert again.sets() == [found]
    assert RangeSet.decode(found.ranges.encode()) == found.ranges


def test_who_knows_more_or_less_exactly_hears_of_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A book that folded and one that did not, each told by the other: both know as many as before."""
    monkeypatch.setattr(gapbook, "FOLD_SHIFT", 6)
    exact = GapBook()
    left_out(exact, 0, 2_000)
    monkeypatch.setattr(gapbook, "SKIPPED_RANGES_MAX", 200)
    folded = GapBook()
    left_out(folded, 0, 2_400)
    (wide,), (narrow,) = folded.sets(), exact.sets()
    assert wide.ranges.folded.any()
    assert folded.missing([narrow]) == []
    monkeypatch.undo()
    for gap in exact.missing([wide]):
        exact.add(gap)
    (found,) = exact.sets()
    assert found.ranges.offsets == wide.ranges.offsets == 1_200
    # Beside a folded range something else is news, and counts in full.
    last = int(wide.ranges.lasts[0])
    for gap in folded.missing([GapRecord(last - 1, last + 1, GapReason.SKIPPED, 1, "not carried", "plant")]):
        folded.add(gap)
    assert folded.sets()[0].ranges.offsets == 1_201


@pytest.mark.parametrize("kind", [(GapReason.EVICTED, "plant"), (GapReason.SKIPPED, None)])
def test_what_is_missing_is_never_folded(kind: tuple[GapReason, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of what a link left out may it be forgotten which facts they were: there nothing is missing."""
    monkeypatch.setattr(gapbook, "SKIPPED_RANGES_MAX", 10)
    book = GapBook()
    for at in range(0, 100, 2):
        book.add(GapSet.of(GapRecord(at, at, kind[0], 1, "", kind[1])))
    assert len(book) == 50 and not book.sets()[0].ranges.folded.any()


def test_a_liar_who_leaves_out_far_apart_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far apart ranges are, and under however many words, they do not become more than there is room for."""
    monkeypatch.setattr(gapbook, "SKIPPED_RANGES_MAX", 600)
    book, random = GapBook(), Random(7)
    for number in range(60):
        offsets = sorted(random.sample(range(1 << 40), 50))
        gaps = [GapRecord(at << 20, at << 20, GapReason.SKIPPED, 1, f"word {number % 7}", "plant") for at in offsets]
        for gap in book.taken(gaps):
            book.add(gap)
        assert 0 < len(book) <= 600
