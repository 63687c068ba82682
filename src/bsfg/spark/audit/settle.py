"""Every range of a stream: equal, excused as a whole, or compared, and a last look for what seems missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bsfg.journey.sums import RECEIVER, SENDER, AuditScope, EntryHash, Named
from bsfg.spark.audit import judging
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.compare import Comparing, Detail, Pair, Span, Stray
from bsfg.spark.audit.judging import OTHER_PATH, PUT_AGAIN, Excuses, of_gaps, told_gaps
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import End
from bsfg.spark.audit.verdict import Absence, AuditFinding, FindingKind, FoldedAbsence

RUN_MIN = 16
"""From how many neighbours on missing facts are named together."""


@dataclass(slots=True)
class Compared:
    """What came of all ranges: what the sums said of each, the details of those that differ, and the numbers."""

    states: dict[int, str] = field(default_factory=dict)
    details: list[Detail] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    compared: int = 0


def compare_ranges(case: Case, runner: Runner) -> Compared:
    """Compare all ranges, reading again only those that differ."""
    gaps = case.totals.gaps(SENDER)
    # Of what the sender lost before it was sent any record of the receiver is enough.
    told = [Absence.of_gap(gap, RECEIVER) for gap in told_gaps(case.scope, case.receiver) if gap.count is None]
    recorded = Excuses([*told, *(each for each in case.excuses.all if not isinstance(each, FoldedAbsence))])
    unrecorded = judging.by_range(judging.unrecorded(gaps, recorded, case.frontier), case.scope)
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
            found.absences.append(excuse.part(first, min(end, case.end) - 1, count))
    return chosen


def _comparing(case: Case, number: int, gaps: Excuses, unrecorded: Sequence[Span]) -> Comparing:
    bounds = case.scope.bounds(number)
    return Comparing(
        number,
        case.plan.sender,
        case.sender.log_id,
        case.plan.receiver,
        case.receiver.log_id,
        tuple(case.totals.spans.get(number, ())),
        case.scope,
        case.excuses.within(*bounds),
        gaps.within(*bounds),
        tuple(unrecorded),
        case.sender.end,
        case.sibling,
        tuple(case.sender.restores),
    )


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
        hasher, found = EntryHash(self.scope.secret), list[ReceiverPlace]()
        names = ("offset", "origin_zone", "origin_offset", "from_zone", "message_id")
        for frame in self.log.frames(self.first, self.end, self.log_id):
            if frame.entries is not None:
                keys = hasher.keys(frame.entries)
                at = np.minimum(np.searchsorted(self.wanted, keys), len(self.wanted) - 1)
                rows = np.flatnonzero(self.wanted[at] == keys)
                if len(rows):
                    part = frame.entries.take(rows)
                    found += map(ReceiverPlace, keys[rows].tolist(), *(part.values(name) for name in names))
        return found


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
    pairs = [pair.sender_key for pair in _pairs(details) if pair.sender_key not in strays]
    return np.unique(np.concatenate([repeated, *absent, np.array(pairs, dtype=np.uint64)]))


def settle(
    details: Sequence[Detail], places: Sequence[ReceiverPlace], repeated: np.ndarray, scope: AuditScope
) -> Settled:
    """Decide about all that is open, given where the receiver has the keys that were searched for.

    Strays whose keys are among the ``repeated`` are left to `duplicates`.
    """
    settling = _Settling(details, places, scope)
    settling.run(set(repeated.tolist()))
    return settling.done


class _Settling:
    """What is open, and what is decided of it."""

    def __init__(self, details: Sequence[Detail], places: Sequence[ReceiverPlace], scope: AuditScope) -> None:
        self._details, self._scope = details, scope
        self._strays, self._places = _strays_by_key(details), _by_key(places)
        self._used: set[int] = set()
        self._missing: list[tuple[int, Named | None]] = []
        self._elsewhere: list[tuple[int, str]] = []
        self.done = Settled()

    def run(self, repeated: set[int]) -> None:
        for detail in self._details:
            for offset, key in zip(detail.absent.tolist(), detail.absent_keys.tolist(), strict=True):
                if not self._accounted(offset, key):
                    self._missing.append((offset, detail.absent_names.get(offset)))
        for pair in _pairs(self._details):
            if not self._accounted(pair.sender.offset, pair.sender_key):
                self._lost_or_altered(pair)
        self.done.findings += missing_findings(sorted(self._missing, key=lambda each: each[0]))
        for key, strays in self._strays.items():
            if key not in repeated:
                left = [stray for stray in strays if stray.entry.place not in self._used]
                self.done.findings += map(_stray_finding, left)
        self.done.absences += _grouped(self._elsewhere, self._scope)

    def _accounted(self, offset: int, key: int) -> bool:
        """Find a fact of the sender elsewhere at the receiver."""
        for stray in self._strays.get(key, []):
            if stray.entry.place not in self._used:
                self._used.add(stray.entry.place)
                detail = f"the receiver has it under the offset {stray.entry.offset}"
                self._out_of_order(offset, stray.entry, detail, ("origin_offset",))
                return True
        for place in self._places.get(key, []):
            self._found_at(offset, place)
            return True
        return False

    def _found_at(self, offset: int, place: ReceiverPlace) -> None:
        entry = Named(place.place, offset, place.from_zone, place.message_id)
        if place.origin_zone != self._scope.zone:
            self._elsewhere.append((offset, OTHER_PATH))
        elif place.origin_offset is None or place.origin_offset < 0:
            self._elsewhere.append((offset, PUT_AGAIN))
        elif place.origin_offset == offset and self._scope.shared:
            self.done.compared += 1
        elif place.origin_offset == offset:
            self._out_of_order(offset, entry, "it stands far from its neighbours")
        else:
            detail = f"the sender has the same key at {place.origin_offset} and {offset}"
            self.done.findings.append(AuditFinding.of(FindingKind.DUPLICATED, SENDER, entry, detail=detail))

    def _out_of_order(self, offset: int, entry: Named, detail: str, fields: tuple[str, ...] = ()) -> None:
        entry = replace(entry, offset=offset)
        self.done.findings.append(AuditFinding.of(FindingKind.OUT_OF_ORDER, RECEIVER, entry, fields, detail))

    def _lost_or_altered(self, pair: Pair) -> None:
        """A fact that is nowhere: its place holds another fact of the sender, or it was altered beyond its key."""
        place = pair.receiver.place
        if place in self._used:
            self._missing.append((pair.sender.offset, pair.sender))
            return
        self._used.add(place)
        entry = replace(pair.sender, place=place)
        detail = f"the receiver has {pair.receiver.message_id!r} of {pair.receiver.from_zone!r} in its place"
        self.done.findings.append(AuditFinding.of(FindingKind.ALTERED, RECEIVER, entry, pair.fields, detail))


def missing_findings(missing: Sequence[tuple[int, Named | None]]) -> Iterator[AuditFinding]:
    """Name missing facts one by one, and long runs of neighbours together."""
    at = 0
    while at < len(missing):
        stop = at + 1
        while stop < len(missing) and missing[stop][0] == missing[stop - 1][0] + 1:
            stop += 1
        run = missing[at:stop]
        if len(run) >= RUN_MIN:
            finding, detail = _missing(run[0]), "the key is that of the first"
            yield replace(finding, last=run[-1][0], detail=detail, count=len(run))
        else:
            yield from map(_missing, run)
        at = stop


def _missing(each: tuple[int, Named | None]) -> AuditFinding:
    offset, entry = each
    key = entry.key if entry is not None else (None, None)
    return AuditFinding(FindingKind.MISSING, RECEIVER, offset, None, None, *key)


def _stray_finding(stray: Stray) -> AuditFinding:
    entry = stray.entry
    if not stray.same_body:
        return AuditFinding.of(FindingKind.EXTRA, RECEIVER, entry)
    detail = f"the body of offset {entry.offset} a second time, under another key"
    return AuditFinding.of(FindingKind.DUPLICATED, RECEIVER, entry, detail=detail)


def _strays_by_key(details: Sequence[Detail]) -> dict[int, list[Stray]]:
    """Give all entries of the receiver that are not where their key belongs."""
    found: dict[int, list[Stray]] = defaultdict(list)
    for stray in (stray for detail in details for stray in detail.strays):
        found[stray.key].append(stray)
    for pair in _pairs(details):
        found[pair.receiver_key].append(Stray(pair.receiver, pair.receiver_key))
    return found


def _by_key(places: Iterable[ReceiverPlace]) -> dict[int, list[ReceiverPlace]]:
    found: dict[int, list[ReceiverPlace]] = defaultdict(list)
    for place in places:
        found[place.key].append(place)
    return found


def _pairs(details: Sequence[Detail]) -> Iterator[Pair]:
    return (pair for detail in details for pair in detail.pairs)


def _grouped(elsewhere: list[tuple[int, str]], scope: AuditScope) -> Iterator[Absence]:
    """Give what came otherwise, one absence per reason and range."""
    words = {
        OTHER_PATH: "the receiver has them from another zone",
        PUT_AGAIN: "an operator put them again out of quarantine",
    }
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for offset, reason in elsewhere:
        groups[reason, offset // scope.range_facts].append(offset)
    for (reason, _), offsets in sorted(groups.items(), key=lambda group: group[1][0]):
        yield Absence(reason, RECEIVER, min(offsets), max(offsets), len(offsets), words[reason])


def duplicates(places: Iterable[ReceiverPlace], known: set[int | None], scope: AuditScope) -> Iterator[AuditFinding]:
    """Report keys that stand at two places of the receiver's log; ``known`` places are reported already."""
    for group in _by_key(places).values():
        first, *others = sorted(group, key=lambda place: place.place)
        for other in others:
            if first.place not in known and other.place not in known:
                yield _duplicate(first, other, scope)


def _duplicate(first: ReceiverPlace, other: ReceiverPlace, scope: AuditScope) -> AuditFinding:
    offset = other.origin_offset if other.origin_zone == scope.zone else None
    detail = f"the receiver has the same key at {first.place} and {other.place}"
    if other.origin_zone != first.origin_zone:
        detail += f", from {first.origin_zone} and {other.origin_zone}"
    key = other.from_zone, other.message_id
    return AuditFinding(FindingKind.DUPLICATED, RECEIVER, offset, None, other.place, *key, detail=detail)
