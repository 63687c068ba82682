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
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, TypeVar

from bsfg.artifacts import Begun, check_digest
from bsfg.errors import (
    ArtifactMissing,
    ArtifactTooLarge,
    BsfgError,
    DigestMismatch,
    FileExists,
    StorageClosed,
    StorageReadOnly,
)
from bsfg.fact import ArtifactRef, Buffer, Entry, Fact, Message
from bsfg.retry import Retry
from bsfg.sdk.endpoint import Endpoint, Where
from bsfg.sdk.thread import LoopThread

Item = TypeVar("Item")
Pieces = TypeVar("Pieces")
_PIECE_BYTES = 1 << 20
READ_BYTES_MAX = 64 << 20
"""The most that is read into memory unless more is asked for."""

PATIENCE_SECONDS = 30.0
"""How long a download that may be resumed bears a node that gives nothing."""

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
    """A file that appears under its name when it is whole and on the disk; else nothing of it is left.

    With ``keep``, a digest, what came stays beside it, under its name with the first digits of the digest and
    ``.part``. The next one goes on with that; ``begun`` is what there is. What turns out not to be the content that was
    meant is removed in any case.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, keep: str | None = None) -> None:
        self.path, self.begun, self._keep = Path(path), Begun(), keep
        mark = "" if keep is None else f".{check_digest(keep)[:12]}"
        self._part = self.path.with_name(f"{self.path.name}{mark}.part")
        self._file: BinaryIO | None = None
        if self.path.exists() and not overwrite:
            raise FileExists(f"{self.path} is already there", path=str(self.path))

    def __enter__(self) -> PartFile:
        try:
            if self._keep is None:
                # A new file always: a name that somebody has laid there as a link would lead elsewhere.
                self._part.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if self._keep else os.O_EXCL)
            self._file = os.fdopen(os.open(self._part, flags, 0o666), "r+b")
            while piece := self._file.read(_PIECE_BYTES):
                self.begun.add(piece)
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
        self.begun.add(piece)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        keep = self._keep is not None and self.begun.size_bytes > 0 and not isinstance(error, DigestMismatch)
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
            if kind is None or not keep:
                self._part.unlink(missing_ok=True)

    def _cannot(self, error: OSError) -> StorageReadOnly:
        return StorageReadOnly(f"{self.path} cannot be written: {error.strerror}", hint="Choose another place.")


def _patience(resume: bool) -> Retry:
    return Retry(0.1, 5.0, PATIENCE_SECONDS if resume else 0.0)


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


class _Artifacts(Generic[Pieces]):
    """The artifacts of a zone, wherever the bytes behind those that were begun are got from."""

    def __init__(self, get: Callable[[str, Begun | None], Pieces]) -> None:
        self._get = get

    def pieces(self, wanted: Wanted) -> Pieces:
        """Give the content piece by piece; the last piece comes only when the digest of the whole is right.

        Raises `ArtifactMissing`, and `DigestMismatch` in place of that last piece.
        """
        return self._get(digest_of(wanted), None)


class AsyncArtifacts(_Artifacts[AsyncGenerator[bytes, None]]):
    """The artifacts of a zone, for asyncio."""

    async def read(self, wanted: Wanted, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """Give the whole content; raises `ArtifactTooLarge` beyond ``max_bytes``."""
        whole = _Whole(max_bytes)
        async with aclosing(self.pieces(wanted)) as pieces:
            async for piece in pieces:
                whole.add(piece)
        return whole.joined()

    async def download(
        self, wanted: Wanted, path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False
    ) -> Path:
        """Write the content to a file, which appears when all of it is there and right; give its path.

        With ``resume`` a download that breaks off leaves what it has beside it (``….part``), and the next one fetches
        what follows; it also goes on by itself, until the node gives nothing for half a minute.
        """
        digest, retry = digest_of(wanted), _patience(resume)
        with PartFile(path, overwrite=overwrite, keep=digest if resume else None) as file:
            while True:
                try:
                    async with aclosing(self._get(digest, file.begun)) as pieces:
                        async for piece in pieces:
                            await asyncio.to_thread(file.write, piece)
                            retry.reset()
                    return file.path
                except BsfgError as error:
                    await asyncio.sleep(retry.pause_after(error))


class ArtifactReader(_Artifacts[Iterator[bytes]]):
    """The artifacts of a zone, for ordinary, blocking programs."""

    def read(self, wanted: Wanted, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """Give the whole content; raises `ArtifactTooLarge` beyond ``max_bytes``."""
        whole = _Whole(max_bytes)
        for piece in self.pieces(wanted):
            whole.add(piece)
        return whole.joined()

    def download(
        self, wanted: Wanted, path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False
    ) -> Path:
        """Write the content to a file, which appears when all of it is there and right; give its path.

        With ``resume`` a download that breaks off leaves what it has beside it (``….part``), and the next one fetches
        what follows; it also goes on by itself, until the node gives nothing for half a minute.
        """
        digest, retry = digest_of(wanted), _patience(resume)
        with PartFile(path, overwrite=overwrite, keep=digest if resume else None) as file:
            while True:
                try:
                    for piece in self._get(digest, file.begun):
                        file.write(piece)
                        retry.reset()
                    return file.path
                except BsfgError as error:
                    time.sleep(retry.pause_after(error))


class NodeArtifacts:
    """Gets artifacts from a node, over a connection of its own that is opened with the first one."""

    def __init__(self, endpoint: Endpoint) -> None:
        # Here, because those who read a folder have no use for the modules of the network.
        from bsfg.sdk.sender import NodeLink

        self._link = NodeLink(endpoint)

    async def get(self, digest: str, begun: Begun | None = None) -> AsyncGenerator[bytes, None]:
        """Give content as it comes, what follows that which was begun; the client verifies the whole."""
        _, pieces = await self._link.client.get_object("", "", digest=digest, begun=begun)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def listed(self, stream: str, buffer: Buffer) -> AsyncGenerator[Entry, None]:
        """Give the retained entries of a buffer that refer to an artifact; no cursor moves."""
        async for frame in self._link.client.read_offsets(stream, 0, buffer=buffer):
            if frame.entries is not None and frame.entries.names_artifacts:
                for entry in frame.entries.to_entries():
                    if entry.message.fact.artifact is not None:
                        yield entry

    async def close(self) -> None:
        """End the connection."""
        await self._link.close()

    def blocking(self, thread: LoopThread) -> ArtifactReader:
        """Give the same to programs outside of the event loop that runs in a thread."""
        return ArtifactReader(self.reading(thread))

    def reading(self, thread: LoopThread) -> Callable[[str, Begun | None], Iterator[bytes]]:
        """Give what gets content for such programs."""

        return lambda digest, begun: _in_thread(thread, self.get(digest, begun))


class ArtifactClient(ArtifactReader):
    """Reads artifacts from a node, for programs that have a digest and no consumer; use it as a context manager.

    ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it from the environment.
    """

    def __init__(self, endpoint: Where = None) -> None:
        self._node = NodeArtifacts(Endpoint.of(endpoint, role="consumer"))
        self._thread = LoopThread("bsfg-artifacts")
        super().__init__(self._node.reading(self._thread))

    def list(self, stream: str, *, buffer: Buffer = Buffer.FORWARD) -> Iterator[Entry]:
        """Give the retained facts of a stream that refer to an artifact, oldest first; what may be read is listed.

        Each says what it refers to (``entry.message.fact.artifact``), and can be downloaded.
        """
        return _in_thread(self._thread, self._node.listed(stream, buffer))

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

    def list(self, stream: str, *, buffer: Buffer = Buffer.FORWARD) -> AsyncGenerator[Entry, None]:
        """Give the retained facts of a stream that refer to an artifact, oldest first; what may be read is listed.

        Each says what it refers to (``entry.message.fact.artifact``), and can be downloaded.
        """
        return self._node.listed(stream, buffer)

    async def close(self) -> None:
        """End the connection; repeats are harmless."""
        await self._node.close()

    async def __aenter__(self) -> AsyncArtifactClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _in_thread(thread: LoopThread, items: AsyncGenerator[Item, None]) -> Iterator[Item]:
    """Give to a program what comes in the event loop of a thread."""
    try:
        while (item := thread.run(_next(items))) is not None:
            yield item
    finally:
        # After the end of its thread there is nothing left to close.
        with contextlib.suppress(StorageClosed):
            thread.run(items.aclose())


async def _next(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)
