"""One turn of a live task: wait for the lease of the link, move facts, and give it up when the other task waits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bsfg.errors import BsfgError, LeaseHeld, LeaseLost
from bsfg.journey.handoff import Handoff
from bsfg.spark.calls import calls
from bsfg.spark.daemon import DAEMON_PID
from bsfg.spark.replicate.carrying import CarriedPull
from bsfg.spark.replicate.desk import RemoteDesk
from bsfg.spark.replicate.plan import LEASE_TTL_MS, LinkPlan

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.service import LeaseView

HOLD_SECONDS_MIN, HOLD_SECONDS_MAX = 60.0, 180.0
"""How long a task moves a link before it lets the other one, and how long at most; facts wait at each change."""

WAIT_SECONDS = 5.0
AWAY_SECONDS = 0.5
KEEP_SECONDS = 1.5
SETTLE_SECONDS = 2.0

TURN, URGENT = 1, 2
"""What `LeaseView.wanted` means."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a task has moved of one stream in one turn."""

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


def take_turn(plan: LinkPlan, gone: Callable[[], bool] | None = None) -> list[Receipt]:
    """Wait for the lease and move the link for a while; give the receipts."""
    return calls().run(_take_turn(plan, gone or orphaned()))


async def _take_turn(plan: LinkPlan, gone: Callable[[], bool]) -> list[Receipt]:
    from bsfg.wire.adminclient import AdminClient

    admin = AdminClient(calls().connection(plan.own))
    lease = await _leased(admin, plan, gone)
    if lease is None:
        return []
    since = time.monotonic()
    desk = await _move(plan, admin, lease, gone)
    seconds = time.monotonic() - since
    return [
        Receipt(plan.name, stream, done.inserted, done.repeated, done.refused, done.backlog, seconds)
        for stream, done in desk.totals.items()
        if stream
    ]


async def _leased(admin: AdminClient, plan: LinkPlan, gone: Callable[[], bool]) -> LeaseView | None:
    """Wait for the lease, however long somebody else has it or the node is away."""
    while not gone():
        try:
            return await admin.acquire_lease(plan.name, plan.holder, LEASE_TTL_MS, wait_seconds=WAIT_SECONDS)
        except LeaseHeld as held:
            if held.details.get("holder") != plan.holder:
                await asyncio.sleep(AWAY_SECONDS)
        except BsfgError:
            await asyncio.sleep(AWAY_SECONDS)
    return None


async def _move(plan: LinkPlan, admin: AdminClient, lease: LeaseView, gone: Callable[[], bool]) -> RemoteDesk:
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.reach import Reach

    own = BoundaryClient(calls().connection(plan.own))
    connection = calls().connection(plan.peer)
    connection.request_timeout_seconds = plan.link.request_timeout_seconds
    peer = BoundaryClient(connection)
    desk = RemoteDesk(admin, plan.name, lease.token, lease.mode)
    pulls = [CarriedPull(plan, each, peer, own, admin, lease.token, desk.came) for each in plan.streams]
    watched = plan.peer.watched
    watched = watched if hasattr(watched, "files") else None
    reach = Reach(
        plan.link.address.host,
        plan.link.address.port,
        plan.link.expected_server,
        watched,
        connection,
        by_alternative_name=plan.by_alternative_name,
        vouch=plan.vouch(watched),
    )
    handoff = Handoff(plan.link, desk, pulls, note=_note, way=reach)
    telling = asyncio.create_task(desk.run())
    await handoff.start()
    try:
        await _keep(admin, plan, lease, desk, gone)
        await _settle(pulls)
    finally:
        await handoff.stop()
        telling.cancel()
        reach.close()
        peer.hang_up()
        with suppress(BsfgError):
            await asyncio.gather(*(pull.close() for pull in pulls))
        with suppress(BsfgError):
            await desk.flush()
        with suppress(BsfgError):
            await admin.release_lease(plan.name, lease.token)
    return desk


async def _keep(
    admin: AdminClient, plan: LinkPlan, lease: LeaseView, desk: RemoteDesk, gone: Callable[[], bool]
) -> None:
    """Keep the lease until it is another's turn, or it is lost."""
    since = time.monotonic()
    while desk.may_move() and not gone():
        held_seconds = time.monotonic() - since
        ripe = held_seconds >= HOLD_SECONDS_MIN
        wait_seconds = min(KEEP_SECONDS, max(0.05, HOLD_SECONDS_MIN - held_seconds)) if not ripe else KEEP_SECONDS
        try:
            lease = await admin.renew_lease(
                plan.name, lease.token, LEASE_TTL_MS, wait_seconds=wait_seconds, seen=0 if ripe else TURN
            )
        except LeaseLost:
            desk.moves = False
            return
        except BsfgError:
            await asyncio.sleep(AWAY_SECONDS)
            continue
        held_seconds = time.monotonic() - since
        if lease.wanted == URGENT or held_seconds >= HOLD_SECONDS_MAX:
            return
        if lease.wanted == TURN and held_seconds >= HOLD_SECONDS_MIN:
            return


async def _settle(pulls: list[CarriedPull]) -> None:
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
