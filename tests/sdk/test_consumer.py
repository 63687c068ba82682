"""Consumers against real nodes: in order, at least once, gaps told, and nothing confirmed that was not handled."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from random import Random

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.wire.conftest import Sites
from tests.wire.site import Site

from bsfg.errors import (
    BsfgError,
    DigestMismatch,
    ForeignLog,
    InvalidArgument,
    PeerUnreachable,
    UnknownConsumer,
)
from bsfg.fact import Entry
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.sdk.consumer import AsyncConsumer, Consumer
from bsfg.sdk.consuming import ConsumerCore, ConsumerOptions, ConsumerSettings
from bsfg.testing.facts import batch, message, messages, sealed
from bsfg.testing.ports import free_port


async def filled(sites: Sites, count: int, **settings: object) -> Site:
    """Open a site with a consumer called historian and some facts in its store buffer."""
    site = await sites(**settings)
    await site.consumer("historian")
    if count:
        await (await site.parts.store("operational")).append(batch(count))
    return site


async def committed(site: Site, consumer: str = "historian") -> int:
    """Ask the node how far a consumer is confirmed."""
    return (await site.parts.storage.cursors.checkpoint(consumer)).committed


async def test_entries_come_in_order_and_are_confirmed(sites: Sites) -> None:
    """A consumer gets every entry once, in order; what it confirmed does not come again."""
    site = await filled(sites, 700)
    async with AsyncConsumer("historian", site.grpc_address, prefetch_facts=100) as consumer:
        seen = []
        async for entry in consumer.entries(idle_seconds=0):
            seen.append(entry)
            consumer.confirm(entry)
        assert [entry.offset for entry in seen] == list(range(700))
        assert [entry.message for entry in seen] == messages(700)
        assert (consumer.committed, consumer.backlog) == (699, 0)
    assert await committed(site) == 699
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        assert [entry async for entry in consumer.entries(idle_seconds=0)] == []


async def test_what_is_not_confirmed_comes_again(sites: Sites) -> None:
    """Looking without confirming moves nothing: a new iteration and a new consumer begin at the same entry."""
    site = await filled(sites, 50)
    async with AsyncConsumer("historian", site.grpc_address, prefetch_facts=10) as consumer:
        for _ in range(2):
            assert [entry.offset async for entry in consumer.entries(idle_seconds=0)] == list(range(50))
    assert await committed(site) == -1


async def test_a_handler_confirms_what_it_finished(sites: Sites) -> None:
    """A handler stops at the first failure, which is raised; the failed entry comes first the next time."""
    site = await filled(sites, 30)
    handled: list[int] = []

    async def handle(entry: Entry) -> None:
        if entry.offset == 12 and handled.count(11) == 1 and len(handled) == 12:
            raise RuntimeError("the database is away")
        handled.append(entry.offset)

    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        with pytest.raises(RuntimeError, match="database"):
            await consumer.run(handle, idle_seconds=0)
        assert await committed(site) == 11
        handled.append(-1)
        assert await consumer.run(handle, idle_seconds=0) == 18
    assert handled == [*range(12), -1, *range(12, 30)]
    assert await committed(site) == 29


async def test_live_facts_arrive_while_the_consumer_waits(sites: Sites) -> None:
    """A consumer that has everything waits at the node and gets a new fact as soon as it is durable."""
    site = await filled(sites, 1)
    arrived: asyncio.Queue[Entry] = asyncio.Queue()
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        running = asyncio.create_task(consumer.run(arrived.put))
        assert (await arrived.get()).offset == 0
        for number in range(1, 20):
            await (await site.parts.store("operational")).append(batch(1, first=number))
            assert (await arrived.get()).offset == number
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_out_of_order_confirmations(sites: Sites) -> None:
    """Entries may be finished in any order: the cursor waits for the first hole, and skips nothing."""
    site = await filled(sites, 20)
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        entries = [entry async for entry in consumer.entries(idle_seconds=0)]
        for entry in entries[5:10]:
            consumer.confirm(entry)
        await consumer.flush()
        assert await committed(site) == -1
        rest = [entry.offset async for entry in consumer.entries(idle_seconds=0)]
        assert rest == [*range(5), *range(10, 20)]
        consumer.confirm_through(4)
        await consumer.flush()
        assert await committed(site) == 9
        with pytest.raises(InvalidArgument, match="not handed out"):
            consumer.confirm(20)


async def test_a_late_confirmation_counts(sites: Sites) -> None:
    """What was handed out may be confirmed after the consumer has gone back to the beginning."""
    site = await filled(sites, 20)
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        entries = [entry async for entry in consumer.entries(idle_seconds=0)]
        assert (await anext(consumer.entries())).offset == 0
        consumer._started().rewind()
        consumer.confirm_through(entries[-1])
        assert [entry async for entry in consumer.entries(idle_seconds=0)] == []
    assert await committed(site) == 19


async def test_facts_that_wait_for_confirmation_do_not_stop_new_ones(sites: Sites) -> None:
    """While old entries are still being handled, new ones are given."""
    site = await filled(sites, 5)
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        entries = consumer.entries()
        first = [await anext(entries) for _ in range(5)]
        await (await site.parts.store("operational")).append(batch(1, first=5))
        assert (await anext(entries)).offset == 5
        waiting = asyncio.ensure_future(anext(entries))
        for entry in first:
            consumer.confirm(entry)
        await (await site.parts.store("operational")).append(batch(1, first=6))
        assert (await waiting).offset == 6
        assert consumer.committed == 4


async def test_confirmations_are_sent_without_asking(sites: Sites) -> None:
    """Confirmations go to the node by count and by time, while the application does something else."""
    site = await filled(sites, 10)
    options: ConsumerSettings = {"confirm_every_facts": 3, "confirm_interval_seconds": 3600.0}
    async with AsyncConsumer("historian", site.grpc_address, **options) as consumer:
        entries = [entry async for entry in consumer.entries(idle_seconds=0)]
        for entry in entries[:3]:
            consumer.confirm(entry)
        await eventually(lambda: committed(site), 2)
        consumer.confirm(entries[3])
    assert await committed(site) == 3
    async with AsyncConsumer("historian", site.grpc_address, confirm_interval_seconds=0.01) as consumer:
        async for entry in consumer.entries(idle_seconds=0):
            consumer.confirm(entry)
            break
        await eventually(lambda: committed(site), 4)


async def eventually(ask: Callable[[], Awaitable[int]], wanted: int) -> None:
    """Wait until an answer is as it must become."""
    async with asyncio.timeout(30):
        while True:
            if await ask() == wanted:
                return
            await asyncio.sleep(0.005)


async def test_gaps_are_never_silent(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    """A range that is not there is told in its place: as an item, to a callback, or in the log."""
    site = await sites()
    cursors, store = site.parts.storage.cursors, await site.parts.store("operational")
    for name in ("app-items", "app-callback", "historian"):
        await cursors.create(ConsumerSpec(name, "operational", required=False))
    await cursors.create(ConsumerSpec("reader", "operational"))
    await store.append(batch(10))
    await cursors.commit("reader", Confirmation(through=6))
    await store.truncate_before(7)
    async with AsyncConsumer("app-items", site.grpc_address) as consumer:
        items = [item async for item in consumer.items(idle_seconds=0)]
        assert [item.offset if isinstance(item, Entry) else (item.first, item.last) for item in items] == [
            (0, 6),
            7,
            8,
            9,
        ]
        for item in items:
            consumer.confirm(item)
    assert await committed(site, "app-items") == 9
    order: list[object] = []
    async with AsyncConsumer("app-callback", site.grpc_address, on_gap=order.append) as consumer:
        await consumer.run(lambda entry: order.append(entry.offset), idle_seconds=0)
    assert isinstance(order[0], GapRecord)
    assert (order[0].reason, order[1:]) == (GapReason.TRUNCATED, [7, 8, 9])
    assert await committed(site, "app-callback") == 9
    with caplog.at_level(logging.WARNING, "bsfg.consumer"):
        async with AsyncConsumer("historian", site.grpc_address) as consumer:
            assert await consumer.run(lambda entry: None, idle_seconds=0) == 3
    assert "offsets 0 to 6 are not there: truncated" in caplog.text
    assert await committed(site) == 9


async def test_a_gap_that_its_callback_does_not_bear_stops_the_consumer(sites: Sites) -> None:
    """A callback that raises is a failure like any other: nothing from there on is confirmed."""
    site = await sites()
    cursors, store = site.parts.storage.cursors, await site.parts.store("operational")
    await cursors.create(ConsumerSpec("historian", "operational", required=False))
    await cursors.create(ConsumerSpec("reader", "operational"))
    await store.append(batch(3))
    await cursors.commit("reader", Confirmation(through=1))
    await store.truncate_before(2)

    def alarm(gap: GapRecord) -> None:
        raise RuntimeError(f"{gap.first} to {gap.last} are lost")

    async with AsyncConsumer("historian", site.grpc_address, on_gap=alarm) as consumer:
        with pytest.raises(RuntimeError, match="0 to 1 are lost"):
            await consumer.run(lambda entry: None, idle_seconds=0)
    assert await committed(site) == -1


async def test_an_entry_that_cannot_be_handled_is_refused(sites: Sites) -> None:
    """A refusal passes the entry and leaves a gap record with the reason at the node."""
    site = await filled(sites, 3)
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        async for entry in consumer.entries(idle_seconds=0):
            if entry.offset == 1:
                consumer.refuse(entry, "unknown_schema", "v9 is not known here")
            else:
                consumer.confirm(entry)
        with pytest.raises(InvalidArgument, match="needs a reason"):
            consumer.refuse(entry, " ")
    assert await committed(site) == 2
    (gap,) = await (await site.parts.store("operational")).gaps()
    assert (gap.first, gap.last, gap.reason) == (1, 1, GapReason.QUARANTINED)
    assert "unknown_schema" in gap.detail
    assert "v9" in gap.detail


async def test_an_absent_node_is_waited_for(zone: Zone) -> None:
    """A consumer goes on after the node was killed, with what it had not confirmed."""
    async with zone.admin() as admin:
        await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
    async with zone.client() as client:
        await client.append("operational", batch(300, from_zone="plant"))
    seen: list[int] = []
    enough = asyncio.Event()

    def handle(entry: Entry) -> None:
        seen.append(entry.offset)
        if entry.offset == 599:
            enough.set()

    async with AsyncConsumer("app-1", endpoint(zone, "consumer"), confirm_every_facts=10) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        for first in (300, 400, 500):
            await asyncio.to_thread(zone.kill)
            await asyncio.to_thread(zone.start)
            async with zone.client() as client:
                await client.append("operational", batch(100, first=first, from_zone="plant"))
        await asyncio.wait_for(enough.wait(), 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert sorted(set(seen)) == list(range(600))
    assert seen == sorted(seen)


async def test_patience_can_have_an_end() -> None:
    """With a deadline an absent node is an error, and what it is waited for is told meanwhile."""
    problems: list[BsfgError] = []
    options: ConsumerSettings = {"deadline_seconds": 0.2, "on_problem": problems.append}
    async with AsyncConsumer("historian", f"127.0.0.1:{free_port()}", **options) as consumer:
        with pytest.raises(PeerUnreachable):
            await anext(consumer.entries())
    assert problems


async def test_what_cannot_pass_is_raised(sites: Sites) -> None:
    """An unknown consumer is an error at once."""
    site = await sites()
    async with AsyncConsumer("app-nobody", site.grpc_address) as consumer:
        with pytest.raises(UnknownConsumer):
            await anext(consumer.entries())
    with pytest.raises(InvalidArgument, match="not started"):
        AsyncConsumer("x", site.grpc_address).confirm(1)
    with pytest.raises(InvalidArgument, match="at least one"):
        AsyncConsumer("x", site.grpc_address, prefetch_facts=0)


def test_ordinary_programs_need_no_event_loop(zone: Zone) -> None:
    """The blocking consumer iterates, confirms from other threads, runs handlers, and ends when it is closed."""

    async def prepare() -> None:
        async with zone.admin() as admin:
            await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
        async with zone.client() as client:
            await client.append("operational", batch(1000, from_zone="plant"))

    asyncio.run(prepare())
    with Consumer("app-1", endpoint(zone, "consumer")) as consumer:
        first = [entry for entry, _ in zip(consumer, range(300), strict=False)]
        threads = [threading.Thread(target=consumer.confirm, args=(entry,)) for entry in Random(1).sample(first, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        consumer.flush(60)
        assert consumer.committed == 299
        assert consumer.run(lambda entry: None, idle_seconds=0) == 700
        assert (consumer.committed, consumer.backlog) == (999, 0)
        begun, ended = threading.Event(), threading.Event()
        core = consumer._core
        assert core is not None
        rewind = core.rewind

        def rewound() -> None:
            rewind()
            begun.set()

        def wait() -> None:
            assert list(consumer) == []
            ended.set()

        core.rewind = rewound  # type: ignore[method-assign]
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert begun.wait(60)
        consumer.close()
        assert ended.wait(60)
        waiting.join()
    consumer.close()


class Scripted:
    """A feed that answers as it is told."""

    def __init__(self, *answers: Fetched | Exception) -> None:
        self.answers = list(answers)
        self.confirmed: list[tuple[Confirmation, list[Refusal]]] = []
        self.was_confirmed = asyncio.Event()

    async def open(self) -> None:
        """Nothing is to be opened."""

    def rewind(self) -> None:
        """Nothing is to be rewound."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Give the next answer."""
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def confirm(self, confirmation: Confirmation, refusals: list[Refusal]) -> None:
        """Note what is confirmed."""
        self.confirmed.append((confirmation, list(refusals)))
        self.was_confirmed.set()

    async def close(self) -> None:
        """Nothing is to be closed."""


