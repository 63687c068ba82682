"""The audit of one stream of a link, from the first look at both ends to the verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bsfg.spark.audit import chains, judging
from bsfg.spark.audit.case import Case, StreamPlan, open_case, stretches
from bsfg.spark.audit.checks import checks_of, exchanged, range_states
from bsfg.spark.audit.compare import Detail
from bsfg.spark.audit.ends import FolderEnd
from bsfg.spark.audit.excuses import IN_FLIGHT
from bsfg.spark.audit.letgo import check_let_go
from bsfg.spark.audit.ranges import compare_ranges
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import RECEIVER, SENDER
from bsfg.spark.audit.settle import Place, Searching, duplicates, open_keys, settle
from bsfg.spark.audit.verdict import QUARANTINE_MAX, EndState, Finding, Kind, StreamVerdict, merged_absences


def audit_stream(plan: StreamPlan, runner: Runner) -> StreamVerdict:
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
    return EndState(
        log.name,
        evidence.log_id,
        evidence.start,
        evidence.end,
        evidence.chain_head.hex(),
        sum(each.read for each in read),
        sum(each.size_bytes for each in read),
        len(evidence.gaps),
        len(evidence.set_aside),
    )


def _settle(case: Case, verdict: StreamVerdict, details: Sequence[Detail], runner: Runner) -> None:
    """Search the receiver's whole log for what is open, and for keys that it has more than once."""
    wanted = open_keys(details, case.repeated)
    places: list[Place] = []
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
    known = {finding.receiver_offset for finding in verdict.findings if finding.kind == Kind.DUPLICATED}
    repeated = set(case.repeated.tolist())
    verdict.add(duplicates([place for place in places if place.key in repeated], known, case.scope))


def _add_rest(case: Case, verdict: StreamVerdict) -> None:
    """Add what needs no comparison: order, bodies, damage, records, histories."""
    misplaced = (Kind.DUPLICATED, Kind.EXTRA, Kind.OUT_OF_ORDER)
    known = {finding.receiver_offset for finding in verdict.findings if finding.kind in misplaced}
    verdict.add(judging.order_findings(case.totals.side(RECEIVER), case.excuses, known, case.sibling))
    verdict.add(judging.body_findings(case.totals.stretches, _named_bodies(verdict.findings)))
    for side in (SENDER, RECEIVER):
        gaps = judging.own_gaps(case.totals.side(side))
        verdict.add(judging.damage(side, case.side(side)[1], gaps))
        verdict.add(judging.unreadable(case.totals.side(side)))
    verdict.add(judging.reports(case.scope, case.sender, case.receiver, case.frontier))
    verdict.add(judging.histories(case.sender, case.receiver))


def _named_bodies(findings: Sequence[Finding]) -> set[tuple[str, int]]:
    """Give side and place of the altered bodies that are named already."""
    places = set()
    for finding in findings:
        place = finding.offset if finding.side == SENDER else finding.receiver_offset
        if finding.kind == Kind.BODY_ALTERED and place is not None:
            places.add((finding.side, place))
    return places


def _chains(case: Case, verdict: StreamVerdict, runner: Runner) -> tuple[list[str], dict[str, dict[bytes, int | None]]]:
    """Verify the chains of the logs that are folders; give their sides, and where the exchanged heads are."""
    wanted = {SENDER: case.told_to_receiver, RECEIVER: case.told_to_sender}
    known = {side: dict(case.side(side)[1].heads) for side in wanted}
    chained = []
    for side, heads in wanted.items():
        log, evidence = case.side(side)
        if isinstance(log, FolderEnd):
            steps = [chains.Verifying(log, base, heads) for base in chains.segments_of(log)]
            results = runner.each(f"{case.plan.stream}: verifying the {side}'s chain", steps)
            segments = [result for result in results if result is not None]
            verdict.add(chains.broken(side, evidence, segments))
            known[side] = chains.known_heads(evidence, segments, heads)
            chained.append(side)
    return chained, known
