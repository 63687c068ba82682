"""A landing folder: commits that happen once, files that change places, and what an interrupted one left undone."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import orjson

from bsfg.errors import FolderLocked, FrameInvalid, InvalidArgument, LandingDamaged
from bsfg.spark.land.state import (
    GAPS,
    LOCK,
    STAGING,
    STATE,
    SWAP,
    WORK,
    Add,
    LandedOrigin,
    LandedState,
    PartitionChange,
    Pending,
    file_name,
)
from bsfg.stores.log.files import DiskFile, DiskFiles, Files, translated, write_whole

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


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that a task wrote: where it lies, its partition, and the facts in it, which lie ``first`` to ``last``."""

    path: str
    partition: str
    first: int
    last: int
    facts: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a commit lands: all facts and gaps from ``first`` to before ``next``."""

    first: int
    next: int
    files: Sequence[Staged] = ()
    gaps: Sequence[dict[str, Any]] = ()
    missing: int = 0
    tail: tuple[int, str] | None = None
    gaps_token: str = ""


class LandingFolder:
    """The one writer of a landing folder. After an error, `recover` finds out what is true."""

    def __init__(self, disk: Disk, release: Callable[[], None]) -> None:
        self.disk, self._release = disk, release
        self._state: LandedState | None = None
        self.run = f"{STAGING}/{uuid.uuid4().hex[:12]}"
        """Where tasks stage their files; another process has another folder."""

    @staticmethod
    def open(disk: Disk) -> LandingFolder:
        """Become the writer of a folder, made if need be, and finish what the one before left undone.

        Raises `FolderLocked` while there is another writer, and `InvalidArgument` for a folder of somebody else.
        """
        _check_ours(disk)
        disk.make_folder(WORK)
        try:
            folder = LandingFolder(disk, disk.lock(LOCK))
        except FolderLocked as error:
            hint = "One folder has one writer: stop the other `bsfg pipeline land`, or land into another folder."
            raise FolderLocked(error.message, hint=hint, **error.details) from None
        try:
            folder.recover()
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever landed here."""
        return self._state is None

    @property
    def state(self) -> LandedState:
        """The folder at its last commit."""
        if self._state is None:
            raise InvalidArgument("nothing was landed in this folder yet")
        return self._state

    def recover(self) -> None:
        """Read the state from the disk, do what it still promises, and remove what belongs to nothing."""
        with _told("opening the landing folder"):
            self._state = None
            if self.disk.exists(STATE):
                state = LandedState.from_json(bytes(self.disk.read(STATE)))
                # A killed process may have left it where a power loss still takes it back, and its files must not stay.
                self.disk.sync_folder(WORK)
                self._finish(state)
            self.disk.remove(f"{STATE}.new")
            self.disk.remove_folder(SWAP)
            self.disk.remove_folder(STAGING)
            self.disk.make_folder(self.run)
            for path in (STAGING, WORK, ""):
                self.disk.sync_folder(path)

    def begin(self, origin: LandedOrigin, start: int) -> None:
        """Write the first state of a new folder: whose facts it will hold, from which offset on."""
        with _told("writing the first state"):
            self._write(LandedState(origin, start, start))

    def commit(self, batch: Batch) -> LandedState:
        """Land a batch; when this returns, its facts are in their places and survive a power loss."""
        state = self.state
        _check_whole(state, batch)
        sequence = state.sequence + 1
        tail_offset, tail_digest = batch.tail or (state.tail_offset, state.tail_digest)
        with _told("landing a batch"):
            pending = Pending(_changes(batch.files, sequence), batch.gaps, self._gaps_bytes())
            new = replace(
                state,
                next=batch.next,
                sequence=sequence,
                facts=state.facts + sum(file.facts for file in batch.files),
                missing=state.missing + batch.missing,
                tail_offset=tail_offset,
                tail_digest=tail_digest,
                gaps_token=batch.gaps_token or state.gaps_token,
                pending=pending if batch.files or batch.gaps else None,
            )
            return self._commit(new)

    def replace(self, partition: str, files: Sequence[Staged], removes: Sequence[str]) -> LandedState:
        """Put files into a partition in place of others that hold the same facts."""
        state = self.state
        sequence = state.sequence + 1
        adds = [Add(file.path, file_name(file.first, file.last, sequence)) for file in files]
        with _told("replacing small files"):
            pending = Pending([PartitionChange(partition, adds, list(removes))])
            return self._commit(replace(state, sequence=sequence, pending=pending))

    def discard_staged(self) -> None:
        """Remove what failed attempts have staged; nothing of a commit is left there."""
        for name in self.disk.list(self.run):
            with suppress(OSError):
                self.disk.remove(f"{self.run}/{name}")

    def close(self) -> None:
        """Let the next writer in."""
        release, self._release = self._release, lambda: None
        with suppress(OSError):
            self.disk.remove_folder(self.run)
        release()

    def _commit(self, new: LandedState) -> LandedState:
        # What is not known to have happened is looked up again: see `recover`.
        self._state = None
        self.disk.sync_folder(self.run)
        self._write(new)
        self._finish(new)
        return self.state

    def _write(self, state: LandedState) -> None:
        write_whole(self.disk, STATE, state.to_json())
        self._state = state

    def _finish(self, state: LandedState) -> None:
        """Do what a state promises, unless that is done, and note that it is."""
        self._state = state
        if state.pending is None:
            return
        self._add([change for change in state.pending.changes if not change.removes])
        for number, change in enumerate(state.pending.changes):
            if change.removes:
                replace_files(self.disk, change, f"{SWAP}/{state.sequence}-{number}")
        self._add_gaps(state.pending)
        self._write(replace(state, pending=None))

    def _add(self, changes: Sequence[PartitionChange]) -> None:
        make_durable_folders(self.disk, [change.partition for change in changes])
        for change in changes:
            for add in change.adds:
                path = f"{change.partition}/{add.name}"
                if self.disk.exists(add.staged):
                    self.disk.rename(add.staged, path)
                elif not self.disk.exists(path):
                    raise LandingDamaged(f"{path} was committed and is neither there nor in {STAGING}")
            # The names may have been there already and not be durable yet, so this is needed whatever was done.
            self.disk.sync_folder(change.partition)

    def _add_gaps(self, pending: Pending) -> None:
        if not pending.gaps:
            return
        exists = self.disk.exists(GAPS)
        file = self.disk.open_append(GAPS) if exists else self.disk.create(GAPS)
        try:
            if exists and self.disk.size(GAPS) > pending.gaps_at_bytes:
                file.truncate(pending.gaps_at_bytes)
            file.write([orjson.dumps(gap, option=orjson.OPT_APPEND_NEWLINE) for gap in pending.gaps])
            file.sync()
        finally:
            file.close()
        self.disk.sync_folder("")

    def _gaps_bytes(self) -> int:
        return self.disk.size(GAPS) if self.disk.exists(GAPS) else 0


