"""The methods of both services as the protocol files state them, and large messages read where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from bsfg.errors import FrameInvalid, InvalidArgument
from bsfg.wire import admin_pb2, boundary_pb2
from bsfg.wire import boundary_pb2 as pb

LARGE_BYTES = 16 << 10
"""Smaller messages are left to protobuf, which is quicker with those."""

COUNTED_BYTES = 64 << 10
"""The fields of larger messages are counted before they are read."""

ANSWER_FIELDS_MAX, ANSWER_REST_BYTES = 70_000, 4 << 20
"""What an answer of a peer may have beside its batches."""

_STEP_FIELDS = 200
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# What has more fields than this is not mostly a batch, and protobuf walks over them a hundred times as fast.
_FIELDS_MAX, _FRAMES_MAX = 64, 1024
# A size of more bytes is longer than any message, or than it needs to be.
_VALUE_BYTES_MAX, _SIZE_BYTES_MAX, _TAG_BYTES_MAX = 10, 4, 5


class Large:
    """A message whose batch was taken out: the batch is a view, everything else is the message's own."""

    __slots__ = ("_batch", "_field", "_message", "_size_bytes")

    def __init__(self, message: Any, field: str, batch: memoryview, size_bytes: int) -> None:
        self._message, self._field, self._batch, self._size_bytes = message, field, batch, size_bytes

    def __getattr__(self, name: str) -> Any:
        return self._batch if name == self._field else getattr(self._message, name)

    def WhichOneof(self, group: str) -> str:
        """Name the member of the only group that such messages have."""
        del group
        return self._field

    def ByteSize(self) -> int:
        """Give the size of the whole message."""
        return self._size_bytes


class LargeResponse:
    """A response with frames that were taken out of it."""

    __slots__ = ("frames",)

    def __init__(self, frames: list[Any]) -> None:
        self.frames = frames


def reader_of(message_type: Any) -> Callable[[bytes], Any]:
    """Give the function that reads messages of a type."""
    if message_type is pb.FetchResponse:
        return read_response
    field = _BATCHES.get(message_type)
    if field is None:
        read: Callable[[bytes], Any] = message_type.FromString
        return read
    return lambda data: read_message(message_type, field, memoryview(data))


def read_at_once(message_type: Any, data: bytes) -> Any | None:
    """Read a message with a large batch if that takes next to no time; None when it is to be read with care."""
    field = _BATCHES.get(message_type)
    if field is None or len(data) <= LARGE_BYTES:
        return None
    taken = _taken(memoryview(data), message_type.DESCRIPTOR.fields_by_name[field].number, _FIELDS_MAX)
    if taken is None or len(taken[0]) > LARGE_BYTES:
        return None
    return read_counted(message_type, data)


def read_counted(message_type: Any, data: bytes) -> Any:
    """Read any message of which the fields were counted if it is large; raises `FrameInvalid` when it is none."""
    try:
        return reader_of(message_type)(data)
    except DecodeError:
        raise FrameInvalid(f"the message is no {message_type.DESCRIPTOR.name}") from None


def read_of_peer(message_type: Any) -> Callable[[bytes], Any | None]:
    """Give the function that reads what a peer answers, who may mean no good; None is for what cannot be read.

    It makes no objects but those of a few fields, however large the answer is. Whoever asks a peer asks for frames, so
    an answer in which anything else is large is none.
    """

    def read(data: bytes) -> Any | None:
        try:
            if len(data) > COUNTED_BYTES:
                _check_answer(message_type, memoryview(data))
            return reader_of(message_type)(data)
        except (DecodeError, FrameInvalid):
            return None

    return read


