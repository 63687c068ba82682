"""Chunks of files as rows: columns of what could be read, and a reject for each record that could not.

Nothing of a chunk gets lost: every record is either a row or a reject, which is checked against the survey.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bsfg.errors import FileChanged, FileUnreadable, RowUnreadable
from bsfg.spark.ingest.columns import Column, of_arrow
from bsfg.spark.ingest.csvrows import csv_columns
from bsfg.spark.ingest.jsonrows import json_columns
from bsfg.spark.ingest.plan import Plan
from bsfg.spark.ingest.records import Block, are_blank, record_ends
from bsfg.spark.ingest.survey import CSV, OPEN_QUOTE, PARQUET, REFUSED, TOO_LONG, Chunk, FileSurvey, stamp_of

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
class Rows:
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


def read_chunk(file: FileSurvey, chunk: Chunk, plan: Plan) -> Iterator[Rows]:
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


def _without_rows(file: FileSurvey, rejects: list[Reject]) -> Rows:
    return Rows(file, np.empty(0, dtype=np.int64), lambda name: None, [], lambda at: {}, rejects=rejects)


# Text files.


def _read_text(file: FileSurvey, chunk: Chunk, plan: Plan) -> Rows:
    with open(file.path, "rb") as source:
        source.seek(chunk.start)
        data = source.read(chunk.size_bytes if chunk.kind != TOO_LONG else RECORD_BYTES_MAX)
    if chunk.kind in (TOO_LONG, OPEN_QUOTE):
        return _without_rows(file, [_broken(file, chunk, data, plan)])
    delimiter = plan.csv.separator(file.path) if file.format == CSV else None
    ends = record_ends(data, delimiter, final=True)
    starts = np.concatenate(([0], ends.at[:-1])).astype(np.int64)
    kept = ~are_blank(data, starts, ends.at)
    block = Block(data, starts[kept], ends.at[kept], ends.regular)
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
    return Rows(
        file,
        numbers[at],
        found.get,
        file.columns or [],
        lambda row: describe(int(at[row])),
        whole=found.whole,
        rejects=rejects,
    )


def _broken(file: FileSurvey, chunk: Chunk, data: bytes, plan: Plan) -> Reject:
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


def _read_parquet(file: FileSurvey, chunk: Chunk, plan: Plan) -> Iterator[Rows]:
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


def _needed(plan: Plan, columns: list[str]) -> list[str]:
    """Name the columns of the file that the plan needs; a path needs the column that it begins in."""
    return list(dict.fromkeys(name if name in columns else name.partition(".")[0] for name in plan.columns()))


def _parquet_rows(file: FileSurvey, batch: pa.RecordBatch, chunk: Chunk, done: int) -> Rows:
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
    return Rows(file, numbers, column, list(batch.schema.names), describe, raw=raw)


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
