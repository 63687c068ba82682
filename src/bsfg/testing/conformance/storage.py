"""The contract of `bsfg.ports.Storage`: opening, describing and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bsfg.errors import InvalidArgument, PolicyInvalid, StorageClosed
from bsfg.fact import Key
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, Receipt, Result, Storage
from bsfg.retention import Fill, GapReason, Policy
from bsfg.testing.conformance.case import READER, STREAM, BufferUnderTest, Rig, StorageCase, drain, scenario
from bsfg.testing.conformance.replaying import LONG_SECONDS
from bsfg.testing.facts import batch, messages


class StorageContract(StorageCase):
    """Everything that a storage promises beside its buffers and cursors."""

    @scenario
    async def test_buffers_are_listed(self, rig: Rig) -> None:
        """Each buffer that was opened exists from then on, with or without facts."""
        storage = await rig.open()
        assert await storage.streams() == []
        await storage.store("operational")
        await storage.forward("operational")
        await storage.forward("audit")
        expected = {("operational", Buffer.STORE), ("operational", Buffer.FORWARD), ("audit", Buffer.FORWARD)}
        assert set(await storage.streams()) == expected
        storage = await rig.reopen()
        assert set(await storage.streams()) == expected
        assert len(await storage.streams()) == 3

    @scenario
    async def test_opening_again_gives_the_same_buffer(self, rig: Rig) -> None:
        """Opening a buffer twice gives the same entries, and the first policy stands until the storage is closed."""
        storage = await rig.open()
        first = await storage.store(STREAM, Policy(capacity_bytes=1 << 24))
        second = await storage.store(STREAM, Policy(capacity_bytes=1 << 25))
        assert (await second.stats()).capacity_bytes == 1 << 24
        await first.append(batch(3))
        assert (await second.append(batch(3))).count(Result.ALREADY_EXISTS) == 3
        storage = await rig.reopen()
        assert (await (await storage.store(STREAM, Policy(capacity_bytes=1 << 25))).stats()).capacity_bytes == 1 << 25

    @scenario
    async def test_names_and_policies_are_checked(self, rig: Rig) -> None:
        """A stream needs a name that is one and a policy that does not contradict itself."""
        storage = await rig.open()
        for name in ("", "Operational", "a/b", "..", "a b", "x" * 65):
            with pytest.raises(InvalidArgument):
                await storage.store(name)
            with pytest.raises(InvalidArgument):
                await storage.forward(name)
        with pytest.raises(PolicyInvalid):
            await storage.store(STREAM, Policy(retention_seconds=10, max_age_seconds=5))
        assert await storage.streams() == []

    @scenario
    async def test_each_history_has_its_own_id(self, rig: Rig, lane: BufferUnderTest) -> None:
        """The id of a log stays over a restart, and no other storage has the same."""
        log_id = lane.buffer.log_id
        assert log_id
        lane = await rig.reopened()
        assert (lane.buffer.log_id, (await lane.stats()).log_id) == (log_id, log_id)
        await rig.open()
        assert (await rig.lane()).buffer.log_id != log_id

    @scenario
    async def test_an_empty_buffer_is_described(self, rig: Rig) -> None:
        """An empty buffer has no entries, no keys and no times."""
        for kind in Buffer:
            stats = await (await rig.lane(kind=kind)).stats()
            assert (stats.stream, stats.buffer) == (STREAM, kind)
            assert (stats.start, stats.end, stats.keys, stats.gaps, stats.quarantined) == (0, 0, 0, 0, 0)
            assert (stats.oldest_unix_ms, stats.newest_unix_ms, stats.fill) == (None, None, Fill.HEALTHY)

    @scenario
    async def test_a_buffer_is_described(self, rig: Rig) -> None:
        """Offsets, times, keys and sizes follow what is stored, and a restart changes none of them."""
        for kind in Buffer:
            lane = await rig.lane(kind=kind)
            start_unix_ms = rig.clock.now_unix_ms()
            for number in range(3):
                await lane.write(batch(4, first=4 * number))
                rig.clock.advance(10)
            await lane.create_reader(f"reader-{kind}")
            stats = await lane.stats()
            assert (stats.start, stats.end, stats.keys) == (0, 12, 12)
            assert (stats.oldest_unix_ms, stats.newest_unix_ms) == (start_unix_ms, start_unix_ms + 20_000)
            assert stats.used_bytes >= sum(len(fact.fact.object) for fact in messages(12))
            assert stats.index_bytes >= 0 and stats.segments >= 1
        await rig.reopen()
        for kind in Buffer:
            again = await (await rig.lane(kind=kind)).stats()
            assert (again.start, again.end, again.keys) == (0, 12, 12)
            assert (again.newest_unix_ms or 0) - (again.oldest_unix_ms or 0) == 20_000

    @scenario
    async def test_keys_are_counted_beyond_truncation(self, rig: Rig) -> None:
        """The count of keys covers what was truncated, and the oldest time is that of what is left."""
        lane = await rig.lane()
        await lane.write(batch(4))
        rig.clock.advance(10)
        await lane.write(batch(4, first=4))
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(4)
        async for lane in rig.across_restart():
            stats = await lane.stats()
            assert (stats.start, stats.end, stats.keys) == (4, 8, 8)
            assert stats.oldest_unix_ms == rig.clock.now_unix_ms()

    @scenario
    async def test_cursors_need_no_open_buffer(self, rig: Rig, lane: BufferUnderTest) -> None:
        """After a restart a consumer can confirm before anybody has opened its buffer."""
        await lane.write(batch(5))
        await lane.create_reader()
        storage = await rig.reopen()
        assert (await storage.cursors.commit(READER, Confirmation(through=3))).committed == 3

    @scenario
    async def test_closing_twice_is_harmless(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A storage can be closed any number of times, and what it held is there afterwards."""
        await lane.write(batch(3))
        await rig.storage.close()
        await rig.storage.close()
        assert await (await rig.reopened()).messages() == messages(3)

    @scenario
    async def test_a_closed_storage_refuses_everything(self, rig: Rig) -> None:
        """Every operation after the end says that the storage is closed."""
        lane = await rig.lane(kind=Buffer.STORE)
        await lane.write(batch(3))
        await lane.create_reader()
        forward = await rig.lane(kind=Buffer.FORWARD)
        storage = rig.storage
        await storage.close()
        for call in (*_storage_calls(storage), *_buffer_calls(lane), *_buffer_calls(forward)):
            with pytest.raises(StorageClosed):
                await call()

    @scenario
    async def test_closing_wakes_those_who_wait(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Whoever waits for an entry learns at once that the storage was closed."""
        waiting = asyncio.create_task(lane.buffer.wait_for(0, LONG_SECONDS))
        await asyncio.sleep(0)
        await rig.storage.close()
        with pytest.raises(StorageClosed):
            await waiting

    @scenario
    async def test_closing_finishes_what_is_under_way(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A write that races with closing either has a receipt and is there, or is refused and can be repeated."""
        writes = [asyncio.create_task(lane.write(batch(2, first=2 * number))) for number in range(20)]
        await asyncio.sleep(0)
        await rig.storage.close()
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        lane = await rig.reopened()
        entries = {entry.offset: entry.message for entry in await lane.entries()}
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Receipt):
                assert [entries[offset] for offset in outcome.offsets.tolist()] == messages(2, first=2 * number)
            else:
                assert isinstance(outcome, StorageClosed)
            await lane.write(batch(2, first=2 * number))
        assert len(await lane.entries()) == 40


