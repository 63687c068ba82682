"""The last known state survives retention, restarts, backups, damage and the loss of power."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path
from random import Random
from typing import cast

import pytest

from bsfg.errors import StorageBusy
from bsfg.fact import Entry
from bsfg.ports import Buffer
from bsfg.retention import Policy
from bsfg.sdk.local import LocalReader
from bsfg.stores.log.backup import copy_folder
from bsfg.stores.log.files import Bytes, DiskFiles, Files
from bsfg.stores.log.storage import LogStorage, log_folder
from bsfg.stores.log.view import NAME
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.case import origin
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import batch, messages

STREAM = "safety"
DAY_SECONDS = 86_400
POLICY = Policy(safety="sil", keep_latest=True)
OPTIONS = LogOptions(segment_bytes=16_384)
FACTS = 120
STEP = 3


async def eight_quiet_days(files: Files, clock: FakeClock, durable: list[int] | None = None) -> None:
    """Store some facts, and let them leave by age, step by step; ``durable`` is told how many were acknowledged."""
    storage = await LogStorage.open(files, clock=clock, options=OPTIONS)
    forward = await storage.forward(STREAM, POLICY)
    for first in range(0, FACTS, 20):
        await forward.put_if_absent(batch(20, first=first), origin(20, first=first))
        if durable is not None:
            durable.append(first + 20)
        clock.advance(DAY_SECONDS)
        await forward.enforce_retention(link_open=True)
    clock.advance(8 * DAY_SECONDS)
    await forward.enforce_retention(link_open=True)
    assert (await forward.stats()).start == FACTS
    await storage.close()


def newest(count: int = FACTS) -> dict[tuple[str, str], int]:
    """Give the offset of the newest fact of each subject and predicate."""
    facts = [each.fact for each in messages(count)]
    return {(fact.subject, fact.predicate): offset for offset, fact in enumerate(facts)}


def offsets(state: dict[tuple[str, str], Entry]) -> dict[tuple[str, str], int]:
    return {pair: entry.offset for pair, entry in state.items()}


@pytest.mark.parametrize("max_latest", [100_000, 3])
def test_the_last_known_state_outlives_retention_with_the_node_dead(tmp_path: Path, max_latest: int) -> None:
    """After days without news a reader of the folder still finds each state as it was, and how old it is."""
    clock = FakeClock()
    asyncio.run(eight_quiet_days(DiskFiles(tmp_path), clock))
    reader = LocalReader(tmp_path, max_latest=max_latest)
    facts = messages(FACTS)
    for (subject, predicate), offset in newest().items():
        entry = reader.latest(subject, predicate)
        assert entry is not None
        assert (entry.offset, entry.message) == (offset, facts[offset])
        assert entry.origin is not None and entry.origin.offset == offset
        assert entry.age_seconds(clock.now_unix_ms()) >= 8 * DAY_SECONDS
        assert reader.age_seconds(entry) > 0
    if max_latest > 8:
        state = reader.latest_all()
        assert offsets(state) == newest()
        assert list(offsets(state).values()) == sorted(newest().values())
    assert not reader.gaps


def test_a_backup_has_the_last_known_state(tmp_path: Path) -> None:
    """A copy of the folder tells the same last known state."""
    asyncio.run(eight_quiet_days(DiskFiles(tmp_path / "data"), FakeClock()))
    copy_folder(DiskFiles(tmp_path / "data"), DiskFiles(tmp_path / "copy"))
    assert offsets(LocalReader(tmp_path / "copy").latest_all()) == newest()


def test_a_damaged_file_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    """When what was kept is damaged, that is named, newer facts are still found, and keeping begins anew."""
    clock = FakeClock()
    asyncio.run(eight_quiet_days(DiskFiles(tmp_path), clock))
    kept = tmp_path / log_folder(STREAM, Buffer.FORWARD) / NAME
    kept.write_bytes(kept.read_bytes()[:-9] + b"123456789")

    async def more() -> list[str]:
        storage = await LogStorage.open(tmp_path, clock=clock, options=OPTIONS)
        forward = await storage.forward(STREAM, POLICY)
        await forward.put_if_absent(batch(5, first=FACTS), origin(5, first=FACTS))
        problems = forward.problems
        reader = LocalReader(tmp_path)
        assert max(offsets(reader.latest_all()).values()) == FACTS + 4
        assert [gap.reason for gap in reader.gaps] == ["damaged"]
        clock.advance(8 * DAY_SECONDS)
        await forward.enforce_retention(link_open=True)
        await storage.close()
        return problems

    assert any(NAME in problem for problem in asyncio.run(more()))
    assert set(offsets(LocalReader(tmp_path).latest_all()).values()) <= set(range(FACTS, FACTS + 5))
    assert list((kept.parent / "aside").glob(f"{NAME}.*"))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_what_cannot_be_read_for_a_moment_is_kept(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that fails once is no damage: the last known state is the same when the next facts have left."""
    disk, clock = SimulatedDisk(), FakeClock()
    asyncio.run(eight_quiet_days(cast(Files, disk), clock))
    failing = [False]
    read = disk.read

    def sometimes(path: str) -> Bytes:
        if failing[0] and path.endswith(NAME):
            failing[0] = False
            raise OSError(error, os.strerror(error), path)
        return read(path)

    monkeypatch.setattr(disk, "read", sometimes)

    async def more() -> None:
        storage = await LogStorage.open(cast(Files, disk), clock=clock, options=OPTIONS)
        forward = await storage.forward(STREAM, POLICY)
        await forward.put_if_absent(batch(1, first=FACTS), origin(1, first=FACTS))
        clock.advance(8 * DAY_SECONDS)
        failing[0] = True
        with contextlib.suppress(StorageBusy):
            await forward.enforce_retention(link_open=True)
        assert not failing[0]
        await forward.enforce_retention(link_open=True)
        assert (await forward.stats()).start == FACTS + 1
        kept = {(entry.message.fact.subject, entry.message.fact.predicate): entry.offset
                for entry in (await forward.kept_latest()).to_entries()}  # fmt: skip
        assert kept == newest(FACTS + 1)
        await storage.close()

    asyncio.run(more())


