"""The native engine: the handoff of a link in the node's own event loop, and where its loops report."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

from bsfg.config import Link
from bsfg.config.kinds import ANY
from bsfg.errors import LeaseHeld, LeaseLost
from bsfg.gate import RECEIVER, Event, Gate, Mode
from bsfg.journey.backfill import ReadRange, make_good, put_again
from bsfg.journey.handoff import Handoff, Note, SenderWay
from bsfg.journey.link import Fetched, FetchRequest, PeerLink, PeerMemory
from bsfg.journey.pull import Flow
from bsfg.journey.receive import BeforePut, LinkRules, PullProgress
from bsfg.node.alerts import AlertBoard
from bsfg.node.parts import NodeContext
from bsfg.ports import Buffer, Frame
from bsfg.wire.service import LinkReport


class NativeReporter:
    """Where the native engine reports, in the registry of its process; ``lease`` is set while it holds the lease."""

    def __init__(self, link: str, parts: NodeContext, alerts: AlertBoard | None = None) -> None:
        self._link, self._parts, self._alerts = link, parts, alerts
        self.lease: str | None = None

    def may_move(self) -> bool:
        """Tell whether the engine holds the lease."""
        return self.lease is not None

    def gate(self) -> Gate:
        """Give the receiver's gate."""
        return self._parts.links.gate(self._link).gate

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate."""
        self._parts.links.on(self._link, RECEIVER, event, reason)

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate; an operator's own hold keeps his reason, and what is wrong shows again at its release."""
        if self.gate().mode != Mode.HELD:
            self._parts.links.hold(self._link, RECEIVER, by="bsfg", reason=reason, stream=stream, log_id=log_id)

    def report(self, stream: str, progress: PullProgress) -> None:
        """Count what a turn achieved and show it in the leases."""
        metrics = self._parts.metrics
        metrics.put(stream, Buffer.FORWARD, inserted=progress.inserted, repeated=progress.repeated)
        metrics.link_backlog.labels(self._link, stream).set(progress.backlog)
        if progress.lag_seconds is not None:
            metrics.lagged(self._link, stream, progress.lag_seconds)
        report = LinkReport(
            link=self._link,
            stream=stream,
            backlog=progress.backlog,
            inserted=progress.inserted,
            repeated=progress.repeated,
            refused=progress.refused_facts,
            lag_seconds=progress.lag_seconds,
            lease=self.lease,
        )
        with suppress(LeaseLost):
            self._parts.links.report(report)

    def failed(self, code: str) -> None:
        """Count a turn that failed."""
        self._parts.links.spoke(self._link)
        self._parts.metrics.link_failures.labels(self._link, code).inc()

    def distrust(self, text: str | None) -> None:
        """Raise or clear the alert."""
        if self._alerts is not None:
            self._alerts.update("peer_certificate", self._link, text)


HOLDER = "native"
LEASE_TTL_MS = 15_000
LEASE_RENEW_SECONDS = 1.0


@dataclass(slots=True)
class StreamPull:
    """The turns of one stream into a forward buffer of this node."""

    stream: str
    peer: PeerLink
    memory: PeerMemory
    rules: LinkRules
    before_put: BeforePut
    parts: NodeContext
    read: ReadRange | None = None
    _flow: Flow = field(init=False)

    def __post_init__(self) -> None:
        self._flow = Flow(self.peer, self.memory, self.rules, clock=self.parts.steady, before_put=self.before_put)

    @property
    def capacity_bytes(self) -> int:
        """How much the forward buffer holds in all."""
        return self.parts.settings.stream(self.stream).forward_policy.capacity_bytes

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Make one turn."""
        forward = await self.parts.forward(self.stream)
        return await self._flow.turn(forward, request, clock_trusted=self.parts.steady.trusted)

    async def make_good(self) -> PullProgress | None:
        """Act upon an operator's release."""
        if self.read is None:
            return None
        forward, clock = await self.parts.forward(self.stream), self.parts.steady

        async def put(frame: Frame, fetched: Fetched) -> PullProgress:
            return await put_again(frame, fetched, self.peer.zone, self.rules, forward, clock, self.before_put)

        return await make_good(self.peer, self.memory, self.read, put)

    def reset(self) -> None:
        """Let go of what is under way."""
        self._flow.reset()


class NativeHandoff:
    """One inbound link, moved by the node itself."""

    def __init__(
        self,
        link: Link,
        parts: NodeContext,
        pulls: list[StreamPull],
        *,
        note: Note,
        alerts: AlertBoard | None = None,
        way: SenderWay | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._link, self._parts, self._note = link.name, parts, note
        self._desk = NativeReporter(link.name, parts, alerts)
        self._handoff = Handoff(link, self._desk, pulls, note=note, way=way, rng=rng)
        self._leasing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to pull."""
        self._leasing = asyncio.create_task(self._keep_lease())
        await self._handoff.start()

    async def stop(self) -> None:
        """End all loops and give the lease back; who is hurried gives it back, too, since nobody else can."""
        leasing = [] if self._leasing is None else [self._leasing]
        try:
            await self._handoff.stop()
        finally:
            for task in leasing:
                task.cancel()
            if self._desk.lease is not None:
                self._parts.links.leases.give_back(self._link, self._desk.lease)
        await asyncio.gather(*leasing, return_exceptions=True)

    async def _keep_lease(self) -> None:
        """Hold the lease of the link, unless a pipeline moves it or wants to: then stand back until it is gone."""
        name, told = self._link, ""
        while True:
            try:
                other = self._parts.links.leases.other(name, HOLDER) or ""
                if other and other != told:
                    self._note("lease_waited_for", link=name, holder=other)
                told = other
                self._stand_back() if other else self._hold_lease()
            except LeaseHeld as held:
                self._note("lease_waited_for", link=name, holder=held.details.get("holder"))
            except LeaseLost as lost:
                self._desk.lease = None
                self._note("lease_lost", link=name, holder=lost.details.get("holder"))
            except Exception as error:
                # A link that nobody holds stands still: a disk that fails at this moment must not be the end of it.
                self._note("link_failed", link=name, exc_info=error)
            await asyncio.sleep(LEASE_RENEW_SECONDS)

    def _stand_back(self) -> None:
        token, self._desk.lease = self._desk.lease, None
        if token is not None:
            self._parts.links.leases.give_back(self._link, token)

    def _hold_lease(self) -> None:
        leases, name, desk = self._parts.links.leases, self._link, self._desk
        if desk.lease is None:
            desk.lease = leases.acquire(name, HOLDER, LEASE_TTL_MS).token
            self._note("lease_taken", link=name)
        else:
            leases.renew(name, desk.lease, LEASE_TTL_MS)


class EveryZone(frozenset[str]):
    """The zones of a peer that may relay for anybody."""

    def __contains__(self, zone: object) -> bool:
        return True


def rules_of(link: Link, parts: NodeContext, stream: str) -> LinkRules:
    """Give what a link may bring into a stream of this zone: what its peer's row in the configuration allows."""
    lane = parts.settings.stream(stream)
    max_age_seconds = lane.expires_after_seconds
    if max_age_seconds is not None and link.max_age_seconds is not None:
        max_age_seconds = float(link.max_age_seconds)
    relayed = parts.guard.matrix.identities[link.expected_server].relay_for
    from_zones = EveryZone() if ANY in relayed else frozenset({link.zone, *relayed})
    signing = parts.settings.signing
    return LinkRules(
        parts.settings.zone, from_zones, max_age_seconds, limits=lane.link_limits, signing=signing, stream=stream
    )
