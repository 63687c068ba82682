"""Local reads: the last known state from the folder, its node alive, killed or gone, and only what is durable."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sdk.log_writer import SUBJECTS

from bsfg.errors import InvalidArgument, NotAFolder, SignatureInvalid, UnknownStream
from bsfg.fact import Entry, Key
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, OriginSpan
from bsfg.retention import GapReason, Policy
from bsfg.sdk.local import LocalReader, Tail
from bsfg.sdk.signing import TrustedKeys
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import message, sealed

SMALL = LogOptions(segment_bytes=65_536)


def files(folder: Path, pattern: str) -> list[Path]:
    """Find files in a data folder."""
    return sorted(folder.rglob(pattern))


class Writer:
    """A writer in a process of its own."""

    def __init__(self, folder: Path, first: int = 0, count: int = 3, pause: float = 0.0) -> None:
        command = [sys.executable, "-m", "tests.sdk.log_writer", str(folder), str(first), str(count), str(pause)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def durable(self) -> int:
        """Wait for the next acknowledgement and give how many facts are durable by then."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def kill(self) -> int:
        """Kill it and give how many facts it said were durable."""
        if self.process.returncode is not None:
            return 0
        self.process.kill()
        out, _ = self.process.communicate()
        lines = [line for line in out.split("\n")[:-1] if line]
        return int(lines[-1]) if lines else 0


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    """Give a list of writers that are killed when the test ends."""
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.kill()


def check_state(reader: LocalReader, durable: int, *, at_most: int | None = None) -> int:
    """Compare the last known state with what a writer had made durable; give how many facts the reader knows."""
    state = reader.latest_all(stream="operational")
    numbers = {int(entry.message.envelope.message_id or -1) for entry in state.values()}
    known = max(numbers, default=-1) + 1
    assert known >= durable
    assert at_most is None or known <= at_most
    assert numbers == set(range(max(0, known - SUBJECTS), known))
    for (subject, _), entry in state.items():
        number = int(entry.message.envelope.message_id or -1)
        assert subject == f"machine:m{number % SUBJECTS}"
        assert (entry.offset, entry.message.fact.value()) == (number, number)
    return known


def test_reading_beside_a_writer_and_over_its_death(tmp_path: Path, writers: list[Writer]) -> None:
    """The reader follows a live writer, keeps answering when it is killed in mid-write, and goes on with the next."""
    folder, reader, known = tmp_path / "data", None, 0
    for _ in range(4):
        writer = Writer(folder, first=known)
        writers.append(writer)
        durable = writer.durable()
        reader = reader or LocalReader(folder)
        for _ in range(40):
            check_state(reader, durable)
            durable = max(durable, writer.durable())
        last = max(durable, writer.kill())
        known = check_state(reader, last)
        fresh = LocalReader(folder)
        assert check_state(fresh, last) == known
        entries = list(fresh.entries("operational"))
        assert [entry.offset for entry in entries] == list(range(known))
    assert reader is not None
    latest = reader.latest("machine:m3", "temperature_measured")
    assert latest is not None
    assert latest.origin is not None
    assert latest.origin.zone == "plant"
    assert reader.latest("machine:m99", "temperature_measured") is None


def test_only_durable_facts_are_shown(tmp_path: Path) -> None:
    """Bytes that the writer has not declared durable are not shown, however whole they look."""
    import asyncio

    async def write() -> None:
        storage = await LogStorage.open(tmp_path, options=SMALL)
        await _put(storage, range(5))
        reader, tail = LocalReader(tmp_path), Tail(_log(tmp_path), 0)
        assert len(list(reader.entries("operational"))) == 5
        (segment,) = files(tmp_path, "*.seg")
        whole = segment.read_bytes()
        await _put(storage, range(5, 10))
        ahead = segment.read_bytes()
        await storage.close()
        # As if the writer had written the second frame and not yet synced it: the watermark is still the old one.
        (mark,) = files(tmp_path, "durable")
        later = mark.read_bytes()
        _rewind_mark(mark, 5, len(whole))
        assert len(ahead) > len(whole)
        assert len(list(LocalReader(tmp_path).entries("operational"))) == 5
        assert sum(len(frame.entries or ()) for frame in tail.frames()) == 5
        assert list(tail.frames()) == []
        mark.write_bytes(later)
        assert sum(len(frame.entries or ()) for frame in tail.frames()) == 5

    asyncio.run(write())


def _rewind_mark(path: Path, end: int, size: int) -> None:
    import crc32c

    from bsfg.stores.log.notes import WATERMARK, boot_id

    body = WATERMARK.pack(boot_id(), end, size, 0)[:-4]
    path.write_bytes(body + crc32c.crc32c(body).to_bytes(4, "little"))


