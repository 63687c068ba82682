"""Copying a folder of artifacts while uploads go on.

Content never changes once it has its place, and a name is given after its content is there. So names are copied first:
whatever they stand for is found afterwards. What an upload under way has written is left out, as is the memory of
references, which a zone finds out again by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bsfg.errors import DigestMismatch
from bsfg.stores.artifacts.contents import CONTENT, Shards
from bsfg.stores.artifacts.files import Files, translating
from bsfg.stores.artifacts.folder import MARK
from bsfg.stores.artifacts.names import NAMES, SUFFIX, decoded

CHUNK_BYTES = 1 << 20

Reuse = Callable[[str, int], bool]
"""Puts a file of this path and size that never changes again into the copy without copying it; False if it cannot."""

Copied = Callable[[int], None]
"""Told the number of bytes that were just copied or checked."""


@dataclass(frozen=True, slots=True)
class CopiedArtifacts:
    """What is in a copy."""

    contents: int
    names: int
    size_bytes: int


def copy_artifacts(
    source: Files, target: Files, *, reuse: Reuse = lambda path, size: False, copied: Copied = lambda size: None
) -> CopiedArtifacts | None:
    """Copy a folder of artifacts, used meanwhile or not, into an empty one; None when there is none."""
    with translating("copying artifacts"):
        if not source.exists(MARK):
            return None
        target.prepare()
        names = sum(_copy(source, target, path, reuse, copied) is not None for path in _paths(source, NAMES))
        sizes = [_copy(source, target, path, reuse, copied) for path in _paths(source, CONTENT)]
        there = [size for size in sizes if size is not None]
        for top in (NAMES, CONTENT):
            target.make_folder(top)
            for shard in target.list(top):
                target.sync_folder(f"{top}/{shard}")
            target.sync_folder(top)
        _copy(source, target, MARK, lambda path, size: False, copied)
        target.sync_folder("")
        return CopiedArtifacts(len(there), names, sum(there))


def size_of(files: Files) -> int:
    """Give about how many bytes `copy_artifacts` will copy."""
    total = 0
    for path in _paths(files, CONTENT):
        try:
            total += files.size(path)
        except FileNotFoundError:
            continue
    return total


def problems_of(files: Files, checked: Copied = lambda size: None) -> list[tuple[str, str]]:
    """Check every content and name of a folder that nobody writes; give path and words for what is damaged."""
    found = []
    for path in _paths(files, CONTENT):
        digest = hashlib.sha256()
        for chunk in _chunks(files, path):
            digest.update(chunk)
            checked(len(chunk))
        if digest.hexdigest() != path.rpartition("/")[2]:
            found.append((path, "the content has another digest than its name says"))
    for path in _paths(files, NAMES):
        try:
            decoded(b"".join(_chunks(files, path)), path.rpartition("/")[2].removesuffix(SUFFIX))
        except DigestMismatch as error:
            found.append((path, error.message))
    return found


def _paths(files: Files, top: str) -> Iterator[str]:
    suffix = SUFFIX if top == NAMES else ""
    shards = Shards(files, top)
    return (shards.path(digits, suffix) for digits in shards.files(suffix))


def _copy(source: Files, target: Files, path: str, reuse: Reuse, copied: Copied) -> int | None:
    """Copy one file and give its size; None when it was collected meanwhile."""
    target.make_folder(path.rpartition("/")[0])
    try:
        size = source.size(path)
        if reuse(path, size):
            copied(size)
            return size
        reading = source.open_read(path)
    except FileNotFoundError:
        return None
    file = target.create(path)
    try:
        while chunk := reading.read(CHUNK_BYTES):
            file.write([chunk])
            copied(len(chunk))
        file.sync()
    finally:
        reading.close()
        file.close()
    return size


def _chunks(files: Files, path: str) -> Iterator[bytes]:
    file = files.open_read(path)
    try:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
    finally:
        file.close()
