"""Beside the facts: their artifacts are there before they are, and are kept as long as a fact names them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bsfg.artifacts import (
    DEFAULT_MEDIA_TYPE,
    ArtifactSource,
    ArtifactStore,
    Collected,
    ReferenceMemory,
    StoredArtifact,
    check_name,
    completed,
    own_name,
)
from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import ArtifactConflict, ArtifactMissing, BsfgError, DigestMismatch, InvalidArgument, StorageFailed
from bsfg.fact import ArtifactRef
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.jsonform import artifact_to_dict
from bsfg.model import artifact_problem
from bsfg.offload import by_size
from bsfg.ports import UNREADABLE, Buffer, BufferStats, Replayable, Storage
from bsfg.retention import Policy
from bsfg.rules import invalid
from bsfg.sealing import with_references


@dataclass(frozen=True, slots=True)
class NamedArtifact:
    """A reference to an artifact and the first row of a batch that holds it."""

    row: int
    reference: ArtifactRef


@dataclass(frozen=True, slots=True)
class Replicated:
    """What became of one artifact: the bytes that were brought, and whether it has its name here too."""

    reference: ArtifactRef
    transferred_bytes: int
    named: bool


def named_artifacts(batch: FactBatch) -> list[NamedArtifact]:
    """Give each different reference to an artifact in a batch once, in order; rows without one cost nothing.

    Raises `InvalidFact` for a reference that is none.
    """
    first_rows: dict[tuple[str | None, str | None], int] = {}
    for row, pair in _pairs(batch):
        first_rows.setdefault(pair, row)
    found = []
    for (text, digest), row in first_rows.items():
        problem = artifact_problem(text, digest)
        if problem is not None:
            raise invalid(row, *problem)
        found.append(NamedArtifact(row, ArtifactRef(**orjson.loads(text or ""))))
    return found


def _pairs(batch: FactBatch) -> list[tuple[int, tuple[str | None, str | None]]]:
    """Give row, reference and digest of the rows that have an artifact."""
    if not batch.names_artifacts:
        return []
    if batch.has_rows:
        pairs = zip(batch.values("artifact"), batch.values("artifact_digest"), strict=True)
        return [(row, pair) for row, pair in enumerate(pairs) if pair != (None, None)]
    texts, digests = batch.column("artifact"), batch.column("artifact_digest")
    rows = np.flatnonzero(~(texts.is_null().to_numpy(False) & digests.is_null().to_numpy(False)))
    columns = [_taken(column, name, rows) for name, column in (("artifact", texts), ("artifact_digest", digests))]
    return list(zip(rows.tolist(), zip(*columns, strict=True), strict=True))


def _taken(column: pa.Array, name: str, rows: np.ndarray) -> list[str | None]:
    """Give some values of a column that may come from anywhere."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise invalid(int(rows[0]), name, f"is malformed: {error}") from None
    values: list[str | None] = column.take(pa.array(rows)).to_pylist()
    return values


async def require_artifacts(batch: FactBatch, store: ArtifactStore) -> FactBatch:
    """Give a producer's facts with whole references, or raise unless every artifact that they name is here.

    A reference is the digest; the name, the size and the media type are filled in where they are left out, and checked
    where they are given. `ArtifactMissing` when it was not uploaded, or not under that name, `DigestMismatch` when the
    name stands for other content or the size differs, `InvalidFact` for what cannot be a name. What is here is
    claimed: no orphan collection takes it until the facts are durable, provided that they become so within the grace
    period. Call it right before the append.
    """
    named = named_artifacts(batch)
    if not named:
        return batch
    sizes = await store.claim([each.reference.digest for each in named])
    written: dict[str, str] = {}
    for each, size_bytes in zip(named, sizes, strict=True):
        whole = await _required(each, size_bytes, store)
        if whole != each.reference:
            written[_text(each.reference)] = _text(whole)
    return with_references(batch, written) if written else batch


async def _required(named: NamedArtifact, size_bytes: int | None, store: ArtifactStore) -> ArtifactRef:
    reference, name = named.reference, own_name(named.reference)
    stored = None
    if name is not None:
        stored = await _standing(named, name, store)
    if size_bytes is None or (name is not None and stored is None):
        raise _problem(ArtifactMissing, named, "is not here")
    if reference.size_bytes not in (None, size_bytes):
        raise _problem(DigestMismatch, named, f"has {size_bytes} bytes here, not {reference.size_bytes}")
    return completed(reference, size_bytes)


async def _standing(named: NamedArtifact, name: tuple[str, str], store: ArtifactStore) -> StoredArtifact | None:
    """Give what the name of a reference stands for, which must be the digest that it says."""
    try:
        check_name(*name)
    except InvalidArgument as error:
        raise invalid(named.row, "artifact", error.message) from None
    stored = await store.stat(*name)
    if stored is not None and stored.digest != named.reference.digest:
        raise _problem(DigestMismatch, named, f"is here with the digest {stored.digest}, not {named.reference.digest}")
    return stored


