"""Opening a log reads what it must: keys from the index where that has them, small frames many at a time."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsfg.columns import AT
from bsfg.ports import Buffer, OriginSpan, Receipt, Result
from bsfg.retention import GapReason
from bsfg.rows import record_batch_of
from bsfg.stores.log import indexstore, recovery
from bsfg.stores.log.segments import scan_segment
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import COLUMNS, FACT_ROWS, ROWS, decode_segment_header, encode_frame
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import messages, sealed

SMALL = LogOptions(segment_bytes=1 << 14)


@pytest.fixture(autouse=True)
def _closed_with_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a short log be worth what a long one is."""
    monkeypatch.setattr(indexstore, "_CLOSED_KEYS", 1)


async def trickle(disk: SimulatedDisk | Path, count: int, first: int = 0, options: LogOptions = SMALL) -> LogStorage:
    """Append facts one by one, and leave the log open."""
    storage = await LogStorage.open(disk, clock=FakeClock(), options=options)
    store = await storage.store("s")
    for number in range(first, first + count):
        await store.append(sealed(messages(1, first=number)))
    return storage


def test_after_a_clean_end_no_fact_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that was closed knows all its keys at once; not one frame is decoded for that."""

    async def run() -> None:
        disk = SimulatedDisk()
        await (await trickle(disk, 200)).close()
        monkeypatch.setattr(recovery, "decode_payload", None)
        monkeypatch.setattr(recovery, "decode_keys", None)
        store = await (await LogStorage.open(disk.killed(), clock=FakeClock(), options=SMALL)).store("s")
        assert len(store._writer.segments) > 1
        receipt = await store.append(sealed(messages(201)))
        assert (receipt.count(Result.ALREADY_EXISTS), receipt.count(Result.INSERTED)) == (200, 1)

    asyncio.run(run())


def test_after_a_kill_every_key_is_known() -> None:
    """Keys that no file has are read from many small frames at once, over the ends of segments and of reads."""

    async def run() -> None:
        disk = SimulatedDisk()
        await trickle(disk, 300)
        storage = await LogStorage.open(disk.killed(), clock=FakeClock(), options=SMALL)
        store = await storage.store("s")
        receipt = await store.append(sealed(messages(300)))
        assert receipt.count(Result.ALREADY_EXISTS) == 300
        assert receipt.offsets.tolist() == list(range(300))
        assert store.problems == []

    asyncio.run(run())


def cut_off(paths: list[Path], at: int, frames: int) -> range:
    """Take the last frames of a segment away; give the offsets that are lost."""
    data = paths[at].read_bytes()
    places = [place for place in range(len(data)) if data.startswith(b"FRM1", place)]
    paths[at].write_bytes(data[: places[-frames]])
    end = int(paths[at + 1].stem) if at + 1 < len(paths) else 200
    return range(end - frames, end)


def torn(paths: list[Path]) -> range:
    """Take the end of the last frame away."""
    paths[-1].write_bytes(paths[-1].read_bytes()[:-40])
    return range(199, 200)


def without(paths: list[Path], at: int) -> range:
    """Take a whole segment away; give the offsets that are lost."""
    paths[at].unlink()
    return range(int(paths[at].stem), int(paths[at + 1].stem) if at + 1 < len(paths) else 200)


def spoiled(paths: list[Path], at: int, place: int) -> range:
    """Change one byte of the second frame of a segment; give the offset that is lost."""
    data = bytearray(paths[at].read_bytes())
    data[data.index(b"FRM1", data.index(b"FRM1") + 4) + place] ^= 1
    paths[at].write_bytes(data)
    return range(int(paths[at].stem) + 1, int(paths[at].stem) + 2)


HARMS: dict[str, Callable[[list[Path]], range]] = {
    "the end": lambda paths: cut_off(paths, len(paths) - 1, 3),
    "half of a frame": torn,
    "the last file": lambda paths: without(paths, len(paths) - 1),
    "a file": lambda paths: without(paths, 1),
    "the first file": lambda paths: without(paths, 0),
    "the end of a file": lambda paths: cut_off(paths, 1, 3),
    "a frame": lambda paths: spoiled(paths, 0, 200),
    "the head of a frame": lambda paths: spoiled(paths, 0, 9),
    "a frame of the last file": lambda paths: spoiled(paths, -1, 200),
    "the head of a frame of the last file": lambda paths: spoiled(paths, -1, 9),
}


def put(buffer: Any, count: int, first: int = 0) -> Coroutine[Any, Any, Receipt]:
    """Store facts as a producer or a link would."""
    facts = sealed(messages(count, first=first))
    if buffer.buffer == Buffer.STORE:
        return buffer.append(facts)  # type: ignore[no-any-return]
    span = OriginSpan("plant", np.arange(first, first + count), np.full(count, 1))
    return buffer.put_if_absent(facts, span)  # type: ignore[no-any-return]


async def opened(path: Path, buffer: Buffer, options: LogOptions) -> tuple[LogStorage, Any]:
    """Open one buffer of a folder."""
    storage = await LogStorage.open(path, clock=FakeClock(), options=options)
    return storage, await (storage.store("s") if buffer == Buffer.STORE else storage.forward("s"))


KINDS = [(buffer, run_keys) for buffer in Buffer for run_keys in (131_072, 50)]


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}, {'full' if kind[1] == 50 else 'recent'} runs"
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Buffer, LogOptions]:
    """Give a closed log of 200 facts in as many frames, to be copied before it is harmed."""
    buffer, run_keys = request.param
    options, path = replace(SMALL, index_run_keys=run_keys), tmp_path_factory.mktemp("saved")

    async def run() -> None:
        storage, found = await opened(path, buffer, options)
        for number in range(200):
            await put(found, 1, number)
        await storage.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexstore, "_CLOSED_KEYS", 1)
        asyncio.run(run())
    return path, buffer, options


@pytest.mark.parametrize("harm", HARMS)
def test_a_lost_fact_can_be_sent_again(saved: tuple[Path, Buffer, LogOptions], tmp_path: Path, harm: str) -> None:
    """Frames are gone or harmed whose keys were saved: whoever sends these facts again has them stored, once."""
    source, buffer, options = saved
    folder = Path(shutil.copytree(source, tmp_path / "harmed"))
    lost = HARMS[harm](sorted((folder / "streams" / "s" / str(buffer)).glob("*.seg")))
    assert 0 < len(lost) < 200

    async def run() -> None:
        for inserted in (len(lost), 0):
            storage, found = await opened(folder, buffer, options)
            for expected in (inserted, 0):
                receipt = await put(found, 200)
                again = {offset for offset in receipt.offsets.tolist() if offset >= 200}
                assert again == set(range(200, 200 + len(lost)))
                assert receipt.count(Result.INSERTED) == expected
            assert (await found.stats()).quarantined == 0
            gone = [(gap.first, gap.last) for gap in await found.gaps() if gap.reason != GapReason.TORN]
            assert gone == [(lost[0], lost[-1])] or harm == "half of a frame"
            await storage.close()

    asyncio.run(run())


def test_keys_are_not_read_again_because_of_an_old_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost once is known: the keys that were saved since are taken as they are."""

    async def run() -> None:
        await (await trickle(tmp_path, 200)).close()
        lost = HARMS["a file"](sorted((tmp_path / "streams" / "s" / "store").glob("*.seg")))
        await (await trickle(tmp_path, 1, 200)).close()
        monkeypatch.setattr(recovery, "decode_keys", None)
        store = await (await trickle(tmp_path, 0)).store("s")
        assert [(gap.first, gap.last) for gap in await store.gaps()] == [(lost[0], lost[-1])]
        monkeypatch.undo()
        assert (await store.append(sealed(messages(201)))).count(Result.INSERTED) == len(lost)

    asyncio.run(run())


