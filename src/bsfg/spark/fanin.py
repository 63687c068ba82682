"""Many nodes and streams as one source: which they are, how far each is, and how tasks share their facts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from bsfg.config.kinds import Addresses
from bsfg.errors import BsfgError, FrameInvalid, InvalidArgument, TimedOut
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.ports import Buffer
from bsfg.retry import Backoff
from bsfg.spark.calls import BufferSource, NodeAccess, calls, check_log

if TYPE_CHECKING:
    from bsfg.spark.options import Position, SourceOptions

log = logging.getLogger("bsfg.spark")

T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""How long a source may take to say where it ends before the others go on without it."""

ASK_AGAIN_SECONDS, ASK_AGAIN_MAX_SECONDS = 0.5, 10.0
TASKS_PER_CORE = 2

LOG_IDS, AWAY = "log_ids", "away"
"""The keys beside the offsets of sources; every source has a slash in its key."""


@dataclass(frozen=True, slots=True)
class FactsOrigin:
    """One of several sources: the key that its offsets are kept under, and how it is reached."""

    key: str
    address: str
    stream: str
    server_name: str | None = None
    buffer: str = str(Buffer.STORE)
    carry_only: tuple[str, ...] = ()
    consumer: str | None = None
    filter: FactFilter = EVERY_FACT
    """Which facts are taken from it, in respects that the query itself does not name."""


def listed_origins(value: str) -> tuple[FactsOrigin, ...]:
    """Read the option `sources`: ``host:port/stream`` by commas, or a JSON list of objects."""
    items = _json_list(value) if value.lstrip().startswith("[") else [part.strip() for part in value.split(",")]
    origins = tuple(origin for item in items for origin in _origins_of(item))
    keys = [origin.key for origin in origins]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"names {twice} twice")
    if not origins:
        raise ValueError("names no source")
    buffers = [(origin.address, origin.stream, origin.buffer) for origin in origins]
    for one, other in zip(origins, map(buffers.index, buffers), strict=True):
        if origins[other] is not one:
            raise ValueError(f"names one buffer twice, as {origins[other].key} and as {one.key}")
    return origins


def _json_list(value: str) -> list[Any]:
    try:
        found: list[Any] = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return found


_KEYS = {"address", "name", "stream", "streams", "serverName", "buffer", "consumer"}


def _origins_of(item: object) -> Iterable[FactsOrigin]:
    from bsfg.model import STREAM, check_name

    if isinstance(item, str):
        address, slash, stream = item.rpartition("/")
        if not slash:
            raise ValueError(f"{item!r} must be host:port/stream")
        item = {"address": address, "stream": stream}
    is_object = isinstance(item, dict) and isinstance(item.get("address"), str)
    if not is_object:
        raise ValueError(f"{item!r} must be host:port/stream, or an object with address and stream")
    assert isinstance(item, dict)
    if unknown := sorted(set(item) - _KEYS):
        raise ValueError(f"has no key {unknown[0]!r}; there are {', '.join(sorted(_KEYS))}")
    if wrong := [name for name in _KEYS - {"streams"} if name in item and not isinstance(item[name], str)]:
        raise ValueError(f"{item['address']}: {wrong[0]} must be a text")
    streams = item.get("streams", [item.get("stream")])
    if not isinstance(streams, list) or not all(isinstance(stream, str) for stream in streams):
        raise ValueError(f"{item['address']}: stream must be a name, or streams a list of them")
    address = str(Addresses.of(item["address"]))
    name, buffer = str(item.get("name", address)), str(item.get("buffer", Buffer.STORE))
    if buffer not in list(Buffer):
        raise ValueError(f"{address}: buffer must be {' or '.join(Buffer)}")
    for stream in streams:
        check_name("stream", stream, STREAM)
        key = f"{name}/{stream}" + ("" if buffer == Buffer.STORE else f"/{buffer}")
        yield FactsOrigin(key, address, stream, item.get("serverName"), buffer, (), item.get("consumer"))


