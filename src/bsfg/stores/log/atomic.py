"""Writing a whole file so that after a crash either the old or the new content is there."""

from __future__ import annotations

from bsfg.stores.log.files import Bytes, Files


def write_whole(files: Files, path: str, data: Bytes) -> None:
    """Make a file with this content durable, replacing any other of that name."""
    files.remove(path + ".new")
    file = files.create(path + ".new")
    try:
        file.write([data])
        file.sync()
    finally:
        file.close()
    files.rename(path + ".new", path)
    files.sync_folder(path.rpartition("/")[0])
