"""The memory storage keeps the contract of every port."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.conformance.functions import SealedByBlake3
from tests.journey.zones import origin_span

from bsfg.digest import Hasher
from bsfg.errors import HasherMismatch
from bsfg.ports import Buffer, Clock, GapRecord, Storage
from bsfg.retention import GapReason
from bsfg.stores.memory import MemoryStorage
from bsfg.testing.conformance import (
    BrokenMediumContract,
    CursorTrackerContract,
    ForwardBufferContract,
    HeldMediumContract,
    MediumFault,
    RandomOperationsContract,
    SetsAsideContract,
    StorageCase,
    StorageContract,
    StoreBufferContract,
)
from bsfg.testing.facts import WeakHasher, batch


class MemoryCase(StorageCase):
    """A storage whose medium outlives it."""

    kept = False

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        return MemoryStorage(clock=clock, hasher=hasher)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(MemoryStorage, storage)
        return MemoryStorage(clock=old.clock, hasher=old.hasher, medium=old.medium)

    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        return cast(MemoryStorage, storage).medium.hold()

    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        cast(MemoryStorage, storage).medium.fail_next(fault, kept=self.kept)


class TestStoreBuffer(MemoryCase, StoreBufferContract):
    """The store buffer."""


class TestForwardBuffer(MemoryCase, ForwardBufferContract):
    """The forward buffer."""


@pytest.mark.parametrize("own", [False, True])
def test_records_of_gaps_do_not_gather_for_ever(own: bool) -> None:
    """Every turn of a link, and every removal, may add one: when they are many they are written anew, as their sets."""

    async def work() -> None:
        storage = MemoryStorage()
        forward = await storage.forward("operational")
        await forward.put_if_absent(batch(4_000), origin_span("plant", 0, 4_000))
        for at in range(0, 4_000, 2):
            await forward.record_gaps(
                [GapRecord(at, at, GapReason.SKIPPED, at, "not carried", None if own else "plant")]
            )
            assert len(storage.medium.buffers["operational", Buffer.FORWARD].gaps) < 600
        again = MemoryStorage(medium=storage.medium)
        assert (await (await again.forward("operational")).gap_sets())[0].ranges.offsets == 2_000

    asyncio.run(work())


class TestStoreBufferByBlake3(SealedByBlake3, MemoryCase, StoreBufferContract):
    """The store buffer of a zone that seals with BLAKE3."""


class TestForwardBufferByBlake3(SealedByBlake3, MemoryCase, ForwardBufferContract):
    """The forward buffer that takes what such a zone sealed."""


class TestCursors(MemoryCase, CursorTrackerContract):
    """The cursors."""


class TestStorage(MemoryCase, StorageContract):
    """The storage as a whole."""


class TestSetsAside(MemoryCase, SetsAsideContract):
    """Facts set aside without being put."""

    kind = Buffer.FORWARD


class TestRandomOperations(MemoryCase, RandomOperationsContract):
    """Random operations against the model."""

    seeds = range(20)


class TestHeldMedium(MemoryCase, HeldMediumContract):
    """A medium that waits."""


class TestBrokenMedium(MemoryCase, BrokenMediumContract):
    """A medium that breaks and loses what it could not sync."""


class TestBrokenMediumThatKept(MemoryCase, BrokenMediumContract):
    """A medium that breaks although it kept what it was given, under a forward buffer."""

    kind = Buffer.FORWARD
    kept = True


def test_a_medium_belongs_to_its_hasher() -> None:
    """What was written with one digest function is not opened with another."""
    medium = MemoryStorage().medium
    with pytest.raises(HasherMismatch):
        MemoryStorage(hasher=WeakHasher(), medium=medium)
