"""Patience with wrong requests: a few are free, many make the next answers wait, and time forgives."""

from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import BsfgError, BufferFull, InvalidFact
from bsfg.wire.limits import BLAMED, CALLERS_MAX, DELAY_SECONDS_MAX, FaultThrottle

WRONG = InvalidFact("wrong")


class Now:
    """A clock that is set by hand."""

    seconds = 0.0

    def __call__(self) -> float:
        """Give the time."""
        return self.seconds


def test_a_few_faults_are_free() -> None:
    """Somebody who corrects his mistakes never notices; errors that are not his fault never count."""
    patience = FaultThrottle(Now())
    assert [patience.delay_seconds("a", WRONG) for _ in range(20)] == [0.0] * 20
    assert all(patience.delay_seconds("a", error) == 0 for error in [BufferFull("full"), ValueError("x")] * 50)


def test_many_faults_make_answers_wait() -> None:
    """Delays grow with every fault up to a bound, for this caller alone."""
    patience = FaultThrottle(Now())
    delays = [patience.delay_seconds("a", WRONG) for _ in range(300)]
    assert delays == sorted(delays)
    assert delays[-1] == DELAY_SECONDS_MAX
    assert patience.delay_seconds("b", WRONG) == 0.0


def test_time_forgives() -> None:
    """A caller who stops for some seconds begins anew."""
    now = Now()
    patience = FaultThrottle(now)
    for _ in range(500):
        patience.delay_seconds("a", WRONG)
    now.seconds += 60
    assert patience.delay_seconds("a", WRONG) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=200))
def test_delays_stay_within_bounds(steps: list[tuple[int, float]]) -> None:
    """Whatever callers do, a delay is never negative and never above the bound."""
    now = Now()
    patience = FaultThrottle(now)
    for who, pause in steps:
        now.seconds += pause
        assert 0.0 <= patience.delay_seconds(str(who), WRONG) <= DELAY_SECONDS_MAX


def test_memory_is_bounded() -> None:
    """Strangers with ever new names do not fill the memory."""
    patience = FaultThrottle(Now())
    for number in range(CALLERS_MAX + 500):
        patience.delay_seconds(str(number), WRONG)
    assert len(patience._faults) == CALLERS_MAX


def test_only_errors_that_exist_are_blamed() -> None:
    """Every code in the list is one, and none of them can be cured by a retry."""
    assert set(BsfgError.registry) >= BLAMED
    assert not any(BsfgError.registry[code].retryable for code in BLAMED)
