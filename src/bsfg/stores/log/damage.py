"""What a medium does to files, and what is made of it: reading around bad sectors, keeping aside what is of no use.

Damage is what stays so: bytes that cannot be read, a folder where a file should be. An error that passes, such as too
many open files, or that an operator can lift, such as a missing permission, is not damage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bsfg.disk import is_damage, is_folder
from bsfg.retention import GapReason, GapRecord
from bsfg.stores.log.files import Files, write_whole

__all__ = [
    "ABSENT",
    "PAUSE_SECONDS",
    "READS",
    "TORN_CUT",
    "adjoined",
    "is_damage",
    "is_folder",
    "is_torn_end",
    "keep_aside",
    "make_folder",
    "patiently",
    "put_aside",
    "readable",
    "uncovered",
]

_BLOCKS_BYTES = (1 << 20, 4_096)
ABSENT = (
    GapReason.EVICTED,
    GapReason.EXPIRED,
    GapReason.DAMAGED,
    GapReason.LOST,
    GapReason.TORN,
    GapReason.TRUNCATED,
)
"""The reasons for which entries are not there at all."""

READS, PAUSE_SECONDS = 3, 0.02
"""How often bytes are read that a medium does not give, and how long is waited in between."""

TORN_CUT = "torn bytes cut"
"""How a problem is called that is no damage."""

Answer = TypeVar("Answer")

Span = tuple[int, int]
"""A start and an end, exclusive."""


@dataclass(frozen=True, slots=True)
class DamageFinding:
    """One thing that is not as it was written: a stable code, where, what is wrong, and which entries or records."""

    code: str
    where: str
    detail: str
    first: int | None = None
    last: int | None = None


def is_torn_end(problem: str) -> bool:
    """Tell whether a problem, in words, is only the end that a crash leaves, which nobody was told to be stored."""
    return f" {TORN_CUT}" in problem


def patiently(read: Callable[[], Answer]) -> Answer:
    """Read, and again when the medium fails: a gap record is for ever, and a path may only just have changed over.

    System and drive have repeated it for a while before they say that bytes cannot be read, so few tries are enough.
    """
    for _ in range(READS - 1):
        try:
            return read()
        except OSError as error:
            if not is_damage(error) or is_folder(error):
                raise
        time.sleep(PAUSE_SECONDS)
    return read()


def readable(files: Files, path: str) -> tuple[bytes, list[str]]:
    """Read a file as far as its medium lets it; what cannot be read is zeros, and is named."""
    try:
        return bytes(files.read(path)), []
    except OSError as error:
        if not is_damage(error):
            raise
        try:
            size = files.size(path)
        except OSError:
            size = 0
        data = bytearray(size)
        bad = adjoined(_read_into(data, files, path, (0, size), _BLOCKS_BYTES))
        return bytes(data), [f"bytes {start} to {end - 1} cannot be read: {error.strerror}" for start, end in bad]


def _read_into(data: bytearray, files: Files, path: str, span: Span, blocks: Sequence[int]) -> Iterator[Span]:
    """Fill in what can be read, with ever smaller steps around what cannot, and give what could not."""
    for start in range(*span, blocks[0]):
        end = min(start + blocks[0], span[1])
        try:
            part = files.read_at(path, start, end - start)
        except OSError as error:
            if not is_damage(error):
                raise
            if len(blocks) > 1:
                yield from _read_into(data, files, path, (start, end), blocks[1:])
            else:
                yield start, end
            continue
        data[start : start + len(part)] = part


def adjoined(spans: Iterable[Span]) -> list[Span]:
    """Join ranges, ends exclusive, where one begins at the end of the one before it."""
    result: list[Span] = []
    for start, end in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result


def make_folder(files: Files, path: str) -> str | None:
    """Make a folder; something else in its place is put aside, and where to is given."""
    try:
        files.make_folder(path)
    except FileExistsError:
        kept = put_aside(files, path)
        files.make_folder(path)
        return kept
    return None


def put_aside(files: Files, path: str) -> str:
    """Move a file, or a folder in its place, out of the way into ``aside`` beside it; give its new path."""
    folder, _, name = path.rpartition("/")
    aside = f"{folder}/aside" if folder and name != "aside" else folder
    make_folder(files, aside)
    number = 1
    while files.exists(target := f"{aside}/{name}.{number}.unusable".lstrip("/")):
        number += 1
    files.rename(path, target)
    files.sync_folder(aside)
    files.sync_folder(folder)
    return target


def keep_aside(files: Files, path: str, start: int, data: bytes, kind: str) -> None:
    """Keep a copy of bytes that are about to be cut, or that are of no use where they are."""
    folder, _, name = path.rpartition("/")
    target = f"{folder}/aside/{name.removesuffix('.seg')}-{start}.{kind}"
    if data and not files.exists(target):
        make_folder(files, f"{folder}/aside")
        write_whole(files, target, data)


def uncovered(first: int, last: int, gaps: Iterable[GapRecord]) -> Iterator[tuple[int, int]]:
    """Give the ranges, inclusive, of a range that no gap record of this log accounts for yet."""
    at = first
    for gap in sorted((gap for gap in gaps if gap.origin_zone is None), key=lambda gap: gap.first):
        if gap.reason not in ABSENT or gap.last < at:
            continue
        if gap.first > last:
            break
        if gap.first > at:
            yield at, gap.first - 1
        at = max(at, gap.last + 1)
    if at <= last:
        yield at, last