@pytest.mark.parametrize("form", [ROWS, COLUMNS])
@pytest.mark.parametrize("lacking", ["from_zone", "message_id", "digest"])
def test_a_frame_of_what_is_no_fact_is_damage(tmp_path: Path, lacking: str, form: int) -> None:
    """Whatever wrote it: what has no key or no digest is a gap, in every form of a frame, and the log opens."""

    async def run() -> None:
        await (await trickle(tmp_path, 3)).close()
        [path] = (tmp_path / "streams" / "s" / "store").glob("*.seg")
        data = path.read_bytes()
        scan = scan_segment(data, decode_segment_header(data), tail_may_be_torn=False)
        row = list(sealed(messages(1, first=3)).rows()[0])
        row[AT[lacking]] = None
        payload = (
            FACT_ROWS.write([tuple(row)]) if form == ROWS else record_batch_of([tuple(row)]).serialize().to_pybytes()
        )
        log_id = decode_segment_header(data).log_id
        place = {"base": 3, "count": 1, "appended_at_unix_ms": 1_700_000_000_000, "form": form}
        parts, _ = encode_frame(payload, log_id=log_id, chain_before=scan.chain, **place)
        path.write_bytes(data + b"".join(parts))
        storage = await trickle(tmp_path, 1, 4)
        store = await storage.store("s")
        assert [(gap.first, gap.last, str(gap.reason)) for gap in await store.gaps()] == [(3, 3, "damaged")]
        frames = [frame async for frame in store.replay(0)]
        assert [(frame.first, frame.last) for frame in frames if frame.gap] == [(3, 3)]
        assert (await store.append(sealed(messages(5)))).offsets.tolist() == [0, 1, 2, 5, 4]
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("known", [True, False], ids=["same boot", "watermark lost"])
@pytest.mark.parametrize("cut", [1, 3, 8])
def test_a_frame_without_its_padding_is_completed(tmp_path: Path, cut: int, known: bool) -> None:
    """A power loss leaves a frame that lacks only padding: what is appended behind it is there after the next one."""

    async def run() -> None:
        number = 0
        path = tmp_path / "streams" / "s" / "store" / f"{0:020}.seg"
        while number == 0 or not path.read_bytes().endswith(bytes(9)):
            await (await trickle(tmp_path, 1, number)).close()
            number += 1
        path.write_bytes(path.read_bytes()[:-cut])
        if not known:
            (path.parent / "durable").unlink()
        for more in range(number, number + 3):
            storage = await trickle(tmp_path, 1, more)
            store = await storage.store("s")
            assert store.problems == []
            assert store.end == more + 1
            await storage.close()
        frames = [frame async for frame in (await (await trickle(tmp_path, 0)).store("s")).replay(0)]
        assert [frame.gap for frame in frames] == [None] * len(frames)
        assert sum(len(frame.entries or ()) for frame in frames) == number + 3

    asyncio.run(run())


