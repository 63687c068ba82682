"""Between the messages of the protocol and the values of the product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

import numpy as np
import orjson

from bsfg.batch import FactBatch
from bsfg.digest import KeptRange, LogHistory, Restore
from bsfg.errors import FrameInvalid, InvalidArgument, InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE, SHA256_NAME, ArtifactRef, Entry, Envelope, Fact, Message, Origin
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.gaps import RANGES_TOLD_MAX, RangeSet, grouped, listed_in_steps
from bsfg.journey.link import Fetched, PeerPosition, Refusal, Release
from bsfg.journey.sums import RECEIVER, SENDER, AuditScope, Descent, Named, RangeSum, RangeSums, Summation
from bsfg.jsonform import artifact_to_dict
from bsfg.ports import Buffer, Checkpoint, Confirmation, ConsumerSpec, ConsumerState, GapRecord, GapSet, StartAt
from bsfg.retention import GapReason
from bsfg.wire import admin_pb2 as admin_pb
from bsfg.wire import boundary_pb2 as pb

Value = TypeVar("Value")

_BUFFERS: dict[int, Buffer] = {pb.BUFFER_STORE: Buffer.STORE, pb.BUFFER_FORWARD: Buffer.FORWARD}
_ARTIFACT_FIELDS: tuple[Any, ...] = tuple(ArtifactRef.__dataclass_fields__)
_NUMBERS: dict[Buffer, pb.Buffer] = {Buffer.STORE: pb.BUFFER_STORE, Buffer.FORWARD: pb.BUFFER_FORWARD}


def as_value(found: Any, kind: Callable[..., Value], **instead: Any) -> Value:
    """Read a message as a value: its fields of the same names, None for what a message leaves out, others ``instead``.

    What the value alone has gets its default.
    """
    given = {
        name: getattr(found, name) if is_there or found.HasField(name) else None
        for name, is_there in _shared(found.__class__, kind, (*instead,))
    }
    return kind(**given, **instead)


def as_message(kind: Callable[..., Value], value: Any, **instead: Any) -> Value:
    """Write a value as a message likewise."""
    return kind(**{name: getattr(value, name) for name, _ in _shared(kind, value.__class__, (*instead,))}, **instead)


@cache
def _shared(message: Any, value: Any, others: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Name the fields that a message and a value both have, but for others, and say which a message always has."""
    known = message.DESCRIPTOR.fields_by_name
    names = [each.name for each in fields(value) if each.name in known and each.name not in others]
    return [(name, not known[name].has_presence) for name in names]


def buffer_of(number: int, default: Buffer) -> Buffer:
    """Give the buffer a message means."""
    if number == pb.BUFFER_UNSPECIFIED:
        return default
    found = _BUFFERS.get(number)
    if found is None:
        raise InvalidArgument(f"there is no buffer number {number}")
    return found


def filter_message(wanted: FactFilter) -> pb.FactFilter | None:
    """Write which facts are asked for; a filter that wants all is none."""
    return pb.FactFilter(**asdict(wanted)) if wanted else None


def filter_of(request: pb.FetchRequest | pb.FetchFramesRequest | pb.SumFactsRequest) -> FactFilter:
    """Give which facts a request asks for; raises `InvalidArgument` for a filter that no node tries."""
    if not request.HasField("filter"):
        return EVERY_FACT
    found = request.filter
    lists = {name: tuple(getattr(found, name)) for name in ("subjects", "predicates", "from_zones", "to_zones")}
    return as_value(found, FactFilter, **lists)


def buffer_number(buffer: Buffer) -> pb.Buffer:
    """Give the number of a buffer in messages."""
    return _NUMBERS[buffer]


def single_fact(request: pb.AppendRequest) -> FactBatch:
    """Lay the one fact of a request out as a batch; the cheapest way from the wire to a buffer."""
    if not request.HasField("envelope") or not request.HasField("fact"):
        raise InvalidFact("a message has an envelope and a fact", rule="is required")
    envelope, fact = request.envelope, request.fact
    artifact = artifact_of(fact.artifact) if fact.HasField("artifact") else None
    labels = dict(envelope.labels)
    row = (
        envelope.message_id if envelope.HasField("message_id") else None,
        envelope.from_zone,
        envelope.to_zone,
        envelope.produced_at_unix_ms,
        envelope.correlation_id if envelope.HasField("correlation_id") else None,
        envelope.causation_id if envelope.HasField("causation_id") else None,
        orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode() if labels else None,
        envelope.object_media_type if envelope.HasField("object_media_type") else JSON_MEDIA_TYPE,
        envelope.object_schema if envelope.HasField("object_schema") else None,
        envelope.signature if envelope.HasField("signature") else None,
        fact.subject,
        fact.predicate,
        fact.object,
        orjson.dumps(artifact_to_dict(artifact), option=orjson.OPT_SORT_KEYS).decode() if artifact else None,
        artifact.digest if artifact else None,
        None,
    )
    return FactBatch.of_rows([row])


