"""Artifact stores keep their contract: in a folder, and on a disk that breaks on demand."""

from pathlib import Path
from typing import TypedDict

from bsfg.artifacts import ArtifactStore
from bsfg.ports import Clock
from bsfg.stores.artifacts import ArtifactFolder
from bsfg.testing.conformance import ArtifactStoreContract
from bsfg.testing.disk import SimulatedArtifactDisk


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
