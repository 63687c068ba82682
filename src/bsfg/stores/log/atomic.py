"""Writing a whole file so that after a crash either the old or the new content is there."""

from __future__ import annotations

from bsfg.stores.log.files import Bytes, Files


def write_whole(files: Files, path: str, data: Bytes) -> None:
    """Make a file with this content durable, replacing any other of that name; a folder in its place is moved away."""
    try:
        files.remove(path + ".new")
    except IsADirectoryError:
        _move_away(files, path + ".new")
    write_aside(files, path + ".new", data)
    try:
        files.rename(path + ".new", path)
    except IsADirectoryError:
        _move_away(files, path)
        files.rename(path + ".new", path)
    files.sync_folder(path.rpartition("/")[0])


def write_aside(files: Files, path: str, data: Bytes) -> None:
    """Make the content of a file durable under a name that nobody looks for; a rename puts it in its place."""
    file = files.create(path)
    try:
        file.write([data])
        file.sync()
    finally:
        file.close()


def _move_away(files: Files, path: str) -> None:
    number = 1
    while files.exists(target := f"{path}.{number}.unusable"):
        number += 1
    files.rename(path, target)
