"""The contract of `bsfg.ports.CursorTracker`: consumers, and what confirming promises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import ClassVar

import pytest

from bsfg.errors import (
    ConsumerExists,
    ConsumerRetired,
    ForeignLog,
    InvalidArgument,
    OffsetOutOfRange,
    TooManyRanges,
    UnknownConsumer,
)
from bsfg.fact import Key
from bsfg.frontier import MAX_OPEN_RANGES, Frontier
from bsfg.ports import Buffer, Checkpoint, Confirmation, ConsumerSpec, CursorTracker, StartAt
from bsfg.retention import GapReason
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.conformance.case import READER, STREAM, BufferUnderTest, Rig, StorageCase, scenario
from bsfg.testing.facts import batch, key_of, messages


class CommitContract(StorageCase):
    """Confirming: contiguous, durable, all or nothing. ``max_ranges`` is the limit of open ranges."""

    max_ranges: ClassVar[int] = MAX_OPEN_RANGES

    @scenario
    async def test_confirming_through_an_offset(self, rig: Rig) -> None:
        """Confirming is cumulative and durable, and a repeat or an older one is harmless."""
        lane = await self._lane(rig, 10)
        assert await lane.confirm(4) == Checkpoint(5, 4)
        for through in (4, 2, -1):
            assert await lane.confirm(through) == Checkpoint(5, 4)
        storage = await rig.reopen()
        assert await storage.cursors.checkpoint(READER) == Checkpoint(5, 4)
        assert await storage.cursors.commit(READER, Confirmation(through=3)) == Checkpoint(5, 4)
        assert await storage.cursors.commit(READER, Confirmation(through=9)) == Checkpoint(10, 9)

    @scenario
    async def test_the_frontier_stops_at_the_first_gap(self, rig: Rig) -> None:
        """Ranges beyond a gap are kept as islands, also across a restart, until the gap closes."""
        lane = await self._lane(rig, 20)
        cursors = lane.storage.cursors
        assert (await cursors.commit(READER, Confirmation(ranges=[(8, 9), (3, 4), (14, 14)]))).committed == -1
        assert (await cursors.commit(READER, Confirmation(ranges=[(0, 1), (5, 6)]))).committed == 1
        cursors = (await rig.reopen()).cursors
        assert (await cursors.consumer(READER)).ranges == ((3, 6), (8, 9), (14, 14))
        assert (await cursors.commit(READER, Confirmation(through=2))).committed == 6
        assert (await cursors.commit(READER, Confirmation(ranges=[(7, 7)]))).committed == 9
        assert (await cursors.consumer(READER)).ranges == ((14, 14),)

    @scenario
    async def test_random_confirmations_follow_the_frontier(self, rig: Rig) -> None:
        """Any sequence of confirmations, with restarts in between, gives what the pure frontier gives."""
        await self._lane(rig, 60)
        random, model = Random(5), Frontier()
        for step in range(120):
            first = random.randrange(60)
            ranges = [(first, min(59, first + random.randrange(3)))]
            through = random.randrange(60) if random.random() < 0.05 else None
            if through is not None:
                model.confirm_through(through)
            model.confirm(ranges)
            checkpoint = await rig.storage.cursors.commit(READER, Confirmation(through, ranges))
            assert checkpoint.committed == model.committed
            if step % 25 == 0:
                await rig.reopen()
            assert (await rig.storage.cursors.consumer(READER)).ranges == tuple(model.ranges)

    @scenario
    async def test_confirming_beyond_the_end_is_refused(self, rig: Rig) -> None:
        """Nothing that does not exist can be confirmed; the whole confirmation is refused."""
        lane = await self._lane(rig, 5)
        for confirmation in (
            Confirmation(through=5),
            Confirmation(ranges=[(0, 1), (4, 5)]),
            Confirmation(through=2, ranges=[(7, 9)]),
        ):
            with pytest.raises(OffsetOutOfRange):
                await lane.storage.cursors.commit(READER, confirmation)
        await self._check_untouched(rig)

    @scenario
    async def test_impossible_confirmations_are_refused(self, rig: Rig) -> None:
        """A range that is none, or a negative offset, refuses the whole confirmation."""
        lane = await self._lane(rig, 5)
        for confirmation in (
            Confirmation(through=-2),
            Confirmation(through=1, ranges=[(3, 2)]),
            Confirmation(ranges=[(0, 0), (-1, 1)]),
        ):
            with pytest.raises(InvalidArgument):
                await lane.storage.cursors.commit(READER, confirmation)
        await self._check_untouched(rig)

    @scenario
    async def test_a_position_of_another_history_is_refused(self, rig: Rig) -> None:
        """A confirmation that names another log is refused; one that names this log is taken."""
        lane = await self._lane(rig, 5)
        with pytest.raises(ForeignLog):
            await lane.storage.cursors.commit(READER, Confirmation(through=3, log_id="0" * 32))
        await self._check_untouched(rig)
        storage = await rig.reopen()
        confirmation = Confirmation(through=3, log_id=lane.buffer.log_id)
        assert (await storage.cursors.commit(READER, confirmation)).committed == 3

    @scenario
    async def test_too_many_open_ranges_are_refused(self, rig: Rig) -> None:
        """More islands than the limit are refused as a whole; as many as the limit are kept."""
        lane = await self._lane(rig, 2 * self.max_ranges + 4)
        cursors = lane.storage.cursors
        islands = [(2 * number + 1, 2 * number + 1) for number in range(1, self.max_ranges + 2)]
        with pytest.raises(TooManyRanges):
            await cursors.commit(READER, Confirmation(through=0, ranges=islands))
        await self._check_untouched(rig)
        await cursors.commit(READER, Confirmation(ranges=islands[:-1]))
        with pytest.raises(TooManyRanges):
            await cursors.commit(READER, Confirmation(ranges=islands[-1:]))
        assert (await cursors.consumer(READER)).ranges == tuple(islands[:-1])
        assert (await cursors.commit(READER, Confirmation(through=islands[3][1]))).committed == islands[3][1]

    @scenario
    async def test_the_peers_head_is_kept(self, rig: Rig) -> None:
        """The chain head that a peer sends with its confirmation is stored, and stays when the next has none."""
        lane = await self._lane(rig, 5)
        await lane.storage.cursors.commit(READER, Confirmation(through=1, peer_head=b"\x01" * 32))
        await lane.confirm(2)
        storage = await rig.reopen()
        assert (await storage.cursors.consumer(READER)).peer_head == b"\x01" * 32
        await storage.cursors.commit(READER, Confirmation(through=2, peer_head=b"\x02" * 32))
        storage = await rig.reopen()
        assert (await storage.cursors.consumer(READER)).peer_head == b"\x02" * 32

    @scenario
    async def test_confirming_one_entry(self, rig: Rig) -> None:
        """An entry is confirmed by its offset and its key, in any order."""
        lane = await self._lane(rig, 5)
        keys = [key_of(fact) for fact in messages(5)]
        cursors = lane.storage.cursors
        assert (await cursors.commit_one(READER, 1, keys[1])).committed == -1
        assert (await cursors.commit_one(READER, 0, keys[0])).committed == 1
        assert (await cursors.commit_one(READER, 0, keys[0])).committed == 1
        storage = await rig.reopen()
        assert (await storage.cursors.commit_one(READER, 2, keys[2])).committed == 2

    @scenario
    async def test_confirming_one_entry_with_another_key_is_refused(self, rig: Rig) -> None:
        """An offset that holds another key is not confirmed; nor is one beyond the end."""
        lane = await self._lane(rig, 5)
        keys = [key_of(fact) for fact in messages(6)]
        for key in (keys[1], keys[5], Key("idmz", keys[0].message_id)):
            with pytest.raises(InvalidArgument):
                await lane.storage.cursors.commit_one(READER, 0, key)
        with pytest.raises(OffsetOutOfRange):
            await lane.storage.cursors.commit_one(READER, 5, keys[5])
        with pytest.raises((InvalidArgument, OffsetOutOfRange)):
            await lane.storage.cursors.commit_one(READER, -1, keys[0])
        await self._check_untouched(rig)

    @scenario
    async def test_what_was_sent_is_noted_until_a_restart(self, rig: Rig) -> None:
        """The next offset to send follows what was served, never falls behind the frontier, and is not durable."""
        lane = await self._lane(rig, 10)
        cursors = lane.storage.cursors
        await cursors.sent(READER, 7)
        assert await cursors.checkpoint(READER) == Checkpoint(7, -1)
        assert await lane.confirm(2) == Checkpoint(7, 2)
        await cursors.sent(READER, 4)
        assert await cursors.checkpoint(READER) == Checkpoint(4, 2)
        await cursors.sent(READER, 0)
        assert await cursors.checkpoint(READER) == Checkpoint(3, 2)
        assert await lane.confirm(8) == Checkpoint(9, 8)
        await cursors.sent(READER, 10)
        storage = await rig.reopen()
        assert await storage.cursors.checkpoint(READER) == Checkpoint(9, 8)

    @scenario
    async def test_what_does_not_exist_was_not_sent(self, rig: Rig) -> None:
        """The next offset to send is at most the end."""
        lane = await self._lane(rig, 5)
        with pytest.raises(OffsetOutOfRange):
            await lane.storage.cursors.sent(READER, 6)
        with pytest.raises((InvalidArgument, OffsetOutOfRange)):
            await lane.storage.cursors.sent(READER, -1)
        await lane.storage.cursors.sent(READER, 5)

    @scenario
    async def test_concurrent_confirmations_are_all_kept(self, rig: Rig) -> None:
        """Confirmations that race lose nothing: together they confirm everything."""
        lane = await self._lane(rig, 40)
        offsets = list(range(40))
        Random(3).shuffle(offsets)
        cursors = lane.storage.cursors
        await asyncio.gather(*(cursors.commit(READER, Confirmation(ranges=[(one, one)])) for one in offsets))
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint(READER)).committed == 39

    @scenario
    async def test_consumers_are_apart(self, rig: Rig) -> None:
        """What one consumer confirms says nothing about another."""
        lane = await self._lane(rig, 5)
        await lane.create_reader("other", required=False)
        await lane.confirm(3)
        await lane.confirm(1, name="other")
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint("other")).committed == 1
        assert (await storage.cursors.checkpoint(READER)).committed == 3

    @scenario
    async def test_a_consumer_of_an_empty_buffer(self, rig: Rig) -> None:
        """A consumer may be there before the first fact; after a restart it still belongs to this history."""
        lane = await self._lane(rig, 0)
        assert await lane.confirm(-1) == Checkpoint(0, -1)
        with pytest.raises(OffsetOutOfRange):
            await lane.confirm(0)
        lane = await rig.reopened()
        await lane.write(batch(1))
        confirmation = Confirmation(through=0, log_id=lane.buffer.log_id)
        assert (await lane.storage.cursors.commit(READER, confirmation)).committed == 0

    async def _lane(self, rig: Rig, count: int) -> BufferUnderTest:
        lane = await rig.lane()
        if count:
            await lane.write(batch(count))
        await lane.create_reader()
        return lane

    async def _check_untouched(self, rig: Rig) -> None:
        state = await rig.storage.cursors.consumer(READER)
        assert (state.checkpoint.committed, state.ranges, state.peer_head) == (-1, (), None)


SPEC = ConsumerSpec(READER, STREAM)


class ConsumerContract(StorageCase):
    """Creating, describing and retiring consumers."""

    @scenario
    async def test_a_consumer_is_described_as_created(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A new consumer stands before the first entry, bound to its buffer's history, also after a restart."""
        created = await rig.storage.cursors.create(SPEC)
        assert (created.spec, created.checkpoint, created.ranges) == (SPEC, Checkpoint(0, -1), ())
        assert (created.log_id, created.created_unix_ms) == (lane.buffer.log_id, START_UNIX_MS)
        assert (created.retired_reason, created.peer_head) == (None, None)
        rig.clock.advance(10)
        storage = await rig.reopen()
        assert await storage.cursors.consumer(READER) == created
        assert await storage.cursors.consumers() == [created]

    @scenario
    async def test_creating_again_gives_what_is_there(self, rig: Rig) -> None:
        """An identical spec gives the consumer where it stands, after a restart too."""
        lane = await rig.lane()
        await lane.write(batch(5))
        await rig.storage.cursors.create(SPEC)
        await lane.confirm(3)
        async for lane in rig.across_restart():
            again = await lane.storage.cursors.create(SPEC)
            assert again.checkpoint.committed == 3
            assert again.created_unix_ms == START_UNIX_MS

    @scenario
    async def test_creating_otherwise_is_refused(self, rig: Rig) -> None:
        """A name that is taken with other settings is refused, and the consumer stays as it was."""
        await rig.lane()
        await rig.lane(stream="audit")
        await rig.lane(kind=Buffer.FORWARD)
        created = await rig.storage.cursors.create(SPEC)
        for other in (
            replace(SPEC, stream="audit"),
            replace(SPEC, buffer=Buffer.FORWARD),
            replace(SPEC, start=StartAt.LATEST),
            replace(SPEC, required=False),
        ):
            with pytest.raises(ConsumerExists):
                await rig.storage.cursors.create(other)
        assert await rig.storage.cursors.consumers() == [created]

    @scenario
    async def test_creating_races(self, rig: Rig) -> None:
        """Concurrent creations of one consumer make one."""
        await rig.lane()
        states = await asyncio.gather(*(rig.storage.cursors.create(SPEC) for _ in range(10)))
        assert states == [states[0]] * 10
        assert len(await rig.storage.cursors.consumers()) == 1

    @scenario
    async def test_names_are_checked(self, rig: Rig) -> None:
        """A consumer needs a name that is one."""
        await rig.lane()
        for name in ("", "a/b", "a\nb", "x" * 100, "../reader"):
            with pytest.raises(InvalidArgument):
                await rig.storage.cursors.create(replace(SPEC, name=name))
        assert await rig.storage.cursors.consumers() == []

    @scenario
    async def test_consumers_are_listed_by_name(self, rig: Rig) -> None:
        """All consumers are listed in the order of their names, those of every buffer together."""
        await rig.lane()
        await rig.lane(kind=Buffer.FORWARD, stream="audit")
        for name in ("zeta", "alpha", "mid"):
            await rig.storage.cursors.create(replace(SPEC, name=name))
        await rig.storage.cursors.create(ConsumerSpec("beta", "audit", Buffer.FORWARD))
        storage = await rig.reopen()
        assert [state.spec.name for state in await storage.cursors.consumers()] == ["alpha", "beta", "mid", "zeta"]

    @scenario
    async def test_unknown_consumers(self, rig: Rig) -> None:
        """Whatever is asked about a consumer that does not exist is refused."""
        await rig.lane()
        cursors = rig.storage.cursors
        for call in (
            lambda: cursors.consumer("nobody"),
            lambda: cursors.checkpoint("nobody"),
            lambda: cursors.sent("nobody", 0),
            lambda: cursors.commit("nobody", Confirmation(through=-1)),
            lambda: cursors.commit_one("nobody", 0, Key("plant", "a")),
            lambda: cursors.retire("nobody", "gone"),
        ):
            with pytest.raises(UnknownConsumer):
                await call()

    @scenario
    async def test_a_reason_is_words(self, rig: Rig) -> None:
        """Without words, or with control characters, a reason is refused, and the consumer stays as it was."""
        await rig.lane()
        await rig.storage.cursors.create(SPEC)
        for reason in (" ", "scrapped\x00", "scrapped \x1b[2J"):
            with pytest.raises(InvalidArgument):
                await rig.storage.cursors.retire(READER, reason)
        assert (await rig.storage.cursors.consumer(READER)).retired_reason is None

    @scenario
    async def test_start_positions(self, rig: Rig) -> None:
        """A consumer begins at the earliest or latest entry, at an offset, or at a time."""
        lane = await self._aged(rig)
        t0 = START_UNIX_MS
        for number, (start, value, expected) in enumerate(
            [
                (StartAt.EARLIEST, 0, 4),
                (StartAt.LATEST, 0, 10),
                (StartAt.OFFSET, 7, 7),
                (StartAt.OFFSET, 10, 10),
                (StartAt.OFFSET, 1, 1),
                (StartAt.TIME, t0 + 30_000, 6),
                (StartAt.TIME, t0 + 30_001, 8),
                (StartAt.TIME, t0 + 40_001, 10),
                (StartAt.TIME, 0, 4),
            ]
        ):
            spec = ConsumerSpec(f"c{number}", STREAM, lane.buffer.buffer, start, value)
            state = await rig.storage.cursors.create(spec)
            assert state.checkpoint == Checkpoint(expected, expected - 1), spec
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint("c5")).committed == 5

    @scenario
    async def test_impossible_start_positions(self, rig: Rig) -> None:
        """A start beyond the end or below zero is refused and makes no consumer."""
        await self._aged(rig)
        with pytest.raises(OffsetOutOfRange):
            await rig.storage.cursors.create(replace(SPEC, name="far", start=StartAt.OFFSET, start_value=11))
        with pytest.raises((InvalidArgument, OffsetOutOfRange)):
            await rig.storage.cursors.create(replace(SPEC, name="low", start=StartAt.OFFSET, start_value=-1))
        assert [state.spec.name for state in await rig.storage.cursors.consumers()] == [READER]

    async def _aged(self, rig: Rig) -> BufferUnderTest:
        """Write ten facts in five batches, ten seconds apart, and truncate four."""
        lane = await rig.lane()
        for number in range(5):
            await lane.write(batch(2, first=2 * number))
            rig.clock.advance(10)
        await rig.storage.cursors.create(SPEC)
        await lane.confirm()
        await lane.buffer.truncate_before(4)
        return lane

    @scenario
    async def test_retiring_records_what_was_not_confirmed(self, rig: Rig) -> None:
        """Retiring gives a gap record for each missing range, durable in the buffer, and frees the frontier."""
        lane = await rig.lane()
        await lane.write(batch(10))
        await lane.create_reader()
        await rig.storage.cursors.commit(READER, Confirmation(through=2, ranges=[(5, 6)]))
        rig.clock.advance(30)
        gaps = await rig.storage.cursors.retire(READER, "line scrapped")
        assert [(gap.first, gap.last) for gap in gaps] == [(3, 4), (7, 9)]
        assert {(gap.reason, gap.at_unix_ms, gap.origin_zone) for gap in gaps} == {
            (GapReason.RETIRED, rig.clock.now_unix_ms(), None)
        }
        assert all("line scrapped" in gap.detail for gap in gaps)
        async for lane in rig.across_restart():
            assert await lane.gaps() == gaps
            state = await lane.storage.cursors.consumer(READER)
            assert (state.retired_reason, state.checkpoint.committed) == ("line scrapped", 2)
            assert [one.spec.name for one in await lane.storage.cursors.consumers()] == [READER]
            assert await lane.messages() == messages(10)

    @scenario
    async def test_retiring_frees_the_frontier(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A retired consumer holds nothing back any longer."""
        await lane.write(batch(10))
        await lane.create_reader()
        await lane.create_reader("lost")
        await lane.confirm()
        await rig.storage.cursors.retire("lost", "never came back")
        await lane.buffer.truncate_before(10)

    @scenario
    async def test_a_consumer_that_confirmed_all_leaves_no_gap(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Retiring a consumer that missed nothing records nothing."""
        await lane.write(batch(3))
        await lane.create_reader()
        await lane.confirm()
        assert await rig.storage.cursors.retire(READER, "done") == []
        assert await lane.gaps() == []

    @scenario
    async def test_a_retired_consumer_is_refused(self, rig: Rig) -> None:
        """A retired consumer takes no confirmation and cannot be created or retired again, after a restart too."""
        lane = await rig.lane()
        await lane.write(batch(3))
        await lane.create_reader()
        await rig.storage.cursors.retire(READER, "gone")
        async for lane in rig.across_restart():
            for call in _changes(lane.storage.cursors):
                with pytest.raises(ConsumerRetired):
                    await call()
            assert (await lane.storage.cursors.consumer(READER)).checkpoint.committed == -1


def _changes(cursors: CursorTracker) -> list[Callable[[], Awaitable[object]]]:
    """List what would change the reader."""
    return [
        lambda: cursors.commit(READER, Confirmation(through=1)),
        lambda: cursors.commit_one(READER, 0, key_of(messages(1)[0])),
        lambda: cursors.sent(READER, 1),
        lambda: cursors.retire(READER, "again"),
        lambda: cursors.create(SPEC),
    ]


class CursorTrackerContract(ConsumerContract, CommitContract):
    """Everything that a cursor tracker promises."""
