"""Sealing: from facts as a producer sent them to facts that a buffer accepts.

A sealed batch is valid, its JSON objects are canonical, every row has its digest and its message id, and says by which
function its digest was made (see `bsfg.sealmark`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import binary_scalar, constant_value, fixed_binary, fixed_rows
from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize_all
from bsfg.errors import DigestMismatch
from bsfg.fact import is_json
from bsfg.hashing import SHA256, Hasher, hasher_named
from bsfg.keys import EXPLICIT, MessageIds
from bsfg.rows import Row
from bsfg.rules import DEFAULT_LIMITS, Limits, check, invalid
from bsfg.schema import AT, DIGEST_BYTES
from bsfg.sealmark import SHA256_NAME, any_marked, function_in, is_marked, marked
from bsfg.skeleton import unproven

_BINARY = pa.binary()
_NUL = binary_scalar(b"\0")
_LABELS, _OBJECT, _ARTIFACT, _DIGEST = AT["labels"], AT["object"], AT["artifact"], AT["digest"]

BODY_FIELDS = ("subject", "predicate", "artifact_digest", "object")
_BODY = tuple(AT[name] for name in BODY_FIELDS)


def seal(
    batch: FactBatch, *, hasher: Hasher = SHA256, ids: MessageIds = EXPLICIT, limits: Limits = DEFAULT_LIMITS
) -> FactBatch:
    """Validate, canonicalise and digest a batch, and give its rows their message ids.

    Raises `InvalidFact` or `FactTooLarge` for the first row that breaks a rule; then nothing of it is used.
    """
    if batch.sealed:
        return batch
    check(batch, limits)
    # What an earlier zone said of a digest of its own is not the producer's to say.
    batch = _canonical(plain(batch))
    digests = hasher.digest_all(bodies(batch))
    message_ids = ids.apply(batch, digests, hasher)
    if hasher.name != SHA256_NAME:
        batch = _marked(batch, hasher.name)
    if batch.has_rows:
        message = batch.message_with_digests(digests) if message_ids is None else None
        return FactBatch.of_rows(_with_digests(batch.rows(), digests, message_ids), sealed=True, message=message)
    changed = {"digest": fixed_binary(b"".join(digests), DIGEST_BYTES)}
    if message_ids is not None:
        changed["message_id"] = pa.array(message_ids, type=pa.string())
    return FactBatch(batch.with_columns(**changed).record_batch, sealed=True)


def _marked(batch: FactBatch, hasher: str) -> FactBatch:
    """Give the batch with every row saying that function; the same batch when they all do as they stand."""
    if batch.has_rows:
        rows = batch.rows()
        if hasher == SHA256_NAME and not [row for row in rows if row[_LABELS] is not None and is_marked(row[_LABELS])]:
            return batch
        rows = [(*row[:_LABELS], marked(row[_LABELS], hasher), *row[_LABELS + 1 :]) for row in rows]
        return type(batch).of_rows(rows)
    column = batch.column("labels")
    if hasher == SHA256_NAME and not any_marked(column):
        return batch
    # Most batches repeat a few sets of labels, or have none.
    encoded = column.dictionary_encode(null_encoding="encode")
    texts = pa.array([marked(text, hasher) for text in encoded.dictionary.to_pylist()], type=pa.string())
    return batch.with_columns(labels=texts.take(encoded.indices))


def plain(batch: FactBatch) -> FactBatch:
    """Give the facts as their producers said them, not marked with a function."""
    return _marked(batch, SHA256_NAME)


def functions_of(batch: FactBatch) -> list[str]:
    """Give the names of the functions that the digests of a batch were made by: a single one for all, or one a row."""
    if batch.has_rows:
        names = [function_in(text) for text in batch.values("labels")]
    elif any_marked(batch.column("labels")):
        encoded = batch.column("labels").dictionary_encode(null_encoding="encode")
        known = [function_in(text) for text in encoded.dictionary.to_pylist()]
        names = known if len(set(known)) == 1 else [known[at] for at in encoded.indices.to_pylist()]
    else:
        return [SHA256_NAME]
    return names[:1] if names and names.count(names[0]) == len(names) else names


def _with_digests(rows: list[Row], digests: list[bytes], message_ids: list[str] | None) -> list[Row]:
    if message_ids is None:
        return [(*row[:_DIGEST], digest) for row, digest in zip(rows, digests, strict=True)]
    return [(id, *row[1:_DIGEST], digest) for row, digest, id in zip(rows, digests, message_ids, strict=True)]


def bodies(batch: FactBatch) -> list[bytes]:
    """Give the bytes that each row's digest covers: subject, predicate, artifact digest and object.

    Subject, predicate and digest cannot contain a NUL (see `bsfg.model`), so joining by NUL is unambiguous.
    """
    if batch.has_rows:
        return [b"\0".join(map(_encoded, map(row.__getitem__, _BODY))) for row in batch.rows()]
    # Joined by Arrow and made Python objects afterwards: once per fact instead of once per part.
    parts = [batch.column(name).cast(_BINARY) for name in BODY_FIELDS]
    joined: list[bytes] = pc.binary_join_element_wise(*parts, _NUL, null_handling="replace").to_pylist()
    return joined


def with_references(batch: FactBatch, texts: Mapping[str, str]) -> FactBatch:
    """Give a sealed batch with some artifact references written otherwise, by what they were.

    Digest and id cover the artifact's digest, which stands in a column of its own, and not what else is said of it.
    """
    if batch.has_rows:
        rows = [
            (*row[:_ARTIFACT], texts.get(row[_ARTIFACT], row[_ARTIFACT]), *row[_ARTIFACT + 1 :]) for row in batch.rows()
        ]
        return FactBatch.of_rows(rows, sealed=True)
    values = [texts.get(text, text) for text in batch.values("artifact")]
    return batch.with_columns(artifact=pa.array(values, type=pa.string())).as_sealed()


def _encoded(value: str | bytes | None) -> bytes:
    return b"" if value is None else value if isinstance(value, bytes) else value.encode()


def digest_mismatches(batch: FactBatch) -> np.ndarray:
    """Give the rows whose stored digest is not that of their body, by the function that each says itself.

    Raises `HasherUnknown` when one of the functions is not known here.
    """
    names = functions_of(batch)
    if len(names) <= 1:
        return _mismatches(batch, hasher_named(names[0]) if names else SHA256)
    each, wrong = np.array(names), []
    for name in dict.fromkeys(names):
        rows = np.flatnonzero(each == name)
        wrong.append(rows[_mismatches(batch.take(rows), hasher_named(name))])
    return np.sort(np.concatenate(wrong))


def _mismatches(batch: FactBatch, hasher: Hasher) -> np.ndarray:
    if batch.has_rows or batch.column("digest").null_count:
        pairs = zip(batch.values("digest"), hasher.digest_all(bodies(batch)), strict=True)
        return np.array([row for row, (stored, actual) in enumerate(pairs) if stored != actual], dtype=np.int64)
    column = batch.column("digest")
    actual = np.frombuffer(b"".join(hasher.digest_all(bodies(batch))), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    return np.flatnonzero((actual != fixed_rows(column)).any(axis=1))


def reseal(batch: FactBatch, *, limits: Limits = DEFAULT_LIMITS) -> FactBatch:
    """Accept facts that another zone sealed: valid, canonical and with right digests, ids and bytes as they came.

    Raises `InvalidFact` for a broken rule, `HasherUnknown` for digests that cannot be checked here, and
    `DigestMismatch` for altered bytes; the rows before the first altered one are then good.
    """
    check(batch, limits)
    row = batch.first_null("message_id")
    if row is not None:
        raise invalid(row, "message_id", "is required in facts from another zone")
    wrong = digest_mismatches(batch)
    # Damage on the way may break the JSON too and must still be called damage: only what has its digest is looked at.
    changed = _changed_objects(batch.slice(0, int(wrong[0])) if len(wrong) else batch)
    if changed:
        raise invalid(min(changed), "object", "is not canonical JSON")
    if len(wrong):
        raise DigestMismatch(f"{len(wrong)} of {len(batch)} facts do not match their digests", rows=wrong[:10].tolist())
    return batch.as_sealed()


def _canonical(batch: FactBatch) -> FactBatch:
    """Give the batch with every JSON object canonical: the same batch when they all are as they stand."""
    changed = _changed_objects(batch)
    if not changed:
        return batch
    if batch.has_rows:
        rows = list(batch.rows())
        for number, data in changed.items():
            rows[number] = (*rows[number][:_OBJECT], data, *rows[number][_OBJECT + 1 :])
        return FactBatch.of_rows(rows)
    objects = batch.values("object")
    for number, data in changed.items():
        objects[number] = data
    return batch.with_columns(object=pa.array(objects, type=_BINARY))


def _changed_objects(batch: FactBatch) -> dict[int, bytes]:
    """Give the canonical form of each JSON object that is not canonical, by row."""
    rows = _doubtful_json(batch)
    if not rows:
        return {}
    objects = batch.values("object")
    changed, problems = canonicalize_all([objects[row] for row in rows])
    if problems:
        at, problem = min(problems.items())
        raise invalid(rows[at], "object", str(problem))
    return {rows[at]: data for at, data in changed.items()}


def _doubtful_json(batch: FactBatch) -> Sequence[int]:
    """Give the rows whose object is JSON and not yet known to be canonical."""
    if batch.has_rows:
        return [row for row, name in enumerate(batch.values("object_media_type")) if is_json(name)]
    single = constant_value(batch.column("object_media_type"))
    if single is not None:
        doubtful: list[int] = unproven(batch.column("object")).tolist() if is_json(single) else []
        return doubtful
    rows = [row for row, name in enumerate(batch.values("object_media_type")) if is_json(name)]
    return [rows[at] for at in unproven(batch.column("object").take(pa.array(rows, type=pa.int64())))]
