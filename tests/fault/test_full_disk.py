"""A node on a full disk opens, takes confirmations, lets facts go, and so makes room by itself."""

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from bsfg.config import parse
from bsfg.errors import BufferFull, DiskFull
from bsfg.node.alerts import AlertBoard
from bsfg.node.authorize import Guard, Matrix
from bsfg.node.links import LinkRegistry
from bsfg.node.metrics import Metrics
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.node.state import NodeState
from bsfg.node.upkeep import Upkeep
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord
from bsfg.retention import GapReason, Policy
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log import recovery
from bsfg.stores.log.files import Files
from bsfg.stores.log.reserve import RESERVE
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import FORWARD_SCHEMA, LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.case import origin
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch, messages, sealed

RESERVE_BYTES = 256 << 10
OPTIONS = LogOptions(segment_bytes=64 << 10, reserve_bytes=RESERVE_BYTES)
POLICY = Policy(capacity_bytes=1 << 40)
STREAMS = ("operational", "audit")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four MiB that nothing else writes to."""
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


async def opened(where: Path | Files, clock: FakeClock) -> LogStorage:
    """Open the data folder with a reserve, and both streams."""
    storage = await LogStorage.open(where, clock=clock, options=OPTIONS)
    for stream in STREAMS:
        await storage.store(stream, POLICY)
    return storage


async def filled(storage: LogStorage, number: int) -> int:
    """Append until the disk is full; give the number of the next fact."""
    with suppress(DiskFull):
        while True:
            for stream in STREAMS:
                await (await storage.store(stream)).append(sealed(messages(20, first=number, object_bytes=500)))
                number += 20
    return number


def stuffed(folder: Path) -> None:
    """Take the last byte of a real disk, as any other program may."""
    with (folder / "stranger").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


async def drained(storage: LogStorage, clock: FakeClock, number: int) -> None:
    """Confirm everything on a full disk, let it go, and see that producers are served again."""
    for stream in STREAMS:
        store = await storage.store(stream)
        end = (await store.stats()).end
        with pytest.raises(DiskFull):
            await store.append(sealed(messages(50, first=number, object_bytes=2_000)))
        assert storage.reserve.short
        await storage.cursors.commit(f"reads-{stream}", Confirmation(end - 1))
        await store.record_gaps([GapRecord(0, 0, GapReason.SKIPPED, 1, "left out", "plant")])
    await storage.cursors.retire("slow", "gone for good")
    for _ in range(100):
        clock.advance(2)
        await storage.relieve()
    assert not storage.reserve.short
    for stream in STREAMS:
        store = await storage.store(stream)
        before = await store.stats()
        receipt = await store.append(sealed(messages(50, first=number, object_bytes=500)))
        assert receipt.offsets.tolist() == list(range(before.end, before.end + 50))
        # Only as much has left as was needed: what is confirmed is kept for its retention while there is room.
        assert 0 < before.start < before.end or before.segments == 1


async def with_consumers(storage: LogStorage) -> LogStorage:
    """Create a reader for each stream, and one that never comes."""
    for stream in STREAMS:
        await storage.cursors.create(ConsumerSpec(f"reads-{stream}", stream, Buffer.STORE))
    await storage.cursors.create(ConsumerSpec("slow", STREAMS[0], Buffer.STORE))
    return storage


def test_a_zone_on_a_really_full_disk_opens_and_drains_itself(small_disk: Path) -> None:
    """On a file system without a free byte a storage is opened, confirms, retires, makes room and accepts again."""

    async def run() -> None:
        clock, data = FakeClock(), small_disk / "data"
        storage = await with_consumers(await opened(data, clock))
        number = await filled(storage, 0)
        await storage.close()
        stuffed(small_disk)
        storage = await opened(data, clock)
        state = NodeState(data, storage.reserve)
        state.put("peer", "link/s", {"latest_start": 3})
        await drained(storage, clock, number)
        taken = (data / RESERVE).stat()
        assert taken.st_size == RESERVE_BYTES
        assert taken.st_blocks * 512 >= RESERVE_BYTES
        state.close()
        await storage.close()
        storage = await opened(data, clock)
        assert not storage.reserve.short
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("left_bytes", [0, 100, 5_000])
def test_a_full_disk_is_left_at_any_point(left_bytes: int) -> None:
    """However little is left when a storage opens, the reserve carries it until facts have made room."""

    async def run() -> None:
        disk, clock = SimulatedDisk(), FakeClock()
        storage = await with_consumers(await opened(disk, clock))
        disk.fill_up(600_000)
        number = await filled(storage, 0)
        assert storage.reserve.short
        assert not storage.reserve.spent
        await storage.close()
        disk.fill_up(left_bytes)
        storage = await opened(disk, clock)
        await drained(storage, clock, number)
        await storage.close()

    asyncio.run(run())


def test_without_a_reserve_a_full_disk_stays_full() -> None:
    """The reserve is what makes the difference: without it a full disk can take no confirmation."""

    async def run() -> None:
        disk = SimulatedDisk()
        storage = await LogStorage.open(disk, clock=FakeClock())
        store = await storage.store("operational", POLICY)
        await store.append(sealed(messages(5)))
        await storage.cursors.create(ConsumerSpec("c", "operational", Buffer.STORE))
        disk.fill_up(0)
        with pytest.raises(DiskFull):
            await storage.cursors.commit("c", Confirmation(4))
        await storage.close()

    asyncio.run(run())


def test_confirmed_facts_make_way_for_new_ones(small_disk: Path) -> None:
    """A producer on a full disk is not refused while its stream holds facts that everybody has confirmed."""

    async def run() -> None:
        clock = FakeClock()
        storage = await with_consumers(await opened(small_disk / "data", clock))
        await storage.cursors.retire("slow", "gone for good")
        store = await storage.store("operational")
        for at in range(400):
            end = (await store.stats()).end
            if end:
                await storage.cursors.commit("reads-operational", Confirmation(end - 1))
            await store.append(sealed(messages(20, first=20 * at, object_bytes=1_000)))
        stats = await store.stats()
        assert stats.end == 8_000
        assert 0 < stats.start < stats.end
        await storage.close()

    asyncio.run(run())


def test_facts_that_somebody_waits_for_never_make_way(small_disk: Path) -> None:
    """What is not confirmed stays, however full the disk is."""

    async def run() -> None:
        clock = FakeClock()
        storage = await with_consumers(await opened(small_disk / "data", clock))
        await filled(storage, 0)
        for _ in range(5):
            clock.advance(2)
            await storage.relieve()
        for stream in STREAMS:
            stats = await (await storage.store(stream)).stats()
            assert stats.start == 0
            with pytest.raises((DiskFull, BufferFull)):
                await (await storage.store(stream)).append(sealed(messages(20, first=10**6, object_bytes=500)))
        await storage.close()

    asyncio.run(run())


ZONE = """
[zone]
name = "plant"
[tls]
ca = "ca.crt"
certificate = "a.crt"
key = "a.key"
[streams.operational]
[streams.audit]
"""


def test_a_node_says_that_its_disk_is_full_and_empties_it() -> None:
    """While a disk is full an alert lasts, and the node's own looking after makes room until it can be cleared."""

    async def run() -> None:
        config, clock, disk = parse(ZONE), FakeClock(), SimulatedDisk()
        storage = await with_consumers(await opened(disk, clock))
        metrics, board = Metrics(), LinkRegistry(clock)
        guard = Guard(Matrix.of(config), clock, lambda decision, caller: None)
        parts = NodeContext(storage, NodeSettings.of(config), guard, clock, board, metrics)
        alerts = AlertBoard("plant", config.alerts, metrics, clock, lambda event, **fields: None)
        upkeep = Upkeep(config, parts, alerts, lambda event, **fields: None)
        disk.fill_up(600_000)
        await filled(storage, 0)
        await upkeep.look()
        assert "disk_full" in {each["alert"] for each in alerts.active()}
        for stream in STREAMS:
            end = (await (await storage.store(stream)).stats()).end
            await storage.cursors.commit(f"reads-{stream}", Confirmation(end - 1))
        await storage.cursors.retire("slow", "gone for good")
        for _ in range(30):
            clock.advance(2)
            await upkeep.look()
        assert "disk_full" not in {each["alert"] for each in alerts.active()}
        await (await storage.store("audit")).append(sealed(messages(5, first=10**6)))
        await alerts.close()
        await storage.close()

    asyncio.run(run())


