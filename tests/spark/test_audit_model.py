"""The comparison of an audit against a model that looks at every pair of entries, over random harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.audit_worlds import audited

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import ENTRY_SCHEMA
from bsfg.digest import KeptRange
from bsfg.errors import BsfgError
from bsfg.journey.sums import EntryHash, lanes
from bsfg.ports import Checkpoint, ConsumerSpec, ConsumerState, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.sealing import seal
from bsfg.spark.audit import AuditedStream, StreamVerdict, removed_ranges
from bsfg.spark.audit.judging import Excuses
from bsfg.spark.audit.runner import repeated
from bsfg.spark.audit.scope import Evidence
from bsfg.spark.audit.verdict import Absence, FindingKind

RANGE_FACTS = 8
ZONE, OTHER = "plant", "idmz"
HARMS = ("remove", "cut", "copy", "twin", "swap", "offsets", "move", "field", "key", "body", "sealed", "zone")
ENVELOPE = ("message_id", "from_zone", "to_zone", "labels", "digest", "time")


@dataclass(frozen=True)
class Row:
    """One entry of the model."""

    message_id: str
    offset: int
    from_zone: str = ZONE
    to_zone: str = "enterprise"
    labels: str | None = None
    subject: str = "s:1"
    digest: bytes = b""
    time: int = 0
    origin: str = ZONE

    @property
    def key(self) -> tuple[str, str]:
        """Its idempotency key."""
        return self.from_zone, self.message_id

    @property
    def altered(self) -> bool:
        """Whether the digest is not that of the body."""
        return self.digest != digest_of(self.subject)

    def same(self, other: Row) -> bool:
        """Tell whether everything that is compared is the same."""
        return all(getattr(self, name) == getattr(other, name) for name in ENVELOPE)


_digests: dict[str, bytes] = {}


def digest_of(subject: str) -> bytes:
    """Give the digest of a fact with a subject."""
    if subject not in _digests:
        row = {"from_zone": ZONE, "to_zone": "e", "produced_at_unix_ms": 0, "message_id": "m", "subject": subject}
        row |= {"predicate": "p", "object": b"1", "object_media_type": "application/json"}
        _digests[subject] = seal(FactBatch(pa.RecordBatch.from_pylist([row], FactBatch.schema))).digests()[0]
    return _digests[subject]


def entries(rows: Sequence[Row], places: Sequence[int]) -> EntryBatch:
    """Lay rows out as entries of a forward buffer; a sender's have the same offsets as places."""
    found = [
        {
            **{name: getattr(row, name) for name in ("message_id", "from_zone", "to_zone", "labels", "subject")},
            "produced_at_unix_ms": 7,
            "object_media_type": "application/json",
            "predicate": "p",
            "object": b"1",
            "digest": row.digest,
            "offset": place,
            "appended_at_unix_ms": row.time,
            "origin_zone": row.origin,
            "origin_offset": row.offset,
            "origin_appended_at_unix_ms": row.time,
        }
        for row, place in zip(rows, places, strict=True)
    ]
    return EntryBatch(pa.RecordBatch.from_pylist(found, ENTRY_SCHEMA), sealed=True)


@dataclass(frozen=True)
class MemoryEnd:
    """An end that holds rows, or gaps with their reasons, by their places."""

    rows: Sequence[Row | GapReason]
    told: Evidence
    name: str = "memory"

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Tell what there is."""
        return replace(self.told, end=len(self.rows))

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give three rows at a time, and gaps one by one."""
        at = first
        while at < min(end, len(self.rows)):
            row, stop = self.rows[at], at + 1
            if isinstance(row, GapReason):
                yield Frame(at, at, gap=GapRecord(at, at, row, 1))
            else:
                while stop < min(end, len(self.rows), at + 3) and isinstance(self.rows[stop], Row):
                    stop += 1
                part = [each for each in self.rows[at:stop] if isinstance(each, Row)]
                yield Frame(at, stop - 1, entries(part, range(at, stop)))
            at = stop

    def summed(self, *asked: object) -> None:
        """Nobody would do it."""

    def kept_keys(self, first: int, last: int) -> None:
        """Nothing is kept."""


