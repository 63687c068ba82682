"""Leases and reports of many links in one call, and the tasks of a bundle that take and pass their links with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until

from bsfg.errors import InvalidArgument, LeaseHeld, LeaseLost, PermissionRefused, UnknownLink
from bsfg.gate import Event, Gate
from bsfg.journey.link import PeerPosition
from bsfg.node.state import NodeState
from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate import group, shift
from bsfg.spark.replicate.group import RemoteReporter
from bsfg.spark.replicate.plan import BundlePlan
from bsfg.spark.replicate.shift import BundleShift
from bsfg.wire.operations import LINKS_AT_ONCE_MAX
from bsfg.wire.service import KeptLease, LeaseView, LinkReport, PeerMemo

HOLDER = "spark here"
LINKS = [f"from-site-{number}" for number in range(6)]
MORE = """
[identities.mover]
zone = "plant"
roles = ["pipeline"]
streams = ["audit"]
""" + "".join(
    f"""
[identities.site-{number}-bsfg]
zone = "site-{number}"
roles = ["peer"]
streams = ["operational"]
[links.from-site-{number}]
zone = "site-{number}"
address = "127.0.0.1:9"
streams = ["operational"]
"""
    for number in range(6)
)


async def opened(sites: Sites) -> Site:
    """Open a site with many links, and call it as its pipeline."""
    site = await sites(more=MORE)
    site.act_as("pipeline")
    return site


def is_waited_for(site: Site, link: str) -> bool:
    """Tell whether somebody waits for news of a link."""
    return link in site.parts.links.leases._news


async def test_what_is_free_is_taken_and_the_rest_is_named(sites: Sites) -> None:
    """Of many links some are another's and some unknown: the others are taken, each with its own token."""
    site = await opened(sites)
    admin = site.admin_client()
    await admin.acquire_lease(LINKS[0], "another", 60_000)
    found = await admin.acquire_leases([*LINKS, "nowhere"], HOLDER, 60_000)
    assert set(found.leases) == set(LINKS[1:])
    assert len({lease.token for lease in found.leases.values()}) == len(LINKS) - 1
    assert {link: type(error) for link, error in found.refused.items()} == {LINKS[0]: LeaseHeld, "nowhere": UnknownLink}
    assert found.refused[LINKS[0]].details["holder"] == "another"
    assert all(site.parts.links.leases.holder(link) == HOLDER for link in LINKS[1:])


async def test_whoever_waits_for_many_gets_the_first_that_is_free(sites: Sites) -> None:
    """One call waits for all; their holder learns that they are wanted, and what it gives back is passed on."""
    site = await opened(sites)
    admin = site.admin_client()
    held = (await admin.acquire_leases(LINKS, HOLDER, 60_000)).leases
    kept = [KeptLease(link, lease.token) for link, lease in held.items()]
    keeping = asyncio.create_task(admin.renew_leases(kept, HOLDER, 60_000, wait_seconds=60))
    waiting = asyncio.create_task(admin.acquire_leases(LINKS, HOLDER, 60_000, wait_seconds=60))
    assert {lease.wanted for lease in (await keeping).leases.values()} == {1}
    await admin.release_lease(LINKS[3], held[LINKS[3]].token)
    found = await waiting
    assert set(found.leases) == {LINKS[3]}
    assert set(found.refused) == set(LINKS) - {LINKS[3]}


async def test_a_lease_that_was_lost_is_told_with_those_that_are_kept(sites: Sites) -> None:
    """Nothing of one link keeps the others from being kept."""
    site = await opened(sites)
    admin = site.admin_client()
    held = (await admin.acquire_leases(LINKS, HOLDER, 60_000)).leases
    await admin.release_lease(LINKS[2], held[LINKS[2]].token)
    await admin.acquire_lease(LINKS[2], "another", 60_000)
    kept = [*(KeptLease(link, lease.token, seen=1) for link, lease in held.items()), KeptLease("nowhere", "x")]
    found = await admin.renew_leases(kept, HOLDER, 60_000, wait_seconds=60)
    assert set(found.leases) == set(LINKS) - {LINKS[2]}
    assert {link: type(error) for link, error in found.refused.items()} == {LINKS[2]: LeaseLost, "nowhere": UnknownLink}


