"""Looking into Arrow arrays without making Python objects of their rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

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
