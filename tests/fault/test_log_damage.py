"""What the embedded log does with damaged, foreign, stale and missing files: it names them and loses nothing else."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsfg.errors import FolderLocked, ForeignLog, FormatUnsupported, HasherMismatch, NotAFolder
from bsfg.fact import Envelope, Fact, Message
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Frame, Result
from bsfg.retention import GapReason
from bsfg.stores.log.buffer import LogStoreBuffer
from bsfg.stores.log.identity import checked
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import verify
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import decode_frame_header, decode_segment_header, encode_frame
from bsfg.testing.facts import WeakHasher, altered, batch, messages, sealed

RUN_KEYS = 500
SMALL = LogOptions(segment_bytes=65_536, index_run_keys=RUN_KEYS)
STREAM = "operational"
PER_BATCH = 50


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one coroutine to its end."""
    return asyncio.run(work)


async def filled(folder: Path, batches: int, options: LogOptions = SMALL) -> None:
    """Write batches of facts in several segments, and stop."""
    storage = await LogStorage.open(folder, options=options)
    store = await storage.store(STREAM)
    for number in range(batches):
        await store.append(batch(PER_BATCH, first=number * PER_BATCH))
    await storage.close()


async def opened(folder: Path) -> tuple[LogStorage, LogStoreBuffer]:
    """Open the folder again."""
    storage = await LogStorage.open(folder, options=SMALL)
    return storage, await storage.store(STREAM)


async def replayed(store: LogStoreBuffer) -> list[Frame]:
    """Read everything from offset 0."""
    return [frame async for frame in store.replay(0)]


def log_path(folder: Path) -> Path:
    """Give the folder of the log under test."""
    return folder / "streams" / STREAM / "store"


def segments(folder: Path) -> list[Path]:
    """List the segment files."""
    return sorted(log_path(folder).glob("*.seg"))


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def covered(frames: list[Frame]) -> dict[int, GapReason | None]:
    """Give for each offset the reason why it is missing, or None when its entry is there."""
    result: dict[int, GapReason | None] = {}
    for frame in frames:
        for offset in range(frame.first, frame.last + 1):
            assert offset not in result
            result[offset] = frame.gap.reason if frame.gap else None
    assert sorted(result) == list(range(len(result)))
    return result


async def check_goes_on(folder: Path, expect_facts: int, lost: set[int]) -> None:
    """Reopen, check that only ``lost`` is missing and explained, append more, and open again."""
    storage, store = await opened(folder)
    there = covered(await replayed(store))
    assert {offset for offset, reason in there.items() if reason} == lost
    assert len(there) >= expect_facts
    again = await store.append(batch(PER_BATCH, first=0))
    for row, offset in enumerate(again.offsets.tolist()):
        if row not in lost:
            assert again.results[row] == Result.ALREADY_EXISTS
            assert offset == row
    fresh = await store.append(batch(10, seed=9))
    assert fresh.offsets.min() >= len(there)
    await storage.close()
    storage, store = await opened(folder)
    assert len(covered(await replayed(store))) >= len(there) + 10
    await storage.close()


def test_half_a_frame_at_the_tail_is_cut_and_kept_aside(tmp_path: Path) -> None:
    """A write that a crash cut short was never acknowledged: it is removed, kept aside and reported."""
    run(filled(tmp_path, 4))
    last = segments(tmp_path)[-1]
    whole = last.read_bytes()
    last.write_bytes(whole + whole[-5_000:-2_000])

    async def check() -> None:
        storage, store = await opened(tmp_path)
        assert any("torn" in text for text in store.problems)
        assert store.end == 4 * PER_BATCH
        assert list(log_path(tmp_path).glob("aside/*.torn"))
        await storage.close()

    run(check())
    run(check_goes_on(tmp_path, 4 * PER_BATCH, set()))
    assert verify(tmp_path).ok


@pytest.mark.parametrize("cut", [1, 50, 104, 105, 1_000, 4_000])
def test_a_last_frame_cut_at_any_byte_takes_nothing_else_with_it(tmp_path: Path, cut: int) -> None:
    """Losing the end of the last frame loses that frame alone, and what lies before stays."""
    run(filled(tmp_path, 3))
    last = segments(tmp_path)[-1]
    data = last.read_bytes()
    last.write_bytes(data[: len(data) - cut])
    # The watermark proves that the frame had been acknowledged, so its offsets are named as lost.
    frame_lost = set(range(2 * PER_BATCH, 3 * PER_BATCH))
    run(check_goes_on(tmp_path, 3 * PER_BATCH, frame_lost))


