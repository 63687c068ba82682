"""A simulated disk for `bsfg.stores.log.files.Files`: it forgets what was not synced, tears writes, and fails.

Every operation that changes something is counted, so that the power can be cut at each of them. A disk whose power
was cut answers nothing any more; `SimulatedDisk.crash` gives the disk as it is found afterwards.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from threading import RLock

from bsfg.errors import FolderLocked
from bsfg.stores.log.files import Bytes, NotBegun, SyncFailed
from bsfg.testing.durability import DurableFile, FileChange, Folder, NameChange, copied_tree, names_of, surviving_tree

FAILING = (
    "create",
    "open",
    "write",
    "sync",
    "truncate",
    "read",
    "make_folder",
    "rename",
    "remove",
    "sync_folder",
    "allocate",
)
"""The operations that can be told to fail."""

Hook = Callable[["SimulatedDisk", int, str, str], None]
"""Called while an operation is under way: the disk, the operation's number, what it is, and its path."""


class PowerLoss(BaseException):
    """The power is gone; not an `Exception`, because no code runs on after a power loss."""


class SimulatedFile:
    """A file of a simulated disk, opened for appending."""

    def __init__(self, disk: SimulatedDisk, path: str, file: DurableFile, *, idle: bool = False) -> None:
        self._disk, self._path, self._file = disk, path, file
        self._open, self._idle = True, idle

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write at the end; a fault or a full disk leaves any first part of it behind."""
        self._check_open()
        if self._idle:
            self._disk._check_named(self._path, self._file)
        self._idle = False
        self._disk._write(self._path, self._file, b"".join(bytes(part) for part in parts))

    def sync(self) -> None:
        """Make the content durable, or fail and leave it in doubt."""
        self._check_open()
        with self._disk._operation("sync", self._path, on_fault=self._file.fail_sync):
            self._file.sync()
        self._idle = True

    def renamed(self, path: str) -> None:
        """Take note of another name: a real file that is idle may be closed, and is then opened by its name."""
        self._path = path

    def truncate(self, size_bytes: int) -> None:
        """Cut the file, or extend it with zeros."""
        self._check_open()
        with self._disk._operation("truncate", self._path):
            size = len(self._file.live)
            more = bytes(max(0, size_bytes - size))
            self._file.change(FileChange(size, more) if more else FileChange(size_bytes, None))
            self._disk._release(size - size_bytes)

    def close(self) -> None:
        """Release the file; a second time is harmless, and nothing becomes durable by it."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)


