"""The embedded log loses power at every point, is killed, fails and is damaged, and keeps its promises.

A failure names its seed and crash point. Replay it with ``BSFG_SEED=17`` (and ``BSFG_CRASH_POINT=42``) in the
environment, or with ``python -m tests.fault.powerloss --seed 17 --crash-point 42``.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from tests.fault.ledger import BrokenPromise, Ledger
from tests.fault.powerloss import (
    Campaign,
    main,
    open_log,
    open_log_with_reserve,
    open_log_with_small_index,
    verify_log,
)
from tests.fault.workload import Driver, script, work

from bsfg.errors import BsfgError, FolderLocked
from bsfg.ports import Clock, Storage
from bsfg.stores.log import journal
from bsfg.stores.log.files import Files, OpenFile
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import PowerLoss, SimulatedDisk

SoakSize = Callable[[int, int], int]

PARTS = 4
"""The campaigns are cut into parts, so that they can run beside each other."""

parts = pytest.mark.parametrize("part", range(PARTS))


@pytest.fixture(autouse=True)
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let journals be rewritten after a few records, so that power is lost in that, too."""
    monkeypatch.setattr(journal, "_COMPACT_ABOVE_BYTES", 1_500)


def seeds_of(part: int, count: int) -> Sequence[int]:
    """Choose the seeds of a part: the same in every short run, others each time in a long one, one when told."""
    if "BSFG_SEED" in os.environ:
        return [int(os.environ["BSFG_SEED"])] if part == 0 else []
    first = 0 if count < 1_000 else Random().randrange(10**9)
    return range(first + part, first + count, PARTS)


def crash_point() -> int | None:
    """Give the one point to lose power at, when told."""
    told = os.environ.get("BSFG_CRASH_POINT")
    return int(told) if told else None


@pytest.mark.soak
@parts
def test_power_loss_at_every_point_of_a_script(part: int, soak_size: SoakSize) -> None:
    """Whatever operation the power goes in, or the process is killed in, all that was acknowledged is there after."""

    async def run() -> None:
        campaign = Campaign(open_log_with_small_index, verify_log)
        points = range(1 + part, await campaign.operations_of_script() + 1, PARTS)
        assert len(points) > 50
        await campaign.crash_script_at(points, variants=range(0, soak_size(1, 80), 2), generations=soak_size(1, 3))

    asyncio.run(run())


@pytest.mark.soak
@parts
def test_a_kill_at_every_point_and_a_power_loss_later(part: int, soak_size: SoakSize) -> None:
    """What a killed process left unsynced is not trusted by the next one: a later power loss takes nothing."""

    async def run() -> None:
        campaign = Campaign(open_log, verify_log)
        points = range(1 + part, await campaign.operations_of_script() + 1, PARTS * soak_size(4, 1))
        await campaign.crash_script_at(points, variants=range(1, soak_size(2, 40), 2), generations=soak_size(2, 3))

    asyncio.run(run())


@pytest.mark.soak
@parts
def test_power_loss_in_random_work(part: int, soak_size: SoakSize) -> None:
    """Random work of any seed survives several power losses in a row, also while it recovers from one."""

    async def run() -> None:
        for seed in seeds_of(part, soak_size(24, 5_000)):
            opener = open_log_with_small_index if seed % 3 == 0 else open_log
            await Campaign(opener, verify_log).run_seed(seed, crash_point=crash_point())

    asyncio.run(run())


@pytest.mark.soak
@parts
def test_power_loss_after_faults(part: int, soak_size: SoakSize) -> None:
    """Full disks, I/O errors and failed syncs before a power loss are reported, and lose nothing acknowledged."""

    async def run() -> None:
        for seed in seeds_of(part, soak_size(16, 5_000)):
            opener = (open_log_with_small_index, open_log, open_log_with_reserve)[seed % 3]
            await Campaign(opener, verify_log).run_seed(seed, crash_point=crash_point(), faults=True)

    asyncio.run(run())


@pytest.mark.soak
@parts
def test_damage_at_rest_is_reported(part: int, soak_size: SoakSize) -> None:
    """Bits that turn over in durable data never come back as good facts, and all they take is reported."""

    async def run() -> None:
        for seed in seeds_of(part, soak_size(32, 5_000)):
            await Campaign(open_log, verify_log).damage_seed(seed)

    asyncio.run(run())


