"""Nobody waits for somebody else's bytes: a log takes its work in turns, each of bounded size."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import TruncateRefused
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.retention import DAY_SECONDS, Policy
from bsfg.stores.log.buffer import LogStoreBuffer, Removing
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import batch

OLD = Policy(retention_seconds=DAY_SECONDS, max_age_seconds=DAY_SECONDS)


class Held:
    """A disk whose syncs stand still until they are let go, so that a queue forms behind the first."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.reached = threading.Event()

    def __call__(self, seconds: float) -> None:
        """Stand in the writer's thread, after its sync."""
        self.reached.set()
        assert self.may_go.wait(60)


async def queued(tmp_path: Path, batches: list[FactBatch], options: LogOptions) -> list[Any]:
    """Append batches that all wait behind a first one, and give their receipts."""
    held = Held()
    storage = await LogStorage.open(tmp_path, options=options, on_sync=held)
    store = await storage.store("s")
    first = store.append(batch(1, seed=99))
    await asyncio.to_thread(held.reached.wait, 60)
    receipts = [store.append(each) for each in batches]
    held.may_go.set()
    await first
    result = await asyncio.gather(*receipts)
    await storage.close()
    return result


def test_a_queue_becomes_one_commit(tmp_path: Path) -> None:
    """What waits together is made durable together, while it is small: all get the same head of the chain."""
    batches = [batch(1, first=number) for number in range(20)]
    receipts = asyncio.run(queued(tmp_path, batches, LogOptions()))
    assert len({receipt.chain_head for receipt in receipts}) == 1


def test_a_group_has_a_limit_of_bytes(tmp_path: Path) -> None:
    """Twenty facts of 10 kB become several frames when a group may have 40 kB: none holds more than three."""
    batches = [batch(1, first=number, object_bytes=10_000) for number in range(20)]
    receipts = asyncio.run(queued(tmp_path, batches, LogOptions(max_group_bytes=40_000)))
    heads = [receipt.chain_head for receipt in receipts]
    assert max(heads.count(head) for head in heads) <= 3
    assert sorted(receipt.offsets[0] for receipt in receipts) == list(range(1, 21))


def test_a_batch_larger_than_the_limit_is_a_group_of_its_own(tmp_path: Path) -> None:
    """The limit parts callers and not batches: a large one is stored whole, and alone."""
    batches = [batch(1, first=0), batch(4, first=1, object_bytes=10_000), batch(1, first=5)]
    receipts = asyncio.run(queued(tmp_path, batches, LogOptions(max_group_bytes=20_000)))
    assert len({receipt.chain_head for receipt in receipts}) == 3
    assert [len(receipt) for receipt in (each.offsets for each in receipts)] == [1, 4, 1]


async def full_of_segments(storage: LogStorage, count: int) -> LogStoreBuffer:
    """Fill a store buffer with many small segments."""
    store = await storage.store("s", OLD)
    for number in range(count):
        await store.append(batch(20, first=20 * number, object_bytes=1_000))
    return store


def test_appends_pass_while_retention_works(tmp_path: Path) -> None:
    """Facts that are appended while much is removed are durable before the removal is done."""

    async def run() -> None:
        clock = FakeClock()
        storage = await LogStorage.open(tmp_path, clock=clock, options=LogOptions(segment_bytes=1))
        store = await full_of_segments(storage, 60)
        ended: list[str] = []

        async def produce(number: int) -> None:
            await store.append(batch(1, seed=7, first=number))
            ended.append("append")

        async def retain() -> None:
            await store.enforce_retention(link_open=True)
            ended.append("retention")

        clock.advance(2 * DAY_SECONDS)
        retaining = asyncio.create_task(retain())
        starts = set()
        while not retaining.done():
            await produce(len(ended))
            starts.add(store.start)
        await retaining
        assert ended.index("retention") > 3
        assert len(starts) > 3  # it went in steps, and each was to be seen
        assert store.start == 1_200
        assert not [name for name in storage.files.list("streams/s/store/keys") if not name.endswith(".keys")]
        await storage.close()
        again = await LogStorage.open(tmp_path, clock=clock)
        store = await again.store("s", OLD)
        repeated = await store.append(batch(20, object_bytes=1_000))
        assert repeated.offsets.tolist() == list(range(20))  # the keys of what went are known
        await again.close()

    asyncio.run(run())


def test_every_step_of_an_order_is_decided_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A required consumer that is made while an order is carried out keeps what has not left yet."""
    starts: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        storage = await LogStorage.open(tmp_path, options=LogOptions(segment_bytes=1))
        store = await full_of_segments(storage, 60)
        spec = ConsumerSpec("first", "s", Buffer.STORE)
        await storage.cursors.create(spec)
        await storage.cursors.commit("first", Confirmation(through=store.end - 1))
        gather = Removing.gather

        def gather_while_one_comes(removing: Removing) -> None:
            gather(removing)
            starts.append(store.start)
            if len(starts) == 2:
                made = storage.cursors.create(replace(spec, name="late"))
                asyncio.run_coroutine_threadsafe(made, loop).result(60)

        monkeypatch.setattr(Removing, "gather", gather_while_one_comes)
        with pytest.raises(TruncateRefused):
            await store.truncate_before(store.end)
        assert 0 < store.start == starts[1] < store.end
        assert not [name for name in storage.files.list("streams/s/store/keys") if not name.endswith(".keys")]
        await storage.close()

    asyncio.run(run())


class Meddling:
    """The specification of a consumer; whoever asks for its stream makes another consumer appear meanwhile."""

    def __init__(self, spec: ConsumerSpec, appear: Any) -> None:
        self._spec, self._appear = spec, appear

    def __getattr__(self, name: str) -> Any:
        if name == "stream" and self._appear is not None:
            appear, self._appear = self._appear, None
            appear()
        return getattr(self._spec, name)


@pytest.mark.parametrize("look", ["enforce_retention", "floor"])
def test_a_consumer_may_appear_while_the_consumers_are_looked_at(tmp_path: Path, look: str) -> None:
    """Creating a consumer in the middle of a retention neither fails it nor closes the log."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path)
        store = await storage.store("s")
        loop = asyncio.get_running_loop()
        await storage.cursors.create(ConsumerSpec("one", "s", Buffer.STORE))

        def appear() -> None:
            made = storage.cursors.create(ConsumerSpec("two", "s", Buffer.STORE))
            asyncio.run_coroutine_threadsafe(made, loop).result(60)

        cursor = storage.cursors._cursors["one"]
        cursor.spec = Meddling(cursor.spec, appear)  # type: ignore[assignment]
        if look == "floor":
            assert await asyncio.to_thread(storage.cursors.floor, "s", Buffer.STORE) == 0
        else:
            await store.enforce_retention(link_open=True)
        assert (await store.append(batch(1))).offsets.tolist() == [0]
        assert [state.spec.name for state in await storage.cursors.consumers()] == ["one", "two"]
        await storage.close()

    asyncio.run(run())


def test_what_was_staged_by_a_process_that_ended_is_cleared(tmp_path: Path) -> None:
    """Keys that were written ahead of a removal that never came leave with the next opening."""

    async def run() -> None:
        storage = await LogStorage.open(tmp_path, options=LogOptions(segment_bytes=1))
        store = await full_of_segments(storage, 3)
        writer = store._writer
        assert writer.gather(*writer.segments[:2]).staged is not None
        await storage.close()
        assert storage.files.list("streams/s/store/keys")
        again = await LogStorage.open(tmp_path)
        assert (await again.store("s", OLD)).start == 0
        assert again.files.list("streams/s/store/keys") == []
        await again.close()

    asyncio.run(run())
