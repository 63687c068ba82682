"""A link that flows: answers overlap, confirmations follow on their own, and all is as safe as turn after turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.conftest import LONG_SOAK
from tests.journey.simulation import Campaign
from tests.journey.test_lying_peer import LyingLink, jump, reordered, with_column
from tests.journey.zones import BACKENDS, DirectLink, Inbound, Zone, connect, origin_span

from bsfg.batch import FactBatch
from bsfg.errors import BufferFull, ForeignLog, PeerUnreachable
from bsfg.journey.link import Fetched, FetchRequest, PeerPosition, Refusal, SessionMemory
from bsfg.journey.pull import ANSWERS_AT_ONCE, Flow
from bsfg.journey.serve import serve
from bsfg.ports import Confirmation, OriginSpan, Receipt
from bsfg.retention import GapReason, Policy
from bsfg.testing.facts import altered, messages, sealed

MakeZone = Callable[[str], Zone]


@dataclass
class StepLink(DirectLink):
    """A link that notes what is asked, and can be made to fail or to wait."""

    asked: list[FetchRequest] = field(default_factory=list)
    refused_to_confirm: BaseException | None = None
    may_confirm: asyncio.Event = field(default_factory=asyncio.Event)
    ignores_after: bool = False

    def __post_init__(self) -> None:
        self.may_confirm.set()

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Note and serve."""
        self.asked.append(request)
        return await super().fetch(replace(request, after=None) if self.ignores_after else request)

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Confirm when it may."""
        await self.may_confirm.wait()
        if self.refused_to_confirm is not None:
            raise self.refused_to_confirm
        return await super().confirm(confirmation, refusals)


@dataclass
class SlowForward:
    """A forward buffer that puts when it is allowed to."""

    target: object
    may_put: asyncio.Event = field(default_factory=asyncio.Event)
    waits: asyncio.Event = field(default_factory=asyncio.Event)

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Wait, then put."""
        self.waits.set()
        await self.may_put.wait()
        receipt: Receipt = await self.target.put_if_absent(batch, origin)  # type: ignore[attr-defined]
        return receipt


async def flowing(make_zone: MakeZone, facts: int = 100) -> tuple[Zone, Zone, Inbound, StepLink, Flow]:
    """Make a plant with facts and an enterprise whose flow begins."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    link = StepLink(plant, inbound.link.consumer, inbound.link.carriage)
    await plant.append(messages(facts))
    flow = Flow(link, inbound.memory, inbound.rules, clock=enterprise.clock, confirm_every_seconds=0.0)
    return plant, enterprise, inbound, link, flow


async def flow_all(flow: Flow, receiver: Zone, request: FetchRequest, facts: int) -> None:
    """Make turns until the receiver has everything and the sender knows it."""
    while len(await receiver.received()) < facts:
        progress = await flow.turn(await receiver.forward(), request)
        assert progress.held is None and progress.paused is None
    await flow.confirmed()


async def settled(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)


async def test_all_facts_arrive_in_order_and_are_confirmed(make_zone: MakeZone) -> None:
    """A backlog crosses in many answers: everything arrives once, in order, and the sender's frontier is at its end."""
    plant, enterprise, inbound, link, flow = await flowing(make_zone)
    await flow_all(flow, enterprise, FetchRequest(max_facts=7), 100)
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(100)]
    assert await plant.committed(inbound.link.consumer) == 99
    assert [request.after for request in link.asked][:3] == [None, 6, 13]
    flow.reset()


async def test_later_answers_are_fetched_while_one_is_stored(make_memory_zone: MakeZone) -> None:
    """While the first answer waits for the disk, the next two are on their way, and no more than those."""
    _, enterprise, _, link, flow = await flowing(make_memory_zone)
    forward = SlowForward(await enterprise.forward())
    turn = asyncio.create_task(flow.turn(forward, FetchRequest(max_facts=10)))  # type: ignore[arg-type]
    await forward.waits.wait()
    await settled(lambda: link.fetches == ANSWERS_AT_ONCE)
    for _ in range(100):
        await asyncio.sleep(0)
    assert link.fetches == ANSWERS_AT_ONCE
    assert link.confirmations == []
    forward.may_put.set()
    assert (await turn).through == 9
    flow.reset()