class Sabotage:
    """A file layer that leaves out one kind of operation, as a careless storage would."""

    def __init__(self, files: Files, operation: str, suffix: str) -> None:
        self._files, self._operation, self._suffix = files, operation, suffix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def create(self, path: str) -> OpenFile:
        """Make a file that may forget to sync."""
        return self._careless(self._files.create(path), path)

    def open_append(self, path: str) -> OpenFile:
        """Open a file that may forget to sync."""
        return self._careless(self._files.open_append(path), path)

    def sync_folder(self, path: str) -> None:
        """Perhaps leave out the sync of a folder."""
        if self._operation != "sync_folder" or not path.endswith(self._suffix):
            self._files.sync_folder(path)

    def _careless(self, file: OpenFile, path: str) -> OpenFile:
        if self._operation == "sync" and self._suffix in path:
            file.sync = lambda: None  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize(
    ("operation", "suffix"),
    [
        ("sync", ".seg"),
        ("sync", ".journal"),
        ("sync", "cursors"),
        ("sync", ".keys"),
        ("sync", "log.json"),
        ("sync_folder", "store"),
        ("sync_folder", "keys"),
        ("sync_folder", "streams"),
        ("sync_folder", "cursors"),
    ],
)
def test_the_campaign_notices_what_is_not_synced(operation: str, suffix: str) -> None:
    """A log that leaves out any of its syncs is caught by losing power at the points of the script."""

    async def careless(files: Files, clock: Clock) -> Storage:
        return await open_log(Sabotage(files, operation, suffix), clock)

    async def run() -> None:
        campaign = Campaign(careless, verify_log)
        last = await campaign.operations_of_script()
        for point in Random(1).sample(range(1, last + 1), last):
            await campaign.crash_script_at([point], variants=(0, 2, 4), generations=1)

    with pytest.raises(BrokenPromise, match="crash_point="):
        asyncio.run(run())


def test_the_campaign_notices_facts_that_come_back_altered() -> None:
    """A log on a disk that alters what it read is caught, power loss or not."""

    async def run() -> None:
        disk, clock, ledger = SimulatedDisk(), FakeClock(), Ledger()
        storage = await open_log(disk, clock)
        driver = Driver(storage, ledger, clock)
        await script(driver)
        book = next(iter(ledger.buffers.values()))
        offset = max(book.stored)
        book.stored[offset] = book.stored[offset][0], book.stored[min(book.stored)][1]
        try:
            await driver.check()
        finally:
            await storage.close()

    with pytest.raises(BrokenPromise, match="not what was stored"):
        asyncio.run(run())


@pytest.mark.parametrize("part", range(2))
def test_calls_end_when_the_power_goes_under_them(part: int, soak_size: SoakSize) -> None:
    """When the disk stops answering in the middle of a call, every caller gets an error and closing ends."""

    async def run(point: int) -> None:
        disk, clock, ledger = SimulatedDisk(), FakeClock(), Ledger()
        disk.crash_at(point)
        with suppress(PowerLoss, BsfgError, BrokenPromise):
            storage = await open_log(disk, clock)
            try:
                await script(Driver(storage, ledger, clock))
            finally:
                await storage.close()
        assert disk.powerless

    for point in range(5 + part, 240, soak_size(30, 2)):
        asyncio.run(asyncio.wait_for(run(point), 60))


def test_a_live_disk_has_one_writer() -> None:
    """A second storage on the same disk is refused until the first is closed or its process is gone."""

    async def run() -> None:
        disk, clock = SimulatedDisk(), FakeClock()
        first = await open_log(disk, clock)
        with pytest.raises(FolderLocked):
            await open_log(disk, clock)
        await (await open_log(disk.killed(), clock)).close()
        await first.close()
        await (await open_log(disk, clock)).close()

    asyncio.run(run())


def test_a_seed_repeats_itself() -> None:
    """The same seed makes the same operations in the same order, so that a crash point can be found again."""

    async def history(seed: int) -> list[tuple[str, str]]:
        disk, clock, random = SimulatedDisk(seed), FakeClock(), Random(seed)
        storage = await open_log(disk, clock)
        driver = Driver(storage, Ledger(), clock, seed=seed)
        await driver.open_buffers()
        await work(driver, random, 40, alone=True)
        await storage.close()
        return disk.history

    first = asyncio.run(history(5))
    assert len(first) > 80
    assert asyncio.run(history(5)) == first
    assert asyncio.run(history(6)) != first


def test_a_seed_is_replayed_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs seeds, single crash points and damage, and tells a broken promise by its exit code."""
    assert main(["--seed", "2", "--crash-point", "30"]) == 0
    assert "1 power losses, every promise kept" in capsys.readouterr().out
    assert main(["--script", "--crash-point", "40"]) == 0
    assert main(["--damage", "--seed", "1"]) == 0
    assert "all reported" in capsys.readouterr().out

    def broken(self: Campaign, seed: int, **options: object) -> Coroutine[Any, Any, int]:
        raise BrokenPromise(f"seed={seed} crash_point=7: something is gone")

    monkeypatch.setattr(Campaign, "run_seed", broken)
    assert main(["--seed", "9", "--seeds", "3", "--faults", "--small-index"]) == 1
    assert capsys.readouterr().err == "seed=9 crash_point=7: something is gone\n"
