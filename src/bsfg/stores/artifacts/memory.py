"""Artifacts in the memory of one process, for tests and simulation."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from bsfg.artifacts import (
    DEFAULT_MEDIA_TYPE,
    ArtifactStats,
    Bytes,
    Collected,
    StoredArtifact,
    StoredContent,
    check_digest,
    check_media_type,
    check_name,
)
from bsfg.clock import SystemClock
from bsfg.errors import (
    ArtifactConflict,
    ArtifactMissing,
    ArtifactStoreFull,
    DigestMismatch,
    InvalidArgument,
    StorageClosed,
)
from bsfg.ports import Clock
from bsfg.stores.shared.intake import PIECE_BYTES, Announced, ContentIntake, closing

SYSTEM_CLOCK = SystemClock()


@dataclass(slots=True)
class Kept:
    """A content in memory, and when it was last needed by either clock."""

    data: bytes
    needed_unix_ms: int = 0
    needed_monotonic_ms: int = 0


@dataclass(slots=True)
class ArtifactMedium:
    """What a store in memory keeps, as a disk does: it stays when the store is closed."""

    contents: dict[str, Kept] = field(default_factory=dict)
    names: dict[tuple[str, str], StoredArtifact] = field(default_factory=dict)
    references: bytes | None = None


class MemoryArtifacts:
    """The artifacts of a zone in memory; give the ``medium`` of another store to open what that one kept."""

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
        medium: ArtifactMedium | None = None,
    ) -> None:
        self.medium = medium or ArtifactMedium()
        self._clock = clock
        self._max_bytes, self._capacity_bytes = max_artifact_bytes, capacity_bytes
        self._reserved_bytes = 0
        self._closed = False
        self.references = MediumMemory(self.medium)

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
            self._check_open()
            if digest is not None:
                self._existing(bucket, key, digest)
            stored = await self._add(pieces, announced)
            return self._bind(bucket, key, stored, media_type)

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
            raise ArtifactMissing(f"no content with the digest {digest} is here", digest=digest)
        return self._bind(bucket, key, StoredContent(digest, size), media_type)

    async def stat(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for."""
        check_name(bucket, key)
        self._check_open()
        return self.medium.names.get((bucket, key))

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""
        check_digest(digest)
        self._check_open()
        return digest in self.medium.contents

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""
        for digest in digests:
            check_digest(digest)
        self._check_open()
        found = [self.medium.contents.get(digest) for digest in digests]
        for kept in found:
            if kept is not None:
                self._need(kept)
        return [None if kept is None else len(kept.data) for kept in found]

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content piece by piece, verified."""
        check_digest(digest)
        self._check_open()
        kept = self.medium.contents.get(digest)
        if kept is None:
            raise ArtifactMissing(f"no content with the digest {digest} is here", digest=digest)
        data = kept.data
        # Where the last piece begins: everything before it may be given before the digest is known to be right.
        last = max(0, (len(data) - 1) // PIECE_BYTES * PIECE_BYTES)
        for start in range(0, last, PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
            self._check_open()
        if (found := f"sha256:{hashlib.sha256(data).hexdigest()}") != digest:
            raise DigestMismatch(f"the content stored as {digest} has the digest {found}", digest=found)
        if data:
            yield data[last:]

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")
        self._check_open()
        for (each, key), artifact in sorted(self.medium.names.items()):
            if bucket in (None, each) and key.startswith(prefix):
                yield artifact

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove orphans."""
        if grace_seconds < 0:
            raise InvalidArgument(f"grace_seconds {grace_seconds} is negative")
        self._check_open()
        contents, names, grace_ms = self.medium.contents, self.medium.names, grace_seconds * 1000
        victims = {}
        for digest, kept in contents.items():
            if digest in referenced:
                kept.needed_unix_ms = now_unix_ms
            elif (
                now_unix_ms - kept.needed_unix_ms >= grace_ms
                and self._clock.monotonic_ms() - kept.needed_monotonic_ms >= grace_ms
            ):
                victims[digest] = len(kept.data)
        gone = [name for name, artifact in names.items() if artifact.digest in victims]
        for name in gone:
            del names[name]
        for digest in victims:
            del contents[digest]
        return Collected(tuple(sorted(victims)), len(gone), sum(victims.values()))

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        self._check_open()
        return ArtifactStats(len(self.medium.contents), self._used_bytes(), self._capacity_bytes)

    async def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True

    async def _add(self, pieces: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        self._check_open()
        intake = ContentIntake(announced, self._max_bytes)
        data, reserved = bytearray(), 0
        try:
            async for piece in pieces:
                self._check_open()
                intake.count(piece)
                intake.digest(piece)
                if announced.digest not in self.medium.contents:
                    reserved += self._reserve(len(piece))
                data += piece
            self._check_open()
            content = intake.finish()
            self._need(self.medium.contents.setdefault(content.digest, Kept(b"")))
            self.medium.contents[content.digest].data = bytes(data)
            return content
        finally:
            self._reserved_bytes -= reserved

    def _reserve(self, size_bytes: int) -> int:
        taken = self._used_bytes() + self._reserved_bytes
        if self._capacity_bytes is not None and taken + size_bytes > self._capacity_bytes:
            raise ArtifactStoreFull(f"the store holds {taken} of {self._capacity_bytes} bytes")
        self._reserved_bytes += size_bytes
        return size_bytes

    def _existing(self, bucket: str, key: str, digest: str) -> StoredArtifact | None:
        existing = self.medium.names.get((bucket, key))
        if existing is not None and existing.digest != digest:
            raise ArtifactConflict(f"{bucket}/{key} stands for {existing.digest}, not for {digest}")
        return existing

    def _bind(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        existing = self._existing(bucket, key, content.digest)
        if existing is not None:
            return existing
        now_unix_ms = self._clock.now_unix_ms()
        artifact = StoredArtifact(bucket, key, content.digest, content.size_bytes, media_type, now_unix_ms)
        self.medium.names[bucket, key] = artifact
        return replace(artifact)

    def _need(self, kept: Kept) -> None:
        kept.needed_unix_ms, kept.needed_monotonic_ms = self._clock.now_unix_ms(), self._clock.monotonic_ms()

    def _used_bytes(self) -> int:
        return sum(len(kept.data) for kept in self.medium.contents.values())

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the store of artifacts is closed")


class MediumMemory:
    """A `bsfg.artifacts.ReferenceMemory` on a medium."""

    def __init__(self, medium: ArtifactMedium) -> None:
        self._medium = medium

    async def recall(self) -> bytes | None:
        """Give what was remembered last."""
        return self._medium.references

    async def remember(self, data: bytes) -> None:
        """Keep this instead."""
        self._medium.references = data
