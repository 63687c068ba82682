"""The file layer: the only way the embedded log touches a disk.

It is small on purpose, so that the conformance kit can replace it with one that forgets what was not synced, tears
writes and fails. Paths are relative to the data folder and use forward slashes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bsfg.errors import BsfgError, DiskFull, FolderLocked, StorageFailed, StorageReadOnly

Bytes = bytes | bytearray | memoryview


class OpenFile(Protocol):
    """A file that is being written at its end."""

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write the parts one after the other at the end of the file."""
        ...

    def sync(self) -> None:
        """Return when everything written so far, and the file's size, will survive a power loss."""
        ...

    def truncate(self, size_bytes: int) -> None:
        """Cut the file; not durable before the next `sync`."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Slot(Protocol):
    """A small piece of shared memory in a file: cheap to store, seen by other processes, never synced."""

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
        """Give the whole content, possibly as a memory map that stays valid after the file is removed."""
        ...

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Give up to ``count`` bytes from ``start``."""
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
        """Return when the names in a folder will survive a power loss."""
        ...

    def slot(self, path: str, size_bytes: int) -> Slot:
        """Open a slot for writing, making it when needed."""
        ...

    def lock(self, path: str) -> Callable[[], None]:
        """Become the one writer; give the function that ends it, or raise `FolderLocked`."""
        ...


def translated(error: OSError, doing: str) -> BsfgError:
    """Turn an operating-system error into one of ours; the only place where errno is read."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StorageReadOnly(text)
    return StorageFailed(text, errno=error.errno)


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
        os.fdatasync(self._fd)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file."""
        os.ftruncate(self._fd, size_bytes)

    def close(self) -> None:
        """Close the descriptor; a second time is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskSlot:
    """A memory map of a small file."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            os.ftruncate(fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)

    def store(self, data: bytes) -> None:
        """Replace the content in place."""
        self._map[: len(data)] = data

    def close(self) -> None:
        """Release the map."""
        with contextlib.suppress(BufferError):
            self._map.close()


class DiskFiles:
    """A folder of the local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def _at(self, path: str) -> Path:
        return self.root / path

    def create(self, path: str) -> DiskFile:
        """Make a new, empty file."""
        return DiskFile(os.open(self._at(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640))

    def open_append(self, path: str) -> DiskFile:
        """Open an existing file to write at its end."""
        return DiskFile(os.open(self._at(path), os.O_WRONLY | os.O_APPEND))

    def read(self, path: str) -> Bytes:
        """Map a file into memory."""
        fd = os.open(self._at(path), os.O_RDONLY)
        try:
            if os.fstat(fd).st_size == 0:
                return b""
            return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Read part of a file."""
        fd = os.open(self._at(path), os.O_RDONLY)
        try:
            return os.pread(fd, count, start)
        finally:
            os.close(fd)

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
        fd = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def slot(self, path: str, size_bytes: int) -> DiskSlot:
        """Map a small file for writing."""
        return DiskSlot(self._at(path), size_bytes)

    def lock(self, path: str) -> Callable[[], None]:
        """Take an exclusive lock that the kernel gives back when this process ends, however it ends."""
        fd = os.open(self._at(path), os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise FolderLocked(f"{self.root} is being written by process {holder}", pid=holder) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)

        def release() -> None:
            os.close(fd)

        return release
