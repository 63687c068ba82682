"""The handoff of one link: a loop per stream that pulls, puts and confirms, whichever engine runs it.

A loop per stream, so that the backlog of one never delays the live facts of another. They share the link's connection,
its gate, its lease and its rate limit. The turns are those of `bsfg.journey.pull`, which may be interrupted anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, TimedOut
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.link import FetchRequest
from bsfg.journey.receive import Progress
from bsfg.node.config import Link
from bsfg.node.desk import Desk
from bsfg.node.faults import Verdict, verdict
from bsfg.node.pacing import Appetite, Backoff, RateLimit

FETCH_BYTES = 8 << 20
FETCH_PARTS = 16
HELD_LOOK_SECONDS = 0.25
"""How often a loop that stands still looks whether it may go on."""

Note = Callable[..., None]
"""Takes an event's name and its fields, for the log."""


class Way(Protocol):
    """The way to the sender; see `bsfg.node.reach.Reach`."""

    async def ready(self) -> None:
        """Make sure that the sender is the one that is meant, or raise."""
        ...

    async def explained(self, error: BsfgError) -> BsfgError:
        """Find out what is behind a failed call."""
        ...


class Pull(Protocol):
    """What one loop works with: the turns of one stream."""

    @property
    def stream(self) -> str:
        """The stream."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """How much the forward buffer holds in all."""
        ...

    async def turn(self, request: FetchRequest) -> Progress:
        """Make one turn."""
        ...

    async def make_good(self) -> Progress | None:
        """Act upon an operator's release, None when there is none; see `bsfg.node.reread`."""
        ...

    def reset(self) -> None:
        """Let go of what is under way."""
        ...


