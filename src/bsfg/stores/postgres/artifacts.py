"""Artifacts in PostgreSQL: content in pieces of a mebibyte, known by its digest, with names beside it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from bsfg.artifacts import (
    DEFAULT_MEDIA_TYPE,
    ArtifactStats,
    ArtifactStore,
    Bytes,
    Collected,
    StoredArtifact,
    StoredContent,
    check_digest,
    check_media_type,
    check_name,
)
from bsfg.errors import (
    ArtifactConflict,
    ArtifactMissing,
    ArtifactStoreFull,
    BsfgError,
    DigestMismatch,
    InvalidArgument,
    StorageClosed,
)
from bsfg.ports import Clock
from bsfg.stores.postgres.database import Connection, Database
from bsfg.stores.shared.intake import Announced, ContentIntake, closing

_NAME = "bucket, key, digest, size_bytes, media_type, created_unix_ms"
_PAGE_NAMES = 1_000
_REFERENCES = "references"
Found = TypeVar("Found")


class PostgresArtifacts:
    """The artifacts of a zone in its database; it shares connections and fence with the zone's storage."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self._database, self._clock = database, clock
        self._max_bytes, self._capacity_bytes = max_artifact_bytes, capacity_bytes
        self._reserved_bytes = 0
        self._counting = threading.Lock()
        self._needed_ms: dict[str, int] = {}
        self._in_use: Counter[int] = Counter()
        """Uploads whose pieces somebody writes or reads: a collection leaves them for the next one."""
        self._closed = False
        self.references = TableMemory(database, _REFERENCES)

    async def put(
        self,
        bucket: str,
        key: str,
        content: AsyncIterable[Bytes],
        *,
        media_type: str = DEFAULT_MEDIA_TYPE,
        digest: str | None = None,
        size_bytes: int | None = None,
    ) -> StoredArtifact:
        """Store content under a name."""
        async with closing(content) as pieces:
            check_name(bucket, key)
            check_media_type(media_type)
            announced = Announced(digest, size_bytes)
            announced.check(self._max_bytes)
            if digest is not None and (existing := await self.stat(bucket, key)) is not None:
                _check_same(existing, digest)
            stored = await self._add(pieces, announced)
            return await self._do(self._bind, bucket, key, stored, media_type)

    async def add(
        self, content: AsyncIterable[Bytes], *, digest: str | None = None, size_bytes: int | None = None
    ) -> StoredContent:
        """Store content without a name."""
        async with closing(content) as pieces:
            return await self._add(pieces, Announced(digest, size_bytes))

    async def link(self, bucket: str, key: str, digest: str, *, media_type: str = DEFAULT_MEDIA_TYPE) -> StoredArtifact:
        """Give a name to content that is here."""
        check_name(bucket, key)
        check_media_type(media_type)
        (size,) = await self.claim([digest])
        if size is None:
            raise _missing(digest)
        return await self._do(self._bind, bucket, key, StoredContent(digest, size), media_type)

    async def stat(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for."""
        check_name(bucket, key)
        asked = f"SELECT {_NAME} FROM artifact_name WHERE bucket = %s AND key = %s"
        rows = await self._rows(asked, (bucket, key))
        return StoredArtifact(*rows[0]) if rows else None

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""
        check_digest(digest)
        return bool(await self._rows("SELECT 1 FROM artifact_content WHERE digest = %s", (digest,)))

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""
        for digest in digests:
            check_digest(digest)
        asked = (
            "UPDATE artifact_content SET needed_unix_ms = greatest(needed_unix_ms, %s) WHERE digest = ANY(%s) "
            "RETURNING digest, size_bytes"
        )
        values = (self._clock.now_unix_ms(), sorted(set(digests)))
        rows = await self._change("claiming artifacts", lambda it: it.execute(asked, values).fetchall())
        found: dict[str, int] = dict(rows)
        for digest in found:
            self._needed_ms[digest] = self._clock.monotonic_ms()
        return [found.get(digest) for digest in digests]

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content piece by piece, the last one when the digest of the whole is right."""
        check_digest(digest)
        upload = await self._do(self._begin_reading, digest)
        if upload is None:
            raise _missing(digest)
        sha256, held, part = hashlib.sha256(), b"", 0
        try:
            asked = "SELECT data FROM artifact_chunk WHERE upload = %s AND part = %s"
            while rows := await self._rows(asked, (upload, part)):
                if held:
                    yield held
                held, part = rows[0][0], part + 1
                sha256.update(held)
            if (found := f"sha256:{sha256.hexdigest()}") != digest:
                hint = "The copy in this zone is damaged: upload it again, or restore it from another zone."
                raise DigestMismatch(f"the content stored as {digest} has the digest {found}", hint=hint, digest=found)
            if held:
                yield held
        finally:
            self._let_go(upload)

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")
        asked = (
            f"SELECT {_NAME} FROM artifact_name WHERE (bucket, key) > (%s, %s) AND (%s::text IS NULL OR bucket = %s) "
            "AND starts_with(key, %s) ORDER BY bucket, key LIMIT %s"
        )
        after = ("", "")
        while rows := await self._rows(asked, (*after, bucket, bucket, prefix, _PAGE_NAMES)):
            for row in rows:
                yield StoredArtifact(*row)
            after = rows[-1][:2]

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove orphans, and what uploads that broke off have left."""
        if grace_seconds < 0:
            raise InvalidArgument(f"grace_seconds {grace_seconds} is negative")
        grace_ms = int(grace_seconds * 1000)

        def change(connection: Connection) -> Collected:
            connection.execute(
                "UPDATE artifact_content SET needed_unix_ms = %s WHERE digest = ANY(%s) AND needed_unix_ms < %s",
                (now_unix_ms, sorted(referenced), now_unix_ms),
            )
            young = [d for d, at in list(self._needed_ms.items()) if self._clock.monotonic_ms() - at < grace_ms]
            chosen = connection.execute(
                "SELECT digest, size_bytes FROM artifact_content WHERE %s - needed_unix_ms >= %s "
                "AND digest != ALL(%s) AND digest != ALL(%s) FOR UPDATE",
                (now_unix_ms, grace_ms, sorted(referenced), young),
            ).fetchall()
            gone = [digest for digest, _ in chosen]
            names = connection.execute("DELETE FROM artifact_name WHERE digest = ANY(%s)", (gone,)).rowcount
            connection.execute("DELETE FROM artifact_content WHERE digest = ANY(%s)", (gone,))
            with self._counting:
                in_use = list(self._in_use)
                connection.execute(
                    "DELETE FROM artifact_chunk WHERE upload != ALL(%s) "
                    "AND NOT EXISTS (SELECT FROM artifact_content c WHERE c.upload = artifact_chunk.upload)",
                    (in_use,),
                )
            return Collected(tuple(sorted(gone)), names, sum(size for _, size in chosen))

        return await self._change("collecting artifacts", change)

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        ((count, used),) = await self._rows(
            "SELECT count(*), coalesce(sum(size_bytes), 0)::bigint FROM artifact_content"
        )
        return ArtifactStats(count, used, self._capacity_bytes)

    async def close(self) -> None:
        """Break off uploads, and refuse everything from now on; the connections are the storage's."""
        self._closed = True

    # Uploads.

    async def _add(self, pieces: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        self._check_open()
        intake = ContentIntake(announced, self._max_bytes)
        is_here = announced.digest is not None and await self.exists(announced.digest)
        upload, part, reserved = await self._do(self._begin_upload), 0, 0
        try:
            async for piece in pieces:
                intake.count(piece)
                if not is_here:
                    reserved += await self._do(self._reserve, len(piece))
                await self._do(self._write, upload, part, piece, intake)
                part += 1
            content = intake.finish()
            await self._do(self._admit, upload, content)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._discard, upload))
            raise
        finally:
            with self._counting:
                self._reserved_bytes -= reserved
            self._let_go(upload)
        return content

    def _begin_upload(self) -> int:
        ((upload,),) = self._database.rows("storing an artifact", "SELECT nextval('artifact_upload')")
        with self._counting:
            self._in_use[upload] += 1
        return int(upload)

    def _begin_reading(self, digest: str) -> int | None:
        with self._counting:
            asked = "SELECT upload FROM artifact_content WHERE digest = %s"
            rows = self._database.rows("reading an artifact", asked, (digest,))
            if rows:
                self._in_use[rows[0][0]] += 1
            return int(rows[0][0]) if rows else None

    def _let_go(self, upload: int) -> None:
        with self._counting:
            self._in_use[upload] -= 1
            if not self._in_use[upload]:
                del self._in_use[upload]

    def _reserve(self, size_bytes: int) -> int:
        if self._capacity_bytes is None:
            return 0
        asked = "SELECT coalesce(sum(size_bytes), 0)::bigint FROM artifact_content"
        with self._counting:
            ((used,),) = self._database.rows("storing an artifact", asked)
            taken = used + self._reserved_bytes
            if taken + size_bytes > self._capacity_bytes:
                raise ArtifactStoreFull(f"the store holds {taken} of {self._capacity_bytes} bytes")
            self._reserved_bytes += size_bytes
        return size_bytes

    def _write(self, upload: int, part: int, piece: bytes, intake: ContentIntake) -> None:
        intake.digest(piece)
        asked = "INSERT INTO artifact_chunk VALUES (%s, %s, %b) ON CONFLICT DO NOTHING"
        self._database.change(
            "storing an artifact", lambda connection: connection.execute(asked, (upload, part, piece))
        )

    def _admit(self, upload: int, content: StoredContent) -> None:
        """Let an upload be the content with its digest, in the place of a copy that may be damaged."""
        now = self._clock.now_unix_ms()
        self._needed_ms[content.digest] = self._clock.monotonic_ms()
        self._database.change(
            "storing an artifact",
            lambda connection: connection.execute(
                "INSERT INTO artifact_content VALUES (%s, %s, %s, %s) ON CONFLICT (digest) DO UPDATE "
                "SET upload = excluded.upload, size_bytes = excluded.size_bytes, "
                "needed_unix_ms = greatest(artifact_content.needed_unix_ms, excluded.needed_unix_ms)",
                (content.digest, content.size_bytes, upload, now),
            ),
        )

    def _discard(self, upload: int) -> None:
        """Remove the pieces of an upload that broke off; what cannot be removed now goes with a collection."""
        asked = "DELETE FROM artifact_chunk WHERE upload = %s"
        try:
            self._database.change("undoing an upload", lambda connection: connection.execute(asked, (upload,)))
        except BsfgError:
            return

    def _bind(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        row = (bucket, key, content.digest, content.size_bytes, media_type, self._clock.now_unix_ms())

        def change(connection: Connection) -> tuple[Any, ...] | None:
            here = "SELECT 1 FROM artifact_content WHERE digest = %s FOR SHARE"
            if connection.execute(here, (content.digest,)).fetchone() is None:
                raise _missing(content.digest)
            asked = f"INSERT INTO artifact_name ({_NAME}) VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
            connection.execute(asked, row)
            asked = f"SELECT {_NAME} FROM artifact_name WHERE bucket = %s AND key = %s"
            return connection.execute(asked, (bucket, key)).fetchone()

        found = self._database.change("naming an artifact", change)
        if found is None:
            raise _missing(content.digest)
        _check_same(StoredArtifact(*found), content.digest)
        return StoredArtifact(*found)

    # Threads.

    async def _do(self, work: Callable[..., Found], *values: Any) -> Found:
        self._check_open()
        return await asyncio.to_thread(work, *values)

    async def _rows(self, asked: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._do(self._database.rows, "reading artifacts", asked, values)

    async def _change(self, doing: str, work: Callable[[Connection], Found]) -> Found:
        return await self._do(self._database.change, doing, work)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the store of artifacts is closed")


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


def _missing(digest: str) -> ArtifactMissing:
    return ArtifactMissing(f"no content with the digest {digest} is here", digest=digest)


def _check_same(existing: StoredArtifact, digest: str) -> None:
    if existing.digest != digest:
        raise ArtifactConflict(f"{existing.bucket}/{existing.key} stands for {existing.digest}, not for {digest}")


_PORT: type[ArtifactStore] = PostgresArtifacts
