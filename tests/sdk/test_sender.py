"""The sender: whatever the node and the network do, each fact is stored once and its future tells the truth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.fakenode import FakeNode, FakeStream

from bsfg.batch import FactBatch
from bsfg.errors import (
    BsfgError,
    ConflictingDuplicate,
    IdentityUnknown,
    InvalidArgument,
    InvalidFact,
    MessageTooLarge,
    PeerUnreachable,
    PermissionRefused,
    UnknownStream,
)
from bsfg.fact import Envelope, Fact, Message
from bsfg.sdk.futures import FactFuture, Outcome
from bsfg.sdk.sender import Sender, SendOptions, Shipment, ShipmentPart

EAGER: dict[str, Any] = {"backoff_first_seconds": 0.0, "backoff_max_seconds": 0.0}


def message(id: str, *, body: bytes = b"1", predicate: str = "good", to_zone: str = "enterprise") -> Message:
    """Give a message; the predicate ``bad`` and the zone ``forbidden`` are refused by the fake node."""
    return Message(Envelope("plant", to_zone, 1, id), Fact("a:b", predicate, body))


ROOM_FOR_THREE = FactBatch.from_messages([message("11-1", predicate="good", to_zone="enterprise")] * 3).nbytes + 10


class ListSource:
    """A source that gives the shipments of a list; more may be added until it is ended."""

    def __init__(self, shipments: Sequence[Shipment], *, ended: bool = True) -> None:
        self.queue: asyncio.Queue[Shipment | None] = asyncio.Queue()
        for each in shipments:
            self.queue.put_nowait(each)
        if ended:
            self.queue.put_nowait(None)
        self.expired: list[BsfgError] = []

    async def next(self) -> Shipment | None:
        """Give the next one."""
        return await self.queue.get()

    def expire(self, error: BsfgError) -> None:
        """Note what it was told."""
        self.expired.append(error)


def shipment(messages: Sequence[Message], *, divisible: bool = True, ends: float | None = None) -> Shipment:
    """Make a shipment with an outcome of its own."""
    facts, outcome = FactBatch.from_messages(messages), Outcome()
    outcome.close([each.envelope.message_id for each in messages])
    return Shipment("s", facts, (ShipmentPart(outcome, 0, len(facts)),), facts.nbytes, divisible, ends)


def futures(shipments: Sequence[Shipment]) -> list[FactFuture]:
    """Give the futures of all facts."""
    result = []
    for each in shipments:
        outcome = each.parts[0].outcome
        assert outcome is not None
        result += [FactFuture(outcome, row) for row in range(outcome.count)]
    return result


async def send(node: FakeNode, shipments: Sequence[Shipment], **options: object) -> tuple[ListSource, list[BsfgError]]:
    """Send everything; give the source and the problems that were told."""
    source, problems = ListSource(shipments), list[BsfgError]()
    chosen = SendOptions(**{**EAGER, **options})
    await asyncio.wait_for(Sender(node, "s", source, chosen, problems.append).run(), 60)  # type: ignore[arg-type]
    return source, problems


async def test_shipments_are_sent_in_order_and_answered() -> None:
    """Without trouble every shipment is one frame, and offsets follow the order of sending."""
    node = FakeNode()
    shipments = [shipment([message(f"{number}-{row}") for row in range(3)]) for number in range(20)]
    await send(node, shipments)
    assert [future.result(0).offset for future in futures(shipments)] == list(range(60))
    assert (node.frames, node.streams) == (20, 1)


async def test_a_bad_fact_is_set_apart() -> None:
    """The node refuses a whole frame for one fact; that fact fails, the others are sent again without it."""
    node = FakeNode()
    one = shipment([message("a"), message("b", predicate="bad"), message("c"), message("d", predicate="bad")])
    two = shipment([message("e")])
    await send(node, [one, two])
    a, b, c, d, e = futures([one, two])
    assert isinstance(b.exception(0), InvalidFact)
    assert isinstance(d.exception(0), InvalidFact)
    assert {a.result(0).message_id, c.result(0).message_id, e.result(0).message_id} == {"a", "c", "e"}
    assert sorted(node.order) == ["a", "c", "e"]
    assert [facts.values("message_id") for facts, _ in one.refused] == [["b"], ["d"]]


async def test_facts_for_a_forbidden_zone_are_found_by_halving() -> None:
    """When only some zones are refused, the facts for them fail and the others are stored."""
    node = FakeNode()
    zones = ["enterprise"] * 7 + ["forbidden"] + ["enterprise"] * 5
    made = shipment([message(str(at), to_zone=zone) for at, zone in enumerate(zones)])
    await send(node, [made])
    refused = [at for at, future in enumerate(futures([made])) if future.exception(0) is not None]
    assert refused == [7]
    assert len(node.order) == 12


async def test_a_caller_without_rights_fails_at_once() -> None:
    """When all facts are alike there is nothing to halve: all fail with the node's own words."""
    node = FakeNode()
    made = shipment([message(str(at), to_zone="forbidden") for at in range(100)])
    await send(node, [made])
    assert all(isinstance(future.exception(0), PermissionRefused) for future in futures([made]))
    assert node.frames == 1


