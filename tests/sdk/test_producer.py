"""Producers against real nodes: single facts, batches, errors, retries, threads."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TypedDict

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.wire.conftest import Sites

from bsfg.batch import FactBatch
from bsfg.errors import (
    BsfgError,
    ConflictingDuplicate,
    FactTooLarge,
    InvalidArgument,
    InvalidFact,
    PeerUnreachable,
    PermissionRefused,
    StorageClosed,
    UnknownStream,
)
from bsfg.fact import ArtifactRef, Entry, Fact
from bsfg.ports import Buffer, Result
from bsfg.sdk.core import ProducerSettings
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.futures import FactFuture
from bsfg.sdk.producer import AsyncProducer, Producer
from bsfg.testing.facts import altered, message, messages
from bsfg.testing.ports import free_port


class Addressed(TypedDict):
    """Where a producer sends."""

    stream: str
    from_zone: str
    to_zone: str


ADDRESSED = Addressed(stream="operational", from_zone="plant", to_zone="enterprise")
FACT = Fact.of("batch:B1", "step_completed", {"step": 7})


async def stored(site: object, stream: str = "operational") -> list[Entry]:
    """Read everything that a site's store buffer holds."""
    buffer = await site.parts.store(stream)  # type: ignore[attr-defined]
    return [entry async for frame in buffer.replay(0) if frame.entries for entry in frame.entries.to_entries()]


async def test_single_facts_become_batches(sites: Sites) -> None:
    """Facts that are sent in one breath travel together, and each future has its own offset."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        futures = [await producer.send(each) for each in messages(500)]
        answers = [await future for future in futures]
    assert [answer.offset for answer in answers] == list(range(500))
    assert {answer.result for answer in answers} == {Result.INSERTED}
    entries = await stored(site)
    assert [entry.message for entry in entries] == messages(500)
    assert [entry.digest for entry in entries] == [answer.digest for answer in answers]
    requests = site.parts.metrics.registry.get_sample_value("bsfg_append_requests_total", {"stream": "operational"})
    assert requests is not None
    assert requests < 10


async def test_a_fact_alone_gets_the_producers_envelope(sites: Sites) -> None:
    """What a fact does not say comes from the producer; what is said when sending goes before that."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        await producer.append(FACT, message_id="one")
        await producer.append(
            FACT, message_id="two", to_zone="idmz", correlation_id="run-1", labels={"shift": "night"}, stream="audit"
        )
    (one,), (two,) = await stored(site), await stored(site, "audit")
    assert (one.message.fact, one.message.envelope.to_zone) == (FACT, "enterprise")
    assert one.message.envelope.produced_at_unix_ms > 1_700_000_000_000
    envelope = two.message.envelope
    assert (envelope.to_zone, envelope.correlation_id, envelope.labels) == ("idmz", "run-1", {"shift": "night"})


async def test_repeats_and_conflicts(sites: Sites) -> None:
    """The same again is answered with the offset of the first; another body under its id fails, alone."""
    site = await sites()
    facts = messages(3)
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        first = [await (await producer.send(each)) for each in facts]
        again = [await producer.send(each) for each in [facts[0], *altered(facts[1:2]), facts[2]]]
        assert (await again[0]).result == Result.ALREADY_EXISTS
        assert (await again[0]).offset == first[0].offset
        with pytest.raises(ConflictingDuplicate) as conflict:
            await again[1]
        assert conflict.value.details["existing_offset"] == first[1].offset
        assert (await again[2]).offset == first[2].offset
    assert len(await stored(site)) == 3


async def test_bad_facts_fail_alone(sites: Sites) -> None:
    """Broken rules are found before anything is sent, and named without the number of a row nobody knows."""
    site = await sites()
    bad = [Fact("No kind", "p", b"1"), Fact("a:b", "Not Snake", b"1"), Fact("a:b", "p", b"{not json")]
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        futures = [await producer.send(fact, message_id=str(at)) for at, fact in enumerate([FACT, *bad, FACT])]
        wrong_type = await producer.send(FACT, message_id="x", correlation_id=7)  # type: ignore[arg-type]
        fields = ["subject", "predicate", "object", "correlation_id"]
        for future, field in zip([*futures[1:4], wrong_type], fields, strict=True):
            with pytest.raises(InvalidFact, match=field) as refused:
                await future
            assert refused.value.details["field"] == field
        with pytest.raises(InvalidFact, match="must be bytes"):
            await producer.send(Fact("a:b", "c", "text"))  # type: ignore[arg-type]
        assert (await futures[0]).offset == 0
        assert (await futures[4]).offset == 1


