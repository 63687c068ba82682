"""Just enough HTTP/2 to be impolite: frames by hand, because a library would refuse to write such things."""

from __future__ import annotations

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Write one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str | bytes, **more: bytes) -> bytes:
    """Write the headers of a gRPC call as literals without indexing; ``more`` may hold what no header may."""
    fields: list[tuple[str, str | bytes]] = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more.items(),
    ]
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    assert len(data) < 127
    return bytes([len(data)]) + data


class Raw:
    """A connection on which anything can be written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @staticmethod
    async def connect(port: int, *, greet: bool = True, host: str = "127.0.0.1", window: int = 65_535) -> Raw:
        """Connect from an address of this machine, and say hello; each call may be sent a window's bytes."""
        raw = Raw(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)))
        if greet:
            settings = frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW_SIZE, window))
            raw.writer.write(PREFACE + settings + frame(WINDOW_UPDATE, payload=struct.pack(">I", 1 << 20)))
        return raw

    def call(self, path: str | bytes, stream: int, *messages: bytes, end: bool = False, **more: bytes) -> None:
        """Begin a call and send messages, each as it is: with its own prefix or without."""
        self.writer.write(frame(HEADERS, END_HEADERS, stream, headers(path, **more)))
        for message in messages:
            for start in range(0, len(message), 16_000):
                self.writer.write(frame(DATA, 0, stream, message[start : start + 16_000]))
        if end:
            self.writer.write(frame(DATA, END_STREAM, stream))

    async def frames(self, *until: int) -> list[tuple[int, bytes]]:
        """Read frames until one of these kinds comes for a stream, or the connection ends."""
        found: list[tuple[int, bytes]] = []
        while not any(kind in until for kind, _ in found):
            try:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            found.append((head[3], payload))
            if head[3] == SETTINGS and not head[4] & ACK:
                self.writer.write(frame(SETTINGS, ACK))
        return found

    async def ended(self) -> bool:
        """Read until the other side ends the connection."""
        await self.rest()
        return True

    async def rest(self) -> bytes:
        """Give all that comes until the other side ends the connection."""
        parts: list[bytes] = []
        try:
            while part := await self._reader.read(65_536):
                parts.append(part)
        except ConnectionError:
            pass
        self.close()
        return b"".join(parts)

    def close(self) -> None:
        """Go away without a word."""
        self.writer.close()
        self.writer.transport.abort()


def prefixed(message: bytes, *, length: int | None = None, compressed: bool = False) -> bytes:
    """Put the prefix of gRPC before a message, with another length than it has if wanted."""
    return bytes([compressed]) + struct.pack(">I", len(message) if length is None else length) + message