def fetched(start: int, count: int, log_id: str = "log", **more: object) -> Fetched:
    """Give an answer with some entries from an offset on."""
    import numpy as np

    from bsfg.batch import EntryBatch

    facts = sealed([message(str(number), number) for number in range(start, start + count)])
    entries = EntryBatch.of(facts.record_batch, np.arange(start, start + count), 1)
    frames = [Frame(start, start + count - 1, entries)] if count else []
    return Fetched(log_id, start, start + count, b"", frames, **more)  # type: ignore[arg-type]


async def core(*answers: Fetched | Exception, **options: object) -> tuple[ConsumerCore, Scripted]:
    """Give an engine with a scripted feed."""
    feed = Scripted(*answers)
    made = ConsumerCore(feed, ConsumerOptions(**options))  # type: ignore[arg-type]
    await made.open()
    return made, feed


async def test_what_is_confirmed_while_others_are_sent_is_sent_too() -> None:
    """By itself and soon, although nothing else is confirmed after it."""
    made, feed = await core(fetched(0, 2), confirm_interval_seconds=0.01)
    await made.take(0.0)
    sending, go_on, send = asyncio.Event(), asyncio.Event(), feed.confirm

    async def slow(confirmation: Confirmation, refusals: list[Refusal]) -> None:
        sending.set()
        await go_on.wait()
        await send(confirmation, refusals)

    feed.confirm = slow  # type: ignore[method-assign]
    made.confirm(0, 0)
    await sending.wait()
    made.confirm(1, 1)
    go_on.set()
    async with asyncio.timeout(30):
        while len(feed.confirmed) < 2:
            await feed.was_confirmed.wait()
            feed.was_confirmed.clear()
    assert [each.through for each, _ in feed.confirmed] == [0, 1]
    await made.close(1.0)


