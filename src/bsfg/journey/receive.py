"""Step 4, receive: what a link brings is judged, put into the forward buffer, and may be confirmed then.

Whoever brought it, the native engine (`bsfg.journey.pull`) or a pipeline that puts frame by frame, it is taken in here
and by the same rules. The sender may be defective, restored from an old copy, or hostile, so nothing of an answer is
stored before all of it was judged. Faults of history, framing and identity hold the link at once; bytes that do not
match their digest may have been damaged on the way: they are fetched once more, and hold the link the second time.

The order is what makes it safe to be interrupted anywhere: everything is durable here before the sender hears of it, so
an interruption only ever leads to the same facts being offered again, and the forward buffer knows them by their keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BsfgError, BufferFull, DigestMismatch, ForeignLog, FrameInvalid, ZoneNotAllowed
from bsfg.fact import Key
from bsfg.gaps import OFFSETS_END, RangeSet
from bsfg.journey.link import RETURNING, Fetched, PeerPosition, Refusal, merged_refusals, words_of
from bsfg.offload import by_size
from bsfg.ports import Clock, ForwardBuffer, Frame, Gap, GapRecord, GapSet, OriginSpan, Result
from bsfg.retention import GapReason
from bsfg.rules import DEFAULT_LIMITS, Limits
from bsfg.sealing import reseal
from bsfg.signatures import NO_KEYS, SIGNATURE_WEIGHT_BYTES, TrustedKeys

AnyGap = TypeVar("AnyGap", GapRecord, GapSet, Gap)


@dataclass(frozen=True, slots=True)
class LinkRules:
    """What one inbound link may bring into this zone.

    ``from_zones`` are the zones the peer may speak for: its own, and those it relays. ``max_age_seconds`` counts from
    the moment a fact became durable at its origin; None (always so on a `sil` stream) lets nothing expire. ``signing``
    are the keys by which facts of ``stream`` must be signed, where their zone has any.
    """

    zone: str
    from_zones: frozenset[str]
    max_age_seconds: float | None = None
    limits: Limits = DEFAULT_LIMITS
    signing: TrustedKeys = NO_KEYS
    stream: str = ""


@dataclass(slots=True)
class Put:
    """The answer is good: these entries are to be put, these gap records stored, then all through an offset confirmed.

    ``through`` is one below the answer's start when it brings nothing. ``served_at_unix_ms`` is the sender's clock when
    it gave the answer, None when it does not tell it.
    """

    through: int
    entries: list[EntryBatch] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    served_at_unix_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refetch:
    """The bytes at ``at`` do not match their digest for the first time; what stood before them is good."""

    before: Put
    at: int


@dataclass(frozen=True, slots=True)
class LinkHeld:
    """The link must stand still until an operator has looked: an error code, what was found, and in which history."""

    code: str
    detail: str
    log_id: str = ""


Decision = Put | Refetch | LinkHeld


def judge(fetched: Fetched, position: PeerPosition, rules: LinkRules, peer_zone: str) -> Decision:
    """Decide what becomes of an answer of the zone ``peer_zone``, given what is remembered of it."""
    try:
        check_history(fetched, position)
        check_order(fetched, position)
        gaps = _relayed([*fetched.gaps, *fetched.gap_sets], rules)
        put = Put(fetched.start - 1, gaps=gaps, served_at_unix_ms=fetched.served_at_unix_ms)
        for frame in fetched.frames:
            suspect = _sort_in(put, frame, rules, peer_zone)
            if suspect is not None:
                return _suspected(put, suspect, position)
    except BsfgError as error:
        return LinkHeld(error.code, error.message, fetched.log_id)
    return put


def check_history(fetched: Fetched, position: PeerPosition) -> None:
    """Raise `ForeignLog` when the sender's log is another one, or an older copy of the one remembered."""
    if position.log_id is not None and fetched.log_id != position.log_id:
        had = f", of which everything before {position.latest_start} came" if position.latest_start is not None else ""
        raise ForeignLog(f"the sender's log is {fetched.log_id}, it was {position.log_id}{had}")
    if fetched.end < position.end:
        raise ForeignLog(f"the sender's log ends before {fetched.end}, it ended before {position.end}: it went back")
    if position.acknowledged is not None and fetched.start <= position.acknowledged:
        raise ForeignLog(
            f"the sender starts at {fetched.start}, after it had acknowledged everything through "
            f"{position.acknowledged}: its cursor went back"
        )


