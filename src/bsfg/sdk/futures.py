"""The futures of facts that are on their way: one light object per fact, one shared outcome per batch.

A batch is answered as a whole, so its facts share an `Outcome`; a `FactFuture` only knows its row in it. That keeps the
cost of a future far below that of a fact, and a batch of thousands is answered in one step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bsfg.columns import DIGEST_BYTES
from bsfg.errors import BsfgError, ConflictingDuplicate, InvalidArgument, TimedOut
from bsfg.fact import SHA256_NAME
from bsfg.journey.link import AppendedFact
from bsfg.ports import Receipt, Result

if TYPE_CHECKING:
    from bsfg.wire.streams import Appended

log = logging.getLogger("bsfg.producer")

_RESULTS = tuple(Result)


class Outcome:
    """What became of the facts of one batch: written by the producer's loop, read by whoever holds a future."""

    __slots__ = (
        "__weakref__",
        "_answers",
        "_filled",
        "_lock",
        "_waiting",
        "accepted",
        "count",
        "digests",
        "failures",
        "hasher",
        "hurry",
        "ids",
        "left",
        "loop",
        "receipt",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, hurry: Callable[[], None] | None = None) -> None:
        self.loop = loop
        self.hurry = hurry
        self.accepted = False
        self.count = self.left = 0
        self.ids: Sequence[str | None] = ()
        self.receipt: Receipt | None = None
        self.digests: np.ndarray | None = None
        self.hasher = SHA256_NAME
        self.failures: dict[int, BsfgError] = {}
        self._filled: np.ndarray | None = None
        self._answers: tuple[list[int], list[int], bytes] | None = None
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # What the producer tells.

    def close(self, ids: Sequence[str | None]) -> None:
        """Note that no fact is added any more, and which ids they have."""
        self.ids, self.count, self.left, self.hurry = ids, len(ids), len(ids), None

    def accept(self) -> None:
        """Note that the facts are durable on this machine."""
        self.accepted = True
        self._step()

    def settle(self, appended: Appended, rows: np.ndarray | None = None) -> None:
        """Take the node's answer for some rows, or for all of them."""
        # Failures first: whoever sees the receipt must see them too.
        for at in np.flatnonzero(appended.receipt.results == Result.CONFLICT).tolist():
            row = at if rows is None else int(rows[at])
            id = appended.message_ids[at] if appended.message_ids is not None else self.ids[row]
            self.failures[row] = _conflict(id, int(appended.receipt.offsets[at]))
        self.hasher = appended.hasher
        if rows is None:
            self.ids, self.digests = appended.message_ids or self.ids, appended.digests
            self.receipt = appended.receipt
        else:
            self._fill(appended, rows)
        self.left -= len(appended)
        self.accepted = self.accepted or self.left == 0
        self._step()

    def fail(self, error: BsfgError, rows: Sequence[int] | None = None) -> None:
        """Note that some facts, or all that are left, were not taken."""
        if rows is None:
            rows = [row for row in range(self.count) if not self.is_settled(row)]
        self.failures.update(dict.fromkeys(rows, error))
        self.left -= len(rows)
        self._step()

    def _fill(self, appended: Appended, rows: np.ndarray) -> None:
        receipt = appended.receipt
        if self.receipt is None or self.digests is None or self._filled is None:
            offsets, results = np.full(self.count, -1, np.int64), np.zeros(self.count, np.uint8)
            self.receipt = Receipt(offsets, results, receipt.chain_head, receipt.appended_at_unix_ms)
            self.digests = np.zeros((self.count, DIGEST_BYTES), np.uint8)
            self._filled = np.zeros(self.count, bool)
        known = self.receipt
        known.offsets[rows], known.results[rows], self.digests[rows] = (
            receipt.offsets,
            receipt.results,
            appended.digests,
        )
        if appended.message_ids is not None:
            ids = list(self.ids)
            for row, id in zip(rows.tolist(), appended.message_ids, strict=True):
                ids[row] = id
            self.ids = ids
        self.receipt = Receipt(known.offsets, known.results, receipt.chain_head, receipt.appended_at_unix_ms)
        self._filled[rows] = True

    def _step(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    # What futures ask.

    def is_settled(self, row: int) -> bool:
        """Tell whether a fact was answered or given up."""
        if self.receipt is not None and self._filled is None:
            return True
        return row in self.failures or (self._filled is not None and bool(self._filled[row]))

    def is_over(self) -> bool:
        """Tell whether every fact was answered or given up."""
        return self.count > 0 and self.left <= 0

    def is_safe(self) -> bool:
        """Tell whether every fact is durable somewhere, or was given up."""
        return self.accepted or self.is_over()

    def appended(self, row: int) -> AppendedFact:
        """Give what became of one settled fact, or raise why it was not taken."""
        if self.failures and (error := self.failures.get(row)) is not None:
            raise error
        answers = self._answers
        if answers is None:
            answers = self._read_answers()
        results, offsets, digests = answers
        digest = digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
        return AppendedFact(_RESULTS[results[row]], offsets[row], self.ids[row] or "", digest, self.hasher)

    def _read_answers(self) -> tuple[list[int], list[int], bytes]:
        """Give the answer as Python values, quicker to look up one by one; they are kept once nothing can change."""
        assert self.receipt is not None
        assert self.digests is not None
        answers = (self.receipt.results.tolist(), self.receipt.offsets.tolist(), self.digests.tobytes())
        if self.left <= 0:
            self._answers = answers
        return answers

    def wait(self, over: Callable[[], bool], timeout_seconds: float | None) -> None:
        """Block this thread until something is over, or raise `TimedOut`."""
        if over():
            return
        self._refuse_in_loop()
        self._hurry()
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        event = threading.Event()
        while self._register(over, event.set):
            if not event.wait(None if ends is None else max(0.0, ends - time.monotonic())):
                raise TimedOut(
                    f"the fact was not answered within {timeout_seconds} s",
                    hint="It is still being sent; ask the future again, or allow more time.",
                )
            event.clear()

    async def until(self, over: Callable[[], bool]) -> None:
        """Wait in an event loop until something is over."""
        self._hurry()
        loop = asyncio.get_running_loop()
        waker: asyncio.Future[None]

        def wake() -> None:
            if loop is self.loop:
                resolve(waker)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(resolve, waker)

        while not over():
            waker = loop.create_future()
            if self._register(over, wake):
                await waker

    def on_step(self, over: Callable[[], bool], call: Callable[[], None]) -> None:
        """Call something once when it is over: at once, or in the producer's loop."""

        def look() -> None:
            if not self._register(over, look):
                call()

        look()

    def _register(self, over: Callable[[], bool], wake: Callable[[], None]) -> bool:
        """Ask to be woken at the next step, unless it is over already; tell whether there is anything to wait for."""
        with self._lock:
            if over():
                return False
            self._waiting.append(wake)
            return True

    def _hurry(self) -> None:
        hurry = self.hurry
        if hurry is not None:
            hurry()

    def _refuse_in_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is self.loop:
            raise InvalidArgument("blocking here would stop the producer itself", hint="Use `await future` instead.")


class FactFuture:
    """The future of one fact.

    ``result()`` blocks until the node has answered and gives the `AppendedFact`; it raises what the node refused the
    fact with, such as `ConflictingDuplicate`. In asyncio, ``await`` it. ``wait_accepted()`` (``await accepted()``)
    returns earlier when the producer has an outbox: as soon as the fact is durable there.
    """

    __slots__ = ("_outcome", "_row")

    def __init__(self, outcome: Outcome, row: int) -> None:
        self._outcome = outcome
        self._row = row

    def done(self) -> bool:
        """Tell whether the node has answered, or the fact was given up."""
        return self._outcome.is_settled(self._row)

    def result(self, timeout_seconds: float | None = None) -> AppendedFact:
        """Give what became of the fact, waiting for it; raises `TimedOut` when it takes longer than that."""
        self._outcome.wait(self.done, timeout_seconds)
        return self._outcome.appended(self._row)

    def exception(self, timeout_seconds: float | None = None) -> BsfgError | None:
        """Give why the fact was not taken, waiting for it; None when it was."""
        self._outcome.wait(self.done, timeout_seconds)
        return self._outcome.failures.get(self._row)

    def wait_accepted(self, timeout_seconds: float | None = None) -> None:
        """Block until the fact is durable, in the outbox or at the node; raises why it was not taken."""
        self._outcome.wait(self._is_safe, timeout_seconds)
        self._raise_failure()

    async def accepted(self) -> None:
        """Wait until the fact is durable, in the outbox or at the node; raises why it was not taken."""
        await self._outcome.until(self._is_safe)
        self._raise_failure()

    def add_done_callback(self, call: Callable[[FactFuture], None]) -> None:
        """Call a function when the future is done: at once, or later in the producer's own thread, so be brief.

        What it raises is logged and goes no further: other futures wait for the same answer.
        """

        def done() -> None:
            try:
                call(self)
            except Exception:
                log.exception("a callback of a fact's future failed")

        self._outcome.on_step(self.done, done)

    def __await__(self) -> Generator[Any, None, AppendedFact]:
        if not self._outcome.is_settled(self._row):
            yield from self._outcome.until(self.done).__await__()
        return self._outcome.appended(self._row)

    def _is_safe(self) -> bool:
        return self._outcome.accepted or self.done()

    def _raise_failure(self) -> None:
        if (error := self._outcome.failures.get(self._row)) is not None:
            raise error

    def __repr__(self) -> str:
        return f"<FactFuture {'done' if self.done() else 'pending'}>"


class BatchFuture:
    """The future of a whole batch: its result is the `Receipt`, with a result and an offset per fact.

    A repeat or a conflicting id is a result here, not an error: look at ``receipt.results``. What refuses the batch, or
    a piece of one that was too large for one message, is raised; ``details["stored"]`` then says how many of its facts
    the node has taken.
    """

    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    def done(self) -> bool:
        """Tell whether the node has answered for every fact."""
        return all(outcome.is_over() for outcome in self._outcomes)

    def result(self, timeout_seconds: float | None = None) -> Receipt:
        """Give the receipt, waiting for it."""
        self._wait(Outcome.is_over, timeout_seconds)
        return self._receipt()

    def wait_accepted(self, timeout_seconds: float | None = None) -> None:
        """Block until the batch is durable, in the outbox or at the node."""
        self._wait(Outcome.is_safe, timeout_seconds)
        self._raise_refusal()

    async def accepted(self) -> None:
        """Wait until the batch is durable, in the outbox or at the node."""
        for outcome in self._outcomes:
            await outcome.until(outcome.is_safe)
        self._raise_refusal()

    def digests(self) -> np.ndarray:
        """Give the digests of an answered batch, a row of 32 bytes per fact."""
        self._raise_refusal()
        found = [outcome.digests for outcome in self._outcomes if outcome.digests is not None]
        return np.concatenate(found) if found else np.zeros((0, DIGEST_BYTES), np.uint8)

    def message_ids(self) -> list[str]:
        """Give the ids of an answered batch: the producer's own, or those that the zone derived."""
        self._raise_refusal()
        return [id or "" for outcome in self._outcomes for id in outcome.ids]

    def __await__(self) -> Generator[Any, None, Receipt]:
        return self._awaited().__await__()

    async def _awaited(self) -> Receipt:
        for outcome in self._outcomes:
            await outcome.until(outcome.is_over)
        return self._receipt()

    def _wait(self, over: Callable[[Outcome], bool], timeout_seconds: float | None) -> None:
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for outcome in self._outcomes:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            outcome.wait(partial(over, outcome), left)

    def _receipt(self) -> Receipt:
        self._raise_refusal()
        receipts = [outcome.receipt for outcome in self._outcomes if outcome.receipt is not None]
        if len(receipts) == 1:
            return receipts[0]
        if not receipts:
            return Receipt(np.zeros(0, np.int64), np.zeros(0, np.uint8), b"", 0)
        return Receipt(
            np.concatenate([receipt.offsets for receipt in receipts]),
            np.concatenate([receipt.results for receipt in receipts]),
            receipts[-1].chain_head,
            receipts[-1].appended_at_unix_ms,
        )

    def _raise_refusal(self) -> None:
        failures = [error for outcome in self._outcomes for error in outcome.failures.values()]
        refused = [error for error in failures if not isinstance(error, ConflictingDuplicate)]
        if refused:
            refused[0].details["stored"] = sum(outcome.count for outcome in self._outcomes) - len(failures)
            raise refused[0]


def _conflict(message_id: str | None, offset: int) -> ConflictingDuplicate:
    return ConflictingDuplicate(
        f"message_id {message_id!r} is taken by the fact at offset {offset}, which has another body",
        message_id=message_id,
        existing_offset=offset,
    )


def resolve(waker: asyncio.Future[None]) -> None:
    """Wake who waits for a future, unless he was woken before or has gone."""
    if not waker.done():
        waker.set_result(None)
