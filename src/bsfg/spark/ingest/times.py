"""Times in columns: texts, numbers and timestamps become milliseconds, or a reason why they cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.errors import InvalidArgument

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
    return _one_by_one(texts, time)


def _one_by_one(texts: pa.Array, time: TimeFormat) -> tuple[pa.Array, dict[int, str]]:
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
        return _one_by_one(texts, TimeFormat(ISO, time.zone))


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