class Handoff:
    """The loops of one inbound link."""

    def __init__(
        self,
        link: Link,
        desk: Desk,
        pulls: Sequence[Pull],
        *,
        note: Note,
        way: Way | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.link, self._desk, self._pulls, self._note = link, desk, pulls, note
        self._way = way
        self._rng = rng or random.Random()
        self._rate = RateLimit(link.rate_limit)
        self._appetites = {pull.stream: _appetite(pull) for pull in pulls}
        self._backlogs: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._failed_with: dict[str, tuple[str, int]] = {}
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to pull."""
        self._tasks = [asyncio.create_task(self._loop(pull)) for pull in self._pulls]

    async def stop(self) -> None:
        """End all loops; whatever is under way is abandoned, which is safe at any point."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The loops.

    async def _loop(self, pull: Pull) -> None:
        backoff = Backoff(self.link.backoff_first_seconds, self.link.backoff_max_seconds, self._rng)
        # What an operator released is remembered by the node, so that every loop that begins, and begins again, asks.
        made_good = False
        try:
            while not self._stopping.is_set():
                gate = self._desk.gate()
                if not self._desk.may_move() or not gate.allows_fetch:
                    made_good = False
                    pull.reset()
                    await self._pause(HELD_LOOK_SECONDS)
                elif not made_good:
                    made_good = await self._try(pull, self._make_good(pull), backoff)
                else:
                    await self._try(pull, self._turn(pull, gate), backoff)
        finally:
            pull.reset()

    async def _try(self, pull: Pull, turn: Awaitable[Progress | None], backoff: Backoff) -> bool:
        """Make one turn and deal with how it went; tell whether it went well."""
        try:
            progress = await turn
            if progress is None:
                return True
            await self._went_well(pull, progress, backoff)
        except BsfgError as error:
            await self._failed(pull, error, backoff)
        except asyncio.CancelledError:
            if self._stopping.is_set() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            await self._failed(pull, PeerUnreachable("a call of this turn was ended here"), backoff)
        except Exception as error:
            # A loop that ended here would be a link that stands still and says nothing.
            self._note("link_failed", link=self.link.name, stream=pull.stream, exc_info=error)
            self._hold(pull, BsfgError.code, f"{type(error).__name__}: {error}")
        else:
            return progress.held is None and progress.paused is None
        return False

    async def _make_good(self, pull: Pull) -> Progress | None:
        if self._way is not None:
            await self._way.ready()
        progress = await pull.make_good()
        if progress is not None and progress.inserted:
            self._note("link_read_again", link=self.link.name, stream=pull.stream, facts=progress.inserted)
        return progress

    async def _turn(self, pull: Pull, gate: Gate) -> Progress:
        if self._way is not None:
            await self._way.ready()
        # A gate that is closed finds out quickly whether the peer is back; an open one may wait long for new facts.
        wait_seconds = self.link.fetch_wait_seconds if gate.mode == Mode.NORMAL else 0.0
        request = FetchRequest(
            max_facts=self._rate.batch(self.link.batch_facts),
            max_bytes=self._appetites[pull.stream].max_bytes,
            wait_seconds=wait_seconds,
        )
        return await pull.turn(request)

    async def _went_well(self, pull: Pull, progress: Progress, backoff: Backoff) -> None:
        self._failures.pop(pull.stream, None)
        self._failed_with.pop(pull.stream, None)
        self._desk.distrust(None)
        if progress.held is not None:
            self._hold(pull, progress.held.code, progress.held.detail, progress.held.log_id)
            return
        self._backlogs[pull.stream] = progress.backlog
        self._report(pull, progress)
        self._move_gate()
        if progress.paused is not None:
            await self._no_room(pull, progress.paused, backoff)
            return
        backoff.reset()
        self._appetites[pull.stream].came()
        await self._rate.spend(progress.inserted + progress.repeated)
        if not progress.moved and progress.refetch_at is None and self._desk.gate().mode != Mode.NORMAL:
            await self._pause(HELD_LOOK_SECONDS)

    async def _no_room(self, pull: Pull, error: BsfgError, backoff: Backoff) -> None:
        self._note("link_paused", link=self.link.name, stream=pull.stream, **_brief(error))
        await self._pause(backoff.next_seconds())

    async def _failed(self, pull: Pull, error: BsfgError, backoff: Backoff) -> None:
        if self._way is not None:
            error = await self._way.explained(error)
        if isinstance(error, TimedOut):
            self._appetites[pull.stream].ran_out_of_time()
        self._desk.failed(error.code)
        decided = verdict(error, self._repeats(pull.stream, error.code), self.link.lost_after_failures)
        if decided == Verdict.HOLD:
            self._hold(pull, error.code, error.message, str(error.details.get("log_id", "")))
            return
        if decided == Verdict.PAUSE:
            await self._no_room(pull, error, backoff)
            return
        failures = self._failures[pull.stream] = self._failures.get(pull.stream, 0) + 1
        self._note("fetch_failed", link=self.link.name, stream=pull.stream, failures=failures, **_brief(error))
        if isinstance(error, CertificateInvalid):
            # Nothing is held: it may yet show the right certificate.
            self._desk.distrust(f"{self.link.name} stays closed: {error.code}: {error.message}")
        if failures == self.link.lost_after_failures:
            self._desk.tell(Event.PEER_LOST, f"{error.code}: {error.message}"[:300])
        await self._pause(backoff.next_seconds())

    def _repeats(self, stream: str, code: str) -> int:
        """Count how often a stream has failed in the same way in a row, this time included."""
        before, count = self._failed_with.get(stream, (code, 0))
        count = count + 1 if before == code else 1
        self._failed_with[stream] = code, count
        return count

    # Gate and reports.

    def _hold(self, pull: Pull, code: str, detail: str, log_id: str = "") -> None:
        """Close the gate: an operator must look before this link goes on."""
        self._failures.clear()
        self._failed_with.clear()
        self._note("link_held", link=self.link.name, stream=pull.stream, code=code, detail=detail)
        self._desk.hold(f"{code}: {detail}"[:500], pull.stream, log_id)

    def _move_gate(self) -> None:
        backlog = sum(self._backlogs.values())
        self._desk.tell(Event.PEER_FOUND)
        if backlog > self.link.reconciliation_backlog:
            self._desk.tell(Event.BACKLOG_GREW, f"backlog {backlog}")
        elif backlog <= self.link.normal_backlog and len(self._backlogs) == len(self._pulls):
            self._desk.tell(Event.BACKLOG_CLEARED, f"backlog {backlog}")

    def _report(self, pull: Pull, progress: Progress) -> None:
        self._desk.report(pull.stream, progress)
        if progress.refused:
            refusals = [str(refusal) for refusal in progress.refused[:10]]
            self._note("facts_refused", link=self.link.name, stream=pull.stream, refusals=refusals)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def _appetite(pull: Pull) -> Appetite:
    """Ask for a small part of the forward buffer at most, else one answer might never fit into it."""
    return Appetite(max(1, min(FETCH_BYTES, pull.capacity_bytes // FETCH_PARTS)))


def _brief(error: BsfgError) -> dict[str, object]:
    return {"code": error.code, "message": error.message[:300]}
