"""The engine of a consumer: where entries come from, what was handed out, and what is confirmed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, DigestMismatch, ForeignLog, InvalidArgument, StorageClosed, unforeseen
from bsfg.fact import Entry
from bsfg.frontier import Frontier
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.offload import by_size
from bsfg.ports import Confirmation, Frame, GapRecord
from bsfg.retry import Retry
from bsfg.sdk.sender import NodeLink
from bsfg.sdk.signing import TrustedKeys
from bsfg.sdk.thread import call_in
from bsfg.sealing import digest_mismatches

BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAX_SECONDS = 5.0


class ConsumerFeed(Protocol):
    """What a consumer reads from and confirms to."""

    async def open(self) -> None:
        """Begin."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Give what follows the first unconfirmed entry, waiting as the request says; there may be no frames.

        A feed may give again, or leave out, what it gave since it was last rewound.
        """

    def rewind(self) -> None:
        """Give everything again that is not confirmed."""

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Record what the consumer has finished."""

    async def close(self) -> None:
        """End."""


class NodeFeed:
    """The node itself: every fetch starts after what the node counts as confirmed."""

    def __init__(
        self,
        link: NodeLink,
        consumer: str,
        *,
        carry_only: Sequence[str] = (),
        deadline_seconds: float | None = None,
        on_problem: Callable[[BsfgError], None] = lambda error: None,
    ) -> None:
        self._link, self._consumer, self._carry_only = link, consumer, carry_only
        self._deadline_seconds, self._on_problem = deadline_seconds, on_problem
        self._acknowledged = -1

    async def open(self) -> None:
        """Begin; nothing is asked yet."""

    def rewind(self) -> None:
        """Nothing is needed: the node always begins at the first unconfirmed entry."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Fetch once, trying for as long as the consumer has patience; every digest is checked."""
        retry, suspect = self._retry(), False
        while True:
            had = self._acknowledged
            try:
                fetched = await self._link.client.fetch(self._consumer, request, self._carry_only)
                fetched = replace(fetched, frames=[await _checked(frame) for frame in fetched.frames])
            except DigestMismatch:
                # Damage on the way passes; damage at the node does not.
                if suspect:
                    raise
                suspect = True
            except BsfgError as error:
                self._on_problem(error)
                await asyncio.sleep(retry.pause_after(error))
                # Behind an outage there may be an older copy of it: it is to say by itself where the consumer stands.
                request = replace(request, after=None)
            else:
                if fetched.start <= had:
                    raise ForeignLog(f"the node's cursor went back: {had} was confirmed, it starts at {fetched.start}")
                return fetched

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Confirm at the node, trying for as long as the consumer has patience."""
        await self._retry().insist(
            lambda: self._link.client.confirm(self._consumer, confirmation, refusals), self._on_problem
        )
        self._acknowledged = max(self._acknowledged, -1 if confirmation.through is None else confirmation.through)

    def _retry(self) -> Retry:
        return Retry(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, self._deadline_seconds)

    async def close(self) -> None:
        """End the connection."""
        await self._link.close()


async def _checked(frame: Frame) -> Frame:
    """Give a frame if every entry has its digest, or raise `DigestMismatch`."""
    entries = frame.entries
    if entries is None or not len(entries):
        return frame
    wrong = await by_size(entries.weight_bytes, digest_mismatches, entries)
    if len(wrong):
        offsets = entries.offsets[wrong][:10].tolist()
        raise DigestMismatch(f"the entries at offsets {offsets} do not have the digests they claim", offsets=offsets)
    return frame


_ITEM_BYTES = 300
"""About what an item takes beside its object."""

CHUNK_FACTS = 256
"""How many entries are made into Python objects at a time."""

Item = Entry | GapRecord
OnGap = Callable[[GapRecord], None]


class ConsumerSettings(TypedDict, total=False):
    """The keyword arguments of a consumer that `ConsumerOptions` describes."""

    on_gap: OnGap | None
    prefetch_facts: int
    max_fetch_bytes: int
    confirm_every_facts: int
    confirm_interval_seconds: float
    fetch_wait_seconds: float
    deadline_seconds: float | None
    carry_only: Sequence[str]
    keys: TrustedKeys | None
    stream: str | None
    inbox: str | os.PathLike[str] | None
    inbox_capacity_bytes: int
    on_problem: Callable[[BsfgError], None] | None


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Everything that can be set on a consumer beside its name and where its node is.

    - ``on_gap``: is told each range that is not there and why, in its place among the entries. Without it a gap is
      logged as a warning of the logger ``bsfg.consumer``.
    - ``prefetch_facts``, ``max_fetch_bytes``: how much is fetched at once.
    - ``confirm_every_facts``, ``confirm_interval_seconds``: how many confirmations are gathered before they are sent.
      What was handled but not confirmed comes again after a crash.
    - ``fetch_wait_seconds``: how long a fetch waits at the node when there is nothing new.
    - ``deadline_seconds``: how long an absent node is waited for; None waits for ever.
    - ``carry_only``: take only facts addressed to these zones; the rest is reported as skipped ranges.
    - ``keys``: facts of the zones that have keys here must be signed by one of them.
    - ``stream``: the stream that they must be signed for; without it, the one that the node says it gives.
    - ``inbox``: a folder; entries are kept there and confirmed at the node as soon as they are, so that the consumer
      goes on reading while the node is away. See the guide for what that means.
    - ``inbox_capacity_bytes``: how large the inbox may grow before fetching pauses.
    - ``on_problem``: is told why nothing can be fetched at the moment, each time that is tried.
    """

    on_gap: OnGap | None = None
    prefetch_facts: int = 2_000
    max_fetch_bytes: int = 8 << 20
    confirm_every_facts: int = 1_000
    confirm_interval_seconds: float = 1.0
    fetch_wait_seconds: float = 20.0
    deadline_seconds: float | None = None
    carry_only: Sequence[str] = ()
    keys: TrustedKeys | None = None
    stream: str | None = None
    inbox: str | os.PathLike[str] | None = None
    inbox_capacity_bytes: int = 1 << 32
    on_problem: Callable[[BsfgError], None] | None = None

    def __post_init__(self) -> None:
        if self.prefetch_facts < 1 or self.max_fetch_bytes < 1 or self.confirm_every_facts < 1:
            raise InvalidArgument("a consumer fetches and confirms at least one fact at a time")


