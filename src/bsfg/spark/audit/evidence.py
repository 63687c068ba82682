"""What an end of a link says of itself beside its entries: its history, its gaps, and what it was told by the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from bsfg.journey.link import PeerPosition
from bsfg.ports import Frame, GapRecord
from bsfg.rangedigest import KeptRange, Restore


@dataclass(frozen=True, slots=True)
class Cursor:
    """The durable consumer by which the receiver pulls, as the sender keeps it.

    ``peer_head`` is the chain head that the receiver told with its last confirmation.
    """

    name: str
    committed: int
    start: str = "earliest"
    start_value: int = 0
    peer_head: bytes | None = None


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

    ``position`` is what a receiver remembers of the sender, ``cursor`` what a sender keeps of the receiver; None where
    it is not known. ``heads`` says for each chain head that was asked for the offset before which the log had it, None
    when it is not in what is left of the log; without an answer the head could not be looked for.
    """

    log_id: str
    start: int
    end: int
    chain_head: bytes = b""
    gaps: Sequence[GapRecord] = ()
    kept: Sequence[KeptRange] = ()
    set_aside: Sequence[SetAside] = ()
    position: PeerPosition | None = None
    cursor: Cursor | None = None
    heads: dict[bytes, int | None] = field(default_factory=dict)
    restores: Sequence[Restore] = ()
    knows_gaps: bool = True


class End(Protocol):
    """One log of a link, to be read from any process; it is picklable and opens nothing before it is asked."""

    @property
    def name(self) -> str:
        """How a reader of the report recognises it: a folder, or a node's address."""
        ...

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Tell what there is at this moment, and which of some chain heads are in the log."""
        ...

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Read a range (``end`` exclusive) as it stands; raises `ForeignLog` when it is another log by now."""
        ...

    def kept_keys(self, first: int, last: int) -> pa.RecordBatch | None:
        """Give offset, from_zone, message_id and digest of entries that have left; None when they are not at hand."""
        ...
