"""Opens what keeps a zone's facts: the embedded log, PostgreSQL, JetStream, memory, or what another package brings.

The audit trail is in the data folder, whatever keeps the facts. So are the node's state and the zone's
artifacts, unless the storage keeps these as well.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from bsfg.config import ZoneConfig
from bsfg.config.checks import BACKENDS
from bsfg.errors import ConfigInvalid, ExtraMissing, MigrationUnfinished
from bsfg.node.state import NodeState, StateKeeper
from bsfg.ports import ArtifactStore, Clock, Storage, StorageRequest
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.files import DiskFiles, translated
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.storage import MARK, LogStorage
from bsfg.stores.log.writer import LogOptions

if TYPE_CHECKING:
    from bsfg.stores.jetstream.server import JetStreamSettings
    from bsfg.stores.jetstream.zone import ClaimWatch
    from bsfg.stores.postgres.database import PostgresSettings
    from bsfg.stores.postgres.place import PlaceWatch
    from bsfg.stores.shared.keeper import ZoneNode


@runtime_checkable
class WithReserve(Protocol):
    """A storage on a disk of its own, with a reserve to empty it by when it is full."""

    reserve: Reserve

    async def relieve(self) -> None:
        """Let confirmed facts leave while the disk is full."""


@runtime_checkable
class KeepsAll(Protocol):
    """A storage that also keeps the node's state and the zone's artifacts: a node of another machine finds them too."""

    def artifacts(self, *, max_artifact_bytes: int | None, capacity_bytes: int | None) -> ArtifactStore:
        """Give the store of the zone's artifacts."""

    def state(self) -> StateKeeper:
        """Give what keeps the node's values."""


@runtime_checkable
class SharedStorage(Protocol):
    """A storage that several nodes of the zone can reach, of which one is active."""

    def nodes(self) -> Sequence[ZoneNode]:
        """Give the nodes that run, the active one first."""

    async def end_waiting(self) -> None:
        """End whatever waits for a server; what was being changed has an unknown outcome, and nothing is changed."""

    async def overtaken(self) -> None:
        """Wait until another node is active."""


async def open_storage(config: ZoneConfig, clock: Clock, on_sync: Callable[[float], None]) -> Storage:
    """Open the storage that a configuration names."""
    backend = config.storage.backend
    if backend == "log":
        # Refuse to begin anew beside a log that is being made of another storage's facts.
        if (config.data_folder / MIGRATING).is_dir():
            raise MigrationUnfinished(f"{config.data_folder} is to hold a zone that is not all there yet")
        options = LogOptions(reserve_bytes=config.storage.reserve_bytes)
        return await LogStorage.open(config.data_folder, clock=clock, options=options, on_sync=on_sync)
    # Refuse to leave behind what the embedded log holds: nobody would serve it, and nobody would be told.
    if (config.data_folder / MARK).exists():
        raise ConfigInvalid(
            f"{config.data_folder} holds the facts of an embedded log, and backend is {config.storage.backend!r}",
            hint='Write backend = "log" to go on with them; `bsfg migrate` moves them, into another data_folder.',
        )
    if backend == "postgres":
        settings = _postgres_settings(config)
        from bsfg.stores.postgres.storage import PostgresStorage

        return await PostgresStorage.open(settings, zone=config.zone.name, clock=clock, on_sync=on_sync)
    if backend == "jetstream":
        return await _open_jetstream(config, clock, on_sync)
    if backend == "memory":
        from bsfg.stores.memory import MemoryStorage

        return MemoryStorage(clock=clock)
    (found,) = entry_points(group=BACKENDS, name=backend)
    request = StorageRequest(config.zone.name, config.data_folder, config.storage.options or {}, clock, on_sync)
    storage: Storage = await found.load()(request)
    return storage


def _postgres_settings(config: ZoneConfig) -> PostgresSettings:
    try:
        from bsfg.stores.postgres.database import PostgresSettings
    except ImportError as error:
        raise ExtraMissing.behind(error, 'backend = "postgres"') or error from None
    table = config.postgres
    times = table.patience_seconds, table.takeover_after_seconds
    return PostgresSettings(table.dsn or "", table.schema, table.allow_unsafe, *times, node_name(config))


def node_name(config: ZoneConfig) -> str:
    """Name a node among those of its zone: its machine, and the port it listens on."""
    return f"{socket.gethostname()}:{config.listen.grpc.port}"


def can_be_watched(config: ZoneConfig) -> bool:
    """Tell whether a node can stand by at a zone's storage for the one that is active."""
    return config.storage.backend in ("postgres", "jetstream")


