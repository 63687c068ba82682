"""A door in front of a NATS server: what a client publishes can be held back, made to fail, or cut off in the act."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

Hook = Callable[[str], Awaitable[bool]]
"""Is told the subject of a message before it is sent on; tells whether the door is to be cut when it was."""


class NatsProxy:
    """Passes a client's bytes on, message by message, in a thread of its own."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.before: Hook | None = None
        self.after: Callable[[], Awaitable[None]] | None = None
        """Is done when the server has answered what went through last, before the client hears of it."""
        self._passing, self._answered = asyncio.Event(), asyncio.Event()
        self._passing.set()
        self.port = 0
        self._door: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.open()

    @property
    def url(self) -> str:
        """How the server is reached through the door."""
        return f"nats://127.0.0.1:{self.port}"

    def _run(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def call(self, what: Callable[[], object]) -> None:
        """Do something in the thread of the door."""
        self._loop.call_soon_threadsafe(what)

    def open(self) -> None:
        """Let clients in, at the same port as before."""
        self._run(self._open())

    async def _open(self) -> None:
        if self._door is None:
            self._door = await asyncio.start_server(self._client, "127.0.0.1", self.port, limit=1 << 26)
            self.port = self._door.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """End all connections, and let nobody in."""
        self._run(self._cut())

    async def _cut(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        """End the thread."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=1 << 26)
        mine = {writer, server_writer}
        self._writers |= mine
        back = asyncio.ensure_future(self._answers(server_reader, writer))
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._messages(reader, server_writer)
        finally:
            for each in mine:
                each.close()
            self._writers -= mine
            await asyncio.gather(back, return_exceptions=True)

    async def _messages(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = line.split()
            is_message = bool(words) and words[0].upper() in (b"PUB", b"HPUB")
            body = await reader.readexactly(int(words[-1]) + 2) if is_message else b""
            if is_message and self.before is not None:
                asyncio.ensure_future(self._hooked(words[1].decode(), line + body, server))  # noqa: RUF006
                continue
            server.write(line + body)
            await server.drain()

    async def _hooked(self, subject: str, message: bytes, server: asyncio.StreamWriter) -> None:
        hook = self.before
        cuts = await hook(subject) if hook is not None else False
        after, self.after = self.after, None
        if after is not None:
            self._passing.clear()
            self._answered.clear()
        server.write(message)
        await server.drain()
        if cuts:
            await self._cut()
        if after is not None:
            await self._answered.wait()
            await after()
            self._passing.set()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self._answered.set()
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