async def test_confirmations_are_gathered(make_memory_zone: MakeZone) -> None:
    """What is stored while a confirmation is under way is confirmed together, in rising order, up to the end."""
    plant, enterprise, inbound, link, flow = await flowing(make_memory_zone)
    link.may_confirm.clear()
    forward = await enterprise.forward()
    for _ in range(10):
        await flow.turn(forward, FetchRequest(max_facts=10))
    assert await plant.committed(inbound.link.consumer) == -1
    link.may_confirm.set()
    await flow.confirmed()
    through = [confirmation.through for confirmation in link.confirmations]
    assert through == [9, 99]
    assert await plant.committed(inbound.link.consumer) == 99
    flow.reset()


async def test_refusals_that_wait_are_told_together(make_memory_zone: MakeZone) -> None:
    """What is refused while a confirmation is under way is told with the next one: every refusal reaches the sender."""
    plant, enterprise, inbound, link, flow = await flowing(make_memory_zone, 6)
    forward = await enterprise.forward()
    await forward.put_if_absent(sealed(altered(messages(6))), origin_span("plant", 100, 6))
    link.may_confirm.clear()
    for _ in range(3):
        await flow.turn(forward, FetchRequest(max_facts=2))
    link.may_confirm.set()
    await flow.confirmed()
    assert await plant.committed(inbound.link.consumer) == 5
    told = [(gap.first, gap.last) for gap in await (await plant.store()).gaps() if gap.reason == GapReason.QUARANTINED]
    assert sum(last - first + 1 for first, last in told) == 6
    flow.reset()


async def test_a_position_is_remembered_before_it_is_confirmed(make_memory_zone: MakeZone) -> None:
    """When a confirmation is sent, what it can lead to is durable already: the sender may rightly start behind it."""
    _, enterprise, inbound, link, flow = await flowing(make_memory_zone)
    seen: list[tuple[int | None, PeerPosition]] = []

    async def confirm(confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        seen.append((confirmation.through, await inbound.memory.recall()))
        return await DirectLink.confirm(link, confirmation, refusals)

    link.confirm = confirm  # type: ignore[method-assign]
    await flow_all(flow, enterprise, FetchRequest(max_facts=9), 100)
    assert seen
    for through, position in seen:
        assert through is not None and position.latest_start is not None
        assert position.latest_start >= through + 1
        assert position.acknowledged is None or position.acknowledged < through
    assert (await inbound.memory.recall()).acknowledged == 99
    flow.reset()


async def test_a_failed_confirmation_is_raised_and_repaired(make_zone: MakeZone) -> None:
    """A turn tells that confirming failed; the next one begins at the sender's cursor, and nothing is stored twice."""
    plant, enterprise, inbound, link, flow = await flowing(make_zone, 30)
    forward = await enterprise.forward()
    link.refused_to_confirm = PeerUnreachable("gone")
    with pytest.raises(PeerUnreachable):
        for _ in range(5):
            await flow.turn(forward, FetchRequest(max_facts=10))
            await asyncio.sleep(0.001)
    link.refused_to_confirm = None
    await flow_all(flow, enterprise, FetchRequest(max_facts=10), 30)
    while await plant.committed(inbound.link.consumer) < 29:
        progress = await flow.turn(forward, FetchRequest(max_facts=10))
        assert (progress.inserted, progress.repeated) == (0, 10)
        await flow.confirmed()
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(30)]
    flow.reset()


