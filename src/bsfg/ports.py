"""The ports: what every storage must promise. The docstrings are the contract, `bsfg.testing` checks it.

Words used throughout: an *offset* counts entries of one buffer from 0, without gaps and never reused; a *range* names
its first and last offset, both inclusive; ``end`` is the offset the next entry will get; ``committed`` is inclusive
and -1 when nothing is.

All methods raise only `bsfg.errors.BsfgError`. What every method may raise: `StorageClosed` after `Storage.close`;
`InvalidArgument` for a negative offset, an impossible range or a bad name. What every method that makes something
durable may raise when the medium breaks: `DiskFull` (nothing changed, the storage stays usable), `OutcomeUnknown`
(syncing failed: the change may or may not be there, and the storage is closed until it is opened again; repeat the
call then) and `StorageFailed`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from bsfg.artifacts import ArtifactStore as ArtifactStore  # noqa: PLC0414 (given on: it is a port)
from bsfg.batch import EntryBatch, FactBatch
from bsfg.clock import Clock as Clock  # noqa: PLC0414
from bsfg.errors import InvalidArgument
from bsfg.fact import Buffer as Buffer  # noqa: PLC0414
from bsfg.fact import Entry, Key, Origin
from bsfg.frontier import Range
from bsfg.gaps import RELAYED_RANGES_MAX
from bsfg.gaps import Gap as Gap  # noqa: PLC0414
from bsfg.gaps import GapRecord as GapRecord  # noqa: PLC0414
from bsfg.gaps import GapSet as GapSet  # noqa: PLC0414
from bsfg.retention import Fill, Policy


class Result(IntEnum):
    """What became of one fact of a batch."""

    INSERTED = 0
    ALREADY_EXISTS = 1
    CONFLICT = 2


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a batch, given when all of it is durable.

    ``results`` holds a `Result` per fact and ``offsets`` its offset: for a repeat or a conflict that of the entry
    that was there first, also when that one is an earlier row of the same batch. ``chain_head`` is the digest of the
    last frame of the log after this batch. ``appended_at_unix_ms`` is the time that the inserted entries carry; inside
    a buffer it never decreases, whatever the clock does. An empty batch has an empty receipt. ``undecided`` are the
    rows of repeats that are in quarantine, because what was there first cannot be read and so may be another fact.
    """

    offsets: np.ndarray
    results: np.ndarray
    chain_head: bytes
    appended_at_unix_ms: int
    undecided: tuple[int, ...] = ()

    def count(self, result: Result) -> int:
        """Count the facts that had this result."""
        return int(np.count_nonzero(self.results == result))


UNREADABLE = "unreadable"
"""The reason of what is in quarantine and cannot be read; what it was refused for is not known, nor the fact."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A fact that was refused for good and kept aside: where, why, the bytes as they came, and where they came from.

    Of one that cannot be read there are only the number, the reason `UNREADABLE`, and in ``detail`` the place.
    """

    id: int
    at_unix_ms: int
    reason: str
    key: Key
    existing_offset: int
    facts: FactBatch
    detail: str = ""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """A step of a replay: either entries, or a gap record for the range ``first`` to ``last``.

    Frames follow each other without hole or overlap. The gap record's own range holds ``first`` to ``last`` and may
    be wider, when the replay begins or ends inside it. Between two zones a frame may also tell with ``skips`` which
    offsets among its entries the link leaves out; entries and skips together are then all of its range.
    """

    first: int
    last: int
    entries: EntryBatch | None = None
    gap: GapRecord | None = None
    skips: Sequence[GapSet] = ()


@dataclass(frozen=True, slots=True)
class BufferStats:
    """What a buffer holds at one moment; ``quarantine_full`` when a refused fact was turned away since one left.

    ``gaps_full`` when what others told of gaps was turned away.
    """

    stream: str
    buffer: Buffer
    log_id: str
    start: int
    end: int
    used_bytes: int
    capacity_bytes: int
    fill_percent: float
    fill: Fill
    oldest_unix_ms: int | None
    newest_unix_ms: int | None
    segments: int
    keys: int
    index_bytes: int
    gaps: int
    quarantined: int
    chain_head: bytes
    quarantine_bytes: int = 0
    quarantine_capacity_bytes: int = 0
    quarantine_full: bool = False
    gaps_full: bool = False


