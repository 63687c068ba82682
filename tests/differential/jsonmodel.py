"""Canonical JSON by the plainest means: Python's own parser, and nothing that is quick."""

import json
import math
from typing import Any

from bsfg.canonical import MAX_DEPTH


class Literal(str):
    """A number of the model, as written."""


def model(data: bytes) -> bytes | None:
    """Give the canonical form by the plainest means, or None when the text must be refused."""
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text, parse_float=Literal, parse_int=Literal, parse_constant=refuse, object_pairs_hook=no_duplicates
        )
        if depth(value) > MAX_DEPTH:
            return None
        return written(value).encode("utf-8")
    except (ValueError, RecursionError):
        return None


def refuse(name: str) -> None:
    raise ValueError(name)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("duplicate")
    return dict(pairs)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def written(value: Any) -> str:
    if isinstance(value, Literal):
        if math.isinf(float(value)):
            raise ValueError(value)
        return str(value)
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].encode())
        return "{" + ",".join(f"{written(key)}:{written(item)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
