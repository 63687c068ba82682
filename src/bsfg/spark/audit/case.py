"""One stream of a link under audit: both ends at one moment, what the first pass found, and what follows from it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bsfg.spark.audit.evidence import End, Evidence
from bsfg.spark.audit.excuses import Excuses, for_absent
from bsfg.spark.audit.judging import Totals, let_go_before, own_gaps, totals
from bsfg.spark.audit.narrowing import window_of
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import NO_END, RANGE_FACTS, RECEIVER, SENDER, Scope
from bsfg.spark.audit.sibling import Sibling
from bsfg.spark.audit.sums import Summing

STRETCH_RANGES = 4
"""How many ranges one task reads."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream of a link that is to be audited: both ends, and what the link carries.

    ``first`` and ``last`` bound the sender's offsets, both inclusive. ``sibling`` is the sender's other buffer, when
    another link of the receiver pulls that. The other words are those of `Scope`.
    """

    stream: str
    sender: End
    receiver: End
    zone: str
    receiver_zone: str | None = None
    carry_only: frozenset[str] = frozenset()
    relayed: bool = False
    sibling: End | None = None
    first: int = 0
    last: int | None = None
    deep: bool = True
    range_facts: int = RANGE_FACTS

    def scope(self) -> Scope:
        """Give what is compared, with a secret of its own."""
        end = NO_END if self.last is None else self.last + 1
        return Scope(
            self.zone,
            secrets.token_bytes(32),
            self.first,
            end,
            self.receiver_zone,
            self.carry_only,
            self.relayed,
            self.sibling is not None,
            self.range_facts,
            self.deep,
        )


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """A link that is to be audited: its name, its two zones, and the streams."""

    link: str
    sender_zone: str
    receiver_zone: str
    streams: Sequence[StreamPlan]


@dataclass(frozen=True, slots=True)
class Case:
    """What everything after the first pass goes by.

    ``repeated`` are hashed keys that the receiver has more than once. ``frontier`` is the last offset that the receiver
    must have, ``excuses`` say what it may lack all the same, and ``end`` is where the sender's part of it ends.
    ``lowest`` is the lowest of the sender's offsets that the receiver has, inside the window or before it.
    """

    plan: StreamPlan
    scope: Scope
    sender: Evidence
    receiver: Evidence
    totals: Totals
    repeated: np.ndarray
    frontier: int
    excuses: Excuses
    end: int
    lowest: int | None = None
    sibling: Sibling | None = None

    def side(self, side: str) -> tuple[End, Evidence]:
        """Give one end and its evidence."""
        return (self.plan.sender, self.sender) if side == SENDER else (self.plan.receiver, self.receiver)

    @property
    def told_to_sender(self) -> tuple[bytes, ...]:
        """The chain heads that the receiver told the sender."""
        cursor = self.sender.cursor
        return (cursor.peer_head,) if cursor is not None and cursor.peer_head else ()

    @property
    def told_to_receiver(self) -> tuple[bytes, ...]:
        """The chain heads that the sender told the receiver."""
        position = self.receiver.position
        return (position.chain_head,) if position is not None and position.chain_head else ()


def open_case(plan: StreamPlan, runner: Runner) -> Case:
    """Look at both ends and read both logs once."""
    sender, receiver = _look(plan)
    scope = plan.scope()
    end = max(plan.first, min(scope.end, sender.end))
    window = window_of(plan.receiver, receiver, scope)
    steps = [
        *stretches(SENDER, plan.sender, sender, (scope.first, end), scope),
        *stretches(RECEIVER, plan.receiver, receiver, (window.first, window.end), scope),
    ]
    title = f"{plan.stream}: reading both ends"
    results, repeated = runner.each_with_keys(title, steps, window.end - window.first)
    found = totals(results)
    receiver = replace(receiver, start=max(receiver.start, let_go_before(own_gaps(found.side(RECEIVER)))))
    frontier = _must_have(sender, receiver, found, scope)
    lowest = min((each for each in (found.lowest, window.lowest) if each is not None), default=None)
    excuses = for_absent(scope, sender, receiver, frontier, lowest)
    return Case(plan, scope, sender, receiver, found, repeated, frontier, excuses, end, lowest, _sibling(plan))


def _sibling(plan: StreamPlan) -> Sibling | None:
    if plan.sibling is None:
        return None
    evidence = plan.sibling.evidence()
    return Sibling(plan.sibling, evidence.log_id, evidence.end)


def _look(plan: StreamPlan) -> tuple[Evidence, Evidence]:
    """Look at both ends, what is confirmed first and what there is to confirm last, so that neither seems behind."""
    before = plan.sender.evidence()
    told = [before.cursor.peer_head] if before.cursor is not None and before.cursor.peer_head else []
    receiver = plan.receiver.evidence(told)
    position = receiver.position
    heads = [position.chain_head] if position is not None and position.chain_head else []
    return replace(plan.sender.evidence(heads), cursor=before.cursor), receiver


def stretches(side: str, log: End, evidence: Evidence, bounds: tuple[int, int], scope: Scope) -> Iterator[Summing]:
    """Cut what is to be read of a log into steps; what it has let go is one step, since there is nothing to read."""
    first, end = bounds
    cuts = list(range(max(first, evidence.start), end, STRETCH_RANGES * scope.range_facts))
    if first < min(evidence.start, end):
        cuts = [first, *cuts]
    for start, stop in zip(cuts, [*cuts[1:], end], strict=True) if cuts else ():
        yield Summing(side, log, evidence.log_id, start, stop, scope)


def _must_have(sender: Evidence, receiver: Evidence, found: Totals, scope: Scope) -> int:
    """Give the last offset that the receiver must have: what was confirmed, or else the last that it has.

    While facts are on their way, a fact can be there already and the record of a refused one before it not yet.
    """
    position, cursor = receiver.position, sender.cursor
    known = [cursor.committed] if cursor is not None else []
    if position is not None and position.acknowledged is not None and position.log_id == sender.log_id:
        known.append(position.acknowledged)
    if known:
        return max(known)
    told = [gap.last for gap in receiver.gaps if gap.origin_zone == scope.zone]
    return max([-1 if found.highest is None else found.highest, *told])
