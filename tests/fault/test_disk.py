"""The simulated disk forgets exactly what a real one may forget, and nothing else."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.syncs import noted_syncs

from bsfg.errors import FolderLocked
from bsfg.spark.land.state import folder_of
from bsfg.stores.log.files import DiskFiles, Files
from bsfg.testing.disk import PowerLoss, SimulatedDisk

OUTCOMES = 300


def after_power_loss(disk: SimulatedDisk) -> list[dict[str, bytes]]:
    """Lose power many times at the same moment, and give what is found each time."""
    return [disk.crash(Random(seed)).content() for seed in range(OUTCOMES)]


def synced_file(disk: SimulatedDisk, path: str, data: bytes) -> None:
    """Write a file and make content and name durable."""
    file = disk.create(path)
    file.write([data])
    file.sync()
    file.close()
    disk.sync_folder(path.rpartition("/")[0])


def test_synced_content_and_name_survive() -> None:
    """What was synced, with its name, is found after every power loss."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"kept")
    assert all(found == {"a": b"kept"} for found in after_power_loss(disk))


def test_synced_content_without_a_name_is_gone() -> None:
    """A file whose folder was never synced may be gone although its content was synced."""
    disk = SimulatedDisk()
    file = disk.create("a")
    file.write([b"kept"])
    file.sync()
    found = after_power_loss(disk)
    assert {} in found
    assert {"a": b"kept"} in found
    assert all(content.get("a", b"kept") == b"kept" for content in found)


def test_unsynced_content_is_lost_in_every_way() -> None:
    """An unsynced write may be lost, kept, torn at any byte, zeroed, overgrown with rubbish or garbled."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"base")
    written = bytes(range(1, 201)) * 5
    disk.open_append("a").write([written])
    tails = [content["a"][4:] for content in after_power_loss(disk)]
    assert all(content["a"][:4] == b"base" for content in after_power_loss(disk))
    assert b"" in tails
    assert written in tails
    torn = {len(tail) for tail in tails if tail == written[: len(tail)]}
    assert len(torn) > 20
    holes = [tail for tail in tails if len(tail) == len(written) and tail != written]
    assert any(tail[:508] == bytes(508) for tail in holes)
    assert any(tail[508:] == written[508:] and tail[:508] != written[:508] for tail in holes)
    flipped = [sum((a ^ b).bit_count() for a, b in zip(tail, written, strict=True)) for tail in holes]
    assert any(1 <= bits <= 3 for bits in flipped)


def test_a_cut_is_durable_only_after_sync() -> None:
    """A truncation may be undone by a power loss until the file is synced."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"0123456789")
    file = disk.open_append("a")
    file.truncate(4)
    assert disk.content()["a"] == b"0123"
    assert {content["a"] for content in after_power_loss(disk)} == {b"0123456789", b"0123"}
    file.sync()
    assert {content["a"] for content in after_power_loss(disk)} == {b"0123"}


def test_old_bytes_may_show_under_a_write_after_a_cut() -> None:
    """When a cut and a write after it are both unsynced, old and new sectors may be found side by side."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"o" * 1024)
    file = disk.open_append("a")
    file.truncate(0)
    file.write([b"n" * 1024])
    assert b"n" * 512 + b"o" * 512 in [content["a"] for content in after_power_loss(disk)]


def test_a_rename_leaves_the_old_or_the_new() -> None:
    """An unsynced rename over another file leaves either the old or the new file under the name."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"old")
    synced_file(disk, "b", b"new")
    disk.rename("b", "a")
    before, after = {"a": b"old", "b": b"new"}, {"a": b"new"}
    found = after_power_loss(disk)
    assert before in found
    assert after in found
    assert all(content in (before, after) for content in found)
    disk.sync_folder("")
    assert all(content == after for content in after_power_loss(disk))


def test_a_rename_of_unsynced_content_may_leave_an_empty_file() -> None:
    """A durable name says nothing about the content: renaming before syncing may leave an empty file."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"old")
    disk.create("b").write([b"new"])
    disk.rename("b", "a")
    disk.sync_folder("")
    assert {"a": b""} in after_power_loss(disk)


def test_a_rename_across_folders_never_loses_the_file() -> None:
    """A file moved to another folder is found under one name or both, whichever folder is synced."""
    for synced in ((), ("x",), ("y",), ("x", "y")):
        disk = SimulatedDisk()
        disk.make_folder("x")
        disk.make_folder("y")
        disk.sync_folder("")
        synced_file(disk, "x/a", b"1")
        disk.rename("x/a", "y/a")
        for folder in synced:
            disk.sync_folder(folder)
        found = [set(content) for content in after_power_loss(disk)]
        assert all(found)
        assert ({"x/a"} in found) == (synced == ())
        assert ({"x/a", "y/a"} in found) == ("x" not in synced)


def test_a_removed_file_may_come_back() -> None:
    """A removed file may be found again, with its content, until the folder is synced."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"1")
    disk.remove("a")
    assert not disk.exists("a")
    found = after_power_loss(disk)
    assert {"a": b"1"} in found
    assert {} in found
    disk.sync_folder("")
    assert all(content == {} for content in after_power_loss(disk))


