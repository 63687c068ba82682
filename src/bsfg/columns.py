"""The one Arrow schema of facts and entries, and ways to look into its arrays without making Python objects."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.errors import InvalidArgument

DIGEST_BYTES = 32

FACT_SCHEMA = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("from_zone", pa.string()),
        pa.field("to_zone", pa.string()),
        pa.field("produced_at_unix_ms", pa.int64()),
        pa.field("correlation_id", pa.string()),
        pa.field("causation_id", pa.string()),
        pa.field("labels", pa.string()),
        pa.field("object_media_type", pa.string()),
        pa.field("object_schema", pa.string()),
        pa.field("signature", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("predicate", pa.string()),
        pa.field("object", pa.binary()),
        pa.field("artifact", pa.string()),
        pa.field("artifact_digest", pa.string()),
        pa.field("digest", pa.binary(DIGEST_BYTES)),
    ]
)
"""Labels and artifact reference are canonical JSON texts, null when absent; the digest is null until sealed."""

ORIGIN_FIELDS = [
    pa.field("origin_zone", pa.string()),
    pa.field("origin_offset", pa.int64()),
    pa.field("origin_appended_at_unix_ms", pa.int64()),
    pa.field("origin_age_ms", pa.int64()),
]
"""Where an entry was pulled from: zone, offset and time there, and how old it was by then, all hops before added up."""

STORED_SCHEMA = pa.schema([*FACT_SCHEMA, *ORIGIN_FIELDS])
"""What a forward buffer keeps of each fact; offsets and times stand once per frame."""

ENTRY_SCHEMA = pa.schema(
    [
        *FACT_SCHEMA,
        pa.field("offset", pa.int64()),
        pa.field("appended_at_unix_ms", pa.int64()),
        *ORIGIN_FIELDS,
    ]
)
"""What a stored fact adds: its offset, when it became durable, and where it was pulled from."""

AGELESS_ENTRY_SCHEMA = ENTRY_SCHEMA.remove(len(ENTRY_SCHEMA) - 1)
"""Entries as nodes before 0.2 write and expect them: they know no age."""


@lru_cache(maxsize=64)
def entry_schema(columns: tuple[str, ...]) -> pa.Schema:
    """Give the schema of entries with some of their columns, in the order of all; their offsets are always there."""
    unknown = [name for name in columns if name not in ENTRY_SCHEMA.names]
    if unknown:
        raise InvalidArgument(f"entries have no column {unknown[0][:80]!r}", hint=f"{', '.join(ENTRY_SCHEMA.names)}.")
    return pa.schema([field for field in ENTRY_SCHEMA if field.name in columns or field.name == "offset"])


FACT_FIELDS: tuple[str, ...] = tuple(FACT_SCHEMA.names)
AT = {name: index for index, name in enumerate(ENTRY_SCHEMA.names)}
"""Where each field stands in a row."""


_EMPTY = np.empty(0, dtype=np.uint8)
_INT64, _BINARY = pa.int64(), pa.binary()
_NULLS_KEPT = 64
_NULLS: dict[tuple[int, pa.DataType], pa.Array] = {}


def binary_parts(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Give the offsets (n + 1 of them) and the bytes of a string or binary array, whatever slice it is."""
    buffers = array.buffers()
    if buffers[1] is None or buffers[1].size == 0:
        return np.zeros(len(array) + 1, dtype=np.int32), _EMPTY
    offsets = np.frombuffer(buffers[1], dtype=np.int32, count=len(array) + 1, offset=4 * array.offset)
    data = np.frombuffer(buffers[2], dtype=np.uint8) if buffers[2] is not None and buffers[2].size else _EMPTY
    return offsets, data


def byte_lengths(array: pa.Array) -> np.ndarray:
    """Give the length in bytes of every row."""
    offsets, _ = binary_parts(array)
    return np.diff(offsets)


def used_bytes(array: pa.Array) -> np.ndarray:
    """Give the bytes of all rows, one after the other."""
    offsets, data = binary_parts(array)
    return data[offsets[0] : offsets[-1]]


def constant_value(array: pa.Array) -> str | None:
    """Give the one value that all rows of a string array share, or None when they differ or are null.

    Zones, predicates and media types are the same throughout most batches; then one look replaces thousands.
    """
    count = len(array)
    if count == 0 or array.null_count:
        return None
    offsets, data = binary_parts(array)
    start, first_end, end = int(offsets[0]), int(offsets[1]), int(offsets[-1])
    width, value = first_end - start, data[start:first_end].tobytes()
    # Most columns that differ at all differ at once: the last row is looked at before all others are.
    if end - start != count * width or data[end - width : end].tobytes() != value:
        return None
    if count > 2 and not (
        (np.diff(offsets) == width).all() and (data[first_end:end] == data[start : end - width]).all()
    ):
        return None
    return str(value, "utf-8")


def is_in(column: pa.Array, values: Collection[str]) -> np.ndarray:
    """Tell of each row of a string array whether it is one of some values."""
    single = constant_value(column)
    if single is not None:
        return np.full(len(column), single in values)
    found = pc.is_in(column, value_set=pa.array(sorted(values), pa.string()))
    return np.array(found.to_numpy(zero_copy_only=False), dtype=bool)


def fixed_binary(rows: bytes, width: int) -> pa.Array:
    """Make a fixed-size binary array of rows laid end to end."""
    count = len(rows) // width
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, pa.py_buffer(rows)])


def fixed_rows(array: pa.Array) -> np.ndarray:
    """View a fixed-size binary array without nulls as a matrix of bytes, one row per value."""
    width = array.type.byte_width
    data = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    return data[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)


def int64_array(values: np.ndarray) -> pa.Array:
    """Make an Arrow array of whole numbers without asking for their type."""
    data = np.ascontiguousarray(values, dtype=np.int64)
    return pa.Array.from_buffers(_INT64, len(data), [None, pa.py_buffer(data)], null_count=0)


def binary_scalar(value: bytes) -> pa.Scalar:
    """Make a scalar of bytes; `pa.scalar` would load pandas where that is installed, and every start wait for it."""
    ends = np.array([0, len(value)], dtype=np.int32)
    return pa.Array.from_buffers(_BINARY, 1, [None, pa.py_buffer(ends), pa.py_buffer(value)])[0]


def nulls(count: int, type_: pa.DataType) -> pa.Array:
    """Give a column of nulls; those of small batches are made once, because half of the columns are such."""
    if count > _NULLS_KEPT:
        return pa.nulls(count, type_)
    array = _NULLS.get((count, type_))
    if array is None:
        array = _NULLS[count, type_] = pa.nulls(count, type_)
    return array


class _Absent:
    """Lets a module seem not to be installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Refuse the one; others are for others to find."""
        if name == self._name:
            raise ModuleNotFoundError(name)


def leave_pandas_out() -> None:
    """Let pyarrow find no pandas, which it looks for with its first array: half a second, of no use to who has none."""
    absent = _Absent("pandas")
    sys.meta_path.insert(0, absent)
    pa.array([])
    sys.meta_path.remove(absent)
