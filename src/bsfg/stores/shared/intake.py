"""Content on its way into a store of artifacts, counted and digested as it passes, whatever keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from bsfg.artifacts import Bytes, StoredContent, check_digest
from bsfg.errors import ArtifactTooLarge, DigestMismatch, InvalidArgument

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