def test_a_reserve_with_holes_is_filled(tmp_path: Path) -> None:
    """A copied reserve may be a file of holes, which would reserve nothing: its blocks are taken when it is found."""

    async def run() -> None:
        with (tmp_path / RESERVE).open("wb") as file:
            os.ftruncate(file.fileno(), RESERVE_BYTES)
        assert (tmp_path / RESERVE).stat().st_blocks == 0
        storage = await opened(tmp_path, FakeClock())
        assert (tmp_path / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
        await storage.close()

    asyncio.run(run())


def test_uploads_are_refused_while_the_reserve_is_spent(tmp_path: Path) -> None:
    """An artifact does not take the room that a full disk needs to empty itself."""

    async def run() -> None:
        full = True
        folder = await ArtifactFolder.open(tmp_path / "artifacts", is_full=lambda: full)

        async def content() -> AsyncIterator[bytes]:
            yield b"12345"

        with pytest.raises(DiskFull):
            await folder.put("b", "k", content())
        full = False
        assert (await folder.put("b", "k", content())).size_bytes == 5
        await folder.close()

    asyncio.run(run())


def test_an_empty_segment_of_an_older_version_is_replaced_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when the first fact comes after an upgrade refuses that fact, and no more."""
    asyncio.run(_upgraded_when_full(monkeypatch))


async def _upgraded_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = SimulatedDisk(1), FakeClock()
    with monkeypatch.context() as older:
        older.setattr(recovery, "FORWARD_SCHEMA", FORWARD_SCHEMA.remove(len(FORWARD_SCHEMA) - 1))
        storage = await LogStorage.open(disk, clock=clock)
        await storage.forward("operational")
        await storage.close()
    storage = await LogStorage.open(disk, clock=clock)
    forward = await storage.forward("operational")
    disk.fail("create", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        await forward.put_if_absent(batch(2), origin(2))
    assert (await forward.put_if_absent(batch(2), origin(2))).offsets.tolist() == [0, 1]
    await storage.close()
    storage = await LogStorage.open(disk.crash(Random(1)), clock=clock)
    assert (await storage.forward("operational")).end == 2
    await storage.close()
