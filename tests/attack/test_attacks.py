"""Attacks from all sides on a real node, and an honest producer beside each of them who must not notice."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.attack.attacks import ATTACKS, REVOKED, STRANGER, Attacker
from tests.attack.honest import Honest, Phase
from tests.e2e.cleanup import Cleanup
from tests.e2e.nursery import rss_bytes
from tests.e2e.producing import check_sound
from tests.e2e.zones import Zone, pair

from bsfg.ports import Buffer, ConsumerSpec
from bsfg.testing.facts import batch
from bsfg.wire.certs import issue

pytestmark = pytest.mark.campaign

CEILING_BYTES = 1 << 30
LOG_BYTES_PER_SECOND = 10_000
P99_MS_MOST, P99_RATIO_MOST = 100.0, 10.0
RUNS = 3
"""How often the long form measures; the median counts, because the machine may be busy with something else once."""

MORE_IDENTITIES = """
[identities.plant-a-gadget]
zone = "plant-a"
roles = ["producer"]
streams = ["*"]
[identities.revoked]
zone = "plant-a"
roles = ["producer", "consumer"]
streams = ["*"]
revoked = true
reason = "laptop lost"
[tokens.wall]
role = "viewer"
hash = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
"""


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give a zone that runs and holds a few thousand facts, with a consumer of its own."""
    plant, _ = pair(tmp_path)
    plant.identities += MORE_IDENTITIES
    plant.write()
    for name in (STRANGER, REVOKED, "plant-a-gadget"):
        issue(plant.certs, name, days=60, now=datetime.now(UTC), serves=False)
    cleanup.zone(plant).start()

    async def fill() -> None:
        async with plant.admin() as admin:
            await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.STORE))
        async with plant.client() as client:
            for first in range(0, 20_000, 5_000):
                await client.append("operational", batch(5_000, first=first, from_zone="plant-a"))

    asyncio.run(fill())
    return plant


async def beside(plant: Zone, name: str, seconds: float, quiet_seconds: float) -> tuple[Phase, Phase, int, Attacker]:
    """Have an honest producer work in peace and then beside an attack; give both phases and the most memory seen."""
    most_bytes = 0
    with Honest(plant) as honest:
        honest.begin("quiet")
        await asyncio.sleep(quiet_seconds)
        with Attacker(plant, name) as attacker:
            honest.begin("attacked")
            for _ in range(int(seconds * 10)):
                await asyncio.sleep(0.1)
                most_bytes = max(most_bytes, rss_bytes(plant.pid or 0))
            honest.begin("afterwards")
        phases = await asyncio.to_thread(honest.result)
    return phases["quiet"], phases["attacked"], most_bytes, attacker


def check_unharmed(plant: Zone, attacked: Phase, most_bytes: int, counts: dict[str, int]) -> None:
    """Insist on what no attack may change."""
    assert not attacked.refused, attacked.refused
    assert most_bytes <= CEILING_BYTES
    assert not counts.get("internal") and not counts.get("remote_error"), counts
    assert not plant.events("request_failed")
    assert b"Traceback" not in plant.log_path.read_bytes()


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(ATTACKS))
async def test_honest_producers_do_not_notice(plant: Zone, name: str, soak_size: Callable[[int, int], int]) -> None:
    """No append is refused, memory stays below its ceiling, the log does not grow with the attack, nothing breaks.

    How long an append takes is told; runs in the long form hold it to ten times the quiet one, and to 100 ms.
    """
    # Only the long form compares; the short one needs a producer that has begun.
    seconds, quiet_seconds = soak_size(4, 30), soak_size(1, 30)
    ratios, worst = [], []
    for _ in range(soak_size(1, RUNS)):
        log_before = plant.log_path.stat().st_size
        quiet, attacked, most_bytes, attacker = await beside(plant, name, seconds, quiet_seconds)
        grown = plant.log_path.stat().st_size - log_before
        check_unharmed(plant, attacked, most_bytes, attacker.counts)
        assert grown <= LOG_BYTES_PER_SECOND * (2 * seconds + 10), f"{grown} bytes of log"
        ratios.append(attacked.p99_ms / quiet.p99_ms)
        worst.append(attacked.p99_ms)
        print(
            f"{name}: quiet {quiet}; attacked {attacked}; {most_bytes >> 20} MiB, {grown} bytes of log, "
            f"{dict(attacker.counts)}"
        )
        assert attacker.counts, "the attack reached nobody"
    if os.environ.get("BSFG_SOAK") == "long":
        assert statistics.median(ratios) <= P99_RATIO_MOST, ratios
        assert statistics.median(worst) <= P99_MS_MOST, worst
    plant.stop()
    check_sound(plant)


async def test_both_listeners_bear_descriptors_running_out(plant: Zone) -> None:
    """A flood of silent connections at a small limit of descriptors closes no stream and refuses no honest append."""
    # The node counts its descriptors when it starts: a limit that is lowered afterwards would be news to it.
    plant.stop()
    plant.start(descriptors=1_024)
    _, attacked, most_bytes, attacker = await beside(plant, "silent_connections", 5, 1)
    check_unharmed(plant, attacked, most_bytes, attacker.counts)
    async with plant.client() as client:
        await client.append("operational", batch(10, first=90_000, from_zone="plant-a"))
    plant.restart()
    check_sound_after(plant)


def check_sound_after(plant: Zone) -> None:
    """Stop a zone and look at its folder."""
    plant.stop()
    check_sound(plant)
