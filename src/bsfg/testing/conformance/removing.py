"""What removing promises: truncation behind the frontier, retention, expiry, and offsets that are never reused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bsfg.errors import InvalidArgument, TruncateRefused
from bsfg.ports import Confirmation, ConsumerSpec, Result, StartAt
from bsfg.retention import GapReason, Policy
from bsfg.testing.conformance.case import Lane, Rig, StorageCase, scenario
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
    async def test_a_consumer_at_the_end_confirms_nothing_it_was_not_given(self, rig: Rig) -> None:
        """A consumer that begins at the latest entry does not hold older ones back."""
        lane = await rig.lane()
        await lane.write(batch(4))
        buffer = lane.buffer
        await lane.storage.cursors.create(ConsumerSpec("late", buffer.stream, buffer.buffer, StartAt.LATEST))
        await lane.write(batch(2, first=4))
        with pytest.raises(TruncateRefused):
            await buffer.truncate_before(5)
        await buffer.truncate_before(4)

    async def _confirmed(self, rig: Rig, count: int, *, through: int | None = None) -> Lane:
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

    async def _written(self, rig: Rig, policy: Policy, *, through: int = -1) -> Lane:
        """Write six facts and confirm some of them."""
        lane = await rig.lane(policy)
        await lane.create_reader()
        await lane.write(batch(6))
        await lane.confirm(through)
        return lane
