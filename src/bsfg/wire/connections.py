"""How many connections there may be: as many as are configured, and never so many that the storage finds no descriptor.

A connection takes a descriptor from the moment it is accepted, long before a handshake tells whose it is. A flood of
silent ones must find a closed door while the logs still open their files; so part of what the system allows a process
is kept back, and the two listeners share the rest.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from bsfg.errors import PortUnavailable
from bsfg.wire.handshakes import host_of
from bsfg.wire.limits import WireLimits

KEPT_BACK = 256
"""Descriptors for files, threads and links, or half of all where there are fewer than twice as many."""

REFUSED_AT_ONCE = 64
"""How many connections too many are closed before others have their turn."""

ACCEPTED_AT_ONCE = 32
"""How many connections are taken before others have their turn; asyncio would take all that the system has."""

PAUSE_SECONDS = 0.5
"""How long nothing is accepted after the system had no descriptor; shorter than the second that asyncio waits."""

_WHY_NOT = {
    errno.EADDRINUSE: "another process uses the port",
    errno.EACCES: "this user may not use the port; those below 1024 are the system's",
    errno.EADDRNOTAVAIL: "that is no address of this machine",
}

USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What the system says when it can give no descriptor: to this process, or to any."""


def connections_allowed(limits: WireLimits, descriptors: int | None = None) -> int:
    """Give how many connections each listener takes, where a process may have so many descriptors."""
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = max(descriptors // 4, min(KEPT_BACK, descriptors // 2))
    return max(1, min(limits.connections, (descriptors - kept) // 2))


class Listening(socket.socket):
    """A listening socket that takes no more connections than it may, in all and from one address.

    What it gives counts until it is closed, whether or not a handshake ever ends. Connections too many are closed at
    once: they wait in no queue, and tell whoever opened them to come later. Where the system has no descriptor left, it
    says so once and then pauses: asyncio stops to listen for a second, but would first try, and log, a thousand times.
    """

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._most, self._most_of_one = most, max(1, most // 2)
        self._by_host: Counter[str] = Counter()
        self._pause_ends = 0.0
        self._in_a_row = 0

    @property
    def open(self) -> int:
        """How many of its connections are open."""
        return self._by_host.total()

    def accept(self) -> tuple[socket.socket, Any]:
        """Take the next connection; raises `BlockingIOError` when there is none that may be taken."""
        if time.monotonic() < self._pause_ends or self._in_a_row >= ACCEPTED_AT_ONCE:
            self._in_a_row = 0
            raise BlockingIOError
        for _ in range(REFUSED_AT_ONCE):
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno in USED_UP:
                    self._pause_ends = time.monotonic() + PAUSE_SECONDS
                raise
            host = host_of(address)
            if self.open < self._most and self._by_host[host] < self._most_of_one:
                self._by_host[host] += 1
                self._in_a_row += 1
                return _Accepted(accepted, partial(self._closed_one, host)), address
            accepted.close()
        raise BlockingIOError

    def _closed_one(self, host: str) -> None:
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]


class _Accepted(socket.socket):
    """A connection that says when it is closed."""

    def __init__(self, accepted: socket.socket, on_close: Callable[[], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        """Close it; repeats are harmless."""
        told, self._on_close = self._on_close, None
        super().close()
        if told is not None:
            told()


def listening_on(host: str, port: int, *, backlog: int = 1) -> socket.socket:
    """Listen, or say why that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        why = _WHY_NOT.get(error.errno or 0, error.strerror or str(error))
        raise PortUnavailable(f"cannot listen on {host}:{port}: {why}", host=host, port=port) from error