class ConsumerCore:
    """One consumer: hands out items in order, and keeps track of what is confirmed."""

    def __init__(self, feed: ConsumerFeed, options: ConsumerOptions) -> None:
        self._feed, self._options = feed, options
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._frontier: Frontier | None = None
        self._refusals: list[Refusal] = []
        self._unsent_facts = 0
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._flusher: asyncio.Task[None] | None = None
        self._items: deque[Item] = deque()
        self._frames: deque[Frame] = deque()
        self._fetching: asyncio.Task[Fetched] | None = None
        self._position: int | None = None
        self._handed_out = 0
        self.log_id: str | None = None
        self.stream: str | None = None
        self._gaps_token = ""
        self._end = 0
        self._failure: BsfgError | None = None
        self.closing = False

    async def open(self) -> None:
        """Begin."""
        await self._feed.open()
        self._flusher = asyncio.create_task(self._flush_from_time_to_time())

    # Handing out.

    def rewind(self) -> None:
        """Go back to the first entry that is not confirmed."""
        self._feed.rewind()
        self._items.clear()
        self._frames.clear()
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
        if self._frontier is not None:
            self._position = self._frontier.committed + 1

    async def take(self, wait_seconds: float | None = None) -> list[Item]:
        """Give the next items, waiting for them at most so long; none when the time is up or the consumer closes."""
        ends = None if wait_seconds is None else time.monotonic() + wait_seconds
        while not self.closing:
            self._make_items()
            if self._items:
                found, self._items = list(self._items), deque()
                self._prefetch()
                return found
            left = None if ends is None else ends - time.monotonic()
            if not await self._fetch(left) and ends is not None and time.monotonic() >= ends:
                return []
        return []

    async def take_many(self, max_facts: int, max_bytes: int, wait_seconds: float | None) -> list[Item]:
        """Give the next items as `take` does, together with those that are known to follow, within both bounds."""
        found: list[Item] = []
        size_bytes = 0
        while len(found) < max_facts and (not found or self._has_more()):
            some = await self.take(0.0 if found else wait_seconds)
            if not some:
                break
            for at, item in enumerate(some):
                size_bytes += _ITEM_BYTES + (len(item.message.fact.object) if isinstance(item, Entry) else 0)
                if found and (len(found) == max_facts or size_bytes > max_bytes):
                    self._items.extendleft(reversed(some[at:]))
                    return found
                found.append(item)
        return found

    def _has_more(self) -> bool:
        return bool(self._items or self._frames or self._end > (self._position or 0))

    def _make_items(self) -> None:
        """Make items of the next frame, a chunk of it when it is large; confirmed ones are left out."""
        while self._frames and not self._items:
            frame = self._frames.popleft()
            if frame.entries is None:
                assert frame.gap is not None
                self._items.append(replace(frame.gap, first=frame.first, last=frame.last))
                continue
            if len(frame.entries) > CHUNK_FACTS:
                rest = frame.entries.slice(CHUNK_FACTS)
                self._frames.appendleft(Frame(frame.first + CHUNK_FACTS, frame.last, rest))
            entries = frame.entries.slice(0, CHUNK_FACTS).to_entries()
            frontier = self._frontier
            if frontier is not None and frontier.ranges:
                entries = [entry for entry in entries if not frontier.is_confirmed(entry.offset)]
            self._items.extend(entries)

    # Fetching.

    def _prefetch(self) -> None:
        """Fetch the next entries while the last ones are being handled, when there are more for certain."""
        if not self._frames and self._fetching is None and self._position is not None and self._end > self._position:
            self._fetching = asyncio.create_task(self._fetch_once(0.0))

    async def _fetch(self, wait_seconds: float | None) -> bool:
        """Fetch more frames; tell whether anything came."""
        most = self._options.fetch_wait_seconds
        wait = most if wait_seconds is None else min(most, max(0.0, wait_seconds))
        fetching = self._fetching = self._fetching or asyncio.create_task(self._fetch_once(wait))
        try:
            return self._took(await fetching)
        except asyncio.CancelledError:
            if self.closing:
                return False
            raise
        finally:
            self._fetching = None

    async def _fetch_once(self, wait_seconds: float) -> Fetched:
        if self._failure is not None:
            raise self._failure
        request = FetchRequest(
            max_facts=self._options.prefetch_facts,
            max_bytes=self._options.max_fetch_bytes,
            wait_seconds=wait_seconds,
            gaps_after=self._gaps_token,
            # What was handed out and not confirmed yet need not be sent again.
            after=None if not self._position else self._position - 1,
        )
        return await self._feed.take(request)

    def _took(self, fetched: Fetched) -> bool:
        """Queue what is new in an answer; tell whether anything is."""
        if self.log_id not in (None, fetched.log_id):
            raise ForeignLog(f"the node's log is now {fetched.log_id}, it was {self.log_id}")
        if fetched.end < (self._position or 0):
            raise ForeignLog(f"the node's log went back: it ends at {fetched.end}, and had {self._position}")
        with self._lock:
            self.log_id, self.stream = fetched.log_id, fetched.stream
            if self._frontier is None or self._position is None:
                self._frontier, self._position = Frontier(fetched.start - 1), fetched.start
            elif fetched.start > self._position:
                # Somebody else confirmed for this consumer.
                self._frontier.confirm_through(fetched.start - 1)
                self._position = fetched.start
        position = self._position
        frames = [frame for frame in (_from(frame, position) for frame in fetched.frames) if frame is not None]
        self._frames.extend(frames)
        self._items.extend(fetched.gaps)
        self._gaps_token = fetched.gaps_token
        self._position = frames[-1].last + 1 if frames else position
        self._handed_out = max(self._handed_out, self._position)
        self._end = fetched.end
        return bool(frames or fetched.gaps)

    # Confirming.

    def confirm(self, first: int, last: int, refusal: Refusal | None = None) -> None:
        """Note that a range is finished; it is sent with others, soon."""
        with self._lock:
            frontier = self._known(last)
            frontier.confirm([(first, last)])
            self._noted(last - first + 1, refusal)

    def confirm_through(self, offset: int) -> None:
        """Note that everything up to an offset is finished."""
        with self._lock:
            frontier = self._known(offset)
            count = max(0, offset - frontier.committed)
            frontier.confirm_through(offset)
            self._noted(count, None)

    def _known(self, offset: int) -> Frontier:
        """Give the frontier for a confirmation, if it can be confirmed."""
        if self._frontier is None or offset >= self._handed_out:
            raise InvalidArgument(f"offset {offset} was not handed out yet", offset=offset)
        if self.closing:
            raise StorageClosed("the consumer is closed; what it handled and did not confirm comes again")
        return self._frontier

    def _noted(self, count: int, refusal: Refusal | None) -> None:
        was_clean, before = not self._unsent_facts, self._unsent_facts
        self._unsent_facts += count
        if refusal is not None:
            self._refusals.append(refusal)
        every = self._options.confirm_every_facts
        if was_clean or before < every <= self._unsent_facts:
            # When its loop has ended the consumer was closed meanwhile, and what was not sent by then comes again.
            call_in(self._loop, self._wake)

    def _wake(self) -> None:
        self._dirty.set()
        if self._unsent_facts >= self._options.confirm_every_facts:
            self._urgent.set()

    async def flush(self) -> None:
        """Send all confirmations that wait."""
        async with self._flushing:
            if self._failure is not None:
                raise self._failure
            with self._lock:
                frontier, refusals, count = self._frontier, list(self._refusals), self._unsent_facts
                if frontier is None or not count:
                    return
                state = (frontier.committed, tuple(frontier.ranges))
            confirmation = Confirmation(state[0] if state[0] >= 0 else None, state[1], self.log_id)
            await self._feed.confirm(confirmation, refusals)
            with self._lock:
                self._unsent_facts -= count
                del self._refusals[: len(refusals)]

    async def _flush_from_time_to_time(self) -> None:
        while True:
            await self._dirty.wait()
            try:
                async with asyncio.timeout(self._options.confirm_interval_seconds):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            self._dirty.clear()
            self._urgent.clear()
            try:
                await self.flush()
            except Exception as error:
                # It cannot pass by itself; whoever fetches or flushes next is told.
                self._failure = unforeseen(error, "confirming")
                return
            if self._unsent_facts:
                # It was confirmed while the others were being sent, when nobody had to be woken.
                self._wake()

    async def close(self, timeout_seconds: float | None) -> None:
        """Send what is confirmed and end; repeats are harmless."""
        if self.closing:
            return
        self.closing = True
        tasks = [task for task in (self._fetching, self._flusher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.flush()
        except TimeoutError:
            pass
        finally:
            await self._feed.close()

    @property
    def committed(self) -> int:
        """The offset through which everything is confirmed here, -1 when nothing is or it is not known yet."""
        return self._frontier.committed if self._frontier is not None else -1

    @property
    def backlog(self) -> int:
        """How many entries there were beyond what is confirmed, when the consumer last asked."""
        return max(0, self._end - self.committed - 1)


def _from(frame: Frame, position: int) -> Frame | None:
    """Give the part of a frame from a position on, or None when all of it lies before."""
    if frame.last < position:
        return None
    if frame.first >= position:
        return frame
    if frame.entries is None:
        return Frame(position, frame.last, gap=frame.gap)
    kept: EntryBatch = frame.entries.slice(position - frame.first)
    return Frame(position, frame.last, kept)
