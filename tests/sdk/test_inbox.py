"""The inbox: entries are safe on the consumer's own disk, confirmed at the node by that, and handled from there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.sdk.test_consumer import Scripted, committed, eventually, fetched, filled
from tests.wire.conftest import Sites

from bsfg.errors import ForeignLog, PermissionRefused
from bsfg.fact import Entry
from bsfg.journey.link import FetchRequest, Refusal
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.sdk.consumer import AsyncConsumer, Consumer
from bsfg.sdk.consuming import ConsumerSettings
from bsfg.sdk.inbox import InboxFeed
from bsfg.testing.facts import batch, messages
from bsfg.testing.ports import free_port

OPTIONS = {"capacity_bytes": 1 << 30, "max_facts": 100, "wait_seconds": 0.01}


async def test_the_node_hears_durable_and_the_inbox_handled(sites: Sites, tmp_path: Path) -> None:
    """Entries are confirmed at the node once they are in the inbox; what is not handled comes again from there."""
    site = await filled(sites, 500)
    inbox = tmp_path / "inbox"
    async with AsyncConsumer("historian", site.grpc_address, inbox=inbox, prefetch_facts=100) as consumer:
        first = [entry async for entry in consumer.entries(idle_seconds=0.5)]
        assert [entry.message for entry in first] == messages(500)
        await eventually(lambda: committed(site), 499)
        for entry in first[:200]:
            consumer.confirm(entry)
    nobody = f"127.0.0.1:{free_port()}"
    async with AsyncConsumer("historian", nobody, inbox=inbox) as consumer:
        rest = [entry async for entry in consumer.entries(idle_seconds=0.1)]
        assert [entry.offset for entry in rest] == list(range(200, 500))
        assert [entry.digest for entry in rest] == [entry.digest for entry in first[200:]]
        assert await consumer.run(lambda entry: None, idle_seconds=0.1) == 300
    async with AsyncConsumer("historian", nobody, inbox=inbox) as consumer:
        assert await consumer.run(lambda entry: None, idle_seconds=0) == 0
        assert consumer.committed == 499


async def test_reading_goes_on_while_the_node_is_away(zone: Zone, tmp_path: Path) -> None:
    """With the node killed, what is in the inbox is still handled; when it is back, the rest comes, nothing twice."""
    async with zone.admin() as admin:
        await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
    async with zone.client() as client:
        await client.append("operational", batch(200, from_zone="plant"))
    handled: list[int] = []
    options: ConsumerSettings = {"inbox": tmp_path / "inbox", "confirm_every_facts": 1}
    async with AsyncConsumer("app-1", endpoint(zone, "consumer"), **options) as consumer:
        entries = consumer.entries()
        entry = await anext(entries)
        while consumer.backlog < 200:
            entry = await anext(consumer.entries())
        await asyncio.to_thread(zone.kill)
        handled.append(entry.offset)
        consumer.confirm(entry)
        entries = consumer.entries()
        while len(handled) < 200:
            entry = await anext(entries)
            handled.append(entry.offset)
            consumer.confirm(entry)
        await asyncio.to_thread(zone.start)
        async with zone.client() as client:
            await client.append("operational", batch(10, first=200, from_zone="plant"))
        while len(handled) < 210:
            entry = await anext(entries)
            handled.append(entry.offset)
            consumer.confirm(entry)
    assert handled == list(range(210))


async def test_gaps_pass_through_the_inbox(tmp_path: Path) -> None:
    """Gap records, of this buffer and of other zones, are kept in the inbox in their place."""
    own = GapRecord(2, 4, GapReason.EVICTED, 5, "no room")
    far = GapRecord(7, 9, GapReason.EXPIRED, 1, "too old", "plant-b")
    answer = fetched(0, 2, gaps=[far], gaps_token="t1")
    gap_answer = fetched(5, 0)
    gap_answer.frames.append(Frame(2, 4, gap=own))  # type: ignore[attr-defined]
    node = Scripted(answer, gap_answer, fetched(5, 1), asyncio.CancelledError())  # type: ignore[arg-type]
    feed = InboxFeed(node, "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await feed.open()
    frames: list[Frame] = []
    gaps: list[GapRecord] = []
    while len(frames) < 3:
        got = await feed.take(FetchRequest(wait_seconds=10))
        frames += got.frames
        gaps += got.gaps
    assert gaps == [far]
    assert [(frame.first, frame.last, frame.gap) for frame in frames] == [(0, 1, None), (2, 4, own), (5, 5, None)]
    feed.rewind()
    again = await feed.take(FetchRequest())
    assert [frame.first for frame in again.frames] == [0, 2, 5]
    await feed.confirm(Confirmation(through=4), [])
    await feed.close()
    reopened = InboxFeed(Scripted(asyncio.CancelledError()), "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await reopened.open()
    got = await reopened.take(FetchRequest())
    assert (got.start, [frame.first for frame in got.frames], list(got.gaps)) == (5, [5], [])
    await reopened.close()


async def test_a_crash_between_inbox_and_node_repeats_nothing(tmp_path: Path) -> None:
    """When the confirmation never reached the node, it gives the same again: the inbox takes only what is new."""
    lost = Scripted(fetched(0, 3))
    lost.confirm = _never  # type: ignore[method-assign]
    feed = InboxFeed(lost, "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await feed.open()
    assert len((await feed.take(FetchRequest(wait_seconds=10))).frames) == 1
    await feed.close()
    node = Scripted(fetched(0, 5), asyncio.CancelledError())  # type: ignore[arg-type]
    again = InboxFeed(node, "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await again.open()
    offsets: list[int] = []
    while len(offsets) < 5:
        for frame in (await again.take(FetchRequest(wait_seconds=10))).frames:
            offsets += range(frame.first, frame.last + 1)
    assert offsets == [0, 1, 2, 3, 4]
    await again.close()
    assert node.confirmed[0][0].through == 4


async def test_what_an_inbox_has_lost_is_a_gap(tmp_path: Path) -> None:
    """The node was told that these entries are safe here, so nobody else can say that they are not."""
    node = Scripted(fetched(0, 2), fetched(2, 2), fetched(4, 2), asyncio.CancelledError())  # type: ignore[arg-type]
    feed = InboxFeed(node, "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await feed.open()
    taken = 0
    while taken < 3:
        taken += len((await feed.take(FetchRequest(wait_seconds=10))).frames)
    await feed.close()
    _damage(tmp_path)
    again = InboxFeed(Scripted(fetched(6, 1), asyncio.CancelledError()), "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await again.open()
    frames: list[Frame] = []
    while len(frames) < 4:
        frames += (await again.take(FetchRequest(wait_seconds=10))).frames
    assert [(frame.first, frame.last) for frame in frames] == [(0, 1), (2, 3), (4, 5), (6, 6)]
    assert [frame.gap.reason if frame.gap else None for frame in frames] == [None, GapReason.DAMAGED, None, None]
    await again.confirm(Confirmation(through=6), [])
    assert again._spool.done == again._spool.end
    await again.close()


def _damage(folder: Path) -> None:
    """Flip bits in the middle of the one segment of a spool."""
    (segment,) = folder.glob("*.spool")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)


async def _never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def test_refusals_reach_the_node(tmp_path: Path) -> None:
    """What the application refuses is told to the node with the next confirmation, also after a restart."""
    feed = InboxFeed(Scripted(fetched(0, 2), asyncio.CancelledError()), "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await feed.open()
    await feed.take(FetchRequest(wait_seconds=10))
    await feed.confirm(Confirmation(through=1), [Refusal(1, 1, "unknown_schema", "v9")])
    await feed.close()
    node = Scripted(fetched(2, 0), asyncio.CancelledError())  # type: ignore[arg-type]
    again = InboxFeed(node, "c", tmp_path, **OPTIONS)  # type: ignore[arg-type]
    await again.open()
    await node.was_confirmed.wait()
    await again.close()
    assert node.confirmed[0][1] == [Refusal(1, 1, "unknown_schema", "v9")]


async def test_a_full_inbox_pauses(sites: Sites, tmp_path: Path) -> None:
    """An inbox has a size: fetching pauses when it is reached, and goes on when entries were handled."""
    site = await filled(sites, 0)
    store = await site.parts.store("operational")
    for first in range(0, 40, 2):
        await store.append(batch(2, first=first, object_bytes=100_000))
    options: ConsumerSettings = {"inbox": tmp_path / "inbox", "inbox_capacity_bytes": 1 << 20, "prefetch_facts": 2}
    async with AsyncConsumer("historian", site.grpc_address, **options) as consumer:
        entries = consumer.entries()
        early = [await anext(entries) for _ in range(5)]
        assert await committed(site) < 39
        for entry in early:
            consumer.confirm(entry)
        async for entry in entries:
            consumer.confirm(entry)
            if entry.offset == 39:
                break
        # What is in the inbox is confirmed at the node a moment after it can be read.
        while await committed(site) < 39:  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


async def test_an_inbox_belongs_to_one_consumer(sites: Sites, tmp_path: Path) -> None:
    """The inbox of another consumer, or of another log, is refused."""
    site = await filled(sites, 2)
    await site.consumer("app-2")
    async with AsyncConsumer("historian", site.grpc_address, inbox=tmp_path / "inbox") as consumer:
        assert await consumer.run(lambda entry: None, idle_seconds=0.5) == 2
    with pytest.raises(ForeignLog, match="inbox of historian"):
        await AsyncConsumer("app-2", site.grpc_address, inbox=tmp_path / "inbox").start()
    other = await filled(sites, 5)
    async with AsyncConsumer("historian", other.grpc_address, inbox=tmp_path / "inbox") as consumer:
        with pytest.raises(ForeignLog, match="the inbox is of"):
            await consumer.run(lambda entry: None, idle_seconds=30)


async def test_what_stops_fetching_is_told_after_the_rest(sites: Sites, tmp_path: Path) -> None:
    """When the node refuses for good, the inbox is read to its end first; then the error is raised."""
    site = await filled(sites, 3)
    inbox = tmp_path / "inbox"
    async with AsyncConsumer("historian", site.grpc_address, inbox=inbox) as consumer:
        await anext(consumer.entries())
        await eventually(lambda: committed(site), 2)
    site.act_as("viewer")
    seen: list[int] = []
    async with AsyncConsumer("historian", site.grpc_address, inbox=inbox) as consumer:
        with pytest.raises(PermissionRefused):
            await consumer.run(lambda entry: seen.append(entry.offset))
    assert seen == [0, 1, 2]


def test_ordinary_programs_may_have_an_inbox(zone: Zone, tmp_path: Path) -> None:
    """The blocking consumer uses an inbox likewise."""

    async def prepare() -> None:
        async with zone.admin() as admin:
            await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
        async with zone.client() as client:
            await client.append("operational", batch(20, from_zone="plant"))

    asyncio.run(prepare())
    seen: list[Entry] = []
    with Consumer("app-1", endpoint(zone, "consumer"), inbox=tmp_path / "inbox") as consumer:
        assert consumer.run(seen.append, idle_seconds=1) == 20
    zone.kill()
    with Consumer("app-1", endpoint(zone, "consumer"), inbox=tmp_path / "inbox") as consumer:
        assert consumer.run(seen.append, idle_seconds=0) == 0
