"""How many connections there may be, and the handshakes that led to nothing."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
import struct
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote

from bsfg.errors import PortUnavailable
from bsfg.wire.limits import WireLimits
from bsfg.wire.tls import failure_of

HTTP, GRPC = "http", "grpc"
LOOK_SECONDS = 1.0
READ_SECONDS = 0.05
"""How often the table of connections is read at most: a flood costs no more than this."""

SETTLED_SECONDS = 60.0
"""How often it is read while nobody connects and all who are connected have called."""

BEGUN_PER_SECOND = 100.0
BEGUN_AT_ONCE = 20
"""How many handshakes of the HTTP listener may begin at once, and a second after that; each, with what is asked over
it, takes some milliseconds."""

LATE_SECONDS_MOST = 0.05
"""How long the next one waits at most because the event loop has more to do than it can."""

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"

Refused = Callable[[str, str, str], None]
"""Takes the listener, where a refused handshake came from, and why."""

Counted = Callable[[str, str], None]
"""Takes the listener and what was counted: begun, refused or called."""


class Handshakes:
    """What is noticed of the handshakes of one node, and who wants to know it."""

    def __init__(self) -> None:
        self._refused: Refused = lambda listener, address, reason: None
        self._counted: Counted = lambda listener, what: None

    def tell(self, refused: Refused, counted: Counted) -> None:
        """Say who is told of refused handshakes, and who counts; the latter may be called in any thread."""
        self._refused, self._counted = refused, counted

    def counted(self, listener: str, what: str) -> None:
        """Count something."""
        self._counted(listener, what)

    def refused(self, listener: str, address: str, reason: str) -> None:
        """Count a handshake that was refused, and tell of it."""
        self._counted(listener, "refused")
        self._refused(listener, address, reason)


class PacedConnection(asyncio.Protocol):
    """A connection of the HTTP listener whose handshake has not begun: nothing is read of it, or kept for it."""

    def __init__(self, pace: HandshakePace, tls: Callable[[], ObservedTls], handshakes: Handshakes) -> None:
        self._pace, self._tls, self._handshakes = pace, tls, handshakes
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for its turn, which may be at once."""
        self._transport = transport
        self._transport.pause_reading()
        self._pace.wait(self, host_of(transport.get_extra_info("peername")))

    def begin(self) -> None:
        """Hand the connection on to TLS."""
        tls = self._tls()
        self._transport.set_protocol(tls)
        tls.connection_made(self._transport)
        self._transport.resume_reading()

    def give_up(self) -> None:
        """Close the connection, for which there was no turn in time."""
        self._handshakes.counted(HTTP, "begun")
        address = host_port(self._transport.get_extra_info("peername"))
        self._handshakes.refused(HTTP, address, "too many others began one")
        self._transport.abort()


