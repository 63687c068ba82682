"""Segment files: finding frames in them, reading frames, and telling a torn tail from damage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import ForeignLog
from bsfg.rows import Row
from bsfg.stores.log.damage import PAUSE_SECONDS, READS, is_damage, patiently, readable
from bsfg.stores.log.files import Bytes, Files
from bsfg.stores.log.frames import FrameList, FrameRef, follow, hop
from bsfg.stores.shared.frame import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    MAX_NAMED_OFFSET,
    MAX_OFFSET,
    NOT_KNOWN,
    ROWS,
    Damaged,
    SegmentHeader,
    Torn,
    Unreadable,
    chain_after,
    check_payload,
    decode_frame_header,
    decode_payload,
    decode_rows,
    decode_segment_header,
    encode_segment_header,
    entries_of,
    entry_rows,
    padded,
)

_FIRST_READ_BYTES = 16_384
_LOOKING_SECONDS = 0.25
_RECENT_BYTES = 1 << 20
_SMALL_BYTES = 1 << 14
_AT_ONCE_BYTES = 1 << 18
_ROWS_AT_ONCE = 1_000
_RECENT_FRAMES = 64
_NAME_DIGITS = 20
_NOT_AT_HAND = (None, None)


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes that cannot be read as frames: the offsets they held (when known), their place and the reason."""

    first: int
    last: int
    position: int
    size_bytes: int
    why: str


@dataclass(slots=True)
class Scan:
    """What a walk through a segment found: sound frames, holes between them, and the end of what is sound."""

    frames: FrameList = field(default_factory=FrameList)
    holes: list[Hole] = field(default_factory=list)
    unchained: list[Hole] = field(default_factory=list)
    """Frames that are sound, but not chained to the one before them."""
    sound_bytes: int = 0
    torn: str = ""
    torn_range: tuple[int, int] | None = None
    chain: bytes = b""

    @property
    def end(self) -> int:
        """The offset after the last frame or hole; -1 when there is neither."""
        ends = [ref.end for ref in self.frames[-1:]] + [hole.last + 1 for hole in self.holes[-1:]]
        return max(ends, default=-1)

    def forget_from(self, offset: int | None) -> None:
        """Leave out what begins at an offset or later."""
        if offset is None:
            return
        chain = self.frames.cut(offset)
        if chain is not None:
            self.chain = chain
        self.holes = [hole for hole in self.holes if hole.first < offset]


def segment_name(base: int) -> str:
    """Give the file name of the segment that begins at an offset."""
    return f"{base:0{_NAME_DIGITS}d}.seg"


def segment_bases(files: Files, folder: str) -> list[int]:
    """List the bases of all segments in a folder, in order; what is not called like one is none."""
    digits = [name[:-4] for name in files.list(folder) if name.endswith(".seg")]
    bases = [int(each) for each in digits if each.isascii() and each.isdigit() and len(each) == _NAME_DIGITS]
    return sorted(base for base in bases if base <= MAX_NAMED_OFFSET)


def read_segment_header(files: Files, path: str) -> SegmentHeader:
    """Read the header of a segment file; raises `Torn` or `Damaged`."""
    return decode_segment_header(files.read_at(path, 0, _FIRST_READ_BYTES))


def check_owner(header: SegmentHeader, log_id: bytes, path: str) -> None:
    """Refuse a segment that belongs to another log."""
    if header.log_id != log_id:
        raise ForeignLog(
            f"{path} belongs to log {header.log_id.hex()}, this is log {log_id.hex()}",
            hint="The segment was copied from another folder: move it back, then open this one again.",
            log_id=header.log_id.hex(),
        )


