"""Lines that repeat themselves are counted, not written."""

from bsfg.node.logs import FREE, KINDS_MAX, QUIET_MS, Repeats
from bsfg.testing.clock import FakeClock


def test_a_flood_is_a_few_lines_a_minute() -> None:
    """The first lines of a kind are written at once; those left out are told with the first of the next minute."""
    clock, written = FakeClock(), list[int]()
    repeats = Repeats(clock)
    for _ in range(1_000):
        repeats.tell(("a",), written.append)
    assert written == [0] * FREE
    repeats.tell(("b",), written.append)
    assert len(written) == FREE + 1
    clock.advance(QUIET_MS / 1000)
    repeats.tell(("a",), written.append)
    assert written[-1] == 1_000 - FREE


def test_callers_with_ever_new_names_share_a_kind() -> None:
    """However many kinds there are, lines and memory are bounded."""
    clock, written = FakeClock(), list[int]()
    repeats = Repeats(clock)
    for number in range(10 * KINDS_MAX):
        repeats.tell((str(number),), written.append)
    assert len(written) == KINDS_MAX + FREE
    assert len(repeats._kinds) == KINDS_MAX + 1
    clock.advance(QUIET_MS / 1000)
    repeats.tell(("new",), written.append)
    assert len(repeats._kinds) <= 2
