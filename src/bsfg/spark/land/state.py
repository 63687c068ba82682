"""What a landing is told to do, how its folder is laid out, and how far it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.errors import FormatUnsupported, InvalidArgument, LandingDamaged
from bsfg.spark.calls import NodeAccess
from bsfg.spark.mapping import COLUMNS, EntryPlace, schema_of, text_of, to_spark
from bsfg.spark.options import Position

WORK = "_bsfg"
STATE = f"{WORK}/state.json"
LOCK = f"{WORK}/lock"
STAGING = f"{WORK}/staging"
SWAP = f"{WORK}/.swap"
GAPS = "_gaps.jsonl"
"""One line of JSON for every range of facts that could not be landed, and why."""

STAGED_SUFFIX = ".staged"
DATE, PREDICATE = "date", "predicate"

EMPTY = "__HIVE_DEFAULT_PARTITION__"
VALUE_BYTES_MAX = 200
"""How long the escaped value of a partition may be; a name of the file system has 255 bytes."""

_SPECIAL = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^<>|]")
_CUT = re.compile(r"%[0-9A-F]?$")
_FILE = re.compile(r"part-(\d{15,19})-(\d{15,19})-(\d{8,})\.parquet")
_DATE = re.compile(r"date=[^/]+")
_PREDICATE = re.compile(r"predicate=[^/]+")


def escaped(value: str) -> str:
    """Write a value so that it is one safe name, as Hive, Spark and Arrow all read it.

    Only characters that a name cannot have, or that these take for something else, are replaced by ``%XX``. Spark
    reads an escape as one character and Arrow as one byte, so whatever is not ASCII stays as it is.
    """
    if not value:
        return EMPTY
    text = _SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", value)
    data = text.encode()
    if len(data) <= VALUE_BYTES_MAX:
        return text
    # No predicate that a node takes is as long as this. The file itself tells the whole value.
    start = _CUT.sub("", data[: VALUE_BYTES_MAX - 33].decode("utf-8", "ignore"))
    return f"{start}~{hashlib.sha256(value.encode()).hexdigest()[:32]}"


class Partition(NamedTuple):
    """The facts of one predicate on one date."""

    date: str
    predicate: str

    @property
    def path(self) -> str:
        """The folder of the partition, relative to the landing folder."""
        return f"{DATE}={escaped(self.date)}/{PREDICATE}={escaped(self.predicate)}"


def is_date_folder(name: str) -> bool:
    """Tell whether a name in the landing folder holds the partitions of a date."""
    return _DATE.fullmatch(name) is not None


def is_predicate_folder(name: str) -> bool:
    """Tell whether a name in the folder of a date is a partition."""
    return _PREDICATE.fullmatch(name) is not None


def file_name(first: int, last: int, sequence: int) -> str:
    """Name a landed file: the offsets between which its facts lie, and the number of the commit that brought it."""
    return f"part-{first:015}-{last:015}-{sequence:08}.parquet"


def file_range(name: str) -> tuple[int, int] | None:
    """Give the offsets that a file's name tells, or None when it is not one of ours."""
    found = _FILE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


DAY_MS = 86_400_000

LANDED_COLUMNS: tuple[str, ...] = tuple(name for name in COLUMNS if name != "predicate")
"""What a file holds; its predicate and its date stand in the path, where readers look for them."""

LANDED_SCHEMA = schema_of(LANDED_COLUMNS)

REPEATING = tuple(
    name
    for name in LANDED_COLUMNS
    if name not in {"offset", "appended_at", "message_id", "produced_at", "object", "object_text", "digest"}
)
"""Columns whose values repeat, so that a dictionary of them is worth its work."""

_CONSTANT = frozenset({"stream", "buffer", "log_id"})
_MAPPED = tuple(name for name in LANDED_COLUMNS if name not in ("object", "object_text"))


class By(StrEnum):
    """The time whose date a fact is partitioned by, in UTC."""

    PRODUCED_AT = "produced_at"
    APPENDED_AT = "appended_at"


def landed(entries: EntryBatch, place: EntryPlace) -> pa.RecordBatch:
    """Lay entries out as they are landed.

    An object that is text stands in ``object_text`` alone and any other in ``object`` alone, so that every tool can
    read the first and nothing is stored twice.
    """
    mapped = to_spark(entries, place, _MAPPED)
    objects = entries.column("object")
    texts = text_of(objects)
    bytes_only = pa.nulls(len(objects), pa.binary())
    if texts.null_count:
        bytes_only = pc.if_else(texts.is_valid(), pa.scalar(None, pa.binary()), objects)
    made = {"object": bytes_only, "object_text": texts}
    arrays = [made[name] if name in made else mapped.column(name) for name in LANDED_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=LANDED_SCHEMA)


