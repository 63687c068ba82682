"""Production nodes on simulated machines: whatever happens to them, their promises hold, and a seed repeats a run."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from random import Random

import pytest
from tests.conftest import LONG_SOAK
from tests.simulated.campaign import Campaign
from tests.simulated.clockwork import StandstillError, VirtualLoop


def test_a_rough_half_hour() -> None:
    """A short run with power losses, cuts and tasks that take the links: nothing is lost, doubled or out of order."""
    campaign = Campaign(0, hours=0.5).run()
    assert campaign.crashes > 2 and campaign.facts > 100
    assert sum("lease_granted" in each for each in campaign.happened) > 2


@pytest.mark.soak
def test_two_nodes_keep_their_promises(soak_size: Callable[[int, int], int]) -> None:
    """Nothing is lost, doubled, overtaken or let go too early, and in the end everything has arrived."""
    first = time.time_ns() // 1_000_000 if LONG_SOAK else 1
    crashes = 0
    for seed in range(first, first + soak_size(2, 2_000)):
        campaign = Campaign(seed, hours=soak_size(1, 4) / 2)
        try:
            crashes += campaign.run().crashes
        except BaseException as error:
            error.add_note(f"make simulate SEEDS={seed} HOURS={campaign.hours:g}")
            raise
    assert crashes > 2


def test_a_seed_repeats_a_run() -> None:
    """Two runs of one seed do the same at the same moments."""
    one, other = (Campaign(11, hours=0.1).run() for _ in range(2))
    assert one.happened == other.happened
    assert one.happened and one.facts == other.facts > 0


def test_hours_pass_at_once() -> None:
    """The virtual clock jumps to the next timer, and a loop in which nothing can happen any more says so."""
    loop = VirtualLoop(Random(0))
    loop.run_until_complete(asyncio.sleep(36_000))
    assert 36_000 <= loop.time() < 36_001
    with pytest.raises(StandstillError):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_a_deadline_that_is_nearly_reached_comes() -> None:
    """Timers go off a moment early, and whoever then waits for the rest of his time must not wait for ever."""
    loop = VirtualLoop(Random(0))

    async def until(deadline: float) -> None:
        while (left_seconds := deadline - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), left_seconds)

    loop.run_until_complete(asyncio.sleep(1_769))
    for left_seconds in (1e-9, 5e-7, 1e-3):
        loop.run_until_complete(until(loop.time() + left_seconds))
    loop.close()
