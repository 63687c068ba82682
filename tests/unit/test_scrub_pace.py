"""The pace of the scrub: all of it within a period, never faster than it may, and little at a time."""

from __future__ import annotations

import pytest

from bsfg.node.scrub import SLOWEST_BYTES_PER_SECOND, Pace
from bsfg.stores.log.scrub import CHUNK_BYTES

DAY_SECONDS = 86_400
WEEK = Pace(7 * DAY_SECONDS, 4 << 20)


def test_a_pass_takes_the_period() -> None:
    """A terabyte in a week is read at the rate that takes a week, pauses included."""
    total = 1 << 40
    turn, elapsed, done = WEEK.turn_bytes(total), 0.0, 0
    for _ in range(1000):
        done += turn
        elapsed += 0.001 + WEEK.pause_seconds(total, done, elapsed + 0.001)
    assert elapsed / done * total == pytest.approx(7 * DAY_SECONDS, rel=0.01)


@pytest.mark.parametrize("total", [0, 1, 10 << 20, 1 << 40, 1 << 50])
def test_it_is_bounded(total: int) -> None:
    """Whatever there is to read, rate and turn stay within their bounds."""
    assert SLOWEST_BYTES_PER_SECOND <= WEEK.bytes_per_second(total) <= 4 << 20
    assert 1 <= WEEK.turn_bytes(total) <= CHUNK_BYTES


def test_a_rate_below_the_slowest_counts() -> None:
    """An operator's rate is never exceeded, however low it is."""
    assert Pace(DAY_SECONDS, 1000).bytes_per_second(1 << 40) == 1000
    assert Pace(DAY_SECONDS, 1000).turn_bytes(1 << 40) == 1000


def test_time_that_was_lost_is_made_up_for() -> None:
    """After a slow read there is no pause, and never a negative one."""
    assert WEEK.pause_seconds(1 << 40, CHUNK_BYTES, 10.0) == 0.0


def test_the_rest_of_the_period_is_quiet() -> None:
    """After a short pass nothing happens until the period is over; a wrong clock does not stretch that."""
    assert WEEK.rest_seconds(60) == 7 * DAY_SECONDS - 60
    assert WEEK.rest_seconds(8 * DAY_SECONDS) == 1.0
    assert WEEK.rest_seconds(-DAY_SECONDS) == 7 * DAY_SECONDS