def chosen_rows(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    """Give some rows of landed facts; columns that are the same in all rows are only cut, which is much cheaper."""
    indices = pa.array(rows)
    arrays = [
        column.slice(0, len(rows)) if name in _CONSTANT or column.null_count == len(column) else column.take(indices)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def by_partition(entries: EntryBatch, by: By) -> Iterator[tuple[Partition, np.ndarray | None]]:
    """Give the partitions of entries and their rows in order; None stands for all rows."""
    days = np.asarray(entries.column(f"{by}_unix_ms")) // DAY_MS
    predicates = pc.fill_null(entries.column("predicate"), "").dictionary_encode()
    names, codes = predicates.dictionary.to_pylist(), np.asarray(predicates.indices, dtype=np.int64)
    if len(names) == 1 and days[0] == days[-1] and (days == days[0]).all():
        yield _partition(int(days[0]), names[0]), None
        return
    keys = days * len(names) + codes
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] - 1))
    for rows in np.split(order, starts[1:]):
        day, name = divmod(int(keys[rows[0]]), len(names))
        yield _partition(day, names[name]), rows


def _partition(day: int, predicate: str) -> Partition:
    return Partition(str(np.datetime64(day, "D")), predicate)


FILE_SIZE_BYTES = 128_000_000
MAX_FACTS_PER_BATCH = 4_000_000
EVERY_SECONDS = 10.0
RETRY_SECONDS = 60.0

# A path object has made one slash of the two already.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True, slots=True)
class LandSettings:
    """One landing: which buffer, into which folder, and how."""

    out: Path
    access: NodeAccess
    stream: str
    buffer: str = "store"
    by: By = By.PRODUCED_AT
    consumer: str | None = None
    starting: Position | None = None
    max_facts_per_batch: int = MAX_FACTS_PER_BATCH
    file_size_bytes: int = FILE_SIZE_BYTES
    every_seconds: float = EVERY_SECONDS
    compact: bool = True
    retry_seconds: float = RETRY_SECONDS


@dataclass(slots=True)
class Landed:
    """What a run has done so far. ``next`` is the first offset that is not landed.

    ``seconds`` were spent on landing, ``merging_seconds`` on merging small files.
    """

    facts: int = 0
    missing: int = 0
    batches: int = 0
    files: int = 0
    size_bytes: int = 0
    merged_files: int = 0
    merged_into: int = 0
    next: int = 0
    backlog: int = 0
    seconds: float = 0.0
    merging_seconds: float = 0.0

    @property
    def facts_per_second(self) -> float:
        """How fast facts were landed."""
        return self.facts / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give the form that ``--json`` prints."""
        times = {"seconds": round(self.seconds, 3), "merging_seconds": round(self.merging_seconds, 3)}
        return {**asdict(self), **times, "facts_per_second": round(self.facts_per_second, 1)}


def folder_of(out: str | Path) -> Path:
    """Give the landing folder as an absolute path, made if need be; raises `InvalidArgument` for an address."""
    if _ADDRESS.match(str(out)):
        hint = "Give a folder of the file system, mounted on all machines; object stores cannot rename."
        raise InvalidArgument(f"{out} is not a folder", hint=hint)
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from None
    return folder


FORMAT = 1


@dataclass(frozen=True, slots=True)
class LandedOrigin:
    """Whose facts a folder holds, and by which of their times they are partitioned."""

    stream: str
    buffer: str
    log_id: str
    by: str


@dataclass(frozen=True, slots=True)
class Add:
    """A staged file and the name that it gets in its partition."""

    staged: str
    name: str


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """What changes in one partition: files that come, and files that they replace."""

    partition: str
    adds: Sequence[Add]
    removes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """What the last commit promised: changes of partitions, and lines for the list of gaps from a size on."""

    changes: Sequence[PartitionChange] = ()
    gaps: Sequence[dict[str, Any]] = ()
    gaps_at_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LandedState:
    """A landing folder at one commit. ``next`` is the first offset that is not landed."""

    origin: LandedOrigin
    start: int
    next: int
    sequence: int = 0
    facts: int = 0
    missing: int = 0
    tail_offset: int | None = None
    tail_digest: str = ""
    gaps_token: str = ""
    pending: Pending | None = field(default=None)

    def to_json(self) -> bytes:
        """Write the state."""
        form = {"format": FORMAT, **asdict(self)}
        return orjson.dumps(form, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @staticmethod
    def from_json(data: bytes) -> LandedState:
        """Read a state, or raise the error that says what is wrong with it."""
        try:
            form = orjson.loads(data)
            found = form.pop("format")
        except (ValueError, TypeError, AttributeError, KeyError):
            raise _damaged() from None
        if found != FORMAT:
            raise FormatUnsupported(f"the landing folder has format {found!r}, this version knows {FORMAT}")
        try:
            pending = form.pop("pending")
            state = LandedState(origin=LandedOrigin(**form.pop("origin")), **form)
            return replace(state, pending=None if pending is None else _pending(pending))
        except (TypeError, KeyError, AttributeError):
            raise _damaged() from None


def _pending(form: dict[str, Any]) -> Pending:
    changes = [
        PartitionChange(each["partition"], [Add(**add) for add in each["adds"]], list(each["removes"]))
        for each in form["changes"]
    ]
    return Pending(changes, form["gaps"], form["gaps_at_bytes"])


def _damaged() -> LandingDamaged:
    return LandingDamaged("the state of the landing folder, _bsfg/state.json, cannot be read")
