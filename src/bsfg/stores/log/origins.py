"""Where facts of a forward buffer come from: four columns beside those of the facts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

from bsfg.arrays import int64_array, nulls
from bsfg.ports import OriginSpan
from bsfg.rows import Row
from bsfg.schema import STORED_SCHEMA


def origins_of(fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]) -> list[Row]:
    """Give the origins of a few facts, one by one; see `with_origins`."""
    result: list[Row] = []
    ends = list(accumulate(lengths))
    for row in fresh.tolist():
        at = bisect_right(ends, row)
        result.append(_origin(spans[at], row - ends[at] + lengths[at]))
    return result


def _origin(span: OriginSpan | None, at: int) -> Row:
    if span is None:
        return (None, None, None, None)
    age = None if span.ages_ms is None else int(span.ages_ms[at])
    return span.zone, int(span.offsets[at]), int(span.appended_at_unix_ms[at]), age


def with_origins(
    facts: pa.RecordBatch, fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]
) -> pa.RecordBatch:
    """Put origins to facts: each span is that of so many rows, of which only the fresh ones are among the facts."""
    span = spans[0]
    if len(spans) == 1 and span is not None:
        zone = pa.repeat(pa.scalar(span.zone, pa.string()), len(fresh))
        ages = nulls(len(fresh), pa.int64()) if span.ages_ms is None else int64_array(span.ages_ms[fresh])
        columns = [zone, int64_array(span.offsets[fresh]), int64_array(span.appended_at_unix_ms[fresh]), ages]
    else:
        columns = _of_many(fresh, spans, lengths)
    return pa.RecordBatch.from_arrays([*facts.columns, *columns], schema=STORED_SCHEMA)


def _of_many(fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]) -> list[pa.Array]:
    zones = pa.array([span.zone if span else None for span in spans], type=pa.string())
    zone = zones.take(pa.array(np.repeat(np.arange(len(spans)), lengths)[fresh]))
    pairs = list(zip(spans, lengths, strict=True))
    offsets = np.concatenate([span.offsets if span else np.zeros(n) for span, n in pairs])
    times = np.concatenate([span.appended_at_unix_ms if span else np.zeros(n) for span, n in pairs])
    missing = zone.is_null().to_numpy(zero_copy_only=False)
    ages = np.concatenate([np.zeros(n) if span is None or span.ages_ms is None else span.ages_ms for span, n in pairs])
    ageless = np.repeat([span is None or span.ages_ms is None for span in spans], lengths)[fresh]
    return [
        zone,
        *(pa.array(values[fresh].astype(np.int64), mask=missing) for values in (offsets, times)),
        pa.array(ages[fresh].astype(np.int64), mask=ageless),
    ]