def _check_answer(message_type: Any, data: memoryview) -> None:
    """Raise `FrameInvalid` unless an answer is mostly frames with batches, or has few fields."""
    left = ANSWER_FIELDS_MAX
    inside = [(data, message_type)]
    while inside:
        part, kind = inside.pop()
        batch = _BATCHES.get(kind)
        number = kind.DESCRIPTOR.fields_by_name[batch or "frames"].number if batch or kind is pb.FetchResponse else 0
        # What came packed is one field, and is judged when it is unpacked.
        packed = _PACKED if kind is pb.FetchResponse else 0
        rest = bytearray()
        try:
            for start, found, begin, end in _fields(part, _TAG_BYTES_MAX):
                left -= 1
                if left < 0 or len(rest) > ANSWER_REST_BYTES:
                    raise FrameInvalid("the answer has far more fields than it needs", limit="fields")
                if found == packed and packed:
                    continue
                if found != number or not number:
                    rest += part[start:end]
                elif kind is pb.FetchResponse:
                    inside.append((part[begin:end], pb.FetchFrame))
        except (IndexError, ValueError):
            raise FrameInvalid("the answer cannot be read") from None
        if len(rest) > COUNTED_BYTES:
            for _ in count_fields(kind, bytes(rest), ANSWER_FIELDS_MAX):
                pass


def count_fields(
    message_type: Any, data: bytes, max_fields: int, most: Mapping[str, int] = MappingProxyType({})
) -> Iterator[None]:
    """Raise when a message has too many fields, its inner messages included, or a list of it is too long.

    Each field of a message becomes an object when protobuf reads it, of many times the two bytes that it may have. It
    counts a step at a time, each of which is short.
    """
    top = message_type.DESCRIPTOR
    lists = {top.fields_by_name[name].number: (name, limit) for name, limit in most.items()}
    lengths: Counter[int] = Counter()
    left, whole = max_fields, memoryview(data)
    walks = [(_fields(whole, _TAG_BYTES_MAX), whole, top)]
    try:
        while walks:
            walk, part, kind = walks[-1]
            for _, number, begin, end in walk:
                left -= 1
                if left < 0:
                    raise FrameInvalid(f"the {top.name} has more than {max_fields} fields", limit="fields")
                if len(walks) == 1 and number in lists:
                    lengths[number] += 1
                    name, limit = lists[number]
                    if lengths[number] > limit:
                        raise InvalidArgument(f"{name} has a length of more than {limit}", field=name, limit=limit)
                if not left % _STEP_FIELDS:
                    yield
                known = kind.fields_by_number.get(number)
                if known is not None and known.message_type is not None and end > begin:
                    inner = part[begin:end]
                    walks.append((_fields(inner, _TAG_BYTES_MAX), inner, known.message_type))
                    break
            else:
                walks.pop()
    except (IndexError, ValueError):
        raise FrameInvalid(f"the message is no {top.name}") from None


def read_message(message_type: Any, field: str, data: memoryview) -> Any:
    """Read a message that may hold a batch; raises what protobuf raises when it is none."""
    known = message_type.DESCRIPTOR.fields_by_name[field]
    taken = _taken(data, known.number, _FIELDS_MAX) if len(data) > LARGE_BYTES else None
    if taken is None or len(taken[1]) != 1:
        return message_type.FromString(bytes(data))
    message = message_type.FromString(taken[0])
    group = known.containing_oneof
    if group is not None and message.WhichOneof(group.name) is not None:
        return message_type.FromString(bytes(data))
    return Large(message, field, taken[1][0], len(data))


def read_response(data: bytes) -> Any:
    """Read a response of which the large part is frames."""
    number = pb.FetchResponse.DESCRIPTOR.fields_by_name["frames"].number
    taken = _taken(memoryview(data), number, _FRAMES_MAX) if len(data) > LARGE_BYTES else None
    if taken is None or not taken[1]:
        return pb.FetchResponse.FromString(data)
    # Nothing of the rest is used where there are frames, but it must be what protobuf takes.
    pb.FetchResponse.FromString(taken[0])
    return LargeResponse([read_message(pb.FetchFrame, "entries", frame) for frame in taken[1]])


_PACKED = pb.FetchResponse.DESCRIPTOR.fields_by_name["packed"].number

_BATCHES: dict[Any, str] = {pb.AppendFrame: "facts", pb.PutFrame: "entries", pb.FetchFrame: "entries"}


