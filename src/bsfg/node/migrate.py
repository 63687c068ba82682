"""Moving a zone from one storage to another while its node is stopped; peers see the same history go on.

Everything is brought into an empty place, read there again and held against the old storage by digest. Then the old
storage is marked as moved, and after it the new one as complete: at no moment can a node be started on both. Nothing
else of the old one is changed. Whatever ends it in the middle, the same command goes on from what is there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from bsfg.artifacts import ArtifactStore
from bsfg.config import ZoneConfig
from bsfg.errors import InvalidArgument, StorageFailed, StorageNotEmpty, StorageUnable
from bsfg.node.backends import MIGRATING, looked_at
from bsfg.node.backup import Meter, Progress
from bsfg.node.migration_sides import (
    NewLog,
    NewSide,
    NewStorage,
    OldSide,
    cursors_of,
    held_in,
    history_of,
    opened_source,
    share_artifacts,
)
from bsfg.node.state import MovedMark
from bsfg.ports import Clock, Storage
from bsfg.stores.log.files import SESSIONS, DiskFiles, translated, write_whole
from bsfg.stores.log.trailfile import copy_trail
from bsfg.stores.shared.cursors import ConsumerCursor, as_document
from bsfg.stores.shared.frame import genesis
from bsfg.stores.shared.history import HistoryCopy, HistoryDigest, HistoryPlace, digest_of, first_difference
from bsfg.stores.shared.keeper import NewBuffer

Found = TypeVar("Found")


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


class _Stopped(BaseException):
    """Whoever waits for a thread has gone."""


class _Gauge(Meter):
    """Counts bytes in a thread, which ends when nobody waits for it any more."""

    def __init__(self, progress: Progress, doing: str, total: int) -> None:
        super().__init__(progress, doing, total)
        self._ending = threading.Event()

    def __call__(self, size_bytes: int) -> None:
        """Count bytes that are done."""
        if self._ending.is_set():
            raise _Stopped
        super().__call__(size_bytes)

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


# Moving.


async def plan(source: ZoneConfig, target: ZoneConfig, clock: Clock, progress: Progress) -> MigrationPlan:
    """Say what would be moved, and what is found where it would go; nothing is changed there."""
    check_pair(source, target)
    async with opened_source(source, clock, progress) as old:
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
        found = looked_at(target, 0)
        # Whose they are stands in the storage's values, which are read when it is opened, and that would be a change.
        refused = "; unless a migration that was interrupted has brought them, it would be refused"
        return found.said + (refused if found.buffers else "")
    folder = target.data_folder
    if (folder / MIGRATING).is_dir():
        return f"{folder}: a migration was begun, and goes on"
    return f"{folder}: not empty, it would be refused" if held_in(folder) else f"{folder}: empty"


async def migrate(source: ZoneConfig, target: ZoneConfig, clock: Clock, progress: Progress) -> Migration:
    """Move a zone, or go on with it; the node may be started on the new storage when this has ended."""
    check_pair(source, target)
    kind = NewLog if target.storage.backend == "log" else NewStorage
    async with opened_source(source, clock, progress) as old:
        places = await old.places()
        new = kind(target, clock)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(new.stack.aclose)
            await new.open(old)
            old.check_here(new.mark.token)
            moved = old.state.moved()
            if new.mark.is_done:
                if moved is None or moved.token != new.mark.token:
                    raise StorageNotEmpty("the new storage holds a zone that was moved to it before")
                return Migration(was_done=True)
            return await _Move(old, new, clock, progress).run(places)


class _Move:
    """One run of a migration."""

    def __init__(self, source: OldSide, target: NewSide, clock: Clock, progress: Progress) -> None:
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
        if share_artifacts(source, target):
            return
        names = [name async for name in source.artifacts.names()]
        gauge = _Gauge(self._progress, "artifacts", (await source.artifacts.stats()).used_bytes)
        wanted = sorted(self._named | {name.digest for name in names})
        # What an earlier attempt has brought and the old zone has let go since goes here, too, with its names.
        known = set(names)
        strange = {each.digest async for each in target.artifacts.names() if each not in known}
        if strange:
            now_unix_ms = self._clock.now_unix_ms()
            await target.artifacts.collect(set(wanted) - strange, now_unix_ms=now_unix_ms, grace_seconds=0)
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
        if share_artifacts(source, target):
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
            there = replace(place, history=await history_of(storage, place.stream, place.kind))
            old, new = await gauge.run(lambda: (digest_of(place, gauge), digest_of(there, gauge)))  # noqa: B023
            if (respect := first_difference(old, new)) is not None:
                raise StorageFailed(
                    f"{place} differs in the new storage: {respect}",
                    hint="Nothing was given over; the old storage is as it was. Run it again, or into another place.",
                )
            self._result.buffers.append(MigratedBuffer(place.stream, str(place.kind), new))
        if _documents(self._source.consumers()) != _documents(cursors_of(storage).listed()):
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