def _text(reference: ArtifactRef) -> str:
    return orjson.dumps(artifact_to_dict(reference), option=orjson.OPT_SORT_KEYS).decode()


def _problem(kind: type[BsfgError], named: NamedArtifact, says: str) -> BsfgError:
    reference = named.reference
    name = own_name(reference)
    return kind(
        f"row {named.row}: artifact {'/'.join(name) if name else reference.digest} {says}",
        row=named.row,
        bucket=reference.bucket,
        key=reference.key,
        digest=reference.digest,
    )


async def replicate_artifact(source: ArtifactSource, target: ArtifactStore, reference: ArtifactRef) -> Replicated:
    """Bring one artifact from another zone, verified and in bounded memory; what is here already is not sent again.

    The content is there when this answers. It has its name here too, unless that stands for something else or is
    none; then facts still get at it by digest. Raises `ArtifactMissing` when the source has lost it,
    `DigestMismatch` when what arrives, or what is here, is not what the reference says, and what `ArtifactStore.add`
    raises.
    """
    transferred_bytes = 0
    (size_bytes,) = await target.claim([reference.digest])
    if size_bytes is None:
        content = source.get(reference.digest)
        added = await target.add(content, digest=reference.digest, size_bytes=reference.size_bytes)
        transferred_bytes = added.size_bytes
    elif reference.size_bytes not in (None, size_bytes):
        raise DigestMismatch(
            f"{reference.digest} has {size_bytes} bytes here, the reference says {reference.size_bytes}",
            digest=reference.digest,
        )
    name = own_name(reference)
    if name is None:
        return Replicated(reference, transferred_bytes, named=False)
    try:
        await target.link(*name, reference.digest, media_type=reference.media_type or DEFAULT_MEDIA_TYPE)
    except (ArtifactConflict, InvalidArgument):
        return Replicated(reference, transferred_bytes, named=False)
    return Replicated(reference, transferred_bytes, named=True)


async def bring_artifacts(batch: FactBatch, source: ArtifactSource, target: ArtifactStore) -> list[Replicated]:
    """Bring every artifact that received facts name and this zone lacks; the step before they are put.

    After any exception the next call goes on where this one stopped. It is what a native turn does as
    `bsfg.journey.receive.BeforePut`.
    """
    return [await replicate_artifact(source, target, named.reference) for named in named_artifacts(batch)]


async def collect_orphans(
    store: ArtifactStore, referenced: AbstractSet[str], now_unix_ms: int, grace_seconds: float
) -> Collected:
    """Remove what no retained fact has named for the grace period.

    ``referenced`` comes from `bsfg.journey.artifacts.References.scan`, made right before. A fact that became
    durable after that scan is safe all the same, because whoever stored it claimed its artifact first.
    """
    return await store.collect(referenced, now_unix_ms=now_unix_ms, grace_seconds=grace_seconds)


FORMAT = 1
SCANNED_FACTS = 50_000


@dataclass(slots=True)
class BufferReferences:
    """What is known of one buffer: how far it was read, its last entry then, and who is named last where."""

    log_id: str
    next_offset: int = 0
    anchor_offset: int = -1
    anchor_digest: str = ""
    last_offsets: dict[str, int] = field(default_factory=dict)

    def take(self, entries: EntryBatch, wanted: FactFilter = EVERY_FACT) -> None:
        """Note what those of some entries name that are wanted; they follow what was seen before."""
        (digests, rows), offsets = named_digests(entries), entries.offsets
        counts = wanted.wanted(entries.take(rows)) if wanted and digests else np.ones(len(rows), dtype=bool)
        self.last_offsets.update(compress(zip(digests, offsets[rows].tolist(), strict=True), counts.tolist()))
        self.anchor_offset = int(offsets[-1])
        self.anchor_digest = entries.slice(len(entries) - 1).digests()[0].hex()

    def forget_before(self, start: int) -> None:
        """Forget what is named only by entries that have left."""
        self.last_offsets = {digest: last for digest, last in self.last_offsets.items() if last >= start}


def named_digests(batch: FactBatch) -> tuple[list[str], np.ndarray]:
    """Give the artifact digests in a batch and the rows they stand in."""
    column = batch.column("artifact_digest")
    if column.null_count == len(batch):
        return [], np.empty(0, dtype=np.int64)
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return column.drop_null().to_pylist(), rows


