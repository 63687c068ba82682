"""The native engine: for each inbound link a loop per stream that pulls, puts and confirms.

A loop per stream, so that the backlog of one never delays the live facts of another. They share the link's connection,
its gate, its lease and its rate limit. The turns are those of `bsfg.journey.flow`, which may be interrupted anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from bsfg.errors import BsfgError, CertificateInvalid, FrameInvalid, LeaseHeld, LeaseLost, TimedOut
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.flow import Flow
from bsfg.journey.link import FetchRequest, PeerLink, PeerMemory
from bsfg.journey.pull import BeforePut, Progress
from bsfg.journey.verify import LinkRules
from bsfg.node.alerts import AlertBoard
from bsfg.node.board import RECEIVER
from bsfg.node.config import Link
from bsfg.node.config.kinds import ANY
from bsfg.node.faults import Verdict, verdict
from bsfg.node.pacing import Appetite, Backoff, RateLimit
from bsfg.node.parts import Parts
from bsfg.node.reread import ReadRange, read_again
from bsfg.ports import Buffer, Clock
from bsfg.wire.service import LinkReport

LEASE_TTL_MS = 15_000
LEASE_RENEW_SECONDS = 5.0
FETCH_BYTES = 8 << 20
FETCH_PARTS = 16
HELD_LOOK_SECONDS = 0.25
"""How often a loop that stands still looks whether it may go on."""

Note = Callable[..., None]
"""Takes an event's name and its fields, for the log."""

Explain = Callable[[BsfgError], Awaitable[BsfgError]]
"""Finds out what is behind a failed call."""


@dataclass(frozen=True, slots=True)
class StreamPull:
    """What one loop works with."""

    stream: str
    peer: PeerLink
    memory: PeerMemory
    rules: LinkRules
    before_put: BeforePut
    read: ReadRange | None = None

    def flow(self, clock: Clock) -> Flow:
        """Begin to pull."""
        return Flow(self.peer, self.memory, self.rules, clock=clock, before_put=self.before_put)


