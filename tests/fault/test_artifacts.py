"""An artifact folder survives power loss, kills, broken disks and full ones, and stays small in memory."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bsfg.artifacts import StoredArtifact
from bsfg.errors import (
    ArtifactMissing,
    BsfgError,
    DigestMismatch,
    DiskFull,
    FolderLocked,
    FormatUnsupported,
    OutcomeUnknown,
    StorageClosed,
    StorageFailed,
    StorageReadOnly,
)
from bsfg.stores.artifacts import ArtifactFolder
from bsfg.stores.artifacts.contents import Shards, encoded
from bsfg.stores.artifacts.transfer import stored_pieces
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.artifact_uploads import BUCKET, HELLO, NAME, all_names, digest_of, noise, stream, whole
from bsfg.testing.disk import FAILING, PowerLoss, SimulatedArtifactDisk

GRACE_SECONDS = 60.0
BIG = noise((1 << 20) + 77)


class Ledger:
    """What the store has promised so far: names, contents, and what may have been collected."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], str] = {}
        self.contents: dict[str, bytes] = {}
        self.sent = {digest_of(data): data for data in (HELLO, BIG, b"", b"orphan", b"late")}
        self.leaving: set[str] = set()

    async def put(self, store: ArtifactFolder, key: str, data: bytes) -> None:
        """Put content, and write down what was answered."""
        artifact = await store.put(BUCKET, key, stream(data))
        self.names[BUCKET, key] = artifact.digest
        self.contents[artifact.digest] = data

    async def check(self, disk: SimulatedArtifactDisk, clock: FakeClock) -> None:
        """Open what is found and hold it against the promises."""
        store = await ArtifactFolder.open(disk, clock=clock)
        try:
            for digest, data in self.contents.items():
                if digest not in self.leaving or await store.exists(digest):
                    assert await whole(store, digest) == data
            for name, digest in self.names.items():
                found = await store.stat(*name)
                assert found is not None or digest in self.leaving
                assert found is None or found.digest == digest
            for digits in Shards(disk, "content").files():
                assert digest_of(await whole(store, f"sha256:{digits}")) == f"sha256:{digits}"
            async for artifact in store.names():
                assert await store.exists(artifact.digest) or artifact.digest in self.leaving
            assert disk.list("incoming") == []
        finally:
            await store.close()


async def script(disk: SimulatedArtifactDisk, clock: FakeClock, ledger: Ledger) -> None:
    """Do a bit of everything that changes a folder."""
    store = await ArtifactFolder.open(disk, clock=clock)
    try:
        await ledger.put(store, "one", HELLO)
        await ledger.put(store, "big", BIG)
        await ledger.put(store, "copy", HELLO)
        await store.add(stream(b"orphan"))
        await ledger.put(store, "empty", b"")
        clock.advance(GRACE_SECONDS)
        orphans = {digest_of(b"orphan"), digest_of(b"")}
        ledger.leaving |= orphans
        referenced = set(ledger.contents) - orphans
        await store.collect(referenced, now_unix_ms=clock.now_unix_ms(), grace_seconds=GRACE_SECONDS)
        await store.references.remember(b"memory")
        ledger.leaving -= {digest_of(b"orphan")}
        await ledger.put(store, "late", b"late")
        await ledger.put(store, "orphan", b"orphan")
    finally:
        await store.close()


async def crashed_script(operation: int) -> tuple[SimulatedArtifactDisk, FakeClock, Ledger, bool]:
    """Run the script with the power cut at an operation; tell whether it came to that."""
    disk, clock, ledger = SimulatedArtifactDisk(operation), FakeClock(), Ledger()
    disk.crash_at(operation)
    try:
        await script(disk, clock, ledger)
    except PowerLoss:
        return disk, clock, ledger, True
    return disk, clock, ledger, False