def check_order(fetched: Fetched, position: PeerPosition) -> None:
    """Raise `FrameInvalid` unless the frames follow each other, from where they may start, to the end or before it."""
    if not 0 <= fetched.start <= fetched.end <= OFFSETS_END:
        raise FrameInvalid(f"the answer starts at {fetched.start} of a log that ends before {fetched.end}")
    if position.latest_start is not None and fetched.start > position.latest_start:
        raise FrameInvalid(
            f"the answer starts at {fetched.start}, {position.latest_start} is expected next: what lies between was "
            "confirmed by somebody else, perhaps by another node with this zone's certificate"
        )
    expected = fetched.start
    for frame in fetched.frames:
        if frame.first != expected or frame.last < frame.first:
            raise FrameInvalid(f"a frame has offsets {frame.first}..{frame.last}, {expected} is expected next")
        has_facts = frame.entries is not None or bool(frame.skips)
        if has_facts == (frame.gap is not None):
            raise FrameInvalid(f"frame {frame.first}..{frame.last} must hold either entries or a gap record")
        if has_facts:
            _check_offsets(frame)
        expected = frame.last + 1
    if expected > fetched.end:
        raise FrameInvalid(f"the frames reach offset {expected - 1} of a log that ends before {fetched.end}")


def _check_offsets(frame: Frame) -> None:
    """Raise `FrameInvalid` unless the entries of a frame, and what was left out among them, are all of its range."""
    entries, wrong = frame.entries, f"the entries of frame {frame.first}..{frame.last} do not have these offsets"
    if entries is None:
        offsets = np.empty(0, dtype=np.int64)
    elif entries.wellformed and entries.has_rows:
        values: Sequence[int | None] = entries.values("offset")
        if None in values or None in entries.values("appended_at_unix_ms"):
            raise FrameInvalid(f"frame {frame.first}..{frame.last} has entries without offset or time")
        if not frame.skips and values != list(range(frame.first, frame.last + 1)):
            raise FrameInvalid(wrong)
        offsets = np.array(values, dtype=np.int64) if frame.skips else np.empty(0, dtype=np.int64)
        if not frame.skips:
            return
    else:
        offsets = _columnar_offsets(entries, frame)
    left_out = RangeSet.union([each.ranges for each in frame.skips]) if frame.skips else RangeSet.empty()
    count = frame.last - frame.first + 1 - left_out.offsets
    if left_out.offsets != sum(each.ranges.offsets for each in frame.skips) or len(offsets) != count:
        raise FrameInvalid(wrong)
    if len(left_out) and (int(left_out.firsts[0]) < frame.first or int(left_out.lasts[-1]) > frame.last):
        raise FrameInvalid(wrong)
    if len(offsets) and (offsets[0] < frame.first or offsets[-1] > frame.last or (np.diff(offsets) <= 0).any()):
        raise FrameInvalid(wrong)
    # As many as there is room for, each once and none where something was left out: these are all of them.
    if left_out.cover(RangeSet(offsets, offsets, offsets)).any():
        raise FrameInvalid(wrong)


def _columnar_offsets(entries: EntryBatch, frame: Frame) -> np.ndarray:
    try:
        entries.record_batch.validate()
    except pa.ArrowInvalid as error:
        raise FrameInvalid(f"frame {frame.first}..{frame.last} is malformed: {error}") from None
    if entries.column("offset").null_count or entries.column("appended_at_unix_ms").null_count:
        raise FrameInvalid(f"frame {frame.first}..{frame.last} has entries without offset or time")
    return entries.offsets


