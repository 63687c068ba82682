"""What the event loop does itself and what it leaves to a thread: one rule for everything that takes as long as its
bytes are many.

Sealing, decoding, encoding and verifying take time by the byte. Whoever waits on the event loop meanwhile waits for
somebody else's bytes, so only small work is done there, where handing it over would cost more than doing it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

THREAD_BYTES = 64 << 10
"""Work on this many bytes or more leaves the event loop to others meanwhile."""

# Two, however many callers there are: the event loop then always has at least a third of the interpreter's time.
_WORKERS_MAX = 2

_DONE = object()

STEP_FACTS = 32
"""How many facts the event loop turns into Python's objects, and those into text, before others have their turn."""

LARGE_FACT_BYTES = 8 << 10
"""Facts of this size are copied more than looked at, which a thread does without the interpreter."""

_WORK_SECONDS = 0.001
_REST_SECONDS = 0.001

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class _Workers:
    """The threads that do large work; a process that was forked has its own."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Begin with threads of one's own."""
        self.pool = ThreadPoolExecutor(_WORKERS_MAX, thread_name_prefix="bsfg-work")


_WORKERS = _Workers()


async def by_size(
    size_bytes: int, work: Callable[Given, Answer], /, *args: Given.args, **kwargs: Given.kwargs
) -> Answer:
    """Do work on so many bytes and give its answer: here and now when they are few, else in a thread."""
    if size_bytes < THREAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_WORKERS.pool, partial(work, *args, **kwargs))


class LargeStep:
    """A step that takes too long for the event loop: what is to be done for it, in a thread."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self.work = work


Step = bytes | LargeStep


def step_of(size_bytes: int, work: Callable[Given, bytes], /, *args: Given.args, **kwargs: Given.kwargs) -> Step:
    """Do a step on so many bytes when they are few, else give it to be done in a thread."""
    if size_bytes < THREAD_BYTES:
        return work(*args, **kwargs)
    return LargeStep(partial(work, *args, **kwargs))


def all_at_once(steps: Iterable[Step]) -> bytes:
    """Do all steps here and now."""
    return b"".join(step.work() if isinstance(step, LargeStep) else step for step in steps)


class LoopTurns:
    """Work of Python's own, in steps of less than a millisecond on the event loop, one step of everybody in turn.

    A thread would be no help with it: it would fight with the event loop over the interpreter, and whoever has a dozen
    small things to do there would lose a dozen times. For the same reason the loop rests after every millisecond of
    such work: whatever other threads bring meanwhile, a call that came in or a commit that ended, waits for nobody.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._worked_seconds = 0.0

    async def joined(self, steps: Iterable[Step]) -> bytes:
        """Take all the steps, the large ones in a thread, and give what they made as one."""
        made = bytearray()
        for step in await self.of(steps):
            made += await by_size(THREAD_BYTES, step.work) if isinstance(step, LargeStep) else step
        return bytes(made)

    async def of(self, steps: Iterable[Answer]) -> list[Answer]:
        """Take all the steps and give what each of them made."""
        made: list[Answer] = []
        taking = iter(steps)
        while True:
            async with self._turn:
                begun = time.perf_counter()
                step = next(taking, _DONE)
                self._worked_seconds += time.perf_counter() - begun
                # Here others run, of whom none takes a step.
                await asyncio.sleep(self._rest_seconds())
            if step is _DONE:
                return made
            made.append(step)  # type: ignore[arg-type]

    def _rest_seconds(self) -> float:
        if self._worked_seconds < _WORK_SECONDS:
            return 0.0
        self._worked_seconds = 0.0
        return _REST_SECONDS
