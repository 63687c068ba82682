"""One shift of a live task: it moves all links of its bundle side by side, and then gives way to the other task.

Each link has a loop of its own: wait for the lease, move facts, report to the node, pass the lease on. What happens to
one link touches no other. As soon as one lease was passed on to the other task of the bundle the shift is over: what
this task still waits for it leaves to the other one, and the links that it still moves follow one after the other, so
that soon one task has the whole bundle and the other one is free for the next shift.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bsfg.clock import SystemClock
from bsfg.errors import BsfgError
from bsfg.journey.handoff import Handoff
from bsfg.spark.calls import calls
from bsfg.spark.daemon import DAEMON_PID
from bsfg.spark.replicate.carrying import CONFIRM_EVERY_SECONDS, TaskPull
from bsfg.spark.replicate.group import (
    AWAY_SECONDS,
    LINKS_AT_ONCE,
    LeaseGroup,
    RemoteReporter,
    ReportLine,
    TurnTally,
)
from bsfg.spark.replicate.plan import BundlePlan, LinkTaskPlan
from bsfg.throttle import Throttle
from bsfg.together import Together

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.probe import ConnectionDiagnosis
    from bsfg.wire.service import LeaseView


HOLD_SECONDS_MIN, SHIFT_SECONDS_MAX = 60.0, 180.0
"""How long a task moves its links before it lets the other one, and how long at most it lives; facts wait at each
change. All tasks of a micro-batch begin at the same time, so they end together, whether or not they had anything to
move: a micro-batch ends with the last of them."""

PASS_PACE_SECONDS = 0.02
"""How much later than the one before each link is passed on: the other task has to call its sender first."""

PREPARE_PACE_SECONDS, PREPARE_SECONDS_MAX = 0.2, 30.0
"""How long after each other a task calls the senders of links that another one still moves, and how long all of that
takes at most: a hundred handshakes in a row would hold up the facts of all links meanwhile."""

PASS_SECONDS = 3.0
"""How long a shift that is over waits for somebody to pass a link on to; the other task may just be starting."""

CONFIRM_SECONDS_MOST = 1.0
SETTLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ShiftReceipt:
    """What a task has moved of one stream in one shift."""

    link: str
    stream: str
    inserted: int
    repeated: int
    refused: int
    backlog: int
    seconds: float


def orphaned() -> Callable[[], bool]:
    """Give what tells whether the process that started this one is gone: then nobody wants this task's work.

    It may have gone before this is asked for, so its number comes from itself where it is ours.
    """
    parent = int(os.environ.get(DAEMON_PID) or os.getppid())
    return lambda: os.getppid() != parent


def take_shift(bundle: BundlePlan, gone: Callable[[], bool] | None = None) -> list[ShiftReceipt]:
    """Move the links of a bundle for a while; give the receipts."""
    return calls().run(_take_shift(bundle, gone or orphaned()))


async def _take_shift(bundle: BundlePlan, gone: Callable[[], bool]) -> list[ShiftReceipt]:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.client import BoundaryClient

    own = BoundaryClient(calls().connection(bundle.own))
    mover = LinkMover(own, len(bundle.links))
    shift = BundleShift(bundle, AdminClient(own.connection), gone, mover.move, mover.prepare)
    since = time.monotonic()
    try:
        await shift.run()
    finally:
        mover.close()
    seconds = time.monotonic() - since
    return [
        ShiftReceipt(link, stream, done.inserted, done.repeated, done.refused, done.backlog, seconds)
        for (link, stream), done in shift.totals.items()
    ]


class BundleShift:
    """The shift of one task: its links, each in a loop of its own, and when they are passed on."""

    def __init__(
        self,
        bundle: BundlePlan,
        admin: AdminClient,
        gone: Callable[[], bool],
        move: Move,
        prepare: Prepare | None = None,
    ) -> None:
        self.admin, self.gone = admin, gone
        self._bundle, self._move, self._prepare = bundle, move, prepare
        self.leases, self.reports = LeaseGroup(admin, bundle.holder, bundle.number, self), ReportLine(admin)
        self.positions = Together(admin.remember_peers, LINKS_AT_ONCE)
        self._began = time.monotonic()
        self._first_at = self._passed_at = float("inf")
        self._places = {plan.name: place for place, plan in enumerate(bundle.links)}
        self.totals: dict[tuple[str, str], TurnTally] = {}

    async def run(self) -> None:
        """Move the links until the shift is over."""
        together = [asyncio.create_task(self.leases.run()), asyncio.create_task(self.reports.run())]
        try:
            if not self._bundle.links:
                await self.leases.wait_for_plans()
            await asyncio.gather(*(self._carry(plan) for plan in self._bundle.links))
        finally:
            for task in together:
                task.cancel()
            await asyncio.gather(*together, return_exceptions=True)

    @property
    def is_over(self) -> bool:
        """Whether no lease is waited for any more."""
        return self._over_at <= time.monotonic() or self.gone()

    @property
    def _over_at(self) -> float:
        return min(self._passed_at, self._began + SHIFT_SECONDS_MAX)

    def ripe_in_seconds(self, link: str) -> float:
        """Tell how long a link is kept although the other task waits for it; not positive when it is kept no more."""
        ripe_at = min(self._first_at + HOLD_SECONDS_MIN, self._over_at)
        return ripe_at + self._places[link] * PASS_PACE_SECONDS - time.monotonic()

    def is_left(self, link: str) -> bool:
        """Tell whether a link is given up although nobody waits for it."""
        return self.is_over and self.ripe_in_seconds(link) <= -PASS_SECONDS

    def took(self) -> None:
        """Take note of a lease that was given."""
        self._first_at = min(self._first_at, time.monotonic())

    def pass_on(self) -> None:
        """End the shift, because a link was passed on to the other task."""
        self._passed_at = min(self._passed_at, time.monotonic())

    def heard_of(self, plan: int) -> None:
        """End the shift when there is a newer plan: the next one goes by that."""
        if plan > self._bundle.number:
            self.pass_on()

    async def _carry(self, plan: LinkTaskPlan) -> None:
        """Move one link whenever its lease can be had, until the shift is over; nothing of it is raised."""
        preparing = asyncio.create_task(self._prepared(plan))
        while not self.is_over:
            try:
                lease = await self.leases.leased(plan.name)
                if lease is not None:
                    desk = await self._move(self, plan, lease)
                    self._count(plan.name, desk.totals)
            except Exception as error:
                # What nobody expected of one link is no reason to stop the others.
                _note("link_failed", exc_info=error)
                await asyncio.sleep(AWAY_SECONDS)
        preparing.cancel()
        await asyncio.wait({preparing})

    async def _prepared(self, plan: LinkTaskPlan) -> None:
        """Find the way to a sender while another has its link: no fact is to wait for a handshake later."""
        if self._prepare is not None:
            pace_seconds = min(PREPARE_PACE_SECONDS, PREPARE_SECONDS_MAX / len(self._places))
            await asyncio.sleep(self._places[plan.name] * pace_seconds)
            with suppress(BsfgError):
                await self._prepare(plan)

    def _count(self, link: str, totals: dict[str, TurnTally]) -> None:
        for stream, tally in totals.items():
            self.totals[link, stream] = self.totals.get((link, stream), TurnTally()).added(tally)


Move = Callable[[BundleShift, LinkTaskPlan, "LeaseView"], Awaitable[RemoteReporter]]
"""Moves one link for as long as its lease is kept."""

Prepare = Callable[[LinkTaskPlan], Awaitable[None]]
"""Does for one link what can be done before there is a lease."""


class LinkMover:
    """Moves links between their senders and this zone's node, all over one connection to that."""

    def __init__(self, own: BoundaryClient, links: int) -> None:
        self._own = own
        self._ways: dict[str, ConnectionDiagnosis] = {}
        self._confirm_every_seconds = confirm_every_seconds(links)

    async def prepare(self, plan: LinkTaskPlan) -> None:
        """Look at the sender's certificate, and connect."""
        await self._way(plan).ready()
        await calls().connection(plan.peer).check_health()

    async def move(self, shift: BundleShift, plan: LinkTaskPlan, lease: LeaseView) -> RemoteReporter:
        """Move one link for as long as its lease is kept."""
        from bsfg.wire.client import BoundaryClient

        admin, way, pace = shift.admin, self._way(plan), self._confirm_every_seconds
        urgent = [each.consumer for each in plan.streams if each.stream in plan.link.priority]
        bandwidth = plan.link.bandwidth
        throttle = Throttle(bandwidth, SystemClock().now_unix_ms, urgent) if bandwidth else None
        peer = BoundaryClient(calls().connection(plan.peer), throttle=throttle, packs=plan.link.compression)
        desk = RemoteReporter(shift.reports, plan.name, lease.token, lease.mode)
        keep = shift.positions.ask
        pulls = [
            TaskPull(plan, each, peer, self._own, admin, lease.token, desk.came, pace, keep) for each in plan.streams
        ]
        handoff = Handoff(plan.link, desk, pulls, note=_note, way=way)
        await handoff.start()
        try:
            await shift.leases.keep(lease, desk)
            await _settle(pulls)
        finally:
            await handoff.stop()
            peer.hang_up()
            with suppress(BsfgError):
                await asyncio.gather(*(pull.close() for pull in pulls))
            with suppress(BsfgError):
                await shift.reports.remove(desk)
            with suppress(BsfgError):
                await admin.release_lease(plan.name, lease.token)
        return desk

    def _way(self, plan: LinkTaskPlan) -> ConnectionDiagnosis:
        """Give the way to the sender of a link, the same for all of a shift."""
        from bsfg.wire.probe import ConnectionDiagnosis

        way = self._ways.get(plan.name)
        if way is None:
            connection, watched = calls().connection(plan.peer), plan.peer.watched
            connection.request_timeout_seconds = plan.link.request_timeout_seconds
            watched = watched if hasattr(watched, "files") else None
            way = self._ways[plan.name] = ConnectionDiagnosis(
                plan.link.expected_server,
                watched,
                connection,
                by_alternative_name=plan.by_alternative_name,
                vouch=plan.vouch(watched),
            )
        return way

    def close(self) -> None:
        """Let go of everything that all links share."""
        for way in self._ways.values():
            way.close()
        self._own.hang_up()


