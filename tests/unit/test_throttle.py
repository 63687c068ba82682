"""What bounds the bytes of a link: so many in a second, by the time of day, and urgent streams first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from random import Random

import pytest
from tests.simulated.clockwork import VirtualLoop

from bsfg.throttle import ANSWER_SECONDS, BURST_SECONDS, Bandwidth, BandwidthSpan, Throttle

RATE = 100_000
WHOLE_DAY = Bandwidth((BandwidthSpan(0, 0, RATE),))
SHIFT = Bandwidth((BandwidthSpan(6 * 60, 18 * 60, RATE), BandwidthSpan(22 * 60, 6 * 60, 10 * RATE)))


def at(hours: int, minutes: int = 0, seconds: float = 0) -> int:
    """Give a moment of some day."""
    return 20_000 * 86_400_000 + int(1000 * (3600 * hours + 60 * minutes + seconds))


@pytest.mark.parametrize(
    ("moment", "rate"),
    [
        (at(5, 59, 59.999), 10 * RATE),
        (at(6), RATE),
        (at(17, 59, 59), RATE),
        (at(18), None),
        (at(21, 59, 59), None),
        (at(22), 10 * RATE),
        (at(0), 10 * RATE),
    ],
)
def test_the_time_of_day_decides(moment: int, rate: int | None) -> None:
    """A span begins with its first minute, ends before its last, and may go past midnight."""
    assert SHIFT.at(moment) == rate
    assert Bandwidth().at(moment) is None
    assert WHOLE_DAY.at(moment) == RATE


def moved(seconds: float, names: Iterable[str], urgent: Collection[str] = ()) -> Counter[str]:
    """Let consumers take what they may for a time, each with an unending backlog; count the bytes of each."""
    loop, taken = VirtualLoop(Random(7)), Counter[str]()

    async def consume(throttle: Throttle, name: str) -> None:
        while True:
            await throttle.wait(name)
            size_bytes = throttle.most(8 << 20)
            await asyncio.sleep(0.001)
            throttle.took(size_bytes, name)
            taken[name] += size_bytes

    async def run() -> None:
        began = loop.time()
        throttle = Throttle(WHOLE_DAY, lambda: at(12, seconds=loop.time() - began), urgent)
        tasks = [asyncio.create_task(consume(throttle, name)) for name in names]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return taken


def test_streams_share_what_there_is() -> None:
    """All of it is used, no more, and nobody is left out."""
    taken = moved(100, "abc")
    assert 0.95 * RATE * 100 <= taken.total() <= RATE * (100 + BURST_SECONDS + 3 * ANSWER_SECONDS)
    assert min(taken.values()) >= taken.total() / 5


def test_urgent_streams_come_first() -> None:
    """While they have facts to wait for the others have about a tenth, which is not nothing; alone they have all."""
    taken = moved(100, ("alarms", "bulk"), urgent=["alarms"])
    assert 0.95 * RATE * 100 <= taken.total() <= RATE * (100 + BURST_SECONDS + 2 * ANSWER_SECONDS)
    assert 0.05 <= taken["bulk"] / taken.total() <= 0.15
    assert moved(100, ["bulk"], urgent=["alarms"])["bulk"] >= 0.95 * RATE * 100


def test_other_times_have_no_bound() -> None:
    """Nobody waits, and nobody asks for less."""
    loop = VirtualLoop(Random(7))

    async def run() -> float:
        throttle = Throttle(SHIFT, lambda: at(19))
        throttle.took(1 << 40)
        await throttle.wait("anybody")
        assert throttle.most(8 << 20) == 8 << 20
        return loop.time()

    try:
        began = loop.time()
        assert loop.run_until_complete(run()) == pytest.approx(began, abs=0.01)
    finally:
        loop.close()