async def test_after_a_restart_of_the_node_leases_are_kept_by_their_holder(sites: Sites) -> None:
    """A node forgets leases; whoever renews his has them again, under the name that his own others wait by."""
    site = await opened(sites)
    admin = site.admin_client()
    held = (await admin.acquire_leases(LINKS, HOLDER, 60_000)).leases
    site.parts.links.leases._held.clear()
    kept = [KeptLease(link, lease.token) for link, lease in held.items()]
    assert set((await admin.renew_leases(kept, HOLDER, 60_000)).leases) == set(LINKS)
    assert {site.parts.links.leases.holder(link) for link in LINKS} == {HOLDER}


async def test_a_gate_that_changes_is_told_at_once(sites: Sites) -> None:
    """An operator's hold reaches whoever moves the link without being asked for."""
    site = await opened(sites)
    admin = site.admin_client()
    held = (await admin.acquire_leases(LINKS, HOLDER, 60_000)).leases
    kept = [KeptLease(link, lease.token, 1, lease.mode) for link, lease in held.items()]
    keeping = asyncio.create_task(admin.renew_leases(kept, HOLDER, 60_000, wait_seconds=60))
    await until(lambda: is_waited_for(site, LINKS[4]))
    site.parts.links.hold(LINKS[4], "receiver", by="operator", reason="drill")
    modes = {link: lease.mode for link, lease in (await keeping).leases.items()}
    assert modes.pop(LINKS[4]) == "held"
    assert set(modes.values()) == {"autonomous"}


async def test_who_hangs_up_loses_all_leases_soon(sites: Sites) -> None:
    """A task that dies while it keeps many leases leaves them all to the next one long before they would end."""
    site = await opened(sites)
    admin, dying = site.admin_client(), site.admin_client()
    held = (await dying.acquire_leases(LINKS, HOLDER, 100_000)).leases
    kept = [KeptLease(link, lease.token, seen=2) for link, lease in held.items()]
    keeping = asyncio.create_task(dying.renew_leases(kept, HOLDER, 100_000, wait_seconds=60))
    taken: set[str] = set()
    await until(lambda: is_waited_for(site, LINKS[0]))
    await dying.close()
    await asyncio.wait({keeping})
    while taken != set(LINKS):
        rest = [link for link in LINKS if link not in taken]
        taken |= set((await admin.acquire_leases(rest, HOLDER, 100_000, wait_seconds=3)).leases)
    assert {lease.token for lease in held.values()}.isdisjoint(
        lease.token for link in LINKS if (lease := site.parts.links.leases.live(link)) is not None
    )


async def test_a_newer_plan_is_heard_of_by_all_parts_of_its_holder(sites: Sites) -> None:
    """Those that keep and those that wait are answered at once; another holder hears nothing of it."""
    site = await opened(sites)
    admin = site.admin_client()
    held = (await admin.acquire_leases(LINKS, HOLDER, 60_000, plan=1)).leases
    kept = [KeptLease(link, lease.token, seen=2) for link, lease in held.items()]
    parts = [
        asyncio.create_task(admin.renew_leases(kept, HOLDER, 60_000, wait_seconds=60, plan=1)),
        asyncio.create_task(admin.acquire_leases(LINKS, HOLDER, 60_000, wait_seconds=60, plan=1)),
        asyncio.create_task(admin.acquire_leases([], HOLDER, 60_000, wait_seconds=60, plan=1)),
    ]
    other = asyncio.create_task(admin.acquire_leases(LINKS, "another", 60_000, wait_seconds=1, plan=1))
    await until(lambda: is_waited_for(site, ""))
    assert (await admin.acquire_leases([], HOLDER, 60_000, plan=2)).plan == 2
    assert [(await part).plan for part in parts] == [2, 2, 2]
    assert (await other).plan == 1


