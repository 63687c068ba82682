"""A plain reader of the row form of small frames, written from its description alone."""

import pyarrow as pa

from bsfg.rows import Row


def rows_in(data: bytes, schema: pa.Schema) -> list[Row] | None:
    """Read rows one byte after the other; None when the bytes are not exactly rows."""
    rows, rest = [], data
    while rest:
        bits, rest = _number(rest), rest[4:]
        if bits is None or bits >= 1 << len(schema):
            return None
        present = [field for at, field in enumerate(schema) if bits & 1 << at]
        lengths = {}
        for field in present:
            if not _width(field.type):
                lengths[field.name], rest = _number(rest), rest[4:]
        row = dict.fromkeys(schema.names)
        for field in present:
            size = _width(field.type) or lengths[field.name]
            if size is None or len(rest) < size:
                return None
            value, rest = rest[:size], rest[size:]
            try:
                row[field.name] = _value(value, field.type)
            except UnicodeDecodeError:
                return None
        rows.append(tuple(row.values()))
    return rows


def _number(data: bytes) -> int | None:
    return int.from_bytes(data[:4], "little") if len(data) >= 4 else None


def _width(type_: pa.DataType) -> int:
    return 8 if type_ == pa.int64() else type_.byte_width if pa.types.is_fixed_size_binary(type_) else 0


def _value(data: bytes, type_: pa.DataType) -> object:
    if type_ == pa.int64():
        return int.from_bytes(data, "little", signed=True)
    return data.decode() if type_ == pa.string() else data
