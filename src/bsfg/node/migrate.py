"""Moving a zone from one storage to another while its node is stopped; peers see the same history go on.

Everything is brought into an empty place, read there again and held against the old storage by digest. Then the old
storage is marked as moved, and after it the new one as complete: at no moment can a node be started on both. Nothing
else of the old one is changed. Whatever ends it in the middle, the same command goes on from what is there.

A log is made in the folder ``migrating`` of its data folder, and gets its place when it is complete.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from bsfg.artifacts import ArtifactStore, StoredArtifact
from bsfg.config import ZoneConfig
from bsfg.disk import clear_away, without_writer
from bsfg.errors import (
    BsfgError,
    FolderLocked,
    InvalidArgument,
    LogDamaged,
    MigrationUnfinished,
    NotAFolder,
    StorageFailed,
    StorageMoved,
    StorageNotEmpty,
    StorageTaken,
    StorageUnable,
)
from bsfg.node.backends import (
    MIGRATING,
    KeepsAll,
    lock_folder,
    looked_at,
    open_artifacts,
    open_state,
    open_storage,
)
from bsfg.node.state import STATE, MovedMark, NodeState
from bsfg.ports import Buffer, Clock, Storage
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.damage import DamageFinding
from bsfg.stores.log.files import SESSIONS, DiskFiles, translated, write_whole
from bsfg.stores.log.history import LogZoneImport, exported
from bsfg.stores.log.journal import read_journal
from bsfg.stores.log.reader import LogFolder
from bsfg.stores.log.storage import CURSORS, MARK, STREAMS, LogStorage
from bsfg.stores.log.trailfile import FOLDER as TRAIL
from bsfg.stores.log.trailfile import copy_trail
from bsfg.stores.log.verify import verify
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, as_document
from bsfg.stores.shared.frame import genesis
from bsfg.stores.shared.history import (
    BufferHistory,
    HistoryCopy,
    HistoryDigest,
    HistoryPlace,
    digest_of,
    first_difference,
)
from bsfg.stores.shared.judging import LOST
from bsfg.stores.shared.keeper import NewBuffer

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""

Found = TypeVar("Found")

_COMPLETE = "complete"
"""The file in the folder of a log that is being made which says that it only needs its place."""

_STOP_HINT = "Stop the node of the zone first, and those that stand by; nothing was changed."
_OF_THE_STORAGE = frozenset({"storage", "scrub"})
"""Kinds of values that the node keeps about its storage itself, and that mean nothing to another one."""

_LOG_PARTS = (STREAMS, "cursors", "node")


@runtime_checkable
class KeepsHistory(Protocol):
    """A storage whose buffers are kept in frames, so that their history can be carried."""

    cursors: Cursors

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer | None = None) -> BufferHistory:
        """Give the history of a buffer, made when there is none."""
        ...

    async def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make the consumers of a history durable."""
        ...


class TakesHistory(Protocol):
    """Where a history is brought: a storage, or a log that is being made."""

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer) -> BufferHistory:
        """Give a buffer to bring it into, made when there is none."""
        ...

    async def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make the consumers of a history durable."""
        ...


@dataclass(frozen=True, slots=True)
class MigratedBuffer:
    """One buffer that was moved, as both sides have it."""

    stream: str
    buffer: str
    found: HistoryDigest


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One buffer that would be moved."""

    stream: str
    buffer: str
    log_id: str
    start: int
    end: int
    size_bytes: int
    gaps: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration would move, and what is found at the place that it would go to."""

    buffers: tuple[PlannedBuffer, ...]
    consumers: int
    artifacts: int
    artifact_bytes: int
    target: str


@dataclass(slots=True)
class Migration:
    """What was moved; ``was_done`` when an earlier run had finished it all."""

    buffers: list[MigratedBuffer] = field(default_factory=list)
    consumers: int = 0
    artifacts: int = 0
    missing_artifacts: list[str] = field(default_factory=list)
    was_done: bool = False


class SettableClock:
    """The clock of the new storage, by which names of artifacts are given the time that they had."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_unix_ms: int | None = None

    def now_unix_ms(self) -> int:
        """Give the time that is set, else the present one."""
        return self._clock.now_unix_ms() if self.at_unix_ms is None else self.at_unix_ms

    def monotonic_ms(self) -> int:
        """Give a clock that never jumps."""
        return self._clock.monotonic_ms()


