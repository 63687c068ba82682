"""The second pass: a range that differs, entry by entry.

What only this range can tell is decided here. What may be found elsewhere in the receiver's log (a fact that seems
missing may have come by another path, or stand in the wrong place) is handed on to `bsfg.spark.audit.settle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.batch import FACT_SCHEMA
from bsfg.digest import Restore
from bsfg.journey.sums import (
    NAMED_MAX,
    RECEIVER,
    SENDER,
    AuditScope,
    EntryHash,
    LinkRows,
    Named,
    named,
    received,
    sender_rows,
    sent,
)
from bsfg.ports import GapRecord
from bsfg.sealing import digest_mismatches
from bsfg.spark.audit.judging import GIVEN_BACK, NONE, RECEIVER_TRUNCATED, Excuses, let_go_before, of_gaps
from bsfg.spark.audit.scope import End, Sibling, same_keys
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind

BODY = ("subject", "predicate", "object", "artifact_digest")
FIELDS = tuple(FACT_SCHEMA.names)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two entries with one offset and different keys: the sender's and the receiver's."""

    sender: Named
    receiver: Named
    sender_key: int
    receiver_key: int
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stray:
    """An entry of the receiver that fits none of the sender's; ``same_body`` as the fact that has its offset."""

    entry: Named
    key: int
    same_body: bool = False


