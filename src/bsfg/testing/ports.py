"""Ports of the loopback for servers that are started, ended and started again on the same address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST = 10_000


class FreePorts:
    """Gives ports that nobody uses and that the system gives to nobody who asks for any port.

    A server must get its port back after a restart; were it one of those that the system hands out, a client's
    connection could sit on it by then. Processes that run side by side and know of each other take a part each.
    """

    def __init__(self) -> None:
        try:
            end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError):
            end = 32_768
        self._all = range(FIRST, max(end, FIRST + 1_000))
        self.share(0, 1)

    def share(self, part: int, parts: int) -> None:
        """From now on, give those of one part only."""
        self._own = self._all[part::parts]
        self._place = random.randrange(len(self._own))

    def next(self) -> int:
        """Give one; in order from a random place on, so that one not yet in use comes up again only after a round."""
        for _ in self._own:
            self._place = (self._place + 1) % len(self._own)
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", self._own[self._place]))
                return self._own[self._place]
        raise OSError("no port of the loopback is free")


OF_THIS_PROCESS = FreePorts()


def free_port() -> int:
    """Give a port of the loopback that this process may listen on, now and after restarts."""
    return OF_THIS_PROCESS.next()