class _Stopped(BaseException):
    """Whoever waits for a thread has gone."""


class _Gauge:
    """Counts bytes in a thread and tells how far something is; ends the thread when nobody waits for it any more."""

    def __init__(self, progress: Progress, doing: str, total: int) -> None:
        self._progress, self._doing, self._total, self._done = progress, doing, total, 0
        self._ending = threading.Event()

    def __call__(self, size_bytes: int) -> None:
        """Count bytes that are done."""
        if self._ending.is_set():
            raise _Stopped
        self._done += size_bytes
        self._progress(self._doing, self._done, max(self._total, self._done))

    async def run(self, work: Callable[[], Found]) -> Found:
        """Do in a thread what counts here."""
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self._ending.set()
            raise


def check_pair(source: ZoneConfig, target: ZoneConfig) -> None:
    """Raise unless these are two places of one zone, and both can be moved between."""
    if source.zone.name != target.zone.name:
        raise InvalidArgument(f"{source.source} is the zone {source.zone.name}, {target.source} is {target.zone.name}")
    if source.zone.hasher != target.zone.hasher:
        raise InvalidArgument("the two files name different hashers", hint="Change one thing at a time.")
    for config in (source, target):
        if config.storage.backend == "memory":
            says = 'backend = "memory" ends with its process, so that nothing can be moved from or to it'
            raise StorageUnable(says, hint="Choose a storage that lasts.")
    if source.storage.backend == target.storage.backend == "log":
        hint = "Stop the node, move the folder, and write its new place as data_folder."
        raise StorageUnable("both files name an embedded log: a folder is moved as it is", hint=hint)
    if _place_of(source) == _place_of(target):
        raise InvalidArgument("both files name the same storage", hint="Change [storage] in the new one.")
    old, new = source.data_folder.resolve(), target.data_folder.resolve()
    if old.is_relative_to(new) or new.is_relative_to(old):
        hint = "Give the new file another data_folder: what is there now stays as it is, until you remove it."
        raise InvalidArgument(f"{new} is the data folder of both files, or one lies in the other", hint=hint)


def _place_of(config: ZoneConfig) -> tuple[object, ...]:
    backend = config.storage.backend
    tables: dict[str, tuple[object, ...]] = {
        "postgres": (config.postgres.dsn, config.postgres.schema),
        "jetstream": (config.jetstream.servers, config.jetstream.prefix),
    }
    return backend, tables.get(backend, (config.data_folder.resolve(), config.storage.options))


# The old storage.