async def test_batches_keep_to_their_bounds(sites: Sites) -> None:
    """In order and whole: at most so many facts and bytes, and what was over comes first in the next one."""
    site = await filled(sites, 700)
    async with AsyncConsumer("historian", site.grpc_address, prefetch_facts=300) as consumer:
        assert consumer.source == ("", "")
        found = [items async for items in consumer.batches(90, idle_seconds=0)]
        assert [len(items) for items in found] == [90] * 7 + [70]
        assert [item.offset for items in found for item in items if isinstance(item, Entry)] == list(range(700))
        assert consumer.source == ("operational", (await site.parts.store("operational")).log_id)
        small = [items async for items in consumer.batches(90, 1_000, idle_seconds=0)]
        assert sum(map(len, small)) == 700
        assert {len(items) for items in small} == {2}
        consumer.confirm_through(small[-1][-1])
    assert await committed(site) == 699


@pytest.mark.parametrize(("closed_at", "handled"), [(3, 3), (9, 10)])
def test_a_handler_ends_when_another_thread_closes_the_consumer(zone: Zone, closed_at: int, handled: int) -> None:
    """Closing is no failure, with an entry in hand or while waiting for one; what is not confirmed comes again."""

    async def prepare() -> None:
        async with zone.admin() as admin:
            await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
        async with zone.client() as client:
            await client.append("operational", batch(10, from_zone="plant"))

    asyncio.run(prepare())
    consumer = Consumer("app-1", endpoint(zone, "consumer"))
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    counts: list[int] = []

    def handle(entry: Entry) -> None:
        if entry.offset == closed_at:
            reached.set()
            assert closed_at == 9 or go_on.wait(60)

    def work() -> None:
        try:
            counts.append(consumer.run(handle))
        finally:
            ended.set()

    running = threading.Thread(target=work)
    running.start()
    assert reached.wait(60)
    while closed_at == 9 and consumer.committed < 9:
        pass
    consumer.close()
    go_on.set()
    assert ended.wait(60)
    running.join()
    assert counts == [handled]
    with Consumer("app-1", endpoint(zone, "consumer")) as again:
        assert again.run(lambda entry: None, idle_seconds=0) == 10 - handled


