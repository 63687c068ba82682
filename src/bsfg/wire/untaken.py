"""Answers that were given and not taken: a caller decides how fast he reads, and not what he costs meanwhile.

HTTP/2 lets the receiving side say how much it wants to read, nothing included. A call whose answer waits for that is
not over: gRPC keeps its bytes, and counts it among all calls that there may be, long after whoever answered it is done.
So these calls count for whom they were answered, until he has his answer, and there are only so many of each. Who takes
nothing for long loses his connection. gRPC has no way to end one; the system has.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bsfg.wire.handshakes import host_port, plain_address

DESCRIPTORS = "/dev/fd"
LOOKS = 4
"""How often it is looked for old ones in the time that a caller has."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A call that was answered: when, for whom, to where, and what is given back when he has it."""

    since: float
    owner: str | None
    address: str
    release: Callable[[], None]


class Untaken:
    """The calls of one listener whose answers are on their way."""

    def __init__(self, seconds: float, port: Callable[[], int]) -> None:
        self._seconds, self._port = seconds, port
        self._calls: dict[Any, _Answered] = {}
        self._by_owner: Counter[str | None] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def of(self, owner: str) -> int:
        """Give how many answers somebody has not taken."""
        return self._by_owner[owner]

    def add(self, context: Any, owner: str | None, address: str, release: Callable[[], None] = lambda: None) -> None:
        """Take note of a call that was answered; ``release`` is called when it is over, whichever way."""
        if context in self._calls:
            return
        loop = asyncio.get_running_loop()
        self._calls[context] = _Answered(loop.time(), owner, address, release)
        self._by_owner[owner] += 1
        context.add_done_callback(self._over)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds / LOOKS, self._look)

    def _over(self, context: Any) -> None:
        found = self._calls.pop(context)
        self._by_owner[found.owner] -= 1
        if not self._by_owner[found.owner]:
            del self._by_owner[found.owner]
        found.release()

    def _look(self) -> None:
        self._timer = None
        if not self._calls:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds / LOOKS, self._look)
        old = {each.address for each in self._calls.values() if loop.time() - each.since >= self._seconds}
        if old and (self._ending is None or self._ending.done()):
            self._ending = loop.create_task(asyncio.to_thread(end_connections, self._port(), old))


def end_connections(port: int, peers: set[str]) -> None:
    """End the connections of this process to a port that come from some addresses, as gRPC writes those."""
    wanted = {plain_address(each) for each in peers}
    for connection in _connections():
        with connection:
            try:
                if connection.getsockname()[1] == port and host_port(connection.getpeername()) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                continue  # it listens, is gone by itself, or is of another kind


def _connections() -> Iterator[socket.socket]:
    """Give every socket of this process, each by a descriptor of its own."""
    for name in os.listdir(DESCRIPTORS):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()
