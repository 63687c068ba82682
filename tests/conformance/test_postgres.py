"""PostgreSQL keeps the contract of every port, on a real server that breaks on demand."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psycopg
from tests.conformance.functions import SealedByBlake3
from tests.servers import postgres

from bsfg.digest import Hasher
from bsfg.ports import Buffer, Clock, Storage
from bsfg.stores.postgres.database import PostgresSettings
from bsfg.stores.postgres.storage import PostgresStorage
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

_numbers = itertools.count(1)

FAULT = """
CREATE SEQUENCE {schema}.fault OWNED BY NONE;
ALTER SEQUENCE {schema}.fault OWNER TO {schema};
CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('{schema}.fault') = 1 THEN {what}; END IF;
    RETURN NEW;
END $$;
ALTER FUNCTION {schema}.fail() OWNER TO {schema};
CREATE CONSTRAINT TRIGGER fail AFTER UPDATE ON {schema}.buffer DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION {schema}.fail();
CREATE CONSTRAINT TRIGGER fail AFTER INSERT OR UPDATE ON {schema}.consumer DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION {schema}.fail();
"""
UNDO = (
    "DROP FUNCTION IF EXISTS {schema}.fail CASCADE; DROP SEQUENCE IF EXISTS {schema}.fault; ALTER ROLE {schema} LOGIN"
)


class PostgresCase(StorageCase):
    """A storage in a schema of its own, closed before it is opened again."""

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        name = f"z{os.getpid()}_{next(_numbers)}"
        settings = PostgresSettings(postgres().role(name), name, patience_seconds=0.3)
        return await PostgresStorage.open(settings, zone="plant", clock=clock, hasher=hasher)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(PostgresStorage, storage)
        await self.end(old)
        postgres().execute(UNDO.format(schema=old.database.settings.schema))
        return await PostgresStorage.open(old.database.settings, zone="plant", clock=old.clock, hasher=old.hasher)

    async def end(self, old: PostgresStorage) -> None:
        await old.close()

    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        """Lock the rows that every commit must change."""
        settings = cast(PostgresStorage, storage).database.settings
        holder = psycopg.connect(settings.dsn)
        holder.execute(f"SELECT 1 FROM {settings.schema}.buffer FOR UPDATE")
        return holder.close

    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        """Let the next commit of a buffer or a consumer fail in the server itself."""
        schema = cast(PostgresStorage, storage).database.settings.schema
        what = {
            "no_space": "RAISE EXCEPTION USING ERRCODE = 'disk_full'",
            "io_error": "RAISE EXCEPTION USING ERRCODE = 'io_error'",
            "sync_fails": "PERFORM pg_terminate_backend(pg_backend_pid())",
        }[fault]
        postgres().execute(FAULT.format(schema=schema, what=what))
        if fault == "sync_fails":
            # The connection ends in the middle of the commit, and no other one is to be had.
            postgres().execute(f"ALTER ROLE {schema} NOLOGIN")


class KilledCase(PostgresCase):
    """Every reopening is that of a node that was killed: its connections end, and it can say nothing more."""

    async def end(self, old: PostgresStorage) -> None:
        postgres().execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s",
            old.database.settings.schema,
        )
        await old.close()


class TestStoreBuffer(PostgresCase, StoreBufferContract):
    """The store buffer."""


class TestForwardBuffer(PostgresCase, ForwardBufferContract):
    """The forward buffer."""


class TestStoreBufferByBlake3(SealedByBlake3, PostgresCase, StoreBufferContract):
    """The store buffer of a zone that seals with BLAKE3."""


class TestCursors(PostgresCase, CursorTrackerContract):
    """The cursors."""


class TestStorage(PostgresCase, StorageContract):
    """The storage as a whole."""


class TestHeldMedium(PostgresCase, HeldMediumContract):
    """A server that takes its time."""


class TestSetsAside(PostgresCase, SetsAsideContract):
    """Facts set aside without being put."""

    kind = Buffer.FORWARD


class TestKilledForwardBuffer(KilledCase, ForwardBufferContract):
    """The forward buffer of a node that is killed at every reopening."""


class TestKilledCursors(KilledCase, CursorTrackerContract):
    """The cursors of a node that is killed at every reopening."""


class TestBrokenStore(PostgresCase, BrokenMediumContract):
    """A server that fails under a store buffer."""


class TestBrokenForward(PostgresCase, BrokenMediumContract):
    """A server that fails under a forward buffer."""

    kind = Buffer.FORWARD


class TestRandomOperations(KilledCase, RandomOperationsContract):
    """Random operations against the model."""
