"""Segment files: finding frames in them, reading frames, and telling a torn tail from damage."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import ForeignLog
from bsfg.stores.log.damage import is_damage, patiently, readable
from bsfg.stores.log.files import Bytes, Files
from bsfg.stores.log.frame import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    MAX_OFFSET,
    NOT_KNOWN,
    Damaged,
    FrameHeader,
    SegmentHeader,
    Torn,
    chain_after,
    check_payload,
    decode_frame_header,
    decode_payload,
    decode_segment_header,
    encode_segment_header,
)

_FIRST_READ_BYTES = 16_384
_RECENT_BYTES = 1 << 20
_RECENT_FRAMES = 64
_NAME_DIGITS = 20
_NOT_AT_HAND = (None, None)


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a frame is in its file, and which entries it holds."""

    base: int
    count: int
    position: int
    header: FrameHeader

    @property
    def end(self) -> int:
        """The offset after its last entry."""
        return self.base + self.count


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

    frames: list[FrameRef] = field(default_factory=list)
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
        later = [ref for ref in self.frames if ref.base >= offset]
        if later:
            self.chain = later[0].header.chain_before
        self.frames = [ref for ref in self.frames if ref.base < offset]
        self.holes = [hole for hole in self.holes if hole.first < offset]


def segment_name(base: int) -> str:
    """Give the file name of the segment that begins at an offset."""
    return f"{base:0{_NAME_DIGITS}d}.seg"


def segment_bases(files: Files, folder: str) -> list[int]:
    """List the bases of all segments in a folder, in order; what is not called like one is none."""
    digits = [name[:-4] for name in files.list(folder) if name.endswith(".seg")]
    bases = [int(each) for each in digits if each.isascii() and each.isdigit() and len(each) == _NAME_DIGITS]
    return sorted(base for base in bases if base <= MAX_OFFSET)


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
    at, expected = header.size_bytes, header.base
    while at < len(data):
        try:
            ref = _frame_at(data, at, header, expected)
        except Torn as torn:
            following = _next_frame(data, at + 1, expected)
            if following is None and tail_may_be_torn:
                scan.torn = str(torn)
                break
            at, expected = _skip(scan, data, at, expected, following, str(torn))
            continue
        except Damaged as damage:
            at, expected = _pass_damage(
                scan, data, at, expected, str(damage), log_id=header.log_id, tail_may_be_torn=tail_may_be_torn
            )
            if scan.torn:
                break
            continue
        payload = memoryview(data)[at + FRAME_HEADER_BYTES : at + FRAME_HEADER_BYTES + ref.header.payload_bytes]
        if scan.chain and ref.header.chain_before != scan.chain:
            why = "the chain is broken: a frame before was replaced"
            scan.unchained.append(Hole(ref.base, ref.end - 1, at, 0, why))
        scan.chain = chain_after(data[at : at + FRAME_HEADER_BYTES], payload)
        scan.frames.append(ref)
        at, expected = at + ref.header.frame_bytes, ref.end
        scan.sound_bytes = min(at, len(data))
    return scan


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
    scan: Scan, data: bytes, at: int, expected: int, why: str, *, log_id: bytes, tail_may_be_torn: bool
) -> tuple[int, int]:
    """Step over a frame that fails its checks; its header may still tell which offsets it held."""
    try:
        header = decode_frame_header(data, at)
    except (Torn, Damaged):
        following = _next_frame(data, at + 1, expected)
        # Without a header, and with nothing sound behind it, this cannot be told from a write that was torn.
        if following is None and tail_may_be_torn:
            scan.torn = why
            return at, expected
        return _skip(scan, data, at, expected, following, why)
    after = min(at + header.frame_bytes, len(data))
    if header.log_id != log_id or header.base < expected:
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


def _next_frame(data: bytes, start: int, expected: int) -> tuple[int, int] | None:
    """Search for the next sound frame behind damage: its position and base."""
    at = data.find(FRAME_MAGIC, start)
    while at >= 0:
        try:
            header = decode_frame_header(data, at)
            begin = at + FRAME_HEADER_BYTES
            check_payload(header, memoryview(data)[begin : begin + header.payload_bytes])
            if header.base >= expected:
                return at, header.base
        except (Torn, Damaged):
            pass
        at = data.find(FRAME_MAGIC, at + 1)
    return None


