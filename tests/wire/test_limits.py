"""Limits: who is let in, how bytes under way are bounded, and streams of frames that keep their order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.site import until

from bsfg.errors import FrameInvalid, Overloaded
from bsfg.wire import limits
from bsfg.wire.frames import Pipelined
from bsfg.wire.grpc_calls import IdleTimer
from bsfg.wire.limits import STRANGERS, STRANGERS_PER_ADDRESS, Admission, AnswerRoom, ByteBudget, WireLimits


def test_too_many_requests_are_refused() -> None:
    """One caller cannot take all places, all callers together cannot take more than there are."""
    admission = Admission(WireLimits(concurrent_requests=3, concurrent_per_identity=2))
    with admission.enter("a"), admission.enter("a"):
        with pytest.raises(Overloaded) as caught, admission.enter("a"):
            pass
        assert caught.value.details["limit"] == "concurrent_per_identity"
        with admission.enter("b"):
            with pytest.raises(Overloaded) as caught, admission.enter("c"):
                pass
            assert caught.value.details["limit"] == "concurrent_requests"
        with admission.enter("c"):
            pass
    assert (admission.serving, admission.refused) == (0, 2)


async def test_places_are_given_back_after_a_failure() -> None:
    """A request that fails leaves its place."""
    admission = Admission(WireLimits(concurrent_requests=1))
    for _ in range(3):
        with pytest.raises(ValueError, match="no"), admission.enter("a"):
            raise ValueError("no")


async def test_bytes_wait_for_room_in_turn() -> None:
    """Who finds no room waits, and a small one does not overtake a large one for ever."""
    budget = ByteBudget(10)
    order: list[str] = []

    async def hold(name: str, size: int, release: asyncio.Event) -> None:
        async with budget.take(size):
            order.append(name)
            await release.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(hold("first", 8, first))]
    await until(lambda: order == ["first"])
    tasks += [asyncio.create_task(hold("large", 9, rest)), asyncio.create_task(hold("small", 1, rest))]
    await asyncio.sleep(0)
    assert order == ["first"]
    first.set()
    await until(lambda: len(order) == 3)
    assert order == ["first", "large", "small"]
    rest.set()
    await asyncio.gather(*tasks)
    assert budget.used == 0


async def test_more_than_all_there_is_still_passes() -> None:
    """A message larger than the whole budget gets all of it instead of waiting for ever."""
    budget = ByteBudget(10)
    assert await budget.acquire(1_000) == 10
    budget.release(10)


async def test_cancelled_waiters_take_nothing() -> None:
    """A waiter that gives up leaves no trace, whether it was served in the same moment or not."""
    budget = ByteBudget(10)
    held = await budget.acquire(10)
    waiting = [asyncio.create_task(budget.acquire(5)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    budget.release(held)
    waiting[1].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[2] == 5
    used = 5 + (5 if results[1] == 5 else 0)
    assert budget.used == used


class Work:
    """Frames that are finished by hand, and a record of what was begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.doing: dict[int, asyncio.Future[int]] = {}

    async def begin(self, frame: int) -> Awaitable[int]:
        """Begin a frame."""
        self.begun.append(frame)
        self.doing[frame] = asyncio.get_running_loop().create_future()
        return self.doing[frame]

    def answers(
        self, budget: ByteBudget, frames: AsyncIterator[int], *, window: int = 4, idle: float = 60.0
    ) -> AsyncIterator[int]:
        """Give the answers to such frames, each counting as one byte."""
        return Pipelined(self.begin, window_frames=window).answers(Counted(frames, budget, IdleTimer(idle)))


class Counted:
    """Frames of one byte each, held until somebody takes them over; they end with a silence."""

    def __init__(self, frames: AsyncIterator[int], budget: ByteBudget, idle: IdleTimer) -> None:
        self._frames, self._budget, self._idle = aiter(frames), budget, idle

    async def __anext__(self) -> int:
        """Give the next frame."""
        try:
            frame = await self._idle.wait(anext(self._frames))
        except TimeoutError:
            raise StopAsyncIteration from None
        await self._budget.acquire(1)
        return frame

    def take_over(self) -> Callable[[], None]:
        """Leave the byte to the caller."""
        return lambda: self._budget.release(1)


async def frames(count: int, *, silent: bool = False) -> AsyncIterator[int]:
    """Give numbered frames, and perhaps no end."""
    for number in range(count):
        yield number
    if silent:
        await asyncio.Event().wait()


@given(st.permutations(range(6)))
def test_answers_keep_the_order_of_the_frames(order: list[int]) -> None:
    """However the work ends, answers come in the order of the frames and each exactly once."""

    async def run() -> list[int]:
        work, budget = Work(), ByteBudget(100)
        answers = asyncio.create_task(_collected(work.answers(budget, frames(6), window=6)))
        await until(lambda: len(work.begun) == 6)
        for number in order:
            work.doing[number].set_result(number * 10)
        found = await answers
        assert budget.used == 0
        return found

    assert asyncio.run(run()) == [0, 10, 20, 30, 40, 50]


