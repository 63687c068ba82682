"""Chunks of CSV, JSON Lines and Parquet as rows, and a reject for each record that could not be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from bsfg.canonical import NotJson, canonicalize, parse_literals
from bsfg.errors import FileChanged, FileUnreadable, RowUnreadable
from bsfg.spark.ingest.columns import STRING, Column, of_arrow, of_json_values
from bsfg.spark.ingest.plan import CsvFormat, IngestPlan
from bsfg.spark.ingest.survey import (
    CSV,
    OPEN_QUOTE,
    PARQUET,
    REFUSED,
    TOO_LONG,
    Chunk,
    FileSurvey,
    TextRecords,
    are_blank,
    field_counts,
    record_ends,
    split_fields,
    stamp_of,
)


@dataclass(slots=True)
class CsvRecords:
    """What a block of records holds: which records are rows, their columns, and why the others are not."""

    records: np.ndarray
    columns: dict[str, Any]
    unreadable: dict[int, str]
    whole: None = None

    def get(self, name: str) -> Column | None:
        """Give a column."""
        found = self.columns.get(name)
        return Column(found) if found is not None else None


def csv_columns(block: TextRecords, names: list[str], delimiter: str, csv: CsvFormat) -> CsvRecords:
    """Read records as columns of text; an empty field without quotes is null."""
    if not len(block):
        return CsvRecords(np.arange(0), {name: pa.array([], STRING) for name in names}, {})
    return _csv_at_once(block, names, delimiter, csv.encoding) or _csv_one_by_one(block, names, delimiter, csv.encoding)


def _csv_at_once(block: TextRecords, names: list[str], delimiter: str, encoding: str) -> CsvRecords | None:
    """Read a regular block; None when it is not as regular as it seemed."""
    if not block.regular or block.data.count(b"\r") != block.data.count(b"\r\n"):
        return None
    counts = field_counts(block.data, block.ends, delimiter)
    fitting = counts == len(names)
    records = np.flatnonzero(fitting)
    unreadable = {int(at): _wrong_width(int(counts[at]), len(names)) for at in np.flatnonzero(~fitting)}
    if not len(records):
        return CsvRecords(records, {name: pa.array([], STRING) for name in names}, unreadable)
    try:
        data = _as_utf8(block, records, encoding)
    except UnicodeDecodeError:
        return None
    keys = [str(number) for number in range(len(names))]
    table = pa_csv.read_csv(
        io.BytesIO(data),
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=keys),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(keys, STRING),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    if table.num_rows != len(records):
        return None
    columns = {name: table.column(at).combine_chunks() for at, name in enumerate(names)}
    return CsvRecords(records, columns, unreadable)


def _as_utf8(block: TextRecords, records: np.ndarray, encoding: str) -> bytes:
    """Give some records of a block, and nothing between them, as UTF-8."""
    data = block.data
    if int((block.ends - block.starts)[records].sum()) != len(data):
        data = b"".join(map(block.record, records.tolist()))
    if not data.endswith(b"\n"):
        data += b"\n"  # without it Arrow takes an empty last field for a quoted one
    if encoding == "utf-8":
        data.decode()
        return data
    return data.decode(encoding).encode()


def _wrong_width(fields: int, columns: int) -> str:
    return f"has {fields} field{'s' if fields != 1 else ''}, and there are {columns} columns"


def _csv_one_by_one(block: TextRecords, names: list[str], delimiter: str, encoding: str) -> CsvRecords:
    rows: list[list[str | None]] = []
    records: list[int] = []
    unreadable: dict[int, str] = {}
    for at in range(len(block)):
        fields = split_fields(block.record(at), delimiter)
        if len(fields) != len(names):
            unreadable[at] = _wrong_width(len(fields), len(names))
            continue
        try:
            rows.append([None if each is None else each.decode(encoding) for each in fields])
            records.append(at)
        except UnicodeDecodeError as error:
            unreadable[at] = f"is not {encoding}: the byte 0x{error.object[error.start]:02x} is no text there"
    values = zip(*rows, strict=True) if rows else ([] for _ in names)
    columns = {name: pa.array(list(column), STRING) for name, column in zip(names, values, strict=True)}
    return CsvRecords(np.array(records, dtype=np.int64), columns, unreadable)


_TOGETHER = 64
"""How many lines are compared at once with what they were read as."""


@dataclass(slots=True)
class JsonRecords:
    """What a block of lines holds: which of them are rows, the rows, and why the others are not."""

    records: np.ndarray
    rows: list[dict[str, Any]]
    lines: list[bytes]
    unreadable: dict[int, str]

    def get(self, name: str) -> Column | None:
        """Give a column: the value of a key, or of a path of keys with dots between them."""
        try:
            return of_json_values([row[name] for row in self.rows])
        except KeyError:
            path = name.split(".")
            return of_json_values([row[name] if name in row else _at_path(row, path) for row in self.rows])

    def whole(self) -> pa.Array:
        """Give the lines themselves."""
        return pa.array(self.lines, pa.binary())


def json_columns(block: TextRecords) -> JsonRecords:
    """Read lines as JSON objects."""
    lines = _lines(block)
    found = _json_at_once(lines) or _json_one_by_one(lines)
    _keep_as_written(found)
    return found


def _lines(block: TextRecords) -> list[bytes]:
    lines = block.data.removesuffix(b"\n").split(b"\n")
    if len(lines) != len(block) or b"\r" in block.data:
        return [block.record(at).strip(b" \t\r\n") for at in range(len(block))]
    return lines


def _json_at_once(lines: list[bytes]) -> JsonRecords | None:
    """Read lines that are all objects; None when one of them is not."""
    try:
        rows = list(map(orjson.loads, lines))
    except (ValueError, RecursionError):
        return None
    if set(map(type, rows)) != {dict}:
        return None
    return JsonRecords(np.arange(len(rows)), rows, lines, {})


def _json_one_by_one(lines: list[bytes]) -> JsonRecords:
    found = JsonRecords(np.arange(0), [], [], {})
    records: list[int] = []
    for at, line in enumerate(lines):
        try:
            row = orjson.loads(line)
        except (ValueError, RecursionError):
            found.unreadable[at] = _reason(line)
            continue
        if type(row) is not dict:
            found.unreadable[at] = f"is JSON, but not an object: {line[:40].decode('utf-8', 'replace')}"
            continue
        found.rows.append(row)
        found.lines.append(line)
        records.append(at)
    found.records = np.array(records, dtype=np.int64)
    return found


def _reason(line: bytes) -> str:
    try:
        canonicalize(line)
    except NotJson as problem:
        return str(problem)
    return "not valid JSON"


def _keep_as_written(found: JsonRecords) -> None:
    """Read lines again that lost something when they were read: digits of numbers, or keys that appear twice."""
    bad: list[int] = []
    rows, lines = found.rows, found.lines
    for start in range(0, len(rows), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        joined, compact = b",".join(lines[part]), orjson.dumps(rows[part])[1:-1]
        # The usual ways to write JSON have no spaces, or one behind colons and commas.
        if joined in (compact, b"") or joined.replace(b'": ', b'":').replace(b', "', b',"') == compact:
            continue
        for at in range(start, min(start + _TOGETHER, len(rows))):
            if _squeezed(lines[at]) != orjson.dumps(rows[at]):
                try:
                    rows[at] = parse_literals(canonicalize(lines[at]))
                except NotJson as problem:
                    found.unreadable[int(found.records[at])] = str(problem)
                    bad.append(at)
    if bad:
        kept = np.setdiff1d(np.arange(len(rows)), bad, assume_unique=True)
        found.rows, found.lines = [rows[at] for at in kept], [lines[at] for at in kept]
        found.records = found.records[kept]


def _squeezed(data: bytes) -> bytes:
    """Take spaces out of valid JSON, where they are easily told from those in strings; else give it as it is."""
    if b"\\" in data:
        return data
    parts = data.split(b'"')
    parts[::2] = [part.translate(None, delete=b" \t\r\n") for part in parts[::2]]
    return b'"'.join(parts)


def _at_path(row: dict[str, Any], path: list[str]) -> Any:
    value: Any = row
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


BATCH_ROWS = 16_384
"""How many rows of Parquet are read at once."""

RECORD_BYTES_MAX = 64 << 10
"""How much of a record a reject shows."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that is no fact: where it is, what is wrong with it, and the row itself.

    ``rows`` is more than one when a whole part of a file cannot be read.
    """

    file: str
    row: int | None
    code: str
    reason: str
    field: str | None = None
    record: Any = None
    record_bytes: int | None = None
    line: int | None = None
    byte: int | None = None
    rows: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Give the form of the reject file: what is not known is left out."""
        names = ("file", "row", "line", "byte", "rows", "code", "field", "reason", "record", "record_bytes")
        found = {name: getattr(self, name) for name in names}
        found["rows"] = self.rows if self.rows != 1 else None
        return {name: value for name, value in found.items() if value is not None}