def _taken(data: memoryview, number: int, max_fields: int) -> tuple[bytes, list[memoryview]] | None:
    """Take a field out of a message: give the rest and the field's values, or None for what is left to protobuf."""
    rest, values = [], []
    try:
        for count, (start, found, begin, end) in enumerate(_fields(data)):
            if count == max_fields:
                return None
            if found == number:
                values.append(data[begin:end])
            else:
                rest.append(data[start:end])
    except (IndexError, ValueError):
        return None
    return b"".join(rest), values


def _fields(data: memoryview, max_tag_bytes: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Walk over the fields of a message: where each starts, its number, and where its value begins and ends.

    No field of our messages has a number so high that its tag takes two bytes: it is unknown, or written in a way that
    is not ours.
    """
    at, size_bytes = 0, len(data)
    while at < size_bytes:
        start, tag, begin = at, data[at], at + 1
        if tag > 0x7F:
            tag, begin = _varint(data, at, max_tag_bytes)
        kind = tag & 7
        if kind == _VARINT:
            _, end = _varint(data, begin, _VALUE_BYTES_MAX)
        elif kind == _BYTES:
            size, begin = _varint(data, begin, _SIZE_BYTES_MAX)
            end = begin + size
        elif kind in (_FIXED32, _FIXED64):
            end = begin + (4 if kind == _FIXED32 else 8)
        else:
            raise ValueError(f"no field is of kind {kind}")
        if end > size_bytes:
            raise ValueError("a field reaches beyond the message")
        yield start, (tag >> 3) if kind == _BYTES else 0, begin, end
        at = end


def _varint(data: memoryview, at: int, max_bytes: int) -> tuple[int, int]:
    value = 0
    for count in range(max_bytes):
        byte = data[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    raise ValueError("a number has too many bytes")


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its path, which sides stream, and how its messages become bytes and back."""

    service: str
    name: str
    request_streams: bool
    response_streams: bool
    request_type: Any
    response_type: Any

    @property
    def path(self) -> str:
        """The path by which gRPC calls it."""
        return f"/{self.service}/{self.name}"

    def handler(self, behaviour: Callable[..., Any]) -> Any:
        """Give the server's handler of this method, which reads every request by itself, as bytes.

        On the wire one request is a stream of one. A handler for streams is called before anything is read, and can
        refuse a caller, or lose patience with him, before his message takes memory or time.
        """
        make = grpc.stream_stream_rpc_method_handler if self.response_streams else grpc.stream_unary_rpc_method_handler
        return make(behaviour, None, serialized)

    def callable(self, channel: grpc.aio.Channel, *, of_peer: bool = False) -> Any:
        """Give what a caller calls on a channel; ``of_peer`` reads answers as those of somebody who may lie."""
        make = (
            (channel.unary_unary, channel.unary_stream),
            (channel.stream_unary, channel.stream_stream),
        )[self.request_streams][self.response_streams]
        return make(self.path, serialized, (read_of_peer if of_peer else reader_of)(self.response_type))


def serialized(message: Any) -> bytes:
    """Give the bytes of a message; large ones may come as bytes already, to save copies (see `bsfg.wire.frames`)."""
    if type(message) is bytes:
        return message
    data: bytes = message.SerializeToString()
    return data


def methods_of(file: Any, service: str) -> dict[str, Method]:
    """Give the methods of a service that a protocol file describes."""
    found = file.services_by_name[service]
    return {
        method.name: Method(
            found.full_name,
            method.name,
            method.client_streaming,
            method.server_streaming,
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
        )
        for method in found.methods
    }


BOUNDARY: Mapping[str, Method] = methods_of(boundary_pb2.DESCRIPTOR, "Boundary")
ADMIN: Mapping[str, Method] = methods_of(admin_pb2.DESCRIPTOR, "Admin")
BOUNDARY_SERVICE = "bsfg.v1.Boundary"
ADMIN_SERVICE = "bsfg.v1.Admin"


def snake(name: str) -> str:
    """Give the name of a method in the form of Python: AppendFact is append_fact."""
    return "".join("_" + char.lower() if char.isupper() else char for char in name).lstrip("_")
