"""Artifacts on the journey: there before their fact is, in every zone, and gone when no fact names them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.journey.zones import Inbound, Zone, append, connect

from bsfg.artifacts import ArtifactStore
from bsfg.batch import FactBatch
from bsfg.errors import (
    ArtifactMissing,
    ArtifactStoreFull,
    ArtifactTooLarge,
    BsfgError,
    DigestMismatch,
    InvalidFact,
    PeerUnreachable,
)
from bsfg.fact import ArtifactRef, Message
from bsfg.journey.artifacts import (
    References,
    Replicated,
    all_buffers,
    bring_artifacts,
    collect_orphans,
    named_artifacts,
    replicate_artifact,
    require_artifacts,
)
from bsfg.journey.receive import PullProgress
from bsfg.ports import Buffer
from bsfg.sealing import seal
from bsfg.stores.artifacts import ArtifactFolder
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.artifact_uploads import BAD_NAMES, digest_of, noise, stream, whole
from bsfg.testing.disk import SimulatedArtifactDisk
from bsfg.testing.facts import messages, sealed

MakeZone = Callable[[str], Zone]

GRACE_SECONDS = 3600.0
REPORT = b"the report of batch B1042"


def reference(data: bytes = REPORT, key: str = "report.pdf", bucket: str = "batch-files") -> ArtifactRef:
    """Refer to content as a fact does."""
    return ArtifactRef(bucket, key, digest_of(data), len(data), "application/pdf", "report.pdf")


def naming(artifact: ArtifactRef | None, number: int = 0) -> Message:
    """Make a fact that names an artifact, or none."""
    (message,) = messages(1, first=number)
    return replace(message, fact=replace(message.fact, artifact=artifact))


def batch_of(*artifacts: ArtifactRef | None) -> FactBatch:
    """Make a sealed batch with these artifacts."""
    return sealed([naming(artifact, number) for number, artifact in enumerate(artifacts)])


async def opened(**settings: Any) -> ArtifactFolder:
    """Open an empty store on a disk in memory."""
    return await ArtifactFolder.open(SimulatedArtifactDisk(), **settings)


async def put(store: ArtifactStore, artifact: ArtifactRef, data: bytes = REPORT) -> None:
    """Upload what a reference names."""
    assert artifact.bucket is not None and artifact.key is not None and artifact.media_type is not None
    await store.put(artifact.bucket, artifact.key, stream(data), media_type=artifact.media_type)


class Source:
    """Another zone's store that says what a test wants it to say."""

    def __init__(self, *parts: bytes, error: Exception | None = None) -> None:
        self._parts, self._error = parts, error
        self.asked: list[str] = []

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give the parts, whatever was asked for."""
        self.asked.append(digest)
        for part in self._parts:
            yield part
        if self._error is not None:
            raise self._error


# What a producer may append.


async def test_an_uploaded_artifact_may_be_named() -> None:
    """A fact may be appended once its artifact is here under that name; facts without artifacts need nothing."""
    store = await opened()
    await require_artifacts(batch_of(None, None), store)
    await put(store, reference())
    await require_artifacts(batch_of(None, reference(), None, reference()), store)


PARTS: list[dict[str, object]] = [
    {},
    {"size_bytes": len(REPORT)},
    {"media_type": "image/png"},
    {"file_name": "report.pdf"},
    {"bucket": "batch-files", "key": "report.pdf"},
    {"bucket": "sha256", "key": digest_of(REPORT)[7:]},
]


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("parts", PARTS)
async def test_the_digest_alone_is_a_reference(parts: dict[str, object], rows: int) -> None:
    """Whatever a reference leaves out is filled in, as peers of any age expect it; digests and ids stay as they are."""
    store = await opened()
    await put(store, reference())
    bare = ArtifactRef(digest=digest_of(REPORT), **parts)  # type: ignore[arg-type]
    given = batch_of(*[bare, None, reference()] * rows)
    batch = await require_artifacts(given, store)
    assert batch.sealed
    assert (batch.digests(), batch.values("message_id")) == (given.digests(), given.values("message_id"))
    first, second, third = (each.fact.artifact for each in batch.to_messages()[-3:])
    assert (second, third) == (None, reference())
    assert first is not None
    name = ("batch-files", "report.pdf") if parts.get("bucket") == "batch-files" else ("sha256", bare.digest[7:])
    assert (first.bucket, first.key, first.size_bytes) == (*name, len(REPORT))
    assert (first.media_type, first.file_name) == (
        parts.get("media_type", "application/octet-stream"),
        parts.get("file_name"),
    )
    # What is whole is taken as it is, so that a fact which was read here can be sent again.
    assert await require_artifacts(batch, store) == batch


async def test_a_digest_that_is_not_here_is_missing() -> None:
    """A reference by digest alone is refused without its content, and with another size; other names do not matter."""
    store = await opened()
    await put(store, reference())
    for bare in (ArtifactRef(digest=digest_of(b"never")), ArtifactRef("sha256", "report.pdf", digest_of(b"never"))):
        with pytest.raises(ArtifactMissing, match="row 1: artifact sha256:"):
            await require_artifacts(batch_of(None, bare), store)
    with pytest.raises(DigestMismatch):
        await require_artifacts(batch_of(ArtifactRef(digest=digest_of(REPORT), size_bytes=3)), store)


async def test_a_missing_artifact_is_named_with_its_row() -> None:
    """An artifact that was not uploaded, or only under another name, refuses the batch and says where."""
    store = await opened()
    await put(store, reference())
    for missing in (reference(b"never", "never.pdf"), reference(key="other.pdf"), reference(bucket="asset-files")):
        with pytest.raises(ArtifactMissing) as caught:
            await require_artifacts(batch_of(None, reference(), missing), store)
        assert caught.value.details["row"] == 2
        assert caught.value.details["digest"] == missing.digest


async def test_an_altered_artifact_is_a_digest_mismatch() -> None:
    """A fact whose artifact has another digest or size than what was uploaded under its name is refused."""
    store = await opened()
    await put(store, reference())
    for altered in (reference(b"another version"), replace(reference(), size_bytes=len(REPORT) + 1)):
        with pytest.raises(DigestMismatch) as caught:
            await require_artifacts(batch_of(altered), store)
        assert caught.value.details["row"] == 0


async def test_lost_content_is_missing() -> None:
    """A name whose content was lost from the disk is not enough."""
    disk, digits = SimulatedArtifactDisk(), reference().digest.removeprefix("sha256:")
    store = await ArtifactFolder.open(disk)
    await put(store, reference())
    disk.remove(f"content/{digits[:2]}/{digits}")
    with pytest.raises(ArtifactMissing):
        await require_artifacts(batch_of(reference()), store)


async def test_hostile_names_are_invalid_facts() -> None:
    """A reference that cannot be the name of an artifact is the producer's mistake, named with its field."""
    store = await opened()
    await put(store, reference())
    for bucket, key in BAD_NAMES:
        if "\ud800" in key:
            continue  # no JSON can say that
        hostile = FactBatch.from_messages([naming(replace(reference(), bucket=bucket, key=key))])
        with pytest.raises(InvalidFact) as caught:
            await require_artifacts(hostile, store)
        assert caught.value.details["field"] == "artifact"


