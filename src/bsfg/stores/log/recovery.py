"""Opening a log: find what is sound, cut what was torn, name what is damaged or lost, and never reuse an offset."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.digest import KeyHash
from bsfg.ports import Buffer, Clock, GapRecord
from bsfg.retention import GapReason
from bsfg.rows import Row
from bsfg.stores.log.damage import TORN_CUT, adjoined, is_damage, is_folder, keep_aside, put_aside, readable, uncovered
from bsfg.stores.log.files import Bytes, Files, write_whole
from bsfg.stores.log.frames import FrameList, FrameRef
from bsfg.stores.log.identity import LogIdentity, identity_from_segments, read_identity, write_identity
from bsfg.stores.log.indexstore import IndexStore
from bsfg.stores.log.keysegments import KeySegmentName, KeySegments, listed
from bsfg.stores.log.notes import Notes, boot_id, read_watermark
from bsfg.stores.log.segments import (
    Hole,
    Scan,
    SegmentFile,
    check_owner,
    joined,
    read_segment_header,
    scan_segment,
    segment_bases,
    segment_name,
    stand_in,
)
from bsfg.stores.log.view import read_latest
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA, LogOptions, LogState
from bsfg.stores.shared.frame import (
    FRAME_MAGIC,
    ROWS,
    Damaged,
    SegmentHeader,
    Torn,
    decode_keys,
    decode_payload,
    encode_segment_header,
    genesis,
    padded,
)
from bsfg.stores.shared.judging import as_facts

_DAMAGED = GapReason.DAMAGED
_KEYS_AT_ONCE, _HELD_BYTES = 4_096, 16 << 20


class Recovery:
    """One opening of one log."""

    def __init__(self, files: Files, folder: str, buffer: Buffer, *, options: LogOptions, clock: Clock) -> None:
        self._files, self._folder = files, folder
        self._options, self._clock = options, clock
        self._schema = STORE_SCHEMA if buffer == Buffer.STORE else FORWARD_SCHEMA
        self.problems: list[str] = []
        self._gaps: list[GapRecord] = []
        self._named = 0
        self._notes_were_lost = False

    def run(self, floor: int) -> LogState:
        """Open the log; ``floor`` is the offset after the highest one that any consumer has confirmed."""
        files, folder = self._files, self._folder
        self._clear_the_way()
        identity = self._identity()
        notes = Notes(files, folder)
        bases = segment_bases(files, folder)
        # Wherever a log begins later than at 0, its notes say so.
        begun_later = bool(listed(files, folder)) or bool(bases and bases[0])
        self._notes_were_lost = notes.open(expected=bool(bases), not_empty=begun_later)
        self.problems += [f"{notes.path}: {text}" for text in notes.problems]
        segments = self._segments(identity)
        if self._notes_were_lost:
            self._begin_where_files_begin(segments, notes)
        self._find_missing(segments, notes)
        last, newest = _Last(Scan(), 0, notes.start, genesis(identity.log_id)), 0
        if segments:
            active, scan = segments[-1], self._scan_active(segments[-1], notes)
            last = _Last(scan, active.base, max(scan.end, active.base), scan.chain or active.header.chain_before)
            times = [ref.header.appended_at_unix_ms for ref in scan.frames[-1:]]
            newest = max([active.header.time_before_unix_ms, *times])
        end = self._never_reuse(last.end, floor, notes)
        # The reason for a range without entries is durable before anything is written behind it.
        notes.add_gaps(self._gaps)
        if not segments or end > last.end:
            segments.append(self._fresh_segment(identity.log_id, end, last.chain, newest, segments))
        files.sync_folder(folder)
        keys = KeySegments(files, folder)
        keys.clear_staged()
        self._check_keys(notes, keys)
        self._check_latest()
        index = self._index(identity, segments, keys, last, end, notes)
        index.forget_before(notes.keys_start)
        # Building the index may have met frames that cannot be decoded.
        notes.add_gaps(self._gaps)
        return LogState(
            folder,
            identity.log_id,
            identity.secret,
            segments,
            end,
            last.chain,
            newest,
            notes,
            keys,
            index,
            self.problems,
        )

    def _clear_the_way(self) -> None:
        """Make the folders of a log, and move aside what stands where a file or a folder of its own should be."""
        files, folder = self._files, self._folder
        for name in ("", "/aside", "/keys", "/index"):
            try:
                files.make_folder(folder + name)
            except OSError as error:
                if not (is_damage(error) or isinstance(error, FileExistsError)):
                    raise
                self._put_aside(folder + name, "no folder")
                files.make_folder(folder + name)
        for name in ("log.json", "notes.journal", "durable"):
            try:
                files.read_at(f"{folder}/{name}", 0, 1)
            except FileNotFoundError:
                continue
            except OSError as error:
                if not is_folder(error):
                    continue  # bad sectors: whoever reads it goes around them
                self._put_aside(f"{folder}/{name}", "no file")

    def _put_aside(self, path: str, why: str) -> None:
        kept = put_aside(self._files, path)
        self.problems.append(f"{path}: {why}; kept as {kept}")

    def _identity(self) -> LogIdentity:
        path = f"{self._folder}/log.json"
        found = read_identity(self._files, self._folder)
        if found is not None:
            return found
        if self._files.exists(path):
            self._put_aside(path, "damaged")
        identity = identity_from_segments(self._files, self._folder)
        if identity is not None:
            self.problems.append(f"{path}: missing or damaged; the id was taken from a segment")
        else:
            identity = LogIdentity(secrets.token_bytes(16), secrets.token_bytes(32))
        write_identity(self._files, self._folder, identity)
        return identity

    def _segments(self, identity: LogIdentity) -> list[SegmentFile]:
        bases = segment_bases(self._files, self._folder)
        result: list[SegmentFile] = []
        for base in bases:
            path = f"{self._folder}/{segment_name(base)}"
            header = self._header(path, base, is_last=base == bases[-1])
            if header is None:
                continue
            check_owner(header, identity.owner_at(base), path)
            result.append(SegmentFile(self._files, path, header, self._files.size(path)))
        return result

    def _header(self, path: str, base: int, *, is_last: bool) -> SegmentHeader | None:
        """Read the header of a segment, or make one up; None when nothing in the file is of any use."""
        try:
            return read_segment_header(self._files, path)
        except (Torn, Damaged) as damage:
            problem = str(damage)
        except OSError as error:
            if not is_damage(error):
                raise
            problem = f"the segment header cannot be read: {error.strerror}"
        data, bad = readable(self._files, path)
        made_up = stand_in(data, base, self._schema)
        if made_up is not None:
            self.problems += [f"{path} at byte 0: {problem}", *(f"{path}: {text}" for text in bad)]
            return made_up
        self._named = max(self._named, base)
        if (
            is_last
            and not bad
            and FRAME_MAGIC not in data
            and len(data) <= len(encode_segment_header(SegmentHeader(bytes(16), base, -1, b"", 0, self._schema)))
        ):
            # A crash while the segment was being made: nothing in it was ever acknowledged.
            self.problems.append(f"{path}: {len(data)} {TORN_CUT}: {problem}")
            keep_aside(self._files, path, 0, data, "torn")
            self._files.remove(path)
        else:
            self._put_aside(path, f"at byte 0: {problem}, and there is no sound frame")
        return None

    def _begin_where_files_begin(self, segments: list[SegmentFile], notes: Notes) -> None:
        """Find out without notes where the log begins: what key segments tell of was removed in good order."""
        self.problems.append(
            f"{notes.path}: gap records, quarantine and the digests of removed segments that were noted there are lost"
        )
        removed = [name for name in listed(self._files, self._folder) if segments and name.last < segments[0].base]
        at = min((name.first for name in removed), default=0)
        for name in removed:
            at = name.last + 1 if name.first <= at else at
        if at > notes.start:
            notes.move_start(at, [], [])

    def _find_missing(self, segments: list[SegmentFile], notes: Notes) -> None:
        """Name the ranges whose segment files are gone although nobody truncated them."""
        end, before = notes.start, -1
        for segment in segments:
            if segment.header.previous_base != before or self._notes_were_lost:
                known = segments[segments.index(segment) - 1] if before >= 0 else None
                end = max(end, _end_of(known)) if known is not None else end
                self._lose(end, segment.base - 1, "the segment file is missing", notes)
            before = segment.base
            end = max(end, segment.base)

    def _lose(self, first: int, last: int, why: str, notes: Notes, reason: GapReason = GapReason.LOST) -> None:
        """Record what is not there, as far as no record accounts for it."""
        for start, end in list(uncovered(first, last, [*notes.book.own(), *self._gaps])):
            self.problems.append(f"{self._folder}: entries {start} to {end}: {why}")
            self._gaps.append(GapRecord(start, end, reason, self._clock.now_unix_ms(), why))

    def _scan_active(self, active: SegmentFile, notes: Notes) -> Scan:
        """Check every frame of the last segment, cut a torn tail, and make what stays durable."""
        data, bad = readable(self._files, active.path)
        self.problems += [f"{active.path}: {text}" for text in bad]
        scan = scan_segment(data, active.header, tail_may_be_torn=not bad)
        for hole in [*scan.holes, *scan.unchained]:
            self.problems.append(f"{active.where(hole.position)}: entries {hole.first} to {hole.last}: {hole.why}")
            keep_aside(self._files, active.path, hole.position, data[hole.position :][: hole.size_bytes], "damaged")
        for hole in scan.holes:
            why = f"{active.where(hole.position)}: {hole.why}"
            self._lose(hole.first, hole.last, why, notes, GapReason.DAMAGED)
        if scan.torn_range is not None:
            why = f"the last frame before a crash is not whole: {scan.torn}"
            self._lose(*scan.torn_range, why, notes, GapReason.TORN)
        notes.add_gaps(self._gaps)
        if scan.sound_bytes < len(data):
            keep_aside(self._files, active.path, scan.sound_bytes, data[scan.sound_bytes :], "torn")
            self.problems.append(f"{active.path}: {len(data) - scan.sound_bytes} {TORN_CUT}: {scan.torn}")
        lacking = padded(scan.sound_bytes) - scan.sound_bytes
        if lacking:
            # The last frame is whole but for its padding; the next one begins behind that, or nobody would find it.
            data = data[: scan.sound_bytes] + bytes(lacking)
            scan.sound_bytes = len(data)
        self._settle(active.path, data, scan, rewrite=bool(bad or lacking))
        active.size_bytes = scan.sound_bytes
        active.know(scan)
        return scan

    def _settle(self, path: str, data: bytes, scan: Scan, *, rewrite: bool) -> None:
        """Make the sound part of the active segment durable, and nothing else.

        Frames that the last writer did not see synced may be in the page cache alone, and so may the header of a
        segment that it was about to begin. When its sync failed, the system takes them for written and no further sync
        would write them, so the segment is written anew. So is one with bad sectors: what could be read of it moves to
        good ones.
        """
        watermark = read_watermark(self._files, self._folder)
        as_said = watermark is not None and watermark[1:] == (scan.end, scan.sound_bytes)
        if rewrite or watermark is None or (watermark[0] == boot_id() and not as_said):
            write_whole(self._files, path, memoryview(data)[: scan.sound_bytes])
            return
        file = self._files.open_append(path)
        try:
            if scan.sound_bytes < len(data):
                file.truncate(scan.sound_bytes)
            file.sync()
        finally:
            file.close()

    def _never_reuse(self, end: int, floor: int, notes: Notes) -> int:
        """Go on behind everything that anyone has ever seen, and name what was seen but is not there."""
        watermark = read_watermark(self._files, self._folder)
        own = [gap.last + 1 for gap in [*notes.book.own(), *self._gaps] if gap.origin_zone is None]
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
                where = f"{self._folder}/keys/{(name or KeySegmentName(anchor.first, anchor.last)).file_name}"
                self.problems.append(
                    f"{where}: the keys of entries {anchor.first} to {anchor.last} are missing or damaged"
                )

    def _check_latest(self) -> None:
        try:
            read_latest(self._files, self._folder)
        except (Damaged, OSError) as damage:
            self.problems.append(f"{damage}; the newest facts of those that left cannot be read")

    def _index(
        self,
        identity: LogIdentity,
        segments: list[SegmentFile],
        keys: KeySegments,
        last: _Last,
        end: int,
        notes: Notes,
    ) -> IndexStore:
        """Load the key index and add what it lacks from key segments and log."""
        options, chain = self._options, last.chain
        store = IndexStore(
            self._files, self._folder, identity.index_owner, options.index_memory_bytes, options.index_run_keys
        )
        start = keys.names[0].first if keys.names else segments[0].base
        # What was lost behind the last segment is in no sealed one, though a new segment begins behind it.
        missing_from = store.load(start, end, last.base, last.chain_before)
        hasher = KeyHash(identity.secret)
        for name in keys.names:
            table = keys.table(name)
            if table is not None and name.last >= missing_from:
                offsets = table.column("offset").to_numpy()
                facts = as_facts(table)
                after, at_once = np.flatnonzero(offsets >= missing_from), options.index_run_keys
                for at in range(0, len(after), at_once):
                    some = after[at : at + at_once]
                    until = int(offsets[some[-1]]) + 1 if at + at_once < len(after) else name.last + 1
                    _add_keys(store, hasher, facts.take(some), offsets[some], until, chain)
                missing_from = name.last + 1
        self._index_segments(store, hasher, segments, missing_from, end, chain, notes)
        return store

    def _index_segments(
        self,
        store: IndexStore,
        hasher: KeyHash,
        segments: list[SegmentFile],
        missing_from: int,
        end: int,
        chain: bytes,
        notes: Notes,
    ) -> None:
        ends = [segment.base for segment in segments[1:]] + [end]
        for segment, until in zip(segments, ends, strict=True):
            if until <= missing_from:
                continue
            damaged: list[Hole] = []
            adding = _Adding(store, hasher, segment.frames, chain)
            for ref, payload in segment.payloads(segment.frames.since(missing_from)):
                if ref.end <= missing_from:
                    continue
                try:
                    if isinstance(payload, Exception):
                        raise payload
                    adding.add(ref, payload, segment.header.schema)
                except (Torn, Damaged) as damage:
                    damaged.append(Hole(ref.base, ref.end - 1, ref.position, ref.header.frame_bytes, str(damage)))
            adding.finish()
            for hole in joined(damaged):
                self._lose(hole.first, hole.last, f"{segment.where(hole.position)}: {hole.why}", notes, _DAMAGED)


class _Last(NamedTuple):
    """What the last segment told: its base, and up to where frames, holes and the chain lead in it."""

    scan: Scan
    base: int
    end: int
    chain: bytes

    def chain_before(self, offset: int) -> bytes | None:
        """Give the chain value before an offset, None where no frame begins or ends."""
        return self.chain if offset == self.end else self.scan.frames.chain_before(offset)


def _end_of(segment: SegmentFile) -> int:
    """Give the offset after the last entry of a segment, as its own frames tell it."""
    return max([segment.base, *(ref.end for ref in segment.frames[-1:]), *(hole.last + 1 for hole in segment.holes)])


class _Adding:
    """Adds the keys of frames to the index, those of small frames together."""

    def __init__(self, store: IndexStore, hasher: KeyHash, frames: FrameList, head: bytes) -> None:
        self._store, self._hasher, self._frames, self._head = store, hasher, frames, head
        self._zones: list[pa.Array] = []
        self._ids: list[pa.Array] = []
        self._few: list[Row] = []
        self._offsets: list[tuple[int, int]] = []
        self._count = self._held_bytes = 0

    def add(self, ref: FrameRef, payload: Bytes, schema: pa.Schema) -> None:
        """Add the keys of a frame; raises `Damaged` when it cannot be decoded."""
        if ref.header.form == ROWS:
            self._few += decode_keys(ref.header, payload, schema)
        else:
            facts = decode_payload(ref.header, payload, schema)
            self._flush_few()
            self._zones.append(facts.column("from_zone"))
            self._ids.append(facts.column("message_id"))
            self._held_bytes += len(payload)
        self._offsets.append((ref.base, ref.end))
        self._count += ref.count
        if self._count >= _KEYS_AT_ONCE or self._held_bytes >= _HELD_BYTES:
            self.finish()

    def _flush_few(self) -> None:
        if self._few:
            zones, ids = zip(*self._few, strict=True)
            self._zones.append(pa.array(zones, type=pa.string()))
            self._ids.append(pa.array(ids, type=pa.string()))
            self._few = []

    def finish(self) -> None:
        """Add what was gathered."""
        if self._count:
            self._flush_few()
            offsets = np.concatenate([np.arange(*span) for span in adjoined(self._offsets)])
            hashes = self._hasher.of(pa.concat_arrays(self._zones), pa.concat_arrays(self._ids))
            # The chain value there is what the next frame says of it, or the head of the log.
            end = int(offsets[-1]) + 1
            _add_hashes(self._store, hashes, offsets, end, self._frames.chain_before(end) or self._head)
        self._zones, self._ids, self._offsets, self._count, self._held_bytes = [], [], [], 0, 0


def _add_keys(
    store: IndexStore, hasher: KeyHash, facts: FactBatch, offsets: np.ndarray, end: int, chain: bytes
) -> None:
    if not len(offsets):
        return
    _add_hashes(store, hasher.of(facts.column("from_zone"), facts.column("message_id")), offsets, end, chain)


def _add_hashes(store: IndexStore, hashes: np.ndarray, offsets: np.ndarray, end: int, chain: bytes) -> None:
    order = np.argsort(hashes, kind="stable")
    store.add(hashes[order], offsets[order], end, chain)