def envelope_message(envelope: Envelope) -> pb.Envelope:
    """Write an envelope."""
    return as_message(pb.Envelope, envelope, labels=dict(envelope.labels))


def envelope_of(found: pb.Envelope) -> Envelope:
    """Read an envelope."""
    media_type = found.object_media_type if found.HasField("object_media_type") else JSON_MEDIA_TYPE
    return as_value(found, Envelope, labels=dict(found.labels), object_media_type=media_type)


def fact_message(fact: Fact) -> pb.Fact:
    """Write a fact."""
    artifact = pb.ArtifactRef(**artifact_to_dict(fact.artifact)) if fact.artifact is not None else None
    return pb.Fact(subject=fact.subject, predicate=fact.predicate, object=fact.object, artifact=artifact)


def fact_of(found: pb.Fact) -> Fact:
    """Read a fact."""
    artifact = artifact_of(found.artifact) if found.HasField("artifact") else None
    return Fact(found.subject, found.predicate, found.object, artifact)


def artifact_of(found: pb.ArtifactRef) -> ArtifactRef:
    """Read an artifact reference; only its digest is always there."""
    given = {name: getattr(found, name) for name in _ARTIFACT_FIELDS if name == "digest" or found.HasField(name)}
    return ArtifactRef(**given)


def entry_message(entry: Entry) -> pb.Entry:
    """Write an entry."""
    return pb.Entry(
        offset=entry.offset,
        appended_at_unix_ms=entry.appended_at_unix_ms,
        envelope=envelope_message(entry.message.envelope),
        fact=fact_message(entry.message.fact),
        digest=entry.digest,
        origin=as_message(pb.Origin, entry.origin) if entry.origin is not None else None,
        hasher=None if entry.hasher == SHA256_NAME else entry.hasher,
    )


def entry_of(found: pb.Entry) -> Entry:
    """Read an entry."""
    origin = as_value(found.origin, Origin) if found.HasField("origin") else None
    message = Message(envelope_of(found.envelope), fact_of(found.fact))
    hasher = found.hasher if found.HasField("hasher") else SHA256_NAME
    return Entry(found.offset, found.appended_at_unix_ms, message, found.digest, origin, hasher)


def gap_message(gap: GapRecord) -> pb.GapRecord:
    """Write a gap record."""
    return as_message(pb.GapRecord, gap)


def gap_of(found: pb.GapRecord) -> GapRecord:
    """Read a gap record; a reason that nobody knows makes the frame invalid."""
    try:
        reason = GapReason(found.reason)
    except ValueError:
        raise FrameInvalid(f"a gap record has the unknown reason {found.reason[:80]!r}") from None
    return as_value(found, GapRecord, reason=reason)


def gap_set_message(gaps: GapSet) -> pb.GapSet:
    """Write a set of gap records."""
    return as_message(pb.GapSet, gaps, ranges=gaps.ranges.encode())


def gap_set_of(found: pb.GapSet) -> GapSet:
    """Read a set of gap records; a reason that nobody knows, or ranges that are none, make the frame invalid."""
    try:
        reason = GapReason(found.reason)
    except ValueError:
        raise FrameInvalid(f"a set of gap records has the unknown reason {found.reason[:80]!r}") from None
    return as_value(found, GapSet, reason=reason, ranges=RangeSet.decode(found.ranges))


def gap_sets_of(found: Sequence[pb.GapSet]) -> list[GapSet]:
    """Read the sets of one message; more ranges than anybody may tell at once make it invalid before they are made."""
    check_ranges(ranges_in(found))
    return [gap_set_of(each) for each in found]


def ranges_in(found: Iterable[pb.GapSet]) -> int:
    """Count the ranges of sets that are not read yet."""
    return sum(RangeSet.counted(each.ranges) for each in found)


def check_ranges(count: int) -> None:
    """Raise `FrameInvalid` when somebody tells of more ranges at once than he may."""
    if count > RANGES_TOLD_MAX:
        raise FrameInvalid(f"{count} ranges are told at once, the limit is {RANGES_TOLD_MAX}", limit=RANGES_TOLD_MAX)


