"""The two sides of a migration: the old storage, checked and kept from everybody else, and the new one being made.

A log is made in the folder ``migrating`` of its data folder, and gets its place when it is complete.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
    StorageMoved,
    StorageNotEmpty,
    StorageTaken,
    StorageUnable,
)
from bsfg.node.backends import MIGRATING, KeepsAll, lock_folder, open_artifacts, open_state, open_storage
from bsfg.node.backup import Progress
from bsfg.node.state import STATE, MovedMark, NodeState
from bsfg.ports import Buffer, Clock, Storage
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.damage import DamageFinding
from bsfg.stores.log.files import DiskFiles, translated, write_whole
from bsfg.stores.log.history import LogZoneImport, exported
from bsfg.stores.log.journal import read_journal
from bsfg.stores.log.reader import LogFolder
from bsfg.stores.log.storage import CURSORS, MARK, STREAMS, LogStorage
from bsfg.stores.log.trailfile import FOLDER as TRAIL
from bsfg.stores.log.verify import verify
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors
from bsfg.stores.shared.history import HistoryPlace
from bsfg.stores.shared.judging import LOST
from bsfg.stores.shared.keeper import BufferHistory, NewBuffer

_COMPLETE = "complete"
"""The file in the folder of a log that is being made which says that it only needs its place."""

_STOP_HINT = "Stop the node of the zone first, and those that stand by; nothing was changed."
_OF_THE_STORAGE = frozenset({"storage", "scrub"})
"""Kinds of values that the node keeps about its storage itself, and that mean nothing to another one."""

_LOG_PARTS = (STREAMS, "cursors", "node")


class TakesHistory(Protocol):
    """Where a history is brought: a storage, or a log that is being made."""

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer) -> BufferHistory:
        """Give a buffer to bring it into, made when there is none."""
        ...

    async def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make the consumers of a history durable."""
        ...


@runtime_checkable
class KeepsHistory(TakesHistory, Protocol):
    """A storage whose buffers are kept in frames, so that their history can be carried."""

    cursors: Cursors

    async def history(self, stream: str, buffer: Buffer, new: NewBuffer | None = None) -> BufferHistory:
        """Give the history of a buffer, made when there is none."""
        ...


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