@dataclass(slots=True)
class Origins:
    """The sources of one query: a list that stays, or the links of a zone.toml that is read anew when it changes."""

    options: SourceOptions
    by_key: dict[str, FactsOrigin] = field(default_factory=dict)
    base: NodeAccess = field(init=False)
    _seen: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.options["config"] is None:
            self.by_key = {origin.key: self._completed(origin) for origin in self.options["sources"]}
            self.base = self._base(None)
        else:
            self._load()

    def refresh(self) -> None:
        """Look whether the file has changed; one that cannot be read changes nothing."""
        if self.options["config"] is None:
            return
        try:
            if self._stamp() != self._seen:
                self._load()
        except (BsfgError, OSError) as error:
            log.warning("%s cannot be read, its sources stay as they are: %s", self.options["config"], error)

    def source(self, origin: FactsOrigin, columns: tuple[str, ...] = ()) -> BufferSource:
        """Give what asks a source."""
        options = self.options
        access = replace(self.base, address=origin.address, server_name=origin.server_name)
        patience, carry_only = options["retrySeconds"], origin.carry_only or options["carryOnly"]
        asked, usual = options.filter, origin.filter
        subjects, predicates = asked.subjects or usual.subjects, asked.predicates or usual.predicates
        asked = replace(asked, subjects=subjects, predicates=predicates)
        return BufferSource(access, origin.stream, origin.buffer, patience, carry_only, asked, columns)

    def _completed(self, origin: FactsOrigin) -> FactsOrigin:
        consumer = origin.consumer or self.options.values.get("consumer")
        consumer = None if consumer is None else consumer.replace("{stream}", origin.stream)
        return replace(origin, server_name=origin.server_name or self.options["serverName"], consumer=consumer)

    def _base(self, files: Any) -> NodeAccess:
        options, nowhere = self.options, "localhost:1"
        if options["ca"] is None and files is not None:
            return NodeAccess.of(nowhere, files, None)
        return NodeAccess(nowhere, options["ca"], options["cert"], options["key"])

    def _stamp(self) -> tuple[int, int]:
        found = Path(self.options["config"]).stat()
        return found.st_mtime_ns, found.st_size

    def _load(self) -> None:
        from bsfg.config import load

        path = Path(self.options["config"])
        config, seen = load(path), self._stamp()
        origins = [
            FactsOrigin(
                f"{link.name}/{stream}",
                str(link.address),
                stream,
                link.expected_server,
                str(link.buffer),
                tuple(link.carry_only),
                filter=link.filter,
            )
            for link in config.links.values()
            for stream in config.streams_of(link)
        ]
        if not origins and self._seen is None:
            raise InvalidArgument(f"{path} has no links", hint="Each [links.NAME] is a source.")
        self.by_key = {origin.key: self._completed(origin) for origin in origins}
        self.base = self._base(None if config.listen.plaintext else config.tls_files)
        self._seen = seen


class SourceQuestions:
    """Asks many sources side by side; who does not answer in time holds up nobody, and is asked again meanwhile."""

    def __init__(self) -> None:
        self._asking: dict[tuple[str, str], futures.Future[Any]] = {}
        self._pauses: dict[str, Backoff] = {}
        self.away: dict[str, BsfgError] = {}

    def ask(self, what: str, questions: Mapping[str, Callable[[], Coroutine[Any, Any, T]]]) -> dict[str, T]:
        """Give the answers of those who are there, by key; `away` then says of the others why."""
        for key, question in questions.items():
            if (what, key) not in self._asking:
                pause = self._pauses[key].next_seconds() if key in self._pauses else 0.0
                work = _after(pause, question)
                self._asking[what, key] = asyncio.run_coroutine_threadsafe(work, calls().loop)
        # Who was away the last time is not waited for: his answer counts when it is there.
        awaited = [self._asking[what, key] for key in questions if key not in self.away]
        futures.wait(awaited, ANSWER_SECONDS)
        answers = {}
        for key in questions:
            asked = self._asking[what, key]
            if not asked.done():
                if key not in self.away:
                    self.fail(key, TimedOut(f"has not answered within {ANSWER_SECONDS:g} s"))
                continue
            del self._asking[what, key]
            try:
                answers[key] = asked.result()
            except BsfgError as error:
                self.fail(key, error)
            else:
                self._is_back(key)
        return answers

    def __reduce__(self) -> tuple[type[SourceQuestions], tuple[()]]:
        # A reader goes to tasks, which ask nothing.
        return SourceQuestions, ()

    @property
    def hopeless(self) -> dict[str, BsfgError]:
        """Whom no waiting mends: a log that is another one, a stream that there is not, a right that was taken."""
        return {key: error for key, error in self.away.items() if not error.retryable}

    def fail(self, key: str, error: BsfgError) -> None:
        """Take note of a source that cannot be read."""
        if key not in self.away:
            log.warning("the source %s stands still: %s: %s", key, error.code, error.message)
            self._pauses[key] = Backoff(ASK_AGAIN_SECONDS, ASK_AGAIN_MAX_SECONDS)
        self.away[key] = error

    def _is_back(self, key: str) -> None:
        if self.away.pop(key, None) is not None:
            log.warning("the source %s goes on", key)
            del self._pauses[key]


