"""A sender with the right certificate and the wrong intentions: it answers the calls of a link as a test says."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import numpy as np
from tests.e2e.zones import Zone

from bsfg.batch import EntryBatch, FactBatch
from bsfg.fact import Message
from bsfg.testing.facts import sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.frames import encode
from bsfg.wire.messages import BOUNDARY, BOUNDARY_SERVICE
from bsfg.wire.status import ERROR_METADATA
from bsfg.wire.tls import Watched, grpc_server_credentials

Answers = Iterable[pb.FetchFrame | bytes]

HEALTH = b"/grpc.health.v1.Health/Check"
"""What a node asks a server when it looks at its certificate; see `bsfg.wire.probe`."""


def entries_of(
    messages: list[Message], first: int = 0, *, at_unix_ms: int = 1_900_000_000_000, **changed: Any
) -> EntryBatch:
    """Make entries of a store buffer, with columns exchanged after they were sealed."""
    facts: FactBatch = sealed(messages)
    if changed:
        facts = facts.with_columns(**changed)
    return EntryBatch.of(facts.record_batch, np.arange(first, first + len(messages)), at_unix_ms)


def head(log_id: str, start: int = 0, end: int = 10, **more: Any) -> pb.FetchFrame:
    """Write the head of an answer."""
    found = pb.FetchHead(log_id=log_id, start=start, end=end, chain_head=b"\x01" * 32, **more)
    return pb.FetchFrame(first=start, last=start - 1, head=found)


def frame(entries: EntryBatch, first: int | None = None) -> pb.FetchFrame:
    """Write a frame of entries, under other offsets than their own if the test says so."""
    start = int(entries.offsets[0]) if first is None else first
    return pb.FetchFrame(first=start, last=start + len(entries) - 1, entries=encode(entries))


class Liar:
    """Answers as the node of a zone: ``answer`` gives the frames of the next fetch, ``object`` those of an artifact.

    Where ``object`` is None a download never says a word.
    ``fetches`` and ``confirmed`` tell what was asked. An answer may be an endless generator.
    """

    def __init__(self, zone: Zone, certificate: str | None = None) -> None:
        self.zone, self._certificate = zone, certificate
        self.answer: Callable[[pb.FetchFramesRequest], Answers] = lambda request: []
        self.object: Callable[[pb.GetObjectRequest], Iterable[pb.GetObjectResponse]] | None = lambda request: []
        self.refuse_confirm: bytes | None = None
        self.fetches, self.sent = 0, 0
        self.confirmed: list[int] = []
        self.refusals: list[pb.Refusal] = []
        self._server: Any = None

    async def __aenter__(self) -> Liar:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        behaviours = {"FetchFrames": self._fetch, "ConfirmReceipt": self._confirm, "GetObject": self._get_object}
        handlers = {name: BOUNDARY[name].handler(behaviour) for name, behaviour in behaviours.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BOUNDARY_SERVICE, handlers),))
        credentials = grpc_server_credentials(Watched(self.zone.files(self._certificate)))
        assert self._server.add_secure_port(f"127.0.0.1:{self.zone.port}", credentials)
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)

    # On the wire one request is a stream of one, and handlers get its bytes.

    async def _fetch(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        request = pb.FetchFramesRequest.FromString(await anext(aiter(requests)))
        self.fetches += 1
        for answer in self.answer(request):
            self.sent += len(answer) if isinstance(answer, bytes) else answer.ByteSize()
            yield answer
            await asyncio.sleep(0)

    async def _confirm(self, requests: AsyncIterator[bytes], context: Any) -> pb.ConfirmResponse:
        request = pb.ConfirmRequest.FromString(await anext(aiter(requests)))
        if self.refuse_confirm is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "", ((ERROR_METADATA, self.refuse_confirm),))
        self.confirmed.append(request.through)
        self.refusals += request.refusals
        return pb.ConfirmResponse(cursor_advanced_to=request.through)

    async def _get_object(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        request = pb.GetObjectRequest.FromString(await anext(aiter(requests)))
        if self.object is None:
            await asyncio.Event().wait()
            return
        for answer in self.object(request):
            yield answer
            await asyncio.sleep(0)


def _h2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class RawServer:
    """A server that speaks HTTP/2 by hand and answers each call with bytes that gRPC itself would never send.

    ``calls`` counts those for facts, and not the question of health before them.
    """

    SETTINGS = _h2_frame(4, 0, 0)
    # Indexed ":status: 200", then "content-type: application/grpc" literally.
    HEADERS = b"\x88" + b"\x0f\x10" + bytes([16]) + b"application/grpc"

    def __init__(self, zone: Zone, data: bytes) -> None:
        self.zone, self.data, self.calls = zone, data, 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.zone.port, ssl=_with_alpn(self.zone))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(self.SETTINGS)
        while True:
            header = await reader.readexactly(9)
            length, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
            stream = int.from_bytes(header[5:], "big")
            payload = await reader.readexactly(length)
            if kind == 4 and not flags & 1:
                writer.write(_h2_frame(4, 1, 0))
            elif kind == 6 and not flags & 1:
                writer.write(_h2_frame(6, 1, 0, payload))
            elif kind == 1:
                self.calls += HEALTH not in payload
                writer.write(_h2_frame(1, 4, stream, self.HEADERS) + _h2_frame(0, 0, stream, self.data))


def _with_alpn(zone: Zone) -> ssl.SSLContext:
    files = zone.files()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    return context
