"""The contiguous frontier: the examples of the specification, and a set of offsets as its model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import InvalidArgument, TooManyRanges
from bsfg.frontier import MAX_OPEN_RANGES, NOTHING, Frontier, Range

RANGES = st.tuples(st.integers(0, 40), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
STEPS = st.lists(
    st.one_of(st.integers(-1, 45).map(lambda offset: ("through", offset)), st.lists(RANGES, max_size=5)), max_size=12
)


def prefix(confirmed: set[int]) -> int:
    """Give the highest offset below which nothing is missing."""
    offset = NOTHING
    while offset + 1 in confirmed:
        offset += 1
    return offset


def islands(confirmed: set[int]) -> list[Range]:
    """Give the runs of offsets beyond the prefix."""
    result: list[Range] = []
    for offset in sorted(offset for offset in confirmed if offset > prefix(confirmed)):
        if result and result[-1][1] == offset - 1:
            result[-1] = (result[-1][0], offset)
        else:
            result.append((offset, offset))
    return result


@given(STEPS)
def test_agrees_with_a_set_of_offsets(steps: list[tuple[str, int] | list[Range]]) -> None:
    """However confirmations arrive, the frontier is what a plain set of confirmed offsets gives."""
    frontier, confirmed = Frontier(), set[int]()
    for step in steps:
        before = set(confirmed), frontier.committed
        if isinstance(step, tuple):
            confirmed |= set(range(step[1] + 1))
            changed = frontier.confirm_through(step[1])
        else:
            for first, last in step:
                confirmed |= set(range(first, last + 1))
            changed = frontier.confirm(step)
        assert changed == (confirmed != before[0])
        assert frontier.committed == prefix(confirmed)
        assert frontier.committed >= before[1]
        assert frontier.ranges == islands(confirmed)
        assert [offset for offset in range(60) if frontier.is_confirmed(offset)] == sorted(confirmed)
        for end in (0, 7, 60):
            missing = [offset for first, last in frontier.missing(end) for offset in range(first, last + 1)]
            assert missing == [offset for offset in range(end) if offset not in confirmed]


@given(st.lists(RANGES, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_order_and_repeats_do_not_matter(ranges: list[Range], random: object) -> None:
    """The same confirmations in any order, one by one or at once, or twice, lead to the same place."""
    shuffled = list(ranges)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    at_once, one_by_one = Frontier(), Frontier()
    at_once.confirm(ranges)
    for each in shuffled:
        one_by_one.confirm([each])
    assert at_once == one_by_one
    assert not at_once.confirm(shuffled)


def test_the_example_of_the_replay_model() -> None:
    """[0, 1, 2, ×, 4, 5]: the cursor is 2; once offset 3 is confirmed it is 5; recovery proposes from 6 onward."""
    frontier = Frontier()
    for offset in (0, 1, 2, 4, 5):
        frontier.confirm([(offset, offset)])
    assert frontier.committed == 2
    assert frontier.missing(6) == [(3, 3)]
    frontier.confirm([(3, 3)])
    assert frontier.committed == 5
    assert frontier.committed + 1 == 6


def test_the_batch_of_the_peer_replication_protocol() -> None:
    """After the batch 100..199 is confirmed the cursor is 199, and the next fetch returns facts from 200 onward."""
    frontier = Frontier(committed=99)
    assert frontier.confirm_through(199)
    assert frontier.committed == 199
    assert frontier.missing(201) == [(200, 200)]


def test_the_example_of_the_contiguous_frontier_rule() -> None:
    """With 101 missing of [0 .. 103] the frontier is 100; after the retry confirms 101 it is 103."""
    frontier = Frontier()
    frontier.confirm([(0, 100), (102, 102), (103, 103)])
    assert frontier.committed == 100
    assert frontier.ranges == [(102, 103)]
    frontier.confirm([(101, 101)])
    assert frontier.committed == 103
    assert frontier.ranges == []


def test_confirming_again_is_harmless() -> None:
    """Scenario B of the protocol: a receiver that crashed confirms offset 100 again, and nothing changes."""
    frontier = Frontier()
    assert frontier.confirm_through(100)
    assert not frontier.confirm_through(100)
    assert not frontier.confirm_through(99)
    assert not frontier.confirm([(100, 100), (0, 50)])
    assert frontier.committed == 100


def test_nothing_is_confirmed_at_first() -> None:
    """A new frontier stands at -1; confirming through -1 says nothing."""
    frontier = Frontier()
    assert frontier.committed == NOTHING == -1
    assert not frontier.confirm_through(-1)
    assert frontier.missing(3) == [(0, 2)]
    assert frontier.missing(0) == []


@pytest.mark.parametrize("bad", [(-1, 5), (5, 4), (-3, -2)])
def test_ranges_that_are_none_are_refused_as_a_whole(bad: Range) -> None:
    """A negative or reversed range refuses the whole confirmation."""
    frontier = Frontier()
    with pytest.raises(InvalidArgument):
        frontier.confirm([(0, 5), bad])
    assert frontier == Frontier()
    with pytest.raises(InvalidArgument):
        frontier.confirm_through(-2)


def test_too_many_open_ranges_are_refused_as_a_whole() -> None:
    """One island more than the limit refuses the whole confirmation, names the first missing offset, keeps the rest."""
    frontier = Frontier()
    frontier.confirm([(2 * number + 5, 2 * number + 5) for number in range(MAX_OPEN_RANGES)])
    before = frontier.copy()
    with pytest.raises(TooManyRanges) as caught:
        frontier.confirm([(0, 1), (100_000, 100_000)])
    assert caught.value.details["first_missing"] == 2
    assert caught.value.retryable
    assert frontier == before
    assert frontier.confirm([(0, 6), (100_000, 100_000)])
    assert frontier.committed == 7
    assert len(frontier.ranges) == MAX_OPEN_RANGES - 1


def test_thousands_of_open_ranges() -> None:
    """A frontier with room for them holds thousands of islands, and closing the gaps joins them all."""
    count = 20_000
    frontier = Frontier(max_ranges=count)
    frontier.confirm([(2 * number + 1, 2 * number + 1) for number in reversed(range(count))])
    assert frontier.committed == NOTHING
    assert len(frontier.ranges) == count
    assert frontier.is_confirmed(2 * count - 1)
    assert not frontier.is_confirmed(count)
    frontier.confirm([(2 * number, 2 * number) for number in range(count)])
    assert frontier == Frontier(2 * count - 1, [], count)


def test_a_cumulative_confirmation_swallows_islands() -> None:
    """Confirming through an offset absorbs the islands below it, and the one that it touches."""
    frontier = Frontier()
    frontier.confirm([(5, 6), (10, 12), (14, 20), (30, 30)])
    frontier.confirm_through(11)
    assert (frontier.committed, frontier.ranges) == (12, [(14, 20), (30, 30)])
    frontier.confirm_through(13)
    assert (frontier.committed, frontier.ranges) == (20, [(30, 30)])


def test_a_copy_is_independent() -> None:
    """Changing a copy leaves the original as it was."""
    frontier = Frontier(3, [(7, 9)])
    copy = frontier.copy()
    copy.confirm([(5, 5)])
    copy.confirm_through(8)
    assert frontier == Frontier(3, [(7, 9)])
    assert copy == Frontier(9)
