"""When a run that is to move what there is may leave: what it has once seen confirmed stays done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bsfg.cli.pipeline.replicate import CaughtUp
from bsfg.errors import GateHeld, PeerUnreachable
from bsfg.gate import Mode
from bsfg.spark.replicate.driver import LinkState


class Run:
    """A run of two links whose senders, gates and tasks do as they are told."""

    def __init__(self) -> None:
        self.node_away, self.now = "", 0.0
        self.senders: dict[str, dict[str, tuple[int, int]]] = {"one": {"s": (0, 5)}, "two": {"s": (0, 5)}}
        self.links = [self._link(name) for name in self.senders]
        self.watch = CaughtUp(100.0, now=lambda: self.now)

    def _link(self, name: str) -> LinkState:
        plan: Any = SimpleNamespace(name=name, holder="us", streams=[SimpleNamespace(stream="s")])
        link = LinkState(plan, folder=None)  # type: ignore[arg-type]
        self.turn(link, Mode.NORMAL)
        return link

    def turn(self, link: LinkState, mode: Mode) -> None:
        """Let the board show a gate, and a report of our own."""
        reports = [{"stream": "s", "holder": "us", "backlog": 0}]
        link.look({"mode": str(mode), "reason": "works", "lease": "us", "reports": reports}, 0.0)

    def spans(self, link: LinkState) -> dict[str, tuple[int, int]]:
        """Answer for a sender."""
        return self.senders[link.plan.name]

    def goes_on(self, seconds: float = 1.0) -> bool:
        """Let time pass and look."""
        self.now += seconds
        return self.watch.goes_on(self)  # type: ignore[arg-type]


def test_what_the_senders_had_when_they_were_first_asked_is_the_goal() -> None:
    """Facts that come meanwhile are not waited for; what is put but not confirmed is."""
    run = Run()
    assert run.goes_on()
    run.senders = {"one": {"s": (5, 900)}, "two": {"s": (4, 5)}}
    assert run.goes_on()
    run.senders["two"] = {"s": (5, 5)}
    assert not run.goes_on()


@pytest.mark.parametrize("after", ["sender gone", "gate held"])
def test_a_link_that_was_done_stays_done(after: str) -> None:
    """Its sender may go and its gate be held while another link is still being moved: that is no error any more."""
    run = Run()
    run.goes_on()
    run.senders["one"] = {"s": (5, 5)}
    assert run.goes_on()
    if after == "sender gone":
        run.senders["one"] = {}
    run.turn(run.links[0], Mode.HELD if after == "gate held" else Mode.AUTONOMOUS)
    for at in range(1, 5):
        run.senders["two"] = {"s": (at, 5)}
        assert run.goes_on(99)
    run.senders["two"] = {"s": (5, 5)}
    assert not run.goes_on()


def test_a_link_that_is_not_done_is_an_error_when_the_others_are() -> None:
    """A held gate at once, an absent sender when the patience has ended."""
    run = Run()
    run.goes_on()
    run.senders = {"one": {"s": (5, 5)}, "two": {"s": (3, 5)}}
    run.turn(run.links[1], Mode.HELD)
    with pytest.raises(GateHeld, match="two is held: works"):
        run.goes_on()
    run = Run()
    run.goes_on()
    run.senders = {"one": {"s": (5, 5)}, "two": {}}
    run.turn(run.links[1], Mode.AUTONOMOUS)
    assert run.goes_on(98)
    with pytest.raises(PeerUnreachable, match="two did not get on"):
        run.goes_on(2)
