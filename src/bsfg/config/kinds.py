"""The kinds of values a configuration key can have, and the words that keys choose from."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Generic, TypeGuard, TypeVar
from urllib.parse import urlsplit

from bsfg.errors import InvalidArgument
from bsfg.filters import PATTERN_CHARACTERS_MAX, check_patterns
from bsfg.ports import StartAt
from bsfg.rules import STREAM, ZONE
from bsfg.signatures import read_key
from bsfg.throttle import DAY_MINUTES, Bandwidth, BandwidthSpan


class Role(StrEnum):
    """What an identity is in this zone."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    PEER = "peer"
    PIPELINE = "pipeline"
    OPERATOR = "operator"
    VIEWER = "viewer"


class TokenRole(StrEnum):
    """What the bearer of a token may be."""

    VIEWER = Role.VIEWER
    OPERATOR = Role.OPERATOR


class IdentityFrom(StrEnum):
    """The part of a certificate that names its holder."""

    CN = "cn"
    SAN = "san"


class HasherName(StrEnum):
    """A digest function."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"


class Engine(StrEnum):
    """What moves the facts of a link."""

    SPARK = "spark"
    NATIVE = "native"


class PipelineKind(StrEnum):
    """What a pipeline does; it is named as its command is."""

    REPLICATE = "replicate"
    LAND = "land"
    INGEST = "ingest"
    AUDIT = "audit"
    SQL = "sql"
    WEBHOOK = "webhook"


class Safety(StrEnum):
    """Whether a stream serves a safety function."""

    NONE = "none"
    SIL = "sil"


class TlsVersion(StrEnum):
    """The TLS versions that may be the lowest allowed one."""

    V1_3 = "1.3"


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log records are written."""

    JSON = "json"
    TEXT = "text"


class Start(StrEnum):
    """Where a consumer that the node creates for a peer begins."""

    EARLIEST = StartAt.EARLIEST
    LATEST = StartAt.LATEST


class Action(StrEnum):
    """What a caller can ask for."""

    APPEND = "append"
    FETCH = "fetch"
    CONFIRM = "confirm"
    READ = "read"
    PUT = "put"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    REPORT = "report"
    VIEW = "view"
    ACT = "act"


MEANINGS: dict[Action, str] = {
    Action.APPEND: "append facts of its zone, or of one it relays for, to the store buffer",
    Action.FETCH: "fetch as a durable consumer of its own; a peer only what it is served",
    Action.CONFIRM: "confirm as a durable consumer of its own",
    Action.READ: "read by key, offset or time, without moving a cursor; a peer only what it is served",
    Action.PUT: "put what a link brought into the forward buffer, as that link's peer may send it",
    Action.UPLOAD: "upload an artifact",
    Action.DOWNLOAD: "download an artifact that a fact names which it may read",
    Action.REPORT: "take the lease of a link and report on it",
    Action.VIEW: "see status, consumers, gates, gaps and quarantine",
    Action.ACT: "hold and release gates, create and retire consumers, truncate, settle quarantine",
}

ROLE_ACTIONS: dict[Role, frozenset[Action]] = {
    Role.PRODUCER: frozenset({Action.APPEND, Action.UPLOAD}),
    Role.CONSUMER: frozenset({Action.FETCH, Action.CONFIRM, Action.READ, Action.DOWNLOAD}),
    Role.PEER: frozenset({Action.FETCH, Action.CONFIRM, Action.READ, Action.DOWNLOAD}),
    Role.PIPELINE: frozenset(
        {Action.PUT, Action.READ, Action.UPLOAD, Action.DOWNLOAD, Action.REPORT, Action.VIEW},
    ),
    Role.OPERATOR: frozenset({Action.VIEW, Action.ACT}),
    Role.VIEWER: frozenset({Action.VIEW}),
}


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

LARGEST = (1 << 63) - 1
ANY = "*"