async def test_what_only_the_node_knows_fails_alone_too(sites: Sites) -> None:
    """A fact larger than the stream allows is refused by the node; the others of its batch are stored."""
    site = await sites(stream='max_object = "2KiB"')
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        sizes = [10, 3000, 20, 4000, 30]
        futures = [await producer.send(Fact.of("a:b", "c", "x" * size), message_id=str(size)) for size in sizes]
        assert [type(await _error(future)) for future in futures] == [
            type(None), FactTooLarge, type(None), FactTooLarge, type(None)
        ]  # fmt: skip
    assert [entry.message.envelope.message_id for entry in await stored(site)] == ["10", "20", "30"]


async def _error(future: FactFuture) -> BsfgError | None:
    try:
        await future
    except BsfgError as error:
        return error
    return None


async def test_a_fact_for_another_zone_is_refused_alone(sites: Sites) -> None:
    """A producer that speaks for a zone that is not its own hears so; its other facts are stored."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        zones = ["plant", "plant", "moon", "plant"]
        futures = [await producer.send(message(str(at), from_zone=zone)) for at, zone in enumerate(zones)]
        with pytest.raises(PermissionRefused, match="'moon'"):
            await futures[2]
        for at in (0, 1, 3):
            await futures[at]
    assert len(await stored(site)) == 3


async def test_messages_that_are_too_large_are_divided(sites: Sites) -> None:
    """A node that takes only small messages gets what was gathered in smaller pieces."""
    site = await sites(message_bytes=50_000)
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        futures = [await producer.send(each) for each in messages(800)]
        assert sorted([(await future).offset for future in futures]) == list(range(800))


async def test_a_whole_batch(sites: Sites) -> None:
    """A batch has one future with a receipt; repeats and conflicts are results in it."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        first = await (await producer.send_batch(FactBatch.from_messages(messages(100))))
        assert first.offsets.tolist() == list(range(100))
        mixed = [*messages(1), *altered(messages(1, first=1)), *messages(1, first=100)]
        future = await producer.send_batch(FactBatch.from_messages(mixed))
        receipt = await future
        assert receipt.results.tolist() == [Result.ALREADY_EXISTS, Result.CONFLICT, Result.INSERTED]
        assert receipt.offsets.tolist() == [0, 1, 100]
        assert future.digests().shape == (3, 32)
        assert future.message_ids()[2] == "0-000100"
        empty = await producer.send_batch(FactBatch.empty())
        assert len((await empty).offsets) == 0


async def test_a_batch_is_refused_as_a_whole(sites: Sites) -> None:
    """One bad fact refuses the caller's batch, and nothing of it is stored; single facts around it are."""
    site = await sites()
    good = messages(3)
    bad = FactBatch.from_messages([*messages(5, first=10), message("x", subject="NO")])
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        before = await producer.send(good[0])
        refused = await producer.send_batch(bad)
        after = await producer.send(good[1])
        with pytest.raises(InvalidFact, match="row 5, subject") as error:
            await refused
        assert error.value.details["stored"] == 0
        await asyncio.gather(before, after)
    assert len(await stored(site)) == 2


async def test_a_huge_batch_travels_in_pieces(sites: Sites) -> None:
    """A batch larger than a message is sent in several, in order, and answered as one."""
    site = await sites()
    facts = FactBatch.from_messages(messages(60, object_bytes=300_000))
    assert facts.nbytes > 16 << 20
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        receipt = await (await producer.send_batch(facts))
    assert receipt.offsets.tolist() == list(range(60))


async def test_ids_that_the_zone_derives(sites: Sites) -> None:
    """Where the zone derives ids, facts are sent without one, and the futures tell which they got."""
    site = await sites(zone_lines='message_ids = "payload"')
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        one, two = await producer.append(FACT), await producer.append(FACT)
    assert one.message_id == one.digest.hex()
    assert (two.result, two.offset) == (Result.ALREADY_EXISTS, one.offset)