class SimulatedSlot:
    """A memory map of a file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str, file: DurableFile) -> None:
        self._disk, self._path, self._file = disk, path, file

    def store(self, data: bytes) -> None:
        """Replace the content for all processes; a power loss may bring back any earlier one."""
        with self._disk._operation("store", self._path):
            self._file.store(data)

    def close(self) -> None:
        """Release the slot."""


class SimulatedDisk:
    """A folder tree in memory that follows POSIX as strictly as a cruel file system may.

    - What was written is seen by every process at once and is durable only after `sync` of the file; until then any
      part of it may be lost: all, a tail, any sectors (which then read as zeros or rubbish), single bits.
    - Names (new, renamed, removed files and folders) are durable only after `sync_folder` of their folder; until
      then each change may be lost by itself. A file without a durable name is gone, however well it was synced.
    - After a failed `sync` the data counts as written although it may not be: a later `sync` does not repair it,
      only writing it again does. After a failed `sync_folder` the next one that succeeds makes all names durable.
    - A slot is never durable: it may be found with any earlier value, torn, empty or zeroed.

    ``seed`` decides where a failing write breaks off. The disk may be used from several threads.
    """

    def __init__(self, seed: int | str = 0, root: Folder | None = None) -> None:
        self.operations = 0
        self.history: builtins.list[tuple[str, str]] = []
        self.hook: Hook | None = None
        self._random = Random(seed)
        self._seed = seed
        self._root = root if root is not None else Folder()
        self._lock = RLock()
        self._locked: set[str] = set()
        self._faults: dict[str, builtins.list[tuple[int, int]]] = {}
        self._calls: dict[str, int] = {}
        self._free_bytes: int | None = None
        self._bad: dict[int, builtins.list[tuple[int, int]]] = {}
        self._crash_at: int | None = None
        self._powerless = False

    # Power and faults.

    @property
    def powerless(self) -> bool:
        """Whether the power was cut."""
        return self._powerless

    def crash_at(self, operation: int) -> None:
        """Cut the power while the operation with this number (the first is 1) is under way.

        The operation may have had its effect, a sync has not returned; it and all later ones raise `PowerLoss`.
        """
        self._crash_at = operation

    def cut_power(self) -> None:
        """Cut the power now."""
        self._powerless = True

    def crash(self, random: Random) -> SimulatedDisk:
        """Give the disk as it may be found after losing power at this moment; this one stays as it is."""
        with self._lock:
            return SimulatedDisk(self._seed, surviving_tree(self._root, random))

    def killed(self) -> SimulatedDisk:
        """Give the disk as the next process finds it when this one is killed: all is seen, nothing more is durable."""
        with self._lock:
            other = SimulatedDisk(self._seed, copied_tree(self._root))
            other._free_bytes = self._free_bytes
            return other

    def fail(self, operation: str, *, after: int = 0, error: int = errno.EIO, times: int = 1) -> None:
        """Let an operation fail with an error number: ``times`` calls of it, once ``after`` more have gone well."""
        if operation not in FAILING:
            raise ValueError(f"{operation!r} cannot be told to fail; these can: {', '.join(FAILING)}")
        with self._lock:
            first = self._calls.get(operation, 0) + after + 1
            self._faults.setdefault(operation, []).extend((call, error) for call in range(first, first + times))

    def repair(self) -> None:
        """Forget all faults that were ordered, and give the disk its space back."""
        with self._lock:
            self._faults.clear()
            self._free_bytes = None

    def fill_up(self, after_bytes: int) -> None:
        """Let the disk be full after so many more bytes; cutting and removing files gives space back."""
        with self._lock:
            self._free_bytes = after_bytes

    def flip_bits(self, random: Random, count: int = 1, *, paths: Sequence[str] | None = None) -> set[str]:
        """Damage what is durable: turn bits over in files, chosen by size, and give the paths that were hit."""
        with self._lock:
            named = {path: file for path, file in self._root.files() if paths is None or path in paths}
            weights = [len(file.settled) for file in named.values()]
            if not any(weights):
                return set()
            chosen = random.choices(list(named), weights, k=count)
            for path in chosen:
                file = named[path]
                at, bit = random.randrange(len(file.settled)), 1 << random.randrange(8)
                file.settled[at] ^= bit
                if at < len(file.live):
                    file.live[at] ^= bit
            return set(chosen)

    def spoil(self, path: str, start: int, count: int) -> None:
        """Make bytes of a file unreadable, as bad sectors are, until it is replaced: reading them is an error."""
        with self._lock:
            self._bad.setdefault(id(self._root.file(path)), []).append((start, start + count))

    def _check_readable(self, path: str, start: int, end: int) -> None:
        bad = self._bad.get(id(self._root.file(path)), ())
        if any(first < end and start < after for first, after in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _check_named(self, path: str, file: DurableFile) -> None:
        with self._lock:
            if self._root.file(path) is not file:
                raise NotBegun(errno.ESTALE, os.strerror(errno.ESTALE), path)

    def content(self) -> dict[str, bytes]:
        """Give all files as a process sees them now."""
        with self._lock:
            return {path: bytes(file.live) for path, file in self._root.files()}

    # The protocol.

    def create(self, path: str) -> SimulatedFile:
        """Make a new, empty file."""
        with self._operation("create", path):
            folder, name = self._root.parent_of(path)
            if name in folder.live:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            file = DurableFile()
            folder.change(NameChange({name: file}))
            return SimulatedFile(self, path, file)

    def open_append(self, path: str) -> SimulatedFile:
        """Open an existing file to write at its end."""
        with self._looking("open", path):
            return SimulatedFile(self, path, self._root.file(path), idle=True)

    def read(self, path: str) -> Bytes:
        """Give the content as it is now."""
        with self._looking("read", path):
            data = bytes(self._root.file(path).live)
            self._check_readable(path, 0, len(data))
            return memoryview(data)

    def read_at(self, path: str, start: int, count: int) -> bytes:
        """Give part of the content."""
        with self._looking("read", path):
            self._check_readable(path, start, start + count)
            return bytes(self._root.file(path).live[start : start + count])

    def read_parts(self, path: str, parts: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Give parts of the content."""
        return [self.read_at(path, start, count) for start, count in parts]

    def size(self, path: str) -> int:
        """Give the size of a file."""
        with self._looking("size", path):
            return len(self._root.file(path).live)

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        with self._looking("exists", path):
            try:
                self._root.at(path)
            except OSError:
                return False
            return True

    def list(self, path: str) -> builtins.list[str]:
        """List the names in a folder."""
        with self._looking("list", path):
            try:
                return sorted(self._root.folder(path).live)
            except FileNotFoundError:
                return []

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents, each durable after a sync of its own parent."""
        with self._operation("make_folder", path):
            folder = self._root
            for name in names_of(path):
                node = folder.live.get(name)
                if node is None:
                    node = Folder()
                    folder.change(NameChange({name: node}))
                if not isinstance(node, Folder):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                folder = node

    def rename(self, old: str, new: str) -> None:
        """Rename a file; after a power loss it has its old or its new name, and across folders perhaps both."""
        with self._operation("rename", f"{old} -> {new}"):
            file = self._root.file(old)
            old_folder, old_name = self._root.parent_of(old)
            new_folder, new_name = self._root.parent_of(new)
            if isinstance(new_folder.live.get(new_name), Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
            if old_folder is new_folder:
                old_folder.change(NameChange({old_name: None, new_name: file}))
                return
            arrival = NameChange({new_name: file})
            new_folder.change(arrival)
            old_folder.change(NameChange({old_name: None}, needs=arrival))

    def remove(self, path: str) -> None:
        """Remove a file; until its folder is synced it may come back."""
        with self._operation("remove", path):
            try:
                file = self._root.file(path)
            except FileNotFoundError:
                return
            folder, name = self._root.parent_of(path)
            folder.change(NameChange({name: None}))
            self._release(len(file.live))

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self._operation("sync_folder", path):
            self._root.folder(path).sync()

    def slot(self, path: str, size_bytes: int) -> SimulatedSlot:
        """Open a memory map of a small file, making it when needed."""
        with self._operation("slot", path):
            folder, name = self._root.parent_of(path)
            if name not in folder.live:
                folder.change(NameChange({name: DurableFile()}))
            file = self._root.file(path)
            file.live = file.live[:size_bytes].ljust(size_bytes, b"\0")
            file.store(bytes(file.live))
            return SimulatedSlot(self, path, file)

    def allocate(self, path: str, size_bytes: int) -> None:
        """Bring a file to a size, as far as there is room for it."""
        with self._operation("allocate", path):
            folder, name = self._root.parent_of(path)
            size = len(folder.live[name].live) if name in folder.live else 0
            if self._free_bytes is not None and size_bytes - size > self._free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            if name not in folder.live:
                folder.change(NameChange({name: DurableFile()}))
            more = bytes(max(0, size_bytes - size))
            self._root.file(path).change(FileChange(size, more) if more else FileChange(size_bytes, None))
            self._release(size - size_bytes)

    def lock(self, path: str) -> Callable[[], None]:
        """Become the one writer of this disk; the next process can do so when this one has lost its disk."""
        with self._operation("lock", path):
            folder, name = self._root.parent_of(path)
            if path in self._locked:
                raise FolderLocked(f"{path} is being written by another storage", pid="simulated")
            if name not in folder.live:
                folder.change(NameChange({name: DurableFile()}))
            self._locked.add(path)
            return lambda: self._locked.discard(path)

    # What the handles use.

    @contextmanager
    def _operation(self, kind: str, path: str, on_fault: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Surround an operation that changes something: count it, let it fail, cut the power in it."""
        with self._lock:
            self._check_power()
            self.operations += 1
            self.history.append((kind, path))
            error = self._due_fault(kind)
            ends_here = self.operations == self._crash_at
            durable = kind in ("sync", "sync_folder")
            if durable:
                self._under_way(kind, path, ends_here)
            if error is not None:
                on_fault()
                self._under_way(kind, path, ends_here)
                raise (SyncFailed if durable else OSError)(error, os.strerror(error), path)
            yield
            if not durable:
                self._under_way(kind, path, ends_here)

    @contextmanager
    def _looking(self, kind: str, path: str) -> Iterator[None]:
        """Surround an operation that changes nothing: it may fail, and it is not counted."""
        with self._lock:
            self._check_power()
            error = self._due_fault(kind)
            if error is not None:
                raise OSError(error, os.strerror(error), path)
            yield

    def _under_way(self, kind: str, path: str, ends_here: bool) -> None:
        if self.hook is not None:
            self.hook(self, self.operations, kind, path)
        if ends_here:
            self.cut_power()
            self._check_power()

    def _check_power(self) -> None:
        if self._powerless:
            raise PowerLoss(f"the power was cut at operation {self.operations}")

    def _due_fault(self, kind: str) -> int | None:
        self._calls[kind] = call = self._calls.get(kind, 0) + 1
        return next((error for at, error in self._faults.get(kind, ()) if at == call), None)

    def _write(self, path: str, file: DurableFile, data: bytes) -> None:
        def write(count: int) -> None:
            if count:
                file.change(FileChange(len(file.live), data[:count]))

        with self._operation("write", path, on_fault=lambda: write(self._random.randrange(len(data) + 1))):
            room = len(data) if self._free_bytes is None else min(len(data), self._free_bytes)
            write(room)
            if self._free_bytes is not None:
                self._free_bytes -= room
            full = room < len(data)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _release(self, count: int) -> None:
        if self._free_bytes is not None:
            self._free_bytes += count


