"""The door of a real node: silent connections, half messages and hostile answers cost it little, and others nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.nursery import rss_bytes
from tests.e2e.zones import Zone, pair, until

from bsfg.fact import Message
from bsfg.ports import Buffer, ConsumerSpec, Result
from bsfg.testing.facts import message
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.certs import issue
from bsfg.wire.tls import Watched, grpc_channel_credentials, grpc_channel_options

CEILING_BYTES = 1 << 30
LIMITS = f"[limits]\nmemory_ceiling = {CEILING_BYTES}\n"
DESCRIPTORS, SILENT = 1_024, 1_300


def fact(name: str) -> Message:
    """Make a good fact."""
    return message(name, from_zone="plant-a")


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give one zone, not started yet, and a stranger's certificate."""
    plant, _ = pair(tmp_path)
    plant.more += LIMITS
    plant.write()
    issue(plant.certs, "stranger", days=60, now=datetime.now(UTC), serves=False)
    return cleanup.zone(plant)


def channel(zone: Zone, identity: str) -> grpc.aio.Channel:
    """Open a connection of its own, without anything of ours in between."""
    watched = Watched(zone.files(identity))
    watched.refresh()
    options = [*grpc_channel_options(f"{zone.name}-bsfg"), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"127.0.0.1:{zone.port}", grpc_channel_credentials(watched.material), options)


def flood(port: int, count: int) -> list[socket.socket]:
    """Open connections that say nothing."""
    found = []
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        found.append(connection)
    return found


async def test_silent_connections_leave_the_storage_its_descriptors(plant: Zone, cleanup: Cleanup) -> None:
    """With 1,024 descriptors and 1,300 silent connections at each port, no append of a known producer is refused."""
    plant.streams += "[streams.other]\n"
    plant.write()
    plant.start(descriptors=DESCRIPTORS)
    async with plant.client() as producer:
        await producer.append_fact("operational", fact("first"))
        for number in range(20):
            for port in (plant.port, plant.http_port):
                for each in flood(port, SILENT // 20):
                    cleanup.closing(each)
            for stream in ("operational", "other"):
                answer = await producer.append_fact(stream, fact(f"{stream}-{number}"))
                assert answer.result == Result.INSERTED
        taken = len(os.listdir(f"/proc/{plant.pid}/fd"))
        assert taken < DESCRIPTORS - 128, taken
    assert not plant.events("stream_unavailable") and not plant.events("request_failed")
    plant.stop()


async def test_half_messages_stay_below_the_ceiling(plant: Zone) -> None:
    """A known caller with hundreds of calls that each send a frame and never its end does not fill the memory."""
    plant.start()
    async with plant.client() as producer:
        await producer.append_fact("operational", fact("first"))
        frame = bytes(4 << 20)
        async with channel(plant, "plant-a-consumer") as evil:
            calls = [evil.stream_stream("/bsfg.v1.Boundary/ConfirmReceipts")() for _ in range(200)]
            sending = [asyncio.create_task(call.write(frame)) for call in calls]
            highest = 0
            for number in range(40):
                answer = await producer.append_fact("operational", fact(f"good-{number}"))
                assert answer.result == Result.INSERTED
                highest = max(highest, rss_bytes(plant.pid or 0))
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    assert highest < CEILING_BYTES, highest
    assert not plant.events("request_failed")
    print(f"highest {highest >> 20} MiB")
    plant.stop()


async def test_answers_that_nobody_reads_stay_below_the_ceiling(plant: Zone) -> None:
    """A known caller with a hundred calls for everything, of which he reads nothing, has so much and no more."""
    plant.start()
    async with plant.client() as producer, plant.admin() as admin:
        await admin.create_consumer(ConsumerSpec("app-evil", "operational", Buffer.STORE, required=False))
        for number in range(40):
            large = message(f"large-{number}", f"{number}" * 400_000, from_zone="plant-a")
            await producer.append_fact("operational", large)
        request = pb.FetchFramesRequest(max_facts=100_000, max_bytes=1 << 40)
        request.consumer.consumer = "app-evil"
        async with channel(plant, "plant-a-consumer") as evil:
            calls = [evil.stream_stream("/bsfg.v1.Boundary/FetchFrames")() for _ in range(100)]
            sending = [asyncio.create_task(call.write(request.SerializeToString())) for call in calls]
            highest = 0
            for number in range(60):
                answer = await producer.append_fact("operational", fact(f"good-{number}"))
                assert answer.result == Result.INSERTED
                highest = max(highest, rss_bytes(plant.pid or 0))
                # The node reads for all of them before any of them is given up.
                await asyncio.sleep(0.1)
            await asyncio.gather(*sending, return_exceptions=True)
            for call in calls:
                call.cancel()
    print(f"highest {highest >> 20} MiB")
    assert highest < CEILING_BYTES // 2, highest
    assert not plant.events("request_failed")
    plant.stop()


async def test_strangers_leave_a_few_lines_and_nothing_else(plant: Zone) -> None:
    """Calls of a stranger, garbage and questions for health, are refused without growing log or memory."""
    plant.start()
    async with plant.client() as producer, channel(plant, "stranger") as evil:
        await producer.append_fact("operational", fact("first"))
        before, logged = rss_bytes(plant.pid or 0), plant.log_path.stat().st_size
        paths = ("/bsfg.v1.Boundary/AppendFacts", "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check")
        done = asyncio.Event()

        async def ask(path: str) -> None:
            while not done.is_set():
                try:
                    await evil.stream_stream(path)(iter([bytes(100_000)])).read()
                except grpc.aio.AioRpcError as error:
                    assert error.code() != grpc.StatusCode.OK

        asking = [asyncio.create_task(ask(path)) for path in paths for _ in range(60)]
        for number in range(100):
            answer = await producer.append_fact("operational", fact(f"good-{number}"))
            assert answer.result == Result.INSERTED
        done.set()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert rss_bytes(plant.pid or 0) - before < 150 << 20
    assert await until(lambda: plant.events("request_refused"))
    assert plant.log_path.stat().st_size - logged < 100_000
    assert "Traceback" not in plant.log_path.read_text()
    assert not plant.events("request_failed")
    plant.stop()