@dataclass(slots=True)
class Detail:
    """What the comparison of a range found, and what is left open.

    ``absent`` and ``absent_keys`` are offsets and hashed keys of what the receiver lacks without excuse.
    """

    compared: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    absent: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    absent_keys: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    absent_names: dict[int, Named] = field(default_factory=dict)
    absences: list[Absence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparing:
    """Reads a range that differs at both ends and compares it entry by entry.

    ``spans`` say where the receiver has it. ``absent`` excuses what the receiver lacks, ``gaps`` are the sender's own,
    and ``unrecorded`` those parts of them for which the receiver has no record. ``sender_end`` is where the sender's
    log ends, ``sibling`` its other buffer, when another link pulls that, and ``restores`` are those of its log.
    """

    number: int
    sender: End
    sender_log: str
    receiver: End
    receiver_log: str
    spans: tuple[Span, ...]
    scope: AuditScope
    absent: Excuses
    gaps: Excuses
    unrecorded: tuple[Span, ...] = ()
    sender_end: int = 0
    sibling: Sibling | None = None
    restores: tuple[Restore, ...] = ()

    def __call__(self) -> Detail:
        """Do it, in whichever process this is."""
        first, end = self.scope.bounds(self.number)
        ours, left_out, gaps = [], [np.empty(0, dtype=bool)], list[GapRecord]()
        # A sender that was restored may end before what the receiver has of it.
        last = min(end, self.sender_end)
        for frame in self.sender.frames(first, last, self.sender_log) if first < last else ():
            if frame.entries is not None:
                rows = sender_rows(frame.entries)
                ours.append(rows)
                left_out.append(~np.isin(rows.offsets, sent(frame.entries, self.scope)[0].offsets))
            elif frame.gap is not None:
                gaps.append(replace(frame.gap, first=frame.first, last=frame.last))
        theirs, let_go = self._received(first, end)
        # Both ends may have let go since the first pass what is being read.
        now = replace(self, gaps=Excuses([*self.gaps.all, *of_gaps(gaps).all]))
        if let_go:
            excuse = Absence(RECEIVER_TRUNCATED, RECEIVER, first, end - 1, detail="let go while it was read")
            now = replace(now, absent=Excuses([*self.absent.all, excuse]))
        return _Comparison(now, LinkRows.concat(ours), np.concatenate(left_out), theirs).run()

    def _received(self, first: int, end: int) -> tuple[LinkRows, bool]:
        """Give the receiver's entries of the range, and whether some of what was there has been let go since."""
        # What shares its offsets with another link is told apart by key, which needs the rows of both.
        scope, parts, gaps = replace(self.scope, shared=False), [], list[GapRecord]()
        for start, last in self.spans:
            for frame in self.receiver.frames(start, last + 1, self.receiver_log):
                if frame.entries is not None:
                    rows = received(frame.entries, scope)
                    parts.append(rows.take(np.flatnonzero((rows.offsets >= first) & (rows.offsets < end))))
                elif frame.gap is not None:
                    gaps.append(frame.gap)
        return LinkRows.concat(parts), let_go_before(gaps) > 0


class _Side:
    """The rows of one end with what is compared of them; ``altered`` marks those whose body is not its digest's."""

    def __init__(self, rows: LinkRows, scope: AuditScope) -> None:
        hasher = EntryHash(scope.secret)
        self.rows, self.keys = rows, hasher.keys(rows.entries)
        self.hashes = hasher.of(rows.entries, rows.offsets, rows.times)
        self.altered = np.zeros(len(rows), dtype=bool)
        if scope.deep and len(rows):
            self.altered[digest_mismatches(rows.entries)] = True

    @property
    def offsets(self) -> np.ndarray:
        return self.rows.offsets

    def keep(self, kept: np.ndarray) -> None:
        self.rows, self.keys = self.rows.take(kept), self.keys[kept]
        self.hashes, self.altered = self.hashes[kept], self.altered[kept]

    def name(self, row: int) -> Named:
        return named(self.rows, [row])[0]

    def bounds(self, rows: np.ndarray) -> Span:
        return int(self.offsets[rows[0]]), int(self.offsets[rows[-1]])


class _Comparison:
    """One range while it is compared; ``left_out`` marks rows of the sender that it does not send."""

    def __init__(self, step: Comparing, sender: LinkRows, left_out: np.ndarray, receiver: LinkRows) -> None:
        self._step, self._left_out = step, left_out
        self._ours = _Side(sender, step.scope)
        self._theirs = _Side(receiver.take(np.lexsort((receiver.places, receiver.offsets))), step.scope)
        self.found = Detail()

    def run(self) -> Detail:
        self._drop_other_link()
        left = np.searchsorted(self._theirs.offsets, self._ours.offsets, side="left")
        counts = np.searchsorted(self._theirs.offsets, self._ours.offsets, side="right") - left
        self._absent(np.flatnonzero(counts == 0))
        self.found.compared = int(np.count_nonzero(counts))
        self._given_back(left, counts)
        self._odd(left, counts)
        self._strays()
        # Report what the sender lost and the receiver neither has nor knows to be lost.
        for first, last in self._step.unrecorded:
            missing = np.setdiff1d(np.arange(first, last + 1), self._theirs.offsets)
            if len(missing):
                bounds = int(missing[0]), int(missing[-1])
                finding = AuditFinding(FindingKind.GAP_UNRECORDED, RECEIVER, *bounds, count=len(missing))
                self.found.findings.append(finding)
        return self.found

    def _drop_other_link(self) -> None:
        """Leave out what another link brought from the sender's other buffer: it has our offsets by chance."""
        step, ours, theirs = self._step, self._ours, self._theirs
        if step.sibling is None:
            return
        rows = step.sibling.rows(*step.scope.bounds(step.number))
        keys = EntryHash(step.scope.secret).keys(rows.entries)
        foreign = same_keys(theirs.offsets, theirs.keys, rows.offsets, keys)
        foreign &= ~same_keys(theirs.offsets, theirs.keys, ours.offsets, ours.keys)
        theirs.keep(np.flatnonzero(~foreign))

    # What the receiver lacks.

    def _absent(self, rows: np.ndarray) -> None:
        rows = rows[~self._left_out[rows]]
        owners = self._step.absent.of(self._ours.offsets[rows])
        for number in np.unique(owners[owners != NONE]).tolist():
            covered = rows[owners == number]
            first, last = self._ours.bounds(covered)
            excuse = self._step.absent.all[number]
            self.found.absences.append(excuse.part(first, last, len(covered)))
        open_rows = rows[owners == NONE]
        self.found.absent, self.found.absent_keys = self._ours.offsets[open_rows], self._ours.keys[open_rows]
        self.found.absent_names = {each.offset: each for each in named(self._ours.rows, open_rows[:NAMED_MAX])}

    # What both have.

    def _given_back(self, left: np.ndarray, counts: np.ndarray) -> None:
        """Pass what a peer gave back to a restored sender: it was appended again and has a later time, and no more.

        It stands behind the restore, and the receiver's copy is from before it, both by the sender's clock. Nothing
        else may differ: with the sender's time in place of its own, the receiver's copy must have the same hash.
        """
        ours, theirs = self._ours, self._theirs
        single = np.flatnonzero(counts == 1)
        again = np.zeros(len(single), dtype=bool)
        for restore in self._step.restores:
            behind = ours.offsets[single] >= restore.first
            anew = ours.rows.times[single] >= restore.at_unix_ms
            again |= behind & anew & (theirs.rows.times[left[single]] < restore.at_unix_ms)
        rows = single[again]
        if not len(rows):
            return
        copies = theirs.rows.take(left[rows])
        hashes = EntryHash(self._step.scope.secret).of(copies.entries, copies.offsets, ours.rows.times[rows])
        same = rows[hashes == ours.hashes[rows]]
        theirs.hashes[left[same]] = ours.hashes[same]
        if len(same):
            detail = "they were appended again after the sender was restored"
            self.found.absences.append(Absence(GIVEN_BACK, SENDER, *ours.bounds(same), len(same), detail))

    def _odd(self, left: np.ndarray, counts: np.ndarray) -> None:
        """Look at each fact that is not there exactly once, unaltered at both ends."""
        ours, theirs = self._ours, self._theirs
        single = np.flatnonzero(counts == 1)
        at = left[single]
        differ = (ours.hashes[single] != theirs.hashes[at]) | ours.altered[single] | theirs.altered[at]
        odd = np.sort(np.concatenate([single[differ], np.flatnonzero(counts > 1)]))
        for row in odd[:NAMED_MAX].tolist():
            self._look_at(row, range(int(left[row]), int(left[row] + counts[row])))
        detail = "more facts of the range differ, which are not named"
        self._not_named(FindingKind.ALTERED, ours, odd[NAMED_MAX:], detail)

    def _look_at(self, row: int, theirs: range) -> None:
        chosen = max(theirs, key=lambda at: self._likeness(row, at))
        for at in theirs:
            if at != chosen:
                self._second(row, at)
        if self._ours.keys[row] != self._theirs.keys[chosen]:
            keys = int(self._ours.keys[row]), int(self._theirs.keys[chosen])
            fields = self._different(row, chosen, FIELDS, times=True)
            self.found.pairs.append(Pair(self._ours.name(row), self._theirs.name(chosen), *keys, fields))
        else:
            self._same_key(row, chosen)

    def _likeness(self, row: int, at: int) -> tuple[bool, bool, int]:
        ours, theirs = self._ours, self._theirs
        return bool(ours.hashes[row] == theirs.hashes[at]), bool(ours.keys[row] == theirs.keys[at]), -at

    def _second(self, row: int, at: int) -> None:
        """Judge a second entry of the receiver with the offset of one fact."""
        entry = self._theirs.name(at)
        if self._ours.keys[row] == self._theirs.keys[at]:
            detail = f"the receiver has the fact of offset {entry.offset} more than once"
            self.found.findings.append(AuditFinding.of(FindingKind.DUPLICATED, RECEIVER, entry, detail=detail))
        else:
            same_body = not self._different(row, at, ("digest",))
            self.found.strays.append(Stray(entry, int(self._theirs.keys[at]), same_body))

    def _same_key(self, row: int, at: int) -> None:
        entry = self._theirs.name(at)
        here, there = bool(self._ours.altered[row]), bool(self._theirs.altered[at])
        for side, altered in ((SENDER, here), (RECEIVER, there)):
            if altered:
                fields = self._different(row, at, BODY) or ("body",)
                self.found.findings.append(AuditFinding.of(FindingKind.BODY_ALTERED, side, entry, fields))
        if self._ours.hashes[row] != self._theirs.hashes[at]:
            names = tuple(name for name in FIELDS if not (here or there) or name not in BODY)
            fields = self._different(row, at, names, times=True)
            self.found.findings.append(AuditFinding.of(FindingKind.ALTERED, RECEIVER, entry, fields))

    def _different(self, row: int, at: int, names: tuple[str, ...], *, times: bool = False) -> tuple[str, ...]:
        """Name the fields in which two entries differ."""
        ours, theirs = self._ours.rows, self._theirs.rows
        fields = [
            name for name in names if ours.entries.column(name)[row].as_py() != theirs.entries.column(name)[at].as_py()
        ]
        if times and ours.times[row] != theirs.times[at]:
            fields.append("origin_appended_at_unix_ms")
        return tuple(fields)

    # What the receiver has beyond.

    def _strays(self) -> None:
        theirs, end = self._theirs, self._step.sender_end
        alone = np.flatnonzero(~np.isin(theirs.offsets, self._ours.offsets))
        self._ahead(alone[theirs.offsets[alone] >= end])
        inside = alone[theirs.offsets[alone] < end]
        owners = self._step.gaps.of(theirs.offsets[inside])
        self._repeated_alone(inside[owners != NONE])
        extra = inside[owners == NONE]
        keys = theirs.keys[extra[:NAMED_MAX]].tolist()
        self.found.strays += map(Stray, named(theirs.rows, extra[:NAMED_MAX]), keys)
        detail = "more entries that the sender does not have, which are not named"
        self._not_named(FindingKind.EXTRA, theirs, extra[NAMED_MAX:], detail)

    def _ahead(self, rows: np.ndarray) -> None:
        if len(rows):
            first = self._theirs.name(int(rows[0]))
            detail = f"the sender's log ends before {self._step.sender_end}"
            finding = AuditFinding.of(FindingKind.AHEAD, RECEIVER, first, detail=detail)
            last = self._theirs.bounds(rows)[1]
            self.found.findings.append(replace(finding, last=last, count=len(rows)))

    def _repeated_alone(self, rows: np.ndarray) -> None:
        """Report a second entry of an offset of which the sender has no copy any more."""
        again = rows[1:][np.diff(self._theirs.offsets[rows]) == 0]
        for entry in named(self._theirs.rows, again[:NAMED_MAX]):
            detail = f"the receiver has the offset {entry.offset} more than once"
            self.found.findings.append(AuditFinding.of(FindingKind.DUPLICATED, RECEIVER, entry, detail=detail))

    def _not_named(self, kind: FindingKind, side: _Side, rows: np.ndarray, detail: str) -> None:
        if len(rows):
            finding = AuditFinding(kind, RECEIVER, *side.bounds(rows), detail=detail, count=len(rows))
            self.found.findings.append(finding)
