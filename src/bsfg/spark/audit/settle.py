"""Every range of a stream: equal, excused as a whole, or compared, and a last look for what seems missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.batch import EntryBatch
from bsfg.ports import GapRecord
from bsfg.spark.audit import judging
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.compare import Detail, Known, Pair, Stray, compare
from bsfg.spark.audit.judging import OTHER_PATH, PUT_AGAIN, RECEIVER_TRUNCATED, Excuse, Excuses, for_gaps, of_gaps
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import RECEIVER, SENDER, AuditScope, End, LinkRows, received, sender_rows, sent
from bsfg.spark.audit.sums import EntryHash, Named
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparing:
    """Reads a range that differs at both ends and compares it entry by entry."""

    number: int
    sender: End
    sender_log: str
    receiver: End
    receiver_log: str
    spans: tuple[Span, ...]
    scope: AuditScope
    known: Known

    def __call__(self) -> Detail:
        """Do it, in whichever process this is."""
        first, end = self.scope.bounds(self.number)
        ours, left_out, gaps = [], [np.empty(0, dtype=bool)], list[GapRecord]()
        # A sender that was restored may end before what the receiver has of it.
        last = min(end, self.known.end)
        for frame in self.sender.frames(first, last, self.sender_log) if first < last else ():
            if frame.entries is not None:
                rows = sender_rows(frame.entries)
                ours.append(rows)
                left_out.append(~np.isin(rows.offsets, sent(frame.entries, self.scope)[0].offsets))
            elif frame.gap is not None:
                gaps.append(replace(frame.gap, first=frame.first, last=frame.last))
        theirs, let_go = self._received(first, end)
        known = self._known_now(first, end, gaps, let_go)
        return compare(self.number, LinkRows.concat(ours), np.concatenate(left_out), theirs, self.scope, known)

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
        return LinkRows.concat(parts), judging.let_go_before(gaps) > 0

    def _known_now(self, first: int, end: int, gaps: Sequence[GapRecord], let_go: bool) -> Known:
        """Add to what is known what has changed since the first pass: both ends may let go what is being read."""
        known = replace(self.known, gaps=Excuses([*self.known.gaps.all, *of_gaps(gaps).all]))
        if not let_go:
            return known
        excuse = Excuse(first, end - 1, RECEIVER_TRUNCATED, RECEIVER, "let go while it was read")
        return replace(known, absent=Excuses([*known.absent.all, excuse]))


@dataclass(slots=True)
class Compared:
    """What came of all ranges: what the sums said of each, the details of those that differ, and the numbers."""

    states: dict[int, str] = field(default_factory=dict)
    details: list[Detail] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    compared: int = 0


def compare_ranges(case: Case, runner: Runner) -> Compared:
    """Compare all ranges, reading again only those that differ."""
    gaps = judging.own_gaps(case.totals.side(SENDER))
    unrecorded = _unrecorded(case, gaps)
    altered = {entry.offset // case.scope.range_facts for stretch in case.totals.stretches for entry in stretch.altered}
    found = Compared()
    chosen = sorted(_judged(case, found, unrecorded.keys() | altered))
    excuses = of_gaps(gaps)
    steps = [_comparing(case, number, excuses, unrecorded.get(number, ())) for number in chosen]
    found.details = runner.each(f"{case.plan.stream}: comparing what differs", steps)
    for detail in found.details:
        found.compared += detail.compared
        found.absences += detail.absences
    found.absences += judging.gap_absences(gaps, case.totals.side(SENDER))
    return found


def _unrecorded(case: Case, gaps: Sequence[GapRecord]) -> dict[int, list[Span]]:
    if not case.receiver.knows_gaps:
        return {}
    recorded = for_gaps(case.scope, case.receiver, case.excuses)
    return judging.by_range(judging.unrecorded(gaps, recorded, case.frontier), case.scope)


def _judged(case: Case, found: Compared, suspect: set[int]) -> set[int]:
    """Take note of what the sums say of every range, and give those that must be read again."""
    chosen = set(suspect)
    for number in sorted({*case.totals.sender, *case.totals.receiver}):
        state, excuse = judging.state_of(number, case.totals, case.scope, case.sender, case.excuses)
        found.states[number] = state if excuse is None else excuse.reason
        if state == judging.DIFFERS:
            chosen.add(number)
        elif number in suspect:
            continue
        elif state == judging.EQUAL:
            found.compared += case.totals.sender[number].count
        elif excuse is not None:
            first, end = case.scope.bounds(number)
            count = case.totals.sender[number].count
            found.absences.append(excuse.absence(first, min(end, case.end) - 1, count))
    return chosen


def _comparing(case: Case, number: int, gaps: Excuses, unrecorded: Sequence[Span]) -> Comparing:
    first, end = case.scope.bounds(number)
    excuses = case.excuses.within(first, end), gaps.within(first, end)
    known = Known(*excuses, tuple(unrecorded), case.sender.end, case.sibling, tuple(case.sender.restores))
    return Comparing(
        number,
        case.plan.sender,
        case.sender.log_id,
        case.plan.receiver,
        case.receiver.log_id,
        tuple(case.totals.spans.get(number, ())),
        case.scope,
        known,
    )


RUN_MIN = 16
"""From how many neighbours on missing facts are named together."""


@dataclass(frozen=True, slots=True)
class ReceiverPlace:
    """Where the receiver has a key: the place in its log, and where that entry came from."""

    key: int
    place: int
    origin_zone: str | None
    origin_offset: int | None
    from_zone: str | None
    message_id: str | None


@dataclass(frozen=True, slots=True)
class Searching:
    """Reads one stretch of the receiver's log for some hashed keys, which are sorted."""

    log: End
    log_id: str
    first: int
    end: int
    scope: AuditScope
    wanted: np.ndarray

    def __call__(self) -> list[ReceiverPlace]:
        """Do it, in whichever process this is."""
        hasher, found = EntryHash(self.scope.secret), []
        for frame in self.log.frames(self.first, self.end, self.log_id):
            if frame.entries is not None:
                found += self._places(frame.entries, hasher.keys(frame.entries))
        return found

    def _places(self, entries: EntryBatch, keys: np.ndarray) -> list[ReceiverPlace]:
        at = np.minimum(np.searchsorted(self.wanted, keys), len(self.wanted) - 1)
        rows = np.flatnonzero(self.wanted[at] == keys)
        if not len(rows):
            return []
        part = entries.take(rows)
        names = ("offset", "origin_zone", "origin_offset", "from_zone", "message_id")
        columns = zip(keys[rows].tolist(), *(part.values(name) for name in names), strict=True)
        return [ReceiverPlace(*row) for row in columns]