async def test_a_stream_that_is_not_there(sites: Sites) -> None:
    """Facts for an unknown stream fail at once, without being tried for a minute."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        with pytest.raises(UnknownStream):
            await producer.append(FACT, message_id="a", stream="nowhere")
        await producer.append(FACT, message_id="a")


async def test_wrong_use_is_explained(sites: Sites) -> None:
    """A missing stream or zone, an envelope twice, and a producer that is not started say what to do."""
    site = await sites()
    async with AsyncProducer(site.grpc_address) as producer:
        with pytest.raises(InvalidArgument, match="no stream"):
            await producer.send(message("a"))
        with pytest.raises(InvalidArgument, match="from_zone and to_zone"):
            await producer.send(FACT, stream="operational")
        with pytest.raises(InvalidArgument, match="from_zone and to_zone"):
            await producer.send(FACT, stream="operational", to_zone="x")
        with pytest.raises(InvalidArgument, match="envelope already"):
            await producer.send(message("a"), message_id="b", stream="operational")
    with pytest.raises(InvalidArgument, match="not started"):
        await AsyncProducer(site.grpc_address).send(message("a"), stream="operational")
    with pytest.raises(StorageClosed, match="closed"):
        await producer.send(message("a"), stream="operational")
    with pytest.raises(TypeError):
        AsyncProducer(site.grpc_address, no_such_option=1)  # type: ignore[call-arg]


async def test_an_artifact_before_its_fact(sites: Sites, tmp_path: Path) -> None:
    """A file is uploaded first; a fact that names one that is not there fails alone."""
    site = await sites()
    path = tmp_path / "report.pdf"
    path.write_bytes(os.urandom(3_000_000))
    async with AsyncProducer(site.grpc_address, **ADDRESSED) as producer:
        reference = await producer.upload("batch-files", "B1/report.pdf", path, media_type="application/pdf")
        assert (reference.size_bytes, reference.file_name) == (3_000_000, "report.pdf")
        small = await producer.upload("batch-files", "B1/note", b"hello")
        missing = ArtifactRef("batch-files", "none", "sha256:" + "0" * 64, 5, "text/plain")
        futures = [
            await producer.send(Fact("batch:B1", "reported", b"1", artifact), message_id=str(at))
            for at, artifact in enumerate([reference, missing, small])
        ]
        assert [getattr(await _error(future), "code", None) for future in futures] == [None, "artifact_missing", None]
        with pytest.raises(BsfgError, match="cannot be read"):
            await producer.upload("batch-files", "x", tmp_path / "not there")
    assert [entry.message.fact.artifact for entry in await stored(site)] == [reference, small]


async def test_an_absent_node_is_waited_for(zone: Zone) -> None:
    """Facts that are sent while nobody listens are stored when somebody does."""
    zone.stop()
    problems = asyncio.Queue[BsfgError]()
    async with AsyncProducer(endpoint(zone), stream="operational", on_problem=problems.put_nowait) as producer:
        future = await producer.send(message("a"))
        problem = await problems.get()
        assert isinstance(problem, PeerUnreachable)
        assert isinstance(producer.problem, PeerUnreachable)
        await asyncio.to_thread(zone.start)
        assert (await future).offset == 0
    assert zone.end(Buffer.STORE) == 1


async def test_a_complaint_that_fails_does_not_stop_the_producer(zone: Zone, caplog: pytest.LogCaptureFixture) -> None:
    """An application's own ``on_problem`` may raise; the facts are stored all the same, and the log tells of it."""
    zone.stop()
    told = asyncio.Event()

    def complain(problem: BsfgError) -> None:
        told.set()
        raise ZeroDivisionError

    async with AsyncProducer(endpoint(zone), stream="operational", on_problem=complain) as producer:
        future = await producer.send(message("a"))
        await told.wait()
        await asyncio.to_thread(zone.start)
        assert (await future).offset == 0
    assert "on_problem failed" in caplog.text