@dataclass
class World:
    """Both ends, what the receiver has on record, and how far it has confirmed."""

    sender: list[Row | GapReason]
    receiver: list[Row]
    records: list[GapRecord]
    committed: int

    def plan(self) -> AuditedStream:
        """Plan its audit."""
        spec = ConsumerSpec("enterprise.operational", "operational")
        cursor = ConsumerState(spec, Checkpoint(self.committed + 1, self.committed), (), "s", 0)
        gaps = [GapRecord(0, len(self.sender), GapReason.QUARANTINED, 1)]
        sender = MemoryEnd(self.sender, Evidence("s", 0, 0, gaps=gaps, cursor=cursor))
        receiver = MemoryEnd(self.receiver, Evidence("r", 0, 0, gaps=self.records))
        return AuditedStream(
            "operational",
            sender,
            receiver,
            ZONE,
            "enterprise",
            frozenset({"enterprise"}),
            range_facts=RANGE_FACTS,
        )


@dataclass
class Model:
    """The same judgement, one entry after the other."""

    world: World
    findings: list[tuple[FindingKind, int | None, int | None]] = field(default_factory=list)
    absent: Counter[str] = field(default_factory=Counter)
    compared: int = 0

    def judge(self) -> None:
        """Find everything."""
        mine = [(place, row) for place, row in enumerate(self.world.receiver) if row.origin == ZONE and row.offset >= 0]
        lacking: list[tuple[int, Row]] = []
        pairs: list[tuple[int, Row, int, Row]] = []
        seconds: list[tuple[int, Row, bool]] = []
        for offset, row in enumerate(self.world.sender):
            if isinstance(row, Row):
                theirs = [each for each in mine if each[1].offset == offset]
                if theirs:
                    self._both(offset, row, theirs, pairs, seconds)
                else:
                    self._lacks(offset, row, lacking)
        self._alone(mine)
        self._settle(lacking, pairs, [*seconds, *((place, row, False) for _, _, place, row in pairs)])
        self._order(mine)
        self._bodies(mine)

    def _add(self, kind: FindingKind, offset: int | None, place: int | None = None) -> None:
        self.findings.append((kind, offset, place))

    def _reason(self, offset: int) -> str | None:
        for wanted in (True, False):
            for gap in self.world.records:
                if (gap.reason == GapReason.QUARANTINED) == wanted and gap.first <= offset <= gap.last:
                    return str(gap.reason)
        return "in_flight" if offset > self.world.committed else None

    def _lacks(self, offset: int, row: Row, lacking: list[tuple[int, Row]]) -> None:
        if row.to_zone != "enterprise":
            return
        reason = self._reason(offset)
        if reason is None:
            lacking.append((offset, row))
        else:
            self.absent[reason] += 1

    def _both(
        self,
        offset: int,
        row: Row,
        theirs: list[tuple[int, Row]],
        pairs: list[tuple[int, Row, int, Row]],
        seconds: list[tuple[int, Row, bool]],
    ) -> None:
        self.compared += 1
        chosen = max(theirs, key=lambda each: (row.same(each[1]), row.key == each[1].key, -each[0]))
        for place, other in theirs:
            if (place, other) == chosen:
                continue
            if other.key == row.key:
                self._add(FindingKind.DUPLICATED, offset, place)
            else:
                seconds.append((place, other, other.digest == row.digest))
        place, other = chosen
        if other.key != row.key:
            pairs.append((offset, row, place, other))
            return
        if row.altered:
            self._add(FindingKind.BODY_ALTERED, offset, None)
        if other.altered:
            self._add(FindingKind.BODY_ALTERED, offset, place)
        if not row.same(other):
            self._add(FindingKind.ALTERED, offset, place)

    def _alone(self, mine: list[tuple[int, Row]]) -> None:
        seen: set[int] = set()
        for place, row in mine:
            if row.offset >= len(self.world.sender):
                self._add(FindingKind.AHEAD, row.offset, place)
            elif isinstance(self.world.sender[row.offset], GapReason):
                if row.offset in seen:
                    self._add(FindingKind.DUPLICATED, row.offset, place)
                seen.add(row.offset)
        for offset, gap in enumerate(self.world.sender):
            unknown = isinstance(gap, GapReason) and offset not in seen and self._reason(offset) is None
            if unknown and gap != GapReason.TRUNCATED:
                self._add(FindingKind.GAP_UNRECORDED, offset)
            if isinstance(gap, GapReason):
                self.absent[str(gap)] += 1

    def _settle(
        self,
        lacking: list[tuple[int, Row]],
        pairs: list[tuple[int, Row, int, Row]],
        strays: list[tuple[int, Row, bool]],
    ) -> None:
        used: set[int] = set()
        keys = Counter(row.key for row in self.world.receiver)

        def accounted(offset: int, row: Row) -> bool:
            return self._strayed(offset, row, strays, used) or self._elsewhere(offset, row)

        for offset, row in lacking:
            if not accounted(offset, row):
                self._add(FindingKind.MISSING, offset)
        for offset, row, place, _ in pairs:
            if not accounted(offset, row):
                self._add(FindingKind.MISSING if place in used else FindingKind.ALTERED, offset)
                used.add(place)
        for place, row, same_body in strays:
            if place not in used and keys[row.key] == 1:
                self._add(FindingKind.DUPLICATED if same_body else FindingKind.EXTRA, row.offset, place)
        self._repeated(keys)

    def _strayed(self, offset: int, row: Row, strays: list[tuple[int, Row, bool]], used: set[int]) -> bool:
        for place, other, _ in strays:
            if other.key == row.key and place not in used:
                used.add(place)
                self._add(FindingKind.OUT_OF_ORDER, offset, place)
                return True
        return False

    def _elsewhere(self, offset: int, row: Row) -> bool:
        for place, other in enumerate(self.world.receiver):
            if other.key == row.key:
                if other.origin != ZONE:
                    self.absent["other_path"] += 1
                else:
                    self._add(FindingKind.DUPLICATED, offset, place)
                return True
        return False

    def _repeated(self, keys: Counter[tuple[str, str]]) -> None:
        known = {place for kind, _, place in self.findings if kind == FindingKind.DUPLICATED}
        for key in keys:
            first, *others = [(place, row) for place, row in enumerate(self.world.receiver) if row.key == key]
            for place, row in others:
                if first[0] not in known and place not in known:
                    self._add(FindingKind.DUPLICATED, row.offset if row.origin == ZONE else None, place)

    def _order(self, mine: list[tuple[int, Row]]) -> None:
        misplaced = (FindingKind.DUPLICATED, FindingKind.EXTRA, FindingKind.OUT_OF_ORDER)
        known = {place for kind, _, place in self.findings if kind in misplaced}
        quarantined = [gap for gap in self.world.records if gap.reason == GapReason.QUARANTINED]
        for (_, before), (place, row) in pairwise(mine):
            excused = any(gap.first <= row.offset <= gap.last for gap in quarantined)
            if row.offset <= before.offset and place not in known and not excused:
                self._add(FindingKind.OUT_OF_ORDER, row.offset, place)

    def _bodies(self, mine: list[tuple[int, Row]]) -> None:
        known = {(offset, place) for kind, offset, place in self.findings if kind == FindingKind.BODY_ALTERED}
        for offset, row in enumerate(self.world.sender):
            sent = isinstance(row, Row) and row.to_zone == "enterprise"
            if sent and isinstance(row, Row) and row.altered and (offset, None) not in known:
                self._add(FindingKind.BODY_ALTERED, offset, None)
        for place, row in mine:
            if row.altered and (row.offset, place) not in known:
                self._add(FindingKind.BODY_ALTERED, row.offset, place)