@dataclass(slots=True)
class Settled:
    """What became of everything that was open."""

    findings: list[AuditFinding] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    compared: int = 0


def open_keys(details: Sequence[Detail], repeated: np.ndarray) -> np.ndarray:
    """Give the hashed keys that must be searched for in the receiver's whole log, sorted; ``repeated`` among them."""
    strays = _strays_by_key(details)
    known = np.array(sorted(strays), dtype=np.uint64)
    absent = [keys[~np.isin(keys, known)] for keys in (detail.absent_keys for detail in details)]
    pairs = [pair.sender_key for detail in details for pair in detail.pairs if pair.sender_key not in strays]
    return np.unique(np.concatenate([repeated, *absent, np.array(pairs, dtype=np.uint64)]))


def settle(
    details: Sequence[Detail], places: Sequence[ReceiverPlace], repeated: np.ndarray, scope: AuditScope
) -> Settled:
    """Decide about all that is open, given where the receiver has the keys that were searched for.

    Strays whose keys are among the ``repeated`` are left to `duplicates`.
    """
    return _Settling(details, places, repeated, scope).run()


class _Settling:
    """What is open, and what is decided of it."""

    def __init__(
        self, details: Sequence[Detail], places: Sequence[ReceiverPlace], repeated: np.ndarray, scope: AuditScope
    ) -> None:
        self._details, self._scope = details, scope
        self._strays = _strays_by_key(details)
        self._places: dict[int, list[ReceiverPlace]] = {}
        for place in places:
            self._places.setdefault(place.key, []).append(place)
        self._repeated: set[int] = set(repeated.tolist())
        self._used: set[int] = set()
        self._elsewhere: list[tuple[int, str]] = []
        self._done = Settled()

    def run(self) -> Settled:
        missing: list[tuple[int, Named | None]] = []
        for detail in self._details:
            for offset, key in zip(detail.absent.tolist(), detail.absent_keys.tolist(), strict=True):
                if not self._accounted(offset, key, detail.absent_names.get(offset)):
                    missing.append((offset, detail.absent_names.get(offset)))
        for pair in _pairs(self._details):
            if not self._accounted(pair.sender.offset, pair.sender_key, pair.sender):
                self._lost_or_altered(pair, missing)
        self._done.findings += missing_findings(sorted(missing, key=lambda each: each[0]))
        self._remaining_strays()
        self._done.absences += _grouped(self._elsewhere, self._scope)
        return self._done

    def _accounted(self, offset: int, key: int, entry: Named | None) -> bool:
        """Find a fact of the sender elsewhere at the receiver."""
        for stray in self._strays.get(key, []):
            if stray.entry.place not in self._used:
                self._used.add(stray.entry.place)
                detail = f"the receiver has it under the offset {stray.entry.offset}"
                self._out_of_order(offset, stray.entry, detail)
                return True
        for place in self._places.get(key, []):
            self._found_at(offset, place)
            return True
        return False

    def _found_at(self, offset: int, place: ReceiverPlace) -> None:
        if place.origin_zone != self._scope.zone:
            self._elsewhere.append((offset, OTHER_PATH))
        elif place.origin_offset is None or place.origin_offset < 0:
            self._elsewhere.append((offset, PUT_AGAIN))
        elif place.origin_offset == offset and self._scope.shared:
            self._done.compared += 1
        elif place.origin_offset == offset:
            entry = Named(place.place, offset, place.from_zone, place.message_id)
            self._out_of_order(offset, entry, "it stands far from its neighbours", ())
        else:
            detail = f"the sender has the same key at {place.origin_offset} and {offset}"
            self._done.findings.append(
                AuditFinding(
                    FindingKind.DUPLICATED,
                    SENDER,
                    offset,
                    None,
                    place.place,
                    place.from_zone,
                    place.message_id,
                    detail=detail,
                )
            )

    def _out_of_order(
        self, offset: int, entry: Named, detail: str, fields: tuple[str, ...] = ("origin_offset",)
    ) -> None:
        key = entry.from_zone, entry.message_id
        self._done.findings.append(
            AuditFinding(
                FindingKind.OUT_OF_ORDER, RECEIVER, offset, None, entry.place, *key, fields=fields, detail=detail
            )
        )

    def _lost_or_altered(self, pair: Pair, missing: list[tuple[int, Named | None]]) -> None:
        """A fact that is nowhere: its place holds another fact of the sender, or it was altered beyond its key."""
        entry, place = pair.sender, pair.receiver.place
        if place in self._used:
            missing.append((entry.offset, entry))
            return
        self._used.add(place)
        detail = f"the receiver has {pair.receiver.message_id!r} of {pair.receiver.from_zone!r} in its place"
        self._done.findings.append(
            AuditFinding(
                FindingKind.ALTERED,
                RECEIVER,
                entry.offset,
                None,
                place,
                entry.from_zone,
                entry.message_id,
                fields=pair.fields,
                detail=detail,
            )
        )

    def _remaining_strays(self) -> None:
        for key, strays in self._strays.items():
            if key not in self._repeated:
                left = [stray for stray in strays if stray.entry.place not in self._used]
                self._done.findings += map(_stray_finding, left)


