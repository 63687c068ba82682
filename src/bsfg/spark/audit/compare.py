"""The second pass: a range that differs, entry by entry.

What only this range can tell is decided here. What may be found elsewhere in the receiver's log (a fact that seems
missing may have come by another path, or stand in the wrong place) is handed on to `bsfg.spark.audit.settle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bsfg.batch import FACT_SCHEMA
from bsfg.digest import Restore
from bsfg.sealing import digest_mismatches
from bsfg.spark.audit.judging import GIVEN_BACK, NONE, Excuses
from bsfg.spark.audit.scope import RECEIVER, SENDER, AuditScope, LinkRows
from bsfg.spark.audit.sums import NAMED_MAX, EntryHash, Named, Sibling, named, same_keys
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind

BODY = ("subject", "predicate", "object", "artifact_digest")
FIELDS = tuple(FACT_SCHEMA.names)


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

    number: int
    compared: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    absent: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    absent_keys: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    absent_names: dict[int, Named] = field(default_factory=dict)
    absences: list[Absence] = field(default_factory=list)
    kept_by_receiver: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a range beside its entries.

    ``absent`` excuses what the receiver lacks, ``gaps`` are the sender's own, and ``unrecorded`` those parts of them
    for which the receiver has no record. ``end`` is where the sender's log ends. ``sibling`` is the sender's other
    buffer, when another link pulls it. ``restores`` are those of the sender's log.
    """

    absent: Excuses
    gaps: Excuses
    unrecorded: tuple[tuple[int, int], ...] = ()
    end: int = 0
    sibling: Sibling | None = None
    restores: tuple[Restore, ...] = ()


def compare(
    number: int, sender: LinkRows, left_out: np.ndarray, receiver: LinkRows, scope: AuditScope, known: Known
) -> Detail:
    """Compare a range entry by entry; ``left_out`` marks rows of the sender that it does not send."""
    return _Comparison(number, sender, left_out, receiver, scope, known).run()


