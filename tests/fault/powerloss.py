"""The campaign of power losses: a storage on a simulated disk, cut off at every point, must keep its promises.

While a workload runs, photographs are taken of the disk and of the ledger in the middle of operations. Each photograph
is a power loss, or a killed process: the storage is opened on what is left, everything it promised is checked, it works
on, and loses power again. A failure names its seed and crash point; replay it with
``python -m tests.fault.powerloss --seed 17 --crash-point 42``.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random

from tests.fault.ledger import BrokenPromise, Ledger, expect
from tests.fault.workload import Driver, MediumFailed, RefusedToOpen, script, work

from bsfg.errors import BsfgError, NotAFolder
from bsfg.ports import Clock, Storage
from bsfg.stores.log.files import Files
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import verify
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import FAILING, SimulatedDisk

SEGMENT_BYTES = 16_384
RESERVE_BYTES = 32_768
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EINTR)
"""What a system call may fail with: a broken medium, no room, no quota, no descriptor, a signal."""

Open = Callable[[Files, Clock], Awaitable[Storage]]
"""Open a storage on a file layer."""

Verify = Callable[[Files], Sequence[str]]
"""List what is wrong with a folder; nothing when it is sound."""


_REFUSED = ": the frame cannot be read: "


@dataclass(frozen=True, slots=True)
class Photograph:
    """Disk and ledger in the middle of an operation."""

    point: int
    label: str
    disk: SimulatedDisk
    ledger: Ledger
    now_unix_ms: int


@dataclass(slots=True)
class Photographer:
    """Takes photographs while operations are under way: at chosen points, or a few at random ones."""

    ledger: Ledger
    clock: FakeClock
    random: Random
    count: int = 1
    points: frozenset[int] | None = None
    taken: list[Photograph] = field(default_factory=list)
    operations: int = 0

    def __call__(self, disk: SimulatedDisk, number: int, kind: str, path: str) -> None:
        """Look at one operation; called by the disk, from any thread."""
        del number
        self.operations += 1
        if self.points is not None:
            if self.operations in self.points:
                self.taken.append(self.photograph(disk, f"{kind} {path}"))
            return
        at = self.random.randrange(self.operations)
        if len(self.taken) < self.count:
            self.taken.append(self.photograph(disk, f"{kind} {path}"))
        elif at < self.count:
            self.taken[at] = self.photograph(disk, f"{kind} {path}")

    def photograph(self, disk: SimulatedDisk, label: str) -> Photograph:
        """Take a photograph now."""
        return Photograph(self.operations, label, disk.killed(), self.ledger.copy(), self.clock.now_unix_ms())


@dataclass(slots=True)
class Campaign:
    """Runs workloads against one kind of storage and checks what is left after each power loss."""

    open: Open
    verify: Verify = lambda files: ()
    generations: int = 3

    async def operations_of_script(self) -> int:
        """Count the operations of the script: the number of its crash points."""
        return (await self._photographed_script(frozenset()))[0]

    async def crash_script_at(
        self, points: Iterable[int], *, variants: Sequence[int] = (0, 1), generations: int = 2
    ) -> int:
        """Lose power at points of the script, each in several ways; give the number of losses.

        In the variants with odd numbers the process is killed there, and the power goes later.
        """
        _, photographs = await self._photographed_script(frozenset(points))
        for photograph in photographs:
            for variant in variants:
                random = Random(f"script/{photograph.point}/{variant}")
                where = f"script crash_point={photograph.point} variant={variant}"
                await self._aftermath(photograph, random, where, generations, killed=variant % 2 == 1)
        return len(photographs) * len(variants)

    async def _photographed_script(self, points: frozenset[int]) -> tuple[int, list[Photograph]]:
        photographer = Photographer(Ledger(), FakeClock(), Random(0), points=points)
        disk = SimulatedDisk()
        disk.hook = photographer
        async with self._driver(disk, photographer) as driver:
            await script(driver)
        return photographer.operations, photographer.taken

    async def run_seed(self, seed: int, *, crash_point: int | None = None, faults: bool = False) -> int:
        """Run a random workload and lose power at a few points of it; give the number of losses.

        With ``faults`` the disk fails now and then before it loses power.
        """
        random = Random(f"work/{seed}/{faults}")
        points = None if crash_point is None else frozenset((crash_point,))
        photographer = Photographer(Ledger(), FakeClock(), Random(f"photographs/{seed}"), count=3, points=points)
        where = f"seed={seed}{' faults' if faults else ''}"
        run = self._faulty_run if faults else self._run
        try:
            await run(SimulatedDisk(seed), photographer, random, seed)
        except Exception as error:
            raise _located(error, f"{where} operation={photographer.operations} before any power loss") from error
        for photograph in photographer.taken:
            again = Random(f"aftermath/{seed}/{photograph.point}")
            located = f"{where} crash_point={photograph.point}"
            killed = again.random() < 0.25
            await self._aftermath(photograph, again, located, self.generations, killed=killed, seed=seed, faults=faults)
        return len(photographer.taken)

    async def _run(self, disk: SimulatedDisk, photographer: Photographer, random: Random, seed: int) -> None:
        disk.hook = photographer
        for _ in range(random.randint(1, 3)):
            async with self._driver(disk, photographer, seed=seed) as driver:
                await driver.open_buffers()
                await driver.check()
                await work(driver, random, random.randint(5, 25), alone=_is_repeatable(seed))
                await driver.check()

    async def _faulty_run(self, disk: SimulatedDisk, photographer: Photographer, random: Random, seed: int) -> None:
        """Work on a disk that fails now and then; after each failure a new process takes over."""
        for _ in range(random.randint(2, 5)):
            disk.hook = photographer
            if random.random() < 0.3:
                disturb(disk, random)
            with suppress(MediumFailed, BsfgError):
                async with self._driver(disk, photographer, seed=seed, faulty=True) as driver:
                    await driver.open_buffers()
                    await driver.check()
                    for _ in range(random.randint(1, 4)):
                        disturb(disk, random)
                        await work(driver, random, random.randint(2, 8), alone=_is_repeatable(seed))
            disk.repair()
            # The storage must be able to open again in its own process, too.
            if random.random() < 0.5:
                disk = disk.killed()

    async def _aftermath(
        self,
        photograph: Photograph,
        random: Random,
        where: str,
        generations: int,
        *,
        killed: bool,
        seed: int = 0,
        faults: bool = False,
    ) -> None:
        """Open what a power loss or a kill left, check it, work on, and lose power again."""
        for generation in range(generations):
            disk = photograph.disk.killed() if killed else photograph.disk.crash(random)
            disk.repair()
            located = f"{where} generation={generation} ({photograph.label}, {'killed' if killed else 'power lost'})"
            try:
                photograph = await self._reopened(disk, photograph, random, seed, faults)
            except Exception as error:
                raise _located(error, located) from error
            killed = not killed and random.random() < 0.25

    async def _reopened(
        self, disk: SimulatedDisk, photograph: Photograph, random: Random, seed: int, faults: bool
    ) -> Photograph:
        clock = FakeClock(photograph.now_unix_ms + random.choice((0, 1, 5_000)))
        photographer = Photographer(photograph.ledger.copy(), clock, Random(random.random()))
        disk.hook = photographer
        self._verify(disk, faults)
        async with self._driver(disk, photographer, seed=seed) as driver:
            await driver.open_buffers()
            unanswered = driver.ledger.unanswered()
            await driver.check()
            await driver.probe(random)
            if random.random() < 0.7:
                await driver.retry(unanswered)
            await work(driver, random, random.randint(0, 6), alone=_is_repeatable(seed))
            await driver.check()
        self._verify(disk, faults)
        return random.choice((photographer.taken[0], photographer.photograph(disk, "closed")))

    @asynccontextmanager
    async def _driver(
        self, disk: SimulatedDisk, photographer: Photographer, *, seed: int = 0, faulty: bool = False
    ) -> AsyncIterator[Driver]:
        """Open a storage with a driver, and close it whatever happens."""
        storage = await self.open(disk, photographer.clock)
        try:
            yield Driver(storage, photographer.ledger, photographer.clock, seed=seed, faulty=faulty)
        finally:
            with suppress(BsfgError) if faulty else nullcontext():
                await storage.close()

    def _verify(self, disk: SimulatedDisk, faults: bool) -> None:
        problems = self.verify(disk.killed())
        if faults:
            # What a medium has refused again and again is on record for ever, though it may give it now.
            problems = [each for each in problems if not (each.startswith("entries_lost ") and _REFUSED in each)]
        expect(not problems, f"verification finds damage after a plain power loss: {problems}")

    async def damage_seed(self, seed: int) -> int:
        """Turn bits over in what is durable, and see that all that is lost is reported; give the facts lost."""
        random = Random(f"damage/{seed}")
        photographer = Photographer(Ledger(), FakeClock(), Random(0), points=frozenset())
        disk = SimulatedDisk(seed)
        await self._run(disk, photographer, random, seed)
        disk = disk.crash(random)
        hit = disk.flip_bits(random, random.choice((1, 1, 2, 20)))
        try:
            return await self._damaged(disk, photographer, random)
        except Exception as error:
            raise _located(error, f"damage seed={seed} in {sorted(hit)}") from error

    async def _damaged(self, disk: SimulatedDisk, photographer: Photographer, random: Random) -> int:
        problems = list(self.verify(disk.killed()))
        ledger = photographer.ledger
        for book in ledger.buffers.values():
            book.damaged = True
        known = sum(len(book.offsets) for book in ledger.buffers.values())
        with suppress(RefusedToOpen, BsfgError):
            async with self._driver(disk, photographer) as driver:
                await driver.open_damaged()
                problems += reported(driver)
                await driver.check()
                await driver.probe(random)
                await work(driver, random, 5)
                await driver.check()
        silent = ledger.set_back or any(book.cut_off or book.notes_lost for book in ledger.buffers.values())
        expect(not silent or bool(problems), "damage has taken something, and nothing reports it")
        return known - sum(len(book.offsets) for book in ledger.buffers.values())


def _is_repeatable(seed: int) -> bool:
    """Tell whether a seed's workload has no concurrent calls, so that its operations always have the same numbers."""
    return seed % 4 != 3


