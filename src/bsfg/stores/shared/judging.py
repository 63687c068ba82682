"""Deciding for each fact of a batch whether it is new, a repeat or a conflict, and what is stored of it and said of it.

Whatever keeps the facts, the questions are these; a backend answers which offsets may hold a key and what is there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import FactBatch
from bsfg.columns import FACT_SCHEMA, STORED_SCHEMA, fixed_rows, int64_array, nulls
from bsfg.digest import is_digest_of
from bsfg.fact import Key, Origin
from bsfg.ports import GapRecord, OriginSpan, Quarantined, Receipt, Result
from bsfg.retention import GapReason
from bsfg.rows import Row
from bsfg.sealing import bodies, functions_of
from bsfg.stores.shared.frame import COLUMNS, FACT_ROWS, FEW_FACTS, ROWS, STORED_ROWS

Candidates = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Give for sorted hashes which of them may be known, by position, and the offset of each."""

Fetch = Callable[[np.ndarray], tuple[FactBatch, np.ndarray, np.ndarray]]
"""Give the stored facts at some offsets, which offsets were found, and which still have their bytes."""

Gone = Callable[[np.ndarray], np.ndarray]
"""Tell which of some offsets, whose facts could not be found, are on record as lost."""

_BYTES = ("subject", "predicate", "object", "artifact_digest")


@dataclass(slots=True)
class BatchJudgement:
    """What each row is; ``offsets`` holds the existing offset of repeats and conflicts, else -1."""

    results: np.ndarray
    offsets: np.ndarray
    collisions: set[int] = field(default_factory=set)
    repeats_of: dict[int, int] = field(default_factory=dict)
    """Rows that repeat or contradict an earlier row of the same batch, and which."""
    undecided: set[int] = field(default_factory=set)
    """Rows whose key is known and whose stored fact cannot be read: they may repeat or contradict it."""


def judge(
    batch: FactBatch, hashes: np.ndarray, order: np.ndarray, candidates: Candidates, fetch: Fetch, gone: Gone
) -> BatchJudgement:
    """Judge all rows of a batch; ``order`` sorts the hashes."""
    count = len(batch)
    verdict = BatchJudgement(np.zeros(count, dtype=np.int8), np.full(count, -1, dtype=np.int64))
    ranked = hashes[order]
    positions, offsets = candidates(ranked)
    if len(positions):
        _against_stored(batch, order[positions], offsets, fetch, gone, verdict)
    if count > 1 and (ranked[1:] == ranked[:-1]).any():
        _against_batch(batch, order, ranked, verdict)
    return verdict


def _against_stored(
    batch: FactBatch, rows: np.ndarray, offsets: np.ndarray, fetch: Fetch, gone: Gone, verdict: BatchJudgement
) -> None:
    by_offset = np.argsort(offsets, kind="stable")
    rows, offsets = rows[by_offset], offsets[by_offset]
    stored, found, retained = fetch(offsets)
    if not found.all():
        # The index knows a key that log and key segments cannot show any more. A fact that is on record as lost has no
        # key: who sends it again mends the harm. Of others the only answer that cannot create a second copy is that
        # they exist, unless the fact was found elsewhere; what came is kept aside.
        lost = np.flatnonzero(~found)
        lost = lost[~gone(offsets[lost])]
        lost = lost[~np.isin(rows[lost], rows[found])]
        _settle(verdict, rows[lost], offsets[lost], Result.ALREADY_EXISTS)
        verdict.undecided.update(rows[lost].tolist())
        rows, offsets = rows[found], offsets[found]
    if not len(rows):
        return
    mine = batch.take(rows)
    same_key = _equal(mine, stored, "from_zone") & _equal(mine, stored, "message_id")
    same_digest = (fixed_rows(mine.column("digest")) == fixed_rows(stored.column("digest"))).all(axis=1)
    differing = np.flatnonzero(same_key & ~same_digest)
    if len(differing):
        pairs = zip(stored.take(differing).digests(), bodies(mine.take(differing)), strict=True)
        same_digest[differing] = [is_digest_of(digest, body) for digest, body in pairs]
    same_bytes = np.ones(len(rows), dtype=bool)
    for name in _BYTES:
        same_bytes &= _equal(mine, stored, name)
    repeat = same_key & same_digest & (same_bytes | ~retained)
    collision = same_key & same_digest & ~same_bytes & retained
    conflict = same_key & ~same_digest
    _settle(verdict, rows[repeat], offsets[repeat], Result.ALREADY_EXISTS)
    _settle(verdict, rows[conflict | collision], offsets[conflict | collision], Result.CONFLICT)
    verdict.collisions.update(rows[collision].tolist())


def _settle(verdict: BatchJudgement, rows: np.ndarray, offsets: np.ndarray, result: Result) -> None:
    verdict.results[rows] = result
    verdict.offsets[rows] = offsets


