"""What may come between while a zone is moved: nothing of it is lost, and the same command always goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.migrating import alike, config_of, fill, goes_on, install_sqlite, opened, pieces, seen

from bsfg.config import ZoneConfig
from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown, StorageMoved, StorageNotEmpty, StorageTaken
from bsfg.node import migrate as moving
from bsfg.node import migration_sides as sides
from bsfg.node.backends import open_storage
from bsfg.node.migrate import migrate
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import batch

LONG_SECONDS = 90 * 24 * 3600


def quiet(doing: str, done: int, total: int) -> None:
    """Hear how far it is."""


@pytest.fixture(autouse=True)
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the example of a backend of another package installed."""
    for path in install_sqlite(tmp_path / "installed"):
        monkeypatch.syspath_prepend(path)


async def filled(config: ZoneConfig, clock: FakeClock) -> dict[str, Any]:
    """Fill a zone, and give what is seen of it when it is opened again."""
    async with opened(config, clock) as zone:
        await fill(zone, clock)
    async with opened(config, clock) as zone:
        return await seen(zone)


class Ended(BaseException):
    """A process ends here."""


def failing_at(count: int, number: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """Have the system refuse something when it is asked for the nth time, and from then on."""
    asked = 0

    def ask(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked >= count:
            raise OSError(number, os.strerror(number))
        return work(*args)

    return ask


@pytest.mark.parametrize(
    ("call", "kinds"), [("writev", (DiskFull,)), ("fdatasync", (DiskFull, OutcomeUnknown))], ids=["write", "sync"]
)
def test_a_disk_that_is_full(
    call: str, kinds: tuple[type[BsfgError], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever cannot be written to the new log, the operator is told in our words, and with room it goes on."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "sqlite"), config_of(tmp_path, "new", "log")
        before = await filled(source, clock)
        refused = 0
        for count in (1, 2, 3, 5, 8, 13, 21, 34):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing_at(count, errno.ENOSPC, getattr(os, call)))
                with contextlib.suppress(*kinds):
                    await migrate(source, target, clock, quiet)
                    break  # there is no more to write than that
            refused += 1
        assert refused >= 4
        await migrate(source, target, clock, quiet)
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))
            await goes_on(zone)

    asyncio.run(run())


def removed_in_part(folder: Path) -> None:
    """Begin to remove a folder, and end."""
    (folder / "complete").unlink()
    raise Ended


def not_even_begun(*args: object) -> None:
    """End."""
    raise Ended


@pytest.mark.parametrize(
    ("where", "how"), [("write_whole", not_even_begun), ("_move", not_even_begun), ("clear_away", removed_in_part)]
)
def test_ended_while_a_complete_log_is_given_its_place(
    where: str, how: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the old storage is given up the same command gives the new log its place, wherever it was ended."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "sqlite"), config_of(tmp_path, "new", "log")
        before = await filled(source, clock)
        with monkeypatch.context() as patch:
            patch.setattr(sides.NewLog if where == "_move" else sides, where, how)
            with pytest.raises(Ended):
                await migrate(source, target, clock, quiet)
        assert (await migrate(source, target, clock, quiet)).was_done
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))
            await goes_on(zone)

    asyncio.run(run())


@pytest.mark.parametrize("new", ["postgres", "jetstream", "log"])
def test_artifacts_that_the_old_zone_has_let_go_meanwhile(
    new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an attempt has ended and the zone serves on, its artifacts come and go; the next attempt follows it.

    A name may stand for something else by then, or be younger than it was.
    """

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "sqlite"), config_of(tmp_path, "new", new)
        async with opened(source, clock) as zone:
            await fill(zone, clock)
            for key in ("gone", "other", "again"):
                await zone.artifacts.put("drafts", key, pieces(f"a draft, {key}".encode()))

        async def broken_off(*args: object) -> None:
            raise Ended

        with monkeypatch.context() as patch:
            patch.setattr(moving._Move, "_verify", broken_off)
            with pytest.raises(Ended):
                await migrate(source, target, clock, quiet)
        clock.advance(LONG_SECONDS)
        async with opened(source, clock) as zone:
            before = await seen(zone)
            gone = await zone.artifacts.collect(
                before["contents"].keys() - {each.digest for each in before["names"] if each.bucket == "drafts"},
                now_unix_ms=clock.now_unix_ms(),
                grace_seconds=0,
            )
            assert gone.names == 3
            await zone.artifacts.put("drafts", "other", pieces(b"something else"))
            await zone.artifacts.put("drafts", "again", pieces(b"a draft, again"))
        async with opened(source, clock) as zone:
            before = await seen(zone)
        assert not (await migrate(source, target, clock, quiet)).was_done
        async with opened(target, clock) as zone:
            after = await seen(zone)
            assert [(each.bucket, each.key) for each in after["names"]] == [
                ("drafts", "again"), ("drafts", "other"), ("reports", "a/b.pdf"),
            ]  # fmt: skip
            assert alike(before, after)

    asyncio.run(run())


def test_artifacts_that_are_there_already_are_nobodys_to_remove(tmp_path: Path) -> None:
    """A folder with artifacts is refused for a new log, as a storage is that has some, and they stay."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "sqlite"), config_of(tmp_path, "new", "log")
        await filled(source, clock)
        store = await ArtifactFolder.open(target.artifacts_folder, clock=clock)
        try:
            await store.put("reports", "another", pieces(b"of somebody else"))
        finally:
            await store.close()
        with pytest.raises(StorageNotEmpty, match="holds artifacts"):
            await migrate(source, target, clock, quiet)
        store = await ArtifactFolder.open(target.artifacts_folder, clock=clock)
        try:
            assert [each.key async for each in store.names()] == ["another"]
        finally:
            await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("third", ["log", "sqlite"])
def test_a_place_that_is_refused_is_left_as_it_was(third: str, tmp_path: Path) -> None:
    """A zone that was moved already is given to no second place, and that one can still be used for another zone."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "postgres"), config_of(tmp_path, "new", "sqlite")
        await filled(source, clock)
        await migrate(source, target, clock, quiet)
        place = config_of(tmp_path, "third", third)
        with pytest.raises(StorageMoved):
            await migrate(source, place, clock, quiet)
        async with opened(place, clock) as zone:
            await (await zone.storage.store("operational")).append(batch(1))

    asyncio.run(run())


@pytest.mark.parametrize("new", ["postgres", "jetstream"])
def test_a_node_that_is_started_on_the_new_storage_in_the_middle(
    new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes the new storage between copying and verifying ends the migration, which says whom to stop."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "sqlite"), config_of(tmp_path, "new", new)
        before = await filled(source, clock)
        taken = []
        read = sides.NewStorage.read

        async def taken_first(side: sides.NewStorage) -> Any:
            await side.stack.aclose()
            taken.append(await open_storage(target, clock, lambda seconds: None))
            return await read(side)

        with monkeypatch.context() as patch:
            patch.setattr(sides.NewStorage, "read", taken_first)
            with pytest.raises(StorageTaken) as caught:
                await migrate(source, target, clock, quiet)
        assert "Stop the node" in caught.value.hint
        await taken[0].close()
        await migrate(source, target, clock, quiet)
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))

    asyncio.run(run())
