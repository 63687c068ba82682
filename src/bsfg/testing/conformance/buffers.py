"""The contracts of `bsfg.ports.StoreBuffer` and `bsfg.ports.ForwardBuffer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from bsfg.errors import BufferFull, InvalidArgument, TruncateRefused
from bsfg.fact import Entry, Key, Origin
from bsfg.ports import Buffer, ConsumerSpec, GapRecord, OriginSpan, Result, StartAt
from bsfg.retention import GapReason, Policy
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.conformance.case import STREAM, BufferUnderTest, Rig, drain, entries_of, origin, scenario
from bsfg.testing.conformance.records import RecordsContract
from bsfg.testing.conformance.removing import CapacityContract, RetentionContract, TruncationContract
from bsfg.testing.conformance.replaying import ReplayContract
from bsfg.testing.conformance.writing import WritingContract
from bsfg.testing.facts import altered, batch, key_of, message, messages


class StoreBufferContract(
    WritingContract, ReplayContract, TruncationContract, RetentionContract, CapacityContract, RecordsContract
):
    """Everything that a store buffer promises."""

    kind: ClassVar[Buffer] = Buffer.STORE

    @scenario
    async def test_the_frontier_is_that_of_the_slowest_required_consumer(self, rig: Rig, lane: BufferUnderTest) -> None:
        """The frontier is the lowest of the required consumers of this very buffer, -1 without one."""
        await lane.write(batch(10))
        forward = await rig.lane(kind=Buffer.FORWARD)
        other = await rig.lane(stream="audit")
        assert await lane.store.frontier() == -1
        await lane.create_reader("fast")
        await lane.create_reader("slow")
        await lane.create_reader("optional", required=False)
        await forward.create_reader("application")
        await other.create_reader("auditor")
        await lane.confirm(8, name="fast")
        assert await lane.store.frontier() == -1
        await lane.confirm(3, name="slow")
        assert await lane.store.frontier() == 3
        lane = await rig.reopened()
        assert await lane.store.frontier() == 3
        await lane.storage.cursors.retire("slow", "decommissioned")
        assert await lane.store.frontier() == 8

    @scenario
    async def test_without_a_required_consumer_nothing_is_truncated(self, lane: BufferUnderTest) -> None:
        """Before the first required consumer exists a store buffer keeps everything."""
        await lane.write(batch(3))
        await lane.create_reader("optional", required=False)
        await lane.confirm(name="optional")
        await lane.buffer.truncate_before(0)
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(1)

    @scenario
    async def test_a_new_required_consumer_begins_behind_what_is_gone(self, lane: BufferUnderTest) -> None:
        """A consumer created after a truncation begins at the oldest entry that is left."""
        await lane.write(batch(10))
        await lane.create_reader("first")
        await lane.confirm(name="first")
        await lane.buffer.truncate_before(6)
        state = await lane.storage.cursors.create(ConsumerSpec("second", STREAM, start=StartAt.EARLIEST))
        assert (state.checkpoint.committed, state.checkpoint.next_to_send) == (5, 6)
        assert await lane.store.frontier() == 5

    @scenario
    async def test_a_conflict_is_a_result_and_no_quarantine(self, lane: BufferUnderTest) -> None:
        """The producer learns of its conflict from the receipt; nothing is put aside for it."""
        await lane.write(batch(2))
        await lane.write_messages(altered(messages(2)))
        assert await lane.buffer.quarantine() == []

    @scenario
    async def test_entries_have_no_origin(self, lane: BufferUnderTest) -> None:
        """What this zone produced was pulled from nowhere."""
        await lane.write(batch(3))
        assert [entry.origin for entry in await lane.entries()] == [None] * 3


class ForwardBufferContract(
    WritingContract, ReplayContract, TruncationContract, RetentionContract, CapacityContract, RecordsContract
):
    """Everything that a forward buffer promises."""

    kind: ClassVar[Buffer] = Buffer.FORWARD

    @scenario
    async def test_entries_carry_their_origin(self, rig: Rig) -> None:
        """Each entry knows the zone it was pulled from, offset and time there, and its age; after a restart too."""
        lane = await rig.lane()
        span = OriginSpan("field", np.array([7, 9, 12]), np.array([100, 200, 300]), np.array([40, 30, 20]))
        await lane.forward.put_if_absent(batch(3), span)
        await lane.forward.put_if_absent(batch(1, first=3), OriginSpan("old", np.array([2]), np.array([400])))
        expected = [Origin("field", 7, 100, 40), Origin("field", 9, 200, 30), Origin("field", 12, 300, 20)]
        expected.append(Origin("old", 2, 400, None))
        async for lane in rig.across_restart():
            assert [entry.origin for entry in await lane.entries()] == expected

    @scenario
    async def test_inserted_rows_keep_their_own_origin(self, lane: BufferUnderTest) -> None:
        """When only some rows of a put are new, each of them has the origin of its row."""
        await lane.forward.put_if_absent(batch(1, first=1), origin(1, first=90, zone="idmz"))
        await lane.forward.put_if_absent(batch(3), origin(3, first=50))
        found = [(entry.origin.zone, entry.origin.offset) for entry in await lane.entries() if entry.origin]
        assert found == [("idmz", 90), ("field", 50), ("field", 52)]

    @scenario
    async def test_the_origin_must_fit_the_batch(self, lane: BufferUnderTest) -> None:
        """A put whose origin does not name an offset and a time for each row is refused."""
        short = (np.arange(3), np.arange(3), np.arange(2))
        for span in (origin(2), origin(4), OriginSpan("field", *short[1:]), OriginSpan("field", *short)):
            with pytest.raises(InvalidArgument):
                await lane.forward.put_if_absent(batch(3), span)
        assert (await lane.stats()).end == 0

    @scenario
    async def test_entries_of_another_buffer_can_be_put(self, rig: Rig) -> None:
        """What a replay of a store buffer gave can be put as it is; it gets the offsets and times of its new home."""
        sender = await rig.lane(kind=Buffer.STORE)
        await sender.write(batch(2, seed=9))
        await sender.write(batch(5))
        rig.clock.advance(60)
        lane = await rig.lane()
        for frame in await sender.frames(2):
            assert frame.entries is not None
            await lane.forward.put_if_absent(frame.entries, origin(len(frame.entries), first=frame.first))
        entries = await lane.entries()
        assert [entry.message for entry in entries] == messages(5)
        assert [entry.offset for entry in entries] == [0, 1, 2, 3, 4]
        assert {entry.appended_at_unix_ms for entry in entries} == {rig.clock.now_unix_ms()}
        assert [entry.origin.offset for entry in entries if entry.origin] == [2, 3, 4, 5, 6]

    @scenario
    async def test_conflicts_are_quarantined(self, rig: Rig) -> None:
        """A conflicting fact is kept aside with its bytes and the offset of the first, inside a batch too."""
        lane = await rig.lane()
        await lane.write(batch(2))
        intruder = altered(messages(1))[0]
        await lane.write_messages([intruder, message("x", 1), message("x", 2)])
        async for lane in rig.across_restart():
            aside = await lane.buffer.quarantine()
            assert [(one.reason, one.existing_offset) for one in aside] == [("conflict", 0), ("conflict", 2)]
            assert [one.key for one in aside] == [key_of(intruder), Key("plant", "x")]
            assert [one.facts.to_messages() for one in aside] == [[intruder], [message("x", 2)]]
            assert [one.origin for one in aside] == [origin(3).at(0), origin(3).at(2)]
        assert await lane.messages() == [*messages(2), message("x", 1)]

    @scenario
    async def test_a_conflict_with_removed_bytes_is_quarantined(self, lane: BufferUnderTest) -> None:
        """The digest that outlived its bytes still tells a conflict."""
        await lane.write(batch(2))
        await lane.buffer.truncate_before(2)
        await lane.write_messages(altered(messages(1)))
        assert [one.reason for one in await lane.buffer.quarantine()] == ["conflict"]

    @scenario
    async def test_query_by_time_range(self, rig: Rig) -> None:
        """A time range gives what became durable in it: its start inclusive, its end exclusive."""
        lane = await rig.lane()
        for number in range(5):
            await lane.write(batch(2, first=2 * number))
            rig.clock.advance(10)
        t0 = START_UNIX_MS
        async for lane in rig.across_restart():
            for start, end, expected in (
                (t0, t0 + 1, [0, 1]),
                (t0, t0, []),
                (t0 + 1, t0 + 10_000, []),
                (t0 + 1, t0 + 10_001, [2, 3]),
                (t0 + 10_000, t0 + 30_000, [2, 3, 4, 5]),
                (0, t0, []),
                (0, 1 << 50, list(range(10))),
                (t0 + 40_000, 1 << 50, [8, 9]),
                (t0 + 40_001, 1 << 50, []),
            ):
                frames = await drain(lane.forward.query_by_time_range(start, end))
                assert [entry.offset for entry in entries_of(frames)] == expected
            with pytest.raises(InvalidArgument):
                await drain(lane.forward.query_by_time_range(t0 + 1, t0))

    @scenario
    async def test_query_by_time_range_with_a_clock_that_jumps_back(self, rig: Rig, lane: BufferUnderTest) -> None:
        """When the clock jumps back, entries keep the latest time seen and every entry is still found once."""
        for number, seconds in enumerate((0, 100, -50, 0, 80)):
            (rig.clock.advance if seconds > 0 else rig.clock.jump)(seconds)
            await lane.write(batch(1, first=number))
        times = [entry.appended_at_unix_ms - START_UNIX_MS for entry in await lane.entries()]
        assert times == [0, 100_000, 100_000, 100_000, 130_000]
        late = await drain(lane.forward.query_by_time_range(START_UNIX_MS + 100_000, START_UNIX_MS + 130_000))
        assert [entry.offset for entry in entries_of(late)] == [1, 2, 3]

    @scenario
    async def test_query_by_time_range_after_truncation(self, lane: BufferUnderTest) -> None:
        """A time range gives only what is retained."""
        await lane.write(batch(6))
        await lane.buffer.truncate_before(4)
        frames = await drain(lane.forward.query_by_time_range(0, 1 << 50))
        assert [entry.offset for entry in entries_of(frames)] == [4, 5]

    @scenario
    async def test_without_a_required_consumer_everything_may_go(self, lane: BufferUnderTest) -> None:
        """A forward buffer that nobody must read is truncated up to its end; a required reader holds it."""
        await lane.write(batch(6))
        await lane.buffer.truncate_before(2)
        await lane.create_reader()
        await lane.confirm(3)
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(5)
        await lane.storage.cursors.retire("reader", "decommissioned")
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(7)
        await lane.buffer.truncate_before(6)

    @scenario
    async def test_consumers_of_the_store_buffer_hold_nothing_back(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A required consumer of the stream's store buffer has no say in its forward buffer."""
        await lane.write(batch(6))
        await (await rig.lane(kind=Buffer.STORE)).create_reader()
        await lane.buffer.truncate_before(6)

    @scenario
    async def test_a_buffer_that_nobody_must_read_makes_room(self, rig: Rig) -> None:
        """Without a required consumer the oldest facts make room, with a record, and a put is never refused."""
        policy = Policy(capacity_bytes=self.capacity_bytes)
        lane = await rig.lane(policy)
        for number in range(3 * self.capacity_bytes // 20_000):
            await lane.write(batch(20, first=20 * number, object_bytes=1_000))
            assert (await lane.stats()).used_bytes <= self.capacity_bytes
        async for lane in rig.across_restart(policy):
            start = (await lane.stats()).start
            assert start > 0
            assert _recorded(await lane.gaps()) == dict.fromkeys(range(start), GapReason.EVICTED)

    @scenario
    async def test_a_safety_buffer_that_nobody_must_read_pauses(self, rig: Rig) -> None:
        """On a stream of a safety function nothing unread makes room; it leaves by age, and that is recorded."""
        policy = Policy(capacity_bytes=self.capacity_bytes, safety="sil")
        lane = await rig.lane(policy)
        number = 0
        with pytest.raises(BufferFull):
            while number < 4 * self.capacity_bytes // 20_000:
                await lane.write(batch(20, first=20 * number, object_bytes=1_000))
                number += 1
        assert (await lane.stats()).start == 0
        assert await lane.gaps() == []
        rig.clock.advance(policy.retention_seconds)
        await lane.buffer.enforce_retention(link_open=True)
        async for lane in rig.across_restart(policy):
            start = (await lane.stats()).start
            assert start > 0
            assert _recorded(await lane.gaps()) == dict.fromkeys(range(start), GapReason.EXPIRED)
        await lane.write(batch(20, first=20 * number, object_bytes=1_000))

    @scenario
    async def test_an_order_on_a_safety_buffer_is_recorded(self, rig: Rig) -> None:
        """What an operator removes unread from a stream of a safety function is a gap record; elsewhere it is not."""
        for policy, expected in ((Policy(safety="sil"), {0: "truncated", 1: "truncated"}), (Policy(), {})):
            await rig.open()
            lane = await rig.lane(policy)
            await lane.write(batch(6))
            await lane.buffer.truncate_before(2)
            await lane.buffer.truncate_before(2)
            async for lane in rig.across_restart(policy):
                assert _recorded(await lane.gaps()) == expected

    @scenario
    async def test_the_latest_facts_outlive_everything(self, rig: Rig) -> None:
        """With ``keep_latest`` the newest fact of each subject and predicate stays, as it was, however it left."""
        policy = Policy(
            capacity_bytes=self.capacity_bytes,
            retention_seconds=100,
            max_age_seconds=1_000,
            key_horizon_seconds=100_000,
            keep_latest=True,
        )
        lane = await rig.lane(policy)
        assert len(await lane.forward.kept_latest()) == 0
        written: list[Entry] = []
        for number in range(6):
            await lane.write(batch(30, first=30 * number), origin_first=30 * number)
            written += (await lane.entries())[-30:]
            if number == 1:
                await lane.buffer.truncate_before(7)
            rig.clock.advance(60)
            await lane.buffer.enforce_retention(link_open=True)
            await _check_latest(lane, written)
            lane = await rig.reopened(policy)
            await _check_latest(lane, written)
        rig.clock.advance(1_000_000)
        await lane.buffer.enforce_retention(link_open=True)
        number = 180
        while (await lane.stats()).start < 200:
            receipt = await lane.write(batch(20, first=number, object_bytes=1_000), origin_first=number)
            assert receipt.count(Result.INSERTED) == 20
            written += (await lane.entries())[-20:]
            number += 20
        async for lane in rig.across_restart(policy):
            await _check_latest(lane, written)

    @scenario
    async def test_only_so_many_latest_facts_are_kept(self, rig: Rig) -> None:
        """Names without end do not fill a disk: of more than the policy allows the latest stay."""
        policy = Policy(keep_latest=True, latest_most=3)
        lane = await rig.lane(policy)
        await lane.write(batch(40))
        entries = await lane.entries()
        await lane.buffer.truncate_before(40)
        async for lane in rig.across_restart(policy):
            kept = (await lane.forward.kept_latest()).to_entries()
            assert kept == sorted(_latest(entries).values(), key=lambda entry: entry.offset)[-3:]

    @scenario
    async def test_nothing_is_kept_unasked(self, lane: BufferUnderTest) -> None:
        """Without ``keep_latest`` what leaves is gone."""
        await lane.write(batch(6))
        await lane.buffer.truncate_before(6)
        assert len(await lane.forward.kept_latest()) == 0

    @scenario
    async def test_unread_facts_stay_for_the_retention(self, rig: Rig) -> None:
        """Without a required consumer facts leave when they are as old as the retention, without a record."""
        policy = Policy(retention_seconds=100, max_age_seconds=1_000, key_horizon_seconds=100_000)
        lane = await rig.lane(policy)
        await lane.write(batch(6))
        rig.clock.advance(99)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 0
        rig.clock.advance(1)
        await lane.buffer.enforce_retention(link_open=True)
        assert (await lane.stats()).start == 6
        assert await lane.gaps() == []

    @scenario
    async def test_a_buffer_full_of_unread_facts_pauses(self, rig: Rig) -> None:
        """A required consumer that does not read makes puts fail, so that pulling pauses; reading resumes them."""
        lane = await rig.lane(Policy(capacity_bytes=self.capacity_bytes))
        await lane.create_reader()
        number = 0
        with pytest.raises(BufferFull):
            while number < 4 * self.capacity_bytes // 20_000:
                await lane.write(batch(20, first=20 * number, object_bytes=1_000))
                number += 1
        await lane.confirm()
        await lane.write(batch(20, first=20 * number, object_bytes=1_000))


def _latest(entries: Sequence[Entry]) -> dict[tuple[str, str], Entry]:
    return {(entry.message.fact.subject, entry.message.fact.predicate): entry for entry in entries}


async def _check_latest(lane: BufferUnderTest, written: Sequence[Entry]) -> None:
    """Hold what was kept and what is retained against everything that was ever written."""
    kept, retained = (await lane.forward.kept_latest()).to_entries(), await lane.entries()
    assert [entry.offset for entry in kept] == sorted(entry.offset for entry in kept)
    assert len(_latest(kept)) == len(kept)
    assert _latest([*kept, *retained]) == _latest(written)
    assert _latest(kept) == _latest([entry for entry in written if entry.offset < (await lane.stats()).start])


def _recorded(gaps: Sequence[GapRecord]) -> dict[int, str]:
    """Give the reason recorded for each offset, failing when one is recorded twice."""
    reasons: dict[int, str] = {}
    for gap in gaps:
        for offset in range(gap.first, gap.last + 1):
            assert offset not in reasons
            reasons[offset] = str(gap.reason)
    return reasons