class References:
    """The digests that retained facts name, or those of them that are wanted, kept up to date by whoever asks."""

    def __init__(self, memory: ReferenceMemory | None = None, *, wanted: FactFilter = EVERY_FACT) -> None:
        self._memory, self._wanted = memory, wanted
        self._seen: dict[str, BufferReferences] | None = None
        self._remembered: bytes | None = None
        self._recalling = asyncio.Lock()
        self._reading: dict[str, asyncio.Lock] = {}
        self._trusted: set[str] = set()
        """The buffers of which what is known was found to fit since this was made."""

    async def scan(self, buffers: Iterable[Replayable]) -> frozenset[str]:
        """Give every digest that a durable, retained or quarantined fact of these buffers names at this moment.

        The buffers must be all that the zone has (see `all_buffers`): what a buffer that is left out names would be
        taken for an orphan. What has left a buffer is forgotten here.
        """
        referenced, present = set[str](), set[str]()
        for buffer in buffers:
            present.add(_name(buffer))
            seen = await self._up_to_date(buffer, trusting=False)
            seen.forget_before((await buffer.stats()).start)
            referenced.update(seen.last_offsets)
            after: int | None = None
            while page := await buffer.quarantine(after):
                for item in page:
                    if item.reason == UNREADABLE:
                        raise StorageFailed(f"what a fact in quarantine names is not known: {item.detail}")
                    referenced.update(named_digests(item.facts)[0])
                after = page[-1].id
        known = await self._known()
        for name in known.keys() - present:
            del known[name]
        await self._remember(known)
        return frozenset(referenced)

    async def names(self, buffer: Replayable, digest: str) -> bool:
        """Tell whether a fact of a buffer names a digest, or did so at the last scan and has left since.

        Whoever was given a fact a moment ago may still ask for what it names, although others have let the fact go.
        """
        return self.is_known(buffer, digest) or digest in (await self._up_to_date(buffer)).last_offsets

    def is_known(self, buffer: Replayable, digest: str) -> bool:
        """Tell whether it is known without reading anything that a fact of a buffer names a digest."""
        name = _name(buffer)
        seen = self._seen.get(name) if self._seen is not None and name in self._trusted else None
        return seen is not None and seen.log_id == buffer.log_id and digest in seen.last_offsets

    async def _up_to_date(self, buffer: Replayable, *, trusting: bool = True) -> BufferReferences:
        """Read what came since the last time, or everything when what is known does not fit the buffer."""
        known, name = await self._known(), _name(buffer)
        async with self._reading.setdefault(name, asyncio.Lock()):
            stats, seen = await buffer.stats(), known.get(name)
            trusted = trusting and name in self._trusted
            if seen is None or not (_follows(seen, buffer, stats.end) and (trusted or await _fits(buffer, seen))):
                seen = BufferReferences(buffer.log_id)
            await _read_on(buffer, seen, stats, self._wanted)
            known[name] = seen
            self._trusted.add(name)
            return seen

    async def _known(self) -> dict[str, BufferReferences]:
        async with self._recalling:
            if self._seen is None:
                self._remembered = await self._memory.recall() if self._memory is not None else None
                self._seen = decoded(self._remembered) if self._remembered is not None else {}
        return self._seen

    async def _remember(self, seen: Mapping[str, BufferReferences]) -> None:
        data = encoded(seen)
        if self._memory is not None and data != self._remembered:
            await self._memory.remember(data)
            self._remembered = data


def _name(buffer: Replayable) -> str:
    return f"{buffer.buffer}/{buffer.stream}"


async def _read_on(buffer: Replayable, seen: BufferReferences, stats: BufferStats, wanted: FactFilter) -> None:
    # The replay begins where the buffer begins: what lies before has left and cannot come back.
    seen.next_offset = max(seen.next_offset, stats.start)
    if seen.next_offset >= stats.end:
        return
    async for frame in buffer.replay(seen.next_offset, end=stats.end, max_facts=SCANNED_FACTS):
        if frame.entries is not None:
            size_bytes = frame.entries.weight_bytes if wanted else 0
            await by_size(size_bytes, seen.take, frame.entries, wanted)
        seen.next_offset = frame.last + 1


def _follows(seen: BufferReferences, buffer: Replayable, end: int) -> bool:
    return seen.log_id == buffer.log_id and seen.next_offset <= end and seen.anchor_offset >= 0


async def _fits(buffer: Replayable, seen: BufferReferences) -> bool:
    """Tell whether the last entry seen is still there and the same."""
    async for frame in buffer.replay(seen.anchor_offset, end=seen.anchor_offset + 1):
        if frame.entries is not None:
            return frame.entries.digests()[0].hex() == seen.anchor_digest
    return False


async def all_buffers(
    storage: Storage, policies: Mapping[tuple[str, Buffer], Policy] | None = None
) -> list[Replayable]:
    """Open every buffer that a storage has, those of streams that are no longer configured included."""
    buffers: list[Replayable] = []
    for stream, kind in await storage.streams():
        policy = (policies or {}).get((stream, kind))
        buffers.append(await (storage.store if kind == Buffer.STORE else storage.forward)(stream, policy))
    return buffers


def encoded(seen: Mapping[str, BufferReferences]) -> bytes:
    """Write what is known as JSON."""
    return orjson.dumps({"format": FORMAT, "buffers": {name: asdict(each) for name, each in seen.items()}})


def decoded(data: bytes) -> dict[str, BufferReferences]:
    """Read what is known; what cannot be read is forgotten, which costs one full scan."""
    try:
        found: Any = orjson.loads(data)
        if found["format"] != FORMAT:
            return {}
        return {name: BufferReferences(**each) for name, each in found["buffers"].items()}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return {}