async def test_a_failed_confirmation_ends_a_long_wait(make_memory_zone: MakeZone) -> None:
    """A fetch that waits for new facts does not hide that the last confirmation failed."""
    _, enterprise, _, link, flow = await flowing(make_memory_zone, 10)
    link.may_confirm.clear()
    forward, request = await enterprise.forward(), FetchRequest(wait_seconds=300)
    await flow.turn(forward, request)
    waiting = asyncio.create_task(flow.turn(forward, request))
    await settled(lambda: link.fetches == 2)
    link.refused_to_confirm = ForeignLog("another history")
    link.may_confirm.set()
    held = (await waiting).held
    assert held is not None and held.code == ForeignLog.code


async def test_new_facts_end_a_long_wait_while_confirming(make_memory_zone: MakeZone) -> None:
    """A live fact is stored although an earlier one is not confirmed yet."""
    plant, enterprise, _, link, flow = await flowing(make_memory_zone, 1)
    link.may_confirm.clear()
    forward, request = await enterprise.forward(), FetchRequest(wait_seconds=300)
    await flow.turn(forward, request)
    waiting = asyncio.create_task(flow.turn(forward, request))
    await settled(lambda: link.fetches == 2)
    await plant.append(messages(1, first=1))
    assert (await waiting).through == 1
    assert link.confirmations == []
    flow.reset()


async def test_a_restart_begins_at_the_cursor(make_zone: MakeZone) -> None:
    """A receiver that forgot everything is served from what it confirmed, and knows by their keys what it has."""
    plant, enterprise, inbound, link, flow = await flowing(make_zone, 40)
    link.may_confirm.clear()
    forward = await enterprise.forward()
    for _ in range(3):
        await flow.turn(forward, FetchRequest(max_facts=10))
    flow.reset()
    link.may_confirm.set()
    again = Flow(link, SessionMemory(), inbound.rules, clock=enterprise.clock, confirm_every_seconds=0.0)
    repeated = 0
    while await plant.committed(link.consumer) < 39:
        repeated += (await again.turn(forward, FetchRequest(max_facts=10))).repeated
        await again.confirmed()
    assert repeated == 30
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(40)]
    again.reset()


async def test_a_sender_that_knows_no_asking_ahead(make_memory_zone: MakeZone) -> None:
    """A sender that always starts behind its cursor only costs time: what it repeats is recognised."""
    plant, enterprise, _, link, flow = await flowing(make_memory_zone, 50)
    link.ignores_after = True
    await flow_all(flow, enterprise, FetchRequest(max_facts=10), 50)
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(50)]
    assert await plant.committed(link.consumer) == 49
    flow.reset()


async def test_a_full_buffer_pauses_and_loses_nothing(make_zone: MakeZone) -> None:
    """When there is no room the turn says so, and the same facts are fetched again later."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    enterprise.forward_policy = Policy(capacity_bytes=1)
    inbound = await connect(plant, enterprise)
    await plant.append(messages(20))
    flow = Flow(inbound.link, inbound.memory, inbound.rules, clock=enterprise.clock)
    progress = await flow.turn(await enterprise.forward(), FetchRequest(max_facts=5))
    assert isinstance(progress.paused, BufferFull) and not progress.moved
    await enterprise.restart()
    enterprise.forward_policy = None
    await flow_all(flow, enterprise, FetchRequest(max_facts=5), 20)
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(20)]
    flow.reset()


async def lying(make_zone: MakeZone) -> tuple[Zone, LyingLink, Flow]:
    """Make a flow over a lying link, its first four facts pulled honestly."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    link = LyingLink(plant, inbound.link.consumer)
    await plant.append(messages(4))
    flow = Flow(link, inbound.memory, inbound.rules, clock=enterprise.clock, confirm_every_seconds=0.0)
    await flow_all(flow, enterprise, FetchRequest(), 4)
    await plant.append(messages(6, first=4))
    return enterprise, link, flow


