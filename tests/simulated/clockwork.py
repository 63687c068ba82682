"""Virtual time: an event loop without threads whose clock jumps to the next timer when there is nothing to do.

Hours pass as fast as their events can be worked off, and one seed makes everything happen again in the same order: what
production gives to a thread is done on the loop a little later, and how much later the seed decides.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from contextvars import ContextVar
from random import Random
from typing import Any

from bsfg.stores.shared.committer import Workers
from bsfg.testing.clock import START_UNIX_MS

THREAD_SECONDS_MAX = 0.004
"""How long work that a thread would do takes at most: a sync of a good disk."""


TURN_SECONDS = 1e-6
"""How long a turn of the loop takes that waits for nothing. Timers go off when less than this is left of their time."""

TURNS_MAX = 200_000
"""After so many turns of the loop in which nobody waited somebody waits for something without waiting."""


class StandstillError(Exception):
    """Nothing more can happen: everybody waits for somebody, or somebody lets no time pass."""


class Incarnation:
    """One life of a process: whatever is begun in its name ends with it."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    def kill(self) -> None:
        """End everything that is under way, in the order it was begun; nobody is asked, nothing is put in order."""
        self.alive = False
        for task in list(self.tasks.values()):
            task.cancel()


LIFE: ContextVar[Incarnation | None] = ContextVar("LIFE", default=None)
"""In whose name the present task runs."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on where it lies in memory."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: time is what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._turns = 0.0, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let the time pass that the loop would wait."""
        if timeout is None:
            raise StandstillError(f"nothing is left to happen after {self.now:.3f} s")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > TURNS_MAX:
            raise StandstillError(f"somebody runs in a circle at {self.now:.3f} s, and waits for nothing")
        self.now += timeout if timeout > 0 else TURN_SECONDS
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; ``rng`` decides how long the work of threads takes."""

    def __init__(self, rng: Random) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = TURN_SECONDS
        self._rng, self._numbers = rng, 0
        self.set_task_factory(self._numbered)

    def time(self) -> float:
        """Give the virtual time."""
        return self._jumping.now

    def later(self, work: Callable[[], object]) -> None:
        """Do what a thread would do, when it would."""
        self.call_later(self._rng.uniform(0.0, THREAD_SECONDS_MAX), work)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do it on the loop; as with a thread, it is done also when nobody waits for it any more."""
        del executor
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.later(work)
        return future

    def _numbered(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None) -> asyncio.Task[Any]:
        task = NumberedTask(coro, loop=loop, context=context)
        self._numbers += 1
        number = task.number = self._numbers
        life = LIFE.get() if context is None else context.get(LIFE)
        if life is not None:
            life.tasks[number] = task
            task.add_done_callback(lambda done: life.tasks.pop(number, None))
        return task


class LoopWorkers(Workers):
    """The threads of a storage without threads: one group after the other, on the loop."""

    def __init__(self, name: str, at_most: int) -> None:
        loop = asyncio.get_event_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        del name, at_most

    @property
    def are_awaited(self) -> bool:
        """Nobody waits for a thread."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Do it when a disk would have done it."""
        self._loop.later(work)

    def close(self) -> None:
        """There is nothing to end."""


class VirtualClock:
    """The clock of one machine in virtual time; ``skew_seconds`` is how far its wall clock is from the others'."""

    def __init__(self, loop: VirtualLoop, skew_seconds: float = 0.0) -> None:
        self._loop, self.skew_seconds = loop, skew_seconds

    def now_unix_ms(self) -> int:
        """Give the wall clock."""
        return START_UNIX_MS + round(1000 * (self._loop.time() + self.skew_seconds))

    def monotonic_ms(self) -> int:
        """Give the clock that nobody sets."""
        return round(1000 * self._loop.time())
