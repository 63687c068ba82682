"""What recovery hands over to the writer of a log."""

from __future__ import annotations

from dataclasses import dataclass, field

from bsfg.stores.log.indexstore import IndexStore
from bsfg.stores.log.keysegments import KeySegments
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.segments import SegmentFile


@dataclass(slots=True)
class LogState:
    """What recovery found and the writer goes on with."""

    folder: str
    log_id: bytes
    secret: bytes
    segments: list[SegmentFile]
    end: int
    chain: bytes
    newest_unix_ms: int
    notes: Notes
    keys: KeySegments
    index: IndexStore
    problems: list[str] = field(default_factory=list)