def test_a_flipped_bit_in_the_middle_is_named_and_never_returned_as_good(tmp_path: Path) -> None:
    """A damaged frame becomes a gap record; its neighbours are read as before."""
    run(filled(tmp_path, 40))
    second = segments(tmp_path)[1]
    flip(second, second.stat().st_size // 2)
    report = verify(tmp_path)
    assert not report.ok
    [problem] = [item for item in report.problems if item.code == "log_damaged"]
    lost = set(range(problem.first or 0, (problem.last or 0) + 1))
    assert len(lost) == PER_BATCH

    async def check() -> None:
        storage, store = await opened(tmp_path)
        there = covered(await replayed(store))
        assert {offset for offset, reason in there.items() if reason == GapReason.DAMAGED} == lost
        assert {gap.reason for gap in await store.gaps()} == {GapReason.DAMAGED}
        await storage.close()

    run(check())
    run(check_goes_on(tmp_path, 40 * PER_BATCH, lost))


@pytest.mark.parametrize("at", [0, 4, 8, 12, 20, 30, 60, 100])
def test_a_damaged_frame_header_does_not_hide_the_frames_behind_it(tmp_path: Path, at: int) -> None:
    """When a header cannot be read the log searches for the next sound frame."""
    run(filled(tmp_path, 40))
    second = segments(tmp_path)[1]
    storage_view = next(iter(open_folder(tmp_path))).view()
    frame = storage_view.segments[1].frames[2]
    flip(second, frame.position + at)
    run(check_goes_on(tmp_path, 40 * PER_BATCH, set(range(frame.base, frame.end))))


def test_a_damaged_segment_header_loses_no_entry(tmp_path: Path) -> None:
    """The frames of a segment are found although its header is unreadable."""
    run(filled(tmp_path, 40))
    flip(segments(tmp_path)[1], 20)
    run(check_goes_on(tmp_path, 40 * PER_BATCH, set()))


def test_a_missing_segment_is_reported_as_lost_entries(tmp_path: Path) -> None:
    """A segment that somebody deleted is a gap record, not silence."""
    run(filled(tmp_path, 40))
    _, second, third, *_ = segments(tmp_path)
    second.unlink()
    lost = set(range(int(second.stem), int(third.stem)))
    assert not verify(tmp_path).ok
    run(check_goes_on(tmp_path, 40 * PER_BATCH, lost))


def test_the_last_segment_missing_never_reuses_its_offsets(tmp_path: Path) -> None:
    """When the newest entries are gone, offsets go on behind them."""
    run(filled(tmp_path, 40))
    last = segments(tmp_path)[-1]
    base = int(last.stem)
    last.unlink()
    run(check_goes_on(tmp_path, 40 * PER_BATCH, set(range(base, 40 * PER_BATCH))))


def test_all_segments_missing_are_reported_and_offsets_go_on(tmp_path: Path) -> None:
    """Even a log whose files are all gone does not begin again at 0 while something remembers its end."""
    run(filled(tmp_path, 10))
    for path in segments(tmp_path):
        path.unlink()

    async def check() -> None:
        storage, store = await opened(tmp_path)
        assert store.end == 10 * PER_BATCH
        assert set(covered(await replayed(store)).values()) == {GapReason.LOST}
        await storage.close()

    run(check())


def test_a_cursor_ahead_of_the_log_moves_its_end(tmp_path: Path) -> None:
    """Offsets that a consumer has confirmed are never given to other entries."""

    async def check() -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(20))
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.cursors.commit("peer", Confirmation(through=19))
        await storage.close()
        for path in [*segments(tmp_path), log_path(tmp_path) / "durable"]:
            path.unlink()
        storage, store = await opened(tmp_path)
        receipt = await store.append(batch(5, seed=3))
        assert receipt.offsets.tolist() == [20, 21, 22, 23, 24]
        await storage.close()

    run(check())


async def truncated(folder: Path) -> int:
    """Fill the log, confirm and truncate half of it; give the start."""
    await filled(folder, 60)
    storage, store = await opened(folder)
    await storage.cursors.create(ConsumerSpec("peer", STREAM))
    await storage.cursors.commit("peer", Confirmation(through=40 * PER_BATCH - 1))
    await store.truncate_before(40 * PER_BATCH)
    await storage.close()
    return 40 * PER_BATCH


