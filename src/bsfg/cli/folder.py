"""Finding out, before anything else, whether a path is a data folder, and what was probably meant when it is not."""

from __future__ import annotations

import os
from pathlib import Path

from bsfg.errors import NotAFolder, StorageUnreadable

MARK = "bsfg.json"


def checked_folder(path: Path) -> Path:
    """Give the path of a data folder, or raise `NotAFolder` with the folder that was probably meant."""
    try:
        if (path / MARK).is_file():
            return path
        if not path.exists():
            raise NotAFolder(f"there is no folder {path}")
        if not path.is_dir():
            raise NotAFolder(f"{path} is a file, not a folder")
        empty = not os.listdir(path)
    except OSError as error:
        raise StorageUnreadable(f"{path} cannot be read: {error.strerror}") from None
    near = next((folder for folder in _near(path) if (folder / MARK).is_file()), None)
    hint = f"Did you mean {near}?" if near is not None else None
    raise NotAFolder(f"{path} is empty" if empty else f"there is no {MARK} in {path}", hint=hint)


def _near(path: Path) -> list[Path]:
    """List the folders around a path: those that a user is likely to mix up with it."""
    return [path / "data", *path.parents[:4]]
