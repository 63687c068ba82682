"""The example of a backend in a package of its own, in SQLite, keeps the contract of every port."""

import asyncio
import itertools
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "bsfg-sqlite"))

from bsfg_sqlite import SqliteStorage, SqliteZone

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import StorageForeign, StorageTaken
from bsfg.ports import Buffer, Clock, Confirmation, ConsumerSpec, Storage, StorageRequest
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
from bsfg.testing.facts import batch

_numbers = itertools.count(1)


def zone_of(storage: Storage) -> SqliteZone:
    """Give what keeps the facts of a storage."""
    return cast(SqliteZone, cast(SqliteStorage, storage)._keeper)


async def opened(path: Path, *, clock: Clock, hasher: Hasher, zone: str = "plant") -> SqliteStorage:
    """Open a file."""
    return await SqliteStorage(SqliteZone(path), clock, hasher).begin(zone)


class SqliteCase(StorageCase):
    """A storage in a file, closed before it is opened again."""

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        return await opened(tmp_path / f"{next(_numbers)}.sqlite", clock=clock, hasher=hasher)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(SqliteStorage, storage)
        await self.end(old)
        return await opened(zone_of(old).path, clock=old.clock, hasher=old.hasher)

    async def end(self, old: SqliteStorage) -> None:
        await old.close()

    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        """Have somebody else write."""
        holder = sqlite3.connect(zone_of(storage).path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        return holder.close

    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        """Let the next commit fail as SQLite would say it: it has no disk of its own to break."""
        zone = zone_of(storage)
        assert zone._writer is not None
        zone._writer = cast(sqlite3.Connection, Failing(zone._writer, fault))


class Failing:
    """A connection that fails once: before anything is written, or with the commit of what was."""

    def __init__(self, connection: sqlite3.Connection, fault: MediumFault) -> None:
        self._connection, self._fault = connection, fault
        self._left = [fault]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, asked: str, values: Any = ()) -> sqlite3.Cursor:
        if asked == ("COMMIT" if self._fault == "sync_fails" else "BEGIN IMMEDIATE") and self._left:
            error = sqlite3.OperationalError(f"the disk says {self._left.pop()}")
            codes = {"no_space": sqlite3.SQLITE_FULL, "io_error": sqlite3.SQLITE_IOERR_WRITE}
            error.sqlite_errorcode = codes.get(self._fault, sqlite3.SQLITE_IOERR_FSYNC)
            raise error
        return self._connection.execute(asked, values)


class KilledCase(SqliteCase):
    """Every reopening is that of a node that was killed: nothing is closed, and the new one overtakes it."""

    async def end(self, old: SqliteStorage) -> None:
        zone_of(old)._writer = None


class TestStoreBuffer(SqliteCase, StoreBufferContract):
    """The store buffer."""


class TestForwardBuffer(SqliteCase, ForwardBufferContract):
    """The forward buffer."""


class TestCursors(SqliteCase, CursorTrackerContract):
    """The cursors."""


class TestStorage(SqliteCase, StorageContract):
    """The storage as a whole."""


class TestSetsAside(SqliteCase, SetsAsideContract):
    """Facts set aside without being put."""

    kind = Buffer.FORWARD


class TestHeldMedium(SqliteCase, HeldMediumContract):
    """A file that somebody else writes."""


class TestBrokenMedium(SqliteCase, BrokenMediumContract):
    """A disk that breaks."""


class TestKilledForwardBuffer(KilledCase, ForwardBufferContract):
    """The forward buffer of a node that is killed at every reopening."""


class TestRandomOperations(KilledCase, RandomOperationsContract):
    """Random operations against the model."""


def test_a_node_that_was_overtaken_writes_nothing(tmp_path: Path) -> None:
    """Whoever opens the file last is its writer; the one before changes nothing, and another zone has no place."""

    async def run() -> None:
        path, clock, hasher = tmp_path / "facts.sqlite", SystemClock(), Sha256()
        old = await opened(path, clock=clock, hasher=hasher)
        store = await old.store("operational")
        await store.append(batch(3))
        await old.cursors.create(ConsumerSpec("reader", "operational"))
        new = await opened(path, clock=clock, hasher=hasher)
        for write in (
            lambda: store.append(batch(3, first=3)),
            lambda: old.cursors.commit("reader", Confirmation(through=1)),
            lambda: store.set_aside(batch(1), "fact_expired"),
        ):
            with pytest.raises(StorageTaken):
                await write()
        assert (await (await new.store("operational")).append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
        await old.close()
        await new.close()
        with pytest.raises(StorageForeign):
            await opened(path, clock=clock, hasher=hasher, zone="enterprise")

    asyncio.run(run())


def test_a_node_opens_it_by_its_name(tmp_path: Path) -> None:
    """What the entry point names opens a storage from the request of a node."""

    async def run() -> None:
        from bsfg_sqlite import open_sqlite

        syncs: list[float] = []
        request = StorageRequest("plant", tmp_path, {"file": "zone.sqlite"}, SystemClock(), syncs.append)
        storage = await open_sqlite(request)
        await (await storage.store("operational")).append(batch(2))
        assert storage.capabilities.backend == "sqlite" and syncs
        await storage.close()
        assert (tmp_path / "zone.sqlite").exists()

    asyncio.run(run())