def test_a_missing_key_segment_is_reported_and_nothing_is_stored_twice(tmp_path: Path) -> None:
    """Without a key segment the index still knows the keys, and verify says what is missing."""
    run(truncated(tmp_path))
    [first, *_] = sorted((log_path(tmp_path) / "keys").glob("*.keys"))
    lost = int(first.stem.split("-")[0])

    async def warm() -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(RUN_KEYS, seed=77))
        await storage.close()

    run(warm())
    first.unlink()
    report = verify(tmp_path)
    assert {problem.code for problem in report.problems} == {"keys_missing"}

    async def check() -> None:
        storage, store = await opened(tmp_path)
        assert any("keys" in text and "missing" in text for text in store.problems)
        receipt = await store.append(batch(PER_BATCH, first=lost))
        assert set(receipt.results.tolist()) == {Result.ALREADY_EXISTS}
        await storage.close()

    run(check())


def test_keys_outlive_bytes(tmp_path: Path) -> None:
    """A repeat of a truncated fact is recognised by key and digest; another body under its key is a conflict."""
    run(truncated(tmp_path))

    async def check() -> None:
        storage, store = await opened(tmp_path)
        repeat = await store.append(batch(PER_BATCH))
        assert set(repeat.results.tolist()) == {Result.ALREADY_EXISTS}
        assert repeat.offsets.tolist() == list(range(PER_BATCH))
        conflict = await store.append(sealed(altered(messages(PER_BATCH))))
        assert set(conflict.results.tolist()) == {Result.CONFLICT}
        await storage.close()

    run(check())
    assert verify(tmp_path).ok


def test_an_index_older_than_the_log_is_completed(tmp_path: Path) -> None:
    """Keys that an old copy of the index lacks are added from the log."""

    async def grow(first: int, count: int) -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(count, first=first))
        await storage.close()

    run(grow(0, RUN_KEYS + 10))
    old = tmp_path.with_name("old-index")
    shutil.copytree(log_path(tmp_path) / "index", old)
    run(grow(RUN_KEYS + 10, RUN_KEYS))
    shutil.rmtree(log_path(tmp_path) / "index")
    shutil.copytree(old, log_path(tmp_path) / "index")

    async def check() -> None:
        storage, store = await opened(tmp_path)
        for first in (0, RUN_KEYS, 2 * RUN_KEYS):
            receipt = await store.append(batch(10, first=first))
            assert receipt.offsets.tolist() == list(range(first, first + 10))
        assert store.end == 2 * RUN_KEYS + 10
        await storage.close()

    run(check())


