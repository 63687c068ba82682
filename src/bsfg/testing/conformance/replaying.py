"""What reading promises: replay without hole or overlap, waiting, tailing, and all of it after a restart."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bsfg.errors import InvalidArgument, OffsetOutOfRange
from bsfg.fact import Key
from bsfg.ports import Frame
from bsfg.retention import GapReason
from bsfg.testing.conformance.case import BufferUnderTest, Rig, StorageCase, check_cover, drain, entries_of, scenario
from bsfg.testing.facts import batch, key_of, message, messages

LONG_SECONDS = 60.0
"""Longer than any test needs: a wait that takes it has missed its event."""


class ReplayContract(StorageCase):
    """Reading back what was written; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_replay_gives_everything_in_order(self, lane: BufferUnderTest) -> None:
        """A replay from 0 gives every entry in offset order."""
        for number in range(5):
            await lane.write(batch(4, first=4 * number))
        assert [entry.offset for entry in await lane.entries()] == list(range(20))
        assert await lane.messages() == messages(20)

    @scenario
    async def test_replay_of_an_empty_buffer_gives_nothing(self, rig: Rig) -> None:
        """An empty buffer replays as nothing, before and after a restart."""
        assert await (await rig.lane()).frames() == []
        assert await (await rig.reopened()).frames() == []

    @scenario
    async def test_replay_from_any_offset_to_any_end(self, lane: BufferUnderTest) -> None:
        """Any range is given exactly, whatever the batches were and however small the frames are."""
        sizes = [3, 1, 5, 2]
        for number, size in enumerate(sizes):
            await lane.write(batch(size, first=sum(sizes[:number])))
        for start in range(12):
            for end in range(start, 12):
                for max_facts in (1, 4, 100):
                    frames = await lane.frames(start, end=end, max_facts=max_facts)
                    assert [entry.offset for entry in entries_of(frames)] == list(range(start, end))
                    assert all(frame.last - frame.first < max_facts for frame in frames)

    @scenario
    async def test_an_end_beyond_the_end_means_the_end(self, lane: BufferUnderTest) -> None:
        """Asking for more than there is gives what there is, an end at the start nothing; one below it is refused."""
        await lane.write(batch(3))
        assert [entry.offset for entry in entries_of(await lane.frames(1, end=1_000))] == [1, 2]
        assert await drain(lane.buffer.replay(2, end=2)) == []
        with pytest.raises(InvalidArgument):
            await drain(lane.buffer.replay(2, end=1))

    @scenario
    async def test_a_start_beyond_the_end_is_refused(self, lane: BufferUnderTest) -> None:
        """The end itself is a valid start that gives nothing; beyond it the offset is out of range."""
        await lane.write(batch(3))
        assert await drain(lane.buffer.replay(3)) == []
        with pytest.raises(OffsetOutOfRange):
            await drain(lane.buffer.replay(4))
        with pytest.raises(InvalidArgument):
            await drain(lane.buffer.replay(-1))

    @scenario
    async def test_replay_after_reopening(self, rig: Rig, lane: BufferUnderTest) -> None:
        """After a restart the same range gives the same entries."""
        for number in range(6):
            await lane.write(batch(5, first=5 * number, seed=2))
            rig.clock.advance(1)
        before = await lane.entries(7)
        lane = await rig.reopened()
        assert await lane.entries(7) == before
        await lane.write(batch(5, first=30, seed=2))
        assert await lane.entries(7) == before + (await lane.entries(30))

    @scenario
    async def test_a_repeated_replay_gives_the_same(self, lane: BufferUnderTest) -> None:
        """A range is the same every time it is read, whatever is written after it."""
        await lane.write(batch(10))
        first = entries_of(await lane.frames(2, end=8))
        await lane.write(batch(10, first=10))
        assert entries_of(await lane.frames(2, end=8)) == first

    @scenario
    async def test_truncated_ranges_are_gap_records(self, rig: Rig) -> None:
        """What was truncated appears in a replay as a gap record with that reason, also after a restart."""
        lane = await rig.lane()
        await lane.write(batch(5))
        await lane.write(batch(5, first=5))
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(7)
        async for lane in rig.across_restart():
            for start in range(10):
                frames = await lane.frames(start)
                missing = [frame for frame in frames if frame.gap is not None]
                assert [frame.last for frame in missing][-1:] == ([6] if start < 7 else [])
                assert {frame.gap.reason for frame in missing if frame.gap} <= {GapReason.TRUNCATED}
                assert [entry.offset for entry in entries_of(frames)] == list(range(max(start, 7), 10))

    @scenario
    async def test_truncation_during_a_replay_leaves_no_hole(self, lane: BufferUnderTest) -> None:
        """A replay that is overtaken by a truncation goes on without hole or overlap."""
        for number in range(10):
            await lane.write(batch(3, first=3 * number))
        await lane.create_reader()
        await lane.confirm()
        frames: list[Frame] = []
        async for frame in lane.buffer.replay(0, max_facts=2):
            frames.append(frame)
            if len(frames) == 3:
                await lane.buffer.truncate_before(20)
        assert check_cover(frames, 0) == 30
        assert [entry.message for entry in entries_of(frames)][-10:] == messages(10, first=20)

    @scenario
    async def test_waiting_for_what_is_there(self, lane: BufferUnderTest) -> None:
        """Waiting for an offset that is durable, or was before it was truncated, ends at once."""
        assert not await lane.buffer.wait_for(0, 0)
        await lane.write(batch(3))
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(3)
        assert [await lane.buffer.wait_for(offset, 0) for offset in range(5)] == [True, True, True, False, False]

    @scenario
    async def test_waiting_for_what_comes(self, lane: BufferUnderTest) -> None:
        """Waiting for an offset ends when it is written, and not for an earlier one."""
        waits = [asyncio.create_task(lane.buffer.wait_for(offset, LONG_SECONDS)) for offset in (0, 3)]
        await asyncio.sleep(0)
        await lane.write(batch(2))
        assert await waits[0]
        assert not waits[1].done()
        await lane.write(batch(2, first=2))
        assert await waits[1]

    @scenario
    async def test_waiting_ends_with_its_timeout(self, lane: BufferUnderTest) -> None:
        """Waiting for an offset that does not come ends with the timeout and says so."""
        await lane.write(batch(1))
        assert not await lane.buffer.wait_for(1, 0.01)

    @scenario
    async def test_get_by_key(self, rig: Rig) -> None:
        """An entry is found by its key, and a key that was never stored is not, after a restart too."""
        lane = await rig.lane()
        facts = messages(40)
        await lane.write(batch(25))
        await lane.write(batch(15, first=25), origin_first=25)
        await lane.write_messages([message("twin", 1), message("twin", 2, from_zone="idmz")])
        async for lane in rig.across_restart():
            entries = await lane.entries()
            assert [await lane.buffer.get(key_of(fact)) for fact in facts] == entries[:40]
            assert await lane.buffer.get(Key("idmz", "twin")) == entries[41]
            for key in (Key("plant", "0-999999"), Key("idmz", "0-000000"), Key("", "")):
                assert await lane.buffer.get(key) is None

    @scenario
    async def test_get_after_truncation_gives_nothing(self, rig: Rig) -> None:
        """A key whose bytes are gone gives nothing, its neighbours still do."""
        lane = await rig.lane()
        await lane.write(batch(6))
        await lane.create_reader()
        await lane.confirm(3)
        await lane.buffer.truncate_before(4)
        async for lane in rig.across_restart():
            found = [await lane.buffer.get(key_of(fact)) for fact in messages(6)]
            assert [entry.offset if entry else None for entry in found] == [None] * 4 + [4, 5]

    @scenario
    async def test_racing_writers_leave_no_gap_for_a_tailing_reader(self, lane: BufferUnderTest) -> None:
        """Readers that tail while many writers race see every offset once and in order."""
        total = 8 * 12 * 3
        readers = [asyncio.create_task(self._tail(lane, total)) for _ in range(2)]
        await asyncio.gather(*(self._race(lane, writer) for writer in range(8)))
        for reader in readers:
            seen = await reader
            assert sorted(seen) == sorted({one.envelope.message_id or "" for one in await lane.messages()})
            assert len(seen) == total

    async def _race(self, lane: BufferUnderTest, writer: int) -> None:
        random = Random(writer)
        numbers = list(range(12 * 3))
        while numbers:
            size = random.choice([1, 1, 2, 5])
            await lane.write(batch(len(numbers[:size]), seed=writer, first=numbers[0]))
            del numbers[:size]
            if random.random() < 0.3:
                await asyncio.sleep(0)

    async def _tail(self, lane: BufferUnderTest, total: int) -> list[str]:
        seen: list[str] = []
        while len(seen) < total:
            assert await lane.buffer.wait_for(len(seen), LONG_SECONDS)
            frames = await drain(lane.buffer.replay(len(seen), max_facts=7))
            assert check_cover(frames, len(seen)) > len(seen)
            seen += [entry.message.envelope.message_id or "" for entry in entries_of(frames)]
        return seen
