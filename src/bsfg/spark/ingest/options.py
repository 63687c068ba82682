"""From what a user wrote, on the command line or in a file, to a plan."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bsfg.errors import InvalidArgument
from bsfg.model import DEFAULT_LIMITS
from bsfg.spark.ingest.plan import FIELDS, ID_WORDS, ISO, LABEL, CsvFormat, IngestPlan, ObjectPlan, Template, TimeFormat

OBJECT = "object"
_TAB = ("tab", "\\t")
_TOP = (
    "stream",
    "from_zone",
    "to_zone",
    "format",
    "id",
    "object",
    "map",
    "set",
    "types",
    "time",
    "csv",
    "max_object_bytes",
)
_CSV = ("delimiter", "encoding", "decimal", "columns")
_TIME = ("format", "zone")


@dataclass(slots=True)
class Asked:
    """What was asked for, None where it was left open.

    ``map`` says where fields come from: a column, or a template with columns in braces. ``set`` gives texts that are
    the same in all rows.
    """

    stream: str | None = None
    from_zone: str | None = None
    to_zone: str | None = None
    format: str | None = None
    id: str | None = None
    object: str | Sequence[str] | None = None
    map: dict[str, str] = field(default_factory=dict)
    set: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    time_format: str | None = None
    time_zone: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    columns: Sequence[str] | None = None
    max_object_bytes: int | None = None

    def over(self, other: Asked) -> Asked:
        """Give what was asked for here, and where nothing was, what was asked for there."""
        merged = Asked()
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                setattr(merged, name, {**theirs, **mine})
            else:
                setattr(merged, name, theirs if mine is None else mine)
        # A field that is mapped here was perhaps set there, or the other way round.
        merged.map = {name: text for name, text in merged.map.items() if name not in self.set}
        merged.set = {name: text for name, text in merged.set.items() if name not in self.map}
        return merged

    def plan(self) -> IngestPlan:
        """Make the plan, or raise `InvalidArgument` with what is missing or wrong."""
        if self.stream is None:
            raise InvalidArgument("the stream is not said", hint="Give --stream, such as --stream operational.")
        fields, labels = self._fields()
        return IngestPlan(
            self.stream,
            fields,
            labels,
            self._object(),
            dict(self.types),
            TimeFormat(self.time_format or ISO, self.time_zone),
            CsvFormat(
                "\t" if self.delimiter in _TAB else self.delimiter,
                (self.encoding or "utf-8").lower(),
                self.decimal or ".",
                tuple(self.columns) if self.columns is not None else None,
            ),
            self.max_object_bytes or DEFAULT_LIMITS.max_object_bytes,
        )

    def _fields(self) -> tuple[dict[str, Template], tuple[tuple[str, Template], ...]]:
        both = sorted(set(self.map) & set(self.set))
        if both:
            raise InvalidArgument(f"{both[0]} is both mapped and set", hint="Choose one of --map and --set.")
        templates = {name: _mapped(text) for name, text in self.map.items() if name != OBJECT}
        templates |= {name: Template.constant(text) for name, text in self.set.items()}
        for name, zone in (("from_zone", self.from_zone), ("to_zone", self.to_zone)):
            if zone is not None:
                templates.setdefault(name, Template.constant(zone))
        if OBJECT in self.set:
            raise InvalidArgument(
                "the object cannot be the same in all rows", hint="Name a column: --map object=payload"
            )
        self._id(templates)
        for name in templates:
            if name not in FIELDS and not name.startswith(LABEL):
                near = get_close_matches(name, [*FIELDS, OBJECT], 1)
                guess = f"; did you mean {near[0]}?" if near else ""
                known = ", ".join((*FIELDS, OBJECT, "label.NAME"))
                raise InvalidArgument(f"facts have no field {name!r}{guess}", hint=f"There are {known}.")
        fields = {name: template for name, template in templates.items() if not name.startswith(LABEL)}
        labels = {name.removeprefix(LABEL): each for name, each in templates.items() if name.startswith(LABEL)}
        return fields, tuple(sorted(labels.items()))

    def _id(self, templates: dict[str, Template]) -> None:
        if self.id is not None and "message_id" in templates:
            raise InvalidArgument("the message_id is said twice", hint="Leave out --id, or --map message_id=…")
        if "message_id" in templates:
            return
        text = ID_WORDS.get(self.id or "file", self.id)
        if text is not None:
            templates["message_id"] = _mapped(text)

    def _object(self) -> ObjectPlan:
        if OBJECT in self.map:
            if self.object is not None:
                raise InvalidArgument("the object is said twice", hint="Leave out --object, or --map object=…")
            name = _mapped(self.map[OBJECT]).only_column
            if name is None:
                hint = "One column: --map object=payload. Several as JSON: --object value,unit"
                raise InvalidArgument("the object is one column, or JSON of several", hint=hint)
            return ObjectPlan(whole=False, column=name)
        chosen = self.object
        if chosen is None or chosen in ("*", ["*"]):
            return ObjectPlan()
        parts = [part.strip() for part in chosen.split(",")] if isinstance(chosen, str) else list(chosen)
        fields = [_keyed(part) for part in parts]
        keys = [key for key, _ in fields]
        if len(set(keys)) != len(keys) or not all(keys):
            raise InvalidArgument(f"the keys of the object must differ and have names: {', '.join(keys)}")
        return ObjectPlan(whole=False, fields=tuple(fields))


def _mapped(text: str) -> Template:
    """Read where a field comes from: a bare word is a column, anything with braces is a template."""
    if not text:
        raise InvalidArgument("a field is mapped to nothing", hint="Give a column, or a template such as {column}.")
    return Template.parse(text) if "{" in text or "}" in text else Template.column(text)


def _keyed(text: str) -> tuple[str, str]:
    key, equals, column = text.partition("=")
    return (key.strip(), column.strip()) if equals else (text, text)


def pairs(texts: Sequence[str] | None, option: str, example: str) -> dict[str, str]:
    """Read NAME=VALUE as often as it was given."""
    result: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InvalidArgument(f"{option} {text!r} is not of the form NAME=VALUE", hint=f"For example {example}")
        if name.strip() in result:
            raise InvalidArgument(f"{option} says {name.strip()} twice")
        result[name.strip()] = value
    return result


def from_file(path: Path) -> Asked:
    """Read a mapping from a TOML file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}") from None
    _check_keys(path, tables, _TOP, "")
    csv, time = _table(path, tables, "csv", _CSV), _table(path, tables, "time", _TIME)
    texts = {name: _text(path, name, tables[name]) for name in _TOP[:5] if name in tables}
    return Asked(
        **texts,
        object=_text_or_list(path, "object", tables.get("object")),
        map=_fields(path, tables, "map"),
        set=_fields(path, tables, "set"),
        types=_fields(path, tables, "types"),
        time_format=_optional(path, "time.format", time.get("format")),
        time_zone=_optional(path, "time.zone", time.get("zone")),
        delimiter=_optional(path, "csv.delimiter", csv.get("delimiter")),
        encoding=_optional(path, "csv.encoding", csv.get("encoding")),
        decimal=_optional(path, "csv.decimal", csv.get("decimal")),
        columns=_text_or_list(path, "csv.columns", csv.get("columns")),
        max_object_bytes=_whole_number(path, tables.get("max_object_bytes")),
    )


