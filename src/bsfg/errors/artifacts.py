"""Errors of artifacts."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class ArtifactMissing(BsfgError):
    """The content that a fact or a request names is not here."""

    code = "artifact_missing"
    default_hint = "Upload the artifact first, under the bucket and key that the fact names, then append the fact."


class ArtifactConflict(BsfgError):
    """The bucket and key stand for other content."""

    code = "artifact_conflict"
    default_hint = "An artifact is immutable: upload the new content under another key and append a new fact."


class ArtifactTooLarge(BsfgError):
    """The content exceeds the largest size that this store accepts."""

    code = "artifact_too_large"
    default_hint = "Split the content, or raise max_artifact in [artifacts] of every zone that it passes."


class ArtifactStoreFull(BsfgError):
    """The store of artifacts has reached its capacity."""

    code = "artifact_store_full"
    retryable = True
    default_hint = "Retry after the next orphan collection, or raise capacity in [artifacts]."
