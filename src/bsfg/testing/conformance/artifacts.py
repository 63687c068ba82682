"""The contract of `bsfg.artifacts.ArtifactStore`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

import pytest

from bsfg.artifacts import ArtifactStore, Bytes, StoredArtifact
from bsfg.errors import ArtifactConflict, ArtifactMissing, DigestMismatch, InvalidArgument, StorageClosed
from bsfg.testing.conformance.artifact_uploads import (
    BAD_NAMES,
    BUCKET,
    GRACE_SECONDS,
    HELLO,
    NAME,
    STRANGE_KEYS,
    ArtifactCase,
    ArtifactRig,
    UploadContract,
    all_names,
    check_empty,
    digest_of,
    noise,
    refused,
    scenario,
    stream,
    whole,
)

OPERATIONS = 400


class Model:
    """An artifact store as it is in the mind: contents with the time they were last needed, and names."""

    def __init__(self) -> None:
        self.needed_unix_ms: dict[str, int] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.data = {digest_of(str(number).encode()): str(number).encode() for number in range(12)}

    async def step(self, rig: ArtifactRig, random: Random) -> None:
        """Do one random thing to the store and to the model, and compare the answers."""
        store, now_unix_ms = rig.store, rig.clock.now_unix_ms()
        digest = random.choice(sorted(self.data))
        name = (BUCKET, f"key-{random.randrange(6)}")
        match random.choice(("put", "put", "link", "claim", "advance", "advance", "collect", "reopen", "check")):
            case "put":
                announced = random.choice((None, digest))
                taken = self.names.get(name, digest) != digest
                attempt = store.put(*name, stream(self.data[digest]), digest=announced)
                await self._bound(attempt, name, digest)
                # A conflict that was not announced is found when the content is stored already.
                if announced is None or not taken:
                    self.needed_unix_ms[digest] = now_unix_ms
            case "link":
                if digest in self.needed_unix_ms:
                    self.needed_unix_ms[digest] = now_unix_ms
                    await self._bound(store.link(*name, digest), name, digest)
                else:
                    await refused([store.link(*name, digest)], ArtifactMissing)
            case "claim":
                known = digest in self.needed_unix_ms
                assert await store.claim([digest]) == [len(self.data[digest]) if known else None]
                if known:
                    self.needed_unix_ms[digest] = now_unix_ms
            case "advance":
                rig.clock.advance(random.choice((GRACE_SECONDS / 3, GRACE_SECONDS / 7)))
            case "collect":
                await self._collect(rig, set(random.sample(sorted(self.data), 3)))
            case "reopen":
                await rig.reopen()
            case "check":
                await self.check(store)

    async def check(self, store: ArtifactStore) -> None:
        """Compare everything."""
        assert [(each.bucket, each.key, each.digest) async for each in store.names()] == sorted(
            (*name, digest) for name, digest in self.names.items()
        )
        for digest, data in self.data.items():
            assert await store.exists(digest) == (digest in self.needed_unix_ms)
            if digest in self.needed_unix_ms:
                assert await whole(store, digest) == data

    async def _bound(self, attempt: Coroutine[Any, Any, StoredArtifact], name: tuple[str, str], digest: str) -> None:
        if self.names.setdefault(name, digest) == digest:
            assert (await attempt).digest == digest
        else:
            await refused([attempt], ArtifactConflict)

    async def _collect(self, rig: ArtifactRig, referenced: set[str]) -> None:
        now_unix_ms = rig.clock.now_unix_ms()
        for digest in referenced & set(self.needed_unix_ms):
            self.needed_unix_ms[digest] = now_unix_ms
        gone = {
            digest
            for digest, needed_unix_ms in self.needed_unix_ms.items()
            if now_unix_ms - needed_unix_ms >= GRACE_SECONDS * 1000
        }
        assert set((await rig.collect(*referenced)).digests) == gone
        for digest in gone:
            del self.needed_unix_ms[digest]
        self.names = {name: digest for name, digest in self.names.items() if digest not in gone}


class HistoryContract(ArtifactCase):
    """What a random history of calls comes to."""

    @scenario
    async def test_any_history_is_that_of_a_plain_model(self, rig: ArtifactRig) -> None:
        """Whatever is done in whatever order, the store answers like two dictionaries."""
        await rig.open()
        model, random = Model(), Random(7)
        for _ in range(OPERATIONS):
            await model.step(rig, random)
        await model.check(rig.store)


MISSING = digest_of(b"never stored")


class NameContract(ArtifactCase):
    """What names are, and what `link`, `stat` and `names` promise."""

    @scenario
    async def test_names_are_only_names(self, rig: ArtifactRig) -> None:
        """Keys of any alphabet, case, length and look are kept apart from each other, after a restart too."""
        store = await rig.open()
        names = [(bucket, key) for bucket in ("bucket", "Bucket", "BUCKET.1") for key in STRANGE_KEYS]
        for name in names:
            await store.put(*name, stream(repr(name).encode()))
        async for store in rig.now_and_reopened():
            assert await all_names(store) == sorted(names)
            for name in names:
                artifact = await store.stat(*name)
                assert artifact is not None
                assert await whole(store, artifact.digest) == repr(name).encode()

    @scenario
    async def test_hostile_names_are_refused(self, store: ArtifactStore) -> None:
        """Names that climb, hide or mislead are refused by every method, unread, and nothing is kept."""
        content = await store.add(stream(HELLO))
        for name in BAD_NAMES:
            attempts = (
                store.put(*name, stream(error=AssertionError("the source was read"))),
                store.link(*name, content.digest),
                store.stat(*name),
            )
            await refused(attempts, InvalidArgument)
        with pytest.raises(InvalidArgument):
            await all_names(store, "../x")
        assert await all_names(store) == []

    @scenario
    async def test_what_is_no_digest_or_media_type(self, store: ArtifactStore) -> None:
        """A digest of another form, a negative size and a bad media type are refused by every method."""
        good = digest_of(HELLO)
        for bad in ("", good[7:], good.upper(), good[:-1], good + "0", good + "\n", "sha256:" + "../" * 21 + "x"):
            attempts: list[Coroutine[Any, Any, object]] = [
                store.put(*NAME, stream(HELLO), digest=bad),
                store.add(stream(HELLO), digest=bad),
                store.link(*NAME, bad),
                store.exists(bad),
                store.claim([good, bad]),
                whole(store, bad),
            ]
            await refused(attempts, InvalidArgument)
        for media_type in ("", "pdf", "a/b\n", "application/" + "x" * 250):
            attempts = [store.put(*NAME, stream(HELLO), media_type=media_type)]
            attempts.append(store.link(*NAME, good, media_type=media_type))
            await refused(attempts, InvalidArgument)
        await refused([store.add(stream(HELLO), size_bytes=-1)], InvalidArgument)
        await check_empty(store)

    @scenario
    async def test_a_link_names_what_is_here(self, rig: ArtifactRig) -> None:
        """Content gets further names without being sent again; without content there is no name."""
        store = await rig.open()
        content = await store.add(stream(HELLO))
        assert await all_names(store) == []
        first = await store.link(*NAME, content.digest, media_type="text/plain")
        assert (first.digest, first.size_bytes, first.media_type) == (*content, "text/plain")
        second = await store.link(BUCKET, "copy", content.digest)
        async for store in rig.now_and_reopened():
            assert [await store.stat(*NAME), await store.stat(BUCKET, "copy")] == [first, second]
        with pytest.raises(ArtifactMissing):
            await store.link(BUCKET, "nothing", MISSING)
        assert await store.stat(BUCKET, "nothing") is None

    @scenario
    async def test_links_race_for_a_name(self, store: ArtifactStore) -> None:
        """Of concurrent links of one name to different contents one wins."""
        contents = [await store.add(stream(bytes([number]))) for number in range(6)]
        links = [store.link(*NAME, content.digest) for content in contents]
        outcomes = await asyncio.gather(*links, return_exceptions=True)
        assert sum(isinstance(outcome, StoredArtifact) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, ArtifactConflict) for outcome in outcomes) == 5

    @scenario
    async def test_listing(self, store: ArtifactStore) -> None:
        """Names are listed in order, by bucket and by prefix of the key."""
        for bucket, key in (("b", "z"), ("a", "x/2"), ("a", "x/10"), ("a", "y"), ("b", "x/1")):
            await store.put(bucket, key, stream(key.encode()))
        assert await all_names(store) == [("a", "x/10"), ("a", "x/2"), ("a", "y"), ("b", "x/1"), ("b", "z")]
        assert await all_names(store, "b") == [("b", "x/1"), ("b", "z")]
        assert await all_names(store, prefix="x/") == [("a", "x/10"), ("a", "x/2"), ("b", "x/1")]
        assert await all_names(store, "a", "x/1") == [("a", "x/10")]
        assert await all_names(store, "c") == []


class ReadingContract(ArtifactCase):
    """What `get`, `exists` and `claim` promise."""

    @scenario
    async def test_what_is_not_here(self, store: ArtifactStore) -> None:
        """Unknown content is missing, and asking for it makes nothing."""
        content = await store.add(stream(HELLO))
        assert not await store.exists(MISSING)
        assert await store.claim([MISSING, content.digest, MISSING]) == [None, len(HELLO), None]
        assert await store.claim([]) == []
        with pytest.raises(ArtifactMissing):
            await whole(store, MISSING)

    @scenario
    async def test_altered_content_is_never_given_whole(self, store: ArtifactStore) -> None:
        """A changed byte, a lost tail or a foreign one is found while reading, before the last piece is given."""
        data = noise((2 << 20) + 500)
        content = await store.add(stream(data))
        turned = bytes([data[0] ^ 1]) + data[1:]
        for bad in (turned, data[:-1], data[: 1 << 20], data + b"x", b""):
            await self.damage(store, content.digest, bad)
            got = b""
            with pytest.raises(DigestMismatch):
                async for piece in store.get(content.digest):
                    got += piece
            assert len(got) < len(bad) or not bad

    @scenario
    async def test_damage_is_made_whole_by_a_repeat(self, store: ArtifactStore) -> None:
        """Uploading the same content again repairs a damaged copy."""
        put = await store.put(*NAME, stream(HELLO))
        await self.damage(store, put.digest, b"rotten")
        assert await store.put(*NAME, stream(HELLO), digest=put.digest) == put
        assert await whole(store, put.digest) == HELLO

    @scenario
    async def test_readers_read_on(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """Many readers at once get the same, and one that has begun is not disturbed by a collection."""
        data = noise((3 << 20) + 1)
        content = await store.add(stream(data))
        assert await asyncio.gather(*(whole(store, content.digest) for _ in range(4))) == [data] * 4
        reader = store.get(content.digest)
        got = await anext(reader)
        rig.clock.advance(GRACE_SECONDS)
        assert (await rig.collect()).digests == (content.digest,)
        assert got + b"".join([piece async for piece in reader]) == data


class CollectionContract(ArtifactCase):
    """What `collect` promises."""

    @scenario
    async def test_orphans_go_after_the_grace_period(self, rig: ArtifactRig) -> None:
        """What no fact names goes with its names once the grace period is over, not before; a restart counts on."""
        store = await rig.open()
        named = await store.put(*NAME, stream(HELLO))
        await store.link(BUCKET, "copy", named.digest)
        bare = await store.add(stream(b"unnamed"))
        kept = await store.put(BUCKET, "kept", stream(b"kept"))
        rig.clock.advance(GRACE_SECONDS - 1)
        store = await rig.reopen()
        assert (await rig.collect(kept.digest)).digests == ()
        assert await whole(store, named.digest) == HELLO
        rig.clock.advance(1)
        collected = await rig.collect(kept.digest, MISSING)
        assert set(collected.digests) == {named.digest, bare.digest}
        assert (collected.names, collected.freed_bytes) == (2, len(HELLO) + len(b"unnamed"))
        async for store in rig.now_and_reopened():
            assert await all_names(store) == [(BUCKET, "kept")]
            assert await store.claim([named.digest, bare.digest, kept.digest]) == [None, None, 4]
            assert (await store.stats()).used_bytes == 4
        assert (await store.put(*NAME, stream(b"another time"))).digest == digest_of(b"another time")

    @scenario
    async def test_the_period_begins_when_it_was_last_needed(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """Storing, linking, claiming and being referenced each begin the grace period anew, across a restart too."""
        digest = (await store.add(stream(HELLO))).digest

        async def claim() -> object:
            return await rig.store.claim([digest])

        async def add() -> object:
            return await rig.store.add(stream(HELLO))

        async def link() -> object:
            return await rig.store.link(*NAME, digest)

        async def reference() -> object:
            return await rig.collect(digest)

        needs: list[Callable[[], Coroutine[Any, Any, object]]] = [claim, add, link, reference, link, claim]
        for need in needs:
            rig.clock.advance(GRACE_SECONDS - 1)
            await need()
            rig.clock.advance(GRACE_SECONDS - 1)
            assert (await rig.collect()).digests == (), need.__name__
            await rig.reopen()
            assert (await rig.collect()).digests == (), need.__name__
        rig.clock.advance(1)
        assert (await rig.collect()).digests == (digest,)

    @scenario
    async def test_a_clock_that_jumps_collects_nothing_new(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """A wall clock that jumps forward does not age what was stored or claimed since the store was opened."""
        digest = (await store.add(stream(HELLO))).digest
        rig.clock.jump(10 * GRACE_SECONDS)
        assert (await rig.collect()).digests == ()
        rig.clock.advance(GRACE_SECONDS)
        assert (await rig.collect()).digests == (digest,)
        rig.clock.jump(-20 * GRACE_SECONDS)
        await store.add(stream(HELLO))
        assert (await rig.collect()).digests == ()

    @scenario
    async def test_collecting_while_others_work(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """What is claimed, stored or linked while collections run is there afterwards, with its name."""
        data = [f"content {number}".encode() for number in range(30)]
        for each in data:
            await store.add(stream(each))
        rig.clock.advance(GRACE_SECONDS)

        async def use(number: int) -> None:
            digest = digest_of(data[number])
            if number % 3 == 0:
                used = await store.claim([digest]) != [None]
            elif number % 3 == 1:
                await store.put(BUCKET, f"{number}", stream(data[number]))
                used = True
            else:
                try:
                    await store.link(BUCKET, f"{number}", digest)
                    used = True
                except ArtifactMissing:
                    used = False
            answers[number] = used

        async def collect() -> None:
            await rig.collect()

        answers: dict[int, bool] = {}
        work = [use(number) for number in range(30)]
        await asyncio.gather(*work[:10], collect(), *work[10:20], collect(), *work[20:], collect())
        await rig.collect()
        for number, used in answers.items():
            assert await store.exists(digest_of(data[number])) == used
            named = await store.stat(BUCKET, f"{number}")
            assert (named is not None) == (used and number % 3 != 0)

    @scenario
    async def test_a_negative_grace_is_refused(self, store: ArtifactStore) -> None:
        """A grace period below nothing is a mistake."""
        await refused([store.collect(set(), now_unix_ms=0, grace_seconds=-1.0)], InvalidArgument)


class ClosingContract(ArtifactCase):
    """What `close` promises."""

    @scenario
    async def test_a_closed_store_refuses(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """After close every method says so, a second close is harmless, and everything is there on reopening."""
        put = await store.put(*NAME, stream(HELLO))
        await store.close()
        await store.close()
        attempts = (
            store.put(*NAME, stream(HELLO)),
            store.add(stream(HELLO)),
            store.link(*NAME, put.digest),
            store.stat(*NAME),
            store.exists(put.digest),
            store.claim([put.digest]),
            whole(store, put.digest),
            all_names(store),
            store.collect(set(), now_unix_ms=0, grace_seconds=0.0),
            store.stats(),
        )
        await refused(attempts, StorageClosed)
        assert await (await rig.reopen()).stat(*NAME) == put

    @scenario
    async def test_closing_breaks_uploads_off(self, rig: ArtifactRig, store: ArtifactStore) -> None:
        """An upload under way is told that the store was closed, and leaves nothing."""
        begun, closed = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[Bytes]:
            yield noise(2 << 20)
            begun.set()
            await closed.wait()
            yield b"more"

        task = asyncio.create_task(store.put(*NAME, slow()))
        await begun.wait()
        await store.close()
        closed.set()
        with pytest.raises(StorageClosed):
            await task
        await check_empty(await rig.reopen())


class ArtifactStoreContract(
    UploadContract, NameContract, ReadingContract, CollectionContract, ClosingContract, HistoryContract
):
    """Everything that an artifact store promises."""
