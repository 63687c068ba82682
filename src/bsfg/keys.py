"""Message-id strategies: how a zone decides that two appends are the same event.

The strategy belongs to the zone that appends. A receiving zone never derives an id again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

import orjson

from bsfg.batch import FactBatch
from bsfg.errors import InvalidArgument, InvalidFact
from bsfg.hashing import Hasher


class IdStrategy(StrEnum):
    """Where a message id comes from.

    - ``explicit``: from the producer. Two equal readings with two ids are two facts.
    - ``payload``: the digest of the fact body. The same body is the same event.
    - ``semantic``: the digest of the body and of the envelope fields named in the configuration.
    - ``object``: the digest of the object alone, which merges equal payloads of different subjects.
    """

    EXPLICIT = "explicit"
    PAYLOAD = "payload"
    SEMANTIC = "semantic"
    OBJECT = "object"


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


@dataclass(frozen=True, slots=True)
class MessageIds:
    """A zone's strategy, with the envelope fields that `semantic` adds to the body."""

    strategy: IdStrategy = IdStrategy.EXPLICIT
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.fields if name not in SEMANTIC_FIELDS]
        if unknown:
            raise InvalidArgument(f"{unknown[0]!r} cannot be part of an id; choose from {', '.join(SEMANTIC_FIELDS)}")
        if self.fields and self.strategy != IdStrategy.SEMANTIC:
            raise InvalidArgument(f"the strategy {self.strategy} takes no fields")

    def apply(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> list[str] | None:
        """Give the id of every row, or None when they are those that the producer sent.

        An id that the producer sent although the zone derives them must be the one that is derived.
        """
        if self.strategy == IdStrategy.EXPLICIT:
            row = batch.first_null("message_id")
            if row is not None:
                raise _wrong(row, "is required: this zone takes ids from its producers")
            return None
        derived = [digest.hex() for digest in self._digests(batch, digests, hasher)]
        for row, (given, id) in enumerate(zip(batch.values("message_id"), derived, strict=True)):
            if given is not None and given != id:
                raise _wrong(row, f"differs from the id that this zone derives ({self.strategy}); leave it out")
        return derived

    def _digests(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> Sequence[bytes]:
        if self.strategy == IdStrategy.PAYLOAD:
            return digests
        if self.strategy == IdStrategy.OBJECT:
            return hasher.digest_all(batch.values("object"))
        names = sorted(self.fields)
        columns = [batch.values(name) for name in names]
        metadata = zip(*columns, strict=True) if columns else repeat((), len(batch))
        return hasher.digest_all(
            digest + orjson.dumps(dict(zip(names, values, strict=True)))
            for digest, values in zip(digests, metadata, strict=True)
        )


EXPLICIT = MessageIds()


def _wrong(row: int, rule: str) -> InvalidFact:
    return InvalidFact(f"row {row}, message_id: {rule}", row=row, field="message_id", rule=rule)
