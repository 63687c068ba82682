"""A failed sync, whatever its error number, closes what it was meant to make durable; and only a refusal goes on."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest

from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown, StorageBusy, StorageClosed
from bsfg.journey.link import PeerPosition
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord
from bsfg.retention import GapReason, Policy
from bsfg.stores.log import journal
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.facts import messages, sealed

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EINTR)
LOSSES = 8
POLICY = Policy(retention_seconds=60, max_age_seconds=60, key_horizon_seconds=10**9)

any_error = pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)


async def opened(disk: SimulatedDisk) -> LogStorage:
    """Open the log with segments that two large facts fill."""
    return await LogStorage.open(disk, clock=FakeClock(), options=LogOptions(segment_bytes=16_384))


async def attempted(work: Awaitable[object]) -> object:
    """Give the result of a call, or its error when it is one of ours."""
    try:
        return await work
    except BsfgError as error:
        return error


@any_error
@pytest.mark.parametrize("call", ["write", "sync", "sync_folder"])
def test_a_segment_that_could_not_be_made_takes_nothing_with_it(call: str, error: int) -> None:
    """Whatever fails while a segment is made, facts acknowledged later are there after a power loss, each once."""

    async def run() -> None:
        for seed in range(LOSSES):
            disk = SimulatedDisk(seed)
            storage = await opened(disk)
            store = await storage.store("s", POLICY)
            acknowledged = {}
            for at in range(2):
                receipt = await store.append(sealed(messages(1, first=at, object_bytes=7_000)))
                acknowledged[at] = int(receipt.offsets[0])
            disk.fail(call, error=error)
            outcome = await attempted(store.append(sealed(messages(1, first=2, object_bytes=7_000))))
            # The next ones are small: they would fit into the segment that was there before.
            for at in range(3, 5):
                later = await attempted(store.append(sealed(messages(1, first=at, object_bytes=10))))
                if not isinstance(later, BsfgError):
                    acknowledged[at] = int(later.offsets[0])  # type: ignore[attr-defined]
            if call == "write" and error not in (errno.EIO,):
                assert isinstance(outcome, DiskFull | StorageBusy)
                assert set(acknowledged) == {0, 1, 3, 4}, "a refusal must not close the log"
            if call != "write":
                assert isinstance(outcome, OutcomeUnknown)
                assert isinstance(later, StorageClosed)
            found = await _stored(disk.crash(Random(seed)))
            for at, offset in acknowledged.items():
                assert found.get(offset) == f"0-{at:06d}", f"seed {seed}: fact {at} at {offset}, found {found}"
            await storage.close()

    asyncio.run(run())


async def _stored(disk: SimulatedDisk) -> dict[int, str]:
    storage = await opened(disk)
    store = await storage.store("s", POLICY)
    found: dict[int, str] = {}
    async for frame in store.replay(0):
        if frame.entries is not None:
            found |= {entry.offset: entry.key.message_id for entry in frame.entries.to_entries()}
    await storage.close()
    return found


async def _commit(storage: LogStorage, through: int) -> object:
    return await storage.cursors.commit("c", Confirmation(through))


async def _gap(storage: LogStorage, at: int) -> None:
    store = await storage.store("s", POLICY)
    await store.record_gaps([GapRecord(at, at, GapReason.SKIPPED, 1, "not wanted", "plant")])


async def _set_aside(storage: LogStorage, at: int) -> None:
    await (await storage.store("s", POLICY)).set_aside(sealed(messages(1, first=100 + at)), "refused")


Remember = Callable[[LogStorage, int], Awaitable[object]]


@any_error
@pytest.mark.parametrize("remember", [_commit, _gap, _set_aside])
def test_a_journal_ends_with_a_failed_sync(remember: Remember, error: int) -> None:
    """After a failed sync and then a failed write, nothing that was acknowledged is missing after a power loss."""

    async def run() -> None:
        for seed in range(LOSSES):
            disk = SimulatedDisk(seed)
            storage = await opened(disk)
            store = await storage.store("s", POLICY)
            await store.append(sealed(messages(30)))
            await storage.cursors.create(ConsumerSpec("c", "s", Buffer.STORE))
            await remember(storage, 5)
            disk.fail("sync", error=error)
            assert isinstance(await attempted(remember(storage, 10)), OutcomeUnknown)
            acknowledged = [5]
            for at in (15, 20, 25):
                if at == 25:
                    disk.fail("write", error=errno.ENOSPC)
                outcome = await attempted(remember(storage, at))
                if isinstance(outcome, BsfgError):
                    assert isinstance(outcome, StorageClosed)
                else:
                    acknowledged.append(at)
            disk.repair()
            await storage.close()
            await _check_remembered(disk.crash(Random(seed)), remember, acknowledged)
            await _check_remembered(disk.killed(), remember, acknowledged)

    asyncio.run(run())


async def _check_remembered(disk: SimulatedDisk, remember: Remember, acknowledged: list[int]) -> None:
    storage = await opened(disk)
    store = await storage.store("s", POLICY)
    if remember is _commit:
        assert (await storage.cursors.checkpoint("c")).committed >= max(acknowledged)
    elif remember is _gap:
        assert set(acknowledged) <= {gap.first for gap in await store.gaps()}
    else:
        kept = {item.key.message_id for item in await store.quarantine()}
        assert {f"0-{100 + at:06d}" for at in acknowledged} <= kept
    # What was found may be in the page cache alone: a power loss must not take it back once it was shown.
    shown = await _shown(storage)
    again = await opened(disk.crash(Random(len(acknowledged))))
    assert await _shown(again) == shown
    await again.close()
    await storage.close()


async def _shown(storage: LogStorage) -> object:
    store = await storage.store("s", POLICY)
    kept = [item.key for item in await store.quarantine()]
    return (await storage.cursors.checkpoint("c")).committed, await store.gaps(), kept


@any_error
def test_the_state_of_the_node_ends_with_a_failed_sync(error: int) -> None:
    """What a node remembers of its peers obeys the same rule: a failed sync closes it, nothing acknowledged goes."""

    async def run() -> None:
        for seed in range(LOSSES):
            disk = SimulatedDisk(seed)
            state = NodeState(disk)
            memory = state.peer("link", "s")
            await memory.remember(PeerPosition(latest_start=5))
            disk.fail("sync", error=error)
            assert isinstance(await attempted(memory.remember(PeerPosition(latest_start=10))), OutcomeUnknown)
            known = 5
            for start in (15, 20):
                if start == 20:
                    disk.fail("write", error=errno.ENOSPC)
                with suppress(StorageClosed, DiskFull):
                    await memory.remember(PeerPosition(latest_start=start))
                    known = start
            disk.repair()
            for found in (disk.crash(Random(seed)), disk.killed()):
                position = await NodeState(found).peer("link", "s").recall()
                assert position.latest_start is not None
                assert position.latest_start >= known

    asyncio.run(run())


@pytest.mark.parametrize("call", ["sync", "sync_folder", "rename", "create", "write"])
@any_error
def test_compaction_that_fails_loses_nothing(call: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a journal is rewritten any call may fail: what was acknowledged before and after is there."""
    monkeypatch.setattr(journal, "_COMPACT_ABOVE_BYTES", 1_500)

    async def run() -> None:
        for seed in range(LOSSES):
            disk = SimulatedDisk(seed)
            storage = await opened(disk)
            await (await storage.store("s", POLICY)).append(sealed(messages(60)))
            await storage.cursors.create(ConsumerSpec("c", "s", Buffer.STORE))
            # The fault waits for the compaction: every commit before it writes and syncs once.
            disk.hook = _armed(disk, call, error)
            committed = -1
            for through in range(40):
                if not isinstance(await attempted(_commit(storage, through)), BsfgError):
                    committed = through
            disk.hook = None
            disk.repair()
            assert committed >= 1
            for found in (disk.crash(Random(seed)), disk.killed()):
                again = await opened(found)
                assert (await again.cursors.checkpoint("c")).committed >= committed
                await again.close()
            await storage.close()

    asyncio.run(run())


