"""Sealing: from facts as a producer sent them to facts that a buffer accepts.

A sealed batch is valid, its JSON objects are canonical, every row has its digest and its message id.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import constant_value, fixed_binary, fixed_rows
from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize_all
from bsfg.fact import is_json
from bsfg.hashing import Hasher, Sha256
from bsfg.keys import EXPLICIT, MessageIds
from bsfg.rules import DEFAULT_LIMITS, Limits, check, invalid

SHA256 = Sha256()


def seal(
    batch: FactBatch, *, hasher: Hasher = SHA256, ids: MessageIds = EXPLICIT, limits: Limits = DEFAULT_LIMITS
) -> FactBatch:
    """Validate, canonicalise and digest a batch, and give its rows their message ids.

    Raises `InvalidFact` or `FactTooLarge` for the first row that breaks a rule; then nothing of it is used.
    """
    if batch.sealed:
        return batch
    check(batch, limits)
    objects = batch.column("object").to_pylist()
    canonical = _canonical(batch, objects)
    changed: dict[str, pa.Array] = {}
    if canonical is not None:
        changed["object"] = pa.array(canonical, type=pa.binary())
        batch = batch.with_columns(**changed)
    digests = hasher.digest_all(bodies(batch))
    digest = fixed_binary(b"".join(digests), 32)
    message_id = ids.apply(batch, digests, hasher)
    return FactBatch(batch.with_columns(digest=digest, message_id=message_id).record_batch, sealed=True)


def bodies(batch: FactBatch) -> list[bytes]:
    """Give the bytes that each row's digest covers: subject, predicate, artifact digest and object.

    Subject, predicate and digest cannot contain a NUL (see `bsfg.rules`), so joining by NUL is unambiguous.
    """
    binary = pa.binary()
    artifact = batch.column("artifact_digest")
    parts = [
        batch.column("subject").cast(binary),
        batch.column("predicate").cast(binary),
        pa.scalar(b"") if artifact.null_count == len(batch) else pc.fill_null(artifact.cast(binary), b""),
        batch.column("object"),
    ]
    result: list[bytes] = pc.binary_join_element_wise(*parts, b"\0").to_pylist()
    return result


def digest_mismatches(batch: FactBatch, hasher: Hasher = SHA256) -> np.ndarray:
    """Give the rows whose stored digest is not that of their body."""
    column = batch.column("digest")
    if column.null_count:
        return np.arange(len(batch))
    actual = np.frombuffer(b"".join(hasher.digest_all(bodies(batch))), dtype=np.uint8).reshape(-1, 32)
    return np.flatnonzero((actual != fixed_rows(column)).any(axis=1))


def reseal(batch: FactBatch, *, hasher: Hasher = SHA256, limits: Limits = DEFAULT_LIMITS) -> FactBatch:
    """Accept facts that another zone sealed: valid and with right digests, ids and bytes as they came.

    Raises `InvalidFact` for a broken rule and `DigestMismatch` for altered bytes.
    """
    from bsfg.errors import DigestMismatch

    check(batch, limits)
    if batch.column("message_id").null_count:
        raise invalid(0, "message_id", "is required in facts from another zone")
    wrong = digest_mismatches(batch, hasher)
    if len(wrong):
        raise DigestMismatch(f"{len(wrong)} of {len(batch)} facts do not match their digests", rows=wrong[:10].tolist())
    return FactBatch(batch.record_batch, sealed=True)


def _canonical(batch: FactBatch, objects: list[bytes]) -> list[bytes] | None:
    """Give the objects with every JSON one canonical, or None when they all are as they stand."""
    media_type = constant_value(batch.column("object_media_type"))
    if media_type is not None and not is_json(media_type):
        return None
    rows = None
    if media_type is None:
        rows = [row for row, name in enumerate(batch.column("object_media_type").to_pylist()) if is_json(name)]
    chosen = objects if rows is None else [objects[row] for row in rows]
    changed, problems = canonicalize_all(chosen)
    if problems:
        at, problem = min(problems.items())
        raise invalid(at if rows is None else rows[at], "object", str(problem))
    if changed is None or rows is None:
        return changed
    result = list(objects)
    for row, data in zip(rows, changed, strict=True):
        result[row] = data
    return result