async def test_reports_are_taken_or_refused_one_by_one(sites: Sites) -> None:
    """A report of a link that is another's is refused, and those beside it count."""
    site = await opened(sites)
    admin = site.admin_client()
    await admin.acquire_lease(LINKS[1], "another", 60_000)
    reports = [LinkReport(link, STREAM, event=Event.PEER_FOUND, backlog=7, lease="mine") for link in LINKS[:3]]
    answers = await admin.report_links(reports)
    assert [type(answer) for answer in answers] == [Gate, LeaseLost, Gate]
    assert [report.link for _, report in site.parts.links.reports()] == [LINKS[0], LINKS[2]]


async def test_positions_are_kept_or_refused_one_by_one(sites: Sites, tmp_path: Path) -> None:
    """What is known of a link that is another's is not taken, and those beside it are, with one sync for all."""
    site = await opened(sites)
    admin, syncs = site.admin_client(), Counter[int]()
    with closing(NodeState(tmp_path)) as state:
        kept = state._keeper.keep

        def counted(values: Any) -> None:
            syncs[len(values)] += 1
            kept(values)

        state._keeper.keep = counted  # type: ignore[method-assign]
        site.parts.memory = state.peer
        await admin.acquire_lease(LINKS[1], "another", 60_000)
        memos = [PeerMemo(link, STREAM, PeerPosition("a" * 32, 17), "mine") for link in [*LINKS, "none"]]
        answers = await admin.remember_peers(memos)
        assert [type(answer) for answer in answers[1:3]] == [LeaseLost, type(None)]
        assert isinstance(answers[-1], UnknownLink)
        assert (await state.peer(LINKS[2], STREAM).recall()).latest_start == 17
        assert (await state.peer(LINKS[1], STREAM).recall()).latest_start is None
        assert max(syncs) >= len(LINKS) - 2


async def test_each_link_is_asked_for_by_somebody_who_may_move_it(sites: Sites) -> None:
    """A pipeline of other streams gets none of the leases, and a producer cannot even ask."""
    site = await opened(sites)
    admin = site.admin_client()
    site.act_as("mover")
    found = await admin.acquire_leases(LINKS, HOLDER, 60_000)
    assert {type(error) for error in found.refused.values()} == {PermissionRefused}
    assert not found.leases
    found = await admin.renew_leases([KeptLease(LINKS[0], "token")], HOLDER, 60_000)
    assert {type(error) for error in found.refused.values()} == {PermissionRefused}
    [refused] = await admin.report_links([LinkReport(LINKS[0], STREAM)])
    assert isinstance(refused, PermissionRefused)
    [unkept] = await admin.remember_peers([PeerMemo(LINKS[0], STREAM, PeerPosition())])
    assert isinstance(unkept, PermissionRefused)
    site.act_as("app")
    calls = (
        admin.acquire_leases(LINKS, HOLDER, 60_000),
        admin.renew_leases([KeptLease(LINKS[0], "token")], HOLDER, 60_000),
        admin.report_links([LinkReport(LINKS[0], STREAM)]),
        admin.remember_peers([PeerMemo(LINKS[0], STREAM, PeerPosition())]),
    )
    for call in calls:
        with pytest.raises(PermissionRefused):
            await call


async def test_a_call_is_about_so_many_links_and_no_more(sites: Sites) -> None:
    """Nobody has a node look at endless lists."""
    site = await opened(sites)
    admin, names = site.admin_client(), [f"l{number}" for number in range(LINKS_AT_ONCE_MAX + 1)]
    calls = (
        admin.acquire_leases(names, HOLDER, 60_000),
        admin.renew_leases([KeptLease(name, "t") for name in names], HOLDER, 60_000),
        admin.report_links([LinkReport(name) for name in names]),
        admin.remember_peers([PeerMemo(name, STREAM, PeerPosition()) for name in names]),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match=f"the limit is {LINKS_AT_ONCE_MAX}"):
            await call
    found = await admin.acquire_leases(names[1:], HOLDER, 60_000, wait_seconds=60)
    assert len(found.refused) == LINKS_AT_ONCE_MAX


