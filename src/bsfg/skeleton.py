"""Proving at a glance that a column of JSON objects is canonical, because all look like one that is.

Facts of one kind have the same keys in the same places and differ in their values only. From one canonical object a
regular expression is made that keeps everything but the values; a text that matches it is canonical too: same keys in
the same order, no whitespace, each value a well-formed literal. A whole column is matched several times faster than
it could be parsed, and still faster where even the places of the values are the same (`bsfg.layout`).
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import byte_lengths
from bsfg.canonical import NotJson, canonicalize
from bsfg.layout import TOKEN, laid_out_like

MIN_ROWS = 128
"""Fewer rows than this are parsed sooner than the expression is compiled."""

_MAX_TEMPLATE_BYTES = 4096
_MAX_VALUES = 64
_MAX_KINDS = 8
_MAX_LAYOUTS = 4
# A number of fewer digits than this cannot overflow a double, which would have to be refused, even with its exponent.
_MAX_SLACK_BYTES = 200

# Nothing in these strings needs an escape, and the column is known to be UTF-8.
_STRING = r'"[^"\\\x00-\x1f]*"'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?"
# Any value may be null in the next object, and a null may be any value there.
_TEXT = f"(?:{_STRING}|null)"
_PLAIN = f"(?:{_NUMBER}|true|false|null)"
_ANY = f"(?:{_STRING}|{_NUMBER}|true|false|null)"
_SHORTEST = {_TEXT: 2, _PLAIN: 1, _ANY: 1}


def unproven(column: pa.Array) -> np.ndarray:
    """Give the rows of a column of JSON texts that are not proven canonical; those need a closer look."""
    rows = np.arange(len(column))
    if len(rows) < MIN_ROWS:
        return rows
    for _ in range(_MAX_LAYOUTS):
        template = _template(column)
        if template is None:
            return rows
        fine = laid_out_like(template, column)
        rows, column, before = *_without(fine, rows, column), len(rows)
        if len(rows) < MIN_ROWS or 8 * len(rows) > 7 * before:
            break
    return _without_pattern(rows, column)


def _without_pattern(rows: np.ndarray, column: pa.Array) -> np.ndarray:
    """Give the rows that no pattern clears either."""
    if len(rows) < MIN_ROWS:
        return rows
    try:
        texts = column.cast(pa.string())
    except pa.ArrowInvalid:
        return rows
    for _ in range(_MAX_KINDS):
        template = _template(texts)
        fine = _like(template, texts) if template is not None else None
        if fine is None:
            break
        rows, texts, before = *_without(fine, rows, texts), len(rows)
        if before - len(rows) < MIN_ROWS or len(rows) < MIN_ROWS:
            break
    return rows


def _without(fine: np.ndarray, rows: np.ndarray, column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Leave out what is fine."""
    if fine.all():
        return rows[:0], column.slice(0, 0)
    return rows[~fine], column.filter(pa.array(~fine))


def _template(column: pa.Array) -> bytes | None:
    """Give the first text of a column if it is canonical and not too long to be a model for others."""
    first: bytes = column[0].as_buffer().to_pybytes()
    if len(first) > _MAX_TEMPLATE_BYTES:
        return None
    try:
        return first if canonicalize(first) == first else None
    except NotJson:
        return None


def _like(template: bytes, texts: pa.Array) -> np.ndarray | None:
    """Tell for each text whether it is canonical because the template is; None when that gives no pattern."""
    made = _pattern(template)
    if made is None:
        return None
    pattern, shortest = made
    fine = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    lengths = byte_lengths(texts)
    if int(lengths.max()) >= shortest + _MAX_SLACK_BYTES:
        fine &= lengths < shortest + _MAX_SLACK_BYTES
    return np.asarray(fine)


def _pattern(template: bytes) -> tuple[str, int] | None:
    """Make the expression for texts like a canonical one, with the length of the shortest text that matches."""
    parts: list[str] = []
    shortest = values = 0
    for token in TOKEN.finditer(template):
        text = token.group()
        if token.group(2) or text in b"[]{},":
            parts.append(re.escape(text.decode()))
            shortest += len(text)
            continue
        value = _TEXT if token.group(1) else _ANY if text == b"null" else _PLAIN
        parts.append(value)
        shortest += _SHORTEST[value]
        values += 1
    if values > _MAX_VALUES:
        return None
    return r"\A" + "".join(parts) + r"\z", shortest
