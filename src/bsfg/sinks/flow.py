"""What every sink does: read a durable consumer in order, write to a target, and confirm what the target has.

The target commits first and the node is told afterwards, so that nothing is lost whatever ends in between. What comes
again then is the target's affair: tables know how far they are, a webhook is given the same keys again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bsfg.errors import BsfgError, SinkRefused, StorageClosed
from bsfg.fact import Entry
from bsfg.retry import Retry
from bsfg.sdk.consumer import Consumer
from bsfg.sdk.consuming import Item
from bsfg.sdk.endpoint import Endpoint

T = TypeVar("T")

BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS = 0.2, 60.0
ONCE_PATIENCE_SECONDS = 30.0
"""How long a sink that is to leave when it is done waits for a node or a target that is away."""

END_SECONDS = 5.0
NODE_TOLD_SECONDS = 40.0
"""A node that is away is noticed again within this time: a request takes 30 seconds at most, the pause behind it 5."""


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """Facts and gap records in their order, of one log; ``end`` is the offset behind the last that the node has."""

    stream: str
    log_id: str
    items: Sequence[Item]
    end: int


def place(item: Item) -> tuple[int, int] | None:
    """Give the first and the last offset of an item in its buffer; a gap of another zone's offsets has none."""
    if isinstance(item, Entry):
        return item.offset, item.offset
    return None if item.origin_zone is not None else (item.first, item.last)


def last_offset(items: Sequence[Item]) -> int | None:
    """Give the last offset of some items."""
    return max((found[1] for found in map(place, items) if found is not None), default=None)


class SinkTarget(Protocol):
    """Where a sink writes to."""

    def open(self) -> None:
        """Get ready; raises what keeps it from taking facts."""

    def write(self, batch: SinkBatch) -> int | None:
        """Make a batch durable, and give the offset through which everything may be confirmed; None if nothing new.

        After an error that may pass it is called again with the same batch; with others if anything ended in between,
        which may hold what was written before. The detail ``through`` of a `SinkRefused` may be confirmed all the same.
        """

    def finish(self) -> None:
        """Raise what keeps a part of what was written from being confirmed; the sink is about to leave."""

    def close(self) -> None:
        """Give back what is open."""

    def noted(self) -> dict[str, int]:
        """Count what somebody should look at, by what it is called."""


@dataclass(slots=True)
class SinkDone:
    """What a sink has done since it was started."""

    facts: int = 0
    gaps: int = 0
    batches: int = 0
    batch_seconds: float = 0.0
    next: int = 0
    backlog: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Give the form that programs read."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "batch_seconds"}


class Sink:
    """One sink: one thread runs it, others look at it and end it."""

    def __init__(
        self,
        endpoint: Endpoint,
        consumer: str,
        target: SinkTarget,
        max_facts: int = 1_000,
        max_bytes: int = 8 << 20,
        *,
        tell: Callable[[BsfgError], None] = lambda error: None,
    ) -> None:
        self._endpoint, self._name, self.target = endpoint, consumer, target
        self._max_facts, self._max_bytes, self._tell = max_facts, max_bytes, tell
        self._consumer: Consumer | None = None
        self._ending, self._writing = threading.Event(), threading.Lock()
        self._node_away: tuple[float, BsfgError] | None = None
        self._target_away: BsfgError | None = None
        self.done = SinkDone()

    @property
    def problem(self) -> BsfgError | None:
        """What the sink waits for, None while it gets on."""
        if self._target_away is not None or self._node_away is None:
            return self._target_away
        # Nobody tells when the node is back and has nothing new; that it is away is told at least as often.
        told, error = self._node_away
        return error if time.monotonic() - told < NODE_TOLD_SECONDS else None

    @property
    def has_caught_up(self) -> bool:
        """Whether the node has said that it has nothing beyond what is confirmed."""
        consumer = self._consumer
        return consumer is not None and bool(consumer.source[1]) and not consumer.backlog

    def run(self, *, once: bool = False) -> None:
        """Write until it is ended, or ``once`` what is there now."""
        patience_seconds = ONCE_PATIENCE_SECONDS if once else None
        options: Any = {"on_problem": self._waits_for_node, "deadline_seconds": patience_seconds}
        try:
            self._insist(self.target.open, patience_seconds)
            with Consumer(self._name, self._endpoint, **options) as consumer:
                self._consumer, ends = consumer, math.inf
                # Whoever ended it before this had no consumer to close.
                if self._ending.is_set():
                    return
                for items in consumer.batches(self._max_facts, self._max_bytes, idle_seconds=0.0 if once else None):
                    with self._writing:
                        batch = self._write(consumer, items, patience_seconds)
                    if self._ending.is_set():
                        return
                    ends = batch.end if once and ends == math.inf else ends
                    last = last_offset(items)
                    if last is not None and last + 1 >= ends:
                        break
                if not self._ending.is_set():
                    self.target.finish()
        except StorageClosed:
            if not self._ending.is_set():
                raise
        finally:
            self._consumer = None
            self.target.close()

    def end(self) -> None:
        """Have `run` return soon; what is under way is finished and confirmed if it is quick."""
        self._ending.set()
        consumer = self._consumer
        if self._writing.acquire(timeout=END_SECONDS):
            try:
                if consumer is not None:
                    with suppress(BsfgError):
                        consumer.close(END_SECONDS)
            finally:
                self._writing.release()

    def _write(self, consumer: Consumer, items: list[Item], patience_seconds: float | None) -> SinkBatch:
        began = time.monotonic()
        batch = SinkBatch(*consumer.source, items, consumer.committed + 1 + consumer.backlog)
        try:
            self._confirm(consumer, self._insist(lambda: self.target.write(batch), patience_seconds))
        except SinkRefused as error:
            self._confirm(consumer, error.details.get("through"))
            raise
        self._note(batch, consumer, time.monotonic() - began)
        return batch

    def _confirm(self, consumer: Consumer, through: int | None) -> None:
        if through is not None and through > consumer.committed:
            consumer.confirm_through(through)

    def _insist(self, work: Callable[[], T], patience_seconds: float | None) -> T:
        """Do something until it succeeds; raises `StorageClosed` when the sink is ended before."""
        retry = Retry(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, patience_seconds)
        while not self._ending.is_set():
            try:
                found = work()
            except BsfgError as error:
                pause, self._target_away = retry.pause_after(error), error
                self._tell(error)
                wanted_seconds = error.details.get("retry_after_seconds", 0.0)
                if patience_seconds is not None and wanted_seconds > patience_seconds:
                    raise
                self._ending.wait(max(pause, wanted_seconds))
            else:
                self._node_away = self._target_away = None
                return found
        raise StorageClosed("the sink was ended")

    def _note(self, batch: SinkBatch, consumer: Consumer, seconds: float) -> None:
        done, facts = self.done, sum(isinstance(item, Entry) for item in batch.items)
        done.facts, done.gaps = done.facts + facts, done.gaps + len(batch.items) - facts
        done.batches, done.batch_seconds = done.batches + 1, seconds
        done.next, done.backlog = consumer.committed + 1, consumer.backlog

    def _waits_for_node(self, error: BsfgError) -> None:
        self._node_away = time.monotonic(), error
        self._tell(error)