@dataclass(frozen=True, slots=True)
class OriginSpan:
    """Where the rows of a put come from: the sender's zone, and per row its offset and time there.

    ``ages_ms`` says how old each was when it was put, counted from its first append anywhere; None when nobody knows.
    """

    zone: str
    offsets: np.ndarray
    appended_at_unix_ms: np.ndarray
    ages_ms: np.ndarray | None = None

    def check(self, count: int) -> None:
        """Raise `InvalidArgument` unless there is an offset, a time and an age, if any, for each of so many facts."""
        ages = len(self.offsets) if self.ages_ms is None else len(self.ages_ms)
        if {len(self.offsets), len(self.appended_at_unix_ms), ages} != {count}:
            raise InvalidArgument("an origin names an offset and a time for each fact")

    def take(self, rows: Sequence[int] | np.ndarray) -> OriginSpan:
        """Give where the named rows come from."""
        ages_ms = None if self.ages_ms is None else self.ages_ms[rows]
        return OriginSpan(self.zone, self.offsets[rows], self.appended_at_unix_ms[rows], ages_ms)

    def at(self, row: int) -> Origin:
        """Give where one row comes from."""
        age_ms = None if self.ages_ms is None else int(self.ages_ms[row])
        return Origin(self.zone, int(self.offsets[row]), int(self.appended_at_unix_ms[row]), age_ms)


QUARANTINE_PAGE = 1_000
"""How many quarantined facts are listed at once."""


class Replayable(Protocol):
    """What both buffers have in common."""

    stream: str
    buffer: Buffer
    log_id: str

    def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end`` (exclusive, default: the present end), in offset order.

        Only durable entries are given, at most ``max_facts`` in a frame. The frames cover the whole range, also when
        entries leave while the replay is under way: what was removed is a gap record with the reason it left
        for (``truncated`` when it was confirmed), never silence. An entry that is retained is given, whatever gap
        records name it. A repeated replay of a range gives the same entries as long as they are retained. An ``end``
        beyond the present end means the present end; a ``start`` beyond it raises `OffsetOutOfRange`.
        """

    async def get(self, key: Key) -> Entry | None:
        """Give the entry of a key, or None when it was never stored or its bytes are no longer retained."""

    async def wait_for(self, offset: int, timeout_seconds: float) -> bool:
        """Wait until the entry at ``offset`` is durable; tell whether it is.

        An entry that was durable and is removed counts. No timeout (0) asks without waiting. Raises `StorageClosed`
        when the storage is closed meanwhile.
        """

    async def truncate_before(self, offset: int) -> None:
        """Remove every entry below ``offset`` (exclusive); repeats are harmless.

        Refused with `TruncateRefused` when ``offset`` is above ``committed + 1`` of a required consumer of this
        buffer. Without a required consumer a store buffer refuses to remove anything, and a forward buffer allows all
        up to its end. Keys and digests stay for the key horizon. Offsets are never reused.
        """

    async def gaps(self) -> list[GapRecord]:
        """List the ranges of all gap records, oldest first; what left after everybody had confirmed it is no gap.

        For whoever looks at few of them: `gap_sets` gives the same without an object per range.
        """

    async def gap_sets(self) -> list[GapSet]:
        """Give all gap records as sets, one for each reason, detail and origin."""

    async def gaps_told(self, after: str = "", max_ranges: int = RELAYED_RANGES_MAX) -> tuple[list[GapSet], str]:
        """Give gap records with an ``origin_zone`` in the order they came, those after a token; and the next token.

        At least one set when there is one, and about ``max_ranges`` ranges at most. A token that is not known, as
        after a restart, gives all from the beginning: hearing of a range twice does no harm.
        """

    async def record_gaps(self, gaps: Sequence[Gap]) -> None:
        """Make gap records and sets of them durable together, all or none of them.

        Ranges of one reason, detail and origin that overlap or adjoin become one, with the latest of their times; a
        range that is covered already changes nothing. The cost grows with ranges, not with offsets. With an
        ``origin_zone`` ranges count that zone's offsets; without, they must lie below the end of this buffer
        (`OffsetOutOfRange`).
        """

    async def quarantine(
        self, after: int | None = None, limit: int = QUARANTINE_PAGE, *, newest_first: bool = False
    ) -> list[Quarantined]:
        """List what was refused for good, oldest first: at most ``limit`` facts that follow the id ``after``.

        ``newest_first`` turns the order round; ``after`` then names the id that those given are older than.
        """

    async def quarantined(self, id: int) -> Quarantined | None:
        """Give one refused fact, None when it is not in quarantine."""

    async def set_aside(
        self, facts: FactBatch, reason: str, detail: str = "", origin: OriginSpan | None = None
    ) -> None:
        """Quarantine sealed facts that were never put, durably; one already there is not repeated.

        Quarantine is as large as ``Policy.quarantine_bytes`` says. What does not fit raises `QuarantineFull`, here and
        wherever facts are put, and then nothing of the batch is stored or set aside. Keeping, listing and releasing a
        fact cost the same however many there are.
        """

    async def release_quarantined(self, id: int, reason: str) -> None:
        """Drop one quarantined fact by an operator's decision, which is recorded; `InvalidArgument` if unknown."""

    async def enforce_retention(self, *, link_open: bool, keys_as_of_unix_ms: int | None = None) -> None:
        """Remove what age allows and record what expired unconfirmed, as `bsfg.retention.removable_before` decides.

        Forget the keys of removed entries that are older than the key horizon, which counts back from now, or from
        ``keys_as_of_unix_ms`` when that is earlier. A key that is forgotten is free: a fact under it is new.
        A storage may keep an entry for as long as a younger one stored in the same unit. A clock that jumped forward
        (see `bsfg.retention.ClockGuard`) removes nothing.
        """

    async def stats(self) -> BufferStats:
        """Describe the buffer at this moment."""


