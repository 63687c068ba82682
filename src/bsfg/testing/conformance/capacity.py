"""What a limited buffer promises: full means refused or recorded, never silent."""

from __future__ import annotations

from typing import ClassVar

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import BufferFull
from bsfg.ports import Result
from bsfg.retention import Fill, GapReason, Overflow, Policy
from bsfg.testing.conformance.case import Lane, Rig, StorageCase, entries_of, scenario
from bsfg.testing.facts import batch, messages

FACTS_PER_WRITE = 20
OBJECT_BYTES = 1_000


class CapacityContract(StorageCase):
    """Capacity in bytes under both overflow policies; the tests run on the buffer that ``kind`` names.

    ``capacity_bytes`` should be a few times what the storage removes at once, and at least 200 kB.
    """

    capacity_bytes: ClassVar[int] = 1 << 20

    @scenario
    async def test_a_full_buffer_rejects_new_facts(self, rig: Rig) -> None:
        """When nothing may leave, a write that does not fit is refused as a whole and the buffer stays as it was."""
        lane = await self._lane(rig, Overflow.REJECT_NEW)
        stored = await self._fill(lane)
        before = await lane.stats()
        assert 0 < before.used_bytes <= self.capacity_bytes
        with pytest.raises(BufferFull):
            await lane.write(self._batch(stored))
        assert await lane.stats() == before
        async for lane in rig.across_restart(self._policy(Overflow.REJECT_NEW)):
            assert (await lane.stats()).end == stored
            assert [entry.offset for entry in await lane.entries()] == list(range(stored))
            assert await lane.gaps() == []

    @scenario
    async def test_a_full_buffer_still_knows_repeats(self, rig: Rig) -> None:
        """A retry of what is stored needs no room, even when the capacity was lowered below what is used."""
        lane = await self._lane(rig, Overflow.REJECT_NEW)
        await self._fill(lane)
        lowered = Policy(capacity_bytes=self.capacity_bytes // 2)
        async for lane in rig.across_restart(lowered):
            receipt = await lane.write(self._batch(0))
            assert receipt.count(Result.ALREADY_EXISTS) == FACTS_PER_WRITE

    @scenario
    async def test_room_comes_back_with_confirmation(self, rig: Rig) -> None:
        """A full buffer takes facts again once what it holds is confirmed and truncated."""
        lane = await self._lane(rig, Overflow.REJECT_NEW)
        stored = await self._fill(lane)
        await lane.confirm()
        await lane.buffer.truncate_before(stored)
        receipt = await lane.write(self._batch(stored))
        assert receipt.offsets.tolist() == list(range(stored, stored + FACTS_PER_WRITE))

    @scenario
    async def test_confirmed_facts_leave_early_when_room_is_needed(self, rig: Rig) -> None:
        """Nobody waits for what is confirmed, so it makes room before anything is refused, without a gap record."""
        lane = await self._lane(rig, Overflow.REJECT_NEW)
        stored = await self._fill(lane)
        await lane.confirm()
        await lane.write(self._batch(stored))
        stats = await lane.stats()
        assert stats.used_bytes <= self.capacity_bytes
        assert (stats.start > 0, stats.end) == (True, stored + FACTS_PER_WRITE)
        assert await lane.gaps() == []

    @scenario
    async def test_a_batch_larger_than_the_buffer_is_refused(self, rig: Rig) -> None:
        """A batch that can never fit is refused under both policies, and nothing is dropped for it."""
        for overflow in Overflow:
            await rig.open()
            lane = await self._lane(rig, overflow)
            await lane.write(self._batch(0))
            with pytest.raises(BufferFull):
                await lane.write(batch(30, first=1_000, object_bytes=self.capacity_bytes // 20))
            assert await lane.messages() == messages(FACTS_PER_WRITE, object_bytes=OBJECT_BYTES)

    @scenario
    async def test_dropping_the_oldest_keeps_the_newest_and_records_the_rest(self, rig: Rig) -> None:
        """A buffer that drops its oldest facts takes every new one and has a gap record for each that left."""
        policy = self._policy(Overflow.DROP_OLDEST)
        lane = await self._lane(rig, Overflow.DROP_OLDEST)
        end = 0
        while end * OBJECT_BYTES < 3 * self.capacity_bytes:
            receipt = await lane.write(self._batch(end))
            assert receipt.offsets.tolist() == list(range(end, end + FACTS_PER_WRITE))
            end += FACTS_PER_WRITE
            assert (await lane.stats()).used_bytes <= self.capacity_bytes
        async for lane in rig.across_restart(policy):
            await self._check_evicted(lane, end)

    async def _check_evicted(self, lane: Lane, end: int) -> None:
        frames = await lane.frames()
        start = (await lane.stats()).start
        assert 0 < start <= end - FACTS_PER_WRITE
        expected = messages(end - start, first=start, object_bytes=OBJECT_BYTES)
        assert [entry.message for entry in entries_of(frames)] == expected
        assert {frame.gap.reason for frame in frames if frame.gap} == {GapReason.EVICTED}
        covered: set[int] = set()
        for gap in await lane.gaps():
            assert gap.reason == GapReason.EVICTED
            covered.update(range(gap.first, gap.last + 1))
        assert covered == set(range(start))

    @scenario
    async def test_only_the_unconfirmed_are_recorded_as_evicted(self, rig: Rig) -> None:
        """What leaves for room after it was confirmed is truncated; only the rest is an eviction."""
        lane = await self._lane(rig, Overflow.DROP_OLDEST)
        await lane.write(self._batch(0))
        await lane.confirm(9)
        end = FACTS_PER_WRITE
        while (await lane.stats()).start < FACTS_PER_WRITE:
            await lane.write(self._batch(end))
            end += FACTS_PER_WRITE
        frames = await lane.frames(0, end=FACTS_PER_WRITE)
        reasons = [frame.gap.reason for frame in frames if frame.gap for _ in range(frame.first, frame.last + 1)]
        assert reasons == [GapReason.TRUNCATED] * 10 + [GapReason.EVICTED] * 10
        assert min(gap.first for gap in await lane.gaps()) == 10

    @scenario
    async def test_evicted_facts_are_still_known(self, rig: Rig) -> None:
        """What was evicted is answered as a repeat, as long as its key is kept."""
        lane = await self._lane(rig, Overflow.DROP_OLDEST)
        end = 0
        while (await lane.stats()).start < FACTS_PER_WRITE:
            await lane.write(self._batch(end))
            end += FACTS_PER_WRITE
        receipt = await lane.write(self._batch(0))
        assert receipt.count(Result.ALREADY_EXISTS) == FACTS_PER_WRITE
        assert receipt.offsets.tolist() == list(range(FACTS_PER_WRITE))

    @scenario
    async def test_a_reader_that_is_overtaken_by_evictions_sees_every_offset(self, rig: Rig) -> None:
        """A reader slower than the writer gets each offset once, in order, as an entry or as an eviction."""
        lane = await self._lane(rig, Overflow.DROP_OLDEST)
        at = end = 0
        while end * OBJECT_BYTES < 3 * self.capacity_bytes:
            for _ in range(4):
                await lane.write(self._batch(end))
                end += FACTS_PER_WRITE
            frames = await lane.frames(at, end=at + FACTS_PER_WRITE)
            for frame in frames:
                assert frame.gap is None or frame.gap.reason == GapReason.EVICTED
            at = frames[-1].last + 1
        assert (await lane.stats()).start > at

    @scenario
    async def test_the_fill_is_told(self, rig: Rig) -> None:
        """The fill in percent and its verdict follow what is used."""
        lane = await self._lane(rig, Overflow.REJECT_NEW)
        empty = await lane.stats()
        assert (empty.fill, empty.capacity_bytes) == (Fill.HEALTHY, self.capacity_bytes)
        await self._fill(lane)
        full = await lane.stats()
        assert full.fill == Fill.ALERT
        assert full.fill_percent == pytest.approx(100 * full.used_bytes / self.capacity_bytes)

    def _policy(self, overflow: Overflow) -> Policy:
        return Policy(capacity_bytes=self.capacity_bytes, overflow=overflow)

    async def _lane(self, rig: Rig, overflow: Overflow) -> Lane:
        """Open a small buffer with a required consumer that has read nothing."""
        lane = await rig.lane(self._policy(overflow))
        await lane.create_reader()
        return lane

    def _batch(self, first: int) -> FactBatch:
        return batch(FACTS_PER_WRITE, first=first, object_bytes=OBJECT_BYTES)

    async def _fill(self, lane: Lane) -> int:
        """Write until the buffer is full and give the number of facts in it."""
        stored = 0
        for _ in range(4 * self.capacity_bytes // (FACTS_PER_WRITE * OBJECT_BYTES)):
            try:
                await lane.write(self._batch(stored))
            except BufferFull:
                return stored
            stored += FACTS_PER_WRITE
        raise AssertionError("the buffer took four times its capacity")
