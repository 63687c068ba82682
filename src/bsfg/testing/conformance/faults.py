"""What holds when the medium is slow or breaks: nothing is visible early, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import pytest

from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown, StorageClosed, StorageFailed
from bsfg.ports import Buffer, Confirmation, Receipt, Result, Storage
from bsfg.testing.conformance.case import READER, Lane, Rig, StorageCase, drain, scenario
from bsfg.testing.facts import batch, key_of, messages

MediumFault = Literal["no_space", "sync_fails", "io_error"]


class HeldMediumContract(StorageCase):
    """Nothing is visible before it is durable, shown by a medium that can be made to wait."""

    @abstractmethod
    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        """Make everything that becomes durable wait, without blocking the event loop; give the function to go on."""

    @scenario
    async def test_nothing_is_visible_before_it_is_durable(self, rig: Rig) -> None:
        """While a write waits for the medium no reader sees it, and no repeat of it is answered."""
        for kind in Buffer:
            lane = await rig.lane(kind=kind)
            await lane.write(batch(2))
            release = self.hold_medium(rig.storage)
            try:
                writes = [asyncio.create_task(lane.write(batch(2, first=2))) for _ in range(3)]
                for _ in range(20):
                    await asyncio.sleep(0.001)
                    await self._check_unseen(lane)
                assert not any(write.done() for write in writes)
            finally:
                release()
            results = sorted([int((await write).results[0]) for write in writes])
            assert results == [Result.INSERTED, Result.ALREADY_EXISTS, Result.ALREADY_EXISTS]
            assert await lane.messages() == messages(4)

    async def _check_unseen(self, lane: Lane) -> None:
        assert (await lane.stats()).end == 2
        assert [frame.last for frame in await drain(lane.buffer.replay(0))][-1] == 1
        assert not await lane.buffer.wait_for(2, 0)
        if lane.buffer.buffer == Buffer.FORWARD:
            assert await lane.forward.get(key_of(messages(1, first=2)[0])) is None

    @scenario
    async def test_a_writer_that_gives_up_leaves_no_doubt(self, rig: Rig) -> None:
        """A write whose caller is cancelled is there as a whole or not at all, and a repeat settles it."""
        lane = await rig.lane()
        release = self.hold_medium(rig.storage)
        try:
            writing = asyncio.create_task(lane.write(batch(5)))
            await asyncio.sleep(0.001)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        finally:
            release()
        receipt = await lane.write(batch(6))
        assert receipt.offsets.tolist() == [0, 1, 2, 3, 4, 5]
        assert len(set(receipt.results.tolist()[:5])) == 1
        assert await lane.messages() == messages(6)


class BrokenMediumContract(StorageCase):
    """The errors of a medium that breaks; the tests run on the buffer that ``kind`` names."""

    @abstractmethod
    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        """Make the next attempt to make something durable fail, and only that one.

        ``no_space``: the medium is full. ``sync_fails``: all was written, but syncing it fails. ``io_error``: the
        medium does not take the bytes.
        """

    @scenario
    async def test_a_full_disk_stores_nothing(self, rig: Rig) -> None:
        """A write on a full disk leaves nothing, and the storage works again when there is space."""
        lane = await rig.lane()
        await lane.write(batch(3))
        before = await lane.stats()
        self.break_medium(rig.storage, "no_space")
        with pytest.raises(DiskFull):
            await lane.write(batch(4, first=1))
        assert await lane.stats() == before
        assert await lane.messages() == messages(3)
        assert (await lane.write(batch(2, first=3))).offsets.tolist() == [3, 4]
        lane = await rig.reopened()
        assert await lane.messages() == messages(5)

    @scenario
    async def test_a_failed_sync_closes_the_storage(self, rig: Rig) -> None:
        """When a sync fails, those who wait learn that the outcome is unknown, and nothing more is taken."""
        lane = await rig.lane()
        await lane.write(batch(3))
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.write(batch(3, first=3))
        with pytest.raises(StorageClosed):
            await lane.write(batch(3, first=3))
        with pytest.raises(StorageClosed):
            await drain(lane.buffer.replay(0))
        await rig.storage.close()

    @scenario
    async def test_a_repeat_after_a_failed_sync_is_safe(self, rig: Rig) -> None:
        """After reopening, a repeat with the same ids stores what is missing and nothing twice."""
        lane = await rig.lane()
        await lane.write(batch(3))
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.write(batch(5))
        lane = await rig.reopened()
        assert (await lane.messages())[:3] == messages(3)
        receipt = await lane.write(batch(5))
        assert receipt.results.tolist()[:3] == [Result.ALREADY_EXISTS] * 3
        found = {entry.offset: entry.message for entry in await lane.entries()}
        assert [found[offset] for offset in receipt.offsets.tolist()] == messages(5)
        assert len(found) == 5

    @scenario
    async def test_everybody_who_waits_learns_of_a_failed_sync(self, rig: Rig) -> None:
        """Of many writers in a failing sync each has a receipt, or an unknown outcome, or finds the storage closed."""
        lane = await rig.lane()
        await lane.write(batch(1))
        self.break_medium(rig.storage, "sync_fails")
        writes = [lane.write(batch(1, first=number)) for number in range(1, 12)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert any(isinstance(outcome, OutcomeUnknown) for outcome in outcomes)
        lane = await rig.reopened()
        known = await lane.messages()
        for number, outcome in enumerate(outcomes, 1):
            assert isinstance(outcome, (Receipt, OutcomeUnknown, StorageClosed))
            if isinstance(outcome, Receipt):
                assert messages(1, first=number)[0] in known
        await lane.write(batch(12))
        assert len(await lane.entries()) == 12

    @scenario
    async def test_an_input_output_error_loses_nothing_acknowledged(self, rig: Rig) -> None:
        """An input/output error is reported, what was acknowledged stays, and a repeat after reopening is safe."""
        lane = await rig.lane()
        await lane.write(batch(3))
        self.break_medium(rig.storage, "io_error")
        with pytest.raises(StorageFailed):
            await lane.write(batch(3, first=3))
        lane = await rig.reopened()
        assert (await lane.messages())[:3] == messages(3)
        await lane.write(batch(6))
        assert sorted(str(one) for one in await lane.messages()) == sorted(str(one) for one in messages(6))

    @scenario
    async def test_a_full_disk_moves_no_cursor(self, rig: Rig) -> None:
        """A confirmation that cannot be made durable is refused and changes nothing; it can be repeated."""
        lane = await rig.lane()
        await lane.write(batch(5))
        await lane.create_reader()
        await lane.confirm(1)
        self.break_medium(rig.storage, "no_space")
        with pytest.raises(DiskFull):
            await lane.confirm(3)
        assert (await rig.storage.cursors.checkpoint(READER)).committed == 1
        assert (await lane.confirm(3)).committed == 3
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint(READER)).committed == 3

    @scenario
    async def test_a_failed_sync_of_a_cursor_is_repeatable(self, rig: Rig) -> None:
        """After a failed sync a cursor stands where it stood or where it was moved to, and the repeat moves it."""
        lane = await rig.lane()
        await lane.write(batch(5))
        await lane.create_reader()
        await lane.confirm(1)
        self.break_medium(rig.storage, "sync_fails")
        with pytest.raises(OutcomeUnknown):
            await lane.confirm(3)
        with pytest.raises(StorageClosed):
            await lane.confirm(3)
        storage = await rig.reopen()
        assert (await storage.cursors.checkpoint(READER)).committed in (1, 3)
        assert (await storage.cursors.commit(READER, Confirmation(through=3))).committed == 3

    @scenario
    async def test_errors_are_of_one_family(self, rig: Rig) -> None:
        """Whatever breaks, the error has a code, a retry verdict and a hint."""
        for fault in get_args(MediumFault):
            await rig.open()
            lane = await rig.lane()
            self.break_medium(rig.storage, fault)
            with pytest.raises(BsfgError) as caught:
                await lane.write(batch(1))
            assert caught.value.code and caught.value.hint
