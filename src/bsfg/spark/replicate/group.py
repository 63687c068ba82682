"""What a task asks and tells its zone's node about all its links together: leases and reports.

A hundred links that have nothing to move would otherwise keep two processes busy with asking and telling so, link by
link. Here it is one call that waits for leases, one that keeps those that are held, and one report of whatever
happened in the last quarter of a second.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bsfg.errors import BsfgError, LeaseHeld, LeaseLost, UnknownLink
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.receive import PullProgress
from bsfg.spark.replicate.plan import LEASE_TTL_MS

if TYPE_CHECKING:
    from bsfg.spark.replicate.shift import BundleShift
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.service import LeasesView, LeaseView, LinkReport

TELL_EVERY_SECONDS = 0.25
CAME_SECONDS = 1.0
"""How often it is told that a sender gives something although no turn ends."""

ROUND_SECONDS = 2.0
"""How long one call waits at most, and after which time at most all links are asked after in one call again."""

AWAY_SECONDS = 0.5
UNKNOWN_SECONDS = 2.0
"""How long a task waits before it asks again after a link that the node does not know; it may be about to."""

RIPE_SECONDS = 0.05
"""How soon at the soonest it is looked which links are to be passed on next."""

LINKS_AT_ONCE = 500
"""How many links one call is about; a node takes more."""

TURN, URGENT = 1, 2
"""What `LeaseView.wanted` means."""


class Rounds:
    """Asks again and again after many links, in as few calls as can be.

    Links that come while a call waits get one of their own at once; calls end together, so that all are one again in
    the next round. ``ask`` is given some links and how long to wait, and names those that are to be asked after again.
    """

    def __init__(self, ask: Callable[[Sequence[str], float], Awaitable[Iterable[str]]]) -> None:
        self._ask = ask
        self._pool: dict[str, None] = {}
        self._came = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()

    def add(self, *links: str) -> None:
        """Ask after some links from now on."""
        self._pool.update(dict.fromkeys(links))
        if self._pool:
            self._came.set()

    async def run(self) -> None:
        """Ask until it is ended; what is under way ends with it."""
        try:
            while True:
                await self._came.wait()
                await asyncio.sleep(0)  # many links often come at the same moment
                self._came.clear()
                links, self._pool = [*self._pool], {}
                for first in range(0, len(links), LINKS_AT_ONCE):
                    task = asyncio.create_task(self._round(links[first : first + LINKS_AT_ONCE]))
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)
        finally:
            for task in self._asking:
                task.cancel()
            await asyncio.gather(*self._asking, return_exceptions=True)

    async def _round(self, links: Sequence[str]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            again = await self._ask(links, ROUND_SECONDS - now % ROUND_SECONDS)
        except Exception as error:
            if not isinstance(error, BsfgError):
                # Links that nobody asks after would stand still, and nobody would know why.
                traceback.print_exception(error)
            await asyncio.sleep(AWAY_SECONDS)
            again = links
        self.add(*again)


@dataclass(slots=True)
class _Held:
    """A lease that is kept, with whom it concerns, and the future that ends the keeping."""

    lease: LeaseView
    desk: RemoteReporter
    until: asyncio.Future[None]


class LeaseGroup:
    """The leases of one task: those it waits for, and those it keeps."""

    def __init__(self, admin: AdminClient, holder: str, plan: int, terms: BundleShift) -> None:
        self._admin, self._holder, self._plan, self._terms = admin, holder, plan, terms
        self._wanted: dict[str, asyncio.Future[LeaseView | None]] = {}
        self._held: dict[str, _Held] = {}
        self._acquiring, self._renewing = Rounds(self._acquire), Rounds(self._renew)

    async def run(self) -> None:
        """Ask until it is ended."""
        await asyncio.gather(self._acquiring.run(), self._renewing.run())

    async def leased(self, link: str) -> LeaseView | None:
        """Wait for the lease of a link, however long somebody else has it; None when the shift is over."""
        future: asyncio.Future[LeaseView | None] = asyncio.get_running_loop().create_future()
        self._wanted[link] = future
        self._acquiring.add(link)
        try:
            return await future
        finally:
            del self._wanted[link]

    async def keep(self, lease: LeaseView, desk: RemoteReporter) -> None:
        """Keep a lease until it is another's, or lost."""
        held = self._held[lease.link] = _Held(lease, desk, asyncio.get_running_loop().create_future())
        self._renewing.add(lease.link)
        try:
            await held.until
        finally:
            del self._held[lease.link]

    async def wait_for_plans(self) -> None:
        """Wait until the shift of a task without links is over."""
        while not self._terms.is_over:
            try:
                found = await self._take([], ROUND_SECONDS)
            except BsfgError:
                await asyncio.sleep(AWAY_SECONDS)
            else:
                self._terms.heard_of(found.plan)

    async def _take(self, links: Sequence[str], wait_seconds: float) -> LeasesView:
        """Take the leases of as many links as can be had, waiting until there is one."""
        return await self._admin.acquire_leases(
            links, self._holder, LEASE_TTL_MS, wait_seconds=wait_seconds, plan=self._plan
        )

    async def _acquire(self, links: Sequence[str], wait_seconds: float) -> Iterable[str]:
        links = [link for link in links if self._is_wanted(link)]
        if not links:
            return ()
        found = await self._take(links, wait_seconds)
        self._terms.heard_of(found.plan)
        for link, lease in found.leases.items():
            future = self._wanted.get(link)
            if future is None or future.done():
                # Who waited for it is gone; kept by nobody, it would stand still until it ran out.
                with suppress(BsfgError):
                    await self._admin.release_lease(lease.link, lease.token)
            else:
                self._terms.took()
                future.set_result(lease)
        waiting = [link for link in links if self._is_wanted(link)]
        strange = [link for link in waiting if not isinstance(found.refused.get(link), LeaseHeld | None)]
        if strange:
            asyncio.get_running_loop().call_later(UNKNOWN_SECONDS, self._acquiring.add, *strange)
        return [link for link in waiting if link not in strange]

    def _is_wanted(self, link: str) -> bool:
        """Tell whether a lease is waited for; when the shift is over it is not, and whoever waits is told so."""
        future = self._wanted.get(link)
        if future is not None and not future.done() and self._terms.is_over:
            future.set_result(None)
        return future is not None and not future.done()

    async def _renew(self, links: Sequence[str], wait_seconds: float) -> Iterable[str]:
        from bsfg.wire.service import KeptLease

        links = [link for link in links if self._is_kept(link)]
        if not links:
            return ()
        ripe_in = {link: self._terms.ripe_in_seconds(link) for link in links}
        soonest = min((seconds for seconds in ripe_in.values() if seconds > 0), default=wait_seconds)
        kept = [
            KeptLease(link, self._held[link].lease.token, 0 if ripe_in[link] <= 0 else TURN, self._held[link].desk.mode)
            for link in links
        ]
        wait_seconds = min(wait_seconds, max(RIPE_SECONDS, soonest))
        found = await self._admin.renew_leases(
            kept, self._holder, LEASE_TTL_MS, wait_seconds=wait_seconds, plan=self._plan
        )
        self._terms.heard_of(found.plan)
        for link in links:
            self._judge(link, found)
        return [link for link in links if self._is_kept(link)]

    def _judge(self, link: str, found: LeasesView) -> None:
        """Decide whether a lease is kept on, by what the node says of it."""
        held, lease = self._held.get(link), found.leases.get(link)
        if held is None or held.until.done():
            return
        if lease is None:
            held.desk.moves = held.desk.moves and not isinstance(found.refused.get(link), LeaseLost | UnknownLink)
            return
        held.desk.learn(lease.mode)
        if lease.wanted == TURN and self._terms.ripe_in_seconds(link) <= 0:
            self._terms.pass_on()
            held.until.set_result(None)
        elif lease.wanted == URGENT or self._terms.is_left(link):
            held.until.set_result(None)

    def _is_kept(self, link: str) -> bool:
        """Tell whether a lease is still to be kept: not that of a link which may not be moved any more."""
        held = self._held.get(link)
        if held is not None and not held.until.done() and (not held.desk.may_move() or self._terms.gone()):
            held.until.set_result(None)
        return held is not None and not held.until.done()