class StoreBuffer(Replayable, Protocol):
    """The durable log of what this zone produced."""

    def append(self, batch: FactBatch) -> Awaitable[Receipt]:
        """Store a sealed batch and answer when it is durable; the batch becomes visible as a whole.

        Idempotent per key (from_zone, message_id), also inside the batch, across restarts and after truncation:
        the same body again is `ALREADY_EXISTS` with the offset of the first; another body is `CONFLICT`, and
        nothing is stored for it. The body is what the digest covers (`bsfg.sealing.bodies`). Equal digests of
        different bodies, found while the first is retained, are a `CONFLICT` and are quarantined durably as
        ``hash_collision``; a fact that is in quarantine already is not put there again. A known key whose
        fact the medium does not give now is `ALREADY_EXISTS`, too, and what came is quarantined as ``undecided``; a
        fact that is on record as lost, whose key is known, is new.
        New facts get consecutive offsets in row order. Concurrent calls are coalesced, in the order in which they
        began; each gets its own receipt. Raises `InvalidArgument` for an unsealed batch and `BufferFull` when the
        policy rejects it: then nothing of the batch is stored. Repeats need no room. `OutcomeUnknown`: retry with the
        same ids.
        """

    async def frontier(self) -> int:
        """Give the lowest ``committed`` of the stream's required consumers, -1 when there is none."""


class ForwardBuffer(Replayable, Protocol):
    """The durable, idempotent copy of what other zones sent."""

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Insert each fact whose key is not there yet, atomically per key, in row order; else say what is there.

        The same promises as `StoreBuffer.append`; besides, every conflicting fact is quarantined durably (as
        ``conflict`` or ``hash_collision``) before the receipt is given, because its sender will be told to move on.
        """

    async def kept_latest(self) -> EntryBatch:
        """Give the newest entry of each subject and predicate among those that were removed, in offset order.

        Kept only under a policy with ``keep_latest``, durably before the entries leave, as they were: with offset,
        time, origin and digest. At most ``latest_most`` of the policy, the latest. A newer one may be retained; while
        entries leave, one may be given here and by `replay`.
        """

    def query_by_time_range(self, start_unix_ms: int, end_unix_ms: int) -> AsyncIterator[Frame]:
        """Give the retained entries that became durable here at ``start_unix_ms`` or later and before ``end_unix_ms``.

        The time is ``appended_at_unix_ms``; the order is that of offsets.
        """


class StartAt(StrEnum):
    """Where a new consumer begins.

    At the oldest retained entry; at the next one to come; at the offset ``start_value``, which may be the end; or at
    the oldest retained entry that became durable at ``start_value`` (Unix milliseconds) or later, else the next one.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A named durable consumer of one buffer of one stream, as it is created."""

    name: str
    stream: str
    buffer: Buffer = Buffer.STORE
    start: StartAt = StartAt.EARLIEST
    start_value: int = 0
    required: bool = True


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a consumer stands: the next offset to send it, and all it has confirmed without a gap."""

    next_to_send: int
    committed: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer with its position, its open ranges and, when retired, by which reason."""

    spec: ConsumerSpec
    checkpoint: Checkpoint
    ranges: tuple[Range, ...]
    log_id: str
    created_unix_ms: int
    retired_reason: str | None = None
    peer_head: bytes | None = None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a consumer confirms: everything through an offset, and ranges beyond it in any order."""

    through: int | None = None
    ranges: Sequence[Range] = ()
    log_id: str | None = None
    peer_head: bytes | None = None


