"""Declares configuration keys as fields of dataclasses, and builds those dataclasses from a parsed file.

A key is declared once, with its kind, default, meaning and example. The reader, the file that `bsfg init` writes and
the reference page all follow from that declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_type_hints

from bsfg.config.kinds import ValueKind, WrongValue, nearest
from bsfg.config.positions import Path

T = TypeVar("T")

_META = "bsfg"
_UNITS = ("_seconds", "_bytes", "_unix_ms", "_percent")


class _Required:
    pass


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of a table; ``default`` and ``example`` are written as in the file."""

    name: str
    attribute: str
    kind: ValueKind[Any]
    default: object
    says: str
    example: object

    @property
    def required(self) -> bool:
        """Whether a file must give it."""
        return isinstance(self.default, _Required)


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """One table of the file; ``named`` ones occur once per name, as in ``[streams.audit]``.

    A name with a dot is that of a table inside another one.
    """

    name: str
    attribute: str
    cls: type[Any]
    says: str
    named: ValueKind[str] | None = None
    example_name: str = ""

    @property
    def title(self) -> str:
        """Give the table's header."""
        return f"[{self.name}.<{self.named.name}>]" if self.named else f"[{self.name}]"

    @property
    def path(self) -> Path:
        """Give where the table stands in the file."""
        return tuple(self.name.split("."))

    @property
    def given_name(self) -> str:
        """Give the field that holds the name of a row."""
        return next(item.name for item in dataclasses.fields(self.cls) if item.metadata.get("given_name"))

    def settings(self) -> Iterator[ConfigKey]:
        """Give the table's keys in the order of their declaration."""
        for item in dataclasses.fields(self.cls):
            declared = item.metadata.get(_META)
            if declared is not None:
                yield ConfigKey(_file_name(item.name), item.name, **declared)


def setting(kind: ValueKind[Any], default: object = REQUIRED, *, says: str, example: object = None) -> Any:
    """Declare a key; without a default it is required."""
    metadata = {_META: {"kind": kind, "default": default, "says": says, "example": example}}
    if isinstance(default, _Required):
        return field(metadata=metadata)
    return field(default=kind.read(default), metadata=metadata)


def optional(kind: ValueKind[Any], *, says: str, example: object) -> Any:
    """Declare a key that may be left out and then has no value."""
    return field(default=None, metadata={_META: {"kind": kind, "default": None, "says": says, "example": example}})


def given_name() -> str:
    """Declare the field that receives the name of a named table."""
    return cast(str, field(metadata={"given_name": True}))


def table(says: str, *, name: str | None = None) -> Any:
    """Declare a table that occurs at most once; its name is that of the field, unless it is inside another table."""
    return field(metadata={"table": {"says": says, **({"name": name} if name else {})}})


def tables(says: str, *, named: ValueKind[str], example_name: str) -> Any:
    """Declare tables of which there may be several, each with a name."""
    return field(metadata={"table": {"says": says, "named": named, "example_name": example_name}})


def tables_of(cls: type[Any]) -> Iterator[ConfigTable]:
    """Give the tables of a whole file, in the order of their declaration."""
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        declared = item.metadata.get("table")
        if declared is not None:
            hint = hints[item.name]
            row = hint.__args__[1] if "named" in declared else hint
            yield ConfigTable(**{"name": item.name, "attribute": item.name, "cls": row, **declared})


def _file_name(attribute: str) -> str:
    """Drop the unit from an attribute's name: in the file it is part of the value."""
    for unit in _UNITS:
        if attribute.endswith(unit):
            return attribute.removesuffix(unit)
    return attribute


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file, and where."""

    path: Path
    says: str

    @property
    def row(self) -> Path:
        """Give the table the problem is in."""
        return self.path[:2] if len(self.path) > 2 else self.path[:1]

    @property
    def key(self) -> str:
        """Give the dotted name of the place."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Write a path as TOML would, with quotes only where a name needs them."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part.replace("-", "").replace("_", "").isalnum() and part.isascii()
            text += ("." if text else "") + (part if bare else f'"{part}"')
    return text


