"""One ordered way into a buffer: frames are sent in order, many under way, and sent again in order when it breaks.

A lane may be run any number of times over the same frames, even by two tasks at once. Whoever stores a fact has put
all facts before it, so that the buffer gets them in order and, by their keys, once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, ConflictingDuplicate, DigestMismatch, LinkStopped
from bsfg.journey.link import Refusal, merged_refusals
from bsfg.ports import Frame, Result
from bsfg.retry import Retry
from bsfg.spark.calls import BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS

if TYPE_CHECKING:
    from bsfg.wire.service import PutOutcome
    from bsfg.wire.streams import Appended

WINDOW_FRAMES = 4


@dataclass(slots=True)
class WriteSums:
    """What became of the facts that were written."""

    facts: int = 0
    inserted: int = 0
    repeated: int = 0
    conflicts: int = 0
    gaps: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    first: int | None = None
    last: int | None = None
    log_id: str | None = None
    chain_head: bytes = b""

    @staticmethod
    def of(parts: Iterable[WriteSums]) -> WriteSums:
        """Add up the sums of parts, given in order."""
        whole = WriteSums()
        for part in parts:
            whole.facts += part.facts
            whole.inserted += part.inserted
            whole.repeated += part.repeated
            whole.conflicts += part.conflicts
            whole.gaps += part.gaps
            whole.refusals += part.refusals
            whole.first = part.first if whole.first is None else whole.first
            whole.last = part.last if part.last is not None else whole.last
            whole.log_id = part.log_id or whole.log_id
            whole.chain_head = part.chain_head or whole.chain_head
        whole.refusals = merged_refusals(whole.refusals)
        return whole

    def to_dict(self) -> dict[str, Any]:
        """Give the form that is written to a file of results."""
        refusals = [
            {"first": each.first, "last": each.last, "reason": each.reason, "detail": each.detail}
            for each in self.refusals
        ]
        found = {"facts": self.facts, "inserted": self.inserted, "repeated": self.repeated}
        found |= {"conflicts": self.conflicts, "gaps": self.gaps}
        positions = {"first": self.first, "last": self.last, "log_id": self.log_id}
        return found | {"refusals": refusals} | {name: value for name, value in positions.items() if value is not None}


class SentStream(Protocol):
    """What a lane sends over: `bsfg.wire.streams.AppendStream` or `PutStream`."""

    async def send(self, item: Any) -> asyncio.Future[Any]:
        """Send one item and give the future of its answer."""

    async def close(self) -> None:
        """Wait for the answers and end the call."""


class OrderedSender:
    """Sends items in order over streams that may break; it lives in the event loop of the calls.

    With ``one_by_one`` an item is sent when the one before it was taken, so that no item overtakes another that is
    refused for a while; without it as many are under way as the stream allows.
    """

    def __init__(
        self,
        opening: Callable[[], SentStream],
        take: Callable[[Any, Any], None],
        retry_seconds: float,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._opening, self._take = opening, take
        self._retry = Retry(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, retry_seconds)
        self._one_by_one = one_by_one
        self._stream: SentStream | None = None
        self._unsent: deque[Any] = deque()
        self._under_way: deque[tuple[Any, asyncio.Future[Any]]] = deque()

    async def send(self, item: Any) -> None:
        """Send an item; what was answered meanwhile is taken."""
        if self._one_by_one:
            await self._settle()
        self._unsent.append(item)
        while self._unsent:
            try:
                await self._send_all()
                self._take_answered()
            except BsfgError as error:
                await self._bear(error)

    async def finish(self) -> None:
        """Wait until everything was answered and taken, and end the stream."""
        await self._settle()
        await self.close()

    async def _settle(self) -> None:
        """Wait until everything that was sent is answered and taken."""
        while self._unsent or self._under_way:
            try:
                await self._send_all()
                await asyncio.wait([future for _, future in self._under_way])
                self._take_answered()
            except BsfgError as error:
                await self._bear(error)

    async def close(self) -> None:
        """End the stream; what was not answered yet is given up."""
        stream, self._stream = self._stream, None
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
        if stream is not None:
            # This waits for what the node has begun, so that nothing of it comes after what is sent next.
            await stream.close()

    async def _send_all(self) -> None:
        while self._unsent:
            if self._stream is None:
                self._stream = self._opening()
            self._under_way.append((self._unsent[0], await self._stream.send(self._unsent[0])))
            self._unsent.popleft()

    def _take_answered(self) -> None:
        while self._under_way and self._under_way[0][1].done():
            item, future = self._under_way[0]
            self._take(item, future.result())
            self._under_way.popleft()
            self._retry.reset()

    async def _bear(self, error: BsfgError) -> None:
        """Have all that was not taken sent again, in order, after a little while; or raise what will not pass."""
        self._unsent.extendleft(item for item, _ in reversed(self._under_way))
        await self.close()
        await asyncio.sleep(self._retry.pause_after(error))


def take_append(sums: WriteSums, conflicts_fail: bool) -> Callable[[FactBatch, Appended], None]:
    """Give what adds the answer to a batch to the sums, and refuses conflicts where they are to fail."""

    def take(facts: FactBatch, appended: Appended) -> None:
        results = appended.receipt.results
        conflicts = np.flatnonzero(results == Result.CONFLICT)
        if len(conflicts) and conflicts_fail:
            id = facts.column("message_id")[int(conflicts[0])].as_py()
            raise ConflictingDuplicate(
                f"{len(conflicts)} of {len(facts)} facts have ids that are taken by other bodies, the first is {id!r}",
                message_id=id,
            )
        sums.facts += len(facts)
        sums.inserted += appended.receipt.count(Result.INSERTED)
        sums.repeated += appended.receipt.count(Result.ALREADY_EXISTS)
        sums.conflicts += len(conflicts)
        sums.chain_head = appended.receipt.chain_head

    return take


def take_put(sums: WriteSums) -> Callable[[Frame, PutOutcome], None]:
    """Give what adds the answer to a frame of a link to the sums, and refuses one that was not taken whole."""

    def take(frame: Frame, outcome: PutOutcome) -> None:
        if outcome.held_code:
            raise LinkStopped(f"{outcome.held_code}: {outcome.held_detail}", first=frame.first, last=frame.last)
        if outcome.refetch_at is not None or outcome.through != frame.last:
            at = outcome.through + 1 if outcome.refetch_at is None else outcome.refetch_at
            raise DigestMismatch(
                f"the fact at offset {at} did not arrive as it was sent", hint="Read it again.", offset=at
            )
        sums.facts += len(frame.entries) if frame.entries is not None else 0
        sums.gaps += frame.gap is not None
        sums.inserted += outcome.inserted
        sums.repeated += outcome.repeated
        sums.refusals += outcome.refusals
        sums.chain_head = outcome.chain_head or sums.chain_head

    return take