def watch_of(config: ZoneConfig) -> PlaceWatch | ClaimWatch:
    """Give what watches the active node of a zone, for one that stands by."""
    if config.storage.backend == "jetstream":
        from bsfg.stores.jetstream.zone import ClaimWatch

        return ClaimWatch(_jetstream_settings(config), config.zone.name)
    settings = _postgres_settings(config)
    from bsfg.stores.postgres.database import Database

    return Database(settings).watch()


async def _open_jetstream(config: ZoneConfig, clock: Clock, on_sync: Callable[[float], None]) -> Storage:
    settings = _jetstream_settings(config)
    from bsfg.stores.jetstream.storage import JetStreamStorage

    return await JetStreamStorage.open(settings, zone=config.zone.name, clock=clock, on_sync=on_sync)


def _jetstream_settings(config: ZoneConfig) -> JetStreamSettings:
    try:
        from bsfg.stores.jetstream.server import JetStreamSettings
    except ImportError as error:
        raise ExtraMissing.behind(error, 'backend = "jetstream"') or error from None
    table = config.jetstream

    def path(relative: PurePath | None) -> Path | None:
        return config.path(relative) if relative is not None else None

    return JetStreamSettings(
        table.servers or (),
        table.prefix,
        table.replicas,
        table.monitor_url,
        path(table.credentials),
        path(table.ca),
        path(table.certificate),
        path(table.key),
        table.allow_unsafe,
        table.patience_seconds,
        node_name(config),
    )


class StorageLook(NamedTuple):
    """What is found where a zone's facts are, without changing anything."""

    said: str
    buffers: int
    wrong: list[str]


def looked_at(config: ZoneConfig, verified_bytes_max: int) -> StorageLook:
    """Look at where a zone's facts are; raises what a start would.

    Nothing is changed. Up to so many bytes every fact is read and held against the chain.
    """
    if config.storage.backend == "jetstream":
        settings = _jetstream_settings(config)
        from bsfg.stores.jetstream.storage import look

        return StorageLook(*look(settings, config.zone.name, verified_bytes_max))
    if config.storage.backend != "postgres":
        return StorageLook(f"facts are kept by {config.storage.backend}", 0, [])
    from bsfg.stores.postgres.database import Connection, Database
    from bsfg.stores.postgres.frames import chain_breaks

    breaks: list[str] = []
    read: list[str] = []

    def further(connection: Connection) -> None:
        ((used,),) = connection.execute("SELECT coalesce(sum(used_bytes), 0)::bigint FROM buffer").fetchall()
        if used <= verified_bytes_max:
            with connection.transaction():
                # One moment for all of it: the node may write meanwhile.
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                breaks.extend(chain_breaks(connection))
            read.append(", every byte verified" if not breaks else "")

    said, buffers = Database(_postgres_settings(config)).look(config.zone.name, further)
    return StorageLook(said + "".join(read), buffers, breaks)


MIGRATING = "migrating"
"""The folder inside a data folder in which a log is made of another storage's facts."""


def lock_folder(folder: Path) -> Callable[[], None]:
    """Keep a second node from the folder of a zone whose facts are elsewhere; give what ends that."""
    files = DiskFiles(folder)
    try:
        files.make_folder("")
        return files.lock("LOCK")
    except OSError as error:
        raise translated(error, f"opening {folder}") from None


def open_state(config: ZoneConfig, storage: Storage, clock: Clock) -> NodeState:
    """Open what the node remembers, in its storage if that keeps it, else in the data folder."""
    if isinstance(storage, KeepsAll):
        return NodeState(storage.state())
    return NodeState(config.data_folder, reserve_of(storage, config.data_folder, clock))


async def open_artifacts(config: ZoneConfig, storage: Storage, clock: Clock) -> ArtifactStore:
    """Open the zone's artifacts, in its storage if that keeps them, else in their folder."""
    table = config.artifacts
    if isinstance(storage, KeepsAll):
        return storage.artifacts(max_artifact_bytes=table.max_artifact_bytes, capacity_bytes=table.capacity_bytes)
    reserve = reserve_of(storage, config.data_folder, clock)
    return await ArtifactFolder.open(
        config.artifacts_folder,
        clock=clock,
        max_artifact_bytes=table.max_artifact_bytes,
        capacity_bytes=table.capacity_bytes,
        is_full=lambda: reserve.short and _same_disk(config.data_folder, config.artifacts_folder),
    )


def _same_disk(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return True


def reserve_of(storage: Storage, folder: Path, clock: Clock) -> Reserve:
    """Give the reserve of the disk that the node's own files are on; none where the storage has none."""
    return storage.reserve if isinstance(storage, WithReserve) else Reserve(DiskFiles(folder), 0, clock)
