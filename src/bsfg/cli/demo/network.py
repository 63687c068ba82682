"""The network of the demo: a wire between two nodes, which can be cut and mended."""

from __future__ import annotations

import asyncio
import contextlib

PIECE_BYTES = 64 << 10


class Wire:
    """Carries connections to a port of this machine.

    While it is cut it breaks every connection, also new ones. Its own port stays taken, so that nobody else gets it.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.port = 0

    async def open(self) -> None:
        """Take a free port and begin to carry."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Break all connections, and every new one."""
        self._is_cut = True
        for end in list(self._ends):
            end.transport.abort()

    def mend(self) -> None:
        """Carry again."""
        self._is_cut = False

    def close(self) -> None:
        """End everything."""
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._ends |= ends
        ways = [asyncio.create_task(_carry(reader, back)), asyncio.create_task(_carry(there, writer))]
        try:
            # One that came while the wire was being cut must not slip through.
            if not self._is_cut:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in ends:
                end.transport.abort()
            self._ends -= ends


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(PIECE_BYTES):
            target.write(data)
            await target.drain()