# The tasks of a bundle.


@dataclass
class Bundle:
    """Tasks that share some links, each of which notes what it moves; no link may be moved by two at once."""

    site: Site
    moving: Counter[str] = field(default_factory=Counter)
    moved: list[tuple[str, str]] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    tasks: dict[str, BundleShift] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def begin(self, name: str, number: int = 1, links: list[str] | None = None) -> None:
        """Begin the shift of a task."""
        plans: Any = tuple(SimpleNamespace(name=link) for link in (LINKS if links is None else links))
        bundle = BundlePlan(number, NodeAccess("127.0.0.1:1"), HOLDER, plans)

        async def move(task: BundleShift, plan: Any, lease: LeaseView) -> RemoteReporter:
            desk = RemoteReporter(task.reports, plan.name, lease.token, lease.mode)
            self.moving[plan.name] += 1
            self.moved.append((name, plan.name))
            assert self.moving[plan.name] == 1, f"{plan.name} is moved by two"
            try:
                if plan.name in self.broken:
                    raise RuntimeError("nobody expected this")
                await task.leases.keep(lease, desk)
            finally:
                self.moving[plan.name] -= 1
                await task.reports.remove(desk)
                await task.admin.release_lease(plan.name, lease.token)
            return desk

        self.tasks[name] = BundleShift(bundle, self.site.admin_client(), lambda: name in self.gone, move)
        self.running[name] = asyncio.create_task(self.tasks[name].run())

    def of(self, name: str) -> list[str]:
        """Name the links that a task has moved."""
        return sorted(link for task, link in self.moved if task == name)

    async def ends(self, name: str) -> None:
        """Wait until a task ends by itself."""
        await self.running.pop(name)


@asynccontextmanager
async def bundle_of(sites: Sites) -> AsyncIterator[Bundle]:
    """Open a site whose bundle is empty of tasks yet."""
    bundle = Bundle(await opened(sites))
    try:
        yield bundle
    finally:
        bundle.gone |= set(bundle.tasks)
        await asyncio.gather(*bundle.running.values())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give what makes shifts short, and rounds with them."""
    monkeypatch.setattr(group, "ROUND_SECONDS", 0.2)
    monkeypatch.setattr(shift, "PASS_SECONDS", 0.5)
    return lambda seconds: monkeypatch.setattr(shift, "HOLD_SECONDS_MIN", seconds)


async def test_a_task_passes_its_whole_bundle_on(sites: Sites, short: Callable[[float], None]) -> None:
    """When its time is over the other task gets every link, and the first one ends, to begin the next shift."""
    short(0.5)
    async with bundle_of(sites) as bundle:
        bundle.begin("a")
        await until(lambda: len(bundle.moved) == len(LINKS))
        bundle.begin("b")
        await bundle.ends("a")
        await until(lambda: bundle.of("b") == LINKS)
        assert bundle.of("a") == LINKS
        bundle.begin("a again")
        await bundle.ends("b")
        await until(lambda: bundle.of("a again") == LINKS)


async def test_a_task_that_nobody_relieves_goes_on(sites: Sites, short: Callable[[float], None]) -> None:
    """Without another task nobody is passed anything, however long ago its time was over."""
    short(0.0)
    async with bundle_of(sites) as bundle:
        bundle.begin("a")
        await until(lambda: len(bundle.moved) == len(LINKS))
        await asyncio.sleep(0.5)
        assert not bundle.running["a"].done()
        assert bundle.moving.total() == len(LINKS)


async def test_a_shift_ends_after_its_time_in_any_case(
    sites: Sites, short: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch ends with the last of its tasks: the others must not wait for ever for one that only waits."""
    short(60.0)
    monkeypatch.setattr(shift, "SHIFT_SECONDS_MAX", 0.5)
    async with bundle_of(sites) as bundle:
        await bundle.site.admin_client().acquire_lease(LINKS[0], "another", 60_000)
        bundle.begin("a")
        await bundle.ends("a")
        assert bundle.of("a") == LINKS[1:]
        assert bundle.site.parts.links.leases.holder(LINKS[1]) is None


