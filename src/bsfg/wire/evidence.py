"""What a log shows of itself for an audit, between the messages of the protocol and the values of the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bsfg.errors import InvalidArgument
from bsfg.gaps import grouped, listed
from bsfg.ports import Buffer, Checkpoint, ConsumerSpec, ConsumerState, GapSet, StartAt
from bsfg.rangedigest import History, KeptRange, Restore
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import gap_message, gap_of, gap_set_message, gap_set_of

HEADS_MAX = 16


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """One log at one moment: where it begins and ends, its gaps, its past, and the caller's own consumers of it."""

    log_id: str
    start: int
    end: int
    chain_head: bytes
    gaps: Sequence[GapSet] = ()
    history: History = field(default_factory=History)
    cursors: Sequence[ConsumerState] = ()


def heads_of(request: pb.GetEvidenceRequest) -> list[bytes]:
    """Read which heads are looked for, a bounded number of them."""
    if len(request.heads) > HEADS_MAX:
        raise InvalidArgument(f"{len(request.heads)} heads are asked for, the limit is {HEADS_MAX}")
    return list(request.heads)


def evidence_message(found: LogEvidence, *, sets: bool = False) -> pb.GetEvidenceResponse:
    """Write the evidence of a log, its gap records as sets for those who know them."""
    history = found.history
    return pb.GetEvidenceResponse(
        log_id=found.log_id,
        start=found.start,
        end=found.end,
        chain_head=found.chain_head,
        gaps=[] if sets else [gap_message(gap) for gap in listed(found.gaps)],
        gap_sets=[gap_set_message(each) for each in found.gaps] if sets else [],
        kept=[_kept_message(kept) for kept in history.kept],
        cursors=[_cursor_message(state) for state in found.cursors],
        heads=[pb.HeadEvidence(head=head, offset=offset) for head, offset in history.heads.items()],
        restores=[_restore_message(each) for each in history.restores],
    )


def evidence_of(found: pb.GetEvidenceResponse, stream: str, buffer: Buffer) -> LogEvidence:
    """Read the evidence of a log."""
    heads = {each.head: each.offset if each.HasField("offset") else None for each in found.heads}
    return LogEvidence(
        found.log_id,
        found.start,
        found.end,
        found.chain_head,
        grouped([*(gap_of(gap) for gap in found.gaps), *(gap_set_of(each) for each in found.gap_sets)]),
        History(
            tuple(_kept_of(kept) for kept in found.kept),
            heads,
            tuple(Restore(each.first, each.at_unix_ms, each.was_log_id) for each in found.restores),
        ),
        [_cursor_of(each, stream, buffer, found.log_id) for each in found.cursors],
    )


def _restore_message(restore: Restore) -> pb.RestoreEvidence:
    return pb.RestoreEvidence(first=restore.first, at_unix_ms=restore.at_unix_ms, was_log_id=restore.was_log_id)


def _kept_message(kept: KeptRange) -> pb.KeptRange:
    return pb.KeptRange(
        first=kept.first,
        last=kept.last,
        range_digest=kept.range_digest,
        chain_before=kept.chain_before,
        chain_after=kept.chain_after,
    )


def _kept_of(found: pb.KeptRange) -> KeptRange:
    return KeptRange(found.first, found.last, found.range_digest, found.chain_before, found.chain_after)


def _cursor_message(state: ConsumerState) -> pb.CursorEvidence:
    return pb.CursorEvidence(
        name=state.spec.name,
        committed=state.checkpoint.committed,
        start=state.spec.start,
        start_value=state.spec.start_value,
        peer_head=state.peer_head,
    )


def _cursor_of(found: pb.CursorEvidence, stream: str, buffer: Buffer, log_id: str) -> ConsumerState:
    try:
        start = StartAt(found.start)
    except ValueError:
        raise InvalidArgument(f"a consumer starts at {found.start[:80]!r}, which is not known here") from None
    return ConsumerState(
        ConsumerSpec(found.name, stream, buffer, start, found.start_value),
        Checkpoint(found.committed + 1, found.committed),
        (),
        log_id,
        0,
        peer_head=found.peer_head if found.HasField("peer_head") else None,
    )
