"""Salvage: of a damaged folder everything that is sound is in the new one, once and in order, and the rest is named."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from bsfg.errors import BsfgError, FileExists, FolderLocked, InvalidArgument, NotAFolder
from bsfg.node.salvage import Salvaged, salvage
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.retention import GapReason
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.frames import FrameRef
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.salvage import salvage_data
from bsfg.stores.log.segments import SegmentFile
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import verify
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, encode_frame
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch

STREAM, OTHER = "operational", "quality"
PER_BATCH, BATCHES, TRUNCATED, CONFIRMED = 50, 40, 450, 600
FACTS = PER_BATCH * BATCHES
SMALL = LogOptions(segment_bytes=65_536, index_run_keys=500)
LOG = f"streams/{STREAM}/store"
NOW_UNIX_MS = 1_800_000_000_000


async def fill(where: Path | SimulatedDisk) -> None:
    """Write a log in several segments of which the first have left, and another one."""
    storage = await LogStorage.open(where, options=SMALL)
    store, other = await storage.store(STREAM), await storage.store(OTHER)
    await storage.cursors.create(ConsumerSpec("erp", STREAM))
    for number in range(BATCHES):
        await store.append(batch(PER_BATCH, first=number * PER_BATCH))
    await other.append(batch(PER_BATCH, first=0))
    await storage.cursors.commit("erp", Confirmation(through=CONFIRMED - 1))
    await store.truncate_before(TRUNCATED)
    await storage.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a sound data folder with artifacts and the state of a node; tests harm copies of it."""
    folder = tmp_path_factory.mktemp("sound") / "data"

    async def make() -> None:
        await fill(folder)
        artifacts = await ArtifactFolder.open(folder / "artifacts")
        for number in range(3):
            await artifacts.put("lab", f"report-{number}", _chunks(b"%d" % number * 1000), media_type="text/plain")
        await artifacts.close()
        NodeState(folder).close()

    asyncio.run(make())
    return folder


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    """Give a copy of the sound folder."""
    return Path(shutil.copytree(sound, tmp_path / "data"))


def segments(folder: Path) -> list[SegmentFile]:
    """Give the segments of the first log that still count."""
    view = LogFolder(DiskFiles(folder), STREAM, Buffer.STORE).view()
    return [segment for segment in view.segments if segment.frames]