def test_power_loss_keeps_the_last_known_state() -> None:
    """Wherever the power goes, the newest durable fact of each subject is in the log or among those kept."""
    whole = SimulatedDisk()
    asyncio.run(eight_quiet_days(cast(Files, whole), FakeClock()))
    lost = 0
    for point in range(1, whole.operations + 1, STEP):
        disk = SimulatedDisk(point)
        disk.crash_at(point)
        durable = [0]
        try:
            asyncio.run(eight_quiet_days(cast(Files, disk), FakeClock(), durable))
        except BaseException as error:
            # In the writer's thread it may be wrapped; whatever is raised, the power is gone.
            assert disk.powerless, error
        if not disk.powerless:
            continue
        lost += 1
        found = asyncio.run(_state_after(disk.crash(Random(point))))
        for pair, offset in newest(durable[-1]).items():
            assert found.get(pair, -1) >= offset, f"power lost in operation {point}"
    assert lost > whole.operations / STEP / 2


async def _state_after(disk: SimulatedDisk) -> dict[tuple[str, str], int]:
    """Open what is left and give the offset of the newest fact of each subject and predicate."""
    storage = await LogStorage.open(cast(Files, disk), clock=FakeClock(), options=OPTIONS)
    forward = await storage.forward(STREAM, POLICY)
    entries = (await forward.kept_latest()).to_entries()
    async for frame in forward.replay((await forward.stats()).start):
        entries += frame.entries.to_entries() if frame.entries is not None else []
    await storage.close()
    return {(entry.message.fact.subject, entry.message.fact.predicate): entry.offset for entry in entries}
