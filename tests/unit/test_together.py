"""What is asked while one call is under way goes in the next, in order, and everybody gets his own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bsfg.errors import DiskFull, LeaseLost
from bsfg.together import Together


class Calls:
    """A call that takes as long as it is held, and answers each item by its double."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.gate = asyncio.Event()

    async def work(self, items: Sequence[int]) -> list[int | BaseException]:
        """Answer; what is negative is refused by itself, and a nought ends everything."""
        self.seen.append(list(items))
        await self.gate.wait()
        if 0 in items:
            raise DiskFull("no room")
        return [LeaseLost("lost") if item < 0 else 2 * item for item in items]


async def test_what_comes_meanwhile_goes_together() -> None:
    """The first goes at once, the rest in one call after it, however many have come."""
    calls = Calls()
    together = Together(calls.work)
    asked = [asyncio.create_task(together.ask(1))]
    await asyncio.sleep(0.01)
    asked += [asyncio.create_task(together.ask(item)) for item in range(2, 50)]
    await asyncio.sleep(0.01)
    calls.gate.set()
    assert await asyncio.gather(*asked) == [2 * item for item in range(1, 50)]
    assert calls.seen == [[1], list(range(2, 50))]


async def test_no_call_has_more_than_it_may() -> None:
    """A node takes so many at once; the others follow."""
    calls = Calls()
    calls.gate.set()
    together = Together(calls.work, at_once=3)
    assert await asyncio.gather(*map(together.ask, range(1, 9))) == [2 * item for item in range(1, 9)]
    assert [len(items) for items in calls.seen] == [3, 3, 2]


async def test_an_error_is_for_whom_it_concerns() -> None:
    """One that is refused by itself leaves the others alone; a call that fails has failed for all in it."""
    calls = Calls()
    calls.gate.set()
    together = Together(calls.work)
    found = await asyncio.gather(*map(together.ask, (1, -1, 3)), return_exceptions=True)
    assert (found[0], type(found[1]), found[2]) == (2, LeaseLost, 6)
    found = await asyncio.gather(*map(together.ask, (1, 0)), return_exceptions=True)
    assert [type(each) for each in found] == [DiskFull, DiskFull]
    assert await together.ask(4) == 8


async def test_who_gives_up_leaves_the_others_their_answers() -> None:
    """His question goes on: it may have been sent already."""
    calls = Calls()
    together = Together(calls.work)
    first, second = asyncio.create_task(together.ask(1)), asyncio.create_task(together.ask(2))
    await asyncio.sleep(0.01)
    first.cancel()
    calls.gate.set()
    assert await second == 4
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_nobody_waits_for_work_that_was_ended() -> None:
    """Whoever ends the task that does it, as a closing event loop does, ends the waiting of all."""
    calls = Calls()
    together = Together(calls.work)
    asked = [asyncio.create_task(together.ask(1))]
    await asyncio.sleep(0.01)
    asked.append(asyncio.create_task(together.ask(2)))
    await asyncio.sleep(0.01)
    assert together._going is not None
    together._going.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found)