class HandshakePace:
    """When handshakes begin: some at once, then so many a second, and the hosts that want one take turns.

    The longest wait is that of a handshake itself: who has waited for longer has gone, or would go before the end.
    """

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._waiting: OrderedDict[str, deque[tuple[float, PacedConnection]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def wait(self, paced: PacedConnection, host: str) -> None:
        """Let a connection begin when it is its turn, which may be at once."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._timer is None and self._due <= now:
            # What was not begun in quiet times may be begun at once, up to a bound.
            self._due = max(self._due, now - BEGUN_AT_ONCE / BEGUN_PER_SECOND) + 1 / BEGUN_PER_SECOND
            paced.begin()
            return
        self._waiting.setdefault(host, deque()).append((now, paced))
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._turn)

    def close(self) -> None:
        """Give up all who wait."""
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            self._next()[1].give_up()

    def _turn(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        now = loop.time()
        # A loop that comes late has enough to do: it gets as long again, and nothing is made up for.
        late_seconds = min(now - self._due, LATE_SECONDS_MOST)
        while self._waiting:
            since, paced = self._next()
            if now - since <= self._longest_seconds:
                self._due = now + max(1 / BEGUN_PER_SECOND, late_seconds)
                paced.begin()
                break
            paced.give_up()
        if self._waiting:
            self._timer = loop.call_at(self._due, self._turn)

    def _next(self) -> tuple[float, PacedConnection]:
        host, queue = self._waiting.popitem(last=False)
        first = queue.popleft()
        if queue:
            self._waiting[host] = queue
        return first


class ObservedTls(SSLProtocol):
    """The TLS of one connection of the HTTP listener, which tells how its handshake ended."""

    max_size = 64 * 1024
    """The buffer that each connection has, four records of TLS; a quarter of asyncio's own, of which 1,000 are many."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        handshakes: Handshakes,
        timeout_seconds: float,
    ) -> None:
        # Nobody waits for the handshake: whoever serves the connection is told when it is there.
        begin: Any = super().__init__
        begin(loop, protocol, context, None, server_side=True, ssl_handshake_timeout=timeout_seconds)
        self._handshakes, self._protocol, self._address = handshakes, protocol, ""

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake."""
        self._address = host_port(transport.get_extra_info("peername"))
        self._handshakes.counted(HTTP, "begun")
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell of a handshake that did not come to its end: whoever serves the connection never heard of it."""
        if getattr(self._protocol, "transport", None) is None:
            self._handshakes.refused(HTTP, self._address, reason_of(exc))
        super().connection_lost(exc)


def reason_of(error: BaseException | None) -> str:
    """Say in a few words, none of them the caller's, why a handshake came to nothing."""
    if isinstance(error, ssl.SSLError):
        return failure_of(error)
    if isinstance(error, ConnectionAbortedError | TimeoutError):
        return "it took too long"
    return "it went before the end"


class GrpcHandshakes:
    """The beginnings of gRPC's handshakes, and the calls that show which of them came to something."""

    def __init__(self, handshakes: Handshakes, port: Callable[[], int]) -> None:
        self._handshakes, self._port = handshakes, port
        self._lock = Lock()
        self._begun: dict[str, None] = {}
        self._called: set[str] = set()
        self._read_at = 0.0
        self._count = 0
        self._all_called = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take note of a handshake that begins; called by gRPC in a thread of its own."""
        self._handshakes.counted(GRPC, "begun")
        with self._lock:
            is_due = (now := time.monotonic()) - self._read_at >= READ_SECONDS
            self._read_at = now if is_due else self._read_at
        if is_due:
            self._note(connected(self._port()))
        with self._lock:  # last of all: who has seen this number has seen the note, and takes nobody new for settled
            self._count += 1

    def called(self, address: str) -> None:
        """Take note of a call from an address, as gRPC writes it."""
        if address not in self._called:
            self._called.add(address)
            self._handshakes.counted(GRPC, "called")

    def start(self) -> None:
        """Begin to look who is gone again."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Tell of the connections that are gone without a call."""
        # What comes while the table is read is for the next look.
        with self._lock:
            begun = list(self._begun)
        before = {each: plain_address(each) for each in self._called}
        here = await asyncio.to_thread(connected, self._port())
        called = {plain_address(each) for each in self._called}
        for each in (each for each in begun if each not in here):
            with self._lock:
                self._begun.pop(each, None)
            if each not in called:
                self._handshakes.refused(GRPC, each, "it was refused, or went without a call")
        self._called -= {each for each, address in before.items() if address not in here}
        self._note(here)
        self._all_called = called.issuperset(here)

    def _note(self, here: set[str]) -> None:
        with self._lock:
            for each in here:
                self._begun.setdefault(each)

    async def _run(self) -> None:
        seen, looked_at = 0, 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            # The system takes milliseconds to write its table. Where nobody connects, and all who are connected have
            # called, it would tell only which of those are gone.
            is_settled = self._count == seen and self._all_called
            if not is_settled or time.monotonic() - looked_at >= SETTLED_SECONDS:
                seen, looked_at = self._count, time.monotonic()
                await self.look()


def connected(port: int) -> set[str]:
    """Give the other ends of the open connections to a port of this machine; none where the system does not tell."""
    found = set()
    local = f":{port:04X} "
    for path in TABLES:
        try:
            lines = path.read_text("ascii").splitlines()
        except OSError:
            continue
        # A flood makes the table long, and whoever reads it keeps all others from the interpreter meanwhile.
        for fields in (line.split(maxsplit=4) for line in lines if local in line):
            if fields[3] == _ESTABLISHED and fields[1].endswith(local[:-1]):
                host, _, other = fields[2].rpartition(":")
                found.add(f"{_address(host)}:{int(other, 16)}")
    return found


@lru_cache(maxsize=1_024)
def _address(text: str) -> str:
    """Read an address of the system's table: words of four bytes in the order of this machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def plain_address(peer: str) -> str:
    """Give an address that gRPC has written, ``ipv4:10.0.0.7:1234`` or ``ipv6:%5B::1%5D:1234``, in plain form."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return peer
    return f"{getattr(address, 'ipv4_mapped', None) or address}:{port}"


def host_of(name: Any) -> str:
    """Give the host at the other end of a connection; with IPv6 its network, in which one host has any address."""
    host = str(name[0]) if isinstance(name, tuple) and name else "somewhere"
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def host_port(name: Any) -> str:
    """Give the other end of a connection, as the system tells it, in plain form."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "somewhere"
    return plain_address(f"tcp:{name[0]}:{name[1]}") if ":" in str(name[0]) else f"{name[0]}:{name[1]}"


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
