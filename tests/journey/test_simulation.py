"""Random campaigns over two zones: whatever the network and the processes do, each fact arrives once and in order."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import LONG_SOAK
from tests.journey.simulation import Campaign
from tests.journey.zones import BACKENDS, Backend


def run_campaign(seed: int, backend: Backend, path: Path, steps: int) -> int:
    """Run one campaign and give how often a process died in it; a failure names the seed that repeats it."""
    campaign = Campaign(seed, backend, path / str(seed))
    try:
        asyncio.run(campaign.run(steps))
    except BaseException as error:
        error.add_note(f"campaign of seed {seed}, {steps} steps")
        raise
    return campaign.deaths


@pytest.mark.soak
@pytest.mark.parametrize(("name", "short", "steps"), [("memory", 10, 150), ("log", 2, 60)])
def test_nothing_lost_nothing_twice_in_order(
    name: str, short: int, steps: int, tmp_path: Path, soak_size: Callable[[int, int], int]
) -> None:
    """Under loss, repetition, reordering and death at any step, each direction delivers all facts, once, in order."""
    first = time.time_ns() // 1_000_000 if LONG_SOAK else 0
    count = soak_size(short, short * 500)
    deaths = sum(run_campaign(first + n, BACKENDS[name], tmp_path, steps) for n in range(count))
    assert deaths > count
