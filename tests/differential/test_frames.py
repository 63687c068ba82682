"""Frames are found in one go as they are found step by step, whatever the bytes of a segment are."""

from itertools import accumulate
from random import Random
from unittest.mock import patch

import pytest
from tests.differential import campaign

from bsfg.schema import FACT_SCHEMA
from bsfg.stores.log import segments
from bsfg.stores.log.frame import (
    FRAME_HEADER_BYTES,
    SegmentHeader,
    decode_segment_header,
    encode_frame,
    encode_segment_header,
    genesis,
)
from bsfg.stores.log.frames import Ahead, Frames
from bsfg.stores.log.segments import Scan, scan_segment

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
    frames, listed = Frames(), []
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


def test_headers_are_read_ahead_and_alone_where_that_fails() -> None:
    """Small frames cost few reads; a bad sector behind a header does not hide the header."""
    data, calls = Random(3).randbytes(1 << 20), []

    def read(at: int, count: int) -> bytes:
        calls.append((at, count))
        if at <= 600_000 < at + count:
            raise OSError(5, "Input/output error")
        return data[at : at + count]

    ahead = Ahead(read)
    for at in [*range(0, 590_000, 480), 599_000, 700_000, 700_480, len(data) - 100, len(data) - 50]:
        assert ahead.header(at) == data[at : at + FRAME_HEADER_BYTES]
    assert len(calls) < 500
    with pytest.raises(OSError, match="Input"):
        ahead.header(599_990)
