"""Those who wait for an offset: tasks of any event loop, woken with those whose appends reached it."""

from __future__ import annotations

import asyncio
import threading

from bsfg.errors import StorageClosed


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
