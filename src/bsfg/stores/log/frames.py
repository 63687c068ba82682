"""The frames of a segment: found by following the chain, and remembered in little memory.

A fact that comes alone is a frame of its own, so that a segment may have a hundred thousand of them. What is done for
each of them here is what decides how soon a log is open.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import crc32c

from bsfg.stores.log.files import Bytes
from bsfg.stores.shared.frame import (
    FRAME_CRC_BEGUN,
    FRAME_FIELDS,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    MAX_OFFSET,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    padded,
)


@dataclass(slots=True)
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


class FrameList(Sequence[FrameRef]):
    """Frames in the order of their offsets, kept as the bytes of their headers: a sixth of what objects would take."""

    __slots__ = ("_bases", "_headers", "_positions")

    def __init__(self) -> None:
        self._bases, self._positions, self._headers = array("q"), array("q"), bytearray()

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> FrameRef: ...

    @overload
    def __getitem__(self, index: slice) -> list[FrameRef]: ...

    def __getitem__(self, index: int | slice) -> FrameRef | list[FrameRef]:
        # One that is added at this moment has its position last, so that whatever is counted is there.
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if at < 0:
            raise IndexError(index)
        position = self._positions[at]
        header = FrameHeader.of(FRAME_FIELDS.unpack_from(self._headers, FRAME_HEADER_BYTES * at))
        return FrameRef(header.base, header.count, position, header)

    def append(self, position: int, header: Bytes) -> None:
        """Add the frame whose header, which was checked, stands at a position."""
        self._headers += header
        self._bases.append(FRAME_FIELDS.unpack_from(header)[3])
        self._positions.append(position)

    def columns(self) -> tuple[array[int], array[int], bytearray]:
        """Give bases, positions and headers, for those who add many while nobody else looks."""
        return self._bases, self._positions, self._headers

    def at_or_below(self, offset: int) -> int:
        """Give the index of the last frame that begins at or below an offset, -1 when there is none."""
        return bisect_right(self._bases, offset, 0, len(self)) - 1

    def since(self, offset: int) -> Iterator[FrameRef]:
        """Give the frame that begins at or below an offset, and all behind it."""
        return map(self.__getitem__, range(max(0, self.at_or_below(offset)), len(self)))

    def chain_before(self, offset: int) -> bytes | None:
        """Give the chain value before the frame that begins at an offset; None when none does."""
        index = bisect_left(self._bases, offset, 0, len(self))
        found = index < len(self) and self._bases[index] == offset
        return self[index].header.chain_before if found else None

    def cut(self, offset: int) -> bytes | None:
        """Drop the frames that begin at an offset or later; give the chain value before the first of them."""
        index = bisect_left(self._bases, offset)
        if index == len(self):
            return None
        chain = self[index].header.chain_before
        del self._positions[index:], self._bases[index:], self._headers[FRAME_HEADER_BYTES * index :]
        return chain


def follow(
    data: Bytes, at: int, expected: int, log_id: bytes, chain: bytes, found: FrameList
) -> tuple[int, int, bytes]:
    """Add frames as long as each is whole, sound, in its place and chained to the one before it.

    Gives the position, the offset and the chain value where that ends. What is there is for others to judge: this does
    in one go for each frame what `decode_frame_header`, `check_payload` and `chain_after` do step by step.
    """
    view, size, unpack = memoryview(data), len(data), FRAME_FIELDS.unpack_from
    crc, sha256, (bases, positions, headers) = crc32c.crc32c, hashlib.sha256, found.columns()
    while at + FRAME_HEADER_BYTES <= size:
        magic, header_crc, length, base, count, _, _, owner, before, payload_crc, _ = unpack(data, at)
        start = at + FRAME_HEADER_BYTES
        end = start + length
        if (magic, base, owner, before) != (FRAME_MAGIC, expected, log_id, chain):
            break
        if end > size or not count or base > MAX_OFFSET or crc(view[at + 8 : start], FRAME_CRC_BEGUN) != header_crc:
            break
        if crc(view[start:end]) != payload_crc:
            break
        chain = sha256(view[at:end]).digest()
        headers += view[at:start]
        bases.append(base)
        positions.append(at)
        at, expected = padded(end - at) + at, base + count
    return at, expected, chain


def hop(data: Bytes, at: int, expected: int, until: int, log_id: bytes, found: FrameList) -> tuple[int, int]:
    """Add frames as long as each has a sound header in its place; nothing is asked of what stands behind it.

    ``data`` is what a file holds at the position ``at``, and may end anywhere. Gives the position and the offset where
    the next frame is to begin, which may lie behind the data. Frames from the offset ``until`` on are left out. This
    does in one go for each frame what `decode_frame_header` does step by step.
    """
    view, last, unpack, crc = memoryview(data), len(data) - FRAME_HEADER_BYTES, FRAME_FIELDS.unpack_from, crc32c.crc32c
    start, (bases, positions, headers) = 0, found.columns()
    while start <= last and expected < until:
        magic, header_crc, length, base, count, _, _, owner, _, _, _ = unpack(data, start)
        if (magic, base, owner) != (FRAME_MAGIC, expected, log_id):
            break
        header = view[start : start + FRAME_HEADER_BYTES]
        if crc(header[8:], FRAME_CRC_BEGUN) != header_crc:
            break
        if not count or length > MAX_PAYLOAD_BYTES or base > MAX_OFFSET:
            break
        headers += header
        bases.append(base)
        positions.append(at + start)
        start += padded(FRAME_HEADER_BYTES + length)
        expected += count
    return at + start, expected
