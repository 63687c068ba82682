"""Artifacts in PostgreSQL: content in pieces of a mebibyte, known by its digest, with names beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from bsfg.artifacts import ArtifactStats, ArtifactStore, Collected, StoredArtifact, StoredContent, check_name
from bsfg.errors import BsfgError
from bsfg.ports import Clock
from bsfg.stores.postgres.database import Connection, Database
from bsfg.stores.shared.artifacts import SharedArtifacts, Upload, missing

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