async def test_the_window_bounds_what_is_under_way() -> None:
    """No more frames are begun than the window and the bytes allow."""
    work, budget = Work(), ByteBudget(3)
    answers = asyncio.create_task(_collected(work.answers(budget, frames(10), window=50)))
    await until(lambda: len(work.begun) == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert work.begun == [0, 1, 2]
    for number in range(10):
        await until(lambda number=number: number in work.doing)  # type: ignore[misc]
        work.doing[number].set_result(number)
    assert await answers == list(range(10))


async def test_a_silent_stream_ends_after_its_answers() -> None:
    """A caller that sends nothing more gets what it is owed, then the end."""
    work, budget = Work(), ByteBudget(10)
    answers = asyncio.create_task(_collected(work.answers(budget, frames(2, silent=True), idle=0.05)))
    await until(lambda: len(work.begun) == 2)
    for number in range(2):
        work.doing[number].set_result(number)
    assert await answers == [0, 1]


async def test_a_caller_that_goes_leaves_nothing_behind() -> None:
    """When nobody waits for answers any more, the room is given back and what was begun may end as it likes."""
    work, budget = Work(), ByteBudget(10)
    answers = work.answers(budget, frames(9), window=2)
    asked: asyncio.Task[int] = asyncio.create_task(anext(answers))  # type: ignore[arg-type]
    await until(lambda: len(work.begun) >= 3)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await answers.aclose()  # type: ignore[attr-defined]
    assert budget.used == 0
    assert not work.doing[0].cancelled()
    work.doing[0].set_exception(ValueError("nobody hears this"))


async def test_work_that_only_waits_is_dropped_with_its_caller() -> None:
    """Coroutines run when it is their turn; those whose turn never comes are closed, and the room is given back."""
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    begun: list[int] = []

    async def waiting(frame: int) -> int:
        return frame if frame else await first

    async def begin(frame: int) -> Awaitable[int]:
        begun.append(frame)
        return waiting(frame)

    budget = ByteBudget(10)
    pipelined = Pipelined(begin, window_frames=2)
    answers = pipelined.answers(Counted(frames(9), budget, IdleTimer(60)))
    asked: asyncio.Task[int] = asyncio.create_task(anext(answers))  # type: ignore[arg-type]
    await until(lambda: len(begun) >= 3)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await answers.aclose()  # type: ignore[attr-defined]
    assert budget.used == 0


async def test_a_defect_ends_the_stream() -> None:
    """What nobody expected ends the stream with that error, after the answers before it."""

    async def begin(frame: int) -> Awaitable[int]:
        if frame == 2:
            raise ValueError("a defect")
        return _given(frame)

    budget = ByteBudget(10)
    pipelined = Pipelined(begin, window_frames=4)
    found: list[int] = []
    with pytest.raises(ValueError, match="a defect"):
        async for answer in pipelined.answers(Counted(frames(5), budget, IdleTimer(60))):
            found.append(answer)
    assert found == [0, 1]
    assert budget.used == 0


async def _given(value: int) -> int:
    return value


async def _collected(answers: AsyncIterator[int]) -> list[int]:
    return [answer async for answer in answers]


async def test_one_owners_queue_holds_up_nobody_else() -> None:
    """Who waits for his own bytes waits alone; who waits for those of all comes in turn."""
    budget = ByteBudget(10, owner_bytes=5)
    held = await budget.acquire(5, "greedy")
    waiting = [asyncio.create_task(budget.acquire(5, "greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(budget.acquire(4, "modest"), 60) == 4
    third = asyncio.create_task(budget.acquire(3, "third"))
    await asyncio.sleep(0)
    assert not third.done()
    budget.release(held, "greedy")
    await until(third.done)
    assert not any(each.done() for each in waiting)
    budget.release(4, "modest")
    await until(waiting[0].done)
    for each in waiting[1:]:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    budget.release(5, "greedy")
    budget.release(3, "third")
    assert budget.used == 0


def test_everybody_with_a_row_has_places_of_his_own() -> None:
    """However many requests others have under way, an identity finds a few places; strangers find only theirs."""
    admission = Admission(WireLimits(concurrent_requests=64, concurrent_per_identity=64))
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(admission.enter("greedy"))
        for _ in range(2):
            stack.enter_context(admission.enter("modest"))
        with pytest.raises(Overloaded), admission.enter("modest"):
            pass
        for number in range(STRANGERS):
            stack.enter_context(admission.enter_stranger(str(number // STRANGERS_PER_ADDRESS)))
        with pytest.raises(Overloaded), admission.enter_stranger("somebody else"):
            pass
        stack.enter_context(admission.enter("third"))
    with admission.enter_stranger("a"):
        pass
    assert (admission.serving, admission.refused) == (0, 2)


async def test_delays_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many answers are held back at once; the next one comes without delay."""
    admission = Admission(WireLimits())
    for _ in range(200):
        admission.delay_seconds("a", FrameInvalid("wrong"))
    sleeping = asyncio.create_task(admission.hold_back("a", FrameInvalid("wrong")))
    await until(lambda: admission.sleeping == 1)
    monkeypatch.setattr(limits, "SLEEPERS_MAX", 1)
    await admission.hold_back("a", FrameInvalid("wrong"))
    assert not sleeping.done()
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)
    assert admission.sleeping == 0


async def test_an_answer_gives_back_what_it_did_not_need() -> None:
    """Room is taken for all that may come; what is not sent is free at once, and the rest when the caller has it."""
    budget = ByteBudget(100, owner_bytes=80)
    room = AnswerRoom(budget, "reader")
    await room.take(80)
    room.keep(10)
    assert budget.used == 10
    async with budget.take(70, "reader"):
        assert budget.used == 80
    await room.take(30)
    assert budget.used == 30
    for _ in range(2):
        room.close()
        assert budget.used == 0
