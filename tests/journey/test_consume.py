"""What an application gets of its zone: entries in order, a stop at the first failure, what succeeded confirmed."""

import asyncio
from collections.abc import Callable

import pytest
from tests.journey.consuming import consume_once
from tests.journey.zones import STREAM, Zone, connect

from bsfg.errors import ConsumerRetired
from bsfg.fact import Entry
from bsfg.ports import Buffer, ConsumerSpec, GapRecord, StartAt
from bsfg.retention import GapReason
from bsfg.testing.facts import messages

MakeZone = Callable[[str], Zone]
APP = "historian"


class Recorder:
    """A handler that remembers what it saw and fails at chosen offsets."""

    def __init__(self, *fails_at: int) -> None:
        self.seen: list[int | GapRecord] = []
        self.fails_at = set(fails_at)

    async def __call__(self, entry: Entry) -> None:
        if entry.offset in self.fails_at:
            self.fails_at.discard(entry.offset)
            raise RuntimeError(f"cannot take {entry.offset}")
        self.seen.append(entry.offset)

    def gap(self, gap: GapRecord) -> None:
        """Take a gap record."""
        self.seen.append(gap)


async def filled(make_zone: MakeZone, facts: int) -> Zone:
    """Make a zone that received facts and has an application consumer."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    await plant.append(messages(facts))
    await inbound.pull_all()
    await (await enterprise.storage()).cursors.create(ConsumerSpec(APP, STREAM, Buffer.FORWARD))
    return enterprise


async def test_handles_in_order_and_confirms(make_zone: MakeZone) -> None:
    """Entries come one by one in order, a turn takes as many as asked for, and the next goes on after them."""
    zone, handler = await filled(make_zone, 10), Recorder()
    cursors, forward = (await zone.storage()).cursors, await zone.forward()
    first = await consume_once(forward, cursors, APP, handler, max_facts=7)
    assert (first.handled, first.committed, first.failure) == (7, 6, None)
    second = await consume_once(forward, cursors, APP, handler, max_facts=7)
    assert (second.handled, second.committed) == (3, 9)
    assert handler.seen == list(range(10))
    assert (await consume_once(forward, cursors, APP, handler)).handled == 0


async def test_stops_at_the_first_failure(make_zone: MakeZone) -> None:
    """A failing entry stops the turn, what came before it is confirmed, and it comes first in the next turn."""
    zone, handler = await filled(make_zone, 6), Recorder(4)
    cursors, forward = (await zone.storage()).cursors, await zone.forward()
    stopped = await consume_once(forward, cursors, APP, handler)
    assert (stopped.handled, stopped.committed, stopped.failed_offset) == (4, 3, 4)
    assert str(stopped.failure) == "cannot take 4"
    resumed = await consume_once(forward, cursors, APP, handler)
    assert (resumed.handled, resumed.committed, resumed.failed_offset) == (2, 5, None)
    assert handler.seen == list(range(6))


async def test_failure_of_the_first_entry_confirms_nothing(make_zone: MakeZone) -> None:
    """When the first entry fails the cursor stays where it was."""
    zone, handler = await filled(make_zone, 2), Recorder(0)
    stopped = await consume_once(await zone.forward(), (await zone.storage()).cursors, APP, handler)
    assert (stopped.handled, stopped.committed, stopped.failed_offset) == (0, -1, 0)
    assert await zone.committed(APP) == -1


async def test_resumes_after_restart(make_zone: MakeZone) -> None:
    """A consumer goes on where it confirmed, also when zone and application were away."""
    zone, handler = await filled(make_zone, 5), Recorder(3)
    await consume_once(await zone.forward(), (await zone.storage()).cursors, APP, handler)
    await zone.restart()
    await consume_once(await zone.forward(), (await zone.storage()).cursors, APP, handler)
    assert handler.seen == list(range(5))


async def test_a_cancelled_turn_confirms_what_was_handled(make_zone: MakeZone) -> None:
    """A turn that is cancelled confirms what its handler finished and no more: the entry under way comes again."""
    zone = await filled(make_zone, 3)
    started = asyncio.Event()

    async def hang(entry: Entry) -> None:
        if entry.offset == 2:
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(consume_once(await zone.forward(), (await zone.storage()).cursors, APP, hang))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await zone.committed(APP) == 1


async def test_waits_for_new_entries(make_zone: MakeZone) -> None:
    """A consumer may wait; it is handed an entry as soon as one is durable."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    forward, cursors = await enterprise.forward(), (await enterprise.storage()).cursors
    await cursors.create(ConsumerSpec(APP, STREAM, Buffer.FORWARD))
    handler = Recorder()
    waiting = asyncio.create_task(consume_once(forward, cursors, APP, handler, wait_seconds=60))
    await asyncio.sleep(0)
    await plant.append(messages(1))
    await inbound.pull()
    for _ in range(6_000):
        if handler.seen:
            break
        await asyncio.sleep(0.01)
    assert handler.seen == [0]
    waiting.cancel()  # it would wait for a second one


async def test_gap_records_come_in_their_place(make_zone: MakeZone) -> None:
    """A removed range is handed to whoever asks for gap records, and is passed by who does not."""
    zone, handler = await filled(make_zone, 6), Recorder()
    cursors, forward = (await zone.storage()).cursors, await zone.forward()
    await consume_once(forward, cursors, APP, Recorder())
    await forward.truncate_before(4)
    for name in ("careful", "careless"):
        await cursors.create(ConsumerSpec(name, STREAM, Buffer.FORWARD, StartAt.OFFSET, 0, required=False))
    await consume_once(forward, cursors, "careful", handler, on_gap=handler.gap)
    assert isinstance(handler.seen[0], GapRecord)
    assert (handler.seen[0].first, handler.seen[0].last, handler.seen[0].reason) == (0, 3, GapReason.TRUNCATED)
    assert handler.seen[1:] == [4, 5]
    assert (await consume_once(forward, cursors, "careless", Recorder())).committed == 5


async def test_failing_gap_handler_stops_before_the_gap(make_zone: MakeZone) -> None:
    """A gap record that cannot be handled is not confirmed either."""
    zone = await filled(make_zone, 6)
    cursors, forward = (await zone.storage()).cursors, await zone.forward()
    await consume_once(forward, cursors, APP, Recorder())
    await forward.truncate_before(4)
    await cursors.create(ConsumerSpec("late", STREAM, Buffer.FORWARD, StartAt.OFFSET, 0, required=False))

    def refuse(_: GapRecord) -> None:
        raise RuntimeError("no gaps here")

    stopped = await consume_once(forward, cursors, "late", Recorder(), on_gap=refuse)
    assert (stopped.handled, stopped.committed, stopped.failed_offset) == (0, -1, 0)


async def test_retired_consumer_reads_nothing(make_zone: MakeZone) -> None:
    """A consumer that an operator retired is told so."""
    zone = await filled(make_zone, 1)
    cursors = (await zone.storage()).cursors
    await cursors.retire(APP, "replaced")
    with pytest.raises(ConsumerRetired):
        await consume_once(await zone.forward(), cursors, APP, Recorder())
