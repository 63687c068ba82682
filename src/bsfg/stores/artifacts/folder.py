"""`ArtifactFolder`: the artifacts of a zone in one folder, written by one process, copied while uploads go on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeVar

import orjson

from bsfg.artifacts import ArtifactStats, Collected, StoredArtifact, StoredContent, check_digest, check_name
from bsfg.clock import SystemClock
from bsfg.disk import is_damage, move_away
from bsfg.errors import (
    ArtifactStoreFull,
    DigestMismatch,
    DiskFull,
    FormatUnsupported,
    InvalidArgument,
    OutcomeUnknown,
    StorageClosed,
)
from bsfg.ports import Clock
from bsfg.stores.artifacts.contents import (
    CONTENT,
    INCOMING,
    NAMES,
    SUFFIX,
    Collector,
    Contents,
    Grace,
    Names,
    Shards,
    decoded,
)
from bsfg.stores.artifacts.files import ArtifactDiskFiles, ArtifactFiles, translated, translating
from bsfg.stores.artifacts.transfer import ArtifactUpload, Outgoing
from bsfg.stores.shared.artifacts import Announced, CheckedArtifacts, ContentIntake

FORMAT = 1
MARK = "artifacts.json"
REFERENCES = "references"
THREADS = 4
SYSTEM_CLOCK = SystemClock()

Answer = TypeVar("Answer")


class ArtifactFolder(CheckedArtifacts):
    """The artifact store of a zone; open it with `ArtifactFolder.open`."""

    def __init__(
        self,
        files: ArtifactFiles,
        *,
        clock: Clock,
        max_artifact_bytes: int | None,
        capacity_bytes: int | None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._files, self._clock = files, clock
        self._max_bytes, self._capacity_bytes, self._is_full = max_artifact_bytes, capacity_bytes, is_full
        self._contents = Contents(files, clock)
        self._names = Names(files, self._write_whole)
        self._in_use: set[str] = set()
        self._collector = Collector(files, self._contents, self._names, self._in_use)
        self._collecting = asyncio.Lock()
        self._reserved_bytes = 0
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="bsfg-artifacts")
        self._release: Callable[[], None] | None = None
        self._closed = False
        self.problems: list[str] = []
        """What was found damaged or out of place, at the opening and since."""
        self.references = FolderMemory(self)

    @classmethod
    async def open(
        cls,
        where: str | os.PathLike[str] | ArtifactFiles,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Open a folder, making it when it is not there, and remove what a crash left of uploads.

        While ``is_full`` says so nothing new is taken, because the disk's last room is needed for something else. One
        process has it open (`FolderLocked`); any other reads with `bsfg.stores.artifacts.transfer.stored_pieces`.
        """
        files = ArtifactDiskFiles(where) if isinstance(where, (str, os.PathLike)) else where
        limits = {"max_artifact_bytes": max_artifact_bytes, "capacity_bytes": capacity_bytes}
        store = cls(files, clock=clock, is_full=is_full, **limits)
        try:
            await store._run(store._open)
        except BaseException:
            await store.close()
            raise
        return store

    async def stat(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for."""
        check_name(bucket, key)
        try:
            return await self._run(lambda: self._names.read(bucket, key))
        except DigestMismatch as error:
            self._note_damage(error)
            raise

    async def exists(self, digest: str) -> bool:
        """Tell whether content with this digest is here."""
        digits = check_digest(digest)
        return await self._run(lambda: self._contents.exists(digits))

    async def claim(self, digests: Sequence[str]) -> list[int | None]:
        """Give the sizes of what is here and keep it from being collected."""
        all_digits = [check_digest(digest) for digest in digests]
        return await self._run(lambda: [self._contents.claim(digits) for digits in all_digits])

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give content piece by piece, verified."""
        path = self._contents.shards.path(check_digest(digest))
        outgoing = Outgoing(self._files, path, digest)
        try:
            await self._run(outgoing.open)
            while piece := await self._run(outgoing.next):
                yield piece
            self._contents.damaged.discard(check_digest(digest))  # somebody may have put the file right
        except DigestMismatch as error:
            self._contents.damaged.add(check_digest(digest))
            self._note_damage(error)
            raise
        finally:
            outgoing.close()

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")

        def matching() -> list[StoredArtifact]:
            every = (artifact for _, artifact in self._names.all())
            found = [each for each in every if bucket in (None, each.bucket) and each.key.startswith(prefix)]
            return sorted(found, key=lambda each: (each.bucket, each.key))

        for artifact in await self._run(matching):
            yield artifact

    async def collect(self, referenced: AbstractSet[str], *, now_unix_ms: int, grace_seconds: float) -> Collected:
        """Remove orphans."""
        if grace_seconds < 0:
            raise InvalidArgument(f"grace_seconds {grace_seconds} is negative")
        async with self._collecting:
            return await self._run(lambda: self._collector.collect(referenced, Grace(now_unix_ms, grace_seconds)))

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        self._check_open()
        return ArtifactStats(self._contents.artifacts, self._contents.used_bytes, self._capacity_bytes)

    async def close(self) -> None:
        """Refuse everything from now on, wait for what is under way, and let the next writer in."""
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)
        if self._release is not None:
            release, self._release = self._release, None
            release()

    # What happens in the threads.

    def _open(self) -> None:
        with translating("opening the folder of artifacts"):
            self._prepare()
            check_mark(self._read_whole(MARK))
            self._contents.load()

    def _prepare(self) -> None:
        self._files.prepare()
        self._release = self._files.lock("lock")
        for folder in (INCOMING, CONTENT, NAMES):
            try:
                self._files.make_folder(folder)
            except FileExistsError:
                self.problems.append(f"artifacts: {folder} is no folder; kept as {move_away(self._files, folder)}")
                self._files.make_folder(folder)
        self._files.sync_folder("")
        self._collector.clear_incoming()
        if self._files.exists(MARK) and self._mark_is_damaged():
            self.problems.append(f"artifacts: {MARK} is damaged; kept as {move_away(self._files, MARK)}")
        if not self._files.exists(MARK):
            self._write_whole(MARK, orjson.dumps({"format": FORMAT}), lambda: self._files.sync_folder(""))

    def _mark_is_damaged(self) -> bool:
        """Tell whether the mark says nothing at all; one of another format does."""
        try:
            mark = orjson.loads(self._read_whole(MARK))
        except orjson.JSONDecodeError:
            return True
        except OSError as error:
            if not is_damage(error):
                raise
            return True
        return not isinstance(mark, dict) or not isinstance(mark.get("format"), int)

    def _note_damage(self, error: DigestMismatch) -> None:
        text = f"artifacts: {error.message}"
        if text not in self.problems:
            self.problems.append(text)

    def _write_whole(self, path: str, data: bytes, sync_folder: Callable[[], None]) -> None:
        """Make a small file durable, replacing any other of that name."""
        incoming = ArtifactUpload(self._files, self._in_use)
        try:
            incoming.place_whole(path, data, sync_folder)
        finally:
            incoming.discard()

    def _read_whole(self, path: str) -> bytes:
        file = self._files.open_read(path)
        try:
            return b"".join(iter(lambda: file.read(1 << 20), b""))
        finally:
            file.close()

    # What happens in the event loop.

    async def _add(self, pieces: AsyncIterator[bytes], announced: Announced) -> StoredContent:
        intake = ContentIntake(announced, self._max_bytes)
        known = announced.digest is not None and await self.exists(announced.digest)
        incoming = ArtifactUpload(self._files, self._in_use)
        reserved = 0
        try:
            async for piece in pieces:
                intake.count(piece)
                reserved += self._reserve(0 if known else len(piece))
                await self._run(lambda piece=piece: incoming.write(piece, intake))  # type: ignore[misc]
            content = intake.finish()
            await self._run(lambda: incoming.place(self._contents, content))
            return content
        finally:
            self._reserved_bytes -= reserved
            if self._closed or incoming.placed:
                incoming.discard()
            else:
                await self._run(incoming.discard)

    def _reserve(self, size_bytes: int) -> int:
        """Take room for a piece, counting what other uploads have taken."""
        if size_bytes and self._is_full():
            raise DiskFull("the disk is full, and its last room is needed to empty it")
        taken = self._contents.used_bytes + self._reserved_bytes
        if size_bytes and self._capacity_bytes is not None and taken + size_bytes > self._capacity_bytes:
            raise ArtifactStoreFull(
                f"the store holds {taken} of {self._capacity_bytes} bytes, uploads under way included",
                capacity_bytes=self._capacity_bytes,
            )
        self._reserved_bytes += size_bytes
        return size_bytes

    async def _check_free(self, bucket: str, key: str, digest: str) -> None:
        await self._run(lambda: self._names.check_free(bucket, key, digest))

    async def _bound(self, bucket: str, key: str, content: StoredContent, media_type: str) -> StoredArtifact:
        now_unix_ms = self._clock.now_unix_ms()
        artifact = StoredArtifact(bucket, key, content.digest, content.size_bytes, media_type, now_unix_ms)
        return await self._run(lambda: self._names.bind(artifact))

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        """Do blocking work in a thread; who gives up waiting still waits for the thread, which uses open files."""
        self._check_open()
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # looked at, so that nobody is warned of it
            raise
        except OutcomeUnknown:
            self._closed = True
            raise
        except OSError as error:
            raise translated(error, "using the folder of artifacts") from error

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the store of artifacts is closed", hint="Open it again; check the disk first.")