async def test_references_of_unchecked_batches_are_checked() -> None:
    """A batch that was not sealed yet is read with care: bad JSON, half a reference and bad bytes are told."""
    good = FactBatch.from_messages([naming(None), naming(reference(), 1)])
    text, digest = good.values("artifact")[1], good.values("artifact_digest")[1]
    bad_bytes = pa.StringArray.from_buffers(2, pa.array([0, 0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe"))
    for texts, digests in (
        (["{", text], [digest, digest]),
        ([None, None], [None, digest]),
        ([None, text], [None, None]),
        ([None, text], [None, digest[:-1] + "x"]),
        (bad_bytes, [digest, digest]),
    ):
        columns = {"artifact": pa.array(texts, pa.string()), "artifact_digest": pa.array(digests, pa.string())}
        with pytest.raises(InvalidFact):
            await require_artifacts(good.with_columns(**columns), await opened())


@given(choices=st.lists(st.sampled_from([None, None, 0, 1, 2]), max_size=150))
def test_each_reference_is_found_once(choices: list[int | None]) -> None:
    """Small batches of rows and large ones of columns give the same references, each once, with its first row."""
    pool = [reference(str(number).encode(), f"key-{number}") for number in range(3)]
    artifacts = [None if choice is None else pool[choice] for choice in choices]
    expected: dict[ArtifactRef, int] = {}
    for row, artifact in enumerate(artifacts):
        if artifact is not None:
            expected.setdefault(artifact, row)
    rows = FactBatch.from_messages([naming(artifact, number) for number, artifact in enumerate(artifacts)])
    for batch in (rows, FactBatch(rows.record_batch)):
        assert {named.reference: named.row for named in named_artifacts(batch)} == expected


# What a receiver brings.


async def test_an_artifact_is_brought_once(tmp_path: Path) -> None:
    """Replication brings content and name, verified; a repeat, or content that is here, brings nothing."""
    data = noise((3 << 20) + 5)
    wanted = reference(data)
    source, target = await ArtifactFolder.open(tmp_path / "a"), await ArtifactFolder.open(tmp_path / "b")
    await put(source, wanted, data)
    assert await replicate_artifact(source, target, wanted) == Replicated(wanted, len(data), named=True)
    stored = await target.stat("batch-files", "report.pdf")
    assert stored is not None
    assert stored.reference(wanted.file_name) == wanted
    assert await whole(target, wanted.digest) == data
    silent = Source()
    assert await replicate_artifact(silent, target, wanted) == Replicated(wanted, 0, named=True)
    copy = replace(wanted, key="copy.pdf")
    assert await replicate_artifact(silent, target, copy) == Replicated(copy, 0, named=True)
    assert silent.asked == []
    await source.close()
    await target.close()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (Source(REPORT[:-1]), DigestMismatch),
        (Source(), DigestMismatch),
        (Source(REPORT, b"more"), DigestMismatch),
        (Source(REPORT[::-1]), DigestMismatch),
        (Source(REPORT[:5], error=PeerUnreachable("gone")), PeerUnreachable),
        (Source(error=ArtifactMissing("lost")), ArtifactMissing),
        (Source(REPORT[:5], error=DigestMismatch("damaged there")), DigestMismatch),
    ],
)
async def test_a_source_that_fails_or_lies_brings_nothing(source: Source, error: type[BsfgError]) -> None:
    """Truncated, longer, altered, lost or interrupted content is refused, and a good source is taken afterwards."""
    target = await opened()
    with pytest.raises(error):
        await replicate_artifact(source, target, reference())
    assert not await target.exists(reference().digest)
    assert (await replicate_artifact(Source(REPORT), target, reference())).transferred_bytes == len(REPORT)


async def test_a_reference_that_lies_about_the_size() -> None:
    """A size that is not the content's is a mismatch, whether the content must be brought or is here."""
    for size_bytes in (0, len(REPORT) - 1, len(REPORT) + 1, 1 << 50):
        lying = replace(reference(), size_bytes=size_bytes)
        target = await opened()
        with pytest.raises(DigestMismatch):
            await replicate_artifact(Source(REPORT), target, lying)
        await put(target, reference())
        with pytest.raises(DigestMismatch):
            await replicate_artifact(Source(REPORT), target, lying)


async def test_limits_of_the_receiver_hold() -> None:
    """What is too large for the receiver, or does not fit, is refused before or while it is brought."""
    with pytest.raises(ArtifactTooLarge):
        await replicate_artifact(Source(REPORT), await opened(max_artifact_bytes=10), reference())
    with pytest.raises(ArtifactStoreFull):
        await replicate_artifact(Source(REPORT), await opened(capacity_bytes=10), reference())


async def test_a_name_that_is_taken_keeps_the_content_from_nobody() -> None:
    """Where a name stands for something else, or is none, the content arrives and is read by its digest."""
    target = await opened()
    own = reference(b"this zone's own report")
    await put(target, own, b"this zone's own report")
    hostile = [replace(reference(), bucket=bucket, key=key) for bucket, key in BAD_NAMES]
    for wanted in (reference(), *hostile):
        replicated = await replicate_artifact(Source(REPORT), target, wanted)
        assert not replicated.named
        assert await whole(target, wanted.digest) == REPORT
    stored = await target.stat("batch-files", "report.pdf")
    assert stored is not None
    assert stored.digest == own.digest
    assert [name async for name in target.names()] == [stored]


# The whole way.


@dataclass
class Pair:
    """Two zones with artifact stores, and the link between them."""

    sender: Zone
    receiver: Zone
    inbound: Inbound
    here: ArtifactFolder
    there: ArtifactFolder

    @staticmethod
    async def of(sender: Zone, receiver: Zone, inbound: Inbound) -> Pair:
        """Give zones their stores."""
        stores = [await opened(clock=zone.clock) for zone in (sender, receiver)]
        return Pair(sender, receiver, inbound, *stores)

    async def append(self, facts: Sequence[Message]) -> None:
        """Append as a node does: artifacts first."""
        batch = await require_artifacts(seal(FactBatch.from_messages(facts)), self.here)
        await append(await self.sender.store(), batch, clock=self.sender.clock)

    async def pull(self, source: Source | ArtifactFolder | None = None) -> PullProgress:
        """Make one turn that brings artifacts before it puts facts."""

        async def bring(batch: FactBatch) -> None:
            await bring_artifacts(batch, source or self.here, self.there)

        self.inbound.before_put = bring
        return await self.inbound.pull()


async def pair(make_zone: MakeZone) -> Pair:
    """Make a plant and an enterprise that pulls from it."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    return await Pair.of(plant, enterprise, await connect(plant, enterprise))


async def test_a_fact_is_confirmed_only_with_its_artifact(make_zone: MakeZone) -> None:
    """While the artifact cannot be brought nothing is put or confirmed; then both arrive, the artifact first."""
    zones = await pair(make_zone)
    await put(zones.here, reference())
    await zones.append([naming(None), naming(reference(), 1)])
    consumer = zones.inbound.link.consumer
    for source in (Source(REPORT[:5], error=PeerUnreachable("gone")), Source(b"something else")):
        with pytest.raises((PeerUnreachable, DigestMismatch)):
            await zones.pull(source)
        assert await zones.receiver.received() == []
        assert await zones.sender.committed(consumer) == -1
    progress = await zones.pull()
    assert (progress.inserted, progress.acknowledged) == (2, 1)
    (_, entry) = await zones.receiver.received()
    assert entry.message.fact.artifact == reference()
    assert await whole(zones.there, reference().digest) == REPORT


@pytest.mark.parametrize("filled_in", [True, False])
async def test_a_fact_with_a_digest_alone_crosses(make_zone: MakeZone, filled_in: bool) -> None:
    """Content is brought and kept by digest, filled in or not, and the receiver's own artifacts are no match."""
    zones = await pair(make_zone)
    await put(zones.here, reference())
    await put(zones.there, reference(b"its own", digest_of(REPORT)[7:], "batch-files"), b"its own")
    bare = ArtifactRef(digest=digest_of(REPORT))
    if filled_in:
        await zones.append([naming(bare)])
    else:
        await append(await zones.sender.store(), batch_of(bare), clock=zones.sender.clock)
    with pytest.raises(DigestMismatch):
        await zones.pull(Source(b"something else"))
    assert await zones.receiver.received() == []
    progress = await zones.pull()
    assert (progress.inserted, progress.acknowledged) == (1, 0)
    (entry,) = await zones.receiver.received()
    assert entry.message.fact.artifact is not None
    assert await whole(zones.there, entry.message.fact.artifact.digest) == REPORT
    assert [each.bucket async for each in zones.there.names()] == ["batch-files"]
    for zone, store in ((zones.sender, zones.here), (zones.receiver, zones.there)):
        zone.clock.advance(2 * GRACE_SECONDS)
        assert bare.digest not in await collected(zone, store, References())


async def test_an_append_without_the_upload_is_refused(make_zone: MakeZone) -> None:
    """A producer that appends before it uploads stores nothing."""
    zones = await pair(make_zone)
    with pytest.raises(ArtifactMissing):
        await zones.append([naming(None), naming(reference(), 1)])
    assert (await (await zones.sender.store()).stats()).end == 0


async def collected(zone: Zone, store: ArtifactStore, references: References) -> tuple[str, ...]:
    """Collect the orphans of a zone as a node does from time to time."""
    referenced = await references.scan(await all_buffers(await zone.storage()))
    return (await collect_orphans(store, referenced, zone.clock.now_unix_ms(), GRACE_SECONDS)).digests


async def test_artifacts_stay_as_long_as_a_fact_is_retained(make_zone: MakeZone) -> None:
    """An artifact is kept in either zone while a retained fact names it, and goes a grace period after the last."""
    zones = await pair(make_zone)
    orphan = reference(b"orphan", "orphan")
    await put(zones.here, reference())
    await put(zones.here, orphan, b"orphan")
    await zones.append([naming(reference(), number) for number in range(3)])
    await zones.pull()
    references = [References(zones.here.references), References(zones.there.references)]
    for zone in (zones.sender, zones.receiver):
        zone.clock.advance(2 * GRACE_SECONDS)
    assert await collected(zones.sender, zones.here, references[0]) == (orphan.digest,)
    assert await collected(zones.receiver, zones.there, references[1]) == ()
    await (await zones.sender.store()).truncate_before(3)
    await (await zones.receiver.forward()).truncate_before(2)
    for zone, store, tracker in (
        (zones.sender, zones.here, references[0]),
        (zones.receiver, zones.there, references[1]),
    ):
        assert await collected(zone, store, tracker) == ()
        zone.clock.advance(GRACE_SECONDS)
    assert await collected(zones.sender, zones.here, references[0]) == (reference().digest,)
    assert await collected(zones.receiver, zones.there, references[1]) == ()


async def test_a_fact_that_is_being_stored_keeps_its_artifact(make_zone: MakeZone) -> None:
    """A collection between the check of an artifact and the append of its fact leaves the artifact alone."""
    zones = await pair(make_zone)
    await put(zones.here, reference())
    await put(zones.there, reference())
    for zone in (zones.sender, zones.receiver):
        zone.clock.advance(10 * GRACE_SECONDS)
    batch = batch_of(reference())
    await require_artifacts(batch, zones.here)
    assert await zones.there.claim([reference().digest]) != [None]
    for zone, store in ((zones.sender, zones.here), (zones.receiver, zones.there)):
        await (zone.store() if zone is zones.sender else zone.forward())
        zone.clock.jump(10 * GRACE_SECONDS)
        assert await collected(zone, store, References()) == ()
        zone.clock.advance(GRACE_SECONDS)
        assert await collected(zone, store, References()) == (reference().digest,)


async def test_an_artifact_is_relayed(make_zone: MakeZone) -> None:
    """Over a relay in the middle an artifact arrives like its fact, from each zone's neighbour."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    first = await Pair.of(plant, idmz, await connect(plant, idmz))
    second = await Pair.of(idmz, enterprise, await connect(idmz, enterprise, relayed=["plant"], buffer=Buffer.FORWARD))
    second.here = first.there
    await put(first.here, reference())
    await first.append([naming(reference())])
    await first.pull()
    await second.pull()
    assert await whole(second.there, reference().digest) == REPORT
    assert [entry.message.fact.artifact for entry in await enterprise.received()] == [reference()]


async def test_random_histories_never_lose_a_named_artifact() -> None:
    """Whatever the order of uploads, appends, collections and time, no retained fact ever lacks its artifact."""

    async def history(seed: int) -> int:
        random, clock = Random(seed), FakeClock()
        store = await opened(clock=clock)
        facts: list[ArtifactRef] = []
        removed = 0
        for _ in range(150):
            data = str(random.randrange(8)).encode()
            artifact = reference(data, f"key-{data.decode()}")
            match random.choice(("put", "append", "collect", "advance", "truncate")):
                case "put":
                    await put(store, artifact, data)
                case "append":
                    try:
                        await require_artifacts(batch_of(artifact), store)
                        facts.append(artifact)
                    except ArtifactMissing:
                        assert artifact not in facts
                case "collect":
                    named = {each.digest for each in facts}
                    now_unix_ms = clock.now_unix_ms()
                    removed += len((await collect_orphans(store, named, now_unix_ms, GRACE_SECONDS)).digests)
                case "advance":
                    clock.advance(GRACE_SECONDS / 2)
                case "truncate":
                    del facts[: random.randrange(3)]
            assert all([await store.exists(each.digest) for each in facts])
        return removed

    assert sum([await history(seed) for seed in range(20)]) > 20
