"""What a user asked for: which column goes where, how texts are to be read, and a digest of all that."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from bsfg.errors import InvalidArgument
from bsfg.fact import JSON_MEDIA_TYPE, is_json
from bsfg.model import DEFAULT_LIMITS, LABEL_NAME, STREAM, TEXT_RULES, check_name
from bsfg.spark.ingest.times import TimeFormat, microseconds, zone_of

ROW, FILE, DIGEST, CONTENT = "@row", "@file", "@digest", "@content"
SPECIAL = {
    ROW: "the number of the row in its file, from 1",
    FILE: "the name of the file without its folder",
    DIGEST: "the SHA-256 of the file, 32 hexadecimal digits of it",
    CONTENT: "the SHA-256 of subject, predicate, time and object, 32 hexadecimal digits of it",
}
"""What a template can name besides columns."""

TEXT, NUMBER, BOOLEAN, JSON = "text", "number", "boolean", "json"
TYPES = (TEXT, NUMBER, BOOLEAN, JSON)
"""What a text can be in the object."""

REQUIRED = ("from_zone", "to_zone", "produced_at", "subject", "predicate")
OPTIONAL = ("message_id", "correlation_id", "causation_id", "object_schema", "object_media_type")
FIELDS = (*REQUIRED, *OPTIONAL)
LABEL = "label."

ID_WORDS = {"file": "{@digest}-{@row}", "content": "{@content}", "none": None}
"""Short names for where message ids come from."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Template:
    """Text with columns in it: literals at even places, names of columns at odd ones."""

    parts: tuple[str, ...]

    @staticmethod
    def constant(text: str) -> Template:
        """Make a template of nothing but text."""
        return Template((text,))

    @staticmethod
    def column(name: str) -> Template:
        """Make a template of nothing but a column."""
        return Template(("", name, ""))

    @staticmethod
    def parse(text: str) -> Template:
        """Read a template such as ``asset:PlantA/{machine}``; doubled braces stand for themselves."""
        parts, literal, at = [], "", 0
        for found in _PART.finditer(text):
            literal += text[at : found.start()]
            at = found.end()
            if found.group() in ("{{", "}}"):
                literal += found.group()[0]
            elif found.group(1) is not None:
                parts += [literal, found.group(1)]
                literal = ""
            else:
                hint = "Write {column}, and {{ or }} for a brace itself."
                raise InvalidArgument(f"the template {text!r} has a brace without its partner", hint=hint)
        return Template((*parts, literal + text[at:]))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns and special values that it names."""
        return self.parts[1::2]

    @property
    def value(self) -> str | None:
        """What it always says, None when that depends on the row."""
        return self.parts[0] if len(self.parts) == 1 else None

    @property
    def only_column(self) -> str | None:
        """The one column that it consists of, if it does."""
        return self.parts[1] if len(self.parts) == 3 and not (self.parts[0] or self.parts[2]) else None


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """How CSV files are written."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    decimal: str = "."
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = self.delimiter
        if given is not None and (len(given) != 1 or not given.isascii() or given in '"\r\n'):
            hint = "For example --delimiter ';', or --delimiter tab."
            raise InvalidArgument(f"the delimiter {given!r} is not one ASCII character", hint=hint)
        if self.encoding not in ENCODINGS:
            raise InvalidArgument(f"the encoding must be one of {', '.join(ENCODINGS)}, not {self.encoding!r}")
        if self.decimal not in ".,":
            raise InvalidArgument(f"the decimal mark must be . or , and not {self.decimal!r}")
        if self.columns is not None and (len(set(self.columns)) != len(self.columns) or not all(self.columns)):
            raise InvalidArgument("the names of the columns must differ, and none may be empty")

    def separator(self, path: str) -> str:
        """Give what stands between the fields of a file: what was said, or a tab in .tsv and a comma elsewhere."""
        return self.delimiter or ("\t" if path.lower().endswith(".tsv") else ",")