def refusal_message(refusal: Refusal) -> pb.Refusal:
    """Write a refusal."""
    return as_message(pb.Refusal, refusal)


def refusal_of(found: pb.Refusal) -> Refusal:
    """Read a refusal."""
    return as_value(found, Refusal)


def confirm_request(consumer: str, confirmation: Confirmation) -> pb.ConfirmRequest:
    """Write a confirmation, without refusals."""
    ranges = [pb.Range(first=first, last=last) for first, last in confirmation.ranges]
    return as_message(pb.ConfirmRequest, confirmation, consumer=consumer, ranges=ranges)


def confirmation_of(found: pb.ConfirmRequest) -> Confirmation:
    """Read a confirmation."""
    return as_value(found, Confirmation, ranges=tuple((each.first, each.last) for each in found.ranges))


def position_message(position: PeerPosition) -> admin_pb.PeerPosition:
    """Write what is remembered of a sender."""
    return admin_pb.PeerPosition(**asdict(position))


def release_message(release: Release) -> admin_pb.Release:
    """Write what an operator accepted."""
    return admin_pb.Release(**asdict(release))


def release_of(found: admin_pb.Release) -> Release:
    """Read what an operator accepted."""
    return as_value(found, Release)


def position_of(found: admin_pb.PeerPosition) -> PeerPosition:
    """Read what is remembered of a sender."""
    return as_value(found, PeerPosition, released=release_of(found.released) if found.HasField("released") else None)


HEADS_MAX = 16


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """One log at one moment: where it begins and ends, its gaps, its past, and the caller's own consumers of it."""

    log_id: str
    start: int
    end: int
    chain_head: bytes
    gaps: Sequence[GapSet] = ()
    history: LogHistory = field(default_factory=LogHistory)
    cursors: Sequence[ConsumerState] = ()


def heads_of(request: pb.GetEvidenceRequest) -> list[bytes]:
    """Read which heads are looked for, a bounded number of them."""
    if len(request.heads) > HEADS_MAX:
        raise InvalidArgument(f"{len(request.heads)} heads are asked for, the limit is {HEADS_MAX}")
    return list(request.heads)


GAPS_AT_ONCE = 64


def listed_gaps(gaps: Sequence[GapSet], answer: Callable[..., Any]) -> Iterator[bytes]:
    """Write gap records one by one, for those who know no sets, in pieces that an answer of this type is made of."""
    for some in listed_in_steps(gaps, GAPS_AT_ONCE):
        yield answer(gaps=map(gap_message, some)).SerializeToString()


def evidence_pieces(found: LogEvidence, *, sets: bool = False) -> Iterator[bytes]:
    """Write the evidence of a log, its gap records as sets for those who know them, in the pieces of a message."""
    history = found.history
    yield pb.GetEvidenceResponse(
        log_id=found.log_id,
        start=found.start,
        end=found.end,
        chain_head=found.chain_head,
        gap_sets=[gap_set_message(each) for each in found.gaps] if sets else [],
        kept=[pb.KeptRange(**asdict(kept)) for kept in history.kept],
        cursors=[_cursor_message(state) for state in found.cursors],
        heads=[pb.HeadEvidence(head=head, offset=offset) for head, offset in history.heads.items()],
        restores=[pb.RestoreEvidence(**asdict(each)) for each in history.restores],
    ).SerializeToString()
    if not sets:
        yield from listed_gaps(found.gaps, pb.GetEvidenceResponse)


def evidence_of(found: pb.GetEvidenceResponse, stream: str, buffer: Buffer) -> LogEvidence:
    """Read the evidence of a log."""
    heads = {each.head: each.offset if each.HasField("offset") else None for each in found.heads}
    return LogEvidence(
        found.log_id,
        found.start,
        found.end,
        found.chain_head,
        grouped([*(gap_of(gap) for gap in found.gaps), *(gap_set_of(each) for each in found.gap_sets)]),
        LogHistory(
            tuple(as_value(kept, KeptRange) for kept in found.kept),
            heads,
            tuple(as_value(each, Restore) for each in found.restores),
        ),
        [_cursor_of(each, stream, buffer, found.log_id) for each in found.cursors],
    )


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


SECRET_BYTES = 32
RANGE_FACTS_MIN, RANGE_FACTS_MAX = 16, 1 << 20
"""How large the ranges are that a node sums up: with smaller ones it could as well give the entries."""


