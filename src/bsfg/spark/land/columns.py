"""Typed columns: fields of the JSON objects of facts as columns of their own, declared or found out from facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from bsfg.batch import EntryBatch
from bsfg.errors import InvalidArgument
from bsfg.fact import is_json
from bsfg.spark.mapping import COLUMNS, TIME

RESCUED = "rescued"
"""The column with what did not fit: the fields of an object that have other types than their columns, as JSON."""

COLUMNS_MAX = 200
INFER = "infer"

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_BARE = r'[^\s,."]+'
_STEP = rf'"(?:[^"]|"")*"|{_BARE}'
_COLUMN = re.compile(rf"({_NAME})\s+(\w+)(?:\s+from\s+((?:{_STEP})(?:\.(?:{_STEP}))*))?", re.IGNORECASE)
_STEPS = re.compile(_STEP)
_PARTS = re.compile(r'(?:"[^"]*"|[^",\n])+')
_SYNTAX = "Write NAME TYPE, or NAME TYPE from FIELD.FIELD, with commas or lines between: 'value double, unit string'."
_INT64 = range(-(1 << 63), 1 << 63)
_INT32 = range(-(1 << 31), 1 << 31)
_TAKEN = frozenset({*COLUMNS, "gap", "date", "month", "hour", RESCUED})


def _double(value: Any) -> float | None:
    found = float(value) if type(value) in (int, float) else None
    return found if found is not None and isfinite(found) else None


def _whole(bounds: range) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        if type(value) is float and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        return value if type(value) is int and value in bounds else None

    return read


def _timestamp(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(value)
        return None if found.tzinfo is None else found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _date(value: Any) -> date | None:
    try:
        return date.fromisoformat(value) if len(value) == 10 else None
    except (TypeError, ValueError):
        return None


def _json(value: Any) -> str | None:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


_TYPES: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {
    "string": (pa.string(), lambda value: value if type(value) is str else None),
    "double": (pa.float64(), _double),
    "bigint": (pa.int64(), _whole(_INT64)),
    "int": (pa.int32(), _whole(_INT32)),
    "boolean": (pa.bool_(), lambda value: value if type(value) is bool else None),
    "timestamp": (TIME, _timestamp),
    "date": (pa.date32(), _date),
    "json": (pa.string(), _json),
}
"""The types of columns, as Spark names them, and what makes a value of each, or None of what does not fit."""

_ALSO = {"long": "bigint", "integer": "int", "bool": "boolean", "float": "double", "text": "string"}


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column of its own for a field of the object: its name, its type, and the names that lead to the field."""

    name: str
    type: str
    steps: tuple[str, ...]

    @property
    def field(self) -> pa.Field:
        """The column in Arrow."""
        return pa.field(self.name, _TYPES[self.type][0])

    @property
    def path(self) -> str:
        """The names that lead to the field, as they are written."""
        return ".".join(step if re.fullmatch(_BARE, step) else _quoted(step) for step in self.steps)

    def __str__(self) -> str:
        source = "" if self.steps == (self.name,) else f" from {self.path}"
        return f"{self.name} {self.type}{source}"


def _quoted(step: str) -> str:
    doubled = step.replace('"', '""')
    return f'"{doubled}"'


