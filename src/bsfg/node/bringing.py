"""Before facts of a link are put: may its peer bring them, and are the artifacts here that they name?"""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson

from bsfg.batch import FactBatch
from bsfg.errors import ZoneNotAllowed
from bsfg.node.objects import Objects
from bsfg.node.parts import Parts
from bsfg.node.spans import zones_of
from bsfg.wire.client import BoundaryClient
from bsfg.wire.service import Caller


class Bringing:
    """The check and the copying for one stream of a link; call it with the facts that are about to be put."""

    def __init__(self, parts: Parts, link: str, stream: str, client: BoundaryClient) -> None:
        self._parts, self._link, self._stream, self._client = parts, link, stream, client
        self._objects = Objects(parts)

    async def __call__(self, facts: FactBatch) -> None:
        """Raise `ZoneNotAllowed` for what the peer may not bring; fetch the artifacts that are missing."""
        self._check_zones(facts)
        if facts.column("artifact").null_count < len(facts):
            await self._bring_artifacts(facts)

    def _check_zones(self, facts: FactBatch) -> None:
        guard, now_unix_ms = self._parts.guard, self._parts.clock.now_unix_ms()
        zones = zones_of(facts, "from_zone"), zones_of(facts, "to_zone")
        decision = guard.matrix.decide_link(self._link, self._stream, *zones, now_unix_ms)
        if decision.error is not None:
            guard.audit(decision, Caller(address=f"link {self._link}"))
            raise ZoneNotAllowed(decision.error.message)

    async def _bring_artifacts(self, facts: FactBatch) -> None:
        store = self._parts.artifacts
        assert store is not None
        references = {text: orjson.loads(text) for text in facts.column("artifact").to_pylist() if text is not None}
        for reference in references.values():
            if (await store.claim([reference["digest"]]))[0] is None:
                await store.put(
                    reference["bucket"],
                    reference["key"],
                    await self._content(reference["bucket"], reference["key"], reference["digest"]),
                    media_type=reference["media_type"],
                    digest=reference["digest"],
                    size_bytes=reference["size_bytes"],
                )
        await self._objects.claim(facts)

    async def _content(self, bucket: str, key: str, digest: str) -> AsyncIterator[bytes]:
        _, chunks = await self._client.get_object(bucket, key, digest=digest)
        return chunks
