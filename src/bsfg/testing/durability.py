"""What a power loss leaves: the rules of POSIX for the contents of files and the names in folders, without any I/O.

A file's content is what was last synced plus changes that may each be there, be there in part, or be gone. A folder's
names are likewise those of its last sync plus changes that may be lost, each by itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

SECTORS_BYTES = (512, 4096)
SLOT_VALUES_MAX = 32


class ChangeStanding(Enum):
    """How far a change of a file has come."""

    PENDING = "not synced yet"
    DOUBTFUL = "its sync failed: the system took it for written, so no later sync will write it"
    DURABLE = "synced, but after a doubtful change"


@dataclass(slots=True, eq=False)
class FileChange:
    """A write at ``start``, or a cut to ``start`` bytes when there is no data."""

    start: int
    data: bytes | None
    standing: ChangeStanding = ChangeStanding.PENDING

    @property
    def settled(self) -> bool:
        """Whether a power loss cannot undo it."""
        return self.standing is ChangeStanding.DURABLE

    def apply(self, content: bytearray, count: int | None = None) -> None:
        """Make the change, or only the first ``count`` bytes of it; a hole before it reads as zeros."""
        if self.data is None:
            del content[self.start :]
            return
        data = self.data[:count]
        if len(content) < self.start and data:
            content.extend(bytes(self.start - len(content)))
        content[self.start : self.start + len(data)] = data

    def pieces(self, sector_bytes: int) -> Iterator[FileChange]:
        """Split a write where the sectors of the file meet."""
        if self.data is None:
            yield self
            return
        at, end = self.start, self.start + len(self.data)
        while at < end:
            stop = min(end, (at // sector_bytes + 1) * sector_bytes)
            yield FileChange(at, self.data[at - self.start : stop - self.start], self.standing)
            at = stop


@dataclass(slots=True, eq=False)
class DurableFile:
    """A file: what every process sees (``live``), and what is certain to survive (``settled``).

    ``slot_values`` are the contents a memory map has had; a map is never synced, so any of them may be found later.
    """

    live: bytearray = field(default_factory=bytearray)
    settled: bytearray = field(default_factory=bytearray)
    changes: list[FileChange] = field(default_factory=list)
    slot_values: list[bytes] = field(default_factory=list)

    def change(self, change: FileChange) -> None:
        """Make a change that all processes see and a power loss may undo."""
        change.apply(self.live)
        self.changes.append(change)

    def sync(self) -> None:
        """Make everything durable except what a failed sync has left in doubt."""
        if any(change.standing is ChangeStanding.DOUBTFUL for change in self.changes):
            for change in self.changes:
                if change.standing is ChangeStanding.PENDING:
                    change.standing = ChangeStanding.DURABLE
            return
        for change in self.changes:
            change.apply(self.settled)
        self.changes.clear()

    def fail_sync(self) -> None:
        """Leave what was not synced in doubt for good: it is seen, it counts as written, and it may not be there."""
        for change in self.changes:
            if change.standing is ChangeStanding.PENDING:
                change.standing = ChangeStanding.DOUBTFUL

    def store(self, data: bytes) -> None:
        """Change the content through a memory map."""
        self.live[: len(data)] = data
        if len(self.slot_values) == SLOT_VALUES_MAX:
            del self.slot_values[SLOT_VALUES_MAX // 2]
        self.slot_values.append(bytes(self.live))

    def copy(self) -> DurableFile:
        """Give an independent copy with the same doubts."""
        changes = [replace(change) for change in self.changes]
        return DurableFile(bytearray(self.live), bytearray(self.settled), changes, list(self.slot_values))

    def surviving(self, random: Random) -> DurableFile:
        """Give the file as it may be found after a power loss; all that is found then is durable."""
        content = self._surviving_slot(random) if self.slot_values else self._surviving_content(random)
        return DurableFile(bytearray(content), content)

    def _surviving_slot(self, random: Random) -> bytearray:
        one, other = random.choice(self.slot_values), random.choice(self.slot_values)
        cut = random.randrange(len(one) + 1)
        return bytearray(random.choice((b"", bytes(len(one)), one, one, one[:cut] + other[cut:])))

    def _surviving_content(self, random: Random) -> bytearray:
        if not self.changes:
            return bytearray(self.settled)
        how = random.choice((_nothing, _everything, _prefix, _prefix, _sectors, _sectors, _garbled))
        return how(self, random)


def _nothing(file: DurableFile, random: Random) -> bytearray:
    """Lose every change that was not synced."""
    del random
    content = bytearray(file.settled)
    for change in file.changes:
        if change.settled:
            change.apply(content)
    return content


def _everything(file: DurableFile, random: Random) -> bytearray:
    """Lose nothing: the system had written it all before anyone asked."""
    del random
    return bytearray(file.live)


def _prefix(file: DurableFile, random: Random) -> bytearray:
    """Keep the changes up to one of them, which is torn at any byte."""
    content = bytearray(file.settled)
    torn = random.randrange(len(file.changes))
    for index, change in enumerate(file.changes):
        if change.settled or index < torn:
            change.apply(content)
        elif index == torn:
            change.apply(content, random.randrange(len(change.data or b"") + 1))
    return content


def _sectors(file: DurableFile, random: Random) -> bytearray:
    """Keep any sectors of what was written; new sectors that were lost read as zeros or as old rubbish."""
    content = bytearray(file.settled)
    sector_bytes = random.choice(SECTORS_BYTES)
    kept_part = random.choice((0.1, 0.5, 0.9))
    rubbish = random.random() < 0.3 and not any(change.settled for change in file.changes)
    lost: list[FileChange] = []
    for change in file.changes:
        for piece in change.pieces(sector_bytes):
            if change.settled or random.random() < kept_part:
                piece.apply(content)
            elif piece.data is not None and piece.start >= len(file.settled):
                lost.append(piece)
    if random.random() < 0.5 and len(content) < len(file.live):
        content.extend(bytes(len(file.live) - len(content)))
    if rubbish:
        _fill_with_rubbish(content, lost, random)
    return content


def _fill_with_rubbish(content: bytearray, lost: list[FileChange], random: Random) -> None:
    """Let blocks that were allocated and never written show what was on the medium before."""
    for piece in lost:
        end = min(len(content), piece.start + len(piece.data or b""))
        if end > piece.start and not any(content[piece.start : end]):
            content[piece.start : end] = random.randbytes(end - piece.start)


def _garbled(file: DurableFile, random: Random) -> bytearray:
    """Keep everything, with a few bits of what was not synced turned over."""
    content = bytearray(file.live)
    unsynced = [change for change in file.changes if change.data and not change.settled]
    for change in random.choices(unsynced, k=random.randint(1, 3)) if unsynced else ():
        at = change.start + random.randrange(len(change.data or b""))
        if at < len(content) and not _is_settled(file, change, at):
            content[at] ^= 1 << random.randrange(8)
    return content


def _is_settled(file: DurableFile, change: FileChange, at: int) -> bool:
    """Tell whether a byte was written again, and synced, after a change."""
    later = file.changes[file.changes.index(change) + 1 :]
    return any(
        other.settled and (at >= other.start if other.data is None else 0 <= at - other.start < len(other.data))
        for other in later
    )


@dataclass(slots=True, eq=False)
class NameChange:
    """One atomic change of the names in a folder: each name gets a node, or goes (None).

    Moving a file to another folder is two changes, and the loss of the old name ``needs`` the new one to be there.
    ``forced`` says that the change survives although its own folder was not synced.
    """

    names: dict[str, DurableFile | Folder | None]
    needs: NameChange | None = None
    forced: bool = False


@dataclass(slots=True, eq=False)
class Folder:
    """A folder: the names that every process sees, those certain to survive, and the changes between the two."""

    live: dict[str, DurableFile | Folder] = field(default_factory=dict)
    settled: dict[str, DurableFile | Folder] = field(default_factory=dict)
    changes: list[NameChange] = field(default_factory=list)

    def change(self, change: NameChange) -> None:
        """Make a change that all processes see and a power loss may undo."""
        _apply_names(self.live, change)
        self.changes.append(change)

    def sync(self) -> None:
        """Make all names durable."""
        for change in self.changes:
            _apply_names(self.settled, change)
            if change.needs is not None:
                change.needs.forced = True
        self.changes.clear()

    def nodes(self) -> list[DurableFile | Folder]:
        """List everything that is, was or may again be in the folder."""
        found = [*self.live.values(), *self.settled.values()]
        found += [node for change in self.changes for node in change.names.values() if node is not None]
        return list({id(node): node for node in found}.values())

    def at(self, path: str) -> DurableFile | Folder:
        """Give what every process sees at a path below this folder, or the operating system's error."""
        node: DurableFile | Folder = self
        for name in names_of(path):
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in node.live:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.live[name]
        return node

    def file(self, path: str) -> DurableFile:
        """Give the file at a path."""
        node = self.at(path)
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def folder(self, path: str) -> Folder:
        """Give the folder at a path."""
        node = self.at(path)
        if isinstance(node, DurableFile):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def parent_of(self, path: str) -> tuple[Folder, str]:
        """Give the folder that holds a path, and the path's last name."""
        *parents, name = names_of(path)
        return self.folder("/".join(parents)), name

    def files(self, prefix: str = "") -> Iterator[tuple[str, DurableFile]]:
        """Give every file that a process sees, by path."""
        for name, node in sorted(self.live.items()):
            if isinstance(node, DurableFile):
                yield prefix + name, node
            else:
                yield from node.files(f"{prefix}{name}/")


