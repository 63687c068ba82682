"""The futures of facts: each learns its own fate, whoever waits and however the answers come."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.answers import appended

from bsfg.errors import BsfgError, BufferFull, ConflictingDuplicate, InvalidArgument, InvalidFact, TimedOut
from bsfg.ports import Result
from bsfg.sdk.futures import BatchFuture, FactFuture, Outcome


def outcome(count: int, **options: object) -> Outcome:
    """Give an outcome of some facts with the ids m0, m1 and so on."""
    made = Outcome(**options)  # type: ignore[arg-type]
    made.close([f"m{row}" for row in range(count)])
    return made


def futures(of: Outcome) -> list[FactFuture]:
    """Give a future per fact."""
    return [FactFuture(of, row) for row in range(of.count)]


def test_an_answer_settles_all_facts_of_a_batch() -> None:
    """Each future gives the result, offset, id and digest of its own fact."""
    whole = outcome(3)
    first, second, third = futures(whole)
    assert not first.done()
    whole.settle(appended([7, 8, 3], [Result.INSERTED, Result.INSERTED, Result.ALREADY_EXISTS]))
    assert [first.result().offset, second.result().offset, third.result().offset] == [7, 8, 3]
    assert third.result().result == Result.ALREADY_EXISTS
    assert second.result().message_id == "m1"
    assert second.result().digest == bytes([8] * 32)
    assert whole.accepted


def test_a_conflict_fails_its_own_fact_alone() -> None:
    """The fact whose id is taken raises, naming the id and the fact that has it; its neighbours are fine."""
    whole = outcome(2)
    good, bad = futures(whole)
    whole.settle(appended([0, 4], [Result.INSERTED, Result.CONFLICT]))
    assert good.exception() is None
    with pytest.raises(ConflictingDuplicate, match="'m1' is taken by the fact at offset 4"):
        bad.result()


def test_ids_that_the_zone_derives_are_given() -> None:
    """A zone that derives ids answers with them, and the futures give those."""
    whole = outcome(2)
    whole.settle(appended([0, 1], ids=["x", "y"]))
    assert [future.result().message_id for future in futures(whole)] == ["x", "y"]
    parts = outcome(2)
    parts.settle(appended([5], ids=["z"]), np.array([1]))
    assert futures(parts)[1].result().message_id == "z"


def test_a_future_that_is_not_answered_in_time_says_so() -> None:
    """Waiting with a limit raises `TimedOut`, and the future can be asked again."""
    whole = outcome(1)
    (future,) = futures(whole)
    with pytest.raises(TimedOut):
        future.result(0.01)
    whole.settle(appended([1]))
    assert future.result(0).offset == 1


def test_a_thread_is_woken_by_the_answer() -> None:
    """A thread that blocks on a future goes on when the answer comes."""
    whole = outcome(2)
    waiting, seen = threading.Event(), []

    def wait() -> None:
        waiting.set()
        seen.append(futures(whole)[1].result(30).offset)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(30)
    whole.settle(appended([4]), np.array([0]))
    whole.settle(appended([5]), np.array([1]))
    thread.join(30)
    assert seen == [5]


async def test_a_coroutine_is_woken_by_the_answer() -> None:
    """Many coroutines may wait for facts of one batch, in the producer's loop or in another."""
    loop = asyncio.get_running_loop()
    whole = outcome(3, loop=loop)
    here = [asyncio.ensure_future(_offset(future)) for future in futures(whole)]

    async def elsewhere() -> int:
        return (await futures(whole)[2]).offset

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    await asyncio.sleep(0)
    whole.settle(appended([1, 2, 3]))
    assert await asyncio.gather(*here) == [1, 2, 3]
    assert await other == 3


async def _offset(future: FactFuture) -> int:
    return (await future).offset


async def test_waiting_hurries_the_batch() -> None:
    """Whoever waits for a fact that is still being gathered lets it go at once."""
    hurried: list[int] = []
    open_one = Outcome(asyncio.get_running_loop(), lambda: hurried.append(1))
    task = asyncio.ensure_future(_offset(FactFuture(open_one, 0)))
    await asyncio.sleep(0)
    assert hurried == [1]
    open_one.close(["m0"])
    open_one.settle(appended([9]))
    assert await task == 9


