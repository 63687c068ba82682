"""What a receiver checks before it believes a sender, and what follows from each finding.

The sender may be defective, restored from an old copy, or hostile. Nothing of an answer is stored before all of it
was judged. Faults of history, framing and identity hold the link at once; bytes that do not match their digest are
fetched once more, since they may have been damaged on the way, and hold the link the second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, DigestMismatch, ForeignLog, FrameInvalid, ZoneNotAllowed
from bsfg.gaps import OFFSETS_END, RangeSet
from bsfg.journey.link import RETURNING, Fetched, PeerPosition, words_of
from bsfg.ports import Frame, Gap, GapRecord, GapSet
from bsfg.retention import GapReason
from bsfg.rules import DEFAULT_LIMITS, Limits
from bsfg.sealing import reseal
from bsfg.signatures import NO_KEYS, TrustedKeys

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
        raise FrameInvalid(f"the answer starts at {fetched.start}, {position.latest_start} is expected next")
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