def read_columns(text: str) -> tuple[TypedColumn, ...]:
    """Read columns as somebody writes them, or from the file whose name follows an @."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--columns {text} cannot be read: {error}", hint=_SYNTAX) from None
        text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = tuple(_column(part.strip()) for part in _PARTS.findall(text) if part.strip())
    if not found:
        raise InvalidArgument("--columns names no column", hint=_SYNTAX)
    return joined((), found)


def _column(text: str) -> TypedColumn:
    found = _COLUMN.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"--columns has {text!r}, which is no column", hint=_SYNTAX)
    name, kind, source = found[1], found[2].lower(), found[3]
    kind = _ALSO.get(kind, kind)
    if kind not in _TYPES:
        raise InvalidArgument(f"--columns has the type {found[2]!r}", hint=f"There are {', '.join(_TYPES)}.")
    if name.lower() in _TAKEN:
        hint = f"Give it another name: '{name}_value {kind} from {source or name}'."
        raise InvalidArgument(f"--columns names {name}, which is a column of every fact", hint=hint)
    steps = tuple(_plain(step) for step in _STEPS.findall(source)) if source else (name,)
    return TypedColumn(name, kind, steps)


def _plain(step: str) -> str:
    return step[1:-1].replace('""', '"') if step.startswith('"') else step


def joined(known: Sequence[TypedColumn], more: Sequence[TypedColumn]) -> tuple[TypedColumn, ...]:
    """Add columns to those of a table. What is there stays: a column cannot change its type or its field."""
    found = {column.name.lower(): column for column in known}
    for column in more:
        before = found.setdefault(column.name.lower(), column)
        if before != column:
            hint = (
                "A column stays what it was made as: give the new one another name, as in 'value_2 string from value'."
            )
            raise InvalidArgument(f"the column '{before}' cannot become '{column}'", hint=hint)
    if len(found) > COLUMNS_MAX:
        raise InvalidArgument(f"{len(found)} columns are too many", hint=f"A table has at most {COLUMNS_MAX} of them.")
    return tuple(found.values())


def typed(columns: Sequence[TypedColumn], entries: EntryBatch) -> list[pa.Array]:
    """Take the columns out of the objects of entries, and what did not fit as the last array."""
    count = len(entries)
    values: list[list[Any]] = [[None] * count for _ in columns]
    rescued: list[str | None] = [None] * count
    readers = [(column.steps, column.path, _TYPES[column.type][1]) for column in columns]
    for row, found in enumerate(_objects(entries)):
        if not isinstance(found, dict):
            rescued[row] = found
            continue
        misfits = {}
        for at, (steps, path, read) in enumerate(readers):
            value = _at(found, steps)
            if value is None:
                continue
            fit = _fitted(read, value)
            if fit is None:
                misfits[path] = value
            else:
                values[at][row] = fit
        if misfits:
            rescued[row] = _fitted(_json, misfits)
    arrays = [pa.array(each, column.field.type) for each, column in zip(values, columns, strict=True)]
    return [*arrays, pa.array(rescued, pa.string())]


def _objects(entries: EntryBatch) -> Iterable[dict[str, Any] | str | None]:
    """Give each object that is JSON as a dict, or as its text when it is something else."""
    kinds = entries.column("object_media_type").to_pylist()
    for data, kind in zip(entries.column("object").to_pylist(), kinds, strict=True):
        if data is None or (kind is not None and not is_json(kind)):
            yield None
            continue
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError:
            found = None
        yield found if isinstance(found, dict) else data.decode("utf-8", "replace")


def _at(found: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if not isinstance(found, dict):
            return None
        found = found.get(step)
    return found


def _fitted(read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except orjson.JSONEncodeError:  # Nested deeper than it can be written; the object itself has it.
        return None


# Columns that are found out from facts.


@dataclass(frozen=True, slots=True)
class InferredColumn:
    """What was found out about a field of the objects of one predicate: how many facts have it, and how many fit."""

    predicate: str
    field: str
    column: str
    type: str
    facts: int
    having: int
    fitting: int


class Inference:
    """Finds out from facts which columns their objects could have, and how well those fit each predicate."""

    def __init__(self) -> None:
        self._facts: Counter[str] = Counter()
        self._seen: dict[str, dict[str, Counter[str]]] = {}

    def add(self, entries: EntryBatch) -> None:
        """Look at facts."""
        for predicate, found in zip(entries.column("predicate").to_pylist(), _objects(entries), strict=True):
            self._facts[predicate] += 1
            if isinstance(found, dict):
                for name, value in found.items():
                    if value is not None:
                        self._seen.setdefault(name, {}).setdefault(predicate, Counter())[_kind(value)] += 1

    def columns(self, known: Sequence[TypedColumn] = ()) -> tuple[TypedColumn, ...]:
        """Give the columns, those that are known first; of a field with several types most facts decide."""
        names = {column.name.lower() for column in known}
        fields = {column.steps for column in known}
        found = list(known)
        for name, predicates in sorted(self._seen.items(), key=lambda item: (-_total(item[1]), item[0])):
            column = re.sub(r"[^A-Za-z0-9_]", "_", name)
            if column.lower() in _TAKEN or not re.fullmatch(_NAME, column):
                column = f"object_{column}"
            if (name,) in fields or column.lower() in names or len(found) >= COLUMNS_MAX:
                continue
            names.add(column.lower())
            found.append(TypedColumn(column, _type(sum(predicates.values(), Counter())), (name,)))
        return tuple(found)

    def report(self, columns: Sequence[TypedColumn]) -> list[InferredColumn]:
        """Tell for each predicate and field how many of the facts looked at have it, and in how many it fits."""
        by_field = {column.steps[0]: column for column in columns if len(column.steps) == 1}
        return [
            InferredColumn(
                predicate,
                name,
                column.name if column else "",
                column.type if column else "",
                self._facts[predicate],
                sum(kinds.values()),
                sum(count for kind, count in kinds.items() if column and _takes(column.type, kind)),
            )
            for name, predicates in self._seen.items()
            for column in [by_field.get(name)]
            for predicate, kinds in sorted(predicates.items())
        ]


def _total(predicates: dict[str, Counter[str]]) -> int:
    return sum(sum(kinds.values()) for kinds in predicates.values())


def _kind(value: Any) -> str:
    """Give the narrowest type of a value."""
    for kind in ("boolean", "bigint", "double", "string"):
        if (type(value) is not float or kind == "double") and _TYPES[kind][1](value) is not None:
            return kind
    return "json"


def _type(kinds: Counter[str]) -> str:
    if set(kinds) == {"bigint", "double"}:
        return "double"
    return max(sorted(kinds), key=lambda kind: kinds[kind])


def _takes(type: str, kind: str) -> bool:
    return type in (kind, "json") or (type, kind) == ("double", "bigint")
