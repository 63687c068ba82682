"""Opening a log: find what is sound, cut what was torn, name what is damaged or lost, and never reuse an offset."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np

from bsfg.batch import FactBatch
from bsfg.hashing import KeyHash
from bsfg.ports import Buffer, Clock, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.log.atomic import write_whole
from bsfg.stores.log.files import Files
from bsfg.stores.log.frame import (
    FRAME_MAGIC,
    Damaged,
    SegmentHeader,
    Torn,
    encode_segment_header,
    genesis,
)
from bsfg.stores.log.identity import LogIdentity, identity_from_segments, read_identity, write_identity
from bsfg.stores.log.indexstore import IndexStore
from bsfg.stores.log.keysegments import KeySegments, as_facts, listed
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.segments import (
    Scan,
    SegmentFile,
    check_owner,
    read_segment_header,
    scan_segment,
    segment_bases,
    segment_name,
)
from bsfg.stores.log.state import LogState
from bsfg.stores.log.watermark import boot_id, read_watermark
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA, LogOptions


class Recovery:
    """One opening of one log."""

    def __init__(self, files: Files, folder: str, buffer: Buffer, *, options: LogOptions, clock: Clock) -> None:
        self._files, self._folder, self._buffer = files, folder, buffer
        self._options, self._clock = options, clock
        self._schema = STORE_SCHEMA if buffer == Buffer.STORE else FORWARD_SCHEMA
        self.problems: list[str] = []
        self._gaps: list[GapRecord] = []
        self._named = 0

    def run(self, floor: int) -> LogState:
        """Open the log; ``floor`` is the offset after the highest one that any consumer has confirmed."""
        files, folder = self._files, self._folder
        for name in ("", "/keys", "/index", "/aside"):
            files.make_folder(folder + name)
        identity = self._identity()
        notes = Notes(files, folder)
        notes.open()
        self.problems += [f"notes: {text}" for text in notes.problems]
        segments = self._segments(identity)
        self._find_missing(segments, notes)
        chain, newest, end = genesis(identity.log_id), 0, notes.start
        scan = None
        if segments:
            scan = self._scan_active(segments[-1], notes)
            chain = scan.chain or segments[-1].header.chain_before
            times = [ref.header.appended_at_unix_ms for ref in scan.frames[-1:]]
            newest = max([segments[-1].header.time_before_unix_ms, *times])
            end = max(scan.end, segments[-1].base)
        end = self._never_reuse(end, floor, notes)
        # The reason for a range without entries is durable before anything is written behind it.
        notes.add_gaps(self._gaps)
        if not segments or end > max(scan.end if scan else -1, segments[-1].base):
            segments.append(self._fresh_segment(identity.log_id, end, chain, newest, segments))
            scan = None
        files.sync_folder(folder)
        keys = KeySegments(files, folder)
        self._check_keys(notes, keys)
        index = self._index(identity, segments, keys, scan, end, chain)
        index.forget_before(notes.keys_start)
        return LogState(
            folder,
            identity.log_id,
            identity.secret,
            segments,
            end,
            chain,
            newest,
            notes,
            keys,
            index,
            self.problems,
        )

    def _identity(self) -> LogIdentity:
        found = read_identity(self._files, self._folder)
        if found is not None:
            return found
        identity = identity_from_segments(self._files, self._folder)
        if identity is not None:
            self.problems.append("log.json was missing or damaged; the id was taken from a segment")
        else:
            identity = LogIdentity(secrets.token_bytes(16), secrets.token_bytes(32))
        write_identity(self._files, self._folder, identity)
        return identity

    def _segments(self, identity: LogIdentity) -> list[SegmentFile]:
        bases = segment_bases(self._files, self._folder)
        result = []
        for base in bases:
            path = f"{self._folder}/{segment_name(base)}"
            size = self._files.size(path)
            try:
                header = read_segment_header(self._files, path)
            except (Torn, Damaged) as problem:
                if base == bases[-1] and FRAME_MAGIC not in bytes(self._files.read(path)):
                    # A crash while the segment was being made: nothing in it was ever acknowledged.
                    self._set_aside(path, 0, size, "torn")
                    self._files.remove(path)
                    self._named = base
                    continue
                self.problems.append(f"{path}: {problem}")
                header = self._substitute_header(path, base, identity.owner_at(base))
            check_owner(header, identity.owner_at(base), path)
            result.append(SegmentFile(self._files, path, header, size))
        return result

    def _substitute_header(self, path: str, base: int, log_id: bytes) -> SegmentHeader:
        """Stand in for a damaged segment header, so that the sound frames behind it can be read."""
        at = bytes(self._files.read(path)).find(FRAME_MAGIC)
        size = at if at >= 0 else self._files.size(path)
        return SegmentHeader(log_id, base, -1, b"", 0, self._schema, size)

    def _find_missing(self, segments: list[SegmentFile], notes: Notes) -> None:
        """Name the ranges whose segment files are gone although nobody truncated them."""
        known = {segment.base for segment in segments}
        expected = notes.start
        for segment in segments:
            previous = segment.header.previous_base
            if previous >= 0 and previous not in known and segment.base > expected:
                self._lose(max(previous, expected), segment.base - 1, "the segment file is missing", notes)
            expected = max(expected, segment.base)

    def _lose(self, first: int, last: int, why: str, notes: Notes) -> None:
        covered = any(
            gap.first <= first and gap.last >= last and gap.origin_zone is None for gap in [*notes.gaps, *self._gaps]
        )
        if first <= last and not covered:
            self.problems.append(f"entries {first} to {last}: {why}")
            self._gaps.append(GapRecord(first, last, GapReason.LOST, self._clock.now_unix_ms(), why))

    def _scan_active(self, active: SegmentFile, notes: Notes) -> Scan:
        """Check every frame of the last segment, cut a torn tail, and make what stays durable."""
        data = bytes(self._files.read(active.path))
        scan = scan_segment(data, active.header, tail_may_be_torn=True)
        for hole in scan.holes:
            self.problems.append(f"{active.path}: entries {hole.first} to {hole.last}: {hole.why}")
            self._set_aside(active.path, hole.position, hole.size_bytes, "damaged")
            if hole.first <= hole.last:
                reason = GapReason.DAMAGED
                self._gaps.append(GapRecord(hole.first, hole.last, reason, self._clock.now_unix_ms(), hole.why))
        if scan.torn_range is not None:
            first, last = scan.torn_range
            why = f"the last frame before a crash is not whole: {scan.torn}"
            self._gaps.append(GapRecord(first, last, GapReason.TORN, self._clock.now_unix_ms(), why))
        notes.add_gaps(self._gaps)
        if scan.sound_bytes < len(data):
            self._set_aside(active.path, scan.sound_bytes, len(data) - scan.sound_bytes, "torn")
            self.problems.append(f"{active.path}: {len(data) - scan.sound_bytes} torn bytes cut: {scan.torn}")
        self._settle(active.path, data, scan)
        active.size_bytes = scan.sound_bytes
        active.know(scan)
        return scan

    def _settle(self, path: str, data: bytes, scan: Scan) -> None:
        """Make the sound part of the active segment durable, and nothing else.

        Frames that the last writer did not see synced may be in the page cache alone, and so may the header of a
        segment that it was about to begin. When its sync failed, the system takes them for written and no further sync
        would write them, so the segment is written anew.
        """
        watermark = read_watermark(self._files, self._folder)
        if watermark is None or (watermark[0] == boot_id() and watermark[1:] != (scan.end, scan.sound_bytes)):
            write_whole(self._files, path, memoryview(data)[: scan.sound_bytes])
            return
        file = self._files.open_append(path)
        try:
            if scan.sound_bytes < len(data):
                file.truncate(scan.sound_bytes)
            file.sync()
        finally:
            file.close()

    def _set_aside(self, path: str, start: int, count: int, kind: str) -> None:
        """Keep bytes that are about to be cut or that cannot be read."""
        if not count:
            return
        name = path.rpartition("/")[2].removesuffix(".seg")
        target = f"{self._folder}/aside/{name}-{start}.{kind}"
        if not self._files.exists(target):
            write_whole(self._files, target, self._files.read_at(path, start, count))

    def _never_reuse(self, end: int, floor: int, notes: Notes) -> int:
        """Go on behind everything that anyone has ever seen, and name what was seen but is not there."""
        watermark = read_watermark(self._files, self._folder)
        own = [gap.last + 1 for gap in [*notes.gaps, *self._gaps] if gap.origin_zone is None]
        # The names of files tell, too, how far the log has been, whatever has become of their content.
        own += [self._named, *(name.last + 1 for name in listed(self._files, self._folder))]
        target = max([end, floor, notes.start, *own, watermark[1] if watermark else 0])
        if target > end:
            self._lose(end, target - 1, "acknowledged before, but not in the log", notes)
        return target

    def _fresh_segment(
        self, log_id: bytes, base: int, chain: bytes, newest: int, segments: list[SegmentFile]
    ) -> SegmentFile:
        previous = segments[-1].base if segments else -1
        path = f"{self._folder}/{segment_name(base)}"
        header = SegmentHeader(log_id, base, previous, chain, newest, self._schema)
        data = encode_segment_header(header)
        file = self._files.create(path)
        try:
            file.write([data])
            file.sync()
        finally:
            file.close()
        segment = SegmentFile(self._files, path, replace(header, size_bytes=len(data)), len(data))
        segment.know_empty()
        return segment

    def _check_keys(self, notes: Notes, keys: KeySegments) -> None:
        for anchor in notes.anchors:
            if anchor.first < notes.keys_start or anchor.last < anchor.first:
                continue
            name = keys.covering(anchor.first)
            if name is None or keys.table(name) is None:
                self.problems.append(f"the keys of entries {anchor.first} to {anchor.last} are missing or damaged")

    def _index(
        self,
        identity: LogIdentity,
        segments: list[SegmentFile],
        keys: KeySegments,
        scan: Scan | None,
        end: int,
        chain: bytes,
    ) -> IndexStore:
        """Load the key index and add what it lacks from key segments and log."""
        options = self._options
        store = IndexStore(
            self._files, self._folder, identity.index_owner, options.index_memory_bytes, options.index_run_keys
        )
        chain_at = {ref.base: ref.header.chain_before for ref in scan.frames} if scan else {}
        start = keys.names[0].first if keys.names else segments[0].base
        missing_from = store.load(start, end, segments[-1].base, {**chain_at, end: chain})
        hasher = KeyHash(identity.secret)
        for name in keys.names:
            table = keys.table(name)
            if table is not None and name.last >= missing_from:
                offsets = table.column("offset").to_numpy()
                after = np.flatnonzero(offsets >= missing_from)
                _add_keys(store, hasher, as_facts(table).take(after), offsets[after], name.last + 1, chain)
                missing_from = name.last + 1
        self._index_segments(store, hasher, segments, missing_from, end, chain)
        return store

    def _index_segments(
        self,
        store: IndexStore,
        hasher: KeyHash,
        segments: list[SegmentFile],
        missing_from: int,
        end: int,
        chain: bytes,
    ) -> None:
        ends = [segment.base for segment in segments[1:]] + [end]
        for segment, until in zip(segments, ends, strict=True):
            if until <= missing_from:
                continue
            for ref in segment.frames:
                if ref.end <= missing_from:
                    continue
                try:
                    facts = segment.entries(ref).facts
                except (Torn, Damaged) as damage:
                    self.problems.append(f"{segment.path}: entries {ref.base} to {ref.end - 1}: {damage}")
                    continue
                _add_keys(
                    store, hasher, facts, np.arange(ref.base, ref.end), ref.end, _chain_after(segment, ref.end, chain)
                )


def _chain_after(segment: SegmentFile, end: int, head: bytes) -> bytes:
    """Give the chain value at the end of a frame: what the next frame says of it, or the head of the log."""
    index = segment.frame_index(end)
    ref = segment.frames[index]
    return ref.header.chain_before if ref.base == end else head


def _add_keys(
    store: IndexStore, hasher: KeyHash, facts: FactBatch, offsets: np.ndarray, end: int, chain: bytes
) -> None:
    if not len(offsets):
        return
    hashes = hasher.of(facts.column("from_zone"), facts.column("message_id"))
    order = np.argsort(hashes, kind="stable")
    store.add(hashes[order], offsets[order], end, chain)