def test_an_index_newer_than_the_log_is_thrown_away(tmp_path: Path) -> None:
    """Runs that name entries the log does not have must not turn new facts into repeats."""

    async def grow(count: int, seed: int) -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(count, seed=seed))
        await storage.close()

    run(grow(100, 1))
    shutil.copytree(tmp_path, tmp_path.with_name("before"))
    run(grow(RUN_KEYS, 2))
    restored = tmp_path.with_name("before")
    shutil.rmtree(log_path(restored) / "index")
    shutil.copytree(log_path(tmp_path) / "index", log_path(restored) / "index")

    async def check() -> None:
        storage, store = await opened(restored)
        receipt = await store.append(batch(50, seed=2))
        assert set(receipt.results.tolist()) == {Result.INSERTED}
        assert receipt.offsets.tolist() == list(range(100, 150))
        await storage.close()

    run(check())


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign name", "other name"])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    """The index is derived: whatever happens to it, keys are still known."""

    async def fill() -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(RUN_KEYS + 100))
        await storage.close()

    run(fill())
    path, *_ = (log_path(tmp_path) / "index").glob("*.run")
    data = path.read_bytes()
    if damage == "flip":
        flip(path, 1_000)
    elif damage == "foreign name":
        path.rename(path.with_name("what-is-this"))
    elif damage == "other name":
        path.rename(path.with_name("renamed.run"))
    else:
        path.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])

    async def check() -> None:
        storage, store = await opened(tmp_path)
        receipt = await store.append(batch(100))
        assert receipt.offsets.tolist() == list(range(100))
        await storage.close()

    run(check())


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    """A folder has one writer; a second one in any process gets a clear error."""

    async def check() -> None:
        storage, _ = await opened(tmp_path)
        with pytest.raises(FolderLocked) as refused:
            await LogStorage.open(tmp_path)
        assert refused.value.code == "folder_locked"
        assert "process" in refused.value.message
        await storage.close()
        again = await LogStorage.open(tmp_path)
        await again.close()

    run(check())


def test_a_segment_of_another_log_is_refused(tmp_path: Path) -> None:
    """A segment copied in from another folder must not become part of this history."""
    run(filled(tmp_path / "a", 40))
    run(filled(tmp_path / "b", 40))
    theirs, mine = segments(tmp_path / "b")[1], segments(tmp_path / "a")[1]
    shutil.copy(theirs, mine)

    async def check() -> None:
        storage = await LogStorage.open(tmp_path / "a")
        with pytest.raises(ForeignLog):
            await storage.store(STREAM)
        await storage.close()

    run(check())
    assert not verify(tmp_path / "a").ok


def test_a_frame_put_in_the_place_of_another_breaks_the_chain(tmp_path: Path) -> None:
    """Somebody who rewrites a frame with valid checksums is found by the chain."""
    from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, encode_frame

    run(filled(tmp_path, 10))
    folder: LogFolder = next(iter(open_folder(tmp_path)))
    segment = folder.view().segments[0]
    ref = segment.frames[3]
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    start = ref.position + FRAME_HEADER_BYTES
    payload = bytes(data[start : start + ref.header.payload_bytes]).replace(b"machine:press-1", b"machine:press-9")
    parts, _ = encode_frame(
        payload,
        base=ref.base,
        count=ref.count,
        appended_at_unix_ms=ref.header.appended_at_unix_ms,
        log_id=ref.header.log_id,
        chain_before=ref.header.chain_before,
        form=ref.header.form,
    )
    data[ref.position : ref.position + ref.header.frame_bytes] = b"".join(bytes(part) for part in parts)
    path.write_bytes(bytes(data))
    report = verify(tmp_path)
    assert any("chain" in problem.detail for problem in report.problems)
    assert any(problem.code == "digest_mismatch" for problem in report.problems)


def test_folders_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    """A missing mark, one of something else, a newer format and another hasher each have their own error."""
    with pytest.raises(NotAFolder):
        verify(tmp_path)
    run(filled(tmp_path / "x", 1))
    mark = tmp_path / "x" / "bsfg.json"
    good = mark.read_text()
    mark.write_bytes(checked({"format": 99, "hasher": "sha256"}))
    with pytest.raises(FormatUnsupported):
        run(LogStorage.open(tmp_path / "x"))
    mark.write_text(good)
    with pytest.raises(HasherMismatch):
        run(LogStorage.open(tmp_path / "x", hasher=WeakHasher()))
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "bsfg.json").write_text("{")
    with pytest.raises(NotAFolder):
        run(LogStorage.open(tmp_path / "y"))


@pytest.mark.parametrize("was", ['"sha256"', '"format": 1'])
def test_a_flipped_mark_is_damage_and_not_another_format(tmp_path: Path, was: str) -> None:
    """A mark that fails its checksum is kept aside and written anew, as long as there are logs; so it is said."""
    run(filled(tmp_path, 1))
    mark = tmp_path / "bsfg.json"
    mark.write_text(mark.read_text().replace(was, '"sha257"' if "sha" in was else '"format": 9'))

    async def check() -> None:
        storage, store = await opened(tmp_path)
        assert store.end == PER_BATCH
        assert any("bsfg.json is damaged" in text for text in storage.problems)
        await storage.close()

    run(check())
    assert list(tmp_path.glob("bsfg.json.*.unusable"))


def test_a_lost_identity_is_taken_from_the_segments(tmp_path: Path) -> None:
    """Without log.json the log keeps its id and its entries."""
    run(filled(tmp_path, 10))
    before = verify(tmp_path).logs[0].log_id
    (log_path(tmp_path) / "log.json").unlink()
    run(check_goes_on(tmp_path, 10 * PER_BATCH, set()))
    assert verify(tmp_path).logs[0].log_id == before


def test_readers_in_other_processes_see_only_what_is_durable(tmp_path: Path) -> None:
    """Bytes behind the watermark, written but not synced, are not shown while the machine is up."""
    run(filled(tmp_path, 4))
    [folder] = open_folder(tmp_path)
    whole = segments(tmp_path)[-1].read_bytes()

    async def check() -> None:
        storage, store = await opened(tmp_path)
        before = folder.view().end
        assert before == store.end
        writer = store._writer
        file = writer._file
        assert file is not None
        seen: list[int] = []
        sync = file.sync

        def watched() -> None:
            seen.append(folder.view().end)
            sync()

        file.sync = watched  # type: ignore[method-assign]
        await store.append(batch(10, seed=5))
        assert seen == [before]
        assert folder.view().end == before + 10
        assert sum(len(frame.entries or ()) for frame in folder.frames()) == before + 10
        await storage.close()

    run(check())
    assert len(whole) > 0
    assert folder.buffer == Buffer.STORE


def test_reading_goes_on_while_segments_are_truncated(tmp_path: Path) -> None:
    """A replay that is under way when its segments go is told so, and ends at the same place."""
    run(filled(tmp_path, 60))

    async def check() -> None:
        storage, store = await opened(tmp_path)
        await storage.cursors.create(ConsumerSpec("peer", STREAM))
        await storage.cursors.commit("peer", Confirmation(through=60 * PER_BATCH - 1))
        frames = store.replay(0, max_facts=PER_BATCH)
        seen = [await anext(frames)]
        await store.truncate_before(50 * PER_BATCH)
        seen += [frame async for frame in frames]
        assert len(covered(seen)) == 60 * PER_BATCH
        entries = np.concatenate([frame.entries.offsets for frame in seen if frame.entries])
        assert set(range(50 * PER_BATCH, 60 * PER_BATCH)) <= set(entries.tolist())
        await storage.close()

    run(check())


def test_a_segment_that_disappears_under_an_open_log_is_a_gap(tmp_path: Path) -> None:
    """A file that somebody deletes while the node runs is reported as lost entries, and the replay goes on."""
    run(filled(tmp_path, 40))

    async def check() -> None:
        storage, store = await opened(tmp_path)
        _, second, third, *_ = segments(tmp_path)
        second.unlink()
        there = covered(await asyncio.wait_for(replayed(store), 30))
        lost = set(range(int(second.stem), int(third.stem)))
        assert {offset for offset, reason in there.items() if reason == GapReason.LOST} == lost
        assert len(there) == 40 * PER_BATCH
        assert any(gap.reason == GapReason.LOST for gap in await store.gaps())
        await storage.close()

    run(check())


@pytest.mark.parametrize("base", [11, 60, 1 << 40, 1 << 62])
@pytest.mark.parametrize("whose", ["its own", "another"])
def test_a_fact_that_holds_frames_is_not_taken_for_the_log(tmp_path: Path, whose: str, base: int) -> None:
    """Behind a damaged header the log goes on where it really does, whatever the bytes of the damaged fact say."""

    async def work() -> None:
        storage, store = await opened(tmp_path)
        await store.append(batch(10))
        log_id = bytes.fromhex(store.log_id) if whose == "its own" else bytes(16)
        message, chain, planted = batch(3, first=500).to_message(), bytes(32), b""
        for number in range(2):
            parts, chain = encode_frame(
                message, base=base + 3 * number, count=3, appended_at_unix_ms=1, log_id=log_id, chain_before=chain
            )
            planted += b"".join(map(bytes, parts))
        envelope = Envelope("plant", "enterprise", 1, "planted", object_media_type="application/octet-stream")
        await store.append(sealed([Message(envelope, Fact("machine:press-1", "dump_taken", planted))]))
        for number in range(4):
            await store.append(batch(10, first=20 + 10 * number))
        await storage.close()
        path = min(log_path(tmp_path).glob("*.seg"))
        data = bytearray(path.read_bytes())
        at = decode_segment_header(bytes(data)).size_bytes
        data[at + decode_frame_header(data, at).frame_bytes] ^= 1
        path.write_bytes(data)

        storage, store = await opened(tmp_path)
        assert store.end == 51
        assert {offset for frame in await replayed(store) if frame.entries for offset in frame.entries.offsets} == {
            *range(10),
            *range(11, 51),
        }
        assert [(gap.first, gap.last, gap.reason) for gap in await store.gaps()] == [(10, 10, GapReason.DAMAGED)]
        assert (await store.append(batch(1, first=100))).offsets.tolist() == [51]
        await storage.close()

    run(work())


@pytest.mark.parametrize("base", [1 << 61, 1 << 62, (1 << 62) - 1, 10**19])
@pytest.mark.parametrize("name", ["{base:020d}.seg", "keys/{base:020d}-{base:020d}.keys"])
def test_a_name_beyond_all_offsets_says_nothing(tmp_path: Path, name: str, base: int) -> None:
    """A stray file that is called like one of ours does not keep the log from opening, nor from going on for long."""

    async def work() -> None:
        await filled(tmp_path, 2)
        (log_path(tmp_path) / name.format(base=base)).write_bytes(b"stray")
        for number in (3, 4):
            storage, store = await opened(tmp_path)
            [offset] = (await store.append(batch(1, first=number * PER_BATCH))).offsets
            assert offset < (1 << 62) - (1 << 60)
            assert store.end == offset + 1
            await storage.close()
        storage, store = await opened(tmp_path)
        assert store.end == offset + 1
        await storage.close()

    run(work())
