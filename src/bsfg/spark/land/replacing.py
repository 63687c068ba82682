"""Replaces files of a partition by others with the same facts, at one instant where the file system can.

A second folder is made that holds the partition as it will be, and the two change places: readers that list the
partition find all old files or all new ones. Where folders cannot be exchanged, the new files come first and the old
ones go afterwards; a reader may then see facts twice for a moment, and never misses any.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from bsfg.errors import LandingDamaged
from bsfg.spark.land.disk import UNSUPPORTED, Disk
from bsfg.spark.land.layout import SWAP
from bsfg.spark.land.state import Change


def replace_files(disk: Disk, change: Change, swap: str) -> None:
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
    _rescue(disk, change, swap)
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


def _is_done(disk: Disk, change: Change) -> bool:
    names = set(disk.list(change.partition))
    return names >= {add.name for add in change.adds} and not names & set(change.removes)


def _exchange(disk: Disk, change: Change, swap: str) -> None:
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


def _one_by_one(disk: Disk, change: Change) -> None:
    for add in change.adds:
        source = _source(disk, change, add.staged, add.name)
        if source == add.staged:
            disk.rename(source, f"{change.partition}/{add.name}")
    # The old files must not go before the new ones are sure to stay.
    disk.sync_folder(change.partition)
    for name in change.removes:
        disk.remove(f"{change.partition}/{name}")


def _source(disk: Disk, change: Change, staged: str, name: str) -> str:
    """Find a file that comes: it is staged, or in its place already."""
    for path in (staged, f"{change.partition}/{name}"):
        if disk.exists(path):
            return path
    raise LandingDamaged(f"{change.partition}/{name} was committed and is neither there nor staged")


def _rescue(disk: Disk, change: Change, swap: str) -> None:
    """Keep what somebody else put into the partition while it was being exchanged."""
    known = {*disk.list(change.partition), *change.removes}
    strays = [name for name in disk.list(swap) if name not in known]
    for name in strays:
        disk.rename(f"{swap}/{name}", f"{change.partition}/{name}")
    if strays:
        disk.sync_folder(change.partition)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