def stand_in(data: bytes, base: int, schema: pa.Schema) -> SegmentHeader | None:
    """Make up the header of a segment whose own is damaged from its first sound frame; None when there is none."""
    found = _next_frame(data, 0, base)
    if found is None:
        return None
    frame = decode_frame_header(data, found[0])
    chain = frame.chain_before if frame.base == base else b""
    header = SegmentHeader(frame.log_id, base, NOT_KNOWN, chain, frame.appended_at_unix_ms, schema)
    usual = len(encode_segment_header(header))
    return replace(header, size_bytes=usual if usual <= found[0] else data.find(FRAME_MAGIC))


class SegmentFile:
    """One segment for reading: its frames are found on first use, those of the active one are told by the writer."""

    def __init__(self, files: Files, path: str, header: SegmentHeader, size_bytes: int) -> None:
        self.files = files
        self.path = path
        self.header = header
        self.size_bytes = size_bytes
        self.until: int | None = None
        """Entries from here on are not to be seen, because they may not be durable; None means all of them are."""
        self._frames: list[FrameRef] | None = None
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
        self._frames = []

    def add(self, ref: FrameRef, payload: Bytes | None = None, facts: FactBatch | None = None) -> None:
        """Take note of a frame that was just made durable; the newest stay at hand for those who follow the log.

        ``facts`` are what the payload holds, all of it, where that is small and need not be read again.
        """
        if payload is not None:
            self._recent[ref.base] = (payload, facts)
            self._recent_bytes += len(payload)
        self.frames.append(ref)
        self.size_bytes = ref.position + ref.header.frame_bytes
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
    def frames(self) -> list[FrameRef]:
        """All frames, in order."""
        if self._frames is None:
            self._frames = self._find_frames()
        return self._frames

    def _find_frames(self) -> list[FrameRef]:
        """Hop from header to header; only when one is wrong is the whole segment read."""
        found: list[FrameRef] = []
        at, expected = self.header.size_bytes, self.base
        while at < self.size_bytes and (self.until is None or expected < self.until):
            header = self._header_at(at)
            if header is None or header.base != expected or header.log_id != self.header.log_id:
                scan = scan_segment(readable(self.files, self.path)[0], self.header, tail_may_be_torn=False)
                scan.forget_from(self.until)
                self.holes = scan.holes
                return scan.frames
            found.append(FrameRef(header.base, header.count, at, header))
            at, expected = at + header.frame_bytes, header.end
        return found

    def _header_at(self, at: int) -> FrameHeader | None:
        try:
            return decode_frame_header(patiently(lambda: self.files.read_at(self.path, at, FRAME_HEADER_BYTES)))
        except (Torn, Damaged):
            return None
        except OSError as error:
            if not is_damage(error):
                raise
            return None

    def hole_at(self, offset: int) -> Hole | None:
        """Give the hole that swallowed an offset; how far one reaches at the end of a segment nobody knows."""
        for hole in self.holes:
            if hole.first <= offset and (offset <= hole.last or hole.last < hole.first):
                return hole
        return None

    def frame_index(self, offset: int) -> int:
        """Give the index of the last frame that begins at or below an offset, -1 when there is none."""
        return bisect_right(self.frames, offset, key=lambda ref: ref.base) - 1

    def read(self, ref: FrameRef) -> pa.RecordBatch:
        """Read the facts of one frame; raises `Torn` or `Damaged`, also when the medium cannot give its bytes."""
        payload, _ = self._recent.get(ref.base, _NOT_AT_HAND)
        if payload is None:
            payload = self.payload(ref)
            check_payload(ref.header, payload)
        return decode_payload(ref.header, payload, self.header.schema)

    def payload(self, ref: FrameRef) -> bytes:
        """Read the bytes of one frame behind its header."""
        start = ref.position + FRAME_HEADER_BYTES
        try:
            return patiently(lambda: self.files.read_at(self.path, start, ref.header.payload_bytes))
        except OSError as error:
            if not is_damage(error):
                raise
            raise Damaged(f"the frame cannot be read: {error.strerror}") from None

    def where(self, position: int) -> str:
        """Name a place in the file."""
        return f"{self.path} at byte {position}"

    def entries(self, ref: FrameRef) -> EntryBatch:
        """Read one frame as entries."""
        _, small = self._recent.get(ref.base, _NOT_AT_HAND)
        if small is not None:
            return EntryBatch.of_few(small, ref.base, ref.header.appended_at_unix_ms)
        facts = self.read(ref)
        return EntryBatch.of(facts, np.arange(ref.base, ref.end), ref.header.appended_at_unix_ms)
