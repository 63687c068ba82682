"""Where facts of a forward buffer come from: four columns beside those of the facts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from bsfg.arrays import int64_array, nulls
from bsfg.batch import FactBatch
from bsfg.ports import OriginSpan
from bsfg.rowipc import FACT_MESSAGES, STORED_MESSAGES
from bsfg.schema import FACT_SCHEMA, STORED_SCHEMA


def message_with_origins(
    facts: FactBatch, fresh: np.ndarray, spans: Sequence[OriginSpan | None], lengths: Sequence[int]
) -> bytes | pa.Buffer:
    """Write facts with their origins as one message; see `with_origins`."""
    span = spans[0]
    if facts.is_by_hand and len(spans) == 1 and span is not None:
        ages = [None] * len(fresh) if span.ages_ms is None else span.ages_ms[fresh].tolist()
        times = span.appended_at_unix_ms[fresh].tolist()
        columns = ([span.zone] * len(fresh), span.offsets[fresh].tolist(), times, ages)
        return STORED_MESSAGES.spliced(bytes(facts.to_message()), FACT_MESSAGES, len(FACT_SCHEMA), columns)
    return with_origins(facts.record_batch, fresh, spans, lengths).serialize()


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
