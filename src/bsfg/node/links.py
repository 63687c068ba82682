"""The registry of the links: the gate of each side, who holds the lease, and what was reported last."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum

from bsfg.config.access import consumer_name
from bsfg.errors import BsfgError, GateHeld, InvalidArgument, LeaseHeld, LeaseLost, UnknownLink
from bsfg.gate import RECEIVER, SENDER, Event, Gate, Mode
from bsfg.ports import Buffer, Clock
from bsfg.wire.service import GateView, KeptLease, LeasesView, LeaseView, LinkReport

TTL_MS_MIN, TTL_MS_MAX = 1_000, 300_000
NO_LINK = ""
"""What somebody waits for who waits for plans alone."""

HOLDERS_MAX = 1_000
"""Of how many holders it is remembered by which plan they go."""

SILENT_MS = 300
"""How long a lease lasts whose holder has hung up; time enough to call again, if it was only the line."""


ABOUT_MS = 3_000
"""How long somebody who asked for a lease, or had it, counts as being about it: longer than he waits to ask again."""


class LeaseWish(IntEnum):
    """Who else of the holder's own waits for the lease."""

    NOBODY = 0
    TURN = 1
    URGENT = 2


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was granted."""

    holder: str
    token: str
    ends_ms: int


@dataclass(slots=True)
class Leases:
    """The leases of all links of one node: one engine at a time moves a link."""

    clock: Clock
    _held: dict[str, Lease] = field(default_factory=dict)
    _waiting: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    _news: dict[str, set[asyncio.Event]] = field(default_factory=dict)
    _plans: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _about: dict[str, dict[str, int]] = field(default_factory=dict)

    def acquire(self, link: str, holder: str, ttl_ms: int, *, urgent: bool = False) -> Lease:
        """Take the lease of a link for a while, or raise `LeaseHeld`."""
        check_ttl(ttl_ms)
        self._saw(link, holder)
        held = self.live(link)
        if held is not None:
            left_ms = held.ends_ms - self.clock.monotonic_ms()
            raise LeaseHeld(
                f"{held.holder} holds the lease of {link} for at most {left_ms} ms more",
                holder=held.holder,
                left_ms=left_ms,
            )
        if not urgent and self._waiting[link, holder, True]:
            raise LeaseHeld(f"{holder} is about to take the lease of {link}", holder=holder, left_ms=SILENT_MS)
        return self._grant(link, holder, secrets.token_hex(16), ttl_ms)

    async def acquire_in_line(
        self, link: str, holder: str, ttl_ms: int, wait_seconds: float, *, urgent: bool = False
    ) -> Lease:
        """Take the lease, waiting for it while it is another part of the same holder that has it."""
        deadline = asyncio.get_running_loop().time() + wait_seconds
        with self._waits(link, holder, urgent):
            while True:
                try:
                    return self.acquire(link, holder, ttl_ms, urgent=urgent)
                except LeaseHeld as held:
                    left_seconds = deadline - asyncio.get_running_loop().time()
                    if left_seconds <= 0 or held.details["holder"] != holder:
                        raise
                    await self._wait([link], min(left_seconds, held.details["left_ms"] / 1000 + 0.005))

    async def acquire_many(
        self, links: Sequence[str], holder: str, ttl_ms: int, wait_seconds: float, plan: int = 0
    ) -> tuple[dict[str, Lease], dict[str, LeaseHeld]]:
        """Take the leases of as many links as can be had, waiting until there is one; say who has the others."""
        deadline = asyncio.get_running_loop().time() + wait_seconds
        with ExitStack() as waiting:
            for link in links:
                waiting.enter_context(self._waits(link, holder, False))
            while True:
                taken, refused = self._take(links, holder, ttl_ms)
                left_seconds = deadline - asyncio.get_running_loop().time()
                if taken or left_seconds <= 0 or self.heard_of(holder) > plan:
                    return taken, refused
                soonest_ms = min((held.details["left_ms"] for held in refused.values()), default=ttl_ms)
                await self._wait(links or [NO_LINK], min(left_seconds, soonest_ms / 1000 + 0.005))

    def _take(self, links: Sequence[str], holder: str, ttl_ms: int) -> tuple[dict[str, Lease], dict[str, LeaseHeld]]:
        taken, refused = {}, {}
        for link in links:
            try:
                taken[link] = self.acquire(link, holder, ttl_ms)
            except LeaseHeld as held:
                refused[link] = held
        return taken, refused

    def hear_of(self, holder: str, plan: int) -> None:
        """Take note of the plan that a part of a holder goes by; its other parts hear of one that is newer."""
        if plan <= self.heard_of(holder):
            return
        self._plans[holder] = plan
        self._plans.move_to_end(holder)
        if len(self._plans) > HOLDERS_MAX:
            self._plans.popitem(last=False)
        for link in list(self._news):
            self.tell(link)

    def heard_of(self, holder: str) -> int:
        """Give the newest plan of a holder that was heard of."""
        return self._plans.get(holder, 0)

    def renew(self, link: str, token: str, ttl_ms: int, holder: str = "unknown") -> Lease:
        """Keep a lease. After a restart of the node the first who asks with a token keeps his, by the name he gives."""
        check_ttl(ttl_ms)
        held = self._held.get(link)
        if held is not None and held.token != token:
            raise LeaseLost(f"the lease of {link} is held by {held.holder}", holder=held.holder)
        return self._grant(link, held.holder if held else holder, token, ttl_ms)

    async def keep(self, link: str, token: str, ttl_ms: int, wait_seconds: float, seen: int) -> Lease:
        """Renew a lease, and wait a while for somebody to want it more urgently than its holder has ``seen``.

        When the holder hangs up meanwhile, which it also does by dying, the lease ends soon.
        """
        lease = self.renew(link, token, ttl_ms)
        with self._while_heard({link: lease}):
            await self._until([link], min(wait_seconds, ttl_ms / 2000), lambda: self.wanted(link, token) > seen)
        return lease

    async def keep_many(
        self, kept: Sequence[KeptLease], holder: str, ttl_ms: int, wait_seconds: float, is_new: Callable[[], bool]
    ) -> tuple[dict[str, Lease], dict[str, LeaseLost]]:
        """Renew many leases, and wait a while for something new about any of them; say which are lost."""
        leases, lost = {}, {}
        for each in kept:
            try:
                leases[each.link] = self.renew(each.link, each.token, ttl_ms, holder)
            except LeaseLost as error:
                lost[each.link] = error
        if not lost:
            seen = {each.link: each.seen for each in kept}
            with self._while_heard(leases):
                await self._until(
                    [*leases],
                    min(wait_seconds, ttl_ms / 2000),
                    lambda: is_new() or any(self.wanted(link, leases[link].token) > seen[link] for link in leases),
                )
        return leases, lost

    async def _until(self, links: Sequence[str], wait_seconds: float, condition: Callable[[], bool]) -> None:
        """Wait until something holds that can change with the news of some links, or for a while."""
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while not condition():
            left_seconds = deadline - asyncio.get_running_loop().time()
            if left_seconds <= 0:
                return
            await self._wait(links, left_seconds)

    @contextmanager
    def _while_heard(self, leases: Mapping[str, Lease]) -> Iterator[None]:
        """Let leases end soon when their holder hangs up in a block that waits."""
        try:
            yield
        except asyncio.CancelledError:
            for link, lease in leases.items():
                if self._held.get(link) == lease:
                    self._grant(link, lease.holder, lease.token, SILENT_MS)
                    self.tell(link)
            raise

    def wanted(self, link: str, token: str) -> LeaseWish:
        """Tell who waits for a lease that is held with a token."""
        held = self._held.get(link)
        if held is None or held.token != token:
            return LeaseWish.NOBODY
        if self._waiting[link, held.holder, True]:
            return LeaseWish.URGENT
        return LeaseWish.TURN if self._waiting[link, held.holder, False] else LeaseWish.NOBODY

    def give_back(self, link: str, token: str) -> None:
        """End a lease."""
        held = self._held.get(link)
        if held is not None and held.token == token:
            self._saw(link, held.holder)
            del self._held[link]
            self.tell(link)

    def check(self, link: str, token: str | None) -> None:
        """Raise `LeaseLost` when somebody else holds the lease of a link."""
        held = self.live(link)
        if held is not None and held.token != token:
            raise LeaseLost(f"the lease of {link} is held by {held.holder}", holder=held.holder)

    def live(self, link: str) -> Lease | None:
        """Give the lease of a link, None when nobody holds it."""
        held = self._held.get(link)
        return held if held is not None and held.ends_ms > self.clock.monotonic_ms() else None

    def holder(self, link: str) -> str | None:
        """Say who holds the lease of a link."""
        held = self.live(link)
        return held.holder if held else None

    def other(self, link: str, than: str) -> str | None:
        """Say who else asks for the lease of a link, has it, or had it a moment ago; None when nobody does."""
        held, since_ms = self.live(link), self.clock.monotonic_ms() - ABOUT_MS
        if held is not None and held.holder != than:
            return held.holder
        about = self._about.get(link, {})
        return next((holder for holder, at_ms in about.items() if holder != than and at_ms > since_ms), None)

    def _saw(self, link: str, holder: str) -> None:
        now_ms = self.clock.monotonic_ms()
        fresh = {name: at_ms for name, at_ms in self._about.get(link, {}).items() if at_ms > now_ms - ABOUT_MS}
        self._about[link] = fresh | {holder: now_ms}

    def _grant(self, link: str, holder: str, token: str, ttl_ms: int) -> Lease:
        lease = self._held[link] = Lease(holder, token, self.clock.monotonic_ms() + ttl_ms)
        return lease

    @contextmanager
    def _waits(self, link: str, holder: str, urgent: bool) -> Iterator[None]:
        self._waiting[link, holder, urgent] += 1
        self.tell(link)
        try:
            yield
        finally:
            self._waiting[link, holder, urgent] -= 1
            if not self._waiting[link, holder, urgent]:
                del self._waiting[link, holder, urgent]
            self.tell(link)

    def tell(self, link: str) -> None:
        """Wake everybody who waits for news of a link."""
        for news in self._news.get(link, ()):
            news.set()

    async def _wait(self, links: Sequence[str], seconds: float) -> None:
        """Wait for news of some links."""
        news = asyncio.Event()
        for link in links:
            self._news.setdefault(link, set()).add(news)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), seconds)
        finally:
            for link in links:
                waiting = self._news[link]
                waiting.discard(news)
                if not waiting:
                    del self._news[link]


def check_ttl(ttl_ms: int) -> None:
    """Raise `InvalidArgument` unless a lease may last so long."""
    if not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
        raise InvalidArgument(f"a lease lasts {TTL_MS_MIN} to {TTL_MS_MAX} ms, not {ttl_ms}")


LAG_MS = 60_000

INSTANCES_MAX, INSTANCE_BYTES = 8, 64
"""What a caller can make a node remember of himself."""

INSTANCE_MS = 120_000
"""How long it is remembered which process fetched: longer than any fetch waits."""


class Instances:
    """Which processes fetch under one name.

    A process that has ended never comes back, however often a node is started again. So one that comes back after
    another has come shows that there are two, and so two nodes with one certificate, each with a folder of its own.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[int, str]]] = {}
        self._last: dict[str, str] = {}
        self._doubled: dict[str, tuple[int, tuple[str, str]]] = {}

    def came(self, consumer: str, instance: str, address: str, now_ms: int) -> None:
        """Note that a process fetches; who does not tell which one it is cannot be told from others."""
        instance = instance[:INSTANCE_BYTES]
        if not instance:
            return
        place = address.rpartition(":")[0] or address
        known = {name: seen for name, seen in self._seen.get(consumer, {}).items() if now_ms - seen[0] <= INSTANCE_MS}
        before = self._last.get(consumer, instance)
        if before != instance and before in known and instance in known:
            self._doubled[consumer] = now_ms, (known[before][1], place)
        if len(known) >= INSTANCES_MAX:
            known.pop(min(known, key=lambda name: known[name][0]))
        self._seen[consumer] = {**known, instance: (now_ms, place)}
        self._last[consumer] = instance

    def doubled(self, consumer: str, now_ms: int) -> tuple[str, str] | None:
        """Give from where two processes fetch under a name, None when only one does."""
        since_ms, places = self._doubled.get(consumer, (-INSTANCE_MS, ("", "")))
        return places if consumer in self._doubled and now_ms - since_ms <= INSTANCE_MS else None