def flip(path: Path, position: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def entries(*refs: FrameRef) -> set[int]:
    """Give the offsets of some frames."""
    return {offset for ref in refs for offset in range(max(ref.base, TRUNCATED), ref.end)}


def saved_from(folder: Path, name: str = "saved") -> Salvaged:
    """Salvage a folder beside it."""
    return salvage(folder, folder.parent / name, None, NOW_UNIX_MS, lambda doing, done, total: None)


def check(saved: Salvaged, lost: set[int], end: int = FACTS) -> None:
    """Open what was saved: no problem, every sound fact once and in its place, a record for every other one."""

    async def run() -> None:
        storage = await LogStorage.open(saved.target, options=SMALL)
        store = await storage.store(STREAM)
        assert [*storage.problems, *store.problems] == []
        assert (store.start, store.end) == (TRUNCATED, end)
        found, gone = [], set()
        async for frame in store.replay(TRUNCATED):
            if frame.gap is not None:
                assert frame.gap.reason in (GapReason.DAMAGED, GapReason.LOST)
                gone |= set(range(frame.first, frame.last + 1))
                continue
            assert frame.entries is not None
            ids = batch(len(frame.entries), first=frame.first).values("message_id")
            assert frame.entries.values("message_id") == ids
            found += frame.entries.offsets.tolist()
        assert gone == lost
        assert found == [offset for offset in range(TRUNCATED, end) if offset not in lost]
        repeated = await store.append(batch(1, first=found[0]))
        assert [str(result) for result in repeated.results] != ["inserted"]
        await store.append(batch(1, first=10 * FACTS))
        assert store.end == end + 1
        await storage.close()

    asyncio.run(run())
    assert {problem.code for problem in verify(saved.target).problems} <= {"entries_lost"}
    [log] = [log for log in saved.data.logs if log.stream == STREAM]
    assert (log.facts, log.lost) == (end - TRUNCATED - len(lost), len(lost))
    told = {n for each in saved.missing if each.first is not None for n in range(each.first, (each.last or 0) + 1)}
    assert told == lost
    [other] = [log for log in saved.data.logs if log.stream == OTHER]
    assert (other.facts, other.lost) == (PER_BATCH, 0)


def tree(folder: Path) -> dict[str, str]:
    """Give every file of a folder with a digest of its content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_sound_folder_is_saved_whole(data: Path) -> None:
    """Nothing is missing, the history is a new one, and the source is as it was."""
    before = tree(data)
    saved = saved_from(data)
    assert saved.missing == []
    assert (saved.artifacts, saved.data.consumers) == (3, 1)
    assert tree(data) == before
    assert all(log.log_id != log.was_log_id and len(log.was_log_id) == 32 for log in saved.data.logs)
    check(saved, set())


def in_the_middle(folder: Path) -> set[int]:
    """Flip a bit of a frame in a sealed segment."""
    segment = segments(folder)[1]
    ref = segment.frames[1]
    flip(folder / segment.path, ref.position + FRAME_HEADER_BYTES + 200)
    return entries(ref)


def truncated_segment(folder: Path) -> set[int]:
    """Cut a sealed segment inside its second frame."""
    segment = segments(folder)[1]
    path = folder / segment.path
    lost = entries(*segment.frames[1:])
    path.write_bytes(path.read_bytes()[: segment.frames[1].position + 100])
    return lost


def undecodable(folder: Path) -> set[int]:
    """Put a frame in place whose checksums are right and whose content is none."""
    segment = segments(folder)[1]
    ref, path = segment.frames[2], folder / segment.path
    content = bytearray(path.read_bytes())
    header = ref.header
    parts, _ = encode_frame(
        bytes(header.payload_bytes),
        base=ref.base,
        count=ref.count,
        appended_at_unix_ms=header.appended_at_unix_ms,
        log_id=header.log_id,
        chain_before=header.chain_before,
        form=ref.header.form,
    )
    whole = b"".join(bytes(part) for part in parts)
    content[ref.position : ref.position + len(whole)] = whole
    path.write_bytes(bytes(content))
    return entries(ref)


def missing_segment(folder: Path) -> set[int]:
    """Remove a sealed segment."""
    segment = segments(folder)[2]
    lost = entries(*segment.frames)
    (folder / segment.path).unlink()
    return lost


def damaged_header(folder: Path) -> set[int]:
    """Flip a bit in the header of a segment, whose frames are sound."""
    flip(folder / segments(folder)[2].path, 40)
    return set()


def cut_end(folder: Path) -> set[int]:
    """Cut the last frame, which was acknowledged, as the watermark says."""
    segment = segments(folder)[-1]
    ref, path = segment.frames[-1], folder / segment.path
    path.write_bytes(path.read_bytes()[: ref.position + 50])
    return entries(ref)


def lost_notes(folder: Path) -> set[int]:
    """Remove the notes; where the log begins is known from the keys of what has left."""
    (folder / LOG / "notes.journal").unlink()
    return set()


def lost_identity(folder: Path) -> set[int]:
    """Remove the identity of the log."""
    (folder / LOG / "log.json").unlink()
    return set()


def foreign_segment(folder: Path) -> set[int]:
    """Put the segment of another log, with other entries of the same offsets, in the place of one."""
    other = folder.parent / "other"
    asyncio.run(fill(other))
    segment = segments(folder)[2]
    shutil.copy(other / segment.path, folder / segment.path)
    return entries(*segment.frames)


HARMS: dict[str, Callable[[Path], set[int]]] = {
    "a flipped bit in the middle": in_the_middle,
    "a truncated segment": truncated_segment,
    "an undecodable frame": undecodable,
    "a missing segment": missing_segment,
    "a damaged header": damaged_header,
    "an end that was cut": cut_end,
    "no identity": lost_identity,
    "a segment of another log": foreign_segment,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS.keys())
def test_what_is_sound_is_saved(harm: Callable[[Path], set[int]], data: Path) -> None:
    """Whatever was done to a log, the new one opens without a problem and lacks exactly what was harmed."""
    lost = harm(data)
    before = tree(data)
    saved = saved_from(data)
    assert tree(data) == before
    assert bool(saved.missing) == bool(lost)
    check(saved, lost)


def test_several_harms_at_once(data: Path) -> None:
    """Harms of several kinds in one log add up, and each has its own file and place in the report."""
    lost = missing_segment(data) | in_the_middle(data) | cut_end(data)
    saved = saved_from(data)
    check(saved, lost)
    details = [each.detail for each in saved.missing]
    assert len(details) == 3
    assert any("at byte" in text and "CRC" in text for text in details)
    assert "the segment file is missing" in details


def test_lost_notes_are_named(data: Path) -> None:
    """Without notes the log begins where its keys end, as far as whole segments have left."""
    first = segments(data)[0].base
    lost_notes(data)
    saved = saved_from(data)
    assert [each.where for each in saved.missing] == [f"{LOG}/notes.journal"]
    [log, _] = sorted(saved.data.logs, key=lambda each: each.stream)
    assert (log.start, log.end, log.lost, log.facts) == (first, FACTS, 0, FACTS - first)
    assert verify(saved.target).ok


def test_lost_cursors_are_named_and_the_logs_are_whole(data: Path) -> None:
    """Without the journal of cursors everything else is saved."""
    (data / "cursors" / "cursors.journal").unlink()
    saved = saved_from(data)
    assert [each.where for each in saved.missing] == ["cursors/cursors.journal"]
    assert saved.data.consumers == 0
    check(saved, set())


def test_a_log_that_is_gone_is_known_from_its_consumers(data: Path) -> None:
    """Of a log whose folder is gone the confirmed offsets are recorded as lost, and are not given again."""
    shutil.rmtree(data / "streams" / STREAM)
    saved = saved_from(data)
    assert [(each.first, each.last) for each in saved.missing] == [(0, CONFIRMED - 1)]

    async def run() -> None:
        storage = await LogStorage.open(saved.target, options=SMALL)
        store = await storage.store(STREAM)
        assert [*storage.problems, *store.problems] == []
        assert store.end == CONFIRMED
        [consumer] = await storage.cursors.consumers()
        assert (consumer.log_id, consumer.checkpoint.committed) == (store.log_id, CONFIRMED - 1)
        await storage.close()

    asyncio.run(run())


def test_a_damaged_key_segment_is_named(data: Path) -> None:
    """Keys that cannot be read are left out, and the new log does not miss them."""
    [first, *_] = sorted((data / LOG / "keys").glob("*.keys"))
    flip(first, 100)
    saved = saved_from(data)
    assert {each.where for each in saved.missing} == {f"{LOG}/keys/{first.name}", f"{LOG}/keys"}
    check(saved, set())


def test_damaged_artifacts_are_left_out(data: Path) -> None:
    """Content that is not what its name says does not come along, nor the name that stands for it."""
    [content, *_] = sorted(path for path in (data / "artifacts" / "content").rglob("*") if path.is_file())
    flip(content, 5)
    saved = saved_from(data)
    assert saved.artifacts == 2
    assert len(saved.missing) == 2
    assert all(each.where.startswith("artifacts/") for each in saved.missing)

    async def run() -> None:
        artifacts = await ArtifactFolder.open(saved.target / "artifacts")
        assert (await artifacts.stats()).artifacts == 2
        await artifacts.close()

    asyncio.run(run())


def test_a_sector_that_cannot_be_read_costs_its_frames_alone() -> None:
    """Bad sectors in a segment, in the notes and in the keys are gone around, and named with their bytes."""
    disk, target = SimulatedDisk(), SimulatedDisk()
    asyncio.run(fill(disk))
    view = LogFolder(disk, STREAM, Buffer.STORE).view()
    segment = [each for each in view.segments if each.frames][1]
    ref = segment.frames[0]
    disk.spoil(segment.path, ref.position + 300, 10)
    found = salvage_data(disk, target, NOW_UNIX_MS, lambda size: None)
    [log] = [log for log in found.logs if log.stream == STREAM]
    # The medium gives blocks of 4096 bytes or nothing.
    block = (ref.position + 300) // 4096 * 4096
    lost = [
        each
        for each in segment.frames
        if each.position < block + 4096 and each.position + each.header.frame_bytes > block
    ]
    assert log.lost == sum(each.count for each in lost)
    assert any("cannot be read" in each.detail and each.where == segment.path for each in found.missing)
    assert {problem.code for problem in verify(target).problems} == {"entries_lost"}


def test_what_is_saved_survives_a_power_loss() -> None:
    """Everything in the new folder is durable when salvage says that it is there: the old one may be thrown away."""
    disk, target = SimulatedDisk(), SimulatedDisk()
    asyncio.run(fill(disk))
    salvage_data(disk, target, NOW_UNIX_MS, lambda size: None)
    for seed in range(5):
        report = verify(target.crash(Random(seed)))
        assert report.problems == []
        assert {log.stream: (log.start, log.end) for log in report.logs if log.end} == {
            STREAM: (TRUNCATED, FACTS),
            OTHER: (0, PER_BATCH),
        }


def test_what_must_not_be_is_refused(data: Path, tmp_path: Path) -> None:
    """A target with something in it, one inside the source, no data folder, and a folder that is being written."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    quiet = lambda doing, done, total: None  # noqa: E731
    with pytest.raises(FileExists):
        salvage(data, full, None, NOW_UNIX_MS, quiet)
    with pytest.raises(InvalidArgument):
        salvage(data, data / "saved", None, NOW_UNIX_MS, quiet)
    with pytest.raises(NotAFolder):
        salvage(full, tmp_path / "new", None, NOW_UNIX_MS, quiet)

    async def run() -> None:
        storage = await LogStorage.open(data)
        with pytest.raises(FolderLocked):
            salvage(data, tmp_path / "new", None, NOW_UNIX_MS, quiet)
        await storage.close()

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "full"]


