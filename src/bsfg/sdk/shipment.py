"""Facts on their way to a node: they are sent together, answered together, and divided only when one of them is bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, ConflictingDuplicate
from bsfg.ports import Receipt, Result
from bsfg.sdk.futures import Outcome

if TYPE_CHECKING:
    from bsfg.wire.clientstreams import Appended


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive facts of a shipment that share an outcome: where they stand in it, and in the shipment.

    The outcome is None when nobody holds a future of these facts any more.
    """

    outcome: Outcome | None
    outcome_start: int
    start: int
    count: int


@dataclass(slots=True, eq=False)
class Shipment:
    """Facts that travel in one frame.

    ``rows`` says which facts of the parts are still in it, None for all: bad ones leave. An indivisible shipment is a
    caller's own batch and is refused as a whole. ``ends`` is when the producer gives it up, on the monotonic clock.
    """

    stream: str
    facts: FactBatch
    parts: Sequence[Part]
    size_bytes: int
    divisible: bool = True
    ends: float | None = None
    rows: np.ndarray | None = None
    refused: list[tuple[FactBatch, BsfgError]] = field(default_factory=list)
    on_over: Callable[[Shipment], None] | None = None

    @staticmethod
    def of(stream: str, facts: FactBatch, outcome: Outcome, size_bytes: int, *, divisible: bool = True) -> Shipment:
        """Make a shipment of all the facts of one outcome."""
        return Shipment(stream, facts, (Part(outcome, 0, 0, len(facts)),), size_bytes, divisible)

    def __len__(self) -> int:
        return len(self.facts)

    def settle(self, appended: Appended) -> None:
        """Hand the node's answer to all futures; the shipment is over."""
        if (conflicts := np.flatnonzero(appended.receipt.results == Result.CONFLICT)).size:
            error = ConflictingDuplicate(f"{conflicts.size} message ids are taken by facts with other bodies")
            self.refused.append((self.facts.take(conflicts), error))
        if self.rows is None and len(self.parts) == 1:
            part = self.parts[0]
            if part.outcome is not None:
                whole = part.outcome_start == 0 and part.count == part.outcome.count
                rows = None if whole else np.arange(part.outcome_start, part.outcome_start + part.count)
                part.outcome.settle(appended, rows)
        else:
            self._settle_parts(appended)
        self._over()

    def _settle_parts(self, appended: Appended) -> None:
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is None:
                continue
            first, last = np.searchsorted(rows, (part.start, part.start + part.count))
            if last > first:
                within = rows[first:last] - part.start + part.outcome_start
                part.outcome.settle(_slice(appended, int(first), int(last)), within)

    def refuse(self, at: Sequence[int], error: BsfgError) -> None:
        """Take facts out that the node will never accept; their futures fail."""
        bad = sorted(set(at))
        self.refused.append((self.facts.take(bad), error))
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is not None:
                chosen = rows[bad]
                mine = chosen[(chosen >= part.start) & (chosen < part.start + part.count)]
                if len(mine):
                    part.outcome.fail(error, (mine - part.start + part.outcome_start).tolist())
        keep = np.setdiff1d(np.arange(len(self.facts)), bad)
        self.rows, self.facts = rows[keep], self.facts.take(keep)
        if not len(keep):
            self._over()

    def give_up(self, error: BsfgError) -> None:
        """Let all futures fail; the shipment is over, and what became of its facts may be unknown."""
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is not None:
                mine = rows[(rows >= part.start) & (rows < part.start + part.count)]
                part.outcome.fail(error, (mine - part.start + part.outcome_start).tolist())
        self._over()

    def halves(self) -> tuple[Shipment, Shipment]:
        """Give the shipment as two that are sent by themselves; it is over when both are."""
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        middle, left = len(self.facts) // 2, [2]

        def over(half: Shipment) -> None:
            self.refused += half.refused
            left[0] -= 1
            if not left[0]:
                self._over()

        def half(start: int, end: int) -> Shipment:
            facts, size_bytes = self.facts.slice(start, end - start), self.size_bytes // 2
            return Shipment(
                self.stream, facts, self.parts, size_bytes, ends=self.ends, rows=rows[start:end], on_over=over
            )

        return half(0, middle), half(middle, len(self.facts))

    def _over(self) -> None:
        if self.on_over is not None:
            call, self.on_over = self.on_over, None
            call(self)


def joined(shipments: Sequence[Shipment]) -> Shipment:
    """Make one shipment of several that were not sent yet, in their order."""
    if len(shipments) == 1:
        return shipments[0]
    parts, at = [], 0
    for shipment in shipments:
        parts += [Part(part.outcome, part.outcome_start, at + part.start, part.count) for part in shipment.parts]
        at += len(shipment)
    facts = FactBatch.concat([shipment.facts for shipment in shipments])
    size_bytes = sum(shipment.size_bytes for shipment in shipments)
    return Shipment(shipments[0].stream, facts, parts, size_bytes)


def _slice(appended: Appended, first: int, last: int) -> Appended:
    receipt = appended.receipt
    ids = appended.message_ids[first:last] if appended.message_ids is not None else None
    part = Receipt(
        receipt.offsets[first:last], receipt.results[first:last], receipt.chain_head, receipt.appended_at_unix_ms
    )
    return type(appended)(part, appended.digests[first:last], ids, appended.hasher)
