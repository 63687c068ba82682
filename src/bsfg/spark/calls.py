"""Calls to nodes from Spark's Python processes, which know nothing of event loops.

gRPC does not survive a fork, and Spark's Python workers are forked. So nothing of it exists before the first call of a
process: the loop, its thread and the connections are made then, are kept for the tasks that this process works on
later, and are never taken over by a child.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from bsfg.errors import BsfgError, InvalidArgument, PeerUnreachable

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection
    from bsfg.wire.tls import TlsFiles

T = TypeVar("T")

AHEAD = 2
"""How many items of a stream are fetched before they are asked for."""

BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS = 0.1, 2.0
PEM = "-----BEGIN "


@dataclass(frozen=True, slots=True)
class Access:
    """A node's address and the caller's certificate; each of the three PEM parts is a path or the content itself."""

    address: str
    ca: str | None = field(default=None, repr=False)
    certificate: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        parts = (self.ca, self.certificate, self.key)
        if any(parts) and not all(parts):
            raise InvalidArgument("TLS needs all three of the options ca, cert and key")
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise InvalidArgument(f"address {self.address!r} is not of the form host:port")

    @staticmethod
    def of(address: str, files: TlsFiles | None, server_name: str | None) -> Access:
        """Give the way to a node by the paths of certificate files, which stay right wherever they are used."""
        if files is None:
            return Access(address)
        ca, certificate, key = (str(path.absolute()) for path in (files.ca, files.certificate, files.key))
        return Access(address, ca, certificate, key, server_name)

    def with_contents(self) -> Access:
        """Give the same with the certificates themselves in place of their paths."""
        if self.ca is None or self.certificate is None or self.key is None:
            return self
        ca, certificate, key = (_content(part).decode() for part in (self.ca, self.certificate, self.key))
        return replace(self, ca=ca, certificate=certificate, key=key)

    @property
    def watched(self) -> Any:
        """The certificates as connections use them, None without TLS."""
        return self._watched()

    def connect(self) -> Connection:
        """Make a connection for the running event loop; nothing is sent before its first call."""
        from bsfg.wire.connection import Connection

        return Connection(self.address, watched=self._watched(), server_name=self.server_name)

    def _watched(self) -> Any:
        from bsfg.wire.tls import Material, TlsFiles, Watched

        if self.ca is None or self.certificate is None or self.key is None:
            return None
        parts = (self.ca, self.certificate, self.key)
        if not any(PEM in part for part in parts):
            return Watched(TlsFiles(*map(Path, parts)))
        return _Unchanging(Material(*(_content(part) for part in parts)))


def _content(part: str) -> bytes:
    if PEM in part:
        return part.encode()
    try:
        return Path(part).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{part} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Unchanging:
    """What `bsfg.wire.tls.Watched` is for files, for content that was given as such."""

    material: Any

    def refresh(self) -> int:
        return 1


class Calls:
    """The event loop of this process, in a thread of its own, and its connections."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._connections: dict[Access, Connection] = {}
        Thread(target=self.loop.run_forever, name="bsfg-calls", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def connection(self, access: Access) -> Connection:
        """Give the connection to a node, the same for everybody in this process; it is renewed by itself."""
        found = self._connections.get(access)
        if found is None:
            found = self._connections[access] = access.connect()
        return found

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Give the items of an asynchronous generator, the next ones being fetched meanwhile."""
        queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue(AHEAD)
        pump = asyncio.run_coroutine_threadsafe(_pump(items, queue), self.loop)
        try:
            while True:
                item, end = self.run(queue.get())
                if end is not None:
                    break
                yield item  # type: ignore[misc]
        finally:
            pump.cancel()
        if not isinstance(end, StopAsyncIteration):
            raise end


async def _pump(items: AsyncIterator[T], queue: asyncio.Queue[tuple[T | None, BaseException | None]]) -> None:
    end: BaseException = StopAsyncIteration()
    try:
        async with aclosing(items) as closing:  # type: ignore[type-var]
            async for item in closing:
                await queue.put((item, None))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # nobody asks for more
        # So gRPC ends the calls of a connection that is closed, as an old one is some time after certificates changed.
        end = PeerUnreachable("the call was ended here before its end")
    except Exception as error:
        end = error
    await queue.put((None, end))


_of_process: dict[int, Calls] = {}


def calls() -> Calls:
    """Give the calls of this process, made when they are first needed."""
    pid = os.getpid()
    if pid not in _of_process:
        _of_process.clear()
        _of_process[pid] = Calls()
    return _of_process[pid]


@dataclass(slots=True)
class Patience:
    """How long errors that may pass are borne; every success starts the time anew."""

    seconds: float
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic
    _since: float | None = None
    _pause: float = BACKOFF_FIRST_SECONDS

    def succeeded(self) -> None:
        """Forget the errors so far."""
        self._since, self._pause = None, BACKOFF_FIRST_SECONDS

    def bear(self, error: BsfgError) -> None:
        """Wait a little before the next try, or raise the error when it will not pass or lasts too long."""
        now = self.now()
        if self._since is None:
            self._since = now
        if not error.retryable or now + self._pause - self._since > self.seconds:
            raise error
        self.sleep(self._pause)
        self._pause = min(2 * self._pause, BACKOFF_MAX_SECONDS)

    def insist(self, work: Callable[[], T]) -> T:
        """Do something until it succeeds or patience ends."""
        while True:
            try:
                result = work()
            except BsfgError as error:
                self.bear(error)
            else:
                self.succeeded()
                return result
