"""The kinds of values a configuration key can have: how each is read, checked and described."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Generic, TypeGuard, TypeVar
from urllib.parse import urlsplit

from bsfg.errors import InvalidArgument
from bsfg.rules import STREAM, ZONE
from bsfg.signatures import read_key

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

LARGEST = (1 << 63) - 1
ANY = "*"


class WrongValue(Exception):
    """A value is not of the kind that its key needs; the message says what it should be."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How a value is written and read: ``read`` gives the value or raises `WrongValue` with what it should be."""

    name: str
    read: Callable[[object], T]


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as in ``host:port`` or ``[::1]:port``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the known word that was probably meant, as the end of a sentence, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValue(f"must be a text in quotes, not {_shown(value)}")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value):
        raise WrongValue("must not contain control characters")
    return value


def _shown(value: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", dict: "a table", list: "a list"}
    return names.get(type(value), "a text" if isinstance(value, str) else "a date or time")


def _nonempty(value: object) -> str:
    text = _text(value)
    if not text.strip():
        raise WrongValue("must not be empty")
    return text


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise WrongValue(f"must be true or false, not {_shown(value)}")
    return value


def integer(least: int = 0, most: int = LARGEST) -> Kind[int]:
    """A whole number between two bounds, both inclusive."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongValue(f"must be a whole number, not {_shown(value)}")
        if not least <= value <= most:
            raise WrongValue(f"must be at least {least}" if most == LARGEST else f"must be from {least} to {most}")
        return value

    return Kind("whole number", read)


def _percent(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValue(f"must be a number, not {_shown(value)}")
    if not 0 < value <= 100:
        raise WrongValue("must be above 0 and at most 100")
    return float(value)


_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,6})?)\s*([kmgtp]i?b|b)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def _size(value: object) -> int:
    """Read `10GiB`, `1.5 MB` or a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise WrongValue(f'must be a size such as "10GiB" or "500MB", not {_shown(value)}')
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise WrongValue(f'must be a size such as "10GiB" or "500MB", not {value!r}')
        unit = match[2].lower()
        base = 1024 if "i" in unit else 1000
        size = int(float(match[1]) * base ** _POWERS[unit[0].replace("b", "")])
    if not 0 < size <= LARGEST:
        raise WrongValue("must be a size above 0 bytes and below 8 EiB")
    return size


_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,6})?(?:ms|s|m|h|d|w|y)\s*)+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w|y)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def _duration(value: object) -> float:
    """Read `500ms`, `90s`, `7d` or `1d12h`; a bare number is refused because its unit would be a guess."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise WrongValue(f'needs a unit, such as "{value}s", "{value}h" or "{value}d"')
    if not isinstance(value, str) or not _DURATION.fullmatch(value.strip()):
        shown = repr(value) if isinstance(value, str) else _shown(value)
        raise WrongValue(f'must be a duration such as "500ms", "30s", "12h" or "7d", not {shown}')
    return float(sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value)))


def _positive_duration(value: object) -> float:
    seconds = _duration(value)
    if seconds <= 0:
        raise WrongValue("must be longer than nothing")
    return seconds


def _whole_seconds(value: object) -> int:
    seconds = _duration(value)
    if seconds != int(seconds):
        raise WrongValue("must be whole seconds")
    return int(seconds)


def _address(value: object) -> Address:
    text = _nonempty(value)
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535 or bracketed != (":" in host):
        raise WrongValue(f'must be "host:port" such as "plant-a.example:9443" or "[::1]:9443", not {text!r}')
    return Address(host, int(port))


def _url(value: object) -> str:
    text = _nonempty(value)
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WrongValue(f"must be an address that starts with https:// or http://, not {text!r}")
    return text


def _moment(value: object) -> int:
    """Read a date or a time with its offset; the end of a date is the end of that day in UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value) if "T" in value else date.fromisoformat(value)
        except ValueError:
            raise WrongValue("must be a date such as 2027-06-30 or a time such as 2027-06-30T12:00:00Z") from None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise WrongValue("needs a time zone, such as 2027-06-30T12:00:00Z")
        return int(value.timestamp() * 1000)
    if isinstance(value, date):
        return int(datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp() * 1000) + 86_400_000
    raise WrongValue(f"must be a date or a time, not {_shown(value)}")


def _path(value: object) -> PurePath:
    return PurePath(_nonempty(value))


