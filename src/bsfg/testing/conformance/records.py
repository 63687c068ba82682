"""What gap records and quarantine promise: durable, listed, never doubled."""

from __future__ import annotations

from random import Random

import pytest

from bsfg import gapbook
from bsfg.errors import GapsFull, InvalidArgument, OffsetOutOfRange, QuarantineFull
from bsfg.gaps import RELAYED_RANGES_MAX, RangeSet
from bsfg.ports import GapRecord, GapSet, Result
from bsfg.retention import GapReason, Policy
from bsfg.testing.conformance.case import BufferUnderTest, Rig, StorageCase, origin, scenario
from bsfg.testing.facts import WeakHasher, batch, message, messages


class RecordsContract(StorageCase):
    """Gap records and quarantine; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_gap_records_are_kept_in_order(self, rig: Rig) -> None:
        """Gap records come back as they were recorded, oldest first, also after a restart."""
        lane = await rig.lane()
        await lane.write(batch(10))
        records = [
            GapRecord(4, 6, GapReason.SKIPPED, 1_000, "not for this zone"),
            GapRecord(0, 1, GapReason.QUARANTINED, 2_000),
            GapRecord(100, 250, GapReason.EXPIRED, 3_000, "late", "field"),
        ]
        for record in records:
            await lane.buffer.record_gaps([record])
        async for lane in rig.across_restart():
            assert await lane.gaps() == records
            assert (await lane.stats()).gaps == 3

    @scenario
    async def test_a_gap_record_is_not_repeated(self, rig: Rig, lane: BufferUnderTest) -> None:
        """The same range, reason, detail and origin is recorded once; with any of them changed it is another record."""
        await lane.write(batch(10))
        first = GapRecord(2, 3, GapReason.SKIPPED, 1_000, "first")
        again = GapRecord(2, 3, GapReason.SKIPPED, 2_000, "first")
        others = [
            GapRecord(2, 3, GapReason.SKIPPED, 1_000, "second"),
            GapRecord(2, 3, GapReason.SKIPPED, 1_000, "", "field"),
            GapRecord(2, 3, GapReason.LOST, 1_000),
            GapRecord(2, 4, GapReason.SKIPPED, 1_000),
        ]
        for record in (first, again, *others):
            await lane.buffer.record_gaps([record])
        lane = await rig.reopened()
        await lane.buffer.record_gaps([again])
        assert await lane.gaps() == [first, *others]

    @scenario
    async def test_neighbouring_gap_records_become_one(self, rig: Rig) -> None:
        """Ranges of one kind that overlap or adjoin are one range with the latest time, after a restart too."""
        lane = await rig.lane()
        await lane.write(batch(10))
        for first, last, at_unix_ms in ((0, 1, 1_000), (4, 6, 2_000), (2, 2, 3_000), (5, 8, 4_000), (5, 5, 5_000)):
            await lane.buffer.record_gaps([GapRecord(first, last, GapReason.EXPIRED, at_unix_ms, "late", "field")])
        expected = [
            GapRecord(0, 2, GapReason.EXPIRED, 3_000, "late", "field"),
            GapRecord(4, 8, GapReason.EXPIRED, 4_000, "late", "field"),
        ]
        async for lane in rig.across_restart():
            assert await lane.gaps() == expected
            (found,) = await lane.buffer.gap_sets()
            assert (found.kind, found.since_unix_ms) == ((GapReason.EXPIRED, "late", "field"), 1_000)
            assert (found.ranges.offsets, (await lane.stats()).gaps) == (8, 2)

    @scenario
    async def test_thousands_of_ranges_are_recorded_at_once(self, rig: Rig) -> None:
        """A set of ranges is recorded as a whole, and what another zone told is told on in bounded parts."""
        lane = await rig.lane()
        pairs = [(offset, offset) for offset in range(1, 6_000, 2)]
        gaps = GapSet(GapReason.SKIPPED, RangeSet.of(pairs, 1_000), "not for this zone", "field", 1_000)
        await lane.buffer.record_gaps([gaps])
        await lane.buffer.record_gaps([gaps, GapRecord(9, 9, GapReason.SKIPPED, 2_000, "not for this zone", "field")])
        async for lane in rig.across_restart():
            assert await lane.buffer.gap_sets() == [gaps]
            told: list[GapSet] = []
            token = ""
            while (answer := await lane.buffer.gaps_told(token))[0]:
                assert sum(len(each.ranges) for each in answer[0]) <= RELAYED_RANGES_MAX
                told, token = [*told, *answer[0]], answer[1]
            assert [(gap.first, gap.last) for each in told for gap in each.records()] == pairs
        await lane.buffer.record_gaps([GapRecord(8_000, 8_001, GapReason.EVICTED, 2_000, "", "field")])
        (after,), _ = await lane.buffer.gaps_told(token)
        assert [(gap.first, gap.last, gap.reason) for gap in after.records()] == [(8_000, 8_001, GapReason.EVICTED)]

    @scenario
    async def test_gap_records_of_others_are_bounded(self, rig: Rig) -> None:
        """What others tell beyond the capacity is refused as a whole; the node's own records always have room."""
        lane = await rig.lane()
        await lane.write(batch(9))
        told = [GapRecord(at, at, GapReason.EVICTED, 1_000, "", "field") for at in range(0, 10, 2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gapbook, "TOLD_RANGES_MAX", 5)
            await lane.buffer.record_gaps(told)
            with pytest.raises(GapsFull):
                await lane.buffer.record_gaps(
                    [GapRecord(at, at, GapReason.EVICTED, 2_000, "", "field") for at in (4, 90)]
                )
            await lane.buffer.record_gaps([GapRecord(3, 4, GapReason.DAMAGED, 3_000)])
            assert (await lane.stats()).gaps_full
            async for lane in rig.across_restart():
                assert len(await lane.gaps()) == 6

    @scenario
    async def test_what_links_leave_out_is_folded(self, rig: Rig) -> None:
        """A link that leaves out every other fact goes on: records stay few, and how many were left out stays exact."""
        lane = await rig.lane()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gapbook, "SKIPPED_RANGES_MAX", 100)
            patch.setattr(gapbook, "FOLD_SHIFT", 6)
            for first in range(0, 6_000, 20):
                pairs = [(offset, offset) for offset in range(first, first + 20, 2)]
                skips = GapSet(GapReason.SKIPPED, RangeSet.of(pairs, first), "not carried", "field", first)
                await lane.buffer.record_gaps([skips])
            async for lane in rig.across_restart():
                (found,) = await lane.buffer.gap_sets()
                assert (await lane.stats()).gaps == len(found.ranges) <= 100
                assert found.ranges.offsets == sum(gap.offsets for gap in await lane.gaps()) == 3_000
                assert not found.ranges.within(5_900, 5_999).folded.any()
                assert not (await lane.stats()).gaps_full

    @scenario
    async def test_impossible_gap_records_are_refused(self, lane: BufferUnderTest) -> None:
        """A gap record must name a range, and one of this buffer must lie below its end."""
        await lane.write(batch(3))
        for first, last, count in ((-1, 1, None), (2, 1, None), (0, 1, 3), (0, 1, 0)):
            with pytest.raises(InvalidArgument):
                await lane.buffer.record_gaps([GapRecord(first, last, GapReason.LOST, 0, count=count)])
        with pytest.raises(OffsetOutOfRange):
            await lane.buffer.record_gaps([GapRecord(2, 3, GapReason.LOST, 0)])
        assert await lane.gaps() == []

    @scenario
    async def test_retained_entries_are_given_whatever_gap_records_say(self, lane: BufferUnderTest) -> None:
        """A gap record about entries that are there, or about another zone's offsets, hides none of them."""
        await lane.write(batch(5))
        await lane.buffer.record_gaps([GapRecord(1, 2, GapReason.SKIPPED, 0)])
        await lane.buffer.record_gaps([GapRecord(0, 4, GapReason.LOST, 0, "", "field")])
        assert await lane.messages() == messages(5)
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(3)
        assert {frame.gap.reason for frame in await lane.frames() if frame.gap} <= {
            GapReason.TRUNCATED,
            GapReason.SKIPPED,
        }

    @scenario
    async def test_quarantine_is_empty_at_first(self, lane: BufferUnderTest) -> None:
        """Inserts and repeats put nothing aside."""
        await lane.write(batch(3))
        await lane.write(batch(3))
        assert await lane.buffer.quarantine() == []
        assert (await lane.stats()).quarantined == 0

    @scenario
    async def test_a_refused_fact_is_kept_aside_once(self, rig: Rig) -> None:
        """A refused fact that is sent again, as after a crash, is not put aside twice; another one is."""
        hasher = WeakHasher()
        await rig.open(hasher=hasher)
        lane = await rig.lane()
        await lane.write_messages([message("a", 11)], hasher=hasher)
        rig.clock.advance(7)
        at_unix_ms = rig.clock.now_unix_ms()
        for value in (12, 12, 13):
            await lane.write_messages([message("a", value), message("a", value)], hasher=hasher)
        rig.clock.advance(7)
        lane = await rig.reopened()
        await lane.write_messages([message("a", 12)], hasher=hasher)
        aside = await lane.buffer.quarantine()
        assert [one.facts.to_messages() for one in aside] == [[message("a", 12)], [message("a", 13)]]
        assert [(one.key, one.at_unix_ms, one.existing_offset) for one in aside] == [
            (("plant", "a"), at_unix_ms, 0)
        ] * 2
        assert (await lane.stats()).quarantined == 2

    @scenario
    async def test_quarantined_facts_are_released_one_by_one(self, rig: Rig) -> None:
        """A released fact is gone for good, the others stay, and their ids are never given again."""
        hasher = WeakHasher()
        await rig.open(hasher=hasher)
        lane = await rig.lane()
        await lane.write_messages([message("a", 11)], hasher=hasher)
        await lane.write_messages([message("a", value) for value in (12, 13, 14)], hasher=hasher)
        first, second, third = [one.id for one in await lane.buffer.quarantine()]
        assert first < second < third
        await lane.buffer.release_quarantined(third, "inspected")
        await lane.buffer.release_quarantined(first, "inspected")
        lane = await rig.reopened()
        assert [one.id for one in await lane.buffer.quarantine()] == [second]
        with pytest.raises(InvalidArgument):
            await lane.buffer.release_quarantined(first, "again")
        for reason in ("", "inspected\x00"):
            with pytest.raises(InvalidArgument):
                await lane.buffer.release_quarantined(second, reason)
        for value in (15, 16):
            await lane.write_messages([message("a", value)], hasher=hasher)
        kept, *new = [one.id for one in await lane.buffer.quarantine()]
        assert kept == second
        assert third < new[0] < new[1]


