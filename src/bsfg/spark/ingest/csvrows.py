"""Rows of CSV as columns of text.

A regular block is read by Arrow, a whole column at a time. Anything else (stray quotes, bytes that are no text, rows
of the wrong width) is taken apart record by record, so that one bad row costs only itself.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from bsfg.spark.ingest.columns import STRING, Column
from bsfg.spark.ingest.plan import CsvFormat
from bsfg.spark.ingest.records import Block, field_counts, split_fields


@dataclass(slots=True)
class Found:
    """What a block of records holds: which records are rows, their columns, and why the others are not."""

    records: np.ndarray
    columns: dict[str, Any]
    unreadable: dict[int, str]
    whole: None = None

    def get(self, name: str) -> Column | None:
        """Give a column."""
        found = self.columns.get(name)
        return Column(found) if found is not None else None


def csv_columns(block: Block, names: list[str], delimiter: str, csv: CsvFormat) -> Found:
    """Read records as columns of text; an empty field without quotes is null."""
    if not len(block):
        return Found(np.arange(0), {name: pa.array([], STRING) for name in names}, {})
    return _at_once(block, names, delimiter, csv.encoding) or _one_by_one(block, names, delimiter, csv.encoding)


def _at_once(block: Block, names: list[str], delimiter: str, encoding: str) -> Found | None:
    """Read a regular block; None when it is not as regular as it seemed."""
    if not block.regular or block.data.count(b"\r") != block.data.count(b"\r\n"):
        return None
    counts = field_counts(block.data, block.ends, delimiter)
    fitting = counts == len(names)
    records = np.flatnonzero(fitting)
    unreadable = {int(at): _wrong_width(int(counts[at]), len(names)) for at in np.flatnonzero(~fitting)}
    if not len(records):
        return Found(records, {name: pa.array([], STRING) for name in names}, unreadable)
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
    return Found(records, columns, unreadable)


def _as_utf8(block: Block, records: np.ndarray, encoding: str) -> bytes:
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


def _one_by_one(block: Block, names: list[str], delimiter: str, encoding: str) -> Found:
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
    return Found(np.array(records, dtype=np.int64), columns, unreadable)
