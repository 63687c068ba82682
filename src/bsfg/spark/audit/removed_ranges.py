"""Ranges that one end has let go: their entries at the other end are held against the digest that was kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from bsfg.columns import is_in
from bsfg.digest import KeptRange, RangeDigest
from bsfg.frontier import joined
from bsfg.journey.sums import NAMED_MAX, RECEIVER, SENDER, AuditScope, EntryHash, LinkRows, Named, named, received, sent
from bsfg.ports import GapRecord
from bsfg.retention import GapReason
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.compare import Detail
from bsfg.spark.audit.judging import NONE, RECEIVER_TRUNCATED, Excuses, folded, let_go_before, of_gaps, returning
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import End
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind, FoldedAbsence

_DIGEST_FACTS = 10_000
KEPT_FACTS_MAX = 1 << 26
"""No segment holds more; what is said to have been one with more is not compared."""


@dataclass(slots=True)
class KeptDetail:
    """What became of one range that an end has let go: how many facts were proven, or why they could not be.

    ``folded`` is what folded records were taken to excuse in it.
    """

    first: int
    last: int
    proven: int = 0
    why: str = ""
    detail: Detail | None = None
    findings: list[AuditFinding] = field(default_factory=list)
    folded: list[Absence] = field(default_factory=list)

    @property
    def facts(self) -> int:
        """How many facts it held."""
        return self.last - self.first + 1

    def differs(self, side: str, detail: str = "") -> None:
        """Find that the range is not what the digest was made of that one side kept."""
        kind = FindingKind.KEPT_DIGEST
        self.findings = [AuditFinding(kind, side, self.first, self.last, detail=detail, count=self.facts)]


@dataclass(frozen=True, slots=True)
class SenderKept:
    """Holds the receiver's entries of a range against what the sender kept of it; ``spans`` say where they are."""

    kept: KeptRange
    sender: End
    receiver: End
    log_id: str
    spans: tuple[tuple[int, int], ...]
    scope: AuditScope
    absent: Excuses
    other_paths: bool
    returning: Excuses

    def __call__(self) -> KeptDetail:
        """Do it, in whichever process this is."""
        rows, let_go = self._rows()
        if not let_go:
            return self._judged(rows)
        # The receiver has let go since the first pass some of what is being read, the first of it in order.
        gone = int(rows.offsets[0]) - 1 if len(rows) else self.kept.last
        excuse = Absence(RECEIVER_TRUNCATED, RECEIVER, self.kept.first, gone, detail="let go while it was read")
        return replace(self, absent=Excuses([excuse, *self.absent.all]))._judged(rows)

    def _judged(self, rows: LinkRows) -> KeptDetail:
        kept = self.kept
        found, expected = KeptDetail(kept.first, kept.last), np.arange(kept.first, kept.last + 1)
        whole = np.array_equal(rows.offsets, expected)
        if whole and digest_of(rows) == kept.range_digest:
            found.proven = found.facts
            return found
        lacking = np.setdiff1d(expected, rows.offsets)
        # Count what only folded records excuse: whether they stand for so many is asked when all ranges are known.
        owners = self.absent.of(lacking)
        numbers = np.unique(owners[owners != NONE]).tolist()
        used = [number for number in numbers if isinstance(self.absent.all[number], FoldedAbsence)]
        parts = [(self.absent.all[number], lacking[owners == number]) for number in used]
        found.folded = [excuse.part(int(part[0]), int(part[-1]), len(part)) for excuse, part in parts]
        if (keys := self.sender.kept_keys(kept.first, kept.last)) is None:
            self._without_keys(found, lacking)
        else:
            found.detail = self._by_keys(rows, keys)
            found.findings = _differing(rows, keys)
            if whole and not found.findings:
                found.differs(
                    SENDER, "all keys and bodies agree with those kept, so a field of an envelope was altered"
                )
        return found

    def _rows(self) -> tuple[LinkRows, bool]:
        """Give the receiver's entries of the range, and whether some of what was there has been let go since."""
        parts, gaps = [], list[GapRecord]()
        for first, last in self.spans:
            for frame in self.receiver.frames(first, last + 1, self.log_id):
                if frame.entries is not None:
                    rows = received(frame.entries, self.scope)
                    inside = (rows.offsets >= self.kept.first) & (rows.offsets <= self.kept.last)
                    parts.append(rows.take(np.flatnonzero(inside)))
                elif frame.gap is not None:
                    gaps.append(frame.gap)
        rows = LinkRows.concat(parts)
        return rows.take(np.lexsort((rows.places, rows.offsets))), let_go_before(gaps) > 0

    def _by_keys(self, rows: LinkRows, keys: pa.RecordBatch) -> Detail:
        """Find what the receiver lacks of the keys that were kept."""
        offsets = np.asarray(keys.column("offset"))
        lacking = np.flatnonzero(~np.isin(offsets, rows.offsets))
        lacking = lacking[self.absent.of(offsets[lacking]) == NONE]
        # What its own zone said does not come back to a receiver, and is no loss.
        own = frozenset({self.scope.receiver_zone} if self.scope.receiver_zone is not None else ())
        open_rows = lacking[~is_in(keys.column("from_zone"), own)[lacking]]
        part = keys.take(pa.array(open_rows))
        detail = Detail(absent=offsets[open_rows])
        zones, ids = (part.column(name) for name in ("from_zone", "message_id"))
        detail.absent_keys = EntryHash(self.scope.secret).keys_of(zones, ids)
        shown = zip(detail.absent[:NAMED_MAX].tolist(), zones.to_pylist(), ids.to_pylist(), strict=False)
        detail.absent_names = {at: Named(at, at, zone, id) for at, zone, id in shown}
        return detail

    def _without_keys(self, found: KeptDetail, lacking: np.ndarray) -> None:
        open_offsets = lacking[(self.absent.of(lacking) == NONE) & (self.returning.of(lacking) == NONE)]
        if len(lacking) == 0:
            found.differs(SENDER)
        elif len(open_offsets) == 0:
            found.why = f"{len(lacking)} of the facts are not at the receiver, for reasons on record"
        elif self.other_paths:
            found.why = f"{len(open_offsets)} of the facts may have come to the receiver by another path"
        else:
            bounds = int(open_offsets[0]), int(open_offsets[-1])
            detail = "the sender has let them go, so their keys are not known"
            found.findings = [
                AuditFinding(FindingKind.MISSING, RECEIVER, *bounds, detail=detail, count=len(open_offsets))
            ]


