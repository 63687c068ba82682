"""Sending shipments in order: many in flight, again with the same ids when the outcome is unknown."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bsfg.batch import FactBatch
from bsfg.columns import constant_value
from bsfg.errors import OF_ONE_FACT, BsfgError, ConflictingDuplicate, InvalidArgument, PeerUnreachable, unforeseen
from bsfg.ports import Receipt, Result
from bsfg.retry import Backoff
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.futures import Outcome
from bsfg.wire.client import BoundaryClient
from bsfg.wire.streams import Appended, AppendStream


@dataclass(frozen=True, slots=True)
class ShipmentPart:
    """Consecutive facts of a shipment, all those of one outcome, and where they stand.

    The outcome is None when nobody holds a future of these facts any more.
    """

    outcome: Outcome | None
    start: int
    count: int


@dataclass(slots=True, eq=False)
class Shipment:
    """Facts that travel in one frame.

    ``rows`` says which facts of the parts are still in it, None for all: bad ones leave. An indivisible shipment is a
    caller's own batch and is refused as a whole. ``ends`` is when the producer gives it up, on the monotonic clock.
    """

    stream: str
    facts: FactBatch
    parts: Sequence[ShipmentPart]
    size_bytes: int
    divisible: bool = True
    ends: float | None = None
    rows: np.ndarray | None = None
    refused: list[tuple[FactBatch, BsfgError]] = field(default_factory=list)
    on_over: Callable[[Shipment], None] | None = None

    def __len__(self) -> int:
        return len(self.facts)

    def settle(self, appended: Appended) -> None:
        """Hand the node's answer to all futures; the shipment is over."""
        if (conflicts := np.flatnonzero(appended.receipt.results == Result.CONFLICT)).size:
            error = ConflictingDuplicate(f"{conflicts.size} message ids are taken by facts with other bodies")
            self.refused.append((self.facts.take(conflicts), error))
        if self.rows is None and len(self.parts) == 1:
            if (outcome := self.parts[0].outcome) is not None:
                outcome.settle(appended)
        else:
            self._settle_parts(appended)
        self._over()

    def _settle_parts(self, appended: Appended) -> None:
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is None:
                continue
            first, last = np.searchsorted(rows, (part.start, part.start + part.count))
            if last > first:
                part.outcome.settle(_slice(appended, int(first), int(last)), rows[first:last] - part.start)

    def refuse(self, at: Sequence[int], error: BsfgError) -> None:
        """Take facts out that the node will never accept; their futures fail."""
        bad = sorted(set(at))
        self.refused.append((self.facts.take(bad), error))
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is not None:
                chosen = rows[bad]
                mine = chosen[(chosen >= part.start) & (chosen < part.start + part.count)]
                if len(mine):
                    part.outcome.fail(error, (mine - part.start).tolist())
        keep = np.setdiff1d(np.arange(len(self.facts)), bad)
        self.rows, self.facts = rows[keep], self.facts.take(keep)
        if not len(keep):
            self._over()

    def give_up(self, error: BsfgError) -> None:
        """Let all futures fail; the shipment is over, and what became of its facts may be unknown."""
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        for part in self.parts:
            if part.outcome is not None:
                mine = rows[(rows >= part.start) & (rows < part.start + part.count)]
                part.outcome.fail(error, (mine - part.start).tolist())
        self._over()

    def halves(self) -> tuple[Shipment, Shipment]:
        """Give the shipment as two that are sent by themselves; it is over when both are."""
        rows = np.arange(len(self.facts)) if self.rows is None else self.rows
        middle, left = len(self.facts) // 2, [2]

        def over(half: Shipment) -> None:
            self.refused += half.refused
            left[0] -= 1
            if not left[0]:
                self._over()

        def half(start: int, end: int) -> Shipment:
            facts, size_bytes = self.facts.slice(start, end - start), self.size_bytes // 2
            return Shipment(
                self.stream, facts, self.parts, size_bytes, ends=self.ends, rows=rows[start:end], on_over=over
            )

        return half(0, middle), half(middle, len(self.facts))

    def _over(self) -> None:
        if self.on_over is not None:
            call, self.on_over = self.on_over, None
            call(self)


def _slice(appended: Appended, first: int, last: int) -> Appended:
    receipt = appended.receipt
    ids = appended.message_ids[first:last] if appended.message_ids is not None else None
    part = Receipt(
        receipt.offsets[first:last], receipt.results[first:last], receipt.chain_head, receipt.appended_at_unix_ms
    )
    return type(appended)(part, appended.digests[first:last], ids, appended.hasher)