def check_mark(data: bytes) -> None:
    """Raise `FormatUnsupported` unless the mark of a folder names the format that is read here."""
    try:
        mark = orjson.loads(data)
    except orjson.JSONDecodeError:
        mark = None
    found = mark.get("format") if isinstance(mark, dict) else None
    if found != FORMAT:
        raise FormatUnsupported(f"the folder of artifacts has the format {found}, this version reads {FORMAT}")


class FolderMemory:
    """A `bsfg.artifacts.ReferenceMemory` in a file of an artifact folder."""

    def __init__(self, store: ArtifactFolder) -> None:
        self._store = store

    async def recall(self) -> bytes | None:
        """Give what was remembered last; what does not match its own digest counts as forgotten."""
        return await self._store._run(self._read)

    async def remember(self, data: bytes) -> None:
        """Replace the file."""
        store = self._store
        whole = hashlib.sha256(data).digest() + data
        await store._run(lambda: store._write_whole(REFERENCES, whole, lambda: store._files.sync_folder("")))

    def _read(self) -> bytes | None:
        with translating("reading the references of artifacts"):
            try:
                whole = self._store._read_whole(REFERENCES)
            except FileNotFoundError:
                return None
            except OSError as error:
                if not is_damage(error):
                    raise
                return None
        check, data = whole[:32], whole[32:]
        return data if hashlib.sha256(data).digest() == check else None


