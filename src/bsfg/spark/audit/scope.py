"""Which entries of the two logs belong to a link, and what an end of it says of itself beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.columns import is_in
from bsfg.digest import KeptRange, Restore
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.journey.link import PeerPosition
from bsfg.ports import ConsumerState, Frame, GapRecord

SENDER, RECEIVER = "sender", "receiver"
RANGE_FACTS = 65_536
"""How many offsets of the sender are compared as one range."""

NO_END = 1 << 62
"""The end of a window that is open: receivers may hold offsets that the sender does not have."""

RETURNING, NOT_CARRIED, NOT_ASKED_FOR, NOT_SERVED = "returning", "not_carried", "not_asked_for", "not_served"
"""Why a sender leaves a fact out: it was said by the receiver's own zone, is for zones that the link leaves out, is
none that the link's filter names, or none that the sender serves to the receiver at all."""


@dataclass(frozen=True, slots=True)
class AuditScope:
    """One stream of a link: whose facts, which of the sender's offsets (``end`` exclusive), and how to compare them.

    ``zone`` is the sender's, which stands as origin in the receiver's forward buffer. ``relayed`` says that the link
    pulls the sender's forward buffer, and ``shared`` that another link brings the sender's other buffer, whose
    offsets look the same at the receiver.
    """

    zone: str
    secret: bytes
    first: int = 0
    end: int = NO_END
    receiver_zone: str | None = None
    carry_only: frozenset[str] = frozenset()
    relayed: bool = False
    shared: bool = False
    range_facts: int = RANGE_FACTS
    deep: bool = True
    asked: FactFilter = EVERY_FACT

    def bounds(self, number: int) -> tuple[int, int]:
        """Give the first offset of a range and the one after its last, inside the window."""
        first = number * self.range_facts
        return max(first, self.first), min(first + self.range_facts, self.end)


@dataclass(frozen=True, slots=True)
class LinkRows:
    """Entries of the link: their offsets and times at the sender, and their places in the log they were read from."""

    entries: EntryBatch
    offsets: np.ndarray
    times: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: np.ndarray) -> LinkRows:
        """Give some of the rows, in that order."""
        return LinkRows(self.entries.take(rows), self.offsets[rows], self.times[rows], self.places[rows])

    @staticmethod
    def concat(parts: list[LinkRows]) -> LinkRows:
        """Put rows one after the other."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, dtype=np.int64)
        names = ("offsets", "times", "places")
        columns = [np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in names]
        return LinkRows(EntryBatch.concat([part.entries for part in parts]), *columns)


@dataclass(frozen=True, slots=True)
class Named:
    """An entry by name: its place in the log it was read from, its offset at the sender, and its key."""

    place: int
    offset: int
    from_zone: str | None
    message_id: str | None

    @property
    def key(self) -> tuple[str | None, str | None]:
        """Its key."""
        return self.from_zone, self.message_id


def named(rows: LinkRows, chosen: np.ndarray | Sequence[int]) -> list[Named]:
    """Name some of the rows."""
    if not len(chosen):
        return []
    part = rows.take(np.asarray(chosen))
    keys = part.entries.values("from_zone"), part.entries.values("message_id")
    return list(map(Named, part.places.tolist(), part.offsets.tolist(), *keys))


def sent(entries: EntryBatch, scope: AuditScope) -> tuple[LinkRows, dict[str, int]]:
    """Give what a sender sends of some entries, and count by reason what it leaves out."""
    left_out: dict[str, int] = {}
    if scope.carry_only:
        carried = is_in(entries.column("to_zone"), scope.carry_only)
        entries = _kept(entries, carried, NOT_CARRIED, left_out)
    if scope.asked:
        entries = _kept(entries, scope.asked.wanted(entries), NOT_ASKED_FOR, left_out)
    if scope.receiver_zone is not None:
        others = ~is_in(entries.column("from_zone"), frozenset({scope.receiver_zone}))
        entries = _kept(entries, others, RETURNING, left_out)
    return sender_rows(entries), left_out


def sender_rows(entries: EntryBatch) -> LinkRows:
    """Give entries of a sender with their own offsets and times."""
    return LinkRows(entries, entries.offsets, _numbers(entries.column("appended_at_unix_ms")), entries.offsets)


def received(entries: EntryBatch, scope: AuditScope) -> LinkRows:
    """Give those entries of a forward buffer that the link brought, by the offsets they have at the sender."""
    offsets = _numbers(entries.column("origin_offset"))
    mine = is_in(entries.column("origin_zone"), frozenset({scope.zone}))
    mine &= (offsets >= scope.first) & (offsets < scope.end)
    if scope.shared:
        own = is_in(entries.column("from_zone"), frozenset({scope.zone}))
        mine &= ~own if scope.relayed else own
    times = _numbers(entries.column("origin_appended_at_unix_ms"))
    rows = LinkRows(entries, offsets, times, entries.offsets)
    return rows if mine.all() else rows.take(np.flatnonzero(mine))


def _kept(entries: EntryBatch, mask: np.ndarray, reason: str, left_out: dict[str, int]) -> EntryBatch:
    if mask.all():
        return entries
    left_out[reason] = int(np.count_nonzero(~mask))
    return entries.take(np.flatnonzero(mask))


def _numbers(column: pa.Array) -> np.ndarray:
    """Give a column of whole numbers, -1 where there is none."""
    return np.asarray(pc.fill_null(column, -1) if column.null_count else column)


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

    def kept_keys(self, first: int, last: int) -> pa.RecordBatch | None:
        """Give offset, from_zone, message_id and digest of entries that have left; None when they are not at hand."""
