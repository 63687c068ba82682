"""Canonical JSON: keys sorted, no insignificant whitespace, UTF-8, number literals kept as written.

Whole columns are proven canonical in `bsfg.layouts`; here is nothing but Python, so that small clients have it, too.
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

import orjson

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
