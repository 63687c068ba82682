"""What is in a backup, file by file: listed when it is made, and held against what is there before it is used."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from bsfg.errors import BackupUntrusted
from bsfg.wording import one_line

PIECE_BYTES = 4 << 20
NAME_CHARACTERS_MAX = 1_000
HINT = "This is no backup as `bsfg backup` makes it: use another one, and find out who changed it."

UNSIGNED_HINT = (
    "Use a backup of your own, and give the authority of the zone with --ca. --accept-unsigned takes it unchecked."
)

Contents = Mapping[str, Sequence[object]]
"""Every file by its path in the backup, with its size and its SHA-256."""


def listed(folder: Path, parts: Sequence[str]) -> dict[str, list[object]]:
    """List all files of some parts of a folder with size and digest."""
    return {name: [*digest_of(folder / name)] for part in parts for name in sorted(_walk(folder, part))}


def check_name(name: object, parts: Sequence[str]) -> str:
    """Give a name that cannot lead out of its part, or raise `BackupUntrusted`."""
    if isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX:
        pieces = name.split("/")
        plain = all(piece not in ("", ".", "..") and _is_plain(piece) for piece in pieces)
        if plain and (not parts or (pieces[0] in parts and len(pieces) > 1)):
            return name
    raise BackupUntrusted(f"{one_line(str(name))[:200]!r} cannot be a file of a backup", hint=HINT)


def check_names(names: Sequence[object], parts: Sequence[str]) -> list[str]:
    """Give names of which none leaves its part, and no two of which are one file on some other file system."""
    found = [check_name(name, parts) for name in names]
    folded: dict[str, str] = {}
    for name in found:
        for path in (PurePosixPath(name), *PurePosixPath(name).parents):
            text = str(path)
            if folded.setdefault(text.casefold(), text) != text:
                raise BackupUntrusted(f"{name!r} and {folded[text.casefold()]!r} differ in case only", hint=HINT)
    if len(set(found)) < len(found):
        raise BackupUntrusted("a name is listed twice", hint=HINT)
    return found


def check_plain(folder: Path, parts: Sequence[str]) -> set[str]:
    """Give all files of a backup; raise `BackupUntrusted` when anything in it is neither a file nor a folder."""
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise BackupUntrusted(f"{folder} is not a folder", hint=HINT)
    return {name for part in parts for name in _walk(folder, part)}


def differences(folder: Path, contents: Contents, done: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    """Hold every listed file against what is there; give the name of each that is another, and what is wrong."""
    for name, (size, digest) in contents.items():
        try:
            found = digest_of(folder / name, done)
        except FileNotFoundError:
            yield name, "it is missing"
            continue
        if found != (size, digest):
            yield name, "it is not what was backed up"


def digest_of(path: Path, done: Callable[[int], None] = lambda size: None) -> tuple[int, str]:
    """Give size and SHA-256 of a plain file, which is opened as such: no link is followed."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            done(len(piece))
    return size, digest.hexdigest()


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading, or raise `BackupUntrusted` when it is a link or something else."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BackupUntrusted(f"{path} is a link or a device", hint=HINT) from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise BackupUntrusted(f"{path} is not a plain file", hint=HINT)
    return os.fdopen(number, "rb")


def _is_plain(piece: str) -> bool:
    """Tell whether a piece of a name is one: no other separator, nothing that is not seen."""
    return piece.isprintable() and "\\" not in piece and piece == piece.strip()


def _walk(folder: Path, part: str) -> Iterator[str]:
    """Give the files below a part, which must be plain; a part that is not there has none."""
    if not os.path.lexists(folder / part):
        return
    waiting = [part]
    if not stat.S_ISDIR((folder / part).lstat().st_mode):
        raise BackupUntrusted(f"{part} in {folder} is not a folder", hint=HINT)
    while waiting:
        here = waiting.pop()
        with os.scandir(folder / here) as entries:
            for entry in entries:
                name = f"{here}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    yield name
                else:
                    what = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    raise BackupUntrusted(f"{one_line(name)[:200]!r} in {folder} is {what}", hint=HINT)
