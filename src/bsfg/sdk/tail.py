"""Following one log of a data folder from outside: everything durable since the last look, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.log.files import translated
from bsfg.stores.log.frame import FRAME_HEADER_BYTES, Damaged, Torn, decode_frame_header
from bsfg.stores.log.reader import LogFolder
from bsfg.stores.log.segments import SegmentFile, read_segment_header, segment_bases, segment_name
from bsfg.stores.log.view import LogView
from bsfg.stores.log.watermark import boot_id, read_watermark

STEP_FACTS = 10_000


class Tail:
    """A reader's place in a log.

    Looking at a whole log costs time that grows with it, so the segment that is being written is remembered and only
    hopped along. Whatever is out of the ordinary there (a hole, damage, a file that left) is left to the full look.
    """

    def __init__(self, log: LogFolder, position: int | None = None) -> None:
        self.log = log
        self.position = position
        self._segment: SegmentFile | None = None
        self._stamp: object = None

    def frames(self) -> Iterator[Frame]:
        """Give everything that became durable since the last time; from the first retained entry at the beginning."""
        try:
            end = self._durable_end()
            if end is None:
                return
            if self._segment is not None and self.position is not None:
                yield from self._hop(end)
            if self.position is None or self.position < end:
                yield from self._look()
        except OSError as error:
            raise translated(error, f"reading {self.log.path}") from None

    def _durable_end(self) -> int | None:
        """Give how far the log is durable, None when nothing can have changed since the last look."""
        files, path = self.log.files, self.log.path
        watermark = read_watermark(files, path)
        if watermark is not None and watermark[0] == boot_id():
            return None if watermark[1] == self.position else watermark[1]
        # Nobody wrote since the machine was started: the files themselves say where the log ends.
        names = segment_bases(files, path)
        stamp = (names, files.size(f"{path}/{segment_name(names[-1])}") if names else 0)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return self.log.view().end

    def _look(self) -> Iterator[Frame]:
        """Read through the full view of the log, and remember its last segment."""
        view = self.log.view()
        if self.position is not None and self.position > view.end:
            # The log was replaced by an older copy; what was read is not there any more.
            self.position = view.end
        first = view.start if self.position is None else self.position
        for frame in self.log.frames(first, view.end, STEP_FACTS):
            yield frame
            self.position = frame.last + 1
        self.position = max(first, view.end) if self.position is None else self.position
        self._segment = None
        last = view.segments[-1] if view.segments else None
        if last is not None and self.position == view.end and (not last.frames or last.frames[-1].end == view.end):
            self._segment = last
            last.size_bytes = last.frames[-1].position + last.frames[-1].header.frame_bytes if last.frames else 0
            last.size_bytes = last.size_bytes or last.header.size_bytes

    def _hop(self, end: int) -> Iterator[Frame]:
        """Find the new frames of the remembered segment, and those of the segments that followed it."""
        while self.position is not None and self.position < end:
            assert self._segment is not None
            if not self._extend(self._segment, end) and not self._followed(end):
                self._segment = None
                return
            view = LogView((self._segment,), self._segment.base, end, (), _damage)
            stop = min(end, self._segment.frames[-1].end) if self._segment.frames else self.position
            try:
                for frame in view.frames(self.position, stop, STEP_FACTS):
                    if frame.entries is None:
                        self._segment = None
                        return
                    yield frame
                    self.position = frame.last + 1
            except FileNotFoundError:
                self._segment = None
                return

    def _extend(self, segment: SegmentFile, end: int) -> bool:
        """Take note of the frames that were added to a segment; tell whether there are any."""
        found = False
        while self.position is not None:
            expected = segment.frames[-1].end if segment.frames else segment.base
            if expected >= end:
                break
            try:
                data = segment.files.read_at(segment.path, segment.size_bytes, FRAME_HEADER_BYTES)
                header = decode_frame_header(data)
            except (Torn, Damaged, FileNotFoundError):
                break
            if header.base != expected or header.end > end or header.log_id != segment.header.log_id:
                break
            segment.frames.append(segment.size_bytes, data)
            segment.size_bytes += header.frame_bytes
            found = True
        return found

    def _followed(self, end: int) -> bool:
        """Go on to the segment that begins where this one ends; tell whether there is one with frames."""
        path = f"{self.log.path}/{segment_name(self.position or 0)}"
        try:
            header = read_segment_header(self.log.files, path)
        except (Torn, Damaged, FileNotFoundError):
            return False
        segment = SegmentFile(self.log.files, path, header, header.size_bytes)
        segment.know_empty()
        if not self._extend(segment, end):
            return False
        self._segment = segment
        return True


def _damage(first: int, last: int, why: str, reason: GapReason) -> GapRecord:
    return GapRecord(first, last, reason, 0, why)
