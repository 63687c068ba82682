"""What `bsfg bench store` measures, each part by itself, all on one folder.

How long a log takes to come back after its writer was killed is a part of it, and what facts cost that come one by one.
Run as a module it is the child that is killed: `append FOLDER FIRST` writes until then, `open FOLDER FIRST COUNT` opens
the folder and appends facts again that were acknowledged last, `trickle FOLDER COUNT` writes so many facts, each a
frame of its own, and kills itself. What is measured of those depends on the frames alone, so that nothing is synced
meanwhile, which would take minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from bsfg.batch import FactBatch
from bsfg.cli.bench.store import percentile
from bsfg.cli.bench.workload import BATCH_FACTS, FROM_ZONE, OBJECT_BYTES, PRODUCED_AT_UNIX_MS, batch_of, batches_of
from bsfg.digest import Sha256
from bsfg.errors import StorageFailed
from bsfg.ports import ForwardBuffer, OriginSpan, Receipt, Result, StoreBuffer
from bsfg.retention import ConsumerStanding
from bsfg.sealing import reseal, seal
from bsfg.stores.log.files import DiskFile, DiskFiles
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.shared.judging import AppendItem

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


def planned(facts: int) -> int:
    """Count the facts that all phases handle, for the progress bar."""
    singles = SINGLES + CALLERS * FACTS_PER_CALLER
    return 2 * facts + min(facts, MAX_REPEATS) + min(facts, MAX_PUTS) * 2 + min(facts, MAX_REPLAYED) + singles


async def run(folder: Path, facts: int, step: Step) -> dict[str, Any]:
    """Measure everything that one process can, in the order in which a log fills; give the numbers by their names."""
    storage = await LogStorage.open(folder)
    try:
        store = await storage.store(STREAM)
        # The yardstick is measured several times, because a busy machine varies more than the log does.
        sha256 = [sha256_per_second()]
        millions = await append(store, facts, step)
        sha256.append(sha256_per_second())
        stats = await store.stats()
        single_ms, fdatasync_ms = await single_appends(store, folder, step)
        concurrent = await concurrent_appends(store, step)
        rates = {"append": facts / sum(seconds for _, seconds in millions)}
        repeated, replayed = await duplicates(store, facts, step), await replay(store, min(facts, MAX_REPLAYED), step)
        sha256.append(sha256_per_second())
        rates["put_if_absent"] = await put_if_absent(await storage.forward(STREAM), min(facts, MAX_PUTS), step)
        sha256.append(sha256_per_second())
    finally:
        await storage.close()
    rates |= {"duplicates": repeated, "replay": replayed}
    yardstick, fdatasync = median(sha256), percentile(fdatasync_ms, 50)
    by_million = [count / seconds for count, seconds in millions]
    has_a_second = len(millions) > 1 and millions[-1][0] >= MILLION // 2
    return {
        "facts": facts,
        "sha256_per_second": yardstick,
        **{f"{name}_per_second": rate for name, rate in rates.items()},
        "single_append_ms_p50": percentile(single_ms, 50),
        "single_append_ms_p99": percentile(single_ms, 99),
        "fdatasync_ms_p50": fdatasync,
        "concurrent_append_per_second": concurrent,
        "index_bytes_per_key": stats.index_bytes / stats.keys,
        "append_per_second_by_million": by_million,
        **{f"{name}_ratio": rate / yardstick for name, rate in rates.items()},
        "single_append_limit_ms": 1.5 * fdatasync + 0.5,
        "last_to_first_million_ratio": by_million[-1] / by_million[0] if has_a_second else None,
    }


def sha256_per_second(object_bytes: int = OBJECT_BYTES) -> float:
    """Hash the objects of many facts with hashlib alone."""
    objects = [item for batch in batches_of(0, YARDSTICK_FACTS, object_bytes) for item in batch.values("object")]
    sha256 = Sha256()
    started = time.perf_counter()
    sha256.digest_all(objects)
    return len(objects) / (time.perf_counter() - started)


def appending(store: StoreBuffer, result: Result = Result.INSERTED) -> Callable[[FactBatch], Awaitable[None]]:
    """Give what appends a batch and expects one result of all its facts; sealing is part of it."""

    async def one(batch: FactBatch) -> None:
        expect(await store.append(seal(batch)), result)

    return one


async def append(store: StoreBuffer, facts: int, step: Step) -> list[tuple[int, float]]:
    """Append all facts, a million prebuilt at a time; give how many each time, and the seconds."""
    millions = []
    for first in range(0, facts, MILLION):
        count = min(MILLION, facts - first)
        prepared = prebuilt(batches_of(first, count), step)
        millions.append((count, await timed(prepared, appending(store), "append", step)))
    return millions


async def put_if_absent(forward: ForwardBuffer, total: int, step: Step) -> float:
    """Put sealed facts as a receiver does: checked again, then inserted."""

    async def one(pair: tuple[FactBatch, OriginSpan]) -> None:
        expect(await forward.put_if_absent(reseal(pair[0]), pair[1]), Result.INSERTED)

    seconds = 0.0
    for first in range(0, total, MILLION):
        sealed = (FactBatch(seal(batch).record_batch) for batch in batches_of(first, min(MILLION, total - first)))
        prepared = [
            (batch, _origin(first + at * BATCH_FACTS, len(batch))) for at, batch in enumerate(prebuilt(sealed, step))
        ]
        seconds += await timed(prepared, one, "put_if_absent", step)
    return total / seconds


def _origin(first: int, count: int) -> OriginSpan:
    return OriginSpan(FROM_ZONE, np.arange(first, first + count), np.full(count, PRODUCED_AT_UNIX_MS))


async def duplicates(store: StoreBuffer, facts: int, step: Step, most: int = MAX_REPEATS) -> float:
    """Append facts again that are there already, taken from all over the log."""
    wanted = max(1, min(facts, most) // BATCH_FACTS)
    stored = [min(BATCH_FACTS, facts - first) for first in range(0, facts, BATCH_FACTS)]
    chosen = [int(at) for at in np.linspace(0, len(stored) - 1, min(wanted, len(stored)))]
    prepared = [batch_of(at * BATCH_FACTS, stored[at]) for at in chosen]
    again = appending(store, Result.ALREADY_EXISTS)
    return sum(map(len, prepared)) / await timed(prepared, again, "duplicates", step)


async def replay(store: StoreBuffer, end: int, step: Step) -> float:
    """Read the log from its beginning."""
    started, seen = time.perf_counter(), 0
    async for frame in store.replay(0, end=end):
        assert frame.entries is not None
        seen += len(frame.entries)
        step("replay", len(frame.entries))
    if seen != end:
        raise StorageFailed(f"replay gave {seen} of {end} facts")
    return seen / (time.perf_counter() - started)


async def single_appends(store: StoreBuffer, folder: Path, step: Step) -> tuple[list[float], list[float]]:
    """Append one fact at a time, each beside a bare fdatasync of as many bytes in the same folder; give both times."""
    facts, append = singles_of(SINGLES_FROM, SINGLES), appending(store)
    single_ms: list[float] = []
    fdatasync_ms: list[float] = []
    probe = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        for fact in facts:
            started = time.perf_counter()
            await append(fact)
            single_ms.append(1000 * (time.perf_counter() - started))
            started = time.perf_counter()
            os.write(probe, bytes(_SINGLE_BYTES))
            os.fdatasync(probe)
            fdatasync_ms.append(1000 * (time.perf_counter() - started))
            step("single", 1)
    finally:
        os.close(probe)
        os.unlink(folder / "probe")
    return single_ms, fdatasync_ms


async def concurrent_appends(store: StoreBuffer, step: Step) -> float:
    """Let many callers append one fact at a time, each waiting for its own receipt."""
    facts, append = singles_of(CALLERS_FROM, CALLERS * FACTS_PER_CALLER), appending(store)

    async def caller(number: int) -> None:
        for fact in facts[number::CALLERS]:
            await append(fact)

    started = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    seconds = time.perf_counter() - started
    step("concurrent", len(facts))
    return len(facts) / seconds


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


ACKNOWLEDGED_BATCHES = 50
FIRST = 3 * 10**13
TRICKLED_FACTS = 200_000


def reopen_seconds(folder: Path) -> float:
    """Kill a writer in mid-stream and measure, in a fresh process, how long it takes until an append is answered."""
    acknowledged = 0
    child = subprocess.Popen(
        _command("append", folder, FIRST),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        for _ in child.stdout:
            acknowledged += 1
            if acknowledged == ACKNOWLEDGED_BATCHES:
                break
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if acknowledged < ACKNOWLEDGED_BATCHES:
        raise StorageFailed(f"the writing process ended by itself with code {child.returncode}")
    return opened_seconds(folder, FIRST + (acknowledged - 1) * BATCH_FACTS)


def opened_seconds(folder: Path, first: int, count: int = BATCH_FACTS) -> float:
    """Open a folder in a fresh process; give the seconds until an append of facts that it has is answered."""
    command = [*_command("open", folder, first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise StorageFailed(f"the folder could not be opened again: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def trickled(folder: Path, facts: int) -> tuple[float, float]:
    """Fill a folder one by one; give the bytes per fact beyond its object, and the seconds until it is open again.

    It is opened after a kill and after a clean end, and the longer time counts.
    """
    count = min(facts, TRICKLED_FACTS)
    done = subprocess.run(
        _command("trickle", folder, count), capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode != -signal.SIGKILL:
        raise StorageFailed(f"the writing process ended by itself with code {done.returncode}: {done.stderr[-200:]}")
    first = (count - 1) // BATCH_FACTS * BATCH_FACTS
    seconds = [opened_seconds(folder, first, count - first) for _ in range(2)]
    size_bytes = sum(path.stat().st_size for path in (folder / "streams").rglob("*") if path.is_file())
    return size_bytes / count - OBJECT_BYTES, max(seconds)


def _command(what: str, folder: Path, number: int) -> list[str]:
    return [sys.executable, "-m", "bsfg.cli.bench.measure", what, str(folder), str(number)]


async def append_forever(folder: str, first: int) -> None:
    """Append batches and say so after each, until killed."""
    store = await (await LogStorage.open(folder)).store(STREAM)
    while True:
        await store.append(seal(batch_of(first)))
        print(first, flush=True)
        first += BATCH_FACTS


async def open_again(folder: str, first: int, count: int) -> None:
    """Open the folder and append an acknowledged batch again; print the seconds until it is recognised."""
    batch = seal(batch_of(first, count))
    started = time.perf_counter()
    storage = await LogStorage.open(folder)
    receipt = await (await storage.store(STREAM)).append(batch)
    seconds = time.perf_counter() - started
    await storage.close()
    if receipt.count(Result.ALREADY_EXISTS) != len(batch):
        sys.exit("acknowledged facts were not there")
    print(seconds)


class _UnsyncedFile(DiskFile):
    def sync(self) -> None:
        """Leave it to the system."""
        self.rest()


class _UnsyncedFiles(DiskFiles):
    def create(self, path: str) -> DiskFile:
        """Make a new file that is never synced."""
        made = super().create(path)
        made.__class__ = _UnsyncedFile
        return made


async def append_and_die(folder: str, count: int) -> None:
    """Append facts, each with a frame of its own, and end without any farewell."""
    store = await (await LogStorage.open(_UnsyncedFiles(folder))).store(STREAM)
    for batch in batches_of(0, count):
        for row in seal(batch).rows():
            store._writer.append_group([AppendItem(FactBatch.of_rows([row], sealed=True))], ConsumerStanding)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    child: Any = {"append": append_forever, "open": open_again, "trickle": append_and_die}[sys.argv[1]]
    asyncio.run(child(sys.argv[2], *map(int, sys.argv[3:])))
