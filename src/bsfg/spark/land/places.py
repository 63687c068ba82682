"""Where landed files lie, and what makes them visible: in plain folders, their being there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from bsfg.errors import LandingDamaged
from bsfg.spark.land.state import STAGING, SWAP, LandedState, PartitionChange, file_range
from bsfg.stores.log.files import DiskFile, DiskFiles, Files

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EPERM, errno.EMLINK})
"""What a file system answers that cannot link files or exchange folders."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk(Files, Protocol):
    """A landing folder; paths are relative to it and use forward slashes."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name. Durable after `sync_folder`."""

    def exchange(self, one: str, other: str) -> None:
        """Let two folders change their names at one instant; `OSError` where the file system cannot do that."""

    def is_folder(self, path: str) -> bool:
        """Tell whether there is a folder of this name."""

    def copy_rights(self, old: str, new: str) -> None:
        """Give a folder the owner, group and rights of another, as far as this process may."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; a missing one is fine."""


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


def replace_files(disk: Disk, change: PartitionChange, swap: str) -> None:
    """Do a change of a partition, or what is left of it; ``swap`` is the folder that it may use."""
    make_durable_folders(disk, [change.partition])
    if not _is_done(disk, change):
        try:
            _exchange(disk, change, swap)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            disk.remove_folder(swap)
            _one_by_one(disk, change)
    disk.sync_folder(change.partition)
    # Keep what somebody else put into the partition while it was being exchanged.
    known = {*disk.list(change.partition), *change.removes}
    strays = [name for name in disk.list(swap) if name not in known]
    for name in strays:
        disk.rename(f"{swap}/{name}", f"{change.partition}/{name}")
    if strays:
        disk.sync_folder(change.partition)
    for add in change.adds:
        disk.remove(add.staged)
    disk.remove_folder(swap)


def make_durable_folders(disk: Disk, paths: Sequence[str]) -> None:
    """Make folders that are sure to stay, before anything is moved into them."""
    above: set[str] = set()
    for path in paths:
        disk.make_folder(path)
        while path:
            path = _parent(path)
            above.add(path)
    for path in sorted(above):
        disk.sync_folder(path)


def _is_done(disk: Disk, change: PartitionChange) -> bool:
    names = set(disk.list(change.partition))
    return names >= {add.name for add in change.adds} and not names & set(change.removes)


def _exchange(disk: Disk, change: PartitionChange, swap: str) -> None:
    names = disk.list(change.partition)
    if any(disk.is_folder(f"{change.partition}/{name}") for name in names):
        raise OSError(errno.ENOTSUP, "a partition that holds folders is not exchanged")
    disk.remove_folder(swap)
    disk.make_folder(swap)
    coming = {add.name: _source(disk, change, add.staged, add.name) for add in change.adds}
    staying = {name: f"{change.partition}/{name}" for name in names if name not in change.removes}
    for name, source in {**staying, **coming}.items():
        disk.link(source, f"{swap}/{name}")
    disk.copy_rights(change.partition, swap)
    disk.sync_folder(swap)
    disk.exchange(swap, change.partition)
    for folder in (_parent(change.partition), SWAP):
        disk.sync_folder(folder)


def _one_by_one(disk: Disk, change: PartitionChange) -> None:
    for add in change.adds:
        source = _source(disk, change, add.staged, add.name)
        if source == add.staged:
            disk.rename(source, f"{change.partition}/{add.name}")
    # The old files must not go before the new ones are sure to stay.
    disk.sync_folder(change.partition)
    for name in change.removes:
        disk.remove(f"{change.partition}/{name}")


def _source(disk: Disk, change: PartitionChange, staged: str, name: str) -> str:
    """Find a file that comes: it is staged, or in its place already."""
    for path in (staged, f"{change.partition}/{name}"):
        if disk.exists(path):
            return path
    raise LandingDamaged(f"{change.partition}/{name} was committed and is neither there nor staged")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def move_into_place(disk: Disk, changes: Sequence[PartitionChange]) -> None:
    """Move staged files to their places, unless that is done, so that they are sure to stay there."""
    make_durable_folders(disk, [change.partition for change in changes])
    for change in changes:
        for add in change.adds:
            path = f"{change.partition}/{add.name}"
            if disk.exists(add.staged):
                disk.rename(add.staged, path)
            elif not disk.exists(path):
                raise LandingDamaged(f"{path} was committed and is neither there nor in {STAGING}")
        # The names may have been there already and not be durable yet, so this is needed whatever was done.
        disk.sync_folder(change.partition)


class ParquetPlaces:
    """Plain Parquet files: a file is visible when it is in the folder of its partition."""

    def __init__(self, disk: Disk, partition_by: Sequence[str]) -> None:
        self._disk, self._partition_by = disk, partition_by

    def partitions(self) -> Iterator[str]:
        """Give the folders of all partitions of facts."""
        return _below(self._disk, "", self._partition_by)

    def names(self, partition: str) -> Sequence[str]:
        """Give the files of ours that are in the folder of a partition."""
        return [name for name in self._disk.list(partition) if file_range(name) is not None]

    def check(self, state: LandedState) -> None:
        """Do nothing: the state is all that tells how far a landing is."""

    def publish(self, state: LandedState) -> None:
        """Move what comes to its place, and let it change places with what it replaces."""
        assert state.pending is not None
        move_into_place(self._disk, [change for change in state.pending.changes if not change.removes])
        for number, change in enumerate(state.pending.changes):
            if change.removes:
                replace_files(self._disk, change, f"{SWAP}/{state.sequence}-{number}")

    def vacuum(self, hours: float) -> int:
        """Do nothing: what is replaced is gone at once."""
        return 0


def _below(disk: Disk, folder: str, columns: Sequence[str]) -> Iterator[str]:
    for name in disk.list(folder):
        if name.startswith(f"{columns[0]}=") and name != f"{columns[0]}=":
            path = f"{folder}/{name}" if folder else name
            if len(columns) == 1:
                yield path
            else:
                yield from _below(disk, path, columns[1:])
