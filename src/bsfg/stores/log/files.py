"""The file layer: the only way the embedded log touches a disk.

It is small on purpose, so that the conformance kit can replace it with one that forgets what was not synced, tears
writes and fails. Paths are relative to the data folder and use forward slashes.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bsfg.disk import SPARES, SyncFailed, is_refusal, locked, sync_folder, translated

__all__ = [
    "Bytes",
    "DiskFile",
    "DiskFiles",
    "DiskSlot",
    "Files",
    "OpenFile",
    "Slot",
    "SyncFailed",
    "is_refusal",
    "translated",
]

Bytes = bytes | bytearray | memoryview

_SLOTS_OPEN = 32


class OpenFile(Protocol):
    """A file that is being written at its end."""

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write the parts one after the other at the end of the file."""
        ...

    def sync(self) -> None:
        """Return when everything written so far, and the file's size, will survive a power loss, or `SyncFailed`."""
        ...

    def truncate(self, size_bytes: int) -> None:
        """Cut the file; not durable before the next `sync`."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Slot(Protocol):
    """A few bytes in a file that are replaced in place: cheap to store, seen by other processes, never synced."""

    def store(self, data: bytes) -> None:
        """Replace the content."""
        ...

    def close(self) -> None:
        """Release the slot."""
        ...


class Files(Protocol):
    """A folder tree with the durability rules of POSIX: names need a sync of their directory, contents their own."""

    def create(self, path: str) -> OpenFile:
        """Make a new, empty file; an existing one is an error (`FileExistsError`)."""
        ...

    def open_append(self, path: str) -> OpenFile:
        """Open an existing file to write at its end."""
        ...

    def read(self, path: str) -> Bytes:
        """Give the whole content; what cannot be read is an error, never a fault of memory."""
        ...

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Give up to ``count`` bytes from ``start``."""
        ...

    def read_parts(self, path: str, parts: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Give several parts, each named by its start and how many bytes it has at most."""
        ...

    def size(self, path: str) -> int:
        """Give the size of a file."""
        ...

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        ...

    def list(self, path: str) -> list[str]:
        """List the names in a folder, sorted; none when the folder is missing."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder; an existing one is fine. Durable after `sync_folder` of its parent."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any other. Durable after `sync_folder`."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is fine. Durable after `sync_folder`."""
        ...

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder will survive a power loss, or `SyncFailed`."""
        ...

    def slot(self, path: str, size_bytes: int) -> Slot:
        """Open a slot for writing, making it when needed."""
        ...

    def allocate(self, path: str, size_bytes: int) -> None:
        """Bring a file to a size with all its blocks taken, making it when needed; its content means nothing."""
        ...

    def lock(self, path: str) -> Callable[[], None]:
        """Become the one writer; give the function that ends it, or raise `FolderLocked`."""
        ...


class DiskFile:
    """A real file opened for appending."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write all parts, however many calls that takes."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            written = os.writev(self._fd, views[:512])
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def sync(self) -> None:
        """Sync contents and size to the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror) from error

    def truncate(self, size_bytes: int) -> None:
        """Cut the file."""
        os.ftruncate(self._fd, size_bytes)

    def close(self) -> None:
        """Close the descriptor; a second time is harmless."""
        if self._fd >= 0:
            SPARES.close(self._fd)
            self._fd = -1


class Descriptors:
    """The descriptors of files that are written in place: those last used stay open, few for all logs of a folder."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, path: Path, data: bytes) -> None:
        """Write at the beginning of a file, making it when needed."""
        with self._lock:
            fd = self._open.get(path)
            if fd is None:
                fd = self._open[path] = SPARES.open(path, os.O_RDWR | os.O_CREAT)
                if len(self._open) > self._at_most:
                    SPARES.close(self._open.popitem(last=False)[1])
            self._open.move_to_end(path)
            os.pwrite(fd, data, 0)

    def release(self, path: Path) -> None:
        """Close a file, if it is open."""
        with self._lock:
            if (fd := self._open.pop(path, None)) is not None:
                SPARES.close(fd)


class DiskSlot:
    """A small file that is written in place: a full or failing disk is an error, where a map would end the process."""

    def __init__(self, descriptors: Descriptors, path: Path, size_bytes: int) -> None:
        self._descriptors, self._path = descriptors, path
        fd = SPARES.open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, size_bytes)
        finally:
            SPARES.close(fd)

    def store(self, data: bytes) -> None:
        """Replace the content in place."""
        self._descriptors.write(self._path, data)

    def close(self) -> None:
        """Release the file."""
        self._descriptors.release(self._path)


class DiskFiles:
    """A folder of the local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._slots = Descriptors(_SLOTS_OPEN)

    def _at(self, path: str) -> Path:
        return self.root / path

    def create(self, path: str) -> DiskFile:
        """Make a new, empty file."""
        return DiskFile(SPARES.open(self._at(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND))

    def open_append(self, path: str) -> DiskFile:
        """Open an existing file to write at its end."""
        return DiskFile(SPARES.open(self._at(path), os.O_WRONLY | os.O_APPEND))

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

    def exists(self, path: str) -> bool:
        """Tell whether something is there."""
        return self._at(path).exists()

    def list(self, path: str) -> list[str]:
        """List the names in a folder."""
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents."""
        self._at(path).mkdir(parents=True, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a file."""
        self._at(old).replace(self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._at(path).unlink(missing_ok=True)

    def sync_folder(self, path: str) -> None:
        """Sync a directory."""
        sync_folder(self._at(path))

    def slot(self, path: str, size_bytes: int) -> DiskSlot:
        """Open a small file for writing in place."""
        return DiskSlot(self._slots, self._at(path), size_bytes)

    def allocate(self, path: str, size_bytes: int) -> None:
        """Take blocks for a file; one with holes, as a copy may have, gets those that it lacks."""
        fd = SPARES.open(self._at(path), os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            SPARES.close(fd)

    def lock(self, path: str) -> Callable[[], None]:
        """Take an exclusive lock that the kernel gives back when this process ends, however it ends."""
        return locked(self._at(path))


def _read(fd: int, count: int, start: int) -> bytes:
    """Read so many bytes, fewer at the end of the file; one call gives at most 2 GiB."""
    data = os.pread(fd, count, start)
    if not data or len(data) == count:
        return data
    parts = [data]
    while more := os.pread(fd, count - sum(map(len, parts)), start + sum(map(len, parts))):
        parts.append(more)
    return b"".join(parts)
