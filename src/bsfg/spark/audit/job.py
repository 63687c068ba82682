"""The audit of one stream of a link: its chains, its questions, from the first look at both ends to the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bsfg.journey.sums import RECEIVER, SENDER
from bsfg.retention import GapReason
from bsfg.spark.audit import judging
from bsfg.spark.audit.case import AuditedStream, Case, open_case, stretches
from bsfg.spark.audit.compare import Detail
from bsfg.spark.audit.ends import FolderEnd
from bsfg.spark.audit.judging import IN_FLIGHT
from bsfg.spark.audit.removed_ranges import KeptDetail, check_let_go, let_go_by_receiver, let_go_by_sender
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import Evidence
from bsfg.spark.audit.settle import ReceiverPlace, Searching, compare_ranges, duplicates, open_keys, settle
from bsfg.spark.audit.verdict import (
    QUARANTINE_MAX,
    AuditFinding,
    Check,
    CheckState,
    EndState,
    FindingKind,
    RangeState,
    StreamVerdict,
    merged_absences,
)
from bsfg.stores.log.segments import scan_segment
from bsfg.stores.shared.frame import genesis


@dataclass(frozen=True, slots=True)
class SegmentChain:
    """What was found in one segment; ``heads`` are the chain values that were looked for, with the offset they precede.

    ``chain_after`` is empty when damage at the end hides it.
    """

    base: int
    chain_before: bytes
    chain_after: bytes
    breaks: tuple[tuple[int, int], ...] = ()
    heads: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verifying:
    """Verifies the chain inside one segment."""

    log: FolderEnd
    base: int
    heads: tuple[bytes, ...] = ()

    def __call__(self) -> SegmentChain | None:
        """Do it, in whichever process this is; None when the segment has been truncated meanwhile."""
        view = self.log.folder().view()
        segment = next((each for each in view.segments if each.base == self.base), None)
        try:
            data = bytes(segment.files.read(segment.path)) if segment is not None else b""
        except FileNotFoundError:
            segment = None
        if segment is None:
            return None
        scan = scan_segment(data, segment.header, tail_may_be_torn=segment is view.segments[-1])
        scan.forget_from(view.end)
        values = [(ref.header.chain_before, ref.base) for ref in scan.frames]
        values += [(segment.header.chain_before, segment.base), (scan.chain, max(scan.end, segment.base))]
        breaks = tuple((hole.first, hole.last) for hole in scan.holes if "chain" in hole.why)
        heads = {value: offset for value, offset in values if value in self.heads}
        return SegmentChain(segment.base, segment.header.chain_before, scan.chain, breaks, heads)


def broken(side: str, evidence: Evidence, segments: Sequence[SegmentChain]) -> Iterator[AuditFinding]:
    """Find where the chain of a log does not go on."""
    kind, before = FindingKind.CHAIN_BROKEN, _anchored(evidence, segments[0].base) if segments else b""
    for segment in segments:
        if before and segment.chain_before != before:
            detail = f"the segment that begins at {segment.base} does not follow the one before it"
            yield AuditFinding.within(kind, side, segment.base, segment.base, detail)
        for first, last in segment.breaks:
            yield AuditFinding.within(kind, side, first, last, "the frame before was replaced")
        before = segment.chain_after


def _anchored(evidence: Evidence, base: int) -> bytes:
    """Give the chain value that the first segment must begin with, empty when it is not known."""
    if base == 0:
        # A restored log goes on from the chain of the one that it was until then.
        oldest = next((each.was_log_id for each in evidence.restores if each.first > 0), evidence.log_id)
        return genesis(bytes.fromhex(oldest))
    return next((kept.chain_after for kept in evidence.kept if kept.last + 1 == base), b"")


def known_heads(
    evidence: Evidence, segments: Sequence[SegmentChain], heads: Sequence[bytes]
) -> dict[bytes, int | None]:
    """Say for each head where the log had it, None when it is nowhere in what is left of the log."""
    found: dict[bytes, int | None] = dict.fromkeys(heads)
    for kept in evidence.kept:
        for value, offset in ((kept.chain_before, kept.first), (kept.chain_after, kept.last + 1)):
            if value in found:
                found[value] = offset
    for segment in segments:
        found.update(segment.heads)
    return found


QUESTIONS: tuple[tuple[str, tuple[FindingKind, ...]], ...] = (
    ("Every fact that the receiver must have is there", (FindingKind.MISSING,)),
    (
        "No fact is there twice, and none that was not sent",
        (FindingKind.DUPLICATED, FindingKind.EXTRA, FindingKind.AHEAD),
    ),
    ("Envelopes and digests are the same at both ends", (FindingKind.ALTERED,)),
    ("Bodies are those that the digests were made of", (FindingKind.BODY_ALTERED,)),
    ("Facts stand in the order of the sender", (FindingKind.OUT_OF_ORDER,)),
    ("What was lost before it was sent is on record at the receiver", (FindingKind.GAP_UNRECORDED,)),
    ("What the receiver refused is on record at the sender", (FindingKind.UNREPORTED,)),
    ("Both logs can be read in full", (FindingKind.LOG_DAMAGED, FindingKind.UNREADABLE)),
    ("The sender's log is the one that the receiver knows", (FindingKind.FOREIGN_LOG,)),
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


def _asked(name: str, kinds: tuple[FindingKind, ...], verdict: StreamVerdict, case: Case) -> Check:
    count = sum(verdict.finding_counts.get(kind, 0) for kind in kinds)
    if count:
        return Check(name, CheckState.FAILED, f"{count:,} found")
    why = _not_asked(kinds, case)
    if why:
        return Check(name, CheckState.NOT_CHECKED, why)
    believed = " and ".join(end for end in (SENDER, RECEIVER) if _end_state(case, end).summed_by_node)
    by_node = f"as the node of the {believed} found itself" if believed and FindingKind.BODY_ALTERED in kinds else ""
    return Check(name, CheckState.PASSED, by_node)


def _not_asked(kinds: tuple[FindingKind, ...], case: Case) -> str:
    """Say why a question could not be asked, empty when it was."""
    if FindingKind.BODY_ALTERED in kinds and not case.scope.deep:
        return "bodies were not hashed again"
    if FindingKind.FOREIGN_LOG in kinds and (case.receiver.position is None or case.receiver.position.log_id is None):
        return "what the receiver remembers of the sender is not at hand"
    return ""


def _kept(case: Case, verdict: StreamVerdict, kept: Sequence[KeptDetail]) -> Check:
    failed = verdict.finding_counts.get(FindingKind.KEPT_DIGEST, 0)
    if failed:
        return Check(KEPT, CheckState.FAILED, f"{failed:,} facts of ranges that differ")
    gone = let_go_by_sender(case) + let_go_by_receiver(case)
    proven = f"{verdict.by_digest:,} of {gone:,} facts agree"
    if gone <= verdict.by_digest:
        return Check(KEPT, CheckState.PASSED, proven if gone else "nothing was let go")
    reasons = sorted({each.why for each in kept if each.why}) or ["both ends, or parts of their ranges, are gone"]
    return Check(KEPT, CheckState.NOT_CHECKED, f"{proven}; the others cannot be compared: {'; '.join(reasons)}")


def _chain(side: str, verdict: StreamVerdict, chained: Sequence[str]) -> Check:
    count = sum(finding.kind == FindingKind.CHAIN_BROKEN and finding.side == side for finding in verdict.findings)
    if count:
        return Check(CHAIN[side], CheckState.FAILED, f"broken at {count} places")
    if side not in chained:
        return Check(CHAIN[side], CheckState.NOT_CHECKED, "only a data folder shows it; run bsfg verify in its zone")
    return Check(CHAIN[side], CheckState.PASSED)


def exchanged(case: Case, known: dict[str, dict[bytes, int | None]]) -> tuple[Check, list[AuditFinding]]:
    """Judge the heads that were exchanged, given per side where each was found."""
    found, notes, looked = [], [], 0
    for side, heads in known.items():
        for head in case.heads(side):
            if head not in heads:
                continue
            looked += 1
            place = heads[head]
            if place is not None:
                notes.append(f"{side} at {place:,}")
            elif _may_be_gone(case.side(side)[1]):
                notes.append(f"{side}: in what was let go, or rewritten")
            else:
                detail = f"the head {head.hex()[:16]}… is not in its log"
                found.append(AuditFinding(FindingKind.HEAD_UNKNOWN, side, detail=detail))
    if found:
        return Check(HEADS, CheckState.FAILED, f"{len(found)} of {looked}"), found
    if not looked or any("rewritten" in note for note in notes):
        return Check(HEADS, CheckState.NOT_CHECKED, "; ".join(notes) or "none are at hand"), found
    return Check(HEADS, CheckState.PASSED, "; ".join(notes)), found


def _may_be_gone(evidence: Evidence) -> bool:
    """Tell whether a head may belong to a part of the log that is not there any more."""
    lost = (GapReason.DAMAGED, GapReason.LOST, GapReason.TORN)
    return evidence.start > 0 or any(gap.reason in lost and gap.origin_zone is None for gap in evidence.gaps)


def range_states(case: Case, states: dict[int, str], findings: Sequence[AuditFinding]) -> list[RangeState]:
    """Give every range of the window its colour: what the sums said, or that a finding lies in it.

    Behind the sender's end those that the receiver has; what either end says of offsets may be far from any other.
    """
    size = case.scope.range_facts
    begin, top = case.scope.first // size, (case.end - 1) // size
    wrong = set[int]()
    for finding in findings:
        if finding.offset is not None:
            number = finding.offset // size
            wrong |= {number, *range(max(number, begin), min((finding.last or finding.offset) // size, top) + 1)}
    result = []
    for number in [*range(begin, top + 1), *sorted(number for number in case.totals.receiver if number > top)]:
        first, end = case.scope.bounds(number)
        state = "finding" if number in wrong else _shown(states.get(number), end <= case.sender.start)
        counts = [side[number].count if number in side else 0 for side in (case.totals.sender, case.totals.receiver)]
        result.append(RangeState(first, end - 1, state, *counts))
    return result


def _shown(state: str | None, let_go: bool) -> str:
    if state is None or state == "empty":
        return "truncated" if let_go else "gap"
    return "excused" if state == "differs" else state


def audit_stream(plan: AuditedStream, runner: Runner) -> StreamVerdict:
    """Audit one stream of a link."""
    started = time.monotonic()
    case = open_case(plan, runner)
    verdict = StreamVerdict(
        plan.stream,
        _end_state(case, SENDER),
        _end_state(case, RECEIVER),
        case.scope.first,
        case.end - 1,
        case.frontier,
        case.scope.deep,
        case.totals.lowest,
        case.totals.highest,
    )
    compared = compare_ranges(case, runner)
    kept = check_let_go(case, runner)
    verdict.add(finding for detail in compared.details for finding in detail.findings)
    verdict.add(finding for each in kept for finding in each.findings)
    verdict.compared, verdict.absences = compared.compared, compared.absences
    used = [*compared.absences, *(absence for each in kept for absence in each.folded)]
    verdict.add(judging.overused(judging.folded(case.scope, case.receiver), used))
    verdict.by_digest = sum(each.proven for each in kept)
    _settle(case, verdict, [*compared.details, *(each.detail for each in kept if each.detail is not None)], runner)
    _add_rest(case, verdict)
    chained, known = _chains(case, verdict, runner)
    heads, unknown = exchanged(case, known)
    verdict.add(unknown)
    verdict.findings.sort(key=lambda finding: (finding.offset is None, finding.offset or 0))
    verdict.absences = merged_absences(verdict.absences)
    verdict.in_flight = verdict.absent.get(IN_FLIGHT, 0)
    verdict.quarantine = sorted(case.receiver.set_aside, key=lambda each: -each.at_unix_ms)[:QUARANTINE_MAX]
    verdict.checks = checks_of(case, verdict, kept, chained, heads)
    verdict.ranges = range_states(case, compared.states, verdict.findings)
    verdict.seconds = time.monotonic() - started
    return verdict


def _end_state(case: Case, side: str) -> EndState:
    log, evidence = case.side(side)
    read = case.totals.side(side)
    taken = [each.size_bytes if each.wire_bytes is None else each.wire_bytes for each in read]
    return EndState(
        log.name,
        evidence.log_id,
        evidence.start,
        evidence.end,
        evidence.chain_head.hex(),
        sum(each.read for each in read),
        sum(each.size_bytes for each in read),
        0 if isinstance(log, FolderEnd) else sum(taken),
        bool(read) and all(each.wire_bytes is not None for each in read),
        len(evidence.gaps),
        len(evidence.set_aside),
    )


def _settle(case: Case, verdict: StreamVerdict, details: Sequence[Detail], runner: Runner) -> None:
    """Search the receiver's whole log for what is open, and for keys that it has more than once."""
    wanted = open_keys(details, case.repeated)
    places: list[ReceiverPlace] = []
    if len(wanted):
        bounds = case.receiver.start, case.receiver.end
        steps = [
            Searching(each.log, each.log_id, each.first, each.end, case.scope, wanted)
            for each in stretches(RECEIVER, case.plan.receiver, case.receiver, bounds, case.scope)
        ]
        found = runner.each(f"{case.plan.stream}: searching for what seems missing", steps)
        places = [place for part in found for place in part]
    settled = settle(details, places, case.repeated, case.scope)
    verdict.compared += settled.compared
    verdict.absences += settled.absences
    verdict.add(settled.findings)
    known = {finding.receiver_offset for finding in verdict.findings if finding.kind == FindingKind.DUPLICATED}
    repeated = set(case.repeated.tolist())
    verdict.add(duplicates([place for place in places if place.key in repeated], known, case.scope))


