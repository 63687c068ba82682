"""The stores of artifacts: a folder on a disk, and one in memory for tests and simulation."""

from __future__ import annotations

from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.artifacts.memory import ArtifactMedium, MemoryArtifacts

__all__ = ["ArtifactFolder", "ArtifactMedium", "MemoryArtifacts"]
