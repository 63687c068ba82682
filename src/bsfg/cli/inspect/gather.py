"""What is in a data folder, gathered without the writer and without reading the facts themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bsfg.errors import BsfgError
from bsfg.ports import Buffer, GapRecord, Quarantined
from bsfg.stores.log import keysegments
from bsfg.stores.log.files import DiskFiles, Files, translated
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.index import decode_run
from bsfg.stores.log.journal import read_journal
from bsfg.stores.log.notes import Anchor
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.storage import CURSORS, cursor_from, read_mark
from bsfg.stores.log.view import LogView
from bsfg.stores.shared.cursors import ConsumerCursor


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment file, or the place of one that is missing; the active one still grows."""

    file: str
    first: int
    last: int
    size_bytes: int
    newest_unix_ms: int | None
    active: bool = False
    missing: bool = False


@dataclass(frozen=True, slots=True)
class KeySegmentInfo:
    """The keys that outlive a removed segment."""

    file: str
    first: int
    last: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One file of the key index."""

    file: str
    first: int
    last: int
    keys: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class QuarantineInfo:
    """A fact that was refused for good."""

    id: int
    at_unix_ms: int
    reason: str
    from_zone: str
    message_id: str
    existing_offset: int
    detail: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file and its size."""

    file: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AncestorInfo:
    """A history that the log went on from when it was restored, at the offset ``end``."""

    log_id: str
    end: int
    restored_unix_ms: int