async def test_a_frame_that_is_too_large_is_halved() -> None:
    """A node that takes only small messages gets smaller ones; shipments beside the large one are not touched."""
    node = FakeNode(max_frame_bytes=ROOM_FOR_THREE)
    sizes = {"a": 2, "b": 10, "c": 3}
    shipments = [shipment([message(f"{name}{at}") for at in range(size)]) for name, size in sizes.items()]
    await send(node, shipments)
    assert all(future.exception(0) is None for future in futures(shipments))
    assert sorted(node.order) == sorted(f"{name}{at}" for name, size in sizes.items() for at in range(size))


async def test_a_single_fact_that_is_too_large_fails_alone() -> None:
    """A fact that no message can hold fails with the reason."""
    node = FakeNode(max_frame_bytes=0)
    made = shipment([message("a")])
    await send(node, [made])
    assert isinstance(futures([made])[0].exception(0), MessageTooLarge)


async def test_a_callers_batch_is_refused_as_a_whole() -> None:
    """An indivisible shipment is never cut: one bad fact refuses all of it, and only it."""
    node = FakeNode()
    whole = shipment([message("a"), message("b", predicate="bad")], divisible=False)
    after = shipment([message("c")])
    await send(node, [whole, after])
    assert [type(future.exception(0)) for future in futures([whole, after])] == [InvalidFact, InvalidFact, type(None)]
    assert node.order == ["c"]


@pytest.mark.parametrize("error", [IdentityUnknown("who?"), UnknownStream("which?")])
async def test_what_an_operator_must_mend_fails_or_holds(error: BsfgError) -> None:
    """Without an outbox such an error fails the facts; with one they are kept and sent when it is mended."""
    node, made = FakeNode(error=error), shipment([message("a")])
    await send(node, [made])
    assert futures([made])[0].exception(0) is error
    held, problems = shipment([message("b")]), list[BsfgError]()
    source = ListSource([held])

    def told(problem: BsfgError) -> None:
        problems.append(problem)
        if len(problems) == 4:
            node.error = None

    await Sender(node, "s", source, SendOptions(**EAGER, hold=True), told).run()  # type: ignore[arg-type]
    assert futures([held])[0].result(0).message_id == "b"
    assert problems == [error] * 4


async def test_a_deadline_ends_the_attempts() -> None:
    """Facts whose time is up fail with what kept them; the source is told to give up what it still has."""
    node = FakeNode(error=PeerUnreachable("gone"))
    made = shipment([message("a")], ends=time.monotonic() + 0.05)
    source, _ = await send(node, [made], backoff_first_seconds=0.01, backoff_max_seconds=0.02)
    assert isinstance(futures([made])[0].exception(0), PeerUnreachable)
    assert source.expired


async def test_a_silent_node_is_called_again() -> None:
    """A node that takes frames and never answers is left after a while, and the same facts go to the next one."""
    node = FakeNode(silent=True)
    made = shipment([message("a")])
    await send(node, [made], stall_seconds=0.04)
    assert node.renewed >= 1
    assert futures([made])[0].result(0).offset == 0


