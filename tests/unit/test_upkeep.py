"""What a node looks after by itself: keys of streams that never expire, while their links are out of step."""

from __future__ import annotations

import asyncio

from bsfg.gate import Event
from bsfg.journey.link import PeerPosition, SessionMemory
from bsfg.node.alerts import AlertBoard
from bsfg.node.authorize import Matrix
from bsfg.node.board import Board
from bsfg.node.config import parse
from bsfg.node.guard import Guard
from bsfg.node.metrics import Metrics
from bsfg.node.parts import Parts, Settings
from bsfg.node.upkeep import Upkeep
from bsfg.ports import Result
from bsfg.retention import DAY_SECONDS
from bsfg.stores.memory import MemoryStorage
from bsfg.testing.clock import FakeClock
from bsfg.testing.conformance.case import origin
from bsfg.testing.facts import batch

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
[links.from-plant]
zone = "plant"
address = "plant.example:9443"
"""


class Site:
    """A node's upkeep over a storage in memory, with a clock that the test moves."""

    def __init__(self, text: str = CONFIG) -> None:
        config, self.clock = parse(text), FakeClock()
        self.memories: dict[tuple[str, str], SessionMemory] = {}
        guard = Guard(Matrix.of(config), self.clock, lambda decision, caller: None)
        self.board, metrics = Board(self.clock), Metrics()
        self.board.add("from-plant")
        self.storage = MemoryStorage(clock=self.clock)
        self.parts = Parts(
            self.storage, Settings.of(config), guard, self.clock, self.board, metrics, memory=self.memory
        )
        self.alerts = AlertBoard(config.zone.name, config.alerts, metrics, self.clock, lambda event, **fields: None)
        self.upkeep = Upkeep(config, self.parts, self.alerts, lambda event, **fields: None)

    def memory(self, link: str, stream: str) -> SessionMemory:
        """Give what is remembered of a sender."""
        return self.memories.setdefault((link, stream), SessionMemory())

    async def days(self, count: int) -> None:
        """Let days go by, with the node looking after its buffers."""
        for _ in range(count):
            self.clock.advance(DAY_SECONDS)
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
    for event in (Event.PEER_FOUND, Event.BACKLOG_CLEARED):
        site.board.on("from-plant", "receiver", event)
    await memory.remember(PeerPosition(end=4, acknowledged=1))
    await site.days(45)
    assert (await kept.stats()).start == 4
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.ALREADY_EXISTS) == 4
    assert (await expires.put_if_absent(batch(4), origin(4))).count(Result.INSERTED) == 4
    await memory.remember(PeerPosition(end=4, acknowledged=3))
    site.board.on("from-plant", "receiver", Event.PEER_LOST)
    await site.days(45)
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.ALREADY_EXISTS) == 4
    for event in (Event.PEER_FOUND, Event.BACKLOG_CLEARED):
        site.board.on("from-plant", "receiver", event)
    await site.days(2)
    assert (await kept.put_if_absent(batch(4), origin(4))).count(Result.INSERTED) == 4
