"""Canonical JSON: keys sorted, no insignificant whitespace, UTF-8, number literals kept as written.

Most producers already send canonical bytes, so the first question is always the cheap one: do the bytes serialise
back to themselves? Only those that do not are parsed with care for duplicate keys and number literals.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

import orjson

MAX_DEPTH = 256
"""Containers nested deeper than this are refused: no legitimate fact needs it and parsers die of it."""

_CHUNK = 32
_SORTED = orjson.OPT_SORT_KEYS


class NotJson(ValueError):
    """The bytes are not acceptable JSON; the text says which rule they break."""


class _Literal(str):
    """A number exactly as it was written."""

    __slots__ = ()


def canonicalize(data: bytes) -> bytes:
    """Give the canonical form of a JSON text, or raise `NotJson` naming the rule it breaks."""
    try:
        parsed = orjson.loads(data)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise NotJson(_reason(data, error)) from None
    _check_depth(data)
    if orjson.dumps(parsed, option=_SORTED) == data:
        return data
    return write_literals(parse_literals(data))


def canonicalize_value(value: Any) -> bytes:
    """Serialise a Python value as canonical JSON."""
    try:
        return canonicalize(orjson.dumps(value, option=_SORTED))
    except orjson.JSONEncodeError:
        pass
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return canonicalize(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(f"the value cannot be written as JSON: {error}") from None


def canonicalize_all(objects: Sequence[bytes]) -> tuple[dict[int, bytes], dict[int, NotJson]]:
    """Canonicalise many texts; give those that had to be changed, and those that are refused, by their places.

    Texts are checked in chunks joined into one array. The separator is a string nobody can guess, so that texts
    which only together make valid JSON (``[1`` and ``2]``) cannot pass: it must come back at every second place.
    """
    changed: dict[int, bytes] = {}
    problems: dict[int, NotJson] = {}
    token = secrets.token_hex(8) if len(objects) > 1 else ""
    separator = f',"{token}",'.encode()
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        if len(chunk) > 1 and _chunk_is_canonical(chunk, separator, token):
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


def _chunk_is_canonical(chunk: Sequence[bytes], separator: bytes, token: str) -> bool:
    joined = b"[" + separator.join(chunk) + b"]"
    # Fewer bytes than this cannot nest too deeply, and a longer chunk is simply checked text by text.
    if len(joined) > 2 * MAX_DEPTH and joined.count(b"[") + joined.count(b"{") > MAX_DEPTH // 2:
        for data in chunk:
            if len(data) > 2 * MAX_DEPTH and data.count(b"[") + data.count(b"{") > MAX_DEPTH:
                return False
    try:
        values = orjson.loads(joined)
    except (orjson.JSONDecodeError, RecursionError):
        return False
    count = len(chunk)
    if len(values) != 2 * count - 1 or values[1::2] != [token] * (count - 1):
        return False
    return bool(orjson.dumps(values, option=_SORTED) == joined)


def _check_depth(data: bytes) -> None:
    if len(data) <= 2 * MAX_DEPTH or data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = deepest = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise NotJson(f"containers are nested {deepest} deep, the limit is {MAX_DEPTH}")


def parse_literals(data: bytes) -> Any:
    """Parse JSON keeping every number as it was written, and refuse duplicate keys."""
    try:
        return json.loads(
            data,
            object_pairs_hook=_object_without_duplicates,
            parse_float=_Literal,
            parse_int=_Literal,
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


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not a JSON number")


def write_literals(value: Any) -> bytes:
    """Write what `parse_literals` gave in canonical form."""
    return _write(value).encode()


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
    try:
        parse_literals(data)
    except NotJson as finer:
        return str(finer)
    return f"not valid JSON: {error}"
