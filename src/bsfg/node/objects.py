"""Artifacts at the boundary: uploads and downloads for those who may, and facts only with the artifacts they name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson

from bsfg.batch import FactBatch
from bsfg.errors import ArtifactMissing, DigestMismatch, InvalidArgument
from bsfg.journey.artifacts import named_artifacts, require_artifacts
from bsfg.node.authorize import Action, Request
from bsfg.node.parts import Parts
from bsfg.ports import ArtifactStore
from bsfg.wire.service import Caller, ObjectInfo


class Objects:
    """The artifact store behind the door of the node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def put(self, caller: Caller, info: ObjectInfo, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Store an artifact."""
        self._parts.guard.check(caller, Request(Action.UPLOAD))
        store = self._store()
        before = await store.stat(info.bucket, info.key)
        stored = await store.put(
            info.bucket,
            info.key,
            chunks,
            media_type=info.media_type,
            digest=info.digest,
            size_bytes=info.size_bytes,
        )
        return ObjectInfo(
            stored.bucket,
            stored.key,
            stored.media_type,
            info.file_name,
            stored.digest,
            stored.size_bytes,
            already_exists=before is not None,
        )

    async def get(
        self, caller: Caller, bucket: str, key: str, digest: str | None
    ) -> tuple[ObjectInfo, AsyncIterator[bytes]]:
        """Give an artifact by name, or by digest alone, and its bytes, which are verified while they are read."""
        self._parts.guard.check(caller, Request(Action.DOWNLOAD))
        store = self._store()
        if digest is not None:
            [size_bytes] = await store.claim([digest])
            if size_bytes is None:
                raise ArtifactMissing(f"no artifact with digest {digest} is here", digest=digest)
            return ObjectInfo(bucket, key, digest=digest, size_bytes=size_bytes), store.get(digest)
        found = await store.stat(bucket, key)
        if found is None:
            raise ArtifactMissing(f"there is no artifact {bucket}/{key} here", bucket=bucket, key=key)
        info = ObjectInfo(bucket, key, found.media_type, None, found.digest, found.size_bytes)
        return info, store.get(found.digest)

    async def require(self, facts: FactBatch) -> None:
        """Raise unless every artifact that a producer's facts name was uploaded here under that name."""
        if self._parts.artifacts is not None or named_artifacts(facts):
            await require_artifacts(facts, self._store())

    async def claim(self, facts: FactBatch) -> None:
        """Raise unless every artifact that facts name is here and has the size they say; keep those that are."""
        sizes = _named(facts)
        if not sizes:
            return
        found = await self._store().claim(list(sizes))
        for (digest, said), size_bytes in zip(sizes.items(), found, strict=True):
            if size_bytes is None:
                raise ArtifactMissing(f"a fact names the artifact {digest}, which is not here", digest=digest)
            if size_bytes != said:
                raise DigestMismatch(f"artifact {digest} has {size_bytes} bytes, a fact says {said}", digest=digest)

    def _store(self) -> ArtifactStore:
        store = self._parts.artifacts
        if store is None:
            raise InvalidArgument("this node keeps no artifacts", hint="Use a node with an artifact store.")
        return store


def _named(facts: FactBatch) -> dict[str, int]:
    """Give the size that facts say of each artifact they name, by digest."""
    if not facts.has_rows and facts.column("artifact").null_count == len(facts):
        return {}
    references = [orjson.loads(text) for text in facts.values("artifact") if text is not None]
    return {reference["digest"]: reference["size_bytes"] for reference in references}
