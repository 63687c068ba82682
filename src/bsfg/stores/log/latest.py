"""The newest entry of each subject and predicate among those that have left a log, kept in one small file.

It is written anew, durably, before the entries leave. Entries that are in it and still in the log as well, because
the power failed in between, do no harm: whoever reads both takes the higher offset.
"""

from __future__ import annotations

from collections.abc import Mapping

import crc32c
import pyarrow as pa

from bsfg.batch import EntryBatch
from bsfg.latest import Gathering
from bsfg.schema import ENTRY_SCHEMA
from bsfg.stores.log.atomic import write_whole
from bsfg.stores.log.damage import is_damage, patiently, put_aside
from bsfg.stores.log.files import Files
from bsfg.stores.log.frame import Damaged, Torn
from bsfg.stores.log.view import LogView

NAME = "latest.entries"
_MAGIC = b"BSFGLAT1"
_HEAD_BYTES = 16


def read_latest(files: Files, folder: str) -> EntryBatch:
    """Read what was kept, none when nothing was; raises `Damaged`, or `OSError` for what may pass."""
    path = f"{folder}/{NAME}"
    if not files.exists(path):
        return EntryBatch.empty()
    try:
        data = bytes(patiently(lambda: files.read(path)))
    except OSError as error:
        if not is_damage(error):
            raise
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    payload = data[_HEAD_BYTES:]
    if data[:8] != _MAGIC or crc32c.crc32c(payload) != int.from_bytes(data[8:12], "little"):
        raise Damaged(f"{path} fails its checksum")
    try:
        found = pa.ipc.read_record_batch(pa.py_buffer(payload), ENTRY_SCHEMA)
        found.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise Damaged(f"{path} cannot be decoded: {error}") from None
    return EntryBatch(found, sealed=True)


def write_latest(files: Files, folder: str, entries: EntryBatch) -> None:
    """Make these entries durable in the place of those that were kept."""
    payload = entries.record_batch.serialize()
    head = _MAGIC + crc32c.crc32c(payload).to_bytes(4, "little") + bytes(4)
    write_whole(files, f"{folder}/{NAME}", head + payload.to_pybytes())


def keep_latest(
    files: Files, folder: str, view: LogView, before: int, most: int, found: Mapping[int, EntryBatch]
) -> None:
    """Make the newest entries below an offset durable, together with those that were kept before.

    ``found`` gives the newest ones of segments that were read already, by the base of these.
    """
    try:
        known = read_latest(files, folder)
    except Damaged:
        # What cannot be read is kept aside, where the damage can be looked at, and does not keep the rest from staying.
        put_aside(files, f"{folder}/{NAME}")
        known = EntryBatch.empty()
    gathering, changed = Gathering(known, most), False
    for segment in view.segments:
        if segment.base in found:
            gathering.add(found[segment.base])
            changed = True
            continue
        for ref in segment.frames if segment.base < before else ():
            if ref.end <= view.start or ref.base >= before:
                continue
            try:
                entries = segment.entries(ref)
            except (Torn, Damaged):
                continue
            first = max(0, view.start - ref.base)
            gathering.add(entries.slice(first, min(ref.end, before) - ref.base - first))
            changed = True
    if changed:
        write_latest(files, folder, gathering.result())
