"""The questions that an audit asks, and how each was answered: what the report shows before all findings."""

from __future__ import annotations

from collections.abc import Sequence

from bsfg.retention import GapReason
from bsfg.spark.audit.case import Case
from bsfg.spark.audit.evidence import Evidence
from bsfg.spark.audit.kept import KeptDetail
from bsfg.spark.audit.letgo import let_go_by_receiver, let_go_by_sender
from bsfg.spark.audit.scope import RECEIVER, SENDER
from bsfg.spark.audit.verdict import Check, Finding, Kind, RangeState, State, StreamVerdict

QUESTIONS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("Every fact that the receiver must have is there", (Kind.MISSING,)),
    ("No fact is there twice, and none that was not sent", (Kind.DUPLICATED, Kind.EXTRA, Kind.AHEAD)),
    ("Envelopes and digests are the same at both ends", (Kind.ALTERED,)),
    ("Bodies are those that the digests were made of", (Kind.BODY_ALTERED,)),
    ("Facts stand in the order of the sender", (Kind.OUT_OF_ORDER,)),
    ("What was lost before it was sent is on record at the receiver", (Kind.GAP_UNRECORDED,)),
    ("What the receiver refused is on record at the sender", (Kind.UNREPORTED,)),
    ("Both logs can be read in full", (Kind.LOG_DAMAGED, Kind.UNREADABLE)),
    ("The sender's log is the one that the receiver knows", (Kind.FOREIGN_LOG,)),
)

CHAIN = {SENDER: "The sender's hash chain is unbroken", RECEIVER: "The receiver's hash chain is unbroken"}
KEPT = "What one end has let go agrees with the digests that it kept"
HEADS = "The chain heads that the ends exchanged are in their logs"


def checks_of(
    case: Case, verdict: StreamVerdict, kept: Sequence[KeptDetail], chained: Sequence[str], heads: Check
) -> list[Check]:
    """Answer all questions; ``chained`` are the sides whose chains were verified."""
    result = [_asked(name, kinds, verdict, case) for name, kinds in QUESTIONS]
    result.append(_kept(case, verdict, kept))
    result += [_chain(side, verdict, chained) for side in (SENDER, RECEIVER)]
    return [*result, heads]


def _asked(name: str, kinds: tuple[Kind, ...], verdict: StreamVerdict, case: Case) -> Check:
    count = sum(verdict.finding_counts.get(kind, 0) for kind in kinds)
    if count:
        return Check(name, State.FAILED, f"{count:,} found")
    why = _not_asked(kinds, case)
    return Check(name, State.NOT_CHECKED, why) if why else Check(name, State.PASSED)


def _not_asked(kinds: tuple[Kind, ...], case: Case) -> str:
    """Say why a question could not be asked, empty when it was."""
    if Kind.BODY_ALTERED in kinds and not case.scope.deep:
        return "bodies were not hashed again"
    if Kind.UNREPORTED in kinds and not case.sender.knows_gaps:
        return "the sender's gap records are not at hand"
    if Kind.GAP_UNRECORDED in kinds and not case.receiver.knows_gaps:
        return "the receiver's gap records are not at hand"
    if Kind.FOREIGN_LOG in kinds and (case.receiver.position is None or case.receiver.position.log_id is None):
        return "what the receiver remembers of the sender is not at hand"
    return ""


def _kept(case: Case, verdict: StreamVerdict, kept: Sequence[KeptDetail]) -> Check:
    failed = verdict.finding_counts.get(Kind.KEPT_DIGEST, 0)
    if failed:
        return Check(KEPT, State.FAILED, f"{failed:,} facts of ranges that differ")
    gone = let_go_by_sender(case) + let_go_by_receiver(case)
    proven = f"{verdict.by_digest:,} of {gone:,} facts agree"
    if gone <= verdict.by_digest:
        return Check(KEPT, State.PASSED, proven if gone else "nothing was let go")
    reasons = sorted({each.why for each in kept if each.why}) or ["both ends, or parts of their ranges, are gone"]
    return Check(KEPT, State.NOT_CHECKED, f"{proven}; the others cannot be compared: {'; '.join(reasons)}")


def _chain(side: str, verdict: StreamVerdict, chained: Sequence[str]) -> Check:
    count = sum(finding.kind == Kind.CHAIN_BROKEN and finding.side == side for finding in verdict.findings)
    if count:
        return Check(CHAIN[side], State.FAILED, f"broken at {count} places")
    if side not in chained:
        return Check(CHAIN[side], State.NOT_CHECKED, "only a data folder shows it; run bsfg verify in its zone")
    return Check(CHAIN[side], State.PASSED)


def exchanged(case: Case, known: dict[str, dict[bytes, int | None]]) -> tuple[Check, list[Finding]]:
    """Judge the heads that were exchanged, given per side where each was found."""
    asked = ((SENDER, case.told_to_receiver), (RECEIVER, case.told_to_sender))
    found, notes, looked = [], [], 0
    for side, heads in asked:
        evidence = case.side(side)[1]
        for head in heads:
            if head not in known.get(side, {}):
                continue
            looked += 1
            place = known[side][head]
            if place is not None:
                notes.append(f"{side} at {place:,}")
            elif _may_be_gone(evidence):
                notes.append(f"{side}: in what was let go, or rewritten")
            else:
                found.append(Finding(Kind.HEAD_UNKNOWN, side, detail=f"the head {head.hex()[:16]}… is not in its log"))
    if found:
        return Check(HEADS, State.FAILED, f"{len(found)} of {looked}"), found
    if not looked or any("rewritten" in note for note in notes):
        return Check(HEADS, State.NOT_CHECKED, "; ".join(notes) or "none are at hand"), found
    return Check(HEADS, State.PASSED, "; ".join(notes)), found


def _may_be_gone(evidence: Evidence) -> bool:
    """Tell whether a head may belong to a part of the log that is not there any more."""
    lost = (GapReason.DAMAGED, GapReason.LOST, GapReason.TORN)
    return evidence.start > 0 or any(gap.reason in lost and gap.origin_zone is None for gap in evidence.gaps)


def range_states(case: Case, states: dict[int, str], findings: Sequence[Finding]) -> list[RangeState]:
    """Give every range of the window its colour: what the sums said, or that a finding lies in it."""
    size = case.scope.range_facts
    wrong = {
        number
        for finding in findings
        if finding.offset is not None
        for number in range(finding.offset // size, (finding.last or finding.offset) // size + 1)
    }
    result = []
    top = max([case.end - 1, *(number * size for number in case.totals.receiver)])
    for number in range(case.scope.first // size, top // size + 1) if top >= case.scope.first else ():
        first, end = case.scope.bounds(number)
        state = "finding" if number in wrong else _shown(states.get(number), end <= case.sender.start)
        counts = [side[number].count if number in side else 0 for side in (case.totals.sender, case.totals.receiver)]
        result.append(RangeState(first, end - 1, state, *counts))
    return result


def _shown(state: str | None, let_go: bool) -> str:
    if state is None or state == "empty":
        return "truncated" if let_go else "gap"
    return "excused" if state == "differs" else state
