"""The entrance of a producer: facts become rows of an open batch, in bounded memory, from any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bsfg.batch import SMALL_BATCH_FACTS, FactBatch
from bsfg.digest import Hasher, hasher_named
from bsfg.errors import BsfgError, FactTooLarge, InvalidArgument, InvalidFact, StorageClosed
from bsfg.fact import SHA256_NAME
from bsfg.model import Limits
from bsfg.offload import THREAD_BYTES, by_size
from bsfg.rows import Row, is_plain, record_batch_of
from bsfg.rules import check, judge
from bsfg.sdk.futures import FactFuture, Outcome, resolve
from bsfg.sdk.sender import Shipment, ShipmentPart
from bsfg.sdk.thread import call_in
from bsfg.sealing import EXPLICIT, MessageIds, seal

if TYPE_CHECKING:
    from bsfg.sdk.signing import Signer


ROW_BYTES = 512
"""What a queued fact costs beside its object."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is complete: how many facts and bytes at most, and how long it waits for more."""

    max_facts: int = 2_000
    max_bytes: int = 1 << 20
    linger_seconds: float = 0.005
    max_queued_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.max_facts < 1 or self.max_bytes < 1 or self.linger_seconds < 0 or self.max_queued_bytes < 1:
            raise InvalidArgument("a batch holds at least one fact and one byte, and lingers no negative time")


class OpenBatch:
    """A batch that is being gathered: rows of single facts, or one batch that a caller made himself."""

    __slots__ = ("due", "ends", "facts", "outcome", "rows", "size_bytes", "stream")

    def __init__(self, stream: str, outcome: Outcome, due: float, ends: float | None) -> None:
        self.stream, self.outcome, self.due, self.ends = stream, outcome, due, ends
        self.rows: list[Row] = []
        self.facts: FactBatch | None = None
        self.size_bytes = 0

    def complete(self) -> OpenBatch:
        """Note that nothing is added any more."""
        if self.facts is None:
            self.outcome.close([row[0] for row in self.rows])
        else:
            self.outcome.close(_Ids(self.facts))
        return self


class _Ids(Sequence[str | None]):
    """The ids of a batch, looked up when somebody asks: nearly nobody does."""

    __slots__ = ("_facts",)

    def __init__(self, facts: FactBatch) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, row: Any) -> Any:
        return self._facts.column("message_id")[row].as_py()


