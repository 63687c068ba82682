"""`PostgresStorage`: all of one zone in one schema of a server, its artifacts included, written by one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Self

import orjson

from bsfg.artifacts import ArtifactStats, ArtifactStore, Collected, StoredArtifact, StoredContent, check_name
from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import BsfgError
from bsfg.ports import Capabilities, Clock
from bsfg.stores.postgres.database import Connection, Database, PostgresSettings
from bsfg.stores.postgres.frames import PostgresZone
from bsfg.stores.postgres.place import SIGNS
from bsfg.stores.shared.artifacts import SharedArtifacts, Upload, missing
from bsfg.stores.shared.keeper import ZoneNode
from bsfg.stores.shared.storage import FramedStorage

_NAME = "bucket, key, digest, size_bytes, media_type, created_unix_ms"
_PAGE_NAMES = 1_000
_REFERENCES = "references"


class PostgresArtifacts(SharedArtifacts):
    """The artifacts of a zone in its database."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__(clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes)
        self._database = database
        self.references = TableMemory(database, _REFERENCES)

    def _rows(self, asked: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return self._database.rows("reading artifacts", asked, values)

    def _named(self, bucket: str, key: str) -> StoredArtifact | None:
        rows = self._rows(f"SELECT {_NAME} FROM artifact_name WHERE bucket = %s AND key = %s", (bucket, key))
        return StoredArtifact(*rows[0]) if rows else None

    def _is_here(self, digest: str) -> bool:
        return bool(self._rows("SELECT 1 FROM artifact_content WHERE digest = %s", (digest,)))

    def _claim(self, digests: Sequence[str]) -> list[int | None]:
        asked = (
            "UPDATE artifact_content SET needed_unix_ms = greatest(needed_unix_ms, %s) WHERE digest = ANY(%s) "
            "RETURNING digest, size_bytes"
        )
        values = (self._clock.now_unix_ms(), sorted(set(digests)))
        rows = self._database.change("claiming artifacts", lambda it: it.execute(asked, values).fetchall())
        found: dict[str, int] = dict(rows)
        for digest in found:
            self._needed_ms[digest] = self._clock.monotonic_ms()
        return [found.get(digest) for digest in digests]

    def _upload_of(self, digest: str) -> Upload | None:
        rows = self._rows("SELECT upload FROM artifact_content WHERE digest = %s", (digest,))
        return Upload(int(rows[0][0])) if rows else None

    def _pieces_of(self, upload: Upload) -> Iterator[bytes]:
        number, asked = 0, "SELECT data FROM artifact_chunk WHERE upload = %s AND part = %s"
        while rows := self._rows(asked, (upload.name, number)):
            yield rows[0][0]
            number += 1

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")
        asked = (
            f"SELECT {_NAME} FROM artifact_name WHERE (bucket, key) > (%s, %s) AND (%s::text IS NULL OR bucket = %s) "
            "AND starts_with(key, %s) ORDER BY bucket, key LIMIT %s"
        )
        after = ("", "")
        while rows := await self._do(self._rows, asked, (*after, bucket, bucket, prefix, _PAGE_NAMES)):
            for row in rows:
                yield StoredArtifact(*row)
            after = rows[-1][:2]

    def _collect(self, referenced: AbstractSet[str], now_unix_ms: int, grace_ms: int) -> Collected:
        def change(connection: Connection) -> Collected:
            connection.execute(
                "UPDATE artifact_content SET needed_unix_ms = %s WHERE digest = ANY(%s) AND needed_unix_ms < %s",
                (now_unix_ms, sorted(referenced), now_unix_ms),
            )
            young = self._young(grace_ms)
            chosen = connection.execute(
                "SELECT digest, size_bytes FROM artifact_content WHERE %s - needed_unix_ms >= %s "
                "AND digest != ALL(%s) AND digest != ALL(%s) FOR UPDATE",
                (now_unix_ms, grace_ms, sorted(referenced), young),
            ).fetchall()
            gone = [digest for digest, _ in chosen]
            names = connection.execute("DELETE FROM artifact_name WHERE digest = ANY(%s)", (gone,)).rowcount
            connection.execute("DELETE FROM artifact_content WHERE digest = ANY(%s)", (gone,))
            with self._lock:
                in_use = list(self._in_use)
                connection.execute(
                    "DELETE FROM artifact_chunk WHERE upload != ALL(%s) "
                    "AND NOT EXISTS (SELECT FROM artifact_content c WHERE c.upload = artifact_chunk.upload)",
                    (in_use,),
                )
            return Collected(tuple(sorted(gone)), names, sum(size for _, size in chosen))

        return self._database.change("collecting artifacts", change)

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        asked = "SELECT count(*), coalesce(sum(size_bytes), 0)::bigint FROM artifact_content"
        ((count, used),) = await self._do(self._rows, asked)
        return ArtifactStats(count, used, self._capacity_bytes)

    def _used_bytes(self) -> int:
        ((used,),) = self._rows("SELECT coalesce(sum(size_bytes), 0)::bigint FROM artifact_content")
        return int(used)

    def _begin_upload(self) -> Upload:
        ((upload,),) = self._rows("SELECT nextval('artifact_upload')")
        return Upload(int(upload))

    def _write(self, upload: Upload, number: int, piece: bytes) -> None:
        row, asked = (
            (upload.name, number, piece),
            "INSERT INTO artifact_chunk VALUES (%s, %s, %b) ON CONFLICT DO NOTHING",
        )
        self._database.change("storing an artifact", lambda connection: connection.execute(asked, row))

    def _admit(self, upload: Upload, content: StoredContent) -> None:
        row = (content.digest, content.size_bytes, upload.name, self._clock.now_unix_ms())
        asked = (
            "INSERT INTO artifact_content VALUES (%s, %s, %s, %s) ON CONFLICT (digest) DO UPDATE "
            "SET upload = excluded.upload, size_bytes = excluded.size_bytes, "
            "needed_unix_ms = greatest(artifact_content.needed_unix_ms, excluded.needed_unix_ms)"
        )
        self._database.change("storing an artifact", lambda connection: connection.execute(asked, row))

    def _discard(self, upload: Upload) -> None:
        asked = "DELETE FROM artifact_chunk WHERE upload = %s"
        with suppress(BsfgError):
            self._database.change("undoing an upload", lambda connection: connection.execute(asked, (upload.name,)))

    def _bind(self, fresh: StoredArtifact) -> StoredArtifact:
        row = (fresh.bucket, fresh.key, fresh.digest, fresh.size_bytes, fresh.media_type, fresh.created_unix_ms)

        def change(connection: Connection) -> tuple[Any, ...] | None:
            here = "SELECT 1 FROM artifact_content WHERE digest = %s FOR SHARE"
            if connection.execute(here, (fresh.digest,)).fetchone() is None:
                raise missing(fresh.digest)
            asked = f"INSERT INTO artifact_name ({_NAME}) VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
            connection.execute(asked, row)
            asked = f"SELECT {_NAME} FROM artifact_name WHERE bucket = %s AND key = %s"
            return connection.execute(asked, row[:2]).fetchone()

        found = self._database.change("naming an artifact", change)
        if found is None:
            raise missing(fresh.digest)
        return StoredArtifact(*found)


class TableMemory:
    """A `bsfg.artifacts.ReferenceMemory` in a row of a table."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._name = database, name

    async def recall(self) -> bytes | None:
        """Give what was remembered last."""
        asked = "SELECT value FROM remembered WHERE name = %s"
        rows = await asyncio.to_thread(self._database.rows, "recalling references", asked, (self._name,))
        return rows[0][0] if rows else None

    async def remember(self, data: bytes) -> None:
        """Keep this instead."""
        asked = "INSERT INTO remembered VALUES (%s, %b) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        await asyncio.to_thread(
            self._database.change,
            "remembering references",
            lambda connection: connection.execute(asked, (self._name, data)),
        )


_PORT: type[ArtifactStore] = PostgresArtifacts


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

    def keep(self, values: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        """Replace some values in one transaction, and return when they are durable."""
        asked = "INSERT INTO state VALUES (%s, %s, %s) ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value"
        rows = [(*name, orjson.dumps(value).decode()) for name, value in values.items()]

        def change(connection: Connection) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(asked, rows)

        # Not for long: whoever holds a gate keeps everybody waiting meanwhile.
        self._database.change("keeping the state of the node", change, patience_seconds=STATE_PATIENCE_SECONDS)

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
