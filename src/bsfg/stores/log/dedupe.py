"""Deciding for each fact of a batch whether it is new, a repeat or a conflict, and what is stored beside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import FactBatch
from bsfg.columns import STORED_SCHEMA, fixed_rows, int64_array, nulls
from bsfg.digest import is_digest_of
from bsfg.ports import OriginSpan, Result
from bsfg.rows import Row
from bsfg.sealing import bodies, functions_of
from bsfg.stores.log.files import Files
from bsfg.stores.log.frame import Damaged, Torn
from bsfg.stores.log.index import KeyIndex
from bsfg.stores.log.keysegments import KeySegmentName, KeySegments, as_facts, read
from bsfg.stores.log.view import LogView

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
    batch: FactBatch, hashes: np.ndarray, order: np.ndarray, index: KeyIndex, fetch: Fetch, gone: Gone
) -> BatchJudgement:
    """Judge all rows of a batch; ``order`` sorts the hashes."""
    count = len(batch)
    verdict = BatchJudgement(np.zeros(count, dtype=np.int8), np.full(count, -1, dtype=np.int64))
    ranked = hashes[order]
    positions, offsets = index.candidates(ranked)
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


_Rows = tuple[FactBatch, np.ndarray]
"""Facts, and which of the offsets that were asked for they belong to."""


def stored_facts(view: LogView, keys: KeySegments) -> Fetch:
    """Give the function that fetches facts at sorted offsets."""

    def fetch(offsets: np.ndarray) -> tuple[FactBatch, np.ndarray, np.ndarray]:
        found = np.zeros(len(offsets), dtype=bool)
        parts: list[FactBatch] = []
        retained: list[np.ndarray] = []
        at = 0
        while at < len(offsets):
            rows, count, kept = _fetch_from(view, keys, offsets, at)
            if rows is not None:
                facts, mask = rows
                found[at : at + count] = mask
                parts.append(facts)
                retained.append(np.full(len(facts), kept))
            at += count
        if not parts:
            return FactBatch.empty(), found, np.zeros(0, dtype=bool)
        return FactBatch.concat(parts), found, np.concatenate(retained)

    return fetch


def _fetch_from(view: LogView, keys: KeySegments, offsets: np.ndarray, at: int) -> tuple[_Rows | None, int, bool]:
    """Fetch all offsets that lie in the same frame or key segment as the one at ``at``."""
    offset = int(offsets[at])
    name = keys.covering(offset)
    if name is not None:
        count = int(np.searchsorted(offsets, name.last, side="right")) - at
        rows = keys.rows(name, offsets[at : at + count])
        return ((as_facts(rows[0]), rows[1]) if rows else None), count, False
    frame = view.frame_at(offset)
    if frame is None:
        return None, 1, False
    facts, base, end = frame
    count = int(np.searchsorted(offsets, end, side="left")) - at
    return (facts.take(offsets[at : at + count] - base), np.ones(count, dtype=bool)), count, True


def keys_between(
    view: LogView, files: Files, folder: str, names: Sequence[KeySegmentName], first: int, last: int
) -> Iterator[tuple[FactBatch, np.ndarray]]:
    """Give the facts of a range of offsets, both ends included, with the offsets; what cannot be read is left out."""
    for name in names:
        table = read(files, folder, name) if name.first <= last and name.last >= first else None
        if table is not None:
            offsets = table.column("offset").to_numpy()
            inside = np.flatnonzero((offsets >= first) & (offsets <= last))
            yield as_facts(table).take(inside), offsets[inside]
    for segment in view.segments:
        if segment.base > last:
            break
        for ref in segment.frames:
            if ref.end <= first or ref.base > last:
                continue
            try:
                facts = segment.entries(ref).facts
            except (Torn, Damaged):
                continue
            start, stop = max(first, ref.base), min(last + 1, ref.end)
            yield facts.slice(start - ref.base, stop - start), np.arange(start, stop)


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
