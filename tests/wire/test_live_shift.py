"""A live task of the replication at a real node, without a Spark session: when it gives its link up, and what it puts.

Two tasks share a link, and their driver takes it from them. Which of them moves it, and whether all that one has put is
there, is decided by a few lines that a run on Spark meets once in a minute or never.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until
from tests.wire.test_putting import LINK, LOG, frame

from bsfg.batch import EntryBatch
from bsfg.errors import DigestMismatch, LeaseLost, ZoneNotAllowed
from bsfg.journey.link import Fetched, PeerPosition, SessionMemory
from bsfg.journey.receive import LinkHeld, PullProgress
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate import shift
from bsfg.spark.replicate.carrying import Courier, CourierFlow
from bsfg.spark.replicate.driver import LinkState
from bsfg.spark.replicate.group import RemoteReporter, ReportLine
from bsfg.spark.replicate.plan import BundlePlan
from bsfg.spark.replicate.shift import BundleShift
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import messages

HOLDER = "spark here"
LOOKS_MOST = 40
"""So often a task may look whether it is still wanted, before a test gives it up."""


def looks() -> tuple[Callable[[], bool], Callable[[], int]]:
    """Give a parent that goes away after many looks, and what tells how many there were."""
    counter, seen = itertools.count(1), [0]

    def gone() -> bool:
        seen[0] = next(counter)
        return seen[0] > LOOKS_MOST

    return gone, lambda: seen[0]


async def keep(site: Site, gone: Callable[[], bool]) -> RemoteReporter:
    """Take the lease and keep it as a task does; give its desk when it stops."""
    site.act_as("pipeline")
    admin, plan = site.admin_client(), SimpleNamespace(name=LINK)
    task = task_of(admin, [plan], gone)
    working = asyncio.create_task(task.leases.run())
    try:
        lease = await task.leases.leased(LINK)
        assert lease is not None
        desk = RemoteReporter(task.reports, LINK, lease.token, lease.mode)
        await task.leases.keep(lease, desk)
        return desk
    finally:
        working.cancel()
        await asyncio.wait({working})


def task_of(
    admin: Any, plans: Sequence[Any], gone: Callable[[], bool] = lambda: False, move: Any = None, number: int = 1
) -> BundleShift:
    """Give the shift of a task with some links."""
    bundle = BundlePlan(number, NodeAccess("127.0.0.1:1"), HOLDER, tuple(plans))
    return BundleShift(bundle, admin, gone, move)


async def test_a_task_gives_way_to_its_sibling(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time a task lets the one that waits have the link, long before the most that it may keep it."""
    monkeypatch.setattr(shift, "HOLD_SECONDS_MIN", 0.0)
    site, (gone, seen) = await sites(), looks()
    keeping = asyncio.create_task(keep(site, gone))
    await until(lambda: site.parts.links.leases.holder(LINK) is not None)
    waiting = asyncio.create_task(site.admin_client().acquire_lease(LINK, HOLDER, 60_000, wait_seconds=60))
    desk = await keeping
    waiting.cancel()
    assert seen() <= LOOKS_MOST, "it kept the link until its parent was gone"
    assert desk.may_move()


async def test_a_task_gives_way_to_its_driver_at_once(sites: Sites) -> None:
    """The driver needs no patience: whoever waits urgently has the link before the task's time is over."""
    site, (gone, seen) = await sites(), looks()
    keeping = asyncio.create_task(keep(site, gone))
    await until(lambda: site.parts.links.leases.holder(LINK) is not None)
    driver = site.admin_client().acquire_lease(LINK, HOLDER, 60_000, wait_seconds=60, urgent=True)
    waiting = asyncio.create_task(driver)
    await keeping
    waiting.cancel()
    assert seen() <= LOOKS_MOST, "it kept the link until its parent was gone"


async def test_a_task_that_lost_its_lease_moves_nothing_more(sites: Sites) -> None:
    """When somebody else has the lease the loops of the task stand still, for two engines would move one link."""
    site, (gone, _) = await sites(), looks()
    board, lost = site.parts.links, False

    def stolen() -> bool:
        nonlocal lost
        held = board.leases.live(LINK)
        if not lost and held is not None:
            lost = True
            board.leases.give_back(LINK, held.token)
            board.leases.acquire(LINK, "another", 60_000)
        return gone()

    desk = await keep(site, stolen)
    assert not desk.may_move()