async def test_another_log_stops_the_consumer() -> None:
    """A node that was replaced by one with another history is noticed."""
    engine, _ = await core(fetched(0, 2), fetched(2, 1, "other"))
    assert len(await engine.take(0)) == 2
    with pytest.raises(ForeignLog):
        await engine.take(0)
    await engine.close(1)


async def test_gap_records_of_other_zones_are_given_once() -> None:
    """What other zones reported missing is given as items, in no place of this buffer and without a confirmation."""
    far = GapRecord(7, 9, GapReason.EXPIRED, 1, "too old", "plant-b")
    engine, feed = await core(fetched(0, 1, gaps=[far], gaps_token="t"), fetched(1, 0, gaps_token="t"))
    items = await engine.take(0)
    items += await engine.take(0)
    assert far in items
    assert len(items) == 2
    engine.confirm(0, 0)
    await engine.close(1)
    assert [confirmation.through for confirmation, _ in feed.confirmed] == [0]


async def test_somebody_else_may_confirm_for_a_consumer() -> None:
    """When an operator moves the cursor on, the consumer follows."""
    engine, _ = await core(fetched(0, 2), fetched(10, 1))
    assert len(await engine.take(0)) == 2
    (entry,) = await engine.take(0)
    assert isinstance(entry, Entry)
    assert entry.offset == 10
    assert engine.committed == 9
    await engine.close(1)


