"""A zone that is moved from one storage to another is the same zone: nothing of it is lost, doubled or altered."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.migrating import STORE, alike, config_of, fill, goes_on, install_sqlite, opened, seen
from tests.servers import postgres

from bsfg.config import ZoneConfig, load
from bsfg.errors import (
    BsfgError,
    FolderLocked,
    InvalidArgument,
    LogDamaged,
    MigrationUnfinished,
    StorageMoved,
    StorageNotEmpty,
    StorageTaken,
    StorageUnable,
)
from bsfg.node.migrate import migrate, plan
from bsfg.ports import Confirmation, GapRecord
from bsfg.retention import GapReason
from bsfg.stores.log.backup import begin_new_histories
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.verify import verify
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import batch

PAIRS = [("log", "postgres"), ("postgres", "jetstream"), ("jetstream", "log"), ("log", "sqlite"), ("sqlite", "log")]


def quiet(doing: str, done: int, total: int) -> None:
    """Hear how far it is."""


@pytest.fixture(autouse=True)
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the example of a backend of another package installed."""
    paths = install_sqlite(tmp_path / "installed")
    for path in paths:
        monkeypatch.syspath_prepend(path)
    return paths


async def filled(config: ZoneConfig, clock: FakeClock) -> dict[str, Any]:
    """Fill a zone, and give what is seen of it when it is opened again."""
    async with opened(config, clock) as zone:
        await fill(zone, clock)
    async with opened(config, clock) as zone:
        return await seen(zone)


async def refused(source: ZoneConfig, target: ZoneConfig, clock: FakeClock, kind: type[BsfgError]) -> BsfgError:
    """Insist that a migration is refused, and say how."""
    with pytest.raises(kind) as caught:
        await migrate(source, target, clock, quiet)
    return caught.value


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=str)
def test_a_moved_zone_is_the_same(old: str, new: str, tmp_path: Path) -> None:
    """Entries, offsets, times, chain, digests, gaps, quarantine, consumers, state and artifacts are as they were."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", old), config_of(tmp_path, "new", new)
        before = await filled(source, clock)
        planned = await plan(source, target, clock, quiet)
        assert {(each.stream, each.buffer) for each in planned.buffers} == {
            ("operational", "store"),
            ("operational", "forward"),
            ("documents", "forward"),
        }
        assert planned.consumers == 3 and planned.artifacts == 2
        moved = await migrate(source, target, clock, quiet)
        assert not moved.was_done and moved.consumers == 3 and moved.artifacts == 2 and not moved.missing_artifacts
        found = {(each.stream, each.buffer): each.found for each in moved.buffers}
        assert found["operational", "store"].keys > 0 and found["operational", "forward"].quarantined == 2
        with pytest.raises(StorageMoved):
            async with opened(source, clock):
                pass
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))
            await goes_on(zone)
        # What was done is not done again, and a second place is not given the same zone.
        again = await migrate(source, target, clock, quiet)
        assert again.was_done
        await refused(source, config_of(tmp_path, "third", "sqlite"), clock, StorageMoved)
        if new == "log":
            assert verify(target.data_folder).ok

    asyncio.run(run())


@pytest.mark.parametrize("new", ["jetstream", "postgres"])
def test_what_was_truncated_inside_a_file_has_left(new: str, tmp_path: Path) -> None:
    """A log keeps truncated entries until their file goes; elsewhere they have left, and their repeats are known."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "log"), config_of(tmp_path, "new", new)
        await filled(source, clock)
        async with opened(source, clock) as zone:
            store = await zone.storage.store("operational", STORE)
            await zone.storage.cursors.commit("enterprise.operational", Confirmation(through=280))
            await store.truncate_before(265)
        async with opened(source, clock) as zone:
            before = await seen(zone)
        await migrate(source, target, clock, quiet)
        async with opened(target, clock) as zone:
            after = await seen(zone)
            kept, known = after["operational/store"]["kept"], before["operational/store"]["kept"]
            assert [each.last for each in kept] == [*(each.last for each in known), 260]
            assert alike(before, after)
            await goes_on(zone)

    asyncio.run(run())


def test_around_and_home_again(tmp_path: Path) -> None:
    """A zone that went through every storage is in the last one what it was in the first."""

    async def run() -> None:
        clock = FakeClock()
        configs = [
            config_of(tmp_path, f"z{number}", backend)
            for number, backend in enumerate(("jetstream", "postgres", "sqlite", "postgres", "log"))
        ]
        before = await filled(configs[0], clock)
        digests = []
        for source, target in pairwise(configs):
            moved = await migrate(source, target, clock, quiet)
            digests.append([each.found.digest for each in moved.buffers])
        assert all(each == digests[0] for each in digests)
        async with opened(configs[-1], clock) as zone:
            assert alike(before, await seen(zone))
            await goes_on(zone)

    asyncio.run(run())