class _Comparison:
    """One range while it is compared."""

    def __init__(
        self, number: int, sender: LinkRows, left_out: np.ndarray, receiver: LinkRows, scope: AuditScope, known: Known
    ) -> None:
        self._scope, self._known, self._left_out = scope, known, left_out
        order = np.lexsort((receiver.places, receiver.offsets))
        self._sender, self._receiver = sender, receiver.take(order)
        hasher = EntryHash(scope.secret)
        self._hashes = [hasher.of(rows.entries, rows.offsets, rows.times) for rows in (self._sender, self._receiver)]
        self._keys = [hasher.keys(rows.entries) for rows in (self._sender, self._receiver)]
        self._altered = [_altered(rows, scope) for rows in (self._sender, self._receiver)]
        self.found = Detail(number)

    def run(self) -> Detail:
        offsets = self._sender.offsets
        self._drop_other_link(offsets)
        left = np.searchsorted(self._receiver.offsets, offsets, side="left")
        counts = np.searchsorted(self._receiver.offsets, offsets, side="right") - left
        self._absent(np.flatnonzero(counts == 0))
        self.found.compared = int(np.count_nonzero(counts))
        self._given_back(left, counts)
        self._odd(left, counts)
        self._strays()
        self._unrecorded()
        return self.found

    def _drop_other_link(self, offsets: np.ndarray) -> None:
        """Leave out what another link brought from the sender's other buffer: it has our offsets by chance."""
        sibling = self._known.sibling
        if sibling is None:
            return
        rows, mine = sibling.rows(*self._scope.bounds(self.found.number)), self._receiver.offsets
        keys = EntryHash(self._scope.secret).keys(rows.entries)
        foreign = same_keys(mine, self._keys[1], rows.offsets, keys)
        foreign &= ~same_keys(mine, self._keys[1], offsets, self._keys[0])
        kept = np.flatnonzero(~foreign)
        self._receiver = self._receiver.take(kept)
        self._hashes[1], self._keys[1] = self._hashes[1][kept], self._keys[1][kept]
        self._altered[1] = self._altered[1][kept]

    # What the receiver lacks.

    def _absent(self, rows: np.ndarray) -> None:
        rows = rows[~self._left_out[rows]]
        owners = self._known.absent.of(self._sender.offsets[rows])
        for number in np.unique(owners[owners != NONE]).tolist():
            covered = self._sender.offsets[rows[owners == number]]
            excuse = self._known.absent.all[number]
            absence = excuse.absence(int(covered[0]), int(covered[-1]), len(covered))
            self.found.absences.append(absence)
        open_rows = rows[owners == NONE]
        self.found.absent = self._sender.offsets[open_rows]
        self.found.absent_keys = self._keys[0][open_rows]
        self.found.absent_names = {each.offset: each for each in named(self._sender, open_rows[:NAMED_MAX])}

    # What both have.

    def _given_back(self, left: np.ndarray, counts: np.ndarray) -> None:
        """Pass what a peer gave back to a restored sender: it was appended again and has a later time, and no more.

        It stands behind the restore, and the receiver's copy is from before it, both by the sender's clock. Nothing
        else may differ: with the sender's time in place of its own, the receiver's copy must have the same hash.
        """
        single = np.flatnonzero(counts == 1)
        again = np.zeros(len(single), dtype=bool)
        for restore in self._known.restores:
            behind = self._sender.offsets[single] >= restore.first
            anew = self._sender.times[single] >= restore.at_unix_ms
            again |= behind & anew & (self._receiver.times[left[single]] < restore.at_unix_ms)
        rows = single[again]
        if not len(rows):
            return
        copies = self._receiver.take(left[rows])
        hashes = EntryHash(self._scope.secret).of(copies.entries, copies.offsets, self._sender.times[rows])
        same = rows[hashes == self._hashes[0][rows]]
        self._hashes[1][left[same]] = self._hashes[0][same]
        if len(same):
            first, last = int(self._sender.offsets[same[0]]), int(self._sender.offsets[same[-1]])
            detail = "they were appended again after the sender was restored"
            self.found.absences.append(Absence(GIVEN_BACK, SENDER, first, last, len(same), detail))

    def _odd(self, left: np.ndarray, counts: np.ndarray) -> None:
        """Look at each fact that is not there exactly once, unaltered at both ends."""
        single = np.flatnonzero(counts == 1)
        theirs = left[single]
        differ = (self._hashes[0][single] != self._hashes[1][theirs]) | self._altered[0][single]
        differ |= self._altered[1][theirs]
        odd = np.sort(np.concatenate([single[differ], np.flatnonzero(counts > 1)]))
        for row in odd[:NAMED_MAX].tolist():
            self._look_at(row, range(int(left[row]), int(left[row] + counts[row])))
        rest = odd[NAMED_MAX:]
        if len(rest):
            first, last = int(self._sender.offsets[rest[0]]), int(self._sender.offsets[rest[-1]])
            detail = "more facts of the range differ, which are not named"
            self.found.findings.append(
                AuditFinding(FindingKind.ALTERED, RECEIVER, first, last, detail=detail, count=len(rest))
            )

    def _look_at(self, row: int, theirs: range) -> None:
        chosen = max(theirs, key=lambda at: self._likeness(row, at))
        for at in theirs:
            if at != chosen:
                self._second(row, at)
        if self._keys[0][row] != self._keys[1][chosen]:
            self._pair(row, chosen)
        else:
            self._same_key(row, chosen)

    def _likeness(self, row: int, at: int) -> tuple[bool, bool, int]:
        hashes, keys = self._hashes, self._keys
        return bool(hashes[0][row] == hashes[1][at]), bool(keys[0][row] == keys[1][at]), -at

    def _second(self, row: int, at: int) -> None:
        """Judge a second entry of the receiver with the offset of one fact."""
        entry = self._name(self._receiver, at)
        if self._keys[0][row] == self._keys[1][at]:
            detail = f"the receiver has the fact of offset {entry.offset} more than once"
            self.found.findings.append(_finding(FindingKind.DUPLICATED, RECEIVER, entry, detail=detail))
            return
        digests = [rows.entries.column("digest")[n].as_py() for rows, n in self._sides(row, at)]
        self.found.strays.append(Stray(entry, int(self._keys[1][at]), digests[0] == digests[1]))

    def _pair(self, row: int, at: int) -> None:
        self.found.pairs.append(
            Pair(
                self._name(self._sender, row),
                self._name(self._receiver, at),
                int(self._keys[0][row]),
                int(self._keys[1][at]),
                self._different(row, at, FIELDS),
            )
        )

    def _same_key(self, row: int, at: int) -> None:
        entry = self._name(self._receiver, at)
        here, there = bool(self._altered[0][row]), bool(self._altered[1][at])
        for side, altered in ((SENDER, here), (RECEIVER, there)):
            if altered:
                fields = self._different(row, at, BODY) or ("body",)
                self.found.findings.append(_finding(FindingKind.BODY_ALTERED, side, entry, fields))
        if self._hashes[0][row] != self._hashes[1][at]:
            ignored = BODY if here or there else ()
            fields = self._different(row, at, tuple(name for name in FIELDS if name not in ignored))
            self.found.findings.append(_finding(FindingKind.ALTERED, RECEIVER, entry, fields))

    def _different(self, row: int, at: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """Name the fields in which two entries differ."""
        fields = []
        for name in names:
            values = [rows.entries.column(name)[number].as_py() for rows, number in self._sides(row, at)]
            if values[0] != values[1]:
                fields.append(name)
        if names is not BODY and self._sender.times[row] != self._receiver.times[at]:
            fields.append("origin_appended_at_unix_ms")
        return tuple(fields)

    def _sides(self, row: int, at: int) -> tuple[tuple[LinkRows, int], tuple[LinkRows, int]]:
        return (self._sender, row), (self._receiver, at)

    # What the receiver has beyond.

    def _strays(self) -> None:
        alone = np.flatnonzero(~np.isin(self._receiver.offsets, self._sender.offsets))
        offsets = self._receiver.offsets[alone]
        beyond = alone[offsets >= self._known.end]
        self._ahead(beyond)
        inside = alone[offsets < self._known.end]
        owners = self._known.gaps.of(self._receiver.offsets[inside])
        for number in np.unique(owners[owners != NONE]).tolist():
            reason = self._known.gaps.all[number].reason
            count = int(np.count_nonzero(owners == number))
            self.found.kept_by_receiver[reason] = self.found.kept_by_receiver.get(reason, 0) + count
        self._repeated_alone(inside[owners != NONE])
        self._extra(inside[owners == NONE])

    def _extra(self, rows: np.ndarray) -> None:
        chosen, rest = rows[:NAMED_MAX], rows[NAMED_MAX:]
        keys = self._keys[1][chosen].tolist()
        self.found.strays += [Stray(entry, key) for entry, key in zip(named(self._receiver, chosen), keys, strict=True)]
        if len(rest):
            bounds = int(self._receiver.offsets[rest[0]]), int(self._receiver.offsets[rest[-1]])
            detail = "more entries that the sender does not have, which are not named"
            self.found.findings.append(
                AuditFinding(FindingKind.EXTRA, RECEIVER, *bounds, detail=detail, count=len(rest))
            )

    def _ahead(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        first, last = int(self._receiver.offsets[rows[0]]), int(self._receiver.offsets[rows[-1]])
        entry = self._name(self._receiver, int(rows[0]))
        detail = f"the sender's log ends before {self._known.end}"
        self.found.findings.append(
            AuditFinding(
                FindingKind.AHEAD,
                RECEIVER,
                first,
                last,
                entry.place,
                entry.from_zone,
                entry.message_id,
                (),
                detail,
                len(rows),
            )
        )

    def _repeated_alone(self, rows: np.ndarray) -> None:
        """Report a second entry of an offset of which the sender has no copy any more."""
        again = rows[1:][np.diff(self._receiver.offsets[rows]) == 0]
        for entry in named(self._receiver, again[:NAMED_MAX]):
            detail = f"the receiver has the offset {entry.offset} more than once"
            self.found.findings.append(_finding(FindingKind.DUPLICATED, RECEIVER, entry, detail=detail))

    def _unrecorded(self) -> None:
        """Report what the sender lost and the receiver neither has nor knows to be lost."""
        for first, last in self._known.unrecorded:
            missing = np.setdiff1d(np.arange(first, last + 1), self._receiver.offsets)
            if len(missing):
                bounds = int(missing[0]), int(missing[-1])
                self.found.findings.append(
                    AuditFinding(FindingKind.GAP_UNRECORDED, RECEIVER, *bounds, count=len(missing))
                )

    def _name(self, rows: LinkRows, row: int) -> Named:
        return named(rows, np.array([row]))[0]


def _finding(
    kind: FindingKind, side: str, entry: Named, fields: tuple[str, ...] = (), detail: str = ""
) -> AuditFinding:
    """Name a finding by the receiver's entry."""
    return AuditFinding(
        kind, side, entry.offset, None, entry.place, entry.from_zone, entry.message_id, fields=fields, detail=detail
    )


def _altered(rows: LinkRows, scope: AuditScope) -> np.ndarray:
    """Mark the rows whose body is not what the digest was made of."""
    result = np.zeros(len(rows), dtype=bool)
    if scope.deep and len(rows):
        result[digest_mismatches(rows.entries)] = True
    return result