class _told:
    """Turns errors of the operating system into ours."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            where = f" {error.filename}" if error.filename else ""
            raise translated(error, f"{self._doing}{where}") from None


def _changes(files: Sequence[Staged], sequence: int) -> list[PartitionChange]:
    found: dict[str, list[Add]] = {}
    for file in files:
        found.setdefault(file.partition, []).append(Add(file.path, file_name(file.first, file.last, sequence)))
    return [PartitionChange(partition, adds) for partition, adds in sorted(found.items())]


def _check_whole(state: LandedState, batch: Batch) -> None:
    """Refuse a batch that does not follow what is landed, or that does not hold all it should."""
    if batch.first != state.next:
        raise FrameInvalid(f"a batch from offset {batch.first} on was staged, {state.next} is to be landed next")
    found = sum(file.facts for file in batch.files)
    if found + batch.missing != batch.next - batch.first:
        raise FrameInvalid(
            f"{found} facts and {batch.missing} missing ones were staged for the offsets {batch.first} to {batch.next}"
        )


def _check_ours(disk: Disk) -> None:
    """Refuse a folder in which somebody else has put files."""
    names = [name for name in disk.list("") if name != WORK]
    if names and not disk.exists(STATE):
        hint = "Give an empty or a new folder; one that is landed in already has _bsfg/state.json."
        raise InvalidArgument(f"{disk} is not empty and was not made by landing: it holds {names[0]}", hint=hint)
