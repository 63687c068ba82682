"""Artifacts on the wire: a description, then chunks, in bounded memory whatever their size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.errors import FrameInvalid, InvalidArgument, Overloaded, TimedOut
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.incoming import Incoming
from bsfg.wire.service import BoundaryService, Caller, ObjectInfo

CHUNK_BYTES = 256 << 10


def description_message(info: ObjectInfo) -> pb.ObjectDescription:
    """Write the description of an artifact."""
    return pb.ObjectDescription(
        bucket=info.bucket,
        key=info.key,
        media_type=info.media_type,
        file_name=info.file_name,
        digest=info.digest,
        size_bytes=info.size_bytes,
        link=info.link,
    )


def object_info(found: pb.ObjectDescription) -> ObjectInfo:
    """Read the description of an artifact."""
    return ObjectInfo(
        bucket=found.bucket,
        key=found.key,
        media_type=found.media_type or DEFAULT_MEDIA_TYPE,
        file_name=found.file_name if found.HasField("file_name") else None,
        digest=found.digest if found.HasField("digest") else None,
        size_bytes=found.size_bytes if found.HasField("size_bytes") else None,
        link=found.link if found.HasField("link") else None,
    )


async def upload(service: BoundaryService, requests: Incoming, caller: Caller) -> pb.PutObjectResponse:
    """Take an upload; a caller that falls silent in the middle gets `timed_out`, and nothing is stored."""

    async def next_part() -> pb.PutObjectRequest | None:
        part: pb.PutObjectRequest | None = await anext(requests, None)
        if part is None and requests.fell_silent:
            if requests.is_given_up:
                raise Overloaded("too many messages are on their way to the node", limit="awaited_messages")
            raise TimedOut("the upload fell silent before its end")
        return part

    async def chunks() -> AsyncIterator[bytes]:
        while (part := await next_part()) is not None:
            if part.WhichOneof("part") != "chunk":
                raise InvalidArgument("an upload has one description, then chunks")
            yield part.chunk

    first = await next_part()
    if first is None or first.WhichOneof("part") != "description":
        raise InvalidArgument("an upload begins with its description")
    stored = await service.put_object(caller, object_info(first.description), chunks())
    return pb.PutObjectResponse(
        digest=stored.digest or "", size_bytes=stored.size_bytes or 0, already_exists=stored.already_exists
    )


async def read_download(
    answers: AsyncGenerator[pb.GetObjectResponse, None], idle_timeout_seconds: float
) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
    """Give the description of a download and its bytes; a node that falls silent gets `timed_out`."""

    async def next_part() -> pb.GetObjectResponse | None:
        try:
            async with asyncio.timeout(idle_timeout_seconds):
                return await anext(answers, None)
        except TimeoutError:
            raise TimedOut(f"an artifact did not go on within {idle_timeout_seconds:g} s") from None

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with aclosing(answers):
            while (part := await next_part()) is not None:
                yield part.chunk

    first = await next_part()
    if first is None or first.WhichOneof("part") != "description":
        raise FrameInvalid("a download begins with its description")
    return object_info(first.description), chunks()


async def download(
    service: BoundaryService, request: pb.GetObjectRequest, caller: Caller
) -> AsyncIterator[pb.GetObjectResponse]:
    """Give an artifact: its description, then its bytes."""
    digest = request.digest if request.HasField("digest") else None
    info, data = await service.get_object(caller, request.bucket, request.key, digest)
    yield pb.GetObjectResponse(description=description_message(info))
    async for piece in data:
        for start in range(0, len(piece), CHUNK_BYTES):
            yield pb.GetObjectResponse(chunk=piece[start : start + CHUNK_BYTES])
