"""What holds when the medium is slow or breaks, and under random operations held against a naive model."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, Literal, get_args

import pytest

from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown, StorageClosed, StorageFailed, TruncateRefused
from bsfg.fact import Key, Message
from bsfg.frontier import Frontier
from bsfg.ports import Buffer, Confirmation, Receipt, Result, Storage
from bsfg.retention import GapReason
from bsfg.testing.conformance.case import READER, BufferUnderTest, Rig, StorageCase, drain, entries_of, scenario
from bsfg.testing.conformance.writing import rows
from bsfg.testing.facts import batch, key_of, message, messages

MediumFault = Literal["no_space", "sync_fails", "io_error"]


class HeldMediumContract(StorageCase):
    """Nothing is visible before it is durable, shown by a medium that can be made to wait."""

    @abstractmethod
    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        """Make everything that becomes durable wait, without blocking the event loop; give the function to go on."""

    @scenario
    async def test_nothing_is_visible_before_it_is_durable(self, rig: Rig) -> None:
        """While a write waits for the medium no reader sees it, and no repeat of it is answered."""
        for kind in Buffer:
            lane = await rig.lane(kind=kind)
            await lane.write(batch(2))
            release = self.hold_medium(rig.storage)
            try:
                writes = [asyncio.create_task(lane.write(batch(2, first=2))) for _ in range(3)]
                for _ in range(20):
                    await asyncio.sleep(0.001)
                    assert (await lane.stats()).end == 2
                    assert [frame.last for frame in await drain(lane.buffer.replay(0))][-1] == 1
                    assert not await lane.buffer.wait_for(2, 0)
                    if lane.buffer.buffer == Buffer.FORWARD:
                        assert await lane.forward.get(key_of(messages(1, first=2)[0])) is None
                assert not any(write.done() for write in writes)
            finally:
                release()
            results = sorted([int((await write).results[0]) for write in writes])
            assert results == [Result.INSERTED, Result.ALREADY_EXISTS, Result.ALREADY_EXISTS]
            assert await lane.messages() == messages(4)

    @scenario
    async def test_a_writer_that_gives_up_leaves_no_doubt(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A write whose caller is cancelled is there as a whole or not at all, and a repeat settles it."""
        release = self.hold_medium(rig.storage)
        try:
            writing = asyncio.create_task(lane.write(batch(5)))
            await asyncio.sleep(0.001)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        finally:
            release()
        receipt = await lane.write(batch(6))
        assert receipt.offsets.tolist() == [0, 1, 2, 3, 4, 5]
        assert len(set(receipt.results.tolist()[:5])) == 1
        assert await lane.messages() == messages(6)