class CursorTracker(Protocol):
    """The durable positions of all consumers of a zone."""

    async def create(self, spec: ConsumerSpec) -> ConsumerState:
        """Create a consumer durably; an identical spec again gives what is there, another raises `ConsumerExists`.

        What lies before its start counts as confirmed. A start beyond the end raises `OffsetOutOfRange`, the name of
        a retired consumer `ConsumerRetired`. Names are unique in the storage, whatever the stream.
        """

    async def retire(self, name: str, reason: str) -> list[GapRecord]:
        """End a consumer by an operator's decision and give the gap records for what it had not confirmed.

        The records (``consumer_retired``) are durable in its buffer, and the consumer holds no frontier back any
        longer. It stays listed. A second time raises `ConsumerRetired`.
        """

    async def commit(self, name: str, confirmation: Confirmation) -> Checkpoint:
        """Record durably what is confirmed and give the new checkpoint.

        The frontier advances over contiguous offsets only and never moves back; repeats are harmless. Offsets that
        were removed or never held an entry can be confirmed like any other. Refused as a whole: offsets that are not
        below the end (`OffsetOutOfRange`), a position of another history (`ForeignLog`), too many open ranges
        (`TooManyRanges`), unknown or retired consumers (`UnknownConsumer`, `ConsumerRetired`).
        """

    async def commit_one(self, name: str, offset: int, key: Key) -> Checkpoint:
        """Record that the entry at ``offset`` is confirmed; raises `InvalidArgument` when it has another key."""

    async def sent(self, name: str, next_to_send: int) -> None:
        """Note, without making it durable, how far the consumer has been served.

        It may be set back, to serve again, but stays above ``committed``; beyond the end raises `OffsetOutOfRange`.
        """

    async def checkpoint(self, name: str) -> Checkpoint:
        """Give where a consumer stands; after a restart ``next_to_send`` is ``committed + 1`` again."""

    async def consumer(self, name: str) -> ConsumerState:
        """Describe one consumer."""

    async def consumers(self) -> list[ConsumerState]:
        """Describe all consumers, retired ones included, by name."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a storage can do beside the ports: whoever needs more asks here, and never which storage it is.

    ``durable``: what is acknowledged outlives the process. ``hash_chain``: what is stored is chained, so that a change
    by hand shows. ``offline_reads``: programs read its folder while no node runs. ``scrub``: old bytes are re-read.
    ``folder_backup``: `bsfg backup`, `restore`, `verify`, `inspect` and `salvage` work on its folder. ``keeps_all``: it
    keeps the node's state and the zone's artifacts, too.
    """

    backend: str
    durable: bool = True
    hash_chain: bool = False
    offline_reads: bool = False
    scrub: bool = False
    folder_backup: bool = False
    keeps_all: bool = False


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """What a storage is opened with: for which zone, and by which clock.

    ``folder`` is the zone's data folder, which is made and locked already; ``options`` are those of
    ``[storage.options]``; ``on_sync`` wants to know how long each write took to become durable, in seconds.
    """

    zone: str
    folder: Path
    options: Mapping[str, object]
    clock: Clock
    on_sync: Callable[[float], None] = lambda seconds: None


class Storage(Protocol):
    """All buffers and cursors of one zone; the unit that is opened, locked and closed.

    A package brings one by an entry point in the group ``bsfg.backends``: an async function that takes a
    `StorageRequest` and gives the storage.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beside this."""

    @property
    def cursors(self) -> CursorTracker:
        """The positions of all consumers."""

    async def store(self, stream: str, policy: Policy | None = None) -> StoreBuffer:
        """Open (or create durably) the store buffer of a stream; the policy of the first call stands until close."""

    async def forward(self, stream: str, policy: Policy | None = None) -> ForwardBuffer:
        """Open (or create durably) the forward buffer of a stream, likewise."""

    async def streams(self) -> list[tuple[str, Buffer]]:
        """List the buffers that exist."""

    async def close(self) -> None:
        """Finish what is under way (a receipt or `StorageClosed`) and release the storage; repeats are harmless."""
