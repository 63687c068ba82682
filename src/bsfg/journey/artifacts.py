"""Beside the facts: their artifacts are there before they are, in every zone they come to.

A producer uploads first and appends then (`require_artifacts`); a receiver brings what it lacks before it puts the
facts (`bring_artifacts`), so that a confirmed fact never names what is not there. Content is known by its digest.
Bucket and key are what the zone that uploaded it calls it: where another zone uses that name for something else, the
content still arrives and is read by its digest.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa

from bsfg.artifacts import (
    DEFAULT_MEDIA_TYPE,
    ArtifactSource,
    ArtifactStore,
    Collected,
    StoredArtifact,
    check_name,
    completed,
    own_name,
)
from bsfg.batch import FactBatch
from bsfg.errors import ArtifactConflict, ArtifactMissing, BsfgError, DigestMismatch, InvalidArgument
from bsfg.fact import ArtifactRef
from bsfg.jsonform import artifact_to_dict
from bsfg.model import artifact_problem
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
    if batch.has_rows:
        pairs = zip(batch.values("artifact"), batch.values("artifact_digest"), strict=True)
        return [(row, pair) for row, pair in enumerate(pairs) if pair != (None, None)]
    texts, digests = batch.column("artifact"), batch.column("artifact_digest")
    if texts.null_count == digests.null_count == len(batch):
        return []
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

    ``referenced`` comes from `bsfg.journey.references.References.scan`, made right before. A fact that became
    durable after that scan is safe all the same, because whoever stored it claimed its artifact first.
    """
    return await store.collect(referenced, now_unix_ms=now_unix_ms, grace_seconds=grace_seconds)
