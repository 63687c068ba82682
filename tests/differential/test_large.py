"""Messages whose batch is taken out where it lies are what protobuf reads, or what protobuf refuses."""

from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.differential import campaign

from bsfg.wire import boundary_pb2 as pb
from bsfg.wire import frames
from bsfg.wire.messages import LARGE_BYTES, Large, LargeResponse, reader_of

BATCHES = [b"x" * (LARGE_BYTES + 1), bytes(LARGE_BYTES + 7), b"\x0a\x02\x10\x01" * (LARGE_BYTES // 4 + 1)]
TYPES: dict[Any, str] = {pb.AppendFrame: "facts", pb.PutFrame: "entries", pb.FetchFrame: "entries"}
GAP = pb.GapRecord(first=1, last=2, reason="expired", detail="é")


def varint(random: Random, number: int) -> bytes:
    """Write a number, now and then with more bytes than it needs."""
    data = bytearray(frames.varint(number))
    if random.random() < 0.1:
        for _ in range(random.choice((1, 2, 4, 9))):
            data[-1] |= 0x80
            data.append(random.choice((0, 0, 0, 1, 2)))
    return bytes(data)


def field(random: Random, number: int, value: bytes) -> bytes:
    """Write a field of bytes."""
    return varint(random, number << 3 | 2) + varint(random, len(value)) + value


def pieces(random: Random, message_type: Any) -> list[bytes]:
    """Draw fields of a message, known and unknown ones, and one batch most of the time."""
    numbers = {name: known.number for name, known in message_type.DESCRIPTOR.fields_by_name.items()}
    batch = random.choice(BATCHES)
    found = [field(random, numbers[TYPES[message_type]], batch)]
    if random.random() < 0.1:
        found *= random.choice((0, 2))
    for _ in range(random.choice((0, 1, 3, 6))):
        number = random.choice((*numbers.values(), 0, 15, 16, 17, 2_000, 1 << 28))
        kind = random.randrange(8)
        tag = varint(random, number << 3 | kind)
        if kind == 0:
            found.append(tag + varint(random, random.getrandbits(64)))
        elif kind == 2:
            value = random.choice((b"", b"name", b"\xff\xfe", GAP.SerializeToString(), b"x" * 200))
            found.append(tag + varint(random, len(value)) + value)
        else:
            found.append(tag + random.randbytes({1: 8, 5: 4}.get(kind, random.randrange(3))))
    random.shuffle(found)
    return found


def message(random: Random, message_type: Any) -> bytes:
    """Draw a message as ours are, or of any fields, in any order."""
    if message_type is pb.FetchResponse:
        frames = [field(random, 8, message(random, pb.FetchFrame)) for _ in range(random.choice((1, 2, 3)))]
        frames += [random.choice((b"\x18\x05", b"\x2a\x01\xff", b"\x2a\x02id", b"\x7a\x01x"))] * (random.random() < 0.3)
        random.shuffle(frames)
        return b"".join(frames)
    if random.random() < 0.5:
        return b"".join(pieces(random, message_type))
    head = {"sequence": 7, "stream": "s"} if message_type is pb.AppendFrame else {"first": -1, "last": 9}
    made: bytes = message_type(**head, **{TYPES[message_type]: random.choice(BATCHES)}).SerializeToString()
    return made


def damaged(random: Random, data: bytes) -> bytes:
    """Damage a message, mostly where its fields begin."""
    near = random.choice((range(min(40, len(data))), range(max(0, len(data) - 40), len(data))))
    return campaign.mutated(random, data, near)


def plain(found: Any, message_type: Any) -> Any:
    """Give what was read as a message of protobuf."""
    if isinstance(found, LargeResponse):
        return [plain(frame, pb.FetchFrame) for frame in found.frames]
    if isinstance(found, Large):
        whole = message_type()
        whole.CopyFrom(found._message)
        setattr(whole, found._field, bytes(found._batch))
        return whole
    return list(found.frames) if message_type is pb.FetchResponse else found


def check(message_type: Any, data: bytes) -> str:
    """Read bytes by hand and with protobuf."""
    try:
        expected = message_type.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            reader_of(message_type)(data)
        return "refused"
    found = reader_of(message_type)(data)
    assert plain(found, message_type) == plain(expected, message_type)
    return "taken out" if isinstance(found, (Large, LargeResponse)) else "left to protobuf"


def read_as_protobuf_does(random: Random) -> str:
    """Read a message, damaged or not."""
    message_type = random.choice((pb.AppendFrame, pb.PutFrame, pb.FetchFrame, pb.FetchResponse))
    data = message(random, message_type)
    return check(message_type, data if random.random() < 0.3 else damaged(random, data))


@pytest.mark.soak
def test_messages_are_read_as_protobuf_reads_them() -> None:
    """Repeated, unknown, overlong and broken fields mean the same wherever they stand."""
    campaign.run(read_as_protobuf_does, short=4_000, must_see=("refused", "taken out", "left to protobuf"))


@given(st.sampled_from([*TYPES, pb.FetchResponse]), st.binary(max_size=30), st.integers(0, 40), st.booleans())
def test_noise_is_read_as_protobuf_reads_it(message_type: Any, noise: bytes, at: int, replace: bool) -> None:
    """The same with noise that is sought for being difficult."""
    inner = pb.FetchFrame(first=1, last=2, entries=BATCHES[0])
    messages: dict[Any, Any] = {
        pb.AppendFrame: pb.AppendFrame(stream="s", sequence=3, facts=BATCHES[0]),
        pb.PutFrame: pb.PutFrame(link="l", first=1, last=2, entries=BATCHES[0], gaps=[GAP], lease="t"),
        pb.FetchFrame: inner,
        pb.FetchResponse: pb.FetchResponse(log_id="i", frames=[inner, pb.FetchFrame(gap=GAP)]),
    }
    good = messages[message_type].SerializeToString()
    check(message_type, good[:at] + noise + good[at + len(noise) * replace :])
    check(message_type, good + noise)


def test_a_message_of_many_fields_is_left_to_protobuf() -> None:
    """Only what is mostly one batch is walked here: a hundred thousand fields are a matter for protobuf."""
    data = pb.AppendFrame(facts=BATCHES[0]).SerializeToString() + b"\x18\x07" * 100_000
    assert not isinstance(reader_of(pb.AppendFrame)(data), Large)
    assert check(pb.AppendFrame, data) == "left to protobuf"
    frames = pb.FetchResponse(frames=[pb.FetchFrame(first=1, last=1, entries=b"x")] * 10_000).SerializeToString()
    assert check(pb.FetchResponse, frames) == "left to protobuf"
