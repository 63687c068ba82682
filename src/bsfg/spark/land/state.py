"""What a landing is told to do, how facts lie in its files, and how far it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.disk import lacking, sync_names
from bsfg.errors import FormatUnsupported, InvalidArgument, LandingDamaged
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land.columns import RESCUED, InferredColumn, TypedColumn, read_columns, typed
from bsfg.spark.mapping import COLUMNS, SPARK_SCHEMA, EntryPlace, text_of, to_spark
from bsfg.spark.options import Position

WORK = "_bsfg"
STATE = f"{WORK}/state.json"
LOCK = f"{WORK}/lock"
STAGING = f"{WORK}/staging"
SWAP = f"{WORK}/.swap"
LATEST = "_latest"
"""The folder of the table with the newest fact of each subject and predicate."""

GAPS = "_gaps.jsonl"
"""One line of JSON for every range of facts that could not be landed, and why."""

STAGED_SUFFIX = ".staged"
EMPTY = "__HIVE_DEFAULT_PARTITION__"
VALUE_BYTES_MAX = 200
"""How long the escaped value of a partition may be; a name of the file system has 255 bytes."""

_SPECIAL = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^<>|]")
_CUT = re.compile(r"%[0-9A-F]?$")
_FILE = re.compile(r"part-(\d{15,19})-(\d{15,19})-(\d{8,})\.parquet")


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


@dataclass(frozen=True, slots=True)
class Partition:
    """The facts that have the same values in the columns of the partitions, such as one predicate on one date."""

    values: tuple[tuple[str, str], ...]

    @staticmethod
    def of(values: Mapping[str, str]) -> Partition:
        """Give the partition of some values."""
        return Partition(tuple(values.items()))

    @staticmethod
    def at(path: str) -> Partition:
        """Give the partition whose folder this is, as its name tells; values that are very long are not whole there."""
        parts = [step.partition("=") for step in path.split("/")]
        return Partition(tuple((name, "" if value == EMPTY else unquote(value)) for name, _, value in parts))

    @property
    def path(self) -> str:
        """The folder of the partition, relative to that of the table."""
        return "/".join(f"{name}={escaped(value)}" for name, value in self.values)


def file_name(first: int, last: int, sequence: int) -> str:
    """Name a landed file: the offsets between which its facts lie, and the number of the commit that brought it."""
    return f"part-{first:015}-{last:015}-{sequence:08}.parquet"


def file_range(name: str) -> tuple[int, int] | None:
    """Give the offsets that a file's name tells, or None when it is not one of ours."""
    found = _FILE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


class By(StrEnum):
    """The time whose date a fact is partitioned by, in UTC."""

    PRODUCED_AT = "produced_at"
    APPENDED_AT = "appended_at"


_UNITS = {"month": "M", "date": "D", "hour": "h"}
_VALUES = ("predicate", "subject", "from_zone", "to_zone", "origin_zone")
PARTITIONS = (*_UNITS, *_VALUES)
"""What files can be partitioned by: pieces of time, and columns with few values."""

PARTITION_BY = ("date", "predicate")

_CONSTANT = frozenset({"stream", "buffer", "log_id"})
_SCATTERED = frozenset({"offset", "appended_at", "message_id", "produced_at", "object", "object_text", "digest"})