def test_names_are_lost_independently_of_each_other() -> None:
    """Of several unsynced names any may be lost, whatever their order."""
    disk = SimulatedDisk()
    for name in "abc":
        disk.create(name).sync()
    found = {"".join(content) for content in after_power_loss(disk)}
    assert found == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_folder_without_a_durable_name_takes_its_files_along() -> None:
    """A synced file in a synced folder is gone when the folder's own name was not made durable."""
    disk = SimulatedDisk()
    disk.make_folder("x/y")
    synced_file(disk, "x/y/a", b"1")
    disk.sync_folder("x")
    assert {} in after_power_loss(disk)
    disk.sync_folder("")
    assert all(content == {"x/y/a": b"1"} for content in after_power_loss(disk))


def test_a_slot_is_never_durable() -> None:
    """A slot may be found with any earlier value, zeroed, empty or torn, whatever was synced since."""
    disk = SimulatedDisk()
    slot = disk.slot("s", 4)
    for value in (b"aaaa", b"bbbb", b"cccc"):
        slot.store(value)
    disk.sync_folder("")
    assert disk.read_at("s", 0, 4) == b"cccc"
    found = {content["s"] for content in after_power_loss(disk)}
    assert {b"aaaa", b"bbbb", b"cccc", b"\0\0\0\0", b""} <= found
    assert any(len(set(value)) > 1 for value in found)


def test_a_kill_keeps_what_was_written_but_makes_nothing_durable() -> None:
    """The process after a killed one sees unsynced writes, which a power loss may still take."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"base")
    disk.open_append("a").write([b"more"])
    disk.create("b").write([b"new"])
    next_process = disk.killed()
    assert next_process.content() == {"a": b"basemore", "b": b"new"}
    assert {"a": b"base"} in after_power_loss(next_process)
    next_process.open_append("a").sync()
    assert all(content["a"] == b"basemore" for content in after_power_loss(next_process))
    assert {"a": b"base"} in after_power_loss(disk)


def test_after_a_failed_sync_a_later_one_repairs_nothing() -> None:
    """Data whose sync failed stays in doubt although later syncs succeed; later data is durable."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"base")
    file = disk.open_append("a")
    file.write([b"lost"])
    disk.fail("sync")
    with pytest.raises(OSError, match=r"Input/output"):
        file.sync()
    assert disk.content()["a"] == b"baselost"
    file.write([b"kept"])
    file.sync()
    for lost_power in (disk, disk.killed()):
        found = {content["a"] for content in after_power_loss(lost_power)}
        assert b"base\0\0\0\0kept" in found
        assert b"baselostkept" in found
        assert all(content.startswith(b"base") and content.endswith(b"kept") for content in found)


