"""What must be true of two nodes whatever happens to them, told from their storage and not from those who work there.

The witness looks at both ends of a direction from time to time. It remembers everything it saw, so that what a crash
takes back, what comes twice and what leaves too early is noticed when it is looked at the next time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulated.world import STREAM, Machine, SimulatedNode

from bsfg.config import consumer_name
from bsfg.fact import Entry
from bsfg.gate import SENDER, Gate, Mode
from bsfg.ports import Buffer, GapSet
from bsfg.retention import GapReason


class BrokenError(AssertionError):
    """A promise was broken."""


def expect(condition: object, text: str) -> None:
    """Raise `BrokenError` unless something is so."""
    if not condition:
        raise BrokenError(text)


@dataclass
class Sight:
    """What was seen of the sender at one moment."""

    start: int
    end: int
    committed: int
    gaps: list[GapSet]
    gate: Gate


@dataclass
class Witness:
    """Watches the facts of one zone on their way to the other."""

    sender: Machine
    receiver: Machine
    acknowledged: dict[int, str] = field(default_factory=dict)
    """What a producer was told to be stored, by offset."""
    stored: dict[int, str] = field(default_factory=dict)
    arrived: dict[int, str] = field(default_factory=dict)
    """What the receiver's forward buffer had, by offset at the sender."""
    shown: dict[int, tuple[int, str]] = field(default_factory=dict)
    """What the forward buffer or an application showed, by offset there."""
    handled: dict[int, None] = field(default_factory=dict)
    received_gaps: list[GapSet] = field(default_factory=list)
    _seen_end: int = 0
    _shown_end: int = 0
    _last: Sight | None = None

    @property
    def consumer(self) -> str:
        """The name of the receiver's consumer at the sender."""
        return consumer_name(self.receiver.name, STREAM, Buffer.STORE)

    # What others tell.

    def told(self, offset: int, message_id: str) -> None:
        """A producer was told that its fact is stored."""
        before = self.acknowledged.setdefault(offset, message_id)
        expect(before == message_id, f"{self._way}: offset {offset} was given to {before} and to {message_id}")

    def took(self, entry: Entry) -> None:
        """An application was given an entry."""
        self._shows(entry)
        if entry.offset not in self.handled:
            expect(entry.offset > next(reversed(self.handled), -1), f"{self._way}: an entry was overtaken")
            self.handled[entry.offset] = None

    # Looking.

    async def look_at_sender(self, node: SimulatedNode) -> None:
        """Look at the store buffer and at how far the receiver has confirmed it."""
        store, cursors = await node.parts.store(STREAM), node.parts.storage.cursors
        gate = node.parts.links.gate(self.receiver.name, SENDER).gate
        stats, state = await store.stats(), await cursors.consumer(self.consumer)
        seen = Sight(stats.start, stats.end, state.checkpoint.committed, await store.gap_sets(), gate)
        first = max(self._seen_end, stats.start)
        async for frame in store.replay(first, end=stats.end):
            for entry in _entries(frame):
                self.stored[entry.offset] = entry.message.envelope.message_id or ""
        self._check_sender(seen)
        self._seen_end, self._last = max(self._seen_end, stats.end), seen

    def _check_sender(self, seen: Sight) -> None:
        last, way = self._last, self._way
        expect(seen.end >= self._seen_end, f"{way}: the log ended at {self._seen_end} and ends at {seen.end}")
        expect(max(self.acknowledged, default=-1) < seen.end, f"{way}: an acknowledged fact is lost")
        for offset, message_id in self.acknowledged.items():
            there = self.stored.get(offset, message_id if offset < seen.start else "nothing")
            expect(there == message_id, f"{way}: {message_id} was acknowledged at {offset}, where {there} is")
        expect(seen.committed < seen.end, f"{way}: {seen.committed} is confirmed of a log that ends at {seen.end}")
        for offset in range(seen.committed + 1, seen.start):
            expect(_covers(seen.gaps, offset), f"{way}: {offset} left unconfirmed and without a record")
        if last is not None:
            expect(seen.committed >= last.committed, f"{way}: the frontier went back to {seen.committed}")
            closed = last.gate.mode in (Mode.AUTONOMOUS, Mode.HELD) and seen.gate == last.gate
            confirmed = seen.start <= last.committed + 1
            expect(
                seen.start == last.start or not closed or not confirmed,
                f"{way}: confirmed facts left although the gate is {seen.gate.mode}",
            )

    async def look_at_receiver(self, node: SimulatedNode) -> None:
        """Look at the forward buffer; what the sender counted as confirmed before is there, or on record."""
        counted = self._last
        forward = await node.parts.forward(STREAM)
        stats, gaps = await forward.stats(), await forward.gap_sets()
        self.received_gaps = [gap for gap in gaps if gap.origin_zone == self.sender.name]
        way = self._way
        expect(stats.end >= self._shown_end, f"{way}: the forward buffer lost what it had shown")
        async for frame in forward.replay(max(self._shown_end, stats.start), end=stats.end):
            for entry in _entries(frame):
                self._shows(entry)
        for offset in range(self._shown_end, stats.end):
            # What a crash tore was never confirmed to anybody: it is on record, and comes again.
            torn = _covers([gap for gap in gaps if gap.origin_zone is None and gap.reason == GapReason.TORN], offset)
            expect(torn or offset in self.shown, f"{way}: entry {offset} left the forward buffer and nobody read it")
        self._shown_end = stats.end
        self._check_order()
        if counted is not None:
            for offset in range(counted.committed + 1):
                there = offset in self.arrived or _covers(self.received_gaps, offset) or _covers(counted.gaps, offset)
                expect(there, f"{way}: offset {offset} is confirmed and neither there nor on record")

    def _shows(self, entry: Entry) -> None:
        origin, message_id = entry.origin, entry.message.envelope.message_id or ""
        expect(origin is not None and origin.zone == self.sender.name, f"{self._way}: an entry of somebody else")
        assert origin is not None
        here = (origin.offset, message_id)
        expect(self.shown.setdefault(entry.offset, here) == here, f"{self._way}: entry {entry.offset} changed")
        expect(self.arrived.setdefault(origin.offset, message_id) == message_id, f"{self._way}: {here} came twice")
        expect(self.stored.get(origin.offset, message_id) == message_id, f"{self._way}: {here} was never sent")

    def _check_order(self) -> None:
        origins = [self.shown[offset][0] for offset in sorted(self.shown)]
        ids = [id for _, id in self.shown.values()]
        expect(len(set(ids)) == len(ids), f"{self._way}: a fact is there twice")
        expect(origins == sorted(origins), f"{self._way}: facts arrived in another order than they were sent in")

    # The end.

    async def is_settled(self) -> bool:
        """Tell whether everything has arrived, was confirmed and was read."""
        one, other = self.sender.node, self.receiver.node
        if one is None or other is None:
            return False
        stats = await (await one.parts.store(STREAM)).stats()
        forward = await (await other.parts.forward(STREAM)).stats()
        confirmed = (await one.parts.storage.cursors.consumer(self.consumer)).checkpoint.committed
        read = (await other.parts.storage.cursors.consumer("historian")).checkpoint.committed
        return confirmed == stats.end - 1 and read == forward.end - 1

    def check_all(self) -> None:
        """Hold everything that was acknowledged against what has arrived or is on record."""
        for offset, message_id in sorted(self.acknowledged.items()):
            if not _covers(self.received_gaps, offset):
                expect(self.arrived.get(offset) == message_id, f"{self._way}: {message_id} at {offset} never arrived")
        expect(list(self.handled) == sorted(self.shown), f"{self._way}: the application was not given everything")

    @property
    def _way(self) -> str:
        return f"{self.sender.name} to {self.receiver.name}"


def _entries(frame: Any) -> Iterable[Entry]:
    return frame.entries.to_entries() if frame.entries is not None else ()


def _covers(gaps: Iterable[GapSet], offset: int) -> bool:
    return any(first <= offset <= last for gap in gaps for first, last, _ in gap.ranges.rows())
