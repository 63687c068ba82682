"""What an audit says: findings, what is rightly not there, the checks that were made, and the numbers behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from bsfg.journey.sums import SENDER, Named
from bsfg.ports import GapRecord
from bsfg.spark.audit.scope import SetAside

QUARANTINE_MAX = 200
FINDINGS_MAX = 1_000
"""How many findings a verdict names; all are counted."""


class FindingKind(StrEnum):
    """What is wrong."""

    MISSING = "missing"
    EXTRA = "extra"
    DUPLICATED = "duplicated"
    ALTERED = "altered"
    BODY_ALTERED = "body_altered"
    OUT_OF_ORDER = "out_of_order"
    AHEAD = "ahead"
    GAP_UNRECORDED = "gap_unrecorded"
    UNREPORTED = "unreported"
    KEPT_DIGEST = "kept_digest_differs"
    CHAIN_BROKEN = "chain_broken"
    LOG_DAMAGED = "log_damaged"
    HEAD_UNKNOWN = "head_unknown"
    FOREIGN_LOG = "foreign_log"
    UNREADABLE = "unreadable"


MEANINGS: dict[FindingKind, tuple[str, str]] = {
    FindingKind.MISSING: (
        "The sender has the fact, the receiver does not, and nothing on record says why.",
        "Have the receiver read the range again from the sender, and find out who removed it.",
    ),
    FindingKind.EXTRA: (
        "The receiver has an entry that the sender does not have.",
        "Find out what wrote into the receiver's buffer beside the link.",
    ),
    FindingKind.DUPLICATED: (
        "One fact is stored twice.",
        "BSFG never does this: find out what else wrote into the folder.",
    ),
    FindingKind.ALTERED: (
        "The two ends hold different versions of one fact.",
        "Compare with a backup or with the producer to see which end is right.",
    ),
    FindingKind.BODY_ALTERED: (
        "The body is not the one that its digest was made of: it was changed where it lies.",
        "Restore it from the other end or from a backup, and find out who can write to the disk.",
    ),
    FindingKind.OUT_OF_ORDER: (
        "The receiver holds the facts in another order than the sender.",
        "Find out what wrote into the receiver's buffer beside the link.",
    ),
    FindingKind.AHEAD: (
        "The receiver has facts from beyond the end of the sender's log.",
        "The sender was probably restored from an older copy: bring the facts back before it goes on.",
    ),
    FindingKind.GAP_UNRECORDED: (
        "The sender lost facts before they were sent, and the receiver has no record of it.",
        "Record the gap at the receiver, so that its consumers know.",
    ),
    FindingKind.UNREPORTED: (
        "The receiver refused facts, and the sender has no record of it.",
        "Tell the zone that produced them; see bsfg quarantine list at the receiver.",
    ),
    FindingKind.KEPT_DIGEST: (
        "What is left of a range does not have the digest that was kept when the other end let it go.",
        "Compare the range with a backup of the end that let it go.",
    ),
    FindingKind.CHAIN_BROKEN: (
        "A frame of the log is not followed by the one that was written after it.",
        "Files were replaced or mixed: compare with a backup and find out who wrote here.",
    ),
    FindingKind.LOG_DAMAGED: (
        "Frames of the log fail their checksums or are missing.",
        "Run bsfg verify on the folder; restore it from a backup or from the other end.",
    ),
    FindingKind.HEAD_UNKNOWN: (
        "A chain head that one end told the other is not in its log: its history was rewritten.",
        "Compare the log with a backup from the time of the last confirmation.",
    ),
    FindingKind.FOREIGN_LOG: (
        "The log is not the one that the other end knows.",
        "Find out whether the folder was exchanged or made anew; bsfg gate shows whether the link is held.",
    ),
    FindingKind.UNREADABLE: (
        "Entries could not be read, so nothing can be said about them.",
        "Run bsfg verify on the folder.",
    ),
}
"""What each kind means, and what to do about it."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that is wrong.

    ``offset`` counts the sender's buffer, up to ``last`` for a range, and ``receiver_offset`` the forward buffer.
    ``fields`` are those that differ. ``count`` is how many facts are concerned.
    """

    kind: FindingKind
    side: str
    offset: int | None = None
    last: int | None = None
    receiver_offset: int | None = None
    from_zone: str | None = None
    message_id: str | None = None
    fields: tuple[str, ...] = ()
    detail: str = ""
    count: int = 1

    @staticmethod
    def of(kind: FindingKind, side: str, entry: Named, fields: tuple[str, ...] = (), detail: str = "") -> AuditFinding:
        """Name a finding by an entry of the receiver."""
        return AuditFinding(kind, side, entry.offset, None, entry.place, *entry.key, fields, detail)

    @staticmethod
    def within(kind: FindingKind, side: str, first: int, last: int, detail: str, count: int = 1) -> AuditFinding:
        """Name a finding by a range of one log, whose offsets a receiver counts by itself."""
        if side == SENDER:
            return AuditFinding(kind, side, first, last, detail=detail, count=count)
        return AuditFinding(kind, side, receiver_offset=first, detail=f"{first} to {last}: {detail}", count=count)


@dataclass(frozen=True, slots=True)
class Absence:
    """Facts that are rightly not there, or not any more: between which offsets, how many, why, and who says so."""

    reason: str
    side: str
    first: int
    last: int
    count: int = 0
    detail: str = ""
    at_unix_ms: int | None = None

    @staticmethod
    def of_gap(gap: GapRecord, side: str) -> Absence:
        """Give what a gap record of one end excuses."""
        count = gap.last - gap.first + 1
        return Absence(str(gap.reason), side, gap.first, gap.last, count, gap.detail, gap.at_unix_ms or None)

    def part(self, first: int, last: int, count: int) -> Absence:
        """Give the part of it that was used."""
        return Absence(self.reason, self.side, first, last, count, self.detail, self.at_unix_ms)


@dataclass(frozen=True, slots=True)
class FoldedAbsence(Absence):
    """So many facts between two offsets, of which it is no longer known which they are."""

    at_most: int = 0


def merged_absences(absences: Iterable[Absence]) -> list[Absence]:
    """Join absences of one kind, in order of offsets; what lies between two of them is not counted."""
    result: dict[tuple[str, str, str, int | None], Absence] = {}
    for absence in sorted(absences, key=lambda each: each.first):
        kind = absence.reason, absence.side, absence.detail, absence.at_unix_ms
        before = result.get(kind)
        if before is not None:
            count = before.count + absence.count
            absence = replace(before, last=max(before.last, absence.last), count=count)
        result[kind] = absence
    return list(result.values())


class CheckState(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One question that the audit asked, and its answer."""

    name: str
    state: CheckState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RangeState:
    """What became of one range of the sender's offsets, for the picture."""

    first: int
    last: int
    state: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class EndState:
    """One end as it was read; ``summed_by_node`` where its node summed it up itself.

    ``bytes_received`` are those of entries or sums that came over the wire in the first pass.
    """

    name: str
    log_id: str
    start: int
    end: int
    chain_head: str
    facts_read: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    summed_by_node: bool = False
    gap_records: int = 0
    quarantined: int = 0


