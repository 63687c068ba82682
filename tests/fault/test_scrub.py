"""The scrub: rot in files that nobody reads is found, told with file and byte, and recorded as a reader would."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bsfg.config import Alerts
from bsfg.errors import StorageFailed
from bsfg.node.alerts import AlertBoard
from bsfg.node.metrics import Metrics
from bsfg.node.scrub import Pace, Scrub
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.retention import GapReason
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.reader import LogFolder
from bsfg.stores.log.scrub import Log, sealed_bytes, walk
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch

STREAM, PER_BATCH = "operational", 50
SMALL = LogOptions(segment_bytes=65_536, index_run_keys=500)
FAST = Pace(0.001, 1 << 40)


async def filled(folder: Path) -> LogStorage:
    """Give a storage that is open, with sealed segments, key segments and artifacts."""
    storage = await LogStorage.open(folder, options=SMALL)
    store = await storage.store(STREAM)
    await storage.cursors.create(ConsumerSpec("erp", STREAM))
    for number in range(40):
        await store.append(batch(PER_BATCH, first=number * PER_BATCH))
    await storage.cursors.commit("erp", Confirmation(through=449))
    await store.truncate_before(450)
    artifacts = await ArtifactFolder.open(folder / "artifacts")
    await artifacts.put("lab", "report", _chunks(b"x" * 1_000_000), media_type="text/plain")
    await artifacts.close()
    return storage


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


def flip(path: Path, position: int) -> None:
    """Flip a bit of a file in place, as a medium does."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


class Scrubbed:
    """A scrub of a folder, with what it told."""

    def __init__(self, folder: Path, storage: LogStorage) -> None:
        self.clock = FakeClock()
        self.state = NodeState(folder)
        ended = (self.state.get("scrub", "pass") or {}).get("ended_unix_ms")
        if ended is not None:
            self.clock.advance((ended - self.clock.now_unix_ms()) / 1000)
        self.notes: list[str] = []
        self.then: Callable[[], None] = lambda: None

        def note(event: str, **fields: Any) -> None:
            self.notes.append(event)
            self.then()

        self.alerts = AlertBoard("plant-a", Alerts(), Metrics(), self.clock, note)

        async def read(log: Log, first: int, end: int) -> AsyncIterator[Any]:
            store = await storage.store(log[0])
            async for frame in store.replay(first, end=end):
                yield frame

        files = DiskFiles(folder), DiskFiles(folder / "artifacts")
        self.scrub = Scrub(files, FAST, self.state, self.clock, self.alerts, note, read)

    async def once(self) -> list[dict[str, Any]]:
        """Let it go once through everything; give the alerts that last then."""
        before = self.scrub.status()["ended_unix_ms"]
        self.clock.advance(1)
        self.scrub.start()
        while self.scrub.status()["ended_unix_ms"] == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self.scrub.stop()
        self.state.close()
        return self.alerts.active()


def test_a_sound_folder_is_read_whole(tmp_path: Path) -> None:
    """Every sealed byte is read, in small steps, and nothing is told."""

    async def run() -> None:
        storage = await filled(tmp_path)
        files = DiskFiles(tmp_path), DiskFiles(tmp_path / "artifacts")
        steps = list(walk(*files))
        assert all(step.size_bytes <= 256 << 10 for step in steps)
        assert [step.rot for step in steps if step.rot] == []
        paths = [step.path for step in steps if step.rot is not None]
        assert paths == sorted(paths)
        assert any(path.endswith(".keys") for path in paths)
        assert any(path.startswith("artifacts/") for path in paths)
        assert any(path.endswith(".seg") for path in paths)
        later = [step.path for step in walk(*files, paths[3]) if step.rot is not None]
        assert later == paths[4:]
        scrubbed = Scrubbed(tmp_path, storage)
        assert await scrubbed.once() == []
        status = scrubbed.scrub.status()
        assert status["damaged"] == 0
        assert status["total_bytes"] == sealed_bytes(*files)
        assert 0.9 * status["total_bytes"] < status["done_bytes"]
        assert scrubbed.notes == []
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("number", [1, -1], ids=["in the middle", "at the end"])
def test_a_flipped_bit_in_a_sealed_segment_is_told_and_recorded(tmp_path: Path, number: int) -> None:
    """The alert names file, byte and entries; the log records the gap; the next pass knows it; a restart tells it."""

    async def run() -> None:
        storage = await filled(tmp_path)
        segment = LogFolder(DiskFiles(tmp_path), STREAM, Buffer.STORE).view().segments[2]
        ref = segment.frames[number]
        flip(tmp_path / segment.path, ref.position + FRAME_HEADER_BYTES + 100)
        [alert] = await Scrubbed(tmp_path, storage).once()
        assert (alert["alert"], alert["about"]) == ("scrub_damage", segment.path)
        assert alert["text"].startswith(f"{segment.path} at byte {ref.position}, entries {ref.base} to {ref.end - 1}: ")
        gaps = await (await storage.store(STREAM)).gaps()
        damaged = [(gap.first, gap.last) for gap in gaps if gap.reason == GapReason.DAMAGED]
        assert damaged == [(ref.base, ref.end - 1)]
        again = Scrubbed(tmp_path, storage)
        assert await again.once() == []
        assert again.notes == ["alert_raised", "alert_cleared"]
        assert again.scrub.status()["damaged"] == 1
        await storage.close()

    asyncio.run(run())