@dataclass(frozen=True, slots=True)
class Shape:
    """How the facts of one table are laid out: what their files are partitioned by, and their typed columns."""

    by: By = By.APPENDED_AT
    partition_by: tuple[str, ...] = PARTITION_BY
    columns: tuple[TypedColumn, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """What a file holds; the values of its partition stand in its path, where readers look for them."""
        return _schema(self)

    @property
    def table_schema(self) -> pa.Schema:
        """What a reader sees: the columns of files and partitions."""
        kinds = {name: pa.date32() if name == "date" else pa.string() for name in self.partition_by}
        return pa.schema([*self.schema, *(pa.field(name, kind) for name, kind in kinds.items())])

    @property
    def of_latest(self) -> Shape:
        """How the table with the newest fact of each subject and predicate is laid out."""
        return Shape(self.by, ("predicate",), self.columns)

    @property
    def repeating(self) -> list[str]:
        """Columns whose values repeat, so that a dictionary of them is worth its work."""
        texts = {column.name for column in self.columns if column.type == "string"}
        known = {name for name in COLUMNS if name not in _SCATTERED}
        return [name for name in self.schema.names if name in known or name in texts]

    def landed(self, entries: EntryBatch, place: EntryPlace) -> pa.RecordBatch:
        """Lay entries out as they are landed.

        An object that is text stands in ``object_text`` alone and any other in ``object`` alone, so that every tool
        can read the first and nothing is stored twice.
        """
        names = [name for name in COLUMNS if name in self.schema.names]
        mapped = to_spark(entries, place, [name for name in names if name not in ("object", "object_text")])
        objects = entries.column("object")
        texts = text_of(objects)
        bytes_only = pa.nulls(len(objects), pa.binary())
        if texts.null_count:
            bytes_only = pc.if_else(texts.is_valid(), pa.scalar(None, pa.binary()), objects)
        made = {"object": bytes_only, "object_text": texts}
        arrays = [made[name] if name in made else mapped.column(name) for name in names]
        if self.columns:
            arrays += typed(self.columns, entries)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def partitions(self, entries: EntryBatch) -> Iterator[tuple[Partition, np.ndarray | None]]:
        """Give the partitions of entries and their rows in order; None stands for all rows."""
        keys = np.zeros(len(entries), dtype=np.int64)
        values: list[list[str]] = [[]]
        for name in self.partition_by:
            codes, names = self._codes(name, entries)
            if len(names) == 1:
                values = [[*each, names[0]] for each in values]
                continue
            known, keys = np.unique(keys * len(names) + codes, return_inverse=True)
            values = [[*values[key // len(names)], names[key % len(names)]] for key in known.tolist()]
        found = [Partition(tuple(zip(self.partition_by, each, strict=True))) for each in values]
        if len(found) == 1:
            yield found[0], None
            return
        order = np.argsort(keys, kind="stable")
        starts = np.searchsorted(keys[order], np.arange(1, len(found)))
        yield from zip(found, np.split(order, starts), strict=True)

    def _codes(self, name: str, entries: EntryBatch) -> tuple[np.ndarray, list[str]]:
        """Give the value of each entry as a number, and what each number stands for."""
        if name in _UNITS:
            times = np.asarray(entries.column(f"{self.by}_unix_ms")).astype("datetime64[ms]")
            pieces = times.astype(f"datetime64[{_UNITS[name]}]")
            if (pieces == pieces[0]).all():
                return np.zeros(len(pieces), dtype=np.int64), [str(pieces[0])]
            known, codes = np.unique(pieces, return_inverse=True)
            return codes, [str(each) for each in known]
        encoded = pc.fill_null(entries.column(name), "").dictionary_encode()
        return np.asarray(encoded.indices, dtype=np.int64), encoded.dictionary.to_pylist()

    def conformed(self, rows: pa.RecordBatch | pa.Table) -> pa.Table:
        """Give rows the columns that files have now; those that came later are null in older ones."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        if table.schema.equals(self.schema):
            return table
        arrays = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(len(table), field.type)
            for field in self.schema
        ]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def holds(self, schema: pa.Schema) -> bool:
        """Tell whether a file with this schema is one of this table, with all of its columns or with earlier ones."""
        own = {field.name: field for field in self.schema}
        needed = set(own) - {column.name for column in self.columns} - {RESCUED}
        return needed <= set(schema.names) and all(own.get(field.name) == field for field in schema)


@lru_cache(maxsize=64)
def _schema(shape: Shape) -> pa.Schema:
    fields = [SPARK_SCHEMA.field(name) for name in COLUMNS if name not in shape.partition_by]
    if shape.columns:
        fields += [column.field for column in shape.columns] + [pa.field(RESCUED, pa.string())]
    return pa.schema(fields)


def read_partition_by(text: str) -> tuple[str, ...]:
    """Read what somebody wants files to be partitioned by."""
    found = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    wrong = [name for name in found if name not in PARTITIONS]
    if wrong or not found or len(set(found)) < len(found):
        says = f"--partition-by {wrong[0]!r} is nothing that facts have" if wrong else f"--partition-by {text!r}"
        raise InvalidArgument(says, hint=f"Name one or some of {', '.join(PARTITIONS)}, each once.")
    return found


def chosen_rows(batch: pa.RecordBatch, rows: Sequence[int] | np.ndarray) -> pa.RecordBatch:
    """Give some rows of landed facts; columns that are the same in all rows are only cut, which is much cheaper."""
    indices = pa.array(rows)
    arrays = [
        column.slice(0, len(rows)) if name in _CONSTANT or column.null_count == len(column) else column.take(indices)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


FILE_SIZE_BYTES = 128_000_000
MAX_FACTS_PER_BATCH = 4_000_000
EVERY_SECONDS = 10.0
RETRY_SECONDS = 60.0
MAX_FILES_PER_BATCH = 1_000
VACUUM_HOURS = 168.0

# A path object has made one slash of the two already.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class TableFormat(StrEnum):
    """What the files of a landing make up: Parquet files in folders, or a table of Delta Lake."""

    PARQUET = "parquet"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class LandSettings:
    """One landing: which buffer, into which folder, and how. What is None is as the folder was made."""

    out: Path
    access: NodeAccess
    stream: str
    buffer: str = "store"
    by: By | None = None
    consumer: str | None = None
    starting: Position | None = None
    format: TableFormat | None = None
    partition_by: tuple[str, ...] | None = None
    columns: tuple[TypedColumn, ...] = ()
    infer: bool = False
    latest: bool = False
    vacuum_hours: float = VACUUM_HOURS
    max_facts_per_batch: int = MAX_FACTS_PER_BATCH
    max_files_per_batch: int = MAX_FILES_PER_BATCH
    file_size_bytes: int = FILE_SIZE_BYTES
    every_seconds: float = EVERY_SECONDS
    compact: bool = True
    retry_seconds: float = RETRY_SECONDS


@dataclass(slots=True)
class Landed:
    """What a run has done so far. ``next`` is the first offset that is not landed.

    ``latest`` counts the newest facts that were brought up to date, ``columns`` is what was found out about them.
    ``seconds`` were spent on landing, ``merging_seconds`` on merging small files.
    """

    facts: int = 0
    missing: int = 0
    batches: int = 0
    files: int = 0
    size_bytes: int = 0
    merged_files: int = 0
    merged_into: int = 0
    removed_files: int = 0
    latest: int = 0
    next: int = 0
    backlog: int = 0
    seconds: float = 0.0
    merging_seconds: float = 0.0
    columns: list[InferredColumn] = field(default_factory=list)

    @property
    def facts_per_second(self) -> float:
        """How fast facts were landed."""
        return self.facts / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give the form that ``--json`` prints."""
        times = {"seconds": round(self.seconds, 3), "merging_seconds": round(self.merging_seconds, 3)}
        return {**asdict(self), **times, "facts_per_second": round(self.facts_per_second, 1)}


def place_of(out: str | Path) -> Path:
    """Give where a landing folder is, as an absolute path; raises `InvalidArgument` for an address or a file."""
    if _ADDRESS.match(str(out)):
        hint = "Give a folder of the file system, mounted on all machines; object stores cannot rename."
        raise InvalidArgument(f"{out} is not a folder", hint=hint)
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder")
    return folder


def folder_of(out: str | Path) -> Path:
    """Give the landing folder as an absolute path, made if need be."""
    folder = place_of(out)
    made = lacking(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_names(made)
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from None
    return folder


FORMAT = 2
_READABLE = (1, FORMAT)


@dataclass(frozen=True, slots=True)
class LandedOrigin:
    """Whose facts a folder holds, and how they are laid out; columns may be added to it, all else stays."""

    stream: str
    buffer: str
    log_id: str
    by: str
    format: str = TableFormat.PARQUET
    partition_by: tuple[str, ...] = PARTITION_BY
    columns: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """How the facts are laid out."""
        return Shape(By(self.by), self.partition_by, read_columns(", ".join(self.columns)) if self.columns else ())


@dataclass(frozen=True, slots=True)
class Add:
    """A staged file, the name that it gets in its partition, and what a table's log tells of it."""

    staged: str
    name: str
    facts: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """What changes in one partition: files that come, and files that they replace."""

    partition: str
    adds: Sequence[Add]
    removes: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pending:
    """What the last commit promised: changes of partitions, and lines for the list of gaps from a size on."""

    changes: Sequence[PartitionChange] = ()
    gaps: Sequence[dict[str, Any]] = ()
    gaps_at_bytes: int = 0

    @property
    def is_of_latest(self) -> bool:
        """Whether the newest facts change, and not the table of all."""
        return any(change.partition.startswith(f"{LATEST}/") for change in self.changes)


@dataclass(frozen=True, slots=True)
class LandedState:
    """A landing folder at one commit. ``next`` is the first offset that is not landed.

    ``latest`` is the first that the table of newest facts does not know of, if there is such a table. ``published`` is
    the last commit that has changed the table of all facts, and is sure to be there.
    """

    origin: LandedOrigin
    start: int
    next: int
    sequence: int = 0
    facts: int = 0
    missing: int = 0
    tail_offset: int | None = None
    tail_digest: str = ""
    gaps_token: str = ""
    latest: int | None = None
    published: int = -1
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
        if found not in _READABLE:
            raise FormatUnsupported(f"the landing folder has format {found!r}, this version knows {FORMAT}")
        try:
            pending = form.pop("pending")
            origin: dict[str, Any] = {
                name: tuple(each) if isinstance(each, list) else each for name, each in form.pop("origin").items()
            }
            state = LandedState(origin=LandedOrigin(**origin), **form)
            return replace(state, pending=None if pending is None else _pending(pending))
        except (TypeError, KeyError, AttributeError):
            raise _damaged() from None


def _pending(form: dict[str, Any]) -> Pending:
    changes = [PartitionChange(**{**each, "adds": [Add(**add) for add in each["adds"]]}) for each in form["changes"]]
    return Pending(changes, form["gaps"], form["gaps_at_bytes"])


def _damaged() -> LandingDamaged:
    return LandingDamaged("the state of the landing folder, _bsfg/state.json, cannot be read")
