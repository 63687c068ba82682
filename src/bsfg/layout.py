"""Proving that JSON texts are canonical because each is laid out, byte by byte, like one that is.

Machines write fixed formats: from one fact to the next only digits and letters change, each in its place. So a text of
the same length as a canonical one is canonical too when it differs from it only by digits inside numbers and by plain
characters inside string values. That takes a few operations on a whole column, and no parsing.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from bsfg.arrays import binary_parts

Bytes = bytes | bytearray

TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*")(:?)|-?[0-9][-+.0-9eE]*|true|false|null|[\[\]{},]')
"""The parts of a canonical text: strings (with a colon behind them they are keys), numbers, literals, punctuation."""

_NUMBER = re.compile(rb"-?([0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?")
# Neither more digits than this nor a longer exponent: else other digits could make a number that no double can hold.
_MAX_NUMBER_BYTES = 200
_BACKSLASH, _ONE = ord("\\"), ord("1")
_DIGITS = b"0123456789"
# The characters that stand for themselves in a string, but for the backslash, which is looked for by itself.
_PLAIN = bytes(range(0x23, 0x7F))


def _all_to(chars: bytes, one: int) -> bytes:
    """Make a table for `bytes.translate` that turns each of some characters into one of them."""
    return bytes.maketrans(chars, bytes([one]) * len(chars))


_LOWEST_DIGIT, _HIGHEST_DIGIT = _all_to(_DIGITS, _DIGITS[0]), _all_to(_DIGITS, _DIGITS[-1])
_LOWEST_PLAIN, _HIGHEST_PLAIN = _all_to(_PLAIN, _PLAIN[0]), _all_to(_PLAIN, _PLAIN[-1])


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
        elif end - start <= _MAX_NUMBER_BYTES and (number := _NUMBER.fullmatch(template, start, end)):
            # A number cannot begin with a zero unless that is all before the point.
            first = number.start(1)
            low[start:end] = template[start:end].translate(_LOWEST_DIGIT)
            high[start:end] = template[start:end].translate(_HIGHEST_DIGIT)
            if number.end(1) - first > 1:
                low[first] = _ONE
    return low, high
