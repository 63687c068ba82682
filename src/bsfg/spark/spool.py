"""Parts that wait for their turn: what a task wrote, kept in a file until the commit publishes it in order.

A part holds frames as they will travel, so that whoever publishes it has little to do. It is not synced: when the
machine stops, Spark runs the tasks again.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import SpoolNotShared
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason

SUFFIX = ".part"
FORGOTTEN_SECONDS = 24 * 3600.0
"""After this time a part belongs to nobody any more: its task was killed."""

_HEADER = struct.Struct("<cqqqq")
_FACTS, _ENTRIES, _GAP = b"F", b"E", b"G"


def spool_folder(given: str | None) -> Path:
    """Give the folder for parts, made if need be; nobody else may read it."""
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"bsfg-spool-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if given is None and ((found := folder.lstat()).st_uid != os.getuid() or found.st_mode & 0o077):
        raise PermissionError(f"{folder} is not a private folder of this user")
    return folder


class PartWriter:
    """Writes one part; a part that is not finished is removed."""

    def __init__(self, folder: Path) -> None:
        remove_forgotten(folder)
        self.path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self._file: IO[bytes] = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def write(self, item: FactBatch | Frame) -> None:
        """Add facts, or a frame of a link."""
        if isinstance(item, FactBatch):
            self._add(_FACTS, 0, 0, item.to_ipc())
        elif item.entries is not None:
            self._add(_ENTRIES, item.first, item.last, item.entries.to_ipc())
        elif (gap := item.gap) is not None:
            payload = f"{gap.reason}\n{gap.detail}".encode()
            self._add(_GAP, item.first, item.last, payload, gap.at_unix_ms)

    def _add(self, kind: bytes, first: int, last: int, payload: bytes | pa.Buffer, at_unix_ms: int = 0) -> None:
        view = memoryview(payload)
        self._file.write(_HEADER.pack(kind, first, last, at_unix_ms, view.nbytes))
        self._file.write(view)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)


def read_part(path: Path) -> Iterator[FactBatch | Frame]:
    """Give what a part holds, in order; raises `SpoolNotShared` when it is not there."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SpoolNotShared(f"the part {path} cannot be read here: {error.strerror}") from None
    with file:
        while header := file.read(_HEADER.size):
            kind, first, last, at_unix_ms, size = _HEADER.unpack(header)
            yield _item(kind, first, last, at_unix_ms, file.read(size))


def _item(kind: bytes, first: int, last: int, at_unix_ms: int, payload: bytes) -> FactBatch | Frame:
    if kind == _FACTS:
        return FactBatch.from_ipc(payload)
    if kind == _ENTRIES:
        return Frame(first, last, EntryBatch.from_ipc(payload))
    reason, _, detail = payload.decode().partition("\n")
    return Frame(first, last, gap=GapRecord(first, last, GapReason(reason), at_unix_ms, detail))


def remove_part(path: Path) -> None:
    """Remove a part that is published or not wanted; one that is gone already does no harm."""
    with suppress(OSError):
        path.unlink()


def remove_forgotten(folder: Path) -> None:
    """Remove the parts of tasks that were killed long ago."""
    oldest = time.time() - FORGOTTEN_SECONDS
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
