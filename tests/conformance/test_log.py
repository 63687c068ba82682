"""The embedded log keeps the contract of every port, on a real folder and on a disk that breaks on demand."""

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from tests.conformance.functions import SealedByBlake3

from bsfg.digest import Blake3, Hasher, Sha256
from bsfg.ports import Buffer, Clock, Confirmation, ConsumerSpec, Result, Storage
from bsfg.stores.log.files import DiskFile, DiskFiles, Files
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
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
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import altered, messages, sealed

OPTIONS = LogOptions(segment_bytes=65_536, index_run_keys=64)


class PatientFiles(DiskFiles):
    """A folder whose files can be made to wait before they are durable."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def _patient(self, file: DiskFile) -> DiskFile:
        sync = file.sync

        def wait_and_sync() -> None:
            self.gate.wait()
            sync()

        file.sync = wait_and_sync  # type: ignore[method-assign]
        return file

    def create(self, path: str) -> DiskFile:
        """Make a file that waits."""
        return self._patient(super().create(path))

    def open_append(self, path: str) -> DiskFile:
        """Open a file that waits."""
        return self._patient(super().open_append(path))


class FolderCase(StorageCase):
    """The log in a real folder."""

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        return await LogStorage.open(PatientFiles(tmp_path), clock=clock, hasher=hasher, options=OPTIONS)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(LogStorage, storage)
        await old.close()
        return await LogStorage.open(old.files, clock=old.clock, hasher=old.hasher, options=OPTIONS)

    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        gate = cast(PatientFiles, cast(LogStorage, storage).files).gate
        gate.clear()
        return gate.set


class SimulatedCase(StorageCase):
    """The log on a simulated disk; every reopening is that of a process that was killed."""

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        return await LogStorage.open(cast(Files, SimulatedDisk()), clock=clock, hasher=hasher, options=OPTIONS)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(LogStorage, storage)
        disk = cast(Files, cast(SimulatedDisk, old.files).killed())
        return await LogStorage.open(disk, clock=old.clock, hasher=old.hasher, options=OPTIONS)

    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        disk = cast(SimulatedDisk, cast(LogStorage, storage).files)
        if fault == "sync_fails":
            disk.fail("sync")
        else:
            disk.fail("write", error=errno.ENOSPC if fault == "no_space" else errno.EIO)


class TestStoreBuffer(FolderCase, StoreBufferContract):
    """The store buffer in a folder."""


class TestForwardBuffer(FolderCase, ForwardBufferContract):
    """The forward buffer in a folder."""


class TestStoreBufferByBlake3(SealedByBlake3, FolderCase, StoreBufferContract):
    """The store buffer of a zone that seals with BLAKE3."""


class TestForwardBufferByBlake3(SealedByBlake3, FolderCase, ForwardBufferContract):
    """The forward buffer that takes what such a zone sealed."""


class TestCursors(FolderCase, CursorTrackerContract):
    """The cursors in a folder."""


class TestStorage(FolderCase, StorageContract):
    """The storage as a whole in a folder."""


class TestHeldMedium(FolderCase, HeldMediumContract):
    """A disk that takes its time."""


class TestSetsAside(FolderCase, SetsAsideContract):
    """Facts set aside without being put."""

    kind = Buffer.FORWARD


class TestKilledStoreBuffer(SimulatedCase, StoreBufferContract):
    """The store buffer of a process that is killed at every reopening."""


class TestKilledForwardBuffer(SimulatedCase, ForwardBufferContract):
    """The forward buffer of a process that is killed at every reopening."""


class TestKilledCursors(SimulatedCase, CursorTrackerContract):
    """The cursors of a process that is killed at every reopening."""


class TestBrokenStore(SimulatedCase, BrokenMediumContract):
    """A disk that breaks under a store buffer."""


class TestBrokenForward(SimulatedCase, BrokenMediumContract):
    """A disk that breaks under a forward buffer."""

    kind = Buffer.FORWARD


class TestRandomOperations(SimulatedCase, RandomOperationsContract):
    """Random operations against the model."""

    seeds = range(20)


async def _other_function(tmp_path: Path) -> None:
    storage = await LogStorage.open(tmp_path, options=OPTIONS)
    store = await storage.store("operational")
    for first in range(0, 1000, 100):
        await store.append(sealed(messages(100, first=first)))
    await storage.cursors.create(ConsumerSpec("reader", "operational", Buffer.STORE))
    await storage.cursors.commit("reader", Confirmation(through=999))
    await store.truncate_before(900)
    for hasher in (Blake3(), Sha256()):
        again = await store.append(sealed(messages(1000), hasher=hasher))
        assert set(again.results.tolist()) == {Result.ALREADY_EXISTS}
        other = await store.append(sealed(altered(messages(1000)), hasher=hasher))
        assert set(other.results.tolist()) == {Result.CONFLICT}
    await storage.close()


def test_a_key_is_known_by_any_function(tmp_path: Path) -> None:
    """Of what was truncated only key and digest are left; a repeat that was sealed otherwise is still recognised."""
    asyncio.run(_other_function(tmp_path))
    assert list(tmp_path.glob("**/*.keys"))
