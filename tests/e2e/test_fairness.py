"""Streams of one link beside each other: a backlog delays nobody's live facts, and the bounds of a link are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, link_to, pair, settled, until

from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages

LIVE = ("alarms", "audit", "operational")
STREAMS = "".join(f"[streams.{name}]\n" for name in (*LIVE, "bulk"))
RATE = 4_000
BACKLOG = 20_000


async def with_backlog(tmp_path: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Give two zones, the sender with a backlog in one of four streams, the receiver with a limited link."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=STREAMS))
    enterprise.links = link_to(plant, more=f"rate_limit = {RATE}\nbatch_facts = 2000\ncompression = true")
    enterprise.write()
    plant.start()
    async with plant.client() as producer:
        for first in range(0, BACKLOG, 5_000):
            await producer.append("bulk", batch(5_000, first=first, from_zone="plant-a"))
    return plant, enterprise


async def test_live_facts_are_not_starved(tmp_path: Path, cleanup: Cleanup) -> None:
    """While one stream works off a backlog, facts of the others arrive as they are said, round after round."""
    plant, enterprise = await with_backlog(tmp_path, cleanup)
    enterprise.start()
    await until(lambda: enterprise.end(Buffer.FORWARD, "bulk"))
    rounds = 0
    async with plant.client() as producer:
        while enterprise.end(Buffer.FORWARD, "bulk") < BACKLOG:
            said = [producer.append(name, batch(1, first=rounds, from_zone="plant-a")) for name in LIVE]
            await asyncio.gather(*said)
            await asyncio.gather(*(settled(plant, enterprise, name) for name in LIVE))
            rounds += 1
    await settled(plant, enterprise, "bulk")
    # A starved stream would have got through once, at the end.
    assert rounds >= 5
    for name in LIVE:
        assert enterprise.messages(Buffer.FORWARD, name) == messages(rounds, from_zone="plant-a")
    print(f"{rounds} rounds of live facts beside a backlog of {BACKLOG}")
    times = [entry.appended_at_unix_ms for entry in enterprise.entries(Buffer.FORWARD, "bulk")]
    # One second's worth may come at once; the rest takes its time, however fast the machine is.
    assert times[-1] - times[0] >= 1000 * (BACKLOG - RATE - 2 * RATE / 10) / RATE - 100


async def test_bytes_are_bounded_and_urgent_streams_come_first(tmp_path: Path, cleanup: Cleanup) -> None:
    """Beside an urgent backlog on a narrow link another one comes: the urgent one is through before half of that is."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams="[streams.alarms]\n[streams.bulk]\n"))
    rate, facts, each_bytes = 200_000, 400, 1_000
    enterprise.links = link_to(plant, more=f'bandwidth = "{rate // 1000}kB"\npriority = ["alarms"]')
    enterprise.write()
    plant.start()
    async with plant.client() as producer:
        for name in ("alarms", "bulk"):
            for first in range(0, facts, 20):
                await producer.append(name, batch(20, first=first, from_zone="plant-a", object_bytes=each_bytes))
            if name == "alarms":
                # From here on they wait, and what comes after them does not find an idle link.
                enterprise.start()
                await until(lambda: enterprise.end(Buffer.FORWARD, "alarms"))
    await asyncio.gather(*(settled(plant, enterprise, name) for name in ("alarms", "bulk")))
    times = {
        name: [entry.appended_at_unix_ms for entry in enterprise.entries(Buffer.FORWARD, name)]
        for name in ("alarms", "bulk")
    }
    assert times["alarms"][-1] < times["bulk"][facts // 2]
    took_ms = max(map(max, times.values())) - min(map(min, times.values()))
    # A second's worth and an answer of each stream may come at once; envelopes are not even counted here.
    assert took_ms >= 1000 * (2 * facts * each_bytes / rate - 1 - 2 * 0.5) - 100
