"""A quick look at whole columns: which rows might break a rule of the message model.

A row that is not suspected is good; a suspected one may be good or bad, and `bsfg.rules.judge` decides.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import byte_lengths, constant_value, used_bytes
from bsfg.batch import FactBatch
from bsfg.layout import alike_but_for_digits
from bsfg.model import (
    ARTIFACT_DIGEST,
    LATEST_UNIX_MS,
    PRINTABLE,
    TEXT_RULES,
    Limits,
    TextRule,
    artifact_problem,
    labels_problem,
)

_FIRST = np.zeros(1, dtype=np.int64)
_NONE = np.empty(0, dtype=np.int64)
_REPEATED = 4
"""Where a text stands in so many rows on average, it pays to look at each text once."""


def suspects(batch: FactBatch, limits: Limits) -> np.ndarray:
    """Give the rows that no quick look clears, in order."""
    found = [_doubtful_texts(batch.column(rule.name), rule) for rule in TEXT_RULES]
    found.append(_doubtful_times(batch.column("produced_at_unix_ms")))
    found.append(_doubtful_objects(batch.column("object"), limits))
    found.append(_doubtful_labels(batch.column("labels"), limits))
    found.append(_doubtful_artifacts(batch.column("artifact"), batch.column("artifact_digest")))
    return np.unique(np.concatenate(found)) if any(map(len, found)) else _NONE


def _doubtful_texts(column: pa.Array, rule: TextRule) -> np.ndarray:
    if column.null_count == len(column):
        return _FIRST if rule.required and len(column) else _NONE
    if rule.pattern is PRINTABLE and column.null_count == 0 and _is_plain_text(column, rule.max_bytes):
        return _NONE
    single = constant_value(column)
    if single is not None:
        return _FIRST if rule.breaks(single) else _NONE
    return _NONE if column.null_count == 0 and _are_repetitions(column, rule) else _misfits(column, rule)


def _are_repetitions(column: pa.Array, rule: TextRule) -> bool:
    """Settle texts that differ from one good text by digits only, or are few and good.

    No rule tells one digit from another, but that of artifact digests, whose function has digits in its name.
    """
    first: str = column[0].as_py()
    if (
        rule.pattern is not ARTIFACT_DIGEST
        and not rule.breaks(first)
        and alike_but_for_digits(first.encode(), column).all()
    ):
        return True
    few = column.unique()
    return len(few) <= len(column) // _REPEATED and not len(_misfits(few, rule))


def _misfits(column: pa.Array, rule: TextRule) -> np.ndarray:
    wrong = pc.invert(pc.match_substring_regex(column, rule.pattern))
    if column.null_count:
        # Where there is no text there is no match either: what that means is for the rule to say.
        absent = pc.is_null(column)
        wrong = pc.or_kleene(wrong, absent) if rule.required else pc.and_kleene(wrong, pc.invert(absent))
    rows, lengths = _rows(wrong), byte_lengths(column)
    if int(lengths.max()) > rule.max_bytes:
        rows = np.union1d(rows, np.flatnonzero(lengths > rule.max_bytes))
    return rows


def _is_plain_text(column: pa.Array, max_bytes: int) -> bool:
    """Settle free text of printable ASCII, neither empty nor too long."""
    lengths, data = byte_lengths(column), used_bytes(column)
    if int(lengths.max()) > max_bytes or int(lengths.min()) == 0:
        return False
    return int(data.min()) >= 0x20 and int(data.max()) < 0x7F


def _doubtful_times(column: pa.Array) -> np.ndarray:
    if column.null_count:
        return np.arange(len(column))  # what is absent is refused in any case; the judge finds what comes first
    values = column.to_numpy()
    if int(values.min()) >= 0 and int(values.max()) <= LATEST_UNIX_MS:
        return _NONE
    return np.flatnonzero((values < 0) | (values > LATEST_UNIX_MS))


def _doubtful_objects(column: pa.Array, limits: Limits) -> np.ndarray:
    if column.null_count:
        return np.arange(len(column))
    lengths = byte_lengths(column)
    if int(lengths.max()) <= limits.max_object_bytes:
        return _NONE
    return np.flatnonzero(lengths > limits.max_object_bytes)


def _doubtful_labels(column: pa.Array, limits: Limits) -> np.ndarray:
    """Look at each distinct text once, because most batches repeat a few sets of labels."""
    if column.null_count == len(column):
        return _NONE
    encoded = column.dictionary_encode()
    bad = [at for at, text in enumerate(encoded.dictionary.to_pylist()) if labels_problem(text, limits)]
    return np.flatnonzero(np.isin(encoded.indices.to_numpy(zero_copy_only=False), bad)) if bad else _NONE


def _doubtful_artifacts(references: pa.Array, digests: pa.Array) -> np.ndarray:
    if references.null_count == len(references) and digests.null_count == len(digests):
        return _NONE
    pairs = enumerate(zip(references.to_pylist(), digests.to_pylist(), strict=True))
    return np.array([row for row, pair in pairs if pair != (None, None) and artifact_problem(*pair)], dtype=np.int64)


def _rows(mask: pa.Array) -> np.ndarray:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))
