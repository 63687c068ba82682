"""Random operations, held against a naive model after each step; the seed replays any failure."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import pytest

from bsfg.errors import TruncateRefused
from bsfg.fact import Message
from bsfg.ports import Buffer, Confirmation
from bsfg.retention import GapReason
from bsfg.testing.conformance.case import READER, Lane, Rig, StorageCase, entries_of, scenario
from bsfg.testing.conformance.model import BufferModel
from bsfg.testing.conformance.writing import rows
from bsfg.testing.facts import key_of, message


class RandomOperationsContract(StorageCase):
    """Sequences of writes, repeats, conflicts, confirmations, truncations and restarts, on both buffers.

    ``seeds`` and ``steps`` set the length of the campaign; a failure names its seed and step.
    """

    seeds: ClassVar[range] = range(6)
    steps: ClassVar[int] = 60

    @scenario
    async def test_random_operations_agree_with_a_naive_model(self, rig: Rig) -> None:
        """Whatever the order of operations and restarts, the storage and the model give the same answers."""
        for seed in self.seeds:
            await rig.open()
            kind = Buffer.STORE if seed % 2 else Buffer.FORWARD
            run = RandomRun(rig, kind, Random(seed))
            await run.begin()
            for step in range(self.steps):
                try:
                    await run.step()
                except Exception as error:
                    error.add_note(f"seed {seed}, step {step}, {kind} buffer: {run.trace[-5:]}")
                    raise


class RandomRun:
    """One sequence of random operations on one buffer."""

    def __init__(self, rig: Rig, kind: Buffer, random: Random) -> None:
        self.rig = rig
        self.kind = kind
        self.random = random
        self.model = BufferModel()
        self.trace: list[str] = []
        self.lane: Lane
        self._fresh = 0

    async def begin(self) -> None:
        """Open the buffer and create its consumer."""
        self.lane = await self.rig.lane(kind=self.kind)
        await self.lane.create_reader()

    async def step(self) -> None:
        """Do one random thing and compare."""
        operations = [self.write, self.write, self.write, self.confirm, self.truncate, self.replay, self.reopen]
        operation = self.random.choice(operations)
        self.trace.append(operation.__name__)
        await operation()
        self.rig.clock.advance(self.random.choice([0, 0, 1, 60]))
        stats = await self.lane.stats()
        assert (stats.start, stats.end, stats.keys) == (self.model.start, self.model.end, self.model.end)

    async def write(self) -> None:
        """Write a batch of new facts, repeats and conflicts, some of them twice."""
        facts = [self._fact() for _ in range(self.random.randint(1, 8))]
        facts += [fact for fact in facts if self.random.random() < 0.15]
        receipt = await self.lane.write_messages(facts)
        assert rows(receipt) == self.model.write(facts)
        expected = len(self.model.refused) if self.kind == Buffer.FORWARD else 0
        assert len(await self.lane.buffer.quarantine()) == expected

    def _fact(self) -> Message:
        zone = self.random.choice(["plant", "plant", "idmz"])
        if self.model.entries and self.random.random() < 0.4:
            old = self.random.choice(self.model.entries)
            if self.random.random() < 0.6:
                return old
            return message(
                key_of(old).message_id, {"altered": self.random.randrange(3)}, from_zone=key_of(old).from_zone
            )
        self._fresh += 1
        return message(f"id-{self._fresh}", self.random.randrange(10), from_zone=zone)

    async def confirm(self) -> None:
        """Confirm ranges in any order, or everything through an offset."""
        if not self.model.end:
            return
        first = self.random.randrange(self.model.end)
        last = min(self.model.end - 1, first + self.random.randrange(6))
        if self.random.random() < 0.4:
            first = min(first, self.model.frontier.committed + 1)
        self.model.frontier.confirm([(first, last)])
        checkpoint = await self.rig.storage.cursors.commit(READER, Confirmation(ranges=[(first, last)]))
        assert checkpoint.committed == self.model.frontier.committed

    async def truncate(self) -> None:
        """Truncate somewhere, allowed or not."""
        offset = self.random.randint(0, self.model.end + 1)
        if self.model.may_truncate(offset):
            await self.lane.buffer.truncate_before(offset)
            self.model.start = max(self.model.start, offset)
        else:
            with pytest.raises(TruncateRefused):
                await self.lane.buffer.truncate_before(offset)

    async def replay(self) -> None:
        """Read from somewhere and look a key up."""
        start = self.random.randint(0, self.model.end)
        frames = await self.lane.frames(start, max_facts=self.random.choice([1, 3, 1000]))
        found = [(entry.offset, entry.message) for entry in entries_of(frames)]
        first = max(start, self.model.start)
        assert found == list(enumerate(self.model.entries))[first:]
        assert {frame.gap.reason for frame in frames if frame.gap} <= {GapReason.TRUNCATED}
        if self.model.entries:
            key = key_of(self.random.choice(self.model.entries))
            entry = await self.lane.buffer.get(key)
            assert (entry.message if entry else None) == self.model.retained(key)

    async def reopen(self) -> None:
        """Restart."""
        await self.rig.reopen()
        self.lane = await self.rig.lane(kind=self.kind)
        state = await self.rig.storage.cursors.consumer(READER)
        assert (state.checkpoint.committed, list(state.ranges)) == (
            self.model.frontier.committed,
            self.model.frontier.ranges,
        )
