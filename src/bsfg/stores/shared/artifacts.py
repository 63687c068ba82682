"""Artifacts beside a zone's frames: what every store of them does, over a few steps that may block."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from bsfg.artifacts import (
    DEFAULT_MEDIA_TYPE,
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
    ArtifactTooLarge,
    DigestMismatch,
    InvalidArgument,
    StorageClosed,
)
from bsfg.ports import Clock

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Announced:
    """What an upload says of itself before it begins; None is left open."""

    digest: str | None = None
    size_bytes: int | None = None

    def check(self, max_bytes: int | None) -> None:
        """Raise `InvalidArgument` for what cannot be, and `ArtifactTooLarge` for what may not."""
        if self.digest is not None:
            check_digest(self.digest)
        if self.size_bytes is not None:
            if self.size_bytes < 0:
                raise InvalidArgument(f"size_bytes {self.size_bytes} is negative", size_bytes=self.size_bytes)
            check_size(self.size_bytes, max_bytes)


def check_size(size_bytes: int, max_bytes: int | None) -> None:
    """Raise `ArtifactTooLarge` when a size exceeds the limit; None is no limit."""
    if max_bytes is not None and size_bytes > max_bytes:
        raise ArtifactTooLarge(
            f"the content has at least {size_bytes} bytes, the limit is {max_bytes}", max_bytes=max_bytes
        )


class ContentIntake:
    """Counts and digests content as it arrives, and stops it as soon as it is wrong."""

    def __init__(self, announced: Announced, max_bytes: int | None) -> None:
        announced.check(max_bytes)
        self._announced, self._max_bytes = announced, max_bytes
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def count(self, piece: Bytes) -> None:
        """Count a piece before it is written; raises `DigestMismatch` and `ArtifactTooLarge`."""
        self.size_bytes += len(piece)
        announced = self._announced.size_bytes
        if announced is not None and self.size_bytes > announced:
            raise _other_size(f"more than the {announced} bytes announced", self._announced)
        check_size(self.size_bytes, self._max_bytes)

    def digest(self, piece: Bytes) -> None:
        """Take a piece into the digest."""
        self._sha256.update(piece)

    def finish(self) -> StoredContent:
        """Give what arrived, or raise `DigestMismatch` when it is not what was announced."""
        announced = self._announced
        if announced.size_bytes is not None and self.size_bytes < announced.size_bytes:
            raise _other_size(f"{self.size_bytes} bytes, {announced.size_bytes} were announced", announced)
        digest = f"sha256:{self._sha256.hexdigest()}"
        if announced.digest is not None and digest != announced.digest:
            raise DigestMismatch(
                f"the content has the digest {digest}, {announced.digest} was announced",
                digest=digest,
                announced=announced.digest,
            )
        return StoredContent(digest, self.size_bytes)


def _other_size(says: str, announced: Announced) -> DigestMismatch:
    return DigestMismatch(f"the content has {says}", announced=announced.digest, announced_bytes=announced.size_bytes)


async def pieces(content: AsyncIterable[Bytes]) -> AsyncGenerator[bytes, None]:
    """Give content in pieces of at most `PIECE_BYTES`, copied, because its source may use its memory again."""
    waiting = bytearray()
    async for part in content:
        view = memoryview(part).cast("B")
        while len(waiting) + len(view) >= PIECE_BYTES:
            room = PIECE_BYTES - len(waiting)
            waiting += view[:room]
            yield bytes(waiting)
            waiting.clear()
            view = view[room:]
        waiting += view
    if waiting:
        yield bytes(waiting)


@asynccontextmanager
async def closing(content: AsyncIterable[Bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    """Give the `pieces` of content, and close its source however the upload ends."""
    try:
        async with aclosing(pieces(content)) as given:
            yield given
    finally:
        close = getattr(content, "aclose", None)
        if close is not None:
            await close()


Found = TypeVar("Found")


@dataclass(slots=True)
class Upload:
    """Pieces of one content, by the name they are kept under; what ``first`` and ``last`` count is the store's own."""

    name: str | int
    first: int = 0
    last: int = 0