def missing_findings(missing: Sequence[tuple[int, Named | None]]) -> Iterator[AuditFinding]:
    """Name missing facts one by one, and long runs of neighbours together."""
    at = 0
    while at < len(missing):
        stop = at + 1
        while stop < len(missing) and missing[stop][0] == missing[stop - 1][0] + 1:
            stop += 1
        run = missing[at:stop]
        if len(run) >= RUN_MIN:
            yield _missing(run[0], run[-1][0], len(run))
        else:
            yield from (_missing(each) for each in run)
        at = stop


def _missing(each: tuple[int, Named | None], last: int | None = None, count: int = 1) -> AuditFinding:
    offset, entry = each
    key = (entry.from_zone, entry.message_id) if entry is not None else (None, None)
    detail = "the key is that of the first" if last is not None else ""
    return AuditFinding(FindingKind.MISSING, RECEIVER, offset, last, None, *key, detail=detail, count=count)


def _stray_finding(stray: Stray) -> AuditFinding:
    entry = stray.entry
    kind = FindingKind.DUPLICATED if stray.same_body else FindingKind.EXTRA
    detail = f"the body of offset {entry.offset} a second time, under another key" if stray.same_body else ""
    return AuditFinding(
        kind, RECEIVER, entry.offset, None, entry.place, entry.from_zone, entry.message_id, detail=detail
    )


