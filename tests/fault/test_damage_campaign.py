"""Whatever happens to a file of a data folder, the folder opens, says what is wrong, and serves all that is sound."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bsfg.batch import FactBatch
from bsfg.columns import FACT_SCHEMA
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, OriginSpan, Result
from bsfg.retention import GapReason
from bsfg.stores.log.buffer import LogForwardBuffer, LogStoreBuffer
from bsfg.stores.log.files import Files
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import verify
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import (
    COLUMNS,
    FACT_ROWS,
    FRAME_HEADER_BYTES,
    ROWS,
    FrameHeader,
    decode_frame_header,
    decode_payload,
    decode_segment_header,
    encode_frame,
)
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch

STREAM = "operational"
STORE = f"streams/{STREAM}/store"
BATCHES, PER_BATCH = 40, 50
START, END = 15 * PER_BATCH, BATCHES * PER_BATCH
OPTIONS = LogOptions(segment_bytes=65_536, index_run_keys=500)
ABSENT = (GapReason.DAMAGED, GapReason.LOST, GapReason.TORN)

Harm = Callable[[Path, random.Random], None]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one coroutine to its end."""
    return asyncio.run(work)


async def _fill(folder: Path) -> None:
    storage = await LogStorage.open(folder, options=OPTIONS)
    store, forward = await storage.store(STREAM), await storage.forward(STREAM)
    for number in range(BATCHES):
        facts = batch(PER_BATCH, first=number * PER_BATCH)
        await store.append(facts)
        origin = OriginSpan("plant", np.arange(PER_BATCH) + number * PER_BATCH, np.full(PER_BATCH, 1))
        await forward.put_if_absent(facts, origin)
    await storage.cursors.create(ConsumerSpec("peer", STREAM))
    await storage.cursors.commit("peer", Confirmation(through=START - 1))
    await storage.cursors.commit("peer", Confirmation(through=START + 9))
    await store.truncate_before(START)
    await storage.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with truncated, sealed and active segments, keys, index runs, notes and cursors."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    run(_fill(folder))
    return folder


