"""Decides whether a run that is to move what there is, and then leave, has done so.

A link is done when its tasks have moved it and its sender counts as confirmed all that it had when this run first asked
it. The sender itself is asked: the board of the node also shows what an earlier run has said, and what was put but not
confirmed yet. What was done once stays done, whatever becomes of the link. A link that cannot get on ends the run with
an error, after the others are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bsfg.errors import BsfgError, GateHeld, LeaseHeld, PeerUnreachable, SparkFailed, TimedOut
from bsfg.gate import Mode
from bsfg.printable import counted

if TYPE_CHECKING:
    from bsfg.spark.replicate.driver import LinkState, Replication

START_SECONDS = 180.0
"""How long Spark may take to start its first task, beside the patience that was asked for."""


@dataclass(slots=True)
class _Course:
    """How far one link has come."""

    goals: dict[str, int] = field(default_factory=dict)
    stood: tuple[int, ...] = ()
    since: float = 0.0
    done: bool = False
    failure: BsfgError | None = None


class CaughtUp:
    """Watches the links of a run; ``patience_seconds`` is how long one may stand still."""

    def __init__(self, patience_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._patience_seconds, self._now = patience_seconds, now
        self._courses: dict[str, _Course] = {}

    def goes_on(self, replication: Replication) -> bool:
        """Tell whether there is more to do; raises what kept a link from being done when the others are."""
        for link in replication.links:
            course = self._courses.setdefault(link.plan.name, _Course(since=self._now()))
            course.failure = self._failed(replication, link, course)
        if all(course.failure or course.done for course in self._courses.values()):
            self._raise()
            return False
        return True

    def _failed(self, replication: Replication, link: LinkState, course: _Course) -> BsfgError | None:
        if course.done:
            return None
        # Who has told nothing of a stream in this run may not have reached its sender.
        told = link.own_reports()
        spans = replication.spans(link) if all(each.stream in told for each in link.plan.streams) else {}
        for stream, (_, end) in spans.items():
            course.goals.setdefault(stream, end)
        course.done = bool(spans) and all(start >= course.goals[stream] for stream, (start, _) in spans.items())
        stood = _standing(replication, link, spans)
        if course.done or stood != course.stood:
            course.stood, course.since = stood, self._now()
        if course.done:
            return None
        if link.mode == Mode.HELD and not replication.node_away:
            return GateHeld(f"the gate of {link.plan.name} is held: {link.reason}", link=link.plan.name)
        seconds = self._patience_seconds + (START_SECONDS if _starts(replication, link) else 0.0)
        return _reason(replication, link, seconds) if self._now() - course.since >= seconds else None

    def _raise(self) -> None:
        failures = [course.failure for course in self._courses.values() if course.failure is not None]
        if len(failures) > 1:
            message = "; ".join(each.message for each in failures)
            raise type(failures[0])(message, hint=failures[0].hint, **failures[0].details)
        if failures:
            raise failures[0]


def _starts(replication: Replication, link: LinkState) -> bool:
    """Tell whether nothing but Spark's own start is waited for."""
    return not (link.was_ours or link.lease or link.problem or replication.node_away)


def _standing(replication: Replication, link: LinkState, spans: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """Give numbers that change whenever the link gets on."""
    own = [int(report["backlog"]) for report in link.own_reports().values()]
    return (_starts(replication, link), len(own), sum(own), sum(start for start, _ in spans.values()))


def _reason(replication: Replication, link: LinkState, seconds: float) -> BsfgError:
    name = link.plan.name
    stood = f"{name} did not get on for {seconds:g} s"
    if replication.node_away:
        return PeerUnreachable(f"{stood}: this zone's node is away: {replication.node_away}", link=name)
    if link.lease not in (None, link.plan.holder):
        return LeaseHeld(f"{stood}: {link.lease} moves it", link=name, holder=link.lease)
    if link.problem:
        return SparkFailed(f"{stood}: {link.problem}", link=name)
    if link.mode == Mode.AUTONOMOUS:
        return PeerUnreachable(f"{stood}: {link.reason or 'its sender does not answer'}", link=name)
    return TimedOut(f"{stood}: {counted(link.backlog or 0, 'fact')} left", link=name)