@dataclass(slots=True)
class FileRows:
    """Rows of a file as columns; ``rejects`` are the records among them that could not be read."""

    file: FileSurvey
    numbers: np.ndarray
    get: Callable[[str], Column | None]
    """Gives a column by name, None when no row has it."""

    names: list[str]
    """The columns in their order, for formats that have the same in all rows."""

    describe: Callable[[int], dict[str, Any]]
    """Tells of the row at a place what a reject says: line, byte and record."""

    whole: Callable[[], pa.Array] | None = None
    """Gives all of each row as one JSON text, for formats whose rows are that."""

    raw: Callable[[str], pa.Array | None] = lambda name: None
    """Gives a column of bytes as they are, for formats that have such."""

    rejects: list[Reject] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    def reject(self, at: int, code: str, reason: str, field: str | None = None) -> Reject:
        """Make the reject of one row."""
        return Reject(self.file.path, int(self.numbers[at]), code, reason, field, **self.describe(at))


def read_chunk(file: FileSurvey, chunk: Chunk, plan: IngestPlan) -> Iterator[FileRows]:
    """Read the rows of a chunk; raises `FileChanged` when the file is not what it was."""
    _check_unchanged(file)
    if chunk.kind == REFUSED:
        reason = file.problem or "cannot be read"
        rejects = [Reject(file.path, None, FileUnreadable.code, reason, rows=chunk.rows)]
        yield _without_rows(file, rejects)
    elif file.format == PARQUET:
        yield from _read_parquet(file, chunk, plan)
    else:
        yield _read_text(file, chunk, plan)
    _check_unchanged(file)


