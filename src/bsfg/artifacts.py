"""Artifacts: content kept outside the log, what it may be called, and the contract of the store that keeps it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from bsfg.errors import DigestMismatch, InvalidArgument
from bsfg.fact import ArtifactRef
from bsfg.model import ARTIFACT_DIGEST, MEDIA_TYPE

Bytes = bytes | bytearray | memoryview

BUCKET = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
KEY_BYTES_MAX = 1024
MEDIA_TYPE_BYTES_MAX = 255
DEFAULT_MEDIA_TYPE = "application/octet-stream"
BY_DIGEST = "sha256"
"""The bucket of what has no name of its own: the key there is the digits of the digest, and stands for nothing else."""

_bucket = re.compile(BUCKET).fullmatch
_media_type = re.compile(MEDIA_TYPE).fullmatch
_digest = re.compile(ARTIFACT_DIGEST).fullmatch

# Control characters, separators of lines, and characters that make a name read other than it is.
_misleading = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\\\\]").search


class StoredContent(NamedTuple):
    """Content that is durable: its digest (``sha256:`` and 64 hexadecimal digits) and its size."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """A durable name for content: bucket and key, what they stand for, and since when."""

    bucket: str
    key: str
    digest: str
    size_bytes: int
    media_type: str
    created_unix_ms: int

    def reference(self, file_name: str | None = None) -> ArtifactRef:
        """Give what a fact says to name this artifact."""
        return ArtifactRef(self.bucket, self.key, self.digest, self.size_bytes, self.media_type, file_name)


@dataclass(frozen=True, slots=True)
class ArtifactStats:
    """How much a store holds; uploads under way are not counted."""

    artifacts: int
    used_bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Collected:
    """What an orphan collection removed: the digests, the names they had, and the bytes it freed."""

    digests: tuple[str, ...] = ()
    names: int = 0
    freed_bytes: int = 0


class ArtifactSource(Protocol):
    """Where content can be read from: a store, or another zone's store behind a connection."""

    def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give the content with this digest, piece by piece, verified while it is read.

        The last piece is given only when the digest of the whole is right, so altered content is never complete.
        Raises `ArtifactMissing`, and `DigestMismatch` in place of that last piece.
        """


class ArtifactStore(ArtifactSource, Protocol):
    """The durable, content-addressed store of a zone's artifacts.

    Content is known by its digest; a name (bucket and key) stands for one digest and never for another while it
    exists. Several names may stand for the same content. Nothing is overwritten, and nothing leaves except by
    `collect`. What a method answers is durable; of an upload that fails or is broken off nothing can be seen.

    All methods raise only `bsfg.errors.BsfgError`, except that an upload passes on what its source raises. Every
    method may raise `StorageClosed`, and `InvalidArgument` for a bad bucket, key, digest or media type. What writes
    may raise `DiskFull`, `StorageReadOnly` and `StorageFailed` (nothing changed, the store stays usable), and
    `OutcomeUnknown` (syncing a name failed: the store closes itself; open it again and repeat the call).
    """

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
        """Store content under a name and answer when both are durable; `add` and `link` in one.

        The same content again is fine and gives the artifact as it is, media type included; damaged content is made
        whole by it. Other content raises `ArtifactConflict`: before anything is read when the announced digest
        says so, and in a race for the name for all but one.
        """

    async def add(
        self, content: AsyncIterable[Bytes], *, digest: str | None = None, size_bytes: int | None = None
    ) -> StoredContent:
        """Store content without a name, in bounded memory whatever its size, and close its source.

        What is announced is held against what arrives: another digest, or more or fewer bytes, raise
        `DigestMismatch`. `ArtifactTooLarge` and `ArtifactStoreFull` refuse what exceeds the limits of the store;
        content that is there already needs no room.
        """

    async def link(self, bucket: str, key: str, digest: str, *, media_type: str = DEFAULT_MEDIA_TYPE) -> StoredArtifact:
        """Give a name to content that is here; the same again is fine and gives the artifact as it is.

        Raises `ArtifactMissing` without the content and `ArtifactConflict` when the name stands for another digest.
        """

    async def stat(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for, None when nothing; raises `DigestMismatch` when its record is damaged."""

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the size of each content that is here, else None, and keep those that are from being collected.

        Whoever is about to store a fact claims what it names. From then on `collect` spares it for the grace period,
        which is time enough for the fact to become durable and to be seen as a reference.
        """

    def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List the names, of one bucket or all, whose keys begin with a prefix, by bucket and key."""

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove content that is not referenced and was not needed for the grace period, with its names.

        Needed means: stored, named, claimed, or found referenced by a collection. ``referenced`` must hold every
        digest that a fact named durably when this call begins. Time since the store was opened is measured by the
        monotonic clock too, so that a wall clock that jumps forward removes nothing that was just stored. What
        failed or broken uploads left behind goes as well.
        """

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""

    async def close(self) -> None:
        """Break off uploads, finish everything else, and release the store; repeats are harmless."""


class ReferenceMemory(Protocol):
    """A small piece of durable memory for what is known of references; losing it costs time and nothing else."""

    async def recall(self) -> bytes | None:
        """Give what was remembered last, or None when nothing, or nothing undamaged, is there."""

    async def remember(self, data: bytes) -> None:
        """Keep this in place of what was remembered before."""


def check_name(bucket: str, key: str) -> None:
    """Raise `InvalidArgument` unless these can name an artifact, here and as a path wherever it is saved."""
    if not _bucket(bucket):
        raise InvalidArgument(f"bucket {bucket[:80]!r} is not a name: it must match {BUCKET}", bucket=bucket[:80])
    if says := key_problem(key):
        raise InvalidArgument(f"key {key[:80]!r} {says}", key=key[:80])


class Begun:
    """The bytes of some content that somebody has already: how many, and what their digest is so far."""

    def __init__(self) -> None:
        self.size_bytes, self.sha256 = 0, hashlib.sha256()

    def add(self, piece: Bytes) -> None:
        """Count a piece to them."""
        self.size_bytes += len(piece)
        self.sha256.update(piece)


async def skipped(pieces: AsyncGenerator[bytes, None], count: int) -> AsyncGenerator[bytes, None]:
    """Pass on what follows so many bytes."""
    async with aclosing(pieces):
        async for piece in pieces:
            if count >= len(piece):
                count -= len(piece)
            else:
                yield piece[count:] if count else piece
                count = 0


async def verified(
    pieces: AsyncIterator[bytes], digest: str, begun: Begun | None = None
) -> AsyncGenerator[bytes, None]:
    """Pass pieces on, the last one only when the digest of the whole is right; raises `DigestMismatch` in its place.

    ``begun`` is what came before these pieces.
    """
    sha256, held = hashlib.sha256() if begun is None else begun.sha256.copy(), b""
    async for piece in pieces:
        sha256.update(piece)
        if held:
            yield held
        held = piece
    if (found := f"sha256:{sha256.hexdigest()}") != digest:
        raise DigestMismatch(f"content with the digest {found} came for {digest}", digest=found, announced=digest)
    if held:
        yield held


def own_name(reference: ArtifactRef) -> tuple[str, str] | None:
    """Give the bucket and key of a reference, None when it has no name but its digest."""
    if reference.bucket is None or reference.key is None or reference.bucket == BY_DIGEST:
        return None
    return reference.bucket, reference.key


def completed(reference: ArtifactRef, size_bytes: int) -> ArtifactRef:
    """Fill in what a reference leaves out, so that readers who expect all of it understand it too.

    What is filled in says nothing that an id could cover (see `bsfg.sealing`).
    """
    bucket, key = own_name(reference) or (BY_DIGEST, check_digest(reference.digest))
    said = reference.media_type or DEFAULT_MEDIA_TYPE
    return replace(reference, bucket=bucket, key=key, size_bytes=size_bytes, media_type=said)


def key_problem(key: str) -> str | None:
    """Say what is wrong with a key, None when nothing is."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if not 1 <= size <= KEY_BYTES_MAX:
        return f"must have 1 to {KEY_BYTES_MAX} bytes"
    if _misleading(key):
        return "must not have control characters, characters that change direction, or backslashes"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "must be names joined by '/', none of them empty, '.' or '..'"
    return None


def check_digest(digest: str) -> str:
    """Give the hexadecimal digits of an artifact's digest, or raise `InvalidArgument`."""
    if not _digest(digest):
        raise InvalidArgument(f"digest {digest[:80]!r} must be sha256: and 64 hexadecimal digits", digest=digest[:80])
    return digest.removeprefix("sha256:")


def check_media_type(media_type: str) -> None:
    """Raise `InvalidArgument` unless this is a media type."""
    if len(media_type.encode(errors="replace")) > MEDIA_TYPE_BYTES_MAX or not _media_type(media_type):
        raise InvalidArgument(f"media type {media_type[:80]!r} is none; application/pdf is one")