def test_keys_artifacts_and_headers_are_checked(tmp_path: Path) -> None:
    """Rot in a key segment, in an artifact and in the header of a segment is told; files that leave are forgotten."""

    async def run() -> None:
        storage = await filled(tmp_path)
        [keys, *_] = sorted((tmp_path / "streams" / STREAM / "store" / "keys").glob("*.keys"))
        [content] = [path for path in (tmp_path / "artifacts" / "content").rglob("*") if path.is_file()]
        segment = LogFolder(DiskFiles(tmp_path), STREAM, Buffer.STORE).view().segments[1]
        flip(keys, 50)
        flip(content, 500_000)
        flip(tmp_path / segment.path, 40)
        alerts = await Scrubbed(tmp_path, storage).once()
        expected = {str(keys.relative_to(tmp_path)), str(content.relative_to(tmp_path)), segment.path}
        assert {alert["about"] for alert in alerts} == expected
        content.unlink()
        flip(keys, 50)
        alerts = await Scrubbed(tmp_path, storage).once()
        assert [alert["about"] for alert in alerts] == [segment.path]
        await storage.close()

    asyncio.run(run())


def test_a_pass_that_was_interrupted_goes_on_and_forgets_nothing(tmp_path: Path) -> None:
    """A pass that ends with its node goes on behind what was read, and what was found there is still told."""

    async def run() -> None:
        storage = await filled(tmp_path)
        [content] = [path for path in (tmp_path / "artifacts" / "content").rglob("*") if path.is_file()]
        flip(content, 500_000)
        first = Scrubbed(tmp_path, storage)
        first.then = first.scrub._stopping.set  # artifacts are read before everything else
        first.scrub.start()
        await asyncio.wait_for(first.scrub._stopping.wait(), 30)
        await first.scrub.stop()
        first.state.close()
        assert first.scrub.status()["ended_unix_ms"] is None
        again = Scrubbed(tmp_path, storage)
        [alert] = await again.once()
        assert alert["about"] == str(content.relative_to(tmp_path))
        status = again.scrub.status()
        assert 0 < status["done_bytes"] < 1_000_000 < status["total_bytes"]
        await storage.close()

    asyncio.run(run())


def test_a_bad_sector_is_rot() -> None:
    """What the medium cannot give is named like what it gives wrongly."""
    disk = SimulatedDisk()

    async def fill() -> None:
        storage = await LogStorage.open(disk, options=SMALL)
        store = await storage.store(STREAM)
        for number in range(20):
            await store.append(batch(PER_BATCH, first=number * PER_BATCH))
        await storage.close()

    asyncio.run(fill())
    segment = LogFolder(disk, STREAM, Buffer.STORE).view().segments[0]
    disk.spoil(segment.path, segment.frames[1].position + 300, 10)
    [rot, *_] = [rot for step in walk(disk, SimulatedDisk()) for rot in step.rot or ()]
    assert rot.where == segment.path
    assert "cannot be read" in rot.why


def test_a_folder_that_cannot_be_listed_keeps_nothing_else_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stray file among the folders is passed over, a folder behind a bad sector is told, and the rest is read."""

    async def run() -> None:
        storage = await filled(tmp_path)
        (tmp_path / "artifacts/content/stray").write_bytes(b"no folder")
        await storage.store("another")
        files = DiskFiles(tmp_path), DiskFiles(tmp_path / "artifacts")
        every = {step.path for step in walk(*files)}
        listed = DiskFiles.list

        def sometimes(files: DiskFiles, path: str) -> list[str]:
            if path == "streams/another/store":
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return listed(files, path)

        monkeypatch.setattr(DiskFiles, "list", sometimes)
        steps = list(walk(*files))
        assert {step.path for step in steps} == every | {"streams/another/store"}
        [rot] = [rot for step in steps for rot in step.rot or ()]
        assert "streams/another/store" in rot.text and "cannot be listed" in rot.text
        [alert] = await Scrubbed(tmp_path, storage).once()
        assert "streams/another/store" in alert["text"]
        await storage.close()

    asyncio.run(run())


def test_a_stream_whose_folder_cannot_be_read_is_alone_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage opens, lists both streams, and serves the other one."""

    async def run() -> None:
        storage = await filled(tmp_path)
        await storage.store("another")
        await storage.close()
        exists, listed = DiskFiles.exists, DiskFiles.list

        def check(path: str) -> None:
            if path.startswith("streams/another/store"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        def find(files: DiskFiles, path: str) -> bool:
            check(path)
            return exists(files, path)

        def look(files: DiskFiles, path: str) -> list[str]:
            check(path)
            return listed(files, path)

        monkeypatch.setattr(DiskFiles, "exists", find)
        monkeypatch.setattr(DiskFiles, "list", look)
        storage = await LogStorage.open(tmp_path, options=SMALL)
        assert {stream for stream, _ in await storage.streams()} == {STREAM, "another"}
        assert (await storage.store(STREAM)).end == 40 * PER_BATCH
        with pytest.raises(StorageFailed):
            await storage.store("another")
        await storage.close()

    asyncio.run(run())
