"""What bounds the bytes of a link: so many in a second, by the time of day, and urgent streams first."""

from __future__ import annotations

import asyncio
import math
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


Taken = list[tuple[float, str, int]]


def watched(
    seconds: float, names: Iterable[str], urgent: Collection[str] = (), urgent_seconds: float = math.inf
) -> Taken:
    """Let consumers take what they may for a time, each with an unending backlog; tell when, who and how much."""
    loop, taken = VirtualLoop(Random(7)), Taken()

    async def consume(throttle: Throttle, name: str, began: float) -> None:
        while name not in urgent or loop.time() - began < urgent_seconds:
            await throttle.wait(name)
            size_bytes = throttle.most(8 << 20)
            await asyncio.sleep(0.001)
            throttle.took(size_bytes, name)
            taken.append((loop.time() - began, name, size_bytes))

    async def run() -> None:
        began = loop.time()
        throttle = Throttle(WHOLE_DAY, lambda: at(12, seconds=loop.time() - began), urgent)
        tasks = [asyncio.create_task(consume(throttle, name, began)) for name in names]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return taken


def moved(seconds: float, names: Iterable[str], urgent: Collection[str] = ()) -> Counter[str]:
    """Count the bytes of each."""
    found = Counter[str]()
    for _, name, size_bytes in watched(seconds, names, urgent):
        found[name] += size_bytes
    return found


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


@pytest.mark.parametrize("others", [3, 9, 30])
def test_many_others_have_a_tenth_together(others: int) -> None:
    """Else as many backlogs as a zone has streams would leave nothing to the alarms."""
    taken = moved(200, ["alarms", *(f"bulk-{number}" for number in range(others))], urgent=["alarms"])
    assert len(taken) == 1 + others
    assert 0.85 <= taken["alarms"] / taken.total() <= 0.95


def test_others_have_all_again_when_the_urgent_are_idle() -> None:
    """However much they had taken before, and were to stand back for."""
    taken = watched(60, ["alarms", *(f"bulk-{number}" for number in range(30))], urgent=["alarms"], urgent_seconds=20)
    late = sum(size_bytes for when, name, size_bytes in taken if name != "alarms" and when >= 25)
    assert late >= 0.95 * RATE * 35


def test_many_streams_keep_the_bound_at_every_moment() -> None:
    """They begin together, when nothing is known of any; from then on they ask one after the other."""
    taken = [(when, size_bytes) for when, _, size_bytes in watched(120, map(str, range(50))) if when > 1]
    peak = max(sum(size for when, size in taken if begin <= when < begin + 5) for begin, _ in taken)
    assert peak <= RATE * (5 + BURST_SECONDS + 2 * ANSWER_SECONDS)


@pytest.mark.parametrize(
    ("bandwidth", "waited"),
    [
        (Bandwidth((BandwidthSpan(6 * 60, 18 * 60, RATE),)), 10),
        (Bandwidth((BandwidthSpan(6 * 60, 18 * 60, RATE), BandwidthSpan(18 * 60, 6 * 60, 100 * RATE))), 19.9),
        (Bandwidth((BandwidthSpan(6 * 60, 18 * 60, 100 * RATE), BandwidthSpan(18 * 60, 6 * 60, RATE))), 20),
    ],
    ids=["none", "faster", "slower"],
)
def test_nobody_waits_longer_than_the_time_of_the_day_says(bandwidth: Bandwidth, waited: float) -> None:
    """Who waits for much when the bound is lifted has waited enough, as all behind him; what is owed is bytes."""
    loop = VirtualLoop(Random(7))

    async def run() -> list[float]:
        began, ended = loop.time(), list[float]()
        throttle = Throttle(bandwidth, lambda: at(17, 59, 50 + loop.time() - began))
        rate = bandwidth.at(at(17))
        assert rate is not None
        throttle.took(1_000 * RATE if rate == RATE else 20 * rate)

        async def wait(name: str) -> None:
            await throttle.wait(name)
            ended.append(loop.time() - began)

        await asyncio.gather(*(wait(name) for name in "abc"))
        return ended

    try:
        ended = loop.run_until_complete(run())
    finally:
        loop.close()
    assert ended[0] == pytest.approx(waited, abs=0.2) and ended[-1] <= ended[0] + 1


def test_whoever_gives_up_waiting_leaves_the_turn_to_others() -> None:
    """A link that is stopped while it waits holds up no other stream."""
    loop = VirtualLoop(Random(7))

    async def run() -> float:
        began = loop.time()
        throttle = Throttle(WHOLE_DAY, lambda: at(12, seconds=loop.time() - began))
        throttle.took(10 * RATE)
        first, second = (asyncio.create_task(throttle.wait(name)) for name in "ab")
        await asyncio.sleep(1)
        first.cancel()
        await second
        return loop.time() - began

    try:
        assert loop.run_until_complete(run()) == pytest.approx(10, abs=0.2)
    finally:
        loop.close()


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
