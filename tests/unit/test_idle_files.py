"""Files that rest between two writes: closed in favour of others, opened again, and never taken for another one."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from bsfg.disk import IDLE, IdleDescriptors
from bsfg.errors import BsfgError, OutcomeUnknown, StorageClosed
from bsfg.stores.log.files import DiskFiles, NotBegun, SyncFailed
from bsfg.stores.log.journal import Journal, Record
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.shared.committer import Committer, Workers
from bsfg.testing.facts import messages, sealed


def close_idle() -> None:
    """Close every descriptor that is idle, as a shortage does."""
    while IDLE.let_one_go():
        pass


def descriptors_of(folder: Path) -> list[str]:
    """Give the files of a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if path.startswith(f"{folder}/"):
            found.append(path.removeprefix(f"{folder}/"))
    return sorted(found)


def test_the_least_used_descriptor_is_closed(tmp_path: Path) -> None:
    """Of idle descriptors only those used last stay open, and what is taken out is nobody else's."""
    idle = IdleDescriptors(2)
    owners = [object() for _ in range(4)]
    fds = [os.open(tmp_path, os.O_RDONLY) for _ in owners]
    idle.keep(owners[0], fds[0])
    idle.keep(owners[1], fds[1])
    assert idle.take(owners[0]) == fds[0]
    idle.keep(owners[2], fds[2])
    idle.keep(owners[3], fds[3])
    assert idle.take(owners[1]) is None
    idle.keep(owners[0], fds[0])
    assert [idle.take(owner) for owner in owners] == [fds[0], None, None, fds[3]]
    os.close(fds[0])
    os.close(fds[3])
    assert descriptors_of(tmp_path.parent).count(tmp_path.name) == 0


def test_a_file_that_was_closed_goes_on_at_its_end(tmp_path: Path) -> None:
    """An idle file has no descriptor after a shortage; the next write opens it and follows the last one."""
    file = DiskFiles(tmp_path).create("a")
    file.write([b"one "])
    file.sync()
    close_idle()
    assert descriptors_of(tmp_path) == []
    file.write([b"two"])
    file.sync()
    assert ((tmp_path / "a").read_bytes(), descriptors_of(tmp_path)) == (b"one two", ["a"])
    file.close()
    assert descriptors_of(tmp_path) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write([b"more"])


def test_what_is_not_synced_keeps_its_descriptor(tmp_path: Path) -> None:
    """The descriptor through which something was written is the one that is asked whether it is durable."""
    files = DiskFiles(tmp_path)
    file = files.create("a")
    close_idle()
    file.write([b"one"])
    close_idle()
    assert descriptors_of(tmp_path) == ["a"]
    file.sync()
    file.truncate(1)
    close_idle()
    assert descriptors_of(tmp_path) == ["a"]
    file.sync()
    close_idle()
    assert descriptors_of(tmp_path) == []
    file.close()


