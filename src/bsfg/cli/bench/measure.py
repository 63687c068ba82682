"""What `bsfg bench store` measures, each part by itself, all on one folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from bsfg.batch import FactBatch
from bsfg.cli.bench.workload import BATCH_FACTS, FROM_ZONE, OBJECT_BYTES, PRODUCED_AT_UNIX_MS, batch_of, batches_of
from bsfg.digest import Sha256
from bsfg.errors import StorageFailed
from bsfg.ports import OriginSpan, Receipt, Result
from bsfg.sealing import reseal, seal
from bsfg.stores.log.buffer import LogForwardBuffer, LogStoreBuffer
from bsfg.stores.log.storage import LogStorage

STREAM = "bench"
MILLION = 1_000_000
IN_FLIGHT = 4
"""Batches that callers keep waiting for at a time; while one is being made durable the next is sealed."""

SINGLES = 300
_SINGLE_BYTES = 480
CALLERS = 64
FACTS_PER_CALLER = 100
MAX_REPEATS = 400_000
MAX_PUTS = 2 * MILLION
MAX_REPLAYED = 4 * MILLION
YARDSTICK_FACTS = 100_000
SINGLES_FROM = 10**13
CALLERS_FROM = 2 * 10**13
"""Numbers of the facts that are not part of the bulk; they collide with no other."""

Item = TypeVar("Item")
Step = Callable[[str, int], None]
"""Told the phase and how many facts were done in it."""


@dataclass(slots=True)
class Samples:
    """What was measured, before it is summed up."""

    facts: int
    sha256_rates: list[float] = field(default_factory=list)
    append_seconds: list[float] = field(default_factory=list)
    append_facts: list[int] = field(default_factory=list)
    put_rate: float = 0.0
    duplicates_rate: float = 0.0
    replay_rate: float = 0.0
    single_ms: list[float] = field(default_factory=list)
    fdatasync_ms: list[float] = field(default_factory=list)
    concurrent_rate: float = 0.0
    index_bytes_per_key: float = 0.0
    reopen_seconds: float = 0.0
    trickled_bytes: float = 0.0
    reopen_trickled_seconds: float = 0.0


def planned(facts: int) -> int:
    """Count the facts that all phases handle, for the progress bar."""
    singles = SINGLES + CALLERS * FACTS_PER_CALLER
    return 2 * facts + min(facts, MAX_REPEATS) + min(facts, MAX_PUTS) * 2 + min(facts, MAX_REPLAYED) + singles


async def run(folder: Path, samples: Samples, step: Step) -> None:
    """Measure everything that one process can, in the order in which a log fills."""
    storage = await LogStorage.open(folder)
    try:
        store = await storage.store(STREAM)
        yardstick(samples)
        await append(store, samples, step)
        yardstick(samples)
        stats = await store.stats()
        samples.index_bytes_per_key = stats.index_bytes / stats.keys
        await single_appends(store, folder, samples, step)
        await concurrent_appends(store, samples, step)
        await duplicates(store, samples, step)
        await replay(store, samples, step)
        yardstick(samples)
        await put_if_absent(await storage.forward(STREAM), samples, step)
        yardstick(samples)
    finally:
        await storage.close()


def yardstick(samples: Samples) -> None:
    """Measure the yardstick; done several times, because a busy machine varies more than the log does."""
    samples.sha256_rates.append(sha256_per_second())


def sha256_per_second(object_bytes: int = OBJECT_BYTES) -> float:
    """Hash the objects of many facts with hashlib alone."""
    objects = [item for batch in batches_of(0, YARDSTICK_FACTS, object_bytes) for item in batch.values("object")]
    sha256 = Sha256()
    started = time.perf_counter()
    sha256.digest_all(objects)
    return len(objects) / (time.perf_counter() - started)


async def append(store: LogStoreBuffer, samples: Samples, step: Step) -> None:
    """Append all facts, a million prebuilt at a time; sealing is part of it."""
    for first in range(0, samples.facts, MILLION):
        count = min(MILLION, samples.facts - first)
        prepared = prebuilt(batches_of(first, count), step)

        async def one(batch: FactBatch) -> None:
            expect(await store.append(seal(batch)), Result.INSERTED)

        seconds = await timed(prepared, one, "append", step)
        samples.append_seconds.append(seconds)
        samples.append_facts.append(count)


async def put_if_absent(forward: LogForwardBuffer, samples: Samples, step: Step) -> None:
    """Put sealed facts as a receiver does: checked again, then inserted."""
    total, seconds = min(samples.facts, MAX_PUTS), 0.0
    for first in range(0, total, MILLION):
        count = min(MILLION, total - first)
        sealed = (FactBatch(seal(batch).record_batch) for batch in batches_of(first, count))
        prepared = [
            (batch, _origin(first + at * BATCH_FACTS, len(batch))) for at, batch in enumerate(prebuilt(sealed, step))
        ]

        async def one(pair: tuple[FactBatch, OriginSpan]) -> None:
            expect(await forward.put_if_absent(reseal(pair[0]), pair[1]), Result.INSERTED)

        seconds += await timed(prepared, one, "put_if_absent", step)
    samples.put_rate = total / seconds


def _origin(first: int, count: int) -> OriginSpan:
    return OriginSpan(FROM_ZONE, np.arange(first, first + count), np.full(count, PRODUCED_AT_UNIX_MS))


async def duplicates(store: LogStoreBuffer, samples: Samples, step: Step) -> None:
    """Append facts again that are there already, taken from all over the log."""
    wanted = max(1, min(samples.facts, MAX_REPEATS) // BATCH_FACTS)
    stored = [min(BATCH_FACTS, samples.facts - first) for first in range(0, samples.facts, BATCH_FACTS)]
    chosen = [int(at) for at in np.linspace(0, len(stored) - 1, min(wanted, len(stored)))]
    prepared = [batch_of(at * BATCH_FACTS, stored[at]) for at in chosen]

    async def one(batch: FactBatch) -> None:
        expect(await store.append(seal(batch)), Result.ALREADY_EXISTS)

    seconds = await timed(prepared, one, "duplicates", step)
    samples.duplicates_rate = sum(map(len, prepared)) / seconds


async def replay(store: LogStoreBuffer, samples: Samples, step: Step) -> None:
    """Read the log from its beginning."""
    end = min(samples.facts, MAX_REPLAYED)
    started = time.perf_counter()
    seen = 0
    async for frame in store.replay(0, end=end):
        assert frame.entries is not None
        seen += len(frame.entries)
        step("replay", len(frame.entries))
    samples.replay_rate = seen / (time.perf_counter() - started)
    if seen != end:
        raise StorageFailed(f"replay gave {seen} of {end} facts")


async def single_appends(store: LogStoreBuffer, folder: Path, samples: Samples, step: Step) -> None:
    """Append one fact at a time, each beside a bare fdatasync of as many bytes in the same folder."""
    facts = singles_of(SINGLES_FROM, SINGLES)
    probe = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        for fact in facts:
            started = time.perf_counter()
            expect(await store.append(seal(fact)), Result.INSERTED)
            samples.single_ms.append(1000 * (time.perf_counter() - started))
            started = time.perf_counter()
            os.write(probe, bytes(_SINGLE_BYTES))
            os.fdatasync(probe)
            samples.fdatasync_ms.append(1000 * (time.perf_counter() - started))
            step("single", 1)
    finally:
        os.close(probe)
        os.unlink(folder / "probe")


async def concurrent_appends(store: LogStoreBuffer, samples: Samples, step: Step) -> None:
    """Let many callers append one fact at a time, each waiting for its own receipt."""
    facts = singles_of(CALLERS_FROM, CALLERS * FACTS_PER_CALLER)

    async def caller(number: int) -> None:
        for fact in facts[number::CALLERS]:
            expect(await store.append(seal(fact)), Result.INSERTED)

    started = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    samples.concurrent_rate = len(facts) / (time.perf_counter() - started)
    step("concurrent", len(facts))


def singles_of(first: int, count: int) -> list[FactBatch]:
    """Make facts that come one by one."""
    return [FactBatch.from_messages([message]) for message in batch_of(first, count).to_messages()]


def prebuilt(batches: Iterable[FactBatch], step: Step) -> list[FactBatch]:
    """Make batches before the clock starts."""
    result = []
    for batch in batches:
        result.append(batch)
        step("preparing", len(batch))
    return result


async def timed(items: list[Item], one: Callable[[Item], Awaitable[None]], phase: str, step: Step) -> float:
    """Handle all items, a few at a time, and give the seconds that took."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await one(item)
            step(phase, BATCH_FACTS)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - started


def expect(receipt: Receipt, result: Result) -> None:
    """Refuse to publish the speed of a wrong answer."""
    if receipt.count(result) != len(receipt.results):
        raise StorageFailed(f"{len(receipt.results) - receipt.count(result)} facts were not {result.name.lower()}")