async def test_blocking_in_the_producers_loop_is_refused() -> None:
    """A blocking wait in the thread that must bring the answer would never end, so it raises."""
    whole = outcome(1, loop=asyncio.get_running_loop())
    with pytest.raises(InvalidArgument, match="would stop the producer"):
        futures(whole)[0].result()


def test_accepted_comes_before_the_answer() -> None:
    """With an outbox a fact is accepted once it is on disk; its answer comes later, or never."""
    whole = outcome(1)
    (future,) = futures(whole)
    with pytest.raises(TimedOut):
        future.wait_accepted(0.01)
    whole.accept()
    future.wait_accepted(0)
    assert not future.done()
    whole.fail(BufferFull("no"))
    with pytest.raises(BufferFull):
        future.wait_accepted(0)


def test_callbacks_are_called_once() -> None:
    """A callback is called when its own fact is done: at once if it is already."""
    whole, called = outcome(2), []
    first, second = futures(whole)
    first.add_done_callback(lambda future: called.append(("first", future.done())))
    whole.fail(InvalidFact("no"), [1])
    assert called == []
    second.add_done_callback(lambda future: called.append(("second", future.done())))
    whole.settle(appended([1]), np.array([0]))
    assert called == [("second", True), ("first", True)]


def test_a_callback_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """All facts of a batch learn their fate, whatever one of their callbacks raises; that is logged."""
    whole, called = outcome(2), list[FactFuture]()
    first, second = futures(whole)
    first.add_done_callback(lambda future: 1 / 0)  # type: ignore[arg-type]
    second.add_done_callback(called.append)
    whole.settle(appended([1, 2]))
    assert called == [second]
    assert "ZeroDivisionError" in caplog.text


def test_a_batch_future_gives_the_receipt_of_all_pieces() -> None:
    """A batch that travelled in pieces is answered as one, conflicts and repeats as results."""
    one, two = outcome(2), outcome(1)
    future = BatchFuture([one, two])
    one.settle(appended([5, 6]))
    assert not future.done()
    two.settle(appended([1], [Result.CONFLICT]))
    receipt = future.result(0)
    assert receipt.offsets.tolist() == [5, 6, 1]
    assert receipt.results.tolist() == [0, 0, Result.CONFLICT]
    assert future.digests().shape == (3, 32)
    assert future.message_ids() == ["m0", "m1", "m0"]


def test_a_refused_batch_says_how_much_was_stored() -> None:
    """When a piece is refused the batch raises, and tells how many facts the node has."""
    one, two = outcome(2), outcome(3)
    one.settle(appended([5, 6]))
    two.fail(InvalidFact("row 1: no"))
    with pytest.raises(InvalidFact) as refused:
        BatchFuture([one, two]).result(0)
    assert refused.value.details["stored"] == 2


def test_an_empty_batch_is_answered_at_once() -> None:
    """A batch without facts has an empty receipt."""
    future = BatchFuture([])
    assert future.done()
    assert len(future.result(0).offsets) == 0


@given(st.data())
def test_partial_answers_reach_the_right_facts(data: st.DataObject) -> None:
    """However the answers are cut and ordered, each fact learns exactly what was said of it."""
    count = data.draw(st.integers(1, 12))
    whole = outcome(count)
    rows = data.draw(st.permutations(range(count)))
    told: dict[int, int | BsfgError] = {}
    at = 0
    while at < count:
        size = data.draw(st.integers(1, count - at))
        part = sorted(rows[at : at + size])
        at += size
        if data.draw(st.booleans()):
            error = InvalidFact(str(part))
            whole.fail(error, part)
            told |= dict.fromkeys(part, error)
        else:
            whole.settle(appended([100 + row for row in part]), np.array(part))
            told |= {row: 100 + row for row in part}
        for row, future in enumerate(futures(whole)):
            assert future.done() == (row in told)
    assert whole.is_over()
    for row, future in enumerate(futures(whole)):
        expected = told[row]
        if isinstance(expected, BsfgError):
            assert future.exception(0) is expected
        else:
            assert future.result(0).offset == expected