class NativeHandoff:
    """One inbound link, moved by the node itself."""

    def __init__(
        self,
        link: Link,
        parts: Parts,
        pulls: list[StreamPull],
        *,
        note: Note,
        alerts: AlertBoard | None = None,
        explain: Explain | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.link, self._parts, self._pulls, self._note = link, parts, pulls, note
        self._alerts, self._explain = alerts, explain
        self._rng = rng or random.Random()
        self._rate = RateLimit(link.rate_limit)
        self._appetites = {pull.stream: self._appetite(pull.stream) for pull in pulls}
        self._backlogs: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._failed_with: dict[str, tuple[str, int]] = {}
        self._lease: str | None = None
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to pull."""
        self._tasks = [asyncio.create_task(self._keep_lease())]
        self._tasks += [asyncio.create_task(self._loop(pull)) for pull in self._pulls]

    async def stop(self) -> None:
        """End all loops; whatever is under way is abandoned, which is safe at any point."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease is not None:
            self._parts.board.give_back(self.link.name, self._lease)

    # The lease: a pipeline elsewhere may be moving this link.

    async def _keep_lease(self) -> None:
        board, name = self._parts.board, self.link.name
        while not self._stopping.is_set():
            try:
                if self._lease is None:
                    self._lease = board.acquire(name, "native", LEASE_TTL_MS).token
                    self._note("lease_taken", link=name)
                else:
                    board.renew(name, self._lease, LEASE_TTL_MS)
            except LeaseHeld as held:
                self._note("lease_waited_for", link=name, holder=held.details.get("holder"))
            except LeaseLost as lost:
                self._lease = None
                self._note("lease_lost", link=name, holder=lost.details.get("holder"))
            await self._pause(LEASE_RENEW_SECONDS if self._lease else 1.0)

    # The loops.

    async def _loop(self, pull: StreamPull) -> None:
        backoff = Backoff(self.link.backoff_first_seconds, self.link.backoff_max_seconds, self._rng)
        flow = pull.flow(self._parts.steady)
        looks_back = False
        try:
            while not self._stopping.is_set():
                gate = self._gate()
                if self._lease is None or not gate.allows_fetch:
                    looks_back = looks_back or gate.reason.startswith(f"{FrameInvalid.code}:")
                    flow.reset()
                    await self._pause(HELD_LOOK_SECONDS)
                elif looks_back:
                    looks_back = not await self._try(pull, self._read_again(pull), backoff)
                else:
                    await self._try(pull, self._turn(pull, flow, gate), backoff)
        finally:
            flow.reset()

    async def _try(self, pull: StreamPull, turn: Awaitable[Progress], backoff: Backoff) -> bool:
        """Make one turn and deal with how it went; tell whether it went well."""
        try:
            progress = await turn
            await self._went_well(pull, progress, backoff)
        except BsfgError as error:
            await self._failed(pull, error, backoff)
        except Exception as error:
            # A loop that ended here would be a link that stands still and says nothing.
            self._note("link_failed", link=self.link.name, stream=pull.stream, exc_info=error)
            self._hold(BsfgError.code, f"{type(error).__name__}: {error}")
        else:
            return progress.held is None and progress.paused is None
        return False

    async def _read_again(self, pull: StreamPull) -> Progress:
        """Read what a restored receiver lacks, after an operator has released the link."""
        if pull.read is None:
            return Progress()
        forward, clock = await self._parts.forward(pull.stream), self._parts.steady
        progress = await read_again(
            pull.peer, pull.memory, pull.rules, forward, pull.read, clock=clock, before_put=pull.before_put
        )
        if progress.inserted:
            self._note("link_read_again", link=self.link.name, stream=pull.stream, facts=progress.inserted)
        return progress

    async def _turn(self, pull: StreamPull, flow: Flow, gate: Gate) -> Progress:
        # A gate that is closed finds out quickly whether the peer is back; an open one may wait long for new facts.
        wait_seconds = self.link.fetch_wait_seconds if gate.mode == Mode.NORMAL else 0.0
        request = FetchRequest(
            max_facts=self._rate.batch(self.link.batch_facts),
            max_bytes=self._appetites[pull.stream].max_bytes,
            wait_seconds=wait_seconds,
        )
        forward = await self._parts.forward(pull.stream)
        return await flow.turn(forward, request, clock_trusted=self._parts.steady.trusted)

    async def _went_well(self, pull: StreamPull, progress: Progress, backoff: Backoff) -> None:
        self._failures.pop(pull.stream, None)
        self._failed_with.pop(pull.stream, None)
        self._alert(None)
        if progress.held is not None:
            self._hold(progress.held.code, progress.held.detail)
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
        if not progress.moved and progress.refetch_at is None and self._gate().mode != Mode.NORMAL:
            await self._pause(HELD_LOOK_SECONDS)

    async def _no_room(self, pull: StreamPull, error: BsfgError, backoff: Backoff) -> None:
        self._note("link_paused", link=self.link.name, stream=pull.stream, **_brief(error))
        await self._pause(backoff.next_seconds())

    async def _failed(self, pull: StreamPull, error: BsfgError, backoff: Backoff) -> None:
        if self._explain is not None:
            error = await self._explain(error)
        if isinstance(error, TimedOut):
            self._appetites[pull.stream].ran_out_of_time()
        self._parts.metrics.link_failures.labels(self.link.name, error.code).inc()
        decided = verdict(error, self._repeats(pull.stream, error.code), self.link.lost_after_failures)
        if decided == Verdict.HOLD:
            self._hold(error.code, error.message)
            return
        if decided == Verdict.PAUSE:
            await self._no_room(pull, error, backoff)
            return
        failures = self._failures[pull.stream] = self._failures.get(pull.stream, 0) + 1
        self._note("fetch_failed", link=self.link.name, stream=pull.stream, failures=failures, **_brief(error))
        if isinstance(error, CertificateInvalid):
            self._alert(f"{self.link.name} stays closed: {error.code}: {error.message}")
        if failures == self.link.lost_after_failures:
            self._parts.board.on(self.link.name, RECEIVER, Event.PEER_LOST, f"{error.code}: {error.message}"[:300])
        await self._pause(backoff.next_seconds())

    def _appetite(self, stream: str) -> Appetite:
        """Ask for a small part of the forward buffer at most, else one answer might never fit into it."""
        capacity_bytes = self._parts.settings.lane(stream).forward_policy.capacity_bytes
        return Appetite(max(1, min(FETCH_BYTES, capacity_bytes // FETCH_PARTS)))

    def _repeats(self, stream: str, code: str) -> int:
        """Count how often a stream has failed in the same way in a row, this time included."""
        before, count = self._failed_with.get(stream, (code, 0))
        count = count + 1 if before == code else 1
        self._failed_with[stream] = code, count
        return count

    # Gate and reports.

    def _gate(self) -> Gate:
        return self._parts.board.gate(self.link.name).gate

    def _hold(self, code: str, detail: str) -> None:
        """Close the gate: an operator must look before this link goes on."""
        self._failures.clear()
        self._failed_with.clear()
        reason = f"{code}: {detail}"[:500]
        self._note("link_held", link=self.link.name, code=code, detail=detail)
        # An operator's own hold keeps his reason; what is wrong shows again when he releases it.
        if self._gate().mode != Mode.HELD:
            self._parts.board.hold(self.link.name, RECEIVER, by="bsfg", reason=reason)

    def _alert(self, text: str | None) -> None:
        """Say that the peer cannot be trusted although nothing is held: it may yet show the right certificate."""
        if self._alerts is not None:
            self._alerts.update("peer_certificate", self.link.name, text)

    def _move_gate(self) -> None:
        board, name, backlog = self._parts.board, self.link.name, sum(self._backlogs.values())
        board.on(name, RECEIVER, Event.PEER_FOUND)
        if backlog > self.link.reconciliation_backlog:
            board.on(name, RECEIVER, Event.BACKLOG_GREW, f"backlog {backlog}")
        elif backlog <= self.link.normal_backlog and len(self._backlogs) == len(self._pulls):
            board.on(name, RECEIVER, Event.BACKLOG_CLEARED, f"backlog {backlog}")

    def _report(self, pull: StreamPull, progress: Progress) -> None:
        metrics, name = self._parts.metrics, self.link.name
        facts = metrics.facts
        for result, count in (("inserted", progress.inserted), ("already_exists", progress.repeated)):
            if count:
                facts.labels(pull.stream, str(Buffer.FORWARD), result).inc(count)
        metrics.link_backlog.labels(name, pull.stream).set(progress.backlog)
        lag_seconds = None
        if progress.newest_origin_unix_ms is not None:
            lag_seconds = max(0.0, (self._parts.clock.now_unix_ms() - progress.newest_origin_unix_ms) / 1000)
            metrics.lagged(name, pull.stream, lag_seconds)
        refused = sum(refusal.last - refusal.first + 1 for refusal in progress.refused)
        if refused:
            self._note("facts_refused", link=name, stream=pull.stream, refusals=[str(r) for r in progress.refused[:10]])
        report = LinkReport(
            link=name,
            stream=pull.stream,
            backlog=progress.backlog,
            inserted=progress.inserted,
            repeated=progress.repeated,
            refused=refused,
            lag_seconds=lag_seconds,
            lease=self._lease,
        )
        with suppress(LeaseLost):
            self._parts.board.report(report)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def _brief(error: BsfgError) -> dict[str, object]:
    return {"code": error.code, "message": error.message[:300]}


class EveryZone(frozenset[str]):
    """The zones of a peer that may relay for anybody."""

    def __contains__(self, zone: object) -> bool:
        return True


def rules_of(link: Link, parts: Parts, stream: str) -> LinkRules:
    """Give what a link may bring into a stream of this zone: what its peer's row in the configuration allows."""
    lane = parts.settings.lane(stream)
    max_age_seconds = lane.max_age_seconds
    if max_age_seconds is not None and link.max_age_seconds is not None:
        max_age_seconds = float(link.max_age_seconds)
    relayed = parts.guard.matrix.identities[link.expected_server].relay_for
    from_zones = EveryZone() if ANY in relayed else frozenset({link.zone, *relayed})
    return LinkRules(parts.settings.zone, from_zones, max_age_seconds, limits=lane.link_limits)
