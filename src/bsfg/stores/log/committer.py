"""Group commit: many callers, one thread that takes all that wait and makes it durable with one sync."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from bsfg.errors import StorageClosed

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Committer(Generic[Item, Answer]):
    """Runs ``process`` on everything that waits, in order, in one thread of its own.

    ``process`` gets a non-empty list of items and gives one outcome for each: an answer or an exception. Callers of
    one event loop are woken together.
    """

    def __init__(
        self,
        name: str,
        process: Callable[[Sequence[Item]], Sequence[Answer | BaseException]],
        *,
        weight: Callable[[Item], int] = lambda _: 1,
        max_weight: int = 1024,
    ) -> None:
        self._process = process
        self._weight = weight
        self._max_weight = max_weight
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._changed = threading.Condition(threading.Lock())
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def submit(self, item: Item) -> Answer:
        """Queue an item and wait for its outcome."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise StorageClosed("the storage is closed")
            self._waiting.append((item, future))
            self._changed.notify()
        # A caller that gives up does not take back what is queued: the future is shielded from its cancellation, and
        # an error that then nobody waits for is looked at, so that asyncio does not report it as forgotten.
        future.add_done_callback(_look_at)
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                group = self._take()
            try:
                outcomes = self._process([item for item, _ in group])
            except BaseException as error:  # whatever it is belongs to those who wait
                outcomes = [error] * len(group)
            _wake([future for _, future in group], outcomes)

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Take as much as fits one commit, and at least one item."""
        total = count = 0
        for item, _ in self._waiting:
            total += self._weight(item)
            if count and total > self._max_weight:
                break
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group


def _look_at(future: asyncio.Future[Answer]) -> None:
    if not future.cancelled():
        future.exception()


def _wake(futures: Sequence[asyncio.Future[Answer]], outcomes: Sequence[Answer | BaseException]) -> None:
    loops: dict[asyncio.AbstractEventLoop, list[int]] = {}
    for index, future in enumerate(futures):
        loops.setdefault(future.get_loop(), []).append(index)
    for loop, indices in loops.items():

        def settle(indices: list[int] = indices) -> None:
            for index in indices:
                future, outcome = futures[index], outcomes[index]
                if future.done():
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            continue  # the loop was closed: nobody waits any more