def scan_segment(data: bytes, header: SegmentHeader, *, tail_may_be_torn: bool) -> Scan:
    """Walk through a whole segment and check every frame: header, CRC, place and chain.

    In the last segment of a log the end may be torn by a crash: bytes that stop short of a frame were never
    acknowledged and count as torn. A frame that is complete but wrong, or anything wrong elsewhere, is a hole.
    """
    scan = Scan(sound_bytes=header.size_bytes, chain=header.chain_before)
    at, expected, behind = header.size_bytes, header.base, _Behind(data, header.log_id)
    while at < len(data):
        at, expected, scan.chain = follow(data, at, expected, header.log_id, scan.chain, scan.frames)
        scan.sound_bytes = max(scan.sound_bytes, min(at, len(data)))
        if at >= len(data):
            break
        # What ends the walk is looked at closely: it is torn, damaged, replaced, or the first one behind such a thing.
        try:
            ref = _frame_at(data, at, header, expected)
        except Torn as torn:
            following = behind.next_frame(at + 1, expected)
            if following is None and tail_may_be_torn:
                scan.torn = str(torn)
                break
            at, expected = _skip(scan, data, at, expected, following, str(torn))
            continue
        except Damaged as damage:
            at, expected = _pass_damage(scan, behind, at, expected, str(damage), tail_may_be_torn=tail_may_be_torn)
            if scan.torn:
                break
            continue
        payload = memoryview(data)[at + FRAME_HEADER_BYTES : at + FRAME_HEADER_BYTES + ref.header.payload_bytes]
        if scan.chain and ref.header.chain_before != scan.chain:
            why = "the chain is broken: a frame before was replaced"
            scan.unchained.append(Hole(ref.base, ref.end - 1, at, 0, why))
        scan.chain = chain_after(data[at : at + FRAME_HEADER_BYTES], payload)
        scan.frames.append(at, data[at : at + FRAME_HEADER_BYTES])
        at, expected = at + ref.header.frame_bytes, ref.end
        scan.sound_bytes = min(at, len(data))
    scan.holes = joined(scan.holes)
    return scan


def joined(holes: Iterable[Hole]) -> list[Hole]:
    """Bring holes together that follow each other in the file: what is told of damage grows with its places alone."""
    result: list[Hole] = []
    more = 0
    for hole in holes:
        last = result[-1] if result else None
        if (
            last is None
            or not last.first <= last.last == hole.first - 1 < hole.last
            or last.position + last.size_bytes != hole.position
        ):
            result.append(hole)
            more = 0
            continue
        more += 1
        why = last.why if more == 1 else last.why.removesuffix(_and_more(more - 1))
        size_bytes = last.size_bytes + hole.size_bytes
        result[-1] = replace(last, last=hole.last, size_bytes=size_bytes, why=why + _and_more(more))
    return result


def _and_more(frames: int) -> str:
    return f", and {frames} more behind it"


def _frame_at(data: bytes, at: int, segment: SegmentHeader, expected: int) -> FrameRef:
    header = decode_frame_header(data, at)
    start = at + FRAME_HEADER_BYTES
    payload = memoryview(data)[start : start + header.payload_bytes]
    check_payload(header, payload)
    if header.log_id != segment.log_id or header.base < expected:
        raise Damaged("the frame belongs to another place")
    if header.base > expected:
        raise Damaged(f"entries {expected} to {header.base - 1} are missing before this frame")
    return FrameRef(header.base, header.count, at, header)