# Broken off.

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from bsfg.config import load
from bsfg.node import migrate as moving
from bsfg.node.state import NodeState
from bsfg.stores.shared.history import HistoryCopy
from bsfg.testing.clock import FakeClock

source, target, where, left = load(Path(sys.argv[1])), load(Path(sys.argv[2])), sys.argv[3], int(sys.argv[4])

def killing(place, work, counts=lambda *args: True):
    def step(*args, **more):
        global left
        left -= place == where and counts(*args)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **more)
    return step

HistoryCopy._commit = killing("commit", HistoryCopy._commit)
NodeState.mark_moved = killing("mark", NodeState.mark_moved)
Path.rename = killing("rename", Path.rename, lambda path, *args: path.parent.name == moving.MIGRATING)
moving.digest_of = killing("digest", moving.digest_of)
asyncio.run(moving.migrate(source, target, FakeClock(), lambda *told: None))
"""

KILLS = [("commit", 3), ("commit", 24), ("digest", 2), ("mark", 1), ("mark", 2)]
"""In the midst of bringing keys, of bringing frames, of verifying; before the old side is marked, and after."""


def killed_at(where: str, count: int, source: ZoneConfig, target: ZoneConfig, paths: list[str]) -> bool:
    """Move a zone in a process of its own that kills itself somewhere; tell whether it did."""
    asked = [sys.executable, "-c", KILLED, str(source.source), str(target.source), where, str(count)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode in (0, -9), done.stderr[-3000:]
    return done.returncode == -9


@pytest.mark.timeout(1_200)  # many processes, one after the other; a busy machine takes its time
@pytest.mark.parametrize(("old", "new"), [("log", "postgres"), ("sqlite", "log"), ("postgres", "jetstream")])
def test_killed_again_and_again(old: str, new: str, tmp_path: Path, sqlite: list[str]) -> None:
    """However often it is killed, at whatever step, the same command goes on, and the zone is all there at the end.

    In between no node starts on what is not complete, and never one on both sides. The old storage may serve until the
    new one is verified: what it takes in is moved, too.
    """

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", old), config_of(tmp_path, "new", new)
        before = await filled(source, clock)
        for where, count in [*KILLS, *([("rename", 1), ("rename", 3)] if new == "log" else [])]:
            assert await asyncio.to_thread(killed_at, where, count, source, target, sqlite), (where, count)
            with pytest.raises(MigrationUnfinished):
                async with opened(target, clock):
                    pass
            if where == "digest":
                async with opened(source, clock) as zone:
                    store = await zone.storage.store("operational", STORE)
                    await store.append(batch(5, seed=8))
                    await store.set_aside(batch(1, first=905), "fact_expired")
                    await store.record_gaps([GapRecord(290, 291, GapReason.SKIPPED, 1, "later")])
                    await zone.storage.cursors.commit("app", Confirmation(through=41))
                async with opened(source, clock) as zone:
                    before = await seen(zone)
        # From the second mark on the old side starts no node any more.
        with pytest.raises(StorageMoved):
            async with opened(source, clock):
                pass
        assert not await asyncio.to_thread(killed_at, "nowhere", 1, source, target, sqlite)
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))
            await goes_on(zone)
        assert (await migrate(source, target, clock, quiet)).was_done

    asyncio.run(run())


# Damage.


def segment_of(config: ZoneConfig) -> Path:
    """Give the segment file of a log that holds what is retained."""
    return max((config.data_folder / "streams/operational/store").glob("*.seg"), key=lambda path: path.stat().st_size)


def test_an_alteration_in_the_log_is_found(tmp_path: Path) -> None:
    """A byte that somebody changed in the old log ends the migration before anything is given over."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "log"), config_of(tmp_path, "new", "sqlite")
        await filled(source, clock)
        path = segment_of(source)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        found = await refused(source, target, clock, LogDamaged)
        assert "streams/operational/store" in found.message and "start the node" in found.hint
        assert path.read_bytes() == data
        async with opened(source, clock) as zone:
            # Who reads it comes across the damage, which is on record from then on.
            await seen(zone)
        async with opened(source, clock) as zone:
            before = await seen(zone)
        assert any("damaged" in gap for gap in before["operational/store"]["gaps"])
        await migrate(source, target, clock, quiet)
        async with opened(target, clock) as zone:
            assert alike(before, await seen(zone))

    asyncio.run(run())