@dataclass(frozen=True, slots=True)
class ReceiverKept:
    """Holds the sender's entries against what the receiver kept of a range, whose offsets lie ``shift`` lower."""

    kept: KeptRange
    sender: End
    log_id: str
    shift: int
    scope: AuditScope

    def __call__(self) -> KeptDetail:
        """Do it, in whichever process this is."""
        found = KeptDetail(self.kept.first + self.shift, self.kept.last + self.shift)
        frames = self.sender.frames(found.first, found.last + 1, self.log_id)
        rows = LinkRows.concat([sent(frame.entries, self.scope)[0] for frame in frames if frame.entries is not None])
        if len(rows) != found.facts:
            found.why = "the sender does not have all of the range"
        elif digest_of(rows) == self.kept.range_digest:
            found.proven = len(rows)
        else:
            found.differs(RECEIVER)
        return found


def digest_of(rows: LinkRows) -> str:
    """Give the digest of entries in their order."""
    digest = RangeDigest()
    for at in range(0, len(rows), _DIGEST_FACTS):
        digest.add(rows.entries.slice(at, _DIGEST_FACTS))
    return digest.hexdigest()


def both_kept(sender: Sequence[KeptRange], receiver: Sequence[KeptRange], shift: int) -> list[KeptDetail]:
    """Compare the digests of ranges that both ends have let go, where they have the same borders."""
    theirs = {(kept.first + shift, kept.last + shift): kept for kept in receiver}
    result = []
    for kept in sender:
        other = theirs.get((kept.first, kept.last))
        if other is not None:
            found = KeptDetail(kept.first, kept.last)
            if other.range_digest == kept.range_digest:
                found.proven = found.facts
            else:
                found.differs(SENDER, "both ends have let the range go")
            result.append(found)
    return result


def _differing(rows: LinkRows, keys: pa.RecordBatch) -> list[AuditFinding]:
    """Name the entries whose key or digest is not the one that was kept."""
    offsets = np.asarray(keys.column("offset"))
    at = np.searchsorted(offsets, rows.offsets)
    inside = np.flatnonzero((at < len(offsets)) & (offsets[np.minimum(at, len(offsets) - 1)] == rows.offsets))
    mine = rows.take(inside)
    theirs = keys.take(pa.array(at[inside]))
    wrong: dict[int, list[str]] = {}
    for name in ("from_zone", "message_id", "digest"):
        ours, kept = mine.entries.values(name), theirs.column(name).to_pylist()
        for row in (row for row, (one, other) in enumerate(zip(ours, kept, strict=True)) if one != other):
            wrong.setdefault(row, []).append(name)
    shown, detail = list(wrong)[:NAMED_MAX], "compared with the key and digest that the sender kept"
    return [
        AuditFinding.of(FindingKind.ALTERED, RECEIVER, entry, tuple(wrong[row]), detail)
        for row, entry in zip(shown, named(mine, shown), strict=True)
    ]