@dataclass(slots=True)
class _Source:
    """The old storage, open and kept from everybody else."""

    config: ZoneConfig
    storage: Storage
    state: NodeState
    artifacts: ArtifactStore
    keeps_artifacts: bool

    async def places(self) -> list[HistoryPlace]:
        """Give all buffers, or raise `InvalidArgument` when there is none."""
        names = await self.storage.streams()
        if not names:
            says = f"there is nothing of the zone {self.config.zone.name} in its storage, {self.config.storage.backend}"
            raise InvalidArgument(says, hint="Give the file that its node runs with as --config.")
        return [HistoryPlace(stream, kind, await _history_of(self.storage, stream, kind)) for stream, kind in names]

    def consumers(self) -> list[ConsumerCursor]:
        """Give all consumers."""
        return _cursors_of(self.storage).listed()

    def values(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Give what the node remembers and another storage can know."""
        return {key: value for key, value in self.state.values().items() if key[0] not in _OF_THE_STORAGE}


async def _history_of(storage: Storage, stream: str, kind: Buffer) -> BufferHistory:
    if isinstance(storage, LogStorage):
        return await exported(storage, stream, kind)
    if isinstance(storage, KeepsHistory):
        return await storage.history(stream, kind)
    raise _without_history(storage)


def _cursors_of(storage: Storage) -> Cursors:
    if isinstance(storage, LogStorage | KeepsHistory):
        return storage.cursors
    raise _without_history(storage)


def _without_history(storage: Storage) -> StorageUnable:
    says = f'backend = "{storage.capabilities.backend}" does not keep facts in frames, which alone can be moved'
    return StorageUnable(says, hint="Link a new zone to it, and let the facts be pulled.")


@asynccontextmanager
async def _opened_source(config: ZoneConfig, clock: Clock, progress: Progress) -> AsyncIterator[_Source]:
    async with AsyncExitStack() as stack:
        try:
            if config.storage.backend == "log":
                await asyncio.to_thread(_check_log, config.data_folder, progress)
            else:
                stack.callback(lock_folder(config.data_folder))
            storage = await open_storage(config, clock, lambda seconds: None)
        except (FolderLocked, StorageTaken) as taken:
            raise _in_use(taken) from None
        stack.push_async_callback(storage.close)
        state = open_state(config, storage, clock)
        stack.callback(state.close)
        mark = state.moved()
        if mark is not None and mark.is_target and not mark.is_done:
            raise MigrationUnfinished(f"the zone was being moved to {config.storage.backend}, and is not all there")
        artifacts = await open_artifacts(config, storage, clock)
        stack.push_async_callback(artifacts.close)
        yield _Source(config, storage, state, artifacts, isinstance(storage, KeepsAll))


def _in_use(error: BsfgError) -> BsfgError:
    return type(error)(error.message, hint=_STOP_HINT, **error.details)


def _check_log(folder: Path, progress: Progress) -> None:
    """Read a whole data folder without changing it, and refuse one with damage that is not on record.

    What a node does at its start about damage it must find out itself, and would not if it was put right here.
    """
    try:
        if not (folder / MARK).is_file():
            raise NotAFolder(f"there is no {MARK} in {folder}")
        with without_writer(folder):
            files = DiskFiles(folder)
            report = verify(folder, progress=lambda done, total: progress("checking", done, total))
            problems = [each for each in report.problems if not _is_known(files, each)]
            for path in (STATE, CURSORS):
                problems += [DamageFinding("log_damaged", path, text) for text in read_journal(files, path)[2]]
    except OSError as error:
        raise translated(error, f"reading {folder}") from None
    if problems:
        first = problems[0]
        says = f"{folder} is damaged: {first.code}: {first.where}: {first.detail}"
        hint = "Run `bsfg verify`; start the node on it, so that what is lost is on record, or use `bsfg salvage`."
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise LogDamaged(says + more, hint=hint, problems=len(problems))


def _is_known(files: DiskFiles, problem: DamageFinding) -> bool:
    """Tell whether damage is on record as lost; that of the audit trail comes along as evidence."""
    if problem.code == "entries_lost" or problem.where.startswith(TRAIL):
        return True
    top, stream, kind = (*problem.where.split("/"), "", "", "")[:3]
    if problem.first is None or problem.last is None or top != STREAMS or kind not in list(Buffer):
        return False
    own = LogFolder(files, stream, Buffer(kind)).notes().book.own()
    return any(gap.reason in LOST and gap.first <= problem.first and problem.last <= gap.last for gap in own)


# The new storage.


class _Target:
    """The new storage, while the zone is brought into it."""

    takes: TakesHistory
    state: NodeState
    artifacts: ArtifactStore
    mark: MovedMark

    def __init__(self, config: ZoneConfig, clock: Clock) -> None:
        self.config, self.clock = config, SettableClock(clock)
        self.stack = AsyncExitStack()

    @property
    def keeps_artifacts(self) -> bool:
        """Whether artifacts are in the storage itself."""
        return False

    @property
    def folder(self) -> Path:
        """The folder of what a node keeps beside its storage."""
        return self.config.data_folder

    async def open(self, source: _Source) -> None:
        """Be ready to take the zone in, with the mark of the migration that is begun or goes on."""
        raise NotImplementedError

    async def read(self) -> Storage:
        """Give what was brought as a node will find it."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Let nodes start on it."""
        raise NotImplementedError

    def _begin(self, source: _Source) -> None:
        """Say that it is being made."""
        now = self.clock.now_unix_ms()
        self.mark = MovedMark("target", source.config.storage.backend, now, secrets.token_hex(8))
        self.state.mark_moved(self.mark)

    async def _open_artifacts(self, storage: Storage | None) -> ArtifactStore:
        if storage is not None:
            return await open_artifacts(self.config, storage, self.clock)
        table = self.config.artifacts
        return await ArtifactFolder.open(
            self.config.artifacts_folder,
            clock=self.clock,
            max_artifact_bytes=table.max_artifact_bytes,
            capacity_bytes=table.capacity_bytes,
        )

    async def link(self, name: StoredArtifact) -> StoredArtifact:
        """Give a name to content, with the time that it had."""
        self.clock.at_unix_ms = name.created_unix_ms
        try:
            return await self.artifacts.link(name.bucket, name.key, name.digest, media_type=name.media_type)
        finally:
            self.clock.at_unix_ms = None


class _StorageTarget(_Target):
    """A storage that keeps frames, and is told what a change brings."""

    _storage: Storage

    @property
    def keeps_artifacts(self) -> bool:
        """Whether artifacts are in the storage itself."""
        return isinstance(self._storage, KeepsAll)

    async def open(self, source: _Source) -> None:
        """Claim the storage, and begin or go on."""
        try:
            self.stack.callback(lock_folder(self.config.data_folder))
            await self._open()
        except (FolderLocked, StorageTaken) as taken:
            raise _in_use(taken) from None
        mark = self.state.moved()
        if mark is not None and mark.is_target:
            self.mark = mark
        elif mark is not None:
            raise StorageNotEmpty(f"the new storage ({self.config.storage.backend}) was moved to {mark.other}")
        else:
            await self._check_empty(source)
            self._begin(source)
        known = set(await source.storage.streams())
        strange = [f"{stream}/{kind}" for stream, kind in await self._storage.streams() if (stream, kind) not in known]
        if strange and not self.mark.is_done:
            raise StorageNotEmpty(f"the new storage has buffers that the old one has not: {', '.join(strange)}")

    async def _open(self) -> None:
        self._storage = await open_storage(self.config, self.clock, lambda seconds: None)
        self.stack.push_async_callback(self._storage.close)
        if not isinstance(self._storage, KeepsHistory):
            raise _without_history(self._storage)
        self.takes = self._storage
        self.state = open_state(self.config, self._storage, self.clock)
        self.stack.callback(self.state.close)
        self.artifacts = await self._open_artifacts(self._storage)
        self.stack.push_async_callback(self.artifacts.close)

    async def _check_empty(self, source: _Source) -> None:
        held = [f"{stream}/{kind}" for stream, kind in await self._storage.streams()]
        held += [cursor.spec.name for cursor in _cursors_of(self._storage).listed()]
        held += ["values of a node"] if self.state.values() else []
        if not held and not _share_artifacts(source, self) and (await self.artifacts.stats()).artifacts:
            held.append("artifacts")
        if held:
            says = f"the new storage ({self.config.storage.backend}) is not empty: {', '.join(held[:5])}"
            raise StorageNotEmpty(says)

    async def read(self) -> Storage:
        """Open it again: what was brought is what its servers and files give, and not what is remembered here."""
        await self.stack.aclose()
        self.stack.callback(lock_folder(self.config.data_folder))
        await self._open()
        return self._storage

    async def finish(self) -> None:
        """Say that it is complete."""
        await asyncio.to_thread(self.state.mark_moved, replace(self.mark, is_done=True))


class _LogTarget(_Target):
    """A data folder in which a log is made."""

    takes: LogZoneImport

    @property
    def folder(self) -> Path:
        """The folder in which the log is made, before it has its place."""
        return self.config.data_folder / MIGRATING

    async def open(self, source: _Source) -> None:
        """Begin or go on in the folder in which it is made."""
        folder, staging = self.config.data_folder, self.folder
        try:
            self.stack.callback(lock_folder(folder))
        except FolderLocked as taken:
            raise _in_use(taken) from None
        if not staging.is_dir() and (folder / MARK).is_file():
            self._open_state(folder)
            return
        if not staging.is_dir():
            if held := _held(folder):
                raise StorageNotEmpty(f"{folder} is not empty: {', '.join(held)} is there")
            try:
                staging.mkdir(mode=0o700)
                DiskFiles(folder).sync_folder("")
            except OSError as error:
                raise translated(error, f"making {staging}") from None
        if (staging / _COMPLETE).exists():
            await asyncio.to_thread(self._move)
            self._open_state(folder)
            return
        self.takes = LogZoneImport(DiskFiles(staging), self._segment_bytes)
        self.state = NodeState(staging)
        self.stack.callback(self.state.close)
        mark = self.state.moved()
        if mark is None:
            self._begin(source)
        else:
            self.mark = mark
        shared = _share_artifacts(source, self)
        self.artifacts = source.artifacts if shared else await self._open_artifacts(None)
        if not shared:
            self.stack.push_async_callback(self.artifacts.close)

    def _open_state(self, folder: Path) -> None:
        """Read by which migration a log came to be in its place."""
        self.state = NodeState(folder)
        self.stack.callback(self.state.close)
        mark = self.state.moved()
        if mark is None or not mark.is_target:
            raise StorageNotEmpty(f"{folder} holds a zone already")
        self.mark = mark

    def _segment_bytes(self, stream: str, kind: Buffer) -> int:
        table = self.config.streams.get(stream)
        if table is None:
            return 64 << 20
        capacity = table.store_capacity_bytes if kind == Buffer.STORE else table.forward_capacity_bytes
        return max(1 << 20, capacity // 8)

    async def read(self) -> Storage:
        """Open the log where it is made, as a node will."""
        await asyncio.to_thread(self.takes.finish)
        self._storage = await LogStorage.open(self.folder, clock=self.clock)
        self.stack.push_async_callback(self._storage.close)
        return self._storage

    async def finish(self) -> None:
        """Give the log its place."""
        await self._storage.close()
        await asyncio.to_thread(self.state.mark_moved, replace(self.mark, is_done=True))
        self.state.close()
        await asyncio.to_thread(write_whole, DiskFiles(self.folder), _COMPLETE, b"")
        await asyncio.to_thread(self._move)

    def _move(self) -> None:
        """Move the parts of the log, the mark that makes a folder of it last; whoever was ended here goes on here."""
        folder, staging = self.config.data_folder, self.folder
        try:
            for name in (*_LOG_PARTS, MARK):
                if (staging / name).exists():
                    (staging / name).rename(folder / name)
                    DiskFiles(folder).sync_folder("")
            clear_away(staging)
            DiskFiles(folder).sync_folder("")
        except OSError as error:
            raise translated(error, f"moving {staging} into its place") from None


def _held(folder: Path) -> list[str]:
    return [name for name in (MARK, *_LOG_PARTS) if (folder / name).exists()]


def _share_artifacts(source: _Source, target: _Target) -> bool:
    """Tell whether both storages leave artifacts to one and the same folder."""
    if source.keeps_artifacts or target.keeps_artifacts:
        return False
    return source.config.artifacts_folder.resolve() == target.config.artifacts_folder.resolve()


# Moving.


async def plan(source: ZoneConfig, target: ZoneConfig, clock: Clock, progress: Progress) -> MigrationPlan:
    """Say what would be moved, and what is found where it would go; nothing is changed there."""
    check_pair(source, target)
    async with _opened_source(source, clock, progress) as old:
        rows = []
        for place in await old.places():
            found = place.history.found()
            head, ranges = found.head, sum(len(gap.ranges) for gap in found.gaps)
            size = (head.start, head.end, head.used_bytes, ranges, found.aside_count)
            rows.append(PlannedBuffer(place.stream, str(place.kind), found.log_id.hex(), *size))
        held = await old.artifacts.stats()
        return MigrationPlan(
            tuple(rows), len(old.consumers()), held.artifacts, held.used_bytes, await asyncio.to_thread(_look, target)
        )


def _look(target: ZoneConfig) -> str:
    if target.storage.backend != "log":
        return looked_at(target, 0)[0]
    folder = target.data_folder
    if (folder / MIGRATING).is_dir():
        return f"{folder}: a migration was begun, and goes on"
    return f"{folder}: not empty, it would be refused" if _held(folder) else f"{folder}: empty"


async def migrate(source: ZoneConfig, target: ZoneConfig, clock: Clock, progress: Progress) -> Migration:
    """Move a zone, or go on with it; the node may be started on the new storage when this has ended."""
    check_pair(source, target)
    kind = _LogTarget if target.storage.backend == "log" else _StorageTarget
    async with _opened_source(source, clock, progress) as old:
        places = await old.places()
        new = kind(target, clock)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(new.stack.aclose)
            await new.open(old)
            moved = old.state.moved()
            if moved is not None and not moved.is_target and moved.token != new.mark.token:
                raise StorageMoved(f"the facts of the zone were moved to {moved.other} already, and not to this place")
            if new.mark.is_done:
                if moved is None or moved.token != new.mark.token:
                    raise StorageNotEmpty("the new storage holds a zone that was moved to it before")
                return Migration(was_done=True)
            return await _Move(old, new, clock, progress).run(places)


class _Move:
    """One run of a migration."""

    def __init__(self, source: _Source, target: _Target, clock: Clock, progress: Progress) -> None:
        self._source, self._target, self._clock, self._progress = source, target, clock, progress
        self._result = Migration()
        self._named: set[str] = set()

    async def run(self, places: Sequence[HistoryPlace]) -> Migration:
        """Bring everything, hold it against the old storage, and let the new one take over."""
        source, target = self._source, self._target
        await self._copy(places)
        await target.takes.keep_consumers(source.consumers())
        self._result.consumers = len(source.consumers())
        for (kind, name), value in source.values().items():
            if target.state.get(kind, name) != value:
                await asyncio.to_thread(target.state.put, kind, name, value)
        await self._copy_artifacts()
        await asyncio.to_thread(self._copy_folder)
        await self._verify(places, await target.read())
        # In this order: from the first step on the old storage starts no node, from the second on the new one does.
        given = MovedMark("source", target.config.storage.backend, self._clock.now_unix_ms(), target.mark.token, True)
        await asyncio.to_thread(source.state.mark_moved, given)
        await target.finish()
        return self._result

    async def _copy(self, places: Sequence[HistoryPlace]) -> None:
        total = sum(place.history.found().head.used_bytes for place in places)
        gauge = _Gauge(self._progress, "copying", total)
        for place in places:
            found = place.history.found()
            new = NewBuffer(found.log_id, found.secret, genesis(found.log_id))
            into = replace(place, history=await self._target.takes.history(place.stream, place.kind, new))
            await gauge.run(HistoryCopy(place, into, gauge, self._named).run)

    # Artifacts.

    async def _copy_artifacts(self) -> None:
        source, target = self._source, self._target
        if _share_artifacts(source, target):
            return
        names = [name async for name in source.artifacts.names()]
        gauge = _Gauge(self._progress, "artifacts", (await source.artifacts.stats()).used_bytes)
        wanted = sorted(self._named | {name.digest for name in names})
        for digest in wanted:
            if await target.artifacts.exists(digest):
                continue
            if not await source.artifacts.exists(digest):
                self._result.missing_artifacts.append(digest)
                continue
            await target.artifacts.add(_counted(source.artifacts, digest, gauge), digest=digest)
        for name in names:
            if name.digest not in self._result.missing_artifacts:
                await target.link(name)
        # A name with the time that it had must not make its content old.
        await target.artifacts.claim([each for each in wanted if each not in self._result.missing_artifacts])
        self._result.artifacts = len(wanted) - len(self._result.missing_artifacts)

    async def _verify_artifacts(self) -> None:
        source, target = self._source, self._target
        if _share_artifacts(source, target):
            return
        missing = set(self._result.missing_artifacts)
        names = [name async for name in source.artifacts.names() if name.digest not in missing]
        if names != [name async for name in target.artifacts.names()]:
            raise StorageFailed("the names of artifacts in the new storage are not those of the old one")
        gauge = _Gauge(self._progress, "verifying artifacts", (await target.artifacts.stats()).used_bytes)
        for digest in sorted((self._named | {name.digest for name in names}) - missing):
            async for _ in _counted(target.artifacts, digest, gauge):
                pass

    # What is in the data folder, whatever keeps the facts.

    def _copy_folder(self) -> None:
        old, new = DiskFiles(self._source.config.data_folder), DiskFiles(self._target.config.data_folder)
        try:
            copy_trail(old, new)
            if old.exists(SESSIONS):
                beside = DiskFiles(self._target.folder)
                beside.make_folder(SESSIONS.rpartition("/")[0])
                write_whole(beside, SESSIONS, old.read(SESSIONS))
        except OSError as error:
            raise translated(error, "copying the audit trail") from None

    # Holding both against each other.

    async def _verify(self, places: Sequence[HistoryPlace], storage: Storage) -> None:
        total = sum(place.history.found().head.used_bytes for place in places)
        gauge = _Gauge(self._progress, "verifying", 2 * total)
        for place in places:
            there = replace(place, history=await _history_of(storage, place.stream, place.kind))
            old, new = await gauge.run(lambda: (digest_of(place, gauge), digest_of(there, gauge)))  # noqa: B023
            if (respect := first_difference(old, new)) is not None:
                raise StorageFailed(
                    f"{place} differs in the new storage: {respect}",
                    hint="Nothing was given over; the old storage is as it was. Run it again, or into another place.",
                )
            self._result.buffers.append(MigratedBuffer(place.stream, str(place.kind), new))
        if _documents(self._source.consumers()) != _documents(_cursors_of(storage).listed()):
            raise StorageFailed("the consumers of the new storage are not those of the old one")
        values = self._source.values()
        if any(self._target.state.get(*key) != value for key, value in values.items()):
            raise StorageFailed("what the node remembers is not the same in the new storage")
        await self._verify_artifacts()


def _documents(cursors: Sequence[ConsumerCursor]) -> list[dict[str, Any]]:
    return [as_document(cursor) for cursor in cursors]


async def _counted(artifacts: ArtifactStore, digest: str, gauge: _Gauge) -> AsyncIterator[bytes]:
    async for piece in artifacts.get(digest):
        gauge(len(piece))
        yield piece


def as_dict(found: Migration | MigrationPlan) -> dict[str, Any]:
    """Give the JSON form of what was, or would be, moved."""
    document = asdict(found)
    if isinstance(found, Migration):
        document["buffers"] = [
            {"stream": each.stream, "buffer": each.buffer, **asdict(each.found)} for each in found.buffers
        ]
    return document
