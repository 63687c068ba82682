"""Whole columns proven canonical without reading every text.

Either each is laid out, byte by byte, like one that is (`alike_but_for_digits`), or all match the skeleton of one.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.canonical import NotJson, canonicalize
from bsfg.columns import binary_parts, byte_lengths

Bytes = bytes | bytearray

TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*")(:?)|-?[0-9][-+.0-9eE]*|true|false|null|[\[\]{},]')
"""The parts of a canonical text: strings (with a colon behind them they are keys), numbers, literals, punctuation."""

_ANY_NUMBER = re.compile(rb"-?([0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?")
# Neither more digits than this nor a longer exponent: else other digits could make a number that no double can hold.
_MAX_NUMBER_BYTES = 200
_BACKSLASH, _ONE = ord("\\"), ord("1")
_DIGITS = b"0123456789"
# The characters that stand for themselves in a string, but for the backslash, which is looked for by itself.
_PLAIN_TEXT = bytes(range(0x23, 0x7F))


def _all_to(chars: bytes, one: int) -> bytes:
    """Make a table for `bytes.translate` that turns each of some characters into one of them."""
    return bytes.maketrans(chars, bytes([one]) * len(chars))


_LOWEST_DIGIT, _HIGHEST_DIGIT = _all_to(_DIGITS, _DIGITS[0]), _all_to(_DIGITS, _DIGITS[-1])
_LOWEST_PLAIN, _HIGHEST_PLAIN = _all_to(_PLAIN_TEXT, _PLAIN_TEXT[0]), _all_to(_PLAIN_TEXT, _PLAIN_TEXT[-1])


def laid_out_like(template: bytes, texts: pa.Array) -> np.ndarray:
    """Tell for each text of a binary column whether it is canonical because the template, which must be, is."""
    if _BACKSLASH in template:
        # What is plain behind a backslash is not so without it: an escaped quote would end its string.
        return np.zeros(len(texts), dtype=bool)
    return _within(texts, *_allowed(template), never=_BACKSLASH)


def alike_but_for_digits(template: bytes, texts: pa.Array) -> np.ndarray:
    """Tell for each text of a column whether it is the template, or that with other digits."""
    return _within(texts, template.translate(_LOWEST_DIGIT), template.translate(_HIGHEST_DIGIT))


def _within(texts: pa.Array, low: Bytes, high: Bytes, never: int | None = None) -> np.ndarray:
    """Tell for each text whether its every byte is between the lowest and the highest that are allowed there."""
    offsets, data = binary_parts(texts)
    alike: np.ndarray = np.diff(offsets) == len(low)
    if alike.all():
        data = data[offsets[0] : offsets[-1]]
    else:
        offsets, data = binary_parts(texts.filter(pa.array(alike)))
    matrix, lowest = data.reshape(-1, max(1, len(low))), np.frombuffer(low, dtype=np.uint8)
    # Below the lowest the difference wraps around and is too large as well.
    good = matrix - lowest <= np.frombuffer(high, dtype=np.uint8) - lowest
    if never is not None and (bad := matrix == never).any():
        good &= ~bad
    if not good.all():
        alike[alike] = good.all(axis=1)
    return alike


def _allowed(template: bytes) -> tuple[Bytes, Bytes]:
    """Give the lowest and the highest byte that are allowed in each place of a canonical text."""
    low, high = bytearray(template), bytearray(template)
    for token in TOKEN.finditer(template):
        start, end = token.span()
        if token.group(2):
            continue
        if token.group(1):
            inside = template[start + 1 : end - 1]
            low[start + 1 : end - 1] = inside.translate(_LOWEST_PLAIN)
            high[start + 1 : end - 1] = inside.translate(_HIGHEST_PLAIN)
        elif end - start <= _MAX_NUMBER_BYTES and (number := _ANY_NUMBER.fullmatch(template, start, end)):
            # A number cannot begin with a zero unless that is all before the point.
            first = number.start(1)
            low[start:end] = template[start:end].translate(_LOWEST_DIGIT)
            high[start:end] = template[start:end].translate(_HIGHEST_DIGIT)
            if number.end(1) - first > 1:
                low[first] = _ONE
    return low, high


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