def _add_rest(case: Case, verdict: StreamVerdict) -> None:
    """Add what needs no comparison: order, bodies, damage, records, histories."""
    misplaced = (FindingKind.DUPLICATED, FindingKind.EXTRA, FindingKind.OUT_OF_ORDER)
    known = {finding.receiver_offset for finding in verdict.findings if finding.kind in misplaced}
    verdict.add(judging.order_findings(case.totals.side(RECEIVER), case.excuses, known, case.sibling))
    verdict.add(judging.body_findings(case.totals.stretches, _named_bodies(verdict.findings)))
    for side in (SENDER, RECEIVER):
        verdict.add(judging.damage(side, case.side(side)[1], case.totals.gaps(side)))
        verdict.add(judging.unreadable(case.totals.side(side)))
    verdict.add(judging.reports(case.scope, case.sender, case.receiver, case.frontier))
    verdict.add(judging.histories(case.sender, case.receiver))


def _named_bodies(findings: Sequence[AuditFinding]) -> set[tuple[str, int]]:
    """Give side and place of the altered bodies that are named already."""
    places = set()
    for finding in findings:
        place = finding.offset if finding.side == SENDER else finding.receiver_offset
        if finding.kind == FindingKind.BODY_ALTERED and place is not None:
            places.add((finding.side, place))
    return places


def _chains(case: Case, verdict: StreamVerdict, runner: Runner) -> tuple[list[str], dict[str, dict[bytes, int | None]]]:
    """Verify the chains of the logs that are folders; give their sides, and where the exchanged heads are."""
    known, chained = {}, []
    for side in (SENDER, RECEIVER):
        log, evidence = case.side(side)
        known[side], heads = dict(evidence.heads), case.heads(side)
        if isinstance(log, FolderEnd):
            steps = [Verifying(log, segment.base, heads) for segment in log.folder().view().segments]
            results = runner.each(f"{case.plan.stream}: verifying the {side}'s chain", steps)
            segments = [result for result in results if result is not None]
            verdict.add(broken(side, evidence, segments))
            known[side] = known_heads(evidence, segments, heads)
            chained.append(side)
    return chained, known
