"""Artifact stores keep their contract: in a folder, on a disk that breaks on demand, in PostgreSQL and JetStream."""

import itertools
import os
from pathlib import Path
from typing import TypedDict

from tests.servers import jetstream, postgres

from bsfg.artifacts import ArtifactStore
from bsfg.ports import Clock
from bsfg.stores.artifacts import ArtifactFolder
from bsfg.stores.jetstream.server import JetStreamSettings
from bsfg.stores.jetstream.storage import JetStreamArtifacts, JetStreamStorage
from bsfg.stores.postgres.database import PostgresSettings
from bsfg.stores.postgres.storage import PostgresArtifacts, PostgresStorage
from bsfg.stores.shared.artifacts import PIECE_BYTES
from bsfg.testing.conformance import ArtifactStoreContract
from bsfg.testing.disk import SimulatedArtifactDisk

_numbers = itertools.count(1)


class Settings(TypedDict):
    """What a store is opened with."""

    clock: Clock
    max_artifact_bytes: int | None
    capacity_bytes: int | None


class TestSimulated(ArtifactStoreContract):
    """Artifacts on a disk in memory."""

    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make a folder on such a disk."""
        self.disk = SimulatedArtifactDisk()
        self.settings = Settings(clock=clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes)
        return await ArtifactFolder.open(self.disk, **self.settings)

    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Open what the disk holds."""
        await store.close()
        return await ArtifactFolder.open(self.disk, **self.settings)

    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Write another file in the place of the content."""
        digits = digest.removeprefix("sha256:")
        path = f"content/{digits[:2]}/{digits}"
        self.disk.remove(path)
        self.disk.create(path).write([data])


class TestFolder(ArtifactStoreContract):
    """Artifacts in a folder."""

    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make a folder."""
        self.folder = tmp_path / "data" / "artifacts"
        self.settings = Settings(clock=clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes)
        return await ArtifactFolder.open(self.folder, **self.settings)

    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Open the folder again."""
        await store.close()
        return await ArtifactFolder.open(self.folder, **self.settings)

    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Write over the file."""
        digits = digest.removeprefix("sha256:")
        (self.folder / "content" / digits[:2] / digits).write_bytes(data)


class TestPostgres(ArtifactStoreContract):
    """Artifacts in PostgreSQL."""

    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make a schema."""
        name = f"a{os.getpid()}_{next(_numbers)}"
        self.server = PostgresSettings(postgres().role(name), name)
        self.settings = {"max_artifact_bytes": max_artifact_bytes, "capacity_bytes": capacity_bytes}
        self.clock = clock
        return await self._open()

    async def _open(self) -> ArtifactStore:
        storage = await PostgresStorage.open(self.server, zone="plant", clock=self.clock)
        return ClosesBoth(storage, self.clock, **self.settings)

    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Open the tables again."""
        await store.close()
        return await self._open()

    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Write over the pieces."""
        schema = self.server.schema
        asked = f"SELECT upload FROM {schema}.artifact_content WHERE digest = %s"
        ((upload,),) = postgres().execute(asked, digest)
        postgres().execute(f"DELETE FROM {schema}.artifact_chunk WHERE upload = %s", upload)
        for part, at in enumerate(range(0, len(data), PIECE_BYTES)):
            piece = data[at : at + PIECE_BYTES]
            postgres().execute(f"INSERT INTO {schema}.artifact_chunk VALUES (%s, %s, %s)", upload, part, piece)


class ClosesBoth(PostgresArtifacts):
    """A store that closes the storage behind it, since nobody else does."""

    def __init__(self, storage: PostgresStorage, clock: Clock, **settings: int | None) -> None:
        super().__init__(storage.database, clock, **settings)
        self._storage = storage

    async def close(self) -> None:
        """Close both."""
        await super().close()
        await self._storage.close()


class TestJetStream(ArtifactStoreContract):
    """Artifacts in JetStream."""

    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make streams."""
        prefix = f"a{os.getpid()}_{next(_numbers)}"
        self.server = JetStreamSettings([jetstream().url], prefix, monitor_url=jetstream().monitor_url)
        self.settings = {"max_artifact_bytes": max_artifact_bytes, "capacity_bytes": capacity_bytes}
        self.clock = clock
        return await self._open()

    async def _open(self) -> ArtifactStore:
        storage = await JetStreamStorage.open(self.server, zone="plant", clock=self.clock)
        return ClosesStorage(storage, self.clock, **self.settings)

    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Open the streams again."""
        await store.close()
        return await self._open()

    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Write other messages in the place of the content's."""
        assert isinstance(store, ClosesStorage)
        await store.damage(digest, data)


class ClosesStorage(JetStreamArtifacts):
    """A store that closes the storage behind it, since nobody else does."""

    def __init__(self, storage: JetStreamStorage, clock: Clock, **settings: int | None) -> None:
        super().__init__(storage.zone, clock, **settings)
        self._storage = storage

    async def damage(self, digest: str, data: bytes) -> None:
        """Write other messages in the place of the content's."""
        server, upload = self._storage.server, self._content[digest].upload
        name, base = self._storage.zone.names.artifacts

        async def write() -> None:
            await server.api(f"STREAM.PURGE.{name}", {"filter": f"{base}.{upload}"})
            for at in range(0, len(data), PIECE_BYTES):
                await server.publish(f"{base}.{upload}", data[at : at + PIECE_BYTES], {})

        server.run("damaging an artifact", write)

    async def close(self) -> None:
        """Close both."""
        await super().close()
        await self._storage.close()
