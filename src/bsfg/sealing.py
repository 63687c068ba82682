"""Sealing: from facts as a producer sent them to facts that a buffer accepts, their message ids included."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize_all
from bsfg.columns import AT, DIGEST_BYTES, binary_scalar, constant_value, fixed_binary, fixed_rows
from bsfg.digest import SHA256, Hasher, hasher_named
from bsfg.errors import DigestMismatch, InvalidArgument, InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE, MARK_BEGINS, SHA256_NAME, function_in, is_json, is_marked, marked, own_labels
from bsfg.layouts import unproven
from bsfg.model import LABEL_NAME
from bsfg.rows import Row
from bsfg.rules import DEFAULT_LIMITS, Limits, check, invalid


class IdStrategy(StrEnum):
    """Where a message id comes from.

    - ``explicit``: from the producer. Two equal readings with two ids are two facts.
    - ``payload``: the digest of the fact body. The same body is the same event.
    - ``message``: the digest of the whole message as canonical JSON (see `canonical_messages`).
    - ``semantic``: the same of the fact and the envelope fields named in the configuration.
    - ``object``: the digest of the object alone, which merges equal payloads of different subjects.
    - ``semantic-v1``: what ``semantic`` was in version 0.1, for zones that have such ids.
    """

    EXPLICIT = "explicit"
    PAYLOAD = "payload"
    MESSAGE = "message"
    SEMANTIC = "semantic"
    OBJECT = "object"
    SEMANTIC_V1 = "semantic-v1"


SEMANTIC_FIELDS = (
    "from_zone",
    "to_zone",
    "produced_at_unix_ms",
    "correlation_id",
    "causation_id",
    "labels",
    "object_media_type",
    "object_schema",
)
"""What may be part of an id; of `labels`, with ``semantic``, also single ones: ``labels.silo``."""

WITH_FIELDS = frozenset({IdStrategy.SEMANTIC, IdStrategy.SEMANTIC_V1})
LABEL = "labels."
LABEL_FIELD = r"labels\." + LABEL_NAME.strip("^$")

_label_field = re.compile(LABEL_FIELD).fullmatch


@dataclass(frozen=True, slots=True)
class MessageIds:
    """A zone's strategy, with the envelope fields that `semantic` adds to the fact."""

    strategy: IdStrategy = IdStrategy.EXPLICIT
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.fields and self.strategy not in WITH_FIELDS:
            raise InvalidArgument(f"the strategy {self.strategy} takes no fields")
        for name in self.fields:
            if name not in SEMANTIC_FIELDS and not self._is_label(name):
                choice = ", ".join(SEMANTIC_FIELDS)
                raise InvalidArgument(f"{name!r} cannot be part of an id; choose from {choice}, or labels.NAME")
            if name.startswith(LABEL) and "labels" in self.fields:
                raise InvalidArgument(f"{name!r} is part of 'labels'; choose one of them")

    def _is_label(self, name: str) -> bool:
        return self.strategy == IdStrategy.SEMANTIC and _label_field(name) is not None

    def apply(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> list[str] | None:
        """Give the id of every row, or None when they are those that the producer sent.

        An id that the producer sent although the zone derives them must be the one that is derived.
        """
        if self.strategy == IdStrategy.EXPLICIT:
            row = batch.first_null("message_id")
            if row is not None:
                raise _wrong(row, "is required: this zone takes ids from its producers")
            return None
        derived = self.derived(batch, digests, hasher)
        for row, (given, id) in enumerate(zip(batch.values("message_id"), derived, strict=True)):
            if given is not None and given != id:
                raise _wrong(row, f"differs from the id that this zone derives ({self.strategy}); leave it out")
        return derived

    def derived(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> list[str]:
        """Give the ids that follow from canonical rows and their digests, with any strategy that derives them."""
        return [digest.hex() for digest in self._digests(batch, digests, hasher)]

    def _digests(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> Sequence[bytes]:
        match self.strategy:
            case IdStrategy.PAYLOAD:
                return digests
            case IdStrategy.OBJECT:
                return hasher.digest_all(batch.values("object"))
            case IdStrategy.SEMANTIC_V1:
                return hasher.digest_all(self._bodies_v1(batch, digests))
        fields = SEMANTIC_FIELDS if self.strategy == IdStrategy.MESSAGE else self.fields
        return hasher.digest_all(canonical_messages(batch, fields))

    def _bodies_v1(self, batch: FactBatch, digests: Sequence[bytes]) -> Iterator[bytes]:
        names = sorted(self.fields)
        columns = [batch.values(name) for name in names]
        metadata = zip(*columns, strict=True) if columns else repeat((), len(batch))
        for digest, values in zip(digests, metadata, strict=True):
            yield digest + orjson.dumps(dict(zip(names, values, strict=True)))


def canonical_messages(batch: FactBatch, fields: Iterable[str] = SEMANTIC_FIELDS) -> Iterator[bytes]:
    """Give each message as canonical JSON: the fact, and those of its envelope's fields that are asked for.

    This is the form that the specification hashes, with the object as a text (``object_json``), so that anybody can
    compute it with any JSON library. Absent fields are left out, and so are message id and signature, which cannot be
    covered by the id. The media type is the object's unless that is plain JSON, then the artifact's; one that says
    nothing is left out.
    """
    chosen = set(fields)
    plain = [name for name in SEMANTIC_FIELDS if name in chosen and name not in ("labels", "object_media_type")]
    envelopes = zip(*(batch.values(name) for name in plain), strict=True) if plain else repeat((), len(batch))
    labels = {name.removeprefix(LABEL) for name in chosen if name.startswith(LABEL)}
    for values, row in zip(envelopes, zip(*map(batch.values, _FACT_COLUMNS), strict=True), strict=True):
        subject, predicate, data, media_type, artifact, artifact_digest, label_text = row
        envelope = {name: value for name, value in zip(plain, values, strict=True) if value is not None}
        if label_text and (labels or "labels" in chosen):
            known = own_labels(orjson.loads(label_text))
            picked = known if "labels" in chosen else {name: known[name] for name in labels & known.keys()}
            envelope |= {"labels": picked} if picked else {}
        if "object_media_type" in chosen and (kind := _telling_type(media_type, artifact)):
            envelope["object_media_type"] = kind
        fact = {"subject": subject, "predicate": predicate}
        if is_json(media_type):
            fact["object_json"] = data.decode()
        else:
            fact["object_base64"] = base64.b64encode(data).decode()
        if artifact_digest is not None:
            fact["artifact_digest"] = artifact_digest
        yield orjson.dumps({"envelope": envelope, "fact": fact}, option=orjson.OPT_SORT_KEYS)


_FACT_COLUMNS = ("subject", "predicate", "object", "object_media_type", "artifact", "artifact_digest", "labels")


def _telling_type(media_type: str, artifact: str | None) -> str | None:
    """Give the media type that tells something: of an object that is not plain JSON, else of the artifact."""
    if media_type != JSON_MEDIA_TYPE:
        return media_type
    found: str | None = orjson.loads(artifact).get("media_type") if artifact is not None else None
    return None if found == DEFAULT_MEDIA_TYPE else found


EXPLICIT = MessageIds()


def _wrong(row: int, rule: str) -> InvalidFact:
    return InvalidFact(f"row {row}, message_id: {rule}", row=row, field="message_id", rule=rule)


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
    if hasher == SHA256_NAME and not _any_marked(column):
        return batch
    # Most batches repeat a few sets of labels, or have none.
    encoded = column.dictionary_encode(null_encoding="encode")
    texts = pa.array([marked(text, hasher) for text in encoded.dictionary.to_pylist()], type=pa.string())
    return batch.with_columns(labels=texts.take(encoded.indices))


def plain(batch: FactBatch) -> FactBatch:
    """Give the facts as their producers said them, not marked with a function."""
    return _marked(batch, SHA256_NAME)


def _any_marked(column: pa.Array) -> bool:
    """Tell whether any row of a column of labels holds a mark."""
    if column.null_count == len(column):
        return False
    return bool(pc.any(pc.starts_with(column, MARK_BEGINS)).as_py())


def functions_of(batch: FactBatch) -> list[str]:
    """Give the names of the functions that the digests of a batch were made by: a single one for all, or one a row."""
    if batch.has_rows:
        names = [function_in(text) for text in batch.values("labels")]
    elif _any_marked(batch.column("labels")):
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