@dataclass(slots=True)
class LogInfo:
    """One log; ``error`` says why it could not be read."""

    stream: str
    buffer: str
    log_id: str = ""
    start: int = 0
    end: int = 0
    size_bytes: int = 0
    newest_unix_ms: int | None = None
    segments: list[SegmentInfo] = field(default_factory=list)
    key_segments: list[KeySegmentInfo] = field(default_factory=list)
    index: list[RunInfo] = field(default_factory=list)
    gaps: list[GapRecord] = field(default_factory=list)
    quarantine: list[QuarantineInfo] = field(default_factory=list)
    removed: list[Anchor] = field(default_factory=list)
    aside: list[FileInfo] = field(default_factory=list)
    lineage: list[AncestorInfo] = field(default_factory=list)
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A durable consumer; ``lag`` counts the entries below the end that it has not confirmed."""

    name: str
    stream: str
    buffer: str
    required: bool
    committed: int
    ranges: list[tuple[int, int]]
    lag: int | None
    log_id: str
    created_unix_ms: int
    retired_reason: str | None
    same_history: bool


@dataclass(slots=True)
class FolderInfo:
    """A whole data folder; ``writer_pid`` is None when nobody writes."""

    folder: str
    format: int
    hasher: str
    writer_pid: int | None
    size_bytes: int = 0
    logs: list[LogInfo] = field(default_factory=list)
    consumers: list[ConsumerInfo] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def gather(
    path: Path,
    stream: str | None = None,
    buffer: Buffer | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderInfo:
    """Describe a data folder, or only the logs of one stream or buffer; ``progress`` is told of each log."""
    files = DiskFiles(path)
    try:
        mark = read_mark(files)
        folders = [
            folder
            for folder in open_folder(path)
            if stream in (None, folder.stream) and buffer in (None, folder.buffer)
        ]
        info = FolderInfo(str(path), int(str(mark["format"])), str(mark.get("hasher")), writer_of(path))
        for folder in folders:
            progress(len(info.logs), len(folders))
            info.logs.append(describe(folder))
        info.consumers = _consumers(files, info)
    except OSError as error:
        raise translated(error, f"reading {path}") from None
    info.size_bytes = sum(log.size_bytes for log in info.logs)
    return info


def describe(folder: LogFolder) -> LogInfo:
    """Describe one log; what cannot be read becomes its ``error``, so that the others are still shown."""
    info = LogInfo(folder.stream, str(folder.buffer))
    try:
        _describe(folder, info)
    except BsfgError as error:
        info.error = error.to_dict()
    except OSError as error:
        info.error = translated(error, f"reading {folder.path}").to_dict()
    return info


def _describe(folder: LogFolder, info: LogInfo) -> None:
    files, path = folder.files, folder.path
    identity = read_identity(files, path)
    if identity is not None:
        info.log_id = identity.log_id.hex()
        info.lineage = [AncestorInfo(each.log_id.hex(), each.end, each.restored_unix_ms) for each in identity.lineage]
    notes = folder.notes()
    info.gaps = [replace(gap, count=gap.offsets) for gap in notes.gaps]  # a number for whoever reads the JSON
    info.removed = notes.anchors
    info.quarantine = [_quarantined(item) for item in notes.quarantine.all()]
    info.key_segments = [
        KeySegmentInfo(name.file_name, name.first, name.last, _size(files, f"{path}/keys/{name.file_name}"))
        for name in keysegments.listed(files, path)
    ]
    info.index = _index(files, path, identity.index_owner if identity is not None else b"")
    info.aside = [FileInfo(name, _size(files, f"{path}/aside/{name}")) for name in files.list(f"{path}/aside")]
    view = folder.view()
    info.start, info.end = view.start, view.end
    info.segments = _segments(view)
    info.size_bytes = sum(
        item.size_bytes for part in (info.segments, info.key_segments, info.index, info.aside) for item in part
    )
    last = view.rows_at(view.end - 1) if view.end > view.start else None
    info.newest_unix_ms = int(last.column("appended_at_unix_ms")[0].as_py()) if last is not None else None


def _segments(view: LogView) -> list[SegmentInfo]:
    result: list[SegmentInfo] = []
    for at, segment in enumerate(view.segments):
        following = view.segments[at + 1] if at + 1 < len(view.segments) else None
        name = segment.path.rpartition("/")[2]
        if following is None:
            result.append(SegmentInfo(name, segment.base, view.end - 1, segment.size_bytes, None, active=True))
            continue
        # A segment names the one before it: when that is not this one, a file is gone.
        after = max(segment.base, following.header.previous_base)
        last = following.base - 1 if after == segment.base else after - 1
        result.append(SegmentInfo(name, segment.base, last, segment.size_bytes, following.header.time_before_unix_ms))
        if last < following.base - 1:
            result.append(SegmentInfo("missing", last + 1, following.base - 1, 0, None, missing=True))
    return result


def _index(files: Files, path: str, owner: bytes) -> list[RunInfo]:
    result = []
    for name in files.list(f"{path}/index"):
        try:
            data = files.read(f"{path}/index/{name}")
        except FileNotFoundError:
            continue  # merged while we were looking
        decoded = decode_run(data, owner)
        if decoded is not None:
            run = decoded[0]
            result.append(RunInfo(name, run.first, run.last, len(run.hashes), len(data)))
    return result


def _quarantined(item: Quarantined) -> QuarantineInfo:
    return QuarantineInfo(
        item.id,
        item.at_unix_ms,
        item.reason,
        item.key.from_zone,
        item.key.message_id,
        item.existing_offset,
        item.detail,
    )


def _size(files: Files, path: str) -> int:
    try:
        return files.size(path)
    except FileNotFoundError:
        return 0


def _consumers(files: Files, info: FolderInfo) -> list[ConsumerInfo]:
    records, _, problems = read_journal(files, CURSORS)
    info.problems += [f"{CURSORS}: {text}" for text in problems]
    cursors: dict[str, ConsumerCursor] = {}
    for record in records:
        cursor = cursor_from(record)
        cursors[cursor.spec.name] = cursor
    logs = {(log.stream, log.buffer): log for log in info.logs}
    return [
        _consumer(cursors[name], log)
        for name in sorted(cursors)
        if (log := logs.get((cursors[name].spec.stream, str(cursors[name].spec.buffer)))) is not None
    ]


def _consumer(cursor: ConsumerCursor, log: LogInfo) -> ConsumerInfo:
    missing = cursor.frontier.missing(log.end)
    return ConsumerInfo(
        cursor.spec.name,
        cursor.spec.stream,
        str(cursor.spec.buffer),
        cursor.spec.required,
        cursor.frontier.committed,
        list(cursor.frontier.ranges),
        None if log.error else sum(last - first + 1 for first, last in missing),
        cursor.log_id,
        cursor.created_unix_ms,
        cursor.retired_reason,
        cursor.log_id == log.log_id,
    )


def writer_of(path: Path) -> int | None:
    """Give the process that writes a folder, or None.

    The kernel's list of locks is read instead of trying the lock: even a moment of holding it could make a writer
    that is just starting give up.
    """
    try:
        lock = os.stat(path / "LOCK")
        with open("/proc/locks", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    wanted = f":{lock.st_ino}"
    for words in lines:
        if "FLOCK" in words and words[1] != "->" and words[5].endswith(wanted) and _same_device(words[5], lock):
            return int(words[4])
    return None


def _same_device(word: str, lock: os.stat_result) -> bool:
    major, minor, _ = word.split(":")
    return (int(major, 16), int(minor, 16)) == (os.major(lock.st_dev), os.minor(lock.st_dev))