def _check_unchanged(file: FileSurvey) -> None:
    try:
        now = stamp_of(file.path)
    except OSError as error:
        raise FileChanged(f"{file.path} cannot be read any more: {error.strerror}") from None
    if file.digest and now != file.stamp:
        raise FileChanged(f"{file.path} changed while it was being ingested")


def _without_rows(file: FileSurvey, rejects: list[Reject]) -> FileRows:
    return FileRows(file, np.empty(0, dtype=np.int64), lambda name: None, [], lambda at: {}, rejects=rejects)


# Text files.


def _read_text(file: FileSurvey, chunk: Chunk, plan: IngestPlan) -> FileRows:
    with open(file.path, "rb") as source:
        source.seek(chunk.start)
        data = source.read(chunk.size_bytes if chunk.kind != TOO_LONG else RECORD_BYTES_MAX)
    if chunk.kind in (TOO_LONG, OPEN_QUOTE):
        return _without_rows(file, [_broken(file, chunk, data, plan)])
    delimiter = plan.csv.separator(file.path) if file.format == CSV else None
    ends = record_ends(data, delimiter, final=True)
    starts = np.concatenate(([0], ends.at[:-1])).astype(np.int64)
    kept = ~are_blank(data, starts, ends.at)
    block = TextRecords(data, starts[kept], ends.at[kept], ends.regular)
    if len(block) != chunk.rows or ends.covered != chunk.size_bytes:
        raise FileChanged(f"{file.path} changed while it was being ingested")
    found = (
        csv_columns(block, file.columns or [], delimiter, plan.csv) if delimiter is not None else json_columns(block)
    )
    numbers = chunk.first_row + np.arange(chunk.rows)
    encoding = plan.csv.encoding if file.format == CSV else "utf-8"

    def describe(record: int) -> dict[str, Any]:
        start, end = int(block.starts[record]), int(block.ends[record])
        line = chunk.first_line + block.lines_before(start)
        return {"line": line, "byte": chunk.start + start, **_shown(data[start:end], end - start, encoding)}

    rejects = [
        Reject(file.path, int(numbers[record]), RowUnreadable.code, reason, **describe(record))
        for record, reason in sorted(found.unreadable.items())
    ]
    at = found.records
    return FileRows(
        file,
        numbers[at],
        found.get,
        file.columns or [],
        lambda row: describe(int(at[row])),
        whole=found.whole,
        rejects=rejects,
    )


