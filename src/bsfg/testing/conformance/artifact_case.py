"""What the contracts of artifact stores stand on: how a store is made and reopened, and how a test runs on it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

import pytest

from bsfg.artifacts import ArtifactStore, Bytes, Collected
from bsfg.errors import BsfgError
from bsfg.ports import Clock
from bsfg.testing.clock import FakeClock

BUCKET = "batch-files"
NAME = (BUCKET, "B1042/report.pdf")
PDF = "application/pdf"
HELLO = b"hello, plant"
GRACE_SECONDS = 3600.0

STRANGE_KEYS = (
    "a",
    "A",
    "ä/ö",
    "a\u0308/o\u0308",
    "日本語/報告書.pdf",
    "with space",
    "...",
    ".hidden",
    "CON",
    "a:b*c?",
    "k" * 1024,
    "😀" * 256,
)
BAD_NAMES = (
    ("", "key"),
    ("..", "key"),
    (".", "key"),
    ("a/b", "key"),
    ("b" * 65, "key"),
    ("bücket", "key"),
    ("bucket\n", "key"),
    (BUCKET, ""),
    (BUCKET, "."),
    (BUCKET, ".."),
    (BUCKET, "../x"),
    (BUCKET, "a/../../x"),
    (BUCKET, "/etc/passwd"),
    (BUCKET, "a//b"),
    (BUCKET, "a/"),
    (BUCKET, "..\\x"),
    (BUCKET, "a\x00b"),
    (BUCKET, "a\nb"),
    (BUCKET, "a\x7f"),
    (BUCKET, "a\x9b31m"),
    (BUCKET, "gpj.\u202eexe"),
    (BUCKET, "\ud800"),
    (BUCKET, "k" * 1025),
    (BUCKET, "😀" * 257),
)

Case = TypeVar("Case", bound="ArtifactCase")


class SourceBroke(Exception):
    """What a source of content may raise in the middle."""


def digest_of(data: bytes) -> str:
    """Give the digest of content as facts write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Give content that does not repeat itself."""
    return Random(seed).randbytes(size_bytes)


async def stream(*parts: Bytes, error: BaseException | None = None) -> AsyncIterator[Bytes]:
    """Give content in parts, and perhaps break."""
    for part in parts:
        await asyncio.sleep(0)
        yield part
    if error is not None:
        raise error


async def whole(store: ArtifactStore, digest: str) -> bytes:
    """Read a content to its end."""
    return b"".join([piece async for piece in store.get(digest)])


class ArtifactRig:
    """One store under test with a clock that the test moves."""

    def __init__(self, case: ArtifactCase, tmp_path: Path) -> None:
        self.case, self.clock, self._tmp_path = case, FakeClock(), tmp_path
        self._store: ArtifactStore | None = None

    @property
    def store(self) -> ArtifactStore:
        """The store that was opened last."""
        assert self._store is not None, "open a store first"
        return self._store

    async def open(self, *, max_artifact_bytes: int | None = None, capacity_bytes: int | None = None) -> ArtifactStore:
        """Make a new store."""
        limits = {"max_artifact_bytes": max_artifact_bytes, "capacity_bytes": capacity_bytes}
        self._store = await self.case.make(self._tmp_path, clock=self.clock, **limits)
        return self._store

    async def reopen(self) -> ArtifactStore:
        """Open what the store kept."""
        self._store = await self.case.reopen(self.store)
        return self._store

    async def now_and_reopened(self) -> AsyncIterator[ArtifactStore]:
        """Give the store as it is, and then once more after it was reopened."""
        yield self.store
        yield await self.reopen()

    async def collect(self, *referenced: str) -> Collected:
        """Collect orphans now."""
        now_unix_ms = self.clock.now_unix_ms()
        return await self.store.collect({*referenced}, now_unix_ms=now_unix_ms, grace_seconds=GRACE_SECONDS)


def scenario(test: Callable[[Case, ArtifactRig], Coroutine[Any, Any, None]]) -> Callable[[Case, Path], None]:
    """Make a pytest method of a coroutine that gets an `ArtifactRig`."""

    @functools.wraps(test)
    def run(case: Case, tmp_path: Path) -> None:
        async def whole_test() -> None:
            rig = ArtifactRig(case, tmp_path)
            try:
                await test(case, rig)
            finally:
                if rig._store is not None:
                    await rig._store.close()

        asyncio.run(whole_test())

    del run.__wrapped__  # pytest would look for fixtures in its signature
    return cast(Callable[[Case, Path], None], run)


async def all_names(store: ArtifactStore, bucket: str | None = None, prefix: str = "") -> list[tuple[str, str]]:
    """List names as pairs."""
    return [(each.bucket, each.key) async for each in store.names(bucket, prefix=prefix)]


async def refused(attempts: Iterable[Coroutine[Any, Any, object]], error: type[BsfgError]) -> None:
    """Check that each attempt raises an error."""
    for attempt in attempts:
        with pytest.raises(error):
            await attempt


class ArtifactCase(ABC):
    """The base of the contracts; the tests of a store supply `make`, `reopen` and `damage`."""

    @abstractmethod
    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make a new, empty store; ``tmp_path`` is a folder of its own."""

    @abstractmethod
    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Give a store over what the old one kept, with the same clock and limits; the old one may be open."""

    @abstractmethod
    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Let the medium hold other bytes as the content with this digest."""


async def check_empty(store: ArtifactStore) -> None:
    """Check that a store holds nothing."""
    assert await store.stat(*NAME) is None
    assert await all_names(store) == []
    assert (await store.stats()).artifacts == 0