def check_let_go(case: Case, runner: Runner) -> list[KeptDetail]:
    """Check all ranges of which one end, or both, kept no more than a digest."""
    steps: list[SenderKept | ReceiverKept] = [*_sender_kept(case), *_receiver_kept(case)]
    found: list[KeptDetail] = runner.each(f"{case.plan.stream}: what was let go", steps)
    shift = _shift(case)
    if shift is not None:
        seen = {(each.first, each.last) for each in found}
        pairs = both_kept(case.sender.kept, case.receiver.kept, shift)
        found += [each for each in pairs if (each.first, each.last) not in seen]
    return found


def _sender_kept(case: Case) -> Iterator[SenderKept]:
    zone, paths, lowest = case.scope.zone, case.totals.paths, case.lowest
    brought = {source for origin, source in paths if origin == zone}
    other_paths = any(origin != zone and source in brought for origin, source in paths)
    for kept in case.sender.kept:
        inside = case.scope.first <= kept.first <= kept.last < min(case.end, case.sender.start)
        reached = case.receiver.start == 0 or (lowest is not None and lowest <= kept.first)
        if inside and reached and kept.last - kept.first < KEPT_FACTS_MAX:
            yield SenderKept(
                kept,
                case.plan.sender,
                case.plan.receiver,
                case.receiver.log_id,
                _spans(case, kept.first, kept.last),
                case.scope,
                _excuses(case, kept),
                other_paths,
                Excuses(returning(case.scope, case.receiver)).within(kept.first, kept.last + 1),
            )


def _excuses(case: Case, kept: KeptRange) -> Excuses:
    """Give why the receiver may lack something of a range: also that the sender dropped it before it was sent."""
    gaps = [gap for gap in case.totals.gaps(SENDER) if gap.reason != GapReason.TRUNCATED]
    known = [each for each in case.excuses.all if not isinstance(each, FoldedAbsence)]
    folds = folded(case.scope, case.receiver)
    return Excuses([*known, *of_gaps(gaps).all, *folds]).within(kept.first, kept.last + 1)


def _spans(case: Case, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Give where the receiver has what lies in some ranges, overlaps joined."""
    size = case.scope.range_facts
    numbers = range(first // size, last // size + 1)
    return tuple(joined(span for number in numbers for span in case.totals.spans.get(number, ())))


def _receiver_kept(case: Case) -> Iterator[ReceiverKept]:
    shift = _shift(case)
    if shift is None:
        return
    for kept in case.receiver.kept:
        first, last = kept.first + shift, kept.last + shift
        if max(case.sender.start, case.scope.first) <= first <= last < case.end:
            yield ReceiverKept(kept, case.plan.sender, case.sender.log_id, shift, case.scope)


def _shift(case: Case) -> int | None:
    """Give how much higher the sender's offsets are than the receiver's, None when they do not run side by side.

    In what the receiver has let go they did, if it holds nothing but this link's facts and nothing was left out.
    """
    first = next((each.first_entry for each in case.totals.side(RECEIVER) if each.first_entry is not None), None)
    told = any(gap.origin_zone is not None for gap in case.receiver.gaps)
    left_out = any(each.left_out for each in case.totals.stretches)
    alone = {origin for origin, _ in case.totals.paths} == {case.scope.zone}
    if first is None or told or left_out or not alone or case.scope.first > 0:
        return None
    return first.offset - first.place


def let_go_by_sender(case: Case) -> int:
    """Count the offsets of the window that the sender has let go."""
    return max(0, min(case.sender.start, case.end) - case.scope.first)


def let_go_by_receiver(case: Case) -> int:
    """Count about how many facts of the window the receiver alone has let go."""
    lowest = case.lowest
    if case.receiver.start == 0:
        return 0
    gone = case.frontier + 1 if lowest is None else lowest
    return max(0, min(gone, case.end) - max(case.sender.start, case.scope.first))
