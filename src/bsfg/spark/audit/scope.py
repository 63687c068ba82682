"""What an end of a link says of itself, and the first pass: every range of both logs becomes a count and two sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from bsfg.digest import KeptRange, Restore
from bsfg.errors import FrameInvalid
from bsfg.journey.link import PeerPosition
from bsfg.journey.sums import AuditScope, LinkRows, Named, RangeSums, Summation, named, sender_rows
from bsfg.ports import ConsumerState, Frame, GapRecord

Span = tuple[int, int]
Summed = tuple[RangeSums, np.ndarray]
"""What was found in a stretch, and the hashed keys of a receiver's entries there."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A fact in quarantine: its key, why, and its offset at the sender where that is known."""

    reason: str
    from_zone: str
    message_id: str
    at_unix_ms: int
    detail: str = ""
    origin_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One end at one moment.

    ``position`` is what a receiver remembers of the sender, ``cursor`` the consumer by which a sender knows the
    receiver; None where it is not known. ``heads`` says for each chain head that was asked for the offset before which
    the log had it, None when it is not in what is left of the log; without an answer it could not be looked for.
    """

    log_id: str
    start: int
    end: int
    chain_head: bytes = b""
    gaps: Sequence[GapRecord] = ()
    kept: Sequence[KeptRange] = ()
    set_aside: Sequence[SetAside] = ()
    position: PeerPosition | None = None
    cursor: ConsumerState | None = None
    heads: dict[bytes, int | None] = field(default_factory=dict)
    restores: Sequence[Restore] = ()

    @property
    def told_by_receiver(self) -> tuple[bytes, ...]:
        """The chain heads that the receiver told with its confirmations."""
        return (self.cursor.peer_head,) if self.cursor is not None and self.cursor.peer_head else ()

    @property
    def told_by_sender(self) -> tuple[bytes, ...]:
        """The chain heads that the sender told with its facts."""
        return (self.position.chain_head,) if self.position is not None and self.position.chain_head else ()


class End(Protocol):
    """One log of a link, to be read from any process; it is picklable and opens nothing before it is asked."""

    @property
    def name(self) -> str:
        """How a reader of the report recognises it: a folder, or a node's address."""

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Tell what there is at this moment, and which of some chain heads are in the log."""

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Read a range (``end`` exclusive) as it stands; raises `ForeignLog` when it is another log by now."""

    def summed(self, side: str, bounds: Span, log_id: str, scope: AuditScope) -> list[Summed] | None:
        """Have a range (its end exclusive) summed up where it lies; None where it must be read for that."""

    def kept_keys(self, first: int, last: int) -> pa.RecordBatch | None:
        """Give offset, from_zone, message_id and digest of entries that have left; None when they are not at hand."""


@dataclass(frozen=True, slots=True)
class Summing:
    """Sums up one stretch of a log; the keys of a receiver are given beside, to look for repeats.

    Where the log is at a node that can do it, the node does, and only sums cross the wire.
    """

    side: str
    log: End
    log_id: str
    first: int
    end: int
    scope: AuditScope

    def __call__(self) -> tuple[list[RangeSums], np.ndarray]:
        """Do it, in whichever process this is."""
        if (found := self.asked()) is not None:
            return found
        read, keys = self._read()
        return [read], keys

    def asked(self) -> tuple[list[RangeSums], np.ndarray] | None:
        """Have it done where the log lies; None where it must be read for that."""
        parts = self.log.summed(self.side, (self.first, self.end), self.log_id, self.scope)
        return ([found for found, _ in parts], np.concatenate([keys for _, keys in parts])) if parts else None

    def _read(self) -> tuple[RangeSums, np.ndarray]:
        summation = Summation(self.side, self.first, self.end, self.scope)
        try:
            for frame in self.log.frames(self.first, self.end, self.log_id):
                summation.take(frame)
        except FrameInvalid as error:
            summation.found.unreadable.append((summation.next_offset, self.end - 1, error.message))
        return summation.found, summation.keys


@dataclass(frozen=True, slots=True)
class Sibling:
    """The sender's other buffer, which another link pulls; only a key tells which link brought an entry."""

    log: End
    log_id: str
    end: int

    def has(self, entry: Named) -> bool:
        """Tell whether an entry of the receiver is the one that this buffer has at its offset."""
        if not 0 <= entry.offset < self.end:
            return False
        rows = self.rows(entry.offset, entry.offset + 1)
        return any(each.key == entry.key for each in named(rows, range(len(rows))))

    def rows(self, first: int, end: int) -> LinkRows:
        """Read a range of offsets."""
        end = min(end, self.end)
        frames = self.log.frames(first, end, self.log_id) if first < end else iter(())
        return LinkRows.concat([sender_rows(frame.entries) for frame in frames if frame.entries is not None])


def same_keys(offsets: np.ndarray, keys: np.ndarray, known_offsets: np.ndarray, known_keys: np.ndarray) -> np.ndarray:
    """Mark the rows whose key is the one that some sorted offsets are known to have."""
    at = np.searchsorted(known_offsets, offsets)
    result = np.zeros(len(offsets), dtype=bool)
    inside = np.flatnonzero(at < len(known_offsets))
    found = at[inside]
    result[inside] = (known_offsets[found] == offsets[inside]) & (known_keys[found] == keys[inside])
    return result
