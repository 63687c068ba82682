"""The store of artifacts: a folder on a disk."""

from __future__ import annotations

from bsfg.stores.artifacts.folder import ArtifactFolder

__all__ = ["ArtifactFolder"]