@dataclass
class ConfigReader:
    """Builds dataclasses from what the file holds and collects every problem instead of stopping at the first.

    A key that cannot be read takes its default, so that the rest of the file can still be checked. ``whole`` tells
    that no row had to be left out for want of a required key.
    """

    problems: list[Problem] = field(default_factory=list)
    whole: bool = True
    _tables: list[ConfigTable] = field(default_factory=list)

    def fail(self, path: Path, says: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(path, says))

    def file(self, cls: type[T], data: Mapping[str, Any]) -> T:
        """Build the whole configuration; it can be used only when there are no problems."""
        self._tables = list(tables_of(cls))
        data = _inner_apart(data, self._tables)
        self._unknown(data, (), [item.name for item in self._tables], "table")
        return cls(
            **{
                item.attribute: self._named(item, data) if item.named else self._single(item, data)
                for item in self._tables
            }
        )

    def _single(self, table: ConfigTable, data: Mapping[str, Any]) -> Any:
        return self._row(table, data.get(table.name, {}), table.path, None)

    def _named(self, table: ConfigTable, data: Mapping[str, Any]) -> dict[str, Any]:
        rows = data.get(table.name, {})
        if not isinstance(rows, dict):
            self._leave_out((table.name,), f"must be tables such as [{table.name}.{table.example_name}]")
            return {}
        built = {}
        for name, row in rows.items():
            path = (table.name, name)
            try:
                cast(ValueKind[str], table.named).read(name)
            except WrongValue as error:
                self.fail(path, str(error))
            built[name] = self._row(table, row, path, name)
        return {name: row for name, row in built.items() if row is not None}

    def _row(self, table: ConfigTable, data: object, path: Path, name: str | None) -> Any:
        if not isinstance(data, dict):
            return self._leave_out(path, "must be a table, not a single value")
        declared = list(table.settings())
        self._unknown(data, path, [item.name for item in declared], "key")
        values = {item.attribute: value for item in declared if (value := self._value(item, data, path)) is not None}
        if any(item.required and item.attribute not in values for item in declared):
            self.whole = False
            return None
        if table.named:
            values[table.given_name] = name
        return table.cls(**values)

    def _value(self, item: ConfigKey, data: Mapping[str, Any], path: Path) -> Any:
        if item.name in data:
            try:
                return item.kind.read(data[item.name])
            except WrongValue as error:
                self.fail((*path, item.name), str(error))
        elif item.required:
            self.fail(path, f"{item.name} is missing ({item.kind.name}, for example {toml(item.example)})")
        return None

    def _leave_out(self, path: Path, says: str) -> None:
        self.whole = False
        self.fail(path, says)

    def _unknown(self, data: Mapping[str, Any], path: Path, names: list[str], what: str) -> None:
        for name in data:
            if name not in names:
                homes = [table.title for table in self._tables if name in {item.name for item in table.settings()}]
                meant = nearest(name, names) or (f"; it belongs in {homes[0]}" if homes else "")
                known = "" if meant else f"; known here: {', '.join(names)}"
                self.fail((*path, name), f"unknown {what}{meant}{known}")


def _inner_apart(data: Mapping[str, Any], tables: list[ConfigTable]) -> dict[str, Any]:
    """Give the tables of a file with those inside of others beside them, by their whole names."""
    apart = dict(data)
    for outer, inner in (table.path for table in tables if len(table.path) == 2):
        if isinstance(apart.get(str(outer)), dict) and inner in apart[str(outer)]:
            rest = dict(apart[str(outer)])
            apart[f"{outer}.{inner}"] = rest.pop(inner)
            apart[str(outer)] = rest
    return apart


def toml(value: object) -> str:
    """Write a plain value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {toml(item)}' for name, item in value.items())} }}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
