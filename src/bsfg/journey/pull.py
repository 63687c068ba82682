"""Step 3, pull: a receiver asks its peer for facts; one answer is being stored, the next one is on its way.

The receiver drives: one turn is one answer that was stored, and whoever runs the loop (`bsfg.journey.handoff`) decides
when the next one is due. What becomes of an answer is step 4, `bsfg.journey.receive`. Fetching, judging and storing go
side by side, and confirmations follow on their own, several answers in one. While an answer is stored the sender is
already asked for the next one, so that a new fact finds a question waiting for it. That is as safe as one thing after
the other, because of three things:

- Asking ahead (`FetchRequest.after`) moves no cursor of the sender. Who forgets how far he asked is served again from
  what he confirmed.
- Answers are judged and handed over in the order of their offsets, each by the position that the one before it leads
  to, and are stored in that order.
- A confirmation names only what is durable here, and the position it can lead to is remembered before it is sent.

After any failure everything that was under way is let go. The next turn begins with what is remembered.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from bsfg.errors import BufferFull, ForeignLog, FrameInvalid, HasherUnknown, ZoneNotAllowed
from bsfg.journey.link import Fetched, FetchRequest, PeerLink, PeerMemory, PeerPosition, Refusal
from bsfg.journey.receive import (
    BeforePut,
    Decision,
    LinkHeld,
    LinkRules,
    PullProgress,
    Put,
    StoredAnswer,
    advanced,
    judged,
    no_room,
    progress_of,
    store,
    to_put,
)
from bsfg.ports import Clock, Confirmation, ForwardBuffer

HOLDING = (ForeignLog, FrameInvalid, HasherUnknown, ZoneNotAllowed)
"""Errors of a sender that say its history or this zone's right is in question: more tries would not help."""

ANSWERS_AT_ONCE = 3
"""One that is being stored, one that is being judged, one on its way."""

CONFIRM_EVERY_SECONDS = 0.02
REFUSALS_WAITING_MAX = 10_000