def test_power_loss_at_every_operation() -> None:
    """Wherever the power is cut, what was answered is there and whole, and nothing half can be seen."""

    async def campaign() -> int:
        operation = 0
        while True:
            operation += 1
            disk, clock, ledger, cut = await crashed_script(operation)
            for seed in range(3):
                await ledger.check(disk.after_power_loss(Random(seed)), clock)
            if not cut:
                return operation

    assert asyncio.run(campaign()) > 60


def test_what_a_killed_process_left_is_made_durable_before_it_counts() -> None:
    """What a claim finds after a kill survives the next power loss, although the first process never synced it."""

    async def campaign() -> int:
        operation, claimed_late = 0, 0
        while True:
            operation += 1
            disk, clock, ledger, cut = await crashed_script(operation)
            if not cut:
                return claimed_late
            killed = disk.after_kill()
            store = await ArtifactFolder.open(killed, clock=clock)
            digests = sorted(ledger.sent)
            sizes = await store.claim(digests)
            found = [digest for digest, size in zip(digests, sizes, strict=True) if size is not None]
            names = [artifact async for artifact in store.names()]
            await store.close()
            claimed_late += len(set(found) - set(ledger.contents))
            for seed in range(3):
                again = await ArtifactFolder.open(killed.after_power_loss(Random(seed)), clock=clock)
                for digest in found:
                    assert await whole(again, digest) == ledger.sent[digest]
                for artifact in names:
                    assert await again.stat(artifact.bucket, artifact.key) == artifact
                await again.close()

    assert asyncio.run(campaign()) > 0


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("operation", sorted({*FAILING} - {"allocate", "truncate", "open"}))
def test_every_fault_is_an_error_of_ours_and_a_repeat_succeeds(operation: str, error: int) -> None:
    """Whichever call of the disk fails, the caller gets one of our errors, keeps what it had, and may try again."""
    expected = {errno.EIO: StorageFailed, errno.ENOSPC: DiskFull, errno.EROFS: StorageReadOnly}[error]

    async def attempt(after: int) -> bool:
        disk, clock, ledger = SimulatedArtifactDisk(), FakeClock(), Ledger()
        disk.fail(operation, after=after, error=error)
        for _ in range(3):
            try:
                await script(disk, clock, ledger)
                break
            except (expected, OutcomeUnknown):
                await ledger.check(disk.after_kill(), clock)
        else:
            raise AssertionError("the fault did not pass")
        await ledger.check(disk.after_kill(), clock)
        return disk._calls[operation] > after

    async def campaign() -> int:
        count = 0
        while await attempt(count):
            count += 1
        return count

    assert asyncio.run(campaign()) > 2


def test_a_full_disk_leaves_the_store_usable() -> None:
    """An upload that fills the disk is refused and gives its space back; a smaller one then fits."""

    async def run() -> None:
        disk = SimulatedArtifactDisk()
        store = await ArtifactFolder.open(disk)
        disk.fill_up(1 << 20)
        with pytest.raises(DiskFull):
            await store.put(*NAME, stream(BIG, BIG))
        assert disk.list("incoming") == []
        assert (await store.put(*NAME, stream(HELLO))).digest == digest_of(HELLO)
        await store.close()

    asyncio.run(run())


def test_a_failed_sync_of_names_closes_the_store() -> None:
    """When it is unknown whether a name is durable the store closes itself, and a repeat after reopening succeeds."""

    async def run() -> None:
        disk = SimulatedArtifactDisk()
        store = await ArtifactFolder.open(disk)
        await store.put(*NAME, stream(HELLO))
        disk.fail("sync_folder")
        with pytest.raises(OutcomeUnknown):
            await store.put(*NAME, stream(HELLO))
        with pytest.raises(StorageClosed):
            await store.stat(*NAME)
        await store.close()
        store = await ArtifactFolder.open(disk)
        await store.put(*NAME, stream(HELLO))
        assert await whole(store, digest_of(HELLO)) == HELLO
        await store.close()

    asyncio.run(run())


