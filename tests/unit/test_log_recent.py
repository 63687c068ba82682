"""The newest frames of a log stay in memory for those who follow it, within bounds, and are what is on disk."""

import asyncio
from pathlib import Path

import pytest

from bsfg.batch import EntryBatch
from bsfg.fact import Envelope, Fact, Message
from bsfg.ports import Frame
from bsfg.stores.log import segments
from bsfg.stores.log.buffer import LogStoreBuffer
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import messages, sealed


async def replayed(store: LogStoreBuffer, start: int = 0) -> list[Frame]:
    """Read a buffer to its end."""
    return [frame async for frame in store.replay(start, max_facts=3)]


def large(number: int) -> Message:
    """Make a fact of 300 kB."""
    envelope = Envelope("plant", "enterprise", 1, message_id=f"large-{number}")
    return Message(envelope, Fact("thing:1", "said", b'"%b"' % (b"x" * 300_000)))


def test_what_is_at_hand_is_what_is_on_disk(tmp_path: Path) -> None:
    """Frames from memory and frames that another process reads from the files are equal, offset by offset."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path)
        store = await storage.store("s")
        for number in range(0, 30, 3):
            await store.append(sealed(messages(3, first=number)))
        assert store._writer.view().is_at_hand(0)
        [log] = open_folder(tmp_path)
        found = [frame.entries for frame in await replayed(store)]
        expected = [frame.entries for frame in log.frames(max_facts=3)]
        assert EntryBatch.concat([each for each in found if each]) == EntryBatch.concat([e for e in expected if e])
        await storage.close()

    asyncio.run(run())


def test_large_facts_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """However many facts somebody asks for, those that are large are joined only until they are worth a step."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path)
        store = await storage.store("s")
        for number in range(12):
            await store.append(sealed([large(number)]))
        frames = [frame async for frame in store.replay(0, max_facts=100_000)]
        assert [frame.last for frame in frames] == [2, 5, 8, 11]
        await storage.close()

    asyncio.run(run())


def test_memory_is_bounded_in_frames_and_bytes(tmp_path: Path) -> None:
    """Only so many frames and bytes stay at hand, the oldest leave first, and all of the log can still be read."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path)
        store = await storage.store("s")
        view = store._writer.view
        for number in range(segments._RECENT_FRAMES + 10):
            await store.append(sealed(messages(1, first=number)))
        assert not view().is_at_hand(9)
        assert view().is_at_hand(10)
        end = store.end
        for number in range(5):
            await store.append(sealed([large(number)]))
        assert not view().is_at_hand(end + 1)
        assert view().is_at_hand(end + 2)
        frames = await replayed(store)
        assert (frames[0].first, frames[-1].last) == (0, store.end - 1)
        assert all(frame.entries is not None for frame in frames)
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("restart", [False, True])
def test_nothing_is_at_hand_of_older_segments(tmp_path: Path, restart: bool) -> None:
    """A new segment, or a new process, begins with nothing at hand."""

    async def run() -> None:
        options = LogOptions(segment_bytes=1)
        storage = await LogStorage.open(tmp_path, options=options)
        store = await storage.store("s")
        first = end = 0
        while store._writer.segments[-1].base == first:
            end = store.end
            await store.append(sealed(messages(50, first=end)))
        if restart:
            await storage.close()
            storage = await LogStorage.open(tmp_path, options=options)
            store = await storage.store("s")
        assert not store._writer.view().is_at_hand(0)
        assert store._writer.view().is_at_hand(end) is not restart
        assert (await replayed(store))[0].first == 0
        await storage.close()

    asyncio.run(run())
