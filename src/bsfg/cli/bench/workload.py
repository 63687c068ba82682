"""The facts of the benchmarks: unique, with canonical JSON objects of one size, made by the thousand without a loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.columns import FACT_SCHEMA
from bsfg.fact import JSON_MEDIA_TYPE

BATCH_FACTS = 2_000
OBJECT_BYTES, OBJECT_BYTES_MIN = 200, 64
FROM_ZONE, TO_ZONE = "plant-a", "enterprise"
PRODUCED_AT_UNIX_MS = 1_760_000_000_000

# Each capital letter stands for a digit: N and S of the fact's number, V of its value, P of the press it came from.
_OBJECT = (
    b'{"alarm":false,"batch":"b-NNNNNNNNNN","equipment":"press-PPP","limits":{"high":180.5,"low":12.25},'
    b'"quality":"good","sensor":"main-hydraulics","sequence":1SSSSSSSSSSSSSSS,"unit":"bar","value":1VV.VVVV}'
)
_PLAIN_OBJECT = b'{"sequence":1SSSSSSSSSSSSSSS,"text":"","value":1VV.VVVV}'
_SUBJECT = b"urn:plant-a:line-7:press-PPP"
_DIGITS = np.array([list(b"%04d" % number) for number in range(10_000)], dtype=np.uint8)
_MESSAGE_ID = b"press-line-7-NNNNNNNNNNNNNNN"


def batch_of(first: int, count: int = BATCH_FACTS, object_bytes: int = OBJECT_BYTES) -> FactBatch:
    """Make the facts numbered ``first`` and following as one unsealed batch; equal numbers give equal facts."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    columns = {
        "message_id": _filled(_MESSAGE_ID, numbers).cast(pa.string()),
        "from_zone": _same(FROM_ZONE, count),
        "to_zone": _same(TO_ZONE, count),
        "produced_at_unix_ms": pa.array(PRODUCED_AT_UNIX_MS + numbers % 1_000_000_000),
        "object_media_type": _same(JSON_MEDIA_TYPE, count),
        "subject": _filled(_SUBJECT, numbers).cast(pa.string()),
        "predicate": _same("measured", count),
        "object": _filled(_object(object_bytes), numbers),
    }
    arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in FACT_SCHEMA]
    return FactBatch(pa.RecordBatch.from_arrays(arrays, schema=FACT_SCHEMA))


def batches_of(first: int, count: int, object_bytes: int = OBJECT_BYTES) -> Iterator[FactBatch]:
    """Make batches of `BATCH_FACTS` that hold ``count`` facts in all."""
    for at in range(first, first + count, BATCH_FACTS):
        yield batch_of(at, min(BATCH_FACTS, first + count - at), object_bytes)


@cache
def _object(object_bytes: int) -> bytes:
    """Give the template of an object: the usual one, or for other sizes a plainer one filled up with text."""
    if object_bytes == OBJECT_BYTES:
        return _OBJECT
    filling = b"x" * (object_bytes - len(_PLAIN_OBJECT))
    return _PLAIN_OBJECT.replace(b'"text":"', b'"text":"' + filling)


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _filled(template: bytes, numbers: np.ndarray) -> pa.Array:
    """Repeat a text of fixed width once per number and write the digits into their places."""
    rows = np.empty((len(numbers), len(template)), dtype=np.uint8)
    rows[:] = np.frombuffer(template, dtype=np.uint8)
    # A multiplicative scramble, so that values neither rise with the numbers nor repeat soon.
    scrambled = (numbers * 2_654_435_761) % 4_294_967_291
    for letter, source in ((b"N", numbers), (b"S", numbers), (b"V", scrambled), (b"P", scrambled // 7)):
        places = [at for at in range(len(template)) if template[at : at + 1] == letter]
        for group in range(len(places), 0, -4):
            at = places[max(0, group - 4) : group]
            rows[:, at] = _DIGITS[source % 10_000][:, -len(at) :]
            source = source // 10_000
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * len(template)
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(rows)])
