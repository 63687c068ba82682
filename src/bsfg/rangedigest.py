"""One digest over the envelopes and bodies of a range of entries.

It does not depend on how the entries are stored or cut into frames, so two zones can compare a range, also after one
of them has truncated it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import FactBatch

_ENVELOPE = (
    "message_id",
    "from_zone",
    "to_zone",
    "produced_at_unix_ms",
    "correlation_id",
    "causation_id",
    "labels",
    "object_media_type",
    "object_schema",
    "signature",
    "artifact",
)


@dataclass(frozen=True, slots=True)
class KeptRange:
    """What a log keeps of a range whose entries have left: the digest over them, and the chain before and after."""

    first: int
    last: int
    range_digest: str
    chain_before: bytes
    chain_after: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore of a log from a backup: the first offset that was given anew, when, and the id of the log until then.

    The time is by the clock of the log's own zone.
    """

    first: int
    at_unix_ms: int
    was_log_id: str


@dataclass(frozen=True, slots=True)
class History:
    """What a log can show of its past.

    ``heads`` says for each chain value that was asked for the offset before which the log had it, None when what is
    left of the log does not have it.
    """

    kept: tuple[KeptRange, ...] = ()
    heads: Mapping[bytes, int | None] = field(default_factory=dict)
    restores: tuple[Restore, ...] = ()


class RangeDigest:
    """Takes batches in offset order and gives the digest of all their entries."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: FactBatch) -> None:
        """Add the next entries."""
        sha256 = hashlib.sha256
        for line in _lines(batch):
            self._hash.update(sha256(line).digest())

    def hexdigest(self) -> str:
        """Give the digest so far."""
        return self._hash.hexdigest()


def _lines(batch: FactBatch) -> list[bytes]:
    """Give one unambiguous byte string per entry: an absent field is marked, and none can contain a NUL."""
    parts = []
    for name in _ENVELOPE:
        column = batch.column(name).cast(pa.string())
        parts.append(pc.fill_null(column, "\x01").cast(pa.binary()))
    parts.append(batch.column("digest").cast(pa.binary()))
    result: list[bytes] = pc.binary_join_element_wise(*parts, b"\0").to_pylist()
    return result
