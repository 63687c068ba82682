"""The campaign of power losses: a storage on a simulated disk, cut off at every point, must keep its promises.

While a workload runs, photographs are taken of the disk and of the ledger in the middle of operations. Each photograph
is a power loss, or a killed process: the storage is opened on what is left, everything it promised is checked, it works
on, and loses power again. A failure names its seed and crash point; replay it with
``python -m bsfg.testing.powerloss --seed 17 --crash-point 42``.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from bsfg.errors import BsfgError, DiskFull
from bsfg.ports import Clock, Storage
from bsfg.stores.log.files import Files
from bsfg.testing.clock import START_UNIX_MS, FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.driver import Driver, MediumFailed
from bsfg.testing.ledger import Ledger
from bsfg.testing.observed import BrokenPromise, expect
from bsfg.testing.workload import script, work

FAULTS = ("full", "sync", "write", "read", "create", "rename", "sync_folder", "remove", "truncate")

Open = Callable[[Files, Clock], Awaitable[Storage]]
"""Open a storage on a file layer."""

Verify = Callable[[Files], Sequence[str]]
"""List what is wrong with a folder; nothing when it is sound."""


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
                self.taken.append(self._photograph(disk, f"{kind} {path}"))
            return
        at = self.random.randrange(self.operations)
        if len(self.taken) < self.count:
            self.taken.append(self._photograph(disk, f"{kind} {path}"))
        elif at < self.count:
            self.taken[at] = self._photograph(disk, f"{kind} {path}")

    def _photograph(self, disk: SimulatedDisk, label: str) -> Photograph:
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

    async def crash_script_at(self, points: Sequence[int], *, variants: int = 2) -> int:
        """Lose power at points of the script, each in several ways; give the number of losses."""
        _, photographs = await self._photographed_script(frozenset(points))
        for photograph in photographs:
            for variant in range(variants):
                random = Random(f"script/{photograph.point}/{variant}")
                where = f"script crash_point={photograph.point} variant={variant}"
                await self._aftermath(photograph, random, where, generations=2)
        return len(photographs) * variants

    async def _photographed_script(self, points: frozenset[int]) -> tuple[int, list[Photograph]]:
        ledger, clock = Ledger(), FakeClock()
        photographer = Photographer(ledger, clock, Random(0), points=points)
        disk = SimulatedDisk()
        disk.hook = photographer
        storage = await self.open(disk, clock)
        await script(Driver(storage, ledger, clock))
        await storage.close()
        return photographer.operations, photographer.taken

    async def run_seed(self, seed: int, *, crash_point: int | None = None, faults: bool = False) -> int:
        """Run a random workload and lose power at a few points of it; give the number of losses."""
        random = Random(f"work/{seed}/{faults}")
        points = None if crash_point is None else frozenset((crash_point,))
        ledger, clock = Ledger(), FakeClock()
        photographer = Photographer(ledger, clock, Random(f"photographs/{seed}"), count=3, points=points)
        where = f"seed={seed}{' faults' if faults else ''}"
        run = self._faulty_run if faults else self._run
        try:
            await run(SimulatedDisk(seed), photographer, random, seed)
        except Exception as error:
            raise _located(error, f"{where} before any power loss, operation {photographer.operations}") from error
        for photograph in photographer.taken:
            again = Random(f"aftermath/{seed}/{photograph.point}")
            located = f"{where} crash_point={photograph.point}"
            await self._aftermath(photograph, again, located, generations=self.generations, seed=seed)
        return len(photographer.taken)

    async def _run(self, disk: SimulatedDisk, photographer: Photographer, random: Random, seed: int) -> None:
        ledger, clock, disk.hook = photographer.ledger, photographer.clock, photographer
        for _ in range(random.randint(1, 3)):
            storage = await self.open(disk, clock)
            driver = Driver(storage, ledger, clock, seed=seed)
            await driver.open_buffers()
            await driver.check()
            await work(driver, random, random.randint(5, 25))
            await driver.check()
            await storage.close()

    async def _faulty_run(self, disk: SimulatedDisk, photographer: Photographer, random: Random, seed: int) -> None:
        """Work on a disk that fails now and then; after each failure a new process takes over."""
        ledger, clock = photographer.ledger, photographer.clock
        for _ in range(random.randint(2, 5)):
            disk.hook = photographer
            storage: Storage | None = None
            with suppress(MediumFailed, DiskFull):
                try:
                    if random.random() < 0.3:
                        disturb(disk, random)
                    storage = await self.open(disk, clock)
                except BsfgError:
                    storage = None
                if storage is not None:
                    driver = Driver(storage, ledger, clock, faulty=True, seed=seed)
                    await driver.open_buffers()
                    await driver.check()
                    for _ in range(random.randint(1, 4)):
                        disturb(disk, random)
                        await work(driver, random, random.randint(2, 8))
            if storage is not None:
                with suppress(BsfgError):
                    await storage.close()
            disk.repair()
            if random.random() < 0.5 or storage is None:
                disk = disk.killed()

    async def _aftermath(
        self, photograph: Photograph, random: Random, where: str, *, generations: int, seed: int = 0
    ) -> None:
        """Open what a power loss left, check it, work on, lose power again."""
        for generation in range(generations):
            killed = random.random() < 0.25
            disk = photograph.disk.killed() if killed else photograph.disk.crash(random)
            disk.repair()
            located = f"{where} generation={generation} ({photograph.label}, {'killed' if killed else 'power lost'})"
            try:
                photograph = await self._reopened(disk, photograph, random, seed)
            except Exception as error:
                raise _located(error, located) from error

    async def _reopened(self, disk: SimulatedDisk, photograph: Photograph, random: Random, seed: int) -> Photograph:
        ledger = photograph.ledger.copy()
        clock = FakeClock(photograph.now_unix_ms + random.choice((0, 1, 5_000)))
        photographer = Photographer(ledger, clock, random=Random(random.random()))
        disk.hook = photographer
        storage = await self.open(disk, clock)
        driver = Driver(storage, ledger, clock, seed=seed)
        await driver.open_buffers()
        unanswered = ledger.unanswered()
        await driver.check()
        await driver.probe(random)
        if random.random() < 0.7:
            await driver.retry(unanswered)
        await work(driver, random, random.randint(0, 6))
        await driver.check()
        await storage.close()
        problems = self.verify(disk)
        expect(not problems, f"verification finds problems after a plain power loss: {problems}")
        return photographer.taken[0]

    async def damage_seed(self, seed: int) -> int:
        """Turn bits over in what is durable, and see that all that is lost is reported; give the number of losses."""
        random = Random(f"damage/{seed}")
        ledger, clock = Ledger(), FakeClock(START_UNIX_MS)
        photographer = Photographer(ledger, clock, Random(f"photographs/{seed}"), points=frozenset())
        disk = SimulatedDisk(seed)
        await self._run(disk, photographer, random, seed)
        disk = disk.crash(random)
        hit = disk.flip_bits(random, random.choice((1, 1, 2, 20)))
        try:
            return await self._damaged(disk, ledger, clock, random)
        except Exception as error:
            raise _located(error, f"damage seed={seed} in {sorted(hit)}") from error

    async def _damaged(self, disk: SimulatedDisk, ledger: Ledger, clock: FakeClock, random: Random) -> int:
        problems = list(self.verify(disk.killed()))
        for book in ledger.buffers.values():
            book.damaged = True
        known = {place: set(book.offsets) for place, book in ledger.buffers.items()}
        try:
            storage = await self.open(disk, clock)
            driver = Driver(storage, ledger, clock)
            await driver.open_buffers()
        except BsfgError:
            return 1
        problems += reported(driver)
        await driver.check()
        await driver.probe(random)
        await work(driver, random, 5)
        await driver.check()
        await storage.close()
        silent = ledger.set_back or any(book.cut_off or book.notes_lost for book in ledger.buffers.values())
        expect(not silent or bool(problems), "damage has taken something, and verification reports nothing")
        return sum(len(keys - set(ledger.book(place).offsets)) for place, keys in known.items())


def reported(driver: Driver) -> list[str]:
    """List what a storage says it found wrong when it was opened, where it says so in ``problems``."""
    parts = [driver.storage.cursors, *driver.stores.values(), *driver.forwards.values()]
    return [str(problem) for part in parts for problem in getattr(part, "problems", ())]


def disturb(disk: SimulatedDisk, random: Random) -> None:
    """Order one fault that will strike soon: a full disk, a failing sync, an I/O error."""
    kind = random.choice(
        ("full", "sync", "sync", "write", "write", "read", "create", "rename", "sync_folder", "remove")
    )
    if kind == "full":
        disk.fill_up(random.choice((0, 100, 2_000, 20_000)))
        return
    error = random.choice((errno.EIO, errno.EIO, errno.ENOSPC)) if kind in ("write", "create") else errno.EIO
    disk.fail(kind, after=random.choice((0, 1, 3, 10)), error=error)


def _located(error: Exception, where: str) -> BrokenPromise:
    return BrokenPromise(f"{where}: {error if isinstance(error, BrokenPromise) else repr(error)}")
