"""The file layer: the only way the embedded log touches a disk.

It is small on purpose, so that the conformance kit can replace it with one that forgets what was not synced, tears
writes and fails. Paths are relative to the data folder and use forward slashes.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bsfg.disk import (
    IDLE,
    SPARES,
    DiskTree,
    FolderTree,
    SyncFailed,
    give_place,
    is_refusal,
    make_folder,
    move_away,
    translated,
)

__all__ = [
    "Bytes",
    "DiskFile",
    "DiskFiles",
    "DiskSlot",
    "Files",
    "NotBegun",
    "OpenFile",
    "Slot",
    "SyncFailed",
    "is_refusal",
    "translated",
]

Bytes = bytes | bytearray | memoryview

PRIVATE = "audit"
"""The folder that only its owner may read: the audit trail names people and addresses."""

SESSIONS = "node/sessions.json"
"""Who is signed in to the dashboard; for nobody but its owner either."""


class NotBegun(OSError):
    """A file could not be opened again after it was idle: nothing was written, and nothing is to be undone."""


class OpenFile(Protocol):
    """A file that is being written at its end."""

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write the parts one after the other at the end of the file; `NotBegun` says that it is as it was."""

    def sync(self) -> None:
        """Return when everything written so far, and the file's size, will survive a power loss, or `SyncFailed`."""

    def truncate(self, size_bytes: int) -> None:
        """Cut the file; not durable before the next `sync`."""

    def renamed(self, path: str) -> None:
        """Take note that the file has another name now, under which it can be opened again."""

    def close(self) -> None:
        """Release the file."""


class Slot(Protocol):
    """A few bytes in a file that are replaced in place: cheap to store, seen by other processes, never synced."""

    def store(self, data: bytes) -> None:
        """Replace the content."""

    def close(self) -> None:
        """Release the slot."""


class Files(FolderTree, Protocol):
    """A folder tree of files that grow at their end and are read in parts; contents need a sync of their own."""

    def create(self, path: str) -> OpenFile:
        """Make a new, empty file; an existing one is an error (`FileExistsError`)."""

    def open_append(self, path: str) -> OpenFile:
        """Open an existing file to write at its end."""

    def read(self, path: str) -> Bytes:
        """Give the whole content; what cannot be read is an error, never a fault of memory."""

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Give up to ``count`` bytes from ``start``."""

    def read_parts(self, path: str, parts: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Give several parts, each named by its start and how many bytes it has at most."""

    def size(self, path: str) -> int:
        """Give the size of a file."""

    def slot(self, path: str, size_bytes: int) -> Slot:
        """Open a slot for writing, making it when needed."""

    def allocate(self, path: str, size_bytes: int) -> None:
        """Bring a file to a size with all its blocks taken, making it when needed; its content means nothing."""