@dataclass(frozen=True, slots=True)
class SumCall:
    """A range of a log (``end`` exclusive) that its node is to sum up, as one side of a link."""

    stream: str
    buffer: Buffer
    side: str
    first: int
    end: int
    scope: AuditScope


@dataclass(frozen=True, slots=True)
class SumOutcome:
    """What a node found in as much of a range as it did at once, the hashed keys beside, and which log that is."""

    log_id: str
    log_end: int
    found: RangeSums
    keys: np.ndarray


def sum_request(call: SumCall) -> pb.SumFactsRequest:
    """Write what is to be summed up."""
    scope, received = call.scope, call.side == RECEIVER
    return pb.SumFactsRequest(
        stream=call.stream,
        buffer=buffer_number(call.buffer),
        first=call.first,
        end=call.end,
        secret=scope.secret,
        range_facts=scope.range_facts,
        bodies=scope.deep,
        origin_zone=scope.zone if received else None,
        origin_first=scope.first if received else 0,
        origin_end=scope.end if received else 0,
        shared=scope.shared and received,
        relayed=scope.relayed and received,
        carry_only=() if received else sorted(scope.carry_only),
        receiver_zone=None if received else scope.receiver_zone,
        filter=None if received else filter_message(scope.asked),
    )


def sum_call_of(request: pb.SumFactsRequest) -> SumCall:
    """Read what is to be summed up; raises `InvalidArgument` for what no node does."""
    if len(request.secret) != SECRET_BYTES:
        raise InvalidArgument(f"the secret has {len(request.secret)} bytes, it needs {SECRET_BYTES}", field="secret")
    if not RANGE_FACTS_MIN <= request.range_facts <= RANGE_FACTS_MAX:
        bounds = f"{RANGE_FACTS_MIN} to {RANGE_FACTS_MAX}"
        raise InvalidArgument(f"ranges have {bounds} offsets, not {request.range_facts}", field="range_facts")
    side = RECEIVER if request.HasField("origin_zone") else SENDER
    scope = AuditScope(
        request.origin_zone,
        request.secret,
        request.origin_first,
        request.origin_end,
        request.receiver_zone if request.HasField("receiver_zone") else None,
        frozenset(request.carry_only),
        request.relayed,
        request.shared,
        request.range_facts,
        request.bodies,
        filter_of(request),
    )
    buffer = buffer_of(request.buffer, Buffer.FORWARD if side == RECEIVER else Buffer.STORE)
    return SumCall(request.stream, buffer, side, request.first, request.end, scope)


def sums_response(head: Fetched, summation: Summation) -> bytes:
    """Write what was found."""
    found = summation.found
    sums = list(found.ranges.values())
    response: bytes = pb.SumFactsResponse(
        log_id=head.log_id,
        log_end=head.end,
        end=summation.next_offset,
        facts=found.read,
        size_bytes=found.size_bytes,
        numbers=list(found.ranges),
        counts=[each.count for each in sums],
        first_sums=[each.first_lane for each in sums],
        second_sums=[each.second_lane for each in sums],
        first_places=[each.first_place for each in sums],
        last_places=[each.last_place for each in sums],
        left_out=found.left_out,
        gap_sets=[gap_set_message(each) for each in grouped([*found.gaps, *found.gap_sets])],
        altered=map(_named_message, found.altered),
        altered_count=found.altered_count,
        descents=[
            pb.EntryDescent(entry=_named_message(each.entry), behind=_named_message(each.behind))
            for each in found.descents
        ],
        descents_count=found.descents_count,
        lowest=found.lowest,
        highest=found.highest,
        first_entry=_named_message(found.first_entry) if found.first_entry is not None else None,
        last_entry=_named_message(found.last_entry) if found.last_entry is not None else None,
        paths=[pb.EntryPath(origin_zone=origin, from_zone=source) for origin, source in found.paths],
        keys=summation.keys.astype("<u8").tobytes(),
    ).SerializeToString()
    return response