def reported(driver: Driver) -> list[str]:
    """List what a storage says it found wrong when it was opened, where it says so in ``problems``."""
    parts = [driver.storage.cursors, *driver.stores.values(), *driver.forwards.values()]
    return [str(problem) for part in parts for problem in getattr(part, "problems", ())]


def disturb(disk: SimulatedDisk, random: Random) -> None:
    """Order one fault that will strike soon: a full disk, or any call that fails with any error.

    Syncs of both kinds come more often than the others, because what they leave open is the hardest to handle.
    """
    kind = random.choice(("full", "sync", "sync", "sync_folder", "sync_folder", "write", *FAILING))
    if kind == "full":
        disk.fill_up(random.choice((0, 100, 2_000, 20_000)))
        return
    disk.fail(kind, after=random.choice((0, 1, 3, 10)), error=random.choice(ERRORS), times=random.choice((1, 1, 1, 3)))


def _located(error: Exception, where: str) -> BrokenPromise:
    return BrokenPromise(f"{where}: {error if isinstance(error, BrokenPromise) else repr(error)}")


async def open_log(files: Files, clock: Clock) -> Storage:
    """Open the embedded log with segments so small that a short workload fills several."""
    return await LogStorage.open(files, clock=clock, options=LogOptions(segment_bytes=SEGMENT_BYTES))


