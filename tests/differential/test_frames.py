"""Frames are found in one go as they are found step by step, whatever the bytes of a segment are."""

from contextlib import ExitStack
from itertools import accumulate
from random import Random
from unittest.mock import patch

import pytest
from tests.differential import campaign

from bsfg.columns import FACT_SCHEMA
from bsfg.stores.log import segments
from bsfg.stores.log.frames import FrameList
from bsfg.stores.log.segments import Scan, SegmentFile, scan_segment
from bsfg.stores.shared.frame import (
    FRAME_HEADER_BYTES,
    Damaged,
    SegmentHeader,
    Torn,
    decode_frame_header,
    decode_segment_header,
    encode_frame,
    encode_segment_header,
    genesis,
)
from bsfg.testing.disk import SimulatedDisk

LOG_ID = b"i" * 16
HEADER = encode_segment_header(SegmentHeader(LOG_ID, 10, -1, genesis(LOG_ID), 0, FACT_SCHEMA))


def frames_of(random: Random, count: int) -> list[bytes]:
    """Make frames that follow each other, of any content."""
    made, base, chain = [], 10, genesis(LOG_ID)
    for _ in range(count):
        facts = random.choice((1, 1, 1, 2, 70))
        payload = random.randbytes(random.choice((0, 1, 15, 16, 17, 300)))
        parts, chain = encode_frame(
            payload, base=base, count=facts, appended_at_unix_ms=base, log_id=LOG_ID, chain_before=chain
        )
        made.append(b"".join(map(bytes, parts)))
        base += facts
    return made


def harmed(random: Random, frames: list[bytes]) -> bytes:
    """Put frames one after the other, with whatever can happen to a file."""
    kind = random.random()
    at = random.randrange(len(frames))
    if kind < 0.15:
        del frames[at]
    elif kind < 0.3:
        frames.insert(at, random.choice(frames))
    elif kind < 0.4:
        frames[at] = frames_of(Random(7), 1)[0]
    starts = [0, *accumulate(map(len, frames))]
    data = b"".join(frames)
    if 0.4 <= kind < 0.85:
        places = [start + place for start in starts for place in range(0, FRAME_HEADER_BYTES, 4)]
        data = campaign.mutated(random, data, places)
    if random.random() < 0.3:
        data = data[: random.randrange(len(data) + 1)]
    return data


def told(scan: Scan) -> tuple[object, ...]:
    """Give everything that a walk found."""
    found = [(ref.base, ref.count, ref.position, ref.header) for ref in scan.frames]
    return found, scan.holes, scan.unchained, scan.sound_bytes, scan.torn, scan.torn_range, scan.chain


def found_as_step_by_step(random: Random) -> str:
    """Walk through a segment with the walk in one go, and without it."""
    data = HEADER + harmed(random, frames_of(random, random.choice((1, 2, 5, 12))))
    header, torn = decode_segment_header(data), random.random() < 0.5
    scan = scan_segment(data, header, tail_may_be_torn=torn)
    with patch.object(segments, "follow", lambda data, at, expected, log_id, chain, found: (at, expected, chain)):
        step_by_step = scan_segment(data, header, tail_may_be_torn=torn)
    assert told(scan) == told(step_by_step)
    return "holes" if scan.holes else "unchained" if scan.unchained else "torn" if scan.torn else "whole"


@pytest.mark.soak
def test_frames_are_found_as_step_by_step() -> None:
    """Bits, numbers, lost, doubled, replaced and cut frames: both walks find the same frames, holes, end and chain."""
    campaign.run(found_as_step_by_step, short=1_500, must_see=("holes", "unchained", "torn", "whole"))


def test_frames_are_remembered_like_a_list() -> None:
    """What was added is given back by index, slice, offset and chain value, and can be cut at an offset."""
    data = b"".join(frames_of(Random(1), 40))
    frames, listed = FrameList(), []
    for position in (at for at in range(0, len(data), 16) if data[at : at + 4] == b"FRM1"):
        frames.append(position, data[position : position + FRAME_HEADER_BYTES])
        listed.append(frames[-1])
    assert [ref.position for ref in listed] == sorted({ref.position for ref in listed})
    assert list(frames) == listed
    assert frames[3:9] == listed[3:9]
    assert frames[-2:] == listed[-2:]
    assert list(reversed(frames)) == listed[::-1]
    for bad in (40, -41):
        with pytest.raises(IndexError):
            frames[bad]
    for offset in range(9, listed[-1].end + 1):
        below = [at for at, ref in enumerate(listed) if ref.base <= offset]
        assert frames.at_or_below(offset) == (below[-1] if below else -1)
        begins = [ref.header.chain_before for ref in listed if ref.base == offset]
        assert frames.chain_before(offset) == (begins[0] if begins else None)
    assert frames.cut(listed[-1].end) is None
    assert frames.cut(listed[25].base - 1 + 1) == listed[25].header.chain_before
    assert list(frames) == listed[:25]


def disk_with(data: bytes) -> SimulatedDisk:
    """Make a disk with one segment."""
    disk = SimulatedDisk()
    file = disk.create("a.seg")
    file.write([data])
    file.close()
    return disk


def hopped_as_step_by_step(random: Random) -> str:
    """Find the frames of a sealed segment in one go, and with one call for each header."""
    data = HEADER + harmed(random, frames_of(random, random.choice((1, 2, 5, 40))))
    until = random.choice((None, None, random.randrange(10, 60)))
    found: list[tuple[object, object]] = []
    for at_once_bytes in (random.choice((FRAME_HEADER_BYTES, 300, 2_000, 1 << 18)), FRAME_HEADER_BYTES):
        segment = SegmentFile(disk_with(data), "a.seg", decode_segment_header(data), len(data))
        segment.until = until
        with ExitStack() as patched:
            patched.enter_context(patch.object(segments, "_AT_ONCE_BYTES", at_once_bytes))
            if found:
                patched.enter_context(patch.object(segments, "hop", one_hop))
            found.append(([(ref.position, ref.header) for ref in segment.frames], segment.holes))
    assert found[0] == found[1]
    return "holes" if found[0][1] else "whole"


def one_hop(data: bytes, at: int, expected: int, until: int, log_id: bytes, found: FrameList) -> tuple[int, int]:
    """Read one header as it is read everywhere else."""
    del until
    try:
        header = decode_frame_header(data[:FRAME_HEADER_BYTES])
    except (Torn, Damaged):
        return at, expected
    if (header.base, header.log_id) != (expected, log_id):
        return at, expected
    found.append(at, data[:FRAME_HEADER_BYTES])
    return at + header.frame_bytes, header.end


@pytest.mark.soak
def test_headers_are_found_as_step_by_step() -> None:
    """The frames of a sealed segment, harmed or not, are found by their headers whichever way those are read."""
    campaign.run(hopped_as_step_by_step, short=1_500, must_see=("holes", "whole"))


def test_headers_are_read_together_and_alone_where_that_fails() -> None:
    """Small frames cost few reads; a bad sector behind a header does not hide the header."""
    data = HEADER + b"".join(frames_of(Random(3), 2_000))
    disk = disk_with(data)
    segment = SegmentFile(disk, "a.seg", decode_segment_header(data), len(data))
    expected = list(segment.frames)
    assert len(expected) == 2_000 and disk._calls["read"] < 10
    widest = max(expected, key=lambda ref: ref.header.payload_bytes)
    disk.spoil("a.seg", widest.position + FRAME_HEADER_BYTES, 1)
    again = SegmentFile(disk, "a.seg", segment.header, len(data))
    assert list(again.frames) == expected and not again.holes