def _arguments(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise WrongValue(f'must be a list such as ["/usr/bin/logger", "-t", "bsfg"], not {_shown(value)}')
    return tuple(_text(item) for item in value)


def _signing_key(value: object) -> str:
    text = _nonempty(value)
    try:
        read_key(text)
    except InvalidArgument as error:
        raise WrongValue(error.message) from None
    return text


def matching(name: str, pattern: str, says: str) -> Kind[str]:
    """A text that matches a pattern."""

    def read(value: object) -> str:
        text = _text(value)
        if not re.fullmatch(pattern, text):
            raise WrongValue(f"{text!r} is not a {name}: {says}")
        return text

    return Kind(name, read)


def one_of(words: tuple[str, ...]) -> Kind[str]:
    """One of some words."""

    def read(value: object) -> str:
        text = _text(value)
        if text not in words:
            raise WrongValue(f"must be one of {_listed(words)}, not {text!r}{nearest(text, words)}")
        return text

    return Kind(_listed(words) if len(words) == 1 else "one of " + _listed(words), read)


def one_of_or(words: tuple[str, ...], form: str, pattern: str) -> Kind[str]:
    """One of some words, or a text of a form."""
    word = one_of(words)
    return Kind(f'{word.name}, or "{form}"', lambda value: value if _fits(value, pattern) else word.read(value))


def _fits(value: object, pattern: str) -> TypeGuard[str]:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def choice(enum: type[E]) -> Kind[E]:
    """One word of an enumeration."""
    word = one_of(tuple(str(member) for member in enum))
    return Kind(word.name, lambda value: enum(word.read(value)))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def list_of(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list whose items are all of one kind, without repeats."""

    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise WrongValue(f"must be a list in square brackets, not {_shown(value)}")
        items = tuple(kind.read(item) for item in value)
        if len(set(items)) < len(items):
            raise WrongValue("names something twice")
        return items

    return Kind(f"list of: {kind.name}", read)


def or_any(kind: Kind[str]) -> Kind[str]:
    """A name, or ``*`` for all of them."""
    return Kind(f'{kind.name} or "*"', lambda value: ANY if value == ANY else kind.read(value))


TEXT = Kind("text", _text)
FLAG = Kind("true or false", _flag)
COUNT = integer(1)
PERCENT = Kind("percent", _percent)
SIZE = Kind("size", _size)
DURATION = Kind("duration", _positive_duration)
WHOLE_SECONDS = Kind("duration", _whole_seconds)
ADDRESS = Kind("host:port", _address)
URL = Kind("web address", _url)
MOMENT = Kind("date or time", _moment)
PATH = Kind("path", _path)
ARGUMENTS = Kind("command and arguments", _arguments)
ZONE_NAME = matching("zone name", ZONE, "letters, digits, '.', '_' and '-', at most 64")
STREAM_NAME = matching("stream name", STREAM, "lower case letters, digits, '.', '_' and '-', at most 64")
LINK_NAME = matching("link name", STREAM, "lower case letters, digits, '.', '_' and '-', at most 64")
CONSUMER_PATTERN = matching(
    "consumer name", r"[a-z0-9][a-z0-9._-]{0,63}\*?", "lower case letters, digits, '.', '_', '-'; '*' only at its end"
)
IDENTITY_NAME = matching("certificate name", r"[^\x00-\x1f\x7f-\x9f]{1,255}", "at most 255 printable characters")
HOST_NAME = matching(
    "host name",
    r"(\*\.)?[A-Za-z0-9][A-Za-z0-9._-]{0,252}",
    "letters, digits, '.', '_' and '-'; '*.' only at the start",
)
TOKEN_NAME = matching(
    "token name", r"[a-z0-9][a-z0-9._-]{0,63}", "lower case letters, digits, '.', '_' and '-', at most 64"
)
SIGNING_KEY = Kind("public key", _signing_key)
TOKEN_HASH = matching("token hash", r"sha256:[0-9a-f]{64}", "make token and hash with `bsfg token`")
AUTHORITY_NAME = matching(
    "authority name", r"[a-z0-9][a-z0-9._-]{0,63}", "lower case letters, digits, '.', '_' and '-', at most 64"
)
KEY_HASH = matching("key hash", r"sha256:[0-9a-f]{64}", "`bsfg certs show ca.crt` prints it as public_key")
STREAMS = list_of(or_any(STREAM_NAME))
ZONES = list_of(or_any(ZONE_NAME))
