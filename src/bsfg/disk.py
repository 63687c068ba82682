"""How every file layer of ours meets the system: what its errors mean, who may write, and descriptors in reserve."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from bsfg.errors import (
    BsfgError,
    DiskFull,
    FolderLocked,
    OutcomeUnknown,
    StorageBusy,
    StorageFailed,
    StorageReadOnly,
    StorageUnreadable,
)


class FolderAccess:
    """Who may look into the folders and files that this process makes for a zone: its own account, or its group too."""

    def __init__(self) -> None:
        self.file_mode, self.folder_mode = 0o600, 0o700

    def let_group_read(self) -> None:
        """Let the group read what is made from now on: readers that have an account of their own."""
        self.file_mode, self.folder_mode = 0o640, 0o750


ACCESS = FolderAccess()


class SyncFailed(OSError):
    """A sync that failed: nobody can know what of it is on the disk, and a second sync would not tell either.

    Whatever its number says: what was to be made durable is closed, and only writing it anew makes it good.
    """


_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
"""What the system says when it lacks something for a moment; the medium is as good as before."""

_NO_PLACE = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""What the system says of a path that leads nowhere; nothing is wrong with the medium either."""


_IN_ITS_PLACE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE)
_DAMAGE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, *_IN_ITS_PLACE)


def is_damage(error: OSError) -> bool:
    """Tell whether an error says that what should be read is not there for good."""
    return error.errno in _DAMAGE


def is_folder(error: OSError) -> bool:
    """Tell whether an error says that something else stands in the place of a file."""
    return error.errno in _IN_ITS_PLACE


def is_refusal(error: BsfgError) -> bool:
    """Tell whether nothing has happened: a call that only found no room or no descriptor may simply be repeated."""
    return isinstance(error, DiskFull | StorageBusy)


def translated(error: OSError, doing: str) -> BsfgError:
    """Turn an operating-system error into one of ours; the only place where errno is read."""
    text = f"{doing}: {error.strerror or error}"
    if isinstance(error, SyncFailed):
        return OutcomeUnknown(f"{text}; nobody can know how much of it is on the disk")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text)
    if error.errno in _SHORT:
        return StorageBusy(text, errno=error.errno)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        # Tell what cannot be read from what cannot be written; the system says the same to both.
        path = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else ""
        why = error.strerror or str(error)
        if path and error.errno != errno.EROFS and _is_closed(Path(path)):
            return StorageUnreadable(f"{path} cannot be read: {why}", path=path)
        return StorageReadOnly(f"{doing}: {why}" if not path or path in doing else f"{doing}: {path}: {why}")
    hint = "Check the path: a folder on the way is none, or a name is too long." if error.errno in _NO_PLACE else None
    return StorageFailed(text, errno=error.errno, hint=hint)


def unreadable(error: OSError | UnicodeDecodeError, what: str) -> StorageUnreadable:
    """Say that a file which somebody named cannot be read, and speak of rights only where they are what is missing."""
    if isinstance(error, OSError):
        hint = None if isinstance(error, PermissionError) else "Check the path."
        return StorageUnreadable(f"{what} cannot be read: {error.strerror}", hint=hint)
    return StorageUnreadable(f"{what} cannot be read: it is no text", hint="Check the path.")


def _is_closed(path: Path) -> bool:
    """Tell whether a path cannot be read, or one of the folders that lead to it."""
    if os.path.lexists(path):
        return not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))
    above = path.parent
    return above != path and (_is_closed(above) if not os.path.lexists(above) else not os.access(above, os.X_OK))


