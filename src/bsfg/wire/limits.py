"""How much callers may ask for at once: places, bytes under way, and patience with those who err again and again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from bsfg.errors import BsfgError, Overloaded
from bsfg.journey.link import Fetched
from bsfg.offload import LARGE_FACT_BYTES, THREAD_BYTES, LoopTurns, Step, all_at_once, by_size

BLAMED = frozenset(
    {
        "artifact_missing",
        "certificate_invalid",
        "digest_mismatch",
        "fact_too_large",
        "frame_invalid",
        "identity_revoked",
        "identity_unknown",
        "implausible_time",
        "invalid_argument",
        "invalid_fact",
        "message_too_large",
        "offset_out_of_range",
        "permission_denied",
        "sign_in_required",
        "signature_invalid",
        "signature_missing",
        "unknown_consumer",
        "unknown_link",
        "unknown_service",
        "unknown_stream",
        "zone_not_allowed",
    }
)
"""Errors that the caller could have known before."""

FREE_FAULTS = 20.0
DELAY_SECONDS_PER_FAULT = 0.02
DELAY_SECONDS_MAX = 2.0
FORGIVEN_PER_SECOND = 10.0
CALLERS_MAX = 10_000


class FaultThrottle:
    """Counts the faults of each caller and says how long the answer to the next one waits."""

    def __init__(self, now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now_seconds = now_seconds
        self._faults: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def delay_seconds(self, caller: str, error: Exception) -> float:
        """Take note of an error and give how long its answer is held back."""
        if not isinstance(error, BsfgError) or error.code not in BLAMED:
            return 0.0
        return self.asked(caller)

    def asked(self, caller: str) -> float:
        """Take note of a request that its caller need not make often, and give how long its answer is held back."""
        now = self._now_seconds()
        faults, since = self._faults.pop(caller, (0.0, now))
        faults = max(0.0, faults - FORGIVEN_PER_SECOND * (now - since)) + 1.0
        # Beyond this more faults would only take longer to forgive.
        faults = min(faults, FREE_FAULTS + DELAY_SECONDS_MAX / DELAY_SECONDS_PER_FAULT)
        self._faults[caller] = (faults, now)
        if len(self._faults) > CALLERS_MAX:
            self._faults.popitem(last=False)
        return min(DELAY_SECONDS_MAX, max(0.0, faults - FREE_FAULTS) * DELAY_SECONDS_PER_FAULT)


STRANGERS = 32
"""Places for all callers without a row together."""

STRANGERS_PER_ADDRESS = 8
"""How many of them one address may take."""

SLEEPERS_MAX = 4_096
"""Answers that may be held back at once; each is a call without a place, of which nothing was read."""

MOMENT_SECONDS = 1.0
"""How long a message has to come before its own caller, who waits for many, gives it up for another."""

_CROWD = 100
_CROWD_SECONDS_MAX = 20.0
_RESERVED_PART = 32
_READ_LEAST = 16


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The limits of both listeners; the names are those of [limits] in the configuration."""

    message_bytes: int = 4 << 20
    concurrent_requests: int = 512
    concurrent_per_identity: int = 256
    connections: int = 1_000
    request_timeout_seconds: float = 60.0
    idle_timeout_seconds: float = 60.0
    fetch_wait_max_seconds: float = 60.0
    memory_ceiling_bytes: int = 1 << 30
    handshake_timeout_seconds: float = 10.0
    connection_age_seconds: float = 3_600.0
    window_frames: int = 16

    @property
    def frame_bytes(self) -> int:
        """How large the frames are that a server makes itself: well below what a message may have."""
        return max(1, min(4 << 20, self.message_bytes // 2))

    @property
    def in_flight_bytes(self) -> int:
        """How many bytes of requests may be under way; decoded and sealed they take several times as much."""
        return max(self.message_bytes, self.memory_ceiling_bytes // 16)

    @property
    def answer_bytes(self) -> int:
        """How many bytes of facts may be turned into answers at once; as messages they take several times as much."""
        return max(self.message_bytes, self.memory_ceiling_bytes // 32)

    @property
    def sending_bytes(self) -> int:
        """How many bytes of facts may be on their way to callers; what is being sent is there two or three times."""
        return max(2 * self.message_bytes, self.memory_ceiling_bytes // 16)

    @property
    def awaited_messages(self) -> int:
        """How many messages may be awaited at once: each may come in whole, and is copied once, before it is seen."""
        return max(_READ_LEAST, self.memory_ceiling_bytes // 4 // self.message_bytes)


class Observer(Protocol):
    """Who wants to know how requests go."""

    def answered(self, operation: str, seconds: float, code: str | None) -> None:
        """Take note of an answer: how long it took, and the code of the error that it was, if it was one."""

    def watch(self, admission: Admission) -> None:
        """Learn where the requests under way are counted."""


class Admission:
    """Counts the requests that are being served and refuses those that are too many."""

    def __init__(self, limits: WireLimits, observer: Observer | None = None) -> None:
        self._limits, self._observer = limits, observer
        self._patience = FaultThrottle()
        if observer is not None:
            observer.watch(self)
        self._by_caller: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()
        self._reserved = limits.concurrent_per_identity // _RESERVED_PART
        self.budget = ByteBudget(limits.in_flight_bytes, owner_bytes=max(1, limits.in_flight_bytes // 2))
        self.answering = ByteBudget(limits.answer_bytes, owner_bytes=max(1, limits.answer_bytes // 2))
        self.sending = ByteBudget(limits.sending_bytes, owner_bytes=max(1, limits.sending_bytes // 2))
        self.awaited = Awaited(limits.awaited_messages)
        self.turns = LoopTurns()
        self.serving = 0
        self.refused = 0
        self.sleeping = 0

    def answered(self, operation: str, seconds: float, code: str | None = None) -> None:
        """Pass on how a request went."""
        if self._observer is not None:
            self._observer.answered(operation, seconds, code)

    def room(self, owner: str) -> AnswerRoom:
        """Give where the answers of one call count until its caller has them."""
        return AnswerRoom(self.sending, owner)

    def delay_seconds(self, caller: str, error: Exception) -> float:
        """Take note of an error and give how long its caller is to wait."""
        return self._patience.delay_seconds(caller, error)

    async def hold_back(self, caller: str, error: Exception) -> None:
        """Let the answer wait when its caller has made many wrong requests; he must hold nothing meanwhile."""
        await self._sleep(self._patience.delay_seconds(caller, error))

    async def slow_down(self, caller: str) -> None:
        """Let the answer wait when its caller asks for what costs little again and again."""
        await self._sleep(self._patience.asked(caller))

    async def _sleep(self, delay_seconds: float) -> None:
        if delay_seconds <= 0 or self.sleeping >= SLEEPERS_MAX:
            return
        # The more are held back the longer each one is, so that together they ask no more often than a few would.
        crowded_seconds = min(_CROWD_SECONDS_MAX, delay_seconds * self.sleeping / _CROWD)
        self.sleeping += 1
        try:
            await asyncio.sleep(max(delay_seconds, crowded_seconds))
        finally:
            self.sleeping -= 1

    async def written(self, fetched: Fetched, pieces: Iterable[Step], owner: str) -> bytes:
        """Write an answer piece by piece, large ones in turn: as objects its facts take many times their size."""
        size_bytes = fetched.weight_bytes
        if size_bytes < THREAD_BYTES:
            return all_at_once(pieces)
        async with self.answering.take(size_bytes, owner):
            if size_bytes >= fetched.facts * LARGE_FACT_BYTES:
                return await by_size(size_bytes, all_at_once, pieces)
            return await self.turns.joined(pieces)

    @contextmanager
    def enter(self, caller: str) -> Iterator[None]:
        """Serve one request of an identity inside, or raise `Overloaded`.

        A few places are an identity's own: however many requests of others are served, it finds those.
        """
        mine = self._by_caller[caller]
        if self.serving >= self._limits.concurrent_requests and mine >= self._reserved:
            self.refused += 1
            raise Overloaded(f"the node serves {self.serving} requests at once", limit="concurrent_requests")
        if mine >= self._limits.concurrent_per_identity:
            self.refused += 1
            raise Overloaded(f"{caller} has {mine} requests under way", limit="concurrent_per_identity")
        self.serving += 1
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self.serving -= 1
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]

    @contextmanager
    def enter_stranger(self, address: str) -> Iterator[None]:
        """Serve one request of somebody without a row inside, or raise `Overloaded`; others lose no place by it."""
        if self._strangers.total() >= STRANGERS or self._strangers[address] >= STRANGERS_PER_ADDRESS:
            self.refused += 1
            raise Overloaded("callers who are not known here have too many requests under way", limit="strangers")
        self._strangers[address] += 1
        try:
            yield
        finally:
            self._strangers[address] -= 1
            if not self._strangers[address]:
                del self._strangers[address]


class Awaited:
    """The messages that are waited for: what has begun to come takes memory before anybody can look at it.

    There is a bound on how many there are. Beyond it the one is given up that whoever waits for the most of them has
    waited for the longest; a stream that ends so is opened again when there is something to send. Whoever waits for the
    most himself gives his own messages a moment to come before he begins to wait for another: what all of his calls
    have just sent is not to be lost because there are many of them.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._by_owner: dict[str, OrderedDict[object, tuple[float, Callable[[], None]]]] = {}
        self._queue: deque[asyncio.Future[None]] = deque()
        self.count = 0

    def is_begun(self, owner: str, key: object, give_up: Callable[[], None]) -> bool:
        """Begin to wait for a message, or tell that a moment must pass before; who waits for more gives way at once.

        ``give_up`` is called when others need the room.
        """
        now = time.monotonic()
        while self.count >= self._most:
            busiest = max(self._by_owner, key=lambda each: (len(self._by_owner[each]), each == owner))
            oldest, (since, its_end) = next(iter(self._by_owner[busiest].items()))
            if busiest == owner and now - since < MOMENT_SECONDS:
                return False
            self.done(busiest, oldest)
            its_end()
        self._by_owner.setdefault(owner, OrderedDict())[key] = (now, give_up)
        self.count += 1
        return True

    async def begin(self, owner: str, key: object, give_up: Callable[[], None]) -> None:
        """Begin to wait for a message, now or in a moment."""
        while not self.is_begun(owner, key, give_up):
            freed = asyncio.get_running_loop().create_future()
            self._queue.append(freed)
            try:
                await asyncio.wait([freed], timeout=MOMENT_SECONDS)
            finally:
                if not freed.done():
                    self._queue.remove(freed)

    def done(self, owner: str, key: object) -> None:
        """Wait no more, because it is here and counted, or will not come; repeats are harmless."""
        waiting = self._by_owner.get(owner)
        if waiting is not None and waiting.pop(key, None) is not None:
            self.count -= 1
            if not waiting:
                del self._by_owner[owner]
            if self._queue:
                self._queue.popleft().set_result(None)


class ByteBudget:
    """Room for bytes that were received and are not yet dealt with; who finds none waits.

    An owner's bytes come first come first served. Between owners the room goes round, and nobody has more than
    ``owner_bytes``: whoever waits for his own bytes holds up nobody else.
    """

    def __init__(self, capacity_bytes: int, *, owner_bytes: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._owner_bytes = capacity_bytes if owner_bytes is None else owner_bytes
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self._by_owner: Counter[str] = Counter()
        self.used = 0

    @asynccontextmanager
    async def take(self, size_bytes: int, owner: str = "") -> AsyncIterator[None]:
        """Hold room for some bytes inside."""
        held = await self.acquire(size_bytes, owner)
        try:
            yield
        finally:
            self.release(held, owner)

    async def acquire(self, size_bytes: int, owner: str = "") -> int:
        """Take room and give how much was taken: more than one may have counts as all that one may have."""
        size = min(size_bytes, self._owner_bytes)
        if not self._waiting and self._fits(size, owner):
            self._take(size, owner)
            return size
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, future))
        self._serve()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size, owner)
            else:
                self._leave(owner, future)
            raise
        return size

    def release(self, size_bytes: int, owner: str = "") -> None:
        """Give room back."""
        self.used -= size_bytes
        self._by_owner[owner] -= size_bytes
        if self._by_owner[owner] <= 0:
            del self._by_owner[owner]
        if self._waiting:
            self._serve()

    def _fits(self, size: int, owner: str) -> bool:
        return self.used + size <= self._capacity and self._by_owner[owner] + size <= self._owner_bytes

    def _take(self, size: int, owner: str) -> None:
        self.used += size
        self._by_owner[owner] += size

    def _leave(self, owner: str, future: asyncio.Future[None]) -> None:
        waiting = deque(each for each in self._waiting.get(owner, ()) if each[1] is not future)
        if waiting:
            self._waiting[owner] = waiting
        else:
            self._waiting.pop(owner, None)
        self._serve()

    def _serve(self) -> None:
        """Give room to those who wait, one of each owner in turn."""
        at = 0
        while at < len(self._waiting):
            owner = next(iter(self._waiting))
            waiting = self._waiting[owner]
            size, future = waiting[0]
            if self._by_owner[owner] + size > self._owner_bytes:
                self._waiting.move_to_end(owner)
                at += 1
                continue
            if self.used + size > self._capacity:
                # Others who need less must not come before him for ever.
                return
            self._waiting.move_to_end(owner)
            at = 0
            waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not future.done():
                self._take(size, owner)
                future.set_result(None)


class AnswerRoom:
    """What the answers of one call take of a budget; see `bsfg.journey.link.Room`.

    A caller who asks for much and reads nothing has so much of the node's memory and no more: his next call waits.
    """

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget, self._owner = budget, owner
        self._held = 0

    async def take(self, size_bytes: int) -> None:
        """Wait for room, in the place of what was taken before."""
        self.close()
        self._held = await self._budget.acquire(size_bytes, self._owner)

    def keep(self, size_bytes: int) -> None:
        """Give back what is not needed."""
        if size_bytes < self._held:
            freed, self._held = self._held - max(0, size_bytes), max(0, size_bytes)
            self._budget.release(freed, self._owner)

    def close(self) -> None:
        """Give everything back."""
        self.keep(0)