class StreamIntake:
    """What is gathered for one stream, oldest first; the last one may still be open."""

    __slots__ = ("changed", "closed", "hurried", "open", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.open: OpenBatch | None = None
        self.closed: deque[OpenBatch] = deque()
        self.hurried = False
        self.changed = asyncio.Event()


class ProducerIntake:
    """All lanes of one producer, and the memory they share."""

    def __init__(self, limits: BatchLimits, loop: asyncio.AbstractEventLoop, *, deadline_seconds: float | None) -> None:
        self.limits, self._loop, self._deadline_seconds = limits, loop, deadline_seconds
        # Looked at for every fact, hence so near at hand.
        self._max_facts, self._max_bytes, self.max_queued_bytes = (
            limits.max_facts,
            limits.max_bytes,
            limits.max_queued_bytes,
        )
        self.lanes: dict[str, StreamIntake] = {}
        self.queued_bytes = 0
        self.closing = False
        self.on_new_lane: Callable[[StreamIntake], None] = lambda lane: None
        self._live: dict[Outcome, int] = {}
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._room_waiters: deque[asyncio.Future[None]] = deque()

    # Coming in, from any thread.

    def add(self, stream: str, row: Row) -> FactFuture:
        """Queue one fact."""
        size_bytes = ROW_BYTES + len(row[12])
        with self._lock:
            lane = self.lanes.get(stream) or self._new_lane(stream)
            gathering = lane.open
            wake = gathering is None
            if gathering is None:
                gathering = lane.open = self._opened(lane)
            rows = gathering.rows
            at = len(rows)
            rows.append(row)
            total_bytes = gathering.size_bytes = gathering.size_bytes + size_bytes
            self.queued_bytes += size_bytes
            if at + 1 >= self._max_facts or total_bytes >= self._max_bytes:
                self._close(lane)
                wake = True
        if wake:
            self._wake(lane)
        return FactFuture(gathering.outcome, at)

    def add_batch(self, stream: str, pieces: Sequence[FactBatch]) -> list[Outcome]:
        """Queue a caller's batch, in pieces that fit a message, behind what is already there."""
        with self._lock:
            lane = self.lanes.get(stream) or self._new_lane(stream)
            self._close(lane)
            outcomes = []
            for facts in pieces:
                gathering = self._opened(lane)
                gathering.facts, gathering.size_bytes = facts, facts.nbytes
                self.queued_bytes += gathering.size_bytes
                lane.closed.append(gathering.complete())
                outcomes.append(gathering.outcome)
        self._wake(lane)
        return outcomes

    @property
    def is_full(self) -> bool:
        """Whether a sender must wait for room."""
        return self.queued_bytes >= self.max_queued_bytes

    def wait_for_room(self) -> None:
        """Block a thread until there is room."""
        with self._room:
            while self.is_full and not self.closing:
                self._room.wait()

    async def room(self) -> None:
        """Wait in the producer's loop until there is room."""
        while self.is_full and not self.closing:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room_waiters.append(waiter)
            await waiter

    def _new_lane(self, stream: str) -> StreamIntake:
        if self.closing:
            raise StorageClosed("the producer is closed", hint="Make a new producer.")
        lane = self.lanes[stream] = StreamIntake(stream)
        call_in(self._loop, self.on_new_lane, lane)
        return lane

    def _opened(self, lane: StreamIntake) -> OpenBatch:
        if self.closing:
            raise StorageClosed("the producer is closed", hint="Make a new producer.")
        now = time.monotonic()
        ends = None if self._deadline_seconds is None else now + self._deadline_seconds
        outcome = Outcome(self._loop, lambda: self._hurry(lane))
        self._live[outcome] = 0
        return OpenBatch(lane.stream, outcome, now + self.limits.linger_seconds, ends)

    def _close(self, lane: StreamIntake) -> None:
        if lane.open is not None:
            lane.closed.append(lane.open.complete())
            lane.open = None

    def _hurry(self, lane: StreamIntake) -> None:
        if not lane.hurried:
            lane.hurried = True
            self._wake(lane)

    def _wake(self, lane: StreamIntake) -> None:
        # When its loop has ended the producer was closed meanwhile, and what was queued has failed with it.
        call_in(self._loop, lane.changed.set)

    # Going out, in the producer's loop.

    async def next(self, lane: StreamIntake) -> OpenBatch | None:
        """Give the next batch of a lane once it is complete or has lingered; None when the producer is closing."""
        while True:
            lane.changed.clear()
            gathering, due = self.take(lane)
            if gathering is not None:
                return gathering
            if self.closing and due is None:
                return None
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await lane.changed.wait()
            except TimeoutError:
                continue

    def take(self, lane: StreamIntake) -> tuple[OpenBatch | None, float | None]:
        """Give the next batch of a lane if one is ready, else when it will be; None when there is none at all."""
        with self._lock:
            if lane.closed:
                return lane.closed.popleft(), None
            gathering = lane.open
            if gathering is None:
                lane.hurried = False
                return None, None
            if lane.hurried or self.closing or time.monotonic() >= gathering.due:
                lane.open, lane.hurried = None, False
                return gathering.complete(), None
            return None, gathering.due

    def expire(self, lane: StreamIntake, error: BsfgError) -> None:
        """Give up what has waited too long to be sent at all."""
        now = time.monotonic()
        with self._lock:
            expired = []
            while lane.closed and lane.closed[0].ends is not None and lane.closed[0].ends <= now:
                expired.append(lane.closed.popleft())
            if not lane.closed and lane.open is not None and lane.open.ends is not None and lane.open.ends <= now:
                expired.append(lane.open.complete())
                lane.open = None
        for gathering in expired:
            gathering.outcome.fail(error)
            self.finish(gathering.outcome, gathering.size_bytes)

    def finish(self, outcome: Outcome, size_bytes: int) -> None:
        """Note that facts are safe or given up: their memory is free again."""
        with self._lock:
            if self._live.pop(outcome, None) is None:
                return
            self.queued_bytes -= size_bytes
            self._room.notify_all()
        while self._room_waiters and not self.is_full:
            resolve(self._room_waiters.popleft())

    # All of it.

    def hurry_all(self) -> None:
        """Let every open batch go now."""
        for lane in list(self.lanes.values()):
            lane.hurried = True
            lane.changed.set()

    def live(self) -> list[Outcome]:
        """List the outcomes of everything that is not safe yet."""
        with self._lock:
            return list(self._live)

    def close(self) -> None:
        """Take nothing more; what is there is still given out."""
        with self._lock:
            self.closing = True
            for lane in self.lanes.values():
                self._close(lane)
            self._room.notify_all()
        for waiter in self._room_waiters:
            resolve(waiter)
        for lane in self.lanes.values():
            lane.changed.set()


LOOSE = Limits(max_object_bytes=1 << 30, max_batch_facts=1 << 30, max_batch_bytes=1 << 40)
"""Only the node knows how large its streams allow facts to be."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A gathered batch, ready to travel: which of its rows are in it (None for all), and whose outcome it is."""

    facts: FactBatch
    outcome: Outcome
    size_bytes: int
    ends: float | None = None
    divisible: bool = True
    rows: np.ndarray | None = None

    def shipment(self, stream: str) -> Shipment:
        """Make a shipment of it."""
        part = ShipmentPart(self.outcome, 0, self.outcome.count)
        return Shipment(stream, self.facts, (part,), self.size_bytes, self.divisible, self.ends, self.rows)


Failures = dict[int, BsfgError]


class Packer:
    """Makes batches of what was gathered: checks them, and signs them when there is a signer."""

    def __init__(self, signer: Signer | None = None, ids: MessageIds = EXPLICIT, hasher: str = SHA256_NAME) -> None:
        self._signer, self._ids, self._hasher = signer, ids, hasher_named(hasher)

    async def pack(self, gathering: OpenBatch, stream: str) -> Packed:
        """Pack a gathering of a stream; rows that break a rule fail at once."""
        # A signature takes long, however small the fact is.
        size_bytes = gathering.size_bytes if self._signer is None else THREAD_BYTES
        facts, rows, failures = await by_size(size_bytes, self._pack, gathering, stream)
        for row, error in failures.items():
            gathering.outcome.fail(error, [row])
        divisible = gathering.facts is None
        gathering.rows = []
        return Packed(facts, gathering.outcome, gathering.size_bytes, gathering.ends, divisible, rows)

    def _pack(self, gathering: OpenBatch, stream: str) -> tuple[FactBatch, np.ndarray | None, Failures]:
        if gathering.facts is not None:
            if self._signer is None:
                return gathering.facts, None, {}
            sealed = seal(gathering.facts, hasher=self._hasher, ids=self._ids, limits=LOOSE)
            return self._signer.sign(sealed, stream), None, {}
        facts, rows, failures = _checked(gathering.rows)
        if self._signer is None or not len(facts):
            return facts, rows, failures
        sealed, kept, worse = _sealed(facts, self._ids, self._hasher)
        if kept is not None:
            rows = np.arange(len(facts)) if rows is None else rows
            failures |= {int(rows[at]): error for at, error in worse.items()}
            rows = rows[kept]
        return self._signer.sign(sealed, stream), rows, failures


def _checked(rows: list[Row]) -> tuple[FactBatch, np.ndarray | None, Failures]:
    """Make a batch of rows; give which rows are in it (None for all) and why the others are not."""
    try:
        small = len(rows) <= SMALL_BATCH_FACTS and all(map(is_plain, rows))
        batch = FactBatch.of_rows(rows) if small else FactBatch(record_batch_of(rows))
        check(batch, LOOSE)
    except (InvalidFact, FactTooLarge):
        return _checked_one_by_one(rows)
    return batch, None, {}


def _checked_one_by_one(rows: list[Row]) -> tuple[FactBatch, np.ndarray | None, Failures]:
    failures: Failures = {}
    for number, row in enumerate(rows):
        try:
            judge(number, FactBatch(record_batch_of([row])).rows()[0], LOOSE)
        except (InvalidFact, FactTooLarge) as error:
            failures[number] = _for_one_fact(error)
    kept = [number for number in range(len(rows)) if number not in failures]
    return FactBatch(record_batch_of([rows[number] for number in kept])), np.array(kept, dtype=np.int64), failures


def _sealed(batch: FactBatch, ids: MessageIds, hasher: Hasher) -> tuple[FactBatch, np.ndarray | None, Failures]:
    """Seal a batch; give which rows are in it (None for all) and why the others are not."""
    try:
        return seal(batch, hasher=hasher, ids=ids, limits=LOOSE), None, {}
    except (InvalidFact, FactTooLarge):
        pass
    sealed, kept, failures = [], [], {}
    for number in range(len(batch)):
        try:
            sealed.append(seal(batch.slice(number, 1), hasher=hasher, ids=ids, limits=LOOSE))
            kept.append(number)
        except (InvalidFact, FactTooLarge) as error:
            failures[number] = _for_one_fact(error)
    return FactBatch.concat(sealed), np.array(kept, dtype=np.int64), failures


def _for_one_fact(error: BsfgError) -> BsfgError:
    """Give the error without the number of a row that its reader cannot know."""
    name, rule = error.details.get("field"), error.details.get("rule")
    text = f"{name}: {rule}" if name and rule else error.message
    details = {key: value for key, value in error.details.items() if key != "row"}
    return type(error)(text, hint="Correct the named field and send the fact again; it was not sent.", **details)