REFUSED_TO_CALLER = frozenset({"permission_denied", "signature_invalid", "signature_missing", "zone_not_allowed"})
"""What an operator can allow, by a right or by a key; it may be about single facts."""

_FOUND_BY_HALVING = frozenset({"message_too_large", "digest_mismatch", "artifact_missing", *REFUSED_TO_CALLER})


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How shipments are sent.

    ``hold`` says what to do with an error that an operator can mend (identity, permission, an unknown stream): keep
    everything and try again, or let the futures fail.
    """

    max_in_flight: int = 8
    backoff_first_seconds: float = 0.1
    backoff_max_seconds: float = 5.0
    stall_seconds: float = 30.0
    hold: bool = False

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise InvalidArgument("at least one batch must be in flight")


class ShipmentSource(Protocol):
    """Where shipments come from."""

    async def next(self) -> Shipment | None:
        """Give the next shipment, waiting for it; None when there will be none."""

    def expire(self, error: BsfgError) -> None:
        """Give up what waited too long without ever being sent."""


class NodeLink:
    """The client that all senders of a producer share; a connection that hangs is replaced."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client: BoundaryClient | None = None

    @property
    def client(self) -> BoundaryClient:
        """The present client."""
        if self._client is None:
            self._client = self._endpoint.connect()
        return self._client

    async def renew(self) -> None:
        """Drop the connection with everything on it."""
        client, self._client = self._client, None
        if client is not None:
            await client.connection.close()

    async def close(self) -> None:
        """End the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class Sender:
    """Sends the shipments of one stream."""

    def __init__(
        self,
        link: NodeLink,
        stream: str,
        source: ShipmentSource,
        options: SendOptions,
        on_problem: Callable[[BsfgError], None] = lambda error: None,
    ) -> None:
        self._link, self._stream, self._source, self._options = link, stream, source, options
        self._on_problem = on_problem
        self._unanswered: deque[Shipment] = deque()
        self._errors: dict[Shipment, BsfgError] = {}
        self._source_error: BsfgError | None = None
        self._sent: set[Shipment] = set()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._getter: asyncio.Future[Shipment | None] | None = None
        self._backoff = Backoff(options.backoff_first_seconds, options.backoff_max_seconds)
        self._failing = False
        self._finished = False
        self._last_answer = time.monotonic()

    async def run(self) -> None:
        """Send until the source has nothing more and everything is answered."""
        try:
            while not self._finished or self._unanswered:
                await self._session()
                if self._trouble.done():
                    await self._after_trouble()
        finally:
            if self._getter is not None:
                self._getter.cancel()

    # One stream of frames.

    async def _session(self) -> None:
        """Send over one stream until there is trouble, the stream has ended, or everything is done."""
        if self._trouble.done():
            self._trouble = asyncio.get_running_loop().create_future()
        self._errors.clear()
        self._source_error = None
        self._sent.clear()
        self._last_answer = time.monotonic()
        watching = asyncio.create_task(self._watch())
        answers: set[asyncio.Future[Appended]] = set()
        stream: AppendStream | None = None
        try:
            try:
                if not self._unanswered and not await self._took_next():
                    return
                # Not before there is something to send: who cannot reach the node is told so, and does not ask in vain.
                stream = self._link.client.append_stream(self._stream, window_frames=self._options.max_in_flight)
                for shipment in list(self._unanswered):
                    await self._send(stream, shipment, answers)
                while await self._took_next() and stream.is_open:
                    await self._send(stream, self._unanswered[-1], answers)
            except Exception as error:
                # Also what nobody foresaw: a sender that ended here would leave its futures waiting for ever.
                self._failed(unforeseen(error, "sending"))
            if answers:
                await asyncio.wait(answers)
            if stream is not None:
                await stream.close()
        finally:
            watching.cancel()

    async def _took_next(self) -> bool:
        """Take the next shipment as soon as there is one; tell whether there is, and no trouble."""
        if self._finished:
            return False
        if self._getter is None:
            self._getter = asyncio.ensure_future(self._source.next())
        if not self._getter.done() and not self._trouble.done():
            waiting: tuple[asyncio.Future[Any], ...] = (self._getter, self._trouble)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._trouble.done():
            return False
        # A getter that is not done stays for the next session, so that nothing it takes is lost.
        getter, self._getter = self._getter, None
        if (error := getter.exception()) is not None:
            self._source_error = unforeseen(error, "reading what is to be sent")
            self._in_trouble()
            return False
        shipment = getter.result()
        if shipment is None:
            self._finished = True
            return False
        self._unanswered.append(shipment)
        return True

    async def _send(self, stream: AppendStream, shipment: Shipment, answers: set[asyncio.Future[Appended]]) -> None:
        # The window is kept here and not left to the stream: what failed must be known before the next is sent.
        while len(answers) >= self._options.max_in_flight:
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        if self._trouble.done():
            return
        self._sent.add(shipment)
        answer = await stream.send(shipment.facts)
        answers.add(answer)

        def answered(done: asyncio.Future[Appended]) -> None:
            answers.discard(done)
            self._answered(shipment, done)

        answer.add_done_callback(answered)

    def _answered(self, shipment: Shipment, answer: asyncio.Future[Appended]) -> None:
        error = answer.exception() if not answer.cancelled() else PeerUnreachable("the connection was closed")
        if error is None:
            self._last_answer, self._failing = time.monotonic(), False
            self._backoff.reset()
            self._drop(shipment)
            self._sent.discard(shipment)
            shipment.settle(answer.result())
        else:
            self._failed(unforeseen(error, "sending"), shipment)

    def _failed(self, error: BsfgError, shipment: Shipment | None = None) -> None:
        if shipment is not None:
            self._errors[shipment] = error
        else:
            # The stream as a whole: it concerns everything that was not answered for another reason.
            for each in self._unanswered:
                self._errors.setdefault(each, error)
        self._in_trouble()

    def _in_trouble(self) -> None:
        if not self._trouble.done():
            self._trouble.set_result(None)

    async def _watch(self) -> None:
        """Replace the connection when a node takes frames but does not answer."""
        stall_seconds = self._options.stall_seconds
        while True:
            await asyncio.sleep(stall_seconds / 4)
            if not self._unanswered:
                self._last_answer = time.monotonic()
            elif time.monotonic() - self._last_answer > stall_seconds:
                await self._link.renew()

    # After trouble.

    async def _after_trouble(self) -> None:
        """Judge everything that was not answered, then wait before the next attempt."""
        again = self._source_error
        largest = max(self._sent, key=lambda each: each.facts.nbytes, default=None)
        for shipment in list(self._unanswered):
            error = self._errors.get(shipment)
            if error is None or (error.code == "message_too_large" and shipment is not largest):
                # A message that is too large ends the stream for all, and only the largest can be the cause.
                continue
            if not self._mended(shipment, error):
                again = error
        if again is not None:
            self._on_problem(again)
            await self._pause(again)

    def _mended(self, shipment: Shipment, error: BsfgError) -> bool:
        """Deal with what can be dealt with at once; tell whether the next attempt may follow immediately."""
        if error.retryable:
            return False
        row = error.details.get("row")
        mendable = self._options.hold and error.code in REFUSED_TO_CALLER
        if shipment.divisible and isinstance(row, int) and 0 <= row < len(shipment) and not mendable:
            self._refuse(shipment, [row], error)
            return True
        if shipment.divisible and len(shipment) > 1 and _may_be_halved(shipment, error):
            at = self._unanswered.index(shipment)
            first, second = shipment.halves()
            self._unanswered[at] = first
            self._unanswered.insert(at + 1, second)
            return True
        if error.code in OF_ONE_FACT - REFUSED_TO_CALLER:
            self._refuse(shipment, range(len(shipment)), error)
            return True
        if self._options.hold:
            return False
        self._drop(shipment)
        shipment.give_up(error)
        return True

    def _refuse(self, shipment: Shipment, rows: range | list[int], error: BsfgError) -> None:
        shipment.refuse(list(rows), error)
        if not len(shipment):
            self._drop(shipment)

    def _drop(self, shipment: Shipment) -> None:
        if self._unanswered and self._unanswered[0] is shipment:
            self._unanswered.popleft()
        elif shipment in self._unanswered:
            self._unanswered.remove(shipment)

    async def _pause(self, error: BsfgError) -> None:
        """Wait longer after each failure in a row, the first time not at all; give up what has no time left."""
        pause_seconds = self._backoff.next_seconds() if self._failing else 0.0
        self._failing, now = True, time.monotonic()
        ends = [each.ends for each in self._unanswered if each.ends is not None]
        await asyncio.sleep(max(0.0, min([pause_seconds, *(end - now for end in ends)])))
        now = time.monotonic()
        for shipment in list(self._unanswered):
            if shipment.ends is not None and shipment.ends <= now:
                self._drop(shipment)
                shipment.give_up(error)
        self._source.expire(error)


def _may_be_halved(shipment: Shipment, error: BsfgError) -> bool:
    """Tell whether an error may be about a part of the facts only."""
    if error.code not in _FOUND_BY_HALVING:
        return False
    if error.code not in REFUSED_TO_CALLER:
        return True
    facts = shipment.facts
    return any(constant_value(facts.column(name)) is None for name in ("from_zone", "to_zone"))
