"""Group commit: many callers, one worker that makes all that wait durable with one sync."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from bsfg.errors import StorageClosed

Item = TypeVar("Item")
Answer = TypeVar("Answer")

WORKERS_MAX = 32
"""How many buffers of one storage are written at once; more wait for their turn."""


class Workers:
    """A few threads for many committers: one is begun when all others are busy, and none belongs to anybody."""

    def __init__(self, name: str, at_most: int = WORKERS_MAX) -> None:
        self._name, self._at_most = name, at_most
        self._due: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        # Later a process may be short of threads: with one of them everything goes on, if slower.
        self._begin()

    @property
    def are_awaited(self) -> bool:
        """Whether somebody waits for a thread."""
        return self._busy > len(self._threads)

    def run(self, work: Callable[[], None]) -> None:
        """Let the next free thread do some work."""
        with self._lock:
            self._busy += 1
            if len(self._threads) < min(self._busy, self._at_most):
                with contextlib.suppress(RuntimeError):
                    self._begin()
        self._due.put(work)

    def close(self) -> None:
        """End all threads when they have nothing more to do."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._due.put(None)
        for thread in threads:
            thread.join()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        while (work := self._due.get()) is not None:
            work()
            with self._lock:
                self._busy -= 1


MakeWorkers = Callable[[str, int], Workers]
"""Makes the threads of a storage by a name for them and how many there may be; a simulation has none."""


class Committer(Generic[Item, Answer]):
    """Runs ``process`` on everything that waits, in order, one group at a time, in whichever thread is free.

    ``process`` gets a non-empty list of items and gives one outcome for each: an answer or an exception. Callers of
    one event loop are woken together, and with them, by a true value, whoever ``others`` names after each commit.
    While nothing waits no thread is taken.
    """

    def __init__(
        self,
        workers: Workers,
        process: Callable[[Sequence[Item]], Sequence[Answer | BaseException]],
        *,
        weight: Callable[[Item], int] = lambda _: 1,
        max_weight: int = 1024,
        others: Callable[[], Sequence[asyncio.Future[bool]]] = lambda: (),
    ) -> None:
        self._workers, self._process, self._others = workers, process, others
        self._weight = weight
        self._max_weight = max_weight
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._entrance = threading.Lock()
        self._at_work = self._closing = False
        self._idle = threading.Event()

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Queue an item and give its outcome to wait for.

        A caller that gives up takes back his question, and not what is queued.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._entrance:
            if self._closing:
                raise StorageClosed("the storage is closed")
            self._waiting.append((item, future))
            begun, self._at_work = self._at_work, True
        if not begun:
            self._workers.run(self._work)
        return future

    async def close(self) -> None:
        """Finish what is queued."""
        with self._entrance:
            self._closing = True
            if not self._at_work:
                return
        await asyncio.to_thread(self._idle.wait)

    def _work(self) -> None:
        while group := self._next_group():
            try:
                outcomes = self._process([item for item, _ in group])
            except BaseException as error:  # whatever it is belongs to those who wait
                outcomes = [error] * len(group)
            others = self._others()
            _wake([*(future for _, future in group), *others], [*outcomes, *(True for _ in others)])
            if self._workers.are_awaited:
                # Others have waited longer than what came meanwhile.
                self._workers.run(self._work)
                return

    def _next_group(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Take what waits and fits into one commit; with nothing left the next caller begins the work anew."""
        group: list[tuple[Item, asyncio.Future[Answer]]] = []
        with self._entrance:
            total = 0
            while self._waiting:
                total += self._weight(self._waiting[0][0])
                if group and total > self._max_weight:
                    return group
                group.append(self._waiting.popleft())
            if not group:
                self._at_work = False
                if self._closing:
                    self._idle.set()
        return group


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


class Waiters:
    """Waiting tasks, each for one offset to be durable."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[bool]]] = []
        self._lock = threading.Lock()

    def add(self, offset: int) -> asyncio.Future[bool]:
        """Wait for an offset: give the future that becomes true when the offset is durable."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((offset, future))
        return future

    def drop(self, future: asyncio.Future[bool]) -> None:
        """Wait no longer."""
        with self._lock:
            self._waiting = [(offset, other) for offset, other in self._waiting if other is not future]

    def ready(self, end: int) -> list[asyncio.Future[bool]]:
        """Give those who wait for an offset below ``end``, to be woken; may be called from any thread."""
        if not self._waiting:
            return []
        with self._lock:
            ready = [future for offset, future in self._waiting if offset < end]
            self._waiting = [(offset, future) for offset, future in self._waiting if offset >= end]
        return ready

    def close(self, error: StorageClosed) -> None:
        """Tell everybody who still waits that nothing more will come."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)


def settle(future: asyncio.Future[bool], there: bool) -> None:
    """Tell one who waits whether what he waits for is there, unless he knows already."""
    if not future.done():
        future.set_result(there)