class WrongValue(Exception):
    """A value is not of the kind that its key needs; the message says what it should be."""


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T]):
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

    @property
    def reachable(self) -> Address:
        """One that can be called from this machine, where it says on which ones to listen."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    @staticmethod
    def of(text: str, what: str = "address") -> Address:
        """Read an address that a caller gave, or raise `InvalidArgument` with what it is called."""
        try:
            return ADDRESS.read(text)
        except WrongValue as problem:
            raise InvalidArgument(f"{what} {problem}") from None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the nodes of a zone listen, of which one is active; written with commas between."""

    each: tuple[Address, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.each))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant."""
        return all(address.is_loopback for address in self.each)

    @staticmethod
    def of(text: str | Sequence[str], what: str = "address") -> Addresses:
        """Read addresses that a caller gave, or raise `InvalidArgument` with what they are called."""
        try:
            return ADDRESSES.read(text)
        except WrongValue as problem:
            raise InvalidArgument(f"{what} {problem}") from None


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


def integer(least: int = 0, most: int = LARGEST) -> ValueKind[int]:
    """A whole number between two bounds, both inclusive."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongValue(f"must be a whole number, not {_shown(value)}")
        if not least <= value <= most:
            raise WrongValue(f"must be at least {least}" if most == LARGEST else f"must be from {least} to {most}")
        return value

    return ValueKind("whole number", read)


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


_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\s+(\S.*)")


def _bandwidth(value: object) -> Bandwidth:
    """Read a size that goes for the whole day, or a list of times, each with the size that goes then."""
    if not isinstance(value, list | tuple):
        return Bandwidth((BandwidthSpan(0, 0, _size(value)),))
    spans = []
    for text in map(_text, value):
        match = _SPAN.fullmatch(text.strip())
        if match is None or match.group(1, 2) == match.group(3, 4):
            raise WrongValue(f'must be times of the day in UTC with a size, such as "06:00-18:00 1MiB", not {text!r}')
        hours = [int(part) for part in match.groups()[:4]]
        spans.append(BandwidthSpan(60 * hours[0] + hours[1], 60 * hours[2] + hours[3], _size(match[5])))
    if any(sum(span.holds(minute) for span in spans) > 1 for minute in range(DAY_MINUTES)):
        raise WrongValue("names a time twice")
    return Bandwidth(tuple(spans))


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


def _addresses(value: object) -> Addresses:
    listed = value if isinstance(value, list | tuple) else _nonempty(value).split(",")
    if not listed:
        raise WrongValue("must name at least one address")
    found = tuple(_address(each.strip() if isinstance(each, str) else each) for each in listed)
    if len(set(found)) < len(found):
        raise WrongValue("names an address twice")
    return Addresses(found)


def _url(value: object) -> str:
    """Read a web address; it may hold a secret, so that no error repeats it."""
    text = _nonempty(value)
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise WrongValue("must be an address that starts with https:// or http://, as in https://host:443/path")
    if not f"{parts.path}{parts.query}".isascii() or re.search(r"[\s\x00-\x1f\x7f]", text):
        raise WrongValue("must be written in ASCII without spaces behind its host: %20 is a space, %C3%BC an ü")
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