Call = Callable[[], Awaitable[object]]


def _storage_calls(storage: Storage) -> list[Call]:
    cursors = storage.cursors
    return [
        lambda: storage.store(STREAM),
        lambda: storage.forward("another"),
        storage.streams,
        lambda: cursors.create(ConsumerSpec("late", STREAM)),
        lambda: cursors.retire(READER, "closed"),
        lambda: cursors.commit(READER, Confirmation(through=1)),
        lambda: cursors.commit_one(READER, 0, Key("plant", "0-000000")),
        lambda: cursors.sent(READER, 1),
        lambda: cursors.checkpoint(READER),
        lambda: cursors.consumer(READER),
        cursors.consumers,
    ]


def _buffer_calls(lane: BufferUnderTest) -> list[Call]:
    buffer = lane.buffer
    calls: list[Call] = [
        lambda: lane.write(batch(1)),
        lambda: drain(buffer.replay(0)),
        lambda: buffer.get(Key("plant", "0-000000")),
        lambda: buffer.wait_for(0, 0),
        lambda: buffer.truncate_before(0),
        buffer.gaps,
        lambda: buffer.record_gaps([GapRecord(0, 0, GapReason.SKIPPED, 0, "", "field")]),
        buffer.quarantine,
        lambda: buffer.release_quarantined(0, "closed"),
        lambda: buffer.enforce_retention(link_open=True),
        buffer.stats,
    ]
    if buffer.buffer == Buffer.STORE:
        return [*calls, lane.store.frontier]
    return [
        *calls,
        lambda: drain(lane.forward.query_by_time_range(0, 1)),
    ]
