"""Labels and artifact references: canonical JSON texts in a fact, a map and a struct in Spark.

Both directions work on columns. Texts repeat a great deal, so each different one is parsed once; maps become texts
without a look at single rows as long as nothing in them must be escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.errors import InvalidFact

LABELS = pa.map_(pa.string(), pa.string())
ARTIFACT = pa.struct(
    [
        pa.field("bucket", pa.string()),
        pa.field("key", pa.string()),
        pa.field("digest", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("media_type", pa.string()),
        pa.field("file_name", pa.string()),
    ]
)
_STRING = pa.string()
_ESCAPED = r'["\\\x00-\x1f]'
"""What JSON cannot hold as it is."""


def labels_to_map(texts: pa.Array) -> pa.Array:
    """Make maps of the JSON texts of labels; no text is no map."""
    return _parsed(texts, LABELS, _maps)


def artifact_to_struct(texts: pa.Array) -> pa.Array:
    """Make structs of the JSON texts of artifact references; no text is no struct."""
    return _parsed(texts, ARTIFACT, lambda values: pa.array(values, type=ARTIFACT))


def _parsed(texts: pa.Array, type_: pa.DataType, make: Callable[[list[Any]], pa.Array]) -> pa.Array:
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), type_)
    encoded = texts.dictionary_encode()
    return make([orjson.loads(text) for text in encoded.dictionary.to_pylist()]).take(encoded.indices)


def _maps(values: list[dict[str, str]]) -> pa.Array:
    names: list[str] = []
    texts: list[str] = []
    offsets = [0]
    for value in values:
        names.extend(value)
        texts.extend(value.values())
        offsets.append(len(names))
    return pa.MapArray.from_arrays(
        pa.array(offsets, type=pa.int32()), pa.array(names, _STRING), pa.array(texts, _STRING)
    )


def map_to_labels(maps: pa.Array) -> pa.Array:
    """Make canonical JSON texts of maps; a map without entries is no text. Raises `InvalidFact` for a null label."""
    if maps.null_count == len(maps):
        return pa.nulls(len(maps), _STRING)
    offsets = np.asarray(maps.offsets)
    names, values = maps.keys, maps.items
    if not _is_plain(names, values, offsets):
        return pa.array([_labels_text(row, pairs) for row, pairs in enumerate(maps.to_pylist())], type=_STRING)
    pairs = pc.binary_join_element_wise('"', names, '":"', values, '"', "")
    joined = pc.binary_join(pa.ListArray.from_arrays(maps.offsets, pairs), ",")
    texts = pc.binary_join_element_wise("{", joined, "}", "")
    absent = np.diff(offsets) == 0
    if maps.null_count:
        absent |= np.asarray(maps.is_null())
    return pc.if_else(pa.array(absent), pa.scalar(None, _STRING), texts)


def _is_plain(names: pa.Array, values: pa.Array, offsets: np.ndarray) -> bool:
    """Tell whether maps can be written as they stand: nothing to escape, names in order, no nulls."""
    first, end = int(offsets[0]), int(offsets[-1])
    names, values = names.slice(first, end - first), values.slice(first, end - first)
    if values.null_count or any(pc.any(pc.match_substring_regex(each, _ESCAPED)).as_py() for each in (names, values)):
        return False
    if len(names) < 2:
        return True
    rising = np.asarray(pc.less(names.slice(0, len(names) - 1), names.slice(1)).to_numpy(zero_copy_only=False))
    starts = offsets[1:-1] - first - 1
    # Between two maps the order of names does not matter.
    rising[starts[(starts >= 0) & (starts < len(rising))]] = True
    return bool(rising.all())


def _labels_text(row: int, pairs: list[tuple[str, str | None]] | None) -> str | None:
    if not pairs:
        return None
    for name, value in pairs:
        if value is None:
            rule = f"label {name!r} has no value"
            raise InvalidFact(f"row {row}, labels: {rule}", row=row, field="labels", rule=rule)
    return orjson.dumps(dict(pairs), option=orjson.OPT_SORT_KEYS).decode()


def struct_to_artifact(structs: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Make canonical JSON texts of artifact references, and give the column of their digests."""
    if structs.null_count == len(structs):
        return pa.nulls(len(structs), _STRING), pa.nulls(len(structs), _STRING)
    rows: list[dict[str, Any] | None] = structs.to_pylist()
    texts = [None if row is None else _artifact_text(row) for row in rows]
    digests = [None if row is None else row["digest"] for row in rows]
    return pa.array(texts, type=_STRING), pa.array(digests, type=_STRING)


def _artifact_text(reference: dict[str, Any]) -> str:
    given = {name: value for name, value in reference.items() if value is not None}
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode()