def _pass_damage(
    scan: Scan, behind: _Behind, at: int, expected: int, why: str, *, tail_may_be_torn: bool
) -> tuple[int, int]:
    """Step over a frame that fails its checks; its header may still tell which offsets it held."""
    data = behind.data
    try:
        header = decode_frame_header(data, at)
    except (Torn, Damaged):
        following = behind.next_frame(at + 1, expected)
        # Without a header, and with nothing sound behind it, this cannot be told from a write that was torn.
        if following is None and tail_may_be_torn:
            scan.torn = why
            return at, expected
        return _skip(scan, data, at, expected, following, why)
    after = min(at + header.frame_bytes, len(data))
    if header.log_id != behind.log_id or header.base < expected:
        # A frame from elsewhere: its header says nothing of the entries that should be here.
        scan.holes.append(Hole(expected, expected - 1, at, after - at, why))
        scan.chain, scan.sound_bytes = b"", after
        return after, expected
    if header.base > expected:
        scan.holes.append(Hole(expected, header.base - 1, at, 0, why))
        scan.chain = b""
        return at, header.base
    if tail_may_be_torn and after == len(data):
        # The last frame of all: a write that a power loss tore, or an acknowledged frame that was damaged since.
        # Nobody can tell, so the bytes are cut but their offsets are never used again.
        scan.torn, scan.torn_range = why, (expected, header.end - 1)
        return at, expected
    scan.holes.append(Hole(expected, header.end - 1, at, after - at, why))
    scan.chain = b""
    scan.sound_bytes = after
    return after, header.end


def _skip(
    scan: Scan, data: bytes, at: int, expected: int, following: tuple[int, int] | None, why: str
) -> tuple[int, int]:
    position, base = following if following is not None else (len(data), expected)
    scan.holes.append(Hole(expected, base - 1, at, position - at, why))
    scan.chain = b""
    scan.sound_bytes = position
    return position, base


class _Run(NamedTuple):
    """Sound frames that follow each other, each chained to the one before it."""

    position: int
    end_position: int
    base: int
    end: int
    log_id: bytes


class _Behind:
    """Finds where a segment goes on behind damage.

    Facts may hold anything, also bytes that look like frames: those of a segment that somebody sends as a document, or
    some that were made for this. What goes on to the end of the file, link by link of the chain, is the segment itself,
    because nobody knows in advance what will follow his fact. What else is taken for frames must leave room for that.
    """

    def __init__(self, data: bytes, log_id: bytes | None) -> None:
        self.data, self.log_id = data, log_id
        self._runs: list[_Run] | None = None

    def next_frame(self, start: int, expected: int) -> tuple[int, int] | None:
        """Give position and base of the next frame from a position on, where an offset was expected."""
        run = self._next_run(start, expected)
        return (run.position, run.base) if run is not None else None

    def _next_run(self, start: int, expected: int) -> _Run | None:
        if self._runs is None:
            self._runs = list(_runs(self.data, start))
        # An entry takes more than a byte, so that no more are missing than bytes are passed over.
        runs = [run for run in self._runs if 0 <= run.base - expected <= run.position - start + 1]
        runs = [run for run in runs if run.position >= start and self.log_id in (None, run.log_id)]
        if not runs:
            return None
        surest = max(runs, key=lambda run: (run.end_position == len(self.data), run.end_position - run.position))
        fitting = (run for run in runs if run.log_id == surest.log_id and run.end <= surest.base)
        return next(fitting, surest)


def _runs(data: bytes, start: int) -> Iterator[_Run]:
    at = data.find(FRAME_MAGIC, start)
    while at >= 0:
        run = _run_at(data, at)
        if run is not None:
            yield run
        at = data.find(FRAME_MAGIC, at + 1 if run is None else run.end_position)


def _run_at(data: bytes, position: int) -> _Run | None:
    """Follow the chain from one frame on as far as it goes."""
    at, first, end, chain = position, None, 0, b""
    while at < len(data):
        try:
            header = decode_frame_header(data, at)
            payload = memoryview(data)[at + FRAME_HEADER_BYTES :][: header.payload_bytes]
            check_payload(header, payload)
        except (Torn, Damaged):
            break
        if first is not None and (header.base, header.log_id, header.chain_before) != (end, first.log_id, chain):
            break
        first, end = first or header, header.end
        chain = chain_after(data[at : at + FRAME_HEADER_BYTES], payload)
        at = min(at + header.frame_bytes, len(data))
    return _Run(position, at, first.base, end, first.log_id) if first is not None else None


