"""Step 4, receive: what a link brings is judged, put into the forward buffer, and may be confirmed then.

Whoever brought it, the native engine (`bsfg.journey.pull`) or a pipeline that puts frame by frame, it is taken in here
and by the same rules. The order is what makes it safe to be interrupted anywhere: everything is durable here before the
sender hears of it, so an interruption only ever leads to the same facts being offered again, and the forward buffer
knows them by their keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BsfgError, BufferFull
from bsfg.fact import Key
from bsfg.journey.link import Fetched, PeerPosition, Refusal, merged_refusals
from bsfg.journey.verify import Decision, LinkHeld, LinkRules, Put, Refetch, judge
from bsfg.offload import by_size
from bsfg.ports import Clock, ForwardBuffer, GapRecord, GapSet, OriginSpan, Result
from bsfg.retention import GapReason
from bsfg.signatures import SIGNATURE_WEIGHT_BYTES

CONFLICT = "conflict"
HASH_COLLISION = "hash_collision"
EXPIRED = "expired"
UNDECIDED = "undecided"

BeforePut = Callable[[FactBatch], Awaitable[None]]
"""What must be done before facts are put: bring their artifacts.

It comes first with no facts at all, and raises when nothing of the link may be taken in now, facts or not.
"""

_NO_FACTS = FactBatch.of_rows([])


@dataclass(frozen=True, slots=True)
class PullProgress:
    """What one turn achieved, and what keeps the next one back.

    ``through`` is what may be confirmed, None when nothing came, ``chain_head`` the head of the log here then.
    ``held``: stand still until an operator releases the link. ``paused``: the forward buffer is full, try later.
    ``refetch_at``: ask again at once. ``lag_seconds``: how long ago the sender had the newest of these facts on disk
    when they were on disk here, None when there were none or the sender does not tell its time. With nothing that keeps
    it back and ``backlog`` above 0, the next turn may follow directly.
    """

    inserted: int = 0
    repeated: int = 0
    refused: tuple[Refusal, ...] = ()
    gaps: int = 0
    through: int | None = None
    chain_head: bytes = b""
    acknowledged: int | None = None
    backlog: int = 0
    lag_seconds: float | None = None
    held: LinkHeld | None = None
    paused: BsfgError | None = None
    refetch_at: int | None = None

    @property
    def moved(self) -> bool:
        """Whether the turn brought anything that is confirmed, or about to be."""
        return self.through is not None

    @property
    def refused_facts(self) -> int:
        """How many facts were put into quarantine."""
        return sum(refusal.last - refusal.first + 1 for refusal in self.refused)


@dataclass(slots=True)
class StoredAnswer:
    """What became of the entries of one answer."""

    inserted: int = 0
    repeated: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    chain_head: bytes = b""


async def receive(
    brought: Fetched,
    position: PeerPosition,
    rules: LinkRules,
    peer: str,
    forward: ForwardBuffer,
    *,
    clock: Clock,
    clock_trusted: bool = True,
    before_put: BeforePut | None = None,
) -> PullProgress:
    """Take in what somebody has brought of the zone ``peer``: judge it, put what is good of it, say what to confirm.

    ``position`` is what is remembered of the sender. Raises what the storage and ``before_put`` raise, except where
    that means a paused link. ``clock_trusted`` suspends expiry while this zone's clock is in doubt.
    """
    came_ms = clock.monotonic_ms()
    decision = await judged(brought, position, rules, peer)
    if isinstance(decision, LinkHeld):
        return PullProgress(held=decision)
    put, suspect = to_put(decision)
    try:
        stored = await store(put, forward, rules, peer, clock, clock_trusted=clock_trusted, before_put=before_put)
    except BufferFull as error:
        return no_room(brought, error)
    position = advanced(position, brought, put, suspect)
    return progress_of(position, brought, put, stored, (clock.monotonic_ms() - came_ms) / 1000)


def to_put(decision: Put | Refetch) -> tuple[Put, int | None]:
    """Give what is good of an answer, and the offset of the entry behind it that must be fetched again, if any."""
    return (decision.before, decision.at) if isinstance(decision, Refetch) else (decision, None)


def no_room(brought: Fetched, error: BufferFull) -> PullProgress:
    """Say that nothing of an answer could be stored: everything from its start on is still to come."""
    return PullProgress(paused=error, backlog=brought.end - brought.start)


async def judged(fetched: Fetched, position: PeerPosition, rules: LinkRules, peer: str) -> Decision:
    """Judge an answer, a large one in a thread: its digests take long, and the event loop has others to serve."""
    return await by_size(fetched.weight_bytes, judge, fetched, position, rules, peer)


def advanced(position: PeerPosition, fetched: Fetched, put: Put, suspect: int | None) -> PeerPosition:
    """Give the position after the answer was stored; it must be remembered before the sender can act on a confirm."""
    # Before the first answer nothing is known: a confirmation sent by an earlier life of this zone may still be on its
    # way, for anything that the sender had by then.
    latest_start = fetched.end if position.latest_start is None else position.latest_start
    return replace(
        position,
        log_id=fetched.log_id,
        latest_start=max(put.through + 1, latest_start),
        end=fetched.end,
        chain_head=fetched.chain_head,
        suspect=suspect,
        gaps_token=fetched.gaps_token,
    )


def progress_of(
    position: PeerPosition, brought: Fetched, put: Put, stored: StoredAnswer, took_seconds: float
) -> PullProgress:
    """Say what storing an answer achieved, how long that took, and through where it may be confirmed."""
    age_seconds = _newest_age_seconds(put)
    return PullProgress(
        inserted=stored.inserted,
        repeated=stored.repeated,
        refused=tuple(stored.refusals),
        gaps=sum(len(gap.ranges) if isinstance(gap, GapSet) else 1 for gap in put.gaps),
        through=put.through if put.through >= brought.start else None,
        chain_head=stored.chain_head,
        backlog=position.end - (put.through + 1),
        lag_seconds=None if age_seconds is None else age_seconds + took_seconds,
        refetch_at=position.suspect,
    )


async def store(
    put: Put,
    forward: ForwardBuffer,
    rules: LinkRules,
    peer: str,
    clock: Clock,
    *,
    clock_trusted: bool = True,
    before_put: BeforePut | None = None,
) -> StoredAnswer:
    """Make all that is good of an answer durable: entries, what is refused of them, and gap records."""
    stored = StoredAnswer()
    if before_put is not None and (put.entries or put.gaps):
        await before_put(_NO_FACTS)
    rules = rules if clock_trusted else replace(rules, max_age_seconds=None)
    if put.entries:
        entries = await by_size(sum(each.weight_bytes for each in put.entries), EntryBatch.concat, put.entries)
        # The sender's own clock tells how old its facts are; one that does not say so is judged by the clock of here.
        served_at = clock.now_unix_ms() if put.served_at_unix_ms is None else put.served_at_unix_ms
        times, ages_ms = entries.numbers("appended_at_unix_ms"), entries.ages_ms(served_at)
        came = _Came(entries, OriginSpan(peer, entries.offsets, times, ages_ms), forward, stored)
        await _set_unsigned_aside(came, rules)
        await _set_expired_aside(came, rules)
        if len(came.entries):
            await _put_entries(stored, came.entries, forward, came.origin, before_put)
    gaps = list(put.gaps)
    for refusal in stored.refusals:
        detail = f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason
        reason, now_unix_ms = GapReason.QUARANTINED, clock.now_unix_ms()
        gaps.append(GapRecord(refusal.first, refusal.last, reason, now_unix_ms, detail, peer))
    if gaps:
        await forward.record_gaps(gaps)
    stored.chain_head = stored.chain_head or (await forward.stats()).chain_head
    return stored


async def _put_entries(
    stored: StoredAnswer, entries: EntryBatch, forward: ForwardBuffer, origin: OriginSpan, before_put: BeforePut | None
) -> None:
    facts = entries.facts
    if before_put is not None:
        await before_put(facts)
    receipt = await forward.put_if_absent(facts, origin)
    stored.chain_head = receipt.chain_head
    if not receipt.results.any():
        stored.inserted = len(receipt.results)
        return
    stored.inserted = receipt.count(Result.INSERTED)
    stored.repeated = receipt.count(Result.ALREADY_EXISTS) - len(receipt.undecided)
    # Kept aside here, and nowhere else: the sender is to know that before it lets go of them.
    offsets = entries.offsets[list(receipt.undecided)].tolist()
    stored.refusals += merged_refusals(Refusal(offset, offset, UNDECIDED) for offset in offsets)
    conflicts = np.flatnonzero(receipt.results == Result.CONFLICT)
    if len(conflicts):
        stored.refusals += await _conflict_refusals(entries.take(conflicts), forward)


async def _conflict_refusals(refused: EntryBatch, forward: ForwardBuffer) -> list[Refusal]:
    """Say for each refused entry whether its id is taken or, which should never be, its digest."""
    result = []
    for offset, key, digest in zip(refused.offsets.tolist(), _keys(refused), refused.digests(), strict=True):
        existing = await forward.get(key)
        same_digest = existing is not None and existing.digest == digest
        result.append(Refusal(offset, offset, HASH_COLLISION if same_digest else CONFLICT))
    return merged_refusals(result)


@dataclass(slots=True)
class _Came:
    """The entries of an answer with their origins; what cannot be put is set aside and leaves it."""

    entries: EntryBatch
    origin: OriginSpan
    forward: ForwardBuffer
    stored: StoredAnswer

    async def new(self, rows: np.ndarray) -> list[int]:
        """Give those of some rows that are not here yet: what is here is no replay and no forgery but a repeat."""
        if not len(rows):
            return []
        keys = _keys(self.entries.take(rows))
        return [int(row) for row, key in zip(rows, keys, strict=True) if await self.forward.get(key) is None]

    async def set_aside(self, reasons: Mapping[tuple[str, str], list[int]]) -> None:
        """Quarantine rows by reason and detail, and note that the sender is to be told."""
        for (reason, detail), rows in reasons.items():
            offsets = self.entries.offsets[rows].tolist()
            where = f"{detail}, from {self.origin.zone} {offsets[0]}..{offsets[-1]}"
            await self.forward.set_aside(self.entries.take(rows).facts, reason, where, self.origin.take(rows))
            self.stored.refusals += merged_refusals(Refusal(offset, offset, reason, detail) for offset in offsets)
        left = np.setdiff1d(np.arange(len(self.entries)), [row for rows in reasons.values() for row in rows])
        self.entries, self.origin = self.entries.take(left), self.origin.take(left)


async def _set_expired_aside(came: _Came, rules: LinkRules) -> None:
    """Quarantine what is older than max age."""
    if rules.max_age_seconds is None or came.origin.ages_ms is None:
        return
    expired = await came.new(np.flatnonzero(came.origin.ages_ms > rules.max_age_seconds * 1000))
    if expired:
        await came.set_aside({(EXPIRED, f"older than {rules.max_age_seconds:g} s"): expired})


async def _set_unsigned_aside(came: _Came, rules: LinkRules) -> None:
    """Quarantine what is not signed as the keys of its zone demand."""
    if not rules.signing.zones or not rules.signing.concern(came.entries.distinct("from_zone")):
        return
    size_bytes = len(came.entries) * SIGNATURE_WEIGHT_BYTES
    problems = await by_size(size_bytes, rules.signing.problems, came.entries, rules.stream)
    # A few reasons, whatever the sender wrote: what is stored of each is a set of ranges.
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in await came.new(np.array(sorted(problems), dtype=np.int64)):
        reasons.setdefault((problems[row].code, str(problems[row].details["why"])), []).append(row)
    if reasons:
        await came.set_aside(reasons)


def _newest_age_seconds(put: Put) -> float | None:
    """Give for how long the sender had the newest fact of an answer when it served it, by its own clock."""
    if not put.entries or put.served_at_unix_ms is None:
        return None
    newest = put.entries[-1].slice(len(put.entries[-1]) - 1).values("appended_at_unix_ms")[0]
    return float(max(0, put.served_at_unix_ms - newest) / 1000)


def _keys(entries: EntryBatch) -> list[Key]:
    zones, ids = entries.column("from_zone").to_pylist(), entries.column("message_id").to_pylist()
    return [Key(zone, id) for zone, id in zip(zones, ids, strict=True)]