def _free_table(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise WrongValue(f"must be a table, not {_shown(value)}")
    return value


def matching(name: str, pattern: str, says: str) -> ValueKind[str]:
    """A text that matches a pattern."""

    def read(value: object) -> str:
        text = _text(value)
        if not re.fullmatch(pattern, text):
            raise WrongValue(f"{text!r} is not a {name}: {says}")
        return text

    return ValueKind(name, read)


def one_of(words: tuple[str, ...]) -> ValueKind[str]:
    """One of some words."""

    def read(value: object) -> str:
        text = _text(value)
        if text not in words:
            raise WrongValue(f"must be one of {_listed(words)}, not {text!r}{nearest(text, words)}")
        return text

    return ValueKind(_listed(words) if len(words) == 1 else "one of " + _listed(words), read)


def one_of_or(words: tuple[str, ...], form: str, pattern: str) -> ValueKind[str]:
    """One of some words, or a text of a form."""
    word = one_of(words)
    return ValueKind(f'{word.name}, or "{form}"', lambda value: value if _fits(value, pattern) else word.read(value))


def _fits(value: object, pattern: str) -> TypeGuard[str]:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def choice(enum: type[E]) -> ValueKind[E]:
    """One word of an enumeration."""
    word = one_of(tuple(str(member) for member in enum))
    return ValueKind(word.name, lambda value: enum(word.read(value)))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def list_of(kind: ValueKind[T]) -> ValueKind[tuple[T, ...]]:
    """A list whose items are all of one kind, without repeats."""

    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise WrongValue(f"must be a list in square brackets, not {_shown(value)}")
        items = tuple(kind.read(item) for item in value)
        if len(set(items)) < len(items):
            raise WrongValue("names something twice")
        return items

    return ValueKind(f"list of: {kind.name}", read)


def or_any(kind: ValueKind[str]) -> ValueKind[str]:
    """A name, or ``*`` for all of them."""
    return ValueKind(f'{kind.name} or "*"', lambda value: ANY if value == ANY else kind.read(value))


def _patterns(value: object) -> tuple[str, ...]:
    found = list_of(PATTERN).read(value)
    try:
        check_patterns("the list", found)
    except InvalidArgument as error:
        raise WrongValue(f"cannot be tried: {error.message}") from None
    return found


PATTERN = matching(
    "pattern", rf"[^\x00-\x1f\x7f]{{1,{PATTERN_CHARACTERS_MAX}}}", f"1 to {PATTERN_CHARACTERS_MAX} printable characters"
)
PATTERNS = ValueKind(f"list of: {PATTERN.name}", _patterns)
TEXT = ValueKind("text", _text)
FLAG = ValueKind("true or false", _flag)
COUNT = integer(1)
PERCENT = ValueKind("percent", _percent)
SIZE = ValueKind("size", _size)
BANDWIDTH = ValueKind("size per second, or a list of times with one", _bandwidth)
DURATION = ValueKind("duration", _positive_duration)
WHOLE_SECONDS = ValueKind("duration", _whole_seconds)
ADDRESS = ValueKind("host:port", _address)
ADDRESSES = ValueKind("host:port or a list of them", _addresses)
URL = ValueKind("web address", _url)
MOMENT = ValueKind("date or time", _moment)
PATH = ValueKind("path", _path)
ARGUMENTS = ValueKind("command and arguments", _arguments)
BACKEND_NAME = matching("backend name", r"[a-z][a-z0-9_-]{0,63}", "lower case letters, digits, '_' and '-'")
SCHEMA_NAME = matching("schema name", r"[a-z_][a-z0-9_]{0,62}", "lower case letters, digits and '_', at most 63")
NATS_URL = matching("NATS address", r"(nats|tls|ws|wss)://[^\s,]+", "as in nats://nats.example:4222")
REPLICAS = integer(1, 5)
FREE_TABLE = ValueKind("table", _free_table)
ZONE_NAME = matching("zone name", ZONE, "letters, digits, '.', '_' and '-', at most 64")
STREAM_NAME = matching("stream name", STREAM, "lower case letters, digits, '.', '_' and '-', at most 64")
LINK_NAME = matching("link name", STREAM, "lower case letters, digits, '.', '_' and '-', at most 64")
PIPELINE_NAME = matching("pipeline name", STREAM, "lower case letters, digits, '.', '_' and '-', at most 64")
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
SIGNING_KEY = ValueKind("public key", _signing_key)
TOKEN_HASH = matching("token hash", r"sha256:[0-9a-f]{64}", "make token and hash with `bsfg token`")
AUTHORITY_NAME = matching(
    "authority name", r"[a-z0-9][a-z0-9._-]{0,63}", "lower case letters, digits, '.', '_' and '-', at most 64"
)
KEY_HASH = matching("key hash", r"sha256:[0-9a-f]{64}", "`bsfg certs show ca.crt` prints it as public_key")
STREAMS = list_of(or_any(STREAM_NAME))
ZONES = list_of(or_any(ZONE_NAME))