@dataclass(slots=True)
class OldSide:
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
        return [HistoryPlace(stream, kind, await history_of(self.storage, stream, kind)) for stream, kind in names]

    def consumers(self) -> list[ConsumerCursor]:
        """Give all consumers."""
        return cursors_of(self.storage).listed()

    def check_here(self, token: str = "") -> None:
        """Raise `StorageMoved` when it was given over before, by another migration: no second place is even begun."""
        moved = self.state.moved()
        if moved is not None and not moved.is_target and moved.token != token:
            raise StorageMoved(f"the facts of the zone were moved to {moved.other} already, and not to this place")

    def values(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Give what the node remembers and another storage can know."""
        return {key: value for key, value in self.state.values().items() if key[0] not in _OF_THE_STORAGE}


async def history_of(storage: Storage, stream: str, kind: Buffer) -> BufferHistory:
    """Give the history of a buffer of a storage that is open."""
    if isinstance(storage, LogStorage):
        return await exported(storage, stream, kind)
    if isinstance(storage, KeepsHistory):
        return await storage.history(stream, kind)
    raise _without_history(storage)


def cursors_of(storage: Storage) -> Cursors:
    """Give the consumers of a storage whose history can be carried."""
    if isinstance(storage, LogStorage | KeepsHistory):
        return storage.cursors
    raise _without_history(storage)


def _without_history(storage: Storage) -> StorageUnable:
    says = f'backend = "{storage.capabilities.backend}" does not keep facts in frames, which alone can be moved'
    return StorageUnable(says, hint="Link a new zone to it, and let the facts be pulled.")


@asynccontextmanager
async def opened_source(config: ZoneConfig, clock: Clock, progress: Progress) -> AsyncIterator[OldSide]:
    """Open the old storage, after a look at all of it where it is a log; who has it open is to be stopped first."""
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
        try:
            yield OldSide(config, storage, state, artifacts, isinstance(storage, KeepsAll))
        except OSError as error:
            raise translated(error, f"moving {config.zone.name}") from None


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


class NewSide(ABC):
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

    @abstractmethod
    async def open(self, source: OldSide) -> None:
        """Be ready to take the zone in, with the mark of the migration that is begun or goes on."""

    @abstractmethod
    async def read(self) -> Storage:
        """Give what was brought as a node will find it."""

    @abstractmethod
    async def finish(self) -> None:
        """Let nodes start on it."""

    def _begin(self, source: OldSide) -> None:
        """Say that it is being made, of a zone that was not moved before."""
        source.check_here()
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


class NewStorage(NewSide):
    """A storage that keeps frames, and is told what a change brings."""

    _storage: Storage

    @property
    def keeps_artifacts(self) -> bool:
        """Whether artifacts are in the storage itself."""
        return isinstance(self._storage, KeepsAll)

    async def open(self, source: OldSide) -> None:
        """Claim the storage, and begin or go on."""
        await self._open()
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
        try:
            self.stack.callback(lock_folder(self.config.data_folder))
            self._storage = await open_storage(self.config, self.clock, lambda seconds: None)
        except (FolderLocked, StorageTaken) as taken:
            raise _in_use(taken) from None
        self.stack.push_async_callback(self._storage.close)
        if not isinstance(self._storage, KeepsHistory):
            raise _without_history(self._storage)
        self.takes = self._storage
        self.state = open_state(self.config, self._storage, self.clock)
        self.stack.callback(self.state.close)
        self.artifacts = await self._open_artifacts(self._storage)
        self.stack.push_async_callback(self.artifacts.close)

    async def _check_empty(self, source: OldSide) -> None:
        held = [f"{stream}/{kind}" for stream, kind in await self._storage.streams()]
        held += [cursor.spec.name for cursor in cursors_of(self._storage).listed()]
        held += ["values of a node"] if self.state.values() else []
        if not held and not share_artifacts(source, self) and (await self.artifacts.stats()).artifacts:
            held.append("artifacts")
        if held:
            says = f"the new storage ({self.config.storage.backend}) is not empty: {', '.join(held[:5])}"
            raise StorageNotEmpty(says)

    async def read(self) -> Storage:
        """Open it again: what was brought is what its servers and files give, and not what is remembered here."""
        await self.stack.aclose()
        await self._open()
        return self._storage

    async def finish(self) -> None:
        """Say that it is complete."""
        await asyncio.to_thread(self.state.mark_moved, replace(self.mark, is_done=True))


class NewLog(NewSide):
    """A data folder in which a log is made."""

    takes: LogZoneImport

    @property
    def folder(self) -> Path:
        """The folder in which the log is made, before it has its place."""
        return self.config.data_folder / MIGRATING

    async def open(self, source: OldSide) -> None:
        """Begin or go on in the folder in which it is made."""
        folder, staging = self.config.data_folder, self.folder
        try:
            self.stack.callback(lock_folder(folder))
        except FolderLocked as taken:
            raise _in_use(taken) from None
        if (folder / MARK).is_file() or (staging / _COMPLETE).exists():
            # It has its place, or only needs it, however little is left of the folder in which it was made.
            await asyncio.to_thread(self._move)
            self._open_state(folder)
            return
        if not staging.is_dir():
            if held := held_in(folder):
                raise StorageNotEmpty(f"{folder} is not empty: {', '.join(held)} is there")
            source.check_here()
            try:
                staging.mkdir(mode=0o700)
                DiskFiles(folder).sync_folder("")
            except OSError as error:
                raise translated(error, f"making {staging}") from None
        self.state = NodeState(staging)
        self.stack.callback(self.state.close)
        mark = self.state.moved()
        if mark is not None and mark.is_done:
            self.mark = mark
            await self._settle()
            return
        self.takes = LogZoneImport(DiskFiles(staging), self._segment_bytes)
        shared = share_artifacts(source, self)
        self.artifacts = source.artifacts if shared else await self._open_artifacts(None)
        if not shared:
            self.stack.push_async_callback(self.artifacts.close)
        if mark is None:
            if not shared and (await self.artifacts.stats()).artifacts:
                raise StorageNotEmpty(f"{self.config.artifacts_folder} holds artifacts already")
            self._begin(source)
        else:
            self.mark = mark

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
        await self._settle()

    async def _settle(self) -> None:
        """Have a log whose state says that it is complete moved, whoever begins that."""
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


def held_in(folder: Path) -> list[str]:
    """Name what a data folder holds of a log."""
    return [name for name in (MARK, *_LOG_PARTS) if (folder / name).exists()]


def share_artifacts(source: OldSide, target: NewSide) -> bool:
    """Tell whether both storages leave artifacts to one and the same folder."""
    if source.keeps_artifacts or target.keeps_artifacts:
        return False
    return source.config.artifacts_folder.resolve() == target.config.artifacts_folder.resolve()
