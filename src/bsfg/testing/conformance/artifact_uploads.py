"""What the contracts of artifact stores stand on, and the contract for uploads."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bsfg.artifacts import ArtifactStore, Bytes, Collected, StoredArtifact
from bsfg.errors import ArtifactConflict, ArtifactStoreFull, ArtifactTooLarge, BsfgError, DigestMismatch
from bsfg.ports import Clock
from bsfg.testing.clock import START_UNIX_MS, FakeClock
from bsfg.testing.conformance.case import running

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

    async def close(self) -> None:
        """Close the store, if there is one."""
        if self._store is not None:
            await self._store.close()

    async def now_and_reopened(self) -> AsyncIterator[ArtifactStore]:
        """Give the store as it is, and then once more after it was reopened."""
        yield self.store
        yield await self.reopen()

    async def collect(self, *referenced: str) -> Collected:
        """Collect orphans now."""
        now_unix_ms = self.clock.now_unix_ms()
        return await self.store.collect({*referenced}, now_unix_ms=now_unix_ms, grace_seconds=GRACE_SECONDS)


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a pytest method of a coroutine that gets an `ArtifactRig` as ``rig``, its ``store``, or both."""
    return running(test, ArtifactRig, "store", ArtifactRig.open)


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


class UploadContract(ArtifactCase):
    """What `put` and `add` promise."""

    @scenario
    async def test_what_was_put_is_there(self, rig: ArtifactRig) -> None:
        """An artifact is given back as it was put, with digest, size, media type and time, after a restart too."""
        store = await rig.open()
        put = await store.put(*NAME, stream(b"hello", b"", b", plant"), media_type=PDF)
        assert put == StoredArtifact(*NAME, digest_of(HELLO), len(HELLO), PDF, START_UNIX_MS)
        rig.clock.advance(10)
        async for store in rig.now_and_reopened():
            assert await store.stat(*NAME) == put
            assert await store.exists(put.digest)
            assert await store.claim([put.digest]) == [len(HELLO)]
            assert await whole(store, put.digest) == HELLO
            stats = await store.stats()
            assert (stats.artifacts, stats.used_bytes, stats.capacity_bytes) == (1, len(HELLO), None)

    @scenario
    async def test_sizes_around_the_pieces(self, store: ArtifactStore) -> None:
        """Content of any size, nothing included, arrives in parts of any kind and size and comes back whole."""
        mebibyte = 1 << 20
        for size in (0, 1, mebibyte - 1, mebibyte, mebibyte + 1, 3 * mebibyte):
            data = noise(size, size)
            for part_bytes in (size or 1, 70_001):
                parts = [data[start : start + part_bytes] for start in range(0, size, part_bytes)]
                kinds = (bytes, bytearray, memoryview)
                source = stream(*(kinds[number % 3](part) for number, part in enumerate(parts)))
                content = await store.add(source, digest=digest_of(data), size_bytes=size)
                assert content == (digest_of(data), size)
            pieces = [piece async for piece in store.get(content.digest)]
            assert b"".join(pieces) == data
            assert all(0 < len(piece) <= mebibyte for piece in pieces)

    @scenario
    async def test_a_source_may_use_its_memory_again(self, store: ArtifactStore) -> None:
        """What a source gave is kept as it was at that moment, whatever it writes into its buffer next."""

        async def reusing() -> AsyncIterator[Bytes]:
            buffer = bytearray(4)
            for letter in b"abc":
                buffer[:] = bytes([letter]) * 4
                yield memoryview(buffer)

        content = await store.add(reusing())
        assert await whole(store, content.digest) == b"aaaabbbbcccc"

    @scenario
    async def test_the_same_again_is_fine(self, rig: ArtifactRig) -> None:
        """A repeated put gives the artifact as it is, its media type and time included, after a restart too."""
        store = await rig.open()
        first = await store.put(*NAME, stream(HELLO), media_type=PDF)
        rig.clock.advance(10)
        async for store in rig.now_and_reopened():
            assert await store.put(*NAME, stream(HELLO), media_type="text/plain") == first
            assert await store.put(*NAME, stream(HELLO), digest=first.digest, size_bytes=len(HELLO)) == first
            assert await store.link(*NAME, first.digest, media_type="text/plain") == first
        assert (await store.stats()).artifacts == 1

    @scenario
    async def test_other_content_under_a_name_is_a_conflict(self, rig: ArtifactRig) -> None:
        """A name never stands for other content, whether the digest was announced or not, after a restart too."""
        store = await rig.open()
        first = await store.put(*NAME, stream(HELLO))
        other = await store.add(stream(b"other"))
        async for store in rig.now_and_reopened():
            attempts = (
                store.put(*NAME, stream(b"other")),
                store.put(*NAME, stream(b"other"), digest=other.digest),
                store.link(*NAME, other.digest),
            )
            await refused(attempts, ArtifactConflict)
            assert await store.stat(*NAME) == first
            assert await whole(store, first.digest) == HELLO

    @scenario
    async def test_an_announced_conflict_is_refused_unread(self, store: ArtifactStore) -> None:
        """A put that announces another digest is refused before a byte is read, and its source is closed."""
        await store.put(*NAME, stream(HELLO))
        source = stream(b"x", error=AssertionError("the source was read"))
        with pytest.raises(ArtifactConflict):
            await store.put(*NAME, source, digest=digest_of(b"x"))
        assert [part async for part in source] == []

    @scenario
    async def test_a_race_for_a_name_has_one_winner(self, rig: ArtifactRig) -> None:
        """Of concurrent uploads of different content to one name one wins, and the others are told of the conflict."""
        store = await rig.open()
        puts = [store.put(*NAME, stream(b"version ", str(number).encode() * 1000)) for number in range(8)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        won = [outcome for outcome in outcomes if isinstance(outcome, StoredArtifact)]
        assert len(won) == 1
        assert sum(isinstance(outcome, ArtifactConflict) for outcome in outcomes) == 7
        async for store in rig.now_and_reopened():
            assert await store.stat(*NAME) == won[0]
            assert digest_of(await whole(store, won[0].digest)) == won[0].digest

    @scenario
    async def test_the_same_content_at_once(self, store: ArtifactStore) -> None:
        """Concurrent uploads of the same content, to one name and to several, all succeed and keep one copy."""
        data = noise(300_000)
        names = [(BUCKET, f"key-{number % 4}") for number in range(12)]
        await asyncio.gather(*(store.put(*name, stream(data[:100_000], data[100_000:])) for name in names))
        stats = await store.stats()
        assert (stats.artifacts, stats.used_bytes) == (1, len(data))
        assert await all_names(store) == [(BUCKET, f"key-{number}") for number in range(4)]
        assert await whole(store, digest_of(data)) == data

    @scenario
    async def test_lies_about_the_content(self, store: ArtifactStore) -> None:
        """Another digest or size than announced is refused, be it too much or too little, and nothing is kept."""
        good, size = digest_of(HELLO), len(HELLO)
        attempts = (
            store.put(*NAME, stream(HELLO), digest=digest_of(b"another"), size_bytes=size),
            store.put(*NAME, stream(HELLO), digest=digest_of(b"another")),
            store.put(*NAME, stream(HELLO), digest=good, size_bytes=size - 1),
            store.put(*NAME, stream(HELLO), size_bytes=size + 1),
            store.put(*NAME, stream(HELLO[:-1]), digest=good, size_bytes=size),
            store.put(*NAME, stream(HELLO[:-1]), digest=good),
            store.put(*NAME, stream(HELLO, b"more"), digest=good, size_bytes=size),
            store.put(*NAME, stream(), digest=good, size_bytes=size),
            store.add(stream(HELLO), size_bytes=0),
        )
        await refused(attempts, DigestMismatch)
        await check_empty(store)

    @scenario
    async def test_an_endless_source_is_stopped(self, store: ArtifactStore) -> None:
        """A source that gives more than it announced is not read to its end."""
        given = 0

        async def endless() -> AsyncIterator[Bytes]:
            nonlocal given
            while True:
                given += 1
                yield bytes(1 << 20)

        with pytest.raises(DigestMismatch):
            await store.add(endless(), size_bytes=3 << 20)
        assert given <= 5

    @scenario
    async def test_a_source_that_breaks(self, store: ArtifactStore) -> None:
        """What the source raises reaches the caller, nothing is kept, and the name stays free."""
        with pytest.raises(SourceBroke):
            await store.put(*NAME, stream(noise(3 << 20), error=SourceBroke()))
        await check_empty(store)
        assert (await store.put(*NAME, stream(HELLO))).digest == digest_of(HELLO)

    @scenario
    async def test_a_cancelled_upload(self, rig: ArtifactRig) -> None:
        """An upload that is cancelled leaves nothing and holds no room."""
        store = await rig.open(capacity_bytes=4 << 20)
        waiting = asyncio.Event()

        async def stalling() -> AsyncIterator[Bytes]:
            yield noise(3 << 20)
            waiting.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(store.put(*NAME, stalling()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_empty(store)
        await store.put(*NAME, stream(noise(4 << 20)))

    @scenario
    async def test_too_large(self, rig: ArtifactRig) -> None:
        """Content above the limit is refused, announced or not; at the limit it is taken."""
        store = await rig.open(max_artifact_bytes=1000)
        attempts = (
            store.put(*NAME, stream(bytes(1001))),
            store.put(*NAME, stream(*[bytes(100)] * 11)),
            store.put(*NAME, stream(error=AssertionError("the source was read")), size_bytes=1001),
        )
        await refused(attempts, ArtifactTooLarge)
        await check_empty(store)
        assert (await store.put(*NAME, stream(bytes(1000)))).size_bytes == 1000

    @scenario
    async def test_a_full_store(self, rig: ArtifactRig) -> None:
        """Beyond the capacity new content is refused and a repeat is not; a restart counts the same."""
        store = await rig.open(capacity_bytes=1000)
        kept = await store.put(BUCKET, "kept", stream(bytes(600)))
        async for store in rig.now_and_reopened():
            await refused([store.put(*NAME, stream(noise(401)))], ArtifactStoreFull)
            assert await store.put(BUCKET, "kept", stream(bytes(600)), digest=kept.digest) == kept
            assert (await store.stats()).used_bytes == 600
        await store.put(*NAME, stream(noise(400)))
        rig.clock.advance(2 * GRACE_SECONDS)
        await rig.collect(kept.digest)
        await store.put(BUCKET, "third", stream(noise(400, 3)))

    @scenario
    async def test_uploads_under_way_share_the_room(self, rig: ArtifactRig) -> None:
        """Two uploads at once cannot both take the last room."""
        store = await rig.open(capacity_bytes=5 << 20)
        puts = [store.put(BUCKET, f"key-{n}", stream(*[noise(1 << 20, n)] * 3)) for n in range(2)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert sum(isinstance(outcome, StoredArtifact) for outcome in outcomes) <= 1
        assert (await store.stats()).used_bytes <= 5 << 20