class DiskFile:
    """A real file opened for appending.

    While something of it is not synced, the file keeps its descriptor: only this one is sure to be told when that
    cannot be written. In between the descriptor is idle, and may be closed in favour of others. The file is then opened
    again, and must be the one that was written, as large as it was. Where no path is given it stays open.
    """

    def __init__(self, fd: int, root: Path | None = None, path: str = "") -> None:
        self._fd, self._root, self._path = fd, root, path
        state = os.fstat(fd)
        self._identity, self._size = (state.st_dev, state.st_ino), state.st_size
        self._unsynced = True
        self._ended: OSError | None = None

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write all parts, however many calls that takes."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        fd = self._descriptor()
        self._unsynced = True
        while views:
            written = os.writev(fd, views[:512])
            self._size += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def sync(self) -> None:
        """Sync contents and size to the disk; where that fails the file takes nothing more."""
        fd = self._descriptor()
        try:
            os.fdatasync(fd)
        except OSError as error:
            failure = SyncFailed(error.errno, error.strerror)
            self._end(failure)
            raise failure from error
        self.rest()

    def truncate(self, size_bytes: int) -> None:
        """Cut the file; what was not even written needs no cutting."""
        if size_bytes == self._size and not self._unsynced:
            return
        fd = self._descriptor()
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            self._end(error)
            raise
        self._size, self._unsynced = size_bytes, True

    def renamed(self, path: str) -> None:
        """Take note of another name."""
        self._path = path

    def close(self) -> None:
        """Close the descriptor; a second time is harmless."""
        self._end(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    def rest(self) -> None:
        """Let others have the descriptor when they are short of one: nothing waits to be synced."""
        self._unsynced = False
        if self._root is not None:
            fd, self._fd = self._fd, -1
            IDLE.keep(self, fd)

    def _descriptor(self) -> int:
        """Give the descriptor, which nobody else closes before the next rest."""
        if self._ended is not None:
            raise self._ended
        if self._fd < 0:
            idle = IDLE.take(self)
            self._fd = self._opened_again() if idle is None else idle
        return self._fd

    def _opened_again(self) -> int:
        assert self._root is not None
        try:
            fd = SPARES.open(self._root / self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise NotBegun(error.errno, error.strerror) from None
        state = os.fstat(fd)
        if ((state.st_dev, state.st_ino), state.st_size) != (self._identity, self._size):
            SPARES.close(fd)
            raise NotBegun(errno.ESTALE, "somebody else has changed or replaced the file")
        return fd

    def _end(self, why: OSError) -> None:
        self._ended = self._ended or why
        fd = self._fd if self._fd >= 0 else IDLE.take(self)
        self._fd = -1
        if fd is not None:
            SPARES.close(fd)


class DiskSlot:
    """A small file that is written in place: a full or failing disk is an error, where a map would end the process."""

    def __init__(self, path: Path, size_bytes: int, mode: int | None = None) -> None:
        self._path, self._mode = path, mode
        fd = SPARES.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            os.ftruncate(fd, size_bytes)
        finally:
            SPARES.close(fd)

    def store(self, data: bytes) -> None:
        """Replace the content in place."""
        fd = IDLE.take(self)
        if fd is None:
            fd = SPARES.open(self._path, os.O_RDWR | os.O_CREAT, self._mode)
        try:
            os.pwrite(fd, data, 0)
        finally:
            IDLE.keep(self, fd)

    def close(self) -> None:
        """Release the file."""
        if (fd := IDLE.take(self)) is not None:
            SPARES.close(fd)


class DiskFiles(DiskTree):
    """A folder of the local file system, as the embedded log uses it."""

    def _at(self, path: str) -> Path:
        return self.root / path

    def _mode(self, path: str) -> int | None:
        return 0o600 if path.startswith((f"{PRIVATE}/", SESSIONS)) else None

    def create(self, path: str) -> DiskFile:
        """Make a new, empty file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        fd = SPARES.open(self._at(path), flags, self._mode(path))
        return DiskFile(fd, self.root, path)

    def open_append(self, path: str) -> DiskFile:
        """Open an existing file to write at its end."""
        file = DiskFile(SPARES.open(self._at(path), os.O_WRONLY | os.O_APPEND), self.root, path)
        file.rest()
        return file

    def read(self, path: str) -> Bytes:
        """Read a whole file; one that grows meanwhile is read up to the size it had."""
        fd = SPARES.open(self._at(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _read(fd, os.fstat(fd).st_size, 0)
        finally:
            SPARES.close(fd)

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Read part of a file."""
        return self.read_parts(path, [(start, count)])[0]

    def read_parts(self, path: str, parts: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Read parts of a file."""
        fd = SPARES.open(self._at(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            return [_read(fd, count, start) for start, count in parts]
        finally:
            SPARES.close(fd)

    def size(self, path: str) -> int:
        """Give the size of a file."""
        return self._at(path).stat().st_size

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents."""
        make_folder(self._at(path), 0o700 if path.partition("/")[0] == PRIVATE else None, durably=not path)

    def slot(self, path: str, size_bytes: int) -> DiskSlot:
        """Open a small file for writing in place."""
        return DiskSlot(self._at(path), size_bytes, self._mode(path))

    def allocate(self, path: str, size_bytes: int) -> None:
        """Take blocks for a file; one with holes, as a copy may have, gets those that it lacks."""
        fd = SPARES.open(self._at(path), os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            SPARES.close(fd)


def _read(fd: int, count: int, start: int) -> bytes:
    """Read so many bytes, fewer at the end of the file; one call gives at most 2 GiB."""
    data = os.pread(fd, count, start)
    if not data or len(data) == count:
        return data
    parts = [data]
    while more := os.pread(fd, count - sum(map(len, parts)), start + sum(map(len, parts))):
        parts.append(more)
    return b"".join(parts)


def write_whole(files: Files, path: str, data: Bytes) -> None:
    """Make a file with this content durable, replacing any other of that name; a folder in its place is moved away."""
    try:
        files.remove(path + ".new")
    except IsADirectoryError:
        move_away(files, path + ".new")
    write_aside(files, path + ".new", data)
    give_place(files, path + ".new", path)
    files.sync_folder(path.rpartition("/")[0])


def write_aside(files: Files, path: str, data: Bytes) -> None:
    """Make the content of a file durable under a name that nobody looks for; a rename puts it in its place."""
    file = files.create(path)
    try:
        file.write([data])
        file.sync()
    finally:
        file.close()
