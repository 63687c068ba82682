"""Before facts of a link are put: may its peer bring them, and are the artifacts here that they name?"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from bsfg.batch import FactBatch
from bsfg.errors import ZoneNotAllowed
from bsfg.journey.artifacts import bring_artifacts
from bsfg.node.parts import Parts
from bsfg.node.spans import zones_of
from bsfg.wire.client import BoundaryClient
from bsfg.wire.service import Caller


class RemoteArtifacts:
    """The artifacts of a peer, by digest; ``came`` is called for every piece that comes."""

    def __init__(self, client: BoundaryClient, came: Callable[[], None]) -> None:
        self._client, self._came = client, came

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give the bytes of an artifact as they come, verified."""
        _, pieces = await self._client.get_object("", "", digest=digest)
        async with aclosing(pieces):
            async for piece in pieces:
                self._came()
                yield piece


class Bringing:
    """The check and the copying for one stream of a link; call it with the facts that are about to be put."""

    def __init__(self, parts: Parts, link: str, stream: str, client: BoundaryClient) -> None:
        self._parts, self._link, self._stream, self._client = parts, link, stream, client
        self._source = RemoteArtifacts(client, lambda: parts.board.spoke(link))

    async def __call__(self, facts: FactBatch) -> None:
        """Raise `ZoneNotAllowed` for what the peer may not bring; fetch the artifacts that are missing.

        `GateHeld` when an operator has closed the gate since these facts were asked for.
        """
        self._parts.board.check_open(self._link)
        # What is read again after a release may take longer than any turn.
        self._parts.board.spoke(self._link)
        self._check_zones(facts)
        if self._parts.artifacts is not None:
            await bring_artifacts(facts, self._source, self._parts.artifacts)
            self._parts.board.check_open(self._link)

    def _check_zones(self, facts: FactBatch) -> None:
        guard, now_unix_ms = self._parts.guard, self._parts.clock.now_unix_ms()
        zones = zones_of(facts, "from_zone"), zones_of(facts, "to_zone")
        decision = guard.matrix.decide_link(self._link, self._stream, *zones, now_unix_ms)
        if decision.error is not None:
            guard.audit(decision, Caller(address=f"link {self._link}"))
            raise ZoneNotAllowed(decision.error.message)
