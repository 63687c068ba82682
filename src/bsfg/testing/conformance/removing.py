"""What removing and limits promise: truncation, retention, expiry; full means refused or recorded, never silent."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import BufferFull, InvalidArgument, TruncateRefused
from bsfg.ports import Confirmation, ConsumerSpec, Result, StartAt
from bsfg.retention import Fill, GapReason, Overflow, Policy
from bsfg.testing.conformance.case import BufferUnderTest, Rig, StorageCase, entries_of, scenario
from bsfg.testing.facts import batch, messages

AGEING = Policy(retention_seconds=100, max_age_seconds=1_000, key_horizon_seconds=100_000)


class TruncationContract(StorageCase):
    """Removing what is confirmed; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_truncation_removes_exactly_what_is_below(self, rig: Rig) -> None:
        """Everything below the offset is gone, everything from it on stays, across a restart too."""
        lane = await self._confirmed(rig, 10)
        for offset in (1, 5, 10):
            await lane.buffer.truncate_before(offset)
            assert await lane.messages() == messages(10)[offset:]
            lane = await rig.reopened()
            assert await lane.messages() == messages(10)[offset:]
            stats = await lane.stats()
            assert (stats.start, stats.end) == (offset, 10)

    @scenario
    async def test_truncation_repeated_is_harmless(self, rig: Rig) -> None:
        """The same truncation again, or one further back, changes nothing."""
        lane = await self._confirmed(rig, 10)
        await lane.buffer.truncate_before(6)
        for offset in (6, 3, 0):
            await lane.buffer.truncate_before(offset)
            assert (await lane.stats()).start == 6
        with pytest.raises(InvalidArgument):
            await lane.buffer.truncate_before(-1)

    @scenario
    async def test_what_was_truncated_is_judged_as_before(self, rig: Rig) -> None:
        """A repeat of a truncated fact is one, another body under its id a conflict, and none of them is undecided."""
        lane = await self._confirmed(rig, 10)
        await lane.buffer.truncate_before(6)
        other = [replace(each, fact=replace(each.fact, predicate="seen_later")) for each in messages(10)]
        for _ in range(2):
            repeated = await lane.write(batch(10))
            assert (repeated.count(Result.ALREADY_EXISTS), repeated.undecided) == (10, ())
            contradicting = await lane.write_messages(other)
            assert (contradicting.count(Result.CONFLICT), contradicting.undecided) == (10, ())
            lane = await rig.reopened()

    @scenario
    async def test_truncation_past_the_frontier_is_refused(self, rig: Rig) -> None:
        """Only what every required consumer has confirmed may go; a refusal removes nothing."""
        lane = await self._confirmed(rig, 10, through=5)
        await lane.create_reader("slow")
        await lane.confirm(3, name="slow")
        await lane.create_reader("optional", required=False)
        for offset in (5, 6, 10):
            with pytest.raises(TruncateRefused):
                await lane.buffer.truncate_before(offset)
        assert await lane.messages() == messages(10)
        await lane.buffer.truncate_before(4)
        lane = await rig.reopened()
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(5)
        assert (await lane.stats()).start == 4

    @scenario
    async def test_truncation_beyond_the_end_is_refused(self, rig: Rig) -> None:
        """What does not exist yet cannot be truncated."""
        lane = await self._confirmed(rig, 3)
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(4)
        await lane.buffer.truncate_before(3)

    @scenario
    async def test_islands_do_not_free_what_is_missing(self, rig: Rig) -> None:
        """Ranges confirmed out of order free nothing before the gap below them is closed."""
        lane = await self._confirmed(rig, 10, through=1)
        await lane.storage.cursors.commit("reader", Confirmation(ranges=[(4, 9)]))
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(3)
        await lane.storage.cursors.commit("reader", Confirmation(ranges=[(2, 3)]))
        await lane.buffer.truncate_before(10)

    @scenario
    async def test_offsets_are_never_reused(self, rig: Rig) -> None:
        """After everything was truncated, and after restarts, new facts continue where the old ones ended."""
        lane = await self._confirmed(rig, 5)
        await lane.buffer.truncate_before(5)
        receipt = await lane.write(batch(1, first=5))
        assert receipt.offsets.tolist() == [5]
        await lane.confirm()
        await lane.buffer.truncate_before(6)
        await rig.reopen()
        lane = await rig.reopened()
        stats = await lane.stats()
        assert (stats.start, stats.end) == (6, 6)
        assert (await lane.write(batch(2, first=6))).offsets.tolist() == [6, 7]

    @scenario
    async def test_truncation_leaves_no_gap_record(self, rig: Rig) -> None:
        """What left after it was confirmed is no loss and is not listed as one."""
        lane = await self._confirmed(rig, 5)
        await lane.buffer.truncate_before(4)
        assert await lane.gaps() == []
        assert await (await rig.reopened()).gaps() == []

    @scenario
    async def test_a_consumer_at_the_end_confirms_nothing_it_was_not_given(self, lane: BufferUnderTest) -> None:
        """A consumer that begins at the latest entry does not hold older ones back."""
        await lane.write(batch(4))
        buffer = lane.buffer
        await lane.storage.cursors.create(ConsumerSpec("late", buffer.stream, buffer.buffer, StartAt.LATEST))
        await lane.write(batch(2, first=4))
        with pytest.raises(TruncateRefused):
            await buffer.truncate_before(5)
        await buffer.truncate_before(4)

    async def _confirmed(self, rig: Rig, count: int, *, through: int | None = None) -> BufferUnderTest:
        lane = await rig.lane()
        await lane.write(batch(count))
        await lane.create_reader()
        await lane.confirm(through)
        return lane