class SetsAsideContract(StorageCase):
    """Facts that were never put can be kept aside; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_facts_are_set_aside_once_per_reason(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Facts set aside are listed with reason and detail, once per reason, also after a restart."""
        await lane.buffer.set_aside(batch(2), "fact_expired", "two days late")
        lane = await rig.reopened()
        await lane.buffer.set_aside(batch(3), "fact_expired", "three days late")
        await lane.buffer.set_aside(batch(1), "zone_not_allowed")
        aside = await lane.buffer.quarantine()
        assert [one.reason for one in aside] == ["fact_expired"] * 3 + ["zone_not_allowed"]
        assert [one.detail for one in aside] == ["two days late"] * 2 + ["three days late", ""]
        assert [one.facts.to_messages()[0] for one in aside] == [*messages(3), *messages(1)]
        assert (await lane.stats()).end == 0

    @scenario
    async def test_facts_set_aside_keep_their_origin(self, rig: Rig) -> None:
        """Each fact set aside knows where it came from, when that was said, after a restart too."""
        lane = await rig.lane()
        await lane.buffer.set_aside(batch(2), "fact_expired", origin=origin(2, first=7))
        await lane.buffer.set_aside(batch(1), "zone_not_allowed")
        async for lane in rig.across_restart():
            found = [one.origin for one in await lane.buffer.quarantine()]
            assert found == [origin(2, first=7).at(0), origin(2, first=7).at(1), None]

    @scenario
    async def test_quarantine_is_listed_in_pages(self, rig: Rig) -> None:
        """A page follows an id, in either order; one fact is given by its id, whatever was released meanwhile."""
        lane = await rig.lane()
        await lane.buffer.set_aside(batch(7), "fact_expired")
        async for lane in rig.across_restart():
            ids = [one.id for one in await lane.buffer.quarantine()]
            assert len(ids) == 7
            assert [one.id for one in await lane.buffer.quarantine(None, 3)] == ids[:3]
            assert [one.id for one in await lane.buffer.quarantine(ids[2], 3)] == ids[3:6]
            assert [one.id for one in await lane.buffer.quarantine(ids[5], 3)] == ids[6:]
            assert await lane.buffer.quarantine(ids[6]) == []
            assert [one.id for one in await lane.buffer.quarantine(newest_first=True)] == ids[::-1]
            assert [one.id for one in await lane.buffer.quarantine(ids[4], 2, newest_first=True)] == [ids[3], ids[2]]
            found = await lane.buffer.quarantined(ids[3])
            assert found is not None
            assert found.facts.to_messages() == messages(7)[3:4]
        await lane.buffer.release_quarantined(ids[3], "seen")
        assert await lane.buffer.quarantined(ids[3]) is None
        assert [one.id for one in await lane.buffer.quarantine(ids[3], 2)] == ids[4:6]

    @scenario
    async def test_a_full_quarantine_takes_nothing_more(self, rig: Rig) -> None:
        """What does not fit is refused as a whole with an error of its own, until an operator released something."""
        policy = Policy(quarantine_bytes=12_000)
        lane = await rig.lane(policy=policy)
        taken = 0
        with pytest.raises(QuarantineFull) as refused:
            while taken < 1_000:
                await lane.buffer.set_aside(batch(1, first=taken), "fact_expired")
                taken += 1
        assert refused.value.retryable
        assert 2 < taken < 1_000
        stats = await lane.stats()
        assert (stats.quarantined, stats.quarantine_full, stats.quarantine_capacity_bytes) == (taken, True, 12_000)
        assert 0 < stats.quarantine_bytes <= 12_000
        await lane.buffer.set_aside(batch(taken), "fact_expired")  # all of it is there
        lane = await rig.reopened(policy=policy)
        with pytest.raises(QuarantineFull):
            await lane.buffer.set_aside(batch(2, first=taken), "fact_expired")
        assert (await lane.stats()).quarantined == taken
        for one in (await lane.buffer.quarantine())[:2]:
            await lane.buffer.release_quarantined(one.id, "exported")
        assert not (await lane.stats()).quarantine_full
        await lane.buffer.set_aside(batch(2, first=taken), "fact_expired")
        assert (await lane.stats()).quarantined == taken

    @scenario
    async def test_a_batch_with_facts_for_a_full_quarantine_is_not_put(self, rig: Rig) -> None:
        """Nothing of a batch is stored when what it would set aside does not fit: it can be put again as a whole."""
        hasher = WeakHasher()
        await rig.open(hasher=hasher)
        lane = await rig.lane(policy=Policy(quarantine_bytes=3_000))
        await lane.write_messages([message("a", 11)], hasher=hasher)
        with pytest.raises(QuarantineFull):
            for value in range(12, 60):
                await lane.write_messages([message(f"new-{value}"), message("a", value)], hasher=hasher)
        stats = await lane.stats()
        assert stats.end == 1 + stats.quarantined
        (first, *_) = await lane.buffer.quarantine()
        await lane.buffer.release_quarantined(first.id, "seen")
        value = 12 + stats.quarantined
        again = await lane.write_messages([message(f"new-{value}"), message("a", value)], hasher=hasher)
        assert again.results.tolist() == [Result.INSERTED, Result.CONFLICT]

    @scenario
    async def test_thousands_of_facts_are_set_aside_and_released(self, rig: Rig) -> None:
        """Many facts are kept together, and released in any order, and what is left is there after a restart."""
        lane = await rig.lane()
        await lane.buffer.set_aside(batch(2_000), "fact_expired")
        first = [one.id for one in await lane.buffer.quarantine()]
        ids = [*first, *(one.id for one in await lane.buffer.quarantine(first[-1]))]
        assert len(ids) == len(set(ids)) == 2_000
        Random(4).shuffle(ids)
        for id in ids[:400]:
            await lane.buffer.release_quarantined(id, "dropped by an operator")
        async for lane in rig.across_restart():
            assert (await lane.stats()).quarantined == 1_600
            assert await lane.buffer.quarantined(ids[0]) is None
            assert await lane.buffer.quarantined(ids[-1]) is not None

    @scenario
    async def test_a_fact_set_aside_can_still_be_written(self, lane: BufferUnderTest) -> None:
        """Being set aside takes no key: the fact may be written later."""
        await lane.buffer.set_aside(batch(2), "fact_expired")
        assert (await lane.write(batch(2))).offsets.tolist() == [0, 1]
