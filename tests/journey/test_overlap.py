"""Answers that are handed over while earlier ones are still being stored, as over a call to a node elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.journey.test_flow import StepLink, flow_all, settled
from tests.journey.zones import Zone, connect

from bsfg.errors import BufferFull, PeerUnreachable
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.journey.pull import Flow
from bsfg.journey.receive import Put, StoredAnswer
from bsfg.ports import ForwardBuffer
from bsfg.testing.facts import messages

MakeZone = Callable[[str], Zone]
TEN = FetchRequest(max_facts=10)


class Overlapping(Flow):
    """A flow whose stores wait in a line: they are done in the order of handing over, when the test says so."""

    stores_at_once = 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.handed_over: list[int] = []
        self.line: deque[asyncio.Future[None]] = deque()
        self.alone: set[int] = set()
        self.open = False

    async def hand_over(
        self, put: Put, target: ForwardBuffer, clock_trusted: bool
    ) -> Coroutine[Any, Any, StoredAnswer]:
        """Get into the line."""
        self.handed_over.append(put.through)
        before = self.line[-1] if self.line else None
        ticket = asyncio.get_running_loop().create_future()
        self.line.append(ticket)
        if self.open:
            ticket.set_result(None)
        work = await super().hand_over(put, target, clock_trusted)

        async def store() -> StoredAnswer:
            try:
                await ticket
                if before is not None:
                    await asyncio.wait([before])
            except BaseException:
                work.close()
                raise
            return await work

        return store()

    def waits_its_turn(self, put: Put) -> bool:
        """Some answers are costly."""
        return put.through in self.alone

    def let(self, count: int = 1) -> None:
        """Let the oldest stores happen."""
        waiting = [ticket for ticket in self.line if not ticket.done()]
        for ticket in waiting[:count]:
            ticket.set_result(None)


async def overlapping(make_zone: MakeZone, facts: int = 100) -> tuple[Zone, Zone, StepLink, Overlapping]:
    """Make a plant with facts, and an enterprise whose stores overlap."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    link = StepLink(plant, inbound.link.consumer, inbound.link.carriage)
    await plant.append(messages(facts))
    flow = Overlapping(link, inbound.memory, inbound.rules, clock=enterprise.clock, confirm_every_seconds=0.0)
    return plant, enterprise, link, flow


async def quiet() -> None:
    """Let everything happen that can."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_answers_are_handed_over_ahead_in_order(make_memory_zone: MakeZone) -> None:
    """Three answers are under way before the first is stored, in order; each is confirmed when it is stored."""
    plant, enterprise, link, flow = await overlapping(make_memory_zone)
    forward = await enterprise.forward()
    turn = asyncio.create_task(flow.turn(forward, TEN))
    await settled(lambda: len(flow.handed_over) == 3)
    await quiet()
    assert flow.handed_over == [9, 19, 29]
    assert not turn.done() and link.confirmations == []
    flow.let()
    assert (await turn).through == 9
    await flow.confirmed()
    assert await plant.committed(link.consumer) == 9
    flow.open = True
    flow.let(10)
    # Several answers may be stored before the first of them is told of.
    while (await flow.turn(forward, TEN)).through != 99:
        pass
    await flow.confirmed()
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(100)]
    assert await plant.committed(link.consumer) == 99
    flow.reset()


async def test_a_failed_store_lets_go_of_those_behind_it(make_memory_zone: MakeZone) -> None:
    """When a store fails nothing behind it is confirmed, and all of it is fetched and stored again, once."""
    plant, enterprise, link, flow = await overlapping(make_memory_zone, 40)
    forward = await enterprise.forward()
    turn = asyncio.create_task(flow.turn(forward, TEN))
    await settled(lambda: len(flow.handed_over) == 3)
    flow.line[0].set_exception(PeerUnreachable("the node is away"))
    flow.let(2)
    with pytest.raises(PeerUnreachable):
        await turn
    assert link.confirmations == []
    flow.open = True
    await flow_all(flow, enterprise, TEN, 40)
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(40)]
    assert await plant.committed(link.consumer) == 39
    flow.reset()


async def test_a_full_buffer_pauses_with_others_under_way(make_memory_zone: MakeZone) -> None:
    """When there is no room for an answer the turn says so; those behind it are let go."""
    _, enterprise, link, flow = await overlapping(make_memory_zone, 40)
    forward = await enterprise.forward()
    turn = asyncio.create_task(flow.turn(forward, TEN))
    await settled(lambda: len(flow.handed_over) == 3)
    flow.line[0].set_exception(BufferFull("full"))
    progress = await turn
    assert isinstance(progress.paused, BufferFull) and progress.backlog == 40
    assert link.confirmations == []
    flow.open = True
    await flow_all(flow, enterprise, TEN, 40)
    flow.reset()


async def test_a_costly_answer_waits_until_all_before_it_is_stored(make_memory_zone: MakeZone) -> None:
    """An answer that waits its turn is handed over alone, and what comes after it follows."""
    _, enterprise, _, flow = await overlapping(make_memory_zone, 40)
    flow.alone = {19}
    forward = await enterprise.forward()
    turn = asyncio.create_task(flow.turn(forward, TEN))
    await settled(lambda: flow.handed_over == [9])
    await quiet()
    assert flow.handed_over == [9]
    flow.let()
    await turn
    turn = asyncio.create_task(flow.turn(forward, TEN))
    await settled(lambda: flow.handed_over == [9, 19, 29, 39])
    flow.open = True
    flow.let(5)
    await turn
    await flow_all(flow, enterprise, TEN, 40)
    flow.reset()


async def test_a_failed_question_is_told_after_what_came_before_it(make_memory_zone: MakeZone) -> None:
    """When the sender goes away, answers that were handed over before are still stored and confirmed."""
    plant, enterprise, link, flow = await overlapping(make_memory_zone, 10)
    forward, waiting = await enterprise.forward(), FetchRequest(max_facts=10, wait_seconds=300)
    refused = asyncio.Event()

    async def fetch(request: FetchRequest) -> Fetched:
        if request.after is None:
            return await StepLink.fetch(link, request)
        refused.set()
        raise PeerUnreachable("cut")

    link.fetch = fetch  # type: ignore[method-assign]
    turn = asyncio.create_task(flow.turn(forward, waiting))
    await refused.wait()
    await quiet()
    assert not turn.done()
    flow.let()
    assert (await turn).through == 9
    await flow.confirmed()
    assert await plant.committed(link.consumer) == 9
    with pytest.raises(PeerUnreachable):
        await flow.turn(forward, waiting)


async def test_a_question_waits_at_the_sender_while_an_answer_is_stored(make_memory_zone: MakeZone) -> None:
    """In a quiet stream the sender is asked for what comes next before the last answer is stored."""
    plant, enterprise, link, flow = await overlapping(make_memory_zone, 5)
    forward, waiting = await enterprise.forward(), FetchRequest(wait_seconds=300)
    turn = asyncio.create_task(flow.turn(forward, waiting))
    await settled(lambda: link.fetches == 2)
    assert link.asked[1].after == 4
    await plant.append(messages(5, first=5))
    await settled(lambda: flow.handed_over == [4, 9])
    flow.let(2)
    assert (await turn).through == 4
    assert (await flow.turn(forward, waiting)).through == 9
    await flow.confirmed()
    assert await plant.committed(link.consumer) == 9
    flow.reset()
