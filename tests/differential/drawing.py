"""Rows of any schema, drawn by chance: what is legal in Arrow, however odd it is as a fact."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa

from bsfg.rows import Row

COUNTS = (1, 1, 1, 2, 3, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 63, 64)
"""How many rows a small batch has: around every border of bitmaps and of paths."""

_LETTERS = 'abcXYZ019 _-:/\\"{}[],.\x00\n\x7f\x80é€😀\ufeff'


_POOL = Random("values")


def _text() -> str:
    kind = _POOL.random()
    if kind < 0.4:
        return f"t{_POOL.randrange(1000)}"
    return "".join(_POOL.choices(_LETTERS[:8] if kind < 0.7 else _LETTERS, k=_POOL.randrange(12)))


TEXTS = [_text() for _ in range(500)]
"""Texts to choose from; many are plain, some are none that anybody would write."""

_INTS = [0, 1, -1, (1 << 63) - 1, -(1 << 63), *(_POOL.getrandbits(40) for _ in range(20))]
_BYTES = [_POOL.randbytes(_POOL.randrange(20)) for _ in range(200)]


def values_of(type_: pa.DataType) -> list[Any]:
    """Give values of a type to choose from."""
    if pa.types.is_int64(type_):
        return _INTS
    if pa.types.is_fixed_size_binary(type_):
        return [_POOL.randbytes(type_.byte_width) for _ in range(10)]
    return TEXTS if pa.types.is_string(type_) else _BYTES


def rows(random: Random, schema: pa.Schema, count: int | None = None) -> list[Row]:
    """Draw rows; whole columns of nulls, none, and some among others."""
    count = random.choice(COUNTS) if count is None else count
    columns: list[Sequence[Any]] = []
    for field in schema:
        absent = random.choice((0.0, 0.0, 1.0, 1.0, 0.1, 0.5, 0.9))
        if absent == 1.0:
            columns.append([None] * count)
            continue
        values = random.choices(_values(field.type), k=count)
        columns.append([None if absent and random.random() < absent else value for value in values])
    return list(zip(*columns, strict=True))


_values = cache(values_of)