def test_a_read_error_is_told_and_not_taken_for_the_end() -> None:
    """An input/output error while reading is an error of ours."""

    async def run() -> None:
        disk = SimulatedArtifactDisk()
        store = await ArtifactFolder.open(disk)
        content = await store.add(stream(HELLO))
        disk.fail("read")
        with pytest.raises(StorageFailed):
            await whole(store, content.digest)
        assert await whole(store, content.digest) == HELLO
        await store.close()

    asyncio.run(run())


def test_a_damaged_record_is_found_and_written_anew(tmp_path: Path) -> None:
    """A name whose record was damaged says so; putting the artifact again mends it."""

    async def run() -> None:
        store = await ArtifactFolder.open(tmp_path)
        put = await store.put(*NAME, stream(HELLO))
        (record,) = (tmp_path / "names").rglob("*.json")
        good, other = record.read_bytes(), encoded(replace(put, key="another"))
        for bad in (b"", good[:40], good.replace(b"B1042", b"B1043"), b"{}\n", bytes(len(good)), other):
            record.write_bytes(bad)
            with pytest.raises(DigestMismatch):
                await store.stat(*NAME)
            assert await all_names(store) == []
        again = await store.put(*NAME, stream(HELLO))
        assert (again.digest, await store.stat(*NAME)) == (put.digest, again)
        await store.close()

    asyncio.run(run())


def test_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    """A second writer is refused; whoever only reads does so beside the writer and after it, and leaves no trace."""

    async def run() -> None:
        with pytest.raises(ArtifactMissing):
            list(stored_pieces(tmp_path / "nothing", f"sha256:{64 * '0'}"))
        assert not (tmp_path / "nothing").exists()
        store = await ArtifactFolder.open(tmp_path)
        put = await store.put(*NAME, stream(HELLO))
        with pytest.raises(FolderLocked):
            await ArtifactFolder.open(tmp_path)
        for _ in range(2):
            assert b"".join(stored_pieces(tmp_path, put.digest)) == HELLO
            await store.close()

    asyncio.run(run())


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A folder of a later format is not touched."""

    async def run() -> None:
        await (await ArtifactFolder.open(tmp_path)).close()
        (tmp_path / "artifacts.json").write_bytes(b'{"format": 2}')
        with pytest.raises(FormatUnsupported):
            await ArtifactFolder.open(tmp_path)

    asyncio.run(run())


def test_memory_for_references(tmp_path: Path) -> None:
    """What was remembered is recalled after a restart; damaged, it counts as forgotten."""

    async def run() -> None:
        store = await ArtifactFolder.open(tmp_path)
        assert await store.references.recall() is None
        await store.references.remember(b"one")
        await store.references.remember(b"two")
        await store.close()
        store = await ArtifactFolder.open(tmp_path)
        assert await store.references.recall() == b"two"
        (tmp_path / "references").write_bytes(b"rubbish")
        assert await store.references.recall() is None
        await store.close()

    asyncio.run(run())


def test_content_is_a_plain_file_and_its_name_harmless(tmp_path: Path) -> None:
    """On the disk content is called by its digest alone, and no key ever becomes a path."""

    async def run() -> None:
        store = await ArtifactFolder.open(tmp_path)
        for key in ("CON", "a/b/c", "x" * 1024, "ä", "A", "a"):
            await store.put(BUCKET, key, stream(HELLO))
        await store.close()

    asyncio.run(run())
    digits = digest_of(HELLO).removeprefix("sha256:")
    assert (tmp_path / "content" / digits[:2] / digits).read_bytes() == HELLO
    allowed = set("0123456789abcdef.jsonrtileckmg")
    for _, folders, files in os.walk(tmp_path):
        assert all(set(name) <= allowed and len(name) <= 69 for name in (*folders, *files))


UPLOADER = """
    import asyncio, sys
    from bsfg.stores.artifacts import ArtifactFolder

    async def parts(number):
        for part in range(6):
            yield bytes([number % 251, part]) * 150_000
            await asyncio.sleep(0)

    async def main():
        store = await ArtifactFolder.open(sys.argv[1])
        for number in range(int(sys.argv[2]), 1 << 30):
            artifact = await store.put("killed", f"key-{number}", parts(number))
            print(number, artifact.digest, flush=True)

    asyncio.run(main())