async def test_a_stream_that_ended_in_silence_is_opened_again() -> None:
    """A node ends idle streams; the next shipment goes over a new one, and nobody is told of a problem."""
    node, problems = FakeNode(), list[BsfgError]()
    first, second = shipment([message("a")]), shipment([message("b")])
    source = ListSource([first], ended=False)
    task = asyncio.create_task(Sender(node, "s", source, SendOptions(), problems.append).run())  # type: ignore[arg-type]
    await futures([first])[0]
    node.open[0].broken(PeerUnreachable("idle for long"))
    source.queue.put_nowait(second)
    source.queue.put_nowait(None)
    await asyncio.wait_for(task, 60)
    assert futures([second])[0].result(0).offset == 1
    assert (problems, node.streams) == ([], 2)


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_nothing_is_lost_or_doubled_in_a_storm(seed: int, max_in_flight: int) -> None:
    """Streams break before and after storing, frames are refused as the buffer is full, some facts are bad.

    In the end every good fact is stored once, every future says so and every bad one says why. With one shipment in
    flight nothing has changed its order, so that of two facts with one id the first is stored.
    """
    random = Random(seed)
    node = FakeNode(random, trouble=0.4, max_frame_bytes=random.choice([ROOM_FOR_THREE, 1000, 10**6]))
    shipments, good, expected = [], list[str](), list[type[object]]()
    for number in range(random.randint(1, 12)):
        messages = []
        for row in range(random.randint(1, 5)):
            id, kind = f"{number}-{row}", random.random()
            if max_in_flight == 1 and kind < 0.1 and good:
                messages.append(message(random.choice(good), body=b"other"))
                expected.append(ConflictingDuplicate)
            elif kind < 0.2:
                messages.append(message(id, predicate="bad"))
                expected.append(InvalidFact)
            elif kind < 0.3:
                messages.append(message(id, to_zone="forbidden"))
                expected.append(PermissionRefused)
            else:
                messages.append(message(id))
                good.append(id)
                expected.append(type(None))
        shipments.append(shipment(messages))

    async def storm() -> None:
        await send(node, shipments, max_in_flight=max_in_flight)

    asyncio.run(storm())
    assert [type(future.exception(0)) for future in futures(shipments)] == expected
    assert sorted(node.order) == sorted(good)
    if max_in_flight == 1:
        assert node.order == good
    for future in futures(shipments):
        if future.exception(0) is None:
            assert node.order[future.result(0).offset] == future.result(0).message_id


def test_at_least_one_is_in_flight() -> None:
    """A sender that may have nothing in flight would never send."""
    with pytest.raises(InvalidArgument):
        SendOptions(max_in_flight=0)


class Defective(FakeNode):
    """A link with a defect that nobody foresaw: it shows itself as often as it is told."""

    left = 0

    def append_stream(self, stream: str, *, window_frames: int) -> FakeStream:
        """Fail as no part of ours should."""
        if self.left:
            self.left -= 1
            raise RuntimeError("nobody foresaw this")
        return super().append_stream(stream, window_frames=window_frames)


async def test_a_defect_fails_the_facts_and_not_the_sender() -> None:
    """An unforeseen error must not leave futures waiting for ever: the fact fails with it, the next one is sent."""
    node, one, two = Defective(), shipment([message("a")]), shipment([message("b")])
    node.left = 1
    source = ListSource([one], ended=False)
    running = asyncio.create_task(Sender(node, "s", source, SendOptions(**EAGER)).run())  # type: ignore[arg-type]
    with pytest.raises(BsfgError, match="nobody foresaw this") as caught:
        await asyncio.wait_for(futures([one])[0], 10)
    assert caught.value.code == "internal"
    source.queue.put_nowait(two)
    source.queue.put_nowait(None)
    await asyncio.wait_for(running, 10)
    assert futures([two])[0].result(0).message_id == "b"


async def test_a_defect_holds_what_lies_in_an_outbox() -> None:
    """Facts in an outbox are sent when the defect has passed; each attempt is told of."""
    node, made, problems = Defective(), shipment([message("a")]), list[BsfgError]()
    node.left = 3
    options = SendOptions(**EAGER, hold=True)
    await asyncio.wait_for(Sender(node, "s", ListSource([made]), options, problems.append).run(), 10)  # type: ignore[arg-type]
    assert futures([made])[0].result(0).message_id == "a"
    assert [problem.code for problem in problems] == ["internal"] * 3


async def test_a_source_that_fails_is_asked_again() -> None:
    """What cannot be read now may be readable later: the sender goes on, and what it had in flight is not harmed."""

    class Flaky(ListSource):
        broken = 2

        async def next(self) -> Shipment | None:
            if self.broken and self.queue.qsize() == 2:
                self.broken -= 1
                raise OSError(5, "the disk had a bad moment")
            return await super().next()

    one, two = shipment([message("a")]), shipment([message("b")])
    source, problems = Flaky([one, two]), list[BsfgError]()
    await asyncio.wait_for(
        Sender(FakeNode(), "s", source, SendOptions(**EAGER), problems.append).run(),  # type: ignore[arg-type]
        10,
    )
    assert [future.result(0).message_id for future in futures([one, two])] == ["a", "b"]
    assert len(problems) == 2