# Random worlds.


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Make two ends that agree, and harm one or both of them."""
    count = draw(st.integers(0, 30))
    sender: list[Row | GapReason] = []
    for at in range(count):
        zone = draw(st.sampled_from(["enterprise"] * 6 + ["lab"]))
        sender.append(Row(f"m{at}", at, to_zone=zone, digest=digest_of("s:1"), time=at // 4))
    receiver = [row for row in sender if isinstance(row, Row) and row.to_zone == "enterprise"]
    for at in range(count):
        if draw(st.integers(0, 14)) == 0:
            sender[at] = GapReason.EVICTED
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(receiver)))
        receiver.insert(at, Row(f"o{at}", at, origin=OTHER, digest=digest_of("s:1")))
    for _ in range(draw(st.integers(0, 4))):
        receiver = harmed(draw, receiver, count)
    records = [
        GapRecord(first, first + draw(st.integers(0, 3)), reason, 1, "", ZONE)
        for first in draw(st.lists(st.integers(0, max(0, count - 1)), max_size=2))
        for reason in [draw(st.sampled_from([GapReason.QUARANTINED, GapReason.SKIPPED, GapReason.EVICTED]))]
    ]
    if count and draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, count - 1))
        row = sender[at]
        if isinstance(row, Row):
            sender[at] = replace(row, subject="s:changed")
    return World(sender, receiver, records, draw(st.integers(-1, count - 1)))


def harmed(draw: st.DrawFn, rows: list[Row], count: int) -> list[Row]:
    """Do one harm to the receiver."""
    if not rows:
        return rows
    rows = list(rows)
    at, other = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    kind = draw(st.sampled_from(HARMS))
    if kind == "remove":
        del rows[at]
    elif kind == "cut":
        del rows[at:]
    elif kind == "copy":
        rows.insert(other, row)
    elif kind == "twin":
        rows.insert(other, replace(row, message_id=f"{row.message_id}-copy"))
    elif kind == "swap":
        rows[at], rows[other] = rows[other], rows[at]
    elif kind == "offsets":
        one, two = rows[at].offset, rows[other].offset
        rows[at], rows[other] = replace(rows[at], offset=two), replace(rows[other], offset=one)
    elif kind == "move":
        rows[at] = replace(row, offset=draw(st.integers(0, count + 2)))
    else:
        changes: dict[str, dict[str, Any]] = {
            "field": {"labels": "{}"},
            "key": {"message_id": "another"},
            "body": {"subject": "s:changed"},
            "sealed": {"subject": "s:changed", "digest": digest_of("s:changed")},
            "zone": {"origin": OTHER},
        }
        rows[at] = replace(row, **changes[kind])
    return rows


def told(verdict: StreamVerdict) -> Counter[tuple[FindingKind, int | None]]:
    """Give the findings of a verdict by kind and offset, runs of them one by one."""
    found: Counter[tuple[FindingKind, int | None]] = Counter()
    for finding in verdict.findings:
        if finding.last is None or finding.kind == FindingKind.AHEAD:
            found[finding.kind, None if finding.kind == FindingKind.AHEAD else finding.offset] += finding.count
        elif finding.offset is not None:
            found.update((finding.kind, at) for at in range(finding.offset, finding.last + 1))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds())
def test_an_audit_finds_what_a_look_at_every_entry_finds(world: World) -> None:
    """Ranges, hashes and searches come to the same findings, numbers and reasons as looking at all pairs."""
    model = Model(world)
    model.judge()
    expected = Counter((kind, None if kind == FindingKind.AHEAD else offset) for kind, offset, _ in model.findings)
    verdict = audited(world.plan())
    assert told(verdict) == expected
    assert verdict.compared == model.compared
    absent = dict(verdict.absent)
    left_out = sum(isinstance(row, Row) and row.to_zone != "enterprise" for row in world.sender)
    assert absent.pop("not_carried", 0) == left_out
    assert absent == {reason: count for reason, count in model.absent.items() if count}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.sampled_from("abcd")), max_size=8))
def test_excuses_are_those_of_the_first_that_covers(ranges: list[tuple[int, int, str]]) -> None:
    """For every offset the first excuse of the list counts, and what none covers is uncovered."""
    listed = [Absence(reason, "sender", first, first + length) for first, length, reason in ranges]
    excuses = Excuses(listed)
    naive = [next((n for n, each in enumerate(listed) if each.first <= at <= each.last), -1) for at in range(45)]
    assert excuses.of(np.arange(45)).tolist() == naive
    assert [excuses.covers(at) for at in range(45)] == [owner >= 0 for owner in naive]
    uncovered = {at for first, last in excuses.uncovered(3, 40) for at in range(first, last + 1)}
    assert uncovered == {at for at in range(3, 41) if naive[at] < 0}
    assert excuses.within(10, 20).of(np.arange(10, 20)).min(initial=0) >= -1
    assert excuses.of_bounds(3, 40) == set(naive[3:41])


def test_sums_tell_exchanged_fields_apart() -> None:
    """Exchanging a field between two entries changes the sum of their hashes, although a linear one would not."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1"), labels=f'{{"a":"{at}"}}') for at in range(20)]
    swapped = list(rows)
    swapped[3], swapped[9] = replace(rows[3], labels=rows[9].labels), replace(rows[9], labels=rows[3].labels)
    hasher = EntryHash(b"0" * 32)
    sums = []
    for each in (rows, list(reversed(rows)), swapped):
        batch = entries(each, range(20))
        offsets = np.array([row.offset for row in each])
        sums.append([int(lane.sum()) for lane in lanes(hasher.of(batch, offsets, np.zeros(20, dtype=np.int64)))])
    assert sums[0] == sums[1]
    assert sums[0][0] != sums[2][0] and sums[0][1] != sums[2][1]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ""},
        {"labels": "x" * 300},
        {"labels": "x" * 299 + "y"},
        {"to_zone": "f"},
        {"message_id": "m1x"},
        {"from_zone": "plan"},
        {"digest": b"\0" * 32},
    ],
)
def test_every_field_changes_the_hash(change: dict[str, object]) -> None:
    """Null and empty differ, long texts are not cut, and a change shows in a batch of one as in one of many."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1")) for at in range(40)]
    changed = [replace(rows[0], **change), *rows[1:]]  # type: ignore[arg-type]
    zeros = np.zeros(40, dtype=np.int64)
    hasher = EntryHash(b"1" * 32)
    one, other = (hasher.of(entries(each, range(40)), np.arange(40), zeros) for each in (rows, changed))
    assert one[0] != other[0] and (one[1:] == other[1:]).all()
    alone = hasher.of(entries(changed[:1], [0]), np.arange(1), zeros[:1])
    assert alone[0] == other[0]
    assert hasher.of(entries(rows, range(40)), np.arange(1, 41), zeros)[0] != one[0]
    assert EntryHash(b"2" * 32).of(entries(rows, range(40)), np.arange(40), zeros)[0] != one[0]


def test_repeated_numbers_are_found() -> None:
    """What is there more than once is given once."""
    numbers = np.array([5, 3, 5, 9, 3, 5, 2**63], dtype=np.uint64)
    assert repeated(numbers).tolist() == [3, 5]
    assert repeated(np.empty(0, dtype=np.uint64)).tolist() == []


# What no log can be.


@dataclass(frozen=True)
class BoastfulEnd(MemoryEnd):
    """An end that says that its log begins and ends somewhere else."""

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Tell it."""
        return self.told


