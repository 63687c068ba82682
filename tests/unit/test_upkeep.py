"""What a node looks after by itself: keys of streams that never expire, and the age of the last known state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from bsfg.config import consumer_name, parse
from bsfg.errors import DiskFull, OutcomeUnknown
from bsfg.gate import SENDER, Event, Gate, Mode
from bsfg.journey.link import PeerPosition, SessionMemory
from bsfg.node.alerts import AlertBoard
from bsfg.node.authorize import Guard, Matrix
from bsfg.node.links import LinkRegistry
from bsfg.node.metrics import Metrics
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.node.state import NodeState
from bsfg.node.status import Rates, document
from bsfg.node.upkeep import Upkeep
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Result, StartAt
from bsfg.retention import DAY_SECONDS
from bsfg.stores.artifacts import ArtifactFolder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.memory import MemoryStorage
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.case import origin
from bsfg.testing.disk import SimulatedArtifactDisk, SimulatedDisk
from bsfg.testing.facts import batch
from bsfg.wire.service import LinkReport

CONFIG = """
[zone]
name = "enterprise"
[tls]
ca = "ca.crt"
certificate = "a.crt"
key = "a.key"
[streams.safety]
safety = "sil"
[streams.operational]
[identities.plant-bsfg]
zone = "plant"
roles = ["peer"]
streams = ["*"]
[links.from-plant]
zone = "plant"
address = "plant.example:9443"
"""


class Site:
    """A node's upkeep over a storage in memory, with a clock that the test moves."""

    def __init__(self, text: str = CONFIG) -> None:
        config, self.clock = parse(text), FakeClock()
        self.config = config
        self.memories: dict[tuple[str, str], SessionMemory] = {}
        guard = Guard(Matrix.of(config), self.clock, lambda decision, caller: None)
        self.board, metrics = LinkRegistry(self.clock), Metrics()
        self.board.add("from-plant")
        self.storage = MemoryStorage(clock=self.clock)
        self.parts = NodeContext(
            self.storage, NodeSettings.of(config), guard, self.clock, self.board, metrics, memory=self.memory
        )
        self.alerts = AlertBoard(config.zone.name, config.alerts, metrics, self.clock, lambda event, **fields: None)
        self.upkeep = Upkeep(config, self.parts, self.alerts, lambda event, **fields: None)

    def memory(self, link: str, stream: str) -> SessionMemory:
        """Give what is remembered of a sender."""
        return self.memories.setdefault((link, stream), SessionMemory())

    async def days(self, count: int, *, moved: bool = False) -> None:
        """Let days go by, with the node looking after its buffers, and somebody moving the link or nobody."""
        for _ in range(count):
            self.clock.advance(DAY_SECONDS)
            if moved:
                lease = self.board.leases.acquire("from-plant", "engine", 60_000)
                for event in (Event.PEER_FOUND, Event.BACKLOG_CLEARED):
                    self.board.report(LinkReport("from-plant", "safety", event=event, lease=lease.token))
            await self.upkeep.look()
            await self.upkeep.enforce_retention()


def test_keys_of_a_safety_stream_wait_for_their_links() -> None:
    """A key stays while its sender may not have heard that the fact is here; other streams expire by max age."""
    asyncio.run(_keys_wait())


async def _keys_wait() -> None:
    site = Site()
    kept, expires = await site.parts.forward("safety"), await site.parts.forward("operational")
    for buffer in (kept, expires):
        await buffer.put_if_absent(batch(4), origin(4))
    memory = site.memory("from-plant", "safety")
    await memory.remember(PeerPosition(end=4, acknowledged=1))
    await site.days(45, moved=True)
    assert (await kept.stats()).start == 4
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.ALREADY_EXISTS) == 4
    assert (await expires.put_if_absent(batch(4), origin(4))).count(Result.INSERTED) == 4
    await memory.remember(PeerPosition(end=4, acknowledged=3))
    await site.days(45)
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.ALREADY_EXISTS) == 4
    await site.days(2, moved=True)
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.INSERTED) == 4


@pytest.mark.parametrize("mode", list(Mode))
def test_confirmed_facts_leave_by_age_only_while_the_link_is_open(mode: Mode) -> None:
    """What the peer confirmed leaves its store buffer by age when the gate to it allows that, and never beyond."""
    asyncio.run(_leaves_by_age(mode))


