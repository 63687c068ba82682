"""The contract of `bsfg.artifacts.ArtifactStore` for uploads: what is kept, what is refused, and who wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bsfg.artifacts import Bytes, StoredArtifact
from bsfg.errors import ArtifactConflict, ArtifactStoreFull, ArtifactTooLarge, DigestMismatch
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.conformance.artifact_case import (
    BUCKET,
    GRACE_SECONDS,
    HELLO,
    NAME,
    PDF,
    ArtifactCase,
    ArtifactRig,
    SourceBroke,
    all_names,
    check_empty,
    digest_of,
    noise,
    refused,
    scenario,
    stream,
    whole,
)


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
    async def test_sizes_around_the_pieces(self, rig: ArtifactRig) -> None:
        """Content of any size, nothing included, arrives in parts of any kind and size and comes back whole."""
        store = await rig.open()
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
    async def test_a_source_may_use_its_memory_again(self, rig: ArtifactRig) -> None:
        """What a source gave is kept as it was at that moment, whatever it writes into its buffer next."""
        store = await rig.open()

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
    async def test_an_announced_conflict_is_refused_unread(self, rig: ArtifactRig) -> None:
        """A put that announces another digest is refused before a byte is read, and its source is closed."""
        store = await rig.open()
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
    async def test_the_same_content_at_once(self, rig: ArtifactRig) -> None:
        """Concurrent uploads of the same content, to one name and to several, all succeed and keep one copy."""
        store = await rig.open()
        data = noise(300_000)
        names = [(BUCKET, f"key-{number % 4}") for number in range(12)]
        await asyncio.gather(*(store.put(*name, stream(data[:100_000], data[100_000:])) for name in names))
        stats = await store.stats()
        assert (stats.artifacts, stats.used_bytes) == (1, len(data))
        assert await all_names(store) == [(BUCKET, f"key-{number}") for number in range(4)]
        assert await whole(store, digest_of(data)) == data

    @scenario
    async def test_lies_about_the_content(self, rig: ArtifactRig) -> None:
        """Another digest or size than announced is refused, be it too much or too little, and nothing is kept."""
        store = await rig.open()
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
    async def test_an_endless_source_is_stopped(self, rig: ArtifactRig) -> None:
        """A source that gives more than it announced is not read to its end."""
        store = await rig.open()
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
    async def test_a_source_that_breaks(self, rig: ArtifactRig) -> None:
        """What the source raises reaches the caller, nothing is kept, and the name stays free."""
        store = await rig.open()
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