def names_of(path: str) -> list[str]:
    """Split a path into its names; the folder itself has none."""
    return [name for name in path.split("/") if name not in ("", ".")]


def _apply_names(names: dict[str, DurableFile | Folder], change: NameChange) -> None:
    for name, node in change.names.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def surviving_tree(root: Folder, random: Random) -> Folder:
    """Give the whole tree as it may be found after a power loss."""
    kept: dict[int, NameChange] = {}
    for folder in _folders(root):
        for change in _surviving_changes(folder, random):
            kept[id(change)] = change
            if change.needs is not None:
                kept[id(change.needs)] = change.needs
    files: dict[int, DurableFile] = {}

    def found(node: DurableFile | Folder) -> DurableFile | Folder:
        if isinstance(node, DurableFile):
            if id(node) not in files:
                files[id(node)] = node.surviving(random)
            return files[id(node)]
        names = dict(node.settled)
        for change in node.changes:
            if id(change) in kept or change.forced:
                _apply_names(names, change)
        there = {name: found(inner) for name, inner in sorted(names.items())}
        return Folder(there, dict(there))

    result = found(root)
    assert isinstance(result, Folder)
    return result


def _surviving_changes(folder: Folder, random: Random) -> list[NameChange]:
    """Choose which changes of names reached the medium: none, all, the first few, or any."""
    how = random.choice(("none", "all", "prefix", "any"))
    if how == "none":
        return []
    if how == "prefix":
        return folder.changes[: random.randint(0, len(folder.changes))]
    return [change for change in folder.changes if how == "all" or random.random() < 0.5]


def _folders(root: Folder) -> Iterator[Folder]:
    yield root
    for node in root.nodes():
        if isinstance(node, Folder):
            yield from _folders(node)


def copied_tree(root: Folder) -> Folder:
    """Give an independent copy of a tree with all its doubts, as a process finds it that comes after another."""
    copies: dict[int, DurableFile | Folder] = {}
    changes: dict[int, NameChange] = {}

    def of_node(node: DurableFile | Folder) -> DurableFile | Folder:
        if id(node) not in copies:
            if isinstance(node, DurableFile):
                copies[id(node)] = node.copy()
            else:
                copies[id(node)] = folder = Folder()
                folder.live = {name: of_node(inner) for name, inner in node.live.items()}
                folder.settled = {name: of_node(inner) for name, inner in node.settled.items()}
                folder.changes = [of_change(change) for change in node.changes]
        return copies[id(node)]

    def of_change(change: NameChange) -> NameChange:
        if id(change) not in changes:
            names = {name: None if node is None else of_node(node) for name, node in change.names.items()}
            needs = None if change.needs is None else of_change(change.needs)
            changes[id(change)] = NameChange(names, needs, change.forced)
        return changes[id(change)]

    result = of_node(root)
    assert isinstance(result, Folder)
    return result
