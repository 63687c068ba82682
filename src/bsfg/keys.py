"""Message-id strategies: how a zone decides that two appends are the same event.

The strategy belongs to the zone that appends. A receiving zone never derives an id again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import orjson
import pyarrow as pa
import pyarrow.compute as pc

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

    def apply(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> pa.Array:
        """Give the id of every row; an id that the producer sent must be the one that is derived."""
        given = batch.column("message_id")
        if self.strategy == IdStrategy.EXPLICIT:
            if given.null_count:
                row = int(pc.index(pc.is_null(given), True).as_py())
                raise _wrong(row, "is required: this zone takes ids from its producers")
            return given
        derived = pa.array([digest.hex() for digest in self._digests(batch, digests, hasher)], type=pa.string())
        if given.null_count < len(batch):
            same = pc.fill_null(pc.equal(given, derived), True)
            if not pc.all(same).as_py():
                row = int(pc.index(same, False).as_py())
                raise _wrong(row, f"differs from the id that this zone derives ({self.strategy}); leave it out")
        return derived

    def _digests(self, batch: FactBatch, digests: Sequence[bytes], hasher: Hasher) -> Sequence[bytes]:
        if self.strategy == IdStrategy.PAYLOAD:
            return digests
        if self.strategy == IdStrategy.OBJECT:
            return hasher.digest_all(batch.column("object").to_pylist())
        metadata = batch.record_batch.select(list(self.fields)).to_pylist()
        return hasher.digest_all(
            digest + orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
            for digest, fields in zip(digests, metadata, strict=True)
        )


EXPLICIT = MessageIds()


def _wrong(row: int, rule: str) -> InvalidFact:
    return InvalidFact(f"row {row}, message_id: {rule}", row=row, field="message_id", rule=rule)