@pytest.mark.parametrize(
    ("start", "end", "says"),
    [
        (0, 1 << 61, "memory has 2,305,843,009,213,693,952 offsets, one audit takes"),
        (0, 1 << 63, "memory says that its log goes from 0 to"),
        (-5, 10, "memory says that its log goes from -5 to 10"),
        (10, 5, "memory says that its log goes from 10 to 5"),
    ],
)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_end_that_says_what_no_log_is_ends_an_audit_in_words(side: str, start: int, end: int, says: str) -> None:
    """The other zone says where its log ends, and an audit that made a list of it would not end."""
    plan = World([], [], [], -1).plan()
    with pytest.raises(BsfgError, match=says):
        liar = BoastfulEnd([], Evidence("x", start, end))
        audited(replace(plan, sender=liar) if side == "sender" else replace(plan, receiver=liar))


def test_a_fact_from_far_beyond_is_one_finding() -> None:
    """A sender may have said that it has any offset; the verdict tells of those ranges that somebody has."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1")) for at in range(20)]
    far = [replace(rows[0], message_id=f"far{at}", offset=at) for at in (10_000_000, 20_000_000)]
    verdict = audited(World([*rows], [*rows, *far], [], 19).plan())
    assert [(each.kind, each.offset) for each in verdict.findings] == [
        (FindingKind.AHEAD, 10_000_000),
        (FindingKind.AHEAD, 20_000_000),
    ]
    states = [(each.first, each.state) for each in verdict.ranges]
    assert states == [(0, "equal"), (8, "equal"), (16, "equal"), (10_000_000, "finding"), (20_000_000, "finding")]


def test_a_segment_of_which_there_can_be_none_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with a kept digest is laid out offset by offset, as many as the other end says."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1")) for at in range(20)]
    plan = World([GapReason.TRUNCATED] * 8 + rows[8:], [*rows], [], 19).plan()
    kept = [KeptRange(0, 7, "no digest", b"", b"")]
    sender = BoastfulEnd(plan.sender.rows, Evidence("s", 8, 20, kept=kept))  # type: ignore[attr-defined]
    assert [each.kind for each in audited(replace(plan, sender=sender)).findings] == [FindingKind.KEPT_DIGEST]
    monkeypatch.setattr(removed_ranges, "KEPT_FACTS_MAX", 7)
    verdict = audited(replace(plan, sender=sender))
    assert verdict.clean and "not_checked" in {each.state for each in verdict.checks if "let go" in each.name}


@dataclass(frozen=True)
class DepartingEnd(MemoryEnd):
    """An end that lets go what stands before a place as soon as it was read once."""

    gone: int = 0
    reads: list[int] = field(default_factory=list)

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give what is there by now."""
        rows = [*[GapReason.TRUNCATED] * self.gone, *self.rows[self.gone :]] if self.reads else self.rows
        self.reads.append(first)
        return MemoryEnd(rows, self.told).frames(first, end, log_id)


