"""`PostgresStorage`: all buffers and cursors of one zone in one schema of a server, written by one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import orjson

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import StorageClosed
from bsfg.frontier import Frontier
from bsfg.ports import Buffer, Capabilities, Clock, ConsumerSpec, StartAt, Storage
from bsfg.retention import Policy
from bsfg.rules import check_name
from bsfg.stores.postgres.artifacts import PostgresArtifacts
from bsfg.stores.postgres.buffer import PostgresForwardBuffer, PostgresStoreBuffer
from bsfg.stores.postgres.database import Connection, Database, PostgresSettings
from bsfg.stores.postgres.place import SIGNS, ZoneNode
from bsfg.stores.postgres.writer import PostgresWriter
from bsfg.stores.shared.committer import Workers
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, Resolve

STATE_PATIENCE_SECONDS = 2.0
WORKERS_MAX = 8
"""How many buffers are written at once; each takes a connection."""


_COLUMNS = (
    "name, stream, buffer, start, start_value, required, committed, ranges, log_id, created_unix_ms, retired_reason, "
    "peer_head"
)
_KEEP = f"""
INSERT INTO consumer ({_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (name) DO UPDATE SET committed = excluded.committed, ranges = excluded.ranges, log_id = excluded.log_id,
    retired_reason = excluded.retired_reason, peer_head = excluded.peer_head
"""


class PostgresCursors(Cursors):
    """The cursor tracker of a zone in PostgreSQL; concurrent commits share a transaction."""

    def __init__(self, database: Database, clock: Clock, resolve: Resolve) -> None:
        super().__init__(clock, resolve)
        self._database = database

    def open(self) -> None:
        """Read all positions and begin to accept changes."""
        asked = f"SELECT {_COLUMNS} FROM consumer"
        self.begin([_cursor(row) for row in self._database.rows("reading consumers", asked)])

    def keep(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write cursors in one transaction."""
        rows = [_row(cursor) for cursor in cursors]

        def change(connection: Connection) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(_KEEP, rows)

        self._database.change("keeping consumers", change)

    async def close(self) -> None:
        """Finish what is under way."""
        await self.end()


def _row(cursor: ConsumerCursor) -> tuple[object, ...]:
    spec, frontier = cursor.spec, cursor.frontier
    ranges = [edge for pair in frontier.ranges for edge in pair]
    return (
        spec.name, spec.stream, str(spec.buffer), str(spec.start), spec.start_value, spec.required,
        frontier.committed, ranges, cursor.log_id, cursor.created_unix_ms, cursor.retired_reason, cursor.peer_head,
    )  # fmt: skip


def _cursor(row: tuple[Any, ...]) -> ConsumerCursor:
    name, stream, buffer, start, start_value, required, committed, ranges, log_id, created_unix_ms, retired, head = row
    spec = ConsumerSpec(name, stream, Buffer(buffer), StartAt(start), start_value, required)
    frontier = Frontier(committed, list(zip(ranges[0::2], ranges[1::2], strict=True)))
    return ConsumerCursor(spec, frontier, log_id, created_unix_ms, retired, head, committed + 1)


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


class PostgresStorage:
    """The storage of a zone in PostgreSQL; open it with `PostgresStorage.open`."""

    capabilities = Capabilities("postgres", hash_chain=True, keeps_all=True)

    def __init__(self, database: Database, clock: Clock, hasher: Hasher) -> None:
        self.database, self.clock, self.hasher = database, clock, hasher
        self.cursors = PostgresCursors(database, clock, self._resolve)
        self._buffers: dict[tuple[str, Buffer], PostgresStoreBuffer | PostgresForwardBuffer] = {}
        self._opening = asyncio.Lock()
        self._workers = Workers("bsfg-writer", WORKERS_MAX)
        self._lost = asyncio.Event()
        self._closed = False

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
        database, hasher = Database(settings, on_sync), hasher or Sha256()
        storage, loop = cls(database, clock or SystemClock(), hasher), asyncio.get_running_loop()

        def lost() -> None:
            # The loop may have ended meanwhile, and whoever waited with it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(storage._lost.set)

        await asyncio.to_thread(database.open, zone, hasher.name, lost)
        await asyncio.to_thread(storage.cursors.open)
        return storage

    async def store(self, stream: str, policy: Policy | None = None) -> PostgresStoreBuffer:
        """Open the store buffer of a stream."""
        buffer = await self._open(stream, Buffer.STORE, policy)
        assert isinstance(buffer, PostgresStoreBuffer)
        return buffer

    async def forward(self, stream: str, policy: Policy | None = None) -> PostgresForwardBuffer:
        """Open the forward buffer of a stream."""
        buffer = await self._open(stream, Buffer.FORWARD, policy)
        assert isinstance(buffer, PostgresForwardBuffer)
        return buffer

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

    async def overtaken(self) -> None:
        """Wait until another node has the zone, or may have it; from then on nothing is written nor read here."""
        while not self._lost.is_set() and not self.database.is_silent:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.database.settings.takeover_seconds / SIGNS):
                    await self._lost.wait()
        self.database.give_up()

    async def streams(self) -> list[tuple[str, Buffer]]:
        """List the buffers that exist."""
        self._check_open()
        asked = "SELECT stream, kind FROM buffer ORDER BY 1, 2"
        rows = await asyncio.to_thread(self.database.rows, "listing buffers", asked)
        return [(stream, Buffer(kind)) for stream, kind in rows]

    async def close(self) -> None:
        """Finish what is under way and give the zone back."""
        if self._closed:
            return
        self._closed = True
        for buffer in self._buffers.values():
            await buffer.close()
        self._workers.close()
        await self.cursors.close()
        await asyncio.to_thread(self.database.close)

    async def _resolve(self, stream: str, buffer: Buffer) -> PostgresStoreBuffer | PostgresForwardBuffer:
        return await self._open(stream, buffer, None)

    async def _open(
        self, stream: str, buffer: Buffer, policy: Policy | None
    ) -> PostgresStoreBuffer | PostgresForwardBuffer:
        self._check_open()
        if (known := self._buffers.get((stream, buffer))) is not None:
            return known
        check_name("stream", stream)
        chosen = (policy or Policy()).checked()
        async with self._opening:
            known = self._buffers.get((stream, buffer))
            if known is None:
                writer = await asyncio.to_thread(PostgresWriter, self.database, stream, buffer, chosen, self.clock)
                frontier = lambda: self.cursors.required_frontier(stream, buffer)  # noqa: E731
                kind = PostgresStoreBuffer if buffer == Buffer.STORE else PostgresForwardBuffer
                known = self._buffers[stream, buffer] = kind(self.database, writer, frontier, self._workers)
            return known

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the storage is closed")


_PORT: type[Storage] = PostgresStorage
