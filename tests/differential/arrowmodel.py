"""Arrow itself: what it reads from a stream and finds sound, and how a header is made to lie."""

import struct
from random import Random

import pyarrow as pa
from tests.differential import campaign

from bsfg.rows import Row

REFUSED = (pa.ArrowException, OSError, MemoryError, OverflowError, ValueError)
HEAD_BYTES = 1_600
"""About how far the schema of a stream, or the header of a batch, reaches."""


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Make rows of columns that are sound by Arrow's own full check."""
    batch.validate(full=True)
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def rows_in(data: bytes, schema: pa.Schema) -> list[Row] | None:
    """Read a stream with Arrow alone, everything checked; None when Arrow refuses it or it holds another schema."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            if reader.schema.names != schema.names or reader.schema.types != schema.types:
                return None
            return [row for batch in reader for row in rows_of(batch)]
    except REFUSED:
        return None


def lying(random: Random, data: bytes, start: int = 0, end: int = 3 * HEAD_BYTES) -> bytes:
    """Make one or two numbers of a stream's headers lie."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2))):
        at = start + 8 * random.randrange(max(1, (min(len(data), end) - start) // 8 - 1))
        [word] = struct.unpack_from("<q", changed, at)
        step = random.choice((-64, -8, -1, -1, 1, 8, 64, 1 << 31, 1 << 40))
        struct.pack_into("<Q", changed, at, (word + step) % (1 << 64))
    return bytes(changed)


def damaged(random: Random, data: bytes) -> bytes:
    """Damage a stream anywhere, or make one of the numbers of its headers lie."""
    if random.random() < 0.5:
        return campaign.mutated(random, data, range(0, min(len(data), 2 * HEAD_BYTES), 8))
    return lying(random, data)
