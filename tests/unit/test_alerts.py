"""Events that repeat: told at once, then counted, and never a flood."""

from typing import Any

from bsfg.node.alerts import EVENT_KINDS_MAX, OTHERS, AlertBoard
from bsfg.node.config import Alerts
from bsfg.node.metrics import Metrics
from bsfg.testing.clock import FakeClock


class Board:
    """An alert board with its clock and what it told."""

    def __init__(self) -> None:
        self.clock, self.metrics, self.told = FakeClock(), Metrics(), []
        settings = Alerts(timeout_seconds=1.0, repeat_every_seconds=3600.0)
        self.alerts = AlertBoard("here", settings, self.metrics, self.clock, self._note)

    def _note(self, event: str, **fields: Any) -> None:
        assert event == "alert_raised"
        self.told.append((fields["about"], fields["text"]))


def test_what_repeats_is_told_once_a_minute_with_how_often() -> None:
    """The first is told at once, the others in one line after a minute; the metric counts all."""
    board = Board()
    for _ in range(1_000):
        board.alerts.event("identity_refused", "mallory", "asked for audit")
    board.alerts.tick()
    assert board.told == [("mallory", "asked for audit")]
    board.clock.advance(60)
    board.alerts.tick()
    assert board.told[1:] == [("mallory", "asked for audit (999 times since it was last told)")]
    value = board.metrics.registry.get_sample_value("bsfg_alerts_total", {"alert": "identity_refused"})
    assert value == 1_000
    board.clock.advance(60)
    board.alerts.tick()
    board.alerts.event("identity_refused", "mallory", "asked again")
    assert board.told[2:] == [("mallory", "asked again")]


def test_many_names_are_told_of_as_others() -> None:
    """Whoever comes under ever new names fills neither memory nor log."""
    board = Board()
    for number in range(10_000):
        board.alerts.event("identity_refused", f"name-{number}", "who is that")
    assert len(board.told) == EVENT_KINDS_MAX + 1
    assert board.told[-1][0] == OTHERS