OnMove = Callable[[GateView, Gate], None]
"""Is told every change of a gate: the gate as it is now, and as it was."""


@dataclass(slots=True)
class LinkRegistry:
    """Gates, leases and reports of all links of one node."""

    clock: Clock
    on_move: OnMove = lambda view, before: None
    on_add: Callable[[GateView], None] = lambda view: None
    on_remove: Callable[[str, str], None] = lambda link, side: None
    _gates: dict[tuple[str, str], Gate] = field(default_factory=dict)
    _fetched: dict[str, tuple[int, int]] = field(default_factory=dict)
    _came_ms: dict[str, int] = field(default_factory=dict)
    downloaded_ms: dict[str, int] = field(default_factory=dict)
    spoke_ms: dict[str, int] = field(default_factory=dict)
    _troubles: dict[tuple[str, str], str] = field(default_factory=dict)
    _waiting: Counter[str] = field(default_factory=Counter)
    leases: Leases = field(init=False)
    _reports: dict[tuple[str, str], tuple[int, LinkReport]] = field(default_factory=dict)
    reporters: dict[tuple[str, str], str | None] = field(default_factory=dict)
    _lags: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    instances: Instances = field(default_factory=Instances)

    def __post_init__(self) -> None:
        self.leases = Leases(self.clock)

    def add(self, link: str, side: str = RECEIVER, gate: Gate | None = None) -> None:
        """Put up a link's gate on one side; one that is there already stays as it is."""
        if (link, side) not in self._gates:
            gate = self._gates[link, side] = gate or Gate(since_unix_ms=self.clock.now_unix_ms())
            self.on_add(GateView(link, side, gate))

    def remove(self, link: str, side: str) -> None:
        """Take down a link's gate on one side, and forget what was said of it."""
        self._gates.pop((link, side), None)
        self._troubles.pop((link, side), None)
        if side == RECEIVER:
            for known in (self._reports, self.reporters, self._lags):
                for of in [each for each in known if each[0] == link]:
                    del known[of]
            self.leases.tell(link)
        self.on_remove(link, side)

    def gates(self) -> list[GateView]:
        """List all gates, holds that have ended let go first."""
        return [self.gate(link, side) for link, side in sorted(self._gates)]

    def gate(self, link: str, side: str = RECEIVER) -> GateView:
        """Give one gate as it is now, or raise `UnknownLink`."""
        found = self._gates.get((link, side))
        if found is None:
            raise UnknownLink(f"there is no link {link[:80]!r} on the {side[:80]}'s side", link=link[:80])
        return self._moved(link, side, found.tick(self.clock.now_unix_ms()))

    def on(self, link: str, side: str, event: Event, reason: str = "") -> GateView:
        """Tell a gate what happened."""
        gate = self.gate(link, side).gate
        return self._moved(link, side, gate.on(event, self.clock.now_unix_ms(), reason))

    def hold(
        self,
        link: str,
        side: str,
        *,
        by: str,
        reason: str,
        until_unix_ms: int | None = None,
        stream: str = "",
        log_id: str = "",
    ) -> GateView:
        """Close a gate until it is released, or until a time; for a finding, with its stream and history."""
        gate, now_unix_ms = self.gate(link, side).gate, self.clock.now_unix_ms()
        held = gate.hold(now_unix_ms, by=by, reason=reason, until_unix_ms=until_unix_ms, stream=stream, log_id=log_id)
        return self._moved(link, side, held)

    def release(self, link: str, side: str, *, by: str, reason: str) -> GateView:
        """Open a held gate."""
        gate = self.gate(link, side).gate
        return self._moved(link, side, gate.release(self.clock.now_unix_ms(), by=by, reason=reason))

    def _moved(self, link: str, side: str, gate: Gate) -> GateView:
        before, view = self._gates[link, side], GateView(link, side, gate)
        if gate != before:
            self._gates[link, side] = gate
            if gate.mode != before.mode and side == RECEIVER:
                self.leases.tell(link)
            self.on_move(view, before)
        return view

    def check_open(self, link: str) -> None:
        """Raise `GateHeld` while an operator holds the receiver's gate of a link."""
        gate = self.gate(link).gate
        if not gate.allows_fetch:
            raise GateHeld(f"the gate of {link} is held by {gate.held_by}: {gate.reason}", link=link)

    # The sender's side: gates are named after the zone that pulls.

    def check_serving(self, zone: str) -> None:
        """Raise `GateHeld` while an operator holds the gate to a zone that pulls from here."""
        if (zone, SENDER) in self._gates:
            gate = self.gate(zone, SENDER).gate
            if not gate.allows_fetch:
                raise GateHeld(f"the gate to {zone} is held by {gate.held_by}: {gate.reason}", link=zone)

    def modes(self, stream: str, buffer: Buffer) -> dict[str, Mode]:
        """Give the mode of the gate to each zone that pulls, by the name of its consumer of a buffer."""
        views = (view for view in self.gates() if view.side == SENDER)
        return {consumer_name(view.link, stream, buffer): view.gate.mode for view in views}

    def fetched(self, consumer: str, backlog: int) -> None:
        """Note that a consumer has fetched, and how much it had left."""
        self._fetched[consumer] = (self.clock.now_unix_ms(), backlog)
        self._came_ms[consumer] = self.clock.monotonic_ms()

    @contextmanager
    def fetching(self, consumer: str) -> Iterator[None]:
        """Count a consumer as being in touch for as long as it is being served, which may be a long wait."""
        self._waiting[consumer] += 1
        try:
            yield
        finally:
            self._waiting[consumer] -= 1
            self.fetched(consumer, self._fetched.get(consumer, (0, 0))[1])

    def last_fetch(self, consumer: str) -> tuple[int, int] | None:
        """Give when a consumer last fetched and how much it had left then, None when it did not since the start."""
        known = self._fetched.get(consumer)
        return (self.clock.now_unix_ms(), known[1] if known else 0) if self._waiting[consumer] else known

    def came_ms(self, consumer: str) -> int | None:
        """Give when a consumer last fetched, by the clock that nobody sets; None when it did not since the start."""
        return self.clock.monotonic_ms() if self._waiting[consumer] else self._came_ms.get(consumer)

    def downloads(self, zone: str) -> None:
        """Note that a zone takes a piece of an artifact; it fetches no facts before it has the whole of it."""
        self.downloaded_ms[zone] = self.clock.monotonic_ms()

    def spoke(self, link: str) -> None:
        """Note that the engine of a link has done something, or tried to: no engine can look healthy by being dead."""
        self.spoke_ms[link] = self.clock.monotonic_ms()

    def say(self, link: str, side: str, trouble: str | None) -> None:
        """Note what is wrong with a side of a link whatever its gate says, None when nothing is."""
        if trouble is None:
            self._troubles.pop((link, side), None)
        else:
            self._troubles[link, side] = trouble

    def trouble(self, link: str, side: str) -> str | None:
        """Give what is wrong with a side of a link."""
        return self._troubles.get((link, side))

    # Leases of many links at once, and what is told of one.

    async def acquire_many(
        self, links: Sequence[str], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Take the leases of many links, as they become free; see `Leases.acquire_many`."""
        check_ttl(ttl_ms)
        known, unknown = self._known(links)
        self.leases.hear_of(holder, plan)
        wait_seconds = 0.0 if unknown and not known else wait_seconds
        taken, held = await self.leases.acquire_many(known, holder, ttl_ms, wait_seconds, plan)
        views, gone = self._leased(taken, ttl_ms)
        return LeasesView(views, {**unknown, **held, **gone}, self.leases.heard_of(holder))

    async def keep_many(
        self, kept: Sequence[KeptLease], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Keep many leases, and wait for something new about them or their gates; see `Leases.keep_many`."""
        check_ttl(ttl_ms)
        known, unknown = self._known([each.link for each in kept])
        self.leases.hear_of(holder, plan)
        kept = [each for each in kept if each.link in known]

        def is_new() -> bool:
            if self.leases.heard_of(holder) > plan or unknown:
                return True
            gates = ((each.mode, self._gates.get((each.link, RECEIVER))) for each in kept)
            return any(mode and (gate is None or str(gate.mode) != mode) for mode, gate in gates)

        leases, lost = await self.leases.keep_many(kept, holder, ttl_ms, wait_seconds, is_new)
        views, gone = self._leased(leases, ttl_ms)
        return LeasesView(views, {**unknown, **lost, **gone}, self.leases.heard_of(holder))

    def _leased(self, leases: Mapping[str, Lease], ttl_ms: int) -> tuple[dict[str, LeaseView], dict[str, BsfgError]]:
        """Describe leases to whoever has them; a link may have been taken out of the configuration meanwhile."""
        known, gone = self._known(list(leases))
        return {link: self.leased(link, leases[link], ttl_ms) for link in known}, gone

    def _known(self, links: Sequence[str]) -> tuple[list[str], dict[str, BsfgError]]:
        """Part the links that there are from those that there are not."""
        known, unknown = [], dict[str, BsfgError]()
        for link in dict.fromkeys(links):
            try:
                self.gate(link)
            except UnknownLink as error:
                unknown[link] = error
            else:
                known.append(link)
        return known, unknown

    def leased(self, link: str, lease: Lease, ttl_ms: int) -> LeaseView:
        """Describe a lease to whoever has it: the mode of its gate, and who wants it."""
        mode, wanted = str(self.gate(link).gate.mode), self.leases.wanted(link, lease.token)
        return LeaseView(link, lease.holder, lease.token, ttl_ms, mode, wanted)

    # Reports.

    def report(self, report: LinkReport) -> GateView:
        """Take what a pipeline tells of a link, and give the gate that follows from it."""
        self.leases.check(report.link, report.lease)
        view = self.gate(report.link)
        # A report about nothing only asks after the gate: whoever sends it lives, but need not move anything.
        if report.stream or report.event or report.hold_code or report.failure_code:
            self.spoke(report.link)
        if report.stream:
            self._reports[report.link, report.stream] = (self.clock.now_unix_ms(), report)
            self.reporters[report.link, report.stream] = self.leases.holder(report.link)
            if report.lag_seconds is not None:
                self._lags[report.link, report.stream] = self.clock.monotonic_ms(), report.lag_seconds
        if report.hold_code:
            reason = f"{report.hold_code}: {report.hold_detail}".rstrip(": ")
            stream, log_id = report.hold_stream, report.hold_log_id
            return self.hold(report.link, RECEIVER, by="pipeline", reason=reason, stream=stream, log_id=log_id)
        return self.on(report.link, RECEIVER, report.event, report.reason) if report.event else view

    def lag_seconds(self, link: str, stream: str) -> float | None:
        """Give the lag of what last came of a stream, None when nothing came in the last minute.

        A report that there is nothing new says nothing of the lag, so the one before it stands for a while.
        """
        at_ms, seconds = self._lags.get((link, stream), (0, None))
        return seconds if self.clock.monotonic_ms() - at_ms <= LAG_MS else None

    def reports(self) -> Iterable[tuple[int, LinkReport]]:
        """Give the last report of every link and stream, with its time."""
        return [self._reports[name] for name in sorted(self._reports)]
