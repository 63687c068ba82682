"""A lane brings its frames into a buffer in order and once, however often it breaks and whoever runs it beside."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BufferFull, ConflictingDuplicate, DigestMismatch, LinkStopped, PeerUnreachable, SpoolNotShared
from bsfg.journey.link import Refusal
from bsfg.ports import Frame, GapRecord, Receipt, Result
from bsfg.retention import GapReason
from bsfg.spark import lane as lane_module
from bsfg.spark.lane import OrderedSender, WriteSums, take_append, take_put
from bsfg.spark.sink import FORGOTTEN_SECONDS, PartWriter, read_part, remove_forgotten, spool_folder
from bsfg.testing.facts import batch, messages, sealed
from bsfg.wire.service import PutOutcome
from bsfg.wire.streams import Appended


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "BACKOFF_FIRST_SECONDS", 0.0001)
    monkeypatch.setattr(lane_module, "BACKOFF_MAX_SECONDS", 0.0001)


class Buffer:
    """A buffer that keeps each item once, in the order of arrival, and refuses what it is told to."""

    def __init__(self, seed: int, trouble: float) -> None:
        self.items: list[int] = []
        self.random, self.trouble = Random(seed), trouble

    def put(self, item: int) -> str:
        """Keep an item unless it is there."""
        if item in self.items:
            return "repeated"
        self.items.append(item)
        return "inserted"


class FakeStream:
    """A call to the buffer: items are answered in order, later ones are refused after one that was not taken."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.random = buffer, buffer.random
        self.queue: asyncio.Queue[tuple[int, asyncio.Future[str]]] = asyncio.Queue()
        self.worker = asyncio.create_task(self._serve())
        self.broken = False

    async def send(self, item: int) -> asyncio.Future[str]:
        """Take an item, or break."""
        await asyncio.sleep(0)
        if self.random.random() < self.buffer.trouble:
            raise PeerUnreachable("the call ended")
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, future))
        return future

    async def _serve(self) -> None:
        while True:
            item, future = await self.queue.get()
            for _ in range(self.random.randrange(3)):
                await asyncio.sleep(0)
            fails = self.broken or self.random.random() < self.buffer.trouble
            # The first answer that fails may be lost after the item was kept; what follows it is never kept.
            answer = self.buffer.put(item) if not fails or (not self.broken and self.random.random() < 0.5) else ""
            self.broken = self.broken or fails
            if not future.done() and fails:
                future.set_exception(BufferFull("no room now"))
                future.exception()
            elif not future.done():
                future.set_result(answer)

    async def close(self) -> None:
        """End the call."""
        self.worker.cancel()


@given(st.integers(0, 10**6), st.integers(0, 30), st.sampled_from([0.0, 0.05, 0.3]), st.integers(1, 3))
def test_items_arrive_in_order_and_once(seed: int, count: int, trouble: float, lanes: int) -> None:
    """One lane or several at once over the same items, through all kinds of trouble: the buffer has them in order."""
    buffer = Buffer(seed, trouble)

    async def run() -> dict[str, int]:
        taken = {"inserted": 0, "repeated": 0}

        def take(item: int, answer: str) -> None:
            taken[answer] += 1

        lane = OrderedSender(lambda: FakeStream(buffer), take, 1_000.0)
        for item in range(count):
            await lane.send(item)
            for _ in range(buffer.random.randrange(3)):
                await asyncio.sleep(0)
        await lane.finish()
        return taken

    async def work() -> list[dict[str, int]]:
        return await asyncio.gather(*(run() for _ in range(lanes)))

    results = asyncio.run(work())
    assert buffer.items == list(range(count))
    assert all(sum(taken.values()) == count for taken in results)


class Independent(FakeStream):
    """A call in which each item is taken or refused for itself, as appends are."""

    @property
    def broken(self) -> bool:
        """Never: a refusal does not concern the items behind it."""
        return False

    @broken.setter
    def broken(self, value: bool) -> None:
        pass


@given(st.integers(0, 10**6), st.integers(0, 30), st.sampled_from([0.0, 0.05, 0.3]))
def test_one_by_one_no_item_overtakes_a_refused_one(seed: int, count: int, trouble: float) -> None:
    """Where a refused item does not hold up those behind it, sending them one by one keeps the order."""
    buffer = Buffer(seed, trouble)

    async def work() -> None:
        lane = OrderedSender(lambda: Independent(buffer), lambda item, answer: None, 1_000.0, one_by_one=True)
        for item in range(count):
            await lane.send(item)
        await lane.finish()

    asyncio.run(work())
    assert buffer.items == list(range(count))


def test_patience_ends() -> None:
    """Trouble that lasts longer than the time given, or will not pass, is raised."""

    class Dead:
        async def send(self, item: int) -> asyncio.Future[str]:
            raise PeerUnreachable("nobody there")

        async def close(self) -> None:
            pass

    async def work() -> None:
        await OrderedSender(Dead, lambda item, answer: None, 0.01).send(1)

    with pytest.raises(PeerUnreachable):
        asyncio.run(work())