class IdleDescriptors:
    """Descriptors of files that nobody writes just now: those used last stay open, few for all files of a process.

    Whoever wants to write takes the descriptor of his file out, so that nobody closes it meanwhile, and gives it back.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._open: OrderedDict[object, int] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, owner: object) -> int | None:
        """Give an owner its descriptor, None when it was closed meanwhile."""
        with self._lock:
            return self._open.pop(owner, None)

    def keep(self, owner: object, fd: int) -> None:
        """Keep the descriptor of an owner, and close the one that was used least lately when there are too many."""
        with self._lock:
            self._open[owner] = fd
            oldest = self._open.popitem(last=False)[1] if len(self._open) > self._at_most else None
        if oldest is not None:
            SPARES.close(oldest)

    def let_one_go(self) -> bool:
        """Close one for somebody who needs a descriptor more; tell whether there was one."""
        with self._lock:
            if not self._open:
                return False
            os.close(self._open.popitem(last=False)[1])
            return True


def _idle_most() -> int:
    """Give how many descriptors of idle files this process keeps: an eighth of what it may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else min(1024, soft // 8)


IDLE = IdleDescriptors(_idle_most())
"""The descriptors of this process that are open only so that they need not be opened again."""


def clear_away(folder: Path) -> None:
    """Remove a folder with all that is in it, to the end, also when a signal ends this process meanwhile.

    That is done in a thread of its own, which the end of the process waits for: an exception of the signal would
    otherwise break it off in the middle.
    """
    worker = threading.Thread(target=shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, daemon=False)
    worker.start()
    worker.join()


class SpareDescriptors:
    """Descriptors that are held for nothing, so that a writer can go on when the process has no other left.

    A segment that is begun takes one and gives back the one of its predecessor; folders, and files that are only looked
    at, are closed at once. So a few of them carry any number of logs through a shortage. Before the first of them goes
    those that are ``idle`` are closed.
    """

    def __init__(self, count: int, idle: IdleDescriptors | None = None) -> None:
        self._count, self._idle = count, idle
        self._held: list[int] = []
        self._lock = threading.Lock()
        self.short = False

    def hold(self) -> None:
        """Take as many as are missing, as far as there are any."""
        with self._lock:
            self.short = True
            with contextlib.suppress(OSError):
                while len(self._held) < self._count:
                    self._held.append(os.open(os.devnull, os.O_RDONLY))
                self.short = False

    def open(self, path: Path, flags: int, mode: int | None = None) -> int:
        """Open a file, with one of ours when there is no other descriptor."""
        while True:
            try:
                return os.open(path, flags, ACCESS.file_mode if mode is None else mode)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._let_one_go():
                    raise

    def close(self, fd: int) -> None:
        """Close a file, and take back what a shortage has cost."""
        os.close(fd)
        if self.short:
            self.hold()

    def _let_one_go(self) -> bool:
        if self._idle is not None and self._idle.let_one_go():
            return True
        with self._lock:
            if not self._held:
                return False
            self.short = True
            os.close(self._held.pop())
            return True


SPARES = SpareDescriptors(8, IDLE)
"""The spare descriptors of this process; a writer takes them when it locks its folder."""


class FolderTree(Protocol):
    """Names in a folder, with the durability rules of POSIX: each needs a sync of its directory.

    Paths are relative to the folder and use forward slashes. What a store does with the content of files it adds; all
    of it is small, so that tests can replace it by one that forgets what was not synced, tears writes and fails.
    """

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""

    def list(self, path: str) -> list[str]:
        """List the names in a folder, sorted; none when the folder is missing."""

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; an existing one is fine. Durable after `sync_folder` of its parent."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any other. Durable after `sync_folder` of the new place."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is fine. Durable after `sync_folder`."""

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder will survive a power loss, or `SyncFailed`."""

    def lock(self, path: str) -> Callable[[], None]:
        """Become the one writer; give the function that ends it, or raise `FolderLocked`."""


class DiskTree:
    """A folder of the local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def exists(self, path: str) -> bool:
        """Tell whether something is there."""
        return (self.root / path).exists()

    def list(self, path: str) -> list[str]:
        """List the names in a folder."""
        try:
            return sorted(os.listdir(self.root / path))
        except FileNotFoundError:
            return []

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents."""
        make_folder(self.root / path, durably=not path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file."""
        (self.root / old).replace(self.root / new)

    def remove(self, path: str) -> None:
        """Remove a file."""
        (self.root / path).unlink(missing_ok=True)

    def sync_folder(self, path: str) -> None:
        """Sync a directory."""
        sync_folder(self.root / path)

    def lock(self, path: str) -> Callable[[], None]:
        """Take an exclusive lock that the kernel gives back when this process ends, however it ends."""
        return locked(self.root / path)


def move_away(files: FolderTree, path: str) -> str:
    """Move what stands in the place of one of ours out of the way; give its new path."""
    number = 1
    while files.exists(target := f"{path}.{number}.unusable"):
        number += 1
    files.rename(path, target)
    return target


def give_place(files: FolderTree, old: str, new: str) -> None:
    """Rename a file, replacing any other; a folder in its place is moved away."""
    try:
        files.rename(old, new)
    except IsADirectoryError:
        move_away(files, new)
        files.rename(old, new)


def sync_folder(path: Path) -> None:
    """Sync a directory, or raise `SyncFailed`."""
    fd = SPARES.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, error.strerror) from error
    finally:
        SPARES.close(fd)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that is never seen half written, durably, and that nobody else may read even for a moment."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_names([path])


def add_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Add lines to a file that is kept, durably; what an end in the middle of one has left stays a line of its own."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, ACCESS.file_mode)

    with open(path, "a+b", opener=opened) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.absolute().parent)


def make_folder(path: Path, mode: int | None = None, *, durably: bool = False) -> None:
    """Make a folder and the parents that it lacks, for those who may look into a zone's data and nobody else.

    ``durably`` is for a folder above which nobody else of ours syncs: its name survives a power loss.
    """
    made = lacking(path)
    # The folder itself is always asked for: where something else stands in its place, that is an error.
    for folder in reversed([path, *(each for each in made if each != path)]):
        folder.mkdir(mode=ACCESS.folder_mode if mode is None else mode, exist_ok=True)
    if durably:
        sync_names(made)


def lacking(path: Path) -> list[Path]:
    """List a folder and those above it that are not there, the lowest first."""
    return [each for each in (path, *path.parents) if not each.exists()]


def sync_names(folders: Iterable[Path]) -> None:
    """Have the names of folders survive a power loss."""
    for folder in folders:
        # Who may make a folder somewhere need not be allowed to look there.
        with contextlib.suppress(PermissionError):
            sync_folder(folder.parent)


def locked(path: Path) -> Callable[[], None]:
    """Become the one writer of the folder around a file; give the function that ends it, or raise `FolderLocked`.

    The file tells who holds it and keeps older versions out. The lock that counts is the one on the folder, because
    nobody can take it away from under a writer: a file may be removed by hand and made anew. The kernel gives both back
    when the process ends, however it ends.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, ACCESS.file_mode)
    except OSError as error:
        if not (is_folder(error) or path.is_symlink()):
            raise
        move_away(DiskTree(path.parent), path.name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, ACCESS.file_mode)
    folder = -1
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _lock_folder(folder)
        _sign(fd)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        _close_all(fd, folder)
        raise FolderLocked(f"{path.parent} is being written by process {holder}", pid=holder) from None
    except BaseException:
        _close_all(fd, folder)
        raise
    SPARES.hold()
    return lambda: _close_all(fd, folder)


@contextlib.contextmanager
def without_writer(folder: Path) -> Iterator[None]:
    """Keep writers out of a folder that is only read, or raise `FolderLocked` when there is one; it stays untouched."""
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            fds.append(os.open(folder / "LOCK", os.O_RDONLY | os.O_NONBLOCK))
        for fd in fds:
            _lock_folder(fd)
        yield
    except BlockingIOError:
        hint = "Stop the node first; what it has not written yet cannot be read."
        raise FolderLocked(f"{folder} is being written by another process", hint=hint) from None
    finally:
        _close_all(*fds)


def _lock_folder(fd: int) -> None:
    """Lock a folder, where the file system can: over NFS only files can be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _sign(fd: int) -> None:
    """Write who holds a lock into its file; on a full disk, or where the file is none, it stays unsaid."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def _close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
