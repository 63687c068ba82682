"""Messages with a batch in them: reading them in place gives what protobuf gives, for good bytes and for bad ones."""

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bsfg.batch import EntryBatch
from bsfg.journey.link import Fetched
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.testing.facts import messages, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.frames import frames_response, read_frame, read_head
from bsfg.wire.messages import LARGE_BYTES, Large, LargeResponse, read_of_peer, read_response, reader_of

BATCH = b"x" * (LARGE_BYTES + 1)
GAP = pb.GapRecord(first=1, last=2, reason="expired")


def plain(found: Any, message_type: Any) -> Any:
    """Give what was read as a message of protobuf."""
    if not isinstance(found, Large):
        return found
    message = message_type.FromString(found._message.SerializeToString())
    setattr(message, found._field, bytes(found._batch))
    return message


@pytest.mark.parametrize(
    "message",
    [
        pb.AppendFrame(stream="s", sequence=2**63, facts=BATCH),
        pb.AppendFrame(facts=BATCH),
        pb.FetchFrame(first=-5, last=2**62, entries=BATCH),
        pb.PutFrame(
            link="l", stream="s", log_id="i", first=3, last=4, sequence=5, entries=BATCH, gaps=[GAP], lease="t"
        ),
    ],
)
def test_a_large_batch_is_taken_out(message: Any) -> None:
    """The batch is a view of the bytes that came in; everything else is as protobuf reads it."""
    data = message.SerializeToString()
    found = reader_of(type(message))(data)
    assert isinstance(found, Large)
    batch = found.facts if isinstance(message, pb.AppendFrame) else found.entries
    assert isinstance(batch, memoryview)
    assert batch.obj is data
    assert plain(found, type(message)) == message
    assert found.ByteSize() == message.ByteSize()


@pytest.mark.parametrize(
    "message",
    [
        pb.AppendFrame(stream="s", sequence=1, facts=b"x"),
        pb.FetchFrame(first=1, last=1, gap=pb.GapRecord(detail="x" * 2 * LARGE_BYTES)),
        pb.FetchFrame(first=1, last=0, head=pb.FetchHead(log_id="x" * 2 * LARGE_BYTES)),
        pb.AppendFrame(stream="s" * 2 * LARGE_BYTES),
        pb.ConfirmRequest(consumer="c" * 2 * LARGE_BYTES),
    ],
)
def test_other_messages_are_left_to_protobuf(message: Any) -> None:
    """What is small, or large for another reason, is read as ever."""
    assert reader_of(type(message))(message.SerializeToString()) == message


def test_the_last_of_two_counts() -> None:
    """Where a message says one thing twice, or two things of which only one can be, the last one counts."""
    one, two = pb.AppendFrame(facts=BATCH), pb.AppendFrame(facts=b"y" + BATCH)
    data = one.SerializeToString() + two.SerializeToString()
    assert reader_of(pb.AppendFrame)(data) == two
    entries, gap = pb.FetchFrame(entries=BATCH), pb.FetchFrame(gap=GAP)
    for first, second in ((entries, gap), (gap, entries)):
        data = first.SerializeToString() + second.SerializeToString()
        assert plain(reader_of(pb.FetchFrame)(data), pb.FetchFrame) == pb.FetchFrame.FromString(data)


@given(st.binary(max_size=40), st.integers(0, 60), st.binary(max_size=3))
@example(b"\x0b", 0, b"")
@example(b"\xff" * 10, 0, b"")
@settings(max_examples=300)
def test_damaged_messages_end_as_with_protobuf(noise: bytes, at: int, more: bytes) -> None:
    """Noise anywhere in a message leads to the same message or to the same refusal."""
    good = pb.AppendFrame(stream="stream", sequence=77, facts=BATCH).SerializeToString()
    data = good[:at] + noise + good[at + len(noise) :] + more
    try:
        expected = pb.AppendFrame.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            reader_of(pb.AppendFrame)(data)
        return
    assert plain(reader_of(pb.AppendFrame)(data), pb.AppendFrame) == expected


@pytest.mark.parametrize("count", [1, 300])
def test_responses_of_frames(count: int) -> None:
    """A response with frames, small or large, gives the answer that was written; protobuf reads it as well."""
    entries = EntryBatch.of(sealed(messages(count)).record_batch, np.arange(5, 5 + count), 7)
    gap = GapRecord(5 + count, 5 + count, GapReason.EXPIRED, 9, "gone")
    frames = [Frame(5, 4 + count, entries), Frame(5 + count, 5 + count, gap=gap)]
    fetched = Fetched("id", 5, 1_000, b"h" * 32, frames, [gap], "token")
    data = frames_response(fetched)
    found = read_response(data)
    assert isinstance(found, LargeResponse) == (count == 300)
    for response in (found, pb.FetchResponse.FromString(data)):
        again = read_head(response.frames[0], [read_frame(each) for each in response.frames[1:]])
        assert again == fetched


def test_large_responses_without_frames() -> None:
    """A response with many entries and no frames is protobuf's alone."""
    response = pb.FetchResponse(log_id="x" * 2 * LARGE_BYTES, end=5)
    assert read_response(response.SerializeToString()) == response


def _bomb(number: int, size_bytes: int) -> bytes:
    return bytes([number << 3 | 2, 0]) * (size_bytes // 2)


def _inside(number: int, data: bytes) -> bytes:
    """Give a field that holds some bytes."""
    size, length = bytearray(), len(data)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2]) + bytes(size) + bytes([length]) + data


@pytest.mark.parametrize(
    "data",
    [
        _bomb(1, 8 << 20),
        _bomb(8, 8 << 20),
        _inside(1, _inside(3, _bomb(7, 8 << 20))),
        _inside(8, _inside(3, _bomb(5, 8 << 20))),
        _inside(8, _inside(4, b"x" * LARGE_BYTES)) + _bomb(2, 8 << 20),
        _inside(8, _inside(4, b"x" * LARGE_BYTES) + _bomb(6, 8 << 20)),
        b"\x18\x00" * (4 << 20),
        b"\xff" * (1 << 20),
    ],
)
def test_an_answer_of_many_fields_is_none(data: bytes) -> None:
    """Whatever a hostile peer fills an answer with, it is given up before it becomes objects."""
    assert read_of_peer(pb.FetchResponse)(data) is None
    assert read_of_peer(pb.FetchResponse)(b"\xff\xff") is None


@given(st.integers(0, 40), st.integers(0, 2_000))
@settings(max_examples=20, deadline=None)
def test_an_honest_answer_is_read_with_care_too(frames: int, gaps: int) -> None:
    """Answers with many frames, gaps and large batches are read as they are."""
    head = pb.FetchFrame(head=pb.FetchHead(gaps=[GAP] * gaps, log_id="x"))
    parts = [pb.FetchFrame(first=at, last=at, entries=BATCH) for at in range(frames)]
    data = pb.FetchResponse(frames=[head, *parts]).SerializeToString()
    found = read_of_peer(pb.FetchResponse)(data)
    assert found is not None
    assert [bytes(each.entries) for each in found.frames] == [each.entries for each in (head, *parts)]
    assert len(found.frames[0].head.gaps) == gaps
