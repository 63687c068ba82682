"""Deciding for each fact of a batch whether it is new, a repeat or a conflict.

Nearly all batches are wholly new, and that is settled by the index alone. Only candidates are compared: first the key,
then the digest, then, while they are retained, the bytes. Digests by different functions say nothing about each other:
where they differ, the body at hand is held against the stored digest by every function that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import fixed_rows
from bsfg.batch import FactBatch
from bsfg.hashing import is_digest_of
from bsfg.ports import Result
from bsfg.sealing import bodies, functions_of
from bsfg.stores.log.index import KeyIndex

Fetch = Callable[[np.ndarray], tuple[FactBatch, np.ndarray, np.ndarray]]
"""Give the stored facts at some offsets, which offsets were found, and which still have their bytes."""

Gone = Callable[[np.ndarray], np.ndarray]
"""Tell which of some offsets, whose facts could not be found, are on record as lost."""

_BYTES = ("subject", "predicate", "object", "artifact_digest")


@dataclass(slots=True)
class Verdict:
    """What each row is; ``offsets`` holds the existing offset of repeats and conflicts, else -1."""

    results: np.ndarray
    offsets: np.ndarray
    collisions: set[int] = field(default_factory=set)
    repeats_of: dict[int, int] = field(default_factory=dict)
    """Rows that repeat or contradict an earlier row of the same batch, and which."""
    undecided: set[int] = field(default_factory=set)
    """Rows whose key is known and whose stored fact cannot be read: they may repeat or contradict it."""

    @property
    def all_new(self) -> bool:
        """Whether every row is to be stored."""
        return not self.results.any()


def judge(
    batch: FactBatch, hashes: np.ndarray, order: np.ndarray, index: KeyIndex, fetch: Fetch, gone: Gone
) -> Verdict:
    """Judge all rows of a batch; ``order`` sorts the hashes."""
    count = len(batch)
    verdict = Verdict(np.zeros(count, dtype=np.int8), np.full(count, -1, dtype=np.int64))
    ranked = hashes[order]
    positions, offsets = index.candidates(ranked)
    if len(positions):
        _against_stored(batch, order[positions], offsets, fetch, gone, verdict)
    if count > 1 and (ranked[1:] == ranked[:-1]).any():
        _against_batch(batch, order, ranked, verdict)
    return verdict


def _against_stored(
    batch: FactBatch, rows: np.ndarray, offsets: np.ndarray, fetch: Fetch, gone: Gone, verdict: Verdict
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


def _settle(verdict: Verdict, rows: np.ndarray, offsets: np.ndarray, result: Result) -> None:
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


def _against_batch(batch: FactBatch, order: np.ndarray, ranked: np.ndarray, verdict: Verdict) -> None:
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