def sums_of(answer: pb.SumFactsResponse, call: SumCall) -> SumOutcome:
    """Read what a node found; raises `FrameInvalid` for what no log can hold there."""
    gaps = gap_sets_of(answer.gap_sets)
    if not (
        call.first < answer.end <= call.end
        and _covers(answer, call, gaps)
        and _is_even(answer, call)
        and _is_told_of(answer, call)
    ):
        raise FrameInvalid(f"a node summed up {call.first} to {call.end} and told what cannot be")
    columns = (answer.counts, answer.first_sums, answer.second_sums, answer.first_places, answer.last_places)
    found = RangeSums(
        call.side,
        call.first,
        answer.end,
        dict(zip(answer.numbers, map(RangeSum, *columns), strict=True)),
        answer.facts,
        answer.size_bytes,
        dict(answer.left_out),
        gap_sets=gaps,
        altered=list(map(_named_of, answer.altered)),
        altered_count=answer.altered_count,
        descents=[Descent(_named_of(each.entry), _named_of(each.behind)) for each in answer.descents],
        descents_count=answer.descents_count,
        lowest=answer.lowest if answer.HasField("lowest") else None,
        highest=answer.highest if answer.HasField("highest") else None,
        first_entry=_named_of(answer.first_entry) if answer.HasField("first_entry") else None,
        last_entry=_named_of(answer.last_entry) if answer.HasField("last_entry") else None,
        paths={
            (
                each.origin_zone if each.HasField("origin_zone") else None,
                each.from_zone if each.HasField("from_zone") else None,
            )
            for each in answer.paths
        },
        wire_bytes=answer.ByteSize(),
    )
    keys = np.frombuffer(answer.keys, dtype="<u8").astype(np.uint64)
    return SumOutcome(answer.log_id, answer.log_end, found, keys)


def _covers(answer: pb.SumFactsResponse, call: SumCall, gaps: Sequence[GapSet]) -> bool:
    """Tell whether every offset up to the answer's end is an entry that was looked at, or in one of its gaps."""
    ranges = [each.ranges for each in gaps if len(each.ranges)]
    inside = all(call.first <= int(each.firsts[0]) and int(each.lasts[-1]) < answer.end for each in ranges)
    absent = sum(int((each.lasts - each.firsts + 1).sum()) for each in ranges)
    summed, left_out = sum(answer.counts), sum(answer.left_out.values())
    told = summed + left_out == answer.facts if call.side == SENDER else summed <= answer.facts and not left_out
    counts = (*answer.counts, *(count + 1 for count in answer.left_out.values()), answer.size_bytes + 1)
    return inside and told and min(counts) > 0 and answer.facts + absent == answer.end - call.first


def _is_even(answer: pb.SumFactsResponse, call: SumCall) -> bool:
    """Tell whether there is one of everything for each range, in its places, and one key for each entry."""
    columns = (answer.counts, answer.first_sums, answer.second_sums, answer.first_places, answer.last_places)
    keyed = answer.facts if call.side == RECEIVER else 0
    places = zip(answer.first_places, answer.last_places, strict=False)
    return (
        all(len(column) == len(answer.numbers) for column in columns)
        and len(set(answer.numbers)) == len(answer.numbers)
        and len(answer.keys) == 8 * keyed
        and all(call.first <= first <= last < answer.end for first, last in places)
    )


def _is_told_of(answer: pb.SumFactsResponse, call: SumCall) -> bool:
    """Tell whether everything that is named is of what was asked for, and no less is counted than named."""
    scope, received = call.scope, call.side == RECEIVER
    first, end = (scope.first, scope.end) if received else (call.first, answer.end)
    outer = ("lowest", "highest", "first_entry", "last_entry")
    numbers = answer.numbers or [first // scope.range_facts]
    if received and answer.numbers:
        lowest, highest = answer.lowest, answer.highest
        exact = (lowest // scope.range_facts, highest // scope.range_facts) == (min(numbers), max(numbers))
        if not exact or not first <= lowest <= highest < end:
            return False
        first, end = lowest, highest + 1
    named = [*answer.altered, *(each for pair in answer.descents for each in (pair.entry, pair.behind))]
    named += [each for each in (answer.first_entry, answer.last_entry) if received and answer.numbers]
    return (
        all(answer.HasField(name) == (received and bool(answer.numbers)) for name in outer)
        and all(call.first <= each.place < answer.end and first <= each.offset < end for each in named)
        and len(answer.altered) <= answer.altered_count <= answer.facts
        and len(answer.descents) <= answer.descents_count <= (answer.facts if received else 0)
        and (received or not answer.paths)
        and first // scope.range_facts <= min(numbers)
        and max(numbers) <= (end - 1) // scope.range_facts
    )


def _named_message(entry: Named) -> pb.NamedEntry:
    return as_message(pb.NamedEntry, entry)


def _named_of(found: pb.NamedEntry) -> Named:
    return as_value(found, Named)