def delete(path: Path, _: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def empty(path: Path, _: random.Random) -> None:
    """Cut the file to nothing."""
    path.write_bytes(b"")


def cut(path: Path, chance: random.Random) -> None:
    """Cut the file anywhere."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def flip(path: Path, chance: random.Random) -> None:
    """Turn bits over anywhere."""
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 3, 10))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_the_beginning(path: Path, chance: random.Random) -> None:
    """Turn a bit over in the first bytes."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(min(len(data), 40))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def overwrite(path: Path, chance: random.Random) -> None:
    """Replace the content by rubbish of the same size."""
    path.write_bytes(chance.randbytes(path.stat().st_size))


def overwrite_a_part(path: Path, chance: random.Random) -> None:
    """Replace a stretch by rubbish."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    data[at : at + 3_000] = chance.randbytes(len(data[at : at + 3_000]))
    path.write_bytes(data)


def make_a_folder_of(path: Path, _: random.Random) -> None:
    """Put a folder in the place of the file."""
    path.unlink()
    (path / "something").mkdir(parents=True)


HARMS: list[Harm] = [delete, empty, cut, flip, flip_the_beginning, overwrite, overwrite_a_part, make_a_folder_of]


def segment(number: int) -> Callable[[Path], Path]:
    """Choose a segment of the store buffer by its place in the order."""
    return lambda folder: sorted((folder / STORE).glob("*.seg"))[number]


FILES: dict[str, Callable[[Path], Path]] = {
    "sealed segment": segment(1),
    "middle segment": segment(3),
    "last segment": segment(-1),
    "key segment": lambda folder: min((folder / STORE / "keys").glob("*.keys")),
    "index run": lambda folder: min((folder / STORE / "index").glob("*.run")),
    "notes": lambda folder: folder / STORE / "notes.journal",
    "identity": lambda folder: folder / STORE / "log.json",
    "watermark": lambda folder: folder / STORE / "durable",
    "cursors": lambda folder: folder / "cursors/cursors.journal",
    "mark": lambda folder: folder / "bsfg.json",
}
DERIVED = ("index run", "watermark")
"""They hold nothing that is not elsewhere, so nobody needs to hear of them."""


def frames_of(data: bytes) -> Iterator[tuple[int, int]]:
    """Give the positions and bases of the frames of a sound segment."""
    at = decode_segment_header(data).size_bytes
    while at < len(data):
        header = decode_frame_header(data, at)
        yield at, header.base
        at += header.frame_bytes


async def served(buffer: LogStoreBuffer | LogForwardBuffer, start: int) -> tuple[dict[int, str], set[int]]:
    """Read everything: the ids of what is there by offset, and the offsets that are explained as gone."""
    there: dict[int, str] = {}
    gone: set[int] = set()
    at = start
    async for frame in buffer.replay(start):
        assert frame.first == at
        at = frame.last + 1
        if frame.gap is not None:
            gone |= set(range(frame.first, frame.last + 1))
        else:
            assert frame.entries is not None
            there |= dict(zip(frame.entries.offsets.tolist(), frame.entries.values("message_id"), strict=True))
    assert at == buffer.end
    return there, gone


def own_ranges(gaps: list[Any]) -> set[int]:
    """Give all offsets of gap records that say something is not there; none may be said twice."""
    offsets: list[int] = []
    for gap in gaps:
        if gap.reason in ABSENT and gap.origin_zone is None:
            offsets += range(gap.first, gap.last + 1)
    assert len(offsets) == len(set(offsets)), "gap records overlap"
    return set(offsets)


async def recorded(folder: Path) -> set[int]:
    """Open a folder and give what is recorded as gone before anybody has read it."""
    storage = await LogStorage.open(folder, options=OPTIONS)
    gaps = await (await storage.store(STREAM)).gaps()
    await storage.close()
    return own_ranges(gaps)


def ids(offsets: Any) -> dict[int, str]:
    """Give the ids that were stored at some offsets."""
    return {offset: f"0-{offset:06d}" for offset in offsets}


async def check(where: Path | Files, may_be_gone: set[int]) -> tuple[list[str], set[int]]:
    """Open, hold what is served against what was stored, append, open again; give what was said and what is gone."""
    storage = await LogStorage.open(where, options=OPTIONS)
    store, forward = await storage.store(STREAM), await storage.forward(STREAM)
    assert (await served(forward, 0))[0] == ids(range(END))
    assert store.end >= END
    there, gone = await served(store, START)
    assert there == ids(set(range(START, END)) - gone)
    assert {offset for offset in gone if offset < END} <= may_be_gone
    assert {offset for offset in own_ranges(await store.gaps()) if offset >= START} == gone
    end = store.end
    repeated = await store.append(batch(END - START, first=START))
    for offset, result, found in zip(range(START, END), repeated.results, repeated.offsets, strict=True):
        assert offset in gone or (result == Result.ALREADY_EXISTS and found == offset)
    fresh = await store.append(batch(20, seed=5))
    assert fresh.offsets.min() >= end
    assert set(fresh.results.tolist()) == {Result.INSERTED}
    problems = [*storage.problems, *store.problems]
    await storage.close()
    again = await LogStorage.open(where, options=OPTIONS)
    store = await again.store(STREAM)
    later, still = await served(store, START)
    assert still == gone
    assert {offset: later[offset] for offset in there} == there
    assert len(later) == store.end - START - len(gone)
    await again.close()
    return problems, gone


def gone_with(kind: str, path: Path) -> set[int]:
    """Give the offsets that may be missing when a file is damaged."""
    if not kind.endswith("segment") or kind == "key segment":
        return set()
    following = [int(each.stem) for each in path.parent.glob("*.seg") if each.stem > path.stem]
    return set(range(int(path.stem), min(following, default=END)))


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("kind", FILES)
def test_any_harm_to_any_file_is_survived(whole: Path, tmp_path: Path, kind: str, harm: Harm) -> None:
    """The folder opens, names the file, serves what is sound, explains the rest once, and never reuses an offset."""
    for seed in range(2):
        folder = tmp_path / str(seed)
        shutil.copytree(whole, folder)
        path = FILES[kind](folder)
        before = path.read_bytes()
        allowed = gone_with(kind, path)
        harm(path, random.Random(f"{kind} {harm.__name__} {seed}"))
        others = seen_by_others(folder) if kind != "mark" else set(range(START, END))
        problems, gone = run(check(folder, allowed))
        assert others >= set(range(START, END)) - gone, "another process sees less than the node"
        if kind in DERIVED or (kind == "cursors" and harm in (cut, flip)):
            continue  # an end that is torn is no damage
        name = path.relative_to(folder).as_posix()
        if harm is delete and kind.endswith("segment"):
            name = f"{STORE}/keys" if kind == "key segment" else f"{STORE}: entries"
        if gone or not path.is_file() or path.read_bytes()[: len(before)] != before:
            assert any(name in text for text in problems), (seed, problems)


def seen_by_others(folder: Path) -> set[int]:
    """Give the offsets that another process finds in a folder, and see that it can be verified."""
    verify(folder)
    [log] = [log for log in open_folder(folder) if log.buffer == Buffer.STORE]
    return {offset for frame in log.frames() if frame.entries for offset in frame.entries.offsets.tolist()}


POISONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "no message": lambda payload, rng: rng.randbytes(len(payload)),
    "short bitmap": lambda payload, rng: payload.replace(
        (7).to_bytes(8, "little") , (1).to_bytes(8, "little")
    ),
    "other schema": lambda payload, rng: bytes(
        pa.RecordBatch.from_pydict({"a": [1] * PER_BATCH}).serialize()
    ),
    "other count": lambda payload, rng: bytes(
        pa.RecordBatch.from_pylist([{}] * (PER_BATCH - 1), schema=FACT_SCHEMA).serialize()
    ),
    "broken text": lambda payload, rng: payload.replace(b"machine", b"mach\xffne"),
    "nothing": lambda payload, rng: b"",
}  # fmt: skip

ROW_POISONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "no rows": lambda payload, rng: rng.randbytes(len(payload)),
    "other columns": lambda payload, rng: payload[:3] + b"\xff" + payload[4:],
    "long text": lambda payload, rng: payload[:4] + b"\xff" + payload[5:],
    "other count": lambda payload, rng: 2 * payload,
    "broken text": lambda payload, rng: payload.replace(b"machine", b"mach\xffne"),
    "nothing": lambda payload, rng: b"",
}  # fmt: skip

ALL_POISONS = [(COLUMNS, name) for name in POISONS] + [(ROWS, name) for name in ROW_POISONS]


def as_rows(header: FrameHeader, payload: bytes) -> bytes:
    """Give the payload of a frame as that of a frame of a few facts."""
    return FACT_ROWS.write(FactBatch(decode_payload(header, payload, FACT_SCHEMA)).rows())


@pytest.mark.parametrize("where", [1, -1], ids=["sealed", "active"])
@pytest.mark.parametrize(("form", "poison"), ALL_POISONS)
def test_a_frame_that_cannot_be_decoded_is_damage_and_no_end(
    whole: Path, tmp_path: Path, form: int, poison: str, where: int
) -> None:
    """A frame whose checksums are right and whose content is not takes nothing with it but its own entries."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    path = segment(where)(folder)
    data = path.read_bytes()
    at, base = list(frames_of(data))[1]
    header = decode_frame_header(data, at)
    payload = data[at + FRAME_HEADER_BYTES : at + FRAME_HEADER_BYTES + header.payload_bytes]
    if form == ROWS:
        payload = as_rows(header, payload)
    poisons = POISONS if form == COLUMNS else ROW_POISONS
    poisoned = poisons[poison](payload, random.Random(1))
    assert poisoned != payload
    parts, _ = encode_frame(
        poisoned,
        base=base,
        count=header.count,
        appended_at_unix_ms=header.appended_at_unix_ms,
        log_id=header.log_id,
        chain_before=header.chain_before,
        form=form,
    )
    path.write_bytes(data[:at] + b"".join(map(bytes, parts)) + data[at + header.frame_bytes :])
    assert not verify(folder).ok
    shutil.rmtree(folder / STORE / "index")
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert set(range(base, header.end)) <= run(recorded(copy))
    problems, gone = run(check(folder, set(range(base, header.end))))
    assert gone == set(range(base, header.end))
    assert any(f"{path.relative_to(folder).as_posix()} at byte {at}" in text for text in problems), problems


def on_disk(folder: Path) -> SimulatedDisk:
    """Copy a folder to a simulated disk."""
    disk = SimulatedDisk()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            disk.make_folder(name)
            continue
        file = disk.create(name)
        file.write([path.read_bytes()])
        file.sync()
        file.close()
    return disk


@pytest.mark.parametrize("place", ["beginning", "middle", "end", "all"])
@pytest.mark.parametrize("kind", FILES)
def test_sectors_that_cannot_be_read_are_damage(whole: Path, kind: str, place: str) -> None:
    """An input/output error takes the entries of its sectors and nothing else; the file and the bytes are named."""
    disk = on_disk(whole)
    path = FILES[kind](whole)
    name, size = path.relative_to(whole).as_posix(), path.stat().st_size
    at = {"beginning": 0, "middle": size // 2, "end": size - 1, "all": 0}[place]
    disk.spoil(name, at - at % 512, size if place == "all" else 512)
    problems, gone = run(check(disk, gone_with(kind, path)))
    if kind not in (*DERIVED, "key segment"):
        assert any(name in text for text in problems), problems
    if kind.endswith("segment") and kind != "key segment" and place in ("middle", "end"):
        assert 0 < len(gone) <= 2 * PER_BATCH


def test_several_missing_segments_are_all_named(whole: Path, tmp_path: Path) -> None:
    """Two neighbours and a third that somebody deleted are three files' worth of lost entries, each said once."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    paths = sorted((folder / STORE).glob("*.seg"))
    bases = [int(path.stem) for path in paths]
    for number in (1, 2, 4):
        paths[number].unlink()
    lost = set(range(bases[1], bases[3])) | set(range(bases[4], bases[5]))

    assert {offset for offset in run(recorded(folder)) if offset >= START} == lost
    assert run(check(folder, lost))[1] == lost


def test_keys_that_leave_with_a_damaged_frame_are_reported(whole: Path, tmp_path: Path) -> None:
    """Truncating a segment with a damaged frame says which keys nobody knows any more, and keeps its bytes aside."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    path = segment(1)(folder)
    at, base = next(frames_of(path.read_bytes()))
    data = bytearray(path.read_bytes())
    data[at + FRAME_HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)

    async def truncate() -> list[str]:
        storage = await LogStorage.open(folder, options=OPTIONS)
        store = await storage.store(STREAM)
        await storage.cursors.commit("peer", Confirmation(through=END - 1))
        await store.truncate_before(END)
        assert set(range(base, base + PER_BATCH)) <= own_ranges(await store.gaps())
        await storage.close()
        return store.problems

    problems = run(truncate())
    assert any(f"entries {base} to {base + PER_BATCH - 1} leave without their keys" in text for text in problems)
    assert list((folder / STORE / "aside").glob(f"{path.stem}-{at}.damaged"))


def test_a_lost_journal_of_cursors_lets_nothing_go(whole: Path, tmp_path: Path) -> None:
    """While nobody knows what consumers still need, a forward buffer without a required one keeps everything."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    (folder / "cursors/cursors.journal").unlink()

    async def look() -> None:
        storage = await LogStorage.open(folder, options=OPTIONS)
        assert storage.cursors.are_lost
        assert any("cursors.journal: missing" in text for text in storage.problems)
        for buffer in (await storage.store(STREAM), await storage.forward(STREAM)):
            with pytest.raises(Exception, match="confirmed"):
                await buffer.truncate_before(END)
        await storage.close()
        storage = await LogStorage.open(folder, options=OPTIONS)
        assert not storage.cursors.are_lost
        await storage.close()

    run(look())
