"""What the event loop does itself and what it leaves to a thread: one rule for everything that takes as long as its
bytes are many.

Sealing, decoding, encoding and verifying take time by the byte. Whoever waits on the event loop meanwhile waits for
somebody else's bytes, so only small work is done there, where handing it over would cost more than doing it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

THREAD_BYTES = 64 << 10
"""Work on this many bytes or more leaves the event loop to others meanwhile."""

# Two, however many callers there are: the event loop then always has at least a third of the interpreter's time.
_WORKERS_MAX = 2

_DONE = object()

STEP_FACTS = 8
"""How many facts the event loop turns into Python's objects, and those into text, before others have their turn."""

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


class LoopTurns:
    """Work of Python's own, in steps of about a millisecond on the event loop, one step of everybody in turn.

    A thread would be no help with it: it would fight with the event loop over the interpreter, and whoever has a dozen
    small things to do there would lose a dozen times.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def of(self, steps: Iterable[Answer]) -> list[Answer]:
        """Take all the steps and give what each of them made."""
        made: list[Answer] = []
        taking = iter(steps)
        while True:
            async with self._turn:
                step = next(taking, _DONE)
                # Here others run, of whom none takes a step.
                await asyncio.sleep(0)
            if step is _DONE:
                return made
            made.append(step)  # type: ignore[arg-type]