def changed_byte(column: str, at: str) -> str:
    """Write the change of one byte of a column to another value, whatever it is."""
    return f"{column} = set_byte({column}, {at}, 255 - get_byte({column}, {at}))"


def altered_frame(schema: str, how: str) -> None:
    """Change the second frame that the tables of a zone retain."""
    frames = f"SELECT buffer_id, base FROM {schema}.frame ORDER BY buffer_id, base OFFSET 1 LIMIT 1"
    postgres().execute(
        f"UPDATE {schema}.frame f SET {how} FROM ({frames}) x WHERE (f.buffer_id, f.base) = (x.buffer_id, x.base)"
    )


@pytest.mark.parametrize(
    "how",
    [changed_byte("content", "octet_length(content) - 9"), changed_byte("chain_before", "3")],
    ids=["a fact", "the chain"],
)
def test_an_alteration_in_the_tables_is_found(how: str, tmp_path: Path) -> None:
    """So does what somebody changed in a table; once it is on record as lost, all else is moved with that record."""

    async def run() -> None:
        clock = FakeClock()
        source, target = config_of(tmp_path, "old", "postgres"), config_of(tmp_path, "new", "log")
        await filled(source, clock)
        altered_frame(source.postgres.schema, how)
        await refused(source, target, clock, LogDamaged)
        with pytest.raises(MigrationUnfinished):
            async with opened(target, clock):
                pass
        async with opened(source, clock) as zone:
            await seen(zone)
        async with opened(source, clock) as zone:
            before = await seen(zone)
        await migrate(source, target, clock, quiet)
        async with opened(target, clock) as zone:
            after = await seen(zone)
        assert any("damaged" in gap for gap in before["operational/store"]["gaps"])
        assert alike(before, after)
        assert verify(target.data_folder).ok or all(
            each.code == "entries_lost" for each in verify(target.data_folder).problems
        )

    asyncio.run(run())


# What is refused.


def test_a_node_holds_a_side(tmp_path: Path) -> None:
    """While a node has either storage nothing is moved, and the hint says what to do."""

    async def run() -> None:
        clock = FakeClock()
        log, tables = config_of(tmp_path, "log", "log"), config_of(tmp_path, "tables", "postgres")
        await filled(log, clock)
        async with opened(log, clock):
            assert "Stop the node" in (await refused(log, tables, clock, FolderLocked)).hint
        async with opened(tables, clock):
            # Of a node on another machine there is no lock in the folder.
            (tables.data_folder / "LOCK").unlink()
            (tmp_path / "elsewhere").mkdir()
            tables.data_folder.rename(tmp_path / "elsewhere" / "data")
            assert "Stop the node" in (await refused(log, tables, clock, StorageTaken)).hint
        await migrate(log, tables, clock, quiet)

    asyncio.run(run())


def test_places_that_are_not_two_of_one_zone(tmp_path: Path) -> None:
    """Another zone, the same folder, two logs, memory, and a place that is not empty are refused, each in its words."""

    async def run() -> None:
        clock = FakeClock()
        source = config_of(tmp_path, "old", "log")
        await filled(source, clock)
        for name, backend, kind in (
            ("memory", "memory", StorageUnable),
            ("log", "log", StorageUnable),
            ("old", "sqlite", InvalidArgument),
        ):
            await refused(source, config_of(tmp_path, name, backend), clock, kind)
        other = config_of(tmp_path, "other", "sqlite")
        path = other.source
        path.write_text(path.read_text().replace('"plant"', '"mill"'))
        await refused(source, load(path), clock, InvalidArgument)
        taken = config_of(tmp_path, "taken", "sqlite")
        async with opened(taken, clock) as zone:
            await (await zone.storage.store("operational")).append(batch(1))
        await refused(source, taken, clock, StorageNotEmpty)
        async with opened(source, clock):
            pass  # nothing of all this has changed it

    asyncio.run(run())


def test_a_restored_log_says_why_it_stays(tmp_path: Path) -> None:
    """A log that was restored from a backup has two ids, which no other storage knows how to keep."""

    async def run() -> None:
        clock = FakeClock()
        source = config_of(tmp_path, "old", "log")
        await filled(source, clock)
        begin_new_histories(DiskFiles(source.data_folder), clock.now_unix_ms())
        found = await refused(source, config_of(tmp_path, "new", "sqlite"), clock, StorageUnable)
        assert "restored from a backup" in found.message

    asyncio.run(run())
