"""Artifacts in JetStream: content in messages of one stream, what is known of it among the values of the zone."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar
from uuid import uuid4

import orjson

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
from bsfg.stores.jetstream.messages import pieces
from bsfg.stores.jetstream.server import WrongLastSequence
from bsfg.stores.jetstream.zone import SUBJECT_SEQUENCE, JetStreamZone, stream_of
from bsfg.stores.shared.intake import Announced, ContentIntake, closing

_CONTENT, _NAME, _REFERENCES = "content", "name", "references"
_READ_BYTES = 16 << 20
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class ContentPlace:
    """Where content is: under which subject, from which message on, and until when it was needed."""

    size_bytes: int
    upload: str
    seq: int
    needed_unix_ms: int


class JetStreamArtifacts:
    """The artifacts of a zone in its streams; it shares connection and fence with the zone's storage."""

    def __init__(
        self,
        zone: JetStreamZone,
        clock: Clock,
        *,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self._zone, self._server, self._clock = zone, zone.server, clock
        self._max_bytes, self._capacity_bytes = max_artifact_bytes, capacity_bytes
        self._reserved_bytes = 0
        self._lock = threading.RLock()
        self._needed_ms: dict[str, int] = {}
        self._in_use: Counter[str] = Counter()
        """Uploads whose messages somebody writes or reads: a collection leaves them for the next one."""
        self._closed = False
        self._content = {
            what.removeprefix(f"{_CONTENT}."): ContentPlace(**orjson.loads(data))
            for what, data in zone.values(f"{_CONTENT}.").items()
        }
        found = [StoredArtifact(**orjson.loads(data)) for data in zone.values(f"{_NAME}.").values()]
        self._names = {(each.bucket, each.key): each for each in found}
        self.references = ValueMemory(zone, _REFERENCES)
        name, base = zone.names.artifacts
        self._server.run("opening artifacts", lambda: stream_of(self._server, name, base, {}), changes=True)

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
        async with closing(content) as parts:
            check_name(bucket, key)
            check_media_type(media_type)
            announced = Announced(digest, size_bytes)
            announced.check(self._max_bytes)
            if digest is not None and (existing := await self.stat(bucket, key)) is not None:
                _check_same(existing, digest)
            stored = await self._add(parts, announced)
            return await self._do(self._bind, bucket, key, stored, media_type)

    async def add(
        self, content: AsyncIterable[Bytes], *, digest: str | None = None, size_bytes: int | None = None
    ) -> StoredContent:
        """Store content without a name."""
        async with closing(content) as parts:
            return await self._add(parts, Announced(digest, size_bytes))

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
        self._check_open()
        return self._names.get((bucket, key))

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""
        check_digest(digest)
        self._check_open()
        return digest in self._content

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""
        for digest in digests:
            check_digest(digest)
        return await self._do(self._claim, digests)

    def _claim(self, digests: Sequence[str]) -> list[int | None]:
        now = self._clock.now_unix_ms()
        with self._lock:
            for digest in {each for each in digests if each in self._content}:
                self._need(digest, now)
                self._needed_ms[digest] = self._clock.monotonic_ms()
            places = [self._content.get(digest) for digest in digests]
        return [place.size_bytes if place is not None else None for place in places]

    def _need(self, digest: str, unix_ms: int) -> None:
        """Note that content was needed at a time."""
        place = self._content[digest]
        if place.needed_unix_ms < unix_ms:
            self._place(digest, replace(place, needed_unix_ms=unix_ms))

    def _place(self, digest: str, place: ContentPlace) -> None:
        self._zone.keep("storing an artifact", f"{_CONTENT}.{digest}", orjson.dumps(asdict(place)))
        self._content[digest] = place

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content piece by piece, the last one when the digest of the whole is right."""
        check_digest(digest)
        place = await self._do(self._begin_reading, digest)
        if place is None:
            raise _missing(digest)
        sha256, held, seq = hashlib.sha256(), b"", place.seq
        try:
            while (part := await self._do(self._part, place.upload, seq)) is not None:
                if held:
                    yield held
                seq, held = part[0] + 1, part[1]
                sha256.update(held)
            if (found := f"sha256:{sha256.hexdigest()}") != digest:
                hint = "The copy in this zone is damaged: upload it again, or restore it from another zone."
                raise DigestMismatch(f"the content stored as {digest} has the digest {found}", hint=hint, digest=found)
            if held:
                yield held
        finally:
            self._let_go(place.upload)

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")
        self._check_open()
        for name in sorted(self._names):
            found = self._names.get(name)
            if found is not None and bucket in (None, found.bucket) and found.key.startswith(prefix):
                yield found

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove orphans, and what uploads that broke off have left."""
        if grace_seconds < 0:
            raise InvalidArgument(f"grace_seconds {grace_seconds} is negative")
        return await self._do(self._collect, referenced, now_unix_ms, int(grace_seconds * 1000))

    def _collect(self, referenced: AbstractSet[str], now_unix_ms: int, grace_ms: int) -> Collected:
        with self._lock:
            for digest in referenced & self._content.keys():
                self._need(digest, now_unix_ms)
            steady = self._clock.monotonic_ms()
            young = {digest for digest, at in self._needed_ms.items() if steady - at < grace_ms}
            gone = {
                digest: place
                for digest, place in self._content.items()
                if now_unix_ms - place.needed_unix_ms >= grace_ms and digest not in referenced and digest not in young
            }
            names = [name for name, each in self._names.items() if each.digest in gone]
            for name in names:
                self._zone.drop("collecting artifacts", _name_value(*name))
                del self._names[name]
            for digest in gone:
                self._zone.drop("collecting artifacts", f"{_CONTENT}.{digest}")
                del self._content[digest]
            kept = {place.upload for place in self._content.values()} | set(self._in_use)
            self._server.run("collecting artifacts", lambda: self._purge_but(kept))
        return Collected(tuple(sorted(gone)), len(names), sum(place.size_bytes for place in gone.values()))

    async def _purge_but(self, kept: AbstractSet[str]) -> None:
        name, base = self._zone.names.artifacts
        asked = {"subjects_filter": f"{base}.*"}
        subjects = (await self._server.api(f"STREAM.INFO.{name}", asked))["state"].get("subjects") or {}
        for subject in subjects:
            if subject.rpartition(".")[2] not in kept:
                await self._server.api(f"STREAM.PURGE.{name}", {"filter": subject})

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        self._check_open()
        return ArtifactStats(len(self._content), self._used_bytes(), self._capacity_bytes)

    def _used_bytes(self) -> int:
        return sum(place.size_bytes for place in list(self._content.values()))

    async def close(self) -> None:
        """Break off uploads, and refuse everything from now on; the connection is the storage's."""
        self._closed = True

    # Uploads.

    async def _add(self, parts: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        self._check_open()
        intake = ContentIntake(announced, self._max_bytes)
        is_here = announced.digest is not None and await self.exists(announced.digest)
        upload, first, seq, reserved = uuid4().hex, 0, 0, 0
        self._in_use[upload] += 1
        try:
            async for piece in parts:
                intake.count(piece)
                if not is_here:
                    reserved += self._reserve(len(piece))
                seq = await self._do(self._write, upload, seq, piece, intake)
                first = first or seq
            content = intake.finish()
            await self._do(self._admit, upload, first, content)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._discard, upload))
            raise
        finally:
            with self._lock:
                self._reserved_bytes -= reserved
            self._let_go(upload)
        return content

    def _begin_reading(self, digest: str) -> ContentPlace | None:
        with self._lock:
            place = self._content.get(digest)
            if place is not None:
                self._in_use[place.upload] += 1
            return place

    def _let_go(self, upload: str) -> None:
        with self._lock:
            self._in_use[upload] -= 1
            if not self._in_use[upload]:
                del self._in_use[upload]

    def _reserve(self, size_bytes: int) -> int:
        if self._capacity_bytes is None:
            return 0
        with self._lock:
            taken = self._used_bytes() + self._reserved_bytes
            if taken + size_bytes > self._capacity_bytes:
                raise ArtifactStoreFull(f"the store holds {taken} of {self._capacity_bytes} bytes")
            self._reserved_bytes += size_bytes
        return size_bytes

    def _write(self, upload: str, seq: int, piece: bytes, intake: ContentIntake) -> int:
        """Write a piece behind the last one of its upload; give the number of its last message."""
        intake.digest(piece)
        name, base = self._zone.names.artifacts
        for data in pieces(piece, self._server.piece_bytes):

            async def write(data: bytes = data, after: int = seq) -> int:
                try:
                    return await self._server.publish(f"{base}.{upload}", data, {SUBJECT_SEQUENCE: str(after)})
                except WrongLastSequence:
                    # Nobody else writes under this subject: a first attempt was made before its connection was lost.
                    last = await self._server.get(name, last_by_subj=f"{base}.{upload}")
                    return last.seq if last is not None else after

            seq = self._server.run("storing an artifact", write, changes=True)
        return seq

    def _part(self, upload: str, seq: int) -> tuple[int, bytes] | None:
        """Read the next message of an upload."""
        name, base = self._zone.names.artifacts
        subject = f"{base}.{upload}"

        async def read() -> tuple[int, bytes] | None:
            found = await self._server.page(name, subject, max(1, seq), 1, _READ_BYTES)
            # Whether there is none the leader knows, not each of the servers.
            message = found[0] if found else await self._server.get(name, seq=max(1, seq), next_by_subj=subject)
            return (message.seq, message.data) if message is not None else None

        return self._server.run("reading an artifact", read)

    def _admit(self, upload: str, first: int, content: StoredContent) -> None:
        """Let an upload be the content with its digest, in the place of a copy that may be damaged."""
        with self._lock:
            self._needed_ms[content.digest] = self._clock.monotonic_ms()
            there = self._content.get(content.digest)
            needed = max(self._clock.now_unix_ms(), there.needed_unix_ms if there is not None else 0)
            self._place(content.digest, ContentPlace(content.size_bytes, upload, first, needed))

    def _discard(self, upload: str) -> None:
        """Remove the messages of an upload that broke off; what cannot be removed now goes with a collection."""
        name, base = self._zone.names.artifacts
        with suppress(BsfgError):
            self._server.run(
                "undoing an upload", lambda: self._server.api(f"STREAM.PURGE.{name}", {"filter": f"{base}.{upload}"})
            )

    def _bind(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        fresh = StoredArtifact(bucket, key, content.digest, content.size_bytes, media_type, self._clock.now_unix_ms())
        with self._lock:
            if content.digest not in self._content:
                raise _missing(content.digest)
            found = self._names.get((bucket, key))
            if found is None:
                self._zone.keep("naming an artifact", _name_value(bucket, key), orjson.dumps(asdict(fresh)))
                found = self._names[bucket, key] = fresh
        _check_same(found, content.digest)
        return found

    async def _do(self, work: Callable[..., Found], *values: Any) -> Found:
        self._check_open()
        return await asyncio.to_thread(work, *values)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the store of artifacts is closed")


class ValueMemory:
    """A `bsfg.artifacts.ReferenceMemory` among the values of the zone."""

    def __init__(self, zone: JetStreamZone, name: str) -> None:
        self._zone, self._name = zone, name
        self._value = zone.values(name).get(name)

    async def recall(self) -> bytes | None:
        """Give what was remembered last."""
        return self._value

    async def remember(self, data: bytes) -> None:
        """Keep something in the place of what was remembered before."""
        await asyncio.to_thread(self._zone.keep, "remembering references", self._name, data)
        self._value = data


def _name_value(bucket: str, key: str) -> str:
    """Give where the zone keeps a name; it may hold what a subject must not."""
    return f"{_NAME}.{hashlib.sha256(f'{bucket}/{key}'.encode()).hexdigest()}"


def _missing(digest: str) -> ArtifactMissing:
    return ArtifactMissing(f"no content with the digest {digest} is here", digest=digest)


def _check_same(existing: StoredArtifact, digest: str) -> None:
    if existing.digest != digest:
        raise ArtifactConflict(
            f"{existing.bucket}/{existing.key} names content with another digest, {existing.digest}",
            digest=existing.digest,
        )


_PORT: type[ArtifactStore] = JetStreamArtifacts
