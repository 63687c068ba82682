"""The judge of the message model: a quick look at whole columns, then which rule a fact breaks, by row and field."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import SMALL_BATCH_FACTS, FactBatch
from bsfg.columns import AT, FACT_FIELDS, byte_lengths, constant_value, used_bytes
from bsfg.errors import FactTooLarge, InvalidFact
from bsfg.layouts import alike_but_for_digits
from bsfg.model import (
    ARTIFACT_DIGEST,
    DEFAULT_LIMITS,
    LATEST_UNIX_MS,
    PRINTABLE,
    STREAM,
    TEXT_RULES,
    TIME_SAYS,
    ZONE,
    Limits,
    TextRule,
    artifact_problem,
    check_name,
    labels_problem,
)
from bsfg.rows import Row

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


__all__ = ["DEFAULT_LIMITS", "STREAM", "ZONE", "Limits", "check", "check_name", "invalid", "judge"]

_TEXTS = tuple((AT[rule.name], rule) for rule in TEXT_RULES)
_PRODUCED_AT, _OBJECT, _LABELS = AT["produced_at_unix_ms"], AT["object"], AT["labels"]
_ARTIFACT, _ARTIFACT_DIGEST = AT["artifact"], AT["artifact_digest"]


def check(batch: FactBatch, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise `InvalidFact` or `FactTooLarge` for the first row that breaks a rule of the message model."""
    if not batch.wellformed:
        check_encoding(batch)
    _check_size(batch, limits)
    if len(batch) <= SMALL_BATCH_FACTS:
        rows = batch.rows()
        if len(rows) > 1 and _are_fine(rows, limits):
            return
        for number, row in enumerate(rows):
            judge(number, row, limits)
        return
    doubtful = suspects(batch, limits)
    for start in range(0, len(doubtful), SMALL_BATCH_FACTS):
        numbers = doubtful[start : start + SMALL_BATCH_FACTS]
        for number, row in zip(numbers, batch.take(numbers).rows(), strict=True):
            judge(int(number), row, limits)


def _are_fine(rows: list[Row], limits: Limits) -> bool:
    """Clear a few rows by looking at each value of a column once: zones, predicates and types are mostly the same."""
    columns = list(zip(*rows, strict=True))
    for at, rule in _TEXTS:
        values = set(columns[at])
        if None in values:
            if rule.required:
                return False
            values.remove(None)
        if any(map(rule.breaks, values)):
            return False
    # What has no text rule: each of these would be a matter for the judge.
    if any(columns[at] != (None,) * len(rows) for at in (_LABELS, _ARTIFACT, _ARTIFACT_DIGEST)):
        return False
    times, objects = columns[_PRODUCED_AT], columns[_OBJECT]
    if None in times or None in objects or min(times) < 0 or max(times) > LATEST_UNIX_MS:
        return False
    return max(map(len, objects)) <= limits.max_object_bytes


def _check_size(batch: FactBatch, limits: Limits) -> None:
    if len(batch) <= limits.max_batch_facts and _bytes_at_most(batch, limits.max_batch_bytes):
        return
    raise FactTooLarge(
        f"the batch has {len(batch)} facts in {batch.nbytes} bytes; the limits are "
        f"{limits.max_batch_facts} and {limits.max_batch_bytes}",
        hint="Split the batch.",
    )


def _bytes_at_most(batch: FactBatch, max_bytes: int) -> bool:
    """Compare the size of a batch with a limit; the exact size is costly and rarely needed."""
    if batch.message_bytes is not None:
        bound = batch.message_bytes
    elif batch.has_rows:
        # A character has at most 4 bytes in UTF-8; the rest is more than Arrow needs for offsets and bitmaps.
        texts = sum(len(value) for row in batch.rows() for value in row if isinstance(value, (str, bytes)))
        bound = 4 * texts + 1024 * (len(batch) + 1)
    else:
        # No column can refer to more than all buffers together.
        bound = len(batch.schema) * int(batch.record_batch.get_total_buffer_size())
    return bound <= max_bytes or batch.nbytes <= max_bytes


def check_encoding(batch: FactBatch) -> None:
    """Refuse arrays that lie about their own layout or hold bytes that are not UTF-8."""
    try:
        batch.record_batch.validate(full=True)
    except pa.ArrowInvalid as error:
        for name, column in zip(FACT_FIELDS, batch.record_batch.columns, strict=False):
            if (row := _first_malformed(column)) is not None:
                raise invalid(row, name, "is not valid UTF-8 or is malformed") from None
        raise invalid(0, "batch", f"is malformed: {error}") from None


def _first_malformed(column: pa.Array) -> int | None:
    """Find the first row that fails Arrow's own checks, by halving."""
    if _is_wellformed(column):
        return None
    fine, broken = 0, len(column)
    while broken - fine > 1:
        middle = (fine + broken) // 2
        if _is_wellformed(column.slice(0, middle)):
            fine = middle
        else:
            broken = middle
    return fine


def _is_wellformed(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def judge(number: int, row: Row, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise `InvalidFact` or `FactTooLarge` for the first rule that a row breaks; ``number`` is how to call it."""
    for at, rule in _TEXTS:
        value = row[at]
        if value is None:
            if rule.required:
                raise invalid(number, rule.name, "is required")
        elif rule.breaks(value):
            raise invalid(number, rule.name, rule.says)
    produced_at = row[_PRODUCED_AT]
    if produced_at is None:
        raise invalid(number, "produced_at_unix_ms", "is required")
    if not 0 <= produced_at <= LATEST_UNIX_MS:
        raise invalid(number, "produced_at_unix_ms", TIME_SAYS)
    _judge_object(number, row[_OBJECT], limits)
    if row[_LABELS] is not None and (says := labels_problem(row[_LABELS], limits)):
        raise invalid(number, "labels", says)
    if row[_ARTIFACT] is not None or row[_ARTIFACT_DIGEST] is not None:
        problem = artifact_problem(row[_ARTIFACT], row[_ARTIFACT_DIGEST])
        if problem is not None:
            raise invalid(number, *problem)


def _judge_object(number: int, data: bytes | None, limits: Limits) -> None:
    if data is None:
        raise invalid(number, "object", "is required")
    if len(data) > limits.max_object_bytes:
        raise FactTooLarge(
            f"row {number}, object: has {len(data)} bytes, the limit is {limits.max_object_bytes}",
            row=number,
            field="object",
            rule=f"at most {limits.max_object_bytes} bytes",
        )


def invalid(row: int, name: str, rule: str) -> InvalidFact:
    """Make the error for one row's field."""
    return InvalidFact(f"row {row}, {name}: {rule}", row=row, field=name, rule=rule)