async def _leaves_by_age(mode: Mode) -> None:
    site = Site(CONFIG.replace("[streams.operational]", '[streams.operational]\nretention = "1d"') + "[serve.plant]\n")
    site.board.add("plant", SENDER, Gate(mode))
    store = await site.parts.store("operational")
    await store.append(batch(4))
    spec = ConsumerSpec(consumer_name("plant", "operational", Buffer.STORE), "operational")
    await site.storage.cursors.create(spec)
    await store.append(batch(4, first=4))
    await site.storage.cursors.sent(spec.name, 8)
    await site.storage.cursors.commit(spec.name, Confirmation(through=3))
    # Older than retention, younger than max age.
    site.clock.advance(2 * DAY_SECONDS)
    await site.upkeep.enforce_retention()
    assert (await store.stats()).start == (4 if mode in (Mode.NORMAL, Mode.RECONCILIATION) else 0)


def test_nothing_confirmed_leaves_while_a_peer_is_away() -> None:
    """Retention asks the gate to every zone that pulls: after an outage its receiver may ask again."""
    asyncio.run(_peer_away())


async def _peer_away() -> None:
    site = Site(CONFIG + "[serve.plant]\n")
    store, consumer = await site.parts.store("operational"), consumer_name("plant", "operational", Buffer.STORE)
    site.board.add("plant", SENDER)
    await site.storage.cursors.create(ConsumerSpec(consumer, "operational", Buffer.STORE, StartAt.EARLIEST, 0, True))
    await store.append(batch(4))
    await site.storage.cursors.commit(consumer, Confirmation(through=3))
    site.clock.advance(20 * DAY_SECONDS)
    await site.upkeep.enforce_retention()
    assert (await store.stats()).start == 0
    site.board.on("plant", SENDER, Event.PEER_FOUND)
    await site.upkeep.enforce_retention()
    assert (await store.stats()).start == 4


def test_no_orphans_are_looked_for_while_a_buffer_is_out_of_service() -> None:
    """What such a buffer names nobody knows: artifacts stay, and that is no failure of the upkeep."""
    asyncio.run(_no_orphans())


async def _no_orphans() -> None:
    site, _ = await _closed_site()
    site.parts.artifacts = artifacts = await ArtifactFolder.open(SimulatedArtifactDisk(), clock=site.clock)

    async def content() -> AsyncIterator[bytes]:
        yield b"a drawing"

    stored = await artifacts.add(content())
    await site.days(30)
    await site.upkeep.collect_orphans()
    assert await artifacts.exists(stored.digest)
    site.parts.unavailable.clear()
    site.parts.storage = MemoryStorage(clock=site.clock)
    await site.upkeep.collect_orphans()
    assert not await artifacts.exists(stored.digest)


def test_a_hold_that_replaced_another_is_the_one_that_is_remembered() -> None:
    """After a restart a gate is held for the last reason and until the last moment that an operator named."""
    disk, clock = SimulatedDisk(1), FakeClock()
    state, gate = NodeState(disk), Gate()
    for reason, until_unix_ms in (("work on the line", clock.now_unix_ms() + 1_000), ("the line is broken", None)):
        gate = gate.hold(clock.now_unix_ms(), by="anna", reason=reason, until_unix_ms=until_unix_ms)
        state.keep_gate("from-plant", "receiver", gate)
    state.close()
    state = NodeState(disk)
    assert state.held_gates() == {("from-plant", "receiver"): gate}
    state.keep_gate("from-plant", "receiver", gate.release(clock.now_unix_ms(), by="anna", reason="mended"))
    state.close()
    assert NodeState(disk).held_gates() == {}


def test_a_subject_that_falls_silent_raises_an_alert() -> None:
    """An alert says which last known state is too old, also when it has left the log, and clears with the next fact."""
    asyncio.run(_silence())


