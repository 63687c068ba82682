"""Making a restored copy of a data folder a history of its own.

What was appended after the copy was made is gone here, but others may have seen it, under offsets that will now be
given to other facts. So every log goes on under a new id: peers notice it at the first answer and hold their links, and
a position of the old history is refused instead of being mistaken. Offsets of the copied part mean the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bsfg.errors import LogDamaged
from bsfg.ports import Buffer
from bsfg.stores.log.atomic import write_whole
from bsfg.stores.log.cursors import CURSORS, cursor_from
from bsfg.stores.log.damage import readable
from bsfg.stores.log.files import Files, translated
from bsfg.stores.log.frame import SegmentHeader, encode_segment_header, genesis
from bsfg.stores.log.identity import LogIdentity, read_identity, write_identity
from bsfg.stores.log.journal import BEGINNING, encode, read_journal
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.segments import scan_segment, segment_name
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA


@dataclass(frozen=True, slots=True)
class RestoredLog:
    """A log that goes on under a new id; ``newest_unix_ms`` is when its last entry became durable."""

    stream: str
    buffer: str
    log_id: str
    was_log_id: str
    start: int
    end: int
    newest_unix_ms: int | None


def begin_new_histories(files: Files, now_unix_ms: int) -> list[RestoredLog]:
    """Give every log of a copy that nobody has opened a new id, and its consumers with it."""
    try:
        restored = [_restore(folder, now_unix_ms) for folder in open_folder(files)]
        _move_cursors(files, {each.was_log_id: each.log_id for each in restored})
    except OSError as error:
        raise translated(error, "restoring the folder") from None
    return restored


def _restore(folder: LogFolder, now_unix_ms: int) -> RestoredLog:
    old = read_identity(folder.files, folder.path)
    if old is None:
        raise LogDamaged(f"{folder.path}/log.json is missing or damaged")
    view = folder.view()
    new = old.restored(view.end, now_unix_ms)
    header = _next_header(folder, new, view.end)
    path = f"{folder.path}/{segment_name(view.end)}"
    write_whole(folder.files, path, encode_segment_header(header))
    write_identity(folder.files, folder.path, new)
    return RestoredLog(
        folder.stream,
        str(folder.buffer),
        new.log_id.hex(),
        old.log_id.hex(),
        view.start,
        view.end,
        header.time_before_unix_ms or None,
    )


def _next_header(folder: LogFolder, identity: LogIdentity, end: int) -> SegmentHeader:
    """Give the header of the first segment of the new history; an empty one of the old is replaced by it."""
    segments = folder.view().segments
    schema = STORE_SCHEMA if folder.buffer == Buffer.STORE else FORWARD_SCHEMA
    if not segments:
        return SegmentHeader(identity.log_id, end, -1, genesis(identity.log_id), 0, schema)
    last = segments[-1]
    if last.base == end:
        return replace(last.header, log_id=identity.log_id)
    scan = scan_segment(readable(folder.files, last.path)[0], last.header, tail_may_be_torn=True)
    newest = max([last.header.time_before_unix_ms, *(ref.header.appended_at_unix_ms for ref in scan.frames[-1:])])
    return SegmentHeader(identity.log_id, end, last.base, scan.chain or last.header.chain_before, newest, schema)


def _move_cursors(files: Files, new_ids: dict[str, str]) -> None:
    """Bind the consumers to the new histories: what they confirmed of the old ones is the same in these."""
    latest = {record.head["name"]: record for record in read_journal(files, CURSORS)[0]}
    cursors = [cursor_from(record) for record in latest.values()]
    moved = [replace(cursor, log_id=new_ids.get(cursor.log_id, cursor.log_id)) for cursor in cursors]
    write_whole(files, CURSORS, b"".join(encode(cursor.record()) for cursor in moved) or BEGINNING)
