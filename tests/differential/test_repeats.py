"""Stored facts that are fetched many small frames at a time are those that are fetched frame by frame."""

import asyncio
from random import Random

import numpy as np
import pytest
from tests.differential.campaign import run

from bsfg.ports import Confirmation, ConsumerSpec
from bsfg.stores.log import damage, segments
from bsfg.stores.log.keysegments import stored_facts
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.view import LogView
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import messages, sealed

SMALL = LogOptions(segment_bytes=1 << 14)
SEGMENTS = "streams/s/store"


async def written(random: Random, disk: SimulatedDisk) -> LogStorage:
    """Give a log of frames of all sizes, of which some may have left, with or without frames at hand."""
    storage = await LogStorage.open(disk, clock=FakeClock(), options=SMALL)
    store = await storage.store("s")
    while store.end < 60:
        await store.append(sealed(messages(random.choice((1, 1, 1, 1, 2, 5, 40)), first=store.end)))
    if random.random() < 0.4:
        before = random.randrange(1, store.end)
        await storage.cursors.create(ConsumerSpec("peer", "s"))
        await storage.cursors.commit("peer", Confirmation(through=before - 1))
        await store.truncate_before(before)
    if random.random() < 0.7:
        await storage.close()
        storage = await LogStorage.open(disk, clock=FakeClock(), options=SMALL)
    return storage


def harm(random: Random, disk: SimulatedDisk) -> str:
    """Have the medium fail somewhere, or alter something, or neither."""
    paths = [f"{SEGMENTS}/{name}" for name in disk.list(SEGMENTS) if name.endswith(".seg")]
    how = random.choice(("sound", "sound", "spoiled", "altered"))
    if how == "spoiled":
        path = random.choice(paths)
        disk.spoil(path, random.randrange(disk.size(path)), random.choice((1, 400, 4_000)))
    elif how == "altered":
        disk.flip_bits(random, random.randint(1, 3), paths=paths)
    return how


def case(random: Random) -> str:
    """Fetch some facts in both ways; what is found, what it says and what is retained must be the same."""

    async def both() -> str:
        disk = SimulatedDisk(random.randrange(1 << 30))
        storage = await written(random, disk)
        try:
            return await compared(storage, harm(random, disk))
        finally:
            await storage.close()

    async def compared(storage: LogStorage, how: str) -> str:
        store = await storage.store("s")
        writer = store._writer
        wanted = np.sort(np.array(random.choices(range(store.end), k=random.choice((1, 5, 50)))))
        fetched = []
        for alone in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if alone:
                    patch.setattr(LogView, "small_frames_at", lambda view, offsets: None)
                fetched.append(stored_facts(writer.view(), writer.keys)(wanted))
        (facts, found, kept), (by_one, found_by_one, kept_by_one) = fetched
        assert found.tolist() == found_by_one.tolist()
        assert kept.tolist() == kept_by_one.tolist()
        assert facts.record_batch.equals(by_one.record_batch)
        return how if found.all() else f"{how}, some lost"

    return asyncio.run(both())


@pytest.mark.soak
def test_facts_are_fetched_together_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever frames hold them, and whatever cannot be read of them."""
    # A medium that failed is asked again after a while; this one will not change its mind.
    for module in (damage, segments):
        monkeypatch.setattr(module, "PAUSE_SECONDS", 0)
    must_see = ("sound", "spoiled", "altered", "spoiled, some lost", "altered, some lost")
    run(case, short=150, long=20_000, must_see=must_see)