class SimulatedReadFile:
    """A file of a simulated disk as it was when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, count: int) -> bytes:
        """Give the next bytes."""
        piece = self._data[self._at : self._at + count]
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Release the file."""


class SimulatedArtifactDisk(SimulatedDisk):
    """A disk that forgets what was not synced, for artifact folders."""

    def __init__(self, seed: int | str = 0, disk: SimulatedDisk | None = None) -> None:
        super().__init__(seed, None if disk is None else disk._root)
        self._times: dict[str, int] = dict(disk._times) if isinstance(disk, SimulatedArtifactDisk) else {}

    def after_power_loss(self, random: Random) -> SimulatedArtifactDisk:
        """Give the disk as it may be found after losing power at this moment."""
        return self._with_times(SimulatedArtifactDisk(self._seed, self.crash(random)))

    def after_kill(self) -> SimulatedArtifactDisk:
        """Give the disk as the next process finds it when this one is killed."""
        return self._with_times(SimulatedArtifactDisk(self._seed, self.killed()))

    def prepare(self) -> None:
        """Do nothing: the folder itself is always there."""

    def open_read(self, path: str) -> SimulatedReadFile:
        """Open a file for reading."""
        return SimulatedReadFile(bytes(self.read(path)))

    def touched_unix_ms(self, path: str) -> int:
        """Give the time that was set last."""
        self.size(path)
        return self._times.get(path, 0)

    def touch(self, path: str, unix_ms: int) -> None:
        """Set the time of a file."""
        if self.exists(path):
            self._times[path] = unix_ms

    def rename(self, old: str, new: str) -> None:
        """Rename a file, which keeps its time."""
        super().rename(old, new)
        self._times[new] = self._times.pop(old, 0)

    def _with_times(self, other: SimulatedArtifactDisk) -> SimulatedArtifactDisk:
        other._times = dict(self._times)
        return other