CHUNK_BYTES = 1 << 20

Reuse = Callable[[str, int], bool]
"""Puts a file of this path and size that never changes again into the copy without copying it; False if it cannot."""

Copied = Callable[[int], None]
"""Told the number of bytes that were just copied or checked."""


@dataclass(frozen=True, slots=True)
class CopiedArtifacts:
    """What is in a copy."""

    contents: int
    names: int
    size_bytes: int


def copy_artifacts(
    source: ArtifactFiles,
    target: ArtifactFiles,
    *,
    reuse: Reuse = lambda path, size: False,
    copied: Copied = lambda size: None,
) -> CopiedArtifacts | None:
    """Copy a folder of artifacts, used meanwhile or not, into an empty one; None when there is none."""
    with translating("copying artifacts"):
        if not source.exists(MARK):
            return None
        target.prepare()
        names = sum(_copy(source, target, path, reuse, copied) is not None for path in _paths(source, NAMES))
        sizes = [_copy(source, target, path, reuse, copied) for path in _paths(source, CONTENT)]
        there = [size for size in sizes if size is not None]
        for top in (NAMES, CONTENT):
            target.make_folder(top)
            for shard in target.list(top):
                target.sync_folder(f"{top}/{shard}")
            target.sync_folder(top)
        _copy(source, target, MARK, lambda path, size: False, copied)
        target.sync_folder("")
        return CopiedArtifacts(len(there), names, sum(there))


def size_of(files: ArtifactFiles) -> int:
    """Give about how many bytes `copy_artifacts` will copy."""
    total = 0
    for path in _paths(files, CONTENT):
        try:
            total += files.size(path)
        except FileNotFoundError:
            continue
    return total


def problems_of(files: ArtifactFiles, checked: Copied = lambda size: None) -> list[tuple[str, str]]:
    """Check every content and name of a folder that nobody writes; give path and words for what is damaged."""
    found = []
    for path in _paths(files, CONTENT):
        digest = hashlib.sha256()
        for chunk in _chunks(files, path):
            digest.update(chunk)
            checked(len(chunk))
        if digest.hexdigest() != path.rpartition("/")[2]:
            found.append((path, "the content has another digest than its name says"))
    for path in _paths(files, NAMES):
        try:
            decoded(b"".join(_chunks(files, path)), path.rpartition("/")[2].removesuffix(SUFFIX))
        except DigestMismatch as error:
            found.append((path, error.message))
    return found


def _paths(files: ArtifactFiles, top: str) -> Iterator[str]:
    suffix = SUFFIX if top == NAMES else ""
    shards = Shards(files, top)
    return (shards.path(digits, suffix) for digits in shards.files(suffix))


def _copy(source: ArtifactFiles, target: ArtifactFiles, path: str, reuse: Reuse, copied: Copied) -> int | None:
    """Copy one file and give its size; None when it was collected meanwhile."""
    target.make_folder(path.rpartition("/")[0])
    try:
        size = source.size(path)
        if reuse(path, size):
            copied(size)
            return size
        reading = source.open_read(path)
    except FileNotFoundError:
        return None
    file = target.create(path)
    try:
        while chunk := reading.read(CHUNK_BYTES):
            file.write([chunk])
            copied(len(chunk))
        file.sync()
    finally:
        reading.close()
        file.close()
    return size


def _chunks(files: ArtifactFiles, path: str) -> Iterator[bytes]:
    file = files.open_read(path)
    try:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
    finally:
        file.close()
