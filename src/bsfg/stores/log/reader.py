"""Reading a log from another process, whether its writer is alive, dead or was never here.

Only what is durable is shown. While the machine has not been restarted since the writer last spoke, that is what the
writer's watermark says; after a restart everything whole in the files is durable, because the page cache is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from bsfg.batch import EntryBatch
from bsfg.errors import InvalidArgument, NotAFolder, OffsetOutOfRange, StorageFailed
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.log.damage import readable
from bsfg.stores.log.files import DiskFiles, Files, translated
from bsfg.stores.log.identity import LogIdentity, header_at, read_identity
from bsfg.stores.log.notes import Notes, boot_id, read_watermark
from bsfg.stores.log.segments import SegmentFile, check_owner, scan_segment, segment_bases, segment_name
from bsfg.stores.log.storage import listed_logs, log_folder, read_mark
from bsfg.stores.log.view import LogView, read_latest
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA
from bsfg.stores.shared.frame import Damaged

_LOOKS = 10


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

    def latest(self) -> EntryBatch:
        """Give the newest entry of each subject and predicate among those that left, where they are kept."""
        try:
            return read_latest(self.files, self.path)
        except Damaged as damage:
            raise StorageFailed(str(damage)) from None
        except OSError as error:
            raise translated(error, f"reading {self.path}") from None

    def view(self) -> LogView:
        """Look at the log as it stands now."""
        return self.look()[0]

    def look(self) -> tuple[LogView, Notes]:
        """Look at the log and its notes as they stand now, whatever the writer does meanwhile.

        The order of the looks makes them one: entries below the watermark are in files that are listed after it was
        read, and a file that is not listed any more was noted as truncated before it went.
        """
        try:
            return self._look()
        except OSError as error:
            raise translated(error, f"reading {self.path}") from None

    def _look(self) -> tuple[LogView, Notes]:
        identity = read_identity(self.files, self.path)
        for _ in range(_LOOKS):
            watermark = self._watermark()
            segments = self._segments(identity)
            notes = self.notes()
            end = self._scanned_end(segments) if watermark is None else watermark
            if end >= notes.start:
                break
        segments = [segment for segment in segments if segment.base <= end]
        for segment in segments:
            segment.until = end
        return LogView(tuple(segments), notes.start, max(end, notes.start), notes.book.own(), unrecorded), notes

    def _watermark(self) -> int | None:
        """Give how far the writer says the log is durable; None when nobody wrote since the machine was started."""
        watermark = read_watermark(self.files, self.path)
        return watermark[1] if watermark is not None and watermark[0] == boot_id() else None

    def _segments(self, identity: LogIdentity | None) -> list[SegmentFile]:
        segments: list[SegmentFile] = []
        schema = STORE_SCHEMA if self.buffer == Buffer.STORE else FORWARD_SCHEMA
        for base in segment_bases(self.files, self.path):
            path = f"{self.path}/{segment_name(base)}"
            try:
                header = header_at(self.files, path, base, schema)
                size = self.files.size(path)
            except FileNotFoundError:
                continue  # just truncated
            if header is None:
                continue  # being made, or of no use at all
            if identity is not None:
                check_owner(header, identity.owner_at(base), path)
            segments.append(SegmentFile(self.files, path, header, size))
        return segments

    def _scanned_end(self, segments: list[SegmentFile]) -> int:
        """Find the end in the files themselves."""
        if not segments:
            return 0
        active = segments[-1]
        scan = scan_segment(readable(self.files, active.path)[0], active.header, tail_may_be_torn=True)
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


def unrecorded(first: int, last: int, why: str, reason: GapReason) -> GapRecord:
    """Say what is wrong with a range to whoever only reads, and records nothing."""
    return GapRecord(first, last, reason, 0, why)