@pytest.mark.parametrize("start", [0, 3, 150, 199])
def test_the_time_of_the_oldest_fact_is_found_without_a_list_of_frames(start: int) -> None:
    """Every start asks for it; it is what reading the entry itself says, and the sealed segments stay unlisted."""

    async def run() -> None:
        disk = SimulatedDisk()
        await (await trickle(disk, 200)).close()
        store = await (await LogStorage.open(disk, clock=FakeClock(), options=SMALL)).store("s")
        view = store._writer.view()
        sealed_ones = view.segments[:-1]
        found = view.time_at(start)
        assert all(segment._frames is None for segment in sealed_ones)
        rows = view.rows_at(start)
        assert rows is not None
        assert found == rows.column("appended_at_unix_ms")[0].as_py()
        assert view.time_at(200) is None

    asyncio.run(run())


def test_a_harmed_oldest_fact_is_told_of_when_its_time_is_asked(tmp_path: Path) -> None:
    """The short way gives up where a header is wrong, and the long way tells of the damage."""

    async def run() -> None:
        await (await trickle(tmp_path, 200)).close()
        first = min((tmp_path / "streams").rglob("*.seg"))
        store = await (await LogStorage.open(tmp_path, clock=FakeClock(), options=SMALL)).store("s")
        data = bytearray(first.read_bytes())
        header = decode_segment_header(bytes(data))
        data[header.size_bytes + 20] ^= 1
        first.write_bytes(data)
        assert (await store.stats()).oldest_unix_ms is None
        assert [gap.reason for gap in await store.gaps()] == [GapReason.DAMAGED]

    asyncio.run(run())
