"""What a user asked for: which column goes where, how texts and times are to be read, and a digest of all that."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.errors import InvalidArgument
from bsfg.fact import JSON_MEDIA_TYPE, is_json
from bsfg.model import DEFAULT_LIMITS, LABEL_NAME, STREAM, TEXT_RULES, check_name

UNIX_UNITS = {"unix_s": 1_000_000, "unix_ms": 1_000, "unix_us": 1, "unix_ns": 0}
"""Formats of numbers, with the microseconds of one of them; a nanosecond has less than one."""

ISO = "iso"
MICROSECONDS = pa.timestamp("us")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FARTHEST = 1 << 62
_ZONED = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)$"
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")
_NEEDS_ZONE = "has no time zone; say which one with --timezone, such as UTC or Europe/Berlin"


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """How times are written: ``iso``, one of the unix units, or a pattern of strptime; and the zone of naive ones."""

    format: str = ISO
    zone: str | None = None

    def __post_init__(self) -> None:
        if self.format != ISO and self.format not in UNIX_UNITS and "%" not in self.format:
            known = ", ".join((ISO, *UNIX_UNITS))
            hint = f"There are {known}, and patterns such as '%d.%m.%Y %H:%M:%S'."
            raise InvalidArgument(f"{self.format!r} is no format of times", hint=hint)
        if self.zone is not None:
            zone_of(self.zone)


def zone_of(name: str) -> tzinfo:
    """Find a time zone by its name, or raise `InvalidArgument`."""
    if name.upper() in ("UTC", "Z"):
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidArgument(f"there is no time zone {name!r}", hint="For example UTC or Europe/Berlin.") from None


def text_times(texts: pa.Array, time: TimeFormat) -> tuple[pa.Array, dict[int, str]]:
    """Give times in microseconds since 1970 UTC, null where there is none, and what is wrong with which row.

    The usual form, ISO with a zone, is read as a whole column; anything else row by row.
    """
    if time.format == ISO and len(texts) and texts.null_count == 0:
        usual = pc.match_substring_regex(texts, _ZONED)
        if pc.all(usual).as_py():
            try:
                return texts.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), {}
            except pa.ArrowInvalid:
                pass  # a day or hour that there is not; the look at each row finds it
    return _times_one_by_one(texts, time)


def _times_one_by_one(texts: pa.Array, time: TimeFormat) -> tuple[pa.Array, dict[int, str]]:
    zone = zone_of(time.zone) if time.zone is not None else None
    problems: dict[int, str] = {}
    values: list[int | None] = []
    for row, text in enumerate(texts.to_pylist()):
        found: int | None = None
        if text is not None:
            try:
                found = microseconds(text.strip(), time.format, zone)
            except ValueError as problem:
                problems[row] = f"{text[:60]!r} {problem}"
        values.append(found)
    return pa.array(values, type=pa.int64()), problems


def microseconds(text: str, format: str, zone: tzinfo | None) -> int:
    """Read one time; raises `ValueError` with a rule that it breaks."""
    if format in UNIX_UNITS:
        return _from_number(text, format)
    try:
        moment = datetime.fromisoformat(text) if format == ISO else datetime.strptime(text, format)
    except (ValueError, OverflowError):
        form = "an ISO time such as 2026-03-01T06:00:00Z" if format == ISO else f"a time of the form {format}"
        raise ValueError(f"is not {form}") from None
    return from_moment(moment, zone)


def from_moment(moment: datetime, zone: tzinfo | None) -> int:
    """Give the microseconds of a time; one without a zone is taken for one of ``zone``."""
    if moment.tzinfo is None:
        if zone is None:
            raise ValueError(_NEEDS_ZONE)
        moment = _in_zone(moment, zone)
    try:
        return (moment - _EPOCH) // _MICROSECOND
    except OverflowError:
        raise ValueError("lies outside of what can be counted") from None


def _in_zone(naive: datetime, zone: tzinfo) -> datetime:
    """Put a time into a zone; one that clocks skip or show twice there has no meaning and is refused."""
    moment = naive.replace(tzinfo=zone)
    try:
        back = moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None)
    except OverflowError:
        raise ValueError("lies outside of what can be counted") from None
    if back != naive:
        raise ValueError(f"never was in {zone}: clocks were put forward over it")
    if moment.utcoffset() != moment.replace(fold=1).utcoffset():
        raise ValueError(f"was twice in {zone}: clocks were put back over it, so the offset must be part of the time")
    return moment


def _from_number(text: str, format: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"is not a number of {format}")
    whole, _, fraction = text.partition(".")
    if format == "unix_ns":
        return _countable(int(whole) // 1_000)
    per = UNIX_UNITS[format]
    digits = len(str(per)) - 1
    part = int((fraction + "0" * digits)[:digits] or 0)
    return _countable(int(whole) * per + (-part if text.startswith("-") else part))


def _countable(value: int) -> int:
    if abs(value) > _FARTHEST:
        raise ValueError("lies outside of what can be counted")
    return value


def stamped_times(column: pa.Array, time: TimeFormat) -> tuple[pa.Array, dict[int, str]]:
    """Give the microseconds of a column of timestamps; those without a zone are taken for ones of the plan's zone."""
    if column.type.tz is not None or (time.zone is not None and zone_of(time.zone) is UTC):
        return _floored(column), {}
    if time.zone is None:
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        return pa.nulls(len(column), pa.int64()), {int(row): _NEEDS_ZONE for row in rows}
    micros = _floored(column).cast(MICROSECONDS)
    try:
        return pc.assume_timezone(micros, time.zone).cast(pa.int64()), {}
    except pa.ArrowInvalid:
        texts = pc.strftime(micros, format="%Y-%m-%dT%H:%M:%S")
        return _times_one_by_one(texts, TimeFormat(ISO, time.zone))


def _floored(column: pa.Array) -> pa.Array:
    """Give microseconds of timestamps of any unit, rounded down."""
    numbers = column.cast(pa.int64())
    unit = column.type.unit
    if unit == "ns":
        mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        return pa.array(np.asarray(pc.fill_null(numbers, 0)) // 1_000, mask=mask)
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
    # What would overflow is so far away that any time outside of the message model stands for it.
    near = pc.less_equal(pc.abs(numbers), pa.scalar(_FARTHEST // factor, pa.int64()))
    return pc.multiply(pc.if_else(near, numbers, pa.scalar(_FARTHEST // factor, pa.int64())), factor)


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
class IngestPlan:
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
        for name, template in self.labels:
            if not re.fullmatch(LABEL_NAME, name):
                raise InvalidArgument(f"label name {name!r} must match {LABEL_NAME}")
            for column in template.columns:
                if column.startswith("@") and column not in (ROW, FILE, DIGEST):
                    raise InvalidArgument(f"{LABEL}{name} cannot be made of {{{column}}}", hint=_special_hint())
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