async def test_a_confirmation_that_fails_for_good_is_told(sites: Sites) -> None:
    """When the node refuses the confirmations for good, whoever asks for more is told."""
    site = await filled(sites, 3)
    consumer = AsyncConsumer("historian", site.grpc_address, confirm_interval_seconds=0.01)
    await consumer.start()
    entries = [entry async for entry in consumer.entries(idle_seconds=0)]
    await site.parts.storage.cursors.retire("historian", "replaced")
    consumer.confirm(entries[0])
    with pytest.raises(BsfgError, match="retired"):
        async with asyncio.timeout(30):
            await consumer.run(lambda entry: None)
    with pytest.raises(BsfgError, match="retired"):
        await consumer.close()


async def test_altered_entries_are_not_handed_out(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry without its digest is fetched again, and if it stays so, it is an error."""
    from bsfg.sdk import consuming

    site = await filled(sites, 3)
    wrong = [[1], [], [1], [1]]

    def mismatches(entries: object) -> object:
        import numpy as np

        return np.array(wrong.pop(0), dtype=np.int64)

    monkeypatch.setattr(consuming, "digest_mismatches", mismatches)
    async with AsyncConsumer("historian", site.grpc_address) as consumer:
        assert (await anext(consumer.entries())).offset == 0
        with pytest.raises(DigestMismatch, match=r"\[1\]"):
            await anext(consumer.entries())


async def test_an_interrupted_iteration_can_be_taken_up(sites: Sites) -> None:
    """Whoever leaves the loop and comes back gets the first entry that is not confirmed."""
    site = await filled(sites, 600)
    async with AsyncConsumer("historian", site.grpc_address, prefetch_facts=50) as consumer:
        seen: list[int] = []
        random = Random(3)
        while len(seen) < 600:
            stop = random.randint(1, 90)
            async for entry in consumer.entries(idle_seconds=0):
                seen.append(entry.offset)
                consumer.confirm(entry)
                stop -= 1
                if not stop:
                    break
        assert seen == list(range(600))
    assert await committed(site) == 599
