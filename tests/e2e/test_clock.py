"""A receiver whose clock is wrong: facts that are merely on time must not be taken for expired ones."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import pair, until

from bsfg.clock import SystemClock
from bsfg.config import load
from bsfg.node.node import Node
from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages

DAY_MS = 86_400_000


class JumpingClock(SystemClock):
    """The machine's clock, which a wrong time server may move."""

    ahead_ms = 0

    def now_unix_ms(self) -> int:
        """Give the wall clock as it was set."""
        return super().now_unix_ms() + self.ahead_ms


async def test_clock_that_jumps_forward_expires_nothing(tmp_path: Path, cleanup: Cleanup) -> None:
    """While a receiver's clock is a month ahead of what it should be, facts arrive as before and none is set aside."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    plant.start()
    clock = JumpingClock()
    # In this process, because its clock is the test's.
    async with Node(load(enterprise.folder / "zone.toml"), clock=clock) as node, plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))
        await until(lambda: enterprise.end(Buffer.FORWARD) == 10)
        clock.ahead_ms = 30 * DAY_MS
        await producer.append("operational", batch(10, first=10, from_zone="plant-a"))
        await until(lambda: enterprise.end(Buffer.FORWARD) == 20)
        await until(lambda: [alert["alert"] for alert in node.alerts.active()] == ["clock_jumped"])
        clock.ahead_ms = 0
        await producer.append("operational", batch(10, first=20, from_zone="plant-a"))
        await until(lambda: enterprise.end(Buffer.FORWARD) == 30)
    assert enterprise.messages(Buffer.FORWARD) == messages(30, from_zone="plant-a")
    assert not len(enterprise.log(Buffer.FORWARD).notes().quarantine)