def _strays_by_key(details: Sequence[Detail]) -> dict[int, list[Stray]]:
    """Give all entries of the receiver that are not where their key belongs."""
    found: dict[int, list[Stray]] = {}
    for detail in details:
        for stray in detail.strays:
            found.setdefault(stray.key, []).append(stray)
    for pair in _pairs(details):
        found.setdefault(pair.receiver_key, []).append(Stray(pair.receiver, pair.receiver_key))
    return found


def _pairs(details: Sequence[Detail]) -> Iterator[Pair]:
    for detail in details:
        yield from detail.pairs


def _grouped(elsewhere: list[tuple[int, str]], scope: AuditScope) -> Iterator[Absence]:
    """Give what came otherwise, one absence per reason and range."""
    words = {
        OTHER_PATH: "the receiver has them from another zone",
        PUT_AGAIN: "an operator put them again out of quarantine",
    }
    groups: dict[tuple[str, int], list[int]] = {}
    for offset, reason in elsewhere:
        groups.setdefault((reason, offset // scope.range_facts), []).append(offset)
    for (reason, _), offsets in sorted(groups.items(), key=lambda group: group[1][0]):
        yield Absence(reason, RECEIVER, min(offsets), max(offsets), len(offsets), words[reason])


def duplicates(places: Sequence[ReceiverPlace], known: set[int | None], scope: AuditScope) -> list[AuditFinding]:
    """Report keys that stand at two places of the receiver's log; ``known`` places are reported already."""
    by_key: dict[int, list[ReceiverPlace]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    found = []
    for group in by_key.values():
        first, *others = sorted(group, key=lambda place: place.place)
        for other in others:
            if first.place not in known and other.place not in known:
                found.append(_duplicate(first, other, scope))
    return found


def _duplicate(first: ReceiverPlace, other: ReceiverPlace, scope: AuditScope) -> AuditFinding:
    offset = other.origin_offset if other.origin_zone == scope.zone else None
    detail = f"the receiver has the same key at {first.place} and {other.place}"
    if other.origin_zone != first.origin_zone:
        detail += f", from {first.origin_zone} and {other.origin_zone}"
    return AuditFinding(
        FindingKind.DUPLICATED,
        RECEIVER,
        offset,
        None,
        other.place,
        other.from_zone,
        other.message_id,
        detail=detail,
    )
