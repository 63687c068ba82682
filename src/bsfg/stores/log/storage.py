"""`LogStorage`: all buffers and cursors of one zone in one folder, written by one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Self

import orjson

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import (
    BsfgError,
    FormatUnsupported,
    HasherMismatch,
    NotAFolder,
    StorageBusy,
    StorageClosed,
    StreamUnavailable,
)
from bsfg.ports import Buffer, Capabilities, Clock
from bsfg.retention import Policy
from bsfg.rules import check_name
from bsfg.stores.log.buffer import LogForwardBuffer, LogStoreBuffer
from bsfg.stores.log.damage import is_damage, is_folder, make_folder, put_aside, readable
from bsfg.stores.log.files import DiskFiles, Files, translated, write_whole
from bsfg.stores.log.identity import FORMAT, checked, passes_check
from bsfg.stores.log.journal import BEGINNING, Journal, Record, encode
from bsfg.stores.log.recovery import Recovery
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.writer import LogOptions, LogWriter, OnSync
from bsfg.stores.shared.committer import WORKERS_MAX, MakeWorkers, Workers
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, Resolve, as_document, from_document

CURSORS = "cursors/cursors.journal"


def cursor_record(cursor: ConsumerCursor) -> Record:
    """Give the record from which a cursor can be read again."""
    return Record({"kind": "cursor", **as_document(cursor)})


def cursor_from(record: Record) -> ConsumerCursor:
    """Read a cursor from its record."""
    return from_document(record.head)


def write_cursors(files: Files, cursors: Iterable[ConsumerCursor]) -> None:
    """Write the journal of cursors of a folder that nobody has opened."""
    write_whole(files, CURSORS, b"".join(encode(cursor_record(cursor)) for cursor in cursors) or BEGINNING)


class LogCursors(Cursors):
    """The cursor tracker of the embedded log; concurrent commits share a sync."""

    def __init__(
        self, files: Files, clock: Clock, resolve: Resolve, reserve: Reserve, workers: MakeWorkers = Workers
    ) -> None:
        super().__init__(clock, resolve, workers)
        self._reserve = reserve
        self._journal = Journal(files, CURSORS, self._snapshot, begins=True)
        self._unread: list[Record] = []

    def open(self, *, expected: bool = False, begun: bool = False) -> None:
        """Read all positions and begin to accept changes; see `Journal.open` for what is known of them."""
        found: list[ConsumerCursor] = []
        for record in self._journal.open(expected=expected, begun=begun):
            try:
                found.append(cursor_from(record))
            except (KeyError, ValueError, TypeError, AttributeError):
                self._unread.append(record)
                self._journal.problems.append(f"a record of {str(record.head.get('name'))[:80]!r} cannot be read")
        self.are_lost = self._journal.is_damaged or bool(self._unread)
        self.begin(found)

    @property
    def problems(self) -> list[str]:
        """What was wrong with the journal when it was opened."""
        return [f"{CURSORS}: {text}" for text in self._journal.problems]

    def keep(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write cursors to the journal."""
        records = [cursor_record(cursor) for cursor in cursors]
        self._reserve.with_room(lambda: self._journal.append(records))

    def kept(self) -> None:
        """Write the journal anew when most of it is old."""
        if self._journal.wants_compaction:
            self._journal.compact()

    async def close(self) -> None:
        """Finish what is under way."""
        if await self.end():
            self._journal.close()

    def _snapshot(self) -> Iterator[Record]:
        yield from self._unread
        for name in sorted(self._cursors):
            yield cursor_record(self._cursors[name])


MARK = "bsfg.json"
STREAMS = "streams"
INNER = ("aside", "index", "keys", "quarantine")
"""The folders inside that of a log."""


def log_folder(stream: str, buffer: Buffer) -> str:
    """Give the folder of one log inside the data folder."""
    return f"{STREAMS}/{stream}/{buffer}"


def listed_logs(files: Files) -> list[tuple[str, Buffer]]:
    """List the logs that exist in a data folder."""
    return [(stream, buffer) for stream in files.list(STREAMS) for buffer in Buffer if _is_log(files, stream, buffer)]


def _is_log(files: Files, stream: str, buffer: Buffer) -> bool:
    folder = log_folder(stream, buffer)
    try:
        return files.exists(f"{folder}/log.json") or bool(files.list(folder))
    except OSError as error:
        if not is_damage(error):
            raise
        # What cannot be looked into may be one: whoever opens it is told why it cannot be, and nobody else.
        return not is_folder(error)