@dataclass(slots=True)
class StreamVerdict:
    """The verdict on one stream of a link.

    ``compared`` counts the facts that were held against each other one end to the other, ``by_digest`` those of which
    only one end has the bytes and the other the digest. ``frontier`` is the last offset that the receiver must have;
    ``receiver_first`` and ``receiver_last`` are the lowest and the highest of the sender's offsets that it has.
    ``quarantine`` lists what lies in quarantine at the receiver, the newest of it.
    """

    stream: str
    sender: EndState
    receiver: EndState
    first: int
    last: int
    frontier: int
    deep: bool
    receiver_first: int | None = None
    receiver_last: int | None = None
    compared: int = 0
    by_digest: int = 0
    in_flight: int = 0
    seconds: float = 0.0
    findings: list[AuditFinding] = field(default_factory=list)
    finding_counts: dict[str, int] = field(default_factory=dict)
    absences: list[Absence] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    ranges: list[RangeState] = field(default_factory=list)
    quarantine: list[SetAside] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.finding_counts

    @property
    def absent(self) -> dict[str, int]:
        """How many facts are rightly not there, by reason."""
        counts: Counter[str] = Counter()
        for absence in self.absences:
            counts[absence.reason] += absence.count
        return dict(counts)

    def add(self, findings: Iterable[AuditFinding]) -> None:
        """Take findings: all are counted, the first of them are named."""
        for finding in findings:
            kind = str(finding.kind)
            self.finding_counts[kind] = self.finding_counts.get(kind, 0) + finding.count
            if len(self.findings) < FINDINGS_MAX:
                self.findings.append(finding)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a link: all of its streams that were audited."""

    link: str
    sender_zone: str
    receiver_zone: str
    started_unix_ms: int
    seconds: float
    streams: tuple[StreamVerdict, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return all(stream.clean for stream in self.streams)

    @property
    def facts(self) -> int:
        """How many facts were compared, byte by byte or by a kept digest."""
        return sum(stream.compared + stream.by_digest for stream in self.streams)

    @property
    def findings(self) -> list[AuditFinding]:
        """All findings that are named."""
        return [finding for stream in self.streams for finding in stream.findings]

    @property
    def counts(self) -> dict[str, int]:
        """How many facts each kind of finding concerns."""
        counts: Counter[str] = Counter()
        for stream in self.streams:
            counts.update(stream.finding_counts)
        return dict(counts)

    @property
    def facts_per_second(self) -> float:
        """How fast the audit was."""
        return self.facts / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON form."""
        return {
            "clean": self.clean,
            "link": self.link,
            "sender_zone": self.sender_zone,
            "receiver_zone": self.receiver_zone,
            "started_unix_ms": self.started_unix_ms,
            "seconds": round(self.seconds, 3),
            "facts": self.facts,
            "facts_per_second": round(self.facts_per_second, 1),
            "counts": self.counts,
            "streams": [_stream_dict(stream) for stream in self.streams],
        }


def _stream_dict(stream: StreamVerdict) -> dict[str, Any]:
    found = asdict(stream)
    found["findings"] = [_finding_dict(finding) for finding in stream.findings]
    return {"stream": found.pop("stream"), "clean": stream.clean, "absent": stream.absent, **found}


def _finding_dict(finding: AuditFinding) -> dict[str, Any]:
    says, hint = MEANINGS[finding.kind]
    return {**asdict(finding), "says": says, "hint": hint}