def test_writing_again_repairs_what_a_failed_sync_left_in_doubt() -> None:
    """Cutting off the doubtful data and writing it again makes it durable."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"base")
    file = disk.open_append("a")
    file.write([b"data"])
    disk.fail("sync")
    with pytest.raises(OSError, match=r"Input/output"):
        file.sync()
    file.truncate(4)
    file.write([b"data"])
    file.sync()
    assert all(content["a"] == b"basedata" for content in after_power_loss(disk))


def test_after_a_failed_folder_sync_the_next_one_counts() -> None:
    """Names whose sync failed are durable once a later sync of the folder succeeds."""
    disk = SimulatedDisk()
    disk.create("a").sync()
    disk.fail("sync_folder")
    with pytest.raises(OSError, match=r"Input/output"):
        disk.sync_folder("")
    assert {} in after_power_loss(disk)
    disk.sync_folder("")
    assert all(content == {"a": b""} for content in after_power_loss(disk))


def test_a_full_disk_takes_what_fits() -> None:
    """A write to a full disk leaves its first part; cutting and removing files gives space back."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"12345")
    disk.fill_up(3)
    file = disk.create("b")
    with pytest.raises(OSError, match=r"No space") as caught:
        file.write([b"12", b"34"])
    assert caught.value.errno == errno.ENOSPC
    assert disk.content()["b"] == b"123"
    file.truncate(0)
    file.write([b"abc"])
    disk.remove("a")
    file.write([b"defgh"])
    with pytest.raises(OSError, match=r"No space"):
        file.write([b"x"])
    disk.repair()
    file.write([b"x"])
    assert disk.content() == {"b": b"abcdefghx"}


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("create", lambda disk: disk.create("new")),
        ("open", lambda disk: disk.open_append("a")),
        ("write", lambda disk: disk.open_append("a").write([b"1"])),
        ("sync", lambda disk: disk.open_append("a").sync()),
        ("truncate", lambda disk: disk.open_append("a").truncate(0)),
        ("read", lambda disk: disk.read_at("a", 0, 1)),
        ("make_folder", lambda disk: disk.make_folder("x")),
        ("rename", lambda disk: disk.rename("a", "b")),
        ("remove", lambda disk: disk.remove("a")),
        ("sync_folder", lambda disk: disk.sync_folder("")),
        ("allocate", lambda disk: disk.allocate("a", 10)),
    ],
)
def test_a_fault_strikes_when_it_is_ordered(operation: str, call: Callable[[SimulatedDisk], object]) -> None:
    """An operation fails once, after as many good calls as were asked for, with the error asked for."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"data")
    disk.fail(operation, error=errno.EROFS)
    before = disk.content()
    with pytest.raises(OSError, match=r"Read-only") as caught:
        call(disk)
    assert caught.value.errno == errno.EROFS
    if operation != "write":
        assert disk.content() == before
    call(disk)
    disk.fail(operation, after=1000)
    disk.repair()


def test_an_unknown_fault_is_refused() -> None:
    """A misspelt operation is an error, not a fault that never strikes."""
    with pytest.raises(ValueError, match="cannot be told to fail"):
        SimulatedDisk().fail("wirte")


def test_a_failed_write_leaves_any_part() -> None:
    """A write that fails may have written some of its bytes, never others."""
    lengths = set()
    for seed in range(100):
        disk = SimulatedDisk(seed)
        disk.fail("write")
        with pytest.raises(OSError, match=r"Input/output"):
            disk.create("a").write([b"12345"])
        left = disk.content()["a"]
        assert b"12345".startswith(left)
        lengths.add(len(left))
    assert lengths == set(range(6))


def test_the_power_can_be_cut_at_every_operation() -> None:
    """At the chosen operation and at every later one the disk raises, whatever is done."""

    def work(disk: SimulatedDisk) -> None:
        synced_file(disk, "a", b"1")
        disk.rename("a", "b")
        disk.sync_folder("")

    calls: list[Callable[[SimulatedDisk], object]] = [
        lambda disk: disk.create("c"),
        lambda disk: disk.read("a"),
        lambda disk: disk.list(""),
    ]
    whole = SimulatedDisk()
    work(whole)
    assert [kind for kind, _ in whole.history] == ["create", "write", "sync", "sync_folder", "rename", "sync_folder"]
    for point in range(1, whole.operations + 1):
        disk = SimulatedDisk()
        disk.crash_at(point)
        with pytest.raises(PowerLoss):
            work(disk)
        assert disk.powerless
        assert disk.operations == point
        for call in calls:
            with pytest.raises(PowerLoss):
                call(disk)
        assert disk.operations == point


def test_a_sync_cut_short_promises_nothing() -> None:
    """When the power goes during a sync, the data may be there or not."""
    disk = SimulatedDisk()
    synced_file(disk, "a", b"base")
    file = disk.open_append("a")
    file.write([b"more"])
    disk.crash_at(disk.operations + 1)
    with pytest.raises(PowerLoss):
        file.sync()
    assert {b"base", b"basemore"} <= {content["a"] for content in after_power_loss(disk)}


def test_the_same_random_gives_the_same_disk() -> None:
    """A power loss is a function of the disk and the random source alone."""
    disk = SimulatedDisk()
    for name in "abcdef":
        disk.create(name).write([name.encode() * 1000])
    for seed in range(50):
        assert disk.crash(Random(seed)).content() == disk.crash(Random(seed)).content()
        assert disk.crash(Random(seed)).content() == disk.killed().crash(Random(seed)).content()


def test_what_is_found_is_durable() -> None:
    """A second power loss takes nothing that was found after the first."""
    disk = SimulatedDisk()
    for name in "abc":
        disk.create(name).write([name.encode() * 1000])
    for seed in range(50):
        found = disk.crash(Random(seed))
        assert found.crash(Random(seed + 1)).content() == found.content()


def test_flipped_bits_are_at_rest() -> None:
    """Damage at rest changes single bits of durable data, seen at once and after a power loss, and says where."""
    disk = SimulatedDisk()
    synced_file(disk, "a", bytes(100))
    synced_file(disk, "b", bytes(100))
    assert disk.flip_bits(Random(1), paths=["b"]) == {"b"}
    content = disk.content()
    assert content["a"] == bytes(100)
    assert sum(byte.bit_count() for byte in content["b"]) == 1
    assert all(found == content for found in after_power_loss(disk))
    assert SimulatedDisk().flip_bits(Random(1)) == set()


def test_one_writer_at_a_time() -> None:
    """A second lock on a live disk is refused; release, kill and power loss end it."""
    disk = SimulatedDisk()
    release = disk.lock("lock")
    with pytest.raises(FolderLocked):
        disk.lock("lock")
    disk.killed().lock("lock")
    disk.crash(Random(0)).lock("lock")
    release()
    disk.lock("lock")


def test_a_closed_file_is_not_written() -> None:
    """Using a file after closing it is the error that a closed descriptor gives."""
    file = SimulatedDisk().create("a")
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write([b"1"])


def test_threads_share_the_disk() -> None:
    """Operations of several threads do not mix: each write is found whole while the power stays on."""
    disk = SimulatedDisk()
    disk.create("a").close()

    def write(mark: int) -> None:
        file = disk.open_append("a")
        for _ in range(200):
            file.write([bytes([mark]) * 10])
            file.sync()

    threads = [threading.Thread(target=write, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = disk.content()["a"]
    assert len(content) == 6000
    assert {content[at : at + 10] for at in range(0, 6000, 10)} == {bytes([mark]) * 10 for mark in (1, 2, 3)}
    assert disk.operations == 1 + 3 * 400


def test_the_name_of_a_new_root_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else syncs what lies above a folder of ours; what is there already costs nothing."""
    synced, files = noted_syncs(monkeypatch), DiskFiles(tmp_path / "zone" / "data")
    files.make_folder("")
    assert synced == [str(tmp_path / "zone"), str(tmp_path)]
    files.make_folder("")
    files.make_folder("x/y")
    assert len(synced) == 2
    tmp_path.chmod(0o300)
    try:
        DiskFiles(tmp_path / "other").make_folder("")
    finally:
        tmp_path.chmod(0o700)
    assert (tmp_path / "other").is_dir()
    folder_of(tmp_path / "lake" / "facts")
    assert synced[-2:] == [str(tmp_path / "lake"), str(tmp_path)]


