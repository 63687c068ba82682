"""A column of a file, whatever its format: what each value says as text, and whether that text is a JSON literal.

Numbers, truth values and nested values are literals: they stand in JSON as they are written. Everything else is text
and is quoted there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.canonical import canonicalize_all, canonicalize_value, write_literals
from bsfg.spark.ingest.plan import BOOLEAN, JSON, NUMBER, TEXT

STRING = pa.string()
_ESCAPED = r'["\\\x00-\x1f]'
_SAFE_NUMBER = r"^-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][-+]?[0-9]{1,2})?$"
_ANY_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_TRUTH = {"true": "true", "false": "false", "1": "true", "0": "false"}
_QUOTE = pa.scalar('"', STRING)
_EMPTY = pa.scalar("", STRING)


@dataclass
class Column:
    """Values of one column.

    ``given`` are their texts, or what makes them when they are asked for. ``literal`` says which texts are JSON
    literals: one answer for all rows, or one per row. ``stamps`` holds the times of a column of timestamps.
    ``problems`` say what is wrong with single values; their texts are null.
    """

    given: pa.Array | Callable[[], pa.Array]
    literal: bool | np.ndarray = False
    stamps: pa.Array | None = None
    problems: dict[int, str] = field(default_factory=dict)

    @cached_property
    def text(self) -> pa.Array:
        """The texts of all rows."""
        return self.given() if callable(self.given) else self.given

    def literals(self) -> np.ndarray:
        """Give for each row whether its text is a literal."""
        return np.broadcast_to(np.asarray(self.literal), (len(self.text),))

    def as_type(self, kind: str, decimal: str) -> Column:
        """Read texts as numbers, truth values or JSON; values that are literals already stay what they are."""
        if kind == TEXT or self.literal is True:
            return self
        texts = pc.utf8_trim(self.text, characters=" \t")
        if decimal == "," and kind == NUMBER:
            texts = pc.replace_substring(texts, ",", ".")
        # What is left of a value that was blank is no value.
        blank = pc.fill_null(pc.equal(texts, _EMPTY), False)
        read = _READERS[kind](pc.if_else(blank, pa.scalar(None, STRING), texts))
        if self.literal is False:
            return Column(read.text, True, problems=self.problems | read.problems)
        mask = self.literals()
        text = pc.if_else(pa.array(mask), self.text, read.text)
        problems = {row: says for row, says in read.problems.items() if not mask[row]}
        return Column(text, True, self.stamps, self.problems | problems)

    def as_json(self) -> pa.Array:
        """Give every value as JSON; no value is null."""
        if self.literal is True:
            return pc.fill_null(self.text, "null")
        quoted = _quoted(self.text)
        if self.literal is not False:
            quoted = pc.if_else(pa.array(self.literals()), self.text, quoted)
        return pc.fill_null(quoted, "null")

    def nested(self) -> np.ndarray:
        """Give the rows that hold objects or arrays, which are no part of a text."""
        if self.literal is False:
            return np.empty(0, dtype=np.int64)
        open = pc.fill_null(pc.match_substring_regex(self.text, r"^[\[{]"), False).to_numpy(zero_copy_only=False)
        return np.flatnonzero(open & self.literals())


def constant(text: str, count: int) -> pa.Array:
    """Give a column of one text."""
    return pa.repeat(pa.scalar(text, STRING), count)


def _quoted(texts: pa.Array) -> pa.Array:
    """Write texts as JSON strings; only those with something to escape are looked at one by one."""
    plain = pc.binary_join_element_wise(_QUOTE, texts, _QUOTE, _EMPTY)
    escaped = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), False)
    if not pc.any(escaped).as_py():
        return plain
    mask = escaped.to_numpy(zero_copy_only=False)
    written = [orjson.dumps(text).decode() for text in texts.filter(escaped).to_pylist()]
    return pc.replace_with_mask(plain, pa.array(mask), pa.array(written, type=STRING))


# Reading texts as something else.


def _numbers(texts: pa.Array) -> Column:
    fine = pc.match_substring_regex(texts, _SAFE_NUMBER)
    doubtful = np.flatnonzero(~pc.fill_null(fine, True).to_numpy(zero_copy_only=False))
    problems = {}
    for row in doubtful.tolist():
        text = texts[row].as_py()
        if not _ANY_NUMBER.fullmatch(text):
            problems[row] = f"{text[:60]!r} is not a number"
        elif float(text) in (float("inf"), float("-inf")):
            problems[row] = f"{text[:60]!r} is too large a number"
    return Column(_without(texts, problems), True, problems=problems)


def _truths(texts: pa.Array) -> Column:
    encoded = texts.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    values = pa.array([_TRUTH.get(word.lower()) for word in words], type=STRING)
    result = values.take(encoded.indices)
    wrong = pc.and_(pc.is_valid(texts), pc.is_null(result)).to_numpy(zero_copy_only=False)
    problems = {row: f"{texts[row].as_py()[:60]!r} is neither true nor false" for row in np.flatnonzero(wrong).tolist()}
    return Column(result, True, problems=problems)


def _documents(texts: pa.Array) -> Column:
    values = texts.to_pylist()
    rows = [row for row, text in enumerate(values) if text is not None]
    changed, wrong = canonicalize_all([values[row].encode() for row in rows])
    for at, data in changed.items():
        values[rows[at]] = data.decode()
    problems = {rows[at]: f"is not JSON: {problem}" for at, problem in wrong.items()}
    return Column(_without(pa.array(values, type=STRING), problems), True, problems=problems)


_READERS = {NUMBER: _numbers, BOOLEAN: _truths, JSON: _documents}


def _without(texts: pa.Array, problems: dict[int, str]) -> pa.Array:
    """Give texts with nulls where there are problems."""
    if not problems:
        return texts
    mask = np.zeros(len(texts), dtype=bool)
    mask[list(problems)] = True
    return pc.if_else(pa.array(mask), pa.scalar(None, STRING), texts)


# Columns of the formats.


def of_json_values(values: Sequence[Any]) -> Column:
    """Make a column of values as JSON has them: of `orjson.loads`, or of `bsfg.canonical.parse_literals`."""
    kinds = set(map(type, values))
    if kinds <= {str, type(None)}:
        return Column(pa.array(values, type=STRING))
    if kinds <= {int, float, bool, type(None)}:
        texts = pa.array(orjson.dumps(values).decode()[1:-1].split(","), type=STRING)
        return Column(pc.if_else(pc.equal(texts, "null"), pa.scalar(None, STRING), texts), True)
    literal = np.fromiter((type(value) is not str for value in values), dtype=bool, count=len(values))
    return Column(pa.array([_json_text(value) for value in values], type=STRING), literal)


def _json_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value  # a text, or a number exactly as it was written
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return write(value)
    return orjson.dumps(value).decode()


def write(value: Any) -> str:
    """Write a JSON value in canonical form; numbers may be in it as they were written."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS).decode()
    except orjson.JSONEncodeError:
        return write_literals(value).decode()


