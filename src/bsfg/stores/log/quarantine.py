"""Refused facts, kept on disk until an operator decides: a folder of small journals, and an index of places in memory.

What is in memory is a few numbers per fact. Facts that are added together are there together or not at all. A file
goes when the last of its facts was released, and is written anew when most of them were.
"""

from __future__ import annotations

import struct
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import crc32c
import orjson

from bsfg.batch import FactBatch
from bsfg.errors import QuarantineFull
from bsfg.fact import Key
from bsfg.ports import UNREADABLE, Quarantined
from bsfg.stores.log.damage import PAUSE_SECONDS, READS, is_damage, readable
from bsfg.stores.log.files import Files, write_whole
from bsfg.stores.log.journal import Journal, Record, encode, record_at, sound_after
from bsfg.stores.shared.judging import Identity, identity_hash, identity_of, read_aside, told

SEGMENT_BYTES = 4 << 20
_REWRITE_ABOVE_BYTES = 64 << 10
_SUFFIX = ".journal"
_DIGITS = 8
_SIZES = struct.Struct("<II")


@dataclass(slots=True)
class _Place:
    """Where a fact is: the number of its file, and which bytes of it."""

    segment: int
    position: int
    size_bytes: int
    same: int


class Quarantine:
    """The refused facts of one log; one thread writes, any may read."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, f"{folder}/quarantine"
        self._places: dict[int, _Place] = {}
        self._ids = array("q")
        self._same: dict[int, int] = {}
        self._old: dict[int, Record] = {}
        self._live_bytes: dict[int, int] = {}
        self._file_bytes: dict[int, int] = {}
        self._active: Journal | None = None
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.full = False
        self.next_id = 1
        self.problems: list[str] = []

    def __len__(self) -> int:
        return len(self._ids)

    # Opening.

    def load(self, is_released: Callable[[int], bool], old: dict[int, Record]) -> None:
        """Find what is there; ``old`` are facts that an earlier version kept with the notes."""
        for id, record in sorted(old.items()):
            if not is_released(id):
                self._old[id] = record
                try:
                    same = identity_hash(identity_of(read_aside(*record)))
                except (KeyError, TypeError, ValueError) as error:  # Arrow's errors are of these, too
                    self.problems.append(f"the fact {id} in quarantine cannot be read, and is kept: {error}")
                    continue
                self._know(id, _Place(-1, 0, len(record.blob), same))
        for segment in self._segments():
            try:
                data, bad = readable(self._files, self._path(segment))
            except FileNotFoundError:
                continue  # all its facts were released just now
            self.problems += [f"{self._path(segment)}: {text}" for text in bad]
            self._file_bytes[segment] = len(data)
            for position, size, head in self._scan(segment, data):
                self.next_id = max(self.next_id, head["id"] + 1)
                if not is_released(head["id"]) and head["id"] not in self._places:
                    self._know(head["id"], _Place(segment, position, size, int(head["same"], 16)))

    def open(self) -> None:
        """Be ready to write, before anything is loaded: what the last file holds may be in the page cache alone."""
        segments = self._segments()
        if segments:
            self._active = self._opened(segments[-1])
            self.problems += [f"{self._path(segments[-1])}: {problem}" for problem in self._active.problems]

    def remove_empty(self) -> None:
        """Remove files that a crash left behind after the last of their facts was released."""
        for segment in list(self._file_bytes):
            if not self._live_bytes.get(segment):
                with suppress(OSError):
                    self._remove(segment)

    def close(self) -> None:
        """Release the file that is being written."""
        if self._active is not None:
            self._active.close()
            self._active = None

    def _scan(self, segment: int, data: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
        at = 0
        while at < len(data):
            found = record_at(data, at)
            if found is None:
                following = sound_after(data, at + 1)
                until = len(data) if following is None else following
                # A torn end of the last file was never acknowledged; it is cut when it is written to.
                if following is not None or segment != max(self._file_bytes):
                    self.problems.append(f"{self._path(segment)}: {until - at} damaged bytes at {at}")
                at = until
                continue
            record, size = found
            at += size - len(record.blob)
            for inner in record.head["aside"]:
                item = _decoded(data[at : at + inner])
                if item is not None:
                    yield at, inner, item.head
                at += inner

    def _know(self, id: int, place: _Place) -> None:
        with self._lock:
            self._places[id] = place
            if not self._ids or id > self._ids[-1]:
                self._ids.append(id)
            else:
                self._ids.insert(bisect_left(self._ids, id), id)
        self._same[place.same] = id
        self._live_bytes[place.segment] = self._live_bytes.get(place.segment, 0) + place.size_bytes
        self.used_bytes += place.size_bytes
        self.next_id = max(self.next_id, id + 1)

    # Reading.

    def __contains__(self, id: int) -> bool:
        return id in self._places

    def get(self, id: int) -> Quarantined | None:
        """Read one fact; None when it is not there, or not any more. One that cannot be read is named as that."""
        why = ""
        for _ in range(READS):
            with self._lock:
                place, old = self._places.get(id), self._old.get(id)
            if place is None:
                return None
            if old is not None:
                return read_aside(*old)
            where = f"{self._path(place.segment)} at byte {place.position}"
            try:
                data = self._files.read_at(self._path(place.segment), place.position, place.size_bytes)
            except OSError as error:
                if not (is_damage(error) or isinstance(error, FileNotFoundError)):
                    raise
                why = f"{where}: {error.strerror}"
                time.sleep(PAUSE_SECONDS)
                continue
            found = _decoded(data)
            # Where another fact is found the file was written anew meanwhile.
            if found is not None and found.head["id"] == id:
                return read_aside(*found)
            why = f"{where}: the fact fails its CRC"
        nothing = FactBatch.of_rows([], sealed=True)
        return Quarantined(id, 0, UNREADABLE, Key("", ""), -1, nothing, why)

    def page(self, after: int | None, limit: int, newest_first: bool = False) -> list[Quarantined]:
        """Read the facts that follow an id, in the order in which they came or the other way round.

        Fewer than ``limit`` are given only when no more follow.
        """
        page: list[Quarantined] = []
        while len(page) < limit and (ids := self._ids_after(after, limit - len(page), newest_first)):
            page += [item for id in ids if (item := self.get(id)) is not None]
            after = ids[-1]
        return page

    def _ids_after(self, after: int | None, limit: int, newest_first: bool) -> array[int]:
        with self._lock:
            if newest_first:
                stop = len(self._ids) if after is None else bisect_left(self._ids, after)
                return self._ids[max(0, stop - limit) : stop][::-1]
            start = 0 if after is None else bisect_right(self._ids, after)
            return self._ids[start : start + limit]

    def all(self) -> Iterator[Quarantined]:
        """Read everything, a page at a time."""
        after: int | None = None
        while page := self.page(after, 256):
            yield from page
            after = page[-1].id

    def old_records(self) -> list[Record]:
        """Give what is still kept with the notes."""
        return list(self._old.values())

    # Writing.

    def add(self, items: Sequence[Quarantined], capacity_bytes: int) -> None:
        """Keep facts durably, those already there left out; raises `QuarantineFull` when they do not fit."""
        fresh: list[tuple[Quarantined, int]] = []
        seen: set[Identity] = set()
        for item in items:
            identity = identity_of(item)
            same = identity_hash(identity)
            if identity in seen or self._has(identity, same):
                continue
            seen.add(identity)
            fresh.append((replace(item, id=self.next_id + len(fresh)), same))
        encoded = [(item.id, same, _encoded(Record(*told(item, same)))) for item, same in fresh]
        incoming = sum(len(data) for _, _, data in encoded)
        self.full = bool(incoming) and self.used_bytes + incoming > capacity_bytes
        if self.full:
            raise QuarantineFull(
                f"{len(encoded)} refused facts of {incoming} bytes do not fit into quarantine, which holds "
                f"{self.used_bytes} of {capacity_bytes} bytes",
                used_bytes=self.used_bytes,
                capacity_bytes=capacity_bytes,
            )
        while encoded:
            count = _count_within(encoded, SEGMENT_BYTES)
            self._append(encoded[:count])
            encoded = encoded[count:]

    def _has(self, identity: Identity, same: int) -> bool:
        known = self._same.get(same)
        item = self.get(known) if known is not None else None
        return item is not None and item.reason != UNREADABLE and identity_of(item) == identity

    def _append(self, encoded: Sequence[tuple[int, int, bytes]]) -> None:
        segment = max(self._file_bytes, default=0)
        if self._active is None or self._file_bytes[segment] >= SEGMENT_BYTES:
            self.close()
            segment = segment if self._file_bytes.get(segment, SEGMENT_BYTES) < SEGMENT_BYTES else segment + 1
            self._active = self._opened(segment)
        record = Record({"aside": [len(data) for _, _, data in encoded]}, b"".join(data for _, _, data in encoded))
        size = len(encode(record))
        self._active.append([record])
        at = self._file_bytes[segment] + size - len(record.blob)
        self._file_bytes[segment] += size
        for id, same, data in encoded:
            self._know(id, _Place(segment, at, len(data), same))
            at += len(data)

    def _opened(self, segment: int) -> Journal:
        if not self._files.exists(self._folder):
            self._files.make_folder(self._folder)
            self._files.sync_folder(self._folder.rpartition("/")[0])
        journal = Journal(self._files, self._path(segment), lambda: ())
        journal.open()
        self._file_bytes[segment] = self._files.size(self._path(segment))
        return journal

    def forget(self, id: int) -> None:
        """Let a fact go whose release is durable."""
        with self._lock:
            place = self._places.pop(id)
            self._ids.pop(bisect_left(self._ids, id))
            self._old.pop(id, None)
        self._same.pop(place.same, None)
        self.used_bytes -= place.size_bytes
        self.full = False
        self._live_bytes[place.segment] -= place.size_bytes
        if place.segment < 0 or (self._active is not None and place.segment == max(self._file_bytes)):
            return
        if not self._live_bytes[place.segment]:
            # What cannot be removed now is removed at the next start: its release is durable.
            with suppress(OSError):
                self._remove(place.segment)
        elif self._file_bytes[place.segment] > max(_REWRITE_ABOVE_BYTES, 2 * self._live_bytes[place.segment]):
            self._rewrite(place.segment)

    def _remove(self, segment: int) -> None:
        # The number of the last file must not come back with other facts while a reader still has the old one.
        if segment == max(self._file_bytes):
            return
        self._files.remove(self._path(segment))
        self._live_bytes.pop(segment, None)
        self._file_bytes.pop(segment, None)

    def _rewrite(self, segment: int) -> None:
        """Write a file anew with what is left of it; where that fails, either file holds all that is left."""
        path = self._path(segment)
        places = [place for place in self._places.values() if place.segment == segment]
        try:
            parts = [self._files.read_at(path, place.position, place.size_bytes) for place in places]
        except OSError:
            return  # what cannot be read must not go with what can
        with suppress(OSError):
            record = Record({"aside": [len(part) for part in parts]}, b"".join(parts))
            write_whole(self._files, path, encode(record))
        data, _ = readable(self._files, path)
        with self._lock:
            for position, size, head in self._scan(segment, data):
                known = self._places.get(head["id"])
                if known is not None:
                    self._places[head["id"]] = replace(known, position=position, size_bytes=size)
        self._file_bytes[segment] = len(data)

    # Files.

    def _segments(self) -> list[int]:
        names = self._files.list(self._folder)
        numbers = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        # A copy that somebody made beside them is none of ours.
        return sorted(int(number) for number in numbers if number.isdecimal() and len(number) >= _DIGITS)

    def _path(self, segment: int) -> str:
        return f"{self._folder}/{segment:0{_DIGITS}d}{_SUFFIX}"


def copy_quarantine(source: Quarantine, target: Files, folder: str, end: int) -> list[str]:
    """Write the facts that speak of nothing from the offset ``end`` on into the folder of another log.

    Gives where those were that cannot be read.
    """
    unreadable: list[str] = []

    def kept() -> Iterator[Record]:
        for item in source.all():
            if item.reason == UNREADABLE:
                unreadable.append(item.detail)
            elif item.existing_offset < end:
                yield Record(*told(item, identity_hash(identity_of(item))))

    write_records(target, folder, kept())
    return unreadable


def write_records(target: Files, folder: str, records: Iterable[Record]) -> None:
    """Write refused facts into the folder of a log that nobody has opened, in the place of those that are there."""
    target.make_folder(f"{folder}/quarantine")
    for name in target.list(f"{folder}/quarantine"):
        target.remove(f"{folder}/quarantine/{name}")
    parts: list[bytes] = []
    number, size = 1, 0

    def write() -> None:
        record = Record({"aside": [len(part) for part in parts]}, b"".join(parts))
        write_whole(target, f"{folder}/quarantine/{number:08d}{_SUFFIX}", encode(record))

    for each in records:
        parts.append(_encoded(each))
        size += len(parts[-1])
        if size >= SEGMENT_BYTES:
            write()
            parts, number, size = [], number + 1, 0
    if parts:
        write()
    target.sync_folder(f"{folder}/quarantine")


def _encoded(record: Record) -> bytes:
    """Write one fact inside a group; without a mark of its own, so that nobody takes it for a record of a journal."""
    head = orjson.dumps(record.head)
    body = _SIZES.pack(len(head), len(record.blob)) + head + record.blob
    return crc32c.crc32c(body).to_bytes(4, "little") + body


def _decoded(data: bytes) -> Record | None:
    """Read one fact of a group; None when it is damaged."""
    body = memoryview(data)[4:]
    if len(body) < _SIZES.size or crc32c.crc32c(body).to_bytes(4, "little") != data[:4]:
        return None
    head_bytes, blob_bytes = _SIZES.unpack_from(body)
    if len(body) != _SIZES.size + head_bytes + blob_bytes:
        return None
    split = 4 + _SIZES.size + head_bytes
    return Record(orjson.loads(data[4 + _SIZES.size : split]), data[split:])


def _count_within(encoded: Sequence[tuple[int, int, bytes]], max_bytes: int) -> int:
    total = 0
    for count, (_, _, data) in enumerate(encoded):
        total += len(data)
        if total > max_bytes:
            return max(1, count)
    return len(encoded)