@pytest.mark.parametrize("seed", range(30))
def test_any_garbage_is_survived(seed: int, data: Path) -> None:
    """Whatever is done to any files, salvage ends with a folder that opens, and never invents or moves a fact."""
    random = Random(seed)
    files = sorted(path for path in data.rglob("*") if path.is_file() and path.name != "LOCK")
    for path in random.sample(files, random.randint(1, 5)):
        _harm(path, random)
    try:
        saved = saved_from(data)
    except BsfgError as error:
        assert error.code in ("not_a_data_folder", "format_unsupported")
        return

    async def run() -> None:
        storage = await LogStorage.open(saved.target, options=SMALL)
        assert storage.problems == []
        for log in saved.data.logs:
            store = await storage.store(log.stream)
            assert store.problems == []
            count = 0
            async for frame in store.replay(store.start):
                if frame.gap is None:
                    assert frame.entries is not None
                    expected = batch(len(frame.entries), first=frame.first).values("message_id")
                    assert frame.entries.values("message_id") == expected
                    count += len(frame.entries)
            assert (count, store.start, store.end) == (log.facts, log.start, log.end)
        await storage.close()

    asyncio.run(run())
    assert {problem.code for problem in verify(saved.target).problems} <= {"entries_lost"}


def _harm(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    kind = random.randrange(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(bytes(content[: random.randint(0, len(content))]))
    elif kind == 2:
        path.write_bytes(random.randbytes(random.randint(0, 3 * len(content))))
    elif kind == 3:
        path.unlink()
        path.mkdir()
    elif kind == 4:
        path.rename(
            path.with_name(
                random.choice(["²²²²²²²²²²²²²²²²²²²².seg", "9" * 20 + ".seg", "7.seg", "x", "0" * 20 + ".seg"])
            )
        )
    else:
        for _ in range(random.randint(1, 40)):
            if content:
                content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(bytes(content))


async def _chunks(data: bytes):  # type: ignore[no-untyped-def]
    yield data


def test_the_reader_finds_the_same(data: Path) -> None:
    """A reader in another process sees the new history as its writer does."""
    lost = in_the_middle(data)
    saved = saved_from(data)
    log = next(each for each in open_folder(saved.target) if each.stream == STREAM)
    gone = [frame for frame in log.frames() if frame.gap is not None]
    assert {n for frame in gone for n in range(frame.first, frame.last + 1)} == lost