def receipt(*results: Result) -> Appended:
    """Make an answer to a batch."""
    count = len(results)
    found = Receipt(np.arange(count), np.array(results, dtype=np.uint8), b"head", 0)
    return Appended(found, np.zeros((count, 32), dtype=np.uint8))


def test_what_became_of_facts_is_added_up() -> None:
    """Inserted, repeated and conflicting facts are counted; conflicts fail unless they are to be counted."""
    facts = batch(3)
    answer = receipt(Result.INSERTED, Result.ALREADY_EXISTS, Result.CONFLICT)
    sums = WriteSums()
    take_append(sums, conflicts_fail=False)(facts, answer)
    assert (sums.facts, sums.inserted, sums.repeated, sums.conflicts) == (3, 1, 1, 1)
    with pytest.raises(ConflictingDuplicate, match="the first is '0-000002'"):
        take_append(WriteSums(), conflicts_fail=True)(facts, answer)


def frame(first: int, count: int) -> Frame:
    """Make a frame as it was fetched."""
    entries = EntryBatch.of(sealed(messages(count)).record_batch, np.arange(first, first + count), 5)
    return Frame(first, first + count - 1, entries)


def test_what_became_of_frames_is_added_up() -> None:
    """Refusals are joined, and what was not taken whole is an error that says why."""
    sums = WriteSums()
    take = take_put(sums)
    take(frame(0, 3), PutOutcome(2, inserted=2, refusals=[Refusal(2, 2, "conflict")], chain_head=b"a"))
    take(frame(3, 2), PutOutcome(4, inserted=1, refusals=[Refusal(3, 3, "conflict")], chain_head=b"b"))
    take(Frame(5, 9, gap=GapRecord(5, 9, GapReason.EXPIRED, 1)), PutOutcome(9))
    whole = WriteSums.of([sums, WriteSums(first=10, last=12, log_id="x")])
    assert whole.to_dict() == {
        "facts": 5,
        "inserted": 3,
        "repeated": 0,
        "conflicts": 0,
        "gaps": 1,
        "refusals": [{"first": 2, "last": 3, "reason": "conflict", "detail": ""}],
        "first": 10,
        "last": 12,
        "log_id": "x",
    }
    assert whole.chain_head == b"b"
    with pytest.raises(DigestMismatch, match="offset 1"):
        take(frame(0, 3), PutOutcome(0, refetch_at=1))
    with pytest.raises(LinkStopped, match="zone_not_allowed: not yours"):
        take(frame(0, 3), PutOutcome(-1, held_code="zone_not_allowed", held_detail="not yours"))


@given(st.integers(0, 40), st.integers(1, 4_000))
def test_batches_are_cut_into_small_pieces(count: int, max_bytes: int) -> None:
    """Pieces hold all facts in order, and none is larger than allowed unless it is a single fact."""
    facts = batch(count) if count else FactBatch.empty()
    found = facts.pieces(max_bytes)
    assert [id for piece in found for id in piece.values("message_id")] == facts.values("message_id")
    assert all(len(piece) == 1 or piece.nbytes <= max_bytes for piece in found)
    assert all(len(piece) for piece in found)


def test_a_part_holds_what_was_written(tmp_path: Path) -> None:
    """Facts, frames and gap records come back from a part in order, and nobody else can read it."""
    gap = GapRecord(3, 5, GapReason.EVICTED, 1_700_000_000_000, "two\nlines")
    with PartWriter(tmp_path) as part:
        for item in (batch(4), frame(0, 3), Frame(3, 5, gap=gap)):
            part.write(item)
    facts, entries, missing = read_part(part.path)
    assert isinstance(facts, FactBatch)
    assert facts.values("message_id") == batch(4).values("message_id")
    assert isinstance(entries, Frame)
    assert entries.entries is not None
    assert (entries.first, entries.last, len(entries.entries)) == (0, 2, 3)
    assert missing == Frame(3, 5, gap=gap)
    assert part.path.stat().st_mode & 0o077 == 0


def test_parts_do_not_stay_behind(tmp_path: Path) -> None:
    """A part whose task fails is removed at once, one whose task was killed after a day."""
    with pytest.raises(ValueError, match="in the middle"), PartWriter(tmp_path) as part:
        part.write(batch(1))
        raise ValueError("in the middle")
    assert list(tmp_path.iterdir()) == []
    with PartWriter(tmp_path) as part:
        part.write(batch(1))
    remove_forgotten(tmp_path)
    assert part.path.exists()
    then = part.path.stat().st_mtime - FORGOTTEN_SECONDS - 10
    os.utime(part.path, (then, then))
    remove_forgotten(tmp_path)
    assert not part.path.exists()


def test_a_part_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    """On a cluster without a common folder the error says what to do."""
    with pytest.raises(SpoolNotShared, match="cannot be read here") as caught:
        list(read_part(tmp_path / "nowhere.part"))
    assert "spool" in caught.value.hint
    assert spool_folder(str(tmp_path / "made")).is_dir()
