"""A bound on each wait of a stream: only what is really silent for long ends, and nothing is left behind."""

import asyncio

import pytest

from bsfg.wire.grpc_calls import IdleTimer


async def test_a_wait_that_lasts_too_long_ends() -> None:
    """Silence ends with a timeout, and the next wait is bounded again."""
    timer = IdleTimer(0.01)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await timer.wait(asyncio.Event().wait())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_timer_that_rings_for_an_earlier_wait_leaves_a_young_one_alone() -> None:
    """Whoever began to wait since the timer was set is given all of his time."""
    timer, heard = IdleTimer(60), asyncio.Event()
    waiting = asyncio.create_task(timer.wait(heard.wait()))
    await asyncio.sleep(0)
    timer.close()
    timer._look()
    heard.set()
    assert await waiting
    timer.close()


async def test_nobody_is_disturbed_between_two_waits() -> None:
    """A timer that rings while nobody waits does nothing, and is set anew by the next wait."""
    timer = IdleTimer(0.01)
    assert await timer.wait(asyncio.sleep(0, 1)) == 1
    await asyncio.sleep(0.05)
    assert await timer.wait(asyncio.sleep(0, 2)) == 2
    with pytest.raises(TimeoutError):
        await timer.wait(asyncio.Event().wait())


async def test_who_is_cancelled_is_cancelled_and_not_late() -> None:
    """A cancellation from outside stays one, and errors of what is waited for pass as they are."""
    timer = IdleTimer(60)
    task = asyncio.create_task(timer.wait(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def failing() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await timer.wait(failing())
    timer.close()
    timer.close()
