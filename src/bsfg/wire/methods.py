"""The methods of the two services as the protocol files state them, for servers and callers alike.

Handlers and callables are made from the descriptors, so there is nothing beside the generated messages that could
fall out of step with the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

from bsfg.wire import admin_pb2, boundary_pb2
from bsfg.wire.large import read_of_peer, reader_of


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