class BrokenMediumContract(StorageCase):
    """The errors of a medium that breaks; the tests run on the buffer that ``kind`` names."""

    @abstractmethod
    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        """Make the next attempt to make something durable fail, and only that one.

        ``no_space``: the medium is full. ``sync_fails``: all was written, but syncing it fails. ``io_error``: the
        medium does not take the bytes.
        """

    @scenario
    async def test_a_full_disk_stores_nothing(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A write on a full disk leaves nothing, and the storage works again when there is space."""
        await lane.write(batch(3))
        before = await lane.stats()
        self.break_medium(rig.storage, "no_space")
        with pytest.raises(DiskFull):
            await lane.write(batch(4, first=1))
        assert await lane.stats() == before
        assert await lane.messages() == messages(3)
        assert (await lane.write(batch(2, first=3))).offsets.tolist() == [3, 4]
        lane = await rig.reopened()
        assert await lane.messages() == messages(5)

    @scenario
    async def test_a_failed_sync_closes_the_storage(self, rig: Rig, lane: BufferUnderTest) -> None:
        """When a sync fails, those who wait learn that the outcome is unknown, and nothing more is taken."""
        await lane.write(batch(3))
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.write(batch(3, first=3))
        with pytest.raises(StorageClosed):
            await lane.write(batch(3, first=3))
        with pytest.raises(StorageClosed):
            await drain(lane.buffer.replay(0))
        await rig.storage.close()

    @scenario
    async def test_a_repeat_after_a_failed_sync_is_safe(self, rig: Rig, lane: BufferUnderTest) -> None:
        """After reopening, a repeat with the same ids stores what is missing and nothing twice."""
        await lane.write(batch(3))
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.write(batch(5))
        lane = await rig.reopened()
        assert (await lane.messages())[:3] == messages(3)
        receipt = await lane.write(batch(5))
        assert receipt.results.tolist()[:3] == [Result.ALREADY_EXISTS] * 3
        found = {entry.offset: entry.message for entry in await lane.entries()}
        assert [found[offset] for offset in receipt.offsets.tolist()] == messages(5)
        assert len(found) == 5

    @scenario
    async def test_everybody_who_waits_learns_of_a_failed_sync(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Of many writers in a failing sync each has a receipt, or an unknown outcome, or finds the storage closed."""
        await lane.write(batch(1))
        self.break_medium(rig.storage, "sync_fails")
        writes = [lane.write(batch(1, first=number)) for number in range(1, 12)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert any(isinstance(outcome, OutcomeUnknown) for outcome in outcomes)
        lane = await rig.reopened()
        known = await lane.messages()
        for number, outcome in enumerate(outcomes, 1):
            assert isinstance(outcome, (Receipt, OutcomeUnknown, StorageClosed))
            if isinstance(outcome, Receipt):
                assert messages(1, first=number)[0] in known
        await lane.write(batch(12))
        assert len(await lane.entries()) == 12

    @scenario
    async def test_an_input_output_error_loses_nothing_acknowledged(self, rig: Rig, lane: BufferUnderTest) -> None:
        """An input/output error is reported, what was acknowledged stays, and a repeat after reopening is safe."""
        await lane.write(batch(3))
        self.break_medium(rig.storage, "io_error")
        with pytest.raises(StorageFailed):
            await lane.write(batch(3, first=3))
        lane = await rig.reopened()
        assert (await lane.messages())[:3] == messages(3)
        await lane.write(batch(6))
        assert sorted(str(one) for one in await lane.messages()) == sorted(str(one) for one in messages(6))

    @scenario
    async def test_a_full_disk_moves_no_cursor(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A confirmation that cannot be made durable is refused and changes nothing; it can be repeated."""
        await lane.write(batch(5))
        await lane.create_reader()
        await lane.confirm(1)
        self.break_medium(rig.storage, "no_space")
        with pytest.raises(DiskFull):
            await lane.confirm(3)
        assert (await rig.storage.cursors.checkpoint(READER)).committed == 1
        assert (await lane.confirm(3)).committed == 3
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint(READER)).committed == 3

    @scenario
    async def test_a_failed_sync_of_a_cursor_is_repeatable(self, rig: Rig, lane: BufferUnderTest) -> None:
        """After a failed sync a cursor stands where it stood or where it was moved to, and the repeat moves it."""
        await lane.write(batch(5))
        await lane.create_reader()
        await lane.confirm(1)
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.confirm(3)
        with pytest.raises(StorageClosed):
            await lane.confirm(3)
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint(READER)).committed in (1, 3)
        assert (await storage.cursors.commit(READER, Confirmation(through=3))).committed == 3

    @scenario
    async def test_errors_are_of_one_family(self, rig: Rig) -> None:
        """Whatever breaks, the error has a code, a retry verdict and a hint."""
        for fault in get_args(MediumFault):
            await rig.open()
            lane = await rig.lane()
            self.break_medium(rig.storage, fault)
            with pytest.raises(BsfgError) as caught:
                await lane.write(batch(1))
            assert caught.value.code and caught.value.hint


@dataclass(slots=True)
class BufferModel:
    """One buffer with one required consumer: a list of messages and what is confirmed of it."""

    entries: list[Message] = field(default_factory=list)
    start: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    refused: list[Message] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The offset that the next entry gets."""
        return len(self.entries)

    def write(self, facts: list[Message]) -> list[tuple[int, int]]:
        """Give the result and the offset of each fact, and keep the new ones."""
        return [self._write_one(fact) for fact in facts]

    def _write_one(self, fact: Message) -> tuple[int, int]:
        offset = self.offset_of(key_of(fact))
        if offset is None:
            self.entries.append(fact)
            return int(Result.INSERTED), self.end - 1
        if self.entries[offset].fact == fact.fact:
            return int(Result.ALREADY_EXISTS), offset
        if fact not in self.refused:
            self.refused.append(fact)
        return int(Result.CONFLICT), offset

    def offset_of(self, key: Key) -> int | None:
        """Find a key the slow way."""
        return next((offset for offset, fact in enumerate(self.entries) if key_of(fact) == key), None)

    def may_truncate(self, offset: int) -> bool:
        """Tell whether a truncation is allowed."""
        return offset <= max(self.start, self.frontier.committed + 1)

    def retained(self, key: Key) -> Message | None:
        """Give the message of a key if it was not truncated."""
        offset = self.offset_of(key)
        return None if offset is None or offset < self.start else self.entries[offset]


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
        self.lane: BufferUnderTest
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