"""


def uploads_until_killed(folder: Path, first: int, uploads: int, random: Random) -> list[tuple[int, str]]:
    """Let a process upload, kill it at any moment after some uploads, and give what it said was stored."""
    command = [sys.executable, "-c", textwrap.dedent(UPLOADER), str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(uploads)]
        # The moment is chosen by what the process has written so far, so that it is in the middle of an upload. It
        # is stopped while it is looked at: otherwise it might be done before it is killed.
        wanted = random.randrange(1, 1_500_000)
        while True:
            process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            if any(size > wanted for size in sizes_in(folder / "incoming")):
                break
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()
    lines = [line.split() for line in acknowledged if line.endswith("\n")]
    return [(int(number), digest) for number, digest in lines]


def sizes_in(folder: Path) -> list[int]:
    """Give the sizes of the files in a folder that changes."""
    sizes = []
    for name in os.listdir(folder):
        try:
            sizes.append((folder / name).stat().st_size)
        except FileNotFoundError:
            continue
    return sizes


def test_kill_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """After SIGKILL everything that was answered is whole, the broken upload is gone, and its file with it."""
    random, known = Random(3), dict[int, str]()
    for number in range(3):
        known.update(dict(uploads_until_killed(tmp_path, len(known), number + 1, random)))
        assert len(sizes_in(tmp_path / "incoming")) >= 1

        async def check() -> None:
            store = await ArtifactFolder.open(tmp_path)
            assert sizes_in(tmp_path / "incoming") == []
            for each, digest in known.items():
                artifact = await store.stat("killed", f"key-{each}")
                assert isinstance(artifact, StoredArtifact)
                assert artifact.digest == digest
                assert digest_of(await whole(store, digest)) == digest
            # At most the one upload whose answer was not heard is there besides.
            assert len(await all_names(store)) <= len(known) + 1
            await store.close()

        asyncio.run(check())


STREAMER = """
    import asyncio, hashlib, resource, sys
    from bsfg.stores.artifacts import ArtifactFolder

    async def parts(count):
        for number in range(count):
            yield number.to_bytes(4, "big") * (64 << 8)

    async def round_trip(store, key, count):
        artifact = await store.put("large", key, parts(count))
        sha256 = hashlib.sha256()
        async for piece in store.get(artifact.digest):
            sha256.update(piece)
        assert "sha256:" + sha256.hexdigest() == artifact.digest
        return artifact.size_bytes

    async def main():
        store = await ArtifactFolder.open(sys.argv[1])
        await round_trip(store, "small", 80)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = await round_trip(store, "large", 4_800)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await store.close()
        print(size, (after - before) * 1024)

    asyncio.run(main())
"""


def test_a_large_artifact_passes_in_little_memory(tmp_path: Path) -> None:
    """300 MB are stored and read back while the process grows by less than 16 MB."""
    command = [sys.executable, "-c", textwrap.dedent(STREAMER), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size_bytes, growth_bytes = map(int, answer.split())
    assert size_bytes > 300_000_000
    assert growth_bytes < 16 << 20


def test_a_source_may_raise_what_it_likes(tmp_path: Path) -> None:
    """An operating-system error of a source is passed on and not taken for one of the disk's."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")

    async def run() -> None:
        store = await ArtifactFolder.open(tmp_path)
        with pytest.raises(ConnectionResetError):
            await store.put(*NAME, broken())
        assert not issubclass(ConnectionResetError, BsfgError)
        assert await store.stat(*NAME) is None
        await store.close()

    asyncio.run(run())