def test_it_behaves_like_a_real_folder(tmp_path: Path) -> None:
    """While the power stays on, the same operations have the same results and errors as on a real disk."""
    for seed in range(40):
        random = Random(seed)
        real, simulated = DiskFiles(tmp_path / str(seed)), SimulatedDisk()
        real.make_folder("")
        for _ in range(80):
            step = random_step(random)
            assert outcome(step, real) == outcome(step, simulated), f"seed={seed}"
        paths = simulated.content()
        assert {path: bytes(real.read(path)) for path in paths} == paths


def random_step(random: Random) -> Callable[[Files], object]:
    """Choose one operation on few paths, so that most of them meet something."""
    paths = ["a", "b", "x/a", "x/b", "x", "missing/a"]
    one, other, number = random.choice(paths), random.choice(paths), random.randrange(20)
    data = random.randbytes(number)

    def write(files: Files) -> None:
        file = files.open_append(one)
        file.write([data, b"", data])
        file.sync()
        file.close()

    def cut(files: Files) -> None:
        file = files.open_append(one)
        file.truncate(number)
        file.close()

    def slot(files: Files) -> None:
        slot = files.slot("s", 8)
        slot.store(data[:8])
        slot.close()

    steps: list[Callable[[Files], object]] = [
        lambda files: files.create(one).close(),
        write,
        write,
        cut,
        slot,
        lambda files: bytes(files.read(one)),
        lambda files: files.read_at(one, number, 5),
        lambda files: files.size(one) if one != "x" else None,
        lambda files: files.exists(one),
        lambda files: files.list(random.choice(["", "x", "missing"])) if one != "a" else None,
        lambda files: files.make_folder("x"),
        lambda files: files.rename(one, other) if "x" not in (one, other) else None,
        lambda files: files.remove(one) if one != "x" else None,
        lambda files: files.sync_folder(random.choice(["", "x"])) if one != "a" else None,
    ]
    chosen = random.choice(steps)
    state = random.getstate()

    def repeatable(files: Files) -> object:
        random.setstate(state)
        return chosen(files)

    return repeatable


def outcome(step: Callable[[Files], object], files: Files) -> object:
    """Give a step's result, or the kind of error it ended in."""
    try:
        return step(files)
    except (FileNotFoundError, FileExistsError) as error:
        return type(error)
    except OSError:
        return OSError
