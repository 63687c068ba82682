"""What consumers promise: created once, described, retired with a record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from bsfg.errors import ConsumerExists, ConsumerRetired, InvalidArgument, OffsetOutOfRange, UnknownConsumer
from bsfg.fact import Key
from bsfg.ports import Buffer, Checkpoint, Confirmation, ConsumerSpec, CursorTracker, StartAt
from bsfg.retention import GapReason
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.conformance.case import READER, STREAM, Lane, Rig, StorageCase, scenario
from bsfg.testing.facts import batch, key_of, messages

SPEC = ConsumerSpec(READER, STREAM)


class ConsumerContract(StorageCase):
    """Creating, describing and retiring consumers."""

    @scenario
    async def test_a_consumer_is_described_as_created(self, rig: Rig) -> None:
        """A new consumer stands before the first entry, bound to its buffer's history, also after a restart."""
        lane = await rig.lane()
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

    async def _aged(self, rig: Rig) -> Lane:
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
    async def test_retiring_frees_the_frontier(self, rig: Rig) -> None:
        """A retired consumer holds nothing back any longer."""
        lane = await rig.lane()
        await lane.write(batch(10))
        await lane.create_reader()
        await lane.create_reader("lost")
        await lane.confirm()
        await rig.storage.cursors.retire("lost", "never came back")
        await lane.buffer.truncate_before(10)

    @scenario
    async def test_a_consumer_that_confirmed_all_leaves_no_gap(self, rig: Rig) -> None:
        """Retiring a consumer that missed nothing records nothing."""
        lane = await rig.lane()
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
