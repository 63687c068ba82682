"""Message-id strategies: how a zone decides that two appends are the same event.

The strategy belongs to the zone that appends. A receiving zone never derives an id again.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

import orjson

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import FactBatch
from bsfg.errors import InvalidArgument, InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE, is_json
from bsfg.hashing import Hasher
from bsfg.model import LABEL_NAME
from bsfg.sealmark import own_labels


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
