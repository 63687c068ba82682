"""The columns of landed files, and the partition that each fact belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.spark.land.layout import Partition
from bsfg.spark.mapping import COLUMNS, Place, schema_of, text_of, to_spark

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


def landed(entries: EntryBatch, place: Place) -> pa.RecordBatch:
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