ENCODINGS = ("utf-8", "latin-1", "cp1252")
"""Encodings in which a byte below 128 is ASCII, so that lines and fields can be found in the bytes."""


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What becomes the object: all columns, some of them under keys of their own, or the content of one column."""

    whole: bool = True
    fields: tuple[tuple[str, str], ...] = ()
    column: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole mapping, checked."""

    stream: str
    fields: Mapping[str, Template]
    labels: tuple[tuple[str, Template], ...] = ()
    object: ObjectPlan = ObjectPlan()
    types: Mapping[str, str] = field(default_factory=dict)
    time: TimeFormat = field(default_factory=TimeFormat)
    csv: CsvFormat = field(default_factory=CsvFormat)
    max_object_bytes: int = DEFAULT_LIMITS.max_object_bytes
    max_row_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        check_name("stream", self.stream, STREAM)
        _check_fields(self.fields)
        _check_labels(self.labels)
        _check_types(self.types)
        _check_time(self.fields["produced_at"], self.time)
        if self.object.column is not None and self.object.column.startswith("@"):
            raise InvalidArgument(f"{self.object.column} cannot be the object", hint="Name a column.")

    @property
    def media_type(self) -> Template:
        """Where the media type of the object comes from."""
        return self.fields.get("object_media_type", Template.constant(JSON_MEDIA_TYPE))

    @property
    def makes_json(self) -> bool:
        """Whether objects are JSON, so that they must be valid and are canonicalised."""
        value = self.media_type.value
        return value is None or is_json(value)

    def columns(self) -> list[str]:
        """Name the columns that must be there, without special values, in the order of the fields."""
        named = [name for template in self.fields.values() for name in template.columns]
        named += [name for _, template in self.labels for name in template.columns]
        named += [column for _, column in self.object.fields]
        named += [self.object.column] if self.object.column is not None else []
        named += list(self.types)
        return [name for name in dict.fromkeys(named) if not name.startswith("@")]

    def to_dict(self) -> dict[str, Any]:
        """Give all that decides about the facts, for people to look at and for `fingerprint`."""
        found = asdict(self)
        found["fields"] = {name: list(each.parts) for name, each in self.fields.items()}
        found["labels"] = {name: list(each.parts) for name, each in self.labels}
        return found

    def fingerprint(self, *more: str) -> str:
        """Give a digest of the mapping and of ``more``: what has another one is another job."""
        data = orjson.dumps([self.to_dict(), more], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(data).hexdigest()


def _check_fields(fields: Mapping[str, Template]) -> None:
    for name in fields:
        if name not in FIELDS:
            raise InvalidArgument(f"facts have no field {name!r}", hint=f"There are {', '.join(FIELDS)}, label.NAME.")
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        raise InvalidArgument(f"what {missing[0]} is to be is not said", hint=_EXAMPLES[missing[0]])
    for name, template in fields.items():
        for column in template.columns:
            if column.startswith("@") and (column not in SPECIAL or (column == CONTENT and name != "message_id")):
                raise InvalidArgument(f"{name} cannot be made of {{{column}}}", hint=_special_hint())
    if fields["produced_at"].only_column is None and fields["produced_at"].value is None:
        raise InvalidArgument("produced_at must be one column, or a time for all", hint=_EXAMPLES["produced_at"])
    _check_constants(fields)


def _check_constants(fields: Mapping[str, Template]) -> None:
    """Refuse at once what would be refused row by row."""
    for rule in TEXT_RULES:
        value = fields[rule.name].value if rule.name in fields else None
        if value is not None and rule.breaks(value):
            raise InvalidArgument(f"{rule.name} {value[:80]!r} {rule.says}", hint=_EXAMPLES.get(rule.name))
    id = fields.get("message_id")
    if id is not None and id.value is not None:
        hint = "Name the columns that tell rows apart: --id '{machine}/{sequence}'. To use the file's digest: --id file"
        raise InvalidArgument(f"every row would have the message_id {id.value!r}", hint=hint)


def _check_time(template: Template, time: TimeFormat) -> None:
    if template.value is not None:
        try:
            microseconds(template.value, time.format, zone_of(time.zone) if time.zone is not None else None)
        except ValueError as problem:
            raise InvalidArgument(f"produced_at {template.value!r} {problem}") from None


def _check_labels(labels: tuple[tuple[str, Template], ...]) -> None:
    for name, template in labels:
        if not re.fullmatch(LABEL_NAME, name):
            raise InvalidArgument(f"label name {name!r} must match {LABEL_NAME}")
        for column in template.columns:
            if column.startswith("@") and column not in (ROW, FILE, DIGEST):
                raise InvalidArgument(f"{LABEL}{name} cannot be made of {{{column}}}", hint=_special_hint())


def _check_types(types: Mapping[str, str]) -> None:
    for column, kind in types.items():
        if kind not in TYPES:
            raise InvalidArgument(f"the type of {column} must be one of {', '.join(TYPES)}, not {kind!r}")


def _special_hint() -> str:
    return f"Besides columns there are {', '.join(SPECIAL)} (the last in message_id only)."


_EXAMPLES = {
    "from_zone": "Give --from-zone, or --config with the zone's file.",
    "to_zone": "Give --to-zone, such as --to-zone enterprise.",
    "produced_at": "Name a column, such as --map produced_at=ts, or a time: --set produced_at=2026-03-01T06:00:00Z",
    "subject": "For example --map 'subject=asset:PlantA/{machine}'",
    "predicate": "For example --set predicate=temperature_measured, or --map predicate=kind",
}
