"""Shipments: whatever is refused, halved or given up on the way, each fact's own future hears of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.answers import appended

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, InvalidFact, PeerUnreachable
from bsfg.fact import Envelope, Fact, Message
from bsfg.sdk.futures import Outcome
from bsfg.sdk.sender import Shipment, ShipmentPart


def facts(first: int, count: int) -> FactBatch:
    """Give facts whose ids are their numbers."""
    return FactBatch.from_messages(
        Message(Envelope("plant", "enterprise", 1, str(number)), Fact("a:b", "c", b"1"))
        for number in range(first, first + count)
    )


@dataclass
class Sent:
    """A shipment of several parts, and what was said of each fact by number."""

    shipment: Shipment
    outcomes: list[Outcome | None]
    starts: list[int]
    over: list[Shipment] = field(default_factory=list)

    @staticmethod
    def of(counts: list[int], heard: list[bool]) -> Sent:
        """Make a shipment of parts; nobody holds a future of those that are not heard."""
        outcomes: list[Outcome | None] = []
        parts, starts, at = [], [], 0
        for count, listens in zip(counts, heard, strict=True):
            made = Outcome() if listens else None
            if made is not None:
                made.close([str(number) for number in range(at, at + count)])
            outcomes.append(made)
            parts.append(ShipmentPart(made, at, count))
            starts.append(at)
            at += count
        sent = Sent(Shipment("s", facts(0, at), parts, at), outcomes, starts)
        sent.shipment.on_over = sent.over.append
        return sent

    def said(self) -> dict[int, int | BsfgError]:
        """Give what each future that is held says, by the number of its fact."""
        result: dict[int, int | BsfgError] = {}
        for made, start in zip(self.outcomes, self.starts, strict=True):
            for row in range(made.count if made is not None else 0):
                assert made is not None
                if made.is_settled(row):
                    error = made.failures.get(row)
                    result[start + row] = error if error is not None else made.appended(row).offset
        return result


def numbers(shipment: Shipment) -> list[int]:
    """Give the numbers of the facts that are still in a shipment."""
    return [int(id) for id in shipment.facts.values("message_id")]


@given(st.data())
def test_every_fact_hears_its_own_fate(data: st.DataObject) -> None:
    """Random refusals, halvings, answers and losses give each fact the one verdict that was spoken over it."""
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    heard = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    sent = Sent.of(counts, heard)
    told: dict[int, int | BsfgError] = {}
    queue = [sent.shipment]
    while queue:
        shipment = queue.pop(0)
        step = data.draw(st.sampled_from(["settle", "refuse", "halve", "give_up"]))
        present = numbers(shipment)
        if step == "halve" and len(shipment) > 1:
            queue += shipment.halves()
        elif step == "refuse":
            bad = data.draw(st.lists(st.sampled_from(range(len(shipment))), min_size=1, unique=True))
            error = InvalidFact("no")
            shipment.refuse(bad, error)
            told |= {present[at]: error for at in bad}
            if len(shipment):
                queue.append(shipment)
        elif step == "give_up":
            lost = PeerUnreachable("gone")
            shipment.give_up(lost)
            told |= dict.fromkeys(present, lost)
        else:
            shipment.settle(appended([1000 + number for number in present]))
            told |= {number: 1000 + number for number in present}
    held = {
        number
        for start, count, listens in zip(sent.starts, counts, heard, strict=True)
        for number in range(start, start + (count if listens else 0))
    }
    assert sent.said() == {number: verdict for number, verdict in told.items() if number in held}
    assert set(told) == set(range(sum(counts)))
    assert sent.over == [sent.shipment]
    refused = [int(id) for batch, _ in sent.shipment.refused for id in batch.values("message_id")]
    assert sorted(refused) == sorted(number for number, said in told.items() if isinstance(said, InvalidFact))
