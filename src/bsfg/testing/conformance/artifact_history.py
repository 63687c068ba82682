"""The contract of `bsfg.artifacts.ArtifactStore` as a whole: any history of calls, held against a plain model."""

from __future__ import annotations

from collections.abc import Coroutine
from random import Random
from typing import Any

from bsfg.artifacts import ArtifactStore, StoredArtifact
from bsfg.errors import ArtifactConflict, ArtifactMissing
from bsfg.testing.conformance.artifact_case import (
    BUCKET,
    GRACE_SECONDS,
    ArtifactCase,
    ArtifactRig,
    digest_of,
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
