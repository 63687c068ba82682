"""The contract of `bsfg.ports.StoreBuffer`."""

from __future__ import annotations

from typing import ClassVar

import pytest

from bsfg.errors import TruncateRefused
from bsfg.ports import Buffer, ConsumerSpec, StartAt
from bsfg.testing.conformance.capacity import CapacityContract
from bsfg.testing.conformance.case import STREAM, Rig, scenario
from bsfg.testing.conformance.records import RecordsContract
from bsfg.testing.conformance.removing import RetentionContract, TruncationContract
from bsfg.testing.conformance.replaying import ReplayContract
from bsfg.testing.conformance.writing import WritingContract
from bsfg.testing.facts import altered, batch, messages


class StoreBufferContract(
    WritingContract, ReplayContract, TruncationContract, RetentionContract, CapacityContract, RecordsContract
):
    """Everything that a store buffer promises."""

    kind: ClassVar[Buffer] = Buffer.STORE

    @scenario
    async def test_the_frontier_is_that_of_the_slowest_required_consumer(self, rig: Rig) -> None:
        """The frontier is the lowest of the required consumers of this very buffer, -1 without one."""
        lane = await rig.lane()
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
    async def test_without_a_required_consumer_nothing_is_truncated(self, rig: Rig) -> None:
        """Before the first required consumer exists a store buffer keeps everything."""
        lane = await rig.lane()
        await lane.write(batch(3))
        await lane.create_reader("optional", required=False)
        await lane.confirm(name="optional")
        await lane.buffer.truncate_before(0)
        with pytest.raises(TruncateRefused):
            await lane.buffer.truncate_before(1)

    @scenario
    async def test_a_new_required_consumer_begins_behind_what_is_gone(self, rig: Rig) -> None:
        """A consumer created after a truncation begins at the oldest entry that is left."""
        lane = await rig.lane()
        await lane.write(batch(10))
        await lane.create_reader("first")
        await lane.confirm(name="first")
        await lane.buffer.truncate_before(6)
        state = await lane.storage.cursors.create(ConsumerSpec("second", STREAM, start=StartAt.EARLIEST))
        assert (state.checkpoint.committed, state.checkpoint.next_to_send) == (5, 6)
        assert await lane.store.frontier() == 5

    @scenario
    async def test_a_conflict_is_a_result_and_no_quarantine(self, rig: Rig) -> None:
        """The producer learns of its conflict from the receipt; nothing is put aside for it."""
        lane = await rig.lane()
        await lane.write(batch(2))
        await lane.write_messages(altered(messages(2)))
        assert await lane.buffer.quarantine() == []

    @scenario
    async def test_entries_have_no_origin(self, rig: Rig) -> None:
        """What this zone produced was pulled from nowhere."""
        lane = await rig.lane()
        await lane.write(batch(3))
        assert [entry.origin for entry in await lane.entries()] == [None] * 3
