"""The outbox: accepted facts survive the producer, the node and both, and leave in their order."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from random import Random

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.syncs import noted_syncs
from tests.wire.conftest import Sites

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, ConflictingDuplicate, FolderLocked, InvalidArgument, InvalidFact, StorageClosed
from bsfg.fact import Fact
from bsfg.ports import Buffer, Result
from bsfg.sdk.core import ProducerSettings
from bsfg.sdk.futures import FactFuture, Outcome
from bsfg.sdk.intake import Packed
from bsfg.sdk.outbox import Outbox, RefusedFact, refused_facts
from bsfg.sdk.producer import AsyncProducer, Producer
from bsfg.sdk.spool import Spooled
from bsfg.testing.facts import altered, message, messages
from bsfg.testing.ports import free_port

KILLS = 6


def nowhere() -> str:
    """Give an address where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def test_no_folder_above_an_accepted_fact_can_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder on the way to a new spool has its name on the disk before a fact is in it."""
    synced, folder = noted_syncs(monkeypatch), tmp_path / "made" / "outbox"
    outbox = Outbox(folder)
    outbox.lane("operational")
    assert {str(each) for each in (tmp_path, tmp_path / "made", folder, folder / "streams")} <= set(synced)
    outbox.close()


async def test_facts_wait_for_the_node_over_restarts(sites: Sites, tmp_path: Path) -> None:
    """What was accepted while the node was away is sent by the next producer, before anything new, in order."""
    facts = messages(30)
    for start in (0, 10):
        async with AsyncProducer(nowhere(), stream="operational", outbox=tmp_path / "outbox") as producer:
            futures = [await producer.send(each) for each in facts[start : start + 10]]
            await asyncio.gather(*(future.accepted() for future in futures))
            assert not any(future.done() for future in futures)
        with pytest.raises(StorageClosed, match="in the outbox"):
            await futures[0]
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational", outbox=tmp_path / "outbox") as producer:
        futures = [await producer.send(each) for each in facts[20:]]
        await producer.drain()
        assert [(await future).offset for future in futures] == list(range(20, 30))
    buffer = await site.parts.store("operational")
    stored = [entry async for frame in buffer.replay(0) if frame.entries for entry in frame.entries.to_entries()]
    assert [entry.message for entry in stored] == facts


async def test_futures_know_the_nodes_answer(sites: Sites, tmp_path: Path) -> None:
    """Through the outbox, too, each fact learns its offset; bad ones, repeats and conflicts are told apart."""
    site = await sites()
    first = messages(5)
    async with AsyncProducer(site.grpc_address, stream="operational", outbox=tmp_path / "outbox") as producer:
        futures = [await producer.send(each) for each in first]
        mixed = [message("new"), message("bad", subject="NO"), *altered(first[1:2]), first[2]]
        more = [await producer.send(each) for each in mixed]
        assert [(await future).offset for future in futures] == [0, 1, 2, 3, 4]
        assert (await more[0]).offset == 5
        with pytest.raises(InvalidFact, match="subject"):
            await more[1].accepted()
        with pytest.raises(ConflictingDuplicate):
            await more[2]
        assert ((await more[3]).result, (await more[3]).offset) == (Result.ALREADY_EXISTS, 2)
        batch = await producer.send_batch(_batch(range(100, 150)))
        await batch.accepted()
        assert (await batch).offsets.tolist() == list(range(6, 56))


def _batch(numbers: range) -> FactBatch:
    return FactBatch.from_messages(messages(len(numbers), first=numbers.start))


async def test_refused_facts_are_kept_aside(sites: Sites, tmp_path: Path) -> None:
    """What the node will never take does not block the rest: it is kept with the reason, whoever had sent it."""
    outbox, told = tmp_path / "outbox", list[RefusedFact]()
    site = await sites(stream='max_object = "2KiB"')
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        await producer.append(message("taken", 1))
    large = Fact.of("a:b", "large", "x" * 3000)
    async with AsyncProducer(nowhere(), stream="operational", outbox=outbox) as producer:
        for each in (message("one"), message("taken", 2)):
            await (await producer.send(each)).accepted()
        future = await producer.send(large, message_id="large", from_zone="plant", to_zone="enterprise")
        await future.accepted()
        await (await producer.send(message("two"))).accepted()
    assert refused_facts(outbox) == []

    def tell(refused: RefusedFact) -> None:
        told.append(refused)
        raise ZeroDivisionError  # what an application does wrong must not keep its other facts from being sent

    options: ProducerSettings = {"outbox": outbox, "on_refused": tell}
    async with AsyncProducer(site.grpc_address, stream="operational", **options) as producer:
        await producer.drain()
    buffer = await site.parts.store("operational")
    stored = [entry async for frame in buffer.replay(0) if frame.entries for entry in frame.entries.to_entries()]
    assert [entry.message.envelope.message_id for entry in stored] == ["taken", "one", "two"]
    kept = refused_facts(outbox)
    assert {(each.message.envelope.message_id, each.error.code) for each in kept} == {
        ("taken", "conflicting_duplicate"),
        ("large", "fact_too_large"),
    }
    assert [each.message for each in told] == [each.message for each in kept]
    assert next(each for each in kept if each.error.code == "fact_too_large").message.fact == large


async def test_what_an_operator_can_mend_holds_the_outbox(sites: Sites, tmp_path: Path) -> None:
    """A missing right loses nothing: the facts stay, the problem is told, and they go once it is mended."""
    site = await sites()
    site.act_as("narrow")
    problems = asyncio.Queue[BsfgError]()
    options: ProducerSettings = {"outbox": tmp_path / "outbox", "on_problem": problems.put_nowait}
    async with AsyncProducer(site.grpc_address, stream="operational", **options) as producer:
        future = await producer.send(message("a"))
        assert (await problems.get()).code == "permission_denied"
        assert (await problems.get()).code == "permission_denied"
        assert not future.done()
        site.act_as("app")
        assert (await future).offset == 0
        assert refused_facts(tmp_path / "outbox") == []


async def test_one_producer_per_outbox(tmp_path: Path) -> None:
    """A second producer with the same outbox is refused, and the first goes on."""
    async with AsyncProducer(nowhere(), stream="operational", outbox=tmp_path / "outbox") as first:
        with pytest.raises(FolderLocked):
            await AsyncProducer(nowhere(), stream="operational", outbox=tmp_path / "outbox").start()
        await (await first.send(message("a"))).accepted()
    with Producer(nowhere(), stream="operational", outbox=tmp_path / "outbox") as again:
        again.send(message("b")).wait_accepted(60)


async def test_a_full_outbox_makes_senders_wait(sites: Sites, tmp_path: Path) -> None:
    """An outbox has a size; when it is reached facts wait in memory, and are accepted when there is room."""
    with pytest.raises(InvalidArgument, match="room for some batches"):
        AsyncProducer(nowhere(), outbox=tmp_path / "small", outbox_capacity_bytes=1000)
    site = await sites()
    site.act_as("narrow")
    problems = asyncio.Queue[BsfgError]()
    options: ProducerSettings = {
        "outbox": tmp_path / "outbox",
        "outbox_capacity_bytes": 32 << 20,
        "on_problem": problems.put_nowait,
    }
    async with AsyncProducer(site.grpc_address, stream="operational", **options) as producer:
        futures = [await producer.send(each) for each in messages(40, object_bytes=1_000_000)]
        while (await problems.get()).code != "buffer_full":
            pass
        assert not futures[-1]._is_safe()
        site.act_as("app")
        # In any order: batches that are under way when the right comes may pass one that was refused just before.
        assert sorted([(await future).offset for future in futures]) == list(range(40))


async def test_flush_means_safe_and_drain_means_answered(sites: Sites, tmp_path: Path) -> None:
    """With an outbox a flush needs no node; a drain waits for it."""
    site = await sites()
    site.act_as("narrow")
    async with AsyncProducer(site.grpc_address, stream="operational", outbox=tmp_path / "outbox") as producer:
        future = await producer.send(message("a"))
        await producer.flush()
        assert future._is_safe()
        assert not future.done()
        draining = asyncio.create_task(producer.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        site.act_as("app")
        await draining
        assert future.done()


async def test_futures_that_nobody_holds_cost_nothing(tmp_path: Path) -> None:
    """While the node is away for days, only the futures that somebody still holds are remembered."""
    async with AsyncProducer(nowhere(), stream="operational", outbox=tmp_path / "outbox") as producer:
        outcomes = []
        for each in messages(50):
            outcomes.append(weakref.ref((await producer.send(each))._outcome))
            await producer.flush()
        held: FactFuture = await producer.send(message("held"))
        await producer.flush()
        gc.collect()
        # The sender itself holds those that it is trying to send.
        assert sum(reference() is not None for reference in outcomes) <= 20
        assert not held.done()


async def test_a_torn_outbox_goes_on(sites: Sites, tmp_path: Path) -> None:
    """A crash that tore the last write costs nothing that was accepted."""
    async with AsyncProducer(nowhere(), stream="operational", outbox=tmp_path / "outbox") as producer:
        for each in messages(3):
            await (await producer.send(each)).accepted()
    (segment,) = (tmp_path / "outbox").rglob("*.spool")
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:50])
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational", outbox=tmp_path / "outbox") as producer:
        await producer.append(message("after"))
        await producer.drain()
        outbox = producer._started()._outbox
        assert outbox is not None
        (lane,) = outbox._lanes.values()
        assert "torn" in lane.spool.problems[0]
    assert (await (await site.parts.store("operational")).stats()).end == 4


async def test_facts_that_come_while_damage_is_passed_are_sent(tmp_path: Path) -> None:
    """A record that cannot be read is passed over, but not what became durable while it was looked for."""
    lane = Outbox(tmp_path / "outbox").lane("operational")
    loop, read = asyncio.get_running_loop(), lane.spool.read
    await lane.keep([_packed("lost")])

    def reading(number: int, **options: int) -> list[Spooled]:
        if number == 0:
            asyncio.run_coroutine_threadsafe(lane.keep([_packed("kept")]), loop).result()
            return []
        return read(number, **options)

    lane.spool.read = reading  # type: ignore[method-assign]
    shipment = await lane.next()
    assert shipment is not None
    assert shipment.facts.values("message_id") == ["kept"]


def _packed(id: str) -> Packed:
    return Packed(FactBatch.from_messages([message(id)]), Outcome(), 1)


def killed_writer(outbox: Path, first: int, address: str, files: list[str], seconds: float) -> int:
    """Run a producer process for a while, kill it, and give how many facts it said were accepted."""
    command = [sys.executable, "-m", "tests.sdk.outbox_writer", str(outbox), str(first), address, *files]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [process.stdout.readline()]
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    # What was told is read here, since communicate() does not see what readline() took along.
    told += process.stdout.readlines()
    _, err = process.communicate()
    assert told[0], err
    return int(told[-1])


@pytest.mark.soak
def test_kills_of_producer_and_node_lose_nothing(zone: Zone, tmp_path: Path, soak_size: object) -> None:
    """Producer and node are killed at random moments; every accepted fact is stored once, in order."""
    where, outbox, random = endpoint(zone), tmp_path / "outbox", Random(7)
    files = [str(where.ca), str(where.certificate), str(where.key), str(where.server_name)]
    accepted = 0
    for round in range(soak_size(KILLS, 200)):  # type: ignore[operator]
        if round % 3 == 1:
            zone.kill()
        accepted = killed_writer(outbox, accepted, where.address, files, random.uniform(0.0, 0.4))
        if zone.pid is None:
            zone.start()
    with Producer(where, stream="operational", outbox=outbox) as producer:
        producer.drain(120)
    stored = zone.messages(Buffer.STORE)
    assert len(stored) >= accepted
    assert stored == messages(len(stored))
