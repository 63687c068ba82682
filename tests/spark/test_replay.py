"""How a backlog is cut into micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from bsfg.spark.replicate.replay import BATCH_FACTS, even_batch


@given(st.integers(1, 50_000_000))
def test_a_backlog_is_cut_into_even_parts(facts: int) -> None:
    """No part is far from the size that is meant, and none is a small rest, which would cost as much as the others."""
    size = even_batch(facts)
    parts = -(-facts // size)
    rest = facts - (parts - 1) * size
    assert size <= 1.5 * BATCH_FACTS
    assert parts == 1 or size >= BATCH_FACTS / 2
    assert parts == 1 or rest > size - parts


def test_the_smallest_backlog_is_one_fact() -> None:
    """A micro-batch has at least one fact."""
    assert even_batch(1) == 1
    assert even_batch(BATCH_FACTS) == BATCH_FACTS