class LogStorage:
    """The embedded storage of a zone; open it with `LogStorage.open`."""

    capabilities = Capabilities("log", hash_chain=True, offline_reads=True, scrub=True, folder_backup=True)

    def __init__(
        self,
        files: Files,
        release: Callable[[], None],
        *,
        clock: Clock,
        hasher: Hasher,
        options: LogOptions,
        on_sync: OnSync,
        workers: MakeWorkers = Workers,
    ) -> None:
        self.files = files
        self._release: Callable[[], None] | None = release
        self.clock, self.hasher, self._options, self._on_sync = clock, hasher, options, on_sync
        self._buffers: dict[tuple[str, Buffer], LogStoreBuffer | LogForwardBuffer] = {}
        self._opening = asyncio.Lock()
        self._unavailable: dict[tuple[str, Buffer], StreamUnavailable] = {}
        self._problems: list[str] = []
        self.reserve = Reserve(files, options.reserve_bytes, clock)
        self.cursors = LogCursors(files, clock, self._resolve, self.reserve, workers)
        self._workers = workers("bsfg-writer", WORKERS_MAX)

    @classmethod
    async def open(
        cls,
        where: str | os.PathLike[str] | Files,
        *,
        clock: Clock | None = None,
        hasher: Hasher | None = None,
        options: LogOptions | None = None,
        on_sync: OnSync = lambda seconds: None,
        workers: MakeWorkers = Workers,
    ) -> Self:
        """Open a data folder as its one writer, making it when it is empty or missing."""
        files: Files = DiskFiles(where) if isinstance(where, str | os.PathLike) else where
        hasher = hasher or Sha256()
        try:
            release, problems = await asyncio.to_thread(_prepare, files, hasher)
        except OSError as error:
            raise translated(error, f"opening {where}") from None
        storage = cls(
            files,
            release,
            clock=clock or SystemClock(),
            hasher=hasher,
            options=options or LogOptions(),
            on_sync=on_sync,
            workers=workers,
        )
        storage._problems = problems
        try:
            await asyncio.to_thread(storage._open_all)
        except OSError as error:
            storage._workers.close()
            release()
            raise translated(error, f"opening {where}") from None
        return storage

    @property
    def problems(self) -> list[str]:
        """What was found wrong with the folder itself and with the cursors when they were opened."""
        return [*self._problems, *self.cursors.problems]

    def _open_cursors(self) -> None:
        # The journal of cursors is made before the first log.
        self.cursors.open(expected=bool(listed_logs(self.files)), begun=has_begun(self.files, CURSORS))
        remember_begun(self.files, CURSORS)

    async def store(self, stream: str, policy: Policy | None = None) -> LogStoreBuffer:
        """Open the store buffer of a stream."""
        buffer = await self._open(stream, Buffer.STORE, policy)
        assert isinstance(buffer, LogStoreBuffer)
        return buffer

    async def forward(self, stream: str, policy: Policy | None = None) -> LogForwardBuffer:
        """Open the forward buffer of a stream."""
        buffer = await self._open(stream, Buffer.FORWARD, policy)
        assert isinstance(buffer, LogForwardBuffer)
        return buffer

    async def streams(self) -> list[tuple[str, Buffer]]:
        """List the buffers that exist."""
        self._check_open()
        return await asyncio.to_thread(listed_logs, self.files)

    async def close(self) -> None:
        """Finish what is under way and give the folder back."""
        if self._release is None:
            return
        release, self._release = self._release, None
        for buffer in self._buffers.values():
            await buffer.close()
        self._workers.close()
        await self.cursors.close()
        release()

    async def relieve(self) -> None:
        """Let confirmed facts leave while the disk is full, a piece of each buffer at a time, until there is room."""
        if not self.reserve.short or await asyncio.to_thread(self.reserve.restore):
            return
        for buffer in list(self._buffers.values()):
            # One that closed itself says so to whoever uses it, and must not keep the others full.
            with suppress(StorageClosed):
                await buffer.relieve()

    def _open_all(self) -> None:
        self.reserve.open()
        self.reserve.with_room(self._open_cursors)

    async def _resolve(self, stream: str, buffer: Buffer) -> LogStoreBuffer | LogForwardBuffer:
        """Open a buffer for a consumer; one that did not open is tried again by those who want the buffer itself.

        A consumer asks with every call, and each attempt reads the whole log.
        """
        if (known := self._unavailable.get((stream, buffer))) is not None:
            raise StreamUnavailable(known.message, **known.details)
        check_name("stream", stream)
        try:
            return await self._open(stream, buffer, None)
        except (StorageClosed, StorageBusy):
            raise
        except Exception as error:
            failure = self._unavailable[stream, buffer] = StreamUnavailable.because(stream, buffer, error)
            raise failure from error

    async def _open(self, stream: str, buffer: Buffer, policy: Policy | None) -> LogStoreBuffer | LogForwardBuffer:
        self._check_open()
        if (known := self._buffers.get((stream, buffer))) is not None:
            return known
        check_name("stream", stream)
        async with self._opening:
            known = self._buffers.get((stream, buffer))
            if known is None:
                chosen = (policy or Policy()).checked()
                try:
                    recover = lambda: self._recover(stream, buffer, chosen)  # noqa: E731
                    writer = await asyncio.to_thread(self.reserve.with_room, recover)
                except OSError as error:
                    raise translated(error, f"opening {stream}/{buffer}") from None
                self._unavailable.pop((stream, buffer), None)
                frontier = lambda: self.cursors.required_frontier(stream, buffer)  # noqa: E731
                kind = LogStoreBuffer if buffer == Buffer.STORE else LogForwardBuffer
                known = self._buffers[stream, buffer] = kind(writer, frontier, self._workers)
            return known

    def _recover(self, stream: str, buffer: Buffer, policy: Policy) -> LogWriter:
        folder = log_folder(stream, buffer)
        self.files.make_folder(folder)
        for parent in (STREAMS, f"{STREAMS}/{stream}", folder):
            self.files.sync_folder(parent)
        recovery = Recovery(self.files, folder, buffer, options=self._options, clock=self.clock)
        for name in (f"{folder}/{each}" for each in INNER if self.files.exists(f"{folder}/{each}")):
            if kept := make_folder(self.files, name):
                recovery.problems.append(f"{name}: no folder; kept as {kept}")
        state = recovery.run(self.cursors.floor(stream, buffer))
        writer = LogWriter(
            self.files,
            state,
            stream=stream,
            buffer=buffer,
            policy=policy,
            options=self._options,
            clock=self.clock,
            on_sync=self._on_sync,
        )
        writer.reserve = self.reserve
        writer.finish_removal()
        return writer

    def _check_open(self) -> None:
        if self._release is None:
            raise StorageClosed("the storage is closed")