class RetentionContract(StorageCase):
    """Removing by age; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_confirmed_entries_stay_for_the_retention(self, rig: Rig) -> None:
        """What is confirmed stays until it is as old as the retention, then it goes without a gap record."""
        lane = await self._written(rig, AGEING, through=5)
        rig.clock.advance(99)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 0
        rig.clock.advance(2)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 6
        lane = await rig.reopened(AGEING)
        assert (await lane.stats()).start == 6
        assert await lane.gaps() == []

    @scenario
    async def test_young_entries_stay(self, rig: Rig) -> None:
        """Retention never removes an entry that is younger, however old its neighbours are."""
        lane = await self._written(rig, AGEING, through=5)
        rig.clock.advance(90)
        await lane.write(batch(4, first=6))
        await lane.confirm()
        rig.clock.advance(50)
        await lane.buffer.enforce_retention(link_open=True)
        assert [entry.offset for entry in await lane.entries()][-4:] == [6, 7, 8, 9]

    @scenario
    async def test_nothing_confirmed_goes_while_the_link_is_closed(self, rig: Rig) -> None:
        """While the link is autonomous nothing that was confirmed is removed, however old."""
        lane = await self._written(rig, AGEING, through=5)
        rig.clock.advance(5_000)
        await lane.buffer.enforce_retention(link_open=False)
        assert (await lane.stats()).start == 0

    @scenario
    async def test_unconfirmed_entries_outlive_the_retention(self, rig: Rig) -> None:
        """What is not confirmed stays until it is older than the max age."""
        lane = await self._written(rig, AGEING)
        rig.clock.advance(999)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 0

    @scenario
    async def test_expired_entries_leave_a_gap_record(self, rig: Rig) -> None:
        """What expires unconfirmed is recorded durably, and a replay says so; new facts continue after it."""
        lane = await self._written(rig, AGEING)
        rig.clock.advance(1_001)
        await lane.buffer.enforce_retention(link_open=False)
        async for lane in rig.across_restart(AGEING):
            assert (await lane.stats()).start == 6
            gaps = await lane.gaps()
            assert [(gap.first, gap.last, gap.reason) for gap in gaps] == [(0, 5, GapReason.EXPIRED)]
            assert gaps[0].at_unix_ms == rig.clock.now_unix_ms()
            assert {frame.gap.reason for frame in await lane.frames() if frame.gap} == {GapReason.EXPIRED}
        assert (await lane.write(batch(1, first=6))).offsets.tolist() == [6]

    @scenario
    async def test_the_frontier_passes_what_expired_only_by_confirmation(self, rig: Rig) -> None:
        """Expiry confirms nothing by itself: the consumer passes the gap when it confirms it."""
        lane = await self._written(rig, AGEING)
        rig.clock.advance(1_001)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.storage.cursors.checkpoint("reader")).committed == -1
        assert (await lane.confirm(5)).committed == 5

    @scenario
    async def test_safety_streams_never_expire(self, rig: Rig) -> None:
        """On a stream of a safety function nothing unconfirmed ever expires."""
        policy = Policy(safety="sil", retention_seconds=100, max_age_seconds=1_000, key_horizon_seconds=100_000)
        lane = await self._written(rig, policy)
        rig.clock.advance(50_000)
        await lane.buffer.enforce_retention(link_open=True)
        assert await lane.messages() == messages(6)
        assert await lane.gaps() == []
        await lane.confirm()
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 6

    @scenario
    async def test_a_clock_that_jumps_forward_suspends_expiry(self, rig: Rig) -> None:
        """A wall clock that jumps ahead of the monotonic one removes nothing until it is right again."""
        lane = await self._written(rig, AGEING, through=2)
        await lane.buffer.enforce_retention(link_open=True)
        rig.clock.jump(1_000_000)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 0
        assert await lane.gaps() == []
        rig.clock.jump(-1_000_000)
        rig.clock.advance(1_001)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 6

    @scenario
    async def test_a_clock_that_jumps_before_the_first_look_expires_nothing(self, rig: Rig) -> None:
        """A jump counts from the opening of the buffer, as it does for the times of entries, not from a first look."""
        lane = await self._written(rig, AGEING, through=2)
        rig.clock.jump(1_000_000)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 0
        assert await lane.gaps() == []

    @scenario
    async def test_keys_stay_for_the_horizon(self, rig: Rig) -> None:
        """A fact that aged out is still known as a repeat until the key horizon, also after a restart."""
        lane = await self._written(rig, AGEING, through=5)
        rig.clock.advance(50_000)
        await lane.buffer.enforce_retention(link_open=True)
        rig.clock.advance(40_000)
        await lane.buffer.enforce_retention(link_open=True)
        async for lane in rig.across_restart(AGEING):
            receipt = await lane.write(batch(6))
            assert receipt.count(Result.ALREADY_EXISTS) == 6
            assert receipt.offsets.tolist() == list(range(6))

    @scenario
    async def test_the_horizon_may_stand_still(self, rig: Rig) -> None:
        """Keys are forgotten by their age at the moment that the horizon counts back from, however late it is."""
        lane = await self._written(rig, AGEING, through=5)
        in_step = rig.clock.now_unix_ms() + 50_000 * 1000
        rig.clock.advance(10_000_000)
        await lane.buffer.enforce_retention(link_open=True, keys_as_of_unix_ms=in_step)
        async for lane in rig.across_restart(AGEING):
            assert (await lane.stats()).start == 6
            assert (await lane.write(batch(6))).count(Result.ALREADY_EXISTS) == 6
            await lane.buffer.enforce_retention(link_open=True, keys_as_of_unix_ms=in_step)
        await lane.buffer.enforce_retention(link_open=True, keys_as_of_unix_ms=in_step + 50_001 * 1000)
        assert (await lane.write(batch(6))).count(Result.INSERTED) == 6

    @scenario
    async def test_a_key_below_the_horizon_is_no_key(self, rig: Rig) -> None:
        """An id that was used before the key horizon is free: a new fact is stored, whatever its body, and known."""
        lane = await self._written(rig, AGEING)
        for first in range(6, 1_206, 50):
            await lane.write(batch(50, first=first))
        await lane.confirm()
        rig.clock.advance(50_000)
        await lane.buffer.enforce_retention(link_open=True)
        await lane.write(batch(2, first=1_206))
        rig.clock.advance(100_001)
        await lane.buffer.enforce_retention(link_open=True)
        other = [replace(each, fact=replace(each.fact, predicate="seen_later")) for each in messages(30, first=30)]
        again = batch(60)
        async for lane in rig.across_restart(AGEING):
            if (await lane.stats()).end == 1_208:
                assert (await lane.write(batch(30))).count(Result.INSERTED) == 30
                assert (await lane.write_messages(other)).count(Result.INSERTED) == 30
            receipt = await lane.write(again)
            assert receipt.offsets.tolist() == list(range(1_208, 1_268))
            assert receipt.results.tolist() == [Result.ALREADY_EXISTS] * 30 + [Result.CONFLICT] * 30
        assert (await lane.messages())[-60:] == [*messages(30), *other]

    async def _written(self, rig: Rig, policy: Policy, *, through: int = -1) -> BufferUnderTest:
        """Write six facts and confirm some of them."""
        lane = await rig.lane(policy)
        await lane.create_reader()
        await lane.write(batch(6))
        await lane.confirm(through)
        return lane


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

    async def _check_evicted(self, lane: BufferUnderTest, end: int) -> None:
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

    async def _lane(self, rig: Rig, overflow: Overflow) -> BufferUnderTest:
        """Open a small buffer with a required consumer that has read nothing."""
        lane = await rig.lane(self._policy(overflow))
        await lane.create_reader()
        return lane

    def _batch(self, first: int) -> FactBatch:
        return batch(FACTS_PER_WRITE, first=first, object_bytes=OBJECT_BYTES)

    async def _fill(self, lane: BufferUnderTest) -> int:
        """Write until the buffer is full and give the number of facts in it."""
        stored = 0
        for _ in range(4 * self.capacity_bytes // (FACTS_PER_WRITE * OBJECT_BYTES)):
            try:
                await lane.write(self._batch(stored))
            except BufferFull:
                return stored
            stored += FACTS_PER_WRITE
        raise AssertionError("the buffer took four times its capacity")