async def test_facts_that_cannot_be_packed_fail(zone: Zone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the producer itself is told to whoever waits; the next fact is sent as if nothing had been."""
    async with AsyncProducer(endpoint(zone), stream="operational") as producer:
        with monkeypatch.context() as patched:
            patched.setattr("bsfg.sdk.intake.check", lambda *args: 1 / 0)
            error = await _error(await producer.send(message("a")))
        assert error is not None
        assert error.code == "internal"
        assert "ZeroDivisionError" in error.message
        assert (await producer.append(message("b"))).offset == 0


async def test_a_deadline_gives_facts_up() -> None:
    """When the node stays away facts fail with the reason, those in flight and those that never left."""
    address = f"127.0.0.1:{free_port()}"
    options: ProducerSettings = {"deadline_seconds": 0.3, "max_batch_facts": 2, "max_in_flight": 1}
    async with AsyncProducer(address, stream="operational", **options) as producer:
        futures = [await producer.send(each) for each in messages(11)]
        assert {type(await _error(future)) for future in futures} == {PeerUnreachable}


async def test_a_full_queue_waits(zone: Zone) -> None:
    """Memory is bounded: sending waits while the node takes nothing, and goes on when it does."""
    zone.stop()
    async with AsyncProducer(endpoint(zone), stream="operational", max_queued_bytes=20_000) as producer:
        futures: list[FactFuture] = []
        full = asyncio.Event()

        async def send_all() -> None:
            for each in messages(300):
                if producer._started().intake.is_full:
                    full.set()
                futures.append(await producer.send(each))

        sending = asyncio.create_task(send_all())
        await full.wait()
        assert len(futures) < 100
        await asyncio.to_thread(zone.start)
        await sending
        assert [(await future).offset for future in futures] == list(range(300))
    assert zone.messages(Buffer.STORE) == messages(300)


async def test_closing_sends_what_is_queued(sites: Sites) -> None:
    """Leaving the context, and flushing, wait for everything that was sent; nothing lingers."""
    site = await sites()
    async with AsyncProducer(site.grpc_address, stream="operational", linger_ms=3_600_000) as producer:
        await producer.send(message("a"))
        await producer.flush()
        assert len(await stored(site)) == 1
        await producer.send(message("b"))
    assert len(await stored(site)) == 2


async def test_closing_in_a_hurry_tells_the_truth() -> None:
    """A producer that is closed before the node answered fails the futures, and says that the outcome is unknown."""
    producer = AsyncProducer(f"127.0.0.1:{free_port()}", stream="operational", deadline_seconds=math.inf)
    await producer.start()
    future = await producer.send(message("a"))
    await producer.close(timeout_seconds=0.05)
    with pytest.raises(StorageClosed, match="before the node answered"):
        await future


async def test_a_killed_node_loses_nothing(zone: Zone) -> None:
    """The node is killed again and again under load; every fact is stored once, in order, under mutual TLS."""
    async with AsyncProducer(endpoint(zone), stream="operational", max_batch_facts=20) as producer:
        futures = []

        async def send_all() -> None:
            for each in messages(1500):
                futures.append(await producer.send(each))
                await asyncio.sleep(0.0005)

        sending = asyncio.create_task(send_all())
        for _ in range(4):
            await asyncio.sleep(0.15)
            await asyncio.to_thread(zone.kill)
            await asyncio.to_thread(zone.start)
        await sending
        assert [(await future).offset for future in futures] == list(range(1500))
    assert zone.messages(Buffer.STORE) == messages(1500)


def test_ordinary_programs_need_no_event_loop(zone: Zone) -> None:
    """The blocking producer takes facts from many threads, batches, and callbacks; closing twice is fine."""
    called = threading.Event()
    with Producer(endpoint(zone), **ADDRESSED) as producer:
        assert producer.append(FACT, message_id="first").offset == 0

        def send(name: int) -> None:
            futures = [producer.send(FACT, message_id=f"{name}-{number}") for number in range(200)]
            assert all(future.result(60).result == Result.INSERTED for future in futures)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = producer.send(FACT, message_id="last")
        last.add_done_callback(lambda future: called.set())
        producer.flush(60)
        assert called.wait(60)
        assert last.result(0).offset == 801
        batch = FactBatch.from_messages(messages(10))
        assert producer.send_batch(batch).result(60).offsets.tolist() == list(range(802, 812))
        assert producer.upload("files", "a", b"hello").size_bytes == 5
        producer.drain(60)
        assert producer.problem is None
    producer.close()
    with pytest.raises(StorageClosed):
        producer.send(FACT, message_id="late")
    assert zone.end(Buffer.STORE) == 812


def test_a_forgotten_producer_still_sends(zone: Zone) -> None:
    """A producer that is never closed sends what is queued when it is collected, and when the program ends."""
    producer = Producer(endpoint(zone), **ADDRESSED, linger_ms=3_600_000)
    producer.send(FACT, message_id="collected")
    del producer
    gc.collect()
    assert zone.end(Buffer.STORE) == 1
    where = endpoint(zone)
    code = f"""
from bsfg import Endpoint, Fact, Producer
node = Endpoint({where.address!r}, {str(where.ca)!r}, {str(where.certificate)!r}, {str(where.key)!r}, "plant-bsfg")
producer = Producer(node, stream="operational", from_zone="plant", to_zone="enterprise", linger_ms=3_600_000)
producer.send(Fact("a:b", "c", b"1"), message_id="ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert zone.end(Buffer.STORE) == 2


def test_an_ordinary_program_waits_for_room() -> None:
    """A blocking sender is held when the queue is full, and let go when the producer is closed."""
    producer = Producer(f"127.0.0.1:{free_port()}", **ADDRESSED, max_queued_bytes=5_000, deadline_seconds=math.inf)
    reached, ended = threading.Event(), threading.Event()

    def send() -> None:
        with pytest.raises(StorageClosed):
            for number in range(100):
                producer.send(FACT, message_id=str(number))
                if number == 5:
                    reached.set()
        ended.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert reached.wait(60)
    producer.close(timeout_seconds=0.05)
    assert ended.wait(60)
    thread.join()


def test_a_producer_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Wrong files and addresses are told when the producer is made."""
    with pytest.raises(InvalidArgument, match="needs TLS"):
        Producer("192.0.2.1:9443")
    with pytest.raises(InvalidArgument, match="host:port"):
        Producer("nonsense")
    with pytest.raises(InvalidArgument, match="all three"):
        Endpoint("127.0.0.1:1", ca="x")
    gc.collect()
