"""The caller's streams: batches of facts to append, and frames that a link brought."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bsfg.batch import FactBatch
from bsfg.clock import SystemClock
from bsfg.offload import by_size
from bsfg.ports import Frame, Gap, GapRecord, GapSet, Receipt
from bsfg.sealmark import SHA256_NAME
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.connection import Connection
from bsfg.wire.convert import gap_message, gap_set_message, refusal_of
from bsfg.wire.frames import read_ack, with_batch
from bsfg.wire.framestream import FrameStream
from bsfg.wire.service import PutOutcome
from bsfg.wire.status import error_of


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of the facts of a frame; everything it names is durable.

    ``digests`` has a row of 32 bytes per fact, all made by the function ``hasher``. ``message_ids`` is None where the
    ids are those that were sent.
    """

    receipt: Receipt
    digests: np.ndarray
    message_ids: list[str] | None = None
    hasher: str = SHA256_NAME

    def __len__(self) -> int:
        return len(self.receipt.offsets)


class AppendStream:
    """Appends batches to one stream of a node, many in flight; see `FrameStream` for what happens when it breaks."""

    def __init__(self, connection: Connection, stream: str, *, window_frames: int = 16) -> None:
        self._stream = stream
        self._frames = FrameStream(connection, "AppendFacts", _appended, window_frames=window_frames)

    @property
    def is_open(self) -> bool:
        """Whether batches can be sent."""
        return self._frames.is_open

    async def send(self, facts: FactBatch) -> asyncio.Future[Appended]:
        """Send a batch and give the future of its answer; an error of the batch alone is the future's."""
        number = self._frames.number()
        message = pb.AppendFrame(stream=self._stream, sequence=number)
        return await self._frames.send(number, await _with_batch(message, "facts", facts))

    async def append(self, facts: FactBatch) -> Appended:
        """Send a batch and wait for its answer."""
        return await (await self.send(facts))

    async def close(self) -> None:
        """Wait for the answers to what was sent and end the call."""
        await self._frames.close()

    async def __aenter__(self) -> AppendStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class PutStream:
    """Puts what a link brought into the forward buffer of the zone's own node; for pipelines."""

    def __init__(
        self,
        connection: Connection,
        link: str,
        stream: str,
        log_id: str,
        *,
        lease: str | None,
        window_frames: int,
        sender_ahead_ms: int | None = None,
    ) -> None:
        self._fixed: dict[str, Any] = {"link": link, "stream": stream, "log_id": log_id, "lease": lease}
        self._frames = FrameStream(connection, "PutFacts", _put, window_frames=window_frames)
        self._sender_ahead_ms = sender_ahead_ms

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._frames.is_open

    async def send(
        self, frame: Frame, gaps: Sequence[Gap] = (), *, served_at_unix_ms: int | None = None
    ) -> asyncio.Future[PutOutcome]:
        """Send a frame as it was fetched, and give the future of its outcome.

        ``served_at_unix_ms`` is what the sender's clock said when it gave the frame; when it is not given, it follows
        from how far that clock is ahead of the one of here, if that is known.
        """
        if served_at_unix_ms is None and self._sender_ahead_ms is not None:
            served_at_unix_ms = SystemClock().now_unix_ms() + self._sender_ahead_ms
        number = self._frames.number()
        message = pb.PutFrame(
            **self._fixed,
            sequence=number,
            first=frame.first,
            last=frame.last,
            gap=gap_message(frame.gap) if frame.gap is not None else None,
            gaps=[gap_message(each) for each in gaps if isinstance(each, GapRecord)],
            gap_sets=[gap_set_message(each) for each in gaps if isinstance(each, GapSet)],
            skips=[gap_set_message(each) for each in frame.skips],
            served_at_unix_ms=served_at_unix_ms,
        )
        if frame.entries is None:
            return await self._frames.send(number, message)
        return await self._frames.send(number, await _with_batch(message, "entries", frame.entries))

    async def send_gaps(self, at: int, gaps: Sequence[Gap]) -> asyncio.Future[PutOutcome]:
        """Send gap records that the sender got from other zones, when it has no facts to go with them."""
        return await self.send(Frame(at, at - 1), gaps)

    async def put(self, frame: Frame, gaps: Sequence[Gap] = ()) -> PutOutcome:
        """Send a frame and wait for its outcome."""
        return await (await self.send(frame, gaps))

    async def close(self) -> None:
        """Wait for the answers to what was sent and end the call."""
        await self._frames.close()

    def abandon(self) -> None:
        """End the call at once."""
        self._frames.abandon()

    async def __aenter__(self) -> PutStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _appended(ack: pb.AppendAck) -> Appended:
    if ack.HasField("error"):
        raise error_of(ack.error)
    receipt, digests = read_ack(ack)
    hasher = ack.hasher if ack.HasField("hasher") else SHA256_NAME
    return Appended(receipt, digests, list(ack.message_ids) or None, hasher)


def _put(ack: pb.PutAck) -> PutOutcome:
    if ack.HasField("error") and not ack.held:
        raise error_of(ack.error)
    return PutOutcome(
        through=ack.through,
        inserted=ack.inserted,
        repeated=ack.repeated,
        refusals=[refusal_of(each) for each in ack.refusals],
        chain_head=ack.chain_head,
        refetch_at=ack.refetch_at if ack.HasField("refetch_at") else None,
        held_code=ack.error.code if ack.held else "",
        held_detail=ack.error.message if ack.held else "",
    )


async def _with_batch(message: Any, field: str, batch: FactBatch) -> bytes:
    return await by_size(batch.weight_bytes, with_batch, message, field, batch)