async def test_the_links_of_a_dead_task_are_taken_over(sites: Sites, short: Callable[[float], None]) -> None:
    """A killed process says nothing; the one that waits has all its links a moment later."""
    short(60.0)
    async with bundle_of(sites) as bundle:
        bundle.begin("a")
        await until(lambda: len(bundle.moved) == len(LINKS))
        bundle.begin("b")
        await until(lambda: bundle.site.parts.links.leases._waiting.total() == len(LINKS))
        bundle.moving.clear()
        await bundle.tasks["a"].admin.close()
        await until(lambda: bundle.of("b") == LINKS)


async def test_links_that_two_tasks_hold_come_together_again(sites: Sites, short: Callable[[float], None]) -> None:
    """As after a restart of the node each of two tasks holds some: whoever passes one on passes all, and ends."""
    short(1.0)
    async with bundle_of(sites) as bundle:
        bundle.begin("a", links=LINKS[:3])
        await until(lambda: bundle.of("a") == LINKS[:3])
        bundle.begin("b")
        await until(lambda: bundle.of("b") == LINKS[3:])
        await bundle.ends("a")
        await until(lambda: bundle.of("b") == LINKS)
        bundle.begin("a again")
        await bundle.ends("b")
        await until(lambda: bundle.of("a again") == LINKS)
        assert not bundle.running["a again"].done()


async def test_a_driver_takes_one_link_and_leaves_the_rest(sites: Sites, short: Callable[[float], None]) -> None:
    """A replay needs the lease of its link alone: the shift goes on, and the link comes back when it is done."""
    short(60.0)
    async with bundle_of(sites) as bundle:
        bundle.begin("a")
        await until(lambda: len(bundle.moved) == len(LINKS))
        driver = bundle.site.admin_client()
        lease = await driver.acquire_lease(LINKS[2], HOLDER, 60_000, wait_seconds=60, urgent=True)
        assert bundle.moving.total() == len(LINKS) - 1
        await driver.release_lease(LINKS[2], lease.token)
        await until(lambda: bundle.moving.total() == len(LINKS))
        assert not bundle.running["a"].done()


async def test_a_newer_plan_ends_the_shifts_of_older_ones(sites: Sites, short: Callable[[float], None]) -> None:
    """Those that move pass on to whoever goes by the new plan; what that leaves out stops, and what is new moves."""
    short(60.0)
    async with bundle_of(sites) as bundle:
        bundle.begin("a", links=LINKS[:4])
        await until(lambda: len(bundle.moved) == 4)
        bundle.begin("b", links=LINKS[:4])
        bundle.begin("idle", links=[])
        await until(lambda: is_waited_for(bundle.site, ""))
        await bundle.site.admin_client().acquire_leases([], HOLDER, 60_000, plan=2)
        await bundle.ends("b")
        await bundle.ends("idle")
        bundle.begin("new", number=2, links=LINKS[1:])
        await bundle.ends("a")
        await until(lambda: bundle.of("new") == LINKS[1:])
        assert bundle.site.parts.links.leases.holder(LINKS[0]) is None


async def test_what_fails_in_one_link_stops_no_other(sites: Sites, short: Callable[[float], None]) -> None:
    """An error that nobody expected is printed and tried again, beside links that go on moving."""
    short(60.0)
    async with bundle_of(sites) as bundle:
        bundle.broken.add(LINKS[1])
        bundle.begin("a")
        await until(lambda: bundle.of("a").count(LINKS[1]) >= 3)
        assert bundle.moving.total() == len(LINKS) - 1
        assert all(bundle.of("a").count(link) == 1 for link in LINKS if link != LINKS[1])
