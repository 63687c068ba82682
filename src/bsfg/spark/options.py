"""The options of ``format("bsfg")``: declared once, checked by name and value, and documented from the declaration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson

from bsfg.errors import InvalidArgument
from bsfg.filters import FactFilter, check_patterns
from bsfg.model import STREAM, ZONE, check_name
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess
from bsfg.spark.fanin import AWAY, LOG_IDS, listed_origins
from bsfg.spark.mapping import COLUMNS, FRAME_SCHEMA, SPARK_SCHEMA

READ, READ_STREAM, WRITE, WRITE_STREAM = "read", "readStream", "write", "writeStream"
_READS, _WRITES = frozenset({READ, READ_STREAM}), frozenset({WRITE, WRITE_STREAM})
ALL_USES = _READS | _WRITES

EARLIEST, LATEST = "earliest", "latest"
PUT_ONLY = (
    "link",
    "lease",
    "logId",
    "senderAheadMs",
    "confirmAddress",
    "confirmConsumer",
    "confirmServerName",
    "confirmCa",
    "confirmCert",
    "confirmKey",
)
SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark itself, which it hands on to every source."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where to start or end: at the earliest or latest fact, at an offset, or at a time."""

    word: str | None = None
    offset: int | None = None
    unix_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SourcePositions:
    """Where to start or end, for each of several sources by its key, and for all others."""

    other: Position
    by_key: Mapping[str, Position] = field(default_factory=dict)

    def of(self, key: str) -> Position:
        """Give the position of a source."""
        return self.by_key.get(key, self.other)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, the uses it belongs to, how its value is read, what it defaults to and what it means."""

    name: str
    uses: frozenset[str]
    parse: Callable[[str], Any]
    says: str
    default: Any = None
    required: bool = False
    secret: bool = False


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _milliseconds(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError("must be a whole number of milliseconds") from None


def _count(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,17}", value.strip()):
        raise ValueError("must be a whole number above 0")
    return int(value)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError("must be a number of seconds")
    return seconds


def _flag(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return value.strip().lower() == "true"


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return value.strip().lower()

    return parse


def _stream(value: str) -> str:
    return check_name("stream", value.strip(), STREAM)


def _zones(value: str) -> tuple[str, ...]:
    return tuple(check_name("zone", name.strip(), ZONE) for name in value.split(","))


def position(value: str) -> Position:
    """Read a position: ``earliest``, ``latest``, an offset, or a time such as ``2026-03-01T06:00:00Z``."""
    value = value.strip()
    if value.lower() in (EARLIEST, LATEST):
        return Position(word=value.lower())
    if re.fullmatch(r"[0-9]{1,18}", value):
        return Position(offset=int(value))
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be earliest, latest, an offset or a time such as 2026-03-01T06:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError("is a time without a zone: add Z for UTC, or the offset such as +01:00")
    return Position(unix_ms=ceil_unix_ms(moment))


def starting(value: str) -> Position | SourcePositions:
    """Read where to start: one position, or a JSON object with the position of each of several sources."""
    return positions(value, Position(word=EARLIEST)) if value.lstrip().startswith("{") else position(value)


def ending(value: str) -> Position | SourcePositions:
    """Read where to end, likewise."""
    return positions(value, Position(word=LATEST)) if value.lstrip().startswith("{") else position(value)


def positions(value: str, other: Position) -> SourcePositions:
    """Read the positions of sources by their keys, as progress and checkpoints show them."""
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return SourcePositions(
        other, {key: _position_of(each) for key, each in found.items() if key not in (LOG_IDS, AWAY)}
    )


def _position_of(value: object) -> Position:
    # As users of Kafka know them.
    return position({-2: EARLIEST, -1: LATEST}.get(value, str(value)) if isinstance(value, int) else str(value))


def _patterns(value: str) -> tuple[str, ...]:
    """Read patterns: separated by commas, or a JSON list where one has a comma in it."""
    if not value.lstrip().startswith("["):
        found = tuple(part.strip() for part in value.split(","))
    else:
        try:
            items = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not all(isinstance(item, str) for item in items):
            raise ValueError("must be a list of texts")
        found = tuple(items)
    check_patterns("the option", found)
    return found


def _moment(value: str) -> int:
    found = position(value).unix_ms
    if found is None:
        raise ValueError("must be a time such as 2026-03-01T06:00:00Z")
    return found


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00Z")


def ceil_unix_ms(moment: datetime) -> int:
    """Give a time in whole milliseconds, rounded up: facts have no finer times, so "from" and "before" stay exact."""
    return -((_EPOCH - moment) // timedelta(milliseconds=1))


def columns_of(value: str) -> tuple[str, ...]:
    """Read a list of column names."""
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in SPARK_SCHEMA.names:
            raise ValueError(f"has no column {name!r}; there are {', '.join(SPARK_SCHEMA.names)}")
    if len(set(names)) != len(names):
        raise ValueError("names a column twice")
    return names


OPTIONS = (
    Option(
        "address",
        ALL_USES,
        _text,
        "Where the zone's node listens, as host:port; several nodes of one zone by commas.",
        required=True,
    ),
    Option(
        "sources",
        _READS,
        listed_origins,
        "Several sources in place of address and stream: host:port/stream by commas, or a JSON list of objects with "
        "address, stream or streams, and where needed name, serverName, buffer and consumer.",
    ),
    Option(
        "config",
        _READS,
        _text,
        "The links of a zone.toml as sources, with that zone's certificate unless another one is given. A stream reads "
        "the file again when it has changed.",
    ),
    Option(
        "missingSources",
        frozenset({READ_STREAM}),
        _one_of("fail", "wait"),
        "What to do when one of several sources cannot be reached as the stream is first started: fail, or begin "
        "without it and take it in when it is there.",
        "fail",
    ),
    Option("ca", ALL_USES, _text, "The authorities to trust: the path of a PEM file, or its content.", secret=True),
    Option("cert", ALL_USES, _text, "The caller's certificate, likewise.", secret=True),
    Option("key", ALL_USES, _text, "The key of the certificate, likewise.", secret=True),
    Option("serverName", ALL_USES, _text, "The name that the node's certificate must carry, such as plant-a-bsfg."),
    Option("stream", ALL_USES, _stream, "The stream to read from or write to.", required=True),
    Option("retrySeconds", ALL_USES, _seconds, "How long a node that cannot be reached is tried again.", 60.0),
    Option(
        "buffer",
        _READS,
        _one_of(*Buffer),
        "Which buffer: store (own facts) or forward (those of other zones).",
        "store",
    ),
    Option(
        "rows",
        _READS,
        _one_of("facts", "frames"),
        "What a row is: a fact, or a whole frame of facts in Arrow form (first, last, entries, log_id, gap), several "
        "times as fast for pipelines that put facts as they are.",
        "facts",
    ),
    Option(
        "columns",
        _READS,
        columns_of,
        "The columns to read, separated by commas; the node sends no others. Spark itself leaves out none.",
    ),
    Option(
        "subjects",
        _READS,
        _patterns,
        "Only facts about these subjects, separated by commas or as a JSON list; * stands for any text. The node "
        "leaves out the rest.",
        (),
    ),
    Option("predicates", _READS, _patterns, "Only facts with these predicates, likewise.", ()),
    Option("fromZones", _READS, _patterns, "Only facts that these zones said, likewise.", ()),
    Option("toZones", _READS, _patterns, "Only facts addressed to these zones, likewise.", ()),
    Option("producedFrom", _READS, _moment, "Only facts produced at this time or later, such as 2026-03-01T06:00:00Z."),
    Option("producedBefore", _READS, _moment, "Only facts produced before this time."),
    Option(
        "startingOffsets",
        _READS,
        starting,
        "Where to start: earliest (the oldest fact that is kept), latest, an offset, or a time with its zone; of "
        'several sources also as {"plant-a:9443/operational": 17, …}. A stream asks for it once; later its checkpoint '
        "tells.",
    ),
    Option(
        "endingOffsets",
        frozenset({READ}),
        ending,
        "Where to end: latest, an offset or a time, or one for each source; what is there itself is left out.",
        Position(word=LATEST),
    ),
    Option("partitionFacts", _READS, _count, "How many facts one task reads.", 500_000),
    Option("numPartitions", _READS, _count, "How many tasks read side by side, in place of partitionFacts."),
    Option("maxFactsPerBatch", frozenset({READ_STREAM}), _count, "How many facts a micro-batch may have.", 1_000_000),
    Option(
        "consumer",
        frozenset({READ_STREAM}),
        _text,
        "A durable consumer at the node: the stream starts at its position unless told otherwise, and confirms for it "
        "what Spark has processed, one micro-batch behind unless confirm_batches is used. {stream} in it stands for "
        "the stream, of which a node with several needs one consumer each.",
    ),
    Option(
        "carryOnly",
        _READS,
        _zones,
        "Only facts addressed to these zones, separated by commas; the rest is reported as gap records.",
        (),
    ),
    Option(
        "gaps",
        _READS,
        _one_of("fail", "rows"),
        "What to do about facts that are not there any more: fail, or give each gap record as a row with `gap` set.",
        "fail",
    ),
    Option(
        "mode",
        _WRITES,
        _one_of("append", "put"),
        "append (facts of this zone into its store buffer) or put (what a link brought into the forward buffer).",
        "append",
    ),
    Option(
        "ordered",
        _WRITES,
        _flag,
        "Whether facts get their offsets in the order of partitions and rows; false lets tasks append side by side.",
        True,
    ),
    Option(
        "conflicts",
        _WRITES,
        _one_of("fail", "count"),
        "What to do when an id is taken by another body, in append mode: fail, or count it and go on.",
        "fail",
    ),
    Option("spool", _WRITES, _text, "A folder for parts that wait for their turn; a cluster must share it."),
    Option("results", _WRITES, _text, "A file to which every commit adds a line of JSON with its sums."),
    Option("link", _WRITES, _text, "The link that brought the facts, in put mode."),
    Option("lease", _WRITES, _text, "The token of the link's lease, in put mode.", secret=True),
    Option("logId", _WRITES, _text, "The sender's log, in put mode, when there is no column log_id."),
    Option(
        "senderAheadMs",
        _WRITES,
        _milliseconds,
        "By how much the sender's clock is ahead of the one of here, in put mode: facts are as old as the sender says.",
    ),
    Option("confirmAddress", _WRITES, _text, "The sender's node, in put mode: each commit confirms there what it put."),
    Option("confirmConsumer", _WRITES, _text, "The durable consumer at the sender to confirm for."),
    Option("confirmServerName", _WRITES, _text, "The name that the sender's certificate must carry."),
    Option("confirmCa", _WRITES, _text, "As ca, for the sender; the same as ca when left out.", secret=True),
    Option("confirmCert", _WRITES, _text, "As cert, for the sender; the same as cert when left out.", secret=True),
    Option("confirmKey", _WRITES, _text, "As key, for the sender; the same as key when left out.", secret=True),
)
"""Every option there is."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Checked options of one use, by name."""

    use: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def access(self) -> NodeAccess:
        """The way to the node."""
        return NodeAccess(self["address"], self["ca"], self["cert"], self["key"], self["serverName"])

    @property
    def confirm_access(self) -> NodeAccess | None:
        """The way to the sender's node, None when nothing is confirmed."""
        if self["confirmAddress"] is None:
            return None
        ca, certificate, key = (self[f"confirm{name}"] or self[name.lower()] for name in ("Ca", "Cert", "Key"))
        return NodeAccess(self["confirmAddress"], ca, certificate, key, self["confirmServerName"])

    @property
    def several(self) -> bool:
        """Whether it reads several sources."""
        return self.values.get("sources") is not None or self.values.get("config") is not None

    @property
    def filter(self) -> FactFilter:
        """Which facts are read."""
        return FactFilter(
            self["subjects"],
            self["predicates"],
            self["fromZones"],
            self["toZones"],
            self["producedFrom"],
            self["producedBefore"],
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read unless a schema names others."""
        if self["rows"] == "frames":
            return tuple(FRAME_SCHEMA.names)
        if self["columns"] is not None:
            chosen: tuple[str, ...] = self["columns"]
            return chosen
        more = (("source",) if self.several else ()) + (("gap",) if self["gaps"] == "rows" else ())
        return (*COLUMNS, *more)


def parse(given: Mapping[str, str], *uses: str) -> SourceOptions:
    """Check options, or raise `InvalidArgument` naming the wrong one and all good ones.

    With two uses, which is how a source is asked for its columns, options of either are taken.
    """
    use = " and ".join(uses)
    known = {option.name.lower(): option for option in OPTIONS if option.uses & set(uses)}
    values: dict[str, Any] = {option.name: option.default for option in known.values()}
    for name, value in given.items():
        option = known.get(name.lower())
        if option is not None:
            values[option.name] = _parsed(option, value)
        elif name.lower() not in SPARKS_OWN:
            raise _unknown(name, use, known.values())
    options = SourceOptions(use, values)
    missing = [option.name for option in known.values() if option.required and values[option.name] is None]
    if missing and not options.several:
        raise InvalidArgument(f"the option {missing[0]} is required", hint=_list(use, known.values()))
    _check_together(options)
    return options


def _parsed(option: Option, value: str) -> Any:
    try:
        return option.parse(value)
    except (ValueError, InvalidArgument) as error:
        shown = "" if option.secret else f" {value[:80]!r}"
        raise InvalidArgument(f"option {option.name}{shown} {error}", hint=option.says) from None


def _unknown(name: str, use: str, known: Iterable[Option]) -> InvalidArgument:
    names = {option.name.lower(): option.name for option in known}
    near = difflib.get_close_matches(name.lower(), names, 1)
    guess = f"; did you mean {names[near[0]]}?" if near else ""
    elsewhere = next((option for option in OPTIONS if option.name.lower() == name.lower()), None)
    if elsewhere is not None:
        guess = f", only for {' and '.join(sorted(elsewhere.uses))}"
    return InvalidArgument(f"there is no option {name[:80]!r} for {use}{guess}", hint=_list(use, known))


def _list(use: str, known: Iterable[Option]) -> str:
    return f"The options of {use} are {', '.join(option.name for option in known)}."


def _check_together(options: SourceOptions) -> None:
    """Check what only several options together can get wrong."""
    values = options.values
    if options.several:
        _check_several(options)
    else:
        _ = options.access
    if "gaps" in values:
        if any(isinstance(values.get(name), SourcePositions) for name in _OFFSETS) and not options.several:
            raise InvalidArgument("offsets by source belong to the option sources or config")
        if options["rows"] == "frames":
            if options["columns"] is not None:
                raise InvalidArgument('option columns belongs to rows = "facts": a frame is whole')
        elif "gap" in options.columns and options["gaps"] != "rows":
            raise InvalidArgument('the column gap needs the option gaps = "rows"')
    if "mode" in values:
        _check_writing(options)
    ending = values.get("endingOffsets")
    ends = [ending] if isinstance(ending, Position) else [*ending.by_key.values()] if ending is not None else []
    if any(each.word == EARLIEST for each in ends):
        raise InvalidArgument("option endingOffsets cannot be earliest")


_OFFSETS = ("startingOffsets", "endingOffsets")


def _check_several(options: SourceOptions) -> None:
    for name in ("address", "stream"):
        if options[name] is not None:
            raise InvalidArgument(f"option {name} belongs to one source: leave it out with sources or config")
    if options["sources"] is not None and options["config"] is not None:
        raise InvalidArgument("sources are listed, or links of a zone.toml: give one of the options sources and config")
    if options["rows"] == "frames":
        raise InvalidArgument('rows = "frames" reads one source')
    if options["buffer"] != Buffer.STORE:
        raise InvalidArgument("of several sources each has its own buffer: name it in sources, or in the link")
    parts = [options[name] for name in ("ca", "cert", "key")]
    if any(parts) and not all(parts):
        raise InvalidArgument("TLS needs all three of the options ca, cert and key")
    for name in _OFFSETS:
        position = options.values.get(name)
        if isinstance(position, Position) and position.offset is not None:
            raise InvalidArgument(f'option {name} of several sources is a word, a time, or {{"source": offset, …}}')


def _check_writing(options: SourceOptions) -> None:
    put = options["mode"] == "put"
    if put and options["link"] is None:
        raise InvalidArgument("put needs the option link: the link that brought the facts")
    if put and not options["ordered"]:
        raise InvalidArgument("put keeps the order of the link: leave out the option ordered")
    for name in PUT_ONLY:
        if not put and options[name] is not None:
            raise InvalidArgument(f'option {name} belongs to mode = "put"')
    if (options["confirmAddress"] is None) != (options["confirmConsumer"] is None):
        raise InvalidArgument("confirming needs both options confirmAddress and confirmConsumer")
    _ = options.confirm_access


def documentation() -> str:
    """Describe all options, as the class of the source shows them."""
    lines = []
    for option in OPTIONS:
        uses = "" if option.uses == ALL_USES else f" ({', '.join(sorted(option.uses))})"
        default = "" if option.default is None else f" Default: {default_text(option.default)}."
        lines.append(f"- ``{option.name}``{uses}: {'required. ' if option.required else ''}{option.says}{default}")
    return "\n".join(lines)


def default_text(default: Any) -> str:
    """Write a default as a user would write it."""
    if isinstance(default, Position):
        return str(default.word)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