def _stretches(refs: Iterable[FrameRef]) -> Iterator[list[FrameRef]]:
    """Bring frames together that follow each other in the file and are not too large to be read in one go."""
    some: list[FrameRef] = []
    end = limit = 0
    for ref in refs:
        if some and (ref.position != end or ref.position >= limit):
            yield some
            some = []
        if not some:
            limit = ref.position + _AT_ONCE_BYTES
        some.append(ref)
        end = ref.position + ref.header.frame_bytes
    if some:
        yield some


def stand_in(data: bytes, base: int, schema: pa.Schema) -> SegmentHeader | None:
    """Make up the header of a segment whose own is damaged from its first sound frame; None when there is none."""
    found = _Behind(data, None).next_frame(0, base)
    if found is None:
        return None
    frame = decode_frame_header(data, found[0])
    chain = frame.chain_before if frame.base == base else b""
    # Of the oldest version, so that nothing is written behind it that its true header may not allow.
    header = SegmentHeader(frame.log_id, base, NOT_KNOWN, chain, frame.appended_at_unix_ms, schema, version=1)
    usual = len(encode_segment_header(header))
    return replace(header, size_bytes=usual if usual <= found[0] else data.find(FRAME_MAGIC))


class SegmentFile:
    """One segment for reading: its frames are found on first use, those of the active one are told by the writer."""

    def __init__(self, files: Files, path: str, header: SegmentHeader, size_bytes: int) -> None:
        self.files = files
        self.path = path
        self.header = header
        self.size_bytes = size_bytes
        self.may_leave = True
        """Whether somebody may have removed the file in good order; if not, a missing file is damage."""
        self.is_missing = False
        """Whether the file was found to be gone although nobody may remove it."""
        self.until: int | None = None
        """Entries from here on are not to be seen, because they may not be durable; None means all of them are."""
        self._frames: FrameList | None = None
        self._recent: dict[int, tuple[Bytes, FactBatch | None]] = {}
        self._recent_bytes = 0
        self.holes: list[Hole] = []

    @property
    def base(self) -> int:
        """The offset of its first entry."""
        return self.header.base

    def know(self, scan: Scan) -> None:
        """Take over what a scan found."""
        self._frames, self.holes = scan.frames, scan.holes

    def know_empty(self) -> None:
        """Take note that the segment was just made."""
        self._frames = FrameList()

    def add(self, base: int, header: Bytes, payload: Bytes, facts: FactBatch | None = None) -> None:
        """Take note of a frame that was just made durable; the newest stay at hand for those who follow the log.

        ``facts`` are what the payload holds, all of it, where that is small and need not be read again.
        """
        self._recent[base] = (payload, facts)
        self._recent_bytes += len(payload)
        self.frames.append(self.size_bytes, header)
        self.size_bytes += padded(FRAME_HEADER_BYTES + len(payload))
        while len(self._recent) > _RECENT_FRAMES or self._recent_bytes > _RECENT_BYTES:
            oldest = next(iter(self._recent))
            self._recent_bytes -= len(self._recent.pop(oldest)[0])

    def has_at_hand(self, ref: FrameRef) -> bool:
        """Tell whether a frame can be given without reading the file."""
        return ref.base in self._recent

    def let_go(self) -> None:
        """Keep nothing at hand any more."""
        self._recent, self._recent_bytes = {}, 0

    @property
    def frames(self) -> FrameList:
        """All frames, in order."""
        if self._frames is None:
            # Hop from header to header; only when one is wrong is the whole segment read.
            found = self._hopped(MAX_OFFSET + 1 if self.until is None else self.until)
            self._frames = self._scanned_frames() if found is None else found
        return self._frames

    def _hopped(self, until: int) -> FrameList | None:
        """List the frames that begin below an offset, header by header; None when one is wrong."""
        found, is_dense = FrameList(), False
        at, expected = self.header.size_bytes, self.base
        while at < self.size_bytes and expected < until:
            data = self._headers(at, is_dense=is_dense)
            begin, known = at, len(found)
            at, expected = hop(data, at, expected, until, self.header.log_id, found)
            if at == begin:
                return None
            is_dense = at - begin < _SMALL_BYTES * (len(found) - known)
        return found

    def _headers(self, at: int, *, is_dense: bool) -> bytes:
        """Give the bytes of a header; where frames are small, those of many, as a call for each would cost more."""
        rest = self.size_bytes - at
        if is_dense:
            with suppress(OSError):  # bytes behind the header cannot be read, perhaps
                return self.files.read_at(self.path, at, min(rest, _AT_ONCE_BYTES))
        try:
            return patiently(lambda: self.files.read_at(self.path, at, min(rest, FRAME_HEADER_BYTES)))
        except OSError as error:
            if not self._is_damage(error):
                raise
            return b""

    def _scanned_frames(self) -> FrameList:
        try:
            data = readable(self.files, self.path)[0]
        except FileNotFoundError as error:
            if not self._is_damage(error):
                raise
            self.holes = [Hole(self.base, self.base - 1, 0, 0, f"the segment cannot be read: {error.strerror}")]
            return FrameList()
        scan = scan_segment(data, self.header, tail_may_be_torn=False)
        scan.forget_from(self.until)
        self.holes = scan.holes
        return scan.frames

    def _is_damage(self, error: OSError) -> bool:
        self.is_missing = self.is_missing or (isinstance(error, FileNotFoundError) and not self.may_leave)
        return self.is_missing or is_damage(error)

    def hole_at(self, offset: int) -> Hole | None:
        """Give the hole that swallowed an offset; how far one reaches at the end of a segment nobody knows."""
        for hole in self.holes:
            if hole.first <= offset and (offset <= hole.last or hole.last < hole.first):
                return hole
        return None

    def frame_index(self, offset: int) -> int:
        """Give the index of the last frame that begins at or below an offset, -1 when there is none."""
        return self.frames.at_or_below(offset)

    def frame_holding(self, offset: int) -> FrameRef | None:
        """Find the one frame that holds an offset, without making a list of those behind it."""
        if self._frames is not None:
            at = self.frame_index(offset)
            found = self._frames[at] if at >= 0 else None
        else:
            passed = self._hopped(offset + 1 if self.until is None else min(offset + 1, self.until))
            found = passed[-1] if passed else None
        return found if found is not None and offset < found.end else None

    def read(self, ref: FrameRef, *, patient: bool = True) -> pa.RecordBatch:
        """Read the facts of one frame; raises `Torn` or `Damaged`, also when the medium cannot give its bytes."""
        return decode_payload(ref.header, self._checked(ref, patient=patient), self.header.schema)

    def _checked(self, ref: FrameRef, *, patient: bool = True) -> Bytes:
        """Give the payload of a frame, which is at hand or is what its header says."""
        payload, _ = self._recent.get(ref.base, _NOT_AT_HAND)
        if payload is None:
            payload = self._payload(ref, patient)
            check_payload(ref.header, payload)
        return payload

    def _payload(self, ref: FrameRef, patient: bool) -> bytes:
        """Read the bytes of one frame behind its header."""

        def read() -> bytes:
            return self.files.read_at(self.path, ref.position + FRAME_HEADER_BYTES, ref.header.payload_bytes)

        try:
            return patiently(read) if patient else read()
        except OSError as error:
            if not self._is_damage(error):
                raise
            gone = isinstance(error, FileNotFoundError)
            raise (Damaged if gone else Unreadable)(f"the frame cannot be read: {error.strerror}") from None

    def payloads(self, refs: Iterable[FrameRef]) -> Iterator[tuple[FrameRef, Bytes | Torn | Damaged]]:
        """Give frames with their payloads, or what is wrong with them; of small ones many are read at a time."""
        for some in _stretches(refs):
            begin = some[0].position
            try:
                data = self.files.read_at(self.path, begin, some[-1].position + some[-1].header.frame_bytes - begin)
            except OSError:
                data = b""  # each is read alone, and told what is wrong with it
            for ref in some:
                start = ref.position - begin + FRAME_HEADER_BYTES
                payload: Bytes = memoryview(data)[start : start + ref.header.payload_bytes]
                try:
                    if len(payload) < ref.header.payload_bytes:
                        payload = self._payload(ref, patient=True)
                    check_payload(ref.header, payload)
                except (Torn, Damaged) as damage:
                    yield ref, damage
                else:
                    yield ref, payload

    def entries_of(self, refs: Sequence[FrameRef]) -> Iterator[EntryBatch]:
        """Read frames that follow each other, the rows of small ones together; raises `Torn` or `Damaged`."""
        if len(refs) == 1 or self.has_at_hand(refs[0]):
            yield from map(self.entries, refs)
            return
        for part in self.parts(refs):
            if isinstance(part, Hole):
                raise Damaged(part.why)
            yield part

    def parts(self, refs: Iterable[FrameRef]) -> Iterator[EntryBatch | Hole]:
        """Read frames, the rows of small ones together; what cannot be read is a hole in its place."""
        rows: list[Row] = []
        for ref, payload in self.payloads(refs):
            small = ref.header.form == ROWS and not isinstance(payload, Exception)
            if rows and (not small or len(rows) >= _ROWS_AT_ONCE):
                yield entries_of(rows)
                rows = []
            at_unix_ms = ref.header.appended_at_unix_ms
            try:
                if isinstance(payload, Exception):
                    raise payload
                if small:
                    rows += entry_rows(decode_rows(ref.header, payload, self.header.schema), ref.base, at_unix_ms)
                    continue
                facts = decode_payload(ref.header, payload, self.header.schema)
            except (Torn, Damaged) as damage:
                if rows:
                    yield entries_of(rows)
                    rows = []
                yield Hole(ref.base, ref.end - 1, ref.position, ref.header.frame_bytes, str(damage))
                continue
            yield EntryBatch.of(facts, np.arange(ref.base, ref.end), at_unix_ms)
        if rows:
            yield entries_of(rows)

    def unreadable_from(self, index: int, why: str) -> Hole:
        """Give a frame that cannot be read together with those behind it that cannot either, as one hole.

        A whole stretch of a medium fails at once more often than a frame alone, and is looked at again as a whole. A
        medium may take long to say that it cannot: the rest of a stretch is then left to whoever comes there.
        """
        refs = self.frames[index : self._sound_after(index, len(self.frames))]
        for _ in range(READS - 1):
            if len(refs) == 1:
                break
            time.sleep(PAUSE_SECONDS)
            refs = refs[: self._sound_after(index, index + len(refs)) - index]
        return joined(Hole(ref.base, ref.end - 1, ref.position, ref.header.frame_bytes, why) for ref in refs)[0]

    def _sound_after(self, index: int, end: int) -> int:
        """Give the index of the next frame that can be read, or up to which there was time to look."""
        until = time.monotonic() + _LOOKING_SECONDS
        for at in range(index + 1, end):
            if time.monotonic() > until:
                return at
            try:
                self.read(self.frames[at], patient=False)
            except (Torn, Damaged):
                continue
            return at
        return end

    def where(self, position: int) -> str:
        """Name a place in the file."""
        return f"{self.path} at byte {position}"

    def entries(self, ref: FrameRef) -> EntryBatch:
        """Read one frame as entries."""
        _, small = self._recent.get(ref.base, _NOT_AT_HAND)
        if small is not None:
            return EntryBatch.of_few(small, ref.base, ref.header.appended_at_unix_ms)
        if ref.header.form == ROWS:
            rows = decode_rows(ref.header, self._checked(ref), self.header.schema)
            return entries_of(entry_rows(rows, ref.base, ref.header.appended_at_unix_ms))
        facts = self.read(ref)
        return EntryBatch.of(facts, np.arange(ref.base, ref.end), ref.header.appended_at_unix_ms)