@dataclass(frozen=True, slots=True)
class TurnTally:
    """What the turns of one stream achieved."""

    inserted: int = 0
    repeated: int = 0
    refused: int = 0
    backlog: int = 0
    lag_seconds: float | None = None

    def with_turn(self, progress: PullProgress) -> TurnTally:
        """Add a turn."""
        turn = (progress.inserted, progress.repeated, progress.refused_facts, progress.backlog, progress.lag_seconds)
        return self.added(TurnTally(*turn))

    def added(self, later: TurnTally) -> TurnTally:
        """Add what was achieved later."""
        return TurnTally(
            self.inserted + later.inserted,
            self.repeated + later.repeated,
            self.refused + later.refused,
            later.backlog,
            self.lag_seconds if later.lag_seconds is None else later.lag_seconds,
        )


class ReportLine:
    """Tells the node what the desks of a task have gathered: every so often, and at once what is urgent."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._desks: dict[RemoteReporter, None] = {}
        self._telling = asyncio.Lock()
        self._something, self._urgent = asyncio.Event(), asyncio.Event()

    def add(self, desk: RemoteReporter) -> None:
        """Tell what a desk gathers, from now on."""
        self._desks[desk] = None

    async def remove(self, desk: RemoteReporter) -> None:
        """Tell the last of a desk; raises what keeps it from being told."""
        self._desks.pop(desk, None)
        await self.flush(desk)

    def wake(self, *, urgent: bool) -> None:
        """Take note that there is something to tell."""
        self._something.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Tell what there is, until the task ends."""
        while True:
            await self._something.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), TELL_EVERY_SECONDS)
            self._something.clear()
            self._urgent.clear()
            if await self._tell(list(self._desks)):
                # The lease is another's, or the node is away; the next turn finds that out by itself. What was gathered
                # waits, urgent or not: told again at once, it would be refused again at once.
                await asyncio.sleep(TELL_EVERY_SECONDS)
                self._something.set()

    async def flush(self, desk: RemoteReporter) -> None:
        """Tell everything of a desk now."""
        for error in await self._tell([desk]):
            raise error

    async def _tell(self, desks: Sequence[RemoteReporter]) -> list[BsfgError]:
        """Tell what some desks have gathered; give why some of it was not taken."""
        async with self._telling:
            told = [(desk, each) for desk in desks for each in desk.take()]
            errors = []
            for first in range(0, len(told), LINKS_AT_ONCE):
                part = told[first : first + LINKS_AT_ONCE]
                answers: Sequence[Gate | BsfgError]
                try:
                    answers = await self._admin.report_links([each.report for _, each in part])
                except BsfgError as error:
                    answers = len(part) * [error]
                errors += _heard(part, answers)
            return errors