@pytest.mark.parametrize(("gone", "lost", "missing"), [(3, None, []), (8, None, []), (12, None, []), (3, 6, [6])])
def test_what_both_ends_let_go_while_it_is_looked_at_is_not_missing(
    gone: int, lost: int | None, missing: list[int]
) -> None:
    """The sender let it go before, the receiver between two looks; what is lacking behind that is missing."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1")) for at in range(20)]
    there = [row for row in rows if row.offset != lost]
    plan = World([GapReason.TRUNCATED] * 8 + rows[8:], there, [], 19).plan()
    kept = [KeptRange(0, 7, "no digest", b"", b"")]
    sender = BoastfulEnd(plan.sender.rows, Evidence("s", 8, 20, kept=kept))  # type: ignore[attr-defined]
    receiver = DepartingEnd(there, plan.receiver.told, gone=gone)  # type: ignore[attr-defined]
    verdict = audited(replace(plan, sender=sender, receiver=receiver))
    assert [each.offset for each in verdict.findings if each.kind == FindingKind.MISSING] == missing
    assert len(verdict.findings) == len(missing)
    [check] = [each for each in verdict.checks if "let go" in each.name]
    assert check.state == "not_checked" or missing


@pytest.mark.parametrize("window", [{}, {"first": 10}, {"first": 10, "last": 70}, {"first": 60, "last": 90}])
@pytest.mark.parametrize("gone", [20, 50, 64, 100])
@pytest.mark.parametrize("lost", [None, 105])
def test_what_a_receiver_lets_go_while_its_log_is_read_is_not_missing(
    window: dict[str, Any], gone: int, lost: int | None
) -> None:
    """Also when what stood before it was read before; the rest is judged as ever."""
    rows = [Row(f"m{at}", at, digest=digest_of("s:1")) for at in range(120)]
    there = [row for row in rows if row.offset != lost]
    plan = replace(World([*rows], there, [], 119).plan(), **window)
    receiver = DepartingEnd(there, plan.receiver.told, gone=gone)  # type: ignore[attr-defined]
    verdict = audited(replace(plan, receiver=receiver))
    expected = [lost] if lost is not None and "last" not in window else []
    assert [(each.kind, each.offset) for each in verdict.findings] == [(FindingKind.MISSING, at) for at in expected]