async def _put(storage: LogStorage, numbers: range, stream: str = "operational", subjects: int = SUBJECTS) -> None:
    forward = await storage.forward(stream, Policy(retention_seconds=0, max_age_seconds=0, key_horizon_seconds=0))
    facts = [message(f"{stream}-{each}", each, subject=f"machine:m{each % subjects}") for each in numbers]
    offsets = np.array(numbers, dtype=np.int64)
    await forward.put_if_absent(sealed(facts), OriginSpan("plant", offsets, offsets))


def _log(folder: Path) -> LogFolder:
    return next(log for log in open_folder(folder) if log.buffer == Buffer.FORWARD)


async def test_streams_keys_and_history(tmp_path: Path) -> None:
    """Entries are found by stream, range and key; the newest over all streams is the one that was stored last."""
    storage = await LogStorage.open(tmp_path)
    await _put(storage, range(30))
    await _put(storage, range(100, 110), "audit")
    reader = LocalReader(tmp_path)
    assert reader.streams() == ["audit", "operational"]
    assert [entry.offset for entry in reader.entries("operational", 10, 13)] == [10, 11, 12]
    found = reader.get(Key("plant", "operational-7"))
    assert found is not None
    assert found.offset == 7
    assert reader.get(Key("plant", "audit-105"), stream="operational") is None
    assert reader.get(Key("plant", "audit-105"), stream="audit") is not None
    newest = reader.latest("machine:m4", "temperature_measured")
    assert newest is not None
    assert newest.message.envelope.message_id == "audit-104"
    only = reader.latest("machine:m4", "temperature_measured", stream="operational")
    assert only is not None
    assert only.message.envelope.message_id == "operational-24"
    assert len(reader.latest_all()) == 10
    with pytest.raises(UnknownStream):
        reader.latest("a:b", "c", stream="nowhere")
    await storage.close()


async def test_other_folders_are_refused(tmp_path: Path) -> None:
    """A folder that is none says so when the reader is made; a stream that comes later is seen."""
    with pytest.raises(NotAFolder):
        LocalReader(tmp_path / "nothing")
    storage = await LogStorage.open(tmp_path / "data")
    reader = LocalReader(tmp_path / "data")
    assert reader.latest("machine:m1", "temperature_measured") is None
    await _put(storage, range(2))
    assert reader.latest("machine:m1", "temperature_measured") is not None
    with pytest.raises(InvalidArgument):
        LocalReader(tmp_path / "data", max_latest=0)
    await storage.close()


async def test_the_store_buffer_can_be_read_too(tmp_path: Path) -> None:
    """What the zone itself produced is read likewise."""
    storage = await LogStorage.open(tmp_path)
    await (await storage.store("operational")).append(sealed([message("a", 1)]))
    assert LocalReader(tmp_path, buffer=Buffer.STORE).latest("machine:press-1", "temperature_measured") is not None
    assert LocalReader(tmp_path).streams() == []
    await storage.close()


async def test_more_subjects_than_memory(tmp_path: Path) -> None:
    """When subjects fall out of memory they are searched for on disk: slower, and still right."""
    storage = await LogStorage.open(tmp_path)
    await _put(storage, range(50), subjects=50)
    reader = LocalReader(tmp_path, max_latest=8)
    for number in (0, 20, 49):
        entry = reader.latest(f"machine:m{number}", "temperature_measured")
        assert entry is not None
        assert entry.offset == number
    assert reader.latest("machine:m50", "temperature_measured") is None
    with pytest.raises(InvalidArgument, match="more than 8"):
        reader.latest_all()
    await storage.close()


async def test_following_a_log(tmp_path: Path) -> None:
    """A follower gets each entry once as it becomes durable, over segments and beside truncation."""
    storage = await LogStorage.open(tmp_path, options=SMALL)
    await _put(storage, range(3))
    reader = LocalReader(tmp_path)
    assert list(reader.follow("operational", idle_seconds=0)) == []
    assert [entry.offset for entry in reader.follow("operational", 1, idle_seconds=0)] == [1, 2]
    seen: list[int] = []
    begun = threading.Event()

    def follow() -> None:
        for entry in itertools.islice(reader.follow("operational", 0), 603):
            seen.append(entry.offset)
            begun.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(60)
    for first in range(3, 603, 100):
        await _put(storage, range(first, first + 100))
    thread.join(60)
    assert seen == list(range(603))
    assert len(files(tmp_path, "*.seg")) > 1
    await storage.close()


