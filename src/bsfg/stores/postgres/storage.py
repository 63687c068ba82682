"""`PostgresStorage`: all buffers and cursors of one zone in one schema of a server, written by one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import orjson

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.ports import Capabilities, Clock
from bsfg.stores.postgres.artifacts import PostgresArtifacts
from bsfg.stores.postgres.database import Database, PostgresSettings
from bsfg.stores.postgres.frames import PostgresZone
from bsfg.stores.postgres.place import SIGNS
from bsfg.stores.shared.keeper import ZoneNode
from bsfg.stores.shared.storage import FramedStorage

STATE_PATIENCE_SECONDS = 2.0


class PostgresState:
    """The small values that a node keeps beside its buffers, in a table; see `bsfg.node.state.StateKeeper`."""

    problems: Sequence[str] = ()
    is_lost = False

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Read all values, by kind and name."""
        rows = self._database.rows("reading the state of the node", "SELECT kind, name, value FROM state")
        return {(kind, name): orjson.loads(value) for kind, name, value in rows}

    def keep(self, kind: str, name: str, value: dict[str, Any]) -> None:
        """Replace a value and return when it is durable."""
        asked = "INSERT INTO state VALUES (%s, %s, %s) ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value"
        row = (kind, name, orjson.dumps(value).decode())
        # Not for long: whoever holds a gate keeps everybody waiting meanwhile.
        self._database.change(
            "keeping the state of the node",
            lambda connection: connection.execute(asked, row),
            patience_seconds=STATE_PATIENCE_SECONDS,
        )

    def close(self) -> None:
        """The connections are the storage's."""


class PostgresStorage(FramedStorage):
    """The storage of a zone in PostgreSQL; open it with `PostgresStorage.open`."""

    capabilities = Capabilities("postgres", hash_chain=True, keeps_all=True)

    def __init__(self, database: Database, clock: Clock, hasher: Hasher) -> None:
        super().__init__(PostgresZone(database), clock, hasher)
        self.database = database
        self._lost = asyncio.Event()

    @classmethod
    async def open(
        cls,
        settings: PostgresSettings,
        *,
        zone: str,
        clock: Clock | None = None,
        hasher: Hasher | None = None,
        on_sync: Callable[[float], None] = lambda seconds: None,
    ) -> Self:
        """Open the tables of a zone as its one writer, making them when there are none."""
        storage = cls(Database(settings, on_sync), clock or SystemClock(), hasher or Sha256())
        loop = asyncio.get_running_loop()

        def lost() -> None:
            # The loop may have ended meanwhile, and whoever waited with it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(storage._lost.set)

        storage.database.on_lost = lost
        return await storage.begin(zone)

    def artifacts(self, *, max_artifact_bytes: int | None, capacity_bytes: int | None) -> PostgresArtifacts:
        """Give the store of the zone's artifacts, in the same tables."""
        return PostgresArtifacts(
            self.database, self.clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes
        )

    def state(self) -> PostgresState:
        """Give what keeps the node's own values, in the same tables."""
        return PostgresState(self.database)

    def nodes(self) -> Sequence[ZoneNode]:
        """Give the nodes of the zone that run, the active one first."""
        return self.database.nodes

    async def end_waiting(self) -> None:
        """Have nobody wait for the server any more: a commit may wait for a standby that never comes."""
        self.database.end_waiting()

    async def overtaken(self) -> None:
        """Wait until another node has the zone, or may have it; from then on nothing is written nor read here."""
        while not self._lost.is_set() and not self.database.is_silent:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.database.settings.takeover_seconds / SIGNS):
                    await self._lost.wait()
        self.database.give_up()
