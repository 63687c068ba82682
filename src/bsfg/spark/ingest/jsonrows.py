"""Rows of JSON Lines as columns of values, with every number as it was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bsfg.canonical import NotJson, canonicalize, parse_literals
from bsfg.spark.ingest.columns import Column, of_json_values
from bsfg.spark.ingest.records import Block

_TOGETHER = 64
"""How many lines are compared at once with what they were read as."""


@dataclass(slots=True)
class Found:
    """What a block of lines holds: which of them are rows, the rows, and why the others are not."""

    records: np.ndarray
    rows: list[dict[str, Any]]
    lines: list[bytes]
    unreadable: dict[int, str]

    def get(self, name: str) -> Column | None:
        """Give a column: the value of a key, or of a path of keys with dots between them."""
        try:
            return of_json_values([row[name] for row in self.rows])
        except KeyError:
            path = name.split(".")
            return of_json_values([row[name] if name in row else _at_path(row, path) for row in self.rows])

    def whole(self) -> pa.Array:
        """Give the lines themselves."""
        return pa.array(self.lines, pa.binary())


def json_columns(block: Block) -> Found:
    """Read lines as JSON objects."""
    lines = _lines(block)
    found = _at_once(lines) or _one_by_one(lines)
    _keep_as_written(found)
    return found


def _lines(block: Block) -> list[bytes]:
    lines = block.data.removesuffix(b"\n").split(b"\n")
    if len(lines) != len(block) or b"\r" in block.data:
        return [block.record(at).strip(b" \t\r\n") for at in range(len(block))]
    return lines


def _at_once(lines: list[bytes]) -> Found | None:
    """Read lines that are all objects; None when one of them is not."""
    try:
        rows = list(map(orjson.loads, lines))
    except (ValueError, RecursionError):
        return None
    if set(map(type, rows)) != {dict}:
        return None
    return Found(np.arange(len(rows)), rows, lines, {})


def _one_by_one(lines: list[bytes]) -> Found:
    found = Found(np.arange(0), [], [], {})
    records: list[int] = []
    for at, line in enumerate(lines):
        try:
            row = orjson.loads(line)
        except (ValueError, RecursionError):
            found.unreadable[at] = _reason(line)
            continue
        if type(row) is not dict:
            found.unreadable[at] = f"is JSON, but not an object: {line[:40].decode('utf-8', 'replace')}"
            continue
        found.rows.append(row)
        found.lines.append(line)
        records.append(at)
    found.records = np.array(records, dtype=np.int64)
    return found


def _reason(line: bytes) -> str:
    try:
        canonicalize(line)
    except NotJson as problem:
        return str(problem)
    return "not valid JSON"


def _keep_as_written(found: Found) -> None:
    """Read lines again that lost something when they were read: digits of numbers, or keys that appear twice."""
    bad: list[int] = []
    rows, lines = found.rows, found.lines
    for start in range(0, len(rows), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        joined, compact = b",".join(lines[part]), orjson.dumps(rows[part])[1:-1]
        # The usual ways to write JSON have no spaces, or one behind colons and commas.
        if joined in (compact, b"") or joined.replace(b'": ', b'":').replace(b', "', b',"') == compact:
            continue
        for at in range(start, min(start + _TOGETHER, len(rows))):
            if _squeezed(lines[at]) != orjson.dumps(rows[at]):
                try:
                    rows[at] = parse_literals(canonicalize(lines[at]))
                except NotJson as problem:
                    found.unreadable[int(found.records[at])] = str(problem)
                    bad.append(at)
    if bad:
        kept = np.setdiff1d(np.arange(len(rows)), bad, assume_unique=True)
        found.rows, found.lines = [rows[at] for at in kept], [lines[at] for at in kept]
        found.records = found.records[kept]


def _squeezed(data: bytes) -> bytes:
    """Take spaces out of valid JSON, where they are easily told from those in strings; else give it as it is."""
    if b"\\" in data:
        return data
    parts = data.split(b'"')
    parts[::2] = [part.translate(None, delete=b" \t\r\n") for part in parts[::2]]
    return b'"'.join(parts)


def _at_path(row: dict[str, Any], path: list[str]) -> Any:
    value: Any = row
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
