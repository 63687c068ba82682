"""A removal in steps: short turns of the writer and, between them, reading beside it.

Everything that takes long, reading a segment and making its keys durable, is done while others append. A turn of the
writer is then a few renames, a note and the removal of the files, however many facts leave. After each turn the log is
whole: a crash between two of them leaves a removal that went less far.
"""

from __future__ import annotations

from collections.abc import Callable

from bsfg.retention import Removal
from bsfg.stores.log.keysegments import Departure
from bsfg.stores.log.segments import SegmentFile
from bsfg.stores.log.writer import LogWriter


class Removing:
    """One removal that is under way; ``decide`` is asked in every turn, because consumers come and go between them."""

    def __init__(self, writer: LogWriter, decide: Callable[[], Removal]) -> None:
        self._writer, self._decide = writer, decide
        self._wanted: list[tuple[SegmentFile, SegmentFile]] = []
        self._ready: list[Departure] = []
        self._failed: tuple[SegmentFile, OSError] | None = None

    def turn(self) -> bool:
        """Let go what was gathered and may still go; tell whether there is more to gather. Runs as the writer."""
        ready, self._ready = self._ready, []
        failed, self._failed = self._failed, None
        try:
            # What can no longer be read because somebody else removed it needs no reading.
            if failed is not None and failed[0] in self._writer.segments:
                raise failed[1]
            removal = self._decide()
            self._writer.seal_for(removal)
            self._writer.depart(removal, ready)
        except BaseException:
            self._writer.forgo(ready)
            raise
        self._wanted = self._writer.next_to_leave(removal)
        return bool(self._wanted)

    def gather(self) -> None:
        """Read what the next turn needs; an error is kept for it."""
        for segment, following in self._wanted:
            try:
                self._ready.append(self._writer.gather(segment, following))
            except OSError as error:
                self._failed = segment, error
                return