def test_a_failed_sync_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose sync failed takes nothing more, although it could be opened again and would sync well."""

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = DiskFiles(tmp_path).create("a")
    file.write([b"one"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        with pytest.raises(SyncFailed):
            file.sync()
    attempts: list[Callable[[], object]] = [lambda: file.write([b"two"]), file.sync, lambda: file.truncate(0)]
    for attempt in attempts:
        with pytest.raises(SyncFailed):
            attempt()
    assert ((tmp_path / "a").read_bytes(), descriptors_of(tmp_path)) == (b"one", [])


@pytest.mark.parametrize("change", ["replaced", "longer", "gone"])
def test_another_file_of_the_same_name_is_not_written(tmp_path: Path, change: str) -> None:
    """An idle file that somebody replaced, changed or removed is refused, and what is there stays as it is."""
    path = tmp_path / "a"
    file = DiskFiles(tmp_path).create("a")
    file.write([b"one"])
    file.sync()
    close_idle()
    if change == "replaced":
        (tmp_path / "b").write_bytes(b"two")
        (tmp_path / "b").replace(path)
    elif change == "longer":
        path.write_bytes(b"one and more")
    else:
        path.unlink()
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(NotBegun):
        file.write([b"three"])
    file.truncate(3)
    assert (path.read_bytes() if path.exists() else None) == before
    file.close()


def test_a_journal_follows_its_new_file(tmp_path: Path) -> None:
    """A journal that was rewritten and then closed for a while goes on in the file that has its name now."""
    files = DiskFiles(tmp_path)
    journal = Journal(files, "a.journal", lambda: [Record({"all": 1})])
    journal.open()
    journal.append([Record({"at": 0})])
    journal.compact()
    close_idle()
    journal.append([Record({"at": 1})])
    journal.close()
    again = Journal(files, "a.journal", lambda: ())
    assert [record.head for record in again.open()] == [{"all": 1}, {"at": 1}]
    again.close()


def test_a_log_does_not_write_into_the_file_of_another(tmp_path: Path) -> None:
    """A segment that was replaced under an idle log ends the log with an error; nothing is acknowledged."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path)
        store = await storage.store("s")
        await store.append(sealed(messages(1)))
        close_idle()
        segment = next((tmp_path / "streams/s/store").glob("*.seg"))
        content = segment.read_bytes()
        (tmp_path / "copy").write_bytes(content)
        (tmp_path / "copy").replace(segment)
        with pytest.raises(BsfgError):
            await store.append(sealed(messages(1, first=1)))
        with pytest.raises(StorageClosed):
            await store.append(sealed(messages(1, first=2)))
        assert segment.read_bytes() == content
        await storage.close()

    asyncio.run(run())


def test_many_committers_share_few_threads() -> None:
    """Each committer works in order and one group at a time, whichever thread does it; all together have few."""

    async def run() -> None:
        workers = Workers("few", 3)
        seen: dict[int, list[int]] = {at: [] for at in range(40)}
        at_once: dict[int, int] = dict.fromkeys(seen, 0)
        threads: set[int] = set()

        def processing(number: int, items: Sequence[int]) -> Sequence[int]:
            at_once[number] += 1
            assert at_once[number] == 1
            threads.add(threading.get_ident())
            seen[number] += items
            at_once[number] -= 1
            return items

        committers = [Committer[int, int](workers, partial(processing, at), max_weight=4) for at in seen]
        answers = [each.submit(item) for item in range(50) for each in committers]
        assert await asyncio.gather(*answers) == [item for item in range(50) for _ in committers]
        assert all(items == list(range(50)) for items in seen.values())
        assert 1 <= len(threads) <= 3
        for each in committers:
            await each.close()
            with pytest.raises(StorageClosed):
                each.submit(1)
        workers.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("few-")]

    asyncio.run(run())


def test_a_committer_finishes_what_is_queued_before_it_closes() -> None:
    """Closing waits for everything that was accepted, also while others keep all threads busy."""

    async def run() -> None:
        workers, gate, done = Workers("few", 1), threading.Event(), list[int]()

        def slow(items: list[int]) -> list[int]:
            gate.wait()
            return items

        def noted(items: Sequence[int]) -> Sequence[int]:
            done.extend(items)
            return items

        busy = Committer[int, int](workers, lambda items: slow(list(items)))
        other = Committer[int, int](workers, noted, max_weight=1)
        first = busy.submit(0)
        later = [other.submit(at) for at in range(5)]
        closing = asyncio.ensure_future(other.close())
        await asyncio.sleep(0)
        assert done == []
        gate.set()
        await closing
        assert (done, await first, await asyncio.gather(*later)) == ([0, 1, 2, 3, 4], 0, [0, 1, 2, 3, 4])
        await busy.close()
        workers.close()

    asyncio.run(run())


def test_a_journal_without_a_descriptor_refuses_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that cannot be opened again for now says so; nothing has happened, and the next record is kept."""
    journal = Journal(DiskFiles(tmp_path), "a.journal", lambda: ())
    journal.open()
    close_idle()

    def none_left(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("bsfg.disk.SPARES.open", none_left)
        with pytest.raises(BsfgError) as caught:
            journal.append([Record({"at": 0})])
    assert caught.value.retryable
    assert not isinstance(caught.value, OutcomeUnknown)
    journal.append([Record({"at": 1})])
    journal.close()
    assert [record.head for record in Journal(DiskFiles(tmp_path), "a.journal", lambda: ()).open()] == [{"at": 1}]
