"""A node for tests of the sender: it dedupes as a real one does, and breaks as often as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import (
    BsfgError,
    BufferFull,
    InvalidFact,
    MessageTooLarge,
    PeerUnreachable,
    PermissionRefused,
)
from bsfg.ports import Receipt, Result
from bsfg.wire.streams import Appended


@dataclass
class FakeNode:
    """Stores facts by id; ``trouble`` is the chance that something goes wrong with a frame."""

    random: Random = field(default_factory=lambda: Random(0))
    trouble: float = 0.0
    max_frame_bytes: int = 1_000_000
    silent: bool = False
    error: BsfgError | None = None
    stored: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    frames: int = 0
    streams: int = 0
    renewed: int = 0
    open: list[FakeStream] = field(default_factory=list)

    # The part of `NodeLink` that a sender uses.

    @property
    def client(self) -> FakeNode:
        """The link is its own client."""
        return self

    def append_stream(self, stream: str, *, window_frames: int) -> FakeStream:
        """Open a stream."""
        self.streams += 1
        opened = FakeStream(self, window_frames)
        self.open.append(opened)
        return opened

    async def renew(self) -> None:
        """Break everything that is open."""
        self.renewed += 1
        self.silent = False
        for stream in self.open:
            stream.broken(PeerUnreachable("the connection was replaced"))

    # What a node does with a frame.

    def append(self, facts: FactBatch) -> Appended:
        """Store a frame, or raise why nothing of it is."""
        self.frames += 1
        for row, (predicate, zone) in enumerate(zip(facts.values("predicate"), facts.values("to_zone"), strict=True)):
            if predicate == "bad":
                raise InvalidFact(f"row {row}, predicate: no", row=row, field="predicate", rule="no")
            if zone == "forbidden":
                raise PermissionRefused("may not address to_zone 'forbidden'")
        offsets, results = [], []
        for id, body in zip(facts.values("message_id"), facts.values("object"), strict=True):
            known = self.stored.get(id)
            if known is None:
                self.stored[id] = known = (len(self.order), body)
                self.order.append(id)
                results.append(Result.INSERTED)
            else:
                results.append(Result.ALREADY_EXISTS if known[1] == body else Result.CONFLICT)
            offsets.append(known[0])
        found = np.array(offsets, np.int64)
        return Appended(Receipt(found, np.array(results, np.uint8), b"", 1), np.zeros((len(found), 32), np.uint8))


class FakeStream:
    """One stream of frames to a fake node."""

    def __init__(self, node: FakeNode, window_frames: int) -> None:
        self._node, self._window = node, asyncio.Semaphore(window_frames)
        self._failure: BsfgError | None = None
        self._waiting: list[asyncio.Future[Appended]] = []
        self.window_frames = window_frames

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._failure is None

    async def send(self, facts: FactBatch) -> asyncio.Future[Appended]:
        """Take a frame and answer it, or break before or after it was stored."""
        await self._window.acquire()
        if self._failure is not None:
            raise self._failure
        assert len(self._waiting) < self.window_frames
        answer: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(self._settled)
        self._waiting.append(answer)
        asyncio.get_running_loop().call_soon(self._handle, facts, answer)
        return answer

    def _settled(self, answer: asyncio.Future[Appended]) -> None:
        self._waiting.remove(answer)
        self._window.release()
        answer.exception()

    def _handle(self, facts: FactBatch, answer: asyncio.Future[Appended]) -> None:
        node = self._node
        if answer.done() or node.silent:
            return
        if facts.nbytes > node.max_frame_bytes:
            self.broken(MessageTooLarge("larger than max"))
            return
        what = node.random.choice(["before", "after", "full"]) if node.random.random() < node.trouble else "fine"
        if what == "before":
            self.broken(PeerUnreachable("broken before it was stored"))
            return
        self._answer(answer, lambda: self._stored(facts, what))
        if what == "after":
            self.broken(PeerUnreachable("broken after it was stored"))

    def _stored(self, facts: FactBatch, what: str) -> Appended | None:
        if self._node.error is not None:
            raise self._node.error
        if what == "full":
            raise BufferFull("full")
        stored = self._node.append(facts)
        return None if what == "after" else stored

    def _answer(self, answer: asyncio.Future[Appended], work: Callable[[], Appended | None]) -> None:
        try:
            result = work()
        except BsfgError as error:
            answer.set_exception(error)
        else:
            if result is not None:
                answer.set_result(result)

    def broken(self, error: BsfgError) -> None:
        """Let everything fail that was not answered."""
        self._failure = self._failure or error
        for answer in list(self._waiting):
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        """End the stream."""
        self._failure = self._failure or PeerUnreachable("closed")
        if self in self._node.open:
            self._node.open.remove(self)