T = TypeVar("T")
Target = TypeVar("Target")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer with what is to become of it, the position it leads to, and the answer after it if one is coming."""

    fetched: Fetched
    decision: Decision
    position: PeerPosition
    came_ms: int
    following: asyncio.Task[_Answer] | None = None


@dataclass(frozen=True, slots=True)
class _Storing:
    """An answer that was handed over."""

    answer: _Answer
    put: Put
    stored: asyncio.Task[StoredAnswer]


@dataclass(slots=True)
class _Waiting:
    """What is durable here and not yet confirmed."""

    position: PeerPosition
    through: int
    chain_head: bytes
    refusals: list[Refusal]


class LinkTurns(ABC, Generic[Target]):
    """The turns of one stream of a link, wherever its facts are stored; use it from one task at a time."""

    stores_at_once = 1
    """How many answers may be handed over and not stored yet."""

    takes_sets = True
    """Whether what is fetched is stored by someone who knows sets of ranges."""

    def __init__(
        self,
        link: PeerLink,
        memory: PeerMemory,
        *,
        clock: Clock,
        confirm_every_seconds: float = CONFIRM_EVERY_SECONDS,
    ) -> None:
        self._link, self._memory, self._clock = link, memory, clock
        self._confirm_every_seconds = confirm_every_seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forget()

    @abstractmethod
    async def judge(self, fetched: Fetched, position: PeerPosition) -> Decision:
        """Decide what becomes of an answer."""

    @abstractmethod
    async def hand_over(self, put: Put, target: Target, clock_trusted: bool) -> Coroutine[Any, Any, StoredAnswer]:
        """Begin to make what is good of an answer durable, and give the rest of the work.

        Where several answers are stored at once, what is begun here decides on their order.
        """

    def waits_its_turn(self, put: Put) -> bool:
        """Tell whether an answer must not be handed over before all others are stored."""
        return False

    async def turn(
        self, forward: Target, request: FetchRequest | None = None, *, clock_trusted: bool = True
    ) -> PullProgress:
        """Wait until the next answer is stored, while the ones after it are fetched, judged and handed over.

        Raises what the link and the storage raise, except where that means a held or paused link. After any exception
        the next turn continues rightly. ``through`` is what this turn stored, ``acknowledged`` what the sender has said
        so far. What made confirming an earlier answer fail is raised here. ``clock_trusted`` suspends expiry while this
        zone's clock is in doubt.
        """
        try:
            return await self._turn(forward, request or FetchRequest(), clock_trusted)
        except HOLDING as error:
            self.reset()
            return PullProgress(held=LinkHeld(error.code, error.message))
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Let go of everything under way: the next turn begins with what is remembered."""
        for task in self._tasks:
            task.cancel()
        self._forget()

    @property
    def acknowledged(self) -> int | None:
        """The offset through which the sender counts everything as confirmed, None when it has not said so."""
        return self._acknowledged

    async def confirmed(self) -> None:
        """Wait until the sender has heard of all that is stored."""
        if self._confirming is not None:
            await asyncio.shield(self._confirming)

    def _forget(self) -> None:
        self._room = asyncio.Semaphore(ANSWERS_AT_ONCE + self.stores_at_once - 1)
        self._position: PeerPosition | None = None
        self._after: int | None = None
        self._acknowledged: int | None = None
        self._next: asyncio.Task[_Answer] | None = None
        self._storing: deque[_Storing] = deque()
        self._waiting: _Waiting | None = None
        self._confirming: asyncio.Task[None] | None = None

    async def _turn(self, forward: Target, request: FetchRequest, clock_trusted: bool) -> PullProgress:
        while not (self._storing and self._storing[0].stored.done()):
            following = await self._asked(request)
            if following is not None and following.done() and self._may_hand_over(following):
                answer = following.result()
                if isinstance(answer.decision, LinkHeld):
                    self.reset()
                    return PullProgress(held=answer.decision)
                await self._hand_over(answer, to_put(answer.decision)[0], forward, clock_trusted)
            else:
                await self._wait(following)
        return await self._finish(self._storing.popleft())

    def _may_hand_over(self, following: asyncio.Task[_Answer]) -> bool:
        """Tell whether it is the turn of an answer that has come: alone always, beside others only if it is good."""
        if not self._storing:
            return True
        if len(self._storing) >= self.stores_at_once or following.cancelled() or following.exception() is not None:
            return False
        decision = following.result().decision
        return isinstance(decision, Put) and not self.waits_its_turn(decision)

    async def _hand_over(self, answer: _Answer, put: Put, forward: Target, clock_trusted: bool) -> None:
        """Begin to store an answer, and go on from where it leads to."""
        work = await self.hand_over(put, forward, clock_trusted)
        self._storing.append(_Storing(answer, put, self._begin(work)))
        self._position, self._next = answer.position, answer.following
        if put.through >= answer.fetched.start:
            self._after = put.through

    async def _finish(self, storing: _Storing) -> PullProgress:
        """Take what became of the oldest answer, and have it confirmed."""
        answer, put = storing.answer, storing.put
        try:
            stored = storing.stored.result()
        except BufferFull as error:
            self.reset()
            return no_room(answer.fetched, error)
        self._room.release()
        took_seconds = (self._clock.monotonic_ms() - answer.came_ms) / 1000
        progress = progress_of(answer.position, answer.fetched, put, stored, took_seconds)
        if not progress.moved:
            return progress
        await self._confirm_soon(answer.position, put, stored)
        return replace(progress, acknowledged=self._acknowledged)

    async def _wait(self, following: asyncio.Task[_Answer] | None) -> None:
        """Wait for whatever comes first, and raise what kept an earlier answer from being confirmed."""
        tasks: list[asyncio.Task[Any]] = [each.stored for each in islice(self._storing, 1)]
        if following is not None and not following.done():
            tasks.append(following)
        confirming = self._confirming
        if confirming is not None:
            tasks.append(confirming)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if confirming is not None and confirming.done():
            self._confirming = None
            confirming.result()

    # Fetching and judging.

    async def _asked(self, request: FetchRequest) -> asyncio.Task[_Answer] | None:
        """Give the next answer as it is being fetched and judged; None when asking now would bring nothing new."""
        if self._next is None and self._storing and not request.wait_seconds:
            return None
        if self._position is None:
            self._position = await self._memory.recall()
            self._acknowledged = self._position.acknowledged
        if self._next is None:
            token = self._position.gaps_token
            fetching = self._begin(self._fetch(replace(request, gaps_after=token, after=self._after)))
            # An answer may start where this was acknowledged before it was asked for, but not where it was afterwards.
            position = replace(self._position, acknowledged=self._acknowledged)
            self._next = self._begin(self._judge(fetching, position, request))
        return self._next

    async def _fetch(self, request: FetchRequest) -> Fetched:
        room = self._room
        await room.acquire()
        try:
            return await self._link.fetch(replace(request, sets=self.takes_sets))
        except BaseException:
            room.release()
            raise

    async def _judge(self, fetching: asyncio.Task[Fetched], position: PeerPosition, request: FetchRequest) -> _Answer:
        fetched = await fetching
        came_ms = self._clock.monotonic_ms()
        ahead = self._ask_ahead(fetched, request)
        decision = await self.judge(fetched, position)
        if isinstance(decision, LinkHeld):
            return _Answer(fetched, decision, position, came_ms)
        put, suspect = to_put(decision)
        position = advanced(position, fetched, put, suspect)
        following = None
        if ahead is not None and suspect is None:
            following = self._begin(self._judge(ahead, position, request))
        elif ahead is not None and not ahead.cancel():
            self._room.release()
        return _Answer(fetched, decision, position, came_ms, following)

    def _ask_ahead(self, fetched: Fetched, request: FetchRequest) -> asyncio.Task[Fetched] | None:
        """Ask for what follows an answer, when the sender has more; what it has not yet is asked for in its turn."""
        if not fetched.frames or fetched.frames[-1].last + 1 >= fetched.end:
            return None
        after = fetched.frames[-1].last
        return self._begin(self._fetch(replace(request, gaps_after=fetched.gaps_token, after=after)))

    # Confirming.

    async def _confirm_soon(self, position: PeerPosition, put: Put, stored: StoredAnswer) -> None:
        refusals = self._waiting.refusals if self._waiting is not None else []
        self._waiting = _Waiting(position, put.through, stored.chain_head, [*refusals, *stored.refusals])
        if self._confirming is None or self._confirming.done():
            self._confirming = self._begin(self._confirm())
        if len(self._waiting.refusals) > REFUSALS_WAITING_MAX:
            await self.confirmed()

    async def _confirm(self) -> None:
        """Tell the sender what is durable here; what is stored meanwhile goes together with the next telling."""
        while (waiting := self._waiting) is not None:
            self._waiting = None
            await self._memory.remember(replace(waiting.position, acknowledged=self._acknowledged))
            confirmation = Confirmation(waiting.through, log_id=waiting.position.log_id, peer_head=waiting.chain_head)
            advanced_to = await self._link.confirm(confirmation, waiting.refusals)
            self._acknowledged = min(advanced_to, waiting.through)
            await asyncio.sleep(self._confirm_every_seconds)
            if self._waiting is None:
                await self._memory.remember(replace(waiting.position, acknowledged=self._acknowledged))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever needs it asks for it; nobody is to be reminded of what was let go


class Flow(LinkTurns[ForwardBuffer]):
    """The turns of a stream whose facts are put into a forward buffer of this process."""

    def __init__(
        self,
        link: PeerLink,
        memory: PeerMemory,
        rules: LinkRules,
        *,
        clock: Clock,
        before_put: BeforePut | None = None,
        confirm_every_seconds: float = CONFIRM_EVERY_SECONDS,
    ) -> None:
        super().__init__(link, memory, clock=clock, confirm_every_seconds=confirm_every_seconds)
        self._rules, self._before_put = rules, before_put

    async def judge(self, fetched: Fetched, position: PeerPosition) -> Decision:
        """Decide what becomes of an answer by the rules of the link."""
        return await judged(fetched, position, self._rules, self._link.zone)

    async def hand_over(
        self, put: Put, target: ForwardBuffer, clock_trusted: bool
    ) -> Coroutine[Any, Any, StoredAnswer]:
        """Put the entries into the buffer; nothing expires while the clock is in doubt."""
        return store(
            put,
            target,
            self._rules,
            self._link.zone,
            self._clock,
            clock_trusted=clock_trusted,
            before_put=self._before_put,
        )