def _armed(disk: SimulatedDisk, call: str, error: int) -> Callable[[SimulatedDisk, int, str, str], None]:
    """Order the fault when the first compaction of the cursors begins, which is when it removes the old new file."""
    struck = False

    def hook(disk: SimulatedDisk, number: int, kind: str, path: str) -> None:
        nonlocal struck
        if kind == "remove" and path.endswith("cursors.journal.new") and not struck:
            struck = True
            disk.fail(call, error=error)

    return hook


@any_error
def test_keys_that_could_not_be_kept_keep_their_segment(error: int) -> None:
    """When the keys of a segment cannot be made durable the segment stays, and no fact is taken twice later."""

    async def run() -> None:
        for call in ("create", "write", "sync", "rename", "sync_folder"):
            disk = SimulatedDisk(call)
            storage = await opened(disk)
            store = await storage.store("s", POLICY)
            facts = sealed(messages(6, object_bytes=7_000))
            for at in range(6):
                await store.append(facts.slice(at, 1))
            await storage.cursors.create(ConsumerSpec("c", "s", Buffer.STORE))
            await _commit(storage, 5)
            disk.fail(call, error=error)
            await attempted(store.truncate_before(4))
            disk.repair()
            with suppress(BsfgError):
                await store.truncate_before(4)
            await storage.close()
            for seed in range(10):
                again = await opened(disk.crash(Random(seed)))
                receipt = await (await again.store("s", POLICY)).append(facts)
                assert receipt.offsets.tolist() == list(range(6))
                await again.close()

    asyncio.run(run())
