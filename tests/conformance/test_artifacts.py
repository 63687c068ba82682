"""Artifact stores keep their contract: in memory, in a folder, and on a disk that breaks on demand."""

from pathlib import Path
from typing import TypedDict

from bsfg.artifacts import ArtifactStore
from bsfg.ports import Clock
from bsfg.stores.artifacts import ArtifactFolder, MemoryArtifacts
from bsfg.testing.conformance import ArtifactStoreContract


class Settings(TypedDict):
    """What a store is opened with."""

    clock: Clock
    max_artifact_bytes: int | None
    capacity_bytes: int | None


class TestMemory(ArtifactStoreContract):
    """Artifacts in memory."""

    async def make(
        self, tmp_path: Path, *, clock: Clock, max_artifact_bytes: int | None, capacity_bytes: int | None
    ) -> ArtifactStore:
        """Make a store in memory."""
        self.settings = Settings(clock=clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes)
        return MemoryArtifacts(**self.settings)

    async def reopen(self, store: ArtifactStore) -> ArtifactStore:
        """Open what the medium holds."""
        assert isinstance(store, MemoryArtifacts)
        await store.close()
        return MemoryArtifacts(**self.settings, medium=store.medium)

    async def damage(self, store: ArtifactStore, digest: str, data: bytes) -> None:
        """Change what the medium holds."""
        assert isinstance(store, MemoryArtifacts)
        store.medium.contents[digest].data = data


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
