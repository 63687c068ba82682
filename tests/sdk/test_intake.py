"""The entrance of a producer: batches by size, by time and by impatience, in bounded memory, from any thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import InvalidArgument, PeerUnreachable, StorageClosed
from bsfg.fact import Envelope, Fact, Message
from bsfg.rows import Row, row_of
from bsfg.sdk.intake import ROW_BYTES, BatchLimits, OpenBatch, ProducerIntake

FOREVER = 3600.0


def row(id: str = "m", data: bytes = b"1") -> Row:
    """Give the row of a fact."""
    return row_of(Message(Envelope("plant", "enterprise", 1, id), Fact("a:b", "c", data)))


def intake(*, deadline_seconds: float | None = None, **limits: object) -> ProducerIntake:
    """Give an intake in the running loop that lingers for ever unless told otherwise."""
    chosen = BatchLimits(**{"linger_seconds": FOREVER, **limits})  # type: ignore[arg-type]
    return ProducerIntake(chosen, asyncio.get_running_loop(), deadline_seconds=deadline_seconds)


def ids(gathering: OpenBatch | None) -> list[str]:
    """Give the ids of a gathered batch."""
    assert gathering is not None
    return [each[0] for each in gathering.rows]


async def test_a_full_batch_goes_at_once() -> None:
    """A batch goes when it has as many facts as it may; the next fact begins another."""
    entrance = intake(max_facts=2)
    for id in "abc":
        entrance.add("s", row(id))
    lane = entrance.lanes["s"]
    assert ids(await entrance.next(lane)) == ["a", "b"]
    assert entrance.take(lane)[0] is None


async def test_a_large_batch_goes_at_once() -> None:
    """A batch goes when it has as many bytes as it may."""
    entrance = intake(max_bytes=2 * ROW_BYTES)
    entrance.add("s", row("a", b"1" * ROW_BYTES))
    assert ids(await entrance.next(entrance.lanes["s"])) == ["a"]


async def test_a_batch_goes_after_lingering() -> None:
    """A batch that is not full goes after its time, with everything that came meanwhile."""
    entrance = intake(linger_seconds=0.02)
    entrance.add("s", row("a"))
    waiting = asyncio.create_task(entrance.next(entrance.lanes["s"]))
    await asyncio.sleep(0)
    entrance.add("s", row("b"))
    assert ids(await waiting) == ["a", "b"]


async def test_waiting_for_a_fact_lets_its_batch_go() -> None:
    """Somebody who waits is not kept lingering; facts sent in the same breath go along."""
    entrance = intake()
    first, _ = entrance.add("s", row("a")), entrance.add("s", row("b"))

    async def wait() -> None:
        with pytest.raises(PeerUnreachable):
            await first

    waiter = asyncio.create_task(wait())
    gathering = await entrance.next(entrance.lanes["s"])
    assert ids(gathering) == ["a", "b"]
    assert gathering is not None
    gathering.outcome.fail(PeerUnreachable("no"))
    await waiter


async def test_streams_have_lanes_of_their_own() -> None:
    """Facts of different streams never share a batch, and each new lane is announced once."""
    entrance, announced = intake(), []
    entrance.on_new_lane = lambda lane: announced.append(lane.stream)
    entrance.add("one", row("a"))
    entrance.add("two", row("b"))
    entrance.add("one", row("c"))
    entrance.hurry_all()
    assert ids(await entrance.next(entrance.lanes["one"])) == ["a", "c"]
    assert ids(await entrance.next(entrance.lanes["two"])) == ["b"]
    assert announced == ["one", "two"]


async def test_a_callers_batch_keeps_its_place() -> None:
    """A whole batch goes behind the facts that were sent before it and before those sent after it."""
    entrance = intake()
    entrance.add("s", row("a"))
    entrance.add_batch("s", [FactBatch.of_rows([row("b"), row("c")])])
    entrance.add("s", row("d"))
    entrance.hurry_all()
    lane = entrance.lanes["s"]
    first, second, third = [await entrance.next(lane) for _ in range(3)]
    assert (ids(first), ids(third)) == (["a"], ["d"])
    assert second is not None
    assert list(second.outcome.ids) == ["b", "c"]


async def test_a_full_queue_makes_senders_wait() -> None:
    """A coroutine and a thread wait for room, and go on when facts are safe."""
    entrance = intake(max_queued_bytes=ROW_BYTES)
    entrance.add("s", row("a"))
    assert entrance.is_full
    thread = asyncio.create_task(asyncio.to_thread(entrance.wait_for_room))
    task = asyncio.create_task(entrance.room())
    await asyncio.sleep(0)
    assert not task.done()
    assert not thread.done()
    entrance.hurry_all()
    gathering = await entrance.next(entrance.lanes["s"])
    assert gathering is not None
    entrance.finish(gathering.outcome, gathering.size_bytes)
    entrance.finish(gathering.outcome, gathering.size_bytes)
    await asyncio.gather(task, thread)
    assert entrance.queued_bytes == 0


async def test_what_waited_too_long_fails() -> None:
    """Facts that were never sent fail at their deadline; those that have time left stay."""
    entrance = intake(deadline_seconds=0.0, max_facts=1)
    future = entrance.add("s", row("a"))
    entrance._deadline_seconds = FOREVER
    late = entrance.add("s", row("b"))
    entrance.expire(entrance.lanes["s"], PeerUnreachable("gone"))
    assert future.exception(0) is not None
    assert not late.done()
    assert ids(await entrance.next(entrance.lanes["s"])) == ["b"]


async def test_a_closed_intake_gives_the_rest_and_takes_nothing() -> None:
    """After closing, what is there is given out, then nothing; sending raises."""
    entrance = intake()
    entrance.add("s", row("a"))
    lane = entrance.lanes["s"]
    entrance.close()
    assert ids(await entrance.next(lane)) == ["a"]
    assert await entrance.next(lane) is None
    with pytest.raises(StorageClosed, match="producer is closed"):
        entrance.add("s", row("b"))
    with pytest.raises(StorageClosed):
        entrance.add("other", row("b"))


async def test_many_threads_lose_nothing() -> None:
    """Facts that threads send at once all come out, each thread's own in its order."""
    entrance = intake(max_facts=7, linger_seconds=0.001)
    lanes: asyncio.Queue[object] = asyncio.Queue()
    entrance.on_new_lane = lanes.put_nowait

    def send(name: int) -> None:
        for number in range(200):
            entrance.add("s", row(f"{name}-{number}"))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    await lanes.get()
    found: list[str] = []
    while len(found) < 800:
        found += ids(await entrance.next(entrance.lanes["s"]))
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [id for id in found if id.startswith(f"{name}-")] == [f"{name}-{number}" for number in range(200)]


def test_limits_that_make_no_sense_are_refused() -> None:
    """A batch must be able to hold a fact."""
    with pytest.raises(InvalidArgument):
        BatchLimits(max_facts=0)


async def test_closing_ends_the_open_batch() -> None:
    """A fact that comes after the closing is refused also where a batch was still being gathered."""
    entrance = intake()
    entrance.add("s", row("a"))
    entrance.close()
    with pytest.raises(StorageClosed):
        entrance.add("s", row("b"))
    assert ids(await entrance.next(entrance.lanes["s"])) == ["a"]


def test_a_fact_that_meets_the_end_of_the_producer_is_no_defect() -> None:
    """A producer may close between a fact's place in the queue and the word to its loop: the fact keeps its future."""
    loop = asyncio.new_event_loop()
    entrance = ProducerIntake(BatchLimits(max_facts=1), loop, deadline_seconds=None)
    entrance.add("s", row("a"))
    loop.close()
    assert not entrance.add("s", row("b")).done()
    assert len(entrance.live()) == 2