async def _silence() -> None:
    site = Site(CONFIG.replace('safety = "sil"', 'safety = "sil"\nlatest_max_age = "3d"'))
    forward = await site.parts.forward("safety")
    await forward.put_if_absent(batch(40), origin(40))
    await site.days(2)
    assert not [each for each in site.alerts.active() if each["alert"] == "latest_stale"]
    await site.days(20)
    assert (await forward.stats()).start == 40
    [alert] = [each for each in site.alerts.active() if each["alert"] == "latest_stale"]
    assert alert["about"] == "safety"
    assert "8 of 8 last known states" in alert["text"] and "528.0 h" in alert["text"]
    fresh = Upkeep(site.config, site.parts, site.alerts, lambda event, **fields: None)
    await fresh.look()
    assert [each["text"] for each in site.alerts.active() if each["alert"] == "latest_stale"] == [alert["text"]]
    # What an outage has delayed by four days is no news.
    late = replace(origin(40, first=40), ages_ms=np.full(40, 4 * 86_400_000))
    await forward.put_if_absent(batch(40, first=40), late)
    await site.upkeep.look()
    [alert] = [each for each in site.alerts.active() if each["alert"] == "latest_stale"]
    assert "8 of 8 last known states" in alert["text"] and "96.0 h old" in alert["text"]
    await forward.put_if_absent(batch(40, first=80), replace(origin(40, first=80), ages_ms=np.zeros(40, np.int64)))
    await site.upkeep.look()
    assert not [each for each in site.alerts.active() if each["alert"] == "latest_stale"]
    # Nor does a clock that is set ahead make anything old.
    site.clock.jump(3_650 * DAY_SECONDS)
    await site.upkeep.look()
    assert not [each for each in site.alerts.active() if each["alert"] == "latest_stale"]


async def _closed_site() -> tuple[Site, SimulatedDisk]:
    """Give a node over a simulated disk on which a sync of the safety stream's store buffer failed."""
    site, disk = Site(CONFIG.replace('safety = "sil"', 'safety = "sil"\nlatest_max_age = "3d"')), SimulatedDisk(1)
    options = LogOptions(reserve_bytes=1 << 20, segment_bytes=16_384)
    site.parts.storage = await LogStorage.open(disk, clock=site.clock, options=options)
    for stream in ("safety", "operational"):
        forward = await site.parts.forward(stream)
        await forward.put_if_absent(batch(4), origin(4))
        await (await site.parts.store(stream)).append(batch(4))
    disk.fail("sync")
    with pytest.raises(OutcomeUnknown):
        await (await site.parts.store("safety")).append(batch(4, first=4))
    return site, disk


def test_a_log_that_closed_itself_is_alone_out_of_service() -> None:
    """Retention, alarms and status of all other buffers go on, and an alert names the one that closed itself."""
    asyncio.run(_closed_alone())


async def _closed_alone() -> None:
    site, _ = await _closed_site()
    for _ in range(2):
        await site.days(10)
        await site.upkeep.look()
        [alert] = [each for each in site.alerts.active() if each["alert"] == "stream_unavailable"]
        assert alert["about"] == "safety/store" and "closed itself" in alert["text"]
    assert (await (await site.parts.forward("operational")).stats()).start == 4
    seen = (await document(site.parts, Rates(), 0))["buffers"]
    assert [(each["stream"], each["buffer"]) for each in seen] == [
        ("operational", "store"),
        ("operational", "forward"),
        ("safety", "forward"),
    ]


def test_a_log_that_closed_itself_keeps_no_other_full() -> None:
    """On a full disk the other buffers still give up what is confirmed."""
    asyncio.run(_closed_and_full())


async def _closed_and_full() -> None:
    site, disk = await _closed_site()
    store = await site.parts.store("operational")
    cursors = site.parts.storage.cursors
    await cursors.create(ConsumerSpec("peer", "operational", Buffer.STORE, StartAt.EARLIEST, 0, True))
    await cursors.commit("peer", Confirmation(through=3))
    disk.fill_up(0)
    with pytest.raises(DiskFull):
        await (await site.parts.forward("safety")).put_if_absent(batch(4, first=8), origin(4, first=8))
    for _ in range(3):
        site.clock.advance(2)
        await site.upkeep.look()
    assert (await store.stats()).start == 4


def test_last_known_states_that_cannot_be_read_are_an_alert_and_no_more() -> None:
    """A damaged file of last known states is told, and everything else is looked after."""
    asyncio.run(_latest_unreadable())


async def _latest_unreadable() -> None:
    site, disk = await _closed_site()
    await site.days(31)
    disk.spoil("streams/safety/forward/latest.entries", 0, 16)
    fresh = Upkeep(site.config, site.parts, site.alerts, lambda event, **fields: None)
    await fresh.look()
    [alert] = [each for each in site.alerts.active() if each["alert"] == "latest_stale"]
    assert "cannot be read" in alert["text"]