def confirm_every_seconds(links: int) -> float:
    """Give how long a task with so many links gathers what it confirms: each confirmation is three calls."""
    return min(CONFIRM_SECONDS_MOST, max(CONFIRM_EVERY_SECONDS, links * CONFIRM_EVERY_SECONDS / 10))


async def _settle(pulls: list[TaskPull]) -> None:
    """Give what was put a moment to be confirmed, so that the next task need not fetch it again."""
    with suppress(BsfgError, TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            for pull in pulls:
                await pull.settle()


def _note(event: str, **fields: Any) -> None:
    """Print what nobody expected; all else shows in the node's own log, metrics and gate."""
    error = fields.get("exc_info")
    if isinstance(error, BaseException):
        import traceback

        traceback.print_exception(error)


RECEIPTS = pa.schema(
    [
        ("link", pa.string()),
        ("stream", pa.string()),
        ("inserted", pa.int64()),
        ("repeated", pa.int64()),
        ("refused", pa.int64()),
        ("backlog", pa.int64()),
        ("seconds", pa.float64()),
    ]
)


def receipts_of(bundle: BundlePlan) -> pa.RecordBatch:
    """Take a shift and give its receipts as rows."""
    return pa.RecordBatch.from_pylist([asdict(receipt) for receipt in take_shift(bundle)], RECEIPTS)
