"""What lies between two zones: a TCP proxy that can cut, stall, throttle, and break connections in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

PIECE_BYTES = 16 << 10
RESET = struct.pack("ii", 1, 0)
"""Linger on, for no time: closing such a socket sends a reset."""


class Proxy:
    """Forwards connections to a port of this machine, or to a socket in its file system.

    It runs in a thread of its own, whatever the test does.

    ``accepted`` counts connections, ``carried_bytes`` what came from the server.
    """

    def __init__(self, target: int | Path) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgotten: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._bytes_per_second: float | None = None
        self._reset_after_bytes: int | None = None
        self.accepted = self.carried_bytes = self.resets = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._do(self._listen(0))

    # What a network can do; each returns when it is done.

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        self._do(self._cut())

    def mend(self) -> None:
        """Accept connections again and carry everything, as fast as it comes."""
        self._do(self._mend())

    def stall(self) -> None:
        """Accept connections but carry nothing more, in either direction."""
        self._soon(self._flowing.clear)

    def forget(self) -> None:
        """Swallow whatever comes over the connections of this moment, as a firewall that lost its state does."""
        self._soon(lambda: self._forgotten.update(self._tasks))

    def throttle(self, bytes_per_second: float) -> None:
        """Carry what comes from the server slowly."""
        self._bytes_per_second = bytes_per_second

    def reset_after(self, count_bytes: int) -> None:
        """Break every connection with a reset once the server has sent so many bytes over it."""
        self._reset_after_bytes = count_bytes

    def close(self) -> None:
        """End everything."""
        self._do(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _soon(self, work: Callable[[], None]) -> None:
        async def call() -> None:
            work()

        self._do(call())

    async def _listen(self, port: int) -> int:
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _mend(self) -> None:
        self._bytes_per_second = self._reset_after_bytes = None
        self._flowing.set()
        if self._server is None:
            await self._listen(self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            there, back = await self._reach()
            self._writers.add(back)
            try:
                ways = self._carry(task, reader, back), self._carry(task, there, writer, from_server=True)
                await asyncio.gather(*ways)
            finally:
                back.transport.abort()
                self._writers.discard(back)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection("127.0.0.1", self._target)

    async def _carry(
        self,
        connection: asyncio.Task[None],
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        *,
        from_server: bool = False,
    ) -> None:
        carried = 0
        while data := await source.read(PIECE_BYTES):
            await self._flowing.wait()
            if connection in self._forgotten:
                continue
            if from_server:
                limit = self._reset_after_bytes
                if limit is not None and carried + len(data) > limit:
                    target.write(data[: max(0, limit - carried)])
                    with contextlib.suppress(OSError):
                        await target.drain()
                    self._reset(target)
                    raise ConnectionResetError
                if self._bytes_per_second is not None:
                    await asyncio.sleep(len(data) / self._bytes_per_second)
                self.carried_bytes += len(data)
            carried += len(data)
            target.write(data)
            await target.drain()
        raise ConnectionResetError

    def _reset(self, target: asyncio.StreamWriter) -> None:
        self.resets += 1
        raw = target.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        target.transport.abort()