def _heard(told: Sequence[tuple[RemoteReporter, Untold]], answers: Sequence[Gate | BsfgError]) -> list[BsfgError]:
    """Give the desks what became of their reports; give why some of them were not taken."""
    errors = []
    for (desk, each), answer in zip(told, answers, strict=True):
        if isinstance(answer, Gate):
            desk.heard(each, answer)
    # From the last to the first, so that what goes back before what came meanwhile is in its old order.
    for (desk, each), answer in reversed(list(zip(told, answers, strict=True))):
        if isinstance(answer, BsfgError):
            desk.untold(each, answer)
            errors.append(answer)
    return errors


@dataclass(frozen=True, slots=True)
class Untold:
    """A report on its way: what happened, or what the turns of a stream achieved."""

    report: LinkReport
    stream: str | None = None
    tally: TurnTally | None = None


class RemoteReporter:
    """Gathers what is to be told of one link, gate events and faults to be told at once."""

    def __init__(self, line: ReportLine, link: str, lease: str, mode: str) -> None:
        self._line, self._link, self._lease = line, link, lease
        self._gate = Gate(Mode(mode))
        self._urgent: list[Untold] = []
        self._on_their_way = 0
        self._news: dict[str, TurnTally] = {}
        self.totals: dict[str, TurnTally] = {}
        self._came_at = float("-inf")
        self.moves = True
        line.add(self)

    def may_move(self) -> bool:
        """Tell whether the task still has the lease."""
        return self.moves

    def gate(self) -> Gate:
        """Give the gate as it was last heard of, with what was told since."""
        return self._gate

    @property
    def mode(self) -> str:
        """The mode of the gate as it was last heard of; empty while the node is to hear of another one first."""
        return "" if self._has_news_of_the_gate else str(self._gate.mode)

    def learn(self, mode: str) -> None:
        """Take the mode that the node has told without being asked."""
        if self._gate.mode != mode:
            self._heard(Gate(Mode(mode)))

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate, if it changes anything."""
        moved = self._gate.on(event, 0, reason)
        if moved.mode != self._gate.mode:
            self._gate = moved
            self._add(event=event, reason=reason)

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate."""
        if self._gate.mode != Mode.HELD:
            code, _, detail = reason.partition(": ")
            self._gate = Gate(Mode.HELD, reason=reason)
            self._add(hold_code=code, hold_detail=detail, hold_stream=stream, hold_log_id=log_id)

    def report(self, stream: str, progress: PullProgress) -> None:
        """Add what a turn achieved."""
        self._news[stream] = self._news.get(stream, TurnTally()).with_turn(progress)
        self.totals[stream] = self.totals.get(stream, TurnTally()).with_turn(progress)
        self._line.wake(urgent=False)

    def failed(self, code: str) -> None:
        """Count a turn that failed."""
        self._add(failure_code=code)

    def came(self) -> None:
        """Tell now and then that the sender gives something, though no turn ends: an artifact may take long."""
        now = time.monotonic()
        if now - self._came_at > CAME_SECONDS:
            self._came_at = now
            self._add(event=Event.PEER_FOUND)

    def distrust(self, text: str | None) -> None:
        """The reason of the gate says it already."""

    def take(self) -> list[Untold]:
        """Give what is to be told, first what is urgent; each is answered by `heard` or `untold`."""
        urgent, self._urgent = self._urgent, []
        news, self._news = self._news, {}
        self._on_their_way += len(urgent)
        return [*urgent, *(Untold(self._report(stream, tally), stream, tally) for stream, tally in news.items())]

    def heard(self, told: Untold, gate: Gate) -> None:
        """Take the gate that follows from a report."""
        self._on_their_way -= told.tally is None
        self._heard(gate)

    def untold(self, told: Untold, error: BsfgError) -> None:
        """Keep a report that was not taken, before all that came after it."""
        self.moves = self.moves and not isinstance(error, LeaseLost)
        if told.tally is None or told.stream is None:
            self._on_their_way -= 1
            self._urgent.insert(0, told)
        else:
            later = self._news.get(told.stream)
            self._news[told.stream] = told.tally if later is None else told.tally.added(later)

    @property
    def _has_news_of_the_gate(self) -> bool:
        return bool(self._urgent or self._on_their_way)

    def _heard(self, gate: Gate) -> None:
        # What the node has yet to hear will change the gate; until then what was told here counts, unless it is held.
        if not self._has_news_of_the_gate or gate.mode == Mode.HELD:
            self._gate = gate

    def _report(self, stream: str, tally: TurnTally) -> LinkReport:
        from bsfg.wire.service import LinkReport

        return LinkReport(
            link=self._link,
            stream=stream,
            backlog=tally.backlog,
            inserted=tally.inserted,
            repeated=tally.repeated,
            refused=tally.refused,
            lag_seconds=tally.lag_seconds,
            lease=self._lease,
        )

    def _add(self, **fields: object) -> None:
        report = self._report("", TurnTally())
        self._urgent.append(Untold(replace(report, **fields)))  # type: ignore[arg-type]
        self._line.wake(urgent=True)
