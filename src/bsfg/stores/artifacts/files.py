"""The file layer of the artifact folder: the only way it touches a disk, so that tests can break it.

Paths are relative to the folder and use forward slashes. What is written is durable after a sync of the file, and
names (new, renamed, removed) after a sync of their folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from bsfg import disk
from bsfg.artifacts import Bytes
from bsfg.disk import SPARES, DiskTree, FolderTree, SyncFailed, is_folder, make_folder, sync_folder
from bsfg.errors import BsfgError


class WriteFile(Protocol):
    """A new file that is being written."""

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write the parts one after the other at the end of the file."""

    def sync(self) -> None:
        """Return when everything written so far will survive a power loss."""

    def close(self) -> None:
        """Release the file; a second time is harmless."""


class ReadFile(Protocol):
    """A file that is being read; it stays readable when it is removed or replaced meanwhile."""

    def read(self, count: int) -> bytes:
        """Give the next bytes, at most ``count``, none at the end."""

    def close(self) -> None:
        """Release the file; a second time is harmless."""


class ArtifactFiles(FolderTree, Protocol):
    """A folder tree of files that are written once, read as streams, and carry a time."""

    def prepare(self) -> None:
        """Make the folder itself durably, with its parents."""

    def create(self, path: str) -> WriteFile:
        """Make a new, empty file; an existing one is an error (`FileExistsError`)."""

    def open_read(self, path: str) -> ReadFile:
        """Open a file for reading."""

    def size(self, path: str) -> int:
        """Give the size of a file."""

    def touched_unix_ms(self, path: str) -> int:
        """Give the time that `touch` set last."""

    def touch(self, path: str, unix_ms: int) -> None:
        """Set the time of a file; a missing file is fine. Durable only with the file's next sync."""


def translated(error: OSError, doing: str) -> BsfgError:
    """Turn an operating-system error into one of ours, with hints that name artifacts."""
    found = disk.translated(error, doing)
    return type(found)(found.message, hint=_HINTS.get(found.code), **found.details)


_HINTS = {
    "disk_full": "Free space on the volume or lower capacity in [artifacts].",
    "storage_read_only": "Make the folder of artifacts writable for this user.",
    "storage_failed": "Check the disk (dmesg, smartctl), then open the folder again.",
    "outcome_unknown": "Look at the disk (dmesg, smartctl), then repeat the call.",
}


@contextmanager
def translating(doing: str) -> Iterator[None]:
    """Turn operating-system errors inside into ours."""
    try:
        yield
    except OSError as error:
        raise translated(error, doing) from error


class DiskWriteFile:
    """A real file opened for writing."""

    def __init__(self, path: Path) -> None:
        self._fd = SPARES.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write all parts, however many calls that takes."""
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Sync contents and attributes to the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror) from error

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            SPARES.close(fd)


@contextmanager
def _something_else(path: Path) -> Iterator[None]:
    """Let anything that stands in the place of a file or folder, and is neither, be no folder."""
    try:
        yield
    except OSError as error:
        if not is_folder(error):
            raise
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


class DiskReadFile:
    """A real file opened for reading."""

    def __init__(self, path: Path) -> None:
        with _something_else(path):
            self._fd = SPARES.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

    def read(self, count: int) -> bytes:
        """Give the next bytes."""
        return os.read(self._fd, count)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            SPARES.close(fd)


class ArtifactDiskFiles(DiskTree):
    """A folder of the local file system, as the artifact store uses it."""

    def prepare(self) -> None:
        """Make the folder and sync the parents of everything that was made."""
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        make_folder(self.root)
        for folder in reversed(missing):
            sync_folder(folder.parent)

    def create(self, path: str) -> DiskWriteFile:
        """Make a new, empty file."""
        return DiskWriteFile(self.root / path)

    def open_read(self, path: str) -> DiskReadFile:
        """Open a file for reading."""
        return DiskReadFile(self.root / path)

    def size(self, path: str) -> int:
        """Give the size of a file."""
        with _something_else(self.root / path):
            found = (self.root / path).stat()
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return found.st_size

    def list(self, path: str) -> list[str]:
        """List the names in a folder."""
        with _something_else(self.root / path):
            return super().list(path)

    def touched_unix_ms(self, path: str) -> int:
        """Give the file's time of modification."""
        return (self.root / path).stat().st_mtime_ns // 1_000_000

    def touch(self, path: str, unix_ms: int) -> None:
        """Set the file's time of modification."""
        try:
            os.utime(self.root / path, ns=(unix_ms * 1_000_000, unix_ms * 1_000_000))
        except FileNotFoundError:
            return
