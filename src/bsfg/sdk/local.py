"""Local reads: a zone's buffers, straight from its folder, whether its node is alive, dead or being replaced."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from bsfg.batch import EntryBatch
from bsfg.errors import InvalidArgument, StorageFailed, UnknownStream
from bsfg.fact import Entry, Key
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.sdk.artifacts import ArtifactReader
from bsfg.sdk.signing import TrustedKeys
from bsfg.stores.artifacts.transfer import stored_pieces
from bsfg.stores.log.files import translated
from bsfg.stores.log.notes import boot_id, read_watermark
from bsfg.stores.log.reader import LogFolder, open_folder, unrecorded
from bsfg.stores.log.segments import SegmentFile, read_segment_header, segment_bases, segment_name
from bsfg.stores.log.view import LogView
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, Damaged, Torn, decode_frame_header

STEP_FACTS = 10_000


class Tail:
    """A reader's place in a log.

    Looking at a whole log costs time that grows with it, so the segment that is being written is remembered and only
    hopped along. Whatever is out of the ordinary there (a hole, damage, a file that left) is left to the full look.
    """

    def __init__(self, log: LogFolder, position: int | None = None) -> None:
        self.log = log
        self.position = position
        self._segment: SegmentFile | None = None
        self._stamp: object = None

    def frames(self) -> Iterator[Frame]:
        """Give everything that became durable since the last time; from the first retained entry at the beginning."""
        try:
            end = self._durable_end()
            if end is None:
                return
            if self._segment is not None and self.position is not None:
                yield from self._hop(end)
            if self.position is None or self.position < end:
                yield from self._look()
        except OSError as error:
            raise translated(error, f"reading {self.log.path}") from None

    def _durable_end(self) -> int | None:
        """Give how far the log is durable, None when nothing can have changed since the last look."""
        files, path = self.log.files, self.log.path
        watermark = read_watermark(files, path)
        if watermark is not None and watermark[0] == boot_id():
            return None if watermark[1] == self.position else watermark[1]
        # Nobody wrote since the machine was started: the files themselves say where the log ends.
        names = segment_bases(files, path)
        stamp = (names, files.size(f"{path}/{segment_name(names[-1])}") if names else 0)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        return self.log.view().end

    def _look(self) -> Iterator[Frame]:
        """Read through the full view of the log, and remember its last segment."""
        view = self.log.view()
        if self.position is not None and self.position > view.end:
            # The log was replaced by an older copy; what was read is not there any more.
            self.position = view.end
        first = view.start if self.position is None else self.position
        for frame in self.log.frames(first, view.end, STEP_FACTS):
            yield frame
            self.position = frame.last + 1
        self.position = max(first, view.end) if self.position is None else self.position
        self._segment = None
        last = view.segments[-1] if view.segments else None
        if last is not None and self.position == view.end and (not last.frames or last.frames[-1].end == view.end):
            self._segment = last
            last.size_bytes = last.frames[-1].position + last.frames[-1].header.frame_bytes if last.frames else 0
            last.size_bytes = last.size_bytes or last.header.size_bytes

    def _hop(self, end: int) -> Iterator[Frame]:
        """Find the new frames of the remembered segment, and those of the segments that followed it."""
        while self.position is not None and self.position < end:
            assert self._segment is not None
            if not self._extend(self._segment, end) and not self._followed(end):
                self._segment = None
                return
            view = LogView((self._segment,), self._segment.base, end, (), unrecorded)
            stop = min(end, self._segment.frames[-1].end) if self._segment.frames else self.position
            try:
                for frame in view.frames(self.position, stop, STEP_FACTS):
                    if frame.entries is None:
                        self._segment = None
                        return
                    yield frame
                    self.position = frame.last + 1
            except FileNotFoundError:
                self._segment = None
                return

    def _extend(self, segment: SegmentFile, end: int) -> bool:
        """Take note of the frames that were added to a segment; tell whether there are any."""
        found = False
        while self.position is not None:
            expected = segment.frames[-1].end if segment.frames else segment.base
            if expected >= end:
                break
            try:
                data = segment.files.read_at(segment.path, segment.size_bytes, FRAME_HEADER_BYTES)
                header = decode_frame_header(data)
            except (Torn, Damaged, FileNotFoundError):
                break
            if header.base != expected or header.end > end or header.log_id != segment.header.log_id:
                break
            segment.frames.append(segment.size_bytes, data)
            segment.size_bytes += header.frame_bytes
            found = True
        return found

    def _followed(self, end: int) -> bool:
        """Go on to the segment that begins where this one ends; tell whether there is one with frames."""
        path = f"{self.log.path}/{segment_name(self.position or 0)}"
        try:
            header = read_segment_header(self.log.files, path)
        except (Torn, Damaged, FileNotFoundError):
            return False
        segment = SegmentFile(self.log.files, path, header, header.size_bytes)
        segment.know_empty()
        if not self._extend(segment, end):
            return False
        self._segment = segment
        return True


log = logging.getLogger("bsfg.local")

POLL_SECONDS = 0.05

Subject = tuple[str, str]
"""A subject and a predicate."""


class _Latest:
    """The latest entry of each subject and predicate of one log, at most so many of them."""

    def __init__(self, folder: LogFolder, max_latest: int) -> None:
        self.folder, self._max_latest = folder, max_latest
        self._tail = Tail(folder)
        self._known: OrderedDict[Subject, Entry] = OrderedDict()
        self._evicted = False
        self._complete = False
        self.gaps: list[GapRecord] = []

    def refresh(self) -> None:
        """Take in what became durable since the last time, and at first what was kept of what has left."""
        for frame in self._tail.frames():
            if frame.entries is None:
                assert frame.gap is not None
                self.gaps = [*self.gaps[-999:], frame.gap]
                self._complete = False
            else:
                self._absorb(frame.entries)
        if not self._complete:
            # After the log: what left while it was read was kept before it did.
            self._absorb_older(self._kept())
            self._complete = True

    def _kept(self) -> EntryBatch:
        """Give what was kept of what has left; when that cannot be read, what the log itself has still counts."""
        try:
            return self.folder.latest()
        except StorageFailed as error:
            last = max(0, self.folder.view().start - 1)
            self.gaps = [*self.gaps[-999:], GapRecord(0, last, GapReason.DAMAGED, 0, error.message)]
            return EntryBatch.empty()

    def _absorb_older(self, kept: EntryBatch) -> None:
        """Take in entries that may be older than those that are known, oldest first in the order of memory."""
        older = [
            entry
            for entry in kept.to_entries()
            if (known := self._known.get((entry.message.fact.subject, entry.message.fact.predicate))) is None
            or known.offset < entry.offset
        ]
        for entry in reversed(older):
            pair = (entry.message.fact.subject, entry.message.fact.predicate)
            if len(self._known) >= self._max_latest and pair not in self._known:
                self._evicted = True
                continue
            self._known[pair] = entry
            self._known.move_to_end(pair, last=False)

    def _absorb(self, entries: EntryBatch) -> None:
        pairs = zip(entries.values("subject"), entries.values("predicate"), strict=True)
        rows = {pair: row for row, pair in enumerate(pairs)}
        chosen = sorted(rows.values())
        for entry in entries.take(chosen).to_entries() if len(chosen) < len(entries) else entries.to_entries():
            pair = (entry.message.fact.subject, entry.message.fact.predicate)
            self._known[pair] = entry
            self._known.move_to_end(pair)
        while len(self._known) > self._max_latest:
            self._known.popitem(last=False)
            self._evicted = True

    def of(self, subject: str, predicate: str) -> Entry | None:
        """Give the latest entry of a subject and predicate; one that fell out of memory is searched for."""
        found = self._known.get((subject, predicate))
        if found is None and self._evicted:
            found = self._searched(subject, predicate)
        return found

    def all(self) -> dict[Subject, Entry]:
        """Give the latest entries, those that were stored last at the end."""
        if self._evicted:
            raise InvalidArgument(
                f"there are more than {self._max_latest} subjects and predicates",
                hint="Allow more with max_latest, or ask for them one by one.",
            )
        return dict(self._known)

    def _searched(self, subject: str, predicate: str) -> Entry | None:
        def fits(entries: EntryBatch) -> np.ndarray:
            same = pc.and_(
                pc.equal(entries.column("subject"), subject), pc.equal(entries.column("predicate"), predicate)
            )
            return np.flatnonzero(same.to_numpy(zero_copy_only=False))

        found = last_fitting(self.folder, fits)
        if found is None:
            kept = self._kept()
            rows = fits(kept)
            found = kept.slice(int(rows[-1]), 1).to_entries()[0] if len(rows) else None
        return found


class LocalReader:
    """Reads a zone's data folder; any number of readers may do so, in any process, beside the node or without it.

    By default it reads the forward buffers: what other zones sent. ``max_latest`` bounds the memory of `latest`: how
    many subjects and predicates are remembered per stream. ``keys`` demands signatures, as in a `Consumer`. Gap records
    go to ``on_gap``, or are logged. ``artifacts`` is the folder of artifacts where it is not inside this one. A reader
    may be used from several threads.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        buffer: Buffer = Buffer.FORWARD,
        max_latest: int = 100_000,
        keys: TrustedKeys | None = None,
        on_gap: Callable[[GapRecord], None] | None = None,
        artifacts: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_latest < 1:
            raise InvalidArgument("at least one subject must be remembered")
        self.folder, self._buffer, self._max_latest = folder, buffer, max_latest
        self._keys, self._on_gap = keys, on_gap
        self._artifacts = Path(folder) / "artifacts" if artifacts is None else artifacts
        self._latest: dict[str, _Latest] = {}
        self._lock = threading.RLock()
        open_folder(folder)

    # The last known state.

    def latest(self, subject: str, predicate: str, *, stream: str | None = None) -> Entry | None:
        """Give the newest entry of a subject and predicate, None when none is known.

        It is the newest of those that are retained, that the stream keeps beyond its retention (``keep_latest``) or
        that this reader has seen; `LocalReader.age_seconds` tells how old it is. Without ``stream`` all are looked at,
        and the one that became durable here last counts.
        """
        with self._lock:
            found = [
                (self._refreshed(folder).of(subject, predicate), folder.stream) for folder in self._folders(stream)
            ]
        newest = max(
            ((entry, name) for entry, name in found if entry is not None),
            key=lambda each: (each[0].appended_at_unix_ms, each[0].offset),
            default=None,
        )
        return None if newest is None else self._checked(*newest)

    def age_seconds(self, entry: Entry) -> float:
        """Tell how old an entry is now, by this machine's clock; see `Entry.age_seconds`."""
        return entry.age_seconds(time.time_ns() // 1_000_000)

    def latest_all(self, *, stream: str | None = None) -> dict[Subject, Entry]:
        """Give the newest entry of every subject and predicate."""
        result: dict[Subject, Entry] = {}
        with self._lock:
            for folder in self._folders(stream):
                for pair, entry in self._refreshed(folder).all().items():
                    known = result.get(pair)
                    if known is None or entry.appended_at_unix_ms >= known.appended_at_unix_ms:
                        result[pair] = self._checked(entry, folder.stream)
        return result

    def refresh(self, *, stream: str | None = None) -> None:
        """Take in what became durable; `latest` does it by itself, and the first time may take a while."""
        with self._lock:
            for folder in self._folders(stream):
                self._refreshed(folder)

    @property
    def gaps(self) -> list[GapRecord]:
        """The ranges that `latest` found missing, such as damaged ones: a newer fact may have been there."""
        with self._lock:
            return [gap for latest in self._latest.values() for gap in latest.gaps]

    @property
    def artifacts(self) -> ArtifactReader:
        """The artifacts that entries refer to, from the folder: ``reader.artifacts.read(entry)``."""
        return ArtifactReader(partial(stored_pieces, self._artifacts))

    # History.

    def streams(self) -> list[str]:
        """List the streams that have a log of this buffer here."""
        return [folder.stream for folder in self._folders(None)]

    def get(self, key: Key, *, stream: str | None = None) -> Entry | None:
        """Give the entry of a key, None when it is not retained; the log is searched from its end."""

        def fits(entries: EntryBatch) -> np.ndarray:
            same = pc.and_(
                pc.equal(entries.column("message_id"), key.message_id),
                pc.equal(entries.column("from_zone"), key.from_zone),
            )
            return np.flatnonzero(same.to_numpy(zero_copy_only=False))

        for folder in self._folders(stream):
            found = last_fitting(folder, fits)
            if found is not None:
                return self._checked(found, folder.stream)
        return None

    def items(self, stream: str, start: int | None = None, end: int | None = None) -> Iterator[Entry | GapRecord]:
        """Give entries and gap records from ``start`` (the first retained one) up to ``end`` (exclusive, the end)."""
        for frame in self._one(stream).frames(start, end, STEP_FACTS):
            yield from self._items_of(frame, stream)

    def entries(self, stream: str, start: int | None = None, end: int | None = None) -> Iterator[Entry]:
        """Give the entries alone; gap records go to ``on_gap``, or are logged."""
        return self._only_entries(self.items(stream, start, end))

    def follow(self, stream: str, start: int | None = None, *, idle_seconds: float | None = None) -> Iterator[Entry]:
        """Give the entries from ``start`` (the present end) on as they become durable.

        It goes on for ever, or until nothing came for ``idle_seconds``.
        """
        return self._only_entries(self._followed(stream, start, idle_seconds))

    def _followed(self, stream: str, start: int | None, idle_seconds: float | None) -> Iterator[Entry | GapRecord]:
        folder = self._one(stream)
        tail = Tail(folder, folder.view().end if start is None else start)
        last = time.monotonic()
        while True:
            for frame in tail.frames():
                yield from self._items_of(frame, stream)
                last = time.monotonic()
            if idle_seconds is not None and time.monotonic() - last >= idle_seconds:
                return
            time.sleep(POLL_SECONDS if idle_seconds is None else min(POLL_SECONDS, idle_seconds))

    # What they share.

    def _folders(self, stream: str | None) -> list[LogFolder]:
        found = [
            each for each in open_folder(self.folder) if each.buffer == self._buffer and stream in (None, each.stream)
        ]
        if stream is not None and not found:
            raise UnknownStream(f"{self.folder} has no {self._buffer} buffer of {stream!r}", stream=stream)
        return found

    def _one(self, stream: str) -> LogFolder:
        return self._folders(stream)[0]

    def _refreshed(self, folder: LogFolder) -> _Latest:
        latest = self._latest.get(folder.stream)
        if latest is None:
            latest = self._latest[folder.stream] = _Latest(folder, self._max_latest)
        latest.refresh()
        return latest

    def _items_of(self, frame: Frame, stream: str) -> Iterator[Entry | GapRecord]:
        if frame.entries is not None:
            for entry in frame.entries.to_entries():
                yield self._checked(entry, stream)
        elif frame.gap is not None:
            yield frame.gap

    def _only_entries(self, items: Iterator[Entry | GapRecord]) -> Iterator[Entry]:
        for item in items:
            if isinstance(item, Entry):
                yield item
            elif self._on_gap is not None:
                self._on_gap(item)
            else:
                log.warning("offsets %d to %d are not there: %s %s", item.first, item.last, item.reason, item.detail)

    def _checked(self, entry: Entry, stream: str) -> Entry:
        if self._keys is not None:
            self._keys.verify(entry, stream)
        return entry


def last_fitting(folder: LogFolder, fits: Callable[[EntryBatch], np.ndarray]) -> Entry | None:
    """Search a log from its end for the last entry that fits."""
    view = folder.view()
    end = view.end
    while end > view.start:
        start = max(view.start, end - STEP_FACTS)
        for frame in reversed(list(folder.frames(start, end, STEP_FACTS))):
            rows = fits(frame.entries) if frame.entries is not None else np.zeros(0, np.int64)
            if frame.entries is not None and len(rows):
                return frame.entries.slice(int(rows[-1]), 1).to_entries()[0]
        end = start
    return None
