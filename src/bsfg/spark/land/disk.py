"""The file layer of a landing folder: what the embedded log needs of a disk, and how whole folders change places.

Everything that the driver changes in a landing folder goes through it, so that tests can cut the power at each step.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import Protocol

from bsfg.stores.log.files import DiskFile, DiskFiles, Files

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EPERM, errno.EMLINK})
"""What a file system answers that cannot link files or exchange folders."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk(Files, Protocol):
    """A landing folder; paths are relative to it and use forward slashes."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name. Durable after `sync_folder`."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Let two folders change their names at one instant; `OSError` where the file system cannot do that."""
        ...

    def is_folder(self, path: str) -> bool:
        """Tell whether there is a folder of this name."""
        ...

    def copy_rights(self, old: str, new: str) -> None:
        """Give a folder the owner, group and rights of another, as far as this process may."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; a missing one is fine."""
        ...


class LocalDisk(DiskFiles):
    """A landing folder of the local file system, or of one that is mounted."""

    def __str__(self) -> str:
        return str(self.root)

    def create(self, path: str) -> DiskFile:
        """Make a new, empty file that everybody may read whom the user's mask allows to."""
        return DiskFile(os.open(self.root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        os.link(self.root / old, self.root / new)

    def exchange(self, one: str, other: str) -> None:
        """Let two folders change their names, which Linux does at one instant."""
        exchange(self.root / one, self.root / other)

    def is_folder(self, path: str) -> bool:
        """Tell whether there is a folder of this name."""
        return (self.root / path).is_dir()

    def copy_rights(self, old: str, new: str) -> None:
        """Give a folder the owner, group and rights of another."""
        shutil.copystat(self.root / old, self.root / new)
        state = (self.root / old).stat()
        try:
            os.chown(self.root / new, state.st_uid, state.st_gid)
        except PermissionError:
            return

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it."""
        if (self.root / path).is_dir():
            shutil.rmtree(self.root / path)


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system change their names at one instant."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "this system cannot exchange two folders", str(one))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))