async def _after(seconds: float, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
    await asyncio.sleep(seconds)
    return await question()


def of_source(key: str, error: BsfgError) -> BsfgError:
    """Give the same error with the name of the source in it."""
    return BsfgError.from_dict({**error.to_dict(), "message": f"{key}: {error.message}"})


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """How far each source is: its log, and the next offset of it."""

    by_key: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Give it as checkpoints keep it and as `startingOffsets` takes it."""
        offsets: dict[str, Any] = {key: offset for key, (_, offset) in sorted(self.by_key.items())}
        return {**offsets, LOG_IDS: {key: log_id for key, (log_id, _) in sorted(self.by_key.items())}}

    @staticmethod
    def of(value: dict[str, Any]) -> SourceOffsets:
        """Read what a checkpoint keeps."""
        log_ids = value.get(LOG_IDS)
        offsets = {key: offset for key, offset in value.items() if key not in (LOG_IDS, AWAY)}
        are_numbers = all(isinstance(offset, int) for offset in offsets.values())
        if not isinstance(log_ids, dict) or log_ids.keys() != offsets.keys() or not are_numbers:
            raise FrameInvalid(
                f"the checkpoint holds {str(value)[:200]}, which are no offsets of several sources",
                hint="A checkpoint of one address and stream is read on with those options.",
            )
        return SourceOffsets({key: (str(log_ids[key]), offset) for key, offset in offsets.items()})


def check_apart(log_ids: Mapping[str, str]) -> None:
    """Raise `InvalidArgument` when two sources are one log by different addresses: each fact would come twice."""
    keys: dict[str, str] = {}
    for key, log_id in sorted(log_ids.items()):
        if (other := keys.setdefault(log_id, key)) != key:
            raise InvalidArgument(
                f"{other} and {key} are the same log {log_id}, so that each of its facts would be there twice",
                hint="Name every buffer once, by one address.",
            )


def confirm_offsets(
    origins: Origins, end: dict[str, Any], questions: SourceQuestions, confirmed: dict[str, int]
) -> None:
    """Confirm what a micro-batch ended with for the consumer of each source; who is away is told with the next one.

    ``confirmed`` keeps what was, so that only what has moved is told.
    """
    told = {}
    for key, (log_id, offset) in SourceOffsets.of(end).by_key.items():
        origin = origins.by_key.get(key)
        if origin is not None and origin.consumer is not None and offset > max(0, confirmed.get(key, 0)):
            told[key] = confirmation(origins.source(origin), origin.consumer, log_id, offset)
    confirmed.update(questions.ask("confirm", told))


def confirmation(
    source: BufferSource, consumer: str, log_id: str, offset: int
) -> Callable[[], Coroutine[Any, Any, int]]:
    """Give what confirms everything before an offset and gives that offset."""

    async def work() -> int:
        await source.asked_to_confirm(consumer, offset - 1, log_id)
        return offset

    return work


def shared_out(backlogs: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Share a limit out fairly: nobody gets more than he has, and who has little does not wait for who has much."""
    shares, left = {}, limit
    for rank, (key, backlog) in enumerate(sorted(backlogs.items(), key=lambda item: (item[1], item[0]))):
        if left is None:
            shares[key] = backlog
            continue
        shares[key] = min(backlog, -(-left // (len(backlogs) - rank)))
        left -= shares[key]
    return shares


@dataclass(frozen=True, slots=True)
class OriginRange:
    """A range of offsets of one source (``end`` exclusive)."""

    origin: FactsOrigin
    log_id: str
    first: int
    end: int


def cut(ranges: Sequence[OriginRange], pieces: int) -> list[tuple[OriginRange, ...]]:
    """Cut ranges into so many parts of nearly the same size, each of whole ranges or parts of them."""
    total = sum(each.end - each.first for each in ranges)
    pieces = min(pieces, total)
    parts: list[list[OriginRange]] = [[] for _ in range(pieces)]
    at = 0
    for each in ranges:
        first = each.first
        while first < each.end:
            piece = at * pieces // total
            ends = -(-(piece + 1) * total // pieces)
            end = min(each.end, first + ends - at)
            parts[piece].append(replace(each, first=first, end=end))
            at, first = at + end - first, end
    return [tuple(part) for part in parts]


def pieces_of(ranges: Sequence[OriginRange], options: SourceOptions) -> int:
    """Give how many tasks are to read some ranges: as many as told, or few of many facts and some for every core."""
    if options["numPartitions"] is not None:
        return int(options["numPartitions"])
    total = sum(each.end - each.first for each in ranges)
    by_size = -(-total // options["partitionFacts"])
    return int(max(by_size, min(len(ranges), TASKS_PER_CORE * (os.cpu_count() or 1))))


async def asked_position(source: BufferSource, wanted: Position) -> tuple[str, int]:
    """Ask a source which log and offset a position means now."""
    from bsfg.spark.options import EARLIEST

    if wanted.offset is not None:
        head = await source.asked_head()
        check_log(head, head.log_id, wanted.offset)
        return head.log_id, wanted.offset
    if wanted.unix_ms is not None or wanted.word == EARLIEST:
        head = await source.asked_head(unix_ms=max(0, wanted.unix_ms or 0))
        return head.log_id, head.start
    head = await source.asked_head()
    return head.log_id, head.end
