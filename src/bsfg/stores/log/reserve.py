"""Room to recover: a file that takes space for nothing, so that a full disk can be left again.

Everything by which a storage empties itself needs some room first: opening rewrites journals, a confirmation is a
record, a truncation keeps keys before it removes facts. So a file of a configured size, with all its blocks taken, lies
beside the data. When such work finds the disk full the file is removed, and the space is for that work alone: new facts
are refused until so much has left that the file can be made again, with something over. A new fact that finds the disk
full does not spend the reserve, which another program could take for itself; it only begins the refusing.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from bsfg.errors import DiskFull
from bsfg.ports import Clock
from bsfg.stores.log.damage import put_aside
from bsfg.stores.log.files import Files, SyncFailed

RESERVE = "reserve"
LOOK_EVERY_MS = 1_000
LEAST_ROOM_BYTES = 64 << 10

Answer = TypeVar("Answer")


class Reserve:
    """The reserve of one data folder; none when its size is 0. It is used by the threads of all logs."""

    def __init__(self, files: Files, size_bytes: int, clock: Clock) -> None:
        self._files, self.size_bytes, self._clock = files, size_bytes, clock
        self._held = self._full = False
        self._looked_ms: int | None = None
        self._lock = threading.Lock()

    @property
    def short(self) -> bool:
        """Whether the disk was full, and has not enough room again: nothing new is taken, what is confirmed may go."""
        return self._full or (self.size_bytes > 0 and not self._held)

    @property
    def spent(self) -> bool:
        """Whether the space of the reserve is in use."""
        return self.size_bytes > 0 and not self._held

    def open(self) -> None:
        """Make the reserve, or find it; on a disk that is too full for it, it counts as spent."""
        with self._lock:
            if self.size_bytes and not self._take(self.size_bytes):
                self._drop()

    def found_full(self) -> None:
        """Take note that a new fact found no room."""
        self._full = self.size_bytes > 0

    def spend(self) -> None:
        """Give the space to whoever empties this disk."""
        with self._lock:
            self._drop()

    def restore(self, *, at_once: bool = False) -> bool:
        """See whether there is room again for the reserve and a quarter more, and take it; tell whether there is.

        Without the quarter a disk would be found full again at once. Unless something has just left, it is tried once
        in a second at most.
        """
        if not self.short:
            return True
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if not at_once and self._looked_ms is not None and now_ms - self._looked_ms < LOOK_EVERY_MS:
                return not self.short
            self._looked_ms, held = now_ms, self._held
            self._full = not self._take(self.size_bytes + max(self.size_bytes // 4, LEAST_ROOM_BYTES))
            if held or not self._full:
                self._take(self.size_bytes)
            else:
                self._drop()
            return not self.short

    def has_room(self) -> bool:
        """Tell whether a quarter of the reserve is free beside it, so that something may be written nobody needs."""
        if self.short or not self.size_bytes:
            return not self.short
        with self._lock:
            found = self._take(self.size_bytes + max(self.size_bytes // 4, LEAST_ROOM_BYTES))
            self._take(self.size_bytes)
            return found

    def with_room(self, work: Callable[[], Answer]) -> Answer:
        """Do something that must be possible on a full disk, a second time with the reserve; it must be repeatable."""
        try:
            return work()
        except (DiskFull, OSError) as error:
            if not self.size_bytes or not is_full(error):
                raise
        self.spend()
        return work()

    def _take(self, size_bytes: int) -> bool:
        try:
            try:
                self._files.allocate(RESERVE, size_bytes)
            except IsADirectoryError:
                put_aside(self._files, RESERVE)
                self._files.allocate(RESERVE, size_bytes)
        except OSError:
            return False
        self._held = True
        return True

    def _drop(self) -> None:
        with contextlib.suppress(OSError):
            self._files.remove(RESERVE)
            self._held = False


def is_full(error: BaseException) -> bool:
    """Tell whether an error says that there is no room, other than one of a sync, after which nobody knows anything."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, SyncFailed)
    return isinstance(error, DiskFull)