def _broken(file: FileSurvey, chunk: Chunk, data: bytes, plan: IngestPlan) -> Reject:
    if chunk.kind == TOO_LONG:
        reason = f"has {chunk.size_bytes} bytes, the limit is {plan.max_row_bytes}"
    else:
        reason = "opens a quote that never closes"
    shown = _shown(data, chunk.size_bytes, plan.csv.encoding if file.format == CSV else "utf-8")
    place: dict[str, Any] = {"line": chunk.first_line, "byte": chunk.start}
    return Reject(file.path, chunk.first_row, RowUnreadable.code, reason, **place, **shown)


def _shown(record: bytes, size_bytes: int, encoding: str) -> dict[str, Any]:
    """Give a record as text, cut when it is very long; bytes that are no text are written as \\xNN."""
    cut = record[:RECORD_BYTES_MAX] if size_bytes > RECORD_BYTES_MAX else record.rstrip(b"\r\n")
    shown = {"record": cut.decode(encoding, "backslashreplace")}
    return {**shown, "record_bytes": size_bytes} if size_bytes > RECORD_BYTES_MAX else shown


# Parquet.


def _read_parquet(file: FileSurvey, chunk: Chunk, plan: IngestPlan) -> Iterator[FileRows]:
    done = 0
    try:
        with pq.ParquetFile(file.path) as source:
            names = None if plan.object.whole and plan.object.column is None else _needed(plan, file.columns or [])
            wanted = {"row_groups": [chunk.start], "columns": names, "use_threads": False}
            for batch in source.iter_batches(BATCH_ROWS, **wanted):
                yield _parquet_rows(file, batch, chunk, done)
                done += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = f"rows cannot be read: {str(error).splitlines()[0]}"[:300]
        row, rows = chunk.first_row + done, chunk.rows - done
        yield _without_rows(file, [Reject(file.path, row, FileUnreadable.code, reason, rows=rows)])
        done = chunk.rows
    if done != chunk.rows:
        raise FileChanged(f"{file.path} changed while it was being ingested")


def _needed(plan: IngestPlan, columns: list[str]) -> list[str]:
    """Name the columns of the file that the plan needs; a path needs the column that it begins in."""
    return list(dict.fromkeys(name if name in columns else name.partition(".")[0] for name in plan.columns()))


def _parquet_rows(file: FileSurvey, batch: pa.RecordBatch, chunk: Chunk, done: int) -> FileRows:
    def array(name: str) -> pa.Array | None:
        if name in batch.schema.names:
            return batch.column(name)
        first, _, rest = name.partition(".")
        found = batch.column(first) if first in batch.schema.names else None
        for part in rest.split("."):
            if found is None or not pa.types.is_struct(found.type) or found.type.get_field_index(part) < 0:
                return None
            found = pa.compute.struct_field(found, part)
        return found

    def column(name: str) -> Column | None:
        found = array(name)
        return of_arrow(found) if found is not None else None

    def raw(name: str) -> pa.Array | None:
        found = array(name)
        is_bytes = found is not None and (pa.types.is_binary(found.type) or pa.types.is_large_binary(found.type))
        return found.cast(pa.binary()) if found is not None and is_bytes else None

    numbers = chunk.first_row + done + np.arange(batch.num_rows)
    describe = partial(_described, file, chunk.start, done)
    return FileRows(file, numbers, column, list(batch.schema.names), describe, raw=raw)


@lru_cache(maxsize=1)
def _row_group(path: str, group: int, stamp: tuple[int, int]) -> pa.Table:
    with pq.ParquetFile(path) as source:
        return source.read_row_group(group, use_threads=False)


def _described(file: FileSurvey, group: int, done: int, at: int) -> dict[str, Any]:
    """Show a row of Parquet with all of its columns, which were not all read before."""
    try:
        table = _row_group(file.path, group, file.stamp)
    except (pa.ArrowException, OSError, ValueError):
        return {}  # a column that nobody asked for is damaged
    row = {name: _value(table.column(number)[done + at]) for number, name in enumerate(table.column_names)}
    shown = orjson.dumps(row, default=_as_text, option=orjson.OPT_NON_STR_KEYS)
    if len(shown) > RECORD_BYTES_MAX:
        return {"record": shown[:RECORD_BYTES_MAX].decode("utf-8", "ignore"), "record_bytes": len(shown)}
    return {"record": orjson.loads(shown)}


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return f"{getattr(scalar, 'value', '')} ({scalar.type})"  # such as a time that no calendar has


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