def _equal(left: FactBatch, right: FactBatch, name: str) -> np.ndarray:
    """Compare two columns row by row; null equals null."""
    a, b = left.column(name), right.column(name)
    if a.null_count == 0 and b.null_count == 0:
        return np.asarray(pc.equal(a, b).to_numpy(zero_copy_only=False))
    both = pc.and_(pc.is_null(a), pc.is_null(b))
    equal = pc.or_(both, pc.fill_null(pc.equal(a, b), pa.scalar(False, pa.bool_())))
    return np.asarray(equal.to_numpy(zero_copy_only=False))


def _against_batch(batch: FactBatch, order: np.ndarray, ranked: np.ndarray, verdict: BatchJudgement) -> None:
    """Find keys that appear more than once in the batch itself: the first is stored, the others answer to it."""
    same = ranked[1:] == ranked[:-1]
    suspects = np.zeros(len(ranked), dtype=bool)
    suspects[1:] |= same
    suspects[:-1] |= same
    rows = np.sort(order[suspects])
    rows = rows[verdict.results[rows] == Result.INSERTED]
    if len(rows) < 2:
        return
    part = batch.take(rows)
    zones, ids = part.column("from_zone").to_pylist(), part.column("message_id").to_pylist()
    digests, functions, contents = part.digests(), functions_of(part), bodies(part)
    functions = functions if len(functions) > 1 else functions * len(part)
    first: dict[tuple[str, str], int] = {}
    for at, row in enumerate(rows.tolist()):
        earlier = first.setdefault((zones[at], ids[at]), at)
        if earlier == at:
            continue
        verdict.repeats_of[row] = int(rows[earlier])
        same_function, same_body = functions[earlier] == functions[at], contents[earlier] == contents[at]
        if same_body and (digests[earlier] == digests[at] or not same_function):
            verdict.results[row] = Result.ALREADY_EXISTS
            continue
        verdict.results[row] = Result.CONFLICT
        if same_function and digests[earlier] == digests[at]:
            verdict.collisions.add(row)


@dataclass(frozen=True, slots=True)
class AppendItem:
    """One caller's batch, with its origin when it goes to a forward buffer."""

    batch: FactBatch
    origin: OriginSpan | None = None


def receipts_of(items: Sequence[AppendItem], verdict: BatchJudgement, chain: bytes, now_unix_ms: int) -> list[Receipt]:
    """Give each caller its part of a judgement."""
    receipts, at = [], 0
    for item in items:
        rows = slice(at, at + len(item.batch))
        undecided = tuple(sorted(row - at for row in verdict.undecided if at <= row < rows.stop))
        receipts.append(Receipt(verdict.offsets[rows], verdict.results[rows], chain, now_unix_ms, undecided))
        at = rows.stop
    return receipts


def refused_of(
    batch: FactBatch, verdict: BatchJudgement, now_unix_ms: int, appended: Sequence[AppendItem], *, forward: bool
) -> list[Quarantined]:
    """Give what is to be kept aside before anyone is told: collisions, what cannot be compared, a receiver's conflicts.

    A producer learns of its conflict from the receipt.
    """
    conflicts = verdict.collisions
    if forward:
        conflicts = set(np.flatnonzero(verdict.results == int(Result.CONFLICT)).tolist())
    items = []
    starts = np.cumsum([0, *(len(item.batch) for item in appended)])
    for row in sorted(conflicts | verdict.undecided):
        facts = batch.slice(row, 1)
        key = Key(facts.column("from_zone")[0].as_py(), facts.column("message_id")[0].as_py())
        reason = "hash_collision" if row in verdict.collisions else "conflict"
        reason = "undecided" if row in verdict.undecided else reason
        at = int(np.searchsorted(starts, row, side="right")) - 1
        span = appended[at].origin
        origin = span.at(row - int(starts[at])) if span else None
        items.append(Quarantined(0, now_unix_ms, reason, key, int(verdict.offsets[row]), facts, origin=origin))
    return items


def payload_of(
    facts: FactBatch, fresh: np.ndarray, items: Sequence[AppendItem], *, forward: bool
) -> tuple[int, memoryview]:
    """Write the facts of a frame, a few as rows and more as columns; give the form, and the bytes."""
    spans, lengths = [item.origin for item in items], [len(item.batch) for item in items]
    if len(facts) <= FEW_FACTS:
        rows = facts.rows()
        if forward:
            rows = [row + origin for row, origin in zip(rows, origins_of(fresh, spans, lengths), strict=True)]
        return ROWS, memoryview((STORED_ROWS if forward else FACT_ROWS).write(rows))
    message = with_origins(facts.record_batch, fresh, spans, lengths).serialize() if forward else facts.to_message()
    return COLUMNS, memoryview(message)


def origins_of(fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]) -> list[Row]:
    """Give the origins of a few facts, one by one; see `with_origins`."""
    result: list[Row] = []
    ends = list(accumulate(lengths))
    for row in fresh.tolist():
        at = bisect_right(ends, row)
        result.append(_origin(spans[at], row - ends[at] + lengths[at]))
    return result


def _origin(span: OriginSpan | None, at: int) -> Row:
    if span is None:
        return (None, None, None, None)
    age = None if span.ages_ms is None else int(span.ages_ms[at])
    return span.zone, int(span.offsets[at]), int(span.appended_at_unix_ms[at]), age


