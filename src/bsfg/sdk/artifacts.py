"""Reading artifacts: by digest, or by the fact that refers to one, in pieces, verified before the last one is given.

An entry is all that is needed::

    for entry in consumer:
        consumer.artifacts.download(entry, "report.pdf")

Only the digest counts. The bucket and key in a fact are what *its* zone calls the artifact; this zone may have content
of its own under the same name, which is never taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from bsfg.artifacts import check_digest
from bsfg.errors import ArtifactMissing, ArtifactTooLarge, FileExists, StorageClosed, StorageReadOnly
from bsfg.fact import ArtifactRef, Entry, Fact, Message
from bsfg.sdk.endpoint import Endpoint, Where
from bsfg.sdk.thread import LoopThread

READ_BYTES_MAX = 64 << 20
"""The most that is read into memory unless more is asked for."""

Wanted = str | ArtifactRef | Fact | Message | Entry
"""What can be asked for: a digest (``sha256:…``), a reference, or what holds one."""


def digest_of(wanted: Wanted) -> str:
    """Give the digest of what is wanted; raises `ArtifactMissing` for a fact that refers to no artifact."""
    found = wanted.message if isinstance(wanted, Entry) else wanted
    found = found.fact if isinstance(found, Message) else found
    if isinstance(found, Fact):
        if found.artifact is None:
            raise ArtifactMissing(
                f"the fact about {found.subject} refers to no artifact", hint="Look at fact.artifact before asking."
            )
        found = found.artifact
    digest = found if isinstance(found, str) else found.digest
    check_digest(digest)
    return digest


class PartFile:
    """A file that appears under its name when it is whole and on the disk; else nothing of it is left."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._file: BinaryIO | None = None
        if self.path.exists() and not overwrite:
            raise FileExists(f"{self.path} is already there", path=str(self.path))

    def __enter__(self) -> PartFile:
        try:
            # A new file always: a name that somebody has laid there as a link would lead elsewhere.
            self._part.unlink(missing_ok=True)
            self._file = self._part.open("xb")
        except OSError as error:
            raise self._cannot(error) from None
        return self

    def write(self, piece: bytes) -> None:
        """Add a piece."""
        assert self._file is not None
        try:
            self._file.write(piece)
        except OSError as error:
            raise self._cannot(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if kind is None:
                self._part.replace(self.path)
        except OSError as problem:
            if kind is None:
                raise self._cannot(problem) from None
        finally:
            self._part.unlink(missing_ok=True)

    def _cannot(self, error: OSError) -> StorageReadOnly:
        return StorageReadOnly(f"{self.path} cannot be written: {error.strerror}", hint="Choose another place.")


class _Whole:
    """Content gathered in memory, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._pieces, self._size = max_bytes, list[bytes](), 0

    def add(self, piece: bytes) -> None:
        """Add a piece."""
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise ArtifactTooLarge(
                f"the artifact has more than {self._max_bytes} bytes",
                hint="Take it piece by piece, download it to a file, or allow more with max_bytes.",
            )
        self._pieces.append(piece)

    def joined(self) -> bytes:
        """Give everything."""
        return b"".join(self._pieces)


class AsyncArtifacts:
    """The artifacts of a zone, for asyncio."""

    def __init__(self, get: Callable[[str], AsyncGenerator[bytes, None]]) -> None:
        self._get = get

    def pieces(self, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """Give the content piece by piece; the last piece comes only when the digest of the whole is right.

        Raises `ArtifactMissing`, and `DigestMismatch` in place of that last piece.
        """
        return self._get(digest_of(wanted))

    async def read(self, wanted: Wanted, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """Give the whole content; raises `ArtifactTooLarge` beyond ``max_bytes``."""
        whole = _Whole(max_bytes)
        async with aclosing(self.pieces(wanted)) as pieces:
            async for piece in pieces:
                whole.add(piece)
        return whole.joined()

    async def download(self, wanted: Wanted, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the content to a file, which appears when all of it is there and right; give its path."""
        with PartFile(path, overwrite=overwrite) as file:
            async with aclosing(self.pieces(wanted)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
        return file.path


class ArtifactReader:
    """The artifacts of a zone, for ordinary, blocking programs."""

    def __init__(self, get: Callable[[str], Iterator[bytes]]) -> None:
        self._get = get

    def pieces(self, wanted: Wanted) -> Iterator[bytes]:
        """Give the content piece by piece; the last piece comes only when the digest of the whole is right.

        Raises `ArtifactMissing`, and `DigestMismatch` in place of that last piece.
        """
        return self._get(digest_of(wanted))

    def read(self, wanted: Wanted, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """Give the whole content; raises `ArtifactTooLarge` beyond ``max_bytes``."""
        whole = _Whole(max_bytes)
        for piece in self.pieces(wanted):
            whole.add(piece)
        return whole.joined()

    def download(self, wanted: Wanted, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the content to a file, which appears when all of it is there and right; give its path."""
        with PartFile(path, overwrite=overwrite) as file:
            for piece in self.pieces(wanted):
                file.write(piece)
        return file.path


class NodeArtifacts:
    """Gets artifacts from a node, over a connection of its own that is opened with the first one."""

    def __init__(self, endpoint: Endpoint) -> None:
        # Here, because those who read a folder have no use for the modules of the network.
        from bsfg.sdk.sender import NodeLink

        self._link = NodeLink(endpoint)

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content as it comes; the client verifies it."""
        _, pieces = await self._link.client.get_object("", "", digest=digest)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """End the connection."""
        await self._link.close()

    def blocking(self, thread: LoopThread) -> ArtifactReader:
        """Give the same to programs outside of the event loop that runs in a thread."""

        def get(digest: str) -> Iterator[bytes]:
            pieces = self.get(digest)
            try:
                while (piece := thread.run(_next(pieces))) is not None:
                    yield piece
            finally:
                # After the end of its thread there is nothing left to close.
                with contextlib.suppress(StorageClosed):
                    thread.run(pieces.aclose())

        return ArtifactReader(get)


class ArtifactClient(ArtifactReader):
    """Reads artifacts from a node, for programs that have a digest and no consumer; use it as a context manager.

    ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it from the environment.
    """

    def __init__(self, endpoint: Where = None) -> None:
        self._node = NodeArtifacts(Endpoint.of(endpoint, role="consumer"))
        self._thread = LoopThread("bsfg-artifacts")
        super().__init__(self._node.blocking(self._thread).pieces)

    def close(self) -> None:
        """End the connection; repeats are harmless."""
        with contextlib.suppress(StorageClosed):
            self._thread.run(self._node.close())
        self._thread.stop()

    def __enter__(self) -> ArtifactClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncArtifactClient(AsyncArtifacts):
    """Reads artifacts from a node, for asyncio; use it as an async context manager."""

    def __init__(self, endpoint: Where = None) -> None:
        self._node = NodeArtifacts(Endpoint.of(endpoint, role="consumer"))
        super().__init__(self._node.get)

    async def close(self) -> None:
        """End the connection; repeats are harmless."""
        await self._node.close()

    async def __aenter__(self) -> AsyncArtifactClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