def _sort_in(put: Put, frame: Frame, rules: LinkRules, peer_zone: str) -> int | None:
    """Add a frame's content to what is to be put; give the offset of the first altered entry, if there is one."""
    suspect = None
    if frame.gap is not None:
        # All of the frame, whatever it says: nothing else came of it.
        gap = replace(frame.gap, first=frame.first, last=frame.last, origin_zone=peer_zone, count=None)
        put.gaps.append(_trimmed(gap))
        put.through = frame.last
        return suspect
    entries = frame.entries
    put.through = frame.last
    if entries is not None:
        try:
            reseal(entries, limits=rules.limits)
        except DigestMismatch as error:
            row = int(error.details["rows"][0])
            suspect = int(entries.offsets[row])
            entries = entries.slice(0, row)
            put.through = suspect - 1
        if len(entries):
            _check_from_zones(entries, rules)
            _leave_out_own(put, entries, rules, peer_zone)
    for skips in frame.skips:
        put.gaps.append(_trimmed(replace(skips.within(frame.first, put.through), origin_zone=peer_zone)))
    return suspect


def _check_from_zones(entries: EntryBatch, rules: LinkRules) -> None:
    """Raise `ZoneNotAllowed` when the peer speaks for a zone that it may not speak for."""
    for zone in entries.distinct("from_zone"):
        if zone not in rules.from_zones and zone != rules.zone:
            raise ZoneNotAllowed(f"this link may not bring facts of zone {zone!r}", zone=zone)


def _leave_out_own(put: Put, entries: EntryBatch, rules: LinkRules, peer_zone: str) -> None:
    """Keep out what this zone said itself and what comes back over a relay; it becomes a reported range."""
    if rules.zone not in entries.distinct("from_zone"):
        put.entries.append(entries)
        return
    own = np.asarray(pc.equal(entries.column("from_zone"), rules.zone).to_numpy(zero_copy_only=False))
    mine = entries.take(np.flatnonzero(own))
    at_unix_ms = int(mine.column("appended_at_unix_ms")[-1].as_py())
    ranges = RangeSet.of_offsets(mine.offsets, at_unix_ms)
    put.gaps.append(GapSet(GapReason.SKIPPED, ranges, RETURNING, peer_zone, at_unix_ms))
    if len(mine) < len(entries):
        put.entries.append(entries.take(np.flatnonzero(~own)))


def _relayed(gaps: Sequence[Gap], rules: LinkRules) -> list[Gap]:
    """Take the gap records that the sender got from other zones, those that speak of this zone left out."""
    for gap in gaps:
        if gap.origin_zone is None or (isinstance(gap, GapRecord) and not 0 <= gap.first <= gap.last < OFFSETS_END):
            raise FrameInvalid(f"a relayed gap record of zone {gap.origin_zone} names no range of its offsets")
        if isinstance(gap, GapRecord) and not 1 <= gap.offsets <= gap.last - gap.first + 1:
            raise FrameInvalid(f"a relayed gap record of zone {gap.origin_zone} cannot stand for {gap.count} offsets")
        if gap.reason != GapReason.SKIPPED and _is_folded(gap):
            raise FrameInvalid(f"a relayed gap record of zone {gap.origin_zone} does not say what is {gap.reason}")
        if gap.origin_zone not in rules.from_zones and gap.origin_zone != rules.zone:
            raise ZoneNotAllowed(f"this link may not bring gap records of zone {gap.origin_zone!r}")
    return [_trimmed(gap) for gap in gaps if gap.origin_zone != rules.zone]


def _is_folded(gap: Gap) -> bool:
    return (gap.count if isinstance(gap, GapRecord) else gap.ranges.counts) is not None


def _trimmed(gap: AnyGap) -> AnyGap:
    """Keep a sender's words short: they are stored for good."""
    return replace(gap, detail=words_of(gap.detail))


def _suspected(put: Put, suspect: int, position: PeerPosition) -> Decision:
    if position.suspect == suspect:
        return LinkHeld(DigestMismatch.code, f"the entry at offset {suspect} did not match its digest twice")
    return Refetch(put, suspect)


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