class CheckedArtifacts(ABC):
    """What all stores of artifacts do alike: what is asked for is checked before their medium is."""

    _max_bytes: int | None

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
            if digest is not None:
                await self._check_free(bucket, key, digest)
            return await self._bound(bucket, key, await self._add(pieces, announced), media_type)

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
            raise missing(digest)
        return await self._bound(bucket, key, StoredContent(digest, size), media_type)

    @abstractmethod
    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""

    @abstractmethod
    async def _check_free(self, bucket: str, key: str, digest: str) -> None:
        """Raise `ArtifactConflict` when a name stands for another digest."""

    @abstractmethod
    async def _add(self, pieces: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        """Store content without a name."""

    @abstractmethod
    async def _bound(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        """Give a name to content that is here; give what it stands for then."""


class SharedArtifacts(CheckedArtifacts):
    """The artifacts of a zone in its storage, whose connections and fence they share."""

    def __init__(self, clock: Clock, *, max_artifact_bytes: int | None, capacity_bytes: int | None) -> None:
        self._clock, self._max_bytes, self._capacity_bytes = clock, max_artifact_bytes, capacity_bytes
        self._reserved_bytes = 0
        self._lock = threading.RLock()
        self._needed_ms: dict[str, int] = {}
        self._in_use: Counter[str | int] = Counter()
        """Uploads whose pieces somebody writes or reads: a collection leaves them for the next one."""
        self._closed = False

    # What a store has to know.

    @abstractmethod
    def _named(self, bucket: str, key: str) -> StoredArtifact | None:
        """Find what a name stands for."""

    @abstractmethod
    def _is_here(self, digest: str) -> bool:
        """Tell whether content with a digest is here."""

    @abstractmethod
    def _claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here, which is needed now."""

    @abstractmethod
    def _upload_of(self, digest: str) -> Upload | None:
        """Give what content is kept as, None when it is not here."""

    @abstractmethod
    def _pieces_of(self, upload: Upload) -> Iterator[bytes]:
        """Read the pieces of an upload, one after the other."""

    @abstractmethod
    def _collect(self, referenced: AbstractSet[str], now_unix_ms: int, grace_ms: int) -> Collected:
        """Remove orphans, and pieces that belong to nothing."""

    @abstractmethod
    def _used_bytes(self) -> int:
        """Add up all contents."""

    @abstractmethod
    def _begin_upload(self) -> Upload:
        """Give a name that no upload has had."""

    @abstractmethod
    def _write(self, upload: Upload, number: int, piece: bytes) -> None:
        """Make the piece of that number durable."""

    @abstractmethod
    def _admit(self, upload: Upload, content: StoredContent) -> None:
        """Let an upload be the content with its digest, in the place of a copy that may be damaged."""

    @abstractmethod
    def _discard(self, upload: Upload) -> None:
        """Remove the pieces of an upload that broke off; what cannot be removed now goes with a collection."""

    @abstractmethod
    def _bind(self, fresh: StoredArtifact) -> StoredArtifact:
        """Give a name to content, unless it has one; give what it stands for then. Content must be here."""

    # The port.

    async def _check_free(self, bucket: str, key: str, digest: str) -> None:
        if (existing := await self.stat(bucket, key)) is not None:
            _check_same(existing, digest)

    async def stat(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for."""
        check_name(bucket, key)
        return await self._do(self._named, bucket, key)

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""
        check_digest(digest)
        return await self._do(self._is_here, digest)

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""
        for digest in digests:
            check_digest(digest)
        return await self._do(self._claim, digests)

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content piece by piece, the last one when the digest of the whole is right."""
        check_digest(digest)
        upload = await self._do(self._begin_reading, digest)
        if upload is None:
            raise missing(digest)
        sha256, held = hashlib.sha256(), b""
        try:
            pieces = self._pieces_of(upload)
            while (piece := await self._do(next, pieces, None)) is not None:
                if held:
                    yield held
                held = piece
                sha256.update(held)
            if (found := f"sha256:{sha256.hexdigest()}") != digest:
                hint = "The copy in this zone is damaged: upload it again, or restore it from another zone."
                raise DigestMismatch(f"the content stored as {digest} has the digest {found}", hint=hint, digest=found)
            if held:
                yield held
        finally:
            self._let_go(upload)

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove orphans, and what uploads that broke off have left."""
        if grace_seconds < 0:
            raise InvalidArgument(f"grace_seconds {grace_seconds} is negative")
        return await self._do(self._collect, referenced, now_unix_ms, int(grace_seconds * 1000))

    async def close(self) -> None:
        """Break off uploads, and refuse everything from now on; the connections are the storage's."""
        self._closed = True

    # Uploads.

    async def _add(self, pieces: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        self._check_open()
        intake = ContentIntake(announced, self._max_bytes)
        is_here = announced.digest is not None and await self.exists(announced.digest)
        upload, number, reserved = await self._do(self._begin_writing), 0, 0
        try:
            async for piece in pieces:
                intake.count(piece)
                if not is_here:
                    reserved += await self._do(self._reserve, len(piece))
                await self._do(self._taken_in, upload, number, piece, intake)
                number += 1
            content = intake.finish()
            await self._do(self._admitted, upload, content)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._discard, upload))
            raise
        finally:
            with self._lock:
                self._reserved_bytes -= reserved
            self._let_go(upload)
        return content

    def _taken_in(self, upload: Upload, number: int, piece: bytes, intake: ContentIntake) -> None:
        intake.digest(piece)
        self._write(upload, number, piece)

    def _admitted(self, upload: Upload, content: StoredContent) -> None:
        self._needed_ms[content.digest] = self._clock.monotonic_ms()
        self._admit(upload, content)

    def _begin_writing(self) -> Upload:
        upload = self._begin_upload()
        with self._lock:
            self._in_use[upload.name] += 1
        return upload

    def _begin_reading(self, digest: str) -> Upload | None:
        with self._lock:
            upload = self._upload_of(digest)
            if upload is not None:
                self._in_use[upload.name] += 1
            return upload

    def _let_go(self, upload: Upload) -> None:
        with self._lock:
            self._in_use[upload.name] -= 1
            if not self._in_use[upload.name]:
                del self._in_use[upload.name]

    def _reserve(self, size_bytes: int) -> int:
        if self._capacity_bytes is None:
            return 0
        with self._lock:
            taken = self._used_bytes() + self._reserved_bytes
            if taken + size_bytes > self._capacity_bytes:
                raise ArtifactStoreFull(f"the store holds {taken} of {self._capacity_bytes} bytes")
            self._reserved_bytes += size_bytes
        return size_bytes

    def _young(self, grace_ms: int) -> list[str]:
        """List what was needed lately by the steady clock, whatever the other one says."""
        now = self._clock.monotonic_ms()
        return [digest for digest, at in list(self._needed_ms.items()) if now - at < grace_ms]

    async def _bound(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        now = self._clock.now_unix_ms()
        fresh = StoredArtifact(bucket, key, content.digest, content.size_bytes, media_type, now)
        found = await self._do(self._bind, fresh)
        _check_same(found, content.digest)
        return found

    async def _do(self, work: Callable[..., Found], *values: Any) -> Found:
        self._check_open()
        return await asyncio.to_thread(work, *values)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the store of artifacts is closed")


def missing(digest: str) -> ArtifactMissing:
    """Say that content is not here."""
    return ArtifactMissing(f"no content with the digest {digest} is here", digest=digest)


def _check_same(existing: StoredArtifact, digest: str) -> None:
    if existing.digest != digest:
        says = f"{existing.bucket}/{existing.key} stands for {existing.digest}, not for {digest}"
        raise ArtifactConflict(says, digest=existing.digest)