async def test_what_left_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Truncated ranges are gap records to whoever reads history; what the reader knew of them it still knows."""
    storage = await LogStorage.open(tmp_path, options=SMALL)
    await _put(storage, range(5), subjects=100)
    reader = LocalReader(tmp_path)
    reader.refresh()
    forward = await storage.forward("operational")
    await storage.cursors.create(ConsumerSpec("app", "operational", Buffer.FORWARD))
    await storage.cursors.commit("app", Confirmation(through=4))
    await forward.truncate_before(5)
    await _put(storage, range(5, 8), subjects=100)
    known = reader.latest("machine:m2", "temperature_measured")
    assert known is not None
    assert LocalReader(tmp_path).latest("machine:m2", "temperature_measured") is None
    items = list(reader.items("operational", 0))
    assert isinstance(items[0], GapRecord)
    assert (items[0].first, items[0].last, items[0].reason) == (0, 4, GapReason.TRUNCATED)
    told: list[GapRecord] = []
    assert [e.offset for e in LocalReader(tmp_path, on_gap=told.append).entries("operational", 0)] == [5, 6, 7]
    assert [(gap.first, gap.last) for gap in told] == [(0, 4)]
    with caplog.at_level(logging.WARNING, "bsfg.local"):
        list(reader.entries("operational", 3))
    assert "offsets 3 to 4 are not there: truncated" in caplog.text
    await storage.close()


async def test_damage_is_told(tmp_path: Path) -> None:
    """A damaged frame is listed as a gap, so that nobody takes an older fact for the newest without a warning."""
    storage = await LogStorage.open(tmp_path, options=SMALL)
    for first in (0, 10, 20):
        await _put(storage, range(first, first + 10))
    await storage.close()
    (segment,) = files(tmp_path, "*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    reader = LocalReader(tmp_path)
    entry = reader.latest("machine:m3", "temperature_measured")
    assert entry is not None
    assert entry.offset == 23
    assert [(gap.first, gap.last, gap.reason) for gap in reader.gaps] == [(10, 19, GapReason.DAMAGED)]


async def test_signatures_are_demanded(tmp_path: Path) -> None:
    """With keys for a zone, unsigned facts of it are not given out."""
    storage = await LogStorage.open(tmp_path)
    await _put(storage, range(2))
    reader = LocalReader(tmp_path, keys=TrustedKeys({"plant": {}}))
    with pytest.raises(SignatureInvalid, match="is not signed"):
        reader.latest("machine:m1", "temperature_measured")
    with pytest.raises(SignatureInvalid):
        list(reader.entries("operational"))
    assert LocalReader(tmp_path, keys=TrustedKeys({"other": {}})).latest("machine:m1", "temperature_measured")
    await storage.close()


def test_a_reader_needs_no_network_library() -> None:
    """Local reads load neither gRPC nor the node."""
    code = "import sys; from bsfg import LocalReader; print([m for m in sys.modules if m in ('grpc', 'bsfg.node')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["put", "truncate", "reopen", "look"]), st.integers(1, 120)), max_size=14))
def test_a_tail_misses_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Whatever the writer does between two looks, the tail covers every offset once: as an entry, or as a gap."""
    import asyncio

    folder = tmp_path_factory.mktemp("tail")

    async def run() -> None:
        storage = await LogStorage.open(folder, options=SMALL)
        await _put(storage, range(1))
        await storage.cursors.create(ConsumerSpec("app", "operational", Buffer.FORWARD))
        tail, covered, end = Tail(_log(folder), 0), 0, 1
        for step, size in [*steps, ("look", 0)]:
            forward = await storage.forward("operational")
            if step == "put":
                await _put(storage, range(end, end + size))
                end += size
            elif step == "truncate":
                await storage.cursors.commit("app", Confirmation(through=min(end - 1, size * 3)))
                await forward.truncate_before(min(end, size * 3 + 1))
            elif step == "reopen":
                await storage.close()
                storage = await LogStorage.open(folder, options=SMALL)
            else:
                for frame in tail.frames():
                    assert frame.first == covered
                    covered = frame.last + 1
                    if frame.entries is not None:
                        assert frame.entries.offsets.tolist() == list(range(frame.first, frame.last + 1))
                assert covered == end
        await storage.close()

    asyncio.run(run())


def test_entries_are_what_was_written(tmp_path: Path, writers: list[Writer]) -> None:
    """Every entry carries its message, digest, time and origin as the writer stored them."""
    writer = Writer(tmp_path / "data", count=5)
    writers.append(writer)
    writer.durable()
    first: Entry = next(iter(LocalReader(tmp_path / "data").entries("operational")))
    expected = message("0", 0, subject="machine:m0")
    assert (first.message, first.digest) == (expected, sealed([expected]).digests()[0])