@pytest.mark.parametrize(
    "alter",
    [
        jump,
        reordered,
        with_column("from_zone", row=2, value="elsewhere"),
        lambda fetched: replace(fetched, log_id="f" * 32),
        lambda fetched: replace(fetched, end=3, frames=()),
    ],
)
async def test_a_lie_holds_the_link(make_memory_zone: MakeZone, alter: Callable[[Fetched], Fetched]) -> None:
    """A fault of history, framing or identity holds the link at once, and nothing of the answer is stored."""
    enterprise, link, flow = await lying(make_memory_zone)
    link.alter = alter
    progress = await flow.turn(await enterprise.forward())
    assert progress.held is not None
    assert len(await enterprise.received()) == 4


async def test_altered_bytes_are_fetched_again_then_hold(make_memory_zone: MakeZone) -> None:
    """What stands before altered bytes is stored; the same bytes altered twice hold the link, right ones pass."""
    enterprise, link, flow = await lying(make_memory_zone)
    link.alter = with_column("object", row=2, value=b'{"altered":true}')
    forward = await enterprise.forward()
    first = await flow.turn(forward)
    assert (first.refetch_at, first.through) == (6, 5)
    link.alter = with_column("object", row=0, value=b'{"altered":true}')
    second = await flow.turn(forward)
    assert second.held is not None and second.held.code == "digest_mismatch"
    link.alter = None
    assert (await flow.turn(forward)).through == 9
    flow.reset()


async def test_what_was_asked_behind_altered_bytes_is_let_go(make_memory_zone: MakeZone) -> None:
    """After altered bytes the next answer starts at them again, whatever was asked ahead."""
    enterprise, link, flow = await lying(make_memory_zone)
    plain = with_column("object", row=1, value=b'{"altered":true}')
    link.alter = lambda fetched: plain(fetched) if fetched.start == 4 else fetched
    request, forward = FetchRequest(max_facts=2), await enterprise.forward()
    assert (await flow.turn(forward, request)).refetch_at == 5
    link.alter = None
    await flow_all(flow, enterprise, request, 10)
    assert [entry.origin.offset for entry in await enterprise.received() if entry.origin] == list(range(10))
    flow.reset()


async def test_reset_leaves_nothing_running(make_memory_zone: MakeZone) -> None:
    """After a reset no task of the flow goes on."""
    _, enterprise, _, link, flow = await flowing(make_memory_zone)
    link.may_confirm.clear()
    await flow.turn(await enterprise.forward(), FetchRequest(max_facts=1, wait_seconds=300))
    flow.reset()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 10)


async def test_serving_ahead_moves_no_cursor(make_zone: MakeZone) -> None:
    """An answer starts behind ``after`` or behind the cursor, whichever is further; only a confirmation moves that."""
    plant, _, inbound, link, _ = await flowing(make_zone, 20)
    store, cursors = await plant.store(), (await plant.storage()).cursors
    ahead = await serve(store, cursors, link.consumer, FetchRequest(max_facts=3, after=9))
    assert (ahead.start, ahead.frames[-1].last) == (10, 12)
    await link.confirm(Confirmation(through=14))
    assert (await serve(store, cursors, link.consumer, FetchRequest(after=9))).start == 15
    assert (await serve(store, cursors, link.consumer, FetchRequest(after=19))).frames == []
    assert await plant.committed(inbound.link.consumer) == 14
    with pytest.raises(ForeignLog):
        await serve(store, cursors, link.consumer, FetchRequest(after=20))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "short", "steps"), [("memory", 10, 150), ("log", 2, 60)])
def test_nothing_lost_nothing_twice_in_order(
    name: str, short: int, steps: int, tmp_path: Path, soak_size: Callable[[int, int], int]
) -> None:
    """Under loss, repetition, reordering and death at any step, a flow delivers all facts, once, in order."""
    first = time.time_ns() // 1_000_000 if LONG_SOAK else 1_000
    deaths, count = 0, soak_size(short, short * 500)
    for seed in range(first, first + count):
        campaign = Campaign(seed, BACKENDS[name], tmp_path / str(seed), flowing=True)
        try:
            asyncio.run(campaign.run(steps))
        except BaseException as error:
            error.add_note(f"flowing campaign of seed {seed}, {steps} steps")
            raise
        deaths += campaign.deaths
    assert deaths > count