def with_origins(
    facts: pa.RecordBatch, fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]
) -> pa.RecordBatch:
    """Put origins to facts: each span is that of so many rows, of which only the fresh ones are among the facts."""
    span = spans[0]
    if len(spans) == 1 and span is not None:
        zone = pa.repeat(pa.scalar(span.zone, pa.string()), len(fresh))
        ages = nulls(len(fresh), pa.int64()) if span.ages_ms is None else int64_array(span.ages_ms[fresh])
        columns = [zone, int64_array(span.offsets[fresh]), int64_array(span.appended_at_unix_ms[fresh]), ages]
    else:
        columns = _of_many(fresh, spans, lengths)
    return pa.RecordBatch.from_arrays([*facts.columns, *columns], schema=STORED_SCHEMA)


def _of_many(fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]) -> list[pa.Array]:
    zones = pa.array([span.zone if span else None for span in spans], type=pa.string())
    zone = zones.take(pa.array(np.repeat(np.arange(len(spans)), lengths)[fresh]))
    pairs = list(zip(spans, lengths, strict=True))
    offsets = np.concatenate([span.offsets if span else np.zeros(n) for span, n in pairs])
    times = np.concatenate([span.appended_at_unix_ms if span else np.zeros(n) for span, n in pairs])
    missing = zone.is_null().to_numpy(zero_copy_only=False)
    ages = np.concatenate([np.zeros(n) if span is None or span.ages_ms is None else span.ages_ms for span, n in pairs])
    ageless = np.repeat([span is None or span.ages_ms is None for span in spans], lengths)[fresh]
    return [
        zone,
        *(pa.array(values[fresh].astype(np.int64), mask=missing) for values in (offsets, times)),
        pa.array(ages[fresh].astype(np.int64), mask=ageless),
    ]


KEY_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("from_zone", pa.string()),
        pa.field("message_id", pa.string()),
        pa.field("digest", pa.binary(32)),
        pa.field("appended_at_unix_ms", pa.int64()),
    ]
)
"""What stays of entries whose bytes are gone, so that their repeats are known."""


def key_rows(keys: pa.RecordBatch, offsets: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
    """Give the key rows at some offsets, and which of the offsets were found."""
    known = keys.column("offset").to_numpy()
    at = np.searchsorted(known, offsets)
    found = at < len(known)
    found[found] = known[at[found]] == offsets[found]
    return keys.take(pa.array(at[found])), found


def as_facts(keys: pa.RecordBatch) -> FactBatch:
    """Give key rows the shape of facts, with everything but the key and the digest null."""
    count = keys.num_rows
    arrays = [
        keys.column(field.name) if field.name in keys.schema.names else pa.nulls(count, field.type)
        for field in FactBatch.schema
    ]
    return FactBatch(pa.RecordBatch.from_arrays(arrays, schema=FactBatch.schema), sealed=True)


LOST = (GapReason.DAMAGED, GapReason.LOST, GapReason.TORN)
"""The reasons for which entries that were acknowledged are not there."""


def lost_among(offsets: np.ndarray, gaps: Sequence[GapRecord]) -> np.ndarray:
    """Tell which offsets are on record as damaged, lost or torn."""
    lost = [(gap.first, gap.last) for gap in gaps if gap.reason in LOST]
    return np.array([any(first <= at <= last for first, last in lost) for at in offsets.tolist()], dtype=bool)


Identity = tuple[str, Key, bytes]
"""What makes two refused facts the same one: a fact that is sent again is not kept twice."""


def identity_of(item: Quarantined) -> Identity:
    """Give what makes a refused fact this one."""
    return item.reason, item.key, bodies(item.facts)[0]


def identity_hash(identity: Identity) -> int:
    """Give a number of 64 bits to find a refused fact by; whoever finds one compares the whole."""
    reason, key, body = identity
    said = "\0".join((reason, key.from_zone, key.message_id)).encode() + b"\0" + body
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")


def told(item: Quarantined, same: int) -> tuple[dict[str, Any], bytes]:
    """Write one refused fact: what is known of it, and the fact; ``same`` is its `identity_hash`."""
    head = {
        "id": item.id,
        "at_unix_ms": item.at_unix_ms,
        "reason": item.reason,
        "from_zone": item.key.from_zone,
        "message_id": item.key.message_id,
        "existing_offset": item.existing_offset,
        "detail": item.detail,
        "origin": list(astuple(item.origin)) if item.origin is not None else None,
        "same": f"{same:016x}",
    }
    return head, item.facts.record_batch.serialize().to_pybytes()


def read_aside(head: dict[str, Any], blob: bytes) -> Quarantined:
    """Read one refused fact."""
    facts = FactBatch(pa.ipc.read_record_batch(pa.py_buffer(blob), FACT_SCHEMA), sealed=True)
    return Quarantined(
        id=head["id"],
        at_unix_ms=head["at_unix_ms"],
        reason=head["reason"],
        key=Key(head["from_zone"], head["message_id"]),
        existing_offset=head["existing_offset"],
        facts=facts,
        detail=head["detail"],
        # Notes of versions before 0.2 do not say it.
        origin=Origin(*origin) if (origin := head.get("origin")) else None,
    )