def read_mark(files: Files) -> dict[str, object]:
    """Read the mark of a data folder, or say that this is none."""
    if not files.exists(MARK):
        raise NotAFolder(f"there is no {MARK} in the folder")
    try:
        mark = orjson.loads(readable(files, MARK)[0])
    except orjson.JSONDecodeError:
        mark = None
    if not isinstance(mark, dict) or not isinstance(mark.get("format"), int) or not passes_check(mark):
        raise NotAFolder(f"{MARK} is damaged")
    if mark["format"] > FORMAT:
        raise FormatUnsupported(f"the folder has format {mark['format']}, this version reads up to {FORMAT}")
    return mark


def has_begun(files: Files, journal: str) -> bool:
    """Tell whether a journal has got its beginning, so that it cannot be empty; those of earlier versions may be."""
    try:
        begun = read_mark(files).get("begun")
    except NotAFolder:
        return False
    return isinstance(begun, list) and journal in begun


def remember_begun(files: Files, journal: str) -> None:
    """Write into the mark of the folder that a journal has its beginning."""
    if not files.exists(MARK) or has_begun(files, journal):
        return
    mark = {name: value for name, value in read_mark(files).items() if name != "check"}
    begun = mark.get("begun")
    write_whole(files, MARK, checked({**mark, "begun": [*(begun if isinstance(begun, list) else []), journal]}))


def _prepare(files: Files, hasher: Hasher) -> tuple[Callable[[], None], list[str]]:
    """Lock the folder and make sure that it is one of ours; give what ends the lock, and what was wrong."""
    files.make_folder("")
    release = files.lock("LOCK")
    try:
        problems = [
            f"{name}: no folder; kept as {kept}" for name in (STREAMS, "cursors") if (kept := make_folder(files, name))
        ]
        problems += _repaired_mark(files)
        if not files.exists(MARK):
            content = {"format": FORMAT, "hasher": hasher.name}
            write_whole(files, MARK, checked(content))
        mark = read_mark(files)
        if mark.get("hasher") != hasher.name:
            raise HasherMismatch(f"the folder was written with {mark.get('hasher')}, not {hasher.name}")
        files.sync_folder("")
    except (BsfgError, OSError):
        release()
        raise
    return release, problems


def _repaired_mark(files: Files) -> list[str]:
    """Move a mark that cannot be read out of the way of a new one, if there are logs to show that this is a folder."""
    if not files.list(STREAMS):
        return []
    if not files.exists(MARK):
        return [f"{MARK}: missing; it is written anew"]
    try:
        read_mark(files)
    except NotAFolder as error:
        return [f"{error.message}; kept as {put_aside(files, MARK)}, and written anew"]
    return []
