"""What a zone answers its callers with: the outcome of an append, and the room that an answer takes.

The steps make these and the wire carries them; nothing here does anything to a fact. What passes over a link is in
`bsfg.journey.link`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import ConflictingDuplicate
from bsfg.fact import Key
from bsfg.ports import Receipt, Result
from bsfg.sealmark import SHA256_NAME, digest_text


@dataclass(frozen=True, slots=True)
class AppendedFact:
    """What became of one fact: its result, its offset (of the first, for a repeat or conflict), id and digest."""

    result: Result
    offset: int
    message_id: str
    digest: bytes
    hasher: str = SHA256_NAME

    @property
    def digest_text(self) -> str:
        """The digest as it is written for people: the name of its function, and 64 hexadecimal digits."""
        return digest_text(self.hasher, self.digest)


@dataclass(frozen=True, slots=True)
class AppendOutcome:
    """The answer to a producer, given when everything it names is durable.

    ``facts`` are the rows as they were sealed, ``receipt`` their results as columns; `results` makes objects of them.
    """

    facts: FactBatch
    receipt: Receipt
    hasher: str
    """The function that the digests were made by; a batch is sealed with one."""

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def chain_head(self) -> bytes:
        """The digest of the log's last frame after this append, for producers that keep evidence."""
        return self.receipt.chain_head

    def results(self) -> list[AppendedFact]:
        """Give one result per fact, in the order in which they were sent."""
        columns = (
            self.receipt.results.tolist(),
            self.receipt.offsets.tolist(),
            self.facts.values("message_id"),
            self.facts.digests(),
        )
        rows, hasher = zip(*columns, strict=True), self.hasher
        return [AppendedFact(Result(result), offset, id, digest, hasher) for result, offset, id, digest in rows]

    def conflicts(self) -> list[ConflictingDuplicate]:
        """Give an error for each fact whose id is taken by another body; such a fact was not stored."""
        rows = np.flatnonzero(self.receipt.results == Result.CONFLICT)
        if not len(rows):
            return []
        refused = self.facts.take(rows)
        keys = map(Key, refused.values("from_zone"), refused.values("message_id"))
        return [_conflict(int(row), key, int(self.receipt.offsets[row])) for row, key in zip(rows, keys, strict=True)]


def _conflict(row: int, key: Key, offset: int) -> ConflictingDuplicate:
    return ConflictingDuplicate(
        f"row {row}: message_id {key.message_id!r} of {key.from_zone} is taken by the fact at offset {offset}",
        row=row,
        from_zone=key.from_zone,
        message_id=key.message_id,
        existing_offset=offset,
    )


class Room(Protocol):
    """Where the bytes of an answer are counted, from before they are read until they are sent."""

    async def take(self, size_bytes: int) -> None:
        """Wait for room for so many bytes, in the place of what was taken before."""
        ...

    def keep(self, size_bytes: int) -> None:
        """Give back what is not needed after all."""
        ...

    def close(self) -> None:
        """Give everything back; repeats are harmless."""
        ...
