"""Group commit: many callers, one thread that takes all that wait and makes it durable with one sync."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from bsfg.errors import StorageClosed

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_NOTHING: Any = object()


class Committer(Generic[Item, Answer]):
    """Runs ``process`` on everything that waits, in order, in one thread of its own.

    ``process`` gets a non-empty list of items and gives one outcome for each: an answer or an exception. Callers of
    one event loop are woken together, and with them, by a true value, whoever ``others`` names after each commit.
    """

    def __init__(
        self,
        name: str,
        process: Callable[[Sequence[Item]], Sequence[Answer | BaseException]],
        *,
        weight: Callable[[Item], int] = lambda _: 1,
        max_weight: int = 1024,
        others: Callable[[], Sequence[asyncio.Future[bool]]] = lambda: (),
    ) -> None:
        self._process, self._others = process, others
        self._weight = weight
        self._max_weight = max_weight
        self._waiting: SimpleQueue[tuple[Item, asyncio.Future[Answer]] | None] = SimpleQueue()
        self._entrance = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Queue an item and give its outcome to wait for.

        A caller that gives up takes back his question, and not what is queued.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._entrance:
            if self._closing:
                raise StorageClosed("the storage is closed")
            self._waiting.put((item, future))
        return future

    async def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._entrance:
            if not self._closing:
                self._waiting.put(None)
            self._closing = True
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        following = self._waiting.get()
        while following is not None:
            group = [following]
            following = self._join(group)
            try:
                outcomes = self._process([item for item, _ in group])
            except BaseException as error:  # whatever it is belongs to those who wait
                outcomes = [error] * len(group)
            others = self._others()
            _wake([*(future for _, future in group), *others], [*outcomes, *(True for _ in others)])
            if following is _NOTHING:
                following = self._waiting.get()

    def _join(self, group: list[tuple[Item, asyncio.Future[Answer]]]) -> Any:
        """Put to a group what waits and fits into the same commit; give what follows it."""
        total = self._weight(group[0][0])
        while not self._waiting.empty():
            # Nobody else takes anything, so what was there is still there.
            following = self._waiting.get()
            if following is None:
                return None
            total += self._weight(following[0])
            if total > self._max_weight:
                return following
            group.append(following)
        return _NOTHING


def _wake(futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[Any]) -> None:
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
