"""Key segments: the keys and digests of entries whose bytes are gone.

Before a segment is removed its keys are made durable here, so that a repeat is recognised for as long as the key
horizon says, however long ago the bytes were truncated.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import crc32c
import numpy as np
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.rangedigest import RangeDigest
from bsfg.stores.log.atomic import write_whole
from bsfg.stores.log.damage import is_damage, patiently
from bsfg.stores.log.files import Files
from bsfg.stores.log.frame import MAX_OFFSET, Damaged, Torn
from bsfg.stores.log.segments import Hole, SegmentFile

_MAGIC = b"BSFGKEY1"
KEY_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("from_zone", pa.string()),
        pa.field("message_id", pa.string()),
        pa.field("digest", pa.binary(32)),
        pa.field("appended_at_unix_ms", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class KeySegmentName:
    """The range that a key segment covers, as its file name says it."""

    first: int
    last: int

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.first:020d}-{self.last:020d}.keys"


def listed(files: Files, folder: str) -> list[KeySegmentName]:
    """List the key segments of a log, in order; what is not called like one is none."""
    result = []
    for name in files.list(f"{folder}/keys"):
        first, _, last = name.removesuffix(".keys").partition("-")
        if name.isascii() and first.isdigit() and last.isdigit():
            found = KeySegmentName(int(first), int(last))
            if found.file_name == name and found.first <= found.last <= MAX_OFFSET:
                result.append(found)
    return sorted(result, key=lambda item: item.first)


def keys_of(segment: SegmentFile) -> tuple[pa.RecordBatch, str, list[Hole]]:
    """Collect the keys of a segment, the digest over its entries, and the damage, which has neither."""
    parts, digest, frames = [], RangeDigest(), segment.frames
    lacking = list(segment.holes)
    for ref in frames:
        try:
            entries = segment.entries(ref)
        except (Torn, Damaged) as damage:
            lacking.append(Hole(ref.base, ref.end - 1, ref.position, ref.header.frame_bytes, str(damage)))
            continue
        digest.add(entries)
        parts.append(entries.record_batch.select(KEY_SCHEMA.names))
    empty = pa.RecordBatch.from_pylist([], schema=KEY_SCHEMA)
    return pa.concat_batches([empty, *parts]), digest.hexdigest(), lacking


def write(files: Files, folder: str, name: KeySegmentName, keys: pa.RecordBatch) -> None:
    """Make a key segment durable; one that is already there is replaced by the same content."""
    payload = keys.serialize()
    head = _MAGIC + crc32c.crc32c(payload).to_bytes(4, "little") + bytes(4)
    write_whole(files, f"{folder}/keys/{name.file_name}", head + payload.to_pybytes())


def read(files: Files, folder: str, name: KeySegmentName) -> pa.RecordBatch | None:
    """Read a key segment; None when it is missing or damaged."""
    try:
        data = bytes(patiently(lambda: files.read(f"{folder}/keys/{name.file_name}")))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        return None
    if data[:8] != _MAGIC or crc32c.crc32c(data[16:]) != int.from_bytes(data[8:12], "little"):
        return None
    try:
        keys = pa.ipc.read_record_batch(pa.py_buffer(data[16:]), KEY_SCHEMA)
        keys.validate(full=True)
    except MemoryError:
        raise
    except Exception:
        return None
    return keys


class KeySegments:
    """The key segments of one log, read when a candidate points into them."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.names = listed(files, folder)
        self._cache: dict[KeySegmentName, pa.RecordBatch | None] = {}

    def add(self, name: KeySegmentName, keys: pa.RecordBatch) -> None:
        """Write a key segment and know it."""
        write(self._files, self._folder, name, keys)
        self.names = sorted({*self.names, name}, key=lambda item: item.first)

    def drop_before(self, offset: int) -> int:
        """Remove the key segments that lie wholly below an offset; give the first offset still known."""
        gone = [name for name in self.names if name.last < offset]
        for name in gone:
            self._files.remove(f"{self._folder}/keys/{name.file_name}")
            self._cache.pop(name, None)
        if gone:
            self._files.sync_folder(f"{self._folder}/keys")
        self.names = [name for name in self.names if name.last >= offset]
        return self.names[0].first if self.names else offset

    def table(self, name: KeySegmentName) -> pa.RecordBatch | None:
        """Give the keys of one key segment, or None when it is missing or damaged."""
        if name not in self._cache:
            if len(self._cache) >= 8:
                self._cache.pop(next(iter(self._cache)))
            self._cache[name] = read(self._files, self._folder, name)
        return self._cache[name]

    def covering(self, offset: int) -> KeySegmentName | None:
        """Find the key segment that covers an offset."""
        at = bisect_right(self.names, offset, key=lambda item: item.first) - 1
        return self.names[at] if at >= 0 and self.names[at].last >= offset else None

    def rows(self, name: KeySegmentName, offsets: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray] | None:
        """Give the key rows at some offsets, and which of the offsets were found."""
        table = self.table(name)
        if table is None:
            return None
        known = table.column("offset").to_numpy()
        at = np.searchsorted(known, offsets)
        found = at < len(known)
        found[found] = known[at[found]] == offsets[found]
        return table.take(pa.array(at[found])), found


def as_facts(keys: pa.RecordBatch) -> FactBatch:
    """Give key rows the shape of facts, with everything but the key and the digest null."""
    count = keys.num_rows
    arrays = [
        keys.column(field.name) if field.name in keys.schema.names else pa.nulls(count, field.type)
        for field in FactBatch.schema
    ]
    return FactBatch(pa.RecordBatch.from_arrays(arrays, schema=FactBatch.schema), sealed=True)
