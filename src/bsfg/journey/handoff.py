"""The handoff of one link: a loop per stream that pulls, receives and confirms, whichever engine runs it.

A loop per stream, so that the backlog of one never delays the live facts of another. They share the link's connection,
its gate, its lease and its rate limit. The turns are those of `bsfg.journey.pull`, which may be interrupted anywhere.
The native engine runs these loops in the node and a live task runs them on Spark; what differs is where they report
(`LinkReporter`), where the facts are put (`Pull`), and how the sender is reached (`SenderWay`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Protocol

from bsfg.errors import (
    ArtifactConflict,
    ArtifactMissing,
    ArtifactStoreFull,
    ArtifactTooLarge,
    BsfgError,
    BufferFull,
    CertificateInvalid,
    ConsumerRetired,
    DigestMismatch,
    DiskFull,
    FactTooLarge,
    IdentityRevoked,
    IdentityUnknown,
    InvalidFact,
    MessageTooLarge,
    PeerUnreachable,
    PermissionRefused,
    ServerIdentityMismatch,
    TimedOut,
)
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.link import FetchRequest
from bsfg.journey.pull import HOLDING
from bsfg.journey.receive import PullProgress
from bsfg.retry import Backoff

FETCH_BYTES = 8 << 20
FETCH_PARTS = 16
HELD_LOOK_SECONDS = 0.25
"""How often a loop that stands still looks whether it may go on."""

Note = Callable[..., None]
"""Takes an event's name and its fields, for the log."""


class LinkPace(Protocol):
    """How a link is to be moved, as its table in the configuration says it."""

    @property
    def name(self) -> str:
        """The name of the link."""

    @property
    def rate_limit(self) -> int:
        """Most facts per second, 0 for no limit."""

    @property
    def batch_facts(self) -> int:
        """Most facts in one fetch."""

    @property
    def fetch_wait_seconds(self) -> float:
        """How long a fetch waits for new facts."""

    @property
    def backoff_first_seconds(self) -> float:
        """The first pause after a failure."""

    @property
    def backoff_max_seconds(self) -> float:
        """The longest pause between two attempts."""

    @property
    def lost_after_failures(self) -> int:
        """Failed fetches in a row after which the link is autonomous."""

    @property
    def reconciliation_backlog(self) -> int:
        """Backlog above which the link is in reconciliation."""

    @property
    def normal_backlog(self) -> int:
        """Backlog at or below which it is normal again."""


class LinkReporter(Protocol):
    """What a loop tells about its link; a desk in another process may pass it on a little later."""

    def may_move(self) -> bool:
        """Tell whether this engine, and no other, moves the link now."""

    def gate(self) -> Gate:
        """Give the receiver's gate."""

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate."""

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate until an operator has looked at what was found in a stream, and in which history."""

    def report(self, stream: str, progress: PullProgress) -> None:
        """Tell what a turn achieved."""

    def failed(self, code: str) -> None:
        """Count a turn that failed."""

    def distrust(self, text: str | None) -> None:
        """Say that the peer cannot be trusted at the moment, None when it can."""


class SenderWay(Protocol):
    """The way to the sender; see `bsfg.wire.probe.ConnectionDiagnosis`."""

    async def ready(self) -> None:
        """Make sure that the sender is the one that is meant, or raise."""

    async def explained(self, error: BsfgError) -> BsfgError:
        """Find out what is behind a failed call."""


class Pull(Protocol):
    """What one loop works with: the turns of one stream."""

    @property
    def stream(self) -> str:
        """The stream."""

    @property
    def capacity_bytes(self) -> int:
        """How much the forward buffer holds in all."""

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Make one turn."""

    async def make_good(self) -> PullProgress | None:
        """Act upon an operator's release, None when there is none; see `bsfg.journey.backfill`."""

    def reset(self) -> None:
        """Let go of what is under way."""


