"""The last look: what seems missing, strange or doubled in its range is searched for in all of the receiver's log.

A fact that the link found there already came by another path and is no loss. One that stands under another offset is
out of order and not missing. Only what is nowhere is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bsfg.batch import EntryBatch
from bsfg.spark.audit.compare import Detail, Pair, Stray
from bsfg.spark.audit.ends import End
from bsfg.spark.audit.entryhash import EntryHash
from bsfg.spark.audit.excuses import OTHER_PATH, PUT_AGAIN
from bsfg.spark.audit.scope import RECEIVER, SENDER, Scope
from bsfg.spark.audit.sums import Named
from bsfg.spark.audit.verdict import Absence, Finding, Kind

RUN_MIN = 16
"""From how many neighbours on missing facts are named together."""


@dataclass(frozen=True, slots=True)
class Place:
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
    scope: Scope
    wanted: np.ndarray

    def __call__(self) -> list[Place]:
        """Do it, in whichever process this is."""
        hasher, found = EntryHash(self.scope.secret), []
        for frame in self.log.frames(self.first, self.end, self.log_id):
            if frame.entries is not None:
                found += self._places(frame.entries, hasher.keys(frame.entries))
        return found

    def _places(self, entries: EntryBatch, keys: np.ndarray) -> list[Place]:
        at = np.minimum(np.searchsorted(self.wanted, keys), len(self.wanted) - 1)
        rows = np.flatnonzero(self.wanted[at] == keys)
        if not len(rows):
            return []
        part = entries.take(rows)
        names = ("offset", "origin_zone", "origin_offset", "from_zone", "message_id")
        columns = zip(keys[rows].tolist(), *(part.values(name) for name in names), strict=True)
        return [Place(*row) for row in columns]


@dataclass(slots=True)
class Settled:
    """What became of everything that was open."""

    findings: list[Finding] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    compared: int = 0


def open_keys(details: Sequence[Detail], repeated: np.ndarray) -> np.ndarray:
    """Give the hashed keys that must be searched for in the receiver's whole log, sorted; ``repeated`` among them."""
    strays = _strays_by_key(details)
    known = np.array(sorted(strays), dtype=np.uint64)
    absent = [keys[~np.isin(keys, known)] for keys in (detail.absent_keys for detail in details)]
    pairs = [pair.sender_key for detail in details for pair in detail.pairs if pair.sender_key not in strays]
    return np.unique(np.concatenate([repeated, *absent, np.array(pairs, dtype=np.uint64)]))


def settle(details: Sequence[Detail], places: Sequence[Place], repeated: np.ndarray, scope: Scope) -> Settled:
    """Decide about all that is open, given where the receiver has the keys that were searched for.

    Strays whose keys are among the ``repeated`` are left to `duplicates`.
    """
    return _Settling(details, places, repeated, scope).run()


class _Settling:
    """What is open, and what is decided of it."""

    def __init__(self, details: Sequence[Detail], places: Sequence[Place], repeated: np.ndarray, scope: Scope) -> None:
        self._details, self._scope = details, scope
        self._strays = _strays_by_key(details)
        self._places: dict[int, list[Place]] = {}
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

    def _found_at(self, offset: int, place: Place) -> None:
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
                Finding(
                    Kind.DUPLICATED,
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
            Finding(Kind.OUT_OF_ORDER, RECEIVER, offset, None, entry.place, *key, fields=fields, detail=detail)
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
            Finding(
                Kind.ALTERED,
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


def missing_findings(missing: Sequence[tuple[int, Named | None]]) -> Iterator[Finding]:
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


def _missing(each: tuple[int, Named | None], last: int | None = None, count: int = 1) -> Finding:
    offset, entry = each
    key = (entry.from_zone, entry.message_id) if entry is not None else (None, None)
    detail = "the key is that of the first" if last is not None else ""
    return Finding(Kind.MISSING, RECEIVER, offset, last, None, *key, detail=detail, count=count)


def _stray_finding(stray: Stray) -> Finding:
    entry = stray.entry
    kind = Kind.DUPLICATED if stray.same_body else Kind.EXTRA
    detail = f"the body of offset {entry.offset} a second time, under another key" if stray.same_body else ""
    return Finding(kind, RECEIVER, entry.offset, None, entry.place, entry.from_zone, entry.message_id, detail=detail)


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


def _grouped(elsewhere: list[tuple[int, str]], scope: Scope) -> Iterator[Absence]:
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


def duplicates(places: Sequence[Place], known: set[int | None], scope: Scope) -> list[Finding]:
    """Report keys that stand at two places of the receiver's log; ``known`` places are reported already."""
    by_key: dict[int, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    found = []
    for group in by_key.values():
        first, *others = sorted(group, key=lambda place: place.place)
        for other in others:
            if first.place not in known and other.place not in known:
                found.append(_duplicate(first, other, scope))
    return found


def _duplicate(first: Place, other: Place, scope: Scope) -> Finding:
    offset = other.origin_offset if other.origin_zone == scope.zone else None
    detail = f"the receiver has the same key at {first.place} and {other.place}"
    if other.origin_zone != first.origin_zone:
        detail += f", from {first.origin_zone} and {other.origin_zone}"
    return Finding(
        Kind.DUPLICATED,
        RECEIVER,
        offset,
        None,
        other.place,
        other.from_zone,
        other.message_id,
        detail=detail,
    )
