"""A process without descriptors refuses for a while and ends no log; a folder has one writer, whatever is removed."""

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bsfg import disk
from bsfg.errors import FolderLocked, StorageBusy
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.sdk.spool import Spool
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import messages, sealed

SMALL = LogOptions(segment_bytes=16_384)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process have no descriptor left, as when too many connections are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 32, hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_log_works_on_without_descriptors(tmp_path: Path) -> None:
    """With every descriptor of the process taken, segments are begun and removed, and positions are confirmed."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path, options=SMALL)
        store = await storage.store("s")
        await storage.cursors.create(ConsumerSpec("c", "s", Buffer.STORE))
        await asyncio.to_thread(lambda: None)
        with no_descriptors():
            for at in range(12):
                await store.append(sealed(messages(1, first=at, object_bytes=9_000)))
            await storage.cursors.commit("c", Confirmation(9))
            await store.truncate_before(8)
            assert [frame.first async for frame in store.replay(8)] == [8, 9, 10, 11]
        if disk.SPARES.short:
            disk.SPARES.hold()
        await storage.close()
        storage = await LogStorage.open(tmp_path, options=SMALL)
        stats = await (await storage.store("s")).stats()
        assert (stats.start, stats.end) == (8, 12)
        await storage.close()

    asyncio.run(run())


def test_without_any_spare_a_log_refuses_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the spare descriptors are gone, too, a new segment is refused for now, and accepted when there are some."""
    monkeypatch.setattr(disk.SPARES, "_let_one_go", lambda: False)

    async def run() -> None:
        storage = await LogStorage.open(tmp_path, options=SMALL)
        store = await storage.store("s")
        facts = sealed(messages(3, object_bytes=9_000))
        await asyncio.to_thread(lambda: None)
        with no_descriptors():
            await store.append(facts.slice(0, 1))
            with pytest.raises(StorageBusy) as caught:
                await store.append(facts.slice(1, 1))
            assert caught.value.retryable
            small = await store.append(sealed(messages(1, first=100)))
            assert small.offsets.tolist() == [1]
        receipt = await store.append(facts.slice(1, 2))
        assert receipt.offsets.tolist() == [2, 3]
        await storage.close()

    asyncio.run(run())


def test_spare_descriptors_are_taken_back(tmp_path: Path) -> None:
    """Spares that a shortage has cost are held again when it is over."""
    spares = disk.SpareDescriptors(4)
    spares.hold()
    (tmp_path / "a").write_bytes(b"1")
    with no_descriptors():
        fds = [spares.open(tmp_path / "a", os.O_RDONLY) for _ in range(3)]
        assert spares.short
        with pytest.raises(OSError, match="Too many open files"):
            [spares.open(tmp_path / "a", os.O_RDONLY) for _ in range(2)]
    for fd in fds:
        spares.close(fd)
    assert not spares.short


def test_removing_the_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    """A second writer is refused although somebody removed the file that says who writes, for every kind of folder."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path / "data")
        artifacts = await ArtifactFolder.open(tmp_path / "artifacts")
        spool = Spool.open(tmp_path / "spool", "outbox")
        removed = [tmp_path / "data/LOCK", tmp_path / "artifacts/lock", tmp_path / "spool/LOCK"]
        for path in removed:
            path.unlink()
        for _ in range(2):
            with pytest.raises(FolderLocked):
                await LogStorage.open(tmp_path / "data")
            with pytest.raises(FolderLocked):
                await ArtifactFolder.open(tmp_path / "artifacts")
            with pytest.raises(FolderLocked):
                Spool.open(tmp_path / "spool", "outbox")
        await storage.close()
        await artifacts.close()
        spool.close()
        await (await LogStorage.open(tmp_path / "data")).close()
        await (await ArtifactFolder.open(tmp_path / "artifacts")).close()
        Spool.open(tmp_path / "spool", "outbox").close()

    asyncio.run(run())