class Handoff:
    """The loops of one inbound link."""

    def __init__(
        self,
        link: LinkPace,
        desk: LinkReporter,
        pulls: Sequence[Pull],
        *,
        note: Note,
        way: SenderWay | None = None,
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
                try:
                    made_good = await self._step(pull, made_good, backoff)
                except Exception as error:
                    # Not even a finding can be written down; a loop that ended here would be a link that stands still.
                    self._note("link_failed", link=self.link.name, stream=pull.stream, exc_info=error)
                    await self._pause(backoff.next_seconds())
        finally:
            pull.reset()

    async def _step(self, pull: Pull, made_good: bool, backoff: Backoff) -> bool:
        """Do what the gate allows; tell whether what an operator released has been acted upon."""
        gate = self._desk.gate()
        if not self._desk.may_move() or not gate.allows_fetch:
            pull.reset()
            await self._pause(HELD_LOOK_SECONDS)
            return False
        turn = self._turn(pull, gate) if made_good else self._make_good(pull)
        return await self._try(pull, turn, backoff) or made_good

    async def _try(self, pull: Pull, turn: Awaitable[PullProgress | None], backoff: Backoff) -> bool:
        """Make one turn and deal with how it went; tell whether it went well."""
        try:
            progress = await turn
            if progress is None:
                return True
            await self._went_well(pull, progress, backoff)
            return progress.held is None and progress.paused is None
        except BsfgError as error:
            await self._failed(pull, error, backoff)
        except asyncio.CancelledError:
            if self._stopping.is_set() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            await self._failed(pull, PeerUnreachable("a call of this turn was ended here"), backoff)
        except Exception as error:
            self._note("link_failed", link=self.link.name, stream=pull.stream, exc_info=error)
            self._hold(pull, BsfgError.code, f"{type(error).__name__}: {error}")
        return False

    async def _make_good(self, pull: Pull) -> PullProgress | None:
        if self._way is not None:
            await self._way.ready()
        progress = await pull.make_good()
        if progress is not None and progress.inserted:
            self._note("link_read_again", link=self.link.name, stream=pull.stream, facts=progress.inserted)
        return progress

    async def _turn(self, pull: Pull, gate: Gate) -> PullProgress:
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

    async def _went_well(self, pull: Pull, progress: PullProgress, backoff: Backoff) -> None:
        self._failures.pop(pull.stream, None)
        self._failed_with.pop(pull.stream, None)
        self._desk.distrust(None)
        if progress.held is not None:
            self._hold(pull, progress.held.code, progress.held.detail, progress.held.log_id)
            return
        self._backlogs[pull.stream] = progress.backlog
        self._desk.report(pull.stream, progress)
        if progress.refused:
            refusals = [str(refusal) for refusal in progress.refused[:10]]
            self._note("facts_refused", link=self.link.name, stream=pull.stream, refusals=refusals)
        backlog = sum(self._backlogs.values())
        self._desk.tell(Event.PEER_FOUND)
        if backlog > self.link.reconciliation_backlog:
            self._desk.tell(Event.BACKLOG_GREW, f"backlog {backlog}")
        elif backlog <= self.link.normal_backlog and len(self._backlogs) == len(self._pulls):
            self._desk.tell(Event.BACKLOG_CLEARED, f"backlog {backlog}")
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
        if decided == FaultConsequence.HOLD:
            self._hold(pull, error.code, error.message, str(error.details.get("log_id", "")))
            return
        if decided == FaultConsequence.PAUSE:
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

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def _appetite(pull: Pull) -> Appetite:
    """Ask for a small part of the forward buffer at most, else one answer might never fit into it."""
    return Appetite(max(1, min(FETCH_BYTES, pull.capacity_bytes // FETCH_PARTS)))


def _brief(error: BsfgError) -> dict[str, object]:
    return {"code": error.code, "message": error.message[:300]}


# What a failed turn means.


class FaultConsequence(StrEnum):
    """What follows from a failure."""

    RETRY = "retry"
    PAUSE = "pause"
    HOLD = "hold"


AT_ONCE: tuple[type[BsfgError], ...] = (
    *HOLDING,
    FactTooLarge,
    InvalidFact,
    MessageTooLarge,
    IdentityUnknown,
    IdentityRevoked,
    PermissionRefused,
    ServerIdentityMismatch,
    ConsumerRetired,
)
"""Faults of framing, identity, authorisation and history: more tries would not help, and may do harm."""

AFTER_A_FEW: tuple[type[BsfgError], ...] = (DigestMismatch, ArtifactMissing, ArtifactTooLarge, ArtifactConflict)
"""Faults of what the peer sent beside its facts: perhaps damage on the way, but not time after time."""

NO_ROOM: tuple[type[BsfgError], ...] = (BufferFull, ArtifactStoreFull, DiskFull)
"""This zone's own storage is full; the peer has nothing to do with it."""


def verdict(error: BsfgError, repeats: int, few: int) -> FaultConsequence:
    """Decide what a failure means that came so many times in a row; ``few`` is how many are patience enough."""
    if isinstance(error, AT_ONCE) or (isinstance(error, AFTER_A_FEW) and repeats >= few):
        return FaultConsequence.HOLD
    return FaultConsequence.PAUSE if isinstance(error, NO_ROOM) else FaultConsequence.RETRY


# How much a link asks for, and how fast it may go.

APPETITE_BYTES_MIN = 16 << 10
GROWS_AFTER = 8


class Appetite:
    """How much to ask for at once: much less after an answer that ran out of time, more again after some that came.

    Over a slow link a whole answer may never arrive in time; asked for again as it was, it would never end.
    """

    def __init__(self, most_bytes: int) -> None:
        self.max_bytes = self._most_bytes = most_bytes
        self._came = 0

    def ran_out_of_time(self) -> None:
        """Ask for a quarter."""
        self.max_bytes = min(self._most_bytes, max(APPETITE_BYTES_MIN, self.max_bytes // 4))
        self._came = 0

    def came(self) -> None:
        """Ask for twice as much when several answers have come in time."""
        self._came += 1
        if self._came >= GROWS_AFTER and self.max_bytes < self._most_bytes:
            self.max_bytes = min(self._most_bytes, 2 * self.max_bytes)
            self._came = 0


class RateLimit:
    """A budget of facts per second that the streams of a link share; it never lets a burst exceed one second."""

    def __init__(self, facts_per_second: int) -> None:
        self._rate = facts_per_second
        self._free_at = 0.0

    def batch(self, most: int) -> int:
        """Give the largest batch to ask for, so that a turn costs about a tenth of a second of the budget."""
        return most if not self._rate else max(1, min(most, self._rate // 10))

    async def spend(self, facts: int) -> None:
        """Wait until so many facts more are within the rate."""
        if not self._rate or not facts:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - 1.0) + facts / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