async def open_log_with_reserve(files: Files, clock: Clock) -> Storage:
    """Open the embedded log with some room to recover."""
    options = LogOptions(segment_bytes=SEGMENT_BYTES, reserve_bytes=RESERVE_BYTES)
    return await LogStorage.open(files, clock=clock, options=options)


async def open_log_with_small_index(files: Files, clock: Clock) -> Storage:
    """Open the embedded log so that its key index lives on disk, too."""
    options = LogOptions(segment_bytes=SEGMENT_BYTES, index_run_keys=16, index_memory_bytes=1_024)
    return await LogStorage.open(files, clock=clock, options=options)


def verify_log(files: Files) -> list[str]:
    """List the damage in the folder of an embedded log; a folder that was never finished has none."""
    try:
        report = verify(files)
    except NotAFolder:
        return []
    return [f"{problem.code} in {problem.where}: {problem.detail}" for problem in report.problems]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or replay seeds of the campaign against the embedded log."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.powerloss", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--crash-point", type=int, help="lose power only at this operation")
    parser.add_argument("--script", action="store_true", help="crash the script instead, at one point or at all")
    parser.add_argument("--faults", action="store_true", help="let the disk fail before it loses power")
    parser.add_argument("--damage", action="store_true", help="turn bits over in what is durable")
    parser.add_argument("--small-index", action="store_true", help="keep the key index on disk")
    parser.add_argument("--reserve", action="store_true", help="hold some space in reserve")
    chosen = parser.parse_args(arguments)
    opener = open_log_with_reserve if chosen.reserve else open_log
    campaign = Campaign(open_log_with_small_index if chosen.small_index else opener, verify_log)
    try:
        losses = asyncio.run(_chosen(campaign, chosen))
    except BrokenPromise as broken:
        print(broken, file=sys.stderr)
        return 1
    print(f"{losses} {'facts lost, all reported' if chosen.damage else 'power losses, every promise kept'}")
    return 0


async def _chosen(campaign: Campaign, chosen: argparse.Namespace) -> int:
    if chosen.script:
        last = await campaign.operations_of_script()
        points = range(1, last + 1) if chosen.crash_point is None else [chosen.crash_point]
        return await campaign.crash_script_at(points)
    losses = 0
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        if chosen.damage:
            losses += await campaign.damage_seed(seed)
        else:
            losses += await campaign.run_seed(seed, crash_point=chosen.crash_point, faults=chosen.faults)
    return losses


if __name__ == "__main__":
    sys.exit(main())
