"""A copy of a data folder that is written meanwhile is a whole beginning of the truth, whatever happens."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsfg.errors import ForeignLog, NotAFolder, StorageFailed
from bsfg.fact import Message
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, OriginSpan, Result
from bsfg.retention import Policy
from bsfg.stores.log import backup
from bsfg.stores.log.backup import begin_new_histories, copy_folder, size_of
from bsfg.stores.log.files import Files
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.journal import Journal, Record, read_journal
from bsfg.stores.log.storage import LogStorage, log_folder
from bsfg.stores.log.verify import verify
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import altered, messages, sealed

STREAM = "operational"
POSITIONS = "node/state.journal"
OPTIONS = LogOptions(segment_bytes=16_384, index_run_keys=64)
POLICY = Policy(retention_seconds=60, max_age_seconds=60, key_horizon_seconds=600)
EXAMPLES = 2_000 if os.environ.get("BSFG_SOAK") == "long" else 20
T = TypeVar("T")


class Watched:
    """The files of a disk, with something that happens before every look at them."""

    def __init__(self, disk: SimulatedDisk, happens: Callable[[], None]) -> None:
        self._disk, self._happens = disk, happens

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._disk, name)
        if name in ("read", "read_at", "size", "list", "exists"):
            self._happens()
        return attribute


class Zone:
    """A zone that is written, and what it must hold."""

    def __init__(self, seed: int, disk: SimulatedDisk | None = None) -> None:
        self.random, self.seed = Random(seed), seed
        self.disk, self.clock = disk or SimulatedDisk(), FakeClock()
        self.truth: list[Message] = []
        self.committed = -1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.disk.make_folder("node")
        self.positions = Journal(self.disk, POSITIONS, list)
        self.positions.open()
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the zone's own thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        self.storage = await LogStorage.open(self.disk, clock=self.clock, options=OPTIONS)
        self.store = await self.storage.store(STREAM, POLICY)
        self.forward = await self.storage.forward(STREAM, POLICY)
        await self.storage.cursors.create(ConsumerSpec("peer", STREAM))
        await self.storage.cursors.create(ConsumerSpec("application", STREAM, Buffer.FORWARD, required=False))

    def close(self) -> None:
        """Stop."""
        self.run(self.storage.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # What can happen.

    def happen(self) -> None:
        """Do one of the things that a node does."""
        if self.random.random() < 0.3:
            step = self.random.choice(
                [
                    self.append,
                    self.append,
                    self.append,
                    self.confirm,
                    self.truncate,
                    self.age,
                    self.conflict,
                    self.retire,
                ]
            )
            self.run(step())

    async def append(self) -> None:
        """Append facts to both buffers."""
        count = self.random.choice([1, 5, 40])
        facts = messages(count, seed=self.seed, first=len(self.truth))
        offsets = np.arange(len(self.truth), len(self.truth) + count)
        await self.store.append(sealed(facts))
        await self.forward.put_if_absent(sealed(facts), OriginSpan("field", offsets, offsets))
        self.truth += facts
        # What the node knows of its sender is remembered once it is stored.
        self.positions.append([Record({"position": len(self.truth)})])

    async def confirm(self) -> None:
        """Confirm a part, or an island beyond it."""
        end = len(self.truth)
        if self.committed + 1 < end:
            through = self.random.randint(self.committed + 1, end - 1)
            island = [(through + 2, end - 1)] if through + 2 <= end - 1 and self.random.random() < 0.3 else []
            checkpoint = await self.storage.cursors.commit("peer", Confirmation(through, island))
            self.committed = checkpoint.committed
            await self.storage.cursors.commit("application", Confirmation(through))

    async def truncate(self) -> None:
        """Let go of some or all that is confirmed."""
        await self.store.truncate_before(self.random.randint(0, self.committed + 1))
        await self.forward.truncate_before(self.random.randint(0, self.forward.end))

    async def age(self) -> None:
        """Let time pass, so that entries and keys grow old."""
        self.clock.advance(self.random.choice([10, 90, 900]))
        for buffer in (self.store, self.forward):
            await buffer.enforce_retention(link_open=True)

    async def conflict(self) -> None:
        """Put another body under a known id, which is set aside."""
        if self.forward.start < self.forward.end:
            facts = altered(self.truth[-1:], self.random.random())
            await self.forward.put_if_absent(sealed(facts), OriginSpan("field", np.zeros(1), np.zeros(1)))

    async def retire(self) -> None:
        """Retire a consumer, which leaves gap records up to the end."""
        name = f"extra-{self.random.randrange(10**9)}"
        await self.storage.cursors.create(ConsumerSpec(name, STREAM, required=False))
        await self.storage.cursors.retire(name, "not needed")


@contextmanager
def zone(seed: int) -> Iterator[Zone]:
    """Give a zone that something has already happened in."""
    made = Zone(seed)
    try:
        for _ in range(made.random.randrange(40)):
            made.happen()
        yield made
    finally:
        made.close()


async def check(files: Files, truth: list[Message], clock: FakeClock, *, at_least: int, committed: int) -> int:
    """Open a copy and hold everything in it against the truth; give where its store buffer ends."""
    report = verify(files)
    assert report.ok and not report.notes, (report.problems, report.notes)
    storage = await LogStorage.open(files, clock=clock, options=OPTIONS)
    try:
        for buffer in (await storage.store(STREAM, POLICY), await storage.forward(STREAM, POLICY)):
            assert buffer.problems == [], buffer.problems
            stats = await buffer.stats()
            assert at_least <= stats.end <= len(truth)
            entries = [
                entry
                async for frame in buffer.replay(stats.start)
                if frame.entries is not None
                for entry in frame.entries.to_entries()
            ]
            assert [entry.message for entry in entries] == truth[stats.start : stats.end]
            gaps = [gap for gap in await buffer.gaps() if gap.origin_zone is None]
            assert {str(gap.reason) for gap in gaps} <= {"consumer_retired", "expired"}
            assert all(gap.last < stats.end for gap in gaps)
        known = [record.head["position"] for record in read_journal(files, POSITIONS)[0]]
        assert max(known, default=0) <= (await storage.forward(STREAM)).end, "it would never ask for what it lacks"
        store = await storage.store(STREAM)
        state = await storage.cursors.consumer("peer")
        assert state.log_id == store.log_id
        assert state.checkpoint.committed <= min(committed, store.end - 1)
        for offset in range(state.checkpoint.committed + 1, store.start):
            assert any(gap.reason == "expired" and gap.first <= offset <= gap.last for gap in await store.gaps())
        return await _continue(storage, truth)
    finally:
        await storage.close()


async def _continue(storage: LogStorage, truth: list[Message]) -> int:
    """Append what the copy has and what it lacks: the one is known, the other new, at the offset it had."""
    store = await storage.store(STREAM)
    end = store.end
    if store.start < end:
        known = await store.append(sealed(truth[store.start : end]))
        assert known.count(Result.ALREADY_EXISTS) == end - store.start
    if truth[end:]:
        fresh = await store.append(sealed(truth[end:]))
        assert fresh.offsets.tolist() == list(range(end, len(truth)))
    return end


@pytest.mark.soak
@given(st.integers(0, 2**32))
@settings(max_examples=EXAMPLES)
def test_a_copy_is_a_whole_beginning(seed: int) -> None:
    """Whatever happens while a folder is copied, the copy opens clean and is a beginning that has all from before."""
    with zone(seed) as made:
        before, target = len(made.truth), SimulatedDisk()
        logs = copy_folder(Watched(made.disk, made.happen), target)
        assert {(log.stream, log.buffer) for log in logs} == {(STREAM, "store"), (STREAM, "forward")}
        end = asyncio.run(check(target, made.truth, made.clock, at_least=before, committed=made.committed))
        assert end == next(log.end for log in logs if log.buffer == "store")


@pytest.mark.soak
@given(st.integers(0, 2**32))
@settings(max_examples=EXAMPLES)
def test_a_copy_survives_a_power_loss(seed: int) -> None:
    """What `copy_folder` has made is durable when it returns, and so is what a restore makes of it."""
    with zone(seed) as made:
        target = SimulatedDisk()
        copy_folder(Watched(made.disk, made.happen), target)
        found = target.crash(Random(seed))
        begin_new_histories(found, made.clock.now_unix_ms())
        found = found.crash(Random(seed))
        asyncio.run(check(found, made.truth, made.clock, at_least=0, committed=made.committed))


@pytest.mark.soak
@given(st.integers(0, 2**32))
@settings(max_examples=EXAMPLES)
def test_restored_copies_of_restored_copies(seed: int) -> None:
    """A restored log goes on from its copy under a new id, is verified as one chain, and can be copied again."""
    random, ids = Random(seed), []
    disk: Files | None = None
    truth: list[Message] = []
    for generation in range(3):
        with zone(seed) if disk is None else _again(disk, truth, seed + generation) as made:
            for _ in range(random.randrange(10)):
                made.happen()
            target = SimulatedDisk()
            copy_folder(Watched(made.disk, made.happen), target)
            restored = begin_new_histories(target, made.clock.now_unix_ms())
            identity = read_identity(target, log_folder(STREAM, Buffer.STORE))
            assert identity is not None and identity.log_id not in ids
            ids.append(identity.log_id)
            assert [each.log_id for each in identity.lineage][1:] == ids[:-1]
            assert {each.was_log_id for each in restored if each.buffer == "store"} == {made.store.log_id}
            asyncio.run(check(target, made.truth, made.clock, at_least=0, committed=made.committed))
            disk, truth = target, made.truth


@contextmanager
def _again(disk: Files, truth: list[Message], seed: int) -> Iterator[Zone]:
    assert isinstance(disk, SimulatedDisk)
    made = Zone(seed, disk)
    made.truth, made.seed = list(truth), seed
    made.committed = made.run(made.storage.cursors.checkpoint("peer")).committed
    try:
        # The forward buffer of the copy may end before the store buffer does.
        made.run(_level(made))
        yield made
    finally:
        made.close()


async def _level(made: Zone) -> None:
    lacking = made.truth[made.forward.end :]
    if lacking:
        offsets = np.arange(len(lacking))
        await made.forward.put_if_absent(sealed(lacking), OriginSpan("field", offsets, offsets))


def test_a_lost_identity_is_found_in_the_segments() -> None:
    """A restored log whose log.json is lost is still one log of two histories."""
    with zone(11) as made:
        made.run(made.append())
        target = SimulatedDisk()
        copy_folder(made.disk, target)
        begin_new_histories(target, made.clock.now_unix_ms())
        path = f"{log_folder(STREAM, Buffer.STORE)}/log.json"
        before = read_identity(target, log_folder(STREAM, Buffer.STORE))
        target.remove(path)
        storage = asyncio.run(_opened(target))
        assert storage == len(made.truth)
        after = read_identity(target, log_folder(STREAM, Buffer.STORE))
        assert before is not None and after is not None
        assert (after.log_id, [(each.log_id, each.end) for each in after.lineage]) == (
            before.log_id,
            [(each.log_id, each.end) for each in before.lineage],
        )


async def _opened(files: Files) -> int:
    storage = await LogStorage.open(files, options=OPTIONS)
    end = (await storage.store(STREAM)).end
    await storage.close()
    return end


def test_a_segment_of_an_ancestor_is_known_by_its_place() -> None:
    """Behind the point of a restore a segment of the old history is as foreign as any other."""
    with zone(5) as made:
        made.run(made.append())
        older, target = SimulatedDisk(), SimulatedDisk()
        copy_folder(made.disk, older)
        copy_folder(made.disk, target)
        [log] = [each for each in begin_new_histories(target, 0) if each.buffer == "store"]
        asyncio.run(_append_one(older))
        name = f"{log_folder(STREAM, Buffer.STORE)}/{log.end:020d}.seg"
        target.remove(name)
        file = target.create(name)
        begin_new_histories(older, 0)
        file.write([older.read(f"{log_folder(STREAM, Buffer.STORE)}/{log.end + 1:020d}.seg")])
        with pytest.raises(ForeignLog):
            asyncio.run(_opened(target))


async def _append_one(files: Files) -> None:
    storage = await LogStorage.open(files, options=OPTIONS)
    await (await storage.store(STREAM)).append(sealed(messages(1, seed=99)))
    await storage.close()


def test_a_log_that_runs_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When everything is truncated faster than it can be copied, copying fails and says so."""
    # Still more often than a damaged source is looked at, which is copied as it is in the end.
    monkeypatch.setattr(backup, "_PASSES", backup._PATIENCE + 5)
    with zone(3) as made:

        def run_away() -> None:
            made.run(made.append())
            made.run(made.storage.cursors.commit("peer", Confirmation(len(made.truth) - 1)))
            made.run(made.store.truncate_before(len(made.truth)))

        class Fleeing(Watched):
            def __getattr__(self, name: str) -> Any:
                if name == "read":
                    self._happens()
                return getattr(self._disk, name)

        with pytest.raises(StorageFailed, match="faster than it can be copied"):
            copy_folder(Fleeing(made.disk, run_away), SimulatedDisk())


def test_what_is_no_data_folder_is_not_copied() -> None:
    """A folder without a mark is refused."""
    with pytest.raises(NotAFolder):
        copy_folder(SimulatedDisk(), SimulatedDisk())


def test_what_never_changes_can_be_taken_from_an_earlier_copy() -> None:
    """Sealed segments and key segments are offered for reuse, the segment that is being written is not."""
    with zone(8) as made:
        for _ in range(10):
            made.run(made.append())
        offered: list[str] = []

        def declined(path: str, size: int) -> bool:
            offered.append(path)
            return False

        copy_folder(made.disk, SimulatedDisk(), reuse=declined)
        segments = [path for path in offered if path.endswith(".seg")]
        active = {made.store._writer.segments[-1].path, made.forward._writer.segments[-1].path}
        assert segments and not active & set(segments)
        assert size_of(made.disk) > 0