async def test_a_lease_that_nobody_waits_for_any_more_is_given_back(sites: Sites) -> None:
    """Who waited may be gone when the node answers: its lease is free at once, and the neighbours have theirs."""
    site = await sites()
    site.act_as("pipeline")
    admin, leases = site.admin_client(), site.parts.links.leases
    task = task_of(admin, [SimpleNamespace(name=LINK)])
    waiting = asyncio.create_task(task.leases.leased(LINK))
    await asyncio.sleep(0)
    take = task.leases._take

    async def too_late(links: Sequence[str], wait_seconds: float) -> Any:
        found = await take(links, wait_seconds)
        waiting.cancel()
        await asyncio.wait({waiting})
        return found

    task.leases._take = too_late  # type: ignore[method-assign]
    assert list(await task.leases._acquire([LINK], 1.0)) == []
    assert leases.holder(LINK) is None
    task.leases._take = take  # type: ignore[method-assign]
    again = asyncio.create_task(task.leases.leased(LINK))
    await asyncio.sleep(0)
    await task.leases._acquire([LINK], 1.0)
    lease = await again
    assert lease is not None and lease.holder == HOLDER


async def test_what_could_not_be_told_is_told_later(sites: Sites) -> None:
    """A report that the node did not take is kept, and added to what comes after it."""
    site = await sites()
    site.act_as("pipeline")
    admin, board = site.admin_client(), site.parts.links
    line = ReportLine(admin)
    desk = RemoteReporter(line, LINK, "mine", "normal")
    other = board.leases.acquire(LINK, "another", 60_000)
    desk.report(STREAM, PullProgress(inserted=2))
    with pytest.raises(LeaseLost):
        await line.flush(desk)
    board.leases.give_back(LINK, other.token)
    desk.report(STREAM, PullProgress(inserted=3))
    await line.flush(desk)
    [(_, report)] = board.reports()
    assert report.inserted == 5


async def courier(sites: Sites) -> tuple[Site, Courier]:
    """Open a site, and what puts frames into it for a task."""
    site = await sites()
    site.act_as("pipeline")

    async def bring(entries: EntryBatch) -> None:
        assert len(entries)

    return site, Courier(site.client(), LINK, STREAM, None, bring)


async def test_a_frame_that_was_put_in_part_is_not_put(sites: Sites) -> None:
    """What the node found altered is an error of the whole answer: none of it may be confirmed beyond that place."""
    site, puts = await courier(sites)
    facts, now = messages(5, from_zone="enterprise"), site.parts.clock.now_unix_ms()
    good = frame(facts, 0, now).entries
    assert good is not None
    objects = good.values("object")
    objects[3] = b'"altered"'
    bad = good.with_columns(object=good.column("object").from_pandas(objects))
    with pytest.raises(DigestMismatch, match="offset 3"):
        await puts.carry(LOG, [Frame(0, 4, bad)], now)
    assert (await (await site.parts.forward(STREAM)).stats()).end == 3
    await puts.close()


async def test_what_holds_the_link_at_the_node_holds_the_task(sites: Sites) -> None:
    """A fact of a zone that the peer does not speak for is no success of nothing: the link must stand still."""
    site, puts = await courier(sites)
    now = site.parts.clock.now_unix_ms()
    with pytest.raises(ZoneNotAllowed, match="lab"):
        await puts.carry(LOG, [frame(messages(2, from_zone="lab"), 0, now)], now)
    await puts.close()


async def test_gap_records_without_facts_are_carried(sites: Sites) -> None:
    """What zones behind the sender lost is told also when the sender has no fact to send with it."""
    site, puts = await courier(sites)
    relayed = GapRecord(1, 2, GapReason.EVICTED, 1_700_000_000_000, "full", "idmz")
    await (await puts.send(LOG, [], [relayed], at=7))
    stored = await (await site.parts.forward(STREAM)).gaps()
    assert [(each.first, each.last, each.origin_zone) for each in stored] == [(1, 2, "idmz")]
    await puts.close()


async def test_a_task_knows_the_history_of_its_sender() -> None:
    """Only the task sees where an answer starts: another log, or one that went back, holds the link there."""
    link: Any = None
    turns = CourierFlow(link, SessionMemory(), clock=FakeClock())
    known = PeerPosition(log_id=LOG, latest_start=8, acknowledged=7, end=8)
    for log_id, start, end in (("another", 8, 8), (LOG, 8, 7), (LOG, 7, 8)):
        found = await turns.judge(Fetched(log_id, start, end, b""), known)
        assert isinstance(found, LinkHeld) and found.code == "foreign_log"
    assert not isinstance(await turns.judge(Fetched(LOG, 8, 8, b""), known), LinkHeld)


async def test_a_link_that_nobody_moves_is_autonomous() -> None:
    """Whatever was said of it last: a run whose tasks have all died must not look normal."""
    plan: Any = SimpleNamespace(holder=HOLDER)
    link, now = LinkState(plan, Path("unused")), time.monotonic()
    told = {"mode": "normal", "reason": "", "lease": HOLDER, "reports": []}
    link.look(told, now - 100)
    assert link.mode == "normal"
    link.look_in_vain(now - 90)
    assert link.mode == "autonomous"
    link.look({**told, "mode": "held", "lease": None}, now - 80)
    assert link.mode == "held"