def of_arrow(array: pa.Array) -> Column:
    """Make a column of one of Parquet."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return of_arrow(array.dictionary_decode())
    for fits, make in _KINDS:
        if fits(kind):
            return make(array)
    return _one_by_one(array, lambda value: value.isoformat() if hasattr(value, "isoformat") else str(value))


def _of_floats(array: pa.Array) -> Column:
    numbers = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False)
    if numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers) & array.is_valid().to_numpy(zero_copy_only=False))
    problems = {int(row): f"is {numbers[row]}, which JSON cannot say" for row in wrong}
    data = orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY).decode()[1:-1]
    texts = pa.array(data.split(",") if data else [], type=STRING)
    if array.null_count or problems:
        texts = pc.if_else(array.is_valid(), texts, pa.scalar(None, STRING))
    return Column(_without(texts, problems), True, problems=problems)


def _of_stamps(array: pa.Array) -> Column:
    zoned = array.type.tz is not None
    moments = array.cast(pa.timestamp(array.type.unit, tz="UTC")) if zoned else array

    def text() -> pa.Array:
        texts = pc.strftime(moments, format="%Y-%m-%dT%H:%M:%S" + ("Z" if zoned else ""))
        return texts if array.type.unit == "s" else pc.replace_substring_regex(texts, r"\.?0+(Z?)$", r"\1")

    return Column(text, stamps=array)


def _one_by_one(array: pa.Array, write: Any, *, literal: bool = False) -> Column:
    texts: list[str | None] = []
    problems: dict[int, str] = {}
    for row, scalar in enumerate(array):
        text = None
        if scalar.is_valid:
            try:
                text = write(scalar.as_py())
            except (ValueError, OverflowError) as problem:
                problems[row] = f"cannot be written as text: {problem}"
        texts.append(text)
    return Column(pa.array(texts, type=STRING), literal, problems=problems)


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], Column]], ...] = (
    (
        lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t),
        lambda array: Column(array.cast(STRING)),
    ),
    (lambda t: pa.types.is_integer(t) or pa.types.is_boolean(t), lambda array: Column(array.cast(STRING), True)),
    (pa.types.is_floating, _of_floats),
    (pa.types.is_decimal, lambda array: _one_by_one(array, lambda value: format(value, "f"), literal=True)),
    (pa.types.is_timestamp, _of_stamps),
    (pa.types.is_nested, lambda array: _one_by_one(array, _nested_text, literal=True)),
    (lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t), lambda array: _one_by_one(array, bytes.decode)),
    (pa.types.is_fixed_size_binary, lambda array: _one_by_one(array, bytes.decode)),
    (pa.types.is_null, lambda array: Column(pa.nulls(len(array), STRING))),
)
"""How the types of Parquet are read; dates and times of day, which are left, have a text of their own."""


def _nested_text(value: Any) -> str:
    return canonicalize_value(_plain(value)).decode()


def _plain(value: Any) -> Any:
    """Give a nested value of Parquet in the types of JSON."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return {str(name): _plain(item) for name, item in value}
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
