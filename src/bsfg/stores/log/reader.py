"""Reading a log from another process, whether its writer is alive, dead or was never here.

Only what is durable is shown. While the machine has not been restarted since the writer last spoke, that is what the
writer's watermark says; after a restart everything whole in the files is durable, because the page cache is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from bsfg.errors import InvalidArgument, NotAFolder, OffsetOutOfRange
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.log.files import DiskFiles, Files, translated
from bsfg.stores.log.frame import Damaged, Torn
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.recovery import boot_id, read_identity, read_watermark
from bsfg.stores.log.segments import (
    SegmentFile,
    check_owner,
    read_segment_header,
    scan_segment,
    segment_bases,
    segment_name,
)
from bsfg.stores.log.storage import listed_logs, log_folder, read_mark
from bsfg.stores.log.view import LogView


@dataclass(frozen=True, slots=True)
class LogFolder:
    """One log of a data folder, opened for reading only."""

    files: Files
    stream: str
    buffer: Buffer

    @property
    def path(self) -> str:
        """Its folder inside the data folder."""
        return log_folder(self.stream, self.buffer)

    def notes(self) -> Notes:
        """Read its notes as they stand."""
        notes = Notes(self.files, self.path)
        notes.read()
        return notes

    def view(self) -> LogView:
        """Look at the log as it stands now."""
        identity = read_identity(self.files, self.path)
        notes = self.notes()
        segments: list[SegmentFile] = []
        for base in segment_bases(self.files, self.path):
            path = f"{self.path}/{segment_name(base)}"
            try:
                header = read_segment_header(self.files, path)
                size = self.files.size(path)
            except (Torn, Damaged, FileNotFoundError):
                continue  # being made, or just truncated
            if identity is not None:
                check_owner(header, identity.log_id, path)
            segments.append(SegmentFile(self.files, path, header, size))
        return LogView(tuple(segments), notes.start, self._end(segments, notes), tuple(notes.gaps), _damage)

    def _end(self, segments: list[SegmentFile], notes: Notes) -> int:
        if not segments:
            return notes.start
        watermark = read_watermark(self.files, self.path)
        active = segments[-1]
        if watermark is not None and watermark[0] == boot_id() and watermark[1] >= active.base:
            active.size_bytes = min(active.size_bytes, watermark[2]) if watermark[2] else active.size_bytes
            return watermark[1]
        scan = scan_segment(bytes(self.files.read(active.path)), active.header, tail_may_be_torn=True)
        active.size_bytes = scan.sound_bytes
        active.know(scan)
        return max(scan.end, active.base)

    def frames(self, start: int | None = None, end: int | None = None, max_facts: int = 10_000) -> Iterator[Frame]:
        """Give everything from ``start`` (default: the first retained entry) up to ``end`` (default: the end)."""
        view = self.view()
        first = view.start if start is None else start
        if first < 0 or (end is not None and end < first):
            raise InvalidArgument(f"cannot read from {first} to {end}")
        if first > view.end:
            raise OffsetOutOfRange(f"offset {first} is beyond the end {view.end}", end=view.end)
        stop = view.end if end is None else min(end, view.end)
        frames = view.frames(first, stop, max_facts)
        while first < stop:
            try:
                frame = next(frames)
            except FileNotFoundError:
                frames = self.view().frames(first, stop, max_facts)
                continue
            except OSError as error:
                raise translated(error, f"reading {self.path}") from None
            yield frame
            first = frame.last + 1


def open_folder(where: str | os.PathLike[str] | Files) -> list[LogFolder]:
    """Open all logs of a data folder for reading only."""
    files: Files = DiskFiles(where) if isinstance(where, str | os.PathLike) else where
    try:
        read_mark(files)
        return [LogFolder(files, stream, buffer) for stream, buffer in listed_logs(files)]
    except NotAFolder as error:
        raise NotAFolder(f"{where}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise translated(error, f"reading {where}") from None


def _damage(first: int, last: int, why: str) -> GapRecord:
    return GapRecord(first, last, GapReason.DAMAGED, 0, why)