def _check_keys(path: Path, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in table:
        if name not in known:
            near = get_close_matches(name, known, 1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise InvalidArgument(f"{path}: there is no {where}{name}{guess}", hint=f"There are {', '.join(known)}.")


def _table(path: Path, tables: Mapping[str, Any], name: str, known: Sequence[str] | None) -> dict[str, Any]:
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path}: {name} must be a table: [{name}]")
    if known is not None:
        _check_keys(path, found, known, f"{name}.")
    return found


def _fields(path: Path, tables: Mapping[str, Any], name: str) -> dict[str, str]:
    """Read a table of texts; a table inside, such as [map.label], gives its names with a dot."""
    result: dict[str, str] = {}
    for key, value in _table(path, tables, name, None).items():
        if isinstance(value, dict):
            result |= {f"{key}.{inner}": _text(path, f"{name}.{key}.{inner}", each) for inner, each in value.items()}
        else:
            result[key] = _text(path, f"{name}.{key}", value)
    return result


def _text(path: Path, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{path}: {name} must be a text in quotes, not {value!r}")
    return value


def _optional(path: Path, name: str, value: Any) -> str | None:
    return None if value is None else _text(path, name, value)


def _text_or_list(path: Path, name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_text(path, name, each) for each in value]
    return _optional(path, name, value)


def _whole_number(path: Path, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{path}: max_object_bytes must be a number of bytes")
    return value
