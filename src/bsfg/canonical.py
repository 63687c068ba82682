"""Canonical JSON: keys sorted, no insignificant whitespace, UTF-8, number literals kept as written.

Whole columns are proven canonical without reading every text: because each is laid out, byte by byte, like one that is
(`alike_but_for_digits`), or because all match the skeleton of one that is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.columns import binary_parts, byte_lengths

MAX_DEPTH = 128
"""Containers nested deeper than this are refused: no fact needs it, and readers of it die of it."""

_CHUNK = 32
# Drawn once: it never leaves the process, and to ask the system for randomness takes longer than to check a few texts.
_TOKEN = secrets.token_hex(16)
_SEPARATOR = f',"{_TOKEN}",'.encode()
_SORTED = orjson.OPT_SORT_KEYS
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STRINGS_OR_SPACES = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', re.DOTALL)
_SPACES = b" \t\r\n"
_NUMBERS = b"0123456789.+-eE"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class NotJson(ValueError):
    """The bytes are not acceptable JSON; the text says which rule they break."""


class _Literal(str):
    """A number exactly as it was written."""

    __slots__ = ()


def canonicalize(data: bytes) -> bytes:
    """Give the canonical form of a JSON text (the same object if it is that), or raise `NotJson` with the reason."""
    try:
        parsed = orjson.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotJson(_reason(data, error)) from None
    _check_depth(data)
    ordered = orjson.dumps(parsed, option=_SORTED)
    if ordered == data or _differ_in_numbers_alone(data, ordered):
        return data
    # When only whitespace and the order of keys differ, the parsed value holds everything that was written.
    if orjson.dumps(parsed) == _without_spaces(data):
        return ordered
    canonical = write_literals(parse_literals(data))
    return data if canonical == data else canonical


def _differ_in_numbers_alone(data: bytes, ordered: bytes) -> bool:
    """Tell whether valid JSON and its parsed and sorted form differ in nothing but how numbers are written.

    Numbers are kept as written, so such a text is canonical. A key in another place would show among the strings.
    """
    if b"\\" in data:
        return False
    # Without escapes every second part between quotes is a string.
    ours, theirs = data.split(b'"'), ordered.split(b'"')
    if ours[1::2] != theirs[1::2]:
        return False
    between = (b'"'.join(parts[::2]).translate(None, delete=_NUMBERS) for parts in (ours, theirs))
    return next(between) == next(between)


def _without_spaces(data: bytes) -> bytes:
    """Take insignificant whitespace out of valid JSON."""
    if b"\\" in data:
        return _STRINGS_OR_SPACES.sub(rb"\1", data)
    # Without escapes every second part between quotes is a string.
    parts = data.split(b'"')
    parts[::2] = [part.translate(None, delete=_SPACES) for part in parts[::2]]
    return b'"'.join(parts)


def canonicalize_value(value: Any) -> bytes:
    """Serialise a Python value as canonical JSON; what has no JSON form, NaN and infinities among it, is refused."""
    try:
        data = orjson.dumps(value, option=_SORTED)
        if b"null" in data:
            # orjson writes null for NaN and infinities, which would change what the producer said.
            json.dumps(value, allow_nan=False, default=_plain)
        return canonicalize(data)
    except orjson.JSONEncodeError:
        pass
    except NotJson:
        raise
    except (ValueError, RecursionError) as error:
        raise NotJson(f"the value cannot be written as JSON: {error}") from None
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return canonicalize(text.encode())
    except NotJson:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(f"the value cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Open what orjson serialises by itself, so that the numbers inside can be seen."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.value if isinstance(value, Enum) else str(value)


def canonicalize_all(objects: Sequence[bytes]) -> tuple[dict[int, bytes], dict[int, NotJson]]:
    """Canonicalise many texts; give those that had to be changed, and those that are refused, by their places.

    Texts are checked in chunks joined into one array. The separator is a string nobody can guess, so that texts
    which only together make valid JSON (``[1`` and ``2]``) cannot pass: it must come back at every second place.
    """
    changed: dict[int, bytes] = {}
    problems: dict[int, NotJson] = {}
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        if len(chunk) > 1 and _chunk_is_canonical(chunk):
            continue
        for index, data in enumerate(chunk, start):
            try:
                canonical = canonicalize(data)
            except NotJson as problem:
                problems[index] = problem
            else:
                if canonical is not data:
                    changed[index] = canonical
    return changed, problems


def _chunk_is_canonical(chunk: Sequence[bytes]) -> bool:
    if any(_may_be_deep(data) for data in chunk):
        return False
    joined = b"[" + _SEPARATOR.join(chunk) + b"]"
    try:
        values = orjson.loads(joined)
        if values[1::2] != [_TOKEN] * (len(chunk) - 1):
            return False
        ordered = orjson.dumps(values, option=_SORTED)
        return ordered == joined or _differ_in_numbers_alone(joined, ordered)
    except (ValueError, TypeError, RecursionError):
        return False


def _may_be_deep(data: bytes) -> bool:
    return len(data) > 2 * MAX_DEPTH and data.count(b"[") + data.count(b"{") > MAX_DEPTH


def _check_depth(data: bytes) -> None:
    """Refuse valid JSON that is nested too deeply; on anything else the expression for strings could crawl."""
    if not _may_be_deep(data):
        return
    brackets = _STRINGS.sub(b"", data).translate(None, delete=_NOT_BRACKETS)
    deepest = max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if deepest > MAX_DEPTH:
        raise NotJson(f"containers are nested {deepest} deep, the limit is {MAX_DEPTH}")


def parse_literals(data: bytes) -> Any:
    """Parse JSON keeping every number as it was written, and refuse duplicate keys."""
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_object_without_duplicates,
            parse_float=_number,
            parse_int=_number,
            parse_constant=_refuse_constant,
        )
    except NotJson:
        raise
    except (ValueError, RecursionError) as error:
        raise NotJson(f"not valid JSON: {error}") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotJson(f"the key {key!r} appears twice in one object")
            seen.add(key)
    return result


def _number(literal: str) -> _Literal:
    if math.isinf(float(literal)):
        raise NotJson(f"the number {literal[:40]} is too large: readers would take it for infinity")
    return _Literal(literal)


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not a JSON number")


def write_literals(value: Any) -> bytes:
    """Write what `parse_literals` gave in canonical form; lone surrogates and nesting without end raise `NotJson`."""
    try:
        return _write(value).encode()
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise NotJson(f"not valid JSON: {error}") from None


def _write(value: Any) -> str:
    if isinstance(value, _Literal):
        return str(value)
    if isinstance(value, dict):
        items = sorted(value.items())
        return "{" + ",".join(f"{_write(str(key))}:{_write(item)}" for key, item in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_write(item) for item in value) + "]"
    return orjson.dumps(value).decode()


def _reason(data: bytes, error: Exception) -> str:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as broken:
        return f"not valid UTF-8 at byte {broken.start}"
    if not data.strip():
        return "the object is empty; an absent value is written null"
    if "depth limit" in str(error):
        return f"containers are nested too deep, the limit is {MAX_DEPTH}"
    try:
        parse_literals(data)
    except NotJson as finer:
        return str(finer)
    return f"not valid JSON: {error}"


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
